"""What the stream's values travel as: words of 64 bits, a token's number above and the value below, written and read relaxed.

The value is two neighbours of 16 bits, or one of 32; a plane is a tile of one of the two neighbours of each word, in fp32.
"""

import cuda.tile as ct

from .spin import DEVICE, RELAXED


def look(array, index, shape, BOUNDED=False):
    """BOUNDED: the array may end within the tile, in zeros."""
    padding = ct.PaddingMode.ZERO if BOUNDED else ct.PaddingMode.UNDETERMINED
    return ct.load(
        array, index, shape, check_bounds=BOUNDED, padding_mode=padding, allow_tma=False, memory_order=RELAXED, memory_scope=DEVICE, latency=1
    )


def put(array, index, words, BOUNDED=False):
    ct.store(array, index, words, check_bounds=BOUNDED, allow_tma=False, memory_order=RELAXED, memory_scope=DEVICE)


def say(array, index, bits, shape, number, BOUNDED=False):
    """Puts words of these 32-bit values, as int64, and of this number. BOUNDED: but for those beyond the array's end."""
    put(array, index, (bits | (ct.astype(number, ct.int64) << 32)).reshape(shape), BOUNDED)


def say_fp32(array, index, x, shape, number):
    say(array, index, ct.bitcast(x, ct.uint32).astype(ct.int64), shape, number)


def number_of(words):
    return (words >> 32).astype(ct.int32)


def planes_of(words, dtype):
    """fp32 tiles of the values in 32-bit words: even and odd neighbours of 16 bits, or the one of 32."""
    if dtype == ct.float32:
        return (ct.bitcast(words, ct.float32),)
    if dtype == ct.bfloat16:  # one instruction for each
        return ct.bitcast(words << 16, ct.float32), ct.bitcast(words & -65536, ct.float32)
    low, high = (words & 65535).astype(ct.uint16), ((words >> 16) & 65535).astype(ct.uint16)
    return ct.bitcast(low, dtype).astype(ct.float32), ct.bitcast(high, dtype).astype(ct.float32)


def bits_of(planes, dtype):
    """The 32-bit words, as int64, of values rounded to dtype."""
    if dtype == ct.float32:
        return ct.bitcast(planes[0], ct.uint32).astype(ct.int64)
    low = ct.bitcast(planes[0].astype(dtype), ct.uint16).astype(ct.int64)
    return low | (ct.bitcast(planes[1].astype(dtype), ct.uint16).astype(ct.int64) << 16)


def rounded(x, dtype):
    return x.astype(dtype).astype(ct.float32)


def apart(y, N, dtype):
    """A row [N] as planes of neighbours [1, N / 2], or of all [1, N]."""
    if dtype == ct.float32:
        return (y.reshape((1, N)),)
    pairs = y.reshape((N // 2, 2))
    return ct.extract(pairs, (0, 0), (N // 2, 1)).reshape((1, N // 2)), ct.extract(pairs, (0, 1), (N // 2, 1)).reshape((1, N // 2))
