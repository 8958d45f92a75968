"""Tiles of weights times x, and what x is. One loop runs all products, wide and narrow (`shape`).

A thread keeps the results of a turn by its `places` (o, i), [1, MOST, 1] and [1, 1, EACH]: which
field of a line, of the most that any form has, and which value of the field.
"""

import cuda.tile as ct

from .shape import DOWN, GATE_UP, OUT, QKV, SECOND, TREE
from .words import added, high_of, low_of, packed, rounded


def normed(x, weights, xs, unit, eps, s, dtype):
    """The normed residual stream in the first sets of xs, as wide tiles are multiplied by it, and
    the unit of these sets; the other sets stay.
    """
    STRIPS, LINE, SETS, WIDTH = s.strips, s.line, s.stream_sets, s.wide_width
    squares = x[0][0] * x[0][0] + x[0][1] * x[0][1]
    for n in ct.static_iter(range(1, SETS)):
        squares = squares + x[n][0] * x[n][0] + x[n][1] * x[n][1]
    if s.pairs == 1:
        total = ct.sum(squares)
    else:
        largest = ct.abs(x[0][0] * low_of(weights[0], dtype))
        for n in ct.static_iter(range(SETS)):
            largest = ct.maximum(largest, ct.maximum(ct.abs(x[n][0] * low_of(weights[n], dtype)), ct.abs(x[n][1] * high_of(weights[n], dtype))))
        found = ct.reduce((squares, largest), 1, total_and_largest, (0.0, 0.0))
        total, largest = found[0].item(), found[1].item()
    rstd = 1.0 / ct.sqrt(total * (1.0 / s.hidden) + eps)
    if s.pairs > 1:
        unit, inverse = unit_of(largest * rstd)
    new: tuple = ()
    for n in ct.static_iter(range(SETS)):
        low, high = rounded(x[n][0] * rstd, dtype), rounded(x[n][1] * rstd, dtype)
        words = packed(low * low_of(weights[n], dtype), high * high_of(weights[n], dtype), dtype)
        if s.pairs > 1:
            words = scaled(words, inverse, dtype)
        if LINE > WIDTH:
            words = ct.broadcast_to(words.reshape((STRIPS, 1, WIDTH)), (STRIPS, LINE // WIDTH, WIDTH))
        new = (*new, words.reshape((STRIPS, LINE)))
    return with_first(new, xs), unit


def total_and_largest(total, largest, other_total, other_largest):
    return total + other_total, ct.maximum(largest, other_largest)


def unit_of(largest):
    """The unit of x in fp16, a power of two: 1/32 to 1/16 of a bound on x's magnitudes, which may
    be 1 % too low. So no sum of TREE products with codes up to 448 leaves fp16. Also 1 / unit.

    If no number is such a bound, neither is the unit: what has no infinity itself becomes NaN.
    """
    exponent = ct.maximum((ct.bitcast(largest, ct.int32) >> 23) & 255, 5) - 4
    unit = ct.where(exponent == 251, 255, exponent)
    return ct.bitcast(unit << 23, ct.float32), ct.bitcast((254 - exponent) << 23, ct.float32)


def scaled(words, inverse, dtype):
    """Words of two numbers as two of fp16, times `inverse`."""
    return packed(low_of(words, dtype) * inverse, high_of(words, dtype) * inverse, ct.float16)


def in_units(rows, dtype):
    """Rows of words as fp16 in units of their own, and the unit."""
    largest: tuple = ()
    for n in ct.static_iter(range(len(rows))):
        largest = (*largest, ct.max(ct.maximum(ct.abs(low_of(rows[n], dtype)), ct.abs(high_of(rows[n], dtype)))))
    most = largest[0]
    for n in ct.static_iter(range(1, len(rows))):
        most = ct.maximum(most, largest[n])
    unit, inverse = unit_of(most)
    return tuple(scaled(rows[n], inverse, dtype) for n in ct.static_iter(range(len(rows)))), unit


def twice(xs, s):
    """The normed stream as the head's tiles are multiplied by it, each set for both codes of a
    number.
    """
    new: tuple = ()
    for n in ct.static_iter(range(s.stream_sets)):
        new = (*new, xs[n], packed(low_of(xs[n], ct.float16) * SECOND, high_of(xs[n], ct.float16) * SECOND, ct.float16))
    return with_first(new, xs)


def with_first(first, xs):
    return (*first, *tuple(xs[n] for n in ct.static_iter(range(len(first), len(xs)))))


def fields_sum(values, FIELDS):
    """Of sums over the most fields, [STRIPS, most, 1], those over FIELDS fields, repeated."""
    STRIPS, MOST = values.shape[0], values.shape[1]
    if FIELDS == MOST:
        return values
    if FIELDS == 1:
        return ct.broadcast_to(ct.sum(values, axis=1, keepdims=True), (STRIPS, MOST, 1))
    total = ct.sum(values.reshape((STRIPS, FIELDS, MOST // FIELDS)), axis=2, keepdims=True)
    return ct.broadcast_to(total, (STRIPS, FIELDS, MOST // FIELDS)).reshape((STRIPS, MOST, 1))


def by_tree(words):
    """Words of pairs, [STRIPS, WORDS], in lines of TREE."""
    return words.reshape((words.shape[0], words.shape[1] // TREE, TREE))


def pairs_of(codes):
    """Words of four codes as twice as many, of two in fp16, which holds them all."""
    four = ct.unpack_from_bytes(ct.pack_to_bytes(codes), ct.float8_e4m3fn).astype(ct.float16)
    return ct.unpack_from_bytes(ct.pack_to_bytes(four), ct.int32).reshape((codes.shape[0], 2 * codes.shape[1]))


def half_at(pairs, n):
    """The nth pair of each line of `by_tree`."""
    words = ct.extract(pairs, (0, 0, n), (pairs.shape[0], pairs.shape[1], 1))
    return ct.unpack_from_bytes(ct.pack_to_bytes(words), ct.float16)


def times(codes, x):
    """Products of fp16 pairs of `by_tree`, in sums of TREE, fp32. Instructions on two fp16 at once,
    where fp32 takes two for each product.
    """
    total = half_at(codes, 0) * half_at(x, 0)
    for n in ct.static_iter(range(1, TREE)):
        total = total + half_at(codes, n) * half_at(x, n)
    return total.astype(ct.float32).reshape((codes.shape[0], 2 * codes.shape[1]))


def product(W, tile, groups, sets, kind, until, xs, s, dtype):
    """The rows of `groups` groups of tiles, from `tile` on, times xs: for each row of a tile
    [STRIPS, MOST, EACH], of the group whose number is in `until`.

    Nothing else is in this loop: the compiler makes a ring of many buffers only for a loop without
    branches and other loads, and its producer runs ahead only if nothing is stored.
    """
    STRIPS, LINE, MOST, EACH, PAIRS = s.strips, s.line, until.shape[1], until.shape[2], s.pairs
    OUT_FIELDS, DOWN_FIELDS = LINE // s.out_width, LINE // s.down_width
    ONE_SET, number = len(xs) == PAIRS, ct.zeros((STRIPS, MOST, 1), ct.int32)
    ys = tuple(ct.zeros((STRIPS, MOST, EACH), ct.float32) for _ in ct.static_iter(range(8)))
    for i in range(groups * sets):
        w = ct.load(W, (tile + i, 0, 0), (8 * STRIPS, 1, LINE), check_bounds=False, latency=s.latency)
        x, y = xs[0], xs[PAIRS - 1]
        if not ONE_SET:
            here = ct.broadcast_to(number, (STRIPS, MOST, LINE // MOST)).reshape((STRIPS, LINE))
            for n in ct.static_iter(range(1, len(xs) // PAIRS)):
                x = ct.where(here == n, xs[PAIRS * n], x)
                y = ct.where(here == n, xs[PAIRS * n + PAIRS - 1], y)
        if PAIRS == 1:
            x_low, x_high = low_of(x, dtype), high_of(x, dtype)
        else:
            both = ct.cat((x.reshape((STRIPS, LINE, 1)), y.reshape((STRIPS, LINE, 1))), 2)
            x_pairs = by_tree(both.reshape((STRIPS, 2 * LINE)))
        new: tuple = ()
        for row in ct.static_iter(range(8)):
            words = ct.extract(w, (row, 0, 0), (STRIPS, 1, LINE)).reshape((STRIPS, LINE))
            if PAIRS == 1:
                terms = low_of(words, dtype) * x_low + high_of(words, dtype) * x_high
            else:
                terms = times(by_tree(pairs_of(words)), x_pairs)
            smallest = ct.sum(terms.reshape((STRIPS, MOST, terms.shape[1] // MOST)), axis=2, keepdims=True)
            value = fields_sum(smallest, s.wide_fields)
            if OUT_FIELDS == DOWN_FIELDS:
                value = ct.where((kind == OUT) | (kind == DOWN), fields_sum(smallest, OUT_FIELDS), value)
            else:
                value = ct.where(kind == OUT, fields_sum(smallest, OUT_FIELDS), value)
                value = ct.where(kind == DOWN, fields_sum(smallest, DOWN_FIELDS), value)
            if row == 0:
                # Plus a 0 that depends on the loaded value. The compiler computes what depends only
                # on the loop when it starts the load, and carries these predicates through the
                # stages of the ring bit by bit, which took twice the time of the rest of the loop.
                bits = ct.bitcast(value, ct.int32)
                zero = bits * (bits + 1) & 1
                until, number = until + zero, number + zero
            if ONE_SET:
                new = (*new, ct.where(until == 0, value, ys[row]))
            elif PAIRS == 1:
                new = (*new, ys[row] + ct.where(until == 0, value, 0.0))
            else:  # one addition under a predicate; the line above takes a selection too
                new = (*new, ct.where(until == 0, ys[row] + value, ys[row]))
        ys = new
        if ONE_SET:
            until = until - 1
        else:
            last = number == sets - 1
            until, number = ct.where(last, until - 1, until), ct.where(last, 0, number + 1)
    return ys


def part_of(places, FIELDS):
    """For a form of so many fields: which of a field's values a thread keeps, and the field."""
    o, i = places
    return o % (o.shape[1] // FIELDS) * i.shape[2] + i, o // (o.shape[1] // FIELDS)


def groups_of(kind, places, s):
    """The group whose sums a thread keeps, [1, MOST, EACH]. Where a wide turn has few groups,
    several threads keep the same.
    """
    slot = part_of(places, s.wide_fields)[0]
    if kind == QKV:
        slot = slot % (s.slots // 4)
    elif kind == GATE_UP:
        slot = slot // 2
    elif kind == OUT:
        slot = part_of(places, s.line // s.out_width)[0]
    elif kind == DOWN:
        slot = part_of(places, s.line // s.down_width)[0]
    return slot


def active_of(ys, places, s, dtype):
    """silu(gate) * up of a turn's inner columns, as words [1, LINE / 4]. `pack.inner_columns` knows
    their order.
    """
    FIELDS, WORDS = s.wide_fields, s.line // 4
    first = part_of(places, FIELDS)[0] % 2 == 0
    r = ct.reduce(tuple(ct.where(first, ys[n], ys[n + 4]) for n in ct.static_iter(range(4))), 0, added, (0.0, 0.0, 0.0, 0.0), keepdims=True)
    low = ct.truediv(r[0], 1.0 + ct.exp(-r[0]), rounding_mode=ct.RoundingMode.APPROX) * r[1]
    high = ct.truediv(r[2], 1.0 + ct.exp(-r[2]), rounding_mode=ct.RoundingMode.APPROX) * r[3]
    words = packed(low, high, dtype)
    if FIELDS > 1:
        words = ct.permute(words.reshape((FIELDS, s.slots)), (1, 0))
    return words.reshape((1, WORDS))


def repeated(words, x):
    """A row [1, WIDTH] of x for narrow tiles: for each row of W in a line.

    x: any tile of x, for its layout. It lends zeros that the compiler does not know to be zeros;
        without them each thread would make the row for all strips, and store all of it for others,
        32 times 16 bytes.
    """
    (STRIPS, LINE), WIDTH = x.shape, words.shape[1]
    zeros = ct.extract(x, (0, 0), (1, LINE))
    zeros = zeros * (zeros + 1) & 1
    row = zeros | ct.broadcast_to(words.reshape((1, 1, WIDTH)), (1, LINE // WIDTH, WIDTH)).reshape((1, LINE))
    return ct.broadcast_to(row, (STRIPS, LINE))


def inner_sets(active, xs, unit, s, dtype):
    """What `down` is multiplied by, from the words of all turns of gate and up, and its unit."""
    if s.pairs > 1:
        active, unit = in_units(active, dtype)
    WIDTH, EACH = s.down_width, s.line // 4 // s.down_width
    sets: tuple = ()
    for n in ct.static_iter(range(s.pairs * s.down_sets)):
        words = active[min(n // EACH, len(active) - 1)]  # behind the last turn weights are zeros
        sets = (*sets, repeated(ct.extract(words, (0, n % EACH), (1, WIDTH)), xs[n]))
    return with_first(sets, xs), unit


def attended_sets(words, xs, unit, s, dtype):
    """What `out` is multiplied by, from the words of what a head attended to, and its unit."""
    WIDTH, rows = s.out_width, (words,)
    if s.pairs > 1:
        rows, unit = in_units(rows, dtype)
    sets = tuple(repeated(ct.extract(rows[0], (0, n), (1, WIDTH)), xs[n]) for n in ct.static_iter(range(s.pairs)))
    return with_first(sets, xs), unit


def outputs_of(kind, first, part, places, strip, s):
    """For `out` and `down`: the group whose sums a thread keeps; the pair of outputs of rows 0 and
    4 of its tiles, how many pairs behind it those of the next rows are, and the end of the pairs.
    """
    slot, field = part_of(places, s.line // s.out_width)
    item_groups, fields, begin, end = s.out_groups, s.line // s.out_width, part * s.out_words, min((part + 1) * s.out_words, s.hidden_words)
    if kind == DOWN:
        slot, field = part_of(places, s.line // s.down_width)
        item_groups, fields, begin, end = s.down_groups, s.line // s.down_width, 0, s.hidden_words
    word = begin + (strip * item_groups + first + slot) * fields + field
    return slot, word, s.strips * item_groups * fields, end


def scales_of(SCALES, kind, layer, first, block, outputs, slot, places, s):
    """Of the rows whose sums a thread keeps, for each row of a tile: `pack.Packed`.

    first: of the turn's groups. outputs: as `outputs_of`. slot: `groups_of`.
    """
    ROWS = 8 * s.wide_fields
    qkv, gate_up, narrow = s.tiles[0] // s.wide_sets * ROWS, s.tiles[2] // s.wide_sets * ROWS, 2 * s.hidden_words
    base, step, pair = layer * (qkv + gate_up + 2 * narrow), 1, 4  # rows of a tile are rows of the matrix
    row = ((first + slot) * s.wide_fields + part_of(places, s.wide_fields)[1]) * 8
    if kind == GATE_UP:
        row = row + (min(block, s.attending) * s.gate_up + max(block - s.attending, 0) * s.others) * ROWS
        base = base + qkv + narrow
    elif (kind == OUT) | (kind == DOWN):
        row, step, pair = 2 * outputs[1], 2 * outputs[2], 1
        base = base + qkv
        if kind == DOWN:
            base = base + narrow + gate_up
    LAST = SCALES.shape[0] - 1
    return tuple(ct.gather(SCALES, ct.minimum(base + row + n % 4 * step + n // 4 * pair, LAST), check_bounds=False) for n in ct.static_iter(range(8)))
