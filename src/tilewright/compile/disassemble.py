"""Registers, stack, shared memory and instructions of a cubin, read with NVIDIA's disassembler."""

import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

# After the line " Function <symbol>:": "  REG:168 STACK:0 SHARED:214120 LOCAL:0 ..."
USAGE = re.compile(r"REG:(?P<registers>\d+) STACK:(?P<stack>\d+) SHARED:(?P<shared>\d+) LOCAL:(?P<local>\d+)")
# "        /*0360*/               @!P0 UTMALDG.2D [UR12], [UR32], desc[URZ] ;   /* 0x... */"
OPCODE = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?\w+\s+)?(?P<opcode>[A-Z][A-Z0-9_]*)", re.MULTILINE)
# "        /*1a40*/              @P0 BRA 0x1070 ;"
LINE = re.compile(r"^\s+/\*(?P<at>[0-9a-f]{4,})\*/\s+(?:@!?\w+\s+)?(?P<opcode>[A-Z][A-Z0-9_]*)[^;]*?(?P<to>0x[0-9a-f]+)?\s*;", re.MULTILINE)
MATRIX = re.compile(r"(UTC\w*MMA|[A-Z]*GMMA|[A-Z]MMA)(\d\w*)?")

TOOLS = ("tileiras", "cuobjdump", "nvdisasm")
# What a loop that computes is full of; loops that wait or copy are not.
ARITHMETIC = frozenset(("FADD", "FFMA", "FMUL", "HADD2", "HFMA2", "HMUL2", "LOP3", "PRMT", "F2FP", "IMAD", "SHF"))
SHORT = 16  # instructions that a branch around one load leads around, at most
MOST_STACK = 64  # bytes of a thread that a config may spill and still be timed, or be a default


@dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel needs of an SM, and its instructions.

    registers: per thread at launch; a warp-specialised kernel moves them between its warps later.
    stack_bytes, local_bytes: per thread, in device memory; spilled registers, or an array that is
        indexed at run time.
    shared_bytes: per block, static: cuTile uses no other. From sm_90 on it includes the driver's 1
        KiB.
    instructions: how often each opcode occurs in the code, most frequent first; empty if they are
        not known.
    loop: instructions of the loop that computes most, 0 if there is none.
    serial_loads: loads from global memory that each stand in a branch of their own, as checked ones
        do: most wait for the one before.
    """

    registers: int
    stack_bytes: int
    local_bytes: int
    shared_bytes: int
    instructions: dict[str, int]
    loop: int = 0
    serial_loads: int = 0

    @property
    def spills(self) -> bool:
        """More than a few registers.

        Fewer are a cost, not a ban.
        """
        return self.stack_bytes + self.local_bytes > MOST_STACK

    @property
    def matrix(self) -> dict[str, int]:
        """Tensor-core instructions: HGMMA (Hopper), UTCHMMA (data-centre Blackwell), HMMA; Q.. for
        8 bits.
        """
        return {name: n for name, n in self.instructions.items() if MATRIX.fullmatch(name)}

    def count(self, opcode: str) -> int:
        return self.instructions.get(opcode, 0)


def find_tool(name: str) -> Path | None:
    """A CUDA command-line tool, or None.

    Looks in the pip packages (nvidia/cu13/bin), on PATH, then under CUDA_HOME.
    """
    spec = importlib.util.find_spec("nvidia")
    folders = [str(p) for root in (spec.submodule_search_locations if spec else None) or () for p in sorted(Path(root).glob("cu*/bin"))]
    folders += os.environ.get("PATH", "").split(os.pathsep)
    folders += [f"{os.environ[key]}/bin" for key in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(key)] + ["/usr/local/cuda/bin"]
    found = shutil.which(name, path=os.pathsep.join(folders))
    return Path(found) if found else None


def disassemble(cubin: bytes) -> Resources:
    """Reads the one kernel of `cubin`; its instructions are not known where nvdisasm fails.

    Raises ToolMissing, which names the package to install if cuobjdump or nvdisasm is missing.
    """
    tool, environ = _needed("cuobjdump"), os.environ | {"NVDISASM_PATH": str(_needed("nvdisasm").parent)}
    try:
        return parse(_printed([tool, "-res-usage", "-sass"], cubin, environ))
    except RuntimeError:  # nvdisasm 13.4 and 13.5 cannot read some NOPs of tileiras 13.4
        return usage(cubin)


def usage(cubin: bytes) -> Resources:
    """Registers, stack and shared memory of the one kernel of `cubin`.

    Takes 2 ms; disassembling its instructions would take 400.

    Raises ToolMissing, which names the package to install if cuobjdump is missing.
    """
    return parse(_printed([_needed("cuobjdump"), "-res-usage"], cubin, os.environ))


class ToolMissing(FileNotFoundError):
    """The compiler, or a tool that reads its binaries, is not installed."""


def require_tools() -> None:
    """Raises ToolMissing unless kernels can be compiled and their binaries be read."""
    for name in TOOLS:
        _needed(name)


def _needed(name: str) -> Path:
    path = find_tool(name)
    if path is None:
        raise ToolMissing(f"{name} must be installed (pip install 'tilewright[cuda]'), got none in the environment, PATH or CUDA_HOME")
    return path


def _printed(command: list[str | Path], cubin: bytes, environ: Mapping[str, str]) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([*command, file.name], capture_output=True, text=True, env=environ)
    if done.returncode != 0:
        raise RuntimeError(f"cuobjdump failed with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def parse(text: str) -> Resources:
    """The output of `cuobjdump -res-usage`, with or without `-sass`, on a cubin with one kernel."""
    usages = USAGE.findall(text)
    if not usages:
        raise ValueError("cuobjdump output must have a line 'REG:.. STACK:.. SHARED:..', got none")
    # A cubin may hold device functions too. The kernel is the one that needs most registers.
    registers, stack, shared, local = (max(int(of[i]) for of in usages) for i in range(4))
    mix = Counter(match["opcode"] for match in OPCODE.finditer(text))
    lines = [(int(line["at"], 16), line["opcode"], int(line["to"] or "0", 16)) for line in LINE.finditer(text)]
    return Resources(registers, stack, local, shared, dict(mix.most_common()), _hot_loop(lines), _serial_loads(lines))


def _hot_loop(lines: list[tuple[int, str, int]]) -> int:
    """Instructions of the shortest loop with at least half of the arithmetic that any loop has:
    one around it has little more, and those that wait inside of it have none. A jump back to
    behind one that led there is the end of what was moved out of the way.

    lines: of each instruction its address, its opcode, and the address that it names or 0.
    """
    index = {at: i for i, (at, _, _) in enumerate(lines)}
    before = list(accumulate((opcode in ARITHMETIC or bool(MATRIX.fullmatch(opcode)) for _, opcode, _ in lines), initial=0))
    starts = ((index.get(to, i), i) for i, (_, opcode, to) in enumerate(lines) if opcode == "BRA")
    loops = [
        (before[i + 1] - before[start], i + 1 - start)
        for start, i in starts
        if start < i and not lines[start][0] < lines[start - 1][2] <= lines[i][0]
    ]
    most = max(loops, default=(0, 0))[0]
    return min((length for work, length in loops if work and 2 * work >= most), default=0)


def _serial_loads(lines: list[tuple[int, str, int]]) -> int:
    """Loads that a short branch leads around, each alone."""
    index = {at: i for i, (at, _, _) in enumerate(lines)}
    loads = list(accumulate((opcode == "LDG" for _, opcode, _ in lines), initial=0))
    jumps = ((i, index.get(to, i)) for i, (_, opcode, to) in enumerate(lines) if opcode == "BRA")
    return len({loads[i] for i, end in jumps if i < end <= i + SHORT and loads[end] - loads[i] == 1})
