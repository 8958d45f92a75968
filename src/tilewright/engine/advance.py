"""The end of a decode step, in one launch: stores the chosen tokens and advances all counters."""

from functools import cache
from typing import Any

import cuda.tile as ct
from torch import Tensor

from ..launch import Bound, Device, Launch, next_pow2
from ..ops.common.pdl import pdl_overlap


@ct.kernel
def advance_kernel(TOKENS: Any, RECENT: Any, COUNTERS: Any, CLOCK: Any, TILE: ct.Constant[int]) -> None:
    """Row CLOCK[0] of RECENT = TOKENS; COUNTERS and CLOCK go up by one. Grid (1,).

    int64: TOKENS [batch], RECENT [rows, batch], CLOCK [2]. int32: COUNTERS [2, batch]. TILE: a
        power of two, at least batch.
    """
    pdl_overlap()
    row, draws = ct.load(CLOCK, (0,), ()), ct.load(CLOCK, (1,), ())
    column = ct.arange(TILE, dtype=ct.int32)
    ct.scatter(RECENT, (row, column), ct.gather(TOKENS, column, padding_value=0))
    for i in ct.static_iter(range(2)):
        ct.scatter(COUNTERS, (i, column), ct.gather(COUNTERS, (i, column), padding_value=0) + 1)
    ct.store(CLOCK, (0,), row + 1)
    ct.store(CLOCK, (1,), draws + 1)


def advance(tokens: Tensor, recent: Tensor, counters: Tensor, clock: Tensor) -> None:
    """No checks, no sync: safe under graph capture."""
    _launches(Device.of(tokens), len(tokens)).run(tokens, recent, counters, clock)


@cache
def _launches(device: Device, batch: int) -> Bound:
    launch = Launch(advance_kernel, (1,), {"tile": next_pow2(batch)}, pdl=True)
    return Bound([launch], ("tokens", "recent", "counters", "clock"), device)
