"""Tile code of `silu_mul_quant`: groups within a tile, whole rows kept in registers, and rows computed twice."""

import math

import cuda.tile as ct

from ..fp8 import codes_of, group_codes, scale_of
from ..tiles import each_row_tile, load_tile, of_width

LOG2_E = math.log2(math.e)
GELU_LINEAR = 2 * math.sqrt(2 / math.pi)
GELU_CUBIC = 0.044715 * GELU_LINEAR
ZERO = ct.PaddingMode.ZERO  # zero times zero is zero: never the largest of a group


def _active(gate, up, GELU):
    """The result in fp32."""
    gate = gate.astype(ct.float32)
    z = gate * (GELU_LINEAR + GELU_CUBIC * gate * gate) if GELU else gate
    # The approximate division is good to 2 ulp of fp32 for the same reciprocal unit that exp2 uses.
    divisor = 1.0 + ct.exp2(z * -LOG2_E, flush_to_zero=True)
    active = ct.truediv(gate, divisor, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)
    return active * up.astype(ct.float32)


@ct.kernel
def silu_mul_quant_kernel(
    GATE,
    UP,
    CODES,
    SCALE,
    GELU: ct.Constant[bool],
    LARGEST: ct.Constant[int],
    POWER_OF_TWO: ct.Constant[bool],
    GROUP_N: ct.Constant[int],
    PERSISTENT: ct.Constant[bool],
    COLS: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    LATENCY: ct.Constant[int],
    LOAD_TMA: ct.Constant[bool],
    STORE_TMA: ct.Constant[bool],
):
    """Groups that lie within a tile, tiles in row-major order. GATE, UP, CODES: [rows, COLS]; SCALE: [column groups, rows]."""
    shape = (TILE_M, TILE_N)
    tiles_n = ct.cdiv(COLS, TILE_N)
    GATE, UP, CODES = of_width(GATE, COLS), of_width(UP, COLS), of_width(CODES, COLS)

    def compute(i, j, whole):
        gate = load_tile(GATE, (i, j), shape, ZERO, whole, LATENCY, LOAD_TMA)
        up = load_tile(UP, (i, j), shape, ZERO, whole, LATENCY, LOAD_TMA)
        codes, scale = group_codes(_active(gate, up, GELU), CODES.dtype, 1, GROUP_N, LARGEST, POWER_OF_TWO)
        ct.store(CODES, (i, j), codes, check_bounds=not whole, allow_tma=STORE_TMA)
        ct.store(SCALE, (j, i), scale, check_bounds=not whole, allow_tma=False)

    def one_tile(index):
        i, j = index // tiles_n, index % tiles_n
        if TILE_M == 1 and COLS % TILE_N == 0:
            compute(i, j, True)
        elif i * TILE_M + TILE_M <= CODES.shape[0] and j * TILE_N + TILE_N <= COLS:
            compute(i, j, True)
        else:
            compute(i, j, False)

    if PERSISTENT:
        for index in range(ct.bid(0), ct.num_tiles(CODES, 0, shape) * tiles_n, ct.num_blocks(0)):
            one_tile(index)
    else:
        one_tile(ct.bid(0))


@ct.kernel
def silu_mul_quant_rows_kernel(
    GATE,
    UP,
    CODES,
    SCALE,
    GELU: ct.Constant[bool],
    LARGEST: ct.Constant[int],
    POWER_OF_TWO: ct.Constant[bool],
    PERSISTENT: ct.Constant[bool],
    COLS: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    LATENCY: ct.Constant[int],
    LOAD_TMA: ct.Constant[bool],
    STORE_TMA: ct.Constant[bool],
):
    """The results of a tile of rows are kept in registers, in chunks of TILE_N columns. GATE, UP, CODES: [rows, COLS]; SCALE: [1, rows]."""
    shape = (TILE_M, TILE_N)
    GATE, UP, CODES = of_width(GATE, COLS), of_width(UP, COLS), of_width(CODES, COLS)

    def compute(i, whole):
        ys: tuple = ()
        amax = ct.zeros(shape, ct.float32)
        for j in ct.static_iter(range(ct.cdiv(COLS, TILE_N))):
            gate = load_tile(GATE, (i, j), shape, ZERO, whole, LATENCY, LOAD_TMA)
            up = load_tile(UP, (i, j), shape, ZERO, whole, LATENCY, LOAD_TMA)
            y = _active(gate, up, GELU)
            amax = ct.maximum(amax, ct.abs(y), propagate_nan=True)
            ys = (*ys, y)
        scale = scale_of(ct.max(amax, axis=1, keepdims=True, propagate_nan=True), LARGEST, POWER_OF_TWO)
        for j in ct.static_iter(range(ct.cdiv(COLS, TILE_N))):
            ct.store(CODES, (i, j), codes_of(ys[j], scale, CODES.dtype), check_bounds=not whole, allow_tma=STORE_TMA)
        ct.store(SCALE, (0, i), scale.reshape((1, TILE_M)), check_bounds=not whole, allow_tma=False)

    each_row_tile(compute, CODES, COLS, PERSISTENT, TILE_M, TILE_N)


@ct.kernel
def silu_mul_quant_reread_kernel(
    GATE,
    UP,
    CODES,
    SCALE,
    GELU: ct.Constant[bool],
    LARGEST: ct.Constant[int],
    POWER_OF_TWO: ct.Constant[bool],
    PERSISTENT: ct.Constant[bool],
    COLS: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    LATENCY: ct.Constant[int],
    LOAD_TMA: ct.Constant[bool],
    STORE_TMA: ct.Constant[bool],
):
    """Rows of any width: one pass for the maximum, a second for the codes. Arrays as in silu_mul_quant_rows_kernel."""
    shape = (TILE_M, TILE_N)
    GATE, UP, CODES = of_width(GATE, COLS), of_width(UP, COLS), of_width(CODES, COLS)

    def result(i, j, whole):
        gate = load_tile(GATE, (i, j), shape, ZERO, whole, LATENCY, LOAD_TMA)
        up = load_tile(UP, (i, j), shape, ZERO, whole, LATENCY, LOAD_TMA)
        return _active(gate, up, GELU)

    def compute(i, whole):
        amax = ct.zeros(shape, ct.float32)
        for j in range(ct.cdiv(COLS, TILE_N)):
            amax = ct.maximum(amax, ct.abs(result(i, j, whole)), propagate_nan=True)
        scale = scale_of(ct.max(amax, axis=1, keepdims=True, propagate_nan=True), LARGEST, POWER_OF_TWO)
        for j in range(ct.cdiv(COLS, TILE_N)):
            ct.store(CODES, (i, j), codes_of(result(i, j, whole), scale, CODES.dtype), check_bounds=not whole, allow_tma=STORE_TMA)
        ct.store(SCALE, (0, i), scale.reshape((1, TILE_M)), check_bounds=not whole, allow_tma=False)

    each_row_tile(compute, CODES, COLS, PERSISTENT, TILE_M, TILE_N)
