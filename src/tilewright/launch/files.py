"""Reads, replaces and appends to files that are not trusted, because another program may have made
them.

A path may name a FIFO, whose open waits for ever, a device without end, or a link to another file.
So reading takes regular files only, and writing follows no link. Errors are OSErrors.
"""

import contextlib
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFDIR: "a folder",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFLNK: "a link",
}
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)


def kind_of(mode: int) -> str:
    """What `mode`, of `stat`, names that is no regular file."""
    return _KINDS.get(stat.S_IFMT(mode), "something else")


def check_regular(path: Path, mode: int) -> None:
    """Raises OSError unless `mode`, of `stat`, is that of a regular file."""
    if not stat.S_ISREG(mode):
        raise OSError(f"{path} must be a regular file, got {kind_of(mode)}")


def open_regular(path: Path) -> BinaryIO:
    """A regular file to read, maybe through a link.

    Raises: FileNotFoundError; OSError for anything else that is no regular file.
    """
    check_regular(path, path.stat().st_mode)  # before the open, which does something to some devices
    file = os.fdopen(os.open(path, os.O_RDONLY | _NO_WAIT), "rb")
    try:
        check_regular(path, os.fstat(file.fileno()).st_mode)
    except OSError:
        file.close()
        raise
    return file


def read_regular(path: Path, most: int) -> bytes:
    """The content of a regular file of at most `most` bytes.

    Raises: as `open_regular`; ValueError for a larger one, before anything of it is read.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise ValueError(f"{path} must be a file of at most {most} bytes, got {size}")
        return file.read(most)


def replace_file(path: Path, content: bytes) -> None:
    """Puts a new file with `content` in the place of `path`, and makes its folder.

    The path names a whole file at every moment, and the new one is on disk when this returns. A
    link there is replaced, not followed. What a killed process left half written is removed.

    Raises: OSError for a device or the like, which root could replace.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISLNK(mode := path.lstat().st_mode):
            check_regular(path, mode)
    part = path.with_suffix(".part")
    part.unlink(missing_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def open_to_append(path: Path, *, buffering: int = -1) -> Any:
    """A regular file to read and append to, made where there is none; follows no link."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        check_regular(path, path.lstat().st_mode)  # the open names no kind, and does something to some devices
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | _NO_WAIT | _NO_LINK, 0o666), "a+b", buffering=buffering)
    check_regular(path, os.fstat(file.fileno()).st_mode)
    return file


def append_line(path: Path, line: bytes) -> None:
    """Appends a line at once, so that lines of several processes do not mix."""
    with open_to_append(path, buffering=0) as file:
        file.write(line + b"\n")


def write_json(path: Path, data: Any) -> None:
    """Puts JSON into a file, whole or not at all."""
    replace_file(path, json.dumps(data, indent=1).encode() + b"\n")
