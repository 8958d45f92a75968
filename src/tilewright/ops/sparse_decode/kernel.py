"""Tile code of `sparse_decode` in front of the attention: the rows that a list names, one behind the other."""

import cuda.tile as ct

ZERO = ct.PaddingMode.ZERO
COLUMNS = 64  # copied at once: of every layout's columns, and of its scales' groups, a divisor


def _seen(row, at, length, rows):
    """Which entries of a list name a row: those in front of its length, but for holes."""
    return (at < length) & (row >= 0) & (row < rows)


def _length(INDICES, LENGTH, token, HAS_LENGTH):
    """Entries of the token's list that count."""
    most = INDICES.shape[1]
    if HAS_LENGTH:
        each = ct.num_blocks(1) // LENGTH.shape[0]  # a length serves all tokens of its sequence, or one
        most = max(0, min(ct.load(LENGTH, (token // each,), ()), most))
    return most


def _count(INDICES, token, end, rows, LIST):
    """How many entries of the list in front of `end` name a row."""
    total = ct.zeros((LIST,), ct.int32)
    for j in range(ct.cdiv(end, LIST)):
        row = ct.load(INDICES, (token, j), (1, LIST), padding_mode=ZERO, allow_tma=False).reshape((LIST,))
        total = total + _seen(row, j * LIST + ct.arange(LIST, dtype=ct.int32), end, rows).astype(ct.int32)
    return ct.sum(total)


def _rows(KEYS, SCALES, ROPE, row, DTYPE, CODE_COLUMNS, GROUP, LATENCY):
    """Rows of the cache, as tiles [rows, COLUMNS] of DTYPE."""
    page, row = row // KEYS.shape[1], row % KEYS.shape[1]
    page, row = ct.expand_dims(page, 1), ct.expand_dims(row, 1)
    column = ct.expand_dims(ct.arange(COLUMNS, dtype=ct.int32), 0)
    tiles: tuple = ()
    scales: tuple = ()
    if GROUP:
        for i in ct.static_iter(range(CODE_COLUMNS // GROUP)):
            scale = ct.gather(SCALES, (page, row, i), check_bounds=False, latency=LATENCY)
            if SCALES.dtype == ct.uint8:
                scale = ct.bitcast(scale.astype(ct.int32) << 23, ct.float32)
            scales = (*scales, scale)
    for i in ct.static_iter(range(CODE_COLUMNS // COLUMNS)):
        tile = ct.gather(KEYS, (page, row, i * COLUMNS + column), check_bounds=False, latency=LATENCY)
        if GROUP:
            tile = (tile.astype(ct.float32) * scales[i * COLUMNS // GROUP]).astype(DTYPE)
        tiles = (*tiles, tile)
    if GROUP:
        tiles = (*tiles, ct.gather(ROPE, (page, row, column), check_bounds=False, latency=LATENCY))
    return tiles


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
    MORE_HAS_LENGTH: ct.Constant[bool],
    CODE_COLUMNS: ct.Constant[int],
    GROUP: ct.Constant[int],
    ROWS: ct.Constant[int],
    LIST: ct.Constant[int],
    LATENCY: ct.Constant[int],
):
    """ROWS entries of a token's list, or of its second list. Grid (pieces of both lists, tokens).

    A row goes behind those that earlier entries name, so that those of a token are without gaps; what is behind them is not written.
    INDICES, MORE_INDICES int32 [tokens, entries]: page * page_size + row. LENGTH, MORE_LENGTH int32, one for a token or for a sequence's tokens.
    KEYS [pages, page_size, CODE_COLUMNS]; of codes, if GROUP is not 0: then SCALES [pages, page_size, groups of GROUP columns], fp32 or the
    exponent's byte, and ROPE [pages, page_size, 64]. OUT [tokens, most rows, columns], COUNT int32 [tokens]: its rows.
    LIST: entries that are counted at once. What a flag or a size of 0 says is absent is not touched.
    """
    piece, token = ct.bid(0), ct.bid(1)
    last = piece == ct.num_blocks(0) - 1
    entry, column = ct.arange(ROWS, dtype=ct.int32), ct.expand_dims(ct.arange(COLUMNS, dtype=ct.int32), 0)

    def copy(INDICES, length, KEYS, SCALES, ROPE, piece, earlier):
        rows = KEYS.shape[0] * KEYS.shape[1]
        row = ct.load(INDICES, (token, piece), (1, ROWS), padding_mode=ZERO, allow_tma=False).reshape((ROWS,))
        seen = _seen(row, piece * ROWS + entry, length, rows)
        # For an entry that names none, the first row is read and not stored: no branch keeps the loads apart.
        tiles = _rows(KEYS, SCALES, ROPE, ct.where(seen, row, 0), OUT.dtype, CODE_COLUMNS, GROUP, LATENCY)
        first = earlier + _count(INDICES, token, min(length, piece * ROWS), rows, LIST)
        one = seen.astype(ct.int32)
        place, stored = ct.expand_dims(first + ct.cumsum(one) - one, 1), ct.expand_dims(seen, 1)
        for i in ct.static_iter(range(len(tiles))):
            ct.scatter(OUT, (token, place, i * COLUMNS + column), tiles[i], mask=stored, check_bounds=False)
        if last:
            ct.scatter(COUNT, token, first + ct.sum(one))

    length = _length(INDICES, LENGTH, token, HAS_LENGTH)
    if MORE:
        pieces = ct.cdiv(INDICES.shape[1], ROWS)
        if piece < pieces:
            copy(INDICES, length, KEYS, SCALES, ROPE, piece, 0)
        else:
            earlier = _count(INDICES, token, length, KEYS.shape[0] * KEYS.shape[1], LIST)
            more_length = _length(MORE_INDICES, MORE_LENGTH, token, MORE_HAS_LENGTH)
            copy(MORE_INDICES, more_length, MORE_KEYS, MORE_SCALES, MORE_ROPE, piece - pieces, earlier)
    else:
        copy(INDICES, length, KEYS, SCALES, ROPE, piece, 0)
