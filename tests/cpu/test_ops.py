"""Every op on every small case: loops over modules, no per-op code."""

import dataclasses
import inspect
from functools import cache
from typing import get_args, get_type_hints

import pytest
import torch
from configs import interpreted

from tilewright import interpret, ops
from tilewright.launch import Bound, Device, Launch, counted, decision_of, forced_config, traced
from tilewright.testing import check_op, op_name, outputs, poison, public_function, run_op, seeded_inputs
from tilewright.testing.cases import cases

CPU = torch.device("cpu")
DEVICES = ("A100", "H100", "H200", "B200", "B300", "RTX5090", "GB10", "CPU")
SMALL = [pytest.param(op, p, id=f"{op_name(op)}-{i}") for op in ops.ALL for i, p in enumerate(cases(op, "small"))]
OPS = [pytest.param(op, id=op_name(op)) for op in ops.ALL]


pytestmark = pytest.mark.usefixtures("inference")


@pytest.mark.parametrize("op", OPS)
def test_module_has_the_agreed_names(op):
    name = op_name(op)
    for part in ("reference", "Problem", "Config", "space", "plan", f"{name}_out", name):
        assert hasattr(op, part), f"{name} lacks {part}"
    for cls in (op.Problem, op.Config):
        assert dataclasses.is_dataclass(cls)
        assert cls.__dataclass_params__.frozen
    assert public_function(op).__doc__
    for section in ("Source", "Numerics", "Bound"):
        assert section in op.__doc__, f"{name}'s module docstring lacks {section}"
    for kind in ("small", "real", "bench"):
        problems = cases(op, kind)
        assert problems
        assert len(set(problems)) == len(problems), f"{name} has a case twice"


def takes_out(op):
    """Whether `out` says where the result goes: it is no argument of the definition."""
    return "out" in set(inspect.signature(public_function(op)).parameters) - set(inspect.signature(op.reference).parameters)


@pytest.mark.parametrize("op", OPS)
def test_public_arguments_are_keyword_only_after_the_third_and_none_is_kwargs(op):
    parameters = inspect.signature(public_function(op)).parameters
    for parameter in list(parameters.values())[4:]:
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY, parameter
    assert list(inspect.signature(op.reference).parameters) == [name for name in parameters if name != "out" or not takes_out(op)]


# Tensors that ops change in place: they are inputs. All others that an op writes are outputs.
IN_PLACE = {
    "rope": ("q", "k"),
    "kv_append": ("k_cache", "v_cache", "q", "k_scale", "v_scale"),
    "rms_norm_route": ("arrived",),
    "gated_delta_rule": ("state",),
    "ssd": ("state",),
    "causal_conv1d": ("state",),
}
OUT_OPS = [
    pytest.param(op, function.op._schema, id=name)
    for op in ops.ALL
    for name, function in vars(op).items()
    if name.endswith("_out") and hasattr(function, "op")
]


def is_output(op, argument):
    return argument.alias_info is not None and argument.alias_info.is_write and argument.name not in IN_PLACE.get(op_name(op), ())


@pytest.mark.parametrize(("op", "schema"), OUT_OPS)
def test_an_out_op_takes_tensors_then_optional_tensors_then_options_then_outputs(op, schema):
    kinds = [3 if is_output(op, a) else {"Tensor": 0, "Optional[Tensor]": 1}.get(str(a.type), 2) for a in schema.arguments]
    assert kinds == sorted(kinds), schema
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write and not is_output(op, a)]
    assert sorted(written) == sorted(IN_PLACE.get(op_name(op), ()))
    results = {"out", "lse", "denominator", "new_residual", "codes", "scale", "weights", "ids", "rotated"}
    assert {a.name for a in schema.arguments if is_output(op, a)} <= results, schema
    assert not any(a.has_default_value() for a in schema.arguments), schema


def poisoned(tensor):
    """A tensor like this one, NaN inside and around it (integers: the largest value inside)."""
    fill = torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max
    return poison.embed(torch.full_like(tensor, fill))


def fresh(op, inputs):
    """The inputs, with copies of those that the op changes in place."""
    return {name: poison.embed(x) if name in IN_PLACE.get(op_name(op), ()) and x is not None else x for name, x in inputs.items()}


def with_out(op, problem):
    """Inputs of a problem, what the op returns for them, and how many tensors `out` is."""
    inputs = {k: poison.embed(x) if isinstance(x, torch.Tensor) else x for k, x in seeded_inputs(op, problem, CPU).items()}
    with poison.poisoned_empty():
        expected = outputs(public_function(op)(**fresh(op, inputs)))
    kind = get_args(get_type_hints(public_function(op))["out"])[0]
    return inputs, expected, len(get_args(kind)) or 1


def call_with(op, inputs, results):
    """The op with these tensors as `out`."""
    with poison.poisoned_empty():
        return public_function(op)(**inputs, out=results[0] if len(results) == 1 else tuple(results))


@pytest.mark.parametrize("op", OPS)
def test_each_op_that_returns_a_new_tensor_takes_out(op):
    assert takes_out(op) == (op_name(op) not in ("rope", "kv_append"))


@pytest.mark.parametrize(("op", "problem"), [case for case in SMALL if takes_out(case.values[0])])
def test_a_given_out_is_written_and_returned(op, problem):
    """The same bits, into poisoned memory."""
    with forced_config(op.plan, chosen(op)[problem][0][0]):
        inputs, expected, n = with_out(op, problem)
        given = [poisoned(x) for x in expected[:n]]
        if inputs.get("scale") is not None and op_name(op) == "quantize_fp8":
            given[1] = inputs["scale"]
        found = outputs(call_with(op, fresh(op, inputs), given))
    assert all(a is b for a, b in zip(found, given, strict=False))
    assert all(torch.equal(known(a), known(b)) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("op", [case for case in OPS if takes_out(case.values[0])])
def test_an_out_with_its_axes_in_another_order_is_filled_or_refused(op):
    for problem in cases(op, "small"):
        inputs, expected, n = with_out(op, problem)
        shape = expected[0].shape
        if n > 1 or len(shape) < 3:
            return
        if min(shape[:2]) > 1:
            out = expected[0].new_empty((shape[1], shape[0], *shape[2:])).transpose(0, 1)
            try:
                found = outputs(call_with(op, fresh(op, inputs), [out]))
            except ValueError as error:
                assert "contiguous" in str(error)  # noqa: PT017
            else:
                assert all(torch.equal(known(a), known(b)) for a, b in zip(found, expected, strict=True))
            return


def in_one_memory(a, b):
    """Copies of two tensors that begin at the same byte."""
    spans = [1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) for x in (a, b)]
    memory = torch.zeros(max(n * x.element_size() for n, x in zip(spans, (a, b), strict=True)) + 8, dtype=torch.uint8)
    return [memory[: n * x.element_size()].view(x.dtype).as_strided(x.shape, x.stride()) for n, x in zip(spans, (a, b), strict=True)]


def misfits(out):
    """Pairs of a pattern and a tensor in place of `out` that its message must match."""
    yield r"\.shape must be", out.new_empty((*out.shape, 2))
    yield r"\.dtype must be ", out.double()
    yield r"\.device must be cpu, got meta", out.to("meta")
    longest = max(range(out.dim()), key=lambda axis: out.shape[axis])
    yield r"(contiguous|stride\(-1\)|stride\(\)|stride\(0\))", out.new_empty((*out.shape, 2))[..., 0]
    yield r"(contiguous|stride\(-1\)|stride\(\)|stride\(0\))", out.narrow(longest, 0, 1).expand(out.shape)


@pytest.mark.parametrize("op", [case for case in OPS if takes_out(case.values[0])])
def test_an_out_that_does_not_fit_is_named_and_nothing_is_launched(op):
    """The problem with the most tensors: `out` may be the memory of none of them."""

    def tensors_of(inputs):
        return {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor)}

    problems = sorted(cases(op, "small"), key=lambda problem: -len(tensors_of(problem.inputs(CPU))))
    found = (with_out(op, problem) for problem in problems)
    inputs, expected, n = next(case for case in found if all(x.numel() > 1 for x in case[1][: case[2]]))
    results = outputs(call_with(op, fresh(op, inputs), [x.clone() for x in expected[:n]]))[:n]
    assert all(torch.equal(known(a), known(b)) for a, b in zip(results, expected, strict=False)), "a result of the op, as out"

    def refused(message, changed, **others):
        with counted() as counts, pytest.raises((TypeError, ValueError), match=message):
            call_with(op, {**inputs, **others}, changed)
        assert not counts

    for wrong in ([results], [results[0].tolist()]) if n == 1 else ([results], [*results, results[0]], [None, *results[1:]]):
        refused("out must be a (torch.Tensor|tuple of tensors)", wrong)
    for i, out in enumerate(results):
        name = "out" if n == 1 else rf"out\[{i}\]"
        for message, wrong in misfits(out):
            refused(rf"{name}.*{message}", [*results[:i], wrong, *results[i + 1 :]])
        for other, x in tensors_of(inputs).items():
            same, wrong = in_one_memory(x, out)
            refused(f"{name}.* must be in memory of its own", [*results[:i], wrong, *results[i + 1 :]], **{other: same.copy_(x)})
        for j in range(i):
            same, wrong = in_one_memory(results[j], out)
            refused(f"{name}.* must be in memory of its own", [*results[:j], same, *results[j + 1 : i], wrong, *results[i + 1 :]])


@pytest.mark.parametrize(
    ("op", "inputs", "value"),
    [
        (ops.softmax, {"x": torch.zeros(0, 5)}, None),
        (ops.quantize_fp8, {"x": torch.zeros(3, 0), "block": (1, None)}, 2.0**-126),
        (ops.matmul, {"a": torch.zeros(2, 0), "b": torch.zeros(0, 3), "bias": torch.ones(3)}, 1.0),
        (ops.bmm, {"a": torch.zeros(2, 2, 0).half(), "b": torch.zeros(2, 0, 3).half()}, 0.0),
        (ops.grouped_gemm, {"a": torch.zeros(2, 0).half(), "b": torch.zeros(1, 0, 3).half(), "offsets": torch.tensor([2]).int()}, 0.0),
    ],
)
def test_an_out_of_a_problem_without_work_is_filled_and_nothing_is_launched(op, inputs, value):
    expected = outputs(public_function(op)(**inputs))
    results = [poisoned(x) for x in expected]
    with counted() as counts:
        found = outputs(call_with(op, inputs, results))
    assert not counts
    assert all(a is b for a, b in zip(found, results, strict=True))
    assert value is None or found[-1].eq(value).all()


GPUS = ("H200", "B200", "RTX5090", "A100")
UNSEEN = {"num_ctas", "occupancy", "num_worker_warps", "latency"}  # fields that change nothing when interpreted


def from_turn(values, turn):
    """The values in a circle, from the one whose turn it is."""
    at = turn % len(values) if values else 0
    return [*values[at:], *values[:at]]


def of_gpus(op, problem, number):
    """Configs of GPUs: of the architecture whose turn it is the default and one more, then the
    defaults of the others.
    """
    for turn, name in enumerate(from_turn(GPUS, number)):
        configs = op.space(problem, Device.named(name))
        more = (len(configs) // 2, -1)[number // len(GPUS) % 2]
        yield from (configs[i] for i in ((0,) if turn else (0, more)) if configs)


@cache
def chosen(op):
    """The configs of a CPU and those of GPUs with which each small case runs: the one whose turn it
    is, and those with a value of a field that no earlier case of the op has had in that kernel.
    Sizes of tiles only take turns.
    """
    seen, found = set(), {}

    def news(problem, configs):
        for i, config in enumerate(configs):
            kernel = op.plan(problem, config, Device.named("CPU"))[0].name
            names = {field.name for field in dataclasses.fields(config) if not field.name.startswith("tile")} - UNSEEN
            values = {(kernel, name, getattr(config, name)) for name in names}
            if i == 0 or not values <= seen:
                seen.update(values)
                yield config

    for number, problem in enumerate(cases(op, "small")):
        configs = op.space(problem, Device.named("CPU"))
        same = {interpreted(op, problem, config) for config in configs}
        others = {key: config for config in of_gpus(op, problem, number) if (key := interpreted(op, problem, config)) not in same}
        found[problem] = [*news(problem, from_turn(configs, number))], [*news(problem, others.values())]
    return found


@pytest.mark.parametrize(("op", "problem"), SMALL)
def test_cpu_configs_are_as_accurate_as_torch(op, problem):
    for config in chosen(op)[problem][0]:
        check_op(op, problem, CPU, config)


@pytest.mark.parametrize(("op", "problem"), SMALL)
def test_gpu_configs_are_as_accurate_as_torch_interpreted(op, problem):
    """The kernels and constants of GPUs. Those of a CPU have a test of their own."""
    for config in chosen(op)[problem][1]:
        check_op(op, problem, CPU, config)


@pytest.mark.parametrize("op", OPS)
def test_no_race_and_no_dependence_on_block_order(op):
    for number, problem in enumerate(cases(op, "small")[:4]):
        of_cpu, of_gpu = chosen(op)[problem]
        with interpret.checking(races=True, order=7):
            check_op(op, problem, CPU, (of_gpu or of_cpu if number % 2 else of_cpu)[0])


def known(tensor):
    """The tensor with numbers instead of NaN, for torch.equal; fp8 as fp32, since torch has no
    nan_to_num for it.
    """
    return (tensor.float() if tensor.dtype.itemsize == 1 else tensor).nan_to_num()


@pytest.mark.parametrize("op", OPS)
def test_same_bits_twice(op):
    problem = cases(op, "small")[0]
    first, second = (outputs(run_op(op, seeded_inputs(op, problem, CPU))) for _ in range(2))
    assert all(torch.equal(known(a), known(b)) for a, b in zip(first, second, strict=True))


def of_8_bits(problem) -> bool:
    """Whether the problem uses fp8: by a dtype, by scales of its weights (moe), or by a format."""
    return "float8" in str(problem) or bool(getattr(problem, "scaling", None)) or hasattr(problem, "mx_format")


@pytest.mark.parametrize("op", OPS)
def test_plans_are_legal_hashable_and_printable(op):
    """Of small problems on every device, of the others on two that take turns. Launches that
    several have are looked at once.
    """
    seen = set()
    large = dict.fromkeys((*cases(op, "real"), *cases(op, "bench")))
    turns = {problem: DEVICES[i % 4 :: 4] for i, problem in enumerate(large)} | dict.fromkeys(cases(op, "small"), DEVICES)
    for problem, names in turns.items():
        for device in map(Device.named, names):
            configs = op.space(problem, device)
            assert configs or (not device.has_fp8 and of_8_bits(problem)), f"{op_name(op)} {problem} has no config on {device.name}"
            assert len(set(configs)) == len(configs), f"{op_name(op)} {problem} has a config twice on {device.name}"
            for config in configs:
                launches = op.plan(problem, config, device)
                if launches not in seen:
                    seen.add(launches)
                    for launch in launches:
                        check_launch(launch)
                    if hasattr(op, "DECISION"):
                        Bound(launches, decision_of(op).arguments, device)


def check_launch(plan: Launch) -> None:
    assert 1 <= len(plan.grid) <= 3
    assert all(isinstance(n, int) and n >= 1 for n in plan.grid), plan
    assert plan.grid[0] < 1 << 31, plan
    assert all(n < 1 << 16 for n in plan.grid[1:]), plan
    assert plan.num_ctas in (None, 1, 2, 4, 8, 16), plan
    assert plan.occupancy is None or 1 <= plan.occupancy <= 32, plan
    hash(plan)
    assert plan.name in str(plan)


@pytest.mark.parametrize("op", OPS)
def test_an_op_traces_on_meta_tensors_for_a_gpu_that_is_not_there(op):
    for problem in cases(op, "real")[:3]:
        with traced(Device.named("H200")) as launches, counted() as counts:
            run_op(op, problem.inputs(torch.device("meta")))
        assert launches
        assert sum(counts.values()) == len(launches)
        assert problem.cost().size_bytes > 0


@pytest.mark.parametrize("op", OPS)
def test_opcheck(op):
    """Schema, fake implementation and functionalisation of the registered op."""
    problem = cases(op, "small")[0]
    captured = []
    out_op = getattr(op, f"{op_name(op)}_out").op
    inputs = seeded_inputs(op, problem, CPU)
    with _recording_calls(op_name(op), captured):
        results = outputs(run_op(op, inputs))
    assert captured, "the public function did not call its _out op"
    args, kwargs = captured[0]
    written = [x for x, argument in zip(args, out_op._schema.arguments, strict=True) if is_output(op, argument) and x is not None]
    in_place = [x.untyped_storage().data_ptr() for name, x in inputs.items() if name in IN_PLACE.get(op_name(op), ()) and x is not None]
    memory = [at for x in results if (at := x.untyped_storage().data_ptr()) not in in_place]
    assert not written or [x.untyped_storage().data_ptr() for x in written] == memory, "outputs are in another order than the results"
    with torch.inference_mode(False), torch.no_grad():
        fresh = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        small_floats = any(isinstance(a, torch.Tensor) and a.is_floating_point() and a.dtype.itemsize == 1 for a in fresh)
        # The schema check compares by torch.allclose, which does not know fp8.
        checks = ("test_faketensor",) if small_floats else ("test_schema", "test_faketensor")
        torch.library.opcheck(out_op, tuple(fresh), kwargs, test_utils=checks)


class _recording_calls(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self, name, captured):
        super().__init__()
        self.name, self.captured = name, captured

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "tilewright" and func._opname == f"{self.name}_out":
            self.captured.append((args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", OPS)
def test_compiles_to_one_graph(op):
    problem = cases(op, "small")[0]
    inputs = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in seeded_inputs(op, problem, CPU).items()}
    expected = outputs(run_op(op, {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}))
    with torch.inference_mode(False), torch.no_grad():
        inputs = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        torch._dynamo.reset()
        backend = "inductor" if "mx" in op_name(op) else "aot_eager"  # Inductor hands no e8m0 tensor to an op
        compiled = torch.compile(public_function(op), fullgraph=True, backend=backend)
        found = outputs(compiled(**inputs))
    assert all(torch.equal(known(a), known(b)) for a, b in zip(found, expected, strict=True))


def test_views_that_are_written_compile_for_any_length():
    """The second length failed: torch.compile then takes sizes as symbols, and sorts none."""

    def step(q, k, cos, out):
        ops.rope.rope(q, k, cos, cos)
        return ops.softmax.softmax(cos, out=out)

    compiled = torch.compile(step, fullgraph=True, backend="eager")
    with torch.inference_mode(False), torch.no_grad():
        for tokens in (5, 7):
            given = [torch.randn(2, tokens, heads, 16).transpose(1, 2) for heads in (4, 2)]
            given += [torch.rand(2, tokens, 8), torch.empty(2, tokens, 8)]
            again = [x.clone() for x in given]
            compiled(*given)
            step(*again)
            assert all(map(torch.equal, given, again))
