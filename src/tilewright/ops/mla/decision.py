"""What a launch of `mla` depends on, which configs it may take, and what each comes to."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...launch import Cost, Device, Launch
from ...select import Choices, Work
from ..attention_decode import decision as decode
from ..common import prefill
from ..common.attention_tiles import widths_of
from ..common.prefill import ALIKE, SAMPLES, Config, least_width
from ..common.scaling import FP8
from ..common.sequences import counted, sample, shorter
from ..common.softmax_tiles import visible_scores
from .candidates import EIGHT, HALF
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

    # What `attention` has besides.
    varlen, window, softcap, has_sinks, ahead = False, None, None, False, 0

    @property
    def q_heads(self) -> int:
        return self.heads

    @property
    def head_dim(self) -> int:
        """Columns of a score's product."""
        return self.nope_dim + self.rope_dim

    @property
    def queries(self) -> int:
        """Of the longest sequence."""
        return self.q_len

    @property
    def values_shape(self) -> tuple[int, int, int, int]:
        """Of v: batch, heads, keys, columns."""
        return self.batch, self.heads, self.kv_len, self.v_dim

    @property
    def ragged(self) -> bool:
        """Sequences differ in where their keys end."""
        return self.has_len

    @property
    def scaled(self) -> bool:
        """Codes of 8 bits, with scales."""
        return self.dtype in FP8

    def lengths(self) -> list[tuple[int, int, int]]:
        """Queries and keys of a sequence of `inputs`, and how many are like it."""
        if not self.has_len:
            return [(self.q_len, self.kv_len, self.batch)]
        return [(self.q_len, shorter(self.kv_len, i, self.batch), count) for i, count in sample(self.batch, SAMPLES)]

    def size_bytes(self) -> int:
        """Of the arguments and results, each once."""
        queries, keys = counted(self.lengths())
        queries *= self.heads
        elements = queries * (self.nope_dim + self.rope_dim) + keys * (self.heads * (self.nope_dim + self.v_dim) + self.rope_dim)
        return elements * self.dtype.itemsize + queries * (2 * self.v_dim + 4 * self.return_lse)

    def cost(self) -> Cost:
        scores = self.heads * sum(count * visible_scores(q, n, self.causal, None) for q, n, count in self.lengths())
        return Cost(self.size_bytes(), 2 * scores * (self.nope_dim + self.rope_dim + self.v_dim))

    def inputs(self, device: torch.device) -> dict[str, Any]:
        def randn(heads: int, n: int, dim: int) -> Tensor:
            return torch.randn(self.batch, n, heads, dim, dtype=torch.bfloat16 if self.scaled else self.dtype, device=device).transpose(1, 2)

        queries = randn(self.heads, self.q_len, self.nope_dim + self.rope_dim).split((self.nope_dim, self.rope_dim), -1)  # as projections
        k_nope, v = randn(self.heads, self.kv_len, self.nope_dim + self.v_dim).split((self.nope_dim, self.v_dim), -1)  # leave them
        tensors = {"q_nope": queries[0], "q_rope": queries[1], "k_nope": k_nope, "k_rope": randn(1, self.kv_len, self.rope_dim), "v": v}
        options: dict[str, Any] = {"causal": self.causal, "return_lse": self.return_lse}
        if self.has_len:
            options["kv_len"] = torch.tensor([shorter(self.kv_len, i, self.batch) for i in range(self.batch)], dtype=torch.int32, device=device)
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


def candidates(p: Problem, device: Device) -> Iterator[Config]:
    """The rows of the architecture."""
    return prefill.configs((EIGHT if p.scaled else HALF).get(ALIKE.get(device.arch, device.arch), ()), p, device)


def work(p: Problem, c: Config, device: Device) -> Work:
    """What a launch asks for."""
    nope, rope, values = (sum(widths_of(dim, least_width(p))) for dim in (p.nope_dim, p.rope_dim, p.v_dim))
    spill = SPILL_WHOLE * (device.arch == "sm_103" and not p.causal and c.tile_m == c.tile_n == 128)
    return prefill.work(p, c, device, (nope + rope, values), ("fp8" if p.scaled else "half",), spill)


CHOICES = Choices("mla", candidates, prefill.legal, work, prefill.family)
space = CHOICES.space


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """One launch, behind one that transposes values and in front of one that merges KV splits."""
    (nope, nope_rest), (rope, rope_rest), (value, value_rest) = (widths_of(dim, least_width(p)) for dim in (p.nope_dim, p.rope_dim, p.v_dim))
    widths = {"nope": nope, "nope_rest": nope_rest, "rope": rope, "rope_rest": rope_rest, "value": value, "value_rest": value_rest}
    launches = prefill.launch(mla_kernel, p, c, device, {}, **widths)
    if c.num_kv_splits == 1:
        return launches
    shape = p.batch, p.heads, p.heads, p.kv_len, p.head_dim, p.dtype
    whole = decode.Problem(*shape, return_lse=p.return_lse, q_len=p.q_len, v_dim=p.v_dim)
    return *launches[:-1], *decode.with_merge(launches[-1], whole, c.num_kv_splits, device)
