"""What an adversary found in files of models: texts that end nowhere, options that transformers
takes up, headers that only others refuse.
"""

import json
from pathlib import Path

import hostile
import hostile_gguf
import pytest
import torch
from shell import run
from tiny_models import tiny

from tilewright.engine.measure import run_transformers
from tilewright.models import ModelFileError, load
from tilewright.models.generate import encode, generate
from tilewright.models.quantized import quantize, small
from tilewright.models.quantized_folder import save_quantized
from tilewright.testing import tiny_chat


@pytest.mark.parametrize("name", ["eos_token_id", "bos_token_id", "pad_token_id"])
@pytest.mark.parametrize("value", ["2", 2.0, True, {"a": 1}, [None], [[2]], [], -2, 1 << 31, 1 << 80])
def test_a_token_that_is_no_number_of_one_is_refused(name: str, value: object, tmp_path: Path) -> None:
    """Of the three, only the first was looked at, and only for its type."""
    folder = hostile.write_folder(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({name: value}))
    with pytest.raises(ModelFileError, match=rf"{folder}/generation_config.json must be a model with the number of a token.* as {name}, got"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1), ("temperature", 1e300), ("top_k", -1), ("top_k", 0.5), ("top_p", 7), ("min_p", -1), ("repetition_penalty", 0)],
)
def test_a_number_that_a_server_would_draw_by_is_refused(name: str, value: float, tmp_path: Path) -> None:
    """Those of a request were checked; what holds without them was not."""
    folder = hostile.write_folder(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({name: value}))
    with pytest.raises(ModelFileError, match=name):
        load(folder)


@pytest.mark.parametrize("key", ["output_hidden_states", "use_cache"])
def test_a_switch_of_a_config_is_true_or_false(key: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=f"a config with true or false as {key}, got 'x'"):
        load(hostile.write_folder(tmp_path, **{key: "x"}))


@pytest.mark.parametrize("said", [{"rms_norm_eps": -1.0}, {"vision_config": {"norm_eps": -1e-9}}])
def test_an_eps_below_zero_is_refused(said: dict, tmp_path: Path) -> None:
    """The root of a negative number is NaN, and every token was 0."""
    with pytest.raises(ModelFileError, match=r"config\.json must be a model whose \w*eps is not negative, got -1"):
        load(hostile.write_folder(tmp_path, **said))


def test_a_config_of_tuples_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match="return_dict false"):
        load(hostile.write_folder(tmp_path, return_dict=False))


def test_a_rotation_that_cannot_be_computed_is_an_error_of_its_file(tmp_path: Path) -> None:
    model = tiny("llama", torch.bfloat16, num_hidden_layers=1)
    quantize(model, "int8")
    save_quantized(model, None, "int8", tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    said["rope_parameters"] |= {"low_freq_factor": True, "high_freq_factor": True, "factor": True}
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(ModelFileError, match=r"config\.json must be a config that transformers takes"):
        load(tmp_path, dtype=torch.bfloat16)


@pytest.mark.parametrize("said", [{"rope_theta": 0.0}, {"rope_type": "linear", "factor": 0.0, "rope_theta": 1e4}])
def test_a_rotation_by_no_number_is_refused(said: dict, tmp_path: Path) -> None:
    """Every logit was NaN, and every token 0."""
    with pytest.raises(ModelFileError, match=r"a rotation of finite angles, got a NaN or an infinity in \['model\.rotary_emb\.inv_freq'"):
        load(hostile.write_folder(tmp_path, rope_parameters=said))


OPTIONS = {
    "num_beams": 3,
    "max_time": 1e-9,
    "no_repeat_ngram_size": 1,
    "suppress_tokens": list(range(3, 64)),
    "forced_eos_token_id": 5,
    "assistant_early_exit": (1 << 63) - 1,
    "stop_strings": ["e"],
    "output_hidden_states": "x",
}


@pytest.mark.parametrize("option", OPTIONS)
def test_only_the_tokens_of_a_generation_config_are_taken(option: str, tmp_path: Path) -> None:
    """An engine reads no more of it either. One option hung, others raised far inside of
    transformers.
    """
    tiny_chat.write(tmp_path)
    plain = load(tmp_path)
    said = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps(said | {option: OPTIONS[option]}))
    loaded = load(tmp_path)
    found, expected = (generate(each, encode(each, "Hello"), max_new_tokens=6) for each in (loaded, plain))
    assert found.tokens == expected.tokens
    assert getattr(loaded.model.generation_config, option) == OPTIONS[option]  # as it was
    timed, stock = (run_transformers(each.model, "x", encode(each, "Hello"), 2).tokens for each in (loaded, plain))
    assert timed == stock


@pytest.mark.parametrize("engine", ["eager", "transformers"])
def test_texts_of_a_batch_end_at_the_same_text(engine: str, tmp_path: Path) -> None:
    """transformers' answers had a token more than the engine's, which counted as another text; and
    tokens of any number behind that, if the model has none that ends a text.
    """
    tiny_chat.write(tmp_path / "m")
    for file in ("config.json", "generation_config.json"):  # a token that no model says, and no embedding has
        said = json.loads((tmp_path / "m" / file).read_text())
        (tmp_path / "m" / file).write_text(json.dumps(said | {"eos_token_id": 4000}))
    (tmp_path / "prompts").write_text("Hello\nSome words\n")
    base = ("generate", "--model", tmp_path / "m", "--prompt-file", tmp_path / "prompts", "--batch", 2, "--max-new-tokens", 6, "--device", "cpu")

    def answers(*more: object) -> list[dict]:
        result = run(*base, "--engine", engine, "--json", "-", *more)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)["answers"]

    whole = answers()
    text = whole[0]["text"]
    ended = answers("--stop", text[2:4], "--compare")
    assert ended[0]["text"] == text[:4]
    assert [one["tokens"] for one in ended] == [one["stock"] for one in ended] == [whole[0]["tokens"][:4], whole[1]["tokens"]]


@pytest.mark.parametrize("engine", ["eager", "transformers"])
def test_a_text_that_begins_in_the_prompt_ends_no_answer(engine: str, tmp_path: Path) -> None:
    """transformers' answer ended at it, and the engine's went on."""
    tiny_chat.write(tmp_path / "m")
    base = ("generate", "--model", tmp_path / "m", "--prompt", "Hello", "--max-new-tokens", 4, "--device", "cpu", "--engine", engine, "--json", "-")

    def text(*more: object) -> str:
        result = run(*base, *more)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)["ours"]["text"]

    whole = text()
    assert len(whole) == 4
    assert text("--stop", f"o{whole[0]}") == whole
    assert text("--stop", whole[1:3]) == whole[:3]


@pytest.mark.parametrize("about", [5, [], {"format": 1}, {"a": {"b": "c"}}])
def test_texts_about_a_safetensors_file_are_texts(about: object, tmp_path: Path) -> None:
    """Else its own reader raises an error of its own, which a folder of small weights did not
    expect.
    """
    tensors = hostile.weights()
    folder = hostile.write_folder(tmp_path)
    content = hostile.safetensors_content(tensors, hostile.safetensors_header(tensors) | {"__metadata__": about})
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelFileError, match="must be a safetensors file with texts as __metadata__, got"):
        load(folder)


def test_a_name_in_a_file_breaks_no_line_of_an_error(tmp_path: Path) -> None:
    file = hostile_gguf.Gguf()
    file.put("evil\n\x1b[2J", 13, b"")
    (tmp_path / "x.gguf").write_bytes(file.content())
    with pytest.raises(ModelFileError, match=r"a known type of evil\\n\\x1b\[2J, got 13"):
        load(tmp_path / "x.gguf")


@pytest.mark.parametrize("how", ["stored", "coded", "alike"])
def test_a_head_of_small_weights_is_what_the_file_holds(how: str, tmp_path: Path) -> None:
    """Where the config tied it, it was the embedding."""
    model = tiny("llama", torch.bfloat16, num_hidden_layers=1)
    if how == "alike":
        model.lm_head.weight.data = model.model.embed_tokens.weight.data.clone()
    quantize(model, "int8")
    if how == "coded":
        model.lm_head = small(model.lm_head, "int8", torch.device("cpu"))
    save_quantized(model, None, "int8", tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(said | {"tie_word_embeddings": True}))
    found = load(tmp_path, dtype=torch.bfloat16).model
    head = found.lm_head
    assert found.config.tie_word_embeddings == (how == "alike") == (getattr(head, "weight", None) is found.model.embed_tokens.weight)
    if how == "coded":
        assert torch.equal(head.wide, model.lm_head.wide)
    else:
        assert torch.equal(head.weight, model.lm_head.weight)


@pytest.mark.parametrize("name", ["", "weight", "auto_map"])
def test_a_tensor_of_no_module_is_named(name: str, tmp_path: Path) -> None:
    """It was looked for as `.weight`, and not found: KeyError."""
    model = tiny("llama", torch.bfloat16, num_hidden_layers=1)
    quantize(model, "int8")
    save_quantized(model, None, "int8", tmp_path / "m")
    file = tmp_path / "m" / "model.safetensors"
    content = file.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    text = json.dumps(header | {name: {"dtype": "F32", "shape": [1], "data_offsets": [len(content) - end, len(content) - end + 4]}}).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[end:] + b"\0" * 4)
    with pytest.raises(ModelFileError, match=rf"a model whose tensors are named as module.tensor, got \['{name}'\]"):
        load(tmp_path / "m", dtype=torch.bfloat16)
