"""What `quantized_matmul` decides from (Problem) and what it decides (Config), and the launches
that follow.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from ...launch import Cost, Device, Launch, next_pow2
from ..common.gemm_choices import filled_parts
from ..common.pdl import use_pdl
from ..common.pieces import PIECES
from ..common.weight_formats import FORMATS, INT4, PLANE, QuantizedWeight, WeightFormat
from .kernels import quantized_matmul_few_kernel, quantized_matmul_kernel, quantized_matmul_rows_kernel, quantized_matmul_sum_kernel

SUM_TILE = (8, 128)  # rows and columns that a block of the last launch sums, at most
MOST_WIDE = 4096  # columns of a row that is normed, at once


@dataclass(frozen=True, slots=True)
class Problem:
    """out [m, n] = x [m, k] @ weight [n, k].T, with a weight of a format.

    norm, residual, round_before_weight, weight_offset: x is normed first. gated, gelu_tanh: x is
        the gate of what is multiplied.
    """

    m: int
    n: int
    k: int
    weight_format: str = "int4-128"
    bias: bool = False
    dtype: torch.dtype = torch.bfloat16
    norm: bool = False
    residual: bool = False
    round_before_weight: bool = False
    weight_offset: float = 0.0
    gated: bool = False
    gelu_tanh: bool = False

    @property
    def format(self) -> WeightFormat:
        """What its name stands for."""
        return FORMATS[self.weight_format]

    @property
    def runs(self) -> int:
        """Of a row: what a step takes one or more of."""
        return -(-self.k // self.format.run)

    @property
    def before(self) -> bool:
        """Whether something becomes of x first."""
        return self.norm or self.gated

    @property
    def columns(self) -> int:
        """Of a row of x, in pieces: one for each plane that has a scale of its own."""
        of = self.format
        return PIECES if of.group % of.run == 0 else PIECES * (of.run // PLANE)

    def cost(self) -> Cost:
        read = self.k * (1 + 2 * self.residual + self.gated)
        rows = 2 * (self.m * (read + self.n) + self.n * self.bias + self.k * self.norm)
        return Cost(rows + self.format.size_bytes(self.n, self.k), 2 * self.m * self.n * self.k)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, dtype=torch.bfloat16, device=device)

        found = {"x": randn(self.m, self.k), **self._weight(device), "bias": randn(self.n) if self.bias else None}
        if self.norm:
            how = {"eps": 1e-6, "weight_offset": self.weight_offset, "round_before_weight": self.round_before_weight}
            found |= {"norm": randn(self.k), "residual": randn(self.m, self.k) if self.residual else None, **how}
        return found | ({"up": randn(self.m, self.k), "gelu_tanh": self.gelu_tanh} if self.gated else {})

    def _weight(self, device: torch.device) -> dict[str, Any]:
        of = self.format
        if device.type != "meta":  # rows of unlike sizes
            size = torch.rand(self.n, 1, dtype=torch.bfloat16, device=device) + 0.5
            return QuantizedWeight.of(torch.randn(self.n, self.k, dtype=torch.bfloat16, device=device) * size, of.name).arguments

        def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        words, scales = of.shapes(self.n, self.k)
        zeros, factor = empty(scales, torch.bfloat16) if of.zeros else None, empty((1,), torch.float32) if of.factor else None
        return QuantizedWeight(of.name, self.k, empty(words, torch.int32), empty(scales, of.scale_dtype), zeros, factor).arguments


@dataclass(frozen=True, slots=True)
class Config:
    """One way to compute it.

    tile_m, tile_n: rows of x, and rows of the weight (64 or more), of a block.
    runs: 16 words of each row of the weight, loaded in one step.
    split_k: blocks that share the sum over k of one tile; a second launch adds their sums.
    scale_sums: scales of groups multiply their sums, in fp32; else the weights. For groups of a run
        or longer.
    pieces: few rows: 8-bit products with pieces of x (ops/common/pieces.py).
    ahead: with pieces, the weights of a block's first step come while the launch before ends.
    tma_scales: the scales of a step come as one tile by TMA; else each thread loads its own.
    band: tile rows of the tile order that share weights in L2.
    latency, occupancy, num_worker_warps: compiler hints.
    """

    tile_m: int
    tile_n: int
    runs: int = 1
    split_k: int = 1
    scale_sums: bool = False
    pieces: bool = False
    ahead: bool = False
    tma_scales: bool = False
    band: int = 8
    latency: int = 5
    occupancy: int = 1
    num_worker_warps: int = 4

    def tiles(self, p: Problem) -> int:
        """Of the output."""
        return -(-p.m // self.tile_m) * -(-p.n // self.tile_n)

    def parts(self, p: Problem) -> int:
        """Blocks for a tile, none of them without a step."""
        return filled_parts(-(-p.runs // self.runs), self.split_k)


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """What becomes of x, if anything, the product, and the sum of its parts where k is shared."""
    of, parts = p.format, c.parts(p)
    optional = {"zeros": of.zeros, "partial": parts > 1, **{name: used and parts == 1 for name, used in _last(p).items()}}
    constants: dict[str, Any] = {"code": of.code, "group": of.group, "zeros": of.zeros, "factor": of.factor}
    how: dict[str, Any] = {"scratch": {"partial": ((parts, p.m, p.n), torch.float32)} if parts > 1 else {}}
    if c.pieces:
        constants |= {"planes": p.columns // PIECES, "shares": parts}
        how |= {"optional": optional, "pdl": True}
        product = Launch.of(quantized_matmul_few_kernel, (c.tiles(p), parts), p, c, constants, **how)
    else:
        constants |= {"even": p.n % c.tile_n == 0, "split_k": parts > 1}
        how |= {"optional": optional, "pdl": use_pdl(p.m, False), "renames": {"x": "rows"} if p.before else {}}
        product = Launch.of(quantized_matmul_kernel, (c.tiles(p), parts) if parts > 1 else (c.tiles(p),), p, c, constants, **how)
    first = (_rows_plan(p, c, device),) if c.pieces or p.before else ()
    return *first, product, *((_sum_plan(p, parts),) if parts > 1 else ())


def _last(p: Problem) -> dict[str, bool]:
    """What the sums over all of k meet."""
    return {"factor": p.format.factor, "bias": p.bias}


def _sum_plan(p: Problem, parts: int) -> Launch:
    rows = min(next_pow2(p.m), SUM_TILE[0])
    grid = (-(-p.n // SUM_TILE[1]), -(-p.m // rows))
    constants = {**_last(p), "tile_m": rows, "tile_n": SUM_TILE[1], "parts": parts}
    return Launch.of(quantized_matmul_sum_kernel, grid, p, None, constants, optional=_last(p), occupancy=4, pdl=True)


def _rows_plan(p: Problem, c: Config, device: Device) -> Launch:
    of = p.format
    runs = min(next_pow2(p.runs), 1024 if device.is_cpu else 512 // of.run)
    constants = {"add": p.residual, "round": p.round_before_weight, "gelu": p.gelu_tanh, "cols": p.k, "wide": min(next_pow2(p.k), MOST_WIDE)}
    constants |= {"planes": p.columns // PIECES, "sums": of.code == INT4, "run": of.run, "runs": runs}
    optional = {"norm": p.norm, "residual": p.residual, "new_residual": p.residual, "up": p.gated}
    optional |= {"rows": not c.pieces, "codes": c.pieces, "factors": c.pieces}
    how: dict[str, Any] = _pieces_arrays(p) if c.pieces else {"scratch": {"rows": ((p.m, p.k), p.dtype)}}
    how |= {"optional": optional, "pdl": use_pdl(p.m, False), "num_ctas": None, "occupancy": None, "num_worker_warps": 4}
    return Launch.of(quantized_matmul_rows_kernel, (p.m, -(-p.runs // runs)), p, c, constants, **how)


def _pieces_arrays(p: Problem) -> dict[str, Any]:
    """Scratch arrays of the pieces of x, and the views of them that the first launch writes."""
    of = p.format
    planes, kinds, halves = p.columns // PIECES, 2 if of.code == INT4 else 1, of.run // 64
    wide = p.m * p.columns
    scratch = {"codes": ((wide, p.runs * of.run), torch.float8_e4m3fn), "factors": ((1, p.runs, kinds, wide), torch.float32)}
    codes: tuple[int, ...] = (1, p.m, PIECES, planes, p.runs * halves, PLANE, 2)
    factors: tuple[int, ...] = (1, p.m, p.runs, kinds, PIECES, halves, 2)
    strides: tuple[int, ...] = (p.runs * kinds * wide, p.columns, kinds * wide, wide, planes, 2, 1)
    if planes == 1:
        codes, factors, strides = (p.m, PIECES, *codes[4:]), (p.m, p.runs, kinds, PIECES), (PIECES, kinds * wide, wide, 1)
    views = {
        "codes_of_rows": ("codes", codes, tuple(math.prod(codes[i + 1 :]) for i in range(len(codes)))),
        "factors_of_rows": ("factors", factors, strides),
    }
    return {"scratch": scratch, "views": views, "renames": {"codes": "codes_of_rows", "factors": "factors_of_rows"}}
