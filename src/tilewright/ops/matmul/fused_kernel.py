"""Tile code of `matmul` with 8-bit operands and their scales, or with more behind the product than
a bias.
"""

import cuda.tile as ct

from ..common.pdl import pdl_overlap
from ..common.scaling import BLOCK, GROUP, ROW, TENSOR, add_product, add_scaled, block_scales, group_scales, row_scales, scaled
from ..common.tiles import grouped_tile, silu_mul_of_pairs, vector_masked
from .kernels import operand, split_work

ZERO = ct.PaddingMode.ZERO  # rows, columns and k beyond the edge add nothing


@ct.kernel
def matmul_fused_kernel(
    a,
    b,
    scale_a,
    scale_b,
    bias,
    residual,
    out_scale,
    partial,
    out,
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    TILE_K: ct.Constant[int],
    GROUP_M: ct.Constant[int],
    TRANS_A: ct.Constant[bool],
    TRANS_B: ct.Constant[bool],
    SWAP_AB: ct.Constant[bool],
    DOT: ct.Constant[bool],
    PERSISTENT: ct.Constant[bool],
    SPLIT_K: ct.Constant[bool],
    SCALING: ct.Constant[int],
    FAST_ACC: ct.Constant[bool],
    RUN: ct.Constant[int],
    EVEN_M: ct.Constant[bool],
    EVEN_N: ct.Constant[bool],
    BIAS: ct.Constant[bool],
    RESIDUAL: ct.Constant[bool],
    SILU_MUL: ct.Constant[bool],
    OUT_SCALE: ct.Constant[bool],
    TMA_SCALES: ct.Constant[int],
    LATENCY: ct.Constant[int],
):
    """out = residual + out_scale * f(scales * (a @ b) + bias), a tile at a time; f: nothing, or
    with SILU_MUL silu(even column) * odd column.

    a, b, bias, partial, out and the tile order: as matmul_kernel. scale_a, scale_b: [1, k groups,
    rows] as ops/common/scaling.py makes them.
    residual: like out. out_scale: [1]. What a flag says is absent is not touched. SPLIT_K: nothing
        behind the scales but a bias. DOT: no scales.
    RUN: the tensor core sums 8-bit products for RUN steps, and fp32 adds these sums; 0: as FAST_ACC
    says. With BLOCK a step may have several groups (TILE_K).
    EVEN_M, EVEN_N: the tiles end with the rows of a, of b (BLOCK: then scales are loaded unchecked,
        a tenth faster).
    TMA_SCALES: of BLOCK: 1: TMA brings the scales of a; 2: those of b too.
    """
    pdl_overlap(PERSISTENT)
    columns = out.shape[1] * 2 if SILU_MUL else out.shape[1]
    tiles_m, tiles_n = ct.cdiv(out.shape[0], TILE_M), ct.cdiv(columns, TILE_N)
    steps = ct.cdiv(a.shape[0 if TRANS_A else 1], TILE_K)
    groups = max(1, TILE_K // GROUP) if SCALING == BLOCK else 1  # in a step: the sum of one overlaps the MMA of the next
    deep = TILE_K // groups
    block = ct.bid(0)

    def operands(tile_m, tile_n, step):
        x = operand(a, tile_m, step, TILE_M, deep, TRANS_A, LATENCY, not DOT or TRANS_A)
        return x, operand(b, tile_n, step, TILE_N, deep, not TRANS_B, LATENCY, True)

    def add_step(acc, tile_m, tile_n, step, FAST):
        x, w = operands(tile_m, tile_n, step)
        if SWAP_AB:
            x, w = w, x
        return add_product(x, w.transpose(), acc, FAST)

    def product(tile_m, tile_n, first, last):
        """[TILE_M, TILE_N], or transposed with SWAP_AB, over the k steps first..last; of BLOCK with
        its scales.
        """
        if DOT:
            acc = ct.zeros((TILE_M, TILE_N, TILE_K), dtype=ct.float32)
        else:
            acc = ct.zeros((TILE_N, TILE_M) if SWAP_AB else (TILE_M, TILE_N), dtype=ct.float32)
        if RUN:
            for start in range(first, last, RUN):
                part = ct.zeros(acc.shape, dtype=ct.float32)
                for step in range(start, min(start + RUN, last)):
                    part = add_step(part, tile_m, tile_n, step, True)
                acc = acc + part
        else:
            for step in range(first, last):
                if SCALING == BLOCK:
                    for i in ct.static_iter(range(groups)):
                        x, w = operands(tile_m, tile_n, step * groups + i)
                        k_group = (step * groups + i) * deep // GROUP
                        rows = group_scales(scale_a, 0, k_group, tile_m, TILE_M, LATENCY, EVEN_M, TMA_SCALES > 0)
                        cols = block_scales(scale_b, 0, k_group, tile_n, TILE_N, LATENCY, EVEN_N, TMA_SCALES > 1)
                        if SWAP_AB:
                            acc = add_scaled(acc, w, x.transpose(), cols, rows)
                        else:
                            acc = add_scaled(acc, x, w.transpose(), rows, cols)
                elif DOT:
                    x, w = operands(tile_m, tile_n, step)
                    acc += x.astype(ct.float32).reshape((TILE_M, 1, TILE_K)) * w.astype(ct.float32).reshape((1, TILE_N, TILE_K))
                else:
                    acc = add_step(acc, tile_m, tile_n, step, FAST_ACC)
        if DOT:
            acc = ct.sum(acc, axis=2)
        if SCALING == TENSOR or SCALING == ROW:
            rows, cols = row_scales(scale_a, 0, tile_m, TILE_M, SCALING), row_scales(scale_b, 0, tile_n, TILE_N, SCALING)
            acc = scaled(acc, cols, rows) if SWAP_AB else scaled(acc, rows, cols)
        if BIAS and first == 0:
            row = vector_masked(bias, TILE_N, tile_n * TILE_N).astype(ct.float32)
            acc += row.reshape((TILE_N, 1)) if SWAP_AB else row
        return acc

    def store(acc, tile_m, tile_n):
        y = acc.transpose() if SWAP_AB else acc
        width = TILE_N
        if SILU_MUL:
            width = TILE_N // 2
            y = silu_mul_of_pairs(y)
        if OUT_SCALE:
            y = y * ct.load(out_scale, (0,), (1,), check_bounds=False, allow_tma=False)
        if RESIDUAL:
            y = y + ct.load(residual, (tile_m, tile_n), (TILE_M, width), padding_mode=ZERO).astype(ct.float32)
        ct.store(out, index=(tile_m, tile_n), tile=y.astype(out.dtype))

    if PERSISTENT:
        for tile in range(block, tiles_m * tiles_n, ct.num_blocks(0)):
            tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
            store(product(tile_m, tile_n, 0, steps), tile_m, tile_n)
    elif SPLIT_K:
        tile, first, last, is_part, part, shared = split_work(block, tiles_m * tiles_n, steps, partial)
        tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP_M)
        acc = product(tile_m, tile_n, first, last)
        if is_part:
            ct.store(partial, index=(part, shared, 0, 0), tile=acc.reshape((1, 1, *acc.shape)))
        else:
            store(acc, tile_m, tile_n)
    else:
        tile_m, tile_n = grouped_tile(block, tiles_m, tiles_n, GROUP_M)
        store(product(tile_m, tile_n, 0, steps), tile_m, tile_n)
