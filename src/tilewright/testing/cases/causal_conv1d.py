"""Short convolutions of real models, one token a sequence and many, and odd shapes: odd channels,
ragged and empty sequences, prompts shorter than what a state keeps.
"""

from ...ops.causal_conv1d import Problem
from ..sizes import BF16, FP16, FP32, Sizes

small = [
    Problem(2, 37, 128, BF16),
    Problem(4, 61, 96, BF16, varlen=True, taps=4, bias=True),
    Problem(2, 1, 33, FP32, taps=4, bias=True),
    Problem(2, 19, 77, FP16, width=3, taps=0, silu=False),
    Problem(2, 2, 64, FP32, width=2),
]

real = [
    Problem(1, 2048, 8192, BF16, taps=4),  # Qwen3-Next-80B-A3B
    Problem(4, 700, 10_240, BF16),  # Qwen3.5-27B
    Problem(8, 5500, 8192, BF16, varlen=True),
    Problem(64, 1, 8192, BF16, taps=4),
    Problem(2, 1000, 4352, FP16, bias=True),  # Mamba-2
    Problem(3, 500, 1024, FP32, taps=0),
]

bench = [
    *(Problem(batch, tokens, 8192, BF16) for batch, tokens in ((1, 2048), (4, 8192), (1, 32768))),
    Problem(16, 16_384, 8192, BF16, varlen=True),
    Problem(1, 8192, 4352, BF16, bias=True),
    *(Problem(batch, 1, 8192, BF16) for batch in (1, 16, 64, 256)),
]


def drawn(s: Sizes) -> Problem:
    channels = s.choice((1024, 2048, 4096, 4352, 5376, 6144, 8192, 8448, 10_240, 12_288))
    if s.odds(0.4):
        return Problem(s.rows(1024), 1, channels, s.dtype(), bias=s.odds(0.3))
    batch, tokens = s.prompts(65_536, 65_536)
    varlen = batch > 1 and s.odds(0.3)
    return Problem(batch, tokens * (batch if varlen else 1), channels, s.dtype(), bias=s.odds(0.3), varlen=varlen)
