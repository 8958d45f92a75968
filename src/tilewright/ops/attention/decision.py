"""What a launch of `attention` may depend on, and what it comes to."""

import math
from dataclasses import dataclass
from typing import Any

import cuda.tile as ct
import torch
from torch import Tensor

from ...launch import Cost, Device, Plan, next_pow2
from .kernel import attention_kernel


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


# tile_m, tile_n, parts, latency, persistent, num_ctas, occupancy, num_worker_warps
Row = tuple[int, int, int, int, bool, int | None, int | None, int | None]

# By architecture and padded head_dim, the default first; chosen on compiled code (no spills), and on sm_90 by _measured_best.
_HALF: dict[str, dict[int, tuple[Row, ...]]] = {
    "sm_80": {
        64: ((64, 64, 1, 2, False, None, 1, 8), (64, 32, 1, 2, False, None, 1, None)),
        128: ((64, 64, 1, 3, False, None, 2, None),),
        256: ((32, 64, 1, 2, False, None, 1, 8), (64, 16, 1, 2, False, None, 1, 8)),
    },
    "sm_90": {
        64: (
            (128, 128, 1, 2, False, 1, 1, 8),
            (128, 128, 1, 5, False, 1, 1, 8),
            (128, 128, 2, 2, False, 1, 1, 8),
            (256, 128, 1, 2, False, 2, 1, 8),
            (128, 64, 1, 2, False, 1, 1, 8),
            (128, 64, 1, 2, False, 1, 2, 8),
            (64, 128, 1, 2, False, 1, 2, 4),
            (64, 128, 1, 4, False, 1, 2, 4),
            (64, 64, 1, 2, False, 1, 2, 4),
            (64, 64, 2, 2, False, 1, 3, 4),
            (64, 256, 2, 2, False, 1, 1, 4),
            (256, 64, 2, 2, False, 1, 1, 8),
            (128, 64, 2, 2, False, 1, 2, 4),
            (128, 128, 1, 2, True, 1, 1, 8),
            (128, 64, 1, 2, True, 1, 1, 8),
            (64, 128, 1, 2, True, 1, 2, 4),
        ),
        128: (
            (128, 128, 2, 2, False, 1, 1, 8),
            (128, 128, 2, 4, False, 1, 1, 8),
            (256, 128, 2, 2, False, 2, 1, 8),
            (128, 64, 1, 2, False, 1, 1, 8),
            (128, 64, 1, 5, False, 1, 1, 8),
            (256, 64, 1, 3, False, 2, 1, 8),
            (128, 128, 1, 2, False, 1, 1, 8),
            (64, 128, 1, 2, False, 1, 2, 4),
            (64, 128, 2, 2, False, 1, 2, 4),
            (64, 64, 1, 2, False, 1, 2, 4),
            (64, 64, 2, 2, False, 1, 2, 4),
            (64, 128, 1, 2, False, 1, 1, 4),
            (128, 128, 1, 2, False, 2, 2, 4),
            (128, 64, 1, 2, True, 1, 1, 8),
            (64, 128, 1, 2, True, 1, 2, 4),
            (64, 64, 1, 2, True, 1, 2, 4),
        ),
        256: (
            (128, 64, 1, 2, False, 1, 1, 8),
            (128, 32, 1, 2, False, 1, 1, 8),
            (64, 64, 1, 2, False, 1, 1, 4),
            (64, 64, 1, 2, False, 1, 1, 8),
            (64, 128, 1, 2, False, 1, 1, 4),
        ),
    },
    "sm_100": {
        64: ((128, 128, 1, 2, False, None, 2, None), (256, 128, 1, 2, False, None, 1, None), (64, 64, 1, 2, False, None, 2, None)),
        128: ((128, 128, 1, 2, False, None, 2, None), (128, 64, 1, 2, False, None, 2, None), (64, 64, 1, 2, False, None, 2, None)),
        256: ((128, 128, 1, 2, False, None, 1, None),),
    },
    "sm_120": {
        64: ((64, 64, 1, 2, False, None, 2, None), (128, 64, 1, 2, False, None, 1, None), (64, 32, 1, 2, False, None, 1, None)),
        128: ((64, 64, 1, 2, False, None, 1, None), (64, 32, 1, 2, False, None, 1, None)),
        256: ((32, 64, 1, 2, False, None, 1, 8), (16, 32, 1, 2, False, None, 1, None)),
    },
}
_SINGLE: dict[str, dict[int, tuple[Row, ...]]] = {
    "sm_80": {
        64: ((64, 32, 1, 2, False, None, 1, 8), (32, 32, 1, 2, False, None, 1, None)),
        128: ((32, 32, 1, 1, False, None, 1, 8),),
        256: ((16, 16, 1, 2, False, None, 1, 8),),
    },
    "sm_90": {
        64: ((64, 64, 1, 2, False, 1, 1, 8), (64, 32, 1, 2, False, 1, 1, 8)),
        128: ((64, 16, 1, 2, False, 1, 1, 8),),
        256: ((64, 16, 1, 2, False, 1, 1, 8),),
    },
    "sm_100": {
        64: ((64, 64, 1, 2, False, None, 1, 8), (64, 32, 1, 2, False, None, 1, 8)),
        128: ((64, 16, 1, 2, False, None, 1, 8),),
        256: ((64, 16, 1, 2, False, None, 1, 8),),
    },
    "sm_120": {
        64: ((32, 32, 1, 2, False, None, 1, 8), (32, 32, 1, 2, False, None, 1, None)),
        128: ((64, 16, 1, 2, False, None, 1, 8),),  # 40 bytes of stack, the least of 30 tried
        256: ((16, 16, 1, 2, False, None, 1, 8),),
    },
}
_ALIKE = {"sm_103": "sm_100", "sm_121": "sm_120"}


def space(p: Problem, device: Device) -> list[Config]:
    """Every config worth timing, the untuned default first."""
    longest_m, longest_n = (max(16, next_pow2(n)) for n in (p.q_len, p.kv_len))
    if device.is_cpu:
        return [Config(min(256, longest_m), 512), Config(min(64, longest_m), min(128, longest_n), parts=2)]
    single = p.dtype == torch.float32
    rows = (_SINGLE if single else _HALF)[_ALIKE.get(device.arch, device.arch)][max(64, next_pow2(p.head_dim))]
    configs = [
        Config(tile_m, tile_n, parts, latency, persistent, single, num_ctas, occupancy, num_worker_warps)
        for tile_m, tile_n, parts, latency, persistent, num_ctas, occupancy, num_worker_warps in rows
        if not (persistent and (p.varlen or p.has_start or p.has_len or p.window is not None))
    ]
    # A tile of queries much longer than the sequence computes rows that nobody reads.
    configs = [c for c in configs if c.tile_m <= max(64, longest_m)] or configs[-1:]
    if device.arch in ("sm_100", "sm_103") and p.varlen:  # with the slices of a packed batch the largest tile spills
        configs = configs[1:] or configs
    if device.arch != "sm_90" or single:
        return configs
    best = _measured_best(p)
    return sorted(configs, key=lambda c: (c.tile_m, c.tile_n, c.parts, c.latency, c.occupancy, c.num_worker_warps, c.num_ctas, c.persistent) != best)


def _measured_best(p: Problem) -> tuple[int, int, int, int, int, int, int, bool]:
    """(tile_m, tile_n, parts, latency, occupancy, num_worker_warps, num_ctas, persistent) on an H200 (2026-11-21, notes/LOG.md)."""
    short = (64, 64, 2, 2, 3 if p.head_dim <= 64 else 2, 4, 1, False)
    if p.head_dim <= 64:
        return short if p.causal and p.q_len < 4096 else (128, 64, 1, 2, 2, 8, 1, False)
    if p.q_len < 1024 and p.causal:
        return short
    if p.q_len < (4096 if p.causal else 8192):
        return 64, 128, 2 if p.causal else 1, 2, 2, 4, 1, False
    return 128, 128, 2, 4, 1, 8, 1, False


def plan(p: Problem, c: Config, device: Device) -> Plan:
    """Grid and compile-time constants of one launch."""
    ragged = p.varlen or p.has_start or p.has_len
    masked = p.causal or ragged or p.window is not None or p.kv_len % c.tile_n != 0
    flags = (p.causal, p.window is not None, p.has_start, p.has_len, p.varlen, p.return_lse, masked, c.persistent)
    tiles = (p.q_heads // p.kv_heads, next_pow2(p.head_dim), c.tile_m, c.tile_n, c.parts, c.latency, c.tf32x3)
    grid: tuple[int, ...] = (ct.cdiv(p.q_len, c.tile_m), p.q_heads, p.batch)
    if c.persistent:
        grid = (min(math.prod(grid), device.sms * (c.occupancy or 1) // (c.num_ctas or 1)),)
    return Plan(attention_kernel, grid, flags + tiles, c.num_ctas, c.occupancy, c.num_worker_warps)
