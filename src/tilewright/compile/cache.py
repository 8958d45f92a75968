"""Compilation results on disk: a JSON file each, named by a hash of all that decides the binary."""

import contextlib
import dataclasses
import hashlib
import os
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from ..launch.files import read_regular
from ..launch.identity import cache_folder, kernel_digest
from .disassemble import find_tool
from .job import Compiled, Job

LONGEST = 1 << 20  # bytes of a result: far more than one has
FORMAT = "4"  # raise it when Resources, or the way of reading them, changes


class ResultCache:
    """Compiled results by job.

    If the folder cannot be written, everything is compiled again.

    Any number of processes may read and write: a file appears whole, by a rename.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or cache_folder() / "compile"

    def get(self, job: Job) -> Compiled | None:
        try:
            found = msgspec.json.decode(read_regular(self._path(job), LONGEST), type=Compiled)
        except (OSError, ValueError, RecursionError):  # also what msgspec raises
            return None
        return dataclasses.replace(found, cached=True)

    def put(self, job: Job, compiled: Compiled) -> None:
        """Keeps a success, not a failure: its cause is often the environment, which may change."""
        if compiled.resources is None:
            return
        path = self._path(job)
        part = path.with_suffix(f".{os.getpid()}.part")
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            part.unlink(missing_ok=True)
            try:
                with part.open("xb") as file:  # follows no link, and waits for no FIFO
                    file.write(msgspec.json.encode(compiled))
                part.replace(path)
            except OSError:
                part.unlink(missing_ok=True)  # of a full disk

    def _path(self, job: Job) -> Path:
        digest = hashlib.sha256()
        for part in (FORMAT, toolchain(), kernel_digest(job.find_kernel()), *job.identity):
            digest.update(repr(part).encode() + b"\0")
        name = digest.hexdigest()
        return self.folder / name[:2] / f"{name}.json"


@cache
def toolchain() -> str:
    """Versions of everything between a kernel's source and the report, as one line."""
    packages = ("cuda-tile", "nvidia-cuda-tileiras", "nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-cuobjdump", "nvidia-cuda-nvdisasm")
    parts = []
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            parts.append(f"{package} {version(package)}")
    tileiras = find_tool("tileiras")
    if tileiras and not any(p.startswith("nvidia-cuda-tileiras") for p in parts):  # of a toolkit: its version is not a package's
        done = subprocess.run([str(tileiras), "--version"], capture_output=True, text=True)
        parts.append(f"{tileiras} {done.stdout.strip()}")
    return ", ".join(parts)
