"""`tilewright generate`: texts, batches and measurements, beside transformers."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shell import folder as folder, run

import tilewright
from tilewright.models.batch import by_transformers
from tilewright.models.generate import GREEDY
from tilewright.models.load import Loaded


def test_generate_compares_with_transformers(folder: Path) -> None:
    result = run("generate", "--model", folder, "--prompt", "Hi", "--max-new-tokens", 5, "--device", "cpu", "--compare")
    assert result.exit_code == 0, result.output
    assert "> Hi" in result.output
    assert "5 tokens in" in result.output
    assert "kernel launches: attention_decode_kernel 4, attention_kernel 1, matmul_kernel 40" in result.output
    assert "tokens equal to stock transformers: yes" in result.output


def test_generate_prints_one_json_object_and_reads_a_prompt_file(folder: Path, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Hi there")
    result = run("generate", "--model", folder, "--prompt-file", prompt, "--max-new-tokens", 3, "--device", "cpu", "--json", "-")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["dtype"] == "float32"
    assert found["ours"]["prompt_tokens"] == 8
    assert len(found["ours"]["tokens"]) == 3
    assert found["equal"] is None
    assert {row["op"] for row in found["patched"]["replaced"]} == {"matmul", "rms_norm", "silu_mul", "rope", "attention"}


def test_generate_by_the_engine_writes_the_same_text(folder: Path) -> None:
    result = run("generate", "--model", folder, "--prompt", "Hi", "--max-new-tokens", 5, "--device", "cpu", "--engine", "eager", "--compare")
    assert result.exit_code == 0, result.output
    assert "tokens equal to stock transformers: yes" in result.output
    assert "rms_norm_matmul_kernel 13" in result.output  # qkv, gate and up, head of four tokens, and the head of the first


def test_ranks_that_cannot_divide_a_model_are_refused_before_one_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.engine.ranks.run_ranks", lambda *unused, **also: pytest.fail("a rank was started"))
    result = run("generate", "--model", "Llama-3.2-1B", "--prompt", "Hi", "--device", "cpu", "--engine", "eager", "--tp", 3)
    assert result.exit_code == 2
    assert "the number of ranks must be a divisor of 32: config.num_attention_heads, got 3" in result.output


@pytest.mark.parametrize("engine", ["eager", "transformers"])
def test_generate_measures_beside_transformers(folder: Path, engine: str) -> None:
    sizes = ("--batch", 2, "--prompt-tokens", 5, "--max-new-tokens", 3, "--device", "cpu", "--engine", engine, "--compare")
    result = run("generate", "--model", folder, *sizes)
    assert result.exit_code == 0, result.output
    ours = {"eager": "tilewright eager", "transformers": "tilewright patched"}[engine]
    lines = [line.split() for line in result.output.splitlines()]
    (stock,) = (line for line in lines if line[:2] == ["transformers", "eager"] and len(line) > 5)
    (mine,) = (line for line in lines if line[:2] == ours.split() and len(line) > 5)
    assert float(stock[2]) > 0
    assert mine[-2:] == ["100", "%"]
    assert f"{ours}: kernels of one call" in result.output
    assert any(line[:1] == ["matmul_kernel"] for line in lines)


def test_generate_measurements_as_json_lines(folder: Path) -> None:
    sizes = ("--batch", 2, "--prompt-tokens", 5, "--max-new-tokens", 3, "--device", "cpu", "--engine", "eager", "--compare", "--json", "-")
    result = run("generate", "--model", folder, *sizes)
    (row,) = map(json.loads, result.stdout.splitlines())
    assert row["op"] == "generate"
    assert row["case"] == f"{folder.name} batch=2 prompt=5 new=3 mode=eager"
    assert row["peers"].keys() == {"transformers"}
    assert row["equal_tokens"] == {"transformers": 1.0}
    assert abs(row["kl"]["tilewright eager"]["worst"]) < 1e-9
    assert row["tokens_per_s"] > 0
    assert row["floor_pct"] is None
    assert {kernel["name"] for kernel in row["kernels"]} >= {"matmul_kernel", "attention_kernel", "argmax_kernel"}


def test_measurements_name_the_weights_and_the_cache(folder: Path) -> None:
    how = ("--weights", "int8", "--kv-dtype", "fp8", "--engine", "eager", "--device", "cpu", "--dtype", "bfloat16", "--json", "-")
    result = run("generate", "--model", folder, "--prompt-tokens", 3, "--max-new-tokens", 2, *how)
    assert result.exit_code == 0, result.output
    (row,) = map(json.loads, result.stdout.splitlines())
    assert row["case"] == f"{folder.name} weights=int8 kv=fp8 batch=1 prompt=3 new=2 mode=eager"


def broken_behind_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An activation that goes wrong after `patch` has compared it with PyTorch's."""
    from tilewright.models import forwards

    def broken(model: Any) -> Any:
        report = tilewright.patch(model)
        monkeypatch.setattr(forwards, "silu_mul", lambda gate, up, gelu_tanh: gate)
        return report

    for module in ("batch", "generate"):
        monkeypatch.setattr(sys.modules[f"tilewright.models.{module}"], "patch", broken)


def test_generate_exits_with_1_where_tokens_differ(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken_behind_patch(monkeypatch)
    result = run("generate", "--model", folder, "--prompt", "Hi there", "--max-new-tokens", 8, "--device", "cpu", "--compare")
    assert result.exit_code == 1
    assert "tokens equal to stock transformers: NO, token" in result.output


def test_a_temperature_draws_tokens_that_a_seed_repeats(folder: Path) -> None:
    def tokens(*more: object) -> list[int]:
        arguments = ("generate", "--model", folder, "--prompt", "Hi", "--max-new-tokens", 3, "--device", "cpu", "--json", "-", *more)
        return json.loads(run(*arguments).stdout)["ours"]["tokens"]

    greedy = tokens()
    for engine in ("transformers", "auto"):  # on a CPU the eager engine
        hot = tokens("--temperature", 5, "--seed", 1, "--engine", engine)
        assert hot == tokens("--temperature", 5, "--seed", 1, "--engine", engine)
        assert hot != tokens("--temperature", 5, "--seed", 2, "--engine", engine)
        assert tokens("--temperature", 5, "--top-k", 1, "--engine", engine) == tokens("--engine", engine)
        assert hot != greedy
    result = run("generate", "--model", folder, "--prompt", "Hi", "--temperature", 1, "--compare")
    assert result.exit_code == 2
    assert "--temperature must be 0 with --compare" in result.stderr


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("Hi\n\nHi there, you\nAnd now?\n")
    return file


@pytest.mark.parametrize("engine", ["transformers", "eager"])
def test_a_batch_of_texts_gets_the_tokens_that_each_gets_alone(folder: Path, prompts: Path, engine: str) -> None:
    options = ("--max-new-tokens", 4, "--device", "cpu", "--engine", engine)
    drafts: tuple[object, ...] = () if engine == "transformers" else ("--speculate", 2)
    drafter = ("--draft", folder) if drafts else ()
    result = run("generate", "--model", folder, "--prompt-file", prompts, "--batch", 2, *options, *drafts, *drafter, "--compare", "--json", "-")
    assert result.exit_code == 0, result.output
    assert "> And now?" in result.stderr
    assert "texts with the tokens of stock transformers: 3 of 3" in result.stderr
    answers = json.loads(result.stdout)["answers"]
    assert [(answer["prompt"], answer["prompt_tokens"]) for answer in answers] == [("Hi", 2), ("Hi there, you", 13), ("And now?", 8)]
    alone = json.loads(run("generate", "--model", folder, "--prompt", "Hi there, you", *options, *drafts, "--json", "-").stdout)
    assert answers[1]["tokens"] == answers[1]["stock"] == alone["ours"]["tokens"]


def test_a_batch_exits_with_1_where_tokens_differ(folder: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken_behind_patch(monkeypatch)
    result = run("generate", "--model", folder, "--prompt-file", prompts, "--batch", 3, "--max-new-tokens", 8, "--device", "cpu", "--compare")
    assert result.exit_code == 1
    assert re.search("transformers: [0-2] of 3", result.output)


def test_a_batch_ends_each_text_where_it_stops_and_a_seed_repeats_it(folder: Path, prompts: Path) -> None:
    def tokens(*more: object) -> list[list[int]]:
        options = ("--batch", 3, "--max-new-tokens", 6, "--device", "cpu", "--json", "-", "--temperature", 9, *more)
        return [answer["tokens"] for answer in json.loads(run("generate", "--model", folder, "--prompt-file", prompts, *options).stdout)["answers"]]

    first = tokens("--seed", 1)
    assert first == tokens("--seed", 1) != tokens("--seed", 2)
    assert first[0] != first[1]
    (found,) = by_transformers(Loaded(_stops_at(7), None, "here"), [torch.tensor([[1, 2]])], max_new_tokens=9, draw=GREEDY)
    assert found == [3, 7]


def _stops_at(token: int) -> Any:
    """Stands in for a model that goes on after its stop token, as one row of a batch does."""
    new = torch.tensor([[1, 2, 3, token, 5, token]])
    said = SimpleNamespace(eos_token_id=token, bos_token_id=None, pad_token_id=None)
    config = SimpleNamespace(get_text_config=SimpleNamespace)
    return SimpleNamespace(config=config, generation_config=said, generate=lambda ids, **how: new)
