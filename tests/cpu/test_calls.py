"""Calls as servers make them: tensors that are far apart, autocast, other libraries beside us,
numbers that mean nothing, products of nothing.
"""

import copy
import importlib
import io
import mmap
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from cuda.tile.compilation import export_kernel
from tensors import randn

import tilewright
from tilewright import ops
from tilewright.compile.signature import kernel_signature
from tilewright.launch import Device, decisions, traced
from tilewright.launch.far import with_int64_indices
from tilewright.testing import op_name, outputs, public_function, run_op, seeded_inputs
from tilewright.testing.cases import cases

pytestmark = pytest.mark.usefixtures("inference")
# Fields of a problem that only make its inputs: no call knows them.
# The length of a cache is a power of two in a call.
OF_INPUTS = {"embedding": {"vocab": 0}, "dropout": {"p": 0.5}, "moe_route": {"scale": 1.0}, "rms_norm_route": {"scale": 1.0}}
OPS = [pytest.param(op, id=op_name(op)) for op in ops.ALL]
CPU = torch.device("cpu")
FAR = 2**31 + 16
ELEMENTS = 1 << 18
NORESERVE = 0x4000  # of mmap on Linux; Python has no name for it before 3.13


@pytest.mark.parametrize("op", OPS)
def test_a_call_asks_with_the_problem_that_was_timed(op):
    """Timings of other options say less, and a default that a call spells out would be another."""
    for problem in cases(op, "bench")[::5]:
        with traced(Device.named("H200")), decisions() as found:
            run_op(op, problem.inputs(torch.device("meta")))
        asked = next(choice.problem for choice in found if choice.decision is op.DECISION)
        inputs_only = OF_INPUTS.get(op_name(op), {}) | ({"max_len": 0} if hasattr(problem, "max_len") else {})
        assert replace(asked, **inputs_only) == replace(problem, **inputs_only)


def small_inputs(op, most=2):
    """Inputs of a few small problems, without those of which parts of the result stay unwritten."""
    problems = [problem for problem in cases(op, "small") if not getattr(problem, "masked", False)]
    found = (seeded_inputs(op, problem, CPU) for problem in problems)
    return [x for x in found if sum(t.numel() for t in x.values() if isinstance(t, torch.Tensor)) <= ELEMENTS][:most]


def called(op, inputs, spread=None):
    """The bits of what an op returns; its inputs stay as they are, but for those of `spread`."""
    found = public_function(op)(**copy.deepcopy(inputs), **(spread or {}))
    return [x.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8) for x in outputs(found)]


def same(found, expected):
    return all(map(torch.equal, found, expected))


# ------------------------------------------------------------------------------------ far apart
def far(x, axis, stride=FAR):
    """x with a stride beyond 2**31 elements, in memory that is reserved and hardly used."""
    strides = [stride if i == axis else own for i, own in enumerate(x.stride())]
    last = 1 + sum((n - 1) * own for n, own in zip(x.shape, strides, strict=True))
    memory = mmap.mmap(-1, last * x.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    return torch.frombuffer(memory, dtype=torch.uint8).view(x.dtype).as_strided(x.shape, strides).copy_(x)


@pytest.mark.parametrize("op", [pytest.param(op, id=op_name(op)) for op in ops.ALL if op is not ops.dropout])  # its x is one row
def test_strides_beyond_two_to_the_31_elements_are_taken(op):
    seen = set()
    for inputs in small_inputs(op):
        expected = None
        for name, x in inputs.items():
            if not isinstance(x, torch.Tensor) or x.dim() < 2 or x.stride(-1) != 1:
                continue
            for axis in [axis for axis in range(x.dim() - 1) if x.shape[axis] > 1 and x.stride(axis) and (name, axis) not in seen]:
                seen.add((name, axis))
                expected = expected or called(op, inputs)
                with torch.inference_mode(False):
                    spread = far(x.clone(), axis)
                assert same(called(op, {key: t for key, t in inputs.items() if key != name}, {name: spread}), expected), (name, axis)
    assert seen


def test_the_stride_of_an_axis_of_one_element_means_nothing():
    x, weight = randn(1, 3, 64), randn(64)
    kernel = ops.rms_norm.rms_norm_kernel
    spread = far(x, 0)
    assert spread.stride() == (FAR, 64, 1)
    assert torch.equal(tilewright.attention(far(x[None], 0), x[None], x[None]), tilewright.attention(x[None], x[None], x[None]))
    found, (near, same_weight) = with_int64_indices(kernel, (spread, weight))
    assert found is kernel, "no second binary"
    assert near.stride() == (64, 64, 1)
    assert same_weight is weight


def test_an_integer_that_does_not_fit_stays_an_error():
    try:
        raise OverflowError("kernel argument 4294967296 does not fit int32")
    except OverflowError:
        with pytest.raises(OverflowError, match="does not fit int32"):
            with_int64_indices(ops.rms_norm.rms_norm_kernel, (randn(2, 2), 1 << 32))


def test_an_axis_along_which_32_bits_cannot_count_is_refused():
    """argmax named column -2147479551, and softmax read in front of its row."""
    x = far(torch.zeros(2, 1).bfloat16(), 0, 2**31 + 4099).as_strided((1, 2**31 + 4099), (2**31 + 4099, 1))
    seed, long = torch.tensor(1), torch.zeros(1, 8).expand(2**31 - 2**20, 8)
    assert torch.equal(tilewright.embedding(torch.tensor([2**31 - 2**20 - 2]), long[:-1]), long[:1])
    for name, call in {
        "x": lambda: tilewright.argmax(x),
        "logits": lambda: tilewright.sample(x, seed),
        "weight": lambda: tilewright.embedding(torch.tensor([2**31]), torch.zeros(1, 8).expand(2**31 + 5, 8)),
    }.items():
        with pytest.raises(ValueError, match=rf"^{name}.shape must be at most 2146435071 along each axis \(call the op on parts of it\), got \("):
            call()
    for call in (tilewright.softmax, tilewright.quantize_fp8, lambda x: tilewright.silu_mul(x, x), lambda x: tilewright.rms_norm(x, x[0])):
        with pytest.raises(ValueError, match="shape must be at most 2146435071 along each axis"):
            call(x)
    with traced(Device.named("H200")) as launches:  # planning takes any length
        tilewright.softmax(torch.empty(1, 2**31, device="meta"))
    assert launches


def test_lists_of_matrices_refuse_far_rows():
    a, b = randn(2, 16).bfloat16(), randn(16, 16).bfloat16()
    with pytest.raises(
        ValueError, match=r"a\[1\].stride\(\) must be below 2\*\*31 elements \(call .contiguous\(\), .*\), got strides \(2147483664, 1\)"
    ):
        tilewright.grouped_gemm_list([a, far(a, 0)], [b, b])


@pytest.mark.parametrize("op", [ops.rms_norm, ops.attention_decode], ids=op_name)
def test_a_gpu_gets_kernels_with_64_bit_indices(op):
    """They compile, hints included, and only for far arrays."""
    with traced(Device.named("H200")) as launches:
        for problem in cases(op, "real"):
            public_function(op)(**problem.inputs(torch.device("meta")))
    launch = next(launch for launch in launches if next(iter(launch.args.values())).shape[0] > 1)
    kernel, args = launch.launch.hinted_kernel, tuple(launch.args.values())
    x = torch.empty(1, dtype=args[0].dtype, device="meta").as_strided(args[0].shape, (FAR * 8, *args[0].stride()[1:]))
    wide, args = with_int64_indices(kernel, (x, *args[1:]))
    assert wide is not kernel
    assert wide is with_int64_indices(kernel, args)[0]
    assert wide._compiler_options == kernel._compiler_options
    assert kernel_signature(wide, args).symbol != kernel_signature(kernel, args).symbol
    binary = io.BytesIO()
    export_kernel(wide, [kernel_signature(wide, args)], binary, gpu_code="sm_90", output_format="cubin")
    assert len(binary.getvalue()) > 1000


# ------------------------------------------------------------------------------ others beside us
@pytest.mark.parametrize("op", OPS)
def test_autocast_changes_no_bit(op):
    (inputs,) = small_inputs(op, most=1)
    expected = called(op, inputs)
    dtype, other = (torch.float16, torch.bfloat16) if ops.ALL.index(op) % 2 else (torch.bfloat16, torch.float16)
    with torch.autocast("cpu", dtype=dtype):
        assert same(called(op, inputs), expected)
        assert torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cuda", True)  # what torch.autocast("cuda") does where there is a GPU
    torch.set_autocast_dtype("cuda", other)
    try:
        assert same(called(op, inputs), expected)
    finally:
        torch.set_autocast_enabled("cuda", False)


@pytest.mark.parametrize("mx_format", ["mxfp8", "mxfp4", "nvfp4"])
def test_flushed_denormals_change_no_code(mx_format):
    """The interpreter's e2m1 codes are numbers below the normal ones: half of them were others."""
    x = torch.randn(4, 64) * torch.tensor([1.0, 1e-38, 1e-40, 0.0])[:, None]
    calls = (tilewright.quantize_mx, importlib.import_module("tilewright.ops.quantize_mx").reference)
    expected = [called(x, mx_format=mx_format) for called in calls]
    torch.set_flush_denormal(True)
    try:
        found = [called(x, mx_format=mx_format) for called in calls]
        assert (x[2] * 1).count_nonzero() == 0  # the flag stays the caller's
    finally:
        torch.set_flush_denormal(False)
    for ours, right in zip(found, expected, strict=True):
        assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(ours, right, strict=True))


def test_autocast_leaves_queries_of_another_half():
    """It refused to join fp16 queries where it casts to bf16."""
    problem = next(p for p in cases(ops.mla_decode, "small") if p.codes and p.dtype is torch.float16)
    inputs = problem.inputs(torch.device("cpu"))
    expected = called(ops.mla_decode, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same(called(ops.mla_decode, inputs), expected)


def test_a_library_that_replaces_the_launcher_of_cutile_does_no_harm():
    """Another library puts a function without keywords there when it is imported, before us or
    behind us.

    Without a GPU, cuTile's own launcher fails at its driver.
    """
    code = """
import os, types
import cuda.tile as ct, torch
real = ct.launch
def theirs(stream, grid, kernel, args): print("replaced", flush=True)
behind_us = os.fork()
if not behind_us: ct.launch = theirs
import tilewright
ct.launch = theirs
from tilewright.launch import Bound, Device, Launch, run
assert run.launch_kernel is real
from tilewright.ops import softmax
x = torch.randn(2, 8)
assert torch.allclose(tilewright.softmax(x), x.softmax(-1))
torch._C._cuda_getDevice = lambda: 0
torch._C._cuda_getCurrentRawStream = lambda index: 0
class OnGpu:
    device = types.SimpleNamespace(type="cuda", index=0)
try:
    softmax.DECISION.launches(Device.named("H200"), rows=2, cols=8, dtype=torch.float32).run(OnGpu(), x)
except Exception as error:
    os.write(1, b"real " + type(error).__name__.encode() + bytes([10]))  # at once: two processes share the pipe
assert not behind_us or os.wait()[1] == 0
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert [line.split()[0] for line in run.stdout.splitlines()] == ["real", "real"], run.stdout


# --------------------------------------------------------------------- numbers that mean nothing
NAN, INF = float("nan"), float("inf")
X, WEIGHT, Q = torch.ones(2, 64), torch.ones(64), torch.ones(1, 2, 4, 64)
HALF = X.bfloat16()
LATENTS = torch.ones(1, 8, 96, dtype=torch.bfloat16)
QL, QR = torch.ones(1, 2, 1, 64, dtype=torch.bfloat16), torch.ones(1, 2, 1, 32, dtype=torch.bfloat16)
SPARSE = (torch.ones(1, 2, 1, 64, dtype=torch.bfloat16), torch.ones(1, 4, 64, dtype=torch.bfloat16), torch.zeros(1, 1, 2, dtype=torch.int32))
MLA = {"k_nope": Q, "k_rope": Q[:, :1], "v": Q}
POSITIONS = torch.zeros(1, 4, dtype=torch.int32)
MATRICES = (HALF[None], HALF[None, :1].mT.contiguous())
EXPERTS = {"weights": torch.ones(2, 1), "ids": torch.zeros(2, 1, dtype=torch.int32)}
BAD_EPS = (0.0, -1e-6, NAN, INF, -INF, 1e-50, 1e50)
BAD_SCALE = (0.0, 0, -1.0, NAN, INF, -INF)
BAD_FACTOR = (NAN, INF, -INF, 1e50)
BAD_WINDOW = (0, -1)
NUMBERS = {
    "rms_norm eps": (BAD_EPS, lambda v: tilewright.rms_norm(X, WEIGHT, v)),
    "rms_norm weight_offset": (BAD_FACTOR, lambda v: tilewright.rms_norm(X, WEIGHT, weight_offset=v)),
    "rms_norm eps of nothing": (BAD_EPS, lambda v: tilewright.rms_norm(X[:0], WEIGHT, v)),
    "layer_norm eps": (BAD_EPS, lambda v: tilewright.layer_norm(X, eps=v)),
    "rms_norm_quant eps": (BAD_EPS, lambda v: tilewright.rms_norm_quant(X, WEIGHT, v)),
    "rms_norm_quant weight_offset": (BAD_FACTOR, lambda v: tilewright.rms_norm_quant(X, WEIGHT, weight_offset=v)),
    "rms_norm_matmul eps": (BAD_EPS, lambda v: tilewright.rms_norm_matmul(X, WEIGHT, X, eps=v)),
    "rms_norm_matmul weight_offset": (BAD_FACTOR, lambda v: tilewright.rms_norm_matmul(X, WEIGHT, X, weight_offset=v)),
    "rms_norm_route eps": (BAD_EPS, lambda v: tilewright.rms_norm_route(HALF, HALF[0], HALF, 1, eps=v)),
    "rms_norm_route weight_offset": (BAD_FACTOR, lambda v: tilewright.rms_norm_route(HALF, HALF[0], HALF, 1, weight_offset=v)),
    "rms_norm_route scale": (BAD_FACTOR, lambda v: tilewright.rms_norm_route(HALF, HALF[0], HALF, 1, scale=v)),
    "kv_append eps": (BAD_EPS, lambda v: tilewright.kv_append(Q, Q, Q.clone(), Q.clone(), positions=POSITIONS, k_norm=WEIGHT, eps=v)),
    "attention scale": (BAD_SCALE, lambda v: tilewright.attention(Q, Q, Q, scale=v)),
    "attention softcap": ((*BAD_SCALE, 1e38, 1e-38), lambda v: tilewright.attention(Q, Q, Q, softcap=v)),
    "attention window": (BAD_WINDOW, lambda v: tilewright.attention(Q, Q, Q, window=v)),
    "attention_decode scale": (BAD_SCALE, lambda v: tilewright.attention_decode(Q, Q, Q, scale=v)),
    "attention_decode window": (BAD_WINDOW, lambda v: tilewright.attention_decode(Q, Q, Q, window=v)),
    "mla scale": (BAD_SCALE, lambda v: tilewright.mla(Q.bfloat16(), Q.bfloat16(), **{k: x.bfloat16() for k, x in MLA.items()}, scale=v)),
    "mla_decode scale": (BAD_SCALE, lambda v: tilewright.mla_decode(QL, QR, LATENTS, scale=v)),
    "sparse_decode scale": (BAD_SCALE, lambda v: tilewright.sparse_decode(*SPARSE, scale=v)),
    "moe_route scale": (BAD_FACTOR, lambda v: tilewright.moe_route(X, 1, scale=v)),
    "embedding scale": (BAD_FACTOR, lambda v: tilewright.embedding(POSITIONS, X, scale=v)),
    "rope scaling": (BAD_FACTOR, lambda v: tilewright.rope(Q.clone(), Q.clone(), positions=POSITIONS, inv_freq=WEIGHT[:32], scaling=v)),
    "dropout p": ((-0.1, 1.1, NAN, INF), lambda v: tilewright.dropout(X, v, torch.tensor(0))),
    "moe alpha": (BAD_SCALE, lambda v: tilewright.moe(HALF, *MATRICES, **EXPERTS, alpha=v)),
    "moe limit": (BAD_SCALE, lambda v: tilewright.moe(HALF, *MATRICES, **EXPERTS, limit=v)),
    "moe up_offset": (
        BAD_FACTOR,
        lambda v: tilewright.moe(HALF, *MATRICES, **EXPERTS, up_offset=v),
    ),
}


@pytest.mark.parametrize(("scale", "wanted"), [(1e300, "finite in float32"), (-1e300, "finite in float32"), (INF, "finite"), (NAN, "finite")])
def test_a_number_that_only_float32_cannot_hold_is_not_told_to_be_finite(scale, wanted):
    with pytest.raises(ValueError, match=f"^scale must be {wanted}, got {re.escape(str(scale))}"):
        tilewright.moe_route(X, 1, scale=scale)


@pytest.mark.parametrize("what", NUMBERS)
def test_numbers_that_mean_nothing_are_refused(what):
    """The host knows them, so every call refuses them."""
    values, call = NUMBERS[what]
    for value in values:
        with pytest.raises(ValueError, match=rf"^{what.split()[1]} must be .*, got {re.escape(str(value))}"):
            call(value)


@pytest.mark.parametrize("window", [NAN, INF, 2.5, True])
def test_a_window_counts_keys(window):
    for call in (tilewright.attention, tilewright.attention_decode):
        with pytest.raises(TypeError, match=r"^window must be a Python integer, got"):
            call(Q, Q, Q, window=window)


PRODUCTS_OF_NOTHING = [(m, n, k) for m in (0, 3) for n in (0, 4) for k in (0, 256) if 0 in (m, n, k)]


@pytest.mark.parametrize(("m", "n", "k"), PRODUCTS_OF_NOTHING)
def test_a_product_of_nothing_is_empty_or_as_if_it_were_zero(m, n, k):
    zeros, rest = torch.zeros(m, n), (torch.randn(n), torch.randn(m, n))
    for trans_a in (False, True):
        for trans_b in (False, True):
            a, b = torch.zeros((k, m) if trans_a else (m, k)), torch.zeros((n, k) if trans_b else (k, n))
            options = {"trans_a": trans_a, "trans_b": trans_b}
            assert torch.equal(tilewright.matmul(a, b, **options), zeros)
            assert torch.equal(tilewright.matmul(a, b, rest[0], residual=rest[1], **options), rest[0] + rest[1])
            half = tilewright.matmul(a, b, rest[0], silu_mul=True, out_scale=torch.tensor(2.0), **options)
            assert torch.allclose(half, (2 * torch.nn.functional.silu(rest[0][::2]) * rest[0][1::2]).expand(m, n // 2))
            for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
                x, w = a.to(dtype), b.to(dtype)
                for options_b, batched in ((2, 2), (1, 2), (2, 1)):
                    found = tilewright.bmm(x.expand(options_b, *x.shape), w.expand(batched, *w.shape), **options)
                    assert torch.equal(found.float(), zeros.expand(2, m, n))
                if dtype is torch.bfloat16:
                    continue
                row, block, wide = -(-k // 128), -(-n // 128), (m, n)
                scales = (((), ()), ((m,), (n,)), ((m, row), (block, row)))
                for shape_a, shape_b in scales:
                    found = tilewright.matmul(x, w, scale_a=torch.ones(shape_a), scale_b=torch.ones(shape_b), **options)
                    assert found.shape == wide
                    assert torch.equal(found.float(), zeros)
                    batch = [torch.ones(2, *shape) for shape in (shape_a, shape_b)]
                    found = tilewright.bmm(x.expand(2, *x.shape), w.expand(2, *w.shape), scale_a=batch[0], scale_b=batch[1], **options)
                    assert torch.equal(found.float(), zeros.expand(2, m, n))
                    if not trans_a:
                        ends, ones = torch.tensor([m, m], dtype=torch.int32), torch.ones(2, *shape_b)
                        each = {"scale_a": torch.ones(shape_a), "scale_b": ones, "trans_b": trans_b}
                        assert torch.equal(tilewright.grouped_gemm(x, w.expand(2, *w.shape), ends, **each).float(), zeros)
                        each = {"scale_a": torch.ones(2, *shape_a), "scale_b": ones, "trans_b": trans_b}
                        found = tilewright.grouped_gemm(x.expand(2, *x.shape), w.expand(2, *w.shape), counts=ends.clamp(max=m), **each)
                        assert torch.equal(found.float(), zeros.expand(2, m, n))
                        listed = {"scale_a": [torch.ones(shape_a)], "scale_b": [torch.ones(shape_b)], "trans_b": trans_b}
                        assert torch.equal(tilewright.grouped_gemm_list([x], [w], **listed)[0].float(), zeros)


@pytest.mark.parametrize("scale", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_a_product_with_scales_and_no_columns_has_its_rows(scale):
    a, b = randn(3, 16).to(scale), randn(16, 0).to(scale)
    assert tilewright.matmul(a, b).shape == (3, 0)
    assert tilewright.matmul(a, b, scale_a=torch.ones(3), scale_b=torch.ones(0)).shape == (3, 0)
    with pytest.raises(ValueError, match=r"scale_a.shape must be \(3,\)"):
        tilewright.matmul(a, b, scale_a=torch.ones(0), scale_b=torch.ones(0))
