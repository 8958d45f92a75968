"""What `quantized_moe` decides from (Problem) and what it decides (Config), and the launches that
follow.
"""

from dataclasses import dataclass
from typing import Any

import torch

from ...launch import Cost, Device, Launch, next_pow2
from ..common.expert_ids import routed, used
from ..common.expert_lists import list_launches, sum_launch
from ..common.expert_weights import QuantizedExperts
from ..common.pieces import PIECES
from ..common.weight_formats import FORMATS, INT4, PLANE, ROWS, WeightFormat
from .kernels import (
    quantized_moe_few_kernel,
    quantized_moe_kernel,
    quantized_moe_pieces_kernel,
    quantized_moe_row_kernel,
    quantized_moe_row_sum_kernel,
)


@dataclass(frozen=True, slots=True)
class Problem:
    """What a plan may depend on.

    bias, alpha, limit, up_offset: as `quantized_moe` has them; limit 0 for none.
    foreign: of `inputs` alone: how many of each token's choices are another rank's.
    """

    tokens: int
    top_k: int
    experts: int
    hidden: int
    inter: int
    weight_format: str = "mxfp4"
    bias: bool = False
    alpha: float = 1.0
    limit: float = 0.0
    up_offset: float = 0.0
    dtype: torch.dtype = torch.bfloat16
    foreign: int = 0

    @property
    def format(self) -> WeightFormat:
        """What its name stands for."""
        return FORMATS[self.weight_format]

    @property
    def pairs(self) -> int:
        return self.tokens * self.top_k

    def most_panels(self, tile_m: int) -> int:
        """Panels of tile_m rows that there could be, whoever chooses what."""
        return self.pairs // tile_m + min(self.experts, self.pairs)

    def expert_bytes(self) -> int:
        of = self.format
        return 2 * of.size_bytes(self.inter, self.hidden) + of.size_bytes(self.hidden, self.inter)

    @property
    def _choice(self) -> tuple[int, int, int, int]:
        return self.tokens, self.experts, self.top_k, self.foreign

    def cost(self) -> Cost:
        distinct, pairs = used(*self._choice)
        read = distinct * self.expert_bytes() + 4 * self.tokens * self.hidden
        return Cost(read, 2 * pairs * 3 * self.hidden * self.inter)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        weights = torch.rand(self.tokens, self.top_k, device=device) + 0.1
        gate_up, down = self._experts(2, self.inter, self.hidden, device), self._experts(1, self.hidden, self.inter, device)
        return {
            "x": torch.randn(self.tokens, self.hidden, dtype=self.dtype, device=device),
            **gate_up.arguments("gate_up"),
            **down.arguments("down"),
            "weights": weights / weights.sum(-1, keepdim=True),
            "ids": routed(*self._choice).to(device),
            **(self._biases(device) if self.bias else {}),
            "alpha": self.alpha,
            "limit": self.limit or None,
            "up_offset": self.up_offset,
            "weight_format": self.weight_format,
        }

    def _biases(self, device: torch.device) -> dict[str, torch.Tensor]:
        shapes = {"bias_gate_up": (self.experts, 2, self.inter), "bias_down": (self.experts, self.hidden)}
        return {name: torch.randn(shape, dtype=self.dtype, device=device) for name, shape in shapes.items()}

    def _experts(self, parts: int, n: int, k: int, device: torch.device) -> QuantizedExperts:
        of = self.format
        if device.type != "meta":
            each = [QuantizedExperts.of(torch.randn(1, parts, n, k, device=device) * k**-0.5, of.name) for _ in range(self.experts)]
            zeros = torch.cat([e.zeros for e in each if e.zeros is not None]) if of.zeros else None
            return QuantizedExperts(of.name, k, torch.cat([e.words for e in each]), torch.cat([e.scales for e in each]), zeros)
        shape_words, shape_scales = of.shapes(n, k)
        lead = (self.experts, parts)
        empty = torch.empty((*lead, *shape_words), dtype=torch.int32, device=device)
        scales, zeros = (torch.empty((*lead, *shape_scales), dtype=dtype, device=device) for dtype in (of.scale_dtype, torch.bfloat16))
        return QuantizedExperts(of.name, k, empty, scales, zeros if of.zeros else None)


@dataclass(frozen=True, slots=True)
class Config:
    """One way to compute it.

    tile_m: rows of a panel, a power of two.
    pieces: few tokens: 8-bit products with pieces of x (ops/common/pieces.py); no lists.
    tile_n: rows of gate and of up that a block computes, 32 or 64; of down twice that.
    shares: with pieces, blocks that share the k of the second product.
    runs: 16 words of each row of the weight, of which a step has so many.
    scale_sums: without pieces, as in `quantized_matmul`.
    latency, occupancy, num_worker_warps: compiler hints.
    """

    tile_m: int
    pieces: bool = False
    tile_n: int = ROWS
    shares: int = 1
    runs: int = 1
    scale_sums: bool = False
    latency: int = 5
    occupancy: int = 1
    num_worker_warps: int = 4

    def columns(self, p: Problem) -> int:
        """Of the second operand, for a row of x."""
        return PIECES * p.format.run // PLANE if self.pieces else 1


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """All launches, in order."""
    return _pieces_plan(p, c, device) if c.pieces else _many_plan(p, c, device)


def _weights(p: Problem, part: str) -> tuple[dict[str, str], tuple[str, ...]]:
    """The arguments that a product takes, and the parameters that it leaves untouched."""
    unused = tuple(name for name, needed in (("zeros", p.format.zeros), ("bias", p.bias)) if not needed)
    return {name: f"{name}_{part}" for name in ("words", "scales", "zeros", "bias") if name not in unused}, unused


def _meaning(p: Problem) -> dict[str, Any]:
    of = p.format
    return {"code": of.code, "group": of.group, "zeros": of.zeros, "add_bias": p.bias}


def _pieces_arrays(p: Problem, c: Config, name: str, panels: int, k: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Scratch arrays of the pieces of rows of k, and the views that `store_pieces` writes."""
    runs, kinds, planes = -(-k // p.format.run), 2 if p.format.code == INT4 else 1, p.format.run // PLANE
    deep, columns, halves = runs * p.format.run, c.columns(p), planes // 2
    wide = c.tile_m * columns
    arrays = {
        f"codes_{name}": ((panels * wide, deep), torch.float8_e4m3fn),
        f"factors_{name}": ((panels, runs, kinds, wide), torch.float32),
    }
    views = {
        f"codes_of_{name}": (
            f"codes_{name}",
            (panels, c.tile_m, PIECES, planes, runs * halves, PLANE, 2),
            (wide * deep, columns * deep, planes * deep, deep, 64, 2, 1),
        ),
        f"factors_of_{name}": (
            f"factors_{name}",
            (panels, c.tile_m, runs, kinds, PIECES, halves, 2),
            (runs * kinds * wide, columns, kinds * wide, wide, planes, 2, 1),
        ),
    }
    return arrays, views


def _pieces_plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    of = p.format
    panels = min(p.pairs, p.most_panels(c.tile_m))
    rows, planes = panels * c.tile_m, of.run // PLANE
    shares = min(c.shares, -(-p.inter // of.run // c.runs))
    lists: dict[str, Any] = {"panels": ((1 + panels,), torch.int32), "rows": ((p.pairs * shares,), torch.int32)}
    lists["shared_weights"] = ((p.tokens, p.top_k * shares), torch.float32)
    x, seen_x = _pieces_arrays(p, c, "x", 1 if p.tokens == 1 else panels, p.hidden)
    h, seen_h = _pieces_arrays(p, c, "h", panels, p.inter)
    y = {"y": ((shares, rows, p.hidden), torch.float32)}
    runs = -(-p.hidden // of.run)
    few = next_pow2(runs) if device.is_cpu else 1

    def product(first: bool, source: str, out: str, tiles: int, **more: Any) -> Launch:
        renames, unused = _weights(p, "gate_up" if first else "down")
        renames |= {"codes": f"codes_{source}", "factors": f"factors_{source}", "out": out} | ({"next_factors": "factors_of_h"} if first else {})
        unused = unused if first else (*unused, "next_factors")
        renames |= {"panels": "ids"} if p.tokens == 1 else {}
        own = 1 if first else shares
        same = {"first": first, "one": p.tokens == 1, "panel": c.tile_m, "tile_n": c.tile_n if first else 2 * c.tile_n, "shares": own, **_meaning(p)}
        return Launch.of(quantized_moe_few_kernel, (tiles, panels, own), p, c, same, pdl=True, renames=renames, unused=unused, **more)

    products = (
        # Also the columns behind the last, up to whole runs: the second product reads them.
        product(True, "x", "codes_of_h", -(-p.inter // of.run) * of.run // c.tile_n, scratch=h, views=seen_h),
        product(False, "h", "y", -(-p.hidden // c.tile_n // 2), scratch=y),
    )
    made: dict[str, Any] = {"occupancy": None, "num_worker_warps": 4, "pdl": True}
    pieces = {"sums": of.code == INT4, "blocks": few * planes // 2, "planes": planes}
    seen: dict[str, Any] = {"views": seen_x, "renames": {"codes": "codes_of_x", "factors": "factors_of_x"}}
    if p.tokens == 1:
        row = Launch.of(quantized_moe_row_kernel, (-(-runs // few),), p, c, pieces, scratch=x, **made, **seen)
        tile_n = next_pow2(p.hidden) if device.is_cpu else min(512, next_pow2(p.hidden))
        summed = {"panel": c.tile_m, "shares": shares, "cols": p.hidden, "tile_n": tile_n, "loads": 8}
        return row, *products, Launch.of(quantized_moe_row_sum_kernel, (-(-p.hidden // tile_n),), p, c, summed, **made)
    constants = {"tile_p": next_pow2(p.pairs), "panel": c.tile_m, "shares": shares, **pieces}
    rows_of_y = {"rows_of_y": ("y", (shares * rows, p.hidden), (p.hidden, 1))}
    return (
        Launch.of(quantized_moe_pieces_kernel, (p.pairs, -(-runs // few)), p, c, constants, scratch={**lists, **x}, **made, **seen),
        *products,
        sum_launch(p, device, shares, views=rows_of_y, renames={"y": "rows_of_y", "weights": "shared_weights"}),
    )


def _product(p: Problem, c: Config, part: str, panels: int, scratch: dict[str, Any], views: dict[str, Any], **sources: str) -> Launch:
    n, parts, tile_n = (p.inter, 2, c.tile_n) if part == "gate_up" else (p.hidden, 1, 2 * c.tile_n)
    constants = {"parts": parts, "tile_n": tile_n, **_meaning(p)}
    renames, unused = _weights(p, part)
    how: dict[str, Any] = {"pdl": True, "scratch": scratch, "views": views, "renames": {**renames, **sources}, "unused": unused}
    return Launch.of(quantized_moe_kernel, (-(-n // tile_n), panels), p, c, constants, **how)


def _many_plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    panels = p.most_panels(c.tile_m)
    tall = {"panels_of_y": ("y", (panels, c.tile_m, p.hidden), (c.tile_m * p.hidden, p.hidden, 1))}
    return (
        *list_launches(p, c.tile_m, device),
        _product(p, c, "gate_up", panels, {"h": ((panels, c.tile_m, p.inter), p.dtype)}, tall, x="panels_of_y", out="h"),
        # The rows of the second product go where those of the first came from.
        _product(p, c, "down", panels, {}, {}, x="h", out="panels_of_y"),
        sum_launch(p, device),
    )
