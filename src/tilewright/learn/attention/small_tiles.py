"""Steps 1 to 6: tiles of 64x64, from the plainest kernel to one that keeps the tensor cores fed.

Each kernel is the one above it with a single change, marked `# <-`. A block computes the attention
of one tile of queries of one head over the tiles of keys that it sees: with CAUSAL those up to its
own rows, else all. Arrays: Q, OUT [batch, q_heads, seq_len, HEAD_DIM], K, V [batch, q_heads /
GROUP, seq_len, HEAD_DIM].
"""

import math
from typing import TypeAlias

import cuda.tile as ct

LOG2E = math.log2(math.e)
ZERO = ct.PaddingMode.ZERO
APPROX = ct.RoundingMode.APPROX
Int: TypeAlias = ct.Constant[int]
Bool: TypeAlias = ct.Constant[bool]


def last_keys(tile, keys, TILE_M, CAUSAL):
    """The last key that each row of a tile sees, [TILE_M, 1]."""
    if CAUSAL:
        return tile * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]
    return ct.full((TILE_M, 1), keys - 1, dtype=ct.int32)


def seen_keys(tile, keys, TILE_M, CAUSAL):
    """How many keys, from the first, some row of a tile sees."""
    if CAUSAL:
        return min((tile + 1) * TILE_M, keys)
    return keys


def whole_tiles(tile, keys, TILE_M, TILE_N, CAUSAL):
    """How many tiles of keys, from the first, every row of a tile sees whole."""
    if CAUSAL:
        return tile * TILE_M // TILE_N
    return keys // TILE_N


@ct.kernel
def basic_kernel(Q, K, V, OUT, scale: float, GROUP: Int, HEAD_DIM: Int, TILE_M: Int, TILE_N: Int, CAUSAL: Bool):
    tile, head, batch = ct.bid(0), ct.bid(1), ct.bid(2)
    q = ct.load(Q, (batch, head, tile, 0), (1, 1, TILE_M, HEAD_DIM), padding_mode=ZERO).reshape((TILE_M, HEAD_DIM))
    last = last_keys(tile, K.shape[2], TILE_M, CAUSAL)  # [TILE_M, 1]
    # The softmax of a row sees one tile of keys at a time. It keeps the largest score so far, and
    # sums relative to it.
    maximum = ct.full((TILE_M, 1), -math.inf, dtype=ct.float32)
    denominator = ct.zeros((TILE_M, 1), dtype=ct.float32)
    sums = ct.zeros((TILE_M, HEAD_DIM), dtype=ct.float32)
    for j in range(ct.cdiv(seen_keys(tile, K.shape[2], TILE_M, CAUSAL), TILE_N)):  # no row sees the tiles after these
        k = ct.load(K, (batch, head // GROUP, j, 0), (1, 1, TILE_N, HEAD_DIM), padding_mode=ZERO).reshape((TILE_N, HEAD_DIM))
        scores = ct.mma(q, ct.permute(k, (1, 0)), ct.zeros((TILE_M, TILE_N), dtype=ct.float32)) * scale
        key = j * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[None, :]  # [1, TILE_N]
        # No row that is stored sees padding past the last key. Every row sees key 0, so no maximum
        # stays -inf.
        scores = ct.where(key <= last, scores, -math.inf)
        largest = ct.maximum(maximum, ct.max(scores, axis=1, keepdims=True))
        weights = ct.exp(scores - largest)
        factor = ct.exp(maximum - largest)
        denominator = denominator * factor + ct.sum(weights, axis=1, keepdims=True)
        v = ct.load(V, (batch, head // GROUP, j, 0), (1, 1, TILE_N, HEAD_DIM), padding_mode=ZERO).reshape((TILE_N, HEAD_DIM))
        sums = ct.mma(weights.astype(V.dtype), v, sums * factor)
        maximum = largest
    out = (sums / denominator).astype(OUT.dtype)
    ct.store(OUT, (batch, head, tile, 0), out.reshape((1, 1, TILE_M, HEAD_DIM)))


@ct.kernel
def exp2_kernel(Q, K, V, OUT, scale: float, GROUP: Int, HEAD_DIM: Int, TILE_M: Int, TILE_N: Int, CAUSAL: Bool):
    tile, head, batch = ct.bid(0), ct.bid(1), ct.bid(2)
    to_base_2 = scale * LOG2E  # <- e**(scale * s) = 2**(to_base_2 * s)
    q = ct.load(Q, (batch, head, tile, 0), (1, 1, TILE_M, HEAD_DIM), padding_mode=ZERO).reshape((TILE_M, HEAD_DIM))
    last = last_keys(tile, K.shape[2], TILE_M, CAUSAL)
    maximum = ct.full((TILE_M, 1), -math.inf, dtype=ct.float32)
    denominator = ct.zeros((TILE_M, 1), dtype=ct.float32)
    sums = ct.zeros((TILE_M, HEAD_DIM), dtype=ct.float32)
    for j in range(ct.cdiv(seen_keys(tile, K.shape[2], TILE_M, CAUSAL), TILE_N)):
        k = ct.load(K, (batch, head // GROUP, j, 0), (1, 1, TILE_N, HEAD_DIM), padding_mode=ZERO).reshape((TILE_N, HEAD_DIM))
        scores = ct.mma(q, ct.permute(k, (1, 0)), ct.zeros((TILE_M, TILE_N), dtype=ct.float32))  # <- not scaled yet
        key = j * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[None, :]
        scores = ct.where(key <= last, scores, -math.inf)
        largest = ct.maximum(maximum, ct.max(scores, axis=1, keepdims=True) * to_base_2)
        weights = ct.exp2(scores * to_base_2 - largest)  # <- scale and subtraction are one fma, the exponential one instruction
        factor = ct.exp2(maximum - largest)  # <-
        denominator = denominator * factor + ct.sum(weights, axis=1, keepdims=True)
        v = ct.load(V, (batch, head // GROUP, j, 0), (1, 1, TILE_N, HEAD_DIM), padding_mode=ZERO).reshape((TILE_N, HEAD_DIM))
        sums = ct.mma(weights.astype(V.dtype), v, sums * factor)
        maximum = largest
    out = (sums / denominator).astype(OUT.dtype)
    ct.store(OUT, (batch, head, tile, 0), out.reshape((1, 1, TILE_M, HEAD_DIM)))


@ct.kernel
def transposed_kernel(Q, K, V, OUT, scale: float, GROUP: Int, HEAD_DIM: Int, TILE_M: Int, TILE_N: Int, CAUSAL: Bool):
    tile, head, batch = ct.bid(0), ct.bid(1), ct.bid(2)
    to_base_2 = scale * LOG2E
    q = ct.load(Q, (batch, head, tile, 0), (1, 1, TILE_M, HEAD_DIM), padding_mode=ZERO).reshape((TILE_M, HEAD_DIM))
    last = last_keys(tile, K.shape[2], TILE_M, CAUSAL)
    maximum = ct.full((TILE_M, 1), -math.inf, dtype=ct.float32)
    denominator = ct.zeros((TILE_M, 1), dtype=ct.float32)
    sums = ct.zeros((TILE_M, HEAD_DIM), dtype=ct.float32)
    for j in range(ct.cdiv(seen_keys(tile, K.shape[2], TILE_M, CAUSAL), TILE_N)):
        # <- `order` names the axes of K that the axes of the tile follow: the tile is loaded as
        # [HEAD_DIM, TILE_N].
        k = ct.load(K, (batch, head // GROUP, 0, j), (1, 1, HEAD_DIM, TILE_N), order=(0, 1, 3, 2), padding_mode=ZERO)
        scores = ct.mma(q, k.reshape((HEAD_DIM, TILE_N)), ct.zeros((TILE_M, TILE_N), dtype=ct.float32))  # <- no permute
        key = j * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[None, :]
        scores = ct.where(key <= last, scores, -math.inf)
        largest = ct.maximum(maximum, ct.max(scores, axis=1, keepdims=True) * to_base_2)
        weights = ct.exp2(scores * to_base_2 - largest)
        factor = ct.exp2(maximum - largest)
        denominator = denominator * factor + ct.sum(weights, axis=1, keepdims=True)
        v = ct.load(V, (batch, head // GROUP, j, 0), (1, 1, TILE_N, HEAD_DIM), padding_mode=ZERO).reshape((TILE_N, HEAD_DIM))
        sums = ct.mma(weights.astype(V.dtype), v, sums * factor)
        maximum = largest
    out = (sums / denominator).astype(OUT.dtype)
    ct.store(OUT, (batch, head, tile, 0), out.reshape((1, 1, TILE_M, HEAD_DIM)))


@ct.kernel
def latency_kernel(Q, K, V, OUT, scale: float, GROUP: Int, HEAD_DIM: Int, TILE_M: Int, TILE_N: Int, CAUSAL: Bool):
    tile, head, batch = ct.bid(0), ct.bid(1), ct.bid(2)
    to_base_2 = scale * LOG2E
    q = ct.load(Q, (batch, head, tile, 0), (1, 1, TILE_M, HEAD_DIM), padding_mode=ZERO).reshape((TILE_M, HEAD_DIM))
    last = last_keys(tile, K.shape[2], TILE_M, CAUSAL)
    maximum = ct.full((TILE_M, 1), -math.inf, dtype=ct.float32)
    denominator = ct.zeros((TILE_M, 1), dtype=ct.float32)
    sums = ct.zeros((TILE_M, HEAD_DIM), dtype=ct.float32)
    for j in range(ct.cdiv(seen_keys(tile, K.shape[2], TILE_M, CAUSAL), TILE_N)):
        # <- latency: how slow the compiler should assume the load to be, so how many steps ahead it
        # starts it. v is needed later than k.
        k = ct.load(K, (batch, head // GROUP, 0, j), (1, 1, HEAD_DIM, TILE_N), order=(0, 1, 3, 2), padding_mode=ZERO, latency=2)
        scores = ct.mma(q, k.reshape((HEAD_DIM, TILE_N)), ct.zeros((TILE_M, TILE_N), dtype=ct.float32))
        key = j * TILE_N + ct.arange(TILE_N, dtype=ct.int32)[None, :]
        scores = ct.where(key <= last, scores, -math.inf)
        largest = ct.maximum(maximum, ct.max(scores, axis=1, keepdims=True) * to_base_2)
        weights = ct.exp2(scores * to_base_2 - largest)
        factor = ct.exp2(maximum - largest)
        denominator = denominator * factor + ct.sum(weights, axis=1, keepdims=True)
        v = ct.load(V, (batch, head // GROUP, j, 0), (1, 1, TILE_N, HEAD_DIM), padding_mode=ZERO, latency=4)  # <-
        sums = ct.mma(weights.astype(V.dtype), v.reshape((TILE_N, HEAD_DIM)), sums * factor)
        maximum = largest
    out = (sums / denominator).astype(OUT.dtype)
    ct.store(OUT, (batch, head, tile, 0), out.reshape((1, 1, TILE_M, HEAD_DIM)))


@ct.kernel
def division_kernel(Q, K, V, OUT, scale: float, GROUP: Int, HEAD_DIM: Int, TILE_M: Int, TILE_N: Int, CAUSAL: Bool):
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
        weights = ct.exp2(scores * to_base_2 - largest)
        factor = ct.exp2(maximum - largest)
        denominator = denominator * factor + ct.sum(weights, axis=1, keepdims=True)
        v = ct.load(V, (batch, head // GROUP, j, 0), (1, 1, TILE_N, HEAD_DIM), padding_mode=ZERO, latency=4)
        sums = ct.mma(weights.astype(V.dtype), v.reshape((TILE_N, HEAD_DIM)), sums * factor)
        maximum = largest
    # <- the hardware's reciprocal, without the steps that make it exact. Rounding to 16 bits hides
    # the difference.
    out = ct.truediv(sums, denominator, flush_to_zero=True, rounding_mode=APPROX).astype(OUT.dtype)
    ct.store(OUT, (batch, head, tile, 0), out.reshape((1, 1, TILE_M, HEAD_DIM)))
