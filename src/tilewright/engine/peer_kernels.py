"""The kernel of a sum over GPUs (peer_sum.py): an exchange of words through mailboxes.

A mailbox has two slots, which calls use in turn, so a rank overwrites a slot two calls later. That
is safe: by then it has received every other rank's term of the call in between. A rank sends that
term only after its previous launch has ended, and with it all polls of the slot.
"""

import cuda.tile as ct

from ..ops.common.pdl import pdl_overlap
from .mega.words import above, as_bits, epoch_of, high_of, look, low_of, packed, put

DTYPES = (ct.bfloat16, ct.float16, ct.float32)
SYSTEM = ct.MemoryScope.SYS


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
    """Sums TILE words in place. Y [words] int32; MAIL [2, RANKS, words] int64, the terms of all
    ranks, padded to whole tiles; EPOCHS [blocks] int32, the epoch of each block's last call.

    OTHERS: a tuple of the other ranks' mailboxes. DTYPE: which of DTYPES.
    """
    pdl_overlap()
    i, dtype = ct.bid(0), DTYPES[DTYPE]
    own = ct.load(Y, i, TILE, padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
    epoch = (ct.load(EPOCHS, i, 1).item() + 1) & 0x7FFFFFFF
    slot = epoch & 1
    for other in ct.static_iter(OTHERS):
        put(other, (slot, RANK, i), as_bits(own) | above(epoch), SYSTEM)
    # Orders the stores above before the polls below. They touch different arrays, so the compiler
    # would move the stores after the loop, and all ranks would wait for ever.
    ct.atomic_xchg(EPOCHS, i, epoch, memory_order=ct.MemoryOrder.ACQ_REL, memory_scope=ct.MemoryScope.BLOCK)

    def term(rank):
        """Polls until all words of a rank have this epoch; returns them."""
        words, missing = ct.zeros(TILE, ct.int64), 1
        while missing > 0:
            # The 0 depends on the previous poll; otherwise the compiler would merge the two loads.
            words = look(MAIL, (slot + min(missing, 0), rank, i), (TILE,), SYSTEM)
            missing = ct.sum(ct.where(epoch_of(words) == epoch, 0, 1))
        return words.astype(ct.int32)

    low, high = ct.zeros(TILE, ct.float32), ct.zeros(TILE, ct.float32)
    for rank in ct.static_iter(range(RANKS)):
        words = own if rank == RANK else term(rank)
        if dtype == ct.float32:
            low = low + ct.bitcast(words, ct.float32)
        else:
            low, high = low + low_of(words, dtype), high + high_of(words, dtype)
    total = ct.bitcast(low, ct.int32) if dtype == ct.float32 else packed(low, high, dtype)
    ct.store(Y, i, total, allow_tma=False)
