"""Tile code of the ops that keep a state: `gated_delta_rule` and `ssd`."""

import cuda.tile as ct

from .attention_tiles import packed_tile
from .tiles import load_tile

FLOOR = -1.0e30  # the exponent of a factor of 0
# Log2 of the least decay of a token: it leaves 1e-13 of the state. Behind a larger one the sums of
# a chunk would lose the decays of its other tokens.
LEAST_DECAY = -43.0
FORGOTTEN = -64.0  # log2 of the share of a state that no fp32 sum beside it shows


def row_of(ARRAY, at, column, shape, WHOLE):
    """Columns of a row as fp32, of a shape with one axis that is not 1: the tile number `column` of
    so many. WHOLE: all lie inside.
    """
    size = shape[0] * shape[1]
    if WHOLE:
        tile = load_tile(ARRAY, (at[0], at[1], at[2], column), (1, 1, 1, size), ct.PaddingMode.ZERO, True, None, False)
        return tile.reshape(shape).astype(ct.float32)
    columns = column * size + ct.arange(size, dtype=ct.int32)  # tileiras 13.4 gets a checked load of 32 values a thread wrong
    found = ct.gather(ARRAY, (at[0], at[1], at[2], columns), mask=columns < ARRAY.shape[3], padding_value=0, check_bounds=False)
    return found.reshape(shape).astype(ct.float32)


def chunk_of(CU_SEQLENS, place, CHUNK, tokens):
    """(first token of a sequence, one past its last, its chunk) at a place of packed sequences. At
    a place without a chunk, the first of all tokens: what is made of it nobody reads.
    """
    seq, c = packed_tile(CU_SEQLENS, place, CHUNK)
    first, end = ct.load(CU_SEQLENS, (seq,), ()), ct.load(CU_SEQLENS, (seq + 1,), ())
    there = (c >= 0) & (c * CHUNK < end - first)
    return ct.where(there, first, 0), ct.where(there, end, tokens), ct.where(there, c, 0)
