"""One launch, one token: persistent blocks walk the program together, with a counter between two phases that each waits for.

Every phase reads what all blocks wrote in the one before. A block announces that it is done by a release on the phase's counter and goes on when an
acquire has seen all blocks there. Counters come in two sets: a launch counts in one and clears the other for the next launch, so that nothing has
to be reset between launches and a captured graph replays as it is.

Numerics: products of weights and activations are summed in fp32 from operands rounded to the model's dtype; `qkv`, rotated keys and queries, merged
attention, `active` and the residual stream are rounded to it, the stream once after each addition.
"""

# ruff: noqa: B023 - cuTile inlines a closure where it is called

import math

import cuda.tile as ct

from ...ops.common.first_best import NOWHERE, empty_best, first_best, take_better
from ...ops.common.softmax_tiles import FLOOR, softmax_step
from ...ops.common.tiles import silu_mul_of_pairs
from .arrays import Matrix, Stack, Stacks, Vector, store_inside
from .program import Kind
from .spin import DEVICE, give_up, looks_so_far

ZERO = ct.PaddingMode.ZERO


def _load(array, index, shape):
    """A tile that lies inside its array, by plain loads where it is needed: what is in flight across a loop or a barrier is in registers, by hand.

    Left to itself the compiler keeps five steps of every loop in flight, or gives threads to TMA: both spill in a kernel of so many loops.
    """
    return ct.load(array, index, shape, check_bounds=False, allow_tma=False, latency=1)


QKV, ATTENTION, OUT, GATE_UP, DOWN, HEAD = (int(kind) for kind in list(Kind)[:6])


@ct.kernel
def mega_kernel(
    PROGRAM: Matrix,
    STARTS: Matrix,
    ARRIVED: Matrix,
    TURN: Vector,
    STUCK: Vector,
    TOKENS: Vector,
    COUNTERS: Matrix,
    RECENT: Matrix,
    CLOCK: Vector,
    EMBEDDING: Matrix,
    NORMS: Matrix,
    W_QKV: Stack,
    W_OUT: Stack,
    W_GATE_UP: Stack,
    W_DOWN: Stack,
    W_HEAD: Stack,
    COS: Matrix,
    SIN: Matrix,
    K: Stacks,
    V: Stacks,
    HEADS: Stack,
    PARTS: Stacks,
    MAXIMA: Stack,
    DENOMINATORS: Stack,
    STREAM: Matrix,
    ACTIVE: Matrix,
    LOGITS: Matrix,
    BEST: Matrix,
    steps: int,
    eps: float,
    scale: float,
    HIDDEN: ct.Constant[int],
    Q_HEADS: ct.Constant[int],
    KV_HEADS: ct.Constant[int],
    HALF: ct.Constant[int],
    SPLITS: ct.Constant[int],
    BLOCKS: ct.Constant[int],
    CHUNKS: ct.Constant[tuple],
    ROWS: ct.Constant[tuple],
    DEPTH: ct.Constant[int],
    TILE_B: ct.Constant[int],
    TILE_P: ct.Constant[int],
    MERGED: ct.Constant[int],
    SPAN: ct.Constant[int],
    TILE_KV: ct.Constant[int],
    LIMIT: ct.Constant[int],
):
    """The first `steps` phases of PROGRAM. Grid (BLOCKS,), all of them resident.

    int32: PROGRAM [phases, 2] kind and layer; STARTS [kinds, BLOCKS + 1] units of each block; ARRIVED [2, phases]; TURN [1] which set of ARRIVED;
    STUCK [2] with LIMIT > 0: phase + 1 and block that gave up waiting after LIMIT looks; COUNTERS [2, ..] position and keys. int64: TOKENS [..],
    RECENT [.., ..], CLOCK [2], as `engine.state.State` has them.
    Weights, of L layers: EMBEDDING [vocab, HIDDEN], NORMS [2 L + 1, HIDDEN], W_QKV [L, heads * head_dim, HIDDEN],
    W_OUT [L, HIDDEN, q_heads * head_dim], W_GATE_UP [L, 2 * inter, HIDDEN] (gate and up take turns), W_DOWN [L, HIDDEN, inter],
    W_HEAD [1, vocab, HIDDEN]. COS, SIN fp32 [max_len, HALF]. Cache: K, V [L, KV_HEADS, max_len, 2 * HALF].
    Values: HEADS [L, Q_HEADS + 2 KV_HEADS, 2 * HALF], PARTS fp32 [L, SPLITS, Q_HEADS, 2 * HALF], MAXIMA and DENOMINATORS fp32 [L, SPLITS, Q_HEADS],
    STREAM [2 L, HIDDEN] behind attention and MLP of each layer, ACTIVE [L, inter], LOGITS [1, vocab], BEST int32 [2, BLOCKS].
    scale: of scores, times log2(e). Tiles of weights are ROWS (of qkv, out, gate and up, down, head) by a whole row, that is CHUNKS: (columns, index
    of a tile so wide) for rows of HIDDEN, of q_heads * head_dim and of inter elements. DEPTH of them are under way at once. SPLITS: a power of two;
    MERGED: a part of it, ranges whose results are read at once. TILE_B, TILE_P: powers of two from BLOCKS and from the number of phases on.
    """
    block = ct.bid(0)
    turn = ct.load(TURN, (0,), ())
    token = ct.load(TOKENS, (0,), ()).astype(ct.int32)
    position = ct.load(COUNTERS, (0, 0), ())
    dtype = STREAM.dtype
    head_dim = 2 * HALF
    group = Q_HEADS // KV_HEADS
    span = max(SPAN, ct.cdiv(ct.cdiv(position + 1, SPLITS), TILE_KV) * TILE_KV)
    ranges = ct.cdiv(position + 1, span)

    if block == 0:
        ct.store(ARRIVED, (1 - turn, 0), ct.zeros((1, TILE_P), ct.int32), allow_tma=False)

    def wait(phase):
        # An atomic's result is one for the whole block. A load is done by every thread for itself: warps would leave this loop at different looks,
        # and be at different barriers from then on.
        seen, looks = 0, 0
        if LIMIT:
            looks = looks_so_far(STUCK, LIMIT)
        while seen < BLOCKS:
            seen = ct.atomic_add(ARRIVED, (turn, phase), 0, memory_order=ct.MemoryOrder.ACQUIRE, memory_scope=DEVICE)
            if LIMIT:
                looks = looks + 1
                if (looks == LIMIT) & (seen < BLOCKS):
                    give_up(STUCK, phase, block)
                    seen = BLOCKS

    def stream(row, tile, WIDTH, MAY_START):
        """fp32 [1, WIDTH] of the residual stream; if MAY_START row 0 is the token's embedding, else there is no row 0."""
        if MAY_START:
            if row == 0:
                x = _load(EMBEDDING, (token, tile), (1, WIDTH))
            else:
                x = _load(STREAM, (row - 1, tile), (1, WIDTH))
        else:
            x = _load(STREAM, (row - 1, tile), (1, WIDTH))
        return x.astype(ct.float32)

    def normed(row, MAY_START):
        """A row of the stream by the norm of the same number: fp32 tiles [1, columns], one for each of CHUNKS[0]."""
        xs: tuple = ()
        squares = 0.0
        for columns, i in ct.static_iter(CHUNKS[0]):
            x = stream(row, i, columns, MAY_START)
            squares = squares + ct.sum(x * x)
            xs = (*xs, x)
        rstd = 1.0 / ct.sqrt(squares * (1.0 / HIDDEN) + eps)
        found: tuple = ()
        for n in ct.static_iter(range(len(xs))):
            weight = _load(NORMS, (row, CHUNKS[0][n][1]), (1, CHUNKS[0][n][0])).astype(ct.float32)
            found = (*found, ((xs[n] * rstd).astype(dtype).astype(ct.float32) * weight).astype(dtype).astype(ct.float32))
        return found

    def each_tile(step, first, last, W, layer, N, PARTS_OF_ROW, prepare, use, state):
        """use(unit, fp32 [N], state) for the tiles from first to last of W [layers, rows, columns] times what prepare() gives; the last state.

        The first tiles are under way before this block waits for the phase before, whose values prepare() reads.
        """

        def tile(unit):
            chunks: tuple = ()
            for columns, i in ct.static_iter(PARTS_OF_ROW):
                chunks = (*chunks, _load(W, (layer, unit, i), (1, N, columns)).reshape((N, columns)))
            return chunks

        def product(chunks, xs):
            y = ct.sum(chunks[0].astype(ct.float32) * xs[0], axis=1)
            for i in ct.static_iter(range(1, len(chunks))):
                y = y + ct.sum(chunks[i].astype(ct.float32) * xs[i], axis=1)
            return y

        ahead: tuple = ()
        for i in ct.static_iter(range(DEPTH)):
            ahead = (*ahead, tile(max(0, min(first + i, last - 1))))
        if step > 0:
            wait(step - 1)
        xs = prepare()
        for unit in range(first, last):
            state = use(unit, product(ahead[0], xs), state)
            rest: tuple = ()
            for i in ct.static_iter(range(1, DEPTH)):
                rest = (*rest, ahead[i])
            # Past the last tile the last again, which is near: a loop of its own for the end would double the code, and its registers spill.
            ahead = (*rest, tile(min(unit + DEPTH, last - 1)))
        return state

    def turned(layer, head):
        """Both halves [1, HALF] of a query or key, rotated."""
        both = _load(HEADS, (layer, head, 0), (1, 1, head_dim)).reshape((2, HALF)).astype(ct.float32)
        first, second = ct.extract(both, (0, 0), (1, HALF)), ct.extract(both, (1, 0), (1, HALF))
        cos, sin = _load(COS, (position, 0), (1, HALF)), _load(SIN, (position, 0), (1, HALF))
        return (first * cos - second * sin).astype(dtype), (second * cos + first * sin).astype(dtype)

    def attend(layer, head, split):
        """One query head over one range of keys. The newest key and value are not in the cache yet: `append` puts them there."""
        kv_head = head // group
        first, second = turned(layer, head)
        first, second = first.astype(ct.float32), second.astype(ct.float32)
        k_first, k_second = turned(layer, Q_HEADS + kv_head)
        own = ct.sum(first * k_first.astype(ct.float32) + second * k_second.astype(ct.float32), axis=1, keepdims=True) * scale
        own_v = _load(HEADS, (layer, Q_HEADS + KV_HEADS + kv_head, 0), (1, 1, head_dim)).reshape((1, head_dim)).astype(ct.float32)
        newest = position < (split + 1) * span
        maximum, denominator = ct.where(newest, own, FLOOR), ct.where(newest, ct.ones((1, 1), ct.float32), 0.0)
        total = ct.where(newest, own_v, 0.0)
        q = ct.cat((first, second), axis=1)
        end = min((split + 1) * span, position)
        for j in range(split * span // TILE_KV, ct.cdiv(end, TILE_KV)):
            seen = (j * TILE_KV + ct.arange(TILE_KV, dtype=ct.int32)).reshape((TILE_KV, 1)) < end
            k = _load(K, (layer, kv_head, j, 0), (1, 1, TILE_KV, head_dim)).reshape((TILE_KV, head_dim))
            v = _load(V, (layer, kv_head, j, 0), (1, 1, TILE_KV, head_dim)).reshape((TILE_KV, head_dim))
            scores = ct.where(seen, ct.sum(k.astype(ct.float32) * q, axis=1, keepdims=True), -math.inf)
            weights, factor, maximum, denominator = softmax_step(scores, maximum, denominator, scale, dtype, 0, 1)
            v = ct.where(seen, v.astype(ct.float32), 0.0)  # hidden memory may hold NaN, and 0 * NaN is NaN
            total = total * factor + ct.sum(weights.astype(ct.float32) * v, axis=0, keepdims=True)
        at = (layer, split, head)
        store_inside(PARTS, (*at, 0), total.reshape((1, 1, 1, head_dim)))
        store_inside(MAXIMA, at, maximum.reshape((1, 1, 1)))
        store_inside(DENOMINATORS, at, denominator.reshape((1, 1, 1)))

    def append():
        """Keys and values of all layers into the cache, when nobody reads it any more."""
        for index in range(block, K.shape[0] * KV_HEADS, BLOCKS):
            layer, head = index // KV_HEADS, index % KV_HEADS
            first, second = turned(layer, Q_HEADS + head)
            v = _load(HEADS, (layer, Q_HEADS + KV_HEADS + head, 0), (1, 1, head_dim))
            store_inside(K, (layer, head, position, 0), first.reshape((1, 1, 1, HALF)))
            store_inside(K, (layer, head, position, 1), second.reshape((1, 1, 1, HALF)))
            store_inside(V, (layer, head, position, 0), v.reshape((1, 1, 1, head_dim)))

    def attention(layer):
        """The ranges' results as one: fp32 tiles [1, columns], one for each of CHUNKS[1]."""
        found: tuple = ()
        for columns, chunk in ct.static_iter(CHUNKS[1]):
            heads = columns // head_dim
            maximum = ct.full((heads, 1), FLOOR, ct.float32)
            denominator = ct.zeros((heads, 1), ct.float32)
            total = ct.zeros((heads, head_dim), ct.float32)
            for i in range(ct.cdiv(ranges, MERGED)):
                states: tuple = ()
                largest = maximum
                for j in ct.static_iter(range(MERGED)):
                    at = (layer, min(i * MERGED + j, ranges - 1), chunk)  # past the last the last again, for nothing
                    top = _load(MAXIMA, at, (1, 1, heads)).reshape((heads, 1))
                    below = _load(DENOMINATORS, at, (1, 1, heads)).reshape((heads, 1))
                    part = _load(PARTS, (*at, 0), (1, 1, heads, head_dim)).reshape((heads, head_dim))
                    states = (*states, (top, below, part))
                    largest = ct.maximum(largest, top)
                shrink = ct.exp2(maximum - largest)
                total, denominator, maximum = total * shrink, denominator * shrink, largest
                for j in ct.static_iter(range(MERGED)):
                    top, below, part = states[j]
                    factor = ct.where(i * MERGED + j < ranges, ct.exp2(top - largest), 0.0)
                    total, denominator = total + part * factor, denominator + below * factor
            mixed = (total * (1.0 / denominator)).astype(dtype).astype(ct.float32)
            found = (*found, mixed.reshape((1, columns)))
        return found

    def active(layer):
        xs: tuple = ()
        for columns, i in ct.static_iter(CHUNKS[2]):
            xs = (*xs, _load(ACTIVE, (layer, i), (1, columns)).astype(ct.float32))
        return xs

    for step in range(steps):
        kind, layer = ct.load(PROGRAM, (step, 0), ()), ct.load(PROGRAM, (step, 1), ())
        first, last = ct.load(STARTS, (kind, block), ()), ct.load(STARTS, (kind, block + 1), ())
        if kind == QKV:

            def put_qkv(unit, y, state):
                per_head = head_dim // ROWS[0]
                at = (layer, unit // per_head, unit % per_head)
                store_inside(HEADS, at, y.astype(dtype).reshape((1, 1, ROWS[0])))
                return state

            each_tile(step, first, last, W_QKV, layer, ROWS[0], CHUNKS[0], lambda: normed(2 * layer, True), put_qkv, ())
        elif kind == ATTENTION:
            wait(step - 1)
            for unit in range(first, last):
                if unit % SPLITS < ranges:
                    attend(layer, unit // SPLITS, unit % SPLITS)
        elif kind == OUT:

            def put_out(unit, y, state):
                y = y.reshape((1, ROWS[1])) + stream(2 * layer, unit, ROWS[1], True)
                store_inside(STREAM, (2 * layer, unit), y.astype(dtype))
                return state

            each_tile(step, first, last, W_OUT, layer, ROWS[1], CHUNKS[1], lambda: attention(layer), put_out, ())
        elif kind == GATE_UP:

            def put_active(unit, y, state):
                store_inside(ACTIVE, (layer, unit), silu_mul_of_pairs(y.reshape((1, ROWS[2]))).astype(dtype))
                return state

            each_tile(step, first, last, W_GATE_UP, layer, ROWS[2], CHUNKS[0], lambda: normed(2 * layer + 1, False), put_active, ())
        elif kind == DOWN:

            def put_down(unit, y, state):
                y = y.reshape((1, ROWS[3])) + stream(2 * layer + 1, unit, ROWS[3], False)
                store_inside(STREAM, (2 * layer + 1, unit), y.astype(dtype))
                return state

            each_tile(step, first, last, W_DOWN, layer, ROWS[3], CHUNKS[2], lambda: active(layer), put_down, ())
        elif kind == HEAD:

            def put_logits(unit, y, state):
                y = y.astype(dtype).reshape((1, ROWS[4]))
                store_inside(LOGITS, (0, unit), y)
                return take_better(state[0], state[1], y.astype(ct.float32), unit)

            append()
            start = empty_best((1, ROWS[4]))
            best, when = each_tile(step, first, last, W_HEAD, 0, ROWS[4], CHUNKS[0], lambda: normed(2 * layer, False), put_logits, start)
            top, column = first_best(best, when * ROWS[4] + ct.arange(ROWS[4], dtype=ct.int32).reshape((1, ROWS[4])))
            ct.store(BEST, (0, block), ct.bitcast(top, ct.int32))
            ct.store(BEST, (1, block), column)
        elif block == 0:
            wait(step - 1)
            both = ct.load(BEST, (0, 0), (2, TILE_B), padding_mode=ZERO, allow_tma=False)
            inside = ct.arange(TILE_B, dtype=ct.int32).reshape((1, TILE_B)) < BLOCKS
            tops = ct.where(inside, ct.bitcast(ct.extract(both, (0, 0), (1, TILE_B)), ct.float32), -math.inf)
            columns = ct.where(inside, ct.extract(both, (1, 0), (1, TILE_B)), NOWHERE)
            chosen = first_best(tops, columns)[1].astype(ct.int64)
            clock = ct.load(CLOCK, (0,), ())
            ct.store(TOKENS, (0,), chosen.reshape((1,)))
            ct.store(RECENT, (clock, 0), chosen)
            ct.store(CLOCK, (0,), clock + 1)
            ct.store(CLOCK, (1,), ct.load(CLOCK, (1,), ()) + 1)
            ct.store(COUNTERS, (0, 0), position + 1)
            ct.store(COUNTERS, (1, 0), ct.load(COUNTERS, (1, 0), ()) + 1)
        ct.atomic_add(ARRIVED, (turn, step), 1, memory_order=ct.MemoryOrder.RELEASE, memory_scope=DEVICE)

    if block == 0:
        if steps == 1:  # later phases already tell that every block has read its turn
            wait(0)
        ct.store(TURN, (0,), 1 - turn)
