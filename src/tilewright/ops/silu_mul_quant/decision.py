"""What `silu_mul_quant` decides from (Problem), and its launch. Config is that of rows.py."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from cuda.tile import cdiv

from ...launch import Cost, Device, Launch
from ...select import Choices, Work
from .. import silu_mul
from ..common import rows
from ..common.fp8 import ROW, Block, largest_code
from ..common.rows import Config as Config
from ..common.scaling import GROUP
from .kernels import silu_mul_quant_kernel, silu_mul_quant_rows_kernel

# Of whole rows beside those of rows.py, as whole_blocks takes them. The compiler gives registers to
# as many blocks as keep the loads of an SM busy.
ROWS = (
    (1024, False, 1, None),
    (2048, True, 1, 3),
    (2048, True, 1, 2),
    (2048, True, 2, 2),
    (1024, True, 1, None),
    (2048, True, 1, None),
    (4096, True, 1, None),
)
MOST_KEPT = 104  # fp32 results of a thread


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

    @property
    def by_rows(self) -> bool:
        """Whether a group is a whole row."""
        return self.block == ROW

    def cost(self) -> Cost:
        n = self.rows * self.cols
        scales = self.rows * (1 if self.block == ROW else cdiv(self.cols, GROUP))
        return Cost(size_bytes=n * (2 * self.dtype.itemsize + 1) + 4 * scales, flops=8 * n)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        active = silu_mul.Problem(self.rows, self.cols, self.dtype, self.fused, self.gelu_tanh)
        return active.inputs(device) | {"block": self.block, "dtype": self.codes, "power_of_two_scales": self.power_of_two_scales}


def candidates(p: Problem, device: Device) -> Iterator[Config]:
    """Of rows, or of tiles of any shape."""
    if not p.by_rows:
        yield from rows.tile_candidates(p, device, grouped=True)
        return
    yield from rows.candidates(_results(p), device)
    if not device.is_cpu:
        yield from rows.whole_blocks(ROWS)


def _results(p: Problem) -> Problem:
    """What a block keeps of its rows: results in fp32."""
    return replace(p, dtype=torch.float32)


def legal(p: Problem, c: Config, device: Device) -> bool:
    """Whether registers hold a thread's share of a tile."""
    if c.num_ctas > 1 and device.arch not in rows.CLUSTER_ARCHS:
        return False
    if not p.by_rows:
        return rows.tile_legal(p, c, device)
    kept = c.kept(p.cols)
    fits = kept <= MOST_KEPT and (c.occupancy or 1) * c.threads * (rows.OWN_REGISTERS + kept) <= rows.REGISTERS
    return rows.legal(_results(p), c, device) or (fits and c.tile_m == 1 and not c.persistent and c.padded(p.cols) < 2 * p.cols)


def work(p: Problem, c: Config, device: Device) -> Work:
    """Of tiles; or of rows in fp32, with the bytes of gate, up and the codes."""
    if not p.by_rows:
        return rows.tile_work(p, c, device, operands=2)
    found, share = rows.work(_results(p), c, device), p.cost().size_bytes / _results(p).cost().size_bytes
    return replace(found, dram=found.dram * share, fill=found.fill * share)


def family(p: Problem, c: Config) -> str:
    """How a block has its tile."""
    return f"r{rows.family(p, c)}" if p.by_rows else rows.tile_family(p, c)


TIE = 0.04  # with less, six kernels would serve the row counts of one width, priced alike
CHOICES = Choices("silu_mul_quant", candidates, legal, work, family, tie=TIE, like="silu_mul", bucket=rows.coarse)
space = CHOICES.space


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """Grid and compile-time constants of one launch."""
    blocks = c.blocks(cdiv(p.rows, c.tile_m) if p.by_rows else rows.tiles(p, c), device)
    constants = {"gelu": p.gelu_tanh, "largest": largest_code(p.codes), "power_of_two": p.power_of_two_scales}
    if not p.by_rows:
        return (Launch.of(silu_mul_quant_kernel, blocks, p, c, constants | {"group_n": min(GROUP, c.tile_n)}),)
    return (Launch.of(silu_mul_quant_rows_kernel, blocks, p, c, constants),)
