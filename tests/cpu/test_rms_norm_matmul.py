"""Tests special to `rms_norm_matmul`: both ops that it stands for, layouts, extremes, messages."""

import pytest
import torch

from tilewright import matmul, rms_norm, rms_norm_matmul
from tilewright.launch import Device, counted, forced_config
from tilewright.ops import rms_norm_matmul as op
from tilewright.testing import assert_accurate
from tilewright.testing.cases.rms_norm_matmul import real

H200, BF16 = Device.named("H200"), torch.bfloat16


pytestmark = pytest.mark.usefixtures("inference")


@pytest.mark.parametrize("silu_mul", [False, True])
def test_it_is_rms_norm_and_matmul_in_one_launch(silu_mul):
    x, residual, weight, b, bias = (torch.randn(s) for s in ((1, 130), (1, 130), (130,), (46, 130), (46,)))
    with counted() as counts:
        out, total = rms_norm_matmul(x, weight, b, bias, eps=1e-5, weight_offset=1.0, residual=residual, silu_mul=silu_mul)
    assert counts == {"rms_norm_matmul_kernel": 1}
    normed, expected = rms_norm(x, weight, 1e-5, weight_offset=1.0, residual=residual)
    assert torch.equal(total, expected)
    torch.testing.assert_close(out, matmul(normed, b, bias, trans_b=True, silu_mul=silu_mul), rtol=1e-5, atol=1e-4)


def test_leading_axes_and_strides():
    wide, weight, b = torch.randn(2, 3, 96), torch.randn(40), torch.randn(10, 64)[:, :40]
    x = wide[..., 8:48]
    found = rms_norm_matmul(x, weight, b)
    assert found.shape == (2, 3, 10)
    torch.testing.assert_close(found, rms_norm_matmul(x.contiguous(), weight, b.contiguous()))


def test_zeros_and_large_values():
    x = torch.zeros(2, 64, dtype=BF16)
    x[1] = 3e38
    out = rms_norm_matmul(x / 2, torch.ones(64, dtype=BF16), torch.eye(64, dtype=BF16))
    assert out[0].eq(0).all()
    assert out[1].eq(0).all()  # the root is infinite, as in rms_norm


@pytest.mark.parametrize("residual", [False, True])
def test_large_rows_of_fp16_do_not_overflow_on_the_tensor_cores(residual):
    """The weighted row would, before the division by its root."""
    x, weight, b = (torch.randn(s) for s in ((5, 96), (96,), (34, 96)))
    x, weight, b = (x * 2e4).clamp(-6e4, 6e4).half(), (weight * 30).half(), b.half()
    added = {"residual": torch.zeros_like(x)} if residual else {}
    configs = [c for c in op.space(op.Problem(5, 34, 96, torch.float16, residual=residual), Device.of(x)) if c.mma]
    assert configs
    for config in configs:
        with forced_config(op.plan, config):
            out = rms_norm_matmul(x, weight, b, **added)
        found = out[0] if residual else out
        truth = op.reference(x.double(), weight.double(), b.double())
        assert_accurate(found, matmul(rms_norm(x, weight), b, trans_b=True), truth)


def test_nothing_to_do_launches_nothing():
    weight = torch.ones(8)
    with counted() as counts:
        assert rms_norm_matmul(torch.empty(0, 8), weight, torch.empty(4, 8)).shape == (0, 4)
        out, total = rms_norm_matmul(torch.ones(2, 8), weight, torch.empty(0, 8), residual=torch.ones(2, 8))
    assert out.shape == (2, 0)
    assert total.eq(2).all()
    assert not counts


def test_every_sm_reads():
    """If b is large enough to matter, five of six SMs have a block (114 of 132: 6.5 us, 228 blocks
    of half the columns 6.7, for 1 x 3648 x 2048); in several waves, the busiest SM has at most a
    fifth more than its share. On the tensor cores half of the SMs are enough, because a block keeps
    all of an SM's loads under way.
    """
    for problem in real:
        config = op.space(problem, H200)[0]
        if problem.n * problem.k > 1 << 22:
            blocks = op.plan(problem, config, H200)[0].grid[0]
            at_once = blocks if config.persistent else H200.sms
            assert blocks >= H200.sms * (1 / 2 if config.mma else 5 / 6)
            everything = config.tiles(problem) <= H200.sms * config.occupancy
            if config.persistent or not (config.mma or everything):
                assert -(-config.tiles(problem) // at_once) * at_once <= 1.2 * config.tiles(problem)


X, W, B = torch.zeros(1, 64), torch.zeros(64), torch.zeros(6, 64)
BAD = [
    ({"x": torch.tensor(1.0)}, r"x.dim\(\) must be at least 1, got 0"),
    ({"x": X.int()}, r"x.dtype must be one of bfloat16, float16, float32, got int32"),
    ({"x": torch.zeros(1, 0), "weight": torch.zeros(0)}, r"x.shape\[-1\] must be at least 1, got 0"),
    ({"weight": torch.zeros(32)}, r"weight.shape must be \(64,\), got \(32,\)"),
    ({"b": torch.zeros(6, 32)}, r"b.shape\[1\] must be 64, the k of x, got 32"),
    ({"b": B.half()}, r"b.dtype must be float32, got float16"),
    ({"bias": torch.zeros(5)}, r"bias.shape must be \(6,\), got \(5,\)"),
    ({"residual": torch.zeros(2, 64)}, r"residual.shape must be \(1, 64\), got \(2, 64\)"),
    ({"b": B[:5], "silu_mul": True}, r"n of b must be even with silu_mul, got 5"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_bad_input_is_named_and_nothing_is_launched(change, message):
    with counted() as counts, pytest.raises(ValueError, match=message):
        rms_norm_matmul(**{"x": X, "weight": W, "b": B, **change})
    assert not counts
