"""Planning takes no longer for large sizes, and every launch that comes of it is one that a GPU
takes.
"""

import dataclasses
import gc
import importlib
import inspect
import re
import time
from itertools import product

import cuda.tile as ct
import pytest
import torch
from speed import slower

from tilewright import ops
from tilewright.interpret import interpret
from tilewright.interpret.cutile import MOST_BLOCKS
from tilewright.launch import Device, forget_plans, traced
from tilewright.ops.common import groups
from tilewright.ops.common.sequences import MOST, sample
from tilewright.ops.common.softmax_tiles import visible_scores
from tilewright.select.neighbours import size_names
from tilewright.testing import op_name, public_function, run_op

META = torch.device("meta")
DEVICES = ("H200", "B200", "RTX5090", "CPU")
SIZES = (2**20, 2**25, 2**28, 2**31 - 1)
MORE = ("q_len", "window", "longest", "shared", "expected_rows")  # sizes that may be left out
SECONDS = 0.04  # of a quiet core


def stretched(small, double, times: int):
    """What `inputs` would have with one size `times` as large, from what it has with the size and
    with its double.
    """
    if isinstance(small, tuple):  # a window of two sides
        return tuple(stretched(a, b, times) for a, b in zip(small, double, strict=True))
    if not isinstance(small, torch.Tensor):
        return small if type(small) is bool or small == double else small + (double - small) * (times - 1)
    shape = [m + (n - m) * (times - 1) for m, n in zip(small.shape, double.shape, strict=False)]
    order = sorted(range(len(shape)), key=lambda axis: -small.stride(axis))
    x = torch.empty([shape[axis] for axis in order], dtype=small.dtype, device=META)
    return x.permute([order.index(axis) for axis in range(len(shape))])


def options_of(problem) -> set:
    names = {field.name for field in dataclasses.fields(problem)} - set(size_names(type(problem))) - {"sizes", "only"}
    return {(name, type(value) if isinstance(value, float) else value) for name in names if (value := getattr(problem, name)) is not None}


def problems(op):
    """Some small ones that have every option between them."""
    known: set = set()
    for problem in importlib.import_module(f"tilewright.testing.cases.{op_name(op)}").small:
        given = {name: () for name in ("sizes", "only") if getattr(problem, name, ())}
        problem = dataclasses.replace(problem, **given)
        if not options_of(problem) <= known:
            known |= options_of(problem)
            yield problem


def plan(op, inputs, device: Device) -> tuple[float, str]:
    """Processor seconds that a call takes, and what it raises; all its grids are checked."""
    gc.disable()  # a collection of what other tests left takes 0.1 s
    began, error = time.thread_time(), ""
    with traced(device) as launches:
        try:
            run_op(op, inputs)
        except ValueError as raised:
            error = str(raised)
    seconds = time.thread_time() - began
    gc.enable()
    for traced_launch in launches:
        grid = traced_launch.launch.grid
        assert all(0 < blocks <= most for blocks, most in zip(grid, MOST_BLOCKS, strict=False)), grid
    return seconds, error


@pytest.mark.parametrize("op", ops.ALL, ids=op_name)
def test_any_size_is_planned_in_no_time_or_refused_by_name(op):
    for problem in problems(op):
        axes = [name for name in (*size_names(op.Problem), *MORE) if type(size := getattr(problem, name, None)) is int and size]
        if getattr(problem, "cache_dtype", None) is not None:
            axes.remove("head_dim")  # of packed rows: there are two
        if getattr(problem, "has_state", False) and getattr(problem, "v_dim", None) == 0:
            axes.remove("head_dim")  # a state has it twice: no memory is as large
        names = {*inspect.signature(public_function(op)).parameters, *axes, "out"}
        inputs = problem.inputs(META)
        devices = [Device.named(name) for name in DEVICES]
        for device in devices:
            plan(op, inputs, device)  # reads the tables
        for turn, axis in enumerate(axes):
            size = getattr(problem, axis)
            double = dataclasses.replace(problem, **{axis: 2 * size}).inputs(META)
            for step, large in enumerate(SIZES, turn):
                given = {name: stretched(inputs[name], double[name], large // size) for name in inputs}
                for device in devices[step % 2 :: 2]:  # each has two sizes of each axis
                    for _ in range(3):  # a slow moment of the machine is no slow plan
                        seconds, error = plan(op, given, device)
                        if seconds < SECONDS:
                            break
                        forget_plans()
                        plan(op, inputs, device)
                    what = f"{axis} = {large} of {problem} on {device.name}: {error}"
                    assert seconds < SECONDS or seconds < SECONDS * slower(), what  # asked only then: it takes 0.1 s
                    subject, _, rest = error.partition(" must be ")
                    assert not error or (names & set(re.findall(r"\w+", subject)) and ", got " in rest), what


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_the_interpreter_takes_the_grids_that_a_gpu_takes(axis):
    @ct.kernel
    def touch(X):
        if ct.bid(0) + ct.bid(1) + ct.bid(2) == 0:
            ct.store(X, (0,), ct.full((1,), 1.0, dtype=ct.float32))

    x, most = torch.zeros(1), MOST_BLOCKS[axis]
    grid = [1, 1, 1]
    grid[axis] = most + 1
    with pytest.raises(ValueError, match=rf"grid\[{axis}\] must be in 0\.\.{most}, got {most + 1}"):
        interpret(touch, tuple(grid), (x,))
    assert x == 0


@pytest.mark.parametrize(("causal", "ahead"), [(True, 0), (False, 0), (True, 1), (True, 5)])
@pytest.mark.parametrize("window", [None, 1, 3, 8, 20])
def test_scores_that_a_mask_leaves_are_counted(causal, ahead, window):
    for q_len, n in product(range(9), range(9)):
        query, key = torch.arange(n - q_len, n)[:, None], torch.arange(n)
        seen = torch.ones(q_len, n, dtype=torch.bool)
        if causal:
            seen &= key <= query + ahead
        if window is not None:
            seen &= key > query - window
        assert visible_scores(q_len, n, causal, window, ahead) == seen.sum()


@pytest.mark.parametrize("batch", [1, 5, MOST, MOST + 1, 70_000, 2**31 - 1])
def test_a_sample_of_sequences_stands_for_all(batch):
    found = list(sample(batch))
    indices = [i for i, _ in found]
    assert len(found) == min(batch, MOST)
    assert sum(count for _, count in found) == batch
    assert indices == sorted(set(indices))
    assert 0 <= indices[0] <= indices[-1] < batch
    assert sum(i * count for i, count in found) == pytest.approx(batch * (batch - 1) / 2, rel=1e-3)


@pytest.mark.parametrize("tile_m", [8, 64, 256])
@pytest.mark.parametrize("deviation", [lambda rows: rows**0.5, lambda rows: 0.17 * rows], ids=["routed", "unequal"])
def test_many_panels_are_an_integral(monkeypatch, tile_m, deviation):
    rows = 1.5 * groups.MANY_PANELS * tile_m
    found = groups.expected_panels(rows, deviation(rows), tile_m)
    monkeypatch.setattr(groups, "MANY_PANELS", 2**31)
    assert found == pytest.approx(groups.expected_panels(rows, deviation(rows), tile_m), rel=1e-5)


def test_the_sizes_that_are_too_large_are_named():
    """Each that alone would mend it, else all; of heads, those that divide the others."""
    q = torch.empty(70_000, 2, 1, 64, dtype=torch.bfloat16, device=META)
    for x, be in ((q, "batch"), (q.transpose(0, 1), "kv_heads")):
        with traced(Device.named("H200")), pytest.raises(ValueError, match=rf"^{be} of attention_decode must be smaller on H200.*, got 70000$"):
            ops.attention_decode.attention_decode(x, x, x)
    launches, device = ops.rms_norm_matmul.DECISION.launches, Device.named("CPU")
    for n, be in ((4096, "rows"), (2**40, "rows and n")):
        with pytest.raises(ValueError, match=rf"^{be} of rms_norm_matmul must be smaller on CPU.*, got {2**40}"):
            launches(device, rows=2**40, n=n, k=64)
