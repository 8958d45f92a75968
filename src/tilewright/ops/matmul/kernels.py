"""Tile code of `matmul`: the product, and the sum of its partial tiles."""

import cuda.tile as ct

from ..tiles import grouped_tile

ZERO = ct.PaddingMode.ZERO  # rows, columns and k beyond the edge add nothing


@ct.kernel
def matmul_kernel(
    a,
    b,
    bias,
    partial,
    out,
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    TILE_K: ct.Constant[int],
    GROUP: ct.Constant[int],
    TRANS_A: ct.Constant[bool],
    TRANS_B: ct.Constant[bool],
    WEIGHTS_FIRST: ct.Constant[bool],
    DOT: ct.Constant[bool],
    PERSISTENT: ct.Constant[bool],
    SPLIT: ct.Constant[bool],
    BIAS: ct.Constant[bool],
    TF32: ct.Constant[bool],
    LATENCY: ct.Constant[int],
):
    """out [m, n] = a @ b + bias, a tile of `out` at a time.

    a: [m, k], or [k, m] with TRANS_A. b: [k, n], or [n, k] with TRANS_B. bias: [n], read only with BIAS.
    partial: fp32 [parts, tiles, rows, columns of an accumulator], read and written only with SPLIT: the last `tiles` tiles of `out` are each
    computed by `parts` blocks, a run of k each, and summed by `matmul_reduce_kernel`.
    WEIGHTS_FIRST: accumulate the transpose, with b's rows on the long side of the MMA: for few rows of a.
    DOT: multiply and sum on the CUDA cores: for very few rows of a.
    PERSISTENT: as many blocks as fit on the device walk over the tiles. Else a block has one: the loop around the loop makes the compiler wait
    for each MMA in turn at some tile sizes.
    """
    tiles_m, tiles_n = ct.cdiv(out.shape[0], TILE_M), ct.cdiv(out.shape[1], TILE_N)
    steps = ct.cdiv(a.shape[0 if TRANS_A else 1], TILE_K)
    block = ct.bid(0)
    how = (TILE_M, TILE_N, TILE_K, TRANS_A, TRANS_B, WEIGHTS_FIRST, DOT, BIAS, TF32, LATENCY)
    if PERSISTENT:
        for tile in range(block, tiles_m * tiles_n, ct.num_blocks(0)):
            tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP)
            acc = _accumulated(a, b, bias, tile_m, tile_n, 0, steps, how)
            _store(out, tile_m, tile_n, acc, WEIGHTS_FIRST)
    elif SPLIT:
        parts, shared_tiles = partial.shape[0], partial.shape[1]
        whole = tiles_m * tiles_n - shared_tiles
        part = max(block - whole, 0) // shared_tiles
        shared = max(block - whole, 0) - part * shared_tiles
        run = ct.cdiv(steps, parts)
        # Selected, not branched on: the main loop must be there once.
        is_part = block >= whole
        tile = ct.where(is_part, whole + shared, block)
        first = ct.where(is_part, part * run, 0)
        last = ct.where(is_part, min(part * run + run, steps), steps)
        tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP)
        acc = _accumulated(a, b, bias, tile_m, tile_n, first, last, how)
        if is_part:
            ct.store(partial, index=(part, shared, 0, 0), tile=acc.reshape((1, 1, *acc.shape)))
        else:
            _store(out, tile_m, tile_n, acc, WEIGHTS_FIRST)
    else:
        tile_m, tile_n = grouped_tile(block, tiles_m, tiles_n, GROUP)
        acc = _accumulated(a, b, bias, tile_m, tile_n, 0, steps, how)
        _store(out, tile_m, tile_n, acc, WEIGHTS_FIRST)


def _accumulated(a, b, bias, tile_m, tile_n, first, last, how):
    """fp32 tile of a @ b over the k steps first..last, and of the bias if the first step is among them."""
    TILE_M, TILE_N, TILE_K, TRANS_A, TRANS_B, WEIGHTS_FIRST, DOT, BIAS, TF32, LATENCY = how
    if DOT:
        acc = ct.zeros((TILE_M, TILE_N, TILE_K), dtype=ct.float32)
    elif WEIGHTS_FIRST:
        acc = ct.zeros((TILE_N, TILE_M), dtype=ct.float32)
    else:
        acc = ct.zeros((TILE_M, TILE_N), dtype=ct.float32)
    for step in range(first, last):
        if TRANS_A:
            x = ct.load(a, index=(step, tile_m), shape=(TILE_K, TILE_M), padding_mode=ZERO, latency=LATENCY).transpose()
        else:
            x = ct.load(a, index=(tile_m, step), shape=(TILE_M, TILE_K), padding_mode=ZERO, latency=LATENCY, allow_tma=not DOT)
        if TRANS_B:
            w = ct.load(b, index=(tile_n, step), shape=(TILE_N, TILE_K), padding_mode=ZERO, latency=LATENCY)
        else:
            w = ct.load(b, index=(step, tile_n), shape=(TILE_K, TILE_N), padding_mode=ZERO, latency=LATENCY).transpose()
        if TF32:
            x, w = x.astype(ct.tfloat32), w.astype(ct.tfloat32)
        if DOT:
            acc += x.astype(ct.float32).reshape((TILE_M, 1, TILE_K)) * w.astype(ct.float32).reshape((1, TILE_N, TILE_K))
        elif WEIGHTS_FIRST:
            acc = ct.mma(w, x.transpose(), acc)
        else:
            acc = ct.mma(x, w.transpose(), acc)
    if DOT:
        acc = ct.sum(acc, axis=2)
    if BIAS and first == 0:
        row = ct.load(bias, index=(tile_n,), shape=(TILE_N,), padding_mode=ZERO, allow_tma=False).astype(ct.float32)
        acc += row.reshape((TILE_N, 1)) if WEIGHTS_FIRST else row
    return acc


def _store(out, tile_m, tile_n, acc, WEIGHTS_FIRST):
    if WEIGHTS_FIRST:
        acc = acc.transpose()
    ct.store(out, index=(tile_m, tile_n), tile=acc.astype(out.dtype))


@ct.kernel
def matmul_uneven_kernel(
    a,
    b,
    bias,
    out,
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    EXTRA_N: ct.Constant[int],
    TILE_K: ct.Constant[int],
    GROUP: ct.Constant[int],
    TRANS_A: ct.Constant[bool],
    TRANS_B: ct.Constant[bool],
    BIAS: ct.Constant[bool],
    LATENCY: ct.Constant[int],
):
    """`matmul_kernel`, one tile to a block, for tiles TILE_N + EXTRA_N wide: no power of two, so that the last round of tiles is fuller.

    Two accumulators side by side share each tile of a. out is wider than TILE_N.
    """
    width = TILE_N + EXTRA_N
    tiles_m, tiles_n = ct.cdiv(out.shape[0], TILE_M), ct.cdiv(out.shape[1], width)
    steps = ct.cdiv(a.shape[0 if TRANS_A else 1], TILE_K)
    left = (b, bias, out)
    right = (b.slice(0 if TRANS_B else 1, TILE_N, out.shape[1]), bias, out.slice(1, TILE_N, out.shape[1]))
    if BIAS:
        right = (right[0], bias.slice(0, TILE_N, out.shape[1]), right[2])
    b_left, bias_left, out_left = _columns(*left, TILE_M, TILE_N, TILE_K, width, TRANS_B, BIAS)
    b_right, bias_right, out_right = _columns(*right, TILE_M, EXTRA_N, TILE_K, width, TRANS_B, BIAS)
    right_tiles = ct.cdiv(out.shape[1] - TILE_N, width)
    tile_m, tile_n = grouped_tile(ct.bid(0), tiles_m, tiles_n, GROUP)
    right_n = min(tile_n, right_tiles - 1)  # the last tile may be cut before its right part begins
    acc_left, acc_right = ct.zeros((TILE_M, TILE_N), dtype=ct.float32), ct.zeros((TILE_M, EXTRA_N), dtype=ct.float32)
    for step in range(steps):
        if TRANS_A:
            x = ct.load(a, index=(step, tile_m), shape=(TILE_K, TILE_M), padding_mode=ZERO, latency=LATENCY).transpose()
        else:
            x = ct.load(a, index=(tile_m, step), shape=(TILE_M, TILE_K), padding_mode=ZERO, latency=LATENCY)
        if TRANS_B:
            acc_left = ct.mma(x, b_left.load((tile_n, step), latency=LATENCY).transpose(), acc_left)
            acc_right = ct.mma(x, b_right.load((right_n, step), latency=LATENCY).transpose(), acc_right)
        else:
            acc_left = ct.mma(x, b_left.load((step, tile_n), latency=LATENCY), acc_left)
            acc_right = ct.mma(x, b_right.load((step, right_n), latency=LATENCY), acc_right)
    if BIAS:
        acc_left += bias_left.load((tile_n,), allow_tma=False).astype(ct.float32)
        acc_right += bias_right.load((right_n,), allow_tma=False).astype(ct.float32)
    out_left.store((tile_m, tile_n), acc_left.astype(out.dtype))
    if tile_n < right_tiles:
        out_right.store((tile_m, tile_n), acc_right.astype(out.dtype))


def _columns(b, bias, out, TILE_M, TILE_N, TILE_K, STEP, TRANS_B, BIAS):
    """Views of b, bias and out in which neighbouring tiles of TILE_N columns are STEP columns apart."""
    shape, steps = ((TILE_N, TILE_K), (STEP, TILE_K)) if TRANS_B else ((TILE_K, TILE_N), (TILE_K, STEP))
    b_view = b.tiled_view(shape, padding_mode=ZERO, traversal_steps=steps)
    bias_view = bias.tiled_view((TILE_N,), padding_mode=ZERO, traversal_steps=(STEP,)) if BIAS else 0
    return b_view, bias_view, out.tiled_view((TILE_M, TILE_N), traversal_steps=(TILE_M, STEP))


@ct.kernel
def matmul_reduce_kernel(
    partial,
    out,
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    GROUP: ct.Constant[int],
    WEIGHTS_FIRST: ct.Constant[bool],
    ROWS: ct.Constant[int],
    PARTS: ct.Constant[int],
):
    """Sums the parts of the tiles that `matmul_kernel` split: block (s, i) takes ROWS rows of the s-th of them."""
    shared, strip = ct.bid(0), ct.bid(1)
    tiles_m, tiles_n = ct.cdiv(out.shape[0], TILE_M), ct.cdiv(out.shape[1], TILE_N)
    tile_m, tile_n = grouped_tile(tiles_m * tiles_n - partial.shape[1] + shared, tiles_m, tiles_n, GROUP)
    if WEIGHTS_FIRST:
        columns = TILE_M
        tile_n = tile_n * (TILE_N // ROWS) + strip
        inside = tile_n * ROWS < out.shape[1]
    else:
        columns = TILE_N
        tile_m = tile_m * (TILE_M // ROWS) + strip
        inside = tile_m * ROWS < out.shape[0]
    if inside:
        acc = ct.zeros((ROWS, columns), dtype=ct.float32)
        for i in range(ct.cdiv(partial.shape[0], PARTS)):
            part = ct.load(partial, index=(i, shared, strip, 0), shape=(PARTS, 1, ROWS, columns), padding_mode=ZERO, allow_tma=False)
            acc += ct.sum(part.reshape((PARTS, ROWS, columns)), axis=0)
        _store(out, tile_m, tile_n, acc, WEIGHTS_FIRST)
