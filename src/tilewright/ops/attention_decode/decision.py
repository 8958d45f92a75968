"""What a launch of `attention_decode` may depend on, and what it comes to."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...launch import Cost, Device, Plan, next_pow2
from .kernels import attention_decode_kernel, attention_decode_merge_kernel


@dataclass(frozen=True, slots=True)
class Problem:
    """What a plan may depend on. max_len: keys a sequence may come to, a power of two or more than it holds; never its length of the moment.

    page_size: 0 for a contiguous cache. has_start, has_len, sinks: kv_start, kv_len, sinks are given. q_len: newest tokens of a sequence.
    v_dim: columns of v, 0 for head_dim. shared: v is the first columns of k.
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
    q_len: int = 1
    v_dim: int = 0
    shared: bool = False
    sinks: bool = False
    normalize: bool = True

    @property
    def columns(self) -> int:
        """Columns of v."""
        return self.v_dim or self.head_dim

    def _lengths(self) -> list[int]:
        """Lengths of the sequences: the whole cache, down to a third of it in the last; with several, one has none."""
        if not self.has_len:
            return [self.max_len] * self.batch
        lengths = [self.max_len - (self.max_len * i * 2) // (3 * self.batch) for i in range(self.batch)]
        return [*lengths[:-1], 0] if 2 < self.batch < 8 else lengths

    def _starts(self) -> list[int]:
        return [(self.max_len * i) // (4 * self.batch) if self.has_start else 0 for i in range(self.batch)]

    def cost(self) -> Cost:
        reach = None if self.window is None else self.window + self.q_len - 1
        keys = sum(max(0, min(n - start, reach or n)) for n, start in zip(self._lengths(), self._starts(), strict=True))
        both = self.head_dim + self.columns
        rows = self.batch * self.q_heads * self.q_len
        elements = keys * self.kv_heads * (self.head_dim if self.shared else both) + rows * both
        return Cost(elements * self.dtype.itemsize, 2 * keys * self.q_heads * self.q_len * both)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=self.dtype, device=device)

        def int32(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        lengths, starts = self._lengths(), self._starts()
        options: dict[str, Any] = {"window": self.window, "return_lse": self.return_lse, "normalize": self.normalize}
        options["kv_len"] = int32(lengths) if self.has_len else None
        options["kv_start"] = int32(starts) if self.has_start else None
        q = randn(self.batch, self.q_heads, self.q_len, self.head_dim)
        key = torch.arange(self.max_len, device=device)
        unused = torch.stack([(key < start) | (key >= n) for n, start in zip(lengths, starts, strict=True)])  # [batch, max_len]
        widths = (self.head_dim,) if self.shared else (self.head_dim, self.columns)
        if not self.page_size:
            caches = [randn(self.batch, self.kv_heads, self.max_len, width) for width in widths]
            unused = unused[:, None, :, None]
        else:
            max_pages = -(-self.max_len // self.page_size)
            pages = self.batch * max_pages
            table = torch.randperm(pages, dtype=torch.int32, device=device).view(self.batch, max_pages)
            caches = [randn(pages, self.kv_heads, self.page_size, width) for width in widths]
            unused = torch.nn.functional.pad(unused, (0, max_pages * self.page_size - self.max_len), value=True)
            shuffled = torch.empty(pages, self.page_size, dtype=torch.bool, device=device)
            shuffled[table.flatten().long()] = unused.view(pages, self.page_size)
            held = torch.arange(max_pages, device=device) * self.page_size < torch.tensor(lengths, device=device)[:, None]
            options["block_table"] = torch.where(held, table, 2147480000)  # entries past the length may be anything
            unused = shuffled[:, None, :, None]
        k, *v = (torch.where(unused, torch.nan, x) for x in caches)  # memory that holds no key may hold anything
        if self.shared and self.v_dim:
            options["v_dim"] = self.v_dim
        if self.sinks:
            options["sinks"] = torch.randn(self.q_heads, device=device)
        return {"q": q, "k": k, "v": v[0] if v else None, **options}


MOST_SPLITS, MOST_WIDE_SPLITS = 64, 128  # the merge holds some columns of a row of each in registers


@dataclass(frozen=True, slots=True)
class Config:
    """How the keys and the query heads are cut and walked.

    tile_n: keys of a step; a power of two; in a paged cache a divisor or a multiple of the page size.
    splits: ranges that the keys of a sequence are cut into; 1 needs no merge and no workspace.
    keys_first: the keys are the rows of the products and the queries their columns (at least 8); otherwise the queries are rows (at least 16).
    latency: prefetch hint of the k and v loads, 1 to 10.
    occupancy, num_worker_warps, num_ctas: compiler hints.
    heads: query heads of a block, a power of two; 0: all that share the key head. 1 is a block per head: each reads the keys for itself.
    rows: rows (heads x tokens) that the tile of queries has at least, a power of two; those beyond the block's own are zeros.
    parts: column parts that k, v and the sums are kept in; a power of two.
    columns: columns of v of a block, a power of two, each block with all scores; 0: all of them.
    late: the denominators are kept key by key and summed after the last step.
    sliced: keys are read through a view of the sequence's own, zeros behind it, in one loop; not of pages shorter than a tile, nor with a window or
        kv_start of any pages.
    paired: sliced, two tiles in a step of the loop; with an odd number of tiles the last is computed twice, once for nothing.
    """

    tile_n: int
    splits: int
    keys_first: bool = False
    latency: int = 4
    occupancy: int | None = None
    num_worker_warps: int | None = None
    heads: int = 0
    rows: int = 8
    parts: int = 1
    columns: int = 0
    num_ctas: int | None = None
    late: bool = False
    sliced: bool = False
    paired: bool = False


def space(p: Problem, device: Device) -> list[Config]:
    """Every config worth timing, the untuned default first.

    Nothing that is compiled in depends on max_len, so that a cache that grows while it decodes needs no new kernel: a range or a tile may be
    longer than the cache, and is then partly or wholly empty.
    """
    if device.is_cpu:
        apart = Config(_tile(128, p), 2, heads=next_pow2(-(-p.q_heads // p.kv_heads // 2)), parts=2, columns=max(16, next_pow2(p.columns) // 2))
        return [Config(_tile(512, p), 1), Config(_tile(128, p), 3), Config(_tile(256, p), 2, keys_first=True), apart]
    # Lengths of a batch differ: of much to read, two rounds of short ranges fill the SMs that one round of long ones leaves (12 % on an H200).
    reach = p.max_len if p.window is None else min(p.max_len, p.window + p.q_len)
    ragged = p.has_len and reach * p.batch * p.kv_heads * (p.head_dim + (0 if p.shared else p.columns)) * p.dtype.itemsize >= 1 << 28
    configs = []
    for shape in _shapes(p, device):
        blocks = math.prod(plan(p, shape, device).grid)
        resident = device.sms * (shape.occupancy or 1) // (shape.num_ctas or 1)
        if p.head_dim > 256:  # ranges of whole tiles, at least one each; partial rows are wide, so rather few
            tiles = p.max_len // shape.tile_n or 1
            choices = [1 << i for i in range(min(tiles, MOST_WIDE_SPLITS).bit_length())]
            # Up to four tiles a block does one by one in less than a merge takes (DeepSeek-V2-Lite, 132 keys, H200: 1 us).
            splits = _splits(blocks, resident, choices) if tiles > 4 else 1
            more = 2 * splits if 2 * splits in choices else max(1, splits // 2)
        else:
            splits = _splits(blocks, resident, range(1, MOST_SPLITS + 1))
            more = min(MOST_SPLITS, 2 * splits)
        for n in (more, splits) if ragged and 16 < blocks <= resident else (splits, more):
            if n == 1 or not shape.paired:  # with partial sums on their way out, two tiles a step spill
                configs.append(replace(shape, tile_n=_tile(shape.tile_n, p), splits=n))
    return list(dict.fromkeys(configs))


def _tile(tile_n: int, p: Problem) -> int:
    """On a CPU, and where a page is a tile or more, a tile is at most a page."""
    return min(tile_n, p.page_size) if p.page_size >= 128 else tile_n


def _shapes(p: Problem, device: Device) -> list[Config]:
    """Configs of one range of keys, the default first; those of few rows as measured on an H200 (2026-11-21, notes/LOG.md)."""
    tile_q = next_pow2(p.q_len)
    rows = p.q_heads // p.kv_heads * tile_q
    if p.dtype == torch.float32:
        # CUDA cores: sums on tensor cores round towards zero, and miss fp32's accuracy by a third (H200, 190 keys).
        few = 0 if rows <= 16 and tile_q == 1 else 8 // tile_q
        return [Config(32 if p.head_dim <= 64 else 16, 1, True, 1, 1, 8 if device.arch == "sm_90" else None, heads=few)]
    if p.head_dim > 256:
        return _many_columns(p, device, rows, tile_q)
    if rows > 16:
        return _many_rows(p, device, rows, tile_q)
    if device.arch != "sm_90":
        if p.head_dim > 128:
            return [Config(64, 1, True, 2, 1)] if device.arch in ("sm_100", "sm_103") else [Config(32, 1, False, 2, 1)]
        return [Config(64, 1, True, 2, 1), Config(32, 1, False, 2, 1)]
    if p.head_dim > 128:
        return [Config(128, 1, True, 4, 1, 8), Config(64, 1, True, 4, 1, 4), Config(128, 1, True, 2, 1, 8), Config(64, 1, False, 2, 1, 8)]
    one_block, two_blocks = Config(128, 1, True, 8, 1, 8), Config(128, 1, True, 8, 2, 4)
    shapes = [one_block, two_blocks] if _column_tiles(p)[0] > 64 else [two_blocks]
    if p.head_dim <= 64 and p.window is None and not p.has_start:  # with a third loop it spills
        shapes.append(one_block)
    ahead_once = Config(128, 1, True, 3, 2, 4)
    short, four_blocks = Config(64, 1, True, 8, 2, 4), Config(64, 1, True, 3, 4, 4)
    shapes += [ahead_once, short]
    if rows <= 8:  # more spill with four blocks an SM
        shapes.append(four_blocks)
    shapes += [Config(128, 1, False, 8, 1, 8), Config(128, 1, False, 8, 2, 4)]
    lengths_alone = p.has_len and p.window is None and not p.has_start  # with a third loop it spills
    if p.batch * p.kv_heads > 2 * device.sms and p.max_len <= 2048:
        shapes.insert(0, two_blocks)  # many short caches: blocks that end and start overlap
    elif lengths_alone and p.max_len >= 4096 and 8 < p.batch * p.kv_heads <= device.sms * (2 if p.head_dim <= 64 else 1):
        shapes.insert(0, ahead_once)  # lengths that differ, in ranges half as long
    if p.window is not None and p.window <= 256 and four_blocks in shapes:  # a step or two: what counts is how many blocks begin at once
        shapes.insert(0, four_blocks if p.batch * p.kv_heads > 2 * device.sms else short)
    if p.page_size in (16, 32):  # keys are gathered page by page: more threads to do it
        shapes.insert(0, Config(128, 1, True, 8, 2, 8))
    elif p.page_size == 64:
        shapes.insert(0, Config(64, 1, True, 4, 2, 4))
    elif p.page_size >= 128:
        shapes.insert(0, Config(128, 1, True, 3, 2, 4))
    return shapes


def _many_rows(p: Problem, device: Device, rows: int, tile_q: int) -> list[Config]:
    """More than 16 rows of at most 256 columns."""

    def heads(most: int) -> int:
        return most // tile_q if rows > most else 0

    wide = p.head_dim > 128
    if device.arch == "sm_90":
        if wide:
            keys_first = Config(64, 1, True, 2, 1, 8, heads(32))  # waits for each product where v is k
            one_loop = Config(64, 1, False, 8, 1, 8, heads(64), 64, 2, late=True, sliced=True)
            return [one_loop, keys_first] if p.shared and _in_one_loop(p, 64) else [keys_first]
        if rows <= 32:
            return [Config(128, 1, True, 8, 1, 8), Config(64, 1, False, 4, 1, 4, rows=64)]
        one, two = Config(64, 1, False, 2, 1, 4, heads(64), 64), Config(128, 1, False, 2, 1, 8, heads(128), 128)
        return [two, one] if rows > 64 and not 0 < p.page_size < 128 else [one, two]  # pages shorter than a tile are gathered
    if device.arch in ("sm_100", "sm_103"):
        return [Config(64, 1, True, 2, 1, 8, heads(32))] if wide else [Config(64, 1, True, 2, 1, None, heads(32))]
    if wide:
        return [Config(32, 1, False, 2 if device.arch == "sm_80" else 1, 1, None, heads(16))]
    return [Config(32, 1, False, 2, 1, 8 if device.arch == "sm_80" else None, heads(32))]


def _many_columns(p: Problem, device: Device, rows: int, tile_q: int) -> list[Config]:
    """More than 256 columns: the sums of 64 rows are half of a Hopper SM's registers, and an SM without wgmma holds those of 16 rows in parts."""

    def heads(most: int) -> int:
        return most // tile_q if rows > most else 0

    if device.arch == "sm_90":
        # 64 rows are what wgmma takes. Where v is k, the tile of keys in shared memory serves both products, and two fit (64 keys x 576: 226 KB):
        # parts are freed one by one, and with these latencies the compiler keeps both tiles and its products in flight (SASS; times: H200).
        narrow = Config(32, 1, False, 2, 1, 8, heads(64), 64)
        if not p.shared:
            return [Config(32, 1, False, 5, 1, 8, heads(64), 64, 2, late=True, sliced=True), narrow]
        if not _in_one_loop(p, 64):
            return [narrow, Config(64, 1, False, 6, 1, 8, heads(64), 64, 2)]
        # 128 heads, 128 x 4096: 314 us, 374 with a loop of its own for partial tiles; in pages of 64 360 and 436.
        ahead = 5 if p.head_dim == p.columns == 512 else 9  # elsewhere, with 5, each product is waited for
        shapes = [Config(64, 1, False, latency, 1, 8, heads(64), 64, 4, late=True, sliced=True) for latency in (ahead, 14 - ahead, 10)]
        # Not timed yet: 10 barriers a pair of tiles in place of 16, and fewer instructions.
        shapes += [replace(shapes[0], latency=3, parts=parts, paired=True) for parts in (2, 1)]
        shapes += [replace(shapes[0], late=False), narrow]
        # Bound by reading the keys: 140 us in place of 156 (16 heads, 128 x 4096). Tiles of 8 rows spill, and so do keys that TMA can't load.
        if rows <= 16 and p.head_dim % 8 == 0:
            few = [Config(64, 1, True, 8, 1, 8, parts=2), Config(64, 1, True, 5, 1, 4, parts=2), Config(64, 1, True, 8, 1, 4, parts=4)]
            if _column_tiles(p)[0] <= 256:  # with parts of 128 columns each product is waited for
                few.insert(0, Config(64, 1, True, 9, 1, 8))
            shapes[:0] = [replace(c, rows=16, late=True, sliced=True) for c in few]
        return shapes
    if device.arch in ("sm_100", "sm_103"):
        return [Config(64, 1, True, 2, 1, 8, heads(32))] if p.shared else [Config(64, 1, True, 2, 1, 8, heads(16), parts=2, columns=256)]
    if device.arch == "sm_80":
        return [Config(64, 1, False, 2, 1, 8, heads(16), parts=4, columns=128)]
    return [Config(32, 1, False, 1, 1, None, heads(16), parts=4, columns=64)]


def _in_one_loop(p: Problem, tile_n: int) -> bool:
    """Whether keys can be read through a view of the sequence's own: one of a page has to hold whole tiles, and to begin with the page."""
    return not p.page_size or (p.page_size >= tile_n and p.window is None and not p.has_start)


def _splits(heads: int, resident: int, choices: Sequence[int]) -> int:
    """The fewest ranges for which the rounds of blocks waste little: `heads` * splits blocks, of which `resident` run at once."""

    def waste(splits: int) -> float:
        return -(-heads * splits // resident) * resident / (heads * splits)

    most = resident // heads if heads <= resident // 2 else 8
    possible = [n for n in choices if n <= most]
    best = min(map(waste, possible))
    return next(n for n in possible if waste(n) <= 1.05 * best)


def fitted(p: Problem, c: Config) -> Config:
    """With no more ranges than the cache has tiles of keys: a tuned config may be that of a longer one."""
    return replace(c, splits=min(c.splits, max(1, -(-p.max_len // c.tile_n))))


def plan(p: Problem, c: Config, device: Device) -> Plan:
    """Grid and compile-time constants of the launch over ranges, and of the merge."""
    c = fitted(p, c)
    group, tile_q = p.q_heads // p.kv_heads, next_pow2(p.q_len)
    heads = min(c.heads, group) or group
    rows = max(c.rows, 8 if c.keys_first else 16, next_pow2(heads) * tile_q)
    tile_d, tail = _column_tiles(p)
    tile_d = tile_d // c.parts
    # A block with some columns of v has them among its tiles of k if they are whole tiles of it.
    shared = p.shared and (not c.columns or (c.columns % tile_d == 0 and p.columns == tile_d * c.parts))
    tile_v = tile_d if shared else c.columns or next_pow2(p.columns) // c.parts
    tiles_v = -(-p.columns // tile_v)
    column_blocks = -(-p.columns // c.columns) if c.columns else 1
    sliced = c.sliced and _in_one_loop(p, c.tile_n)
    flags = (p.page_size, p.window is not None, p.has_start, p.has_len, p.sinks, shared, p.return_lse, p.normalize, c.splits > 1, c.keys_first)
    columns = (-(-(p.head_dim - tail) // tile_d), tile_d, tail, column_blocks, tiles_v // column_blocks, tile_v)
    constants = (*flags, group, heads, tile_q, rows, *columns, c.tile_n, c.latency, c.late, sliced, sliced and c.paired)
    grid = (c.splits * column_blocks * -(-group // heads), p.kv_heads, p.batch)
    if c.splits == 1:
        return Plan(attention_decode_kernel, grid, constants, c.num_ctas, c.occupancy, c.num_worker_warps, early=True)
    # Behind each row of sums its maximum and denominator; padded to whole 16 bytes.
    workspace = (((p.batch, c.splits, p.q_heads, p.q_len, -(-(p.columns + 2) // 4) * 4), torch.float32),)
    tile_s, merged_v = next_pow2(c.splits), next_pow2(p.columns)
    # Columns of a block of the merge: all while that makes two blocks for every SM, and no more than fit in registers.
    while merged_v > 64 and (tile_s * merged_v > 8192 or p.batch * p.q_len * p.q_heads * (next_pow2(p.columns) // merged_v) < 2 * device.sms):
        merged_v //= 2
    merge_constants = (p.sinks, p.return_lse, p.normalize, tile_s, merged_v, tile_s == c.splits and p.columns % merged_v == 0)
    merge = Plan(attention_decode_merge_kernel, (p.q_heads * -(-p.columns // merged_v), p.q_len, p.batch), merge_constants, early=True)
    return Plan(attention_decode_kernel, grid, constants, c.num_ctas, c.occupancy, c.num_worker_warps, workspace, merge, early=True)


def _column_tiles(p: Problem) -> tuple[int, int]:
    """The power of two that k's columns are padded to; or, where they are one and a smaller one (576) and v does not reach there, these two."""
    padded = next_pow2(p.head_dim)
    main = padded // 2
    rest = p.head_dim - main
    if (p.shared or p.head_dim > 128) and 16 <= rest < main and rest & (rest - 1) == 0 and not (p.shared and p.columns > main):
        return main, rest
    return padded, 0
