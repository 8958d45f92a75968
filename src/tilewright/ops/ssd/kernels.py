"""Tile code of `ssd`: token after token, or a chunk of tokens at a time.

Inside a chunk, with G_i the sum of its log2 decays up to token i, and S [state, head_dim]:

    M = tril(C B^T 2**(G_i - G_j) dt_j)
    O = 2**G C S + M X          S <- 2**G_last S + B^T (2**(G_last - G) dt X)

`gates_kernel` makes the decays of all chunks at once. `scan_kernel` then holds the state in
registers from a sequence's first chunk to its last. Where that leaves SMs idle, it first finds the
state behind each segment as if it began with nothing, `link_kernel` the true state in front of
each, and the segments run at once.
"""

import cuda.tile as ct

from ..common.attention_tiles import place_of
from ..common.pdl import pdl_overlap
from ..common.recurrence import FORGOTTEN, LEAST_DECAY, chunk_of, row_of
from ..common.tiles import LOG2E, ZERO, gated, load_tile, rows_from

SUM, STEP = 0, 1  # rows of GATES
ODD = (1 / 13, 1 / 11, 1 / 9, 1 / 7, 1 / 5, 1 / 3)


def softplus(x, exact=True):
    """log(1 + exp(x)): by atanh's series, since a logarithm of a number near 1 has lost the digits
    of a small one. Unless exact, its quotient has an error of 2 ulp.
    """
    y = ct.exp(-ct.abs(x))
    s = y / (y + 2.0) if exact else ct.truediv(y, y + 2.0, rounding_mode=ct.RoundingMode.APPROX)
    square = s * s
    series = square * (1 / 15)
    for coefficient in ct.static_iter(ODD):
        series = (series + coefficient) * square
    return ct.maximum(x, 0.0) + 2.0 * s * (1.0 + series)


def step_of(raw, bias, dt_min, dt_max, SOFTPLUS):
    """dt of tokens; bias: of their heads."""
    dt = raw.astype(ct.float32) + bias
    if SOFTPLUS:
        dt = softplus(dt, raw.dtype == ct.float32)
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
    s = ct.zeros((TILE_P, TILE_N), dtype=ct.float32)
    if HAS_STATE:
        s = load_tile(STATE, (at, h, j, 0), (1, 1, TILE_P, TILE_N), ZERO, WHOLE, None, False).reshape((TILE_P, TILE_N))
    decay = ct.load(A, (h,), (), check_bounds=False).astype(ct.float32)
    bias = ct.load(DT_BIAS, (h,), (), check_bounds=False).astype(ct.float32) if HAS_BIAS else 0.0
    skip = ct.load(D, (h,), (), check_bounds=False).astype(ct.float32) if HAS_D else 0.0

    def row(ARRAY, t, head, column, shape):
        return row_of(ARRAY, (place, t, head), column, shape, WHOLE)

    def step(s, t):
        x, b, c = row(X, t, h, j, (TILE_P, 1)), row(B, t, g, 0, (1, TILE_N)), row(C, t, g, 0, (1, TILE_N))
        dt = step_of(ct.load(DT, (place, t, h), (), check_bounds=False), bias, dt_min, dt_max, SOFTPLUS)
        s = s * ct.exp(dt * decay) + (dt * x) * b
        out = ct.sum(s * c, 1, keepdims=True)
        if HAS_D:
            out = out + skip * x
        if HAS_Z:
            out = gated(row(Z, t, h, j, (TILE_P, 1)), out, False)
        ct.store(OUT, (place, t, h, j), out.astype(OUT.dtype).reshape((1, 1, 1, TILE_P)), check_bounds=not WHOLE, allow_tma=False)
        return s

    if ONE:
        s = step(s, 0)
    else:
        for t in range(X.shape[1]):
            s = step(s, t)
    if HAS_STATE:
        ct.store(STATE, (at, h, j, 0), s.reshape((1, 1, TILE_P, TILE_N)), check_bounds=not WHOLE, allow_tma=False)


@ct.kernel
def gates_kernel(
    DT,
    A,
    DT_BIAS,
    CU_SEQLENS,
    GATES,
    TOTALS,
    dt_min: float,
    dt_max: float,
    VARLEN: ct.Constant[bool],
    HAS_BIAS: ct.Constant[bool],
    SOFTPLUS: ct.Constant[bool],
    GATE_HEADS: ct.Constant[int],
    CHUNK: ct.Constant[int],
):
    """What a chunk's tokens are multiplied by, of GATE_HEADS heads, as rows: the scan loads them by
    TMA, ahead. Grid (chunks, heads / GATE_HEADS).

    GATES [chunks, heads, 2, CHUNK] fp32: of each token the sum of log2 decays up to it, and dt; no
    decay and 0 behind a sequence's last. TOTALS [chunks, heads, 4]: the sum of all, four times,
    which is the least that TMA loads.
    """
    place, h = ct.bid(0), ct.bid(1)
    chunks = ct.cdiv(DT.shape[1], CHUNK)
    b, c = place // chunks, place % chunks
    if VARLEN:
        first, end, c = chunk_of(CU_SEQLENS, place, CHUNK, DT.shape[1])
        DT, b = rows_from(DT, 1, first, end), 0
    raw = ct.load(DT, (b, c, h), (1, CHUNK, GATE_HEADS), padding_mode=ZERO, allow_tma=False).reshape((CHUNK, GATE_HEADS))
    bias = 0.0
    if HAS_BIAS:
        bias = ct.load(DT_BIAS, (h,), (GATE_HEADS,), allow_tma=False).astype(ct.float32)[None, :]
    there = c * CHUNK + ct.arange(CHUNK, dtype=ct.int32)[:, None] < DT.shape[1]
    dt = ct.where(there, step_of(raw, bias, dt_min, dt_max, SOFTPLUS), 0.0)
    speed = ct.load(A, (h,), (GATE_HEADS,), allow_tma=False).astype(ct.float32) * LOG2E
    g = ct.maximum(dt * speed[None, :], LEAST_DECAY, propagate_nan=True)
    shape = (1, GATE_HEADS, 1, CHUNK)
    ct.store(GATES, (place, h, SUM, 0), ct.transpose(ct.cumsum(g, 0)).reshape(shape), allow_tma=False)
    ct.store(GATES, (place, h, STEP, 0), ct.transpose(dt).reshape(shape), allow_tma=False)
    totals = ct.sum(g, 0)[None, :, None] * ct.full((1, 1, 4), 1.0, dtype=ct.float32)
    ct.store(TOTALS, (place, h, 0), totals, allow_tma=False)


@ct.kernel
def scan_kernel(
    X,
    B,
    C,
    D,
    Z,
    GATES,
    TOTALS,
    STATE,
    STATE_ROWS,
    LOCAL,
    KEPT,
    OUT,
    CU_SEQLENS,
    VARLEN: ct.Constant[bool],
    HAS_STATE: ct.Constant[bool],
    HAS_ROWS: ct.Constant[bool],
    HAS_D: ct.Constant[bool],
    HAS_Z: ct.Constant[bool],
    CARRY: ct.Constant[bool],
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

    Arrays as in the recurrent kernel and of gates. SEGMENT: chunks of a segment; 0 for whole
    sequences. LOCAL [segments, heads, TILE_N, BLOCKS * TILE_P] fp32: the state in front of each
    segment. CARRY: makes the state behind each segment but a sequence's last, from none in front of
    it, into LOCAL, and no result; it begins behind the chunks that decays alone take below
    2**FORGOTTEN of the state. KEPT [segments, heads] fp32: the share of the state in front that is
    left behind it.
    """
    j, item = ct.bid(0) % BLOCKS, ct.bid(0) // BLOCKS
    h, part = item % X.shape[2], item // X.shape[2]
    seq, segment = place_of(CU_SEQLENS, part, SEGMENT * CHUNK, X.shape[1], VARLEN)
    g, b = h // GROUP, seq
    if VARLEN:
        first, end = ct.load(CU_SEQLENS, (seq,), ()), ct.load(CU_SEQLENS, (seq + 1,), ())
        X, B, C, OUT = rows_from(X, 1, first, end), rows_from(B, 1, first, end), rows_from(C, 1, first, end), rows_from(OUT, 1, first, end)
        if HAS_Z:
            Z = rows_from(Z, 1, first, end)
        b, place = 0, first // CHUNK + seq
    else:
        place = seq * ct.cdiv(X.shape[1], CHUNK)
    skip = ct.load(D, (h,), ()).astype(ct.float32) if HAS_D else 0.0
    chunks = ct.cdiv(X.shape[1], CHUNK)

    def tile_of(ARRAY, c, head, column, TILE):
        return ct.load(ARRAY, (b, c, head, column), (1, CHUNK, 1, TILE), padding_mode=ZERO, latency=LATENCY).reshape((CHUNK, TILE))

    def gate_of(c, row):
        return ct.load(GATES, (place + c, h, row, 0), (1, 1, 1, CHUNK), check_bounds=False, latency=LATENCY)

    def total_of(c):
        return ct.max(ct.load(TOTALS, (place + c, h, 0), (1, 1, 4), check_bounds=False, latency=LATENCY).reshape((1, 4)), 1, keepdims=True)

    def totals_of(begin, end):
        at = begin + ct.arange(SEGMENT, dtype=ct.int32)
        return ct.gather(TOTALS, (place + at, h, 0), mask=at < end, padding_value=0.0)

    def scan(begin, end):
        row, column = ct.arange(CHUNK, dtype=ct.int32)[:, None], ct.arange(CHUNK, dtype=ct.int32)[None, :]
        empty = ct.zeros((CHUNK, TILE_P), dtype=ct.float32)
        s = ct.zeros((TILE_N, TILE_P), dtype=ct.float32)
        if CARRY:
            totals = totals_of(begin, end)
            behind = ct.sum(totals) - ct.cumsum(totals, 0)
            if j == 0:
                ct.store(KEPT, (part, h), ct.exp2(ct.sum(totals)))
            begin = begin + ct.sum(ct.where(behind < FORGOTTEN, 1, 0))
        elif SEGMENT > 0:
            s = ct.load(LOCAL, (part, h, 0, j), (1, 1, TILE_N, TILE_P), check_bounds=False, allow_tma=False).reshape((TILE_N, TILE_P))
        elif HAS_STATE:
            s = state_of(STATE, row_of_state(STATE_ROWS, seq, HAS_ROWS), h, j, TILE_N, TILE_P)
        for c in range(begin, end):
            total, sums, dt = total_of(c), gate_of(c, SUM), gate_of(c, STEP)
            x, keys = tile_of(X, c, h, j, TILE_P), tile_of(B, c, g, 0, TILE_N)
            if not CARRY:
                queries = tile_of(C, c, g, 0, TILE_N)
            before = s.astype(x.dtype)
            onward = ct.exp2(total - sums.reshape((CHUNK, 1)), flush_to_zero=True) * dt.reshape((CHUNK, 1))
            s = ct.mma(ct.transpose(keys), (x.astype(ct.float32) * onward).astype(x.dtype), s * ct.exp2(total))
            if not CARRY:
                m = ct.mma(queries, ct.transpose(keys), ct.zeros((CHUNK, CHUNK), dtype=ct.float32))
                between = ct.exp2(-ct.abs(sums.reshape((CHUNK, 1)) - sums.reshape((1, CHUNK))), flush_to_zero=True)
                m = ct.where(row >= column, m * between * dt.reshape((1, CHUNK)), 0.0)
                out = ct.mma(queries, before, empty) * ct.exp2(sums.reshape((CHUNK, 1)), flush_to_zero=True)
                out = ct.mma(m.astype(x.dtype), x, out)
                if HAS_D:
                    out = out + skip * x.astype(ct.float32)
                if HAS_Z:
                    out = gated(tile_of(Z, c, h, j, TILE_P), out, False)
                ct.store(OUT, (b, c, h, j), out.astype(OUT.dtype).reshape((1, CHUNK, 1, TILE_P)))
        if CARRY:
            ct.store(LOCAL, (part, h, 0, j), s.reshape((1, 1, TILE_N, TILE_P)), allow_tma=False)
        elif HAS_STATE and end == chunks:
            at = row_of_state(STATE_ROWS, seq, HAS_ROWS)
            ct.store(STATE, (at, h, j, 0), ct.transpose(s).reshape((1, 1, TILE_P, TILE_N)), allow_tma=False)

    if SEGMENT == 0:
        scan(0, chunks)
    elif 0 <= segment < ct.cdiv(chunks, SEGMENT) - (1 if CARRY else 0):
        scan(segment * SEGMENT, min(segment * SEGMENT + SEGMENT, chunks))


def state_of(STATE, at, h, j, TILE_N, TILE_P):
    """Columns of the state of a head, [TILE_N, TILE_P]."""
    return ct.transpose(ct.load(STATE, (at, h, j, 0), (1, 1, TILE_P, TILE_N), padding_mode=ZERO, allow_tma=False).reshape((TILE_P, TILE_N)))


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
