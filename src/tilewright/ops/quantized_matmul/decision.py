"""What `quantized_matmul` decides from (Problem) and what it decides (Config), and the launches
that follow.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from ...launch import Cost, Device, Launch, argument_error, next_pow2
from ..common.gemm_choices import filled_parts
from ..common.pdl import use_pdl
from ..common.pieces import PIECES
from ..common.weight_formats import FORMATS, INT4, PLANE, QuantizedWeight, WeightFormat
from .kernels import quantized_matmul_few_kernel, quantized_matmul_kernel, quantized_matmul_rows_kernel, quantized_matmul_sum_kernel

SUM_TILE = (8, 128)  # rows and columns that a block of the last launch sums, at most
LEFT = -1  # Problem.shares: as many as the config makes
ROW_COLUMNS = 512  # of a row of x that a block of the first launch takes


@dataclass(frozen=True, slots=True)
class Problem:
    """out [m, n] = x [m, k] @ weight [n, k].T, with a weight of a format.

    norm, residual, weight_offset: x is normed first. gated, gelu_tanh: x is the gate of what is
        multiplied.
    given: how many fp32 tensors residual, or gate and up, are the sums of; 0 for none.
    shares: of k, whose sums are the result [shares, m, n] in fp32; 0 if it is their sum. LEFT asks
        for the config.
    """

    m: int
    n: int
    k: int
    weight_format: str = "int4-128"
    bias: bool = False
    dtype: torch.dtype = torch.bfloat16
    norm: bool = False
    residual: bool = False
    weight_offset: float = 0.0
    gated: bool = False
    gelu_tanh: bool = False
    given: int = 0
    shares: int = 0

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
            how = {"eps": 1e-6, "weight_offset": self.weight_offset}
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
    split_k: blocks that share the sum over k of one tile; a second launch adds their sums, or what
        reads the result.
    scale_sums: scales of groups multiply their sums, in fp32; else the weights. For groups of a run
        or longer.
    pieces: few rows: 8-bit products with pieces of x (ops/common/pieces.py).
    ahead: of how many first steps of a block the weights come while the launch before
        ends.
    tma_scales: the scales of a step come as one tile by TMA; else each thread loads its own.
    band: tile rows of the tile order that share weights in L2.
    latency, occupancy, num_worker_warps: compiler hints.
    extra_m: rows of x of a block beside tile_m, in accumulators of their own, so that a tile need
        not be a power of two; 0 for none.
    """

    tile_m: int
    tile_n: int
    runs: int = 1
    split_k: int = 1
    scale_sums: bool = False
    pieces: bool = False
    ahead: int = 0
    tma_scales: bool = False
    band: int = 8
    latency: int = 5
    occupancy: int = 1
    num_worker_warps: int = 4
    extra_m: int = 0

    @property
    def rows(self) -> int:
        """Of x in a tile."""
        return self.tile_m + self.extra_m

    def tiles(self, p: Problem) -> int:
        """Of the output."""
        return -(-p.m // self.rows) * -(-p.n // self.tile_n)

    def parts(self, p: Problem) -> int:
        """Blocks for a tile, none of them without a step."""
        return filled_parts(-(-p.runs // self.runs), self.split_k)

    def least_steps(self, p: Problem) -> int:
        """Of a block: the last share of k may have fewer than the others."""
        steps, parts = -(-p.runs // self.runs), self.parts(p)
        return steps - (parts - 1) * -(-steps // parts)


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """What becomes of x, if anything, the product, and the sum of its shares where it is wanted."""
    of, shares = p.format, c.parts(p)
    if p.shares not in (0, LEFT, shares):
        raise argument_error("out.shape[0]", f"{shares}, the shares of k", p.shares)
    summed = shares > 1 and not p.shares
    first = [_rows_plan(p, c, device)] if c.pieces or p.before else []
    constants: dict[str, Any] = {"code": of.code, "group": of.group, "zeros": of.zeros, "factor": of.factor, "shares": shares}
    constants["squares"] = next_pow2(first[0].grid[1]) if p.norm else 0
    optional = {"zeros": of.zeros, "factor": of.factor, "bias": p.bias, "squares": p.norm}
    renames = {"out": "partial"} if summed else {}
    how: dict[str, Any] = {"scratch": {"partial": ((shares, p.m, p.n), torch.float32)} if summed else {}, "optional": optional}
    if c.pieces:
        constants["planes"] = p.columns // PIECES
        product = Launch.of(quantized_matmul_few_kernel, (c.tiles(p), shares), p, c, constants, pdl=True, renames=renames, **how)
    else:
        constants["even"] = p.n % c.tile_n == 0
        renames |= {"x": "rows"} if p.before else {}
        grid = (c.tiles(p), shares) if shares > 1 else (c.tiles(p),)
        product = Launch.of(quantized_matmul_kernel, grid, p, c, constants, pdl=use_pdl(p.m, False), renames=renames, **how)
    return *first, product, *((_sum_plan(p, shares),) if summed else ())


def _sum_plan(p: Problem, shares: int) -> Launch:
    rows = min(next_pow2(p.m), SUM_TILE[0])
    grid = (-(-p.n // SUM_TILE[1]), -(-p.m // rows))
    constants = {"tile_m": rows, "tile_n": SUM_TILE[1], "shares": shares}
    return Launch.of(quantized_matmul_sum_kernel, grid, p, None, constants, occupancy=4, pdl=True)


def _rows_plan(p: Problem, c: Config, device: Device) -> Launch:
    of = p.format
    runs = min(next_pow2(p.runs), 1024 if device.is_cpu else ROW_COLUMNS // of.run)
    grid = p.m, -(-p.runs // runs)
    constants = {"add": p.residual, "gelu": p.gelu_tanh, "cols": p.k}
    constants |= {"planes": p.columns // PIECES, "sums": of.code == INT4, "run": of.run, "runs": runs}
    optional = {"norm": p.norm, "squares": p.norm, "residual": p.residual, "new_residual": p.residual, "up": p.gated}
    optional |= {"rows": not c.pieces, "codes": c.pieces, "factors": c.pieces}
    how: dict[str, Any] = _pieces_arrays(p) if c.pieces else {"scratch": {"rows": ((p.m, p.k), p.dtype)}}
    if p.norm:
        how["scratch"]["squares"] = grid, torch.float32
    how |= {"optional": optional, "pdl": use_pdl(p.m, False), "num_ctas": None, "occupancy": None, "num_worker_warps": 4}
    return Launch.of(quantized_matmul_rows_kernel, grid, p, c, constants, **how)


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
