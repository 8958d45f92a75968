"""What the launches of `sparse_index` depend on, which configs they may take, and what each comes
to.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ...launch import Cost, Device, Launch, next_pow2
from ...select import Choices, Work
from ..common.pdl import use_pdl
from ..common.sequences import end_of, sample, start_of
from .kernels import sparse_index_count_kernel, sparse_index_list_kernel, sparse_index_scores_kernel, sparse_index_select_kernel

CODE = torch.float8_e4m3fn
UNUSED = 2147480000  # a page that no cache has
MOST_COLUMNS = 256  # of the products: the heads of all tokens of a block
MOST_ACCUMULATED = 128 * 256  # elements of them, on eight warps
LEAST_TILE = 32  # keys of a step that every problem may take
MOST_SELECTED = 1 << 14  # scores that a block counts at once, so that two counts fit an int32
SELECT_BITS = 32  # of an order key
WAVES = (1, 2, 4)  # of blocks, that KV splits are chosen for


@dataclass(frozen=True, slots=True)
class Problem:
    """What a plan may depend on. max_len: keys a sequence may come to, a power of two or more than
    it holds; never its length of the moment.

    dtype: of queries and keys; e4m3 codes have a scale for each key. page_size: 0 for a cache of
    one page a sequence. has_start, has_len: kv_start, kv_len are given.
    """

    batch: int
    heads: int
    topk: int
    max_len: int
    head_dim: int
    dtype: torch.dtype
    page_size: int = 0
    q_len: int = 1
    has_start: bool = False
    has_len: bool = True

    @property
    def codes(self) -> bool:
        return self.dtype == CODE

    def cost(self) -> Cost:
        """Keys and queries once; of the scores nothing: they may stay in L2."""
        keys, pairs = _seen(self)
        tokens, size = self.batch * self.q_len, self.dtype.itemsize
        moved = keys * (self.head_dim * size + 4 * self.codes) + tokens * (self.heads * (self.head_dim * size + 4) + 4 * self.topk)
        return Cost(moved, 2 * pairs * self.heads * self.head_dim)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, device=device).to(self.dtype)

        int32 = partial(torch.tensor, dtype=torch.int32, device=device)
        lengths, starts = ([of(self, i) for i in range(self.batch)] for of in (end_of, start_of))
        options: dict[str, Any] = {"kv_len": int32(lengths) if self.has_len else None, "kv_start": int32(starts) if self.has_start else None}
        first, end = (torch.tensor(places, device=device)[:, None] for places in (starts, lengths))
        page_size, max_pages = self.page_size or self.max_len, -(-self.max_len // (self.page_size or self.max_len))
        key, pages = torch.arange(max_pages * page_size, device=device), self.batch * max_pages
        unused = ((key < first) | (key >= end)).view(pages, page_size)
        if self.page_size:
            table = torch.randperm(pages, dtype=torch.int32, device=device)
            unused = torch.empty_like(unused).index_copy_(0, table.long(), unused)
            table = table.view(self.batch, max_pages)
            options["block_table"] = torch.where(torch.arange(max_pages, device=device) * page_size < end, table, UNUSED)
        cache = torch.where(unused[..., None], torch.nan, torch.randn(pages, page_size, self.head_dim, device=device)).to(self.dtype)
        if self.codes:
            options["cache_scale"] = torch.where(unused, torch.nan, torch.rand(pages, page_size, device=device) + 0.5)
        q = randn(self.batch, self.q_len, self.heads, self.head_dim)
        weights = torch.randn(self.batch, self.q_len, self.heads, device=device) * (self.heads * self.head_dim) ** -0.5
        return {"q": q, "cache": cache, "weights": weights, "topk": self.topk, **options}


@lru_cache(maxsize=256)
def _seen(p: Problem) -> tuple[int, int]:
    """Keys of all sequences, and pairs of a token and a key that it sees."""
    keys, pairs, before = 0, 0, p.q_len - 1
    for i, count in sample(p.batch):
        n = max(0, end_of(p, i) - start_of(p, i))
        keys += n * count
        pairs += count * ((n * p.q_len - before * p.q_len // 2) if n >= p.q_len else n * (n + 1) // 2)
    return keys, pairs


@dataclass(frozen=True, slots=True)
class Config:
    """How tokens and keys are divided.

    tile_t: tokens of a block that scores; a power of two.
    tile_n: keys of a step; a power of two, of pages a divisor of the page size.
    num_kv_splits: blocks that share the keys of such tokens.
    latency: prefetch hint of the loads, 1 to 10.
    num_worker_warps: compiler hint of the scoring kernel.
    select: scores that the block of a token's list counts at once; a power of two.
    ways: cuts that a pass of the search tries.
    select_latency: as latency, of the scores.
    blocks: of a token's list; a power of two. Several search it by one launch a step.
    """

    tile_t: int
    tile_n: int
    num_kv_splits: int
    latency: int = 4
    num_worker_warps: int | None = None
    select: int = 1024
    ways: int = 7
    select_latency: int = 1
    blocks: int = 1

    @property
    def steps(self) -> int:
        """Launches of a search that several blocks share."""
        return -(-SELECT_BITS // ((self.ways + 1).bit_length() - 1))


# tile_t, tile_n, latency, warps.
SCORING = ((1, 128, 4, 4), (2, 128, 4, 8), (4, 128, 4, 8), (1, 64, 4, 4), (2, 64, 4, 4), (1, 128, 4, 8), (1, 32, 4, 8))
# select, ways, select_latency. Not in clusters: the lists of 8 blocks that share one were wrong
# (H200, tileiras 13.4). The compiler unrolls loops by the latency: at 4 it takes half a minute
# (sm_90).
SELECTING = ((2048, 3, 1), (4096, 3, 1), (8192, 3, 1))
SHARED = (8, 32, 64)  # blocks of a token's list, each with tiles of 1024 and 15 cuts


def candidates(p: Problem, device: Device) -> Iterator[Config]:
    """Tiles of the table, with the KV splits that fill a few waves."""
    most = p.page_size or 1 << 30  # a tile is at most a page
    if device.is_cpu:
        yield Config(min(4, next_pow2(p.q_len)), min(256, most), 1, select=MOST_SELECTED)
        yield Config(1, min(64, most), 3, select=128, ways=3)
        yield Config(1, min(64, most), 1, select=64, ways=15, blocks=2)
        return
    for tile_t, tile_n, latency, warps in SCORING:
        tile_n = min(tile_n, most)
        if tile_t > 1 and tile_t >= 2 * next_pow2(p.q_len):
            continue
        blocks, tiles = p.batch * -(-p.q_len // tile_t), -(-next_pow2(p.max_len) // tile_n)
        for n in sorted({max(1, min(tiles, waves * device.sms // blocks)) for waves in WAVES}):
            yield from (Config(tile_t, tile_n, n, latency, warps, *how) for how in SELECTING)
            if p.batch * p.q_len <= device.sms // 8:  # else the tokens fill the device
                yield from (Config(tile_t, tile_n, n, latency, warps, 1024, 15, 1, blocks) for blocks in SHARED)


def legal(p: Problem, c: Config, device: Device) -> bool:
    """What the kernels can run without many spills."""
    if device.is_cpu:
        return True
    if c.tile_t == 1 and c.tile_n <= LEAST_TILE:
        return True
    columns, most = c.tile_t * _tile_h(p), MOST_ACCUMULATED * (c.num_worker_warps or 4) // 8
    if device.arch == "sm_80":
        most //= 4
    if p.dtype == torch.float32:  # three products, with parts of both operands in registers
        most //= 4 if device.arch == "sm_90" else 8
    return (c.tile_t == 1 or columns <= MOST_COLUMNS) and columns * c.tile_n <= most


def _tile_h(p: Problem) -> int:
    return max(8, next_pow2(p.heads))


def work(p: Problem, c: Config, device: Device) -> tuple[Work, ...]:
    """What scoring, the steps of a search that blocks share, and listing ask for."""
    _, pairs = _seen(p)
    columns, tokens, token_tiles = c.tile_t * _tile_h(p), p.batch * p.q_len, p.batch * -(-p.q_len // c.tile_t)
    tile_bytes = c.tile_n * (p.head_dim * p.dtype.itemsize + 4 * p.codes)
    steps = max(1.0, pairs / tokens / c.tile_n / c.num_kv_splits)
    score = Work(
        blocks=token_tiles * c.num_kv_splits,
        resident=device.sms * (8 // (c.num_worker_warps or 4)),
        per_sm=8 // (c.num_worker_warps or 4),
        steps=steps,
        flops=2 * c.tile_n * columns * next_pow2(p.head_dim) / (2 if p.codes else 1),
        kinds=("queries_first",),
        serial=2.0,
        exponentials=c.tile_n * columns / 8,  # clamped, weighted and summed
        fill=tile_bytes + 4 * c.tile_n * c.tile_t,
        dram=p.cost().size_bytes + 4 * pairs,
        chain=1,
    )
    tiles = max(1.0, pairs / tokens / c.select / c.blocks)

    def listing(passes: float, ways: int) -> Work:
        return Work(
            blocks=tokens * c.blocks,
            resident=device.sms,
            per_sm=1,
            steps=passes * tiles,
            exponentials=c.select * ways / 4,
            fill=4 * c.select,
            dram=4 * (pairs + tokens * p.topk),
            serial=1.0,
            chain=passes,
        )

    if c.blocks == 1:
        return score, listing(c.steps + 1, c.ways)
    return score, *(listing(1, c.ways) for _ in range(c.steps)), listing(1 + c.blocks / 2, 3)


CHOICES = Choices("sparse_index", candidates, legal, work, like="sparse_decode")
space = CHOICES.space

ARGUMENTS = ("q", "cache", "cache_scale", "weights", "kv_len", "kv_start", "block_table", "out", "keys")


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """The launch that scores the keys, and the one that lists them."""
    bucket, pdl = next_pow2(p.max_len), use_pdl(p.batch * p.q_len, False)
    optional = {"kv_len": p.has_len, "kv_start": p.has_start, "block_table": p.page_size}
    score = Launch.of(
        sparse_index_scores_kernel,
        (c.num_kv_splits, -(-p.q_len // c.tile_t), p.batch),
        p,
        c,
        {"tf32x3": p.dtype == torch.float32, "tile_h": _tile_h(p), "tile_d": max(16, next_pow2(p.head_dim))},
        optional=optional | {"cache_scale": p.codes},
        scratch={"scores": ((p.batch, p.q_len, bucket), torch.int32)},
        pdl=pdl,
    )
    listing = {"tile": min(c.select, bucket), "latency": c.select_latency}
    if c.blocks > 1:
        return score, *_by_steps(p, c, listing, optional, pdl)
    return score, Launch.of(sparse_index_select_kernel, (p.q_len, p.batch), p, c, listing, optional=optional, num_worker_warps=8, pdl=pdl)


def _by_steps(p: Problem, c: Config, listing: dict[str, Any], optional: dict[str, Any], pdl: bool) -> Iterator[Launch]:
    """The launches that count, and the one that lists."""
    grid = (c.blocks, p.q_len, p.batch)
    how: dict[str, Any] = {"num_worker_warps": 8, "pdl": pdl}
    there = {"kv_len": p.has_len, "kv_start": p.has_start}
    for i in range(c.steps):
        names = {"new_bounds": f"bounds{i}", "new_counts": f"counts{i}"} | ({"bounds": f"bounds{i - 1}", "counts": f"counts{i - 1}"} if i else {})
        scratch = {
            f"bounds{i}": ((p.batch, p.q_len, 3), torch.int64),
            f"counts{i}": ((p.batch, p.q_len, c.blocks, c.ways + 1), torch.int32),
        }
        constants, given = {**listing, "first": i == 0}, {**there, "bounds": i, "counts": i}
        yield Launch.of(sparse_index_count_kernel, grid, p, c, constants, optional=given, scratch=scratch, renames=names, **how)
    names = {"bounds": f"bounds{c.steps - 1}", "counts": f"counts{c.steps - 1}"}
    yield Launch.of(sparse_index_list_kernel, grid, p, c, listing, optional=optional, renames=names, **how)
