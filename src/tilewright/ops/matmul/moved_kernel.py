"""Tile code of `matmul` for sizes that tiles do not divide: the last ones begin earlier."""

import cuda.tile as ct

from ..common.pdl import pdl_overlap
from ..common.scaling import add_product, scaled
from ..common.tiles import START_UNIT, ZERO, store_own, tile_start, vector_masked, widths_of, zeros_of
from .kernels import of_order, run_scales


@ct.kernel
def matmul_moved_kernel(
    a,
    b,
    scale_a,
    scale_b,
    bias,
    out,
    FIRST: ct.Constant[int],
    SECOND: ct.Constant[int],
    EXTRA: ct.Constant[int],
    TILE_K: ct.Constant[int],
    GROUP: ct.Constant[int],
    SWAP_AB: ct.Constant[bool],
    TRANS_A: ct.Constant[bool],
    TRANS_B: ct.Constant[bool],
    SCALING: ct.Constant[int],
    FAST_ACC: ct.Constant[bool],
    RUN: ct.Constant[int],
    BIAS: ct.Constant[bool],
    LATENCY: ct.Constant[int],
):
    """out [m, n] = scales * (a @ b) + bias, a tile to a block, as in `matmul_uneven_kernel`; EXTRA
    may be 0. RUN: as in `matmul_fused_kernel`; SCALING: not BLOCK.

    Tiles of the last row and column end with `out` (`tile_start`). Of what they share with the ones
    in front of them, they write nothing.
    """
    pdl_overlap()
    STEP = SECOND + EXTRA
    first, second, TRANS_1, TRANS_2 = (b, a, not TRANS_B, not TRANS_A) if SWAP_AB else (a, b, TRANS_A, TRANS_B)
    # `first` is [rows, k] unless TRANS_1, `second` [k, rows] unless TRANS_2.
    AXIS_1, AXIS_2 = 1 if TRANS_1 else 0, 0 if TRANS_2 else 1
    rows_1, rows_2 = first.shape[AXIS_1], second.shape[AXIS_2]
    tile_1, tile_2 = of_order(ct.bid(0), ct.cdiv(rows_1, FIRST), ct.cdiv(rows_2, STEP), GROUP, SWAP_AB)
    start_1, start_2 = tile_start(tile_1, FIRST, rows_1), tile_start(tile_2, STEP, rows_2)

    long = _rows(first, 0, FIRST, TILE_K, TRANS_1)
    sides: tuple = ()
    START = 0
    for ROWS in ct.static_iter(widths_of(SECOND, EXTRA)):
        sides = (*sides, (_rows(second, START, ROWS, TILE_K, not TRANS_2), START))
        START = START + ROWS

    def summed(accs, step, FAST):
        x = _tile(long, start_1, step, TRANS_1, LATENCY)
        found: tuple = ()
        for i in ct.static_iter(range(len(accs))):
            y = _tile(sides[i][0], start_2, step, not TRANS_2, LATENCY)
            found = (*found, add_product(x, y.transpose(), accs[i], FAST))
        return found

    steps = ct.cdiv(first.shape[1 - AXIS_1], TILE_K)
    accs = zeros_of(FIRST, widths_of(SECOND, EXTRA))
    if RUN:
        for begin in range(0, steps, RUN):
            parts = zeros_of(FIRST, widths_of(SECOND, EXTRA))
            for step in range(begin, min(begin + RUN, steps)):
                parts = summed(parts, step, True)
            found: tuple = ()
            for i in ct.static_iter(range(len(accs))):
                found = (*found, accs[i] + parts[i])
            accs = found
    else:
        for step in range(steps):
            accs = summed(accs, step, FAST_ACC)
    scale_1, scale_2 = (scale_b, scale_a) if SWAP_AB else (scale_a, scale_b)
    for i in ct.static_iter(range(len(accs))):
        acc, START = accs[i], sides[i][1]
        if SCALING:
            of_1 = run_scales(scale_1, 0, FIRST, start_1 // START_UNIT, START_UNIT, SCALING)
            acc = scaled(acc, of_1, run_scales(scale_2, START, acc.shape[1], start_2 // START_UNIT, START_UNIT, SCALING))
        if SWAP_AB:
            acc = acc.transpose()
        row, column = (start_2 + START, start_1) if SWAP_AB else (start_1, start_2 + START)
        if BIAS:
            # The tile of a bias begins where `column` says, a multiple of START_UNIT.
            acc = acc + vector_masked(bias, acc.shape[1], column // START_UNIT * START_UNIT).astype(ct.float32)
        own_row, own_column = (tile_2 * STEP, tile_1 * FIRST) if SWAP_AB else (tile_1 * FIRST, tile_2 * STEP)
        store_own(out, acc, row, own_row, column, own_column)


def _rows(matrix, START, ROWS, TILE_K, TRANSPOSED):
    """A view of a matrix [rows, k], or TRANSPOSED, from row START on: tiles of ROWS rows that begin
    at every START_UNIT.
    """
    if TRANSPOSED:
        return matrix.slice(1, START, matrix.shape[1]).tiled_view((TILE_K, ROWS), padding_mode=ZERO, traversal_steps=(TILE_K, START_UNIT))
    return matrix.slice(0, START, matrix.shape[0]).tiled_view((ROWS, TILE_K), padding_mode=ZERO, traversal_steps=(START_UNIT, TILE_K))


def _tile(view, start, step, TRANSPOSED, LATENCY):
    """[rows, TILE_K]: the tile of a view of `_rows` that begins at `start`."""
    if TRANSPOSED:
        return view.load((step, start // START_UNIT), latency=LATENCY).transpose()
    return view.load((start // START_UNIT, step), latency=LATENCY)
