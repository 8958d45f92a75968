"""Words, and how blocks exchange them through mailboxes: publish and poll.

A mailbox word has 64 bits: the epoch above, a value of 32 bits below (two neighbours of 16 bits,
or one fp32). Epochs only grow, so a relaxed atomic maximum publishes a word, and relaxed loads poll
it. No word needs an order with another.
"""

from typing import Annotated, Any

import cuda.tile as ct

# Arrays whose shapes and strides are known when compiling: a tile is then one address and constant
# offsets from it.
Vector = Annotated[Any, ct.ArrayAnnotation(static_shape_dims=(0,), static_stride_dims=(0,))]
Matrix = Annotated[Any, ct.ArrayAnnotation(static_shape_dims=(0, 1), static_stride_dims=(0, 1))]
Stack = Annotated[Any, ct.ArrayAnnotation(static_shape_dims=(0, 1, 2), static_stride_dims=(0, 1, 2))]
Stacks = Annotated[Any, ct.ArrayAnnotation(static_shape_dims=(0, 1, 2, 3), static_stride_dims=(0, 1, 2, 3))]

RELAXED, DEVICE = ct.MemoryOrder.RELAXED, ct.MemoryScope.DEVICE
NOWHERE = 2**31 - 1  # an index behind the end of every array


def padded(shape, index):
    """A tile's shape with as many axes as the index of its array."""
    return (*tuple(1 for _ in ct.static_iter(range(len(index) - len(shape)))), *shape)


def look(array, index, shape, scope=DEVICE):
    """A tile of what other blocks may be writing. Leading axes of 1 may be left out of `shape`."""
    return ct.load(
        array, index, padded(shape, index), check_bounds=False, allow_tma=False, memory_order=RELAXED, memory_scope=scope, latency=1
    ).reshape(shape)


def fetch(array, index, shape):
    """As `look`, of what no block writes in this launch."""
    return ct.load(array, index, padded(shape, index), check_bounds=False, allow_tma=False, latency=1).reshape(shape)


def put(array, index, words, scope=DEVICE):
    tile = words.reshape(padded(words.shape, index))
    ct.store(array, index, tile, check_bounds=False, allow_tma=False, memory_order=RELAXED, memory_scope=scope)


def publish(array, index, bits, epoch):
    """Words of these bits, int64, but not where the index is NOWHERE."""
    ct.atomic_max(array, index, ct.broadcast_to(bits | above(epoch), index[-1].shape), check_bounds=True, memory_order=RELAXED, memory_scope=DEVICE)


def polled(looks_at, found, wanted, place, waiter):
    """What `looks_at` finds as soon as its smallest epoch or count is `wanted`; and the polls that
    are left.

    looks_at: takes a 0, returns tiles and their smallest number. found: tiles of the same types.
    place: what the block waits for, for the error.
    waiter: STUCK, the block, and the polls that are left (0: any number).
    """
    STUCK, block, patience = waiter
    polls, lowest = 0, 0
    while lowest < wanted:
        # The 0 comes from the poll before: otherwise the compiler would merge the two.
        found, lowest = looks_at(min(lowest, 0))
        polls = polls + 1
        if (polls == patience) & (lowest < wanted):
            # STUCK keeps the smallest place * 256 + block: the first wait that failed. All threads
            # take part, because an atomic by fewer has a result that all of them wait for. From now
            # on the block polls once.
            thread = ct.arange(256, dtype=ct.int32)
            ct.atomic_min(STUCK, ct.where(thread == 0, 0, NOWHERE), thread * 0 + (place * 256 + block), memory_order=RELAXED, memory_scope=DEVICE)
            lowest, patience = wanted, 1
    return found, patience


def polled_row(array, row, columns, shape, number, wanted, place, waiter):
    """As `polled`, tiles of a row, whose words have copies on the second axis. number: of a word,
    its epoch or count.
    """

    def looks_at(zero):
        seen: tuple = ()
        least = ct.full(shape, NOWHERE, ct.int32)
        for n in ct.static_iter(range(len(columns))):
            words = look(array, (row + zero, 0, columns[n]), shape)
            seen, least = (*seen, words), ct.minimum(least, number(words))
        return seen, ct.min(least)

    return polled(looks_at, tuple(ct.zeros(shape, ct.int64) for _ in ct.static_iter(range(len(columns)))), wanted, place, waiter)


def above(epoch):
    return ct.astype(epoch, ct.int64) << 32


def epoch_of(words):
    return (words >> 32).astype(ct.int32)


def low_of(words, dtype):
    """The lower neighbours in 32-bit words, fp32."""
    if dtype == ct.bfloat16:
        return ct.bitcast(words << 16, ct.float32)
    return ct.bitcast((words & 65535).astype(ct.uint16), dtype).astype(ct.float32)


def high_of(words, dtype):
    if dtype == ct.bfloat16:
        return ct.bitcast(words & -65536, ct.float32)
    return ct.bitcast(((words >> 16) & 65535).astype(ct.uint16), dtype).astype(ct.float32)


def packed(low, high, dtype):
    """32-bit words of two neighbours, rounded to dtype."""
    bits = ct.bitcast(low.astype(dtype), ct.uint16).astype(ct.int32)
    return bits | (ct.bitcast(high.astype(dtype), ct.uint16).astype(ct.int32) << 16)


def as_bits(words):
    """32-bit words as the lower halves of int64."""
    return ct.bitcast(words, ct.uint32).astype(ct.int64)


def rounded(x, dtype):
    return x.astype(dtype).astype(ct.float32)


def added(*values):
    """For ct.reduce of several arrays: the first half of the arguments plus the second."""
    half = len(values) // 2
    return tuple(values[n] + values[n + half] for n in ct.static_iter(range(half)))
