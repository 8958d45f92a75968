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
def delta_gates_kernel(  # noqa: PLR0913 arrays and constants
    X: Any,
    ORDER: Any,
    DECAY: Any,
    DT_BIAS: Any,
    OUT: Any,
    G: Any,
    BETA: Any,
    ORDERED: ct.Constant[bool],
    COLS: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    HEADS: ct.Constant[int],
) -> None:
    """G = DECAY * softplus(a + DT_BIAS) and BETA = sigmoid(b) of the last columns of X, b and a,
    and with ORDERED the COLS before them into OUT. Grid (tiles of rows, 1 + tiles of OUT's
    columns).

    X: [rows, COLS + 2 * heads]. ORDER: [COLS + 2 * heads] int32, where each column is in X; without
        ORDERED they lie so. OUT: [rows, COLS]. fp32: G, BETA [rows, heads]; DECAY, DT_BIAS [heads].
    HEADS: a power of two, at least heads.
    """
    pdl_overlap()
    i, j = ct.bid(0), ct.bid(1)
    rows = i * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None]

    def columns_of(first: Any, end: Any, size: int) -> Any:
        at = first + ct.arange(size, dtype=ct.int32)
        if ORDERED:
            at = ct.gather(ORDER, at, mask=at < end, padding_value=X.shape[1], check_bounds=False)
        else:
            at = ct.where(at < end, at, X.shape[1])
        there = (rows < X.shape[0]) & (at[None, :] < X.shape[1])
        return ct.gather(X, (rows, at[None, :]), mask=there, padding_value=0, check_bounds=False)

    if j == 0:
        heads = G.shape[1]
        decay = ct.load(DECAY, (0,), (HEADS,), padding_mode=ZERO, allow_tma=False)
        bias = ct.load(DT_BIAS, (0,), (HEADS,), padding_mode=ZERO, allow_tma=False)
        b, a = columns_of(COLS, COLS + heads, HEADS), columns_of(COLS + heads, COLS + 2 * heads, HEADS)
        ct.store(G, (i, 0), decay * softplus(a.astype(ct.float32) + bias), allow_tma=False)
        ct.store(BETA, (i, 0), opened(b, 1.0, True), allow_tma=False)
    else:
        ct.store(OUT, (i, j - 1), columns_of((j - 1) * TILE_N, COLS, TILE_N), allow_tma=False)


def delta_gates(x: Tensor, order: Tensor | None, decay: Tensor, dt_bias: Tensor, ordered: Tensor | None, g: Tensor, beta: Tensor) -> None:
    """What tokens keep of the states and write into them, [rows, heads], and the other columns of
    x in their order. No checks, no sync: safe under graph capture.
    """
    launches = _delta_launches(Device.of(x), *g.shape, x.shape[1], order is not None)
    launches.run(x, order, decay, dt_bias, ordered, g, beta)


@cache
def _delta_launches(device: Device, rows: int, heads: int, width: int, ordered: bool) -> Bound:
    cols, across = width - 2 * heads, next_pow2(heads)
    tile_n = min(next_pow2(cols), TILE)
    tile_m = _tile_m(rows, max(tile_n, across) if ordered else across)
    constants = {"ordered": ordered, "cols": cols, "tile_m": tile_m, "tile_n": tile_n, "heads": across}
    grid = -(-rows // tile_m), 1 + ordered * -(-cols // tile_n)
    unused = () if ordered else ("order", "out")
    launch = Launch(delta_gates_kernel, grid, constants, pdl=rows <= MOST_PDL_ROWS, unused=unused)
    return Bound([launch], ("x", "order", "decay", "dt_bias", "out", "g", "beta"), device)
