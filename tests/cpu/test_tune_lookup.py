"""Where a call finds a tuned config: the order of the tables, and which rows it takes."""

import dataclasses
import os
import subprocess
import sys
from contextlib import nullcontext

import msgspec
import pytest
import torch
from made_up import COMPILER, H200, PROBLEM, SPACE, MadeUp, own_folder, quiet, row_for  # noqa: F401  (a fixture)

from tilewright import ops
from tilewright.launch import Device, decision_of, forced_config, forget_plans, table
from tilewright.launch.table import shipped_file
from tilewright.ops import rms_norm
from tilewright.testing.cases import cases
from tilewright.testing.problems import of_file
from tilewright.tune.store import Store


def test_order_of_the_look_up(tmp_path):
    def decided(rows, cols=4096):
        forget_plans()
        return rms_norm.DECISION.decide(rms_norm.Problem(rows, cols, torch.bfloat16), H200)

    assert decided(16) == (SPACE[0], SPACE.source)
    near = rms_norm.Problem(24, 4096, torch.bfloat16)
    both = [c for c in SPACE if c in rms_norm.space(near, H200)]
    table.SHIPPED.mkdir()
    Store(shipped_file("H200")).add([row_for(PROBLEM, both[2])])
    assert decided(16) == (both[2], "shipped table")
    Store().add([row_for(near, both[3])])
    assert decided(24) == (both[3], "user table")
    assert decided(23)[1].startswith("model"), "a near row is not taken as it is: the model knows what it says of this problem"
    Store().add([row_for(PROBLEM, both[4])])
    assert decided(16) == (both[4], "user table"), "yours before the shipped one"


def test_a_row_may_name_any_legal_config():
    """The space is short, but a row may name any legal config."""
    problem = ops.matmul.Problem(8, 5120, 17_408, torch.bfloat16)
    space = ops.matmul.space(problem, H200)
    assert len(space.legal) > len(space)
    Store().add([row_for(problem, space.legal[-1], ops.matmul)])
    assert decision_of(ops.matmul).decide(problem, H200) == (space.legal[-1], "user table")


@pytest.mark.parametrize(
    "changes",
    [{"digest": "0"}, {"compiler": "cuda-tile 1.7.0 tileiras 13.9.1"}, {"gpu": "H100"}, {"arch": "sm_100"}, {"config": {"tile_m": 3}}],
    ids=lambda c: next(iter(c)),
)
def test_a_row_of_another_kernel_compiler_gpu_or_space_is_not_taken(changes):
    Store().add([msgspec.structs.replace(row_for(PROBLEM, SPACE[2]), **changes)])
    lapsed = {"digest", "compiler", "config"} & changes.keys()  # of this GPU: it says so
    with pytest.warns(UserWarning, match="1 of 1 problems of rms_norm") if lapsed else nullcontext():
        assert rms_norm.DECISION.decide(PROBLEM, H200) == (SPACE[0], SPACE.source)


def test_options_must_be_equal_and_a_forced_config_comes_first():
    Store().add([row_for(dataclasses.replace(PROBLEM, residual=True), SPACE[2]), row_for(PROBLEM, SPACE[3])])
    assert rms_norm.DECISION.decide(dataclasses.replace(PROBLEM, weight_offset=1.0), H200)[1].startswith("model")
    assert chosen(16) == rms_norm.plan(PROBLEM, SPACE[3], H200)
    with forced_config(rms_norm.plan, SPACE[1]):
        assert chosen(16) == rms_norm.plan(PROBLEM, SPACE[1], H200)


def chosen(rows):
    return rms_norm.DECISION.launches(H200, rows=rows, cols=4096, dtype=torch.bfloat16).launches


def test_a_cpu_takes_no_table():
    cpu = Device.named("CPU")
    Store().add([row_for(PROBLEM, c, gpu="CPU", arch="cpu") for c in rms_norm.space(PROBLEM, cpu)[:1]])
    assert rms_norm.DECISION.decide(PROBLEM, cpu)[1] == "first"


def test_digests_are_the_same_in_another_process_and_no_source_means_no_table(monkeypatch):
    code = (
        "from tilewright.launch import Device, decision_of; from tilewright.launch.table import digest_of; from tilewright import ops\n"
        "from tilewright.testing.cases import cases; h200 = Device.named('H200')\n"
        "for op in ops.ALL[:8]:\n"
        "    p = cases(op, 'bench')[0]; print(digest_of(decision_of(op), p, op.space(p, h200)[0], h200))\n"
    )
    other_seed = os.environ | {"PYTHONHASHSEED": "7"}  # this process drew its own
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=other_seed).stdout
    firsts = [(op, cases(op, "bench")[0]) for op in ops.ALL[:8]]
    assert there.split() == [table.digest_of(decision_of(op), problem, op.space(problem, H200)[0], H200) for op, problem in firsts]
    Store().add([row_for(PROBLEM, SPACE[2])])

    def unreadable(*unused):
        raise OSError("could not get source code")

    monkeypatch.setattr(table, "digest_of", unreadable)
    assert rms_norm.DECISION.decide(PROBLEM, H200)[1] == SPACE.source


def test_show_plans_prints_each_decision_once(monkeypatch, capfd, tmp_path):
    Store().add([row_for(PROBLEM, SPACE[3])])
    chosen(15)
    assert capfd.readouterr().err == ""
    monkeypatch.setenv("TILEWRIGHT_SHOW_PLANS", "1")  # read at the first decision, not at the import
    for _ in range(3):
        chosen(16)
    assert capfd.readouterr().err == f"tilewright: rms_norm {PROBLEM} on H200 -> {SPACE[3]} -> user table\n"
    monkeypatch.setenv("TILEWRIGHT_SHOW_PLANS", "log")
    chosen(17)
    assert capfd.readouterr().err == ""
    assert of_file(table.log_file()) == [(rms_norm, rms_norm.Problem(17, 4096, torch.bfloat16))]
