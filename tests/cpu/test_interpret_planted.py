"""Bugs planted in small kernels: one run with every check on finds each."""

import cuda.tile as ct
import pytest
import torch
from kernel_bugs import ACQUIRE, RELAXED, RELEASE, add_one, integers, ints, lock, rows, run_with_everything, unlock, zeros

from tilewright.interpret import Deadlock, KernelError, checking, interpret

PLANTED = []


def planted(blocks, what, *arguments, error=KernelError):
    """A kernel with one bug; `arguments()` makes what it is called with inside the checks."""

    def add(function):
        PLANTED.append(pytest.param(blocks, ct.kernel(function), arguments, what, error, id=function.__name__))
        return function

    return add


# ------------------------------------------------------------------------------------ missing order
@planted(2, "write of element (0,) of x", rows(4))
def two_blocks_write(x):
    ct.store(x, (0,), ct.full((4,), ct.bid(0), ct.float32))


@planted(4, "read of element (0,) of total", rows(1))
def sum_without_an_atomic(total):
    ct.scatter(total, 0, ct.gather(total, 0) + 1)


@planted(3, "write of element (0, 0) of x", rows(2, 4))
def write_after_read(x):
    t = ct.load(x, (ct.bid(0) // 2, 0), (1, 4))
    if ct.bid(0) == 2:
        ct.store(x, (0, 0), t)


@planted(40, "write of element (0,) of x: float32[1] is not ordered after a read by block (0, 0, 0)", rows(1), ints(40), rows(40))
def the_first_of_39_readers_is_forgotten(x, flags, out):
    b = ct.bid(0)
    if b < 39:
        ct.scatter(out, b, ct.gather(x, 0))
        ct.atomic_xchg(flags, b, 1)
    else:
        for i in range(1, 39):
            while ct.atomic_add(flags, i, 0) == 0:
                pass
        ct.scatter(x, 0, 1.0)


@planted(3, "read of element (0,) of count: int32[1] is not ordered after an atomic write by block (0, 0, 0)", ints(1), ints(1), ints(1))
def an_earlier_atomic_writer_is_forgotten(count, flag, out):
    b = ct.bid(0)
    if b < 2:
        ct.atomic_add(count, 0, 1, memory_order=RELAXED)
        if b == 1:
            ct.atomic_xchg(flag, 0, 1)
    else:
        while ct.atomic_add(flag, 0, 0) == 0:
            pass
        ct.scatter(out, 0, ct.gather(count, 0))


@planted(4, "read of element (0,) of parts", rows(4), ints(1), rows(1))
def last_block_relaxed(parts, count, out):
    ct.scatter(parts, ct.bid(0), 1.0)
    if ct.atomic_add(count, 0, 1, memory_order=RELAXED) == 3:
        ct.scatter(out, 0, ct.sum(ct.load(parts, (0,), (4,))))


@planted(2, "race between blocks: atomic of element (0,)", ints(1))
def atomic_of_a_block(count):
    ct.atomic_add(count, 0, 1, memory_scope=ct.MemoryScope.BLOCK)


@planted(2, "after an atomic write by block (0, 0, 0)", ints(1))
def plain_write_of_a_counter(count):
    if ct.bid(0) == 0:
        ct.atomic_add(count, 0, 1)
    else:
        ct.scatter(count, 0, 5)


@planted(2, "read of element (0,) of data", rows(1), ints(1), rows(1))
def release_without_acquire(data, flag, out):
    if ct.bid(0) == 0:
        ct.scatter(data, 0, 7.0)
        ct.atomic_xchg(flag, 0, 1, memory_order=RELEASE)
    else:
        while ct.atomic_add(flag, 0, 0, memory_order=RELAXED) == 0:
            pass
        ct.scatter(out, 0, ct.gather(data, 0))


@planted(2, "read of element (0,) of data", rows(1), ints(1), rows(1))
def acquire_without_release(data, flag, out):
    if ct.bid(0) == 0:
        ct.scatter(data, 0, 7.0)
        ct.atomic_xchg(flag, 0, 1, memory_order=RELAXED)
    else:
        while ct.atomic_add(flag, 0, 0, memory_order=ACQUIRE) == 0:
            pass
        ct.scatter(out, 0, ct.gather(data, 0))


@planted(2, "read of element (0,) of data", rows(1), ints(1), rows(1))
def a_release_does_not_acquire(data, flag, out):
    if ct.bid(0) == 0:
        ct.scatter(data, 0, 7.0)
        ct.atomic_xchg(flag, 0, 1, memory_order=RELEASE)
    else:
        while ct.atomic_add(flag, 0, 0, memory_order=RELEASE) == 0:
            pass
        ct.scatter(out, 0, ct.gather(data, 0))


@planted(2, "read of element (0,) of data: float32[1] is not ordered after a write by block (0, 0, 0)", rows(1), ints(1), rows(1))
def what_is_written_after_a_release_is_not_released(data, flag, out):
    if ct.bid(0) == 0:
        ct.atomic_xchg(flag, 0, 1, memory_order=RELEASE)
        ct.scatter(data, 0, 7.0)
    else:
        while ct.atomic_add(flag, 0, 0, memory_order=ACQUIRE) == 0:
            pass
        ct.scatter(out, 0, ct.gather(data, 0))


@planted(3, "race between blocks", ints(2), rows(4))
def lock_given_back_relaxed(locks, x):
    lock(locks, 0)
    add_one(x)
    ct.atomic_xchg(locks, 0, 0, memory_order=RELAXED)


@planted(2, "race between blocks", ints(2), rows(4))
def a_lock_of_its_own_for_each_block(locks, x):
    lock(locks, ct.bid(0))
    add_one(x)
    unlock(locks, ct.bid(0))


@planted(4, "of element (3,) of x: float32[4] is not ordered", ints(1), rows(4), rows(4))
def barrier_that_counts_one_too_few(count, x, out):
    b = ct.bid(0)
    ct.scatter(x, b, 1.0)
    ct.atomic_add(count, 0, 1)
    while ct.atomic_add(count, 0, 0) < 3:
        pass
    ct.scatter(out, b, ct.gather(x, (b + 1) % 4))


@planted(4, "race between blocks", ints(1), ints(3, 4), ints(3, 4))
def barrier_that_counts_one_too_few_in_its_second_round(count, x, out):
    b = ct.bid(0)
    for step in range(3):
        ct.scatter(x, (step, b), 1)
        ct.atomic_add(count, 0, 1)
        need = (step + 1) * 4
        if step == 1:
            need = need - 1
        while ct.atomic_add(count, 0, 0) < need:
            pass
        ct.scatter(out, (step, b), ct.gather(x, (step, (b + 1) % 4)))


@planted(4, "race between blocks", ints(1), ints(4), ints(3, 4))
def one_barrier_a_round_where_two_are_needed(count, x, out):
    b = ct.bid(0)
    for step in range(3):
        ct.scatter(x, b, step)
        ct.atomic_add(count, 0, 1)
        while ct.atomic_add(count, 0, 0) < (step + 1) * 4:
            pass
        ct.scatter(out, (step, b), ct.gather(x, (b + 1) % 4))


@planted(4, "race between blocks", ints(1), ints(4), ints(4))
def barrier_that_does_not_wait_for_the_first_block(count, x, out):
    b = ct.bid(0)
    ct.scatter(x, b, 1)
    ct.atomic_add(count, 0, 1)
    while ct.atomic_add(count, 0, 0) < 3:
        pass
    ct.scatter(out, b, ct.gather(x, 0))  # no race if the first block arrives first


@planted(2, "race between blocks", ints(2), ints(1), ints(6))
def ring_of_one_slot_that_lets_its_writer_be_two_ahead(flags, slot, out):
    for step in range(6):
        if ct.bid(0) == 0:
            while ct.atomic_add(flags, 0, 0) < step - 1:
                pass
            ct.scatter(slot, 0, step)
            ct.atomic_xchg(flags, 1, step + 1)
        else:
            while ct.atomic_add(flags, 1, 0) < step + 1:
                pass
            ct.scatter(out, step, ct.gather(slot, 0))
            ct.atomic_xchg(flags, 0, step + 1)


@planted(3, "race between blocks: read of element", ints(2), ints(2), ints(1))
def waits_for_any_of_two_flags(flags, data, out):
    b = ct.bid(0)
    if b < 2:
        ct.scatter(data, b, 1)
        ct.atomic_xchg(flags, b, 1)
    else:
        while ct.atomic_add(flags, 0, 0) + ct.atomic_add(flags, 1, 0) == 0:
            pass
        ct.scatter(out, 0, ct.gather(data, 0) + ct.gather(data, 1))


@planted(2, "race between blocks: read of element (1,) of data", ints(1), ints(2), ints(2))
def waits_for_the_first_of_two_stores_of_a_flag(flag, data, out):
    device = ct.MemoryScope.DEVICE
    if ct.bid(0) == 0:
        for i in range(2):
            ct.scatter(data, i, 1)
            ct.store(flag, (0,), i + 1, memory_order=RELEASE, memory_scope=device)
    else:
        while ct.load(flag, (0,), (1,), memory_order=ACQUIRE, memory_scope=device).item() < 1:
            pass
        ct.store(out, (0,), ct.load(data, (0,), (2,)))


@planted(3, "of element (0,) of x: int32[1] is not ordered after a", ints(1), ints(1), ints(1))
def a_look_at_a_flag_releases_nothing(flag, x, out):
    b = ct.bid(0)
    if b == 1:
        ct.scatter(out, 0, ct.gather(x, 0))
        while ct.atomic_add(flag, 0, 0) < 1:
            pass
    elif b == 2:
        while ct.atomic_add(flag, 0, 0) < 1:
            pass
        ct.scatter(x, 0, 5)
    else:
        ct.atomic_xchg(flag, 0, 1)


@planted(4, "race between blocks", rows(2, 4))
def no_barrier_at_all(x):
    b = ct.bid(0)
    ct.scatter(x, (0, b), 1.0)
    ct.scatter(x, (1, b), ct.gather(x, (0, (b + 1) % 4)))


@planted(3, "of x", rows(6))
def neighbouring_tiles_overlap(x):
    part = x.slice(axis=0, start=ct.bid(0), stop=ct.bid(0) + 2)
    ct.store(part, (0,), ct.zeros((2,), ct.float32))


# -------------------------------------------------------------------------------- waiting for ever
@planted(2, "deadlock: 2 blocks wait", ints(2), rows(4), error=Deadlock)
def two_locks_in_opposite_order(locks, x):
    b = ct.bid(0)
    lock(locks, b)
    lock(locks, 1 - b)
    add_one(x)
    unlock(locks, 1 - b)
    unlock(locks, b)


@planted(2, "deadlock: 2 blocks wait", ints(2), rows(4), error=Deadlock)
def two_exchanged_locks_in_opposite_order(locks, x):
    b = ct.bid(0)
    while ct.atomic_xchg(locks, b, 1) == 1:
        pass
    while ct.atomic_xchg(locks, 1 - b, 1) == 1:
        pass
    add_one(x)
    ct.atomic_xchg(locks, b, 0)
    ct.atomic_xchg(locks, 1 - b, 0)


@planted(2, "deadlock: 2 blocks wait", ints(4), rows(4), error=Deadlock)
def two_tickets_in_opposite_order(locks, x):
    b = ct.bid(0)
    first = ct.atomic_add(locks, b, 1)
    while ct.atomic_add(locks, 2 + b, 0) != first:
        pass
    second = ct.atomic_add(locks, 1 - b, 1)
    while ct.atomic_add(locks, 3 - b, 0) != second:
        pass
    add_one(x)
    ct.atomic_add(locks, 3 - b, 1)
    ct.atomic_add(locks, 2 + b, 1)


@planted(5, "deadlock: 5 blocks wait", ints(5), rows(4), error=Deadlock)
def five_philosophers(forks, x):
    b = ct.bid(0)
    lock(forks, b)
    lock(forks, (b + 1) % 5)
    add_one(x)
    unlock(forks, (b + 1) % 5)
    unlock(forks, b)


@planted(3, "deadlock: 2 blocks wait", ints(1), rows(4), error=Deadlock)
def lock_never_given_back(locks, x):
    lock(locks, 0)
    add_one(x)


@planted(4, "deadlock: 4 blocks wait", ints(1), error=Deadlock)
def barrier_that_counts_one_too_many(count):
    ct.atomic_add(count, 0, 1)
    while ct.atomic_add(count, 0, 0) < 5:
        pass


@planted(1, "deadlock: the only block left loops", ints(1), error=Deadlock)
def a_loop_without_an_end(x):
    i = ct.gather(x, 0)
    while i < 4:
        i = i % 3
    ct.scatter(x, 0, i)


@planted(1, "endless loop: block (0, 0, 0) passed", rows(4), error=Deadlock)
def a_loop_without_an_end_that_writes(x):
    while True:
        add_one(x)


@planted(2, "endless loop: block (1, 0, 0) passed", ints(2), error=Deadlock)
def a_loop_without_an_end_beside_one_with(x):
    n = 1 + ct.bid(0) * 10
    while ct.atomic_add(x, ct.bid(0), n) < 10 or n > 10:
        pass


# ------------------------------------------------------------------------------------------- bounds
@planted(1, "read of element (0, 5) of x: float32[4, 4], whose last element is (3, 3)", rows(4, 4), rows(4))
def unchecked_gather_in_the_next_row(x, out):
    ct.store(out, (0,), ct.gather(x, (0, ct.arange(4, dtype=ct.int32) + 2), check_bounds=False))


@planted(1, "read of element (0, -1) of x: float32[2, 4]", lambda: zeros(4, 4)[1:3], rows(4))
def unchecked_gather_before_its_row(x, out):
    ct.store(out, (0,), ct.gather(x, (0, ct.arange(4, dtype=ct.int32) - 1), check_bounds=False))


@planted(1, "write of element 4 of part: float32[4], whose last element is 3", rows(8))
def unchecked_scatter_behind_a_slice(x):
    part = x.slice(axis=0, start=2, stop=6)
    ct.scatter(part, ct.arange(4, dtype=ct.int32) + 1, ct.zeros((4,), ct.float32), check_bounds=False)


@planted(1, "atomic of element (1, 2) of x: int32[2, 2]", lambda: integers(4, 8)[1:3, 2:4])
def unchecked_atomic_beside_a_view(x):
    ct.atomic_add(x, (ct.bid(0) + 1, 2), 1, check_bounds=False)


@planted(1, "read of element (-1, 3) of x: float32[2, 4]", lambda: zeros(4, 4)[1:3], rows(1))
def unchecked_gather_in_the_row_before(x, out):
    ct.scatter(out, 0, ct.gather(x, (ct.bid(0) - 1, 3), check_bounds=False))


@planted(1, "read of element 9 of x: float32[8], whose last element is 7", rows(8), rows(4))
def checked_gather_that_reads_padding(x, out):
    ct.store(out, (0,), ct.gather(x, ct.arange(4, dtype=ct.int32) + 6))


@planted(1, "part (4,) of shape (2,) lies outside a tile of shape (8,)", rows(8), rows(2))
def part_behind_the_end_of_a_tile(x, out):
    ct.store(out, (0,), ct.extract(ct.load(x, (0,), (8,)), (ct.bid(0) + 4,), (2,)))


@planted(1, "write of element 8 of x", rows(8))
def checked_scatter_that_is_dropped(x):
    ct.scatter(x, ct.arange(4, dtype=ct.int32) + 5, 1.0)


# ------------------------------------------------------------------------- never written, too early
@planted(1, "read of uninitialised memory: element (0, 1) of x", lambda: first_column_written(), rows(4))
def reads_more_than_was_written(x, out):
    ct.store(out, (0,), ct.load(x, (0, 0), (1, 4)).reshape((4,)))


@planted(2, "never written: 2 of 10 elements of out: float32[10], the first of them (8,)", lambda: torch.empty(10))
def the_last_tile_is_forgotten(out):
    ct.store(out, (ct.bid(0),), ct.zeros((4,), ct.float32))


@planted(2, "never written: 4 of 4 elements of out: float32[4], the first of them (0,)", lambda: torch.empty(4))
def an_output_that_nobody_writes(out):
    if ct.bid(0) > 1:
        ct.store(out, (0,), ct.zeros((4,), ct.float32))


def first_column_written():
    x = torch.empty(4, 4)
    x[:, 0] = 1
    return x


@pytest.mark.parametrize(("blocks", "kernel", "arguments", "what", "error"), PLANTED)
def test_every_planted_bug_is_found(blocks, kernel, arguments, what, error):
    with pytest.raises(error) as caught:
        run_with_everything(blocks, kernel, arguments, steps=4000)  # an endless loop ends ten times sooner than by default
    assert what in caught.value.what
    assert caught.value.places or "never written" in what


@pytest.mark.parametrize("order", range(40))
def test_every_seed_finds_the_two_locks(order):
    kernel = next(p.values[1] for p in PLANTED if p.id == "two_locks_in_opposite_order")
    with checking(order=order), pytest.raises(Deadlock, match="deadlock: 2 blocks wait"):
        interpret(kernel, (2,), (integers(2), zeros(4)))


def test_named_outputs_must_be_written():
    x = torch.empty(8)[::2]
    with pytest.raises(KernelError, match=r"never written: 4 of 4 elements of a tensor that no kernel was given"), checking(unwritten=(x,)):
        pass
    with checking(unwritten=(x,)):
        x.fill_(1)
    with checking(unwritten=True):
        torch.empty(8)
        scratch = torch.empty(8)
        interpret(next(p.values[1] for p in PLANTED if p.id == "the_last_tile_is_forgotten"), (1,), (scratch,))
        del scratch  # nobody holds it at the end: not an output


def test_a_scalar_may_be_written_by_torch():
    """A copy into one failed, because torch has no bytes of a tensor without axes."""
    x = torch.empty(())
    with checking(unwritten=(x,)):
        x.copy_(torch.tensor(2.0))
    with pytest.raises(KernelError, match=r"never written: 1 of 1 elements"), checking(unwritten=(x,)):
        x.add_(1)
