"""Problems of `rms_norm`."""

from dataclasses import replace
from itertools import product

from ...ops.rms_norm import Problem
from ..sizes import BF16, FP16, FP32, Sizes

small = [
    Problem(1, 1, FP32),
    Problem(3, 7, FP32),
    Problem(1, 576, BF16, round_before_weight=True),
    Problem(33, 64, FP16),
    Problem(5, 129, BF16, residual=True, weight_offset=1.0),
    Problem(17, 896, FP32, residual=True, round_before_weight=True),
    Problem(2, 4097, FP16, residual=True),
    Problem(101, 257, BF16, round_before_weight=True, weight_offset=1.0),
    Problem(1, 28_672, BF16),
    Problem(1, 65_536, FP32),
]

# (rows, cols): a decode step and a prompt of SmolLM2, Qwen2.5-0.5B, Qwen2-7B, Llama-3.1-8B,
# Qwen2.5-14B, Llama-3.1-70B; Qwen3's q_norm over heads
real = [
    *(Problem(rows, cols, BF16, round_before_weight=True) for rows, cols in product((1, 509), (576, 896, 3584, 4096, 5120, 8192))),
    *(Problem(rows, cols, BF16, residual=True) for rows, cols in ((4, 4096), (1000, 3584), (64, 8192))),
    Problem(4096, 2304, BF16, weight_offset=1.0),  # Gemma-2-2B
    Problem(509 * 32, 128, BF16, round_before_weight=True),
    Problem(8, 128, FP16),
    Problem(300, 18_944, FP16),
    Problem(65_536, 896, BF16),
    Problem(513, 4096, FP32),
    Problem(7, 28_672, FP32),
    Problem(5, 131_072, BF16, residual=True),
]

bench = [
    *(Problem(rows, cols, BF16) for rows, cols in product((1, 16, 64, 1024), (896, 2048, 3584, 4096, 8192))),
    *(Problem(rows, cols, BF16) for rows, cols in product((16_384, 65_536), (896, 1536, 3584, 4096, 5120, 8192))),
    *(Problem(16_384, cols, BF16) for cols in (14_336, 18_944, 28_672)),
    *(Problem(rows, 4096, BF16, residual=True) for rows in (1, 64, 16_384)),
    *(Problem(rows, 128, BF16) for rows in (32, 32 * 8192)),
    Problem(16_384, 4096, FP32),
]


def drawn(s: Sizes) -> Problem:
    cols = s.choice((64, 96, 128, 256)) if s.odds(0.1) else s.hidden()
    rows = s.rows(min(1 << 17, (1 << 28) // cols))
    return Problem(rows=rows, cols=cols, dtype=s.dtype(), **s.some(residual=0.3, round_before_weight=0.4))


def drawn_large(s: Sizes) -> Problem:
    """A long prompt, that memory bounds; rows of an MLP's width too."""
    p = drawn(s)
    cols = s.model().inter if s.odds(0.4) else s.hidden()
    return replace(p, rows=s.large_rows(cols), cols=cols)
