"""What the launches of `sparse_decode` may depend on, and what they come to."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...launch import Cost, Device, Plan, next_pow2
from .. import attention_decode as decode
from ..attention_decode.decision import fitted
from .fused_kernel import sparse_decode_kernel
from .kernel import sparse_decode_gather_kernel
from .packed import BYTES, CODE, GROUP, pack_kv, parts

PAGE = 64  # rows of a page of `inputs`
UNUSED = 2147480000  # an index that is in no cache


@dataclass(frozen=True, slots=True)
class Problem:
    """What a plan may depend on.

    topk, more_topk: entries of a token's list, and of its second list, 0 without. cache_dtype: None where it is dtype; float8_e4m3fn for the packed
    layout of head_dim. has_length: lengths are given; the lists of `inputs` have holes then. v_dim: columns of v, 0 for the first 512 at most.
    """

    batch: int
    q_heads: int
    topk: int
    more_topk: int
    head_dim: int
    dtype: torch.dtype
    cache_dtype: torch.dtype | None = None
    q_len: int = 1
    v_dim: int = 0
    has_length: bool = False
    sinks: bool = False
    return_lse: bool = False

    @property
    def columns(self) -> int:
        """Columns of v."""
        return self.v_dim or min(self.head_dim, 512)

    @property
    def keys(self) -> int:
        """Rows that a token may see at most."""
        return self.topk + self.more_topk

    @property
    def decode(self) -> decode.Problem:
        """The attention of each token over its rows, once they are gathered."""
        shape = (self.batch * self.q_len, self.q_heads, 1, next_pow2(self.keys), self.head_dim, self.dtype)
        return decode.Problem(*shape, return_lse=self.return_lse, v_dim=self.columns, shared=True, sinks=self.sinks)

    def _lengths(self, topk: int) -> list[int]:
        """Of the sequences' lists: all entries, down to a third in the last; with several sequences, one has none."""
        if not self.has_length:
            return [topk] * self.batch
        lengths = [topk - (topk * i * 2) // (3 * self.batch) for i in range(self.batch)]
        return [*lengths[:-1], 0] if 2 < self.batch < 8 else lengths

    def cost(self) -> Cost:
        """The rows once, read where they are: those that tokens share are counted for each."""
        lengths = self._lengths(self.topk) + (self._lengths(self.more_topk) if self.more_topk else [])
        keys = self.q_len * sum(n - len(range(3, n, 7)) if self.has_length else n for n in lengths)
        row = self.head_dim * self.dtype.itemsize if self.cache_dtype is None else BYTES[self.head_dim]
        both, tokens = self.head_dim + self.columns, self.batch * self.q_len
        moved = keys * row + tokens * (self.keys * 4 + self.q_heads * both * self.dtype.itemsize)
        return Cost(moved, 2 * keys * self.q_heads * both)

    def _scope(self, topk: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
        """A cache of twice the rows that a sequence's list may name, indices into it, and lengths; rows that no entry names are NaN."""
        pages = -(-2 * topk // PAGE)
        own = torch.arange(self.batch, device=device)[:, None, None] * (pages * PAGE)
        indices = own + torch.rand(self.batch, self.q_len, pages * PAGE, device=device).argsort(-1)[..., :topk]
        rows = self.batch * pages * PAGE
        length = None
        named, entry = indices, torch.arange(topk, device=device)
        if self.has_length:
            length = torch.tensor(self._lengths(topk), dtype=torch.int32, device=device)
            indices = torch.where(entry % 7 == 3, -1, indices)
            indices = torch.where(entry < length[:, None, None], indices, UNUSED)
            named = torch.where((indices >= 0) & (indices < rows), indices, rows)
        unused = torch.ones(rows + 1, dtype=torch.bool, device=device)
        unused[named.flatten()] = False
        unused = unused[:rows].view(-1, PAGE, 1)
        cache = torch.randn(self.batch * pages, PAGE, self.head_dim, dtype=self.dtype, device=device)
        if self.cache_dtype is None:
            cache = torch.where(unused, torch.nan, cache)
        else:
            cache = pack_kv(cache)
            for part in parts(cache):
                part.view(torch.uint8).masked_fill_(unused, 255)  # a NaN, as code, as scale, as bf16
        return cache, indices.to(torch.int32), length

    def inputs(self, device: torch.device) -> dict[str, Any]:
        cache, indices, length = self._scope(self.topk, device)
        q = torch.randn(self.batch, self.q_heads, self.q_len, self.head_dim, dtype=self.dtype, device=device)
        inputs = {"q": q, "cache": cache, "indices": indices, "topk_length": length, "scale": self.head_dim**-0.5}
        if self.more_topk:
            more, more_indices, more_length = self._scope(self.more_topk, device)
            inputs |= {"extra_cache": more, "extra_indices": more_indices, "extra_length": more_length}
        if self.columns != min(self.head_dim, 512):
            inputs["v_dim"] = self.columns
        if self.sinks:
            inputs["sinks"] = torch.randn(self.q_heads, device=device)
        return inputs | {"return_lse": self.return_lse}


@dataclass(frozen=True, slots=True)
class Config:
    """How rows are gathered, and how the attention walks them.

    rows: entries of a list that one block gathers; a power of two. 0: nothing is gathered, the attention reads the rows where they are.
    decode: of the attention, as in attention_decode; where nothing is gathered, its tile_n, splits, latency, rows and hints count.
    latency: prefetch hint of the gathering loads, 1 to 10.
    num_worker_warps: compiler hint of the gathering kernel.
    """

    rows: int
    decode: decode.Config
    latency: int = 8
    num_worker_warps: int | None = 4


def space(p: Problem, device: Device) -> list[Config]:
    """Every config worth timing, the untuned default first; none for 8-bit caches where the device has no such format."""
    if p.cache_dtype is CODE and not device.has_fp8 and not device.is_cpu:
        return []
    decodes = list(dict.fromkeys(_fewer_splits(p, c) for c in decode.space(p.decode, device)))
    if device.is_cpu:
        # Each row is several calls of numpy either way, and code for each is generated.
        return [Config(8, decodes[0]), Config(4, decodes[1]), *(Config(0, decode.Config(64, n, rows=16, late=n > 1)) for n in (1, 2))]
    # Few rows: short pieces, so that there is a block for every SM.
    sizes = (8, 4, 16) if p.batch * p.q_len * p.keys < 16 * 2 * device.sms else (16, 8, 32)
    gathered = [*(Config(sizes[0], c) for c in decodes), *(Config(n, decodes[0]) for n in sizes[1:])]
    fused = _fused(p, device)
    # Widening codes in the loop of 128 heads costs more than rows gathered first (H200, 2026-11-21: 128 x 2048 rows 1536 and 368 us); of 64 heads it
    # is 31.4 for 33.7 us at 16 sequences, and at 1 and 128 again the slower.
    widened_once = p.cache_dtype is not None and (p.q_heads > 64 or not 4 <= p.batch * p.q_len < 64)
    return [*gathered, *fused] if widened_once else [*fused, *gathered]


def _fused(p: Problem, device: Device) -> list[Config]:
    """Configs that gather nothing: Hopper keeps its wgmma, and holds the sums of 64 heads."""
    if device.arch != "sm_90":
        return []
    tiles = p.batch * p.q_len * -(-p.q_heads // 64)
    splits = min(max(1, device.sms // tiles), -(-p.keys // 64))
    # (tile_n, latency, late). 64 rows of codes beside their widened values take more registers than there are; so do, beside partial results or
    # queries of 576 columns, the tiles of 32 rows that the compiler keeps in flight at latency 2. Late denominators first: 2 to 5 % less
    # time with bf16 rows, of whose 7 barriers a step 4 are left (H200, 2026-11-21).
    walks = (
        [(64, 8, True), (64, 8, False), (32, 4, True), (32, 4, False)] if p.cache_dtype is None else [(32, 8, True), (32, 8, False), (32, 2, False)]
    )
    if p.cache_dtype is None and splits == 1 and p.head_dim <= 512:
        walks.append((32, 2, False))
    shapes = [decode.Config(n, splits, latency=latency, occupancy=1, num_worker_warps=8, rows=64, late=late) for n, latency, late in walks]
    return [Config(0, _fewer_splits(p, shape)) for shape in shapes]


def _fewer_splits(p: Problem, c: decode.Config) -> decode.Config:
    """The config without ranges that would be empty: unlike a cache, a list can't grow."""
    tiles = -(-p.keys // c.tile_n)
    each = -(-tiles // c.splits)
    return replace(c, splits=-(-tiles // each))


def plan(p: Problem, c: Config, device: Device) -> Plan:
    """Gathering, and behind it the launches of attention_decode; or one kernel for both, and behind it the merge of attention_decode."""
    tokens = p.batch * p.q_len
    attend = decode.plan(p.decode, c.decode, device)
    group = 0 if p.cache_dtype is None else GROUP[BYTES[p.head_dim]]
    if not c.rows:
        how = fitted(p.decode, c.decode)
        grid = (how.splits * -(-p.q_heads // how.rows), tokens)
        flags = (p.has_length, p.more_topk > 0, p.sinks, p.return_lse, how.splits > 1)
        ahead = how.tile_n > 32 or p.cache_dtype is not None
        fused = (*flags, p.q_heads, how.rows, p.head_dim, group, p.columns, how.tile_n, ahead, how.latency, how.late)
        return replace(attend, kernel=sparse_decode_kernel, grid=grid, constants=fused, early=False)
    pieces = -(-p.topk // c.rows) + -(-p.more_topk // c.rows)
    count = min(1024, max(16, next_pow2(max(p.topk, p.more_topk))))
    constants = (p.has_length, p.more_topk > 0, p.head_dim, group, c.rows, count, c.latency)
    workspace = (((tokens, p.keys, p.head_dim), p.dtype), ((tokens,), torch.int32))
    return Plan(sparse_decode_gather_kernel, (pieces, tokens), constants, None, None, c.num_worker_warps, workspace, attend)
