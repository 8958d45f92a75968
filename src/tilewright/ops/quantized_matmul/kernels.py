"""Tile code of `quantized_matmul`, which converts words of small codes to bf16 in registers.

The weights are the first operand of the MMA, even for one row of x: Hopper's wgmma takes it from
registers, so decoded weights never pass through shared memory.
"""

import cuda.tile as ct

from ..common.pdl import pdl_launch_dependents, pdl_overlap, pdl_wait
from ..common.pieces import PIECES, add_products, store_pieces, store_whole_pieces, summed
from ..common.tiles import ZERO, added_shares, gated, grouped_tile, rounded_sum, vector_chunk, widths_of, zeros_of
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
    squares,
    out,
    eps: float,
    CODE: ct.Constant[int],
    GROUP: ct.Constant[int],
    ZEROS: ct.Constant[bool],
    FACTOR: ct.Constant[bool],
    BIAS: ct.Constant[bool],
    SQUARES: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    RUNS: ct.Constant[int],
    BAND: ct.Constant[int],
    SCALE_SUMS: ct.Constant[bool],
    TMA_SCALES: ct.Constant[bool],
    SHARES: ct.Constant[int],
    EVEN: ct.Constant[bool],
    AHEAD: ct.Constant[int],
    EXTRA_M: ct.Constant[int],
    LATENCY: ct.Constant[int],
):
    """out [m, n] = x [m, k] @ weight [n, k].T, a tile of TILE_N rows of the weight to a block.

    words: [panels, runs, 64, 16] as ops/common/weight_formats.py packs them. RUNS: of a step.
    scales, zeros: [groups of k, n]; [1, n] where GROUP is 0, one scale for a row.
    SCALE_SUMS: a group's scale multiplies its sum in fp32; else the weights, rounded to bf16.
    TMA_SCALES: the scales of a step come as one tile by TMA; else each thread loads its own.
    SHARES: of k: with several, out [SHARES, m, n] takes the sums over each, the first with bias.
    SQUARES: squares [m, SQUARES or fewer], whose rows' sums are the means that a norm divides by.
    EVEN: the tiles end with the rows of the weight.
    AHEAD: of so many steps the weights come while the launch before ends; each share has as many.
    EXTRA_M: a tile has so many rows of x more than TILE_M, and an accumulator for each power of two
        of them; the weights of a step are decoded once for all.
    """
    pdl_launch_dependents()
    length = TILE_M + EXTRA_M
    tiles_m, tiles_n = ct.cdiv(x.shape[0], length), ct.cdiv(scales.shape[1], TILE_N)
    tile_m, tile_n = grouped_tile(ct.bid(0), tiles_m, tiles_n, BAND)
    RUN = WORDS * (8 if CODE == INT4 or CODE == E2M1 else 4)
    DEEP = RUN * RUNS  # k of a step
    GROUPS = max(1, DEEP // GROUP) if GROUP > 0 else 0  # of a step
    share = ct.bid(1)
    first, last = _steps(words, RUNS, share, SHARES)

    def weights(step):
        loaded = ct.load(words, (tile_n, step, 0, 0), (TILE_N // ROWS, RUNS, ROWS, WORDS), padding_mode=ZERO, latency=LATENCY)
        how = (GROUPS, GROUP, DEEP, TILE_N, TMA_SCALES, EVEN, LATENCY)
        return loaded, _columns(scales, step, tile_n, how), _columns(zeros, step, tile_n, how) if ZEROS else ()

    ready: tuple = ()
    for i in ct.static_iter(range(AHEAD)):
        ready = (*ready, weights(first + i))
    pdl_wait()

    runs = _runs(x, tile_m, TILE_M, EXTRA_M, DEEP)

    def added(accs, step, loaded, scale, zero):
        found: tuple = ()
        for j in ct.static_iter(range(len(accs))):
            acc, (view, at, _) = accs[j], runs[j]
            rows = view.load((at, step), latency=LATENCY)
            for i in ct.static_iter(range(RUNS)):
                q = ct.extract(loaded, (0, i, 0, 0), (TILE_N // ROWS, 1, ROWS, WORDS)).reshape((TILE_N, WORDS))
                y = ct.extract(rows, (0, i), (rows.shape[0], RUN)).transpose()
                acc = add_product(acc, q, y, scale, zero, i, (GROUP, GROUPS), (RUN, RUNS, CODE), SCALE_SUMS)
            found = (*found, acc)
        return found

    accs = zeros_of(TILE_N, widths_of(TILE_M, EXTRA_M))
    for i in ct.static_iter(range(AHEAD)):
        accs = added(accs, first + i, *ready[i])
    for step in range(first + AHEAD, last):
        accs = added(accs, step, *weights(step))
    for j in ct.static_iter(range(len(accs))):
        acc, (_, at, START) = accs[j], runs[j]
        if GROUP == 0:
            scale = ct.load(scales, (0, tile_n), (1, TILE_N), padding_mode=ZERO, allow_tma=False)
            acc = acc * (scale.reshape((TILE_N, 1)) * unit(CODE))
        elif CODE == E2M1:
            acc = acc * SMALL
        if SQUARES > 0:
            acc = acc * _rstd(_rows_from(squares, 0, START), at, acc.shape[1], length, SQUARES, eps)
        if START == 0 or tile_m * length + START < x.shape[0]:
            _finish(acc.transpose(), factor, bias, out, (share, tile_m, tile_n), START, length, FACTOR, BIAS, SHARES)


@ct.kernel
def quantized_matmul_sum_kernel(
    partial,
    out,
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    SHARES: ct.Constant[int],
):
    """Sums the shares of k. SHARES: how many there are, of which a tile is loaded at once."""
    pdl_overlap()
    at, shape = (ct.bid(1), ct.bid(0)), (TILE_M, TILE_N)
    ct.store(out, at, added_shares(partial, at, shape, False, SHARES))


def _steps(words, RUNS, share, SHARES):
    """The first step of a share of k, and the one behind its last."""
    steps = ct.cdiv(words.shape[1], RUNS)
    if SHARES == 1:
        return 0, steps
    each = ct.cdiv(steps, SHARES)
    return share * each, min(share * each + each, steps)


def _runs(x, tile_m, TILE_M, EXTRA_M, DEEP):
    """Of each accumulator: a view of its rows of x, in which neighbouring tiles are TILE_M +
    EXTRA_M rows apart; the tile to load, which may lie before one that is cut; and where they begin
    in a tile.
    """
    found: tuple = ()
    START, STEP = 0, TILE_M + EXTRA_M
    for TALL in ct.static_iter(widths_of(TILE_M, EXTRA_M)):
        view = _rows_from(x, 0, START).tiled_view((TALL, DEEP), padding_mode=ZERO, traversal_steps=(STEP, DEEP))
        found = (*found, (view, min(tile_m, ct.cdiv(x.shape[0] - START, STEP) - 1) if START else tile_m, START))
        START = START + TALL
    return found


def _rows_from(array, AXIS, START):
    return array.slice(AXIS, START, array.shape[AXIS]) if START else array


def _rstd(squares, tile_m, TILE_M, STEP, SQUARES, eps):
    """[1, TILE_M]: what the norm of each row multiplies it by. STEP: rows between tiles."""
    view = squares.tiled_view((TILE_M, SQUARES), padding_mode=ZERO, traversal_steps=(STEP, SQUARES))
    mean = ct.sum(view.load((tile_m, 0), allow_tma=False), axis=1)
    return (1.0 / ct.sqrt(mean + eps)).reshape((1, TILE_M))  # rsqrt is 2 ulp off in fp32


def _finish(acc, factor, bias, out, at, START, STEP, FACTOR, BIAS, SHARES):
    """Stores a tile [TILE_M, TILE_N] of sums over a share of k. at: the share, and the tile, of
    those that begin at row START and are STEP rows apart.
    """
    if FACTOR:
        acc = acc * ct.load(factor, (0,), (1,), allow_tma=False)
    if BIAS:
        more = ct.load(bias, (at[2],), (acc.shape[1],), padding_mode=ZERO, allow_tma=False).astype(ct.float32)
        acc = acc + (more if SHARES == 1 else ct.where(at[0] == 0, more, 0.0))
    if SHARES == 1:
        _rows_from(out, 0, START).tiled_view(acc.shape, traversal_steps=(STEP, acc.shape[1])).store(at[1:], acc.astype(out.dtype))
    else:
        shape = (1, *acc.shape)
        _rows_from(out, 1, START).tiled_view(shape, traversal_steps=(1, STEP, acc.shape[1])).store(at, acc.reshape(shape), allow_tma=False)


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
    squares,
    new_residual,
    weight_offset: float,
    NORM: ct.Constant[bool],
    ADD: ct.Constant[bool],
    GATED: ct.Constant[bool],
    GELU: ct.Constant[bool],
    COLS: ct.Constant[int],
    GIVEN: ct.Constant[int],
    PIECES: ct.Constant[bool],
    PLANES: ct.Constant[int],
    SUMS: ct.Constant[bool],
    RUN: ct.Constant[int],
    RUNS: ct.Constant[int],
):
    """RUNS runs of a row as the product takes it: with PIECES codes and factors, else rows. Grid
    (rows, shares of k).

    x, residual, up, rows, new_residual: [m, COLS]. norm: [COLS].
    NORM: the row times norm; squares [m, shares of k] gets its own share of the mean of squares,
        by which the product divides. ADD: of x + residual. GATED: the row is act(x) * up.
    GIVEN: of residual, or of x and up, the shares [GIVEN, m, COLS] that are their sum; 0 for none.
    """
    pdl_launch_dependents()
    row, share = ct.bid(0), ct.bid(1)
    at, shape, whole = (row, share), (1, RUN * RUNS), COLS % (RUN * RUNS) == 0
    if NORM:
        weight = vector_chunk(norm, share, COLS, RUN * RUNS).astype(ct.float32) + weight_offset
    pdl_wait()
    some = added_shares(x, at, shape, whole, GIVEN if GATED else 0, COLS)
    if NORM:
        if ADD:
            some = rounded_sum(some, added_shares(residual, at, shape, whole, GIVEN, COLS))
            ct.store(new_residual.slice(1, 0, COLS), at, some, allow_tma=False)
        some = some.astype(ct.float32)
        ct.store(squares, at, (ct.sum(some * some) * (1.0 / COLS)).reshape((1, 1)), allow_tma=False)
        some = some * weight
    elif GATED:
        some = gated(some, added_shares(up, at, shape, whole, GIVEN, COLS), GELU).astype(ct.bfloat16)
    if not PIECES:
        ct.store(rows, at, some.astype(rows.dtype), allow_tma=False)
    elif PLANES == 1:
        store_whole_pieces(codes, factors, some.astype(ct.float32).reshape((1, RUNS, RUN)), row, share, SUMS)
    else:
        store_pieces(codes, factors, some.astype(ct.float32).reshape((1, RUNS * RUN // 64, 2, 32)), (0, row), share, 0, PLANES, SUMS)


@ct.kernel
def quantized_matmul_few_kernel(
    codes,
    factors,
    words,
    scales,
    zeros,
    factor,
    bias,
    squares,
    out,
    eps: float,
    CODE: ct.Constant[int],
    GROUP: ct.Constant[int],
    ZEROS: ct.Constant[bool],
    FACTOR: ct.Constant[bool],
    BIAS: ct.Constant[bool],
    SQUARES: ct.Constant[int],
    PLANES: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    RUNS: ct.Constant[int],
    SHARES: ct.Constant[int],
    AHEAD: ct.Constant[int],
    LATENCY: ct.Constant[int],
):
    """out [m, n] = x [m, k] @ weight [n, k].T, all of m and TILE_N rows of the weight to a block.
    Grid (column tiles, shares of k).

    codes: e4m3 [m * 2 * PLANES, k of whole runs]; factors: fp32 [1, runs, 1 or for INT4 2, m * 2 *
        PLANES]. PLANES: columns of a piece.
    AHEAD: of so many steps the weights come while the launch before ends; each share has as many.
    The others as in `quantized_matmul_kernel`.
    """
    pdl_launch_dependents()
    tile_n, share = ct.bid(0), ct.bid(1)
    RUN = 64 if CODE == E4M3 else 128
    DEEP, WIDE = RUN * RUNS, TILE_M * PIECES * PLANES
    HIGH, LOW = max(1, TILE_N // ROWS), min(ROWS, TILE_N)
    first, last = _steps(words, RUNS, share, SHARES)

    def weights(step):
        loaded = ct.load(words, (tile_n, step, 0, 0), (HIGH, RUNS, LOW, WORDS), padding_mode=ZERO, latency=LATENCY)
        scale = _groups(scales, step, tile_n, TILE_N, GROUP, DEEP, LATENCY) if GROUP > 0 else None
        zero = _groups(zeros, step, tile_n, TILE_N, GROUP, DEEP, LATENCY) if ZEROS else None
        return loaded.reshape((1, HIGH, RUNS, LOW, WORDS)), scale, zero

    ready: tuple = ()
    for i in ct.static_iter(range(AHEAD)):
        ready = (*ready, weights(first + i))
    pdl_wait()
    if SQUARES > 0:
        rstd = _rstd(squares, 0, TILE_M, TILE_M, SQUARES, eps)

    def added(acc, step, loaded, scale, zero):
        x = ct.load(codes, (0, step), (WIDE, DEEP), padding_mode=ZERO, latency=LATENCY)
        by = ct.load(factors, (0, step, 0, 0), (1, RUNS, 2 if CODE == INT4 else 1, WIDE), padding_mode=ZERO, latency=LATENCY)
        return add_products(acc, loaded, (x,), by, scale, zero, (CODE, GROUP, PLANES))

    acc = ct.zeros((TILE_N, WIDE), ct.float32)
    for i in ct.static_iter(range(AHEAD)):
        acc = added(acc, first + i, *ready[i])
    for step in range(first + AHEAD, last):
        acc = added(acc, step, *weights(step))
    y = summed(acc, TILE_M, CODE)
    if GROUP == 0:
        y = y * ct.load(scales, (0, tile_n), (1, TILE_N), padding_mode=ZERO, allow_tma=False).reshape((TILE_N, 1))
    if SQUARES > 0:
        y = y * rstd
    _finish(y.transpose(), factor, bias, out, (share, 0, tile_n), 0, TILE_M, FACTOR, BIAS, SHARES)


def _groups(array, step, tile_n, TILE_N, GROUP, DEEP, LATENCY):
    """Scales or zero points of a step [1, groups, TILE_N]."""
    GROUPS = max(1, DEEP // GROUP)
    some = ct.load(array, (step * DEEP // max(GROUP, DEEP), tile_n), (GROUPS, TILE_N), padding_mode=ZERO, latency=LATENCY)
    return some.reshape((1, GROUPS, TILE_N))
