"""Tile code of `attention_decode`: one kernel over KV splits, one that merges them.
`mla_decode` launches the same two.
"""

import math

import cuda.tile as ct

from ..common.pdl import pdl_overlap
from ..common.softmax_tiles import FLOOR, LN2, merged, sink_factor, softmax_step
from ..common.tiles import LOG2E, ZERO, rows_from
from ..common.weight_tiles import e4m3_planes, joined

APPROX, FULL = ct.RoundingMode.APPROX, ct.RoundingMode.FULL
# Codes become numbers that are 2**-8 (fp16) or 2**-120 (bf16) of their value, because that takes no
# instruction. The queries, the scale of the scores, the weights and the sums each make up for a
# part of this factor, so that all of them stay normal numbers.
CODES_FLOAT16, CODES_BFLOAT16 = (1.0, 2.0**8, 2.0**8, 1.0), (2.0**60, 2.0**60, 2.0**60, 2.0**60)


def apart(x):
    """The even columns of a tile, then the odd ones."""
    R, C = x.shape
    pairs = x.reshape((R, C // 2, 2))
    even, odd = ct.extract(pairs, (0, 0, 0), (R, C // 2, 1)), ct.extract(pairs, (0, 0, 1), (R, C // 2, 1))
    return ct.cat((even.reshape((R, C // 2)), odd.reshape((R, C // 2))), 1)


def together(x):
    """The inverse of `apart`."""
    R, C = x.shape
    even, odd = ct.extract(x, (0, 0), (R, C // 2)), ct.extract(x, (0, 1), (R, C // 2))
    return ct.cat((even.reshape((R, C // 2, 1)), odd.reshape((R, C // 2, 1))), 2).reshape((R, C))


@ct.kernel
def attention_decode_kernel(
    Q,
    Q_TAIL,
    K,
    V,
    OUT,
    LSE,
    DENOMINATOR,
    SINKS,
    KV_LEN,
    BLOCK_TABLE,
    KV_START,
    K_SCALE,
    V_SCALE,
    window: int,
    scale: float,
    cap: float,
    PAGE_SIZE: ct.Constant[int],
    HAS_WINDOW: ct.Constant[bool],
    HAS_START: ct.Constant[bool],
    HAS_LEN: ct.Constant[bool],
    HAS_SINKS: ct.Constant[bool],
    CODES: ct.Constant[bool],
    SOFTCAP: ct.Constant[bool],
    SHARED: ct.Constant[bool],
    RETURN_LSE: ct.Constant[bool],
    NORMALIZE: ct.Constant[bool],
    SPLIT_KV: ct.Constant[bool],
    KEYS_FIRST: ct.Constant[bool],
    GROUP: ct.Constant[int],
    HEADS: ct.Constant[int],
    TILE_Q: ct.Constant[int],
    ROWS: ct.Constant[int],
    PARTS: ct.Constant[int],
    TILE_D: ct.Constant[int],
    TAIL: ct.Constant[int],
    COLUMN_BLOCKS: ct.Constant[int],
    PARTS_V: ct.Constant[int],
    TILE_V: ct.Constant[int],
    TILE_N: ct.Constant[int],
    LATENCY: ct.Constant[int],
    LATE: ct.Constant[bool],
    SLICED: ct.Constant[bool],
    PAIRED: ct.Constant[bool],
):
    """One block: HEADS query heads of one key head over one KV split, for a part of v's
    columns.

    Grid (splits * COLUMN_BLOCKS * row tiles of a key head, kv_heads, batch), the row tiles
    innermost: they read the same keys.

    The ROWS rows of a block's products are its heads x TILE_Q query tokens, the token innermost.
    Q [batch, kv_heads * GROUP, q_len, columns of k]; K, V [batch, kv_heads, max_len, columns] or
    [pages, kv_heads, page_size, columns].
    The columns of k are PARTS tiles of TILE_D and, where TAIL is not 0, one of TAIL, of which the
    queries are the last TAIL columns of Q_TAIL; those of v COLUMN_BLOCKS times PARTS_V tiles of
    TILE_V. SHARED: v is the first columns of k, and its tiles are those of k.
    LATE: the denominators are summed over the keys of a tile after the last one. SLICED: keys are
    read through a view that ends with the sequence, and behind which loads give zeros, so that one
    loop serves whole and partial tiles. A second loop for partial tiles would take half of the
    shared memory, and the first would load each tile only after the one before is used.
    PAIRED: SLICED, and two tiles in each step of the loop. Each load has memory of its own, so the
    next tile arrives while this one is in use, however the compiler schedules it.
    Without SPLIT_KV: OUT [batch, q_heads, q_len, columns of v], LSE [batch, q_heads, q_len].
    Without NORMALIZE OUT is the fp32 sum, LSE its maximum and DENOMINATOR, like LSE, its
    denominator.
    With SPLIT_KV OUT holds fp32 partials [batch, splits, q_heads, q_len, columns of v + 2 + pad]:
    sum, maximum in base 2 and denominator; SINKS are then left to the merge.
    SINKS fp32 [q_heads]. int32: KV_LEN, KV_START [batch], BLOCK_TABLE [batch, max_pages]. What a
    flag says is absent is not touched.
    CODES: K and V hold e4m3, four columns an int32 word, and K_SCALE, V_SCALE fp32 [batch,
    kv_heads, max_len] or [pages, kv_heads, page_size] are their scales. Words become
    numbers of Q's dtype in registers, the even columns first; queries and sums follow that order.
    scale: of the scores; without SOFTCAP times log2(e). cap: times log2(e).
    """
    pdl_overlap()
    row_tiles = ct.cdiv(GROUP, HEADS)
    split, head, batch = ct.bid(0) // (row_tiles * COLUMN_BLOCKS), ct.bid(1), ct.bid(2)
    column_block = 0 if COLUMN_BLOCKS == 1 else ct.bid(0) // row_tiles % COLUMN_BLOCKS
    last_token = 0 if TILE_Q == 1 else Q.shape[2] - 1
    end = K.shape[2]
    if PAGE_SIZE:
        end = BLOCK_TABLE.shape[1] * PAGE_SIZE
    if HAS_LEN:
        end = max(0, min(ct.load(KV_LEN, (batch,), ()), end))
    start = 0
    if HAS_START:
        start = max(0, ct.load(KV_START, (batch,), ()))
    # The first token sees the keys from `begin` on, the last those from `last_begin` on, and up to
    # `end`; each token one more than the one before.
    begin, last_begin = start, start
    if HAS_WINDOW:
        begin, last_begin = max(start, end - last_token - window), max(start, end - window)
    begin = min(begin, end)

    # This block's tiles: [first, last). Of them, [first, head_end) and [tail, last) may hold keys
    # that are hidden from some row.
    first, last, origin = begin // TILE_N, ct.cdiv(end, TILE_N), 0
    if SLICED and PAGE_SIZE == 0:
        K, V = rows_from(K, 2, begin, end), rows_from(V, 2, begin, end)
        if CODES:
            K_SCALE, V_SCALE = rows_from(K_SCALE, 2, begin, end), rows_from(V_SCALE, 2, begin, end)
        first, last, origin = 0, ct.cdiv(end - begin, TILE_N), begin
    per_split = ct.cdiv(last - first, ct.num_blocks(0) // (row_tiles * COLUMN_BLOCKS))
    first = first + split * per_split
    last = min(last, first + per_split)
    head_end = max(first, min(last, ct.cdiv(last_begin, TILE_N)))
    tail = max(head_end, min(last, max(0, end - last_token) // TILE_N))

    Q_RAISE, S_RAISE, W_RAISE, V_RAISE = CODES_FLOAT16 if Q.dtype == ct.float16 else CODES_BFLOAT16
    if CODES:
        scale = scale * S_RAISE
    to_base_2 = cap if SOFTCAP else scale
    axis = 0 if KEYS_FIRST else 1  # along which the keys of a tile of scores lie
    state_shape = (1, ROWS) if KEYS_FIRST else (ROWS, 1)
    first_head = head * GROUP
    end_head = first_head + GROUP
    if HEADS < GROUP:
        first_head = first_head + ct.bid(0) % row_tiles * HEADS
        end_head = min(end_head, first_head + HEADS)

    def queries(ARRAY, i, COLUMNS):
        tile = ct.load(ARRAY.slice(1, first_head, end_head), (batch, 0, 0, i), (1, ROWS // TILE_Q, TILE_Q, COLUMNS), padding_mode=ZERO)
        tile = tile.reshape((ROWS, COLUMNS))
        if CODES:
            tile = apart(tile) * Q_RAISE
        return ct.transpose(tile) if KEYS_FIRST else tile

    def part(i):
        """The i-th of k's column parts in the order of this block, to which those that are its part
        of v come last: the others are free earlier.
        """
        return i if COLUMN_BLOCKS == 1 or not SHARED else ((column_block + 1) * PARTS_V + i) % PARTS

    qs: tuple = ()
    for i in ct.static_iter(range(PARTS)):
        qs = (*qs, queries(Q, part(i), TILE_D))
    if TAIL:
        qs = (*qs, queries(Q_TAIL, Q_TAIL.shape[3] // TAIL - 1, TAIL))
    token = ct.arange(ROWS, dtype=ct.int32) % TILE_Q

    def load(ARRAY, j, page, i, COLUMNS):
        """The j-th tile of keys of an array, its i-th COLUMNS; 0 for an array without."""
        at: tuple = ()
        width: tuple = ()
        within: tuple = (ct.Slice(head, 1), ct.Slice(0, PAGE_SIZE))
        if COLUMNS:
            at, width, within = (i,), (COLUMNS,), (*within, ct.Slice(i * COLUMNS, COLUMNS))
        if PAGE_SIZE == 0:
            tile = ct.load(ARRAY, (batch, head, j, *at), (1, 1, TILE_N, *width), padding_mode=ZERO, latency=LATENCY)
        elif PAGE_SIZE >= TILE_N:
            if SLICED:
                ARRAY = ARRAY.slice(2, 0, min(PAGE_SIZE, end - j // (PAGE_SIZE // TILE_N) * PAGE_SIZE))
            index = (page, head, j % (PAGE_SIZE // TILE_N), *at)
            tile = ct.load(ARRAY, index, (1, 1, TILE_N, *width), padding_mode=ZERO, latency=LATENCY)
        else:
            tile = ct.load_advanced_indexing(ARRAY, (page, *within), padding_mode=ZERO, latency=LATENCY)
        return tile.reshape((TILE_N, *width))

    def numbers(ARRAY, j, page, i, COLUMNS):
        if CODES:
            return joined(e4m3_planes(load(ARRAY, j, page, i, COLUMNS // 4), Q.dtype))
        return load(ARRAY, j, page, i, COLUMNS)

    def visible(key):
        """Which rows see which keys, in the shape of the scores; for one token a row or column of
        it.
        """
        if TILE_Q == 1:
            seen = ct.expand_dims((key >= begin) & (key < end), 1 - axis)
        else:
            # Tokens beyond the last, which only fill the tile, see what the last does.
            row_end = ct.minimum(ct.expand_dims(token, axis) + (end - last_token), end)
            key = ct.expand_dims(key, 1 - axis)
            seen = (key < row_end) & (key >= start)
            if HAS_WINDOW:
                seen = seen & (key >= row_end - window)
        return seen

    def added_product(scores, k, q):
        """scores + k q^T. In fp32 a quarter of the columns is summed at a time: one sum of all of
        them, term by term, has twice the error of PyTorch's.
        """
        COLUMNS = k.shape[1]
        WIDTH = min(COLUMNS, max(16, COLUMNS // 4)) if K.dtype == ct.float32 else COLUMNS
        if WIDTH == COLUMNS:
            return ct.mma(k, q, scores) if KEYS_FIRST else ct.mma(q, ct.transpose(k), scores)
        for i in ct.static_iter(range(COLUMNS // WIDTH)):
            keys, zeros = ct.extract(k, (0, i), (TILE_N, WIDTH)), ct.zeros(scores.shape, dtype=ct.float32)
            if KEYS_FIRST:
                scores = scores + ct.mma(keys, ct.extract(q, (i, 0), (WIDTH, ROWS)), zeros)
            else:
                scores = scores + ct.mma(ct.extract(q, (0, i), (ROWS, WIDTH)), ct.transpose(keys), zeros)
        return scores

    def step(j, state, MASKED, MAY_END=False):
        """With the j-th tile of keys. If MAY_END there may be none; what is loaded instead is not
        visible.
        """
        accumulators, maximum, denominator = state
        key, at, page = origin + j * TILE_N + ct.arange(TILE_N, dtype=ct.int32), j, batch
        if MAY_END:
            key, at = ct.where(j < last, key, end), min(j, last - 1)
        if PAGE_SIZE >= TILE_N:  # once for all parts: the warp that loads waits for each look-up
            page = ct.load(BLOCK_TABLE, (batch, at // (PAGE_SIZE // TILE_N)), ())
        elif PAGE_SIZE:
            page = ct.load(BLOCK_TABLE, (batch, at), (1, TILE_N // PAGE_SIZE), padding_mode=ZERO).reshape((TILE_N // PAGE_SIZE,))
        ks: tuple = ()
        vs: tuple = ()
        for i in ct.static_iter(range(PARTS)):
            ks = (*ks, numbers(K, at, page, part(i), TILE_D))
        if TAIL:
            ks = (*ks, load(K, at, page, PARTS * TILE_D // TAIL, TAIL))
        for i in ct.static_iter(range(PARTS_V)):
            vs = (*vs, ks[(PARTS - PARTS_V) * (COLUMN_BLOCKS > 1) + i] if SHARED else numbers(V, at, page, column_block * PARTS_V + i, TILE_V))
        scales: tuple = ()
        if CODES:
            scales = (load(K_SCALE, at, page, 0, 0), load(V_SCALE, at, page, 0, 0))
        scores = ct.zeros((TILE_N, ROWS) if KEYS_FIRST else (ROWS, TILE_N), dtype=ct.float32)
        for i in ct.static_iter(range(len(qs))):
            scores = added_product(scores, ks[i], qs[i])
        if CODES:
            scores = scores * ct.expand_dims(scales[0], 1 - axis)
        if SOFTCAP:
            # The approximation is off by 2**-11, less than a score that was rounded to 16 bits.
            scores = ct.tanh(scores * scale, rounding_mode=FULL if Q.dtype == ct.float32 else APPROX)
        if MASKED:
            scores = ct.where(visible(key), scores, -math.inf)
        held = ct.float32 if CODES else V.dtype
        weights, factor, maximum, denominator = softmax_step(scores, maximum, denominator, to_base_2, held, axis, 1, LATE=LATE)
        if CODES:
            factors = scales[1]
            if MASKED and not SLICED:
                factors = ct.where((key >= begin) & (key < end), factors, 0.0)
            weights = (weights * ct.expand_dims(factors * W_RAISE, 1 - axis)).astype(Q.dtype)
        sums: tuple = ()
        for i in ct.static_iter(range(PARTS_V)):
            v = vs[i]
            if MASKED and not SLICED and not CODES:
                v = ct.where(ct.expand_dims((key >= begin) & (key < end), 1), v, 0.0)  # hidden memory may hold NaN, and 0 * NaN is NaN
            if KEYS_FIRST:
                total = ct.mma(ct.transpose(v), weights, accumulators[i] * factor)
            else:
                total = ct.mma(weights, v, accumulators[i] * factor)
            sums = (*sums, total)
        return sums, maximum, denominator

    zeros: tuple = ()
    for i in ct.static_iter(range(PARTS_V)):
        zeros = (*zeros, ct.zeros((TILE_V, ROWS) if KEYS_FIRST else (ROWS, TILE_V), dtype=ct.float32))
    weights_shape = ((TILE_N, ROWS) if KEYS_FIRST else (ROWS, TILE_N)) if LATE else state_shape
    state = (zeros, ct.full(state_shape, FLOOR, dtype=ct.float32), ct.zeros(weights_shape, dtype=ct.float32))
    if PAIRED:
        for i in range(ct.cdiv(last - first, 2)):
            j = first + 2 * i
            state = step(j, state, True)
            state = step(j + 1, state, True, True)
    elif SLICED:
        for j in range(first, last):
            state = step(j, state, True)
    else:
        if HAS_WINDOW or HAS_START:
            for j in range(first, head_end):
                state = step(j, state, True)
        for j in range(head_end, tail):
            state = step(j, state, False)
        for j in range(tail, last):
            state = step(j, state, True)

    sums, maximum, denominator = state
    if LATE:
        denominator = ct.sum(denominator, axis=axis, keepdims=True)
    if KEYS_FIRST:
        rows: tuple = ()
        for i in ct.static_iter(range(PARTS_V)):
            rows = (*rows, ct.transpose(sums[i]))
        sums, maximum, denominator = rows, maximum.reshape((ROWS, 1)), denominator.reshape((ROWS, 1))
    if CODES:
        whole: tuple = ()
        for i in ct.static_iter(range(PARTS_V)):
            whole = (*whole, together(sums[i]) * V_RAISE)
        sums = whole
    tile = (1, ROWS // TILE_Q, TILE_Q)  # batch, heads, tokens
    if SPLIT_KV:
        columns = V.shape[3] * (4 if CODES else 1)
        OUT = OUT.slice(2, first_head, end_head)
        part, state = OUT.slice(4, 0, columns), OUT.slice(4, columns, columns + 2)
        for i in ct.static_iter(range(PARTS_V)):
            ct.store(part, (batch, split, 0, 0, column_block * PARTS_V + i), sums[i].reshape((1, *tile, TILE_V)))
        if column_block == 0:
            ct.store(state, (batch, split, 0, 0, 0), maximum.reshape((1, *tile, 1)))
            ct.store(state, (batch, split, 0, 0, 1), denominator.reshape((1, *tile, 1)))
    else:
        OUT = OUT.slice(1, first_head, end_head)
        if RETURN_LSE or not NORMALIZE:
            LSE = LSE.slice(1, first_head, end_head)
        if not NORMALIZE:
            DENOMINATOR = DENOMINATOR.slice(1, first_head, end_head)
        if HAS_SINKS:
            SINKS = SINKS.slice(0, first_head, end_head)
        _write(OUT, LSE, DENOMINATOR, SINKS, (batch, 0, 0), tile, column_block, sums, maximum, denominator, HAS_SINKS, RETURN_LSE, NORMALIZE)


@ct.kernel
def attention_decode_merge_kernel(
    PARTIAL,
    OUT,
    LSE,
    DENOMINATOR,
    SINKS,
    HAS_SINKS: ct.Constant[bool],
    RETURN_LSE: ct.Constant[bool],
    NORMALIZE: ct.Constant[bool],
    TILE_S: ct.Constant[int],
    TILE_V: ct.Constant[int],
):
    """TILE_V columns of one row of the result from its partials, all of which are in one tile of
    TILE_S rows.

    Grid (q_heads * blocks of columns, q_len, batch). PARTIAL [batch, splits, q_heads, q_len,
    columns of v + 2 + pad]; the others as in `attention_decode_kernel`.
    """
    pdl_overlap()
    columns = OUT.shape[3]
    blocks = ct.cdiv(columns, TILE_V)
    head, column_block, token, batch = ct.bid(0) // blocks, ct.bid(0) % blocks, ct.bid(1), ct.bid(2)
    split = ct.arange(TILE_S, dtype=ct.int32).reshape((TILE_S, 1))
    column = (ct.arange(TILE_V, dtype=ct.int32) + column_block * TILE_V).reshape((1, TILE_V))
    there = split < PARTIAL.shape[1]

    def of(columns_of, inside, padding):  # gathered: the loads do not wait for one another
        return ct.gather(PARTIAL, (batch, split, head, token, columns_of), mask=inside, padding_value=padding, check_bounds=False, latency=1)

    maxima, denominators, parts = of(columns, there, -math.inf), of(columns + 1, there, 0), of(column, there & (column < columns), 0)
    total, maximum, denominator = merged(parts, maxima, denominators, 1.0)
    index, tile = (batch, head, token), (1, 1, 1)
    _write(OUT, LSE, DENOMINATOR, SINKS, index, tile, column_block, (total,), maximum, denominator, HAS_SINKS, RETURN_LSE, NORMALIZE, False)


def _write(OUT, LSE, DENOMINATOR, SINKS, index, tile, column_block, sums, maximum, denominator, HAS_SINKS, RETURN_LSE, NORMALIZE, TMA=True):
    """The result of a tile of rows [batch, heads, tokens], from a block of columns of their sums (a
    tuple of parts) and their state [rows, 1].
    """
    rows = tile[1] * tile[2]
    factor = 1.0 / ct.where(denominator == 0.0, 1.0, denominator)
    if HAS_SINKS:
        sink = ct.load(SINKS, (index[1],), (tile[1],), padding_mode=ZERO).reshape((tile[1], 1)) * LOG2E
        factor = sink_factor(maximum, denominator, ct.broadcast_to(sink, (tile[1], tile[2])).reshape((rows, 1)))
    for i in ct.static_iter(range(len(sums))):
        out = sums[i] * factor if NORMALIZE else sums[i]
        ct.store(OUT, (*index, column_block * len(sums) + i), out.astype(OUT.dtype).reshape((*tile, sums[i].shape[1])), allow_tma=TMA)
    if not NORMALIZE:
        if column_block == 0:
            ct.store(LSE, index, ct.where(denominator == 0.0, -math.inf, maximum * LN2).reshape(tile))
            ct.store(DENOMINATOR, index, denominator.reshape(tile))
    elif RETURN_LSE:
        if column_block == 0:
            ct.store(LSE, index, ((maximum + ct.log2(denominator)) * LN2).reshape(tile))
