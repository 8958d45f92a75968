"""Problems of `rms_norm_quant`."""

from itertools import product

from ...ops.rms_norm_quant import Problem
from ..sizes import BF16, E5M2, FP16, FP32, Sizes

ROW, GROUPS = (1, None), (1, 128)

small = [
    Problem(3, 7, FP32, ROW),
    Problem(1, 576, BF16, ROW, round_before_weight=True),
    Problem(33, 64, FP16, GROUPS),
    Problem(5, 129, BF16, ROW, E5M2, residual=True, weight_offset=1.0),
    Problem(17, 896, FP32, GROUPS, residual=True, round_before_weight=True),
    Problem(2, 4097, FP16, GROUPS, power_of_two_scales=True, residual=True),
    Problem(101, 257, BF16, GROUPS, E5M2, round_before_weight=True, weight_offset=1.0),
    Problem(9, 1000, FP32, ROW, power_of_two_scales=True),
    Problem(1, 28_672, BF16, ROW),
    Problem(2, 28_672, BF16, GROUPS),
]

# (rows, cols): a decode step and a prompt of SmolLM2, Qwen2.5-0.5B, Qwen2-7B, Llama-3.1-8B,
# DeepSeek-V3
real = [
    *(Problem(rows, cols, BF16, block) for rows, cols, block in product((1, 509), (576, 896, 3584, 4096, 7168), (ROW, GROUPS))),
    *(Problem(rows, cols, BF16, block, residual=True) for rows, cols, block in product((4, 1000), (3584, 8192), (ROW, GROUPS))),
    Problem(509, 4096, BF16, ROW, round_before_weight=True),
    Problem(4096, 2304, BF16, GROUPS, weight_offset=1.0),  # Gemma-2-2B
    Problem(64, 7168, BF16, GROUPS, power_of_two_scales=True),
    Problem(300, 18_944, FP16, ROW),
    Problem(300, 18_944, FP16, GROUPS),
    Problem(513, 4096, FP32, GROUPS, E5M2),
    Problem(5, 131_072, BF16, ROW, residual=True),
]

bench = [
    *(Problem(rows, cols, BF16, block) for block, rows, cols in product((ROW, GROUPS), (1, 64, 1024), (3584, 4096, 7168))),
    *(Problem(rows, cols, BF16, block) for block, rows, cols in product((ROW, GROUPS), (16_384, 65_536), (2048, 4096, 7168))),
    *(Problem(rows, 7168, BF16, block, residual=True) for block, rows in product((ROW, GROUPS), (64, 16_384))),
    *(Problem(16_384, 14_336, BF16, block) for block in (ROW, GROUPS)),
]


def drawn(s: Sizes) -> Problem:
    cols = s.hidden()
    rows = s.rows(min(1 << 17, (1 << 28) // cols))
    return Problem(rows=rows, cols=cols, dtype=s.dtype(), block=s.choice((ROW, GROUPS)), **s.some(residual=0.4, power_of_two_scales=0.1))
