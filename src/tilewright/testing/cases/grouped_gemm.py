"""Problems of `grouped_gemm`."""

from itertools import product
from typing import Any

from ...ops.common.scaling import Scaling
from ...ops.grouped_gemm import Problem
from ..sizes import BF16, E4M3, E5M2, FP16, FP32, Sizes

TENSOR, ROW, BLOCK = Scaling.TENSOR, Scaling.ROW, Scaling.BLOCK

# (n, k) of expert layers: gate and up together, down; as DeepGEMM lists them
EXPERTS = ((6144, 7168), (7168, 3072), (4096, 4096), (4096, 2048))

small = [
    Problem(4, 110, 70, 72, BF16, sizes=(33, 0, 70, 7)),
    Problem(1, 5, 3, 1, BF16, trans_b=False),
    Problem(3, 200, 136, 96, FP16, trans_b=False, out_dtype=FP16, sizes=(0, 150, 0)),  # one group has all; rows of no group after it
    Problem(5, 64, 72, 40, BF16, masked=True, expected_rows=20, sizes=(64, 0, 1, 33, 40)),
    Problem(2, 70, 33, 65, FP16, masked=True, out_dtype=FP32),
    Problem(7, 90, 130, 200, E4M3, scaling=TENSOR, sizes=(1, 2, 3, 70, 0, 0, 5)),
    Problem(3, 100, 144, 144, E4M3, scaling=ROW, out_dtype=FP16, trans_b=False),
    Problem(4, 150, 200, 272, E4M3, scaling=BLOCK, sizes=(66, 0, 65, 19)),
    Problem(3, 80, 136, 304, E4M3, masked=True, scaling=BLOCK, expected_rows=30),
    Problem(3, 48, 64, 128, E5M2, masked=True, scaling=ROW),
    Problem(130, 300, 24, 32, BF16),
]

real = [
    Problem(4, 1024, 2048, 1024, BF16),
    Problem(60, 500, 2816, 2048, BF16, sizes=(*(9 for _ in range(50)), *(5 for _ in range(10)))),  # Qwen1.5-MoE-A2.7B
    Problem(8, 3000, 1024, 1536, FP16, out_dtype=FP16, sizes=(1000, 0, 1, 999, 127, 129, 0, 700)),
    Problem(128, 2048, 1536, 2048, BF16),  # Qwen3-30B-A3B
    Problem(8, 2048, 1024, 2048, BF16, trans_b=False),
    Problem(6, 512, 2048, 1536, BF16, masked=True, expected_rows=20),
    Problem(6, 512, 2048, 1536, BF16, masked=True, expected_rows=300),
    Problem(8, 2000, 1024, 2048, E4M3, scaling=TENSOR),
    Problem(8, 2000, 1024, 2048, E4M3, scaling=ROW),
    Problem(8, 2000, 1024, 2064, E4M3, scaling=BLOCK),
    Problem(6, 512, 2048, 1536, E4M3, masked=True, scaling=BLOCK, expected_rows=20),
    Problem(6, 512, 2048, 1536, E4M3, masked=True, scaling=BLOCK, expected_rows=300),
]

bench = [
    *(Problem(groups, groups * rows, n, k, BF16) for (groups, rows), (n, k) in product(((4, 8192), (8, 4096)), EXPERTS)),
    *(
        Problem(groups, 4096, n, k, BF16, masked=True, expected_rows=rows)
        for (groups, rows), (n, k) in product(((32, 192), (6, 1024), (32, 20), (6, 20)), EXPERTS)
    ),
    *(Problem(groups, groups * rows, n, k, E4M3, scaling=BLOCK) for (groups, rows), (n, k) in product(((4, 8192), (8, 4096)), EXPERTS)),
    *(
        Problem(groups, 4096, n, k, E4M3, masked=True, scaling=BLOCK, expected_rows=rows)
        for (groups, rows), (n, k) in product(((32, 192), (6, 1024), (32, 20), (6, 20)), EXPERTS[:2])
    ),
    *(Problem(8, 32_768, 4096, 4096, E4M3, scaling=scaling) for scaling in (TENSOR, ROW)),
]


MOST_OUTPUT = 1 << 30  # elements: a check holds the result several times in float64


def drawn(s: Sizes) -> Problem:
    return Problem(**_drawn(s), dtype=BF16)


def drawn_fp8(s: Sizes) -> Problem:
    scaling = s.one_of({TENSOR: 0.2, ROW: 0.2, BLOCK: 0.6})
    while True:
        shape = _drawn(s)
        if shape["n"] % 128 == shape["k"] % 128 == 0:
            return Problem(**shape, dtype=E4M3, scaling=scaling)


def _drawn(s: Sizes) -> dict[str, Any]:
    """The experts of one GPU, and many or few tokens for them.

    A third of the draws have room for each expert's tokens.
    """
    e = s.moe()
    groups = max(2, e.experts // s.choice((1, 2, 4, 8)))
    n, k = s.choice(((2 * e.inter, e.hidden), (e.hidden, e.inter)))
    each = s.rows(4096)
    if s.odds(0.33):
        each = min(each, max(64, MOST_OUTPUT // (2 * groups * n)))
        return {"groups": groups, "rows": max(128, 128 * -(-2 * each // 128)), "n": n, "k": k, "masked": True, "expected_rows": each}
    return {"groups": groups, "rows": max(groups, round(groups * each * (0.8 + 0.4 * s.random()))), "n": n, "k": k}
