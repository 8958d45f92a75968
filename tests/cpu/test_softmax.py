"""Tests special to `softmax`: infinities, views, extremes, messages."""

import math

import binaries
import pytest
import torch
from configs import forced_each

from tilewright import softmax
from tilewright.compile.job import Job
from tilewright.launch import Device, counted, traced
from tilewright.ops import softmax as op
from tilewright.testing import assert_accurate, run_op

INF = math.inf


def every_config(x):
    rows, cols = x.shape
    problem = op.Problem(rows, cols, x.dtype)
    configs = [*op.space(problem, Device.named("CPU")), op.Config(1, 16, keep_row=False), op.Config(2, 16)]
    for _ in forced_each(op, configs):
        yield softmax(x)


def test_infinities_and_nan_are_torchs():
    x = torch.randn(7, 75)
    x[0] = -INF
    x[1, :60] = -INF  # whole tiles of nothing before the first finite score
    x[2, 20:] = -INF
    x[3, 5] = INF
    x[4, 70] = torch.nan
    x[5, ::2] = -INF
    expected = torch.softmax(x, -1)
    assert expected[0].isnan().all()
    for out in every_config(x):
        assert torch.equal(out.isnan(), expected.isnan())
        assert torch.equal(out == 0, expected == 0)
        torch.testing.assert_close(out, expected, equal_nan=True)


def test_large_scores_do_not_overflow():
    x = torch.tensor([[1e30, -1e30, 1e30, 0.0], [-1e30, -1e30, -1e30, -1e30], [100.0, 0.0, 99.0, -100.0]])
    for out in every_config(x):
        torch.testing.assert_close(out, torch.softmax(x, -1))


def test_rows_sum_to_one_in_every_dtype():
    for dtype, error in ((torch.float32, 1e-6), (torch.float16, 2e-3), (torch.bfloat16, 1e-2)):
        x = (10 * torch.randn(5, 333)).to(dtype)
        for out in every_config(x):
            torch.testing.assert_close(out.double().sum(-1), torch.ones(5, dtype=torch.float64), atol=error, rtol=0)


@pytest.mark.parametrize("view", ["columns of a wider tensor", "transposed leading axes", "one axis"])
def test_views(view):
    wide = torch.randn(4, 6, 32, generator=torch.Generator().manual_seed(0))
    x = {"columns of a wider tensor": wide[..., :20], "transposed leading axes": wide.transpose(0, 1), "one axis": wide[0, 0]}[view]
    out = softmax(x)
    assert out.shape == x.shape
    assert out.is_contiguous()
    assert_accurate(out, op.reference(x), op.reference(x.double()))


@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64), (5, 0)])
def test_empty_gives_empty_and_launches_nothing(shape):
    with counted() as counts:
        assert softmax(torch.empty(shape)).shape == shape
    assert not counts


X = torch.zeros(4, 64)
BAD = [
    (None, TypeError, r"x must be a torch.Tensor, got NoneType"),
    (torch.tensor(1.0), ValueError, r"x.dim\(\) must be at least 1, got 0"),
    (X.long(), ValueError, r"x.dtype must be one of bfloat16, float16, float32, got int64"),
    (torch.zeros(64, 4).T, ValueError, r"x.stride\(-1\) must be 1, got 4"),
    (X.clone().requires_grad_(), ValueError, r"x.requires_grad must be False"),
]


@pytest.mark.parametrize(("x", "error", "message"), BAD)
def test_bad_input_is_named_and_nothing_is_launched(x, error, message):
    with counted() as counts, pytest.raises(error, match=message):
        softmax(x)
    assert not counts


def test_two_blocks_share_an_sm_with_rows_of_112_elements_a_thread():
    """1024 x 28672: 44.1 us with one, 34.3 with two (H200)."""
    problem, device = op.Problem(1024, 28_672, torch.bfloat16), Device.named("H200")
    config = op.space(problem, device)[0]
    assert (config.occupancy, config.kept(problem.cols)) == (2, 112)
    with traced(device) as launches, torch.inference_mode():
        run_op(op, problem.inputs(torch.device("meta")))
    found = binaries.made(Job.of(launches[0], "sm_90")).resources
    assert found.registers <= 128
    assert found.stack_bytes <= 8
