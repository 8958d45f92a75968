"""What the interpreter checks on request: races between blocks, and reads of unwritten memory.

Races are found by happens-before with vector clocks. Every block has a clock. A release stores at
the address what the block knows of all clocks; an acquire of that address joins it. Two accesses of
one element by different blocks race unless the first happened before the second, both only read, or
both are atomic. For each element the check remembers the last write and two reads that nothing
orders.
"""

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from .errors import KernelError, Place
from .memory import Buffer, Sync

Clock = dict[int, int]  # block -> how far its history is known


class Region:
    """A stretch of memory that one or more arguments reach, divided into units of one size.

    start, end: byte addresses.
    """

    def __init__(self, start: int, end: int, unit: int):
        self.start, self.end, self.unit = start, end, unit

    @property
    def size(self) -> int:
        return (self.end - self.start) // self.unit

    def units(self, buffer: Buffer, offset: np.ndarray) -> np.ndarray:
        """The units that elements of a buffer cover."""
        itemsize = buffer.window.itemsize
        first = (buffer.address - self.start + offset.reshape(-1) * itemsize) // self.unit
        wide = -(-itemsize // self.unit)
        return first if wide == 1 else (first[:, None] + np.arange(wide)).reshape(-1)


class Unwritten:
    """The parts of a marked tensor that nobody has written yet."""

    def __init__(self, tensor: Any):
        self.tensor = tensor  # kept alive, so that its address stays its own
        buffer = Buffer(tensor, "")
        size = buffer.flat.size * buffer.window.itemsize
        self.region = Region(buffer.address, buffer.address + size, buffer.window.itemsize)
        self.written = np.zeros(self.region.size, bool)

    def overlaps(self, buffer: Buffer) -> bool:
        start = buffer.address
        return start < self.region.end and self.region.start < start + buffer.flat.size * buffer.window.itemsize

    def access(self, buffer: Buffer, offset: np.ndarray, kind: str) -> None:
        units = self.region.units(buffer, offset)
        inside = (units >= 0) & (units < self.region.size)
        units = units[inside]
        if kind == "write":
            self.written[units] = True
        elif not self.written[units].all():
            first = int(offset.reshape(-1)[np.flatnonzero(inside)[~self.written[units]][0] // (inside.size // offset.size)])
            count = int((~self.written[units]).sum())
            raise KernelError(f"{kind} of uninitialised memory: element {buffer.index(first)} of {buffer} ({count} such elements in this access)")


class Allocations(TorchFunctionMode):
    """Marks what torch.empty and its kin return while the mode is on.

    What PyTorch itself writes later counts as written.
    """

    FRESH = (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty, torch.Tensor.new_empty_strided)

    def __init__(self, unwritten: list[Unwritten]):
        super().__init__()
        self.unwritten = unwritten

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self.FRESH:
            if result.device.type == "cpu" and result.numel():
                self.unwritten.append(Unwritten(result))
            return result
        name = getattr(func, "__name__", "")
        target = (kwargs or {}).get("out")
        if target is None and args and (name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))):
            target = args[0]
        for tensor in target if isinstance(target, (tuple, list)) else (target,):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu":
                whole = Buffer(tensor, "")
                for marked in self.unwritten:
                    marked.access(whole, np.arange(whole.flat.size), "write")
        return result


class Access(NamedTuple):
    """block, time: of its clock; line: of the generated code; atomic: not torn by other atomic
    accesses.
    """

    block: int
    time: int
    line: int
    atomic: bool


class History:
    """For each unit of a region: the access that last wrote it (its number, 0 for none), and two
    later reads that nothing orders.
    """

    def __init__(self, region: Region):
        self.region = region
        self.write, *self.reads = (np.zeros(region.size, np.int32) for _ in range(3))


class Watch:
    """Sees every access of one launch."""

    def __init__(
        self,
        buffers: Iterable[Buffer],
        grid: tuple[int, int, int],
        *,
        races: bool,
        unwritten: list[Unwritten],
        code: dict[str, Any],
        places: Callable[[int], tuple[Place, ...]],
    ):
        self.grid, self.unwritten, self.code, self.places = grid, unwritten, code, places
        self.block = 0
        self.clocks: dict[int, Clock] = {}
        self.released: dict[int, Clock] = {}  # byte address -> what a release there made known
        self.accesses = [Access(0, 0, 0, False)]  # by number; the first stands for none
        self.numbers: dict[Access, int] = {}
        self.histories = [History(region) for region in _regions(buffers)] if races else []

    def access(self, buffer: Buffer, offset: np.ndarray, kind: str, sync: Sync = None) -> None:
        """kind: "read", "write", or "atomic" (both at once); sync: its memory order and scope
        unless weak.
        """
        if offset.size == 0:
            return
        for marked in self.unwritten:
            marked.access(buffer, offset, kind)
        if not self.histories:
            return
        history = next(h for h in self.histories if h.region.start <= buffer.address < h.region.end)
        units = history.region.units(buffer, offset)
        clock = self.clocks.setdefault(self.block, {self.block: 1})
        order = sync[0] if sync is not None and sync[1] != "BLOCK" else "WEAK"
        addresses = (buffer.address + offset.reshape(-1) * buffer.window.itemsize).tolist() if order not in ("WEAK", "RELAXED") else []
        if order in ("ACQUIRE", "ACQ_REL"):
            for known in {id(known): known for a in addresses if (known := self.released.get(a)) is not None}.values():
                _join(clock, known)
        self._compare(history, units, kind, order != "WEAK", clock, buffer, offset)
        if order in ("RELEASE", "ACQ_REL"):
            self._release(addresses, clock, keep=kind == "atomic" and order == "RELEASE")

    def _release(self, addresses: list[int], clock: Clock, keep: bool) -> None:
        known = dict(clock)
        if keep:  # a read-modify-write that does not acquire still carries on the releases before it
            for address in addresses:
                merged = dict(known)
                _join(merged, self.released.get(address, {}))
                self.released[address] = merged
        else:
            self.released.update(dict.fromkeys(addresses, known))
        clock[self.block] += 1

    def _compare(self, history: History, units: np.ndarray, kind: str, atomic: bool, clock: Clock, buffer: Buffer, offset: np.ndarray) -> None:
        mine = self._number(Access(self.block, clock[self.block], self._line(), atomic))
        for was, before in (("write", history.write), *(("read", reads) for reads in history.reads if kind != "read")):
            unordered = [n for n in self._unordered(before[units], clock) if not (atomic and self.accesses[n].atomic)]
            if unordered:
                at = int(np.flatnonzero(np.isin(before[units], unordered))[0])
                element = buffer.index(int(offset.reshape(-1)[at // (units.size // offset.size)]))
                self._report(kind, element, buffer, was, self.accesses[int(before[units[at]])])
        if kind != "read":
            history.write[units] = mine
            return
        first, second = history.reads
        unordered = self._unordered(first[units], clock)
        if not unordered:
            first[units] = mine
            return
        concurrent = np.isin(first[units], unordered)
        first[units[~concurrent]] = mine
        second[units[concurrent]] = mine

    def _number(self, access: Access) -> int:
        number = self.numbers.setdefault(access, len(self.accesses))
        if number == len(self.accesses):
            self.accesses.append(access)
        return number

    def _unordered(self, numbers: np.ndarray, clock: Clock) -> list[int]:
        """The accesses among `numbers` by other blocks that did not happen before now."""
        first = int(numbers[0])
        present = [first] if (numbers == first).all() else np.unique(numbers).tolist()
        return [n for n in present if n and (a := self.accesses[n]).block != self.block and a.time > clock.get(a.block, 0)]

    def _report(self, kind: str, element: tuple[int, ...], buffer: Buffer, was: str, other: Access) -> None:
        file, line, _ = (self.places(other.line) or (("?", 0, ""),))[0]
        raise KernelError(
            f"race between blocks: {kind} of element {element} of {buffer}, with nothing that orders it after "
            f"{'an atomic' if other.atomic else 'a'} {was} by block {self._index(other.block)} at {file}:{line}"
        )

    def _index(self, block: int) -> tuple[int, ...]:
        x, y, _ = self.grid
        return block % x, block // x % y, block // (x * y)

    def _line(self) -> int:
        """The line of generated code that runs now."""
        frame: FrameType | None = sys._getframe(2)
        while frame is not None and frame.f_globals is not self.code:
            frame = frame.f_back
        return frame.f_lineno if frame is not None else 0


def _join(clock: Clock, known: Clock) -> None:
    for block, time in known.items():
        if clock.get(block, 0) < time:
            clock[block] = time


def _regions(buffers: Iterable[Buffer]) -> list[Region]:
    """Disjoint regions that cover the buffers; buffers that overlap share one."""
    regions: list[Region] = []
    for buffer in sorted(buffers, key=lambda b: b.address):
        size, start = buffer.window.itemsize, buffer.address
        end = start + buffer.flat.size * size
        if regions and start < regions[-1].end:
            regions[-1].end = max(regions[-1].end, end)
            regions[-1].unit = min(regions[-1].unit, size)
        else:
            regions.append(Region(start, end, size))
    return regions
