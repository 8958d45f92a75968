"""Problems of `adjust_logits`."""

from itertools import product

from ...ops.adjust_logits import Problem
from ..sizes import BF16, FP16, FP32, Sizes

ALL = {"repetition": True, "presence": True, "frequency": True, "bias": True, "mask": True}

small = [
    Problem(1, 1, FP32, **ALL),
    Problem(3, 31, BF16, mask=True, shared=True),
    Problem(2, 4097, FP16, repetition=True),
    Problem(5, 300, BF16, presence=True, frequency=True),
    Problem(4, 1000, FP32, bias=True, shared=True),
    Problem(7, 2048, BF16, **ALL),
]

# the vocabularies of SmolLM2, Llama-3 and Qwen2
real = [
    *(Problem(rows, cols, BF16, **ALL) for rows, cols in product((1, 3, 64), (49_152, 128_256, 151_936))),
    Problem(16, 151_936, FP32, mask=True),
    Problem(8, 262_144, FP16, repetition=True, shared=True),
]

bench = [
    *(Problem(rows, 128_256, BF16, **ALL) for rows in (1, 16, 64, 256)),
    *(Problem(rows, 151_936, BF16, mask=True) for rows in (1, 16, 64, 256)),
]


def drawn(s: Sizes) -> Problem:
    options = s.some(repetition=0.5, presence=0.4, frequency=0.4, bias=0.3, mask=0.3)
    return Problem(rows=s.rows(256), cols=s.model().vocab, dtype=FP32 if s.odds(0.3) else s.dtype(), **options)
