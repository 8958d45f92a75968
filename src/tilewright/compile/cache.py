"""Results of compilations on disk: one small JSON file each, named by a hash of everything that decides the binary."""

import contextlib
import dataclasses
import hashlib
import inspect
import os
import subprocess
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cuda.tile as ct
import msgspec
import platformdirs

from ..interpret.cutile import python_function
from .disassemble import find_tool
from .job import Compiled, Job

FORMAT = "1"  # raise it when Resources, or the way of reading them, changes


def cache_folder() -> Path:
    """Where Tilewright keeps what it can make again: TILEWRIGHT_CACHE_DIR, else the user's cache folder."""
    chosen = os.environ.get("TILEWRIGHT_CACHE_DIR")
    return Path(chosen) if chosen else platformdirs.user_cache_path("tilewright")


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


@cache
def source_digest(function: FunctionType) -> str:
    """A hash of a kernel's source, of the functions it calls, and of the module constants they read."""
    digest = hashlib.sha256()
    for part in _reached(function, set()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()


def _reached(function: FunctionType, seen: set[Any]) -> Iterator[str]:
    function = inspect.unwrap(function)
    if function in seen:
        return
    seen.add(function)
    yield inspect.getsource(function)
    names = set(_names(function.__code__))
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    known = {name: function.__globals__[name] for name in names if name in function.__globals__}
    known |= {name: cell.cell_contents for name, cell in cells}
    for name, value in sorted(known.items()):
        # `tiles.swizzle` reads the name `swizzle` too, so a module of tile code needs no walk of its own.
        inner = {f"{name}.{n}": vars(value)[n] for n in sorted(names) if n in vars(value)} if isinstance(value, ModuleType) else {name: value}
        for path, part in inner.items():
            if isinstance(part, FunctionType):
                if not part.__module__.startswith(ct.__name__):
                    yield from _reached(part, seen)
            elif not isinstance(part, (ModuleType, type)):
                text = repr(part)
                yield f"{path}={type(part).__name__ if ' at 0x' in text else text}"


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
