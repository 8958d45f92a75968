"""Tests special to `grouped_gemm`: group sizes, rows of no group, offsets that change, lists,
messages.
"""

import binaries
import pytest
import torch

from tilewright import grouped_gemm, grouped_gemm_list
from tilewright.compile.job import Job
from tilewright.launch import Device, counted, traced
from tilewright.ops import grouped_gemm as op
from tilewright.ops.common.groups import expected_panels
from tilewright.ops.common.scaling import Scaling, dequantize, random_scales, scale_shapes
from tilewright.ops.grouped_gemm import Config, Problem
from tilewright.testing import assert_accurate, check_op, run_op, seeded_inputs

CPU = torch.device("cpu")
H200 = Device.named("H200")
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
KINDS = (Scaling.TENSOR, Scaling.ROW, Scaling.BLOCK)
CONFIGS = {
    "a block a tile": Config(16, 32, 32, group=2),
    "persistent": Config(16, 32, 32, group=2, persistent=True),
    "weights first": Config(8, 32, 32, swap_ab=True, persistent=True),
}


pytestmark = pytest.mark.usefixtures("inference")


SIZES = {
    "all in the first": (50, 0, 0, 0),
    "all in the last": (0, 0, 0, 50),
    "none": (0, 0, 0, 0),
    "ones": (1, 1, 1, 1),
    "whole tiles": (16, 32, 16, 16),
    "one over, one under": (17, 15, 33, 31),
    "empty between": (5, 0, 0, 40),
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_groups_of_any_size(sizes, config):
    for masked in (False, True):
        check_op(op, Problem(4, 100, 40, 52, BF16, masked=masked, sizes=sizes), CPU, config)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scaling", KINDS)
def test_scales_follow_the_rows_of_their_group(masked, scaling):
    problem = Problem(3, 70, 150, 290, E4M3, masked=masked, scaling=scaling, sizes=(19, 0, 41))
    check_op(op, problem, CPU, Config(16, 64, 64))
    check_op(op, problem, CPU, Config(32, 256, 128, persistent=True))
    check_op(op, problem, CPU, Config(8, 64, 128, swap_ab=True))


@pytest.mark.parametrize("masked", [False, True])
def test_rows_of_no_group_are_neither_read_nor_written(masked):
    """NaN there stays there, and the result keeps its old values."""
    problem = Problem(3, 40, 24, 32, BF16, masked=masked, sizes=(5, 0, 30))
    inputs = seeded_inputs(op, problem, CPU)
    a, b, offsets, counts = (inputs[name] for name in ("a", "b", "offsets", "counts"))
    for group in range(3) if masked else ():
        a[group, counts[group] :] = torch.nan
    if not masked:
        a[offsets[-1] :] = torch.nan
    out = torch.full((*a.shape[:-1], 24), 7.0, dtype=BF16)
    op.grouped_gemm(a, b, offsets, counts, trans_b=True, out=out)
    truth = op.comparable(op.reference(a, b, offsets, counts, trans_b=True), offsets=offsets, counts=counts)
    untouched = op.comparable(torch.ones_like(out), offsets=offsets, counts=counts) == 0
    assert untouched.any()
    assert out[untouched].eq(7.0).all()
    torch.testing.assert_close(out[~untouched], truth[~untouched])


def test_the_same_launch_follows_new_offsets():
    """As in a replayed graph: the plan does not depend on the sizes."""
    problem = Problem(4, 60, 24, 32, BF16)
    inputs = seeded_inputs(op, problem, CPU)
    for sizes in ((15, 15, 15, 15), (60, 0, 0, 0), (0, 1, 58, 1)):
        inputs["offsets"].copy_(torch.tensor(sizes).cumsum(0))
        torch.testing.assert_close(grouped_gemm(**inputs), op.reference(**inputs))


@pytest.mark.parametrize("offsets", [(30, 10, 50), (-5, 20, 1000), (2_000_000_000, 1, 0)])
def test_bad_offsets_touch_nothing_outside(offsets):
    a, b = torch.randn(50, 32).bfloat16(), torch.randn(3, 24, 32).bfloat16()
    grouped_gemm(a, b, torch.tensor(offsets, dtype=torch.int32), trans_b=True)  # the interpreter checks every access
    grouped_gemm(a.expand(3, 50, 32).contiguous(), b, counts=torch.tensor(offsets, dtype=torch.int32), trans_b=True)


def test_more_groups_than_rows():
    problem = Problem(513, 40, 16, 32, BF16, sizes=tuple(int(i % 13 == 5) for i in range(513)))
    check_op(op, problem, CPU)


def test_a_slice_of_a_wider_matrix_is_read_in_place():
    a, b = torch.randn(30, 96)[:, 16:48].bfloat16(), torch.randn(2, 64, 24).bfloat16()[:, ::2]
    offsets = torch.tensor((11, 30), dtype=torch.int32)
    torch.testing.assert_close(grouped_gemm(a, b, offsets), op.reference(a, b, offsets))


def test_empty_and_k_0():
    offsets = torch.zeros(2, dtype=torch.int32)
    with counted() as counts:
        assert grouped_gemm(torch.empty(0, 8, dtype=BF16), torch.empty(2, 8, 4, dtype=BF16), offsets).shape == (0, 4)
        assert grouped_gemm(torch.empty(3, 8, dtype=BF16), torch.empty(2, 8, 0, dtype=BF16), offsets).shape == (3, 0)
        assert grouped_gemm(torch.empty(3, 0, dtype=BF16), torch.empty(2, 0, 4, dtype=BF16), offsets).eq(0).all()
    assert not counts


def test_a_hint_changes_the_tile_and_nothing_else():
    """With room for 4096 rows and 20 of them used, no tile of 128 rows."""
    few, many = (op.space(Problem(32, 4096, 6144, 7168, masked=True, expected_rows=rows), H200)[0] for rows in (20, 4096))
    assert few.tile_m == 32
    assert few.persistent
    assert many.tile_m >= 128
    inputs = seeded_inputs(op, Problem(2, 64, 24, 32, masked=True, expected_rows=9), CPU)
    found = op.comparable(grouped_gemm(**{**inputs, "expected_rows": 60}), **inputs)
    torch.testing.assert_close(found, op.reference(**inputs))


def test_sizes_are_no_constants():
    """Every number of rows runs the same few kernels."""
    compiled = set()
    for rows in range(1, 40_000, 331):
        problem = Problem(8, rows, 4096, 2048)
        compiled.add(tuple(launch.compiled for launch in op.plan(problem, op.space(problem, H200)[0], H200)))
    assert len(compiled) <= 12


def test_room_for_many_rows_fits_a_grid():
    """Of room for 2**21 rows a group, 4096 of them used, a block for each tile is too many."""
    problem = Problem(128, 1 << 21, 8192, 2048, masked=True, expected_rows=4096)
    configs = op.space(problem, H200)
    assert configs
    for config in configs:
        assert all(launch.grid[0] < 1 << 24 for launch in op.plan(problem, config, H200))


def test_panels_of_unequal_groups_are_counted():
    """Half of the groups have more rows than the mean, so many a panel more."""
    torch.manual_seed(0)
    for rows, deviation, tile_m in ((8.6, 2.9, 8), (8.6, 2.9, 16), (100.0, 10.0, 128), (512.0, 22.0, 128), (240.0, 42.0, 128), (300.0, 52.0, 16)):
        sizes = (rows + deviation * torch.randn(100_000)).round().clamp(0)
        counted_panels = float((sizes / tile_m).ceil().mean())
        assert abs(expected_panels(rows, deviation, tile_m) / counted_panels - 1) < 0.02
    assert expected_panels(0.01, 0.1, 8) == pytest.approx(0.01, rel=0.02)


SHAPES = [(33, 70, 65), (5, 3, 200), (0, 4, 5), (50, 20, 0), (64, 128, 128)]


@pytest.mark.parametrize("trans_b", [False, True])
def test_lists_of_any_shapes_are_one_launch(trans_b):
    a = [torch.randn(m, k).bfloat16() for m, _, k in SHAPES]
    b = [torch.randn(*((n, k) if trans_b else (k, n))).bfloat16() for _, n, k in SHAPES]
    with counted() as counts:
        found = grouped_gemm_list(a, b, trans_b=trans_b)
    assert counts == {"grouped_gemm_list_kernel": 1}
    for x, w, out in zip(a, b, found, strict=True):
        w = w.T if trans_b else w
        assert_accurate(out, x @ w, x.double() @ w.double())
    into = [torch.full_like(out, torch.nan) for out in found]
    again = grouped_gemm_list(a, b, trans_b=trans_b, out=into)
    assert all(new is old for new, old in zip(again, into, strict=True))
    assert all(map(torch.equal, into, found))


@pytest.mark.parametrize("scaling", KINDS)
def test_lists_with_scales(scaling):
    a, b = [torch.randn(m, k).to(E4M3) for m, _, k in SHAPES], [torch.randn(n, k).to(E4M3) for _, n, k in SHAPES]
    shapes = [scale_shapes(scaling, *shape) for shape in SHAPES]
    scale_a, scale_b = ([random_scales(pair[i], "cpu", scaling=scaling) for pair in shapes] for i in (0, 1))
    for x, w, sx, sw, out in zip(a, b, scale_a, scale_b, grouped_gemm_list(a, b, scale_a=scale_a, scale_b=scale_b, trans_b=True), strict=True):
        theirs = (dequantize(x, sx) @ dequantize(w, sw).T).bfloat16()
        assert_accurate(out, theirs, dequantize(x.double(), sx.double()) @ dequantize(w.double(), sw.double()).T)


def test_a_list_compiles_to_one_graph():
    """torch.compile followed the call into the launch, and without a GPU into the interpreter."""
    torch._dynamo.reset()
    compiled = torch.compile(grouped_gemm_list, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.inference_mode(False), torch.no_grad():
        a, b = [torch.randn(m, 16).half() for m in (3, 0, 5)], [torch.randn(16, n).half() for n in (8, 4, 9)]
        assert all(map(torch.equal, compiled(a, b), grouped_gemm_list(a, b)))


def test_a_list_inside_of_a_transform_is_named():
    a, b = torch.randn(2, 3, 16).half(), torch.randn(16, 8).half()
    with pytest.raises(ValueError, match=r"^a must be a tensor outside of torch\.func's transforms"):
        torch.func.vmap(lambda x: grouped_gemm_list([x], [b])[0])(a)


def test_a_list_plans_for_a_gpu():
    with traced(H200) as launches:
        grouped_gemm_list(*([torch.empty(1024, 1024, dtype=torch.float16, device="meta")] * 4 for _ in "ab"), trans_b=True)
    assert [launch.launch.name for launch in launches] == ["grouped_gemm_list_kernel"]


A, B, OFFSETS = torch.zeros(6, 256, dtype=BF16), torch.zeros(2, 256, 8, dtype=BF16), torch.tensor((2, 6), dtype=torch.int32)
A3, COUNTS = torch.zeros(2, 6, 256, dtype=BF16), torch.tensor((2, 6), dtype=torch.int32)
A8, B8 = A.to(E4M3), B.to(E4M3)
BAD = [
    ({"offsets": None}, ValueError, r"offsets or counts must be given, but not both, got neither"),
    ({"counts": COUNTS}, ValueError, r"offsets or counts must be given, but not both, got both"),
    ({"a": A3}, ValueError, r"a.dim\(\) must be 2, got 3"),
    ({"offsets": None, "counts": COUNTS}, ValueError, r"a.dim\(\) must be 3, got 2"),
    ({"a": A3[:1], "offsets": None, "counts": COUNTS}, ValueError, r"a.shape\[0\] must be 2, the groups of b, got 1"),
    ({"a": A.float()}, ValueError, r"a.dtype must be one of bfloat16, float16, float8_e4m3fn, float8_e5m2, got float32"),
    ({"b": B.half()}, ValueError, r"b.dtype must be bfloat16, got float16"),
    ({"trans_b": True}, ValueError, r"a.shape\[-1\] must be 8, the k of b \(2, 256, 8\), got 256"),
    ({"b": B[:0]}, ValueError, r"b.shape\[0\] must be 1 to 1024, the number of groups, got 0"),
    ({"offsets": OFFSETS.long()}, ValueError, r"offsets.dtype must be int32, got int64"),
    ({"offsets": OFFSETS[:1]}, ValueError, r"offsets.shape must be \(2,\), got \(1,\)"),
    ({"expected_rows": 0}, ValueError, r"expected_rows must be None or at least 1, got 0"),
    ({"out_dtype": torch.float16}, ValueError, r"out_dtype must be one of bfloat16, float32, got torch.float16"),
    ({"scale_a": torch.ones(())}, ValueError, r"scale_a must be None for bfloat16 operands"),
    ({"a": A8, "b": B8, "scale_b": torch.ones(2)}, ValueError, r"scale_a must be given together with the other operand's scale"),
    ({"a": A8, "b": B8, "scale_a": torch.ones(6), "scale_b": torch.ones(2)}, ValueError, r"scale_b.shape must be \(2, 8\) \(ROW"),
    ({"a": A8, "b": B8, "scale_a": torch.ones(6, 1), "scale_b": torch.ones(2, 1, 2)}, ValueError, r"scale_a.shape must be \(6, 2\) \(BLOCK"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD)
def test_bad_input_is_named_and_nothing_is_launched(change, error, message):
    with counted() as counts, pytest.raises(error, match=message):
        grouped_gemm(**{"a": A, "b": B, "offsets": OFFSETS, **change})
    assert not counts


@pytest.mark.parametrize("rows", [500, 512])
def test_block_scales_compile_in_rooms_of_any_size(rows):
    """tileiras 13.4 fails for persistent tiles of 128 x 128 stored by TMA if rows are checked."""
    problem = Problem(8, rows, 4096, 512, E4M3, masked=True, scaling=Scaling.BLOCK)
    with traced(H200) as launches:
        op.grouped_gemm(**problem.inputs(torch.device("meta")))
    assert launches
    assert not any(binaries.made(Job.of(launch, H200.arch)).resources.spills for launch in launches)


@pytest.mark.parametrize(
    ("problem", "tile"),
    [
        (Problem(8, 128, 4096, 512, E4M3, masked=True, trans_b=True, scaling=Scaling.BLOCK, out_dtype=torch.float32), (128, 64)),
        (Problem(4, 45, 4, 89, BF16, out_dtype=torch.float32), (64, 64)),
    ],
)
def test_persistent_tiles_of_64_columns_compile_with_fp32_outputs(problem, tile):
    """tileiras 13.4 fails for these where the TMA unit writes them."""
    config = next(c for c in op.space(problem, H200) if c.persistent and (c.tile_m, c.tile_n) == tile)
    with traced(H200) as launches:
        run_op(op, problem.inputs(torch.device("meta")), config)
    assert launches
    assert not any(binaries.made(Job.of(launch, H200.arch)).resources.spills for launch in launches)


OUT = torch.zeros(6, 8, dtype=BF16)
BAD_LISTS = [
    ({"a": []}, r"len\(a\) must be at least 1, got 0"),
    ({"b": [B[0]]}, r"len\(b\) must be 2, got 1"),
    ({"out": [A[:, :8].contiguous()]}, r"len\(out\) must be 2, got 1"),
    ({"out": [OUT, OUT.float()]}, r"out\[1\].dtype must be bfloat16, got float32"),
    ({"out": [OUT, OUT]}, r"out\[1\] must be in memory"),
    ({"b": [B[0], B[0].half()]}, r"b\[1\].dtype must be bfloat16, got float16"),
    ({"a": [A, A3]}, r"a\[1\].dim\(\) must be 2, got 3"),
    ({"a": [A, A[:, :8]]}, r"a\[1\].shape\[1\] must be 256, the k of b\[1\] \(256, 8\), got 8"),
    ({"a": [A8, A8], "b": [B8[0], B8[0]], "scale_a": [torch.ones(())]}, r"len\(scale_a\) must be 2, got 1"),
    (
        {
            "a": [A8, A8],
            "b": [B8[0], B8[0]],
            "scale_a": [torch.ones(()), torch.ones(6)],
            "scale_b": [torch.ones(()), torch.ones(8)],
        },
        r"scale_a must be of one kind for all products, got ROW, TENSOR",
    ),
]


@pytest.mark.parametrize(("change", "message"), BAD_LISTS)
def test_a_bad_list_is_named_and_nothing_is_launched(change, message):
    with counted() as counts, pytest.raises(ValueError, match=message):
        grouped_gemm_list(**{"a": [A, A], "b": [B[0], B[0]], **change})
    assert not counts
