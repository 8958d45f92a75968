"""What the interpreter watches for on request: races between blocks, and reads of memory that nobody wrote.

Races are found by happens-before, with vector clocks: every block has a clock, a release stores the releasing block's knowledge of all clocks at
the address, an acquire of that address joins it. Two accesses of one element by different blocks, at least one a write and not both atomic, race
unless the first happened before the second. Remembered per element: the last write, and two reads that nothing orders.
"""

import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from .errors import KernelError, Place
from .memory import Buffer, Sync

Clock = dict[int, int]  # block -> how far its history is known
NOBODY = -1


class Region:
    """A stretch of memory that one or more arguments reach, cut into units of one size.

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
    """Marks what torch.empty and its kin return while the mode is on. What PyTorch itself writes afterwards counts as written."""

    FRESH = (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty, torch.Tensor.new_empty_strided)

    def __init__(self, unwritten: list[Unwritten]):
        super().__init__()
        self.unwritten = unwritten

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
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


class History:
    """Who last wrote and read each unit of a region: the block, its clock then, the line, whether the access was atomic."""

    def __init__(self, region: Region):
        self.region = region
        self.write = self._blank(region.size)
        self.reads = (self._blank(region.size), self._blank(region.size))

    @staticmethod
    def _blank(n: int) -> np.ndarray:
        record = np.zeros(n, [("block", np.int32), ("time", np.int32), ("line", np.int32), ("atomic", bool)])
        record["block"] = NOBODY
        return record


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
        self.histories = [History(region) for region in _regions(buffers)] if races else []

    def access(self, buffer: Buffer, offset: np.ndarray, kind: str, sync: Sync = None) -> None:
        """kind: "read", "write", or "atomic" (both at once); sync: its memory order and scope unless weak."""
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
        line = self._line()
        mine = np.array((self.block, clock[self.block], line, atomic), history.write.dtype)
        self._require_order(history.write[units], "write", kind, atomic, clock, buffer, offset)
        if kind == "read":
            first = history.reads[0]
            known = ~self._unordered(first[units], clock)
            first[units[known]] = mine
            history.reads[1][units[~known]] = mine
            return
        for reads in history.reads:
            self._require_order(reads[units], "read", kind, atomic, clock, buffer, offset)
        history.write[units] = mine

    def _require_order(self, before: np.ndarray, was: str, kind: str, atomic: bool, clock: Clock, buffer: Buffer, offset: np.ndarray) -> None:
        bad = self._unordered(before, clock)
        if atomic:
            bad &= ~before["atomic"]
        if not bad.any():
            return
        at = int(np.flatnonzero(bad)[0])
        other = before[at]
        element = buffer.index(int(offset.reshape(-1)[at // (before.size // offset.size)]))
        file, where, _ = (self.places(int(other["line"])) or (("?", 0, ""),))[0]
        earlier = f"an atomic {was}" if other["atomic"] else f"a {was}"
        raise KernelError(
            f"race between blocks: {kind} of element {element} of {buffer}, with nothing that orders it after {earlier} "
            f"by block {self._index(int(other['block']))} at {file}:{where}"
        )

    def _unordered(self, before: np.ndarray, clock: Clock) -> np.ndarray:
        """Where `before` is another block's access that has not happened before now."""
        who = before["block"]
        r = (who != NOBODY) & (who != self.block)
        if r.any():
            blocks, which = np.unique(who[r], return_inverse=True)
            known = np.array([clock.get(int(b), 0) for b in blocks])
            r[r] = before["time"][r] > known[which]
        return r

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
    """Disjoint regions that cover the buffers, those that overlap in memory joined."""
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
