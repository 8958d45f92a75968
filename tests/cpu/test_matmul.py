"""matmul: every formulation on every layout, the edges of the public function, and the plans of the shapes that matter."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F

from tilewright import interpret
from tilewright.launch import Device, counted, traced
from tilewright.ops import matmul as op
from tilewright.ops.matmul import Config, Problem, matmul
from tilewright.testing import check_op
from tilewright.testing.cases.matmul import HEADS, LLAMA_31_8B, QWEN2_7B

CPU = torch.device("cpu")
H200 = Device.named("H200")
BF16, FP32 = torch.bfloat16, torch.float32
LAYOUTS = list(product((False, True), repeat=2))
FORMULATIONS = {
    "whole": Config(16, 32, 32, group=2),
    "stream-k": Config(16, 16, 16, group=2, stream_k=True),
    "weights first": Config(8, 32, 32, weights_first=True),
    "weights first, stream-k": Config(8, 32, 16, weights_first=True, stream_k=True),
    "dot": Config(4, 8, 64, dot=True),
    "dot, stream-k": Config(2, 8, 32, dot=True, stream_k=True),
}


@pytest.fixture(autouse=True)
def no_grad():
    with torch.inference_mode():
        yield


@pytest.mark.parametrize("config", FORMULATIONS.values(), ids=FORMULATIONS)
@pytest.mark.parametrize(("trans_a", "trans_b"), LAYOUTS)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_every_formulation_on_every_layout(config, trans_a, trans_b, bias):
    check_op(op, Problem(37, 75, 109, BF16, trans_a, trans_b, bias), CPU, config)


@pytest.mark.parametrize("m", [1, 5, 64])
@pytest.mark.parametrize("k", [16, 112, 1000])
@pytest.mark.parametrize("weights_first", [False, True])
def test_stream_k_for_any_split(m, k, weights_first):
    """From one step a tile (nothing to share) to many blocks on one tile; 4 blocks on a CPU."""
    for n in (16, 64, 80, 208):
        check_op(op, Problem(m, n, k, FP32, bias=True), CPU, Config(8, 16, 16, weights_first=weights_first, stream_k=True))


def test_stream_k_gives_the_same_bits_in_any_block_order_and_has_no_race():
    problem, config = Problem(24, 80, 200, BF16, bias=True), Config(8, 16, 16, stream_k=True)
    for order in (1, 2, 3):
        with interpret.checking(races=True, order=order):
            check_op(op, problem, CPU, config)


def test_leading_axes_and_a_vector():
    a, b, bias = torch.randn(2, 3, 5, 48), torch.randn(20, 48), torch.randn(20)
    out = matmul(a, b, bias, trans_b=True)
    torch.testing.assert_close(out, F.linear(a, b, bias))
    assert out.is_contiguous()
    torch.testing.assert_close(matmul(a[0, 0, 0], b.T.contiguous()), b @ a[0, 0, 0])
    torch.testing.assert_close(matmul(a[:, :, 1:3], b, trans_b=True), a[:, :, 1:3] @ b.T)  # leading axes that do not fold


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


@pytest.mark.parametrize(
    ("args", "kwargs", "message"),
    [
        ((A, B), {}, r"a.shape\[-1\] must be 6, the k of b \(6, 8\), got 8"),
        ((A.T.contiguous(), B), {"trans_b": True}, r"a.shape\[-1\] must be 8"),
        ((A, B), {"trans_a": True, "trans_b": True}, r"a.shape\[0\] must be 8"),
        ((A, B[0]), {"trans_b": True}, r"b.dim\(\) must be 2, got 1"),
        ((A, B.bfloat16()), {"trans_b": True}, r"b.dtype must be float32, got bfloat16"),
        ((A.double(), B.double()), {"trans_b": True}, r"a.dtype must be one of bfloat16, float16, float32, got float64"),
        ((A, B, torch.zeros(5)), {"trans_b": True}, r"bias.shape must be \(6,\), got \(5,\)"),
        ((A, B.T), {}, r"b.stride\(-1\) must be 1, got 8"),
        ((A[None], B), {"trans_a": True}, r"a.dim\(\) must be 2 with trans_a, got 3"),
        ((torch.zeros(()), B), {}, r"a.dim\(\) must be at least 1, got 0"),
        ((A.half(), B.half()), {"trans_b": True, "tf32": True}, r"tf32 must be False for torch.float16, got True"),
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
    """1 + 2**-12 is a float32, and 1 in TF32."""
    a, b = torch.full((16, 32), 1 + 2**-12), torch.eye(32)
    assert torch.equal(matmul(a, b), a)
    assert torch.equal(matmul(a, b, tf32=True), torch.ones(16, 32))


def test_partial_sums_are_kept_in_float32():
    """Each partial sum of this row is far above what bf16 can hold beside the rest; only the total is small."""
    k = 4096
    a = torch.ones(1, k, dtype=BF16)
    b = torch.cat((torch.full((16, k // 2), 8.0), torch.full((16, k // 2), -8.0)), 1).to(BF16)
    b[:, 0] += 1 / 32
    out = torch.empty(1, 16, dtype=BF16)
    plan = op.plan(Problem(1, 16, k), Config(8, 16, 64, weights_first=True, stream_k=True), Device.named("CPU"))
    assert plan.then is not None
    op.matmul_out(a, b, None, out, False, True, False)
    assert out.unique().tolist() == [b[0, 0].item() - 8]


@pytest.mark.parametrize(("n", "k"), [*QWEN2_7B, *LLAMA_31_8B, *HEADS])
@pytest.mark.parametrize("m", [1, 4, 8, 16, 33, 64])
def test_a_skinny_product_keeps_most_of_the_gpu_reading(n, k, m):
    problem = Problem(m, n, k)
    plan = op.plan(problem, op.space(problem, H200)[0], H200)
    busy = plan.grid[0] * (plan.num_ctas or 1) / plan.occupancy
    assert busy >= min(100, n / 16), str(plan)


@pytest.mark.parametrize("name", ["H200", "B200", "RTX5090", "A100"])
def test_rows_are_a_runtime_value(name):
    """256 prompt lengths and every decode batch use few kernels: none has a row count among its constants."""
    device = Device.named(name)
    compiled = set()
    for m in (*range(1, 65), *range(65, 8192, 127)):
        problem = Problem(m, 3584, 3584)
        plan = op.plan(problem, op.space(problem, device)[0], device)
        while plan is not None:
            compiled.add((plan.name, plan.constants, plan.num_ctas, plan.occupancy, plan.num_worker_warps))
            plan = plan.then
    assert len(compiled) <= 24


def test_spaces_are_short_and_their_first_is_the_fastest_by_the_model():
    for problem in (Problem(4096, 4096, 4096), Problem(16, 18_944, 3584), Problem(1, 152_064, 3584)):
        assert 10 <= len(op.space(problem, H200)) <= 40


def test_workspace_is_what_the_kernel_indexes():
    """Slot s + b for shared tile s and block b; the interpreter's bounds check stands behind the small cases."""
    problem, config = Problem(2048, 3584, 3584), Config(128, 256, 64, num_worker_warps=8, stream_k=True)
    with traced(H200) as launches:
        from tilewright.testing import run_op

        run_op(op, problem.inputs(torch.device("meta")), config)
    first, second = launches
    slots = first.args[3].shape[0]
    assert slots == config.shared_tiles(problem, H200) + first.plan.grid[0]
    assert second.args[0].shape == first.args[3].shape
    assert first.plan.name == "matmul_kernel"
    assert second.plan.name == "matmul_reduce_kernel"
