"""What tests/support/front_end.py spares cuda-tile changes no program and no error."""

import re

import cuda.tile as ct
import front_end
import pytest
import torch

from tilewright import interpret, ops
from tilewright.interpret import codegen, run
from tilewright.launch import Device
from tilewright.testing import op_name, run_op, seeded_inputs
from tilewright.testing.cases import cases

CPU = torch.device("cpu")


def text(program):
    """All of a program but its names, of which cuda-tile numbers some."""
    names = {}
    renamed = re.sub(r"\w+__\w*", lambda match: names.setdefault(match.group(0), f"name{len(names)}"), program.source)
    return renamed, program.line_places, program.written, program.cooperative, program.parameters


@pytest.mark.parametrize("op", [pytest.param(op, id=op_name(op)) for op in ops.ALL])
def test_the_programs_are_those_of_cuda_tile_as_it_is_installed(op, monkeypatch):
    """The first case as an H200 runs it."""
    made = []

    def noted(kernel, constraints, **options):
        made.append((kernel, constraints, codegen.compile_program(kernel, constraints, **options)))
        return made[-1][-1]

    monkeypatch.setattr(run, "_programs", {})
    monkeypatch.setattr(run, "compile_program", noted)
    problem = cases(op, "small")[0]
    run_op(op, seeded_inputs(op, problem, CPU), op.space(problem, Device.named("H200"))[0])
    assert made
    for kernel, constraints, program in made:
        with front_end.as_installed():
            assert text(program) == text(codegen.compile_program(kernel, constraints))


def helper(x):
    return ct.reshape(x, (3, 5))


@ct.kernel
def wrong_in_a_helper(x):
    for _ in range(2):
        helper(ct.load(x, (0,), (16,)))


@ct.kernel
def no_such_argument(x):
    ct.load(x, (0,), shape=(16,), size=3)


@ct.kernel
def python_fails(x):
    ct.static_assert(ct.static_eval(1 // 0))


@pytest.mark.parametrize("kernel", [wrong_in_a_helper, no_such_argument, python_fails])
def test_the_errors_are_those_of_cuda_tile_as_it_is_installed(kernel):
    def error():
        with pytest.raises(ct.TileError) as caught:
            interpret.interpret(kernel, (1,), (torch.zeros(16),))
        return type(caught.value), str(caught.value)

    ours = error()
    with front_end.as_installed():
        assert ours == error()
