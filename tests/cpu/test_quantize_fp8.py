"""Tests special to `quantize_fp8`: every code, exact scales, layouts, extremes, messages."""

import pytest
import torch
from configs import ROWS, compiled_kernels, configs_everywhere, forced_each

from tilewright import quantize_fp8
from tilewright.launch import Device, counted
from tilewright.ops import quantize_fp8 as op
from tilewright.ops.common import fp8
from tilewright.testing.quantised import calc_diff, quantised_distances

BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
TENSOR, ROW, GROUPS, SQUARES = BLOCKS = (None, None), (1, None), (1, 128), (128, 128)
TINY = 2.0**-126


def everywhere(rows, cols, dtype, block):
    return forced_each(op, configs_everywhere(op, op.Problem(rows, cols, dtype, block)))


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("block", BLOCKS)
def test_values_that_codes_can_stand_for_come_back(block, dtype):
    """All finite codes times a power of two, the largest included: the scale is that power, the
    codes are equal.
    """
    codes = torch.arange(256, dtype=torch.uint8).view(dtype)
    codes = codes[codes.float().isfinite()]
    x = (codes.float() * 2.0**-5).repeat(2)[None, : 128 * (len(codes) * 2 // 128)].contiguous()
    largest = torch.finfo(dtype).max * 2.0**-5
    x[0, ::128] = largest
    for _ in everywhere(1, x.shape[1], torch.float32, block):
        found, scale = quantize_fp8(x, block=block, dtype=dtype)
        assert (scale == 2.0**-5).all()
        assert torch.equal(found.float() * 2.0**-5, x)


@pytest.mark.parametrize(("power", "dtype"), [(False, torch.float32), (True, torch.float16), (False, BF16)])
@pytest.mark.parametrize("block", BLOCKS)
def test_bits_are_those_of_the_definition(block, power, dtype):
    x = (torch.randn(140, 300) * torch.exp2(3 * torch.randn(140, 1))).to(dtype)
    codes, scale = op.reference(x, block=block, power_of_two_scales=power)
    for _ in everywhere(140, 300, dtype, block):
        ours, our_scale = quantize_fp8(x, block=block, power_of_two_scales=power)
        assert torch.equal(our_scale, scale)
        assert torch.equal(ours.float(), codes.float())


@pytest.mark.parametrize("largest", [E4M3, E5M2])
def test_scales_are_the_quotient_rounded_to_nearest(largest):
    """The kernel divides by a multiplication and a correction.

    The bits are right from the smallest to the largest.
    """
    bits = torch.randint(0, 0x7F800000, (20_000,), dtype=torch.int64).to(torch.int32)
    edges = torch.tensor([0, 1, 0x00800000, 0x7F7FFFFF, 0x3F800000, 0x3F7FFFFF], dtype=torch.int32)
    x = torch.cat((bits, edges)).view(torch.float32)[:, None]
    _, scale = quantize_fp8(x, block=ROW, dtype=largest)
    top = torch.finfo(largest).max
    assert torch.equal(scale, x[:, 0].clamp(min=top * TINY) / top)
    assert (scale >= TINY).all()


def test_powers_of_two_are_the_next_ones_up():
    x = torch.tensor([448.0, 448.0 * (1 + 2**-23), 447.9, 224.0, 1.0, 0.0, 3e38])[:, None]
    codes, scale = quantize_fp8(x, block=ROW, power_of_two_scales=True)
    assert scale.tolist() == [1.0, 2.0, 1.0, 0.5, 2.0**-8, TINY, 2.0**120]
    assert (codes.float().abs() <= 448).all()
    assert torch.equal(codes[[0, 3]].float(), torch.full((2, 1), 448.0))


@pytest.mark.parametrize(("power", "dtype"), [(False, E4M3), (True, E5M2)])
@pytest.mark.parametrize("block", BLOCKS)
def test_zeros_nan_and_infinities(block, power, dtype):
    """Zeros: codes 0 and the smallest normal scale.

    NaN or an infinity: its group is NaN, and no other.
    """
    x = torch.randn(256, 384)
    x[:, 128:256] = 0
    x[130, 3], x[7, 300] = torch.nan, -torch.inf
    for _ in everywhere(256, 384, torch.float32, block):
        codes, scale = quantize_fp8(x, block=block, dtype=dtype, power_of_two_scales=power)
        truth, true_scale = op.reference(x, block=block, dtype=dtype, power_of_two_scales=power)
        assert torch.equal(scale.isnan(), true_scale.isnan())
        assert torch.equal(codes.float().isnan(), truth.float().isnan())
        values = fp8.dequantized(codes, scale, block)
        hit = {TENSOR: (slice(None), slice(None)), ROW: ([7, 130], slice(None))}.get(block)
        if hit:
            assert values[hit].isnan().all()
            assert int(values.isnan().sum()) == values[hit].numel()
        else:
            high = 128 if block == SQUARES else 1
            assert int(values.isnan().sum()) == 2 * high * 128
            assert (values[:, 128:256] == 0).all()
            assert (scale[:, 1] == TINY).all()


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("block", BLOCKS)
def test_the_scale_of_an_infinity_is_nan(block, dtype):
    """Not infinite: finite values of its group would have codes 0, as if they were zeros."""
    x = torch.ones(3, 5)
    x[1, 2] = torch.inf
    codes, scale = quantize_fp8(x, block=block, dtype=dtype)
    hit = scale.isnan()
    assert hit.any()
    assert not scale.isinf().any()
    assert codes.float()[1].isnan().all()
    assert bool((codes.float()[0] > 0).all()) == (not hit.flatten()[0])


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_a_given_scale_saturates(dtype):
    top = torch.finfo(dtype).max
    x = torch.tensor([0.0, 1.0, -2.0, 3 * top, -3 * top, torch.inf, -torch.inf, torch.nan])
    for power in (1.0, 0.5, 4.0):
        scale = torch.tensor(power)
        codes, same = quantize_fp8(x, dtype=dtype, scale=scale)
        assert same is scale
        expected = torch.tensor([0.0, 1 / power, -2 / power, top, -top, top, -top, torch.nan])
        if power == 4.0:
            expected[3:5] = torch.tensor([0.75 * top, -0.75 * top]).to(dtype).float()
        assert torch.equal(codes.float().nan_to_num(7.0), expected.nan_to_num(7.0))


def test_shapes_and_layouts_of_scales():
    x = torch.randn(3, 5, 300)
    for block, shape, strides in ((TENSOR, (), ()), (ROW, (3, 5), (5, 1)), (GROUPS, (3, 5, 3), (5, 1, 16))):
        codes, scale = quantize_fp8(x, block=block)
        assert codes.shape == x.shape
        assert codes.is_contiguous()
        assert scale.shape == shape
        assert scale.stride() == strides
        flat, flat_scale = quantize_fp8(x.flatten(0, 1), block=block)
        assert torch.equal(codes.flatten(0, 1).float(), flat.float())
        assert torch.equal(scale.reshape(flat_scale.shape), flat_scale)
    _, scale = quantize_fp8(torch.randn(300, 600), block=SQUARES)
    assert scale.shape == (3, 5)
    assert scale.stride() == (1, 4)
    _, scale = quantize_fp8(torch.randn(300), block=GROUPS)
    assert scale.shape == (3,)


@pytest.mark.parametrize("block", BLOCKS)
def test_views(block):
    wide = torch.randn(12, 6, 320)
    for x in (wide[:, 0, 7:307], wide[:, 2], wide.transpose(0, 1)[3]) + ((wide.transpose(0, 1),) if block != SQUARES else ()):
        codes, scale = quantize_fp8(x, block=block)
        expected, expected_scale = quantize_fp8(x.contiguous(), block=block)
        assert torch.equal(codes.float(), expected.float())
        assert torch.equal(scale, expected_scale)


@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64), (5, 0)])
def test_empty_gives_empty_and_launches_nothing(shape):
    x = torch.empty(shape)
    with counted() as counts:
        for block in BLOCKS[: 3 if len(shape) == 3 else 4]:
            codes, scale = quantize_fp8(x, block=block)
            assert codes.shape == shape
            assert (scale == TINY).all()
        assert quantize_fp8(x, scale=torch.tensor(2.0))[0].shape == shape
    assert not counts
    assert quantize_fp8(torch.empty(5, 0), block=ROW)[1].shape == (5,)


def test_one_scale_for_all_takes_two_launches_and_one_for_a_row_or_a_given_scale():
    x = torch.randn(64, 256)
    with counted() as counts:
        quantize_fp8(x)
    assert counts == {"quantize_fp8_amax_kernel": 1, "quantize_fp8_scaled_kernel": 1}
    with counted() as counts:
        quantize_fp8(x[:1])
    assert counts == {"quantize_fp8_rows_kernel": 1}
    with counted() as counts:
        quantize_fp8(x, scale=torch.tensor(1.0))
    assert counts == {"quantize_fp8_scaled_kernel": 1}


@pytest.mark.parametrize("block", BLOCKS)
def test_few_kernels_serve_every_number_of_rows(block):
    problems = [op.Problem(rows, 4096, BF16, block) for rows in ROWS]
    assert len(compiled_kernels(op, problems, Device.named("H200"))) <= 16


X = torch.zeros(4, 64)
ONE = torch.tensor(1.0)
BAD = [
    ({"x": torch.tensor(1.0)}, ValueError, r"x.dim\(\) must be at least 1, got 0"),
    ({"x": X.int()}, ValueError, r"x.dtype must be one of bfloat16, float16, float32, got int32"),
    ({"x": torch.zeros(64, 4).T}, ValueError, r"x.stride\(-1\) must be 1, got 4"),
    ({"x": X.clone().requires_grad_()}, ValueError, r"x.requires_grad must be False"),
    ({"x": X[None], "block": (128, 128)}, ValueError, r"x.dim\(\) must be 2, got 3"),
    ({"block": (1, 64)}, ValueError, r"block must be one of \(None, None\), \(1, None\), \(1, 128\), \(128, 128\), got \(1, 64\)"),
    ({"dtype": torch.float16}, ValueError, r"dtype must be torch.float8_e4m3fn or torch.float8_e5m2, got torch.float16"),
    ({"scale": 1.0}, TypeError, r"scale must be a torch.Tensor, got float"),
    ({"scale": torch.ones(1)}, ValueError, r"scale.shape must be \(\), got \(1,\)"),
    ({"scale": ONE.double()}, ValueError, r"scale.dtype must be float32, got float64"),
    ({"scale": ONE, "block": (1, 128)}, ValueError, r"scale must be None for block \(1, 128\), got a tensor"),
    ({"scale": ONE, "power_of_two_scales": True}, ValueError, r"power_of_two_scales must be False if scale is given, got True"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input_is_named_and_nothing_is_launched(change, error, message):
    with counted() as counts, pytest.raises(error, match=message):
        quantize_fp8(**{"x": X, **change})
    assert not counts


def test_a_product_of_codes_is_near_that_of_what_they_stand_for():
    """DeepGEMM's bound for blocks; finer scales are closer.

    3 bits of mantissa alone err by about 2**-4 / sqrt(3).
    """
    found = quantised_distances(torch.device("cpu"))
    assert found.keys() == {"tensor", "row", "block"}
    assert all(0 < value < 1e-3 for value in found.values()), found
    x = torch.randn(100)
    assert calc_diff(x, x) == 0
    assert calc_diff(x, -x) == 2
    assert calc_diff(x, 1.01 * x) == pytest.approx(0.5 * 0.01**2, rel=0.02)
