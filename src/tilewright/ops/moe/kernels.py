"""Tile code of `moe`: the products."""

import cuda.tile as ct

from ..common.expert_lists import activated
from ..common.pdl import pdl_overlap
from ..common.scaling import BLOCK, GROUP, ROW, add_scaled
from ..common.tiles import ZERO, grouped_tile


def _finished(acc, PARTS, TILE_M, TILE_N, SWAP_AB, ACTIVATION):
    """[TILE_M, TILE_N] of the result: the accumulator, or of its first part and its second what
    `activated` makes.
    """
    if PARTS == 2:
        if SWAP_AB:
            acc = activated(ct.extract(acc, (0, 0), (TILE_N, TILE_M)), ct.extract(acc, (1, 0), (TILE_N, TILE_M)), *ACTIVATION)
        else:
            acc = activated(ct.extract(acc, (0, 0), (TILE_M, TILE_N)), ct.extract(acc, (0, 1), (TILE_M, TILE_N)), *ACTIVATION)
    return acc.transpose() if SWAP_AB else acc


def _weight_tile(w, expert, tile_n, step, PARTS, TILE_N, TILE_K, LATENCY):
    """[PARTS * TILE_N, TILE_K]"""
    tile = ct.load(w, (expert, 0, tile_n, step), (1, PARTS, TILE_N, TILE_K), padding_mode=ZERO, latency=LATENCY)
    return tile.reshape((PARTS * TILE_N, TILE_K))


def _block_scale(scale_w, expert, part, tile_n, group, TILE_N, LATENCY):
    """[1]: the scale of a weight tile of one part in one group of k. TILE_N is at most a block."""
    index = (expert, part, tile_n // (GROUP // TILE_N), group)
    return ct.load(scale_w, index, (1, 1, 1, 1), check_bounds=False, latency=LATENCY, allow_tma=False).reshape((1,))


def _block_scales(scale_w, expert, tile_n, group, PARTS, TILE_N, LATENCY):
    """[PARTS * TILE_N], or [1] of one part: scales of a weight tile in one group of k."""
    first = _block_scale(scale_w, expert, 0, tile_n, group, TILE_N, LATENCY)
    if PARTS == 1:
        return first
    return ct.where(ct.arange(PARTS * TILE_N, dtype=ct.int32) < TILE_N, first, _block_scale(scale_w, expert, 1, tile_n, group, TILE_N, LATENCY))


def of_rows(values, expert, tile_n, PARTS, TILE_N):
    """fp32 [PARTS * TILE_N]: the scales, or the biases, of the rows of a weight tile; values:
    [experts, PARTS, n, 1].
    """
    part = ct.arange(PARTS, dtype=ct.int32).reshape((PARTS, 1))
    row = (tile_n * TILE_N + ct.arange(TILE_N, dtype=ct.int32)).reshape((1, TILE_N))
    # Not `load`: of an array whose last axis is 1 long, tileiras 13.4 makes loads of two elements,
    # which need not be aligned to two.
    return ct.gather(values, (expert, part, row, 0), padding_value=0).reshape((PARTS * TILE_N,)).astype(ct.float32)


@ct.kernel
def moe_kernel(
    panels,
    x,
    scale_x,
    w,
    scale_w,
    bias,
    out,
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    TILE_K: ct.Constant[int],
    PARTS: ct.Constant[int],
    GROUP_M: ct.Constant[int],
    SWAP_AB: ct.Constant[bool],
    SCALING: ct.Constant[int],
    QUANTIZED: ct.Constant[bool],
    PERSISTENT: ct.Constant[bool],
    STORE_TMA: ct.Constant[bool],
    LATENCY: ct.Constant[int],
    ADD_BIAS: ct.Constant[bool],
    ALPHA: ct.Constant[float],
    LIMIT: ct.Constant[float],
    UP_OFFSET: ct.Constant[float],
):
    """Panels of TILE_M rows of x, each times its expert's weights; with PARTS = 2 what `activated`
    makes of the two products.

    panels: int32, their number and of each its expert.
    x: [most rows, k]. w: [experts, PARTS, n, k]. out: [most rows, n].
    scale_w: fp32 [experts, PARTS, n groups or n, k groups or 1], read only with SCALING.
    scale_x: [k groups, most rows], only with QUANTIZED: x is codes too; else 8-bit weights are
        widened to the dtype of x.
    bias: [experts, PARTS, n, 1], read only with ADD_BIAS.
    SWAP_AB: accumulate the transpose, with the weights' rows on the long side of the MMA: for few
        rows of x, not with QUANTIZED.
    """
    tiles_n = ct.cdiv(out.shape[1], TILE_N)
    total = ct.gather(panels, 0)
    wide = PARTS * TILE_N

    def quantized_tile(panel, tile_n, expert):
        # An accumulator for each part, each with one scale of b a step: with both parts in one tile
        # the compiler keeps two steps in flight instead of six (sm_90).
        accs: tuple = ()
        for _ in ct.static_iter(range(PARTS)):
            accs = (*accs, ct.zeros((TILE_M, TILE_N), dtype=ct.float32))
        for step in range(ct.cdiv(x.shape[1], TILE_K)):
            group = step * TILE_K // GROUP
            a = ct.load(x, (panel, step), (TILE_M, TILE_K), padding_mode=ZERO, latency=LATENCY)
            lines = ct.load(scale_x, (group, panel), (1, TILE_M), check_bounds=False, latency=LATENCY, allow_tma=False).reshape((TILE_M,))
            sums: tuple = ()
            for part in ct.static_iter(range(PARTS)):
                b = ct.load(w, (expert, part, tile_n, step), (1, 1, TILE_N, TILE_K), padding_mode=ZERO, latency=LATENCY).reshape((TILE_N, TILE_K))
                column = ct.ones((1,), ct.float32)
                if SCALING == BLOCK:
                    column = _block_scale(scale_w, expert, part, tile_n, group, TILE_N, LATENCY)
                sums = (*sums, add_scaled(accs[part], a, b.transpose(), lines, column))
            accs = sums
        if SCALING == ROW:
            columns = of_rows(scale_w, expert, tile_n, PARTS, TILE_N)
            sums = ()
            for part in ct.static_iter(range(PARTS)):
                sums = (*sums, accs[part] * ct.extract(columns, (part,), (TILE_N,)).reshape((1, TILE_N)))
            accs = sums
        if ADD_BIAS:
            columns = of_rows(bias, expert, tile_n, PARTS, TILE_N)
            sums = ()
            for part in ct.static_iter(range(PARTS)):
                sums = (*sums, accs[part] + ct.extract(columns, (part,), (TILE_N,)).reshape((1, TILE_N)))
            accs = sums
        return activated(accs[0], accs[1], ALPHA, LIMIT, UP_OFFSET) if PARTS == 2 else accs[0]

    def of_columns(values, expert, tile_n):
        """A value for each column of the product, along the accumulator's axis of columns."""
        each = of_rows(values, expert, tile_n, PARTS, TILE_N)
        return each.reshape((wide, 1)) if SWAP_AB else each.reshape((1, wide))

    def plain_tile(panel, tile_n, expert):
        acc = ct.zeros((wide, TILE_M) if SWAP_AB else (TILE_M, wide), dtype=ct.float32)
        if ADD_BIAS and SCALING != ROW:  # if added at the end, it spills (sm_90, 128 x 128 on 4 warps)
            acc = acc + of_columns(bias, expert, tile_n)
        for step in range(ct.cdiv(x.shape[1], TILE_K)):
            a = ct.load(x, (panel, step), (TILE_M, TILE_K), padding_mode=ZERO, latency=LATENCY)
            b = _weight_tile(w, expert, tile_n, step, PARTS, TILE_N, TILE_K, LATENCY)
            if SCALING:
                b = b.astype(x.dtype)
            if SCALING == BLOCK:
                cols = _block_scales(scale_w, expert, tile_n, step * TILE_K // GROUP, PARTS, TILE_N, LATENCY)
                if SWAP_AB:
                    acc = acc + ct.mma(b, a.transpose(), ct.zeros(acc.shape, ct.float32)) * cols.reshape((cols.shape[0], 1))
                else:
                    acc = acc + ct.mma(a, b.transpose(), ct.zeros(acc.shape, ct.float32)) * cols.reshape((1, cols.shape[0]))
            elif SWAP_AB:
                acc = ct.mma(b, a.transpose(), acc)
            else:
                acc = ct.mma(a, b.transpose(), acc)
        if SCALING == ROW:
            acc = acc * of_columns(scale_w, expert, tile_n)
            if ADD_BIAS:
                acc = acc + of_columns(bias, expert, tile_n)
        return _finished(acc, PARTS, TILE_M, TILE_N, SWAP_AB, (ALPHA, LIMIT, UP_OFFSET))

    def one_tile(index):
        panel, tile_n = grouped_tile(index, total, tiles_n, GROUP_M)
        expert = ct.gather(panels, 1 + panel)
        y = quantized_tile(panel, tile_n, expert) if QUANTIZED else plain_tile(panel, tile_n, expert)
        ct.store(out, (panel, tile_n), y.astype(out.dtype), allow_tma=STORE_TMA)

    if PERSISTENT:
        for index in range(ct.bid(0), total * tiles_n, ct.num_blocks(0)):
            one_tile(index)
    elif ct.bid(0) < total * tiles_n:
        one_tile(ct.bid(0))


@ct.kernel
def moe_few_kernel(
    ids,
    x,
    w,
    scale_w,
    bias,
    rows,
    out,
    TOP_K: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    TILE_K: ct.Constant[int],
    PARTS: ct.Constant[int],
    TILE_P: ct.Constant[int],
    SCALING: ct.Constant[int],
    LATENCY: ct.Constant[int],
    ADD_BIAS: ct.Constant[bool],
    ALPHA: ct.Constant[float],
    LIMIT: ct.Constant[float],
    UP_OFFSET: ct.Constant[float],
):
    """All tokens, at most TILE_M of them, times the weights of each expert that one of them chose.
    Grid (column tiles, pairs of token and choice).

    The block of the first pair that names an expert computes it for all tokens. The columns of the
    MMA that no token asked for cost nothing while the weights are read, and no list of tokens is
    needed. The first product (PARTS = 2) finds those pairs and writes them into rows; the
    second reads them there.
    ids, rows: [pairs]; rows[i]: first pair with the expert of pair i, times TILE_M, plus the token
        of pair i; -1 where there is no such expert.
    x: [1, tokens, k] or, of the second product, [pairs, TILE_M, k]. w: [experts, PARTS, n, k].
    out: [pairs, TILE_M, n].
    scale_w, bias: as moe_kernel. TILE_P: a power of two, at least pairs.
    """
    pdl_overlap()
    tile_n, pair = ct.bid(0), ct.bid(1)
    wide = PARTS * TILE_N
    own = ct.gather(ids, pair, check_bounds=False)
    mine = (own >= 0) & (own < w.shape[0])
    if PARTS == 2:
        index = ct.arange(TILE_P, dtype=ct.int32)
        leader = ct.min(ct.where((ct.gather(ids, index, padding_value=-1) == own) & (index < ids.shape[0]), index, pair))
        if tile_n == 0:
            ct.scatter(rows, pair, ct.where(mine, leader * TILE_M + pair // TOP_K, -1))
        mine = mine & (leader == pair)
    else:
        mine = ct.gather(rows, pair, check_bounds=False) // TILE_M == pair
    if mine:
        expert = own.astype(ct.int32)
        matrix = 0 if PARTS == 2 else pair
        acc = ct.zeros((wide, TILE_M), dtype=ct.float32)
        for step in range(ct.cdiv(x.shape[2], TILE_K)):
            a = ct.load(x, (matrix, 0, step), (1, TILE_M, TILE_K), padding_mode=ZERO, latency=LATENCY).reshape((TILE_M, TILE_K))
            b = _weight_tile(w, expert, tile_n, step, PARTS, TILE_N, TILE_K, LATENCY)
            if SCALING:
                b = b.astype(x.dtype)
            if SCALING == BLOCK:
                cols = _block_scales(scale_w, expert, tile_n, step * TILE_K // GROUP, PARTS, TILE_N, LATENCY)
                acc = acc + ct.mma(b, a.transpose(), ct.zeros(acc.shape, ct.float32)) * cols.reshape((cols.shape[0], 1))
            else:
                acc = ct.mma(b, a.transpose(), acc)
        if SCALING == ROW:
            acc = acc * of_rows(scale_w, expert, tile_n, PARTS, TILE_N).reshape((wide, 1))
        if ADD_BIAS:
            acc = acc + of_rows(bias, expert, tile_n, PARTS, TILE_N).reshape((wide, 1))
        y = _finished(acc, PARTS, TILE_M, TILE_N, True, (ALPHA, LIMIT, UP_OFFSET)).astype(out.dtype)
        ct.store(out, (pair, 0, tile_n), y.reshape((1, TILE_M, TILE_N)), allow_tma=False)
