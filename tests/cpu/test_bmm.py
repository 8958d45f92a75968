"""Tests special to `bmm`: layouts, broadcasting, scales, messages."""

from dataclasses import replace
from itertools import product

import binaries
import pytest
import torch
from moved import SIZES, check_moved, moved_configs

from tilewright import bmm, interpret
from tilewright.compile.job import Job
from tilewright.launch import Device, counted, forced_config, traced
from tilewright.ops import bmm as op
from tilewright.ops.bmm import Config, Problem
from tilewright.ops.common.scaling import Scaling, dequantize, empty_scales, random_scales, scale_shapes, scaling_of
from tilewright.testing import check_op, run_op

CPU = torch.device("cpu")
H200 = Device.named("H200")
BF16, FP32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
KINDS = (Scaling.TENSOR, Scaling.ROW, Scaling.BLOCK)


pytestmark = pytest.mark.usefixtures("inference")


@pytest.mark.parametrize(("trans_a", "trans_b"), list(product((False, True), repeat=2)))
@pytest.mark.parametrize(("persistent", "swap_ab"), [(False, False), (True, False), (False, True)])
def test_every_layout_and_broadcast(trans_a, trans_b, persistent, swap_ab):
    for one_a, one_b in ((False, False), (True, False), (False, True)):
        problem = Problem(3, 37, 45, 52, BF16, trans_a, trans_b, one_a, one_b)
        check_op(op, problem, CPU, Config(16, 32, 32, group=2, swap_ab=swap_ab, persistent=persistent))


@pytest.mark.parametrize(("trans_a", "trans_b"), list(product((False, True), repeat=2)))
@pytest.mark.parametrize(("persistent", "swap_ab"), [(False, False), (True, False), (False, True)])
def test_an_uneven_tile_may_be_cut_anywhere(trans_a, trans_b, persistent, swap_ab):
    config = Config(16, 32, 32, group=2, swap_ab=swap_ab, persistent=persistent, extra_n=12 if swap_ab else 16)
    for m, n in ((37, 49), (28, 48), (42, 97), (47, 80)):
        check_op(op, Problem(2, m, n, 52, BF16, trans_a, trans_b, one_b=m == 28), CPU, config)
    assert not op.legal(Problem(2, 16, 32, 52), config, Device.named("H200"))
    assert not op.legal(Problem(2, 64, 64, 64, E4M3, trans_b=True, scaling=Scaling.ROW), config, Device.named("H200"))


MOVED = moved_configs(Config)


@pytest.mark.parametrize("config", MOVED.values(), ids=MOVED)
@pytest.mark.parametrize(("trans_a", "trans_b"), list(product((False, True), repeat=2)))
def test_the_last_tiles_begin_earlier_and_write_what_is_theirs(config, trans_a, trans_b):
    """Also with one matrix for all; an element of the next matrix is another block's, too."""
    options = [{"one_a": m == 37, "one_b": m == 50, "out_dtype": FP32 if m > 37 else BF16} for m, _ in SIZES]
    problems = [Problem(3, m, n, 70, BF16, trans_a, trans_b, **more) for (m, n), more in zip(SIZES, options, strict=True)]
    check_moved(op, problems, config, least=3)


def test_moved_tiles_write_an_output_whose_axes_lie_in_any_order():
    inputs = Problem(3, 37, 80, 70, BF16).inputs(CPU)
    out = torch.empty(37, 3, 80, dtype=BF16).transpose(0, 1)
    with forced_config(op.plan, MOVED["uneven"]), interpret.checking(races=True, unwritten=True, order=3):
        bmm(**inputs, out=out)
    torch.testing.assert_close(out, bmm(**inputs))


def test_tiles_move_where_rows_hang_over_on_a_gpu_with_tma():
    long, even = Problem(9, 336, 416, 1920), Problem(9, 384, 416, 1920)
    assert [c for c in op.space(long, H200) if c.moved]
    assert not [c for c in op.space(even, H200) if c.moved and 384 % c.tile_shape[0] == 0]
    assert not [c for c in op.space(long, Device.named("A100")) if c.moved], "its loads leave out what is not there"
    assert not [c for c in op.CHOICES.candidates(replace(long, n=424), H200) if c.moved], "stores of rows off 32 bytes are narrow"
    assert not [c for c in op.CHOICES.candidates(replace(long, batch=900), H200) if c.moved], "in many waves others hide a slow tile"
    assert not [c for c in op.CHOICES.candidates(replace(long, dtype=E4M3, trans_b=True, scaling=Scaling.ROW), H200) if c.moved]
    plain = Config(128, 128, 64, num_ctas=1, moved=True)
    assert op.legal(long, plain, H200)
    for choices in ({"persistent": True}, {"num_ctas": 2}, {"tile_m": 64, "extra_n": 4}, {"tile_m": 512}):
        assert not op.legal(long, replace(plain, **choices), H200), choices


def test_wide_moved_tiles_of_fp32_spill_and_are_not_legal():
    problem, widest = Problem(5, 600, 384, 1000, torch.float16, out_dtype=FP32), Config(128, 256, 64, extra_n=128, moved=True)
    assert not op.legal(problem, widest, H200)
    assert op.legal(replace(problem, out_dtype=torch.float16), widest, H200)
    wide = replace(widest, extra_n=0)
    assert op.legal(problem, wide, H200)
    assert not op.legal(problem, wide, Device.named("B200"))


@pytest.mark.parametrize(
    ("config", "out_dtype"),
    [
        (Config(128, 128, 64, num_ctas=1, num_worker_warps=4, moved=True), BF16),
        (Config(128, 256, 64, num_ctas=1, num_worker_warps=8, latency=4, moved=True), FP32),
        (Config(128, 128, 64, num_ctas=1, num_worker_warps=4, extra_n=16, swap_ab=True, moved=True), BF16),
        (Config(128, 256, 64, num_ctas=1, num_worker_warps=8, latency=4, extra_n=16, moved=True), FP32),
    ],
    ids=["plain", "fp32", "uneven, weights first", "uneven, fp32"],
)
def test_moved_tiles_keep_tma_and_wide_stores_and_do_not_spill(config, out_dtype):
    problem = Problem(4, 344, 528, 1000, out_dtype=out_dtype)
    assert op.legal(problem, config, H200)
    with traced(H200) as launches:
        run_op(op, problem.inputs(torch.device("meta")), config)
    found = binaries.made(Job.of(launches[0], "sm_90")).resources
    assert not found.spills
    assert found.count("UTMALDG") >= 2
    assert not found.count("LDG")
    tile_m, tile_n = config.tile_shape
    assert found.count("STG") <= tile_m * tile_n * out_dtype.itemsize // (16 * 32 * config.num_worker_warps)  # of 16 bytes a thread


@pytest.mark.parametrize("scaling", KINDS)
@pytest.mark.parametrize(("tile_n", "tile_k"), [(32, 128), (128, 32), (256, 128), (64, 64)])
def test_tiles_narrower_and_wider_than_a_block_of_scales(scaling, tile_n, tile_k):
    for swap_ab in (False, True):
        check_op(op, Problem(2, 19, 300, 290, E4M3, trans_b=True, scaling=scaling), CPU, Config(16, tile_n, tile_k, swap_ab=swap_ab))


def scaled_inputs(scaling, batch=2, m=20, n=150, k=300):
    a, b = torch.randn(batch, m, k).to(E4M3), torch.randn(batch, n, k).to(E4M3)
    shapes = scale_shapes(scaling, m, n, k, batch_a=batch, batch_b=batch)
    return a, b, *(random_scales(shape, "cpu", scaling=scaling) for shape in shapes)


@pytest.mark.parametrize("scaling", KINDS)
def test_scales_of_any_value(scaling):
    """Negative, zero and NaN scales act like a multiplication."""
    a, b, scale_a, scale_b = scaled_inputs(scaling)
    scale_a[0] = 0.0
    scale_b.neg_()
    scale_b[(1, ..., -1) if scale_b.dim() > 1 else 1] = torch.nan
    out = bmm(a, b, scale_a=scale_a, scale_b=scale_b, trans_b=True, out_dtype=torch.float32)
    truth = dequantize(a.double(), scale_a.double()) @ dequantize(b.double(), scale_b.double()).mT
    assert out[0].eq(0).all()
    assert out[1].isnan().any()
    torch.testing.assert_close(out.double(), truth, rtol=1e-5, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("scaling", KINDS)
def test_scales_of_any_strides_give_the_same_bits(scaling):
    a, b, scale_a, scale_b = scaled_inputs(scaling)
    assert scale_a.stride(-2 if scaling is Scaling.BLOCK else -1) == 1
    out = bmm(a, b, scale_a=scale_a, scale_b=scale_b, trans_b=True)
    wide = torch.empty(*scale_a.shape, 3)[..., 1].copy_(scale_a)
    assert torch.equal(out, bmm(a, b, scale_a=wide, scale_b=scale_b.contiguous(), trans_b=True))


def test_one_scale_for_all():
    a, b, scale_a, scale_b = scaled_inputs(Scaling.TENSOR)
    one = bmm(a, b, scale_a=scale_a[0], scale_b=scale_b[0], trans_b=True)
    each = bmm(a, b, scale_a=scale_a[:1].expand(2), scale_b=scale_b[:1].expand(2).contiguous(), trans_b=True)
    assert torch.equal(one, each)
    assert torch.equal(one, bmm(a, b, scale_a=scale_a[:1].expand(2).contiguous(), scale_b=scale_b[0], trans_b=True))


def test_group_scales_are_one_wide_load_away():
    assert empty_scales((2, 10, 3), "cpu", scaling=Scaling.BLOCK).stride() == (36, 1, 12)


def test_matrices_with_a_stride_are_read_in_place():
    wide = torch.randn(3, 20, 96)
    a, b = wide[:, :, 8:40].bfloat16(), torch.randn(3, 64, 24).bfloat16()[:, ::2]
    torch.testing.assert_close(bmm(a, b), a @ b)


def test_empty_and_k_0():
    with counted() as counts:
        for batch, m, n in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
            assert bmm(torch.empty(batch, m, 8, dtype=BF16), torch.empty(batch, 8, n, dtype=BF16)).shape == (batch, m, n)
        assert bmm(torch.empty(1, 3, 8, dtype=BF16), torch.empty(0, 8, 2, dtype=BF16)).shape == (0, 3, 2)
        assert bmm(torch.empty(2, 3, 0, dtype=BF16), torch.empty(1, 0, 2, dtype=BF16)).eq(0).all()
    assert not counts


def test_the_default_keeps_the_tensor_cores_fed():
    """Tiles of 128x128 and more if they fill a wave.

    No plan leaves most SMs without a tile if there are enough tiles.
    """
    device = Device.named("H200")
    for batch, n in product((8, 32, 256), (512, 1024, 2048, 4096)):
        problem = Problem(batch, n, n, n)
        config = op.space(problem, device)[0]
        if batch * n**2 >= device.sms << 14:
            assert config.tile_m * config.tile_n >= 1 << 14, (problem, config)
        assert 2 * problem.gemm.tiles(config) >= device.sms, (problem, config)


A, B = torch.zeros(2, 4, 256, dtype=BF16), torch.zeros(2, 256, 8, dtype=BF16)
A8, B8 = A.to(E4M3), B.mT.contiguous().to(E4M3)
ONE, ROWS, COLS = torch.ones(()), torch.ones(2, 4), torch.ones(2, 8)
BAD = [
    ({"a": A[0]}, ValueError, r"a.dim\(\) must be 3, got 2"),
    ({"a": A.float(), "b": B.float()}, ValueError, r"a.dtype must be one of bfloat16, float16, float8_e4m3fn, float8_e5m2, got float32"),
    ({"b": B.half()}, ValueError, r"b.dtype must be bfloat16, got float16"),
    ({"trans_b": True}, ValueError, r"b.shape\[2\] must be 256, the k of a \(2, 4, 256\), got 8"),
    ({"a": A[:1].expand(3, 4, 256)}, ValueError, r"b.shape\[0\] must be 1 or 3"),
    ({"b": B.mT}, ValueError, r"b.stride\(-1\) must be 1, got 8"),
    ({"out_dtype": torch.float16}, ValueError, r"out_dtype must be one of bfloat16, float32, got torch.float16"),
    ({"scale_a": ONE, "scale_b": ONE}, ValueError, r"scale_a must be None for bfloat16 operands, got Tensor"),
]
FP8 = {"a": A8, "b": B8, "trans_b": True}
BAD_SCALES = [
    ({"scale_a": ONE}, ValueError, r"scale_b must be given together with the other operand's scale, got None"),
    ({"scale_a": ROWS, "scale_b": ONE}, ValueError, r"scale_b.shape must be \(2, 8\) \(ROW, by the axes of scale_a; allowed are TENSOR \(2,\)"),
    ({"scale_a": ROWS, "scale_b": ROWS}, ValueError, r"scale_b.shape must be \(2, 8\)"),
    ({"scale_a": ONE, "scale_b": 1.0}, TypeError, r"scale_b must be a torch.Tensor, got float"),
    ({"scale_a": ROWS.half(), "scale_b": COLS}, ValueError, r"scale_a.dtype must be float32, got float16"),
    ({"scale_a": torch.ones(2, 4, 3), "scale_b": torch.ones(2, 1, 2)}, ValueError, r"scale_a.shape must be \(2, 4, 2\) \(BLOCK"),
    ({"scale_a": torch.ones(2, 4, 2, 1), "scale_b": COLS}, ValueError, r"scale_a.shape must be TENSOR \(2,\), ROW \(2, 4\), BLOCK \(2, 4, 2\), got"),
]


@pytest.mark.parametrize(("change", "error", "message"), [*BAD, *(({**FP8, **change}, *rest) for change, *rest in BAD_SCALES)])
def test_bad_input_is_named_and_nothing_is_launched(change, error, message):
    with counted() as counts, pytest.raises(error, match=message):
        bmm(**{"a": A, "b": B, **change})
    assert not counts


def test_scales_of_single_matrices():
    """The same rules without a batch axis, as in matmul."""
    a = torch.zeros(4, 256, dtype=E4M3)
    for kind in KINDS:
        shape_a, shape_b = scale_shapes(kind, 4, 300, 256)
        assert scaling_of(a, torch.ones(shape_a), torch.ones(shape_b), 4, 300, 256) is kind
    assert scaling_of(a, None, None, 4, 300, 256) is Scaling.NONE
    assert scale_shapes(Scaling.BLOCK, 4, 300, 256) == ((4, 2), (3, 2))
