"""Engine: drafts of a sequence's own tokens change no token, and spare steps."""

import pytest
import torch
from tiny_models import tiny

from tilewright.engine import Engine, Sampling
from tilewright.engine.speculate import lookup

PROMPTS = ([7, 8, 9, 10, 7, 8], [3, 4, 3, 4, 3], [50])
NEW = 12


def cut(rows: list[list[int]], stop: int) -> list[list[int]]:
    return [row[: row.index(stop) + 1] if stop in row else row for row in rows]


def test_a_draft_is_what_stood_behind_the_longest_tail_last() -> None:
    assert lookup([1, 2, 3, 4, 9, 2, 3, 5, 2, 3], 2) == [5, 2]
    assert lookup([1, 2, 3, 7, 1, 2, 3], 3) == [7, 1, 2]
    assert lookup([4, 4, 4], 2) == [4]
    assert lookup([1, 2, 3], 4) == []
    assert lookup([1], 4) == []


@pytest.mark.parametrize(
    ("cache", "sampling"), [("static", None), ("paged", Sampling(temperature=0.02, seed=5)), ("static", Sampling(temperature=1.5, top_k=20, seed=5))]
)
def test_tokens_are_those_without_drafts_in_fewer_steps(cache: str, sampling: Sampling | None) -> None:
    """At any temperature: the noise of a token is that of its place."""
    with Engine(tiny(num_hidden_layers=1), max_batch=4, max_len=64, cache=cache, **({"page_size": 16} if cache == "paged" else {})) as engine:
        plain = engine.generate(PROMPTS, NEW, sampling=sampling)
        blocks: list[list[list[int]]] = []
        found = engine.generate(PROMPTS, NEW, sampling=sampling, speculate=4, on_tokens=blocks.append)
        assert found.tokens == plain.tokens
        assert [[token for block in blocks for token in block[i]] for i in range(3)] == found.tokens
        if sampling is None or sampling.temperature < 1:
            assert sum(bool(block[1]) for block in blocks) < NEW  # this one repeats itself
        stop = plain.tokens[1][5]
        assert engine.generate(PROMPTS, NEW, sampling=sampling, speculate=4, stop=[stop]).tokens == cut(plain.tokens, stop)


def test_wrong_drafts_cost_nothing_but_time_and_right_ones_are_taken_whole(monkeypatch) -> None:
    hot = Sampling(temperature=1.5, top_k=20, seed=5)
    with Engine(tiny("qwen3", num_hidden_layers=1), max_batch=4, max_len=64) as engine:
        plain = engine.generate(PROMPTS, 9, sampling=hot).tokens
        texts = [prompt + tokens for prompt, tokens in zip(PROMPTS, plain, strict=True)]

        def right(tokens: list[int], most: int) -> list[int]:
            (text,) = (text for text in texts if text[: len(tokens)] == tokens)
            return text[len(tokens) : len(tokens) + most]

        def wrong(tokens: list[int], most: int) -> list[int]:
            return [(token + 1) % 96 for token in right(tokens, most)]

        for lookup_, gained in ((wrong, [[1] * 3] * 9), (right, [[1] * 3, [4] * 3, [4] * 3])):
            monkeypatch.setattr("tilewright.engine.speculate.lookup", lookup_)
            blocks: list[list[list[int]]] = []
            assert engine.generate(PROMPTS, 9, sampling=hot, speculate=3, on_tokens=blocks.append).tokens == plain
            assert [[len(new) for new in block] for block in blocks] == gained


def test_what_drafts_cannot_be_combined_with_is_refused() -> None:
    with Engine(tiny(num_hidden_layers=1), max_batch=1, max_len=32) as engine:
        for how in ({"sampling": Sampling(temperature=0, presence_penalty=1.0)}, {"masks": lambda written: torch.zeros(1, 3, dtype=torch.int32)}):
            with pytest.raises(ValueError, match="speculate must be 0 with masks, penalties or biases"):
                engine.generate([[5]], 4, speculate=2, **how)
        with pytest.raises(ValueError, match=r"speculate must be 0 \(off\) to 15, got 16"):
            engine.generate([[5]], 4, speculate=16)
        with pytest.raises(ValueError, match="a prompt and what follows it must be"):
            engine.generate([[5] * 24], 6, speculate=4)


@pytest.mark.parametrize(("cache", "sampling"), [("static", None), ("paged", Sampling(temperature=1.5, top_k=20, seed=5))])
def test_a_draft_model_changes_no_token(cache: str, sampling: Sampling | None) -> None:
    """Another model, which is often wrong; and the model's own weights, which are always right.

    So whatever is drawn has the distribution of plain decoding: it is the same draw.
    """
    other, same = tiny("qwen3", num_hidden_layers=1), tiny(num_hidden_layers=1)
    how = {"max_batch": 4, "max_len": 32, "cache": cache, **({"page_size": 16} if cache == "paged" else {})}
    with Engine(tiny(num_hidden_layers=1), **how) as engine:
        plain = engine.generate(PROMPTS, 9, sampling=sampling)
    stop = plain.tokens[1][5]
    with Engine(tiny(num_hidden_layers=1), **how, draft=other, speculate=3) as engine:
        assert engine.generate(PROMPTS, 9, sampling=sampling, stop=[stop]).tokens == cut(plain.tokens, stop)
    with Engine(tiny(num_hidden_layers=1), **how, draft=same, speculate=3, check_every=1) as engine:
        blocks: list[list[list[int]]] = []
        found = engine.generate(PROMPTS, 9, sampling=sampling, on_tokens=blocks.append)
        assert found.tokens == plain.tokens
        assert [[len(gained) for gained in block] for block in blocks] == [[1] * 3, [4] * 3, [4] * 3]  # each draft is right


def test_a_draft_model_that_does_not_fit_is_refused() -> None:
    model, other = tiny(num_hidden_layers=1), tiny(num_hidden_layers=1)
    for change, message in (
        ({"draft": tiny(vocab_size=80), "speculate": 2}, "draft must be a model of 96 tokens on cpu, as the model is, got one of 80 on cpu"),
        ({"draft": other}, "speculate must be at least 1 with a draft model, got 0"),
        ({"draft": model, "speculate": 2}, "draft must be another model than model"),
    ):
        with pytest.raises(ValueError, match=message):
            Engine(model, max_len=32, **change)
        Engine(model, max_len=32).close()  # the refused call holds nothing
    with Engine(model, max_len=32, draft=other, speculate=2), pytest.raises(ValueError, match="model must be without an engine"):
        Engine(other, max_len=32)
    Engine(other, max_len=32).close()
