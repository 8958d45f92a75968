"""Tile code of `sparse_decode` in one kernel: attention that reads the rows where they are."""

import math

import cuda.tile as ct

from ..attention_common import FLOOR, LN2, LOG2E, sink_factor, softmax_step
from .kernel import list_length, pieces

ZERO = ct.PaddingMode.ZERO


@ct.kernel
def sparse_decode_kernel(
    INDICES,
    LENGTH,
    KEYS,
    SCALES,
    ROPE,
    MORE_INDICES,
    MORE_LENGTH,
    MORE_KEYS,
    MORE_SCALES,
    MORE_ROPE,
    Q,
    OUT,
    LSE,
    SINKS,
    scale: float,
    HAS_LENGTH: ct.Constant[bool],
    MORE: ct.Constant[bool],
    HAS_SINKS: ct.Constant[bool],
    RETURN_LSE: ct.Constant[bool],
    SPLIT: ct.Constant[bool],
    HEADS: ct.Constant[int],
    ROWS: ct.Constant[int],
    COLUMNS: ct.Constant[int],
    GROUP: ct.Constant[int],
    V_COLUMNS: ct.Constant[int],
    TILE_N: ct.Constant[int],
    AHEAD: ct.Constant[bool],
    LATENCY: ct.Constant[int],
    LATE: ct.Constant[bool],
):
    """One block: ROWS heads of one token over one range of the entries of both lists.

    Grid (splits x tiles of the HEADS heads, tokens), the heads innermost: they read the same rows.
    Lists, lengths and caches as in `sparse_decode_gather_kernel`. Q [tokens, HEADS, 1, COLUMNS]. Without SPLIT: OUT [tokens, HEADS, 1, V_COLUMNS],
    LSE [tokens, HEADS, 1]. With SPLIT OUT holds partials as those of attention_decode, whose merge follows.
    SINKS fp32 [HEADS]. scale: of the scores, times log2(e). AHEAD: a tile of entries is loaded one step before its rows; where the compiler itself
    keeps several tiles of rows in flight, that keeps it from doing so. LATE: the denominators are summed over the entries of a tile after the last.
    """
    # A tile of codes has one scale a row: with several, the compiler takes HMMA in place of HGMMA and spills (sm_90, 256 columns).
    MOST = 64 if GROUP else 256
    row_tiles = ct.cdiv(HEADS, ROWS)
    heads, split, token = ct.bid(0) % row_tiles, ct.bid(0) // row_tiles, ct.bid(1)
    length = list_length(INDICES, LENGTH, token, HAS_LENGTH)
    tiles, more_tiles, more_length = ct.cdiv(length, TILE_N), 0, 0
    if MORE:
        more_length = list_length(MORE_INDICES, MORE_LENGTH, token, HAS_LENGTH)
        more_tiles = ct.cdiv(more_length, TILE_N)
    per_split = ct.cdiv(tiles + more_tiles, ct.num_blocks(0) // row_tiles)
    first = split * per_split
    last = min(tiles + more_tiles, first + per_split)

    qs: tuple = ()
    sums: tuple = ()
    for i, width, at in ct.static_iter(pieces(COLUMNS, MOST)):
        qs = (*qs, ct.load(Q, (token, heads, 0, at), (1, ROWS, 1, width), padding_mode=ZERO).reshape((ROWS, width)))
        if at * width < V_COLUMNS:
            sums = (*sums, ct.zeros((ROWS, width), ct.float32))
    state = (sums, ct.full((ROWS, 1), FLOOR, ct.float32), ct.zeros((ROWS, TILE_N if LATE else 1), ct.float32))

    def walk(INDICES, length, KEYS, SCALES, ROPE, first, last, state):
        page_size, rows = KEYS.shape[1], KEYS.shape[0] * KEYS.shape[1]

        def named(j):
            """The rows of one tile of entries, -1 for those that name none."""
            j = max(0, min(j, ct.cdiv(INDICES.shape[1], TILE_N) - 1))
            row = ct.load(INDICES, (token, j), (1, TILE_N), padding_mode=ZERO, allow_tma=False).reshape((TILE_N,))
            entry = j * TILE_N + ct.arange(TILE_N, dtype=ct.int32)
            return ct.where((entry < length) & (row < rows), row, -1)

        def load(page, row, seen, i, width, at):
            """Columns of a tile of rows, zeros for holes."""
            column = ct.expand_dims(ct.arange(width, dtype=ct.int32), 0)
            if GROUP == 0:
                return ct.gather(KEYS, (page, row, at * width + column), mask=seen, check_bounds=False, latency=LATENCY)
            if (i + 1) * width == COLUMNS:
                return ct.gather(ROPE, (page, row, column), mask=seen, check_bounds=False, latency=LATENCY)
            codes = ct.gather(KEYS, (page, row, at * width + column), mask=seen, check_bounds=False, latency=LATENCY)
            scale = ct.gather(SCALES, (page, row, at * width // GROUP), mask=seen, check_bounds=False, latency=LATENCY)
            if SCALES.dtype == ct.uint8:  # the exponent of a power of two
                scale = ct.bitcast(scale.astype(ct.int32) << 23, ct.float32)
            return (codes.astype(ct.float32) * scale).astype(Q.dtype)

        following = named(first) if AHEAD else 0
        for j in range(first, last):
            sums, maximum, denominator = state
            row = following if AHEAD else named(j)
            seen = row >= 0
            inside = ct.where(seen, row, 0)
            at_row = ct.expand_dims(inside // page_size, 1), ct.expand_dims(inside % page_size, 1), ct.expand_dims(seen, 1)
            ks: tuple = ()
            for i, width, at in ct.static_iter(pieces(COLUMNS, MOST)):
                ks = (*ks, load(*at_row, i, width, at))
            if AHEAD:
                following = named(j + 1)
            scores = ct.zeros((ROWS, TILE_N), ct.float32)
            for i in ct.static_iter(range(len(qs))):
                scores = ct.mma(qs[i], ct.transpose(ks[i]), scores)
            scores = ct.where(ct.expand_dims(seen, 0), scores, -math.inf)
            weights, factor, maximum, denominator = softmax_step(scores, maximum, denominator, scale, Q.dtype, 1, 1, LATE=LATE)
            totals: tuple = ()
            for i in ct.static_iter(range(len(sums))):
                totals = (*totals, ct.mma(weights, ks[i], sums[i] * factor))
            state = (totals, maximum, denominator)
        return state

    state = walk(INDICES, length, KEYS, SCALES, ROPE, first, min(last, tiles), state)
    if MORE:
        state = walk(MORE_INDICES, more_length, MORE_KEYS, MORE_SCALES, MORE_ROPE, max(first, tiles) - tiles, last - tiles, state)
    sums, maximum, denominator = state
    if LATE:
        denominator = ct.sum(denominator, axis=1, keepdims=True)

    if SPLIT:
        part, rest = OUT.slice(4, 0, V_COLUMNS), OUT.slice(4, V_COLUMNS, V_COLUMNS + 2)
        for i, width, at in ct.static_iter(pieces(COLUMNS, MOST)):
            if at * width < V_COLUMNS:
                ct.store(part, (token, split, heads, 0, at), sums[i].reshape((1, 1, ROWS, 1, width)))
        ct.store(rest, (token, split, heads, 0, 0), maximum.reshape((1, 1, ROWS, 1, 1)))
        ct.store(rest, (token, split, heads, 0, 1), denominator.reshape((1, 1, ROWS, 1, 1)))
    else:
        factor = 1.0 / ct.where(denominator == 0.0, 1.0, denominator)
        if HAS_SINKS:
            sink = ct.load(SINKS, (heads,), (ROWS,), padding_mode=ZERO).reshape((ROWS, 1)) * LOG2E
            factor = sink_factor(maximum, denominator, sink)
        for i, width, at in ct.static_iter(pieces(COLUMNS, MOST)):
            if at * width < V_COLUMNS:
                ct.store(OUT, (token, heads, 0, at), (sums[i] * factor).astype(OUT.dtype).reshape((1, ROWS, 1, width)))
        if RETURN_LSE:
            ct.store(LSE, (token, heads, 0), ((maximum + ct.log2(denominator)) * LN2).reshape((1, ROWS, 1)))
