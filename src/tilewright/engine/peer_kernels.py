"""Kernels that exchange words between GPUs through mailboxes (peers.py).

A mailbox has two slots, which calls use in turn, so a rank overwrites a slot two calls later. That
is safe: by then it has received every other rank's words of the call in between. A rank sends those
only after its previous launch has ended, and with it all polls of the slot.

MAIL [2, RANKS, words] int64: what the other ranks sent, in whole tiles. OTHERS: a tuple of the
other ranks' mailboxes. EPOCHS [blocks] int32: the epoch of each block's last call. DTYPE: which of
DTYPES.
"""

import cuda.tile as ct

from ..ops.common.pdl import pdl_overlap
from .mega.words import above, as_bits, epoch_of, high_of, look, low_of, packed, put

DTYPES = (ct.bfloat16, ct.float16, ct.float32)
SYSTEM = ct.MemoryScope.SYS
ZERO = ct.PaddingMode.ZERO


def next_epoch(EPOCHS, block):
    return (ct.load(EPOCHS, block, 1).item() + 1) & 0x7FFFFFFF


def send(words, OTHERS, RANK, i, epoch):
    """Puts a tile into every other rank's mailbox, as this rank's tile i."""
    for other in ct.static_iter(OTHERS):
        put(other, (epoch & 1, RANK, i), as_bits(words) | above(epoch), SYSTEM)


def all_sent(EPOCHS, block, epoch):
    """Orders the stores above before the polls below. They touch different arrays, so the compiler
    would move the stores after the loop, and all ranks would wait for ever.
    """
    ct.atomic_xchg(EPOCHS, block, epoch, memory_order=ct.MemoryOrder.ACQ_REL, memory_scope=ct.MemoryScope.BLOCK)


def received(MAIL, rank, i, epoch, TILE):
    """Polls until all words of a rank's tile i have this epoch; returns them."""
    words, missing = ct.zeros(TILE, ct.int64), 1
    while missing > 0:
        # The 0 depends on the previous poll; otherwise the compiler would merge the two loads.
        words = look(MAIL, ((epoch & 1) + min(missing, 0), rank, i), (TILE,), SYSTEM)
        missing = ct.sum(ct.where(epoch_of(words) == epoch, 0, 1))
    return words.astype(ct.int32)


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
    """Sums TILE words in place. Y [words] int32."""
    pdl_overlap()
    i, dtype = ct.bid(0), DTYPES[DTYPE]
    own = ct.load(Y, i, TILE, padding_mode=ZERO, allow_tma=False)
    epoch = next_epoch(EPOCHS, i)
    send(own, OTHERS, RANK, i, epoch)
    all_sent(EPOCHS, i, epoch)
    low, high = ct.zeros(TILE, ct.float32), ct.zeros(TILE, ct.float32)
    for rank in ct.static_iter(range(RANKS)):  # in rank order, so that all ranks get equal bits
        words = own if rank == RANK else received(MAIL, rank, i, epoch, TILE)
        if dtype == ct.float32:
            low = low + ct.bitcast(words, ct.float32)
        else:
            low, high = low + low_of(words, dtype), high + high_of(words, dtype)
    total = ct.bitcast(low, ct.int32) if dtype == ct.float32 else packed(low, high, dtype)
    ct.store(Y, i, total, allow_tma=False)


@ct.kernel
def peer_gather_kernel(
    PART,
    WHOLE,
    MAIL,
    EPOCHS,
    OTHERS,
    RANK: ct.Constant[int],
    RANKS: ct.Constant[int],
    TILE: ct.Constant[int],
    BLOCKS: ct.Constant[int],
):
    """Puts the ranks' rows side by side. PART [rows, words], WHOLE [rows, RANKS, words] int32.

    BLOCKS: of the grid, all resident; each takes every BLOCKS-th tile.
    """
    pdl_overlap()
    block, across = ct.bid(0), ct.cdiv(PART.shape[1], TILE)
    tiles = PART.shape[0] * across
    epoch = next_epoch(EPOCHS, block)
    for i in range(block, tiles, BLOCKS):
        row, column = i // across, i % across
        own = ct.load(PART, (row, column), (1, TILE), padding_mode=ZERO, allow_tma=False)
        send(own.reshape((TILE,)), OTHERS, RANK, i, epoch)
        ct.store(WHOLE, (row, RANK, column), own.reshape((1, 1, TILE)), allow_tma=False)
    all_sent(EPOCHS, block, epoch)
    for i in range(block, tiles, BLOCKS):
        for rank in ct.static_iter(range(RANKS)):
            if rank != RANK:
                words = received(MAIL, rank, i, epoch, TILE)
                ct.store(WHOLE, (i // across, rank, i % across), words.reshape((1, 1, TILE)), allow_tma=False)
