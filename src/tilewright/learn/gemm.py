"""The GEMM ladder: naive tiles, swizzle, persistent blocks, a tuned pipeline, and the shape that 8 warps allow.

Every step is a Config of `ops.matmul`, so that a step can be tried on any problem: the kernel is the same source.
Source of the story: a note on an fp8 GEMM of 320 x 32576 x 7168 in cuTile on a B200, whose figures stand in `published`.
"""

import torch

from ..ops import matmul
from ..ops.matmul import Config, Problem
from ..ops.scaling import Scaling
from .ladder import Ladder, Step

E4M3 = torch.float8_e4m3fn

BF16 = Ladder(
    "bf16",
    matmul,
    Problem(8192, 8192, 8192, trans_b=False),
    Problem(300, 280, 200, trans_b=False),
    (
        Step(
            "naive",
            "a block for each tile of 128x128, row after row, with the least hint of loads in flight",
            Config(128, 128, 64, group=1, latency=1),
        ),
        Step("swizzle", "tiles in bands of 8 rows, so that blocks that run together share operands in L2", Config(128, 128, 64, latency=1)),
        Step("persistent", "132 blocks walk over the tiles: no block starts and ends for each", Config(128, 128, 64, latency=1, persistent=True)),
        Step(
            "tuned",
            "as many steps of loads in flight as shared memory holds",
            Config(128, 128, 64, latency=5, persistent=True, num_ctas=1, num_worker_warps=4),
        ),
        Step(
            "8 warps",
            "256x256 on two blocks of 8 warps each: half the operand traffic of each MMA",
            Config(256, 256, 64, group=4, latency=5, persistent=True, num_ctas=2, num_worker_warps=8),
        ),
    ),
)

FP8 = Ladder(
    "fp8",
    matmul,
    Problem(320, 32_576, 7168, E4M3, scaling=Scaling.TENSOR),
    Problem(200, 400, 384, E4M3, scaling=Scaling.TENSOR),
    (
        Step(
            "naive",
            "a block for each tile of 128x128, row after row, with the least hint of loads in flight",
            Config(128, 128, 128, group=1, latency=1),
        ),
        Step("swizzle", "tiles in bands of 8 rows: with 320 rows, columns of 3 tiles", Config(128, 128, 128, latency=1)),
        Step("persistent", "132 blocks walk over the tiles", Config(128, 128, 128, latency=1, persistent=True)),
        Step("tuned", "more steps of loads in flight, on 4 warps", Config(128, 128, 128, latency=6, persistent=True, num_ctas=1, num_worker_warps=4)),
        Step(
            "8 warps",
            "weights first: 256 columns of the output by 160 rows, of which 320 are two tiles and not two and a half",
            Config(128, 256, 128, extra_n=32, weights_first=True, latency=6, num_ctas=1, num_worker_warps=8),
        ),
    ),
    (
        ("naive", "B200: 130 us, 1150 TFLOP/s"),
        ("persistent", "B200: 87.5 us, 1708 TFLOP/s"),
        ("tuned", "B200: 80 us, 1868 TFLOP/s (DeepGEMM, scaled by the block: 77 us, 1941)"),
    ),
)

LADDERS = (BF16, FP8)
