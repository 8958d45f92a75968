"""Tile code of `moe` for a single token: products of a matrix and a vector, on the CUDA cores, as
fast as the weights come.
"""

import cuda.tile as ct

from ..common.expert_lists import activated
from ..common.pdl import pdl_launch_dependents, pdl_wait
from ..common.scaling import BLOCK, GROUP, ROW
from ..common.tiles import ZERO
from .kernels import of_rows


def _add_products(acc, x, scales, w, expert, part, tile_n, step, TILE_N, TILE_K, LATENCY):
    """acc [TILE_N, TILE_K] + one tile of an expert's weights times x fp32 [1, TILE_K] times scales
    [groups]; sums along k are left for the end.
    """
    tile = ct.load(w, (expert, part, tile_n, step), (1, 1, TILE_N, TILE_K), padding_mode=ZERO, latency=LATENCY)
    groups = scales.shape[0]
    each = ct.broadcast_to(scales.reshape((groups, 1)), (groups, TILE_K // groups)).reshape((1, TILE_K)) if groups > 1 else scales
    return acc + tile.reshape((TILE_N, TILE_K)).astype(ct.float32) * (x * each)


def _tiles_ahead(w, slot, part, tile_n, TILE_N, TILE_K, COUNT):
    """The first COUNT tiles of a row of tiles of weights, in registers: the launch before does not
    write them, so they may be loaded before it has ended.
    """
    tiles: tuple = ()
    for step in ct.static_iter(range(COUNT)):
        tile = ct.load(w, (slot, part, tile_n, step), (1, 1, TILE_N, TILE_K), padding_mode=ZERO, allow_tma=False)
        tiles = (*tiles, tile.reshape((TILE_N, TILE_K)))
    return tiles


def _add_ahead(acc, rows, slot, tiles, TILE_K):
    """acc + the products of such tiles and the row `slot` of rows."""
    for step in ct.static_iter(range(len(tiles))):
        a = ct.load(rows, (slot, step), (1, TILE_K), padding_mode=ZERO, allow_tma=False).astype(ct.float32)
        acc = acc + tiles[step].astype(ct.float32) * a
    return acc


def _scales(scale_w, expert, part, tile_n, step, TILE_N, TILE_K, SCALING):
    """BLOCK: [groups in TILE_K] of a tile of weights; else ones [1]."""
    if SCALING != BLOCK:
        return ct.ones((1,), ct.float32)
    groups = step * (TILE_K // GROUP) + ct.arange(TILE_K // GROUP, dtype=ct.int32)
    where = (expert, part, tile_n // (GROUP // TILE_N), groups)
    return ct.gather(scale_w, where, mask=groups < scale_w.shape[3], padding_value=0, check_bounds=False)  # as in load_masked


def _own_choices(ids, w, TOP_K, TILE_P):
    """Places of the token's choices [TILE_P], the expert of each or -1 if this rank has it not, and
    the largest of these.

    That one is read again, from L2, times zero, in place of another rank's.
    """
    index = ct.arange(TILE_P, dtype=ct.int32)
    chosen = ct.gather(ids, index, padding_value=-1)
    own = ct.where((index < TOP_K) & (chosen >= 0) & (chosen < w.shape[0]), chosen, -1).astype(ct.int32)
    return index, own, ct.max(own)


@ct.kernel
def moe_one_up_kernel(
    ids,
    weights,
    x,
    w,
    scale_w,
    bias,
    shared,
    h,
    TILE_N: ct.Constant[int],
    TILE_K: ct.Constant[int],
    SCALING: ct.Constant[int],
    TOP_K: ct.Constant[int],
    SHARED: ct.Constant[int],
    TILE_P: ct.Constant[int],
    PERSISTENT: ct.Constant[bool],
    AHEAD: ct.Constant[int],
    LATENCY: ct.Constant[int],
    SCALES_AHEAD: ct.Constant[bool],
    ADD_BIAS: ct.Constant[bool],
    ALPHA: ct.Constant[float],
    LIMIT: ct.Constant[float],
    UP_OFFSET: ct.Constant[float],
):
    """h[i] = weights[i] * the activation of the i-th choice, zero for another rank's expert. Grid
    (column tiles, TOP_K + SHARED).

    ids: [TOP_K]. weights: [1, TOP_K]. x: [1, k]. w: [experts, 2, n, k]. h: [TOP_K + SHARED, n].
    scale_w, bias: as moe_kernel.
    shared: [SHARED, 2, n, k], experts that every token passes with a weight of one, behind those it
        chose; not touched if there are none. Their blocks come first, and load AHEAD steps of their
        weights before the launch in front has ended; not with PERSISTENT.
    PERSISTENT: grid (blocks, 1), as many as the device holds. Each takes tile after tile, with the
        next tile's loads under way while it ends one.
    TILE_P: a power of two, at least TOP_K; used only then.
    """
    pdl_launch_dependents()

    def activation(matrix, expert, tile_n, KIND, gates_ahead=(), ups_ahead=()):
        gate, up = ct.zeros((TILE_N, TILE_K), ct.float32), ct.zeros((TILE_N, TILE_K), ct.float32)
        gate, up = _add_ahead(gate, x, 0, gates_ahead, TILE_K), _add_ahead(up, x, 0, ups_ahead, TILE_K)
        steps = ct.cdiv(x.shape[1], TILE_K)
        # Scales do not come through TMA. Those of the next step can be fetched before this one is
        # worked on, but then weights are not.
        if SCALES_AHEAD:
            scales_gate = _scales(scale_w, expert, 0, tile_n, 0, TILE_N, TILE_K, KIND)
            scales_up = _scales(scale_w, expert, 1, tile_n, 0, TILE_N, TILE_K, KIND)
        for step in range(len(gates_ahead), steps):
            if SCALES_AHEAD:
                then = min(step + 1, steps - 1)
                next_gate = _scales(scale_w, expert, 0, tile_n, then, TILE_N, TILE_K, KIND)
                next_up = _scales(scale_w, expert, 1, tile_n, then, TILE_N, TILE_K, KIND)
            else:
                scales_gate = _scales(scale_w, expert, 0, tile_n, step, TILE_N, TILE_K, KIND)
                scales_up = _scales(scale_w, expert, 1, tile_n, step, TILE_N, TILE_K, KIND)
            a = ct.load(x, (0, step), (1, TILE_K), padding_mode=ZERO, latency=LATENCY).astype(ct.float32)
            gate = _add_products(gate, a, scales_gate, matrix, expert, 0, tile_n, step, TILE_N, TILE_K, LATENCY)
            up = _add_products(up, a, scales_up, matrix, expert, 1, tile_n, step, TILE_N, TILE_K, LATENCY)
            if SCALES_AHEAD:
                scales_gate, scales_up = next_gate, next_up
        first, second = ct.sum(gate, axis=1), ct.sum(up, axis=1)
        if KIND == ROW:
            scales = of_rows(scale_w, expert, tile_n, 2, TILE_N)
            first, second = first * ct.extract(scales, (0,), (TILE_N,)), second * ct.extract(scales, (1,), (TILE_N,))
        if ADD_BIAS:
            biases = of_rows(bias, expert, tile_n, 2, TILE_N)
            first, second = first + ct.extract(biases, (0,), (TILE_N,)), second + ct.extract(biases, (1,), (TILE_N,))
        return activated(first, second, ALPHA, LIMIT, UP_OFFSET)

    def put(slot, tile_n, y):
        ct.store(h, (slot, tile_n), y.astype(h.dtype).reshape((1, TILE_N)), allow_tma=False)

    def chosen(slot, tile_n):
        own = ct.gather(ids, slot)
        if (own >= 0) & (own < w.shape[0]):
            put(slot, tile_n, ct.gather(weights, (0, slot)) * activation(w, own.astype(ct.int32), tile_n, SCALING))
        else:
            put(slot, tile_n, ct.zeros((TILE_N,), ct.float32))

    if PERSISTENT:
        pdl_wait()
        tiles = ct.cdiv(h.shape[1], TILE_N)
        own_tiles = TOP_K * tiles
        instead = ct.maximum(_own_choices(ids, w, TOP_K, TILE_P)[2], 0)
        for unit in range(ct.bid(0), own_tiles, ct.num_blocks(0)):
            slot = unit // tiles
            tile_n = unit - slot * tiles
            own = ct.gather(ids, slot)
            known = (own >= 0) & (own < w.shape[0])
            # A branch would keep the loads apart.
            y = ct.gather(weights, (0, slot)) * activation(w, ct.where(known, own, instead).astype(ct.int32), tile_n, SCALING)
            put(slot, tile_n, ct.where(known, y, 0.0))
        if SHARED:  # blocks that had fewer tiles above come first
            ahead = (ct.bid(0) + ct.num_blocks(0) - own_tiles % ct.num_blocks(0)) % ct.num_blocks(0)
            for unit in range(ahead, SHARED * tiles, ct.num_blocks(0)):
                slot = unit // tiles
                tile_n = unit - slot * tiles
                put(TOP_K + slot, tile_n, activation(shared, slot, tile_n, 0))
    elif SHARED:
        tile_n, slot = ct.bid(0), ct.bid(1)
        if slot < SHARED:
            gates, ups = _tiles_ahead(shared, slot, 0, tile_n, TILE_N, TILE_K, AHEAD), _tiles_ahead(shared, slot, 1, tile_n, TILE_N, TILE_K, AHEAD)
            pdl_wait()
            put(TOP_K + slot, tile_n, activation(shared, slot, tile_n, 0, gates, ups))
        else:
            pdl_wait()
            chosen(slot - SHARED, tile_n)
    else:
        pdl_wait()
        chosen(ct.bid(1), ct.bid(0))


@ct.kernel
def moe_one_down_kernel(
    ids,
    weights,
    h,
    w,
    scale_w,
    bias,
    shared,
    out,
    TOP_K: ct.Constant[int],
    SHARED: ct.Constant[int],
    TILE_P: ct.Constant[int],
    TILE_N: ct.Constant[int],
    TILE_K: ct.Constant[int],
    SCALING: ct.Constant[int],
    AHEAD: ct.Constant[int],
    LATENCY: ct.Constant[int],
    ADD_BIAS: ct.Constant[bool],
):
    """The second product and the sum over the experts in one. Grid (column tiles,).

    ids: [TOP_K]. h: [TOP_K + SHARED, k], as moe_one_up_kernel leaves it. w: [experts, 1, n, k].
    shared: [SHARED, 1, n, k], likewise. out: [1, n].
    scale_w, bias: as moe_kernel. weights: [1, TOP_K], read only with ADD_BIAS: h has them already.
    TILE_P: a power of two, at least TOP_K. AHEAD: of each shared expert so many steps of weights
    are loaded before the launch in front has ended.
    """
    pdl_launch_dependents()
    tile_n = ct.bid(0)
    ahead: tuple = ()
    for slot in ct.static_iter(range(SHARED)):
        ahead = (*ahead, _tiles_ahead(shared, slot, 0, tile_n, TILE_N, TILE_K, AHEAD))
    pdl_wait()
    steps = ct.cdiv(h.shape[1], TILE_K)
    index, chosen, instead = _own_choices(ids, w, TOP_K, TILE_P)
    acc = ct.zeros((TILE_N, TILE_K), ct.float32)
    biases = ct.zeros((TILE_N,), ct.float32)
    if ADD_BIAS:  # fetched before the weights are waited for
        row = chosen.reshape((TILE_P, 1))
        column = (tile_n * TILE_N + ct.arange(TILE_N, dtype=ct.int32)).reshape((1, TILE_N))
        each = ct.gather(bias, (row, 0, column, 0), padding_value=0).astype(ct.float32)
        share = ct.where(chosen >= 0, ct.gather(weights, (0, index), padding_value=0), 0.0)
        biases = ct.sum(share.reshape((TILE_P, 1)) * each, axis=0)
    units = TOP_K * steps

    def place(unit):
        slot = unit // steps
        own = ct.gather(ids, slot, check_bounds=False)
        return slot, unit - slot * steps, ct.where((own >= 0) & (own < w.shape[0]), own, instead).astype(ct.int32)

    for slot in ct.static_iter(range(SHARED)):
        acc = _add_ahead(acc, h, TOP_K + slot, ahead[slot], TILE_K)
    if SHARED:
        for unit in range(SHARED * (steps - AHEAD)):
            slot = unit // (steps - AHEAD)
            step = AHEAD + unit - slot * (steps - AHEAD)
            a = ct.load(h, (TOP_K + slot, step), (1, TILE_K), padding_mode=ZERO, latency=LATENCY).astype(ct.float32)
            acc = _add_products(acc, a, ct.ones((1,), ct.float32), shared, slot, 0, tile_n, step, TILE_N, TILE_K, LATENCY)
    if instead >= 0:
        slot, step, expert = place(0)
        scales = _scales(scale_w, expert, 0, tile_n, step, TILE_N, TILE_K, SCALING)
        for unit in range(units):
            next_slot, next_step, next_expert = place(min(unit + 1, units - 1))
            next_scales = _scales(scale_w, next_expert, 0, tile_n, next_step, TILE_N, TILE_K, SCALING)
            a = ct.load(h, (slot, step), (1, TILE_K), padding_mode=ZERO, latency=LATENCY).astype(ct.float32)
            if SCALING == ROW:
                a = a * of_rows(scale_w, expert, tile_n, 1, TILE_N).reshape((TILE_N, 1))
            acc = _add_products(acc, a, scales, w, expert, 0, tile_n, step, TILE_N, TILE_K, LATENCY)
            slot, step, expert, scales = next_slot, next_step, next_expert, next_scales
    y = ct.sum(acc, axis=1) + biases if ADD_BIAS else ct.sum(acc, axis=1)
    ct.store(out, (0, tile_n), y.reshape((1, TILE_N)).astype(out.dtype), allow_tma=False)
