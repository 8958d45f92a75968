"""What the launches of `sparse_decode` depend on, which configs they may take, and what each comes
to.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...launch import Cost, Device, Launch, next_pow2, usual
from ...select import Choices, Work
from .. import attention_decode as decode
from ..attention_decode.decision import fitted, work as attention_work
from ..common.sequences import listed, sample
from .kernels import sparse_decode_gather_kernel, sparse_decode_kernel
from .packed import BYTES, GROUP, pack_kv, parts

PAGE = 64  # rows of a page of `inputs`
UNUSED = 2147480000  # an index that is in no cache

ROWS = 64  # heads of a block that reads the rows where they are: what wgmma takes
# Of such a block tile_n, latency, late. Late denominators leave 4 of a step's 7 barriers.
IN_PLACE = {"sm_90": ((64, 8, True), (64, 8, False), (32, 4, True), (32, 4, False), (32, 8, True), (32, 8, False), (32, 2, False))}
GATHERED = (8, 4, 16, 32)  # entries of a block that gathers
GATHERING_BLOCKS = 8  # of them on an SM
MOST_DECODES = 8  # configs of attention_decode behind the gathering
WIDENING = 5  # time of widening a code, in exponentials


@dataclass(frozen=True, slots=True)
class Problem:
    """What a plan may depend on.

    topk, more_topk: entries of a token's list, and of its second list, 0 without.
    cache_dtype: None where it is dtype; float8_e4m3fn for the packed layout of head_dim.
    has_length: lengths are given; the lists of `inputs` have holes then.
    v_dim: columns of v, 0 for the first 512 at most.
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

    def __post_init__(self) -> None:
        usual(self, v_dim=min(self.head_dim, 512))

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

    def _length(self, topk: int, i: int) -> int:
        """Of the list of sequence i: all entries, down to a third in the last; with several
        sequences, one has none.
        """
        return listed(topk, i, self.batch) if self.has_length else topk

    def _named(self, topk: int) -> int:
        """Rows that the lists of a token of each sequence name; one entry of seven is a hole."""
        lengths = ((self._length(topk, i), count) for i, count in sample(self.batch))
        return sum(count * (n - len(range(3, n, 7)) if self.has_length else n) for n, count in lengths)

    def cost(self) -> Cost:
        """The rows once, read where they are: those that tokens share are counted for each."""
        keys = self.q_len * (self._named(self.topk) + self._named(self.more_topk))
        row = self.head_dim * self.dtype.itemsize if self.cache_dtype is None else BYTES[self.head_dim]
        both, tokens = self.head_dim + self.columns, self.batch * self.q_len
        moved = keys * row + tokens * (self.keys * 4 + self.q_heads * both * self.dtype.itemsize)
        return Cost(moved, 2 * keys * self.q_heads * both)

    def _scope(self, topk: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
        """A cache of twice the rows that a sequence's list may name, indices into it, and lengths;
        rows that no entry names are NaN.
        """
        pages = -(-2 * topk // PAGE)
        own = torch.arange(self.batch, device=device)[:, None, None] * (pages * PAGE)
        indices = own + torch.rand(self.batch, self.q_len, pages * PAGE, device=device).argsort(-1)[..., :topk]
        rows = self.batch * pages * PAGE
        length = None
        named, entry = indices, torch.arange(topk, device=device)
        if self.has_length:
            length = torch.tensor([self._length(topk, i) for i in range(self.batch)], dtype=torch.int32, device=device)
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
    """How rows are gathered, and how the attention reads them.

    rows: entries of a list that one block gathers; a power of two. 0: nothing is gathered, the
        attention reads the rows where they are.
    decode: of the attention, as in attention_decode; where nothing is gathered, its tile_n, splits,
        latency, rows and hints count.
    latency: prefetch hint of the gathering loads, 1 to 10.
    num_worker_warps: compiler hint of the gathering kernel.
    """

    rows: int
    decode: decode.Config
    latency: int = 8
    num_worker_warps: int | None = 4


def candidates(p: Problem, device: Device) -> Iterator[Config]:
    """Rows gathered, then the best configs of attention_decode; or read where they are."""
    if device.is_cpu:
        # Each row is several calls of numpy either way, and code for each is generated.
        decodes = decode.space(p.decode, device)
        yield from (Config(8, decodes[0]), Config(4, decodes[1]))
        yield from (Config(0, decode.Config(64, n, rows=16, late=n > 1)) for n in (1, 2))
        return
    waves = max(1, device.sms // (p.batch * p.q_len * -(-p.q_heads // ROWS)))
    in_place = IN_PLACE.get(device.arch, ()) if p.dtype.itemsize == 2 else ()
    for tile_n, latency, late in in_place:
        c = decode.Config(tile_n, min(waves, -(-p.keys // 64)), latency=latency, occupancy=1, num_worker_warps=8, rows=ROWS, late=late)
        yield Config(0, _fewer_splits(p, c))
    for c in decode.space(p.decode, device)[:MOST_DECODES]:
        yield from (Config(rows, _fewer_splits(p, c)) for rows in GATHERED)


def legal(p: Problem, c: Config, device: Device) -> bool:
    """What the kernels can run without many spills."""
    how = c.decode
    if device.is_cpu or c.rows:
        return True
    if p.cache_dtype is not None:  # 64 rows of codes beside their widened values, or the codes of 128 heads, take too many registers
        return how.tile_n == 32 and how.latency != 4 and p.q_heads <= ROWS
    # At latency 2 the tiles in flight take the registers of partial results, and of wider queries.
    return (how.tile_n, how.latency) != (32, 8) and (how.latency != 2 or (how.num_kv_splits == 1 and p.head_dim <= 512))


def work(p: Problem, c: Config, device: Device) -> tuple[Work, ...]:
    """What gathering and the attention ask for, or the attention alone."""
    how, tokens = fitted(p.decode, c.decode), p.batch * p.q_len
    stored = p.head_dim * p.dtype.itemsize if p.cache_dtype is None else BYTES[p.head_dim]
    if c.rows:
        blocks, widened = tokens * -(-p.keys // c.rows), p.head_dim * p.dtype.itemsize
        gather = Work(
            blocks=blocks,
            resident=device.sms * GATHERING_BLOCKS,
            per_sm=GATHERING_BLOCKS,
            fill=c.rows * stored,
            dram=tokens * p.keys * (stored + widened),
            chain=3,  # the list's entries, the rows, and how many entries before name one
        )
        return gather, attention_work(p.decode, how, device)
    widening = WIDENING * p.head_dim if p.cache_dtype is not None else 0
    attend = replace(
        attention_work(p.decode, replace(how, heads=how.rows), device),
        steps=-(-(-(-p.keys // how.num_kv_splits)) // how.tile_n),
        exponentials=how.tile_n * (how.rows + widening),
        fill=how.tile_n * stored,
        dram=p.cost().size_bytes,
        aligned=64,
        ragged=1.0,
    )
    return (attend,)


CHOICES = Choices("sparse_decode", candidates, legal, work)
space = CHOICES.space


def _fewer_splits(p: Problem, c: decode.Config) -> decode.Config:
    """The config without splits that would be empty: unlike a cache, a list can't grow."""
    tiles = -(-p.keys // c.tile_n)
    each = -(-tiles // c.num_kv_splits)
    return replace(c, num_kv_splits=-(-tiles // each))


ARGUMENTS = (
    *("q", "indices", "length", "keys", "scales", "rope", "more_indices", "more_length", "more_keys", "more_scales", "more_rope"),
    *("out", "lse", "sinks", "window", "scale"),
)


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """Gathering, then the launches of attention_decode; or one kernel for both, then its merge."""
    tokens = p.batch * p.q_len
    attend, *merge = decode.plan(p.decode, c.decode, device)
    group = 0 if p.cache_dtype is None else GROUP[BYTES[p.head_dim]]
    if not c.rows:
        return _fused_launch(p, fitted(p.decode, c.decode), group, attend), *merge
    shape, strides = (tokens, 1, p.keys, p.head_dim), (p.keys * p.head_dim, p.keys * p.head_dim, p.head_dim, 1)
    gather = Launch.of(
        sparse_decode_gather_kernel,
        (-(-p.topk // c.rows) + -(-p.more_topk // c.rows), tokens),
        p,
        c,
        {
            "more": p.more_topk > 0,
            "columns": p.head_dim,
            "group": group,
            "list": min(1024, max(16, next_pow2(max(p.topk, p.more_topk)))),
        },
        scratch={"gathered": ((tokens, p.keys, p.head_dim), p.dtype), "count": ((tokens,), torch.int32)},
        views={"k": ("gathered", shape, strides), "v": ("gathered", (*shape[:3], p.columns), strides)},
        renames={"out": "gathered"},
        unused=_absent(p, group),
    )
    renames = {**attend.renames, "kv_len": "count", "cap": "scale"} | ({} if "q_tail" in attend.unused else {"q_tail": "q"})
    return gather, replace(attend, renames=renames), *merge


def _fused_launch(p: Problem, how: decode.Config, group: int, attend: Launch) -> Launch:
    """One kernel in place of gathering and `attend`."""
    constants = {
        "more": p.more_topk > 0,
        "has_sinks": p.sinks,
        "split_kv": how.num_kv_splits > 1,
        "heads": p.q_heads,
        "columns": p.head_dim,
        "group": group,
        "v_columns": p.columns,
        "ahead": how.tile_n > 32 or p.cache_dtype is not None,
    }
    grid = (how.num_kv_splits * -(-p.q_heads // how.rows), p.batch * p.q_len)
    untouched = (*_absent(p, group), *(name for name in ("lse", "sinks") if name in attend.unused))
    unlike: dict[str, Any] = {"scratch": attend.scratch, "views": attend.views, "renames": attend.renames, "unused": untouched}
    return Launch.of(sparse_decode_kernel, grid, p, how, constants, **unlike)


def _absent(p: Problem, group: int) -> tuple[str, ...]:
    """Parameters of lists and caches that neither kernel touches."""
    one = () if p.has_length else ("length",)
    one = one if group else (*one, "scales", "rope")
    other = [f"more_{name}" for name in one] if p.more_topk else [f"more_{name}" for name in ("indices", "length", "keys", "scales", "rope")]
    return (*one, *other)
