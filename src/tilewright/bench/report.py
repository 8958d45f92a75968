"""A measured case as a row: printed as a line, kept as a JSON object."""

import dataclasses
import datetime
import json
import math
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..launch import dtype_name
from ..launch.table import plain
from ..testing import Accuracy
from .ceilings import Ceilings
from .results import against_peers, judge
from .timer import Timing


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One case of an op on a GPU. Times are in microseconds, rates in GB/s and TFLOP/s.

    roof_pct: the least possible time as a percentage of ours. The least time is that of the bytes
        or of the flops at the measured ceiling, whichever is larger.
    bound: "memory" or "compute", whichever sets the least time.
    peers: name -> their time / ours, so above 1 ours is faster.
    absent: name -> error of a peer that could not run the case.
    source: where the config came from: a table, else what ordered the space (launch.Choice);
        "search" for one that was given.
    warm_us, peer_warm_us: on the same inputs again and again, if they fit in the L2 cache, as for a
        call right after another.
    backends: peer -> library, backend and version.
    clocks: SM and memory clock and board power, sampled while the case ran.
    draw_seed: the seed of a drawn problem.
    took_s: seconds of wall time by phase.
    """

    op: str
    case: str
    problem: dict[str, Any]
    dtype: str
    gpu: str
    time_us: float
    spread_us: float
    gbs: float
    tflops: float
    roof_pct: float
    bound: str
    floor_us: float
    launch_us: float
    peers: dict[str, float]
    peer_us: dict[str, float]
    absent: dict[str, str]
    config: str
    source: str
    accuracy: dict[str, float]
    ceilings: dict[str, float]
    versions: dict[str, str]
    clocks: str
    date: str
    command: str
    warm_us: float | None = None
    peer_warm_us: dict[str, float] = dataclasses.field(default_factory=dict)
    backends: dict[str, str] = dataclasses.field(default_factory=dict)
    draw_seed: int | None = None
    took_s: dict[str, float] = dataclasses.field(default_factory=dict)

    def line(self) -> str:
        rate = f"{self.gbs:7.0f} GB/s" if self.bound == "memory" else f"{self.tflops:5.0f} TFLOP/s"
        floor = f" | launch floor {self.launch_us:.1f} us" if self.time_us < 20 else ""
        floor += f" | warm L2 {self.warm_us:.1f} us" if self.warm_us else ""
        peers = " ".join([*(f"{name} {ratio:.2f}x" for name, ratio in self.peers.items()), *(f"{name} failed" for name in self.absent)])
        head = f"{self.op} {self.case}"
        return (
            f"{head:<58} | {self.time_us:9.1f} us +-{self.spread_us:.1f} | {rate} | {self.roof_pct:3.0f}% of roof"
            f"{floor} | {peers or 'no peer'} | {self.clocks or 'clocks unknown'} | {self.config} {self.source}"
        )

    def json(self) -> str:
        return json.dumps(dataclasses.asdict(self))


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """The result of timing one case.

    times, warm: of "ours" and of each peer, on inputs from memory and on inputs in the L2 cache;
    warm is empty where they do not fit. written_bytes: of our outputs.
    found: the verdict of the accuracy rule. The others are fields of `Row`.
    """

    times: Mapping[str, Timing]
    warm: Mapping[str, Timing] = dataclasses.field(default_factory=dict)
    written_bytes: int = 0
    config: Any = None
    source: str = "default"
    found: Sequence[Accuracy] = ()
    absent: dict[str, str] = dataclasses.field(default_factory=dict)
    clocks: str = ""
    backends: dict[str, str] = dataclasses.field(default_factory=dict)
    took_s: dict[str, float] = dataclasses.field(default_factory=dict)


def make_row(op: str, problem: Any, gpu: str, ceilings: Ceilings, measured: Measured) -> Row:
    """The row of a case. op, gpu: their names."""
    cost, ours = problem.cost(), measured.times["ours"]
    # The roof is the copy rate if an op writes at least a quarter of its traffic, else the read
    # rate.
    memory_gbs = ceilings.copy_gbs if 4 * measured.written_bytes >= cost.size_bytes else ceilings.read_gbs
    tflops = ceilings.tflops * (2 if problem.dtype.itemsize == 1 else 1)  # tensor cores multiply 8-bit operands twice as fast
    memory_us, compute_us = cost.times_us(memory_gbs, tflops)
    peer_us = {name: timing.time_us for name, timing in measured.times.items() if name != "ours"}
    return Row(
        op=op,
        case=case_name(problem),
        problem=plain(problem),
        dtype=dtype_name(problem.dtype),
        gpu=gpu,
        time_us=round(ours.time_us, 3),
        spread_us=round(ours.spread_us, 3),
        gbs=round(cost.size_bytes / ours.time_us / 1e3, 1),
        tflops=round(cost.flops / ours.time_us / 1e6, 2),
        roof_pct=round(100 * max(memory_us, compute_us) / ours.time_us, 1),
        bound="memory" if memory_us >= compute_us else "compute",
        floor_us=round(max(memory_us, compute_us), 3),
        launch_us=round(ceilings.launch_us, 2),
        peers={name: round(t / ours.time_us, 4) for name, t in peer_us.items()},
        peer_us={name: round(t, 3) for name, t in peer_us.items()},
        absent=measured.absent,
        config=str(measured.config),
        source=measured.source,
        accuracy={
            "rms_ratio": round(max((a.rms_ratio for a in measured.found), default=math.nan), 3),
            "worst_ratio": round(max((a.worst_ratio for a in measured.found), default=math.nan), 3),
        },
        ceilings={k: round(v, 1) for k, v in dataclasses.asdict(ceilings).items()},
        versions=versions(),
        clocks=measured.clocks,
        date=datetime.date.today().isoformat(),
        command=command(),
        warm_us=round(measured.warm["ours"].time_us, 3) if measured.warm else None,
        peer_warm_us={name: round(t.time_us, 3) for name, t in measured.warm.items() if name != "ours"},
        backends=measured.backends,
        took_s={name: round(seconds, 3) for name, seconds in measured.took_s.items()},
    )


def case_name(problem: Any) -> str:
    """`rows=4096 cols=4096 bfloat16`: the fields that differ from their defaults."""
    parts = []
    for field in dataclasses.fields(problem):
        value = getattr(problem, field.name)
        if isinstance(value, torch.dtype):
            parts.append(dtype_name(value))
        elif field.default is dataclasses.MISSING or value != field.default:
            parts.append(field.name if value is True else f"{field.name}={value}")
    return " ".join(parts)


def summary(rows: Iterable[Row]) -> list[str]:
    """Geometric mean, worst and best ratio to every peer of every op, and to the fastest peer of
    each case; losses included.
    """
    plain: list[dict[str, Any]] = [{"op": row.op, "peers": row.peers} for row in rows]
    found = [(a.op, a.peer, a.mean, a.worst, a.best, f"{a.cases} cases") for a in against_peers(plain)]
    for op in dict.fromkeys(row["op"] for row in plain):
        of = judge(op, [row for row in plain if row["op"] == op])
        if of.ratios:
            found.append((op, "the fastest peer of each", of.mean, of.ratios[0], of.ratios[-1], f"{len(of.ratios)} of {of.cases} cases"))
    return [
        f"{op} against {peer}: geomean {mean:.3f}x, worst {worst:.2f}x, best {best:.2f}x, {count}" for op, peer, mean, worst, best, count in found
    ]


def append_jsonl(path: Path, row: str) -> None:
    """row: one JSON object, without a line break."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(row + "\n")


def tell(row: dict[str, Any], file: Path | None) -> None:
    """Prints a script's result and what it ran on as a JSON object, and appends it to `file`."""
    line = json.dumps(row | {"versions": versions(), "date": datetime.date.today().isoformat(), "command": command()})
    print(line, flush=True)
    if file:
        append_jsonl(file, line)


def installed(package: str) -> str | None:
    """Its version; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("tilewright", "cuda-tile", "nvidia-cuda-tileiras", "triton"):
        if there := installed(package):
            found[package] = there
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def command() -> str:
    """The command line of this run as a user would type it, without the file of the results.

    It is of `tilewright` or of a script in benchmarks/.
    """
    words = list(sys.argv[1:])
    if "--json" in words:
        at = words.index("--json")
        del words[at : at + 2]
    script = Path(sys.argv[0])
    return shlex.join(["python", f"benchmarks/{script.name}", *words] if script.parent.name == "benchmarks" else ["tilewright", *words])
