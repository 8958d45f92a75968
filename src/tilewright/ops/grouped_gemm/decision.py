"""What `grouped_gemm` decides from (Problem) and what it decides (Config), and the launches that follow."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...launch import Cost, Device, Plan, next_pow2
from ..mma_tiles import Tile, config_of, cpu_tiles, few_rows_tiles, loads_wide, run_us, tiles_for, unranked_tiles
from ..scaling import FP8, Scaling, fast_sum, random_codes, random_scales, scale_shapes
from .kernels import grouped_gemm_kernel, grouped_gemm_map_kernel

MAP_WIDTH = 128  # panels that a block of the map kernel writes at once
MOST_CONFIGS = 32


@dataclass(frozen=True, slots=True)
class Problem:
    """rows: of all groups together; with masked, of the room that each has.

    expected_rows: rows of a group on average, as far as the host knows; 0: as many as there is room for.
    sizes: rows of each group, for `inputs` alone; () for equal ones, or, masked, expected_rows times 0.7 to 1.3.
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

    def group_sizes(self) -> tuple[int, ...]:
        """Rows of each group in `inputs`."""
        if self.sizes:
            return self.sizes
        if not self.masked:
            each, more = divmod(self.rows, self.groups)
            return tuple(each + (i < more) for i in range(self.groups))
        spread = torch.rand(self.groups, generator=torch.Generator().manual_seed(self.groups)).mul(0.6).add(0.7)
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
class Config:
    """One way to compute it.

    tile_m, tile_n, tile_k: of one step, powers of two.
    group: panels of tile_m rows in a band of the tile order (L2 reuse).
    weights_first: b's tile is the first operand of the MMA and the accumulator is transposed: for groups of few rows.
    persistent: blocks that fit on the device at once walk over the tiles; else there is a block for each that there could be, and those of
        empty room leave at once.
    store_tma: let the TMA unit write the result.
    rest_m: rows of a panel of a second launch, for what a group has beyond whole tiles where that is no more; 0: none, the last tile is padded.
    latency, num_ctas, occupancy, num_worker_warps: compiler hints (pipeline depth, cluster size, blocks per SM, warps that compute).
    """

    tile_m: int
    tile_n: int
    tile_k: int
    group: int = 8
    weights_first: bool = False
    persistent: bool = False
    store_tma: bool = True
    rest_m: int = 0
    latency: int = 5
    num_ctas: int | None = None
    occupancy: int = 1
    num_worker_warps: int | None = None

    def most_panels(self, p: Problem) -> int:
        """Panels that there could be, whatever the sizes of the groups."""
        return p.groups * -(-p.rows // self.tile_m) if p.masked else p.rows // self.tile_m + min(p.groups, p.rows)

    def resident(self, device: Device) -> int:
        """Blocks that the device holds at once."""
        return max(1, device.sms * self.occupancy // (self.num_ctas or 1))


def plan(p: Problem, c: Config, device: Device) -> Plan:
    """Grid and constants of the map of panels, and of the products that follow: of whole panels, then, with rest_m, of the rests."""
    workspace: tuple[tuple[tuple[int, ...], torch.dtype], ...] = (((3, 1 + c.most_panels(p)), torch.int32),)
    rests: Plan | None = None
    if c.rest_m:
        workspace = (*workspace, ((3, 1 + p.groups), torch.int32))
        small = replace(c, tile_m=c.rest_m, tile_n=256, num_ctas=1, num_worker_warps=4, latency=4)  # the most a warp group holds beside 64 rows
        rests = _products(p, small, p.groups, device, None)
    products = _products(p, c, c.most_panels(p), device, rests)
    constants = (c.tile_m, c.rest_m, next_pow2(p.groups), p.masked, MAP_WIDTH)
    return Plan(grouped_gemm_map_kernel, (p.groups,), constants, workspace=workspace, then=products)


def _products(p: Problem, c: Config, most: int, device: Device, then: Plan | None) -> Plan:
    """The products of at most `most` panels of c.tile_m rows."""
    tiles = most * -(-p.n // c.tile_n)
    blocks = min(tiles, c.resident(device)) if c.persistent else tiles
    unchecked = p.scaling is Scaling.BLOCK and c.num_worker_warps == 8  # as in matmul: on 4 warps it loses
    even = (unchecked and p.masked and p.rows % c.tile_m == 0, unchecked and p.n % c.tile_n == 0)
    sums = (int(p.scaling), fast_sum(p.dtype, p.out_dtype, p.k))
    how = (p.masked, p.trans_b, c.weights_first, *sums, *even, c.persistent, c.store_tma, c.latency)
    constants = (c.tile_m, c.tile_n, c.tile_k, c.group, *how)
    return Plan(grouped_gemm_kernel, (blocks,), constants, c.num_ctas, c.occupancy, c.num_worker_warps, then=then)


def space(p: Problem, device: Device) -> list[Config]:
    """Every config worth timing on `device`, the one for an untuned call first; all are legal."""
    if p.dtype in FP8 and not device.has_fp8:
        return []
    if device.is_cpu:
        first, second = cpu_tiles(p.group_rows(), p.n, p.k, p.scaling)
        return list(dict.fromkeys((config_of(Config, first, persistent=True), config_of(Config, second))))
    configs = sorted(_configs(p, device), key=lambda c: estimate_us(p, c, device))
    best = configs[0]
    others = [replace(best, group=4), replace(best, group=16)]
    if p.group_rows() > 64:
        unranked = [config_of(Config, tile) for tile in unranked_tiles(device, p.dtype, wide_loads=_layout(p, device)[1])]
        by_tma = p.n * p.out_dtype.itemsize % 16 == 0  # else, walking, they spill
        others += [replace(c, persistent=walks) for c in unranked for walks in ((True, False) if by_tma else (False,))]
        if unranked:
            others += [replace(c, rest_m=64) for c in configs if c.tile_m == 128 and c.tile_k == 64][:3]
    few = _few_rows(p, device)
    leading = [] if p.dtype in FP8 else few[:1]
    return list(dict.fromkeys((*leading, best, *few, *others, *configs)))[:MOST_CONFIGS]


def _few_rows(p: Problem, device: Device) -> list[Config]:
    """Bound by reading b: panels that hold a third more rows than a group has on average, and blocks that walk over them."""
    k_major, wide = _layout(p, device)
    tiles = few_rows_tiles(device, p.dtype, p.scaling, p.group_rows() * 4 // 3, p.k, k_major=k_major, wide_loads=wide)

    def by_tma(tile: Tile) -> bool:  # which fails to compile where a warp group has more than 64 columns, and spills after long steps on 4 warps
        warps = tile.num_worker_warps or 4
        return tile.tile_n <= 16 * warps and (warps == 8 or tile.tile_k * p.dtype.itemsize <= 512)

    return [config_of(Config, tile, persistent=True, store_tma=by_tma(tile)) for tile in tiles]


def _layout(p: Problem, device: Device) -> tuple[bool, bool]:
    """Whether k is the last axis of both operands, and whether all their rows can be read 16 bytes at a time."""
    lengths = p.k, p.k if p.trans_b else p.n
    return p.trans_b, loads_wide(device, p.dtype, *lengths)


def _configs(p: Problem, device: Device) -> Iterator[Config]:
    rows = p.group_rows()
    tallest = max(64, next_pow2(rows))
    k_major, wide = _layout(p, device)
    tiles = tiles_for(device, p.dtype, p.scaling, k_major=k_major, wide_loads=wide, fast=fast_sum(p.dtype, p.out_dtype, p.k))
    for tile in tiles:
        if tile.tile_m > tallest and tile.tile_m > min(t.tile_m for t in tiles):
            continue
        store_tma = _walking_store(tile, p, device)
        if store_tma is not None:
            yield config_of(Config, tile, persistent=True, store_tma=store_tma)
        yield config_of(Config, tile)


# tile_m, tile_n, warps of the tiles that blocks may walk over, and whether TMA may then write the result: with the others tileiras 13.4
# fails, spills, or waits for each MMA. In the order of 16-bit operands, 8-bit ones, 8-bit ones scaled by the block, 8-bit ones with fast sums.
_Walks = tuple[dict[tuple[int, int, int | None], bool], ...]
_BLACKWELL_WALKS: _Walks = (
    {(128, 128, None): False, (256, 256, None): False, (256, 128, None): False, (128, 64, None): True},
    {(128, 64, None): False},
    {(128, 128, None): True, (256, 128, None): True, (128, 64, None): True},
)
_HOPPER_WALKS: _Walks = (
    {(128, 128, 4): True, (256, 256, 8): True, (128, 256, 8): True, (256, 128, 8): True, (64, 256, 8): True, (64, 128, 8): True, (64, 64, 4): True},
    {(128, 128, 8): True, (256, 128, 8): False, (64, 256, 8): True, (64, 128, 4): False, (128, 64, 8): True},
    {(128, 128, 8): True, (64, 128, 4): False, (128, 64, 8): True},
    {(128, 256, 8): True, (128, 128, 4): True, (128, 128, 8): True, (256, 128, 8): True, (128, 64, 8): True},
)
# Those of them that do where rows of the result are no multiple of 16 bytes, which TMA can't write.
_HOPPER_WALKS_NARROW = ((256, 256, 8), (256, 128, 8), (64, 128, 8), (64, 64, 4), (64, 128, 4))


def _walking_store(tile: Tile, p: Problem, device: Device) -> bool | None:
    """Config.store_tma of persistent blocks, None where there must be a block for each tile."""
    known = {"sm_90": _HOPPER_WALKS, "sm_100": _BLACKWELL_WALKS, "sm_103": _BLACKWELL_WALKS}.get(device.arch)
    if known is None or tile.latency == 1:  # narrow loads
        return True if tile.walks and p.dtype.itemsize > 1 else None
    key = (tile.tile_m, tile.tile_n, tile.num_worker_warps)
    if tile.occupancy > 1 or (device.arch == "sm_90" and p.n * p.out_dtype.itemsize % 16 and key not in _HOPPER_WALKS_NARROW):
        return None
    fast = device.arch == "sm_90" and fast_sum(p.dtype, p.out_dtype, p.k)
    if p.scaling is Scaling.BLOCK and key == (128, 128, 8) and not p.masked:
        return None
    walks = known[2 if p.scaling is Scaling.BLOCK else 3 if fast else 1 if p.dtype.itemsize == 1 else 0]
    return walks.get(key)


def estimate_us(p: Problem, c: Config, device: Device) -> float:
    """Time with groups of average size: rounds of tiles, or reading the weights, plus blocks that come for nothing."""
    rows, tiles_n = p.group_rows(), -(-p.n // c.tile_n)
    tiles = p.groups * -(-rows // c.tile_m) * tiles_n
    tile = Tile(c.tile_m, c.tile_n, c.tile_k, c.num_ctas, c.occupancy, c.num_worker_warps)
    us = run_us(tile, tiles, p.k, p.dtype, p.scaling, device)
    if c.persistent and p.scaling is Scaling.BLOCK:
        us *= 1.05
    if not c.persistent:
        us += 0.33 * -(-(c.most_panels(p) * tiles_n) // c.resident(device))
    read = p.groups * p.n * p.k * p.dtype.itemsize
    return max(us, read / (device.memory_gbs * 1e3)) + 1e-3 * us
