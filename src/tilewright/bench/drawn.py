"""Drawn problems: are configs that were chosen on some shapes also fast on others?

Each case is judged by the fastest peer that ran it.
"""

from collections.abc import Iterable, Sequence

from ..testing.drawn import FITTING_SEEDS, WEIGHTS
from .results import Judged, Row, fastest, judge

LEAST_SEEDS = 3


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
    return [judge(name, of) for name, of in _by_kind(rows).items() if of]


def newest_seeds(rows: Iterable[Row], least: int) -> dict[str, list[Row]]:
    """Of each kind of problem the rows of its newest seeds: three or more, as many as give so many
    rows, or all. What an older tree measured goes, not what lost.
    """
    found: dict[str, list[Row]] = {}
    for kind, of in _by_kind(rows).items():
        of_seed: dict[int, list[Row]] = {}
        for row in of:
            of_seed.setdefault(row["draw_seed"], []).append(row)
        kept: list[Row] = []
        newest = sorted(of_seed, key=lambda seed: (max(row["date"] for row in of_seed[seed]), seed), reverse=True)
        for i, seed in enumerate(newest):
            if i < LEAST_SEEDS or len(kept) < least:
                kept += of_seed[seed]
        if kept:
            found[kind] = kept
    return found


def _by_kind(rows: Iterable[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {name: [] for name in WEIGHTS}
    for row in rows:
        name = f"{row['op']} fp8" if row["problem"].get("scaling", "NONE") != "NONE" else row["op"]
        groups[name if name in groups else row["op"]].append(row)
    return groups


def _loss(row: Row) -> str:
    found = fastest(row)
    assert found is not None
    peer, ratio = found
    ours = f"{row['time_us']:.1f} us +-{row['spread_us']:.1f}, {peer} {row['peer_us'][peer]:.1f}"
    return f"  {ratio:.2f}  {row['case']} (seed {row['draw_seed']}) | {ours} | {row['config']} {row['source']}"
