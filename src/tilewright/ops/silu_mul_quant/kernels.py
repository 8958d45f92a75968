"""Tile code of `silu_mul_quant`: groups within a tile, and whole rows."""

import cuda.tile as ct

from ..common.fp8 import codes_of, group_codes, scale_of
from ..common.scaling import GROUP
from ..common.tiles import Rows, each_chunk, each_row_tile, each_tile, gated, load_masked, of_width

# A row ends in halves, quarters, ... of a tile, so that rows of a multiple of 128 columns need no
# checks.
PARTS = (2, 4, 8, 16, 32)
ZERO = ct.PaddingMode.ZERO  # zero times zero is zero, which is never the largest of a group


def _result(arrays, i, j, WIDTH, whole, how):
    """[TILE_M, WIDTH] in fp32: tile (i, j) of that size."""
    GATE, UP, _ = arrays
    GELU, TILE_M, LATENCY, LOAD_TMA, _ = how
    gate = load_masked(GATE, (i, j), (TILE_M, WIDTH), ZERO, whole, LATENCY, LOAD_TMA)
    up = load_masked(UP, (i, j), (TILE_M, WIDTH), ZERO, whole, LATENCY, LOAD_TMA)
    return gated(gate, up, GELU)


def _row_max(x):
    return ct.max(x, axis=1, keepdims=True, propagate_nan=True)


def _with_ends(largest, arrays, i, COLS, TILE_N, whole, how):
    """The largest of whole rows, and their results behind the last whole tile: (column tile,
    fp32 results), narrower and narrower.
    """
    ends: tuple = ()
    for part in ct.static_iter(PARTS):
        if whole and COLS * part // TILE_N % 2 == 1:
            y = _result(arrays, i, COLS * part // TILE_N - 1, TILE_N // part, whole, how)
            largest = ct.maximum(largest, _row_max(ct.abs(y)), propagate_nan=True)
            ends = (*ends, (COLS * part // TILE_N - 1, y))
    return largest, ends


@ct.kernel
def silu_mul_quant_kernel(
    GATE: Rows,
    UP: Rows,
    CODES: Rows,
    SCALE,
    GELU: ct.Constant[bool],
    LARGEST: ct.Constant[int],
    POWER_OF_TWO: ct.Constant[bool],
    GROUP_N: ct.Constant[int],
    PERSISTENT: ct.Constant[bool],
    COLS: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    LATENCY: ct.Constant[int],
    LOAD_TMA: ct.Constant[bool],
    STORE_TMA: ct.Constant[bool],
):
    """Groups that lie within a tile, tiles in row-major order. GATE, UP, CODES: [rows, COLS];
    SCALE: [column groups, rows].
    """
    shape = (TILE_M, TILE_N)
    GATE, UP, CODES = of_width(GATE, COLS), of_width(UP, COLS), of_width(CODES, COLS)

    def compute(i, j, whole):
        gate = load_masked(GATE, (i, j), shape, ZERO, whole, LATENCY, LOAD_TMA)
        up = load_masked(UP, (i, j), shape, ZERO, whole, LATENCY, LOAD_TMA)
        codes, scale = group_codes(gated(gate, up, GELU), CODES.dtype, 1, GROUP_N, LARGEST, POWER_OF_TWO)
        ct.store(CODES, (i, j), codes, check_bounds=not whole, allow_tma=STORE_TMA)
        ct.store(SCALE, (j, i), scale, check_bounds=not whole, allow_tma=False)

    each_tile(compute, CODES, COLS, PERSISTENT, TILE_M, TILE_N, False)


@ct.kernel
def silu_mul_quant_rows_kernel(
    GATE: Rows,
    UP: Rows,
    CODES: Rows,
    SCALE,
    GELU: ct.Constant[bool],
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
    """One scale for each row. GATE, UP, CODES: [rows, COLS]; SCALE: [1, rows].

    KEEP_ROW: the results of a tile of rows are kept in registers, in chunks of TILE_N columns; else
        rows of any width are read for the maximum, and again for the codes.
    """
    GATE, UP, CODES = of_width(GATE, COLS), of_width(UP, COLS), of_width(CODES, COLS)
    arrays = (GATE, UP, CODES)
    how = (GELU, TILE_M, LATENCY, LOAD_TMA, STORE_TMA)

    def compute(i, whole):
        def result(j):
            return _result(arrays, i, j, TILE_N, whole, how)

        ys: tuple = ()
        amax = ct.zeros((TILE_M, TILE_N), ct.float32)
        chunks = COLS // TILE_N if whole else ct.cdiv(COLS, TILE_N)
        if KEEP_ROW:
            for j in ct.static_iter(range(chunks)):
                ys = (*ys, result(j))
                amax = ct.maximum(amax, ct.abs(ys[j]), propagate_nan=True)
        else:
            for j in range(chunks):
                amax = ct.maximum(amax, ct.abs(result(j)), propagate_nan=True)
        largest, ends = _with_ends(_row_max(amax), arrays, i, COLS, TILE_N, whole, how)
        scale = scale_of(largest, LARGEST, POWER_OF_TWO)

        def store(j):
            y = ys[j] if KEEP_ROW else result(j)
            ct.store(CODES, (i, j), codes_of(y, scale, CODES.dtype), check_bounds=not whole, allow_tma=STORE_TMA)

        each_chunk(store, chunks, KEEP_ROW)
        for j, y in ct.static_iter(ends):
            ct.store(CODES, (i, j), codes_of(y, scale, CODES.dtype), check_bounds=False, allow_tma=STORE_TMA)
        ct.store(SCALE, (0, i), scale.reshape((1, TILE_M)), check_bounds=not whole, allow_tma=False)

    each_row_tile(compute, CODES, COLS, PERSISTENT, TILE_M, min(TILE_N, GROUP))
