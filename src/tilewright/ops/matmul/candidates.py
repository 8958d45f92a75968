"""Which configs of `matmul` may be worth timing, which of them the kernels can run, and what each
asks of the machine.

Tiles are data (ops/common/gemm_tiles.py); select/ puts them in order.
"""

from collections.abc import Iterator

import torch

from ...launch import Device
from ...select import Choices, Work
from ..common import gemm_choices
from ..common.gemm_candidates import changed, may_move, tiles_for, with_moved
from ..common.gemm_choices import begins_all
from ..common.pdl import whole_tiles
from ..common.scaling import FAST_SUM, FP8, GROUP, Scaling
from .decision import Config, Problem, plan


def candidates(p: Problem, device: Device) -> Iterator[Config]:
    """The tiles of every product, moved too, and one row with all of k in a step. Those of scales
    by blocks also with scales that come by TMA: 0.7 to 1.4 of the time, by tile and size.
    """
    if p.m == 1 and p.k <= 4096 and p.trans_b and not p.trans_a and p.dtype.itemsize == 2 and not device.is_cpu:  # as in rms_norm_matmul
        yield from (Config(1, n, k, dot=True, latency=8, num_ctas=1, occupancy=o, num_worker_warps=4) for n, k, o in whole_tiles(p.k))
    g = p.gemm
    for c in with_moved(tiles_for(g, device, Config), g, device, lambda c: legal(p, c, device)):
        yield c
        if p.scaling is Scaling.BLOCK and not c.extra_n and (device.arch == "sm_90" or device.is_cpu):  # where they were timed
            yield from (changed(c, tma_scales=which) for which in (1, 2))


def legal(p: Problem, c: Config, device: Device) -> bool:
    """What the kernels can do: see their docstrings."""
    if p.dtype in FP8 and c.dot:
        return False
    if c.moved:
        plain = not p.fused or (p.dtype in FP8 and not p.has_epilogue)
        if not plain or c.dot or c.split_k > 1 or not may_move(p.gemm, c, device):
            return False
    if c.extra_n and (p.has_epilogue or not begins_all(p.gemm, c)):
        return False
    if p.scaling is Scaling.BLOCK:
        if c.extra_n and (c.swap_ab or c.tile_n != c.extra_n or 2 * c.tile_n != GROUP or c.tile_k != GROUP):
            return False
        if c.tile_k > GROUP and p.k % c.tile_k:
            return False
    if c.tma_scales and (c.extra_n or p.scaling is not Scaling.BLOCK or c.tma_scales + p.plain_scales > 2):
        return False
    if c.fast_runs and not (p.dtype in FP8 and p.stored is torch.bfloat16 and p.scaling is not Scaling.BLOCK and p.k > FAST_SUM):
        return False
    if c.extra_n and (c.fast_runs or (c.persistent and p.scaling)):
        return False
    return not (c.split_k > 1 and (p.has_epilogue or not c.split_tiles(p.gemm, device)))


def spill(p: Problem, c: Config, device: Device) -> int:
    """About the bytes of stack that tileiras 13.4 takes for the tiles above (the compile report
    finds them).
    """
    area = c.tile_m * (c.tile_n + c.extra_n)
    if device.arch == "sm_80":
        return 64 * ((p.residual or p.silu_mul) and (c.persistent or area > 64 * 128))
    if device.arch in ("sm_120", "sm_121"):
        return 64 * ((p.residual or p.silu_mul) and c.persistent and area > 64 * 128)
    if device.arch == "sm_90" and p.dtype in FP8 and p.scaling is not Scaling.BLOCK and not (c.fast_runs or p.gemm.fast(c, device)):
        # Each sum of the tensor core has one in fp32 beside it. Where both do not fit, the loop
        # spills and keeps a third of its steps in flight.
        warps = c.num_worker_warps or 4
        return max(0, 3 * (2 * area // (32 * warps * (c.num_ctas or 1)) - (240 if warps == 4 else 200)))
    if device.arch == "sm_90" and c.num_worker_warps == 4 and area >= 128 * 128:
        return 64 * (p.scaling is Scaling.ROW or p.silu_mul or (p.bias and c.persistent))
    return 0


def work(p: Problem, c: Config, device: Device) -> tuple[Work, ...]:
    """What the launch asks for."""
    return gemm_choices.work(p.gemm, c, device, spill(p, c, device), tails=not c.moved)


def family(p: Problem, c: Config) -> str:
    """What the model errs alike about."""
    return gemm_choices.family(p.gemm, c)


CHOICES = Choices("matmul", candidates, legal, work, family, regimes_too=True)
space = CHOICES.space


DECISION = CHOICES.decision(Problem, plan, ("a", "b", "scale_a", "scale_b", "bias", "residual", "out_scale", "out"))
