"""What a launch of `attention` may depend on."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...launch import Cost
from ..attention_common import visible_scores
from ..scaling import FP8


@dataclass(frozen=True, slots=True)
class Problem:
    """What a plan may depend on.

    q_len, kv_len: the longest, when lengths differ between sequences; of all sequences together with varlen.
    has_start, has_len: kv_start, kv_len are given. varlen: cu_seqlens are. v_dim: columns of v; 0 for head_dim. has_sinks: sinks are given.
    keys_last: the memory of v has its keys as last axis. longest: with varlen the queries of the longest sequence, up to the next power of two,
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
    def scaled(self) -> bool:
        """Codes of 8 bits, with a scale for each head."""
        return self.dtype in FP8

    def _lengths(self, longest: int) -> list[int]:
        """Lengths of the sequences of a ragged case: `longest` first, then spread down to a third of it."""
        return [longest - (longest * i * 2) // (3 * self.batch) for i in range(self.batch)]

    def _packed_lengths(self, total: int) -> list[int]:
        """Lengths of packed sequences: spread likewise, with an empty one in the middle of three and more."""
        shares = [0 if self.batch > 2 and i == self.batch // 2 else 3 * self.batch - 2 * i for i in range(self.batch)]
        lengths = [total * share // sum(shares) for share in shares]
        return [lengths[0] + total - sum(lengths), *lengths[1:]]

    def _starts(self) -> list[int]:
        return [(self.kv_len * i) // (4 * self.batch) for i in range(self.batch)]

    def cost(self) -> Cost:
        q_lens = self._packed_lengths(self.q_len) if self.varlen else [self.q_len] * self.batch
        kv_lens = [self.kv_len] * self.batch
        if self.varlen or self.has_len:
            kv_lens = self._packed_lengths(self.kv_len) if self.varlen else self._lengths(self.kv_len)
        if self.has_start:
            kv_lens = [max(0, n - start) for n, start in zip(kv_lens, self._starts(), strict=True)]
        scores = sum(visible_scores(q, n, self.causal, self.window) for q, n in zip(q_lens, kv_lens, strict=True))
        dims = self.head_dim + self.values_dim
        size_bytes = (sum(q_lens) * self.q_heads * self.head_dim + sum(kv_lens) * self.kv_heads * dims) * self.dtype.itemsize
        size_bytes += sum(q_lens) * self.q_heads * (self.values_dim * max(2, self.dtype.itemsize) + 4 * self.return_lse)
        return Cost(size_bytes, 2 * scores * self.q_heads * dims)

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
