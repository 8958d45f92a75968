"""Memory as a kernel addresses it: array arguments, pointers into them, views that divide them.

An offset counts elements from the first one of an array argument.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .cutile import array_dtype, array_strides
from .errors import KernelError
from .formats import MEMORY, SMALL, Value
from .numerics import stretched

# The numpy view of a torch tensor whose dtype numpy lacks.
_SHARED = {torch.bfloat16: torch.uint16} | {
    getattr(torch, name): torch.uint8 for name in ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2")
}


class Buffer:
    """The elements of one array argument, from its first to its last, with gaps between rows.

    window: the argument itself as numpy sees its memory.
    copies: whether a load must copy, because the kernel may write to this memory.
    target: whether the kernel may write to this argument.
    """

    __slots__ = ("_flat", "copies", "dtype", "name", "target", "window")

    def __init__(self, argument: Any, name: str, copies: bool = True):
        self.name, self.dtype, self.copies, self.target = name, array_dtype(argument), copies, False
        if isinstance(argument, torch.Tensor):
            if argument.device.type != "cpu":
                raise TypeError(f"{name} must be a CPU tensor, got one on {argument.device}")
            if argument.requires_grad:
                argument = argument.detach()
            shared = _SHARED.get(argument.dtype)
            argument = (argument if shared is None else argument.view(shared)).numpy()
        elif self.dtype in SMALL:
            argument = argument.view(MEMORY[self.dtype])
        self.window: np.ndarray = argument
        self._flat: np.ndarray | None = None

    @property
    def flat(self) -> np.ndarray:
        """The same memory as one row, gaps included."""
        if self._flat is None:
            window = self.window
            last = sum((n - 1) * s for n, s in zip(window.shape, window.strides, strict=True)) // window.itemsize
            self._flat = np.lib.stride_tricks.as_strided(window, (last + 1 if window.size else 0,), (window.itemsize,))
        return self._flat

    @property
    def address(self) -> int:
        return self.window.ctypes.data

    def index(self, offset: int) -> tuple[int, ...]:
        """The index of the element at an offset; if rows overlap, one of several."""
        strides = array_strides(self.window)
        r = [0] * len(strides)
        for axis in sorted(range(len(strides)), key=strides.__getitem__, reverse=True):
            if strides[axis] > 0:
                r[axis], offset = divmod(offset, strides[axis])
        return tuple(r)

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}{list(self.window.shape)}"


class Pointer:
    """A tile (or scalar) of addresses: one buffer, an offset each."""

    __slots__ = ("buffer", "offset")

    def __init__(self, buffer: Buffer, offset: Value):
        self.buffer, self.offset = buffer, offset

    def moved(self, offset: Value) -> "Pointer":
        return Pointer(self.buffer, self.offset + np.asarray(offset).astype(np.int64, copy=False))

    def reshaped(self, shape: tuple[int, ...]) -> "Pointer":
        return Pointer(self.buffer, np.reshape(self.offset, shape))

    def broadcast(self, shape: tuple[int, ...]) -> "Pointer":
        return Pointer(self.buffer, stretched(self.offset, shape))

    @staticmethod
    def where(condition: Value, x: "Pointer", y: "Pointer") -> "Pointer":
        if x.buffer is not y.buffer:
            raise KernelError("a tile of pointers into two different arrays")
        return Pointer(x.buffer, np.where(condition, x.offset, y.offset))


class Array:
    """An array as the kernel sees it: base, shape and strides in elements.

    An argument, or a slice of one.

    window: all of it as a numpy array, or None if it reaches out of its buffer. Only an access to
        those elements is a bug.
    """

    __slots__ = ("buffer", "offset", "shape", "strides", "window")

    def __init__(self, buffer: Buffer, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], window: np.ndarray | None):
        self.buffer, self.offset, self.shape, self.strides, self.window = buffer, offset, shape, strides, window

    @staticmethod
    def argument(buffer: Buffer) -> "Array":
        return Array(buffer, 0, buffer.window.shape, array_strides(buffer.window), buffer.window)

    @staticmethod
    def made(pointer: Pointer, shape: Sequence[Any], strides: Sequence[Any]) -> "Array":
        buffer, offset = pointer.buffer, int(pointer.offset)
        extents, steps = tuple(max(0, int(n)) for n in shape), tuple(map(int, strides))
        if 0 in extents:
            return Array(buffer, offset, extents, steps, np.empty(extents, buffer.window.dtype))
        last = offset + sum((n - 1) * s for n, s in zip(extents, steps, strict=True))
        window = strided(buffer, offset, extents, steps) if offset >= 0 and last < buffer.flat.size else None
        return Array(buffer, offset, extents, steps, window)

    def __str__(self) -> str:
        whole = self.window is self.buffer.window
        return str(self.buffer) if whole else f"part {list(self.shape)} of {self.buffer}"


class TileView:
    """How a tiled view divides an array (static): see `cutile.view_of`."""

    __slots__ = ("inverse", "lengths", "order", "padding", "plain", "shape", "sparse_axis", "steps", "strides")

    def __init__(self, shape: tuple[int, ...], steps: tuple[int, ...], order: tuple[int, ...], sparse_axis: int | None, padding: str):
        self.shape, self.steps, self.order, self.sparse_axis, self.padding = shape, steps, order, sparse_axis, padding
        # Tile axis t lies along array axis order[t]; what follows is by array axis.
        self.inverse = tuple(order.index(axis) for axis in range(len(order)))
        self.lengths = tuple(shape[t] for t in self.inverse)
        self.strides = tuple(steps[t] for t in self.inverse)
        self.plain = self.inverse == tuple(range(len(order)))


View = tuple[Array, TileView]
Sync = tuple[str, str] | None  # memory order and scope, None for a plain (weak) access


def strided(buffer: Buffer, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    flat = buffer.flat
    return np.ndarray(shape, flat.dtype, flat, offset * flat.itemsize, [s * flat.itemsize for s in strides])


def all_offsets(array: Array) -> np.ndarray:
    """The offset of every element of an array, gaps left out."""
    return offsets(array, [0] * len(array.shape), array.shape)


def offsets(array: Array, corner: Sequence[int], shape: Sequence[int]) -> np.ndarray:
    """The offset of every element of a part of an array."""
    r = np.asarray(np.int64(array.offset))
    for axis, (start, n) in enumerate(zip(corner, shape, strict=True)):
        along = (start + np.arange(n)) * array.strides[axis]
        r = r + along.reshape([-1 if a == axis else 1 for a in range(len(shape))])
    return r


def addresses(buffer: Buffer, offset: np.ndarray) -> list[int]:
    """Where elements are in memory, in bytes."""
    found: list[int] = (buffer.address + offset.reshape(-1) * buffer.window.itemsize).tolist()
    return found
