"""Engine: keys that earlier calls left in the cache change no token, and are not computed again."""

from types import SimpleNamespace

import pytest
import torch
from tiny_models import tiny

from tilewright.engine import Engine, Sampling
from tilewright.engine.prefix import Prefixes

FIRST = [3 + i * 7 % 90 for i in range(40)]
OTHER = [5 + i * 11 % 90 for i in range(37)]
NEW = 4


@pytest.fixture(scope="module")
def model():
    return tiny(num_hidden_layers=1)


@pytest.fixture(scope="module")
def alone():
    """The tokens of prompts, each read whole, by a model of the same weights."""
    with Engine(tiny(num_hidden_layers=1), max_batch=2, max_len=96) as engine:
        yield lambda prompts, **how: engine.generate(prompts, NEW, **how).tokens


@pytest.mark.parametrize("cache", ["static", "paged"])
def test_a_prompt_takes_what_the_cache_holds_of_its_beginning(model, alone, cache):
    paged = cache == "paged"
    with Engine(model, max_batch=2, max_len=96, prefix_reuse=True, cache=cache, **({"page_size": 16} if paged else {})) as engine:
        answer = engine.generate([FIRST, OTHER], NEW)
        assert answer.reused == [0, 0]
        # A conversation that goes on, in another slot, and one that begins like it.
        going = [[*FIRST[:33], 1, 2, 3], [*FIRST, *answer.tokens[0], 9, 8]]
        held = len(FIRST) + NEW - 1  # the last token has no key
        found = engine.generate(going, NEW)
        assert found.reused == ([32, 32] if paged else [33, held])
        assert found.tokens == alone(going)
        again = engine.generate(going[::-1], NEW)
        assert again.reused == ([32, 32] if paged else [len(going[1]) - 1, len(going[0]) - 1])
        assert again.tokens == found.tokens[::-1]
        if paged:
            return
        hot = Sampling(temperature=1.0, seed=3)  # its step is compiled, which writes into the cache
        assert engine.generate(going, NEW, sampling=hot).tokens == alone(going, sampling=hot)
        with pytest.raises(RuntimeError, match="planted"):
            engine.generate([FIRST], NEW, on_tokens=lambda gained: (_ for _ in ()).throw(RuntimeError("planted")))
        assert engine.generate([FIRST], NEW).reused == [0]


def test_slots_may_change_places_and_those_that_a_batch_fills_up_hold_nothing():
    cache = torch.arange(4.0)[:, None, None].expand(4, 1, 16).clone()
    held = Prefixes(SimpleNamespace(tokens=torch.zeros(4), pages=None, caches=[(cache,)], max_len=64))
    texts = [[slot, *range(10, 20)] for slot in range(4)]
    held.keep(texts, [[7]] * 4)
    swapped = [texts[1], texts[0], texts[1]]
    assert held.take(swapped, 4) == [10] * 3
    assert cache[:, 0, 0].tolist() == [1, 0, 1, 3]
    held.keep(swapped, [[7]] * 3)
    assert held.take([texts[0]], 1) == [10]
    assert held.take([texts[3]], 1) == [0]  # the fourth place of the batch was written to


def test_pages_of_ended_sequences_go_to_those_that_need_them(model, alone):
    with Engine(model, max_batch=2, max_len=96, prefix_reuse=True, cache="paged", page_size=16, cache_tokens=112) as engine:
        engine.generate([FIRST, OTHER], NEW)
        assert engine.cache_tokens_held == 96
        long = [2 + i % 50 for i in range(60)]
        assert engine.generate([long], NEW).tokens == alone([long])  # takes all of FIRST's pages and one of OTHER's
        assert engine.cache_tokens_held <= 112
        after = engine.generate([[*OTHER, 7], FIRST], NEW)
        assert after.tokens == alone([[*OTHER, 7], FIRST])
        assert after.reused == [32, 0]
        same = engine.generate([[*OTHER, 7], [*OTHER, 7]], NEW)  # both share the pages of one
        assert same.reused == [32, 32]
        assert same.tokens == [after.tokens[0]] * 2
        with pytest.raises(MemoryError, match="pages of the cache are used up"):
            engine.generate([long, FIRST], 30)
        assert engine.generate([FIRST], NEW).tokens == alone([FIRST])
