"""patch(): every supported family against stock transformers on the same weights."""

import copy
import io
import pickle
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tiny_models import PLAIN, TINY, tiny_model
from torch import Tensor

from tilewright import interpret
from tilewright.launch import counted
from tilewright.models import patch
from tilewright.testing import assert_accurate

MLA = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "kv_lora_rank": 24,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
MODELS = {
    **PLAIN,
    "phi3": {"model_type": "phi3", "partial_rotary_factor": 0.5},
    "gemma2": {"model_type": "gemma2", "sliding_window": 5, "query_pre_attn_scalar": 24},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 5, "query_pre_attn_scalar": 24, "num_hidden_layers": 6},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "mlp_only_layers": [0]},
    "deepseek_v2": {"model_type": "deepseek_v2", **MLA, "topk_method": "greedy", "routed_scaling_factor": 1.5},
    "deepseek_v2-groups": {
        "model_type": "deepseek_v2",
        **MLA,
        "q_lora_rank": 12,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
    },
    "deepseek_v3": {"model_type": "deepseek_v3", **MLA, "q_lora_rank": 12, "n_group": 4, "topk_group": 2, "norm_topk_prob": True},
    "gpt_oss": {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5, "rope_scaling": None},
}
SPARSE = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v2-groups", "deepseek_v3", "gpt_oss")


def tiny(name: str = "llama", dtype: torch.dtype = torch.float32, **changes: object):
    return tiny_model(MODELS[name], dtype, **changes)


def left_padded() -> dict[str, Tensor]:
    torch.manual_seed(0)
    ids = torch.randint(3, TINY["vocab_size"], (3, 11))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    mask[2, :1] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def logits(model, inputs: dict[str, Tensor], **options: object) -> Tensor:
    with torch.inference_mode():
        return model(**inputs, **options).logits


def greedy(model, inputs: dict[str, Tensor], tokens: int = 8, **options: object) -> Tensor:
    return model.generate(**inputs, max_new_tokens=tokens, do_sample=False, **options)


@contextmanager
def patched(model) -> Iterator[object]:
    with patch(model):
        yield model


@pytest.mark.parametrize("name", MODELS)
def test_prefill_logits_are_those_of_transformers(name: str) -> None:
    model, inputs = tiny(name), left_padded()
    stock = logits(model, inputs)
    with patched(model):
        ours = logits(model, inputs)
    seen = inputs["attention_mask"].bool()
    assert stock[seen].abs().max() > 1
    torch.testing.assert_close(ours[seen], stock[seen], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_those_of_transformers(name: str, cache: str | None) -> None:
    model, inputs = tiny(name), left_padded()
    stock = greedy(model, inputs, cache_implementation=cache)
    with patched(model):
        ours = greedy(model, inputs, cache_implementation=cache)
    assert ours.tolist() == stock.tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_further_from_the_truth_than_transformers(dtype: torch.dtype) -> None:
    model, inputs = tiny(dtype=dtype), left_padded()
    seen = inputs["attention_mask"].bool()
    truth = logits(copy.deepcopy(model).double(), inputs)[seen]
    stock = logits(model, inputs)[seen]
    with patched(model):
        ours = logits(model, inputs)[seen]
    assert ours.dtype == dtype
    assert (ours - truth).square().mean().sqrt() <= 2 * (stock - truth).square().mean().sqrt()


def logits_and_experts(model, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The logits of each token, and the experts that each layer chose for it, in order."""
    seen, chosen = inputs["attention_mask"].bool(), []
    routers = [module for name, module in model.named_modules() if name.endswith((".gate", ".router"))]
    hooks = [router.register_forward_hook(lambda _, __, out: chosen.append(out[2].sort(-1).values)) for router in routers]
    found = logits(model, inputs)[seen]
    for hook in hooks:
        hook.remove()
    return found, torch.cat(chosen, -1)[seen.flatten()]


ABSORBABLE = {"kv_lora_rank": 64, "qk_rope_head_dim": 16, "head_dim": 16}


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_decode_steps_of_latent_attention_never_expand_the_cache(name: str) -> None:
    """Left-padded, from a dynamic and a static cache.

    A step adds no more error to the logits than transformers' own.
    """
    model, inputs = tiny(name, torch.bfloat16, **ABSORBABLE), left_padded()
    for cache in (None, "static"):
        options = {"cache_implementation": cache, "output_logits": True, "return_dict_in_generate": True}
        stock = greedy(model, inputs, 3, **options)
        whole = {"input_ids": stock.sequences, "attention_mask": torch.cat((inputs["attention_mask"], torch.ones(3, 3, dtype=torch.long)), 1)}
        wide = copy.deepcopy(model).double()
        wide.set_experts_implementation("eager")
        truth = logits(wide, whole)[:, 10:-1]
        with patch(model) as report, counted() as launches:
            ours = greedy(model, inputs, 3, **options)
        assert {"mla_decode", "attention"} <= {line.op for line in report.replaced}
        assert launches["attention_decode_kernel"] == 2 * model.config.num_hidden_layers
        assert (ours.sequences == stock.sequences).float().mean() > 0.9
        same = (ours.sequences == stock.sequences).all(1)
        mine, theirs, right = torch.stack(ours.logits, 1)[same], torch.stack(stock.logits, 1)[same], truth[same]
        assert (mine - right).square().mean().sqrt() <= 2 * (theirs - right).square().mean().sqrt()
    with patched(model):
        model.set_attn_implementation("eager")  # another attention finds keys and values expanded
        assert logits(model, inputs).isfinite().all()
    assert "expand_kv" not in model.model.layers[0].self_attn.__dict__


@pytest.mark.parametrize("name", SPARSE)
def test_half_precision_mixtures_of_experts_obey_the_accuracy_rule(name: str) -> None:
    model, inputs = tiny(name, torch.bfloat16), left_padded()
    wide = copy.deepcopy(model).double()
    wide.set_experts_implementation("eager")  # the only one that takes float64
    truth, right = logits_and_experts(wide, inputs)
    stock, theirs = logits_and_experts(model, inputs)
    with patch(model) as report, counted() as launches:
        ours, mine = logits_and_experts(model, inputs)
    ops = {line.op for line in report.replaced}
    assert {"moe_route", "attention"} <= ops
    assert ("moe" in ops) == (name != "gpt_oss")
    assert any(kernel.startswith("moe") for kernel in launches)
    # If two experts tie within rounding, stock or ours may take either. No error bound covers that
    # jump.
    same = (mine == right).all(-1) & (theirs == right).all(-1)
    assert same.float().mean() > 0.8
    assert_accurate(ours[same], stock[same], truth[same])


def test_every_family_reports_each_of_its_modules() -> None:
    for name in MODELS:
        with patch(tiny(name, torch.bfloat16)) as report:
            assert not [line for line in report.kept if line.reason == "no row for this class"], str(report)


def test_every_kernel_runs_as_often_as_the_report_says() -> None:
    model = tiny("qwen3")
    with patch(model) as report, counted() as launches:
        logits(model, left_padded())
    counts = {(line.op, line.module): line.count for line in report.replaced}
    assert counts == {
        ("matmul", "Linear"): 15,
        ("rms_norm", "Qwen3RMSNorm"): 9,
        ("silu_mul", "Qwen3MLP"): 2,
        ("rope", "Qwen3Attention"): 2,
        ("attention", "Qwen3Attention"): 2,
    }
    assert launches["rms_norm_kernel"] == 9
    assert launches["rope_kernel"] == 2
    assert launches["silu_mul_kernel"] == 2
    assert launches["matmul_kernel"] == 15


def test_report_says_what_where_and_why_not() -> None:
    report = patch(tiny("llama", hidden_act="relu"))
    text = str(report)
    assert text.startswith("LlamaForCausalLM on tilewright kernels\n")
    assert "   5 LlamaRMSNorm           rms_norm   input_layernorm post_attention_layernorm norm" in text
    assert "   2 LlamaMLP               silu_mul: hidden_act must be silu or gelu_pytorch_tanh, got relu" in text
    assert "   1 Embedding              gathers rows, computes nothing" in text
    assert report.as_dict()["replaced"][0]["op"] == "matmul"


def test_gelu_tanh_mlp_is_replaced() -> None:
    model, inputs = tiny(hidden_act="gelu_pytorch_tanh"), left_padded()
    stock = logits(model, inputs)
    with patch(model) as report:
        ours = logits(model, inputs)
    assert "silu_mul" in {line.op for line in report.replaced}
    seen = inputs["attention_mask"].bool()
    torch.testing.assert_close(ours[seen], stock[seen], atol=1e-4, rtol=1e-4)


def state_of(model) -> dict[str, dict[str, int]]:
    """Which object every attribute of every module is."""
    return {name: {key: id(value) for key, value in module.__dict__.items()} for name, module in model.named_modules()}


def test_undo_restores_every_attribute_and_every_bit() -> None:
    model, inputs = tiny(), left_padded()
    stock, before = logits(model, inputs), state_of(model)
    attention_before = model.config._attn_implementation
    report = patch(model)
    logits(model, inputs)
    report.undo()
    assert state_of(model) == before
    assert model.config._attn_implementation == attention_before
    assert torch.equal(logits(model, inputs), stock)
    report.undo()  # nothing left to do
    patch(model).undo()
    assert state_of(model) == before


def test_undo_happens_when_the_block_raises() -> None:
    model = tiny()
    before = state_of(model)
    with pytest.raises(RuntimeError, match="inside"), patch(model):
        raise RuntimeError("inside")
    assert state_of(model) == before


def test_a_second_model_of_the_same_class_and_config_keeps_the_stock_code() -> None:
    first = tiny()
    second = type(first)(first.config).eval()  # shares the config object
    second.load_state_dict(first.state_dict())
    inputs = left_padded()
    stock = logits(second, inputs)
    with patched(first), counted() as launches:
        assert torch.equal(logits(second, inputs), stock)
        assert not launches
        logits(first, inputs)
        assert launches


def test_two_patched_models_are_undone_apart() -> None:
    first, second, inputs = tiny("llama"), tiny("qwen2"), left_padded()
    one, two = patch(first), patch(second)
    one.undo()
    with counted() as launches:
        logits(first, inputs)
        assert not launches
        logits(second, inputs)
        assert launches
    two.undo()


def test_a_deep_copy_of_a_patched_model_is_patched_and_undone_by_itself() -> None:
    model, inputs = tiny(), left_padded()
    stock = logits(model, inputs)
    with patched(model):
        ours = logits(model, inputs)
        other = copy.deepcopy(model)
        assert torch.equal(logits(other, inputs), ours)
        other.tilewright_report.undo()
        assert torch.equal(logits(other, inputs), stock)
        assert torch.equal(logits(model, inputs), ours)


def written(how: str, model):
    if how == "pickle":
        return pickle.loads(pickle.dumps(model))
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@pytest.mark.parametrize("how", ["pickle", "torch.save"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "deepseek_v2"])
def test_a_patched_model_that_is_written_and_read_is_patched_and_undone_by_itself(how: str, name: str) -> None:
    model, inputs = tiny(name), left_padded()
    stock = logits(model, inputs)
    with patched(model), counted() as launches:
        ours, ran = logits(model, inputs), dict(launches)
        other = written(how, model)
        launches.clear()
        assert torch.equal(logits(other, inputs), ours)
        assert launches == ran
        again = written(how, other)
        assert str(again.tilewright_report) == str(model.tilewright_report)
    assert torch.equal(logits(other, inputs), ours)
    other.tilewright_report.undo()
    assert torch.equal(logits(other, inputs), stock)
    assert [sorted(module.__dict__) for module in other.modules()] == [sorted(module.__dict__) for module in model.modules()]
    assert torch.equal(logits(written(how, other), inputs), stock)


def test_a_part_of_a_patched_model_is_written_too_and_its_weights_are_plain(tmp_path) -> None:
    model = tiny()
    plain = {name: x.clone() for name, x in model.state_dict().items()}
    x = torch.randn(2, TINY["hidden_size"])
    with patched(model), torch.no_grad():
        part = model.model.layers[0].mlp
        assert torch.equal(written("pickle", part)(x), part(x))
        assert copy.copy(part).forward.__self__ is not part
        torch.save(model.state_dict(), tmp_path / "weights")
        model.save_pretrained(tmp_path / "folder")
    loaded = torch.load(tmp_path / "weights", weights_only=True)
    assert list(loaded) == list(plain)
    assert all(torch.equal(loaded[name], plain[name]) for name in plain)
    assert "tilewright" not in (tmp_path / "folder" / "config.json").read_text()
    other = type(model).from_pretrained(tmp_path / "folder")
    assert torch.equal(logits(other.eval(), left_padded()), logits(model, left_padded()))


def test_patching_twice_raises() -> None:
    model = tiny()
    with patch(model), pytest.raises(ValueError, match=r"model must be unpatched, got .*undo"):
        patch(model)


def test_what_is_no_supported_model_raises() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    with pytest.raises(TypeError, match="model must be a transformers PreTrainedModel"):
        patch(torch.nn.Linear(2, 2))
    gpt2 = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", n_embd=8, n_layer=1, n_head=2, vocab_size=16))
    with pytest.raises(ValueError, match=r"model.config.model_type must be one of \[.*'llama', .*\], got gpt2"):
        patch(gpt2)


def test_a_model_in_which_nothing_matches_raises_and_is_unchanged() -> None:
    model = tiny()
    for module in model.modules():
        if not any(True for _ in module.children()) or type(module).__name__.endswith("Attention"):
            module.__class__ = type("Other", (type(module),), {})
    model.model.layers = model.model.layers[:0]
    before = state_of(model)
    with pytest.raises(ValueError, match="nothing matched"):
        patch(model)
    assert state_of(model) == before


def test_a_forward_that_is_hooked_already_is_left_alone() -> None:
    model = tiny()
    projection = model.model.layers[0].self_attn.q_proj
    hooked = projection.forward = lambda x: torch.nn.functional.linear(x, projection.weight)
    with patch(model) as report:
        assert projection.forward is hooked
        logits(model, left_padded())
    (line,) = (line for line in report.kept if line.module == "Linear")
    assert line.count == 1
    assert line.names == ("q_proj",)
    assert "replaced on this instance already" in line.reason


def test_what_attention_does_not_compute_raises() -> None:
    model, inputs = tiny(), left_padded()
    with patched(model):
        for option in ({"position_bias": torch.zeros(1)}, {"cu_seq_lens_q": torch.tensor([0, 11])}):
            with pytest.raises(ValueError, match=f"{next(iter(option))} must be None"):
                logits(model, inputs, **option)
        with pytest.raises(ValueError, match="is_causal must be True"):
            logits(model, inputs, is_causal=False)
        with pytest.raises(ValueError, match=r"attention_mask must be a 2-D padding mask"):
            logits(model, {**inputs, "attention_mask": torch.zeros(3, 1, 11, 11)})
        with pytest.raises(ValueError, match="got packed sequences"):
            logits(model, {"input_ids": inputs["input_ids"], "position_ids": torch.arange(11).remainder(6).expand(3, -1)}, use_cache=False)
        holes = inputs["attention_mask"].clone()
        holes[1, 5] = 0
        with pytest.raises(RuntimeError, match="pad on the left"):
            logits(model, {**inputs, "attention_mask": holes})


def test_attention_weights_are_refused_where_the_call_asks_and_kept_where_the_config_does() -> None:
    model, inputs = tiny(), left_padded()
    with patched(model), pytest.raises(ValueError, match="output_attentions must be None"):
        logits(model, inputs, output_attentions=True)
    model.set_attn_implementation("eager")
    model.config.output_attentions = True
    with patch(model) as report, torch.inference_mode():
        weights = model(**inputs).attentions
    assert [w.shape for w in weights] == [(3, 4, 11, 11)] * 2
    assert any("config.output_attentions" in line.reason for line in report.kept)


def test_attention_dropout_raises_in_training_and_gradients_are_refused() -> None:
    model, inputs = tiny(attention_dropout=0.1), left_padded()
    with patched(model):
        with pytest.raises(ValueError, match=r"requires_grad must be False, or the call under torch.no_grad"):
            model(**inputs)
        model.train()
        with pytest.raises(ValueError, match="attention dropout must be 0"):
            logits(model, inputs)


def test_transformers_attention_can_be_kept() -> None:
    model, inputs = tiny(), left_padded()
    stock = logits(model, inputs)
    with patch(model, attention=False) as report, counted() as launches:
        ours = logits(model, inputs)
    assert not any("attention" in name for name in launches)
    assert "attention" not in {line.op for line in report.replaced}
    seen = inputs["attention_mask"].bool()
    torch.testing.assert_close(ours[seen], stock[seen], atol=1e-4, rtol=1e-4)


def test_right_padded_prefill_is_right_where_there_are_tokens() -> None:
    model, inputs = tiny(), left_padded()
    inputs = {name: value.flip(1) for name, value in inputs.items()}
    stock = logits(model, inputs)
    with patched(model):
        ours = logits(model, inputs)
    seen = inputs["attention_mask"].bool()
    torch.testing.assert_close(ours[seen], stock[seen], atol=1e-4, rtol=1e-4)


def test_a_prompt_continued_from_a_cache_matches() -> None:
    """Several queries after cached keys: q_len != kv_len."""
    for name in ("llama", "mistral"):
        model, inputs = tiny(name), left_padded()
        ids, mask = inputs["input_ids"], inputs["attention_mask"]

        def both_parts(model, ids: Tensor = ids, mask: Tensor = mask) -> Tensor:
            with torch.inference_mode():
                first = model(ids[:, :7], attention_mask=mask[:, :7], use_cache=True)
                return model(ids[:, 7:], attention_mask=mask, past_key_values=first.past_key_values).logits

        stock = both_parts(model)
        with patched(model):
            torch.testing.assert_close(both_parts(model), stock, atol=1e-4, rtol=1e-4)


class KernelCount:
    """A streamer for `generate` that notes after each token how many kernels the interpreter has
    compiled.
    """

    def __init__(self) -> None:
        self.counts: list[int] = []

    def put(self, value: Tensor) -> None:
        self.counts.append(interpret.compiled_count())

    def end(self) -> None:
        pass


@pytest.mark.parametrize("cache", [None, "static"])
def test_256_decode_steps_compile_nothing_new(cache: str | None) -> None:
    """After the first 32 steps: a growing cache has then had lengths with and without a factor of
    16.
    """
    model, seen = tiny(num_hidden_layers=1), KernelCount()
    with patched(model):
        greedy(model, {"input_ids": torch.arange(3, 8)[None]}, 32 + 256, cache_implementation=cache, streamer=seen)
    assert len(seen.counts) == 1 + 32 + 256
    assert seen.counts[-1] == seen.counts[32]


def test_torch_compile_makes_one_graph() -> None:
    model, inputs = tiny(), left_padded()
    with patched(model):
        expected = logits(model, inputs)
        torch._dynamo.reset()
        with torch.inference_mode():
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
            for _ in range(2):
                torch.testing.assert_close(compiled(**inputs).logits, expected)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


def test_torch_export_keeps_the_ops() -> None:
    model, inputs = tiny(), left_padded()
    with patched(model), torch.no_grad():
        expected = model(**inputs).logits
        exported = torch.export.export(model, (), {**inputs, "use_cache": False}, strict=False)
        names = {str(node.target) for node in exported.graph.nodes}
        assert {f"tilewright.{op}_out.default" for op in ("matmul", "rms_norm", "silu_mul", "rope", "attention")} <= names
        torch.testing.assert_close(exported.module()(**inputs, use_cache=False).logits, expected)
