"""Tile code of `attention` and `mla`: one tile of queries meets the tiles of keys that it
sees.

A head_dim that is no power of two is two tiles, the first of the largest power of two below it (192
= 128 + 64): nothing is padded up to 256.
"""

import math

import cuda.tile as ct

from ...launch import next_pow2
from .softmax_tiles import FLOOR, LN2, product, softmax_step
from .tiles import ZERO

# Weights of 8 bits go up to 2**8 (e4m3 holds up to 448), so the least number is 2**-17 of the
# largest weight.
SHIFT = 8


def packed_tile(CU, place, TILE):
    """(sequence, its tile of TILE rows) at a place of a grid that covers packed sequences, which
    begin at CU [sequences + 1], int32.

    The places of sequence i begin at CU[i] // TILE + i: as many as it has tiles, or one more, so a
    tile may lie behind the sequence's last or, where CU[0] > 0, before the first. Rows // TILE +
    sequences of them are all.
    """
    low, high = 0, CU.shape[0] - 1
    while high - low > 1:
        middle = (low + high) // 2
        if ct.load(CU, (middle,), ()) // TILE + middle <= place:
            low = middle
        else:
            high = middle
    return low, place - (ct.load(CU, (low,), ()) // TILE + low)


def place_of(CU_SEQLENS, place, TILE, tokens, VARLEN):
    """(sequence, its tile of TILE tokens) at a place of a grid; TILE 0: all of its tokens."""
    if TILE == 0:
        return place, 0
    if VARLEN:
        return packed_tile(CU_SEQLENS, place, TILE)
    tiles = ct.cdiv(tokens, TILE)
    return place // tiles, place % tiles


def persistent_grid(grid: tuple[int, int, int], resident: int, causal: bool) -> tuple[int]:
    """The grid of persistent blocks that share the items of `grid` (tiles, heads, batch), of which
    `resident` fit the device at a time.
    """
    tiles = grid[0]
    if causal and tiles <= resident:
        resident -= resident % tiles  # so that the waves of `item_of_block` pair a long tile with a short one
    return (min(math.prod(grid), resident),)


def item_of_block(item, shape, CAUSAL):
    """(tile, head, batch) that a persistent block comes to at bid, bid + blocks, ... of all items
    of `shape`; of the last one behind them.

    The tiles of a head are consecutive, so that its keys are read from memory once, and not again
    for each tile. Every other whole wave runs backwards: under a causal mask, each block then gets
    short tiles after long ones.
    """
    (tiles, heads, batches), blocks = shape, ct.num_blocks(0)
    begin = item // blocks * blocks
    if item // blocks % 2 == 1 and begin + blocks <= tiles * heads * batches:
        item = begin + (begin + blocks - 1 - item)
    item = min(item, tiles * heads * batches - 1)
    tile = item % tiles
    if CAUSAL:
        tile = tiles - 1 - tile  # the longest tiles first
    return tile, item // tiles % heads, item // (tiles * heads)


def widths_of(dim: int, least: int, pad: bool = False) -> tuple[int, int]:
    """Widths of the one or two tiles (the second 0), `least` or more, that hold `dim` columns; with
    `pad` one, a power of two.
    """
    whole = max(least, next_pow2(dim))
    first, second = whole // 2, max(least, next_pow2(dim - whole // 2))
    return (whole, 0) if pad or second >= first else (first, second)


def columns(ARRAY, batch, head, row, WIDTHS, TILE, LATENCY, ROWS_LAST=False):
    """Rows [row * TILE, + TILE) of ARRAY [batch, heads, rows, columns] as one or two tiles [TILE,
    width]; ROWS_LAST: rows are its last axis.
    """
    order = (0, 1, 3, 2) if ROWS_LAST else (0, 1, 2, 3)
    tiles: tuple = ()
    for i in ct.static_iter(range(2)):
        if WIDTHS[i]:
            at = (batch, head, row, WIDTHS[0] // WIDTHS[i] * i)
            tile = ct.load(ARRAY, at, (1, 1, TILE, WIDTHS[i]), order=order, padding_mode=ZERO, latency=LATENCY)
            tiles = (*tiles, tile.reshape((TILE, WIDTHS[i])))
    return tiles


def transposed_columns(ARRAY, batch, head, row, WIDTHS, TILE, LATENCY):
    """The same rows as one or two tiles [width, TILE]."""
    tiles: tuple = ()
    for i in ct.static_iter(range(2)):
        if WIDTHS[i]:
            at = (batch, head, WIDTHS[0] // WIDTHS[i] * i, row)
            tile = ct.load(ARRAY, at, (1, 1, WIDTHS[i], TILE), order=(0, 1, 3, 2), padding_mode=ZERO, latency=LATENCY)
            tiles = (*tiles, tile.reshape((WIDTHS[i], TILE)))
    return tiles


@ct.kernel
def transpose_kernel(V, TRANSPOSED, TILE_N: ct.Constant[int], WIDTH: ct.Constant[int]):
    """V [batch, heads, keys, v_dim] of 8 bits to TRANSPOSED [batch, heads, v_dim, keys or more], 0
    behind V's keys. Grid (tiles of TILE_N keys, heads, batch).

    Four keys of a column become a word, and the words are transposed: a transposition of bytes
    would write each alone to shared memory.
    """
    tile, head, batch = ct.bid(0), ct.bid(1), ct.bid(2)
    column = ct.arange(WIDTH, dtype=ct.int32)[None, :]
    words = ct.zeros((TILE_N // 4, WIDTH), dtype=ct.uint32)
    for i in ct.static_iter(range(4)):
        key = (tile * TILE_N + 4 * ct.arange(TILE_N // 4, dtype=ct.int32) + i)[:, None]
        codes = ct.bitcast(ct.gather(V, (batch, head, key, column), padding_value=0), ct.uint8)
        words = words | (codes.astype(ct.uint32) << (8 * i))
    codes = ct.bitcast(ct.pack_to_bytes(ct.transpose(words)), V.dtype)
    ct.store(TRANSPOSED, (batch, head, 0, tile), codes.reshape((1, 1, WIDTH, TILE_N)))


def summed_products(lefts, rights, TF32X3):
    """The sum of left @ right over the tiles of two tuples."""
    total = ct.zeros((lefts[0].shape[0], rights[0].shape[1]), dtype=ct.float32)
    for i in ct.static_iter(range(len(lefts))):
        if lefts[i].dtype == ct.float8_e4m3fn:
            total = ct.mma(lefts[i], rights[i], total, use_fast_acc=True)
        else:
            total = product(lefts[i], rights[i], total, TF32X3)
    return total


def softmax_over_keys(
    scores_of,
    values_of,
    first,
    n,
    window,
    scale,
    dtype,
    WIDTHS,
    CAUSAL,
    HAS_WINDOW,
    MASKED,
    TILE_M,
    TILE_N,
    TAIL_N,
    PARTS,
    TF32X3,
    AHEAD=False,
    part=(),
):
    """(sums of weights @ values, one tile for each of WIDTHS; maximum; denominator) of TILE_M
    queries over the keys 0..n that they see.

    scores_of(j, TILE): the scores of the j-th TILE keys, [TILE_M, TILE] in fp32, which `scale`
    brings to base 2. values_of(j, TILE): a tuple of their values, [TILE, width] each. first: the
    last key that the first query sees under a causal mask. dtype: of the weights.
    Steps are TILE_N keys long where every query sees all of them, else TAIL_N, a divisor. MASKED:
    there are such steps. AHEAD: `first` and `window` may count keys behind the query's own.
    part: a KV split and the number of all, equal shares of the steps; () for all steps.
    """
    # Steps of TILE_N: from `whole_from` to `whole_to`. Steps of TAIL_N: from `begin` on before
    # them, to `end` behind them.
    ratio = TILE_N // TAIL_N
    begin, end, whole_from, whole_to = 0, ct.cdiv(n, TAIL_N), 0, n // TILE_N
    if CAUSAL:
        end = min(end, ct.cdiv(max(0, first + TILE_M), TAIL_N))
        whole_to = min(whole_to, max(0, first + 1) // TILE_N)
    if HAS_WINDOW:
        begin = max(0, first - window + 1) // TAIL_N
        whole_from = ct.cdiv(max(0, first + TILE_M - window), TILE_N)
    if len(part):
        low = begin // ratio
        share = ct.cdiv(ct.cdiv(end, ratio) - low, part[1])
        low = low + part[0] * share
        begin, whole_from = max(begin, low * ratio), max(whole_from, low)
        end, whole_to = min(end, (low + share) * ratio), min(whole_to, low + share)
    sums: tuple = ()
    for i in ct.static_iter(range(2)):
        if WIDTHS[i]:
            sums = (*sums, ct.zeros((TILE_M, WIDTHS[i]), dtype=ct.float32))
    state = (sums, ct.full((TILE_M, 1), FLOOR, dtype=ct.float32), ct.zeros((TILE_M, 1), dtype=ct.float32))

    def step(j, state, TILE, HIDDEN):
        sums, maximum, denominator = state
        scores = scores_of(j, TILE)
        if HIDDEN:
            # Not before the loops: H200, causal, head_dim 128, 512 to 4096 queries 1 to 2 %
            # slower.
            row = first + ct.arange(TILE_M, dtype=ct.int32)[:, None]
            key = j * TILE + ct.arange(TILE, dtype=ct.int32)[None, :]
            seen = key < n
            if CAUSAL:
                # Without AHEAD no query of the sequence sees beyond n; the rows that pad the last
                # tile are not stored.
                seen = seen & (key <= row) if AHEAD else key <= row
            if HAS_WINDOW:
                seen = seen & (key > row - window)
            scores = ct.where(seen, scores, -math.inf)
        shift = SHIFT if dtype == ct.float8_e4m3fn else 0
        weights, factor, maximum, denominator = softmax_step(scores, maximum, denominator, scale, dtype, 1, PARTS, shift)
        values = values_of(j, TILE)
        new: tuple = ()
        for i in ct.static_iter(range(len(values))):
            if dtype == ct.float8_e4m3fn:
                # A product of one step in the tensor cores' short sums; over the steps in fp32, and
                # the factor comes with the addition.
                part = ct.mma(weights, values[i], ct.zeros((TILE_M, WIDTHS[i]), dtype=ct.float32), use_fast_acc=True)
                new = (*new, sums[i] * factor + part)
            else:
                new = (*new, product(weights, values[i], sums[i] * factor, TF32X3))
        return new, maximum, denominator

    # A loop for the whole tiles, and others for the partly hidden ones: a branch in one loop
    # keeps the compiler from overlapping the softmax of a step with the products of the next (H200,
    # causal, 1k to 4k queries: 10 to 25 % slower).
    if HAS_WINDOW:
        for j in range(begin, min(whole_from * ratio, end)):
            state = step(j, state, TAIL_N, True)
    for j in range(whole_from, whole_to):
        state = step(j, state, TILE_N, False)
    if MASKED:
        for j in range(max(whole_from, whole_to) * ratio, end):
            state = step(j, state, TAIL_N, True)
    return state


def normaliser_and_lse(maximum, denominator, dtype):
    """The factor of the sums, and the natural-log lse; 0 and -inf where no key was seen.
    dtype: of the sums once they are stored.
    """
    seen = ct.where(denominator == 0.0, 1.0, denominator)
    # Exact to the last bit, a division is 20 instructions and a branch at the end of a block, where
    # nothing hides them; this is off by 2**-23.
    inverse = 1.0 / seen if dtype == ct.float32 else ct.truediv(1.0, seen, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)
    return inverse, (maximum + ct.log2(denominator)) * LN2


def store_partial(PARTIAL, batch, split, head, tile, sums, factor, maximum, denominator, WIDTHS, TILE_M, columns):
    """The state of the tile-th TILE_M rows over one KV split, into PARTIAL [batch, splits, heads,
    rows, columns + 2 + pad]: sums * factor, maximum in base 2 and denominator.
    """
    values, state = PARTIAL.slice(4, 0, columns), PARTIAL.slice(4, columns, columns + 2)
    for i in ct.static_iter(range(len(sums))):
        at = (batch, split, head, tile, WIDTHS[0] // WIDTHS[i] * i)
        ct.store(values, at, (sums[i] * factor).reshape((1, 1, 1, TILE_M, WIDTHS[i])), allow_tma=False)
    ct.store(state, (batch, split, head, tile, 0), maximum.reshape((1, 1, 1, TILE_M, 1)))
    ct.store(state, (batch, split, head, tile, 1), denominator.reshape((1, 1, 1, TILE_M, 1)))


def store_rows(OUT, batch, head, tile, sums, normaliser, WIDTHS, TILE_M):
    """sums * normaliser, rounded, into the tile-th TILE_M rows of OUT [batch, heads, rows,
    columns].
    """
    for i in ct.static_iter(range(len(sums))):
        out = (sums[i] * normaliser).astype(OUT.dtype).reshape((1, 1, TILE_M, WIDTHS[i]))
        ct.store(OUT, (batch, head, tile, WIDTHS[0] // WIDTHS[i] * i), out)


def store_result(OUT, LSE, batch, head, tile, sums, normaliser, state, WIDTHS, TILE_M, part, columns, RETURN_LSE):
    """The tile-th TILE_M rows; of a KV split, part[0] of part[1], their state in place of them.

    state: maximum, denominator and lse.
    """
    if len(part) > 0:
        store_partial(OUT, batch, part[0], head, tile, sums, normaliser, state[0], state[1], WIDTHS, TILE_M, columns)
    else:
        store_rows(OUT, batch, head, tile, sums, normaliser, WIDTHS, TILE_M)
        if RETURN_LSE:
            ct.store(LSE, (batch, head, tile), state[2].reshape((1, 1, TILE_M)))
