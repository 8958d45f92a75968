"""The timer is honest: equal kernels read equal, slower ones slower by what they are, wrong ones not at all."""

import json
import math

import pytest
import torch

from tilewright.bench import command
from tilewright.bench.timer import input_sets, time_interleaved, time_roughly
from tilewright.launch import Device
from tilewright.ops import softmax


@pytest.fixture
def sets(gpu):
    def make():
        return {"x": torch.randn(4096, 4096, device=gpu, dtype=torch.bfloat16)}

    return input_sets(make, 32 << 20, Device.of(torch.empty(0, device=gpu)).l2_bytes)


def test_a_kernel_against_itself_reads_one(sets):
    ratios = []
    for _ in range(50):
        times = time_interleaved({"a": lambda x: x.neg(), "b": lambda x: x.neg()}, sets)
        ratios.append(math.log(times["a"].time_us / times["b"].time_us))
    assert abs(math.exp(sum(ratios) / len(ratios)) - 1) < 0.01


@pytest.mark.parametrize("times", [2, 4])
def test_work_done_several_times_takes_several_times_as_long(sets, times):
    def again(x):
        for _ in range(times):
            x.neg()

    found = time_interleaved({"once": lambda x: x.neg(), "again": again}, sets)
    assert found["again"].time_us / found["once"].time_us == pytest.approx(times, rel=0.1)


def test_a_tenth_more_work_is_seen_as_a_tenth(sets):
    """Ten equal calls against eleven: what a regression of 10 % looks like."""

    def calls(count):
        def run(x):
            for _ in range(count):
                x.neg()

        return run

    found = time_interleaved({"ten": calls(10), "eleven": calls(11)}, sets)
    assert found["eleven"].time_us / found["ten"].time_us == pytest.approx(1.1, abs=0.02)


def test_a_wrong_kernel_prints_no_number(gpu, monkeypatch, tmp_path, capsys):
    problem, file = softmax.Problem(64, 4096, torch.bfloat16), tmp_path / "rows.jsonl"
    monkeypatch.setattr(command, "cases", lambda op, kind: [problem])
    right = softmax.softmax

    def wrong(x):
        out = right(x)
        out[7, 11] += 0.01  # one element of 262144
        return out

    assert command.bench_command(["softmax"], peers=False, json_file=file) == 0
    assert len(file.read_text().splitlines()) == 1
    assert json.loads(file.read_text())["time_us"] > 0
    monkeypatch.setattr(softmax, "softmax", wrong)
    assert command.bench_command(["softmax"], peers=False, json_file=file) == 1
    assert "WRONG, not timed" in capsys.readouterr().out
    assert len(file.read_text().splitlines()) == 1


def test_a_rough_time_is_near_the_careful_one_and_a_loser_is_given_up(sets):
    careful = time_interleaved({"x": lambda x: x.neg()}, sets)["x"].time_us
    assert time_roughly(lambda x: x.neg(), sets, math.inf) == pytest.approx(careful, rel=0.15)

    def slow(x):
        for _ in range(200):
            x.neg()

    assert time_roughly(slow, sets, careful) > 100 * careful
