"""Tile code of `attention_decode`: one kernel over ranges of keys, one that merges them."""

import math

import cuda.tile as ct

from ..attention_common import FLOOR, LOG2E, softmax_finish, softmax_step

ZERO = ct.PaddingMode.ZERO


@ct.kernel
def attention_decode_kernel(
    Q,
    K,
    V,
    OUT,
    LSE,
    KV_LEN,
    BLOCK_TABLE,
    KV_START,
    window: int,
    scale: float,
    PAGE_SIZE: ct.Constant[int],
    HAS_WINDOW: ct.Constant[bool],
    HAS_START: ct.Constant[bool],
    HAS_LEN: ct.Constant[bool],
    RETURN_LSE: ct.Constant[bool],
    SPLIT: ct.Constant[bool],
    KEYS_FIRST: ct.Constant[bool],
    GROUP: ct.Constant[int],
    ROWS: ct.Constant[int],
    TILE_D: ct.Constant[int],
    TILE_N: ct.Constant[int],
    LATENCY: ct.Constant[int],
):
    """One block: all query heads of one key head over one range of keys. Grid (splits, kv_heads, batch).

    Q [batch, kv_heads * GROUP, 1, head_dim]; K, V [batch, kv_heads, max_len, head_dim] or [pages, kv_heads, page_size, head_dim].
    Without SPLIT: OUT like Q, LSE [batch, kv_heads * GROUP, 1]. With it OUT holds fp32 partials [batch, kv_heads, splits, GROUP, head_dim + pad],
    the element behind each row its lse in base 2.
    int32: KV_LEN, KV_START [batch], BLOCK_TABLE [batch, max_pages]. What a flag says is absent is not touched.
    scale: of the scores, times log2(e).
    """
    split, head, batch = ct.bid(0), ct.bid(1), ct.bid(2)
    end = K.shape[2]
    if PAGE_SIZE:
        end = BLOCK_TABLE.shape[1] * PAGE_SIZE
    if HAS_LEN:
        end = max(0, min(ct.load(KV_LEN, (batch,), ()), end))
    begin = 0
    if HAS_START:
        begin = max(0, ct.load(KV_START, (batch,), ()))
    if HAS_WINDOW:
        begin = max(begin, end - window)
    begin = min(begin, end)

    # This block's tiles: [first, last). Of them [first, head_end) and [tail, last) may hold keys that are not to be seen.
    first, last = begin // TILE_N, ct.cdiv(end, TILE_N)
    per_split = ct.cdiv(last - first, ct.num_blocks(0))
    first = first + split * per_split
    last = min(last, first + per_split)
    head_end = max(first, min(last, ct.cdiv(begin, TILE_N)))
    tail = max(head_end, min(last, end // TILE_N))

    axis = 0 if KEYS_FIRST else 1  # along which the keys of a tile of scores lie
    state_shape = (1, ROWS) if KEYS_FIRST else (ROWS, 1)
    first_row, end_row = head * GROUP, head * GROUP + GROUP
    q = ct.load(Q.slice(1, first_row, end_row), (batch, 0, 0, 0), (1, ROWS, 1, TILE_D), padding_mode=ZERO).reshape((ROWS, TILE_D))
    if KEYS_FIRST:
        q = ct.transpose(q)

    def load(ARRAY, j):
        shape = (1, 1, TILE_N, TILE_D)
        if PAGE_SIZE == 0:
            tile = ct.load(ARRAY, (batch, head, j, 0), shape, padding_mode=ZERO, latency=LATENCY)
        elif PAGE_SIZE >= TILE_N:
            page = ct.load(BLOCK_TABLE, (batch, j // (PAGE_SIZE // TILE_N)), ())
            tile = ct.load(ARRAY, (page, head, j % (PAGE_SIZE // TILE_N), 0), shape, padding_mode=ZERO, latency=LATENCY)
        else:
            pages = ct.load(BLOCK_TABLE, (batch, j), (1, TILE_N // PAGE_SIZE), padding_mode=ZERO).reshape((TILE_N // PAGE_SIZE,))
            within = (ct.Slice(head, 1), ct.Slice(0, PAGE_SIZE), ct.Slice(0, TILE_D))
            tile = ct.load_advanced_indexing(ARRAY, (pages, *within), padding_mode=ZERO, latency=LATENCY)
        return tile.reshape((TILE_N, TILE_D))

    def step(j, state, MASKED):
        accumulator, maximum, denominator = state
        key = j * TILE_N + ct.arange(TILE_N, dtype=ct.int32)
        seen = (key >= begin) & (key < end)
        k, v = load(K, j), load(V, j)
        if KEYS_FIRST:
            scores = ct.mma(k, q, ct.zeros((TILE_N, ROWS), dtype=ct.float32))
        else:
            scores = ct.mma(q, ct.transpose(k), ct.zeros((ROWS, TILE_N), dtype=ct.float32))
        if MASKED:
            scores = ct.where(ct.expand_dims(seen, 1 - axis), scores, -math.inf)
            v = ct.where(ct.expand_dims(seen, 1), v, 0.0)  # hidden memory may hold NaN, and 0 * NaN is NaN
        weights, factor, maximum, denominator = softmax_step(scores, maximum, denominator, scale, V.dtype, axis, 1)
        if KEYS_FIRST:
            accumulator = ct.mma(ct.transpose(v), weights, accumulator * factor)
        else:
            accumulator = ct.mma(weights, v, accumulator * factor)
        return accumulator, maximum, denominator

    state = (
        ct.zeros((TILE_D, ROWS) if KEYS_FIRST else (ROWS, TILE_D), dtype=ct.float32),
        ct.full(state_shape, FLOOR, dtype=ct.float32),
        ct.zeros(state_shape, dtype=ct.float32),
    )
    if HAS_WINDOW or HAS_START:
        for j in range(first, head_end):
            state = step(j, state, True)
    for j in range(head_end, tail):
        state = step(j, state, False)
    for j in range(tail, last):
        state = step(j, state, True)
    out, lse = softmax_finish(*state)
    if KEYS_FIRST:
        out = ct.transpose(out)
    if not SPLIT:
        ct.store(OUT.slice(1, first_row, end_row), (batch, 0, 0, 0), out.astype(OUT.dtype).reshape((1, ROWS, 1, TILE_D)))
        if RETURN_LSE:
            ct.store(LSE.slice(1, first_row, end_row), (batch, 0, 0), lse.reshape((1, ROWS, 1)))
    else:
        head_dim = Q.shape[3]
        ct.store(OUT.slice(4, 0, head_dim), (batch, head, split, 0, 0), out.reshape((1, 1, 1, ROWS, TILE_D)))
        ct.store(OUT.slice(4, head_dim, head_dim + 1), (batch, head, split, 0, 0), (lse * LOG2E).reshape((1, 1, 1, ROWS, 1)))


@ct.kernel
def attention_decode_merge_kernel(
    PARTIAL,
    OUT,
    LSE,
    RETURN_LSE: ct.Constant[bool],
    TILE_S: ct.Constant[int],
    TILE_D: ct.Constant[int],
):
    """One query head: out = sum(w * partial) / sum(w), w = exp2(lse - max lse). Grid (group, kv_heads, batch).

    PARTIAL [batch, kv_heads, splits, group, head_dim + pad], behind each row its lse in base 2; OUT [batch, kv_heads * group, 1, head_dim];
    LSE [batch, kv_heads * group, 1].
    """
    row, head, batch = ct.bid(0), ct.bid(1), ct.bid(2)
    head_dim = OUT.shape[3]
    part, part_lse = PARTIAL.slice(4, 0, head_dim), PARTIAL.slice(4, head_dim, head_dim + 1)
    lse = ct.load(part_lse, (batch, head, 0, row, 0), (1, 1, TILE_S, 1, 1), padding_mode=ct.PaddingMode.NEG_INF).reshape((TILE_S, 1))
    partial = ct.load(part, (batch, head, 0, row, 0), (1, 1, TILE_S, 1, TILE_D), padding_mode=ZERO).reshape((TILE_S, TILE_D))
    largest = ct.maximum(ct.max(lse, axis=0, keepdims=True), FLOOR)
    weights = ct.exp2(lse - largest)
    total = ct.sum(weights, axis=0, keepdims=True)
    out, lse = softmax_finish(ct.sum(weights * partial, axis=0, keepdims=True), largest, total)
    row = head * ct.num_blocks(0) + row
    ct.store(OUT, (batch, row, 0, 0), out.astype(OUT.dtype).reshape((1, 1, 1, TILE_D)))
    if RETURN_LSE:
        ct.store(LSE, (batch, row, 0), lse.reshape((1, 1, 1)))
