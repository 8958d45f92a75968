"""What a launch of `attention_decode` may depend on, and what it comes to."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...launch import Cost, Device, Plan, next_pow2
from .kernels import attention_decode_kernel, attention_decode_merge_kernel


@dataclass(frozen=True, slots=True)
class Problem:
    """What a plan may depend on. max_len: keys a sequence may come to, a power of two or more than it holds; never its length of the moment.

    page_size: 0 for a contiguous cache. has_start, has_len: kv_start, kv_len are given.
    """

    batch: int
    q_heads: int
    kv_heads: int
    max_len: int
    head_dim: int
    dtype: torch.dtype
    page_size: int = 0
    window: int | None = None
    has_start: bool = False
    has_len: bool = True
    return_lse: bool = False

    def _lengths(self) -> list[int]:
        """Lengths of the sequences: the whole cache, down to a third of it in the last; with several, one has none."""
        if not self.has_len:
            return [self.max_len] * self.batch
        lengths = [self.max_len - (self.max_len * i * 2) // (3 * self.batch) for i in range(self.batch)]
        return [*lengths[:-1], 0] if 2 < self.batch < 8 else lengths

    def _starts(self) -> list[int]:
        return [(self.max_len * i) // (4 * self.batch) if self.has_start else 0 for i in range(self.batch)]

    def cost(self) -> Cost:
        keys = sum(max(0, min(n - start, self.window or n)) for n, start in zip(self._lengths(), self._starts(), strict=True))
        elements = 2 * keys * self.kv_heads + 2 * self.batch * self.q_heads
        return Cost(elements * self.head_dim * self.dtype.itemsize, 4 * keys * self.q_heads * self.head_dim)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=self.dtype, device=device)

        def int32(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        lengths, starts = self._lengths(), self._starts()
        options: dict[str, Any] = {"window": self.window, "return_lse": self.return_lse}
        options["kv_len"] = int32(lengths) if self.has_len else None
        options["kv_start"] = int32(starts) if self.has_start else None
        q = randn(self.batch, self.q_heads, 1, self.head_dim)
        key = torch.arange(self.max_len, device=device)
        unused = torch.stack([(key < start) | (key >= n) for n, start in zip(lengths, starts, strict=True)])  # [batch, max_len]
        if not self.page_size:
            k, v = (randn(self.batch, self.kv_heads, self.max_len, self.head_dim) for _ in range(2))
            unused = unused[:, None, :, None]
        else:
            max_pages = -(-self.max_len // self.page_size)
            pages = self.batch * max_pages
            table = torch.randperm(pages, dtype=torch.int32, device=device).view(self.batch, max_pages)
            k, v = (randn(pages, self.kv_heads, self.page_size, self.head_dim) for _ in range(2))
            unused = torch.nn.functional.pad(unused, (0, max_pages * self.page_size - self.max_len), value=True)
            shuffled = torch.empty(pages, self.page_size, dtype=torch.bool, device=device)
            shuffled[table.flatten().long()] = unused.view(pages, self.page_size)
            held = torch.arange(max_pages, device=device) * self.page_size < torch.tensor(lengths, device=device)[:, None]
            options["block_table"] = torch.where(held, table, 2147480000)  # entries past the length may be anything
            unused = shuffled[:, None, :, None]
        k, v = (torch.where(unused, torch.nan, x) for x in (k, v))  # memory that holds no key may hold anything
        return {"q": q, "k": k, "v": v, **options}


MOST_SPLITS = 64  # the merge holds one row of each in registers


@dataclass(frozen=True, slots=True)
class Config:
    """How the keys are cut and walked.

    tile_n: keys of a step; a power of two; in a paged cache a divisor of the page size.
    splits: ranges that the keys of a sequence are cut into; 1 needs no merge and no workspace.
    keys_first: the keys are the rows of the products and the heads their columns (at least 8); otherwise the heads are rows (at least 16).
    latency: prefetch hint of the k and v loads, 1 to 10.
    occupancy, num_worker_warps: compiler hints.
    """

    tile_n: int
    splits: int
    keys_first: bool = False
    latency: int = 4
    occupancy: int | None = None
    num_worker_warps: int | None = None


def space(p: Problem, device: Device) -> list[Config]:
    """Every config worth timing, the untuned default first.

    Nothing that is compiled in depends on max_len, so that a cache that grows while it decodes needs no new kernel: a range or a tile may be
    longer than the cache, and is then partly or wholly empty.
    """
    if device.is_cpu:
        return [Config(_tile(512, p), 1), Config(_tile(128, p), 3), Config(_tile(256, p), 2, keys_first=True)]
    configs = []
    for tile_n, keys_first, latency, occupancy, warps in _shapes(p, device):
        splits = _splits(p.batch * p.kv_heads, device.sms * occupancy)
        for n in (splits, min(MOST_SPLITS, 2 * splits)):
            configs.append(Config(_tile(tile_n, p), n, keys_first, latency, occupancy, warps))
    return list(dict.fromkeys(configs))


def _tile(tile_n: int, p: Problem) -> int:
    """On a CPU, and where a page is a tile or more, a tile is at most a page."""
    return min(tile_n, p.page_size) if p.page_size >= 128 else tile_n


def _shapes(p: Problem, device: Device) -> list[tuple[int, bool, int, int, int | None]]:
    """(tile_n, keys_first, latency, occupancy, num_worker_warps), the default first, as measured on an H200 (2026-11-21, notes/LOG.md)."""
    wide = p.head_dim > 64
    if p.dtype == torch.float32:
        # CUDA cores: sums on tensor cores round towards zero, and miss fp32's accuracy by a third (H200, 190 keys).
        return [(32 if not wide else 16, True, 1, 1, 8 if device.arch == "sm_90" else None)]
    if device.arch != "sm_90":
        if wide and p.head_dim > 128:
            return [(64, True, 2, 1, None)] if device.arch in ("sm_100", "sm_103") else [(32, False, 2, 1, None)]
        return [(64, True, 2, 1, None), (32, False, 2, 1, None)]
    if p.head_dim > 128:
        return [(128, True, 4, 1, 8), (64, True, 4, 1, 4), (128, True, 2, 1, 8), (64, False, 2, 1, 8)]
    shapes = [(128, True, 8, 1, 8), (128, True, 8, 2, 4)] if wide else [(128, True, 8, 2, 4), (128, True, 8, 1, 8)]
    shapes += [(128, True, 3, 2, 4), (64, True, 8, 2, 4), (64, True, 3, 4, 4), (128, False, 8, 1, 8), (128, False, 8, 2, 4)]
    if p.batch * p.kv_heads > 2 * device.sms and p.max_len <= 2048:
        shapes.insert(0, (128, True, 8, 2, 4))  # many short caches: blocks that end and start overlap
    if p.page_size in (16, 32):  # keys are gathered page by page: more threads to do it
        shapes.insert(0, (128, True, 8, 2, 8))
    elif p.page_size == 64:
        shapes.insert(0, (64, True, 4, 2, 4))
    elif p.page_size >= 128:
        shapes.insert(0, (128, True, 3, 2, 4))
    return list(dict.fromkeys(shapes))


def _splits(heads: int, resident: int) -> int:
    """The fewest ranges for which the rounds of blocks waste little: `heads` * splits blocks, of which `resident` run at once."""

    def waste(splits: int) -> float:
        return -(-heads * splits // resident) * resident / (heads * splits)

    most = min(MOST_SPLITS, resident // heads) if heads <= resident // 2 else 8
    best = min(map(waste, range(1, most + 1)))
    return next(n for n in range(1, most + 1) if waste(n) <= 1.05 * best)


def plan(p: Problem, c: Config, device: Device) -> Plan:
    """Grid and compile-time constants of the launch over ranges, and of the merge."""
    group, tile_d = p.q_heads // p.kv_heads, next_pow2(p.head_dim)
    rows = max(8 if c.keys_first else 16, next_pow2(group))
    flags = (p.page_size, p.window is not None, p.has_start, p.has_len, p.return_lse, c.splits > 1, c.keys_first)
    grid = (c.splits, p.kv_heads, p.batch)
    constants = (*flags, group, rows, tile_d, c.tile_n, c.latency)
    if c.splits == 1:
        return Plan(attention_decode_kernel, grid, constants, occupancy=c.occupancy, num_worker_warps=c.num_worker_warps)
    # Rows of results and, behind each, its lse; padded to whole 16 bytes.
    workspace = (((p.batch, p.kv_heads, c.splits, group, -(-(p.head_dim + 1) // 4) * 4), torch.float32),)
    warps = 8 if next_pow2(c.splits) * tile_d > 8192 else None  # on four they spill (sm_100)
    merge = Plan(attention_decode_merge_kernel, (group, p.kv_heads, p.batch), (p.return_lse, next_pow2(c.splits), tile_d), num_worker_warps=warps)
    return Plan(attention_decode_kernel, grid, constants, None, c.occupancy, c.num_worker_warps, workspace, merge)
