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
from .kernels import one_token


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
    CHANNELS: ct.Constant[bool],
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
    if CHANNELS:
        gates, decay = rows_of(G, h), 1.0
        decayed: tuple = ()
        for i in ct.static_iter(range(PARTS)):
            decayed = (*decayed, states[i] * ct.exp(gates[i]))
        states = decayed
    else:
        decay = ct.exp(ct.load(G, (b, h, 0), (), check_bounds=False).astype(ct.float32))
    states, out = one_token(states, ks, qs, v, decay, beta, (scale, eps, NORMALIZE, K.dtype == ct.float32))
    for i in ct.static_iter(range(PARTS)):
        ct.store(STATE, (b, h, i, j), states[i].reshape((1, 1, ROWS, TILE_V)), check_bounds=not WHOLE, allow_tma=False)
    ct.store(OUT, (b, h, 0, j), out.astype(OUT.dtype).reshape((1, 1, 1, TILE_V)), check_bounds=not WHOLE, allow_tma=False)
