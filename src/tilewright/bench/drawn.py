"""Drawn problems: are configs that were chosen on some shapes also fast on others?

Each case is judged by the fastest peer that ran it.
"""

from collections.abc import Iterable, Sequence

from ..testing.drawn import FITTING_SEEDS, WEIGHTS
from .results import Judged, Row, fastest, judge


def lines(of: Judged) -> list[str]:
    """Count, geometric mean and worst, then every loss, worst first."""
    if not of.ratios:
        return [f"{of.name}: {of.cases} cases, no peer"]
    without = f" ({of.cases - len(of.ratios)} without a peer)" if of.cases > len(of.ratios) else ""
    head = f"{of.name}: {of.cases} cases{without}, best peer over ours geomean {of.mean:.3f}x, worst {of.ratios[0]:.2f}x"
    return [head, *(_loss(row) for row in of.losses)]


def check_seeds(seeds: Sequence[int]) -> None:
    """Raises ValueError for a seed whose problems were used to fit configs and costs."""
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
    return [judge(name, of) for name, of in groups.items() if of]


def _loss(row: Row) -> str:
    found = fastest(row)
    assert found is not None
    peer, ratio = found
    ours = f"{row['time_us']:.1f} us +-{row['spread_us']:.1f}, {peer} {row['peer_us'][peer]:.1f}"
    return f"  {ratio:.2f}  {row['case']} (seed {row['draw_seed']}) | {ours} | {row['config']} {row['source']}"
