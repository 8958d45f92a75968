"""The end of a decode step, or of a round with a draft, in one launch: keeps the chosen tokens and
advances all counters.
"""

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


@ct.kernel
def accept_kernel(  # noqa: PLR0913 tile code
    IDS: Any, CHOSEN: Any, PAIR: Any, PLACES: Any, DRAWS: Any, LIMIT: Any, TOLD: Any, GAINED: Any, TILE: ct.Constant[int], WIDE: ct.Constant[int]
) -> None:
    """The end of a round: takes what was right of each draft, and moves on. Grid (1,).

    int64: IDS [batch, 1 + draft], the last token and the draft; CHOSEN [1 + draft, batch], the
        model's own tokens behind each; PAIR [batch, 2], the last two tokens; DRAWS [1 + draft,
        batch], tokens of the answer, and one more in each row; TOLD [batch], of these what the host
        knows; GAINED [batch, room], what it does not.
    int32: PLACES [3 + draft, batch], the position before the last token's, and one more in each
        row; LIMIT [batch], the position that the last token ends at.
    TILE, WIDE: powers of two, at least batch and 1 + draft.
    """
    pdl_overlap()
    batch, i = ct.arange(TILE, dtype=ct.int32), ct.arange(WIDE, dtype=ct.int32)
    draft = IDS.shape[1] - 1
    row, column = ct.expand_dims(batch, 1), ct.expand_dims(i, 0)
    chosen = ct.gather(CHOSEN, (column, row), padding_value=0)
    drafted = ct.gather(IDS, (row, column + 1), padding_value=-1)
    wrong = (chosen != drafted) | (column >= draft)
    right = ct.min(ct.where(wrong, column, draft), axis=1)  # tokens of the draft
    place, written = ct.gather(PLACES, (1, batch), padding_value=0), ct.gather(DRAWS, (0, batch), padding_value=0)
    step = ct.minimum(right + 1, ct.gather(LIMIT, batch, padding_value=0) - place)
    known = written - ct.gather(TOLD, batch, padding_value=0)
    ct.scatter(GAINED, (row, ct.expand_dims(known, 1) + column), chosen)
    ct.scatter(PAIR, (batch, 0), ct.gather(IDS, (batch, right), padding_value=0))
    last = ct.gather(CHOSEN, (right, batch), padding_value=0)
    ct.scatter(PAIR, (batch, 1), last)
    ct.scatter(IDS, (batch, 0), last)
    places = ct.arange(2 * WIDE, dtype=ct.int32)
    ct.scatter(PLACES, (ct.expand_dims(places, 0), row), ct.expand_dims(place + step, 1) + (ct.expand_dims(places, 0) - 1))
    ct.scatter(DRAWS, (column, row), ct.expand_dims(written + step, 1) + column)


def accept(ids: Tensor, chosen: Tensor, pair: Tensor, places: Tensor, draws: Tensor, limit: Tensor, told: Tensor, gained: Tensor) -> None:
    """No checks, no sync: safe under graph capture."""
    _accept_launches(Device.of(ids), *ids.shape).run(ids, chosen, pair, places, draws, limit, told, gained)


@cache
def _accept_launches(device: Device, batch: int, wide: int) -> Bound:
    launch = Launch(accept_kernel, (1,), {"tile": next_pow2(batch), "wide": next_pow2(wide)}, pdl=True)
    return Bound([launch], ("ids", "chosen", "pair", "places", "draws", "limit", "told", "gained"), device)
