"""Tile code of `rope`."""

import cuda.tile as ct

from ...launch import next_pow2
from ..common.tiles import along, load_pairs, rotate_pairs, store_pairs


def _each_place(rotate, Q, BATCH_IN_X, FOLDED, GROUPS, TILE_S):
    """Calls rotate(group, batch, tile of positions) for this block, if there is such a place."""
    group, x, y = ct.bid(0) % GROUPS, ct.bid(0) // GROUPS, ct.bid(1)
    if FOLDED:
        x += ct.bid(2) * (ct.num_blocks(0) // GROUPS)
        if BATCH_IN_X:
            if x < Q.shape[0]:
                rotate(group, x, y)
        elif x * TILE_S < Q.shape[2]:
            rotate(group, y, x)
    elif BATCH_IN_X:
        rotate(group, x, y)
    else:
        rotate(group, y, x)


def _rotate(Q, K, group, b, s, angles, INTERLEAVED, Q_SHARE, K_SHARE, HALF, TILE_S, LATENCY):
    """A block's share of Q and K. angles(TILE_H): cos and sin in fp32, to multiply by tiles
    [1, TILE_H, TILE_S, TILE_HALF].
    """
    TILE_HALF = ct.static_eval(next_pow2(HALF))

    def whole(SHARE, t):
        HEADS, GROUPS, TILES, TILE_H = SHARE
        return TILE_S == 1 and TILE_HALF == HALF and (GROUPS * TILES * TILE_H == HEADS or (GROUPS == 1 and t < TILES - 1))

    def fetched(X, SHARE, group):
        found: tuple = ()
        for t in ct.static_iter(range(SHARE[2])):
            at, pair = (b, group * SHARE[2] + t, s, 0), (1, SHARE[3], TILE_S, TILE_HALF)
            found = (*found, load_pairs(X, at, pair, INTERLEAVED, HALF, whole(SHARE, t), LATENCY))
        return found

    def put(X, SHARE, group, found, cos, sin):
        for t in ct.static_iter(range(SHARE[2])):
            at, pair = (b, group * SHARE[2] + t, s, 0), (1, SHARE[3], TILE_S, TILE_HALF)
            store_pairs(X, at, rotate_pairs(found[t], pair, cos, sin), INTERLEAVED, HALF, whole(SHARE, t))

    # All loads come before the first store: the compiler has to keep a load behind an earlier store
    # to the same array.
    if Q_SHARE[1] == 1 and K_SHARE[1] == 1:
        cos, sin = angles(Q_SHARE[3])
        q = fetched(Q, Q_SHARE, 0)
        k_cos, k_sin = angles(K_SHARE[3])
        k = fetched(K, K_SHARE, 0)
        put(Q, Q_SHARE, 0, q, cos, sin)
        put(K, K_SHARE, 0, k, k_cos, k_sin)
    elif group < Q_SHARE[1]:
        cos, sin = angles(Q_SHARE[3])
        put(Q, Q_SHARE, group, fetched(Q, Q_SHARE, group), cos, sin)
    else:
        cos, sin = angles(K_SHARE[3])
        put(K, K_SHARE, group - Q_SHARE[1], fetched(K, K_SHARE, group - Q_SHARE[1]), cos, sin)


@ct.kernel
def rope_kernel(
    Q,
    K,
    COS,
    SIN,
    BATCH_IN_X: ct.Constant[bool],
    FOLDED: ct.Constant[bool],
    INTERLEAVED: ct.Constant[bool],
    Q_HEADS: ct.Constant[int],
    Q_GROUPS: ct.Constant[int],
    Q_TILES: ct.Constant[int],
    Q_TILE_H: ct.Constant[int],
    K_HEADS: ct.Constant[int],
    K_GROUPS: ct.Constant[int],
    K_TILES: ct.Constant[int],
    K_TILE_H: ct.Constant[int],
    HALF: ct.Constant[int],
    TILE_S: ct.Constant[int],
    LATENCY: ct.Constant[int],
):
    """Q, K: [batch, heads, seq_len, head_dim]; COS, SIN: [1 or batch, seq_len, HALF]. One group of
    each: a block takes both. BATCH_IN_X, FOLDED: of the grid.
    """
    GROUPS = 1 if Q_GROUPS == 1 and K_GROUPS == 1 else Q_GROUPS + K_GROUPS
    TILE_HALF = ct.static_eval(next_pow2(HALF))

    def rotate(group, b, s):
        row = min(b, COS.shape[0] - 1)
        positions, columns = along(2, TILE_S, s * TILE_S), along(3, TILE_HALF, 0)
        inside = (positions < Q.shape[2]) & (columns < HALF) if TILE_S > 1 else columns < HALF

        def angle(TABLE, TILE_H):
            if TILE_S == 1 and TILE_HALF == HALF:
                x = ct.load(TABLE.slice(2, 0, HALF), (row, s, 0), (1, 1, HALF), check_bounds=False, latency=LATENCY, allow_tma=False)
                return x.reshape((1, 1, 1, HALF)).astype(ct.float32)
            # Once for each head, out of L1: so they come as wide as q and k do, and where they are
            # needed.
            rows = ct.full((1, TILE_H, 1, 1), row, ct.int32)
            return ct.gather(TABLE, (rows, positions, columns), mask=inside, check_bounds=False, latency=LATENCY).astype(ct.float32)

        def angles(TILE_H):
            return angle(COS, TILE_H), angle(SIN, TILE_H)

        q_share, k_share = (Q_HEADS, Q_GROUPS, Q_TILES, Q_TILE_H), (K_HEADS, K_GROUPS, K_TILES, K_TILE_H)
        _rotate(Q, K, group, b, s, angles, INTERLEAVED, q_share, k_share, HALF, TILE_S, LATENCY)

    _each_place(rotate, Q, BATCH_IN_X, FOLDED, GROUPS, TILE_S)


@ct.kernel
def rope_positions_kernel(
    Q,
    K,
    POSITIONS,
    INV_FREQ,
    scaling: float,
    BATCH_IN_X: ct.Constant[bool],
    FOLDED: ct.Constant[bool],
    INTERLEAVED: ct.Constant[bool],
    Q_HEADS: ct.Constant[int],
    Q_GROUPS: ct.Constant[int],
    Q_TILES: ct.Constant[int],
    Q_TILE_H: ct.Constant[int],
    K_HEADS: ct.Constant[int],
    K_GROUPS: ct.Constant[int],
    K_TILES: ct.Constant[int],
    K_TILE_H: ct.Constant[int],
    HALF: ct.Constant[int],
    TILE_S: ct.Constant[int],
    LATENCY: ct.Constant[int],
):
    """Q, K: [batch, heads, seq_len, head_dim]; POSITIONS: [1 or batch, seq_len]; INV_FREQ: [HALF].
    As rope_kernel.
    """
    GROUPS = 1 if Q_GROUPS == 1 and K_GROUPS == 1 else Q_GROUPS + K_GROUPS

    def rotate(group, b, s):
        row = min(b, POSITIONS.shape[0] - 1)
        positions, columns = along(2, TILE_S, s * TILE_S), along(3, ct.static_eval(next_pow2(HALF)), 0)
        inv_freq = ct.gather(INV_FREQ, columns, mask=columns < HALF, check_bounds=False)
        place = ct.gather(POSITIONS, (row, positions), mask=positions < Q.shape[2], check_bounds=False, latency=LATENCY)
        angle = place.astype(ct.float32) * inv_freq
        cos, sin = ct.cos(angle) * scaling, ct.sin(angle) * scaling

        def angles(TILE_H):
            return cos, sin

        q_share, k_share = (Q_HEADS, Q_GROUPS, Q_TILES, Q_TILE_H), (K_HEADS, K_GROUPS, K_TILES, K_TILE_H)
        _rotate(Q, K, group, b, s, angles, INTERLEAVED, q_share, k_share, HALF, TILE_S, LATENCY)

    _each_place(rotate, Q, BATCH_IN_X, FOLDED, GROUPS, TILE_S)
