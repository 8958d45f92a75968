"""What a third adversary found, as classes: each argument of each public function, changed."""

import inspect
import itertools
import re
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright
from tilewright import ops
from tilewright.interpret import checking
from tilewright.launch import Device, forced_config
from tilewright.ops.attention_decode.cascade import cascade_decode
from tilewright.ops.common.scaling import Scaling
from tilewright.ops.grouped_gemm import grouped_gemm_list
from tilewright.testing.cases import cases
from tilewright.testing.check import op_name, outputs, public_function, seeded_inputs

FUNCTIONS = [*map(public_function, ops.ALL), cascade_decode, grouped_gemm_list]
META, CPU = torch.device("meta"), torch.device("cpu")


def options(function: Any, kind: str) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if getattr(p.annotation, "__name__", str(p.annotation)) == kind]


def every_kind(op: Any) -> Iterator[dict[str, Any]]:
    """Inputs, on the meta device, of a small problem for each set of arguments that are given."""
    seen = set()
    for problem in cases(op, "small"):
        inputs = problem.inputs(META)
        given = tuple(name for name, x in inputs.items() if isinstance(x, Tensor) or x)
        if given not in seen:
            seen.add(given)
            yield inputs


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_an_option_is_true_or_false(function) -> None:
    """return_lse="no" was True, and 1.0 whatever a call before it had been."""
    required = {p.name: None for p in inspect.signature(function).parameters.values() if p.default is p.empty}
    for name in options(function, "bool"):
        for wrong in ("no", None, 1, 1.0, [], torch.tensor(True)):
            with pytest.raises(ValueError, match=f"^{name} must be True or False, got {re.escape(repr(wrong))}$"):
                function(**{**required, name: wrong})


@pytest.mark.parametrize("op", ops.ALL, ids=op_name)
def test_what_is_no_tensor_or_lies_elsewhere_is_named(op) -> None:
    function = public_function(op)
    for inputs in every_kind(op):
        first, *others = (name for name, x in inputs.items() if isinstance(x, Tensor))
        for name in (first, *others):
            with pytest.raises(TypeError, match=f"^{name} must be a torch.Tensor, got list$"):
                function(**{**inputs, name: [1.0]})
        for name in others:
            with pytest.raises(ValueError, match=rf"^{name}(\.mT)?\.device must be meta, got cpu$"):
                function(**{**inputs, name: torch.empty_like(inputs[name], device=CPU)})


@pytest.mark.parametrize("op", ops.ALL, ids=op_name)
def test_a_tensor_whose_memory_holds_something_else_is_named(op) -> None:
    """A kernel would read a negated view without its sign, and the indices of a sparse one."""
    function = public_function(op)
    for inputs in every_kind(op):
        for name, x in inputs.items():
            if not isinstance(x, Tensor) or x.dtype.itemsize == 1:
                continue
            for wrong, message in (
                (torch._neg_view(x), r"must be what its memory holds"),
                (torch.empty(x.shape, dtype=x.dtype, layout=torch.sparse_coo, device=META), r"\.layout must be torch\.strided"),
            ):
                with pytest.raises(ValueError, match=rf"^{name}{message}|^{name} {message}"):
                    function(**{**inputs, name: wrong})


@pytest.mark.parametrize(
    ("op", "name"),
    [("attention", "max_q_len"), ("attention_decode", "v_dim"), ("sparse_decode", "v_dim"), ("grouped_gemm", "expected_rows")],
)
def test_a_count_is_a_python_integer(op, name) -> None:
    module = getattr(ops, op)
    wanted = {"max_q_len": "cu_seqlens_q", "expected_rows": "offsets"}.get(name, "q")
    inputs = next(i for i in every_kind(module) if i.get(wanted) is not None and (name != "v_dim" or i.get("v") is None))
    for wrong in (1.5, "3", torch.tensor(1)):
        with pytest.raises(TypeError, match=f"{name} must be a Python integer, got "):
            public_function(module)(**{**inputs, name: wrong})


@pytest.mark.parametrize(
    ("op", "name", "wrong", "message"),
    [
        ("ssd", "b", None, "b must be a torch.Tensor, got NoneType"),
        ("sparse_index", "weights", None, "weights must be a torch.Tensor, got NoneType"),
        ("sparse_index", "topk", 2**31, "topk must be in 1..2**31 - 1, got 2147483648"),
        ("gated_delta_rule", "scale", 2**31, "scale must be an integer in -2**31..2**31 - 1, or a float, got 2147483648"),
        ("attention", "scale", 2**70, "scale must be an integer in -2**31..2**31 - 1, or a float, got 1180591620717411303424"),
        ("quantized_moe", "up_offset", -(2**70), "up_offset must be an integer in -2**31..2**31 - 1, or a float, got -1180591620717411303424"),
        ("quantized_moe", "weight_format", [], "weight_format must be one of "),
        ("quantize_mx", "mx_format", {}, "mx_format must be one of "),
        ("quantized_matmul", "eps", 0.0, "eps must be positive, got 0.0"),  # also without a norm
        ("quantized_matmul", "weight_offset", [], "weight_offset must be a Python number, got []"),
    ],
)
def test_a_call_is_refused_in_our_words(op, name, wrong, message) -> None:
    module = getattr(ops, op)
    inputs = next(iter(every_kind(module)))
    with pytest.raises((TypeError, ValueError), match=rf"^{re.escape(message)}"):
        public_function(module)(**{**inputs, name: wrong})


E4M3 = torch.float8_e4m3fn
CODES, MATRIX = torch.zeros(1, 1, 32, 64).to(E4M3), torch.zeros(2, 64)
ROWS, ONE_ID = torch.zeros(2, 64).half(), {"weights": torch.ones(2, 1), "ids": torch.zeros(2, 1, dtype=torch.int64)}
NEWEST, PLACE = torch.zeros(1, 1, 1, 64), torch.zeros(1, 1, dtype=torch.int32)
IN_OUR_WORDS = [
    (
        lambda: tilewright.kv_append(NEWEST, NEWEST, CODES, CODES.clone(), positions=PLACE),
        "k_scale must be given for a cache of float8_e4m3fn, as fp32 of shape (), one for all codes, or (1, 1, 32), ",
    ),
    (
        lambda: tilewright.moe(ROWS, CODES[:, 0], CODES[0, :, :, :16], **ONE_ID),
        "scale_gate_up must be given for a gate_up of float8_e4m3fn, got None",
    ),
    (
        lambda: tilewright.mla_decode(NEWEST.half(), NEWEST[..., :24].half(), torch.zeros(1, 5, 88).half(), scale=0.1),
        "q_rope.shape must be (1, 1, 1, rope), rope a power of two, at least 16 and less than 64, got (1, 1, 1, 24)",
    ),
    (lambda: tilewright.rope(NEWEST, NEWEST.clone(), MATRIX[None].double(), MATRIX[None]), "cos.dtype must be float32, got float64"),
    (lambda: tilewright.softmax(torch.empty(2, 3, device="meta")), "device of the tensors must be cpu or cuda, got meta, which holds no values: "),
    (lambda: tilewright.grouped_gemm_list(ROWS, [ROWS]), "a must be a list or tuple of tensors, got Tensor"),
    (lambda: tilewright.grouped_gemm_list([ROWS], [ROWS.mT.contiguous()], out=ROWS), "out must be a list or tuple of tensors, got Tensor"),
    (lambda: tilewright.QuantizedExperts.of(MATRIX, "int8"), "weight.dim() must be 4, got 2"),
    (
        lambda: tilewright.QuantizedExperts.of(torch.zeros(2, 3, 4, 16), "int8"),
        "weight.shape must be [experts, parts, n, k], with 2 parts for gate and up, else 1, got (2, 3, 4, 16)",
    ),
]


@pytest.mark.parametrize(("call", "message"), IN_OUR_WORDS)
def test_a_natural_mistake_is_answered_by_what_is_missing(call, message) -> None:
    """Each of these blamed another argument, or said what no reader can use."""
    with pytest.raises((TypeError, ValueError), match=rf"^{re.escape(message)}"):
        call()


@pytest.mark.parametrize("op", [ops.mla_decode, ops.sparse_decode], ids=op_name)
def test_a_required_scale_has_no_default(op) -> None:
    """None took head_dim ** -0.5, which is wrong for absorbed queries."""
    with pytest.raises(TypeError, match="scale must be a Python number, got None"):
        public_function(op)(**{**next(every_kind(op)), "scale": None})


WRITERS = {
    "rope": ("q", "k"),
    "kv_append": ("k_cache", "v_cache", "q", "k_scale", "v_scale"),
    "gated_delta_rule": ("state",),
    "causal_conv1d": ("state",),
}


@pytest.mark.parametrize("op", [op for op in ops.ALL if op_name(op) in WRITERS], ids=op_name)
def test_what_is_written_is_no_part_of_what_is_read(op) -> None:
    """For each pair: cosines inside of the queries, a block table inside of the cache."""
    function, pairs = public_function(op), set()
    for inputs in every_kind(op):
        given = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
        for written in WRITERS[op_name(op)]:
            for name, x in given.items():
                out = given.get(written)
                if out is None or name == written or not out.dim() or not x.dim() or (written, name) in pairs:
                    continue
                pairs.add((written, name))
                size = max(x.numel() * x.itemsize, out.numel() * out.itemsize)
                memory = torch.empty(-(-size // 8) * 8, dtype=torch.uint8, device=META)
                changed = {key: memory[: t.numel() * t.itemsize].view(t.dtype).view(t.shape) for key, t in ((written, out), (name, x))}
                with pytest.raises(ValueError, match=f"({written}|{name}) must be free of elements of ({written}|{name})"):
                    function(**{**inputs, **changed})
    assert len(pairs) >= 4


@pytest.mark.parametrize("op", [op for op in ops.ALL if op_name(op) in WRITERS], ids=op_name)
def test_an_axis_that_steps_on_itself_is_refused(op) -> None:
    """Rows one element apart: two indices, one element, and two blocks that write it."""
    for inputs in every_kind(op):
        for name in WRITERS[op_name(op)]:
            x = inputs.get(name)
            if x is None or x.dim() < 3 or x.shape[-2] < 2 or x.shape[-1] < 2:
                continue
            strides = [*x.stride()]
            strides[-2] = 4 if x.shape[-1] > 4 else 1
            with pytest.raises(ValueError, match=f"{name} must be free of broadcast axes, because it is written in place, and of others that meet"):
                public_function(op)(**{**inputs, name: x.as_strided(x.shape, strides)})


@pytest.mark.parametrize("op", [op for op in ops.ALL if op_name(op) in WRITERS], ids=op_name)
def test_transforms_of_torch_func_are_refused_where_memory_is_compared(op) -> None:
    """torch's own words were "Cannot access storage of BatchedTensorImpl"."""
    function = public_function(op)
    inputs = min((p.inputs(CPU) for p in cases(op, "small")), key=lambda i: sum(x.numel() for x in i.values() if isinstance(x, Tensor)))
    name, x = next((name, x) for name, x in inputs.items() if isinstance(x, Tensor) and x.is_floating_point())
    rest = {key: value for key, value in inputs.items() if key != name}
    for call in (
        lambda: torch.func.vmap(lambda y: function(**rest, **{name: y}))(x[None]),
        lambda: torch.func.jvp(lambda y: function(**rest, **{name: y}), (x,), (x,)),
    ):
        with pytest.raises(ValueError, match=rf"{name} must be a tensor outside of torch\.func's transforms"):
            call()


def test_a_factor_of_angles_is_a_number() -> None:
    x, angles = torch.zeros(1, 1, 2, 8), torch.zeros(1, 2, 4)
    with pytest.raises(TypeError, match=r"scaling must be a Python number, got a tensor$"):
        tilewright.rope(x, x + 1, angles, angles, scaling=torch.tensor(1.0))


def test_options_of_the_interpreter_are_of_their_kinds() -> None:
    """A tensor, or a list of them, was not looked at at all."""
    for name in ("races", "strict", "strict_bounds", "debug"):
        with pytest.raises(ValueError, match=f"{name} must be True, False or None, got 'no'"), checking(**{name: "no"}):
            pass
    for name in ("uninitialised", "unwritten"):
        for wrong in (torch.ones(3), [1], "x"):
            with pytest.raises(TypeError, match=f"{name} must be True, False or a tuple of tensors, got "), checking(**{name: wrong}):
                pass


SMALL = {"tokens": 3, "top_k": 1, "experts": 1, "hidden": 128, "inter": 128, "bias": True, "limit": 1.0, "up_offset": 1.0}
SCANNED = {"batch": 1, "heads": 2, "groups": 1, "tokens": 64, "head_dim": 64, "state_dim": 16, "dtype": torch.bfloat16}
DELTA = {"batch": 1, "k_heads": 1, "v_heads": 1, "tokens": 64, "head_dim": 64, "dtype": torch.bfloat16}


@pytest.mark.parametrize(
    ("op", "names", "problem"),
    [
        ("moe", "x gate_up bias_gate_up", SMALL),
        ("moe", "gate_up", SMALL | {"tokens": 1}),  # another kernel
        ("moe", "scale_gate_up", SMALL | {"scaling": Scaling.ROW}),
        ("quantized_moe", "x scales_gate_up zeros_gate_up bias_gate_up", SMALL | {"weight_format": "int4-32-zeros"}),
        ("quantized_moe", "scales_gate_up", SMALL | {"weight_format": "int8", "tokens": 70}),
        ("ssd", "dt a dt_bias", SCANNED),
        ("gated_delta_rule", "g", DELTA),
        ("gated_delta_rule", "g", DELTA | {"channels": True}),
    ],
)
def test_a_bound_does_not_hide_a_nan(op, names, problem) -> None:
    """Experts with a limit, and decays with a least one, made a number of it."""
    module, problem = getattr(ops, op), getattr(ops, op).Problem(**problem)
    chunked = [config for config in module.space(problem, Device.named("H200")) if getattr(config, "chunk", 0)]
    for name, config in itertools.product(names.split(), [None, *chunked]):
        inputs = seeded_inputs(module, problem, torch.device("cpu"))
        inputs[name][(-1,) * inputs[name].dim()] = torch.nan
        expected = outputs(module.reference(**inputs))[0].isnan().flatten(1).any(1)
        assert expected.any()
        with forced_config(module.plan, config) if config else nullcontext():
            assert torch.equal(outputs(public_function(module)(**inputs))[0].isnan().flatten(1).any(1), expected), (name, config)


@pytest.mark.parametrize(
    ("dtype", "most", "tolerance"),
    [(torch.float32, 31, 1e-6), (torch.bfloat16, 31, 2**-7), (torch.float16, 28, 2**-9), (torch.float8_e4m3fn, 25, 2**-3)],
)
def test_scores_may_be_as_large_as_docs_say(dtype, most, tolerance) -> None:
    q, k, v = (torch.randn(1, 2, n, 64).to(dtype) for n in (40, 50, 50))
    scores = q.double() @ k.double().mT
    scale = 2.0**most / scores.abs().max().item() * 0.69  # in base 2
    ones = dict.fromkeys(("q_scale", "k_scale", "v_scale"), torch.ones(2)) if dtype.itemsize == 1 else {}
    expected = (scores * scale).softmax(-1) @ v.double()
    assert (tilewright.attention(q, k, v, causal=False, scale=scale, **ones) - expected).abs().max() < tolerance * v.double().abs().max()


# ------------------------------------------------------------------- what a fourth adversary found
def test_queries_are_rotated_or_the_call_is_refused() -> None:
    """Nothing was launched for a table without pages, and the queries stayed as they were."""
    k, q, angles = torch.randn(1, 2, 3, 16), torch.randn(1, 4, 3, 16), torch.rand(9, 8)
    how = {"positions": torch.arange(3, dtype=torch.int32)[None], "cos": angles, "sin": angles + 1}
    pool, none = torch.zeros(2, 2, 16, 16), torch.zeros(1, 0, dtype=torch.int32)
    for caches, more, name in (
        ((pool, pool.clone()), {"block_table": none}, "block_table"),
        ((torch.zeros(1, 2, 0, 16),) * 2, {}, "k_cache"),
        ((pool[:0], pool[:0].clone()), {"block_table": torch.zeros(1, 1, dtype=torch.int32)}, "k_cache"),
    ):
        with pytest.raises(ValueError, match=rf"^{name}.shape must be without an axis of 0 where q is given, got \("):
            tilewright.kv_append(k, k, *caches, q=q, **how, **more)
        tilewright.kv_append(k, k, *caches, **how, **more)  # nothing is to be stored


def test_a_scale_of_a_cache_lies_where_the_cache_does() -> None:
    new, cache = torch.randn(1, 2, 3, 16), torch.zeros(1, 2, 9, 16).to(torch.float8_e4m3fn)
    for wrong in ((), (1, 2, 9)):
        scale = torch.ones(wrong)
        with pytest.raises(ValueError, match=r"^v_scale.device must be cpu, got meta$"):
            tilewright.kv_append(
                new, new, cache, cache.clone(), positions=torch.arange(3, dtype=torch.int32)[None], k_scale=scale, v_scale=scale.to("meta")
            )


def test_heads_are_there_to_rotate() -> None:
    """ZeroDivisionError."""
    q, angles = torch.randn(1, 2, 3, 16), torch.rand(1, 3, 8)
    for given, name in (((q, q[:, :0]), "k"), ((q[:, :0], q), "q")):
        with pytest.raises(ValueError, match=rf"^{name}.shape\[1\] must be at least 1, got 0$"):
            tilewright.rope(*given, angles, angles)


@pytest.mark.parametrize(
    ("op", "name", "wrong", "message"),
    [
        ("ssd", "dt_limit", 1.0, "dt_limit must be (least, largest) with 0 <= least <= largest, got 1.0"),
        ("ssd", "dt_limit", None, "dt_limit must be (least, largest) with 0 <= least <= largest, got None"),
        ("ssd", "state", [1], "state must be a torch.Tensor, got list"),
        ("quantize_fp8", "block", torch.ones(2), "block must be one of (None, None), "),
    ],
)
def test_another_kind_of_argument_is_refused_in_our_words(op, name, wrong, message) -> None:
    module = getattr(ops, op)
    for inputs in every_kind(module):
        with pytest.raises((TypeError, ValueError), match=rf"^{re.escape(message)}"):
            public_function(module)(**{**inputs, name: wrong})


def test_true_is_no_number() -> None:
    """It was 1: a window of one key."""
    q, x, ids = torch.randn(1, 2, 4, 16), torch.randn(3, 8), torch.tensor([1])
    for name, call in {
        "window": lambda: tilewright.attention(q, q, q, window=True),
        "scale": lambda: tilewright.attention_decode(q, q, q, scale=True),
        "eps": lambda: tilewright.rms_norm(x, x[0], eps=True),
        "top_k": lambda: tilewright.moe_route(x, True),
        "factor": lambda: tilewright.embedding(ids, x, scale=True),
    }.items():
        with pytest.raises(TypeError, match=rf"^{name.replace('factor', 'scale')} must be a Python (number|integer), got True$"):
            call()
    with pytest.raises(ValueError, match=r"window must be \(before, behind\), .* got \(True, 1\)"):
        tilewright.attention(q, q, q, window=(True, 1), causal=False)


def test_a_window_of_any_length_is_none() -> None:
    """2**63 overflowed in the definition, and in a compiled call."""
    q, k = torch.randn(1, 2, 4, 16), torch.randn(1, 2, 9, 16)
    compiled = torch.compile(lambda q, **how: tilewright.attention(q, k, k, **how), fullgraph=True, backend="eager")
    step = torch.compile(lambda q, **how: tilewright.attention_decode(q, k, k, **how), fullgraph=True, backend="eager")
    for long in (2**31, 2**63 - 1, 2**63, 2**70):
        for function in (tilewright.attention, compiled, lambda q, k=k, *_, **how: ops.attention.reference(q, k, k, **how)):
            given = (q, k, k) if function is tilewright.attention else (q,)
            plain = function(*given)
            assert torch.equal(function(*given, window=long), plain)
            assert torch.equal(function(*given, window=(long, 0), causal=False), plain)
        assert torch.equal(step(q, window=long), step(q))


@pytest.mark.parametrize("op", ["moe", "quantized_moe"])
def test_numbers_of_numpy_are_pythons(op) -> None:
    """`alpha != 1.0` was a numpy.bool, which no kernel takes as a constant."""
    import numpy as np

    inputs = {
        **next(p for p in cases(getattr(ops, op), "small") if not getattr(p, "shared", 0)).inputs(CPU),
        "alpha": 0.5,
        "limit": 3.0,
        "up_offset": 0.5,
    }
    function = public_function(getattr(ops, op))
    assert torch.equal(function(**inputs | {name: np.float64(inputs[name]) for name in ("alpha", "limit", "up_offset")}), function(**inputs))


def test_one_graph_under_a_default_device() -> None:
    """A method of torch.Tensor that is written in Python cannot be traced there."""
    problem = next(p for p in cases(ops.moe, "small") if p.bias)
    q, k, prefix = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 8, 16), torch.randn(2, 8, 16)
    packed = tilewright.pack_kv(torch.randn(2, 2, 576))
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (tilewright.moe, (), seeded_inputs(ops.moe, problem, CPU)),
        (cascade_decode, (q, prefix, prefix, k, k), {}),
        (tilewright.pack_kv, (torch.randn(2, 2, 512),), {}),
        (tilewright.unpack_kv, (packed,), {}),
    ]
    expected = [function(*given, **options) for function, given, options in calls]
    torch._dynamo.reset()
    with torch.device(META):
        found = [torch.compile(function, fullgraph=True, backend="eager")(*given, **options) for function, given, options in calls]
    assert all(map(torch.equal, found, expected))
