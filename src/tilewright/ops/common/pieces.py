"""bf16 numbers as pairs of e4m3 numbers, for products with weights of 4 and 8 bits by the tensor
cores' 8-bit instruction: decoding a weight to e4m3 takes half of what bf16 takes.

A bf16 has 8 significant bits and an e4m3 4: `high` is the number rounded, `low` what is left, both
times a power of two that is common to 32 of them along k. What is lost is below 2**-9 of a number,
or 2**-18 of the largest of the 32.

The second operand is a matrix of columns (piece, plane) for each row of x, zero outside of its
plane: one product sums each plane of a run by itself, and so meets one scale of the weights and one
of x. Along k it is in the order of the words' bytes: of 64 numbers, those of two planes take turns.
"""

import cuda.tile as ct

from .weight_formats import E2M1, INT4
from .weight_tiles import bytes_of

PIECES = 2
ALONG = 32  # k of a plane


def _split(x):
    """Of fp32 [..., k of a factor]: high and low, rounded but still fp32, and the factor."""
    top = ct.max(ct.abs(x), axis=x.ndim - 1, keepdims=True, propagate_nan=True)
    bits = (ct.bitcast(top, ct.int32) >> 23) & 255
    exponent = ct.maximum(bits, 8)
    factor = ct.where(bits == 255, float("nan"), ct.bitcast((exponent - 7) << 23, ct.float32))
    scaled = x * ct.bitcast((261 - exponent) << 23, ct.float32)  # at most 256
    high = scaled.astype(ct.float8_e4m3fn).astype(ct.float32)
    return high, (scaled - high).astype(ct.float8_e4m3fn).astype(ct.float32), factor


def store_pieces(CODES, FACTORS, x, row, block, side, PLANES, SUMS):
    """Of x fp32 [rows, blocks, sides, 32], 64 k a block, of which a side is the first or last half.

    CODES: e4m3 [panels, rows, 2, PLANES, blocks, 32, 2]. FACTORS: fp32 [panels, rows, runs, 1 or
    with SUMS 2, 2, blocks of a run, 2]; the second the sums of the codes of a piece and plane.
    row: panel, and tile of its rows. block, side: of the tile of x.
    """
    ROWS, BLOCKS, SIDES, _ = x.shape
    HALVES = PLANES // 2  # blocks of a run
    high, low, factor = _split(x)
    at = block * BLOCKS + ct.arange(BLOCKS, dtype=ct.int32).reshape((1, BLOCKS, 1, 1))
    plane = at % HALVES * 2 + side * SIDES + ct.arange(SIDES, dtype=ct.int32).reshape((1, 1, SIDES, 1))
    if BLOCKS >= HALVES:
        shape, run, half = (1, ROWS, BLOCKS // HALVES, 1, 1, HALVES, SIDES), block, 0
    else:
        shape, run, half = (1, ROWS, 1, 1, 1, 1, SIDES), block // HALVES, block % HALVES
    for piece in ct.static_iter(range(PIECES)):
        some = high if piece == 0 else low
        ct.store(FACTORS, (*row, run, 0, piece, half, side), factor.reshape(shape), allow_tma=False)
        if SUMS:
            ct.store(FACTORS, (*row, run, 1, piece, half, side), ct.sum(some, axis=3).reshape(shape), allow_tma=False)
        for own in ct.static_iter(range(PLANES)):
            column = ct.permute(ct.where(plane == own, some, 0.0), (0, 1, 3, 2)).astype(ct.float8_e4m3fn)
            ct.store(CODES, (*row, piece, own, block, 0, side), column.reshape((1, ROWS, 1, 1, BLOCKS, ALONG, SIDES)), allow_tma=False)


def store_whole_pieces(CODES, FACTORS, x, row, share, SUMS):
    """Of x fp32 [rows, runs, k of a run], of which each run has one factor, and a piece one column.

    CODES: e4m3 [rows, 2, blocks of 64, 32, 2]. FACTORS: fp32 [rows, runs, 1 or with SUMS 2, 2],
    of any strides.
    """
    ROWS, RUNS, RUN = x.shape
    high, low, factor = _split(x)
    for piece in ct.static_iter(range(PIECES)):
        some = high if piece == 0 else low
        ct.store(FACTORS, (row, share, 0, piece), factor.reshape((ROWS, RUNS, 1, 1)), allow_tma=False)
        if SUMS:
            ct.store(FACTORS, (row, share, 1, piece), ct.sum(some, axis=2).reshape((ROWS, RUNS, 1, 1)), allow_tma=False)
        turned = ct.permute(some.reshape((ROWS, RUNS * RUN // 64, 2, ALONG)), (0, 1, 3, 2)).astype(ct.float8_e4m3fn)
        ct.store(CODES, (row, piece, share, 0, 0), turned.reshape((ROWS, 1, RUNS * RUN // 64, ALONG, 2)), allow_tma=False)


def add_products(acc, loaded, xs, factors, scale, zero, how):
    """acc [rows of weights, columns of x] + a step's words times the pieces of a panel.

    loaded: [parts, panels, runs, rows, 16] words; xs: tiles [columns, k], of which
        the products are added; factors: [1, runs, 1 or with
        sums 2, columns]. scale, zero: [parts, groups, rows], or None.
    how: (CODE, GROUP, PLANES): constants.
    """
    CODE, GROUP, PLANES = how
    PARTS, HIGH, RUNS, LOW, WORDS = loaded.shape
    ROWS, WIDE = acc.shape
    RUN = xs[0].shape[1] // RUNS
    for i in ct.static_iter(range(RUNS)):
        q = ct.extract(loaded, (0, 0, i, 0, 0), (PARTS, HIGH, 1, LOW, WORDS)).reshape((ROWS, WORDS))
        codes, part = bytes_of(q, CODE), ct.zeros((ROWS, WIDE), ct.float32)
        for x in ct.static_iter(xs):
            part = ct.mma(codes, ct.extract(x, (0, i), (WIDE, RUN)).transpose(), part, use_fast_acc=True)
        over = (i, RUNS, RUN, GROUP, PLANES, WIDE)
        if CODE == INT4:
            total = ct.extract(factors, (0, i, 1, 0), (1, 1, 1, WIDE)).reshape((1, WIDE))
            part = part - total * (2.0**-6 if zero is None else _of_columns(zero, over).astype(ct.float32) * 2.0**-9)
        factor = ct.extract(factors, (0, i, 0, 0), (1, 1, 1, WIDE)).reshape((1, WIDE))
        acc = acc + part * (factor if scale is None else _wide(_of_columns(scale, over)) * factor)
    return acc


def summed(acc, PANEL, CODE):
    """[rows of weights, PANEL]: the sums over the columns of each row of x."""
    ROWS, WIDE = acc.shape
    return ct.sum(acc.reshape((ROWS, PANEL, WIDE // PANEL)), axis=2) * piece_unit(CODE)


def piece_unit(CODE):
    """What a unit of such sums stands for."""
    return 64.0 if CODE == E2M1 else 512.0 if CODE == INT4 else 1.0


def _of_columns(groups, over):
    """Of a run of a step, the groups' number for each row and column of the sums; [rows, 1] if
    columns don't differ.
    """
    i, RUNS, RUN, GROUP, PLANES, WIDE = over
    PARTS, _, HIGH = groups.shape
    EACH = max(1, RUN // GROUP)
    some = ct.extract(groups, (0, i if EACH > 1 else i * groups.shape[1] // RUNS, 0), (PARTS, EACH, HIGH))
    if EACH == 1:
        return some.reshape((PARTS * HIGH, 1))
    some = ct.permute(some, (0, 2, 1)).reshape((PARTS * HIGH, 1, EACH, 1))
    return ct.broadcast_to(some, (PARTS * HIGH, WIDE // PLANES, EACH, PLANES // EACH)).reshape((PARTS * HIGH, WIDE))


def _wide(scale):
    """fp32. e8m0: the exponent of one."""
    if scale.dtype == ct.uint8:
        return ct.bitcast(scale.astype(ct.int32) << 23, ct.float32)
    return scale.astype(ct.float32)
