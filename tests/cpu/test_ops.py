"""Every op on every small case: loops over modules, no per-op code."""

import dataclasses
import inspect

import pytest
import torch

from tilewright import interpret, ops
from tilewright.launch import Device, Plan, counted, traced
from tilewright.testing import check_op, op_name, outputs, public_function, run_op, seeded_inputs
from tilewright.testing.cases import cases

CPU = torch.device("cpu")
DEVICES = ("A100", "H100", "H200", "B200", "B300", "RTX5090", "GB10", "CPU")
SMALL = [pytest.param(op, p, id=f"{op_name(op)}-{i}") for op in ops.ALL for i, p in enumerate(cases(op, "small"))]
OPS = [pytest.param(op, id=op_name(op)) for op in ops.ALL]


@pytest.fixture(autouse=True)
def no_grad():
    with torch.inference_mode():
        yield


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


@pytest.mark.parametrize("op", OPS)
def test_public_arguments_are_keyword_only_after_the_third_and_none_is_kwargs(op):
    for parameter in list(inspect.signature(public_function(op)).parameters.values())[4:]:
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY, parameter
    assert list(inspect.signature(op.reference).parameters) == list(inspect.signature(public_function(op)).parameters)


@pytest.mark.parametrize(("op", "problem"), SMALL)
def test_every_cpu_config_is_as_accurate_as_torch(op, problem):
    for config in op.space(problem, Device.named("CPU")):
        check_op(op, problem, CPU, config)


@pytest.mark.parametrize(("op", "problem"), SMALL)
def test_gpu_configs_are_as_accurate_as_torch_interpreted(op, problem):
    """The kernels and constants that GPUs run: the default and a spread of the space of each architecture."""
    seen = set()
    for name in ("H200", "B200", "RTX5090", "A100"):
        configs = op.space(problem, Device.named(name))
        for config in (configs[0], configs[len(configs) // 2], configs[-1]) if configs else ():
            plan = op.plan(problem, config, Device.named("CPU"))
            key = (plan.name, plan.constants)
            if key not in seen:
                seen.add(key)
                check_op(op, problem, CPU, config)


@pytest.mark.parametrize("op", OPS)
def test_no_race_and_no_dependence_on_block_order(op):
    for problem in cases(op, "small")[:4]:
        for name in ("CPU", "H200"):
            config = op.space(problem, Device.named(name))[0]
            with interpret.checking(races=True, order=7):
                check_op(op, problem, CPU, config)


def known(tensor):
    """The tensor with numbers for NaN, which torch.equal would find unequal; fp8, for which torch has no nan_to_num, as fp32."""
    return (tensor.float() if tensor.dtype.itemsize == 1 else tensor).nan_to_num()


@pytest.mark.parametrize("op", OPS)
def test_same_bits_twice(op):
    problem = cases(op, "small")[0]
    first, second = (outputs(run_op(op, seeded_inputs(op, problem, CPU))) for _ in range(2))
    assert all(torch.equal(known(a), known(b)) for a, b in zip(first, second, strict=True))


def of_8_bits(problem) -> bool:
    """Whether the problem multiplies or stores fp8: by a dtype of its own, or by the scales of its weights (moe)."""
    return "float8" in str(problem) or bool(getattr(problem, "scaling", None))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("device", DEVICES)
def test_plans_are_legal_hashable_and_printable(op, device):
    device = Device.named(device)
    for problem in (*cases(op, "small"), *cases(op, "real"), *cases(op, "bench")):
        configs = op.space(problem, device)
        assert configs or (not device.has_fp8 and of_8_bits(problem)), f"{op_name(op)} {problem} has no config on {device.name}"
        assert len(set(configs)) == len(configs), f"{op_name(op)} {problem} has a config twice on {device.name}"
        for config in configs:
            plan = op.plan(problem, config, device)
            while plan is not None:
                check_plan(plan)
                plan = plan.then


def check_plan(plan: Plan) -> None:
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
        run_op(op, inputs)
    assert captured, "the public function did not call its _out op"
    args, kwargs = captured[0]
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
        compiled = torch.compile(public_function(op), fullgraph=True, backend="aot_eager")
        found = outputs(compiled(**inputs))
    assert all(torch.equal(known(a), known(b)) for a, b in zip(found, expected, strict=True))
