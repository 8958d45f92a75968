"""`tilewright.compile_report(kernel, grid, args)`: what the compiler makes of any kernel."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ..interpret.api import check_call, kernel_name
from ..launch import Device, argument_error
from .disassemble import require_tools
from .job import Compiled, compiled

COLUMNS = ("arch", "GPU", "registers", "stack B", "shared B", "spill LDL/STL", "TMA loads", "matrix", "waves, if an SM holds one block")


@dataclass(frozen=True, slots=True)
class KernelReport:
    """One kernel, compiled for several architectures. `print` it, or read `report["sm_90"]`."""

    kernel: str
    grid: tuple[int, ...]
    by_arch: dict[str, Compiled]

    def __getitem__(self, arch: str) -> Compiled:
        return self.by_arch[arch]

    @property
    def ok(self) -> bool:
        """Whether all compiled and none spills more than a few registers."""
        return all(one.ok for one in self.by_arch.values())

    def __str__(self) -> str:
        lines = [COLUMNS, *(self._cells(arch, one) for arch, one in self.by_arch.items())]
        widths = [max(len(line[i]) for line in lines if len(line) == len(COLUMNS)) for i in range(len(COLUMNS))]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip() for line in lines]
        return "\n".join([f"{self.kernel}, grid {self.grid}", *table])

    def _cells(self, arch: str, one: Compiled) -> tuple[str, ...]:
        device, found = Device.for_arch(arch), one.resources
        if found is None:
            return arch, device.name, f"FAILED: {one.error}"
        matrix = " ".join(f"{name} {n}" for name, n in found.matrix.items()) or "-"
        spill = f"{found.count('LDL')}/{found.count('STL')}"
        numbers = map(str, (found.registers, found.stack_bytes, found.shared_bytes))
        return (arch, f"{device.name}, {device.sms} SMs", *numbers, spill, str(found.count("UTMALDG")), matrix, f"{prod(self.grid) / device.sms:.2f}")


def compile_report(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...] = (), arch: str | Sequence[str] = ("sm_90", "sm_121")) -> KernelReport:
    """Compiles a kernel as a launch with these arguments would, without a GPU.

        print(tilewright.compile_report(total, (4,), (x, out)))

    Args:
        kernel: a function decorated with @ct.kernel, hints included.
        grid: number of blocks along 1 to 3 axes.
        args: what the kernel takes. Tensors may be on any device, even "meta", because no element
            is read.
        arch: compiler targets: sm_80 (A100), sm_90 (H200), sm_100 (B200), sm_103 (B300), sm_120
            (RTX 5090), sm_121 (GB10).
    Returns: registers, stack, shared memory and instructions for each target. A target for which
        the kernel does not compile has the compiler's message as its `error`.
    Raises: TypeError or ValueError for a call that cannot be made, or an unknown target;
        ToolMissing, which says what to install, if there is no compiler.
    """
    values = check_call("compile_report", kernel, grid, args)
    archs = [arch] if isinstance(arch, str) else list(arch) if isinstance(arch, Sequence) else []
    if not archs:
        raise argument_error("arch", "a target or several, such as ('sm_90', 'sm_121')", arch)
    for name in archs:
        Device.for_arch(name)
    require_tools()
    return KernelReport(kernel_name(kernel), tuple(grid), {name: compiled(kernel, values, name) for name in archs})
