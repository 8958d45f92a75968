"""Gated activation: out = silu(gate) * up, or with gelu_tanh: out = gelu(gate) * up

    silu(g) = g * sigmoid(g)        gelu(g) = g * sigmoid(2 * sqrt(2 / pi) * (g + 0.044715 * g**3))

Source    Shazeer 2020, arXiv:2002.05202, eq. 6 (SwiGLU, GEGLU). The tanh form of GELU: Hendrycks
          and Gimpel 2016, arXiv:1606.08415, with 0.5 * (1 + tanh(z)) = sigmoid(2 * z).
Numerics  fp32 from load to store, rounded once.
Bound     Memory: gate and up read once, out written once.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import cuda.tile as ct
import torch
import torch.nn.functional as F
from torch import Tensor

from ..launch import FLOATS, Cost, Device, Launch, argument_error, as_rows, check_bools, check_tensor, out_or_new, torch_op
from ..select import Choices
from .common.pdl import pdl_overlap
from .common.rows import TIE, Config, tile_candidates, tile_family, tile_legal, tile_work, tiles
from .common.tiles import ZERO, Rows, each_tile, gated, load_masked, of_width


def reference(gate: Tensor, up: Tensor | None = None, *, gelu_tanh: bool = False) -> Tensor:
    """The definition."""
    if up is None:
        gate, up = gate.chunk(2, -1)
    return (F.gelu(gate, approximate="tanh") if gelu_tanh else F.silu(gate)) * up


@dataclass(frozen=True, slots=True)
class Problem:
    rows: int
    cols: int
    dtype: torch.dtype
    fused: bool = False
    gelu_tanh: bool = False

    def cost(self) -> Cost:
        n = self.rows * self.cols
        return Cost(size_bytes=3 * n * self.dtype.itemsize, flops=5 * n)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        def randn(cols: int) -> Tensor:
            return 2 * torch.randn(self.rows, cols, dtype=self.dtype, device=device)

        halves = {"gate": randn(2 * self.cols)} if self.fused else {"gate": randn(self.cols), "up": randn(self.cols)}
        return {**halves, "gelu_tanh": self.gelu_tanh}


CHOICES = Choices("silu_mul", tile_candidates, tile_legal, partial(tile_work, operands=2), tile_family, tie=TIE)
space = CHOICES.space


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """Grid and compile-time constants of one launch."""
    return (Launch.of(silu_mul_kernel, c.blocks(tiles(p, c), device), p, c, {"gelu": p.gelu_tanh}, pdl=not c.persistent),)


@ct.kernel
def silu_mul_kernel(
    GATE: Rows,
    UP: Rows,
    OUT: Rows,
    GELU: ct.Constant[bool],
    PERSISTENT: ct.Constant[bool],
    COLS: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    LATENCY: ct.Constant[int],
    LOAD_TMA: ct.Constant[bool],
    STORE_TMA: ct.Constant[bool],
):
    """Tiles in row-major order. GATE, UP, OUT: [rows, COLS]."""
    pdl_overlap(PERSISTENT)
    shape = (TILE_M, TILE_N)
    GATE, UP, OUT = of_width(GATE, COLS), of_width(UP, COLS), of_width(OUT, COLS)

    def compute(i, j, whole):
        gate = load_masked(GATE, (i, j), shape, ZERO, whole, LATENCY, LOAD_TMA)
        up = load_masked(UP, (i, j), shape, ZERO, whole, LATENCY, LOAD_TMA)
        ct.store(OUT, (i, j), gated(gate, up, GELU).astype(OUT.dtype), check_bounds=not whole, allow_tma=STORE_TMA)

    each_tile(compute, OUT, COLS, PERSISTENT, TILE_M, TILE_N, False)


DECISION = CHOICES.decision(Problem, plan, ("gate", "up", "out"))


@torch_op(mutates=("out",))
def silu_mul_out(gate: Tensor, up: Tensor, gelu_tanh: bool, out: Tensor) -> None:
    """`silu_mul` into `out`, all [rows, cols]. No checks, no sync: safe under graph capture."""
    rows, cols = out.shape
    fused = gate.stride(0) == 2 * cols
    DECISION.launches(Device.of(gate), rows=rows, cols=cols, dtype=out.dtype, fused=fused, gelu_tanh=gelu_tanh).run(gate, up, out)


def checked_shape(gate: Tensor, up: Tensor | None) -> tuple[int, ...]:
    """The shape of the result of `silu_mul` and `silu_mul_quant`, whose arguments these are."""
    check_tensor(gate, "gate", dtypes=FLOATS)
    if gate.dim() == 0:
        raise argument_error("gate.dim()", "at least 1", 0)
    shape = tuple(gate.shape)
    if up is not None:
        check_tensor(up, "up", shape=shape, like=gate)
    elif shape[-1] % 2:
        raise argument_error("gate.shape[-1]", "even if up is not given", shape[-1])
    return shape if up is not None else (*shape[:-1], shape[-1] // 2)


def silu_mul(gate: Tensor, up: Tensor | None = None, *, gelu_tanh: bool = False, out: Tensor | None = None) -> Tensor:
    """silu(gate) * up, or gelu(gate) * up: the activation of a SwiGLU or GEGLU layer.

    Args:
        gate: [..., cols], or [..., 2 * cols] holding (gate, up) when `up` is not given; bf16, fp16
            or fp32; stride 1 in the last axis. Copied if its leading axes do not fold into one, as
            is `up`.
        up: [..., cols], shape, dtype and device of gate; may be a view of the same tensor.
        gelu_tanh: GELU in its tanh form instead of SiLU.
        out: where the result goes: contiguous, shape, dtype and device of the result, no element in
            common with an input; default a new tensor.
    Returns: [..., cols], contiguous. Empty for an empty gate, with nothing launched.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_bools(gelu_tanh=gelu_tanh)
    shape = checked_shape(gate, up)
    out = out_or_new(out, shape, gate.dtype, gate, up)
    if out.numel():
        gate = as_rows(gate)
        gate, up = gate.chunk(2, -1) if up is None else (gate, as_rows(up))
        silu_mul_out(gate, up, gelu_tanh, as_rows(out))
    return out
