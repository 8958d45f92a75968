"""`tilewright profile`: what NVIDIA's profilers say of an op's kernels or of a generation.

Nsight Compute (ncu) runs an op's case and reads the counters of each of its kernels; Nsight Systems
(nsys) runs `tilewright generate` and sums its kernels. Both are separate programs that PyPI
does not have; without them the command says where to get them.
"""

import csv
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from .. import ops
from ..launch import Device, argument_error
from ..launch.console import plain_console
from ..launch.files import write_json
from ..testing import op_name, run_op
from ..testing.cases import cases
from .report import case_name

FOLDERS = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute", "/opt/nvidia/nsight-systems/bin")
INSTALL = {
    "ncu": "Nsight Compute (ncu) must be installed: apt-get install cuda-nsight-compute-13-0, or developer.nvidia.com/nsight-compute",
    "nsys": "Nsight Systems (nsys) must be installed: apt-get install cuda-nsight-systems-13-0, or developer.nvidia.com/nsight-systems",
}
COUNTERS = "the driver must let you read counters: run as root, or set NVreg_RestrictProfilingToAdminUsers=0 for the module nvidia"
SECTIONS = ("LaunchStats", "Occupancy", "SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "WarpStateStats", "SourceCounters")
# What is shown of a kernel: ncu's name and ours.
NUMBERS = {
    "Duration": "time",
    "Registers Per Thread": "registers",
    "Theoretical Occupancy": "occupancy, possible",
    "Achieved Occupancy": "occupancy, achieved",
    "Compute (SM) Throughput": "compute, of its peak",
    "Memory Throughput": "memory, of its peak",
    "DRAM Throughput": "device memory, of its peak",
    "L2 Cache Throughput": "L2, of its peak",
    "SM: Pipe Tensor Cycles Active": "tensor cores, of their cycles",
    "Executed Ipc Active": "instructions a cycle",
}
STALL, MOST_STALLS = "Stall ", 5
SAMPLES, WAITS = "# Samples", "stall_"  # columns of ncu's table of instructions
RUNS = 3  # of the op; the last call is profiled, after everything has compiled


def profile_command(what: str, *, case: str = "", lines: int = 0, generate: Sequence[str] = (), json_file: Path | None = None) -> int:
    """Profiles an op's case, or a generation. Returns the exit code of the profiler.

    what: an op, or "generate". case: text in the name of a benchmark case of the op; the first case
        that has it. lines: of each kernel also so many instructions at which its warps wait most.
        generate: the options of `tilewright generate`.
    Raises: ValueError for an unknown op or case; FileNotFoundError that says how to install the
        profiler.
    """
    console = plain_console()
    if what == "generate":
        found = _generation(generate)
        _show_sums(console, found)
    else:
        (op,) = ops.named([what])
        problem = _problem(op, case)
        console.print(f"{what} {case_name(problem)}", style="bold")
        found = _kernels(what, case_name(problem), lines)
        for kernel in found:
            _show_kernel(console, kernel)
        _show_roof(console, problem, found)
    if json_file:
        write_json(json_file, found)
    return 0


def tool(name: str) -> str:
    """Path of a profiler. Raises FileNotFoundError that says how to install it."""
    path = shutil.which(name) or next((at for folder in FOLDERS if (at := shutil.which(name, path=folder))), None)
    if path is None:
        raise FileNotFoundError(INSTALL[name])
    return path


def _problem(op: ModuleType, case: str) -> Any:
    known = cases(op, "bench")
    found = next((p for p in known if case in case_name(p)), None)
    if found is None:
        raise argument_error("case", f"in the name of one of the {len(known)} benchmark cases of {op_name(op)}, such as {case_name(known[0])}", case)
    return found


def _kernels(op: str, case: str, lines: int) -> list[dict[str, Any]]:
    """What ncu counted for each kernel of the last run."""
    mine = [sys.executable, "-m", "tilewright.bench.profile", op, case]
    sections = [word for section in SECTIONS for word in ("--section", section)]
    marked = ("--nvtx", "--nvtx-include", "profiled/")
    with tempfile.TemporaryDirectory(prefix="tilewright-profile-") as folder:
        file = str(Path(folder, "op.ncu-rep"))
        _run([tool("ncu"), "--export", file, *marked, *sections, *mine])
        found = kernels_of(_run([tool("ncu"), "--import", file, "--csv", "--page", "details", "--print-details", "all"]))
        if lines:
            for kernel, waits in zip(found, waits_of(_run([tool("ncu"), "--import", file, "--csv", "--page", "source"]), lines), strict=True):
                kernel["lines"] = waits
    return found


def _generation(options: Sequence[str]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="tilewright-profile-") as folder:
        file = Path(folder, "generate.nsys-rep")
        mine = [sys.executable, "-m", "tilewright", "generate", *options]
        _run([tool("nsys"), "profile", "--trace", "cuda", "--cuda-graph-trace", "node", "--output", str(file), *mine])
        return sums_of(_run([tool("nsys"), "stats", "--report", "cuda_gpu_kern_sum", "--format", "csv", "--quiet", str(file)]))


def _run(command: Sequence[str]) -> str:
    """What a program printed. If it failed, raises OSError with its last lines."""
    done = subprocess.run(list(command), capture_output=True, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}, check=False)
    text = done.stdout + done.stderr
    if "ERR_NVGPUCTRPERM" in text:
        raise PermissionError(COUNTERS)
    if done.returncode:
        last = " ".join([line.strip() for line in text.splitlines() if line.strip()][-3:])
        raise OSError(f"{Path(command[0]).name} must end with exit code 0, got {done.returncode}: {last}")
    return done.stdout


def _rows(text: str, first: str) -> Iterable[dict[str, str]]:
    """The lines of the table in a profiler's output whose head names the column `first`."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if f'"{first}"' in line or line.startswith(f"{first},") or f",{first}" in line), None)
    if start is None:
        raise OSError(f"the profiler's table must have a column {first!r}, got {' '.join(text.split())[-200:]!r}")
    return csv.DictReader(io.StringIO("\n".join(lines[start:])))


def kernels_of(text: str) -> list[dict[str, Any]]:
    """ncu's CSV (one line a counter) as one dictionary a launch: its name, the numbers of
    `NUMBERS` in their order, and its stalls, largest first.
    """
    found: dict[str, dict[str, Any]] = {}
    for row in _rows(text, "Metric Name"):
        kernel = found.setdefault(row["ID"], {"kernel": _plain_name(row["Kernel Name"]), "numbers": {}, "stalls": {}})
        name = row["Metric Name"]
        if name in NUMBERS:
            kernel["numbers"].setdefault(NUMBERS[name], f"{row['Metric Value']} {row['Metric Unit']}".strip())
        elif name.startswith(STALL):
            kernel["stalls"][name.removeprefix(STALL).lower()] = _number(row["Metric Value"])
    for kernel in found.values():
        kernel["numbers"] = {name: kernel["numbers"][name] for name in NUMBERS.values() if name in kernel["numbers"]}
        kernel["stalls"] = dict(sorted(kernel["stalls"].items(), key=lambda item: -item[1])[:MOST_STALLS])
    return list(found.values())


def waits_of(text: str, most: int) -> list[list[dict[str, Any]]]:
    """ncu's tables of instructions: of each kernel the instructions that most of its samples were
    at, in the order of the program: their share, why, how often they ran, and what they are.
    """
    found = []
    for table in text.split('"Kernel Name",')[1:]:
        rows = list(csv.DictReader(io.StringIO(table.partition("\n")[2])))
        total = sum(_number(row[SAMPLES]) for row in rows) or 1.0
        worst = sorted(sorted(range(len(rows)), key=lambda i: -_number(rows[i][SAMPLES]))[:most])
        found.append([_wait(rows[i], i, total) for i in worst])
    return found


def _wait(row: dict[str, str], index: int, total: float) -> dict[str, Any]:
    why = max((name for name in row if name and name.startswith(WAITS) and "(" not in name), key=lambda name: _number(row[name]), default="")
    share = round(100 * _number(row[SAMPLES]) / total, 1)
    return {
        "line": index,
        "share_pct": share,
        "why": why.removeprefix(WAITS),
        "times": int(_number(row["Instructions Executed"])),
        "sass": row["Source"].strip(),
    }


def _plain_name(name: str) -> str:
    """The name of a kernel's function, behind which cuTile puts the types of a launch."""
    return re.sub(r"_Kt\d+_.*", "", name)


def sums_of(text: str) -> list[dict[str, Any]]:
    """nsys' sums over kernels, most first."""
    return [
        {"kernel": row["Name"], "ms": _number(row["Total Time (ns)"]) / 1e6, "calls": int(row["Instances"]), "share_pct": _number(row["Time (%)"])}
        for row in _rows(text, "Time (%)")
        if row.get("Name")
    ]


def _number(text: str) -> float:
    return float(text.replace(",", "") or 0)


def _show_kernel(console: Console, kernel: dict[str, Any]) -> None:
    table = Table(title=f"\n{kernel['kernel']}", title_justify="left", box=None, pad_edge=False, show_header=False)
    for name, value in kernel["numbers"].items():
        table.add_row(name, value)
    stalls = ", ".join(f"{name} {value:.1f}" for name, value in kernel["stalls"].items())
    table.add_row("stalls, cycles an instruction", stalls or "none told")
    console.print(table)
    if "lines" in kernel:
        table = Table(box=None, pad_edge=False, title="where warps wait", title_justify="left")
        for column in ("line", "share", "times"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("why", no_wrap=True)
        table.add_column("instruction", overflow="fold")
        for line in kernel["lines"]:
            table.add_row(str(line["line"]), f"{line['share_pct']:.1f} %", f"{line['times']:,}", line["why"], line["sass"])
        console.print(table)


def _show_sums(console: Console, found: Sequence[dict[str, Any]]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in ("kernel", "ms", "calls", "share"):
        table.add_column(column, justify="left" if column == "kernel" else "right", overflow="fold")
    for kernel in found:
        table.add_row(kernel["kernel"], f"{kernel['ms']:.2f}", str(kernel["calls"]), f"{kernel['share_pct']:.1f} %")
    console.print(table)


def _show_roof(console: Console, problem: Any, found: Sequence[dict[str, Any]]) -> None:
    """Prints the least time of the problem, to compare the counters with."""
    device = Device.of(torch.empty(0, device="cuda"))
    memory_us, compute_us = problem.cost().times_us(device.memory_gbs, device.tflops)
    console.print(f"\nroof on {device.name}: {memory_us:.1f} us for its bytes, {compute_us:.1f} us for its operations; {len(found)} kernels")


def run_marked(op: ModuleType, problem: Any, device: torch.device) -> None:
    """Runs a case a few times, the last time in an NVTX range that ncu profiles."""
    inputs = problem.inputs(device)
    with torch.inference_mode():
        for i in range(RUNS):
            torch.cuda.synchronize(device)
            if i == RUNS - 1:
                torch.cuda.nvtx.range_push("profiled")
            run_op(op, inputs)
            torch.cuda.synchronize(device)
        torch.cuda.nvtx.range_pop()


if __name__ == "__main__":
    (_op,) = ops.named([sys.argv[1]])
    run_marked(_op, next(p for p in cases(_op, "bench") if case_name(p) == sys.argv[2]), torch.device("cuda", torch.cuda.current_device()))
