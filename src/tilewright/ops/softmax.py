"""Softmax over the last axis: out = exp(x - max(x)) / sum(exp(x - max(x)))

Source    For rows too wide for registers the maximum and the sum in one pass: Milakov and
          Gimelshein 2018, arXiv:1805.02867, algorithm 3.
Numerics  fp32 from load to store, rounded once; exp as 2**(log2(e) * t).
          As in PyTorch: -inf gives 0, and a row of nothing but -inf, or with a NaN or +inf in it,
          gives NaN.
Bound     Memory: x read once, out written once.
"""

import math
from dataclasses import dataclass
from typing import Any

import cuda.tile as ct
import torch
from torch import Tensor

from ..launch import FLOATS, Cost, Device, Launch, argument_error, as_rows, check_tensor, out_or_new, torch_op
from .common.rows import Config, row_choices
from .common.tiles import LOG2E, Rows, each_row_tile, load_masked, of_width

NEG_INF = ct.PaddingMode.NEG_INF  # padded columns are exp(-inf) = 0
ZERO = ct.PaddingMode.ZERO  # where only rows can be padded; the TMA unit pads with nothing else


def reference(x: Tensor) -> Tensor:
    """The definition."""
    return torch.softmax(x, -1)


@dataclass(frozen=True, slots=True)
class Problem:
    rows: int
    cols: int
    dtype: torch.dtype

    def cost(self) -> Cost:
        n = self.rows * self.cols
        return Cost(size_bytes=2 * n * self.dtype.itemsize, flops=4 * n)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        return {"x": 3 * torch.randn(self.rows, self.cols, dtype=self.dtype, device=device)}


CHOICES = row_choices("softmax", chain=1, like="layer_norm")
space = CHOICES.space


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """Grid and compile-time constants of one launch."""
    kernel = softmax_kernel if c.keep_row else softmax_reread_kernel
    return (Launch.of(kernel, c.blocks(ct.cdiv(p.rows, c.tile_m), device), p, c),)


@ct.kernel
def softmax_kernel(
    X: Rows,
    OUT: Rows,
    PERSISTENT: ct.Constant[bool],
    COLS: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    LATENCY: ct.Constant[int],
    LOAD_TMA: ct.Constant[bool],
    STORE_TMA: ct.Constant[bool],
):
    """A tile of rows is read once and kept in registers, in chunks of TILE_N columns. X, OUT:
    [rows, COLS].
    """
    shape = (TILE_M, TILE_N)
    X, OUT = of_width(X, COLS), of_width(OUT, COLS)

    def load(i, j, whole):
        return load_masked(X, (i, j), shape, NEG_INF if COLS % TILE_N else ZERO, whole, LATENCY, LOAD_TMA).astype(ct.float32)

    def store(i, j, whole, y):
        ct.store(OUT, (i, j), y.astype(OUT.dtype), check_bounds=not whole, allow_tma=STORE_TMA)

    def normalise(i, whole):
        xs: tuple = ()
        top = ct.full(shape, -math.inf, ct.float32)
        for j in ct.static_iter(range(ct.cdiv(COLS, TILE_N))):
            x = load(i, j, whole)
            top = ct.maximum(top, x)
            xs = (*xs, x)
        top = ct.max(top, axis=1, keepdims=True)
        powers: tuple = ()
        total = ct.zeros(shape, ct.float32)
        for j in ct.static_iter(range(ct.cdiv(COLS, TILE_N))):
            power = ct.exp2((xs[j] - top) * LOG2E, flush_to_zero=True)
            total = total + power
            powers = (*powers, power)
        scale = 1.0 / ct.sum(total, axis=1, keepdims=True)
        for j in ct.static_iter(range(ct.cdiv(COLS, TILE_N))):
            store(i, j, whole, powers[j] * scale)

    each_row_tile(normalise, X, COLS, PERSISTENT, TILE_M, TILE_N)


@ct.kernel
def softmax_reread_kernel(
    X: Rows,
    OUT: Rows,
    PERSISTENT: ct.Constant[bool],
    COLS: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    LATENCY: ct.Constant[int],
    LOAD_TMA: ct.Constant[bool],
    STORE_TMA: ct.Constant[bool],
):
    """Rows of any width: one pass for maximum and sum, a second for the result. Arrays and
    constants as in softmax_kernel.
    """
    shape = (TILE_M, TILE_N)
    X, OUT = of_width(X, COLS), of_width(OUT, COLS)

    def load(i, j, whole):
        return load_masked(X, (i, j), shape, NEG_INF if COLS % TILE_N else ZERO, whole, LATENCY, LOAD_TMA).astype(ct.float32)

    def store(i, j, whole, y):
        ct.store(OUT, (i, j), y.astype(OUT.dtype), check_bounds=not whole, allow_tma=STORE_TMA)

    def normalise(i, whole):
        # Maximum and sum per column of the tile: one reduction at the end instead of two for each
        # tile.
        top = ct.full(shape, -math.inf, ct.float32)
        total = ct.zeros(shape, ct.float32)
        for j in range(ct.cdiv(COLS, TILE_N)):
            x = load(i, j, whole)
            new_top = ct.maximum(top, x)
            # nothing but -inf so far: powers are 0, not NaN
            origin = ct.where(new_top == -math.inf, 0.0, new_top)
            total = total * ct.exp2((top - origin) * LOG2E, flush_to_zero=True) + ct.exp2((x - origin) * LOG2E, flush_to_zero=True)
            top = new_top
        row_top = ct.max(top, axis=1, keepdims=True)
        origin = ct.where(row_top == -math.inf, 0.0, row_top)
        scale = 1.0 / ct.sum(total * ct.exp2((top - origin) * LOG2E, flush_to_zero=True), axis=1, keepdims=True)
        for j in range(ct.cdiv(COLS, TILE_N)):
            store(i, j, whole, ct.exp2((load(i, j, whole) - row_top) * LOG2E, flush_to_zero=True) * scale)

    each_row_tile(normalise, X, COLS, PERSISTENT, TILE_M, TILE_N)


DECISION = CHOICES.decision(Problem, plan, ("x", "out"))


@torch_op(mutates=("out",))
def softmax_out(x: Tensor, out: Tensor) -> None:
    """`softmax` into `out`, both [rows, cols]. No checks, no sync: safe under graph capture."""
    rows, cols = x.shape
    DECISION.launches(Device.of(x), rows=rows, cols=cols, dtype=x.dtype).run(x, out)


def softmax(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Softmax over the last axis: exponentials, scaled so that they sum to one.

    Args:
        x: [..., cols]; bf16, fp16 or fp32; stride 1 in the last axis. Copied if its leading axes do
            not fold into one.
        out: where the result goes: contiguous, shape, dtype and device of the result, no element in
            common with an input; default a new tensor.
    Returns: a contiguous tensor shaped like x. Empty for an empty x, with nothing launched.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_tensor(x, "x", dtypes=FLOATS)
    if x.dim() == 0:
        raise argument_error("x.dim()", "at least 1", 0)
    out = out_or_new(out, x.shape, x.dtype, x)
    if out.numel():
        softmax_out(as_rows(x), as_rows(out))
    return out
