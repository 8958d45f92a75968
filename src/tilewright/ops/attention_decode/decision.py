"""What a launch of `attention_decode` depends on, which configs it may take, and what each comes
to.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod
from typing import Any

import torch

from ...launch import Cost, Device, Launch, next_pow2, usual
from ...select import Choices, Work
from ..common.pdl import pdl_behind
from ..common.sequences import end_of, sample, start_of
from .calls import TMA_BYTES
from .candidates import TABLES
from .kernels import attention_decode_kernel, attention_decode_merge_kernel


@dataclass(frozen=True, slots=True)
class Problem:
    """What a plan may depend on. max_len: keys a sequence may come to, a power of two or more than
    it holds; never its length of the moment.

    page_size: 0 for a contiguous cache. has_start, has_len, sinks: kv_start, kv_len, sinks are
        given. q_len: newest tokens of a sequence.
    v_dim: columns of v, 0 for head_dim. shared: v is the first columns of k. codes: k and v are
        e4m3, with a scale for each key.
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
    codes: bool = False
    softcap: bool = False

    def __post_init__(self) -> None:
        usual(self, v_dim=self.head_dim)

    @property
    def columns(self) -> int:
        """Columns of v."""
        return self.v_dim or self.head_dim

    def key_bytes(self, columns: int) -> int:
        """Of so many columns of k and v of one key."""
        return columns + 8 if self.codes else columns * self.dtype.itemsize

    def seen(self) -> list[tuple[int, int]]:
        """Keys that a sequence sees, and how many sequences are like it."""
        reach = self.max_len if self.window is None else self.window + self.q_len - 1
        return [(max(0, min(end_of(self, i) - start_of(self, i), reach)), count) for i, count in sample(self.batch)]

    def cost(self) -> Cost:
        keys = sum(n * count for n, count in self.seen())
        both = self.head_dim + self.columns
        rows = self.batch * self.q_heads * self.q_len
        size = keys * self.kv_heads * self.key_bytes(self.head_dim if self.shared else both) + rows * both * self.dtype.itemsize
        return Cost(size, 2 * keys * self.q_heads * self.q_len * both)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        randn = partial(torch.randn, dtype=self.dtype, device=device)
        int32 = partial(torch.tensor, dtype=torch.int32, device=device)
        lengths, starts = ([of(self, i) for i in range(self.batch)] for of in (end_of, start_of))
        options: dict[str, Any] = {"window": self.window, "return_lse": self.return_lse, "normalize": self.normalize}
        options["kv_len"] = int32(lengths) if self.has_len else None
        options["kv_start"] = int32(starts) if self.has_start else None
        q = randn(self.batch, self.q_heads, self.q_len, self.head_dim)
        key = torch.arange(self.max_len, device=device)
        first, end = (torch.tensor(places, device=device)[:, None] for places in (starts, lengths))
        unused = (key < first) | (key >= end)  # [batch, max_len]
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
            held = torch.arange(max_pages, device=device) * self.page_size < end
            options["block_table"] = torch.where(held, table, 2147480000)  # entries past the length may be anything
            unused = shuffled[:, None, :, None]
        caches = [torch.where(unused, torch.nan, x) for x in caches]  # memory that holds no key may hold anything
        if self.codes:
            caches = [x.to(torch.float8_e4m3fn) for x in caches]
            for name in ("k_scale", "v_scale"):
                options[name] = torch.where(unused[..., 0], torch.nan, torch.rand(caches[0].shape[:3], device=device) + 0.5)
        k, *v = caches
        if self.shared and self.v_dim:
            options["v_dim"] = self.v_dim
        if self.sinks:
            options["sinks"] = torch.randn(self.q_heads, device=device)
        if self.softcap:
            options["softcap"] = 2.0
        return {"q": q, "k": k, "v": v[0] if v else None, **options}


MOST_SPLITS = 128  # the merge holds some columns of a row of each in registers
LEAST_KEYS = 32  # of a split: shorter ones are never worth their block
ALONE = 1 / 3  # time of what the longest block reads beyond the mean: alone it gets more of the memory
MOST_WAVES = 4  # of blocks, that KV splits are chosen for
SCORES = 1024  # of a step whose softmax takes as long as its exponentials; of more scores they overlap, of fewer they wait


@dataclass(frozen=True, slots=True)
class Config:
    """How the keys and the query heads are divided.

    tile_n: keys of a step; a power of two; in a paged cache a divisor or a multiple of the page
        size.
    num_kv_splits: KV splits of a sequence; 1 needs no merge and no workspace.
    keys_first: the keys are the rows of the products and the queries their columns (at least 8);
        otherwise the queries are rows (at least 16).
    latency: prefetch hint of the k and v loads, 1 to 10.
    occupancy, num_worker_warps, num_ctas: compiler hints.
    heads: query heads of a block, a power of two; 0: all that share the key head. 1 is a block per
        head: each reads the keys for itself.
    rows: rows (heads x tokens) that the tile of queries has at least, a power of two; those beyond
        the block's own are zeros.
    parts: column parts that k, v and the sums are kept in; a power of two.
    columns: columns of v of a block, a power of two, each block with all scores; 0: all of them.
    late: the denominators are kept key by key and summed after the last step, as always with codes
        and the keys first.
    sliced: keys are read through a view of the sequence's own, zeros behind it, in one loop; not of
        pages shorter than a tile, nor with a window or kv_start of any pages.
    paired: sliced, two tiles in a step of the loop; with an odd number of tiles the last is
        computed twice, once for nothing.
    """

    tile_n: int
    num_kv_splits: int
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


def candidates(p: Problem, device: Device) -> Iterator[Config]:
    """The rows of the architecture's table, each with KV splits: powers of two, and what fills a
    few waves of blocks.

    Nothing that is compiled in depends on max_len, so that a cache that grows while it decodes
    needs no new kernel: a split or a tile may lie behind the cache's end, in part or in whole.
    """
    if device.is_cpu:
        tile = p.page_size if p.page_size >= 128 else 1 << 30  # a tile is at most a page
        yield from (Config(min(512, tile), 1), Config(128, 3), Config(min(256, tile), 2, keys_first=True))
        yield Config(128, 2, heads=next_pow2(-(-p.q_heads // p.kv_heads // 2)), parts=2, columns=max(16, next_pow2(p.columns) // 2))
        return
    table, kind = TABLES[device.arch], _kind(p)
    for row in table[next(name for name in (kind, kind.rpartition("_")[0]) if name in table)]:
        heads = row["heads"] // next_pow2(p.q_len)
        c = Config(**{"num_kv_splits": 1, **row, "heads": heads if heads < p.q_heads // p.kv_heads else 0})
        if not pages_gather(p):
            c = replace(c, tile_n=min(c.tile_n, p.page_size))
        most = min(MOST_SPLITS, max(1, p.max_len // LEAST_KEYS))
        full = (waves * _resident(c, device) // _blocks(p, c) for waves in range(1, MOST_WAVES + 1))
        for n in sorted({1 << i for i in range(most.bit_length())} | {max(1, min(most, n)) for n in full}):
            yield replace(c, num_kv_splits=n)


def pages_gather(p: Problem) -> bool:
    """Whether a tile of keys may be gathered from several pages. The compiler does that by TMA even
    where rows are not multiples of 16 bytes, and then reads other memory, without an error.
    """
    widths = (p.head_dim,) if p.shared else (p.head_dim, p.columns)
    return not p.page_size or all(width * (1 if p.codes else p.dtype.itemsize) % TMA_BYTES == 0 for width in widths)


def _kind(p: Problem) -> str:
    """Which rows of the table are for a problem."""
    if p.dtype == torch.float32:
        return "fp32_64" if p.head_dim <= 64 else "fp32"
    few = p.q_heads // p.kv_heads * next_pow2(p.q_len) <= 16
    if p.head_dim <= 256:
        return ("few" if few else "many") + ("_wide" if p.head_dim > 128 else "") + ("_codes" if p.codes else "")
    if not p.shared:
        return "columns"
    # TMA loads keys of multiples of 8 columns; tiles of few rows need it.
    if p.codes:
        return "columns_shared_codes"
    return "columns_shared" + ("_few" if few and p.head_dim % 8 == 0 and _in_one_loop(p, 64) else "")


def _blocks(p: Problem, c: Config) -> int:
    """Blocks of one KV split."""
    heads, _ = rows_of(p, c)
    return p.batch * p.kv_heads * -(-p.q_heads // p.kv_heads // heads) * (-(-p.columns // c.columns) if c.columns else 1)


def _resident(c: Config, device: Device) -> int:
    """Blocks that the device holds at once."""
    return device.sms * (c.occupancy or 1) // (c.num_ctas or 1)


def legal(p: Problem, c: Config, device: Device) -> bool:
    """What the kernels can run without many spills. A loop for masked first tiles (window,
    kv_start) takes registers.
    """
    if device.is_cpu:
        return True
    if c.tile_n > p.page_size and not pages_gather(p):
        return False
    heads, rows = rows_of(p, c)
    first_masked = p.window is not None or p.has_start
    if p.dtype == torch.float32:
        return heads * next_pow2(p.q_len) <= (16 if p.q_len == 1 else 8)
    # Values of more columns, of their own, spill 1.4 KB (234 us, others 50).
    if device.arch == "sm_90" and p.head_dim > 256 and not p.shared and p.columns > 256 and c.tile_n > 32:
        return False
    # Blocks that share the registers and the memory of an SM.
    sharing = c.occupancy or 1
    if sharing > 1 and sharing * next_pow2(p.head_dim) * max(8 * rows, c.tile_n) > 32_768:
        return False
    if p.head_dim > 128 or device.arch != "sm_90":
        return (not c.paired or c.num_kv_splits == 1) and (not c.sliced or _in_one_loop(p, c.tile_n))
    # Of 32 rows it was the best of no problem (H200: 24.0 us, with the queries first 19.5; 37.5 and
    # 33.7; 93.9 and 73.6).
    if c.keys_first and rows > 16:
        return False
    gathers = 0 < p.page_size < 64 and c.keys_first
    narrow = c.keys_first and p.head_dim <= 64 and first_masked
    # Two blocks of eight warps gather keys page by page as fast as memory gives them; others do
    # not.
    gathering = c.occupancy == 2 and c.num_worker_warps == 8
    if p.codes:  # with eight warps the values of a narrow head spill
        return c.num_worker_warps == 4 if narrow else gathering or not gathers
    return not (narrow and c.occupancy == 1) and gathers == gathering


def work(p: Problem, c: Config, device: Device) -> Work:
    """What the launch over KV splits, and the merge, ask for."""
    c = fitted(p, c)
    _, rows = rows_of(p, c)
    size, tiles, longest = _reach(p, c.tile_n)
    blocks, resident = _blocks(p, c) * c.num_kv_splits, _resident(c, device)
    steps, even, one_wave = -(-longest // c.num_kv_splits), max(1.0, tiles / c.num_kv_splits), blocks <= resident
    columns_k, columns_v = sum(_column_tiles(p)), c.columns or next_pow2(p.columns)
    tile_bytes = c.tile_n * p.key_bytes(p.head_dim + (0 if p.shared else min(columns_v, p.columns)))
    return Work(
        blocks=blocks,
        resident=resident,
        per_sm=c.occupancy or 1,
        # One wave ends with its longest block; of several the mean counts, and what the longest is
        # behind it.
        steps=steps if one_wave else even,
        # Numbers are made of codes whatever the rows; products of more take longer only then.
        flops=2 * c.tile_n * (max(8, rows / 4) if p.codes else rows) * (columns_k + columns_v),
        kinds=("fma" if p.dtype == torch.float32 else "codes" if p.codes else "keys_first" if c.keys_first else "queries_first",),
        # Scores, their maximum and the sums wait for each other. Of 512 columns and more the
        # compiler keeps products in flight.
        serial=3.0 if p.head_dim <= 256 else 0.0,
        exponentials=(SCORES * c.tile_n * rows) ** 0.5,
        fill=tile_bytes,
        # Half a tile for what is read behind the end of a sequence, wherever a call's lengths lie;
        # and half for what a block could have read while it computes its last tile.
        dram=size + (p.batch * p.kv_heads + blocks) * tile_bytes / 2,
        out=rows * p.columns,
        chain=0 if one_wave else 1,  # the sequence's length, before its keys; of the first wave it is in the launch
        ragged=1.0 if one_wave else 1 + ALONE * max(0.0, steps / even - 1),
        partial=4 * p.batch * c.num_kv_splits * p.q_heads * p.q_len * (p.columns + 2) if c.num_kv_splits > 1 else 0,
    )


@lru_cache(maxsize=256)
def _reach(p: Problem, tile_n: int) -> tuple[int, float, int]:
    """Bytes that a call moves; tiles of keys that a sequence sees, mean and most."""
    size, seen = _lengths(p)
    tiles = [(max(1, -(-n // tile_n)), count) for n, count in seen]
    return size, sum(n * count for n, count in tiles) / p.batch, max(n for n, _ in tiles)


@lru_cache(maxsize=256)
def _lengths(p: Problem) -> tuple[int, list[tuple[int, int]]]:
    """Bytes that a call moves and `seen`, once for all widths of a tile."""
    return p.cost().size_bytes, p.seen()


def family(p: Problem, c: Config) -> str:
    """Launches that the model errs alike about."""
    how = "c" if not p.page_size else "g" if p.page_size < c.tile_n else "p"
    how += "r" * p.has_len + f"w{p.window}" + "v" * p.shared
    options = "l" * c.late + "s" * c.sliced + "2" * c.paired
    hints = f"{c.latency}{c.occupancy}{c.num_worker_warps} {c.rows} {c.parts} {c.columns}"
    return f"{1 if p.codes else p.dtype.itemsize}{how} {next_pow2(p.head_dim)} {c.tile_n}{'k' if c.keys_first else 'q'}{options} {hints}"


def timed_as(p: Problem, c: Config) -> tuple[Problem, Config]:
    """Groups of 5 to 8 query heads make the same tiles."""
    return replace(p, q_heads=p.kv_heads * next_pow2(p.q_heads // p.kv_heads)), c


CHOICES = Choices("attention_decode", candidates, legal, work, family, timed_as=timed_as, regimes_too=True)
space = CHOICES.space


def _in_one_loop(p: Problem, tile_n: int) -> bool:
    """Whether keys can be read through a view of the sequence's own: one of a page has to hold
    whole tiles, and to begin with the page.
    """
    return not p.page_size or (p.page_size >= tile_n and p.window is None and not p.has_start)


def rows_of(p: Problem, c: Config) -> tuple[int, int]:
    """Query heads of a block, and the rows (heads x tokens, padded) of its products."""
    heads = min(c.heads, p.q_heads // p.kv_heads) or p.q_heads // p.kv_heads
    return heads, max(c.rows, 8 if c.keys_first else 16, next_pow2(heads) * next_pow2(p.q_len))


def fitted(p: Problem, c: Config) -> Config:
    """With no more splits than the cache has tiles of keys: a tuned config may be that of a longer
    one. By the bucket of its length, which a call asks for: times are of the length itself.
    """
    most = max(1, -(-next_pow2(p.max_len) // c.tile_n))
    return c if c.num_kv_splits <= most else replace(c, num_kv_splits=most)


ARGUMENTS = (
    *("q", "q_tail", "k", "v", "out", "lse", "denominator"),
    *("sinks", "kv_len", "block_table", "kv_start", "k_scale", "v_scale", "window", "scale", "cap"),
)


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """The launch over KV splits and, if there are several, that of the merge."""
    c = fitted(p, c)
    group, tile_q = p.q_heads // p.kv_heads, next_pow2(p.q_len)
    heads, rows = rows_of(p, c)
    tile_d, tail = _column_tiles(p)
    tile_d = tile_d // c.parts
    # A block with some columns of v has them among its tiles of k if they are whole tiles of it.
    shared = p.shared and (not c.columns or (c.columns % tile_d == 0 and p.columns == tile_d * c.parts))
    tile_v = tile_d if shared else c.columns or next_pow2(p.columns) // c.parts
    column_blocks = -(-p.columns // c.columns) if c.columns else 1
    sliced = c.sliced and _in_one_loop(p, c.tile_n)
    constants = {
        "has_window": p.window is not None,
        "has_sinks": p.sinks,
        "shared": shared,
        "split_kv": c.num_kv_splits > 1,
        "group": group,
        "heads": heads,
        "tile_q": tile_q,
        "rows": rows,
        "parts": -(-(p.head_dim - tail) // tile_d),
        "tile_d": tile_d,
        "tail": tail,
        "column_blocks": column_blocks,
        "parts_v": -(-p.columns // tile_v) // column_blocks,
        "tile_v": tile_v,
        "sliced": sliced,
        "paired": sliced and c.paired,
        # Of codes it is 4 to 10 % fewer instructions: 16 x 16384 x 8 heads of 64 take 88.5 us in
        # place of 92.6, pages of 64 tokens of 64 x 8192 x 8 of 128 304 in place of 315 (H200).
        "late": c.late or (p.codes and c.keys_first and not p.shared),
    }
    grid = (c.num_kv_splits * column_blocks * -(-group // heads), p.kv_heads, p.batch)
    attend = Launch.of(attention_decode_kernel, grid, p, c, constants, pdl=True, unused=unused(p))
    if c.num_kv_splits == 1:
        return (attend,)
    untouched = tuple(dict.fromkeys((*attend.unused, "lse", "denominator", "sinks")))  # left to the merge
    return with_merge(replace(attend, unused=untouched), p, c.num_kv_splits, device)


def with_merge(attend: Launch, p: Problem, splits: int, device: Device) -> tuple[Launch, Launch]:
    """A launch over so many KV splits, which writes to a scratch array `partial` in place of `out`,
    and that of the merge.
    """
    # Behind each row of sums its maximum and denominator; padded to whole 16 bytes.
    partial = ((p.batch, splits, p.q_heads, p.q_len, -(-(p.columns + 2) // 4) * 4), torch.float32)
    attend = replace(attend, scratch={"partial": partial}, renames={**attend.renames, "out": "partial"})
    return attend, merge(p, splits, prod(attend.grid), device)


def merge(p: Problem, splits: int, before: int, device: Device) -> Launch:
    """The launch that merges the scratch array `partial` of so many KV splits, behind one of
    `before` blocks.
    """
    tile_s, tile_v = next_pow2(splits), next_pow2(p.columns)
    # Columns of a block: all while that makes two blocks for every SM, and no more than fit in
    # registers.
    while tile_v > 64 and (tile_s * tile_v > 8192 or p.batch * p.q_len * p.q_heads * (next_pow2(p.columns) // tile_v) < 2 * device.sms):
        tile_v //= 2
    constants = {"has_sinks": p.sinks, "tile_s": tile_s, "tile_v": tile_v}
    untouched = tuple(name for name in unused(p) if name in ("lse", "denominator", "sinks"))
    grid = p.q_heads * -(-p.columns // tile_v), p.q_len, p.batch
    pdl = pdl_behind(prod(grid), before, device)
    return Launch.of(attention_decode_merge_kernel, grid, p, None, constants, pdl=pdl, unused=untouched)


def unused(p: Problem) -> tuple[str, ...]:
    """Parameters that no launch of the problem touches."""
    touched = {
        "q_tail": _column_tiles(p)[1] > 0,
        "lse": p.return_lse or not p.normalize,
        "denominator": not p.normalize,
        "sinks": p.sinks,
        "kv_len": p.has_len,
        "block_table": p.page_size > 0,
        "kv_start": p.has_start,
        "k_scale": p.codes,
        "v_scale": p.codes,
    }
    return tuple(name for name, given in touched.items() if not given)


def _column_tiles(p: Problem) -> tuple[int, int]:
    """The power of two that k's columns are padded to; or, where they are one and a smaller one
    (576) and v does not reach there, these two. Codes are never the smaller one.
    """
    padded = next_pow2(p.head_dim)
    if p.codes:
        return padded, 0
    main = padded // 2
    rest = p.head_dim - main
    if (p.shared or p.head_dim > 128) and 16 <= rest < main and rest & (rest - 1) == 0 and not (p.shared and p.columns > main):
        return main, rest
    return padded, 0
