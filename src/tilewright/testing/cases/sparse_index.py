"""The indexer of DeepSeek-V3.2: decoding, prompts, and odd shapes; keys of 8 and 16 bits."""

from typing import Any

import torch

from ...ops.sparse_index import Problem
from ..sizes import BF16, E4M3, FP16, FP32, Sizes

small = [
    Problem(3, 4, 20, 100, 64, E4M3, page_size=16, q_len=2),  # one sequence sees nothing
    Problem(2, 5, 7, 70, 40, BF16, q_len=6, has_start=True, has_len=False),
    Problem(1, 64, 130, 300, 128, E4M3, page_size=64),
    Problem(2, 3, 50, 33, 32, FP16, q_len=9),  # fewer keys than entries
    Problem(2, 8, 16, 90, 24, FP32, q_len=3, has_start=True),
]


def v32(batch: int, max_len: int, dtype: torch.dtype = E4M3, **options: Any) -> Problem:
    """DeepSeek-V3.2: 64 heads of 128, 2048 entries."""
    return Problem(batch, 64, 2048, max_len, 128, dtype, **options)


real = [
    v32(3, 4096, page_size=64),
    v32(1, 16_384, q_len=2),
    Problem(2, 32, 2048, 3000, 128, BF16, q_len=5, has_start=True),  # GLM-5
]

bench = [
    *(v32(batch, max_len, page_size=64) for batch, max_len in ((1, 8192), (1, 131_072), (16, 32_768), (64, 8192))),
    *(v32(1, max_len, page_size=64, q_len=q_len) for max_len, q_len in ((4096, 4096), (32_768, 4096), (131_072, 1024))),
    v32(16, 32_768, BF16),
]


def drawn(s: Sizes) -> Problem:
    q_len = s.choice((1, 1, 2, s.log(64, 2048)))
    max_len = s.log(2048, 131_072)
    heads, dtype = s.choice((64, 64, 32)), s.choice((E4M3, E4M3, BF16))
    most = max(1, min(64, (1 << 27) // (q_len * max_len)))
    return Problem(s.log(1, most), heads, 2048, max_len, 128, dtype, page_size=s.choice((0, 64)), q_len=q_len)
