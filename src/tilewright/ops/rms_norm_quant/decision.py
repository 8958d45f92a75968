"""What `rms_norm_quant` decides from (Problem), and its launch. Config is that of rows.py."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import cuda.tile as ct
import torch

from ...launch import Cost, Device, Launch, next_pow2
from ...select import Choices, Work
from .. import rms_norm
from ..common import rows
from ..common.fp8 import GROUPS, ROW, Block, largest_code
from ..common.rows import Config as Config
from ..common.scaling import GROUP
from .kernels import rms_norm_quant_kernel

TIE = 0.02  # with rows.TIE the choice is further from the best of its raw times (1.019; 1.018)


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
        norm = rms_norm.Problem(self.rows, self.cols, self.dtype, self.residual, self.round_before_weight, self.weight_offset)
        return norm.inputs(device) | {"block": self.block, "dtype": self.codes, "power_of_two_scales": self.power_of_two_scales}


def candidates(p: Problem, device: Device) -> Iterator[Config]:
    """Those of rows. A tile is no narrower than a group."""
    least = min(GROUP, next_pow2(p.cols)) if p.block == GROUPS else 1
    yield from (replace(c, tile_n=max(c.tile_n, least)) for c in rows.candidates(p, device))
    if not device.is_cpu:
        yield from rows.whole_blocks(((2048, False, 1, 3),))


def legal(p: Problem, c: Config, device: Device) -> bool:
    """That of rows. Blocks that take many rows keep the weight beside each: 15 of 24 timed configs
    that spilled did (H200, 2026-11-30).
    """
    return rows.legal(p, c, device, vectors=lambda p: int(c.persistent))


def work(p: Problem, c: Config, device: Device) -> Work:
    """That of rows. A row is reduced twice, for its root and for its maximum; loads that are
    checked wait for each other.
    """
    return rows.work(p, c, device, chain=1, operations=2 * rows.OPERATIONS, vectors=lambda p: 1)


def family(p: Problem, c: Config) -> str:
    """What shares a scale, and how a block has its rows."""
    return f"{'g' if p.block == GROUPS else 'r'}{rows.family(p, c)}"


CHOICES = Choices("rms_norm_quant", candidates, legal, work, family, tie=TIE, bucket=rows.coarse)
space = CHOICES.space


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """Grid and compile-time constants of one launch."""
    constants = {
        "add": p.residual,
        "round": p.round_before_weight,
        "largest": largest_code(p.codes),
        "power_of_two": p.power_of_two_scales,
        "group_n": 0 if p.block == ROW else min(GROUP, c.tile_n),
    }
    optional = {"residual": p.residual, "new_residual": p.residual}
    return (Launch.of(rms_norm_quant_kernel, c.blocks(ct.cdiv(p.rows, c.tile_m), device), p, c, constants, optional=optional),)
