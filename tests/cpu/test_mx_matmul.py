"""Block-scaled formats (mxfp8, mxfp4, nvfp4): codes, scales, their product; compiled, not timed."""

from itertools import pairwise

import binaries
import pytest
import torch

from tilewright import mx_matmul, quantize_mx
from tilewright.compile.job import Job
from tilewright.launch import Device, counted, forced_config, traced
from tilewright.ops import mx_matmul as product, quantize_mx as op
from tilewright.ops.common.mx import E4M3, MX_FORMATS, dequantized
from tilewright.testing.check import check_op

BF16 = torch.bfloat16
EACH = pytest.mark.parametrize("name", MX_FORMATS)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def factor_of(x):
    return x.abs().amax().float() / 2688


# root mean square of the rounding error of normal values, over that of the values
@pytest.mark.parametrize(("name", "most"), [("mxfp8", 0.028), ("mxfp4", 0.125), ("nvfp4", 0.10)])
def test_two_calls_make_a_product_of_16_bit_operands(name, most):
    torch.manual_seed(0)
    x, weight = torch.randn(2, 9, 192).to(BF16), torch.randn(70, 192).to(BF16) / 16
    factors = (factor_of(x), factor_of(weight)) if name == "nvfp4" else (None, None)
    a, scale_a = quantize_mx(x, mx_format=name, factor=factors[0])
    b, scale_b = quantize_mx(weight, mx_format=name, factor=factors[1])
    out_scale = factors[0] * factors[1] if name == "nvfp4" else None
    out = mx_matmul(a, b, scale_a, scale_b, out_scale=out_scale)
    assert (out.dtype, out.shape) == (BF16, (2, 9, 70))
    truth = x.double() @ weight.double().T
    found = ((out.double() - truth).square().mean() / truth.square().mean()).sqrt()
    assert 0.3 * most < found < 1.5 * most  # of two operands: sqrt(2)
    held = dequantized(a.double() if name == "mxfp8" else a, scale_a.double()) * (factors[0] or 1.0)
    assert (held - x).square().mean().sqrt() < most * x.double().square().mean().sqrt()


def test_codes_round_to_nearest_even_and_pairs_lie_low_first():
    ends = torch.tensor([(a + b) / 2 for a, b in pairwise(E2M1)])
    x = torch.zeros(2, 32)
    x[:, 0] = torch.tensor([6.0, -6.0])  # the scale is one
    x[0, 1:8], x[0, 8:15], x[1, 1:8] = ends, ends * 1.001, -ends * 0.999
    codes, scale = quantize_mx(x, mx_format="mxfp4")
    assert codes.shape == (2, 16)
    assert scale.float().tolist() == [[1.0], [1.0]]
    fours = torch.stack((codes & 15, codes >> 4), -1).flatten(1).tolist()
    assert fours[0][:15] == [7, 0, 2, 2, 4, 4, 6, 6, 1, 2, 3, 4, 5, 6, 7]
    assert fours[1][:8] == [15, 8, 9, 10, 11, 12, 13, 14]


@EACH
def test_scales_are_the_least_that_nothing_saturates_with(name):
    of = MX_FORMATS[name]
    x = torch.zeros(4, 2 * of.group)
    x[0, 0], x[1, 0], x[2, 0] = of.largest, of.largest * 1.01, 2.0**-30
    codes, scale = quantize_mx(x, mx_format=name)
    least = 2.0**-9 if name == "nvfp4" else 2.0**-126
    one = 1.0 if name == "nvfp4" else 2.0  # e4m3 is rounded to nearest
    assert scale[:2, 0].tolist() == [1.0, one]
    assert scale[3].float().tolist() == [least, least]
    assert not dequantized(codes, scale)[3].any()
    if name != "nvfp4":
        assert dequantized(codes, scale)[2, 0] == 2.0**-30
    fitting = x / (x.abs().amax() / 2688)
    if name == "nvfp4":
        assert torch.equal(quantize_mx(x, mx_format=name, factor=x.abs().amax() / 2688)[1].float(), quantize_mx(fitting, mx_format=name)[1].float())


@EACH
def test_a_group_with_a_nan_or_an_infinity_is_nan_and_no_other(name):
    of = MX_FORMATS[name]
    x = torch.randn(3, 4 * of.group)
    x[0, 1], x[1, of.group] = torch.nan, -torch.inf
    codes, scale = quantize_mx(x, mx_format=name)
    expected = torch.zeros(3, 4, dtype=torch.bool)
    expected[0, 0] = expected[1, 1] = True
    assert torch.equal(scale.float().isnan(), expected)
    assert torch.equal(dequantized(codes, scale).isnan(), expected.repeat_interleave(of.group, 1))


FORMS = {
    "native": product.Config(16, 64, 64),
    "decoding": product.Config(16, 64, 64, native=False),
    "shares": product.Config(16, 64, 32, native=False, split_k=2),
    "decoded": product.Config(16, 128, 128, native=False, decoded=True),
}


@EACH
@pytest.mark.parametrize("form", FORMS)
def test_every_code_and_scale_is_exact_in_the_product(name, form):
    """A product with 6 times the identity, e8m0 scales at both ends and NaN among them."""
    of, k = MX_FORMATS[name], 128
    codes = torch.arange(256).repeat(k // 4).view(-1, k * of.bits // 8).to(torch.uint8)
    if name == "mxfp8":
        codes = torch.where(codes & 127 == 127, 0, codes).view(E4M3)
    scale = torch.tensor([0.0078125, 1.0, 2.0, 0.5]) if name == "nvfp4" else torch.tensor([2.0**-100, 2.0**90])
    scale = scale.to(of.scale_dtype).repeat(len(codes), 2)
    scale[1], scale[2, 0] = (2.0**-9, torch.nan) if name == "nvfp4" else (2.0**-127, torch.nan)
    eye, ones = quantize_mx(6 * torch.eye(k), mx_format=name)
    expected = 6 * dequantized(codes, scale)
    expected[2] = torch.nan  # times 0
    with forced_config(product.plan, FORMS[form]):
        out = mx_matmul(codes, eye, scale, ones, out_dtype=torch.float32)
        (a, broken), (b, whole) = (quantize_mx(torch.ones(2, k), mx_format=name) for _ in range(2))
        broken[1, 1] = torch.nan  # not an infinity, which it would be as an exponent
        assert mx_matmul(a, b, broken, whole, out_dtype=torch.float32).isnan().all(1).tolist() == [False, True]
    small = expected.abs() < 2.0**-126  # below the normal numbers of bf16
    assert torch.equal(torch.where(small, 0, out).nan_to_num(7), torch.where(small, 0, expected).nan_to_num(7))


@pytest.mark.parametrize("form", FORMS)
def test_a_code_that_is_nan_makes_its_row_nan_and_no_other(form):
    """Wherever it stands in a word of four codes, and with either sign."""
    a, scale = quantize_mx(torch.ones(16, 128), mx_format="mxfp8")
    for row in range(8):
        a.view(torch.uint8)[row, 64 + row % 4] = 0x7F if row < 4 else 0xFF
    with forced_config(product.plan, FORMS[form]):
        out = mx_matmul(a, a[8:], scale, scale[8:], out_dtype=torch.float32)
    assert torch.equal(out.isnan(), (torch.arange(16) < 8)[:, None].expand(16, 8))


def test_who_scales_and_who_is_refused():
    for gpu, native in (("B200", True), ("B300", True), ("RTX5090", True), ("H200", False)):
        for name in MX_FORMATS:
            found = product.space(product.Problem(512, 4096, 4096, name), Device.named(gpu))
            assert found
            assert {c.native for c in found} == {native}
            assert {c.decoded for c in found} == {not native}  # 512 rows
    a100 = Device.named("A100")  # no 8-bit floats
    assert not product.space(product.Problem(512, 4096, 4096, "mxfp4"), a100)
    assert not op.space(op.Problem(512, 4096, BF16, "mxfp4"), a100)


@pytest.mark.parametrize(("name", "most"), [("mxfp8", 128), ("mxfp4", 64), ("nvfp4", 64)])
def test_operands_of_many_rows_are_decoded_before_the_product(name, most):
    h200 = Device.named("H200")
    for rows, names in ((most, "mx_matmul_kernel"), (most + 1, "mx_decode_kernel")):
        problem = product.Problem(rows, 4096, 4096, name, bias=True, out_scale=True)
        for config in product.space(problem, h200):
            launches = product.plan(problem, config, h200)
            assert launches[0].name == names
            assert config.decoded == (names == "mx_decode_kernel")
            assert launches[-1].name == "mx_sum_kernel" or (config.split_k == 1 and not config.decoded)


@pytest.mark.parametrize(("rows", "k"), [(16, 8192), (16, 576), (64, 8192)])
def test_the_widest_tiles_that_decode_do_not_spill(rows, k):
    """Pairs need the most registers. Scales of 18 bytes a row come one by one, and with them tiles
    of 64 x 256 of 32 rows spill; those of 128 columns and 128 bytes do so with any scales.
    """
    h200 = Device.named("H200")
    problem = product.Problem(rows, 4096, k, "mxfp4")
    widest = max(product.space(problem, h200), key=lambda c: (c.swap_ab, c.tile_n * c.tile_k, c.tile_n, -c.split_k))
    with traced(h200) as launches, forced_config(product.plan, widest):
        mx_matmul(**problem.inputs(torch.device("meta")))
    assert not binaries.made(Job.of(launches[0], h200.arch)).resources.spills


@EACH
def test_blocks_that_decode_several_tiles_decode_all(name):
    """More than two blocks of tiles of 128 bytes, and part of one."""
    problem = product.Problem(5, 20, 1312 * 8 // MX_FORMATS[name].bits, name)
    check_op(product, problem, torch.device("cpu"), FORMS["decoded"])


@pytest.mark.parametrize(("name", "gpu", "instruction"), [("mxfp8", "B200", "UTCQMMA"), ("mxfp4", "B300", "UTCOMMA"), ("nvfp4", "RTX5090", "OMMA")])
def test_defaults_compile_for_blackwell_without_a_spill(name, gpu, instruction):
    device = Device.named(gpu)
    with traced(device) as launches:
        mx_matmul(**product.Problem(4096, 4096, 4096, name).inputs(torch.device("meta")))
    found = binaries.made(Job.of(launches[0], device.arch)).resources
    assert instruction in found.matrix
    assert not found.spills


X = torch.zeros(4, 64)
A, S = quantize_mx(X)
BAD = [
    (quantize_mx, {"x": X, "mx_format": "fp6"}, ValueError, "mx_format must be one of mxfp8, mxfp4, nvfp4, got 'fp6'"),
    (quantize_mx, {"x": X[:, :40]}, ValueError, r"x.shape must be \[.., k\] with k a multiple of 32, the group of mxfp8, got \(4, 40\)"),
    (quantize_mx, {"x": X, "factor": torch.ones(())}, ValueError, "factor must be None for mxfp8, got a tensor"),
    (quantize_mx, {"x": X, "factor": torch.ones(1), "mx_format": "nvfp4"}, ValueError, r"factor.shape must be \(\), got \(1,\)"),
    (quantize_mx, {"x": X.int()}, ValueError, "x.dtype must be one of bfloat16, float16, float32, got int32"),
    (mx_matmul, {"a": X}, ValueError, "a.dtype must be one of float8_e4m3fn, uint8, got float32"),
    (mx_matmul, {"scale_a": S.float()}, ValueError, "scale_a.dtype must be float8_e8m0fnu, got float32"),
    (mx_matmul, {"b": A[:, :32]}, ValueError, r"a.shape\[-1\] must be 32, that of b \(4, 32\), got 64"),
    (mx_matmul, {"scale_b": S[:, :1]}, ValueError, r"scale_b.shape must be \(4, 2\), got \(4, 1\)"),
    (mx_matmul, {"out_dtype": torch.int8}, ValueError, "out_dtype must be one of bfloat16, float16, float32, got int8"),
    (mx_matmul, {"bias": torch.zeros(4)}, ValueError, "bias.dtype must be bfloat16, got float32"),
]


@pytest.mark.parametrize(("function", "change", "error", "message"), BAD)
def test_bad_input_is_named_and_nothing_is_launched(function, change, error, message):
    good = {"a": A, "b": A, "scale_a": S, "scale_b": S} if function is mx_matmul else {}
    with counted() as counts, pytest.raises(error, match=message):
        function(**{**good, **change})
    assert not counts


def test_empty_gives_empty():
    assert mx_matmul(A[:0], A, S[:0], S).shape == (0, 4)
    assert quantize_mx(X[:0])[0].shape == (0, 64)
