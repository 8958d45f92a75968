"""The kernels of `causal_conv1d`."""

import cuda.tile as ct

from ...launch import next_pow2
from ..common.attention_tiles import packed_tile
from ..common.pdl import pdl_overlap
from ..common.tiles import Rows, gated


def taps_of(WEIGHT, j, TILE_N, COLS, WIDTH):
    """The weights of tile j of the channels, a row [1, TILE_N] for each input of a result.

    WEIGHT [COLS * WIDTH]. They come as they lie, all weights of a channel in one load.
    """
    across = ct.static_eval(next_pow2(WIDTH))
    if COLS % TILE_N == 0 and WIDTH == across:
        tile = ct.load(WEIGHT, (j,), (TILE_N * across,), check_bounds=False, allow_tma=False)
    else:
        at = ct.arange(TILE_N * across, dtype=ct.int32)
        channel, i = at // across + j * TILE_N, at % across
        tile = ct.gather(WEIGHT, channel * WIDTH + i, mask=(channel < COLS) & (i < WIDTH), padding_value=0, check_bounds=False)
    tile = tile.reshape((TILE_N, across))
    rows: tuple = ()
    for i in ct.static_iter(range(WIDTH)):
        rows = (*rows, ct.extract(tile, (0, i), (TILE_N, 1)).reshape((1, TILE_N)).astype(ct.float32))
    return rows


def bias_of(BIAS, j, TILE_N, HAS_BIAS):
    """[1, TILE_N]: what sums begin with."""
    if HAS_BIAS:
        return ct.load(BIAS, (j,), (TILE_N,), padding_mode=ct.PaddingMode.ZERO, allow_tma=False).reshape((1, TILE_N)).astype(ct.float32)
    return ct.zeros((1, TILE_N), dtype=ct.float32)


def convolved(inputs, first, weights, start, SILU):
    """start + inputs[first] * weights[0] + inputs[first + 1] * weights[1] + .., and the activation
    of that.
    """
    y = start
    for k in ct.static_iter(range(len(weights))):
        y = y + inputs[first + k].astype(ct.float32) * weights[k]
    return gated(y, 1.0, False) if SILU else y


def one_tile(rows):
    """A tile of rows, as many as a power of two."""
    for _ in ct.static_iter(range(6)):
        if len(rows) > 1:
            pairs: tuple = ()
            for i in ct.static_iter(range(len(rows) // 2)):
                pairs = (*pairs, ct.cat((rows[2 * i], rows[2 * i + 1]), 0))
            rows = pairs
    return rows[0]


@ct.kernel
def causal_conv1d_kernel(
    X: Rows,
    WEIGHT,
    BIAS,
    STATE,
    OUT: Rows,
    CU_SEQLENS,
    tokens: int,
    VARLEN: ct.Constant[bool],
    SILU: ct.Constant[bool],
    HAS_BIAS: ct.Constant[bool],
    WIDTH: ct.Constant[int],
    TAPS: ct.Constant[int],
    COLS: ct.Constant[int],
    STEPS: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
):
    """STEPS tiles of TILE_M tokens and TILE_N channels. Grid (runs of tokens * tiles of channels).

    X, OUT [all tokens, COLS]; WEIGHT [COLS * WIDTH]; BIAS [COLS]; STATE [sequences, TAPS, COLS];
    CU_SEQLENS [sequences + 1] int32. tokens: of each sequence without VARLEN. The block of a
    sequence's first tokens, which alone reads the state, also moves it on; no tile is so short that
    another sees it. A tile's rows load while the one before is computed, which leaves its last rows
    in registers.
    """
    pdl_overlap()
    columns = ct.cdiv(COLS, TILE_N)
    j, place = ct.bid(0) % columns, ct.bid(0) // columns
    if VARLEN:
        seq, c = packed_tile(CU_SEQLENS, place, TILE_M * STEPS)
        begin, end = ct.load(CU_SEQLENS, (seq,), ()).astype(ct.int64), ct.load(CU_SEQLENS, (seq + 1,), ()).astype(ct.int64)
    else:
        runs = ct.cdiv(tokens, TILE_M * STEPS)
        seq, c = place // runs, place % runs
        begin, end = ct.astype(seq, ct.int64) * tokens, (ct.astype(seq, ct.int64) + 1) * tokens
    n = ct.astype(end - begin, ct.int32)
    X, OUT = X.slice(0, begin, end), OUT.slice(0, begin, end)

    weights, start = taps_of(WEIGHT, j, TILE_N, COLS, WIDTH), bias_of(BIAS, j, TILE_N, HAS_BIAS)
    channel = (ct.arange(TILE_N, dtype=ct.int32) + j * TILE_N)[None, :]
    there = channel < COLS

    def inputs_at(t):
        """[rows, TILE_N]: the inputs of tokens t [rows, 1], also in front of the sequence."""
        found = ct.gather(X, (t, channel), mask=there & (t >= 0) & (t < n), padding_value=0, check_bounds=False)
        if TAPS > 0:
            kept = ct.gather(STATE, (seq, TAPS + t, channel), mask=there & (t < 0), padding_value=0, check_bounds=False)
            found = ct.where(t < 0, kept, found)
        return found

    def rows_from(first, ROWS):
        """Tiles [1, TILE_N]: a thread has all rows of its channels."""
        rows: tuple = ()
        for i in ct.static_iter(range(ROWS)):
            rows = (*rows, ct.load(X, (first + i, j), (1, TILE_N), check_bounds=False, allow_tma=False))
        return rows

    def at_an_end(tile):
        inputs: tuple = ()
        for i in ct.static_iter(range(WIDTH)):
            inputs = (*inputs, inputs_at(tile * TILE_M - (WIDTH - 1) + i + ct.arange(TILE_M, dtype=ct.int32)[:, None]))
        return convolved(inputs, 0, weights, start, SILU).astype(OUT.dtype)

    def move_state():
        last: tuple = ()
        for i in ct.static_iter(range(TAPS)):
            last = (*last, inputs_at(ct.full((1, 1), n - TAPS + i, dtype=ct.int32)))
        for i in ct.static_iter(range(TAPS)):
            ct.scatter(STATE, (seq, i, channel), last[i], mask=there, check_bounds=False)

    tiles, whole = ct.cdiv(n, TILE_M), n // TILE_M
    first, last = max(c * STEPS, 0), min(c * STEPS + STEPS, tiles)
    inner, outer = max(first, 1), min(last, whole)  # tiles whose inputs all lie in the sequence
    if COLS % TILE_N == 0 and inner < outer:
        before, now = rows_from(inner * TILE_M - (WIDTH - 1), WIDTH - 1), rows_from(inner * TILE_M, TILE_M)
        for tile in range(inner, outer):
            ahead = rows_from(min(tile + 1, outer - 1) * TILE_M, TILE_M)
            inputs = (*before, *now)
            results: tuple = ()
            for i in ct.static_iter(range(TILE_M)):
                results = (*results, convolved(inputs, i, weights, start, SILU).astype(OUT.dtype))
            ct.store(OUT, (tile, j), one_tile(results), check_bounds=False, allow_tma=False)
            before, now = now[TILE_M - (WIDTH - 1) :], ahead
    for tile in range(first, last):
        if COLS % TILE_N > 0 or tile == 0 or tile == whole:
            ct.store(OUT, (tile, j), at_an_end(tile), allow_tma=False)
    if TAPS > 0 and c == 0 and n > 0:
        move_state()


@ct.kernel
def one_token_kernel(
    X: Rows,
    WEIGHT,
    BIAS,
    STATE,
    OUT: Rows,
    SILU: ct.Constant[bool],
    HAS_BIAS: ct.Constant[bool],
    WIDTH: ct.Constant[int],
    TAPS: ct.Constant[int],
    COLS: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
):
    """One token of each of TILE_M sequences, TILE_N channels. Grid (tiles of sequences * tiles of
    channels); arrays as in the other.
    """
    pdl_overlap()
    columns = ct.cdiv(COLS, TILE_N)
    j, place = ct.bid(0) % columns, ct.bid(0) // columns
    seq, channel = place * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None], (ct.arange(TILE_N, dtype=ct.int32) + j * TILE_N)[None, :]
    there = (seq < X.shape[0]) & (channel < COLS)
    inputs: tuple = ()
    for i in ct.static_iter(range(TAPS)):
        inputs = (*inputs, ct.gather(STATE, (seq, i, channel), mask=there, padding_value=0, check_bounds=False))
    if TAPS == 0:
        for _ in ct.static_iter(range(WIDTH - 1)):
            inputs = (*inputs, ct.zeros((TILE_M, TILE_N), dtype=X.dtype))
    inputs = (*inputs, ct.gather(X, (seq, channel), mask=there, padding_value=0, check_bounds=False))
    weights, start = taps_of(WEIGHT, j, TILE_N, COLS, WIDTH), bias_of(BIAS, j, TILE_N, HAS_BIAS)
    y = convolved(inputs, len(inputs) - WIDTH, weights, start, SILU)
    ct.scatter(OUT, (seq, channel), y.astype(OUT.dtype), mask=there, check_bounds=False)
    for i in ct.static_iter(range(TAPS)):
        ct.scatter(STATE, (seq, i, channel), inputs[i + 1], mask=there, check_bounds=False)
