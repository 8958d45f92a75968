"""One launch, one token: persistent blocks walk the program together, with a counter between two phases that each waits for.

Every phase reads what all blocks wrote in the one before. A block announces that it is done by a release on the phase's counter and goes on when an
acquire has seen all blocks there. Counters come in two sets: a launch counts in one and clears the other for the next launch, so that nothing has
to be reset between launches and a captured graph replays as it is.

Numerics: products of weights and activations are summed in fp32 from operands rounded to the model's dtype; `qkv`, rotated keys and queries, merged
attention, `active` and the residual stream are rounded to it, the stream once after each addition.
"""

import math

import cuda.tile as ct

from ...ops.attention_common import FLOOR, LOG2E, softmax_step
from ...ops.first_best import NOWHERE, empty_best, first_best, take_better
from .program import Kind

ZERO = ct.PaddingMode.ZERO
QKV, ATTENTION, OUT, GATE_UP, DOWN, HEAD = (int(kind) for kind in list(Kind)[:6])


@ct.kernel
def mega_kernel(
    PROGRAM,
    STARTS,
    ARRIVED,
    TURN,
    STUCK,
    TOKENS,
    COUNTERS,
    RECENT,
    CLOCK,
    EMBEDDING,
    NORMS,
    W_QKV,
    W_OUT,
    W_GATE_UP,
    W_DOWN,
    W_HEAD,
    COS,
    SIN,
    K,
    V,
    HEADS,
    PARTS,
    MAXIMA,
    DENOMINATORS,
    STREAM,
    ACTIVE,
    LOGITS,
    BEST,
    steps: int,
    eps: float,
    scale: float,
    HIDDEN: ct.Constant[int],
    Q_HEADS: ct.Constant[int],
    KV_HEADS: ct.Constant[int],
    HALF: ct.Constant[int],
    SPLITS: ct.Constant[int],
    BLOCKS: ct.Constant[int],
    COLS: ct.Constant[tuple[int, int, int]],
    ROWS: ct.Constant[tuple[int, int, int, int, int]],
    TILE_Q: ct.Constant[tuple[int, int, int]],
    TILE_S: ct.Constant[tuple[int, int]],
    SPAN: ct.Constant[int],
    TILE_KV: ct.Constant[int],
    LATENCY: ct.Constant[int],
    LIMIT: ct.Constant[int],
):
    """The first `steps` phases of PROGRAM. Grid (BLOCKS,), all of them resident.

    int32: PROGRAM [phases, 2] kind and layer; STARTS [kinds, BLOCKS + 1] units of each block; ARRIVED [2, phases]; TURN [1] which set of ARRIVED;
    STUCK [2] with LIMIT > 0: phase + 1 and block that gave up waiting after LIMIT looks; COUNTERS [2, ..] position and keys. int64: TOKENS [..],
    RECENT [.., ..], CLOCK [2], as `engine.state.State` has them.
    Weights, of L layers: EMBEDDING [vocab, HIDDEN], NORMS [2 L + 1, HIDDEN], W_QKV [L, heads * head_dim, HIDDEN], W_OUT [L, HIDDEN, q_heads * head_dim],
    W_GATE_UP [L, inter, 2, HIDDEN], W_DOWN [L, HIDDEN, inter], W_HEAD [1, vocab, HIDDEN]. COS, SIN fp32 [max_len, HALF].
    Cache: K, V [L, KV_HEADS, max_len, 2 * HALF]. Values: HEADS [L, Q_HEADS + 2 KV_HEADS, 2 * HALF], PARTS fp32 [L, SPLITS, Q_HEADS, 2 * HALF], MAXIMA and
    DENOMINATORS fp32 [L, SPLITS, Q_HEADS], STREAM [2 L, HIDDEN] behind attention and MLP of each layer, ACTIVE [L, inter], LOGITS [1, vocab],
    BEST int32 [2, BLOCKS].
    scale: of scores, times log2(e). COLS: tile widths of HIDDEN, q_heads * head_dim, inter. ROWS: of tiles of qkv, out, gate and up, down, head.
    TILE_Q: powers of two from a group, from Q_HEADS and from BLOCKS on. TILE_S: a power of two from SPLITS on, and how many are read at once.
    """
    block = ct.bid(0)
    turn = ct.load(TURN, (0,), ())
    token = ct.load(TOKENS, (0,), ()).astype(ct.int32)
    position = ct.load(COUNTERS, (0, 0), ())
    dtype = STREAM.dtype
    head_dim = 2 * HALF
    group = Q_HEADS // KV_HEADS
    # Ranges of keys: `span` keys each, so that no two blocks read or write a tile of the cache in common.
    span = max(SPAN, ct.cdiv(ct.cdiv(position + 1, SPLITS), TILE_KV) * TILE_KV)
    ranges = ct.cdiv(position + 1, span)

    if block == 0:
        for other in range(ARRIVED.shape[1]):
            ct.store(ARRIVED, (1 - turn, other), 0)

    def wait(phase):
        seen = ct.load(ARRIVED, (turn, phase), (), memory_order=ct.MemoryOrder.ACQUIRE, memory_scope=ct.MemoryScope.DEVICE)
        looks = 0
        while seen < BLOCKS:
            seen = ct.load(ARRIVED, (turn, phase), (), memory_order=ct.MemoryOrder.ACQUIRE, memory_scope=ct.MemoryScope.DEVICE)
            if LIMIT:
                looks = looks + 1
                if looks == LIMIT:
                    ct.atomic_cas(STUCK, 0, 0, phase + 1)
                    ct.atomic_max(STUCK, 1, block)
                    seen = BLOCKS

    def stream(row, tile, WIDTH):
        """fp32 [1, WIDTH] of the residual stream: row 0 is the token's embedding."""
        if row == 0:
            x = ct.load(EMBEDDING, (token, tile), (1, WIDTH), padding_mode=ZERO, allow_tma=False)
        else:
            x = ct.load(STREAM, (row - 1, tile), (1, WIDTH), padding_mode=ZERO, allow_tma=False)
        return x.astype(ct.float32)

    def normed(row, norm):
        x = stream(row, 0, COLS[0])
        weight = ct.load(NORMS, (norm, 0), (1, COLS[0]), padding_mode=ZERO, allow_tma=False).astype(ct.float32)
        x = (x * (1.0 / ct.sqrt(ct.sum(x * x) * (1.0 / HIDDEN) + eps))).astype(dtype).astype(ct.float32)
        return (x * weight).astype(dtype).astype(ct.float32)

    def product(W, layer, unit, x, N, K):
        """fp32 [N]: rows of W [layers, rows, k] times x [1, K]."""
        w = ct.load(W, (layer, unit, 0), (1, N, K), padding_mode=ZERO, latency=LATENCY).reshape((N, K))
        return ct.sum(w.astype(ct.float32) * x, axis=1)

    def rotated(first, second):
        cos = ct.load(COS, (position, 0), (1, HALF), allow_tma=False)
        sin = ct.load(SIN, (position, 0), (1, HALF), allow_tma=False)
        return (first * cos - second * sin).astype(dtype), (second * cos + first * sin).astype(dtype)

    def attend(layer, head, split):
        begin = split * span
        end = min(begin + span, position)  # of the cached keys; the newest comes from `qkv`
        newest = position < begin + span
        Q = HEADS.slice(1, head * group, (head + 1) * group)
        halves: tuple = ()
        for i in ct.static_iter(range(2)):
            q = ct.load(Q, (layer, 0, i), (1, TILE_Q[0], HALF), padding_mode=ZERO, allow_tma=False).reshape((TILE_Q[0], HALF)).astype(ct.float32)
            k = ct.load(HEADS, (layer, Q_HEADS + head, i), (1, 1, HALF), allow_tma=False).reshape((1, HALF)).astype(ct.float32)
            halves = (*halves, q, k)
        q_first, q_second = rotated(halves[0], halves[2])
        k_first, k_second = rotated(halves[1], halves[3])
        v = ct.load(HEADS, (layer, Q_HEADS + KV_HEADS + head, 0), (1, 1, head_dim), allow_tma=False).reshape((1, head_dim))
        if newest:
            ct.store(K, (layer, head, position, 0), k_first.reshape((1, 1, 1, HALF)), allow_tma=False)
            ct.store(K, (layer, head, position, 1), k_second.reshape((1, 1, 1, HALF)), allow_tma=False)
            ct.store(V, (layer, head, position, 0), v.reshape((1, 1, 1, head_dim)), allow_tma=False)
        own = q_first.astype(ct.float32) * k_first.astype(ct.float32) + q_second.astype(ct.float32) * k_second.astype(ct.float32)
        own = ct.sum(own, axis=1).reshape((1, TILE_Q[0])) * scale
        maximum = ct.where(newest, own, FLOOR)
        denominator = ct.where(newest, ct.ones((1, TILE_Q[0]), ct.float32), 0.0)
        total = ct.where(newest, ct.broadcast_to(v.astype(ct.float32).reshape((head_dim, 1)), (head_dim, TILE_Q[0])), 0.0)
        q_first, q_second = ct.transpose(q_first), ct.transpose(q_second)
        for j in range(begin // TILE_KV, ct.cdiv(end, TILE_KV)):
            seen = (j * TILE_KV + ct.arange(TILE_KV, dtype=ct.int32)).reshape((TILE_KV, 1)) < end
            first = ct.load(K, (layer, head, j, 0), (1, 1, TILE_KV, HALF), padding_mode=ZERO).reshape((TILE_KV, HALF))
            second = ct.load(K, (layer, head, j, 1), (1, 1, TILE_KV, HALF), padding_mode=ZERO).reshape((TILE_KV, HALF))
            values = ct.load(V, (layer, head, j, 0), (1, 1, TILE_KV, head_dim), padding_mode=ZERO).reshape((TILE_KV, head_dim))
            scores = ct.mma(second, q_second, ct.mma(first, q_first, ct.zeros((TILE_KV, TILE_Q[0]), ct.float32)))
            scores = ct.where(seen, scores, -math.inf)
            weights, factor, maximum, denominator = softmax_step(scores, maximum, denominator, scale, dtype, 0, 1)
            values = ct.where(seen, values, 0.0)  # hidden memory may hold NaN, and 0 * NaN is NaN
            total = ct.mma(ct.transpose(values), weights, total * factor)
        mine = PARTS.slice(2, head * group, (head + 1) * group)
        ct.store(mine, (layer, split, 0, 0), ct.transpose(total).reshape((1, 1, TILE_Q[0], head_dim)), allow_tma=False)
        for array, state in ct.static_iter(((MAXIMA, maximum), (DENOMINATORS, denominator))):
            ct.store(array.slice(2, head * group, (head + 1) * group), (layer, split, 0), state.reshape((1, 1, TILE_Q[0])), allow_tma=False)

    def attention(layer):
        """fp32 [1, COLS[1]]: the ranges' results as one."""
        used = ct.arange(TILE_S[0], dtype=ct.int32).reshape((TILE_S[0], 1)) < ranges
        shape = (1, TILE_S[0], TILE_Q[1])
        maxima = ct.load(MAXIMA, (layer, 0, 0), shape, padding_mode=ZERO, allow_tma=False).reshape(shape[1:])
        denominators = ct.load(DENOMINATORS, (layer, 0, 0), shape, padding_mode=ZERO, allow_tma=False).reshape(shape[1:])
        largest = ct.max(ct.where(used, maxima, FLOOR), axis=0, keepdims=True)
        denominator = ct.sum(ct.where(used, denominators * ct.exp2(maxima - largest), 0.0), axis=0).reshape((TILE_Q[1], 1))
        total = ct.zeros((TILE_Q[1], head_dim), ct.float32)
        few = (1, TILE_S[1], TILE_Q[1])
        for i in range(ct.cdiv(ranges, TILE_S[1])):
            own = (i * TILE_S[1] + ct.arange(TILE_S[1], dtype=ct.int32)).reshape((TILE_S[1], 1)) < ranges
            own_maxima = ct.load(MAXIMA, (layer, i, 0), few, padding_mode=ZERO, allow_tma=False).reshape(few[1:])
            factors = ct.where(own, ct.exp2(own_maxima - largest), 0.0)
            parts = ct.load(PARTS, (layer, i, 0, 0), (*few, head_dim), padding_mode=ZERO, allow_tma=False).reshape((*few[1:], head_dim))
            parts = ct.where(own.reshape((TILE_S[1], 1, 1)), parts, 0.0)  # of a longer text, or never written
            total = total + ct.sum(parts * factors.reshape((*few[1:], 1)), axis=0)
        mixed = total / ct.where(denominator == 0.0, 1.0, denominator)  # heads that only fill the tile have none
        return mixed.astype(dtype).astype(ct.float32).reshape((1, COLS[1]))

    for step in range(steps):
        kind, layer = ct.load(PROGRAM, (step, 0), ()), ct.load(PROGRAM, (step, 1), ())
        first, last = ct.load(STARTS, (kind, block), ()), ct.load(STARTS, (kind, block + 1), ())
        if step > 0:
            wait(step - 1)
        if kind == QKV:
            x = normed(2 * layer, 2 * layer)
            for unit in range(first, last):
                y = product(W_QKV, layer, unit, x, ROWS[0], COLS[0])
                per_head = head_dim // ROWS[0]
                at = (layer, unit // per_head, unit % per_head)
                ct.store(HEADS, at, y.astype(dtype).reshape((1, 1, ROWS[0])), allow_tma=False)
        elif kind == ATTENTION:
            for unit in range(first, last):
                if unit % SPLITS < ranges:
                    attend(layer, unit // SPLITS, unit % SPLITS)
        elif kind == OUT:
            x = attention(layer)
            for unit in range(first, last):
                y = product(W_OUT, layer, unit, x, ROWS[1], COLS[1]).reshape((1, ROWS[1])) + stream(2 * layer, unit, ROWS[1])
                ct.store(STREAM, (2 * layer, unit), y.astype(dtype), allow_tma=False)
        elif kind == GATE_UP:
            x = normed(2 * layer + 1, 2 * layer + 1)
            half = ROWS[2] // 2
            for unit in range(first, last):
                w = ct.load(W_GATE_UP, (layer, unit, 0, 0), (1, half, 2, COLS[0]), padding_mode=ZERO, latency=LATENCY)
                y = ct.sum(w.reshape((ROWS[2], COLS[0])).astype(ct.float32) * x, axis=1).reshape((half, 2))
                gate, up = ct.extract(y, (0, 0), (half, 1)), ct.extract(y, (0, 1), (half, 1))
                y = gate / (1.0 + ct.exp(-gate)) * up
                ct.store(ACTIVE, (layer, unit), y.astype(dtype).reshape((1, half)), allow_tma=False)
        elif kind == DOWN:
            x = ct.load(ACTIVE, (layer, 0), (1, COLS[2]), padding_mode=ZERO, allow_tma=False).astype(ct.float32)
            for unit in range(first, last):
                y = product(W_DOWN, layer, unit, x, ROWS[3], COLS[2]).reshape((1, ROWS[3])) + stream(2 * layer + 1, unit, ROWS[3])
                ct.store(STREAM, (2 * layer + 1, unit), y.astype(dtype), allow_tma=False)
        elif kind == HEAD:
            x = normed(2 * layer, 2 * layer)
            lane = ct.arange(ROWS[4], dtype=ct.int32).reshape((1, ROWS[4]))
            best, when = empty_best((1, ROWS[4]))
            for unit in range(first, last):
                y = product(W_HEAD, 0, unit, x, ROWS[4], COLS[0]).astype(dtype).reshape((1, ROWS[4]))
                ct.store(LOGITS, (0, unit), y, allow_tma=False)
                y = ct.where(unit * ROWS[4] + lane < LOGITS.shape[1], y.astype(ct.float32), -math.inf)
                best, when = take_better(best, when, y, unit)
            top, column = first_best(best, when * ROWS[4] + lane)
            ct.store(BEST, (0, block), ct.bitcast(top, ct.int32))
            ct.store(BEST, (1, block), column)
        elif first < last:
            both = ct.load(BEST, (0, 0), (2, TILE_Q[2]), padding_mode=ZERO, allow_tma=False)
            inside = ct.arange(TILE_Q[2], dtype=ct.int32).reshape((1, TILE_Q[2])) < BLOCKS
            tops = ct.where(inside, ct.bitcast(ct.extract(both, (0, 0), (1, TILE_Q[2])), ct.float32), -math.inf)
            columns = ct.where(inside, ct.extract(both, (1, 0), (1, TILE_Q[2])), NOWHERE)
            chosen = first_best(tops, columns)[1].astype(ct.int64)
            clock = ct.load(CLOCK, (0,), ())
            ct.store(TOKENS, (0,), chosen.reshape((1,)))
            ct.store(RECENT, (clock, 0), chosen)
            ct.store(CLOCK, (0,), clock + 1)
            ct.store(CLOCK, (1,), ct.load(CLOCK, (1,), ()) + 1)
            ct.store(COUNTERS, (0, 0), position + 1)
            ct.store(COUNTERS, (1, 0), ct.load(COUNTERS, (1, 0), ()) + 1)
        ct.atomic_add(ARRIVED, (turn, step), 1, memory_order=ct.MemoryOrder.RELEASE, memory_scope=ct.MemoryScope.DEVICE)

    if block == 0:
        if steps == 1:  # later phases already tell that every block has read its turn
            wait(0)
        ct.store(TURN, (0,), 1 - turn)
