"""Latent attention of DeepSeek's models while decoding.

And odd shapes: odd heads, several tokens, shuffled pages.
"""

from typing import Any

from ...ops.mla_decode import Problem
from ..sizes import BF16, FP16, Sizes

small = [
    Problem(3, 16, 100, BF16, return_lse=True),  # one sequence has no key
    Problem(2, 5, 70, FP16, q_len=3, latent=64, rope=16, return_lse=True),
    Problem(1, 40, 90, BF16, q_len=2, latent=128, rope=32),
    Problem(2, 128, 65, BF16, latent=128, rope=64, has_len=False),
    Problem(3, 16, 140, BF16, latent=128, page_size=16, return_lse=True),
    Problem(2, 3, 200, BF16, latent=256, page_size=64),
    Problem(4, 6, 90, FP16, latent=64, rope=16, has_start=True),
    Problem(2, 5, 70, FP16, q_len=2, latent=64, rope=16, page_size=16, codes=True),
]

real = [
    Problem(1, 16, 4096, BF16),  # DeepSeek-V2-Lite
    Problem(32, 16, 4096, BF16, page_size=64, return_lse=True),
    Problem(1, 16, 512, BF16, has_start=True),  # a patched model
    Problem(16, 16, 2048, BF16, has_start=True),
    Problem(8, 128, 8192, BF16, page_size=64),  # DeepSeek-V3
    Problem(4, 128, 4000, BF16, q_len=2),  # with a drafted token
    Problem(16, 32, 2000, FP16),
    Problem(8, 128, 4096, BF16, page_size=64, codes=True),
    Problem(3, 16, 2000, BF16, codes=True),
]

bench = [
    *(Problem(128, heads, 4096, BF16, has_len=False) for heads in (16, 32, 64, 128)),
    *(Problem(1, 16, context, BF16, has_len=False) for context in (256, 1024, 4096, 16384)),
    Problem(32, 16, 4096, BF16, has_len=False),
    Problem(128, 128, 4096, BF16, page_size=64, has_len=False),
    Problem(128, 128, 4096, BF16, q_len=2, has_len=False),
    *(Problem(128, heads, 4096, BF16, has_len=False, codes=True) for heads in (16, 128)),
]


def drawn(s: Sizes) -> Problem:
    batch, max_len = s.cache((3 << 30) // (2 * 576))
    heads, paged = s.choice((8, 16, 32, 64, 128)), s.odds(0.1)
    options: dict[str, Any] = {"page_size": 64} if paged else {"has_len": s.odds(0.2)}
    return Problem(batch=batch, heads=heads, max_len=max_len, dtype=BF16, q_len=2 if s.odds(0.05) else 1, **options)
