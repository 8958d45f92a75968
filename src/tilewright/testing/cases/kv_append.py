"""New keys and values of real models, one token a sequence and many, and odd shapes."""

from itertools import product
from typing import Any

from ...ops.kv_append import Problem
from ..sizes import BF16, E4M3, FP16, FP32, Sizes

_QK_NORM: dict[str, Any] = {"q_norm": True, "k_norm": True, "round_before_weight": True}
_MLA: dict[str, Any] = {"v_dim": 512, "rotary_dim": 64, "interleaved": True, "v_norm": True, "round_before_weight": True}

small = [
    Problem(2, 6, 2, 1, 64, 20, BF16, rotary_dim=64),
    Problem(4, 0, 3, 1, 80, 9, FP16),  # one sequence has nothing to add
    Problem(3, 5, 1, 7, 64, 33, BF16, rotary_dim=48, interleaved=True),
    Problem(3, 4, 4, 5, 48, 40, FP32, page_size=8, rotary_dim=24, own_rope_positions=True),
    Problem(2, 2, 2, 1, 64, 50, BF16, page_size=16, rotary_dim=64, cache_dtype=E4M3),
    Problem(2, 0, 2, 6, 40, 30, BF16, v_dim=96, cache_dtype=E4M3),
    Problem(2, 4, 1, 1, 64, 24, BF16, v_dim=512, rotary_dim=64, interleaved=True),  # MLA
    Problem(3, 4, 1, 2, 16, 24, FP16, v_dim=72, rotary_dim=16, interleaved=True, v_norm=True, round_before_weight=True),
    Problem(2, 0, 3, 1, 40, 30, BF16, cache_dtype=E4M3, v_norm=True),
    Problem(2, 6, 3, 1, 64, 20, BF16, rotary_dim=64, **_QK_NORM),
    Problem(3, 5, 2, 3, 80, 40, FP16, page_size=8, rotary_dim=48, interleaved=True, q_norm=True, k_norm=True),  # some columns only normed
    Problem(2, 2, 2, 1, 48, 30, BF16, rotary_dim=24, cache_dtype=E4M3, v_norm=True, **_QK_NORM),
    Problem(2, 0, 3, 2, 40, 30, FP32, k_norm=True),
    # Codes with scales of their own.
    Problem(3, 6, 3, 1, 64, 24, BF16, page_size=8, rotary_dim=48, cache_dtype=E4M3, v_norm=True, each=True),
]

real = [
    Problem(1, 32, 8, 1, 64, 8192, BF16, rotary_dim=64),  # Llama-3.2-1B, one token
    Problem(16, 28, 4, 1, 128, 4096, BF16, rotary_dim=128),  # Qwen2-7B
    Problem(32, 32, 8, 1, 128, 8192, BF16, page_size=64, rotary_dim=128),
    Problem(32, 32, 8, 1, 128, 8192, BF16, page_size=64, rotary_dim=128, cache_dtype=E4M3),
    Problem(32, 32, 8, 1, 128, 8192, BF16, page_size=64, rotary_dim=128, cache_dtype=E4M3, each=True),
    Problem(32, 16, 1, 1, 64, 8192, BF16, page_size=64, v_dim=512, rotary_dim=64, interleaved=True),  # DeepSeek-V2-Lite
    *(Problem(batch, 16, 1, 1, 64, 8192, BF16, **_MLA) for batch in (1, 16)),  # DeepSeek-V2-Lite in the engine
    Problem(1, 16, 1, 512, 64, 8192, BF16, **_MLA),
    *(Problem(batch, 32, 8, 1, 128, 8192, BF16, rotary_dim=128, **_QK_NORM) for batch in (1, 16)),  # Qwen3-8B
    Problem(1, 32, 8, 2048, 128, 8192, BF16, rotary_dim=128),  # a prompt
    Problem(1, 32, 32, 500, 80, 2048, FP16, rotary_dim=32),  # phi-2
]

bench = [Problem(batch, 32, 8, 1, 128, 4096, BF16, rotary_dim=128, page_size=page) for batch, page in product((1, 16, 128), (0, 64))]
bench += [
    Problem(1, 16, 1, 1, 64, 4096, BF16, v_dim=512, rotary_dim=64, interleaved=True),
    *(Problem(batch, 32, 8, 1, 128, 4096, BF16, rotary_dim=128, **_QK_NORM) for batch in (1, 16, 128)),
    Problem(8, 32, 8, 4096, 128, 8192, BF16, rotary_dim=128),
    Problem(8, 0, 8, 4096, 128, 8192, BF16),
    Problem(8, 0, 32, 4096, 128, 8192, BF16, page_size=64),
    Problem(8, 0, 32, 4096, 128, 8192, BF16, page_size=64, cache_dtype=E4M3),
]


def drawn(s: Sizes) -> Problem:
    q_heads, kv_heads, head_dim = s.heads()
    batch, tokens = (s.rows(256), 1) if s.odds(0.6) else s.prompts(32_768, 8192)
    max_len = max(1024, 1 << tokens.bit_length()) + s.log(1, 1024)
    shape: dict[str, Any] = {"batch": batch, "q_heads": q_heads, "kv_heads": kv_heads, "tokens": tokens, "head_dim": head_dim, "max_len": max_len}
    paged: dict[str, Any] = {"page_size": s.choice((16, 64, 256))} if s.odds(0.3) else {}
    return Problem(**shape, dtype=s.dtype(), rotary_dim=head_dim, **paged, **(_QK_NORM if s.odds(0.2) else {}))
