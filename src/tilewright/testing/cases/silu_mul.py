"""Problems of `silu_mul`."""

from itertools import product

from ...ops.silu_mul import Problem
from ..sizes import BF16, FP16, FP32, Sizes

small = [
    Problem(1, 1, FP32),
    Problem(3, 7, FP32, fused=True),
    Problem(1, 1536, BF16),
    Problem(33, 65, FP16, gelu_tanh=True),
    Problem(48, 576, FP32),
    Problem(48, 576, FP32, gelu_tanh=True),
    Problem(5, 4099, BF16, fused=True),
    Problem(101, 257, FP16, fused=True, gelu_tanh=True),
    Problem(1, 28_672, BF16),
]

# (rows, cols): SmolLM2, Qwen2.5-0.5B, Qwen2.5-1.5B, Mistral-7B, Qwen2-7B, Llama-3.1-70B; Gemma-2-2B
real = [
    *(Problem(rows, cols, BF16) for rows, cols in product((1, 509), (1536, 4864, 8960, 14_336, 18_944, 28_672))),
    *(Problem(rows, cols, BF16, fused=True) for rows, cols in product((4, 1000), (4864, 14_336, 18_944))),
    Problem(300, 9216, BF16, gelu_tanh=True),
    Problem(64, 11_008, FP16),
    Problem(513, 14_336, FP32),
    Problem(8192, 13_824, BF16, fused=True),
]

bench = [
    *(Problem(rows, cols, BF16) for rows, cols in product((1, 16, 64, 1024), (896, 4864, 8960, 14_336, 18_944, 28_672))),
    *(Problem(rows, cols, BF16) for rows, cols in product((8192, 65_536), (4864, 8960, 14_336, 18_944, 28_672))),
    *(Problem(rows, 14_336, BF16, fused=True) for rows in (1, 64, 8192)),
    Problem(65_536, 896, BF16),
    Problem(8192, 9216, BF16, gelu_tanh=True),
    Problem(8192, 14_336, FP32),
]


def drawn(s: Sizes) -> Problem:
    cols = s.inter()
    rows = s.rows(min(1 << 17, (1 << 28) // cols))
    return Problem(rows=rows, cols=cols, dtype=s.dtype(), **s.some(fused=0.4, gelu_tanh=0.15))
