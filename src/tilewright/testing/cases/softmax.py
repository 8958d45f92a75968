"""Problems of `softmax`."""

from dataclasses import replace
from itertools import product

from ...ops.softmax import Problem
from ..sizes import BF16, FP16, FP32, Sizes

small = [
    Problem(1, 1, FP32),
    Problem(3, 7, FP32),
    Problem(64, 64, FP16),
    Problem(29, 1000, BF16),
    Problem(127, 131, FP32),
    Problem(2, 4097, FP16),
    Problem(1, 32_003, FP32),
    Problem(1, 65_536, BF16),
]

# rows of attention scores, the routers of Mixtral, Qwen3-MoE and DeepSeek-V3, the vocabularies of
# Llama-2, Llama-3 and Qwen2
real = [
    *(Problem(rows, cols, BF16) for rows, cols in ((32 * 128, 128), (509, 1000), (4096, 4096), (64, 16_384), (300, 28_672))),
    *(Problem(rows, cols, FP32) for rows, cols in ((4096, 8), (1000, 128), (7, 256))),
    *(Problem(rows, cols, dtype) for rows, cols, dtype in ((1, 32_000, FP32), (16, 128_256, BF16), (4, 151_936, FP32), (3, 262_144, FP16))),
    Problem(65_536, 896, BF16),
]

bench = [
    *(Problem(rows, cols, BF16) for rows, cols in product((1, 16, 64, 1024), (896, 2048, 4096, 8192, 28_672))),
    *(Problem(rows, cols, BF16) for rows, cols in product((16_384, 65_536), (896, 2048, 4096, 8192))),
    *(Problem(16_384, cols, BF16) for cols in (3584, 14_336, 18_944, 28_672)),
    *(Problem(rows, cols, FP32) for rows, cols in ((1, 128_256), (16, 151_936), (1024, 151_936), (8192, 4096))),
    Problem(8192, 128, FP32),
]


def drawn(s: Sizes) -> Problem:
    cols = s.model().vocab if s.odds(0.25) else s.log(100, 32_768)
    rows = s.rows(min(1 << 17, (1 << 28) // cols))
    return Problem(rows=rows, cols=cols, dtype=FP32 if s.odds(0.3) else s.dtype())


def drawn_large(s: Sizes) -> Problem:
    """Many long rows, that memory bounds."""
    cols = s.log(512, 32_768)
    p = drawn(s)
    cols = 1 << (cols.bit_length() - 1) if s.odds(0.3) else cols
    return replace(p, rows=s.large_rows(cols), cols=cols)


def drawn_wide(s: Sizes) -> Problem:
    """Rows of a vocabulary."""
    cols = s.model().vocab
    return Problem(rows=s.rows(min(2048, (1 << 28) // cols)), cols=cols, dtype=FP32 if s.odds(0.4) else s.dtype())
