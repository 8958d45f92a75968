"""How a model's matrices are cut into tiles and dealt to blocks, from sizes alone.

A tile is ROWS x strips x line words of 32 bits, one strip for each warp. There are three forms:

- wide (qkv, gate and up, head): a row of the matrix is `sets` x strips x `width` words, and all
  warps add to it. It is multiplied by the normed residual stream.
- out: a row is `width` words of one warp, the columns of the block's query head. It is multiplied
  by what this head attended to.
- down: a row is `sets` x `width` words of one warp, the block's own inner columns. It is multiplied
  by their activations.

A line holds line / width rows, its fields. The `sets` tiles of a group follow each other: the same
rows, multiplied by other parts of x.

A word holds `pairs` pairs of neighbours: one of 16 bits, or two of e4m3 codes, each pair of its own
part of x. With codes, a number of the head, which keeps 16 bits, has two: `pack.two_codes`.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, make_dataclass
from functools import lru_cache
from typing import Any

from ...launch import Device, argument_error


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
    """strips: of a tile, one for each of the block's `strips` warps, `line` words each.

    parts: in which the sum of `down` is built, so that only the last is waited for.
    span: keys of a tile. short: with more keys, the blocks of a query head split them.
    latency: the latency hint of the loads of weights.
    pairs: of neighbours in a word of weights.
    slow: memory so slow that waits do not count: other blocks use the whole rate meanwhile.
    """

    strips: int = 8
    line: int = 128
    parts: int = 4
    span: int = 64
    short: int = 256
    latency: int = 10
    pairs: int = 1
    slow: bool = False


ROWS = 8  # of a tile
MOST_BLOCKS = 254  # that a sum counts
TREE = 4  # products of codes with x that are added in fp16
SECOND = 2.0**-4  # what the second of a number's two codes counts for
# Fewer blocks than all already take all of the memory's rate, and wait for each other less. On an
# H200 128 blocks are 4 % faster than 132, which have 2 % less to read (Llama-3.1-8B, e4m3 weights).
FEWER = 1.025
RING = 6  # tiles of weights that the compiler reads ahead
SET_COST = 0.012  # of a layer's time, for each set of `down`, in instructions: a guess
WIDTHS = (128, 64, 32, 16, 8, 4)
NARROWEST, MOST_SETS = 8, 7  # preferred limits of the form of `down`: a block keeps all its sets of x in registers
QKV, OUT, GATE_UP, DOWN, HEAD = range(5)  # kinds of work items


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class Split:
    """How a layer is dealt to the blocks with a query head, and to the others.

    out_parts: blocks of a query head. qkv_first: groups of qkv for the blocks with a head; the
        others have the rest. down_width: of the form of `down`.
    gate_up, others: groups of gate and up of each block with a head, and of each other one.
    layer: tiles of a layer of the busiest block. waited: with those that it could have read while
        it waits.
    """

    out_parts: int
    qkv_first: int
    down_width: int
    gate_up: int
    others: int
    layer: int
    waited: int


class Schedule:
    """What each block has. If there are more blocks than query heads, some have none: they have
    more inner columns instead, so that the busiest block reads as few tiles as possible.
    """

    def __init__(self, dims: Dims, blocks: int, config: Config) -> None:
        d, c = dims, config
        self.dims, self.blocks, self.config = dims, blocks, config
        words = cdiv(d.hidden // 2, c.strips)
        forms = [(width, cdiv(words, c.pairs * width)) for width in WIDTHS if 16 <= width <= c.line]
        self.wide_width, self.wide_sets = min(forms, key=lambda form: (form[0] * form[1], form[1]))
        self.wide_fields = c.line // self.wide_width
        self.wide_rows = ROWS * self.wide_fields  # of a group
        self.slots = self.wide_width // 4  # groups whose sums a block can keep in a turn
        self.hidden_words = self.wide_sets * c.pairs * c.strips * self.wide_width  # of the residual stream, padded with zeros to whole rows
        self.stream_sets = c.pairs * self.wide_sets  # of x, and of the head
        self.head_words = d.head_dim // 2  # of a head
        self.out_width = self.head_words // c.pairs  # of the form of `out`
        self.qkv_rows = (d.q_heads + 2 * d.kv_heads) * d.head_dim
        self.qkv_groups, self.head_groups = cdiv(self.qkv_rows, self.wide_rows), cdiv(d.vocab, self.wide_rows)
        found = [one for parts in range(1, max(1, blocks // d.q_heads) + 1) for one in _splits(self, parts)]
        found = [(sets, split) for sets, split in found if c.pairs * sets <= MOST_SETS] or found
        self.down_sets, s = min(found, key=lambda one: (_cost(c, *one), one[1].layer, -one[1].out_parts, one[0]))
        self.split = s
        self.attending = d.q_heads * s.out_parts  # the first blocks, which have a query head
        self.head_first = self.head_groups * self.attending // blocks  # groups of the head that they have
        self.gate_up_sets, self.others_sets = (cdiv(n * (self.wide_rows // 4), c.pairs * s.down_width) for n in (s.gate_up, s.others))
        self.out_words = cdiv(self.hidden_words, s.out_parts)  # pairs of outputs of a block of `out`
        self.out_groups = cdiv(self.out_words, self.narrow_words(self.out_width))
        self.down_groups = cdiv(self.hidden_words, self.narrow_words(s.down_width))
        self.down_part = min(max(s.down_width // 4, 1), cdiv(self.down_groups, c.parts))  # groups of a part of `down`
        self.gate_up_groups = self.before(blocks, s.gate_up, s.others)
        # Of a block, for qkv, out, gate_up and down in a layer and for the head; and of all blocks.
        self.turns = (
            cdiv(self._most(self.qkv_groups, s.qkv_first), self.slots // 4),
            cdiv(self.out_groups, self.out_width // 4),
            cdiv(max(s.gate_up, s.others), self.slots // 2),
            cdiv(self.down_groups, self.down_part),
            cdiv(self._most(self.head_groups, self.head_first), self.slots),
        )
        self.tiles = (
            self.qkv_groups * self.wide_sets,
            self.attending * self.out_groups,
            self.gate_up_groups * self.wide_sets,
            self.before(blocks, self.gate_up_sets, self.others_sets) * self.down_groups,
            self.head_groups * self.stream_sets,
        )
        self.layer_turns, self.layer_tiles = sum(self.turns[:4]), sum(self.tiles[:4])
        self.size = d.layers * self.layer_tiles + self.tiles[4]  # tiles of a step
        self.tile_words = ROWS * c.strips * c.line

    def narrow_words(self, width: int) -> int:
        """Pairs of outputs of a group of `out` or `down`."""
        return ROWS // 2 * self.config.strips * (self.config.line // width)

    def before(self, block: int, each: int, other: int) -> int:
        """What the blocks before this one have, if each with a query head has `each`."""
        return min(block, self.attending) * each + max(block - self.attending, 0) * other

    @property
    def padded_rows(self) -> tuple[int, int, int, int]:
        """Of a layer's qkv, out, gate and up, and down, each filled up to whole groups."""
        return self.qkv_groups * self.wide_rows, 2 * self.hidden_words, self.gate_up_groups * self.wide_rows, 2 * self.hidden_words

    @property
    def row_scales(self) -> int:
        """Of e4m3 weights: `pack.Packed`."""
        return self.dims.layers * sum(self.padded_rows) + self.dims.vocab if self.config.pairs > 1 else 1

    def _most(self, groups: int, first: int) -> int:
        """Of `groups`, the most that a block has: see `dealt`."""
        return max(cdiv(first, self.attending), cdiv(groups - first, max(self.blocks - self.attending, 1)))

    def numbers(self) -> tuple[int, ...]:
        """The fields of `Layout`, side by side."""
        values = asdict(self.dims) | asdict(self.config) | asdict(self.split) | vars(self)
        return (*(int(values[name]) for name in NUMBERS.split()), *self.turns, *self.tiles)

    def _rows(self, block: int, groups: int, first: int, rows: int) -> range:
        start, number = dealt(self, block, groups, first)
        return range(min(start * self.wide_rows, rows), min((start + number) * self.wide_rows, rows))

    def qkv(self, block: int) -> range:
        """The rows of a block."""
        return self._rows(block, self.qkv_groups, self.split.qkv_first, self.qkv_rows)

    def head(self, block: int) -> range:
        return self._rows(block, self.head_groups, self.head_first, self.dims.vocab)

    def inner(self, block: int) -> range:
        """The inner columns of a block."""
        groups = (self.before(n, self.split.gate_up, self.split.others) for n in (block, block + 1))
        return range(*(min(n * self.wide_rows // 2, self.dims.inter) for n in groups))

    def outputs(self, block: int) -> tuple[int, range] | None:
        """The query head of a block and its outputs of it; None for a block without."""
        head, part = divmod(block, self.split.out_parts)
        ends = (min(p * 2 * self.out_words, self.dims.hidden) for p in (part, part + 1))
        return None if head >= self.dims.q_heads else (head, range(*ends))

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
        return self.dims.layers * self.split.layer + self._most(self.head_groups, self.head_first) * self.stream_sets

    def cost(self) -> float:
        """What a step takes, in tiles."""
        return self.busiest() + self.dims.layers * (_cost(self.config, self.down_sets, self.split) - self.split.layer)

    def weight_bytes(self) -> int:
        """Bytes of the model's matrices."""
        d = self.dims
        return 2 * (d.layers * (self.qkv_rows + d.q_heads * d.head_dim + 3 * d.inter) // self.config.pairs + d.vocab) * d.hidden

    def balance(self) -> float:
        """Tiles that the weights fill, over those that all blocks could read in the time of the
        busiest: 1 is perfect.
        """
        return self.weight_bytes() / 4 / self.tile_words / (self.busiest() * self.blocks)


# Of a schedule, what is known when the kernel is compiled.
NUMBERS = (
    "layers hidden q_heads kv_heads vocab head_norms blocks strips line span short latency pairs wide_width wide_sets wide_fields slots hidden_words "
    "stream_sets out_width head_words qkv_rows qkv_groups qkv_first attending out_parts out_words out_groups gate_up others gate_up_sets others_sets "
    "down_width down_sets down_groups down_part head_groups head_first layer_turns layer_tiles"
)
Layout = make_dataclass("Layout", [*NUMBERS.split(), "turns", "tiles"], frozen=True)


# Tile code, which also runs as plain Python.
def layout_of(numbers: tuple[int, ...]) -> Any:
    return Layout(*numbers[:-10], numbers[-10:-5], numbers[-5:])


def dealt(s: Any, block: int, groups: int, first: int) -> tuple[int, int]:
    """The first and the number of a block's groups: the blocks with a query head share the first
    ones evenly, the others the rest.
    """
    number, blocks, some, start = block, s.attending, first, 0
    if block >= s.attending:
        number, blocks, some, start = block - s.attending, max(s.blocks - s.attending, 1), groups - first, first
    here = start + number * some // blocks
    return here, start + (number + 1) * some // blocks - here


def placed(s: Any, turn: int, block: int) -> tuple[int, int, int, int, int, int, int]:
    """A turn's kind, layer and number in its work item; the first of its groups and how many;
    the tiles of a group, and the first tile.
    """
    turns, tiles = s.turns, s.tiles
    layer = min(turn // s.layer_turns, s.layers)
    sub, base = turn - layer * s.layer_turns, layer * s.layer_tiles
    ahead, behind = min(block, s.attending), max(block - s.attending, 0)
    kind, most, sets = HEAD, s.slots, s.stream_sets
    first, count = dealt(s, block, s.head_groups, s.head_first)
    before = first * s.stream_sets
    if layer < s.layers:
        if sub < turns[0]:
            kind, most, sets = QKV, s.slots // 4, s.wide_sets
            first, count = dealt(s, block, s.qkv_groups, s.qkv_first)
            before = first * s.wide_sets
        elif sub < turns[0] + turns[1]:
            kind, most, sets = OUT, s.out_width // 4, 1
            sub, base = sub - turns[0], base + tiles[0]
            first, count, before = 0, s.out_groups, block * s.out_groups
            if block >= s.attending:
                count = 0
        elif sub < turns[0] + turns[1] + turns[2]:
            kind, most, sets = GATE_UP, s.slots // 2, s.wide_sets
            sub, base = sub - turns[0] - turns[1], base + tiles[0] + tiles[1]
            first, count, before = 0, s.gate_up, (ahead * s.gate_up + behind * s.others) * s.wide_sets
            if block >= s.attending:
                count = s.others
        else:
            kind, most, sets = DOWN, s.down_part, s.gate_up_sets
            sub, base = sub - turns[0] - turns[1] - turns[2], base + tiles[0] + tiles[1] + tiles[2]
            first, count = 0, s.down_groups
            before = (ahead * s.gate_up_sets + behind * s.others_sets) * s.down_groups
            if block >= s.attending:
                sets = s.others_sets
    return kind, layer, sub, first + sub * most, max(0, min(most, count - sub * most)), sets, base + before + sub * most * sets


def _cost(config: Config, sets: int, split: Split) -> float:
    """What a layer takes, in tiles."""
    return split.layer if config.slow else split.waited * (1 + SET_COST * sets)


def _splits(s: Schedule, parts: int) -> Iterator[tuple[int, Split]]:
    """Ways to deal a layer with so many blocks of each query head, and their sets of `down`."""
    lanes, attend, pairs = s.config.line // 4, s.dims.q_heads * parts, s.config.pairs
    rest = max(0, s.blocks - attend)
    out = cdiv(cdiv(s.hidden_words, parts), s.narrow_words(s.out_width))
    groups, words, qkv_groups = cdiv(s.dims.inter, s.wide_rows // 2), s.wide_rows // 4, s.qkv_groups
    for width in (w for w in WIDTHS if min(NARROWEST, lanes) <= w <= lanes):
        down_groups, wide = cdiv(s.hidden_words, s.narrow_words(width)), pairs * width  # words of x for a set
        unit = max(1, wide // words)
        level = int(groups / s.blocks - rest / s.blocks * out * wide / (s.wide_sets * wide + down_groups * words))
        tried = {max(0, n) for low in (level, level // unit * unit) for n in (low, low + 1, low + unit)} if rest else {cdiv(groups, s.blocks)}
        for each in tried:
            others = cdiv(max(groups - attend * each, 0), rest) if rest else 0
            sets = [cdiv(n * words, wide) for n in (each, others)]
            load, other_load = (n * s.wide_sets + of * down_groups for n, of in zip((each, others), sets, strict=True))
            for more in range(2 * cdiv(qkv_groups, s.blocks) + 2 if rest else 1):
                other_qkv = min(rest * more, qkv_groups)
                first, second = cdiv(qkv_groups - other_qkv, attend) * s.wide_sets, cdiv(other_qkv, max(rest, 1)) * s.wide_sets
                layer = max(first + out + load, second + other_load)
                # All blocks wait for the slowest qkv, and those without a head also for `out`, but
                # not for the tiles that fit in their rings meanwhile.
                waits = max(0, max(first, second) + out - second - RING)
                waited = max(layer, max(first, second) + out + load, second + other_load + waits)
                yield max(sets), Split(parts, qkv_groups - other_qkv, width, each, others, layer, waited)


def default_config(device: Device, head_dim: int = 64, small: bool = False) -> Config:
    """Tiles of 128 keys beat 64 everywhere on Hopper (notes/LOG.md); others spill with them.

    small: of e4m3 weights. Each of the parts of `down` is then half as long, and half as many are 1
        to 1.5 % faster (Llama-3.1-8B, H200).
    """
    wide = 128 if device.arch == "sm_90" and not small else 64
    return Config(span=wide if head_dim <= 64 else 32, parts=2 if small else 4, pairs=1 + small, slow=device.arch in ("sm_120", "sm_121"))


def misfits(dims: Dims, config: Config) -> Iterator[str]:
    """What keeps a model from these tiles with any number of blocks."""
    if dims.hidden % 2 or dims.inter % 2:
        yield "hidden and inter must be even"
    if dims.q_heads % dims.kv_heads:
        yield "key heads must divide query heads"
    if dims.head_dim & (dims.head_dim - 1) or not 16 <= dims.head_dim <= 2 * config.line:
        yield f"head_dim must be a power of two from 16 to {2 * config.line}, got {dims.head_dim}"


@lru_cache(maxsize=64)
def schedule_of(dims: Dims, device: Device, blocks: int = 0, config: Config | None = None) -> Schedule:
    """A model's schedule on a device.

    blocks: 0 for the fewest, of the last quarter of the SMs, with which the busiest takes at most
        FEWER times what it takes with the best number.
    Raises: ValueError for sizes that no tile holds; or for blocks that can't all be resident: they
        would wait for each other for ever.
    """
    config = config or default_config(device, dims.head_dim)
    if blocks and device.is_cpu and not 1 <= blocks <= MOST_BLOCKS:
        raise argument_error("blocks", f"1 to {MOST_BLOCKS}, as many as a sum's count holds", blocks)
    if blocks and not device.is_cpu and not 1 <= blocks <= device.sms:
        raise argument_error("blocks", f"1 to {device.sms}, the multiprocessors of {device.name}: all must be resident, one on each", blocks)
    sms = max(device.sms, dims.q_heads) if device.is_cpu else device.sms
    reasons = list(misfits(dims, config))
    if not reasons:
        counts = [blocks] if blocks else range(min(max(dims.q_heads, 3 * sms // 4), sms), sms + 1)
        found = [Schedule(dims, count, config) for count in counts]
        least = min(s.cost() for s in found)
        s = next(s for s in found if s.cost() <= FEWER * least)
        words, threads = s.hidden_words + 1, config.strips * config.line // 4
        checks = {
            f"{dims.q_heads} query heads are more than {s.blocks} blocks": s.blocks < dims.q_heads,
            f"{s.blocks} blocks are more than a sum's count holds: {MOST_BLOCKS}": s.blocks > MOST_BLOCKS,
            f"{s.blocks} blocks are too few to clear {words} words of a sum, one for a thread": cdiv(words, s.blocks) > threads,
            f"{s.size} tiles are more than 32-bit indices reach": s.size >= 2**31 // (ROWS * config.strips),
        }
        reasons = [reason for reason, bad in checks.items() if bad]
    if reasons:
        raise argument_error("the model's sizes", 'sizes that fit the megakernel\'s tiles with mode="mega"', reasons[0])
    return s
