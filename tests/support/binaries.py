"""What the compiler made of the kernels that tests look at, kept in a file that is checked in.

To make the same binaries again took a quarter of the suite's time. An entry is a file of
`ResultCache`, under the name that it has there: a hash of the kernel with all that it reaches, its
arguments, the target and the compiler. So what has changed is not found, and is compiled.
"""

import dataclasses
import gzip
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # pytest-xdist's first process imports this file, and neither torch nor tilewright
    from tilewright.compile import Compiled, Resources
    from tilewright.compile.job import Job

RECORD = Path(__file__).resolve().parents[1] / "binaries.jsonl.gz"
NOT_KEPT = {"compile_s": 0.0, "cubin_bytes": 0}  # they depend on the machine and on the sources' folder


def seed(folder: Path, record: Path = RECORD) -> None:
    """Puts the record into a cache folder."""
    if not record.exists():
        return
    for line in gzip.decompress(record.read_bytes()).decode().splitlines():
        name, kept = json.loads(line)
        path = folder / "compile" / name[:2] / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(kept))


def pack(folder: Path, record: Path = RECORD) -> int:
    """Makes the record of a cache folder, and says how many binaries it holds."""
    paths = sorted((folder / "compile").rglob("*.json"), key=lambda path: path.name)
    lines = [json.dumps([path.stem, json.loads(path.read_text()) | NOT_KEPT], separators=(",", ":")) for path in paths]
    record.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0))
    return len(lines)


def made(job: "Job", record: Path = RECORD) -> "Compiled":
    """What the compiler makes of a kernel: from the cache, else now.

    A sixteenth of the record is compiled all the same, another one after each renewal, and must be
    what was kept.
    """
    from tilewright.compile import ResultCache

    results = ResultCache()
    kept = results.get(job)
    if kept is not None and not results._path(job).name.startswith(digit(record)):
        return kept
    now = job.run()
    assert now.resources is not None, now.error
    if kept is None:
        results.put(job, now)
    else:
        what = f"{job.kernel} for {job.arch} must be what tests/{record.name} has (python tools/binaries.py --all renews it)"
        assert told(now.resources) == told(kept.resources), what
    return now


def told(resources: "Resources") -> "Resources":
    """Without what the compiler does otherwise in a folder of another name: instructions of the
    uniform data path (the solve of gated_delta_rule has 2896 or 2904), those that load tiles aside,
    and with them the length of the loop.
    """
    counts = {name: count for name, count in resources.instructions.items() if name != "NOP" and (name[0] != "U" or name.startswith("UT"))}
    return dataclasses.replace(resources, instructions=counts, loop=0)


@cache
def digit(record: Path) -> str:
    """The first digit of the names whose binaries are made again."""
    return hashlib.sha256(record.read_bytes()).hexdigest()[0] if record.exists() else "none"
