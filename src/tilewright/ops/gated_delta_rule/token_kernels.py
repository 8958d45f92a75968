"""Tile code of `gated_delta_rule`: one token of each sequence.

Little is computed here for each byte of state, so nothing may stand in front of its loads. Where
each thread of a block loads one number of k and of q, they pass through shared memory to the
threads that hold their rows of the state: the compiler puts that, its barrier and the wait for both
in front of the state's own loads. So a state is PARTS tiles of rows, fewer in each than a block has
threads. Each thread then loads the numbers of its own rows, and all loads begin at once.
"""

import cuda.tile as ct

from ..common.pdl import pdl_overlap
from ..common.recurrence import row_of
from ..common.tiles import ZERO, load_tile
from .kernels import three_sums, two_sums


@ct.kernel
def token_kernel(
    Q,
    K,
    V,
    G,
    BETA,
    STATE,
    OUT,
    scale: float,
    eps: float,
    NORMALIZE: ct.Constant[bool],
    WHOLE: ct.Constant[bool],
    PARTS: ct.Constant[int],
    GROUP: ct.Constant[int],
    TILE_K: ct.Constant[int],
    TILE_V: ct.Constant[int],
):
    """TILE_V columns of the state of one head, as PARTS tiles of rows.

    Grid (blocks of columns, v_heads, sequences); arrays as in `recurrent_kernel`.
    """
    pdl_overlap()
    j, h, b = ct.bid(0), ct.bid(1), ct.bid(2)
    ROWS = TILE_K // PARTS
    exact = K.dtype == ct.float32

    def rows_of(X, head):
        found: tuple = ()
        for i in ct.static_iter(range(PARTS)):
            found = (*found, row_of(X, (b, head, 0), i, (ROWS, 1), WHOLE))
        return found

    states: tuple = ()
    for i in ct.static_iter(range(PARTS)):
        states = (*states, load_tile(STATE, (b, h, i, j), (1, 1, ROWS, TILE_V), ZERO, WHOLE, None, False).reshape((ROWS, TILE_V)))
    ks, qs = rows_of(K, h // GROUP), rows_of(Q, h // GROUP)
    v = row_of(V, (b, h, 0), j, (1, TILE_V), WHOLE)
    beta = ct.load(BETA, (b, h, 0), (), check_bounds=False).astype(ct.float32)
    decay = ct.exp(ct.load(G, (b, h, 0), (), check_bounds=False).astype(ct.float32))
    nothing, none = ct.zeros((ROWS, TILE_V), dtype=ct.float32), ct.zeros((ROWS, 1), dtype=ct.float32)
    length_k, length_q = 1.0, 1.0
    if NORMALIZE and exact:  # in the definition's order; rsqrt has an error of 2 ulp
        kk, qq = none, none
        for i in ct.static_iter(range(PARTS)):
            kk, qq = kk + ks[i] * ks[i], qq + qs[i] * qs[i]
        kk, qq = ct.reduce((kk, qq), 0, two_sums, (0.0, 0.0), keepdims=True)
        length_k, length_q = 1.0 / ct.sqrt(kk + eps), 1.0 / ct.sqrt(qq + eps)
    sk, sq, kk, qq, kq = nothing, nothing, none, none, none
    for i in ct.static_iter(range(PARTS)):
        s, k, q = states[i], ks[i] * length_k, qs[i] * length_q
        sk, sq, kk, qq, kq = sk + s * k, sq + s * q, kk + k * k, qq + q * q, kq + k * q
    seen, found = ct.reduce((sk, sq), 0, two_sums, (0.0, 0.0), keepdims=True)
    kk, qq, kq = ct.reduce((kk, qq, kq), 0, three_sums, (0.0, 0.0, 0.0), keepdims=True)
    of_k, of_q = 1.0, scale
    if NORMALIZE and not exact:
        of_k, of_q = ct.rsqrt(kk + eps), ct.rsqrt(qq + eps) * scale
    delta = (v - decay * of_k * seen) * (beta * of_k)
    for i in ct.static_iter(range(PARTS)):
        s = states[i] * decay + ks[i] * length_k * delta
        ct.store(STATE, (b, h, i, j), s.reshape((1, 1, ROWS, TILE_V)), check_bounds=not WHOLE, allow_tma=False)
    out = (decay * found + kq * delta) * of_q
    ct.store(OUT, (b, h, 0, j), out.astype(OUT.dtype).reshape((1, 1, 1, TILE_V)), check_bounds=not WHOLE, allow_tma=False)
