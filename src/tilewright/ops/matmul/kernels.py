"""Tile code of `matmul`: one persistent kernel, and the sum of its partial tiles."""

import cuda.tile as ct

from ..tiles import grouped_tile

ZERO = ct.PaddingMode.ZERO  # rows, columns and k beyond the edge add nothing


def _whole_tiles(tiles, blocks):
    """How many output tiles stream-K leaves whole: all full rounds but the last one. The rest is shared out evenly along k."""
    return max(tiles // blocks - 1, 0) * blocks


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
    STREAM_K: ct.Constant[bool],
    BIAS: ct.Constant[bool],
    TF32: ct.Constant[bool],
    LATENCY: ct.Constant[int],
):
    """out [m, n] = a @ b + bias, each block walking over tiles of `out`.

    a: [m, k], or [k, m] with TRANS_A. b: [k, n], or [n, k] with TRANS_B. bias: [n], read only with BIAS.
    partial: fp32 [slots, rows, columns of an accumulator], read and written only with STREAM_K. Every block then gets, after its whole tiles,
    an equal run of k steps of the remaining tiles laid end to end; a tile that several blocks share goes to `partial`, one slot a block.
    Tile s of those and block b meet in slot s + b: along the walk one of the two grows at every step, so a slot is used once, and the slots
    of one tile are neighbours.
    WEIGHTS_FIRST: accumulate the transpose, with b's rows on the long side of the MMA: for few rows of a.
    DOT: multiply and sum on the CUDA cores: for very few rows of a.
    """
    block, blocks = ct.bid(0), ct.num_blocks(0)
    tiles_m, tiles_n = ct.cdiv(out.shape[0], TILE_M), ct.cdiv(out.shape[1], TILE_N)
    tiles = tiles_m * tiles_n
    steps = ct.cdiv(a.shape[0 if TRANS_A else 1], TILE_K)
    if STREAM_K:
        whole = _whole_tiles(tiles, blocks)
        rounds = whole // blocks
        units = (tiles - whole) * steps
        share = ct.cdiv(units, blocks)
        begin = block * share
        end = min(begin + share, units)
        segments = rounds + max(ct.cdiv(end, steps) - begin // steps, 0)
    else:
        segments = ct.cdiv(tiles - block, blocks)

    for segment in range(segments):
        tile, first, last = block + segment * blocks, 0, steps
        if STREAM_K:
            # Selected, not branched on: a branch here makes the compiler clone the main loop, and the clones spill.
            shares = segment >= rounds
            shared = begin // steps + segment - rounds
            tile = ct.where(shares, whole + shared, tile)
            first = ct.where(shares, max(begin - shared * steps, 0), 0)
            last = ct.where(shares, min(end - shared * steps, steps), steps)
        tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP)

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

        if STREAM_K and last - first < steps:
            ct.store(partial, index=(shared + block, 0, 0), tile=acc.reshape((1, *acc.shape)))
        else:
            if WEIGHTS_FIRST:
                acc = acc.transpose()
            ct.store(out, index=(tile_m, tile_n), tile=acc.astype(out.dtype))


@ct.kernel
def matmul_reduce_kernel(
    partial,
    out,
    k: int,
    blocks: int,
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    TILE_K: ct.Constant[int],
    GROUP: ct.Constant[int],
    WEIGHTS_FIRST: ct.Constant[bool],
    ROWS: ct.Constant[int],
    PARTS: ct.Constant[int],
):
    """Sums the slots of each tile that several of the `blocks` blocks of `matmul_kernel` shared: block (s, i) takes ROWS rows of shared tile s."""
    shared, strip = ct.bid(0), ct.bid(1)
    tiles_m, tiles_n = ct.cdiv(out.shape[0], TILE_M), ct.cdiv(out.shape[1], TILE_N)
    tiles = tiles_m * tiles_n
    whole = _whole_tiles(tiles, blocks)
    steps = ct.cdiv(k, TILE_K)
    share = ct.cdiv((tiles - whole) * steps, blocks)
    first = shared * steps // share  # block with the tile's first step, then the one with its last
    last = (shared * steps + steps - 1) // share
    if last > first:
        columns = TILE_M if WEIGHTS_FIRST else TILE_N
        acc = ct.zeros((ROWS, columns), dtype=ct.float32)
        slots = partial.slice(0, shared + first, shared + last + 1)
        for i in range(ct.cdiv(last - first + 1, PARTS)):
            acc += ct.sum(ct.load(slots, index=(i, strip, 0), shape=(PARTS, ROWS, columns), padding_mode=ZERO, allow_tma=False), axis=0)
        tile_m, tile_n = grouped_tile(whole + shared, tiles_m, tiles_n, GROUP)
        if WEIGHTS_FIRST:
            tile_n = tile_n * (TILE_N // ROWS) + strip
            acc = acc.transpose()
        else:
            tile_m = tile_m * (TILE_M // ROWS) + strip
        ct.store(out, index=(tile_m, tile_n), tile=acc.astype(out.dtype))
