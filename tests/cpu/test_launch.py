"""The stations between an op and a kernel."""

import subprocess
import sys

import cuda.tile as ct
import pytest
import torch

import tilewright
from tilewright.launch import Device, Plan, best_plan, check_tensor, counted, forced_config, launch, must, next_pow2, traced


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
    with pytest.raises(KeyError, match=r"sm_90.*got 'sm_70'"):
        Device.for_arch("sm_70")


def test_a_cpu_tensor_is_interpreted():
    x = torch.zeros(8)
    with counted() as counts:
        launch(Plan(fill_kernel, (2,), (7, 4)), x)
    assert x.tolist() == [7.0] * 8
    assert counts == {"fill_kernel": 1}


def test_a_plan_prints_hashes_and_keeps_one_hinted_kernel():
    first, second = (Plan(fill_kernel, (2,), (7, 4), occupancy=2) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first.hinted_kernel is second.hinted_kernel
    assert str(first) == "fill_kernel grid=(2,) constants=(7, 4) occupancy=2"


def space(problem, device):
    return [problem, problem + 1]


def plan(problem, config, device):
    return Plan(fill_kernel, (config,), (device.sms, 4))


def test_best_plan_is_the_first_of_the_space_unless_forced():
    h200 = Device.named("H200")
    assert best_plan(space, plan, h200, int, 3).grid == (3,)
    with forced_config(plan, 9):
        assert best_plan(space, plan, h200, int, 3).grid == (9,)
        with forced_config(plan, 10):
            assert best_plan(space, plan, h200, int, 3).grid == (10,)
        assert best_plan(space, plan, h200, int, 3).grid == (9,)
    assert best_plan(space, plan, h200, int, 3).grid == (3,)


def test_forced_config_is_undone_by_an_exception():
    with pytest.raises(RuntimeError, match="inside"), forced_config(plan, 9):
        raise RuntimeError("inside")
    assert best_plan(space, plan, Device.named("H200"), int, 3).grid == (3,)


def test_meta_tensors_are_traced_and_run_nothing():
    with traced(Device.named("B200")) as launches:
        x = torch.empty(8, device="meta")
        assert Device.of(x).name == "B200"
        launch(Plan(fill_kernel, (2,), (7, 4)), x)
    assert len(launches) == 1
    assert launches[0].plan.grid == (2,)
    with pytest.raises(ValueError, match="traced"):
        Device.of(torch.empty(8, device="meta"))


@pytest.mark.parametrize(("n", "power"), [(0, 1), (1, 1), (2, 2), (3, 4), (4096, 4096), (4097, 8192)])
def test_next_pow2(n, power):
    assert next_pow2(n) == power


def test_must_says_what_must_be_was():
    assert str(must("weight.shape", (4096,), (2048,))) == "weight.shape must be (4096,), got (2048,)"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: check_tensor([1.0], "x"), TypeError, r"x must be a torch.Tensor, got list"),
        (lambda: check_tensor(torch.ones(2, 2), "x", ndim=1), ValueError, r"x.dim\(\) must be 1, got 2"),
        (lambda: check_tensor(torch.ones(2), "x", shape=(3,)), ValueError, r"x.shape must be \(3,\), got \(2,\)"),
        (lambda: check_tensor(torch.ones(2), "x", dtypes=(torch.float16,)), ValueError, r"x.dtype must be one of float16, got float32"),
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
    """No GPU context, nothing printed, no patched torch or cuda.tile, no environment read by us, under 0.3 s on top of torch."""
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
    for limit in ("inf", "0.3"):  # the first run writes the bytecode
        run = subprocess.run([sys.executable, "-c", code, str(tmp_path), limit], capture_output=True, text=True, check=False)
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
