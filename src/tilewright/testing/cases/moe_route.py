"""Problems of `moe_route`."""

from typing import Any

from ...ops.moe_route import Problem
from ..sizes import BF16, FP16, FP32, Sizes

small = [
    Problem(5, 8, 2),
    Problem(1, 1, 1, BF16),
    Problem(37, 60, 4, BF16, normalize=False),  # Qwen1.5-MoE
    Problem(9, 128, 8, FP16, first_expert=96),
    Problem(3, 32, 32, FP32, sigmoid=True, scale=2.5),
    Problem(20, 40, 6, FP32, sigmoid=True, bias=True, groups=8, top_groups=4, scale=2.5),
    Problem(20, 40, 3, FP32, normalize=False, groups=5, top_groups=2, scale=16.0),
    Problem(7, 12, 2, BF16, bias=True, groups=12, top_groups=3),
    Problem(6, 300, 8, FP32, bias=True, sigmoid=True),
]

# DeepSeek-V2-Lite, -V2, -V3, Qwen3-30B-A3B, Mixtral-8x7B
_MODELS: tuple[tuple[int, int, dict[str, Any]], ...] = (
    (64, 6, {"normalize": False}),
    (160, 6, {"normalize": False, "groups": 8, "top_groups": 3, "scale": 16.0}),
    (256, 8, {"sigmoid": True, "bias": True, "groups": 8, "top_groups": 4, "scale": 2.5}),
    (128, 8, {}),
    (8, 2, {}),
)

real = [Problem(tokens, experts, top_k, FP32, **how) for experts, top_k, how in _MODELS for tokens in (1, 100)]

bench = [Problem(tokens, experts, top_k, FP32, **how) for experts, top_k, how in _MODELS for tokens in (1, 16, 512, 4096)]


def drawn(s: Sizes) -> Problem:
    experts, top_k, how = s.choice(_MODELS)
    return Problem(tokens=s.rows(16_384), experts=experts, top_k=top_k, dtype=FP32, **how)
