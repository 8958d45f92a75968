"""What `quantize_fp8` decides from (Problem), and its launches. Config is that of rows.py."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from cuda.tile import cdiv

from ...launch import Cost, Device, Launch, next_pow2
from ...select import Choices, Work
from ..common import rows
from ..common.fp8 import GROUPS, ROW, SQUARES, TENSOR, Block, largest_code
from ..common.rows import Config as Config
from ..common.scaling import GROUP
from .kernels import quantize_fp8_amax_kernel, quantize_fp8_kernel, quantize_fp8_rows_kernel, quantize_fp8_scaled_kernel

OPERATIONS = 4  # on an element of a row
# Of squares: persistent, latency, load_tma, occupancy, warps.
SQUARE_TILES = (
    *((False, 4, False, 3, 8), (False, 4, False, 2, 8), (False, 4, False, None, 8), (False, 4, False, None, 4)),
    *((True, 2, True, 2, 8), (True, 4, True, 2, 8)),
)
MAX_PARTIAL = 512  # partial maxima of a tensor that every block of the second launch reads


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
            # Some values lie beyond what this scale can hold in e4m3.
            "scale": torch.full((), 4.0 / 448, device=device) if self.given_scale else None,
        }


def candidates(p: Problem, device: Device) -> Iterator[Config]:
    """Of rows, of squares, or of tiles of any shape."""
    if p.by_rows:
        yield from rows.candidates(p, device)
    elif p.block == SQUARES:
        yield from _squares(p, device)
    else:
        yield from rows.tile_candidates(p, device, grouped=p.block == GROUPS)


def _squares(p: Problem, device: Device) -> list[Config]:
    """A tile is one block high, and one wide on a GPU."""
    tile_m, tile_n, wide = min(GROUP, next_pow2(p.rows)), min(GROUP, next_pow2(p.cols)), next_pow2(p.cols)
    if device.is_cpu:
        return [Config(tile_m, wide), Config(tile_m, max(tile_n, wide // 4), persistent=True, occupancy=1)]
    return [Config(tile_m, tile_n, True, many, latency, tma, False, 1, occupancy, warps) for many, latency, tma, occupancy, warps in SQUARE_TILES]


def legal(p: Problem, c: Config, device: Device) -> bool:
    """Whether registers hold a thread's share of a tile."""
    if p.by_rows:
        return rows.legal(p, c, device)
    return rows.tile_legal(p, c, device, most=64 if p.block == GROUPS else 128 if p.block == TENSOR else 256)


def work(p: Problem, c: Config, device: Device) -> Work:
    """Of rows or of tiles; one scale for all takes a second launch."""
    if p.by_rows:
        return rows.work(p, c, device, operations=OPERATIONS)
    first = p.block == TENSOR and not p.given_scale
    # Both forms of fp16 values are held (sm_90).
    held = (1.75 if p.dtype == torch.float16 else 0.95) if p.block == SQUARES else None
    return rows.tile_work(p, c, device, partial=4 * _partials(p, c, device)[0] if first else 0, registers=held)


def family(p: Problem, c: Config) -> str:
    """What shares a scale, and how a block has it."""
    what = "given" if p.given_scale else f"{p.block[0]},{p.block[1]}"
    return f"{what} {rows.family(p, c) if p.by_rows else rows.tile_family(p, c)}"


CHOICES = Choices("quantize_fp8", candidates, legal, work, family, tie=rows.TILE_TIE, bucket=rows.coarse)
space = CHOICES.space


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """Grid and compile-time constants of one launch, or of two."""
    constants: dict[str, Any] = {"largest": largest_code(p.codes), "power_of_two": p.power_of_two_scales}
    blocks = c.blocks(cdiv(p.rows, c.tile_m) if p.by_rows else rows.tiles(p, c), device)
    if p.by_rows:
        return (Launch.of(quantize_fp8_rows_kernel, blocks, p, c, constants),)
    if p.block != TENSOR:
        groups = {"group_m": c.tile_m if p.block == SQUARES else 1, "group_n": min(GROUP, c.tile_n)}
        return (Launch.of(quantize_fp8_kernel, blocks, p, c, constants | groups),)
    constants |= {"given": p.given_scale, "most_partial": MAX_PARTIAL}
    scaled = Launch.of(quantize_fp8_scaled_kernel, blocks, p, c, constants, optional={"partial": not p.given_scale})
    return (scaled,) if p.given_scale else (_amax(p, c, device), scaled)


def _amax(p: Problem, c: Config, device: Device) -> Launch:
    """The launch that finds the largest magnitude, in parts."""
    count, tile_m, tile_n = _partials(p, c, device)
    # The compiler unrolls a loop over small tiles the further, the higher the hint: past the
    # registers at 4 (sm_90).
    latency = c.latency if tile_m * tile_n * p.dtype.itemsize >= 16_384 else 1
    constants = {"cols": p.cols, "tile_m": tile_m, "tile_n": tile_n, "latency": latency, "load_tma": c.load_tma}
    how: dict[str, Any] = {} if device.is_cpu else {"occupancy": 2, "num_worker_warps": 8}
    scratch = {"partial": ((count,), torch.float32)}
    return Launch(quantize_fp8_amax_kernel, (count,), constants, num_ctas=1, scratch=scratch, **how)


def _partials(p: Problem, c: Config, device: Device) -> tuple[int, int, int]:
    """Blocks of the first launch of a tensor, and the tile of its loop.

    A loop that only compares keeps the memory busy by large tiles: eight 16-byte loads a thread,
    fewer where SMs would be left without one.
    """
    tile_m = c.tile_m
    if not device.is_cpu:
        loads = 8
        while loads > 1 and p.rows * p.cols < 2 * device.sms * loads * 4096 // p.dtype.itemsize:
            loads //= 2
        # A block has 256 threads.
        tile_m = min(max(1, loads * 4096 // p.dtype.itemsize // c.tile_n), next_pow2(p.rows))
    return min(cdiv(p.rows, tile_m) * cdiv(p.cols, c.tile_n), 2 * device.sms, MAX_PARTIAL), tile_m, c.tile_n
