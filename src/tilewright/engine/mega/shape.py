"""How a model's matrices are cut into tiles of one form, and dealt to blocks: from sizes alone.

A tile is `rows` x `strips` x `line` words of 32 bits, a strip for a warp. Three products:

- wide (qkv, gate and up, head): a row of the matrix is `sets` x strips x `width` words, and all
  warps add to it; times the residual stream, normed.
- out: a row is `width` words, of one warp: the outputs that a block has of a query head, times what
  the head attended to.
- down: a row is `sets` x `width` words, of one warp: all outputs, times the block's own inner
  columns.

A line holds `fields` = line / width rows. `sets` tiles after one another are a group: of the same
rows, times other parts of x.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from ...launch import Device


@dataclass(frozen=True, slots=True)
class Dims:
    """Sizes of a model. inter: width of the MLP."""

    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    inter: int
    vocab: int
    head_norms: bool = False

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.q_heads // self.kv_heads


@dataclass(frozen=True, slots=True)
class Config:
    """strips: warps' parts of a tile, of `line` words each. parts: in which `down` is added, so
    that all but the last are hidden.

    span: keys that are attended to at once; keys up to `short` are attended to by all blocks of a
        head, more are split between them.
    """

    strips: int = 8
    line: int = 128
    parts: int = 4
    span: int = 64
    short: int = 256
    latency: int = 10
    num_worker_warps: int | None = 8


ROWS = 8  # of a tile
NARROWEST, MOST_SETS = 16, 4  # words of a row of `down` in a line, and sets, where fewer are to be had: they lie in registers


class Kind(enum.IntEnum):
    """What a work item does; its number is what the kernel branches on."""

    QKV = 0
    OUT = 1
    GATE_UP = 2
    DOWN = 3
    HEAD = 4


class Work(NamedTuple):
    """A block's part of a product, of a layer (of the head: behind the last)."""

    kind: Kind
    layer: int


class Form(NamedTuple):
    """Words of a row that lie in one line, and how many lines a row is."""

    width: int
    sets: int


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def best_form(words: int, widths: tuple[int, ...]) -> Form:
    """With the fewest words in all, then the fewest sets."""
    forms = [Form(width, cdiv(words, width)) for width in widths]
    return min(forms, key=lambda form: (form.width * form.sets, form.sets))


@dataclass(frozen=True, slots=True)
class Schedule:
    """What each block has. Of `blocks` all have a part of each product but `out`, which q_heads *
    out_parts have.
    """

    dims: Dims
    blocks: int
    config: Config
    wide: Form = field(init=False)
    out: Form = field(init=False)
    down: Form = field(init=False)

    def __post_init__(self) -> None:
        c, d = self.config, self.dims
        widths = tuple(w for w in (128, 64, 32, 16, 8, 4) if w <= c.line)
        lanes = c.line // 4
        object.__setattr__(self, "wide", best_form(cdiv(d.hidden // 2, c.strips), tuple(w for w in widths if w >= 16)))
        object.__setattr__(self, "out", Form(d.head_dim // 2, 1))
        full, last = divmod(self.active_words, lanes)
        forms = [Form(w, full * (lanes // w) + cdiv(last, w)) for w in widths if min(NARROWEST, lanes) <= w <= lanes]
        few = [form for form in forms if form.sets <= MOST_SETS] or forms[:1]
        object.__setattr__(self, "down", min(few, key=lambda form: (form.width * form.sets, form.sets)))

    @property
    def lanes(self) -> int:
        """Values of a warp that threads keep for one row of a tile, each of 4 words."""
        return self.config.line // 4

    @property
    def hidden_words(self) -> int:
        """Of the residual stream, with zeros behind its end where `hidden` does not fill a row."""
        return self.wide.sets * self.config.strips * self.wide.width

    def fields(self, form: Form) -> int:
        return self.config.line // form.width

    @property
    def slots(self) -> int:
        """Groups whose sums a turn of a wide product can keep."""
        return self.wide.width // 4

    @property
    def wide_rows(self) -> int:
        """Rows of a wide group."""
        return ROWS * self.fields(self.wide)

    def narrow_words(self, form: Form) -> int:
        """Words of 2 outputs of a group of `out` or `down`."""
        return ROWS // 2 * self.config.strips * self.fields(form)

    @property
    def qkv_rows(self) -> int:
        return (self.dims.q_heads + 2 * self.dims.kv_heads) * self.dims.head_dim

    @property
    def qkv_groups(self) -> int:
        return cdiv(self.qkv_rows, self.wide_rows)

    @property
    def head_groups(self) -> int:
        return cdiv(self.dims.vocab, self.wide_rows)

    @property
    def gate_up_groups(self) -> int:
        """Of each block: ROWS / 2 inner columns for each field."""
        return cdiv(cdiv(self.dims.inter, self.blocks), self.wide_rows // 2)

    @property
    def active_words(self) -> int:
        """Of inner columns that a block has, in pairs."""
        return self.gate_up_groups * self.wide_rows // 4

    @property
    def out_parts(self) -> int:
        """Blocks of a query head."""
        return max(1, self.blocks // self.dims.q_heads)

    @property
    def out_words(self) -> int:
        """Outputs of a block of `out`, in pairs."""
        return cdiv(self.hidden_words, self.out_parts)

    @property
    def out_groups(self) -> int:
        return cdiv(self.out_words, self.narrow_words(self.out))

    @property
    def down_groups(self) -> int:
        return cdiv(self.hidden_words, self.narrow_words(self.down))

    @property
    def down_part(self) -> int:
        """Groups of a part of `down`."""
        return min(max(self.down.width // 4, 1), cdiv(self.down_groups, self.config.parts))

    @property
    def turns(self) -> tuple[int, int, int, int, int]:
        """Of qkv, out, gate_up and down in a layer, and of the head."""
        return (
            cdiv(cdiv(self.qkv_groups, self.blocks), self.slots // 4),
            cdiv(self.out_groups, self.out.width // 4),
            cdiv(self.gate_up_groups, self.slots // 2),
            cdiv(self.down_groups, self.down_part),
            cdiv(cdiv(self.head_groups, self.blocks), self.slots),
        )

    @property
    def tiles(self) -> tuple[int, int, int, int, int]:
        """Of all blocks: in a layer qkv, out, gate_up and down; and the head."""
        return (
            self.qkv_groups * self.wide.sets,
            self.dims.q_heads * self.out_parts * self.out_groups,
            self.blocks * self.gate_up_groups * self.wide.sets,
            self.blocks * self.down_groups * self.down.sets,
            self.head_groups * self.wide.sets,
        )

    @property
    def size(self) -> int:
        """Tiles of a token."""
        return self.dims.layers * sum(self.tiles[:4]) + self.tiles[4]

    def queue(self) -> Iterator[Work]:
        """What each block does for a token, in its order."""
        for layer in range(self.dims.layers):
            yield from (Work(kind, layer) for kind in Kind if kind is not Kind.HEAD)
        yield Work(Kind.HEAD, self.dims.layers)

    def share(self, block: int, groups: int) -> range:
        """The groups that a block has of a product whose groups are dealt to all."""
        return range(block * groups // self.blocks, (block + 1) * groups // self.blocks)

    def rows(self, block: int, groups: int, rows: int) -> range:
        """As `share`, of rows."""
        share = self.share(block, groups)
        return range(min(share.start * self.wide_rows, rows), min(share.stop * self.wide_rows, rows))

    def inner(self, block: int) -> range:
        """The inner columns of a block."""
        each, inter = self.gate_up_groups * self.wide_rows // 2, self.dims.inter
        return range(min(block * each, inter), min((block + 1) * each, inter))

    def outputs(self, block: int) -> tuple[int, range] | None:
        """The query head of a block and its outputs of it; None for a block without."""
        head, part = divmod(block, self.out_parts)
        if head >= self.dims.q_heads:
            return None
        ends = (min(p * 2 * self.out_words, self.dims.hidden) for p in (part, part + 1))
        return head, range(*ends)

    def owned(self, block: int) -> range:
        """The words of a sum that a block clears."""
        each = cdiv(self.hidden_words + 1, self.blocks)
        return range(min(block * each, self.hidden_words), min((block + 1) * each, self.hidden_words))

    def splits(self, position: int) -> bool:
        """Whether the blocks of a query head split its keys."""
        return self.out_parts > 1 and position >= self.config.short

    def tiles_of_keys(self, block: int, position: int) -> range:
        """The tiles of cached keys that a block attends to."""
        tiles, part = cdiv(position, self.config.span), block % self.out_parts
        return range(part, tiles, self.out_parts) if self.splits(position) else range(tiles)

    def busiest(self) -> int:
        """Tiles of the block with most, layer by layer."""
        per = [cdiv(tiles, self.blocks) for tiles in (self.qkv_groups, self.head_groups)]
        layer = per[0] * self.wide.sets + self.out_groups + self.tiles[2] // self.blocks + self.tiles[3] // self.blocks
        return self.dims.layers * layer + per[1] * self.wide.sets

    def balance(self) -> float:
        """Tiles that the model needs, over those that all blocks could read in the time of the
        busiest: 1 is perfect.
        """
        return self.needed() / (self.busiest() * self.blocks)

    def needed(self) -> float:
        """Tiles that the model's matrices fill."""
        d = self.dims
        layer = (self.qkv_rows + d.q_heads * d.head_dim + 3 * d.inter) * d.hidden
        return (d.layers * layer + d.vocab * d.hidden) / 2 / (ROWS * self.config.strips * self.config.line)


def default_config(device: Device, head_dim: int = 64) -> Config:
    return Config(span=64 if head_dim <= 64 else 32, num_worker_warps=None if device.is_cpu else 8)


def default_blocks(dims: Dims, device: Device, config: Config) -> int:
    """The fewest blocks, of the last quarter of those resident, whose busiest has at most 3 % more
    to do than with the best number: so many already take all of the memory's rate (an H200: 128 of
    132).
    """
    sms = max(device.sms, dims.q_heads) if device.is_cpu else device.sms
    tiles = {blocks: Schedule(dims, blocks, config).busiest() for blocks in range(min(max(dims.q_heads, 3 * sms // 4), sms), sms + 1)}
    return next(blocks for blocks, most in tiles.items() if most <= 1.03 * min(tiles.values()))


def why_not(dims: Dims, blocks: int, config: Config) -> str:
    """What keeps a model from these tiles, or "" if nothing does."""
    c, d = config, dims
    if d.hidden % 2 or d.inter % 2:
        return "hidden and inter must be even"
    if d.q_heads % d.kv_heads:
        return "key heads must divide query heads"
    if d.head_dim & (d.head_dim - 1) or not 16 <= d.head_dim <= 2 * c.line:
        return f"head_dim must be a power of two from 16 to {2 * c.line}, got {d.head_dim}"
    if blocks < d.q_heads:
        return f"{d.q_heads} query heads are more than {blocks} blocks"
    if blocks > 254:
        return f"{blocks} blocks are more than a sum's count holds: 254"
    s = Schedule(dims, blocks, config)
    if cdiv(s.hidden_words + 1, blocks) > c.strips * c.line // 4:
        return f"{blocks} blocks are too few to clear {s.hidden_words + 1} words of a sum, one for a thread"
    if s.size >= 2**31 // (ROWS * c.strips):
        return f"{s.size} tiles are more than 32-bit indices reach"
    return ""
