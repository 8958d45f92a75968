"""Tile code of `grouped_gemm`: where the tiles are, and the products."""

import cuda.tile as ct

from ..common.scaling import BLOCK, GROUP, ROW, TENSOR, add_product, add_scaled, block_scales, group_scales, scaled
from ..common.tiles import ZERO, grouped_tile, rows_from


def row_scales(scales, batch, tile, WIDTH, SCALING):
    """As that of ops/common/scaling.py, but checked: of a gather in the loop over tiles the
    compiler makes a pipeline through shared memory.
    """
    if SCALING == ROW:
        return ct.load(scales, (batch, 0, tile), (1, 1, WIDTH), padding_mode=ZERO, allow_tma=False).reshape((WIDTH,))
    return ct.load(scales, (min(batch, scales.shape[0] - 1), 0, 0), (1, 1, 1), allow_tma=False).reshape((1,))


@ct.kernel
def grouped_gemm_map_kernel(
    sizes,
    panels,
    rows: int,
    TILE_M: ct.Constant[int],
    GROUPS: ct.Constant[int],
    MASKED: ct.Constant[bool],
    WIDTH: ct.Constant[int],
):
    """Block g writes the entries of group g's panels, the strips of at most TILE_M rows that the
    products are made of.

    panels: int32 [3, 1 + most panels]: of each panel its group, first row, and the end of its
        group's rows. Entry 0 holds their number.
    sizes [groups]: end offsets of the groups in `rows` rows; with MASKED the counts of rows that
        each uses of its own `rows`. Offsets that decrease or leave the rows are clipped: nothing is
        read or written outside.
    GROUPS: a power of two, at least groups.

    A kernel of its own, because tile arithmetic in the main one (a search, a loop bound that comes
    from a reduction) makes the compiler wait for each MMA in turn, or halves the registers of each
    thread (tileiras 13.4, sm_90).
    """
    own = ct.bid(0)
    index = ct.arange(GROUPS, dtype=ct.int32)
    ends = min(max(ct.gather(sizes, index, padding_value=0), 0), rows)
    starts = ct.zeros((GROUPS,), dtype=ct.int32)
    if not MASKED:
        before = ct.gather(sizes, max(index - 1, 0), padding_value=0)
        starts = ct.where(index > 0, min(max(before, 0), rows), 0)
    used = ct.where(index < sizes.shape[0], max(ends - starts, 0), 0)
    counts = (used + (TILE_M - 1)) // TILE_M
    first = ct.sum(ct.where(index < own, counts, 0))
    mine = ct.sum(ct.where(index == own, counts, 0))
    start, end = ct.sum(ct.where(index == own, starts, 0)), ct.sum(ct.where(index == own, ends, 0))
    lanes = ct.arange(WIDTH, dtype=ct.int32)
    for i in range(ct.cdiv(mine, WIDTH)):
        panel = i * WIDTH + lanes
        entry = 1 + first + panel
        ct.scatter(panels, (0, entry), own, mask=panel < mine)
        ct.scatter(panels, (1, entry), start + panel * TILE_M, mask=panel < mine)
        ct.scatter(panels, (2, entry), end, mask=panel < mine)
    if own == 0:
        ct.scatter(panels, (0, 0), ct.sum(counts))


@ct.kernel
def grouped_gemm_kernel(
    panels,
    a,
    b,
    scale_a,
    scale_b,
    out,
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    TILE_K: ct.Constant[int],
    GROUP_M: ct.Constant[int],
    MASKED: ct.Constant[bool],
    TRANS_B: ct.Constant[bool],
    SWAP_AB: ct.Constant[bool],
    SCALING: ct.Constant[int],
    FAST_ACC: ct.Constant[bool],
    EVEN_M: ct.Constant[bool],
    EVEN_N: ct.Constant[bool],
    PERSISTENT: ct.Constant[bool],
    STORE_TMA: ct.Constant[bool],
    LATENCY: ct.Constant[int],
):
    """out[rows of g] = a[rows of g] @ b[g] for each group g, a tile at a time, in bands of GROUP_M
    panels.

    a: [1, rows, k], or [groups, rows, k] with MASKED; out likewise, with n columns.
    b: [groups, k, n], or [groups, n, k] with TRANS_B.
    panels: as `grouped_gemm_map_kernel` makes it.
    scale_a, scale_b: [.., k groups, rows] as ops/common/scaling.py makes them.
    A tile of a may reach into the rows of the next group; only those of its own are stored.
    SWAP_AB: accumulate the transpose, with b's columns on the long side of the MMA: for groups of
        few rows.
    EVEN_M, EVEN_N: panels lie in a whole number of tiles of the room of their group, tiles end with
        the rows of b: BLOCK scales may be loaded unchecked.
    """
    tiles_n = ct.cdiv(out.shape[2], TILE_N)
    total = ct.gather(panels, (0, 0))
    # Tiles that start at any row: the descriptor of the whole array serves all groups. A slice of
    # each group would need one of its own.
    any_row = a.tiled_view((1, TILE_M, TILE_K), padding_mode=ZERO, traversal_steps=(1, 1, TILE_K))

    def one_tile(index):
        panel, tile_n = grouped_tile(index, total, tiles_n, GROUP_M)
        group, row, end = ct.gather(panels, (0, 1 + panel)), ct.gather(panels, (1, 1 + panel)), ct.gather(panels, (2, 1 + panel))
        matrix = group if MASKED else 0
        acc = ct.zeros((TILE_N, TILE_M) if SWAP_AB else (TILE_M, TILE_N), dtype=ct.float32)
        if SCALING == BLOCK or SCALING == ROW:
            own_scales = scale_a.slice(2, row, end)
        for step in range(ct.cdiv(a.shape[2], TILE_K)):
            x = any_row.load((matrix, row, step), latency=LATENCY).reshape((TILE_M, TILE_K))
            if TRANS_B:
                w = ct.load(b, (group, tile_n, step), (1, TILE_N, TILE_K), padding_mode=ZERO, latency=LATENCY)
                w = w.reshape((TILE_N, TILE_K)).transpose()
            else:
                w = ct.load(b, (group, step, tile_n), (1, TILE_K, TILE_N), padding_mode=ZERO, latency=LATENCY).reshape((TILE_K, TILE_N))
            first, second = (w.transpose(), x.transpose()) if SWAP_AB else (x, w)
            if SCALING == BLOCK:
                k_group = step * TILE_K // GROUP
                if EVEN_M:
                    rows = group_scales(scale_a, matrix, k_group, row // TILE_M, TILE_M, LATENCY, True)
                else:
                    rows = group_scales(own_scales, matrix, k_group, 0, TILE_M, LATENCY)
                columns = block_scales(scale_b, group, k_group, tile_n, TILE_N, LATENCY, EVEN_N)
                acc = add_scaled(acc, first, second, *((columns, rows) if SWAP_AB else (rows, columns)))
            else:
                acc = add_product(first, second, acc, FAST_ACC)
        if SCALING == ROW or SCALING == TENSOR:
            rows = row_scales(own_scales if SCALING == ROW else scale_a, matrix, 0, TILE_M, SCALING)
            columns = row_scales(scale_b, group, tile_n, TILE_N, SCALING)
            acc = scaled(acc, *((columns, rows) if SWAP_AB else (rows, columns)))
        if SWAP_AB:
            acc = acc.transpose()
        tile = acc.astype(out.dtype).reshape((1, TILE_M, TILE_N))
        ct.store(rows_from(out, 1, row, end), (matrix, 0, tile_n), tile, allow_tma=STORE_TMA)

    if PERSISTENT:
        for index in range(ct.bid(0), total * tiles_n, ct.num_blocks(0)):
            one_tile(index)
    elif ct.bid(0) < total * tiles_n:
        one_tile(ct.bid(0))
