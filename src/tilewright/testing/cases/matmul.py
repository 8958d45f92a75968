"""Problems of `matmul`."""

import random
from dataclasses import replace
from itertools import product

import torch

from ...ops.common.scaling import Scaling
from ...ops.matmul import Problem
from ..sizes import BF16, E4M3, E5M2, FP16, FP32, Sizes

TENSOR, ROW, BLOCK = Scaling.TENSOR, Scaling.ROW, Scaling.BLOCK

# (n, k) of the linear layers: q and o, k and v, gate and up, down
QWEN2_7B = ((3584, 3584), (512, 3584), (18_944, 3584), (3584, 18_944))
LLAMA_31_8B = ((4096, 4096), (1024, 4096), (14_336, 4096), (4096, 14_336))
HEADS = ((152_064, 3584), (128_256, 4096))
# DeepSeek-V3's dense layers, as DeepGEMM lists them
DEEPSEEK = ((2112, 7168), (576, 7168), (24_576, 1536), (32_768, 512), (7168, 16_384), (4096, 7168), (7168, 2048))


MOST_WAVE_TILES = 264  # of an H200 in two waves


def _drawn(count: int, seed: int) -> list[Problem]:
    """Shapes nobody tuned for: m from 1 to 16384, n and k multiples of 8, all log-uniform."""
    draw = random.Random(seed)

    def one(dtype: torch.dtype) -> Problem:
        m, n, k = round(2 ** draw.uniform(0, 14)), 8 * round(2 ** draw.uniform(6, 12)), 8 * round(2 ** draw.uniform(6, 11))
        return Problem(m, n, k, dtype)

    return [one((BF16, FP16)[i % 2]) for i in range(count)]


small = [
    Problem(1, 1, 1, FP32),
    Problem(3, 5, 7, BF16, trans_b=False),
    Problem(1, 130, 257, BF16, bias=True),
    Problem(4, 96, 576, BF16),
    Problem(9, 257, 130, FP16, bias=True),
    Problem(33, 70, 65, BF16, trans_a=True, trans_b=False),
    Problem(40, 24, 70, FP16, trans_a=True, bias=True),
    Problem(64, 128, 192, BF16, trans_b=False, bias=True),
    Problem(67, 131, 127, FP32),
    Problem(129, 66, 250, FP16, trans_b=False),
    Problem(200, 150, 100, FP32, tf32=True),
    Problem(17, 48, 64, FP32, trans_a=True, trans_b=False, tf32=True, bias=True),
    Problem(2, 64, 96, FP32, bias=True),
    Problem(300, 270, 40, BF16, bias=True),
    Problem(5, 48, 96, E4M3, scaling=TENSOR),
    Problem(70, 130, 272, E4M3, scaling=ROW, bias=True),
    Problem(33, 200, 300, E4M3, scaling=BLOCK),
    Problem(40, 136, 272, E4M3, scaling=BLOCK, plain_scales=2),
    Problem(140, 144, 384, E5M2, scaling=BLOCK, out_dtype=FP16),
    Problem(20, 144, 264, E4M3, scaling=BLOCK, out_dtype=FP32),
    Problem(130, 64, 64, E4M3, trans_b=False, scaling=ROW, out_dtype=FP16),
    Problem(9, 160, 128, E4M3, scaling=TENSOR, silu_mul=True),
    Problem(37, 96, 64, BF16, silu_mul=True, residual=True, out_scale=True, bias=True),
    Problem(129, 130, 80, FP16, residual=True, out_dtype=FP32),
    Problem(1, 96, 520, BF16, silu_mul=True, residual=True),
    Problem(2, 70, 264, FP16, residual=True, bias=True),
]

real = [
    Problem(1, 3584, 3584, BF16, bias=True),  # Qwen2-7B q_proj, one token
    Problem(7, 512, 3584, BF16, bias=True),  # k_proj
    Problem(1, 18_944, 3584, BF16),
    Problem(16, 3584, 18_944, BF16),
    Problem(1, 151_936, 896, BF16),  # Qwen2.5-0.5B head
    Problem(3, 128_256, 2048, BF16),  # Llama-3.2-1B head
    Problem(33, 14_336, 4096, BF16),  # Llama-3.1-8B gate_proj
    Problem(64, 4096, 14_336, BF16),
    Problem(100, 1024, 4096, FP16),
    Problem(509, 3584, 3584, BF16, bias=True),
    Problem(512, 4608, 3584, BF16, bias=True),  # Qwen2-7B, q, k and v at once
    Problem(2048, 1024, 4096, BF16),
    Problem(1024, 1024, 1024, BF16, trans_b=False),
    Problem(4096, 4096, 4096, BF16, trans_b=False),
    Problem(1000, 2304, 5760, FP16, trans_a=True),  # TT and TN at size
    Problem(1000, 2304, 5760, FP16, trans_a=True, trans_b=False),
    Problem(512, 1536, 576, FP32),  # SmolLM2-135M up_proj
    Problem(512, 1536, 576, FP32, tf32=True),
    Problem(1, 49_152, 576, FP32),
    *(Problem(m, n, k, E4M3, scaling=s) for (m, n, k), s in product(((64, 2112, 7168), (128, 4096, 7168), (500, 7168, 2048)), (TENSOR, ROW, BLOCK))),
    Problem(4096, 576, 7168, E4M3, scaling=ROW),
    Problem(320, 32_576, 7168, E4M3, scaling=TENSOR),  # 2.5 x 128 rows, 254.5 x 128 columns
    Problem(320, 32_576, 7168, E4M3, scaling=BLOCK),
    Problem(300, 4096, 2048, E4M3, scaling=ROW, out_dtype=FP32),
    Problem(300, 4096, 2048, E4M3, scaling=BLOCK, silu_mul=True),
    *(Problem(260, 1040, 2048, E4M3, scaling=BLOCK, plain_scales=some) for some in (1, 2)),
    Problem(1, 28_672, 4096, BF16, silu_mul=True),  # Llama-3.1-8B gate and up
    Problem(1, 4096, 4096, BF16, residual=True),
    Problem(2, 4096, 14_336, BF16),
    Problem(16, 1152, 3584, BF16, bias=True),  # Qwen2-7B on four GPUs: q, k and v
    Problem(16, 2304, 3584, BF16, bias=True),  # on two
    Problem(700, 28_672, 4096, BF16, silu_mul=True),
    Problem(700, 4096, 4096, BF16, residual=True),
]

# Qwen2-7B on two and on four GPUs: q, k and v; o; gate and up; down
_PARTS = (
    *((2304, 3584, "bias"), (3584, 1792, ""), (18_944, 3584, "silu_mul"), (3584, 9472, "")),
    *((1152, 3584, "bias"), (3584, 896, ""), (9472, 3584, "silu_mul"), (3584, 4736, "")),
)

bench = [
    *(Problem(n, n, n, BF16, trans_b=False) for n in (1024, 2048, 4096, 8192, 16_384)),
    *(Problem(m, n, k, BF16) for (n, k), m in product((*QWEN2_7B, *LLAMA_31_8B), (64, 128, 512, 2048, 8192))),
    *(Problem(m, n, k, BF16) for (n, k), m in product((*QWEN2_7B, *LLAMA_31_8B, *HEADS), (1, 4, 8, 16))),
    *(Problem(16, n, k, BF16, bias=option == "bias", silu_mul=option == "silu_mul") for n, k, option in _PARTS),
    *_drawn(40, seed=3),
    *(Problem(m, n, k, E4M3, scaling=s) for s, (n, k), m in product((TENSOR, ROW, BLOCK), DEEPSEEK, (64, 128, 4096))),
    *(Problem(320, 32_576, 7168, E4M3, scaling=s) for s in (TENSOR, ROW, BLOCK)),
]


def drawn(s: Sizes) -> Problem:
    n, k = s.linear()
    return Problem(m=s.rows(8192), n=n, k=k, dtype=s.dtype(), **s.some(bias=0.1))


def drawn_few(s: Sizes) -> Problem:
    """A decode step of up to 64 users."""
    return replace(drawn_fp8(s) if s.odds(0.25) else drawn(s), m=s.rows(64))


def drawn_wave(s: Sizes) -> Problem:
    """A prompt, or a step of many users, that two waves of 128x128 tiles cover."""
    while True:
        p = drawn_fp8(s) if s.odds(0.3) else drawn(s)
        if p.k >= 512 and -(-p.n // 128) <= MOST_WAVE_TILES // 2:
            rows = range(65, min(2048, 128 * (MOST_WAVE_TILES // -(-p.n // 128))))
            return replace(p, m=s.log(rows.start, rows.stop))


def drawn_fp8(s: Sizes) -> Problem:
    scaling = s.choice((TENSOR, ROW, BLOCK))
    multiple = 128 if scaling is BLOCK else 16
    n, k = s.deep_linear(multiple) if s.odds(0.25) else s.linear(multiple)
    return Problem(m=s.rows(8192), n=n, k=k, dtype=E4M3, scaling=scaling)


def drawn_thin(s: Sizes) -> Problem:
    """Few rows and a short sum, such as adapters and heads."""
    return replace(drawn(s), m=s.rows(256), n=s.log(1024, 32_768, 8), k=s.log(64, 1024, 8))


def drawn_heavy(s: Sizes) -> Problem:
    """A decode step of several users with weights that are far larger than the L2 cache."""
    while True:
        p = drawn_fp8(s) if s.odds(0.25) else drawn(s)
        if 80 << 20 <= p.n * p.k * p.dtype.itemsize <= 300 << 20:
            return replace(p, m=s.log(9, 64))


def drawn_ragged(s: Sizes) -> Problem:
    """Rows that begin off multiples of 128 bytes, as adapters, heads and odd shares have them."""
    while True:
        p = replace(drawn(s), m=s.rows(512), n=s.log(256, 32_768, 8), k=s.log(256, 16_384, 8))
        if p.k % 64:
            return p


def drawn_fp8_deep(s: Sizes) -> Problem:
    """Few rows and a long sum: the last layer of an MLP."""
    p = drawn_fp8(s)
    n, k = s.deep_linear(128 if p.scaling is BLOCK else 16)
    return replace(p, m=s.rows(512), n=n, k=k)
