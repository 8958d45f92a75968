"""benchmarks/soak.py, small; and that it finds what is wrong."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture(scope="module")
def script():
    path = Path(__file__).parents[2] / "benchmarks" / "soak.py"
    spec = importlib.util.spec_from_file_location("soak", path)
    made = sys.modules["soak"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    yield made
    del sys.modules["soak"]


def test_a_soak_of_a_tiny_engine(script, monkeypatch, tmp_path):
    monkeypatch.setattr(script, "PROMPTS", 1)
    sizes = ["--new-tokens", "2", "--prompt-tokens", "5", "--max-len", "32", "--size", "32", "--batch", "1"]
    assert script.main(["tiny", "--modes", "eager", "--seconds", "1", *sizes, "--json", str(tmp_path / "rows")]) == 0
    row = json.loads((tmp_path / "rows").read_text())
    assert row["tokens"] >= 2
    assert row["told"]["cancelled"] >= 1
    assert row["products_beside"] > 0
    assert row["wrong"] == []


class Pretend:
    """Answers each prompt with its first token, or with what it is told to."""

    max_len = 16

    def __init__(self):
        self.next = {}

    def generate(self, rows, new, on_tokens=None):
        if len(rows[0]) + new > self.max_len:
            raise self.next.pop("long", ValueError("long"))
        if on_tokens is not None:
            on_tokens([])
        return SimpleNamespace(tokens=self.next.pop("answer", [row[:1] * new for row in rows]))


def test_a_wrong_token_and_a_request_that_should_fail_are_found(script):
    engine = Pretend()
    running = script.Soak(engine, [[[5]], [[6]]], 3, torch.device("cpu"))
    assert [running.round(number) for number in (0, 1)] == [3, 3]
    assert (dict(running.told), running.wrong) == ({"answered": 2, "cancelled": 1}, [])
    engine.next["answer"] = [[6, 6, 7]]
    running.round(3)
    assert running.wrong == ["round 3: token 2 of sequence 0 is 7, alone 6"]
    running.round(5)
    assert running.told["too long"] == 1
    engine.next["long"] = KeyError("another error than it should be")
    with pytest.raises(KeyError):
        running.between(1, 0)
    engine.max_len = 10**6
    engine.generate = lambda rows, new, on_tokens=None: SimpleNamespace(tokens=[])
    running.between(1, 0)
    assert running.wrong[-1] == "a request that should have been too long was answered"


def test_memory_that_grows_is_that_of_one_prompt(script):
    assert script.grown([[5, 5, 5, 5], [9, 9, 9, 9]]) == (5, 5)
    assert script.grown([[9, 9, 9, 9], [5, 5, 8, 8], []]) == (5, 8)
