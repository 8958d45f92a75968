"""The ranges of memory that the arguments of a launch cover, in units of one size."""

from collections.abc import Iterable

import numpy as np

from .arrays import Buffer


class Region:
    """A range of memory that one or more arguments cover, divided into units of one size.

    start, end: byte addresses.
    """

    def __init__(self, start: int, end: int, unit: int):
        self.start, self.end, self.unit = start, end, unit

    @staticmethod
    def of(buffer: Buffer) -> "Region":
        size = buffer.window.itemsize
        return Region(buffer.address, buffer.address + buffer.flat.size * size, size)

    @property
    def size(self) -> int:
        return (self.end - self.start) // self.unit

    def units(self, buffer: Buffer, offset: np.ndarray) -> np.ndarray:
        """The units that elements of a buffer cover."""
        itemsize = buffer.window.itemsize
        first = (buffer.address - self.start + offset.reshape(-1) * itemsize) // self.unit
        wide = -(-itemsize // self.unit)
        return first if wide == 1 else (first[:, None] + np.arange(wide)).reshape(-1)


def regions(buffers: Iterable[Buffer]) -> list[Region]:
    """Disjoint regions that cover the buffers; buffers that overlap share one."""
    found: list[Region] = []
    for own in sorted(map(Region.of, buffers), key=lambda region: region.start):
        if found and own.start < found[-1].end:
            found[-1].end = max(found[-1].end, own.end)
            found[-1].unit = min(found[-1].unit, own.unit)
        else:
            found.append(own)
    return found
