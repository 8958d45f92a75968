"""Broken, incomplete and hostile model files: one error at once that names the file, and no code of
theirs is run.
"""

import json
import os
import re
import resource
import signal
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import hostile
import hostile_gguf
import pytest
import torch
from forked import program
from safetensors.torch import load_file, save_file
from tiny_models import PLAIN, tiny_model
from typer.testing import CliRunner

from tilewright.cli import app, main
from tilewright.models import ModelFileError, chat_template, load, outline_of
from tilewright.models.gguf_header import read_header

SECONDS = 1.0  # of this thread's time for one file
MEMORY = 96 << 20  # bytes that all cases of a test may add, of which what transformers imports is most


@pytest.fixture(scope="module", autouse=True)
def warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Imports, and the sound files that the hostile ones are made from, load."""
    folder = tmp_path_factory.mktemp("sound")
    (folder / "sound.gguf").write_bytes(hostile_gguf.Gguf().content())
    for source in (folder / "sound.gguf", hostile.write_folder(folder / "one"), hostile.write_shards(folder / "shards")):
        model = load(source).model
        assert torch.equal(model.model.norm.weight, load(folder / "one").model.model.norm.weight) or source.suffix
    text = load(folder / "sound.gguf").tokenizer("ab")
    assert len(text.input_ids) == 1


def _too_long(*_: object) -> None:
    raise TimeoutError("a file was read for 20 s")


@contextmanager
def _timed():
    """Ends a hang. No alarm outlives it: one that nobody handles would end the process."""
    old = signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(20)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)


@contextmanager
def _bounded():
    """Checks that memory does not grow with what files claim."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    yield
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before < MEMORY


def refused(path: Path, name: str, reason: str, read: Callable[[Path], object] = load) -> None:
    """One line that names file and reason, within a second."""
    began = time.thread_time()
    with _timed():
        try:
            read(path)
        except ModelFileError as error:
            message = str(error)
        else:
            pytest.fail(f"{name}: not refused")
    assert time.thread_time() - began < SECONDS, name
    assert str(path) in message, name
    assert reason in message, name
    assert message.isprintable(), name  # one line, and nothing that a terminal obeys
    assert len(message) < 1000, name


def test_hostile_gguf_files_are_refused(tmp_path: Path) -> None:
    cases = list(hostile_gguf.hostile_gguf())
    assert len(cases) > 400
    with _bounded():
        for name, reason, content in cases:
            (tmp_path / "x.gguf").write_bytes(content)
            refused(tmp_path / "x.gguf", name, reason)


def test_a_scaling_that_scales_nothing_is_taken(tmp_path: Path) -> None:
    for named, factor in (("none", 8.0), ("linear", 1.0), ("linear", 0.0)):
        file = hostile_gguf.Gguf()
        file.put("llama.rope.scaling.type", hostile_gguf.STRING, hostile_gguf.text(named))
        file.put("llama.rope.scaling.factor", hostile_gguf.F32, hostile_gguf.number(hostile_gguf.F32, factor))
        (tmp_path / "x.gguf").write_bytes(file.content())
        outline_of(tmp_path / "x.gguf")


def test_hostile_safetensors_files_are_refused(tmp_path: Path) -> None:
    cases = list(hostile.hostile_safetensors())
    assert len(cases) > 80
    with _bounded():
        for name, reason, content in cases:
            (hostile.write_folder(tmp_path / "model") / "model.safetensors").write_bytes(content)
            refused(tmp_path / "model", name, reason)


def test_hostile_configs_are_refused(tmp_path: Path) -> None:
    with _bounded():
        for name, reason, content in hostile.hostile_configs():
            refused(hostile.write_folder(tmp_path / "model", content), name, reason)


def test_hostile_folders_are_refused(tmp_path: Path) -> None:
    with _bounded():
        for i, (name, reason, make) in enumerate(hostile.hostile_folders()):
            make(tmp_path / f"{i}")
            refused(tmp_path / f"{i}", name, reason)


def test_a_long_name_in_a_file_makes_no_long_error(tmp_path: Path) -> None:
    file, path = hostile_gguf.Gguf(), tmp_path / "long.gguf"
    file.tensors[0] |= {"name": "\0" * 60_000, "kind": 999}
    path.write_bytes(file.content())
    with pytest.raises(ModelFileError, match="of type 999") as caught:
        read_header(path)
    assert len(str(caught.value)) < 1200


def test_a_gguf_path_that_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.gguf")
    (tmp_path / "device.gguf").symlink_to("/dev/zero")
    (tmp_path / "empty.gguf").write_bytes(b"")
    with _bounded():
        for name, reason in (("fifo", "a FIFO"), ("device", "a device"), ("empty", "empty")):
            refused(tmp_path / f"{name}.gguf", name, reason)


BROKEN = ("{% evil", "{{ raise_exception('a\\nb') }}", "{{ messages.__class__.__mro__ }}", "{{ 1 / 0 }}")
LARGE = ("{{ 'a' * 10**10 }}", "{{ 'a'|center(10**10) }}", "{{ messages[0].content * 10**7 }}", "{{ (10**(10**9))|string }}")  # the last takes long


@pytest.mark.parametrize("template", [*BROKEN, *LARGE])
def test_a_broken_chat_template_is_one_line(template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.models.chat_template.SECONDS", 1)
    file = hostile_gguf.Gguf()
    file.put("tokenizer.chat_template", hostile_gguf.STRING, hostile_gguf.text(template))
    (tmp_path / "x.gguf").write_bytes(file.content())
    result = CliRunner().invoke(app, ["generate", "--model", str(tmp_path / "x.gguf"), "--prompt", "ab", "--device", "cpu"])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {tmp_path}/x.gguf must be a model whose tokenizer and chat template take a prompt")
    assert result.stderr.count("\n") == 1
    assert ("a chat template that" in result.stderr) == (template not in BROKEN)


def test_a_process_of_templates_that_stands_still_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while it is told of messages that no buffer holds."""
    monkeypatch.setattr(chat_template, "PATIENCE_S", 0.1)
    monkeypatch.setattr(chat_template, "_PROCESS", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)")
    renderer, began = chat_template._Renderer(), time.monotonic()
    for size in (1, 1 << 20):
        with _timed(), pytest.raises(ValueError, match="a chat template that ends its process with code -9"):
            renderer.text({"conversations": "a" * size})
    assert time.monotonic() - began < 10


def test_missing_unexpected_and_misshapen_weights_are_named_and_counted(tmp_path: Path) -> None:
    folder = hostile.write_folder(tmp_path / "model")
    tensors = hostile.weights()
    del tensors["model.layers.0.mlp.up_proj.weight"]
    tensors |= {f"evil.{i}": torch.ones(400 * 40) for i in range(5)}  # enough elements for all of the model
    (folder / "model.safetensors").write_bytes(hostile.safetensors_content(tensors))
    with pytest.raises(ModelFileError, match=r"missing \['model.layers.0.mlp.up_proj.weight'\], unexpected \['evil.0', 'evil.1', 'evil.2'\] of 5"):
        load(folder)
    tensors = {"model.norm.weight": tensors["model.norm.weight"]}
    (folder / "model.safetensors").write_bytes(hostile.safetensors_content(tensors))
    with pytest.raises(ModelFileError, match=r"a complete llama model, got missing \['model.embed_tokens.weight', .*\] of 19"):
        load(folder)
    result = CliRunner().invoke(app, ["generate", "--model", str(folder), "--prompt", "0", "--device", "cpu"])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {folder} must be a complete llama model, got missing ['model.embed_tokens.weight'")
    assert result.stderr.count("\n") == 1


def test_tied_weights_and_buffers_of_the_rotation_are_not_refused(tmp_path: Path) -> None:
    tied, folder = hostile.weights(), hostile.write_folder(tmp_path / "model")
    names = ("model.rotary_emb.inv_freq", *(f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(2)))
    (folder / "model.safetensors").write_bytes(hostile.safetensors_content(tied | {name: torch.ones(8) for name in names}))
    assert load(folder).model.lm_head.weight is not None
    both = tied | {"lm_head.weight": tied["model.embed_tokens.weight"]}
    (folder / "model.safetensors").write_bytes(hostile.safetensors_content(both))
    assert torch.equal(load(folder).model.lm_head.weight, tied["model.embed_tokens.weight"])
    hostile.write_folder(folder, tie_word_embeddings=False)
    head = torch.full((64, 32), 0.5)
    (folder / "model.safetensors").write_bytes(hostile.safetensors_content(tied | {"lm_head.weight": head}))
    assert torch.equal(load(folder).model.lm_head.weight, head)


MOE = {
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4},  # stored under other names
    "qwen3_moe": {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [0]},
    "gpt_oss": {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "rope_scaling": None},
}


@pytest.mark.parametrize("name", [*PLAIN, *MOE])
def test_saved_models_load_and_those_without_one_weight_do_not(name: str, tmp_path: Path) -> None:
    model = tiny_model({**PLAIN, **MOE}[name])
    model.save_pretrained(tmp_path)
    ours, path = load(tmp_path).model.state_dict(), tmp_path / "model.safetensors"
    assert all(torch.equal(tensor, ours[key]) for key, tensor in model.state_dict().items())
    stored = load_file(path)
    chosen = [key for key in stored if ".1." in key and ("v_proj" in key or ".experts.2." in key)]
    assert len(chosen) == {"llama-tied-bias": 2, "qwen2": 2, "qwen2-window": 2, "mixtral": 4, "qwen3_moe": 4, "gpt_oss": 2}.get(name, 1)
    for key in chosen:
        rest = {other: tensor for other, tensor in stored.items() if other != key}
        save_file(rest, path, metadata={"format": "pt"})
        with pytest.raises(ModelFileError, match=rf"a complete .* model, got missing \['{re.escape(key)}'\]"):
            load(tmp_path)
        save_file(rest | {key: torch.ones(3, 5)}, path, metadata={"format": "pt"})
        with pytest.raises(ModelFileError, match=rf"misshapen \['{re.escape(key)} \[3, 5\] for"):
            load(tmp_path)


def test_only_the_layers_asked_for_are_built(tmp_path: Path) -> None:
    folder, path = hostile.write_folder(tmp_path / "model"), tmp_path / "x.gguf"
    path.write_bytes(hostile_gguf.Gguf().content())
    for source in (folder, path):
        model = load(source, layers=1).model
        assert len(model.model.layers) == 1
        assert torch.equal(model.model.layers[0].mlp.up_proj.weight, load(source).model.model.layers[0].mlp.up_proj.weight)
    tensors = {name: tensor for name, tensor in hostile.weights().items() if name != "model.layers.0.mlp.up_proj.weight"}
    (folder / "model.safetensors").write_bytes(hostile.safetensors_content(tensors))
    with pytest.raises(ModelFileError, match=r"missing \['model.layers.0.mlp.up_proj.weight'\]"):
        load(folder, layers=1)


# ---------------------------------------------------------------------------- a folder's own code
CODE = """
open({written!r}, "w")
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

class Config(LlamaConfig):
    model_type = "evil"

class Model(LlamaForCausalLM):
    config_class = Config

class Tokenizer(PreTrainedTokenizerFast):
    pass
"""
CLASSES = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}


def with_code(path: Path, **config: object) -> Path:
    """A folder whose Python would write a file."""
    hostile.write_folder(path, **config)
    (path / "evil.py").write_text(CODE.format(written=str(path / "written")))
    return path


def test_code_of_a_folder_never_runs_unless_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does anything ask on stdin, where `yes |` would answer."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on stdin"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = with_code(tmp_path / "model", model_type="evil", auto_map=CLASSES)
    other = with_code(tmp_path / "other", model_type="t5", auto_map=CLASSES)  # known, but no causal model
    tokenizer = with_code(tmp_path / "tokenizer")
    (tokenizer / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Tokenizer", "auto_map": {"AutoTokenizer": ["evil.Tokenizer"] * 2}})
    )
    for path in (folder, other, tokenizer):
        refused(path, path.name, "--trust-remote-code")
        for verb in (("generate", "--prompt", "0", "--model"), ("serve",), ("difftest", "--model")):
            if (verb[0], path) != ("difftest", tokenizer):  # it may refuse the sizes first
                result = CliRunner().invoke(app, [*verb, str(path), "--device", "cpu"], input="y\n" * 100)
                assert result.exit_code == 2, result.output
                assert "--trust-remote-code" in result.stderr
                assert result.stderr.count("\n") == 1
        assert not (path / "written").exists()
    known = with_code(tmp_path / "known", auto_map=CLASSES)
    assert type(load(known).model).__module__.startswith("transformers.")
    assert not (known / "written").exists()
    load(folder, trust_remote_code=True)
    assert (folder / "written").exists()


@pytest.mark.slow
def test_yes_on_stdin_does_not_run_a_folders_code(tmp_path: Path) -> None:
    folder = with_code(tmp_path / "model", model_type="evil", auto_map=CLASSES)
    done = program(main, "tilewright", "generate", "--model", str(folder), "--prompt", "0", "--device", "cpu", given="y\n" * 1000)
    assert done.returncode == 2
    assert "--trust-remote-code" in done.stderr
    assert done.stderr.count("\n") == 1
    assert not (folder / "written").exists()


# --------------------------------------------------------------------------------------- difftest
def test_difftest_decides_from_the_config_and_builds_the_layers_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import tilewright.models.command as command

    asked: list[tuple[object, int]] = []

    def loads(model: str, *_: object, layers: int = 0, **__: object) -> None:
        asked.append((model, layers))
        raise ValueError("built")

    monkeypatch.setattr(command, "load_and_say", loads)

    def difftest(*arguments: object) -> str:
        return CliRunner().invoke(app, ["difftest", "--device", "cpu", *map(str, arguments)]).stderr

    assert "without biases" in difftest("--model", "Qwen2-7B", "--layers", 1)
    for none in (0, -1, 33):
        assert f"--layers must be 1 to 32, got {none}\n" in difftest("--model", "Llama-3.1-8B", "--layers", none)
    assert "dtype must be bfloat16 or float16" in difftest("--model", "Llama-3.1-8B", "--dtype", "float32")
    assert "model_type must be" in difftest("--model", "DeepSeek-V2-Lite", "--layers", 1)
    assert asked == []
    assert "built" in difftest("--model", "Llama-3.1-8B", "--layers", 1)
    assert asked == [("Llama-3.1-8B", 1)]
