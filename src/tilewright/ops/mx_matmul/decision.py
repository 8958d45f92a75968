"""What `mx_matmul` decides from (Problem) and what it decides (Config), and the launches that
follow.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from ...launch import Cost, Device, Launch, next_pow2
from ...select import Choices, Work
from .. import matmul
from ..common import gemm_choices
from ..common.gemm_candidates import PARTS, changed, cpu_tiles, fitted_to, tiles_of
from ..common.gemm_choices import Gemm, Tile, filled_parts, use_pdl
from ..common.gemm_tiles import FEW
from ..common.mx import E4M3, MX_FORMATS, MxFormat, random_operand
from .kernels import mx_decode_kernel, mx_matmul_kernel, mx_sum_kernel

# Tiles as `tiles_of` reads them; tile_k counts bytes. tileiras 13.4: narrower ones leave sm_100's
# tensor cores, persistent ones spill on sm_120.
BLACKWELL = "128x128x128 4l p, 256x256x128 2c 3l p, 256x128x128 2c 4l p, 128x256x128 3l, 128x64x128 4l p, 64x128x128 4l b, 64x128x256 3l b"
CONSUMER = "128x128x128 8w 3l, 128x64x128 3l, 64x128x128 3l, 64x64x128 3l, 32x64x128 3l b, 8x64x128 3l b"
TILES = {"sm_100": BLACKWELL, "sm_103": BLACKWELL, "sm_120": CONSUMER, "sm_121": CONSUMER}  # whose tensor cores take scales
# Elsewhere: a kernel that decodes both operands, for few rows: by the most rows that tiles are for,
# which would spill with more.
_ANY_ROWS = "64x128x64 8w 3l, 128x128x64 8w 3l"
_SOME_ROWS = f"0x64x128 4w 2o 3l b, {_ANY_ROWS}"
DECODING = {16: f"0x64x256 4w 2o 3l b, 0x128x128 4w 2o 3l b, 0x64x64 4w 4o 3l b, {_SOME_ROWS}", 64: _SOME_ROWS, 128: _ANY_ROWS}
MOST_DECODING = {8: 128, 4: 64}  # rows of a that it is for, by the bits of a code; more are decoded first
# Rows, bytes of codes, and tiles of them that a block decodes. 32 rows take 1.05 to 2 times as
# long, 8 tiles up to 1.1 (H200).
DECODE_ROWS, DECODE_WIDTH, DECODE_STEPS = 16, 128, 4
LEAST_PART = 256  # of k
SUM_TILE = (8, 128)  # rows and columns of which a block adds the shares of k


@dataclass(frozen=True, slots=True)
class Problem:
    """out [m, n] = a [m, k] @ b [n, k].T, both in a format. dtype: of out and bias."""

    m: int
    n: int
    k: int
    mx_format: str = "mxfp8"
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    out_scale: bool = False

    @property
    def format(self) -> MxFormat:
        """What its name stands for."""
        return MX_FORMATS[self.mx_format]

    @property
    @lru_cache(maxsize=64)  # once for all configs of a problem
    def gemm(self) -> Gemm:
        """As a product of bytes: pairs of codes take the time of one code of 8 bits."""
        k = self.format.row_bytes(self.k)
        return Gemm(self.m, self.n, k, E4M3, self.cost().size_bytes, most_fast=k)

    @property
    def decoded(self) -> matmul.Problem:
        """The product of decoded operands. One with a bias and an out_scale ends in a launch of its
        own.
        """
        own = self.bias and self.out_scale
        dtype = torch.float32 if own else self.dtype
        return matmul.Problem(
            self.m, self.n, self.columns, torch.bfloat16, bias=self.bias and not own, out_scale=self.out_scale and not own, out_dtype=dtype
        )

    @property
    def columns(self) -> int:
        """Of a decoded operand: those of whole tiles of codes."""
        return -(-self.format.row_bytes(self.k) // DECODE_WIDTH) * DECODE_WIDTH * 8 // self.format.bits

    def cost(self) -> Cost:
        operands = self.format.size_bytes(self.m, self.k) + self.format.size_bytes(self.n, self.k)
        return Cost(operands + self.n * (self.m + self.bias) * self.dtype.itemsize, 2 * self.m * self.n * self.k)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        (a, scale_a), (b, scale_b) = (random_operand(rows, self.k, self.format, device) for rows in (self.m, self.n))
        return {
            "a": a,
            "b": b,
            "scale_a": scale_a,
            "scale_b": scale_b,
            "bias": torch.randn(self.n, dtype=self.dtype, device=device) if self.bias else None,
            "out_scale": torch.full((), 0.37, device=device) if self.out_scale else None,
            "out_dtype": self.dtype,
        }


@dataclass(frozen=True, slots=True)
class Config(Tile):
    """A tile, whose tile_k counts bytes of codes.

    native: the tensor cores scale. split_k: blocks that share the sum over k of a tile; a last
        launch adds their sums.
    decoded: both operands become bf16 in a launch each, of which a block has tile_m rows and tile_k
        bytes; `matmul` does the rest.
    """

    native: bool = True
    decoded: bool = False
    split_k: int = 1

    def split_tiles(self, g: Gemm, device: Device) -> int:
        """See Tile: all or none."""
        return g.tiles(self) if self.parts(g) > 1 else 0

    def parts(self, g: Gemm) -> int:
        """See Tile."""
        return filled_parts(-(-g.k // self.tile_k), self.split_k)


def candidates(p: Problem, device: Device) -> Iterator[Config]:
    """The tiles of the architecture, persistent too where there is more than a wave. Without
    block-scaled tensor cores, those that decode, with shares of k, or those of decoded operands.
    """
    if device.is_cpu:
        for c in cpu_tiles(p.gemm, Config):
            yield c
            yield changed(c, native=False, swap_ab=True, persistent=False, split_k=2)
            yield Config(next_pow2(min(p.m, 64)), DECODE_WIDTH, DECODE_WIDTH, native=False, decoded=True)
        return
    if device.arch in TILES:
        for c, how in tiles_of(TILES[device.arch], Config):
            if c.tile_m <= max(FEW, next_pow2(p.m)) and (p.m <= FEW or not c.swap_ab):
                yield c
                if "p" in how and p.gemm.tiles(c) > c.resident(device):
                    yield changed(c, persistent=True)
        return
    if p.m <= MOST_DECODING[p.format.bits]:
        for c, how in tiles_of(next(tiles for most, tiles in DECODING.items() if p.m <= most), Config):
            c = changed(fitted_to(c, how, p.m, p.n) or c, native=False)
            yield c
            yield from (changed(c, split_k=parts) for parts in PARTS if parts * p.gemm.tiles(c) <= c.resident(device) and parts * LEAST_PART <= p.k)
    else:
        yield Config(DECODE_ROWS, DECODE_WIDTH, DECODE_WIDTH, native=False, decoded=True, occupancy=4, num_worker_warps=4)


def legal(p: Problem, c: Config, device: Device) -> bool:
    """Whether the device has the formats' 8-bit floats."""
    return device.has_fp8


def work(p: Problem, c: Config, device: Device) -> tuple[Work, ...]:
    """As of a product of 8 bits; of decoded operands the launches that decode: it has no rival."""
    if not c.decoded:
        return gemm_choices.work(p.gemm, c, device)
    size = p.format.size_bytes(p.n, p.k) + 2 * p.n * p.columns
    return (Work(math.prod(_decode_grid(p, c, p.n)), resident=8 * device.sms, per_sm=8, dram=float(size)),)


def family(p: Problem, c: Config) -> str:
    """What the model errs alike about."""
    if c.decoded:
        return f"{p.mx_format} decoded {c.tile_m}x{c.tile_k}"
    return f"{p.mx_format} {gemm_choices.family(p.gemm, c)}"


CHOICES = Choices("mx_matmul", candidates, legal, work, family, like="matmul")
space = CHOICES.space


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """One launch, or a product in shares and their sum; or what `_decoded_plan` says."""
    if c.decoded:
        return _decoded_plan(p, c, device)
    tiles, shares = p.gemm.tiles(c), c.parts(p.gemm)
    blocks = min(tiles, c.resident(device)) if c.persistent else tiles
    grid = (blocks, shares) if shares > 1 else (blocks,)
    constants: dict[str, Any] = {"group": p.format.group_bytes, "band": c.group, "shares": shares}
    optional = {"bias": p.bias, "out_scale": p.out_scale}
    how: dict[str, Any] = {"optional": optional, "pdl": use_pdl(p.gemm, c, device, blocks * shares, shares)}
    if shares == 1:
        return (Launch.of(mx_matmul_kernel, grid, p, c, constants, **how),)
    how |= {"renames": {"out": "partial"}, "scratch": {"partial": ((shares, p.m, p.n), torch.float32)}}
    return Launch.of(mx_matmul_kernel, grid, p, c, constants, **how), _sum_plan(p, shares)


def _decoded_plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """Launches that decode a and b, and those of a product of what they write. Both a bias and an
    out_scale come in a last one.
    """
    own = p.bias and p.out_scale
    others = {"a": "values_a", "b": "values_b", **({"out": "sums"} if own else {})}
    product = matmul.plan(p.decoded, matmul.DECISION.decide(p.decoded, device)[0], device)
    launches = [_decode_plan(p, c, name, rows) for name, rows in (("a", p.m), ("b", p.n))]
    launches += [launch.with_others(others) for launch in product]
    if own:
        # The sum of one share: what the product writes.
        views = {"share": ("sums", (1, p.m, p.n), (p.m * p.n, p.n, 1))}
        last = replace(_sum_plan(p, 1), scratch={"sums": ((p.m, p.n), torch.float32)}, views=views)
        launches.append(last.with_others({"partial": "share"}))
    return tuple(launches)


def _decode_grid(p: Problem, c: Config, rows: int) -> tuple[int, int]:
    return -(-rows // c.tile_m), -(-p.format.row_bytes(p.k) // (c.tile_k * DECODE_STEPS))


def _decode_plan(p: Problem, c: Config, name: str, rows: int) -> Launch:
    constants = {"group": p.format.group_bytes, "tile_m": c.tile_m, "tile_k": c.tile_k, "steps": DECODE_STEPS}
    renames = {"codes": name, "scale": f"scale_{name}", "values": f"values_{name}"}
    scratch = {f"values_{name}": ((rows, p.columns), torch.bfloat16)}
    return Launch.of(mx_decode_kernel, _decode_grid(p, c, rows), p, c, constants, renames=renames, scratch=scratch, pdl=True)


def _sum_plan(p: Problem, shares: int) -> Launch:
    grid = (-(-p.m // SUM_TILE[0]), -(-p.n // SUM_TILE[1]))
    constants = {"tile_m": SUM_TILE[0], "tile_n": SUM_TILE[1], "shares": shares}
    optional = {"bias": p.bias, "out_scale": p.out_scale}
    return Launch.of(mx_sum_kernel, grid, p, None, constants, optional=optional, occupancy=4, pdl=True)


DECISION = CHOICES.decision(Problem, plan, ("a", "b", "scale_a", "scale_b", "bias", "out_scale", "out"))
