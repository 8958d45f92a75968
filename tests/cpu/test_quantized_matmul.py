"""Weights of 4 and 8 bits: formats, tensors of checkpoints, what is special to their product."""

import dataclasses

import pytest
import torch
from made_up import stored_times
from other_quantisers import words_of

import tilewright
from tilewright import QuantizedWeight, interpret, quantized_matmul
from tilewright.launch import Device, counted, forced_config
from tilewright.models import quantized_tensors as tensors
from tilewright.ops import quantized_matmul as op, quantized_moe as moe
from tilewright.ops.common import weight_formats
from tilewright.ops.common.weight_formats import E4M3, FORMATS, pack, unpack
from tilewright.ops.quantized_matmul import Config, Problem
from tilewright.ops.quantized_matmul.candidates import legal
from tilewright.ops.quantized_matmul.decision import LEFT
from tilewright.ops.quantized_moe.kernels import quantized_moe_pieces_kernel
from tilewright.testing.check import check_op
from tilewright.testing.poison import poisoned_empty

ALL = pytest.mark.parametrize("of", FORMATS.values(), ids=str(list(FORMATS)).strip("[]").replace("'", "").split(", "))
pytestmark = pytest.mark.usefixtures("inference")


def codes_of(n, k, of):
    codes = torch.randint(0, 1 << of.bits, (n, k))
    return torch.where((codes & 0x7F) == 0x7F, 0, codes) if of.code == E4M3 else codes


@ALL
@pytest.mark.parametrize("n", [1, 64, 130])
def test_words_give_their_codes_back(of, n):
    k = 3 * of.multiple
    codes = codes_of(n, k, of)
    words = pack(codes, of)
    assert tuple(words.shape) == of.shapes(n, k)[0]
    assert torch.equal(unpack(words, of, n, k), codes.int())


@ALL
def test_a_format_says_its_bytes_and_rounds_to_nearest(of):
    weight = torch.randn(70, 5 * max(of.multiple, 64)).bfloat16()
    found = QuantizedWeight.of(weight, of.name)
    assert found.size_bytes == of.size_bytes(*weight.shape)
    # Normal weights. A step of int4-128 is 2.8 / 8 of a deviation, of which sqrt(1 / 12) is 0.1.
    assert found.error(weight) < {4: 0.13, 8: 0.03}[of.bits]
    nearest = (found.dequantize(torch.float64) - weight.double()).abs().mean()
    for step in (-1, 1):  # of the codes, where they have one
        codes = unpack(found.words, of, *weight.shape)
        moved = (codes + step).clamp(0, (1 << of.bits) - 1)
        moved = torch.where((moved & 0x7F) == 0x7F, codes, moved) if of.code == E4M3 else moved
        other = weight_formats.dequantized(pack(moved, of), found.scales, found.zeros, found.factor, of, found.k, torch.float64)
        assert (other - weight.double()).abs().mean() > 1.2 * nearest


def test_a_weight_without_rows_gives_the_sum_with_the_residual():
    weight = {**QuantizedWeight.of(torch.randn(64, 128).bfloat16(), "int8").arguments}
    weight |= {"words": weight["words"][:0], "scales": weight["scales"][:, :0]}
    x = torch.randn(4, 128).bfloat16()
    with poisoned_empty():
        out, total = quantized_matmul(x, **weight, norm=torch.ones(128).bfloat16(), residual=x)
    assert out.shape == (4, 0)
    assert torch.equal(total, x + x)


@ALL
def test_zeros_and_huge_weights_stay_finite(of):
    weight = torch.zeros(3, 2 * of.multiple)
    weight[1, 0], weight[2, -1] = 30_000.0, -(2.0**-90)
    found = QuantizedWeight.of(weight.bfloat16(), of.name).dequantize()
    assert found.isfinite().all()
    assert not found[0].any()
    assert (found[1, 0] / 30_000 - 1).abs() < 0.3


@ALL
def test_every_code_is_exact(of):
    """A product with the identity is the weight."""
    count = 1 << of.bits
    codes = torch.arange(count).repeat(-(-128 // count)).view(-1, 128)
    codes = torch.where((codes & 0x7F) == 0x7F, 0, codes) if of.code == E4M3 else codes
    groups, n = 128 // of.group if of.group else 1, len(codes)
    scales = torch.full((groups, n), 127, dtype=torch.uint8) if of.scale_dtype is torch.uint8 else torch.full((groups, n), 0.5).to(of.scale_dtype)
    zeros = torch.arange(groups * n).view(groups, n).remainder(16).bfloat16() if of.zeros else None
    weight = QuantizedWeight.packed(codes, scales, zeros, torch.tensor([4.0]) if of.factor else None, weight_format=of.name)
    problem, device = Problem(128, n, 128, of.name), Device.named("H200")
    configs = {config.scale_sums: config for config in op.space(problem, device)}
    if any(config.pieces for config in op.space(dataclasses.replace(problem, m=1), device)):
        configs["pieces"] = Config(128, 64, pieces=True)
    for config in configs.values():
        with forced_config(op.plan, config):
            assert torch.equal(quantized_matmul(torch.eye(128).bfloat16(), **weight.arguments), weight.dequantize().T)


def test_scales_of_16_bits_of_either_kind_and_leading_axes():
    weight = QuantizedWeight.of(torch.randn(80, 256).bfloat16(), "int4-128-zeros")
    x = torch.randn(2, 3, 256).bfloat16()
    expected = x.double() @ weight.dequantize(torch.float64).T
    half = {**weight.arguments, "scales": weight.scales.half()}
    for arguments in (weight.arguments, half):
        assert (quantized_matmul(x, **arguments).double() - expected).abs().max() < 2**-7 * expected.abs().max()
    assert quantized_matmul(x[:0], **weight.arguments).shape == (0, 3, 80)


@pytest.mark.parametrize("name", ["int4-128", "mxfp4"])
def test_pieces_keep_rows_of_any_size_apart(name):
    """Each factor of a row is its own, numbers far below the largest are lost only beside it, and
    what is not finite spoils its own row.
    """
    weight = QuantizedWeight.of(torch.randn(64, 256).bfloat16(), name)
    x = torch.randn(5, 256).bfloat16()
    x[1], x[2] = x[1] * 2.0**100, x[2] * 2.0**-100
    x[3, ::7] = 0.0
    x[4, 200] = torch.inf
    expected = x.double() @ weight.dequantize(torch.float64).T
    with forced_config(op.plan, Config(8, 64, pieces=True)):
        found = quantized_matmul(x, **weight.arguments)
    assert not found[4].isfinite().any()
    assert ((found[:4].double() - expected[:4]).abs().amax(1) < 2**-8 * expected[:4].abs().amax(1)).all()


def test_shares_of_k_that_end_unevenly_are_summed():
    problem = Problem(3, 130, 640 + 128, bias=True)
    inputs = problem.inputs(torch.device("cpu"))
    expected = op.reference(**{k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in inputs.items()})
    for runs, split in ((1, 4), (2, 3), (4, 2), (4, 8)):
        with forced_config(op.plan, Config(8, 64, runs, split, scale_sums=True)):
            assert (quantized_matmul(**inputs).double() - expected).abs().max() < 2**-7 * expected.abs().max()


@pytest.mark.parametrize("name", ["int4-128-zeros", "mxfp4", "int8"])
def test_tiles_of_any_number_of_rows_cover_all(name):
    """The last tile is cut behind, in, and in front of its last rows; none is where one has no
    rows.
    """
    for m, split in ((28, 1), (25, 2), (20, 1), (17, 3), (13, 2)):
        config = Config(8, 64, 1, split, extra_m=6)
        for given in ({"bias": True}, {"norm": True, "residual": True}):
            check_op(op, Problem(m, 130, 640, name, **given), torch.device("cpu"), config)
    sm_90 = Device.named("H200")
    found = {c.rows for c in op.space(Problem(129, 8192, 8192, name), sm_90).legal}
    assert {128, 144, 160} <= found
    assert {c.rows for c in op.space(Problem(128, 8192, 8192, name), sm_90).legal} <= {64, 128}
    config = Config(128, 128, num_worker_warps=8, tma_scales=name != "int8")
    assert [legal(Problem(m, 256, 256, name), dataclasses.replace(config, extra_m=48), sm_90) for m in (160, 161)] == [False, True]
    assert not legal(Problem(200, 256, 256, name), dataclasses.replace(config, extra_m=16, pieces=True), sm_90)


def test_weights_that_come_ahead_change_no_bit():
    problem = Problem(3, 130, 640 + 128, bias=True)
    inputs = problem.inputs(torch.device("cpu"))
    for runs, split, most, pieces in ((1, 4, 1, True), (2, 3, 1, True), (2, 1, 3, True), (1, 2, 2, True), (2, 3, 1, False)):
        found = []
        for ahead in range(most + 1):
            config = Config(4, 64, runs, split, pieces=pieces, ahead=ahead)
            with forced_config(op.plan, config), interpret.checking(races=True), counted() as launches:
                found.append(quantized_matmul(**inputs))
            assert launches["quantized_matmul_sum_kernel"] == (split > 1)
        assert all(torch.equal(found[0], other) for other in found[1:])
    device = Device.named("H200")
    assert {(c.pieces, c.ahead) for c in op.space(problem, device).legal if c.tile_m <= 64} == {(True, 0), (True, 1), (False, 0), (False, 1)}
    # One row of 6144 x 4096 with a norm, H200: four shares whose first half comes ahead cost least
    # where a reader sums them, and where a launch does, since that loads them at once (without a
    # norm 7.5 us; of two shares, summed one after the other, 8.9).
    for shares in (0, LEFT, 4):
        wide = Problem(1, 6144, 4096, norm=True, residual=True, shares=shares, given=2 * (shares > 0))
        found, _ = op.DECISION.decide(wide, device)
        assert (found.parts(wide), found.ahead) == (4, 1)
    # A block that needs an SM for itself begins too late for that, whoever reads the result.
    for shares in (0, LEFT):
        found, _ = op.DECISION.decide(Problem(1, 28672, 4096, "e4m3", norm=True, residual=True, shares=shares), device)
        assert (found.tile_n, found.occupancy, found.ahead) == (64, 4, 1)
    assert not op.CHOICES.legal(problem, Config(4, 64, 4, 2, pieces=True, ahead=2, occupancy=4), device)  # a share has one step


def test_shares_of_a_sum_are_left_and_taken():
    """A reader that sums shares finds what the launch that sums them writes, bit for bit."""
    k, n = 640, 130
    weight = QuantizedWeight.of(torch.randn(n, k).bfloat16(), "int4-128").arguments
    given = torch.randn(3, 2, 2 * k)
    norm, bias, x = (torch.randn(s).bfloat16() for s in ((k,), (n,), (2, k)))
    tensors, how = tuple(weight.get(name) for name in ("words", "scales", "zeros", "factor")), (1e-6, 0.0, False, "int4-128")
    whole = (given[0] + given[1] + given[2]).bfloat16()
    first, second = given[..., :k], given[..., k:]
    for pieces in (True, False):
        for shared, summed in (
            ((x, norm, first, None), (x, norm, whole[:, :k], None)),
            ((first, None, None, second), (whole[:, :k], None, None, whole[:, k:])),
        ):
            with forced_config(op.plan, Config(2, 64, 1, 3, pieces=pieces, ahead=int(pieces), scale_sums=True)), interpret.checking(races=True):
                found = []
                for given_x, *before in (shared, summed):
                    out, left = torch.empty(2, n).bfloat16(), torch.empty(3, 2, n)
                    totals = [torch.empty(2, k).bfloat16() if before[1] is not None else None for _ in range(2)]
                    for where, total in zip((out, left), totals, strict=True):
                        op.quantized_matmul_out(given_x, *tensors, bias, *before, *how, where, total)
                    assert torch.equal((left[0] + left[1] + left[2]).bfloat16(), out)
                    found.append((out, totals[0]))
            (out, total), (expected, sums) = found
            assert torch.equal(out, expected)
            assert sums is None or torch.equal(total, sums)
            assert out.isfinite().all()


def test_what_becomes_of_x_first_is_what_the_ops_make_of_it():
    """The norm alone rounds less."""
    x, y, norm = (torch.randn(s).bfloat16() for s in ((3, 2, 1280), (3, 2, 1280), (1280,)))
    weight = QuantizedWeight.of(torch.randn(70, 1280).bfloat16(), "int4-128").arguments
    normed, total = tilewright.rms_norm(x, norm, 1e-5, weight_offset=1.0, residual=y)
    active = tilewright.silu_mul(x, y, gelu_tanh=True)
    for pieces in (True, False):
        with forced_config(op.plan, Config(8, 64, pieces=pieces)):
            found, sums = quantized_matmul(x, **weight, norm=norm, eps=1e-5, weight_offset=1.0, residual=y)
            assert torch.equal(sums, total)
            torch.testing.assert_close(found, quantized_matmul(normed, **weight), atol=2**-8 * found.abs().max().item(), rtol=2**-7)
            assert torch.equal(quantized_matmul(x, **weight, up=y, gelu_tanh=True), quantized_matmul(active, **weight))


WRONG = [
    ({"norm": torch.ones(64)}, r"norm.dtype must be bfloat16.*, got float32"),
    ({"norm": torch.ones(32).bfloat16()}, r"norm.shape must be \(64,\), got \(32,\)"),
    ({"norm": torch.ones(64).bfloat16(), "eps": 0.0}, r"eps must be .*, got 0.0"),
    ({"residual": torch.ones(2, 64).bfloat16()}, r"residual must be None without a norm, got a tensor"),
    ({"up": torch.ones(2, 32).bfloat16()}, r"up.shape must be \(2, 64\), got \(2, 32\)"),
    ({"up": torch.ones(2, 64).bfloat16(), "norm": torch.ones(64).bfloat16()}, r"up must be None with a norm, got a tensor"),
]


@pytest.mark.parametrize(("given", "message"), WRONG, ids=str)
def test_what_x_cannot_become_is_named(given, message):
    weight = QuantizedWeight.of(torch.randn(70, 64).bfloat16(), "int4-64")
    with pytest.raises((TypeError, ValueError), match=message):
        quantized_matmul(torch.ones(2, 64).bfloat16(), **weight.arguments, **given)


# m and format of 8192 x 8192, and the configs within 8 % of the fastest of those that an H200 was
# timed with (2026-11-22): tile_m, tile_n, runs, split_k, occupancy.
FAST = {
    (1, "int4-128"): [(8, 64, 4, 4, 4)],  # 12.6 us: its first weights come ahead, 2026-11-29
    (16, "int4-128"): [(16, 64, 1, 4, 4), (16, 64, 2, 4, 4), (16, 64, 4, 4, 4), (16, 128, 1, 4, 2), (16, 64, 2, 2, 2)],
    (64, "int4-128"): [(64, 64, 2, 2, 2), (64, 128, 1, 4, 2), (64, 128, 2, 2, 1)],
    (512, "int4-128"): [(256, 128, 1, 1, 1)],
    (4096, "int4-128"): [(256, 128, 1, 1, 1)],
    (1, "e4m3"): [(8, 64, 2, 2, 4), (8, 64, 2, 4, 4), (8, 64, 4, 4, 4), (8, 128, 1, 4, 2), (8, 128, 1, 8, 4)],
    (512, "e4m3"): [(256, 128, 1, 1, 1)],
    (1, "mxfp4"): [(1, 64, 4, 4, 4), (1, 64, 4, 3, 3), (1, 64, 2, 4, 4), (1, 128, 4, 4, 2), (1, 128, 2, 4, 2)],  # pieces, 2026-11-23
    (2048, "mxfp4"): [(128, 128, 1, 1, 1)],
}


@pytest.mark.parametrize("timed", FAST, ids=str)
def test_the_model_takes_a_config_that_was_fast(timed):
    m, name = timed
    found = op.space(Problem(m, 8192, 8192, name), Device.named("H200"))[0]
    assert (found.tile_m, found.tile_n, found.runs, found.split_k, found.occupancy) in FAST[timed]
    # 8192 x 8192, scales by TMA and without: 64 rows 22.0 and 26.3 us.
    assert found.pieces == (timed == (1, "mxfp4"))
    assert found.tma_scales == (Problem(m, 8192, 8192, name).format.group > 0 and not found.pieces)


def test_panels_of_an_expert_stand_side_by_side():
    """Its weights then come from memory once. Ids of another rank have no panel."""
    ids = torch.tensor([3, 1, 3, 7, 1, 3, 0, 1], dtype=torch.int32)
    panels, rows = torch.zeros(9, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    x, weights, shared = torch.zeros(4, 128).bfloat16(), torch.ones(4, 2), torch.zeros(4, 2)
    codes, factors = torch.zeros(8, 2, 2, 4, 2, 32, 2).to(torch.float8_e4m3fn), torch.zeros(8, 2, 1, 1, 2, 2, 2)
    constants = (4, 2, 8, 2, 1, 4, False, 2)  # 4 experts, panels of 2 rows
    interpret(quantized_moe_pieces_kernel, (8, 1), (ids, weights, x, panels, rows, shared, codes, factors, *constants))
    assert panels[:6].tolist() == [5, 0, 1, 1, 3, 3]
    assert rows.tolist() == [6, 2, 7, -1, 3, 8, 0, 4]


# tokens and experts of a layer of gpt-oss with mxfp4, and the us of the fastest of its candidates
# that an H200 was timed with (2026-11-24).
EXPERTS_US = {(1, 32): 26.5, (16, 32): 140.1, (256, 32): 281.5, (1, 128): 25.1, (16, 128): 196.8, (256, 128): 729.2}


@pytest.mark.parametrize("timed", EXPERTS_US, ids=str)
def test_the_model_takes_configs_of_experts_that_were_fast(timed):
    tokens, experts = timed
    problem = moe.Problem(tokens, 4, experts, 2880, 2880, bias=True, alpha=1.702, limit=7.0, up_offset=1.0)
    space = moe.space(problem, Device.named("H200"))
    found, times = space[0], {row.config: row.time_us for row in stored_times("H200", moe).timed if row.problem == problem and row.config in space}
    assert min(times.values()) == pytest.approx(EXPERTS_US[timed], abs=0.1)
    assert times[found] < 1.01 * min(times.values())
    assert found.pieces == (tokens <= 16)


# ------------------------------------------------------------------------------- checkpoints
def int4_tensors(n, k, group):
    codes, zeros = torch.randint(0, 16, (n, k)), torch.randint(1, 16, (k // group, n))
    scales = (torch.rand(k // group, n) + 0.5).half()
    weight = (codes - zeros.T.repeat_interleave(group, 1)) * scales.double().T.repeat_interleave(group, 1)
    return codes, zeros, scales, weight


@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_gptq_awq_and_compressed_tensors_are_the_same_weight(group):
    n, k = 16, 512
    codes, zeros, scales, weight = int4_tensors(n, k, group)
    gptq, order = tensors.from_gptq(words_of(codes.T, 0), words_of(zeros - 1, 1), scales)
    assert order is None
    second, _ = tensors.from_gptq(words_of(codes.T, 0), words_of(zeros, 1), scales, zeros_off_by_one=False)
    places = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # the column of each nibble
    awq = tensors.from_awq(
        *(words_of(x.unflatten(1, (-1, 8))[..., places].flatten(1), 1) for x in (codes.T, zeros)),
        scales,
    )
    packed = tensors.from_compressed_tensors(words_of(codes, 1), scales.T.contiguous(), words_of(zeros.T, 0))
    for found in (gptq, second, awq, packed):
        assert found.weight_format == f"int4-{min(group, 128)}-zeros"
        assert torch.equal(found.dequantize(torch.float64), weight)


def test_symmetric_codes_lose_their_zero_points():
    codes, zeros, scales, _ = int4_tensors(8, 256, 128)
    zeros[:] = 8
    found, _ = tensors.from_gptq(words_of(codes.T, 0), words_of(zeros - 1, 1), scales)
    assert found.weight_format == "int4-128"
    same = tensors.from_compressed_tensors(words_of(codes, 1), scales.T.contiguous())
    assert torch.equal(found.words, same.words)


def test_act_order_sorts_k_and_says_how():
    n, k, group = 8, 256, 64
    codes, zeros, scales, _ = int4_tensors(n, k, group)
    g_idx = torch.randperm(k) // group
    weight = (codes - zeros.T[:, g_idx]) * scales.double().T[:, g_idx]
    found, order = tensors.from_gptq(words_of(codes.T, 0), words_of(zeros - 1, 1), scales, g_idx.int())
    x = torch.randn(4, k).bfloat16()
    expected = x.double() @ weight.T
    assert (quantized_matmul(x[:, order], **found.arguments).double() - expected).abs().max() < 2**-7 * expected.abs().max()
    with pytest.raises(ValueError, match=r"g_idx must be 64 of each of 4 groups, got groups of unlike sizes"):
        tensors.from_gptq(words_of(codes.T, 0), words_of(zeros - 1, 1), scales, torch.zeros(k, dtype=torch.int32))


def test_floats_and_bytes_of_checkpoints():
    n, k = 136, 256
    weight = (torch.randn(n, k) / 4).to(torch.float8_e4m3fn)
    blocks = torch.rand(2, 2) + 0.5
    each = blocks.double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)
    assert torch.equal(tensors.from_fp8(weight, blocks).dequantize(torch.float64), weight.double() * each)
    rows = torch.rand(n, 1)
    for scale in (rows, rows[0, 0], rows[:, 0]):
        wide = scale.double().view(-1, 1) if scale.dim() else scale.double()
        assert torch.equal(tensors.from_fp8(weight, scale).dequantize(torch.float64), weight.double() * wide)
    integers = torch.randint(-128, 128, (n, k), dtype=torch.int8)
    assert torch.equal(tensors.from_int8(integers, rows).dequantize(torch.float64), integers * rows.double())


def test_fp4_of_checkpoints():
    n, k = 72, 192
    numbers = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    exponents = torch.randint(100, 140, (n, k // 32), dtype=torch.uint8)
    found = tensors.from_mxfp4(packed.view(n, k // 32, 16), exponents)
    assert torch.equal(found.dequantize(torch.float64), numbers[codes.long()] * 2.0 ** (exponents.double() - 127).repeat_interleave(32, 1))
    scale, factor = (torch.rand(n, k // 16) * 100).to(torch.float8_e4m3fn), torch.tensor(0.01)
    found = tensors.from_nvfp4(packed, scale, factor)
    assert torch.equal(found.dequantize(torch.float64), numbers[codes.long()] * scale.double().repeat_interleave(16, 1) * factor.double())


# ------------------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: QuantizedWeight.of(torch.zeros(4, 128), "int4-100"), r"weight_format must be .*one of int4-128, .*nvfp4, got 'int4-100'"),
        (
            lambda: QuantizedWeight.of(torch.zeros(4, 96), "int4-128"),
            r"k of the weight must be a multiple of 128, the group of int4-128 \(formats for this k: int4-32, .*mxfp4, nvfp4\), got 96",
        ),
        (
            lambda: QuantizedWeight.of(torch.zeros(4, 33), "int8"),
            r"k of the weight must be a multiple of 16 for int8 \(no format takes this k\), got 33",
        ),
        (lambda: QuantizedWeight.of(torch.full((4, 32), torch.inf), "mxfp4"), r"weight must be finite"),
        (lambda: QuantizedWeight.of(torch.zeros(4, 32).double(), "mxfp4"), r"weight.dtype must be one of bfloat16, float16, float32, got float64"),
        (lambda: tensors.from_fp8(torch.full((4, 32), torch.nan).to(torch.float8_e4m3fn), torch.ones(1)), r"codes must be finite, got a NaN of e4m3"),
        (lambda: tensors.from_fp8(torch.zeros(4, 32).to(torch.float8_e4m3fn), torch.ones(3)), r"scale must be one, or 4 of rows, got shape \(3,\)"),
        (
            lambda: tensors.from_mxfp4(torch.zeros(4, 1, 16, dtype=torch.uint8), torch.full((4, 1), 255, dtype=torch.uint8)),
            r"scales must be at most 2\*\*17, got 2\*\*128",
        ),
        (
            lambda: tensors.from_compressed_tensors(torch.zeros(4, 12, dtype=torch.int32), torch.ones(4, 2)),
            r"groups of scales must be of 32 or 64 weights or a multiple of 128 in k = 96, got 2 groups",
        ),
    ],
)
def test_bad_weights_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_format": "int5"}, "weight_format must be .*one of"),
        ({"weight_format": "mxfp4"}, r"scales.dtype must be uint8, got bfloat16"),
        ({"weight_format": "int4-64-zeros"}, r"scales.shape must be \(4, 70\), got \(2, 70\)"),
        ({"weight_format": "int4-128"}, r"zeros must be None for int4-128, got a tensor"),
        ({"zeros": None}, r"zeros must be given for int4-128-zeros, got None"),
        ({"factor": torch.ones(1)}, r"factor must be None for int4-128-zeros, got a tensor"),
        ({"x": torch.zeros(3, 128).bfloat16()}, r"words.shape must be \(2, 1, 64, 16\), got \(2, 2, 64, 16\)"),
        ({"x": torch.zeros(3, 200).bfloat16()}, r"k of the weight must be a multiple of 128"),
        ({"x": torch.zeros(3, 256)}, r"x.dtype must be bfloat16, got float32"),
        ({"bias": torch.zeros(71).bfloat16()}, r"bias.shape must be \(70,\), got \(71,\)"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, message):
    weight = QuantizedWeight.of(torch.randn(70, 256).bfloat16(), "int4-128-zeros")
    with pytest.raises((ValueError, TypeError), match=message):
        tilewright.quantized_matmul(**{"x": torch.zeros(3, 256).bfloat16(), **weight.arguments, **change})
