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
    Problem(9, 96, BF16, groups=3, gate_first=True),
    Problem(3, 512, FP32, groups=2, gate_first=True),
    Problem(37, 128, FP16, sigmoid=True),
]

real = [
    Problem(2048 * 32, 128, BF16),  # Qwen3-Next-80B-A3B
    Problem(16 * 32, 128, BF16),
    Problem(700 * 48, 128, FP16),  # Qwen3.5-27B
    Problem(1000, 4096, BF16),  # Mamba-2, one group
    Problem(333, 256, FP32),
    Problem(700, 1024, BF16, groups=8, gate_first=True),  # Nemotron-H-8B
    Problem(40, 1500, FP16, groups=2, gate_first=True),
    Problem(300 * 32, 128, BF16, sigmoid=True),  # Kimi-Linear-48B-A3B
]

bench = [
    *(Problem(tokens * 32, 128, BF16) for tokens in (1, 16, 256, 2048, 32_768)),
    Problem(8192 * 48, 128, BF16),
    Problem(8192, 4096, BF16),
    Problem(32_768, 256, FP32),
    *(Problem(tokens, 1024, BF16, groups=8, gate_first=True) for tokens in (1, 16, 8192)),  # Nemotron-H-8B
    Problem(8192, 3072, BF16, gate_first=True),  # Granite-4.0-H-Tiny
    Problem(2048 * 32, 128, BF16, sigmoid=True),  # Kimi-Linear-48B-A3B
]


def drawn(s: Sizes) -> Problem:
    heads, cols = s.choice((8, 16, 32, 48, 64)), s.choice((64, 128, 128, 128, 256))
    return Problem(rows=s.rows(1 << 15) * heads, cols=cols, dtype=FP32 if s.odds(0.2) else s.dtype())
