"""What an adversary found silent or ugly: arguments of the wrong kind, memory that calls share."""

import numpy as np
import pytest
import torch
from tiny_models import tiny_model

import tilewright
from tilewright.engine import Engine, Sampling

X, WEIGHT = torch.randn(5, 8), torch.randn(8)
Q, K = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 9, 16)
POSITIONS = torch.arange(9, dtype=torch.int32).repeat(2, 1)


@pytest.mark.parametrize(
    ("call", "name", "kind"),
    [
        (lambda: tilewright.attention(Q, K, K, scale=torch.tensor(0.5)), "scale", "number"),
        (lambda: tilewright.attention(Q, K, K, softcap="5"), "softcap", "number"),
        (lambda: tilewright.attention(Q, K, K, window=torch.tensor(3)), "window", "integer"),
        (lambda: tilewright.attention_decode(Q[:, :, :1], K, K, window=np.int64(3)), "window", "integer"),
        (lambda: tilewright.rms_norm(X, WEIGHT, eps="1e-6"), "eps", "number"),
        (lambda: tilewright.layer_norm(X, WEIGHT, eps=None), "eps", "number"),
        (lambda: tilewright.rms_norm(X, WEIGHT, weight_offset=torch.ones(())), "weight_offset", "number"),
        (lambda: tilewright.embedding(torch.tensor([1]), X, scale=torch.ones(())), "scale", "number"),
        (lambda: tilewright.dropout(X, "0.5", torch.tensor(1)), "p", "number"),
        (lambda: tilewright.moe_route(X, 2.0), "top_k", "integer"),
        (lambda: tilewright.moe_route(X, 2, first_expert=1.5), "first_expert", "integer"),
        (lambda: Sampling(temperature="1"), "temperature", "number"),
        (lambda: Sampling(top_k=2.5), "top_k", "integer"),
        (lambda: Sampling(seed=1.5), "seed", "integer"),
    ],
)
def test_a_number_of_the_wrong_kind_names_its_argument(call, name, kind):
    with pytest.raises((TypeError, ValueError), match=f"{name} must be an? {kind} of Python, got "):
        call()


def test_a_view_of_negated_values_is_refused():
    """Its memory holds the others: a kernel on a GPU would lose the sign."""
    negated = torch.view_as_complex(torch.randn(3, 4, 2)).conj().imag
    assert negated.is_neg()
    for call in (lambda: tilewright.softmax(negated.T), lambda: tilewright.matmul(torch.randn(4, 3), torch._neg_view(torch.randn(3, 4)))):
        with pytest.raises(ValueError, match=r"must be what its memory holds \(call its resolve_neg\(\)\), got a view of the negated values"):
            call()


def test_a_cache_holds_nothing_that_the_same_call_reads():
    cache, other = torch.zeros(2, 2, 20, 16), torch.zeros(2, 2, 20, 16)
    inside, options = cache[:, :, :9], {"positions": POSITIONS}
    for call, written, read in (
        (lambda: tilewright.kv_append(inside, K, cache, other, **options), "k_cache", "k"),
        (lambda: tilewright.kv_append(K, inside, cache, other, **options), "k_cache", "v"),
        (lambda: tilewright.kv_append(inside, K, other, cache, **options), "v_cache", "k"),
        (lambda: tilewright.kv_append(K, K, cache, other, q=K, cos=torch.ones(20, 8), sin=torch.zeros(20, 8), **options), "q", "k"),
    ):
        with pytest.raises(ValueError, match=f"{written} must be free of elements of {read}, being written in place, got tensors that overlap"):
            call()


@pytest.fixture(scope="module")
def engine():
    with Engine(tiny_model({"model_type": "llama"}), max_len=32) as made:
        yield made


def test_an_engine_names_what_is_no_count(engine):
    """2.5 new tokens never ended: the steps that were left passed 0."""
    for count in (2.5, "3", torch.tensor(3)):
        with pytest.raises(TypeError, match="max_new_tokens must be an integer of Python"):
            engine.generate([[5]], count)
    with pytest.raises(TypeError, match="max_len must be an integer of Python"):
        Engine(tiny_model({"model_type": "llama"}), max_len=16.0)


def test_an_engine_takes_lists_of_ids_and_nothing_like_them(engine):
    for prompts in ("hello", [5, 6], [[5.5, 6]], torch.tensor([5, 6]), torch.tensor([[5.5, 6.0]]), ["ab"]):
        with pytest.raises(TypeError, match=r"prompts must be lists of token ids, or one tensor \[batch, tokens\] of integers, got "):
            engine.generate(prompts, 2)
    for stop in ("ab", 5, [5.5], ["a"]):
        with pytest.raises(TypeError, match="stop must be a list of token ids, got "):
            engine.generate([[5]], 2, stop=stop)
    assert engine.generate(torch.tensor([[5, 6]]), 2).tokens == engine.generate([(5, 6)], 2, stop={95}).tokens


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1.0])
def test_a_temperature_that_is_no_temperature_is_refused(wrong):
    with pytest.raises(ValueError, match="temperature must be "):
        Sampling(temperature=wrong)
    with pytest.raises(ValueError, match="seed must be a number of 64 bits"):
        Sampling(seed=2**63)
