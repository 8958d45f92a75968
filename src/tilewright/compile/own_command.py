"""`tilewright interpret` and `compile` of FILE.py:KERNEL: your own kernels."""

import importlib.util
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import cuda.tile as ct
import msgspec

from ..interpret.api import interpret
from ..interpret.errors import KernelError
from ..launch.console import plain_console
from ..launch.files import write_json
from .cache import toolchain
from .own import compile_report

Call = tuple[Any, tuple[int, ...], tuple[Any, ...]]


def call_of(name: str) -> Call:
    """Kernel, grid and arguments of "FILE.py:KERNEL".

    The file has a function `example_KERNEL` that makes the grid and the arguments.
    Raises: ValueError that says what is missing, and what to write, or what the file itself raises.
    """
    file, _, kernel_name = name.rpartition(":") if ".py:" in name else (name, "", "")
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"FILE.py:KERNEL must name a Python file that exists, got {name!r}")
    module = _run(path, lambda: _module(path))
    known = [name for name, value in vars(module).items() if isinstance(value, ct.kernel)]
    if kernel_name not in known:
        named = ", ".join(known) or "no function with @ct.kernel"
        got = repr(kernel_name) if kernel_name else "no name"
        raise ValueError(f"the kernel must be named, as in {file}:{known[0] if known else 'KERNEL'}; the file has {named}, got {got}")
    make = getattr(module, f"example_{kernel_name}", None)
    if not callable(make):
        raise ValueError(f"{file} must have a function example_{kernel_name}() that returns the grid and the arguments: `return (4,), (x, out)`")
    made = _run(path, make)
    if not isinstance(made, tuple) or len(made) != 2:
        raise ValueError(f"example_{kernel_name}() must return (grid, args), got {type(made).__name__}")
    return getattr(module, kernel_name), *made


def _run(path: Path, code: Callable[[], Any]) -> Any:
    """Runs code of the file. Raises ValueError, which names the line, for what it raises, and where
    it exits.
    """
    try:
        return code()
    except ImportError:  # it says what to install
        raise
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        place = f"{path}:{lines[-1]}" if lines else str(path)
        raise ValueError(f"{place} must run, got {type(error).__name__}: {error}") from error


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # a dataclass looks for its module there
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def interpret_command(name: str, *, json_file: Path | None = None, trace: Path | None = None, **options: Any) -> int:
    """Runs a kernel of a file without a GPU.

    Returns 1 if it does something undefined or is no cuTile code, else 0.

    options: those of `interpret`.
    """
    console = plain_console()
    kernel, grid, args = call_of(name)
    looked = [word.replace("_", " ") for word, value in options.items() if value is True]
    error = None
    try:
        recorded = interpret(kernel, grid, args, trace=trace or False, **options)
    except (KernelError, ct.TileError) as found:
        error = found
        console.print(str(found).rstrip(), style="red")
        if trace and isinstance(found, KernelError):
            console.print(f"drawn in {trace}, up to the error")
    else:
        console.print(f"{name}: all blocks of grid {grid} ran; nothing wrong was found (checked: {', '.join(['bounds', *looked])})")
        if recorded is not None:
            console.print(str(recorded))
            console.print(f"drawn in {trace}")
    if json_file:
        write_json(json_file, {"kernel": name, "grid": grid, "looked_for": looked, "error": None if error is None else _as_json(error)})
    return 0 if error is None else 1


def _as_json(error: KernelError | ct.TileError) -> dict[str, Any]:
    """what, and where: the block that ran, if one did, and places in the source."""
    if isinstance(error, KernelError):
        return {"what": error.what, "block": error.block, "places": error.places}
    loc = error.loc
    return {"what": error.message, "block": None, "places": [] if loc.is_unknown() else [(loc.filename, loc.line, loc.function.name)]}


def compile_own_command(names: Sequence[str], *, archs: Sequence[str], json_file: Path | None = None) -> int:
    """Compiles kernels of files. Returns 1 if one spills or fails, else 0."""
    console = plain_console()
    reports = []
    for name in names:
        reports.append(compile_report(*call_of(name), archs))
        console.print(str(reports[-1]))
    if json_file:
        rows = [{"kernel": name, "archs": msgspec.to_builtins(report.by_arch)} for name, report in zip(names, reports, strict=True)]
        write_json(json_file, {"toolchain": toolchain(), "kernels": rows})
    return 0 if all(report.ok for report in reports) else 1
