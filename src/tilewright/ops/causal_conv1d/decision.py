"""What a launch of `causal_conv1d` may depend on, and what it comes to."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...launch import Cost, Device, Launch, next_pow2
from ...select import Choices, Work
from ..common.pdl import use_pdl
from ..common.rows import CPU_TILE, grid_fits, stream, threads, vector
from ..common.sequences import places, starts
from .kernels import causal_conv1d_kernel, one_token_kernel

# Of the candidates: tile_m, steps, 16-byte pieces of a thread in a row of a tile, worker warps,
# occupancy.
TILES = (
    *((16, steps, 0.25, 4, 6) for steps in (4, 3, 6, 2, 12, 1)),
    (8, 8, 0.25, 4, 6),
    (32, 2, 0.25, 4, 4),
    *((8, steps, 0.25, 4, 8) for steps in (4, 3, 8, 12)),
)
HOPPER = tuple((16, steps, 0.25, 4, 8) for steps in (2, 3, 4))  # spill on sm_100 and sm_120
ONE_TOKEN = ((4, 1, 0.25, 4, None), (1, 1, 0.25, 4, None), (1, 1, 0.5, 4, None), (1, 1, 1, 4, None), (2, 1, 1, 4, None))
OF_START = 250  # operations of a thread before its first tile: weights, addresses


@dataclass(frozen=True, slots=True)
class Problem:
    """What a plan may depend on.

    tokens: of each sequence; of all sequences together with varlen. taps: inputs that a state
    keeps; 0 without one.
    """

    batch: int
    tokens: int
    channels: int
    dtype: torch.dtype
    width: int = 4
    taps: int = 3
    bias: bool = False
    silu: bool = True
    varlen: bool = False

    @property
    def cols(self) -> int:
        return self.channels

    @property
    def one(self) -> bool:
        """Whether each sequence has one token: a block then reads and writes the state itself."""
        return self.tokens == 1 and not self.varlen

    @property
    def all_tokens(self) -> int:
        return self.tokens if self.varlen else self.batch * self.tokens

    def cost(self) -> Cost:
        rows = 2 * (self.all_tokens + self.batch * self.taps) + self.width
        return Cost(rows * self.channels * self.dtype.itemsize, 2 * self.all_tokens * self.channels * self.width)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, device=device).to(self.dtype)

        sizes = (self.tokens,) if self.varlen else (self.batch, self.tokens)
        options: dict[str, Any] = {"silu": self.silu}
        if self.taps:
            options["state"] = randn(self.batch, self.taps, self.channels)
        if self.varlen:
            options["cu_seqlens"] = starts(self.tokens, self.batch, device)
        bias = randn(self.channels) if self.bias else None
        return {"x": randn(*sizes, self.channels), "weight": randn(self.channels, self.width), "bias": bias, **options}


@dataclass(frozen=True, slots=True)
class Config:
    """Tokens and channels of a tile, the channels a power of two; tiles of a block, one behind the
    other; and compiler hints.
    """

    tile_m: int
    tile_n: int
    steps: int = 1
    occupancy: int | None = None
    num_worker_warps: int | None = None


def candidates(p: Problem, device: Device) -> Iterator[Config]:
    whole, least = next_pow2(p.channels), 1 if p.one else next_pow2(p.width - 1)
    if device.is_cpu:
        for tile_m, tile_n, steps in ((4, CPU_TILE, 3), (2, 128, 1)):
            yield Config(max(least, min(tile_m, next_pow2(p.batch if p.one else p.tokens))), min(whole, tile_n), steps)
        return
    tiles = ONE_TOKEN if p.one else (*TILES, *HOPPER) if device.arch == "sm_90" else TILES
    for tile_m, steps, pieces, warps, occupancy in tiles:
        yield Config(tile_m, min(whole, int(pieces * 32 * warps * 16 / p.dtype.itemsize)), steps, occupancy, warps)


def _places(p: Problem, c: Config) -> int:
    """Tiles of tokens (see packed_tile), or of sequences of one token each."""
    return -(-p.batch // c.tile_m) if p.one else places(p.tokens, p.batch, c.tile_m * c.steps, p.varlen)


def _columns(p: Problem, c: Config) -> int:
    return -(-p.channels // c.tile_n)


def legal(p: Problem, c: Config, device: Device) -> bool:
    """A grid has a block for each tile, and the first tile of a sequence alone sees its state."""
    return grid_fits(_places(p, c) * _columns(p, c)) and (p.one or c.tile_m >= p.width - 1)


def work(p: Problem, c: Config, device: Device) -> Work:
    """A block reads the rows in front of its tiles too; they lie in L2."""
    rows = c.tile_m * c.steps + p.width - 1
    each = c.tile_n / threads(c)
    return stream(
        p,
        c,
        device,
        _places(p, c) * _columns(p, c),
        rows * c.tile_n,
        registers=32 + each * ((2 * c.tile_m + p.width) * p.dtype.itemsize / 4 + p.width + 4),
        aligned=p.channels * p.dtype.itemsize,
        load=1 / vector(p),
        masked=p.channels % c.tile_n > 0,
        operations=2 * p.width + 4,
        once=OF_START,
        partial=0 if p.one or not p.taps else p.batch * p.taps * p.channels * p.dtype.itemsize,
    )


CHOICES = Choices("causal_conv1d", candidates, legal, work, tie=0.02)
space = CHOICES.space


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """One launch."""
    kernel, grid = one_token_kernel if p.one else causal_conv1d_kernel, (_places(p, c) * _columns(p, c),)
    optional = {"bias": p.bias, "state": p.taps} | ({} if p.one else {"cu_seqlens": p.varlen})
    constants = {"cols": p.channels, "has_bias": p.bias}
    return (Launch.of(kernel, grid, p, c, constants, optional=optional, pdl=use_pdl(p.all_tokens, False)),)


DECISION = CHOICES.decision(Problem, plan, ("x", "weight", "bias", "state", "out", "cu_seqlens", "tokens"))
