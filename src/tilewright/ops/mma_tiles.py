"""Tiles of a matrix product that compile without spilling, and about how long they take; shared by bmm and grouped_gemm."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch

from ..launch import Device, next_pow2
from .scaling import FP8, Scaling

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class Tile:
    """tile_m, tile_n, tile_k of one step; compiler hints; whether blocks may walk over such tiles (else the compiler serialises their MMAs).

    weights_first: the MMA's first operand is the tile of b, and the accumulator is transposed.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    num_ctas: int | None = None
    occupancy: int = 1
    num_worker_warps: int | None = None
    latency: int = 5
    walks: bool = True
    weights_first: bool = False


def config_of(config: Callable[..., C], tile: Tile, **choices: Any) -> C:
    """A Config of bmm or grouped_gemm: the tile and its hints, and what is chosen beside or instead of them."""
    given = {field.name: getattr(tile, field.name) for field in fields(tile) if field.name != "walks"}
    return config(**{**given, **choices})


def loads_wide(device: Device, dtype: torch.dtype, *lengths: int) -> bool:
    """Whether rows of such lengths can be read by TMA (or 16 bytes at a time): else every element passes through registers by itself."""
    unit = 16 // dtype.itemsize if device.arch == "sm_90" else 16
    return all(length % unit == 0 for length in lengths)


def tiles_for(device: Device, dtype: torch.dtype, scaling: Scaling, *, k_major: bool, wide_loads: bool, fast: bool = False) -> tuple[Tile, ...]:
    """Every tile worth timing. k_major: k is the last axis of both operands. wide_loads: all their rows are multiples of 16 bytes.

    fast: sums of 8-bit products stay in the tensor core (`scaling.fast_sum`), which leaves registers for larger tiles.
    """
    fp8 = dtype in FP8
    if not wide_loads:
        return _NARROW_FP8 if fp8 else _NARROW
    if fp8 and not k_major:  # 8-bit operands reach the tensor cores with k last: others are transposed on the way
        return _TURNED_FP8
    if device.arch == "sm_90":
        if scaling is Scaling.BLOCK:
            return _HOPPER_BLOCK
        return (_HOPPER_FP8_ROW if scaling is Scaling.ROW else _HOPPER_FP8_FAST) if fp8 and fast else _HOPPER_FP8 if fp8 else _HOPPER
    if device.arch in ("sm_100", "sm_103"):
        return _BLACKWELL_FP8 if fp8 else _BLACKWELL
    if device.arch == "sm_80":
        return _SMALL_FP8 if fp8 else _AMPERE
    return _SMALL_FP8 if fp8 else _SMALL


def unranked_tiles(device: Device, dtype: torch.dtype, *, wide_loads: bool) -> tuple[Tile, ...]:
    """Tiles whose rate nobody has measured yet: for the tuner, behind the others.

    Two blocks an SM cover each other's start and end, which short k makes worth it; 64 rows pad the end of a group less.
    """
    if device.arch != "sm_90" or dtype in FP8 or not wide_loads:
        return ()
    return Tile(128, 128, 64, 1, 2, 4, 2), Tile(64, 256, 64, 1, 1, 4, 4)


def few_rows_tiles(device: Device, dtype: torch.dtype, scaling: Scaling, rows: int, k: int, *, k_major: bool, wide_loads: bool) -> tuple[Tile, ...]:
    """Tiles for a product bound by reading b: no more rows of a than there are, beside b's columns on the long side of the MMA.

    Of a tile of 64 rows, 20 of which count, a block reads as much as of b: 80 % of the memory's rate (grouped_gemm, H200, 2026-11-21).
    """
    if device.arch != "sm_90" or rows > 32 or not wide_loads or (dtype in FP8 and not k_major):
        return ()
    tiles = _HOPPER_FEW_BLOCK if scaling is Scaling.BLOCK else _HOPPER_FEW
    bytes_each = dtype.itemsize if scaling is not Scaling.BLOCK else 2  # there a step is a group of scales, whatever its bytes
    clipped = [(n, min(deep * 2 // bytes_each, max(64, next_pow2(k))), occupancy, warps) for n, deep, occupancy, warps in tiles]
    return tuple(Tile(max(8, next_pow2(rows)), *c[:2], 1, *c[2:], 8, weights_first=True) for c in dict.fromkeys(clipped))


def cpu_tiles(m: int, n: int, k: int, scaling: Scaling) -> tuple[Tile, ...]:
    """Few, large tiles: each step of the interpreter is a numpy call."""
    deep = 128 if scaling is Scaling.BLOCK else next_pow2(min(k, 2048))
    whole = Tile(next_pow2(min(m, 512)), next_pow2(min(n, 512)), deep)
    return whole, Tile(min(whole.tile_m, 32), min(whole.tile_n, 64), min(deep, 64))


def run_us(tile: Tile, tiles: int, k: int, dtype: torch.dtype, scaling: Scaling, device: Device) -> float:
    """Time of so many tiles: rounds of them at the rate of their MMAs, and what a tile costs beside its steps.

    The rate of a 128x128 tile of bf16 is the device's; the others relative to it, as measured for matmul on an H200 (2026-11-21, notes/LOG.md).
    """
    ctas = tile.num_ctas or 1
    area = tile.tile_m * tile.tile_n // ctas
    rate = 0.98 if area * ctas == 1 << 16 else 0.96 if area > 1 << 14 else 1.0
    if area < 1 << 14:
        rate = 0.8 if area == 1 << 13 else 0.6 if area == 1 << 12 else 0.35
    if tile.tile_m == 64 and tile.num_worker_warps == 8:
        rate = 0.42
    if scaling is Scaling.BLOCK and area < 1 << 14:
        rate = 0.5
    elif dtype in FP8 and scaling is not Scaling.BLOCK and (tile.tile_m, tile.tile_n, ctas) == (128, 256, 1):
        rate = 1.05
    if dtype in FP8:
        rate *= 1.5 if scaling is Scaling.BLOCK else 1.75
    flops_per_us = device.tflops * 1e6 / device.sms * rate * ctas / tile.occupancy
    rounds = -(-tiles // max(1, device.sms * tile.occupancy // ctas))
    overhead_us = 1.2 + 0.9 * (ctas > 1) + 0.9 * (area > 1 << 14)
    return rounds * (2 * tile.tile_m * tile.tile_n * k / flops_per_us + overhead_us)


_HOPPER = (
    Tile(128, 128, 64, 1, 1, 4),
    Tile(256, 256, 64, 2, 1, 8),
    Tile(128, 256, 64, 1, 1, 8, 4),
    Tile(256, 128, 64, 1, 1, 8),
    Tile(128, 128, 64, 1, 1, 8, walks=False),
    Tile(64, 256, 64, 1, 1, 8),
    Tile(64, 128, 64, 1, 1, 4),
    Tile(64, 128, 128, 1, 1, 8, 8),
    Tile(64, 64, 128, 1, 1, 4, 8),
    Tile(64, 32, 256, 1, 1, 4, 8),
)
# tile_n, tile_k of 16-bit numbers, occupancy, warps
_HOPPER_FEW = ((64, 256, 2, 4), (128, 256, 1, 8), (64, 512, 1, 4), (128, 128, 2, 8), (128, 128, 4, 4), (64, 128, 4, 4), (256, 128, 2, 8))
_HOPPER_FEW_BLOCK = ((64, 128, 4, 4), (64, 128, 2, 4), (128, 128, 1, 8))
_HOPPER_FP8 = (
    Tile(128, 128, 128, 1, 1, 8, 6),
    Tile(256, 128, 128, 2, 1, 8, 6),
    Tile(128, 128, 128, 1, 1, 8, 8),
    Tile(64, 256, 128, 1, 1, 8, 6),
    Tile(64, 128, 128, 1, 1, 4, 6),
    Tile(64, 128, 128, 1, 2, 4, 6),
    Tile(128, 64, 128, 1, 1, 8, 6),
    Tile(64, 64, 256, 1, 1, 4, 8),
)
_HOPPER_FP8_LOW = (  # walking over the first three, the loop around the loop spills
    Tile(64, 256, 128, 1, 1, 8, 6, walks=False),
    Tile(64, 128, 128, 1, 1, 4, 6, walks=False),
    Tile(64, 128, 128, 1, 2, 4, 6, walks=False),
    Tile(128, 64, 128, 1, 1, 8, 6),
    Tile(64, 64, 256, 1, 1, 4, 8),
)
_HOPPER_FP8_FAST = (Tile(128, 256, 128, 1, 1, 8, 6), Tile(128, 128, 128, 1, 1, 4, 6), Tile(256, 128, 128, 1, 1, 8, 4), *_HOPPER_FP8_LOW)
# On 4 warps the scales of a tile's rows spill.
_HOPPER_FP8_ROW = (Tile(128, 256, 128, 1, 1, 8, 6), Tile(128, 128, 128, 1, 1, 8, 6), Tile(256, 128, 128, 1, 1, 8, 4), *_HOPPER_FP8_LOW)
# Latency 8 keeps six steps in flight; any other leaves two, spills, or waits for each MMA (ops/scaling.py).
_HOPPER_BLOCK = (
    Tile(128, 128, 128, 1, 1, 8, 8),
    Tile(256, 128, 128, 2, 1, 8, 8),
    Tile(64, 128, 128, 1, 1, 4, 8),
    Tile(128, 64, 128, 1, 1, 8, 8),
)
_BLACKWELL = (
    Tile(256, 256, 64, 2),
    Tile(128, 256, 64),
    Tile(256, 128, 64, 2),
    Tile(128, 128, 64),
    Tile(128, 128, 128),
    Tile(128, 64, 128),
)
_BLACKWELL_FP8 = (Tile(128, 128, 128), Tile(256, 128, 128, 2), Tile(128, 64, 128), Tile(64, 128, 128, walks=False))
# Walking over these, the loop around the loop spills on one architecture or another.
_AMPERE = (
    Tile(128, 128, 32, latency=3),
    Tile(64, 128, 64, occupancy=2, latency=3),
    Tile(128, 64, 64, occupancy=2, latency=3),
    Tile(64, 64, 64, occupancy=2, latency=3, walks=False),
)
_SMALL = (
    Tile(128, 128, 32, latency=3, walks=False),
    Tile(64, 128, 64, occupancy=2, latency=3, walks=False),
    Tile(128, 64, 64, occupancy=2, latency=3),
    Tile(64, 64, 64, occupancy=2, latency=3),
)
_SMALL_FP8 = (
    Tile(64, 128, 128, latency=3, walks=False),
    Tile(64, 64, 128, occupancy=2, latency=3, walks=False),
    Tile(128, 64, 128, latency=3, walks=False),
)
_TURNED_FP8 = (Tile(64, 64, 64, latency=3), Tile(64, 32, 64, latency=3))
_NARROW = (Tile(64, 64, 32, latency=1), Tile(32, 32, 64, latency=1))
_NARROW_FP8 = (Tile(64, 64, 32, latency=1), Tile(32, 32, 64, latency=1))
