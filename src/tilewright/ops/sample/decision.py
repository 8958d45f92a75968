"""What a launch of `sample` may depend on, and what it comes to."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...launch import Cost, Device, Launch, next_pow2
from ...select import Choices, Work
from ..common.rows import CLUSTER_ARCHS, MOST_BLOCKS, stream
from .kernels import sample_kernel

LEAST_COLUMNS = 2048  # of a block of a cluster
PHILOX = 45  # operations on an element, once: with a logarithm
CUTS = 10  # bits of a threshold that are left when its power of two is known and logits lie apart
REGISTERS = 120  # of a thread, where two blocks share an SM; alone most forms take 130 to 250 (sm_90)
WAIT = 3.0  # for the load of a tile, beside other waits


@dataclass(frozen=True, slots=True)
class Problem:
    """What a plan may depend on. per_row: of inputs() alone, one of each parameter a row, and one
    row greedy.
    """

    rows: int
    cols: int
    dtype: torch.dtype
    temperature: bool = True
    top_k: bool = False
    top_p: bool = False
    offset: bool = True
    per_row: bool = False
    min_p: bool = False

    def cost(self) -> Cost:
        return Cost(size_bytes=self.rows * (self.cols * self.dtype.itemsize + 8), flops=60 * self.rows * self.cols)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        def values(one: float, low: float, high: float, dtype: torch.dtype) -> Tensor:
            if not self.per_row:
                return torch.tensor(one, dtype=dtype, device=device)
            return torch.linspace(low, high, self.rows, device=device).to(dtype)

        return {
            "logits": 3 * torch.randn(self.rows, self.cols, dtype=self.dtype, device=device),
            "seed": torch.tensor(0x0123_4567_89AB_CDEF, device=device),
            "offset": torch.tensor(2**32 - 5, device=device) if self.offset else None,
            "temperature": values(0.7, 0.0, 1.5, torch.float32) if self.temperature else None,
            "top_k": values(50, 0, self.cols + 1, torch.int32) if self.top_k else None,
            "top_p": values(0.9, 0.0, 1.0, torch.float32) if self.top_p else None,
            "min_p": values(0.05, 0.0, 1.0, torch.float32) if self.min_p else None,
        }


@dataclass(frozen=True, slots=True)
class Config:
    """How a row is tiled.

    tile_n: columns of a tile; a power of two, at least 4.
    ways: cuts that a pass of a search tries.
    latency: prefetch hint of the loads, 1 to 10.
    num_ctas: blocks of a cluster that share the row.
    num_worker_warps: warps that compute, 4 or 8.
    """

    tile_n: int
    ways: int = 4
    latency: int = 4
    num_ctas: int = 1
    num_worker_warps: int | None = None


def candidates(p: Problem, device: Device) -> Iterator[Config]:
    whole = max(4, next_pow2(p.cols))
    if device.is_cpu:
        yield from (Config(whole, 8), Config(max(4, whole // 8), 3))
        return
    # The compiler unrolls loops by the latency: more cuts or a higher hint spill (sm_90).
    loads = ((1, 4, 1), (1, 8, 1), (1, 4, 2)) if p.top_k or p.top_p else ((1, 1, 4), (2, 1, 4))
    wanted = math.log2(2 * device.sms / p.rows)  # two clusters share their SMs
    clusters = [n for n in (8, 4, 2, 1) if n == 1 or (device.arch in CLUSTER_ARCHS and whole >= LEAST_COLUMNS * n)]
    for num_ctas in sorted(clusters, key=lambda n: abs(wanted - math.log2(n)))[:3]:
        for vectors, ways, latency in loads:
            yield Config(min(whole, 256 * num_ctas * vectors * 16 // p.dtype.itemsize), ways, latency, num_ctas, 8)


def legal(p: Problem, c: Config, device: Device) -> bool:
    return c.num_ctas == 1 or next_pow2(p.cols) >= LEAST_COLUMNS * c.num_ctas


def work(p: Problem, c: Config, device: Device) -> Work:
    """Two passes over a row, and those of each search, which end in sums over the cluster; every
    tile waits for its load.
    """
    search = 3 + CUTS / math.log2(c.ways + 1) if c.ways > 1 else 0.0
    passes = 2 + search * (p.top_k + p.top_p) + p.top_p
    tiles = -(-p.cols // c.tile_n)
    return stream(
        p,
        c,
        device,
        p.rows,
        c.tile_n,
        registers=REGISTERS,
        aligned=p.cols * p.dtype.itemsize,
        operations=8 + 3 * c.ways + PHILOX / passes,
        reads=1 / tiles,
        chain=passes * (1 + c.num_ctas / 8),
        steps=passes * tiles,
        serial=WAIT / c.latency**0.5,
    )


def family(p: Problem, c: Config) -> str:
    return f"{p.top_k + p.top_p} {c.ways} {c.num_ctas}"


CHOICES = Choices("sample", candidates, legal, work, family, tie=0.08)
space = CHOICES.space


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """Grid and compile-time constants of one launch; blocks take several rows where a grid can't
    have one for each.
    """
    optional = {name: getattr(p, name) for name in ("offset", "temperature", "top_k", "top_p", "min_p")}
    constants = {f"has_{name}": there for name, there in optional.items()} | {"persistent": p.rows > MOST_BLOCKS[0]}
    # low bits of a float that the dtype does not have
    constants["shift"] = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}[p.dtype]
    pdl = p.rows <= MOST_BLOCKS[0]
    # Clusters do not fill every SM: from half a wave on, some must share one.
    occupancy = 2 if 2 * p.rows * c.num_ctas > device.sms else None
    return (Launch.of(sample_kernel, (min(p.rows, MOST_BLOCKS[0]),), p, c, constants, optional=optional, occupancy=occupancy, pdl=pdl),)


DECISION = CHOICES.decision(Problem, plan, ("logits", "seed", "offset", "temperature", "top_k", "top_p", "min_p", "out"))
