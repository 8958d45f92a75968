"""Problems of `quantize_mx`."""

from itertools import product

from ...ops.common.mx import MX_FORMATS
from ...ops.quantize_mx import Problem
from ..sizes import BF16, FP16, FP32, Sizes

small = [
    Problem(33, 288, BF16),
    Problem(17, 416, FP16, "mxfp4"),
    Problem(9, 144, BF16, "nvfp4"),
    Problem(40, 528, FP32, "nvfp4", factor=True),
]

# (rows, cols): activations of Qwen2.5-0.5B, gpt-oss, Llama-3.1-8B and DeepSeek-V3
real = [
    *(Problem(rows, cols, BF16, name) for name, rows, cols in product(MX_FORMATS, (1, 509), (896, 2880, 4096))),
    Problem(300, 7168, BF16, "nvfp4", factor=True),
]

bench = [Problem(rows, cols, BF16, name) for name, rows, cols in product(MX_FORMATS, (1, 1024, 16_384), (4096, 7168))]


def drawn(s: Sizes) -> Problem:
    name = s.choice(tuple(MX_FORMATS))
    cols = s.linear(multiple=32)[1]
    return Problem(rows=s.rows(min(1 << 17, (1 << 28) // cols)), cols=cols, dtype=s.dtype(), mx_format=name, factor=name == "nvfp4" and s.odds(0.5))
