"""Reads result files: the newest row of each case, the row it replaced, and summaries."""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Annotated, Any, Literal

import msgspec

from .. import ops
from ..launch.files import read_regular
from ..testing import op_name

Row = dict[str, Any]
Key = tuple[str, str, str]  # op, case, gpu
LARGEST = 1 << 28  # bytes of a file
SAME = 0.03  # two runs of the same kernel differ by less
OURS = {op_name(op) for op in ops.ALL}  # another op of ours is no peer, such as `matmul` beside `quantized_matmul`

Number = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]
Rate = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]


class Told(msgspec.Struct):
    """What every row holds, and what it may hold for readers; it may have more fields."""

    op: str
    case: str
    gpu: str
    date: str = ""
    dtype: str = ""
    source: str = ""
    problem: dict[str, Any] = {}
    time_us: Number | None = None
    tokens_per_s: Number | None = None
    spread_us: Rate = 0.0
    peers: dict[str, Number] = {}
    absent: dict[str, str] = {}
    backends: dict[str, str] = {}
    versions: dict[str, str] = {}
    draw_seed: int | None = None


class Ceilings(msgspec.Struct):
    """What roofs are drawn from."""

    copy_gbs: Number
    read_gbs: Number
    tflops: Number


class Kernel(msgspec.Struct):
    """What a row of an op on a problem holds besides."""

    problem: dict[str, Any]
    dtype: str
    bound: Literal["memory", "compute"]
    time_us: Number
    gbs: Rate
    tflops: Rate
    roof_pct: Rate
    ceilings: Ceilings


def read(paths: Iterable[Path]) -> list[Row]:
    """The rows of result files, in order. Raises ValueError naming file and line, and the field
    that is not as `tilewright bench` writes it; OSError for what is no regular file.
    """
    rows = []
    for path in paths:
        for number, line in enumerate(read_regular(path, LARGEST).decode(errors="replace").splitlines(), 1):
            try:
                row = json.loads(line)
                of = msgspec.convert(row, Told)
                if "roof_pct" in row and row.get("tflops") is not None:
                    msgspec.convert(row, Kernel)
                rows.append(row | {"key": (of.op, of.case, of.gpu)})
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}:{number} must be a result row with op, case and gpu: {type(error).__name__}: {error}") from None
    return rows


def newest(rows: Iterable[Row]) -> list[Row]:
    """The last row of each case on each GPU.

    A run of an op without the library that was the fastest peer before replaces no row: a peer that
    is not installed is not beaten.
    """
    return [of_case[-1] for of_case in _standing(rows)]


def replaced(rows: Iterable[Row]) -> list[Row]:
    """The row that the newest one replaced, of each case that has one."""
    return [of_case[-2] for of_case in _standing(rows) if len(of_case) > 1]


def _standing(rows: Iterable[Row]) -> list[list[Row]]:
    """Of each case the rows that replaced the one before, in order."""
    found: dict[Key, list[Row]] = {}
    for row in rows:
        of_case = found.setdefault(row["key"], [])
        best = fastest(of_case[-1]) if of_case and row["op"] in OURS else None
        if best is None or best[0] in {**row.get("peers", {}), **row.get("absent", {})}:
            of_case.append(row)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Change:
    """A case in two runs. ratio: old time over new, above 1 is faster.

    zone: "faster", "same" or "slower".
    """

    row: Row
    old: Row
    ratio: float
    zone: str


def changes(new: Iterable[Row], old: Iterable[Row]) -> list[Change]:
    """Cases in both, slowest first.

    Two times are the same within 3 % or the spread of the two runs, whichever is larger.
    """
    before = {row["key"]: row for row in old}
    found = []
    for row in new:
        past = before.get(row["key"])
        if past is None or not _time(row) or not _time(past):
            continue
        ratio = _time(past) / _time(row)
        noise = max(SAME, (row.get("spread_us", 0.0) + past.get("spread_us", 0.0)) / _time(row))
        found.append(Change(row, past, ratio, "faster" if ratio > 1 + noise else "slower" if ratio < 1 / (1 + noise) else "same"))
    return sorted(found, key=lambda change: change.ratio)


def _time(row: Row) -> float:
    return row.get("time_us") or 0.0


@dataclass(frozen=True, slots=True)
class Against:
    """An op and one peer, over all cases that both ran."""

    op: str
    peer: str
    cases: int
    mean: float
    worst: float
    best: float


def against_peers(rows: Iterable[Row]) -> list[Against]:
    """The geometric mean, worst and best ratio (their time / ours) of every op and peer."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        for peer, ratio in row.get("peers", {}).items():
            ratios.setdefault((row["op"], peer), []).append(ratio)
    return [Against(op, peer, len(r), geometric_mean(r), min(r), max(r)) for (op, peer), r in ratios.items()]


def fastest(row: Mapping[str, Any]) -> tuple[str, float] | None:
    """The fastest peer of a case, and its time over ours; None if no peer ran it."""
    found = {peer: float(ratio) for peer, ratio in row.get("peers", {}).items() if peer not in OURS}
    return min(found.items(), key=lambda item: item[1]) if found else None


@dataclass(frozen=True, slots=True)
class Judged:
    """Cases against the fastest peer of each: the one rule by which README, docs, report and
    `bench` say how fast an op is.

    cases: how many were timed.
    ratios: time of the fastest peer over ours, in the cases that a peer ran, worst first.
    peers: how often each was the fastest.
    losses: the rows of those below 1.
    """

    name: str
    cases: int
    ratios: tuple[float, ...]
    peers: Mapping[str, int]
    losses: tuple[Row, ...]

    @property
    def mean(self) -> float:
        """The geometric mean."""
        return geometric_mean(self.ratios)


def judge(name: str, rows: Iterable[Row]) -> Judged:
    """Rows under one name."""
    rows = list(rows)
    compared = sorted(((found[1], i, found[0]) for i, row in enumerate(rows) if (found := fastest(row))))
    peers = Counter(peer for _, _, peer in compared)
    return Judged(name, len(rows), tuple(r for r, _, _ in compared), dict(peers.most_common()), tuple(rows[i] for r, i, _ in compared if r < 1))


def kernels(rows: Iterable[Row]) -> list[Row]:
    """Rows of single ops on listed problems.

    Not whole models, which have tokens instead of a roof, and not the steps of a ladder, of which
    the early ones are slow on purpose.
    """
    ops = (row for row in rows if "roof_pct" in row and row.get("tflops") is not None and not is_step(row))
    return [row for row in ops if row.get("draw_seed") is None]


def is_step(row: Row) -> bool:
    """Whether a row is a step of `tilewright learn`."""
    return str(row["op"]).startswith("learn ")
