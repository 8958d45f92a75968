"""What a launch of `mla` may depend on, and what it comes to."""

from dataclasses import dataclass, replace
from typing import Any

import cuda.tile as ct
import torch
from torch import Tensor

from ...launch import Cost, Device, Plan, next_pow2
from ..attention_common import visible_scores
from ..attention_tiles import walkers, widths_of
from ..scaling import FP8
from .kernel import mla_kernel


@dataclass(frozen=True, slots=True)
class Problem:
    """kv_len: of the longest sequence. has_len: kv_len is given. keys_last: the memory of v has its keys as last axis."""

    batch: int
    heads: int
    q_len: int
    kv_len: int
    dtype: torch.dtype
    causal: bool = True
    has_len: bool = False
    return_lse: bool = False
    keys_last: bool = False
    nope_dim: int = 128
    rope_dim: int = 64
    v_dim: int = 128

    @property
    def scaled(self) -> bool:
        """Codes of 8 bits, with scales."""
        return self.dtype in FP8

    def _lengths(self) -> list[int]:
        """Of a ragged case: kv_len first, then spread down to a third of it."""
        return [self.kv_len - (self.kv_len * i * 2) // (3 * self.batch) if self.has_len else self.kv_len for i in range(self.batch)]

    def cost(self) -> Cost:
        lengths, queries = self._lengths(), self.batch * self.q_len * self.heads
        scores = self.heads * sum(visible_scores(self.q_len, n, self.causal, None) for n in lengths)
        elements = queries * (self.nope_dim + self.rope_dim) + sum(lengths) * (self.heads * (self.nope_dim + self.v_dim) + self.rope_dim)
        size_bytes = elements * self.dtype.itemsize + queries * (2 * self.v_dim + 4 * self.return_lse)
        return Cost(size_bytes, 2 * scores * (self.nope_dim + self.rope_dim + self.v_dim))

    def inputs(self, device: torch.device) -> dict[str, Any]:
        def randn(heads: int, n: int, dim: int) -> Tensor:
            return torch.randn(self.batch, n, heads, dim, dtype=torch.bfloat16 if self.scaled else self.dtype, device=device).transpose(1, 2)

        queries = randn(self.heads, self.q_len, self.nope_dim + self.rope_dim).split((self.nope_dim, self.rope_dim), -1)  # as projections
        k_nope, v = randn(self.heads, self.kv_len, self.nope_dim + self.v_dim).split((self.nope_dim, self.v_dim), -1)  # leave them
        tensors = {"q_nope": queries[0], "q_rope": queries[1], "k_nope": k_nope, "k_rope": randn(1, self.kv_len, self.rope_dim), "v": v}
        options: dict[str, Any] = {"causal": self.causal, "return_lse": self.return_lse}
        if self.has_len:
            options["kv_len"] = torch.tensor(self._lengths(), dtype=torch.int32, device=device)
            unused = torch.arange(self.kv_len, device=device)[:, None] >= options["kv_len"].view(-1, 1, 1, 1)
            for name in ("k_nope", "k_rope", "v"):  # memory that holds no key may hold anything
                tensors[name] = torch.where(unused, torch.nan, tensors[name])
        if self.scaled:
            tensors = {name: x.to(self.dtype) for name, x in tensors.items()}
            options |= {"q_scale": 0.5 + torch.rand(self.heads, device=device), "v_scale": 0.5 + torch.rand(self.heads, device=device)}
            options["k_scale"] = torch.full((), 0.75, device=device)
        if self.keys_last:
            tensors["v"] = tensors["v"].transpose(2, 3).contiguous().transpose(2, 3)
        return {**tensors, **options}


@dataclass(frozen=True, slots=True)
class Config:
    """How one block walks over the keys.

    tile_m, tile_n: queries of a block, keys of a step; powers of two.
    tail_n: keys of a step that a mask touches, a divisor of tile_n. Shorter ones compute fewer scores that nobody sees.
    parts: column parts in which a step's weights are made, 1 or 2.
    latency: prefetch hint of the k and v loads, 1 to 10.
    persistent: a block walks over many tiles of queries; otherwise it has one.
    num_ctas, occupancy, num_worker_warps: compiler hints.
    """

    tile_m: int
    tile_n: int
    tail_n: int
    parts: int = 1
    latency: int = 2
    persistent: bool = False
    num_ctas: int | None = None
    occupancy: int | None = None
    num_worker_warps: int | None = None


def space(p: Problem, device: Device) -> list[Config]:
    """Every config worth timing, the untuned default first. Chosen on compiled code: no spills, products in flight beside the softmax."""
    longest_m, longest_n = (max(16, next_pow2(n)) for n in (p.q_len, p.kv_len))
    if device.is_cpu:
        return [Config(min(256, longest_m), 512, 512), Config(min(64, longest_m), min(128, longest_n), 32 if p.scaled else 16, parts=2)]
    if device.arch == "sm_90":
        configs = [
            Config(128, 128, 128, 2, 2, False, 1, 1, 8),
            Config(128, 128, 64, 2, 2, False, 1, 1, 8),
            Config(128, 128, 128, 1, 2, False, 1, 1, 8),
            Config(128, 256, 64, 2, 2, False, 1, 1, 8),
            Config(64, 128, 128, 1, 2, False, 1, 2, 4),
            Config(64, 128, 64, 2, 2, False, 1, 2, 4),
            Config(128, 128, 128, 2, 2, True, 1, 1, 8),
            Config(64, 128, 64, 2, 2, True, 1, 2, 4),
        ]
    elif device.arch in ("sm_100", "sm_103"):
        large = Config(128, 128, 128, parts=2, occupancy=1)
        if device.arch == "sm_103" and not p.causal:  # where the larger one spills
            large = Config(128, 64, 64, occupancy=1)
        configs = [Config(64, 128, 128, occupancy=1) if p.scaled else large, Config(64, 64, 64, occupancy=2)]
    elif device.arch == "sm_80":
        configs = [] if p.scaled else [Config(64, 32, 32, occupancy=1, num_worker_warps=8)]
    else:
        configs = [Config(64, 32, 32, occupancy=1, num_worker_warps=8), Config(32, 32, 32, occupancy=1)]
    if device.arch == "sm_90" and (p.scaled or p.q_len < 1024 or (p.causal and p.q_len < 4096)):
        # More blocks, and fewer scores that nobody sees; e4m3: 821 against 752 TFLOP/s (H200, 4 x 16 x 4096 causal, 2026-11-21).
        configs.sort(key=lambda c: (c.tile_m, -c.tail_n if p.q_len <= 512 and not p.scaled else c.tail_n))
    if p.has_len:  # steps of 256 keys leave no register for anything more
        configs = [c for c in configs if not c.persistent and c.tile_n < 256]
    elif not p.causal:
        configs = [replace(c, tail_n=c.tile_n) for c in configs]
    return list(dict.fromkeys(configs))


def plan(p: Problem, c: Config, device: Device) -> Plan:
    """Grid and compile-time constants of one launch."""
    masked = p.causal or p.has_len or p.kv_len % c.tile_n != 0
    least = 32 if p.scaled else 16  # one step of a product
    widths = tuple(width for dim in (p.nope_dim, p.rope_dim, p.v_dim) for width in widths_of(dim, least))
    flags = (p.causal, p.has_len, p.return_lse, p.scaled, p.keys_last, masked, c.persistent)
    each = (ct.cdiv(p.q_len, c.tile_m), p.heads, p.batch)
    grid: tuple[int, ...] = each
    if c.persistent:
        grid = walkers(each, device.sms * (c.occupancy or 1) // (c.num_ctas or 1), p.causal)
    constants = (*flags, *widths, c.tile_m, c.tile_n, c.tail_n, c.parts, c.latency)
    return Plan(mla_kernel, grid, constants, c.num_ctas, c.occupancy, c.num_worker_warps)
