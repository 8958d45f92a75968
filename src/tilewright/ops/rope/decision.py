"""What `rope` decides from (Problem) and what it decides (Config), and its launch."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import cuda.tile as ct
import torch
from torch import Tensor

from ...launch import Cost, Device, Launch, next_pow2, usual
from ...select import Choices, Work
from ..common.rows import REGISTERS, THREADS, threads
from .kernels import rope_kernel, rope_positions_kernel

MAX_X, MAX_Y = (1 << 24) - 1, (1 << 16) - 1  # blocks of a grid; z as y
# Of the candidates: bytes of a thread's load, warps.
LOADS = ((16, 4), (8, 4), (32, 4), (16, 8), (4, 4))


@dataclass(frozen=True, slots=True)
class Problem:
    """heads_inside: the memory of q and k is [batch, seq_len, heads, head_dim], as projections
    leave it.
    """

    batch: int
    q_heads: int
    kv_heads: int
    seq_len: int
    head_dim: int
    dtype: torch.dtype
    rotary_dim: int = 0  # 0: head_dim
    heads_inside: bool = True
    interleaved: bool = False
    from_positions: bool = False

    def __post_init__(self) -> None:
        usual(self, rotary_dim=self.head_dim)

    @property
    def rotated(self) -> int:
        return self.rotary_dim or self.head_dim

    def cost(self) -> Cost:
        pairs = self.batch * (self.q_heads + self.kv_heads) * self.seq_len * self.rotated // 2
        angles = self.batch * self.seq_len * 4 + self.rotated * 2 if self.from_positions else self.seq_len * self.rotated * self.dtype.itemsize
        return Cost(size_bytes=4 * pairs * self.dtype.itemsize + angles, flops=6 * pairs)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        def heads(n: int) -> Tensor:
            if self.heads_inside:
                return torch.randn(self.batch, self.seq_len, n, self.head_dim, dtype=self.dtype, device=device).transpose(1, 2)
            return torch.randn(self.batch, n, self.seq_len, self.head_dim, dtype=self.dtype, device=device)

        half = self.rotated // 2
        inv_freq = 10_000.0 ** (-torch.arange(half, dtype=torch.float32, device=device) / half)
        positions = torch.arange(self.seq_len, device=device)[None]
        both = {"q": heads(self.q_heads), "k": heads(self.kv_heads), "interleaved": self.interleaved}
        if self.from_positions:  # each sequence at its own place
            start = 100 * torch.arange(self.batch, device=device)[:, None]
            return {**both, "positions": positions + start, "inv_freq": inv_freq}
        # Both halves, as transformers makes them.
        angle = torch.cat((positions[..., None] * inv_freq,) * 2, -1)
        return {**both, "cos": angle.cos().to(self.dtype)[..., :half], "sin": angle.sin().to(self.dtype)[..., :half]}


@dataclass(frozen=True, slots=True)
class Config:
    """What a block rotates: up to tile_h * tiles heads at tile_s positions. Lanes behind the last
    head or position are masked.

    tile_h, tile_s: heads and positions of a tile; powers of two.
    tiles: tiles of heads per block, all at the same positions, so that cosines and sines are loaded
        once. A block with room for all heads of q takes those of k too.
    latency: hint of the loads, 1 to 10.
    occupancy: resident blocks per SM.
    num_worker_warps: 4 or 8.
    """

    tile_h: int
    tile_s: int
    tiles: int = 1
    latency: int = 4
    occupancy: int | None = None
    num_worker_warps: int | None = None


@dataclass(frozen=True, slots=True)
class Share:
    """The heads of q or k: at each tile of positions `groups` blocks, of `tiles` x tile_h each."""

    heads: int
    groups: int
    tiles: int
    tile_h: int


def shares(p: Problem, c: Config) -> tuple[Share, Share, int]:
    """Those of q and of k, and the blocks at each tile of positions."""

    def share(heads: int) -> Share:
        tile_h = min(c.tile_h, next_pow2(heads))
        tiles = min(c.tiles, ct.cdiv(heads, tile_h))
        return Share(heads, ct.cdiv(heads, tile_h * tiles), tiles, tile_h)

    q, k = share(p.q_heads), share(p.kv_heads)
    return q, k, 1 if q.groups == k.groups == 1 else q.groups + k.groups


def lanes(p: Problem, c: Config) -> tuple[int, int]:
    """Pairs that the largest block has room for, for each of its threads: of a tile, and of all."""
    q, k, groups = shares(p, c)
    each = c.tile_s * next_pow2(p.rotated // 2) / threads(c)
    heads = q.tiles * q.tile_h + (k.tiles * k.tile_h if groups == 1 else 0)
    return max(1, int(q.tile_h * each)), max(1, int(heads * each))


def candidates(p: Problem, device: Device) -> Iterator[Config]:
    """Tiles of which a thread loads some bytes: whole heads, at as many positions as it takes."""
    heads, half, seq_len = next_pow2(max(p.q_heads, p.kv_heads)), next_pow2(p.rotated // 2), next_pow2(p.seq_len)
    if device.is_cpu:
        most = max(1, (1 << 20) // (heads * 2 * half))
        yield Config(heads, min(most, 1 if p.seq_len == 1 else max(64, seq_len)))  # short prompts share a kernel, as in prefill.py
        yield Config(2, max(1, min(most, seq_len) // 4), tiles=3)
        return
    for (load, warps), n in product(LOADS, reversed(range(heads.bit_length()))):
        tile, tile_h = load * 32 * warps // (p.dtype.itemsize * (2 if p.interleaved else 1)), 1 << n
        tile_s = min(seq_len, max(1, tile // (tile_h * half)))
        small, large = tile_h * tile_s * half < tile and tile_h < heads, tile_h * half > tile and tile_h > 1
        # Two vectors of interleaved pairs would change their layout through shared memory.
        if not (small or large or (p.interleaved and load > 16)):
            most = ct.cdiv(max(p.q_heads, p.kv_heads), tile_h)
            yield from (Config(tile_h, tile_s, tiles, num_worker_warps=warps) for tiles in (most, min(2, most), 1))


def legal(p: Problem, c: Config, device: Device) -> bool:
    """Whether a block's share fits into its registers, lies in runs of 512 bytes where it can, and
    may be launched.
    """
    rows, most = (c.tile_h, p.q_heads) if p.heads_inside else (c.tile_s, p.seq_len)
    fits = lanes(p, c)[1] * p.dtype.itemsize <= 48 or c.tile_h * c.tile_s * c.tiles == 1
    wide = rows * p.head_dim * p.dtype.itemsize >= 512 or rows >= most
    return max(grid(p, c)[0][1:]) <= MAX_Y and (device.is_cpu or (fits and wide))


def work(p: Problem, c: Config, device: Device) -> Work:
    """A block loads its heads and its angles, then stores. flops are instructions of a lane."""
    (tile, each), (x, *outer) = lanes(p, c), grid(p, c)[0]
    half, many, size = p.rotated // 2, threads(c), p.dtype.itemsize
    # A load takes at most 16 bytes and ends with the half of a head: 48 elements are 3 loads of
    # 16, 20 are 5 of 4.
    vector = min(tile, 16 // size, half & -half)
    masked = c.tile_s > 1 or half < next_pow2(half)
    instructions = 60 + each * (9 + 12 / vector) * (1.2 if masked else 1) + tile * (80 if p.from_positions else 4)
    registers = 20 + each * (1.5 + size / 2)  # of a thread on sm_90
    per_sm = c.occupancy or max(1, min(THREADS // many, int(REGISTERS / many / registers)))
    angles = c.tile_s * (8 if p.from_positions else half * 2 * size)
    return Work(
        blocks=x * outer[0] * outer[1],
        resident=device.sms * per_sm,
        per_sm=per_sm,
        flops=instructions * many,
        kinds=("rows",),
        serial=instructions / 64,  # of a warp that has the SM alone
        fill=2 * size * many * each * half / next_pow2(half) + angles,
        dram=p.cost().size_bytes,
        out=2 * each * many,
        chain=p.from_positions,
    )


def family(p: Problem, c: Config) -> str:
    """How a thread's pairs lie, and how many it has."""
    how = "i" * p.interleaved + "p" * p.from_positions + "m" * (p.rotated & (p.rotated - 1) > 0) + "o" * (not p.heads_inside)
    return f"{p.dtype.itemsize}{how} {c.tile_h > 1}{c.tile_s > 1} {lanes(p, c)} {c.num_worker_warps}"


CHOICES = Choices("rope", candidates, legal, work, family, most=12, tie=0.05)
space = CHOICES.space


def grid(p: Problem, c: Config) -> tuple[tuple[int, int, int], bool]:
    """The grid, and whether its x runs over the batch; over positions if they are too many for y.

    Groups run fastest: they share cosines and sines, and often a memory page. Their number is a
    constant: no division delays the first load. What is too much for x goes on in z.
    """
    groups, position_tiles = shares(p, c)[2], ct.cdiv(p.seq_len, c.tile_s)
    batch_in_x = position_tiles <= MAX_Y
    inner, outer = (p.batch, position_tiles) if batch_in_x else (position_tiles, p.batch)
    z = ct.cdiv(inner, max(1, MAX_X // groups))
    return (groups * ct.cdiv(inner, z), outer, z), batch_in_x


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """Grid and compile-time constants of one launch."""
    q, k, _ = shares(p, c)
    blocks, batch_in_x = grid(p, c)
    constants = {
        "batch_in_x": batch_in_x,
        "folded": blocks[2] > 1,
        "q_heads": q.heads,
        "q_groups": q.groups,
        "q_tiles": q.tiles,
        "q_tile_h": q.tile_h,
        "k_heads": k.heads,
        "k_groups": k.groups,
        "k_tiles": k.tiles,
        "k_tile_h": k.tile_h,
        "half": p.rotated // 2,
    }
    return (Launch.of(rope_positions_kernel if p.from_positions else rope_kernel, blocks, p, c, constants),)
