"""What products have in common when a config is chosen: the fields of a tile, and what a launch of
tiles asks for.

An op states its `Gemm` (the sizes) and its config, a `Tile` with further fields. `work` counts;
gemm_candidates.py lists tiles.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ...launch import Device, next_pow2
from ...select import Work
from .scaling import FP8, Scaling

STEPS_BYTES = 227 << 10  # of shared memory of an SM
WHOLE_GPCS = 7 / 8  # share of the SMs that clusters of more than two fill
# A launch with PDL fills so much of the GPU's places, or its blocks read so few bytes (H200).
FILLED, SHORT_READ = 0.95, 300 << 10
AGAIN = 0.5  # share of a panel of b that comes from memory again for each further band of tile rows, where b does not fit L2


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut into tiles: what the configs of all products have.

    tile_m, tile_n, tile_k: of one step, powers of two; tile_m counts rows of a, tile_n columns of
        the output.
    group: tile rows in a band of the tile order (L2 reuse).
    swap_ab: b's tile is the first operand of the MMA and the accumulator is transposed: for few
        rows of a.
    persistent: one wave of blocks, each of which computes several tiles; else a block has one tile.
    latency, num_ctas, occupancy, num_worker_warps: compiler hints (pipeline depth, cluster size,
        blocks per SM, warps that compute).
    """

    tile_m: int
    tile_n: int
    tile_k: int
    group: int = 8
    swap_ab: bool = False
    persistent: bool = False
    latency: int = 5
    num_ctas: int | None = None
    occupancy: int = 1
    num_worker_warps: int | None = None

    @property
    def tile_shape(self) -> tuple[int, int]:
        """Rows of a and columns of the output in a tile."""
        return self.tile_m, self.tile_n

    @property
    def extra(self) -> int:
        """Width of a second accumulator beside the first, part of `tile_shape`."""
        return 0

    @property
    def form(self) -> str:
        """Name of a formulation with an efficiency of its own: "dot", "uneven"; else empty."""
        return ""

    @property
    def runs(self) -> bool:
        """Whether fp32 adds runs of sums of the tensor core."""
        return False

    @property
    def loads(self) -> str:
        """Letters for how scales are loaded; empty: by the threads that need them."""
        return ""

    def split_tiles(self, g: "Gemm", device: Device) -> int:
        """Tiles of the last, incomplete wave if they are split along k, else 0."""
        return 0

    def parts(self, g: "Gemm") -> int:
        """Blocks for a split tile, none of them without a step."""
        return 1

    def share(self, g: "Gemm", device: Device) -> int:
        """The most k that one block sums."""
        return g.k

    def count(self, m: int, n: int) -> int:
        """Tiles of an output [m, n]."""
        tile_m, tile_n = self.tile_shape
        return -(-m // tile_m) * -(-n // tile_n)

    def resident(self, device: Device) -> int:
        """Blocks that the device holds at once.

        The SMs of a cluster lie in one GPC, some of which have SMs to spare: of 33 clusters of four
        an H200 holds 28 at least, and not 32 (256 x 8192 x 3072 took twice the time).
        """
        ctas = self.num_ctas or 1
        return max(1, int(device.sms * (WHOLE_GPCS if ctas > 2 else 1)) * self.occupancy // ctas)


@dataclass(frozen=True, slots=True)
class Uneven(Tile):
    """A tile that need not be a power of two.

    extra_n: columns of a second accumulator beside the first, so that a tile need not be a power of
        two wide, or that two MMAs take turns; 0 for none. With swap_ab it widens tile_m.
    """

    extra_n: int = 0

    @property
    def tile_shape(self) -> tuple[int, int]:
        """Rows of a and columns of the output in a tile, with the extra ones."""
        return (self.tile_m + self.extra_n, self.tile_n) if self.swap_ab else (self.tile_m, self.tile_n + self.extra_n)

    @property
    def extra(self) -> int:
        """See Tile."""
        return self.extra_n

    @property
    def form(self) -> str:
        """See Tile."""
        return "uneven" if self.extra_n else ""


def begins_all(g: "Gemm", c: Uneven) -> bool:
    """There is something for each accumulator of an uneven tile."""
    (tile_m, tile_n), narrowest = c.tile_shape, c.extra_n & -c.extra_n
    return g.m > tile_m - narrowest if c.swap_ab else g.n > tile_n - narrowest


def filled_parts(steps: int, parts: int) -> int:
    """How many of so many equal runs of steps have any."""
    return -(-steps // -(-steps // parts))


@dataclass(frozen=True, slots=True)
class Split(Uneven):
    """A tile that may be the work of several blocks.

    split_k: blocks that share each tile of the last, incomplete wave; a second launch adds their
        fp32 partial tiles. 1: no split.
    """

    split_k: int = 1

    def split_tiles(self, g: "Gemm", device: Device) -> int:
        """See Tile."""
        return 0 if self.persistent or self.parts(g) == 1 else g.tiles(self) % self.resident(device)

    def parts(self, g: "Gemm") -> int:
        """See Tile."""
        return filled_parts(-(-g.k // self.tile_k), self.split_k)

    def share(self, g: "Gemm", device: Device) -> int:
        """See Tile."""
        if self.split_tiles(g, device) < g.tiles(self):
            return g.k
        return -(-(-(-g.k // self.tile_k)) // self.parts(g)) * self.tile_k


@dataclass(frozen=True, slots=True)
class Gemm:
    """A product, or `batch` of one size: out [batch, m, n] = op(a) [batch, m, k] @ op(b) [batch, k,
    n].

    m: of unequal groups the mean. size_bytes: what the launch must move. matrices_b: how many b
        there are, `batch` by default.
    most_fast: of how much k a sum of 8-bit products may stay in the tensor core. tf32: float32
        operands are rounded for it. gated: silu_mul stands behind.
    """

    m: int
    n: int
    k: int
    dtype: torch.dtype
    size_bytes: int
    batch: int = 1
    matrices_b: int = 0
    scaling: Scaling = Scaling.NONE
    trans_a: bool = False
    trans_b: bool = True
    most_fast: int = 0
    tf32: bool = False
    gated: bool = False

    def fast(self, c: Tile, device: Device) -> bool:
        """Whether the sums of a block stay in the tensor core."""
        short = self.k <= self.most_fast
        return short or (self.most_fast > 0 and self.scaling is not Scaling.BLOCK and c.share(self, device) <= self.most_fast)

    @property
    def k_major(self) -> bool:
        """k is the last axis of both operands."""
        return self.trans_b and not self.trans_a

    @property
    def pitch(self) -> int:
        """Bytes, the largest power of two up to 128 that rows of both operands begin at multiples
        of.
        """
        return min(self.pitches)

    @property
    def pitches(self) -> tuple[int, int]:
        """The same of a and of b."""
        size = self.dtype.itemsize
        a, b = (self.m if self.trans_a else self.k) * size, (self.k if self.trans_b else self.n) * size
        return min(128, a & -a), min(128, b & -b)

    def loads_wide(self, device: Device) -> bool:
        """TMA can read the rows (or 16 bytes at a time): else every element passes through
        registers by itself.
        """
        unit = 16 if device.arch == "sm_90" else 16 * self.dtype.itemsize
        return self.pitch % unit == 0

    def tiles(self, c: Tile) -> int:
        """Of all matrices."""
        return self.batch * c.count(self.m, self.n)


def use_pdl(g: Gemm, c: Tile, device: Device, blocks: int, parts: int = 1) -> bool:
    """Whether blocks may be placed while the launch before still runs (`Launch.pdl`). parts: of k.

    It saves 0.5 to 1 us. But early blocks take the places that come free first. Where they do not
    fill the GPU, they then share SMs and ports that a launch alone would spread them over, and what
    memory bounds takes up to 1.4 times as long (H200; 204 pairs of times, notes/LOG.md). Blocks
    that walk over tiles lose for the same reason.
    """
    if c.persistent:
        return False
    tile_m, tile_n = c.tile_shape
    read = (min(tile_m, g.m) + tile_n) * -(-g.k // parts) * g.dtype.itemsize
    if blocks >= FILLED * c.resident(device) or read < SHORT_READ:
        return True
    flops = 2.0 * g.batch * g.m * g.n * g.k * g.dtype.itemsize / 2  # 8-bit operands take half of the time
    return flops * device.memory_gbs > g.size_bytes * device.tflops * 1e3


# ------------------------------------------------------------------------------------------- counts
@cache
def _of_tile(c: Tile, dtype: torch.dtype, scaling: Scaling, fast: bool, tf32: bool, gated: bool) -> tuple[tuple[str, ...], float]:
    """What sizes have no part in: kinds of the operations, and how many a step has."""
    size, (tile_m, tile_n) = dtype.itemsize, c.tile_shape
    longer, wide = (tile_n, tile_m) if c.swap_ab else (tile_m, tile_n)
    ctas = c.num_ctas or 1
    if c.form == "dot" or dtype is torch.float32:
        kinds: tuple[str, ...] = ("dot", f"dot{c.tile_m}") if c.form == "dot" else ("tf32" if tf32 else "fma",)
        return kinds, 2.0 * tile_m * tile_n * c.tile_k / ctas
    # Multiply-adds of an MMA of 64 rows, or the time its operands take out of shared memory (128
    # bytes a clock).
    rows = -(-longer // (64 * ctas)) * ctas
    flops = 2.0 * c.tile_k * rows * sum(max(64 * max(w, 8), 32 * (64 + w)) for w in (wide - c.extra, c.extra) if w) / ctas
    if c.form:
        shape = c.form
    elif ctas > 1:
        shape = "cluster"
    elif c.num_worker_warps == 8 and longer == 64:
        shape = "half"  # two warpgroups share 64 rows
    elif longer * wide >= 1 << 15:
        shape = "256"
    elif longer >= 128 and wide >= 128:
        shape = "128"
    else:
        shape = "64" if wide >= 64 else "few"
    more: tuple[str, ...] = ()
    if dtype in FP8:
        of_scaling = {Scaling.ROW: ("row",), Scaling.BLOCK: ("block",)}.get(scaling, ())
        of_sums = ("runs",) if c.runs else () if fast or scaling is Scaling.BLOCK else ("precise",)
        more = ("fp8", *of_scaling, *of_sums, *((c.loads,) if c.loads else ()))
    return (shape, *more, *(("gated",) if gated else ()), f"{size}{'b' if scaling is Scaling.BLOCK else ''} {tile_name(c)}"), flops


@cache
def tile_name(c: Tile) -> str:
    """All of a tile that the compiler sees."""
    how = "".join(letter for letter, on in (("b", c.swap_ab), ("p", c.persistent), ("r", c.runs), (c.form[:1], c.form), (c.loads, c.loads)) if on)
    rows = "m" if c.swap_ab or c.form == "dot" else c.tile_m
    return f"{rows}x{c.tile_n}+{c.extra}x{c.tile_k} {c.num_ctas or 1}{c.occupancy}{c.num_worker_warps or 0}{c.latency}{how}"


def work(g: Gemm, c: Tile, device: Device, spill: int = 0, *, tails: bool = False) -> tuple[Work, ...]:
    """What a launch asks for: whole tiles, then those that are split. tails: with what the last
    ones hang over the end.
    """
    kinds, flops = _of_tile(c, g.dtype, g.scaling, g.fast(c, device), g.tf32, g.gated)
    size, ctas = g.dtype.itemsize, c.num_ctas or 1
    tile_m, tile_n = c.tile_shape
    filled_m, filled_n = float(min(tile_m, g.m)), float(tile_n)
    if tails:
        filled_m, filled_n = g.m / -(-g.m // tile_m), g.n / -(-g.n // tile_n)
    step_bytes = (tile_m + tile_n) * c.tile_k * size // ctas
    one_b = g.n * g.k * size
    size_b = one_b * (g.matrices_b or g.batch)
    tiles_m, tiles, resident = -(-g.m // tile_m), g.tiles(c), c.resident(device)
    bands_of_rows = -(-tiles_m // c.group)
    again = AGAIN * (bands_of_rows - 1) * size_b * min(1.0, max(0.0, one_b / device.l2_bytes - 0.3))
    dram, steps = g.size_bytes + again, -(-g.k // c.tile_k)
    span = min(size_b, min(tiles, resident) / tiles_m * tile_n * g.k * size)
    pitches = g.pitches
    fixed: dict[str, Any] = {
        "resident": resident,
        "per_sm": c.occupancy,
        "sms": ctas,
        "flops": flops,
        "kinds": kinds,
        "fill": (filled_m + filled_n) * c.tile_k * size / ctas * (1.25 if ctas > 1 else 1.0),
        "padding": (tile_m + tile_n - filled_m - filled_n) * c.tile_k * size / ctas,
        "aligned": min(pitches),
        "unaligned": (filled_m * (pitches[0] < 128) + filled_n * (pitches[1] < 128)) / (filled_m + filled_n),
        "serial": float(g.scaling is Scaling.BLOCK),
        "out": tile_m * tile_n / ctas,
        "persistent": c.persistent,
        "spill": spill,
        "stages": max(1, min(c.latency, STEPS_BYTES // c.occupancy // step_bytes)),
    }
    split_tiles = c.split_tiles(g, device)
    if not split_tiles:
        return (Work(tiles, steps=steps, dram=dram, span=span, **fixed),)
    parts, share = c.parts(g), split_tiles / tiles
    at_once = span * min(split_tiles, resident / parts) / min(tiles, resident)
    written = 2.0 * split_tiles * parts * tile_m * tile_n * 4
    last = Work(split_tiles * parts, steps=-(-steps // parts), dram=dram * share, span=at_once, partial=written, **fixed)
    return (last,) if share == 1 else (Work(tiles - split_tiles, steps=steps, dram=dram * (1 - share), span=span, **fixed), last)


def family(g: Gemm, c: Tile) -> str:
    """What the model errs alike about: operands, epilogue, tile and how it is walked."""
    short = "" if c.swap_ab or c.form == "dot" or g.m > c.tile_m // 2 else f"<{next_pow2(g.m)}"
    options = f"{g.dtype.itemsize}{g.scaling.name[0]}{'g' * g.gated}{'t' * g.tf32}"
    return f"{options} {tile_name(c)}{short}{'s' * (c.parts(g) > 1)}"
