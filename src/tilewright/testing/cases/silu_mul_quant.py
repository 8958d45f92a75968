"""Problems of `silu_mul_quant`."""

from itertools import product

from ...ops.silu_mul_quant import Problem
from ..sizes import BF16, E5M2, FP16, FP32, Sizes

ROW, GROUPS = (1, None), (1, 128)

small = [
    Problem(3, 7, FP32, ROW, fused=True),
    Problem(1, 1536, BF16, ROW),
    Problem(33, 65, FP16, GROUPS, gelu_tanh=True),
    Problem(48, 576, FP32, GROUPS),
    Problem(48, 576, FP32, ROW, power_of_two_scales=True, gelu_tanh=True),
    Problem(5, 4099, BF16, GROUPS, E5M2, fused=True),
    Problem(101, 257, FP16, ROW, E5M2, fused=True, gelu_tanh=True),
    Problem(7, 1000, BF16, GROUPS, power_of_two_scales=True),
    Problem(1, 28_672, BF16, ROW),
    Problem(2, 28_672, BF16, GROUPS),
]

# (rows, cols): SmolLM2, Qwen2.5-0.5B, Mistral-7B, Qwen2-7B, DeepSeek-V3's experts; Gemma-2-2B
real = [
    *(Problem(rows, cols, BF16, block) for rows, cols, block in product((1, 509), (1536, 4864, 14_336, 18_944, 2048), (ROW, GROUPS))),
    *(Problem(rows, cols, BF16, block, fused=True) for rows, cols, block in product((4, 1000), (4864, 14_336), (ROW, GROUPS))),
    Problem(300, 9216, BF16, GROUPS, gelu_tanh=True),
    Problem(64, 11_008, FP16, ROW),
    Problem(64, 2048, BF16, GROUPS, power_of_two_scales=True),
    Problem(513, 14_336, FP32, GROUPS, E5M2),
    Problem(513, 14_336, FP32, ROW),
    Problem(64, 28_672, BF16, ROW),
]

bench = [
    *(Problem(rows, cols, BF16, block) for block, rows, cols in product((ROW, GROUPS), (1, 64, 1024), (2048, 14_336, 18_944))),
    *(Problem(rows, cols, BF16, block) for block, rows, cols in product((ROW, GROUPS), (16_384, 65_536), (2048, 4864, 14_336))),
    *(Problem(8192, cols, BF16, block) for block, cols in product((ROW, GROUPS), (18_944, 28_672))),
    *(Problem(8192, 14_336, BF16, block, fused=True) for block in (ROW, GROUPS)),
]


def drawn(s: Sizes) -> Problem:
    cols = s.inter()
    rows = s.rows(min(1 << 17, (1 << 28) // cols))
    return Problem(rows=rows, cols=cols, dtype=s.dtype(), block=s.choice((ROW, GROUPS)), **s.some(fused=0.4, power_of_two_scales=0.1))
