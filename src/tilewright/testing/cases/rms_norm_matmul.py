"""Problems of `rms_norm_matmul`."""

from dataclasses import replace
from itertools import product

from ...ops.rms_norm_matmul import Problem
from ..sizes import BF16, FP16, FP32, Sizes

small = [
    Problem(1, 5, 7, FP32, residual=True),
    Problem(1, 96, 576, BF16, residual=True, silu_mul=True),
    Problem(2, 130, 257, FP16, bias=True, residual=True),
    Problem(3, 34, 520, BF16, bias=True, silu_mul=True),
    Problem(1, 270, 1100, BF16),
    Problem(9, 40, 72, FP16, residual=True),
    Problem(16, 130, 300, BF16, bias=True, residual=True),
    Problem(11, 72, 600, BF16, residual=True, silu_mul=True),
]

# (n, k): q, k and v; gate and up
_QWEN2_7B = (Problem(1, 4608, 3584, BF16, bias=True, residual=True), Problem(1, 37_888, 3584, BF16, residual=True, silu_mul=True))
_LLAMA_31_8B = (Problem(1, 6144, 4096, BF16, residual=True), Problem(1, 28_672, 4096, BF16, residual=True, silu_mul=True))
_DEEPSEEK_V2_LITE = (Problem(1, 3648, 2048, BF16, residual=True), Problem(1, 21_888, 2048, BF16, residual=True, silu_mul=True))
_SMOLLM2_135M = (Problem(1, 960, 576, BF16, residual=True), Problem(1, 3072, 576, BF16, residual=True, silu_mul=True))
_HEADS = (Problem(1, 128_256, 4096, BF16, residual=True), Problem(1, 102_400, 2048, BF16, residual=True))

_MODELS = (*_QWEN2_7B, *_LLAMA_31_8B, *_DEEPSEEK_V2_LITE)

real = [*_MODELS, *_SMOLLM2_135M, *_HEADS, Problem(2, 6144, 4096, BF16, residual=True), Problem(4, 960, 576, FP16)]
real += [replace(p, rows=16) for p in _QWEN2_7B]

bench = [
    *(Problem(rows, p.n, p.k, BF16, p.bias, p.residual, p.silu_mul) for rows, p in product((1, 2, 16), _MODELS)),
    *_SMOLLM2_135M,
    *_HEADS,
]


def drawn(s: Sizes) -> Problem:
    n, k = s.linear()
    return Problem(rows=s.rows(16), n=n - n % 2, k=k, dtype=s.dtype(), **s.some(bias=0.1, residual=0.5, silu_mul=0.3))
