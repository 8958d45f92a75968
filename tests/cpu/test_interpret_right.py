"""Right kernels pass every check, and what PyTorch writes counts as written."""

import cuda.tile as ct
import pytest
import torch
from kernel_bugs import ACQUIRE, RELAXED, RELEASE, add_one, integers, ints, lock, rows, run_with_everything, unlock, zeros

from tilewright.interpret import KernelError, checking, interpret

RIGHT = []


def right(blocks, *arguments):
    def add(function):
        RIGHT.append(pytest.param(blocks, ct.kernel(function), arguments, id=function.__name__))
        return function

    return add


@right(6, ints(2), rows(4))
def two_locks_in_one_order(locks, x):
    lock(locks, 0)
    lock(locks, 1)
    add_one(x)
    unlock(locks, 1)
    unlock(locks, 0)


@right(4, ints(3), rows(4))
def two_locks_in_any_order_behind_a_third(locks, x):
    b = ct.bid(0) % 2
    lock(locks, 2)
    lock(locks, b)
    lock(locks, 1 - b)
    add_one(x)
    unlock(locks, 1 - b)
    unlock(locks, b)
    unlock(locks, 2)


@right(4, ints(2))
def maxima_by_compare_and_swap_in_opposite_order(x):
    b = ct.bid(0)
    for i in range(2):
        at = (b + i) % 2
        seen = ct.atomic_add(x, at, 0)
        while seen < b:
            seen = ct.atomic_cas(x, at, seen, b)


@right(5, ints(2), rows(4))
def ticket_lock(locks, x):
    mine = ct.atomic_add(locks, 0, 1)
    while ct.atomic_add(locks, 1, 0) != mine:
        pass
    add_one(x)
    ct.atomic_add(locks, 1, 1)


@right(6, rows(2, 6), ints(1))
def all_read_then_one_writes(x, count):
    b = ct.bid(0)
    ct.scatter(x, (1, b), ct.gather(x, (0, 0)) + ct.gather(x, (0, b)))
    if ct.atomic_add(count, 0, 1) == 5:
        ct.scatter(x, (0, ct.arange(8, dtype=ct.int32)), 1.0, mask=ct.arange(8, dtype=ct.int32) < 6)


@right(6, ints(1), ints(1), ints(6))
def relaxed_counters_then_a_barrier(count, arrived, out):
    ct.atomic_add(count, 0, 1, memory_order=RELAXED)
    ct.atomic_add(arrived, 0, 1)
    while ct.atomic_add(arrived, 0, 0) < 6:
        pass
    ct.scatter(out, ct.bid(0), ct.gather(count, 0))


@right(3, rows(2), ints(1), rows(2))
def two_releases_of_one_flag(data, flag, out):
    b = ct.bid(0)
    if b < 2:
        ct.scatter(data, b, 7.0)
        ct.atomic_add(flag, 0, 1, memory_order=RELEASE)
    else:
        while ct.atomic_add(flag, 0, 0, memory_order=ACQUIRE) < 2:
            pass
        ct.store(out, (0,), ct.load(data, (0,), (2,)))


@right(2, ints(1), ints(1))
def a_spinning_block_that_counts(flag, spins):
    if ct.bid(0) == 0:
        while ct.atomic_add(flag, 0, 0) == 0:
            ct.atomic_add(spins, 0, 1)
    else:
        ct.atomic_xchg(flag, 0, 1)


@right(3, ints(1), ints(1), rows(4))
def a_lock_whose_waiters_count_their_looks(locks, looks, x):
    while ct.atomic_xchg(locks, 0, 1) == 1:
        ct.atomic_add(looks, 0, 1)
    add_one(x)
    ct.atomic_xchg(locks, 0, 0)


@right(4, ints(2), ints(8), ints(5, 4))
def two_buffers_between_barriers_that_count_generations(count, x, out):
    b = ct.bid(0)
    for step in range(5):
        ct.scatter(x, step % 2 * 4 + b, step)
        if ct.atomic_add(count, 0, 1) == 3:
            ct.atomic_xchg(count, 0, 0)
            ct.atomic_add(count, 1, 1)
        while ct.atomic_add(count, 1, 0) < step + 1:
            pass
        ct.scatter(out, (step, b), ct.gather(x, step % 2 * 4 + (b + 1) % 4))


@right(2, ints(1), ints(1), ints(6))
def a_flag_that_both_sides_turn_back(flag, slot, out):
    for step in range(6):
        if ct.bid(0) == 0:
            while ct.atomic_add(flag, 0, 0) != 0:
                pass
            ct.scatter(slot, 0, step)
            ct.atomic_xchg(flag, 0, 1)
        else:
            while ct.atomic_add(flag, 0, 0) != 1:
                pass
            ct.scatter(out, step, ct.gather(slot, 0))
            ct.atomic_xchg(flag, 0, 0)


@right(3, ints(1), ints(1), ints(3), ints(1))
def a_counter_that_a_plain_store_resets(count, go, x, out):
    b = ct.bid(0)
    if ct.atomic_add(count, 0, 1) == 2:
        ct.scatter(count, 0, 0)
        ct.atomic_xchg(go, 0, 1)
    while ct.atomic_add(go, 0, 0) == 0:
        pass
    if b > 0:
        ct.scatter(x, b, 1)
        ct.atomic_add(count, 0, 1)
    else:
        while ct.atomic_add(count, 0, 0) < 2:
            pass
        ct.scatter(out, 0, ct.gather(x, 1) + ct.gather(x, 2))


@right(3, ints(3), ints(1), ints(3))
def the_last_block_sees_what_each_has_set(flags, count, out):
    b = ct.bid(0)
    ct.atomic_xchg(flags, b, 1)
    ct.assert_(ct.atomic_add(flags, b, 0) == 1, "an older value than this block has set")  # noqa: PT009
    if ct.atomic_add(count, 0, 1) == 2:
        for i in range(3):
            out_of_date = ct.atomic_add(flags, i, 0) == 0
            ct.assert_(not out_of_date, "an older value than a block that came before has set")  # noqa: PT009


@right(3, ints(2), ints(1), ints(1))
def what_a_flag_says_of_another(flags, x, out):
    b = ct.bid(0)
    if b == 0:
        ct.scatter(x, 0, 1)
        ct.atomic_xchg(flags, 0, 1)
    elif b == 1:
        while ct.atomic_add(flags, 0, 0) == 0:
            pass
        ct.atomic_xchg(flags, 1, 1)
    else:
        while ct.atomic_add(flags, 1, 0) == 0:
            pass
        ct.assert_(ct.atomic_add(flags, 0, 0) == 1, "an older value than block 1 has seen")  # noqa: PT009
        ct.scatter(out, 0, ct.gather(x, 0))
        ct.scatter(x, 0, 2)


@right(1, lambda: integers(4, 8)[1:3, 2:6], rows(2))
def unchecked_but_inside(x, out):
    at = ct.arange(2, dtype=ct.int32)
    ct.atomic_add(x, (1, at + 2), 1, check_bounds=False)
    lanes = ct.arange(8, dtype=ct.int32)
    t = ct.gather(x, (0, lanes), mask=lanes < 4, check_bounds=False)
    ct.scatter(out, at, ct.full((2,), ct.sum(t), ct.float32))


@right(3, lambda: torch.empty(10), rows(12))
def every_element_is_written(out, x):
    ct.store(out, (ct.bid(0),), ct.load(x, (ct.bid(0),), (4,)))


@pytest.mark.parametrize("order", ["forward", "reverse", 3])
@pytest.mark.parametrize(("blocks", "kernel", "arguments"), RIGHT)
def test_nothing_is_reported_of_right_kernels(blocks, kernel, arguments, order):
    run_with_everything(blocks, kernel, arguments, order=order)


# ---------------------------------------------------- which elements a tensor's methods write
def writes(change):
    """Which elements of an uninitialised [4, 6] tensor a call is seen to write."""

    @ct.kernel
    def read(x, i, j, out):
        ct.scatter(out, 0, ct.gather(x, (i, j)))

    found = torch.zeros(4, 6, dtype=torch.bool)
    with checking(uninitialised=True):
        x = torch.empty(4, 6)
        change(x)
        for i in range(4):
            for j in range(6):
                try:
                    interpret(read, (1,), (x, i, j, zeros(1)))
                    found[i, j] = True
                except KernelError:
                    pass
    return found


def marked(change):
    expected = torch.zeros(4, 6, dtype=torch.bool)
    expected[change] = True
    return expected


MASK = torch.arange(24).reshape(4, 6) % 5 == 0
CALLS = {
    "column": (lambda x: x.__setitem__((slice(None), 0), 1), (slice(None), 0)),
    "element": (lambda x: x.__setitem__((2, 3), 1), (2, 3)),
    "steps": (lambda x: x.__setitem__((slice(1, None, 2), slice(None, None, 3)), 1), (slice(1, None, 2), slice(None, None, 3))),
    "list": (lambda x: x.__setitem__([0, 3], 1), [0, 3]),
    "mask": (lambda x: x.__setitem__(MASK, 1), MASK),
    "masked_fill_": (lambda x: x.masked_fill_(MASK, 2.0), MASK),
    "index_fill_": (lambda x: x.index_fill_(1, torch.tensor([1, 4]), 2.0), (slice(None), [1, 4])),
    "view.fill_": (lambda x: x.T[2:4, 1:3].fill_(5), (slice(1, 3), slice(2, 4))),
    "view.copy_": (lambda x: x[:, 1::2].copy_(torch.ones(4, 3)), (slice(None), slice(1, None, 2))),
    "out": (lambda x: torch.add(torch.ones(4), 1, out=x[:, 5]), (slice(None), 5)),
    "normal_": (lambda x: x[1:3].normal_(), slice(1, 3)),
    "add_": (lambda x: x.add_(1), slice(0, 0)),
    "zero_": (lambda x: x.zero_(), slice(None)),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_writes_just_its_elements(name):
    change, elements = CALLS[name]
    assert torch.equal(writes(change), marked(elements))
