"""What each block of a launch loaded, stored and multiplied: `interpret(..., trace=...)`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np

from .arrays import Buffer, Sync
from .checks import block_at, running_line
from .cutile import array_strides
from .errors import Place
from .live import LiveTile
from .memory import Watcher
from .past import Clock
from .program import Program
from .trace_page import SECTOR, page

MOST_STEPS = 20_000  # of a launch that are kept; later ones are counted
KIND = {"read": "load", "write": "store", "atomic": "atomic"}


@dataclass(frozen=True, slots=True)
class Shown:
    """An array of the launch. The page draws it with its leading axes folded into rows."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    itemsize: int

    @property
    def rows(self) -> int:
        return prod(self.shape[:-1])

    @property
    def columns(self) -> int:
        return self.shape[-1] if self.shape else 1


@dataclass(frozen=True, slots=True)
class Step:
    """One load, store, atomic or product of one block.

    array: the parameter's name; "" for a product.
    elements: for an access, the elements that it touched, as numbers row by row, ascending.
    sectors: how many pieces of 32 bytes hold them.
    product: (m, n, k) of a product. dtypes: of its operands and its accumulator.
    line: of the running code, a key of `Trace.live`. place: file, line and function.
    """

    block: tuple[int, ...]
    kind: str
    line: int
    place: Place
    array: str = ""
    elements: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    sectors: int = 0
    product: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()


@dataclass(slots=True)
class Trace:
    """A launch, step by step. `print` shows the totals; `save` draws it.

    left_out: how many steps came after the first MOST_STEPS.
    live: line of the running code -> the tiles that hold values there.
    """

    kernel: str
    grid: tuple[int, int, int] = (0, 0, 0)
    arrays: list[Shown] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    live: dict[int, tuple[LiveTile, ...]] = field(default_factory=dict)
    left_out: int = 0

    def of(self, kind: str, array: str = "") -> list[Step]:
        """All steps of one kind ("load", "store", "atomic", "mma"), of one array or of all."""
        return [step for step in self.steps if step.kind == kind and array in ("", step.array)]

    def flops(self) -> int:
        return sum(2 * prod(step.product) for step in self.of("mma"))

    def live_bytes(self) -> int:
        """The most bytes of live tiles at once, in one block."""
        return max((sum(tile.size_bytes for tile in tiles) for tiles in self.live.values()), default=0)

    def __str__(self) -> str:
        blocks = "x".join(map(str, self.grid))
        lines = [f"{self.kernel}: {blocks} blocks, {len(self.steps) + self.left_out} steps"]
        for array in self.arrays:
            for kind in ("load", "store", "atomic"):
                steps = self.of(kind, array.name)
                if steps:
                    count, distinct = sum(s.elements.size for s in steps), np.unique(np.concatenate([s.elements for s in steps])).size
                    moved, sectors = count * array.itemsize, sum(s.sectors for s in steps)
                    lines.append(
                        f"  {kind} {array.name}: {array.dtype}{list(array.shape)}: {len(steps)} times, {count} elements, {distinct} of them "
                        f"different; {sectors} sectors, {100 * moved / (sectors * SECTOR):.0f} % of their bytes used"
                    )
        products = self.of("mma")
        for shape in dict.fromkeys((s.product, s.dtypes) for s in products):
            times = sum((s.product, s.dtypes) == shape for s in products)
            lines.append(f"  mma {'x'.join(map(str, shape[0]))} (m, n, k), {' '.join(shape[1])}: {times} times")
        if products:
            lines.append(f"  {self.flops()} flops in products")
        lines.append(f"  live tiles: at most {self.live_bytes()} bytes of a block")
        if self.left_out:
            lines.append(f"  the sums hold the first {len(self.steps)} steps; {self.left_out} are left out")
        return "\n".join(lines)

    def html(self) -> str:
        """One page that needs no other file."""
        return page(self)

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.html(), encoding="utf-8")


class Recorder:
    """Records the accesses of a launch in a `Trace`, and passes them on to the checks."""

    def __init__(self, trace: Trace, program: Program, grid: tuple[int, int, int], buffers: list[Buffer], inner: Watcher | None):
        self.trace, self.program, self.grid, self.inner = trace, program, grid, inner
        self._block = 0
        trace.grid = grid
        trace.live = dict(program.live)
        trace.arrays = [Shown(b.name, b.dtype, tuple(b.window.shape), b.window.itemsize) for b in buffers]

    @property
    def block(self) -> int:
        return self._block

    @block.setter
    def block(self, number: int) -> None:
        self._block = number
        if self.inner is not None:
            self.inner.block = number

    def access(self, buffer: Buffer, offset: np.ndarray, kind: str, sync: Sync = None, known: Sequence[Clock] | None = None) -> None:
        if offset.size and self._room():
            size = buffer.window.itemsize
            bytes_at = buffer.address % SECTOR + offset.reshape(-1) * size
            self._add(KIND[kind], array=buffer.name, elements=self._elements(buffer, offset.reshape(-1)), sectors=np.unique(bytes_at // SECTOR).size)
        if self.inner is not None:
            self.inner.access(buffer, offset, kind, sync, known)

    def changed(self, buffer: Buffer, offset: np.ndarray, sync: Sync, atomic: bool) -> None:
        if self.inner is not None:
            self.inner.changed(buffer, offset, sync, atomic)

    def product(self, x: tuple[int, ...], y: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
        if self._room():
            self._add("mma", product=(prod(x[:-1]), y[-1], x[-1]), dtypes=dtypes)

    def _room(self) -> bool:
        room = len(self.trace.steps) < MOST_STEPS
        self.trace.left_out += not room
        return room

    def _add(self, kind: str, **fields: object) -> None:
        line = running_line(self.program.code)
        places = self.program.places(line)
        place = places[0] if places else ("?", 0, "")
        self.trace.steps.append(Step(block_at(self._block, self.grid), kind, line, place, **fields))  # type: ignore[arg-type]

    def _elements(self, buffer: Buffer, offset: np.ndarray) -> np.ndarray:
        """Offsets in memory as numbers of elements, row by row."""
        shape, strides = buffer.window.shape, array_strides(buffer.window)
        rest, found = offset, np.zeros(offset.shape, np.int64)
        below = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
        for axis in sorted(range(len(shape)), key=strides.__getitem__, reverse=True):
            if strides[axis] > 0:
                index, rest = np.divmod(rest, strides[axis])
                found += index * below[axis]
        return np.sort(found)
