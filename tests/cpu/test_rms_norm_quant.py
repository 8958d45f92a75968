"""Tests special to `rms_norm_quant`: what it fuses, layouts, extremes, messages."""

import pytest
import torch
from configs import ROWS, compiled_kernels, configs_everywhere, forced_each

from tilewright import quantize_fp8, rms_norm, rms_norm_quant
from tilewright.launch import Device, counted
from tilewright.ops import rms_norm_quant as op
from tilewright.ops.common import fp8

BF16, E5M2 = torch.bfloat16, torch.float8_e5m2
ROW, GROUPS = BLOCKS = (1, None), (1, 128)
TINY = 2.0**-126


def everywhere(rows, cols, block):
    return forced_each(op, configs_everywhere(op, op.Problem(rows, cols, torch.float32, block)))


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("block", BLOCKS)
def test_fp32_is_rms_norm_then_quantize(block, power):
    """Up to the last bits of fp32: a code differs only if the value lies between two codes."""
    x, weight, residual = torch.randn(9, 520), torch.randn(520), torch.randn(9, 520)
    out, total = rms_norm(x, weight, 1e-5, weight_offset=1.0, residual=residual)
    codes, scale = quantize_fp8(out, block=block, power_of_two_scales=power)
    ours, our_scale, our_total = rms_norm_quant(x, weight, 1e-5, block=block, weight_offset=1.0, residual=residual, power_of_two_scales=power)
    assert torch.equal(our_total, total)
    torch.testing.assert_close(our_scale, scale, rtol=5e-7, atol=0)
    assert (ours.float() == codes.float()).float().mean() > 0.999
    torch.testing.assert_close(ours.float(), codes.float(), rtol=1 / 7, atol=0)


@pytest.mark.parametrize("block", BLOCKS)
def test_the_result_is_not_rounded_to_16_bits_before_the_code(block):
    """The fused op takes scales from the fp32 result.

    From a bf16 result they would err by up to 2**-9.
    """
    x, weight = torch.randn(40, 256).to(BF16), torch.randn(256).to(BF16)
    _, scale = rms_norm_quant(x, weight, block=block)
    _, truth = op.reference(x.double(), weight.double(), block=block)
    _, rounded = quantize_fp8(rms_norm(x, weight), block=block)
    assert ((scale - truth) / truth).abs().max() < 1e-6
    assert ((rounded - truth) / truth).abs().max() > 1e-4


@pytest.mark.parametrize("block", BLOCKS)
def test_residual_is_rounded_and_inputs_are_left_alone(block):
    x, residual, weight = (torch.randn(s).to(BF16) for s in ((3, 5, 200), (3, 5, 200), (200,)))
    before = x.clone(), residual.clone()
    codes, scale, total = rms_norm_quant(x, weight, block=block, residual=residual)
    again, scale_again = rms_norm_quant(x + residual, weight, block=block)
    assert torch.equal(total, x + residual)
    assert torch.equal(codes.float(), again.float())
    assert torch.equal(scale, scale_again)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def test_shapes_and_layouts():
    x, weight = torch.randn(3, 5, 300), torch.randn(300)
    for block, shape, strides in ((ROW, (3, 5), (5, 1)), (GROUPS, (3, 5, 3), (5, 1, 16))):
        codes, scale = rms_norm_quant(x, weight, block=block, dtype=E5M2)
        assert codes.shape == x.shape
        assert codes.dtype is E5M2
        assert scale.shape == shape
        assert scale.stride() == strides
        for view in (x.transpose(0, 1), torch.cat((x, x), -1)[..., :300]):
            codes, scale = rms_norm_quant(view, weight, block=block)
            expected, expected_scale = rms_norm_quant(view.contiguous(), weight, block=block)
            assert torch.equal(codes.float(), expected.float())
            assert torch.equal(scale, expected_scale)


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("block", BLOCKS)
def test_a_nan_stays_in_its_row_and_zeros_are_zero(block, power):
    x, weight = torch.randn(8, 300), torch.ones(300)
    x[3, 299], x[6, 0] = torch.nan, torch.inf
    x[5] = 0
    weight[128:256] = 0
    for _ in everywhere(8, 300, block):
        codes, scale = rms_norm_quant(x, weight, block=block, power_of_two_scales=power)
        values = fp8.dequantized(codes, scale, block)
        truth = op.reference(x, weight, block=block, power_of_two_scales=power)
        assert torch.equal(scale.isnan(), truth[1].isnan())
        assert torch.equal(codes.float().isnan(), truth[0].float().isnan())
        assert values[3].isnan().all()
        assert not values[[0, 1, 2, 4, 5, 7]].isnan().any()
        assert (values[5] == 0).all()
        assert (scale[5] == TINY).all()
        assert (values[0, 128:256] == 0).all()


@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64), (5, 0)])
def test_empty_gives_empty_and_launches_nothing(shape):
    x, weight = torch.empty(shape), torch.empty(shape[-1])
    with counted() as counts:
        for block in BLOCKS:
            codes, scale, total = rms_norm_quant(x, weight, block=block, residual=x)
            assert codes.shape == total.shape == shape
            assert (scale == TINY).all()
    assert not counts


@pytest.mark.parametrize("block", BLOCKS)
def test_few_kernels_serve_every_number_of_rows(block):
    problems = [op.Problem(rows, 4096, BF16, block) for rows in ROWS]
    assert len(compiled_kernels(op, problems, Device.named("H200"))) <= 2


X, W = torch.zeros(4, 64), torch.zeros(64)
BAD = [
    ({"x": torch.tensor(1.0)}, ValueError, r"x.dim\(\) must be at least 1, got 0"),
    ({"x": X.int()}, ValueError, r"x.dtype must be one of bfloat16, float16, float32, got int32"),
    ({"x": torch.zeros(64, 4).T}, ValueError, r"x.stride\(-1\) must be 1, got 4"),
    ({"weight": torch.zeros(32)}, ValueError, r"weight.shape must be \(64,\), got \(32,\)"),
    ({"weight": W.half()}, ValueError, r"weight.dtype must be float32, got float16"),
    ({"residual": torch.zeros(5, 64)}, ValueError, r"residual.shape must be .*, got \(5, 64\)"),
    ({"residual": X.half()}, ValueError, r"residual.dtype must be float32, got float16"),
    ({"block": (None, None)}, ValueError, r"block must be one of \(1, None\), \(1, 128\), got \(None, None\)"),
    ({"block": (128, 128)}, ValueError, r"block must be one of \(1, None\), \(1, 128\), got \(128, 128\)"),
    ({"dtype": torch.int8}, ValueError, r"dtype must be torch.float8_e4m3fn or torch.float8_e5m2, got torch.int8"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input_is_named_and_nothing_is_launched(change, error, message):
    with counted() as counts, pytest.raises(error, match=message):
        rms_norm_quant(**{"x": X, "weight": W, **change})
    assert not counts
