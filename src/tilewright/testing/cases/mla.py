"""Prefill of DeepSeek-V2 and V3, chunked too, and the shapes that break kernels."""

from itertools import product

from ...ops.mla import Problem
from ..sizes import BF16, E4M3, FP16, Sizes

small = [
    Problem(1, 2, 45, 45, BF16),
    Problem(2, 3, 33, 70, FP16, has_len=True, return_lse=True),
    Problem(1, 2, 40, 21, BF16, return_lse=True),  # more queries than keys: the first 19 see nothing
    Problem(1, 2, 20, 50, BF16, causal=False, nope_dim=48, rope_dim=24, v_dim=80),
    Problem(2, 2, 40, 64, E4M3, keys_last=True),
    Problem(2, 2, 17, 50, E4M3, has_len=True),
]

real = [
    Problem(1, 16, 2048, 2048, BF16),  # DeepSeek-V2-Lite
    Problem(2, 16, 512, 4096, BF16, has_len=True, return_lse=True),  # a chunk of a long prompt
    Problem(1, 128, 1000, 1000, BF16),  # DeepSeek-V3
    Problem(1, 16, 2048, 2048, E4M3, keys_last=True),
]

bench = [Problem(4, 16, seq_len, seq_len, BF16, causal=causal) for causal, seq_len in product((True, False), (1024, 2048, 4096, 8192))]
bench += [Problem(4, 16, seq_len, seq_len, E4M3, keys_last=True) for seq_len in (4096, 8192)]


def drawn(s: Sizes) -> Problem:
    batch, q_len = s.prompts(16_384, 8192)
    return Problem(batch=batch, heads=s.choice((16, 32, 64, 128)), q_len=q_len, kv_len=q_len, dtype=BF16)
