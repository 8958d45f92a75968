"""What `grouped_gemm` decides from (Problem) and what it decides (Config), and the launches that
follow.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ...launch import Cost, Device, Launch, next_pow2
from ...select import Choices, Work
from ..common import gemm_choices, groups
from ..common.gemm_candidates import cpu_tiles, tables, tiles_of
from ..common.gemm_choices import Gemm, Tile
from ..common.groups import expected_panels
from ..common.rows import grid_fits
from ..common.scaling import GROUP, Scaling, fast_sum, most_fast, random_codes, random_scales, scale_shapes
from .candidates import TABLES
from .kernels import grouped_gemm_kernel, grouped_gemm_map_kernel

MAP_WIDTH = 128  # panels that a block of the map kernel writes at once
UNEQUAL = 0.3  # how far groups are from their mean, at most


@dataclass(frozen=True, slots=True)
class Problem:
    """rows: of all groups together; with masked, of the room that each has.

    expected_rows: rows of a group on average, as far as the host knows; 0: as many as there is room
        for.
    sizes: rows of each group, for `inputs` alone; () for equal ones, or, masked, expected_rows
        times 0.7 to 1.3.
    """

    groups: int
    rows: int
    n: int
    k: int
    dtype: torch.dtype = torch.bfloat16
    masked: bool = False
    trans_b: bool = True
    scaling: Scaling = Scaling.NONE
    out_dtype: torch.dtype = torch.bfloat16
    expected_rows: int = 0
    sizes: tuple[int, ...] = ()

    def group_rows(self) -> int:
        """Rows of a group on average."""
        return self.expected_rows or (self.rows if self.masked else -(-self.rows // self.groups))

    def whole_panels(self, tile_m: int) -> bool:
        """Whether each group has room of its own for a whole number of tiles."""
        return self.masked and self.rows % tile_m == 0

    @property
    @lru_cache(maxsize=64)  # as in matmul
    def gemm(self) -> Gemm:
        """A product for each group, all of the mean number of rows."""
        rows = self.group_rows()
        size = self.groups * ((rows + self.n) * self.k * self.dtype.itemsize + rows * self.n * self.out_dtype.itemsize)
        fast = most_fast(self.dtype, self.out_dtype)
        return Gemm(rows, self.n, self.k, self.dtype, size, batch=self.groups, scaling=self.scaling, trans_b=self.trans_b, most_fast=fast)

    def group_sizes(self) -> tuple[int, ...]:
        """Rows of each group in `inputs`."""
        if self.sizes:
            return self.sizes
        if not self.masked:
            each, more = divmod(self.rows, self.groups)
            return tuple(each + (i < more) for i in range(self.groups))
        spread = torch.rand(self.groups, generator=torch.Generator().manual_seed(self.groups)).mul(2 * UNEQUAL).add(1 - UNEQUAL)
        return tuple(min(self.rows, round(self.group_rows() * float(s))) for s in spread)

    def cost(self) -> Cost:
        sizes = self.group_sizes()
        rows, used = sum(sizes), sum(size > 0 for size in sizes)
        read = (rows * self.k + used * self.n * self.k) * self.dtype.itemsize
        return Cost(read + rows * self.n * self.out_dtype.itemsize, 2 * rows * self.n * self.k)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        sizes = torch.tensor(self.group_sizes(), dtype=torch.int32)
        scales: dict[str, Tensor | None] = {"scale_a": None, "scale_b": None}
        if self.scaling:
            batch = self.groups if self.masked else None
            shapes = scale_shapes(self.scaling, self.rows, self.n, self.k, batch_a=batch, batch_b=self.groups)
            scales = {name: random_scales(shape, device, scaling=self.scaling) for name, shape in zip(scales, shapes, strict=True)}
        shape_a = (self.groups, self.rows, self.k) if self.masked else (self.rows, self.k)
        shape_b = (self.groups, self.n, self.k) if self.trans_b else (self.groups, self.k, self.n)
        return {
            "a": random_codes(shape_a, self.dtype, device),
            "b": random_codes(shape_b, self.dtype, device),
            "offsets": None if self.masked else sizes.cumsum(0, dtype=torch.int32).to(device),
            "counts": sizes.to(device) if self.masked else None,
            **scales,
            "trans_b": self.trans_b,
            "out_dtype": self.out_dtype,
            "expected_rows": self.expected_rows or None,
        }


@dataclass(frozen=True, slots=True)
class Config(Tile):
    """One way to compute it: a tile.

    tile_m: rows of a panel; group: panels in a band of the tile order. Blocks that are not
    persistent: one for each tile that there could be; those without a panel leave at once.
    store_tma: let the TMA unit write the result.
    """

    store_tma: bool = True

    def most_panels(self, p: Problem) -> int:
        """Panels that there could be, whatever the sizes of the groups."""
        return p.groups * -(-p.rows // self.tile_m) if p.masked else p.rows // self.tile_m + min(p.groups, p.rows)


def candidates(p: Problem, device: Device) -> Iterator[Config]:
    """Each tile with a block for each, and persistent where that compiles well; then other bands of
    the tile order.
    """
    g = p.gemm
    if device.is_cpu:
        for c in cpu_tiles(g, Config):
            yield from (c, Config(min(c.tile_m, 32), min(c.tile_n, 64), min(c.tile_k, 64)))
        return
    rows, by_tma = next_pow2(g.m), device.arch != "sm_90" or p.n * p.out_dtype.itemsize % 16 == 0
    fp32 = device.arch == "sm_90" and p.out_dtype is torch.float32
    found = []
    for tile, how in tiles_of(tables(g, device, TABLES), Config):
        if tile.swap_ab:
            tile_k = min(tile.tile_k, max(64, next_pow2(p.k)))
            found += [
                replace(tile, tile_m=m, tile_k=tile_k, persistent=True, store_tma="p" in how) for m in dict.fromkeys((max(8, rows), max(8, 2 * rows)))
            ]
        elif tile.tile_m <= max(128, rows):
            if ("p" in how or "n" in how) and (by_tma or "y" in how) and (p.whole_panels(tile.tile_m) or "m" not in how):
                found.append(replace(tile, persistent=True, store_tma="p" in how and not (fp32 and "w" in how)))
            found.append(tile)
    yield from found
    yield from (replace(c, group=group) for c in found if not c.swap_ab for group in (4, 16))


def legal(p: Problem, c: Config, device: Device) -> bool:
    """Block scales: a step lies in one group of k. A grid has room for a block for each tile."""
    if p.scaling is Scaling.BLOCK and c.tile_k > GROUP:
        return False
    return c.persistent or grid_fits(c.most_panels(p) * -(-p.n // c.tile_n))


def work(p: Problem, c: Config, device: Device) -> tuple[Work, ...]:
    """What the products ask for, with groups as unequal as those of `inputs`."""
    rows = p.group_rows()
    return groups.work(p.gemm, c, p.groups * expected_panels(rows, UNEQUAL * rows / 3**0.5, c.tile_m), c.most_panels(p), device)


def family(p: Problem, c: Config) -> str:
    """What the model errs alike about."""
    return f"{gemm_choices.family(p.gemm, c)}{'' if c.group == 8 else f' {c.group}'}"


CHOICES = Choices("grouped_gemm", candidates, legal, work, family, regimes_too=True)
space = CHOICES.space


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """The map of panels, and the products."""
    panels = c.most_panels(p)
    scratch = {"panels": ((3, 1 + panels), torch.int32)}
    how = {"tile_m": c.tile_m, "groups": next_pow2(p.groups), "masked": p.masked, "width": MAP_WIDTH}
    tiles = panels * -(-p.n // c.tile_n)
    unchecked = p.scaling is Scaling.BLOCK and c.num_worker_warps == 8  # as in matmul: on 4 warps it loses
    constants = {
        "group_m": c.group,
        "scaling": int(p.scaling),
        "fast_acc": fast_sum(p.dtype, p.out_dtype, p.k),
        "even_m": unchecked and p.whole_panels(c.tile_m),
        "even_n": unchecked and p.n % c.tile_n == 0,
    }
    blocks = min(tiles, c.resident(device)) if c.persistent else tiles
    optional = {"scale_a": p.scaling, "scale_b": p.scaling}
    panels_of = Launch(grouped_gemm_map_kernel, (p.groups,), how, scratch=scratch)
    return panels_of, Launch.of(grouped_gemm_kernel, (blocks,), p, c, constants, optional=optional)
