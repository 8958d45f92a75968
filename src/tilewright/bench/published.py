"""Figures that others published, as data (bench/published/*.json), and our rows of the same."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..launch import Device
from ..ops.common.scaling import Scaling

FOLDER = Path(__file__).resolve().parent / "published"
HALVES = ("float16", "bfloat16")  # one rate on every tensor core
LAYOUT = ("trans_a", "trans_b", "heads_inside", "out_dtype")  # how operands lie in memory, which the documents leave open
RATES = {"TFLOP/s": "tflops", "GB/s": "gbs", "us": "time_us", "tokens/s": "tokens_per_s"}


@dataclass(frozen=True)
class Figure:
    """One published number.

    document, table: where it stands. metric: unit of value.
    hardware: as the document calls it. device: ours of that name, "" for a ratio of two.
    op, problem: what of ours computes the same, "" and {} for none; the fields that are told.
    """

    document: str
    table: str
    kernel: str
    hardware: str
    device: str
    op: str
    problem: Mapping[str, Any]
    metric: str
    value: float

    @property
    def key(self) -> tuple[Any, ...]:
        """Figures of one key are the same computation."""
        return self.op, tuple(self.problem.items())

    def tflops(self) -> float | None:
        """The rate, where the document gives one or its time and sizes do."""
        if self.metric == "TFLOP/s":
            return self.value
        sizes = [self.problem.get(name) for name in "mnk"]
        if self.metric == "us" and all(sizes):
            return 2 * sizes[0] * sizes[1] * sizes[2] / self.value / 1e6  # type: ignore[operator]
        return None

    def roof_pct(self) -> float | None:
        """Share of the data sheet's roof of its hardware.

        That is the dense 16-bit rate (twice that for 8 bits), or the memory bandwidth.
        """
        if not self.device:
            return None
        device, rate = Device.named(self.device), self.tflops()
        if rate is not None:
            return 100 * rate / (device.tflops * (2 if "float8" in self.problem.get("dtype", "") else 1))
        return 100 * self.value / device.memory_gbs if self.metric == "GB/s" else None

    def measures_the_same(self, row: Mapping[str, Any], but: str = "") -> bool:
        """Whether a result row computes this problem; 16-bit formats count as one.

        but: a field that may differ.
        """
        if not self.op or row["op"] != self.op:
            return False
        if "model" in self.problem:
            words = row["case"].split()
            told = [f"{name}={value}" for name, value in self.problem.items() if name != "model"]
            return words[:1] == [self.problem["model"]] and all(word in words for word in told)
        found = row["problem"]
        if any(value and value != "NONE" for name, value in found.items() if name not in (*self.problem, *LAYOUT)):
            return False  # an option that the document does not have
        return all(name in found and _alike(value, found[name]) for name, value in self.problem.items() if name != but)


def _alike(a: Any, b: Any) -> bool:
    return a == b or (a in HALVES and b in HALVES) or (a in Scaling.__members__ and b == Scaling[a])


@cache
def figures() -> tuple[Figure, ...]:
    """All published figures, document by document."""
    found = []
    for path in sorted(FOLDER.glob("*.json")):
        page = json.loads(path.read_text())
        for entry in page["entries"]:
            device = page["hardware"].get(entry["hardware"], {}).get("device", "")
            found.append(Figure(document=page["document"], device=device, **entry))
    return tuple(found)


def beside(row: Mapping[str, Any]) -> list[Figure]:
    """Published figures of what a row measures."""
    return [figure for figure in figures() if figure.measures_the_same(row)]


def best_row(figure: Figure, rows: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The row that measures the same: of the very dtype if there is one, else the newest.

    Without any, one that differs only in its batch.
    """
    rows = list(rows)
    same = [row for row in rows if figure.measures_the_same(row)] or [row for row in rows if figure.measures_the_same(row, but="batch")]
    exact = [row for row in same if row.get("dtype") == figure.problem.get("dtype")]
    found = exact or same
    return found[-1] if found else None
