"""Problems of `moe`."""

from typing import Any

from ...ops.common.scaling import Scaling
from ...ops.moe import Problem
from ..sizes import BF16, FP16, Sizes

ROW, BLOCK = Scaling.ROW, Scaling.BLOCK

# top_k, experts, hidden, inter
DEEPSEEK_V2_LITE, QWEN3_30B_A3B, MIXTRAL_8X7B = (6, 64, 2048, 1408), (8, 128, 2048, 768), (2, 8, 4096, 14_336)
GPT_OSS_20B = (4, 32, 2880, 2880)
_OSS: dict[str, Any] = {"bias": True, "alpha": 1.702, "limit": 7.0, "up_offset": 1.0}

small = [
    Problem(5, 2, 4, 48, 40),
    Problem(1, 3, 7, 72, 136),
    Problem(40, 3, 5, 70, 33, FP16),
    Problem(16, 4, 9, 64, 96, foreign=2),
    Problem(33, 1, 6, 136, 72, only=(4,)),  # all tokens to one expert
    Problem(70, 2, 130, 40, 24, only=(0, 64, 129)),
    Problem(1, 4, 6, 272, 128, scaling=BLOCK, foreign=1),
    Problem(7, 2, 5, 200, 128, scaling=BLOCK),
    Problem(50, 2, 5, 160, 256, scaling=BLOCK),
    Problem(21, 2, 3, 96, 112, FP16, scaling=ROW),
    Problem(3, 2, 3, 40, 24, foreign=2),  # nothing to do
    Problem(1, 3, 7, 72, 136, shared=2),
    Problem(1, 2, 5, 40, 70, FP16, shared=1, foreign=2),
    *(Problem(tokens, 3, 5, 40, 72, foreign=1, **_OSS) for tokens in (1, 6, 40)),
    Problem(20, 2, 3, 136, 48, FP16, scaling=ROW, **(_OSS | {"limit": 0.5})),
]

real = [
    Problem(1, *DEEPSEEK_V2_LITE),
    Problem(1, *QWEN3_30B_A3B),
    Problem(1, *DEEPSEEK_V2_LITE, shared=2),
    Problem(4, 8, 32, 2048, 768),
    Problem(16, 6, 16, 2048, 1408),
    Problem(96, 6, 16, 2048, 1408),
    Problem(300, 2, 8, 1024, 1792),
    Problem(600, 8, 32, 2048, 768, foreign=4),
    Problem(1, 8, 16, 2048, 768, scaling=BLOCK),
    Problem(16, 8, 16, 2048, 768, scaling=BLOCK),
    Problem(600, 8, 16, 2048, 768, scaling=BLOCK),
    Problem(300, 2, 8, 1024, 1792, scaling=ROW),
    *(Problem(tokens, *GPT_OSS_20B, **_OSS) for tokens in (1, 8, 512)),
]

_TOKENS = (1, 4, 16, 64, 512, 4096)

bench = [
    *(Problem(tokens, *model) for model in (DEEPSEEK_V2_LITE, QWEN3_30B_A3B, MIXTRAL_8X7B) for tokens in _TOKENS),
    *(Problem(tokens, *model, scaling=BLOCK) for model in (DEEPSEEK_V2_LITE, QWEN3_30B_A3B, MIXTRAL_8X7B) for tokens in _TOKENS),
    Problem(4096, *QWEN3_30B_A3B, scaling=ROW),
    Problem(1, *DEEPSEEK_V2_LITE, shared=2),
    *(Problem(tokens, *GPT_OSS_20B, **_OSS) for tokens in _TOKENS),
]


def drawn(s: Sizes) -> Problem:
    return Problem(tokens=s.rows(8192), **s.moe()._asdict(), dtype=BF16)


def drawn_fp8(s: Sizes) -> Problem:
    while True:
        e = s.moe()
        if e.hidden % 128 == e.inter % 128 == 0:
            return Problem(tokens=s.rows(8192), **e._asdict(), dtype=BF16, scaling=s.one_of({ROW: 0.3, BLOCK: 0.7}))
