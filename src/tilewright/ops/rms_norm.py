"""RMSNorm: out = x / sqrt(mean(x**2, -1) + eps) * (weight_offset + weight)

Source    Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4 (their g is weight_offset + weight; Gemma
          stores g - 1).
Numerics  Squares, sum and products in fp32, rounded once at the end; with round_before_weight also
          before the weight (Hugging Face's Llama). With a residual, x + residual rounded to their
          dtype is what is normalised, and is returned.
Bound     Memory: x read once, out written once (with a residual two and two); the weight stays in
          L2.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Optional, overload

import cuda.tile as ct
import torch
from torch import Tensor

from ..launch import (
    FLOATS,
    Cost,
    Device,
    Launch,
    argument_error,
    as_rows,
    check_bools,
    check_finite,
    check_positive,
    check_tensor,
    out_or_new,
    torch_op,
)
from .common.pdl import pdl_overlap
from .common.rows import Config, row_choices
from .common.tiles import Rows, each_row_tile, load_masked, of_width, sum_tile, vector_chunk

ZERO = ct.PaddingMode.ZERO  # padded columns add nothing to the sum of squares


def reference(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    residual: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The definition, at least in fp32 between the roundings that it has."""
    if residual is not None:
        x = residual = x + residual
    out = scaled_rows(x, weight, eps, weight_offset, round_before_weight).to(x.dtype)
    return out if residual is None else (out, residual)


def scaled_rows(x: Tensor, weight: Tensor, eps: float, weight_offset: float, round_before_weight: bool) -> Tensor:
    """The definition without a residual and the last rounding."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if round_before_weight:
        normed = normed.to(x.dtype)
    return normed * (weight.to(wide.dtype) + weight_offset)


@dataclass(frozen=True, slots=True)
class Problem:
    rows: int
    cols: int
    dtype: torch.dtype
    residual: bool = False
    round_before_weight: bool = False
    weight_offset: float = 0.0

    def cost(self) -> Cost:
        n = self.rows * self.cols
        moved = 4 * n if self.residual else 2 * n
        return Cost(size_bytes=(moved + self.cols) * self.dtype.itemsize, flops=4 * n)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        randn = partial(torch.randn, dtype=self.dtype, device=device)
        return {
            "x": randn(self.rows, self.cols),
            "weight": randn(self.cols),
            "eps": 1e-6,
            "weight_offset": self.weight_offset,
            "round_before_weight": self.round_before_weight,
            "residual": randn(self.rows, self.cols) if self.residual else None,
        }


CHOICES = row_choices("rms_norm", vectors=lambda p: 1)
space = CHOICES.space


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """Grid and compile-time constants of one launch."""
    constants = {"add": p.residual, "round": p.round_before_weight}
    kernel = rms_norm_kernel if c.keep_row else rms_norm_reread_kernel
    optional = {"residual": p.residual, "new_residual": p.residual}
    blocks = c.blocks(ct.cdiv(p.rows, c.tile_m), device)
    return (Launch.of(kernel, blocks, p, c, constants, optional=optional, pdl=not c.persistent),)


def _scaled(x, rstd, weight, weight_offset, dtype, ROUND):
    """One tile of the result, from its input and the reciprocal root of its rows."""
    y = x.astype(ct.float32) * rstd
    if ROUND:
        y = y.astype(dtype).astype(ct.float32)
    return (y * (weight.astype(ct.float32) + weight_offset)).astype(dtype)


@ct.kernel
def rms_norm_kernel(
    X: Rows,
    RESIDUAL: Rows,
    WEIGHT,
    OUT: Rows,
    NEW_RESIDUAL: Rows,
    eps: float,
    weight_offset: float,
    ADD: ct.Constant[bool],
    ROUND: ct.Constant[bool],
    PERSISTENT: ct.Constant[bool],
    COLS: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    LATENCY: ct.Constant[int],
    LOAD_TMA: ct.Constant[bool],
    STORE_TMA: ct.Constant[bool],
):
    """A tile of rows is read once and kept in registers, in chunks of TILE_N columns.

    X, RESIDUAL, OUT, NEW_RESIDUAL: [rows, COLS]; WEIGHT: [COLS]. ADD: with a residual.
    """
    pdl_overlap(PERSISTENT)
    shape = (TILE_M, TILE_N)
    X, RESIDUAL, OUT, NEW_RESIDUAL = of_width(X, COLS), of_width(RESIDUAL, COLS), of_width(OUT, COLS), of_width(NEW_RESIDUAL, COLS)
    weights: tuple = ()
    for j in ct.static_iter(range(ct.cdiv(COLS, TILE_N))):
        weights = (*weights, vector_chunk(WEIGHT, j, COLS, TILE_N))

    def load(array, i, j, whole):
        return load_masked(array, (i, j), shape, ZERO, whole, LATENCY, LOAD_TMA)

    def normalise(i, whole):
        xs: tuple = ()
        squares = ct.zeros(shape, ct.float32)
        for j in ct.static_iter(range(ct.cdiv(COLS, TILE_N))):
            x = sum_tile(load, X, RESIDUAL, NEW_RESIDUAL, i, j, ADD, whole, STORE_TMA)
            wide = x.astype(ct.float32)
            squares = squares + wide * wide
            xs = (*xs, x)
        rstd = 1.0 / ct.sqrt(ct.sum(squares, axis=1, keepdims=True) * (1.0 / COLS) + eps)  # rsqrt is 2 ulp off in fp32
        for j in ct.static_iter(range(ct.cdiv(COLS, TILE_N))):
            y = _scaled(xs[j], rstd, weights[j], weight_offset, OUT.dtype, ROUND)
            ct.store(OUT, (i, j), y, check_bounds=not whole, allow_tma=STORE_TMA)

    each_row_tile(normalise, X, COLS, PERSISTENT, TILE_M, TILE_N)


@ct.kernel
def rms_norm_reread_kernel(
    X: Rows,
    RESIDUAL: Rows,
    WEIGHT,
    OUT: Rows,
    NEW_RESIDUAL: Rows,
    eps: float,
    weight_offset: float,
    ADD: ct.Constant[bool],
    ROUND: ct.Constant[bool],
    PERSISTENT: ct.Constant[bool],
    COLS: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    LATENCY: ct.Constant[int],
    LOAD_TMA: ct.Constant[bool],
    STORE_TMA: ct.Constant[bool],
):
    """Rows of any width: one pass for the sum of squares, a second for the result.

    Arrays and constants as in rms_norm_kernel.
    """
    pdl_overlap(PERSISTENT)
    shape = (TILE_M, TILE_N)
    X, RESIDUAL, OUT, NEW_RESIDUAL = of_width(X, COLS), of_width(RESIDUAL, COLS), of_width(OUT, COLS), of_width(NEW_RESIDUAL, COLS)

    def load(array, i, j, whole):
        return load_masked(array, (i, j), shape, ZERO, whole, LATENCY, LOAD_TMA)

    def normalise(i, whole):
        squares = ct.zeros(shape, ct.float32)
        for j in range(ct.cdiv(COLS, TILE_N)):
            x = sum_tile(load, X, RESIDUAL, NEW_RESIDUAL, i, j, ADD, whole, STORE_TMA).astype(ct.float32)
            squares = squares + x * x
        rstd = 1.0 / ct.sqrt(ct.sum(squares, axis=1, keepdims=True) * (1.0 / COLS) + eps)  # rsqrt is 2 ulp off in fp32
        for j in range(ct.cdiv(COLS, TILE_N)):
            x = load(NEW_RESIDUAL if ADD else X, i, j, whole)
            weight = vector_chunk(WEIGHT, j, COLS, TILE_N)
            y = _scaled(x, rstd, weight, weight_offset, OUT.dtype, ROUND)
            ct.store(OUT, (i, j), y, check_bounds=not whole, allow_tma=STORE_TMA)

    each_row_tile(normalise, X, COLS, PERSISTENT, TILE_M, TILE_N)


DECISION = CHOICES.decision(Problem, plan, ("x", "residual", "weight", "out", "new_residual", "eps", "weight_offset"))


@torch_op(mutates=("out", "new_residual"))
def rms_norm_out(
    x: Tensor,
    weight: Tensor,
    residual: Optional[Tensor],
    eps: float,
    weight_offset: float,
    round_before_weight: bool,
    out: Tensor,
    new_residual: Optional[Tensor],
) -> None:
    """`rms_norm` into `out` and, with a residual, `new_residual`; all [rows, cols].

    No checks, no sync: safe under graph capture.
    """
    rows, cols = x.shape
    launches = DECISION.launches(
        Device.of(x),
        rows=rows,
        cols=cols,
        dtype=x.dtype,
        residual=residual is not None,
        round_before_weight=round_before_weight,
        weight_offset=weight_offset,
    )
    launches.run(x, residual, weight, out, new_residual, eps, weight_offset)


def check_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float, residual: Tensor | None) -> None:
    """Checks what `rms_norm` and the ops that begin with it share."""
    check_tensor(x, "x", dtypes=FLOATS)
    shape = x.shape
    if not shape:
        raise argument_error("x.dim()", "at least 1", 0)
    check_tensor(weight, "weight", shape=(shape[-1],), like=x)
    check_positive(eps, "eps")
    check_finite(weight_offset, "weight_offset")
    if residual is not None:
        check_tensor(residual, "residual", shape=shape, like=x)


@overload
def rms_norm(
    x: Tensor, weight: Tensor, eps: float = ..., *, weight_offset: float = ..., round_before_weight: bool = ..., out: Tensor | None = ...
) -> Tensor: ...
@overload
def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = ...,
    *,
    weight_offset: float = ...,
    round_before_weight: bool = ...,
    residual: Tensor,
    out: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...
def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Scales each row of x to unit root mean square, then by the weight.

    Args:
        x: [..., cols]; bf16, fp16 or fp32; stride 1 in the last axis. Copied if its leading axes do
            not fold into one.
        weight: [cols], dtype and device of x.
        eps: positive; added to mean(x**2).
        weight_offset: added to the weight; 1.0 for Gemma.
        round_before_weight: also round to the dtype before the weight, as Hugging Face's Llama
            does.
        residual: shape, dtype and device of x; x + residual is normalised.
        out: where the normalised rows go: contiguous, shape, dtype and device of x, no element in
            common with an input; default a new tensor.
    Returns: a contiguous tensor shaped like x; with a residual the tuple (that, x + residual).
        Empty for an empty x, with nothing launched.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_bools(round_before_weight=round_before_weight)
    check_norm(x, weight, eps, weight_offset, residual)
    out = out_or_new(out, x.shape, x.dtype, x, weight, residual)
    new_residual = None if residual is None else torch.empty_like(out, memory_format=torch.contiguous_format)
    if out.numel():
        rms_norm_out(as_rows(x), weight, as_rows(residual), eps, weight_offset, round_before_weight, as_rows(out), as_rows(new_residual))
    return out if new_residual is None else (out, new_residual)
