"""fp32 attention on Hopper: forms that the compiler peels a step too many off are wrong there."""

import binaries
import pytest
import torch

from tilewright.compile.disassemble import find_tool
from tilewright.compile.job import Job
from tilewright.compile.report import traced
from tilewright.launch import Device
from tilewright.ops import attention
from tilewright.testing import run_op

H200 = Device.named("H200")
OPTIONS = ({}, {"ahead": 2, "has_sinks": True, "has_len": True}, {"causal": False, "return_lse": True})


def launches_of(head_dim, v_dim, every=1, first=0, **options):
    """Of every so many configs. Of the default always."""
    problem = attention.Problem(2, 4, 1, 70, 100, head_dim, torch.float32, v_dim=v_dim, **options)
    for i, config in enumerate(attention.space(problem, H200)):
        if i and i % every != first:
            continue
        with traced(H200) as launches, torch.inference_mode():
            run_op(attention, problem.inputs(torch.device("meta")), config)
        yield launches[0]  # a merge of KV splits may follow


@pytest.mark.parametrize("head_dim", [16, 32, 64, 96, 128, 192, 256])
def test_a_step_has_values_enough(head_dim):
    for v_dim in (8, 16, 32, 48, 64, 128, 256):
        for launch in launches_of(head_dim, v_dim):
            constants = launch.launch.constants
            assert constants["width_v"] * constants["tile_n"] >= 2048
            assert constants["width_v"] >= v_dim


@pytest.mark.skipif(find_tool("nvdisasm") is None, reason="no nvdisasm (pip install nvidia-cuda-nvdisasm)")
@pytest.mark.parametrize(("head_dim", "v_dim"), [(32, 16), (64, 32), (128, 64)])
def test_each_loop_is_there_twice(head_dim, v_dim):
    """Six products a step, three for the scores and three for the values, in two loops: once as it
    is and once peeled. Those of 30 were wrong. An instruction sums 8 columns or keys.
    Of the configs but the default, each has options that take turns.
    """
    for turn, options in enumerate(OPTIONS):
        for launch in launches_of(head_dim, v_dim, len(OPTIONS), turn, **options):
            tile_n, found = launch.launch.constants["tile_n"], binaries.made(Job.of(launch, H200.arch)).resources
            assert found.count("HGMMA") == 2 * 2 * 3 * (head_dim + tile_n) // 8, options
