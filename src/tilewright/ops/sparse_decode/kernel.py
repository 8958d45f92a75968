"""Tile code of `sparse_decode` in front of the attention: the rows that a list names, one behind the other."""

import cuda.tile as ct

from ...launch import next_pow2
from .packed import ROPE as ROTATED

ZERO = ct.PaddingMode.ZERO


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
    """Columns cut into powers of two up to MOST, the largest first: of each its number, its width, and the multiple of that where it starts."""
    widths: list[int] = []
    while COLUMNS > sum(widths):
        widths.append(min(MOST, 1 << (COLUMNS - sum(widths)).bit_length() - 1))
    return [(i, width, sum(widths[:i]) // width) for i, width in enumerate(widths)]


def _load(KEYS, SCALES, ROPE, page, row, COLUMNS, GROUP, LATENCY):
    """One row of the cache as it is stored: a tuple of tiles."""
    tiles: tuple = ()
    if GROUP:
        # A power of two of columns: the last of them may be the rotated ones, and are not stored. So no load is checked.
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

    A row goes behind those that earlier entries name, so that those of a token are without gaps; what is behind them is not written.
    INDICES, MORE_INDICES int32 [tokens, entries]: page * page_size + row. LENGTH, MORE_LENGTH int32, one for a token or for a sequence's tokens.
    KEYS [pages, page_size, COLUMNS]; of codes, if GROUP is not 0: then SCALES [pages, page_size, one of each GROUP columns], fp32 or the exponent's
    byte, and ROPE [pages, page_size, 64], the last columns. OUT [tokens, most rows, COLUMNS], COUNT int32 [tokens]: its rows.
    LIST: entries that are counted at once. What a flag or a size of 0 says is absent is not touched.
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
            # For an entry that names none, the first row is read and not stored: a load without a branch around it does not wait for the one before.
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
