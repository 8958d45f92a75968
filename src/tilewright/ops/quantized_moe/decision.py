"""What `quantized_moe` decides from (Problem) and what it decides (Config), and the launches that
follow.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch

from ...launch import Cost, Device, Launch, hints, next_pow2
from ..common.expert_ids import routed, used
from ..common.expert_lists import moe_count_kernel, moe_permute_kernel, moe_sum_kernel
from ..common.expert_weights import QuantizedExperts
from ..common.scaling import GROUP
from ..common.weight_formats import FORMATS, ROWS, WeightFormat
from .kernels import quantized_moe_kernel

MAP_WIDTH = 128  # panels that a block writes at once


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
            each = (QuantizedExperts.of(torch.randn(1, parts, n, k, device=device) * k**-0.5, of.name) for _ in range(self.experts))
            made = [(e.words, e.scales, e.zeros) for e in each]
            words, scales = (torch.cat([e[i] for e in made if e[i] is not None]) for i in (0, 1))  # type: ignore[misc]
            zeros = torch.cat([e[2] for e in made if e[2] is not None]) if of.zeros else None
            return QuantizedExperts(of.name, k, words, scales, zeros)
        shape_words, shape_scales = of.shapes(n, k)
        lead = (self.experts, parts)
        empty = torch.empty((*lead, *shape_words), dtype=torch.int32, device=device)
        scales, zeros = (torch.empty((*lead, *shape_scales), dtype=dtype, device=device) for dtype in (of.scale_dtype, torch.bfloat16))
        return QuantizedExperts(of.name, k, empty, scales, zeros if of.zeros else None)


@dataclass(frozen=True, slots=True)
class Config:
    """One way to compute it.

    tile_m: rows of a panel, a power of two; with few at least the tokens.
    few: no lists; every chosen expert's weights meet all tokens.
    apart: gate and up are computed by blocks of their own, and activated by those of the second
        product.
    runs: 16 words of each row of the weight, loaded in one step.
    scale_sums: as of `quantized_matmul`.
    latency, occupancy, num_worker_warps: compiler hints.
    """

    tile_m: int
    few: bool = False
    apart: bool = False
    runs: int = 1
    scale_sums: bool = False
    latency: int = 5
    occupancy: int = 1
    num_worker_warps: int = 4


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """All launches, in order."""
    return _few_plan(p, c, device) if c.few else _many_plan(p, c, device)


def _product(p: Problem, c: Config, part: str, places: int, scratch: dict[str, Any], views: dict[str, Any], **sources: str) -> Launch:
    of, first = p.format, part == "gate_up"
    n, matrices = (p.inter, 2) if first else (p.hidden, 1)
    parts = 1 if c.apart else matrices
    constants = {
        "few": c.few,
        "top_k": p.top_k,
        "tile_p": next_pow2(p.pairs) if c.few else 1,
        "tile_m": c.tile_m,
        "first": first,
        "matrices": matrices,
        "parts": parts,
        "activate": c.apart and not first,
        "code": of.code,
        "group": of.group,
        "zeros": of.zeros,
        "runs": c.runs,
        "scale_sums": c.scale_sums,
        "even": n % ROWS == 0,
        "latency": c.latency,
        "add_bias": p.bias,
        "alpha": p.alpha,
        "limit": p.limit,
        "up_offset": p.up_offset,
    }
    renames = {**{name: f"{name}_{part}" for name in ("words", "scales", "zeros", "bias")}, **sources}
    used = {"zeros": of.zeros, "bias": p.bias, "ids": c.few, "rows": c.few, "panels": not c.few}
    unused = tuple(name for name, needed in used.items() if not needed)
    renames = {name: source for name, source in renames.items() if name not in unused}
    how: dict[str, Any] = {**hints(c), "pdl": True, "scratch": scratch, "views": views, "renames": renames, "unused": unused}
    return Launch(quantized_moe_kernel, (-(-n // ROWS) * (matrices // parts), places), constants, **how)


def _held(c: Config, places: int) -> int:
    """Matrices between the two products."""
    return 2 * places if c.apart else places


def _sum_plan(p: Problem, device: Device, **more: Any) -> Launch:
    tile_n = next_pow2(p.hidden) if device.is_cpu or p.hidden <= 512 else 512 if p.tokens < 2 * device.sms else 1024
    constants = {"top_k": p.top_k, "cols": p.hidden, "tile_n": tile_n, "loads": 8}
    return Launch(moe_sum_kernel, (p.tokens, -(-p.hidden // tile_n)), constants, num_worker_warps=4, pdl=True, **more)


def _few_plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    # What activates its rows has one pipeline stage (sm_90): blocks that share an SM hide loads.
    second = replace(c, latency=4, occupancy=2 * c.occupancy) if c.apart and c.latency > 4 else c
    rows, h, y = ((p.pairs,), torch.int32), ((_held(c, p.pairs), c.tile_m, p.inter), p.dtype), ((p.pairs, c.tile_m, p.hidden), p.dtype)
    flat = {"rows_of_y": ("y", (p.pairs * c.tile_m, p.hidden), (p.hidden, 1))}
    return (
        _product(p, c, "gate_up", p.pairs, {"rows": rows, "h": h}, {}, x="batch", out="h"),
        _product(p, second, "down", p.pairs, {"y": y}, {}, x="h", out="y"),
        _sum_plan(p, device, views=flat, renames={"y": "rows_of_y"}),
    )


def _many_plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    panels = p.most_panels(c.tile_m)
    size = panels * c.tile_m
    tile = min(next_pow2(p.pairs), 1 << 16 if device.is_cpu else 4096)
    counts = {"counts": ((p.experts,), torch.int32), "ranks": ((p.pairs,), torch.int32)}
    # A width that divides the rows of common models: the parts of a padded tile would be moved like
    # data.
    copied = next_pow2(p.hidden) if device.is_cpu else max(GROUP, min(p.hidden & -p.hidden, 4096))
    sizes = {"tile_m": c.tile_m, "tile_e": next_pow2(p.experts), "tile_k": next_pow2(p.top_k), "tile_n": max(GROUP, copied), "width": MAP_WIDTH}
    lists = {"panels": ((1 + panels,), torch.int32), "rows": ((p.pairs,), torch.int32), "y": ((size, p.hidden), p.dtype)}
    tall = {"panels_of_y": ("y", (panels, c.tile_m, p.hidden), (c.tile_m * p.hidden, p.hidden, 1))}
    return (
        Launch(moe_count_kernel, (p.experts,), {"tile": tile}, num_worker_warps=8 if tile > 1024 else 4, scratch=counts),
        Launch(
            moe_permute_kernel,
            (max(p.tokens, p.experts),),
            {"top_k": p.top_k, "cols": p.hidden, "quantized": False, **sizes},
            num_worker_warps=4,
            scratch=lists,
            renames={"sorted_x": "y"},
            unused=("scale_x",),
        ),
        _product(p, c, "gate_up", panels, {"h": ((_held(c, panels), c.tile_m, p.inter), p.dtype)}, tall, x="panels_of_y", out="h"),
        # The rows of the second product go where those of the first came from.
        _product(p, c, "down", panels, {}, {}, x="h", out="panels_of_y"),
        _sum_plan(p, device),
    )
