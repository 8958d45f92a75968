"""What a launch of `mla` depends on, which configs it may take, and what each comes to."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import cuda.tile as ct
import torch
from torch import Tensor

from ...launch import Cost, Device, Launch, hints, next_pow2
from ...select import Choices, Ordered, Work, ordered
from ..common.attention_tiles import persistent_grid, widths_of
from ..common.prefill import prefill_work
from ..common.scaling import FP8
from ..common.softmax_tiles import visible_scores
from .candidates import ALIKE, EIGHT, HALF
from .kernels import mla_kernel

SPILL_WHOLE = 8  # bytes of stack: 128 x 128 without a mask, on sm_103


@dataclass(frozen=True, slots=True)
class Problem:
    """kv_len: of the longest sequence. has_len: kv_len is given. keys_last: the memory of v has its
    keys as last axis.
    """

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

    def lengths(self) -> list[tuple[int, int]]:
        """Queries and keys of each sequence; of a ragged case kv_len keys first, then fewer, down
        to a third of it.
        """
        shorter = (2 * self.kv_len if self.has_len else 0, 3 * self.batch)
        return [(self.q_len, self.kv_len - shorter[0] * i // shorter[1]) for i in range(self.batch)]

    def size_bytes(self) -> int:
        """Of the arguments and results, each once."""
        queries, keys = self.batch * self.q_len * self.heads, sum(n for _, n in self.lengths())
        elements = queries * (self.nope_dim + self.rope_dim) + keys * (self.heads * (self.nope_dim + self.v_dim) + self.rope_dim)
        return elements * self.dtype.itemsize + queries * (2 * self.v_dim + 4 * self.return_lse)

    def cost(self) -> Cost:
        scores = self.heads * sum(visible_scores(q, n, self.causal, None) for q, n in self.lengths())
        return Cost(self.size_bytes(), 2 * scores * (self.nope_dim + self.rope_dim + self.v_dim))

    def inputs(self, device: torch.device) -> dict[str, Any]:
        def randn(heads: int, n: int, dim: int) -> Tensor:
            return torch.randn(self.batch, n, heads, dim, dtype=torch.bfloat16 if self.scaled else self.dtype, device=device).transpose(1, 2)

        queries = randn(self.heads, self.q_len, self.nope_dim + self.rope_dim).split((self.nope_dim, self.rope_dim), -1)  # as projections
        k_nope, v = randn(self.heads, self.kv_len, self.nope_dim + self.v_dim).split((self.nope_dim, self.v_dim), -1)  # leave them
        tensors = {"q_nope": queries[0], "q_rope": queries[1], "k_nope": k_nope, "k_rope": randn(1, self.kv_len, self.rope_dim), "v": v}
        options: dict[str, Any] = {"causal": self.causal, "return_lse": self.return_lse}
        if self.has_len:
            options["kv_len"] = torch.tensor([n for _, n in self.lengths()], dtype=torch.int32, device=device)
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
    """How one block goes through the keys.

    tile_m, tile_n: queries of a block, keys of a step; powers of two.
    tail_n: keys of a step that a mask touches, a divisor of tile_n. Shorter ones compute fewer
        scores that nobody sees.
    parts: column parts in which a step's weights are made, 1 or 2.
    latency: prefetch hint of the k and v loads, 1 to 10.
    persistent: a block takes one tile of queries after the other; else it has one.
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


def candidates(p: Problem, device: Device) -> Iterator[Config]:
    """The rows of the architecture's table; on a CPU two, of few and of large tiles."""
    if device.is_cpu:
        longest_m, longest_n = (max(16, next_pow2(n)) for n in (p.q_len, p.kv_len))
        yield Config(min(256, longest_m), 512, 512)
        yield Config(min(64, longest_m), min(128, longest_n), 32 if p.scaled else 16, parts=2)
        return
    for row in (EIGHT if p.scaled else HALF).get(ALIKE.get(device.arch, device.arch), ()):
        c = Config(*row)
        yield c if p.causal or p.has_len else replace(c, tail_n=c.tile_n)


def legal(p: Problem, c: Config, device: Device) -> bool:
    """Persistent blocks need equal sequences; steps of 256 keys leave no register for a mask."""
    return device.is_cpu or not (p.has_len and (c.persistent or c.tile_n == 256))


def work(p: Problem, c: Config, device: Device) -> Work:
    """What a launch asks for."""
    nope, rope, values = (sum(widths_of(dim, 32 if p.scaled else 16)) for dim in (p.nope_dim, p.rope_dim, p.v_dim))
    spill = SPILL_WHOLE * (device.arch == "sm_103" and not p.causal and c.tile_m == c.tile_n == 128)
    return prefill_work(p, c, device, p.heads, (nope + rope, values), ("fp8" if p.scaled else "half",), spill=spill)


CHOICES = Choices("mla", candidates, legal, work)


def space(p: Problem, device: Device) -> Ordered[Config]:
    """The configs worth timing, the untuned default first; none where the device cannot run the
    problem.
    """
    return ordered(CHOICES, p, device)


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """One launch."""
    least = 32 if p.scaled else 16  # one step of a product
    (nope, nope_rest), (rope, rope_rest), (value, value_rest) = (widths_of(dim, least) for dim in (p.nope_dim, p.rope_dim, p.v_dim))
    constants = {
        "causal": p.causal,
        "has_len": p.has_len,
        "return_lse": p.return_lse,
        "scaled": p.scaled,
        "keys_last": p.keys_last,
        "masked": p.causal or p.has_len or p.kv_len % c.tile_n != 0,
        "persistent": c.persistent,
        "nope": nope,
        "nope_rest": nope_rest,
        "rope": rope,
        "rope_rest": rope_rest,
        "value": value,
        "value_rest": value_rest,
        "tile_m": c.tile_m,
        "tile_n": c.tile_n,
        "tail_n": c.tail_n,
        "parts": c.parts,
        "latency": c.latency,
    }
    given = {"lse": p.return_lse, "kv_len": p.has_len, "q_scale": p.scaled, "k_scale": p.scaled, "v_scale": p.scaled}
    each = (ct.cdiv(p.q_len, c.tile_m), p.heads, p.batch)
    grid: tuple[int, ...] = each
    if c.persistent:
        grid = persistent_grid(each, device.sms * (c.occupancy or 1) // (c.num_ctas or 1), p.causal)
    return (Launch(mla_kernel, grid, constants, **hints(c), unused=tuple(name for name in given if not given[name])),)
