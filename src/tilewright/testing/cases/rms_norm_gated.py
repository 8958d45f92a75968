"""Gated norms of heads of real models, and odd shapes."""

from ...ops.rms_norm_gated import Problem
from ..sizes import BF16, FP16, FP32, Sizes

small = [
    Problem(37, 128, BF16),
    Problem(130, 64, FP16),
    Problem(5, 80, FP32),
    Problem(3, 1000, BF16),
    Problem(1, 4096, BF16),
    Problem(9, 1, FP32),
]

real = [
    Problem(2048 * 32, 128, BF16),  # Qwen3-Next-80B-A3B
    Problem(16 * 32, 128, BF16),
    Problem(700 * 48, 128, FP16),  # Qwen3.5-27B
    Problem(1000, 4096, BF16),  # Mamba-2, one group
    Problem(333, 256, FP32),
]

bench = [
    *(Problem(tokens * 32, 128, BF16) for tokens in (1, 16, 256, 2048, 32_768)),
    Problem(8192 * 48, 128, BF16),
    Problem(8192, 4096, BF16),
    Problem(32_768, 256, FP32),
]


def drawn(s: Sizes) -> Problem:
    heads, cols = s.choice((8, 16, 32, 48, 64)), s.choice((64, 128, 128, 128, 256))
    return Problem(rows=s.rows(1 << 15) * heads, cols=cols, dtype=FP32 if s.odds(0.2) else s.dtype())
