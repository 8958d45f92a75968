"""How the stream is dealt: tile g of a program is block g mod blocks's; and ranges of keys, by their position alone."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import cuda.tile as ct

from ...launch import Device, next_pow2
from .program import MATRICES, Dims, Kind, Phase


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """rows: of a tile of weights, `hidden` elements each; strips: parts of a piece of it, one a warp; pair: pieces that are read at once.

    span: keys that one block attends to at once, in tiles of tile_kv. Of more keys splits: most ranges, of span keys each before any has more;
    tile_long: keys of a tile there; ahead: such tiles of keys, and of values, that are on their way at once.
    """

    rows: int = 8
    strips: int = 8
    pair: int = 2
    splits: int = 32
    span: int = 192
    tile_kv: int = 32
    tile_long: int = 16
    ahead: int = 4
    num_worker_warps: int | None = 8


@dataclass(frozen=True, slots=True)
class StreamSchedule:
    """Tile g of a program is block g mod `blocks`'s: whatever their number, no block has two tiles more than another."""

    dims: Dims
    blocks: int
    config: StreamConfig

    @property
    def fold(self) -> int:
        """Rows of `hidden` elements in a row of `down`."""
        return self.dims.inter // self.dims.hidden

    @property
    def splits(self) -> int:
        """Ranges of keys of a key head: as many as keep all blocks at work."""
        return max(1, min(self.config.splits, self.blocks // self.dims.kv_heads))

    @property
    def slices(self) -> int:
        """Parts of a key head's result, of two values at least, that are merged apart, each by the block of a range."""
        return 1 << (min(self.splits, self.dims.group * self.dims.head_dim // 2).bit_length() - 1)

    @property
    def tile_best(self) -> int:
        """Blocks' largest logits that are waited for together: a power of two, in two rows no fewer words than threads."""
        return next_pow2(max(self.blocks, 16 * (self.config.num_worker_warps or 1)))

    def tiles(self, kind: Kind) -> int:
        """Of one layer."""
        rows, columns = self.dims.shape(kind)
        return rows * columns // self.dims.hidden // self.config.rows

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(self.tiles(kind) for kind in MATRICES)

    @property
    def size(self) -> int:
        """Tiles of a token."""
        return self.dims.layers * sum(self.counts[:4]) + self.counts[4]

    def tile(self, g: int) -> "Work":
        """Which tile of which matrix comes as the g-th in a whole program."""
        layer, unit = divmod(g, sum(self.counts[:4]))
        if layer >= self.dims.layers:
            return Work(Kind.HEAD, self.dims.layers, g - self.dims.layers * sum(self.counts[:4]))
        kinds, counts = iter(MATRICES), iter(self.counts)
        kind, count = next(kinds), next(counts)
        while unit >= count:
            unit -= count
            kind, count = next(kinds), next(counts)
        return Work(kind, layer, unit)

    def padded(self, kind: Kind) -> int:
        """Rows of the stream in a phase of this kind, if every block had as many tiles as the busiest."""
        return int(ct.cdiv(self.tiles(kind), self.blocks)) * self.blocks * self.config.rows

    def queue(self, block: int, program: list[Phase]) -> Iterator["Work"]:
        """What a block does for a token, in its order: a layer's attention comes before the block's first tile behind it."""
        wanted, attended = set(program), 0
        shares = range(block, self.dims.kv_heads * self.splits, self.blocks)

        def attention(due: int) -> Iterator[Work]:
            layers = (layer for layer in range(attended, due) if Phase(Kind.ATTENTION, layer) in wanted)
            return (Work(Kind.ATTENTION, layer, share) for layer in layers for share in shares)

        for g in range(block, self.size, self.blocks):
            work = self.tile(g)
            due = work.layer + (Kind.QKV < work.kind < Kind.HEAD)
            yield from attention(due)
            attended = due
            if Phase(work.kind, work.layer) in wanted:
                yield work
        yield from attention(self.dims.layers)
        if Phase(Kind.CHOOSE, self.dims.layers) in wanted:
            yield Work(Kind.CHOOSE, self.dims.layers, block)

    def range_of(self, position: int) -> int:
        """The range that a key belongs to."""
        c = self.config
        return position // c.span if position < c.span * self.splits else position // c.tile_long % self.splits

    def ranges(self, position: int) -> int:
        """How many ranges have a key when the new token stands at `position`."""
        return min(self.splits, position // self.config.span + 1)

    def turns(self, kind: Kind, columns: int) -> int:
        """How often a block turns to a phase of this kind, when so many rows are summed at once."""
        rows = self.config.rows // (self.fold if kind is Kind.DOWN else 1)
        return int(ct.cdiv(ct.cdiv(self.tiles(kind), self.blocks), columns // rows))

    def balance(self) -> float:
        """Tiles of all blocks, over those that they could read in the time of the busiest: 1 is perfect."""
        return self.size / (int(ct.cdiv(self.size, self.blocks)) * self.blocks)


class Work(NamedTuple):
    """A tile of a matrix, number `unit` of its layer; or share `unit` of a layer's attention, range unit % splits of key head unit // splits."""

    kind: Kind
    layer: int
    unit: int


def default_stream_config(device: Device) -> StreamConfig:
    if device.is_cpu:
        return StreamConfig(num_worker_warps=None)
    if device.arch in ("sm_120", "sm_121"):  # 99 KiB of shared memory: one buffer of 16 KiB beside what tiles are exchanged through
        return StreamConfig(pair=1, tile_kv=16, span=96)
    return StreamConfig()
