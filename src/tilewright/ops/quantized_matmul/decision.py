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
from .kernels import quantized_matmul_few_kernel, quantized_matmul_kernel, quantized_matmul_pieces_kernel, quantized_matmul_sum_kernel

SUM_TILE = (8, 128)  # rows and columns that a block of the second launch sums, at most


@dataclass(frozen=True, slots=True)
class Problem:
    """out [m, n] = x [m, k] @ weight [n, k].T, with a weight of a format."""

    m: int
    n: int
    k: int
    weight_format: str = "int4-128"
    bias: bool = False
    dtype: torch.dtype = torch.bfloat16

    @property
    def format(self) -> WeightFormat:
        """What its name stands for."""
        return FORMATS[self.weight_format]

    @property
    def runs(self) -> int:
        """Of a row: what a step takes one or more of."""
        return -(-self.k // self.format.run)

    @property
    def columns(self) -> int:
        """Of a row of x, in pieces: one for each plane that has a scale of its own."""
        of = self.format
        return PIECES if of.group % of.run == 0 else PIECES * (of.run // PLANE)

    def cost(self) -> Cost:
        rows = 2 * (self.m * (self.k + self.n) + self.n * self.bias)
        return Cost(rows + self.format.size_bytes(self.n, self.k), 2 * self.m * self.n * self.k)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, dtype=torch.bfloat16, device=device)

        return {"x": randn(self.m, self.k), **self._weight(device), "bias": randn(self.n) if self.bias else None}

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
    """The product, and the sum of its parts where k is shared."""
    if c.pieces:
        return _pieces_plan(p, c, device)
    parts = c.parts(p)
    grid = (c.tiles(p), parts) if parts > 1 else (c.tiles(p),)
    product = _product(quantized_matmul_kernel, grid, p, c, {"even": p.n % c.tile_n == 0}, pdl=use_pdl(p.m, False))
    return product, *_sum_plan(p, parts)


def _product(kernel: Any, grid: tuple[int, ...], p: Problem, c: Config, constants: dict[str, Any], pdl: bool) -> Launch:
    """Where k is shared, factor and bias wait for the sum."""
    of, parts = p.format, c.parts(p)
    constants = {"code": of.code, "group": of.group, "zeros": of.zeros, "factor": of.factor, "split_k": parts > 1, **constants}
    optional = {"zeros": of.zeros, "factor": of.factor and parts == 1, "bias": p.bias and parts == 1, "partial": parts > 1}
    scratch = {"partial": ((parts, p.m, p.n), torch.float32)} if parts > 1 else {}
    return Launch.of(kernel, grid, p, c, constants, optional=optional, pdl=pdl, scratch=scratch)


def _sum_plan(p: Problem, parts: int) -> tuple[Launch, ...]:
    if parts == 1:
        return ()
    last = {"factor": p.format.factor, "bias": p.bias}
    rows = min(next_pow2(p.m), SUM_TILE[0])
    grid = (-(-p.n // SUM_TILE[1]), -(-p.m // rows))
    constants = {**last, "tile_m": rows, "tile_n": SUM_TILE[1], "parts": parts}
    return (Launch.of(quantized_matmul_sum_kernel, grid, p, None, constants, optional=last, occupancy=4, pdl=True),)


def _pieces_plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    of, parts = p.format, c.parts(p)
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
    runs = min(next_pow2(p.runs), 1024 if device.is_cpu else 512 // of.run)
    return (
        Launch(
            quantized_matmul_pieces_kernel,
            (p.m, -(-p.runs // runs)),
            {"run": of.run, "planes": planes, "sums": of.code == INT4, "runs": runs},
            num_worker_warps=4,
            pdl=True,
            scratch=scratch,
            views=views,
            renames={"codes": "codes_of_rows", "factors": "factors_of_rows"},
        ),
        _product(quantized_matmul_few_kernel, (c.tiles(p), parts), p, c, {"planes": planes}, pdl=True),
        *_sum_plan(p, parts),
    )
