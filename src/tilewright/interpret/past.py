"""What a block sees of a flag if it looks late: each value that the flag has had.

Where blocks wait for one another, turns decide what a waiting block sees. A block that looks after
two releases acquires both, even if it would have gone on after the first. That hides a race. So the
race detector runs such a launch again. In this run, a block that only looks at an element sees it
as it was at the earliest time at which the block could have looked: when it last changed memory, or
last looked. If it looks once more, its time moves on to the next change of what it looked at. It
acquires what was released up to its time, and no more.

To look is an ordered load, or an atomic that leaves the element as it was. No other block can
notice it. So a GPU may run the launch in this way too, and a race that shows is one.
"""

from bisect import bisect_right
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np

from .arrays import Buffer, addresses

Clock = dict[int, int]  # block -> how far its history is known

MOST = 64  # elements of an access whose past is kept: flags are few, and sums are not waited for


class Version(NamedTuple):
    """A value of an element. since: the machine's progress when it got there. known: what releases
    up to then had made known.
    """

    since: int
    value: Any
    known: Clock


class Look(NamedTuple):
    """What a block sees of elements. known: what it acquires if it acquires."""

    values: np.ndarray
    known: list[Clock]


class Past:
    """The past of the elements that atomics and ordered stores changed, and the time of each block.

    released: byte address -> what releases there have made known; the race detector's own.
    times: block -> the machine's progress at the time that it has come to.
    looked: block -> a time, and the addresses that it has looked at at this time.
    """

    def __init__(self, released: dict[int, Clock]):
        self.released = released
        self.versions: dict[int, list[Version]] = {}
        self.times: dict[int, int] = {}
        self.looked: dict[int, tuple[int, set[int]]] = {}
        self.block = self.progress = 0

    def enter(self, block: int, progress: int) -> None:
        """A block's turn begins."""
        self.now(progress)
        self.block = block

    def now(self, progress: int) -> None:
        """The running block's time is the present, if it has changed memory since its last."""
        if progress != self.progress:
            self.times[self.block] = self.progress = progress

    def catch_up(self, progress: int) -> None:
        """The running block has seen the present."""
        self.times[self.block] = progress

    def change(self, buffer: Buffer, offset: np.ndarray, before: np.ndarray, progress: int) -> None:
        """Elements have changed, and their release is known. before: their old values."""
        if offset.size > MOST:
            return
        for address, old, new in zip(addresses(buffer, offset), before.reshape(-1), buffer.flat[offset.reshape(-1)], strict=True):
            versions = self.versions.setdefault(address, [Version(0, old, {})])
            if versions[-1].value != old:  # a plain store came between
                versions.clear()
            versions.append(Version(progress, new, self.released.get(address, {})))

    def look(self, buffer: Buffer, offset: np.ndarray, progress: int) -> Look | None:
        """What the running block sees of elements that it only looks at; None: the present."""
        self.now(progress)
        places, values = addresses(buffer, offset), buffer.flat[offset]
        present = values.reshape(-1)
        pasts = [self.versions.get(place, []) for place in places]
        if offset.size > MOST or any(past and past[-1].value != value for past, value in zip(pasts, present, strict=True)):
            self.catch_up(progress)
            return None
        self.times[self.block] = time = self._time(places)
        seen = [
            past[max(0, _count(past, time) - 1)] if past else Version(0, value, self.released.get(place, {}))
            for place, past, value in zip(places, pasts, present, strict=True)
        ]
        return Look(np.array([version.value for version in seen], values.dtype).reshape(values.shape), [version.known for version in seen])

    def _time(self, places: list[int]) -> int:
        """The time at which the running block looks at these addresses."""
        time = self.times.get(self.block, 0)
        since, looked = self.looked.get(self.block, (time, set()))
        if since == time and looked.issuperset(places):
            pasts = [self.versions.get(place, []) for place in looked]
            time = min((past[i].since for past in pasts if (i := _count(past, time)) < len(past)), default=time)
        if since != time:
            looked = set()
        self.looked[self.block] = time, looked.union(places)
        return time


def _count(past: list[Version], time: int) -> int:
    """How many versions there were at a time."""
    return bisect_right(past, time, key=attrgetter("since"))
