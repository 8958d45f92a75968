"""Steps 8 to 12: from the trap (step 7: step 6 with tiles of 256x128) to the tiles of
`ops.attention`.

Each kernel is the one before it with a single change, marked `# <-`. Arrays as in small_tiles.py.
"""

import math

import cuda.tile as ct

from .small_tiles import APPROX, LOG2E, ZERO, Bool, Int, last_keys, seen_keys, whole_tiles


@ct.kernel
def fast_math_kernel(Q, K, V, OUT, scale: float, GROUP: Int, HEAD_DIM: Int, TILE_M: Int, TILE_N: Int, CAUSAL: Bool):
    tile, head, batch = ct.bid(0), ct.bid(1), ct.bid(2)
    to_base_2 = scale * LOG2E
    q = ct.load(Q, (batch, head, tile, 0), (1, 1, TILE_M, HEAD_DIM), padding_mode=ZERO).reshape((TILE_M, HEAD_DIM))
    last = last_keys(tile, K.shape[2], TILE_M, CAUSAL)
    maximum = ct.full((TILE_M, 1), -math.inf, dtype=ct.float32)
    denominator = ct.zeros((TILE_M, 1), dtype=ct.float32)
    sums = ct.zeros((TILE_M, HEAD_DIM), dtype=ct.float32)
    for j in range(ct.cdiv(seen_keys(tile, K.shape[2], TILE_M, CAUSAL), TILE_N)):
        k = ct.load(K, (batch, head // GROUP, 0, j), (1, 1, HEAD_DIM, TILE_N), order=(0, 1, 3, 2), padding_mode=ZERO, latency=2)
        scores = ct.mma(q, k.reshape((HEAD_DIM, TILE_N)), ct.zeros((TILE_M, TILE_N), dtype=ct.float32))
        key = j * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[None, :]
        scores = ct.where(key <= last, scores, -math.inf)
        largest = ct.maximum(maximum, ct.max(scores, axis=1, keepdims=True) * to_base_2)
        # <- An exponential below 2**-126 is 0. Denormals would cost a comparison and two products
        # more for every score.
        weights = ct.exp2(scores * to_base_2 - largest, flush_to_zero=True)
        factor = ct.exp2(maximum - largest, flush_to_zero=True)  # <-
        denominator = denominator * factor + ct.sum(weights, axis=1, keepdims=True)
        v = ct.load(V, (batch, head // GROUP, j, 0), (1, 1, TILE_N, HEAD_DIM), padding_mode=ZERO, latency=4)
        sums = ct.mma(weights.astype(V.dtype), v.reshape((TILE_N, HEAD_DIM)), sums * factor)
        maximum = largest
    out = ct.truediv(sums, denominator, flush_to_zero=True, rounding_mode=APPROX).astype(OUT.dtype)
    ct.store(OUT, (batch, head, tile, 0), out.reshape((1, 1, TILE_M, HEAD_DIM)))


@ct.kernel
def split_loop_kernel(Q, K, V, OUT, scale: float, GROUP: Int, HEAD_DIM: Int, TILE_M: Int, TILE_N: Int, CAUSAL: Bool):
    tile, head, batch = ct.bid(0), ct.bid(1), ct.bid(2)
    to_base_2 = scale * LOG2E
    q = ct.load(Q, (batch, head, tile, 0), (1, 1, TILE_M, HEAD_DIM), padding_mode=ZERO).reshape((TILE_M, HEAD_DIM))
    last = last_keys(tile, K.shape[2], TILE_M, CAUSAL)

    def step(j, maximum, denominator, sums, MASKED):
        k = ct.load(K, (batch, head // GROUP, 0, j), (1, 1, HEAD_DIM, TILE_N), order=(0, 1, 3, 2), padding_mode=ZERO, latency=2)
        scores = ct.mma(q, k.reshape((HEAD_DIM, TILE_N)), ct.zeros((TILE_M, TILE_N), dtype=ct.float32))
        if MASKED:
            key = j * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[None, :]
            scores = ct.where(key <= last, scores, -math.inf)
        largest = ct.maximum(maximum, ct.max(scores, axis=1, keepdims=True) * to_base_2)
        weights = ct.exp2(scores * to_base_2 - largest, flush_to_zero=True)
        factor = ct.exp2(maximum - largest, flush_to_zero=True)
        denominator = denominator * factor + ct.sum(weights, axis=1, keepdims=True)
        v = ct.load(V, (batch, head // GROUP, j, 0), (1, 1, TILE_N, HEAD_DIM), padding_mode=ZERO, latency=4)
        return largest, denominator, ct.mma(weights.astype(V.dtype), v.reshape((TILE_N, HEAD_DIM)), sums * factor)

    maximum = ct.full((TILE_M, 1), -math.inf, dtype=ct.float32)
    denominator = ct.zeros((TILE_M, 1), dtype=ct.float32)
    sums = ct.zeros((TILE_M, HEAD_DIM), dtype=ct.float32)
    # <- Every row sees the tiles of keys before the diagonal whole: one loop for these, without a
    # mask, and one for the others. Not one loop with a branch: control flow inside a loop keeps the
    # compiler from overlapping softmax and products.
    whole = whole_tiles(tile, K.shape[2], TILE_M, TILE_N, CAUSAL)
    for j in range(whole):
        maximum, denominator, sums = step(j, maximum, denominator, sums, False)
    for j in range(whole, ct.cdiv(seen_keys(tile, K.shape[2], TILE_M, CAUSAL), TILE_N)):
        maximum, denominator, sums = step(j, maximum, denominator, sums, True)
    out = ct.truediv(sums, denominator, flush_to_zero=True, rounding_mode=APPROX).astype(OUT.dtype)
    ct.store(OUT, (batch, head, tile, 0), out.reshape((1, 1, TILE_M, HEAD_DIM)))


@ct.kernel
def longest_first_kernel(Q, K, V, OUT, scale: float, GROUP: Int, HEAD_DIM: Int, TILE_M: Int, TILE_N: Int, CAUSAL: Bool):
    # <- The last rows see most keys. Blocks start in the order of their index. So the longest start
    # first, and short ones fill the tail.
    tile, head, batch = ct.num_blocks(0) - 1 - ct.bid(0), ct.bid(1), ct.bid(2)
    to_base_2 = scale * LOG2E
    q = ct.load(Q, (batch, head, tile, 0), (1, 1, TILE_M, HEAD_DIM), padding_mode=ZERO).reshape((TILE_M, HEAD_DIM))
    last = last_keys(tile, K.shape[2], TILE_M, CAUSAL)

    def step(j, maximum, denominator, sums, MASKED):
        k = ct.load(K, (batch, head // GROUP, 0, j), (1, 1, HEAD_DIM, TILE_N), order=(0, 1, 3, 2), padding_mode=ZERO, latency=2)
        scores = ct.mma(q, k.reshape((HEAD_DIM, TILE_N)), ct.zeros((TILE_M, TILE_N), dtype=ct.float32))
        if MASKED:
            key = j * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[None, :]
            scores = ct.where(key <= last, scores, -math.inf)
        largest = ct.maximum(maximum, ct.max(scores, axis=1, keepdims=True) * to_base_2)
        weights = ct.exp2(scores * to_base_2 - largest, flush_to_zero=True)
        factor = ct.exp2(maximum - largest, flush_to_zero=True)
        denominator = denominator * factor + ct.sum(weights, axis=1, keepdims=True)
        v = ct.load(V, (batch, head // GROUP, j, 0), (1, 1, TILE_N, HEAD_DIM), padding_mode=ZERO, latency=4)
        return largest, denominator, ct.mma(weights.astype(V.dtype), v.reshape((TILE_N, HEAD_DIM)), sums * factor)

    maximum = ct.full((TILE_M, 1), -math.inf, dtype=ct.float32)
    denominator = ct.zeros((TILE_M, 1), dtype=ct.float32)
    sums = ct.zeros((TILE_M, HEAD_DIM), dtype=ct.float32)
    whole = whole_tiles(tile, K.shape[2], TILE_M, TILE_N, CAUSAL)
    for j in range(whole):
        maximum, denominator, sums = step(j, maximum, denominator, sums, False)
    for j in range(whole, ct.cdiv(seen_keys(tile, K.shape[2], TILE_M, CAUSAL), TILE_N)):
        maximum, denominator, sums = step(j, maximum, denominator, sums, True)
    out = ct.truediv(sums, denominator, flush_to_zero=True, rounding_mode=APPROX).astype(OUT.dtype)
    ct.store(OUT, (batch, head, tile, 0), out.reshape((1, 1, TILE_M, HEAD_DIM)))


@ct.kernel
def short_diagonal_kernel(Q, K, V, OUT, scale: float, GROUP: Int, HEAD_DIM: Int, TILE_M: Int, TILE_N: Int, CAUSAL: Bool, DIAGONAL_N: Int):
    tile, head, batch = ct.num_blocks(0) - 1 - ct.bid(0), ct.bid(1), ct.bid(2)
    to_base_2 = scale * LOG2E
    q = ct.load(Q, (batch, head, tile, 0), (1, 1, TILE_M, HEAD_DIM), padding_mode=ZERO).reshape((TILE_M, HEAD_DIM))
    last = last_keys(tile, K.shape[2], TILE_M, CAUSAL)

    def step(j, maximum, denominator, sums, TILE, MASKED):  # <- TILE keys, and not TILE_N always
        k = ct.load(K, (batch, head // GROUP, 0, j), (1, 1, HEAD_DIM, TILE), order=(0, 1, 3, 2), padding_mode=ZERO, latency=2)
        scores = ct.mma(q, k.reshape((HEAD_DIM, TILE)), ct.zeros((TILE_M, TILE), dtype=ct.float32))
        if MASKED:
            key = j * TILE + ct.arange(TILE, dtype=ct.int32)[None, :]
            scores = ct.where(key <= last, scores, -math.inf)
        largest = ct.maximum(maximum, ct.max(scores, axis=1, keepdims=True) * to_base_2)
        weights = ct.exp2(scores * to_base_2 - largest, flush_to_zero=True)
        factor = ct.exp2(maximum - largest, flush_to_zero=True)
        denominator = denominator * factor + ct.sum(weights, axis=1, keepdims=True)
        v = ct.load(V, (batch, head // GROUP, j, 0), (1, 1, TILE, HEAD_DIM), padding_mode=ZERO, latency=4)
        return largest, denominator, ct.mma(weights.astype(V.dtype), v.reshape((TILE, HEAD_DIM)), sums * factor)

    maximum = ct.full((TILE_M, 1), -math.inf, dtype=ct.float32)
    denominator = ct.zeros((TILE_M, 1), dtype=ct.float32)
    sums = ct.zeros((TILE_M, HEAD_DIM), dtype=ct.float32)
    whole = whole_tiles(tile, K.shape[2], TILE_M, TILE_N, CAUSAL)
    for j in range(whole):
        maximum, denominator, sums = step(j, maximum, denominator, sums, TILE_N, False)
    # <- On the diagonal, a step of TILE_N keys computes up to TILE_N scores a row that nobody sees.
    # Shorter steps compute fewer; their length divides TILE_N.
    for j in range(whole * (TILE_N // DIAGONAL_N), ct.cdiv(seen_keys(tile, K.shape[2], TILE_M, CAUSAL), DIAGONAL_N)):
        maximum, denominator, sums = step(j, maximum, denominator, sums, DIAGONAL_N, True)
    out = ct.truediv(sums, denominator, flush_to_zero=True, rounding_mode=APPROX).astype(OUT.dtype)
    ct.store(OUT, (batch, head, tile, 0), out.reshape((1, 1, TILE_M, HEAD_DIM)))


@ct.kernel
def tuned_kernel(
    Q, K, V, OUT, scale: float, GROUP: Int, HEAD_DIM: Int, TILE_M: Int, TILE_N: Int, CAUSAL: Bool, DIAGONAL_N: Int, PARTS: Int, LATENCY: Int
):
    tile, head, batch = ct.num_blocks(0) - 1 - ct.bid(0), ct.bid(1), ct.bid(2)
    to_base_2 = scale * LOG2E
    q = ct.load(Q, (batch, head, tile, 0), (1, 1, TILE_M, HEAD_DIM), padding_mode=ZERO).reshape((TILE_M, HEAD_DIM))
    last = last_keys(tile, K.shape[2], TILE_M, CAUSAL)

    def step(j, maximum, denominator, sums, TILE, MASKED):
        k = ct.load(K, (batch, head // GROUP, 0, j), (1, 1, HEAD_DIM, TILE), order=(0, 1, 3, 2), padding_mode=ZERO, latency=LATENCY)  # <-
        scores = ct.mma(q, k.reshape((HEAD_DIM, TILE)), ct.zeros((TILE_M, TILE), dtype=ct.float32))
        if MASKED:
            key = j * TILE + ct.arange(TILE, dtype=ct.int32)[None, :]
            scores = ct.where(key <= last, scores, -math.inf)
        largest = ct.maximum(maximum, ct.max(scores, axis=1, keepdims=True) * to_base_2)
        factor = ct.exp2(maximum - largest, flush_to_zero=True)
        # <- Weights are computed in PARTS of the columns and rounded at once, so no whole tile of
        # them is held in 32 bits. With the freed registers the compiler overlaps the softmax of a
        # step with the products of the next.
        part = ct.exp2(ct.extract(scores, (0, 0), (TILE_M, TILE // PARTS)) * to_base_2 - largest, flush_to_zero=True)
        part_sums, weights = part, part.astype(V.dtype)
        for i in ct.static_iter(range(1, PARTS)):
            part = ct.exp2(ct.extract(scores, (0, i), (TILE_M, TILE // PARTS)) * to_base_2 - largest, flush_to_zero=True)
            part_sums = part_sums + part
            weights = ct.cat((weights, part.astype(V.dtype)), axis=1)
        denominator = denominator * factor + ct.sum(part_sums, axis=1, keepdims=True)
        v = ct.load(V, (batch, head // GROUP, j, 0), (1, 1, TILE, HEAD_DIM), padding_mode=ZERO, latency=LATENCY)  # <-
        return largest, denominator, ct.mma(weights, v.reshape((TILE, HEAD_DIM)), sums * factor)

    maximum = ct.full((TILE_M, 1), -math.inf, dtype=ct.float32)
    denominator = ct.zeros((TILE_M, 1), dtype=ct.float32)
    sums = ct.zeros((TILE_M, HEAD_DIM), dtype=ct.float32)
    whole = whole_tiles(tile, K.shape[2], TILE_M, TILE_N, CAUSAL)
    for j in range(whole):
        maximum, denominator, sums = step(j, maximum, denominator, sums, TILE_N, False)
    for j in range(whole * (TILE_N // DIAGONAL_N), ct.cdiv(seen_keys(tile, K.shape[2], TILE_M, CAUSAL), DIAGONAL_N)):
        maximum, denominator, sums = step(j, maximum, denominator, sums, DIAGONAL_N, True)
    out = ct.truediv(sums, denominator, flush_to_zero=True, rounding_mode=APPROX).astype(OUT.dtype)
    ct.store(OUT, (batch, head, tile, 0), out.reshape((1, 1, TILE_M, HEAD_DIM)))
