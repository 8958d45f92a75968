"""Which block runs next, where blocks may wait for one another.

A block gives up its turn when it may have taken a lock: when an atomic changes one element and the
kernel looks at the old value. The other blocks run until each has done the same, waits or has
ended. So if two blocks take two locks in opposite orders, each gets its first lock and the deadlock
shows. This costs turns in which blocks only wait. After EXPLORED waiting points in such turns,
blocks keep their turns. A block stands back for STANDS waiting points at most: others may count how
often they look for what it took.
"""

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np

from .arrays import Array, Pointer
from .errors import Deadlock
from .memory import Machine
from .program import Program

TURN = 64  # waiting points a block may pass before the next block's turn
SHORT_TURN = 8  # the same while a block that may have taken a lock stands back
EXPLORED = 4_000  # waiting points without a change of memory, before blocks keep their turn
STANDS = 500  # waiting points of others, while blocks stand back that may have taken a lock
PATIENCE = 30_000  # waiting points per block, with no change of memory in between, before the launch counts as deadlocked
STEPS = 50_000  # waiting points that a block may pass in turns in which it changes memory; see `checking`
WAKES = 0.5  # of the turns that change memory, with a seed, after which blocks that wait look again
NAMED = 4  # blocks that the message of a deadlock names

Order = str | int


def blocks(grid: tuple[int, int, int], order: Order) -> Iterator[tuple[int, int, int]]:
    x, y, z = grid
    if order == "forward":
        return ((i, j, k) for k in range(z) for j in range(y) for i in range(x))
    found = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
    if order == "reverse":
        found.reverse()
    else:
        random.Random(order).shuffle(found)
    return iter(found)


@dataclass(slots=True, eq=False)
class Block:
    """A block that has not ended.

    steps: waiting points passed in turns in which it changed memory.
    stuck: the launch's progress when the block was seen to repeat itself; -1 if it was not.
    """

    bid: tuple[int, int, int]
    run: Any
    steps: int = 0
    stuck: int = -1

    @property
    def frame(self) -> FrameType:
        frame: FrameType = self.run.gi_frame
        return frame


class Schedule:
    """The blocks of a launch that take turns at waiting points.

    ready: in turn. later: those that took a lock, waiting: those whose turn changed nothing; they
        become ready when no other block is.
    """

    def __init__(self, program: Program, machine: Machine, values: list[Any], order: Order, steps: int):
        self.program, self.machine, self.most_steps = program, machine, steps
        self.dice = random.Random(order) if isinstance(order, int) else None
        self.ready = deque(Block(bid, program.function(machine, *values)) for bid in blocks(machine.grid, order))
        self.later: list[Block] = []
        self.waiting: list[Block] = []
        self.waited = self.explored = self.stood = 0

    def run(self, enter: Any) -> None:
        """Runs all blocks to their end. enter(machine, bid): called before each turn."""
        while self._refilled():
            if self.later and (self.explored >= EXPLORED or self.stood >= STANDS):
                self.ready.extendleft(self.later)
                self.later, self.stood = [], 0
            block = self.ready.popleft()
            enter(self.machine, block.bid)
            progress, acquired = self.machine.progress, self.machine.acquired
            passed, ended = self._turn(block)
            self.stood += passed if self.later else 0
            if self.machine.progress != progress:
                self.waited, block.steps = 0, block.steps + passed
                self._wake()
            elif not ended:
                self.waited, self.explored = self.waited + passed, self.explored + passed
            if ended:
                self.waited = 0
                continue
            if self.machine.acquired != acquired:
                self.later.append(block)
            elif self.machine.progress == progress:
                if not self.later:
                    self._look(block)
                self.waiting.append(block)
            else:
                self.ready.append(block)
            if block.steps > self.most_steps:
                self._raise(
                    [block],
                    f"endless loop: block {block.bid} passed {block.steps} waiting points, changing memory; checking(steps=...) allows more",
                )

    def _wake(self) -> None:
        """After a change of memory, blocks that wait look at it, if the dice say so."""
        if self.waiting and not self.later and self.dice is not None and self.dice.random() < WAKES:
            self.ready.extend(self.waiting)
            self.waiting = []

    def _refilled(self) -> bool:
        if self.ready:
            return True
        again = [*reversed(self.later), *self.waiting]  # who took a lock last goes on first
        self.later, self.waiting, self.stood = [], [], 0
        if not again:
            return False
        if self.waited > PATIENCE * (len(again) + 1) or all(block.stuck == self.machine.progress for block in again):
            who = f"{len(again)} blocks wait, and none has" if len(again) > 1 else "the only block left loops, and has not"
            self._raise(again, f"deadlock: {who} changed memory for {self.waited} rounds")
        if self.dice is not None:
            self.dice.shuffle(again)
        self.ready.extend(again)
        return True

    def _turn(self, block: Block) -> tuple[int, bool]:
        """Runs a block for one turn. Returns how many waiting points it passed, and whether it has
        ended.
        """
        turn = SHORT_TURN if self.later else TURN
        if self.dice is not None:  # short turns as often as long ones: some races need one, some the other
            turn = 1 << self.dice.randrange(turn.bit_length())
        acquired = self.machine.acquired
        for passed in range(1, turn + 1):
            try:
                next(block.run)
            except StopIteration:
                return passed, True
            if self.machine.acquired != acquired and self.explored < EXPLORED:
                return passed, False
        return turn, False

    def _look(self, block: Block) -> None:
        """Notes whether a block repeats itself: whether it is at the same place with the same
        variables.

        Only another block can end that, by changing memory.
        """
        progress, line, before = self.machine.progress, block.frame.f_lineno, dict(block.frame.f_locals)
        for _ in range(TURN):
            try:
                next(block.run)
            except StopIteration:
                return  # the next turn finds that it has ended
            if self.machine.progress != progress:
                return
            if block.frame.f_lineno == line:
                now = block.frame.f_locals
                if len(now) == len(before) and all(_same(value, now.get(name)) for name, value in before.items()):
                    block.stuck = progress
                return

    def _raise(self, stuck: list[Block], what: str) -> None:
        """Raises the error at the place of the first of these blocks. Its text also names the next
        blocks.
        """
        lines = [self.program.places(block.frame.f_lineno) for block in stuck[:NAMED]]
        if len(stuck) > 1:
            found = [f"block {block.bid} at {places[0][0]}:{places[0][1]}" for block, places in zip(stuck, lines, strict=False) if places]
            what = f"{what}: {', '.join(found)}{' ...' if len(stuck) > NAMED else ''}"
        error = Deadlock(what)
        error.place(self.program.name, lines[0], stuck[0].bid, self.machine.grid)
        raise error


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (np.ndarray, np.generic)):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, Pointer):
        return a.buffer is b.buffer and _same(np.asarray(a.offset), np.asarray(b.offset))
    if isinstance(a, Array):
        return a.buffer is b.buffer and (a.offset, a.shape, a.strides) == (b.offset, b.shape, b.strides)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b) if isinstance(a, (int, float, str)) else False
