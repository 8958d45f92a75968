"""Which block does what: the rows of every matrix, and the ranges of keys, dealt to any number of blocks."""

from dataclasses import dataclass
from itertools import pairwise

import cuda.tile as ct
import torch
from torch import Tensor

from ...launch import Device
from .program import MATRICES, Dims, Kind

MOST_SPLITS = 64


@dataclass(frozen=True, slots=True)
class Config:
    """tile: elements of a tile of weights, about; depth: tiles that a block has under way. span: fewest keys of a range; tile_kv: keys read at once.

    merged: ranges of keys whose results are read at once.
    """

    tile: int = 8192
    depth: int = 4
    span: int = 64
    tile_kv: int = 32
    merged: int = 4
    num_worker_warps: int | None = 8


def default_config(device: Device) -> Config:
    return Config(tile=1 << 18, depth=1, num_worker_warps=None) if device.is_cpu else Config()


@dataclass(frozen=True, slots=True)
class Schedule:
    """One program on a number of blocks.

    A matrix is dealt in tiles of `rows(kind)` whole rows: each block has neighbouring tiles, and no block one more than another has plus one.
    Attention is dealt in units, `splits` for each query head: unit i is range i % splits of head i // splits.
    """

    dims: Dims
    blocks: int
    config: Config

    @property
    def splits(self) -> int:
        """Ranges of keys of a query head: a power of two."""
        return 1 << (max(1, min(MOST_SPLITS, self.blocks // self.dims.q_heads)).bit_length() - 1)

    def chunks(self, kind: Kind) -> tuple[tuple[int, int], ...]:
        """A row as tiles that pass no edge: powers of two, the largest first, each with its index among tiles so wide. 3072 = 2048 + 1024."""
        columns = self.dims.shape(kind)[1]
        widths = [1 << bit for bit in reversed(range(columns.bit_length())) if columns >> bit & 1]
        return tuple((width, sum(widths[:i]) // width) for i, width in enumerate(widths))

    def rows(self, kind: Kind) -> int:
        """Of a tile: about `tile` elements; none passes an edge or leaves its head, and gate and up come in pairs."""
        rows, columns = self.dims.shape(kind)
        wanted = max(2 if kind is Kind.GATE_UP else 1, self.config.tile // columns)
        return min(1 << (wanted.bit_length() - 1), _power_of_two(self.dims.head_dim if kind is Kind.QKV else rows))

    def units(self, kind: Kind) -> int:
        """What a phase deals to the blocks."""
        if kind is Kind.ATTENTION:
            return self.dims.q_heads * self.splits
        if kind is Kind.CHOOSE:
            return 1
        return self.dims.shape(kind)[0] // self.rows(kind)

    def starts(self, kind: Kind) -> list[int]:
        """blocks + 1 entries: block b has the units from starts[b] to starts[b + 1]."""
        if kind is Kind.CHOOSE:  # block 0, which also keeps the clocks
            return [0] + [1] * self.blocks
        units = self.units(kind)
        return [b * units // self.blocks for b in range(self.blocks + 1)]

    def table(self) -> Tensor:
        """int32 [kinds, blocks + 1]."""
        return torch.tensor([self.starts(kind) for kind in Kind], dtype=torch.int32)

    def keys_per_range(self, position: int) -> int:
        """Keys of each range when the new token stands at `position`: as the kernel computes it."""
        tile = self.config.tile_kv
        each = ct.cdiv(position + 1, self.splits)
        return max(self.config.span, int(ct.cdiv(each, tile)) * tile)

    def balance(self) -> float:
        """Weights that all blocks read, over those that they could if each phase's busiest block set the pace for all: 1 is perfect."""
        size, paced = 0, 0
        for kind in MATRICES:
            rows, columns = self.dims.shape(kind)
            times = 1 if kind is Kind.HEAD else self.dims.layers
            starts = self.starts(kind)
            busiest = max(b - a for a, b in pairwise(starts))
            size += times * rows * columns
            paced += times * busiest * self.rows(kind) * columns * self.blocks
        return size / paced


def _power_of_two(n: int) -> int:
    """The largest that divides n."""
    return n & -n
