"""Tile code of `sparse_index`: one kernel scores the keys, one lists the best of each token."""

import cuda.tile as ct

from ..common.pdl import pdl_overlap
from ..common.routing import _order_keys as order_keys
from ..common.softmax_tiles import product
from ..common.tiles import ZERO, add_each

NOTHING = -(2**31)  # an order key below that of every score
HIGHEST = 2**31 - 1  # above that of every score


def _span(KV_LEN, KV_START, sequence, keys, HAS_LEN, HAS_START):
    """The first key of a sequence, and where its last token's keys end."""
    start, end = 0, keys
    if HAS_LEN:
        end = max(0, min(ct.load(KV_LEN, (sequence,), ()), keys))
    if HAS_START:
        start = max(0, ct.load(KV_START, (sequence,), ()))
    return start, end


@ct.kernel
def sparse_index_scores_kernel(
    Q,
    CACHE,
    CACHE_SCALE,
    WEIGHTS,
    KV_LEN,
    KV_START,
    BLOCK_TABLE,
    SCORES,
    keys: int,
    PAGE_SIZE: ct.Constant[int],
    HAS_LEN: ct.Constant[bool],
    HAS_START: ct.Constant[bool],
    CODES: ct.Constant[bool],
    TF32X3: ct.Constant[bool],
    TILE_T: ct.Constant[int],
    TILE_H: ct.Constant[int],
    TILE_D: ct.Constant[int],
    TILE_N: ct.Constant[int],
    LATENCY: ct.Constant[int],
):
    """The scores of one KV split for TILE_T tokens of a sequence, as order keys. Grid (splits,
    token tiles, batch).

    Keys are the rows of the products, the heads of all tokens their columns: the sum over heads
    then stays within four threads.
    Q [batch, q_len, heads, columns]; CACHE [pages, page_size, columns], CACHE_SCALE fp32 [pages,
    page_size], read only with CODES; WEIGHTS fp32 [batch, q_len, heads]; SCORES int32 [batch,
    q_len, at least keys]. KV_LEN, KV_START int32 [batch], BLOCK_TABLE int32 [batch, max_pages]:
    not touched where a flag or a PAGE_SIZE of 0 says so. TILE_H, TILE_D: powers of two, at least
    heads and columns. Only tiles that some token of the block sees are written.
    """
    pdl_overlap()
    split, tokens, sequence = ct.bid(0), ct.bid(1), ct.bid(2)
    start, end = _span(KV_LEN, KV_START, sequence, keys, HAS_LEN, HAS_START)
    unseen = max(0, Q.shape[1] - (tokens + 1) * TILE_T)  # the last keys, which only later tokens see
    first, last = start // TILE_N, ct.cdiv(max(0, end - unseen), TILE_N)
    per_split = ct.cdiv(max(0, last - first), ct.num_blocks(0))
    first = first + split * per_split
    last = min(last, first + per_split)

    columns = TILE_T * TILE_H
    q = ct.load(Q, (sequence, tokens, 0, 0), (1, TILE_T, TILE_H, TILE_D), padding_mode=ZERO)
    q = ct.transpose(q.reshape((columns, TILE_D)))
    weights = ct.load(WEIGHTS, (sequence, tokens, 0), (1, TILE_T, TILE_H), padding_mode=ZERO, allow_tma=False).reshape((1, columns))
    for j in range(first, last):
        page, place = sequence, j
        if PAGE_SIZE:
            page, place = ct.load(BLOCK_TABLE, (sequence, j // (PAGE_SIZE // TILE_N)), ()), j % (PAGE_SIZE // TILE_N)
        tile = ct.load(CACHE, (page, place, 0), (1, TILE_N, TILE_D), padding_mode=ZERO, latency=LATENCY).reshape((TILE_N, TILE_D))
        products = product(tile, q, ct.zeros((TILE_N, columns), ct.float32), TF32X3)
        scores = ct.maximum(products, 0.0, propagate_nan=True) * weights
        scores = ct.sum(scores.reshape((TILE_N, TILE_T, TILE_H)), axis=2)
        if CODES:
            scale = ct.load(CACHE_SCALE, (page, place), (1, TILE_N), padding_mode=ZERO, latency=LATENCY, allow_tma=False)
            scores = scores * scale.reshape((TILE_N, 1))
        ct.store(SCORES, (sequence, tokens, j), ct.transpose(order_keys(scores)).reshape((1, TILE_T, TILE_N)), allow_tma=False)


@ct.kernel
def sparse_index_select_kernel(
    SCORES,
    KV_LEN,
    KV_START,
    BLOCK_TABLE,
    OUT,
    keys: int,
    PAGE_SIZE: ct.Constant[int],
    HAS_LEN: ct.Constant[bool],
    HAS_START: ct.Constant[bool],
    TILE: ct.Constant[int],
    WAYS: ct.Constant[int],
    LATENCY: ct.Constant[int],
):
    """The list of one token, from the order keys of its scores. Grid (tokens, batch).

    A search finds low and high: fewer than k keys lie at high or above, at least k (or all) at low
    or above. It ends when those are k, or when all between are equal. The first pass that follows
    lists the keys from high on and, of those between, as many as are wanted, by position.
    SCORES int32 [batch, q_len, at least keys], a multiple of TILE; those of unseen keys may be
    anything. OUT int32 [batch, q_len, k]; the others as in `sparse_index_scores_kernel`.
    TILE: up to 2**14, so that two counts fit an int32.
    """
    pdl_overlap()
    token, sequence = ct.bid(0), ct.bid(1)
    start, end = _span(KV_LEN, KV_START, sequence, keys, HAS_LEN, HAS_START)
    end = max(0, end - (ct.num_blocks(0) - 1 - token))
    first, last, k = start // TILE, ct.cdiv(end, TILE), OUT.shape[2]
    lane = ct.arange(TILE, dtype=ct.int32)

    def scores(j):
        x = ct.load(SCORES, (sequence, token, j), (1, 1, TILE), check_bounds=False, latency=LATENCY, allow_tma=False).reshape((TILE,))
        place = j * TILE + lane
        return ct.where((place >= start) & (place < end), x, NOTHING)

    low, high = ct.full((), NOTHING + 1, ct.int64), ct.full((), HIGHEST, ct.int64)
    total, above = max(0, end - start), ct.zeros((), ct.int32)  # keys at low, at high or above
    while (high - low > 1) & (total > k):
        base, step = low, (high - low + WAYS) // (WAYS + 1)
        counts: tuple = ()
        zeros: tuple = ()
        for n in ct.static_iter(range(WAYS)):
            counts, zeros = (*counts, ct.zeros((TILE,), ct.int32)), (*zeros, 0)
        for j in range(first, last):
            x = scores(j)
            new: tuple = ()
            for n in ct.static_iter(range(WAYS)):
                cut = min(base + (n + 1) * step, high).astype(ct.int32)
                new = (*new, counts[n] + (x >= cut).astype(ct.int32))
            counts = new
        totals = ct.reduce(counts, 0, add_each, zeros)
        for n in ct.static_iter(range(WAYS)):
            cut, count = base + (n + 1) * step, totals[n].item()
            enough = count >= k
            lower = (count < k) & (cut < high)
            low, total = ct.where(enough, cut, low), ct.where(enough, count, total)
            high, above = ct.where(lower, cut, high), ct.where(lower, count, above)

    low, high, wanted = low.astype(ct.int32), high.astype(ct.int32), k - above
    certain, equal = ct.zeros((), ct.int32), ct.zeros((), ct.int32)
    for j in range(first, last):
        x = scores(j)
        sure, between = x >= high, (x >= low) & (x < high)
        both = sure.astype(ct.int32) + (between.astype(ct.int32) << 16)
        before = ct.cumsum(both) - both
        rank = equal + (before >> 16)
        row = j * TILE + lane
        if PAGE_SIZE:
            chosen = sure | between
            page = ct.gather(BLOCK_TABLE, (sequence, row // PAGE_SIZE), mask=chosen, padding_value=0, check_bounds=False)
            row = page * PAGE_SIZE + row % PAGE_SIZE
        else:
            row = sequence * keys + row
        place = certain + (before & 0xFFFF) + ct.minimum(rank, wanted)
        ct.scatter(OUT, (sequence, token, place), row, mask=sure | (between & (rank < wanted)), check_bounds=False)
        found = ct.sum(both)
        certain, equal = certain + (found & 0xFFFF), equal + (found >> 16)
    count = certain + min(equal, wanted)
    for j in range(count // TILE, ct.cdiv(k, TILE)):
        place = j * TILE + lane
        ct.scatter(OUT, (sequence, token, place), -1, mask=(place >= count) & (place < k), check_bounds=False)
