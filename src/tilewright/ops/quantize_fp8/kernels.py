"""Tile code of `quantize_fp8`: groups within a tile, whole rows, and one scale for all."""

import cuda.tile as ct

from ..common.fp8 import codes_of, group_codes, scale_of
from ..common.tiles import Rows, each_chunk, each_row_tile, each_tile, load_masked, of_width

ZERO = ct.PaddingMode.ZERO  # padding is never the largest of a group


@ct.kernel
def quantize_fp8_kernel(
    X: Rows,
    CODES: Rows,
    SCALE,
    LARGEST: ct.Constant[int],
    POWER_OF_TWO: ct.Constant[bool],
    GROUP_M: ct.Constant[int],
    GROUP_N: ct.Constant[int],
    PERSISTENT: ct.Constant[bool],
    COLS: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    LATENCY: ct.Constant[int],
    LOAD_TMA: ct.Constant[bool],
    STORE_TMA: ct.Constant[bool],
):
    """Groups that lie within a tile. X, CODES: [rows, COLS]; SCALE: [column groups, row groups];
    GROUP_M is 1 or TILE_M.
    """
    X, CODES = of_width(X, COLS), of_width(CODES, COLS)

    def compute(i, j, whole):
        x = load_masked(X, (i, j), (TILE_M, TILE_N), ZERO, whole, LATENCY, LOAD_TMA)
        codes, scale = group_codes(x, CODES.dtype, GROUP_M, GROUP_N, LARGEST, POWER_OF_TWO)
        ct.store(CODES, (i, j), codes, check_bounds=not whole, allow_tma=STORE_TMA)
        ct.store(SCALE, (j, i), scale, check_bounds=not whole, allow_tma=False)

    each_tile(compute, X, COLS, PERSISTENT, TILE_M, TILE_N, False)


@ct.kernel
def quantize_fp8_rows_kernel(
    X: Rows,
    CODES: Rows,
    SCALE,
    LARGEST: ct.Constant[int],
    POWER_OF_TWO: ct.Constant[bool],
    KEEP_ROW: ct.Constant[bool],
    PERSISTENT: ct.Constant[bool],
    COLS: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    LATENCY: ct.Constant[int],
    LOAD_TMA: ct.Constant[bool],
    STORE_TMA: ct.Constant[bool],
):
    """One scale for each row. X, CODES: [rows, COLS]; SCALE: [1, rows].

    KEEP_ROW: a tile of rows is read once and kept in registers, in chunks of TILE_N columns; else
        rows of any width are read for the maximum, and again for the codes.
    """
    X, CODES = of_width(X, COLS), of_width(CODES, COLS)

    def quantize(i, whole):
        def load(j):
            return load_masked(X, (i, j), (TILE_M, TILE_N), ZERO, whole, LATENCY, LOAD_TMA)

        xs: tuple = ()
        amax = ct.zeros((TILE_M, TILE_N), X.dtype)
        if KEEP_ROW:
            for j in ct.static_iter(range(ct.cdiv(COLS, TILE_N))):
                xs = (*xs, load(j))
                amax = ct.maximum(amax, ct.abs(xs[j]), propagate_nan=True)
        else:
            for j in range(ct.cdiv(COLS, TILE_N)):
                amax = ct.maximum(amax, ct.abs(load(j)), propagate_nan=True)
        amax = ct.max(amax, axis=1, keepdims=True, propagate_nan=True).astype(ct.float32)
        scale = scale_of(amax, LARGEST, POWER_OF_TWO)

        def store(j):
            x = xs[j] if KEEP_ROW else load(j)
            ct.store(CODES, (i, j), codes_of(x.astype(ct.float32), scale, CODES.dtype), check_bounds=not whole, allow_tma=STORE_TMA)

        each_chunk(store, ct.cdiv(COLS, TILE_N), KEEP_ROW)
        ct.store(SCALE, (0, i), scale.reshape((1, TILE_M)), check_bounds=not whole, allow_tma=False)

    each_row_tile(quantize, X, COLS, PERSISTENT, TILE_M, TILE_N)


@ct.kernel
def quantize_fp8_amax_kernel(
    X: Rows,
    PARTIAL,
    COLS: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    LATENCY: ct.Constant[int],
    LOAD_TMA: ct.Constant[bool],
):
    """The largest magnitude among the tiles of each block. X: [rows, COLS]; PARTIAL: [blocks]."""
    X = of_width(X, COLS)
    tiles_n = ct.cdiv(COLS, TILE_N)
    amax = ct.zeros((TILE_M, TILE_N), X.dtype)
    for index in range(ct.bid(0), ct.num_tiles(X, 0, (TILE_M, TILE_N)) * tiles_n, ct.num_blocks(0)):
        x = load_masked(X, (index // tiles_n, index % tiles_n), (TILE_M, TILE_N), ZERO, TILE_M == 1 and COLS % TILE_N == 0, LATENCY, LOAD_TMA)
        amax = ct.maximum(amax, ct.abs(x), propagate_nan=True)
    ct.store(PARTIAL, (ct.bid(0),), ct.max(amax.reshape((TILE_M * TILE_N,)), propagate_nan=True).astype(ct.float32).reshape((1,)))


@ct.kernel
def quantize_fp8_scaled_kernel(
    X: Rows,
    CODES: Rows,
    SCALE,
    PARTIAL,
    LARGEST: ct.Constant[int],
    POWER_OF_TWO: ct.Constant[bool],
    GIVEN: ct.Constant[bool],
    MOST_PARTIAL: ct.Constant[int],
    PERSISTENT: ct.Constant[bool],
    COLS: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    LATENCY: ct.Constant[int],
    LOAD_TMA: ct.Constant[bool],
    STORE_TMA: ct.Constant[bool],
):
    """One scale for all: SCALE [1, 1] if GIVEN, else made of PARTIAL [at most MOST_PARTIAL] and
    written. X, CODES: [rows, COLS].

    From the end to the start, because quantize_fp8_amax_kernel has left the end of X in L2.
    """
    X, CODES = of_width(X, COLS), of_width(CODES, COLS)

    def scale_now():
        if GIVEN:
            return ct.load(SCALE, (0, 0), (1, 1), allow_tma=False)
        partial = ct.load(PARTIAL, (0,), (MOST_PARTIAL,), padding_mode=ZERO, allow_tma=False)
        scale = scale_of(ct.max(partial, axis=0, keepdims=True, propagate_nan=True).reshape((1, 1)), LARGEST, POWER_OF_TWO)
        if ct.bid(0) == 0:
            ct.store(SCALE, (0, 0), scale)
        return scale

    first = scale_now() if PERSISTENT else 0.0

    def compute(i, j, whole):
        x = load_masked(X, (i, j), (TILE_M, TILE_N), ZERO, whole, LATENCY, LOAD_TMA).astype(ct.float32)
        # A block with one tile loads it meanwhile.
        scale = first if PERSISTENT else scale_now()
        ct.store(CODES, (i, j), codes_of(x, scale, CODES.dtype), check_bounds=not whole, allow_tma=STORE_TMA)

    each_tile(compute, X, COLS, PERSISTENT, TILE_M, TILE_N, not GIVEN)
