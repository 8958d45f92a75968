"""Drawn problems: is what is fast on the shapes that it was chosen on fast on others?

Each case is judged by the fastest peer that ran it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..testing.drawn import FITTING_SEEDS, WEIGHTS
from .results import geomean

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Judged:
    """An op on drawn problems. name: of the op, with " fp8" for products of 8-bit operands.

    cases: how many were timed.
    ratios: time of the fastest peer over ours, of the cases that a peer ran, worst first.
    losses: the rows of those below 1.
    """

    name: str
    cases: int
    ratios: tuple[float, ...]
    losses: tuple[Row, ...]

    def lines(self) -> list[str]:
        """Count, geometric mean and worst, then every loss, worst first."""
        if not self.ratios:
            return [f"{self.name}: {self.cases} cases, no peer"]
        without = f" ({self.cases - len(self.ratios)} without a peer)" if self.cases > len(self.ratios) else ""
        head = f"{self.name}: {self.cases} cases{without}, best peer over ours geomean {geomean(self.ratios):.3f}x, worst {self.ratios[0]:.2f}x"
        return [head, *(_loss(row) for row in self.losses)]


def check_seeds(seeds: Sequence[int]) -> None:
    """Raises ValueError for a seed whose problems configs and costs are fitted to."""
    for seed in seeds:
        if seed in FITTING_SEEDS:
            span = f"{FITTING_SEEDS.start} to {FITTING_SEEDS.stop - 1}"
            raise ValueError(f"--seed must not be one of {span}, whose problems `tune --survey` fits to, got {seed}")


def judged(rows: Iterable[Row]) -> list[Judged]:
    """Rows of drawn problems by op, in the order of `WEIGHTS`. Rows as a result file has them."""
    groups: dict[str, list[Row]] = {name: [] for name in WEIGHTS}
    for row in rows:
        name = f"{row['op']} fp8" if row["problem"].get("scaling", "NONE") != "NONE" else row["op"]
        groups[name if name in groups else row["op"]].append(row)
    return [_judged(name, of) for name, of in groups.items() if of]


def ratio(row: Row) -> float:
    """Time of the fastest peer over ours."""
    return float(min(row["peer_us"].values()) / row["time_us"])


def _judged(name: str, rows: list[Row]) -> Judged:
    compared = sorted((row for row in rows if row["peer_us"]), key=ratio)
    return Judged(name, len(rows), tuple(map(ratio, compared)), tuple(row for row in compared if ratio(row) < 1))


def _loss(row: Row) -> str:
    peer = min(row["peer_us"], key=row["peer_us"].get)
    ours = f"{row['time_us']:.1f} us +-{row['spread_us']:.1f}, {peer} {row['peer_us'][peer]:.1f}"
    return f"  {ratio(row):.2f}  {row['case']} (seed {row['draw_seed']}) | {ours} | {row['config']} {row['source']}"
