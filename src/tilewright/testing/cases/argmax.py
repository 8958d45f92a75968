"""Problems of `argmax`."""

from itertools import product

from ...ops.argmax import Problem
from ..sizes import BF16, FP16, FP32, Sizes

small = [
    Problem(1, 1, FP32),
    Problem(3, 7, FP32),
    Problem(64, 64, FP16),
    Problem(29, 1000, BF16),
    Problem(127, 131, FP32),
    Problem(2, 4097, FP16),
    Problem(1, 32_003, FP32),
    Problem(5, 16_384, BF16),
]

# the vocabularies of SmolLM2, Llama-3 and Qwen2; routers; Gemma's
real = [
    *(Problem(rows, cols, BF16) for rows, cols in product((1, 3, 64), (49_152, 128_256, 151_936))),
    *(Problem(rows, cols, FP32) for rows, cols in ((1, 128_256), (16, 151_936), (4096, 8), (1000, 128))),
    Problem(3, 262_144, FP16),
    Problem(4096, 4096, BF16),
    Problem(509, 1001, BF16),
]

bench = [
    *(Problem(rows, cols, BF16) for rows, cols in product((1, 4, 16, 64, 256), (49_152, 128_256, 151_936))),
    *(Problem(rows, cols, FP32) for rows, cols in product((1, 16, 64), (128_256, 151_936))),
    Problem(16_384, 4096, BF16),
    Problem(8192, 128, FP32),
]


def drawn(s: Sizes) -> Problem:
    cols = s.model().vocab if s.odds(0.8) else s.log(100, 32_768)
    return Problem(rows=s.rows(512), cols=cols, dtype=FP32 if s.odds(0.3) else s.dtype())
