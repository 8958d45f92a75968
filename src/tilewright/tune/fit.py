"""Constants of the cost model from measured times: `tilewright tune --fit` writes
select/data/<GPU>.json.

    stored times           raw times and the shipped table: (op, problem, config, us)
     `- fit                Levenberg-Marquardt on log time, Huber's weights, a prior at PRIOR
         `- neighbours     a regression on what is left, with which `select` corrects its prices
             `- report     error over held-out problems, regret among the timed configs
"""

import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from types import ModuleType
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from .. import ops, select
from ..launch import Device, argument_error, decision_of
from ..launch.console import plain_console
from ..launch.table import SHIPPED, read_rows, rebuilt
from ..select.choose import Choices, Model, ranked
from ..select.cost import UNTIMED_SHARE, Prices, Works
from ..select.neighbours import Neighbours, Place, sizes
from ..select.rates import DATA, Data, Rates, rates, read
from ..select.work import Work
from ..testing import op_name
from . import raw

# The constants before anything is measured, from data sheets and SASS. The fit moves those that the
# times depend on.
PRIOR = {
    "start": 2.2, "tile": 1.2, "persistent": 0.5, "step": 0.05, "serial": 0.15, "dram": 4.5e6, "draw": 1.05e5, "pair": 9.0e4, "burst": 1.0e5,
    "fill": 1.2e5, "padding": 4.5e6, "l2": 9.5e6, "unaligned": 1.4, "sectors": 6.0e6, "reach": 1.5e8, "far": 0.4, "fade": 0.15, "exponentials": 2.7e4,
    "reduce": 1.6, "reduce_rate": 3.0e6, "latency": 0.75, "tail": 0.5, "spill": 8e-3,
}  # fmt: skip
# Share of the bf16 peak, by kind of operation.
PRIOR_SHARE = {
    "fp8": 1.9, "row": 1.0, "block": 0.7, "precise": 0.85, "gated": 0.8, "dot": 0.056, "tf32": 0.5, "fma": 1 / 32, "rows": 0.04,
    "checked": 0.3,
}  # fmt: skip
FIXED = ("reach", "tail", "spill")  # no measured time depends on them
MOST_SHARE = 1.2  # over the prior: nothing feeds the tensor cores better than that
HUBER = 0.1
WEIGHT_OF_PRIOR = 0.08
ROUNDS = 25  # at most
FOLDS = 5
COVERED, WITHIN = 0.95, 1.03
NOISY = 0.15  # of a time; with more spread, something else ran beside it


@dataclass(frozen=True)
class Timed:
    """One measured time of one op."""

    problem: Any
    config: Any
    time_us: float


# ------------------------------------------------------------------------------------------------
# stored times
@dataclass(frozen=True)
class Stored:
    """The stored times of one op. skipped: rows of problems or configs that the op no longer
    has, or finds illegal.
    """

    timed: Sequence[Timed]
    skipped: int


def stored_times(gpu: str, op: ModuleType, folders: Sequence[Path] = (raw.SHIPPED,)) -> Stored:
    """Every stored time of an op on a GPU, in the order of the files. If a problem and config was
    timed several times, their geometric mean.
    """
    choices, device, name = choices_of(op), Device.named(gpu), decision_of(op).op
    logs: dict[tuple[Any, Any], list[float]] = {}
    skipped = 0
    for problem, config, time_us in _entries(gpu, name, folders):
        try:
            key = rebuilt(op.Problem, problem), rebuilt(op.Config, config)
        except (TypeError, KeyError, AttributeError):  # a field or a value that no longer exists
            skipped += 1
            continue
        if choices and choices.legal(*key, device):
            logs.setdefault(key, []).append(math.log(time_us))
        else:
            skipped += 1
    return Stored([Timed(p, c, math.exp(sum(found) / len(found))) for (p, c), found in logs.items()], skipped)


def _entries(gpu: str, name: str, folders: Sequence[Path]) -> Iterator[tuple[raw.Plain, raw.Plain, float]]:
    """Raw times, and the rows of the shipped table that are not among them."""
    seen = set()
    for folder in folders:
        for row in raw.read(folder, gpu, name):
            if row.time_us is not None and (row.spread_us or 0.0) <= NOISY * row.time_us:
                seen.add(json.dumps((row.problem, row.config)))
                yield row.problem, row.config, row.time_us
    for of in read_rows(SHIPPED / f"{gpu.replace(' ', '_')}.json"):
        if of.op == name:
            for config, time_us in ((of.config, of.time_us), (of.runner_up, of.runner_up_us)):
                if config is not None and time_us is not None and json.dumps((of.problem, config)) not in seen:
                    yield of.problem, config, time_us


# ------------------------------------------------------------------------------------------------
# the fit
def prior(works: Iterable[Works]) -> dict[str, float]:
    """Constants to start from: PRIOR, and those of each kind of operation that occurs."""
    found = {name for work in works for part in ((work,) if isinstance(work, Work) else work) for name in part.kinds}
    return PRIOR | {f"eff.{name}": PRIOR_SHARE.get(name, UNTIMED_SHARE) for name in sorted(found)}


def fit(works: Sequence[Works], times: Sequence[float], flops: float, start: Rates) -> dict[str, float]:
    """The constants that price `works` closest to `times` (us).

    flops: an SM's bf16 peak, flop/us. start: where the prior has them.
    """
    shared = [name for name in start if name not in FIXED and " " not in name]
    # A launch has the efficiency of a single tile, so one step gives the slopes of all of them.
    tiles = [name for name in start if " " in name]
    names = shared + tiles
    units = np.vstack([np.eye(len(names))[: len(shared)], *([np.repeat([0.0, 1.0], [len(shared), len(tiles)])] if tiles else ())])
    of_tile = np.array([[f"eff.{kind}" == name for name in tiles] for kind in map(_tile_kind, works)], float).reshape(len(works), len(tiles))
    first = np.log([start[name] for name in names])
    most = np.array([math.log(MOST_SHARE) if name.startswith("eff.") else 3.0 for name in names])
    wanted, prices = np.log(times), Prices(works)

    def errors(x: np.ndarray) -> np.ndarray:
        tried = {**start, **dict(zip(names, np.exp(x).tolist(), strict=True)), "flops": flops}
        return np.asarray(np.log(prices.us(tried)) - wanted)

    def loss(r: np.ndarray, x: np.ndarray) -> float:
        size = np.abs(r)
        return float(np.where(size < HUBER, r * r, 2 * HUBER * size - HUBER**2).sum() + WEIGHT_OF_PRIOR * ((x - first) ** 2).sum())

    x, damping = first.copy(), 1e-2
    r = errors(x)
    for _ in range(ROUNDS):
        slope = np.stack([(errors(x + 1e-3 * unit) - r) / 1e-3 for unit in units], 1)
        slope = np.hstack([slope[:, : len(shared)], slope[:, len(shared) :] * of_tile])
        weight = np.minimum(1.0, HUBER / np.maximum(np.abs(r), 1e-9))
        for _ in range(14):
            normal = slope.T @ (weight[:, None] * slope) + WEIGHT_OF_PRIOR * np.eye(len(x))
            normal += damping * np.diag(np.diag(normal))
            step = np.clip(np.linalg.solve(normal, -(slope.T @ (weight * r) + WEIGHT_OF_PRIOR * (x - first))), -0.4, 0.4)
            near = np.minimum(x + step, first + most)
            tried = errors(near)
            if loss(tried, near) < loss(r, x):
                moved = float(np.abs(near - x).max())
                x, r, damping = near, tried, max(damping / 5, 1e-6)
                break
            damping *= 5
        else:
            break
        if moved < 2e-3:
            break
    return {name: float(f"{value:.4g}") for name, value in {**start, **dict(zip(names, np.exp(x).tolist(), strict=True))}.items()}


def _tile_kind(work: Works) -> str:
    part = work if isinstance(work, Work) else work[0]
    return part.kinds[-1] if part.kinds else ""


def neighbours(op: Choices[Any, Any], timed: Sequence[Timed], works: Sequence[Works], constants: Rates) -> Neighbours:
    """The regression on measured over modelled times."""
    residuals = np.log([one.time_us for one in timed]) - np.log(Prices(works).us(constants))
    return Neighbours.solved(places(op, timed, works), residuals, regimes_too=op.regimes_too)


def places(op: Choices[Any, Any], timed: Sequence[Timed], works: Sequence[Works]) -> list[Place]:
    return [op.place(one.problem, one.config, work) for one, work in zip(timed, works, strict=True)]


# ------------------------------------------------------------------------------------------------
# how good it is
@dataclass(frozen=True)
class Quality:
    """Errors are absolute logarithms of measured over modelled time. regret: time of the
    config that the model chooses among the timed ones, over the best of them.
    """

    timings: int
    median: float
    p90: float
    corrected_median: float
    corrected_p90: float
    problems: int
    regret: float
    p90_regret: float
    worst_regret: float


def folds(timed: Sequence[Timed]) -> list[int]:
    """The fold of each timing, by its problem's sizes."""
    keys = sorted({sizes(one.problem) for one in timed}, key=lambda key: zlib.crc32(repr(key).encode()))
    fold = {key: i % FOLDS for i, key in enumerate(keys)}
    return [fold[sizes(one.problem)] for one in timed]


def quality(op: Choices[Any, Any], timed: Sequence[Timed], device: Device) -> Quality:
    """Cross-validated over problems: the constants and the neighbours that price a problem's
    configs come from other problems.
    """
    works, fold = [op.work(one.problem, one.config, device) for one in timed], folds(timed)
    flops = rates(op.op, device)["flops"]
    plain, corrected = np.zeros(len(timed)), np.zeros(len(timed))
    logs = np.log([one.time_us for one in timed])
    prices: dict[Any, list[tuple[float, float]]] = {}
    start = _start(op, {}, device.name)
    for out in sorted(set(fold)):
        kept, held = ([i for i, of in enumerate(fold) if (of == out) == whether] for whether in (False, True))
        fitted = {**fit([works[i] for i in kept], [timed[i].time_us for i in kept], flops, {**prior(works), **start}), "flops": flops}
        known = neighbours(op, [timed[i] for i in kept], [works[i] for i in kept], fitted)
        model = Model(fitted, known, "model")
        plain[held] = logs[held] - np.log(Prices([works[i] for i in held]).us(fitted))
        corrected[held] = plain[held] - known.say(places(op, [timed[i] for i in held], [works[i] for i in held]))[0]
        for problem, members in by_problem(timed, held).items():
            listed = {config: n for n, config in enumerate(op.candidates(problem, device))}  # breaks ties as a call does
            members.sort(key=lambda i: listed.get(timed[i].config, len(listed)))
            found = model.price(op, problem, [timed[i].config for i in members], [works[i] for i in members]).tolist()
            prices[problem] = [(price, timed[i].time_us) for price, i in zip(found, members, strict=True)]
    chosen = [(found[ranked([price for price, _ in found], op.tie)[0]][1], found) for found in prices.values() if len(found) > 1]
    regrets = [time / min(time for _, time in found) for time, found in chosen]
    mean = geometric_mean(regrets) if regrets else 1.0
    p90 = float(np.quantile(regrets, 0.9)) if regrets else 1.0
    return Quality(len(timed), *_spread(plain), *_spread(corrected), len(regrets), mean, p90, max(regrets, default=1.0))


def _spread(errors: np.ndarray) -> tuple[float, float]:
    return float(np.median(np.abs(errors))), float(np.quantile(np.abs(errors), 0.9))


def by_problem(timed: Sequence[Timed], members: Iterable[int]) -> dict[Any, list[int]]:
    """The positions of each problem's timings."""
    found: dict[Any, list[int]] = {}
    for i in members:
        found.setdefault(timed[i].problem, []).append(i)
    return found


def cover(timed: Sequence[Timed]) -> list[Any]:
    """A small set of configs of which one is within WITHIN of the best known for COVERED of the
    problems: greedy, most problems first.
    """
    times: dict[Any, dict[Any, float]] = {}
    for one in timed:
        times.setdefault(one.problem, {})[one.config] = one.time_us
    good: dict[Any, set[int]] = {}
    for i, of in enumerate(times.values()):
        for config, time in of.items():
            if time <= WITHIN * min(of.values()):
                good.setdefault(config, set()).add(i)
    chosen: list[Any] = []
    left = set(range(len(times)))
    while good and len(left) > (1 - COVERED) * len(times):
        best = max(good, key=lambda config: (len(good[config] & left), str(config)))
        chosen.append(best)
        left -= good[best]
    return chosen


# ------------------------------------------------------------------------------------------------
# what is written
def choices_of(op: ModuleType) -> Choices[Any, Any] | None:
    """The op's `Choices`, or None."""
    found = getattr(op, "CHOICES", None)
    return found if isinstance(found, Choices) else None


def _start(choices: Choices[Any, Any], fitted_now: Mapping[str, Mapping[str, float]], gpu: str) -> Mapping[str, float]:
    """The constants of the op that this one is like, as fitted now, else as in the data."""
    if not choices.like:
        return {}
    path = DATA / f"{gpu.replace(' ', '_')}.json"
    return fitted_now.get(choices.like) or (read(path)["rates"].get(choices.like, {}) if path.exists() else {})


def fitted(gpu: str, stored: Mapping[ModuleType, Stored]) -> Data:
    """What `fit_command` writes: constants and timings of the ops whose times are given."""
    device = Device.named(gpu)
    constants: dict[str, dict[str, float]] = {"common": PRIOR | {f"eff.{name}": share for name, share in PRIOR_SHARE.items()}}
    measured: dict[str, Any] = {}
    flops = device.tflops * 1e6 / device.sms
    for op in sorted(stored, key=lambda op: bool((of := choices_of(op)) and of.like)):
        choices = choices_of(op)
        if choices and (timed := stored[op].timed):
            works = [choices.work(one.problem, one.config, device) for one in timed]
            constants[choices.op] = fit(works, [one.time_us for one in timed], flops, {**prior(works), **_start(choices, constants, gpu)})
            measured[choices.op] = neighbours(choices, timed, works, {**constants[choices.op], "flops": flops}).plain()
    head = {"gpu": device.name, "arch": device.arch, "memory_gbs": device.memory_gbs, "l2_bytes": device.l2_bytes}
    return {**head, "rates": constants, "points": measured}


def encoded(data: Data) -> str:
    """As JSON, a line to each op's constants and to each table of its timings."""

    def lines(table: Mapping[str, Any], indent: str) -> str:
        return ",\n".join(f"{indent}{json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}" for name, value in table.items())

    head = lines({name: value for name, value in data.items() if name not in ("rates", "points")}, " ")
    measured = ",\n".join(f"  {json.dumps(op)}: {{\n{lines(of, '   ')}\n  }}" for op, of in data["points"].items())
    return f'{{\n{head},\n "rates": {{\n{lines(data["rates"], "  ")}\n }},\n "points": {{\n{measured}\n }}\n}}\n'


def fit_command(names: list[str] | None = None, *, folder: Path | None = None, target: Path = DATA, console: Console | None = None) -> int:
    """Fits the cost model to raw times and shipped tables, writes a data file for each GPU, and
    prints how good it is. Returns the exit code.

    names: ops to fit, all by default; the file keeps what it has of others, and of those without
        raw times. folder: of packed raw times, by default those that ship.
    Raises: KeyError naming the known GPUs for another, ValueError without raw times.
    """
    console = console or plain_console()
    source, wanted = folder or raw.SHIPPED, ops.named(names)
    if not raw.gpus_of(source):
        raise argument_error("--raw", "a folder of raw times, as `tilewright tune --pack` writes it", source)
    for name in raw.gpus_of(source):
        gpu, path = name.replace("_", " "), target / f"{name}.json"
        stored = {op: stored_times(gpu, op, [source]) for op in wanted if raw.read(source, gpu, decision_of(op).op)}
        data = fitted(gpu, stored)
        if not data["points"]:
            raise argument_error("--raw", f"raw times of {gpu} with a config that an op to be fitted has", source)
        known, there = read(path) if path.exists() else {}, set(map(op_name, ops.ALL))
        for part in ("rates", "points"):
            others = {op: of for op, of in known.get(part, {}).items() if op in there}
            data = {**data, part: dict(sorted({**others, **data[part]}.items()))}
        path.write_text(encoded(data))
        select.forget()
        console.print(f"{gpu}: constants of {', '.join(op for op in data['points'])} to {path}")
        console.print(_report(gpu, stored))
    return 0


def _report(gpu: str, stored: Mapping[ModuleType, Stored]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in (
        "op",
        "timings",
        "skipped",
        "error median, p90",
        "with neighbours",
        "problems",
        "choice over best timed",
        "p90",
        "worst",
        "configs that suffice",
    ):
        table.add_column(name)
    for op, of in stored.items():
        choices = choices_of(op)
        if choices and of.timed:
            q = quality(choices, of.timed, Device.named(gpu))
            errors = f"{q.median:.3f}, {q.p90:.3f}", f"{q.corrected_median:.3f}, {q.corrected_p90:.3f}"
            regrets = str(q.problems), f"{q.regret:.4f}", f"{q.p90_regret:.3f}", f"{q.worst_regret:.2f}"
            table.add_row(op_name(op), str(q.timings), str(of.skipped), *errors, *regrets, str(len(cover(of.timed))))
    return table
