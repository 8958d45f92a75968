"""What an adversary found silent or ugly: arguments of the wrong kind, memory that calls share."""

import numpy as np
import pytest
import torch
from tiny_models import tiny_model
from torch.autograd import forward_ad

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
    with pytest.raises((TypeError, ValueError), match=f"{name} must be a Python {kind}, got "):
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
        with pytest.raises(
            ValueError, match=f"{written} must be free of elements of {read}, because it is written in place, got tensors that overlap"
        ):
            call()


def test_a_state_is_no_part_of_what_the_same_call_reads():
    memory, x, weight = torch.randn(4000), torch.randn(2, 9, 8), torch.randn(8, 4)
    rows, state = memory[: 2 * 2 * 9 * 16].view(2, 2, 9, 16), memory[500:1524].view(2, 2, 16, 16)
    gates = {"g": -torch.rand(2, 2, 9), "beta": torch.rand(2, 2, 9)}
    other = torch.randn(2, 2, 9, 16)
    for call, read in (
        (lambda: tilewright.gated_delta_rule(rows, other, other, **gates, state=state), "q"),
        (lambda: tilewright.gated_delta_rule(other, rows, other, **gates, state=state), "k"),
        (lambda: tilewright.gated_delta_rule(other, other, rows, **gates, state=state), "v"),
        (lambda: tilewright.gated_delta_rule(other, other, other, **gates | {"g": memory[500:536].view(2, 2, 9)}, state=state), "g"),
        (lambda: tilewright.causal_conv1d(x, weight, state=x[:, -3:]), "x"),
        (lambda: tilewright.causal_conv1d(x, memory[:32].view(8, 4), state=memory[:48].view(2, 3, 8)), "weight"),
        (lambda: tilewright.causal_conv1d(x, weight, memory[:8], state=memory[:48].view(2, 3, 8)), "bias"),
    ):
        with pytest.raises(ValueError, match=f"state must be free of elements of {read}, because it is written in place, got tensors that overlap"):
            call()


@pytest.mark.parametrize(
    "call",
    [
        lambda x: tilewright.rms_norm(x, WEIGHT),
        lambda x: tilewright.matmul(x, x.new_ones(8, 3)),
        lambda x: tilewright.rms_norm_gated(torch.randn(5, 8), WEIGHT, x),
        lambda x: tilewright.rope(*(x.view(1, 1, 5, 8) + i for i in range(2)), torch.randn(1, 5, 4), torch.randn(1, 5, 4))[0],
    ],
)
def test_a_tangent_is_refused_instead_of_lost(call):
    """rope, in place, returned the tangent that it had been given."""
    with forward_ad.dual_level(), torch.no_grad(), pytest.raises(ValueError, match="must be without a tangent: this op has no forward-mode"):
        call(forward_ad.make_dual(X, torch.ones_like(X)))


def test_transforms_of_torch_func_are_refused_by_name():
    """functionalize returned memory that nobody had written."""
    norm = lambda x: tilewright.rms_norm(x, WEIGHT)  # noqa: E731
    for call in (lambda: torch.func.vmap(norm)(X), lambda: torch.func.jvp(norm, (X,), (X,)), lambda: torch.func.functionalize(norm)(X)):
        with pytest.raises(ValueError, match=r"x must be a tensor outside of torch\.func's transforms: this op has no rule for them, got one inside"):
            call()


def test_a_weight_without_rows_is_refused():
    with pytest.raises(ValueError, match=r"weight\.shape\[0\] must be at least 1, got 0"):
        tilewright.QuantizedWeight.of(torch.zeros(0, 128), "int4-128")


@pytest.fixture(scope="module")
def engine():
    with Engine(tiny_model({"model_type": "llama"}), max_len=32) as made:
        yield made


def test_an_engine_names_what_is_no_count(engine):
    """2.5 new tokens never ended: the steps that were left passed 0."""
    for count in (2.5, "3", torch.tensor(3)):
        with pytest.raises(TypeError, match="max_new_tokens must be a Python integer"):
            engine.generate([[5]], count)
    with pytest.raises(TypeError, match="max_len must be a Python integer"):
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
    with pytest.raises(ValueError, match="seed must be a 64-bit number"):
        Sampling(seed=2**63)
