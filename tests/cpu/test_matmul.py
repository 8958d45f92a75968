"""matmul: every formulation on every layout, the edges of the public function, and the plans of the
shapes that matter.
"""

from dataclasses import replace
from itertools import product

import binaries
import pytest
import torch
import torch.nn.functional as F
from moved import SIZES, check_moved, moved_configs

from tilewright import interpret
from tilewright.compile.job import Job
from tilewright.launch import Device, counted, forced_config, traced
from tilewright.ops import bmm, matmul as op
from tilewright.ops.common.scaling import FAST_SUM, Scaling
from tilewright.ops.matmul import Config, Problem, matmul
from tilewright.testing import check_op, run_op
from tilewright.testing.cases import cases
from tilewright.testing.cases.matmul import HEADS, LLAMA_31_8B, QWEN2_7B
from tilewright.testing.drawn import draw

CPU = torch.device("cpu")
H200 = Device.named("H200")
BF16, FP32 = torch.bfloat16, torch.float32
LAYOUTS = list(product((False, True), repeat=2))
FORMULATIONS = {
    "whole": Config(16, 32, 32, group=2),
    "persistent": Config(16, 32, 32, group=2, persistent=True),
    "split": Config(16, 16, 16, group=2, split_k=3),
    "uneven": Config(16, 32, 32, group=2, extra_n=16),
    "uneven, split": Config(16, 32, 16, group=2, extra_n=16, split_k=3),
    "uneven, persistent": Config(16, 32, 32, group=2, extra_n=16, persistent=True),
    "uneven, weights first, persistent": Config(16, 32, 32, group=2, extra_n=8, swap_ab=True, persistent=True),
    "uneven, weights first, split": Config(32, 32, 16, extra_n=16, swap_ab=True, split_k=4),
    "three sums": Config(16, 16, 32, group=2, extra_n=12),
    "three sums, weights first, split": Config(16, 32, 16, extra_n=12, swap_ab=True, split_k=4),
    "three sums, persistent": Config(16, 32, 32, group=2, extra_n=24, persistent=True),
    "weights first": Config(8, 32, 32, swap_ab=True),
    "weights first, split": Config(8, 32, 16, swap_ab=True, split_k=16),
    "dot": Config(4, 8, 64, dot=True, persistent=True),
    "dot, split": Config(2, 8, 32, dot=True, split_k=2),
}


@pytest.fixture(autouse=True)
def no_grad():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("config", FORMULATIONS.values(), ids=FORMULATIONS)
@pytest.mark.parametrize(("trans_a", "trans_b"), LAYOUTS)
def test_every_formulation_on_every_layout(config, trans_a, trans_b):
    """Each of both with and without a bias."""
    bias = (list(FORMULATIONS.values()).index(config) + trans_a + trans_b) % 2 == 1
    check_op(op, Problem(37, 75, 109, BF16, trans_a, trans_b, bias), CPU, config)


@pytest.mark.parametrize("split", [2, 5, 16])
@pytest.mark.parametrize("k", [16, 112, 1000])
@pytest.mark.parametrize("swap_ab", [False, True])
def test_a_split_of_any_remainder(split, k, swap_ab):
    """A CPU holds 4 blocks at once: a tail of 0, 1, 2 or 3 tiles, and fewer steps than splits."""
    for m, n in ((5, 16), (8, 80), (40, 32), (24, 16)):
        check_op(op, Problem(m, n, k, FP32, bias=True), CPU, Config(8, 16, 16, swap_ab=swap_ab, split_k=split))


@pytest.mark.parametrize("config", [Config(64, 64, 32, split_k=3), Config(64, 64, 32, swap_ab=True, split_k=3)])
def test_a_split_tile_may_stick_out_of_the_product_by_whole_strips(config):
    for m, n in ((3, 5), (70, 150), (1, 130)):
        _, reduce = op.plan(Problem(m, n, 100), config, Device.named("CPU"))
        assert reduce.grid[1] > 1
        check_op(op, Problem(m, n, 100, BF16, bias=True), CPU, config)


@pytest.mark.parametrize("trans_b", [False, True])
def test_an_uneven_tile_may_be_cut_anywhere(trans_b):
    """The edge lies in its left part, between the parts, or in its right part; also in the first
    tile.
    """
    for n in (33, 48, 49, 48 + 20, 48 + 32, 48 + 33, 96):
        check_op(op, Problem(19, n, 70, BF16, trans_b=trans_b, bias=True), CPU, Config(16, 32, 32, extra_n=16))


def test_a_split_uneven_tile_may_be_cut_anywhere():
    for m, n in ((19, 33), (10, 48 + 20), (40, 5 * 48), (17, 6 * 48 + 33)):
        config = Config(16, 32, 16, extra_n=16, split_k=4)
        assert config.split_tiles(Problem(m, n, 200).gemm, Device.named("CPU"))
        check_op(op, Problem(m, n, 200, BF16, bias=True), CPU, config)


MOVED = moved_configs(Config)


@pytest.mark.parametrize("config", MOVED.values(), ids=MOVED)
@pytest.mark.parametrize(("trans_a", "trans_b"), LAYOUTS)
def test_the_last_tiles_begin_earlier_and_write_what_is_theirs(config, trans_a, trans_b):
    check_moved(op, [Problem(m, n, 70, BF16, trans_a, trans_b, bias=m > 20) for m, n in SIZES], config, least=3)


@pytest.mark.parametrize("scaling", [Scaling.NONE, Scaling.TENSOR, Scaling.ROW])
@pytest.mark.parametrize("config", [*MOVED.values(), Config(16, 32, 1024, moved=True, fast_runs=True)], ids=[*MOVED, "runs"])
def test_the_last_tiles_of_codes_begin_earlier(config, scaling):
    k = 9000 if config.fast_runs else 112
    problems = [Problem(m, n, k, torch.float8_e4m3fn, bias=m > 20, scaling=scaling) for m, n in ((37, 80), (24, 112), (55, 208))]
    check_moved(op, problems, config, least=1)


@pytest.mark.parametrize("extra_n", [0, 16])
def test_blocks_that_share_a_long_k_of_codes_sum_in_the_tensor_core(extra_n):
    """8-bit products have short sums there, which are enough up to 8192 of k; fp32 adds the
    shares.
    """
    long = Problem(40, 512, 16000, torch.float8_e4m3fn, scaling=Scaling.ROW)
    config = Config(32, 128, 256, swap_ab=True, extra_n=extra_n, split_k=2)

    def sums(problem, split_k, device=H200):
        return op.plan(problem, replace(config, split_k=split_k), device)[0].constants["fast_acc"]

    assert sums(long, 2)
    assert not sums(long, 1)
    assert not sums(replace(long, k=20000), 2)
    assert sums(replace(long, k=20000), 3)
    assert not sums(replace(long, out_dtype=FP32), 2)
    assert not sums(replace(long, n=128 * 140), 2), "a tile in front of the last wave has all of k"
    assert any(c.split_k > 1 and c.share(long.gemm, H200) <= 8192 for c in op.space(long, H200))
    with interpret.checking(races=True, order=3):
        check_op(op, replace(long, n=128), CPU, replace(config, split_k=3))


def test_tiles_move_where_rows_hang_over_on_a_gpu_with_tma():
    long, even = Problem(418, 4096, 3424), Problem(512, 4096, 3424)
    assert [c for c in op.space(long, H200) if c.moved]
    assert not [c for c in op.space(even, H200) if c.moved and 512 % c.tile_shape[0] == 0]
    assert not [c for c in op.space(long, Device.named("A100")) if c.moved], "its loads leave out what is not there"
    assert not [c for c in op.space(replace(long, n=4100), H200) if c.moved], "stores of rows off 32 bytes are narrow"
    codes = replace(long, dtype=torch.float8_e4m3fn, scaling=Scaling.ROW)
    assert [c for c in op.space(codes, H200) if c.moved]
    assert not [c for c in op.space(replace(codes, scaling=Scaling.BLOCK), H200) if c.moved]
    assert not [c for c in op.space(replace(codes, trans_b=False), H200) if c.moved]


@pytest.mark.parametrize("config", [Config(64, 64, 128, extra_n=64), Config(64, 64, 128, extra_n=64, split_k=3), Config(32, 128, 256)])
@pytest.mark.parametrize(("m", "n"), [(64, 128), (70, 300), (3, 65)])
def test_block_scales_of_two_halves_and_of_two_groups_in_a_step(m, n, config):
    problem = Problem(m, n, 768, torch.float8_e4m3fn, scaling=Scaling.BLOCK, bias=m > 64)
    with interpret.checking(races=True, order=3):
        check_op(op, problem, CPU, config)


def test_8_bit_sums_longer_than_a_fast_one_in_runs():
    """One step in the last run; b first and a walk over tiles too."""
    for choices in ({}, {"swap_ab": True}, {"persistent": True}, {"split_k": 3}):
        problem = Problem(40, 60, 2 * FAST_SUM + 256, torch.float8_e4m3fn, scaling=Scaling.ROW, bias=True)
        check_op(op, problem, CPU, Config(64, 64, 256, fast_runs=True, **choices))


def test_what_new_forms_need():
    """Halves of one block of b, whole steps of groups, sums beyond a fast one."""
    fp8 = Problem(3000, 5120, 32_768, torch.float8_e4m3fn, scaling=Scaling.BLOCK)
    assert {c.extra_n for c in op.space(fp8, H200) if c.extra_n} == {64}
    assert any(c.tile_k == 256 for c in op.space(fp8, H200))
    assert not any(c.tile_k == 256 for c in op.space(replace(fp8, k=32_768 + 128), H200))
    assert any(c.fast_runs for c in op.space(replace(fp8, scaling=Scaling.ROW), H200))
    assert any(c.fast_runs and c.split_k > 1 and c.tile_m * c.tile_n == 1 << 15 for c in op.space(replace(fp8, m=200, scaling=Scaling.ROW), H200))
    for short in (replace(fp8, scaling=Scaling.ROW, k=FAST_SUM), replace(fp8, scaling=Scaling.ROW, out_dtype=FP32)):
        assert not any(c.fast_runs for c in op.space(short, H200))


def test_a_split_gives_the_same_bits_in_any_block_order_and_has_no_race():
    problem, config = Problem(24, 80, 200, BF16, bias=True), Config(8, 16, 16, split_k=4)
    assert config.split_tiles(problem.gemm, Device.named("CPU"))
    for order in (1, 2, 3):
        with interpret.checking(races=True, order=order):
            check_op(op, problem, CPU, config)


@pytest.mark.parametrize("swap_ab", [False, True])
@pytest.mark.parametrize("k", [20, 109])
def test_persistent_uneven_tiles_have_no_race_and_may_have_one_step(k, swap_ab):
    """A CPU holds 4 blocks at once: each takes several tiles."""
    sizes = {"group": 2, "extra_n": 8 if swap_ab else 16, "swap_ab": swap_ab, "persistent": True}
    for m, n in ((37, 150), (24, 97), (90, 48)):
        with interpret.checking(races=True, order=3):
            check_op(op, Problem(m, n, k, BF16, bias=True), CPU, Config(16, 32, 32, **sizes))
            check_op(bmm, bmm.Problem(2, m, n, k, BF16), CPU, bmm.Config(16, 32, 32, **sizes))


def test_leading_axes_and_a_vector():
    a, b, bias = torch.randn(2, 3, 5, 48), torch.randn(20, 48), torch.randn(20)
    out = matmul(a, b, bias, trans_b=True)
    torch.testing.assert_close(out, F.linear(a, b, bias))
    assert out.is_contiguous()
    torch.testing.assert_close(matmul(a[0, 0, 0], b.T.contiguous()), b @ a[0, 0, 0])
    torch.testing.assert_close(matmul(a[:, :, 1:3], b, trans_b=True), a[:, :, 1:3] @ b.T)  # leading axes that do not fold


def test_pairs_of_columns_compile_for_any_sizes():
    """torch.compile takes no divmod of sizes that it traces."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda a, b: matmul(a, b, trans_b=True, silu_mul=True), fullgraph=True, backend="eager", dynamic=True)
    with torch.inference_mode(False), torch.no_grad():
        a, b = torch.randn(3, 16), torch.randn(20, 16)
        assert torch.equal(compiled(a, b), matmul(a, b, trans_b=True, silu_mul=True))


def test_rows_with_a_stride_are_read_in_place():
    wide, weights = torch.randn(12, 96), torch.randn(40, 128)
    a, b = wide[:, 16:64], weights[:, 32:80]
    torch.testing.assert_close(matmul(a, b, trans_b=True), a @ b.T)


def test_empty_and_k_0():
    with counted() as counts:
        assert matmul(torch.empty(0, 8), torch.empty(8, 4)).shape == (0, 4)
        assert matmul(torch.empty(2, 3, 8), torch.empty(0, 8), trans_b=True).shape == (2, 3, 0)
        assert matmul(torch.empty(3, 0), torch.empty(0, 2)).tolist() == [[0.0, 0.0]] * 3
        assert matmul(torch.empty(2, 0), torch.empty(0, 2), torch.tensor([1.0, 2.0])).tolist() == [[1.0, 2.0]] * 2
    assert not counts


A, B = torch.zeros(4, 8), torch.zeros(6, 8)
A8, B8, ONE = A.to(torch.float8_e4m3fn), B.to(torch.float8_e4m3fn), torch.ones(())


def test_scales_of_zero_nan_and_below_zero():
    a, b = torch.ones(3, 256).to(torch.float8_e4m3fn), torch.ones(4, 256).to(torch.float8_e4m3fn)
    rows = matmul(a, b, trans_b=True, scale_a=torch.tensor([0.0, torch.nan, -0.5]), scale_b=torch.ones(4))
    assert rows[0].tolist() == [0.0] * 4
    assert rows[1].isnan().all()
    assert rows[2].tolist() == [-128.0] * 4
    blocks = torch.tensor([[0.0, 1.0], [torch.nan, 1.0], [-1.0, 0.5]])
    assert matmul(a, b, trans_b=True, scale_a=blocks, scale_b=torch.ones(1, 2))[:, 0].nan_to_num(7.0).tolist() == [128.0, 7.0, -64.0]


def test_what_follows_the_product_when_k_is_0():
    bias, residual = torch.tensor([1.0, 2.0]), torch.tensor([[10.0]])
    out = matmul(torch.empty(1, 0), torch.empty(2, 0), bias, trans_b=True, silu_mul=True, residual=residual, out_scale=torch.tensor(3.0))
    torch.testing.assert_close(out, torch.nn.functional.silu(bias[:1])[None] * 2.0 * 3.0 + 10.0)


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((A, B), {}, r"a.shape\[-1\] must be 6, the k of b \(6, 8\), got 8: give trans_b=True for a b of \[n, k\], as torch.nn.Linear has it"),
        ((A, B.mT.contiguous()), {"trans_b": True}, r"a.shape\[-1\] must be 6, .* got 8: give trans_b=False for a b of \[k, n\]"),
        ((A.T.contiguous(), B), {"trans_b": True}, r"a.shape\[-1\] must be 8"),
        ((A, B), {"trans_a": True, "trans_b": True}, r"a.shape\[0\] must be 8"),
        ((A, B[0]), {"trans_b": True}, r"b.dim\(\) must be 2, got 1"),
        ((A, B.bfloat16()), {"trans_b": True}, r"b.dtype must be float32, got bfloat16"),
        ((A.double(), B.double()), {"trans_b": True}, r"a.dtype must be one of bfloat16, float16, float32, float8_e4m3fn, float8_e5m2, got float64"),
        ((A, B, torch.zeros(5)), {"trans_b": True}, r"bias.shape must be \(6,\), got \(5,\)"),
        ((A, B.T), {}, r"b.stride\(-1\) must be 1, got 8"),
        ((A[None], B), {"trans_a": True}, r"a.dim\(\) must be 2 with trans_a, got 3"),
        ((torch.zeros(()), B), {}, r"a.dim\(\) must be at least 1, got 0"),
        ((A.half(), B.half()), {"trans_b": True, "tf32": True}, r"tf32 must be False for torch.float16, got True"),
        ((A, B), {"trans_b": True, "scale_a": ONE, "scale_b": ONE}, r"scale_a must be None for float32 operands, got Tensor"),
        ((A8, B8), {"trans_b": True, "scale_a": ONE}, r"scale_b must be given together with the other operand's scale, got None"),
        ((A8, B8), {"trans_b": True, "scale_a": ONE.double(), "scale_b": ONE}, r"scale_a.dtype must be float32, got float64"),
        ((A8, B8), {"trans_b": True, "scale_a": torch.ones(5), "scale_b": torch.ones(6)}, r"scale_a.shape must be \(4,\) \(ROW.*got \(5,\)"),
        ((A8, B8), {"trans_b": True, "scale_a": torch.ones(4, 1), "scale_b": torch.ones(6)}, r"scale_b.shape must be \(1, 1\) \(BLOCK.*got \(6,\)"),
        ((A8, B8), {"trans_b": True, "out_dtype": torch.float64}, r"out_dtype must be one of bfloat16, float16, float32, got torch.float64"),
        ((A8, B8, torch.zeros(6)), {"trans_b": True}, r"bias.dtype must be bfloat16, got float32"),
        ((A, B), {"trans_b": True, "residual": torch.zeros(4, 5)}, r"residual.shape must be \(4, 6\), got \(4, 5\)"),
        ((A, B[:5]), {"trans_b": True, "silu_mul": True}, r"n of b must be even with silu_mul, got 5"),
        ((A, B), {"trans_b": True, "out_scale": torch.ones(1)}, r"out_scale.shape must be \(\), got \(1,\)"),
    ],
)
def test_a_bad_argument_is_named_and_nothing_is_launched(args, kwargs, message):
    with counted() as counts, pytest.raises(ValueError, match=message):
        matmul(*args, **kwargs)
    assert not counts


def test_an_operand_that_needs_a_gradient_is_refused():
    with torch.inference_mode(False), torch.enable_grad(), pytest.raises(ValueError, match=r"b.requires_grad must be False"):
        matmul(torch.zeros(2, 8), torch.zeros(6, 8, requires_grad=True), trans_b=True)


def test_tf32_only_on_request():
    """1 + 2**-12 is exact in float32, and 1 in TF32."""
    a, b = torch.full((16, 32), 1 + 2**-12), torch.eye(32)
    assert torch.equal(matmul(a, b), a)
    assert torch.equal(matmul(a, b, tf32=True), torch.ones(16, 32))


def test_partial_sums_are_kept_in_float32():
    """The partial sums of this row are large and cancel: in bf16 they would lose the small
    total.
    """
    k = 4096
    a, b = torch.ones(1, k, dtype=BF16), torch.full((16, k), 8.0, dtype=BF16)
    b[:, k // 2 :] = -8.0
    b[:, 0] += 1 / 16
    config = Config(8, 16, 64, swap_ab=True, split_k=2)
    with counted() as counts, forced_config(op.plan, config):
        out = matmul(a, b, trans_b=True)
    assert counts == {"matmul_kernel": 1, "matmul_reduce_kernel": 1}
    assert out.unique().tolist() == [1 / 16]


@pytest.mark.parametrize(("n", "k"), [*QWEN2_7B, *LLAMA_31_8B, *HEADS])
@pytest.mark.parametrize("m", [1, 4, 8, 16, 33, 64])
def test_a_skinny_product_keeps_most_of_the_gpu_reading(n, k, m):
    """56 SMs can draw the full memory rate (H200: 3584 x 3584 in 64-row blocks); fewer only if b is
    too small to matter. The parts of split-K leave each block a long k, or fill the last wave.
    """
    problem = Problem(m, n, k)
    config = op.space(problem, H200)[0]
    product, *reduce = op.plan(problem, config, H200)
    sms = product.grid[0] * (config.num_ctas or 1)  # each block on its own while there are any, a cluster on several
    assert sms >= min(56, n / 64), str(product)
    assert not reduce or k / config.parts(problem) >= 512


@pytest.mark.parametrize("m", [1, 2])
def test_what_stands_behind_a_product_of_a_row_or_two_on_the_cuda_cores(m):
    for behind in ({"silu_mul": True}, {"residual": True}, {"silu_mul": True, "residual": True, "out_scale": True, "bias": True}):
        for persistent in (False, True):
            check_op(op, Problem(m, 50, 109, BF16, **behind), CPU, Config(m, 8, 32, dot=True, persistent=persistent))
    problem = Problem(m, 1024, 4096, residual=True)
    first = op.space(problem, H200)[0]
    assert first.dot
    assert op.plan(problem, first, H200)[0].grid[0] >= 64


@pytest.mark.parametrize("name", ["H200", "B200", "RTX5090", "A100"])
def test_rows_are_a_runtime_value(name):
    """256 prompt lengths and every decode batch use few kernels: none has a row count among its
    constants.
    """
    device = Device.named(name)
    compiled = set()
    for m in (*range(1, 65), *range(65, 8192, 127)):
        problem = Problem(m, 3584, 3584)
        compiled |= {launch.compiled for launch in op.plan(problem, op.space(problem, device)[0], device)}
    assert len(compiled) <= 32


def test_spaces_are_short():
    for problem in (Problem(4096, 4096, 4096), Problem(16, 18_944, 3584), Problem(1, 152_064, 3584)):
        assert 10 <= len(op.space(problem, H200)) <= 40


@pytest.mark.parametrize(("m", "n", "k"), [(512, 512, 3584), (512, 18_944, 3584), (2048, 3584, 3584), (64, 512, 3584)])
def test_a_split_fills_the_last_round(m, n, k):
    problem = Problem(m, n, k)
    for config in op.space(problem, H200):
        product, *reduce = op.plan(problem, config, H200)
        if reduce:
            resident, tiles = config.resident(H200), problem.gemm.tiles(config)
            (parts, split_tiles, *_), _ = product.scratch["partial"]
            assert product.grid[0] == tiles - split_tiles + split_tiles * parts
            assert (tiles - split_tiles) % resident == 0
            assert reduce[0].grid[0] == split_tiles


@pytest.mark.parametrize("kind", ["matmul", "matmul fp8"])
def test_every_problem_has_a_config_on_every_gpu_that_can_run_it(kind):
    problems = [p for seed in (3, 5) for p in draw(kind, 60, seed)] + [p for sizes in ("bench", "real") for p in cases(op, sizes)]
    for device in map(Device.named, ("A100", "H200", "B200", "RTX5090", "GB10")):
        for problem in problems:
            if problem.dtype.itemsize > 1 or device.has_fp8:
                assert any(op.CHOICES.legal(problem, c, device) for c in op.CHOICES.candidates(problem, device)), (problem, device.name)


def test_what_the_compiler_makes_another_loop_of_is_priced_apart():
    """Runs of fast sums are not what one fast sum is: 128 x 128 takes 1.2 to 1.4 times as long."""
    problem = Problem(200, 4608, 36_864, torch.float8_e4m3fn, scaling=Scaling.ROW)
    config = Config(128, 128, 128, num_ctas=1, num_worker_warps=8)
    runs = replace(config, fast_runs=True)
    assert op.CHOICES.family_of(problem, config) != op.CHOICES.family_of(problem, runs)
    assert op.CHOICES.work(problem, config, H200)[0].kinds != op.CHOICES.work(problem, runs, H200)[0].kinds


@pytest.mark.parametrize(("m", "first", "rest"), [(33, 32, 16), (48, 32, 16), (72, 64, 16), (96, 64, 32), (160, 128, 32), (192, 128, 64)])
def test_rows_may_be_a_sum_of_two_powers_of_two(m, first, rest):
    for dtype in (BF16, torch.float8_e4m3fn):
        p = Problem(m, 7680, 5120, dtype, scaling=Scaling.TENSOR if dtype.itemsize == 1 else Scaling.NONE)
        assert (first, rest, True) in {(c.tile_m, c.extra_n, c.swap_ab) for c in op.CHOICES.candidates(p, H200)}


@pytest.mark.parametrize(("m", "tiles"), [(272, {(256, 16), (128, 16)}), (300, {(256, 64), (128, 32)}), (450, {(128, 32)}), (512, set())])
def test_several_tiles_of_a_sum_may_cover_the_rows(m, tiles):
    """They are candidates, persistent ones too, where they pad less than tiles of 128 rows."""

    def padded(height):
        return -(-m // height) * height

    for kind, problem in ((op, Problem(m, 76_800, 5120)), (bmm, bmm.Problem(52, m, 7680, 5120))):
        sums = [c for c in kind.CHOICES.candidates(problem, H200) if c.extra_n and c.swap_ab and padded(c.tile_m + c.extra_n) < padded(128)]
        assert {(c.tile_m, c.extra_n) for c in sums if c.persistent} == tiles
        assert all(kind.CHOICES.legal(problem, c, H200) for c in sums)


@pytest.mark.parametrize(
    ("n", "tiles"),
    [
        (64, set()),
        (72, {(64, 16)}),
        (160, {(64, 16), (128, 32)}),
        (280, {(64, 32), (128, 16), (256, 32)}),
        (720, {(64, 16), (128, 16)}),
        (448, {(128, 32)}),
        (768, set()),
    ],
)
def test_several_tiles_of_a_sum_may_cover_the_columns(n, tiles):
    for kind, problem in ((op, Problem(76_800, n, 5120)), (bmm, bmm.Problem(52, 4096, n, 5120))):
        found = {(c.tile_n, c.extra_n, c.persistent) for c in kind.CHOICES.candidates(problem, H200) if c.extra_n and not c.swap_ab}
        assert {(tile_n, extra) for tile_n, extra, persistent in found if persistent} == tiles


@pytest.mark.parametrize(("kind", "tile_m", "extra"), [(op, 128, 80), (bmm, 256, 16)])
def test_sums_of_a_persistent_block_do_not_wait_for_each_mma(kind, tile_m, extra):
    """Without a first step before the loop the compiler puts two waits around each."""
    problem = Problem(272, 3184, 704) if kind is op else bmm.Problem(52, 272, 3184, 704)
    config = kind.Config(tile_m, 128, 64, swap_ab=True, persistent=True, latency=4, num_ctas=1, num_worker_warps=8, extra_n=extra)
    with traced(H200) as launches:
        run_op(kind, problem.inputs(torch.device("meta")), config)
    found = binaries.made(Job.of(launches[0], "sm_90")).resources
    assert not found.spills
    assert found.count("WARPGROUP") < found.count("HGMMA")  # an arrival and a wait each


@pytest.mark.parametrize("m", [4, 8, 16, 32])
@pytest.mark.parametrize("n", [512, 1024, 2048, 2304])
def test_few_rows_are_the_columns_of_the_product(n, m):
    """Tiles of 64 mostly missing rows read b at 1.1 TB/s, these at 2.5 (16 x 2048 x 8192, H200)."""
    first = op.space(Problem(m, n, 8192, BF16), H200)[0]
    if not first.dot:
        assert first.swap_ab or first.tile_m <= 16
        assert first.tile_m <= max(16, m)
