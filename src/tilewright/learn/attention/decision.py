"""The problem that every step solves, and what a step decides: kernel, tiles, compiler hints."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...launch import Cost, Device, Launch
from ...ops import attention as finished


@dataclass(frozen=True, slots=True)
class Problem:
    """Attention over prompts of one length. head_dim: a power of two, at least 16."""

    batch: int
    q_heads: int
    kv_heads: int
    seq_len: int
    head_dim: int
    dtype: torch.dtype = torch.float16
    causal: bool = True

    def for_library(self) -> finished.Problem:
        """The same, as `ops.attention` has it."""
        sizes = self.batch, self.q_heads, self.kv_heads, self.seq_len, self.seq_len, self.head_dim
        return finished.Problem(*sizes, self.dtype, causal=self.causal)

    def cost(self) -> Cost:
        return self.for_library().cost()

    def inputs(self, device: torch.device) -> dict[str, Any]:
        def randn(heads: int) -> Tensor:
            return torch.randn(self.batch, heads, self.seq_len, self.head_dim, dtype=self.dtype, device=device)

        return {"q": randn(self.q_heads), "k": randn(self.kv_heads), "v": randn(self.kv_heads), "causal": self.causal}


@dataclass(frozen=True, slots=True, repr=False)
class Config:
    """What a step launches.

    kernel: of small_tiles.py or large_tiles.py. tile_m, tile_n: queries of a block, keys of a step
        of its loop.
    diagonal_n: keys of a step on the diagonal, a divisor of tile_n; 0 for kernels with one kind of
        step.
    parts, latency: constants of the tuned kernel; 0 for the others, which have none.
    num_ctas, occupancy, num_worker_warps: compiler hints; None leaves the compiler's choice.
    """

    kernel: Any
    tile_m: int
    tile_n: int
    diagonal_n: int = 0
    parts: int = 0
    latency: int = 0
    num_ctas: int | None = None
    occupancy: int | None = None
    num_worker_warps: int | None = None

    @property
    def name(self) -> str:
        return str(self.kernel._pyfunc.__name__)

    def __repr__(self) -> str:  # a result row names the kernel and not where the object lies
        options = ("diagonal_n", "parts", "latency", "num_ctas", "occupancy", "num_worker_warps")
        return " ".join([self.name, f"{self.tile_m}x{self.tile_n}", *(f"{o}={v}" for o in options if (v := getattr(self, o)))])


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """One block for each tile of queries of each head. Pure: runs without a GPU."""
    grid = (math.ceil(p.seq_len / c.tile_m), p.q_heads, p.batch)
    return (Launch.of(c.kernel, grid, p, c, {"group": p.q_heads // p.kv_heads}),)
