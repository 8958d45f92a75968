"""Races of blocks that the interpreter reports, and right kernels that it does not."""

import cuda.tile as ct
import pytest
import torch
from kernel_bugs import RELAXED, bug, integers, zeros

from tilewright.interpret import KernelError, checking, interpret


# -------------------------------------------------------------------------------------------- races
def test_two_blocks_write_one_tile():
    @ct.kernel
    def kernel(x):
        ct.store(x, (0,), ct.full((4,), ct.bid(0), ct.float32))  # BUG

    what = "write of element (0,) of x: float32[4] is not ordered after a write by block (0, 0, 0) at"
    bug((2,), kernel, (zeros(4),), what, (1, 0, 0), races=True)
    bug((2,), kernel, (zeros(4),), "by block (1, 0, 0)", (0, 0, 0), races=True, order="reverse")
    interpret(kernel, (2,), (zeros(4),))  # not looked for unless asked for


def test_sum_without_an_atomic():
    @ct.kernel
    def kernel(x, total):
        t = ct.sum(ct.load(x, (ct.bid(0),), (4,)))
        ct.scatter(total, 0, ct.gather(total, 0) + t)  # BUG

    bug((4,), kernel, (torch.ones(16), zeros(1)), "race between blocks: read of element (0,) of total", (1, 0, 0), races=True)


def test_write_after_another_blocks_read():
    @ct.kernel
    def kernel(x):
        t = ct.load(x, (ct.bid(0) // 2, 0), (1, 4))
        if ct.bid(0) == 2:
            ct.store(x, (0, 0), t)  # BUG

    bug(
        (3,),
        kernel,
        (zeros(2, 4),),
        "write of element (0, 0) of x: float32[2, 4] is not ordered after a read by block (0, 0, 0)",
        (2, 0, 0),
        races=True,
    )


def test_write_after_two_unordered_reads_of_which_only_the_last_is_known():
    @ct.kernel
    def kernel(x, flag, out):
        b = ct.bid(0)
        if b < 2:
            ct.store(out, (b,), ct.load(x, (0,), (4,)))
            if b == 1:
                ct.atomic_xchg(flag, 0, 1)
        else:
            while ct.atomic_add(flag, 0, 0) == 0:
                pass
            ct.store(x, (0,), ct.zeros((4,), ct.float32))  # BUG

    bug((3,), kernel, (zeros(4), integers(1), zeros(8)), "after a read by block (0, 0, 0)", (2, 0, 0), races=True)


def test_a_plain_access_of_an_atomics_element():
    @ct.kernel
    def kernel(count):
        if ct.bid(0) == 0:
            ct.atomic_add(count, 0, 1)
        else:
            ct.scatter(count, 0, 5)  # BUG

    bug((2,), kernel, (integers(1),), "after an atomic write by block (0, 0, 0)", (1, 0, 0), races=True)


def test_atomics_of_a_block_do_not_order_other_blocks():
    @ct.kernel
    def kernel(count):
        ct.atomic_add(count, 0, 1, memory_scope=ct.MemoryScope.BLOCK)  # BUG

    bug((2,), kernel, (integers(1),), "race between blocks: atomic of element (0,)", (1, 0, 0), races=True)


@ct.kernel
def last_block_relaxed(x, parts, count, out):
    b = ct.bid(0)
    ct.store(parts, (b,), ct.sum(ct.load(x, (b,), (4,))))
    done = ct.atomic_add(count, 0, 1, memory_order=ct.MemoryOrder.RELAXED)
    if done == 3:
        ct.store(out, (0,), ct.sum(ct.load(parts, (0,), (4,))))  # BUG


@ct.kernel
def last_block(x, parts, count, out):
    b = ct.bid(0)
    ct.store(parts, (b,), ct.sum(ct.load(x, (b,), (4,))))
    done = ct.atomic_add(count, 0, 1)
    if done == 3:
        ct.store(out, (0,), ct.sum(ct.load(parts, (0,), (4,))))


def test_the_last_block_needs_acquire_and_release():
    bug((4,), last_block_relaxed, (torch.ones(16), zeros(4), integers(1), zeros(1)), "read of element (0,) of parts", (3, 0, 0), races=True)


def test_arguments_that_share_memory_are_one_memory():
    @ct.kernel
    def kernel(x, y):
        if ct.bid(0) == 0:
            ct.store(x, (0,), ct.zeros((4,), ct.float32))
        else:
            ct.store(y, (0,), ct.zeros((4,), ct.float32))  # BUG

    memory = zeros(8)
    bug((2,), kernel, (memory[:6], memory[3:]), "write of element (0,) of y: float32[5] is not ordered", (1, 0, 0), races=True)
    with checking(races=True):
        interpret(kernel, (2,), (memory[:4], memory[4:]))


def wait_for(flags, known):
    """Waits for those of three blocks that are in `known`, a mask."""
    for i in ct.static_iter(range(3)):
        if known >> i & 1:
            while ct.atomic_add(flags, i, 0) == 0:
                pass


def readers_then_writer(x, flags, out, known: ct.Constant[int]):
    """Block 3 waits for the readers in `known`, a mask, before it writes."""
    b = ct.bid(0)
    if b < 3:
        ct.scatter(out, b, ct.gather(x, 0))
        ct.atomic_xchg(flags, b, 1)
    else:
        wait_for(flags, known)
        ct.scatter(x, 0, 1.0)


@pytest.mark.parametrize("forgotten", range(3))
@pytest.mark.parametrize("order", ["forward", "reverse", 5])
def test_one_of_three_readers_is_not_waited_for(forgotten, order):
    kernel = ct.kernel(readers_then_writer)
    with checking(races=True, order=order), pytest.raises(KernelError, match=rf"block \({forgotten}, 0, 0\)"):
        interpret(kernel, (4,), (zeros(1), integers(3), zeros(3), 7 & ~(1 << forgotten)))
    with checking(races=True, order=order):
        interpret(kernel, (4,), (zeros(1), integers(3), zeros(3), 7))


def adders_then_reader(count, flags, out, known: ct.Constant[int]):
    """Block 3 waits for the adders in `known`, a mask, before it reads."""
    b = ct.bid(0)
    if b < 3:
        ct.atomic_add(count, 0, 1, memory_order=RELAXED)
        ct.atomic_xchg(flags, b, 1)
    else:
        wait_for(flags, known)
        ct.scatter(out, 0, ct.gather(count, 0))


@pytest.mark.parametrize("forgotten", range(3))
@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_one_of_three_atomics_is_not_waited_for(forgotten, order):
    """The one in the middle is the last in no order that is tried."""
    kernel = ct.kernel(adders_then_reader)
    with checking(races=True, order=order), pytest.raises(KernelError, match=rf"an atomic write by block \({forgotten}, 0, 0\)"):
        interpret(kernel, (4,), (integers(1), integers(3), integers(1), 7 & ~(1 << forgotten)))
    with checking(races=True, order=order):
        interpret(kernel, (4,), (integers(1), integers(3), integers(1), 7))


# --------------------------------------------------------------------------------- no false reports
@pytest.mark.parametrize("order", ["forward", "reverse", 1, 2, 3])
class TestRightKernels:
    def test_last_block(self, order):
        out = zeros(1)
        with checking(races=True, order=order):
            interpret(last_block, (4,), (torch.ones(16), zeros(4), integers(1), out))
        assert out.item() == 16

    def test_sum_by_atomics(self, order):
        @ct.kernel
        def kernel(x, total):
            ct.atomic_add(total, 0, ct.sum(ct.load(x, (ct.bid(0),), (4,))), memory_order=ct.MemoryOrder.RELAXED)

        total = zeros(1)
        with checking(races=True, order=order):
            interpret(kernel, (4,), (torch.ones(16), total))
        assert total.item() == 16

    def test_lock(self, order):
        @ct.kernel
        def kernel(lock, total):
            while ct.atomic_cas(lock, 0, 0, 1, memory_order=ct.MemoryOrder.ACQUIRE) == 1:
                pass
            ct.store(total, (0,), ct.load(total, (0,), (4,)) + 1)
            ct.atomic_xchg(lock, 0, 0, memory_order=ct.MemoryOrder.RELEASE)

        total = zeros(4)
        with checking(races=True, order=order):
            interpret(kernel, (5,), (integers(1), total))
        assert total.tolist() == [5.0] * 4

    def test_hand_over_to_an_earlier_block(self, order):
        @ct.kernel
        def kernel(flag, out):
            if ct.bid(0) == 0:
                while ct.atomic_add(flag, 0, 0) == 0:
                    pass
                ct.store(out, (0,), ct.load(out, (1,), (4,)) + 1)
            else:
                ct.store(out, (1,), ct.full((4,), 5.0, ct.float32))
                ct.atomic_xchg(flag, 0, 1)

        out = zeros(8)
        with checking(races=True, order=order):
            interpret(kernel, (2,), (integers(1), out))
        assert out.tolist() == [6.0] * 4 + [5.0] * 4

    def test_flag_by_ordered_load_and_store(self, order):
        @ct.kernel
        def kernel(flag, out):
            device = ct.MemoryScope.DEVICE
            if ct.bid(0) == 0:
                while ct.load(flag, (0,), (1,), memory_order=ct.MemoryOrder.ACQUIRE, memory_scope=device).item() == 0:
                    pass
                ct.store(out, (0,), ct.load(out, (1,), (4,)) + 1)
            else:
                ct.store(out, (1,), ct.full((4,), 5.0, ct.float32))
                ct.store(flag, (0,), 1, memory_order=ct.MemoryOrder.RELEASE, memory_scope=device)

        out = zeros(8)
        with checking(races=True, order=order):
            interpret(kernel, (2,), (integers(1), out))
        assert out.tolist() == [6.0] * 4 + [5.0] * 4

    def test_grid_barriers(self, order):
        @ct.kernel
        def kernel(x, count, blocks):
            b = ct.bid(0)
            for step in range(3):
                neighbour = ct.gather(x, (step, (b + 1) % blocks))
                ct.scatter(x, (step + 1, b), neighbour + 1)
                ct.atomic_add(count, 0, 1)
                while ct.atomic_add(count, 0, 0) < (step + 1) * blocks:
                    pass

        x = zeros(4, 6)
        x[0] = torch.arange(6.0)
        with checking(races=True, order=order):
            interpret(kernel, (6,), (x, integers(1), 6))
        assert torch.equal(x[3], torch.arange(6.0).roll(-3) + 3)

    def test_release_carried_on_by_relaxed_atomics(self, order):
        @ct.kernel
        def kernel(flag, data, out):
            b = ct.bid(0)
            if b == 0:
                ct.scatter(data, 0, 7.0)
                ct.atomic_xchg(flag, 0, 1, memory_order=ct.MemoryOrder.RELEASE)
            elif b == 1:
                while ct.atomic_add(flag, 0, 0, memory_order=ct.MemoryOrder.RELAXED) == 0:
                    pass
                ct.atomic_add(flag, 0, 1, memory_order=ct.MemoryOrder.RELAXED)
            else:
                while ct.atomic_add(flag, 0, 0, memory_order=ct.MemoryOrder.ACQUIRE) < 2:
                    pass
                ct.scatter(out, 0, ct.gather(data, 0))

        out = zeros(1)
        with checking(races=True, order=order):
            interpret(kernel, (3,), (integers(1), zeros(1), out))
        assert out.item() == 7


def test_the_results_are_those_of_the_first_way_through():
    """Tickets depend on the order of turns; the race detector's further ways leave no trace."""

    @ct.kernel
    def kernel(flag, ticket, out):
        b = ct.bid(0)
        if b == 3:
            ct.atomic_xchg(flag, 0, 1, memory_order=ct.MemoryOrder.RELEASE)
        else:
            while ct.atomic_add(flag, 0, 0, memory_order=ct.MemoryOrder.ACQUIRE) == 0:
                pass
        ct.scatter(out, b, ct.atomic_add(ticket, 0, 1))

    def tickets(races: bool) -> list[int]:
        out = integers(4)
        with checking(races=races):
            interpret(kernel, (4,), (integers(1), integers(1), out))
        return out.tolist()

    assert tickets(races=True) == tickets(races=False)


def test_a_buffer_that_its_writer_takes_back_too_early():
    """The reader needs a turn between two of the writer's steps, though the writer never waits."""

    @ct.kernel
    def kernel(flag, pair, out):
        if ct.bid(0) == 0:
            for step in range(4):
                ct.scatter(pair, step % 2, step)
                ct.atomic_xchg(flag, 0, step + 1, memory_order=ct.MemoryOrder.RELEASE)
        else:
            for step in range(4):
                while ct.atomic_add(flag, 0, 0, memory_order=ct.MemoryOrder.ACQUIRE) < step + 1:
                    pass
                ct.scatter(out, step, ct.gather(pair, step % 2))

    def seen(order: int | str) -> bool:
        try:
            with checking(races=True, order=order):
                interpret(kernel, (2,), (integers(1), integers(2), integers(4)))
        except KernelError as error:
            return "race between blocks: " in str(error)
        return False

    assert all(map(seen, ("forward", "reverse", *range(10))))


@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_a_barrier_that_one_block_passes_early(order):
    @ct.kernel
    def kernel(count, x, out, missing: ct.Constant[int]):
        b = ct.bid(0)
        ct.scatter(x, b, 1)
        ct.atomic_add(count, 0, 1)
        while ct.atomic_add(count, 0, 0) < 4 - missing:
            pass
        ct.scatter(out, b, ct.gather(x, (b + 1) % 4))

    with checking(races=True, order=order):
        interpret(kernel, (4,), (integers(1), integers(4), integers(4), 0))
        with pytest.raises(KernelError, match="race between blocks: "):
            interpret(kernel, (4,), (integers(1), integers(4), integers(4), 1))


def test_other_turns_of_a_launch_leave_no_trace(capsys):
    """Its results and what it prints are those of one run."""

    @ct.kernel
    def kernel(total, seen):
        seen_before = ct.atomic_add(total, 0, 1)
        ct.scatter(seen, seen_before, ct.bid(0))
        ct.printf("%i;", ct.bid(0))

    total, seen = torch.full((1,), 2, dtype=torch.int32), integers(5)
    interpret(kernel, (3,), (total, seen), races=True, trace=True)
    assert total.item() == 5
    assert seen.tolist() == [0, 0, 0, 1, 2]
    assert capsys.readouterr().out.count(";") == 3
