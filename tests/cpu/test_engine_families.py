"""Engine: tokens and logits of transformers for every family of models."""

import copy
from types import SimpleNamespace

import pytest
import torch
from engine_models import DENSE, NEW, OTHERS, RECURRENT, SPARSE, prompts, size, stock_logits, stock_steps, stock_tokens, tiny
from tiny_models import TINY
from transformers import AutoConfig, AutoModelForCausalLM

from tilewright.engine import Engine, elementwise, layers
from tilewright.engine.graph import run
from tilewright.engine.prefill import Prefill
from tilewright.engine.read import read
from tilewright.engine.state import State
from tilewright.engine.weights import Fusion
from tilewright.launch import Device, counted, traced
from tilewright.models import Shard, cut, patch, random_model
from tilewright.testing import assert_accurate


@pytest.mark.parametrize("name", DENSE)
def test_tokens_are_those_of_transformers_in_a_batch_and_alone(name: str) -> None:
    model = tiny(name)
    expected = [stock_tokens(model, p) for p in prompts()]
    with Engine(model, max_batch=3, max_len=64, prefill_tokens=48) as engine:  # chunks of 16 tokens
        assert engine.generate(prompts(), NEW).tokens == expected
        assert [engine.generate([p], 4).tokens[0] for p in prompts()] == [tokens[:4] for tokens in expected]


@pytest.mark.parametrize("name", OTHERS)
def test_tokens_of_other_families_are_those_of_transformers(name: str) -> None:
    """Behind a prompt read in chunks, longer than any window."""
    model, prompt = tiny(name), prompts()[1]
    with Engine(model, max_batch=1, max_len=32, prefill_tokens=16) as engine:
        assert engine.generate([prompt], 4).tokens == [stock_tokens(model, prompt, 4)]


def test_a_model_of_pictures_reads_texts_as_its_text_model_does() -> None:
    text = {**TINY, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
    eyes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    model, prompt = random_model({"model_type": "gemma3", "text_config": text, "vision_config": eyes, "mm_tokens_per_image": 4}), prompts()[1]
    assert hasattr(model.model, "vision_tower")
    with Engine(model, max_batch=1, max_len=32, prefill_tokens=16) as engine:
        ours = engine.logits([prompt], [[7, 50]])[0]
    torch.testing.assert_close(ours, stock_logits(model, prompt, [7, 50]), rtol=1e-4, atol=1e-4)


def test_positions_behind_which_queries_are_scaled_are_refused() -> None:
    with pytest.raises(ValueError, match="max_len must be at most 64, behind which ministral3 scales queries, got 128"):
        Engine(tiny("ministral3"), max_len=100)


@pytest.mark.parametrize("name", RECURRENT)
def test_states_of_a_batch_are_those_of_each_prompt(name: str) -> None:
    """Read in chunks, padded, and once more: a call begins with states of zeros."""
    model = tiny(name)
    expected, logits = zip(*(stock_steps(model, p, 3) for p in prompts()), strict=True)
    with Engine(model, max_batch=4, max_len=64, prefill_tokens=64) as engine:
        assert engine.generate(prompts()[:1], 3).tokens == [*expected[:1]]
        ours = engine.logits(prompts(), [tokens[:2] for tokens in expected])
    torch.testing.assert_close(ours, torch.stack(logits), rtol=1e-4, atol=1e-4)  # tells more than the likeliest tokens


HALVES = [("llama", torch.bfloat16), ("qwen2", torch.float16), ("gemma3", torch.bfloat16), ("olmo2", torch.bfloat16)]


@pytest.mark.parametrize(("name", "dtype"), [*HALVES, *((n, torch.bfloat16) for n in SPARSE)])
def test_logits_of_every_step_obey_the_accuracy_rule(name: str, dtype: torch.dtype) -> None:
    model, texts = tiny(name, dtype), prompts()[:2]
    given = [[7, 50]] * 2
    wide = copy.deepcopy(model).to(torch.float64)
    if name in SPARSE:
        wide.set_experts_implementation("eager")  # the only one that takes float64
    truth, stock = (torch.stack([stock_logits(m, p, c) for p, c in zip(texts, given, strict=True)]) for m in (wide, model))
    with Engine(model, max_batch=2, max_len=64, prefill_tokens=32) as engine:  # chunks of 16 tokens
        ours = engine.logits(texts, given)
        alone = engine.logits(texts[:1], given[:1]) if name in SPARSE else ours[:1]  # one row takes other kernels
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


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("olmo2", "whose norms take in the heads of all ranks"),
        ("starcoder2", "whose c_fc the ranks do not divide"),
        ("granitemoeshared", "whose input_linear the ranks do not divide"),
    ],
)
def test_what_ranks_do_not_divide_is_refused_in_a_group(name: str, why: str) -> None:
    model = tiny(name, torch.bfloat16)
    cut(model, Shard(0, 2), device="cpu")
    with pytest.raises(ValueError, match=f"group must be None for a {name} model, {why}"):
        Engine(model, group=SimpleNamespace(shard=Shard(0, 2)))


@pytest.mark.parametrize("name", ["mamba2", "qwen3_5"])
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"cache": "paged"}, 'cache must be "static" {}, got "paged"'),
        ({"prefix_reuse": True}, "prefix_reuse must be False {}, got True"),
        ({"speculate": 2}, "speculate must be 0, and no draft model {}, got drafts"),
        ({"draft": "mamba2", "speculate": 2}, "speculate must be 0, and no draft model {}, got drafts"),
    ],
)
def test_what_a_state_cannot_do_is_refused_before_anything_is_done(name: str, option: dict, message: str) -> None:
    model, told = tiny(name), []
    before = {name: (id(value), value.data_ptr()) for name, value in model.state_dict(keep_vars=True).items()}
    parts = {"draft": tiny(option["draft"])} if "draft" in option else {}
    with pytest.raises(ValueError, match=message.format("for a model whose layers keep a state")):
        Engine(tiny() if parts else model, **option | parts, on_progress=lambda *stage: told.append(stage))
    assert not told
    assert {name: (id(value), value.data_ptr()) for name, value in model.state_dict(keep_vars=True).items()} == before
    with Engine(model, max_len=32) as engine, pytest.raises(ValueError, match="speculate must be 0"):
        engine.generate([[1, 2]], 2, speculate=2)


def test_states_are_not_divided_between_ranks() -> None:
    model = tiny("qwen3_5")
    cut(model, Shard(0, 2), device="cpu")
    with pytest.raises(ValueError, match="group must be None for a model whose layers keep a state, got a group"):
        Engine(model, group=SimpleNamespace(shard=Shard(0, 2)))


def test_keys_of_8_bits_need_a_layer_with_keys() -> None:
    with pytest.raises(ValueError, match="kv_dtype must be None for a model whose layers keep a state"):
        Engine(tiny("mamba2", torch.bfloat16), kv_dtype="fp8")


PUBLISHED = {
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "nemotron_h": {"layers_block_type": ["linear_attention", "mlp", "full_attention"]},
    "falcon_h1": {"mlp_multipliers": [0.9, 0.6]},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_gpu_has_launches_for_published_sizes(name: str) -> None:
    """The defaults of a config are those of a model that was published."""
    config = AutoConfig.for_model(name, num_hidden_layers=2, **PUBLISHED[name])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    decoder = read(model, Fusion(), 4096, lambda *progress: None)
    with traced(Device.named("H200")) as launches, torch.inference_mode():
        for batch in (1, 16):
            state = State(decoder, batch, 4096, 1)
            buffers = state.buffers(batch)
            run([*decoder.body_calls(buffers, state.tokens[:batch], state.caches), *decoder.head_calls(buffers)])
        run(Prefill.of(decoder, State(decoder, 2, 4096, 1), 2, 1024, 1024, 1024).body)
    names = {one.launch.name for one in launches}
    assert "attention_decode_kernel" in names
    assert names & {"recurrent_kernel", "token_kernel"}


def test_weights_of_a_delta_rule_are_held_once_and_restored() -> None:
    """Also those whose rows lie by heads."""
    model = tiny("qwen3_next-dense")
    before, bytes_before = {k: v.clone() for k, v in model.state_dict().items()}, size(model)
    with Engine(model, max_len=32):
        assert size(model) == bytes_before
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())  # seen through views
    assert all(torch.equal(v, before[k]) and v.is_contiguous() for k, v in model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "change"), [("qwen3_next", {"shared_expert_intermediate_size": 32, "moe_intermediate_size": 32}), ("nemotron_h", {"hidden_size": 64})]
)
def test_small_weights_beside_states_are_those_of_a_patched_model(name: str, change: dict) -> None:
    """And of experts beside one that all tokens have a share of."""
    model = tiny(name, torch.bfloat16, **change)
    texts = [prompts()[0], prompts()[1][:5]]
    with patch(model, weights="int8"):
        expected = [stock_tokens(model, p, 3) for p in texts]
    with Engine(model, max_batch=2, max_len=32, weights="int8") as engine:
        assert engine.generate(texts, 3).tokens == expected


def test_experts_with_another_activation_are_refused() -> None:
    """Where no layer has a state either."""
    with pytest.raises(ValueError, match="hidden_act must be silu with a mixture of experts, got gelu_pytorch_tanh"):
        Engine(tiny("qwen3_5_moe", torch.bfloat16, layer_types=["full_attention"] * 2, hidden_act="gelu_pytorch_tanh"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mlp_hidden_act": "silu"}, "a NemotronHMLP must be an MLP whose activation is GELU, ReLU or the square of ReLU"),
        ({"layers_block_type": ["linear_attention", "moe"]}, "a mixture of experts must be of experts with a gate, got a NemotronHExperts"),
        ({"layers_block_type": ["mlp", "full_attention"]}, "a layer that is an MLP must be behind one with an attention or a state, got the first"),
        ({"layers_block_type": ["full_attention", "mlp", "mlp"]}, "a layer that is an MLP must be behind one with an attention or a state"),
    ],
)
def test_layers_of_nemotron_that_are_not_computed_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(tiny("nemotron_h", **change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": True}, "model.config.attention_in_multiplier must be 1 with biases, got 1.2"),
        ({"mamba_proj_bias": True}, "model.config.ssm_in_multiplier must be 1 with biases, got 1.25"),
    ],
)
def test_factors_of_rows_that_meet_a_bias_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Engine(tiny("falcon_h1", **change))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "heads", "cols"), [(2, 3, 16), (70, 1, 1100), (65, 3, 24)])
def test_a_gate_multiplies_in_place_what_a_view_shows(rows: int, heads: int, cols: int, dtype: torch.dtype) -> None:
    for each in (True, False):
        x, by = torch.randn(rows, heads, 2, cols, dtype=dtype).unbind(2)
        opening = by if each else by[:, :, 3:4]
        expected, rest = (x.double() * opening.double().sigmoid()).to(dtype), by.clone()
        elementwise.gate(x, opening)
        torch.testing.assert_close(x, expected, rtol=2e-6 if dtype is torch.float32 else 1e-2, atol=0)
        assert torch.equal(by, rest)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "cols"), [(1, 2048), (3, 1100), (70, 24)])
def test_an_activation_in_place_is_the_square_of_what_is_positive(rows: int, cols: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, cols, dtype=dtype)
    x[0, :2] = torch.tensor([torch.nan, torch.inf])
    expected = x.relu().square()
    elementwise.relu_squared(x)
    torch.testing.assert_close(x, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("rows", "ordered"), [(3, False), (3, True), (70, True)])
def test_gates_of_the_delta_rule_are_those_of_its_definition(rows: int, ordered: bool) -> None:
    cols, heads = 1100, 36
    x, order = torch.randn(rows, cols + 2 * heads), torch.randperm(cols + 2 * heads, dtype=torch.int32) if ordered else None
    mixed, b, a = x.split((cols, heads, heads), 1)
    a[0, :3] = torch.tensor([30.0, -30.0, 0.0])
    lying = x.clone()
    if order is not None:
        lying[:, order] = x
    decay, bias, found = -torch.rand(heads).exp(), torch.randn(heads), torch.zeros(2, rows, heads)
    out = None if order is None else torch.full((rows, cols), torch.nan)
    elementwise.delta_gates(lying, order, decay, bias, out, *found)
    expected = decay.double() * torch.nn.functional.softplus(a.double() + bias.double()), b.double().sigmoid()
    torch.testing.assert_close(found, torch.stack(expected).float(), rtol=1e-5, atol=1e-30)
    assert out is None or torch.equal(out, mixed)
