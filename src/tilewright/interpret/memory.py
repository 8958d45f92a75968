"""The memory operations of an interpreted launch.

Every access is checked against the argument that its address comes from, through any pointer
arithmetic.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from .arrays import Array, Buffer, Pointer, Sync, TileView, View, offsets, strided
from .errors import KernelError
from .formats import CONTAINER, SMALL, Value, decode, encode, is_float, round_to
from .numerics import LEAST, MOST, padded, stretched
from .past import Clock, Past


class Watcher(Protocol):
    """Is told of every access of one launch. block: the number of the running block."""

    block: int

    def access(self, buffer: Buffer, offset: np.ndarray, kind: str, sync: Sync = None, known: Sequence[Clock] | None = None) -> None:
        """kind: "read", "write", or "atomic" (both at once). known: what an access of the past
        acquires.
        """
        ...

    def changed(self, buffer: Buffer, offset: np.ndarray, sync: Sync, atomic: bool) -> None:
        """An ordered store or an atomic has changed these elements."""
        ...


class Machine:
    """The memory operations of one launch, and the block that is running.

    strict: a tile entirely outside its array is an error, and padding left UNDETERMINED is poison
        (NaN, or an unlikely integer).
    watch: is told of every access; or None.
    past: what blocks see that only look at an element; None: the present.
    strict_bounds: an index outside of an array is an error also where it is checked and reads
        padding.
    progress: counts changes of memory. So the scheduler can tell waiting from working.
    owners: element of a lock -> the block that took it, until it changes it back. acquired: counts
        new owners.
    """

    def __init__(self, grid: tuple[int, int, int], strict: bool = True, watch: Watcher | None = None, *, strict_bounds: bool = False):
        self.grid, self.strict, self.watch, self.strict_bounds = grid, strict, watch, strict_bounds
        self.past: Past | None = None
        self.bid: tuple[int, ...] = (0, 0, 0)
        self.progress = 0
        self.owners: dict[tuple[int, int], tuple[int, ...]] = {}
        self.acquired = 0

    # ---------------------------------------------------------------------------------------- tiles
    def load(self, view: View, index: tuple[Any, ...], inbounds: bool, sync: Sync = None, short: int | None = None) -> Value:
        """`short`: an array axis along which padding is left out (see trim.py)."""
        array, tile = view
        if tile.sparse_axis is not None:
            return self._gather(array, tile, index)
        corner, part = self._inside(array, tile, index, inbounds)
        buffer = array.buffer
        if self.watch is not None:
            offset = offsets(array, corner, part.shape)
            earlier = self.past.look(buffer, offset, self.progress) if sync is not None and self.past is not None else None
            self.watch.access(buffer, offset, "read", sync, earlier and earlier.known)
            part = part if earlier is None else earlier.values
        r, lengths = decode(part, buffer.dtype), tile.lengths
        if short is not None and part.size:
            lengths = (*lengths[:short], part.shape[short], *lengths[short + 1 :])
        if part.shape != lengths:
            r = padded(r, lengths, self._padding(tile, buffer.dtype))
        elif r is part and buffer.copies:
            r = r.copy()
        if not lengths:
            return r[()]
        return r if tile.plain else r.transpose(tile.order)

    def store(self, view: View, index: tuple[Any, ...], value: Value, inbounds: bool, sync: Sync = None) -> None:
        array, tile = view
        self.progress += 1
        if not tile.plain:
            value = value.transpose(tile.inverse)
        if tile.sparse_axis is not None:
            offset, valid = self._sparse(array, tile, index)
            self.store_pointer(Pointer(array.buffer, offset), value, valid)
            return
        corner, part = self._inside(array, tile, index, inbounds)
        if self.watch is not None:
            offset, before = offsets(array, corner, part.shape), part if sync is None else part.copy()
            self.watch.access(array.buffer, offset, "write", sync)
        if part.shape != tile.lengths:
            value = value[tuple([slice(n) for n in part.shape])]
        dtype = array.buffer.dtype
        part[...] = encode(value, dtype) if dtype in SMALL else value
        if self.watch is not None and sync is not None:
            self._publish(array.buffer, offset, before, sync, atomic=False)

    def store_atomic(self, view: View, index: tuple[Any, ...], value: Value, mode: str, sync: Sync) -> None:
        array, tile = view
        if not tile.plain:
            value = value.transpose(tile.inverse)
        if tile.sparse_axis is not None:
            offset, valid = self._sparse(array, tile, index)
        else:
            corner, part = self._inside(array, tile, index, False)
            offset = offsets(array, corner, part.shape)
            value, valid = value[tuple([slice(n) for n in part.shape])], None
        self.atomic(Pointer(array.buffer, offset), value, valid, mode, sync)

    def num_tiles(self, view: View) -> tuple[Any, ...]:
        array, tile = view
        return tuple(np.int32(-(-int(array.shape[axis]) // step)) for axis, step in zip(tile.order, tile.steps, strict=True))

    def _inside(self, array: Array, tile: TileView, index: tuple[Any, ...], inbounds: bool) -> tuple[list[int], np.ndarray]:
        """A tile's first element, by array axis, and the part of it that lies inside the array."""
        corner: list[int] = []
        cut: list[Any] = [...]
        for t, step, n, extent in zip(tile.inverse, tile.strides, tile.lengths, array.shape):  # noqa: B905, the front end has checked the ranks
            start = int(index[t]) * step
            if start < 0 or (start >= extent and self.strict):
                where = tuple(map(int, index))
                raise KernelError(f"tile {where} of shape {tile.shape} lies entirely outside array {array}, which Tile IR leaves undefined")
            corner.append(start)
            cut.insert(-1, slice(start, start + n))
        part = array.window[tuple(cut)] if array.window is not None else self._reaching(array, tile, corner)
        if inbounds and part.shape != tile.lengths:
            raise KernelError(f"check_bounds=False, but tile {tile.shape} at element {corner} reaches out of array {array}")
        return corner, part

    @staticmethod
    def _reaching(array: Array, tile: TileView, corner: list[int]) -> np.ndarray:
        """The same for an array that extends beyond its buffer. Raises if the tile does too."""
        shape = [max(0, min(n, extent - start)) for start, n, extent in zip(corner, tile.lengths, array.shape, strict=True)]
        offset = array.offset + sum(start * stride for start, stride in zip(corner, array.strides, strict=True))
        last = offset + sum((n - 1) * stride for n, stride in zip(shape, array.strides, strict=True))
        if 0 not in shape and not 0 <= offset <= last < array.buffer.flat.size:
            raise KernelError(f"tile of shape {tile.shape} at element offset {offset} reaches out of array {array}")
        return strided(array.buffer, offset if 0 not in shape else 0, tuple(shape), array.strides)

    def _gather(self, array: Array, tile: TileView, index: tuple[Any, ...]) -> Value:
        offset, valid = self._sparse(array, tile, index)
        padding = self._padding(tile, array.buffer.dtype)
        return self.load_pointer(Pointer(array.buffer, offset), valid, CONTAINER[array.buffer.dtype](padding))

    def _sparse(self, array: Array, tile: TileView, index: tuple[Any, ...]) -> tuple[np.ndarray, np.ndarray]:
        if self.strict_bounds and tile.sparse_axis is not None:
            n = array.shape[tile.sparse_axis]
            self.check_index(f"element {{}} along axis {tile.sparse_axis} of {array}, gathered of", (index[tile.sparse_axis],), (n,), None)
        return _sparse_offsets(array, tile, index)

    def _padding(self, tile: TileView, dtype: str) -> Any:
        if tile.padding == "UNDETERMINED":
            return poison(dtype) if self.strict else 0
        return PADDING[tile.padding]

    # ------------------------------------------------------------------------------------- pointers
    def load_pointer(self, pointer: Pointer, mask: Value | None, padding: Value | None) -> Value:
        buffer, offset = pointer.buffer, np.asarray(pointer.offset)
        if mask is None or np.all(mask):
            self._touch(buffer, offset, "read")
            return decode(np.asarray(buffer.flat[offset]), buffer.dtype)[()]
        mask = stretched(mask, offset.shape)
        inside = offset[mask]
        self._touch(buffer, inside, "read")
        r = np.full(offset.shape, 0 if padding is None else padding, CONTAINER[buffer.dtype])
        r[mask] = decode(buffer.flat[inside], buffer.dtype)
        return r[()]

    def store_pointer(self, pointer: Pointer, value: Value, mask: Value | None) -> None:
        buffer, offset = pointer.buffer, np.asarray(pointer.offset)
        self.progress += 1
        value = stretched(encode(value, buffer.dtype), offset.shape)
        if mask is not None and not np.all(mask):
            mask = stretched(mask, offset.shape)
            offset, value = offset[mask], value[mask]
        self._touch(buffer, offset, "write")
        buffer.flat[offset] = value

    def atomic(self, pointer: Pointer, value: Value, mask: Value | None, mode: str, sync: Sync, used: bool = False) -> Value:
        """Read, modify, write.

        Returns the old values, which the kernel may use. Elements at one address follow one
        another.
        """
        dtype, change = pointer.buffer.dtype, ATOMIC[mode]
        value = np.broadcast_to(value, np.shape(np.atleast_1d(pointer.offset)))

        def modified(memory: np.ndarray, at: tuple[np.ndarray, ...]) -> np.ndarray:
            new = change(decode(memory, dtype), value[at])
            return encode(round_to(new, dtype) if dtype in SMALL else new, dtype)

        old, _ = self._modify(pointer, mask, modified, sync, used)
        return decode(old, dtype).reshape(np.shape(pointer.offset))[()]

    def compare_and_swap(self, pointer: Pointer, expected: Value, desired: Value, mask: Value | None, sync: Sync) -> Value:
        dtype, shape = pointer.buffer.dtype, np.shape(np.atleast_1d(pointer.offset))
        expected, desired = (np.broadcast_to(encode(x, dtype), shape) for x in (expected, desired))
        old, mask = self._modify(pointer, mask, lambda memory, at: np.where(memory == expected[at], desired[at], memory), sync, used=True)
        return decode(np.where(mask, old, expected), dtype).reshape(np.shape(pointer.offset))[()]

    def _modify(
        self, pointer: Pointer, mask: Value | None, modified: Callable[..., np.ndarray], sync: Sync, used: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns what memory held, 0 where the mask is off, and the mask.

        modified: the new memory for an old one and its lanes. used: the kernel looks at the result.
        """
        buffer, offset = pointer.buffer, np.atleast_1d(pointer.offset)
        mask = np.broadcast_to(True if mask is None else mask, offset.shape)
        self._require_inside(buffer, offset[mask], "atomic")
        old, changed = np.zeros(offset.shape, buffer.flat.dtype), np.zeros(offset.shape, bool)
        if used and self.past is not None:
            earlier = self.past.look(buffer, offset[mask], self.progress)
            if earlier is not None and (modified(earlier.values, mask.nonzero()) == earlier.values).all():
                self._watch(buffer, offset[mask], "atomic", sync, earlier.known)
                old[mask] = earlier.values
                return old, mask
            if earlier is not None:
                self.past.catch_up(self.progress)
        self._watch(buffer, offset[mask], "atomic", sync)
        for at in _conflict_free(offset, mask):
            old[at] = memory = buffer.flat[offset[at]]
            buffer.flat[offset[at]] = new = modified(memory, at)
            changed[at] = new != memory
            self._note(buffer, offset, bool(changed[at].any()), used)
        self._publish(buffer, offset[changed], old[changed], sync, atomic=True)
        return old, mask

    def _note(self, buffer: Buffer, offset: np.ndarray, changed: bool, used: bool) -> None:
        """Notes a read-modify-write.

        If it is of one element, and the kernel looks at the old value, it may take a lock.
        """
        self.progress += changed
        if changed and offset.size == 1:
            place = id(buffer), int(offset.reshape(-1)[0])
            if self.owners.get(place) == self.bid:
                del self.owners[place]
            elif used:
                self.owners[place] = self.bid
                self.acquired += 1

    def _publish(self, buffer: Buffer, offset: np.ndarray, before: np.ndarray, sync: Sync, atomic: bool) -> None:
        """An ordered store or an atomic has changed these elements, which were `before`."""
        if self.watch is not None and offset.size:
            self.watch.changed(buffer, offset, sync, atomic)
            if self.past is not None:
                self.past.change(buffer, offset, before, self.progress)

    def check_index(self, what: str, index: tuple[Value, ...], extents: tuple[Value, ...], mask: Value | None, note: str = "") -> None:
        """Raises for an index that lies outside. what: "read of element {} of x: float32"."""
        for at, n in zip(index, extents, strict=True):
            if (0 <= at < n) if np.ndim(at) == 0 else not at.size or (LEAST(at, None) >= 0 and MOST(at, None) < n):
                continue
            outside = (at < 0) | (at >= n)
            shape = np.broadcast_shapes(*map(np.shape, index), np.shape(True if mask is None else mask))
            lanes = np.broadcast_to(outside, shape) & (True if mask is None else mask)
            if lanes.any():
                along = np.broadcast_to(at, shape)[lanes]
                worst = int(along.argmin() if (along < 0).any() else along.argmax())
                found = tuple(int(np.broadcast_to(i, shape)[lanes][worst]) for i in index)
                last = tuple(int(n) - 1 for n in extents)
                element, end = (found, last) if len(last) > 1 else (found[0], last[0])
                raise KernelError(f"out of bounds: {what.format(element)}{[n + 1 for n in last]}, whose last element is {end}{note}")

    def item(self, arrays: list[Array], index: Any) -> Array:
        """An element of a list argument."""
        if not 0 <= index < len(arrays):
            raise KernelError(f"list index must be in 0..{len(arrays) - 1}, got {int(index)}")
        return arrays[int(index)]

    def _touch(self, buffer: Buffer, offset: np.ndarray, kind: str) -> None:
        self._require_inside(buffer, offset, kind)
        self._watch(buffer, offset, kind)

    def _watch(self, buffer: Buffer, offset: np.ndarray, kind: str, sync: Sync = None, known: Sequence[Clock] | None = None) -> None:
        if self.watch is not None:
            self.watch.access(buffer, offset, kind, sync, known)

    @staticmethod
    def _require_inside(buffer: Buffer, offset: np.ndarray, kind: str) -> None:
        if offset.size == 0:
            return
        low, high = int(LEAST(offset, None)), int(MOST(offset, None))
        if low < 0 or high >= buffer.flat.size:
            where = low if low < 0 else high
            raise KernelError(f"out of bounds: {kind} of element {where} of {buffer}, whose last element is {buffer.flat.size - 1}")


PADDING = {"ZERO": 0, "NEG_ZERO": -0.0, "NAN": np.nan, "POS_INF": np.inf, "NEG_INF": -np.inf}
ATOMIC: dict[str, Callable[[Value, Value], Value]] = {
    "ADD_INT": np.add,
    "ADD_FLOAT": np.add,
    "BITWISE_AND": np.bitwise_and,
    "BITWISE_OR": np.bitwise_or,
    "BITWISE_XOR": np.bitwise_xor,
    "EXCHANGE": lambda old, value: value,
    "MAX_SIGNED_INT": np.maximum,
    "MAX_UNSIGNED_INT": np.maximum,
    "MIN_SIGNED_INT": np.minimum,
    "MIN_UNSIGNED_INT": np.minimum,
}


def poison(dtype: str) -> Any:
    """The value of UNDETERMINED padding: NaN, or an unlikely integer."""
    if is_float(dtype):
        return np.nan
    return True if dtype == "bool_" else -0x55 if dtype[0] == "i" else 0xAA


def _sparse_offsets(array: Array, tile: TileView, index: tuple[Any, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Offsets of a gathered tile, and which of them lie inside the array."""
    r, valid = np.asarray(np.int64(array.offset)), np.asarray(True)
    for axis, n in enumerate(tile.shape):
        start = np.asarray(index[axis]).astype(np.int64)
        at = np.atleast_1d(start) if axis == tile.sparse_axis else int(start.reshape(-1)[0]) + np.arange(n)
        at = at.reshape([-1 if a == axis else 1 for a in range(len(tile.shape))])
        r = r + at * array.strides[axis]
        valid = valid & (at >= 0) & (at < array.shape[axis])
    return np.broadcast_to(r, tile.shape), np.broadcast_to(valid, tile.shape)


def _conflict_free(offset: np.ndarray, mask: np.ndarray) -> list[tuple[np.ndarray, ...]]:
    """Sets of indices that each use an element at most once, in order of the index."""
    at = np.nonzero(mask)
    chosen = offset[at]
    if chosen.size < 2 or np.unique(chosen).size == chosen.size:
        return [at] if chosen.size else []
    order = np.argsort(chosen, kind="stable")
    ordered = chosen[order]
    first = np.maximum.accumulate(np.where(np.r_[True, ordered[1:] != ordered[:-1]], np.arange(ordered.size), 0))
    rank = np.empty(ordered.size, np.int64)  # how many earlier elements share the address
    rank[order] = np.arange(ordered.size) - first
    return [tuple(axis[rank == r] for axis in at) for r in range(int(rank.max()) + 1)]
