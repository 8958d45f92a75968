"""The tuner on a GPU: its choice against the whole space, and that a call then takes it."""

import os

import pytest
import torch
from rich.console import Console

from tilewright.bench.timer import input_sets, time_interleaved
from tilewright.launch import Device, decide, forget_plans
from tilewright.ops import matmul, rms_norm
from tilewright.testing import run_op
from tilewright.tune.command import tune
from tilewright.tune.store import Store
from tilewright.tune.workbench import Gpu


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    forget_plans()
    yield
    forget_plans()


@pytest.mark.parametrize(
    ("op", "problem"),
    [(rms_norm, rms_norm.Problem(4096, 4096, torch.bfloat16)), (matmul, matmul.Problem(512, 4096, 4096, out_dtype=torch.bfloat16))],
    ids=["rms_norm", "matmul"],
)
def test_the_choice_is_within_two_percent_of_the_whole_space(op, problem, gpu):
    with Gpu(gpu) as bench:
        assert tune([(op, problem)], bench, Store(), Console(file=open(os.devnull, "w"))) == 0  # noqa: SIM115
    here = Device.of(torch.empty(0, device=gpu))
    chosen, source = decide(op.space, op.plan, problem, here)
    assert source == "user table"
    sets = input_sets(lambda: problem.inputs(gpu), problem.cost().size_bytes, here.l2_bytes)
    whole = {str(config): lambda config=config, **kw: run_op(op, kw, config) for config in op.space(problem, here)}
    times = {name: time_interleaved({name: call}, sets, rounds=3)[name].time_us for name, call in whole.items()}
    best = min(times, key=lambda name: times[name])
    final = time_interleaved({"best": whole[best], "chosen": whole[str(chosen)]}, sets)
    assert final["chosen"].time_us <= 1.02 * final["best"].time_us
