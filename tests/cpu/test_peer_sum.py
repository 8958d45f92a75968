"""The sum over GPUs that write into each other's memory, rank by rank in the interpreter."""

from itertools import cycle, islice
from typing import Any

import pytest
import torch
from sass import sass

from tilewright import compile_report
from tilewright.compile import ARCHS
from tilewright.compile.job import binary
from tilewright.engine.peer_sum import ARGUMENTS, DTYPES, fits, launch_of
from tilewright.interpret.errors import Deadlock
from tilewright.launch import Bound, Device, Launch
from tilewright.testing import assert_accurate

CPU = Device.of(torch.zeros(1))


def arguments(ys: list[torch.Tensor]) -> list[tuple[Bound, tuple[Any, ...]]]:
    """Of each rank: the launch and what it takes."""
    ranks = len(ys)
    launches = [launch_of(y, rank, ranks) for rank, y in enumerate(ys)]
    (blocks,) = launches[0].grid
    mails = torch.zeros(ranks, 2, ranks, blocks * launches[0].constants["tile"], dtype=torch.int64)
    epochs = torch.zeros(ranks, blocks, dtype=torch.int32)
    found = []
    for rank, (y, launch) in enumerate(zip(ys, launches, strict=True)):
        others = tuple(mails[other] for other in range(ranks) if other != rank)
        found.append((Bound([launch], ARGUMENTS, CPU), (y.view(-1).view(torch.int32), mails[rank], epochs[rank], others)))
    return found


@pytest.mark.parametrize(("dtype", "ranks", "shape"), [(torch.bfloat16, 2, (1, 576)), (torch.float16, 3, (2, 130)), (torch.float32, 4, (1, 70))])
@pytest.mark.parametrize("before", [0, 2**31 - 3])
def test_all_ranks_get_the_sum_in_equal_bits(dtype: torch.dtype, ranks: int, shape: tuple[int, int], before: int) -> None:
    """Of three calls: both slots, and the first again. The interpreter runs one rank at a time, so
    the terms of those that come after it are put into its mailbox first; they send them again.
    """
    ys = [torch.empty(shape, dtype=dtype) for _ in range(ranks)]
    calls = arguments(ys)
    for _, (_, _, epochs, *_) in calls:
        epochs.fill_(before)
    for epoch in islice(cycle((before + n) % 2**31 for n in (1, 2, 3)), 3):
        for y in ys:
            y.copy_(torch.randn(shape))
        wide, terms = torch.stack(ys).double().sum(0), [words.clone() for _, (words, *_) in calls]
        expected = torch.stack(ys).float().sum(0).to(dtype)
        for rank, (_, (_, mail, _, _)) in enumerate(calls):
            mail[epoch & 1].copy_(torch.tensor(99))  # of no call
            for later in range(rank + 1, ranks):
                mail[epoch & 1, later] = epoch << 32
                mail[epoch & 1, later, : len(terms[later])] |= terms[later].long() & 0xFFFFFFFF
        sent = [mail.clone() for _, (_, mail, _, _) in calls]
        for bound, values in calls:
            bound.run(*values)
        for rank, y in enumerate(ys):
            assert torch.equal(y, ys[0])
            assert_accurate(y, expected, wide)
            for later in range(rank + 1, ranks):
                assert torch.equal(calls[rank][1][1][epoch & 1, later], sent[rank][epoch & 1, later])


def test_a_term_of_another_call_is_not_taken() -> None:
    (first, mine), (second, theirs) = arguments([torch.full((1, 512), 1.0), torch.full((1, 512), 2.0)])
    _, mail, epochs, _ = mine
    for epoch in (-1, 3):
        mail[1, 1] = epoch << 32
        with pytest.raises(Deadlock):
            first.run(*mine)
        epochs.zero_()
    mail[1, 1] = (1 << 32) | 0x40000000
    first.run(*mine)
    second.run(*theirs)
    assert torch.equal(mine[0], torch.full((512,), 0x40400000, dtype=torch.int32))  # 3.0
    assert torch.equal(mine[0], theirs[0])


def test_what_it_takes() -> None:
    assert all(fits(torch.zeros(2, 64, dtype=dtype), 2) for dtype in DTYPES)
    assert not fits(torch.zeros(1, 3, dtype=torch.bfloat16), 2)  # half a word
    assert not fits(torch.zeros(4, 64)[:, :32], 2)
    assert not fits(torch.zeros(1, 64, dtype=torch.float64), 2)
    assert not fits(torch.zeros(1, 64), 9)


def compiled_as(y: torch.Tensor) -> tuple[Launch, tuple[Any, ...]]:
    """The launch of the second of two ranks, and what its kernel takes."""
    launch = launch_of(y, 1, 2)
    mail = torch.zeros(2, 2, launch.grid[0] * launch.constants["tile"], dtype=torch.int64, device=y.device)
    epochs = torch.zeros(launch.grid, dtype=torch.int32, device=y.device)
    return launch, (y.view(-1).view(torch.int32), mail, epochs, (mail,), *launch.constants.values())


@pytest.mark.parametrize(("rows", "archs"), [(1, ARCHS), (64, ("sm_90",))])
def test_it_is_one_wave_without_spills(rows: int, archs: tuple[str, ...]) -> None:
    launch, values = compiled_as(torch.empty(rows, 4096, dtype=torch.bfloat16, device="meta"))
    assert launch.grid[0] <= 128
    report = compile_report(launch.hinted_kernel, launch.grid, values, arch=archs)
    assert report.ok, str(report)
    assert {one.resources.stack_bytes for one in report.by_arch.values() if one.resources} == {0}


def test_terms_are_sent_before_any_is_waited_for() -> None:
    """They are of different arrays. Without an order between them, the compiler puts the stores
    behind the loop.
    """
    launch, values = compiled_as(torch.empty(1, 4096, dtype=torch.bfloat16, device="meta"))
    cubin = binary(launch.hinted_kernel, values, "sm_90")
    accesses = [access for line in sass(cubin) for access in ("STG.E.128.STRONG.SYS", "LDG.E.128.STRONG.SYS") if access in line]
    assert accesses[0].startswith("STG")
