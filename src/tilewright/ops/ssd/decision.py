"""What a launch of `ssd` depends on, which configs it may take, and what each comes to."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...launch import Cost, Device, Launch, next_pow2
from ...select import Choices, Work
from ..common.pdl import use_pdl
from ..common.rows import grid_fits
from ..common.sequences import packed, places, starts
from .kernels import gates_kernel, link_kernel, recurrent_kernel, scan_kernel

LEAST_TILE = 16  # of a product
LINK_TILE = 16  # columns of the state of a block of the link, which has all rows in registers twice
GATE_HEADS = 16  # whose gates a block writes: a sector of 32 bytes for each token
WAITS = 3.0  # of a product: for its operands, its issue and its sums


@dataclass(frozen=True, slots=True)
class Problem:
    """What a plan may depend on.

    tokens: of each sequence; of all sequences together with varlen. has_state, has_rows, skip,
    bias, gate: `state`, `state_rows`, `d`, `dt_bias` and `z` are given. softplus: `dt_softplus`.
    """

    batch: int
    heads: int
    groups: int
    tokens: int
    head_dim: int
    state_dim: int
    dtype: torch.dtype
    has_state: bool = True
    has_rows: bool = False
    varlen: bool = False
    skip: bool = True
    bias: bool = True
    gate: bool = False
    softplus: bool = True

    @property
    def all_tokens(self) -> int:
        return self.tokens if self.varlen else self.batch * self.tokens

    @property
    def one(self) -> bool:
        """One token of each sequence."""
        return self.tokens == 1 and not self.varlen

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest sequence of `inputs`."""
        return packed(self.tokens, 1, self.batch) if self.varlen else self.tokens

    @property
    def states(self) -> int:
        """Elements of all states."""
        return self.batch * self.heads * self.head_dim * self.state_dim

    def cost(self) -> Cost:
        each = self.heads * ((2 + self.gate) * self.head_dim + 1) + 2 * self.groups * self.state_dim
        read = self.all_tokens * each * self.dtype.itemsize
        return Cost(read + 8 * self.states * self.has_state, 4 * self.all_tokens * self.heads * self.head_dim * self.state_dim)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        """As layers begin: dt from 1e-3 to 0.1, a from -1 to -16."""
        rows = (self.tokens,) if self.varlen else (self.batch, self.tokens)

        def randn(*shape: int) -> Tensor:
            return torch.randn(*rows, *shape, device=device).to(self.dtype)

        options: dict[str, Any] = {"c": randn(self.groups, self.state_dim), "dt_softplus": self.softplus}
        steps, noise = torch.logspace(-3, -1, self.heads, device=device), torch.randn(*rows, self.heads, device=device) / 2
        bias = steps.expm1().log() if self.softplus else steps / 2
        dt = noise if self.softplus else noise.exp() * bias
        if self.bias:
            options["dt_bias"] = bias.to(self.dtype)
        elif self.softplus:
            dt = dt + bias
        if self.skip:
            options["d"] = torch.randn(self.heads, device=device).to(self.dtype)
        if self.gate:
            options["z"] = randn(self.heads, self.head_dim)
        if self.has_state:
            # With state_rows some row is nobody's.
            states = self.batch + self.has_rows
            options["state"] = torch.randn(states, self.heads, self.head_dim, self.state_dim, device=device)
        if self.has_rows:
            options["state_rows"] = torch.arange(self.batch, 0, -1, dtype=torch.int32, device=device)
        if self.varlen:
            options["cu_seqlens"] = starts(self.tokens, self.batch, device)
        a = -1.0 - 15.0 * torch.rand(self.heads, device=device)
        x, b = randn(self.heads, self.head_dim), randn(self.groups, self.state_dim)
        return {"x": x, "dt": dt.to(self.dtype), "a": a, "b": b, **options}


@dataclass(frozen=True, slots=True)
class Config:
    """How a sequence is gone through.

    tile_p: rows of the state, and columns of x, of a block.
    chunk: tokens of a step; 0 for one token after the other.
    segment: chunks of a segment: the segments of a sequence run at once, behind launches that find
        the states they start from; 0 for whole sequences.
    latency: prefetch hint of the loads of a chunk, 1 to 10.
    occupancy, num_worker_warps: compiler hints.
    """

    tile_p: int
    chunk: int = 0
    segment: int = 0
    latency: int = 3
    occupancy: int | None = None
    num_worker_warps: int | None = None


RECURRENT = ((64, 3, 8), (32, 3, 8), (16, 8, 4), (8, 8, 4))  # tile_p, occupancy, worker warps
# For states of up to 128, and for wider ones: tile_p, chunk, latency, occupancy, worker warps.
LARGE = ((64, 64, 3, 2, None), (32, 64, 3, 2, None)), ((64, 64, 3, 1, 8), (32, 64, 2, 2, None))
SMALL = ((32, 32, 3, 2, None),), ((32, 32, 3, 1, 8),)  # more spills
CHUNKED = {"sm_90": (((64, 128, 3, 1, 8), *LARGE[0]), LARGE[1]), "sm_100": LARGE, "sm_103": LARGE}
SEGMENTS = (128, 64, 32, 16, 8, 4)


def candidates(p: Problem, device: Device) -> Iterator[Config]:
    """Token after token for any; of 16 bits also chunk after chunk."""
    widest = max(LEAST_TILE, next_pow2(p.head_dim))
    if device.is_cpu:
        yield Config(min(64, widest))
        yield Config(min(64, widest), 32)
        yield Config(min(32, widest), 16, segment=1)
        return
    yield from (Config(min(tile_p, widest), occupancy=occupancy, num_worker_warps=warps) for tile_p, occupancy, warps in RECURRENT)
    for tile_p, chunk, latency, occupancy, warps in CHUNKED.get(device.arch, SMALL)[tile_n(p) > 128]:
        for segment in (0, *SEGMENTS):
            c = Config(min(tile_p, widest), chunk, segment, latency, occupancy, warps)
            resident, each = device.sms * occupancy, _blocks(p, c) * p.heads
            few = _segments(p, c) > p.batch and each * p.batch < resident
            if not segment or (few and each * _segments(p, c) <= 4 * resident):
                yield c


def tile_n(p: Problem) -> int:
    return max(LEAST_TILE, next_pow2(p.state_dim))


def legal(p: Problem, c: Config, device: Device) -> bool:
    """Products of fp32 on tensor cores would lose what it is there for. A loop over tokens takes
    registers beside those of the state.
    """
    if not c.chunk:
        fits = tile_n(p) * c.tile_p * (c.occupancy or 1) <= (192 if p.one else 160) * 128
        return grid_fits(_blocks(p, c) * p.heads * p.batch) and (device.is_cpu or fits)
    grids = _blocks(p, c) * _segments(p, c), -(-p.head_dim // LINK_TILE) * p.batch
    return p.dtype.itemsize == 2 and all(grid_fits(blocks * p.heads) for blocks in grids)


def _blocks(p: Problem, c: Config) -> int:
    return -(-p.head_dim // c.tile_p)


def _segments(p: Problem, c: Config) -> int:
    """Places of the launches that hold a state."""
    return places(p.tokens, p.batch, c.segment * c.chunk, p.varlen)


def work(p: Problem, c: Config, device: Device) -> Work | tuple[Work, ...]:
    """Blocks of the state go through their sequence step by step, each behind the one before."""
    width, size, per_sm, cost = tile_n(p), p.dtype.itemsize, c.occupancy or 1, p.cost()
    mean = max(1.0, p.all_tokens / max(1, p.batch))
    scan = Work(
        blocks=_blocks(p, c) * p.heads * p.batch,
        resident=device.sms * per_sm,
        per_sm=per_sm,
        steps=mean,
        flops=6 * width * c.tile_p,
        kinds=("token",),
        serial=1.0,
        fill=(2 * width + (2 + p.gate) * c.tile_p) * size,
        dram=cost.size_bytes,
        out=width * c.tile_p,
        chain=1.0,
        ragged=max(1.0, p.longest_tokens / mean),
    )
    if not c.chunk:
        return scan
    square = c.chunk * c.chunk
    scan = replace(
        scan,
        steps=mean / c.chunk,
        flops=2 * square * (width + c.tile_p) + 4 * c.chunk * width * c.tile_p,
        kinds=("scan",),
        serial=WAITS * 4,
        exponentials=square + 2 * c.chunk,
        fill=c.chunk * scan.fill,
    )
    if not c.segment:
        return scan
    local = 8 * _segments(p, c) * p.heads * width * _blocks(p, c) * c.tile_p
    resume = replace(scan, blocks=_blocks(p, c) * p.heads * _segments(p, c), steps=min(scan.steps, c.segment), ragged=1.0)
    carry = replace(
        resume,
        blocks=max(1, _blocks(p, c) * p.heads * (_segments(p, c) - p.batch)),
        flops=2 * c.chunk * width * c.tile_p,
        serial=WAITS,
        exponentials=c.chunk,
        dram=cost.size_bytes / 2 + local,
        partial=local,
    )
    return carry, resume


def family(p: Problem, c: Config) -> str:
    """Launches that the model errs alike about."""
    return f"{p.dtype.itemsize} {tile_n(p)}x{c.tile_p}/{c.chunk}{'s' * (c.segment > 0)}{c.occupancy}"


CHOICES = Choices("ssd", candidates, legal, work, family, tie=0.05)
space = CHOICES.space


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """One launch, or for chunks two: what needs no state, then what does; for segments also the
    state behind each, and the one in front of it.
    """
    lengths, bias = {"cu_seqlens": p.varlen}, {"dt_bias": p.bias}
    state, of_result = {"state": p.has_state, "state_rows": p.has_rows}, {"d": p.skip, "z": p.gate}
    of_state = {"blocks": _blocks(p, c), "tile_n": tile_n(p), "group": p.heads // p.groups}
    constants = of_state | {"has_d": p.skip, "has_z": p.gate}
    blocks = _blocks(p, c) * p.heads
    if not c.chunk:
        constants |= {"has_bias": p.bias, "one": p.one, "whole": p.state_dim == tile_n(p) and p.head_dim % c.tile_p == 0}
        optional = lengths | bias | state | of_result
        return (Launch.of(recurrent_kernel, (blocks * p.batch,), p, c, constants, optional=optional, pdl=use_pdl(p.all_tokens, False)),)
    chunks, heads = places(p.tokens, p.batch, c.chunk, p.varlen), min(GATE_HEADS, p.heads & -p.heads)
    rows = {"gates": ((chunks, p.heads, 2, c.chunk), torch.float32), "totals": ((chunks, p.heads, 4), torch.float32)}
    of_gates = {"has_bias": p.bias, "gate_heads": heads}
    of_all: dict[str, Any] = {"optional": lengths | bias, "scratch": rows, "occupancy": None, "num_worker_warps": None}
    gates = Launch.of(gates_kernel, (chunks, p.heads // heads), p, c, of_gates, **of_all)
    grid = (blocks * _segments(p, c),)
    optional = lengths | state | of_result
    scan = Launch.of(scan_kernel, grid, p, c, constants | {"carry": False}, optional=optional | {"local": c.segment, "kept": False})
    if not c.segment:
        return gates, scan
    local = (_segments(p, c), p.heads, tile_n(p), _blocks(p, c) * c.tile_p), torch.float32
    kept = (_segments(p, c), p.heads), torch.float32
    nothing = dict.fromkeys(("state", "state_rows", "c", "d", "z", "out"), False)
    carry = Launch.of(
        scan_kernel,
        grid,
        p,
        c,
        of_state | {"carry": True, "has_state": False, "has_rows": False, "has_d": False, "has_z": False},
        optional=lengths | nothing,
        scratch={"local": local, "kept": kept},
    )
    narrow = {"blocks": -(-p.head_dim // LINK_TILE), "tile_n": tile_n(p), "tile_p": LINK_TILE}
    grid = (narrow["blocks"] * p.heads * p.batch,)
    return gates, carry, Launch.of(link_kernel, grid, p, c, narrow, optional=lengths | state, occupancy=None, num_worker_warps=None), scan
