"""Which block does what: the rows of every matrix, and the ranges of keys, dealt to any number of blocks."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ...launch import Device, next_pow2
from .program import MATRICES, Dims, Kind

MOST_SPLITS = 64


@dataclass(frozen=True, slots=True)
class Config:
    """tile: most elements of a tile of weights, which holds whole rows. span: fewest keys of a range; tile_kv: keys read at once.

    merged: ranges of keys whose results are read at once. latency: compiler hint of loads of weights.
    """

    tile: int = 16384
    span: int = 64
    tile_kv: int = 64
    merged: int = 4
    latency: int = 10
    num_worker_warps: int | None = 8


def default_config(device: Device) -> Config:
    return Config(tile=1 << 16, num_worker_warps=None) if device.is_cpu else Config()


@dataclass(frozen=True, slots=True)
class Schedule:
    """One program on a number of blocks.

    A matrix is dealt in tiles of `rows(kind)` whole rows: each block has neighbouring tiles, and no block one more than another has plus one.
    Attention is dealt in units, `splits` for each key head: unit i is range i % splits of key head i // splits.
    """

    dims: Dims
    blocks: int
    config: Config

    @property
    def splits(self) -> int:
        return max(1, min(MOST_SPLITS, self.blocks // self.dims.kv_heads))

    def columns(self, kind: Kind) -> int:
        """Of a tile: all of a row, to the next power of two."""
        return next_pow2(self.dims.shape(kind)[1])

    def rows(self, kind: Kind) -> int:
        """Of a tile. Rows of `qkv` do not leave their head; those of gate and up come in pairs."""
        rows = max(2 if kind is Kind.GATE_UP else 1, self.config.tile // self.columns(kind))
        if kind is Kind.QKV:
            rows = min(rows, self.dims.head_dim)
        return min(rows, next_pow2(self.dims.shape(kind)[0]))

    def units(self, kind: Kind) -> int:
        """What a phase deals to the blocks."""
        if kind is Kind.ATTENTION:
            return self.dims.kv_heads * self.splits
        if kind is Kind.CHOOSE:
            return 1
        return -(-self.dims.shape(kind)[0] // self.rows(kind))

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
        return max(self.config.span, -(-(-(-(position + 1) // self.splits)) // tile) * tile)

    def balance(self) -> float:
        """Weights that all blocks read, over those that they could if each phase's busiest block set the pace for all: 1 is perfect."""
        size, paced = 0, 0
        for kind in MATRICES:
            rows, columns = self.dims.shape(kind)
            times = 1 if kind is Kind.HEAD else self.dims.layers
            starts = self.starts(kind)
            busiest = max(b - a for a, b in zip(starts, starts[1:], strict=False))
            size += times * rows * columns
            paced += times * busiest * self.rows(kind) * columns * self.blocks
        return size / paced
