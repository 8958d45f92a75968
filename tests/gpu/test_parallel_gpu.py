"""Engines of several GPUs: tokens of one GPU with either kind of sum; a rank that fails ends the
others.
"""

import os
import signal
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from test_engine_gpu import LENGTHS, MODELS, SIZES

from tilewright.engine import Engine, Group, Sampling
from tilewright.engine.ranks import run_ranks
from tilewright.models import random_model

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
DENSE, SPARSE = ("llama", "qwen2"), ("qwen3_moe", "deepseek_v2")
GIVEN = [[7, 50, 3, 91]] * len(LENGTHS)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, SIZES["vocab_size"], (n,), generator=generator).tolist() for n in LENGTHS]


def found(group: Group | None, device: torch.device) -> list[dict[str, Any]]:
    """For each model and mode: greedy tokens, drawn tokens, logits after given tokens."""
    results = []
    for name in (*DENSE, *SPARSE):
        dtype = torch.float32 if name in DENSE else torch.bfloat16
        model = random_model({**SIZES, **MODELS[name]}, device=device, dtype=dtype, shard=None if group is None else group.shard)
        for mode in ("eager", "graph"):
            with Engine(model, max_batch=8, max_len=128, mode=mode, prefill_tokens=128, group=group) as engine:
                greedy = engine.generate(prompts(), 40).tokens
                assert engine.generate(prompts(), 40).tokens == greedy
                drawn = engine.generate(prompts(), 20, sampling=Sampling(temperature=0.8, top_k=50, seed=3)).tokens
                logits = engine.logits(prompts(), GIVEN).cpu()
            results.append({"name": name, "mode": mode, "greedy": greedy, "drawn": drawn, "logits": logits})
    return results


def distances(device: torch.device) -> dict[str, tuple[torch.Tensor, float]]:
    """For each model: logits in fp32 (dense models: fp64), and the RMS distance of transformers in
    its dtype.
    """
    results = {}
    for name in (*DENSE, *SPARSE):
        model = random_model({**SIZES, **MODELS[name]}, device=device, dtype=torch.float32 if name in DENSE else torch.bfloat16)
        stock = logits_of(model)
        if name in SPARSE:
            model.set_experts_implementation("eager")
        truth = logits_of(model.double() if name in DENSE else model.float())
        results[name] = truth, rms(stock.double() - truth)
    return results


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        each = [model(torch.tensor([p + c], device=model.device)).logits[0, len(p) - 1 :] for p, c in zip(prompts(), GIVEN, strict=True)]
    return torch.stack(each).cpu()


def rms(x: torch.Tensor) -> float:
    return float(x.double().square().mean().sqrt())


@cache
def alone() -> tuple[list[dict[str, Any]], dict[str, tuple[torch.Tensor, float]]]:
    """What one GPU finds, and the distances."""
    gpu = torch.device("cuda", torch.cuda.current_device())
    with torch.inference_mode(False):
        return found(None, gpu), distances(gpu)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("direct", [False, True], ids=["nccl", "direct"])
def test_several_gpus_choose_the_tokens_of_one(direct: bool, ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    one, expected = alone()
    several = run_ranks(found, ranks=ranks, direct=direct)
    for a, b in zip(several[0::2], several[1::2], strict=True):  # eager and graph
        assert (a["greedy"], a["drawn"]) == (b["greedy"], b["drawn"])
        assert torch.equal(a["logits"], b["logits"])
    for mine, whole in zip(several, one, strict=True):
        if mine["name"] in DENSE:  # in fp32, where near-ties are rare
            assert mine["greedy"] == whole["greedy"]
        truth, theirs = expected[mine["name"]]
        assert rms(mine["logits"].double() - truth) <= 2 * theirs


def failing(group: Group, device: torch.device) -> None:
    if group.shard.rank == 1:
        raise ValueError("rank 1 cannot")
    torch.distributed.all_reduce(torch.ones(1, device=device), group=group.process_group)
    torch.cuda.synchronize()


def waiting(group: Group, device: torch.device) -> None:
    if group.shard.rank == 0:
        torch.distributed.all_reduce(torch.ones(1, device=device), group=group.process_group)
    threading.Event().wait()


def test_a_rank_that_fails_takes_the_others_with_it() -> None:
    with pytest.raises(ValueError, match="rank 1 cannot"):
        run_ranks(failing, ranks=2)


def test_an_interrupt_ends_all_ranks() -> None:
    timer = threading.Timer(20.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        run_ranks(waiting, ranks=2)


def decoding(group: Group, device: torch.device, folder: str) -> None:
    model = random_model({**SIZES, **MODELS["llama"]}, device=device, dtype=torch.bfloat16, shard=group.shard)
    with Engine(model, max_batch=8, max_len=128, mode="graph", prefill_tokens=128, group=group) as engine:
        while True:
            engine.generate(prompts(), 40)
            Path(folder, f"{group.shard.rank}-{os.getpid()}").touch()


@pytest.mark.alone
@pytest.mark.parametrize("which", [0, 1])
def test_a_rank_that_is_killed_ends_the_others_at_once(which: int, tmp_path: Path) -> None:
    """By kill -9, while both replay their graphs."""
    at = []

    def kill() -> None:
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.05)
        at.append(time.monotonic())
        os.kill(int(sorted(tmp_path.iterdir())[which].name.partition("-")[2]), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    with pytest.raises(RuntimeError, match=f"rank {which} was ended by SIGKILL, and so all ranks were"):
        run_ranks(decoding, str(tmp_path), ranks=2)
    assert time.monotonic() - at[0] < 10
