"""The step as one launch of one or more tokens: docs/megakernel.md says how it runs.

Numerics: products and the residual sums in fp32 (fixed point of 2**-FRACTION across blocks),
    rounded to the model's dtype where transformers rounds.
"""

import math

import cuda.tile as ct

from .attend import attention, keys_at, rope_at
from .tiles import DOWN, GATE_UP, HEAD, OUT, QKV, active_of, groups_of, inner_sets, normed, part_of, product, repeated, with_first
from .words import (
    ARRIVAL,
    DEVICE,
    FIELD,
    FIELD_BITS,
    FRACTION,
    HALF_FIELD,
    NOWHERE,
    RANGE,
    RELAXED,
    Matrix,
    Stack,
    Stacks,
    Vector,
    add,
    as_bits,
    count_of,
    epoch_of,
    fetch,
    high_of,
    look,
    low_of,
    packed,
    polled,
    publish,
    put,
    rounded,
)

SCALE = 2.0**FRACTION
LARGEST = 1.0e6  # of a term that is too large, as it adds up behind a sum


def dealt(block, first, rest, CLASSES, BLOCKS):
    """The first and the number of a block's groups, where the attending blocks share `first` of
    them evenly, and the others `rest`.
    """
    number, blocks, some, start = block, CLASSES[0], first, 0
    if block >= CLASSES[0]:
        number, blocks, some, start = block - CLASSES[0], max(BLOCKS - CLASSES[0], 1), rest, first
    here = start + number * some // blocks
    return here, start + (number + 1) * some // blocks - here


def placed(turn, block, LAYERS, FORMS, COUNTS, TURNS, CLASSES, BLOCKS):
    """Of a turn of a token: kind, layer, number in its phase; the first of its groups in the phase,
    how many they are, how many tiles a group is, and the first tile in W.
    """
    WIDE_SETS, SLOTS = FORMS[1], FORMS[0] // 4
    ATTENDING, QKV_FIRST, HEAD_FIRST, GATE_UP_1, SETS_1, GATE_UP_2, SETS_2 = CLASSES
    PER = TURNS[0] + TURNS[1] + TURNS[2] + TURNS[3]
    TILES_QKV, TILES_OUT = COUNTS[0] * WIDE_SETS, ATTENDING * COUNTS[1]
    TILES_GATE_UP = (ATTENDING * GATE_UP_1 + (BLOCKS - ATTENDING) * GATE_UP_2) * WIDE_SETS
    TILES_DOWN = (ATTENDING * SETS_1 + (BLOCKS - ATTENDING) * SETS_2) * COUNTS[2]
    TILES = TILES_QKV + TILES_OUT + TILES_GATE_UP + TILES_DOWN
    layer = min(turn // PER, LAYERS)
    sub, base = turn - layer * PER, layer * TILES
    attends, others = min(block, ATTENDING), max(block - ATTENDING, 0)  # blocks in front of this one
    kind, most, sets = HEAD, SLOTS, WIDE_SETS
    first, count = dealt(block, HEAD_FIRST, COUNTS[4] - HEAD_FIRST, CLASSES, BLOCKS)
    before = first * WIDE_SETS
    if layer < LAYERS:
        if sub < TURNS[0]:
            kind, most = QKV, SLOTS // 4
            first, count = dealt(block, QKV_FIRST, COUNTS[0] - QKV_FIRST, CLASSES, BLOCKS)
            before = first * WIDE_SETS
        elif sub < TURNS[0] + TURNS[1]:
            kind, most, sets = OUT, FORMS[2] // 4, 1
            sub, base = sub - TURNS[0], base + TILES_QKV
            first, count, before = 0, COUNTS[1], block * COUNTS[1]
            if block >= ATTENDING:
                count = 0
        elif sub < TURNS[0] + TURNS[1] + TURNS[2]:
            kind, most = GATE_UP, SLOTS // 2
            sub, base = sub - TURNS[0] - TURNS[1], base + TILES_QKV + TILES_OUT
            first, count, before = 0, GATE_UP_1, (attends * GATE_UP_1 + others * GATE_UP_2) * WIDE_SETS
            if block >= ATTENDING:
                count = GATE_UP_2
        else:
            kind, most, sets = DOWN, COUNTS[3], SETS_1
            sub, base = sub - TURNS[0] - TURNS[1] - TURNS[2], base + TILES_QKV + TILES_OUT + TILES_GATE_UP
            first, count, before = 0, COUNTS[2], (attends * SETS_1 + others * SETS_2) * COUNTS[2]
            if block >= ATTENDING:
                sets = SETS_2
    return kind, layer, sub, first + sub * most, max(0, min(most, count - sub * most)), sets, base + before + sub * most * sets


def add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


def add8(a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7


def row_of(array, row, SETS, WIDTH):
    """Words of an embedding or of a norm's weights, as tiles of the residual stream."""
    found: tuple = ()
    for n in ct.static_iter(range(SETS)):
        found = (*found, fetch(array, (row, n), (1, WIDTH)))
    return found


def planes_of(words, dtype):
    low: tuple = ()
    high: tuple = ()
    for n in ct.static_iter(range(len(words))):
        low, high = (*low, low_of(words[n], dtype)), (*high, high_of(words[n], dtype))
    return low, high


def tell_qkv(QKV_WORDS, ys, layer, first, groups, epoch, o, i, HEADS, FIELDS, SLOTS, HEAD_WORDS, dtype):
    """Publishes a block's rows, each pair of neighbours a word; queries and keys also where their
    partner under RoPE is looked for.
    """
    STRIPS, MOST, WORDS = ys[0].shape[0], ys[0].shape[1], (HEADS[0] + 2 * HEADS[1]) * HEAD_WORDS
    rest, field = part_of(o, i, MOST, FIELDS)
    pair, slot = rest // (SLOTS // 4), rest % (SLOTS // 4)
    even = ct.where(pair == 0, ys[0], ct.where(pair == 1, ys[2], ct.where(pair == 2, ys[4], ys[6])))
    odd = ct.where(pair == 0, ys[1], ct.where(pair == 1, ys[3], ct.where(pair == 2, ys[5], ys[7])))
    sums = ct.reduce((even, odd), 0, add2, (0.0, 0.0), keepdims=True)
    word = ((first + slot) * FIELDS + field) * 4 + pair
    word = ct.where((slot < groups) & (word < WORDS), word, NOWHERE)
    at = word % HEAD_WORDS
    partner = ct.where(word < (HEADS[0] + HEADS[1]) * HEAD_WORDS, WORDS + word - at + (at + HEAD_WORDS // 2) % HEAD_WORDS, NOWHERE)
    # By all threads, each a word: what fewer threads do has a result that all wait for.
    strip = ct.arange(STRIPS, dtype=ct.int32).reshape((STRIPS, 1, 1))
    place = ct.where(strip == 0, word, ct.where(strip == 1, partner, NOWHERE))
    publish(QKV_WORDS, (layer, 0, place), as_bits(packed(sums[0], sums[1], dtype)), epoch)


def add_outputs(SUMS, ys, row, word, slot, groups, quarter, end, adders):
    """A block's part of a sum: rows s and s + 4 of a tile are neighbours, of words `word` + s *
    `quarter` up to `end`.

    While no term is more than RANGE / 2 / adders, sums are at most RANGE / 2. Larger terms add up
    in the word behind the row's last: see `clear`.
    """
    each = HALF_FIELD // adders
    bias = ct.astype(each, ct.int64) * ((1 << FIELD_BITS) + 1) + ARRIVAL
    largest = ct.abs(ys[0])
    for s in ct.static_iter(range(1, 8)):
        largest = ct.maximum(largest, ct.abs(ys[s]))
    for s in ct.static_iter(range(4)):
        a, b = (ys[s] * SCALE).astype(ct.int32).astype(ct.int64), (ys[s + 4] * SCALE).astype(ct.int32).astype(ct.int64)
        at = word + s * quarter
        add(SUMS, (row, 0, ct.where((slot < groups) & (at < end), at, NOWHERE)), a + (b << FIELD_BITS) + bias)
    small = largest <= RANGE / 2 / adders  # not so for NaN
    size = (ct.where(largest < LARGEST, largest, LARGEST) + 1.0).astype(ct.int32).astype(ct.int64)
    add(SUMS, (row, 0, ct.where(small | (slot >= groups), NOWHERE, SUMS.shape[2] - 1)), size)


def owned(SUMS, block, thread, BLOCKS):
    """The words of a sum that a block clears, each by a thread."""
    WORDS = SUMS.shape[2]
    word = block * ct.cdiv(WORDS, BLOCKS) + thread
    return ct.where((thread < ct.cdiv(WORDS, BLOCKS)) & (word < WORDS), word, NOWHERE)


def clear(SUMS, STUCK, row, word, old, block, BLOCKS):
    """Takes from words of a sum what has been read in them, `old`, and counts 1; who has the last
    word says if terms were too large.
    """
    LAST = SUMS.shape[2] - 1
    add(SUMS, (row, 0, word), ct.where(word == LAST, ct.astype(0, ct.int64), ct.astype(ARRIVAL, ct.int64)) - old)
    if block == LAST // ct.cdiv(LAST + 1, BLOCKS):
        bad = (word == LAST) & (old > RANGE // 2)
        ct.atomic_min(STUCK, ct.where(bad, 1, NOWHERE), row + word * 0, memory_order=RELAXED, memory_scope=DEVICE)


def summed(SUMS, row, adders, place, x, waiter, dtype, RUN):
    """The residual stream x, planes of both neighbours, plus a sum as soon as all of it is there;
    and the patience left.
    """
    SETS, WIDTH, COPIES = len(x[0]), x[0][0].shape[1], SUMS.shape[1]
    target = adders + 1  # who clears comes too
    RUNS = SETS * WIDTH // RUN  # the last words of a run are told last: every block waits for one of these first
    mine = waiter[1] % RUNS * RUN + RUN - 1 - waiter[1] // RUNS % RUN

    def first(zero):
        """One word, another for each block, by an atomic: what all blocks look at again and again
        comes late to all.
        """
        word = ct.atomic_add(SUMS, (row + zero, 0, mine), 0, memory_order=RELAXED, memory_scope=DEVICE)
        return zero, count_of(word)

    def looks_at(zero):
        seen: tuple = ()
        counts = ct.full((COPIES, WIDTH), NOWHERE, ct.int32)
        for n in ct.static_iter(range(SETS)):
            words = look(SUMS, (row + zero, 0, n), (1, COPIES, WIDTH)).reshape((COPIES, WIDTH))
            seen, counts = (*seen, words), ct.minimum(counts, count_of(words))
        return seen, ct.min(counts)

    nothing: tuple = ()
    for n in ct.static_iter(range(SETS)):
        nothing = (*nothing, ct.zeros((COPIES, WIDTH), ct.int64))
    patience = polled(first, 0, target, place, waiter)[1]
    seen, patience = polled(looks_at, nothing, target, place, (waiter[0], waiter[1], patience))
    offset = HALF_FIELD // adders * adders
    low: tuple = ()
    high: tuple = ()
    for n in ct.static_iter(range(SETS)):
        words = seen[n]
        if COPIES > 1:
            words = ct.extract(words, (0, 0), (1, WIDTH))
        a, b = (words.astype(ct.int32) & FIELD) - offset, ((words >> FIELD_BITS).astype(ct.int32) & FIELD) - offset
        low = (*low, rounded(x[0][n] + a.astype(ct.float32) * (1.0 / SCALE), dtype))
        high = (*high, rounded(x[1][n] + b.astype(ct.float32) * (1.0 / SCALE), dtype))
    return (low, high), patience


def better_of(LOGITS, ys, best, where, first, groups, o, i, FIELDS, VOCAB):
    """Writes a turn's logits; and the best of them and of `best`, each thread of its own, and
    where.
    """
    sums = ct.reduce(ys, 0, add8, (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0), keepdims=True)
    slot, field = part_of(o, i, ys[0].shape[1], FIELDS)
    for s in ct.static_iter(range(8)):
        place = ((first + slot) * FIELDS + field) * 8 + s
        inside = (slot < groups) & (place < VOCAB)
        logit = sums[s].astype(LOGITS.dtype)
        ct.scatter(LOGITS, place, logit, mask=inside)
        value = ct.where(inside, logit.astype(ct.float32), -math.inf)
        better = (value > best) | ((value == best) & (place < where))
        best, where = ct.where(better, value, best), ct.where(better, place, where)
    return best, where


def greedy(BEST, best, where, epoch, place, waiter, BLOCKS, VOCAB):
    """The likeliest token of all blocks', which each of them finds; and the patience left."""
    TILE, block = BEST.shape[1], waiter[1]
    number = ct.astype(epoch, ct.int64) << 32
    top = ct.max(best)
    column = ct.min(ct.where(best == top, where, NOWHERE))
    put(BEST, (0, block), as_bits(ct.bitcast(ct.full((1, 1), top, ct.float32), ct.int32)) | number)
    put(BEST, (1, block), as_bits(ct.full((1, 1), column, ct.int32)) | number)
    inside = ct.arange(TILE, dtype=ct.int32).reshape((1, TILE)) < BLOCKS

    def looks_at(zero):
        seen = look(BEST, (zero, 0), (2, TILE))
        return seen, ct.min(ct.where(inside, epoch_of(seen), epoch))

    seen, patience = polled(looks_at, ct.zeros((2, TILE), ct.int64), epoch, place, waiter)
    values = seen.astype(ct.int32)
    tops = ct.where(inside, ct.bitcast(ct.extract(values, (0, 0), (1, TILE)), ct.float32), -math.inf)
    columns = ct.where(inside & (tops == ct.max(tops)), ct.extract(values, (1, 0), (1, TILE)), NOWHERE)
    return max(min(ct.min(columns), VOCAB - 1), 0), patience


def remember(RECENT, CLOCK, token):
    clock = ct.load(CLOCK, (0,), ())
    ct.store(RECENT, (clock, 0), token.astype(ct.int64))
    ct.store(CLOCK, (0,), clock + 1)
    ct.store(CLOCK, (1,), ct.load(CLOCK, (1,), ()) + 1)


@ct.kernel
def mega_kernel(
    W: Stack,
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
    MODEL: ct.Constant[tuple],
    FORMS: ct.Constant[tuple],
    COUNTS: ct.Constant[tuple],
    TURNS: ct.Constant[tuple],
    CLASSES: ct.Constant[tuple],
    SIZES: ct.Constant[tuple],
    BLOCKS: ct.Constant[int],
    LIMIT: ct.Constant[int],
):
    """`steps` tokens, each chosen from the logits of the one before if `choose`, else one. Grid
    (BLOCKS,), all resident.

    int32, two neighbours of 16 bits each: W [tiles * 8 * STRIPS, 1, LINE], as `pack` has it;
    EMBEDDING [vocab, words], NORMS [2 L + 1, words], both padded to whole tiles; HEAD_NORMS [L or
    1, 4, head words], of queries, their partners, keys, their partners; K and V [L * kv heads,
    max_len, head words]. ROPE fp32 [max_len, 4, head words]. int64: SUMS [2 * 2 L, copies, words +
    1], behind attention and behind the MLP of each layer, of odd and even epochs; QKV_WORDS [L,
    copies, 2 * words], a layer's queries, keys and values, then the partners; both with an axis of
    copies, of stride 0, that gives each thread a word to poll; SHARES [L * q heads, peers, 4, head
    words], of a block's share of a query's keys fp32 values of both neighbours, their highest score
    and the sum of their weights; BEST [2, blocks], the largest logit and where. int32: EPOCH
    [BLOCKS] tokens so far, each block its own; STUCK [2], the least place * 256 + block that gave
    up, and the least row of a sum beyond its range. A place is 8 * layer + a number of PLACES.
    TOKENS int64, COUNTERS int32 [2, ..], RECENT int64 [.., ..], CLOCK int64: as
    `engine.state.State` has them. scale: of scores, times log2(e).
    MODEL: layers, hidden, query heads, key heads, vocab, norms of heads. FORMS: width and sets of
        wide tiles, width of `out`, width and sets of `down`. COUNTS: groups of qkv, of a block's
        out and down, of a part of down, of the head; blocks and words of a head's out. TURNS: as
        `Schedule`. CLASSES: blocks that attend, their groups of qkv and of the head; of each of
        them groups of gate and up, and sets of `down`, and the same of the others. SIZES: STRIPS,
        LINE, SPAN, SHORT, LATENCY.
    """
    block, dtype = ct.bid(0), LOGITS.dtype
    LAYERS, HIDDEN, Q_HEADS, KV_HEADS, VOCAB, NORMED = MODEL
    WIDTH, SETS, OUT_WIDTH, DOWN_WIDTH, DOWN_SETS = FORMS
    OUT_PARTS, OUT_WORDS = COUNTS[5], COUNTS[6]
    STRIPS, LINE, SPAN, SHORT, LATENCY = SIZES
    HEAD_WORDS, WORDS = OUT_WIDTH, SETS * STRIPS * WIDTH
    MOST = LINE // min(WIDTH, min(OUT_WIDTH, DOWN_WIDTH))  # fields of a line, at their smallest
    EACH = LINE // 4 // MOST
    PER = TURNS[0] + TURNS[1] + TURNS[2] + TURNS[3]
    o, i = ct.arange(MOST, dtype=ct.int32).reshape((1, MOST, 1)), ct.arange(EACH, dtype=ct.int32).reshape((1, 1, EACH))
    strip = ct.arange(STRIPS, dtype=ct.int32).reshape((STRIPS, 1, 1))
    own = owned(SUMS, block, (strip * MOST + o) * EACH + i, BLOCKS)
    head, part = min(block // OUT_PARTS, Q_HEADS - 1), block % OUT_PARTS
    HEADS, FIELDS = (Q_HEADS, KV_HEADS), LINE // WIDTH
    epoch = look(EPOCH, (block,), (1,)).item() + 1
    token = look(TOKENS, (0,), (1,)).item().astype(ct.int32)
    position = look(COUNTERS, (0, 0), (1, 1)).item()
    x = planes_of(row_of(EMBEDDING, token, SETS, STRIPS * WIDTH), dtype)
    norm = row_of(NORMS, 0, SETS, STRIPS * WIDTH)
    rope = rope_at(ROPE, position, HEAD_WORDS)
    keys = keys_at(K, V, 0, head, position, part, LAYERS, HEADS, SPAN, SHORT, OUT_PARTS)
    xs: tuple = ()
    for _ in ct.static_iter(range(max(SETS, DOWN_SETS))):
        xs = (*xs, fetch(W, (0, 0, 0), (STRIPS, 1, LINE)).reshape((STRIPS, LINE)))
    active: tuple = ()
    for _ in ct.static_iter(range(TURNS[2])):
        active = (*active, ct.zeros((1, LINE // 4), ct.int32))
    best, where = ct.full((1, MOST, EACH), -math.inf, ct.float32), ct.full((1, MOST, EACH), NOWHERE, ct.int32)
    old = ct.zeros((STRIPS, MOST, EACH), ct.int64)
    turn, patience = 0, LIMIT
    for _ in range(steps * (LAYERS * PER + TURNS[4])):
        kind, layer, sub, first, groups, sets, tile = placed(turn, block, LAYERS, FORMS, COUNTS, TURNS, CLASSES, BLOCKS)
        this, other = (epoch & 1) * (2 * LAYERS), (1 - (epoch & 1)) * (2 * LAYERS)
        half = 2 * layer + (kind == DOWN)
        if ((kind == QKV) | (kind == GATE_UP) | (kind == HEAD)) & (sub == 0):
            if turn > 0:
                before, adders = 2 * layer - 1, BLOCKS
                if kind == GATE_UP:
                    before, adders = 2 * layer, Q_HEADS
                place = 8 * (before // 2) + 2 + before % 2
                x, patience = summed(SUMS, this + before, adders, place, x, (STUCK, block, patience), dtype, COUNTS[2] * (LINE // DOWN_WIDTH))
            xs = normed(x, norm, xs, eps, HIDDEN, STRIPS, LINE, dtype)
        if ((kind == OUT) | (kind == DOWN)) & (sub == 0):
            old = ct.atomic_add(SUMS, (other + half, 0, own), 0, memory_order=RELAXED, memory_scope=DEVICE)
        until = groups_of(kind, o, i, FORMS, LINE, MOST) + 0 * strip
        ys = product(W, tile, groups, sets, kind, until, xs, FORMS, STRIPS, LINE, MOST, LATENCY, dtype)
        # What memory has comes late behind the weights that are under way: asked for a turn before
        # it is needed.
        turn = turn + 1
        if turn == LAYERS * PER + TURNS[4]:
            turn = 0
        norm = row_of(NORMS, min(2 * (turn // PER) + min(turn % PER // TURNS[0], 1), 2 * LAYERS), SETS, STRIPS * WIDTH)
        if kind == QKV:
            tell_qkv(QKV_WORDS, ys, layer, first, groups, epoch, o, i, HEADS, FIELDS, WIDTH // 4, HEAD_WORDS, dtype)
            if (sub == TURNS[0] - 1) & (block < Q_HEADS * OUT_PARTS):
                words, patience = attention(
                    QKV_WORDS, SHARES, K, V, HEAD_NORMS, keys, rope, layer, head, part, position, epoch, eps, scale, (STUCK, block, patience), HEADS,
                    NORMED, SPAN, SHORT, OUT_PARTS, dtype,
                )  # fmt: skip
                xs = with_first(repeated(words, xs[0]), xs)
        elif (kind == OUT) | (kind == DOWN):
            slot, field = part_of(o, i, MOST, LINE // OUT_WIDTH)
            groups_all, fields, begin, end, adders = COUNTS[1], LINE // OUT_WIDTH, part * OUT_WORDS, min((part + 1) * OUT_WORDS, WORDS), Q_HEADS
            if kind == DOWN:
                slot, field = part_of(o, i, MOST, LINE // DOWN_WIDTH)
                groups_all, fields, begin, end, adders = COUNTS[2], LINE // DOWN_WIDTH, 0, WORDS, BLOCKS
            word = begin + (strip * groups_all + first + slot) * fields + field
            add_outputs(SUMS, ys, this + half, word, slot, groups, STRIPS * groups_all * fields, end, adders)
            if sub == 0:
                clear(SUMS, STUCK, other + half, own, old, block, BLOCKS)
        elif kind == GATE_UP:
            if sub == 0:
                keys = keys_at(K, V, layer + 1, head, position, part, LAYERS, HEADS, SPAN, SHORT, OUT_PARTS)
            new: tuple = ()
            words = active_of(ys, o, i, FORMS, LINE, MOST, dtype)
            for n in ct.static_iter(range(TURNS[2])):
                new = (*new, ct.where(sub == n, words, active[n]))
            active = new
            if sub == TURNS[2] - 1:
                xs = inner_sets(active, xs, DOWN_WIDTH, DOWN_SETS, LINE)
        else:
            best, where = better_of(LOGITS, ys, best, where, first, groups, o, i, FIELDS, VOCAB)
        if turn == 0:
            if choose > 0:
                token, patience = greedy(BEST, best, where, epoch, 8 * LAYERS, (STUCK, block, patience), BLOCKS, VOCAB)
                if block == 0:
                    remember(RECENT, CLOCK, token)
            best, where = ct.full((1, MOST, EACH), -math.inf, ct.float32), ct.full((1, MOST, EACH), NOWHERE, ct.int32)
            epoch, position = epoch + 1, position + 1
            x = planes_of(row_of(EMBEDDING, token, SETS, STRIPS * WIDTH), dtype)
            rope = rope_at(ROPE, position, HEAD_WORDS)
            keys = keys_at(K, V, 0, head, position, part, LAYERS, HEADS, SPAN, SHORT, OUT_PARTS)
    if (block == 0) & (choose > 0):
        put(TOKENS, (0,), ct.full((1,), token, ct.int64))
        put(COUNTERS, (0, 0), ct.full((1, 1), position, ct.int32))
        put(COUNTERS, (1, 0), look(COUNTERS, (1, 0), (1, 1)) + steps)
    put(EPOCH, (block,), ct.full((1,), epoch - 1, ct.int32))
