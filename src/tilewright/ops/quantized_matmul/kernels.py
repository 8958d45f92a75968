"""Tile code of `quantized_matmul`, which converts words of small codes to bf16 in registers.

The weights are the first operand of the MMA, even for one row of x: Hopper's wgmma takes it from
registers, so decoded weights never pass through shared memory.
"""

import cuda.tile as ct

from ..common.pdl import pdl_launch_dependents, pdl_overlap, pdl_wait
from ..common.pieces import PIECES, add_products, store_pieces, store_whole_pieces, summed
from ..common.tiles import ZERO, gated, grouped_tile, load_masked, rounded_sum, vector_chunk
from ..common.weight_formats import E2M1, E4M3, INT4, ROWS, WORDS
from ..common.weight_tiles import SMALL, add_product, unit


@ct.kernel
def quantized_matmul_kernel(
    x,
    words,
    scales,
    zeros,
    factor,
    bias,
    partial,
    out,
    CODE: ct.Constant[int],
    GROUP: ct.Constant[int],
    ZEROS: ct.Constant[bool],
    FACTOR: ct.Constant[bool],
    BIAS: ct.Constant[bool],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    RUNS: ct.Constant[int],
    BAND: ct.Constant[int],
    SCALE_SUMS: ct.Constant[bool],
    TMA_SCALES: ct.Constant[bool],
    SPLIT_K: ct.Constant[bool],
    EVEN: ct.Constant[bool],
    LATENCY: ct.Constant[int],
):
    """out [m, n] = x [m, k] @ weight [n, k].T, a tile of TILE_N rows of the weight to a block.

    words: [panels, runs, 64, 16] as ops/common/weight_formats.py packs them. RUNS: of a step.
    scales, zeros: [groups of k, n]; [1, n] where GROUP is 0, one scale for a row.
    SCALE_SUMS: a group's scale multiplies its sum in fp32; else the weights, rounded to bf16.
    TMA_SCALES: the scales of a step come as one tile by TMA; else each thread loads its own.
    SPLIT_K: partial [parts, m, n] takes the sums over shares of k, without factor and bias.
    EVEN: the tiles end with the rows of the weight.
    """
    pdl_overlap()
    tiles_m, tiles_n = ct.cdiv(out.shape[0], TILE_M), ct.cdiv(out.shape[1], TILE_N)
    tile_m, tile_n = grouped_tile(ct.bid(0), tiles_m, tiles_n, BAND)
    RUN = WORDS * (8 if CODE == INT4 or CODE == E2M1 else 4)
    DEEP = RUN * RUNS  # k of a step
    GROUPS = max(1, DEEP // GROUP) if GROUP > 0 else 0  # of a step
    steps = ct.cdiv(words.shape[1], RUNS)
    if SPLIT_K:
        share = ct.cdiv(steps, partial.shape[0])
        first = ct.bid(1) * share
        last = min(first + share, steps)
    else:
        first, last = 0, steps
    acc = ct.zeros((TILE_N, TILE_M), ct.float32)
    for step in range(first, last):
        loaded = ct.load(words, (tile_n, step, 0, 0), (TILE_N // ROWS, RUNS, ROWS, WORDS), padding_mode=ZERO, latency=LATENCY)
        rows = ct.load(x, (tile_m, step), (TILE_M, DEEP), padding_mode=ZERO, latency=LATENCY)
        how = (GROUPS, GROUP, DEEP, TILE_N, TMA_SCALES, EVEN, LATENCY)
        scale = _columns(scales, step, tile_n, how)
        zero = _columns(zeros, step, tile_n, how) if ZEROS else ()
        for i in ct.static_iter(range(RUNS)):
            q = ct.extract(loaded, (0, i, 0, 0), (TILE_N // ROWS, 1, ROWS, WORDS)).reshape((TILE_N, WORDS))
            y = ct.extract(rows, (0, i), (TILE_M, RUN)).transpose()
            acc = add_product(acc, q, y, scale, zero, i, (GROUP, GROUPS), (RUN, RUNS, CODE), SCALE_SUMS)
    if GROUP == 0:
        scale = ct.load(scales, (0, tile_n), (1, TILE_N), padding_mode=ZERO, allow_tma=False)
        acc = acc * (scale.reshape((TILE_N, 1)) * unit(CODE))
    elif CODE == E2M1:
        acc = acc * SMALL
    if SPLIT_K:
        ct.store(partial, (ct.bid(1), tile_m, tile_n), acc.transpose().reshape((1, TILE_M, TILE_N)), allow_tma=False)
    else:
        _finish(acc.transpose(), factor, bias, out, tile_m, tile_n, FACTOR, BIAS)


@ct.kernel
def quantized_matmul_sum_kernel(
    partial,
    factor,
    bias,
    out,
    FACTOR: ct.Constant[bool],
    BIAS: ct.Constant[bool],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    PARTS: ct.Constant[int],
):
    """Sums the shares of k. PARTS: how many there are, of which a tile is loaded at once."""
    pdl_overlap()
    tile_n, tile_m = ct.bid(0), ct.bid(1)
    acc = ct.zeros((TILE_M, TILE_N), ct.float32)
    for part in ct.static_iter(range(PARTS)):
        acc = acc + ct.load(partial, (part, tile_m, tile_n), (1, TILE_M, TILE_N), padding_mode=ZERO, allow_tma=False).reshape((TILE_M, TILE_N))
    _finish(acc, factor, bias, out, tile_m, tile_n, FACTOR, BIAS)


def _finish(acc, factor, bias, out, tile_m, tile_n, FACTOR, BIAS):
    """Stores a tile [TILE_M, TILE_N] of sums over all of k."""
    if FACTOR:
        acc = acc * ct.load(factor, (0,), (1,), allow_tma=False)
    if BIAS:
        acc = acc + ct.load(bias, (tile_n,), (acc.shape[1],), padding_mode=ZERO, allow_tma=False).astype(ct.float32)
    ct.store(out, (tile_m, tile_n), acc.astype(out.dtype))


def _columns(array, step, tile_n, how):
    """Of each group of a step [TILE_N, 1]: a number for each row of the tile."""
    GROUPS, GROUP, DEEP, TILE_N, TMA, EVEN, LATENCY = how
    found: tuple = ()
    if TMA and GROUPS > 0:
        tile = ct.load(array, (step * DEEP // max(GROUP, DEEP), tile_n), (GROUPS, TILE_N), padding_mode=ZERO, latency=LATENCY)
    for i in ct.static_iter(range(GROUPS)):
        group = min(step * GROUPS + i, array.shape[0] - 1) if GROUPS > 1 else step * DEEP // GROUP  # behind the end x is zeros
        if TMA:
            column = ct.extract(tile, (i, 0), (1, TILE_N))
        elif EVEN:
            column = ct.load(array, (group, tile_n), (1, TILE_N), check_bounds=False, latency=LATENCY, allow_tma=False)
        else:
            column = ct.load(array, (group, tile_n), (1, TILE_N), padding_mode=ZERO, latency=LATENCY, allow_tma=False)
        found = (*found, column.reshape((TILE_N, 1)))
    return found


@ct.kernel
def quantized_matmul_rows_kernel(
    x,
    norm,
    residual,
    up,
    rows,
    codes,
    factors,
    new_residual,
    eps: float,
    weight_offset: float,
    NORM: ct.Constant[bool],
    ADD: ct.Constant[bool],
    ROUND: ct.Constant[bool],
    GATED: ct.Constant[bool],
    GELU: ct.Constant[bool],
    COLS: ct.Constant[int],
    WIDE: ct.Constant[int],
    PIECES: ct.Constant[bool],
    PLANES: ct.Constant[int],
    SUMS: ct.Constant[bool],
    RUN: ct.Constant[int],
    RUNS: ct.Constant[int],
):
    """RUNS runs of a row as the product takes it: with PIECES codes and factors, else rows. Grid
    (rows, shares of k).

    x, residual, up, rows, new_residual: [m, COLS]. norm: [COLS].
    NORM: the row is normed, in tiles of WIDE columns; ADD: of x + residual. GATED: it is act(x) *
        up.
    """
    pdl_overlap()
    row, share = ct.bid(0), ct.bid(1)
    at, shape, whole = (row, share), (1, RUN * RUNS), COLS % (RUN * RUNS) == 0
    x, residual, up = x.slice(1, 0, COLS), residual.slice(1, 0, COLS), up.slice(1, 0, COLS)
    if NORM:
        squares = ct.zeros((1, WIDE), ct.float32)
        for j in ct.static_iter(range(ct.cdiv(COLS, WIDE))):
            all = _sum(x, residual, (row, j), (1, WIDE), COLS % WIDE == 0, ADD).astype(ct.float32)
            squares = squares + all * all
        rstd = 1.0 / ct.sqrt(ct.sum(squares) * (1.0 / COLS) + eps)  # rsqrt is 2 ulp off in fp32
        some = _sum(x, residual, at, shape, whole, ADD)
        if ADD:
            ct.store(new_residual, at, some, allow_tma=False)
        some = some.astype(ct.float32) * rstd
        if ROUND:
            some = some.astype(x.dtype).astype(ct.float32)
        some = some * (vector_chunk(norm, share, COLS, RUN * RUNS).astype(ct.float32) + weight_offset)
    else:
        some = load_masked(x, at, shape, ZERO, whole, None, False)
        if GATED:
            some = gated(some, load_masked(up, at, shape, ZERO, whole, None, False), GELU)
    some = some.astype(x.dtype)
    if not PIECES:
        ct.store(rows, at, some, allow_tma=False)
    elif PLANES == 1:
        store_whole_pieces(codes, factors, some.astype(ct.float32).reshape((1, RUNS, RUN)), row, share, SUMS)
    else:
        store_pieces(codes, factors, some.astype(ct.float32).reshape((1, RUNS * RUN // 64, 2, 32)), (0, row), share, 0, PLANES, SUMS)


def _sum(x, residual, at, shape, whole, ADD):
    """A tile of x, or of x + residual, rounded."""
    some = load_masked(x, at, shape, ZERO, whole, None, False)
    return rounded_sum(some, load_masked(residual, at, shape, ZERO, whole, None, False)) if ADD else some


@ct.kernel
def quantized_matmul_few_kernel(
    codes,
    factors,
    words,
    scales,
    zeros,
    factor,
    bias,
    partial,
    out,
    CODE: ct.Constant[int],
    GROUP: ct.Constant[int],
    ZEROS: ct.Constant[bool],
    FACTOR: ct.Constant[bool],
    BIAS: ct.Constant[bool],
    PLANES: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    RUNS: ct.Constant[int],
    SHARES: ct.Constant[int],
    AHEAD: ct.Constant[bool],
    LATENCY: ct.Constant[int],
):
    """out [m, n] = x [m, k] @ weight [n, k].T, all of m and TILE_N rows of the weight to a block.
    Grid (column tiles, shares of k).

    codes: e4m3 [m * 2 * PLANES, k of whole runs]; factors: fp32 [1, runs, 1 or for INT4 2, m * 2 *
        PLANES]. PLANES: columns of a piece.
    SHARES: of k: partial [SHARES, m, n] takes their sums, without factor and bias.
    AHEAD: the weights of the first step come while the launch before ends.
    The others as in `quantized_matmul_kernel`.
    """
    if AHEAD:
        pdl_launch_dependents()
    else:
        pdl_overlap()
    tile_n, share = ct.bid(0), ct.bid(1)
    RUN = 64 if CODE == E4M3 else 128
    DEEP, WIDE = RUN * RUNS, TILE_M * PIECES * PLANES
    HIGH, LOW = max(1, TILE_N // ROWS), min(ROWS, TILE_N)
    steps = ct.cdiv(words.shape[1], RUNS)
    first, last = 0, steps
    if SHARES > 1:
        each = ct.cdiv(steps, SHARES)
        first = share * each
        last = min(first + each, steps)

    def weights(step):
        loaded = ct.load(words, (tile_n, step, 0, 0), (HIGH, RUNS, LOW, WORDS), padding_mode=ZERO, latency=LATENCY)
        scale = _groups(scales, step, tile_n, TILE_N, GROUP, DEEP, LATENCY) if GROUP > 0 else None
        zero = _groups(zeros, step, tile_n, TILE_N, GROUP, DEEP, LATENCY) if ZEROS else None
        return loaded.reshape((1, HIGH, RUNS, LOW, WORDS)), scale, zero

    if AHEAD:
        found = weights(first)
        pdl_wait()

    def added(acc, step, loaded, scale, zero):
        x = ct.load(codes, (0, step), (WIDE, DEEP), padding_mode=ZERO, latency=LATENCY)
        by = ct.load(factors, (0, step, 0, 0), (1, RUNS, 2 if CODE == INT4 else 1, WIDE), padding_mode=ZERO, latency=LATENCY)
        return add_products(acc, loaded, (x,), by, scale, zero, (CODE, GROUP, PLANES))

    acc = ct.zeros((TILE_N, WIDE), ct.float32)
    if AHEAD:
        acc, first = added(acc, first, *found), first + 1
    for step in range(first, last):
        acc = added(acc, step, *weights(step))
    y = summed(acc, TILE_M, CODE)
    if GROUP == 0:
        y = y * ct.load(scales, (0, tile_n), (1, TILE_N), padding_mode=ZERO, allow_tma=False).reshape((TILE_N, 1))
    if SHARES > 1:
        ct.store(partial, (share, 0, tile_n), y.transpose().reshape((1, TILE_M, TILE_N)), allow_tma=False)
    else:
        _finish(y.transpose(), factor, bias, out, 0, tile_n, FACTOR, BIAS)


def _groups(array, step, tile_n, TILE_N, GROUP, DEEP, LATENCY):
    """Scales or zero points of a step [1, groups, TILE_N]."""
    GROUPS = max(1, DEEP // GROUP)
    some = ct.load(array, (step * DEEP // max(GROUP, DEEP), tile_n), (GROUPS, TILE_N), padding_mode=ZERO, latency=LATENCY)
    return some.reshape((1, GROUPS, TILE_N))
