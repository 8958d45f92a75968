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
from . import pictures
from .ladder import Ladder, Step

E4M3 = torch.float8_e4m3fn
TENSOR_MEMORY = ("sm_100", "sm_103")


def _by_memory(registers: Config, tensor_memory: Config) -> Callable[[Problem, Device], Config]:
    """A step where accumulators stand in registers, and where they stand in tensor memory."""
    return lambda problem, device: tensor_memory if device.arch in TENSOR_MEMORY else registers


NAIVE = "a block for each tile of 128x128, row after row, and the lowest latency hint"
SKINNY = 320, 32_576, 7168  # the note's

BF16 = Ladder(
    "gemm, bf16",
    matmul,
    Problem(8192, 8192, 8192, trans_b=False),
    Problem(300, 280, 200, trans_b=False),
    (
        Step(
            "naive",
            NAIVE,
            Config(128, 128, 64, group=1, latency=1),
            why="Blocks that run together compute one row of tiles: each reads another panel of b.",
        ),
        Step(
            "swizzle",
            "grouped tile order, in bands of 8 tile rows: blocks that run together share operands in L2",
            Config(128, 128, 64, latency=1),
            why=(
                "Blocks that run at the same time should read the same operands, which then come from "
                "L2. The picture has bands of 2 rows and 8 blocks at once: a row of 8 tiles reads 1 "
                "panel of a and 8 of b, two rows of 4 tiles read 2 and 4."
            ),
            picture=pictures.TILE_ORDER,
        ),
        Step(
            "persistent",
            "one wave of blocks, each of which computes several tiles",
            Config(128, 128, 64, latency=1, persistent=True),
            why=(
                "A block that ends makes room for another, which starts with an empty pipeline. Here "
                "one wave of blocks stays, and each starts the loads of its next tile while it "
                "finishes the last. An H200 then starts 132 blocks in all, one on each SM."
            ),
            picture=pictures.WAVES,
        ),
        Step(
            "tuned",
            "as many loads in flight as shared memory holds",
            _by_memory(
                Config(128, 128, 64, latency=5, persistent=True, num_ctas=1, num_worker_warps=4),
                Config(128, 256, 64, latency=5, persistent=True, num_ctas=1),
            ),
            why=(
                "The loads of the next steps should be in flight while the tensor cores multiply. "
                "Each of them needs a buffer in shared memory, so the tile and the number of buffers "
                "are chosen together."
            ),
            picture=pictures.PIPELINE,
        ),
        Step(
            "8 warps",
            "256x256 on two blocks, on Hopper with 8 warps each: half the operand traffic",
            _by_memory(
                Config(256, 256, 64, group=4, latency=5, persistent=True, num_ctas=2, num_worker_warps=8),
                Config(256, 256, 64, group=4, latency=5, persistent=True, num_ctas=2),
            ),
            why=(
                "A tile of 256x256 needs half as many bytes for each product as one of 128x128. Its "
                "accumulator takes 128 registers in each thread of 16 warps on Hopper: 8 warps in each "
                "of two blocks that share the tile. Data-centre Blackwell accumulates in tensor memory "
                "and needs no more warps."
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
        Step(
            "naive",
            NAIVE,
            Config(128, 128, 128, group=1, latency=1),
            ("FP8 GEMM, cuTile sample, tiles adjusted",),
            why="320 rows are two and a half tiles of 128, so a sixth of the products are padding.",
        ),
        Step(
            "swizzle",
            "grouped tile order: with 320 rows, columns of 3 tiles",
            Config(128, 128, 128, latency=1),
            why="There are only three rows of tiles, so a band holds them all. The three tiles of a column share a panel of b.",
        ),
        Step(
            "persistent",
            "one wave of blocks, each of which computes several tiles",
            Config(128, 128, 128, latency=1, persistent=True),
            ("FP8 GEMM, persistent, autotuned",),
            why="The 765 tiles are almost six waves. Persistent blocks start and end once instead of six times.",
        ),
        Step(
            "tuned",
            "more loads in flight, on 4 warps",
            _by_memory(
                Config(128, 128, 128, latency=6, persistent=True, num_ctas=1, num_worker_warps=4),
                Config(128, 128, 128, latency=6, persistent=True, num_ctas=1),
            ),
            ("FP8 GEMM, persistent, whole space searched",),
            why="The latency hint rises from 1 to 6. The accumulator takes 128 registers in each thread of 4 warps.",
        ),
        Step(
            "8 warps",
            "swap A/B: 256 columns of the output by 160 rows, so that 320 rows are two whole tiles",
            _by_memory(
                Config(128, 256, 128, extra_n=32, swap_ab=True, latency=6, num_ctas=1, num_worker_warps=8),
                Config(128, 256, 128, swap_ab=True, latency=6, num_ctas=2),
            ),
            ("FP8 GEMM, DeepGEMM",),
            why=(
                "The transposed product puts the long side of the tile along the 32,576 columns of "
                "the output. On Hopper the short side is 160, which divides the 320 rows: no padding "
                "is left."
            ),
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
        Step(
            "naive",
            f"{NAIVE}; two accumulators of it do not fit the registers of 4 warps",
            Config(128, 128, 128, group=1, latency=1),
            why=(
                "Each group of 128 along k has its own scales, so its product must be scaled before "
                "it is added. Both need an accumulator of 128 registers in each thread of 4 warps: "
                "one more than a thread has."
            ),
        ),
        Step(
            "swizzle",
            "grouped tile order: with 320 rows, columns of 3 tiles",
            Config(128, 128, 128, latency=1),
            why="As without block scales, a band holds all three rows of tiles.",
        ),
        Step(
            "latency",
            "more loads in flight",
            Config(128, 128, 128, latency=8),
            why="More loads are in flight while a product is scaled and added on the CUDA cores.",
        ),
        Step(
            "8 warps",
            "both accumulators stay in registers",
            Config(128, 128, 128, latency=8, num_ctas=1, num_worker_warps=8),
            why="With twice as many warps, each thread holds half of both accumulators: 64 registers each.",
        ),
        Step(
            "two blocks",
            "64 rows on 4 warps, two blocks on an SM: one multiplies while the other scales, and five tiles cover 320 rows",
            Config(64, 128, 128, latency=8, num_ctas=1, occupancy=2, num_worker_warps=4),
            why="The tensor cores are idle while a block scales. With a second block on the SM, they multiply for that one.",
        ),
    ),
    matmul,
)

LADDERS = (BF16, FP8, BLOCK_SCALES)
