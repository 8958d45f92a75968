"""The end of a decode step, in one launch: the chosen tokens are noted, and all that counts steps moves on."""

import cuda.tile as ct
from torch import Tensor

from ..launch import Plan, launch, next_pow2
from ..ops.early import overlap_previous


@ct.kernel
def advance_kernel(TOKENS, RECENT, COUNTERS, CLOCK, TILE: ct.Constant[int]):
    """Row CLOCK[0] of RECENT = TOKENS; COUNTERS and CLOCK go up by one. Grid (1,).

    int64: TOKENS [batch], RECENT [rows, batch], CLOCK [2]. int32: COUNTERS [2, batch]. TILE: a power of two, at least batch.
    """
    overlap_previous()
    row, draws = ct.load(CLOCK, (0,), ()), ct.load(CLOCK, (1,), ())
    column = ct.arange(TILE, dtype=ct.int32)
    ct.scatter(RECENT, (row, column), ct.gather(TOKENS, column, padding_value=0))
    for i in ct.static_iter(range(2)):
        ct.scatter(COUNTERS, (i, column), ct.gather(COUNTERS, (i, column), padding_value=0) + 1)
    ct.store(CLOCK, (0,), row + 1)
    ct.store(CLOCK, (1,), draws + 1)


def advance(tokens: Tensor, recent: Tensor, counters: Tensor, clock: Tensor) -> None:
    """No checks, no sync: safe under graph capture."""
    launch(Plan(advance_kernel, (1,), (next_pow2(len(tokens)),), early=True), tokens, recent, counters, clock)
