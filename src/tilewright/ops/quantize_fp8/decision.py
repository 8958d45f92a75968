"""What `quantize_fp8` decides from (Problem), and the launches that follow. What it decides, Config, is that of rows.py."""

from dataclasses import dataclass
from typing import Any

import torch
from cuda.tile import cdiv

from ...launch import Cost, Device, Plan, next_pow2
from ..fp8 import GROUPS, ROW, SQUARES, TENSOR, Block, largest_code
from ..rows import Config, row_configs
from ..scaling import GROUP
from .kernels import quantize_fp8_amax_kernel, quantize_fp8_kernel, quantize_fp8_reread_kernel, quantize_fp8_rows_kernel, quantize_fp8_scaled_kernel

__all__ = ["Config", "Problem", "plan", "space"]

MAX_PARTS = 512  # partial maxima of a tensor that every block of the second launch reads


@dataclass(frozen=True, slots=True)
class Problem:
    rows: int
    cols: int
    dtype: torch.dtype
    block: Block = TENSOR
    codes: torch.dtype = torch.float8_e4m3fn
    power_of_two_scales: bool = False
    given_scale: bool = False

    @property
    def by_rows(self) -> bool:
        """Whether a group is a whole row, as is a tensor of one."""
        return self.block == ROW or (self.block == TENSOR and self.rows == 1 and not self.given_scale)

    def cost(self) -> Cost:
        n = self.rows * self.cols
        reads = 2 if self.block == TENSOR and not self.given_scale and not self.by_rows else 1
        high, wide = self.block[0] or self.rows, self.block[1] or self.cols
        scales = cdiv(self.rows, high) * cdiv(self.cols, wide)
        return Cost(size_bytes=n * (reads * self.dtype.itemsize + 1) + 4 * scales, flops=3 * n)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        x = torch.randn(self.rows, self.cols, device=device) * torch.exp2(2 * torch.randn(self.rows, 1, device=device))
        return {
            "x": x.to(self.dtype),
            "block": self.block,
            "dtype": self.codes,
            "power_of_two_scales": self.power_of_two_scales,
            # some values lie beyond what this scale can hold in e4m3
            "scale": torch.full((), 4.0 / 448, device=device) if self.given_scale else None,
        }


def space(p: Problem, device: Device) -> list[Config]:
    """Every config worth timing, the untuned default first."""
    if not device.has_fp8:
        return []
    if p.by_rows:
        return row_configs(p.rows, p.cols, p.dtype.itemsize, device, rereads=True)
    if p.block == SQUARES:
        return _square_configs(p, device)
    if device.is_cpu:
        tile_n = max(next_pow2(p.cols), 1)
        tile_m = max(1, min(next_pow2(p.rows), (1 << 20) // tile_n))
        quarter = max(tile_n // 4, min(GROUP, tile_n))
        return list(dict.fromkeys((Config(tile_m, tile_n), Config(max(1, tile_m // 4), quarter, persistent=True, occupancy=1))))
    return _flat_configs(p, device)


def _square_configs(p: Problem, device: Device) -> list[Config]:
    """A tile is one block high; registers allow one or, of 16-bit values, two blocks side by side."""
    tile_m, tile_n = min(GROUP, next_pow2(p.rows)), min(GROUP, next_pow2(p.cols))
    if device.is_cpu:
        wide = next_pow2(p.cols)
        return list(dict.fromkeys((Config(tile_m, wide), Config(tile_m, max(tile_n, wide // 4), persistent=True, occupancy=1))))
    configs = [Config(tile_m, tile_n, num_worker_warps=8), Config(tile_m, tile_n, num_worker_warps=8, occupancy=3)]
    if p.dtype.itemsize == 2:
        configs.append(Config(tile_m, tile_n, num_worker_warps=4))
    if cdiv(p.rows, GROUP) * cdiv(p.cols, GROUP) > 2 * device.sms:
        tma = device.arch != "sm_80"
        configs += [Config(tile_m, tile_n, True, True, latency, tma, False, 1, 2, 8) for latency in (2, 4)]
    return configs


def _flat_configs(p: Problem, device: Device) -> list[Config]:
    """Tiles of any shape, of which a thread has some 16-byte loads."""
    vector = 16 // p.dtype.itemsize
    few = p.rows * p.cols < device.sms * 512 * vector  # no SM would get four warps' worth
    sizes = [(1, 4), (1, 8), (2, 4)] if few else [(2, 4), (1, 4), (4, 4), (2, 8), (4, 8), (1, 8)]
    if p.block == TENSOR and not p.given_scale and not few:
        sizes = [(4, 8), (8, 8), (4, 4), (2, 8), (2, 4)]  # every block reads the partial maxima: few blocks
    configs = []
    for loads, warps in sizes:
        size = loads * 32 * warps * vector
        for tile_n in _widths(p, size):
            configs.append(Config(min(max(1, size // tile_n), next_pow2(p.rows)), tile_n, num_worker_warps=warps))
    for occupancy, latency, warps in ((8, 2, 4), (4, 2, 8)):
        size = 2 * 32 * warps * vector
        tile_n = _widths(p, size)[0]
        tile_m = max(1, size // tile_n)
        if cdiv(p.rows, tile_m) * cdiv(p.cols, tile_n) > device.sms * occupancy:
            configs.append(Config(tile_m, tile_n, True, True, latency, device.arch != "sm_80", occupancy=occupancy, num_worker_warps=warps))
    return list(dict.fromkeys(configs))


def _widths(p: Problem, most: int) -> list[int]:
    """Widths of a tile, best first: no less than a group, no wider than the tile, wasting little."""
    wide = next_pow2(p.cols)
    least = min(GROUP, wide)
    fitting = min(wide, max(most, least))
    while fitting > max(least, 256) and cdiv(p.cols, fitting) * fitting > p.cols * 9 / 8:
        fitting //= 2
    divisor = min(p.cols & -p.cols, fitting)
    if p.block == GROUPS:
        # Eight rows and more: their scales fill whole 32-byte sectors.
        narrow = max(least, min(fitting, most // 8))
        return list(dict.fromkeys((narrow, least, fitting)))
    return [divisor] if divisor in (fitting, *range(128, fitting)) else [fitting]


def plan(p: Problem, c: Config, device: Device) -> Plan:
    """Grid and compile-time constants of one launch, or of two."""
    hints = (c.num_ctas, c.occupancy, c.num_worker_warps)
    walk = (c.persistent, p.cols, c.tile_m, c.tile_n, c.latency, c.load_tma, c.store_tma)
    form = (largest_code(p.codes), p.power_of_two_scales)
    if p.by_rows:
        tiles = cdiv(p.rows, c.tile_m)
        blocks = min(tiles, device.sms * (c.occupancy or 1)) if c.persistent else tiles
        return Plan(quantize_fp8_rows_kernel if c.keep_row else quantize_fp8_reread_kernel, (blocks,), (*form, *walk), *hints)
    tiles = cdiv(p.rows, c.tile_m) * cdiv(p.cols, c.tile_n)
    blocks = min(tiles, device.sms * (c.occupancy or 1)) if c.persistent else tiles
    if p.block != TENSOR:
        groups = (c.tile_m if p.block == SQUARES else 1, min(GROUP, c.tile_n))
        return Plan(quantize_fp8_kernel, (blocks,), (*form, *groups, *walk), *hints)
    scaled = Plan(quantize_fp8_scaled_kernel, (blocks,), (*form, p.given_scale, MAX_PARTS, *walk), *hints)
    if p.given_scale:
        return scaled
    tile_m, tile_n = _amax_tile(p, c, device)
    parts = min(cdiv(p.rows, tile_m) * cdiv(p.cols, tile_n), 2 * device.sms, MAX_PARTS)
    workspace = (((parts,), torch.float32),)
    # The compiler unrolls a loop over small tiles the further, the higher the hint: past the registers at 4 (sm_90).
    latency = c.latency if tile_m * tile_n * p.dtype.itemsize >= 16_384 else 1
    amax = (p.cols, tile_m, tile_n, latency, c.load_tma)
    return Plan(quantize_fp8_amax_kernel, (parts,), amax, 1, None if device.is_cpu else 2, None if device.is_cpu else 8, workspace, scaled)


def _amax_tile(p: Problem, c: Config, device: Device) -> tuple[int, int]:
    """A loop that only compares keeps the memory busy by large tiles: eight 16-byte loads a thread, fewer where SMs would be left without one."""
    if device.is_cpu:
        return c.tile_m, c.tile_n
    loads = 8
    while loads > 1 and p.rows * p.cols < 2 * device.sms * loads * 4096 // p.dtype.itemsize:
        loads //= 2
    size = loads * 4096 // p.dtype.itemsize  # 256 threads
    return min(max(1, size // c.tile_n), next_pow2(p.rows)), c.tile_n
