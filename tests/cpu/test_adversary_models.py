"""What an adversary found silent in models: code that only looks like what our kernels compute, and
folders of small weights that say something else than they hold.
"""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tiny_models import logits, tiny
from torch import nn
from torch.nn import functional as F
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from tilewright import patch
from tilewright.engine import Engine, Sampling
from tilewright.models import ModelFileError, experts, load, probe
from tilewright.models.method import Method
from tilewright.models.quantized import quantize
from tilewright.models.quantized_folder import save_quantized

BF16 = torch.bfloat16
IDS = {"input_ids": torch.tensor([[5, 6, 7, 8, 9, 10]])}


# ------------------------------------------------------------------------------------------- patch
def test_a_kernel_that_is_less_accurate_than_a_module_does_not_take_over():
    truth = probe.random(probe.ROWS, 32)
    rounded = truth.to(BF16)
    assert probe.why_not(lambda: rounded, rounded, truth) is None
    assert probe.why_not(lambda: rounded * 1.05, rounded, truth).startswith("ours is less accurate than the module")


class Bound(nn.Module):
    """silu, with a factor that neither its type nor a shape shows."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factors = (factor,)

    def forward(self, x):
        return F.silu(x) * self.factors[0]


def bounded_mlp(self, x):
    return self.down_proj(F.silu(self.gate_proj(x)).clamp(max=7) * self.up_proj(x).clamp(-7, 7))


def dropping_mlp(self, x):
    return self.down_proj(F.dropout(F.silu(self.gate_proj(x)) * self.up_proj(x), 0.5, self.training))


def own_mlp(self, x):
    return self.down_proj(self.own(self.gate_proj(x)) * self.up_proj(x))


def bounded_norm(self, x):
    squares = x.pow(2).mean(-1, keepdim=True).clamp(max=100)
    return self.weight * (x * torch.rsqrt(squares + self.variance_epsilon))


def bounded_linear(self, x):
    return x.clamp(-90, 90) @ self.weight.T


def bounded_experts(self, x, ids, weights):
    found = torch.zeros_like(x)
    for expert in range(len(self.gate_up_proj)):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], self.gate_up_proj[expert]).chunk(2, -1)
        y = F.linear(F.silu(gate.clamp(max=7)) * up.clamp(-7, 7), self.down_proj[expert])
        found.index_add_(0, token, (y * weights[token, slot, None]).to(found.dtype))
    return found


def capped_router(self, x, *, returned=True):
    plain = F.linear(x.reshape(-1, x.shape[-1]), self.weight)
    logits = 30 * torch.tanh(plain / 30)
    weights, ids = logits.softmax(-1, dtype=torch.float).topk(self.top_k)
    return logits if returned else plain, weights / weights.sum(-1, keepdim=True), ids


def quietly_capped_router(self, x):
    return capped_router(self, x, returned=False)


def replace(model, name: str, forward, **attributes):
    """Gives the modules of a name in their parents another forward."""
    for path, module in model.named_modules():
        if path.rpartition(".")[2] == name:
            module.__class__ = type("Toy" + type(module).__name__, (type(module),), {"forward": forward})
            module.__dict__.update(attributes)
    return model


@pytest.mark.parametrize(
    ("family", "name", "forward", "kind"),
    [
        ("llama", "mlp", bounded_mlp, "mlp"),
        ("llama", "norm", bounded_norm, "norms"),
        ("llama", "o_proj", bounded_linear, "linear"),
        ("mixtral", "experts", bounded_experts, "moe"),
        ("mixtral", "gate", capped_router, "moe"),
        ("mixtral", "gate", quietly_capped_router, "moe"),
    ],
)
def test_a_bound_that_small_rows_never_meet_keeps_a_module(family, name, forward, kind) -> None:
    model = replace(tiny(family, BF16 if family == "mixtral" else torch.float32, num_hidden_layers=1), name, forward)
    with patch(model, only=["rope", kind]) as report:
        kept = [k for k in report.kept if k.module.startswith("Toy")]
        assert not any(r.module.startswith("Toy") for r in report.replaced)
    assert len(kept) == 1, report


def test_a_dropout_drops_in_training() -> None:
    model = replace(tiny(num_hidden_layers=1), "mlp", dropping_mlp)
    with patch(model, only=["mlp"]):
        steady = [logits(model, IDS) for _ in range(2)]
        model.model.layers[0].mlp.train()
        drawn = [logits(model, IDS) for _ in range(2)]
    assert torch.equal(*steady)
    assert not torch.equal(*drawn)


@pytest.mark.parametrize("acts", [(F.silu, F.relu), (Bound(1.0), Bound(2.0))])
def test_modules_of_one_class_that_differ_in_what_they_hold_are_told_apart(acts) -> None:
    model = tiny()
    for layer, act in zip(model.model.layers, acts, strict=True):
        replace(layer, "mlp", own_mlp, own=act)
    stock = logits(model, IDS)
    with patch(model, only=["mlp"]) as report:
        assert [r.count for r in report.replaced] == [1]
        assert torch.allclose(logits(model, IDS), stock, rtol=1e-4, atol=1e-4)


def test_a_hook_inside_one_mlp_keeps_that_one() -> None:
    model = tiny()
    model.model.layers[1].mlp.act_fn.register_forward_hook(lambda module, args, out: 3 * out)
    stock = logits(model, IDS)
    with patch(model, only=["mlp"]) as report:
        assert [r.count for r in report.replaced] == [1]
        assert torch.allclose(logits(model, IDS), stock, rtol=1e-4, atol=1e-4)


def test_matrices_of_a_dtype_without_a_kernel_stay() -> None:
    """Those of a float64 model were replaced, unlike its norms, and it ran no more."""
    with pytest.raises(ValueError, match="must be one with modules that our kernels can replace, got a LlamaForCausalLM in which nothing matched"):
        patch(tiny(num_hidden_layers=1).double())

    class Wide(nn.Module):
        def __init__(self, weight: torch.Tensor) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight.double(), requires_grad=False)

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return rows.double() @ self.weight.T

    model = tiny(num_hidden_layers=1)
    model.lm_head = Wide(model.lm_head.weight.data)
    before = logits(model, IDS)
    report = patch(model)
    assert "matmul: weight must be bfloat16, float16 or float32, got float64" in str(report)
    torch.testing.assert_close(logits(model, IDS), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("how", [{"only": 5}, {"skip": 5}, {"only": [5]}])
def test_kinds_that_are_none_are_named(how) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(how))} must be a list of kinds, of linear, "):
        patch(tiny(num_hidden_layers=1), **how)


# ------------------------------------------------------------------------------------------ engine
def test_an_engine_takes_no_activation_of_another_model() -> None:
    """Gemma's configs say hidden_activation, not hidden_act: the second model had that of the
    first.
    """
    for act in ("gelu_pytorch_tanh", "silu"):
        model = tiny("gemma2", hidden_activation=act, num_hidden_layers=1)
        stock = logits(model, IDS)[0, -1]
        with Engine(model, max_len=16) as engine:
            assert torch.allclose(engine.logits(IDS["input_ids"])[0, 0], stock, rtol=1e-4, atol=1e-4)


def test_an_engine_caps_the_scores_that_the_model_caps() -> None:
    """Gemma 3 holds a cap that its attention does not pass on."""
    model = tiny("gemma3", num_hidden_layers=1, attn_logit_softcapping=0.5)
    stock = logits(model, IDS)[0, -1]
    with Engine(model, max_len=16) as engine:
        assert torch.allclose(engine.logits(IDS["input_ids"])[0, 0], stock, rtol=1e-4, atol=1e-4)


LATENT = {"kv_lora_rank": 64, "qk_rope_head_dim": 16, "head_dim": 16, "first_k_dense_replace": 0}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention must be None or False, got True"),
        ("llama", {"head_dim": 3}, "the rotation of a LlamaAttention must be of at most 3 elements, those of a head, got 4"),
        ("deepseek_v3", {**LATENT, "topk_group": 1}, "top_groups must be enough groups of 2 experts for top_k = 3, got 1"),
        ("deepseek_v3", {**LATENT, "head_dim": 4}, "rotation must be of 16 elements, qk_rope_head_dim, got 4"),
        ("deepseek_v2", {**LATENT, "rope_interleave": False}, "rope_interleave must be left out, because a deepseek_v2 model does not read it"),
        ("llama", {"residual_multiplier": 0.2}, "residual_multiplier must be left out, because a llama model does not read it, got 0.2"),
    ],
)
def test_an_engine_refuses_what_it_would_compute_otherwise(name, changes, message) -> None:
    """As it is in transformers' code: those of DeepSeek-V3 run there, on experts or angles that are
    masked or repeated; the last two as if the config did not say so.
    """
    model = tiny(name, BF16, num_hidden_layers=1, **changes)
    with pytest.raises(ValueError, match=message):
        Engine(model, max_len=16)
    assert "tilewright_engine" not in model.__dict__


def test_an_engine_refuses_code_that_it_would_not_call() -> None:
    """A hook, another forward or a class of somebody's own was passed over without a word."""

    class Louder(nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return 3 * super().forward(ids)

    def replaced(model: nn.Module) -> None:
        model.model.layers[0].forward = lambda *given, **named: given

    changes = {
        lambda model: model.model.layers[0].mlp.register_forward_hook(lambda *given: None): r"model.layers.0.mlp must be .* got one with a hook",
        lambda model: model.lm_head.register_forward_pre_hook(lambda *given: None): "lm_head must be .* got one with a hook",
        lambda model: setattr(model.model.embed_tokens, "__class__", Louder): r"model.embed_tokens must be .* got test_adversary_models\..*Louder",
        replaced: r"model.layers.0 must be .* got one whose forward is replaced",
    }
    for change, message in changes.items():
        model = tiny("llama", num_hidden_layers=1)
        change(model)
        with pytest.raises(ValueError, match=message):
            Engine(model, max_len=16)
        assert "tilewright_engine" not in model.__dict__
    model = tiny("llama", num_hidden_layers=1)
    logits(model, IDS, output_hidden_states=True)  # leaves hooks of transformers' own
    with patch(model), Engine(model, max_len=16) as engine:
        assert engine.generate([[5]], 2).tokens


@pytest.mark.parametrize(("groups", "kept"), [(2, 1), (4, 2)])
def test_experts_of_kept_groups_win_with_any_bias(groups, kept) -> None:
    """Biased scores below 0 would lose against masks of 0. The stock router is what counts."""
    torch.manual_seed(0)
    config = {"num_experts_per_tok": 2, "num_local_experts": 8, "hidden_size": 32, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
    stock = DeepseekV3TopkRouter(SimpleNamespace(**config, n_group=groups, topk_group=kept))
    stock.weight.data.normal_()
    stock.e_score_correction_bias.copy_(torch.randn(8) - 3)
    x = torch.randn(300, 32)
    method = experts.router(stock)
    assert isinstance(method, Method)
    with torch.inference_mode():
        (_, weights, ids), (_, their_weights, their_ids) = experts.route(stock, x, **dict(method.options)), stock(x)
    order, their_order = ids.argsort(-1), their_ids.argsort(-1)
    assert torch.equal(ids.gather(1, order), their_ids.gather(1, their_order))
    torch.testing.assert_close(weights.gather(1, order), their_weights.gather(1, their_order))


def test_an_engine_checks_continuations_and_masks() -> None:
    with Engine(tiny(num_hidden_layers=1), max_len=32, max_batch=2) as engine:
        with pytest.raises(ValueError, match="token ids must be 0 to 95, got 3 to 96"):
            engine.logits([[5, 6]], [[3, 96]])
        with pytest.raises(ValueError, match="the number of prompts must be 1 to max_batch = 2, got 0"):
            engine.logits([], [])
        for rows in (1, 3):
            with pytest.raises(ValueError, match=r"a grammar's mask must be int32 \[2, 3\], a row for each sequence, got "):
                engine.generate([[5], [6]], 2, masks=lambda written, rows=rows: torch.full((rows, 3), -1, dtype=torch.int32))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"logit_bias": {5: float("nan")}}, r"logit_bias\[5\] must be a number, or an infinity, got nan"),
        ({"logit_bias": [5]}, r"logit_bias must be a mapping from tokens to numbers, got \[5\]"),
        ({"top_k": 2**31}, r"top_k must be 0 \(all\) or more, below 2\*\*31, got 2147483648"),
    ],
)
def test_sampling_refuses_what_no_kernel_takes(how, message) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Sampling(**how)


# ----------------------------------------------------------------------------------------- folders
GATE, QUERY = "model.layers.0.mlp.gate_proj", "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny("qwen2", BF16, hidden_size=128, intermediate_size=128, head_dim=32, num_hidden_layers=1)
    quantize(model, "int4-64")
    save_quantized(model, None, "int4-64", folder := tmp_path_factory.mktemp("folder") / "right")
    return folder


def g_idx(*groups: int) -> dict:
    return {f"{GATE}.weight_g_idx": torch.tensor(groups, dtype=torch.int32)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{GATE}.weight_scale": lambda x: x * float("nan")}, rf"a NaN or an infinity in \['{GATE}.scales'\]"),
        ({f"{GATE}.weight_scale": lambda x: x.int()}, "scales.dtype must be a float, got int32"),
        ({f"{GATE}.weight_shape": torch.tensor([5])}, r"weight_shape must be \[128, 128\] for a weight_packed of 4 bits, .*, got \[5\]"),
        ({f"{GATE}.weight_packed": torch.flatten}, r"weight_packed.dim\(\) must be 2, got 1"),
        (g_idx(*[0] * 100, *[1] * 28), "weight_g_idx must be equal groups in order"),
        ({f"{QUERY}.bias": None}, rf"a complete qwen2 model, got missing \['{QUERY}.bias'\]"),
        ({f"{QUERY}.bias": lambda x: x[:3]}, rf"misshapen \['{QUERY}.bias \[3\] for \[128\]'\]"),
        ({f"{GATE}.bias": torch.ones(128)}, rf"unexpected \['{GATE}.bias'\]"),
        ({f"{GATE}.bias": torch.zeros(128)}, None),  # as GPTQ writes of every module
    ],
)
def test_a_coded_folder_that_says_something_else_is_refused(quantised: Path, changes, message, tmp_path: Path) -> None:
    shutil.copytree(quantised, folder := tmp_path / "case")
    tensors = load_file(folder / "model.safetensors")
    for name, change in changes.items():
        tensors[name] = change(tensors[name]) if callable(change) else change
    save_file({n: x.contiguous() for n, x in tensors.items() if x is not None}, folder / "model.safetensors", metadata={"format": "pt"})
    if message is None:
        assert load(folder, dtype=BF16).model.model.layers[0].mlp.gate_proj.bias is None
        return
    with pytest.raises(ModelFileError, match=message):
        load(folder, dtype=BF16)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"transform_config": {"config_groups": {}}}, "activations are not rotated as it runs, got one with transform_config"),
        ({"quant_method": "awq", "version": "gemv"}, "an AWQ model of version gemm, got 'gemv'"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format gptq or gptq_v2, got 'marlin'"),
    ],
)
def test_a_method_that_we_would_misread_is_refused(quantised: Path, said, message, tmp_path: Path) -> None:
    shutil.copytree(quantised, folder := tmp_path / "case")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= said
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelFileError, match=message):
        load(folder, dtype=BF16)


@pytest.mark.parametrize("place", ["../../etc/x.safetensors", "/etc/x.safetensors", "a\0.safetensors", "fifo.safetensors"])
def test_an_index_leads_to_files_of_its_folder(quantised: Path, place: str, tmp_path: Path) -> None:
    shutil.copytree(quantised, folder := tmp_path / "case")
    names = load_file(folder / "model.safetensors").keys()
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(names, place)}))
    if place.startswith("fifo"):
        os.mkfifo(folder / place)
    with pytest.raises(ModelFileError, match=r"files of its own folder, got|must be a regular file, got a FIFO"):
        load(folder, dtype=BF16)


def test_what_a_full_disk_leaves_loads_nowhere(quantised: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """config.json comes last, and the writer's own error is one of the disk."""
    model = load(quantised, dtype=BF16).model

    def full(*args: object, **options: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(type(model.generation_config), "save_pretrained", full)
    with pytest.raises(OSError, match="No space left"):
        save_quantized(model, None, "int4-64", tmp_path / "half")
    with pytest.raises(ValueError, match=r"a folder with config\.json"):
        load(tmp_path / "half", dtype=BF16)

    def fails(*args: object, **options: object) -> None:
        raise SafetensorError("I/O error: File too large")

    monkeypatch.setattr("huggingface_hub.save_torch_state_dict", fails)
    with pytest.raises(OSError, match=r"none cannot be written: I/O error: File too large"):
        save_quantized(model, None, "int4-64", tmp_path / "none")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    for place, message in (("link", "new or empty"), ("file", "new or empty"), ("file/below", "one that can be written")):
        with pytest.raises(ValueError, match=f"the output folder must be {message}, got "):
            save_quantized(model, None, "int4-64", tmp_path / place)
