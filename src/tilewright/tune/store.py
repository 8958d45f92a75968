"""The file of tuned problems: whole at every moment, even if processes are killed or write at once.

A change is written to a file beside it, forced to disk and renamed over it (launch/files.py). A
lock guards that, and the operating system releases it if its process ends. So a reader sees the old
rows or the new ones, and once `add` has returned its rows are there.

If the path is no regular file, or cannot be written, each method raises OSError and changes
nothing.
"""

import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from ..launch.files import check_regular, replace_file
from ..launch.table import Row, read_rows, user_file

LONGEST_WAIT_S = 60.0  # to wait for another process, which writes within milliseconds


class Store:
    """Rows by key (launch.table.Row); a row replaces the one of the same key."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or user_file()

    def rows(self) -> list[Row]:
        """All rows. A file that holds anything else is first moved aside, with a warning."""
        try:
            return read_rows(self.path)
        except ValueError:
            with self._lock():
                return self._read()

    def add(self, rows: Iterable[Row]) -> None:
        """Adds rows; when this returns they are on disk."""
        with self._lock():
            merged = {row.key: row for row in (*self._read(), *rows)}
            self._write(merged.values())

    def keep(self, wanted: Callable[[Row], bool]) -> int:
        """Removes every row that is not wanted; returns how many."""
        with self._lock():
            rows = self._read()
            kept = [row for row in rows if wanted(row)]
            if len(kept) < len(rows):
                self._write(kept)
            return len(rows) - len(kept)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = self.path.with_suffix(".lock")
        if os.path.lexists(lock):  # filelock opens and empties whatever is there
            check_regular(lock, lock.lstat().st_mode)
        held = FileLock(lock)
        try:
            held.acquire(timeout=LONGEST_WAIT_S)
        except Timeout:
            wanted = f"free within {LONGEST_WAIT_S:g} s, got one that another process holds: end that process"
            raise TimeoutError(f"the lock {lock} must be {wanted}") from None
        try:
            yield
        finally:
            held.release()

    def _read(self) -> list[Row]:
        # Only under the lock: else the broken file could be another's good one when it is moved.
        try:
            return read_rows(self.path)
        except ValueError as error:
            aside = self.path.with_suffix(f".{time.strftime('%Y%m%d-%H%M%S')}.{os.getpid()}.corrupt")
            self.path.replace(aside)
            warnings.warn(f"{error}; moved aside to {aside}", stacklevel=3)
            return []

    def _write(self, rows: Iterable[Row]) -> None:
        replace_file(self.path, encoded(rows))


def encoded(rows: Iterable[Row]) -> bytes:
    """A JSON list, one row per line, sorted by key.

    So a diff of a table in the repository shows only the rows that changed.
    """
    lines = [msgspec.json.encode(row) for row in sorted(rows, key=lambda row: row.key)]
    return b"[\n" + b",\n".join(lines) + b"\n]\n"
