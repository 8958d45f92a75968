"""Predicts the time of a launch, in microseconds, from its work (Work) and the GPU's constants
(Rates). One formula serves every op.

    us   = start + sum over waves of (bound + tile + chain) + second launch
    bound = (compute^8 + fill^8 + memory^8)^(1/8): the largest of the three decides, and two that
    are near share a little

Blocks that share an SM hide each other's start, end and waits: there a wave takes the larger of
`bound` and of one block's own life.

Many launches are priced at once, as arrays: at the first call of an op all its configs, in the fit
thousands of timings again and again.
"""

import math
from collections.abc import Mapping, Sequence
from operator import attrgetter

import numpy as np

from .rates import Rates
from .work import Work

Works = Work | tuple[Work, ...]
Array = np.ndarray

SHARP = 8.0  # how sharply the largest of the bounds decides
FADE_US = 500.0  # tensor cores that are busy for much longer run at the lower clock
SPAN_RAMP = 0.2  # share of `reach` over which memory slows down
TILE = 1 << 14  # elements of the tile that rates["tile"] is given for, 128 x 128
LEAST_TILE = 1 << 10
UNTIMED_SHARE = 1.0  # of the bf16 peak, of a kind of operations that nothing measured tells of

NUMBERS = (
    *("blocks", "resident", "per_sm", "sms", "steps", "flops", "serial", "exponentials", "fill", "padding", "dram"),
    *("span", "aligned", "unaligned", "out", "persistent", "chain", "ragged", "partial", "spill", "stages"),
)
_numbers = attrgetter(*NUMBERS)


def us(work: Works, rates: Rates) -> float:
    """Time of a launch, us. A tuple: parts of one launch that follow each other."""
    return float(Prices([work]).us(rates)[0])


class Prices:
    """What prices many launches under any constants."""

    def __init__(self, works: Sequence[Works]) -> None:
        parts = [(i, part) for i, work in enumerate(works) for part in ((work,) if isinstance(work, Work) else work)]
        self._of, self._count = np.array([i for i, _ in parts], int), len(works)
        table = np.array([_numbers(part) for _, part in parts], float).reshape(-1, len(NUMBERS))
        self._counts: Mapping[str, Array] = dict(zip(NUMBERS, table.T, strict=True))
        self._kinds = {kinds: i for i, kinds in enumerate(dict.fromkeys(part.kinds for _, part in parts))}
        self._kind = np.array([self._kinds[part.kinds] for _, part in parts], int)

    def us(self, rates: Rates) -> Array:
        """Of each launch, us."""
        w = self._counts
        shares = np.array([math.prod(rates.get("eff." + kind, UNTIMED_SHARE) for kind in kinds) for kinds in self._kinds])
        time = np.maximum(_waves_us(w, rates, rates["flops"] * shares[self._kind]), w["dram"] / rates["dram"])
        time += np.where(w["partial"] > 0, rates["reduce"] + w["partial"] / rates["reduce_rate"], 0.0)
        found: Array = rates["start"] + np.bincount(self._of, time, self._count)
        return found


def _waves_us(w: Mapping[str, Array], rates: Rates, rate: Array) -> Array:
    full, rest = np.divmod(w["blocks"], w["resident"])
    blocks = np.array((np.minimum(w["blocks"], w["resident"]), np.maximum(rest, 1)))
    each, last = _wave_us(w, blocks, rates, rate, np.array((np.zeros(len(rest), bool), w["persistent"] > 0)))
    total = np.maximum(full, 1) * each + np.where((full > 0) & (rest > 0), last, 0.0)
    # Long and short blocks take turns: no whole waves, but the longest may end alone.
    ragged = w["ragged"]
    turns = np.maximum(ragged * each, w["blocks"] / w["resident"] * each + rates["tail"] * (ragged - 1) * each)
    return np.asarray(np.where(ragged > 1, turns, total) * (1 + rates["spill"] * w["spill"]))


def _wave_us(w: Mapping[str, Array], n: Array, rates: Rates, rate: Array, behind: Array) -> Array:
    """One wave of n blocks, of several such waves a row each. rate: of the MMA, flop/us. behind: it
    begins under the end of another.
    """
    width = np.maximum(1, w["resident"] // w["per_sm"])
    on_sm = np.minimum(w["per_sm"], np.ceil(n / width))
    one, compute = _compute_us(w, on_sm, rates, rate)
    off = np.where(w["aligned"] == 128, 0.0, w["unaligned"])
    fill = w["steps"] * w["fill"] / rates["fill"] * (1 + off * (rates["unaligned"] - 1))
    sectors = np.where(w["aligned"] >= 32, 0.0, off)
    from_l2 = w["fill"] * ((1 - sectors) / rates["l2"] + sectors / rates["sectors"]) + w["padding"] / rates["padding"]
    fills = np.maximum(fill * on_sm, w["steps"] * n * w["sms"] * from_l2)
    each = w["dram"] / w["blocks"]
    beyond = w["span"] * n / np.minimum(w["blocks"], w["resident"]) / rates["reach"] - 1
    shared = each * n / rates["dram"] * (1 + rates["far"] * np.clip(beyond / SPAN_RAMP, 0.0, 1.0))
    drawn = np.maximum(each - rates["burst"], 0.2 * each)
    in_pair = np.where(w["sms"] > 1, 2 * on_sm / w["sms"], np.where(2 * n > width, 2 * on_sm, 0))  # blocks that two SMs with one port share
    alone = np.maximum(drawn / rates["draw"], drawn * in_pair / rates["pair"])
    alone = np.maximum(alone, w["steps"] * rates["latency"] / w["stages"])
    own = rates["tile"] * np.sqrt(np.maximum(w["out"], LEAST_TILE) / TILE) * np.where(w["persistent"] > 0, rates["persistent"], 1.0)
    own += w["chain"] * rates["latency"]
    bound = _largest(compute, fills, np.maximum(alone, shared))
    life = _largest(one, fill, np.maximum(alone, shared * width / n)) + own
    time = np.where(on_sm == 1, bound + own, np.maximum(bound, life))
    # The last tiles of persistent blocks start under the end of those before, where memory binds.
    hidden = np.maximum(_largest(compute, fills, 0.0) + own, each * n / rates["dram"])
    return np.asarray(np.where(behind, hidden, time))


def _largest(compute: Array, fill: Array, memory: Array | float) -> Array:
    total: Array = (compute**SHARP + fill**SHARP + memory**SHARP) ** (1 / SHARP)
    return total


def _compute_us(w: Mapping[str, Array], on_sm: Array, rates: Rates, rate: Array) -> tuple[Array, Array]:
    """Time of one block's operations if it had the SM alone, and of all blocks of an SM."""
    products = w["steps"] * w["flops"] / rate
    busy = products * on_sm * w["blocks"] / w["resident"]
    products = products * (1 + rates["fade"] * busy / (busy + FADE_US))
    products = np.hypot(products, w["steps"] * w["exponentials"] / rates["exponentials"])  # they fill the gaps of the tensor cores
    works = w["flops"] > 0
    issue, waits = w["steps"] * rates["step"], w["steps"] * w["serial"] * rates["serial"]
    return (products + issue + waits) * works, np.maximum(products * on_sm + issue / on_sm, products + issue + waits) * works
