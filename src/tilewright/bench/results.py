"""Result files read back: the newest row of each case, what it replaced, and pages' numbers."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]
Key = tuple[str, str, str]  # op, case, gpu
SAME = 0.03  # two runs of one kernel differ by less


def read(paths: Iterable[Path]) -> list[Row]:
    """The rows of result files, in order. Raises ValueError naming file and line."""
    rows = []
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            try:
                row = json.loads(line)
                rows.append(row | {"key": (row["op"], row["case"], row["gpu"])})
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}:{number} must be a result row with op, case and gpu: {type(error).__name__}: {error}") from None
    return rows


def newest(rows: Iterable[Row]) -> list[Row]:
    """The last row of each case on each GPU."""
    return list({row["key"]: row for row in rows}.values())


def replaced(rows: Iterable[Row]) -> list[Row]:
    """Of each case that was measured more than once, the row before the last."""
    last: dict[Key, Row] = {}
    before: dict[Key, Row] = {}
    for row in rows:
        if row["key"] in last:
            before[row["key"]] = last[row["key"]]
        last[row["key"]] = row
    return list(before.values())


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


def geomean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


@dataclass(frozen=True, slots=True)
class Against:
    """An op against one peer, over all cases that both ran."""

    op: str
    peer: str
    cases: int
    mean: float
    worst: float
    best: float


def against_peers(rows: Iterable[Row]) -> list[Against]:
    """Geometric mean, worst and best ratio (their time / ours) of every op and peer."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        for peer, ratio in row.get("peers", {}).items():
            ratios.setdefault((row["op"], peer), []).append(ratio)
    return [Against(op, peer, len(r), geomean(r), min(r), max(r)) for (op, peer), r in ratios.items()]


def kernels(rows: Iterable[Row]) -> list[Row]:
    """Rows of single ops on listed problems.

    Whole models have tokens instead of a roof. A ladder's early steps are slow on purpose.
    """
    ops = (row for row in rows if "roof_pct" in row and row.get("tflops") is not None and not is_step(row))
    return [row for row in ops if row.get("draw_seed") is None]


def is_step(row: Row) -> bool:
    """Whether a row is a step of `tilewright learn`."""
    return str(row["op"]).startswith("learn ")
