"""What ops over the rows of a matrix have in common: few kernels, grids that fit, planning in no
time.
"""

import time

import pytest
import torch
from configs import compiled_kernels

from tilewright.launch import Device, traced
from tilewright.ops import argmax, dropout, embedding, layer_norm, moe_route, rms_norm, sample, silu_mul, softmax
from tilewright.ops.common.rows import MOST_BLOCKS, coarse, grid_fits
from tilewright.testing import op_name

BF16 = torch.bfloat16
DEVICES = ("H200", "B200", "RTX5090", "A100", "CPU")
HUGE = [
    (rms_norm, rms_norm.Problem(2**28, 8, BF16)),
    (rms_norm, rms_norm.Problem(2**25, 1000, BF16)),
    (layer_norm, layer_norm.Problem(2**28, 8, BF16)),
    (softmax, softmax.Problem(2**28, 8, BF16)),
    (softmax, softmax.Problem(2**26, 3, torch.float32)),
    (silu_mul, silu_mul.Problem(2**28, 8, BF16)),
    (dropout, dropout.Problem(2**36, BF16)),
    (embedding, embedding.Problem(2**28, 8, BF16)),
    (embedding, embedding.Problem(2**28, 6, BF16)),
    (argmax, argmax.Problem(2**28, 8, BF16)),
    (argmax, argmax.Problem(2**25, 1000, BF16)),
    (argmax, argmax.Problem(70_000, 151_936, BF16)),
    (sample, sample.Problem(2**25, 8, BF16)),
    (moe_route, moe_route.Problem(2**27, 8, 2)),
]


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize(("op", "problem"), HUGE, ids=lambda value: op_name(value) if hasattr(value, "Problem") else "")
def test_every_config_of_a_huge_problem_has_a_grid_that_fits(op, problem, name):
    device = Device.named(name)
    configs = op.space(problem, device)
    assert configs
    for config in configs:
        for launch in op.plan(problem, config, device):
            assert all(0 < blocks <= most for blocks, most in zip(launch.grid, MOST_BLOCKS, strict=False)), launch


def test_a_grid_fits_up_to_the_limits_of_its_axes():
    assert grid_fits(2**24 - 1, 65_535, 65_535)
    assert not grid_fits(2**24)
    assert not grid_fits(1, 65_536)
    assert not grid_fits(1, 1, 65_536)


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("cols", [2**28, 2**31])
@pytest.mark.parametrize("op", [softmax, rms_norm, layer_norm], ids=op_name)
def test_a_row_of_any_width_is_planned_in_milliseconds(op, cols, name):
    began = time.perf_counter()
    with traced(Device.named(name)) as launches:
        x = torch.empty(1, cols, device="meta", dtype=BF16)
        op.DECISION.launches(Device.of(x), rows=1, cols=cols, dtype=BF16).run(*[x] * len(op.DECISION.arguments))
    assert time.perf_counter() - began < 0.5  # with the first look into tables and data
    assert launches[0].args["TILE_N"] * (launches[0].args["COLS"] // launches[0].args["TILE_N"] < 64 or 1) <= 2**20


@pytest.mark.parametrize("op", [rms_norm, layer_norm, softmax, silu_mul], ids=op_name)
@pytest.mark.parametrize("cols", [128, 896, 4096, 5120, 16_384, 151_936])
def test_few_kernels_serve_every_number_of_rows(op, cols):
    problems = [op.Problem(rows, cols, BF16) for rows in range(1, 3000, 7)]
    assert len(compiled_kernels(op, problems, Device.named("H200"))) <= 4


def test_near_numbers_of_rows_are_priced_alike():
    device = Device.named("H200")
    found = [coarse(rms_norm.Problem(rows, 4096, BF16), device).rows for rows in range(1, 3000)]
    assert found == sorted(found)
    assert len(set(found)) == 3
    assert all(rows <= stands for rows, stands in zip(range(1, 3000), found, strict=True))


def test_sample_takes_several_rows_a_block_beyond_a_grid(monkeypatch):
    """As the kernel does it, with a smaller limit."""
    logits, seed = torch.randn(11, 70), torch.tensor(5)
    expected = sample.reference(logits, seed)
    monkeypatch.setattr(sample.decision, "MOST_BLOCKS", (4, 4, 4))
    sample.DECISION._known.cache_clear()
    sample.DECISION._bound.cache_clear()
    try:
        out = torch.empty(11, dtype=torch.int64)
        sample.sample_out(logits, seed.reshape(1), None, None, None, None, out)
        assert torch.equal(out, expected)
        problem = sample.Problem(11, 70, torch.float32, False, False, False, False)
        (launch,) = sample.plan(problem, sample.Config(128, 8), Device.named("H200"))
        assert launch.grid == (4,)
        assert not launch.pdl
    finally:
        sample.DECISION._known.cache_clear()
        sample.DECISION._bound.cache_clear()
