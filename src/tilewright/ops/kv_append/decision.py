"""What a launch of `kv_append` may depend on, and what it comes to."""

from dataclasses import dataclass
from typing import Any

import cuda.tile as ct
import torch
from torch import Tensor

from ...launch import Cost, Device, Plan, next_pow2
from ..scaling import FP8
from .kernel import kv_append_kernel


@dataclass(frozen=True, slots=True)
class Problem:
    """What a plan may depend on.

    q_heads: 0 without q. max_len: of a sequence. page_size: 0 for a cache in one piece. v_dim: 0 for head_dim. rotary_dim: 0 without rotation.
    cache_dtype: None for dtype. own_rope_positions: rope_positions are given. q_norm, k_norm, v_norm: which are normed, with round_before_weight as
    `rms_norm` has it.
    """

    batch: int
    q_heads: int
    kv_heads: int
    tokens: int
    head_dim: int
    max_len: int
    dtype: torch.dtype
    page_size: int = 0
    v_dim: int = 0
    rotary_dim: int = 0
    interleaved: bool = False
    cache_dtype: torch.dtype | None = None
    own_rope_positions: bool = False
    v_norm: bool = False
    round_before_weight: bool = False
    q_norm: bool = False
    k_norm: bool = False

    @property
    def values_dim(self) -> int:
        return self.v_dim or self.head_dim

    @property
    def scaled(self) -> bool:
        """The caches hold codes of 8 bits."""
        return self.cache_dtype in FP8

    def cost(self) -> Cost:
        tokens, size = self.batch * self.tokens, self.dtype.itemsize
        held = self.kv_heads * (self.head_dim + self.values_dim) * (size + (1 if self.scaled else size))
        turned = 2 * self.q_heads * self.rotary_dim * size
        return Cost(tokens * (held + turned + 2 * self.rotary_dim + 4), 3 * tokens * (self.q_heads + self.kv_heads) * self.rotary_dim)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        def fresh(heads: int, dim: int) -> Tensor:
            return torch.randn(self.batch, self.tokens, heads, dim, dtype=self.dtype, device=device).transpose(1, 2)  # as projections leave it

        # Each sequence at its own place, which need not be the start of a page; with a few, one has nothing to add.
        start = (torch.arange(self.batch, device=device, dtype=torch.int32) * 7 + 3) % (self.max_len - self.tokens + 1)
        positions = start[:, None] + torch.arange(self.tokens, device=device, dtype=torch.int32)
        if 2 < self.batch < 8:
            positions[1] = -1
        pages, rows = self.batch, self.max_len
        found: dict[str, Any] = {"k": fresh(self.kv_heads, self.head_dim), "v": fresh(self.kv_heads, self.values_dim)}
        options: dict[str, Any] = {"positions": positions[:, 0].clone() if self.tokens == 1 else positions}
        if self.page_size:
            per_sequence = -(-self.max_len // self.page_size)
            pages, rows = self.batch * per_sequence, self.page_size
            options["block_table"] = torch.randperm(pages, dtype=torch.int32, device=device).view(self.batch, per_sequence)
        for name, dim in (("k_cache", self.head_dim), ("v_cache", self.values_dim)):
            cache = torch.randn(pages, self.kv_heads, rows, dim, dtype=self.dtype, device=device)
            found[name] = cache.to(self.cache_dtype or self.dtype)
        if self.scaled:
            options |= {"k_scale": torch.full((), 0.0123, device=device), "v_scale": torch.full((), 0.0321, device=device)}
        if self.rotary_dim:
            half = self.rotary_dim // 2
            inv_freq = 10_000.0 ** (-torch.arange(half, dtype=torch.float32, device=device) / half)
            angle = torch.arange(self.max_len, device=device)[:, None] * inv_freq
            options |= {"cos": angle.cos(), "sin": angle.sin(), "interleaved": self.interleaved}
            if self.q_heads:
                options["q"] = fresh(self.q_heads, self.head_dim)
            if self.own_rope_positions:
                options["rope_positions"] = (options["positions"] // 2).contiguous()
        for name, wanted, dim in (
            ("q_norm", self.q_norm, self.head_dim),
            ("k_norm", self.k_norm, self.head_dim),
            ("v_norm", self.v_norm, self.values_dim),
        ):
            if wanted:
                weight = torch.randn(dim, dtype=self.dtype, device=device)
                options |= {name: weight, "eps": 1e-5, "round_before_weight": self.round_before_weight}
        return {**found, **options}


@dataclass(frozen=True, slots=True)
class Config:
    """How the new rows are walked.

    tile_h: heads of a tile; a power of two.
    tokens: tokens of a block, whose rows are all fetched before the first is stored.
    latency: hint of the loads, 1 to 10.
    num_worker_warps: warps that compute, 4 or 8.
    """

    tile_h: int
    tokens: int = 1
    latency: int = 4
    num_worker_warps: int | None = None


def space(p: Problem, device: Device) -> list[Config]:
    """Every config worth timing, the untuned default first."""
    if p.scaled and not device.has_fp8:
        return []
    heads = next_pow2(max(p.q_heads if p.rotary_dim else 0, p.kv_heads))
    widest = next_pow2(max(p.head_dim, p.values_dim))
    if device.is_cpu:
        return list(dict.fromkeys((Config(heads, min(4, p.tokens)), Config(max(1, heads // 4), 1))))

    def tiled(elements: int, tokens: int, warps: int | None) -> Config:
        return Config(min(heads, max(1, elements // widest)), tokens, num_worker_warps=warps)

    rows = p.batch * p.tokens
    if rows < 4 * device.sms:  # latency: small tiles on many processors, of wide values the largest (H200, 2026-11-21)
        order = (2048, 1024, 512, 256) if widest >= 512 else (1024, 512, 256, 2048) if rows >= 2 * device.sms else (512, 1024, 256, 2048)
        return list(dict.fromkeys(tiled(elements, 1, 4) for elements in order))
    configs = [(1024, 4, 4), (2048, 2, 4), (1024, 8, 4), (2048, 4, 8), (1024, 1, 4), (2048, 1, 4)]
    if widest >= 512:
        configs.insert(0, (2048, 2, 4))
    elif p.q_heads & (p.q_heads - 1):  # the last tile of heads is looked at row by row: one token's at a time
        configs.insert(0, (1024, 1, 4))
    return list(dict.fromkeys(tiled(elements, min(tokens, p.tokens), warps) for elements, tokens, warps in configs))


def plan(p: Problem, c: Config, device: Device) -> Plan:
    """Grid and compile-time constants of one launch."""
    kv_tile = min(c.tile_h, next_pow2(p.kv_heads))  # a tile must not lie wholly outside its array
    q_tile = min(c.tile_h, next_pow2(max(1, p.q_heads)))
    q_groups, kv_groups = ct.cdiv(p.q_heads, q_tile) if p.rotary_dim else 0, ct.cdiv(p.kv_heads, kv_tile)
    even = (p.q_heads % q_tile == 0, p.kv_heads % kv_tile == 0)
    flags = (p.page_size, p.scaled, p.interleaved, p.own_rope_positions, p.q_norm, p.k_norm, p.v_norm, p.round_before_weight, *even)
    shape = (q_groups, kv_groups, p.head_dim, p.values_dim, p.rotary_dim, q_tile, kv_tile)
    grid = ((q_groups + 2 * kv_groups) * ct.cdiv(p.tokens, c.tokens), p.batch)
    return Plan(kv_append_kernel, grid, (*flags, *shape, c.tokens, c.latency), num_worker_warps=c.num_worker_warps, early=True)
