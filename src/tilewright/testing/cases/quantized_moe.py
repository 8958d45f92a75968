"""Problems of `quantized_moe`."""

from typing import Any

from ...ops.quantized_moe import Problem
from ..sizes import Sizes

# top_k, experts, hidden, inter
GPT_OSS_20B, GPT_OSS_120B, QWEN3_30B_A3B = (4, 32, 2880, 2880), (4, 128, 2880, 2880), (8, 128, 2048, 768)
_OSS: dict[str, Any] = {"bias": True, "alpha": 1.702, "limit": 7.0, "up_offset": 1.0}

small = [
    Problem(1, 3, 3, 96, 64, foreign=1),
    Problem(5, 2, 4, 64, 160, foreign=1, **_OSS),
    Problem(40, 3, 5, 160, 96, foreign=1, **_OSS),
    Problem(20, 2, 3, 64, 32, "int4-32-zeros"),
    Problem(3, 2, 3, 256, 128, "int4-128"),
    Problem(18, 2, 3, 128, 256, "e4m3-128"),
    Problem(2, 3, 3, 48, 80, "e4m3"),
]

real = [
    Problem(1, 4, 8, 2880, 2880, **_OSS),
    Problem(16, 4, 8, 2880, 2880, **_OSS),
    Problem(300, 4, 8, 1024, 1536, **_OSS),
    Problem(4, 8, 16, 2048, 768, "int4-128"),
    Problem(200, 8, 16, 2048, 768, "e4m3-128"),
]

bench = [
    *(Problem(tokens, *model, **_OSS) for model in (GPT_OSS_20B, GPT_OSS_120B) for tokens in (1, 4, 16, 64, 256, 2048)),
    *(Problem(tokens, *QWEN3_30B_A3B, name) for name in ("int4-128", "e4m3-128") for tokens in (1, 16, 256)),
]


def drawn(s: Sizes) -> Problem:
    e = s.moe()
    name = s.one_of({"mxfp4": 4, "int4-128": 2, "int8": 1, "e4m3": 1})
    up = (e.hidden + 127) // 128 * 128, (e.inter + 127) // 128 * 128
    return Problem(s.rows(2048), e.top_k, e.experts, *up, weight_format=name)
