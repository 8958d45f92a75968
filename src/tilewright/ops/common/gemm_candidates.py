"""Tiles of products that may be worth a timing: those of the tables (gemm_tiles.py) that fit the
rows, and forms of them: persistent, with shares of k, and moved, so that the last tiles end with
the output (`tile_start`).
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from functools import cache
from typing import Any, TypeVar

import torch

from ...launch import Device, next_pow2
from . import gemm_tiles as known
from .gemm_choices import Gemm, Split, Tile
from .scaling import FP8, GROUP, Scaling
from .tiles import START_UNIT

PARTS = (2, 3, 4, 5, 6, 8, 12, 16)
LEAST_PART = 512  # of k
MOST_FEW_WAVES = 2
MOST_SPLIT_WAVES = 8  # beyond, a last wave is not worth a second launch
WIDE_STORES = 16  # elements: the rows of an output that moved tiles write many elements of at once
C = TypeVar("C", bound=Tile)
FLAGS = {"b": "swap_ab", "d": "dot", "r": "fast_runs"}
HINTS = {"l": "latency", "c": "num_ctas", "o": "occupancy", "w": "num_worker_warps"}


@cache
def tiles_of(text: str, config: type[C]) -> tuple[tuple[C, str], ...]:
    """Tiles like `128x256x64 8w 2c 2o 5l ps`: warps, blocks of a cluster, blocks an SM, latency;
    then what may be done with it.

    p: blocks may be persistent. s: tiles may be split along k. d: on the CUDA cores, where k is the
        last axis. r: fast runs. f: only where all tiles fit MOST_FEW_WAVES. o: only for one
        product, no batch. +16: extra_n.
    b: swap_ab. A tile_m of 0 is as many rows as a has; u: rows, without b columns, are a sum of two
        powers of two (`fitted_to`).
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


def fitted_to(c: C, how: str, m: int, n: int) -> C | None:
    """A tile_m of 0 becomes the rows there are, the next power of two, or with u half of it.

    u: more rows beside them, without swap_ab columns, that pad least; None where tiles without pad
    no more, and where columns fit one tile or are more than CUT.
    """
    if "u" not in how:
        return c if c.tile_m else changed(c, tile_m=max(8, next_pow2(m)))
    if not c.swap_ab and not c.tile_n < n <= known.CUT[1]:
        return None
    side, size, first = ("tile_m", m, c.tile_m or max(8, next_pow2(m)) // 2) if c.swap_ab else ("tile_n", n, c.tile_n)

    def padded(length: int) -> int:
        return -(-size // length) * length

    more = min((16 << i for i in range(10) if 16 << i < first), key=lambda width: padded(first + width), default=first)
    given: dict[str, Any] = {side: first, "extra_n": more}  # a config that has them: else `tiles_of` left it out
    return changed(c, **given) if padded(first + more) < padded(first) else None


@cache
def changed(c: C, **fields_of: Any) -> C:
    """`replace`, once for all problems: it takes half of the time of listing candidates."""
    return replace(c, **fields_of)


def tables(g: Gemm, device: Device, of: known.Tables = known.TABLES, *, shared: bool = False) -> str:
    """The tiles that may be worth timing, as text: of the first kind of operands that the
    architecture has tiles for. shared: k is short enough for sums in the tensor core because blocks
    share it.
    """
    kinds = ["gated", "wide"] if g.gated else ["wide"]
    if g.dtype in FP8:
        short = "row" if g.scaling is Scaling.ROW else "fp8"
        of_sums = short if shared or g.k <= g.most_fast else "precise"
        kinds = ["block" if g.scaling is Scaling.BLOCK else of_sums, "fp8"] if g.k_major else ["turned"]
    if g.dtype is torch.float32:
        kinds = ["tf32" if g.tf32 else "float32"]
    if not g.loads_wide(device):
        kinds = [f"narrow {kinds[-1]}", "narrow"]
    rows = next((of[device.arch][kind] for kind in kinds if kind in of[device.arch]), ())
    return ", ".join(tiles for least, most, tiles in rows if least <= g.m <= most)


def tiles_for(g: Gemm, device: Device, config: type[C]) -> Iterator[C]:
    """The tiles of `tables` that fit the rows: each as it is, persistent where there is more than a
    wave, and with the last wave split. Where k is too long for one sum of 8-bit products, also
    those whose blocks share k so that each has such a sum. On a CPU those of `cpu_tiles`.
    """
    if device.is_cpu:
        yield from cpu_tiles(g, config)
        return
    usual = list(_tiles_of_text(tables(g, device), g, device, config))
    yield from usual
    if g.k > g.most_fast > 0 and g.k_major and g.scaling is not Scaling.BLOCK:
        shared = _tiles_of_text(tables(g, device, shared=True), g, device, config, least=-(-g.k // g.most_fast))
        known_ones = set(usual)
        yield from (c for c in shared if c.share(g, device) <= g.most_fast and c not in known_ones)


def _tiles_of_text(text: str, g: Gemm, device: Device, config: type[C], least: int = 0) -> Iterator[C]:
    """least: only tiles whose blocks share k, at least so many a tile."""
    tallest = max(64, next_pow2(g.m))
    for found, how in tiles_of(text, config):  # type: ignore[arg-type]  # a class is hashable
        c = fitted_to(found, how, g.m, g.n)
        if c is None or c.tile_m > tallest or (c.tile_shape[0] < g.m <= known.FEW and device.arch == "sm_90"):
            continue
        tiles, resident = g.tiles(c), c.resident(device)
        if "d" in how and not g.k_major:
            continue
        if ("f" in how and tiles > MOST_FEW_WAVES * resident) or ("o" in how and g.batch > 1):
            continue
        if not least:
            yield c
        # One row: its launch could not be early (a decode step of Llama-3.2-1B on an H200: 895 us,
        # 957 with persistent blocks).
        if "p" in how and g.m * g.batch > 1 and tiles > resident and not least:
            yield changed(c, persistent=True)
        left = tiles % resident
        if ("s" in how or least) and isinstance(c, Split) and left and tiles < MOST_SPLIT_WAVES * resident:
            waves = MOST_SPLIT_WAVES if least else 2
            fitting = [parts for parts in PARTS if parts >= least and parts * left <= waves * resident and parts * LEAST_PART <= g.k]
            fitting.sort(key=lambda parts: -(-parts * left // resident) / parts)  # how long the last wave takes
            yield from (changed(c, split_k=parts) for parts in fitting[:2])


def cpu_tiles(g: Gemm, config: type[C]) -> Iterator[C]:
    """Few, large tiles: each step of the interpreter is a numpy call, and padding is copied and
    multiplied like data.
    """
    even = g.n & -g.n  # the largest power of two that divides n
    tile_n = 4096 if g.n >= 1 << 14 else min(max(even, 128), 512)
    tile_k = GROUP if g.scaling is Scaling.BLOCK else next_pow2(min(g.k, 2048))
    yield config(next_pow2(min(g.m, 512)), min(tile_n, next_pow2(g.n)), tile_k, persistent=True)


def may_move(g: Gemm, c: Tile, device: Device) -> bool:
    """Whether the last rows of tiles hang over the end, where a TMA unit fills in zeros, and could
    begin earlier. Columns that hang over cost nothing: few blocks have them (H200).

    Stores of a cluster that shares rows are narrow, and spill.
    """
    codes = g.dtype in FP8 and g.k_major and g.scaling is not Scaling.BLOCK
    if not (codes or g.dtype.itemsize == 2) or g.n % WIDE_STORES or c.persistent or ((c.num_ctas or 1) > 1 and not c.swap_ab):
        return False
    by_tma = device.is_cpu or (device.has_pdl and g.loads_wide(device))
    rows, columns = c.tile_shape
    return by_tma and g.m > rows and -g.m % rows >= START_UNIT and rows % START_UNIT == 0 and columns % START_UNIT == 0


def with_moved(tiles: Iterable[C], g: Gemm, device: Device, legal: Callable[[C], bool]) -> Iterator[C]:
    """The tiles, each with itself moved behind it where that may be worth a timing. Their config
    has a field `moved`.

    In more waves others hide a slow tile, and each pays for the stores (H200, notes/LOG.md).
    """
    for c in tiles:
        yield c
        few = device.is_cpu or g.tiles(c) <= MOST_FEW_WAVES * c.resident(device)
        if few and may_move(g, c, device) and legal(moved := changed(c, moved=True)):
            yield moved
