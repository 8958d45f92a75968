"""What a step computes element by element where no op does, each in one launch."""

from functools import cache
from typing import Any

import cuda.tile as ct
from torch import Tensor

from ..launch import Bound, Device, Launch, next_pow2
from ..ops.common.pdl import MOST_PDL_ROWS, pdl_overlap
from ..ops.common.tiles import ZERO, load_tile
from ..ops.rms_norm_gated import opened
from ..ops.ssd.kernels import softplus

TILE = 1024  # elements of a block


def _tile_m(rows: int, tile_n: int) -> int:
    """Rows of a block: one of a step's few, for more blocks."""
    return 1 if rows <= MOST_PDL_ROWS else max(1, TILE // tile_n)


@ct.kernel
def gate_kernel(X: Any, GATE: Any, COLS: ct.Constant[int], TILE_M: ct.Constant[int], TILE_N: ct.Constant[int], EACH: ct.Constant[bool]) -> None:
    """X * sigmoid(GATE) into X. Grid (tiles of rows, heads, tiles of columns).

    X: [rows, heads, COLS]. GATE: the same, or without EACH [rows, heads, 1].
    """
    pdl_overlap()
    i, head, j = ct.bid(0), ct.bid(1), ct.bid(2)
    whole = TILE_M == 1 and COLS % TILE_N == 0
    x = load_tile(X, (i, head, j), (TILE_M, 1, TILE_N), ZERO, whole, 1, False)
    if EACH:
        gate = load_tile(GATE, (i, head, j), (TILE_M, 1, TILE_N), ZERO, whole, 1, False)
    else:
        gate = load_tile(GATE, (i, head, 0), (TILE_M, 1, 1), ZERO, TILE_M == 1, 1, False)
    ct.store(X, (i, head, j), opened(gate, x, True).astype(X.dtype), check_bounds=not whole, allow_tma=False)


def gate(x: Tensor, by: Tensor) -> None:
    """x * sigmoid(by) in place. x: [rows, heads, cols]. by: the same, or [rows, heads, 1].

    No checks, no sync: safe under graph capture.
    """
    _gate_launches(Device.of(x), *x.shape, by.shape[2] > 1).run(x, by)


@cache
def _gate_launches(device: Device, rows: int, heads: int, cols: int, each: bool) -> Bound:
    tile_n = min(next_pow2(cols), TILE)
    tile_m = _tile_m(rows, tile_n)
    constants = {"cols": cols, "tile_m": tile_m, "tile_n": tile_n, "each": each}
    launch = Launch(gate_kernel, (-(-rows // tile_m), heads, -(-cols // tile_n)), constants, pdl=rows <= MOST_PDL_ROWS)
    return Bound([launch], ("x", "gate"), device)


@ct.kernel
def relu_squared_kernel(X: Any, COLS: ct.Constant[int], TILE_M: ct.Constant[int], TILE_N: ct.Constant[int]) -> None:
    """max(X, 0) ** 2 into X [rows, COLS]. Grid (tiles of rows, tiles of columns)."""
    pdl_overlap()
    at, whole = (ct.bid(0), ct.bid(1)), TILE_M == 1 and COLS % TILE_N == 0
    x = load_tile(X, at, (TILE_M, TILE_N), ZERO, whole, 1, False).astype(ct.float32)
    x = ct.where(x < 0.0, 0.0, x)  # a maximum would drop a NaN
    ct.store(X, at, (x * x).astype(X.dtype), check_bounds=not whole, allow_tma=False)


def relu_squared(x: Tensor) -> None:
    """max(x, 0) ** 2 in place. x: [rows, cols]. No checks, no sync: safe under graph capture."""
    _relu_launches(Device.of(x), *x.shape).run(x)


@cache
def _relu_launches(device: Device, rows: int, cols: int) -> Bound:
    tile_n = min(next_pow2(cols), TILE)
    tile_m = _tile_m(rows, tile_n)
    constants = {"cols": cols, "tile_m": tile_m, "tile_n": tile_n}
    launch = Launch(relu_squared_kernel, (-(-rows // tile_m), -(-cols // tile_n)), constants, pdl=rows <= MOST_PDL_ROWS)
    return Bound([launch], ("x",), device)


@ct.kernel
def delta_gates_kernel(A: Any, B: Any, DECAY: Any, DT_BIAS: Any, G: Any, BETA: Any, TILE_M: ct.Constant[int], TILE_N: ct.Constant[int]) -> None:
    """G = DECAY * softplus(A + DT_BIAS), BETA = sigmoid(B). Grid (tiles of rows,).

    A, B: [rows, heads]. fp32: G, BETA [rows, heads]; DECAY, DT_BIAS [heads]. TILE_N: a power of
        two, at least heads.
    """
    pdl_overlap()
    at, shape = (ct.bid(0), 0), (TILE_M, TILE_N)
    a = ct.load(A, at, shape, padding_mode=ZERO, allow_tma=False).astype(ct.float32)
    decay = ct.load(DECAY, (0,), (TILE_N,), padding_mode=ZERO, allow_tma=False)
    bias = ct.load(DT_BIAS, (0,), (TILE_N,), padding_mode=ZERO, allow_tma=False)
    ct.store(G, at, decay * softplus(a + bias), allow_tma=False)
    ct.store(BETA, at, opened(ct.load(B, at, shape, padding_mode=ZERO, allow_tma=False), 1.0, True), allow_tma=False)


def delta_gates(a: Tensor, b: Tensor, decay: Tensor, dt_bias: Tensor, g: Tensor, beta: Tensor) -> None:
    """What tokens keep of the states and write into them, [rows, heads]. No checks, no sync: safe
    under graph capture.
    """
    _delta_launches(Device.of(a), *a.shape).run(a, b, decay, dt_bias, g, beta)


@cache
def _delta_launches(device: Device, rows: int, heads: int) -> Bound:
    tile_n = next_pow2(heads)
    tile_m = _tile_m(rows, tile_n)
    launch = Launch(delta_gates_kernel, (-(-rows // tile_m),), {"tile_m": tile_m, "tile_n": tile_n}, pdl=rows <= MOST_PDL_ROWS)
    return Bound([launch], ("a", "b", "decay", "dt_bias", "g", "beta"), device)
