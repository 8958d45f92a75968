"""Arguments, options, specialisations, errors and the debugger, of the interpreter."""

import linecache
import pdb
import sys
import textwrap
from typing import Annotated

import cuda.tile as ct
import numpy as np
import pytest
import torch
from forked import program

from tilewright import interpret as package
from tilewright.interpret import KernelError, checking, compiled_count, cutile, interpret, source, threads as threads_module, version
from tilewright.interpret.run import _program as compiled


@ct.kernel
def scale(x, out, factor, n: ct.Constant[int]):
    ct.store(out, (ct.bid(0),), ct.load(x, (ct.bid(0),), (n,), padding_mode=ct.PaddingMode.ZERO) * factor)


# ----------------------------------------------------------------------------------- specialisation
def test_one_specialisation_serves_every_shape_stride_and_value():
    def run(n: int, factor: float, stride: int = 1) -> None:
        x, out = torch.randn(n * stride)[::stride], torch.empty(n)
        interpret(scale, (-(-n // 16),), (x, out, factor, 16))
        torch.testing.assert_close(out, x * factor)

    run(16, 1.5)
    before = compiled_count()
    for n in range(1, 40):
        run(n, n * 0.25, stride=1 + n % 3)
    assert compiled_count() == before


def test_types_constants_and_ranks_are_specialised_for():
    x, out = torch.ones(16), torch.empty(16)
    interpret(scale, (4,), (x, out, 2.0, 4))  # of tiles that no other test has: they may have run
    before = compiled_count()
    interpret(scale, (4,), (x, out, 2, 4))
    interpret(scale, (4,), (x.double(), out.double(), 2.0, 4))
    interpret(scale, (8,), (x, out, 2.0, 2))
    assert compiled_count() == before + 3
    interpret(scale, (8,), (x, out, 3.0, 2))
    hinted = scale.replace_hints(occupancy=2)
    interpret(hinted, (8,), (x, out, 2.0, 2))
    assert compiled_count() == before + 3  # hints do not change what is computed


def test_the_generated_python_can_be_read():
    text = source(scale, (torch.ones(16), torch.empty(16), 2.0, 16))
    assert "__m.load((x__, " in text
    assert "__m.store((out__, " in text


@ct.kernel
def repeats(x, out, n):
    """Equal expressions in every place where one may, or may not, stand for the other."""
    column = ct.arange(8, dtype=ct.int32)
    again = ct.arange(8, dtype=ct.int32)
    first, second = column * n, again * n
    total = ct.load(x, (0,), (8,)) + first
    ct.store(x, (0,), total)
    total = total + ct.load(x, (0,), (8,))  # another value: it was stored
    for i in range(n):
        step = column * i
        if i % 2 == 0:
            total = total + step + column * i
        else:
            total = total + step * (column * i) + column * n
        n = n - 1
        total = total + column * n
    while n < 4:
        n += 1
        total = total + column * n
    ct.store(out, (0,), total + second + column * n)


@pytest.mark.parametrize("n", [1, 4, 7])
def test_equal_expressions_are_computed_once_and_values_that_change_anew(n):
    def expected(n):
        column = torch.arange(8)
        first = column * n
        total = torch.ones(8, dtype=torch.int64) + first
        total = total + total
        for i in range(n):
            total += 2 * column * i if i % 2 == 0 else (column * i) ** 2 + column * n
            n -= 1
            total += column * n
        while n < 4:
            n += 1
            total += column * n
        return total + first + column * n

    for debug in (False, True):
        x, out = torch.ones(8, dtype=torch.int32), torch.empty(8, dtype=torch.int32)
        with checking(debug=debug):
            interpret(repeats, (1,), (x, out, n))
        assert torch.equal(out.long(), expected(n))
    lines = [line.split(" = ")[-1] for line in source(repeats, (x, out, n)).splitlines() if line.startswith("    t")]
    assert len(set(lines)) == len(lines)
    assert len([line for line in lines if line.startswith("arange")]) == 1


def least_of(x, y):
    if x < y:
        return x
    return y


@ct.kernel
def returns_early(x, out):
    ct.store(out, (0,), least_of(ct.load(x, (0,), ()), 3.0))


@ct.kernel
def polls(x, out):
    passes = 0
    while passes < ct.load(x, (0,), ()):
        passes += 1
    ct.store(out, (0,), passes * 1.0)


@pytest.mark.parametrize(("kernel", "waits"), [(returns_early, False), (polls, True)])
def test_only_a_loop_with_a_second_pass_may_wait_for_another_block(kernel, waits):
    """What returns early is a loop in the IR, too."""
    args = torch.ones(1), torch.empty(1)
    interpret(kernel, (1,), args)
    assert args[1].item() == 1
    assert compiled(kernel, args, False).cooperative == waits


# ---------------------------------------------------------------------------------------- arguments
def test_numpy_arrays_are_arguments():
    x, out = np.arange(8, dtype=np.float32), np.zeros(8, np.float32)
    interpret(scale, (1,), (x, out, 2.0, 8))
    np.testing.assert_array_equal(out, x * 2)


def test_tensors_that_need_a_gradient_are_read():
    x, out = torch.ones(8, requires_grad=True), torch.empty(8)
    interpret(scale, (1,), (x, out, 2.0, 8))
    assert out.eq(2).all()


def test_empty_arrays_and_scalars_of_rank_zero():
    @ct.kernel
    def kernel(x, y):
        ct.scatter(y, (), ct.gather(y, ()) + ct.num_tiles(x, 0, (4,)).astype(ct.float32))

    y = torch.tensor(3.0)
    interpret(kernel, (1,), (torch.empty(0), y))
    assert y.item() == 3


def test_lists_and_nested_tuples():
    @ct.kernel
    def kernel(xs, more, out):
        total = ct.zeros((4,), ct.float32)
        for i in range(len(xs)):
            total += ct.load(xs[i], (0,), (4,))
        (a, n), y = more
        ct.store(out, (0,), total * n + ct.load(a, (0,), (4,)) + y)

    xs = [torch.randn(4) for _ in range(3)]
    a, out = torch.randn(4), torch.empty(4)
    interpret(kernel, (1,), (xs, ((a, 2), 0.5), out))
    torch.testing.assert_close(out, sum(xs) * 2 + a + 0.5)


def test_wide_scalars_and_static_shapes():
    @ct.kernel
    def kernel(out, n: ct.ScalarInt64, x: Annotated[ct.Array, ct.ArrayAnnotation(static_shape_dims=(0,))]):
        ct.store(out, (0,), ct.sum(ct.load(x, (0,), (x.shape[0],))).astype(ct.int64) + ct.full((1,), n, ct.int64))

    out = torch.zeros(1, dtype=torch.int64)
    for length in (4, 8):
        interpret(kernel, (1,), (out, 1 << 40, torch.ones(length)))
        assert out.item() == (1 << 40) + length


@pytest.mark.parametrize(("args", "error", "message"), [
    ((torch.ones(8), torch.empty(8), 2.0), TypeError, r"args must be 4 values, as many as scale has parameters \(x, out, factor, n\), got 3"),
    ((torch.ones(8), torch.empty(8), "two", 8), TypeError, "factor must be a tensor, a number, or a list or tuple of them, got str"),
    ((torch.ones(8), torch.empty(8), 2.0, torch.ones(1)), TypeError, "n must be a bool, int or float, because .* ct.Constant, got Tensor"),
    ((torch.ones(8), torch.empty(8), 1 << 40, 8), OverflowError, "int32"),
    ((torch.ones(8, dtype=torch.complex64), torch.empty(8), 1.0, 8), TypeError, "complex64"),
    ((np.ones(8)[::-1], np.empty(8), 1.0, 8), ValueError, "x must have strides of at least 0"),
])  # fmt: skip
def test_wrong_arguments(args, error, message):
    with pytest.raises(error, match=message):
        interpret(scale, (1,), args)


@pytest.mark.parametrize("grid", [(1, 1, 1, 1), (1 << 24,), (1, 65536), (1, 1, 65536), (-1,)])
def test_grids_that_no_gpu_launches(grid):
    with pytest.raises(ValueError, match=r"[Gg]rid"):
        interpret(scale, grid, (torch.ones(8), torch.empty(8), 2.0, 8))


# ------------------------------------------------------------------------------------------ options
@ct.kernel
def note_order(count, order):
    ct.scatter(order, (ct.bid(0), ct.bid(1)), ct.atomic_add(count, 0, 1, memory_order=ct.MemoryOrder.RELAXED))


def orders(order) -> list[int]:
    count, out = torch.zeros(1, dtype=torch.int32), torch.zeros(3, 4, dtype=torch.int32)
    with checking(order=order):
        interpret(note_order, (3, 4), (count, out))
    return out.T.flatten().tolist()


def test_block_order():
    assert orders("forward") == list(range(12))
    assert orders("reverse") == list(range(11, -1, -1))
    shuffled = orders(5)
    assert sorted(shuffled) == list(range(12))
    assert shuffled == orders(5)
    assert shuffled != orders(6)
    with pytest.raises(ValueError, match="order must be"), checking(order="random"):
        pass


def test_options_nest_and_end_with_their_context():
    @ct.kernel
    def race(x):
        ct.store(x, (0,), ct.full((4,), ct.bid(0), ct.float32))

    x = torch.zeros(4)
    with checking(races=True):
        with checking(order="reverse"), pytest.raises(KernelError, match="race"):
            interpret(race, (2,), (x,))
        with checking(races=False):
            interpret(race, (2,), (x,))
    interpret(race, (2,), (x,))


def test_printing(capsys):
    @ct.kernel
    def kernel(x):
        ct.printf("%d: %5.1f %x%%\n", ct.bid(0), ct.load(x, (0,), (2,)), 255)
        print("block", ct.bid(0))

    interpret(kernel, (2,), (torch.tensor([1.5, -2.0]),))
    assert capsys.readouterr().out == "0: [  1.5,  -2.0] ff%\nblock 0\n1: [  1.5,  -2.0] ff%\nblock 1\n"


# ----------------------------------------------------------------------------------------- debugger
@ct.kernel
def stepped(x, out, n: ct.Constant[int]):
    block = ct.bid(0)
    row = ct.load(x, (block, 0), (1, n))
    total = ct.sum(row)
    if total > 0:
        total = -total
    ct.store(out, (block,), total)


def test_debug_mode_runs_the_kernels_own_lines_and_variables():
    lines, seen = set(), {}
    file, first = stepped._pyfunc.__code__.co_filename, stepped._pyfunc.__code__.co_firstlineno

    def trace(frame, event, _):
        if frame.f_code.co_filename == file and event in ("call", "line"):
            lines.add(frame.f_lineno)
            if frame.f_lineno > first + 4:
                seen.update({k: v for k, v in frame.f_locals.items() if "__" not in k})
        return trace if frame.f_code.co_filename == file or "kernel__" in frame.f_code.co_name else None

    out = torch.zeros(1)
    with checking(debug=True):
        interpret(stepped, (1,), (torch.ones(1, 4), out, 4))
        sys.settrace(trace)
        try:
            interpret(stepped, (1,), (torch.ones(1, 4), out, 4))
        finally:
            sys.settrace(None)
    assert out.item() == -4
    body = {number for number in lines if number > first}
    text = "".join(linecache.getline(file, number) for number in sorted(body))
    for part in ("ct.bid(0)", "ct.load", "ct.sum", "if total > 0", "-total", "ct.store"):
        assert part in text
    assert {"block", "row", "total", "n"} <= set(seen)
    assert seen["row"].shape == (1, 4)
    assert seen["n"] == 4


def test_errors_in_debug_mode_name_the_same_line():
    @ct.kernel
    def kernel(x, out):
        t = ct.load(x, (5,), (4,))  # BUG
        ct.store(out, (0,), t)

    with checking(debug=True), pytest.raises(KernelError, match="lies entirely outside") as caught:
        interpret(kernel, (1,), (torch.zeros(8), torch.zeros(8)))
    file, line, _ = caught.value.places[0]
    assert "# BUG" in linecache.getline(file, line)


def test_pdb_stops_in_a_kernel(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import cuda.tile as ct
        import torch
        from tilewright.interpret import checking, interpret

        @ct.kernel
        def kernel(x, out):
            row = ct.load(x, (ct.bid(0),), (4,))
            ct.store(out, (ct.bid(0),), row * 2)

        with checking(debug=True):
            interpret(kernel, (2,), (torch.arange(8.0), torch.zeros(8)))
        """)
    )
    commands = "b script.py:9\nc\np row.tolist()\nc\np row.tolist()\nq\n"
    done = program(pdb.main, "pdb", "script.py", folder=tmp_path, given=commands)  # as `python -m pdb script.py`
    assert "ct.store(out, (ct.bid(0),), row * 2)" in done.stdout, done.stdout + done.stderr
    assert "[0.0, 1.0, 2.0, 3.0]" in done.stdout, done.stdout
    assert "[4.0, 5.0, 6.0, 7.0]" in done.stdout, done.stdout


# ------------------------------------------------------------------------------------------ threads
@pytest.mark.parametrize(("load", "given", "threads"), [(0.2, "", 3), (1.4, "", 2), (2.6, "", 1), (9.0, "", 1), (9.0, "3", 4)])
def test_products_take_no_more_threads_than_cores_are_free(monkeypatch, load, given, threads):
    monkeypatch.setattr(threads_module.os, "getloadavg", lambda: (load, 0, 0))
    monkeypatch.setattr(threads_module.os, "sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        threads_module.choose_threads()
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


# --------------------------------------------------------------------------------------- signatures
def test_what_the_jit_assumes_needs_no_device():
    meta = torch.empty(64, 48, dtype=torch.bfloat16, device="meta")
    x, y, factor, n = cutile.constraints_of(scale, (meta[0], meta[1], 1.0, 16), jit=True)
    assert (x.stride_constant, x.shape_divisible_by, x.base_addr_divisible_by) == ((1,), (16,), 16)
    assert y.base_addr_divisible_by == 16
    assert factor.dtype is ct.float32
    assert n.value == 16
    (odd, *_) = cutile.constraints_of(scale, (meta[:, 1:2].squeeze(1), meta[0], 1.0, 16), jit=True)
    assert (odd.stride_constant, odd.stride_divisible_by, odd.base_addr_divisible_by) == ((None,), (8,), 1)
    (one, *_) = cutile.constraints_of(scale, (meta[0, :1], meta[0], 1.0, 16), jit=True)
    assert one.shape_constant == (1,)


def test_another_cuda_tile_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setattr(version, "version", lambda name: "1.9.2")
    with pytest.raises(ImportError, match=r"cuda-tile 1\.7 .* found 1\.9\.2: pip install 'cuda-tile==1\.7\.\*'"):
        version.require_supported_cuda_tile()


def test_public_names():
    for name in package.__all__:
        assert getattr(package, name).__doc__
