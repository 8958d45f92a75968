"""Tests special to `layer_norm`: numerics, layouts, messages."""

import pytest
import torch
import torch.nn.functional as F

from tilewright import layer_norm
from tilewright.launch import Device, counted, forced_config
from tilewright.ops import layer_norm as op
from tilewright.testing import assert_accurate


@pytest.mark.parametrize("cols", [64, 130, 5000])
@pytest.mark.parametrize("shift", [1e3, -3e5])
def test_a_large_common_part_costs_no_digits(cols, shift):
    """The mean of the squares minus the square of the mean would lose all digits."""
    x = torch.randn(6, cols) + shift
    truth, theirs = op.reference(x.double()), op.reference(x)
    problem = op.Problem(*x.shape, x.dtype, False, False)
    for name in ("CPU", "H200"):
        for config in op.space(problem, Device.named(name)):
            with forced_config(op.plan, config):
                assert_accurate(layer_norm(x), theirs, truth, f"{config}")


def test_rows_of_one_value_give_the_bias():
    bias = torch.randn(96)
    for config in op.space(op.Problem(4, 96, bias.dtype), Device.named("CPU")):
        with forced_config(op.plan, config):
            assert torch.equal(layer_norm(torch.full((4, 96), 0.5), torch.randn(96), bias), bias.expand(4, 96))
            assert torch.equal(layer_norm(torch.zeros(4, 96), None, bias), bias.expand(4, 96))


def test_one_column_and_a_bad_row_stays_alone():
    assert torch.equal(layer_norm(torch.randn(5, 1)), torch.zeros(5, 1))
    x = torch.randn(4, 100)
    x[1, 7], x[3, 0] = torch.nan, torch.inf
    found = layer_norm(x)
    assert found[[1, 3]].isnan().all()
    assert found[[0, 2]].isfinite().all()


def test_layouts():
    x, weight, bias = torch.randn(6, 8, 40), torch.randn(40), torch.randn(40)
    expected = F.layer_norm(x, (40,), weight, bias)
    for view in (x, x[:, :4], x.transpose(0, 1), x[..., 8:32], x[0, 0]):
        w, b = (weight, bias) if view.shape[-1] == 40 else (weight[8:32], bias[8:32])
        torch.testing.assert_close(layer_norm(view, w, b), F.layer_norm(view, view.shape[-1:], w, b))
    assert layer_norm(x, weight, bias).shape == expected.shape
    with counted() as counts:
        assert layer_norm(torch.empty(0, 64)).shape == (0, 64)
        assert layer_norm(torch.empty(5, 0)).shape == (5, 0)
    assert not counts


X = torch.zeros(4, 64)
BAD = [
    ({"x": torch.tensor(1.0)}, ValueError, r"x.dim\(\) must be at least 1, got 0"),
    ({"x": X.int()}, ValueError, r"x.dtype must be one of bfloat16, float16, float32, got int32"),
    ({"x": torch.zeros(64, 4).T}, ValueError, r"x.stride\(-1\) must be 1, got 4"),
    ({"weight": torch.zeros(32)}, ValueError, r"weight.shape must be \(64,\), got \(32,\)"),
    ({"weight": torch.zeros(64).half()}, ValueError, r"weight.dtype must be float32, got float16"),
    ({"bias": torch.zeros(1, 64)}, ValueError, r"bias.shape must be \(64,\), got \(1, 64\)"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input_is_named_and_nothing_is_launched(change, error, message):
    with counted() as counts, pytest.raises(error, match=message):
        layer_norm(**{"x": X, "weight": torch.ones(64), "bias": torch.ones(64), **change})
    assert not counts
