"""Tile code of `sparse_index`: one kernel scores the keys, one lists the best of each token. Where
few tokens see many keys, several blocks share a token: each launch counts for one step of the
search, and the last one lists.
"""

import cuda.tile as ct

from ..common.pdl import pdl_overlap
from ..common.routing import _order_keys as order_keys
from ..common.softmax_tiles import product
from ..common.tiles import ZERO, add_each

SCANNED = 16  # numbers that one thread adds up, of a running sum
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


def running_sum(x):
    """Of each number the sum of those before it; and the sum of all.

    In two steps, because a scan of one axis passes each number through 16 shuffles.
    """
    each = min(SCANNED, x.shape[0])
    rows = x.reshape((x.shape[0] // each, each))
    sums = ct.sum(rows, axis=1)
    before = ct.cumsum(rows, axis=1) - rows + (ct.cumsum(sums) - sums).reshape((sums.shape[0], 1))
    return before.reshape((x.shape[0],)), ct.sum(sums)


def _scores_of(SCORES, KV_LEN, KV_START, token, tokens, sequence, keys, HAS_LEN, HAS_START):
    """What `_seen_scores` reads: the scores of one of so many tokens, and the first and the end of
    the keys that it sees.
    """
    start, end = _span(KV_LEN, KV_START, sequence, keys, HAS_LEN, HAS_START)
    end = max(0, end - (tokens - 1 - token))
    return SCORES, sequence, token, start, end


def _seen_scores(of, tile, TILE, LATENCY):
    """A tile of order keys, and of which keys they are; NOTHING for those that are not seen."""
    SCORES, sequence, token, start, end = of
    place = tile * TILE + ct.arange(TILE, dtype=ct.int32)
    x = ct.load(SCORES, (sequence, token, tile), (1, 1, TILE), check_bounds=False, latency=LATENCY, allow_tma=False).reshape((TILE,))
    return ct.where((place >= start) & (place < end), x, NOTHING), place


def _cut(n, low, high, WAYS):
    """The n-th of WAYS cuts between low and high, from 0 on."""
    return min(low + (n + 1) * ((high - low + WAYS) // (WAYS + 1)), high)


def _counted(of, first, last, low, high, TILE, WAYS, LATENCY):
    """How many keys of tiles first to last lie at each cut or above."""
    counts: tuple = ()
    zeros: tuple = ()
    for n in ct.static_iter(range(WAYS)):
        counts, zeros = (*counts, ct.zeros((TILE,), ct.int32)), (*zeros, 0)
    for j in range(first, last):
        x, _ = _seen_scores(of, j, TILE, LATENCY)
        new: tuple = ()
        for n in ct.static_iter(range(WAYS)):
            new = (*new, counts[n] + (x >= _cut(n, low, high, WAYS).astype(ct.int32)).astype(ct.int32))
        counts = new
    return ct.reduce(counts, 0, add_each, zeros)


def _listed(of, first, last, low, high, wanted, certain, equal, OUT, BLOCK_TABLE, keys, PAGE_SIZE, TILE, LATENCY):
    """Lists keys of tiles first to last: those from high on and, of those from low on, as many as
    are wanted. certain, equal: how many of each stand before.
    """
    _, sequence, token, _, _ = of
    for j in range(first, last):
        x, row = _seen_scores(of, j, TILE, LATENCY)
        sure, between = x >= high, (x >= low) & (x < high)
        before, found = running_sum(sure.astype(ct.int32) + (between.astype(ct.int32) << 16))
        rank = equal + (before >> 16)
        if PAGE_SIZE:
            chosen = sure | between
            page = ct.gather(BLOCK_TABLE, (sequence, row // PAGE_SIZE), mask=chosen, padding_value=0, check_bounds=False)
            row = page * PAGE_SIZE + row % PAGE_SIZE
        else:
            row = sequence * keys + row
        place = certain + (before & 0xFFFF) + ct.minimum(rank, wanted)
        ct.scatter(OUT, (sequence, token, place), row, mask=sure | (between & (rank < wanted)), check_bounds=False)
        certain, equal = certain + (found & 0xFFFF), equal + (found >> 16)


def _mark_end(of, OUT, TILE):
    """-1 behind the last key of a list."""
    _, sequence, token, start, end = of
    count = min(OUT.shape[2], max(0, end - start))
    lane, k = ct.arange(TILE, dtype=ct.int32), OUT.shape[2]
    for j in range(count // TILE, ct.cdiv(k, TILE)):
        place = j * TILE + lane
        ct.scatter(OUT, (sequence, token, place), -1, mask=(place >= count) & (place < k), check_bounds=False)


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
    of = _scores_of(SCORES, KV_LEN, KV_START, token, ct.num_blocks(0), sequence, keys, HAS_LEN, HAS_START)
    start, end = of[3], of[4]
    first, last, k = start // TILE, ct.cdiv(end, TILE), OUT.shape[2]

    low, high = ct.full((), NOTHING + 1, ct.int64), ct.full((), HIGHEST, ct.int64)
    total, above = max(0, end - start), ct.zeros((), ct.int32)  # keys at low, at high or above
    while (high - low > 1) & (total > k):
        totals, cuts = _counted(of, first, last, low, high, TILE, WAYS, LATENCY), (low, high)
        for n in ct.static_iter(range(WAYS)):
            cut, count = _cut(n, *cuts, WAYS), totals[n].item()
            enough = count >= k
            lower = (count < k) & (cut < high)
            low, total = ct.where(enough, cut, low), ct.where(enough, count, total)
            high, above = ct.where(lower, cut, high), ct.where(lower, count, above)

    low, high, wanted = low.astype(ct.int32), high.astype(ct.int32), k - above
    none = ct.zeros((), ct.int32)
    _listed(of, first, last, low, high, wanted, none, none, OUT, BLOCK_TABLE, keys, PAGE_SIZE, TILE, LATENCY)
    _mark_end(of, OUT, TILE)


def _bounds_behind(BOUNDS, COUNTS, token, sequence, k, FIRST, BLOCKS, WAYS):
    """low, high and the keys at high or above, when the counts of the step before are known."""
    low, high, above = ct.full((), NOTHING + 1, ct.int64), ct.full((), HIGHEST, ct.int64), ct.zeros((), ct.int64)
    if not FIRST:
        low, high = ct.load(BOUNDS, (sequence, token, 0), ()), ct.load(BOUNDS, (sequence, token, 1), ())
        above = ct.load(BOUNDS, (sequence, token, 2), ())
        counts = ct.load(COUNTS, (sequence, token, 0, 0), (1, 1, BLOCKS, WAYS + 1), allow_tma=False).reshape((BLOCKS, WAYS + 1))
        counts = ct.sum(counts, axis=0)
        n = ct.arange(WAYS + 1, dtype=ct.int32)
        is_cut, enough = n < WAYS, counts >= k
        passed = ct.sum((is_cut & enough).astype(ct.int32))
        beyond, cuts = ct.max(ct.where(is_cut & (counts < k), counts, 0)).astype(ct.int64), (low, high)
        if passed > 0:
            low = _cut(passed - 1, *cuts, WAYS)
        if passed < WAYS:
            high, above = _cut(passed, *cuts, WAYS), beyond
    return low, high, above


def _own_tiles(of, block, blocks, TILE):
    """The first tile of a token, and those of one of its blocks."""
    start, end = of[3], of[4]
    begin, last = start // TILE, ct.cdiv(end, TILE)
    each = ct.cdiv(max(0, last - begin), blocks)
    first = begin + block * each
    return begin, first, min(last, first + each)


@ct.kernel
def sparse_index_count_kernel(
    SCORES,
    KV_LEN,
    KV_START,
    BOUNDS,
    COUNTS,
    NEW_BOUNDS,
    NEW_COUNTS,
    keys: int,
    FIRST: ct.Constant[bool],
    TOPK: ct.Constant[int],
    HAS_LEN: ct.Constant[bool],
    HAS_START: ct.Constant[bool],
    TILE: ct.Constant[int],
    BLOCKS: ct.Constant[int],
    WAYS: ct.Constant[int],
    LATENCY: ct.Constant[int],
):
    """A step of the search of `sparse_index_select_kernel`, by several blocks a token. Grid
    (blocks, tokens, batch).

    BOUNDS int64 [batch, q_len, 3], COUNTS int32 [batch, q_len, blocks, WAYS + 1]: low, high and the
    keys at high or above, and the keys of each block at each cut between them or above; of the step
    before, not read in the FIRST. NEW_BOUNDS, NEW_COUNTS: of this one.
    """
    pdl_overlap()
    block, token, sequence = ct.bid(0), ct.bid(1), ct.bid(2)
    of = _scores_of(SCORES, KV_LEN, KV_START, token, ct.num_blocks(1), sequence, keys, HAS_LEN, HAS_START)
    bounds = _bounds_behind(BOUNDS, COUNTS, token, sequence, TOPK, FIRST, BLOCKS, WAYS)
    if block == 0:
        for i in ct.static_iter(range(3)):
            ct.store(NEW_BOUNDS, (sequence, token, i), bounds[i])

    _, first, last = _own_tiles(of, block, ct.num_blocks(0), TILE)
    totals = _counted(of, first, last, bounds[0], bounds[1], TILE, WAYS, LATENCY)
    for n in ct.static_iter(range(WAYS)):
        ct.store(NEW_COUNTS, (sequence, token, block, n), totals[n].item())
    ct.store(NEW_COUNTS, (sequence, token, block, WAYS), 0)


@ct.kernel
def sparse_index_list_kernel(
    SCORES,
    KV_LEN,
    KV_START,
    BLOCK_TABLE,
    BOUNDS,
    COUNTS,
    OUT,
    keys: int,
    PAGE_SIZE: ct.Constant[int],
    HAS_LEN: ct.Constant[bool],
    HAS_START: ct.Constant[bool],
    TILE: ct.Constant[int],
    BLOCKS: ct.Constant[int],
    WAYS: ct.Constant[int],
    LATENCY: ct.Constant[int],
):
    """The list of one token, when its bounds are found, by several blocks: each counts the keys of
    the blocks before it. Grid (blocks, tokens, batch); arrays as above.
    """
    pdl_overlap()
    block, token, sequence = ct.bid(0), ct.bid(1), ct.bid(2)
    of = _scores_of(SCORES, KV_LEN, KV_START, token, ct.num_blocks(1), sequence, keys, HAS_LEN, HAS_START)
    low, high, above = _bounds_behind(BOUNDS, COUNTS, token, sequence, OUT.shape[2], False, BLOCKS, WAYS)
    low, high, wanted = low.astype(ct.int32), high.astype(ct.int32), OUT.shape[2] - above.astype(ct.int32)

    begin, first, last = _own_tiles(of, block, ct.num_blocks(0), TILE)
    certain, equal = ct.zeros((TILE,), ct.int32), ct.zeros((TILE,), ct.int32)
    for j in range(begin, min(first, last)):
        x, _ = _seen_scores(of, j, TILE, LATENCY)
        certain, equal = certain + (x >= high).astype(ct.int32), equal + ((x >= low) & (x < high)).astype(ct.int32)
    _listed(of, first, last, low, high, wanted, ct.sum(certain), ct.sum(equal), OUT, BLOCK_TABLE, keys, PAGE_SIZE, TILE, LATENCY)
    if block == 0:
        _mark_end(of, OUT, TILE)
