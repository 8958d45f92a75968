"""One token's append to the cache and its attention, over KV splits, in one launch and a merge; few
keys need no merge.

A block has the query heads of a key head and one KV split. It has one tile of its keys under way
before the launch in front has ended: earlier steps wrote them. So a step's first launch must not
begin early. The new key and value never come from the cache: they are where the softmax of their
split begins.
"""

import math
from dataclasses import dataclass, replace
from functools import cache

import cuda.tile as ct
import torch
from torch import Tensor

from ..launch import Bound, Device, Launch, next_pow2
from ..ops.attention_decode.decision import Problem, with_merge
from ..ops.common.pdl import pdl_launch_dependents, pdl_wait
from ..ops.common.softmax_tiles import FLOOR, sink_factor, softmax_step
from ..ops.common.tiles import LOG2E, ZERO
from .head_tiles import norm_weight, rotation, summed, turned


@ct.kernel
def attend_splits_kernel(
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
    SINKS,
    OUT,
    scale: float,
    eps: float,
    NORMS: ct.Constant[bool],
    ROUND: ct.Constant[bool],
    SHARES: ct.Constant[int],
    HAS_SINKS: ct.Constant[bool],
    WINDOW: ct.Constant[int],
    SPLITS: ct.Constant[int],
    LOOP: ct.Constant[bool],
    GROUP: ct.Constant[int],
    ROWS: ct.Constant[int],
    HALF: ct.Constant[int],
    TILE_N: ct.Constant[int],
    LATENCY: ct.Constant[int],
):
    """The GROUP query heads of one key head over one KV split. Grid (SPLITS, key heads).

    Q, OUT [1, query heads, 1, 2 HALF]; K, V [1, key heads, 1, 2 HALF]; K_CACHE, V_CACHE [1, key
    heads, keys, 2 HALF], keys a multiple of TILE_N; int32 POSITIONS [1, 1], a position in the
    cache; COS, SIN [max_pos, HALF]; fp32 SINKS [query heads].
    NORMS: of queries and keys, by Q_WEIGHT and K_WEIGHT [2 HALF]; ROUND: round_before_weight as in
    `rms_norm`. SHARES: with several, Q, K and V are fp32 [SHARES, ...], the shares of sums. scale:
    of the scores, times log2(e). WINDOW: keys that the token sees, itself included; 0 for all.
    The tiles that hold visible keys are divided among the splits; a split with none writes an
    empty state. LOOP: a split may have several tiles. ROWS: GROUP, padded for the tensor cores.
    Several SPLITS: OUT is fp32 [1, SPLITS, query heads, 1, 2 HALF + 2 + pad], as
    `attention_decode_merge_kernel` reads it, to which sinks are left.
    """
    pdl_launch_dependents()
    DTYPE = K_CACHE.dtype
    split, kv = ct.bid(0), ct.bid(1)
    first_head = kv * GROUP

    position = ct.load(POSITIONS, (0, 0), ())
    begin = max(0, position + 1 - WINDOW) if WINDOW else 0
    own_tile = position // TILE_N
    first, end = begin // TILE_N, own_tile + 1
    per_split = ct.cdiv(end - first, SPLITS)
    first = first + split * per_split
    last = min(end, first + per_split) - 1

    def cached(A, j, i, COLUMNS, LATE):
        if LATE:
            tile = ct.load(A, (0, kv, j, i), (1, 1, TILE_N, COLUMNS), check_bounds=False, latency=LATENCY)
        else:
            tile = ct.load(A, (0, kv, j, i), (1, 1, TILE_N, COLUMNS), check_bounds=False, allow_tma=False)
        return tile.reshape((TILE_N, COLUMNS))

    def tiles_of(j, LATE):
        return cached(K_CACHE, j, 0, HALF, LATE), cached(K_CACHE, j, 1, HALF, LATE), cached(V_CACHE, j, 0, 2 * HALF, LATE)

    def new_row(A, column, COLUMNS):
        """This key head's row of K or V: of its COLUMNS the column-th."""

        def share(i):
            return ct.load(A, (i, kv, 0, column), (1, 1, 1, COLUMNS), check_bounds=False, allow_tma=False).reshape((1, COLUMNS))

        return summed(share, SHARES, DTYPE)

    def queries(half):
        heads = Q.slice(1, first_head, first_head + GROUP)

        def share(i):
            if GROUP == ROWS:
                tile = ct.load(heads, (i, 0, 0, half), (1, ROWS, 1, HALF), check_bounds=False, allow_tma=False)
            else:
                tile = ct.load(heads, (i, 0, 0, half), (1, ROWS, 1, HALF), padding_mode=ZERO, allow_tma=False)
            return tile.reshape((ROWS, HALF))

        return summed(share, SHARES, DTYPE)

    def step(j, tiles, q, state, MASKED):
        """The state with the j-th tile of keys, of which MASKED hides the new one, those behind it
        and those before the window.
        """
        sums, maximum, denominator = state
        v = tiles[2]
        scores = ct.zeros((ROWS, TILE_N), dtype=ct.float32)
        for i in ct.static_iter(range(2)):
            scores = ct.mma(q[i], ct.transpose(tiles[i]), scores)
        if MASKED:
            key = j * TILE_N + ct.arange(TILE_N, dtype=ct.int32)
            seen = key < position
            if WINDOW:
                seen = seen & (key >= begin)
            scores = ct.where(ct.expand_dims(seen, 0), scores, -math.inf)
            v = ct.where(ct.expand_dims(seen, 1), v, ct.zeros((1, 1), DTYPE))  # a weight of 0 does not hide a NaN
        weights, factor, maximum, denominator = softmax_step(scores, maximum, denominator, scale, DTYPE, 1, 1)
        return ct.mma(weights, v, sums * factor), maximum, denominator

    def append(new):
        for i in ct.static_iter(range(2)):
            ct.store(K_CACHE, (0, kv, position, i), new[i].reshape((1, 1, 1, HALF)), check_bounds=False, allow_tma=False)
        ct.store(V_CACHE, (0, kv, position, 0), new[2].reshape((1, 1, 1, 2 * HALF)), check_bounds=False, allow_tma=False)

    def begun(q, new):
        """The state of a softmax over the new key, if that is of this split. No branch: one would
        begin after the queries have come.
        """
        products = ct.zeros((ROWS, HALF), ct.float32)
        for i in ct.static_iter(range(2)):
            products = products + q[i].astype(ct.float32) * new[i].astype(ct.float32)
        maximum = ct.sum(products, axis=1, keepdims=True) * scale
        sums = ct.broadcast_to(new[2].astype(ct.float32), (ROWS, 2 * HALF))
        owns = last == own_tile
        return ct.where(owns, sums, 0.0), ct.where(owns, maximum, FLOOR), ct.where(owns, ct.full((ROWS, 1), 1.0, ct.float32), 0.0)

    def empty():
        return ct.zeros((ROWS, 2 * HALF), ct.float32), ct.full((ROWS, 1), FLOOR, ct.float32), ct.zeros((ROWS, 1), ct.float32)

    def write(state):
        sums, maximum, denominator = state
        if SPLITS > 1:
            heads = OUT.slice(2, first_head, first_head + GROUP)
            at, shape = (0, split, 0, 0, 0), (1, 1, ROWS, 1)
            ct.store(heads.slice(4, 0, 2 * HALF), at, sums.reshape((*shape, 2 * HALF)), allow_tma=False)
            both = heads.slice(4, 2 * HALF, 2 * HALF + 2)
            ct.store(both, at, maximum.reshape((*shape, 1)), allow_tma=False)
            ct.store(both, (0, split, 0, 0, 1), denominator.reshape((*shape, 1)), allow_tma=False)
        else:
            factor = 1.0 / denominator
            if HAS_SINKS:
                sink = ct.load(SINKS.slice(0, first_head, first_head + GROUP), (0,), (ROWS,), padding_mode=ZERO, allow_tma=False)
                factor = sink_factor(maximum, denominator, sink.reshape((ROWS, 1)) * LOG2E)
            heads = OUT.slice(1, first_head, first_head + GROUP)
            ct.store(heads, (0, 0, 0, 0), (sums * factor).astype(OUT.dtype).reshape((1, ROWS, 1, 2 * HALF)), allow_tma=False)

    if first <= last:
        ahead = tiles_of(last, False)
        cos, sin = rotation(COS, SIN, position, HALF)
        q_weight: tuple = ()
        k_weight: tuple = ()
        if NORMS:
            q_weight, k_weight = norm_weight(Q_WEIGHT, HALF), norm_weight(K_WEIGHT, HALF)
        pdl_wait()
        q = queries(0), queries(1)
        new = new_row(K, 0, HALF), new_row(K, 1, HALF), new_row(V, 0, 2 * HALF)
        q = turned(q, q_weight, cos, sin, eps, NORMS, ROUND, HALF, DTYPE)
        new = (*turned(new, k_weight, cos, sin, eps, NORMS, ROUND, HALF, DTYPE), new[2])
        state = step(last, ahead, q, begun(q, new), True)
        if last == own_tile:
            append(new)
        if LOOP:
            for j in range(first, last):
                state = step(j, tiles_of(j, True), q, state, WINDOW > 0)
        write(state)
    else:
        pdl_wait()
        write(empty())


@dataclass(frozen=True, slots=True)
class Form:
    """How the keys of a launch are divided, and its hints.

    splits: of the keys. tile_n: keys of a tile, a power of two; the cache's are a multiple.
    """

    splits: int
    tile_n: int
    latency: int = 4
    occupancy: int = 1
    num_worker_warps: int = 8


def reach_of(keys: int, window: int | None, tile_n: int) -> int:
    """Keys in the tiles that hold visible ones, at most."""
    return keys if window is None else min(keys, ((window + tile_n - 2) // tile_n + 1) * tile_n)


TILE_VALUES = 8192  # of the keys of a tile, in registers beside as many of values
TILES = (128, 64)


def form_of(kv_heads: int, keys: int, dim: int, window: int | None, device: Device) -> Form | None:
    """A tile for each block, while one wave of them has all keys; else as many splits as fill a
    wave. None for a cache that no tile divides.
    """
    tile_n = next((n for n in TILES if n * dim <= TILE_VALUES and keys % n == 0), 0)
    if not tile_n:
        return None
    tiles = -(-reach_of(keys, window, tile_n) // tile_n)
    most = 1 << (max(1, device.sms // kv_heads).bit_length() - 1)
    if tiles <= most:
        return Form(next_pow2(tiles), tile_n)
    # A loop's tiles come by TMA. In half of an SM there is room for its blocks before the launch in
    # front has ended.
    return Form(most, tile_n, occupancy=2, num_worker_warps=tile_n // 16)


ARGUMENTS = ("q", "k", "v", "k_cache", "v_cache", "positions", "cos", "sin", "q_weight", "k_weight", "sinks", "out", "scale", "eps")


def attend_splits(
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
    sinks: Tensor | None,
    out: Tensor,
    window: int | None,
    scale: float,
    eps: float,
    round_before_weight: bool,
    form: Form,
) -> None:
    """`kv_append` of one token of one sequence, then `attention_decode` of positions + 1 keys; but
    q is left as it is. q, k and v may be fp32 shares of sums, as `kv_append_out` takes them. The
    position lies in the cache. No checks, no sync: safe under graph capture.
    """
    window = None if window is None or window >= k_cache.shape[2] else window  # it hides nothing
    shape = (len(q), q.shape[1], k.shape[1], k_cache.shape[2], q.shape[3], k_cache.dtype)
    how = (window, q_norm is not None, round_before_weight, sinks is not None, form)
    given = (q, k, v, k_cache, v_cache, positions, cos, sin, q_norm, k_norm, sinks, out, scale * LOG2E, eps)
    _launches(Device.of(q), *shape, *how).run(*given)


@cache
def _launches(
    device: Device,
    shares: int,
    heads: int,
    kv_heads: int,
    keys: int,
    dim: int,
    dtype: torch.dtype,
    window: int | None,
    norms: bool,
    rounds: bool,
    sinks: bool,
    form: Form,
) -> Bound:
    group, merged = heads // kv_heads, form.splits > 1
    constants = {
        "norms": norms,
        "round": rounds,
        "shares": shares,
        "has_sinks": sinks and not merged,
        "window": window or 0,
        "loop": form.splits * form.tile_n < reach_of(keys, window, form.tile_n),
        "group": group,
        "rows": max(16, next_pow2(group)),
        "half": dim // 2,
    }
    touched = {"q_weight": norms, "k_weight": norms, "sinks": constants["has_sinks"]}
    grid = (form.splits, kv_heads)
    attend = Launch.of(attend_splits_kernel, grid, None, form, constants, optional=touched, pdl=True)
    if not merged:
        return Bound([attend], ARGUMENTS, device)
    p = Problem(1, heads, kv_heads, keys, dim, dtype, window=window, sinks=sinks)
    attend, merge = with_merge(attend, p, form.splits, device)
    # The product behind it reads weights meanwhile (Qwen3-0.6B: 0.7 us a layer).
    return Bound((attend, replace(merge, pdl=True)), ARGUMENTS, device)
