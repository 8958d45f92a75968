"""Checks of each access that the interpreter makes on request: races, reads of unwritten memory.

Races are found by happens-before with vector clocks. Every block has a clock, and a vector with
what it knows of the other clocks. A release stores this vector at its address. An acquire of the
address merges the stored vector into the block's own. Two accesses of one element by different
blocks race, unless the first happened before the second, both only read, or both are atomic. For
each element the check remembers the writes and reads that a later access might race with. It
forgets an access that happened before another one that it remembers.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from .allocations import Unwritten
from .arrays import Buffer, Sync, addresses
from .errors import KernelError, Place
from .past import Clock
from .regions import Region, regions

NONE = np.zeros(1, np.int64)  # the number of the empty list
SHORT = 16  # a list of accesses is pruned when it has twice as many as after the last time, and these


class Access(NamedTuple):
    """One access: by `block`, at `time` of its clock, at `line` of the generated code. atomic: it
    cannot race with another atomic access.
    """

    block: int
    time: int
    line: int
    atomic: bool

    def before(self, clock: Clock) -> bool:
        return self.time <= clock.get(self.block, 0)


BLOCK, TIME, LINE, ATOMIC, OTHERS, LENGTH, PLAIN, PRUNE = range(8)


class Chains:
    """All lists of accesses of one launch, by number; 0 is the empty one.

    Elements that the same blocks use share one list. A row of the table holds the last access, the
    number of the list of the others, its length, whether any of them is not atomic, and the length
    at which the list is pruned.
    """

    def __init__(self) -> None:
        self.table = np.zeros((1024, 8), np.int64)
        self.table[0, PRUNE] = SHORT
        self.count = 1

    def of(self, number: int) -> Iterator[Access]:
        while number:
            row = self.table[number].tolist()
            yield Access(row[BLOCK], row[TIME], row[LINE], bool(row[ATOMIC]))
            number = row[OTHERS]

    def extended(self, numbers: np.ndarray, access: Access, clock: Clock) -> np.ndarray:
        """These lists with one more access by the running block. clock: that block's."""
        if len(numbers) == 1:
            return np.array([self._extended(int(numbers[0]), access, clock)])
        rows = self.table[numbers]
        known = np.array([clock.get(block, 0) for block in rows[:, BLOCK].tolist()])
        covered = self._covers(access, rows[:, TIME] <= known, rows[:, ATOMIC])
        same = covered & (rows[:, BLOCK] == access.block)
        others = np.where(same, rows[:, OTHERS], numbers)
        prune = rows[:, PRUNE]
        for i in np.flatnonzero((numbers > 0) & ~same & (covered | (rows[:, LENGTH] + 1 >= prune))):
            others[i], prune[i] = self._pruned(int(numbers[i]), access, clock)
        unchanged = (rows[:, : ATOMIC + 1] == access).all(1) & (numbers > 0)
        return np.where(unchanged, numbers, self._longer(others, access, prune))

    def _extended(self, number: int, access: Access, clock: Clock) -> int:
        """The same for one list."""
        block, time, line, atomic, others, length, _, prune = self.table[number].tolist()
        covered = self._covers(access, time <= clock.get(block, 0), atomic)
        if not number:
            others = 0
        elif (block, time, line, atomic) == access:
            return number
        elif not (covered and block == access.block):
            others = number
            if covered or length + 1 >= prune:
                others, prune = self._pruned(number, access, clock)
        return self._one_longer(others, access, prune)

    def _pruned(self, number: int, access: Access, clock: Clock) -> tuple[int, int]:
        """The list without the accesses that `access` makes unnecessary, and the length at which to
        prune it again.
        """
        kept = [was for was in self.of(number) if not self._covers(access, was.before(clock), was.atomic)]
        limit, shorter = 2 * len(kept) + SHORT, 0
        for was in reversed(kept):
            shorter = self._one_longer(shorter, was, limit)
        return shorter, limit

    @staticmethod
    def _covers(access: Access, before: Any, atomic: Any) -> Any:
        """Whether every future access that races with the access `before` also races with this
        later one.
        """
        return before & (atomic >= access.atomic)

    def _one_longer(self, number: int, access: Access, prune: int) -> int:
        made = self.count
        self._grow(1)
        length, plain = self.table[number, LENGTH], self.table[number, PLAIN] or not access.atomic
        self.table[made] = (*access, number, length + 1, plain, prune)
        return made

    def _grow(self, more: int) -> None:
        self.count += more
        if self.count > len(self.table):
            self.table = np.concatenate([self.table, np.zeros((max(self.count, len(self.table)), 8), np.int64)])

    def _longer(self, numbers: np.ndarray, access: Access, prune: np.ndarray) -> np.ndarray:
        made = np.arange(self.count, self.count + len(numbers))
        self._grow(len(numbers))
        before, rows = self.table[numbers], self.table[made[0] : self.count]
        rows[:, : ATOMIC + 1] = access
        rows[:, OTHERS], rows[:, LENGTH], rows[:, PRUNE] = numbers, before[:, LENGTH] + 1, prune
        rows[:, PLAIN] = before[:, PLAIN] | (not access.atomic)
        return made


class History:
    """For each unit of a region, the numbers of two lists of accesses: writes and reads."""

    def __init__(self, region: Region):
        self.region = region
        self.writes, self.reads = (np.zeros(region.size, np.int32) for _ in range(2))


class Watch:
    """Sees every access of one launch."""

    def __init__(
        self,
        buffers: Iterable[Buffer],
        grid: tuple[int, int, int],
        *,
        races: bool,
        marks: list[Unwritten],
        code: dict[str, Any],
        places: Callable[[int], tuple[Place, ...]],
    ):
        self.grid, self.marks, self.code, self.places = grid, marks, code, places
        self.block = 0
        self.clocks: dict[int, Clock] = {}
        self.released: dict[int, Clock] = {}  # byte address -> what a release there made known
        self.chains = Chains()
        self.histories = [History(region) for region in regions(buffers)] if races else []

    def access(self, buffer: Buffer, offset: np.ndarray, kind: str, sync: Sync = None, known: Sequence[Clock] | None = None) -> None:
        """kind: "read", "write", or "atomic" (both at once). sync: its memory order and scope
        unless weak. known: what it acquires if it acquires; None: all that was released.
        """
        if offset.size == 0:
            return
        for mark in self.marks:
            mark.access(buffer, offset, kind)
        if not self.histories:
            return
        history = next(h for h in self.histories if h.region.start <= buffer.address < h.region.end)
        units = history.region.units(buffer, offset)
        clock = self.clocks.setdefault(self.block, {self.block: 1})
        order = _order(sync)
        if order in ("ACQUIRE", "ACQ_REL"):
            if known is None:
                known = [self.released.get(address, {}) for address in addresses(buffer, offset)]
            for seen in {id(seen): seen for seen in known if seen}.values():
                _join(clock, seen)
        self._compare(history, units, kind, order != "WEAK", clock, buffer, offset)

    def changed(self, buffer: Buffer, offset: np.ndarray, sync: Sync, atomic: bool) -> None:
        """An ordered store or an atomic has changed these elements.

        An atomic that changes nothing releases nothing: no other block can tell that it was there.
        """
        order = _order(sync)
        if not self.histories or order not in ("RELEASE", "ACQ_REL"):
            return
        clock = self.clocks[self.block]
        known = dict(clock)
        if atomic and order == "RELEASE":  # it does not acquire, but carries on the releases before it
            for address in addresses(buffer, offset):
                merged = dict(known)
                _join(merged, self.released.get(address, {}))
                self.released[address] = merged
        else:
            self.released.update(dict.fromkeys(addresses(buffer, offset), known))
        clock[self.block] += 1

    def _compare(self, history: History, units: np.ndarray, kind: str, atomic: bool, clock: Clock, buffer: Buffer, offset: np.ndarray) -> None:
        mine = Access(self.block, clock[self.block], running_line(self.code), atomic)
        writes = history.writes[units]
        self._check(writes, mine, clock, ("write", kind, buffer, offset))
        if kind == "read":
            self._extend(history.reads, units, mine, clock)
            return
        reads = history.reads[units]
        self._check(reads, mine, clock, ("read", kind, buffer, offset))
        if atomic:
            self._extend(history.writes, units, mine, clock, writes)
        else:  # all before happened before this one
            history.writes[units] = self.chains.extended(NONE, mine, clock)[0]
            if reads.any():
                history.reads[units] = 0

    def _check(self, numbers: np.ndarray, mine: Access, clock: Clock, what: tuple[str, str, Buffer, np.ndarray]) -> None:
        for number in _distinct(numbers):
            if not number or (mine.atomic and not self.chains.table[number, PLAIN]):
                continue
            racing = [a for a in self.chains.of(number) if a.block != mine.block and not a.before(clock) and not (mine.atomic and a.atomic)]
            if racing:
                earlier, kind, buffer, offset = what
                at = int(np.flatnonzero(numbers == number)[0])
                element = buffer.index(int(offset.reshape(-1)[at // (numbers.size // offset.size)]))
                self._report(kind, element, buffer, earlier, racing[-1])  # the first that ran

    def _extend(self, lists: np.ndarray, units: np.ndarray, mine: Access, clock: Clock, numbers: np.ndarray | None = None) -> None:
        numbers = lists[units] if numbers is None else numbers
        distinct = np.array(_distinct(numbers))
        changed = self.chains.extended(distinct, mine, clock)
        lists[units] = changed[0] if len(distinct) == 1 else changed[np.searchsorted(distinct, numbers)]

    def _report(self, kind: str, element: tuple[int, ...], buffer: Buffer, was: str, other: Access) -> None:
        file, line, _ = (self.places(other.line) or (("?", 0, ""),))[0]
        raise KernelError(
            f"race between blocks: {kind} of element {element} of {buffer} is not ordered after "
            f"{'an atomic' if other.atomic else 'a'} {was} by block {block_at(other.block, self.grid)} at {file}:{line}"
        )


def block_at(number: int, grid: tuple[int, int, int]) -> tuple[int, ...]:
    """The place of a block in the grid."""
    x, y, _ = grid
    return number % x, number // x % y, number // (x * y)


def running_line(code: dict[str, Any]) -> int:
    """The line that runs now, of the generated code with these globals."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals is not code:
        frame = frame.f_back
    return frame.f_lineno if frame is not None else 0


def _order(sync: Sync) -> str:
    """The memory order, as other blocks see it."""
    return sync[0] if sync is not None and sync[1] != "BLOCK" else "WEAK"


def _distinct(numbers: np.ndarray) -> list[int]:
    """In order."""
    first = int(numbers[0])
    return [first] if (numbers == first).all() else np.unique(numbers).tolist()


def _join(clock: Clock, known: Clock) -> None:
    for block, time in known.items():
        if clock.get(block, 0) < time:
            clock[block] = time
