"""What a launch of `kv_append` may depend on, and what it comes to."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import cuda.tile as ct
import torch
from torch import Tensor

from ...launch import Cost, Device, Launch, next_pow2
from ...select import Choices, Work
from ..common.rows import grid_fits, stream, threads
from ..common.scaling import FP8
from .kernels import kv_append_kernel

# Of the candidates: elements of a tile, tokens of a block, worker warps.
SIZES = ((512, 1, 4), (1024, 1, 4), (256, 1, 4), (2048, 1, 4), (1024, 4, 4), (2048, 2, 4), (1024, 8, 4), (2048, 4, 8))


@dataclass(frozen=True, slots=True)
class Problem:
    """What a plan may depend on.

    q_heads: 0 without q.
    max_len: of a sequence.
    page_size: 0 for a cache in one piece.
    v_dim: 0 for head_dim.
    rotary_dim: 0 without rotation.
    cache_dtype: None for dtype.
    each: the scales of codes, of each token and head, are made here.
    shares: how many fp32 tensors each of q, k and v is the sum of.
    own_rope_positions: rope_positions are given.
    q_norm, k_norm, v_norm: which are normed, with round_before_weight as `rms_norm` has it.
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
    each: bool = False
    shares: int = 1

    @property
    def values_dim(self) -> int:
        return self.v_dim or self.head_dim

    @property
    def widest(self) -> int:
        """Columns of a tile."""
        return next_pow2(max(self.head_dim, self.values_dim))

    @property
    def scaled(self) -> bool:
        """The caches hold codes of 8 bits."""
        return self.cache_dtype in FP8

    def cost(self) -> Cost:
        tokens, size = self.batch * self.tokens, self.dtype.itemsize
        held = self.kv_heads * (self.head_dim + self.values_dim) * (size + (1 if self.scaled else size)) + 8 * self.each * self.kv_heads
        rotated = 2 * self.q_heads * self.rotary_dim * size
        return Cost(tokens * (held + rotated + 2 * self.rotary_dim + 4), 3 * tokens * (self.q_heads + self.kv_heads) * self.rotary_dim)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        def fresh(heads: int, dim: int) -> Tensor:
            # As projections leave it.
            return torch.randn(self.batch, self.tokens, heads, dim, dtype=self.dtype, device=device).transpose(1, 2)

        # Each sequence at its own place, which need not be the start of a page; with a few, one has
        # nothing to add.
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
        if self.each:
            options |= {name: torch.rand(pages, self.kv_heads, rows, device=device) for name in ("k_scale", "v_scale")}
        elif self.scaled:
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
    """What a block takes.

    tile_h: heads of a tile; a power of two.
    tokens: tokens of a block, whose rows are all fetched before the first is stored.
    latency: hint of the loads, 1 to 10.
    num_worker_warps: warps that compute, 4 or 8.
    """

    tile_h: int
    tokens: int = 1
    latency: int = 4
    num_worker_warps: int | None = None


@dataclass(frozen=True, slots=True)
class Groups:
    """Heads of q, and of k and v, by blocks: how many blocks, and the heads of each.

    even_q, even_kv: tiles end with the heads.
    """

    q_groups: int
    kv_groups: int
    q_tile: int
    kv_tile: int
    even_q: bool
    even_kv: bool


def groups(p: Problem, c: Config) -> Groups:
    """A tile is no larger than its array needs.

    But of queries that are normed, each tile has an element for every thread. tileiras 13.4 loads a
    smaller tile twice, for the sum and for the product, and the second time behind the first
    stores; these are in place, so another warp may have normed the row already.
    """
    q_tile, kv_tile = (min(c.tile_h, next_pow2(heads)) for heads in (p.q_heads, p.kv_heads))
    if p.q_norm and p.rotary_dim:
        parts = (p.rotary_dim // 2, p.head_dim - p.rotary_dim)
        q_tile = max(q_tile, *(threads(c) // next_pow2(part) for part in parts if part))
    q = ct.cdiv(p.q_heads, q_tile) if p.rotary_dim else 0
    return Groups(q, ct.cdiv(p.kv_heads, kv_tile), q_tile, kv_tile, p.q_heads % q_tile == 0, p.kv_heads % kv_tile == 0)


def grid(p: Problem, c: Config) -> tuple[int, int]:
    """Blocks of heads and tokens, and sequences."""
    g = groups(p, c)
    return (g.q_groups + 2 * g.kv_groups) * ct.cdiv(p.tokens, c.tokens), p.batch


def candidates(p: Problem, device: Device) -> list[Config]:
    """Tiles of whole heads, of one token or several."""
    heads = next_pow2(max(p.q_heads if p.rotary_dim else 0, p.kv_heads))
    if device.is_cpu:  # more tokens are code that is typed again for each, and saves nothing there
        return [Config(heads, 1), Config(max(1, heads // 4), min(4, p.tokens))]
    return [Config(min(heads, max(1, size // p.widest)), min(tokens, p.tokens), num_worker_warps=warps) for size, tokens, warps in SIZES]


def legal(p: Problem, c: Config, device: Device) -> bool:
    return grid_fits(*grid(p, c))


def work(p: Problem, c: Config, device: Device) -> Work:
    """A block copies its heads; the position and the row of the table come before the store."""
    g, size = groups(p, c), p.dtype.itemsize
    tile = max(g.q_tile if g.q_groups else 0, g.kv_tile) * p.widest * c.tokens
    # Checked loads wait for each other: where a tile passes the last head, or a half is no power of
    # two.
    checked = not (g.even_q and g.even_kv) or p.rotary_dim & (p.rotary_dim - 1)
    return stream(
        p,
        c,
        device,
        math.prod(grid(p, c)),
        tile,
        own=40,
        held=1 + size / 4,
        serial=c.tokens * (max(1.0, tile / threads(c) / c.tokens * size / 16) if checked else 1.0),
        chain=1 + (p.page_size > 0),
    )


def family(p: Problem, c: Config) -> str:
    """Operand size, what the kernel does with it, and what a thread has of a tile."""
    what = "p" * (p.page_size > 0) + "r" * (p.rotary_dim > 0) + "n" * (p.q_norm or p.k_norm or p.v_norm) + "s" * p.scaled + "e" * p.each
    g = groups(p, c)
    even = "" if g.even_q and g.even_kv else "u"
    return f"{p.dtype.itemsize}{what}{even} {c.tile_h * p.widest // threads(c)}x{c.tokens} {threads(c) // 32}"


def timed_as(p: Problem, c: Config) -> tuple[Problem, Config]:
    """The caches' length is that of the moment, and no time depends on it."""
    return replace(p, max_len=p.tokens), c


CHOICES = Choices("kv_append", candidates, legal, work, family, timed_as=timed_as)
space = CHOICES.space


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """Grid and compile-time constants of one launch."""
    constants = {
        "own_rope": p.own_rope_positions,
        "round": p.round_before_weight,
        "v_dim": p.values_dim,
        "rotary": p.rotary_dim,
        **asdict(groups(p, c)),
    }
    optional = {
        "q": p.q_heads,
        "rope_positions": p.own_rope_positions,
        "block_table": p.page_size,
        "cos": p.rotary_dim,
        "sin": p.rotary_dim,
        "k_scale": p.scaled,
        "v_scale": p.scaled,
        "q_weight": p.q_norm,
        "k_weight": p.k_norm,
        "v_weight": p.v_norm,
        "rotated": p.shares > 1,
    }
    return (Launch.of(kv_append_kernel, grid(p, c), p, c, constants, optional=optional, pdl=True),)
