"""One kernel to compile, as data that another process can receive, and the result."""

import importlib
import io
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cuda.tile as ct
from cuda.tile.compilation import export_kernel

from ..interpret.cutile import python_function
from ..launch import Traced
from ..launch.launches import HINTS
from .disassemble import Resources, disassemble
from .signature import kernel_signature

TIMEOUT_S = 300.0  # of one compilation; the slowest healthy kernel seen takes a tenth of it


@dataclass(frozen=True, slots=True)
class Compiled:
    """The result of one compilation.

    resources: None if it failed.
    cubin_bytes: size of the binary, with its line table.
    compile_s: front end and compiler together; almost 0 if cuTile's own disk cache held the binary.
    error: the compiler's complaint on one line, "" if none.
    cached: read from our disk cache.
    """

    resources: Resources | None = None
    cubin_bytes: int = 0
    compile_s: float = 0.0
    error: str = ""
    cached: bool = False

    @property
    def ok(self) -> bool:
        """Compiled, with no spill."""
        return self.resources is not None and not self.resources.spills


@dataclass(frozen=True, slots=True)
class Job:
    """A kernel, named by where it lives, with its arguments, hints and target.

    args: meta tensors, scalars and constants, as the launch would pass them.
    hints: num_ctas, occupancy, num_worker_warps; None leaves the choice to the compiler.
    symbol: the mangled signature. Jobs with one `identity` make the same binary.
    """

    module: str
    kernel: str
    args: tuple[Any, ...]
    hints: tuple[int | None, ...]
    arch: str
    symbol: str

    @staticmethod
    def of(traced: Traced, arch: str) -> "Job":
        """Raises TypeError or OverflowError as the launch itself would."""
        launch, args = traced.launch, tuple(traced.args.values())
        function = python_function(launch.kernel)
        symbol = kernel_signature(launch.kernel, args).symbol
        hints = tuple(getattr(launch, name) for name in HINTS)
        return Job(function.__module__, function.__qualname__, args, hints, arch, symbol or "")

    @property
    def identity(self) -> tuple[Any, ...]:
        return self.module, self.kernel, self.symbol, self.hints, self.arch

    def find_kernel(self) -> Any:
        """The kernel object, in this process.

        Raises LookupError for one that is not an attribute of its module.
        """
        found: Any = importlib.import_module(self.module)
        for name in self.kernel.split("."):
            found = getattr(found, name, None)
        if not isinstance(found, ct.kernel):
            raise LookupError(f"kernel must be an attribute of its module, got {self.module}.{self.kernel}")
        return found

    def build(self) -> bytes:
        """The binary. Raises what cuTile or its compiler raise."""
        return binary(self._hinted(), self.args, self.arch)

    def run(self) -> Compiled:
        """Builds and disassembles."""
        try:
            kernel = self._hinted()
        except Exception as error:  # its module cannot be imported here
            return Compiled(error=one_line(error))
        return compiled(kernel, self.args, self.arch)

    def _hinted(self) -> Any:
        kernel = self.find_kernel()
        hints = {name: value for name, value in zip(HINTS, self.hints, strict=True) if value is not None}
        return kernel.replace_hints(**hints) if hints else kernel


def binary(kernel: Any, args: tuple[Any, ...], arch: str) -> bytes:
    """What a launch with these arguments would load. Raises what cuTile or its compiler raise."""
    cubin = io.BytesIO()
    with ct.compiler_timeout(TIMEOUT_S):
        export_kernel(kernel, [kernel_signature(kernel, args)], cubin, gpu_code=arch, output_format="cubin")
    return cubin.getvalue()


def compiled(kernel: Any, args: tuple[Any, ...], arch: str) -> Compiled:
    """Builds and disassembles.

    An error is part of the result: one broken kernel must not hide the others.
    """
    start = time.perf_counter()
    try:
        cubin = binary(kernel, args, arch)
        seconds = time.perf_counter() - start
        return Compiled(disassemble(cubin), len(cubin), round(seconds, 3))
    except Exception as error:
        return Compiled(compile_s=round(time.perf_counter() - start, 3), error=one_line(error))


def one_line(error: BaseException) -> str:
    """Type, message and source line of an exception, whitespace folded, at most 300 characters."""
    message, where = str(error), ""
    if isinstance(error, ct.TileError):  # its str() draws the source line and underlines it
        message = error.message
        if error.loc.filename:
            where = f" ({Path(error.loc.filename).name}:{error.loc.line})"
    text = re.sub(r"\s+", " ", message).strip()
    return f"{type(error).__name__}: {text}"[: 300 - len(where)] + where
