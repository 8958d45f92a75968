"""Decode attention of real models, and odd shapes: empty, one key, padded, window, mixed pages."""

from dataclasses import replace
from itertools import product
from typing import Any

from ...ops.attention_decode import Problem
from ..sizes import BF16, FP16, FP32, Sizes

small = [
    Problem(1, 4, 1, 200, 64, BF16),
    Problem(3, 6, 2, 130, 64, BF16, return_lse=True),  # 3 query heads to a key head; one sequence has no key
    Problem(2, 2, 2, 77, 80, BF16, has_len=False),  # MHA
    Problem(2, 8, 1, 260, 96, FP16, return_lse=True),  # MQA
    Problem(4, 4, 2, 150, 64, BF16, has_start=True, return_lse=True),
    Problem(3, 4, 2, 300, 64, BF16, window=50, return_lse=True),
    Problem(2, 2, 1, 300, 128, BF16, window=100, has_start=True),
    Problem(3, 4, 2, 100, 64, BF16, page_size=16, return_lse=True),
    Problem(2, 8, 2, 200, 128, BF16, page_size=64),
    Problem(5, 2, 1, 120, 64, FP16, page_size=32, window=40, has_start=True, return_lse=True),
    Problem(2, 40, 2, 90, 64, BF16),  # 20 query heads to a key head
    Problem(2, 2, 1, 65, 256, BF16),
    Problem(1, 2, 1, 1, 64, BF16, return_lse=True),
    Problem(2, 4, 2, 170, 64, FP32, return_lse=True),
    # Several tokens: each sees one key more than the one before.
    Problem(3, 8, 2, 130, 64, BF16, q_len=2, return_lse=True),
    Problem(2, 3, 1, 90, 32, FP16, q_len=4, window=20, has_start=True, return_lse=True),
    Problem(3, 4, 2, 100, 64, BF16, page_size=16, q_len=3, sinks=True),
    # The columns of v are others than k's, or k's first ones.
    Problem(2, 12, 1, 100, 128, BF16, shared=True, return_lse=True),
    Problem(2, 5, 1, 70, 576, BF16, v_dim=512, shared=True),
    Problem(1, 20, 1, 80, 512, BF16, shared=True, sinks=True),
    Problem(2, 4, 4, 90, 192, BF16, v_dim=128, return_lse=True),
    Problem(2, 6, 2, 60, 64, FP16, v_dim=80),
    Problem(2, 8, 1, 65, 512, BF16),
    # Sinks, states that are merged later, and more heads than a tile has rows.
    Problem(4, 8, 2, 150, 64, BF16, window=40, sinks=True, return_lse=True),
    Problem(3, 6, 2, 120, 64, BF16, normalize=False),
    Problem(2, 4, 1, 90, 96, FP16, q_len=2, shared=True, v_dim=64, normalize=False),
    Problem(2, 126, 1, 70, 32, BF16, q_len=2, return_lse=True),
    # e4m3 with a scale for each key; scores with a soft cap.
    Problem(3, 6, 2, 130, 64, BF16, codes=True, return_lse=True),
    Problem(2, 8, 2, 100, 80, FP16, page_size=16, window=40, q_len=2, v_dim=64, codes=True),
    Problem(2, 4, 2, 90, 128, BF16, has_start=True, page_size=128, codes=True, softcap=True),
    Problem(2, 4, 1, 70, 96, FP16, softcap=True, return_lse=True),
]

real = [
    Problem(1, 32, 8, 16384, 128, BF16, return_lse=True),  # Llama-3.1-8B
    Problem(16, 28, 4, 4096, 128, BF16),  # Qwen2-7B
    Problem(16, 28, 4, 2000, 128, BF16, has_start=True),
    Problem(4, 32, 8, 8192, 128, BF16, window=4096),  # Mistral-7B
    Problem(8, 9, 3, 2048, 64, BF16),  # SmolLM2-135M
    Problem(32, 32, 8, 2048, 128, BF16, page_size=64),
    Problem(4, 32, 8, 5000, 128, BF16, page_size=16, return_lse=True),
    Problem(2, 32, 8, 3000, 128, BF16, page_size=256),
    Problem(2, 32, 32, 1024, 80, FP16),  # phi-2
    Problem(1, 8, 1, 4096, 256, BF16),  # Gemma-2B
    Problem(1, 64, 8, 65536, 128, BF16),  # Llama-3.1-70B
    Problem(8, 64, 8, 4096, 64, BF16, window=128, sinks=True),  # gpt-oss-120b, a layer with a window
    Problem(8, 32, 8, 4096, 128, BF16, q_len=4),  # Llama-3.1-8B with three drafted tokens
    Problem(128, 64, 1, 640, 512, BF16, shared=True, sinks=True, return_lse=True),  # DeepSeek-V4-Flash: window and chosen keys
    Problem(32, 128, 1, 1152, 512, BF16, shared=True, normalize=False),  # DeepSeek-V4-Pro
    Problem(16, 128, 1, 2048, 128, BF16, page_size=64),  # MQA
    Problem(4, 16, 16, 4096, 192, BF16, v_dim=128),  # DeepSeek-V2-Lite, not absorbed
    Problem(4, 16, 8, 4096, 256, BF16, window=4096, softcap=True),  # Gemma-2-9B
    Problem(16, 32, 8, 4096, 128, BF16, page_size=64, codes=True),
    Problem(8, 64, 8, 4096, 64, BF16, window=128, sinks=True, codes=True),
]

CONTEXTS = {1: (512, 2048, 8192, 16384, 65536), 4: (2048, 16384, 65536), 16: (1024, 4096, 16384), 64: (1024, 8192), 128: (512, 2048, 8192)}
bench = [
    Problem(batch, q_heads, kv_heads, context, head_dim, BF16, has_len=False)
    for (q_heads, kv_heads, head_dim) in ((32, 8, 128), (64, 8, 128), (32, 8, 64))
    for batch, contexts in CONTEXTS.items()
    for context in contexts
] + [Problem(batch, 32, 8, 8192, 128, BF16, page_size=page, has_len=False) for batch, page in product((1, 64), (16, 64, 256))]
bench += [Problem(batch, 32, 8, context, 128, BF16, has_len=False) for batch, context in ((1, 131072), (4, 131072), (256, 512), (256, 2048))]
bench += [Problem(batch, 32, 32, context, 128, BF16, has_len=False) for batch, context in ((1, 4096), (1, 16384), (16, 4096), (64, 1024))]
# One key head under 64 or 128 heads of 512 columns, where v is k.
PACKED = ((64, 640), (128, 1152))
bench += [Problem(batch, heads, 1, keys, 512, BF16, has_len=False, shared=True) for heads, keys in PACKED for batch in (1, 8, 32, 128)]
bench += [
    Problem(128, 64, 1, 640, 512, BF16, has_len=False),
    Problem(128, 64, 1, 640, 512, BF16, has_len=False, shared=True, q_len=2),
    Problem(8, 32, 8, 8192, 128, BF16, has_len=False, q_len=4),
    Problem(16, 64, 8, 8192, 64, BF16, has_len=False, window=128, sinks=True),
]
# A cache of 8 bits.
LONG = ((1, 131072), (16, 32768), (64, 8192))
bench += [Problem(batch, 32, 8, keys, 128, BF16, page_size=page, has_len=False, codes=True) for (batch, keys), page in product(LONG, (0, 64))]
bench += [Problem(16, 64, 8, 16384, 64, BF16, has_len=False, codes=True), Problem(16, 16, 8, 8192, 256, BF16, has_len=False, softcap=True)]


def drawn(s: Sizes) -> Problem:
    q_heads, kv_heads, head_dim = s.heads()
    batch, max_len = s.cache((3 << 30) // (4 * kv_heads * head_dim))
    kinds: dict[str, dict[str, Any]] = {
        "even": {"has_len": False},
        "ragged": {},
        "paged": {"page_size": s.choice((16, 64, 256))},
        "drafted": {"has_len": False, "q_len": s.choice((2, 3, 4))},
    }
    options = kinds[s.one_of({"even": 0.7, "ragged": 0.1, "paged": 0.12, "drafted": 0.08})]
    return Problem(batch=batch, q_heads=q_heads, kv_heads=kv_heads, max_len=max_len, head_dim=head_dim, dtype=s.dtype(), **options)


def drawn_codes(s: Sizes) -> Problem:
    """Over a cache of 8 bits."""
    p = drawn(s)
    return replace(p, dtype=BF16 if p.dtype == FP32 else p.dtype, head_dim=-(-p.head_dim // 4) * 4, codes=True)


def drawn_short(s: Sizes) -> Problem:
    """Many sequences of few keys: a batch of chats that have just begun."""
    p = drawn(s)
    return replace(p, batch=s.log(16, 256), max_len=s.log(64, 2048))


def drawn_long(s: Sizes) -> Problem:
    """Few sequences of many keys: long documents, one user."""
    p = drawn(s)
    return replace(p, batch=s.log(1, 6), max_len=s.log(2048, 131_072))
