"""Products of 8-bit operands: how their scales come, and whether two sums for an output fit."""

from dataclasses import replace

import pytest
import torch

from tilewright.launch import Device
from tilewright.ops import matmul as op
from tilewright.ops.common.scaling import Scaling, plain_scales
from tilewright.ops.matmul import Config, Problem
from tilewright.ops.matmul.candidates import spill

H200 = Device.named("H200")


def test_scales_by_blocks_come_by_tma_where_their_strides_allow_it():
    problem = Problem(300, 640, 1024, torch.float8_e4m3fn, scaling=Scaling.BLOCK)
    for left in (0, 1, 2):
        given = replace(problem, plain_scales=left).inputs(torch.device("meta"))
        assert plain_scales(given["scale_a"], given["scale_b"]) == left
        assert {c.tma_scales for c in op.space(replace(problem, plain_scales=left), H200)} == set(range(3 - left))
    ragged, whole = torch.ones(7, 6).mT, torch.ones(8, 8).mT  # columns off 16 bytes, and on them
    assert [plain_scales(a, b) for a, b in ((ragged, whole), (whole, ragged), (whole, whole))] == [2, 1, 0]
    assert plain_scales(torch.ones(()), torch.ones(())) == plain_scales(None, None) == 0, "others have none"
    assert not [c for c in op.space(problem, Device.named("B200")) if c.tma_scales], "timed on Hopper only"


@pytest.mark.parametrize(("m", "n", "k"), [(141, 16_384, 53_248), (200, 8192, 28_672), (493, 3072, 23_040)])
def test_two_sums_for_an_output_fit_the_registers_of_the_default(m, n, k):
    """141 rows took 775 us by a tile that spills, and 313 by one whose blocks share k (H200)."""
    problem = Problem(m, n, k, torch.float8_e4m3fn, scaling=Scaling.TENSOR)
    both = Config(128, 128, 128, swap_ab=True, num_worker_warps=4, extra_n=16)
    assert spill(problem, both, H200) > 100, "what the compiler makes is 160"
    assert spill(replace(problem, k=8192), both, H200) == 0, "one sum"
    assert spill(problem, op.space(problem, H200)[0], H200) == 0
