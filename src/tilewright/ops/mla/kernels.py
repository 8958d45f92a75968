"""Tile code of `mla`."""

import cuda.tile as ct

from ..common.attention_tiles import (
    columns,
    item_of_block,
    normaliser_and_lse,
    softmax_over_keys,
    store_result,
    summed_products,
    transposed_columns,
)


@ct.kernel
def mla_kernel(
    Q_NOPE,
    Q_ROPE,
    K_NOPE,
    K_ROPE,
    V,
    OUT,
    LSE,
    KV_LEN,
    Q_SCALE,
    K_SCALE,
    V_SCALE,
    scale: float,
    CAUSAL: ct.Constant[bool],
    HAS_LEN: ct.Constant[bool],
    RETURN_LSE: ct.Constant[bool],
    SCALED: ct.Constant[bool],
    KEYS_LAST: ct.Constant[bool],
    MASKED: ct.Constant[bool],
    PERSISTENT: ct.Constant[bool],
    SPLIT_KV: ct.Constant[bool],
    NOPE: ct.Constant[int],
    NOPE_REST: ct.Constant[int],
    ROPE: ct.Constant[int],
    ROPE_REST: ct.Constant[int],
    VALUE: ct.Constant[int],
    VALUE_REST: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    TAIL_N: ct.Constant[int],
    PARTS: ct.Constant[int],
    LATENCY: ct.Constant[int],
):
    """TILE_M queries of one head at a time. Grid (query tiles, heads, batch); persistent: blocks
    that stride over all of these; SPLIT_KV: (splits * query tiles, heads, batch), and OUT is the
    partial of `store_partial`.

    Q_NOPE, Q_ROPE [batch, heads, q_len, ...]; K_NOPE [batch, heads, kv_len, nope_dim]; K_ROPE
    [batch, 1, kv_len, rope_dim]; V [batch, heads, kv_len, v_dim], with KEYS_LAST [batch, heads,
    v_dim, kv_len]; OUT [batch, heads, q_len, v_dim]; LSE [batch, heads, q_len].
    KV_LEN int32 [batch]; fp32: Q_SCALE, V_SCALE [heads], K_SCALE [1]. What a flag says is absent is
    not touched.
    scale: of the scores, times log2(e). MASKED: some tile of keys may be partly hidden. Widths: of
        the one or two tiles that hold a part.
    """
    tile, head, batch = ct.bid(0), ct.bid(1), ct.bid(2)
    if HAS_LEN:
        end = max(0, min(ct.load(KV_LEN, (batch,), ()), K_NOPE.shape[2]))
        K_NOPE, K_ROPE, V = K_NOPE.slice(2, 0, end), K_ROPE.slice(2, 0, end), V.slice(3 if KEYS_LAST else 2, 0, end)
    q_len, n = Q_NOPE.shape[2], K_NOPE.shape[2]
    tiles = ct.cdiv(q_len, TILE_M)
    part: tuple = ()
    if SPLIT_KV:
        part, tile = (tile // tiles, ct.num_blocks(0) // tiles), tile % tiles
    NOPES, ROPES, VALUES = (NOPE, NOPE_REST), (ROPE, ROPE_REST), (VALUE, VALUE_REST)

    def queries(tile, head, batch):
        return columns(Q_NOPE, batch, head, tile, NOPES, TILE_M, None) + columns(Q_ROPE, batch, head, tile, ROPES, TILE_M, None)

    def attend(q, tile, head, batch):
        own = scale
        if SCALED:
            own = own * (ct.load(Q_SCALE, (head,), ()) * ct.load(K_SCALE, (0,), ()))

        def scores_of(j, TILE):
            k = transposed_columns(K_NOPE, batch, head, j, NOPES, TILE, LATENCY) + transposed_columns(K_ROPE, batch, 0, j, ROPES, TILE, LATENCY)
            return summed_products(q, k, False)

        def values_of(j, TILE):
            return columns(V, batch, head, j, VALUES, TILE, LATENCY, KEYS_LAST)

        first = tile * TILE_M + n - q_len  # the last key that the tile's first query sees under a causal mask
        how = (VALUES, CAUSAL, False, MASKED, TILE_M, TILE_N, TAIL_N, PARTS, False, False, part)
        sums, maximum, denominator = softmax_over_keys(scores_of, values_of, first, n, 0, own, V.dtype, *how)
        normaliser, lse = normaliser_and_lse(maximum, denominator, OUT.dtype)
        if SPLIT_KV:
            normaliser = 1.0
        if SCALED:
            normaliser = normaliser * ct.load(V_SCALE, (head,), ())
        state, values = (maximum, denominator, lse), V.shape[2 if KEYS_LAST else 3]
        store_result(OUT, LSE, batch, head, tile, sums, normaliser, state, VALUES, TILE_M, part, values, RETURN_LSE)

    if CAUSAL and not PERSISTENT:
        tile = tiles - 1 - tile  # the longest tiles first
    if PERSISTENT:
        shape = (tiles, Q_NOPE.shape[1], Q_NOPE.shape[0])
        for item in range(ct.bid(0), tiles * shape[1] * shape[2], ct.num_blocks(0)):
            here = item_of_block(item, shape, CAUSAL)
            attend(queries(*here), *here)
    else:
        attend(queries(tile, head, batch), tile, head, batch)
