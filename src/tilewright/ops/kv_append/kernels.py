"""Tile code of `kv_append`."""

import cuda.tile as ct
import torch

from ...launch import next_pow2
from ..common.fp8 import codes_of, largest_code, scale_of
from ..common.pdl import pdl_overlap
from ..common.tiles import ZERO, add_each, load_pairs, load_tile, rotate_pairs, store_pairs

LARGEST = largest_code(torch.float8_e4m3fn)


def _slot(position, b, CACHE, BLOCK_TABLE, PAGE_SIZE):
    """(first index into the cache, row, whether there is such a row) of a sequence's position; the
    indices are inside in any case.
    """
    rows = CACHE.shape[2]
    if PAGE_SIZE:
        rows = BLOCK_TABLE.shape[1] * PAGE_SIZE
    inside = max(0, min(position, rows - 1))
    held = position == inside
    if PAGE_SIZE:
        page = ct.load(BLOCK_TABLE, (b, inside // PAGE_SIZE), ())
        outer = max(0, min(page, CACHE.shape[0] - 1))
        return outer, inside % PAGE_SIZE, held & (page == outer)
    return b, inside, held


def _rows(X, b, group, token, dim, from_column, TILE_H, EVEN, LATENCY):
    """Columns from_column to dim of one token's TILE_H heads, [1, TILE_H, 1, width]."""
    part = X.slice(3, from_column, dim)
    width = ct.static_eval(next_pow2(dim - from_column))
    return load_tile(part, (b, group, token, 0), (1, TILE_H, 1, width), ZERO, EVEN and width == dim - from_column, LATENCY, False)


def _square_sum(tiles):
    """[1, heads, 1, 1] of tiles of one shape [1, heads, 1, columns]."""
    total = ct.zeros(tiles[0].shape, ct.float32)
    for x in ct.static_iter(tiles):
        wide = x.astype(ct.float32)
        total = total + wide * wide
    return ct.sum(total, axis=3, keepdims=True)


@ct.kernel
def kv_append_kernel(
    Q,
    K,
    V,
    K_CACHE,
    V_CACHE,
    POSITIONS,
    ROPE_POSITIONS,
    BLOCK_TABLE,
    COS,
    SIN,
    K_SCALE,
    V_SCALE,
    Q_WEIGHT,
    K_WEIGHT,
    V_WEIGHT,
    ROTATED,
    eps: float,
    SHARES: ct.Constant[int],
    PAGE_SIZE: ct.Constant[int],
    SCALED: ct.Constant[bool],
    EACH: ct.Constant[bool],
    INTERLEAVED: ct.Constant[bool],
    OWN_ROPE: ct.Constant[bool],
    Q_NORM: ct.Constant[bool],
    K_NORM: ct.Constant[bool],
    V_NORM: ct.Constant[bool],
    ROUND: ct.Constant[bool],
    EVEN_Q: ct.Constant[bool],
    EVEN_KV: ct.Constant[bool],
    Q_GROUPS: ct.Constant[int],
    KV_GROUPS: ct.Constant[int],
    HEAD_DIM: ct.Constant[int],
    V_DIM: ct.Constant[int],
    ROTARY: ct.Constant[int],
    Q_TILE: ct.Constant[int],
    KV_TILE: ct.Constant[int],
    TOKENS: ct.Constant[int],
    LATENCY: ct.Constant[int],
):
    """TOKENS tokens of a group of heads of q, k or v. Grid (groups of q, k and v x blocks of
    tokens, batch), the groups fastest.

    Q, K, V [batch, heads, tokens, dim]; K_CACHE, V_CACHE [batch, kv_heads, max_len, dim], in pages
    [pages, kv_heads, PAGE_SIZE, dim]; int32 POSITIONS, ROPE_POSITIONS [batch, tokens], BLOCK_TABLE
    [batch, max_pages]; COS, SIN [max_pos, ROTARY / 2]; fp32 K_SCALE, V_SCALE [1], or with EACH
    those of each token and head, like the caches without their columns, which are then written.
    It has 38 parameters, because a launch for each option would make a decode step slower.
    Q_WEIGHT, K_WEIGHT, V_WEIGHT [1, 1, 1, dim]: of the norms that Q_NORM, K_NORM and V_NORM ask
    for. What a flag or a size of 0 says is absent is not touched. EVEN: tiles end with the heads.
    SHARES: with several, Q, K and V are fp32 and have as many times batch sequences, the shares of
    each behind each other; they are summed and rounded, and ROTATED, like Q but bf16, gets the
    queries.
    """
    pdl_overlap()
    TO, DTYPE = (ROTATED, ct.bfloat16) if SHARES > 1 else (Q, K.dtype)
    COPIES = Q_NORM or SHARES > 1  # of queries also what is not rotated
    GROUPS, HALF = Q_GROUPS + 2 * KV_GROUPS, ROTARY // 2
    TILE_HALF = ct.static_eval(next_pow2(HALF))
    group, first, b = ct.bid(0) % GROUPS, ct.bid(0) // GROUPS * TOKENS, ct.bid(1)

    def angles(token):
        position = ct.load(ROPE_POSITIONS if OWN_ROPE else POSITIONS, (b, token), ())
        row = max(0, min(position, COS.shape[0] - 1))
        shape = (1, TILE_HALF)
        cos = load_tile(COS.slice(1, 0, HALF), (row, 0), shape, ZERO, HALF == TILE_HALF, LATENCY, False).astype(ct.float32)
        sin = load_tile(SIN.slice(1, 0, HALF), (row, 0), shape, ZERO, HALF == TILE_HALF, LATENCY, False).astype(ct.float32)
        return cos.reshape((1, 1, 1, TILE_HALF)), sin.reshape((1, 1, 1, TILE_HALF))

    def scales(tiles, SCALE):
        """The scales of the codes of these tiles of a token's heads."""
        if not SCALED:
            return None
        if not EACH:
            return ct.load(SCALE, (0,), ())
        largest = ct.max(ct.abs(tiles[0].astype(ct.float32)), axis=3, keepdims=True, propagate_nan=True)
        for x in ct.static_iter(tiles[1:]):
            more = ct.max(ct.abs(x.astype(ct.float32)), axis=3, keepdims=True, propagate_nan=True)
            largest = ct.maximum(largest, more, propagate_nan=True)
        return scale_of(largest, LARGEST, False)

    def encoded(x, scale):
        return codes_of(x.astype(ct.float32), scale, ct.float8_e4m3fn) if SCALED else x.astype(DTYPE)

    def store_scales(SCALE, outer, group, row, scale):
        if EACH:
            ct.store(SCALE, (outer, group, row), scale.reshape((1, KV_TILE, 1)), check_bounds=not EVEN_KV, allow_tma=False)

    def added(load, outer, COUNT):
        """The tiles that load(outer) finds; with COUNT shares their sums, rounded."""
        found = load(outer)
        for i in ct.static_iter(range(1, COUNT)):
            found = add_each(*found, *load(i * POSITIONS.shape[0] + outer))
        rounded: tuple = ()
        for x in ct.static_iter(found):
            rounded = (*rounded, x.astype(DTYPE) if COUNT > 1 else x)
        return rounded

    def fetched(X, outer, group, token, TILE_H, EVEN, REST, COUNT):
        """(tiles of the columns that are rotated, tiles of the others) of one token's TILE_H heads.
        REST: the others are wanted. COUNT: of shares.
        """

        def pairs_of(outer):
            whole = EVEN and HALF == TILE_HALF
            return load_pairs(X, (outer, group, token, 0), (1, TILE_H, 1, TILE_HALF), INTERLEAVED, HALF, whole, LATENCY)

        def rest_of(outer):
            return (_rows(X, outer, group, token, HEAD_DIM, ROTARY, TILE_H, EVEN, LATENCY),)

        pairs: tuple = ()
        rest: tuple = ()
        if ROTARY:
            pairs = added(pairs_of, outer, COUNT)
        if REST and ROTARY < HEAD_DIM:
            rest = added(rest_of, outer, COUNT)
        return pairs, rest

    def normed(x, weight, DIM):
        """x and weight as `fetched` has them; in fp32."""
        if len(x[0]) and len(x[1]):
            squares = _square_sum(x[0]) + _square_sum(x[1])
        else:
            squares = _square_sum(x[0] if len(x[0]) else x[1])
        rstd = 1.0 / ct.sqrt(squares * (1.0 / DIM) + eps)  # rsqrt has an error of 2 ulp in fp32

        def scaled(tiles, weights):
            found: tuple = ()
            for i in ct.static_iter(range(len(tiles))):
                y = tiles[i].astype(ct.float32) * rstd
                if ROUND:
                    y = y.astype(DTYPE).astype(ct.float32)
                found = (*found, y * weights[i].astype(ct.float32))
            return found

        return scaled(x[0], weight[0]), scaled(x[1], weight[1])

    def rotate_q(group, first, COUNT):
        pair, whole = (1, Q_TILE, 1, TILE_HALF), EVEN_Q and HALF == TILE_HALF
        weight: tuple = ()
        if Q_NORM:
            weight = fetched(Q_WEIGHT, 0, 0, 0, 1, True, True, 1)
        loaded: tuple = ()
        for t in ct.static_iter(range(COUNT)):
            loaded = (*loaded, fetched(Q, b, group, first + t, Q_TILE, EVEN_Q, COPIES, SHARES))
        for t in ct.static_iter(range(COUNT)):
            pairs, rest = normed(loaded[t], weight, HEAD_DIM) if Q_NORM else loaded[t]
            store_pairs(TO, (b, group, first + t, 0), rotate_pairs(pairs, pair, *angles(first + t)), INTERLEAVED, HALF, whole)
            if COPIES and ROTARY < HEAD_DIM:
                even = EVEN_Q and rest[0].shape[3] == HEAD_DIM - ROTARY
                part = TO.slice(3, ROTARY, HEAD_DIM)
                ct.store(part, (b, group, first + t, 0), rest[0].astype(DTYPE), check_bounds=not even, allow_tma=False)

    def append_k(group, first, COUNT):
        pair, whole = (1, KV_TILE, 1, TILE_HALF), EVEN_KV and HALF == TILE_HALF
        weight: tuple = ()
        if K_NORM:
            weight = fetched(K_WEIGHT, 0, 0, 0, 1, True, True, 1)
        loaded: tuple = ()
        for t in ct.static_iter(range(COUNT)):
            loaded = (*loaded, fetched(K, b, group, first + t, KV_TILE, EVEN_KV, True, SHARES))
        for t in ct.static_iter(range(COUNT)):
            pairs, rest = normed(loaded[t], weight, HEAD_DIM) if K_NORM else loaded[t]
            rotated: tuple = ()
            if ROTARY:
                rotated = rotate_pairs(pairs, pair, *angles(first + t))
            scale = scales((*rotated, *rest), K_SCALE)
            if ROTARY:
                if SCALED:  # else rounded as q is; the codes are those of the exact rotation
                    rotated = (encoded(rotated[0], scale), encoded(rotated[1], scale))
            outer, row, held = _slot(ct.load(POSITIONS, (b, first + t), ()), b, K_CACHE, BLOCK_TABLE, PAGE_SIZE)
            if held:
                store_scales(K_SCALE, outer, group, row, scale)
                if ROTARY:
                    store_pairs(K_CACHE, (outer, group, row, 0), rotated, INTERLEAVED, HALF, whole)
                if ROTARY < HEAD_DIM:
                    even = EVEN_KV and rest[0].shape[3] == HEAD_DIM - ROTARY
                    part = K_CACHE.slice(3, ROTARY, HEAD_DIM)
                    ct.store(part, (outer, group, row, 0), encoded(rest[0], scale), check_bounds=not even, allow_tma=False)

    def append_v(group, first, COUNT):
        weight: tuple = ()
        if V_NORM:
            weight = ((), (_rows(V_WEIGHT, 0, 0, 0, V_DIM, 0, 1, True, LATENCY),))
        loaded: tuple = ()
        for t in ct.static_iter(range(COUNT)):

            def row(outer):
                return (_rows(V, outer, group, first + t, V_DIM, 0, KV_TILE, EVEN_KV, LATENCY),)

            loaded = (*loaded, *added(row, b, SHARES))
        for t in ct.static_iter(range(COUNT)):
            x = normed(((), (loaded[t],)), weight, V_DIM)[1][0] if V_NORM else loaded[t]
            outer, row, held = _slot(ct.load(POSITIONS, (b, first + t), ()), b, V_CACHE, BLOCK_TABLE, PAGE_SIZE)
            scale = scales((x,), V_SCALE)
            if held:
                store_scales(V_SCALE, outer, group, row, scale)
                even = EVEN_KV and x.shape[3] == V_DIM
                part = V_CACHE.slice(3, 0, V_DIM)
                ct.store(part, (outer, group, row, 0), encoded(x, scale), check_bounds=not even, allow_tma=False)

    def append(group, first, COUNT):
        if group < KV_GROUPS:
            append_k(group, first, COUNT)
        else:
            append_v(group - KV_GROUPS, first, COUNT)

    def run(first, COUNT):
        if Q_GROUPS == 0:
            append(group, first, COUNT)
        elif group < Q_GROUPS:
            rotate_q(group, first, COUNT)
        else:
            append(group - Q_GROUPS, first, COUNT)

    if TOKENS == 1:
        run(first, 1)
    elif first + TOKENS <= K.shape[2]:
        run(first, TOKENS)
    else:
        for token in range(first, K.shape[2]):
            run(token, 1)
