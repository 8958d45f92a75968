"""The timer is honest: equal kernels read equal, slower ones slower by what they are."""

import math

import pytest
import torch

from tilewright.bench.timer import input_sets, time_interleaved, time_roughly
from tilewright.launch import Device


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


def test_a_rough_time_is_near_the_careful_one_and_a_loser_is_given_up(sets):
    careful = time_interleaved({"x": lambda x: x.neg()}, sets)["x"].time_us
    assert time_roughly(lambda x: x.neg(), sets, math.inf) == pytest.approx(careful, rel=0.15)

    def slow(x):
        for _ in range(200):
            x.neg()

    assert time_roughly(slow, sets, careful) > 100 * careful
