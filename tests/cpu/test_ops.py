"""Every op on every small case: loops over modules, no per-op code."""

import dataclasses
import inspect

import pytest
import torch

from tilewright import interpret, ops
from tilewright.launch import Bound, Device, Launch, counted, decision_of, traced
from tilewright.testing import check_op, op_name, outputs, public_function, run_op, seeded_inputs
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


def with_out(op, problem):
    """Inputs of a problem, what the op returns for them, and a tensor of NaN like the first of
    it.
    """
    inputs = seeded_inputs(op, problem, CPU)
    expected = outputs(public_function(op)(**inputs))
    return inputs, expected, torch.full_like(expected[0], torch.nan)


@pytest.mark.parametrize(("op", "problem"), [case for case in SMALL if takes_out(case.values[0])])
def test_a_given_out_is_written_and_returned(op, problem):
    inputs, expected, out = with_out(op, problem)
    found = outputs(public_function(op)(**inputs, out=out))
    assert found[0] is out
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("op", [case for case in OPS if takes_out(case.values[0])])
def test_an_out_that_does_not_fit_is_named_and_nothing_is_launched(op):
    found = (with_out(op, problem) for problem in cases(op, "small"))
    inputs, _, out = next(case for case in found if case[2].numel() > case[2].shape[-1] > 1)
    wide = torch.cat((out, out), -1)
    bad = {
        r"out must be a torch.Tensor, got list": [out],
        r"out.shape must be": out[1:],
        r"out.dtype must be one of": out.double(),
        r"out.device must be cpu, got meta": out.to("meta"),
        r"out.* must be .*contiguous": wide[..., : out.shape[-1]],
        r"out.*(contiguous|stride\(-1\))": out[..., :1].expand(out.shape),
    }
    same = next((x for x in inputs.values() if isinstance(x, torch.Tensor) and x.shape == out.shape and x.dtype == out.dtype), None)
    if same is not None:
        same = same.contiguous()
        inputs = {name: same if isinstance(x, torch.Tensor) and x.shape == same.shape and torch.equal(x, same) else x for name, x in inputs.items()}
        bad["out must be memory of its own, got a tensor that overlaps one of the inputs"] = same
    for message, wrong in bad.items():
        with counted() as counts, pytest.raises((TypeError, ValueError), match=message):
            public_function(op)(**inputs, out=wrong)
        assert not counts


@pytest.mark.parametrize(("op", "problem"), SMALL)
def test_every_cpu_config_is_as_accurate_as_torch(op, problem):
    for config in op.space(problem, Device.named("CPU")):
        check_op(op, problem, CPU, config)


@pytest.mark.parametrize(("op", "problem"), SMALL)
def test_gpu_configs_are_as_accurate_as_torch_interpreted(op, problem):
    """The kernels and constants of GPUs: the default and a sample of the space of each
    architecture.
    """
    seen = set()
    for name in ("H200", "B200", "RTX5090", "A100"):
        configs = op.space(problem, Device.named(name))
        for config in (configs[0], configs[len(configs) // 2], configs[-1]) if configs else ():
            main = op.plan(problem, config, Device.named("CPU"))[0]
            key = (main.name, str(main.constants))
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
    """Whether the problem uses fp8: by a dtype, or by scales of its weights (moe)."""
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
            launches = op.plan(problem, config, device)
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
