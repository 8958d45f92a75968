"""Problems of `quantized_matmul`."""

from dataclasses import replace
from itertools import product

from ...ops.quantized_matmul import Problem
from ..sizes import Sizes

small = [
    Problem(1, 64, 128),
    Problem(5, 70, 1280, norm=True, residual=True),
    Problem(3, 130, 640, "int4-128-zeros", bias=True),
    Problem(9, 72, 320, "int4-64"),
    Problem(5, 64, 192, "int4-64-zeros"),
    Problem(2, 100, 96, "int4-32", bias=True),
    Problem(17, 65, 160, "int4-32-zeros"),
    Problem(4, 80, 208, "int8", bias=True),
    Problem(7, 192, 272, "e4m3"),
    Problem(20, 129, 384, "e4m3-128"),
    Problem(6, 90, 288, "mxfp4"),
    Problem(33, 66, 144, "nvfp4", bias=True),
    Problem(4, 64, 640, "mxfp4", bias=True, norm=True, weight_offset=1.0),
    Problem(7, 66, 144, "e4m3", gated=True),
    Problem(2, 130, 256, "int8", gated=True, gelu_tanh=True),
]

real = [
    Problem(1, 4096, 4096),
    Problem(3, 2880, 2880, "mxfp4", bias=True),
    Problem(16, 1536, 2048, "int4-64-zeros"),
    Problem(70, 1152, 1536, "int4-32"),
    Problem(2, 2560, 2048, "int8"),
    Problem(40, 1000, 2048, "e4m3"),
    Problem(300, 1024, 1024, "e4m3-128", bias=True),
    Problem(600, 1024, 2048),
    Problem(130, 576, 1536, "nvfp4"),
    Problem(1, 6144, 4096, norm=True, residual=True),
    Problem(1, 4096, 14_336, "e4m3", gated=True),
    Problem(2, 2048, 2880, "mxfp4", norm=True, bias=True),
]

bench = [
    *(Problem(m, 8192, 8192) for m in (1, 16, 64, 512, 4096)),
    *(Problem(m, 8192, 8192, "e4m3") for m in (1, 16, 64, 512, 4096)),
    *(Problem(m, 8192, 8192, name) for m, name in product((1, 16), ("int4-128-zeros", "int4-64", "int4-32", "int8", "e4m3-128", "mxfp4", "nvfp4"))),
    *(Problem(m, n, k) for m in (1, 16, 256) for n, k in ((6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336))),  # Llama-3.1-8B
    *(Problem(1, n, 4096, name, norm=True, residual=True) for n in (6144, 28_672) for name in ("e4m3", "int4-128")),
    *(Problem(1, 4096, 14_336, name, gated=True) for name in ("e4m3", "int4-128")),
    *(Problem(m, n, k, "mxfp4") for m in (1, 16) for n, k in ((5760, 2880), (2880, 2880))),  # an expert of gpt-oss
]


def drawn(s: Sizes) -> Problem:
    n, k = s.linear(multiple=128)
    name = s.one_of({"int4-128": 4, "int4-128-zeros": 2, "int4-64": 1, "int4-32": 1, "int8": 2, "e4m3": 2, "e4m3-128": 1, "mxfp4": 2, "nvfp4": 1})
    return Problem(m=s.rows(4096), n=n, k=k, weight_format=name, **s.some(bias=0.2))


def drawn_few(s: Sizes) -> Problem:
    """A decode step of up to 16 users."""
    return replace(drawn(s), m=s.rows(16), weight_format=s.choice(("int4-128", "e4m3", "mxfp4")))
