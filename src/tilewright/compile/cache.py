"""Results of compilations on disk: one small JSON file each, named by a hash of everything that decides the binary."""

import contextlib
import dataclasses
import hashlib
import os
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from ..interpret.cutile import python_function
from ..launch.identity import cache_folder, source_digest
from .disassemble import find_tool
from .job import Compiled, Job

FORMAT = "1"  # raise it when Resources, or the way of reading them, changes


class ResultCache:
    """Compiled results by job. A folder that cannot be written is no error: everything is then compiled again.

    Readers and writers in any number of processes: a file appears whole, by a rename.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or cache_folder() / "compile"

    def get(self, job: Job) -> Compiled | None:
        try:
            found = msgspec.json.decode(self._path(job).read_bytes(), type=Compiled)
        except (OSError, msgspec.DecodeError):
            return None
        return dataclasses.replace(found, cached=True)

    def put(self, job: Job, compiled: Compiled) -> None:
        """Keeps a success. Failures are not kept: most are the environment's, and the next run may have another."""
        if compiled.resources is None:
            return
        path = self._path(job)
        part = path.with_suffix(f".{os.getpid()}.part")
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(msgspec.json.encode(compiled))
            part.replace(path)

    def _path(self, job: Job) -> Path:
        digest = hashlib.sha256()
        for part in (FORMAT, toolchain(), source_digest(python_function(job.find_kernel())), *job.identity):
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
