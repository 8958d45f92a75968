"""Problems of `rope`."""

from itertools import product
from typing import Any

from ...ops.rope import Problem
from ..sizes import BF16, FP16, FP32, LARGE, Sizes

small = [
    Problem(1, 1, 1, 1, 2, FP32),
    Problem(1, 9, 3, 17, 64, BF16),
    Problem(2, 4, 2, 5, 64, FP32, from_positions=True),
    Problem(2, 3, 1, 7, 80, BF16),
    Problem(1, 4, 4, 33, 96, FP16, heads_inside=False),
    Problem(2, 4, 2, 9, 64, BF16, rotary_dim=32),
    Problem(3, 14, 2, 1, 64, FP16, from_positions=True),
    Problem(2, 4, 1, 5, 64, FP32, heads_inside=False, interleaved=True),
    Problem(2, 5, 1, 6, 96, BF16, rotary_dim=48, interleaved=True, from_positions=True),
    Problem(1, 3, 2, 70, 128, BF16),
]

# (q_heads, kv_heads, head_dim)
SMOLLM2, QWEN_05B, QWEN_7B, LLAMA_1B, LLAMA_8B, LLAMA_70B = (9, 3, 64), (14, 2, 64), (28, 4, 128), (32, 8, 64), (32, 8, 128), (64, 8, 128)

real = [
    *(
        Problem(batch, q_heads, kv_heads, seq_len, head_dim, BF16)
        for (batch, seq_len), (q_heads, kv_heads, head_dim) in product(((1, 1), (2, 509)), (SMOLLM2, QWEN_05B, QWEN_7B, LLAMA_8B, LLAMA_70B))
    ),
    Problem(64, *LLAMA_8B[:2], 1, 128, BF16, from_positions=True),
    Problem(3, *QWEN_7B[:2], 333, 128, FP16, from_positions=True),
    Problem(2, 32, 32, 300, 80, FP16, rotary_dim=32),  # Phi-2
    Problem(2, 32, 32, 129, 96, BF16),  # Phi-3-mini
    Problem(1, 16, 16, 257, 256, FP16, rotary_dim=64, interleaved=True),  # GPT-J
    Problem(2, 16, 1, 100, 64, BF16, interleaved=True),  # DeepSeek-V2-Lite's rotary part
    # Heads, lengths and halves that no tile divides
    Problem(3, 25, 5, 333, 64, BF16),
    Problem(2, 16, 16, 201, 80, BF16),
    Problem(1, 128, 8, 77, 192, BF16, rotary_dim=64),
    Problem(1, *LLAMA_8B[:2], 1000, 128, FP32, heads_inside=False),
    Problem(1, *LLAMA_8B[:2], 4096, 128, FP32, from_positions=True),
]

bench = [
    *(
        Problem(batch, q_heads, kv_heads, seq_len, head_dim, BF16)
        for (q_heads, kv_heads, head_dim), (batch, seq_len) in product(
            (QWEN_05B, QWEN_7B, LLAMA_1B, LLAMA_8B), ((1, 1), (16, 1), (64, 1), (1, 1024), (4, 4096), (4, 16_384))
        )
    ),
    Problem(64, *LLAMA_8B[:2], 1, 128, BF16, from_positions=True),
    Problem(4, *LLAMA_8B[:2], 8192, 128, BF16, from_positions=True),
    Problem(4, *LLAMA_8B[:2], 8192, 128, BF16, heads_inside=False),
    Problem(8, 16, 1, 8192, 64, BF16, interleaved=True),
]


def drawn(s: Sizes) -> Problem:
    q_heads, kv_heads, head_dim = s.heads()
    batch, seq_len = (s.rows(256), 1) if s.odds(0.3) else s.prompts(1 << 17, 16_384)
    options: dict[str, Any] = s.some(from_positions=0.1, interleaved=0.05) | ({"rotary_dim": head_dim // 2} if s.odds(0.05) else {})
    shape: dict[str, Any] = {"batch": batch, "q_heads": q_heads, "kv_heads": kv_heads, "seq_len": seq_len, "head_dim": head_dim, "dtype": s.dtype()}
    return Problem(**shape, heads_inside=not s.odds(0.1), **options)


def drawn_large(s: Sizes) -> Problem:
    """Long prompts, that memory bounds."""
    while True:
        p = drawn(s)
        if p.batch * p.seq_len * (p.q_heads + p.kv_heads) * p.head_dim >= LARGE:
            return p
