"""Launches that begin while the one before runs: which plans ask for it, and that their kernels wait before they touch anything."""

import ast
import inspect
import textwrap

import pytest
import torch

from tilewright import ops
from tilewright.compile.job import Job
from tilewright.launch import Device, Plan, traced
from tilewright.ops import matmul, rms_norm_matmul
from tilewright.ops.early import MOST_EARLY_ROWS
from tilewright.testing import op_name, run_op
from tilewright.testing.cases import cases

H200 = Device.named("H200")


def chain(plan: Plan | None) -> list[Plan]:
    return [] if plan is None else [plan, *chain(plan.then)]


def first_line(plan: Plan) -> ast.Call | None:
    """The call of `overlap_previous` that the kernel begins with."""
    function = ast.parse(textwrap.dedent(inspect.getsource(plan.kernel._pyfunc))).body[0]
    assert isinstance(function, ast.FunctionDef)
    first = function.body[1] if ast.get_docstring(function) else function.body[0]
    call = first.value if isinstance(first, ast.Expr) else None
    return call if isinstance(call, ast.Call) and ast.unparse(call.func) == "overlap_previous" else None


def constants(plan: Plan) -> dict:
    names = list(inspect.signature(plan.kernel._pyfunc).parameters)
    return dict(zip(names[len(names) - len(plan.constants) :], plan.constants, strict=True))


@pytest.mark.parametrize("op", [pytest.param(op, id=op_name(op)) for op in ops.ALL])
def test_the_kernel_of_an_early_launch_waits_first(op):
    for kind in ("small", "bench"):
        for problem in cases(op, kind):
            for config in op.space(problem, H200):
                for plan in chain(op.plan(problem, config, H200)):
                    if plan.early:
                        call = first_line(plan)
                        assert call is not None, f"{plan.name} does not wait for what it reads"
                        walks = ast.unparse(call.args[0]) if call.args else None
                        assert walks is None or constants(plan)[walks] is False, f"{plan.name} {config} walks, and waits for nothing"


@pytest.mark.parametrize("arch", ["sm_90", "sm_100", "sm_103", "sm_120", "sm_121"])
def test_what_waits_is_in_the_binary(arch):
    device = Device.for_arch(arch)
    problem = rms_norm_matmul.Problem(1, 3072, 2048, residual=True)
    config = rms_norm_matmul.space(problem, device)[0]
    assert not config.persistent
    with traced(device) as launches, torch.inference_mode():
        run_op(rms_norm_matmul, problem.inputs(torch.device("meta")), config)
    (launch,) = launches
    assert launch.plan.early
    found = Job.of(launch, arch).run().resources
    assert (found.count("PREEXIT"), found.count("ACQBULK")) == (1, 1)


def test_blocks_that_walk_do_neither():
    problem = matmul.Problem(16, 152064, 3584, torch.bfloat16, trans_b=True)
    config = next(c for c in matmul.space(problem, H200) if c.persistent)
    with traced(H200) as launches, torch.inference_mode():
        run_op(matmul, problem.inputs(torch.device("meta")), config)
    (launch,) = launches
    assert not launch.plan.early
    found = Job.of(launch, "sm_90").run().resources
    assert (found.count("PREEXIT"), found.count("ACQBULK")) == (0, 0)


def test_a_long_launch_is_not_early():
    for rows in (MOST_EARLY_ROWS, MOST_EARLY_ROWS + 1):
        problem = matmul.Problem(rows, 4096, 4096, torch.bfloat16, trans_b=True)
        plans = [matmul.plan(problem, c, H200) for c in matmul.space(problem, H200) if not c.persistent]
        assert {plan.early for plan in plans} == {rows <= MOST_EARLY_ROWS}
