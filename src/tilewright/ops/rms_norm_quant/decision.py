"""What `rms_norm_quant` decides from (Problem), and the launches that follow. What it decides, Config, is that of rows.py."""

from dataclasses import dataclass, replace
from typing import Any

import cuda.tile as ct
import torch
from torch import Tensor

from ...launch import Cost, Device, Plan, next_pow2
from ..fp8 import GROUPS, ROW, Block, largest_code
from ..rows import Config, row_configs
from ..scaling import GROUP
from .kernels import rms_norm_quant_kernel, rms_norm_quant_reread_kernel

__all__ = ["Config", "Problem", "plan", "space"]


@dataclass(frozen=True, slots=True)
class Problem:
    rows: int
    cols: int
    dtype: torch.dtype
    block: Block = ROW
    codes: torch.dtype = torch.float8_e4m3fn
    power_of_two_scales: bool = False
    residual: bool = False
    round_before_weight: bool = False
    weight_offset: float = 0.0

    def cost(self) -> Cost:
        n = self.rows * self.cols
        moved = 3 * n if self.residual else n
        scales = self.rows * (1 if self.block == ROW else -(-self.cols // GROUP))
        return Cost(size_bytes=(moved + self.cols) * self.dtype.itemsize + n + 4 * scales, flops=7 * n)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=self.dtype, device=device)

        return {
            "x": randn(self.rows, self.cols),
            "weight": randn(self.cols),
            "eps": 1e-6,
            "block": self.block,
            "weight_offset": self.weight_offset,
            "round_before_weight": self.round_before_weight,
            "residual": randn(self.rows, self.cols) if self.residual else None,
            "dtype": self.codes,
            "power_of_two_scales": self.power_of_two_scales,
        }


def space(p: Problem, device: Device) -> list[Config]:
    """Every config worth timing, the untuned default first. A tile is no narrower than a group."""
    if not device.has_fp8:
        return []
    least = min(GROUP, next_pow2(p.cols)) if p.block == GROUPS else 1
    configs = row_configs(p.rows, p.cols, p.dtype.itemsize, device, rereads=True)
    if not device.is_cpu and p.rows > 2 * device.sms and p.dtype.itemsize == 2 and p.cols % 1024 == 0:
        # The issue rate is nearer than for rms_norm, which writes twice the bytes: few threads with 16-byte loads share the two reductions' cost.
        if 2048 <= p.cols <= 8192:
            crowded = device.arch == "sm_90" and p.block == GROUPS and p.cols > 4096 and not p.residual
            configs.insert(0, Config(1, 1024, occupancy=4 if crowded else None, num_worker_warps=4))
            # Rows that share the conversion of the weight and a block's start: 16 and 15 instructions an element in place of 18 (sm_90).
            configs[1:1] = [Config(tile_m, 1024, num_worker_warps=4) for tile_m in (2, 4) if tile_m * p.cols <= 8192]
        elif device.arch == "sm_90" and 8192 < p.cols <= 16_384:
            row = Config(1, 1024, occupancy=3, num_worker_warps=8)
            configs.insert(0, row if p.block == ROW else Config(1, 2048, keep_row=False, occupancy=3, num_worker_warps=8))
    return list(dict.fromkeys(replace(c, tile_n=max(c.tile_n, least)) for c in configs))


def plan(p: Problem, c: Config, device: Device) -> Plan:
    """Grid and compile-time constants of one launch."""
    tiles = ct.cdiv(p.rows, c.tile_m)
    blocks = min(tiles, device.sms * (c.occupancy or 1)) if c.persistent else tiles
    group = 0 if p.block == ROW else min(GROUP, c.tile_n)
    form = (p.residual, p.round_before_weight, largest_code(p.codes), p.power_of_two_scales, group)
    walk = (c.persistent, p.cols, c.tile_m, c.tile_n, c.latency, c.load_tma, c.store_tma)
    kernel = rms_norm_quant_kernel if c.keep_row else rms_norm_quant_reread_kernel
    return Plan(kernel, (blocks,), (*form, *walk), c.num_ctas, c.occupancy, c.num_worker_warps)
