"""Tile code of `quantized_moe`: panels of an expert's rows times its words. With many tokens
the words become bf16 in registers (ops/common/weight_tiles.py); with few, x becomes pieces of 8
bits (ops/common/pieces.py).
"""

import cuda.tile as ct

from ..common.expert_lists import activated
from ..common.pdl import pdl_overlap
from ..common.pieces import PIECES, add_products, store_pieces, summed
from ..common.tiles import ZERO
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


def _finished(y, scales, bias, expert, tile_n, share, GROUP, ADD_BIAS):
    """Sums [PARTS, TILE_N, rows of x] with their row scales, and in share 0 of k the bias."""
    PARTS, TILE_N, _ = y.shape
    if GROUP == 0:
        scale = ct.load(scales, (expert, 0, tile_n), (PARTS, 1, TILE_N), padding_mode=ZERO, allow_tma=False)
        y = y * scale.astype(ct.float32).reshape((PARTS, TILE_N, 1))
    if ADD_BIAS:
        row = tile_n * TILE_N + ct.arange(TILE_N, dtype=ct.int32).reshape((1, TILE_N))
        part = ct.arange(PARTS, dtype=ct.int32).reshape((PARTS, 1))
        more = ct.gather(bias, (expert, part, row), padding_value=0).astype(ct.float32)
        y = y + ct.where(share == 0, more, 0.0).reshape((PARTS, TILE_N, 1))
    return y


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
    if place < ct.gather(panels, 0):
        expert = ct.gather(panels, 1 + place)
        RUN = WORDS * (8 if CODE == INT4 or CODE == E2M1 else 4)
        DEEP, HIGH = RUN * RUNS, PARTS * TILE_N
        GROUPS = max(1, DEEP // GROUP) if GROUP > 0 else 0  # of a step
        how = (PARTS, TILE_N, RUNS, LATENCY)
        acc = ct.zeros((HIGH, TILE_M), ct.float32)
        for step in range(ct.cdiv(words.shape[2], RUNS)):
            a = ct.load(x, (place, 0, step), (1, TILE_M, DEEP), padding_mode=ZERO, latency=LATENCY).reshape((TILE_M, DEEP))
            loaded = _expert_words(words, expert, tile_n, step, how)
            scale = _columns(_expert_groups(scales, expert, tile_n, step, how, DEEP, GROUP)) if GROUP > 0 else ()
            zero = _columns(_expert_groups(zeros, expert, tile_n, step, how, DEEP, GROUP)) if ZEROS else ()
            for i in ct.static_iter(range(RUNS)):
                q = ct.extract(loaded, (0, 0, i, 0, 0), (*loaded.shape[:2], 1, *loaded.shape[3:])).reshape((HIGH, WORDS))
                y = ct.extract(a, (0, i), (TILE_M, RUN)).transpose()
                acc = add_product(acc, q, y, scale, zero, i, (GROUP, GROUPS), (RUN, RUNS, CODE), SCALE_SUMS)
        times = unit(CODE) if GROUP == 0 else SMALL if CODE == E2M1 else 1.0
        sums = _finished((acc * times).reshape((PARTS, TILE_N, TILE_M)), scales, bias, expert, tile_n, 0, GROUP, ADD_BIAS)
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
    some = ct.load(x, (pair // TOP_K, part), (1, 64 * BLOCKS), padding_mode=ZERO, allow_tma=False)
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

    codes: e4m3 [most rows * columns of a row, k of whole runs]; factors: fp32 [panels, runs, 1
        or for INT4 2, rows of a panel * columns].
    words: [experts * parts, panels of rows, runs, 64, 16]. scales: [experts * parts, groups, n].
    bias: [experts, parts, n], read only with ADD_BIAS.
    out: FIRST: codes of act(gate, up) as `store_pieces` has them, with next_factors;
        else fp32 [SHARES, most rows, n].
    """
    pdl_overlap()
    tile_n, place, share = ct.bid(0), ct.bid(1), ct.bid(2)
    PARTS = 2 if FIRST else 1
    PLANES = 2 if CODE == E4M3 else 4
    RUN = 32 * PLANES
    COLUMNS = PIECES * PLANES
    WIDE = PANEL * COLUMNS
    KINDS = 2 if CODE == INT4 else 1
    count, expert = ct.gather(panels, 0), ct.gather(panels, 1 + place)  # at once; behind the last any number
    if place < count:
        steps = ct.cdiv(words.shape[2], RUNS)
        each = ct.cdiv(steps, SHARES)
        acc = ct.zeros((PARTS * TILE_N, WIDE), ct.float32)
        how = (PARTS, TILE_N, RUNS, LATENCY)
        found = min(tile_n, ct.cdiv(scales.shape[2], TILE_N) - 1)  # of the tiles that there are
        for step in range(share * each, min(share * each + each, steps)):
            x = ct.load(codes, (place, step), (WIDE, RUN * RUNS), padding_mode=ZERO, latency=LATENCY)
            by = ct.load(factors, (place, step, 0, 0), (1, RUNS, KINDS, WIDE), padding_mode=ZERO, latency=LATENCY)
            loaded = _expert_words(words, expert, found, step, how)
            scale = _expert_groups(scales, expert, found, step, how, RUN * RUNS, GROUP) if GROUP > 0 else None
            zero = _expert_groups(zeros, expert, found, step, how, RUN * RUNS, GROUP) if ZEROS else None
            acc = add_products(acc, loaded, (x,), by, scale, zero, (CODE, GROUP, PLANES))
        y = summed(acc, PANEL, CODE).reshape((PARTS, TILE_N, PANEL))
        y = _finished(y, scales, bias, expert, found, share, GROUP, ADD_BIAS)
        if FIRST:
            gate, up = _halves(y)
            h = activated(gate, up, ALPHA, LIMIT, UP_OFFSET)
            inside = (tile_n * TILE_N + ct.arange(TILE_N, dtype=ct.int32) < scales.shape[2]).reshape((TILE_N, 1))
            h = ct.where(inside, h, 0.0).transpose()
            block, side = (tile_n, 0) if TILE_N == 64 else (tile_n // 2, tile_n % 2)
            store_pieces(out, next_factors, h.reshape((PANEL, 1, TILE_N // 32, 32)), (place, 0), block, side, PLANES, CODE == INT4)
        else:
            ct.store(out, (share, place, tile_n), y.reshape((TILE_N, PANEL)).transpose().reshape((1, PANEL, TILE_N)), allow_tma=False)
