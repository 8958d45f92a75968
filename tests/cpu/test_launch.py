"""The stations between an op and a kernel."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import cuda.tile as ct
import pytest
import torch
from speed import slower

import tilewright
from tilewright.launch import (
    Bound,
    Decision,
    Device,
    Launch,
    argument_error,
    check_tensor,
    counted,
    decisions,
    forced_config,
    next_pow2,
    overlap,
    traced,
)


@ct.kernel
def fill_kernel(X, VALUE: ct.Constant[int], TILE: ct.Constant[int]):
    ct.store(X, index=(ct.bid(0),), tile=ct.full((TILE,), VALUE, dtype=X.dtype))


def test_known_devices_are_found_by_name_and_arch():
    for name in ("A100", "H100", "H200", "B200", "B300", "RTX5090", "GB10"):
        device = Device.named(name)
        assert Device.for_arch(device.arch).arch == device.arch
        assert device.sms > 0
        assert not device.is_cpu
    assert Device.named("H200").arch == "sm_90"
    assert Device.of(torch.empty(0)).is_cpu


def test_unknown_device_names_the_known_ones():
    with pytest.raises(KeyError, match=r"H200.*got 'H300'"):
        Device.named("H300")
    with pytest.raises(ValueError, match=r"sm_90.*got 'sm_70'"):
        Device.for_arch("sm_70")


def fill(grid=(2,), value=7, **changes):
    return Launch(fill_kernel, grid, {"value": value, "tile": 4}, **changes)


def test_a_cpu_tensor_is_interpreted():
    x = torch.zeros(8)
    with counted() as counts:
        Bound([fill()], ["x"], CPU).run(x)
    assert x.tolist() == [7.0] * 8
    assert counts == {"fill_kernel": 1}


def test_a_launch_prints_hashes_and_keeps_one_hinted_kernel():
    first, second = fill(occupancy=2), fill(occupancy=2)
    assert first == second
    assert hash(first) == hash(second)
    assert first.hinted_kernel is second.hinted_kernel
    assert str(first) == "fill_kernel grid=(2,) value=7 tile=4 occupancy=2"


@dataclass(frozen=True)
class Problem:
    n: int
    factor: int = 1


def space(problem, device):
    return [problem.n * problem.factor, problem.n + 1]


def plan(problem, config, device):
    return (fill((config,), device.sms),)


DECISION = Decision("fill", problem=Problem, arguments=("x",), space=space, plan=plan)
H200, CPU = Device.named("H200"), Device.named("CPU")


def grid(**fields):
    return DECISION.launches(H200, **fields).launches[0].grid


def test_the_config_is_the_first_of_the_space_unless_forced():
    assert grid(n=3) == (3,)
    with forced_config(plan, 9):
        assert grid(n=3) == (9,)
        with forced_config(plan, 10):
            assert grid(n=3) == (10,)
        assert grid(n=3) == (9,)
    assert grid(n=3) == (3,)


def test_a_problem_is_built_by_name():
    assert grid(n=3, factor=5) == grid(factor=5, n=3) == (15,)
    assert grid(n=5, factor=2) != grid(n=2, factor=2)
    with pytest.raises(TypeError, match="rows"):
        grid(rows=3)


def test_a_known_problem_is_decided_once(monkeypatch):
    first = DECISION.launches(H200, n=31)
    monkeypatch.setattr(DECISION, "decide", None)
    assert DECISION.launches(H200, n=31) is first


def test_forced_config_is_undone_by_an_exception():
    with pytest.raises(RuntimeError, match="inside"), forced_config(plan, 9):
        raise RuntimeError("inside")
    assert grid(n=3) == (3,)


def test_what_a_block_sets_is_not_seen_by_another_thread():
    def elsewhere():
        with decisions() as theirs:
            found = grid(n=3)
        Bound([fill()], ["x"], CPU).run(torch.zeros(8))
        with traced(Device.named("B200")):
            device = Device.of(torch.empty(0, device="meta")).name
        return found, len(theirs), device

    with ThreadPoolExecutor(1) as pool, forced_config(plan, 9), decisions() as ours, counted() as counts, traced(H200) as launches:
        assert pool.submit(elsewhere).result() == ((3,), 1, "B200")
        assert not ours
        assert not counts
        assert not launches
        assert grid(n=3) == (9,)
        assert Device.of(torch.empty(0, device="meta")) is H200
        with pytest.raises(ValueError, match="traced"):
            pool.submit(lambda: Device.of(torch.empty(0, device="meta"))).result()


def test_meta_tensors_are_traced_and_run_nothing():
    with traced(Device.named("B200")) as launches:
        x = torch.empty(8, device="meta")
        assert Device.of(x).name == "B200"
        Bound([fill()], ["x"], CPU).run(x)
    (found,) = launches
    assert found.launch == fill()
    assert found.args == {"X": x, "VALUE": 7, "TILE": 4}
    with pytest.raises(ValueError, match="traced"):
        Device.of(torch.empty(8, device="meta"))


# --------------------------------------------------------------------------------- launches by name
@ct.kernel
def scale_kernel(X, BIAS, OUT, factor: float, ADD: ct.Constant[bool], TILE: ct.Constant[int]):
    i = ct.bid(0)
    x = ct.load(X, (i,), (TILE,)) * factor
    if ADD:
        x = x + ct.load(BIAS, (i,), (TILE,))
    ct.store(OUT, (i,), x)


ARGUMENTS = ("x", "bias", "out", "factor")


def scale(**changes):
    return Launch(scale_kernel, (2,), {"tile": 4, "add": True}, **changes)  # in no particular order


def test_arguments_reach_the_parameters_of_their_names():
    x, bias, out = torch.arange(8.0), torch.ones(8), torch.zeros(8)
    Bound([scale()], ("x", "factor", "out", "bias"), CPU).run(x, 2.0, out, bias)
    assert torch.equal(out, 2 * x + 1)
    without = Launch(scale_kernel, (2,), {"add": False, "tile": 4}, unused=("bias",))
    Bound([without], ARGUMENTS, CPU).run(x, None, out, 3.0)
    assert torch.equal(out, 3 * x)


def test_constants_that_plan_does_not_compute_are_fields_of_config_and_problem():
    @dataclass(frozen=True)
    class Fields:
        tile: int
        add: bool = True
        occupancy: int = 2

    found = Launch.of(scale_kernel, (2,), Fields(16, False), Fields(4), optional={"bias": True})
    assert found == scale(occupancy=2)  # the config's, not the problem's
    found = Launch.of(scale_kernel, (2,), Fields(16, False), object(), {"add": True}, optional={"bias": False}, occupancy=3)
    assert found == Launch(scale_kernel, (2,), {"add": True, "tile": 16}, occupancy=3, unused=("bias",))  # a given one, not the problem's
    with pytest.raises(ValueError, match="constant 'tile' of scale_kernel must be given by plan, got add"):
        Bound([Launch.of(scale_kernel, (2,), None, None, {"add": True})], ARGUMENTS, CPU)


def test_scratch_passes_from_launch_to_launch_and_may_be_viewed():
    x, bias, out = torch.arange(8.0), torch.ones(8), torch.zeros(8)
    first = scale(scratch={"partial": ((2, 4), torch.float32)}, views={"line": ("partial", (8,), (1,))}, renames={"out": "line"})
    with counted() as counts:
        Bound([first, scale(renames={"x": "line"})], ARGUMENTS, CPU).run(x, bias, out, 2.0)
    assert torch.equal(out, 2 * (2 * x + 1) + 1)
    assert counts == {"scale_kernel": 2}
    second = scale(renames={"x": "line"}).with_others({"line": "x", "out": "bias", "nothing": "y"})
    assert second == scale(renames={"x": "x", "out": "bias"})
    assert scale(unused=("bias",)).with_others({"bias": "x"}) == scale(unused=("bias",))


@pytest.mark.parametrize(
    ("launches", "arguments", "message"),
    [
        ([scale()], ("x", "out", "factor"), "array 'bias' of scale_kernel must be an argument, .* got 'bias', not one of x, out, factor"),
        ([fill(), scale()], ("x", "out", "bias"), "scalar 'factor' of scale_kernel must be an argument"),
        ([Launch(scale_kernel, (2,), {"add": True})], ARGUMENTS, "constant 'tile' of scale_kernel must be given by plan, got add"),
        (
            [Launch(fill_kernel, (2,), {"value": 7, "tile": 4, "tiel": 4})],
            "x",
            "constant 'tiel' of fill_kernel must be one of value, tile, got unknown",
        ),
        ([Launch(scale_kernel, (2,), {"add": True, "tile": 4, "bias": 1})], ARGUMENTS, "'bias' .* got an array parameter: pass it as an argument"),
        (
            [Launch(scale_kernel, (2,), {"add": True, "tile": 4, "factor": 1})],
            ARGUMENTS,
            "'factor' .* got a scalar parameter: pass it as an argument",
        ),
        ([Launch(fill_kernel, (2,), {"value": torch.ones(1), "tile": 4})], "x", "constant 'value' of fill_kernel must be a number, .* got a tensor"),
        ([scale(renames={"y": "x"})], ARGUMENTS, "renames of scale_kernel must be of its parameters x, bias, out, factor, got 'y'"),
        ([scale(renames={"x": "y"})], ARGUMENTS, "array 'x' of scale_kernel must be an argument, .* got 'y'"),
        ([scale(unused=("add",))], ARGUMENTS, "unused of scale_kernel must be of its arrays x, bias, out, got 'add'"),
        ([scale(unused=("factor",))], ARGUMENTS, "unused of scale_kernel must be of its arrays x, bias, out, got 'factor'"),
        ([scale(unused=("bias",), renames={"bias": "x"})], ARGUMENTS, "'bias' of scale_kernel must be in renames or in unused, got in both"),
        ([fill(unused=("x",))], "x", "unused of fill_kernel must be without at least one of its arrays"),
        ([scale()], (*ARGUMENTS, "x"), "'x' of scale_kernel must be named once"),
        ([scale(scratch={"out": ((8,), torch.float32)})], ARGUMENTS, "'out' of scale_kernel must be named once"),
        ([scale(scratch={"partial": ((8,), torch.float32)})], ARGUMENTS, "scratch 'partial' must be a parameter of one of the launches"),
        (
            [scale(scratch={"f": ((8,), torch.float32)}, renames={"factor": "f"})],
            ARGUMENTS,
            "scalar 'factor' .* must be a scalar argument, got scratch",
        ),
        (
            [scale(views={"line": ("partial", (8,), (1,))})],
            ARGUMENTS,
            "view 'line' must be of a scratch array, of which there is none, got 'partial'",
        ),
    ],
)
def test_a_name_that_fits_nothing_is_an_error_before_the_call(launches, arguments, message):
    with pytest.raises(ValueError, match=message):
        Bound(launches, tuple(arguments), CPU)


def test_the_number_of_arguments_is_checked():
    with pytest.raises(TypeError, match=r"run must get 4 arguments \(x, bias, out, factor\), got 3"):
        Bound([scale()], ARGUMENTS, CPU).run(torch.zeros(8), torch.zeros(8), torch.zeros(8))


@pytest.mark.parametrize("grid", [(1 << 24,), (1, 65536), (1, 1, 65536), (), (1, 1, 1, 1)])
def test_a_grid_that_no_gpu_launches_is_an_error_at_plan_time(grid):
    message = r"grid of fill_kernel must be at most 16777215 x 65535 x 65535 blocks \(call the op on parts of its input\), got \("
    with pytest.raises(ValueError, match=message):
        Bound([fill(grid)], "x", CPU)
    Bound([fill(((1 << 24) - 1, 65535, 65535))], "x", CPU)


@ct.kernel
def confusing_kernel(X, OUT, x: int, TILE: ct.Constant[int]):
    ct.store(OUT, (0,), ct.load(X, (0,), (TILE,)) * x)


def test_two_run_time_parameters_of_one_name_are_an_error():
    with pytest.raises(ValueError, match="array 'x' of confusing_kernel must be unique among its parameters in lower case"):
        Bound([Launch(confusing_kernel, (1,), {"tile": 4})], ("x", "out"), CPU)


@pytest.mark.parametrize(("n", "power"), [(0, 1), (1, 1), (2, 2), (3, 4), (4096, 4096), (4097, 8192)])
def test_next_pow2(n, power):
    assert next_pow2(n) == power


def test_must_says_what_must_be_was():
    assert str(argument_error("weight.shape", (4096,), (2048,))) == "weight.shape must be (4096,), got (2048,)"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: check_tensor([1.0], "x"), TypeError, r"x must be a torch.Tensor, got list"),
        (lambda: check_tensor(torch.ones(2, 2), "x", ndim=1), ValueError, r"x.dim\(\) must be 1, got 2"),
        (lambda: check_tensor(torch.ones(2), "x", shape=(3,)), ValueError, r"x.shape must be \(3,\), got \(2,\)"),
        (lambda: check_tensor(torch.ones(2), "x", dtypes=(torch.float16,)), ValueError, r"x.dtype must be float16, got float32"),
        (lambda: check_tensor(torch.ones(2), "x", like=torch.ones(2).half()), ValueError, r"x.dtype must be float16, got float32"),
        (lambda: check_tensor(torch.ones(2, device="meta"), "x", like=torch.ones(2)), ValueError, r"x.device must be cpu, got meta"),
        (lambda: check_tensor(torch.ones(4, 4).t(), "x", contiguous=True), ValueError, r"x must be contiguous, got strides \(1, 4\)"),
        (lambda: check_tensor(torch.ones(4, 4).t(), "x"), ValueError, r"x.stride\(-1\) must be 1, got 4"),
        (lambda: check_tensor(torch.ones(2, requires_grad=True), "x"), ValueError, r"x.requires_grad must be False"),
        (lambda: check_tensor(torch.eye(2).to_sparse(), "x"), ValueError, r"x.layout must be torch.strided"),
    ],
)
def test_check_tensor_messages(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_check_tensor_lets_parameters_pass_without_grad_mode():
    with torch.no_grad():
        check_tensor(torch.ones(2, requires_grad=True), "x")


def test_importing_is_inert(tmp_path):
    """No GPU context, nothing printed, no patched torch or cuda.tile, no environment variable read,
    in a quarter of a second after torch.
    """
    code = (
        "import os, sys, time, torch, cuda.tile as ct\n"
        "sys.dont_write_bytecode, sys.pycache_prefix = False, sys.argv[1]\n"  # as an installed package has: compiling is half of the time
        "launch = ct.launch; reads = []\n"
        "class Watched(dict):\n"
        "    def __getitem__(self, key): reads.append(key); return super().__getitem__(key)\n"
        "    def get(self, key, default=None): reads.append(key); return super().get(key, default)\n"
        "os.environ = Watched(os.environ)\n"
        "import gc; gc.disable()\n"  # a collection at some point of the import walks all of torch's objects: 50 to 130 ms, not ours
        "start = time.process_time(); import tilewright; seconds = time.process_time() - start\n"
        "assert not torch.cuda.is_initialized(); assert ct.launch is launch; assert not reads, reads\n"
        "assert 'transformers' not in sys.modules\n"
        "assert seconds < float(sys.argv[2]), seconds\n"
    )
    # The first run writes the bytecode. What else runs on the machine doubles the time now and
    # then: the best of three is the import's own.
    for limits in (("inf",), (str(0.25 * slower()),) * 3):
        for limit in limits:
            run = subprocess.run([sys.executable, "-c", code, str(tmp_path), limit], capture_output=True, text=True, check=False)
            if run.returncode == 0:
                break
        assert run.returncode == 0, run.stderr
        assert run.stdout == ""
        assert run.stderr == ""


def test_importing_without_cuda_tile_says_what_to_install():
    code = "import sys; sys.modules['cuda.tile'] = None; sys.modules['cuda'] = None; import tilewright"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.stderr.splitlines()[-1].startswith("ImportError: tilewright's kernels are written in cuda-tile")
    assert "pip install 'cuda-tile==1.7.*'" in run.stderr


def test_a_problem_that_a_device_has_no_config_for_names_both():
    """cuTile compiles no 8-bit floating point for sm_80."""
    x = torch.empty(4, 256, dtype=torch.bfloat16, device="meta")
    with traced(Device.named("A100")), pytest.raises(ValueError, match=r"device must be one that can run Problem\(.*\), got A100 \(sm_80\)"):
        tilewright.quantize_fp8(x, block=(1, 128))


@pytest.mark.parametrize(("begins", "meets"), [(0, True), (31, True), (32, False), (64, False)])
def test_tensors_of_other_dtypes_overlap_by_their_bytes(begins, meets):
    """int64 elements in the bytes 128 to 255, and bf16 elements behind byte 192 + 2 * begins."""
    memory = torch.zeros(512, dtype=torch.uint8)
    wide, narrow = memory[128:256].view(torch.int64), memory[192 + 2 * begins :].view(torch.bfloat16)
    assert overlap(wide, narrow) == meets
    assert overlap(narrow, wide) == meets
    assert not overlap(wide, memory[64:128].view(torch.bfloat16))
