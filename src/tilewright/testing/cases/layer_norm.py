"""Problems of `layer_norm`."""

from dataclasses import replace
from itertools import product

from ...ops.layer_norm import Problem
from ..sizes import BF16, FP16, FP32, NORMED, Sizes

small = [
    Problem(1, 1, FP32),
    Problem(3, 7, FP32, weight=False, bias=False),
    Problem(1, 576, BF16),
    Problem(33, 64, FP16, bias=False),
    Problem(5, 129, BF16),
    Problem(17, 768, FP32),
    Problem(2, 4097, FP16, weight=False),
    Problem(101, 257, BF16),
    Problem(1, 28_672, BF16, bias=False),
    Problem(1, 65_537, FP32),
]

# (rows, cols): BERT-base and GPT-2, BERT-large, GPT-2 XL, Phi-2, OPT-6.7B, Falcon-40B, GPT-3; ViT's
# patches; Cohere's without bias
real = [
    *(Problem(rows, cols, BF16) for rows, cols in product((1, 509), (768, 1024, 1600, 2560, 4096, 8192, 12_288))),
    *(Problem(rows, cols, BF16, bias=False) for rows, cols in ((4, 8192), (1000, 4096), (64, 12_288))),
    Problem(64 * 197, 768, FP16),
    Problem(4096, 4096, BF16, weight=False, bias=False),  # OLMo
    Problem(32 * 509, 128, BF16, bias=False),
    Problem(300, 18_944, FP16),
    Problem(65_536, 1024, BF16),
    Problem(513, 1280, FP32),
    Problem(7, 28_672, FP32),
    Problem(5, 131_072, BF16),
]

bench = [
    *(Problem(rows, cols, BF16) for rows, cols in product((1, 16, 64, 1024), (768, 1600, 4096, 8192))),
    *(Problem(rows, cols, BF16) for rows, cols in product((16_384, 65_536), (768, 1024, 2560, 4096, 8192))),
    *(Problem(16_384, cols, BF16) for cols in (12_288, 18_944)),
    Problem(16_384, 4096, BF16, bias=False),
    Problem(16_384, 4096, FP32),
]


def drawn(s: Sizes) -> Problem:
    cols = s.width(NORMED)
    rows = s.rows(min(1 << 17, (1 << 28) // cols))
    return Problem(rows=rows, cols=cols, dtype=FP32 if s.odds(0.1) else s.dtype(), bias=not s.odds(0.2))


def drawn_large(s: Sizes) -> Problem:
    """A long prompt, that memory bounds."""
    p = drawn(s)
    cols = s.width(NORMED)
    return replace(p, rows=s.large_rows(cols), cols=cols)
