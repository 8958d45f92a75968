"""Tile code of `matmul` with operands that the threads copy into shared memory, 16 bytes each, in
place of the TMA unit.
"""

import cuda.tile as ct

from ..common.tiles import ZERO, grouped_tile
from .kernels import split_work

UNIT = 8  # elements that a thread copies at once: 16 bytes of 16-bit numbers


@ct.kernel
def matmul_gathered_kernel(
    a,
    b,
    bias,
    partial,
    out,
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    TILE_K: ct.Constant[int],
    GROUP: ct.Constant[int],
    SPLIT_K: ct.Constant[bool],
    BIAS: ct.Constant[bool],
    LATENCY: ct.Constant[int],
):
    """out [m, n] = a @ b + bias, one tile of `out` (or part of one) to a block; k a multiple of
    UNIT.

    a: [m, k]; b: [n, k]; both of 16 bits. bias, partial and SPLIT_K as in `matmul_kernel`.
    For rows that do not begin at multiples of 128 bytes. The TMA unit reads such a row from L2 128
    bytes at a time, each in two lines. The threads of a warp read all of its 2 * TILE_K bytes at
    once, which takes a single line more.
    """
    tiles_m, tiles_n = ct.cdiv(out.shape[0], TILE_M), ct.cdiv(out.shape[1], TILE_N)
    steps = ct.cdiv(a.shape[1], TILE_K)
    if SPLIT_K:
        tile, first, last, is_part, part, shared = split_work(ct.bid(0), tiles_m * tiles_n, steps, partial)
    else:
        tile, first, last = ct.bid(0), 0, steps
    tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP)
    rows, columns = _rows(a, tile_m, TILE_M), _rows(b, tile_n, TILE_N)
    acc = ct.zeros((TILE_M, TILE_N), dtype=ct.float32)
    for step in range(first, last):
        at = ct.expand_dims(step * TILE_K + ct.arange(TILE_K, dtype=ct.int32), 0)
        # One mask for each UNIT: with a mask for each element, each would be copied by itself.
        unit = step * (TILE_K // UNIT) + ct.arange(TILE_K // UNIT, dtype=ct.int32).reshape((1, TILE_K // UNIT, 1))
        inside = ct.broadcast_to(unit < a.shape[1] // UNIT, (1, TILE_K // UNIT, UNIT)).reshape((1, TILE_K))
        x = ct.gather(a, (rows, at), mask=inside, check_bounds=False, latency=LATENCY)
        w = ct.gather(b, (columns, at), mask=inside, check_bounds=False, latency=LATENCY)
        acc = ct.mma(x, w.transpose(), acc)
    if BIAS and first == 0:
        acc += ct.load(bias, index=(tile_n,), shape=(TILE_N,), padding_mode=ZERO, allow_tma=False).astype(ct.float32)
    if SPLIT_K and is_part:
        ct.store(partial, index=(part, shared, 0, 0), tile=acc.reshape((1, 1, TILE_M, TILE_N)))
    else:
        ct.store(out, index=(tile_m, tile_n), tile=acc.astype(out.dtype))


def _rows(matrix, tile, ROWS):
    """[ROWS, 1] row indices of a tile; beyond the edge the last row, whose products nobody
    stores.
    """
    return ct.expand_dims(min(tile * ROWS + ct.arange(ROWS, dtype=ct.int32), matrix.shape[0] - 1), 1)
