"""A query head's attention, in registers. With few keys, every block of the head attends to all of
them; with many, each to a share, and the blocks merge their results through a mailbox.
"""

import cuda.tile as ct

from .tiles import part_of
from .words import NOWHERE, above, added, as_bits, epoch_of, fetch, high_of, look, low_of, packed, polled, polled_row, publish, put, rounded

FLOOR = -1.0e30  # a score that counts for nothing


def splits(position, s):
    """Whether the blocks of a query head split its keys."""
    return (s.out_parts > 1) & (position >= s.short)


def rope_at(ROPE, position, s):
    """RoPE's factors of a head's words and of their partners, each for both neighbours. Past the
    last position, those of the last, for a token that will not come.
    """
    at = min(position, ROPE.shape[0] - 1)
    return tuple(fetch(ROPE, (at, n, 0), (1, s.head_words)) for n in ct.static_iter(range(4)))


def tile_of(K, V, row, tile, s):
    """A tile of keys and one of their values, as words."""
    shape = (s.span, s.head_words)
    return look(K, (row, tile, 0), shape), look(V, (row, tile, 0), shape)


def first_tile(K, V, layer, head, position, part, s):
    """The first tile that the block attends to. Past the last layer, one of the last, for a layer
    that will not come.
    """
    tile, row = 0, min(layer, s.layers - 1) * s.kv_heads + head // (s.q_heads // s.kv_heads)
    if splits(position, s):
        tile = min(part, max(position - 1, 0) // s.span)
    return tile_of(K, V, row, tile, s)


def publish_qkv(QKV_WORDS, ys, layer, first, groups, epoch, places, s, dtype):
    """Publishes a block's rows of qkv, each pair of neighbours a word; queries and keys also where
    their partners under RoPE are read.
    """
    HEAD_WORDS, EACH, WORDS = s.head_words, s.slots // 4, s.qkv_rows // 2
    rest, field = part_of(places, s.wide_fields)
    pair, slot = rest // EACH, rest % EACH
    even = ct.where(pair == 0, ys[0], ct.where(pair == 1, ys[2], ct.where(pair == 2, ys[4], ys[6])))
    odd = ct.where(pair == 0, ys[1], ct.where(pair == 1, ys[3], ct.where(pair == 2, ys[5], ys[7])))
    sums = ct.reduce((even, odd), 0, added, (0.0, 0.0), keepdims=True)
    word = ((first + slot) * s.wide_fields + field) * 4 + pair
    word = ct.where((slot < groups) & (word < WORDS), word, NOWHERE)
    at, turned = word % HEAD_WORDS, (s.q_heads + s.kv_heads) * HEAD_WORDS
    partner = ct.where(word < turned, WORDS + word - at + (at + HEAD_WORDS // 2) % HEAD_WORDS, NOWHERE)
    # All threads take part, each with a word: an atomic by fewer has a result that all wait for.
    strip = ct.arange(s.strips, dtype=ct.int32).reshape((s.strips, 1, 1))
    place = ct.where(strip == 0, word, ct.where(strip == 1, partner, NOWHERE))
    publish(QKV_WORDS, (layer, 0, place), as_bits(packed(sums[0], sums[1], dtype)), epoch)


def heard(QKV_WORDS, layer, head, kv, epoch, waiter, s):
    """This token's query and its partner under RoPE, key and partner, and value, as words [copies,
    HEAD_WORDS], all copies the same.
    """
    shape = (QKV_WORDS.shape[1], s.head_words)
    ALL = s.q_heads + 2 * s.kv_heads
    places = (head, ALL + head, s.q_heads + kv, ALL + s.q_heads + kv, s.q_heads + s.kv_heads + kv)

    seen, patience = polled_row(QKV_WORDS, layer, places, shape, epoch_of, epoch, 8 * layer, waiter)
    return tuple(seen[n].astype(ct.int32) for n in ct.static_iter(range(5))), patience


def turned(words, partner, norms, rope, eps, s, dtype):
    """A query or a key, normed if the model does so, and rotated: fp32 of both neighbours.

    norms: the norm's weights of the words and of their partners.
    """
    values = (low_of(words, dtype), high_of(words, dtype), low_of(partner, dtype), high_of(partner, dtype))
    if s.head_norms:
        rstd = 1.0 / ct.sqrt(ct.sum(values[0] * values[0] + values[1] * values[1], axis=1, keepdims=True) * (0.5 / s.head_words) + eps)
        weights = (low_of(norms[0], dtype), high_of(norms[0], dtype), low_of(norms[1], dtype), high_of(norms[1], dtype))
        values = tuple(rounded(rounded(values[n] * rstd, dtype) * weights[n], dtype) for n in ct.static_iter(range(4)))
    return rounded(values[0] * rope[0] + values[2] * rope[2], dtype), rounded(values[1] * rope[1] + values[3] * rope[3], dtype)


def scored(keys, q, at, position, key, scale, SPAN, dtype):
    """Scores of a tile of keys, and which of them are there, [SPAN, 1]."""
    there = key + at * SPAN < position
    score = ct.sum(low_of(keys, dtype) * q[0] + high_of(keys, dtype) * q[1], axis=1, keepdims=True) * scale
    return ct.where(there, score, FLOOR), there


def over_keys(x, SPAN):
    """Equal rows, one for each key of a tile. From a copy in each warp: each thread would have to
    store a row that all of them have.
    """
    if x.shape[0] > SPAN:
        x = ct.extract(x, (0, 0), (SPAN, x.shape[1]))
    COPIES, HEAD_WORDS = x.shape
    return ct.broadcast_to(x.reshape((1, COPIES, HEAD_WORDS)), (SPAN // COPIES, COPIES, HEAD_WORDS)).reshape((SPAN, HEAD_WORDS))


def with_tile(found, tile, q, at, position, key, scale, s, dtype):
    """What `attended` has found, with one more tile."""
    (high, weight, low_sum, high_sum), (keys, values) = found, tile
    score, there = scored(keys, q, at, position, key, scale, s.span, dtype)
    values = ct.where(there, values, 0)  # what is not there may be NaN
    higher = ct.maximum(high, score)
    f, p = ct.exp2(high - higher), ct.where(there, ct.exp2(score - higher), 0.0)
    return higher, weight * f + p, low_sum * f + p * low_of(values, dtype), high_sum * f + p * high_of(values, dtype)


def attended(K, V, tile, more, q, own, own_value, at, step, row, position, scale, s, dtype):
    """A query's attention to every step-th tile of keys from `at` on, and to its own key: weighted
    values of both neighbours [1, HEAD_WORDS], the highest score and the sum of the weights.

    tile, more: the first two of these tiles, the second if there is one. Each row of a tile has a
    softmax of its own, so that further tiles need no sum over threads.
    """
    SPAN, HEAD_WORDS, last = s.span, s.head_words, ct.cdiv(position, s.span) - 1
    key = ct.arange(SPAN, dtype=ct.int32).reshape((SPAN, 1))
    rows = (over_keys(q[0], SPAN), over_keys(q[1], SPAN))
    keys, values = tile
    high, there = scored(keys, rows, at, position, key, scale, SPAN, dtype)
    values = ct.where(there, values, 0)
    found = high, ct.where(there, 1.0, 0.0), low_of(values, dtype), high_of(values, dtype)
    # Two tiles a turn, each asked for before the other is used. Not a window of tiles that moves on
    # (more, ahead = ahead, tile_of(...)): tileiras 13.4 drops most loads of such a loop.
    for n in range(at + step, last + 1, 2 * step):
        ahead = tile_of(K, V, row, min(n + step, last), s)
        found = with_tile(found, more, rows, n, position, key, scale, s, dtype)
        more = tile_of(K, V, row, min(n + 2 * step, last), s)
        if n + step <= last:
            found = with_tile(found, ahead, rows, n + step, position, key, scale, s, dtype)
    high, weight, low_sum, high_sum = found
    one, value = ct.extract(own, (0, 0), (1, 1)), ct.extract(own_value, (0, 0), (1, HEAD_WORDS))
    highest = ct.maximum(ct.max(high, axis=0, keepdims=True), one)
    f, p = ct.exp2(high - highest), ct.exp2(one - highest)
    sums = ct.reduce((f * low_sum, f * high_sum, ct.broadcast_to(f * weight, (SPAN, HEAD_WORDS))), 0, added, (0.0, 0.0, 0.0), keepdims=True)
    return sums[0] + p * low_of(value, dtype), sums[1] + p * high_of(value, dtype), highest, sums[2] + p


def merged(SHARES, mine, row, part, epoch, place, waiter, s):
    """Publishes a block's share of a query's keys, as `attended` returns it, polls those of all
    blocks of the head, and merges them.
    """
    PEERS, HEAD_WORDS = SHARES.shape[1], s.head_words
    planes = (mine[0], mine[1], ct.broadcast_to(mine[2], (1, HEAD_WORDS)), mine[3])
    for n in ct.static_iter(range(4)):
        put(SHARES, (row, part, n, 0), as_bits(ct.bitcast(planes[n], ct.int32)) | above(epoch))
    inside = ct.arange(PEERS, dtype=ct.int32).reshape((PEERS, 1, 1)) < s.out_parts

    def looks_at(zero):
        seen = look(SHARES, (row + zero, 0, 0, 0), (PEERS, 4, HEAD_WORDS))
        return seen, ct.min(ct.where(inside, epoch_of(seen), epoch))

    seen, patience = polled(looks_at, ct.zeros((PEERS, 4, HEAD_WORDS), ct.int64), epoch, place, waiter)
    values = ct.bitcast(seen.astype(ct.int32), ct.float32)
    found = tuple(ct.where(inside, ct.extract(values, (0, n, 0), (PEERS, 1, HEAD_WORDS)), 0.0) for n in ct.static_iter(range(4)))
    high = ct.where(inside, found[2], FLOOR)
    f = ct.where(inside, ct.exp2(high - ct.max(high, axis=0, keepdims=True)), 0.0)
    sums = ct.reduce((found[0] * f, found[1] * f, found[3] * f), 0, added, (0.0, 0.0, 0.0), keepdims=True)
    return *tuple(sums[n].reshape((1, HEAD_WORDS)) for n in ct.static_iter(range(3))), patience


def attention(QKV_WORDS, SHARES, K, V, HEAD_NORMS, tile, rope, layer, head, part, position, epoch, eps, scale, waiter, s, dtype):
    """What a query head attends to, words [1, HEAD_WORDS]; and the polls that are left. tile: the
    first of the block's tiles of keys.

    Every block of a key head writes its key and its value, the same into the same memory: what a
    block reads it has written itself, or an earlier kernel has.
    """
    SPAN, HEAD_WORDS, kv = s.span, s.head_words, head // (s.q_heads // s.kv_heads)
    row = layer * s.kv_heads + kv
    at, step, split = 0, 1, splits(position, s)
    if split:
        at, step = part, s.out_parts
    more = tile
    if at + step < ct.cdiv(position, SPAN):
        more = tile_of(K, V, row, at + step, s)
    words, patience = heard(QKV_WORDS, layer, head, kv, epoch, waiter, s)
    norms = tuple(fetch(HEAD_NORMS, (layer * s.head_norms, n, 0), (1, HEAD_WORDS)) for n in ct.static_iter(range(4)))
    q = turned(words[0], words[1], (norms[0], norms[1]), rope, eps, s, dtype)
    k = turned(words[2], words[3], (norms[2], norms[3]), rope, eps, s, dtype)
    own = ct.sum(q[0] * k[0] + q[1] * k[1], axis=1, keepdims=True) * scale
    if split:
        if part > 0:
            own = ct.full(own.shape, FLOOR, ct.float32)
    mine = attended(K, V, tile, more, q, own, words[4], at, step, row, position, scale, s, dtype)
    low, high, weight = mine[0], mine[1], mine[3]
    if s.out_parts > 1:
        if split:
            place, waiter = 8 * layer + 1, (waiter[0], waiter[1], patience)
            low, high, weight, patience = merged(SHARES, mine, layer * s.q_heads + head, part, epoch, place, waiter, s)
    put(K, (row, position, 0), ct.extract(packed(k[0], k[1], dtype), (0, 0), (1, HEAD_WORDS)))
    put(V, (row, position, 0), ct.extract(words[4], (0, 0), (1, HEAD_WORDS)))
    whole = ct.truediv(1.0, weight, rounding_mode=ct.RoundingMode.APPROX)
    return packed(low * whole, high * whole, dtype), patience
