"""Tile code of `gated_delta_rule`: what a chunk needs that does not depend on the state, made by
blocks that stay for many chunks.

A block that makes one chunk waits for most of its life: for its start, for q and k, for the gates
of each head, which no TMA loads, and for its results to leave. One that stays loads ahead. So that
all it loads comes by TMA, `gates_kernel` first writes the gates of a chunk as rows.
"""

import cuda.tile as ct

from ..common.recurrence import LEAST_DECAY, chunk_of
from ..common.tiles import LOG2E, ZERO, matrix_tile, rows_from
from .kernels import INTO, ONWARD, OUTWARD, nothing

SUM, BETA_OF = 0, 1  # rows of GATES


@ct.kernel
def gates_kernel(
    Q,
    G,
    BETA,
    CU_SEQLENS,
    GATES,
    DECAY,
    VARLEN: ct.Constant[bool],
    GATE_HEADS: ct.Constant[int],
    CHUNK: ct.Constant[int],
):
    """The gates of a chunk, of GATE_HEADS heads. Grid (chunks, v_heads / GATE_HEADS).

    GATES [chunks, v_heads, 2, CHUNK] fp32: of each token the sum of log2 decays up to it, and beta.
    DECAY as in the solve.
    """
    place, h = ct.bid(0), ct.bid(1)
    chunks = ct.cdiv(Q.shape[2], CHUNK)
    b, c = place // chunks, place % chunks
    if VARLEN:
        first, end, c = chunk_of(CU_SEQLENS, place, CHUNK, Q.shape[2])
        G, BETA = rows_from(G, 2, first, end), rows_from(BETA, 2, first, end)
        b = 0
    shape = (GATE_HEADS, CHUNK)
    beta = matrix_tile(BETA, (b,), (h, c), shape, ZERO, False).astype(ct.float32)
    g = matrix_tile(G, (b,), (h, c), shape, ZERO, False).astype(ct.float32)
    g = ct.maximum(g * LOG2E, LEAST_DECAY, propagate_nan=True)
    decay = ct.exp2(ct.sum(g, 1))
    g = ct.cumsum(g, 1)
    ct.store(GATES, (place, h, SUM, 0), g.reshape((1, GATE_HEADS, 1, CHUNK)), allow_tma=False)
    ct.store(GATES, (place, h, BETA_OF, 0), beta.reshape((1, GATE_HEADS, 1, CHUNK)), allow_tma=False)
    ct.store(DECAY, (place, h, 0), decay[None, :, None] * ct.full((1, 1, 4), 1.0, dtype=ct.float32), allow_tma=False)


def turned(x):
    return ct.permute(x, (0, 2, 1))


def corners(own, below, beta, blocks):
    """As `inverses`, of the blocks on the diagonal alone."""
    i, j = ct.arange(16, dtype=ct.int32)[None, :, None], ct.arange(16, dtype=ct.int32)[None, None, :]
    near = i // 4 == j // 4
    row, column = beta.reshape((blocks, 16, 1)), beta.reshape((blocks, 1, 16))
    alone = ct.where(i == j, column, 0.0)
    of_two = (alone + ct.where(near & (i > j), own, 0.0) * -(row * column)).astype(ct.float16)
    m = (ct.where(near & (i < j), -own, 0.0) * row).astype(ct.float16)  # transposed, as is the next
    of_three = ct.mma(of_two, turned(m), alone).astype(ct.float16)
    t, of_t = ct.mma(of_three, turned(m), alone), ct.mma(m, turned(of_three), alone).astype(ct.float16)
    m = ct.mma(of_t, turned(below), nothing(t)).astype(ct.float16)
    x = t
    for _ in ct.static_iter(range(3)):
        x = ct.mma(x.astype(ct.float16), turned(m), t)
    return x


def inverses(own, a, betas, CHUNK):
    """(I + diag(beta) a)^-1 diag(beta), of the part of `a` [CHUNK, CHUNK] below its diagonal, for
    each beta of a tuple.

    own [blocks, 16, 16]: the blocks of `a` on its diagonal, symmetric. First for blocks of 4 there,
    then of 16, then for all: powers of more than four blocks would grow, over a chunk to
    C(CHUNK - 1, CHUNK / 2). No entry is larger than beta where keys have at most length 1, so 16
    bits hold the factors. A small product takes the transpose of a sum as its right factor for
    nothing, and the sum itself through 50 instructions; so transposes are computed beside.
    """
    blocks = CHUNK // 16
    i, j = ct.arange(16, dtype=ct.int32)[None, :, None], ct.arange(16, dtype=ct.int32)[None, None, :]
    below = ct.where(i // 4 > j // 4, -own, 0.0).astype(ct.float16)
    xs: tuple = ()
    for beta in ct.static_iter(betas):
        xs = (*xs, corners(own, below, beta, blocks))
    p, r = ct.arange(blocks, dtype=ct.int32)[:, None, None, None], ct.arange(blocks, dtype=ct.int32)[None, None, :, None]
    i, j = ct.arange(CHUNK, dtype=ct.int32)[:, None], ct.arange(CHUNK, dtype=ct.int32)[None, :]
    below = ct.where(i // 16 > j // 16, -a, 0.0).astype(ct.float16)
    found: tuple = ()
    for x in ct.static_iter(xs):
        t = ct.where(p == r, x.reshape((blocks, 16, 1, 16)), 0.0).reshape((CHUNK, CHUNK))
        m = ct.mma(below, t.astype(ct.float16), nothing(t)).astype(ct.float16)
        x = t
        for _ in ct.static_iter(range(blocks - 1)):
            x = ct.mma(x.astype(ct.float16), m, t)
        found = (*found, x)
    return found


@ct.kernel
def steady_solve_kernel(
    Q,
    K,
    CU_SEQLENS,
    GATES,
    T,
    P,
    FACTORS,
    scale: float,
    eps: float,
    VARLEN: ct.Constant[bool],
    NORMALIZE: ct.Constant[bool],
    GROUP: ct.Constant[int],
    HEADS: ct.Constant[int],
    CHUNK: ct.Constant[int],
    TILE_K: ct.Constant[int],
):
    """`solve_kernel` for every chunk whose place is that of the block, modulo the blocks. Grid (any
    number, v_heads / HEADS).

    Places are taken from the last to the first, so that the scan finds in L2 what it needs first.
    """
    heads, first_head = ct.bid(1), ct.bid(1) * HEADS
    kh, blocks = first_head // GROUP, CHUNK // 16
    square, shape = (1, 1, CHUNK, CHUNK), (1, HEADS, 1, CHUNK)
    i, j = ct.arange(CHUNK, dtype=ct.int32)[:, None], ct.arange(CHUNK, dtype=ct.int32)[None, :]
    p, r = ct.arange(blocks, dtype=ct.int32)[:, None, None, None], ct.arange(blocks, dtype=ct.int32)[None, None, :, None]
    empty = ct.zeros((CHUNK, CHUNK), dtype=ct.float32)
    for count in range(ct.bid(0), T.shape[0], ct.num_blocks(0)):
        place = T.shape[0] - 1 - count
        if VARLEN:
            first, end, c = chunk_of(CU_SEQLENS, place, CHUNK, Q.shape[2])
            QUERIES, KEYS, b = rows_from(Q, 2, first, end), rows_from(K, 2, first, end), 0
        else:  # chunk by chunk, not sequence by sequence
            b, c = place % Q.shape[0], place // Q.shape[0]
            place = b * ct.cdiv(Q.shape[2], CHUNK) + c
            QUERIES, KEYS = Q, K
        k = ct.load(KEYS, (b, kh, c, 0), (1, 1, CHUNK, TILE_K), padding_mode=ZERO).reshape((CHUNK, TILE_K))
        q = ct.load(QUERIES, (b, kh, c, 0), (1, 1, CHUNK, TILE_K), padding_mode=ZERO).reshape((CHUNK, TILE_K))
        kk = ct.mma(k, ct.transpose(k), empty)
        if NORMALIZE:
            qq = ct.mma(q, ct.transpose(q), empty)
        qk = ct.mma(q, ct.transpose(k), empty)
        of_k = ct.full((CHUNK,), 1.0, dtype=ct.float32)
        of_q = ct.full((CHUNK,), scale, dtype=ct.float32)
        if NORMALIZE:
            of_k = ct.rsqrt(ct.sum(ct.where(i == j, kk, 0.0), 1) + eps)
            of_q = ct.rsqrt(ct.sum(ct.where(i == j, qq, 0.0), 1) + eps) * scale
        kk = kk * of_k[:, None] * of_k[None, :]
        qk = ct.where(i >= j, qk * of_q[:, None] * of_k[None, :], 0.0)
        own = ct.sum(ct.where(p == r, kk.reshape((blocks, 16, blocks, 16)), 0.0), 2)
        g = ct.load(GATES, (place, heads, SUM, 0), shape, check_bounds=False).reshape((HEADS, CHUNK))
        last = ct.sum(ct.where(j == CHUNK - 1, g, 0.0), 1, keepdims=True)
        into, onward = ct.exp2(g, flush_to_zero=True), ct.exp2(last - g, flush_to_zero=True)
        ct.store(FACTORS, (place, heads, INTO, 0), (into * of_k[None, :]).reshape(shape), allow_tma=False)
        ct.store(FACTORS, (place, heads, ONWARD, 0), (onward * of_k[None, :]).reshape(shape), allow_tma=False)
        ct.store(FACTORS, (place, heads, OUTWARD, 0), (into * of_q[None, :]).reshape(shape), allow_tma=False)
        betas: tuple = ()
        for n in ct.static_iter(range(HEADS)):
            beta = ct.load(GATES, (place, first_head + n, BETA_OF, 0), (1, 1, 1, CHUNK), check_bounds=False)
            betas = (*betas, beta.reshape((CHUNK,)))

        def between(h):  # made again for T: held, it would spill
            g = ct.load(GATES, (place, h, SUM, 0), (1, 1, 1, CHUNK), check_bounds=False)
            return ct.exp2(-ct.abs(g.reshape((CHUNK, 1)) - g.reshape((1, CHUNK))), flush_to_zero=True)

        for n in ct.static_iter(range(HEADS)):
            ct.store(P, (place, first_head + n, 0, 0), (qk * between(first_head + n)).astype(P.dtype).reshape(square))
        # That with gates is that without them times 2**(G_i - G_j): (D X D^-1)^-1 = D X^-1 D^-1.
        ts = inverses(own, kk, betas, CHUNK)
        for n in ct.static_iter(range(HEADS)):
            ct.store(T, (place, first_head + n, 0, 0), (ts[n] * between(first_head + n)).astype(T.dtype).reshape(square))
