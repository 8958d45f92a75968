"""The timer is honest: equal kernels get equal times, slower ones the right factor, wrong ones
none.
"""

import json
import math

import pytest
import torch

from tilewright.bench import command
from tilewright.bench.timer import input_sets, time_interleaved, time_roughly
from tilewright.launch import Device
from tilewright.ops import softmax

ROWS = 44 * 1024  # 369 MB: a quarter is more than an L2 cache, and takes 20 times a kernel's ends


@pytest.fixture
def sets(gpu):
    def make():
        return {"x": torch.randn(ROWS, 4096, device=gpu, dtype=torch.bfloat16)}

    return input_sets(make, ROWS * 8192, Device.of(torch.empty(0, device=gpu)).l2_bytes)


@pytest.mark.alone
def test_a_kernel_against_itself_reads_one(sets):
    ratios = []
    for _ in range(50):
        times = time_interleaved({"a": lambda x: x.neg(), "b": lambda x: x.neg()}, sets)
        ratios.append(math.log(times["a"].time_us / times["b"].time_us))
    assert abs(math.exp(sum(ratios) / len(ratios)) - 1) < 0.01


@pytest.mark.alone
@pytest.mark.parametrize(("rows", "times", "off"), [(ROWS // 2, 2, 0.1), (ROWS // 4, 4, 0.3), (ROWS * 10 // 11, 1.1, 0.02)])
def test_a_kernel_slowed_by_a_known_amount_is_seen_as_such(sets, rows, times, off):
    """Slowed by more rows: a repeated call would profit from the cache."""
    found = time_interleaved({"part": lambda x: x[:rows].neg(), "whole": lambda x: x.neg()}, sets)
    assert found["whole"].time_us / found["part"].time_us == pytest.approx(times, abs=off)


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


@pytest.mark.alone
def test_a_rough_time_is_near_the_careful_one_and_a_loser_is_given_up(sets):
    careful = time_interleaved({"x": lambda x: x.neg()}, sets)["x"].time_us
    assert time_roughly(lambda x: x.neg(), sets, math.inf) == pytest.approx(careful, rel=0.15)

    def slow(x):
        for _ in range(200):
            x.neg()

    assert time_roughly(slow, sets, careful) > 100 * careful
