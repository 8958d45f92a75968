"""Problems of `dropout`."""

from itertools import product

from ...ops.dropout import Problem
from ..sizes import BF16, FP16, FP32, Sizes

small = [
    Problem(1, FP32),
    Problem(7, BF16, False, 0.5),
    Problem(1023, FP16, p=0.25),
    Problem(4096, FP32, p=0.0),
    Problem(4099, BF16, p=0.9),
    Problem(5000, FP32, p=1.0),
    Problem(70_001, BF16),
]

# tokens * width: attention and MLP outputs of GPT-2 small and BERT-large, Llama-3.1-8B; attention
# weights of BERT-large
real = [
    *(Problem(tokens * cols, dtype) for tokens, cols, dtype in ((1024, 768, FP32), (8 * 512, 1024, FP16), (509, 4096, BF16), (8192, 4096, BF16))),
    Problem(8 * 16 * 512 * 512, FP16, False),
    Problem(10_000_019, BF16, p=0.5),
]

bench = [
    *(Problem(tokens * cols, BF16) for tokens, cols in product((1, 64, 1024, 16_384, 65_536), (768, 4096, 8192))),
    Problem(65_536 * 4096, BF16, p=0.5),
    Problem(16_384 * 4096, FP32),
    Problem(65_536 * 4096, FP32),
]


def drawn(s: Sizes) -> Problem:
    cols = s.hidden()
    return Problem(size=s.rows(min(1 << 17, (1 << 28) // cols)) * cols, dtype=FP32 if s.odds(0.2) else s.dtype())
