"""Linear attention of real models, one token a sequence and many, and odd shapes: ragged, empty, a
tail of one token, heads that are no power of two.
"""

from ...ops.gated_delta_rule import Problem
from ..sizes import BF16, FP16, FP32, Sizes

small = [
    Problem(1, 1, 2, 130, 32, BF16),
    Problem(2, 1, 2, 1, 64, BF16),
    Problem(4, 2, 2, 150, 32, BF16, varlen=True),
    Problem(1, 1, 2, 65, 24, BF16, v_dim=40, has_state=False),
    Problem(2, 1, 1, 70, 32, FP16, v_dim=16),
    Problem(3, 1, 3, 100, 32, FP16, varlen=True, has_state=False, normalize=False),
    Problem(2, 1, 2, 9, 16, FP32),
    Problem(3, 1, 2, 20, 48, FP32, varlen=True),
    Problem(1, 1, 1, 3, 256, BF16),
    Problem(2, 1, 2, 1, 32, BF16, channels=True),
    Problem(3, 2, 2, 40, 24, FP16, v_dim=40, varlen=True, channels=True),
    Problem(1, 1, 2, 5, 16, FP32, has_state=False, channels=True),
]

real = [
    Problem(1, 16, 32, 2048, 128, BF16),  # Qwen3-Next-80B-A3B
    Problem(4, 16, 48, 700, 128, BF16),  # Qwen3.5-27B
    Problem(8, 4, 8, 1500, 128, BF16, varlen=True),
    Problem(64, 16, 32, 1, 128, BF16),
    Problem(3, 8, 8, 500, 128, FP16, has_state=False),
    Problem(2, 4, 4, 300, 64, FP32),
    Problem(1, 32, 32, 200, 128, BF16, channels=True),  # Kimi-Linear-48B-A3B
]

bench = [
    *(Problem(batch, 16, 32, tokens, 128, BF16) for batch, tokens in ((1, 2048), (4, 8192), (1, 32768), (1, 8192))),
    Problem(1, 2, 8, 32768, 128, BF16),
    Problem(16, 16, 32, 16384, 128, BF16, varlen=True),
    *(Problem(batch, 16, 32, 1, 128, BF16) for batch in (1, 16, 64, 256)),
    Problem(64, 32, 32, 1, 128, BF16, channels=True),
]


def drawn(s: Sizes) -> Problem:
    k_heads, group, head_dim = s.choice((2, 4, 8, 16)), s.choice((1, 2, 2, 3, 4)), s.choice((64, 128, 128, 128))
    if s.odds(0.4):
        return Problem(s.rows(256), k_heads, k_heads * group, 1, head_dim, s.dtype())
    batch, tokens = s.prompts(32_768, 32_768)
    varlen = batch > 1 and s.odds(0.3)
    return Problem(batch, k_heads, k_heads * group, tokens * (batch if varlen else 1), head_dim, s.dtype(), varlen=varlen)
