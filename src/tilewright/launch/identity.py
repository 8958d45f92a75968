"""What a stored result belongs to: the source of a kernel, the compiler's version, and the folder where results are kept."""

import hashlib
import inspect
import os
import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import cuda.tile as ct
import platformdirs

from ..interpret.cutile import compiler_banner, python_function


def cache_folder() -> Path:
    """Where Tilewright keeps what it can make again: TILEWRIGHT_CACHE_DIR, else the user's cache folder."""
    chosen = os.environ.get("TILEWRIGHT_CACHE_DIR")
    return Path(chosen) if chosen else platformdirs.user_cache_path("tilewright")


@cache
def compiler() -> str:
    """cuda-tile and the tileiras it calls, as `cuda-tile 1.7.0 tileiras 13.4.92`; without a compiler only the first."""
    found = re.search(r"\bV(\d+(?:\.\d+)+)", compiler_banner())
    return f"cuda-tile {version('cuda-tile')}" + (f" tileiras {found[1]}" if found else "")


@cache
def source_digest(function: FunctionType) -> str:
    """A hash of a function's source, of the functions and kernels it uses, and of the module constants they read."""
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
            if isinstance(part, ct.kernel):
                yield from _reached(python_function(part), seen)
            elif isinstance(part, FunctionType):
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
