"""Raw times: every (problem, config, time) that was measured on a GPU, in files that are small,
read op by op, and never half a row.

<folder>/<gpu>/<op>.jsonl      grows a row at a time while something is measured; what a killed
process left of a row is cut off
<folder>/<gpu>/<op>.jsonl.gz   packed: sorted, the same bytes for the same rows

Those that ship are in `SHIPPED`; the user's are in the cache folder.
"""

import gzip
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from filelock import FileLock

from ..launch.files import open_regular, open_to_append, replace_file
from ..launch.identity import cache_folder
from ..launch.table import Time

SHIPPED = Path(__file__).resolve().parent / "raw"
Plain = dict[str, Any]


class Timed(msgspec.Struct, frozen=True, omit_defaults=True, rename={
    "problem": "p", "config": "c", "time_us": "t", "spread_us": "s", "spill_bytes": "b", "digest": "k", "compiler": "v", "error": "e",
}):  # fmt: skip
    """One config of one problem, measured.

    problem, config: fields as JSON types. time_us: of one call, None where the config broke the GPU
        and is not to be tried again. If a search took three captures, this is the median one.
    spread_us: half the distance between the 20th and 80th percentile of the passes; None for a
        rough time, which tells 5 %.
    spill_bytes: of stack. digest, compiler: as in a tuned row (launch.table.Row). error: why there
        is no time.
    """

    problem: Plain
    config: Plain
    digest: str
    compiler: str
    time_us: Time | None = None
    spread_us: float | None = None
    spill_bytes: int = 0
    error: str = ""

    @property
    def key(self) -> bytes:
        """The key of a row. Rows with the same key measured the same config of the same problem."""
        return msgspec.json.encode((self.problem, self.config, self.digest, self.compiler))


def user_folder() -> Path:
    return cache_folder() / "raw"


class Log:
    """The rows of one op on one GPU, to add to."""

    def __init__(self, folder: Path, gpu: str, op: str) -> None:
        self.path = _stem(folder, gpu, op).with_suffix(".jsonl")

    def add(self, rows: Iterable[Timed]) -> None:
        """Appends rows; when this returns they are in the file. Several processes may do so."""
        lines = b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
        lock = cache_folder() / f"raw-{self.path.parent.name}-{self.path.stem}.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(lock), open_to_append(self.path) as file:
            _cut(file)
            file.write(lines)


def read(folder: Path, gpu: str, op: str) -> list[Timed]:
    """All rows of an op on a GPU, packed ones first. Raises ValueError naming file and line."""
    stem, rows = _stem(folder, gpu, op), []
    for path in (stem.with_suffix(".jsonl.gz"), stem.with_suffix(".jsonl")):
        if path.exists():
            with open_regular(path) as file:
                data = file.read()
            if path.suffix == ".gz":
                try:
                    data = gzip.decompress(data)
                except (OSError, EOFError, zlib.error) as error:
                    raise ValueError(f"{path} must be a whole gzip file of raw times, got one that does not unpack: {error}") from None
            rows += _decoded(path, data[: data.rfind(b"\n") + 1])  # behind the last newline: a row that was being written
    return rows


def ops_of(folder: Path, gpu: str) -> list[str]:
    """The ops with rows for a GPU."""
    return sorted({path.name.partition(".")[0] for path in _stem(folder, gpu, "").parent.glob("*.jsonl*")})


def gpus_of(folder: Path) -> list[str]:
    """The GPUs with rows."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []


def pack(source: Path, target: Path, gpu: str, op: str) -> tuple[int, int]:
    """Writes the rows of both folders as one packed file of `target`; of rows with the same
    key the last one counts.

    Returns how many rows there are and their size in bytes.
    """
    known = [*read(target, gpu, op), *(read(source, gpu, op) if source != target else ())]
    rows = {row.key: row for row in known}
    data = b"".join(msgspec.json.encode(rows[key]) + b"\n" for key in sorted(rows))
    path = _stem(target, gpu, op).with_suffix(".jsonl.gz")
    replace_file(path, gzip.compress(data, 9, mtime=0))
    path.with_suffix("").unlink(missing_ok=True)  # <op>.jsonl of the target, which is in the packed file now
    return len(rows), path.stat().st_size


def _stem(folder: Path, gpu: str, op: str) -> Path:
    return folder / gpu.replace(" ", "_") / f"{op}.jsonl"


def _cut(file: Any) -> None:
    """Removes what lies behind the last newline."""
    end = file.seek(0, 2)
    file.seek(max(0, end - (1 << 16)))
    tail = file.read()
    whole = tail.rfind(b"\n") + 1
    if whole < len(tail):
        file.truncate(end - len(tail) + whole)
        file.seek(0, 2)


def _decoded(path: Path, data: bytes) -> list[Timed]:
    decode, rows = msgspec.json.Decoder(Timed).decode, []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            rows.append(decode(line))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"{path}:{number} must be a row of raw times, got one that does not decode: {error}") from None
    return rows
