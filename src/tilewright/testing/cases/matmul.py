"""Problems of `matmul`."""

from itertools import product

import torch

from ...ops.matmul import Problem

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

# (n, k) of the linear layers: q and o, k and v, gate and up, down
QWEN2_7B = ((3584, 3584), (512, 3584), (18_944, 3584), (3584, 18_944))
LLAMA_31_8B = ((4096, 4096), (1024, 4096), (14_336, 4096), (4096, 14_336))
HEADS = ((152_064, 3584), (128_256, 4096))

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
    Problem(2048, 1024, 4096, BF16),
    Problem(1024, 1024, 1024, BF16, trans_b=False),
    Problem(4096, 4096, 4096, BF16, trans_b=False),
    Problem(1000, 2304, 5760, FP16, trans_a=True),  # TT and TN at size
    Problem(1000, 2304, 5760, FP16, trans_a=True, trans_b=False),
    Problem(512, 1536, 576, FP32),  # SmolLM2-135M up_proj
    Problem(512, 1536, 576, FP32, tf32=True),
    Problem(1, 49_152, 576, FP32),
]

bench = [
    *(Problem(n, n, n, BF16, trans_b=False) for n in (1024, 2048, 4096, 8192, 16_384)),
    *(Problem(m, n, k, BF16) for (n, k), m in product((*QWEN2_7B, *LLAMA_31_8B), (64, 128, 512, 2048, 8192))),
    *(Problem(m, n, k, BF16) for (n, k), m in product((*QWEN2_7B, *LLAMA_31_8B, *HEADS), (1, 4, 8, 16))),
]
