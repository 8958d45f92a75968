"""What interpret/front_end.py spares cuda-tile changes no program and no error."""

import contextlib
import gc
import re
import signal
import threading
import time

import cuda.tile as ct
import forked
import pytest
import torch
from cuda.tile import _compile as compiler
from cuda.tile._passes import hir2ir

from tilewright import interpret, ops
from tilewright.compile import kernel_signature
from tilewright.interpret import codegen, front_end, run
from tilewright.launch import Device, table, traced
from tilewright.ops import attention, matmul, sample
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


@pytest.mark.parametrize("op", [attention, matmul, sample], ids=op_name)
def test_the_bytecode_is_that_of_cuda_tile_as_it_is_installed(op):
    """Of a second architecture, for which the IR of the first serves."""

    def bytecode(launch, arch):
        kernel, args = launch.launch.kernel, tuple(launch.args.values())
        how = {"return_bytecode": True, "return_cubin": False}
        return compiler.compile_tile(kernel._annotated_function, (kernel_signature(kernel, args),), arch, kernel._compiler_options, **how).bytecode

    problem = cases(op, "small")[0]
    with traced(Device.for_arch("sm_90")) as launches:
        run_op(op, problem.inputs(torch.device("meta")), op.space(problem, Device.for_arch("sm_90"))[0])
    assert launches
    for launch in launches:
        first, second = (bytecode(launch, arch) for arch in ("sm_90", "sm_120"))
        with front_end.as_installed():
            assert first == bytecode(launch, "sm_90")
            assert second == bytecode(launch, "sm_120")


@ct.kernel
def in_eight_bits(x):
    ct.store(x, (0,), ct.load(x, (0,), (16,)))


def test_a_dtype_is_checked_for_each_architecture():
    args = (torch.zeros(16, dtype=torch.float8_e4m3fn),)
    signature = kernel_signature(in_eight_bits, args)

    def compile_for(arch):
        compiler.compile_tile(in_eight_bits._annotated_function, (signature,), arch, return_bytecode=True, return_cubin=False)

    compile_for("sm_90")
    with pytest.raises(ct.TileError, match="not supported on sm_80"):
        compile_for("sm_80")


@ct.kernel
def equal_numbers(x, y):
    tile = ct.load(x, (0,), (1,))
    ct.store(x, (0,), tile + 1)
    ct.store(y, (0,), tile + 1.0)


def test_an_integer_and_a_float_that_are_equal_stay_two_numbers():
    x, y = torch.tensor([2**31 - 1], dtype=torch.int32), torch.zeros(1)
    interpret.interpret(equal_numbers, (1,), (x, y))
    assert x.item() == -(2**31)
    assert y.item() == 2**31


@contextlib.contextmanager
def counted_twice(x, n):
    ct.scatter(x, n, n)
    yield n + 1
    ct.scatter(x, n + 1, ct.gather(x, n + 1) + 10)


@ct.kernel
def with_a_context(x):
    with counted_twice(x, 2) as n:
        ct.scatter(x, n, 5)


def test_a_context_manager_is_entered_once():
    """Its choice of overload marks it as entered: made twice, it was refused as used again."""
    x = torch.zeros(4, dtype=torch.int32)
    interpret.interpret(with_a_context, (1,), (x,))
    assert x.tolist() == [0, 0, 2, 15]


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


@ct.kernel
def no_such_variable(x):
    ct.store(x, (0,), there_is_none)  # noqa: F821


@ct.kernel
def no_such_function(x):
    ct.no_such_function(x)


@ct.kernel
def perhaps_undefined(x):
    if ct.bid(0) == 1:
        tile = ct.load(x, (0,), (16,))
    ct.store(x, (0,), tile)


@ct.kernel
def no_such_overload(x):
    ct.store(x, (0,), (1, 2) * ct.load(x, (0,), (16,)))


@ct.kernel
def no_number(x):
    ct.store(x, (0,), ct.float16("many"))


@ct.kernel
def two_types(x):
    kind = ct.float32
    value = 1 if ct.bid(0) == 1 else ct.float32
    ct.store(x, (0,), ct.astype(value, kind))


@ct.kernel
def a_number_or_none(x):
    other = None
    value = 1 if ct.bid(0) == 1 else None
    ct.store(x, (0,), other or value)


@pytest.mark.parametrize(
    "kernel",
    [
        wrong_in_a_helper,
        no_such_argument,
        python_fails,
        no_such_variable,
        no_such_function,
        perhaps_undefined,
        no_such_overload,
        no_number,
        two_types,
        a_number_or_none,
    ],
)
def test_the_errors_are_those_of_cuda_tile_as_it_is_installed(kernel):
    def error():
        with pytest.raises(ct.TileError) as caught:
            interpret.interpret(kernel, (1,), (torch.zeros(16),))
        return type(caught.value), re.sub(r"\$\d+", "$", str(caught.value))  # of a value without a name, which cuda-tile numbers

    ours = error()
    with front_end.as_installed():
        assert ours == error()


def is_ours():
    seen.append(hir2ir._bind_args is front_end.bind_args)
    return True


seen = []


@ct.kernel
def asks(x):
    ct.static_assert(is_ours())


def test_only_the_interpreter_gets_the_quicker_front_end():
    """What a launch on a GPU compiles is left to cuda-tile."""
    with front_end.replaced(front_end.UNCHANGED):
        interpret.interpret(asks, (1,), (torch.zeros(16),))
        assert seen == [True]
        assert all(vars(owner)[name] is old for (owner, name), old in front_end.UNCHANGED.items())


@pytest.mark.parametrize("lock", [front_end.quick, lambda: table._lock], ids=["typing", "tables"])
def test_a_child_calls_ops_that_was_forked_while_a_thread_did(lock):
    """The thread's locks stayed locked in the child, where it is not."""
    held = threading.Event()

    def hold() -> None:
        with lock():
            held.set()
            time.sleep(0.1)

    def child() -> None:
        signal.alarm(5)
        table.forget()
        with front_end.quick():
            assert not gc.isenabled()
        assert gc.isenabled()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    done = forked.program(child)
    thread.join()
    assert done == (0, "", "")
