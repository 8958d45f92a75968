"""One launch, one or more tokens: each block reads its tiles of all weights in one stream, and
values travel as words that say when they are valid.

Tile g of the program (all phases of all layers one after the other, then the head) is block g mod
BLOCKS's; a block's tiles of one phase are one turn, or some if they are many. One loop reads a
turn's tiles by TMA, and nothing else: the compiler gives it a producer warp, which runs ahead of
everything that the other warps wait for, by a ring of buffers. Hence no barrier between blocks
stands anywhere: an acquire or a release would hold the producer up. A word is 64 bits, the token's
number above and the value below (two neighbours in 16 bits, or one in fp32), written and read
relaxed; who needs a word looks until it has the number. Numbers only grow, so nothing is ever
cleared.

A block writes a phase's words only when it has read those of the phase before, and every block's
words are needed for a token: so no word is overwritten while somebody may still want it. Keys are
dealt to blocks by their position alone; hence who reads a cached key is who wrote it.

Numerics: as `mega_kernel`. One kernel is one function, its parts closures over its arrays and
constants: hence one long file.
"""

# ruff: noqa: B023 - cuTile inlines a closure where it is called

import math

import cuda.tile as ct

from ...ops.common.first_best import NOWHERE, empty_best, first_best, take_better
from ...ops.common.softmax_tiles import FLOOR
from ...ops.common.tiles import gated
from .arrays import Matrix, Stack, Stacks, Vector
from .spin import DEVICE, RELAXED, give_up, looks_so_far
from .stream_words import apart, bits_of, look, number_of, planes_of, put, rounded, say, say_fp32

QKV, OUT, GATE_UP, DOWN, HEAD, NOTHING = 0, 1, 2, 3, 4, 5
LANES = 128  # words of a strip that a warp reads at once: one 16-byte load of each lane


def _load(array, index, shape):
    """A tile that lies inside its array, by the threads that need it. Left to itself the compiler
    keeps several steps of a loop on their way.
    """
    return ct.load(array, index, shape, check_bounds=False, allow_tma=False, latency=1)


@ct.kernel
def mega_stream_kernel(
    EPOCH: Vector,
    STUCK: Vector,
    TOKENS: Vector,
    COUNTERS: Matrix,
    RECENT: Matrix,
    CLOCK: Vector,
    W: Stack,
    EMBEDDING: Matrix,
    NORMS: Matrix,
    COS: Matrix,
    SIN: Matrix,
    K: Stacks,
    V: Stacks,
    QUERIES: Stacks,
    OWN: Stacks,
    BY_QKV: Stacks,
    PARTS: Stacks,
    ATTENDED: Matrix,
    ACTIVE: Stacks,
    BY_GATE_UP: Stacks,
    STREAM: Matrix,
    BY_OUT: Stacks,
    BY_DOWN: Stacks,
    LOGITS: Vector,
    BEST: Matrix,
    TOUCHED: Stacks,
    turns: int,
    filled: int,
    attentions: int,
    choices: int,
    chunk_tiles: int,
    most: int,
    steps: int,
    eps: float,
    scale: float,
    LAYERS: ct.Constant[int],
    HIDDEN: ct.Constant[int],
    Q_HEADS: ct.Constant[int],
    KV_HEADS: ct.Constant[int],
    HALF: ct.Constant[int],
    FOLD: ct.Constant[int],
    R: ct.Constant[int],
    T: ct.Constant[int],
    PAIR: ct.Constant[int],
    COUNTS: ct.Constant[tuple],
    TURNS: ct.Constant[tuple],
    BASES: ct.Constant[tuple],
    BLOCKS: ct.Constant[int],
    TILE_B: ct.Constant[int],
    SPLITS: ct.Constant[int],
    SLICES: ct.Constant[int],
    SPAN: ct.Constant[int],
    TILE_KV: ct.Constant[int],
    TILE_LONG: ct.Constant[int],
    AHEAD: ct.Constant[int],
    PACKED: ct.Constant[int],
    LIMIT: ct.Constant[int],
):
    """`steps` tokens, of each the first `turns` turns, of which `filled` read weights, and
    `attentions` layers' attention. Grid (BLOCKS,), all resident.

    A tile is R rows of W of HIDDEN elements, read in R // FOLD pieces of T strips, a strip for a
    warp: FOLD rows of R are a piece, or one row of `down`, which is FOLD rows of W. PAIR pieces
    come at once.

    int32, PACKED values each: W [strips of all tiles, strip words / WIDTH, WIDTH]: qkv of all
    layers, out, gate_up (which take turns), down, head; EMBEDDING [vocab, hidden words], NORMS [2 L
    + 1, hidden words], K and V [L, KV_HEADS, max_len, head words].
    int64, words of PACKED values below a token's number: QUERIES [L, KV_HEADS, copies, group * head words] and OWN [L, 2
    KV_HEADS, copies, head words], keys then values of this token, not yet rotated, both views of
    one memory, with an axis of copies that gives each thread a word to look at; ATTENDED [L, hidden
    words], merged attention; ACTIVE [L, T, strip words / WIDTH, WIDTH]; STREAM [2 L, hidden words],
    the residual stream of a layer behind attention, then behind the MLP. BY_QKV, BY_OUT,
    BY_GATE_UP, BY_DOWN: what these phases write as [L or 2 L, .., BLOCKS, words of a tile], so that
    a block's tiles stand in a column; their memory goes on behind what is read of it.
    int64, words of one fp32 or int32: PARTS [L * KV_HEADS, power of two, power of two, group * head words], of a
    range PACKED planes of weighted values, and its maximum and denominator as often; BEST [2,
    TILE_B], the largest logit of each block and where.
    int32: EPOCH [BLOCKS] tokens so far, to each block its own; STUCK [2] with LIMIT > 0: place + 1
        and block that gave up after LIMIT looks, a place is 8 * layer + number of the phase whose
        words are missing; TOUCHED [BLOCKS, 1, TILE_KV, head words], for nobody. LOGITS [vocab].
        TOKENS, COUNTERS, RECENT, CLOCK, COS, SIN: as `mega_kernel`.
    COUNTS: tiles of qkv, out, gate_up and down in a layer, and of the head; TURNS: a block's turns
        in each of the first four; BASES: where each begins in W. choices: 1 to choose tokens. most:
        tiles of a turn that are read; fewer than it has give nonsense, and the time that all but
        weights takes. scale: of scores, times log2(e).
    SPAN keys, in tiles of TILE_KV, are one block's. Of more, each of SPLITS ranges has SPAN in a
    row, `chunk_tiles` tiles of TILE_LONG, and beyond SPLITS * SPAN every SPLITS-th tile of
    TILE_LONG; AHEAD such tiles are on their way at once. SLICES of a key head's result are merged
    by as many blocks.
    """
    block = ct.bid(0)
    dtype = LOGITS.dtype
    epoch = ct.load(EPOCH, (block,), ())
    group = Q_HEADS // KV_HEADS
    WORDS, HEAD_WORDS = HIDDEN // PACKED, 2 * HALF // PACKED
    HALF_WORDS = HEAD_WORDS // 2
    PIECES, ROW_STRIPS = R // FOLD, T // FOLD
    LOADS = PIECES // PAIR
    CHUNKS, WIDTH = W.shape[1], W.shape[2]
    FIRST = (0, COUNTS[0], COUNTS[0] + COUNTS[1], COUNTS[0] + COUNTS[1] + COUNTS[2])  # tile of each kind in a layer
    LAYER = FIRST[3] + COUNTS[3]
    MOST, MOST_DOWN = WIDTH // R, WIDTH // PIECES  # tiles of a turn
    UNTIL = (TURNS[0], TURNS[0] + TURNS[1], TURNS[0] + TURNS[1] + TURNS[2], TURNS[0] + TURNS[1] + TURNS[2] + TURNS[3])
    SAID, OUT_WORDS, DOWN_WORDS = WIDTH // PACKED, R // PACKED, PIECES // PACKED  # words of a turn, and of a tile

    def words(array, one, looks_at, number, place):
        """What `looks_at` finds as soon as all of it has the number. looks_at: of 0, values and
        their smallest number.

        First one word is waited for, at the index `one`, another for each block: words that all
        blocks look at again and again come late to all. An atomic does it, whose result is one for
        the whole block; what a load finds may differ between warps, which would then leave the loop
        at different looks. Behind it each thread looks at words of its own, and all together find
        their smallest number.
        """
        looks, zero = 0, 0
        if LIMIT:
            looks = looks_so_far(STUCK, LIMIT)
        elif len(one) > 0:
            first = number_of(ct.atomic_max(array, one, 0, memory_order=RELAXED, memory_scope=DEVICE))
            while first < number:
                first = number_of(ct.atomic_max(array, one, 0, memory_order=RELAXED, memory_scope=DEVICE))
            zero = min(first, 0)
        found, lowest = looks_at(zero)
        while lowest < number:
            found, lowest = looks_at(min(lowest, 0))  # the look before tells that this is 0: else one look would be taken for the other
            if LIMIT:
                looks = looks + 1
                if (looks == LIMIT) & (lowest < number):
                    give_up(STUCK, place, block)
                    lowest = number
        return found, lowest

    def squared(row):
        """The sum of squares of a row, 32-bit values [1, WORDS]."""
        squares = ct.zeros((1, WORDS), ct.float32)
        planes = planes_of(row, dtype)
        for n in ct.static_iter(range(PACKED)):
            squares = squares + planes[n] * planes[n]
        return ct.sum(squares)

    def row_of(array, row, number, place):
        """A row of WORDS words, as 32-bit values, the sum of its squares in fp32, and the number
        seen.
        """

        def looks_at(zero):
            seen = look(array, (row + zero, 0), (1, WORDS))
            values = seen.astype(ct.int32)
            return (values, squared(values)), ct.min(number_of(seen))

        return words(array, (row, block * max(WORDS // BLOCKS, 1) % WORDS), looks_at, number, place)

    def prepare(kind, layer, token, norm, number):
        """What the weights of a phase are multiplied with, CHUNKS tiles of T strips by WIDTH words;
        and the number that was seen.

        norm: words of the weights of the norm before it, [1, WORDS].
        """
        x: tuple = ()
        if kind == DOWN:

            def looks_at(zero):
                values: tuple = ()
                numbers = ct.full((1, T, 1, WIDTH), NOWHERE, ct.int32)
                for c in ct.static_iter(range(CHUNKS)):
                    seen = look(ACTIVE, (layer + zero, 0, c, 0), (1, T, 1, WIDTH))
                    values, numbers = (*values, seen.astype(ct.int32).reshape((T, WIDTH))), ct.minimum(numbers, number_of(seen))
                return values, ct.min(numbers)

            x, seen = words(ACTIVE, (layer, block % T, block // T % CHUNKS, block % WIDTH), looks_at, number, 8 * layer + 3)
        else:
            seen = number
            if kind == OUT:
                found, seen = row_of(ATTENDED, layer, number, 8 * layer + 1)
                row = found[0]
            else:
                before_row, place = 2 * layer - 1, 8 * layer - 4
                if kind == GATE_UP:
                    before_row, place = 2 * layer, 8 * layer + 2
                weights = planes_of(norm, dtype)
                if (kind == QKV) & (layer == 0):
                    row = _load(EMBEDDING, (token, 0), (1, WORDS))
                    total = squared(row)
                else:
                    found, seen = row_of(STREAM, before_row, number, place)
                    row, total = found
                planes = planes_of(row, dtype)
                rstd = 1.0 / ct.sqrt(total * (1.0 / HIDDEN) + eps)
                normed: tuple = ()
                for n in ct.static_iter(range(PACKED)):
                    normed = (*normed, rounded(planes[n] * rstd, dtype) * weights[n])
                row = bits_of(normed, dtype).astype(ct.int32)
            strips = row.reshape((ROW_STRIPS, CHUNKS, WIDTH))
            for c in ct.static_iter(range(CHUNKS)):
                chunk = ct.extract(strips, (0, c, 0), (ROW_STRIPS, 1, WIDTH)).reshape((1, ROW_STRIPS, WIDTH))
                x = (*x, ct.broadcast_to(chunk, (FOLD, ROW_STRIPS, WIDTH)).reshape((T, WIDTH)))
        return x, seen

    def turned(words_of_heads, HEADS, cos, sin):
        """Queries or a key [HEADS, head words], rotated: planes."""
        first = planes_of(ct.extract(words_of_heads, (0, 0), (HEADS, HALF_WORDS)), dtype)
        second = planes_of(ct.extract(words_of_heads, (0, 1), (HEADS, HALF_WORDS)), dtype)
        cos, sin = apart(cos.reshape((HALF,)), HALF, dtype), apart(sin.reshape((HALF,)), HALF, dtype)
        found: tuple = ()
        for i in ct.static_iter(range(PACKED)):
            x = rounded(first[i] * cos[i] - second[i] * sin[i], dtype)
            y = rounded(second[i] * cos[i] + first[i] * sin[i], dtype)
            found = (*found, ct.cat((x, y), axis=1))
        return found

    def heard(layer, kv_head, number):
        """Queries of a key head, its key and its value of this token, not yet rotated: words [group
        or 1, head words].
        """
        COPIES = OWN.shape[2]

        def looks_at(zero):
            queries = look(QUERIES, (layer + zero, kv_head, 0, 0), (1, 1, QUERIES.shape[2], group * HEAD_WORDS)).reshape((COPIES, HEAD_WORDS))
            key = look(OWN, (layer + zero, kv_head, 0, 0), (1, 1, COPIES, HEAD_WORDS)).reshape((COPIES, HEAD_WORDS))
            value = look(OWN, (layer + zero, KV_HEADS + kv_head, 0, 0), (1, 1, COPIES, HEAD_WORDS)).reshape((COPIES, HEAD_WORDS))
            numbers = ct.minimum(number_of(queries), ct.minimum(number_of(key), number_of(value)))
            return (queries.astype(ct.int32), key.astype(ct.int32), value.astype(ct.int32)), ct.min(numbers)

        queries, key, value = words(OWN, (), looks_at, number, 8 * layer)[0]
        queries = ct.extract(queries, (0, 0), (group, HEAD_WORDS))
        return queries, ct.extract(key, (0, 0), (1, HEAD_WORDS)), ct.extract(value, (0, 0), (1, HEAD_WORDS))

    def append(layer, kv_head, position, own_keys, own_v):
        """This token's key and value, into the cache."""
        own_k = bits_of(own_keys, dtype).astype(ct.int32)
        ct.store(K, (layer, kv_head, position, 0), own_k.reshape((1, 1, 1, HEAD_WORDS)), check_bounds=False, allow_tma=False)
        ct.store(V, (layer, kv_head, position, 0), own_v.reshape((1, 1, 1, HEAD_WORDS)), check_bounds=False, allow_tma=False)

    def cached(layer, kv_head, position):
        """Keys and values of SPAN positions, on their way: tiles of TILE_KV, past the last the last
        again.
        """
        last = max(position - 1, 0) // TILE_KV
        found: tuple = ()
        for i in ct.static_iter(range(SPAN // TILE_KV)):
            place, shape = (layer, kv_head, min(i, last), 0), (1, 1, TILE_KV, HEAD_WORDS)
            found = (*found, _load(K, place, shape), _load(V, place, shape))
        return found

    def attend_at_once(layer, kv_head, loaded, position, number):
        """All query heads of a key head over all keys, where they are no more than SPAN: everything
        at once, so that little waits for another.
        """
        own_q, own_k, own_v = heard(layer, kv_head, number)
        q, own_keys, own_values = turned(own_q, group, cos, sin), turned(own_k, 1, cos, sin), planes_of(own_v, dtype)
        own = ct.zeros((group, HEAD_WORDS), ct.float32)
        for n in ct.static_iter(range(PACKED)):
            own = own + q[n] * own_keys[n]
        own = ct.sum(own, axis=1, keepdims=True) * scale
        scores: tuple = ()
        highest = ct.full((group, TILE_KV), -math.inf, ct.float32)
        for i in ct.static_iter(range(SPAN // TILE_KV)):
            keys = planes_of(loaded[2 * i].reshape((1, TILE_KV, HEAD_WORDS)), dtype)
            products = ct.zeros((group, TILE_KV, HEAD_WORDS), ct.float32)
            for n in ct.static_iter(range(PACKED)):
                products = products + keys[n] * q[n].reshape((group, 1, HEAD_WORDS))
            seen = (i * TILE_KV + ct.arange(TILE_KV, dtype=ct.int32)).reshape((1, TILE_KV)) < position
            score = ct.where(seen, ct.sum(products, axis=2) * scale, -math.inf)
            scores, highest = (*scores, (score, seen)), ct.maximum(highest, score)
        maximum = ct.maximum(own, ct.max(highest, axis=1, keepdims=True))
        weight = ct.exp2(own - maximum)
        below = ct.zeros((group, TILE_KV), ct.float32)
        mixed: tuple = ()
        for _ in ct.static_iter(range(PACKED)):
            mixed = (*mixed, ct.zeros((group, TILE_KV, HEAD_WORDS), ct.float32))
        for i in ct.static_iter(range(SPAN // TILE_KV)):
            weights = ct.exp2(scores[i][0] - maximum)
            below = below + weights
            weights = rounded(weights, dtype).reshape((group, TILE_KV, 1))
            values = planes_of(loaded[2 * i + 1].reshape((1, TILE_KV, HEAD_WORDS)), dtype)
            sums: tuple = ()
            for n in ct.static_iter(range(PACKED)):
                value = ct.where(scores[i][1].reshape((1, TILE_KV, 1)), values[n], 0.0)  # hidden memory may hold NaN, and 0 * NaN is NaN
                sums = (*sums, mixed[n] + weights * value)
            mixed = sums
        part = 1.0 / (ct.sum(below, axis=1, keepdims=True) + weight)
        found: tuple = ()
        for n in ct.static_iter(range(PACKED)):
            found = (*found, (ct.sum(mixed[n], axis=1) + rounded(weight, dtype) * own_values[n]) * part)
        say(ATTENDED, (layer, kv_head), bits_of(found, dtype), (1, group * HEAD_WORDS), number)
        append(layer, kv_head, position, own_keys, own_v)

    def attend(layer, kv_head, split, position, number):
        """All query heads of a key head over the keys of one of several ranges, with the token's
        own where it belongs.
        """
        there = ct.cdiv(position, TILE_LONG)  # tiles with a key in the cache
        mine = max(0, min(chunk_tiles, there - split * chunk_tiles))
        if there > SPLITS * chunk_tiles:
            mine = ct.cdiv(there - split, SPLITS)
        at = layer * KV_HEADS + kv_head

        def start(i):
            tile = split + i * SPLITS
            if i < chunk_tiles:
                tile = split * chunk_tiles + i
            return tile

        def fetched(i):
            """Keys and values of AHEAD tiles, the last again where there are no more."""
            found: tuple = ()
            for n in ct.static_iter(range(AHEAD)):
                place, shape = (layer, kv_head, start(min(i + n, mine - 1)), 0), (1, 1, TILE_LONG, HEAD_WORDS)
                found = (*found, _load(K, place, shape), _load(V, place, shape))
            return found

        # On their way before the queries are waited for.
        nothing = ct.zeros((1, 1, TILE_LONG, HEAD_WORDS), ct.int32)
        ahead: tuple = ()
        for _ in ct.static_iter(range(2 * AHEAD)):
            ahead = (*ahead, nothing)
        if mine > 0:
            ahead = fetched(0)
        own_q, own_k, own_v = heard(layer, kv_head, number)
        q, own_keys, own_values = turned(own_q, group, cos, sin), turned(own_k, 1, cos, sin), planes_of(own_v, dtype)
        total: tuple = ()
        score = ct.zeros((group, 1), ct.float32)
        for n in ct.static_iter(range(PACKED)):
            score = score + ct.sum(q[n] * own_keys[n], axis=1, keepdims=True)
            total = (*total, ct.zeros((group, TILE_LONG, HEAD_WORDS), ct.float32))
        # Each place in a tile has a softmax of its own, so that no thread waits for another's keys;
        # they are joined behind the last tile.
        maximum, denominator = ct.full((group, TILE_LONG), FLOOR, ct.float32), ct.zeros((group, TILE_LONG), ct.float32)
        for some in range(ct.cdiv(mine, AHEAD)):
            now = ahead
            ahead = fetched((some + 1) * AHEAD)
            for j in ct.static_iter(range(AHEAD)):
                i = some * AHEAD + j
                keys = planes_of(now[2 * j].reshape((1, TILE_LONG, HEAD_WORDS)), dtype)
                values = planes_of(now[2 * j + 1].reshape((1, TILE_LONG, HEAD_WORDS)), dtype)
                products = keys[0] * q[0].reshape((group, 1, HEAD_WORDS))
                for n in ct.static_iter(range(1, PACKED)):
                    products = products + keys[n] * q[n].reshape((group, 1, HEAD_WORDS))
                last = ct.where(i < mine, position, 0)
                seen = (start(i) * TILE_LONG + ct.arange(TILE_LONG, dtype=ct.int32)).reshape((1, TILE_LONG)) < last
                scores = ct.where(seen, ct.sum(products, axis=2) * scale, -math.inf)
                above = ct.maximum(maximum, scores)
                weights, factor = ct.exp2(scores - above), ct.exp2(maximum - above)
                maximum, denominator = above, denominator * factor + weights
                weights, factor = rounded(weights, dtype).reshape((group, TILE_LONG, 1)), factor.reshape((group, TILE_LONG, 1))
                sums: tuple = ()
                for n in ct.static_iter(range(PACKED)):
                    value = ct.where(seen.reshape((1, TILE_LONG, 1)), values[n], 0.0)  # hidden memory may hold NaN, and 0 * NaN is NaN
                    sums = (*sums, total[n] * factor + weights * value)
                total = sums
        newest = position // SPAN == split
        if position >= SPAN * SPLITS:
            newest = position // TILE_LONG % SPLITS == split
        own = ct.where(newest, score * scale, FLOOR)
        above = ct.maximum(ct.max(maximum, axis=1, keepdims=True), own)
        factor = ct.exp2(maximum - above)
        weight = ct.where(newest, ct.exp2(own - above), 0.0)
        denominator = ct.sum(denominator * factor, axis=1, keepdims=True) + weight
        result: tuple = ()
        for n in ct.static_iter(range(PACKED)):
            mixed = ct.sum(total[n] * factor.reshape((group, TILE_LONG, 1)), axis=1)
            result = (*result, mixed + rounded(weight, dtype) * own_values[n])
        if newest:
            append(layer, kv_head, position, own_keys, own_v)
        each = ct.zeros((group, HEAD_WORDS), ct.float32)
        planes = (*result, above + each, denominator + each)
        for n in ct.static_iter(range(PACKED + 2)):
            say_fp32(PARTS, (at, n, split, 0), planes[n], (1, 1, 1, group * HEAD_WORDS), number)

    def merge(layer, kv_head, part, ranges, number):
        """A slice of a key head's results, from all ranges."""
        EACH, PLANES, TILE_S = group * HEAD_WORDS // SLICES, PARTS.shape[1], PARTS.shape[2]
        at = layer * KV_HEADS + kv_head
        inside = (ct.arange(TILE_S, dtype=ct.int32) < ranges).reshape((1, TILE_S, 1))
        said = inside.reshape((1, 1, TILE_S, 1)) & (ct.arange(PLANES, dtype=ct.int32) < PACKED + 2).reshape((1, PLANES, 1, 1))

        def looks_at(zero):
            seen = look(PARTS, (at + zero, 0, 0, part), (1, PLANES, TILE_S, EACH))
            return seen.astype(ct.int32), ct.min(ct.where(said, number_of(seen), number))

        parts = words(PARTS, (), looks_at, number, 8 * layer + 1)[0]
        parts = ct.where(inside, ct.bitcast(parts, ct.float32).reshape((PLANES, TILE_S, EACH)), 0.0)
        planes: tuple = ()
        for n in ct.static_iter(range(PACKED + 2)):
            planes = (*planes, ct.extract(parts, (n, 0, 0), (1, TILE_S, EACH)))
        maxima = ct.where(inside, planes[PACKED], FLOOR)
        factors = ct.where(inside, ct.exp2(maxima - ct.max(maxima, axis=1, keepdims=True)), 0.0)
        factors = factors * (1.0 / ct.sum(planes[PACKED + 1] * factors, axis=1, keepdims=True))
        found: tuple = ()
        for n in ct.static_iter(range(PACKED)):
            found = (*found, ct.sum(planes[n] * factors, axis=1))
        say(ATTENDED, (layer, kv_head * SLICES + part), bits_of(found, dtype), (1, EACH), number)

    def product(tile, count, x, kind):
        """Rows of `count` tiles of W, each BLOCKS behind the other, times x: fp32 [1, WIDTH], R of
        each tile (of `down` PIECES).

        The loop around the loads holds nothing else: the compiler gives a ring of many buffers only
        to a loop without branches and other loads, and lets its producer run on only if no store
        stands in it.
        Each strip puts what it gives to a row into that row's column; one sum over the strips is
        then all that warps tell each other.
        """
        columns = ct.arange(WIDTH, dtype=ct.int32).reshape((1, WIDTH))
        strips = ct.arange(T, dtype=ct.int32).reshape((T, 1)) // ROW_STRIPS
        until, step = columns - strips, FOLD  # rows until a column's
        if kind == DOWN:
            until, step = columns + 0 * strips, 1
        xs: tuple = ()
        for c in ct.static_iter(range(CHUNKS)):
            xs = (*xs, planes_of(x[c], dtype))
        y = ct.zeros((T, WIDTH), ct.float32)
        for i in range(count * LOADS):
            at = (tile + i // LOADS * BLOCKS) * LOADS + i % LOADS
            w = ct.load(W, (at, 0, 0), (PAIR * T, CHUNKS, WIDTH), check_bounds=False, latency=10)
            for s in ct.static_iter(range(PAIR)):
                total = ct.zeros((T, WIDTH), ct.float32)
                for c in ct.static_iter(range(CHUNKS)):
                    ws = planes_of(ct.extract(w, (s, c, 0), (T, 1, WIDTH)).reshape((T, WIDTH)), dtype)
                    for n in ct.static_iter(range(PACKED)):
                        total = total + ws[n] * xs[c][n]
                value = ct.sum(total, axis=1, keepdims=True)
                # Plus 0, which only the loaded value tells: what depends on the loop alone is
                # computed when the load is started, and its predicates go round through the stages
                # of the ring, bit by bit: that took twice the time of all else in the loop.
                bits = ct.bitcast(value, ct.int32)
                until = until + (bits * (bits + 1) & 1)
                y = ct.where(until == 0, value, y)
                until = until - step
        return ct.sum(y, axis=0, keepdims=True)

    def added(y, old):
        """32-bit words, as int64, of y [1, WIDTH] and what it is added to, words [1, SAID]."""
        ys, olds = neighbours(y, PACKED), planes_of(old, dtype)
        found: tuple = ()
        for n in ct.static_iter(range(PACKED)):
            found = (*found, ys[n] + olds[n])
        return bits_of(found, dtype)

    def neighbours(y, COUNT):
        """Every COUNT-th of a row [1, N] from each of the first COUNT on: tiles [1, N / COUNT]."""
        N = y.shape[1]
        rows = y.reshape((N // COUNT, COUNT))
        found: tuple = ()
        for n in ct.static_iter(range(COUNT)):
            found = (*found, ct.extract(rows, (0, n), (N // COUNT, 1)).reshape((1, N // COUNT)))
        return found

    def rope_at(position):
        """Cosines and sines; of the last position where the cache ends, for a token that will not
        come.
        """
        at = min(position, COS.shape[0] - 1)
        return _load(COS, (at, 0), (1, HALF)), _load(SIN, (at, 0), (1, HALF))

    def share(g, COUNT, sub, MOST_HERE):
        """This block's first tile of a phase, which begins with tile g of a token, and how many of
        its tiles its turn `sub` there has.
        """
        first = (block + (LAYERS + 1) * LAYER * BLOCKS - g) % BLOCKS
        return first, max(0, min(MOST_HERE, ct.cdiv(COUNT - first, BLOCKS) - sub * MOST_HERE))

    def placed(at):
        """Of a turn: kind, layer, number in its phase; of its tiles the first in the phase, how
        many they are, and the first in W.
        """
        layer = min(at // UNTIL[3], LAYERS)
        sub, g = at - layer * UNTIL[3], layer * LAYER
        kind, base = HEAD, BASES[4]
        first, count = share(g, COUNTS[4], sub, MOST)
        several = MOST
        if layer < LAYERS:
            if sub < UNTIL[0]:
                kind, base = QKV, layer * COUNTS[0]
                first, count = share(g, COUNTS[0], sub, MOST)
            elif sub < UNTIL[1]:
                kind, base, sub = OUT, BASES[1] + layer * COUNTS[1], sub - UNTIL[0]
                first, count = share(g + FIRST[1], COUNTS[1], sub, MOST)
            elif sub < UNTIL[2]:
                kind, base, sub = GATE_UP, BASES[2] + layer * COUNTS[2], sub - UNTIL[1]
                first, count = share(g + FIRST[2], COUNTS[2], sub, MOST)
            else:
                kind, base, sub, several = DOWN, BASES[3] + layer * COUNTS[3], sub - UNTIL[2], MOST_DOWN
                first, count = share(g + FIRST[3], COUNTS[3], sub, MOST_DOWN)
        if at >= filled:
            count = 0
        return kind, layer, sub, first, count, base + first + sub * several * BLOCKS

    token = look(TOKENS, (0,), (1,)).item().astype(ct.int32)
    start = look(COUNTERS, (0, 0), (1, 1)).item() - epoch
    before, seen = -1, 0
    own = ct.arange(WIDTH, dtype=ct.int32).reshape((1, WIDTH))
    best, column = empty_best((1, WIDTH))
    x: tuple = ()
    for c in ct.static_iter(range(CHUNKS)):
        x = (*x, _load(W, (0, c, 0), (T, 1, WIDTH)).reshape((T, WIDTH)))
    at, number = 0, epoch + 1
    position = start + number - 1
    cos, sin = rope_at(position)
    # What HBM has comes late behind the weights that are under way: so all but words is asked for a
    # turn before it is needed; keys and values only into L2 (`touched` is for nobody), for they
    # would take the registers of a turn.
    norm = look(NORMS, (0, 0), (1, WORDS))
    old = ct.zeros((1, SAID), ct.int32)
    touched = ct.zeros((1, 1, TILE_KV, HEAD_WORDS), ct.int32)
    kind, layer, sub, first, count, tile = placed(0)
    for _ in range(steps * turns):
        if (kind == OUT) & (sub == 0) & (layer < attentions):
            ranges = min(SPLITS, position // SPAN + 1)
            for mine in range(block, KV_HEADS * SPLITS, BLOCKS):
                kv_head, split = mine // SPLITS, mine % SPLITS
                if ranges > 1:
                    if split < ranges:
                        attend(layer, kv_head, split, position, number)
                    if split < SLICES:
                        merge(layer, kv_head, split, ranges, number)
                elif split == 0:
                    attend_at_once(layer, kv_head, cached(layer, kv_head, position), position, number)
        if (8 * layer + kind != before) & (at < filled):
            before = 8 * layer + kind
            x, seen = prepare(kind, layer, token, norm, number)
        at = at + 1
        kind_next, layer_next, sub_next, first_next, count_next, tile_next = placed(at)
        # Before qkv and the head a layer's first norm, before gate_up its second; the others have
        # none, and take one for nothing.
        norm = look(NORMS, (min(2 * layer_next + kind_next // 2 % 2, 2 * LAYERS), 0), (1, WORDS))
        old_next = old
        # Whoever wrote the words that gave `seen` had read these, so they are there.
        if kind_next == OUT:
            if layer_next == 0:
                of_row = ct.arange(SAID, dtype=ct.int32)
                of_row = ((of_row // OUT_WORDS + sub_next * MOST) * BLOCKS + first_next) * OUT_WORDS + of_row % OUT_WORDS
                old_next = ct.gather(EMBEDDING, (token, of_row)).reshape((1, SAID))
            else:
                found = look(BY_OUT, (2 * layer_next - 1 + min(seen, 0), sub_next, first_next, 0), (1, MOST, 1, OUT_WORDS), True)
                old_next = found.astype(ct.int32).reshape((1, SAID))
        if kind_next == DOWN:
            found = look(BY_DOWN, (2 * layer_next + min(seen, 0), sub_next, first_next, 0), (1, MOST_DOWN, 1, DOWN_WORDS), True)
            old_next = found.astype(ct.int32).reshape((1, SAID))
        loaded: tuple = ()
        for _ in ct.static_iter(range(2 * SPAN // TILE_KV)):
            loaded = (*loaded, ct.zeros((1, 1, TILE_KV, HEAD_WORDS), ct.int32))
        if (kind_next == OUT) & (block % SPLITS == 0) & (block < KV_HEADS * SPLITS) & (position < SPAN):
            loaded = cached(layer_next, block // SPLITS, position)
        y = product(tile, min(count, most), x, kind)
        for i in ct.static_iter(range(len(loaded))):
            touched = touched ^ loaded[i]
        if count > 0:
            if kind == QKV:
                bits = bits_of(neighbours(y, PACKED), dtype)
                say(BY_QKV, (layer, sub, first, 0), bits, (1, MOST, 1, OUT_WORDS), number, True)
            elif kind == OUT:
                say(BY_OUT, (2 * layer, sub, first, 0), added(y, old), (1, MOST, 1, OUT_WORDS), number, True)
            elif kind == DOWN:
                say(BY_DOWN, (2 * layer + 1, sub, first, 0), added(y, old), (1, MOST_DOWN, 1, DOWN_WORDS), number, True)
            elif kind == GATE_UP:
                ys = neighbours(y, 2 * PACKED)
                active: tuple = ()
                for n in ct.static_iter(range(PACKED)):
                    active = (*active, gated(ys[2 * n], ys[2 * n + 1], False))
                say(BY_GATE_UP, (layer, sub, first, 0), bits_of(active, dtype), (1, MOST, 1, OUT_WORDS // 2), number, True)
            else:
                units = first + (sub * MOST + own // R) * BLOCKS
                rows, inside = units * R + own % R, units < COUNTS[4]
                y = y.astype(dtype)
                ct.scatter(LOGITS, rows, y, mask=inside)
                best, column = take_better(best, column, ct.where(inside, y.astype(ct.float32), -math.inf), rows)
        old = old_next
        kind, layer, sub, first, count, tile = kind_next, layer_next, sub_next, first_next, count_next, tile_next
        if at == turns:
            at, before = 0, -1
            if choices > 0:
                top, where = first_best(best, column)
                say_fp32(BEST, (0, block), top, (1, 1), number)
                say(BEST, (1, block), where.astype(ct.int64), (1, 1), number)
                if (block == 0) | (number < epoch + steps):
                    inside = ct.arange(TILE_B, dtype=ct.int32).reshape((1, TILE_B)) < BLOCKS

                    def looks_at(zero):
                        seen = look(BEST, (zero, 0), (2, TILE_B))
                        return seen.astype(ct.int32), ct.min(ct.where(inside, number_of(seen), number))

                    both = words(BEST, (), looks_at, number, 8 * LAYERS + HEAD + 1)[0]
                    tops = ct.where(inside, ct.bitcast(ct.extract(both, (0, 0), (1, TILE_B)), ct.float32), -math.inf)
                    columns = ct.where(inside, ct.extract(both, (1, 0), (1, TILE_B)), NOWHERE)
                    token = first_best(tops, columns)[1].item()
                if block == 0:
                    clock = ct.load(CLOCK, (0,), ())
                    ct.store(RECENT, (clock, 0), token.astype(ct.int64))
                    ct.store(CLOCK, (0,), clock + 1)
                    ct.store(CLOCK, (1,), ct.load(CLOCK, (1,), ()) + 1)
                best, column = empty_best((1, WIDTH))
            number, position = number + 1, position + 1
            kind, layer, sub, first, count, tile = placed(0)
            norm = look(NORMS, (0, 0), (1, WORDS))
            cos, sin = rope_at(position)
    if (block == 0) & (choices > 0):
        put(TOKENS, (0,), ct.full((1,), token, ct.int64))
        put(COUNTERS, (0, 0), ct.full((1, 1), start + epoch + steps, ct.int32))
        put(COUNTERS, (1, 0), look(COUNTERS, (1, 0), (1, 1)) + steps)
    ct.store(TOUCHED, (block, 0, 0, 0), touched.reshape((1, 1, TILE_KV, HEAD_WORDS)), allow_tma=False)
    ct.store(EPOCH, (block,), epoch + steps)
