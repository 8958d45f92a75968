"""What a launch of `sample` may depend on, and what it comes to."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...launch import Cost, Device, Plan, next_pow2
from ..rows import CLUSTER_ARCHS
from .kernel import sample_kernel


@dataclass(frozen=True, slots=True)
class Problem:
    """What a plan may depend on. per_row: of inputs() alone, one of each parameter a row, and one row greedy."""

    rows: int
    cols: int
    dtype: torch.dtype
    temperature: bool = True
    top_k: bool = False
    top_p: bool = False
    offset: bool = True
    per_row: bool = False

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
        }


@dataclass(frozen=True, slots=True)
class Config:
    """How a row is walked.

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


def space(p: Problem, device: Device) -> list[Config]:
    """Every config worth timing, the untuned default first."""
    whole = max(4, next_pow2(p.cols))
    if device.is_cpu:
        return list(dict.fromkeys((Config(whole, 8), Config(max(4, whole // 8), 3))))
    ctas = [1]
    if device.arch in CLUSTER_ARCHS:
        # As many SMs for a row as there are rows to go round, and no more than its columns keep busy.
        most = max(1, min(8, next_pow2(device.sms // p.rows + 1) // 2, whole // 2048))
        ctas = list(dict.fromkeys((most, max(1, most // 2), min(8, 2 * most))))
    searches = p.top_k or p.top_p
    configs = []
    for num_ctas in ctas:
        # The compiler unrolls loops by the latency: more cuts or a higher hint spill (sm_90).
        for loads, ways, latency in ((1, 8, 1), (1, 4, 1), (1, 4, 2)) if searches else ((1, 1, 4), (2, 1, 4)):
            tile_n = min(whole, 256 * num_ctas * loads * 16 // p.dtype.itemsize)
            configs.append(Config(tile_n, ways, latency, num_ctas, 8))
    return list(dict.fromkeys(configs))


def plan(p: Problem, c: Config, device: Device) -> Plan:
    """Grid and compile-time constants of one launch."""
    shift = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}[p.dtype]  # low bits of a float that the dtype does not have
    constants = (p.offset, p.temperature, p.top_k, p.top_p, p.cols, shift, c.tile_n, c.ways, c.latency)
    return Plan(sample_kernel, (p.rows,), constants, c.num_ctas, None, c.num_worker_warps, early=True)
