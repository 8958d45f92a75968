"""Tile code of `ssd`: token after token, or a chunk of tokens at a time.

Inside a chunk, with G_i the sum of its log2 decays up to token i, and S [state, head_dim]:

    M = tril(C B^T 2**(G_i - G_j) dt_j)
    O = 2**G C S + M X          S <- 2**G_last S + B^T (2**(G_last - G) dt X)

One launch holds the state in registers from a sequence's first chunk to its last. Where that leaves
SMs idle, `carry_kernel` finds the state behind each segment as if it began with nothing,
`link_kernel` the true state in front of each, and the segments run at once.
"""

import cuda.tile as ct

from ..common.attention_tiles import place_of
from ..common.pdl import pdl_overlap
from ..common.recurrence import FLOOR, LEAST_DECAY, row_of
from ..common.tiles import LOG2E, ZERO, gated, load_tile, rows_from

ODD = (1 / 13, 1 / 11, 1 / 9, 1 / 7, 1 / 5, 1 / 3)


def softplus(x):
    """log(1 + exp(x)): by atanh's series, since a logarithm of a number near 1 has lost the digits
    of a small one.
    """
    y = ct.exp(-ct.abs(x))
    s = y / (y + 2.0)
    square = s * s
    series = square * (1 / 15)
    for coefficient in ct.static_iter(ODD):
        series = (series + coefficient) * square
    return ct.maximum(x, 0.0) + 2.0 * s * (1.0 + series)


def step_of(raw, DT_BIAS, h, dt_min, dt_max, HAS_BIAS, SOFTPLUS):
    """dt of tokens of a head."""
    dt = raw.astype(ct.float32)
    if HAS_BIAS:
        dt = dt + ct.load(DT_BIAS, (h,), ()).astype(ct.float32)
    if SOFTPLUS:
        dt = softplus(dt)
    return ct.minimum(ct.maximum(dt, dt_min, propagate_nan=True), dt_max, propagate_nan=True)


def tokens_of(CU_SEQLENS, X, seq, VARLEN):
    """X [1 or sequences, tokens, ...] with the tokens of a sequence alone."""
    if VARLEN:
        return rows_from(X, 1, ct.load(CU_SEQLENS, (seq,), ()), ct.load(CU_SEQLENS, (seq + 1,), ()))
    return X


def row_of_state(STATE_ROWS, seq, HAS_ROWS):
    if HAS_ROWS:
        return ct.load(STATE_ROWS, (seq,), ())
    return seq


@ct.kernel
def recurrent_kernel(
    X,
    DT,
    A,
    B,
    C,
    D,
    DT_BIAS,
    Z,
    STATE,
    STATE_ROWS,
    OUT,
    CU_SEQLENS,
    dt_min: float,
    dt_max: float,
    VARLEN: ct.Constant[bool],
    HAS_STATE: ct.Constant[bool],
    HAS_ROWS: ct.Constant[bool],
    HAS_D: ct.Constant[bool],
    HAS_BIAS: ct.Constant[bool],
    HAS_Z: ct.Constant[bool],
    SOFTPLUS: ct.Constant[bool],
    ONE: ct.Constant[bool],
    WHOLE: ct.Constant[bool],
    GROUP: ct.Constant[int],
    BLOCKS: ct.Constant[int],
    TILE_N: ct.Constant[int],
    TILE_P: ct.Constant[int],
):
    """Tokens of one sequence in order; TILE_P rows of the state of one head stay in registers. Grid
    (BLOCKS * heads * sequences).

    X, Z, OUT [batch, tokens, heads, head_dim]; DT [batch, tokens, heads]; A, D, DT_BIAS [heads];
    B, C [batch, tokens, groups, state_dim]; STATE [rows, heads, head_dim, state_dim] fp32,
    overwritten with HAS_STATE; STATE_ROWS [sequences] int32: the row of each; CU_SEQLENS [sequences
    + 1] int32, for arrays whose batch axis is 1. ONE: of one token each. WHOLE: every tile of a
    state lies inside.
    """
    pdl_overlap()
    j, item = ct.bid(0) % BLOCKS, ct.bid(0) // BLOCKS
    h, seq = item % X.shape[2], item // X.shape[2]
    g, at, place = h // GROUP, row_of_state(STATE_ROWS, seq, HAS_ROWS), 0 if VARLEN else seq
    X, DT, B, C = (
        tokens_of(CU_SEQLENS, X, seq, VARLEN),
        tokens_of(CU_SEQLENS, DT, seq, VARLEN),
        tokens_of(CU_SEQLENS, B, seq, VARLEN),
        tokens_of(CU_SEQLENS, C, seq, VARLEN),
    )
    OUT = tokens_of(CU_SEQLENS, OUT, seq, VARLEN)
    if HAS_Z:
        Z = tokens_of(CU_SEQLENS, Z, seq, VARLEN)
    decay = ct.load(A, (h,), ()).astype(ct.float32)
    skip = ct.load(D, (h,), ()).astype(ct.float32) if HAS_D else 0.0
    s = ct.zeros((TILE_P, TILE_N), dtype=ct.float32)
    if HAS_STATE:
        s = load_tile(STATE, (at, h, j, 0), (1, 1, TILE_P, TILE_N), ZERO, WHOLE, None, False).reshape((TILE_P, TILE_N))

    def row(ARRAY, t, head, column, size):
        return row_of(ARRAY, (place, t, head), column, size, WHOLE)

    def step(s, t):
        dt = step_of(ct.load(DT, (place, t, h), ()), DT_BIAS, h, dt_min, dt_max, HAS_BIAS, SOFTPLUS)
        x, b, c = row(X, t, h, j, TILE_P), row(B, t, g, 0, TILE_N), row(C, t, g, 0, TILE_N)
        s = s * ct.exp(dt * decay) + (dt * x)[:, None] * b[None, :]
        out = ct.sum(s * c[None, :], 1)
        if HAS_D:
            out = out + skip * x
        if HAS_Z:
            out = gated(row(Z, t, h, j, TILE_P), out, False)
        ct.store(OUT, (place, t, h, j), out.astype(OUT.dtype).reshape((1, 1, 1, TILE_P)), check_bounds=not WHOLE, allow_tma=False)
        return s

    if ONE:
        s = step(s, 0)
    else:
        for t in range(X.shape[1]):
            s = step(s, t)
    if HAS_STATE:
        ct.store(STATE, (at, h, j, 0), s.reshape((1, 1, TILE_P, TILE_N)), check_bounds=not WHOLE, allow_tma=False)


def steps_of_chunk(DT, A, DT_BIAS, place, c, h, dt_min, dt_max, HAS_BIAS, SOFTPLUS, CHUNK):
    """(dt, log2 of the decays up to each token, and of all) of a chunk; 0 behind the last token."""
    raw = ct.load(DT, (place, c, h), (1, CHUNK, 1), padding_mode=ZERO, allow_tma=False).reshape((CHUNK,))
    there = c * CHUNK + ct.arange(CHUNK, dtype=ct.int32) < DT.shape[1]
    dt = ct.where(there, step_of(raw, DT_BIAS, h, dt_min, dt_max, HAS_BIAS, SOFTPLUS), 0.0)
    g = ct.maximum(dt * (ct.load(A, (h,), ()).astype(ct.float32) * LOG2E), LEAST_DECAY, propagate_nan=True)
    return dt, ct.cumsum(g, 0), ct.sum(g)


def tile_of(ARRAY, place, c, head, column, CHUNK, TILE, LATENCY):
    return ct.load(ARRAY, (place, c, head, column), (1, CHUNK, 1, TILE), padding_mode=ZERO, latency=LATENCY).reshape((CHUNK, TILE))


def moved_on(s, x, b, dt, sums, total):
    """The state behind a chunk."""
    written = (x.astype(ct.float32) * (ct.exp2(total - sums) * dt)[:, None]).astype(b.dtype)
    return ct.mma(ct.transpose(b), written, s * ct.exp2(total))


@ct.kernel
def scan_kernel(
    X,
    DT,
    A,
    B,
    C,
    D,
    DT_BIAS,
    Z,
    STATE,
    STATE_ROWS,
    LOCAL,
    OUT,
    CU_SEQLENS,
    dt_min: float,
    dt_max: float,
    VARLEN: ct.Constant[bool],
    HAS_STATE: ct.Constant[bool],
    HAS_ROWS: ct.Constant[bool],
    HAS_D: ct.Constant[bool],
    HAS_BIAS: ct.Constant[bool],
    HAS_Z: ct.Constant[bool],
    SOFTPLUS: ct.Constant[bool],
    SEGMENT: ct.Constant[int],
    GROUP: ct.Constant[int],
    BLOCKS: ct.Constant[int],
    CHUNK: ct.Constant[int],
    TILE_N: ct.Constant[int],
    TILE_P: ct.Constant[int],
    LATENCY: ct.Constant[int],
):
    """Chunks of one segment of a sequence in order; TILE_P columns of the state of one head stay in
    registers. Grid (BLOCKS * heads * segments).

    Arrays as in the recurrent kernel. SEGMENT: chunks of a segment; 0 for whole sequences.
    LOCAL [segments, heads, TILE_N, BLOCKS * TILE_P] fp32: the state in front of each segment.
    """
    j, item = ct.bid(0) % BLOCKS, ct.bid(0) // BLOCKS
    h, part = item % X.shape[2], item // X.shape[2]
    seq, segment = place_of(CU_SEQLENS, part, SEGMENT * CHUNK, X.shape[1], VARLEN)
    g, place = h // GROUP, 0 if VARLEN else seq
    X, DT, B, C = (
        tokens_of(CU_SEQLENS, X, seq, VARLEN),
        tokens_of(CU_SEQLENS, DT, seq, VARLEN),
        tokens_of(CU_SEQLENS, B, seq, VARLEN),
        tokens_of(CU_SEQLENS, C, seq, VARLEN),
    )
    OUT = tokens_of(CU_SEQLENS, OUT, seq, VARLEN)
    if HAS_Z:
        Z = tokens_of(CU_SEQLENS, Z, seq, VARLEN)
    skip = ct.load(D, (h,), ()).astype(ct.float32) if HAS_D else 0.0
    chunks = ct.cdiv(X.shape[1], CHUNK)

    def scan(begin, end):
        row, column = ct.arange(CHUNK, dtype=ct.int32)[:, None], ct.arange(CHUNK, dtype=ct.int32)[None, :]
        s = ct.zeros((TILE_N, TILE_P), dtype=ct.float32)
        if SEGMENT > 0:
            s = ct.load(LOCAL, (part, h, 0, j), (1, 1, TILE_N, TILE_P), check_bounds=False, allow_tma=False).reshape((TILE_N, TILE_P))
        elif HAS_STATE:
            s = state_of(STATE, row_of_state(STATE_ROWS, seq, HAS_ROWS), h, j, TILE_N, TILE_P)
        for c in range(begin, end):
            dt, sums, total = steps_of_chunk(DT, A, DT_BIAS, place, c, h, dt_min, dt_max, HAS_BIAS, SOFTPLUS, CHUNK)
            x = tile_of(X, place, c, h, j, CHUNK, TILE_P, LATENCY)
            b = tile_of(B, place, c, g, 0, CHUNK, TILE_N, LATENCY)
            query = tile_of(C, place, c, g, 0, CHUNK, TILE_N, LATENCY)
            before = s.astype(x.dtype)
            s = moved_on(s, x, b, dt, sums, total)
            between = ct.exp2(ct.where(row >= column, sums[:, None] - sums[None, :], FLOOR), flush_to_zero=True)
            m = ct.mma(query, ct.transpose(b), ct.zeros((CHUNK, CHUNK), dtype=ct.float32)) * between * dt[None, :]
            out = ct.mma(query, before, ct.zeros((CHUNK, TILE_P), dtype=ct.float32)) * ct.exp2(sums)[:, None]
            out = ct.mma(m.astype(x.dtype), x, out)
            if HAS_D:
                out = out + skip * x.astype(ct.float32)
            if HAS_Z:
                out = gated(tile_of(Z, place, c, h, j, CHUNK, TILE_P, LATENCY), out, False)
            ct.store(OUT, (place, c, h, j), out.astype(OUT.dtype).reshape((1, CHUNK, 1, TILE_P)))
        if HAS_STATE and end == chunks:
            at = row_of_state(STATE_ROWS, seq, HAS_ROWS)
            ct.store(STATE, (at, h, j, 0), ct.transpose(s).reshape((1, 1, TILE_P, TILE_N)), allow_tma=False)

    if SEGMENT == 0:
        scan(0, chunks)
    elif 0 <= segment < ct.cdiv(chunks, SEGMENT):
        scan(segment * SEGMENT, min(segment * SEGMENT + SEGMENT, chunks))


def state_of(STATE, at, h, j, TILE_N, TILE_P):
    """Columns of the state of a head, [TILE_N, TILE_P]."""
    return ct.transpose(ct.load(STATE, (at, h, j, 0), (1, 1, TILE_P, TILE_N), padding_mode=ZERO, allow_tma=False).reshape((TILE_P, TILE_N)))


@ct.kernel
def carry_kernel(
    X,
    DT,
    A,
    B,
    DT_BIAS,
    LOCAL,
    KEPT,
    CU_SEQLENS,
    dt_min: float,
    dt_max: float,
    VARLEN: ct.Constant[bool],
    HAS_BIAS: ct.Constant[bool],
    SOFTPLUS: ct.Constant[bool],
    SEGMENT: ct.Constant[int],
    GROUP: ct.Constant[int],
    BLOCKS: ct.Constant[int],
    CHUNK: ct.Constant[int],
    TILE_N: ct.Constant[int],
    TILE_P: ct.Constant[int],
    LATENCY: ct.Constant[int],
):
    """The state behind each segment but a sequence's last, from none in front of it, into LOCAL.
    Grid and arrays as in the scan.

    KEPT [segments, heads] fp32: the share of the state in front that is left behind it.
    """
    j, item = ct.bid(0) % BLOCKS, ct.bid(0) // BLOCKS
    h, part = item % X.shape[2], item // X.shape[2]
    seq, segment = place_of(CU_SEQLENS, part, SEGMENT * CHUNK, X.shape[1], VARLEN)
    g, place = h // GROUP, 0 if VARLEN else seq
    X, DT, B = tokens_of(CU_SEQLENS, X, seq, VARLEN), tokens_of(CU_SEQLENS, DT, seq, VARLEN), tokens_of(CU_SEQLENS, B, seq, VARLEN)
    if 0 <= segment < ct.cdiv(ct.cdiv(X.shape[1], CHUNK), SEGMENT) - 1:
        s, kept = ct.zeros((TILE_N, TILE_P), dtype=ct.float32), 0.0
        for c in range(segment * SEGMENT, segment * SEGMENT + SEGMENT):
            dt, sums, total = steps_of_chunk(DT, A, DT_BIAS, place, c, h, dt_min, dt_max, HAS_BIAS, SOFTPLUS, CHUNK)
            x, b = tile_of(X, place, c, h, j, CHUNK, TILE_P, LATENCY), tile_of(B, place, c, g, 0, CHUNK, TILE_N, LATENCY)
            s, kept = moved_on(s, x, b, dt, sums, total), kept + total
        ct.store(LOCAL, (part, h, 0, j), s.reshape((1, 1, TILE_N, TILE_P)), allow_tma=False)
        if j == 0:
            ct.store(KEPT, (part, h), ct.exp2(kept))


@ct.kernel
def link_kernel(
    LOCAL,
    KEPT,
    STATE,
    STATE_ROWS,
    X,
    CU_SEQLENS,
    VARLEN: ct.Constant[bool],
    HAS_STATE: ct.Constant[bool],
    HAS_ROWS: ct.Constant[bool],
    SEGMENT: ct.Constant[int],
    BLOCKS: ct.Constant[int],
    CHUNK: ct.Constant[int],
    TILE_N: ct.Constant[int],
    TILE_P: ct.Constant[int],
):
    """From the state behind each segment of a sequence the one in front of it, one segment after
    the other. Grid (BLOCKS * heads * sequences); arrays and SEGMENT as in the scan.
    """
    j, item = ct.bid(0) % BLOCKS, ct.bid(0) // BLOCKS
    h, seq = item % X.shape[2], item // X.shape[2]
    if VARLEN:
        first, end = ct.load(CU_SEQLENS, (seq,), ()), ct.load(CU_SEQLENS, (seq + 1,), ())
        segments, place = ct.cdiv(end - first, SEGMENT * CHUNK), first // (SEGMENT * CHUNK) + seq
    else:
        segments = ct.cdiv(X.shape[1], SEGMENT * CHUNK)
        place = seq * segments
    if segments > 0:
        s = ct.zeros((TILE_N, TILE_P), dtype=ct.float32)
        if HAS_STATE:
            s = state_of(STATE, row_of_state(STATE_ROWS, seq, HAS_ROWS), h, j, TILE_N, TILE_P)
        for part in range(place, place + segments - 1):
            own = ct.load(LOCAL, (part, h, 0, j), (1, 1, TILE_N, TILE_P), allow_tma=False).reshape((TILE_N, TILE_P))
            kept = ct.load(KEPT, (part, h), ())
            ct.store(LOCAL, (part, h, 0, j), s.reshape((1, 1, TILE_N, TILE_P)), allow_tma=False)
            s = own + s * kept
        ct.store(LOCAL, (place + segments - 1, h, 0, j), s.reshape((1, 1, TILE_N, TILE_P)), allow_tma=False)
