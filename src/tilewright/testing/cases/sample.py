"""Problems of `sample`."""

from itertools import product

from ...ops.sample import Problem
from ..sizes import BF16, FP16, FP32, Sizes

small = [
    Problem(1, 1, FP32, top_k=True, top_p=True),
    Problem(3, 7, FP32, temperature=False, offset=False),
    Problem(8, 1000, BF16, top_k=True),
    Problem(5, 4097, FP32, top_p=True),
    Problem(9, 300, FP16, top_k=True, top_p=True, per_row=True),
    Problem(7, 2048, FP32, top_k=True, top_p=True, per_row=True),
    Problem(6, 777, BF16, top_p=True, per_row=True, offset=False),
    Problem(2, 16_411, FP32, top_k=True, top_p=True),
    Problem(5, 333, FP32, min_p=True, per_row=True),
    Problem(4, 2000, BF16, top_k=True, top_p=True, min_p=True),
]

# the vocabularies of SmolLM2, Llama-3 and Qwen2
real = [
    *(Problem(rows, cols, BF16, top_k=True, top_p=True) for rows, cols in product((1, 3, 64), (49_152, 128_256, 151_936))),
    *(Problem(rows, 151_936, FP32, top_p=True, per_row=True) for rows in (2, 16)),
    Problem(8, 128_256, FP32, top_k=True, per_row=True),
    Problem(64, 128_256, FP32),
    Problem(5, 262_144, FP16, top_p=True, min_p=True),  # Gemma
]

bench = [
    *(
        Problem(rows, cols, FP32, top_k=top_k, top_p=top_p)
        for cols, rows, (top_k, top_p) in product((128_256, 151_936), (1, 16, 64), ((False, False), (True, False), (False, True), (True, True)))
    ),
    *(Problem(rows, 128_256, BF16, top_k=True, top_p=True) for rows in (1, 16, 64, 256)),
]


def drawn(s: Sizes) -> Problem:
    return Problem(rows=s.rows(256), cols=s.model().vocab, dtype=FP32 if s.odds(0.7) else s.dtype(), **s.some(top_k=0.5, top_p=0.5, min_p=0.3))
