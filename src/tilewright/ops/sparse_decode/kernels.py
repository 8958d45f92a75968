"""Tile code of `sparse_decode`: gathers the rows that a list names for `attention_decode`, or
attends to them where they are.
"""

import math

import cuda.tile as ct

from ...launch import next_pow2
from ..common.softmax_tiles import FLOOR, LN2, sink_factor, softmax_step
from ..common.tiles import LOG2E, ZERO
from .packed import ROPE as ROTATED


def list_length(INDICES, LENGTH, token, HAS_LENGTH):
    """Entries of the token's list that count."""
    most = INDICES.shape[1]
    if HAS_LENGTH:
        each = ct.num_blocks(1) // LENGTH.shape[0]  # a length serves all tokens of its sequence, or one
        most = max(0, min(ct.load(LENGTH, (token // each,), ()), most))
    return most


def _count(INDICES, token, end, rows, LIST):
    """How many entries of the list in front of `end` name one of the cache's rows."""
    total = ct.zeros((LIST,), ct.int32)
    for j in range(ct.cdiv(end, LIST)):
        row = ct.load(INDICES, (token, j), (1, LIST), padding_mode=ZERO, allow_tma=False).reshape((LIST,))
        named = (j * LIST + ct.arange(LIST, dtype=ct.int32) < end) & (row >= 0) & (row < rows)
        total = total + named.astype(ct.int32)
    return ct.sum(total)


def pieces(COLUMNS, MOST):
    """Columns cut into powers of two up to MOST, the largest first: of each its number, its width,
    and the multiple of that where it starts.
    """
    widths: list[int] = []
    while COLUMNS > sum(widths):
        widths.append(min(MOST, 1 << (COLUMNS - sum(widths)).bit_length() - 1))
    return [(i, width, sum(widths[:i]) // width) for i, width in enumerate(widths)]


def _load(KEYS, SCALES, ROPE, page, row, COLUMNS, GROUP, LATENCY):
    """One row of the cache as it is stored: a tuple of tiles."""
    tiles: tuple = ()
    if GROUP:
        # A power of two of columns: the last of them may be the rotated ones, and are not stored.
        # So no load is checked.
        WIDTH = ct.static_eval(next_pow2(COLUMNS - ROTATED))
        codes = ct.load(KEYS, (page, row, 0), (1, 1, WIDTH), check_bounds=False, latency=LATENCY, allow_tma=False)
        scales = ct.load(SCALES, (page, row, 0), (1, 1, WIDTH // GROUP), check_bounds=False, latency=LATENCY, allow_tma=False)
        tiles = codes, scales, ct.load(ROPE, (page, row, 0), (1, 1, ROTATED), check_bounds=False, latency=LATENCY, allow_tma=False)
    else:
        for i, width, at in ct.static_iter(pieces(COLUMNS, COLUMNS)):
            tile = ct.load(KEYS, (page, row, at), (1, 1, width), check_bounds=False, latency=LATENCY, allow_tma=False)
            tiles = (*tiles, tile)
    return tiles


def _store(OUT, token, place, tiles, COLUMNS, GROUP):
    """What `_load` found as a row of OUT, 8-bit columns widened."""
    if GROUP:
        codes, scales, rope = tiles
        WIDTH = codes.shape[2]
        if scales.dtype == ct.uint8:  # the exponent of a power of two
            scales = ct.bitcast(scales.astype(ct.int32) << 23, ct.float32)
        columns = codes.astype(ct.float32).reshape((WIDTH // GROUP, GROUP)) * scales.reshape((WIDTH // GROUP, 1))
        columns = columns.astype(OUT.dtype).reshape((1, 1, WIDTH))
        first = OUT.slice(2, 0, COLUMNS - ROTATED)
        ct.store(first, (token, place, 0), columns, check_bounds=WIDTH != COLUMNS - ROTATED, allow_tma=False)
        ct.store(OUT, (token, place, COLUMNS // ROTATED - 1), rope, check_bounds=False, allow_tma=False)
    else:
        for i, width, at in ct.static_iter(pieces(COLUMNS, COLUMNS)):
            ct.store(OUT, (token, place, at), tiles[i], check_bounds=False, allow_tma=False)


@ct.kernel
def sparse_decode_gather_kernel(
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
    OUT,
    COUNT,
    HAS_LENGTH: ct.Constant[bool],
    MORE: ct.Constant[bool],
    COLUMNS: ct.Constant[int],
    GROUP: ct.Constant[int],
    ROWS: ct.Constant[int],
    LIST: ct.Constant[int],
    LATENCY: ct.Constant[int],
):
    """ROWS entries of a token's list, or of its second list. Grid (pieces of both lists, tokens).

    A row goes behind those that earlier entries name, so that a token's rows have no gaps. What is
    behind them is not written.
    INDICES, MORE_INDICES int32 [tokens, entries]: page * page_size + row. LENGTH, MORE_LENGTH
    int32, one for a token or for a sequence's tokens.
    KEYS [pages, page_size, COLUMNS]; of codes, if GROUP is not 0: then SCALES [pages, page_size,
    one of each GROUP columns], fp32 or the exponent's byte, and ROPE [pages, page_size, 64], the
    last columns. OUT [tokens, most rows, COLUMNS], COUNT int32 [tokens]: its rows.
    LIST: entries that are counted at once. What a flag or a size of 0 says is absent is not
    touched.
    """
    piece, token = ct.bid(0), ct.bid(1)
    last = piece == ct.num_blocks(0) - 1

    def copy(INDICES, length, KEYS, SCALES, ROPE, first_entry, earlier):
        page_size, rows = KEYS.shape[1], KEYS.shape[0] * KEYS.shape[1]
        loaded: tuple = ()
        known: tuple = ()
        for i in ct.static_iter(range(ROWS)):
            row = ct.load(INDICES, (token, min(first_entry + i, INDICES.shape[1] - 1)), ())
            named = (first_entry + i < length) & (row >= 0) & (row < rows)
            # For an entry that names none, the first row is read and not stored: a load without a
            # branch around it does not wait for the one before.
            row = ct.where(named, row, 0)
            loaded = (*loaded, _load(KEYS, SCALES, ROPE, row // page_size, row % page_size, COLUMNS, GROUP, LATENCY))
            known = (*known, named)
        place = earlier + _count(INDICES, token, min(length, first_entry), rows, LIST)
        for i in ct.static_iter(range(ROWS)):
            if known[i]:
                _store(OUT, token, place, loaded[i], COLUMNS, GROUP)
            place = place + known[i].astype(ct.int32)
        if last:
            ct.scatter(COUNT, token, place)

    length = list_length(INDICES, LENGTH, token, HAS_LENGTH)
    if MORE:
        pieces = ct.cdiv(INDICES.shape[1], ROWS)
        if piece < pieces:
            copy(INDICES, length, KEYS, SCALES, ROPE, piece * ROWS, 0)
        else:
            earlier = _count(INDICES, token, length, KEYS.shape[0] * KEYS.shape[1], LIST)
            more_length = list_length(MORE_INDICES, MORE_LENGTH, token, HAS_LENGTH)
            copy(MORE_INDICES, more_length, MORE_KEYS, MORE_SCALES, MORE_ROPE, (piece - pieces) * ROWS, earlier)
    else:
        copy(INDICES, length, KEYS, SCALES, ROPE, piece * ROWS, 0)


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
    SPLIT_KV: ct.Constant[bool],
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
    """One block: ROWS heads of one token over one split of the entries of both lists.

    Grid (splits x tiles of the HEADS heads, tokens), the heads innermost: they read the same rows.
    Lists, lengths and caches as in `sparse_decode_gather_kernel`. Q [tokens, HEADS, 1, COLUMNS].
    Without SPLIT_KV: OUT [tokens, HEADS, 1, V_COLUMNS], LSE [tokens, HEADS, 1]. With SPLIT_KV OUT
    holds partials as those of attention_decode, whose merge follows.
    SINKS fp32 [HEADS]. scale: of the scores, times log2(e). AHEAD: a tile of entries is loaded one
    step before its rows; where the compiler itself keeps several tiles of rows in flight, that
    keeps it from doing so. LATE: the denominators are summed over the entries of a tile after the
    last.
    """
    # A tile of codes has one scale a row: with several, the compiler takes HMMA in place of HGMMA
    # and spills (sm_90, 256 columns).
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

    def attend(INDICES, length, KEYS, SCALES, ROPE, first, last, state):
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

    state = attend(INDICES, length, KEYS, SCALES, ROPE, first, min(last, tiles), state)
    if MORE:
        state = attend(MORE_INDICES, more_length, MORE_KEYS, MORE_SCALES, MORE_ROPE, max(first, tiles) - tiles, last - tiles, state)
    sums, maximum, denominator = state
    if LATE:
        denominator = ct.sum(denominator, axis=1, keepdims=True)

    if SPLIT_KV:
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
