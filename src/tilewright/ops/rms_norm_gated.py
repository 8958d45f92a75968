"""RMSNorm of each head and a gate: out = x / sqrt(mean(x**2, -1) + eps) * weight * silu(gate)

Source    Qwen3-Next and Mamba-2 (Dao and Gu 2024, arXiv:2405.21060), the norm in front of the gate.
Numerics  All in fp32, rounded once at the end. Hugging Face's rounds three times.
Bound     Memory: x and gate read once, out written once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import cuda.tile as ct
import torch
from torch import Tensor

from ..launch import (
    Cost,
    Decision,
    Device,
    Launch,
    argument_error,
    as_rows,
    check_positive,
    check_tensor,
    hints,
    out_or_new,
    torch_op,
)
from ..select import Choices
from .common import rows
from .common.pdl import pdl_overlap
from .common.rows import Config
from .common.tiles import each_row_tile, gated, load_masked, of_width, vector_chunk

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ZERO = ct.PaddingMode.ZERO  # padded columns add nothing to the sum of squares
WIDEST = 8192  # columns; both rows stay in registers


def reference(x: Tensor, weight: Tensor, gate: Tensor, eps: float = 1e-6) -> Tensor:
    """The definition with the roundings of transformers."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (weight * normed * torch.nn.functional.silu(gate.to(wide.dtype))).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Problem:
    rows: int
    cols: int
    dtype: torch.dtype

    def cost(self) -> Cost:
        n = self.rows * self.cols
        return Cost(size_bytes=(3 * n + self.cols) * self.dtype.itemsize, flops=8 * n)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, device=device).to(self.dtype)

        return {"x": randn(self.rows, self.cols), "weight": randn(self.cols), "gate": randn(self.rows, self.cols), "eps": 1e-6}


def candidates(p: Problem, device: Device) -> Iterator[Config]:
    """Those that keep the rows in registers."""
    return (c for c in rows.candidates(p, device) if c.keep_row)


def _vectors(p: Problem) -> int:
    return 1


CHOICES = Choices(
    "rms_norm_gated",
    candidates,
    partial(rows.legal, vectors=_vectors),
    partial(rows.work, vectors=_vectors),
    rows.family,
    tie=rows.TIE,
    like="rms_norm",
    bucket=rows.coarse,
)
space = CHOICES.space


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """Grid and compile-time constants of one launch."""
    blocks = c.blocks(ct.cdiv(p.rows, c.tile_m), device)
    return (Launch(rms_norm_gated_kernel, blocks, c.constants(p.cols), **hints(c), pdl=not c.persistent),)


@ct.kernel
def rms_norm_gated_kernel(
    X,
    WEIGHT,
    GATE,
    OUT,
    eps: float,
    PERSISTENT: ct.Constant[bool],
    COLS: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    LATENCY: ct.Constant[int],
    LOAD_TMA: ct.Constant[bool],
    STORE_TMA: ct.Constant[bool],
):
    """A tile of rows is read once and kept in registers, in chunks of TILE_N columns.

    X, GATE, OUT: [rows, COLS]; WEIGHT: [COLS].
    """
    pdl_overlap(PERSISTENT)
    shape = (TILE_M, TILE_N)
    X, GATE, OUT = of_width(X, COLS), of_width(GATE, COLS), of_width(OUT, COLS)
    weights: tuple = ()
    for j in ct.static_iter(range(ct.cdiv(COLS, TILE_N))):
        weights = (*weights, vector_chunk(WEIGHT, j, COLS, TILE_N))

    def normalise(i, whole):
        xs: tuple = ()
        gates: tuple = ()
        squares = ct.zeros(shape, ct.float32)
        for j in ct.static_iter(range(ct.cdiv(COLS, TILE_N))):
            x = load_masked(X, (i, j), shape, ZERO, whole, LATENCY, LOAD_TMA)
            gates = (*gates, load_masked(GATE, (i, j), shape, ZERO, whole, LATENCY, LOAD_TMA))
            wide = x.astype(ct.float32)
            squares = squares + wide * wide
            xs = (*xs, x)
        rstd = 1.0 / ct.sqrt(ct.sum(squares, axis=1, keepdims=True) * (1.0 / COLS) + eps)  # rsqrt is 2 ulp off in fp32
        for j in ct.static_iter(range(ct.cdiv(COLS, TILE_N))):
            y = gated(gates[j], xs[j].astype(ct.float32) * rstd * weights[j].astype(ct.float32), False)
            ct.store(OUT, (i, j), y.astype(OUT.dtype), check_bounds=not whole, allow_tma=STORE_TMA)

    each_row_tile(normalise, X, COLS, PERSISTENT, TILE_M, TILE_N)


DECISION = Decision(
    "rms_norm_gated",
    problem=Problem,
    arguments=("x", "weight", "gate", "out", "eps"),
    space=space,
    plan=plan,
)


@torch_op(mutates=("out",))
def rms_norm_gated_out(x: Tensor, weight: Tensor, gate: Tensor, eps: float, out: Tensor) -> None:
    """`rms_norm_gated` into `out`; all but the weight [rows, cols].

    No checks, no sync: safe under graph capture.
    """
    count, cols = x.shape
    DECISION.launches(Device.of(x), rows=count, cols=cols, dtype=x.dtype).run(x, weight, gate, out, eps)


def rms_norm_gated(x: Tensor, weight: Tensor, gate: Tensor, eps: float = 1e-6, *, out: Tensor | None = None) -> Tensor:
    """Scales each row of x to unit root mean square, then by the weight and by silu(gate).

    Args:
        x: [..., cols]; bf16, fp16 or fp32; 1..8192 columns, such as those of a head; stride 1 in
            the last axis. Copied if its leading axes do not fold into one; so is the gate.
        weight: [cols], dtype and device of x.
        gate: shape, dtype and device of x.
        eps: positive; added to mean(x**2).
        out: where the result goes: contiguous, shape, dtype and device of x, no element in common
            with an input; default a new tensor.
    Returns: a contiguous tensor shaped like x. Empty for an empty x, with nothing launched.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_tensor(x, "x", dtypes=DTYPES)
    if not x.dim() or not 1 <= x.shape[-1] <= WIDEST:
        raise argument_error("x.shape", f"(..., 1..{WIDEST})", tuple(x.shape))
    check_tensor(weight, "weight", shape=(x.shape[-1],), like=x)
    check_tensor(gate, "gate", shape=x.shape, like=x)
    check_positive(eps, "eps")
    out = out_or_new(out, x.shape, x.dtype, x, weight, gate)
    if out.numel():
        rms_norm_gated_out(as_rows(x), weight, as_rows(gate), eps, as_rows(out))
    return out
