"""Tiles of weights times x, and what x is: the same loop for wide products (qkv, gate and up, head)
and narrow ones (out, down), as `shape` cuts them.

`places` is what a thread keeps of a turn: o and i, [1, MOST, 1] and [1, 1, EACH], number the fields
of a line, at their smallest, and the groups beside.
"""

import cuda.tile as ct

from .words import high_of, low_of, packed, rounded

QKV, OUT, GATE_UP, DOWN, HEAD = 0, 1, 2, 3, 4  # as `shape.Kind`


def normed(x, weights, xs, eps, HIDDEN, STRIPS, LINE, dtype):
    """What wide tiles are multiplied with: words of x, normed, in as many tiles as xs has; the rest
    as it was.
    """
    SETS, WIDTH = len(x[0]), x[0][0].shape[1] // STRIPS
    squares = x[0][0] * x[0][0] + x[1][0] * x[1][0]
    for n in ct.static_iter(range(1, SETS)):
        squares = squares + x[0][n] * x[0][n] + x[1][n] * x[1][n]
    rstd = 1.0 / ct.sqrt(ct.sum(squares) * (1.0 / HIDDEN) + eps)
    new: tuple = ()
    for n in ct.static_iter(range(len(xs))):
        if n < SETS:
            low, high = rounded(x[0][n] * rstd, dtype), rounded(x[1][n] * rstd, dtype)
            words = packed(low * low_of(weights[n], dtype), high * high_of(weights[n], dtype), dtype)
            if LINE > WIDTH:
                words = ct.broadcast_to(words.reshape((STRIPS, 1, WIDTH)), (STRIPS, LINE // WIDTH, WIDTH))
            new = (*new, words.reshape((STRIPS, LINE)))
        else:
            new = (*new, xs[n])
    return new


def fields_sum(values, FIELDS):
    """Sums over the parts of each field, of sums over the smallest fields [STRIPS, most fields, 1]:
    as often as they have parts.
    """
    STRIPS, MOST = values.shape[0], values.shape[1]
    if FIELDS == MOST:
        return values
    if FIELDS == 1:
        return ct.broadcast_to(ct.sum(values, axis=1, keepdims=True), (STRIPS, MOST, 1))
    total = ct.sum(values.reshape((STRIPS, FIELDS, MOST // FIELDS)), axis=2, keepdims=True)
    return ct.broadcast_to(total, (STRIPS, FIELDS, MOST // FIELDS)).reshape((STRIPS, MOST, 1))


def product(W, tile, groups, sets, kind, until, xs, FORMS, STRIPS, LINE, MOST, LATENCY, dtype):
    """Rows of `groups` groups of tiles, times xs: for each row of a tile [STRIPS, MOST, each], a
    group where `until` counts its number.

    The loop around the loads holds nothing else: the compiler gives a ring of many buffers only to
    a loop without branches and other loads, and lets its producer run on only if no store stands in
    it.
    """
    EACH = until.shape[2]
    WIDE, NARROW_OUT, NARROW_DOWN = LINE // FORMS[0], LINE // FORMS[2], LINE // FORMS[3]
    ONE_SET, number = len(xs) == 1, ct.zeros((STRIPS, MOST, 1), ct.int32)
    ys: tuple = ()
    for s in ct.static_iter(range(8)):
        ys = (*ys, ct.zeros((STRIPS, MOST, EACH), ct.float32))
    for i in range(groups * sets):
        w = ct.load(W, (tile + i, 0, 0), (8 * STRIPS, 1, LINE), check_bounds=False, latency=LATENCY)
        x = xs[0]
        if not ONE_SET:
            here = ct.broadcast_to(number, (STRIPS, MOST, LINE // MOST)).reshape((STRIPS, LINE))
            for n in ct.static_iter(range(1, len(xs))):
                x = ct.where(here == n, xs[n], x)
        x_low, x_high = low_of(x, dtype), high_of(x, dtype)
        new: tuple = ()
        for s in ct.static_iter(range(8)):
            ws = ct.extract(w, (s, 0, 0), (STRIPS, 1, LINE)).reshape((STRIPS, LINE))
            terms = (low_of(ws, dtype) * x_low + high_of(ws, dtype) * x_high).reshape((STRIPS, MOST, LINE // MOST))
            smallest = ct.sum(terms, axis=2, keepdims=True)
            value = fields_sum(smallest, WIDE)
            if NARROW_OUT == NARROW_DOWN:
                value = ct.where((kind == OUT) | (kind == DOWN), fields_sum(smallest, NARROW_OUT), value)
            else:
                value = ct.where(kind == OUT, fields_sum(smallest, NARROW_OUT), value)
                value = ct.where(kind == DOWN, fields_sum(smallest, NARROW_DOWN), value)
            if s == 0:
                # Plus 0, which only the loaded value tells: what depends on the loop alone is
                # computed when the load is started, and its predicates go round through the stages
                # of the ring, bit by bit: that took twice the time of all else in the loop.
                bits = ct.bitcast(value, ct.int32)
                zero = bits * (bits + 1) & 1
                until, number = until + zero, number + zero
            if ONE_SET:
                new = (*new, ct.where(until == 0, value, ys[s]))
            else:
                new = (*new, ys[s] + ct.where(until == 0, value, 0.0))
        ys = new
        if ONE_SET:
            until = until - 1
        else:
            last = number == sets - 1
            until, number = ct.where(last, until - 1, until), ct.where(last, 0, number + 1)
    return ys


def part_of(o, i, MOST, FIELDS):
    """Which of a field's values a thread keeps, and the field."""
    return o % (MOST // FIELDS) * i.shape[2] + i, o // (MOST // FIELDS)


def groups_of(kind, o, i, FORMS, LINE, MOST):
    """The group whose sums each thread keeps, [1, MOST, each]: in a wide turn of few groups,
    several keep the same.
    """
    SLOTS = FORMS[0] // 4
    slot = part_of(o, i, MOST, LINE // FORMS[0])[0]
    if kind == QKV:
        slot = slot % (SLOTS // 4)
    elif kind == GATE_UP:
        slot = slot // 2
    elif kind == OUT:
        slot = part_of(o, i, MOST, LINE // FORMS[2])[0]
    elif kind == DOWN:
        slot = part_of(o, i, MOST, LINE // FORMS[3])[0]
    return slot


def active_of(ys, o, i, FORMS, LINE, MOST, dtype):
    """silu(gate) * up of a turn's inner columns, as words [1, LINE / 4]: those of group g of f
    fields are 2 g f to 2 (g + 1) f.
    """
    FIELDS, SLOTS = LINE // FORMS[0], FORMS[0] // 4
    first = part_of(o, i, MOST, FIELDS)[0] % 2 == 0
    rows = (ct.where(first, ys[0], ys[4]), ct.where(first, ys[1], ys[5]), ct.where(first, ys[2], ys[6]), ct.where(first, ys[3], ys[7]))
    r = ct.reduce(rows, 0, add4, (0.0, 0.0, 0.0, 0.0), keepdims=True)
    low = ct.truediv(r[0], 1.0 + ct.exp(-r[0]), rounding_mode=ct.RoundingMode.APPROX) * r[1]
    high = ct.truediv(r[2], 1.0 + ct.exp(-r[2]), rounding_mode=ct.RoundingMode.APPROX) * r[3]
    words = packed(low, high, dtype)
    if FIELDS > 1:
        words = ct.permute(words.reshape((FIELDS, SLOTS)), (1, 0))
    return words.reshape((1, LINE // 4))


def repeated(words, x):
    """A row [1, WIDTH] of x for narrow tiles: for each row of W in a line.

    x: some tile of x. The row takes its layout on the way, from zeros that the compiler does not
        know to be zeros: without them each thread makes a row of all strips, and stores all of it
        for others, 32 times 16 bytes.
    """
    (STRIPS, LINE), WIDTH = x.shape, words.shape[1]
    zeros = ct.extract(x, (0, 0), (1, LINE))
    zeros = zeros * (zeros + 1) & 1
    row = zeros | ct.broadcast_to(words.reshape((1, 1, WIDTH)), (1, LINE // WIDTH, WIDTH)).reshape((1, LINE))
    return ct.broadcast_to(row, (STRIPS, LINE))


def inner_sets(active, xs, WIDTH, SETS, LINE):
    """What `down` is multiplied with, from the words of all turns of gate and up."""
    EACH = LINE // 4 // WIDTH
    new: tuple = ()
    for n in ct.static_iter(range(len(xs))):
        if n < SETS:
            new = (*new, repeated(ct.extract(active[n // EACH], (0, n % EACH), (1, WIDTH)), xs[n]))
        else:
            new = (*new, xs[n])
    return new


def with_first(first, xs):
    found: tuple = (first,)
    for n in ct.static_iter(range(1, len(xs))):
        found = (*found, xs[n])
    return found


def add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3
