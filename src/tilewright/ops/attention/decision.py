"""What a launch of `attention` depends on, which configs it may take, and what each comes to."""

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
from .candidates import ALIKE, SPILLS, TABLES
from .kernels import attention_kernel

SINGLE_COST = 6  # an fp32 product is three TF32 ones, each at half the bf16 rate


@dataclass(frozen=True, slots=True)
class Problem:
    """What a plan may depend on.

    q_len, kv_len: the longest, when lengths differ between sequences; of all sequences together
        with varlen.
    has_start, has_len: kv_start, kv_len are given. varlen: cu_seqlens are. v_dim: columns of v; 0
        for head_dim. has_sinks: sinks are given.
    keys_last: the memory of v has its keys as last axis. longest: with varlen the queries of the
        longest sequence, up to the next power of two,
    so that steps of a server whose lengths differ a little decide alike; 0 where nobody says.
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
    v_dim: int = 0
    softcap: float | None = None
    has_sinks: bool = False
    keys_last: bool = False
    longest: int = 0

    @property
    def queries(self) -> int:
        """Of the longest sequence, as far as known."""
        return self.longest or self.q_len

    @property
    def values_dim(self) -> int:
        return self.v_dim or self.head_dim

    @property
    def ragged(self) -> bool:
        """Sequences differ in where their keys begin or end."""
        return self.varlen or self.has_start or self.has_len

    @property
    def scaled(self) -> bool:
        """Codes of 8 bits, with a scale for each head."""
        return self.dtype in FP8

    def _lengths(self, longest: int) -> list[int]:
        """Lengths of the sequences of a ragged case: `longest` first, then spread down to a third
        of it.
        """
        return [longest - (longest * i * 2) // (3 * self.batch) for i in range(self.batch)]

    def _packed_lengths(self, total: int) -> list[int]:
        """Lengths of packed sequences: spread likewise, with an empty one in the middle of three
        and more.
        """
        shares = [0 if self.batch > 2 and i == self.batch // 2 else 3 * self.batch - 2 * i for i in range(self.batch)]
        lengths = [total * share // sum(shares) for share in shares]
        return [lengths[0] + total - sum(lengths), *lengths[1:]]

    def _starts(self) -> list[int]:
        return [(self.kv_len * i) // (4 * self.batch) for i in range(self.batch)]

    def lengths(self) -> list[tuple[int, int]]:
        """Queries and keys of each sequence of `inputs`, or, with varlen, of sequences like a
        server's: some of the longest, the others of one query."""
        if self.varlen:
            keys = -(-self.kv_len // self.batch)
            long = min(self.batch, -(-self.q_len // self.longest)) if self.longest else self.batch
            return [(-(-self.q_len // long), keys)] * long + [(1, keys)] * (self.batch - long)
        kv_lens = self._lengths(self.kv_len) if self.has_len else [self.kv_len] * self.batch
        starts = self._starts() if self.has_start else [0] * self.batch
        return [(self.q_len, max(0, n - start)) for n, start in zip(kv_lens, starts, strict=True)]

    def size_bytes(self) -> int:
        """Of the arguments and results of `inputs`, each once."""
        dims, packed = self.head_dim + self.values_dim, self.varlen
        queries, keys = (self.q_len, self.kv_len) if packed else (sum(n) for n in zip(*self.lengths(), strict=True))
        read = queries * self.q_heads * self.head_dim + keys * self.kv_heads * dims
        written = self.values_dim * max(2, self.dtype.itemsize) + 4 * self.return_lse
        return read * self.dtype.itemsize + queries * self.q_heads * written

    def cost(self) -> Cost:
        pairs = self.lengths()
        if self.varlen:
            pairs = list(zip(self._packed_lengths(self.q_len), self._packed_lengths(self.kv_len), strict=True))
        scores = sum(visible_scores(q, n, self.causal, self.window) for q, n in pairs)
        return Cost(self.size_bytes(), 2 * scores * self.q_heads * (self.head_dim + self.values_dim))

    def inputs(self, device: torch.device) -> dict[str, Any]:
        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=torch.bfloat16 if self.scaled else self.dtype, device=device)

        def int32(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        options: dict[str, Any] = {"causal": self.causal, "window": self.window, "return_lse": self.return_lse, "softcap": self.softcap}
        if self.has_sinks:
            options["sinks"] = torch.randn(self.q_heads, device=device)
        if self.scaled:
            for name, heads in (("q", self.q_heads), ("k", self.kv_heads), ("v", self.kv_heads)):
                options[f"{name}_scale"] = 0.5 + torch.rand(heads, device=device)
        if self.varlen:
            q_lens, kv_lens = self._packed_lengths(self.q_len), self._packed_lengths(self.kv_len)
            for name, lengths in (("q", q_lens), ("kv", kv_lens)):
                options[f"cu_seqlens_{name}"] = int32([sum(lengths[:i]) for i in range(self.batch + 1)])
            q = randn(sum(q_lens), self.q_heads, self.head_dim)
            k, v = (randn(sum(kv_lens), self.kv_heads, dim) for dim in (self.head_dim, self.values_dim))
            return {"q": q.to(self.dtype), "k": k.to(self.dtype), "v": v.to(self.dtype), "max_q_len": self.longest or None, **options}
        q = randn(self.batch, self.q_len, self.q_heads, self.head_dim).transpose(1, 2)  # as a projection leaves it
        k, v = (randn(self.batch, self.kv_heads, self.kv_len, dim) for dim in (self.head_dim, self.values_dim))
        key = torch.arange(self.kv_len, device=device)[:, None]
        unused = torch.zeros(self.batch, 1, 1, 1, dtype=torch.bool, device=device)
        if self.has_start:
            options["kv_start"] = int32(self._starts())
            unused = unused | (key < options["kv_start"].view(-1, 1, 1, 1))
        if self.has_len:
            options["kv_len"] = int32(self._lengths(self.kv_len))
            unused = unused | (key >= options["kv_len"].view(-1, 1, 1, 1))
        q, k, v = (x.to(self.dtype) for x in (q, *(torch.where(unused, torch.nan, x) for x in (k, v))))  # memory without a key may hold anything
        if self.keys_last:
            v = v.transpose(2, 3).contiguous().transpose(2, 3)
        return {"q": q, "k": k, "v": v, **options}


@dataclass(frozen=True, slots=True)
class Config:
    """How one block goes through the keys.

    tile_m, tile_n: queries of a block, keys of a step; powers of two.
    parts: column parts in which a step's weights are made; 2 halves the registers that they hold,
        which lets the compiler overlap the softmax of one step with the products of another.
    latency: prefetch hint of the k and v loads, 1 to 10.
    persistent: a block takes one tile of queries after the other; else it has one.
    tf32x3: fp32 products on tensor cores, as three TF32 products each.
    num_ctas, occupancy, num_worker_warps: compiler hints.
    pad_values: a v_dim that is no power of two is padded to one; otherwise its sums are two tiles,
        as head_dim always is: 96 = 64 + 32.
    tail_n: keys of a step that a mask touches, a divisor of tile_n; 0 for tile_n. Shorter ones
        compute fewer scores that nobody sees.
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
    pad_values: bool = True
    tail_n: int = 0


def least_width(p: Problem) -> int:
    """Columns of one step of a product."""
    return 32 if p.scaled else 16


def candidates(p: Problem, device: Device) -> Iterator[Config]:
    """The rows of the architecture's table; on a CPU two, of few and of large tiles."""
    if device.is_cpu:
        longest_m, longest_n = (max(16, next_pow2(n)) for n in (p.queries, p.kv_len))
        yield Config(min(256, longest_m), 512)
        yield Config(min(64, longest_m), min(128, longest_n), parts=2, pad_values=False)
        return
    table = TABLES[8 * p.dtype.itemsize].get(ALIKE.get(device.arch, device.arch), {})
    widest, hidden = max(p.head_dim, p.values_dim), p.causal or p.ragged or p.window is not None
    rows = next((table[most] for most in sorted(table) if most >= widest), ())
    for tile_m, tile_n, tail_n, parts, latency, persistent, num_ctas, occupancy, warps in rows:
        tail_n = tail_n if hidden else 0
        c = Config(tile_m, tile_n, parts, latency, persistent, p.dtype == torch.float32, num_ctas, occupancy, warps, tail_n=tail_n)
        yield c
        if p.values_dim != next_pow2(p.values_dim) and not c.tf32x3:
            yield replace(c, pad_values=False)


def legal(p: Problem, c: Config, device: Device) -> bool:
    """Persistent blocks need equal sequences. Steps of 256 keys leave no register for a mask, a cap
    or sinks.
    """
    if device.is_cpu:
        return True
    plain = not (p.ragged or p.window is not None)
    return (plain or not c.persistent) and (c.tile_n < 256 or (plain and p.softcap is None and not p.has_sinks))


def work(p: Problem, c: Config, device: Device) -> Work:
    """What a launch asks for."""
    # Values in two tiles are two products: what is not padded is not gained.
    columns = sum(widths_of(p.head_dim, least_width(p))), sum(widths_of(p.values_dim, least_width(p), True))
    width = "64" if max(columns) <= 64 else "128" if max(columns) <= 128 else "256"
    kinds = "fp8" if p.scaled else f"dim{width}", *(("softcap",) if p.softcap is not None else ())
    arch = ALIKE.get(device.arch, device.arch)
    spill = SPILLS.get((arch, 64 if width == "64" else 128, c.tile_m, c.tile_n, c.occupancy), 0)
    found = prefill_work(p, c, device, p.q_heads, columns, kinds, p.window, spill)
    return replace(found, flops=found.flops * SINGLE_COST) if c.tf32x3 else found


def family(p: Problem, c: Config) -> str:
    """Launches that the model errs alike about."""
    mask = "c" * p.causal + "w" * (p.window is not None) + "r" * p.ragged + "s" * (p.softcap is not None)
    hints = f"{c.num_ctas}{c.occupancy}{c.num_worker_warps}" + "p" * c.persistent + "v" * (not c.pad_values)
    return f"{p.dtype.itemsize}{mask} {next_pow2(p.head_dim)} {c.tile_m}x{c.tile_n}/{c.tail_n} {c.parts}{c.latency}{hints}"


CHOICES = Choices("attention", candidates, legal, work, family)


def space(p: Problem, device: Device) -> Ordered[Config]:
    """The configs worth timing, the untuned default first; none where the device cannot run the
    problem.
    """
    return ordered(CHOICES, p, device)


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """One launch."""
    (width_k, rest_k), (width_v, rest_v) = widths_of(p.head_dim, least_width(p)), widths_of(p.values_dim, least_width(p), c.pad_values)
    constants = {
        "causal": p.causal,
        "has_window": p.window is not None,
        "has_start": p.has_start,
        "has_len": p.has_len,
        "varlen": p.varlen,
        "return_lse": p.return_lse,
        "softcap": p.softcap is not None,
        "has_sinks": p.has_sinks,
        "scaled": p.scaled,
        "keys_last": p.keys_last,
        "masked": p.causal or p.ragged or p.window is not None or p.kv_len % c.tile_n != 0,
        "persistent": c.persistent,
        "group": p.q_heads // p.kv_heads,
        "width_k": width_k,
        "rest_k": rest_k,
        "width_v": width_v,
        "rest_v": rest_v,
        "tile_m": c.tile_m,
        "tile_n": c.tile_n,
        "tail_n": c.tail_n or c.tile_n,
        "parts": c.parts,
        "latency": c.latency,
        "tf32x3": c.tf32x3,
    }
    given = {
        "lse": p.return_lse,
        "kv_start": p.has_start,
        "kv_len": p.has_len,
        "cu_seqlens_q": p.varlen,
        "cu_seqlens_kv": p.varlen,
        "sinks": p.has_sinks,
        "q_scale": p.scaled,
        "k_scale": p.scaled,
        "v_scale": p.scaled,
    }
    each = (ct.cdiv(p.q_len, c.tile_m), p.q_heads, p.batch)
    grid: tuple[int, ...] = (p.q_len // c.tile_m + p.batch, p.q_heads) if p.varlen else each  # see packed_tile
    if c.persistent:
        grid = persistent_grid(each, device.sms * (c.occupancy or 1) // (c.num_ctas or 1), p.causal)
    return (Launch(attention_kernel, grid, constants, **hints(c), unused=tuple(name for name in given if not given[name])),)
