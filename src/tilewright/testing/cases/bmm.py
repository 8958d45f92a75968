"""Problems of `bmm`."""

from dataclasses import replace
from itertools import product

from ...ops.bmm import Problem
from ...ops.common.scaling import Scaling
from ..sizes import BF16, E4M3, E5M2, FP16, FP32, Sizes

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


def drawn(s: Sizes) -> Problem:
    dtype = s.dtype()
    if s.odds(0.3):  # latent attention: queries into the latent space, results out of it
        up = s.odds(0.5)
        n, k = (128, 512) if up else (512, 128)
        return Problem(batch=s.choice((16, 32, 64, 128)), m=s.rows(1024), n=n, k=k, dtype=dtype, trans_b=up, out_dtype=dtype)
    m, n, k = (s.log(64, 4096, 8) for _ in range(3))
    return Problem(batch=s.log(2, 128), m=m, n=n, k=k, dtype=dtype, out_dtype=dtype, **s.some(trans_a=0.1, trans_b=0.5))


def drawn_wide(s: Sizes) -> Problem:
    """Many matrices, narrow and ragged ones too, whose rows begin anywhere."""
    sides = [s.log(64, 4096, 8), s.log(64, 1024, 8)]
    s.shuffle(sides)
    return replace(drawn(s), batch=s.log(32, 192), m=sides[0], n=sides[1], k=s.log(64, 4096, 8))
