"""Prefill attention of real models, and odd shapes: ragged, empty, padded, q_len != kv_len."""

from itertools import product
from typing import Any

from ...ops.attention import Problem
from ..sizes import BF16, E4M3, FP16, FP32, Sizes

small = [
    Problem(1, 2, 2, 37, 37, 64, BF16),
    Problem(2, 6, 2, 33, 33, 64, BF16, return_lse=True),  # 3 query heads to a key head
    Problem(1, 4, 1, 20, 75, 80, BF16),  # MQA, a chunk of queries after a prefix
    Problem(1, 2, 1, 17, 40, 96, FP16, causal=False, return_lse=True),
    Problem(2, 2, 1, 70, 70, 64, BF16, window=24),
    Problem(1, 2, 2, 40, 90, 64, BF16, window=33, return_lse=True),
    Problem(1, 2, 1, 30, 50, 32, BF16, causal=False, window=16),
    Problem(3, 2, 1, 36, 36, 64, BF16, has_start=True, return_lse=True),  # rows before the start see nothing
    Problem(3, 4, 2, 19, 64, 64, BF16, has_len=True, return_lse=True),
    Problem(3, 2, 1, 24, 80, 64, FP32, has_start=True, has_len=True, window=30, return_lse=True),
    Problem(4, 4, 2, 120, 120, 64, BF16, varlen=True, return_lse=True, longest=64),
    Problem(3, 2, 1, 45, 140, 128, BF16, causal=False, varlen=True),
    Problem(1, 2, 2, 50, 21, 64, BF16, return_lse=True),  # more queries than keys: the first 29 see nothing
    Problem(1, 3, 1, 1, 130, 256, BF16),
    Problem(1, 2, 1, 65, 65, 64, FP32, return_lse=True),
    Problem(2, 4, 1, 70, 100, 64, FP32, v_dim=32, has_sinks=True),
    Problem(1, 2, 1, 40, 60, 128, FP32, v_dim=64),
    Problem(1, 2, 2, 45, 45, 192, BF16, v_dim=128, return_lse=True),
    Problem(2, 2, 1, 30, 50, 48, FP16, v_dim=96, has_len=True),
    Problem(1, 4, 2, 40, 60, 64, BF16, softcap=2.0, return_lse=True),
    Problem(1, 4, 2, 50, 70, 64, BF16, window=20, has_sinks=True, return_lse=True),
    Problem(3, 2, 1, 70, 70, 64, FP32, varlen=True, softcap=3.0, has_sinks=True),
    Problem(2, 4, 2, 40, 72, 64, E4M3, keys_last=True),
    Problem(2, 2, 1, 21, 50, 80, E4M3, causal=False, has_len=True),
    Problem(3, 2, 1, 70, 70, 128, E4M3, varlen=True, has_sinks=True, softcap=5.0),
    # A window of two sides.
    Problem(2, 4, 2, 50, 70, 64, BF16, window=9, ahead=5, return_lse=True),
    Problem(3, 2, 1, 90, 80, 80, FP16, ahead=7, varlen=True),
]

real = [
    Problem(4, 12, 12, 2048, 2048, 64, BF16, window=65, ahead=64),  # ModernBERT, a layer with a window
    Problem(1, 32, 8, 2048, 2048, 128, BF16),  # Llama-3.1-8B
    Problem(2, 28, 4, 1000, 1000, 128, BF16, has_start=True),  # Qwen2-7B, left-padded
    Problem(1, 32, 8, 128, 4096, 128, BF16, return_lse=True),  # a chunk of a long prompt: in KV splits
    Problem(1, 32, 8, 8192, 8192, 128, BF16, window=4096),  # Mistral-7B
    Problem(4, 9, 3, 777, 777, 64, BF16),  # SmolLM2-135M
    Problem(1, 32, 32, 1024, 1024, 80, FP16),  # phi-2
    Problem(2, 32, 32, 512, 512, 96, BF16),  # Phi-3-mini
    Problem(1, 8, 1, 1500, 1500, 256, BF16),  # Gemma-2B
    Problem(8, 32, 8, 5500, 5500, 128, BF16, varlen=True, return_lse=True, longest=1024),
    Problem(4, 32, 8, 100, 2048, 128, BF16, has_len=True),
    Problem(16, 16, 16, 197, 197, 64, FP16, causal=False),  # ViT-L
    Problem(1, 8, 8, 300, 300, 128, FP32),
    Problem(1, 16, 16, 2048, 2048, 192, BF16, v_dim=128),  # DeepSeek-V2-Lite, keys and values expanded
    Problem(1, 16, 8, 4096, 4096, 256, BF16, softcap=50.0),  # Gemma-2-9B
    Problem(1, 64, 8, 4096, 4096, 64, BF16, window=128, has_sinks=True),  # gpt-oss
    Problem(1, 32, 8, 2048, 2048, 128, E4M3, keys_last=True),
    Problem(1, 32, 8, 2048, 2048, 128, E4M3),
]

TOKENS = 16384
bench = [
    Problem(TOKENS // seq_len, q_heads, kv_heads, seq_len, seq_len, head_dim, BF16, causal=causal)
    for (head_dim, q_heads, kv_heads), causal, seq_len in product(
        ((128, 32, 32), (128, 32, 8), (64, 32, 32), (64, 32, 8)), (True, False), (512, 1024, 2048, 4096, 8192, 16384)
    )
]
bench += [
    Problem(TOKENS // seq_len, 16, 16, seq_len, seq_len, 256, BF16, causal=causal) for causal, seq_len in product((True, False), (1024, 4096, 16384))
]
bench += [Problem(4, 32, 32, seq_len, seq_len, 128, E4M3, causal=causal, keys_last=True) for causal, seq_len in product((True, False), (4096, 16384))]
bench += [Problem(1, 32, 8, 32768, 32768, head_dim, BF16, causal=causal) for head_dim, causal in product((128, 64), (True, False))]
bench += [Problem(TOKENS // seq_len, 64, 8, seq_len, seq_len, 128, BF16) for seq_len in (1024, 4096, 16384)]
bench += [
    Problem(4, 32, 8, 4096, 4096, 96, BF16),
    Problem(4, 32, 32, 4096, 4096, 80, FP16),
    Problem(4, 16, 16, 4096, 4096, 192, BF16, v_dim=128),
    Problem(4, 16, 8, 4096, 4096, 256, BF16, softcap=50.0),
    Problem(4, 64, 8, 4096, 4096, 64, BF16, window=128, has_sinks=True),
    Problem(4, 32, 8, 8192, 8192, 128, BF16, window=1024),
    Problem(4, 12, 12, 8192, 8192, 64, BF16, window=65, ahead=64),  # ModernBERT
]


def drawn(s: Sizes) -> Problem:
    q_heads, kv_heads, head_dim = s.heads()
    batch, q_len = s.prompts(32_768, 16_384)
    before = s.log(64, 16_384) if s.odds(0.1) and batch <= 4 else 0  # keys of a prompt's part that came first
    options: dict[str, Any] = {"v_dim": 128, "head_dim": 192} if head_dim == 128 and s.odds(0.05) else {"head_dim": head_dim}
    if s.odds(0.08):
        options["window"] = s.choice((128, 512, 1024, 4096))
    shape: dict[str, Any] = {"batch": batch, "q_heads": q_heads, "kv_heads": kv_heads, "q_len": q_len, "kv_len": q_len + before, "dtype": s.dtype()}
    return Problem(**shape, causal=bool(before) or "window" in options or s.odds(0.8), **options)
