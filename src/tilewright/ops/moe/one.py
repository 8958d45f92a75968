"""Tile code of `moe` for a single token: products of a matrix and a vector, on the CUDA cores, as fast as the weights come."""

import cuda.tile as ct

from ..scaling import BLOCK, GROUP, ROW, ZERO
from .kernels import activated, of_rows


def _add_products(acc, x, scales, w, expert, part, tile_n, step, TILE_N, TILE_K, LATENCY):
    """acc [TILE_N, TILE_K] + one tile of an expert's weights times x fp32 [1, TILE_K] times scales [groups]; sums along k are left for the end."""
    tile = ct.load(w, (expert, part, tile_n, step), (1, 1, TILE_N, TILE_K), padding_mode=ZERO, latency=LATENCY)
    groups = scales.shape[0]
    each = ct.broadcast_to(scales.reshape((groups, 1)), (groups, TILE_K // groups)).reshape((1, TILE_K)) if groups > 1 else scales
    return acc + tile.reshape((TILE_N, TILE_K)).astype(ct.float32) * (x * each)


def _scales(scale_w, expert, part, tile_n, step, TILE_N, TILE_K, SCALING):
    """BLOCK: [groups in TILE_K] of a tile of weights; else ones [1]."""
    if SCALING != BLOCK:
        return ct.ones((1,), ct.float32)
    where = (expert, part, tile_n // (GROUP // TILE_N), step)
    return ct.load(scale_w, where, (1, 1, 1, TILE_K // GROUP), padding_mode=ZERO, allow_tma=False).reshape((TILE_K // GROUP,))


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
    SHARED: ct.Constant[int],
    LATENCY: ct.Constant[int],
    SCALES_AHEAD: ct.Constant[bool],
    ADD_BIAS: ct.Constant[bool],
    ALPHA: ct.Constant[float],
    LIMIT: ct.Constant[float],
    UP_OFFSET: ct.Constant[float],
):
    """h[i] = weights[i] * the activation of the i-th choice, zero for another rank's expert. Grid (column tiles, choices + SHARED).

    ids: [choices]. weights: [1, choices]. x: [1, k]. w: [experts, 2, n, k]. h: [choices + SHARED, n]. scale_w, bias: as moe_kernel.
    shared: [SHARED, 2, n, k], experts that every token passes with a weight of one, behind those it chose; not touched if there are none.
    """
    tile_n, slot = ct.bid(0), ct.bid(1)

    def activation(matrix, expert, KIND):
        gate, up = ct.zeros((TILE_N, TILE_K), ct.float32), ct.zeros((TILE_N, TILE_K), ct.float32)
        steps = ct.cdiv(x.shape[1], TILE_K)
        # Scales do not come through TMA. Those of the next step can be fetched before this one is worked on, but then weights are not.
        if SCALES_AHEAD:
            scales_gate = _scales(scale_w, expert, 0, tile_n, 0, TILE_N, TILE_K, KIND)
            scales_up = _scales(scale_w, expert, 1, tile_n, 0, TILE_N, TILE_K, KIND)
        for step in range(steps):
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

    def chosen():
        own = ct.gather(ids, slot)
        if (own >= 0) & (own < w.shape[0]):
            y = ct.gather(weights, (0, slot)) * activation(w, own.astype(ct.int32), SCALING)
            ct.store(h, (slot, tile_n), y.astype(h.dtype).reshape((1, TILE_N)), allow_tma=False)
        else:
            ct.store(h, (slot, tile_n), ct.zeros((1, TILE_N), h.dtype), allow_tma=False)

    if SHARED:
        if slot < weights.shape[1]:
            chosen()
        else:
            y = activation(shared, slot - weights.shape[1], 0)
            ct.store(h, (slot, tile_n), y.astype(h.dtype).reshape((1, TILE_N)), allow_tma=False)
    else:
        chosen()


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
    LATENCY: ct.Constant[int],
    ADD_BIAS: ct.Constant[bool],
):
    """The second product and the sum over the experts in one. Grid (column tiles,).

    ids: [TOP_K]. h: [TOP_K + SHARED, k], as moe_one_up_kernel leaves it. w: [experts, 1, n, k]. shared: [SHARED, 1, n, k], likewise. out: [1, n].
    scale_w, bias: as moe_kernel. weights: [1, TOP_K], read only with ADD_BIAS: h has them already.
    TILE_P: a power of two, at least TOP_K.
    """
    tile_n = ct.bid(0)
    steps = ct.cdiv(h.shape[1], TILE_K)
    index = ct.arange(TILE_P, dtype=ct.int32)
    chosen = ct.gather(ids, index, padding_value=-1)
    # In place of another rank's expert one of this token's own is read again, from L2, times zero: a branch would keep the loads apart.
    instead = ct.max(ct.where((index < TOP_K) & (chosen < w.shape[0]), chosen, -1))
    acc = ct.zeros((TILE_N, TILE_K), ct.float32)
    biases = ct.zeros((TILE_N,), ct.float32)
    if ADD_BIAS:  # fetched before the weights are waited for
        known = (index < TOP_K) & (chosen >= 0) & (chosen < w.shape[0])
        row = ct.where(known, chosen, -1).astype(ct.int32).reshape((TILE_P, 1))
        column = (tile_n * TILE_N + ct.arange(TILE_N, dtype=ct.int32)).reshape((1, TILE_N))
        each = ct.gather(bias, (row, 0, column, 0), padding_value=0).astype(ct.float32)
        share = ct.where(known, ct.gather(weights, (0, index), padding_value=0), 0.0)
        biases = ct.sum(share.reshape((TILE_P, 1)) * each, axis=0)
    units = TOP_K * steps

    def place(unit):
        slot = unit // steps
        own = ct.gather(ids, slot)
        return slot, unit - slot * steps, ct.where((own >= 0) & (own < w.shape[0]), own, instead).astype(ct.int32)

    if SHARED:
        for unit in range(SHARED * steps):
            slot = unit // steps
            step = unit - slot * steps
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
