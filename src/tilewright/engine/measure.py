"""Times whole generations: transformers' own and ours."""

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..bench.meter import meter_of
from ..launch import counted
from ..models.generate import tokens_alone
from .engine import Engine

ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Kernel:
    """cuda_ms: of the time in which kernels ran, what this one had (`shares`); None on a CPU."""

    name: str
    calls: int
    cuda_ms: float | None


@dataclass(frozen=True, slots=True)
class Run:
    """One run: the same number of new tokens for the same prompts.

    tokens: [batch][new]. seconds: of the whole call, the median of a few. first_token_s: until the
        first tokens. step_s: of each later step.
    memory_bytes: peak of allocated memory, weights included; 0 on a CPU. kernels, clocks: of one
        more call, which is not timed.
    """

    name: str
    tokens: list[list[int]]
    seconds: float
    first_token_s: float
    step_s: list[float]
    memory_bytes: int
    kernels: list[Kernel] = field(default_factory=list)
    clocks: str = ""

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds

    @property
    def cuda_ms(self) -> float | None:
        """The time in which at least one kernel ran."""
        times = [k.cuda_ms for k in self.kernels if k.cuda_ms is not None]
        return sum(times) if times else None

    def step_ms(self, percent: int) -> float:
        """The percentile of the times of decode steps, between two of them in proportion."""
        return 1e3 * float(np.percentile(self.step_s, percent)) if self.step_s else 0.0


def run_engine(engine: Engine, name: str, prompts: Tensor, new: int) -> Run:
    """The engine's kernels must be compiled (`warm_up`)."""
    return _measured(name, prompts.device, lambda: _engine_times(engine, prompts, new))


def _engine_times(engine: Engine, prompts: Tensor, new: int) -> tuple[list[list[int]], float, list[float]]:
    found = engine.generate(prompts, new)
    return found.tokens, found.first_token_s, found.step_s


def run_transformers(model: Any, name: str, prompts: Tensor, new: int, **options: Any) -> Run:
    """`model.generate`, greedily. options: for example `cache_implementation="static"`, for which
    transformers compiles on a GPU.
    """

    def generate(streamer: Any = None) -> list[list[int]]:
        mask = torch.ones_like(prompts)
        with torch.inference_mode(), tokens_alone(model):
            how: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, **options}
            out = model.generate(prompts, attention_mask=mask, streamer=streamer, **how)
        tokens: list[list[int]] = out[:, prompts.shape[1] :].tolist()
        return tokens

    # The times of single tokens come from a separate call: handing tokens over waits for each of
    # them.
    generate()
    steps = _Steps()
    start = time.perf_counter()
    generate(steps)
    times = [b - a for a, b in zip(steps.at[1:], steps.at[2:], strict=False)]
    return _measured(name, prompts.device, lambda: (generate(), steps.at[1] - start, times))


class _Steps:
    """transformers' streamer: `put` gets the prompt, then each step's tokens, on the host."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def put(self, value: Tensor) -> None:
        self.at.append(time.perf_counter())

    def end(self) -> None:
        pass


def _measured(name: str, device: torch.device, call: Callable[[], tuple[list[list[int]], float, list[float]]]) -> Run:
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    seconds: list[float] = []
    for _ in range(ROUNDS if cuda else 1):
        start = time.perf_counter()
        tokens, first, steps = call()
        if cuda:
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    memory = torch.cuda.max_memory_allocated(device) if cuda else 0
    timed = (name, tokens, statistics.median(seconds), first, steps, memory)
    if not cuda:
        return Run(*timed, _counted(call))
    # Not while timing: reading the clocks takes Python's global lock.
    with meter_of(f"GPU-{torch.cuda.get_device_properties(device).uuid}") as meter, meter.watching() as said:
        call()
    return Run(*timed, profiled(call), said[0])


def profiled(call: Callable[[], Any]) -> list[Kernel]:
    """The kernels of a call on a GPU, slowest first."""
    return shares(launched(call))


def launched(call: Callable[[], Any]) -> list[tuple[str, float, float]]:
    """Name, start and end of each launch of a call on a GPU, us; copies and fills of memory too."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    return [(e.name, e.time_range.start, e.time_range.end) for e in found.events() if e.device_type.name == "CUDA"]


def shares(events: Iterable[tuple[str, float, float]]) -> list[Kernel]:
    """What each kernel had of the union of all intervals, most first: they sum to it, and never to
    more than the wall time.

    Launches overlap where one starts early and waits for the one before (`pdl_overlap`), or on
    several streams. The time of two belongs to the one that began first.

    events: name, start and end of each launch, us.
    """
    calls: Counter[str] = Counter()
    had: dict[str, float] = {}
    reached = -math.inf
    for start, end, name in sorted((start, end, name) for name, start, end in events):
        calls[name] += 1
        had[name] = had.get(name, 0.0) + max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return sorted((Kernel(name, count, had[name] / 1e3) for name, count in calls.items()), key=lambda k: -(k.cuda_ms or 0))


def _counted(call: Callable[[], Any]) -> list[Kernel]:
    with counted() as launches:
        call()
    return [Kernel(name, calls, None) for name, calls in sorted(launches.items(), key=lambda item: -item[1])]
