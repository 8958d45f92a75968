"""What products have in common when a config is chosen: the fields of a tile, tables of tiles, and
what a launch of them asks for.

An op states its `Gemm` (the sizes) and its config, a `Tile` with further fields. `tiles_of` reads
tables, `work` counts.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, TypeVar

import torch

from ...launch import Device, next_pow2
from ...select import Work
from . import gemm_tiles as known
from .scaling import FP8, GROUP, Scaling

STEPS_BYTES = 227 << 10  # of shared memory of an SM
AGAIN = 0.5  # share of a panel of b that comes from memory again for each further band of tile rows, where b does not fit L2


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut into tiles: what the configs of all products have.

    tile_m, tile_n, tile_k: of one step, powers of two; tile_m counts rows of a, tile_n columns of
        the output.
    group: tile rows in a band of the tile order (L2 reuse).
    swap_ab: b's tile is the first operand of the MMA and the accumulator is transposed: for few
        rows of a.
    persistent: blocks that fit on the device at once walk over the tiles; else a block has one
        tile.
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
        """Name of a formulation with an efficiency of its own: "dot", "gathered", "uneven"; else
        empty.
        """
        return ""

    def count(self, m: int, n: int) -> int:
        """Tiles of an output [m, n]."""
        tile_m, tile_n = self.tile_shape
        return -(-m // tile_m) * -(-n // tile_n)

    def resident(self, device: Device) -> int:
        """Blocks that the device holds at once."""
        return max(1, device.sms * self.occupancy // (self.num_ctas or 1))


@dataclass(frozen=True, slots=True)
class Gemm:
    """A product, or `batch` of one size: out [batch, m, n] = op(a) [batch, m, k] @ op(b) [batch, k,
    n].

    m: of unequal groups the mean. size_bytes: what the launch must move. matrices_b: how many b
        there are, `batch` by default.
    fast: sums of 8-bit products stay in the tensor core. tf32: float32 operands are rounded for it.
        gated: silu_mul stands behind.
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
    fast: bool = False
    tf32: bool = False
    gated: bool = False

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


# ------------------------------------------------------------------------------------------- tables
C = TypeVar("C", bound=Tile)
FLAGS = {"b": "swap_ab", "d": "dot", "g": "gathered", "r": "fast_runs"}
HINTS = {"l": "latency", "c": "num_ctas", "o": "occupancy", "w": "num_worker_warps"}


@cache
def tiles_of(text: str, config: type[C]) -> tuple[tuple[C, str], ...]:
    """Tiles like `128x256x64 8w 2c 2o 5l ps`: warps, blocks of a cluster, blocks an SM, latency;
    then what may be done with it.

    p: blocks may be persistent. s: tiles may be split along k. d: on the CUDA cores. g: gathered.
        r: fast runs. +16: extra_n.
    b: swap_ab. A tile_m of 0 is as many rows as a has; u: as a sum of two powers of two
        (`with_rows`).
    Left out: tiles with what `config` has no field for.
    """
    names, found = {field.name for field in fields(config)}, []
    for entry in filter(None, (entry.split() for entry in text.split(","))):
        size, *words = entry
        how = next((word for word in words if word.isalpha()), "")
        given: dict[str, Any] = {HINTS[word[-1]]: int(word[:-1]) for word in words if re.fullmatch(r"\d+[wcol]", word)}
        given |= {"extra_n": int(word) for word in words if word.startswith("+")} | {FLAGS[letter]: True for letter in how if letter in FLAGS}
        if given.keys() <= names:
            tile_m, tile_n, tile_k = map(int, size.split("x"))
            found.append((config(tile_m, tile_n, tile_k, **{"num_ctas": 1, **given}), how))
    return tuple(found)


def with_rows(c: C, how: str, m: int) -> C | None:
    """A tile_m of 0 becomes the rows there are: the next power of two; with u the next sum of two,
    None where that is no less.
    """
    if c.tile_m:
        return c
    whole = max(8, next_pow2(m))
    if "u" not in how:
        return replace(c, tile_m=whole)
    first = whole // 2
    rest = max(16, next_pow2(m - first))
    given: dict[str, Any] = {"tile_m": first, "extra_n": rest}  # a config that has them: else `tiles_of` left it out
    return replace(c, **given) if first + rest < whole else None


def tables(g: Gemm, device: Device) -> str:
    """The tiles that may be worth timing, as text."""
    hopper, blackwell, wide = device.arch == "sm_90", device.arch in ("sm_100", "sm_103"), g.loads_wide(device)
    if g.dtype is torch.float32:
        return (known.TF32_HOPPER if hopper and wide else known.TF32) if g.tf32 else known.FLOAT32_HOPPER if hopper and wide else known.FLOAT32
    if not wide:
        return known.NARROW
    if g.dtype in FP8:
        if not g.k_major:
            return known.TURNED_FP8
        if hopper and g.scaling is Scaling.BLOCK:
            return f"{known.HOPPER_BLOCK_FEW}, {known.HOPPER_BLOCK}" if g.m <= 32 else known.HOPPER_BLOCK
        if hopper:
            few = f"{known.HOPPER_FP8_FEW}, " if g.m <= known.MOST_SUM_ROWS else ""
            return few + (known.HOPPER_FP8 if g.fast else known.HOPPER_FP8_PRECISE)
        return known.BLACKWELL_FP8 if blackwell else known.CONSUMER_FP8
    if g.gated and blackwell:
        return known.BLACKWELL_GATED
    many = known.MANY.get(device.arch, known.AMPERE)
    if hopper and known.LEAST_SUM_ROWS <= g.m <= known.MOST_SUM_ROWS:
        many = f"{known.HOPPER_SUMS}, {many}"
    if g.m > known.FEW:
        return f"{many}, {known.HOPPER_GATHERED}" if hopper and g.pitch % 32 else many
    dot = known.DOT[next_pow2(g.m)] if g.m <= known.MOST_DOT_ROWS and g.k_major else ""
    if hopper:
        return f"{dot}, {known.HOPPER_FEW}" if g.m <= 32 else f"{known.HOPPER_BATCH}, {many}"
    return f"{dot}, {known.FEWER.get(device.arch, known.SMALL_FEW)}, {many}"


def tiles_for(g: Gemm, device: Device, config: type[C]) -> Iterator[tuple[C, str]]:
    """The tiles of `tables` that fit the rows, each as it is and persistent where there is more
    than a wave, with what may be done with it.
    """
    tallest = max(64, next_pow2(g.m))
    for found, how in tiles_of(tables(g, device), config):  # type: ignore[arg-type]  # a class is hashable
        c = with_rows(found, how, g.m)
        if c is None or c.tile_m > tallest or (c.tile_shape[0] < g.m <= known.FEW and device.arch == "sm_90"):
            continue
        yield c, how
        # One row: its launch could not be early (a decode step of Llama-3.2-1B on an H200: 895 us,
        # 957 with persistent blocks).
        if "p" in how and g.m * g.batch > 1 and g.tiles(c) > c.resident(device):
            yield replace(c, persistent=True), ""


def cpu_tiles(g: Gemm, config: type[C]) -> Iterator[C]:
    """Few, large tiles: each step of the interpreter is a numpy call, and padding is copied and
    multiplied like data.
    """
    even = g.n & -g.n  # the largest power of two that divides n
    tile_n = 4096 if g.n >= 1 << 14 else min(max(even, 128), 512)
    tile_k = GROUP if g.scaling is Scaling.BLOCK else next_pow2(min(g.k, 2048))
    yield config(next_pow2(min(g.m, 512)), min(tile_n, next_pow2(g.n)), tile_k, persistent=True)


# ------------------------------------------------------------------------------------------- counts
def kinds(g: Gemm, c: Tile) -> tuple[str, ...]:
    """Of the operations: how well a tile of this shape feeds the tensor cores, and what its
    operands or its epilogue make of that.
    """
    if c.form == "dot":
        return ("dot", f"dot{c.tile_m}")
    if g.dtype is torch.float32:
        return ("tf32" if g.tf32 else "fma",)
    longer, wide = c.tile_shape[::-1] if c.swap_ab else c.tile_shape
    if c.form:
        shape = c.form
    elif (c.num_ctas or 1) > 1:
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
    if g.dtype in FP8:
        of_scaling = {Scaling.ROW: ("row",), Scaling.BLOCK: ("block",)}.get(g.scaling, ())
        more = ("fp8", *of_scaling, *(() if g.fast or g.scaling is Scaling.BLOCK else ("precise",)))
    own = f"{g.dtype.itemsize}{'b' if g.scaling is Scaling.BLOCK else ''} {tile_name(c)}"
    return (shape, *more, *(("gated",) if g.gated else ()), own)


def tile_name(c: Tile) -> str:
    """All of a tile that the compiler sees."""
    how = "".join(letter for letter, on in (("b", c.swap_ab), ("p", c.persistent), (c.form[:1], c.form)) if on)
    rows = "m" if c.swap_ab or c.form == "dot" else c.tile_m
    return f"{rows}x{c.tile_n}+{c.extra}x{c.tile_k} {c.num_ctas or 1}{c.occupancy}{c.num_worker_warps or 0}{c.latency}{how}"


def work(g: Gemm, c: Tile, device: Device, spill: int = 0) -> Work:
    """What a launch of whole tiles asks for."""
    size, ctas = g.dtype.itemsize, c.num_ctas or 1
    tile_m, tile_n = c.tile_shape
    longer, wide = (tile_n, tile_m) if c.swap_ab else (tile_m, tile_n)
    if c.form == "dot" or g.dtype is torch.float32:
        flops = 2.0 * tile_m * tile_n * c.tile_k / ctas
    else:  # multiply-adds of an MMA of 64 rows, or the time its operands take out of shared memory (128 bytes a clock)
        rows = -(-longer // (64 * ctas)) * ctas
        flops = 2.0 * c.tile_k * rows * sum(max(64 * max(w, 8), 32 * (64 + w)) for w in (wide - c.extra, c.extra) if w) / ctas
    filled = min(tile_m, g.m), tile_n
    step_bytes = (tile_m + tile_n) * c.tile_k * size // ctas
    one_b = g.n * g.k * size
    size_b = one_b * (g.matrices_b or g.batch)
    tiles_m, tiles, resident = -(-g.m // tile_m), g.tiles(c), c.resident(device)
    bands_of_rows = -(-tiles_m // c.group)
    again = AGAIN * (bands_of_rows - 1) * size_b * min(1.0, max(0.0, one_b / device.l2_bytes - 0.3))
    return Work(
        blocks=tiles,
        resident=resident,
        per_sm=c.occupancy,
        sms=ctas,
        steps=-(-g.k // c.tile_k),
        flops=flops,
        kinds=kinds(g, c),
        fill=sum(filled) * c.tile_k * size / ctas * (1.25 if ctas > 1 else 1.0),
        padding=max(0, tile_m - g.m) * c.tile_k * size / ctas,
        dram=g.size_bytes + again,
        span=min(size_b, min(tiles, resident) / tiles_m * tile_n * g.k * size),
        aligned=g.pitch,
        unaligned=sum(rows for rows, pitch in zip(filled, g.pitches, strict=True) if pitch < 128) / sum(filled),
        serial=float(g.scaling is Scaling.BLOCK),
        out=tile_m * tile_n / ctas,
        persistent=c.persistent,
        spill=spill,
        stages=max(1, min(c.latency, STEPS_BYTES // c.occupancy // step_bytes)),
    )


def split_work(whole: Work, split_tiles: int, parts: int) -> Work | tuple[Work, ...]:
    """The same with the last `split_tiles` of the tiles cut along k into `parts` blocks each: whole
    waves, then one of parts.
    """
    if not split_tiles:
        return whole
    tiles, sms, size = whole.blocks, whole.sms, 4
    last = replace(
        whole,
        blocks=split_tiles * parts,
        steps=-(-whole.steps // parts),
        dram=whole.dram * split_tiles / tiles,
        span=whole.span * min(split_tiles, whole.resident / parts) / min(tiles, whole.resident),
        partial=2.0 * split_tiles * parts * whole.out * sms * size,
    )
    return last if split_tiles == tiles else (replace(whole, blocks=tiles - split_tiles, dram=whole.dram * (1 - split_tiles / tiles)), last)


def family(g: Gemm, c: Tile) -> str:
    """What the model errs alike about: operands, epilogue, tile and how it is walked."""
    short = "" if c.swap_ab or c.form == "dot" or g.m > c.tile_m // 2 else f"<{next_pow2(g.m)}"
    options = f"{g.dtype.itemsize}{g.scaling.name[0]}{'g' * g.gated}{'t' * g.tf32}"
    return f"{options} {tile_name(c)}{short}"
