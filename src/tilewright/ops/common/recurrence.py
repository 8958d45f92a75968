"""Tile code of the ops that keep a state: `gated_delta_rule` and `ssd`."""

import cuda.tile as ct

from .tiles import load_tile

FLOOR = -1.0e30  # the exponent of a factor of 0
# Log2 of the least decay of a token: it leaves 1e-13 of the state. Behind a larger one the sums of
# a chunk would lose the decays of its other tokens.
LEAST_DECAY = -43.0


def row_of(ARRAY, at, column, size, WHOLE):
    """`size` columns of a row as fp32, the tile number `column` of them. WHOLE: all lie inside."""
    if WHOLE:
        tile = load_tile(ARRAY, (at[0], at[1], at[2], column), (1, 1, 1, size), ct.PaddingMode.ZERO, True, None, False)
        return tile.reshape((size,)).astype(ct.float32)
    columns = column * size + ct.arange(size, dtype=ct.int32)  # tileiras 13.4 gets a checked load of 32 values a thread wrong
    found = ct.gather(ARRAY, (at[0], at[1], at[2], columns), mask=columns < ARRAY.shape[3], padding_value=0, check_bounds=False)
    return found.astype(ct.float32)
