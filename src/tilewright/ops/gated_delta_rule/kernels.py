"""Tile code of `gated_delta_rule`: token after token, or a chunk of tokens at a time.

Inside a chunk, with G_i the sum of its log2 decays up to token i:

    A  = tril(beta K K^T 2**(G_i - G_j), -1)        P = scale tril(Q K^T 2**(G_i - G_j))
    T  = (I + A)^-1 beta                            W = V - 2**G K S
    V' = T W          O = scale 2**G Q S + P V'     S <- 2**G_last S + K^T 2**(G_last - G) V'

A and P know nothing of the state S: `solve_kernel` makes them for all chunks at once. What needs
the state is left for `scan_kernel`, chunk after chunk. The norms of q and k are factors of rows, so
both take q and k as they come.
"""

import cuda.tile as ct

from ..common.attention_tiles import place_of
from ..common.pdl import pdl_overlap
from ..common.recurrence import FLOOR, FORGOTTEN, LEAST_DECAY, row_of
from ..common.tiles import LOG2E, ZERO, load_tile, matrix_tile, rows_from

INTO, ONWARD, OUTWARD = 0, 1, 2  # rows of FACTORS


def two_sums(a, b, x, y):
    return a + x, b + y


def three_sums(a, b, c, x, y, z):
    return a + x, b + y, c + z


def one_token(states, ks, qs, v, decay, beta, how):
    """The state after a token, and what it returns [1, TILE_V].

    states, ks, qs: tiles of rows of the state, and of the same rows of k and q, fp32.
    how: (scale, eps, NORMALIZE, EXACT), the last for fp32: sums in the order of the definition.
    """
    scale, eps, NORMALIZE, EXACT = how
    if NORMALIZE and EXACT:  # rsqrt has an error of 2 ulp
        kk, qq = ct.reduce((_products(ks, ks), _products(qs, qs)), 0, two_sums, (0.0, 0.0), keepdims=True)
        ks, qs = _times(ks, 1.0 / ct.sqrt(kk + eps)), _times(qs, 1.0 / ct.sqrt(qq + eps))
    # Both sums are over the state as it was: new^T q = decay S^T q + (k q) delta. Sums in one
    # reduction share its barriers.
    seen, found = ct.reduce((_products(states, ks), _products(states, qs)), 0, two_sums, (0.0, 0.0), keepdims=True)
    kk, qq, kq = ct.reduce((_products(ks, ks), _products(qs, qs), _products(ks, qs)), 0, three_sums, (0.0, 0.0, 0.0), keepdims=True)
    of_k, of_q = 1.0, scale
    if NORMALIZE and not EXACT:  # no sum waits for another
        of_k, of_q = ct.rsqrt(kk + eps), ct.rsqrt(qq + eps) * scale
    delta = (v - decay * of_k * seen) * (beta * of_k)
    after: tuple = ()
    for i in ct.static_iter(range(len(states))):
        after = (*after, states[i] * decay + ks[i] * delta)
    return after, (decay * found + kq * delta) * of_q


def _products(xs, ys):
    """The sum of the products of tiles, in turn."""
    total = xs[0] * ys[0]
    for i in ct.static_iter(range(1, len(xs))):
        total = total + xs[i] * ys[i]
    return total


def _times(xs, factor):
    found: tuple = ()
    for x in ct.static_iter(xs):
        found = (*found, x * factor)
    return found


@ct.kernel
def recurrent_kernel(
    Q,
    K,
    V,
    G,
    BETA,
    STATE,
    OUT,
    CU_SEQLENS,
    scale: float,
    eps: float,
    VARLEN: ct.Constant[bool],
    HAS_STATE: ct.Constant[bool],
    NORMALIZE: ct.Constant[bool],
    CHANNELS: ct.Constant[bool],
    WHOLE: ct.Constant[bool],
    GROUP: ct.Constant[int],
    BLOCKS: ct.Constant[int],
    TILE_K: ct.Constant[int],
    TILE_V: ct.Constant[int],
):
    """Tokens of one sequence in order; TILE_V columns of the state of one head stay in registers.
    Grid (BLOCKS * v_heads * sequences).

    Q, K [batch, k_heads, tokens, head_dim]; V, OUT [batch, v_heads, tokens, v_dim]; G, BETA [batch,
    v_heads, tokens], with CHANNELS G [batch, v_heads, tokens, head_dim]; STATE [sequences, v_heads,
    head_dim, v_dim] fp32, overwritten with HAS_STATE; CU_SEQLENS [sequences + 1] int32, for arrays
    whose batch axis is 1.
    WHOLE: every tile of a state lies inside.
    """
    pdl_overlap()
    j, item = ct.bid(0) % BLOCKS, ct.bid(0) // BLOCKS
    h, seq = item % V.shape[1], item // V.shape[1]
    kh, b = h // GROUP, seq
    if VARLEN:
        first, end = ct.load(CU_SEQLENS, (seq,), ()), ct.load(CU_SEQLENS, (seq + 1,), ())
        Q, K, V, OUT = rows_from(Q, 2, first, end), rows_from(K, 2, first, end), rows_from(V, 2, first, end), rows_from(OUT, 2, first, end)
        G, BETA = rows_from(G, 2, first, end), rows_from(BETA, 2, first, end)
        b = 0
    s = ct.zeros((TILE_K, TILE_V), dtype=ct.float32)
    if HAS_STATE:
        s = load_tile(STATE, (seq, h, 0, j), (1, 1, TILE_K, TILE_V), ZERO, WHOLE, None, False).reshape((TILE_K, TILE_V))

    def row(X, head, t, column, shape):
        return row_of(X, (b, head, t), column, shape, WHOLE)

    of_key = TILE_K, 1
    for t in range(V.shape[2]):
        v, beta = row(V, h, t, j, (1, TILE_V)), ct.load(BETA, (b, h, t), ()).astype(ct.float32)
        if CHANNELS:
            s, decay = s * ct.exp(row(G, h, t, 0, of_key)), 1.0
        else:
            decay = ct.exp(ct.load(G, (b, h, t), ()).astype(ct.float32))
        q, k = row(Q, kh, t, 0, of_key), row(K, kh, t, 0, of_key)
        (s,), out = one_token((s,), (k,), (q,), v, decay, beta, (scale, eps, NORMALIZE, K.dtype == ct.float32))
        ct.store(OUT, (b, h, t, j), out.astype(OUT.dtype).reshape((1, 1, 1, TILE_V)), check_bounds=not WHOLE, allow_tma=False)
    if HAS_STATE:
        ct.store(STATE, (seq, h, 0, j), s.reshape((1, 1, TILE_K, TILE_V)), check_bounds=not WHOLE, allow_tma=False)


def inverse(a, beta, CHUNK):
    """(I + diag(beta) a)^-1 diag(beta), of the part of `a` [CHUNK, CHUNK] below its diagonal.

    First for blocks of 16 on the diagonal, which are many small products without a barrier between
    them. No entry is larger than beta where keys have at most length 1, so 16 bits hold the
    factors. Powers of more than four blocks would grow: over a chunk they reach C(CHUNK - 1, CHUNK
    / 2).
    """
    blocks = CHUNK // 16
    split = a.reshape((blocks, 16, blocks, 16))
    p, r = ct.arange(blocks, dtype=ct.int32)[:, None, None, None], ct.arange(blocks, dtype=ct.int32)[None, None, :, None]
    small = ct.sum(ct.where(p == r, split, 0.0), 2)
    i, j = ct.arange(16, dtype=ct.int32)[None, :, None], ct.arange(16, dtype=ct.int32)[None, None, :]
    apart = ct.where(i > j, i ^ j, 0)  # from 2**n to 2**(n + 1) - 1 in the same block of 2**(n + 1), in two of 2**n
    row, column = beta.reshape((blocks, 16, 1)), beta.reshape((blocks, 1, 16))
    t = ct.where(i == j, column, ct.where(apart == 1, small * -(row * column), 0.0))
    t = of_two(ct.where((apart >= 2) & (apart < 4), -small, 0.0), t)
    t = of_four(ct.where(apart >= 4, -small, 0.0), t)
    t = ct.where(p == r, t.reshape((blocks, 16, 1, 16)), 0.0).reshape((CHUNK, CHUNK))
    i, j = ct.arange(CHUNK, dtype=ct.int32)[:, None], ct.arange(CHUNK, dtype=ct.int32)[None, :]
    below = ct.where(i // 16 > j // 16, -a, 0.0)
    return of_two(below, t) if blocks == 2 else of_four(below, t)


def of_two(below, t):
    """From inverses t of blocks on the diagonal those of pairs of them; below: minus what is left
    of each second one.
    """
    factor = t.astype(ct.float16)
    return ct.mma(factor, ct.mma(below.astype(ct.float16), factor, nothing(t)).astype(ct.float16), t)


def of_four(below, t):
    """The same for fours of blocks: (I + N + N^2 + N^3) t of N = t below, in three steps."""
    factor = t.astype(ct.float16)
    n = ct.mma(factor, below.astype(ct.float16), nothing(t)).astype(ct.float16)
    square = ct.mma(n, n, nothing(t)).astype(ct.float16)
    first = ct.mma(n, factor, t)
    return ct.mma(square, first.astype(ct.float16), first)


def nothing(x):
    return ct.zeros(x.shape, dtype=ct.float32)


def lengths(x):
    """Squared lengths of the rows of a tile: the diagonal of x x^T, for which no element leaves
    shared memory.
    """
    n = x.shape[0]
    same = ct.arange(n, dtype=ct.int32)[:, None] == ct.arange(n, dtype=ct.int32)[None, :]
    return ct.sum(ct.where(same, ct.mma(x, ct.transpose(x), ct.zeros((n, n), dtype=ct.float32)), 0.0), 1)


@ct.kernel
def solve_kernel(
    Q,
    K,
    G,
    BETA,
    CU_SEQLENS,
    T,
    P,
    FACTORS,
    DECAY,
    scale: float,
    eps: float,
    VARLEN: ct.Constant[bool],
    NORMALIZE: ct.Constant[bool],
    GROUP: ct.Constant[int],
    HEADS: ct.Constant[int],
    CHUNK: ct.Constant[int],
    TILE_K: ct.Constant[int],
):
    """What a chunk needs that does not depend on the state, for HEADS value heads of one key head.
    Grid (chunks, v_heads / HEADS).

    T, P [chunks, v_heads, CHUNK, CHUNK]. FACTORS [chunks, v_heads, 4, CHUNK]: of each token, what
    scales K S, the K of the new state, and Q S. DECAY [chunks, v_heads, 4]: of the chunk, four
    times, which is the least that TMA loads.
    """
    place, first_head = ct.bid(0), ct.bid(1) * HEADS
    kh = first_head // GROUP
    b, c = place_of(CU_SEQLENS, place, CHUNK, Q.shape[2], VARLEN)
    if VARLEN:
        first, end = ct.load(CU_SEQLENS, (b,), ()), ct.load(CU_SEQLENS, (b + 1,), ())
        Q, K, G, BETA = rows_from(Q, 2, first, end), rows_from(K, 2, first, end), rows_from(G, 2, first, end), rows_from(BETA, 2, first, end)
        b = 0
    if 0 <= c < ct.cdiv(Q.shape[2], CHUNK):
        k = ct.load(K, (b, kh, c, 0), (1, 1, CHUNK, TILE_K), padding_mode=ZERO).reshape((CHUNK, TILE_K))
        q = ct.load(Q, (b, kh, c, 0), (1, 1, CHUNK, TILE_K), padding_mode=ZERO).reshape((CHUNK, TILE_K))
        square, shape = (1, 1, CHUNK, CHUNK), (1, 1, 1, CHUNK)
        i, j = ct.arange(CHUNK, dtype=ct.int32)[:, None], ct.arange(CHUNK, dtype=ct.int32)[None, :]
        kk = ct.mma(k, ct.transpose(k), ct.zeros((CHUNK, CHUNK), dtype=ct.float32))
        qk = ct.mma(q, ct.transpose(k), ct.zeros((CHUNK, CHUNK), dtype=ct.float32))
        of_k = ct.full((CHUNK,), 1.0, dtype=ct.float32)
        of_q = ct.full((CHUNK,), scale, dtype=ct.float32)
        if NORMALIZE:
            of_k = ct.rsqrt(ct.sum(ct.where(i == j, kk, 0.0), 1) + eps)
            of_q = ct.rsqrt(lengths(q) + eps) * scale
        for n in range(HEADS):
            h = first_head + n
            beta = ct.load(BETA, (b, h, c), (1, 1, CHUNK), padding_mode=ZERO, allow_tma=False).reshape((CHUNK,)).astype(ct.float32)
            g = ct.load(G, (b, h, c), (1, 1, CHUNK), padding_mode=ZERO, allow_tma=False).reshape((CHUNK,)).astype(ct.float32)
            g = ct.maximum(g * LOG2E, LEAST_DECAY, propagate_nan=True)
            last = ct.sum(g)
            g = ct.cumsum(g, 0)
            from_token = g - ct.log2(of_k)  # the length of a key is part of the exponent
            between = ct.exp2(ct.where(i >= j, g[:, None] - from_token[None, :], FLOOR), flush_to_zero=True)
            ct.store(P, (place, h, 0, 0), (qk * between * of_q[:, None]).astype(P.dtype).reshape(square))
            t = inverse(kk * (between * of_k[:, None]), beta, CHUNK)
            ct.store(T, (place, h, 0, 0), t.astype(T.dtype).reshape(square))
            into = ct.exp2(g)
            ct.store(FACTORS, (place, h, INTO, 0), (into * of_k).reshape(shape), allow_tma=False)
            ct.store(FACTORS, (place, h, ONWARD, 0), (ct.exp2(last - g) * of_k).reshape(shape), allow_tma=False)
            ct.store(FACTORS, (place, h, OUTWARD, 0), (into * of_q).reshape(shape), allow_tma=False)
            ct.store(DECAY, (place, h, 0), ct.full((1, 1, 4), ct.exp2(last), dtype=ct.float32), allow_tma=False)


@ct.kernel
def scan_kernel(
    Q,
    K,
    V,
    T,
    P,
    FACTORS,
    DECAY,
    CU_SEQLENS,
    STATE,
    LOCAL,
    OUT,
    VARLEN: ct.Constant[bool],
    HAS_STATE: ct.Constant[bool],
    TRANSPOSED: ct.Constant[bool],
    AHEAD: ct.Constant[bool],
    CARRY: ct.Constant[bool],
    SKIPS: ct.Constant[bool],
    WHOLE: ct.Constant[bool],
    SEGMENT: ct.Constant[int],
    GROUP: ct.Constant[int],
    BLOCKS: ct.Constant[int],
    COLUMNS: ct.Constant[int],
    CHUNK: ct.Constant[int],
    TILE_K: ct.Constant[int],
    TILE_V: ct.Constant[int],
    LATENCY: ct.Constant[int],
):
    """Chunks of one segment of a sequence in order; TILE_V columns of the state of one head stay in
    registers. Grid (columns of the state / TILE_V * v_heads * segments).

    Arrays as in the other two. SEGMENT: chunks of a segment; 0 for whole sequences.
    LOCAL [segments, v_heads, TILE_K, (BLOCKS + COLUMNS) * TILE_V] fp32: the state behind each
    segment, and the matrix that takes the state in front of it there. CARRY: makes these, the state
    from zero but for a sequence's first segment, and no result; otherwise a segment starts from the
    state behind the one before. The last segment's part of LOCAL keeps the initial state.
    SKIPS: CARRY begins behind the chunks that decays alone take below 2**FORGOTTEN of the state.
    WHOLE: every tile of a state lies inside.
    TRANSPOSED: tiles have their columns of v as rows, so that wgmma takes them from registers; it
    needs 64 of these.
    AHEAD: a chunk's decay is a number, loaded one step ahead; otherwise it comes by TMA, as the
    tiles do. On sm_90 a number that a loop loads is waited for at once; on sm_80 TMA's form spills.
    """
    blocks = BLOCKS + COLUMNS if CARRY else BLOCKS
    j, item = ct.bid(0) % blocks, ct.bid(0) // blocks
    h, part = item % V.shape[1], item // V.shape[1]
    kh = h // GROUP
    seq, segment = place_of(CU_SEQLENS, part, SEGMENT * CHUNK, V.shape[2], VARLEN)
    b = seq
    if VARLEN:
        first, end = ct.load(CU_SEQLENS, (seq,), ()), ct.load(CU_SEQLENS, (seq + 1,), ())
        Q, K, V, OUT = rows_from(Q, 2, first, end), rows_from(K, 2, first, end), rows_from(V, 2, first, end), rows_from(OUT, 2, first, end)
        b = 0
        place = first // CHUNK + seq
    else:
        place = seq * ct.cdiv(V.shape[2], CHUNK)

    def turned(x):
        """A tile whose rows are tokens, or the state, as the loop has them, and back."""
        return ct.transpose(x) if TRANSPOSED else x

    def times(m, x, sums):
        """sums + m @ x."""
        return ct.mma(x, ct.transpose(m), sums) if TRANSPOSED else ct.mma(m, x, sums)

    def rows_of(X, c):
        return ct.load(X, (b, kh, c, 0), (1, 1, CHUNK, TILE_K), padding_mode=ZERO, latency=LATENCY).reshape((CHUNK, TILE_K))

    def square_of(X, c):
        return ct.load(X, (place + c, h, 0, 0), (1, 1, CHUNK, CHUNK), latency=LATENCY).reshape((CHUNK, CHUNK))

    def factor_of(c, at):
        # By TMA where it pays (H200, 1x32768: transposed 7 % faster, plain 30 % slower).
        factor = ct.load(FACTORS, (place + c, h, at, 0), (1, 1, 1, CHUNK), check_bounds=False, latency=LATENCY, allow_tma=TRANSPOSED)
        return factor.reshape((1, CHUNK) if TRANSPOSED else (CHUNK, 1))

    def decay_of(c):
        if AHEAD:
            return ct.load(DECAY, (place + c, h, 0), (), check_bounds=False)
        return ct.max(ct.load(DECAY, (place + c, h, 0), (1, 1, 4), check_bounds=False, latency=LATENCY).reshape((1, 4)), 1, keepdims=True)

    def columns_of(X, index):
        """The block's columns of a state."""
        return turned(matrix_tile(X, (index, h), (0, j), (TILE_K, TILE_V), ZERO, WHOLE))

    def forgotten(begin, end):
        """Chunks of a segment that its end has forgotten."""
        at = begin + ct.arange(SEGMENT, dtype=ct.int32)
        decays = ct.gather(DECAY, (place + at, h, 0), mask=at < end, padding_value=1.0)
        decays = ct.log2(ct.maximum(decays, 2.0**-126, propagate_nan=True))  # a NaN is not forgotten
        return ct.sum(ct.where(ct.sum(decays) - ct.cumsum(decays, 0) < FORGOTTEN, 1, 0))

    def scan(begin, end, last):
        empty = ct.zeros((TILE_V, CHUNK) if TRANSPOSED else (CHUNK, TILE_V), dtype=ct.float32)
        s = ct.zeros((TILE_V, TILE_K) if TRANSPOSED else (TILE_K, TILE_V), dtype=ct.float32)
        if CARRY and j >= BLOCKS:
            row, column = ct.arange(TILE_K, dtype=ct.int32)[:, None], ct.arange(TILE_V, dtype=ct.int32)[None, :]
            s = turned(ct.where(row == column + (j - BLOCKS) * TILE_V, 1.0, 0.0))
        if not CARRY and SEGMENT > 0 and segment > 0:
            s = columns_of(LOCAL, part - 1)
        elif HAS_STATE and segment == 0:
            s = columns_of(STATE, seq) if CARRY or SEGMENT == 0 else columns_of(LOCAL, part + segments - 1)
        if CARRY and SKIPS:
            lost = forgotten(begin, end)
            s = s * ct.where(lost > 0, 0.0, 1.0)
            begin = end if lost > 0 and j >= BLOCKS else begin + lost
        if AHEAD:
            following = decay_of(begin)
        for c in range(begin, end):
            if AHEAD:
                decay, following = following, decay_of(min(c + 1, end - 1))
            else:
                decay = decay_of(c)
            k = rows_of(K, c)
            v = ct.load(V, (b, h, c, j % BLOCKS if CARRY else j), (1, 1, CHUNK, TILE_V), padding_mode=ZERO, latency=LATENCY).reshape((CHUNK, TILE_V))
            # All loads in front: tileiras then holds two steps of them at once.
            t, into, onward = square_of(T, c), factor_of(c, INTO), factor_of(c, ONWARD)
            if not CARRY:
                q, p, outward = rows_of(Q, c), square_of(P, c), factor_of(c, OUTWARD)
            before = s.astype(k.dtype)
            wanted = turned(v).astype(ct.float32)
            if CARRY:
                wanted = wanted * ct.where(j < BLOCKS, 1.0, 0.0)
            missing = wanted - times(k, before, empty) * into
            new = times(t, missing.astype(k.dtype), empty)
            added = (new * onward).astype(k.dtype)
            s = ct.mma(added, k, s * decay) if TRANSPOSED else ct.mma(ct.transpose(k), added, s * decay)
            if not CARRY:  # after the state, for which the next chunk waits
                out = times(q, before, empty) * outward
                out = times(p, new.astype(k.dtype), out)
                ct.store(OUT, (b, h, c, j), turned(out).astype(OUT.dtype).reshape((1, 1, CHUNK, TILE_V)))
        if CARRY:
            ct.store(LOCAL, (part, h, 0, j), turned(s).reshape((1, 1, TILE_K, TILE_V)), allow_tma=False)
        elif HAS_STATE and last:
            ct.store(STATE, (seq, h, 0, j), turned(s).reshape((1, 1, TILE_K, TILE_V)), allow_tma=False)

    chunks = ct.cdiv(V.shape[2], CHUNK)
    if SEGMENT == 0:
        segments = 1
        scan(0, chunks, True)
    else:
        segments = ct.cdiv(chunks, SEGMENT)
        if 0 <= segment < segments:
            begin, end = segment * SEGMENT, min(segment * SEGMENT + SEGMENT, chunks)
            if not CARRY:
                scan(begin, end, segment == segments - 1)
            elif segment == segments - 1:
                # It passes no state on, and keeps the initial one, which the other pass overwrites.
                if HAS_STATE and j < BLOCKS:
                    ct.store(LOCAL, (part, h, 0, j), turned(columns_of(STATE, seq)).reshape((1, 1, TILE_K, TILE_V)), allow_tma=False)
            elif segment > 0 or j < BLOCKS:  # the state before the first is known
                scan(begin, end, False)


@ct.kernel
def link_kernel(
    LOCAL,
    V,
    CU_SEQLENS,
    VARLEN: ct.Constant[bool],
    SEGMENT: ct.Constant[int],
    BLOCKS: ct.Constant[int],
    COLUMNS_BEFORE: ct.Constant[int],
    CHUNK: ct.Constant[int],
    TILE_K: ct.Constant[int],
    TILE_V: ct.Constant[int],
):
    """The true state after each segment of a sequence but the last, one after the other. Grid
    (BLOCKS * v_heads * sequences); arrays and SEGMENT as in the scan. COLUMNS_BEFORE: of LOCAL, in
    front of the matrix.

    Products of fp32, of two bf16 parts each.
    """
    j, item = ct.bid(0) % BLOCKS, ct.bid(0) // BLOCKS
    h, seq = item % V.shape[1], item // V.shape[1]
    if VARLEN:
        first, end = ct.load(CU_SEQLENS, (seq,), ()), ct.load(CU_SEQLENS, (seq + 1,), ())
        segments, place = ct.cdiv(end - first, SEGMENT * CHUNK), first // (SEGMENT * CHUNK) + seq
    else:
        segments = ct.cdiv(V.shape[2], SEGMENT * CHUNK)
        place = seq * segments
    ONWARD_MATRIX = LOCAL.slice(3, COLUMNS_BEFORE, COLUMNS_BEFORE + TILE_K)
    if segments > 2:
        s = ct.load(LOCAL, (place, h, 0, j), (1, 1, TILE_K, TILE_V), allow_tma=False).reshape((TILE_K, TILE_V))
        for segment in range(1, segments - 1):
            m = ct.load(ONWARD_MATRIX, (place + segment, h, 0, 0), (1, 1, TILE_K, TILE_K), allow_tma=False).reshape((TILE_K, TILE_K))
            own = ct.load(LOCAL, (place + segment, h, 0, j), (1, 1, TILE_K, TILE_V), allow_tma=False).reshape((TILE_K, TILE_V))
            high, m_high = s.astype(ct.bfloat16), m.astype(ct.bfloat16)
            low, m_low = (s - high.astype(ct.float32)).astype(ct.bfloat16), (m - m_high.astype(ct.float32)).astype(ct.bfloat16)
            s = ct.mma(m_high, high, ct.mma(m_high, low, ct.mma(m_low, high, own)))
            ct.store(LOCAL, (place + segment, h, 0, j), s.reshape((1, 1, TILE_K, TILE_V)), allow_tma=False)
