"""Philox4x32-10, a random number generator without state: four 32-bit words of (counter, key);
shared by dropout and sample.

Source    Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3 and table
          2.
"""

import cuda.tile as ct
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # the golden ratio and sqrt(3) - 1, in units of 2**-32
WORD = 0xFFFFFFFF


def philox_reference(counter: tuple[Tensor, ...], key: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The definition: four int64 tensors of values below 2**32, from a counter of four and a key of
    two such tensors.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = c0 * MULTIPLIERS[0], c2 * MULTIPLIERS[1]  # modulo 2**64: the shift below brings in sign bits, the mask takes them out
        c0, c1, c2, c3 = (p1 >> 32 & WORD) ^ c1 ^ k0, p1 & WORD, (p0 >> 32 & WORD) ^ c3 ^ k1, p0 & WORD
        k0, k1 = k0 + KEY_STEPS[0] & WORD, k1 + KEY_STEPS[1] & WORD
    return c0, c1, c2, c3


def split_words(x: Tensor) -> tuple[Tensor, Tensor]:
    """Low and high word of an int64 tensor."""
    return x & WORD, x >> 32 & WORD


def philox(c0, c1, c2, c3, k0, k1):
    """The same in tile code: uint32 tiles that broadcast, and a uint32 key."""
    for _ in ct.static_iter(range(ROUNDS)):
        p0 = c0.astype(ct.uint64) * MULTIPLIERS[0]
        p1 = c2.astype(ct.uint64) * MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32).astype(ct.uint32) ^ c1 ^ k0, p1.astype(ct.uint32), (p0 >> 32).astype(ct.uint32) ^ c3 ^ k1, p0.astype(ct.uint32)
        k0 = k0 + ct.full((), KEY_STEPS[0], ct.uint32)
        k1 = k1 + ct.full((), KEY_STEPS[1], ct.uint32)
    return c0, c1, c2, c3


def low_high(x):
    """Low and high word, uint32, of an int64 tile."""
    return x.astype(ct.uint32), (x >> 32).astype(ct.uint32)


def one_of_four(words):
    """Four tiles [n, 1], interleaved to one [n, 4]: every thread keeps the words that it made (no
    shuffle on sm_90).
    """
    column = ct.arange(4, dtype=ct.int32).reshape((1, 4))
    return ct.where(column < 2, ct.where(column == 0, words[0], words[1]), ct.where(column == 2, words[2], words[3]))
