"""The engine's paged cache: the tokens of the static cache, with only the memory that sequences
need.
"""

import pytest
import torch
from engine_models import NEW, prompts, stock_tokens, tiny

from tilewright.engine import Engine
from tilewright.engine.pages import Pages
from tilewright.interpret import compiled_count

# Chunks of 16 tokens; one sequence of the bucket is unused; few more pages than the three sequences
# need.
SIZES = {"max_batch": 4, "max_len": 64, "prefill_tokens": 64, "check_every": 4}
PAGED = {"cache": "paged", "page_size": 16, "cache_tokens": 128}


def test_tokens_are_those_of_transformers() -> None:
    model = tiny("mistral", num_hidden_layers=1)
    expected = [stock_tokens(model, p) for p in prompts()]
    with Engine(model, **SIZES, **PAGED) as engine:
        for _ in range(2):  # the second time in pages that others have used
            assert engine.generate(prompts(), NEW).tokens == expected
            assert engine.cache_tokens_held == 0


def test_latents_in_pages_give_the_logits_of_the_static_cache() -> None:
    model = tiny("deepseek_v2", torch.bfloat16, num_hidden_layers=1)
    with Engine(model, **SIZES) as engine:
        expected, static_bytes = engine.logits(prompts(), [[7]] * 3), engine.cache_bytes
    with Engine(model, **SIZES, **PAGED) as engine:
        assert torch.equal(engine.logits(prompts(), [[7]] * 3), expected)
        assert engine.cache_bytes == static_bytes * (128 + 16) // (4 * 64)


def test_pages_are_given_as_sequences_grow_and_taken_back_when_they_end() -> None:
    model = tiny(num_hidden_layers=1)
    held: list[int] = []
    with Engine(model, max_batch=2, max_len=120, check_every=16, cache="paged", page_size=16, cache_tokens=160) as engine:
        free = engine.generate([[3, 4, 5], [6, 7]], 20).tokens
        stop = next(token for token in free[0] if token not in free[1])
        cut = free[0].index(stop)
        found = engine.generate([[3, 4, 5], [6, 7]], 110, stop=[stop], on_tokens=lambda _: held.append(engine.cache_tokens_held))
        assert [len(tokens) for tokens in found.tokens] == [cut + 1, 110]
        assert found.tokens[1][:20] == free[1]
        assert held[0] == 4 * 16  # 3 and 2 tokens, and 16 steps more
        ended = cut // 16 + 1
        assert held[ended : ended + 3] == [16 * (2 + ended + i) for i in range(3)]
        counts: list[int] = []
        engine.generate([[3, 4, 5]], 100, on_tokens=lambda _: counts.append(compiled_count()))
        assert len(set(counts)) == 1


def test_a_pool_that_is_too_small_says_so_and_serves_on() -> None:
    model = tiny(num_hidden_layers=1)
    with Engine(model, max_batch=2, max_len=128, check_every=8, cache="paged", page_size=16, cache_tokens=64) as engine:
        expected = engine.generate([[3, 4, 5]], 50).tokens
        with pytest.raises(MemoryError, match=r"2 sequences need 96 tokens, and there are 64\. Raise cache_tokens, or lower the number of prompts"):
            engine.generate([[3, 4, 5], [6, 7]], 60)
        assert engine.cache_tokens_held == 0
        assert engine.generate([[3, 4, 5]], 50).tokens == expected


def test_pages_are_never_held_twice() -> None:
    pages = Pages(9, 16, 3, 4, torch.device("cpu"))
    pages.hold([17, 0, 64])
    assert pages.in_use == 6
    pages.hold([17, 1])
    used = pages.table[pages.table > 0].tolist()
    assert pages.in_use == 3 == len(set(used)) == len(used)
    assert pages.table[2].tolist() == [0] * 4
    pages.hold([64, 64])
    assert sorted(pages.table[pages.table > 0].tolist()) == list(range(1, 9))
    with pytest.raises(MemoryError, match="the pages of the cache are used up"):
        pages.hold([64, 64, 1])
    assert pages.in_use == 8


def test_options_that_make_no_sense_together_raise() -> None:
    model = tiny(num_hidden_layers=1)
    for options, message in (
        ({"cache": "other"}, 'cache must be "static" or "paged", got \'other\''),
        ({"page_size": 16}, 'page_size must be given only with cache="paged", got 16'),
        ({"cache_tokens": 16}, 'cache_tokens must be given only with cache="paged", got 16'),
        ({"cache": "paged", "page_size": 24}, "page_size must be a power of two, at least 16, got 24"),
        ({"cache": "paged", "cache_tokens": 60}, "cache_tokens must be at least one page of 64, got 60"),
    ):
        with pytest.raises(ValueError, match=message):
            Engine(model, **options)
