"""The GEMM ladders for bf16, fp8, and fp8 with block scales.

The steps: naive tiles, grouped tile order, persistent blocks, a tuned pipeline, and the tile that 8
warps allow.

Data-centre Blackwell accumulates in tensor memory, where warps spare no registers: there the last
steps are a larger tile and then two blocks that share it (`num_ctas`).

Every step is a Config of the same kernel, `ops.matmul`, so it can be tried on any problem. The
steps come from a note on an fp8 GEMM of 320 x 32576 x 7168 in cuTile on a B200; its figures stand
beside ours.
"""

from collections.abc import Callable

import torch

from ..launch import Device
from ..ops import matmul
from ..ops.common.scaling import Scaling
from ..ops.matmul import Config, Problem
from .ladder import Ladder, Step

E4M3 = torch.float8_e4m3fn
TENSOR_MEMORY = ("sm_100", "sm_103")


def _by_memory(registers: Config, tensor_memory: Config) -> Callable[[Problem, Device], Config]:
    """A step where accumulators stand in registers, and where they stand in tensor memory."""
    return lambda problem, device: tensor_memory if device.arch in TENSOR_MEMORY else registers


NAIVE = "a block for each tile of 128x128, row after row, with the least hint of loads in flight"
SKINNY = 320, 32_576, 7168  # the note's

BF16 = Ladder(
    "gemm, bf16",
    matmul,
    Problem(8192, 8192, 8192, trans_b=False),
    Problem(300, 280, 200, trans_b=False),
    (
        Step("naive", NAIVE, Config(128, 128, 64, group=1, latency=1)),
        Step("swizzle", "tiles in bands of 8 rows, so that blocks that run together share operands in L2", Config(128, 128, 64, latency=1)),
        Step("persistent", "132 blocks walk over the tiles: no block starts and ends for each", Config(128, 128, 64, latency=1, persistent=True)),
        Step(
            "tuned",
            "as many steps of loads in flight as shared memory holds",
            _by_memory(
                Config(128, 128, 64, latency=5, persistent=True, num_ctas=1, num_worker_warps=4),
                Config(128, 256, 64, latency=5, persistent=True, num_ctas=1),
            ),
        ),
        Step(
            "8 warps",
            "256x256 on two blocks, on Hopper of 8 warps each: half the operand traffic of each MMA",
            _by_memory(
                Config(256, 256, 64, group=4, latency=5, persistent=True, num_ctas=2, num_worker_warps=8),
                Config(256, 256, 64, group=4, latency=5, persistent=True, num_ctas=2),
            ),
        ),
    ),
    matmul,
)

FP8 = Ladder(
    "gemm, fp8",
    matmul,
    Problem(*SKINNY, E4M3, scaling=Scaling.TENSOR),
    Problem(200, 400, 384, E4M3, scaling=Scaling.TENSOR),
    (
        Step("naive", NAIVE, Config(128, 128, 128, group=1, latency=1), ("FP8 GEMM, cuTile sample, tiles adjusted",)),
        Step("swizzle", "tiles in bands of 8 rows: with 320 rows, columns of 3 tiles", Config(128, 128, 128, latency=1)),
        Step(
            "persistent",
            "132 blocks walk over the tiles",
            Config(128, 128, 128, latency=1, persistent=True),
            ("FP8 GEMM, persistent, autotuned",),
        ),
        Step(
            "tuned",
            "more steps of loads in flight, on 4 warps",
            _by_memory(
                Config(128, 128, 128, latency=6, persistent=True, num_ctas=1, num_worker_warps=4),
                Config(128, 128, 128, latency=6, persistent=True, num_ctas=1),
            ),
            ("FP8 GEMM, persistent, whole space searched",),
        ),
        Step(
            "8 warps",
            "weights first: 256 columns of the output by 160 rows, of which 320 are two tiles and not two and a half",
            _by_memory(
                Config(128, 256, 128, extra_n=32, swap_ab=True, latency=6, num_ctas=1, num_worker_warps=8),
                Config(128, 256, 128, swap_ab=True, latency=6, num_ctas=2),
            ),
            ("FP8 GEMM, DeepGEMM",),
        ),
    ),
    matmul,
)

# Scales inside the loop: the product of a step stands in registers beside the running sums until it
# is scaled and added.
BLOCK_SCALES = Ladder(
    "gemm, fp8 with block scales",
    matmul,
    Problem(*SKINNY, E4M3, scaling=Scaling.BLOCK),
    Problem(200, 400, 384, E4M3, scaling=Scaling.BLOCK),
    (
        Step("naive", f"{NAIVE}; two accumulators of it do not fit the registers of 4 warps", Config(128, 128, 128, group=1, latency=1)),
        Step("swizzle", "tiles in bands of 8 rows: with 320 rows, columns of 3 tiles", Config(128, 128, 128, latency=1)),
        Step("latency", "more steps of loads in flight", Config(128, 128, 128, latency=8)),
        Step("8 warps", "both accumulators stay in registers", Config(128, 128, 128, latency=8, num_ctas=1, num_worker_warps=8)),
        Step(
            "two blocks",
            "64 rows on 4 warps, two blocks on a multiprocessor: one multiplies while the other scales, and five tiles cover 320 rows",
            Config(64, 128, 128, latency=8, num_ctas=1, occupancy=2, num_worker_warps=4),
        ),
    ),
    matmul,
)

LADDERS = (BF16, FP8, BLOCK_SCALES)
