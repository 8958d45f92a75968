"""A query head's attention in registers, by the blocks that have the head: of few keys each for
itself, of many each a share, which they exchange.
"""

import cuda.tile as ct

from .words import as_bits, epoch_of, fetch, high_of, look, low_of, packed, polled, put, rounded

FLOOR = -1.0e30  # a score that counts for nothing


def add3(a0, a1, a2, b0, b1, b2):
    return a0 + b0, a1 + b1, a2 + b2


def rope_at(ROPE, position, HEAD_WORDS):
    """Factors of a query's or a key's words and of their partners', of both neighbours; of the last
    position for a token that will not come.
    """
    at = min(position, ROPE.shape[0] - 1)
    found: tuple = ()
    for n in ct.static_iter(range(4)):
        found = (*found, fetch(ROPE, (at, n, 0), (1, 1, HEAD_WORDS)).reshape((1, HEAD_WORDS)))
    return found


def keys_of(K, V, row, tile, SPAN):
    HEAD_WORDS = K.shape[2]
    keys = look(K, (row, tile, 0), (1, SPAN, HEAD_WORDS)).reshape((SPAN, HEAD_WORDS))
    return keys, look(V, (row, tile, 0), (1, SPAN, HEAD_WORDS)).reshape((SPAN, HEAD_WORDS))


def keys_at(K, V, layer, head, position, part, LAYERS, HEADS, SPAN, SHORT, PARTS):
    """The first tiles of keys and values of a layer that are the block's; of the last layer for one
    that will not come.
    """
    tile = 0
    row = min(layer, LAYERS - 1) * HEADS[1] + head // (HEADS[0] // HEADS[1])
    if (PARTS > 1) & (position >= SHORT):
        tile = min(part, max(position - 1, 0) // SPAN)
    return keys_of(K, V, row, tile, SPAN)


def heard(QKV_WORDS, layer, head, kv, epoch, waiter, HEADS, HEAD_WORDS):
    """A query head's query, its key and its value of this token, and the partners of the first two:
    32-bit words [copies, HEAD_WORDS], the same in all copies.

    HEADS: of queries, and of keys.
    """
    COPIES, ALL = QKV_WORDS.shape[1], HEADS[0] + 2 * HEADS[1]
    places = (head, ALL + head, HEADS[0] + kv, ALL + HEADS[0] + kv, HEADS[0] + HEADS[1] + kv)

    def looks_at(zero):
        seen: tuple = ()
        epochs = ct.full((COPIES, HEAD_WORDS), 2**31 - 1, ct.int32)
        for n in ct.static_iter(range(5)):
            words = look(QKV_WORDS, (layer + zero, 0, places[n]), (1, COPIES, HEAD_WORDS)).reshape((COPIES, HEAD_WORDS))
            seen, epochs = (*seen, words), ct.minimum(epochs, epoch_of(words))
        return seen, ct.min(epochs)

    nothing = ct.zeros((COPIES, HEAD_WORDS), ct.int64)
    seen, patience = polled(looks_at, (nothing, nothing, nothing, nothing, nothing), epoch, 8 * layer, waiter)
    found: tuple = ()
    for n in ct.static_iter(range(5)):
        found = (*found, seen[n].astype(ct.int32))
    return found, patience


def turned(words, partner, norms, rope, eps, HEAD_WORDS, NORMED, dtype):
    """A query or a key, normed if the model does so, and rotated: planes. norms: words of the
    norm's weights, and of their partners'.
    """
    values = (low_of(words, dtype), high_of(words, dtype), low_of(partner, dtype), high_of(partner, dtype))
    if NORMED:
        rstd = 1.0 / ct.sqrt(ct.sum(values[0] * values[0] + values[1] * values[1], axis=1, keepdims=True) * (0.5 / HEAD_WORDS) + eps)
        weights = (low_of(norms[0], dtype), high_of(norms[0], dtype), low_of(norms[1], dtype), high_of(norms[1], dtype))
        scaled: tuple = ()
        for n in ct.static_iter(range(4)):
            scaled = (*scaled, rounded(rounded(values[n] * rstd, dtype) * weights[n], dtype))
        values = scaled
    return rounded(values[0] * rope[0] + values[2] * rope[2], dtype), rounded(values[1] * rope[1] + values[3] * rope[3], dtype)


def scored(kk, q, at, position, key, scale, SPAN, dtype):
    """Scores of a tile of keys, and which of them are there, [SPAN, 1]."""
    there = key + at * SPAN < position
    s = ct.sum(low_of(kk, dtype) * q[0] + high_of(kk, dtype) * q[1], axis=1, keepdims=True) * scale
    return ct.where(there, s, FLOOR), there


def over_keys(x, SPAN):
    """Rows that are all the same, as many as a tile has keys: from a copy for each warp, since one
    that all threads have would be stored by each of them.
    """
    if x.shape[0] > SPAN:
        x = ct.extract(x, (0, 0), (SPAN, x.shape[1]))
    COPIES, HEAD_WORDS = x.shape
    return ct.broadcast_to(x.reshape((1, COPIES, HEAD_WORDS)), (SPAN // COPIES, COPIES, HEAD_WORDS)).reshape((SPAN, HEAD_WORDS))


def attended(K, V, keys, more, q, own, own_value, at, step, row, position, scale, SPAN, dtype):
    """A query's attention over every step-th tile of keys from `at` on, and its own key: planes [1,
    HEAD_WORDS] of weighted values, their highest score and the sum of their weights. keys, more:
    the first two of these tiles, the second if there is one.

    Each row of a tile keeps a softmax of its own, so a further tile needs no sum over threads.
    """
    key = ct.arange(SPAN, dtype=ct.int32).reshape((SPAN, 1))
    rows, HEAD_WORDS = (over_keys(q[0], SPAN), over_keys(q[1], SPAN)), K.shape[2]
    kk, vv = keys
    high, there = scored(kk, rows, at, position, key, scale, SPAN, dtype)
    weight = ct.where(there, 1.0, 0.0)
    vv = ct.where(there, vv, 0)  # nobody may have written what is not there
    low_sum, high_sum = low_of(vv, dtype), high_of(vv, dtype)
    kk, vv = more
    for tile in range(at + step, ct.cdiv(position, SPAN), step):
        s, there = scored(kk, rows, tile, position, key, scale, SPAN, dtype)
        vv = ct.where(there, vv, 0)
        higher = ct.maximum(high, s)
        f, p = ct.exp2(high - higher), ct.where(there, ct.exp2(s - higher), 0.0)
        high, weight = higher, weight * f + p
        low_sum, high_sum = low_sum * f + p * low_of(vv, dtype), high_sum * f + p * high_of(vv, dtype)
        kk, vv = keys_of(K, V, row, min(tile + step, K.shape[1] // SPAN - 1), SPAN)
    one, value = ct.extract(own, (0, 0), (1, 1)), ct.extract(own_value, (0, 0), (1, HEAD_WORDS))
    highest = ct.maximum(ct.max(high, axis=0, keepdims=True), one)
    f, p = ct.exp2(high - highest), ct.exp2(one - highest)
    sums = ct.reduce((f * low_sum, f * high_sum, ct.broadcast_to(f * weight, (SPAN, HEAD_WORDS))), 0, add3, (0.0, 0.0, 0.0), keepdims=True)
    return sums[0] + p * low_of(value, dtype), sums[1] + p * high_of(value, dtype), highest, sums[2] + p


def merged(SHARES, mine, row, part, epoch, place, waiter, PARTS, HEAD_WORDS):
    """Publishes a block's share of a query's keys, polls those of all blocks of the head, and
    merges them. mine: as `attended` gives it.
    """
    PEERS = SHARES.shape[1]
    planes = (mine[0], mine[1], ct.broadcast_to(mine[2], (1, HEAD_WORDS)), mine[3])
    for n in ct.static_iter(range(4)):
        words = as_bits(ct.bitcast(planes[n], ct.int32)) | (ct.astype(epoch, ct.int64) << 32)
        put(SHARES, (row, part, n, 0), words.reshape((1, 1, 1, HEAD_WORDS)))
    inside = ct.arange(PEERS, dtype=ct.int32).reshape((PEERS, 1, 1)) < PARTS

    def looks_at(zero):
        seen = look(SHARES, (row + zero, 0, 0, 0), (1, PEERS, 4, HEAD_WORDS)).reshape((PEERS, 4, HEAD_WORDS))
        return seen, ct.min(ct.where(inside, epoch_of(seen), epoch))

    seen, patience = polled(looks_at, ct.zeros((PEERS, 4, HEAD_WORDS), ct.int64), epoch, place, waiter)
    values = ct.bitcast(seen.astype(ct.int32), ct.float32)
    found: tuple = ()
    for n in ct.static_iter(range(4)):
        found = (*found, ct.where(inside, ct.extract(values, (0, n, 0), (PEERS, 1, HEAD_WORDS)), 0.0))
    high = ct.where(inside, found[2], FLOOR)
    f = ct.where(inside, ct.exp2(high - ct.max(high, axis=0, keepdims=True)), 0.0)
    sums = ct.reduce((found[0] * f, found[1] * f, found[3] * f), 0, add3, (0.0, 0.0, 0.0), keepdims=True)
    return sums[0].reshape((1, HEAD_WORDS)), sums[1].reshape((1, HEAD_WORDS)), sums[2].reshape((1, HEAD_WORDS)), patience


def attention(
    QKV_WORDS, SHARES, K, V, HEAD_NORMS, keys, rope, layer, head, part, position, epoch, eps, scale, waiter, HEADS, NORMED, SPAN, SHORT, PARTS, dtype
):
    """What a query head attends to, words [1, HEAD_WORDS]; and the patience left. keys: the first
    tiles of keys and values that are the block's.

    Every block of a key head writes its key and its value, the same into the same memory: what a
    block reads it has written itself, or an earlier kernel has.
    """
    HEAD_WORDS, kv = K.shape[2], head // (HEADS[0] // HEADS[1])
    row = layer * HEADS[1] + kv
    at, step, split = 0, 1, (PARTS > 1) & (position >= SHORT)
    if split:
        at, step = part, PARTS
    more = keys
    if at + step < ct.cdiv(position, SPAN):
        more = keys_of(K, V, row, at + step, SPAN)
    words, patience = heard(QKV_WORDS, layer, head, kv, epoch, waiter, HEADS, HEAD_WORDS)
    norms: tuple = ()
    for n in ct.static_iter(range(4)):
        norms = (*norms, fetch(HEAD_NORMS, (layer * NORMED, n, 0), (1, 1, HEAD_WORDS)).reshape((1, HEAD_WORDS)))
    q = turned(words[0], words[1], (norms[0], norms[1]), rope, eps, HEAD_WORDS, NORMED, dtype)
    k = turned(words[2], words[3], (norms[2], norms[3]), rope, eps, HEAD_WORDS, NORMED, dtype)
    own = ct.sum(q[0] * k[0] + q[1] * k[1], axis=1, keepdims=True) * scale
    if split:
        if part > 0:
            own = ct.full(own.shape, FLOOR, ct.float32)
    mine = attended(K, V, keys, more, q, own, words[4], at, step, row, position, scale, SPAN, dtype)
    low, high, weight = mine[0], mine[1], mine[3]
    if PARTS > 1:
        if split:
            low, high, weight, patience = merged(
                SHARES, mine, layer * HEADS[0] + head, part, epoch, 8 * layer + 1, (waiter[0], waiter[1], patience), PARTS, HEAD_WORDS
            )
    put(K, (row, position, 0), ct.extract(packed(k[0], k[1], dtype), (0, 0), (1, HEAD_WORDS)).reshape((1, 1, HEAD_WORDS)))
    put(V, (row, position, 0), ct.extract(words[4], (0, 0), (1, HEAD_WORDS)).reshape((1, 1, HEAD_WORDS)))
    whole = ct.truediv(1.0, weight, rounding_mode=ct.RoundingMode.APPROX)
    return packed(low * whole, high * whole, dtype), patience
