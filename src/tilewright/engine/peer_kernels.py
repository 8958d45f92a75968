"""Kernels of a sum over GPUs (peer_sum.py): an exchange of words through mailboxes.

A mailbox has two slots, which calls take in turn. A rank writes a slot again two calls later. By
then every other rank has sent its term of the call between, which it does only after its own launch
before has ended, and with it the polls of that slot.
"""

import cuda.tile as ct

from ..ops.common.pdl import pdl_launch_dependents, pdl_overlap, pdl_wait
from .mega.words import above, as_bits, epoch_of, high_of, look, low_of, packed, put, rounded

DTYPES = (ct.bfloat16, ct.float16, ct.float32)
SYSTEM = ct.MemoryScope.SYS


def exchanged(own, MAIL, EPOCHS, OTHERS, RANK, RANKS, dtype):
    """The sums of a block's words over all ranks, fp32: lower and upper neighbours (of fp32, the
    lower ones alone).
    """
    i, shape = ct.bid(0), own.shape
    epoch = (ct.load(EPOCHS, i, 1).item() + 1) & 0x7FFFFFFF
    slot = epoch & 1
    mail = as_bits(own) | above(epoch)
    for other in ct.static_iter(OTHERS):
        put(other, (slot, RANK, i), mail, SYSTEM)
    # Orders the stores above before the polls below. They are of different arrays, so the compiler
    # would put the stores behind the loop, and all ranks would wait for ever.
    ct.atomic_xchg(EPOCHS, i, epoch, memory_order=ct.MemoryOrder.ACQ_REL, memory_scope=ct.MemoryScope.BLOCK)

    def term(rank):
        """The words of a rank as soon as all have this epoch."""
        words, missing = ct.zeros(shape, ct.int64), 1
        while missing > 0:
            # The 0 comes from the poll before: otherwise the compiler would merge the two.
            words = look(MAIL, (slot + min(missing, 0), rank, i), shape, SYSTEM)
            missing = ct.sum(ct.where(epoch_of(words) == epoch, 0, 1))
        return words.astype(ct.int32)

    low, high = ct.zeros(shape, ct.float32), ct.zeros(shape, ct.float32)
    for rank in ct.static_iter(range(RANKS)):
        new_low, new_high = halves(own if rank == RANK else term(rank), dtype)
        low, high = low + new_low, high + new_high
    return low, high


def halves(words, dtype):
    """fp32: the lower and upper neighbours in words; of fp32 each word and zeros."""
    if dtype == ct.float32:
        return ct.bitcast(words, ct.float32), ct.zeros(words.shape, ct.float32)
    return low_of(words, dtype), high_of(words, dtype)


def whole(low, high, dtype):
    return ct.bitcast(low, ct.int32) if dtype == ct.float32 else packed(low, high, dtype)


@ct.kernel
def peer_sum_kernel(
    Y,
    MAIL,
    EPOCHS,
    OTHERS,
    RANK: ct.Constant[int],
    RANKS: ct.Constant[int],
    TILE: ct.Constant[int],
    DTYPE: ct.Constant[int],
):
    """TILE words of the sum, in place. Y [words] int32; MAIL [2, RANKS, words] int64, the terms of
    all ranks in whole tiles; EPOCHS [blocks] int32, of each block's last call.

    OTHERS: a tuple of the other ranks' mailboxes. DTYPE: which of DTYPES.
    """
    pdl_overlap()
    dtype = DTYPES[DTYPE]
    own = ct.load(Y, ct.bid(0), TILE, padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
    low, high = exchanged(own, MAIL, EPOCHS, OTHERS, RANK, RANKS, dtype)
    ct.store(Y, ct.bid(0), whole(low, high, dtype), allow_tma=False)


@ct.kernel
def peer_sum_norm_kernel(
    Y,
    MAIL,
    EPOCHS,
    OTHERS,
    X,
    WEIGHT,
    OUT,
    NEW_RESIDUAL,
    eps: float,
    weight_offset: float,
    ROUND: ct.Constant[bool],
    RANK: ct.Constant[int],
    RANKS: ct.Constant[int],
    TILE: ct.Constant[int],
    DTYPE: ct.Constant[int],
    COLS: ct.Constant[int],
):
    """A row: the sum as in `peer_sum_kernel`, then `rms_norm` with it as residual.

    Y, X, OUT, NEW_RESIDUAL [rows, words] int32 and WEIGHT [1, words] int32, of COLS elements a row.
    """
    pdl_launch_dependents()
    row, dtype = ct.bid(0), DTYPES[DTYPE]

    def loaded(array, i):
        return ct.load(array, (i, 0), (1, TILE), padding_mode=ct.PaddingMode.ZERO, allow_tma=False).reshape((TILE,))

    weight_low, weight_high = halves(loaded(WEIGHT, 0), dtype)
    pdl_wait()
    low, high = exchanged(loaded(Y, row), MAIL, EPOCHS, OTHERS, RANK, RANKS, dtype)
    ct.store(Y, (row, 0), whole(low, high, dtype).reshape((1, TILE)), allow_tma=False)
    x_low, x_high = halves(loaded(X, row), dtype)
    low, high = rounded(rounded(low, dtype) + x_low, dtype), rounded(rounded(high, dtype) + x_high, dtype)
    ct.store(NEW_RESIDUAL, (row, 0), whole(low, high, dtype).reshape((1, TILE)), allow_tma=False)
    rstd = 1.0 / ct.sqrt(ct.sum(low * low + high * high) * (1.0 / COLS) + eps)
    low, high = low * rstd, high * rstd
    if ROUND:
        low, high = rounded(low, dtype), rounded(high, dtype)
    low, high = low * (weight_low + weight_offset), high * (weight_high + weight_offset)
    ct.store(OUT, (row, 0), whole(low, high, dtype).reshape((1, TILE)), allow_tma=False)
