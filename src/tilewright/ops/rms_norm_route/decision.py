"""What `rms_norm_route` decides from (Problem), what it decides (Config), and its launch."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ...launch import Cost, Device, Launch, next_pow2
from ...select import Choices, Work
from ..common.routing import choice_of, group_constants
from ..common.rows import stream, threads
from .kernels import rms_norm_route_kernel


@dataclass(frozen=True, slots=True)
class Problem:
    """What a plan may depend on. scale, first_expert: of `inputs` alone."""

    tokens: int
    experts: int
    k: int
    top_k: int
    dtype: torch.dtype = torch.bfloat16
    residual: bool = False
    round_before_weight: bool = False
    sigmoid: bool = False
    bias: bool = False
    normalize: bool = True
    groups: int = 0
    top_groups: int = 0
    router_bias: bool = False
    scale: float = 1.0
    first_expert: int = 0

    def cost(self) -> Cost:
        rows = self.tokens * self.k * (4 if self.residual else 2)
        return Cost((self.experts * self.k + rows) * self.dtype.itemsize + 8 * self.tokens * self.top_k, 2 * self.tokens * self.experts * self.k)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        randn = partial(torch.randn, dtype=self.dtype, device=device)
        return {
            "x": randn(self.tokens, self.k),
            "weight": randn(self.k),
            "router": randn(self.experts, self.k).mul_(2 * self.k**-0.5),
            "eps": 1e-6,
            "round_before_weight": self.round_before_weight,
            "residual": randn(self.tokens, self.k) if self.residual else None,
            "router_bias": randn(self.experts) if self.router_bias else None,
            **choice_of(self, device),
        }


@dataclass(frozen=True, slots=True)
class Config:
    """How the experts are dealt.

    tile_e: experts of a block, a power of two.
    tile_k: elements of a row in one load, a power of two; the whole row and the block's part of the
        router stay in registers.
    num_worker_warps: warps that compute, 4 or 8.
    """

    tile_e: int
    tile_k: int
    num_worker_warps: int | None = None


# Lanes of experts to choose from: of 32 a thread takes a row alone, in 2,150 instructions of 470
# (sm_90, tileiras 13.4).
LEAST_LANES = 64
MOST_KEPT = 128  # elements of the router in a thread's registers
CPU_TILES = ((64, 4096), (4, 64))  # experts of a block and elements of a load, at most
# Experts of a block, warps. Two a block: more blocks only queue at the counter, fewer read longer.
TILES = ((2, 4), (4, 4), (1, 4), (4, 8), (8, 8), (1, 8))


def candidates(p: Problem, device: Device) -> list[Config]:
    """Each tile with the longest load that pads nothing, and with one that pads little and needs
    fewer.
    """
    experts, whole = next_pow2(p.experts), next_pow2(p.k)
    if device.is_cpu:
        return [Config(min(tile_e, experts), min(tile_k, whole)) for tile_e, tile_k in CPU_TILES]
    exact = min(whole, max(256, p.k & -p.k), 2048)
    loads = (exact, *(t for t in (1024, 512) if exact < t < p.k))
    return [Config(tile_e, tile_k, warps) for tile_k in loads for tile_e, warps in TILES]


def legal(p: Problem, c: Config, device: Device) -> bool:
    """Whether a thread's part of the router fits its registers."""
    return device.is_cpu or c.tile_e * p.k <= MOST_KEPT * threads(c) or (c.tile_e, c.num_worker_warps) == (1, 8)


def work(p: Problem, c: Config, device: Device) -> Work:
    """Reading the router, and round trips that follow each other: loads, norm, counter, choice."""
    parts = -(-p.experts // c.tile_e)
    checked = -(-p.k // c.tile_k) if p.k % c.tile_k or p.experts % c.tile_e else 0
    found = stream(
        p,
        c,
        device,
        parts * p.tokens,
        (c.tile_e + 1) * p.k,
        registers=LEAST_REGISTERS + c.tile_e * p.k / threads(c),
        operations=2,
        chain=2 + checked + parts / COUNTED,
    )
    return replace(found, fill=(c.tile_e + 2.0) * p.k * p.dtype.itemsize, out=0.0)  # every block reads its row of x


LEAST_REGISTERS = 64  # of a thread that keeps nothing
COUNTED = 64.0  # blocks that pass one counter in a memory round trip


def family(p: Problem, c: Config) -> str:
    """The tile, and whether its loads are checked."""
    return f"{c.tile_e} {c.num_worker_warps} {'checked' if p.k % c.tile_k else ''}"


CHOICES = Choices("rms_norm_route", candidates, legal, work, family, tie=0.1)
space = CHOICES.space


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """Grid and compile-time constants of one launch."""
    constants = {
        "add": p.residual,
        "biased": p.router_bias,
        "round": p.round_before_weight,
        **group_constants(p),
        "tile_s": next_pow2(p.experts // p.groups) if p.groups > 1 else max(LEAST_LANES, next_pow2(p.experts)),
        "tile_p": next_pow2(p.top_k),
    }
    optional = {"residual": p.residual, "new_residual": p.residual, "router_bias": p.router_bias, "bias": p.bias}
    grid, logits = (-(-p.experts // c.tile_e), p.tokens), ((p.tokens, p.experts), torch.float32)
    return (Launch.of(rms_norm_route_kernel, grid, p, c, constants, optional=optional, pdl=True, scratch={"logits": logits}),)
