"""One problem -> the fastest config of its space, as a row for the store.

    ready     every config compiled, in the background; dropped before it runs if it spills much
     `- rough    timed as it gets ready, in short replays; a loser only by its first two calls
         `- passes   only if many are near: all of them in turn, which tells the best few
         `- race     the best few beside the default, interleaved, on inputs that are not in the L2
             |       cache; the closest ones three times, of which the median counts
             `- check    the winner under the accuracy rule; if it is wrong the next takes its place

Where compiling and timing happen is a `Workbench`. workbench.py has the one of a GPU, tests hand in
one with made-up times.
"""

import datetime
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from statistics import median_low
from types import ModuleType
from typing import Any, Protocol

import cuda.tile as ct

from ..bench.timer import Timing
from ..compile.job import one_line
from ..launch import Device, decision_of
from ..launch.table import Row, digest_of, plain
from ..testing import Accuracy, asked, op_name

LOSER = 2.0  # times the best so far: not timed further
MARGIN = 1.12  # of the best rough time: within it a config is near. A rough time is good to 5 %
FINALISTS = 16
CLOSE = 1.08  # of the best time of the race: within it a config is timed again, since two captures of a kernel may differ by 8 %
CLOSEST = 12  # configs that are timed again at most, the best
CAPTURES = 3  # of each of them; their median counts
TIE = 1.005  # a win by less does not count: the config that stands first in the space, with the default as the very first, wins


class Clock(Protocol):
    """Times one problem. Configs are those of its space; a config that cannot run raises."""

    def rough(self, config: Any, give_up_us: float) -> float: ...

    def race(self, configs: Sequence[Any]) -> list[Timing]: ...

    def many(self, configs: Sequence[Any]) -> list[Timing | str]:
        """Times all of them in short passes, in turn; for one that cannot run, says why."""
        ...


class Workbench(Protocol):
    """Where configs are compiled, timed and checked."""

    device: Device
    compiler: str

    def prepare(self, op: ModuleType, problem: Any, configs: Sequence[Any]) -> object:
        """Begins to compile configs that will be asked for."""
        ...

    def ready(self, op: ModuleType, problem: Any, configs: Sequence[Any]) -> Iterator[tuple[int, str]]:
        """The position of each config as soon as it is compiled, and why to drop it, or ""."""
        ...

    def done(self, op: ModuleType, problem: Any) -> bool:
        """Whether everything that `prepare` began has ended."""
        ...

    def spill_bytes(self, op: ModuleType, problem: Any, config: Any) -> int:
        """Bytes that a config that is ready spills."""
        ...

    def clock(self, op: ModuleType, problem: Any) -> AbstractContextManager[Clock]: ...

    def check(self, op: ModuleType, problem: Any, config: Any) -> list[Accuracy]:
        """Raises AssertionError for a wrong answer."""
        ...

    def alive(self) -> bool:
        """Whether anything can still be timed.

        After a kernel accessed memory that it should not have, nothing can in this process.
        """
        ...


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search.

    row: for the store. dropped: (config, why) of those that were refused.
    times: (config, us) of all that ran, fastest first: the raced ones, then the others by their
        rough time. spreads: us, of the raced ones, in that order.
    """

    row: Row
    times: list[tuple[Any, float]]
    spreads: list[float]
    dropped: list[tuple[Any, str]]


def row_key(op: ModuleType, wanted: Any, device: Device, compiler: str) -> dict[str, Any]:
    """The fields of a row's key."""
    return {
        "op": decision_of(op).op,
        "problem": plain(wanted),
        "arch": device.arch,
        "gpu": device.name,
        "compiler": compiler,
    }


def search(
    op: ModuleType,
    problem: Any,
    bench: Workbench,
    *,
    configs: Sequence[Any] | None = None,
    on_config: Callable[[int, int], None] = lambda done, total: None,
) -> Found:
    """Finds the fastest correct config.

    Args:
        configs: those to choose from, the default first; by default the op's space.
        on_config: called with (compiled, all) as configs get ready.
    Raises: RuntimeError if no config compiles, runs and is correct, with the reasons; or if one
        broke the GPU.
    """
    wanted = asked(op, problem, bench.device)
    configs = op.space(wanted, bench.device) if configs is None else configs
    name = f"{op_name(op)} {wanted}"
    if not configs:
        raise RuntimeError(f"{name} must have a config on {bench.device.name}, got none")
    dropped: dict[int, str] = {}
    rough: dict[int, float] = {}
    with bench.clock(op, problem) as clock:
        for done, (i, reason) in enumerate(bench.ready(op, problem, configs), 1):
            if reason:
                dropped[i] = reason
            else:
                try:
                    rough[i] = clock.rough(configs[i], LOSER * min(rough.values(), default=math.inf))
                except (RuntimeError, ct.TileError) as error:  # what launches and compilations raise
                    if not bench.alive():
                        raise RuntimeError(f"{name} with {configs[i]} ended this process's use of the GPU: {one_line(error)}") from None
                    dropped[i] = one_line(error)
            on_config(done, len(configs))
        while rough:
            times = _raced(clock, configs, _finalists(clock, configs, rough))
            order = _ranking(times)
            try:
                found = bench.check(op, problem, configs[order[0]])
            except AssertionError as error:
                dropped[order[0]] = str(error)
                del rough[order[0]]
                continue
            first, second = order[0], order[1] if len(order) > 1 else None
            row = Row(
                **row_key(op, wanted, bench.device, bench.compiler),
                digest=digest_of(decision_of(op), wanted, configs[first], bench.device),
                config=plain(configs[first]),
                time_us=round(times[first].time_us, 3),
                spread_us=round(times[first].spread_us, 3),
                default_us=round(times[0].time_us, 3) if 0 in times else None,
                runner_up=None if second is None else plain(configs[second]),
                runner_up_us=None if second is None else round(times[second].time_us, 3),
                tried=len(configs) - len(dropped),
                dropped=len(dropped),
                accuracy={
                    "rms_ratio": round(max((a.rms_ratio for a in found), default=0.0), 3),
                    "worst_ratio": round(max((a.worst_ratio for a in found), default=0.0), 3),
                },
                date=datetime.date.today().isoformat(),
            )
            raced = [(configs[i], times[i].time_us) for i in order]
            others = sorted((i for i in rough if i not in times), key=lambda i: rough[i])
            spreads = [times[i].spread_us for i in order]
            return Found(row, raced + [(configs[i], rough[i]) for i in others], spreads, [(configs[i], why) for i, why in dropped.items()])
    reasons = "; ".join(f"{configs[i]}: {why}" for i, why in list(dropped.items())[:3])
    raise RuntimeError(f"{name} must have one config that compiles, runs and is right, got none of {len(configs)}: {reasons}")


def _finalists(clock: Clock, configs: Sequence[Any], rough: dict[int, float]) -> list[int]:
    """The best of those near the best rough time; and the default, to know the gain.

    Rough times are taken one by one while others compile, so where more are near than can race,
    passes over all of them choose.
    """
    best = min(rough.values())
    near = sorted((i for i in rough if rough[i] <= MARGIN * best), key=lambda i: rough[i])
    if len(near) > FINALISTS:
        passes = dict(zip(near, clock.many([configs[i] for i in near]), strict=True))
        near = sorted(near, key=lambda i: t.time_us if isinstance(t := passes[i], Timing) else math.inf)[:FINALISTS]
    return near if 0 in near or 0 not in rough else [*near, 0]


def _raced(clock: Clock, configs: Sequence[Any], finalists: Sequence[int]) -> dict[int, Timing]:
    """The median capture of each. The fastest has CAPTURES, unless nobody else is close."""
    captures: dict[int, list[Timing]] = {i: [] for i in finalists}
    due = list(finalists)
    while due:
        for i, timing in zip(due, clock.race([configs[i] for i in due]), strict=True):
            captures[i].append(timing)
        times = {i: median_low(found) for i, found in captures.items()}
        close = [i for i in sorted(times, key=times.__getitem__)[:CLOSEST] if times[i].time_us <= CLOSE * min(times.values()).time_us]
        due = [i for i in close if len(captures[i]) < CAPTURES] if len(close) > 1 else []
    return times


def _ranking(times: dict[int, Timing]) -> list[int]:
    """Fastest first; of those that tie with the fastest, the one that stands first in the space."""
    order = sorted(times, key=times.__getitem__)
    tied = [i for i in order if times[i].time_us <= TIE * times[order[0]].time_us]
    first = min(tied)
    return [first, *(i for i in order if i != first)]
