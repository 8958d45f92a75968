"""Tile code of `attention`."""

import cuda.tile as ct

from ..common.attention_tiles import (
    columns,
    item_of_block,
    normaliser_and_lse,
    packed_tile,
    softmax_over_keys,
    store_result,
    summed_products,
    transposed_columns,
)
from ..common.softmax_tiles import sink_factor
from ..common.tiles import LOG2E, rows_from

APPROX, FULL = ct.RoundingMode.APPROX, ct.RoundingMode.FULL


@ct.kernel
def attention_kernel(
    Q,
    K,
    V,
    OUT,
    LSE,
    KV_START,
    KV_LEN,
    CU_SEQLENS_Q,
    CU_SEQLENS_KV,
    SINKS,
    Q_SCALE,
    K_SCALE,
    V_SCALE,
    window: int,
    ahead: int,
    scale: float,
    cap: float,
    CAUSAL: ct.Constant[bool],
    HAS_WINDOW: ct.Constant[bool],
    AHEAD: ct.Constant[bool],
    HAS_START: ct.Constant[bool],
    HAS_LEN: ct.Constant[bool],
    VARLEN: ct.Constant[bool],
    RETURN_LSE: ct.Constant[bool],
    SOFTCAP: ct.Constant[bool],
    HAS_SINKS: ct.Constant[bool],
    SCALED: ct.Constant[bool],
    KEYS_LAST: ct.Constant[bool],
    MASKED: ct.Constant[bool],
    PERSISTENT: ct.Constant[bool],
    SPLIT_KV: ct.Constant[bool],
    GROUP: ct.Constant[int],
    WIDTH_K: ct.Constant[int],
    REST_K: ct.Constant[int],
    WIDTH_V: ct.Constant[int],
    REST_V: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    TAIL_N: ct.Constant[int],
    PARTS: ct.Constant[int],
    LATENCY: ct.Constant[int],
    TF32X3: ct.Constant[bool],
):
    """TILE_M queries of one head at a time. Grid (query tiles, q_heads, batch), with VARLEN (query
    tiles + sequences, q_heads); persistent: blocks that stride over all of these. SPLIT_KV: grid
    (splits * query tiles, q_heads, batch), each block with one KV split, and OUT is the fp32
    partial [batch, splits, q_heads, q_len, v_dim + 2 + pad] that a merge reads.

    Q [batch, q_heads, q_len, head_dim]; K [batch, kv_heads, kv_len, head_dim]; V [batch, kv_heads,
    kv_len, v_dim], with KEYS_LAST [batch, kv_heads, v_dim, kv_len]; OUT [batch, q_heads, q_len,
    v_dim]; LSE [batch, q_heads, q_len].
    int32: KV_START, KV_LEN [batch]; CU_SEQLENS_Q, CU_SEQLENS_KV [batch + 1], for arrays whose batch
        axis is 1.
    fp32: SINKS, Q_SCALE [q_heads]; K_SCALE, V_SCALE [kv_heads]. What a flag says is absent is not
        touched.
    AHEAD: queries see `ahead` keys behind their own, which `window` counts too.
    scale: of the scores; without SOFTCAP times log2(e). cap: times log2(e). MASKED: some tile of
        keys may be partly hidden.
    WIDTH_K, REST_K, WIDTH_V, REST_V: columns of the one or two tiles that hold head_dim and v_dim.
    """
    tile, head, batch = ct.bid(0), ct.bid(1), ct.bid(2)
    KEY_AXIS = 3 if KEYS_LAST else 2
    if VARLEN:
        batch, tile = packed_tile(CU_SEQLENS_Q, tile, TILE_M)
        # Slices end with the sequence: beyond it, loads give zeros and stores do nothing.
        first_q, end_q = ct.load(CU_SEQLENS_Q, (batch,), ()), ct.load(CU_SEQLENS_Q, (batch + 1,), ())
        first_kv, end_kv = ct.load(CU_SEQLENS_KV, (batch,), ()), ct.load(CU_SEQLENS_KV, (batch + 1,), ())
        Q, OUT = rows_from(Q, 2, first_q, end_q), rows_from(OUT, 2, first_q, end_q)
        K, V = rows_from(K, 2, first_kv, end_kv), rows_from(V, KEY_AXIS, first_kv, end_kv)
        if RETURN_LSE:
            LSE = rows_from(LSE, 2, first_q, end_q)
        batch = 0
    elif HAS_START or HAS_LEN:
        begin, end = 0, K.shape[2]
        if HAS_LEN:
            end = max(0, min(ct.load(KV_LEN, (batch,), ()), end))
        if HAS_START:
            begin = max(0, min(ct.load(KV_START, (batch,), ()), end))
        K, V = rows_from(K, 2, begin, end), rows_from(V, KEY_AXIS, begin, end)
    q_len, n = Q.shape[2], K.shape[2]
    tiles = ct.cdiv(q_len, TILE_M)
    part: tuple = ()
    if SPLIT_KV:
        part, tile = (tile // tiles, ct.num_blocks(0) // tiles), tile % tiles
    K_WIDTHS, V_WIDTHS = (WIDTH_K, REST_K), (WIDTH_V, REST_V)

    def attend(tile, head, batch):
        kv_head = head // GROUP
        q = columns(Q, batch, head, tile, K_WIDTHS, TILE_M, None)
        own = scale
        if SCALED:
            own = own * (ct.load(Q_SCALE, (head,), ()) * ct.load(K_SCALE, (kv_head,), ()))

        def scores_of(j, TILE):
            scores = summed_products(q, transposed_columns(K, batch, kv_head, j, K_WIDTHS, TILE, LATENCY), TF32X3)
            if SOFTCAP:
                # The approximation is off by 2**-11, less than a score that was rounded to 16 bits.
                scores = ct.tanh(scores * own, rounding_mode=FULL if TF32X3 or Q.dtype == ct.float32 else APPROX)
            return scores

        def values_of(j, TILE):
            return columns(V, batch, kv_head, j, V_WIDTHS, TILE, LATENCY, KEYS_LAST)

        to_base_2 = cap if SOFTCAP else own
        first = tile * TILE_M + n - q_len  # the last key that the tile's first query sees under a causal mask
        if AHEAD:
            first = first + ahead
        how = (V_WIDTHS, CAUSAL, HAS_WINDOW, MASKED, TILE_M, TILE_N, TAIL_N, PARTS, TF32X3, AHEAD, part)
        sums, maximum, denominator = softmax_over_keys(scores_of, values_of, first, n, window, to_base_2, V.dtype, *how)
        normaliser, lse = normaliser_and_lse(maximum, denominator, OUT.dtype)
        if HAS_SINKS:
            normaliser = sink_factor(maximum, denominator, ct.load(SINKS, (head,), ()) * LOG2E)
        if SPLIT_KV:
            normaliser = 1.0
        if SCALED:
            normaliser = normaliser * ct.load(V_SCALE, (kv_head,), ())
        state, values = (maximum, denominator, lse), V.shape[2 if KEYS_LAST else 3]
        store_result(OUT, LSE, batch, head, tile, sums, normaliser, state, V_WIDTHS, TILE_M, part, values, RETURN_LSE)

    if CAUSAL and not PERSISTENT:
        tile = tiles - 1 - tile  # the longest tiles first
    if PERSISTENT:
        shape = (tiles, Q.shape[1], Q.shape[0])
        items = tiles * shape[1] * shape[2]
        for item in range(ct.bid(0), items, ct.num_blocks(0)):
            attend(*item_of_block(item, shape, CAUSAL))
    elif not VARLEN:
        attend(tile, head, batch)
    elif 0 <= tile < tiles:
        attend(tile, head, batch)
