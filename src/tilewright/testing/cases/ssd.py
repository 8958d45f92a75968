"""State spaces of real models, one token a sequence and many, and odd shapes: ragged, empty, a tail
of one token, heads that are no power of two, rows of a state by index.
"""

from ...ops.ssd import Problem
from ..sizes import BF16, FP16, FP32, Sizes

small = [
    Problem(1, 2, 1, 49, 32, 32, BF16),
    Problem(2, 2, 1, 1, 32, 64, BF16, gate=True),
    Problem(4, 2, 2, 90, 16, 32, BF16, varlen=True, has_rows=True),
    Problem(1, 2, 1, 65, 40, 24, BF16, bias=False),
    Problem(2, 1, 1, 37, 16, 16, FP16, gate=True, softplus=False),
    Problem(3, 3, 1, 40, 16, 32, FP16, varlen=True, has_state=False, skip=False, bias=False, softplus=False),
    Problem(2, 4, 2, 9, 24, 16, FP32, gate=True),
    Problem(3, 2, 1, 20, 16, 48, FP32, varlen=True),
    Problem(3, 1, 1, 1, 256, 256, BF16, has_rows=True),
]

real = [
    Problem(1, 48, 1, 2048, 64, 128, BF16),  # granite-4.0-h-tiny
    Problem(2, 24, 1, 700, 64, 256, BF16),  # Falcon-H1-1.5B
    Problem(4, 128, 8, 1000, 64, 128, BF16, varlen=True),  # Nemotron-H-8B
    Problem(64, 128, 1, 1, 64, 128, BF16),  # Bamba-9B
    Problem(8, 32, 1, 1, 128, 256, BF16, gate=True, has_rows=True),  # Falcon-H1-34B
    Problem(3, 8, 2, 500, 64, 64, FP16, has_state=False),
    Problem(2, 4, 1, 300, 64, 64, FP32),
]

bench = [
    *(Problem(batch, 128, 8, tokens, 64, 128, BF16) for batch, tokens in ((1, 2048), (4, 8192), (1, 32768))),
    Problem(1, 48, 1, 2048, 64, 128, BF16),
    Problem(1, 48, 1, 32768, 64, 128, BF16),
    Problem(1, 32, 1, 8192, 128, 256, BF16),
    Problem(16, 128, 8, 16384, 64, 128, BF16, varlen=True),
    *(Problem(batch, 128, 8, 1, 64, 128, BF16) for batch in (1, 16, 64, 256)),
    Problem(64, 48, 1, 1, 64, 128, BF16),
]


def drawn(s: Sizes) -> Problem:
    groups, group = s.choice((1, 1, 2, 8)), s.choice((16, 24, 32, 48))
    heads, head_dim, state_dim = max(16, groups * group // s.choice((1, 2))), s.choice((64, 64, 64, 128)), s.choice((64, 128, 128, 256))
    heads -= heads % groups
    if s.odds(0.4):
        return Problem(s.rows(256), heads, groups, 1, head_dim, state_dim, s.dtype())
    batch, tokens = s.prompts(32_768, 32_768)
    varlen = batch > 1 and s.odds(0.3)
    return Problem(batch, heads, groups, tokens * (batch if varlen else 1), head_dim, state_dim, s.dtype(), varlen=varlen)
