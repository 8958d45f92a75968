"""The ladder of decoding with many query heads over one key head: from a block for each head to all
heads as the rows of one block.

Every step is a Config of `ops.attention_decode`. A plan of such a kernel calls the first step
strategy B and the next ones strategy A.
"""

from typing import Any

import torch

from ..ops import attention_decode
from ..ops.attention_decode import Config, Problem
from . import pictures
from .ladder import Ladder, Step

WIDE: dict[str, Any] = {"rows": 64, "num_worker_warps": 8, "occupancy": 1}

LADDER = Ladder(
    "decode, 128 heads over one key head",
    attention_decode,
    Problem(32, 128, 1, 1152, 512, torch.bfloat16, has_len=False, shared=True),
    Problem(2, 8, 1, 200, 512, torch.bfloat16, has_len=False, shared=True),
    (
        Step(
            "a block for each head",
            "strategy B: 128 blocks of a sequence read the same keys, and 1 row of 16 in each product counts",
            Config(32, 1, heads=1, rows=16, latency=2, occupancy=1, num_worker_warps=8, parts=4, columns=128),
            why=(
                "All query heads read the same key head, so 128 blocks of a sequence read the same "
                "keys. The MMA has at least 16 rows, and one query fills one of them."
            ),
        ),
        Step(
            "heads as rows",
            "strategy A: 64 heads are the rows of a block, so keys are read twice and not 128 times",
            Config(32, 1, heads=64, latency=2, **WIDE),
            why=(
                "Heads do not depend on each other, so their queries can be the rows of one tile. "
                "Each tile of keys then serves 64 heads, and no row of the product is padding."
            ),
            picture=pictures.HEADS_AS_ROWS,
        ),
        Step(
            "splits",
            "KV splits: blocks share the keys of a sequence, because 64 blocks leave half of the SMs idle",
            Config(32, 2, heads=64, latency=2, **WIDE),
            why=(
                "32 sequences with two blocks each are 64 blocks on 132 SMs. So two blocks share the "
                "keys of a sequence, and a second launch merges their results by their log-sum-exp."
            ),
        ),
        Step(
            "one loop",
            "each tile of keys is loaded once, for the scores and as values",
            Config(64, 2, heads=64, latency=9, parts=4, late=True, sliced=True, **WIDE),
            why=(
                "k and v are the same tensor here, so a tile that is loaded once serves both products. It "
                "is kept in parts of its columns. The loop has no branch for the last tile, and the "
                "denominators are summed after it."
            ),
        ),
    ),
    attention_decode,
)
