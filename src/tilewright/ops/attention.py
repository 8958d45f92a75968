"""Attention of many queries (prefill): out = softmax(scale * q k^T + mask) v, per head, in one pass over the keys.

With n keys and q_len queries in a sequence, query i sees key j where (causal) j <= i + n - q_len and (window W) j > i + n - q_len - W.
A row that sees no key gives 0 and lse -inf.

Source    Dao et al. 2022, arXiv:2205.14135 (tiles, running softmax); Milakov and Gimelshein 2018, arXiv:1805.02867, alg. 3 (the recurrence).
Numerics  Scores, running maximum, denominator and accumulator in fp32; weights rounded to the dtype of v before their product with v; out
          rounded once. Exponentials in base 2, scale * log2(e) folded into one fma. Masked scores are -inf; the running maximum starts at a
          finite floor, so that a tile with every key masked adds exp2(-inf) = 0 and never computes -inf - -inf.
Bound     Compute, 4 * head_dim flops per visible score; at head_dim 64 the exponentials are nearly as long as the products.
"""

import math
from dataclasses import dataclass
from typing import Any, Optional

import cuda.tile as ct
import torch
from torch import Tensor

from ..launch import Cost, Device, Plan, best_plan, check_tensor, launch, must, next_pow2, torch_op
from .attention_common import DTYPES, FLOOR, LOG2E, check_heads, check_int32, check_scale_and_window, product, softmax_finish, softmax_step

REFERENCE_SCORES = 1 << 26  # scores that the reference holds at a time
ZERO = ct.PaddingMode.ZERO


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    kv_start: Tensor | None = None,
    kv_len: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    max_q_len: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The definition, sequence by sequence: products in the dtype, softmax at least in fp32, as Hugging Face's eager attention does."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if cu_seqlens_q is not None and cu_seqlens_kv is not None:
        rows = list(map(slice, cu_seqlens_q.tolist(), cu_seqlens_q.tolist()[1:]))
        keys = list(map(slice, cu_seqlens_kv.tolist(), cu_seqlens_kv.tolist()[1:]))
        parts = [_one(q[r].transpose(0, 1), k[s].transpose(0, 1), v[s].transpose(0, 1), causal, scale, window) for r, s in zip(rows, keys, strict=True)]
        out = torch.cat([o for o, _ in parts], dim=1).transpose(0, 1)
        lse = torch.cat([x for _, x in parts], dim=1)
    else:
        starts = [0] * len(q) if kv_start is None else kv_start.tolist()
        stops = [k.shape[2]] * len(q) if kv_len is None else kv_len.tolist()
        parts = [_one(q[i], k[i, :, a:b], v[i, :, a:b], causal, scale, window) for i, (a, b) in enumerate(zip(starts, stops, strict=True))]
        out = torch.stack([o for o, _ in parts])
        lse = torch.stack([x for _, x in parts])
    return (out, lse) if return_lse else out


def _one(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: int | None) -> tuple[Tensor, Tensor]:
    """One sequence: q [q_heads, q_len, head_dim], k and v [kv_heads, n, head_dim]; out like q, lse [q_heads, q_len]."""
    (q_heads, q_len, _), n = q.shape, k.shape[1]
    k, v = (x.repeat_interleave(q_heads // len(x), 0) for x in (k, v))
    out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32), device=q.device)
    step = max(1, REFERENCE_SCORES // max(1, q_heads * n))
    for first in range(0, q_len if n else 0, step):
        rows = slice(first, min(first + step, q_len))
        last_key = torch.arange(rows.start, rows.stop, device=q.device)[:, None] + n - q_len
        key = torch.arange(n, device=q.device)
        seen = torch.ones(rows.stop - rows.start, n, dtype=torch.bool, device=q.device)
        if causal:
            seen &= key <= last_key
        if window is not None:
            seen &= key > last_key - window
        scores = (q[:, rows] @ k.mT * scale).to(lse.dtype).masked_fill(~seen, -torch.inf)
        lse[:, rows] = scores.logsumexp(-1)
        weights = scores.softmax(-1).masked_fill(~seen.any(-1, keepdim=True), 0.0)
        out[:, rows] = weights.to(v.dtype) @ v
    return out, lse


@dataclass(frozen=True, slots=True)
class Problem:
    """What a plan may depend on.

    q_len, kv_len: the longest, when lengths differ between sequences. has_start, has_len: kv_start, kv_len are given. varlen: cu_seqlens are.
    """

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    dtype: torch.dtype
    causal: bool = True
    window: int | None = None
    has_start: bool = False
    has_len: bool = False
    varlen: bool = False
    return_lse: bool = False

    def _lengths(self, longest: int) -> list[int]:
        """Lengths of the sequences of a ragged case: `longest` first, then spread down to a third of it; for three and more an empty one."""
        lengths = [longest - (longest * i * 2) // (3 * self.batch) for i in range(self.batch)]
        return [*lengths[:-1], 0] if self.varlen and self.batch > 2 else lengths

    def _starts(self) -> list[int]:
        return [(self.kv_len * i) // (4 * self.batch) for i in range(self.batch)]

    def cost(self) -> Cost:
        ragged = self.varlen or self.has_len
        q_lens = self._lengths(self.q_len) if self.varlen else [self.q_len] * self.batch
        kv_lens = self._lengths(self.kv_len) if ragged else [self.kv_len] * self.batch
        if self.has_start:
            kv_lens = [max(0, n - start) for n, start in zip(kv_lens, self._starts(), strict=True)]
        scores = sum(_visible_scores(q, n, self.causal, self.window) for q, n in zip(q_lens, kv_lens, strict=True))
        elements = 2 * sum(q_lens) * self.q_heads + 2 * sum(kv_lens) * self.kv_heads
        lse_bytes = 4 * sum(q_lens) * self.q_heads if self.return_lse else 0
        return Cost(elements * self.head_dim * self.dtype.itemsize + lse_bytes, 4 * scores * self.q_heads * self.head_dim)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=self.dtype, device=device)

        def int32(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        options: dict[str, Any] = {"causal": self.causal, "window": self.window, "return_lse": self.return_lse}
        if self.varlen:
            q_lens, kv_lens = self._lengths(self.q_len), self._lengths(self.kv_len)
            for name, lengths in (("q", q_lens), ("kv", kv_lens)):
                options[f"cu_seqlens_{name}"] = int32([sum(lengths[:i]) for i in range(self.batch + 1)])
            q = randn(sum(q_lens), self.q_heads, self.head_dim)
            k, v = (randn(sum(kv_lens), self.kv_heads, self.head_dim) for _ in range(2))
            return {"q": q, "k": k, "v": v, "max_q_len": self.q_len, **options}
        q = randn(self.batch, self.q_len, self.q_heads, self.head_dim).transpose(1, 2)  # as a projection leaves it
        k, v = (randn(self.batch, self.kv_heads, self.kv_len, self.head_dim) for _ in range(2))
        key = torch.arange(self.kv_len, device=device)[:, None]
        unused = torch.zeros(self.batch, 1, 1, 1, dtype=torch.bool, device=device)
        if self.has_start:
            options["kv_start"] = int32(self._starts())
            unused = unused | (key < options["kv_start"].view(-1, 1, 1, 1))
        if self.has_len:
            options["kv_len"] = int32(self._lengths(self.kv_len))
            unused = unused | (key >= options["kv_len"].view(-1, 1, 1, 1))
        k, v = (torch.where(unused, torch.nan, x) for x in (k, v))  # memory that holds no key may hold anything
        return {"q": q, "k": k, "v": v, **options}


def _visible_scores(q_len: int, n: int, causal: bool, window: int | None) -> int:
    """How many (query, key) pairs of one head the mask leaves."""
    if not causal and window is None:
        return q_len * n
    total = 0
    for last_key in range(n - q_len, n):
        stop = min(n, last_key + 1) if causal else n
        start = 0 if window is None else max(0, last_key - window + 1)
        total += max(0, stop - start)
    return total


@dataclass(frozen=True, slots=True)
class Config:
    """How one block walks over the keys.

    tile_m, tile_n: queries of a block, keys of a step; powers of two.
    parts: column parts in which a step's weights are made; 2 halves the registers that they hold, which lets the compiler overlap the
        softmax of one step with the products of another.
    latency: prefetch hint of the k and v loads, 1 to 10.
    persistent: a block walks over many tiles of queries; otherwise it has one.
    tf32x3: fp32 products on tensor cores, as three TF32 products each.
    num_ctas, occupancy, num_worker_warps: compiler hints.
    """

    tile_m: int
    tile_n: int
    parts: int = 1
    latency: int = 2
    persistent: bool = False
    tf32x3: bool = False
    num_ctas: int | None = None
    occupancy: int | None = None
    num_worker_warps: int | None = None


def space(p: Problem, device: Device) -> list[Config]:
    """Every config worth timing, the untuned default first."""
    longest_m, longest_n = (max(16, next_pow2(n)) for n in (p.q_len, p.kv_len))
    if device.is_cpu:
        return [Config(min(256, longest_m), min(512, longest_n)), Config(min(64, longest_m), min(128, longest_n), parts=2)]
    wide = next_pow2(p.head_dim)
    if p.dtype == torch.float32:
        return [Config(64, 64), Config(32, 64), Config(64, 32)] 
    return [Config(128, 128, parts=2, occupancy=1, num_worker_warps=8)]


def plan(p: Problem, c: Config, device: Device) -> Plan:
    """Grid and compile-time constants of one launch."""
    ragged = p.varlen or p.has_start or p.has_len
    masked = p.causal or ragged or p.window is not None or p.kv_len % c.tile_n != 0
    flags = (p.causal, p.window is not None, p.has_start, p.has_len, p.varlen, p.return_lse, masked, c.persistent)
    tiles = (p.q_heads // p.kv_heads, next_pow2(p.head_dim), c.tile_m, c.tile_n, c.parts, c.latency, c.tf32x3)
    grid: tuple[int, ...] = (ct.cdiv(p.q_len, c.tile_m), p.q_heads, p.batch)
    if c.persistent:
        grid = (min(math.prod(grid), device.sms * (c.occupancy or 1) // (c.num_ctas or 1)),)
    hints = {"num_ctas": c.num_ctas, "occupancy": c.occupancy, "num_worker_warps": c.num_worker_warps}
    return Plan(attention_kernel, grid, flags + tiles, **hints)


@ct.kernel
def attention_kernel(
    Q,
    K,
    V,
    OUT,
    LSE,
    KV_START,
    KV_LEN,
    CU_Q,
    CU_KV,
    window: int,
    scale: float,
    CAUSAL: ct.Constant[bool],
    HAS_WINDOW: ct.Constant[bool],
    HAS_START: ct.Constant[bool],
    HAS_LEN: ct.Constant[bool],
    VARLEN: ct.Constant[bool],
    RETURN_LSE: ct.Constant[bool],
    MASKED: ct.Constant[bool],
    PERSISTENT: ct.Constant[bool],
    GROUP: ct.Constant[int],
    TILE_D: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    PARTS: ct.Constant[int],
    LATENCY: ct.Constant[int],
    TF32X3: ct.Constant[bool],
):
    """TILE_M queries of one head at a time. Grid (query tiles, q_heads, batch); persistent: blocks that stride over all of these.

    Q, OUT [batch, q_heads, q_len, head_dim]; K, V [batch, kv_heads, kv_len, head_dim]; LSE [batch, q_heads, q_len].
    int32: KV_START, KV_LEN [batch]; CU_Q, CU_KV [batch + 1], for arrays whose batch axis is 1. What a flag says is absent is not touched.
    scale: of the scores, times log2(e). MASKED: some tile of keys may be partly hidden.
    """
    tile, head, batch = ct.bid(0), ct.bid(1), ct.bid(2)
    if VARLEN:
        # Slices end where the sequence ends: beyond, loads give zeros and stores do nothing.
        first_q, end_q = ct.load(CU_Q, (batch,), ()), ct.load(CU_Q, (batch + 1,), ())
        first_kv, end_kv = ct.load(CU_KV, (batch,), ()), ct.load(CU_KV, (batch + 1,), ())
        Q, OUT = Q.slice(2, first_q, end_q), OUT.slice(2, first_q, end_q)
        K, V = K.slice(2, first_kv, end_kv), V.slice(2, first_kv, end_kv)
        if RETURN_LSE:
            LSE = LSE.slice(2, first_q, end_q)
        batch = 0
    elif HAS_START or HAS_LEN:
        begin, end = 0, K.shape[2]
        if HAS_LEN:
            end = max(0, min(ct.load(KV_LEN, (batch,), ()), end))
        if HAS_START:
            begin = max(0, min(ct.load(KV_START, (batch,), ()), end))
        K, V = K.slice(2, begin, end), V.slice(2, begin, end)
    q_len, n = Q.shape[2], K.shape[2]
    tiles = ct.cdiv(q_len, TILE_M)
    column = ct.arange(TILE_N, dtype=ct.int32)[None, :]

    def attend(tile, head, batch):
        if CAUSAL:
            tile = tiles - 1 - tile  # the longest first
        first = tile * TILE_M + n - q_len  # the last key that the tile's first query sees under a causal mask
        begin, end, masked_from = 0, ct.cdiv(n, TILE_N), n // TILE_N
        if CAUSAL:
            end = min(end, ct.cdiv(max(0, first + TILE_M), TILE_N))
            masked_from = min(masked_from, max(0, first + 1) // TILE_N)
        if HAS_WINDOW:
            begin = max(0, first - window + 1) // TILE_N
        row = first + ct.arange(TILE_M, dtype=ct.int32)[:, None]
        q = ct.load(Q, (batch, head, tile, 0), (1, 1, TILE_M, TILE_D), padding_mode=ZERO).reshape((TILE_M, TILE_D))
        maximum = ct.full((TILE_M, 1), FLOOR, dtype=ct.float32)
        denominator = ct.zeros((TILE_M, 1), dtype=ct.float32)
        accumulator = ct.zeros((TILE_M, TILE_D), dtype=ct.float32)
        for j in range(begin, end):
            k = ct.load(K, (batch, head // GROUP, 0, j), (1, 1, TILE_D, TILE_N), order=(0, 1, 3, 2), padding_mode=ZERO, latency=LATENCY)
            scores = product(q, k.reshape((TILE_D, TILE_N)), ct.zeros((TILE_M, TILE_N), dtype=ct.float32), TF32X3)
            if MASKED and (HAS_WINDOW or j >= masked_from):
                key = j * TILE_N + column
                seen = key < n
                if CAUSAL:
                    seen = key <= row  # no query of the sequence sees beyond n; the rows that pad the last tile are not stored
                if HAS_WINDOW:
                    seen = seen & (key > row - window)
                scores = ct.where(seen, scores, -math.inf)
            weights, factor, maximum, denominator = softmax_step(scores, maximum, denominator, scale, V.dtype, 1, PARTS)
            v = ct.load(V, (batch, head // GROUP, j, 0), (1, 1, TILE_N, TILE_D), padding_mode=ZERO, latency=LATENCY)
            accumulator = product(weights, v.reshape((TILE_N, TILE_D)), accumulator * factor, TF32X3)
        out, lse = softmax_finish(accumulator, maximum, denominator)
        ct.store(OUT, (batch, head, tile, 0), out.astype(OUT.dtype).reshape((1, 1, TILE_M, TILE_D)))
        if RETURN_LSE:
            ct.store(LSE, (batch, head, tile), lse.reshape((1, 1, TILE_M)))

    if PERSISTENT:
        # All heads' longest tiles first, so that blocks end together.
        heads = Q.shape[1]
        for item in range(ct.bid(0), tiles * heads * Q.shape[0], ct.num_blocks(0)):
            attend(item // (heads * Q.shape[0]), item % heads, item // heads % Q.shape[0])
    elif not VARLEN:
        attend(tile, head, batch)
    elif tile < tiles:  # the grid covers the longest sequence
        attend(tile, head, batch)


@torch_op(mutates=("out", "lse"))
def attention_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Optional[Tensor],
    kv_start: Optional[Tensor],
    kv_len: Optional[Tensor],
    cu_seqlens_q: Optional[Tensor],
    cu_seqlens_kv: Optional[Tensor],
    scale: float,
    causal: bool,
    window: Optional[int],
    max_q_len: Optional[int],
) -> None:
    """`attention` into `out` and, if given, `lse`. No checks, no sync: safe under graph capture. max_q_len: with cu_seqlens."""
    varlen = cu_seqlens_q is not None
    if varlen:
        q, k, v, out = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v, out))
        lse = None if lse is None else lse.unsqueeze(0)
    (batch, q_heads, q_len, head_dim), kv_heads, kv_tokens = q.shape, k.shape[1], k.shape[2]
    if varlen:
        batch, q_len = cu_seqlens_q.shape[0] - 1, max_q_len
    masks = (causal, window, kv_start is not None, kv_len is not None, varlen)
    problem = Problem(batch, q_heads, kv_heads, q_len, kv_tokens, head_dim, q.dtype, *masks, lse is not None)
    chosen = best_plan(space, plan, problem, Device.of(q))
    # q stands in for the arrays that the kernel's flags say are absent.
    options = (q if x is None else x for x in (lse, kv_start, kv_len, cu_seqlens_q, cu_seqlens_kv))
    launch(chosen, q, k, v, out, *options, 0 if window is None else window, scale * LOG2E)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    kv_start: Tensor | None = None,
    kv_len: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_kv: Tensor | None = None,
    max_q_len: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention; query head h reads key and value head h // (q_heads // kv_heads).

    Args:
        q: [batch, q_heads, q_len, head_dim]; bf16, fp16 or fp32; head_dim 1..256; any strides with stride 1 in the last axis.
        k, v: [batch, kv_heads, max_len, head_dim], dtype and device of q; kv_heads divides q_heads.
        causal: query i sees keys up to i + n - q_len of its sequence's n keys, so the last query sees all of them.
        scale: of q k^T; positive; default head_dim ** -0.5.
        window: a query sees at most this many keys, its own included.
        kv_start: [batch] int32; the first key of each sequence (left padding). Queries before it see nothing.
        kv_len: [batch] int32; where the keys of each sequence end, at most max_len; default max_len. Memory outside may hold anything.
        cu_seqlens_q, cu_seqlens_kv: [sequences + 1] int32, where each sequence begins and the last one ends. With them q is
            [total_q, q_heads, head_dim], k and v are [total_kv, kv_heads, head_dim], and there is no kv_start and kv_len.
        max_q_len: the longest sequence of cu_seqlens_q; default total_q, which launches blocks that find nothing to do.
        return_lse: also return the natural log of the softmax denominator.
    Returns: out like q, contiguous as [batch, q_len, q_heads, head_dim] (with cu_seqlens as [total_q, q_heads, head_dim]);
        with return_lse the tuple (out, lse), lse fp32 [batch, q_heads, q_len] (with cu_seqlens [q_heads, total_q]).
        A row that sees no key is 0, its lse -inf.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    varlen = cu_seqlens_q is not None
    check_tensor(q, "q", ndim=3 if varlen else 4, dtypes=DTYPES)
    check_tensor(k, "k", ndim=q.dim(), like=q)
    check_heads(q, k)
    scale = check_scale_and_window(scale, window, q.shape[-1])
    if varlen:
        check_tensor(k, "k", shape=(k.shape[0], k.shape[1], q.shape[-1]), like=q)
        _check_packing(q, kv_start, kv_len, cu_seqlens_q, cu_seqlens_kv)
        max_q_len = q.shape[0] if max_q_len is None else max_q_len
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse_shape = (q.shape[1], q.shape[0])
    else:
        batch, q_heads, q_len, head_dim = q.shape
        check_tensor(k, "k", shape=(batch, k.shape[1], k.shape[2], head_dim), like=q)
        for name, given in (("cu_seqlens_kv", cu_seqlens_kv), ("max_q_len", max_q_len)):
            if given is not None:
                raise must(name, "given only with cu_seqlens_q", type(given).__name__)
        for name, given in (("kv_start", kv_start), ("kv_len", kv_len)):
            if given is not None:
                check_int32(given, name, q, (batch,))
        out = torch.empty((batch, q_len, q_heads, head_dim), dtype=q.dtype, device=q.device).transpose(1, 2)
        lse_shape = (batch, q_heads, q_len)
    check_tensor(v, "v", shape=tuple(k.shape), like=q)
    lse = torch.empty(lse_shape, dtype=torch.float32, device=q.device) if return_lse else None
    if out.numel() and k.numel():
        attention_out(q, k, v, out, lse, kv_start, kv_len, cu_seqlens_q, cu_seqlens_kv, scale, causal, window, max_q_len)
    else:
        out.zero_()
        if lse is not None:
            lse.fill_(-math.inf)
    return out if lse is None else (out, lse)


def _check_packing(q: Tensor, kv_start: Any, kv_len: Any, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor | None) -> None:
    for name, given in (("kv_start", kv_start), ("kv_len", kv_len)):
        if given is not None:
            raise must(name, "None with cu_seqlens_q", type(given).__name__)
    if cu_seqlens_kv is None:
        raise must("cu_seqlens_kv", "given with cu_seqlens_q", None)
    if isinstance(cu_seqlens_q, Tensor) and (cu_seqlens_q.dim() != 1 or not len(cu_seqlens_q)):
        raise must("cu_seqlens_q.shape", "(sequences + 1,)", tuple(cu_seqlens_q.shape))
    check_int32(cu_seqlens_q, "cu_seqlens_q", q, tuple(cu_seqlens_q.shape))
    check_int32(cu_seqlens_kv, "cu_seqlens_kv", q, tuple(cu_seqlens_q.shape))
