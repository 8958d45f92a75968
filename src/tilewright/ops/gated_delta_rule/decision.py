"""What a launch of `gated_delta_rule` depends on, which configs it may take, and what each comes
to.
"""

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
from .channel_kernels import scan_channels_kernel, solve_channels_kernel
from .kernels import link_kernel, recurrent_kernel, scan_kernel, solve_kernel
from .steady_kernels import gates_kernel, steady_solve_kernel
from .token_kernels import token_kernel

LEAST_TILE = 16  # of a product
WIDEST_CHUNKED = 128  # head_dim; a wider state and a chunk do not fit the registers of a block
FORGETS = 0.1  # mean log decay of a token of `inputs`, of the head that forgets fastest
WAITS = 3.0  # of a product: for its operands, its issue and its sums
LINK_TILE = 16  # columns of the state of a block of the link: all rows of its matrix stand in registers
CARRY_LATENCY = 1  # of the pass that finds segments' states (H200, 1x32768: 170 us; 181 with 5)
FACTORS = 4  # rows of them; the last keeps a chunk's aligned
GATE_HEADS = 8  # whose gates a block writes: a sector of 32 bytes for each token
TIMED = ("sm_90",)  # where `steady` and `skips` were timed, and are taken


@dataclass(frozen=True, slots=True)
class Problem:
    """What a plan may depend on.

    tokens: of each sequence; of all sequences together with varlen.
    v_dim: columns of v; 0 for head_dim. has_state: a state is given. normalize: as in the op.
    channels: g has a number for each column of k.
    """

    batch: int
    k_heads: int
    v_heads: int
    tokens: int
    head_dim: int
    dtype: torch.dtype
    v_dim: int = 0
    has_state: bool = True
    varlen: bool = False
    normalize: bool = True
    channels: bool = False

    @property
    def values_dim(self) -> int:
        return self.v_dim or self.head_dim

    @property
    def all_tokens(self) -> int:
        return self.tokens if self.varlen else self.batch * self.tokens

    @property
    def longest_tokens(self) -> int:
        """Tokens of the longest sequence of `inputs`."""
        return packed(self.tokens, 1, self.batch) if self.varlen else self.tokens

    @property
    def states(self) -> int:
        """Elements of all states."""
        return self.batch * self.v_heads * self.head_dim * self.values_dim

    def cost(self) -> Cost:
        size, n = self.dtype.itemsize, self.all_tokens
        read = n * (2 * self.k_heads * self.head_dim + 2 * self.v_heads * self.values_dim) * size
        read += 4 * n * self.v_heads * (1 + (self.head_dim if self.channels else 1))
        return Cost(read + 8 * self.states * self.has_state, 6 * n * self.v_heads * self.head_dim * self.values_dim)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        rows = (self.tokens,) if self.varlen else (self.batch, self.tokens)

        def heads(count: int, *dim: int) -> Tensor:
            """As a projection leaves them: the heads of a token side by side."""
            x = torch.randn(*rows, count, *dim, device=device)
            return x if self.varlen else x.transpose(1, 2)

        options: dict[str, Any] = {"scale": None, "normalize": self.normalize}
        q, k = heads(self.k_heads, self.head_dim), heads(self.k_heads, self.head_dim)
        if not self.normalize:
            q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
        # Heads that forget within a few tokens, and heads that hardly do.
        speed = torch.logspace(-3, 0, self.v_heads, device=device) * FORGETS
        speed = speed if self.varlen else speed[:, None]
        g = heads(self.v_heads, self.head_dim).exp() * -speed[..., None] if self.channels else heads(self.v_heads).exp() * -speed
        beta = heads(self.v_heads).sigmoid()
        if self.has_state:
            options["state"] = torch.randn(self.batch, self.v_heads, self.head_dim, self.values_dim, device=device)
        if self.varlen:
            options["cu_seqlens"] = starts(self.tokens, self.batch, device)
        v = heads(self.v_heads, self.values_dim)
        return {"q": q.to(self.dtype), "k": k.to(self.dtype), "v": v.to(self.dtype), "g": g, "beta": beta, **options}


@dataclass(frozen=True, slots=True)
class Config:
    """How a sequence is gone through.

    tile_v: columns of v, and of the state, of a block.
    chunk: tokens of a step; 0 for one token after the other.
    transposed: of a chunk: columns of v are rows of tiles.
    segment: chunks of a segment, a power of two: the segments of a sequence run at once, behind a
        pass that finds the states they start from; 0 for whole sequences.
    latency: prefetch hint of the loads of a chunk, 1 to 10.
    solve_occupancy: of the launch that needs no state.
    solve_heads: value heads of a block there, which share the products of q and k.
    steady: its blocks stay for many chunks, behind a launch that writes the gates as rows.
    skips: the pass for segments' states leaves out what they forget.
    occupancy, num_worker_warps: compiler hints of the launch that does.
    parts: of one token alone: tiles of rows that a block's columns of the state are loaded as, a
        power of two; 0 for one tile, by the kernel of any number of tokens.
    """

    tile_v: int
    chunk: int = 0
    transposed: bool = False
    segment: int = 0
    latency: int = 3
    solve_occupancy: int | None = None
    solve_heads: int = 1
    steady: bool = False
    skips: bool = False
    occupancy: int | None = None
    num_worker_warps: int | None = None
    parts: int = 0


# Of one token: 4, 32, 64 and 256 sequences of 16/32 heads take 5.9, 36.1, 68.6 and 267.4 us with 32
# columns a block, 6.7, 35.9, 68.3 and 263.7 with 64, and at best by the kernel of any number of
# tokens 7.5, 39.2, 74.2 and 287.4 (H200, 2026-11-30).
PARTS, OCCUPANCY = 4, 3
WAVES = 4  # of blocks of 64 columns, from which on they are taken
RECURRENT = ((32, 5), (32, 4), (16, 6), (64, 2), (8, 8))  # tile_v, occupancy
# tile_v, chunk, transposed, latency, occupancy and that of the solve, most heads of a block there
CHUNKED = {
    "sm_90": ((64, 64, True, 7, 2, 2, 2), (32, 64, False, 3, 2, 2, 2)),
    "sm_100": ((32, 64, False, 3, 2, 2, 1),),
    "sm_103": ((32, 64, False, 3, 2, 2, 1),),
}
ANYWHERE = ((32, 32, False, 3, 2, 2, 1),)  # longer chunks spill
# With a gate for each column; on sm_120 and sm_121 the solve spills, and tokens go one by one.
CHANNELS = dict.fromkeys(("sm_80", "sm_90", "sm_100", "sm_103"), ((32, 32, False, 3, 2, 1, 1),))
SEGMENTS = (256, 128, 64, 32, 16)  # where links do not spill: on the architectures above


def candidates(p: Problem, device: Device) -> Iterator[Config]:
    """Token after token for any, with a kernel of its own for one; of 16 bits also chunk after
    chunk.
    """
    widest = max(LEAST_TILE, next_pow2(p.values_dim))
    if device.is_cpu:
        yield Config(min(64, widest))
        yield Config(min(64, widest), 64 if p.head_dim >= 64 else 32)
        yield Config(min(64, widest), 32, transposed=True, segment=1, solve_heads=_shared(p, 2))
        yield Config(min(64, widest), 64 if p.head_dim >= 64 else 32, solve_heads=_shared(p, 2), steady=True)
        yield Config(min(64, widest), parts=2)
        return
    wide, narrow = (Config(min(tile_v, widest), parts=PARTS, occupancy=OCCUPANCY) for tile_v in (64, 32))
    if legal(p, narrow, device):
        many = _blocks(p, wide) * p.v_heads * p.batch >= WAVES * OCCUPANCY * device.sms
        yield wide if many and legal(p, wide, device) else narrow
        return
    for tile_v, occupancy in RECURRENT:
        yield Config(min(tile_v, widest), occupancy=occupancy)
    segments = (0, *SEGMENTS) if device.arch in CHUNKED else (0,)
    rows = CHANNELS.get(device.arch, ()) if p.channels else CHUNKED.get(device.arch, ANYWHERE)
    timed = device.arch in TIMED
    for tile_v, chunk, transposed, latency, occupancy, solve, heads in rows:
        for segment in segments:
            c = Config(
                min(tile_v, widest),
                chunk,
                transposed,
                segment,
                latency,
                solve,
                _shared(p, heads),
                timed and not p.channels,
                timed and segment > 0,
                occupancy,
            )
            few = _segments(p, c) > p.batch and _blocks(p, c) * p.v_heads * p.batch < device.sms * occupancy
            if not segment or (few and device.sms * occupancy <= 4 * _blocks(p, c) * p.v_heads * _segments(p, c)):
                yield c


def _shared(p: Problem, most: int) -> int:
    """Value heads of a block: a power of two that divides those of a key head."""
    group = p.v_heads // p.k_heads
    return min(most, group & -group)


def tile_k(p: Problem) -> int:
    return max(LEAST_TILE, next_pow2(p.head_dim))


def legal(p: Problem, c: Config, device: Device) -> bool:
    """Products of fp32 on tensor cores would lose what it is there for. With a gate for each column
    there is one form of chunks.

    What a token writes is rounded, and only tokens of later chunks see the rounded number and make
    good for it. A chunk of more tokens than keys have columns gathers such errors: twice those of
    one token after the other (64 tokens of 4 columns: nearly five times).
    """
    fits = grid_fits(_blocks(p, c) * p.v_heads * p.batch)
    if c.parts:
        return grid_fits(_blocks(p, c), p.v_heads, p.batch) and _takes_parts(p, c)
    if not c.chunk:
        return fits and (device.is_cpu or tile_k(p) * c.tile_v * (c.occupancy or 1) <= 160 * 128)
    return (
        fits
        and p.dtype.itemsize == 2
        and c.chunk <= p.head_dim
        and not (p.channels and (c.transposed or c.segment or c.steady))
        and tile_k(p) <= WIDEST_CHUNKED
        and (p.v_heads // p.k_heads) % c.solve_heads == 0
        and grid_fits(_chunks(p, c), p.v_heads)
    )


def _takes_parts(p: Problem, c: Config) -> bool:
    """One token of each sequence, whose state is kept and fits into registers. A part has at least
    two rows, and begins inside the state.
    """
    one = p.tokens == 1 and not p.varlen and p.has_state and not c.chunk
    inside = tile_k(p) // c.parts * (c.parts - 1) < p.head_dim
    return one and inside and 2 * c.parts <= tile_k(p) and tile_k(p) * c.tile_v * (c.occupancy or 1) <= 192 * 128


def _blocks(p: Problem, c: Config) -> int:
    return -(-p.values_dim // c.tile_v)


def _chunks(p: Problem, c: Config) -> int:
    """Places of the first launch."""
    return places(p.tokens, p.batch, c.chunk, p.varlen)


def _segments(p: Problem, c: Config) -> int:
    """Places of the launches that hold a state."""
    return places(p.tokens, p.batch, c.segment * c.chunk, p.varlen)


def work(p: Problem, c: Config, device: Device) -> Work | tuple[Work, ...]:
    """Blocks of the state go through their sequence step by step, each behind the one before."""
    width, size, per_sm = tile_k(p), p.dtype.itemsize, c.occupancy or 1
    blocks, cost = _blocks(p, c) * p.v_heads * p.batch, p.cost()
    mean = max(1.0, p.all_tokens / max(1, p.batch))
    scan = Work(
        blocks=blocks,
        resident=device.sms * per_sm,
        per_sm=per_sm,
        steps=mean,
        flops=10 * width * c.tile_v,
        kinds=("token",),
        serial=1.0,
        fill=(2 * width + 2 * c.tile_v) * size,
        dram=cost.size_bytes,
        out=width * c.tile_v,
        chain=1.0,
        ragged=max(1.0, p.longest_tokens / mean),
    )
    if not c.chunk:
        return scan
    square, chunks = c.chunk * c.chunk, _chunks(p, c)
    rows, products = (3 * width * size, 4 * c.chunk.bit_length()) if p.channels else (FACTORS * 4, 6)
    stored = chunks * p.v_heads * (2 * square * 2 + c.chunk * rows)
    solve = Work(
        blocks=chunks * p.v_heads // c.solve_heads,
        resident=device.sms * (c.solve_occupancy or 1),
        per_sm=c.solve_occupancy or 1,
        flops=products * square * width + 10 * square * c.chunk * c.solve_heads,
        kinds=("solve",),
        serial=WAITS * (3 + 8 * c.solve_heads),
        fill=2 * c.chunk * width * size,
        dram=stored + 2 * p.all_tokens * p.k_heads * p.head_dim * size,
        out=2 * square * c.solve_heads,
    )
    scan = replace(
        scan,
        steps=mean / c.chunk,
        flops=c.tile_v * (6 * c.chunk * width + 4 * square),
        kinds=("scan" if c.transposed else "plain",),
        serial=WAITS * 2.5,
        fill=(2 * c.chunk * (width + c.tile_v) + 2 * square) * size,
        dram=cost.size_bytes + stored,
    )
    if not c.segment:
        return solve, scan
    local = 8 * _segments(p, c) * p.v_heads * width * (_blocks(p, c) * c.tile_v + width)
    resume = replace(scan, blocks=_blocks(p, c) * p.v_heads * _segments(p, c), steps=min(scan.steps, c.segment), ragged=1.0)
    columns = -(-width // c.tile_v)
    carry = replace(
        resume,
        blocks=max(1, (_blocks(p, c) + columns) * p.v_heads * (_segments(p, c) - p.batch)),
        flops=c.tile_v * (4 * c.chunk * width + 2 * square),
        serial=WAITS * 2,
        dram=stored / 2 + local,
        partial=local,
    )
    return solve, carry, resume


def family(p: Problem, c: Config) -> str:
    """Launches that the model errs alike about."""
    how = f"{'t' * c.transposed}{'s' * (c.segment > 0)}{c.occupancy}{'p' * (c.parts > 0)}"
    return f"{p.dtype.itemsize} {tile_k(p)}x{c.tile_v}/{c.chunk}{how}"


CHOICES = Choices("gated_delta_rule", candidates, legal, work, family, tie=0.05)
space = CHOICES.space


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """One launch, or for chunks two: what needs no state, then what does."""
    of_heads = {"group": p.v_heads // p.k_heads, "tile_k": tile_k(p)}
    of_tile = {**of_heads, "whole": p.head_dim == tile_k(p) and p.values_dim % c.tile_v == 0}
    of_state = {**of_tile, "blocks": _blocks(p, c)}
    lengths = {"cu_seqlens": p.varlen}
    optional = {"state": p.has_state, **lengths}
    grid = (_blocks(p, c) * p.v_heads * p.batch,)
    if c.parts:
        return (Launch.of(token_kernel, (_blocks(p, c), p.v_heads, p.batch), p, c, of_tile, pdl=use_pdl(p.all_tokens, False)),)
    if not c.chunk:
        return (Launch.of(recurrent_kernel, grid, p, c, of_state, optional=optional, pdl=use_pdl(p.all_tokens, False)),)
    if p.channels:
        return _with_channels(p, c, optional)
    solve = _solve(p, c, device)
    columns = -(-tile_k(p) // c.tile_v)
    of_scan = {**of_state, "columns": columns, "carry": False, "ahead": device.arch != "sm_90"}
    parts = _segments(p, c) * p.v_heads
    scan = Launch.of(scan_kernel, (_blocks(p, c) * parts,), p, c, of_scan, optional=optional | {"local": c.segment})
    if not c.segment:
        return *solve, scan
    carry = Launch.of(
        scan_kernel,
        ((_blocks(p, c) + columns) * parts,),
        p,
        c,
        {**of_scan, "carry": True, "latency": CARRY_LATENCY},
        optional=optional | {"q": False, "p": False, "out": False},
        scratch={"local": ((_segments(p, c), p.v_heads, tile_k(p), (_blocks(p, c) + columns) * c.tile_v), torch.float32)},
    )
    narrow = {"tile_k": tile_k(p), "tile_v": LINK_TILE, "blocks": _blocks(p, c) * c.tile_v // LINK_TILE, "columns_before": _blocks(p, c) * c.tile_v}
    grid = (narrow["blocks"] * p.v_heads * p.batch,)
    return *solve, carry, Launch.of(link_kernel, grid, p, c, narrow, optional=lengths, occupancy=None, num_worker_warps=8), scan


def _squares(p: Problem, c: Config) -> Any:
    """Shape and dtype of the matrices of all chunks."""
    return (_chunks(p, c), p.v_heads, c.chunk, c.chunk), p.dtype


def _solve(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """What needs no state."""
    lengths, squares, blocks = {"cu_seqlens": p.varlen}, _squares(p, c), p.v_heads // c.solve_heads
    chunks = squares[0][0]
    scratch: dict[str, Any] = {"t": squares, "p": squares, "factors": ((chunks, p.v_heads, FACTORS, c.chunk), torch.float32)}
    decay = {"decay": ((chunks, p.v_heads, 4), torch.float32)}
    constants = {"group": p.v_heads // p.k_heads, "tile_k": tile_k(p), "heads": c.solve_heads}
    how: dict[str, Any] = {"optional": lengths, "occupancy": c.solve_occupancy, "num_worker_warps": None}
    if not c.steady:
        return (Launch.of(solve_kernel, (chunks, blocks), p, c, constants, scratch=scratch | decay, **how),)
    gate_heads = min(GATE_HEADS, p.v_heads & -p.v_heads)
    of_gates = {"gates": ((chunks, p.v_heads, 2, c.chunk), torch.float32), **decay}
    grid = (chunks, p.v_heads // gate_heads)
    gates = Launch.of(gates_kernel, grid, p, c, {"gate_heads": gate_heads}, optional=lengths, scratch=of_gates, occupancy=None, num_worker_warps=None)
    rounds = -(-chunks // max(1, device.sms * (c.solve_occupancy or 1) // blocks))
    return gates, Launch.of(steady_solve_kernel, (-(-chunks // rounds), blocks), p, c, constants, scratch=scratch, **how)


def _with_channels(p: Problem, c: Config, optional: dict[str, bool]) -> tuple[Launch, ...]:
    squares = _squares(p, c)
    (chunks, heads, chunk, _), dtype = squares
    rows = (chunks, heads, chunk, tile_k(p)), dtype
    scratch = {"t": squares, "p": squares, "into": rows, "onward": rows, "outward": rows, "decay": ((chunks, heads, tile_k(p)), torch.float32)}
    of_solve = {"tile_k": tile_k(p), "group": p.v_heads // p.k_heads}
    hints_of_solve = {"occupancy": c.solve_occupancy, "num_worker_warps": 8}
    lengths = {"cu_seqlens": p.varlen}
    solve = Launch.of(solve_channels_kernel, (chunks, heads), p, c, of_solve, optional=lengths, scratch=scratch, **hints_of_solve)
    of_scan = {"tile_k": tile_k(p), "blocks": _blocks(p, c)}
    return solve, Launch.of(scan_channels_kernel, (_blocks(p, c) * heads * p.batch,), p, c, of_scan, optional=optional)
