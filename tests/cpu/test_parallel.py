"""Engines of two processes (gloo): what one process finds, and after a failure or an interrupt no process is left."""

import multiprocessing
from typing import Any

import pytest
import torch
from test_engine import FAMILIES
from tiny_models import TINY

from tilewright.engine import Engine, Group, Sampling
from tilewright.engine.ranks import run_ranks
from tilewright.models import random_model
from tilewright.testing import assert_accurate

# Imported once, in a server that each rank is then forked from.
multiprocessing.set_forkserver_preload(["torch", "transformers", "tilewright.engine", "tilewright.models"])
PROMPTS = [[5, 50, 7], [9] * 11]
GIVEN = [[7, 91, 3]] * 2
CASES = {"llama-tied-bias": torch.float32, "deepseek_v3": torch.bfloat16}  # grouped heads and columns; latent attention and experts


def on_two(function: Any, *args: Any) -> Any:
    return run_ranks(function, *args, ranks=2, device="cpu", start="forkserver")


def config(name: str) -> dict[str, Any]:
    return {**TINY, **FAMILIES[name]}


def found(group: Group | None, name: str) -> tuple[list[list[int]], list[list[int]], torch.Tensor, int]:
    """Greedy tokens, tokens drawn, logits behind given tokens, and the bytes a step reads."""
    model = random_model(config(name), dtype=CASES[name], shard=None if group is None else group.shard)
    with Engine(model, max_batch=2, max_len=64, group=group) as engine:
        greedy = engine.generate(PROMPTS, 4).tokens
        drawn = engine.generate(PROMPTS, 3, sampling=Sampling(temperature=2.0, seed=1)).tokens if name in FAMILIES and "llama" in name else []
        return greedy, drawn, engine.logits(PROMPTS, GIVEN), engine.step_bytes(2, 16)


def found_by_all(group: Group, device: torch.device) -> list[dict[str, Any]]:
    gathered: list[Any] = [None] * group.shard.ranks
    torch.distributed.all_gather_object(gathered, {name: found(group, name) for name in CASES})
    return gathered


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return on_two(found_by_all)


def test_two_ranks_choose_the_tokens_of_one(ranks: list[dict[str, Any]]) -> None:
    one = found(None, "llama-tied-bias")
    for rank in ranks:
        greedy, drawn, logits, step_bytes = rank["llama-tied-bias"]
        assert greedy == one[0]
        assert drawn == one[1]
        torch.testing.assert_close(logits, one[2])
        assert 0.5 <= step_bytes / one[3] < 0.51  # a bias is whole, on rank 0


def test_experts_and_latent_heads_obey_the_accuracy_rule(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["deepseek_v3"][0] == ranks[1]["deepseek_v3"][0]
    model = random_model(config("deepseek_v3"), dtype=torch.bfloat16)
    stock = logits_of(model)
    model.set_experts_implementation("eager")
    truth = logits_of(model.to(torch.float64))
    for rank in ranks:
        assert_accurate(rank["deepseek_v3"][2], stock, truth)


def logits_of(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        each = [model(torch.tensor([p + c])).logits[0, len(p) - 1 :] for p, c in zip(PROMPTS, GIVEN, strict=True)]
    return torch.stack(each)
