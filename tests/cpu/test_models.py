"""patch(): every supported family against stock transformers on the same weights."""

import copy
import itertools

import pytest
import torch
from architectures import ARCHITECTURES
from tiny_models import FEW, MODELS, greedy, left_padded, logits, patched, tiny, tiny_model
from torch import Tensor

from tilewright import interpret
from tilewright.launch import counted
from tilewright.models import patch
from tilewright.testing import assert_accurate

SPARSE = ("mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v2-groups", "deepseek_v3", "gpt_oss", "qwen3_next", "qwen3_5_moe")


# In turn: either kind of cache has layers that see all tokens, windows, latents and experts.
CACHES = dict(zip(MODELS, itertools.cycle((None, "static")), strict=False))


@pytest.mark.parametrize(("name", "cache"), CACHES.items())
def test_logits_and_greedy_tokens_are_those_of_transformers(name: str, cache: str | None) -> None:
    model, inputs = tiny(name), left_padded(*FEW)
    stock, tokens = logits(model, inputs), greedy(model, inputs, 5, cache_implementation=cache)
    with patched(model):
        ours = logits(model, inputs)
        assert greedy(model, inputs, 5, cache_implementation=cache).tolist() == tokens.tolist()
    seen = inputs["attention_mask"].bool()
    assert stock[seen].abs().max() > 1
    torch.testing.assert_close(ours[seen], stock[seen], atol=1e-4, rtol=1e-4)


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


@pytest.mark.parametrize(("name", "indexers", "cache"), [("deepseek_v32", 2, None), ("glm_moe_dsa", 1, "static")])
def test_an_indexer_and_attention_over_its_lists_are_ours(name: str, indexers: int, cache: str | None) -> None:
    """Left-padded, prompt and steps; of GLM the second layer attends over the first one's lists.

    Lists are shorter than the prompt.
    """
    model, inputs = tiny_model({"model_type": name, **ARCHITECTURES[name]}), left_padded()
    assert model.config.index_topk < inputs["input_ids"].shape[1]
    stock = greedy(model, inputs, 2, cache_implementation=cache)
    with patch(model) as report, counted() as launches:
        ours = greedy(model, inputs, 2, cache_implementation=cache)
    assert {"sparse_index", "sparse_decode"} <= {line.op for line in report.replaced}
    assert ours.tolist() == stock.tolist()
    assert launches["sparse_index_select_kernel"] == 2 * indexers
    assert launches["sparse_decode_gather_kernel"] == 2 * 2
    wanted = logits(model, inputs)[inputs["attention_mask"].bool()]
    with patched(model):
        model.set_attn_implementation("eager")  # the indexer gets a mask of floats, and attention a list of positions
        torch.testing.assert_close(logits(model, inputs)[inputs["attention_mask"].bool()], wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", SPARSE)
def test_half_precision_mixtures_of_experts_obey_the_accuracy_rule(name: str) -> None:
    model, inputs = tiny(name, torch.bfloat16), left_padded()
    wide = copy.deepcopy(model).double()
    wide.set_experts_implementation("eager")  # the only one that takes float64
    truth, right = logits_and_experts(wide, inputs)
    stock, theirs = logits_and_experts(model, inputs)
    with patch(model) as report, counted() as launches:
        ours, mine = logits_and_experts(model, inputs)
    assert_all_known(report)
    ops = {line.op for line in report.replaced}
    assert {"moe_route", "attention"} <= ops
    assert ("moe" in ops) == (name != "gpt_oss")
    assert any(kernel.startswith("moe") for kernel in launches)
    # If two experts tie within rounding, stock or ours may take either. No error bound covers that
    # jump.
    same = (mine == right).all(-1) & (theirs == right).all(-1)
    assert same.float().mean() > 0.8
    assert_accurate(ours[same], stock[same], truth[same])


def assert_all_known(report) -> None:
    unknown = {line.module for line in report.kept if line.reason == "no kernel of ours computes it"}
    assert unknown == set(), str(report)


def test_every_other_family_reports_each_of_its_modules() -> None:
    for name in MODELS.keys() - SPARSE:
        with patch(tiny(name, torch.bfloat16)) as report:
            assert_all_known(report)


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
    assert "   2 LlamaMLP               silu_mul: it computes no down(act(gate) * up) with SiLU or tanh-GELU" in text
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


def test_transformers_attention_can_be_kept() -> None:
    model, inputs = tiny(), left_padded()
    stock = logits(model, inputs)
    with patch(model, skip=["attention"]) as report, counted() as launches:
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


@pytest.mark.parametrize(("cache", "steps"), [(None, 256), ("static", 64)])
def test_256_decode_steps_compile_nothing_new(cache: str | None, steps: int) -> None:
    """After the first 32 steps: a growing cache has then had lengths with and without a factor of
    16. One in one piece never has another length.
    """
    model, seen = tiny(num_hidden_layers=1), KernelCount()
    with patched(model):
        greedy(model, {"input_ids": torch.arange(3, 8)[None]}, 32 + steps, cache_implementation=cache, streamer=seen)
    assert len(seen.counts) == 1 + 32 + steps
    assert seen.counts[-1] == seen.counts[32]


def test_torch_compile_makes_one_graph() -> None:
    model, inputs = tiny(num_hidden_layers=1), left_padded()
    with patched(model):
        expected = logits(model, inputs)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()  # a test before it may have compiled other graphs
        with torch.inference_mode():
            compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
            for _ in range(2):
                torch.testing.assert_close(compiled(**inputs).logits, expected)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


def test_torch_export_keeps_the_ops() -> None:
    model, inputs = tiny(num_hidden_layers=1), left_padded()
    with patched(model), torch.no_grad():
        expected = model(**inputs).logits
        exported = torch.export.export(model, (), {**inputs, "use_cache": False}, strict=False)
        names = {str(node.target) for node in exported.graph.nodes}
        assert {f"tilewright.{op}_out.default" for op in ("matmul", "rms_norm", "silu_mul", "rope", "attention")} <= names
        torch.testing.assert_close(exported.module()(**inputs, use_cache=False).logits, expected)
