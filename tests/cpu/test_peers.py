"""What GPUs exchange by writing into each other's memory, rank by rank in the interpreter."""

from collections.abc import Callable
from typing import Any

import binaries
import pytest
import torch
from sass import sass

from tilewright.compile import ARCHS
from tilewright.compile.job import Job, binary
from tilewright.engine.peers import DTYPES, GATHER, GATHERED_WORDS, SUM, fits, gather_launch, gathered_tiles, sum_launch, words_of
from tilewright.interpret.errors import Deadlock
from tilewright.launch import Bound, Device, Launch, Traced
from tilewright.testing import assert_accurate

CPU = Device.of(torch.zeros(1))
BEFORE = pytest.mark.parametrize("before", [0, 2**31 - 3])


class Ranks:
    """One exchange among ranks, with the memory of all of them here.

    launches: of each rank. names: of what they take. tiles, tile: of a rank's words in a mailbox,
    tile i from block i % blocks.
    """

    def __init__(self, launches: list[Launch], names: tuple[str, ...], tiles: int, before: int) -> None:
        ranks, self.tile = len(launches), launches[0].constants["tile"]
        (blocks,) = launches[0].grid
        self.mails = torch.zeros(ranks, 2, ranks, tiles * self.tile, dtype=torch.int64)
        self.epochs = torch.full((ranks, blocks), before, dtype=torch.int32)
        self.bounds = [Bound([launch], names, CPU) for launch in launches]

    def run(self, epoch: int, sent: list[torch.Tensor], given: list[tuple[Any, ...]]) -> None:
        """A call of each rank. The interpreter runs one rank at a time, so the words of those that
        come after it are put into its mailbox first; they send them again, and the same.

        sent: int32 [rows, words] of each rank.
        """
        slot, ranks = epoch & 1, len(self.bounds)
        padded = [torch.nn.functional.pad(x, (0, -x.shape[1] % self.tile)).flatten() for x in sent]
        for rank in range(ranks):
            self.mails[rank, slot] = 99  # of no call
            for later in range(rank + 1, ranks):
                self.mails[rank, slot, later] = (epoch << 32) | (padded[later].long() & 0xFFFFFFFF)
        before = self.mails.clone()
        for rank, (bound, values) in enumerate(zip(self.bounds, given, strict=True)):
            bound.run(*values, self.mails[rank], self.epochs[rank], tuple(self.mails[other] for other in range(ranks) if other != rank))
        for rank in range(ranks):
            assert torch.equal(self.mails[rank, slot, rank + 1 :], before[rank, slot, rank + 1 :])


def three_epochs(before: int) -> list[int]:
    """Of three calls: both slots, and the first again."""
    return [(before + n) % 2**31 for n in (1, 2, 3)]


@pytest.mark.parametrize(("dtype", "ranks", "shape"), [(torch.bfloat16, 2, (1, 576)), (torch.float16, 3, (2, 130)), (torch.float32, 4, (1, 70))])
@BEFORE
def test_all_ranks_get_the_sum_in_equal_bits(dtype: torch.dtype, ranks: int, shape: tuple[int, int], before: int) -> None:
    ys = [torch.empty(shape, dtype=dtype) for _ in range(ranks)]
    launches = [sum_launch(y, rank, ranks) for rank, y in enumerate(ys)]
    peers = Ranks(launches, SUM, launches[0].grid[0], before)
    for epoch in three_epochs(before):
        for y in ys:
            y.copy_(torch.randn(shape))
        wide, expected = torch.stack(ys).double().sum(0), torch.stack(ys).float().sum(0).to(dtype)
        peers.run(epoch, [words_of(y.view(1, -1)).clone() for y in ys], [(words_of(y.view(-1)),) for y in ys])
        for y in ys:
            assert torch.equal(y, ys[0])
            assert_accurate(y, expected, wide)


@pytest.mark.parametrize(("dtype", "ranks", "shape"), [(torch.bfloat16, 2, (3, 2 * GATHERED_WORDS + 20)), (torch.float32, 4, (1, 70))])
@BEFORE
def test_all_ranks_get_all_rows_side_by_side(dtype: torch.dtype, ranks: int, shape: tuple[int, int], before: int, monkeypatch: Any) -> None:
    monkeypatch.setattr("tilewright.engine.peers.MOST_BLOCKS", 2)  # so that a block takes more than one tile
    parts = [torch.empty(shape, dtype=dtype) for _ in range(ranks)]
    peers = Ranks([gather_launch(part, rank, ranks) for rank, part in enumerate(parts)], GATHER, gathered_tiles(parts[0]), before)
    for epoch in three_epochs(before):
        for part in parts:
            part.copy_(torch.randn(shape))
        wholes = [torch.empty(shape[0], ranks, shape[1], dtype=dtype) for _ in range(ranks)]
        peers.run(epoch, [words_of(part) for part in parts], [(words_of(p), words_of(w)) for p, w in zip(parts, wholes, strict=True)])
        for whole in wholes:
            assert torch.equal(whole, torch.stack(parts, 1))


def test_a_term_of_another_call_is_not_taken() -> None:
    ys = [torch.full((1, 512), 1.0), torch.full((1, 512), 2.0)]
    launches = [sum_launch(y, rank, 2) for rank, y in enumerate(ys)]
    peers = Ranks(launches, SUM, launches[0].grid[0], 0)
    (first, second), (mail, theirs), (epochs, others) = peers.bounds, peers.mails, peers.epochs
    given = words_of(ys[0].view(-1)), mail, epochs, (theirs,)
    for epoch in (-1, 3):
        mail[1, 1] = epoch << 32
        with pytest.raises(Deadlock):
            first.run(*given)
        epochs.zero_()
    mail[1, 1] = (1 << 32) | 0x40000000
    first.run(*given)
    second.run(words_of(ys[1].view(-1)), theirs, others, (mail,))
    assert torch.equal(ys[0], torch.full((1, 512), 3.0))
    assert torch.equal(ys[0], ys[1])


def test_what_they_take() -> None:
    assert all(fits(torch.zeros(2, 64, dtype=dtype), 2) for dtype in DTYPES)
    assert not fits(torch.zeros(1, 3, dtype=torch.bfloat16), 2)  # half a word
    assert not fits(torch.zeros(2, 3, dtype=torch.bfloat16), 2)  # rows that share a word
    assert not fits(torch.zeros(4, 64)[:, :32], 2)
    assert not fits(torch.zeros(1, 64, dtype=torch.float64), 2)
    assert not fits(torch.zeros(1, 64), 9)


Given = tuple[Launch, tuple[Any, ...]]


def boxes(launch: Launch, tiles: int) -> tuple[Any, ...]:
    mail = torch.zeros(2, 2, tiles * launch.constants["tile"], dtype=torch.int64, device="meta")
    return mail, torch.zeros(launch.grid, dtype=torch.int32, device="meta"), (mail,)


def sum_of(y: torch.Tensor) -> Given:
    """The launch of the second of two ranks, and what its kernel takes."""
    launch = sum_launch(y, 1, 2)
    return launch, (words_of(y.view(-1)), *boxes(launch, launch.grid[0]), *launch.constants.values())


def gather_of(y: torch.Tensor) -> Given:
    launch = gather_launch(y, 1, 2)
    whole = words_of(torch.empty(len(y), 2, y.shape[1], dtype=y.dtype, device="meta"))
    return launch, (words_of(y), whole, *boxes(launch, gathered_tiles(y)), *launch.constants.values())


COMPILED = [
    (sum_of, 1, 4096, ARCHS),
    (sum_of, 64, 4096, ("sm_90",)),
    (gather_of, 16, 76032, ARCHS),
]


@pytest.mark.parametrize(("given", "rows", "cols", "archs"), COMPILED)
def test_each_is_one_wave_without_spills(given: Callable[[torch.Tensor], Given], rows: int, cols: int, archs: tuple[str, ...]) -> None:
    launch, values = given(torch.empty(rows, cols, dtype=torch.bfloat16, device="meta"))
    assert launch.grid[0] <= 128
    for arch in archs:
        found = binaries.made(Job.of(Traced(launch, dict(enumerate(values))), arch)).resources
        assert (found.stack_bytes, found.local_bytes) == (0, 0), arch


@pytest.mark.parametrize("given", [sum_of, gather_of])
def test_words_are_sent_before_any_is_waited_for(given: Callable[[torch.Tensor], Given]) -> None:
    """They are of different arrays. Without an order between them, the compiler puts the stores
    behind the loop.
    """
    launch, values = given(torch.empty(1, 4096, dtype=torch.bfloat16, device="meta"))
    cubin = binary(launch.hinted_kernel, values, "sm_90")
    accesses = [access for line in sass(cubin) for access in ("STG.E.128.STRONG.SYS", "LDG.E.128.STRONG.SYS") if access in line]
    assert accesses[0].startswith("STG")
