"""Tile code of `quantized_moe`: panels of an expert's rows times its words. With many tokens
the words become bf16 in registers (ops/common/weight_tiles.py); with few, x becomes pieces of 8
bits (ops/common/pieces.py).
"""

import cuda.tile as ct

from ..common.expert_lists import activated
from ..common.pdl import pdl_launch_dependents, pdl_overlap, pdl_wait
from ..common.pieces import PIECES, add_products, piece_unit, store_pieces, summed
from ..common.tiles import ZERO, load_masked, matrix_tile
from ..common.weight_formats import E2M1, E4M3, INT4, ROWS, WORDS
from ..common.weight_tiles import SMALL, add_product, unit


def _expert_words(words, expert, tile_n, step, how):
    """Words of a step [PARTS, panels, RUNS, rows, 16]: TILE_N rows of each part of an expert."""
    PARTS, TILE_N, RUNS, LATENCY = how
    HIGH, LOW = max(1, TILE_N // ROWS), min(ROWS, TILE_N)
    at = (expert, tile_n * TILE_N // ROWS // HIGH, step, tile_n % (ROWS // LOW), 0)
    return ct.load(words, at, (PARTS, HIGH, RUNS, LOW, WORDS), padding_mode=ZERO, latency=LATENCY)


def _expert_groups(array, expert, tile_n, step, how, DEEP, GROUP):
    """Scales or zero points of a step [PARTS, groups, TILE_N]."""
    PARTS, TILE_N, _, LATENCY = how
    shape = (PARTS, max(1, DEEP // GROUP), TILE_N)
    return ct.load(array, (expert, step * DEEP // max(GROUP, DEEP), tile_n), shape, padding_mode=ZERO, latency=LATENCY)


def _bias(bias, expert, tile_n, share, shape):
    """[PARTS * TILE_N, 1], zero but in share 0 of k."""
    PARTS, TILE_N = shape
    row = tile_n * TILE_N + ct.arange(TILE_N, dtype=ct.int32).reshape((1, TILE_N))
    part = ct.arange(PARTS, dtype=ct.int32).reshape((PARTS, 1))
    more = ct.gather(bias, (expert, part, row), padding_value=0).astype(ct.float32)
    return ct.where(share == 0, more, 0.0).reshape((PARTS * TILE_N, 1))


def _begun(bias, expert, tile_n, share, shape, WIDE, EACH, unit):
    """The bias as sums [PARTS * TILE_N, WIDE] in that unit, in the first of each EACH columns: sums
    begin with it, so that it comes from memory while the first weights do.
    """
    column = ct.arange(WIDE, dtype=ct.int32).reshape((1, WIDE))
    return ct.where(column % EACH == 0, _bias(bias, expert, tile_n, share, shape) * (1.0 / unit), 0.0)


def _scaled_rows(y, scales, bias, expert, tile_n, share, ADD_BIAS):
    """Sums [PARTS, TILE_N, rows of x] whose rows have one scale each, and the bias."""
    PARTS, TILE_N, _ = y.shape
    scale = ct.load(scales, (expert, 0, tile_n), (PARTS, 1, TILE_N), padding_mode=ZERO, allow_tma=False)
    y = y * scale.astype(ct.float32).reshape((PARTS, TILE_N, 1))
    return y + _bias(bias, expert, tile_n, share, (PARTS, TILE_N)).reshape((PARTS, TILE_N, 1)) if ADD_BIAS else y


def _halves(y):
    """Gate and up of sums [2, TILE_N, rows of x]."""
    shape = y.shape[1], y.shape[2]
    return ct.extract(y, (0, 0, 0), (1, *shape)).reshape(shape), ct.extract(y, (1, 0, 0), (1, *shape)).reshape(shape)


def _columns(groups):
    """A column for each group of a tile [parts, groups, rows]."""
    PARTS, GROUPS, HIGH = groups.shape
    found: tuple = ()
    for i in ct.static_iter(range(GROUPS)):
        found = (*found, ct.extract(groups, (0, i, 0), (PARTS, 1, HIGH)).reshape((PARTS * HIGH, 1)))
    return found


@ct.kernel
def quantized_moe_kernel(
    panels,
    x,
    words,
    scales,
    zeros,
    bias,
    out,
    PARTS: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    CODE: ct.Constant[int],
    GROUP: ct.Constant[int],
    ZEROS: ct.Constant[bool],
    RUNS: ct.Constant[int],
    SCALE_SUMS: ct.Constant[bool],
    ADD_BIAS: ct.Constant[bool],
    ALPHA: ct.Constant[float],
    LIMIT: ct.Constant[float],
    UP_OFFSET: ct.Constant[float],
    LATENCY: ct.Constant[int],
):
    """A panel of TILE_M rows times TILE_N rows of its expert's weight. Grid (column tiles, panels).

    PARTS: 2 for gate and up, of which a block computes both and what `activated` makes of them.
    panels: of moe_permute_kernel. x: [panels, TILE_M, k]; out: [panels, TILE_M, n].
    words: [experts * PARTS, panels of rows, runs, 64, 16]. scales, zeros: [experts * PARTS,
        groups, n]. bias: [experts, PARTS, n], read only with ADD_BIAS.
    SCALE_SUMS: a group's scale multiplies its sum in fp32; else the weights, rounded to bf16.
    """
    pdl_overlap()
    tile_n, place = ct.bid(0), ct.bid(1)
    count, expert = ct.gather(panels, 0), ct.gather(panels, 1 + place)  # at once; behind the last any number
    if place < count:
        RUN, HIGH = WORDS * (8 if CODE == INT4 or CODE == E2M1 else 4), PARTS * TILE_N
        groups = (GROUP, max(1, RUN // GROUP) if GROUP > 0 else 0)
        how = (PARTS, TILE_N, 1, LATENCY)
        times = unit(CODE) if GROUP == 0 else SMALL if CODE == E2M1 else 1.0
        early = ADD_BIAS and GROUP > 0
        acc = _begun(bias, expert, tile_n, 0, (PARTS, TILE_N), TILE_M, 1, times) if early else ct.zeros((HIGH, TILE_M), ct.float32)
        runs = words.shape[2]
        for step in range(ct.cdiv(runs, RUNS)):
            # Each run has loads of its own, and so buffers. One load for all has a single buffer
            # where registers are few (tileiras 13.4), and each step waits for memory.
            for i in ct.static_iter(range(RUNS)):
                run = step * RUNS + i
                there = run if RUNS == 1 else min(run, runs - 1)
                y = ct.load(x, (place, 0, there), (1, TILE_M, RUN), padding_mode=ZERO, latency=LATENCY).reshape((TILE_M, RUN)).transpose()
                q = _expert_words(words, expert, tile_n, there, how).reshape((HIGH, WORDS))
                scale = _columns(_expert_groups(scales, expert, tile_n, there, how, RUN, GROUP)) if GROUP > 0 else ()
                zero = _columns(_expert_groups(zeros, expert, tile_n, there, how, RUN, GROUP)) if ZEROS else ()
                found = add_product(acc, q, y, scale, zero, 0, groups, (RUN, 1, CODE), SCALE_SUMS)
                acc = found if i == 0 else ct.where(run < runs, found, acc)
        sums = (acc * times).reshape((PARTS, TILE_N, TILE_M))
        if GROUP == 0:
            sums = _scaled_rows(sums, scales, bias, expert, tile_n, 0, ADD_BIAS)
        if PARTS == 2:
            gate, up = _halves(sums)
            y = activated(gate, up, ALPHA, LIMIT, UP_OFFSET)
        else:
            y = sums.reshape((TILE_N, TILE_M))
        ct.store(out, (place, 0, tile_n), y.transpose().reshape((1, TILE_M, TILE_N)).astype(out.dtype), allow_tma=False)


@ct.kernel
def quantized_moe_pieces_kernel(
    ids,
    weights,
    x,
    panels,
    rows,
    shared_weights,
    codes,
    factors,
    EXPERTS: ct.Constant[int],
    TOP_K: ct.Constant[int],
    TILE_P: ct.Constant[int],
    PANEL: ct.Constant[int],
    SHARES: ct.Constant[int],
    PLANES: ct.Constant[int],
    SUMS: ct.Constant[bool],
    BLOCKS: ct.Constant[int],
):
    """Grid (pairs of token and choice, parts of k): the pair's row of a panel, and pieces of x
    there. A panel is up to PANEL rows of one expert.

    ids: [pairs]. x: [tokens, k]. panels: int32 [1 + most panels], their number and of each its
    expert. codes, factors: as `store_pieces` has them.
    rows: int32 [pairs, SHARES], the row of each share of the result, -1 without an expert;
    shared_weights: the pair's weight, likewise.
    TILE_P: a power of two, at least pairs. PLANES: of a run. BLOCKS: of 64 k of a part.
    """
    pdl_overlap()
    pair, part = ct.bid(0), ct.bid(1)
    # In flight while ranks are counted.
    some = load_masked(x, (pair // TOP_K, part), (1, 64 * BLOCKS), ZERO, False, None, False)
    index = ct.arange(TILE_P, dtype=ct.int32)
    ids_all = ct.gather(ids, index, padding_value=-1).astype(ct.int32)
    known = (ids_all >= 0) & (ids_all < EXPERTS)
    before = index.reshape((1, TILE_P)) < index.reshape((TILE_P, 1))
    same = (ids_all.reshape((TILE_P, 1)) == ids_all.reshape((1, TILE_P))) & before
    rank = ct.sum(same.astype(ct.int32), axis=1)  # among the pairs of its expert
    leads = known & (rank % PANEL == 0)
    mine = index == pair
    own = ct.sum(ct.where(mine, ids_all, 0))
    ranked = ct.sum(ct.where(mine, rank, 0))
    first = ranked - ranked % PANEL
    leader = ct.sum(ct.where((ids_all == own) & (rank == first), index, 0))
    # Panels of an expert stand side by side: its weights come from memory once.
    panel = ct.sum((leads & ((ids_all < own) | (ids_all == own) & (index < leader))).astype(ct.int32))
    row = panel * PANEL + ranked - first
    here = (own >= 0) & (own < EXPERTS)
    if part == 0:
        apart = PANEL * (panels.shape[0] - 1)
        for share in ct.static_iter(range(SHARES)):
            ct.scatter(rows, pair * SHARES + share, ct.where(here, (row + share * apart).astype(ct.int32), -1))
            ct.scatter(shared_weights, (pair // TOP_K, pair % TOP_K * SHARES + share), ct.gather(weights, (pair // TOP_K, pair % TOP_K)))
        if pair == 0:
            ct.scatter(panels, 0, ct.sum(leads.astype(ct.int32)))
        if here & (leader == pair):
            ct.scatter(panels, 1 + panel, own)
    if here:
        store_pieces(codes, factors, some.astype(ct.float32).reshape((1, BLOCKS, 2, 32)), (panel, ranked - first), part, 0, PLANES, SUMS)


@ct.kernel
def quantized_moe_row_kernel(
    x,
    codes,
    factors,
    PLANES: ct.Constant[int],
    SUMS: ct.Constant[bool],
    BLOCKS: ct.Constant[int],
):
    """Pieces of the only row of x [1, k], for all experts of the token. Grid (parts of k).

    The next launches begin behind this wait, so they may read ids and weights before their own.
    """
    pdl_wait()
    pdl_launch_dependents()
    part = ct.bid(0)
    some = load_masked(x, (0, part), (1, 64 * BLOCKS), ZERO, False, None, False)
    store_pieces(codes, factors, some.astype(ct.float32).reshape((1, BLOCKS, 2, 32)), (0, 0), part, 0, PLANES, SUMS)


@ct.kernel
def quantized_moe_row_sum_kernel(
    ids,
    weights,
    y,
    out,
    TOP_K: ct.Constant[int],
    EXPERTS: ct.Constant[int],
    PANEL: ct.Constant[int],
    SHARES: ct.Constant[int],
    COLS: ct.Constant[int],
    TILE_N: ct.Constant[int],
    LOADS: ct.Constant[int],
):
    """out [1, COLS] = sum over k, in that order, of weights[0, k] times the shares of row PANEL * k
    of y [SHARES, rows, COLS]. Grid (column tiles).

    LOADS: rows loaded before the first is added.
    """
    pdl_launch_dependents()
    j = ct.bid(0)
    chosen: tuple = ()
    for k in ct.static_iter(range(TOP_K)):
        expert = ct.gather(ids, k).astype(ct.int32)
        chosen = (*chosen, ((expert >= 0) & (expert < EXPERTS), ct.gather(weights, (0, k))))
    pdl_wait()
    acc = ct.zeros((1, TILE_N), ct.float32)
    for first in ct.static_iter(range(0, TOP_K * SHARES, LOADS)):
        parts: tuple = ()
        for i in ct.static_iter(range(first, min(first + LOADS, TOP_K * SHARES))):
            part = matrix_tile(y, (i % SHARES,), (i // SHARES * PANEL, j), (1, TILE_N), ZERO, COLS % TILE_N == 0)
            parts = (*parts, (*chosen[i // SHARES], part))
        for there, weight, part in ct.static_iter(parts):
            acc = ct.where(there, acc + weight * part, acc)
    ct.store(out.slice(1, 0, COLS), (0, j), acc.astype(out.dtype), allow_tma=False)


@ct.kernel
def quantized_moe_few_kernel(
    panels,
    codes,
    factors,
    words,
    scales,
    zeros,
    bias,
    out,
    next_factors,
    FIRST: ct.Constant[bool],
    ONE: ct.Constant[bool],
    PANEL: ct.Constant[int],
    TILE_N: ct.Constant[int],
    CODE: ct.Constant[int],
    GROUP: ct.Constant[int],
    ZEROS: ct.Constant[bool],
    RUNS: ct.Constant[int],
    SHARES: ct.Constant[int],
    ADD_BIAS: ct.Constant[bool],
    ALPHA: ct.Constant[float],
    LIMIT: ct.Constant[float],
    UP_OFFSET: ct.Constant[float],
    LATENCY: ct.Constant[int],
):
    """A panel of rows times TILE_N rows of an expert's weight, of gate and up if FIRST. Grid
    (column tiles, panels, SHARES of k).

    ONE: of one token, whose ids stand in place of panels. It has a panel for each of them, but one
        row of x; see `quantized_moe_row_kernel`.
    codes: e4m3 [most rows * columns of a row, k of whole runs]; factors: fp32 [panels, runs, 1
        or for INT4 2, rows of a panel * columns].
    words: [experts * parts, panels of rows, runs, 64, 16]. scales: [experts * parts, groups, n].
    bias: [experts, parts, n], read only with ADD_BIAS.
    out: FIRST: codes of act(gate, up) as `store_pieces` has them, with next_factors;
        else fp32 [SHARES, most rows, n].
    """
    if ONE:
        pdl_launch_dependents()
    else:
        pdl_overlap()
    tile_n, place, share = ct.bid(0), ct.bid(1), ct.bid(2)
    PARTS = 2 if FIRST else 1
    PLANES = 2 if CODE == E4M3 else 4
    RUN = 32 * PLANES
    COLUMNS = PIECES * PLANES
    WIDE = PANEL * COLUMNS
    KINDS = 2 if CODE == INT4 else 1
    if ONE:
        chosen, experts = ct.gather(panels, place).astype(ct.int32), words.shape[0] // PARTS
        there, expert, row = (chosen >= 0) & (chosen < experts), max(0, min(chosen, experts - 1)), 0 if FIRST else place
    else:
        count, expert = ct.gather(panels, 0), ct.gather(panels, 1 + place)  # at once; behind the last any number
        there, row = place < count, place
    found = min(tile_n, ct.cdiv(scales.shape[2], TILE_N) - 1)  # of the tiles that there are
    if ADD_BIAS and GROUP > 0:
        begun = _begun(bias, expert, found, share, (PARTS, TILE_N), WIDE, COLUMNS, piece_unit(CODE))
    else:
        begun = ct.zeros((PARTS * TILE_N, WIDE), ct.float32)
    if ONE:
        pdl_wait()
    if there:
        acc = begun
        steps = ct.cdiv(words.shape[2], RUNS)
        each = ct.cdiv(steps, SHARES)
        how = (PARTS, TILE_N, RUNS, LATENCY)
        for step in range(share * each, min(share * each + each, steps)):
            x = ct.load(codes, (row, step), (WIDE, RUN * RUNS), padding_mode=ZERO, latency=LATENCY)
            by = ct.load(factors, (row, step, 0, 0), (1, RUNS, KINDS, WIDE), padding_mode=ZERO, latency=LATENCY)
            loaded = _expert_words(words, expert, found, step, how)
            scale = _expert_groups(scales, expert, found, step, how, RUN * RUNS, GROUP) if GROUP > 0 else None
            zero = _expert_groups(zeros, expert, found, step, how, RUN * RUNS, GROUP) if ZEROS else None
            acc = add_products(acc, loaded, (x,), by, scale, zero, (CODE, GROUP, PLANES))
        y = summed(acc, PANEL, CODE).reshape((PARTS, TILE_N, PANEL))
        if GROUP == 0:
            y = _scaled_rows(y, scales, bias, expert, found, share, ADD_BIAS)
        if FIRST:
            gate, up = _halves(y)
            h = activated(gate, up, ALPHA, LIMIT, UP_OFFSET)
            inside = (tile_n * TILE_N + ct.arange(TILE_N, dtype=ct.int32) < scales.shape[2]).reshape((TILE_N, 1))
            h = ct.where(inside, h, 0.0).transpose()
            block, side = (tile_n, 0) if TILE_N == 64 else (tile_n // 2, tile_n % 2)
            HIGH = 1 if PANEL == 2 else PANEL  # two rows at once become 4000 instructions (tileiras 13.4)
            for i in ct.static_iter(range(PANEL // HIGH)):
                some = ct.extract(h, (i, 0), (HIGH, TILE_N)).reshape((HIGH, 1, TILE_N // 32, 32))
                store_pieces(out, next_factors, some, (place, i), block, side, PLANES, CODE == INT4)
        else:
            ct.store(out, (share, place, tile_n), y.reshape((TILE_N, PANEL)).transpose().reshape((1, PANEL, TILE_N)), allow_tma=False)
