"""The cases of tests/cpu on a GPU, same ids, and what only a GPU has: streams, graphs, devices."""

import pytest
import torch

from tilewright import ops
from tilewright.launch import Device
from tilewright.ops.common.scaling import Scaling
from tilewright.testing import check_op, op_name, outputs, public_function, run_op, seeded_inputs
from tilewright.testing.cases import cases
from tilewright.testing.definitions.products import code_sums
from tilewright.testing.definitions.rows import FP8

OPS = [pytest.param(op, id=op_name(op)) for op in ops.ALL]
SMALL = [pytest.param(op, p, id=f"{op_name(op)}-{i}") for op in ops.ALL for i, p in enumerate(cases(op, "small"))]
REAL = [pytest.param(op, p, id=f"{op_name(op)}-{i}") for op in ops.ALL for i, p in enumerate(cases(op, "real"))]


def clones(inputs):
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}


def known(tensor):
    """The tensor with numbers instead of NaN; fp8 as fp32, since torch has no nan_to_num for it."""
    return (tensor.float() if tensor.dtype.itemsize == 1 else tensor).nan_to_num()


def same(a, b):
    return all(torch.equal(known(x), known(y)) for x, y in zip(outputs(a), outputs(b), strict=True))


@pytest.mark.parametrize(("op", "problem"), SMALL)
def test_configs_are_as_accurate_as_torch(op, problem, gpu):
    """The default and a sample of the space; `tilewright verify` runs all of it."""
    configs = op.space(problem, Device.of(torch.empty(0, device=gpu)))
    for config in {0: configs[0], 1: configs[len(configs) // 3], 2: configs[2 * len(configs) // 3], 3: configs[-1]}.values():
        check_op(op, problem, gpu, config)


@pytest.mark.parametrize(("op", "problem"), REAL)
def test_real_shapes_are_as_accurate_as_torch(op, problem, gpu):
    check_op(op, problem, gpu)


@pytest.mark.parametrize(
    ("op", "problem"),
    [
        (ops.matmul, ops.matmul.Problem(300, 1040, 520, torch.bfloat16, bias=True)),
        (ops.matmul, ops.matmul.Problem(77, 208, 1000, torch.float16, trans_b=False)),
        (ops.matmul, ops.matmul.Problem(300, 1040, 528, torch.float8_e4m3fn, bias=True, scaling=Scaling.ROW)),
        (ops.matmul, ops.matmul.Problem(340, 272, 8704, torch.float8_e5m2, scaling=Scaling.TENSOR)),
        (ops.bmm, ops.bmm.Problem(3, 300, 1040, 544, torch.bfloat16, trans_b=True, one_b=True)),
        (ops.bmm, ops.bmm.Problem(9, 77, 208, 992, torch.float16, one_a=True, out_dtype=torch.float32)),
        (ops.bmm, ops.bmm.Problem(5, 608, 384, 992, torch.float16, trans_a=True, out_dtype=torch.float16)),
    ],
    ids=["weights", "columns", "codes", "runs", "bmm-weights", "bmm-columns", "bmm-rows"],
)
def test_products_whose_last_tiles_begin_earlier(op, problem, gpu):
    device = Device.of(torch.empty(0, device=gpu))
    configs = [config for config in op.CHOICES.candidates(problem, device) if config.moved]
    assert configs or device.arch != "sm_90"  # others may have no such tile for these sizes
    for config in configs[::3]:
        check_op(op, problem, gpu, config)


@pytest.mark.parametrize(("m", "k"), [(3, 9000), (40, 16000), (130, 20000)])
def test_products_of_codes_whose_blocks_share_a_long_k(m, k, gpu):
    device, problem = Device.of(torch.empty(0, device=gpu)), ops.matmul.Problem(m, 512, k, torch.float8_e4m3fn, scaling=Scaling.ROW)
    configs = [config for config in ops.matmul.CHOICES.candidates(problem, device) if problem.gemm.fast(config, device)]
    assert configs or device.arch != "sm_90"
    for config in configs[::3]:
        check_op(ops.matmul, problem, gpu, config)


@pytest.mark.skipif(torch.cuda.device_count() == 0 or torch.cuda.get_device_capability()[0] != 9, reason="no Hopper GPU")
@pytest.mark.parametrize("dtype", FP8)
@pytest.mark.parametrize("k", [6, 17, 32, 48, 112, 128])
def test_sums_of_codes_are_the_definition_bit_for_bit(k, dtype, gpu):
    """So that a bound is what the tensor core itself loses; of subnormal codes too."""
    torch.manual_seed(k)
    a, b = ((torch.randn(64, k, device=gpu) * torch.rand(64, k, device=gpu) ** 12).to(dtype) for _ in range(2))
    found = ops.matmul.matmul(a, b, trans_b=True, out_dtype=torch.float32)
    assert torch.equal(found, code_sums(a, b, fresh=128 if k % 16 == 0 else 32))


@pytest.mark.parametrize("op", OPS)
def test_same_bits_on_another_stream_and_twice(op, gpu):
    problem = cases(op, "small")[0]
    inputs = seeded_inputs(op, problem, gpu)
    expected = run_op(op, clones(inputs))
    stream = torch.cuda.Stream()
    mine = clones(inputs)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        busy = torch.randn(4096, 4096, device=gpu)
        for _ in range(20):
            busy = busy @ busy / 64  # the op must queue behind this, on this stream
        for value in mine.values():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value.copy_(value.clone())
        found = run_op(op, mine)
    stream.synchronize()
    assert same(found, expected)


@pytest.mark.parametrize("op", OPS)
def test_capture_and_replay_three_times(op, gpu):
    problem = cases(op, "small")[0]
    inputs = seeded_inputs(op, problem, gpu)
    expected = run_op(op, clones(inputs))
    static = clones(inputs)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run_op(op, clones(inputs))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run_op(op, static)
    for _ in range(3):
        for name, value in inputs.items():
            if isinstance(value, torch.Tensor):
                static[name].copy_(value)  # in-place ops changed it
        graph.replay()
        torch.cuda.synchronize()
        assert same(found, expected)


@pytest.mark.parametrize("op", OPS)
def test_compiles_to_one_graph(op, gpu):
    problem = cases(op, "small")[0]
    inputs = seeded_inputs(op, problem, gpu)
    expected = run_op(op, clones(inputs))
    with torch.inference_mode(False), torch.no_grad():
        torch._dynamo.reset()
        found = torch.compile(public_function(op), fullgraph=True)(**clones(inputs))
    assert same(found, expected)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_runs_on_the_device_of_its_tensors(op):
    """Called with device 0 current, on tensors of device 1."""
    problem = cases(op, "small")[0]
    other = torch.device("cuda", 1)
    with torch.cuda.device(0):
        check_op(op, problem, other)
        assert torch.cuda.current_device() == 0
