"""Problems of `rms_norm_route`."""

from ...ops.rms_norm_route import Problem
from ..sizes import BF16, EXPERTS, FP16, Sizes

small = [
    Problem(1, 8, 48, 2, residual=True),
    Problem(3, 60, 130, 4, BF16, normalize=False),
    Problem(2, 1, 7, 1, FP16, residual=True),
    Problem(1, 40, 264, 6, FP16, residual=True, sigmoid=True, bias=True, groups=8, top_groups=4, scale=2.5),
    Problem(2, 13, 72, 3, BF16, residual=True, router_bias=True),
    Problem(5, 13, 96, 13, BF16, round_before_weight=True, first_expert=7),
]

# DeepSeek-V2-Lite, -V2, -V3, Qwen3-30B-A3B, Mixtral-8x7B, gpt-oss-20b
real = [
    Problem(1, 64, 2048, 6, BF16, residual=True, round_before_weight=True, normalize=False),
    Problem(1, 160, 5120, 6, BF16, residual=True, normalize=False, groups=8, top_groups=3, scale=16.0),
    Problem(1, 256, 7168, 8, BF16, residual=True, sigmoid=True, bias=True, groups=8, top_groups=4, scale=2.5),
    Problem(1, 128, 2048, 8, BF16, residual=True),
    Problem(4, 8, 4096, 2, BF16, residual=True),
    Problem(1, 32, 2880, 4, BF16, residual=True, router_bias=True),
]

bench = real


def drawn(s: Sizes) -> Problem:
    e = s.choice(EXPERTS)
    return Problem(tokens=s.rows(16), experts=e.experts, k=e.hidden, top_k=e.top_k, dtype=BF16, residual=True)
