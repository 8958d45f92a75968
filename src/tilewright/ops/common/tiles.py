"""Tile code that several ops share."""

import math
from typing import Annotated

import cuda.tile as ct

from ...launch import next_pow2

LOG2E = math.log2(math.e)
ZERO = ct.PaddingMode.ZERO
GELU_LINEAR = 2 * math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715 * GELU_LINEAR
# A matrix whose strides are known when compiling. Where its rows begin off multiples of 16 bytes, a
# load then brings as many elements as their alignment allows, not one. A constant stride beyond 32
# bits is cut without an error: `as_rows` makes such matrices dense. With 64-bit indices the
# compiler takes no TMA.
Rows = Annotated[ct.Array, ct.ArrayAnnotation(static_stride_dims=(0, 1))]


def grouped_tile(index, tiles_m, tiles_n, group):
    """Row and column of the index-th tile, in grouped tile order: bands of `group` tile rows, each
    band column by column.

    Blocks that run at the same time then share a few row and column panels, which stay in L2.
    """
    band = index // (group * tiles_n)
    height = min(tiles_m - band * group, group)
    within = index - band * group * tiles_n
    return band * group + within % height, within // height


def of_width(matrix, cols):
    """The matrix [rows, cols], with its width known when compiling.

    A width that is only known when running puts each wide load and its conversion into a branch of
    its own, with one load in flight per thread.
    """
    return matrix.slice(1, 0, cols)


def rows_from(array, axis, first, end):
    """The array from `first` to `end` along an axis, for a `first` that is only known when running.

    64 bits wide: `slice` multiplies it by the stride in the wider of their types, and rows of 4 GB
    are 2**31 elements of 16 bits.
    """
    return array.slice(axis, ct.astype(first, ct.int64), end)


START_UNIT = 8  # elements: a moved tile begins at a multiple


def tile_start(tile, SIZE, extent):
    """Where the tile-th tile of SIZE elements of an axis begins, if the last one begins earlier
    rather than hang over the end, at a multiple of START_UNIT.

    For an element that is not there the TMA unit takes five times as long as for one that is.
    """
    return min(tile * SIZE, max(0, ct.cdiv(extent, START_UNIT) * START_UNIT - SIZE))


def store_own(out, tile, row, own_row, column, own_column):
    """Writes the elements of a tile that are its own, in a matrix: it begins at (row, column), and
    what lies before (own_row, own_column) belongs to the tiles in front of it.
    """
    rows, columns, own = own_elements(tile.shape, row, own_row, out.shape[0], column, own_column, out.shape[1])
    ct.scatter(out, (rows, columns), tile.astype(out.dtype), mask=own, check_bounds=False)


def store_own_of(out, i, tile, row, own_row, column, own_column):
    """As `store_own`, in the i-th matrix of `out`."""
    rows, columns, own = own_elements(tile.shape, row, own_row, out.shape[1], column, own_column, out.shape[2])
    ct.scatter(out, (i, rows, columns), tile.astype(out.dtype), mask=own, check_bounds=False)


def own_elements(SHAPE, row, own_row, height, column, own_column, width):
    """Rows and columns of a tile in a matrix [height, width], and which of its elements `store_own`
    writes.
    """
    rows = ct.expand_dims(row + ct.arange(SHAPE[0], dtype=ct.int32), 1)
    columns = ct.expand_dims(column + ct.arange(SHAPE[1], dtype=ct.int32), 0)
    return rows, columns, (rows >= own_row) & (rows < height) & (columns >= own_column) & (columns < width)


def load_tile(array, index, shape, padding, whole, latency, tma):
    """A tile of an array. whole: it lies inside, so nothing is checked or padded (tileiras 13.4
    fails if given a padding it does not need).

    Checked, each wide load stands in a branch of its own and waits for the one before.
    """
    if whole:
        return ct.load(array, index, shape, check_bounds=False, latency=latency, allow_tma=tma)
    return ct.load(array, index, shape, padding_mode=padding, latency=latency, allow_tma=tma)


def load_masked(matrix, at, shape, padding, whole, latency, tma):
    """As `load_tile`, of a matrix [rows, columns]; the loads of a tile that does not lie inside run
    together too. The TMA unit checks for free, but pads with zeros only.
    """
    if whole or (tma and padding == ct.PaddingMode.ZERO):
        return load_tile(matrix, at, shape, padding, whole, latency, tma)
    return matrix_tile(matrix, (), at, shape, padding, False, latency)


def matrix_tile(array, lead, at, shape, padding, whole, latency=None):
    """[rows, columns]: tile `at` of the matrix array[lead], of an array of any rank.

    A tile that does not lie inside is gathered: the compiler makes predicates of a gather's masks,
    so its loads run together; those of a checked load wait for one another.

    lead: indices of a tuple. whole: it lies inside. latency: as in ct.load.
    """
    ones: tuple = ()
    for _ in ct.static_iter(lead):
        ones = (*ones, 1)
    if whole:
        return ct.load(array, (*lead, *at), (*ones, *shape), check_bounds=False, latency=latency, allow_tma=False).reshape(shape)
    rows = (ct.arange(shape[0], dtype=ct.int32) + at[0] * shape[0]).reshape((shape[0], 1))
    columns = (ct.arange(shape[1], dtype=ct.int32) + at[1] * shape[1]).reshape((1, shape[1]))
    inside = columns < array.shape[array.ndim - 1]
    if shape[0] > 1:  # a tile of one row is not behind the end
        inside = inside & (rows < array.shape[array.ndim - 2])
    value = -math.inf if padding == ct.PaddingMode.NEG_INF else 0
    return ct.gather(array, (*lead, rows, columns), mask=inside, padding_value=value, check_bounds=False, latency=latency)


def added_shares(array, at, shape, whole, SHARES, COLS=0):
    """A tile of a matrix [rows, columns], which is given as fp32 [SHARES, rows, columns] that add
    up to it and are rounded to bf16 then; as itself where SHARES is 0.

    COLS: how many columns it has, known when compiling; 0 for as many as the array has.
    """
    given = array.slice(array.ndim - 1, 0, COLS) if COLS > 0 else array
    if SHARES > 0:
        total = ct.zeros(shape, ct.float32)
        for i in ct.static_iter(range(SHARES)):
            total = total + matrix_tile(given, (i,), at, shape, ZERO, whole)
        return total.astype(ct.bfloat16)
    else:
        return load_masked(given, at, shape, ZERO, whole, None, False)


def add_each(*numbers):
    """The sums, pair by pair, of two lists of as many numbers, given one after the other."""
    sums: tuple = ()
    for n in ct.static_iter(range(len(numbers) // 2)):
        sums = (*sums, numbers[n] + numbers[n + len(numbers) // 2])
    return sums


def each_chunk(do, count, UNROLLED):
    """Calls do(j) for the chunks of a row in turn. UNROLLED: each j is a constant."""
    if UNROLLED:
        for j in ct.static_iter(range(count)):
            do(j)
    else:
        for j in range(count):
            do(j)


def each_row_tile(compute, matrix, COLS, PERSISTENT, TILE_M, TILE_N):
    """Calls compute(i, whole) for every row tile i of this block; whole, a constant: the tile lies
    inside the matrix [rows, COLS].
    """
    if PERSISTENT:
        for i in range(ct.bid(0), ct.num_tiles(matrix, 0, (TILE_M, TILE_N)), ct.num_blocks(0)):
            compute(i, TILE_M == 1 and COLS % TILE_N == 0)
    elif COLS % TILE_N != 0:
        compute(ct.bid(0), False)
    elif TILE_M == 1:
        compute(ct.bid(0), True)
    elif ct.bid(0) * TILE_M + TILE_M <= matrix.shape[0]:
        compute(ct.bid(0), True)
    else:
        compute(ct.bid(0), False)


def each_tile(compute, matrix, COLS, PERSISTENT, TILE_M, TILE_N, BACKWARDS):
    """Calls compute(i, j, whole) for every tile of this block, row by row; whole, a constant: the
    tile lies inside the matrix [rows, COLS].
    """
    tiles_n = ct.cdiv(COLS, TILE_N)
    tiles = ct.num_tiles(matrix, 0, (TILE_M, TILE_N)) * tiles_n

    def one_tile(index):
        if BACKWARDS:
            index = tiles - 1 - index
        i, j = index // tiles_n, index % tiles_n
        if TILE_M == 1 and COLS % TILE_N == 0:
            compute(i, j, True)
        elif i * TILE_M + TILE_M <= matrix.shape[0] and j * TILE_N + TILE_N <= COLS:
            compute(i, j, True)
        else:
            compute(i, j, False)

    if PERSISTENT:
        for index in range(ct.bid(0), tiles, ct.num_blocks(0)):
            one_tile(index)
    else:
        one_tile(ct.bid(0))


def vector_chunk(VECTOR, j, COLS, TILE_N):
    """[TILE_N]: chunk j of a vector of COLS elements, such as a weight that every row is multiplied
    by; zeros behind its end.
    """
    if COLS % TILE_N == 0:
        return ct.load(VECTOR.slice(0, 0, COLS), (j,), (TILE_N,), check_bounds=False, allow_tma=False)
    columns = ct.arange(TILE_N, dtype=ct.int32) + j * TILE_N  # gathered: as in load_masked
    return ct.gather(VECTOR, columns, mask=columns < COLS, check_bounds=False)


def vector_masked(VECTOR, TILE_N, first=0):
    """[TILE_N]: a vector from `first` on, and zeros behind its end; see load_masked."""
    columns = ct.arange(TILE_N, dtype=ct.int32) + first
    return ct.gather(VECTOR, columns, mask=columns < VECTOR.shape[0], padding_value=0, check_bounds=False)


def rounded_sum(x, more):
    """x + more, rounded to their dtype, so that what is normed is what is stored."""
    return (x.astype(ct.float32) + more.astype(ct.float32)).astype(x.dtype)


def sum_tile(load, X, RESIDUAL, SUM, i, j, ADD, whole, STORE_TMA):
    """Tile (i, j) of X; if ADD, of X + RESIDUAL, rounded, which is put into SUM too. load(array, i,
    j, whole): how one is read.
    """
    x = load(X, i, j, whole)
    if ADD:
        x = rounded_sum(x, load(RESIDUAL, i, j, whole))
        ct.store(SUM, (i, j), x, check_bounds=not whole, allow_tma=STORE_TMA)
    return x


def gated(gate, up, GELU):
    """silu(gate) * up in fp32, or with GELU, gelu(gate) * up in its tanh form."""
    gate, up = gate.astype(ct.float32), up.astype(ct.float32)
    z = gate * (GELU_LINEAR + GELU_CUBIC * gate * gate) if GELU else gate
    # The approximate division is good to 2 ulp of fp32 for the same reciprocal unit that exp2 uses.
    divisor = 1.0 + ct.exp2(z * -LOG2E, flush_to_zero=True)
    return ct.truediv(gate, divisor, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True) * up


def silu_mul_of_pairs(y):
    """[rows, columns / 2] of a tile [rows, columns]: silu(even column) * odd column."""
    shape = (y.shape[0], y.shape[1] // 2)
    pairs = y.reshape((*shape, 2))
    gate, up = ct.extract(pairs, (0, 0, 0), (*shape, 1)).reshape(shape), ct.extract(pairs, (0, 0, 1), (*shape, 1)).reshape(shape)
    return gate / (1.0 + ct.exp(-gate)) * up


def along(axis, size, first):
    """The indices first .. first + size - 1 as a tile of four axes, for a gather."""
    return (ct.arange(size, dtype=ct.int32) + first).reshape(ct.static_eval((1,) * axis + (size,) + (1,) * (3 - axis)))


def load_pairs(X, at, pair, INTERLEAVED, HALF, whole, latency):
    """The first 2 * HALF elements of rows of X [.., .., .., columns], in the tile `at`, as they
    come: a tuple for `rotate_pairs`.

    pair: shape of the tile of each pair's first elements, its width a power of two from HALF on;
    one index of the first axis. INTERLEAVED: a pair is two neighbours instead of one element of
    each half. whole: the tile lies inside. What does not is zero.
    """
    if INTERLEAVED:
        return (_load_columns(X, at, pair, 0, 2 * HALF, whole, latency),)
    return _load_columns(X, at, pair, 0, HALF, whole, latency), _load_columns(X, at, pair, HALF, HALF, whole, latency)


def _load_columns(X, at, pair, first, count, whole, latency):
    """A tile of columns first .. first + count - 1.

    One that does not lie inside is gathered: the compiler makes predicates of a gather's masks, so
    that loads stay wide and all are in flight together. A checked `ct.load` loads vector by vector,
    each in a branch that waits for the one before.
    """
    if whole:
        shape = (*pair[:3], count)
        return ct.load(X.slice(3, first, first + count), at, shape, check_bounds=False, latency=latency, allow_tma=False)
    index, inside = _lanes(X, at, pair, first, count)
    return ct.gather(X, index, mask=inside, check_bounds=False, latency=latency)


def _lanes(X, at, pair, first, count):
    """Indices of the elements of a tile, and which of them there are."""
    heads, rows = along(1, pair[1], at[1] * pair[1]), along(2, pair[2], at[2] * pair[2])
    columns = along(3, ct.static_eval(next_pow2(count)), 0)
    inside = (columns < count) & (heads < X.shape[1])
    if pair[2] > 1:  # a tile of one row is not behind the end
        inside = inside & (rows < X.shape[2])
    return (at[0], heads, rows, columns + first), inside


def rotate_pairs(x, pair, cos, sin):
    """The loaded pairs (a, b) as (a cos - b sin, b cos + a sin): two tiles of shape `pair` in
    fp32.
    """
    if len(x) == 1:
        x = x[0].astype(ct.float32).reshape((*pair, 2))
        first = ct.extract(x, (0, 0, 0, 0, 0), (*pair, 1)).reshape(pair)
        second = ct.extract(x, (0, 0, 0, 0, 1), (*pair, 1)).reshape(pair)
    else:
        first, second = x[0].astype(ct.float32), x[1].astype(ct.float32)
    return first * cos - second * sin, second * cos + first * sin


def store_pairs(X, at, turned, INTERLEAVED, HALF, whole):
    """Puts what `rotate_pairs` made into the first 2 * HALF elements of rows of X, rounded."""
    left, right = turned
    pair = left.shape
    if INTERLEAVED:
        x = ct.cat((left.reshape((*pair, 1)), right.reshape((*pair, 1))), 4).reshape((*pair[:3], 2 * pair[3]))
        _store_columns(X, at, pair, 0, 2 * HALF, x, whole)
    else:
        _store_columns(X, at, pair, 0, HALF, left, whole)
        _store_columns(X, at, pair, HALF, HALF, right, whole)


def _store_columns(X, at, pair, first, count, x, whole):
    if whole:
        ct.store(X.slice(3, first, first + count), at, x.astype(X.dtype), check_bounds=False, allow_tma=False)
    else:
        index, inside = _lanes(X, at, pair, first, count)
        ct.scatter(X, index, x.astype(X.dtype), mask=inside, check_bounds=False)


def widths_of(FIRST, EXTRA):
    """FIRST and the powers of two that EXTRA is the sum of, the largest first."""
    widths: tuple = (FIRST,)
    for i in ct.static_iter(range(10)):
        if EXTRA & (512 >> i):
            widths = (*widths, 512 >> i)
    return widths


def zeros_of(ROWS, WIDTHS):
    """fp32 accumulators side by side."""
    accs: tuple = ()
    for WIDTH in ct.static_iter(WIDTHS):
        accs = (*accs, ct.zeros((ROWS, WIDTH), dtype=ct.float32))
    return accs
