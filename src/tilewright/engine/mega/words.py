"""What blocks tell each other, and how: publish and poll, and sums.

A mailbox word is 64 bits: a token's epoch above, a value of 32 bits below (two neighbours of 16
bits, or one fp32). It is published by a relaxed maximum, since epochs only grow, and polled by
relaxed loads until the epoch is there: no word needs an order with another.

A word of a sum is two fixed-point fields of 28 bits and, in the upper 8, how many have come. All
that happens to it are relaxed integer additions, so their order does not matter; the word is whole
when its count is. It is cleared by one more addition, of what its owner has read in it, negated,
with a count of 1: a reader waits for the clearing too, so no addition can fall before it.
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
NOWHERE = 2**31 - 1
FIELD_BITS, COUNT_SHIFT = 28, 56
FIELD = (1 << FIELD_BITS) - 1
ARRIVAL = 1 << COUNT_SHIFT
HALF_FIELD = 1 << (FIELD_BITS - 1)
FRACTION = 17  # bits behind the fixed point
RANGE = HALF_FIELD >> FRACTION  # a sum lies in -RANGE .. RANGE


def look(array, index, shape):
    return ct.load(array, index, shape, check_bounds=False, allow_tma=False, memory_order=RELAXED, memory_scope=DEVICE, latency=1)


def fetch(array, index, shape):
    """A tile of what no block writes in this launch."""
    return ct.load(array, index, shape, check_bounds=False, allow_tma=False, latency=1)


def put(array, index, words):
    ct.store(array, index, words, check_bounds=False, allow_tma=False, memory_order=RELAXED, memory_scope=DEVICE)


def publish(array, index, bits, epoch):
    """Words of these bits, int64; those whose index lies behind the array's end are left out."""
    words = ct.broadcast_to(bits | (ct.astype(epoch, ct.int64) << 32), index[-1].shape)
    ct.atomic_max(array, index, words, check_bounds=True, memory_order=RELAXED, memory_scope=DEVICE)


def add(array, index, update):
    """As `publish` leaves out."""
    ct.atomic_add(array, index, update, check_bounds=True, memory_order=RELAXED, memory_scope=DEVICE)


def polled(looks_at, found, wanted, place, waiter):
    """What `looks_at` finds as soon as its smallest epoch or count is `wanted`; and the waiter's
    patience left.

    looks_at: of 0, values and their smallest number. found: values of the same types. waiter:
        STUCK, block, patience (polls; 0 for ever).
    """
    STUCK, block, patience = waiter
    polls, lowest = 0, 0
    while lowest < wanted:
        # The look before tells that this is 0: else one look would be taken for the other.
        found, lowest = looks_at(min(lowest, 0))
        polls = polls + 1
        if (polls == patience) & (lowest < wanted):
            # The least of places * 256 + block is left: the first that somebody misses. By a thread
            # of all: what fewer do has a result that all wait for. Nobody waits long who has given
            # up.
            thread = ct.arange(256, dtype=ct.int32)
            ct.atomic_min(STUCK, ct.where(thread == 0, 0, NOWHERE), thread * 0 + (place * 256 + block), memory_order=RELAXED, memory_scope=DEVICE)
            lowest, patience = wanted, 1
    return found, patience


def epoch_of(words):
    return (words >> 32).astype(ct.int32)


def count_of(words):
    return (words >> COUNT_SHIFT).astype(ct.int32) & 255


def low_of(words, dtype):
    """fp32 of the lower neighbour in 32-bit words."""
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
    """32-bit words as the lower half of int64."""
    return ct.bitcast(words, ct.uint32).astype(ct.int64)


def rounded(x, dtype):
    return x.astype(dtype).astype(ct.float32)
