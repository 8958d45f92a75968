"""What a launch of `attention` depends on, which configs it may take, and what each comes to."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ...launch import Cost, Device, Launch, next_pow2
from ...select import Choices, Work
from ..attention_decode import decision as decode
from ..common import prefill
from ..common.attention_tiles import widths_of
from ..common.prefill import ALIKE, SAMPLES, Config, least_width
from ..common.scaling import FP8
from ..common.sequences import counted, later, packed, sample, shorter, starts
from ..common.softmax_tiles import visible_scores
from .candidates import SPILLS, TABLES
from .kernels import attention_kernel

# Values of a step in fp32, columns of zeros among them. Of fewer the compiler peels a step more
# off a loop, and most of those binaries are wrong (H200, tileiras 13.4; notes/LOG.md).
LEAST_SINGLE = 2048
SINGLE_COST = 6  # an fp32 product is three TF32 ones, each at half the bf16 rate


@dataclass(frozen=True, slots=True)
class Problem:
    """What a plan may depend on.

    q_len, kv_len: the longest, when lengths differ between sequences; of all sequences together
        with varlen, where a call rounds them and the batch up (`near`).
    has_start, has_len: kv_start, kv_len are given. varlen: cu_seqlens are. v_dim: columns of v; 0
        for head_dim. has_sinks: sinks are given.
    keys_last: the memory of v has its keys as last axis. longest: with varlen the queries of the
        longest sequence, up to the next power of two,
    so that steps of a server whose lengths differ a little decide alike; 0 where nobody says.
    ahead: with causal, the keys behind its own that a query sees too; window does not count them.
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
    ahead: int = 0

    @property
    def queries(self) -> int:
        """Of the longest sequence, as far as known."""
        return self.longest or self.q_len

    @property
    def values_dim(self) -> int:
        return self.v_dim or self.head_dim

    @property
    def values_shape(self) -> tuple[int, int, int, int]:
        """Of v as the kernel gets it: batch, heads, keys, columns."""
        return 1 if self.varlen else self.batch, self.kv_heads, self.kv_len, self.values_dim

    @property
    def ragged(self) -> bool:
        """Sequences differ in where their keys begin or end."""
        return self.varlen or self.has_start or self.has_len

    @property
    def scaled(self) -> bool:
        """Codes of 8 bits, with a scale for each head."""
        return self.dtype in FP8

    def _end(self, i: int) -> int:
        """Where the keys of sequence i end."""
        return shorter(self.kv_len, i, self.batch) if self.has_len else self.kv_len

    def _start(self, i: int) -> int:
        """Where they begin."""
        return later(self.kv_len, i, self.batch) if self.has_start else 0

    def lengths(self) -> list[tuple[int, int, int]]:
        """Queries and keys of a sequence, and how many are like it: of those of `inputs`, or, with
        varlen, of a server's: some of the longest, the others of one query.
        """
        if self.varlen:
            keys = -(-self.kv_len // self.batch)
            long = min(self.batch, -(-self.q_len // self.longest)) if self.longest else self.batch
            return [(-(-self.q_len // long), keys, long), (1, keys, self.batch - long)]
        if not self.ragged:
            return [(self.q_len, self.kv_len, self.batch)]
        return [(self.q_len, max(0, self._end(i) - self._start(i)), count) for i, count in sample(self.batch, SAMPLES)]

    def size_bytes(self) -> int:
        """Of the arguments and results of `inputs`, each once."""
        dims = self.head_dim + self.values_dim
        queries, keys = (self.q_len, self.kv_len) if self.varlen else counted(self.lengths())
        read = queries * self.q_heads * self.head_dim + keys * self.kv_heads * dims
        written = self.values_dim * max(2, self.dtype.itemsize) + 4 * self.return_lse
        return read * self.dtype.itemsize + queries * self.q_heads * written

    def cost(self) -> Cost:
        def length(total: int, i: int) -> int:
            return packed(total, i + 1, self.batch) - packed(total, i, self.batch)

        each = self.lengths()
        if self.varlen:
            each = [(length(self.q_len, i), length(self.kv_len, i), count) for i, count in sample(self.batch, SAMPLES)]
        scores = sum(count * visible_scores(q, n, self.causal, self.window, self.ahead) for q, n, count in each)
        return Cost(self.size_bytes(), 2 * scores * self.q_heads * (self.head_dim + self.values_dim))

    def inputs(self, device: torch.device) -> dict[str, Any]:
        randn = partial(torch.randn, dtype=torch.bfloat16 if self.scaled else self.dtype, device=device)
        int32 = partial(torch.tensor, dtype=torch.int32, device=device)
        options: dict[str, Any] = {"causal": self.causal, "window": self.window, "return_lse": self.return_lse, "softcap": self.softcap}
        if self.ahead:
            options |= {"causal": False, "window": (None if self.window is None else self.window - 1, self.ahead)}
        if self.has_sinks:
            options["sinks"] = torch.randn(self.q_heads, device=device)
        if self.scaled:
            for name, heads in (("q", self.q_heads), ("k", self.kv_heads), ("v", self.kv_heads)):
                options[f"{name}_scale"] = 0.5 + torch.rand(heads, device=device)
        if self.varlen:
            for name, total in (("q", self.q_len), ("kv", self.kv_len)):
                options[f"cu_seqlens_{name}"] = starts(total, self.batch, device)
            q = randn(self.q_len, self.q_heads, self.head_dim)
            k, v = (randn(self.kv_len, self.kv_heads, dim) for dim in (self.head_dim, self.values_dim))
            return {"q": q.to(self.dtype), "k": k.to(self.dtype), "v": v.to(self.dtype), "max_q_len": self.longest or None, **options}
        q = randn(self.batch, self.q_len, self.q_heads, self.head_dim).transpose(1, 2)  # as a projection leaves it
        k, v = (randn(self.batch, self.kv_heads, self.kv_len, dim) for dim in (self.head_dim, self.values_dim))
        key = torch.arange(self.kv_len, device=device)[:, None]
        unused = torch.zeros(self.batch, 1, 1, 1, dtype=torch.bool, device=device)
        if self.has_start:
            options["kv_start"] = int32([self._start(i) for i in range(self.batch)])
            unused = unused | (key < options["kv_start"].view(-1, 1, 1, 1))
        if self.has_len:
            options["kv_len"] = int32([self._end(i) for i in range(self.batch)])
            unused = unused | (key >= options["kv_len"].view(-1, 1, 1, 1))
        q, k, v = (x.to(self.dtype) for x in (q, *(torch.where(unused, torch.nan, x) for x in (k, v))))  # memory without a key may hold anything
        if self.keys_last:
            v = v.transpose(2, 3).contiguous().transpose(2, 3)
        return {"q": q, "k": k, "v": v, **options}


def candidates(p: Problem, device: Device) -> Iterator[Config]:
    """The rows for the wider of k and v."""
    table = TABLES[8 * p.dtype.itemsize].get(ALIKE.get(device.arch, device.arch), {})
    rows = next((table[most] for most in sorted(table) if most >= max(p.head_dim, p.values_dim)), ())
    for c in prefill.configs(rows, p, device):
        single = p.dtype == torch.float32 and not device.is_cpu
        yield replace(c, tf32x3=single)
        if p.values_dim != next_pow2(p.values_dim) and not single:
            yield replace(c, pad_values=False)


def _widths_v(p: Problem, c: Config, pad: bool) -> tuple[int, int]:
    least = LEAST_SINGLE // c.tile_n if c.tf32x3 else 0
    return widths_of(p.values_dim, max(least, least_width(p)), pad)


def work(p: Problem, c: Config, device: Device) -> Work:
    """What a launch asks for."""
    # Values in two tiles are two products: what is not padded is not gained.
    columns = sum(widths_of(p.head_dim, least_width(p))), sum(_widths_v(p, c, True))
    width = max(64, next_pow2(max(columns)))
    kinds = "fp8" if p.scaled else f"dim{width}", *(("softcap",) if p.softcap is not None else ())
    spill = SPILLS.get((ALIKE.get(device.arch, device.arch), min(width, 128), c.tile_m, c.tile_n, c.occupancy), 0)
    found = prefill.work(p, c, device, columns, kinds, spill)
    return replace(found, flops=found.flops * SINGLE_COST) if c.tf32x3 else found


CHOICES = Choices("attention", candidates, prefill.legal, work, prefill.family, regimes_too=True)
space = CHOICES.space


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """One launch; with KV splits, another merges them."""
    (width_k, rest_k), (width_v, rest_v) = widths_of(p.head_dim, least_width(p)), _widths_v(p, c, c.pad_values)
    given = {"kv_start": p.has_start, "cu_seqlens_q": p.varlen, "cu_seqlens_kv": p.varlen, "sinks": p.has_sinks and c.num_kv_splits == 1}
    launches = prefill.launch(
        attention_kernel,
        p,
        c,
        device,
        given,
        has_window=p.window is not None,
        has_sinks=given["sinks"],
        ahead=p.ahead > 0,
        softcap=p.softcap is not None,
        group=p.q_heads // p.kv_heads,
        width_k=width_k,
        rest_k=rest_k,
        width_v=width_v,
        rest_v=rest_v,
    )
    if c.num_kv_splits == 1:
        return launches
    shape = p.batch, p.q_heads, p.kv_heads, p.kv_len, p.head_dim, p.dtype
    whole = decode.Problem(*shape, return_lse=p.return_lse, q_len=p.q_len, v_dim=p.v_dim, sinks=p.has_sinks)
    return *launches[:-1], *decode.with_merge(launches[-1], whole, c.num_kv_splits, device)
