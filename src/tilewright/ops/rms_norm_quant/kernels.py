"""Tile code of `rms_norm_quant`."""

import cuda.tile as ct

from ..common.fp8 import codes_of, group_codes, scale_of
from ..common.tiles import Rows, each_chunk, each_row_tile, load_masked, of_width, sum_tile, vector_chunk

# Padded columns add nothing to the sum of squares and are never the largest.
ZERO = ct.PaddingMode.ZERO


def _reciprocal_root(squares, eps, COLS):
    """1 / sqrt(mean + eps) of each row of a tile of sums of squares: the hardware's, with an error
    of 2 ulp, and a Newton step, which needs no branch.
    """
    mean = ct.sum(squares, axis=1, keepdims=True) * (1.0 / COLS) + eps
    root = ct.rsqrt(mean)
    better = (0.5 - 0.5 * mean * root * root) * root + root
    return ct.where(ct.isnan(better), root, better)  # 0 and infinity


def _weighted(x, rstd, weight, weight_offset, ROUND):
    """One tile of the result in fp32; all but the factor rstd of it, unless ROUND puts that before
    the weight.
    """
    y = x.astype(ct.float32)
    if ROUND:
        y = (y * rstd).astype(x.dtype).astype(ct.float32)
    return y * (weight.astype(ct.float32) + weight_offset)


@ct.kernel
def rms_norm_quant_kernel(
    X: Rows,
    RESIDUAL: Rows,
    WEIGHT,
    CODES: Rows,
    SCALE,
    NEW_RESIDUAL: Rows,
    eps: float,
    weight_offset: float,
    ADD: ct.Constant[bool],
    ROUND: ct.Constant[bool],
    LARGEST: ct.Constant[int],
    POWER_OF_TWO: ct.Constant[bool],
    GROUP_N: ct.Constant[int],
    KEEP_ROW: ct.Constant[bool],
    PERSISTENT: ct.Constant[bool],
    COLS: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    LATENCY: ct.Constant[int],
    LOAD_TMA: ct.Constant[bool],
    STORE_TMA: ct.Constant[bool],
):
    """X, RESIDUAL, CODES, NEW_RESIDUAL: [rows, COLS]; WEIGHT: [COLS]; SCALE: [column groups, rows].

    ADD: with a residual. GROUP_N: columns of a group, 0 for the whole row.
    KEEP_ROW: a tile of rows is read once and kept in registers, in chunks of TILE_N columns; else
        rows of any width have a pass for the sum of squares and the maximum (two, if ROUND comes
        between), and one for the codes.
    """
    shape = (TILE_M, TILE_N)
    X, RESIDUAL, CODES, NEW_RESIDUAL = of_width(X, COLS), of_width(RESIDUAL, COLS), of_width(CODES, COLS), of_width(NEW_RESIDUAL, COLS)
    weights: tuple = ()
    if KEEP_ROW:
        for j in ct.static_iter(range(ct.cdiv(COLS, TILE_N))):
            weights = (*weights, vector_chunk(WEIGHT, j, COLS, TILE_N))

    def load(array, i, j, whole):
        return load_masked(array, (i, j), shape, ZERO, whole, LATENCY, LOAD_TMA)

    def weighted(x, j, rstd):
        weight = weights[j] if KEEP_ROW else vector_chunk(WEIGHT, j, COLS, TILE_N)
        return _weighted(x, rstd, weight, weight_offset, ROUND)

    def normalise(i, whole):
        xs: tuple = ()
        squares = ct.zeros(shape, ct.float32)
        if KEEP_ROW:
            for j in ct.static_iter(range(ct.cdiv(COLS, TILE_N))):
                x = sum_tile(load, X, RESIDUAL, NEW_RESIDUAL, i, j, ADD, whole, STORE_TMA)
                wide = x.astype(ct.float32)
                squares = squares + wide * wide
                xs = (*xs, x)
        else:
            amax = ct.zeros(shape, ct.float32)
            for j in range(ct.cdiv(COLS, TILE_N)):
                x = sum_tile(load, X, RESIDUAL, NEW_RESIDUAL, i, j, ADD, whole, STORE_TMA)
                wide = x.astype(ct.float32)
                squares = squares + wide * wide
                if GROUP_N == 0 and not ROUND:
                    amax = ct.maximum(amax, ct.abs(weighted(x, j, 1.0)), propagate_nan=True)
        rstd = _reciprocal_root(squares, eps, COLS)
        factor = 1.0 if ROUND else rstd

        def result(j):
            return weighted(xs[j] if KEEP_ROW else load(NEW_RESIDUAL if ADD else X, i, j, whole), j, rstd)

        def store_groups(j):
            codes, scale = group_codes(result(j) * factor, CODES.dtype, 1, GROUP_N, LARGEST, POWER_OF_TWO)
            ct.store(CODES, (i, j), codes, check_bounds=not whole, allow_tma=STORE_TMA)
            ct.store(SCALE, (j, i), scale, check_bounds=not whole, allow_tma=False)

        if GROUP_N > 0:
            each_chunk(store_groups, ct.cdiv(COLS, TILE_N), KEEP_ROW)
        else:
            if KEEP_ROW:
                amax = ct.zeros(shape, ct.float32)
                for j in ct.static_iter(range(ct.cdiv(COLS, TILE_N))):
                    amax = ct.maximum(amax, ct.abs(result(j)), propagate_nan=True)
            elif ROUND:
                for j in range(ct.cdiv(COLS, TILE_N)):
                    amax = ct.maximum(amax, ct.abs(result(j)), propagate_nan=True)
            amax = ct.max(amax, axis=1, keepdims=True, propagate_nan=True) * factor
            scale = scale_of(amax, LARGEST, POWER_OF_TWO)

            def store(j):
                ct.store(CODES, (i, j), codes_of(result(j) * factor, scale, CODES.dtype), check_bounds=not whole, allow_tma=STORE_TMA)

            each_chunk(store, ct.cdiv(COLS, TILE_N), KEEP_ROW)
            ct.store(SCALE, (0, i), scale.reshape((1, TILE_M)), check_bounds=not whole, allow_tma=False)

    each_row_tile(normalise, X, COLS, PERSISTENT, TILE_M, TILE_N)
