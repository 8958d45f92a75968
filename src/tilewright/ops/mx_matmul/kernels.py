"""Kernels of block-scaled products."""

import cuda.tile as ct

from ..common.mx import plain_operand, scaled_operand
from ..common.pdl import pdl_overlap
from ..common.tiles import grouped_tile, matrix_tile

ZERO = ct.PaddingMode.ZERO  # rows and columns beyond the edge add nothing; as e8m0 it is 2**-127


@ct.kernel
def mx_matmul_kernel(
    a,
    b,
    scale_a,
    scale_b,
    bias,
    out_scale,
    out,
    GROUP: ct.Constant[int],
    BIAS: ct.Constant[bool],
    OUT_SCALE: ct.Constant[bool],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    TILE_K: ct.Constant[int],
    BAND: ct.Constant[int],
    SWAP_AB: ct.Constant[bool],
    PERSISTENT: ct.Constant[bool],
    NATIVE: ct.Constant[bool],
    SHARES: ct.Constant[int],
    LATENCY: ct.Constant[int],
):
    """out [m, n] = (a * scale_a) @ (b * scale_b).T, a tile of `out` at a time.

    a, b: codes [rows, bytes]. scale_a, scale_b: [rows, bytes / GROUP], e8m0 as bytes. bias: [n],
    out_scale: [1], read only with BIAS, OUT_SCALE. TILE_K: bytes. SWAP_AB: b is the first operand
    of the MMA: for few rows of a. NATIVE: the MMA scales. SHARES: of k; with more than one, `out`
    is [SHARES, m, n], and `mx_sum_kernel` does the rest.
    """
    pdl_overlap(PERSISTENT)
    tiles_m, tiles_n = ct.cdiv(out.shape[-2], TILE_M), ct.cdiv(out.shape[-1], TILE_N)

    def operand(codes, scale, rows, step, ROWS):
        x = ct.load(codes, (rows, step), (ROWS, TILE_K), padding_mode=ZERO, latency=LATENCY)
        s = ct.load(scale, (rows, step), (ROWS, TILE_K // GROUP), padding_mode=ZERO, latency=LATENCY)
        return scaled_operand(x, s) if NATIVE else plain_operand(x, s)

    def one_tile(index):
        tile_m, tile_n = grouped_tile(index, tiles_m, tiles_n, BAND)
        acc = ct.zeros((TILE_N, TILE_M) if SWAP_AB else (TILE_M, TILE_N), ct.float32)
        first_step, end = _share_of(ct.cdiv(a.shape[1], TILE_K), SHARES)
        for step in range(first_step, end):
            x, w = operand(a, scale_a, tile_m, step, TILE_M), operand(b, scale_b, tile_n, step, TILE_N)
            first, second = (w, x) if SWAP_AB else (x, w)
            if NATIVE:
                acc = ct.mma_scaled(first[0], first[1], second[0].transpose(), second[1].transpose(), acc)
            else:
                for part in ct.static_iter(range(len(first))):
                    acc = ct.mma(first[part], second[part].transpose(), acc)
        y = acc.transpose() if SWAP_AB else acc
        if SHARES > 1:
            ct.store(out, (ct.bid(1), tile_m, tile_n), y.reshape((1, TILE_M, TILE_N)), allow_tma=False)
        else:
            ct.store(out, (tile_m, tile_n), _finished(y, bias, out_scale, tile_n, BIAS, OUT_SCALE).astype(out.dtype))

    if PERSISTENT:
        for index in range(ct.bid(0), tiles_m * tiles_n, ct.num_blocks(0)):
            one_tile(index)
    else:
        one_tile(ct.bid(0))


def _share_of(steps, SHARES):
    """The first step of the share of k that bid(1) counts, and the one behind its last."""
    if SHARES == 1:
        return 0, steps
    each = ct.cdiv(steps, SHARES)
    return ct.bid(1) * each, min(ct.bid(1) * each + each, steps)


def _finished(y, bias, out_scale, tile_n, BIAS, OUT_SCALE):
    if OUT_SCALE:
        y = y * ct.load(out_scale, (0,), (1,), allow_tma=False).reshape((1, 1))
    if BIAS:
        y = y + ct.load(bias, (tile_n,), (y.shape[1],), padding_mode=ZERO, allow_tma=False).astype(ct.float32)
    return y


@ct.kernel
def mx_decode_kernel(
    codes,
    scale,
    values,
    GROUP: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_K: ct.Constant[int],
    STEPS: ct.Constant[int],
    LATENCY: ct.Constant[int],
):
    """bf16 values [rows, columns] of codes [rows, bytes] and scales [rows, bytes / GROUP], STEPS
    tiles of a row of tiles in a block.

    Of TILE_K bytes the values come in the order of `plain_operand`: a product of two operands in
    the same order is the same. Columns beyond the codes become zeros.
    """
    pdl_overlap()
    row, first = ct.bid(0), ct.bid(1) * STEPS
    for column in range(first, min(first + STEPS, ct.cdiv(codes.shape[1], TILE_K))):
        x = ct.load(codes, (row, column), (TILE_M, TILE_K), padding_mode=ZERO, latency=LATENCY)
        s = ct.load(scale, (row, column), (TILE_M, TILE_K // GROUP), padding_mode=ZERO, latency=LATENCY)
        parts = plain_operand(x, s)
        for i in ct.static_iter(range(len(parts))):
            ct.store(values, (row, column * len(parts) + i), parts[i])


@ct.kernel
def mx_sum_kernel(
    partial,
    bias,
    out_scale,
    out,
    BIAS: ct.Constant[bool],
    OUT_SCALE: ct.Constant[bool],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    SHARES: ct.Constant[int],
):
    """out [m, n] of the sums over SHARES shares of k, partial [SHARES, m, n]."""
    pdl_overlap()
    at = ct.bid(0), ct.bid(1)
    y = ct.zeros((TILE_M, TILE_N), ct.float32)
    for i in ct.static_iter(range(SHARES)):
        y = y + matrix_tile(partial, (i,), at, (TILE_M, TILE_N), ZERO, False)
    ct.store(out, at, _finished(y, bias, out_scale, at[1], BIAS, OUT_SCALE).astype(out.dtype), allow_tma=False)
