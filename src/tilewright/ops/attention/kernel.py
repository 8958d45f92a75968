"""Tile code of `attention`."""

import math

import cuda.tile as ct

from ..attention_common import FLOOR, product, softmax_finish, softmax_step

ZERO = ct.PaddingMode.ZERO


@ct.kernel
def attention_kernel(
    Q,
    K,
    V,
    OUT,
    LSE,
    KV_START,
    KV_LEN,
    CU_Q,
    CU_KV,
    window: int,
    scale: float,
    CAUSAL: ct.Constant[bool],
    HAS_WINDOW: ct.Constant[bool],
    HAS_START: ct.Constant[bool],
    HAS_LEN: ct.Constant[bool],
    VARLEN: ct.Constant[bool],
    RETURN_LSE: ct.Constant[bool],
    MASKED: ct.Constant[bool],
    PERSISTENT: ct.Constant[bool],
    GROUP: ct.Constant[int],
    TILE_D: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    PARTS: ct.Constant[int],
    LATENCY: ct.Constant[int],
    TF32X3: ct.Constant[bool],
):
    """TILE_M queries of one head at a time. Grid (query tiles, q_heads, batch); persistent: blocks that stride over all of these.

    Q, OUT [batch, q_heads, q_len, head_dim]; K, V [batch, kv_heads, kv_len, head_dim]; LSE [batch, q_heads, q_len].
    int32: KV_START, KV_LEN [batch]; CU_Q, CU_KV [batch + 1], for arrays whose batch axis is 1. What a flag says is absent is not touched.
    scale: of the scores, times log2(e). MASKED: some tile of keys may be partly hidden.
    """
    tile, head, batch = ct.bid(0), ct.bid(1), ct.bid(2)
    if VARLEN:
        # Slices end where the sequence ends: beyond, loads give zeros and stores do nothing.
        first_q, end_q = ct.load(CU_Q, (batch,), ()), ct.load(CU_Q, (batch + 1,), ())
        first_kv, end_kv = ct.load(CU_KV, (batch,), ()), ct.load(CU_KV, (batch + 1,), ())
        Q, OUT = Q.slice(2, first_q, end_q), OUT.slice(2, first_q, end_q)
        K, V = K.slice(2, first_kv, end_kv), V.slice(2, first_kv, end_kv)
        if RETURN_LSE:
            LSE = LSE.slice(2, first_q, end_q)
        batch = 0
    elif HAS_START or HAS_LEN:
        begin, end = 0, K.shape[2]
        if HAS_LEN:
            end = max(0, min(ct.load(KV_LEN, (batch,), ()), end))
        if HAS_START:
            begin = max(0, min(ct.load(KV_START, (batch,), ()), end))
        K, V = K.slice(2, begin, end), V.slice(2, begin, end)
    q_len, n = Q.shape[2], K.shape[2]
    tiles = ct.cdiv(q_len, TILE_M)
    column = ct.arange(TILE_N, dtype=ct.int32)[None, :]

    def attend(tile, head, batch):
        if CAUSAL:
            tile = tiles - 1 - tile  # the longest first
        first = tile * TILE_M + n - q_len  # the last key that the tile's first query sees under a causal mask
        # Tiles of keys from `begin` to `end`; those below `whole_from` and from `whole_to` on are in part hidden.
        begin, end, whole_from, whole_to = 0, ct.cdiv(n, TILE_N), 0, n // TILE_N
        if CAUSAL:
            end = min(end, ct.cdiv(max(0, first + TILE_M), TILE_N))
            whole_to = min(whole_to, max(0, first + 1) // TILE_N)
        if HAS_WINDOW:
            begin = max(0, first - window + 1) // TILE_N
            whole_from = max(0, first + TILE_M - 1 - window + TILE_N) // TILE_N
        row = first + ct.arange(TILE_M, dtype=ct.int32)[:, None]
        q = ct.load(Q, (batch, head, tile, 0), (1, 1, TILE_M, TILE_D), padding_mode=ZERO).reshape((TILE_M, TILE_D))
        maximum = ct.full((TILE_M, 1), FLOOR, dtype=ct.float32)
        denominator = ct.zeros((TILE_M, 1), dtype=ct.float32)
        accumulator = ct.zeros((TILE_M, TILE_D), dtype=ct.float32)

        def step(j, state, HIDDEN):
            accumulator, maximum, denominator = state
            k = ct.load(K, (batch, head // GROUP, 0, j), (1, 1, TILE_D, TILE_N), order=(0, 1, 3, 2), padding_mode=ZERO, latency=LATENCY)
            scores = product(q, k.reshape((TILE_D, TILE_N)), ct.zeros((TILE_M, TILE_N), dtype=ct.float32), TF32X3)
            if HIDDEN:
                key = j * TILE_N + column
                seen = key < n
                if CAUSAL:
                    seen = key <= row  # no query of the sequence sees beyond n; the rows that pad the last tile are not stored
                if HAS_WINDOW:
                    seen = seen & (key > row - window)
                scores = ct.where(seen, scores, -math.inf)
            weights, factor, maximum, denominator = softmax_step(scores, maximum, denominator, scale, V.dtype, 1, PARTS)
            v = ct.load(V, (batch, head // GROUP, j, 0), (1, 1, TILE_N, TILE_D), padding_mode=ZERO, latency=LATENCY)
            return product(weights, v.reshape((TILE_N, TILE_D)), accumulator * factor, TF32X3), maximum, denominator

        # A loop for the whole tiles apart from those for the partly hidden ones: a branch in one loop keeps the compiler from overlapping
        # the softmax of a step with the products of the next (H200, causal, 1k to 4k queries: 10 to 25 % slower).
        state = (accumulator, maximum, denominator)
        whole_from, whole_to = max(begin, min(whole_from, end)), min(whole_to, end)
        if HAS_WINDOW:
            for j in range(begin, whole_from):
                state = step(j, state, True)
        for j in range(whole_from, whole_to):
            state = step(j, state, False)
        if MASKED:
            for j in range(max(whole_from, whole_to), end):
                state = step(j, state, True)
        accumulator, maximum, denominator = state
        out, lse = softmax_finish(accumulator, maximum, denominator)
        ct.store(OUT, (batch, head, tile, 0), out.astype(OUT.dtype).reshape((1, 1, TILE_M, TILE_D)))
        if RETURN_LSE:
            ct.store(LSE, (batch, head, tile), lse.reshape((1, 1, TILE_M)))

    if PERSISTENT:
        # All heads' longest tiles first, so that blocks end together.
        heads = Q.shape[1]
        for item in range(ct.bid(0), tiles * heads * Q.shape[0], ct.num_blocks(0)):
            attend(item // (heads * Q.shape[0]), item % heads, item // heads % Q.shape[0])
    elif not VARLEN:
        attend(tile, head, batch)
    elif tile < tiles:  # the grid covers the longest sequence
        attend(tile, head, batch)
