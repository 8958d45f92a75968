"""Figures that others published, as data (bench/published/*.json), and our rows of that work."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..ops.common.scaling import Scaling

FOLDER = Path(__file__).resolve().parent / "published"
HALVES = ("float16", "bfloat16")  # one rate on every tensor core
LAYOUT = ("trans_a", "trans_b", "heads_inside", "out_dtype")  # how operands lie in memory, which the documents do not say
RATES = {"TFLOP/s": "tflops", "GB/s": "gbs", "us": "time_us", "tokens/s": "tokens_per_s"}
MODELS = ("generate", "decode")  # ops of whole models


@dataclass(frozen=True)
class Sheet:
    """Roofs by data sheet: the dense bf16 rate with fp32 sums, and the memory's bandwidth, of one
    GPU; None where the source has no such number. The cost model uses `Device` instead, which has
    to have one.
    """

    tflops: float | None = None
    memory_gbs: float | None = None
    source: str = ""


SHEETS = {  # by device: dense rates are half of those that a sheet states with sparsity
    "H200": Sheet(989.0, 4800.0, "NVIDIA H200 data sheet, SXM"),
    "B200": Sheet(2250.0, 8000.0, "NVIDIA Blackwell architecture technical brief, HGX B200"),
    "B300": Sheet(2250.0, 8000.0, "NVIDIA HGX B300 data sheet, an eighth of a board"),
    "GB10": Sheet(None, 273.0, "NVIDIA DGX Spark hardware overview, which gives no bf16 rate"),
}


def amount(value: float, unit: str) -> str:
    """Four digits, or all that are before the point: 51,151 ms, 13.7x."""
    number = f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"
    return f"{number}x" if unit == "ratio" else f"{number} {unit}".rstrip()


@dataclass(frozen=True)
class Figure:
    """One published number.

    document, table: where it was published. metric: unit of value.
    hardware: as the document calls it. device: our name for it, "" for a ratio of two.
    op, problem: our op for the same work and the fields that are known, "" and {} for none.
    by: the peer of our rows that is the same software, so that PyTorch is compared with PyTorch. ""
        for software that is no peer, which is compared with ours.
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
    by: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        """Figures with the same key are of the same computation."""
        return self.op, tuple(self.problem.items())

    def tflops(self) -> float | None:
        """The rate, if the document gives it, or its time and sizes do."""
        if self.metric == "TFLOP/s":
            return self.value
        sizes = [self.problem.get(name) for name in "mnk"]
        if self.metric == "us" and all(sizes):
            return 2 * sizes[0] * sizes[1] * sizes[2] / self.value / 1e6  # type: ignore[operator]
        return None

    def roof_pct(self) -> float | None:
        """Share of the data sheet's roof of its hardware; None where no source gives one.

        That is the dense 16-bit rate (twice that for 8 bits), or the memory bandwidth.
        """
        sheet, rate = SHEETS.get(self.device, Sheet()), self.tflops()
        if rate is not None and sheet.tflops:
            return 100 * rate / (sheet.tflops * (2 if "float8" in self.problem.get("dtype", "") else 1))
        return 100 * self.value / sheet.memory_gbs if rate is None and self.metric == "GB/s" and sheet.memory_gbs else None

    @property
    def text(self) -> str:
        """The value in its unit. A ratio is a factor; other numbers without a unit stand alone."""
        return amount(self.value, "" if self.metric in ("absolute", "relative") else self.metric)

    @property
    def alone(self) -> str:
        """Why no row can be the same work, or ""."""
        return "prompt length not told" if self.op in MODELS and "prompt" not in self.problem else ""

    def of(self, row: Mapping[str, Any]) -> float | None:
        """What a row of the same work measured of the same software, in this figure's unit."""
        found: float | None
        if self.by:
            at = {"tokens/s": "peer_tokens_per_s", "GB/s": "peer_tpot_ms"}.get(self.metric, "")
            found = row.get(at, {}).get(self.by)
            return found if found is None or self.metric == "tokens/s" else row["step_bytes"] / found / 1e6
        if self.metric == "ms":
            found = row.get("kernel_us")
            return None if found is None else found / 1e3
        found = row.get(RATES.get(self.metric, ""))
        return found

    def measures_the_same(self, row: Mapping[str, Any]) -> bool:
        """Whether a result row is the same work; 16-bit formats count as one."""
        if not self.op or row["op"] != self.op or self.alone:
            return False
        if "model" in self.problem:
            words = row["case"].split()
            told = [f"{name}={value}" for name, value in self.problem.items() if name != "model"]
            return words[:1] == [self.problem["model"]] and all(word in words for word in told)
        found = row["problem"]
        if any(value and value != "NONE" for name, value in found.items() if name not in (*self.problem, *LAYOUT)):
            return False  # an option that the document does not have
        return all(name in found and _alike(value, found[name]) for name, value in self.problem.items())


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
    """The published figures of the work that a row measures."""
    return [figure for figure in figures() if figure.measures_the_same(row)]


def best_row(figure: Figure, rows: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The row of the same work: of the same dtype if there is one, else the newest."""
    same = [row for row in rows if figure.measures_the_same(row) and (figure.op not in MODELS or figure.of(row) is not None)]
    exact = [row for row in same if row.get("dtype") == figure.problem.get("dtype")]
    found = exact or same
    return found[-1] if found else None
