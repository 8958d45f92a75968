"""Tile code of `matmul`: the product, and the sum of its partial tiles."""

import cuda.tile as ct

from ..common.pdl import pdl_launch_dependents, pdl_overlap, pdl_wait
from ..common.scaling import BLOCK, ROW, add_product, block_scales, fresh_product, group_scales, row_scales, scaled, scales_from
from ..common.tiles import grouped_tile, load_masked, vector_masked, widths_of, zeros_of

ZERO = ct.PaddingMode.ZERO  # rows, columns and k beyond the edge add nothing


@ct.kernel
def matmul_kernel(
    a,
    b,
    bias,
    partial,
    out,
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    TILE_K: ct.Constant[int],
    GROUP: ct.Constant[int],
    TRANS_A: ct.Constant[bool],
    TRANS_B: ct.Constant[bool],
    SWAP_AB: ct.Constant[bool],
    DOT: ct.Constant[bool],
    PERSISTENT: ct.Constant[bool],
    SPLIT_K: ct.Constant[bool],
    WHOLE: ct.Constant[bool],
    BIAS: ct.Constant[bool],
    TF32: ct.Constant[bool],
    LATENCY: ct.Constant[int],
):
    """out [m, n] = a @ b + bias, a tile of `out` at a time.

    a: [m, k], or [k, m] with TRANS_A. b: [k, n], or [n, k] with TRANS_B. bias: [n], read only with
        BIAS.
    partial: fp32 [parts, tiles, rows, columns of an accumulator], read and written only with
    SPLIT_K: the last `tiles` tiles of `out` are each computed by `parts` blocks, a run of k each,
    and summed by `matmul_reduce_kernel`. SWAP_AB: accumulate the transpose, with b's rows on the
    long side of the MMA: for few rows of a. DOT: multiply and sum on the CUDA cores: for very few
    rows of a. PERSISTENT: one wave of blocks, each of which computes several tiles. Else a block
    has one tile: at some tile sizes the outer loop makes the compiler wait for each MMA in turn.
    WHOLE: DOT of one row, all of k in one step, one tile per block: its rows of b load while the
    previous launch ends.
    """
    if WHOLE:
        pdl_launch_dependents()
        w = operand(b, ct.bid(0), 0, TILE_N, TILE_K, False, LATENCY, False)
        pdl_wait()
        x = load_masked(a, (0, 0), (1, TILE_K), ZERO, False, LATENCY, False)
        acc = ct.sum(x.astype(ct.float32) * w.astype(ct.float32), axis=1).reshape((1, TILE_N))
        if BIAS:
            acc = acc + vector_masked(bias, TILE_N, ct.bid(0) * TILE_N).astype(ct.float32)
        ct.store(out, index=(0, ct.bid(0)), tile=acc.astype(out.dtype), allow_tma=False)
    else:
        pdl_overlap(PERSISTENT)
        _by_steps(a, b, bias, partial, out, TILE_M, TILE_N, TILE_K, GROUP, TRANS_A, TRANS_B, SWAP_AB, DOT, PERSISTENT, SPLIT_K, BIAS, TF32, LATENCY)


def _by_steps(a, b, bias, partial, out, TILE_M, TILE_N, TILE_K, GROUP, TRANS_A, TRANS_B, SWAP_AB, DOT, PERSISTENT, SPLIT_K, BIAS, TF32, LATENCY):
    tiles_m, tiles_n = ct.cdiv(out.shape[0], TILE_M), ct.cdiv(out.shape[1], TILE_N)
    steps = ct.cdiv(a.shape[0 if TRANS_A else 1], TILE_K)
    block = ct.bid(0)
    how = (TILE_M, TILE_N, TILE_K, TRANS_A, TRANS_B, SWAP_AB, DOT, BIAS, TF32, LATENCY)
    if PERSISTENT:
        for tile in range(block, tiles_m * tiles_n, ct.num_blocks(0)):
            tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP)
            acc = _accumulated(a, b, bias, tile_m, tile_n, 0, steps, how)
            _store(out, tile_m, tile_n, acc, SWAP_AB)
    elif SPLIT_K:
        tile, first, last, is_part, part, shared = split_work(block, tiles_m * tiles_n, steps, partial)
        tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP)
        acc = _accumulated(a, b, bias, tile_m, tile_n, first, last, how)
        if is_part:
            ct.store(partial, index=(part, shared, 0, 0), tile=acc.reshape((1, 1, *acc.shape)))
        else:
            _store(out, tile_m, tile_n, acc, SWAP_AB)
    else:
        tile_m, tile_n = grouped_tile(block, tiles_m, tiles_n, GROUP)
        acc = _accumulated(a, b, bias, tile_m, tile_n, 0, steps, how)
        _store(out, tile_m, tile_n, acc, SWAP_AB)


def operand(matrix, rows, step, ROWS, TILE_K, TRANSPOSED, LATENCY, TMA):
    """[ROWS, TILE_K]: a tile of an operand stored [rows, k], or TRANSPOSED."""
    if TRANSPOSED:
        return ct.load(matrix, index=(step, rows), shape=(TILE_K, ROWS), padding_mode=ZERO, latency=LATENCY, allow_tma=TMA).transpose()
    return ct.load(matrix, index=(rows, step), shape=(ROWS, TILE_K), padding_mode=ZERO, latency=LATENCY, allow_tma=TMA)


def split_work(block, tiles, steps, partial):
    """What a block does if each of the last partial.shape[1] tiles is computed by partial.shape[0]
    blocks.

    Returns its tile, its k steps first..last, whether they are only a part, which part, and of
    which shared tile. Selects values rather than branch, because the main loop must be there once.
    """
    parts, shared_tiles = partial.shape[0], partial.shape[1]
    whole = tiles - shared_tiles
    part = max(block - whole, 0) // shared_tiles
    shared = max(block - whole, 0) - part * shared_tiles
    run = ct.cdiv(steps, parts)
    is_part = block >= whole
    tile = ct.where(is_part, whole + shared, block)
    first = ct.where(is_part, part * run, 0)
    last = ct.where(is_part, min(part * run + run, steps), steps)
    return tile, first, last, is_part, part, shared


def _accumulated(a, b, bias, tile_m, tile_n, first, last, how):
    """fp32 tile of a @ b over the k steps first..last, and of the bias if the first step is among
    them.
    """
    TILE_M, TILE_N, TILE_K, TRANS_A, TRANS_B, SWAP_AB, DOT, BIAS, TF32, LATENCY = how
    if DOT:
        acc = ct.zeros((TILE_M, TILE_N, TILE_K), dtype=ct.float32)
    elif SWAP_AB:
        acc = ct.zeros((TILE_N, TILE_M), dtype=ct.float32)
    else:
        acc = ct.zeros((TILE_M, TILE_N), dtype=ct.float32)
    for step in range(first, last):
        x = operand(a, tile_m, step, TILE_M, TILE_K, TRANS_A, LATENCY, not DOT or TRANS_A)
        w = operand(b, tile_n, step, TILE_N, TILE_K, not TRANS_B, LATENCY, True)
        if TF32:
            x, w = x.astype(ct.tfloat32), w.astype(ct.tfloat32)
        if DOT:
            acc += x.astype(ct.float32).reshape((TILE_M, 1, TILE_K)) * w.astype(ct.float32).reshape((1, TILE_N, TILE_K))
        elif SWAP_AB:
            acc = ct.mma(w, x.transpose(), acc)
        else:
            acc = ct.mma(x, w.transpose(), acc)
    if DOT:
        acc = ct.sum(acc, axis=2)
    if BIAS and first == 0:
        row = vector_masked(bias, TILE_N, tile_n * TILE_N).astype(ct.float32)
        acc += row.reshape((TILE_N, 1)) if SWAP_AB else row
    return acc


def _store(out, tile_m, tile_n, acc, SWAP_AB):
    if SWAP_AB:
        acc = acc.transpose()
    ct.store(out, index=(tile_m, tile_n), tile=acc.astype(out.dtype))


@ct.kernel
def matmul_uneven_kernel(
    a,
    b,
    scale_a,
    scale_b,
    bias,
    partial,
    out,
    FIRST: ct.Constant[int],
    SECOND: ct.Constant[int],
    EXTRA: ct.Constant[int],
    TILE_K: ct.Constant[int],
    GROUP: ct.Constant[int],
    SWAP_AB: ct.Constant[bool],
    TRANS_A: ct.Constant[bool],
    TRANS_B: ct.Constant[bool],
    SPLIT_K: ct.Constant[bool],
    BIAS: ct.Constant[bool],
    SCALING: ct.Constant[int],
    FAST_ACC: ct.Constant[bool],
    EVEN: ct.Constant[bool],
    LATENCY: ct.Constant[int],
):
    """`matmul_kernel`, one tile (or part of one) to a block, for tiles SECOND + EXTRA long on one
    side.

    That is no power of two, so that the last wave is fuller, or two halves whose MMAs take turns.
    The first operand of the MMA, of which a tile has FIRST rows, is a, or with SWAP_AB b; the other
    fills accumulators side by side, one for each power of two of its length, that share each tile
    of the first. scale_a, scale_b: as ops/common/scaling.py makes them. BLOCK: not SWAP_AB; SECOND
    and EXTRA are halves of one block of b, TILE_K one group; EVEN: the tiles end with the rows of
    a. SPLIT_K: as in `matmul_kernel`, partial transposed.
    """
    pdl_overlap()
    length = SECOND + EXTRA
    first, second, TRANS_FIRST, TRANS_SECOND = (b, a, not TRANS_B, not TRANS_A) if SWAP_AB else (a, b, TRANS_A, TRANS_B)
    scale_1, scale_2 = (scale_b, scale_a) if SWAP_AB else (scale_a, scale_b)
    # `first` is [rows, k] unless TRANS_FIRST, `second` [k, rows] unless TRANS_SECOND.
    tiles_1, tiles_2 = ct.cdiv(first.shape[1 if TRANS_FIRST else 0], FIRST), ct.cdiv(second.shape[0 if TRANS_SECOND else 1], length)
    steps = ct.cdiv(first.shape[0 if TRANS_FIRST else 1], TILE_K)
    if SPLIT_K:
        tile, begin, end, is_part, part, shared = split_work(ct.bid(0), tiles_1 * tiles_2, steps, partial)
    else:
        tile, begin, end = ct.bid(0), 0, steps
    tile_1, tile_2 = of_order(tile, tiles_1, tiles_2, GROUP, SWAP_AB)
    runs = _runs(second, out, tile_2, SECOND, EXTRA, FIRST, TILE_K, TRANS_SECOND, SWAP_AB)
    accs = zeros_of(FIRST, widths_of(SECOND, EXTRA))
    if SCALING == BLOCK:
        acc_left, acc_right = accs
        product, factor = ct.zeros((FIRST, EXTRA), dtype=ct.float32), ct.zeros((FIRST, 1), dtype=ct.float32)
        for step in range(begin, end):
            x = operand(first, tile_1, step, FIRST, TILE_K, TRANS_FIRST, LATENCY, True)
            y_left, y_right = _part(runs[0], step, TRANS_SECOND, LATENCY), _part(runs[1], step, TRANS_SECOND, LATENCY)
            # In this order the compiler starts each MMA ahead of the sum written before it.
            acc_right = acc_right + product * factor
            product = fresh_product(x, y_left)
            rows = group_scales(scale_1, 0, step, tile_1, FIRST, LATENCY, EVEN)
            factor = (rows * block_scales(scale_2, 0, step, tile_2, length, LATENCY, True)).reshape((FIRST, 1))
            acc_left = acc_left + product * factor
            product = fresh_product(x, y_right)
        accs = (acc_left, acc_right + product * factor)
    else:
        for step in range(begin, end):
            x = operand(first, tile_1, step, FIRST, TILE_K, TRANS_FIRST, LATENCY, True)
            accs = _summed(x, runs, accs, step, TRANS_SECOND, FAST_ACC, LATENCY)
    if SCALING and SCALING != BLOCK:
        rows = row_scales(scale_1, 0, tile_1, FIRST, SCALING)
    for i in ct.static_iter(range(len(accs))):
        acc, (_, to, tile_of, is_there, START) = accs[i], runs[i]
        if SCALING and SCALING != BLOCK:
            acc = scaled(acc, rows, run_scales(scale_2, START, acc.shape[1], tile_of, length, SCALING))
        if BIAS and begin == 0:
            acc = acc + _bias(bias, START, acc.shape, length, tile_1, tile_of, SWAP_AB)
        if SPLIT_K and is_part:
            rows_of = partial.slice(2, START, length) if START else partial
            ct.store(rows_of, index=(part, shared, 0, 0), tile=acc.transpose().reshape((1, 1, acc.shape[1], FIRST)))
        else:
            _store_run(to, tile_1, tile_2, is_there, START, acc, out, SWAP_AB)


@ct.kernel
def matmul_uneven_persistent_kernel(
    a,
    b,
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
    BIAS: ct.Constant[bool],
    LATENCY: ct.Constant[int],
):
    """`matmul_uneven_kernel` without scales, with blocks that compute several tiles.

    The loads of a tile overlap the end of the one before. The first step is before the loop,
    because in nested loops the compiler waits for each MMA of accumulators that begin as zeros.
    """
    length = SECOND + EXTRA
    first, second, TRANS_FIRST, TRANS_SECOND = (b, a, not TRANS_B, not TRANS_A) if SWAP_AB else (a, b, TRANS_A, TRANS_B)
    tiles_1, tiles_2 = ct.cdiv(first.shape[1 if TRANS_FIRST else 0], FIRST), ct.cdiv(second.shape[0 if TRANS_SECOND else 1], length)

    def one_tile(tile):
        tile_1, tile_2 = of_order(tile, tiles_1, tiles_2, GROUP, SWAP_AB)
        runs = _runs(second, out, tile_2, SECOND, EXTRA, FIRST, TILE_K, TRANS_SECOND, SWAP_AB)

        def summed(step, accs):
            x = operand(first, tile_1, step, FIRST, TILE_K, TRANS_FIRST, LATENCY, True)
            return _summed(x, runs, accs, step, TRANS_SECOND, False, LATENCY)

        accs = summed(0, zeros_of(FIRST, widths_of(SECOND, EXTRA)))
        for step in range(1, ct.cdiv(first.shape[0 if TRANS_FIRST else 1], TILE_K)):
            accs = summed(step, accs)
        for i in ct.static_iter(range(len(accs))):
            acc, (_, to, tile_of, is_there, START) = accs[i], runs[i]
            if BIAS:
                acc = acc + _bias(bias, START, acc.shape, length, tile_1, tile_of, SWAP_AB)
            _store_run(to, tile_1, tile_2, is_there, START, acc, out, SWAP_AB)

    for tile in range(ct.bid(0), tiles_1 * tiles_2, ct.num_blocks(0)):
        one_tile(tile)


def of_order(tile, tiles_1, tiles_2, GROUP, SWAP_AB):
    """A tile's index along the first operand of the MMA, and along the second."""
    if SWAP_AB:
        tile_2, tile_1 = grouped_tile(tile, tiles_2, tiles_1, GROUP)
    else:
        tile_1, tile_2 = grouped_tile(tile, tiles_1, tiles_2, GROUP)
    return tile_1, tile_2


def _runs(second, out, tile, SECOND, EXTRA, FIRST, TILE_K, TRANS_SECOND, SWAP_AB):
    """Of each accumulator: views of its rows of the second operand and of out, in which
    neighbouring tiles are SECOND + EXTRA rows apart; the tile to load, whether the tile has such
    rows (the last one may be cut before), and where they begin in a tile.
    """
    found: tuple = ()
    axis, START, STEP = 0 if TRANS_SECOND else 1, 0, SECOND + EXTRA
    for ROWS in ct.static_iter(widths_of(SECOND, EXTRA)):
        part = second.slice(axis, START, second.shape[axis])
        if TRANS_SECOND:
            view = part.tiled_view((ROWS, TILE_K), padding_mode=ZERO, traversal_steps=(STEP, TILE_K))
        else:
            view = part.tiled_view((TILE_K, ROWS), padding_mode=ZERO, traversal_steps=(TILE_K, STEP))
        if SWAP_AB:
            to = out.slice(0, START, out.shape[0]).tiled_view((ROWS, FIRST), traversal_steps=(STEP, FIRST))
        else:
            to = out.slice(1, START, out.shape[1]).tiled_view((FIRST, ROWS), traversal_steps=(FIRST, STEP))
        tiles = ct.cdiv(second.shape[axis] - START, STEP)
        found = (*found, (view, to, min(tile, tiles - 1), tile < tiles, START))
        START = START + ROWS
    return found


def _part(run, step, TRANS_SECOND, LATENCY):
    """[k, rows]: a tile of the second operand in a view of `_runs`."""
    if TRANS_SECOND:
        return run[0].load((run[2], step), latency=LATENCY).transpose()
    return run[0].load((step, run[2]), latency=LATENCY)


def _summed(x, runs, accs, step, TRANS_SECOND, FAST_ACC, LATENCY):
    """The accumulators with one more step: x is the tile of the first operand."""
    found: tuple = ()
    for i in ct.static_iter(range(len(accs))):
        found = (*found, add_product(x, _part(runs[i], step, TRANS_SECOND, LATENCY), accs[i], FAST_ACC))
    return found


def _bias(bias, START, SHAPE, STEP, tile_1, tile_2, SWAP_AB):
    """fp32 bias of an accumulator's rows, with SWAP_AB, or of its columns."""
    if SWAP_AB:
        return vector_masked(bias, SHAPE[0], tile_1 * SHAPE[0]).astype(ct.float32).reshape((SHAPE[0], 1))
    return vector_masked(bias, SHAPE[1], START + tile_2 * STEP).astype(ct.float32)


def _store_run(to, tile_1, tile_2, is_there, START, acc, out, SWAP_AB):
    """Writes an accumulator, if the tile has such rows, in a view of `_runs`."""
    if START == 0 or is_there:
        if SWAP_AB:
            to.store((tile_2, tile_1), acc.transpose().astype(out.dtype))
        else:
            to.store((tile_1, tile_2), acc.astype(out.dtype))


def run_scales(scales, START, ROWS, tile, STEP, SCALING):
    """As `row_scales`, for the rows from START on of tiles that are STEP rows apart."""
    if SCALING == ROW:
        return scales_from(scales, 0, START + tile * STEP, ROWS)
    return row_scales(scales, 0, 0, 1, SCALING)


@ct.kernel
def matmul_reduce_kernel(
    partial,
    out,
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    GROUP: ct.Constant[int],
    SWAP_AB: ct.Constant[bool],
    ROWS: ct.Constant[int],
    COLUMNS: ct.Constant[int],
    PARTS: ct.Constant[int],
):
    """Sums the PARTS parts of the tiles that `matmul_kernel` split: block (s, i) takes the i-th
    piece [ROWS, COLUMNS] of the s-th of them.

    PARTS is a constant, so that all loads are in flight at once: a loop, or the sum of one tile of
    parts, takes three times as long (4.3 and 12.5 us for 3 x 5 MB, H200).
    """
    pdl_overlap()
    shared, piece = ct.bid(0), ct.bid(1)
    width = TILE_M if SWAP_AB else TILE_N  # of a partial tile
    row, column = piece // (width // COLUMNS), piece % (width // COLUMNS)
    tiles_m, tiles_n = ct.cdiv(out.shape[0], TILE_M), ct.cdiv(out.shape[1], TILE_N)
    tile_m, tile_n = grouped_tile(tiles_m * tiles_n - partial.shape[1] + shared, tiles_m, tiles_n, GROUP)
    if SWAP_AB:
        first_m, first_n, PIECE_M, PIECE_N = tile_m * (TILE_M // COLUMNS) + column, tile_n * (TILE_N // ROWS) + row, COLUMNS, ROWS
    else:
        first_m, first_n, PIECE_M, PIECE_N = tile_m * (TILE_M // ROWS) + row, tile_n * (TILE_N // COLUMNS) + column, ROWS, COLUMNS
    if first_m * PIECE_M < out.shape[0] and first_n * PIECE_N < out.shape[1]:
        acc = ct.zeros((ROWS, COLUMNS), dtype=ct.float32)
        for part in ct.static_iter(range(PARTS)):
            tile = ct.load(partial, index=(part, shared, row, column), shape=(1, 1, ROWS, COLUMNS), allow_tma=False)
            acc += tile.reshape((ROWS, COLUMNS))
        _store(out, first_m, first_n, acc, SWAP_AB)
