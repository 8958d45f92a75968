"""Models with weights of 4 and 8 bits: made from 16, loaded from folders as others write them,
patched, in the engine, written again.
"""

import copy
import json
from pathlib import Path

import pytest
import torch
from other_quantisers import CONFIGS, write, write_as
from safetensors.torch import load_file, save_file
from tiny_models import state_of, tiny
from torch import nn
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts
from typer.testing import CliRunner

from tilewright import patch
from tilewright.cli import app
from tilewright.engine import Engine, layers, programs
from tilewright.engine.families import mlp_of
from tilewright.engine.graph import run
from tilewright.engine.sampling import LIKELIEST
from tilewright.engine.weights import Parts, SmallMatrix
from tilewright.launch import counted, forced_config, next_pow2
from tilewright.models import ModelFileError, load
from tilewright.models.gguf_tensors import KEPT
from tilewright.models.method import place_of
from tilewright.models.quantized import QuantizedLinear, QuantizedMixture, parameters, quantize, weight_bytes, weight_formats
from tilewright.models.quantized_folder import METHODS, save_quantized
from tilewright.ops import quantized_matmul as op
from tilewright.ops.common.weight_formats import FORMATS
from tilewright.testing import assert_accurate

BF16 = torch.bfloat16
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 1}  # groups of 128 fit
PROMPTS = [[5, 6, 7, 8, 9], [11, 12]]
NEW = 2


def small(name: str = "llama", **changes: object):
    return tiny(name, BF16, **SIZES | changes)


def widened(model, dtype: torch.dtype):
    """A model of plain Linear modules with the weights that the codes stand for."""
    wide = copy.deepcopy(model)
    for path, module in list(wide.named_modules()):
        if isinstance(module, QuantizedMixture):
            parent, _, name = path.rpartition(".")
            setattr(wide.get_submodule(parent), name, experts_with(module, wide.config))
        if isinstance(module, QuantizedLinear):
            linear = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
            linear.weight.data = module.wide
            if module.bias is not None:
                linear.bias.data = module.bias.data
            parent, _, name = path.rpartition(".")
            setattr(wide.get_submodule(parent), name, linear)
    wide.__dict__.pop("tilewright_engine", None)
    return wide.to(dtype)


def experts_with(module: QuantizedMixture, config) -> nn.Module:
    """transformers' experts of gpt-oss or Qwen3-MoE with the weights of a mixture."""
    gate_up, down = module.gate_up.dequantize(), module.down.dequantize()[:, 0]
    if config.model_type != "gpt_oss":
        experts = Qwen3MoeExperts(config)
        experts.gate_up_proj.data, experts.down_proj.data = gate_up.flatten(1, 2), down
        return experts
    experts = GptOssExperts(config)
    experts.gate_up_proj.data = gate_up.transpose(1, 2).flatten(1, 2).transpose(1, 2).contiguous()
    experts.gate_up_proj_bias.data = module.bias_gate_up.transpose(1, 2).flatten(1)
    experts.down_proj.data, experts.down_proj_bias.data = down.transpose(1, 2).contiguous(), module.bias_down.data
    return experts


def check_engine(model) -> tuple[list[list[int]], bool]:
    """Logits by the accuracy rule, and the likeliest tokens up to ties, of an engine on a quantised
    model. Returns the tokens, and whether queries, keys and values are one matrix.
    """
    stock, truth = (widened(model, dtype) for dtype in (BF16, torch.float32))
    with Engine(model, max_batch=2, max_len=64) as engine:
        tokens = engine.generate(PROMPTS, NEW).tokens
        found = engine.logits(PROMPTS, [row[:-1] for row in tokens])
        joined = not isinstance(engine.decoder.layers[0].attention.qkv, Parts)
    for i, (prompt, chosen) in enumerate(zip(PROMPTS, tokens, strict=True)):
        with torch.inference_mode():
            given = torch.tensor([prompt + chosen[:-1]])
            theirs, true = (m(given).logits[0, len(prompt) - 1 :] for m in (stock, truth))
        assert_accurate(found[i], theirs, true)
        best, ours = true.max(-1).values, true[torch.arange(NEW), torch.tensor(chosen)]
        assert (best - ours <= 2 * (theirs - true).abs().max()).all()  # the likeliest, or one that rounding ties with it
    return tokens, joined


@pytest.mark.parametrize(
    ("name", "weights"), [("llama-tied-bias", "int4-128-zeros,head=e4m3"), ("qwen3", "nvfp4"), ("llama", "mxfp4"), ("qwen3", "int8,head=int8")]
)
def test_the_engine_runs_a_model_that_it_quantises(name: str, weights: str) -> None:
    model = small(name)
    before, bits = state_of(model), {n: p.clone() for n, p in model.named_parameters()}
    with Engine(model, max_batch=2, max_len=64, weights=weights) as engine:
        first = engine.generate(PROMPTS, NEW).tokens
        read, held = engine.step_bytes(1, 0), weight_bytes(model)
        assert isinstance(engine.decoder.head, SmallMatrix) == (",head=" in weights)
    assert read < 0.7 * sum(p.nbytes for p in model.parameters()) > held
    assert state_of(model) == before
    assert all(torch.equal(p, bits[n]) for n, p in model.named_parameters())
    quantize(model, weights)
    assert check_engine(model) == (first, weights != "nvfp4")  # its factors differ


def test_norm_and_activation_join_the_products_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of few rows writes the tokens of launches of their own, with fewer launches."""
    model, found = small(), []
    quantize(model, "int4-64")
    for rows in (0, layers.MOST_SMALL_ROWS):
        monkeypatch.setattr(layers, "MOST_SMALL_ROWS", rows)
        with Engine(model, max_batch=2, max_len=64) as engine:
            tokens = engine.generate(PROMPTS, NEW).tokens
            calls = next(iter(engine._programs.step(2, LIKELIEST).calls.values()))
        found.append((tokens, [call.op.__name__ for call in calls]))
    (apart, before), (joined, behind) = found
    assert joined == apart
    assert [before.count(op) - behind.count(op) for op in ("rms_norm_out", "silu_mul_out", "quantized_matmul_out")] == [2, 1, 0]


def test_sums_are_left_to_the_call_that_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the last, whose reader is a head of 16 bits; and no bit changes."""
    model, found = small("qwen3", hidden_size=256, head_dim=64, num_hidden_layers=2), []
    quantize(model, "int4-64")
    for change in (lambda calls, buffers: list(calls), programs.in_shares):
        monkeypatch.setattr(programs, "in_shares", change)
        split = forced_config(op.plan, lambda p, device: op.Config(next_pow2(p.m), 64, split_k=2, pieces=True))
        with split, Engine(model, max_batch=2, max_len=64, kv_dtype="fp8") as engine:
            tokens = engine.generate(PROMPTS, NEW).tokens
            step = engine._programs.step(2, LIKELIEST)
            with counted() as launches:
                run(next(iter(step.calls.values())))
        found.append((tokens, step.buffers.made("logits").tolist(), launches["quantized_matmul_sum_kernel"]))
    (*apart, sums), (*left, last) = found
    assert left == apart
    assert (sums, last) == (8, 1)


@pytest.mark.parametrize("weights", FORMATS)
def test_what_an_mlp_computes_is_found_whatever_its_format_holds(weights: str) -> None:
    """mxfp4 holds no floats, by which a module told its dtype and device."""
    model = small()
    quantize(model, weights)
    mlp = model.model.layers[0].mlp
    assert place_of(mlp) == (BF16, torch.device("cpu"))
    assert mlp_of(mlp) == (("gate_proj", "up_proj", "down_proj"), False, (1.0, 1.0))


def test_words_are_held_once_and_are_the_modules_again() -> None:
    model = small()
    quantize(model, "int8")
    held, before = weight_bytes(model), {n: b.clone() for n, b in model.named_buffers()}
    with Engine(model, max_len=64) as engine:
        assert engine.decoder.layers[0].attention.qkv.rows == 128 + 2 * 64
        assert weight_bytes(model) == held
        assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())
    assert weight_bytes(model) == held


@pytest.mark.parametrize("weights", ["mxfp4", "mxfp4,head=e4m3"])
def test_patch_quantises_and_undoes_it(weights: str) -> None:
    model = small()
    before, ids = state_of(model), torch.tensor([[5, 6, 7, 8]])
    with patch(model, weights=weights) as report, torch.inference_mode():
        ops = {r.op: r.count for r in report.replaced}
        assert (ops["quantized_matmul"], ops.get("matmul", 0)) == ((7, 1) if weights == "mxfp4" else (8, 0))  # the head
        assert ops["silu_mul"] == 1
        ours = model(ids).logits
    assert state_of(model) == before
    quantize(model, weights)
    with torch.inference_mode():
        assert_accurate(ours, *(widened(model, dtype)(ids).logits for dtype in (BF16, torch.float32)))


def test_a_tied_head_gets_codes_and_the_embedding_stays() -> None:
    model = small("llama-tied-bias")
    held, embedding, head = parameters(model), model.get_input_embeddings().weight, model.lm_head
    done = quantize(model, "int8,head=e4m3")
    assert isinstance(model.lm_head, QuantizedLinear)
    assert model.lm_head.weight_format == "e4m3"
    assert (parameters(model), weight_formats(model)) == (held, ["int8", "e4m3"])
    assert model.get_input_embeddings().weight is embedding
    done.undo()
    assert model.lm_head is head
    assert model.lm_head.weight is embedding


def test_undo_puts_weights_where_the_model_is_by_then() -> None:
    """A model that was patched and then moved had two devices after undo."""
    model = small()
    report = patch(model, weights="mxfp4")
    model.to("meta")
    report.undo()
    assert {weight.device.type for weight in model.parameters()} == {"meta"}


@pytest.mark.parametrize("which", [{"only": ["norms"]}, {"skip": ["linear"]}])
def test_weights_of_kinds_that_are_left_alone_are_not_quantised(which: dict) -> None:
    """They were, and the report said that no kernel of ours computes them."""
    model = small()
    before = state_of(model)
    with pytest.raises(ValueError, match="weights must be None where the kind \"linear\" is left alone, got 'mxfp4'"):
        patch(model, weights="mxfp4", **which)
    assert state_of(model) == before


MIXTURES = {
    "gpt_oss": ("mxfp4", {"hidden_size": 64, "intermediate_size": 96, "swiglu_limit": 1.0}),
    "qwen3_moe": ("int4-32", {"hidden_size": 64, "moe_intermediate_size": 32, "mlp_only_layers": []}),
}


@pytest.fixture(scope="module", params=MIXTURES)
def mixture(request: pytest.FixtureRequest):
    weights, sizes = MIXTURES[request.param]
    model = tiny(request.param, BF16, num_hidden_layers=1, **sizes)
    model.set_experts_implementation("eager")
    quantize(model, weights)
    return model


def test_experts_are_quantised_in_the_engine_and_in_transformers(mixture, tmp_path: Path) -> None:
    check_engine(mixture)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.inference_mode(), patch(mixture) as report:
        assert {r.op: r.count for r in report.replaced}["quantized_moe"] == 1
        ours, (stock, truth) = mixture(ids).logits, (widened(mixture, dtype) for dtype in (BF16, torch.float32))
        report.undo()
        assert_accurate(ours, *(m(ids).logits for m in (stock, truth)))
    name = mixture.model.layers[0].mlp.experts.weight_format
    save_quantized(mixture, None, name, tmp_path / "out")
    again, state = load(tmp_path / "out", dtype=BF16).model.state_dict(), mixture.state_dict()
    assert again.keys() == state.keys()
    assert all(torch.equal(tensor, state[key]) for key, tensor in again.items())


def test_gpt_oss_is_loaded_as_it_ships(tmp_path: Path) -> None:
    """MXFP4 blocks of experts, gate and up rows in turn; all else in 16 bits."""
    model = tiny("gpt_oss", BF16, num_hidden_layers=1, hidden_size=64, intermediate_size=96)
    experts, path = model.model.layers[0].mlp.experts, "model.layers.0.mlp.experts"
    tensors = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith(("gate_up_proj", "down_proj"))}
    for name, rows, k in (("gate_up", 192, 64), ("down", 64, 96)):
        tensors[f"{path}.{name}_proj_blocks"] = torch.randint(0, 256, (4, rows, k // 32, 16), dtype=torch.uint8)
        tensors[f"{path}.{name}_proj_scales"] = torch.randint(118, 124, (4, rows, k // 32), dtype=torch.uint8)
    write(tmp_path / "shipped", model, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, tensors)
    found = load(tmp_path / "shipped", dtype=BF16).model
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])

    def wide(name: str) -> torch.Tensor:
        blocks, scales = (tensors[f"{path}.{name}_proj_{kind}"] for kind in ("blocks", "scales"))
        codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(3).long()
        return (values[codes] * 2.0 ** (scales.float() - 127)[..., None]).flatten(2).bfloat16()

    mixture = found.model.layers[0].mlp.experts
    assert torch.equal(mixture.gate_up.dequantize(), torch.stack((wide("gate_up")[:, ::2], wide("gate_up")[:, 1::2]), 1))
    assert torch.equal(mixture.down.dequantize()[:, 0], wide("down"))
    again = experts_with(mixture, found.config)
    assert torch.equal(again.gate_up_proj_bias, experts.gate_up_proj_bias)
    assert torch.equal(again.gate_up_proj, wide("gate_up").transpose(1, 2))
    coded = [f"{path}.{name}_proj_{kind}" for name in ("gate_up", "down") for kind in ("blocks", "scales")]
    wrong: list[tuple[dict, str]] = [
        ({coded[3]: None}, "down_proj_scales"),
        ({f"{path}.down_proj_bias": None}, rf"missing \['{path}.down_proj_bias'\]"),
        ({f"{path}.down_proj_bias": torch.zeros(4, 3)}, rf"misshapen \['{path}.down_proj_bias \[4, 3\] for \[4, 64\]'\]"),
        ({name: tensors[name][:3] for name in coded}, r"experts must be 4, each with gate, up and down, got \[0, 1, 2\]"),
        ({name: tensors[name][:, :190] for name in coded[:2]}, r"matrix 0 of an expert in .* is \(96, 64\), got \(95, 64\)"),
    ]
    for i, (changes, message) in enumerate(wrong):
        held = {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}
        write(tmp_path / str(i), model, {"quant_method": "mxfp4"}, held)
        with pytest.raises(ModelFileError, match=message):
            load(tmp_path / str(i), dtype=BF16)


def test_a_quantised_mixture_keeps_its_router_and_latents_wide() -> None:
    model = tiny("deepseek_v2", BF16, kv_lora_rank=64, hidden_size=64)
    quantize(model, "int8")
    kinds = {path.rpartition(".")[2]: type(m) for path, m in model.named_modules()}
    assert kinds["kv_b_proj"] is kinds["lm_head"] is nn.Linear
    assert kinds["o_proj"] is kinds["kv_a_proj_with_mqa"] is QuantizedLinear


def test_the_share_of_an_expert_of_all_tokens_stays_wide() -> None:
    model = tiny("qwen3_5_moe", BF16, moe_intermediate_size=32, shared_expert_intermediate_size=32)
    quantize(model, "int8")
    kinds = {path.rpartition(".")[2]: type(m) for path, m in model.named_modules()}
    assert kinds["shared_expert_gate"] is nn.Linear
    assert kinds["gate_proj"] is kinds["in_proj_qkv"] is QuantizedLinear


# ----------------------------------------------------------------------------------------- folders
@pytest.mark.parametrize("name", FORMATS)
def test_a_folder_that_we_write_is_the_same_model_again(name: str, tmp_path: Path) -> None:
    model = small(attention_bias=True, tie_word_embeddings=name == "e4m3")
    quantize(model, name)
    written = save_quantized(model, None, name, tmp_path / "out")
    again = load(tmp_path / "out", dtype=BF16).model
    state = model.state_dict()
    assert again.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[key]) for key, tensor in again.state_dict().items())
    assert written == weight_bytes(again)
    files = sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    assert files < 1.3 * written
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert said["quant_method"] == "compressed-tensors"
    assert said["ignore"] == ["lm_head"]


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A folder as GPTQ (with act-order), AWQ and DeepSeek write it, with its weights."""
    folder = tmp_path_factory.mktemp(request.param) / "model"
    return folder, write_as(request.param, folder, small(num_hidden_layers=2))


def test_a_folder_of_another_quantiser_is_loaded_as_it_is(checkpoint) -> None:
    folder, expected = checkpoint
    model = load(folder, dtype=BF16).model
    found = {path: module.wide for path, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    assert found.keys() == expected.keys()
    assert all(torch.equal(weight, expected[path]) for path, weight in found.items())
    check_engine(model)
    assert len(load(folder, dtype=BF16, layers=1).model.model.layers) == 1


def test_a_folder_whose_config_says_other_codes_is_refused(checkpoint, tmp_path: Path) -> None:
    source, _ = checkpoint
    said = json.loads((source / "config.json").read_text())["quantization_config"]
    held = load_file(source / "model.safetensors")
    if said["quant_method"] == "fp8":
        wrong = [({"fmt": "e4m3fnuz"}, held, "an fp8 model with fmt e4m3, got 'e4m3fnuz'")]
    else:
        size = said["group_size"]
        wrong = [
            ({"group_size": other}, held, f"group_size must be {size}, as the files have it") for other in (32, -1, 0, True, str(size), size / 1.0)
        ]
    if said.get("desc_act"):
        wrong.append(({}, {name: x for name, x in held.items() if "down_proj.g_idx" not in name}, "g_idx must be there, because desc_act is True"))
    for i, (changes, tensors, message) in enumerate(wrong):
        folder = tmp_path / str(i)
        folder.mkdir()
        config = json.loads((source / "config.json").read_text()) | {"quantization_config": said | changes}
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelFileError, match=message):
            load(folder, dtype=BF16)


def test_a_folder_that_is_not_whole_names_what_is_wrong(tmp_path: Path) -> None:
    model = small()
    quantize(model, "int4-128")
    save_quantized(model, None, "int4-128", tmp_path / "right")
    tensors = load_file(tmp_path / "right" / "model.safetensors")
    said = json.loads((tmp_path / "right" / "config.json").read_text())["quantization_config"]
    key = "model.layers.0.mlp.down_proj"
    lacking = {name: tensor for name, tensor in tensors.items() if name != f"{key}.weight_scale"}
    wrong: list[tuple[dict, dict, str]] = [
        (said, lacking, rf"a model whose {key} has 'weight_scale', got"),
        (said, {n: t for n, t in tensors.items() if not n.startswith(key)}, rf"missing \['{key}.weight'\]"),
        (said, tensors | {f"{key}.oddity": torch.zeros(1)}, rf"tensors of their method, got \['{key}.oddity'\]"),
        (said, tensors | {"model.norm.weight": torch.ones(3)}, r"misshapen \['model.norm.weight \[3\] for \[128\]'\]"),
        (said, tensors | {"visual.weight_packed": torch.zeros(1, dtype=torch.int32)}, r"only Linear modules and experts are coded, got \['visual'\]"),
        (said, tensors | {f"{key}.weight_packed": tensors[f"{key}.weight_packed"][:64]}, rf"in {key}, got weight_shape must be \[64, 256\]"),
        ({"quant_method": "bitsandbytes"}, tensors, rf"one of {', '.join(METHODS)} as quant_method, got 'bitsandbytes'"),
        ({"quant_method": "gptq", "bits": 3}, tensors, "a gptq model of 4 bits, got one of 3"),
        ({"quant_method": "awq", "version": "exllama"}, tensors, "an AWQ model of version gemm, got 'exllama'"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, tensors, r"weight_block_size \[128, 128\], or one scale a row, got \[64, 64\]"),
    ]
    for i, (config, held, message) in enumerate(wrong):
        write(tmp_path / str(i), model, config, held)
        with pytest.raises(ModelFileError, match=message):
            load(tmp_path / str(i), dtype=BF16)
    with pytest.raises(ValueError, match=r"quantised weights must be bfloat16 \(--dtype bfloat16\), got float32"):
        load(tmp_path / "right")


def test_what_cannot_be_quantised_is_said_in_a_line() -> None:
    model = tiny("llama", BF16)
    before = state_of(model)
    for how in ({"weights": "int3"}, {"weights": "int4-64"}, {"weights": 4}):
        with pytest.raises(ValueError, match=r"one of int4-128|groups divide every matrix \(int8, int8-16, e4m3, nvfp4\), got 'int4-64'"):
            Engine(model, **how)
        with pytest.raises(ValueError, match=r"one of int4-128|groups divide every matrix"):
            patch(model, **how)
    for how in ("int8,head=", "int8,head=int3", "int3,head=int8", "int8,head=int4-128"):
        with pytest.raises(ValueError, match=r"one of int4-128|lm_head has rows of 64|groups divide every matrix"):
            Engine(model, weights=how)
    for how in ("int8", "e4m3,head=e4m3"):
        with pytest.raises(ValueError, match='weights must be None or "e4m3" with mode="mega"'):
            Engine(model, mode="mega", weights=how)
    with pytest.raises(ValueError, match=r"weights must be 'int8' for a LlamaModel, which has no nn.Linear named lm_head, got 'int8,head=int8'"):
        patch(model.model, weights="int8,head=int8")
    with pytest.raises(ValueError, match="quantised weights must be bfloat16"):
        patch(tiny("llama"), weights="int8")
    assert state_of(model) == before
    quantize(model, "int8")
    with pytest.raises(ValueError, match=r"with nn.Linear modules to quantise, got a LlamaForCausalLM without one, or one that is quantised already"):
        patch(model, weights="int8")


# -------------------------------------------------------------------------------- the command line
def test_quantize_writes_what_generate_runs(tmp_path: Path) -> None:
    def run(*arguments: object):
        return CliRunner().invoke(app, [str(a) for a in arguments])

    small(vocab_size=128).save_pretrained(tmp_path / "wide")
    made = run("quantize", tmp_path / "wide", "--format", "int4-128", "-o", tmp_path / "small", "--device", "cpu")
    assert made.exit_code == 0, made.output
    assert "rounded to nearest, nothing calibrated" in made.output
    how = ("--prompt", "ab", "--max-new-tokens", 3, "--device", "cpu", "--engine", "eager")
    folder = run("generate", "--model", tmp_path / "small", *how, "--dtype", "bfloat16")
    at_once = run("generate", "--model", tmp_path / "wide", *how, "--weights", "int4-128")
    for found in (folder, at_once):
        assert found.exit_code == 0, found.output
        assert "int4-128, bfloat16, " in found.output
    assert folder.output.splitlines()[1:3] == at_once.output.splitlines()[1:3]  # the prompt and the tokens
    with_head = run("generate", "--model", tmp_path / "wide", *how, "--weights", "int4-128,head=e4m3")
    assert "int4-128, e4m3, bfloat16, " in with_head.output, with_head.output
    wrong = run("generate", "--model", tmp_path / "wide", *how, "--weights", "int4-128,head=e4m")
    assert (wrong.exit_code, "did you mean that" in wrong.stderr) == (2, True)
    headed = run("quantize", tmp_path / "wide", "--format", "int4-128,head=e4m3", "-o", tmp_path / "headed")
    assert (headed.exit_code, "--format must be a format alone: a folder's head keeps its 16 bits" in headed.stderr) == (2, True)
    again = run("quantize", tmp_path / "wide", "--format", "int4-128", "-o", tmp_path / "small")
    assert again.exit_code == 2
    assert "the output folder must be new or empty" in again.stderr
    compared = run("generate", "--model", tmp_path / "small", *how, "--dtype", "bfloat16", "--compare")
    assert "--compare must be left out with quantised weights" in compared.stderr


def test_logits_move_no_more_than_with_a_reference_quantiser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same format: gguf's, torch's."""
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    import quality

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}  # enough weights that no luck decides
    rows = list(quality.compare(small(**sizes), torch.randint(64, (8, 64))))
    assert {row["format"] for row in rows} == (FORMATS.keys() | {f"gguf {kind}" for kind in KEPT} | {*quality.HEADS}) - {"nvfp4"}
    assert all(row["ratio"] < quality.ALLOWED for row in rows), rows
