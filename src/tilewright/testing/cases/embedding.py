"""Problems of `embedding`."""

from itertools import product

from ...ops.embedding import Problem
from ..sizes import BF16, FP16, FP32, Sizes

small = [
    Problem(1, 1, FP32, vocab=1),
    Problem(3, 7, FP32, vocab=5, scale=0.3),
    Problem(1, 576, BF16, vocab=1000),
    Problem(33, 64, FP16, vocab=100),
    Problem(5, 129, BF16, False, vocab=300, scale=11.3),
    Problem(17, 896, FP32, False, vocab=64),
    Problem(2, 4097, FP16, vocab=11),
    Problem(70, 300, BF16, vocab=257),
]

# (vocab, dim): SmolLM2-135M, Qwen2.5-0.5B, Llama-3.2-1B, Llama-3.1-8B, Qwen2-7B
TABLES = ((49_152, 576), (151_936, 896), (128_256, 2048), (128_256, 4096), (152_064, 3584))
real = [
    *(Problem(tokens, dim, BF16, vocab=vocab) for tokens, (vocab, dim) in product((1, 509), TABLES)),
    Problem(1000, 2304, BF16, vocab=256_000, scale=48.0),  # Gemma-2-2B
    Problem(64, 8192, BF16, False, vocab=128_256),  # Llama-3.1-70B
    Problem(8192, 4096, BF16, vocab=128_256),
    Problem(300, 768, FP32, vocab=50_257),  # GPT-2
    Problem(512, 1024, FP16, vocab=30_522),  # BERT-large
]

# Few tokens rotate through many tables, which must fit into memory together: those have 32000 rows.
bench = [
    *(Problem(tokens, dim, BF16) for tokens, (_, dim) in product((1, 16, 64, 1024), TABLES)),
    *(Problem(16_384, dim, BF16, vocab=vocab) for vocab, dim in TABLES),
    Problem(65_536, 4096, BF16, vocab=128_256),
    Problem(16_384, 2304, BF16, vocab=256_000, scale=48.0),
    Problem(16_384, 4096, FP32, vocab=128_256),
]


def drawn(s: Sizes) -> Problem:
    while True:
        m = s.model()
        if m.hidden * m.vocab <= 3 << 28:  # the accuracy rule holds the table in float64
            return Problem(tokens=s.rows(1 << 16), dim=m.hidden, dtype=s.dtype(), vocab=m.vocab, wide_ids=not s.odds(0.2))
