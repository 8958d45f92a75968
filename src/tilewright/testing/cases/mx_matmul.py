"""Problems of `mx_matmul`."""

from itertools import product

from ...ops.common.mx import MX_FORMATS
from ...ops.mx_matmul import Problem
from ..sizes import BF16, FP16, FP32, Sizes

small = [
    Problem(1, 64, 128),
    Problem(40, 72, 288, bias=True),
    Problem(3, 130, 96, "mxfp4", FP16, out_scale=True),
    Problem(70, 33, 80, "nvfp4", FP32, bias=True, out_scale=True),
]

real = [
    Problem(1, 1024, 2048),
    Problem(3, 2880, 2880, "mxfp4", bias=True),
    Problem(16, 1536, 2048, "nvfp4", out_scale=True),
    Problem(300, 1024, 1024),
    Problem(300, 1024, 1024, "mxfp4"),
    Problem(130, 576, 1536, "nvfp4", FP16, out_scale=True),
]

bench = [
    *(Problem(m, 8192, 8192, name) for name, m in product(MX_FORMATS, (1, 16, 64, 512, 4096))),
    *(Problem(m, n, k, name) for name, m in product(MX_FORMATS, (16, 1024)) for n, k in ((28_672, 4096), (4096, 14_336))),  # Llama-3.1-8B
]


def drawn(s: Sizes) -> Problem:
    n, k = s.linear(multiple=32)
    name = s.choice(tuple(MX_FORMATS))
    return Problem(m=s.rows(4096), n=n, k=k, mx_format=name, dtype=BF16, **s.some(bias=0.2, out_scale=0.5 * (name == "nvfp4")))
