"""Sparse attention of DeepSeek's models while decoding: a window and chosen keys, and odd shapes.

Caches have 16 or 8 bits.
"""

from typing import Any

import torch

from ...ops.sparse_decode import Problem
from ..sizes import BF16, E4M3, FP16, FP32, Sizes

small = [
    Problem(3, 5, 40, 70, 64, BF16, has_length=True, return_lse=True),  # one sequence sees nothing
    Problem(2, 16, 100, 0, 128, FP16, q_len=3),
    Problem(1, 9, 33, 50, 512, BF16, E4M3, sinks=True, return_lse=True),
    Problem(2, 4, 77, 0, 576, BF16, E4M3, q_len=2, has_length=True, return_lse=True),
    Problem(2, 6, 1, 130, 192, FP16, v_dim=128, has_length=True, sinks=True),
    Problem(1, 66, 90, 20, 512, BF16, q_len=2),
    Problem(2, 3, 50, 0, 576, BF16, has_length=True),
    Problem(2, 6, 100, 40, 128, FP32, q_len=2, has_length=True, sinks=True, return_lse=True),
]


def flash(batch: int, cache_dtype: torch.dtype | None = None, **options: Any) -> Problem:
    """DeepSeek-V4-Flash: a window of 128, and 512 keys that the indexer chose."""
    return Problem(batch, 64, 128, 512, 512, BF16, cache_dtype, sinks=True, **options)


def pro(batch: int, cache_dtype: torch.dtype | None = None) -> Problem:
    """DeepSeek-V4-Pro: a window of 128, and 1024 chosen keys."""
    return Problem(batch, 128, 128, 1024, 512, BF16, cache_dtype, sinks=True)


def v32(batch: int, cache_dtype: torch.dtype | None = None) -> Problem:
    """DeepSeek-V3.2: 2048 chosen keys, latent and rotated."""
    return Problem(batch, 128, 2048, 0, 576, BF16, cache_dtype)


real = [
    flash(4),
    flash(3, E4M3, q_len=2, has_length=True, return_lse=True),
    pro(2, E4M3),
    v32(2, E4M3),
    v32(1),
    Problem(4, 128, 128, 8192, 512, BF16, E4M3, has_length=True, sinks=True),  # DeepSeek-V4-Pro, a layer that sees all compressed keys
    Problem(16, 16, 2048, 0, 576, BF16, E4M3, has_length=True),  # an eighth of the heads
]

bench = [model(batch, cache) for model in (flash, pro, v32) for cache in (None, E4M3) for batch in (1, 16, 128)]
bench.append(flash(64, E4M3, q_len=2))  # with a drafted token


def drawn(s: Sizes) -> Problem:
    cache_dtype = E4M3 if s.odds(0.5) else None
    heads, topk, more_topk, head_dim, sinks = s.choice(((64, 128, 512, 512, True), (128, 128, 1024, 512, True), (128, 2048, 0, 576, False)))
    shape: dict[str, Any] = {"q_heads": heads // s.choice((1, 1, 2, 4)), "topk": topk, "more_topk": more_topk, "head_dim": head_dim}
    return Problem(batch=s.rows(192), **shape, dtype=BF16, cache_dtype=cache_dtype, sinks=sinks)
