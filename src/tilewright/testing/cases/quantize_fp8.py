"""Problems of `quantize_fp8`."""

from itertools import product

from ...ops.quantize_fp8 import Problem
from ..sizes import BF16, E5M2, FP16, FP32, Sizes

TENSOR, ROW, GROUPS, SQUARES = (None, None), (1, None), (1, 128), (128, 128)

small = [
    Problem(3, 7, FP32, TENSOR),
    Problem(1, 1, FP32, ROW),
    Problem(33, 257, BF16, TENSOR, power_of_two_scales=True),
    Problem(40, 576, FP16, TENSOR, given_scale=True),
    Problem(5, 4099, BF16, ROW, E5M2),
    Problem(17, 896, FP32, ROW, power_of_two_scales=True),
    Problem(1, 28_672, BF16, ROW),
    Problem(7, 100, FP32, GROUPS, E5M2),
    Problem(33, 384, BF16, GROUPS),
    Problem(9, 1000, FP16, GROUPS, power_of_two_scales=True),
    Problem(2, 5, FP32, SQUARES),
    Problem(130, 300, BF16, SQUARES),
    Problem(256, 256, FP32, SQUARES, E5M2, power_of_two_scales=True),
]

# (rows, cols): activations of SmolLM2, Qwen2.5-0.5B, Qwen2-7B, Llama-3.1-8B and DeepSeek-V3;
# weights as squares
real = [
    *(Problem(rows, cols, BF16, block) for rows, cols, block in product((1, 509), (576, 896, 3584, 4096, 7168, 18_944), (ROW, GROUPS))),
    *(Problem(rows, cols, BF16, TENSOR) for rows, cols in ((1, 4096), (1000, 3584), (4096, 14_336))),
    *(Problem(rows, cols, BF16, SQUARES) for rows, cols in ((512, 3584), (18_944, 3584), (2112, 7168), (576, 7168))),
    Problem(1000, 4096, FP16, TENSOR, given_scale=True),
    Problem(509, 4096, BF16, GROUPS, power_of_two_scales=True),
    Problem(300, 5120, FP32, GROUPS, E5M2),
    Problem(300, 5120, FP32, ROW),
    Problem(7, 131_072, BF16, ROW),
    Problem(1024, 4096, FP32, SQUARES),
]

bench = [
    *(Problem(rows, cols, BF16, block) for block, rows, cols in product((ROW, GROUPS), (1, 64, 1024), (3584, 4096, 7168))),
    *(Problem(rows, cols, BF16, block) for block, rows, cols in product((ROW, GROUPS, TENSOR), (16_384, 65_536), (2048, 4096, 7168))),
    *(Problem(16_384, cols, BF16, block) for block, cols in product((ROW, GROUPS), (14_336, 18_944))),
    *(Problem(rows, cols, BF16, SQUARES) for rows, cols in ((7168, 2048), (24_576, 7168), (32_768, 16_384))),
    Problem(1024, 4096, BF16, TENSOR),
    Problem(65_536, 4096, BF16, TENSOR, given_scale=True),
    Problem(65_536, 4096, BF16, GROUPS, power_of_two_scales=True),
    Problem(16_384, 7168, FP32, GROUPS),
]


def drawn(s: Sizes) -> Problem:
    block = s.one_of({ROW: 0.35, GROUPS: 0.35, TENSOR: 0.2, SQUARES: 0.1})
    cols = s.inter() if s.odds(0.3) else s.hidden()
    if block == SQUARES:  # weights
        return Problem(rows=s.linear()[0], cols=cols, dtype=s.dtype(), block=block)
    rows = s.rows(min(1 << 17, (1 << 28) // cols))
    return Problem(rows=rows, cols=cols, dtype=s.dtype(), block=block, power_of_two_scales=s.odds(0.1))
