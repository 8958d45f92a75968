"""The one place that orders configs: legal candidates, by price, corrected by what was measured.

candidates(problem, device)                 the op's data, expanded
 `- legal(problem, config, device)          what its kernels can do
     `- work(problem, config, device)       what the launch asks for: Work
         `- us(work, rates)                 cost.py, with the constants of data/<GPU>.json
             `- * exp(correction + doubt)   neighbours.py: what near timings say of the price
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from ..launch import Decision, Device, Launch
from .cost import Array, Prices, Works, us
from .neighbours import Neighbours, Place
from .rates import Rates, data_of, forget as forget_rates, rates

P = TypeVar("P")
C = TypeVar("C")
MOST = 40  # configs of a space
FAR_OFF = 0.4  # a config whose modelled time is so much more than the least, in the logarithm, is not worth a look at its neighbours


@dataclass(frozen=True)
class Choices(Generic[P, C]):
    """What an op states about its configs.

    op: its name, and that of its constants in the data.
    candidates: every config that may be worth timing; need not be legal.
    legal: whether the kernels can run it, and the compiler compiles it without spilling much. It
        need not test whether the device has the problem's dtypes (`has_dtypes`).
    work: the counts of its launch; a tuple if one launch has unlike parts that follow each other.
    family: the features that share an error of the model, such as dtype, epilogue and tile; by
        default the whole config.
    most: how many configs a space has.
    like: an op from whose constants the fit of this op starts, because it does the same and has
        more timings.
    tie: prices that differ by less (in the logarithm) count as equal. Of those near the best, the
        one listed first is the default, so that a new size does not compile a new kernel for
        nothing.
    bucket: the problem that is priced in place of all similar ones, so that few kernels serve them;
        by default each problem is its own.
    timed_as: the problem and config by whose timings others are judged, for options that no timings
        have yet; by default themselves.
    regimes_too: timings of far problems count where their launches stand alike between their bounds
        (`neighbours.regime`). For ops with many timings: of few it makes noise.
    """

    op: str
    candidates: Callable[[P, Device], Iterable[C]]
    legal: Callable[[P, C, Device], bool]
    work: Callable[[P, C, Device], Works]
    family: Callable[[P, C], str] | None = None
    most: int = MOST
    tie: float = 0.0
    like: str = ""
    bucket: Callable[[P, Device], P] | None = None
    timed_as: Callable[[P, C], tuple[P, C]] | None = None
    regimes_too: bool = False

    def family_of(self, problem: P, config: C) -> str:
        return self.family(problem, config) if self.family else str(config)

    def place(self, problem: P, config: C, work: Works) -> Place:
        known = self.timed_as(problem, config) if self.timed_as else (problem, config)
        return *known, work, self.family_of(problem, config)

    def space(self, problem: P, device: Device) -> "Ordered[C]":
        """The configs worth timing, the untuned default first; none if the device can't run the
        problem.
        """
        return _ordered_once(self, self.bucket(problem, device), device) if self.bucket else ordered(self, problem, device)

    def decision(
        self, problem: type[P], plan: Callable[[P, C, Device], Sequence[Launch]], arguments: Sequence[str], *, any_length: bool = False
    ) -> Decision:
        """What calls ask: for problems of a class, with the launches of `plan`, which take
        `arguments` (`Decision`).
        """
        return Decision(self.op, problem=problem, arguments=arguments, space=self.space, plan=plan, any_length=any_length)

    def us(self, problem: P, config: C, device: Device) -> float:
        """The model's time alone, without neighbours."""
        return us(self.work(problem, config, device), rates(self.op, device))


class Ordered(list[C]):
    """The best configs, best first.

    source: what the order comes from: "first" (no model), "model" or "model + N neighbours".
    legal: these and all behind them, any of which a tuned row may name.
    """

    def __init__(self, configs: Sequence[C], source: str, most: int = MOST) -> None:
        super().__init__(configs[:most])
        self.source = source
        self.legal = configs


@dataclass(frozen=True)
class Model:
    """What prices the configs of one op on one device. neighbours: its timings, None where there
    are none. source: in words.
    """

    rates: Rates
    neighbours: Neighbours | None
    source: str

    def price(self, op: Choices[P, C], problem: P, configs: Sequence[C], works: Sequence[Works]) -> Array:
        """Of each config the logarithm of the us that it is expected to take, doubt included.

        Configs that the model finds much worse than its best are not looked up.
        """
        logs: Array = np.log(Prices(works).us(self.rates))
        if self.neighbours is None:
            return logs
        near = np.flatnonzero(logs <= logs.min() + FAR_OFF).tolist()
        residual, doubt = self.neighbours.say([op.place(problem, configs[i], works[i]) for i in near])
        logs += float(residual.max())
        logs[near] += residual - residual.max() + doubt
        return logs


def ordered(op: Choices[P, C], problem: P, device: Device) -> Ordered[C]:
    """The configs worth timing, the default first. Deterministic. On a CPU they keep the op's
    order, because a cost model is not worth it there.
    """
    configs = dict.fromkeys(op.candidates(problem, device)) if has_dtypes(device, problem) else ()
    legal = [c for c in configs if op.legal(problem, c, device)]
    if device.is_cpu or not legal:
        return Ordered(legal, "first")
    model = model_of(op.op, device)
    works = [op.work(problem, config, device) for config in legal]
    order = ranked(model.price(op, problem, legal, works).tolist(), op.tie)
    first = order[0]
    neighbours = model.neighbours.near(op.place(problem, legal[first], works[first])) if model.neighbours else 0
    words = f"{model.source} + {neighbours} neighbour{'s' * (neighbours > 1)}" if neighbours else model.source
    return Ordered([legal[i] for i in order], words, op.most)


_ordered_once = lru_cache(maxsize=256)(ordered)  # of buckets: a server meets a new size of the same one again and again


def has_dtypes(device: Device, problem: Any) -> bool:
    """Whether a problem's fields name no 8-bit float, or the device has them."""
    values = (getattr(problem, field.name) for field in fields(problem))
    return device.has_fp8 or not any(isinstance(of, torch.dtype) and of.is_floating_point and of.itemsize == 1 for of in values)


def ranked(prices: Sequence[float], tie: float) -> list[int]:
    """Positions by price, the cheapest first; in front of them the first that ties with it."""
    order = sorted(range(len(prices)), key=lambda i: (prices[i], i))
    first = next(i for i, price in enumerate(prices) if price <= prices[order[0]] + tie)
    return [first, *(i for i in order if i != first)]


@cache
def model_of(op: str, device: Device) -> Model:
    """The model of an op as `data/` has it. Measured neighbours are only those of the very GPU."""
    data, source = data_of(device)
    points = data["points"].get(op) if data["gpu"] == device.name else None
    return Model(rates(op, device), Neighbours.read(points) if points else None, source)


def forget() -> None:
    """Reads the data again at the next call: after a fit in this process."""
    model_of.cache_clear()
    _ordered_once.cache_clear()
    forget_rates()
