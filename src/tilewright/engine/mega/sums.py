"""Sums: mailboxes to which blocks add terms.

A word of a sum holds two fixed-point fields of 28 bits and, in its upper 8 bits, a count of terms.
It only ever changes by relaxed integer additions, whose order does not matter, and it is complete
when its count is. Its owner clears it by adding the negative of what it read, which counts as a
term too: readers wait for it, so no term can be added before.
"""

import cuda.tile as ct

from .words import DEVICE, NOWHERE, RELAXED, polled, polled_row, rounded

FIELD_BITS, COUNT_SHIFT = 28, 56
FIELD = (1 << FIELD_BITS) - 1
ARRIVAL = 1 << COUNT_SHIFT  # one term
HALF_FIELD = 1 << (FIELD_BITS - 1)
FRACTION = 17  # bits behind the fixed point
SCALE = 2.0**FRACTION
RANGE = HALF_FIELD >> FRACTION  # a sum lies in -RANGE .. RANGE
LARGEST = 1.0e6  # what a term beyond its range adds at most to the word behind a sum


def count_of(words):
    return (words >> COUNT_SHIFT).astype(ct.int32) & 255


def add(array, index, update):
    """But not where the index is NOWHERE."""
    ct.atomic_add(array, index, update, check_bounds=True, memory_order=RELAXED, memory_scope=DEVICE)


def add_outputs(SUMS, ys, row, word, slot, groups, quarter, end, adders):
    """A block's terms of a sum. Rows r and r + 4 of a tile are neighbours, of the words `word` + r
    * `quarter` up to `end`.

    While no term is more than RANGE / 2 / adders, sums are at most RANGE / 2. The word behind the
    row's last adds up larger terms: see `clear`.
    """
    each = HALF_FIELD // adders
    bias = ct.astype(each, ct.int64) * ((1 << FIELD_BITS) + 1) + ARRIVAL
    largest = ct.abs(ys[0])
    for r in ct.static_iter(range(1, 8)):
        largest = ct.maximum(largest, ct.abs(ys[r]), propagate_nan=True)
    for r in ct.static_iter(range(4)):
        a, b = (ys[r] * SCALE).astype(ct.int32).astype(ct.int64), (ys[r + 4] * SCALE).astype(ct.int32).astype(ct.int64)
        at = word + r * quarter
        add(SUMS, (row, 0, ct.where((slot < groups) & (at < end), at, NOWHERE)), a + (b << FIELD_BITS) + bias)
    small = largest <= RANGE / 2 / adders  # not so for NaN
    size = (ct.where(largest < LARGEST, largest, LARGEST) + 1.0).astype(ct.int32).astype(ct.int64)
    add(SUMS, (row, 0, ct.where(small | (slot >= groups), NOWHERE, SUMS.shape[2] - 1)), size)


def owned(SUMS, block, thread, blocks):
    """The words of a sum that a block clears, one for each thread."""
    WORDS = SUMS.shape[2]
    word = block * ct.cdiv(WORDS, blocks) + thread
    return ct.where((thread < ct.cdiv(WORDS, blocks)) & (word < WORDS), word, NOWHERE)


def read(SUMS, row, word):
    """Words of a sum, by atomics."""
    return ct.atomic_add(SUMS, (row, 0, word), 0, memory_order=RELAXED, memory_scope=DEVICE)


def clear(SUMS, STUCK, row, word, old, block, blocks):
    """Subtracts what has been read in words of a sum, `old`, and counts 1. The owner of the last
    word reports terms that were too large.
    """
    LAST = SUMS.shape[2] - 1
    add(SUMS, (row, 0, word), ct.where(word == LAST, ct.astype(0, ct.int64), ct.astype(ARRIVAL, ct.int64)) - old)
    if block == LAST // ct.cdiv(LAST + 1, blocks):
        bad = (word == LAST) & (old > RANGE // 2)
        ct.atomic_min(STUCK, ct.where(bad, 1, NOWHERE), row + word * 0, memory_order=RELAXED, memory_scope=DEVICE)


def summed(SUMS, row, adders, place, x, waiter, s, dtype):
    """The residual stream x plus a sum, as soon as it is whole; and the polls that are left."""
    SETS, COPIES, WIDTH = s.stream_sets, SUMS.shape[1], s.strips * s.wide_width
    target = adders + 1  # its owner's clearing counts too
    # Words that all blocks poll come late to all, so a block first polls a single word, by an
    # atomic: one of its own among the last words of the runs, which come last.
    RUN = s.down_groups * (s.line // s.down_width)
    RUNS = SETS * WIDTH // RUN
    mine = waiter[1] % RUNS * RUN + RUN - 1 - waiter[1] // RUNS % RUN

    def first(zero):
        return zero, count_of(read(SUMS, row + zero, mine))

    columns = tuple(n for n in ct.static_iter(range(SETS)))
    waiter = (waiter[0], waiter[1], polled(first, 0, target, place, waiter)[1])
    seen, patience = polled_row(SUMS, row, columns, (COPIES, WIDTH), count_of, target, place, waiter)
    offset = HALF_FIELD // adders * adders

    def plus(n):
        words = seen[n]
        if COPIES > 1:
            words = ct.extract(words, (0, 0), (1, WIDTH))
        a, b = (words.astype(ct.int32) & FIELD) - offset, ((words >> FIELD_BITS).astype(ct.int32) & FIELD) - offset
        low, high = a.astype(ct.float32) * (1.0 / SCALE), b.astype(ct.float32) * (1.0 / SCALE)
        return rounded(x[n][0] + low, dtype), rounded(x[n][1] + high, dtype)

    return tuple(plus(n) for n in ct.static_iter(range(SETS))), patience
