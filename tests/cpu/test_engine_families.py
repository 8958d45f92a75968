"""Engine: tokens and logits of transformers for every family of models."""

import copy
from types import SimpleNamespace

import pytest
import torch
from engine_models import DENSE, NEW, OTHERS, RECURRENT, SPARSE, prompts, size, stock_logits, stock_tokens, tiny

from tilewright.engine import Engine, layers
from tilewright.launch import counted
from tilewright.models import Shard, cut
from tilewright.testing import assert_accurate


@pytest.mark.parametrize("name", DENSE)
def test_tokens_are_those_of_transformers_in_a_batch_and_alone(name: str) -> None:
    model = tiny(name)
    expected = [stock_tokens(model, p) for p in prompts()]
    with Engine(model, max_batch=3, max_len=64, prefill_tokens=48) as engine:  # chunks of 16 tokens
        assert engine.generate(prompts(), NEW).tokens == expected
        assert [engine.generate([p], NEW).tokens[0] for p in prompts()] == expected


@pytest.mark.parametrize("name", OTHERS)
def test_tokens_of_other_families_are_those_of_transformers(name: str) -> None:
    """Behind a prompt read in chunks, longer than any window."""
    model, prompt = tiny(name), prompts()[1]
    with Engine(model, max_batch=1, max_len=32, prefill_tokens=16) as engine:
        assert engine.generate([prompt], 4).tokens == [stock_tokens(model, prompt, 4)]


@pytest.mark.parametrize("name", RECURRENT)
def test_states_of_a_batch_are_those_of_each_prompt(name: str) -> None:
    """Read in chunks, padded, and once more: a call begins with states of zeros."""
    model = tiny(name)
    expected = [stock_tokens(model, p, 4) for p in prompts()]
    with Engine(model, max_batch=4, max_len=64, prefill_tokens=64) as engine:
        assert engine.generate(prompts(), 4).tokens == expected
        assert engine.generate(prompts()[:1], 4).tokens == expected[:1]


HALVES = [("llama", torch.bfloat16), ("qwen2", torch.float16), ("gemma3", torch.bfloat16), ("olmo2", torch.bfloat16)]


@pytest.mark.parametrize(("name", "dtype"), [*HALVES, *((n, torch.bfloat16) for n in SPARSE)])
def test_logits_of_every_step_obey_the_accuracy_rule(name: str, dtype: torch.dtype) -> None:
    model = tiny(name, dtype)
    given = [[7, 50, 3, 91]] * 3
    wide = copy.deepcopy(model).to(torch.float64)
    if name in SPARSE:
        wide.set_experts_implementation("eager")  # the only one that takes float64
    truth = torch.stack([stock_logits(wide, p, c) for p, c in zip(prompts(), given, strict=True)])
    stock = torch.stack([stock_logits(model, p, c) for p, c in zip(prompts(), given, strict=True)])
    with Engine(model, max_batch=4, max_len=64, prefill_tokens=64) as engine:
        ours = engine.logits(prompts(), given)
        alone = engine.logits(prompts()[:1], given[:1]) if name in SPARSE else ours[:1]  # one row takes other kernels
    assert ours.dtype == dtype
    assert_accurate(ours, stock, truth)
    assert_accurate(alone, stock[:1], truth[:1])


def test_tokens_of_gpt_oss_are_those_of_transformers_and_its_weights_are_held_once() -> None:
    model = tiny("gpt_oss", torch.bfloat16)
    before, bytes_before = {k: v.clone() for k, v in model.state_dict().items()}, size(model)
    expected = [stock_tokens(model, p) for p in prompts()]
    with Engine(model, max_batch=3, max_len=64, prefill_tokens=48) as engine:
        assert engine.generate(prompts(), NEW).tokens == expected
        assert engine.generate(prompts()[:1], NEW).tokens == expected[:1]
        assert size(model) == bytes_before
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())  # seen through views
    assert all(torch.equal(v, before[k]) and v.is_contiguous() for k, v in model.state_dict().items())


def test_norms_inside_products_of_a_batch_obey_the_accuracy_rule(monkeypatch) -> None:
    monkeypatch.setattr(layers, "MOST_FUSED_ROWS", 16)
    model, given = tiny("llama", torch.bfloat16), [[7, 50]] * 3
    wide = copy.deepcopy(model).to(torch.float64)
    truth, stock = (torch.stack([stock_logits(m, p, c) for p, c in zip(prompts(), given, strict=True)]) for m in (wide, model))
    with Engine(model, max_batch=4, max_len=64, prefill_tokens=64) as engine, counted() as launches:
        ours = engine.logits(prompts(), given)
    assert launches["rms_norm_matmul_rows_kernel"]
    assert_accurate(ours, stock, truth)


def test_norms_over_all_heads_are_refused_in_a_group() -> None:
    model = tiny("olmo2")
    cut(model, Shard(0, 2), device="cpu")
    with pytest.raises(ValueError, match="group must be None for a olmo2 model"):
        Engine(model, group=SimpleNamespace(shard=Shard(0, 2)))


@pytest.mark.parametrize("option", [{"cache": "paged"}, {"prefix_reuse": True}, {"speculate": 2}])
def test_what_a_state_cannot_do_is_refused_and_the_model_is_restored(option) -> None:
    model = tiny("mamba2")
    before = {name: id(value) for name, value in model.state_dict(keep_vars=True).items()}
    with pytest.raises(ValueError, match=f"{next(iter(option))} must be .* for a model whose layers keep a state"):
        Engine(model, **option)
    assert {name: id(value) for name, value in model.state_dict(keep_vars=True).items()} == before
    with Engine(model, max_len=32) as engine, pytest.raises(ValueError, match="speculate must be 0"):
        engine.generate([[1, 2]], 2, speculate=2)
