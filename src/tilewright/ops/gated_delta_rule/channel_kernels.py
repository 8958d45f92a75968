"""Tile code of `gated_delta_rule` with a gate for each column of k, a chunk of tokens at a time.

G_i is a row here: the sum of a chunk's log2 decays up to token i, of each column. So decays are no
factors of whole rows, and stand in the operands:

    A  = tril(beta sum_c K_ic K_jc 2**(G_ic - G_jc), -1)       INTO   = K 2**G
    P  = tril(scale sum_c Q_ic K_jc 2**(G_ic - G_jc))          ONWARD = K 2**(G_last - G)
    T  = (I + A)^-1 beta                                       OUTWARD = scale Q 2**G
    V' = T (V - INTO S)      O = OUTWARD S + P V'      S <- diag(2**G_last) S + ONWARD^T V'

No exponent may be positive, or a column that forgets at once would overflow. So a chunk is halved
again and again: between the tokens of two halves the difference is that to the end of the first
half and that from there on, both at most 0, and what they scale are the operands of one product.
"""

import cuda.tile as ct

from ..common.attention_tiles import place_of
from ..common.recurrence import LEAST_DECAY
from ..common.tiles import LOG2E, ZERO, rows_from
from .kernels import inverse


@ct.kernel
def solve_channels_kernel(
    Q,
    K,
    G,
    BETA,
    CU_SEQLENS,
    T,
    P,
    INTO,
    ONWARD,
    OUTWARD,
    DECAY,
    scale: float,
    eps: float,
    VARLEN: ct.Constant[bool],
    NORMALIZE: ct.Constant[bool],
    GROUP: ct.Constant[int],
    CHUNK: ct.Constant[int],
    TILE_K: ct.Constant[int],
):
    """What a chunk is without the state. Grid (chunks, v_heads).

    T, P [chunks, v_heads, CHUNK, CHUNK]; INTO, ONWARD, OUTWARD [chunks, v_heads, CHUNK, TILE_K];
    DECAY [chunks, v_heads, TILE_K], of the chunk.
    """
    place, h = ct.bid(0), ct.bid(1)
    b, c = place_of(CU_SEQLENS, place, CHUNK, Q.shape[2], VARLEN)
    if VARLEN:
        first, end = ct.load(CU_SEQLENS, (b,), ()), ct.load(CU_SEQLENS, (b + 1,), ())
        Q, K, G, BETA = rows_from(Q, 2, first, end), rows_from(K, 2, first, end), rows_from(G, 2, first, end), rows_from(BETA, 2, first, end)
        b = 0
    if 0 <= c < ct.cdiv(Q.shape[2], CHUNK):

        def rows_of(X, head):
            return ct.load(X, (b, head, c, 0), (1, 1, CHUNK, TILE_K), padding_mode=ZERO, allow_tma=False).reshape((CHUNK, TILE_K)).astype(ct.float32)

        def keep(X, tile, size):
            ct.store(X, (place, h, 0, 0), tile.astype(X.dtype).reshape((1, 1, CHUNK, size)))

        i, j = ct.arange(CHUNK, dtype=ct.int32)[:, None], ct.arange(CHUNK, dtype=ct.int32)[None, :]
        k, q = rows_of(K, h // GROUP), rows_of(Q, h // GROUP)
        of_k, of_q = ct.full((CHUNK,), 1.0, dtype=ct.float32), ct.full((CHUNK,), scale, dtype=ct.float32)
        if NORMALIZE:
            of_k, of_q = ct.rsqrt(ct.sum(k * k, 1) + eps), ct.rsqrt(ct.sum(q * q, 1) + eps) * scale
        g = ct.cumsum(ct.maximum(rows_of(G, h) * LOG2E, LEAST_DECAY, propagate_nan=True), 0)
        last = ct.sum(ct.where(i == CHUNK - 1, g, 0.0), 0, keepdims=True)
        ct.store(DECAY, (place, h, 0), ct.exp2(last).reshape((1, 1, TILE_K)))
        keep(ONWARD, k * ct.exp2(last - g) * of_k[:, None], TILE_K)
        keep(INTO, k * ct.exp2(g) * of_k[:, None], TILE_K)
        keep(OUTWARD, q * ct.exp2(g) * of_q[:, None], TILE_K)
        apart = ct.where(i > j, i ^ j, 0)  # from HALF to 2 * HALF - 1 in the two halves of a part
        kk, qk = ct.zeros((CHUNK, CHUNK), dtype=ct.float32), ct.where(i == j, ct.sum(q * k, 1, keepdims=True), 0.0)
        for level in ct.static_iter(range(CHUNK.bit_length() - 1)):
            HALF = 1 << level
            parts = g.reshape((CHUNK // (2 * HALF), 2 * HALF, TILE_K))
            end = ct.arange(2 * HALF, dtype=ct.int32)[None, :, None] == HALF - 1  # of the first half
            between = ct.exp2(-abs(parts - ct.sum(ct.where(end, parts, 0.0), 1, keepdims=True))).reshape((CHUNK, TILE_K))
            # Read again: held, they would spill.
            keys = (rows_of(K, h // GROUP) * between).astype(K.dtype)
            queries = (rows_of(Q, h // GROUP) * between).astype(K.dtype)
            halves, empty = (apart >= HALF) & (apart < 2 * HALF), ct.zeros((CHUNK, CHUNK), dtype=ct.float32)
            kk = ct.where(halves, ct.mma(keys, ct.transpose(keys), empty), kk)
            qk = ct.where(halves, ct.mma(queries, ct.transpose(keys), empty), qk)
        keep(P, qk * of_q[:, None] * of_k[None, :], CHUNK)
        beta = ct.load(BETA, (b, h, c), (1, 1, CHUNK), padding_mode=ZERO, allow_tma=False).reshape((CHUNK,)).astype(ct.float32)
        keep(T, inverse(kk * of_k[:, None] * of_k[None, :], beta, CHUNK), CHUNK)


@ct.kernel
def scan_channels_kernel(
    V,
    T,
    P,
    INTO,
    ONWARD,
    OUTWARD,
    DECAY,
    CU_SEQLENS,
    STATE,
    OUT,
    VARLEN: ct.Constant[bool],
    HAS_STATE: ct.Constant[bool],
    BLOCKS: ct.Constant[int],
    CHUNK: ct.Constant[int],
    TILE_K: ct.Constant[int],
    TILE_V: ct.Constant[int],
    LATENCY: ct.Constant[int],
):
    """Chunks of a sequence in order; TILE_V columns of the state of one head stay in registers.
    Grid (BLOCKS * v_heads * sequences); arrays as in the other and in `scan_kernel`.
    """
    j, item = ct.bid(0) % BLOCKS, ct.bid(0) // BLOCKS
    h, seq = item % V.shape[1], item // V.shape[1]
    b, place = seq, seq * ct.cdiv(V.shape[2], CHUNK)
    if VARLEN:
        first, end = ct.load(CU_SEQLENS, (seq,), ()), ct.load(CU_SEQLENS, (seq + 1,), ())
        V, OUT = rows_from(V, 2, first, end), rows_from(OUT, 2, first, end)
        b, place = 0, first // CHUNK + seq

    def of_chunk(X, c, size):
        return ct.load(X, (place + c, h, 0, 0), (1, 1, CHUNK, size), latency=LATENCY).reshape((CHUNK, size))

    empty = ct.zeros((CHUNK, TILE_V), dtype=ct.float32)
    s = ct.zeros((TILE_K, TILE_V), dtype=ct.float32)
    if HAS_STATE:
        s = ct.load(STATE, (seq, h, 0, j), (1, 1, TILE_K, TILE_V), padding_mode=ZERO, allow_tma=False).reshape((TILE_K, TILE_V))
    for c in range(ct.cdiv(V.shape[2], CHUNK)):
        into = of_chunk(INTO, c, TILE_K)
        before = s.astype(into.dtype)
        v = ct.load(V, (b, h, c, j), (1, 1, CHUNK, TILE_V), padding_mode=ZERO, latency=LATENCY).reshape((CHUNK, TILE_V))
        missing = v.astype(ct.float32) - ct.mma(into, before, empty)
        new = ct.mma(of_chunk(T, c, CHUNK), missing.astype(into.dtype), empty).astype(into.dtype)
        decay = ct.load(DECAY, (place + c, h, 0), (1, 1, TILE_K), latency=LATENCY, allow_tma=False).reshape((TILE_K, 1))
        s = ct.mma(ct.transpose(of_chunk(ONWARD, c, TILE_K)), new, s * decay)
        out = ct.mma(of_chunk(P, c, CHUNK), new, ct.mma(of_chunk(OUTWARD, c, TILE_K), before, empty))
        ct.store(OUT, (b, h, c, j), out.astype(OUT.dtype).reshape((1, 1, CHUNK, TILE_V)))
    if HAS_STATE:
        ct.store(STATE, (seq, h, 0, j), s.reshape((1, 1, TILE_K, TILE_V)), allow_tma=False)
