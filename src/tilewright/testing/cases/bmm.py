"""Problems of `bmm`."""

from itertools import product

import torch

from ...ops.bmm import Problem
from ...ops.scaling import Scaling

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TENSOR, ROW, BLOCK = Scaling.TENSOR, Scaling.ROW, Scaling.BLOCK

small = [
    Problem(1, 1, 1, 1, BF16),
    Problem(3, 33, 70, 65, FP16, out_dtype=FP16),
    Problem(5, 40, 24, 72, BF16, trans_b=True),
    Problem(2, 130, 66, 96, BF16, trans_a=True, trans_b=True, one_b=True),
    Problem(4, 17, 136, 48, FP16, trans_a=True, one_a=True, out_dtype=FP32),
    Problem(3, 70, 129, 200, E4M3, trans_b=True, scaling=TENSOR),
    Problem(2, 64, 80, 144, E4M3, scaling=ROW, one_b=True, out_dtype=FP16),
    Problem(3, 33, 150, 272, E4M3, trans_b=True, scaling=BLOCK),
    Problem(2, 136, 300, 304, E4M3, trans_b=True, one_a=True, scaling=BLOCK, out_dtype=FP32),
    Problem(2, 48, 32, 64, E5M2, trans_a=True, trans_b=True),
    Problem(2, 20, 30, 130, E5M2, trans_b=True, scaling=BLOCK),
]

real = [
    Problem(128, 7, 512, 128, BF16),  # DeepSeek-V3: the query into the latent space, a few tokens
    Problem(128, 16, 128, 512, BF16, trans_b=True),  # and its output back out
    Problem(8, 1000, 520, 712, BF16),
    Problem(16, 512, 512, 512, FP16, trans_b=True, out_dtype=FP16),
    Problem(5, 640, 384, 1000, FP16, trans_a=True, out_dtype=FP16),
    Problem(4, 768, 1152, 640, BF16, one_b=True),
    Problem(4, 768, 1152, 640, BF16, trans_b=True, one_a=True, out_dtype=FP32),
    Problem(8, 512, 1024, 1024, E4M3, trans_b=True, scaling=TENSOR),
    Problem(8, 520, 1024, 2048, E4M3, trans_b=True, scaling=ROW),
    Problem(8, 512, 1040, 2064, E4M3, trans_b=True, scaling=BLOCK),
    Problem(4, 512, 512, 512, E4M3, scaling=ROW),
]

bench = [
    *(Problem(batch, n, n, n, BF16) for batch, n in product((8, 32, 128), (512, 1024, 2048))),
    Problem(256, 512, 512, 512, BF16),
    Problem(256, 1024, 1024, 1024, BF16),
    Problem(8, 4096, 4096, 4096, BF16),
    Problem(32, 4096, 4096, 4096, BF16),
    *(Problem(32, 2048, 2048, 2048, BF16, trans_a=ta, trans_b=tb) for ta, tb in ((False, True), (True, False), (True, True))),
    Problem(32, 1024, 1024, 1024, FP16, out_dtype=FP16),
    *(Problem(32, 2048, 2048, 2048, E4M3, trans_b=True, scaling=scaling) for scaling in (TENSOR, ROW, BLOCK)),
    Problem(128, 16, 512, 128, BF16),
    Problem(128, 16, 128, 512, BF16, trans_b=True),
]
