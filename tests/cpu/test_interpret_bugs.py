"""Kernel bugs that the interpreter reports, with the bug, the kernel's line and the block.

Correct versions are not reported.
"""

import cuda.tile as ct
import pytest
import torch
from kernel_bugs import bug, integers, zeros

from tilewright.interpret import Deadlock, KernelError, checking, interpret, mark_uninitialised


# ------------------------------------------------------------------------------------ out of bounds
def test_tile_entirely_outside():
    @ct.kernel
    def kernel(x, out):
        t = ct.load(x, (ct.bid(0) + 1,), (4,))  # BUG
        ct.store(out, (ct.bid(0),), t)

    bug((2,), kernel, (zeros(8), zeros(8)), "tile (2,) of shape (4,) lies entirely outside array x: float32[8]", (1, 0, 0))
    with checking(strict=False):
        interpret(kernel, (2,), (zeros(8), zeros(8)))


def test_negative_tile_index():
    @ct.kernel
    def kernel(x, out):
        ct.store(out, (ct.bid(0) - 1,), ct.load(x, (0,), (4,)))  # BUG

    bug((1,), kernel, (zeros(8), zeros(8)), "tile (-1,)", (0, 0, 0), strict=False)


def test_unchecked_gather_past_the_end():
    @ct.kernel
    def kernel(x, out):
        t = ct.gather(x, ct.arange(4, dtype=ct.int32) + 6, check_bounds=False)  # BUG
        ct.store(out, (0,), t)

    bug((1,), kernel, (zeros(8), zeros(8)), "read of element 9 of x: float32[8], whose last element is 7", (0, 0, 0))


def test_raw_memory_in_front_of_the_tensor():
    @ct.kernel
    def kernel(x):
        x.get_raw_memory().store_offset(ct.arange(4, dtype=ct.int32) - 1, 1.0)  # BUG

    bug((1,), kernel, (zeros(16)[4:8],), "write of element -1 of x: float32[4]", (0, 0, 0))


def test_a_bounds_check_left_out_of_a_partial_tile():
    @ct.kernel
    def kernel(x, out):
        ct.store(out, (0,), ct.load(x, (1,), (8,), check_bounds=False))  # BUG

    bug((1,), kernel, (zeros(12), zeros(8)), "check_bounds=False, but tile (8,) at element [8]", (0, 0, 0))


def test_a_slice_longer_than_its_array():
    @ct.kernel
    def kernel(x, out, stop):
        part = x.slice(axis=0, start=4, stop=stop)
        ct.store(out, (0,), ct.load(part, (0,), (8,)))  # BUG

    bug((1,), kernel, (zeros(8), zeros(8), 12), "reaches out of array part [8] of x: float32[8]", (0, 0, 0))


def test_the_place_is_the_helpers_line_and_then_the_kernels():
    def load(x, i):
        return ct.load(x, (i,), (4,))  # BUG

    @ct.kernel
    def kernel(x, out):
        ct.store(out, (0,), load(x, 5))

    error = bug((1,), kernel, (zeros(8), zeros(8)), "tile (5,)", (0, 0, 0))
    assert [function for _, _, function in error.places] == ["load", "kernel"]
    assert "ct.store(out, (0,), load(x, 5))" in str(error)


# ------------------------------------------------------------------------------------ uninitialised
@ct.kernel
def add_one(x, out):
    t = ct.load(x, (ct.bid(0),), (4,))  # BUG
    ct.store(out, (ct.bid(0),), t + 1)


def test_read_of_memory_nobody_wrote():
    x = torch.empty(8)
    error = bug((2,), add_one, (x, zeros(8)), "read of uninitialised memory: element (0,) of x: float32[8]", (0, 0, 0), uninitialised=(x,))
    assert "4 such elements" in error.what


def test_a_kernels_write_initialises_for_later_launches():
    x, out = torch.empty(8, 8)[:, 2:4].T, zeros(8)  # strided: elements, not rows, are tracked

    @ct.kernel
    def fill(x):
        ct.store(x, (0, ct.bid(0)), ct.full((1, 4), 2.0, ct.float32))

    @ct.kernel
    def read(x, out):
        ct.store(out, (0,), ct.load(x, (0, 0), (1, 8)).reshape((8,)))  # BUG

    with checking():
        mark_uninitialised(x)
        interpret(fill, (1,), (x,))
        with pytest.raises(KernelError, match=r"element \(0, 4\) of x"):
            interpret(read, (1,), (x, out))
        interpret(fill, (2,), (x,))
        interpret(read, (1,), (x, out))
    assert out.eq(2).all()
    interpret(read, (1,), (torch.empty(2, 8), out))  # over with the context


def test_an_atomic_reads():
    @ct.kernel
    def kernel(x):
        ct.atomic_add(x, 1, 1.0)  # BUG

    x = torch.empty(4)
    bug((1,), kernel, (x,), "atomic of uninitialised memory: element (1,) of x", (0, 0, 0), uninitialised=(x,))


def test_memory_allocated_inside_the_context():
    with checking(uninitialised=True):
        x, filled, copied, zeroed = torch.empty(8), torch.empty(8).fill_(1), torch.empty_like(zeros(8)), torch.zeros(8)
        copied[:] = 3
        for written in (filled, copied, zeroed):
            interpret(add_one, (2,), (written, torch.empty(8)))
        with pytest.raises(KernelError, match=r"read of uninitialised memory: element \(0,\) of x"):
            interpret(add_one, (2,), (x, torch.empty(8)))
        interpret(add_one, (2,), (filled, x))
        interpret(add_one, (2,), (x, torch.empty(8)))
    interpret(add_one, (2,), (torch.empty(8), torch.empty(8)))


def test_pytorch_writes_to_named_memory_too():
    x, fresh = torch.empty(8), torch.empty(8)
    with checking(uninitialised=(x,)):
        x[:4] = 1
        interpret(add_one, (1,), (x, torch.empty(8)))
        with pytest.raises(KernelError, match=r"read of uninitialised memory: element \(4,\) of x"):
            interpret(add_one, (2,), (x, torch.empty(8)))
        interpret(add_one, (2,), (torch.empty_like(fresh), torch.empty(8)))  # only x is watched
        mark_uninitialised(fresh)
        fresh.zero_()
        interpret(add_one, (2,), (fresh, torch.empty(8)))


@pytest.mark.parametrize("steps", [0, -1, "x", 2.5])
def test_steps_are_at_least_1(steps):
    with pytest.raises(ValueError, match="steps must be an int of at least 1, got "), checking(steps=steps):
        pass


def test_marks_need_a_context():
    with pytest.raises(RuntimeError, match="with checking"):
        mark_uninitialised(torch.empty(4))


# ----------------------------------------------------------------------------------- and the others
def test_integer_division_by_zero():
    @ct.kernel
    def kernel(x, out):
        t = ct.load(x, (0,), (4,)) // ct.bid(0)  # BUG
        ct.store(out, (0,), t)

    bug(
        (1,),
        kernel,
        (integers(4) + 3, integers(4)),
        "integer floordiv by zero, which Tile IR leaves undefined: tile (4,) [3, 3, 3, 3] by 0",
        (0, 0, 0),
    )


def test_false_assumption():
    @ct.kernel
    def kernel(x, n):
        k = ct.assume_divisible_by(n, 8)  # BUG
        ct.store(x, (0,), ct.full((4,), k, ct.float32))

    bug((1,), kernel, (zeros(4), 12), "assume_divisible_by(8) is false of 12", (0, 0, 0))


def test_device_assertion():
    @ct.kernel
    def kernel(x):
        t = ct.load(x, (0,), (4,))
        ct.assert_(t > 0, "x must be positive")  # BUG # noqa: PT009

    bug((1,), kernel, (torch.tensor([1.0, 2, -3, 4]),), "assertion failed: x must be positive (first false elements [[2]])", (0, 0, 0))


def test_deadlock():
    @ct.kernel
    def kernel(lock):
        while ct.atomic_cas(lock, 0, 2, 1) != 2:  # BUG
            pass

    # At once: blocks that repeat themselves are not looked at until patience is over.
    with pytest.raises(Deadlock, match=r"2 blocks wait, and none has changed memory for \d{1,3} rounds"):
        interpret(kernel, (2,), (integers(1),))


def test_a_plain_load_in_a_spin_loop():
    """The front end reads it once, in front of the loop: it does not know that another block may
    write it.
    """

    @ct.kernel
    def kernel(flag, out):
        if ct.bid(0) == 0:
            seen = ct.gather(flag, 0)
            while seen == 0:
                seen = ct.gather(flag, 0)
            ct.scatter(out, 0, seen.astype(ct.float32))
        else:
            ct.scatter(flag, 0, 1)

    with pytest.raises(Deadlock, match="the only block left loops"):
        interpret(kernel, (2,), (integers(1), zeros(1)))
    with checking(races=True), pytest.raises(KernelError, match="race between blocks"):
        interpret(kernel, (2,), (integers(1), zeros(1)))


def test_what_does_not_type_is_the_front_ends_error():
    @ct.kernel
    def changes_type(x, out):
        a = 0
        for i in range(3):
            a = ct.load(x, (i,), (4,))
        ct.store(out, (0,), a)

    @ct.kernel
    def odd_shape(x, out):
        ct.store(out, (0,), ct.load(x, (0,), (6,)))

    with pytest.raises(ct.TileTypeError, match="depends on path taken"):
        interpret(changes_type, (1,), (zeros(12), zeros(4)))
    with pytest.raises(ct.TileTypeError, match="not a power of two"):
        interpret(odd_shape, (1,), (zeros(12), zeros(12)))


def _remainder(x):
    quotient, remainder = divmod(x, x)
    return quotient + remainder


def _rounded_up(x):
    return ct.cdiv(x, 2.0)


def _angle(x):
    return ct.atan2(x, x)


def _square(x):
    return x**x


def _quotient(x):
    return x // x


def _narrow_comparison(x):
    return x.astype(ct.tfloat32) > x.astype(ct.tfloat32)


@pytest.mark.parametrize(
    ("dtype", "function", "message"),
    [
        (torch.int32, _square, "operands of pow must be floats, got int32"),
        (torch.int32, _angle, "operands of atan2 must be floats, got int32"),
        (torch.float32, _rounded_up, r"operands of cdiv must be integers, got float32: write ct.ceil\(x / y\)"),
        (torch.uint32, _quotient, "must be signed integers or floats, got uint32"),
        (torch.uint8, _remainder, "must be signed integers or floats, got uint8"),
        (torch.float8_e4m3fn, ct.isnan, "operands of comparisons and isnan must be .* or float64, got float8_e4m3fn"),
        (torch.float8_e5m2, ct.negative, "operands of neg must be .* or float64, got float8_e5m2"),
        (torch.float32, _narrow_comparison, "got tfloat32"),
    ],
)
def test_what_types_but_has_no_code_on_any_gpu(dtype, function, message):
    @ct.kernel
    def kernel(x, out):
        ct.store(out, (0,), function(ct.load(x, (0,), (4,))).astype(ct.float32))

    with pytest.raises(ct.TileUnsupportedFeatureError, match=message):
        interpret(kernel, (1,), (torch.ones(4).to(dtype), zeros(4)))


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        (torch.int32, "must be ZERO or UNDETERMINED for an array of int32, got NEG_INF"),
        (torch.float8_e4m3fn, "must be a value of float8_e4m3fn, which has no infinity, got NEG_INF"),
    ],
)
def test_padding_is_a_value_of_the_array(dtype, message):
    @ct.kernel
    def kernel(x, out):
        ct.store(out, (0,), ct.load(x, (0,), (8,), padding_mode=ct.PaddingMode.NEG_INF))

    with pytest.raises(ct.TileUnsupportedFeatureError, match=message):
        interpret(kernel, (1,), (torch.ones(8).to(dtype), torch.ones(8).to(dtype)))


def test_a_tile_has_an_axis_where_it_is_loaded():
    @ct.kernel
    def kernel(x):
        ct.scatter(x, (), ct.load(x, (), ()))

    with pytest.raises(ct.TileUnsupportedFeatureError, match=r"must have at least one axis, got none: write ct.gather\(x, \(\)\)"):
        interpret(kernel, (1,), (torch.tensor(1.0),))
