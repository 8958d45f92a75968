"""GPU time of several contenders, interleaved.

Each contender is captured into a CUDA graph that calls it on rotating input sets, more than three
times the L2 cache if memory allows. So the time has no launch cost of the host, and no contender
finds its inputs in the cache. The graphs are replayed in turn, round after round: if the clock
drops under load, it drops for all. Each round has another order, because the contenders before one
also affect its clock.
"""

import math
import random
import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

Contender = Callable[..., Any]  # is called with the keyword arguments of one input set

ROUNDS = 15
REPLAY_TARGET_US = 1500.0
MAX_CALLS = 400
ROUGH_TARGET_US = 400.0
PASSES = 5  # over many contenders
MOST_PASS_CALLS = 64  # of a graph of such a pass
HOST_US = 100.0  # more than any op's host time: an eager call that takes longer waits for the GPU


@dataclass(frozen=True, slots=True, order=True)
class Timing:
    """Time of one call; a faster one is less. time_us: median over rounds.

    spread_us: half the distance between the 20th and 80th percentile.
    """

    time_us: float
    spread_us: float


def input_sets(make: Callable[[], dict[str, Any]], set_bytes: int, l2_bytes: int, limit_bytes: int = 24 << 30) -> list[dict[str, Any]]:
    """2 to 64 input sets to rotate through, in all more than three times the L2 cache.

    set_bytes: what a call accesses of a set.
    limit_bytes: of memory. A set may be far larger than what a call accesses of it, such as a cache
        that gets one token.
    """
    wanted = 1 + math.ceil(3 * l2_bytes / max(1, set_bytes))
    sets = [make()]
    held = sum(value.nbytes for value in sets[0].values() if isinstance(value, torch.Tensor))
    affordable = max(1, limit_bytes // max(1, set_bytes, held))
    sets += [make() for _ in range(min(max(2, wanted), 64, affordable) - 1)]
    return sets


def time_interleaved(contenders: dict[str, Contender], sets: Sequence[dict[str, Any]], rounds: int = ROUNDS) -> dict[str, Timing]:
    """GPU time per call of each contender, all on the same input sets.

    Raises for a contender that cannot be captured. All of them must be correct.
    """
    graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]] = {}
    for name, call in contenders.items():
        calls = _calls_per_replay(call, sets)
        graphs[name] = _capture(call, sets, calls), calls
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    order, shuffled = list(graphs), random.Random(0)
    for _ in range(rounds):
        for name in order:
            graph, calls = graphs[name]
            samples[name].append(_elapsed_us(graph.replay) / calls)
        shuffled.shuffle(order)
    return {name: _summary(values) for name, values in samples.items()}


def time_roughly(call: Contender, sets: Sequence[dict[str, Any]], give_up_us: float) -> float:
    """GPU time per call from a few short replays, to tell losers.

    If the first two calls, host cost included, take far more than `give_up_us`, that is enough.
    """
    once, limit = _eager_us(call, sets), 4 * give_up_us + HOST_US
    if once > limit:  # the compilers hold up the host 1 time in 150, so a loser must be slow twice
        once = min(once, _eager_us(call, sets))
    if once > limit:
        return once
    calls = max(min(len(sets), 4), min(MAX_CALLS, math.ceil(ROUGH_TARGET_US / max(once, 1.0))))
    graph = _capture(call, sets[: max(2, min(calls, len(sets)))], calls)
    return statistics.median(_elapsed_us(graph.replay) / calls for _ in range(3))


def time_many(calls: Sequence[Contender], sets: Sequence[dict[str, Any]], least_us: float, alone: AbstractContextManager[Any]) -> list[Timing | str]:
    """GPU time per call of many contenders, in short passes over all of them.

    For one that cannot be run or captured, its error in one line instead.

    least_us: no call can be faster, which gives the number of calls of a graph.
    alone: a lock, held while the passes run, when nobody else may use the GPU.
    """
    graphs: list[tuple[Any, int, int] | str] = []
    pool = None if not calls else torch.cuda.graph_pool_handle()  # one for all, which never run at once
    for call in calls:
        try:
            once = _eager_us(call, sets)
            fitting = math.ceil(ROUGH_TARGET_US / max(least_us, 2.0))
            wanted = len(sets) if once > 10 * least_us + HOST_US else min(MOST_PASS_CALLS, max(4, fitting, len(sets)))
            count = math.ceil(wanted / len(sets)) * len(sets)
            graph = _capture(call, sets, count, pool, warm=False)
            repeats = max(1, min(8, round(ROUGH_TARGET_US / max(1.0, _elapsed_us(graph.replay)))))
            graphs.append((graph, count, repeats))
        except Exception as error:  # what launches, compilations and captures raise
            graphs.append(" ".join(f"{type(error).__name__}: {error}".split())[:200])
    samples: list[list[float]] = [[] for _ in calls]
    with alone:
        for _ in range(PASSES):
            for found, times in zip(graphs, samples, strict=True):
                if not isinstance(found, str):
                    graph, count, repeats = found
                    times.append(_elapsed_us(partial(_replay, graph, repeats)) / (count * repeats))
    return [found if isinstance(found, str) else _summary(times) for found, times in zip(graphs, samples, strict=True)]


def _replay(graph: torch.cuda.CUDAGraph, repeats: int) -> None:
    for _ in range(repeats):
        graph.replay()


def launch_floor_us() -> float:
    """GPU time of the smallest kernel in a graph: no call can be faster."""
    x = torch.zeros(1, device="cuda")
    return time_interleaved({"floor": lambda x: x.zero_()}, [{"x": x}])["floor"].time_us


def _eager_us(call: Contender, sets: Sequence[dict[str, Any]]) -> float:
    """Time of a call, host cost included, after two that compile and allocate what they need."""
    first = sets[:2]
    for inputs in first:
        call(**inputs)
    torch.cuda.synchronize()
    return _elapsed_us(lambda: [call(**inputs) for inputs in first]) / len(first)


def _calls_per_replay(call: Contender, sets: Sequence[dict[str, Any]]) -> int:
    once = _eager_us(call, sets)
    calls = max(1, min(MAX_CALLS, math.ceil(REPLAY_TARGET_US / max(once, 1.0))))
    return math.ceil(calls / len(sets)) * len(sets) if calls > len(sets) else max(calls, min(len(sets), 4))


def _capture(call: Contender, sets: Sequence[dict[str, Any]], calls: int, pool: Any = None, *, warm: bool = True) -> torch.cuda.CUDAGraph:
    """warm: call each set once before, for peers that prepare something for each set."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for inputs in sets if warm else sets[:1]:
            call(**inputs)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        for i in range(calls):
            call(**sets[i % len(sets)])
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _elapsed_us(run: Callable[[], Any]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3


def _summary(values: list[float]) -> Timing:
    ordered = sorted(values)
    low, high = ordered[len(ordered) // 5], ordered[(4 * len(ordered)) // 5]
    return Timing(statistics.median(ordered), (high - low) / 2)
