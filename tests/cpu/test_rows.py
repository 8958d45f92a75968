"""What ops over the rows of a matrix have in common: few kernels, grids that fit, planning in no
time.
"""

import re
import time

import binaries
import pytest
import torch
from configs import ROWS, compiled_kernels
from test_mega import disassembled

from tilewright.compile.disassemble import find_tool
from tilewright.compile.job import Job
from tilewright.interpret.cutile import python_function
from tilewright.launch import Device, forced_config, traced
from tilewright.launch.far import is_far
from tilewright.ops import (
    argmax,
    dropout,
    embedding,
    layer_norm,
    moe_route,
    quantize_fp8,
    rms_norm,
    rms_norm_quant,
    sample,
    silu_mul,
    silu_mul_quant,
    softmax,
)
from tilewright.ops.common.rows import CPU_TILE, MOST_BLOCKS, coarse, grid_fits
from tilewright.ops.common.tiles import Rows
from tilewright.testing import check_op, op_name, public_function, run_op
from tilewright.testing.cases import cases

BF16 = torch.bfloat16
DEVICES = ("H200", "B200", "RTX5090", "A100", "CPU")
HUGE = [
    (rms_norm, rms_norm.Problem(2**28, 8, BF16)),
    (rms_norm, rms_norm.Problem(2**25, 1000, BF16)),
    (layer_norm, layer_norm.Problem(2**28, 8, BF16)),
    (softmax, softmax.Problem(2**28, 8, BF16)),
    (softmax, softmax.Problem(2**26, 3, torch.float32)),
    (silu_mul, silu_mul.Problem(2**28, 8, BF16)),
    (dropout, dropout.Problem(2**36, BF16)),
    (embedding, embedding.Problem(2**28, 8, BF16)),
    (embedding, embedding.Problem(2**28, 6, BF16)),
    (argmax, argmax.Problem(2**28, 8, BF16)),
    (argmax, argmax.Problem(2**25, 1000, BF16)),
    (argmax, argmax.Problem(70_000, 151_936, BF16)),
    (sample, sample.Problem(2**25, 8, BF16)),
    (moe_route, moe_route.Problem(2**27, 8, 2)),
]


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize(("op", "problem"), HUGE, ids=lambda value: op_name(value) if hasattr(value, "Problem") else "")
def test_every_config_of_a_huge_problem_has_a_grid_that_fits(op, problem, name):
    device = Device.named(name)
    configs = op.space(problem, device)
    assert configs
    for config in configs:
        for launch in op.plan(problem, config, device):
            assert all(0 < blocks <= most for blocks, most in zip(launch.grid, MOST_BLOCKS, strict=False)), launch


def test_a_grid_fits_up_to_the_limits_of_its_axes():
    assert grid_fits(2**24 - 1, 65_535, 65_535)
    assert not grid_fits(2**24)
    assert not grid_fits(1, 65_536)
    assert not grid_fits(1, 1, 65_536)


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("cols", [2**28, 2**31])
@pytest.mark.parametrize("op", [softmax, rms_norm, layer_norm], ids=op_name)
def test_a_row_of_any_width_is_planned_in_milliseconds(op, cols, name):
    began = time.perf_counter()
    with traced(Device.named(name)) as launches:
        x = torch.empty(1, cols, device="meta", dtype=BF16)
        op.DECISION.launches(Device.of(x), rows=1, cols=cols, dtype=BF16).run(*[x] * len(op.DECISION.arguments))
    assert time.perf_counter() - began < 0.5  # with the first look into tables and data
    assert launches[0].args["TILE_N"] * (launches[0].args["COLS"] // launches[0].args["TILE_N"] < 64 or 1) <= 2**20


@pytest.mark.parametrize("op", [rms_norm, layer_norm, softmax, silu_mul], ids=op_name)
@pytest.mark.parametrize("cols", [128, 896, 4096, 5120, 16_384, 151_936])
def test_few_kernels_serve_every_number_of_rows(op, cols):
    problems = [op.Problem(rows, cols, BF16) for rows in ROWS]
    assert len(compiled_kernels(op, problems, Device.named("H200"))) <= (7 if op is silu_mul else 4)  # tiles: more of them tie


def test_near_numbers_of_rows_are_priced_alike():
    device = Device.named("H200")
    found = [coarse(rms_norm.Problem(rows, 4096, BF16), device).rows for rows in range(1, 3000)]
    assert found == sorted(found)
    assert len(set(found)) == 3
    assert all(rows <= stands for rows, stands in zip(range(1, 3000), found, strict=True))


@pytest.mark.parametrize(
    ("rows", "cols", "dtype", "ctas", "split"),
    [
        (1, 8192, torch.float32, 1, False),
        (3, 50_257, torch.float16, 1, True),
        (12, 64_000, BF16, 1, True),
        (16, 151_936, torch.float32, 1, True),
        (60, 152_064, BF16, 1, True),
        (124, 256_000, BF16, 1, True),  # more than the L2 holds
        (202, 49_152, torch.float32, 4, False),
        (1024, 151_936, torch.float32, 8, False),
    ],
)
def test_blocks_share_the_rows_where_they_are_wide_and_few(rows, cols, dtype, ctas, split):
    """The faster of both forms, as measured."""
    config = softmax.space(softmax.Problem(rows, cols, dtype), Device.named("H200"))[0]
    assert (config.num_ctas, config.split) == (ctas, split)


def test_two_blocks_share_a_row_of_single_loads_where_sms_are_left():
    def most(rows, cols):
        return max(c.num_ctas for c in rms_norm.space(rms_norm.Problem(rows, cols, BF16), Device.named("H200")))

    assert [most(rows, 19_407) for rows in (1, 66, 300)] == [2, 2, 1]
    assert most(1, 2047) == most(1, 19_408) == 1
    assert most(500, 40_000) > 2


def test_rows_of_more_tiles_than_a_block_can_merge_are_not_split():
    device = Device.named("H200")
    for cols, split in ((1 << 22, True), ((1 << 22) + 1, False), (1 << 31, False)):
        assert {c.split for c in softmax.space(softmax.Problem(1, cols, torch.float32), device)} == {split}


def test_sample_takes_several_rows_a_block_beyond_a_grid(monkeypatch):
    """As the kernel does it, with a smaller limit."""
    logits, seed = torch.randn(11, 70), torch.tensor(5)
    expected = sample.reference(logits, seed)
    monkeypatch.setattr(sample.decision, "MOST_BLOCKS", (4, 4, 4))
    sample.DECISION._known.cache_clear()
    sample.DECISION._bound.cache_clear()
    try:
        out = torch.empty(11, dtype=torch.int64)
        sample.sample_out(logits, seed.reshape(1), None, None, None, None, None, out)
        assert torch.equal(out, expected)
        problem = sample.Problem(11, 70, torch.float32, False, False, False, False)
        (launch,) = sample.plan(problem, sample.Config(128, 8), Device.named("H200"))
        assert launch.grid == (4,)
        assert not launch.pdl
    finally:
        sample.DECISION._known.cache_clear()
        sample.DECISION._bound.cache_clear()


RAGGED = [
    (softmax, softmax.Problem(21_149, 274, torch.float32), softmax.Config(4, 64, num_worker_warps=4)),
    (softmax, softmax.Problem(600, 1160, BF16), softmax.Config(2, 512, num_worker_warps=4)),
    (silu_mul, silu_mul.Problem(1136, 109, BF16), silu_mul.Config(8, 128, num_worker_warps=4)),
    (quantize_fp8, quantize_fp8.Problem(672, 3654, BF16, (1, 128)), quantize_fp8.Config(8, 128, num_worker_warps=4)),
    (quantize_fp8, quantize_fp8.Problem(500, 1029, BF16, (1, None)), quantize_fp8.Config(1, 256, num_worker_warps=4)),
    (layer_norm, layer_norm.Problem(594, 4544, BF16), layer_norm.Config(1, 512, num_worker_warps=8)),
    (rms_norm, rms_norm.Problem(285, 3840, BF16), rms_norm.Config(1, 1024, num_worker_warps=8)),
    (silu_mul_quant, silu_mul_quant.Problem(1136, 109, BF16, (1, 128)), silu_mul_quant.Config(8, 128, num_worker_warps=4)),
]


@pytest.mark.skipif(find_tool("nvdisasm") is None, reason="no nvdisasm (pip install nvidia-cuda-nvdisasm)")
@pytest.mark.parametrize(("op", "problem", "config"), RAGGED, ids=lambda value: op_name(value) if hasattr(value, "Problem") else "")
def test_loads_of_a_tile_that_passes_an_edge_run_together(op, problem, config):
    """No branch between the first load of x and the last: none waits for the one before."""
    with traced(Device.named("H200")) as launches, forced_config(op.plan, config):
        run_op(op, problem.inputs(torch.device("meta")))
    code = disassembled(Job.of(launches[0], "sm_90").build()).splitlines()
    loads = [i for i, line in enumerate(code) if re.search(r"\bLDG\b", line)]
    assert len(loads) >= 3
    assert not [line for line in code[loads[0] : loads[-1]] if re.search(r"\b(BRA|BSSY)\b", line)]


@pytest.mark.skipif(find_tool("nvdisasm") is None, reason="no nvdisasm (pip install nvidia-cuda-nvdisasm)")
@pytest.mark.parametrize(
    ("op", "cols", "width"),
    [(softmax, 573, ".U16"), (softmax, 574, ""), (softmax, 572, ".64"), (silu_mul, 572, ".64"), (silu_mul, 573, ".U16"), (quantize_fp8, 574, "")],
    ids=lambda value: op_name(value) if hasattr(value, "Problem") else None,
)
def test_loads_are_as_wide_as_rows_are_aligned(op, cols, width):
    with traced(Device.named("H200")) as launches:
        run_op(op, op.Problem(3000, cols, BF16).inputs(torch.device("meta")))
    code = disassembled(Job.of(launches[0], "sm_90").build())
    assert set(re.findall(r"\bLDG\.E(\S*)", code)) == {width}


@pytest.mark.parametrize("op", [softmax, layer_norm, rms_norm, rms_norm_quant, silu_mul, silu_mul_quant, quantize_fp8], ids=op_name)
def test_no_kernel_gets_a_constant_stride_beyond_32_bits(op):
    """It would be cut: 2**32 + 574 to 574."""

    def far(x):
        return x.as_strided(x.shape, (2**32 + 574, 1)) if isinstance(x, torch.Tensor) and x.dim() == 2 else x

    problem = next(problem for problem in cases(op, "real") if problem.rows > 1)
    inputs = problem.inputs(torch.device("meta"))
    with traced(Device.named("H200")) as launches:
        public_function(op)(**{name: far(x) for name, x in inputs.items()})
    assert launches
    for launch in launches:
        annotated = python_function(launch.launch.kernel).__annotations__
        constant = [x for name, x in launch.args.items() if annotated.get(name) is Rows]
        assert constant
        assert not any(map(is_far, constant))


@pytest.mark.parametrize("name", ["H200", "B200", "RTX5090", "A100"])
@pytest.mark.parametrize("cols", [142, 179, 274, 463, 781])
def test_rows_far_from_a_power_of_two_are_padded_little(cols, name):
    for op, dtype in ((softmax, torch.float32), (layer_norm, BF16)):
        assert op.space(op.Problem(20_000, cols, dtype), Device.named(name))[0].padded(cols) <= 1.25 * cols


def test_a_block_that_holds_weights_leaves_room_for_fewer():
    """The work of a launch has as many blocks to an SM as the compiler's registers allow."""
    problem, device = layer_norm.Problem(619, 7168, torch.float32), Device.named("H200")
    config = layer_norm.Config(1, 512, num_worker_warps=4)
    with traced(device) as launches, forced_config(layer_norm.plan, config):
        run_op(layer_norm, problem.inputs(torch.device("meta")))
    found = binaries.made(Job.of(launches[0], "sm_90")).resources
    assert layer_norm.CHOICES.work(problem, config, device).per_sm == 65_536 // (128 * found.registers)


def test_vectors_that_come_late_leave_room_for_more_blocks():
    """Two, after the reductions, piece by piece of a tile of one row."""
    device, o4 = Device.named("H200"), {"occupancy": 4, "num_worker_warps": 4}
    problem = layer_norm.Problem(11_461, 7168, BF16)
    legal = layer_norm.CHOICES.legal
    assert layer_norm.space(problem, device)[0].occupancy > 2
    assert legal(problem, layer_norm.Config(1, 8192, **o4), device)
    assert not legal(problem, layer_norm.Config(1, 1024, **o4), device)  # a single piece
    assert not legal(problem, layer_norm.Config(2, 2048, **o4), device)


WIDER = [
    (silu_mul, silu_mul.Problem(2, CPU_TILE + 24, torch.float32)),
    (quantize_fp8, quantize_fp8.Problem(2, CPU_TILE + 24, torch.float32, (None, None))),
    (quantize_fp8, quantize_fp8.Problem(1, CPU_TILE + 24, torch.float32, (1, 128))),
]


@pytest.mark.parametrize(("op", "problem"), WIDER, ids=lambda value: op_name(value) if hasattr(value, "Problem") else "")
def test_rows_wider_than_a_tile_are_right_on_a_cpu(op, problem):
    configs = op.space(problem, Device.named("CPU"))
    assert {config.persistent for config in configs} == {False, True}
    for config in configs:
        check_op(op, problem, torch.device("cpu"), config)
