"""Merges of cascades and split contexts, and odd shapes: one state, odd counts, empty sets."""

import torch

from ...ops.merge_states import Problem
from ..sizes import Sizes

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32

small = [
    Problem(2, 37, 64, BRAIN),
    Problem(3, 130, 128, BRAIN),
    Problem(1, 5, 80, HALF),
    Problem(7, 33, 96, SINGLE, base2=True),
    Problem(2, 64, 128, SINGLE),
    Problem(40, 9, 512, BRAIN),
    Problem(2, 1, 64, HALF, base2=True),
]

real = [
    Problem(2, 32 * 4096, 128, BRAIN),  # a shared prefix of 4096 tokens of Llama-3.1-8B
    Problem(2, 128 * 128, 512, BRAIN),  # window and compressed keys of 128 heads, batch 128
    Problem(3, 16 * 2048, 128, HALF),
    Problem(8, 64 * 32, 128, SINGLE),
    Problem(5, 28 * 1000, 128, BRAIN, base2=True),
]

bench = [
    *(Problem(2, rows, 128, dtype) for rows in (32 * 64, 32 * 4096, 32 * 65536) for dtype in (BRAIN, SINGLE)),
    Problem(2, 128 * 1024, 512, BRAIN),
    Problem(4, 32 * 16384, 128, BRAIN),
    Problem(8, 32 * 8192, 128, BRAIN),
    Problem(3, 32 * 16384, 64, BRAIN),
]


def drawn(s: Sizes) -> Problem:
    states, cols = s.log(2, 16), s.choice((64, 80, 96, 128, 192, 256, 512))
    return Problem(states=states, rows=s.log(32, (1 << 28) // (states * cols)), cols=cols, dtype=SINGLE if s.odds(0.3) else BRAIN)
