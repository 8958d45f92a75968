"""RMSNorm of each head and a gate: out = x / sqrt(mean(x**2, -1) + eps) * weight * silu(gate)

gate_first: x is x * silu(gate), and no gate follows. groups: the mean is of each group of columns.
sigmoid: the gate is sigmoid(gate).

Source    Qwen3-Next, the norm in front of the gate; Mamba-2 (Dao and Gu 2024, arXiv:2405.21060),
          the gate in front, in groups; Kimi-Linear (Kimi Team 2025, arXiv:2510.26692), the sigmoid.
Numerics  All in fp32, rounded once at the end. Hugging Face's rounds up to three times.
Bound     Memory: x and gate read once, out written once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

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
    check_integers,
    check_positive,
    check_tensor,
    out_or_new,
    torch_op,
)
from ..select import Choices, Work
from .common import rows
from .common.pdl import pdl_overlap
from .common.rows import Config
from .common.tiles import LOG2E, each_row_tile, gated, load_masked, of_width, vector_chunk

ZERO = ct.PaddingMode.ZERO  # padded columns add nothing to the sum of squares
WIDEST = 8192  # columns of a group; both rows stay in registers


def reference(x: Tensor, weight: Tensor, gate: Tensor, eps: float = 1e-6, groups: int = 1, gate_first: bool = False, sigmoid: bool = False) -> Tensor:
    """The definition with the roundings of transformers."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    opened = gate.to(wide.dtype).sigmoid() if sigmoid else torch.nn.functional.silu(gate.to(wide.dtype))
    parts = (wide * opened if gate_first else wide).unflatten(-1, (groups, -1))
    normed = (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + eps)).flatten(-2).to(x.dtype)
    y: Tensor = weight * normed
    return y if gate_first else (y * opened).to(x.dtype)


@dataclass(frozen=True, slots=True)
class Problem:
    """cols: of a group."""

    rows: int
    cols: int
    dtype: torch.dtype
    groups: int = 1
    gate_first: bool = False
    sigmoid: bool = False

    def cost(self) -> Cost:
        width = self.groups * self.cols
        return Cost(size_bytes=(3 * self.rows + 1) * width * self.dtype.itemsize, flops=8 * self.rows * width)

    @property
    def flat(self) -> "Problem":
        """With a row for each group."""
        return replace(self, rows=self.rows * self.groups, groups=1)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, device=device).to(self.dtype)

        width = self.groups * self.cols
        options = {name: getattr(self, name) for name in ("groups", "gate_first", "sigmoid")}
        return {"x": randn(self.rows, width), "weight": randn(width), "gate": randn(self.rows, width), "eps": 1e-6, **options}


def candidates(p: Problem, device: Device) -> Iterator[Config]:
    """Those that keep the rows in registers; with groups a block has one tile."""
    return (c for c in rows.candidates(p.flat, device) if c.keep_row and not (c.persistent and p.groups > 1))


def legal(p: Problem, c: Config, device: Device) -> bool:
    return rows.legal(p.flat, c, device, vectors=_vectors) and (device.is_cpu or rows.grid_fits(1, p.groups))


def work(p: Problem, c: Config, device: Device) -> Work:
    return rows.work(p.flat, c, device, vectors=_vectors)


def _vectors(p: Problem) -> int:
    return 1


def _coarse(p: Problem, device: Device) -> Problem:
    """With a number of rows that stands for all near it, counted as rows of groups."""
    return replace(p, rows=-(-rows.coarse(p.flat, device).rows // p.groups))


CHOICES = Choices("rms_norm_gated", candidates, legal, work, rows.family, tie=rows.TIE, like="rms_norm", bucket=_coarse)
space = CHOICES.space


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """Grid and compile-time constants of one launch."""
    blocks = *c.blocks(ct.cdiv(p.rows, c.tile_m), device), *((p.groups,) if p.groups > 1 else ())
    return (Launch.of(rms_norm_gated_kernel, blocks, p, c, pdl=not c.persistent),)


def opened(gate, up, SIGMOID):
    """silu(gate) * up, or sigmoid(gate) * up, in fp32."""
    if SIGMOID:
        divisor = 1.0 + ct.exp2(gate.astype(ct.float32) * -LOG2E, flush_to_zero=True)  # as in `gated`
        return ct.truediv(up.astype(ct.float32), divisor, rounding_mode=ct.RoundingMode.APPROX, flush_to_zero=True)
    return gated(gate, up, False)


def in_group(i, j, rows, COLS, TILE_M, TILE_N):
    """Indices of tile (i, j) of this block's group of columns, and which of them there are."""
    column = (ct.arange(TILE_N, dtype=ct.int32) + j * TILE_N).reshape((1, TILE_N))
    row = (ct.arange(TILE_M, dtype=ct.int32) + i * TILE_M).reshape((TILE_M, 1))
    return (row, column + ct.bid(1) * COLS), (column < COLS) & (row < rows)


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
    GROUPS: ct.Constant[int],
    GATE_FIRST: ct.Constant[bool],
    SIGMOID: ct.Constant[bool],
):
    """A tile of rows is read once and kept in registers, in chunks of TILE_N columns.

    X, GATE, OUT: [rows, GROUPS * COLS]; WEIGHT: [GROUPS * COLS]. Grid (blocks, GROUPS).
    """
    pdl_overlap(PERSISTENT)
    shape = (TILE_M, TILE_N)
    X, GATE, OUT = of_width(X, GROUPS * COLS), of_width(GATE, GROUPS * COLS), of_width(OUT, GROUPS * COLS)
    PARTED = GROUPS > 1 and COLS % TILE_N != 0  # tiles that end inside the matrix

    def chunk(j):
        """Of the matrix, the j-th of the group."""
        return ct.bid(1) * (COLS // TILE_N) + j if GROUPS > 1 else j

    weights: tuple = ()
    for j in ct.static_iter(range(ct.cdiv(COLS, TILE_N))):
        if PARTED:
            columns = ct.arange(TILE_N, dtype=ct.int32) + j * TILE_N
            weights = (*weights, ct.gather(WEIGHT, columns + ct.bid(1) * COLS, mask=columns < COLS, check_bounds=False))
        else:
            weights = (*weights, vector_chunk(WEIGHT, chunk(j), GROUPS * COLS, TILE_N))

    def load(array, i, j, whole):
        if PARTED:
            index, inside = in_group(i, j, array.shape[0], COLS, TILE_M, TILE_N)
            return ct.gather(array, index, mask=inside, check_bounds=False, latency=LATENCY)
        return load_masked(array, (i, chunk(j)), shape, ZERO, whole, LATENCY, LOAD_TMA)

    def normalise(i, whole):
        xs: tuple = ()
        gates: tuple = ()
        squares = ct.zeros(shape, ct.float32)
        for j in ct.static_iter(range(ct.cdiv(COLS, TILE_N))):
            x = load(X, i, j, whole)
            gates = (*gates, load(GATE, i, j, whole))
            if GATE_FIRST:
                x = opened(gates[j], x, SIGMOID)
            wide = x.astype(ct.float32)
            squares = squares + wide * wide
            xs = (*xs, x)
        rstd = 1.0 / ct.sqrt(ct.sum(squares, axis=1, keepdims=True) * (1.0 / COLS) + eps)  # rsqrt is 2 ulp off in fp32
        for j in ct.static_iter(range(ct.cdiv(COLS, TILE_N))):
            y = xs[j].astype(ct.float32) * rstd * weights[j].astype(ct.float32)
            if not GATE_FIRST:
                y = opened(gates[j], y, SIGMOID)
            if PARTED:
                index, inside = in_group(i, j, OUT.shape[0], COLS, TILE_M, TILE_N)
                ct.scatter(OUT, index, y.astype(OUT.dtype), mask=inside, check_bounds=False)
            else:
                ct.store(OUT, (i, chunk(j)), y.astype(OUT.dtype), check_bounds=not whole, allow_tma=STORE_TMA)

    each_row_tile(normalise, X, COLS, PERSISTENT, TILE_M, TILE_N)


DECISION = CHOICES.decision(Problem, plan, ("x", "weight", "gate", "out", "eps"))


@torch_op(mutates=("out",))
def rms_norm_gated_out(x: Tensor, weight: Tensor, gate: Tensor, eps: float, groups: int, gate_first: bool, sigmoid: bool, out: Tensor) -> None:
    """`rms_norm_gated` into `out`; all but the weight [rows, cols].

    No checks, no sync: safe under graph capture.
    """
    count, cols = x.shape
    how = {"groups": groups, "gate_first": gate_first, "sigmoid": sigmoid}
    DECISION.launches(Device.of(x), rows=count, cols=cols // groups, dtype=x.dtype, **how).run(x, weight, gate, out, eps)


def rms_norm_gated(
    x: Tensor,
    weight: Tensor,
    gate: Tensor,
    eps: float = 1e-6,
    *,
    groups: int = 1,
    gate_first: bool = False,
    sigmoid: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Scales each row of x to unit root mean square, then by the weight and by silu(gate).

    Args:
        x: [..., cols]; bf16, fp16 or fp32; such as those of a head; stride 1 in the last axis.
            Copied if its leading axes do not fold into one; so is the gate.
        weight: [cols], dtype and device of x.
        gate: shape, dtype and device of x.
        eps: positive; added to mean(x**2).
        groups: divides cols: so many groups of 1..8192 columns, each scaled by its own mean.
        gate_first: the gate multiplies x before its mean is taken, and not the result (Mamba-2).
        sigmoid: the gate is sigmoid(gate) (Kimi-Linear).
        out: where the result goes: contiguous, shape, dtype and device of x, no element in common
            with an input; default a new tensor.
    Returns: a contiguous tensor shaped like x. Empty for an empty x, with nothing launched.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_bools(gate_first=gate_first, sigmoid=sigmoid)
    check_integers(groups=groups)
    check_tensor(x, "x", dtypes=FLOATS)
    if groups < 1:
        raise argument_error("groups", "at least 1", groups)
    most = groups * WIDEST
    if not x.dim() or not 1 <= x.shape[-1] <= most or x.shape[-1] % groups:
        raise argument_error("x.shape", f"(..., 1..{most})" + f", a multiple of {groups} groups" * (groups > 1), tuple(x.shape))
    check_tensor(weight, "weight", shape=(x.shape[-1],), like=x)
    check_tensor(gate, "gate", shape=x.shape, like=x)
    check_positive(eps, "eps")
    out = out_or_new(out, x.shape, x.dtype, x, weight, gate)
    if out.numel():
        rms_norm_gated_out(as_rows(x), weight, as_rows(gate), eps, groups, gate_first, sigmoid, as_rows(out))
    return out
