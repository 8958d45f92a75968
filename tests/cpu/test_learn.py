"""The ladders: every step right and different from the one before; the command says what it did."""

import dataclasses

import pytest
import torch

from tilewright.launch import Device
from tilewright.learn import ladders
from tilewright.learn.command import learn_command
from tilewright.testing import check_op

GEMM = ladders("gemm")
STEPS = [pytest.param(ladder, step, id=f"{ladder.name}-{step.name}") for ladder in GEMM for step in ladder.steps]


@pytest.mark.parametrize(("ladder", "step"), STEPS)
def test_every_step_is_right(ladder, step):
    check_op(ladder.op, ladder.small, torch.device("cpu"), step.config)


@pytest.mark.parametrize("ladder", GEMM, ids=lambda ladder: ladder.name)
def test_steps_differ_and_the_small_problem_takes_the_same_kernel(ladder):
    configs = [step.config for step in ladder.steps]
    assert len(set(configs)) == len(configs)
    device = Device.named("H200")
    for step in ladder.steps:
        kernels = [ladder.op.plan(p, step.config, device).kernel for p in (ladder.problem, ladder.small)]
        assert kernels[0] is kernels[1]


def test_the_command_shows_answers_and_resources_without_a_gpu(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    assert learn_command("gemm", arch="sm_90") == 0
    printed = capsys.readouterr().out
    assert "No GPU is timed here" in printed
    for ladder in GEMM:
        for step in ladder.steps:
            assert step.name in printed
    assert printed.count("right") == len(STEPS)
    assert "B200" in printed  # what others published, marked as theirs


def test_a_wrong_step_fails_the_command(capsys, monkeypatch):
    broken = dataclasses.replace(GEMM[0], op=_Wrong(GEMM[0].op), steps=GEMM[0].steps[:1])
    monkeypatch.setattr("tilewright.learn.command.ladders", lambda subject: (broken,))
    assert learn_command("gemm", arch="sm_90") == 1
    assert "WRONG" in capsys.readouterr().out


class _Wrong:
    """An op module whose reference is something else."""

    def __init__(self, op):
        self.__dict__.update(vars(op))
        self.reference = lambda **inputs: op.reference(**inputs) + 1


def test_an_unknown_subject_names_the_known_ones():
    with pytest.raises(KeyError, match="gemm"):
        ladders("sorting")
