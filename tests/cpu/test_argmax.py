"""Tests special to `argmax`: ties, NaN, infinities, layouts, messages."""

import pytest
import torch
from configs import forced_each

from tilewright import argmax
from tilewright.launch import Device, counted
from tilewright.ops import argmax as op


def every_config(x):
    problem = op.Problem(*x.shape, x.dtype)
    for config in forced_each(op, [c for name in ("CPU", "H200") for c in op.space(problem, Device.named(name))]):
        yield config, argmax(x)


@pytest.mark.parametrize("cols", [70, 9000, 16_384])
def test_the_first_of_equals_and_of_nan(cols):
    x = torch.randint(-3, 3, (12, cols)).float()
    x[1] = -torch.inf
    x[2, :-1] = -torch.inf
    x[3, cols // 2], x[3, -1] = torch.nan, torch.nan
    x[4, 5:9] = torch.inf
    x[5] = torch.nan
    x[6] = 0.0
    x[6, 0] = -0.0  # equal to 0, and first
    x[7, -1] = 7.0
    x[8], x[8, 3] = torch.inf, torch.nan
    x[9] = -1e38
    for config, found in every_config(x):
        assert torch.equal(found, x.argmax(-1)), config


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_any_place_is_found(rows):
    cols = 20_011
    for column in (0, 1, 4095, 4096, 8191, 16_384, 20_000, cols - 1):
        x = torch.zeros(rows, cols, dtype=torch.bfloat16)
        x[:, column] = 1.0
        for config, found in every_config(x):
            assert (found == column).all(), config


def test_a_row_of_a_vocabulary_fills_the_gpu():
    for name in ("H200", "B200", "A100"):
        device = Device.named(name)
        for rows in (1, 4, 64):
            problem = op.Problem(rows, 151_936, torch.bfloat16)
            launch = op.plan(problem, op.space(problem, device)[0], device)[0]
            assert launch.grid[0] * launch.grid[1] * launch.num_worker_warps >= 4 * device.sms, (name, rows, launch)


def test_layouts():
    x = torch.randn(6, 8, 40)
    for view in (x, x[:, :4], x.transpose(0, 1), x[..., 8:32], x[0, 0]):
        assert torch.equal(argmax(view), view.argmax(-1))
    with counted() as counts:
        assert argmax(torch.empty(0, 64)).shape == (0,)
    assert not counts


BAD = [
    (torch.tensor(1.0), ValueError, r"x.shape must be \[..., cols\] with cols at least 1, got \(\)"),
    (torch.zeros(3, 0), ValueError, r"x.shape must be \[..., cols\] with cols at least 1, got \(3, 0\)"),
    (torch.zeros(3, 4).int(), ValueError, r"x.dtype must be one of bfloat16, float16, float32, got int32"),
    (torch.zeros(64, 4).T, ValueError, r"x.stride\(-1\) must be 1, got 4"),
]


@pytest.mark.parametrize(("x", "error", "message"), BAD)
def test_bad_input_is_named_and_nothing_is_launched(x, error, message):
    with counted() as counts, pytest.raises(error, match=message):
        argmax(x)
    assert not counts
