"""One token's append to the cache and its attention to the keys there, in one launch.

A block has one query head. It has all keys and values of the cache under way before the launch in
front has ended: earlier steps wrote them. So a step's first launch must not begin early.

On an H200 a step of Llama-3.2-1B takes 3.4 us less a layer than with the two ops and a merge.
"""

from functools import cache

import cuda.tile as ct
from torch import Tensor

from ..launch import Bound, Device, Launch
from ..ops.common.pdl import pdl_launch_dependents, pdl_wait
from ..ops.common.tiles import LOG2E
from .head_tiles import norm_weight, rotation, summed, turned

APPROX = ct.RoundingMode.APPROX
HIDDEN = -1e30  # the score of no key; finite, so that its distance to itself is a number
MOST_VALUES = 16384  # of the keys that a block holds: with v's, 64 registers of a thread. A loop over more is slower


@ct.kernel
def append_attend_kernel(
    Q,
    K,
    V,
    K_CACHE,
    V_CACHE,
    POSITIONS,
    COS,
    SIN,
    Q_WEIGHT,
    K_WEIGHT,
    OUT,
    scale: float,
    eps: float,
    NORMS: ct.Constant[bool],
    ROUND: ct.Constant[bool],
    SHARES: ct.Constant[int],
    HEADS: ct.Constant[int],
    GROUP: ct.Constant[int],
    KEYS: ct.Constant[int],
    HALF: ct.Constant[int],
):
    """The attention of one of HEADS query heads, or behind them the append of one key head. Grid
    (query heads + key heads, batch).

    Q, OUT [batch, HEADS, 1, 2 HALF]; K, V [batch, HEADS / GROUP, 1, 2 HALF]; K_CACHE, V_CACHE
    [batch, HEADS / GROUP, KEYS, 2 HALF]; int32 POSITIONS [batch, 1]; COS, SIN [max_pos, HALF].
    NORMS: of queries and keys, by Q_WEIGHT and K_WEIGHT [2 HALF]; ROUND: round_before_weight as in
    `rms_norm`. scale: of the scores, times log2(e). SHARES: with several, Q, K and V are fp32 and
    have as many times batch sequences, the shares of each behind each other.
    """
    pdl_launch_dependents()
    batch, DTYPE = ct.bid(1), K_CACHE.dtype
    position = ct.load(POSITIONS, (batch, 0), ())
    cos, sin = rotation(COS, SIN, position, HALF)

    def halves(A, h):
        def half(column):
            def share(i):
                at = (batch + i * POSITIONS.shape[0], h, 0, column)
                return ct.load(A, at, (1, 1, 1, HALF), check_bounds=False, allow_tma=False).reshape((1, HALF))

            return summed(share, SHARES, DTYPE)

        return half(0), half(1)

    def store_halves(A, h, row, x):
        for i in ct.static_iter(range(2)):
            ct.store(A, (batch, h, row, i), x[i].astype(A.dtype).reshape((1, 1, 1, HALF)), check_bounds=False, allow_tma=False)

    def append(kv):
        weight: tuple = ()
        if NORMS:
            weight = norm_weight(K_WEIGHT, HALF)
        pdl_wait()
        k, v = halves(K, kv), halves(V, kv)
        if position >= 0 and position < K_CACHE.shape[2]:
            store_halves(K_CACHE, kv, position, turned(k, weight, cos, sin, eps, NORMS, ROUND, HALF, DTYPE))
            store_halves(V_CACHE, kv, position, v)

    def attend(head):
        kv = head // GROUP
        held = ct.arange(KEYS, dtype=ct.int32).reshape((KEYS, 1)) < position

        def cached(A, half):
            return ct.load(A, (batch, kv, 0, half), (1, 1, KEYS, HALF), check_bounds=False, allow_tma=False).reshape((KEYS, HALF))

        def values(half):
            """Where there are none yet 0: a weight of 0 does not hide a NaN."""
            return ct.where(held, cached(V_CACHE, half), ct.zeros((1, 1), V_CACHE.dtype))

        def score(keys, q):
            products = keys[0].astype(ct.float32) * q[0].astype(ct.float32) + keys[1].astype(ct.float32) * q[1].astype(ct.float32)
            return ct.sum(products, axis=1, keepdims=True) * scale

        keys, vs = (cached(K_CACHE, 0), cached(K_CACHE, 1)), (values(0), values(1))
        q_weight: tuple = ()
        k_weight: tuple = ()
        if NORMS:
            q_weight, k_weight = norm_weight(Q_WEIGHT, HALF), norm_weight(K_WEIGHT, HALF)
        pdl_wait()
        q, k, v = halves(Q, head), halves(K, kv), halves(V, kv)
        q, k = turned(q, q_weight, cos, sin, eps, NORMS, ROUND, HALF, DTYPE), turned(k, k_weight, cos, sin, eps, NORMS, ROUND, HALF, DTYPE)
        # The new key stands beside the cache's: a choice for each number of a tile would take as
        # long as its product (H200: half a microsecond a layer).
        own, scores = score(k, q), ct.where(held, score(keys, q), HIDDEN)
        largest = ct.maximum(ct.max(scores, axis=0, keepdims=True), own)
        weight, own = ct.exp2(scores - largest, flush_to_zero=True), ct.exp2(own - largest, flush_to_zero=True)

        def plus(a, b, c, d, e, f):
            return a + d, b + e, c + f

        left, right = weight * vs[0].astype(ct.float32), weight * vs[1].astype(ct.float32)
        left, right, total = ct.reduce((left, right, ct.broadcast_to(weight, (KEYS, HALF))), 0, plus, (0.0, 0.0, 0.0))
        total = total + own.reshape((1,))

        def joined(sums, x):
            return ct.truediv(sums + (own * x.astype(ct.float32)).reshape((HALF,)), total, rounding_mode=APPROX)

        store_halves(OUT, head, 0, (joined(left, v[0]), joined(right, v[1])))

    if ct.bid(0) < HEADS:
        attend(ct.bid(0))
    else:
        append(ct.bid(0) - HEADS)


ARGUMENTS = ("q", "k", "v", "k_cache", "v_cache", "positions", "cos", "sin", "q_weight", "k_weight", "out", "scale", "eps")


def append_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    out: Tensor,
    scale: float,
    eps: float,
    round_before_weight: bool,
) -> None:
    """`kv_append` of one token for each sequence, then `attention_decode` of positions + 1 keys;
    but q is left as it is. q, k and v may be fp32 shares of sums, as `kv_append_out` takes them.
    keys and dim are powers of two, their product at most MOST_VALUES. No checks, no sync: safe
    under graph capture.
    """
    batch = len(positions)
    shape = (batch, len(q) // batch, q.shape[1], k.shape[1], k_cache.shape[2], q.shape[3], q_norm is not None, round_before_weight)
    _launches(Device.of(q), *shape).run(q, k, v, k_cache, v_cache, positions, cos, sin, q_norm, k_norm, out, scale * LOG2E, eps)


@cache
def _launches(device: Device, batch: int, shares: int, heads: int, kv_heads: int, keys: int, dim: int, norms: bool, rounds: bool) -> Bound:
    constants = {"norms": norms, "round": rounds, "shares": shares, "heads": heads, "group": heads // kv_heads, "keys": keys, "half": dim // 2}
    unused = () if norms else ("q_weight", "k_weight")
    launch = Launch(append_attend_kernel, (heads + kv_heads, batch), constants, occupancy=1, num_worker_warps=8, pdl=True, unused=unused)
    return Bound([launch], ARGUMENTS, device)
