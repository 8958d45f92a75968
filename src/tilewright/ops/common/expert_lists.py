"""What stands around the products of experts, as tile code and launches: which rows go where, their
activation, and the sum over the experts of a token.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import cuda.tile as ct
import torch

from ...launch import Device, Launch, next_pow2
from .fp8 import group_codes
from .pdl import pdl_overlap
from .scaling import GROUP
from .tiles import ZERO, gated, load_masked

LARGEST = 448  # of the codes of activations, e4m3
MAP_WIDTH = 128  # panels that a block writes at once


def activated(gate, up, ALPHA, LIMIT, UP_OFFSET):
    """gate * sigmoid(ALPHA * gate) * (up + UP_OFFSET) in fp32; with LIMIT, of gate bounded above
    and up on both sides.
    """
    if LIMIT:
        gate = ct.minimum(gate, LIMIT, propagate_nan=True)
        up = ct.maximum(ct.minimum(up, LIMIT, propagate_nan=True), -LIMIT, propagate_nan=True)
    if UP_OFFSET:
        up = up + UP_OFFSET
    if ALPHA != 1.0:
        gate, up = gate * ALPHA, up * (1.0 / ALPHA)
    return gated(gate, up, False)


@ct.kernel
def moe_count_kernel(ids, counts, ranks, TILE: ct.Constant[int]):
    """Block e: how often expert e is in ids [pairs], into counts [experts], and how often it came
    before each time, into ranks [pairs].
    """
    own = ct.bid(0)
    lanes = ct.arange(TILE, dtype=ct.int32)
    total = ct.zeros((1,), ct.int32)
    for i in range(ct.cdiv(ids.shape[0], TILE)):
        pair = i * TILE + lanes
        # Gathered: as in load_masked.
        mine = ct.gather(ids, pair, mask=pair < ids.shape[0], padding_value=-1, check_bounds=False) == own
        one = mine.astype(ct.int32)
        ct.scatter(ranks, pair, total + ct.cumsum(one) - 1, mask=mine)
        total = total + ct.sum(one)
    ct.scatter(counts, own, total.reshape(()))


@ct.kernel
def moe_permute_kernel(
    ids,
    counts,
    ranks,
    x,
    panels,
    rows,
    sorted_x,
    scale_x,
    TOP_K: ct.Constant[int],
    COLS: ct.Constant[int],
    QUANTIZED: ct.Constant[bool],
    TILE_M: ct.Constant[int],
    TILE_E: ct.Constant[int],
    TILE_K: ct.Constant[int],
    TILE_N: ct.Constant[int],
    WIDTH: ct.Constant[int],
):
    """Block i: the panels of expert i, and the copies of token i to the rows of its experts.

    Grid: the larger of both numbers. Each expert's rows begin at a multiple of TILE_M, so that a
    panel is a whole tile; what lies between is never read.
    ids, ranks: [tokens * TOP_K]. counts: [experts]. x: [tokens, COLS].
    panels: int32 [1 + most panels], their number and of each its expert.
    rows: int32 [tokens * TOP_K], the row of each in sorted_x [most rows, COLS], -1 where there is
        no such expert.
    QUANTIZED: sorted_x holds codes, and scale_x [ceil(COLS / 128), most rows] the scales of groups
        of 128 of them.
    TILE_E, TILE_K: powers of two, at least experts and TOP_K. TILE_N, WIDTH: columns copied and
        panels written at once.
    """
    own = ct.bid(0)
    experts = counts.shape[0]
    expert = ct.arange(TILE_E, dtype=ct.int32)
    panel_counts = (ct.load(counts, (0,), (TILE_E,), padding_mode=ZERO, allow_tma=False) + (TILE_M - 1)) // TILE_M
    ends = ct.cumsum(panel_counts)
    starts = ends - panel_counts
    if own < experts:
        first, mine = ct.sum(ct.where(expert == own, starts, 0)), ct.sum(ct.where(expert == own, panel_counts, 0))
        lanes = ct.arange(WIDTH, dtype=ct.int32)
        for i in range(ct.cdiv(mine, WIDTH)):
            panel = i * WIDTH + lanes
            ct.scatter(panels, 1 + first + panel, own, mask=panel < mine)
        if own == 0:
            ct.scatter(panels, 0, ct.sum(panel_counts))
    if own < x.shape[0]:
        slot = ct.arange(TILE_K, dtype=ct.int32)
        pair = own * TOP_K + slot
        chosen = ct.gather(ids, pair, mask=slot < TOP_K, padding_value=-1)
        known = (chosen >= 0) & (chosen < experts)
        rank = ct.gather(ranks, pair, mask=known, padding_value=0)
        match = chosen.reshape((TILE_K, 1)) == expert.reshape((1, TILE_E))
        first_row = ct.sum(ct.where(match, starts.reshape((1, TILE_E)), 0), axis=1) * TILE_M
        row = ct.where(known, first_row + rank, -1)
        ct.scatter(rows, pair, row, mask=slot < TOP_K)
        x, sorted_x = x.slice(1, 0, COLS), sorted_x.slice(1, 0, COLS)
        for j in ct.static_iter(range(ct.cdiv(COLS, TILE_N))):
            piece = ct.load(x, (own, j), (1, TILE_N), padding_mode=ZERO, allow_tma=False)
            if QUANTIZED:
                piece, scale = group_codes(piece, sorted_x.dtype, 1, GROUP, LARGEST, False)
            for k in ct.static_iter(range(TOP_K)):
                to = ct.extract(row, (k,), (1,)).reshape(())
                if to >= 0:
                    ct.store(sorted_x, (to, j), piece, allow_tma=False)
                    if QUANTIZED:
                        ct.store(scale_x, (j, to), scale, allow_tma=False)


@ct.kernel
def moe_quantize_kernel(
    panels,
    h,
    codes,
    scale,
    COLS: ct.Constant[int],
    PANEL: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
):
    """Codes of h [most rows, COLS] and scales [ceil(COLS / 128), most rows] of groups of 128, for
    the panels of PANEL rows that there are.
    """
    i, j = ct.bid(0), ct.bid(1)
    if i < ct.gather(panels, 0) * (PANEL // TILE_M):
        x = load_masked(h.slice(1, 0, COLS), (i, j), (TILE_M, TILE_N), ZERO, COLS % TILE_N == 0, None, False)
        some, each = group_codes(x, codes.dtype, 1, GROUP, LARGEST, False)
        ct.store(codes.slice(1, 0, COLS), (i, j), some, allow_tma=False)
        ct.store(scale, (j, i), each, allow_tma=False)


@ct.kernel
def moe_sum_kernel(
    y,
    rows,
    weights,
    out,
    TOP_K: ct.Constant[int],
    COLS: ct.Constant[int],
    TILE_N: ct.Constant[int],
    LOADS: ct.Constant[int],
):
    """out[t] = sum over k, in that order, of weights[t, k] * y[rows[t * TOP_K + k]]. Grid (tokens,
    column tiles).

    y: [most rows, COLS]; weights: [tokens, TOP_K]; a negative row adds nothing. LOADS: rows loaded
        before the first is added.
    """
    pdl_overlap()
    token, j = ct.bid(0), ct.bid(1)
    y, out = y.slice(1, 0, COLS), out.slice(1, 0, COLS)
    acc = ct.zeros((1, TILE_N), ct.float32)
    for first in ct.static_iter(range(0, TOP_K, LOADS)):
        parts: tuple = ()
        for k in ct.static_iter(range(first, min(first + LOADS, TOP_K))):
            row, weight = ct.gather(rows, token * TOP_K + k), ct.gather(weights, (token, k))
            # Without an expert some row is read but not used, so that no branch separates the
            # loads.
            parts = (*parts, (row, weight, load_masked(y, (max(row, 0), j), (1, TILE_N), ZERO, COLS % TILE_N == 0, None, False)))
        for row, weight, part in ct.static_iter(parts):
            acc = ct.where(row >= 0, acc + weight * part.astype(ct.float32), acc)
    ct.store(out, (token, j), acc.astype(out.dtype), allow_tma=False)


def list_launches(p: Any, tile_m: int, device: Device, codes: Mapping[str, Any] = MappingProxyType({})) -> tuple[Launch, Launch]:
    """Those of moe_count_kernel and moe_permute_kernel for a Problem of experts, with panels of
    tile_m rows. Their scratch arrays are `panels`, `rows`, and `y`, which takes the sorted rows.

    codes: scratch arrays x_codes and x_scales, where sorted rows go as codes; empty for none.
    """
    # Longer steps than 1024 ids are no faster, as a block has one row of threads for them.
    tile = min(next_pow2(p.pairs), 1 << 16 if device.is_cpu else 4096)
    counts = {"counts": ((p.experts,), torch.int32), "ranks": ((p.pairs,), torch.int32)}
    # A width that divides the rows of common models: the parts of a padded tile would be moved like
    # data.
    copied = next_pow2(p.hidden) if device.is_cpu else max(GROUP, min(p.hidden & -p.hidden, 4096))
    tiles = {"tile_m": tile_m, "tile_e": next_pow2(p.experts), "tile_k": next_pow2(p.top_k), "tile_n": max(GROUP, copied)}
    panels = p.most_panels(tile_m)
    lists = {"panels": ((1 + panels,), torch.int32), "rows": ((p.pairs,), torch.int32), "y": ((panels * tile_m, p.hidden), p.dtype)}
    permute = Launch.of(
        moe_permute_kernel,
        (max(p.tokens, p.experts),),
        p,
        None,
        {**tiles, "cols": p.hidden, "quantized": bool(codes), "width": MAP_WIDTH},
        optional={"scale_x": bool(codes)},
        num_worker_warps=4,
        scratch={**lists, **codes},
        renames={"sorted_x": "x_codes", "scale_x": "x_scales"} if codes else {"sorted_x": "y"},
    )
    return Launch(moe_count_kernel, (p.experts,), {"tile": tile}, num_worker_warps=8 if tile > 1024 else 4, scratch=counts), permute


def sum_launch(p: Any, device: Device, shares: int = 1, **more: Any) -> Launch:
    """That of moe_sum_kernel.

    shares: rows of y that each expert of a token has. more: fields of Launch.
    """
    tile_n = next_pow2(p.hidden) if device.is_cpu or p.hidden <= 512 else 512 if p.tokens < 2 * device.sms else 1024
    constants = {"top_k": p.top_k * shares, "cols": p.hidden, "tile_n": tile_n, "loads": 8}
    return Launch(moe_sum_kernel, (p.tokens, -(-p.hidden // tile_n)), constants, num_worker_warps=4, pdl=True, **more)
