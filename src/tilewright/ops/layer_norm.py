"""LayerNorm: out = (x - mean) / sqrt(variance + eps) * weight + bias

    mean = mean(x, -1)        variance = mean((x - mean)**2, -1)

Source    Ba, Kiros and Hinton 2016, arXiv:1607.06450, eq. 3 and 4. Rows too wide for registers:
          Welford 1962, "Note on a method for calculating corrected sums of squares and products",
          one running mean for each lane, merged as in Chan, Golub and LeVeque 1979, eq. 2.1.
Numerics  fp32 from load to store, rounded once. The mean comes before the squares, so a large
          common part costs no digits.
Bound     Memory: x read once, out written once; weight and bias stay in L2.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Optional

import cuda.tile as ct
import torch
import torch.nn.functional as F
from torch import Tensor

from ..launch import FLOATS, Cost, Device, Launch, argument_error, as_rows, check_positive, check_tensor, out_or_new, torch_op
from .common.rows import Config, row_choices
from .common.tiles import Rows, each_row_tile, load_masked, of_width, vector_chunk

ZERO = ct.PaddingMode.ZERO  # padded columns add nothing to the sum


def reference(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """The definition."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


@dataclass(frozen=True, slots=True)
class Problem:
    rows: int
    cols: int
    dtype: torch.dtype
    weight: bool = True
    bias: bool = True

    def cost(self) -> Cost:
        n = self.rows * self.cols
        return Cost(size_bytes=(2 * n + (self.weight + self.bias) * self.cols) * self.dtype.itemsize, flops=7 * n)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        randn = partial(torch.randn, dtype=self.dtype, device=device)
        return {
            "x": randn(self.rows, self.cols) + 2.0,
            "weight": randn(self.cols) if self.weight else None,
            "bias": randn(self.cols) if self.bias else None,
            "eps": 1e-5,
        }


CHOICES = row_choices("layer_norm", chain=1, vectors=lambda p: p.weight + p.bias)
space = CHOICES.space


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """Grid and compile-time constants of one launch."""
    constants, optional = {"has_weight": p.weight, "has_bias": p.bias}, {"weight": p.weight, "bias": p.bias}
    kernel = layer_norm_kernel if c.keep_row else layer_norm_reread_kernel
    return (Launch.of(kernel, c.blocks(ct.cdiv(p.rows, c.tile_m), device), p, c, constants, optional=optional),)


def _inside(j, COLS, TILE_N):
    """[1, TILE_N]: which columns of chunk j the row has."""
    return (j * TILE_N + ct.arange(TILE_N, dtype=ct.int32) < COLS).reshape((1, TILE_N))


@ct.kernel
def layer_norm_kernel(
    X: Rows,
    WEIGHT,
    BIAS,
    OUT: Rows,
    eps: float,
    HAS_WEIGHT: ct.Constant[bool],
    HAS_BIAS: ct.Constant[bool],
    PERSISTENT: ct.Constant[bool],
    COLS: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    LATENCY: ct.Constant[int],
    LOAD_TMA: ct.Constant[bool],
    STORE_TMA: ct.Constant[bool],
):
    """A tile of rows is read once and kept in registers, in chunks of TILE_N columns. X, OUT:
    [rows, COLS]; WEIGHT, BIAS: [COLS].
    """
    shape = (TILE_M, TILE_N)
    X, OUT = of_width(X, COLS), of_width(OUT, COLS)
    weights: tuple = ()
    biases: tuple = ()
    for j in ct.static_iter(range(ct.cdiv(COLS, TILE_N))):
        if HAS_WEIGHT:
            weights = (*weights, vector_chunk(WEIGHT, j, COLS, TILE_N))
        if HAS_BIAS:
            biases = (*biases, vector_chunk(BIAS, j, COLS, TILE_N))

    def normalise(i, whole):
        xs: tuple = ()
        total: tuple = ()
        squares: tuple = ()
        left: tuple = ()
        for j in ct.static_iter(range(ct.cdiv(COLS, TILE_N))):
            x = load_masked(X, (i, j), shape, ZERO, whole, LATENCY, LOAD_TMA)
            xs, total = (*xs, x), _added(total, x.astype(ct.float32))
        mean = _mean(total, COLS)
        for j in ct.static_iter(range(ct.cdiv(COLS, TILE_N))):
            centred = xs[j].astype(ct.float32) - mean
            if j * TILE_N + TILE_N > COLS:
                centred = ct.where(_inside(j, COLS, TILE_N), centred, 0.0)
            squares, left = _added(squares, centred * centred), _added(left, centred)
        # fp32 has no digits to spare: what rounding left in the mean comes out too.
        rest = _mean(left, COLS) if X.dtype == ct.float32 else 0.0
        # rsqrt is 2 ulp off in fp32
        rstd = 1.0 / ct.sqrt(ct.sum(squares[0], axis=1, keepdims=True) * (1.0 / COLS) + eps)
        for j in ct.static_iter(range(ct.cdiv(COLS, TILE_N))):
            centred = xs[j].astype(ct.float32) - mean
            if X.dtype == ct.float32:
                centred = centred - rest
            y = centred * rstd
            if HAS_WEIGHT:
                y = y * weights[j].astype(ct.float32)
            if HAS_BIAS:
                y = y + biases[j].astype(ct.float32)
            ct.store(OUT, (i, j), y.astype(OUT.dtype), check_bounds=not whole, allow_tma=STORE_TMA)

    each_row_tile(normalise, X, COLS, PERSISTENT, TILE_M, TILE_N)


def _added(total, tile):
    """A tuple of one sum, with a tile more. A sum that began as zeros would add once more for each
    element.
    """
    return (tile,) if len(total) == 0 else (total[0] + tile,)


def _mean(total, COLS):
    """[rows, 1]: the sum of a row over COLS. A division takes a branch and ten instructions; where
    COLS is a power of two the product is the same.
    """
    row = ct.sum(total[0], axis=1, keepdims=True)
    return row * (1.0 / COLS) if COLS & (COLS - 1) == 0 else row / COLS


@ct.kernel
def layer_norm_reread_kernel(
    X: Rows,
    WEIGHT,
    BIAS,
    OUT: Rows,
    eps: float,
    HAS_WEIGHT: ct.Constant[bool],
    HAS_BIAS: ct.Constant[bool],
    PERSISTENT: ct.Constant[bool],
    COLS: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    LATENCY: ct.Constant[int],
    LOAD_TMA: ct.Constant[bool],
    STORE_TMA: ct.Constant[bool],
):
    """Rows of any width: one pass for mean and variance, a second for the result. Arrays and
    constants as in layer_norm_kernel.
    """
    shape = (TILE_M, TILE_N)
    X, OUT = of_width(X, COLS), of_width(OUT, COLS)

    def load(i, j, whole):
        return load_masked(X, (i, j), shape, ZERO, whole, LATENCY, LOAD_TMA).astype(ct.float32)

    def normalise(i, whole):
        # fp32 has no digits to spare: there all is taken from the mean of the first chunk, so that
        # what is left to round is small.
        origin = ct.sum(load(i, 0, whole), axis=1, keepdims=True) / min(COLS, TILE_N) if X.dtype == ct.float32 else 0.0
        # Each lane keeps the mean of its own elements and their squared distance from it; every
        # lane has one element in a whole chunk.
        lane_mean = ct.zeros(shape, ct.float32)
        squares = ct.zeros(shape, ct.float32)
        for j in range(COLS // TILE_N):
            x = load(i, j, whole) - origin
            from_old = x - lane_mean
            lane_mean = lane_mean + from_old * (1.0 / ct.astype(j + 1, ct.float32))
            squares = squares + from_old * (x - lane_mean)
        count = ct.full((1, TILE_N), COLS // TILE_N, ct.float32)
        if COLS % TILE_N != 0:
            inside = _inside(COLS // TILE_N, COLS, TILE_N)
            x = load(i, COLS // TILE_N, whole) - origin
            from_old = ct.where(inside, x - lane_mean, 0.0)
            lane_mean = lane_mean + from_old * (1.0 / (COLS // TILE_N + 1))
            squares = squares + from_old * (x - lane_mean)
            count = ct.where(inside, count + 1.0, count)
        mean = ct.sum(lane_mean * count, axis=1, keepdims=True) / COLS
        apart = lane_mean - mean
        rstd = 1.0 / ct.sqrt(ct.sum(squares + count * apart * apart, axis=1, keepdims=True) * (1.0 / COLS) + eps)
        for j in range(ct.cdiv(COLS, TILE_N)):
            y = (load(i, j, whole) - origin - mean) * rstd
            if HAS_WEIGHT:
                y = y * vector_chunk(WEIGHT, j, COLS, TILE_N).astype(ct.float32)
            if HAS_BIAS:
                y = y + vector_chunk(BIAS, j, COLS, TILE_N).astype(ct.float32)
            ct.store(OUT, (i, j), y.astype(OUT.dtype), check_bounds=not whole, allow_tma=STORE_TMA)

    each_row_tile(normalise, X, COLS, PERSISTENT, TILE_M, TILE_N)


DECISION = CHOICES.decision(Problem, plan, ("x", "weight", "bias", "out", "eps"))


@torch_op(mutates=("out",))
def layer_norm_out(x: Tensor, weight: Optional[Tensor], bias: Optional[Tensor], eps: float, out: Tensor) -> None:
    """`layer_norm` into `out`; x and out [rows, cols]. No checks, no sync: safe under graph
    capture.
    """
    rows, cols = x.shape
    launches = DECISION.launches(Device.of(x), rows=rows, cols=cols, dtype=x.dtype, weight=weight is not None, bias=bias is not None)
    launches.run(x, weight, bias, out, eps)


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *, out: Tensor | None = None) -> Tensor:
    """Shifts and scales each row of x to zero mean and unit variance, then applies weight and bias.

    Args:
        x: [..., cols]; bf16, fp16 or fp32; stride 1 in the last axis. Copied if its leading axes do
            not fold into one.
        weight: [cols], dtype and device of x; default 1.
        bias: [cols], dtype and device of x; default 0.
        eps: positive; added to the variance.
        out: where the result goes: contiguous, shape, dtype and device of the result, no element in
            common with an input; default a new tensor.
    Returns: a contiguous tensor shaped like x. Empty for an empty x, with nothing launched.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_tensor(x, "x", dtypes=FLOATS)
    if x.dim() == 0:
        raise argument_error("x.dim()", "at least 1", 0)
    check_positive(eps, "eps")
    for name, given in (("weight", weight), ("bias", bias)):
        if given is not None:
            check_tensor(given, name, shape=(x.shape[-1],), like=x)
    out = out_or_new(out, x.shape, x.dtype, x, weight, bias)
    if out.numel():
        layer_norm_out(as_rows(x), weight, bias, eps, as_rows(out))
    return out
