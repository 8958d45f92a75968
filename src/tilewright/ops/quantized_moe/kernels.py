"""Tile code of `quantized_moe`: rows of an expert times its words, which become bf16 in registers
(ops/common/weight_tiles.py).
"""

import cuda.tile as ct

from ..common.expert_lists import activated
from ..common.pdl import pdl_overlap
from ..common.weight_formats import E2M1, INT4, ROWS, WORDS
from ..common.weight_tiles import SMALL, joined, planes, scaled, unit, zero_point

ZERO = ct.PaddingMode.ZERO


def _columns(array, matrix, step, tile_n, GROUPS, GROUP, DEEP, EVEN, LATENCY):
    """Of each group of a step [ROWS, 1]: a number for each row of the tile. A load that checks
    bounds is waited for before the next one.
    """
    found: tuple = ()
    for i in ct.static_iter(range(GROUPS)):
        group = min(step * GROUPS + i, array.shape[1] - 1) if GROUPS > 1 else step * DEEP // GROUP  # behind the end x is zeros
        where, shape = (matrix, group, tile_n), (1, 1, ROWS)
        if EVEN:
            column = ct.load(array, where, shape, check_bounds=False, latency=LATENCY, allow_tma=False)
        else:
            column = ct.load(array, where, shape, padding_mode=ZERO, latency=LATENCY, allow_tma=False)
        found = (*found, column.reshape((ROWS, 1)))
    return found


def _add_products(acc, x, loaded, PART, scales, zeros, matrix, step, tile_n, HOW):
    """acc [ROWS, TILE_M] + a part of a step's words times x [TILE_M, k of the step]."""
    CODE, GROUP, ZEROS, RUNS, SCALE_SUMS, EVEN, LATENCY = HOW
    RUN = WORDS * (8 if CODE == INT4 or CODE == E2M1 else 4)
    DEEP = RUN * RUNS
    GROUPS = max(1, DEEP // GROUP) if GROUP > 0 else 0  # of a step
    TILE_M = x.shape[0]
    scale = _columns(scales, matrix, step, tile_n, GROUPS, GROUP, DEEP, EVEN, LATENCY)
    zero = _columns(zeros, matrix, step, tile_n, GROUPS, GROUP, DEEP, EVEN, LATENCY) if ZEROS else ()
    for i in ct.static_iter(range(RUNS)):
        q = ct.extract(loaded, (PART, 0, i, 0, 0), (1, 1, 1, ROWS, WORDS)).reshape((ROWS, WORDS))
        y = ct.extract(x, (0, i), (TILE_M, RUN)).transpose()
        if SCALE_SUMS:
            codes = joined(planes(q, zero_point(zero, i * GROUPS // RUNS, CODE), CODE))
            part = ct.mma(codes, y, ct.zeros((ROWS, TILE_M), ct.float32))
            acc = acc + part * (scale[i * GROUPS // RUNS].astype(ct.float32) * unit(CODE))
        elif GROUPS == 0:
            acc = ct.mma(joined(planes(q, zero_point((), 0, CODE), CODE)), y, acc)
        else:
            acc = ct.mma(scaled(q, scale, zero, i, RUN, CODE, GROUP), y, acc)
    return acc


def _finished(acc, scales, bias, matrix, expert, part, tile_n, CODE, GROUP, ADD_BIAS):
    """The sums of a part over all of k, with its row scales and bias."""
    if GROUP == 0:
        scale = ct.load(scales, (matrix, 0, tile_n), (1, 1, ROWS), padding_mode=ZERO, allow_tma=False)
        acc = acc * (scale.reshape((ROWS, 1)) * unit(CODE))
    elif CODE == E2M1:
        acc = acc * SMALL
    if ADD_BIAS:
        row = tile_n * ROWS + ct.arange(ROWS, dtype=ct.int32)
        acc = acc + ct.gather(bias, (expert, part, row), padding_value=0).astype(ct.float32).reshape((ROWS, 1))
    return acc


@ct.kernel
def quantized_moe_kernel(
    ids,
    panels,
    rows,
    x,
    words,
    scales,
    zeros,
    bias,
    out,
    FEW: ct.Constant[bool],
    TOP_K: ct.Constant[int],
    TILE_P: ct.Constant[int],
    FIRST: ct.Constant[bool],
    MATRICES: ct.Constant[int],
    PARTS: ct.Constant[int],
    TILE_M: ct.Constant[int],
    CODE: ct.Constant[int],
    GROUP: ct.Constant[int],
    ZEROS: ct.Constant[bool],
    RUNS: ct.Constant[int],
    SCALE_SUMS: ct.Constant[bool],
    EVEN: ct.Constant[bool],
    ACTIVATE: ct.Constant[bool],
    ADD_BIAS: ct.Constant[bool],
    ALPHA: ct.Constant[float],
    LIMIT: ct.Constant[float],
    UP_OFFSET: ct.Constant[float],
    LATENCY: ct.Constant[int],
):
    """TILE_M rows times 64 rows of an expert's weight.

    FIRST: the first product, of gate and up: MATRICES is 2. With PARTS = 2 a block computes both
        and what `activated` makes of them; else one, and the second product activates what it
        reads.

    FEW: all tokens, at most TILE_M of them, with each expert that one of them chose, as
    moe_few_kernel: grid (column tiles, pairs of token and choice), and the first pair that names an
    expert does its work. Else the panels of moe_permute_kernel: grid (column tiles, panels).
    ids, rows: [pairs], only with FEW; rows as moe_few_kernel has them. panels: only without.
    x: [1, tokens, k] or [pairs or panels, TILE_M, k], twice as many of gate and up in turn. out:
        likewise, [..., TILE_M, n].
    words: [experts * MATRICES, panels of rows, runs, 64, 16]. scales, zeros: [experts * MATRICES,
        groups, n]. bias: [experts, MATRICES, n], read only with ADD_BIAS.
    TILE_P: a power of two, at least pairs. RUNS: of a step. ACTIVATE: x is gate and up.
    EVEN: the tiles end with the rows of a weight.
    SCALE_SUMS: a group's scale multiplies its sum in fp32; else the weights, rounded to bf16.
    """
    pdl_overlap()
    tiles, place = ct.cdiv(out.shape[2], ROWS), ct.bid(1)
    part = ct.bid(0) // tiles if MATRICES > PARTS else 0
    tile_n = ct.bid(0) - part * tiles
    experts = words.shape[0] // MATRICES
    if FEW:
        own = ct.gather(ids, place)
        mine = (own >= 0) & (own < experts)
        if FIRST:
            index = ct.arange(TILE_P, dtype=ct.int32)
            leader = ct.min(ct.where((ct.gather(ids, index, padding_value=-1) == own) & (index < ids.shape[0]), index, place))
            if ct.bid(0) == 0:
                ct.scatter(rows, place, ct.where(mine, leader * TILE_M + place // TOP_K, -1))
            mine = mine & (leader == place)
        else:
            mine = ct.gather(rows, place) // TILE_M == place
        matrix = 0 if FIRST else place
    else:
        mine = place < ct.gather(panels, 0)
        own = ct.gather(panels, 1 + place)
        matrix = place
    if mine:
        expert = own.astype(ct.int32)
        HOW = (CODE, GROUP, ZEROS, RUNS, SCALE_SUMS, EVEN, LATENCY)
        DEEP = RUNS * WORDS * (8 if CODE == INT4 or CODE == E2M1 else 4)
        first = expert * MATRICES + part
        acc = ct.zeros((ROWS, TILE_M), ct.float32)
        up = ct.zeros((ROWS, TILE_M), ct.float32) if PARTS == 2 else acc
        for step in range(ct.cdiv(words.shape[2], RUNS)):
            if ACTIVATE:
                gate = ct.load(x, (2 * matrix, 0, step), (1, TILE_M, DEEP), padding_mode=ZERO, latency=LATENCY).astype(ct.float32)
                other = ct.load(x, (2 * matrix + 1, 0, step), (1, TILE_M, DEEP), padding_mode=ZERO, latency=LATENCY).astype(ct.float32)
                a = activated(gate, other, ALPHA, LIMIT, UP_OFFSET).astype(x.dtype).reshape((TILE_M, DEEP))
            else:
                a = ct.load(x, (matrix, 0, step), (1, TILE_M, DEEP), padding_mode=ZERO, latency=LATENCY).reshape((TILE_M, DEEP))
            loaded = ct.load(
                words, (expert if PARTS == 2 else first, tile_n, step, 0, 0), (PARTS, 1, RUNS, ROWS, WORDS), padding_mode=ZERO, latency=LATENCY
            )
            acc = _add_products(acc, a, loaded, 0, scales, zeros, first, step, tile_n, HOW)
            if PARTS == 2:
                up = _add_products(up, a, loaded, 1, scales, zeros, first + 1, step, tile_n, HOW)
        y = _finished(acc, scales, bias, first, expert, part, tile_n, CODE, GROUP, ADD_BIAS)
        if PARTS == 2:
            y = activated(y, _finished(up, scales, bias, first + 1, expert, 1, tile_n, CODE, GROUP, ADD_BIAS), ALPHA, LIMIT, UP_OFFSET)
        ct.store(out, (place * (MATRICES // PARTS) + part, 0, tile_n), y.transpose().reshape((1, TILE_M, ROWS)).astype(out.dtype), allow_tma=False)
