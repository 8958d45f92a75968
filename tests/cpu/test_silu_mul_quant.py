"""Tests special to `silu_mul_quant`: what it fuses, layouts, extremes, messages."""

import pytest
import torch
from configs import compiled_kernels, configs_everywhere, forced_each

from tilewright import quantize_fp8, silu_mul, silu_mul_quant
from tilewright.launch import Device, counted
from tilewright.ops import silu_mul_quant as op
from tilewright.ops.common import fp8

BF16, E5M2 = torch.bfloat16, torch.float8_e5m2
ROW, GROUPS = BLOCKS = (1, None), (1, 128)
TINY = 2.0**-126


def everywhere(rows, cols, block):
    return forced_each(op, configs_everywhere(op, op.Problem(rows, cols, torch.float32, block)))


@pytest.mark.parametrize("gelu_tanh", [False, True])
@pytest.mark.parametrize("block", BLOCKS)
def test_fp32_is_silu_mul_then_quantize(block, gelu_tanh):
    """Nothing is rounded between the two in fp32, so the bits are those of the two ops."""
    gate, up = 2 * torch.randn(9, 520), torch.randn(9, 520)
    codes, scale = quantize_fp8(silu_mul(gate, up, gelu_tanh=gelu_tanh), block=block)
    ours, our_scale = silu_mul_quant(gate, up, gelu_tanh=gelu_tanh, block=block)
    assert torch.equal(our_scale, scale)
    assert torch.equal(ours.float(), codes.float())


@pytest.mark.parametrize("block", BLOCKS)
def test_the_result_is_not_rounded_to_16_bits_before_the_code(block):
    gate, up = torch.randn(40, 256).to(BF16), torch.randn(40, 256).to(BF16)
    _, scale = silu_mul_quant(gate, up, block=block)
    _, truth = op.reference(gate.double(), up.double(), block=block)
    _, rounded = quantize_fp8(silu_mul(gate, up), block=block)
    assert ((scale - truth) / truth).abs().max() < 1e-6
    assert ((rounded - truth) / truth).abs().max() > 1e-4


@pytest.mark.parametrize("cols", [33, 200])
@pytest.mark.parametrize("block", BLOCKS)
def test_fused_and_separate_halves_have_the_same_bits(block, cols):
    both = torch.randn(3, 5, 2 * cols).to(BF16)
    codes, scale = silu_mul_quant(both, block=block, dtype=E5M2)
    assert codes.shape == (3, 5, cols)
    assert codes.dtype is E5M2
    assert scale.shape == ((3, 5) if block == ROW else (3, 5, -(-cols // 128)))
    assert scale.stride()[:2] == (5, 1)
    gate, up = both.chunk(2, -1)
    for halves in ((gate, up), (gate.contiguous(), up), (gate.contiguous(), up.contiguous())):
        again, scale_again = silu_mul_quant(*halves, block=block, dtype=E5M2)
        assert torch.equal(again.float(), codes.float())
        assert torch.equal(scale_again, scale)
    across, scale_across = silu_mul_quant(both.transpose(0, 1), block=block, dtype=E5M2)
    assert torch.equal(across.float(), codes.transpose(0, 1).float())
    assert torch.equal(scale_across, scale.transpose(0, 1))


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("block", BLOCKS)
def test_nan_infinities_and_zeros(block, power):
    gate, up = torch.randn(6, 300), torch.randn(6, 300)
    gate[1, 5], up[2, 299] = torch.nan, torch.inf
    gate[3] = 0
    gate[4], up[4] = 1e20, 1e20  # the product overflows
    for _ in everywhere(6, 300, block):
        codes, scale = silu_mul_quant(gate, up, block=block, power_of_two_scales=power)
        truth = op.reference(gate, up, block=block, power_of_two_scales=power)
        assert torch.equal(scale.isnan(), truth[1].isnan())
        assert torch.equal(codes.float().isnan(), truth[0].float().isnan())
        values = fp8.dequantized(codes, scale, block)
        assert values[4].isnan().all()
        assert not values[[0, 3, 5]].isnan().any()
        assert (values[3] == 0).all()
        assert (scale[3] == TINY).all()
        if block == GROUPS:
            assert not values[1, 128:].isnan().any()


@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64), (5, 0)])
def test_empty_gives_empty_and_launches_nothing(shape):
    with counted() as counts:
        for block in BLOCKS:
            codes, scale = silu_mul_quant(torch.empty(shape), torch.empty(shape), block=block)
            assert codes.shape == shape
            assert (scale == TINY).all()
            assert silu_mul_quant(torch.empty(shape), block=block)[0].shape == (*shape[:-1], shape[-1] // 2)
    assert not counts


@pytest.mark.parametrize("block", BLOCKS)
def test_few_kernels_serve_every_number_of_rows(block):
    problems = [op.Problem(rows, 14_336, BF16, block) for rows in range(1, 3000, 7)]
    assert len(compiled_kernels(op, problems, Device.named("H200"))) <= 5


X = torch.zeros(4, 64)
BAD = [
    ({"gate": torch.tensor(1.0)}, ValueError, r"gate.dim\(\) must be at least 1, got 0"),
    ({"gate": X.int()}, ValueError, r"gate.dtype must be one of bfloat16, float16, float32, got int32"),
    ({"gate": torch.zeros(4, 63), "up": None}, ValueError, r"gate.shape\[-1\] must be even if up is not given, got 63"),
    ({"up": torch.zeros(4, 32)}, ValueError, r"up.shape must be \(4, 64\), got \(4, 32\)"),
    ({"up": X.half()}, ValueError, r"up.dtype must be float32, got float16"),
    ({"up": torch.zeros(64, 4).T}, ValueError, r"up.stride\(-1\) must be 1, got 4"),
    ({"block": (None, None)}, ValueError, r"block must be one of \(1, None\), \(1, 128\), got \(None, None\)"),
    ({"dtype": torch.float8_e8m0fnu}, ValueError, r"dtype must be torch.float8_e4m3fn or torch.float8_e5m2, got torch.float8_e8m0fnu"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input_is_named_and_nothing_is_launched(change, error, message):
    with counted() as counts, pytest.raises(error, match=message):
        silu_mul_quant(**{"gate": X, "up": X, **change})
    assert not counts
