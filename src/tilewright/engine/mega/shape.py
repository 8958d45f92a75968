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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
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
        head, more are split between them. latency: the compiler's hint for the weights.
    slow: memory so slow that neither instructions nor waits count: while some blocks wait, the
        others have all of its rate.
    """

    strips: int = 8
    line: int = 128
    parts: int = 4
    span: int = 64
    short: int = 256
    latency: int = 10
    slow: bool = False
    num_worker_warps: int | None = 8


ROWS = 8  # of a tile
RING = 6  # tiles of weights that the compiler reads ahead
SET_COST = 0.012  # part of a layer that each set of `down` takes in instructions, beside its tiles: a guess
WIDTHS = (128, 64, 32, 16, 8, 4)
NARROWEST, MOST_SETS = 8, 7  # words of a row of `down` in a line, and sets, where fewer are to be had: they lie in registers


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


def best_form(words: int, widths: Iterable[int]) -> Form:
    """With the fewest words in all, then the fewest sets."""
    forms = [Form(width, cdiv(words, width)) for width in widths]
    return min(forms, key=lambda form: (form.width * form.sets, form.sets))


class Share(NamedTuple):
    """What each block of a class has of gate and up, in groups, and of `down`, in sets."""

    gate_up: int
    sets: int


class Split(NamedTuple):
    """How a layer is dealt to two classes of blocks.

    out_parts: blocks of a query head; so many times q_heads blocks attend. qkv: groups that all of
        these have; the others have the rest.
    layer: tiles of the busiest block. waited: with those in whose time it waits for others.
    """

    out_parts: int
    qkv: int
    down: Form
    attending: Share
    others: Share
    layer: int
    waited: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """What each block has. The first blocks attend to a query head, and have a part of `out`; the
    others have more inner columns instead, so that all have as many tiles.
    """

    dims: Dims
    blocks: int
    config: Config
    wide: Form = field(init=False)
    out: Form = field(init=False)
    split: Split = field(init=False)

    def __post_init__(self) -> None:
        c, d = self.config, self.dims
        wide = best_form(cdiv(d.hidden // 2, c.strips), [w for w in WIDTHS if 16 <= w <= c.line])
        object.__setattr__(self, "wide", wide)
        object.__setattr__(self, "out", Form(d.head_dim // 2, 1))
        found = [split for parts in range(1, max(1, self.blocks // d.q_heads) + 1) for split in self._splits(parts)]
        found = [split for split in found if split.down.sets <= MOST_SETS] or found
        best = min(found, key=lambda split: (self._layer_cost(split), split.layer, -split.out_parts, split.down.sets))
        object.__setattr__(self, "split", best)

    def _splits(self, parts: int) -> Iterator[Split]:
        """With so many blocks of each query head."""
        d, lanes = self.dims, self.config.line // 4
        attend = d.q_heads * parts
        rest = max(0, self.blocks - attend)
        out = cdiv(cdiv(self.hidden_words, parts), self.narrow_words(self.out))
        groups, words = cdiv(d.inter, self.wide_rows // 2), self.wide_rows // 4  # of gate and up, and inner columns of a group, in pairs
        for width in (w for w in WIDTHS if min(NARROWEST, lanes) <= w <= lanes):
            down_groups, unit = cdiv(self.hidden_words, self.narrow_words(Form(width, 1))), max(1, width // words)
            level = int(groups / self.blocks - rest / self.blocks * out * width / (self.wide.sets * width + down_groups * words))
            tried = {max(0, n) for low in (level, level // unit * unit) for n in (low, low + 1, low + unit)} if rest else {cdiv(groups, self.blocks)}
            for each in tried:
                others = cdiv(max(groups - attend * each, 0), rest) if rest else 0
                mine, theirs = (Share(n, cdiv(n * words, width)) for n in (each, others))
                load, other_load = (share.gate_up * self.wide.sets + share.sets * down_groups for share in (mine, theirs))
                for more in range(2 * cdiv(self.qkv_groups, self.blocks) + 2 if rest else 1):
                    other_qkv = min(rest * more, self.qkv_groups)
                    qkv = self.qkv_groups - other_qkv
                    first, second = cdiv(qkv, attend) * self.wide.sets, cdiv(other_qkv, max(rest, 1)) * self.wide.sets
                    layer = max(first + out + load, second + other_load)
                    # All wait for the last block of qkv, and the others for `out`, but for what
                    # their rings hold by then.
                    waited = max(layer, max(first, second) + out + load, second + other_load + max(0, max(first, second) + out - second - RING))
                    yield Split(parts, qkv, Form(width, max(mine.sets, theirs.sets)), mine, theirs, layer, waited)

    @property
    def attending(self) -> int:
        """Blocks with a query head."""
        return self.dims.q_heads * self.split.out_parts

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
    def attending_head_groups(self) -> int:
        """Groups of the head that the attending blocks have: their share."""
        return self.head_groups * self.attending // self.blocks

    @property
    def out_words(self) -> int:
        """Outputs of a block of `out`, in pairs."""
        return cdiv(self.hidden_words, self.split.out_parts)

    @property
    def out_groups(self) -> int:
        return cdiv(self.out_words, self.narrow_words(self.out))

    @property
    def down_groups(self) -> int:
        return cdiv(self.hidden_words, self.narrow_words(self.split.down))

    @property
    def down_part(self) -> int:
        """Groups of a part of `down`."""
        return min(max(self.split.down.width // 4, 1), cdiv(self.down_groups, self.config.parts))

    @property
    def classes(self) -> tuple[tuple[int, Share], tuple[int, Share]]:
        """How many blocks have which share: those that attend, and the others."""
        return (self.attending, self.split.attending), (self.blocks - self.attending, self.split.others)

    def _most(self, groups: int, first: int) -> int:
        """Of `groups`, the most that a block has; the attending blocks have the first of them."""
        return max(cdiv(first, self.attending), cdiv(groups - first, max(self.blocks - self.attending, 1)))

    @property
    def turns(self) -> tuple[int, int, int, int, int]:
        """Of qkv, out, gate_up and down in a layer, and of the head."""
        return (
            cdiv(self._most(self.qkv_groups, self.split.qkv), self.slots // 4),
            cdiv(self.out_groups, self.out.width // 4),
            cdiv(max(share.gate_up for _, share in self.classes), self.slots // 2),
            cdiv(self.down_groups, self.down_part),
            cdiv(self._most(self.head_groups, self.attending_head_groups), self.slots),
        )

    @property
    def tiles(self) -> tuple[int, int, int, int, int]:
        """Of all blocks: in a layer qkv, out, gate_up and down; and the head."""
        return (
            self.qkv_groups * self.wide.sets,
            self.attending * self.out_groups,
            sum(blocks * share.gate_up for blocks, share in self.classes) * self.wide.sets,
            sum(blocks * share.sets for blocks, share in self.classes) * self.down_groups,
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

    def _rows(self, block: int, groups: int, first: int, rows: int) -> range:
        """The rows of a block's groups, dealt evenly in each class: see `_most`."""
        number, blocks = (block, self.attending) if block < self.attending else (block - self.attending, self.blocks - self.attending)
        start, some = (0, first) if block < self.attending else (first, groups - first)
        ends = (min((start + n * some // blocks) * self.wide_rows, rows) for n in (number, number + 1))
        return range(*ends)

    def qkv(self, block: int) -> range:
        """The rows of a block."""
        return self._rows(block, self.qkv_groups, self.split.qkv, self.qkv_rows)

    def head(self, block: int) -> range:
        return self._rows(block, self.head_groups, self.attending_head_groups, self.dims.vocab)

    def inner(self, block: int) -> range:
        """The inner columns of a block."""
        (first, mine), (_, theirs) = self.classes
        ends = (min(n, first) * mine.gate_up + max(n - first, 0) * theirs.gate_up for n in (block, block + 1))
        return range(*(min(end * self.wide_rows // 2, self.dims.inter) for end in ends))

    def outputs(self, block: int) -> tuple[int, range] | None:
        """The query head of a block and its outputs of it; None for a block without."""
        head, part = divmod(block, self.split.out_parts)
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
        return self.split.out_parts > 1 and position >= self.config.short

    def tiles_of_keys(self, block: int, position: int) -> range:
        """The tiles of cached keys that a block attends to."""
        tiles, part = cdiv(position, self.config.span), block % self.split.out_parts
        return range(part, tiles, self.split.out_parts) if self.splits(position) else range(tiles)

    def busiest(self) -> int:
        """Tiles of the block with most, layer by layer."""
        return self.dims.layers * self.split.layer + self._most(self.head_groups, self.attending_head_groups) * self.wide.sets

    def _layer_cost(self, split: Split) -> float:
        return split.layer if self.config.slow else split.waited * (1 + SET_COST * split.down.sets)

    def cost(self) -> float:
        """What a step takes, in tiles."""
        return self.dims.layers * self._layer_cost(self.split) + self._most(self.head_groups, self.attending_head_groups) * self.wide.sets

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
    slow, span = device.arch in ("sm_120", "sm_121"), 64 if head_dim <= 64 else 32
    return Config(span=span, slow=slow, num_worker_warps=None if device.is_cpu else 8)


@lru_cache(maxsize=64)
def default_blocks(dims: Dims, device: Device, config: Config) -> int:
    """The fewest blocks, of the last quarter of those resident, with which a step takes at most 1 %
    more than with the best number: so many already take all of the memory's rate (an H200: 128 of
    132).
    """
    sms = max(device.sms, dims.q_heads) if device.is_cpu else device.sms
    costs = {blocks: Schedule(dims, blocks, config).cost() for blocks in range(min(max(dims.q_heads, 3 * sms // 4), sms), sms + 1)}
    return next(blocks for blocks, cost in costs.items() if cost <= 1.01 * min(costs.values()))


def misfit(dims: Dims, config: Config) -> str:
    """What keeps a model from these tiles with any number of blocks, or "" if nothing does."""
    c, d = config, dims
    if d.hidden % 2 or d.inter % 2:
        return "hidden and inter must be even"
    if d.q_heads % d.kv_heads:
        return "key heads must divide query heads"
    if d.head_dim & (d.head_dim - 1) or not 16 <= d.head_dim <= 2 * c.line:
        return f"head_dim must be a power of two from 16 to {2 * c.line}, got {d.head_dim}"
    return ""


def why_not(dims: Dims, blocks: int, config: Config) -> str:
    """As `misfit`, with so many blocks."""
    c, d = config, dims
    if reason := misfit(dims, config):
        return reason
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
