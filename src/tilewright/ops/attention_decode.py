"""Attention of one query per sequence against a long cache: out = softmax(scale * q k^T + mask) v, per head.

The query heads that share a key head are the rows (or columns) of one tile, so k and v are read once. The keys of a sequence are cut into
`splits` ranges, one block each; a second kernel merges the ranges' results. The ranges come from the length that the device holds, so that
a captured graph serves any step.

Source    Dao et al. 2023, "Flash-Decoding for long-context inference" (splits); Ainslie et al. 2023, arXiv:2305.13245 (GQA); Kwon et al. 2023,
          arXiv:2309.06180 (pages).
Numerics  As attention. Partial results and their lse are fp32; merged with weights exp2(lse - max lse).
Bound     Memory: k and v of the visible keys, once.
"""

import math
from dataclasses import dataclass
from typing import Any, Optional

import cuda.tile as ct
import torch
from torch import Tensor

from ..launch import Cost, Device, Plan, best_plan, check_tensor, launch, must, next_pow2, torch_op
from .attention_common import DTYPES, FLOOR, LN2, LOG2E, check_heads, check_int32, check_scale_and_window, product, softmax_finish, softmax_step

ZERO = ct.PaddingMode.ZERO


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_len: Tensor | None = None,
    *,
    block_table: Tensor | None = None,
    kv_start: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The definition, sequence by sequence: products in the dtype, softmax at least in fp32."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    for i in range(len(q)):
        if block_table is None:
            keys, values = k[i], v[i]
            longest = k.shape[2]
        else:
            longest = block_table.shape[1] * k.shape[2]
        end = longest if kv_len is None else int(kv_len[i])
        begin = 0 if kv_start is None else int(kv_start[i])
        if window is not None:
            begin = max(begin, end - window)
        if begin >= end:
            continue
        if block_table is not None:
            pages = block_table[i, : -(-end // k.shape[2])].long()
            keys, values = (x[pages].transpose(0, 1).flatten(1, 2) for x in (k, v))
        keys, values = (x[:, begin:end].repeat_interleave(q.shape[1] // k.shape[1], 0) for x in (keys, values))
        scores = (q[i] @ keys.mT * scale).to(lse.dtype)
        lse[i] = scores.logsumexp(-1)
        out[i] = scores.softmax(-1).to(v.dtype) @ values
    return (out, lse) if return_lse else out


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


@dataclass(frozen=True, slots=True)
class Config:
    """How the keys are cut and walked.

    tile_n: keys of a step; a power of two; in a paged cache a divisor of the page size.
    splits: ranges that the keys of a sequence are cut into; 1 needs no merge and no workspace.
    keys_first: the keys are the rows of the products and the heads their columns (at least 8); otherwise the heads are rows (at least 16).
    latency: prefetch hint of the k and v loads, 1 to 10.
    tf32x3: fp32 products on tensor cores, as three TF32 products each.
    occupancy, num_worker_warps: compiler hints.
    """

    tile_n: int
    splits: int
    keys_first: bool = False
    latency: int = 4
    tf32x3: bool = False
    occupancy: int | None = None
    num_worker_warps: int | None = None


def space(p: Problem, device: Device) -> list[Config]:
    """Every config worth timing, the untuned default first."""
    longest = max(16, next_pow2(p.max_len))
    if p.page_size:
        longest = min(longest, p.page_size)
    if device.is_cpu:
        return [Config(min(1024, longest), 1), Config(min(128, longest), 3), Config(min(256, longest), 2, keys_first=True)]
    heads = p.batch * p.kv_heads
    configs = []
    for tile_n in (128, 64):
        splits = max(1, min(ct.cdiv(p.max_len, tile_n), 2 * device.sms // heads))
        configs.append(Config(min(tile_n, longest), splits, latency=4, occupancy=2, num_worker_warps=4))
    return configs


def plan(p: Problem, c: Config, device: Device) -> Plan:
    """Grid and compile-time constants of the launch over ranges, and of the merge."""
    group, tile_d = p.q_heads // p.kv_heads, next_pow2(p.head_dim)
    rows = max(8 if c.keys_first else 16, next_pow2(group))
    flags = (p.page_size, p.window is not None, p.has_start, p.has_len, p.return_lse, c.splits, c.keys_first)
    hints = {"occupancy": c.occupancy, "num_worker_warps": c.num_worker_warps}
    grid = (c.splits, p.kv_heads, p.batch)
    constants = (*flags, rows, tile_d, c.tile_n, c.latency, c.tf32x3)
    if c.splits == 1:
        return Plan(attention_decode_kernel, grid, constants, **hints)
    partial = (p.batch, p.kv_heads, c.splits, group)
    workspace = (((*partial, p.head_dim), torch.float32), (partial, torch.float32))
    merge = Plan(attention_decode_merge_kernel, (group, p.kv_heads, p.batch), (p.return_lse, next_pow2(c.splits), tile_d))
    return Plan(attention_decode_kernel, grid, constants, **hints, workspace=workspace, then=merge)


@ct.kernel
def attention_decode_kernel(
    Q,
    K,
    V,
    OUT,
    LSE,
    KV_LEN,
    BLOCK_TABLE,
    KV_START,
    window: int,
    scale: float,
    PAGE_SIZE: ct.Constant[int],
    HAS_WINDOW: ct.Constant[bool],
    HAS_START: ct.Constant[bool],
    HAS_LEN: ct.Constant[bool],
    RETURN_LSE: ct.Constant[bool],
    SPLITS: ct.Constant[int],
    KEYS_FIRST: ct.Constant[bool],
    ROWS: ct.Constant[int],
    TILE_D: ct.Constant[int],
    TILE_N: ct.Constant[int],
    LATENCY: ct.Constant[int],
    TF32X3: ct.Constant[bool],
):
    """One block: all query heads of one key head over one range of keys. Grid (splits, kv_heads, batch).

    Q [batch, kv_heads, group, head_dim]; K, V [batch, kv_heads, max_len, head_dim] or [pages, kv_heads, page_size, head_dim].
    SPLITS = 1: OUT like Q, LSE [batch, kv_heads, group]; otherwise fp32 partials [batch, kv_heads, splits, group(, head_dim)], their lse in base 2.
    int32: KV_LEN, KV_START [batch], BLOCK_TABLE [batch, max_pages]. What a flag says is absent is not touched.
    scale: of the scores, times log2(e).
    """
    split, head, batch = ct.bid(0), ct.bid(1), ct.bid(2)
    end = K.shape[2]
    if PAGE_SIZE:
        end = BLOCK_TABLE.shape[1] * PAGE_SIZE
    if HAS_LEN:
        end = max(0, min(ct.load(KV_LEN, (batch,), ()), end))
    begin = 0
    if HAS_START:
        begin = max(0, ct.load(KV_START, (batch,), ()))
    if HAS_WINDOW:
        begin = max(begin, end - window)
    begin = min(begin, end)

    # This block's tiles: [first, last). Of them [first, head_end) and [tail, last) may hold keys that are not to be seen.
    first, last = begin // TILE_N, ct.cdiv(end, TILE_N)
    per_split = ct.cdiv(last - first, SPLITS)
    first = first + split * per_split
    last = min(last, first + per_split)
    head_end = max(first, min(last, ct.cdiv(begin, TILE_N)))
    tail = max(head_end, min(last, end // TILE_N))

    axis = 0 if KEYS_FIRST else 1  # along which the keys of a tile of scores lie
    state_shape = (1, ROWS) if KEYS_FIRST else (ROWS, 1)
    q = ct.load(Q, (batch, head, 0, 0), (1, 1, ROWS, TILE_D), padding_mode=ZERO).reshape((ROWS, TILE_D))
    if KEYS_FIRST:
        q = ct.transpose(q)

    def load(ARRAY, j, KEYS_LAST):
        if PAGE_SIZE:
            page = ct.load(BLOCK_TABLE, (batch, j // (PAGE_SIZE // TILE_N)), ())
            j = j % (PAGE_SIZE // TILE_N)
        else:
            page = batch
        if KEYS_LAST:
            tile = ct.load(ARRAY, (page, head, 0, j), (1, 1, TILE_D, TILE_N), order=(0, 1, 3, 2), padding_mode=ZERO, latency=LATENCY)
            return tile.reshape((TILE_D, TILE_N))
        return ct.load(ARRAY, (page, head, j, 0), (1, 1, TILE_N, TILE_D), padding_mode=ZERO, latency=LATENCY).reshape((TILE_N, TILE_D))

    def step(j, state, MASKED):
        accumulator, maximum, denominator = state
        key = j * TILE_N + ct.arange(TILE_N, dtype=ct.int32)
        seen = (key >= begin) & (key < end)
        if KEYS_FIRST:
            scores = product(load(K, j, False), q, ct.zeros((TILE_N, ROWS), dtype=ct.float32), TF32X3)
            v = load(V, j, True)
        else:
            scores = product(q, load(K, j, True), ct.zeros((ROWS, TILE_N), dtype=ct.float32), TF32X3)
            v = load(V, j, False)
        if MASKED:
            scores = ct.where(ct.expand_dims(seen, 1 - axis), scores, -math.inf)
            v = ct.where(ct.expand_dims(seen, axis), v, 0.0)  # hidden memory may hold NaN, and 0 * NaN is NaN
        weights, factor, maximum, denominator = softmax_step(scores, maximum, denominator, scale, V.dtype, axis, 1)
        if KEYS_FIRST:
            accumulator = product(v, weights, accumulator * factor, TF32X3)
        else:
            accumulator = product(weights, v, accumulator * factor, TF32X3)
        return accumulator, maximum, denominator

    state = (
        ct.zeros((TILE_D, ROWS) if KEYS_FIRST else (ROWS, TILE_D), dtype=ct.float32),
        ct.full(state_shape, FLOOR, dtype=ct.float32),
        ct.zeros(state_shape, dtype=ct.float32),
    )
    if HAS_WINDOW or HAS_START:
        for j in range(first, head_end):
            state = step(j, state, True)
    for j in range(head_end, tail):
        state = step(j, state, False)
    for j in range(tail, last):
        state = step(j, state, True)
    out, lse = softmax_finish(*state)
    if KEYS_FIRST:
        out = ct.transpose(out)
    if SPLITS == 1:
        ct.store(OUT, (batch, head, 0, 0), out.astype(OUT.dtype).reshape((1, 1, ROWS, TILE_D)))
        if RETURN_LSE:
            ct.store(LSE, (batch, head, 0), lse.reshape((1, 1, ROWS)))
    else:
        ct.store(OUT, (batch, head, split, 0, 0), out.reshape((1, 1, 1, ROWS, TILE_D)))
        ct.store(LSE, (batch, head, split, 0), (lse * LOG2E).reshape((1, 1, 1, ROWS)))


@ct.kernel
def attention_decode_merge_kernel(
    PARTIAL,
    PARTIAL_LSE,
    OUT,
    LSE,
    RETURN_LSE: ct.Constant[bool],
    TILE_S: ct.Constant[int],
    TILE_D: ct.Constant[int],
):
    """One query head: out = sum(w * partial) / sum(w), w = exp2(lse - max lse). Grid (group, kv_heads, batch).

    PARTIAL [batch, kv_heads, splits, group, head_dim], PARTIAL_LSE without head_dim, in base 2; OUT [batch, kv_heads, group, head_dim].
    """
    row, head, batch = ct.bid(0), ct.bid(1), ct.bid(2)
    lse = ct.load(PARTIAL_LSE, (batch, head, 0, row), (1, 1, TILE_S, 1), padding_mode=ct.PaddingMode.NEG_INF).reshape((TILE_S, 1))
    partial = ct.load(PARTIAL, (batch, head, 0, row, 0), (1, 1, TILE_S, 1, TILE_D), padding_mode=ZERO).reshape((TILE_S, TILE_D))
    largest = ct.maximum(ct.max(lse, axis=0, keepdims=True), FLOOR)
    weights = ct.exp2(lse - largest)
    total = ct.sum(weights, axis=0, keepdims=True)
    out, lse = softmax_finish(ct.sum(weights * partial, axis=0, keepdims=True), largest, total)
    ct.store(OUT, (batch, head, row, 0), out.astype(OUT.dtype).reshape((1, 1, 1, TILE_D)))
    if RETURN_LSE:
        ct.store(LSE, (batch, head, row), lse.reshape((1, 1, 1)))


@torch_op(mutates=("out", "lse"))
def attention_decode_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Optional[Tensor],
    kv_len: Optional[Tensor],
    block_table: Optional[Tensor],
    kv_start: Optional[Tensor],
    scale: float,
    window: Optional[int],
) -> None:
    """`attention_decode` into `out` and, if given, `lse`. No checks, no sync: safe under graph capture."""
    batch, q_heads, _, head_dim = q.shape
    kv_heads = k.shape[1]
    page_size = 0 if block_table is None else k.shape[2]
    max_len = next_pow2(k.shape[2] if block_table is None else block_table.shape[1] * page_size)  # a bucket: a growing cache keeps its plan
    options = (page_size, window, kv_start is not None, kv_len is not None, lse is not None)
    chosen = best_plan(space, plan, Problem(batch, q_heads, kv_heads, max_len, head_dim, q.dtype, *options), Device.of(q))
    q, out = (x.squeeze(2).unflatten(1, (kv_heads, -1)) for x in (q, out))
    # q stands in for the arrays that the kernel's flags say are absent.
    lse = q if lse is None else lse.squeeze(2).unflatten(1, (kv_heads, -1))
    into = (out, lse) if chosen.then is None else chosen.scratch(q.device)
    absent_or = (q if x is None else x for x in (kv_len, block_table, kv_start))
    launch(chosen, q, k, v, *into, *absent_or, 0 if window is None else window, scale * LOG2E)
    if chosen.then is not None:
        launch(chosen.then, *into, out, lse)


def attention_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_len: Tensor | None = None,
    *,
    block_table: Tensor | None = None,
    kv_start: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention of each sequence's newest token over its cache; query head h reads key head h // (q_heads // kv_heads).

    Args:
        q: [batch, q_heads, 1, head_dim]; bf16, fp16 or fp32; head_dim 1..256; stride 1 in the last axis.
        k, v: [batch, kv_heads, max_len, head_dim], dtype and device of q, any strides with stride 1 in the last axis; kv_heads divides q_heads.
            With a block_table [pages, kv_heads, page_size, head_dim], page_size a power of two, at least 16.
        kv_len: [batch] int32; the number of keys of each sequence; default all. Read on the device: nothing depends on its values here.
        block_table: [batch, max_pages] int32; the page that holds keys i * page_size onwards. Entries past kv_len may be anything.
        kv_start: [batch] int32; the first key of each sequence (left padding).
        window: only the last `window` keys are seen.
        scale: of q k^T; positive; default head_dim ** -0.5.
        return_lse: also return the natural log of the softmax denominator.
    Returns: out [batch, q_heads, 1, head_dim]; with return_lse the tuple (out, lse), lse fp32 [batch, q_heads, 1].
        A sequence with no key to see gives 0, its lse -inf. Memory outside the keys may hold anything.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_tensor(q, "q", ndim=4, dtypes=DTYPES)
    batch, q_heads, q_len, head_dim = q.shape
    if q_len != 1:
        raise must("q.shape[2]", 1, q_len)
    check_tensor(k, "k", ndim=4, like=q)
    check_heads(q, k)
    scale = check_scale_and_window(scale, window, head_dim)
    check_tensor(k, "k", shape=(k.shape[0] if block_table is not None else batch, *k.shape[1:3], head_dim), like=q)
    check_tensor(v, "v", shape=tuple(k.shape), like=q)
    if block_table is not None:
        check_int32(block_table, "block_table", q, (batch, *block_table.shape[1:2]))
        if k.shape[2] < 16 or k.shape[2] & (k.shape[2] - 1):
            raise must("k.shape[2]", "a power of two, at least 16 (the page size)", k.shape[2])
    for name, given in (("kv_len", kv_len), ("kv_start", kv_start)):
        if given is not None:
            check_int32(given, name, q, (batch,))
    out = torch.empty((batch, 1, q_heads, head_dim), dtype=q.dtype, device=q.device).transpose(1, 2)
    lse = torch.empty((batch, q_heads, 1), dtype=torch.float32, device=q.device) if return_lse else None
    if out.numel() and k.numel() and (block_table is None or block_table.numel()):
        attention_decode_out(q, k, v, out, lse, kv_len, block_table, kv_start, scale, window)
    else:
        out.zero_()
        if lse is not None:
            lse.fill_(-math.inf)
    return out if lse is None else (out, lse)
