"""Merges of cascades and split contexts, and odd shapes: one state, odd counts, empty sets."""

from ...ops.merge_states import Problem
from ..sizes import BF16, FP16, FP32, Sizes

small = [
    Problem(2, 37, 64, BF16),
    Problem(3, 130, 128, BF16),
    Problem(1, 5, 80, FP16),
    Problem(7, 33, 96, FP32, base2=True),
    Problem(2, 64, 128, FP32),
    Problem(40, 9, 512, BF16),
    Problem(2, 1, 64, FP16, base2=True),
]

real = [
    Problem(2, 32 * 4096, 128, BF16),  # a shared prefix of 4096 tokens of Llama-3.1-8B
    Problem(2, 128 * 128, 512, BF16),  # window and compressed keys of 128 heads, batch 128
    Problem(3, 16 * 2048, 128, FP16),
    Problem(8, 64 * 32, 128, FP32),
    Problem(5, 28 * 1000, 128, BF16, base2=True),
]

bench = [
    *(Problem(2, rows, 128, dtype) for rows in (32 * 64, 32 * 4096, 32 * 65536) for dtype in (BF16, FP32)),
    Problem(2, 128 * 1024, 512, BF16),
    Problem(4, 32 * 16384, 128, BF16),
    Problem(8, 32 * 8192, 128, BF16),
    Problem(3, 32 * 16384, 64, BF16),
]


def drawn(s: Sizes) -> Problem:
    states, cols = s.log(2, 16), s.choice((64, 80, 96, 128, 192, 256, 512))
    return Problem(states=states, rows=s.log(32, (1 << 28) // (states * cols)), cols=cols, dtype=FP32 if s.odds(0.3) else BF16)
