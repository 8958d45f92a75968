"""What `silu_mul_quant` decides from (Problem), and the launches that follow. What it decides, Config, is that of rows.py."""

from dataclasses import dataclass
from typing import Any

import torch
from cuda.tile import cdiv
from torch import Tensor

from ...launch import Cost, Device, Plan, next_pow2
from ..fp8 import GROUPS, ROW, Block, largest_code
from ..rows import Config, row_configs
from ..scaling import GROUP
from .kernels import silu_mul_quant_kernel, silu_mul_quant_reread_kernel, silu_mul_quant_rows_kernel

__all__ = ["Config", "Problem", "plan", "space"]

MAX_KEPT = 64  # fp32 results that a thread may hold of its row


@dataclass(frozen=True, slots=True)
class Problem:
    rows: int
    cols: int
    dtype: torch.dtype
    block: Block = ROW
    codes: torch.dtype = torch.float8_e4m3fn
    power_of_two_scales: bool = False
    fused: bool = False
    gelu_tanh: bool = False

    def cost(self) -> Cost:
        n = self.rows * self.cols
        scales = self.rows * (1 if self.block == ROW else cdiv(self.cols, GROUP))
        return Cost(size_bytes=n * (2 * self.dtype.itemsize + 1) + 4 * scales, flops=8 * n)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        def randn(cols: int) -> Tensor:
            return 2 * torch.randn(self.rows, cols, dtype=self.dtype, device=device)

        halves = {"gate": randn(2 * self.cols)} if self.fused else {"gate": randn(self.cols), "up": randn(self.cols)}
        form = {"block": self.block, "dtype": self.codes, "power_of_two_scales": self.power_of_two_scales}
        return {**halves, "gelu_tanh": self.gelu_tanh, **form}


def space(p: Problem, device: Device) -> list[Config]:
    """Every config worth timing, the untuned default first."""
    if not device.has_fp8:
        return []
    return _row_configs(p, device) if p.block == ROW else _group_configs(p, device)


def _row_configs(p: Problem, device: Device) -> list[Config]:
    """Rows kept in registers as fp32 results; or computed twice, from gate and up that come from L2 the second time."""
    if device.is_cpu:
        return row_configs(p.rows, p.cols, 4, device, rereads=True)
    configs = []
    if device.arch == "sm_90" and 2048 < p.cols <= 32_768:  # H200, 2026-11-21: registers for as many blocks an SM as keep its loads busy
        if p.cols <= 8192:
            configs.append(Config(1, 1024, keep_row=False, num_worker_warps=8))
        elif p.cols <= 20_480:
            configs.append(Config(1, 2048, occupancy=3 if p.cols <= 16_384 else 2, num_worker_warps=8))
        else:
            configs.append(Config(1, 2048, num_ctas=2, occupancy=2, num_worker_warps=8))
    for tile_n in (1024, 2048, 4096):
        padded = cdiv(p.cols, tile_n) * tile_n
        if padded <= MAX_KEPT * 256 and padded < 2 * p.cols:
            configs.append(Config(1, tile_n, num_worker_warps=8))
    configs += row_configs(p.rows, p.cols, 4, device, rereads=True)
    if p.cols > 4096:
        configs += [Config(1, tile_n, keep_row=False, num_worker_warps=8) for tile_n in (2048, 4096)]
    return list(dict.fromkeys(configs))


def _group_configs(p: Problem, device: Device) -> list[Config]:
    """Tiles of whole groups, of which a thread has some 16-byte loads of each operand."""
    wide = next_pow2(p.cols)
    least = min(GROUP, wide)
    if device.is_cpu:
        tile_m = max(1, min(next_pow2(p.rows), (1 << 20) // wide))
        return list(dict.fromkeys((Config(tile_m, wide), Config(max(1, tile_m // 4), max(least, wide // 4), persistent=True, occupancy=1))))
    vector = 16 // p.dtype.itemsize
    few = p.rows * p.cols < device.sms * 512 * vector  # no SM would get four warps' worth
    sizes = [(1, 4), (1, 8), (2, 4)] if few else [(2, 4), (1, 4), (2, 8), (1, 8), (4, 8)]
    configs = []
    for loads, warps in sizes:
        size = loads * 32 * warps * vector
        fitting = min(wide, max(size, least))
        while fitting > max(least, 256) and cdiv(p.cols, fitting) * fitting > p.cols * 9 / 8:
            fitting //= 2
        # Eight rows and more: their scales fill whole 32-byte sectors.
        for tile_n in dict.fromkeys((max(least, min(fitting, size // 8)), least, fitting)):
            configs.append(Config(min(max(1, size // tile_n), next_pow2(p.rows)), tile_n, num_worker_warps=warps))
    return list(dict.fromkeys(configs))


def plan(p: Problem, c: Config, device: Device) -> Plan:
    """Grid and compile-time constants of one launch."""
    form = (p.gelu_tanh, largest_code(p.codes), p.power_of_two_scales)
    walk = (c.persistent, p.cols, c.tile_m, c.tile_n, c.latency, c.load_tma, c.store_tma)
    tiles = cdiv(p.rows, c.tile_m) * (1 if p.block == ROW else cdiv(p.cols, c.tile_n))
    blocks = min(tiles, device.sms * (c.occupancy or 1)) if c.persistent else tiles
    hints = (c.num_ctas, c.occupancy, c.num_worker_warps)
    if p.block == GROUPS:
        return Plan(silu_mul_quant_kernel, (blocks,), (*form, min(GROUP, c.tile_n), *walk), *hints)
    return Plan(silu_mul_quant_rows_kernel if c.keep_row else silu_mul_quant_reread_kernel, (blocks,), (*form, *walk), *hints)
