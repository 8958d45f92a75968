"""The step as one launch of one or more tokens: docs/megakernel.md says how it runs.

Numerics: products and the residual sums in fp32 (across blocks in fixed point of 2**-FRACTION),
    rounded to the model's dtype where transformers rounds.
"""

import math

import cuda.tile as ct

from .attend import attention, first_tile, publish_qkv, rope_at
from .shape import DOWN, GATE_UP, HEAD, OUT, QKV, layout_of, placed
from .sums import add_outputs, clear, owned, read, summed
from .tiles import active_of, attended_sets, groups_of, inner_sets, normed, outputs_of, part_of, product, scales_of, twice
from .words import NOWHERE, Matrix, Stack, Stacks, Vector, above, added, as_bits, epoch_of, fetch, high_of, look, low_of, polled, put


def stream_row(array, row, s):
    """Words of an embedding or of a norm's weights, a tile for each set."""
    return tuple(fetch(array, (row, n), (1, s.strips * s.wide_width)) for n in ct.static_iter(range(s.stream_sets)))


def embedded(EMBEDDING, token, s, dtype):
    """The residual stream of a token: for each set, fp32 of the lower and the higher neighbours."""
    words = stream_row(EMBEDDING, token, s)
    return tuple((low_of(words[n], dtype), high_of(words[n], dtype)) for n in ct.static_iter(range(s.stream_sets)))


def better_of(LOGITS, ys, best, where, first, groups, places, s):
    """Writes a turn's logits. Returns each thread's largest so far, and where."""
    sums = ct.reduce(ys, 0, added, (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0), keepdims=True)
    slot, field = part_of(places, s.wide_fields)
    for r in ct.static_iter(range(8)):
        place = ((first + slot) * s.wide_fields + field) * 8 + r
        inside = (slot < groups) & (place < s.vocab)
        logit = sums[r].astype(LOGITS.dtype)
        ct.scatter(LOGITS, place, logit, mask=inside)
        value = ct.where(inside, logit.astype(ct.float32), -math.inf)
        better = (value > best) | ((value == best) & (place < where))
        best, where = ct.where(better, value, best), ct.where(better, place, where)
    return best, where


def greedy(BEST, best, where, epoch, place, waiter, s):
    """The likeliest token of all blocks, which each of them finds; and the polls that are left."""
    TILE, block = BEST.shape[1], waiter[1]
    number = above(epoch)
    top = ct.max(best)
    column = ct.min(ct.where(best == top, where, NOWHERE))
    put(BEST, (0, block), as_bits(ct.bitcast(ct.full((1, 1), top, ct.float32), ct.int32)) | number)
    put(BEST, (1, block), as_bits(ct.full((1, 1), column, ct.int32)) | number)
    inside = ct.arange(TILE, dtype=ct.int32).reshape((1, TILE)) < s.blocks

    def looks_at(zero):
        seen = look(BEST, (zero, 0), (2, TILE))
        return seen, ct.min(ct.where(inside, epoch_of(seen), epoch))

    seen, patience = polled(looks_at, ct.zeros((2, TILE), ct.int64), epoch, place, waiter)
    values = seen.astype(ct.int32)
    tops = ct.where(inside, ct.bitcast(ct.extract(values, (0, 0), (1, TILE)), ct.float32), -math.inf)
    columns = ct.where(inside & (tops == ct.max(tops)), ct.extract(values, (1, 0), (1, TILE)), NOWHERE)
    return max(min(ct.min(columns), s.vocab - 1), 0), patience


def remember(RECENT, CLOCK, token):
    clock = ct.load(CLOCK, (0,), ())
    ct.store(RECENT, (clock, 0), token.astype(ct.int64))
    ct.store(CLOCK, (0,), clock + 1)
    ct.store(CLOCK, (1,), ct.load(CLOCK, (1,), ()) + 1)


@ct.kernel
def mega_kernel(
    W: Stack,
    SCALES: Vector,
    EMBEDDING: Matrix,
    NORMS: Matrix,
    HEAD_NORMS: Stack,
    ROPE: Stack,
    K: Stack,
    V: Stack,
    SUMS: Stack,
    QKV_WORDS: Stack,
    SHARES: Stacks,
    BEST: Matrix,
    LOGITS: Vector,
    EPOCH: Vector,
    STUCK: Vector,
    TOKENS: Vector,
    COUNTERS: Matrix,
    RECENT: Matrix,
    CLOCK: Vector,
    steps: int,
    choose: int,
    eps: float,
    scale: float,
    SCHEDULE: ct.Constant[tuple],
    LIMIT: ct.Constant[int],
):
    """`steps` tokens, each chosen from the logits of the one before if `choose`, else one. Grid
    (blocks,), all resident.

    W, SCALES, EMBEDDING, NORMS, HEAD_NORMS, ROPE: as `pack` makes them. Their int32 words, but for
        e4m3 weights, and those of K and V [layers * kv_heads, max_len, head words] are two
        neighbours of 16 bits.
    SUMS, int64: of odd and even epochs, behind attention and behind the MLP of each layer.
        QKV_WORDS, int64: a layer's queries, keys and values, then their partners. Both have an axis
        of copies, of stride 0, that gives each thread a word to poll.
    SHARES, int64 [layers * q_heads, peers, 4, head words]: of a block's share of the keys, the fp32
        values of both neighbours, the highest score and the sum of the weights. BEST, int64 [2,
        blocks]: the largest logit and where.
    EPOCH [blocks]: each block's tokens so far. STUCK [2]: the least place * 256 + block of a wait
        that failed (a place is 8 * layer + an index of PLACES), and the least row of a sum beyond
        its range.
    TOKENS, COUNTERS, RECENT, CLOCK: as `engine.state.State` has them. scale: times log2(e).
    SCHEDULE: `Schedule.numbers`. LIMIT: of the polls of a wait.
    """
    s = layout_of(SCHEDULE)
    block, dtype = ct.bid(0), LOGITS.dtype
    STRIPS, LINE, TURNS, STEP_TURNS = s.strips, s.line, s.turns, s.layers * s.layer_turns + s.turns[4]
    OUT_PARTS = s.out_parts
    MOST = LINE // min(s.wide_width, min(s.out_width, s.down_width))  # fields of a line, of any form
    EACH = LINE // 4 // MOST
    o, i = ct.arange(MOST, dtype=ct.int32).reshape((1, MOST, 1)), ct.arange(EACH, dtype=ct.int32).reshape((1, 1, EACH))
    strip, places = ct.arange(STRIPS, dtype=ct.int32).reshape((STRIPS, 1, 1)), (o, i)
    own = owned(SUMS, block, (strip * MOST + o) * EACH + i, s.blocks)
    head, part = min(block // OUT_PARTS, s.q_heads - 1), block % OUT_PARTS
    epoch = look(EPOCH, (block,), (1,)).item() + 1
    token = look(TOKENS, (0,), (1,)).item().astype(ct.int32)
    position = look(COUNTERS, (0, 0), (1, 1)).item()
    x = embedded(EMBEDDING, token, s, dtype)
    norm = stream_row(NORMS, 0, s)
    rope = rope_at(ROPE, position, s)
    keys = first_tile(K, V, 0, head, position, part, s)
    some = fetch(W, (0, 0, 0), (STRIPS, 1, LINE)).reshape((STRIPS, LINE))  # for the layout
    xs = tuple(some for _ in ct.static_iter(range(s.pairs * max(s.stream_sets, s.down_sets))))
    active = tuple(ct.zeros((1, LINE // 4), ct.int32) for _ in ct.static_iter(range(TURNS[2])))
    best, where = ct.full((1, MOST, EACH), -math.inf, ct.float32), ct.full((1, MOST, EACH), NOWHERE, ct.int32)
    old = ct.zeros((STRIPS, MOST, EACH), ct.int64)
    turn, patience, unit = 0, LIMIT, 1.0
    for _ in range(steps * STEP_TURNS):
        kind, layer, sub, first, groups, sets, tile = placed(s, turn, block)
        this, other = (epoch & 1) * (2 * s.layers), (1 - (epoch & 1)) * (2 * s.layers)
        half = 2 * layer + (kind == DOWN)
        if ((kind == QKV) | (kind == GATE_UP) | (kind == HEAD)) & (sub == 0):
            if turn > 0:
                before, adders = 2 * layer - 1, s.blocks
                if kind == GATE_UP:
                    before, adders = 2 * layer, s.q_heads
                place = 8 * (before // 2) + 2 + before % 2
                x, patience = summed(SUMS, this + before, adders, place, x, (STUCK, block, patience), s, dtype)
            xs, unit = normed(x, norm, xs, unit, eps, s, dtype)
            if s.pairs > 1:
                if kind == HEAD:
                    xs = twice(xs, s)
        if ((kind == OUT) | (kind == DOWN)) & (sub == 0):
            old = read(SUMS, other + half, own)
        until = groups_of(kind, places, s) + 0 * strip
        if s.pairs > 1:
            scales = scales_of(SCALES, kind, layer, first, block, outputs_of(kind, first, part, places, strip, s), until, places, s)
        ys = product(W, tile, groups, sets, kind, until, xs, s, dtype)
        if s.pairs > 1:
            ys = tuple(ys[n] * unit * scales[n] for n in ct.static_iter(range(8)))
        # Loads from memory come back behind the weights that are under way, so they start a turn
        # before they are needed.
        turn = turn + 1
        if turn == STEP_TURNS:
            turn = 0
        norm = stream_row(NORMS, min(2 * (turn // s.layer_turns) + min(turn % s.layer_turns // TURNS[0], 1), 2 * s.layers), s)
        if kind == QKV:
            publish_qkv(QKV_WORDS, ys, layer, first, groups, epoch, places, s, dtype)
            if (sub == TURNS[0] - 1) & (block < s.attending):
                waiter = (STUCK, block, patience)
                words, patience = attention(
                    QKV_WORDS, SHARES, K, V, HEAD_NORMS, keys, rope, layer, head, part, position, epoch, eps, scale, waiter, s, dtype
                )
                xs, unit = attended_sets(words, xs, unit, s, dtype)
        elif (kind == OUT) | (kind == DOWN):
            slot, word, quarter, end = outputs_of(kind, first, part, places, strip, s)
            adders = s.q_heads
            if kind == DOWN:
                adders = s.blocks
            add_outputs(SUMS, ys, this + half, word, slot, groups, quarter, end, adders)
            if sub == 0:
                clear(SUMS, STUCK, other + half, own, old, block, s.blocks)
        elif kind == GATE_UP:
            if sub == 0:
                keys = first_tile(K, V, layer + 1, head, position, part, s)
            words = active_of(ys, places, s, dtype)
            active = tuple(ct.where(sub == n, words, active[n]) for n in ct.static_iter(range(TURNS[2])))
            if sub == TURNS[2] - 1:
                xs, unit = inner_sets(active, xs, unit, s, dtype)
        else:
            best, where = better_of(LOGITS, ys, best, where, first, groups, places, s)
        if turn == 0:
            if choose > 0:
                token, patience = greedy(BEST, best, where, epoch, 8 * s.layers, (STUCK, block, patience), s)
                if block == 0:
                    remember(RECENT, CLOCK, token)
            best, where = ct.full((1, MOST, EACH), -math.inf, ct.float32), ct.full((1, MOST, EACH), NOWHERE, ct.int32)
            epoch, position = epoch + 1, position + 1
            x = embedded(EMBEDDING, token, s, dtype)
            rope = rope_at(ROPE, position, s)
            keys = first_tile(K, V, 0, head, position, part, s)
    if (block == 0) & (choose > 0):
        put(TOKENS, (0,), ct.full((1,), token, ct.int64))
        put(COUNTERS, (0, 0), ct.full((1, 1), position, ct.int32))
        put(COUNTERS, (1, 0), look(COUNTERS, (1, 0), (1, 1)) + steps)
    put(EPOCH, (block,), ct.full((1,), epoch - 1, ct.int32))
