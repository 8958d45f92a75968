"""Product of block-scaled operands: out = out_scale * (a * scale_a) @ (b * scale_b).T + bias

Both operands are quantised (`quantize_mx`): mxfp8, mxfp4 or nvfp4 (ops/common/mx.py). Compiled for
Blackwell and never timed there.

Source    OCP Microscaling Formats 1.0, 2023; nvfp4: NVIDIA 2025, arXiv:2509.25149.
Numerics  Blackwell's tensor cores scale the products themselves. Elsewhere codes times scales
          become bf16, which has all their bits. Sums and all behind them in fp32, rounded once.
Bound     Compute from a few hundred rows on; below that memory: the weights are read once.
          Without block-scaled tensor cores this is no faster than bf16: there `quantized_matmul`
          reads as few bytes and rounds no activations.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Optional

import cuda.tile as ct
import torch
from torch import Tensor

from ..launch import FLOATS, Cost, Device, Launch, argument_error, as_rows, check_tensor, dtype_name, next_pow2, out_or_new, torch_op
from ..select import Choices, Work
from .common import gemm_choices
from .common.gemm_choices import Gemm, Tile, changed, cpu_tiles, tiles_of, use_pdl
from .common.gemm_tiles import FEW
from .common.mx import (
    E4M3,
    MX_FORMATS,
    MxFormat,
    bits_of,
    check_factor,
    check_scale,
    dequantized,
    format_of,
    mx_named,
    plain_operand,
    random_operand,
    scaled_operand,
)
from .common.pdl import pdl_overlap
from .common.tiles import grouped_tile

ZERO = ct.PaddingMode.ZERO  # rows and columns beyond the edge add nothing; as e8m0 it is 2**-127
# Tiles as `tiles_of` reads them; tile_k counts bytes. tileiras 13.4: narrower ones leave sm_100's
# tensor cores, persistent ones spill on sm_120.
BLACKWELL = "128x128x128 4l p, 256x256x128 2c 3l p, 256x128x128 2c 4l p, 128x256x128 3l, 128x64x128 4l p, 64x128x128 4l b, 64x128x256 3l b"
CONSUMER = "128x128x128 8w 3l, 128x64x128 3l, 64x128x128 3l, 64x64x128 3l, 32x64x128 3l b, 8x64x128 3l b"
PLAIN = "128x128x64 8w 3l, 64x64x64 8w 3l, 64x64x64 3l b, 16x64x64 3l b"
TILES = {"sm_90": PLAIN, "sm_100": BLACKWELL, "sm_103": BLACKWELL, "sm_120": CONSUMER, "sm_121": CONSUMER}
NATIVE = ("sm_100", "sm_103", "sm_120", "sm_121")  # whose tensor cores take scales


def reference(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    bias: Tensor | None = None,
    out_scale: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """The definition; on a GPU by bf16 tensor cores, as the values of codes are exact in bf16."""
    x, w = dequantized(a, scale_a), dequantized(b, scale_b)
    if x.is_cuda and x.dtype is torch.float32:
        y = torch.bmm(as_rows(x)[None].bfloat16(), w[None].mT.bfloat16(), out_dtype=torch.float32).view(*x.shape[:-1], len(w))
    else:
        y = x @ w.mT
    y = y if out_scale is None else y * out_scale
    y = y if bias is None else y + bias
    return y if y.dtype is torch.float64 else y.to(out_dtype)


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
        return Gemm(self.m, self.n, self.format.row_bytes(self.k), E4M3, self.cost().size_bytes, fast=True)

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
    """A tile, whose tile_k counts bytes of codes. native: the tensor cores scale."""

    native: bool = True


def candidates(p: Problem, device: Device) -> Iterator[Config]:
    """The tiles of the architecture, persistent too where there is more than a wave."""
    if device.is_cpu:
        for c in cpu_tiles(p.gemm, Config):
            yield from (c, changed(c, native=False, swap_ab=True, persistent=False))
        return
    g, native = p.gemm, device.arch in NATIVE
    for c, how in tiles_of(TILES.get(device.arch, ""), Config):
        if c.tile_m <= max(FEW, next_pow2(p.m)) and (p.m <= FEW or not c.swap_ab):
            c = changed(c, native=native)
            yield c
            if "p" in how and g.tiles(c) > c.resident(device):
                yield changed(c, persistent=True)


def legal(p: Problem, c: Config, device: Device) -> bool:
    """Whether the device has the formats' 8-bit floats."""
    return device.has_fp8


def work(p: Problem, c: Config, device: Device) -> tuple[Work, ...]:
    """As of a product of 8 bits."""
    return gemm_choices.work(p.gemm, c, device)


def family(p: Problem, c: Config) -> str:
    """What the model errs alike about."""
    return f"{p.mx_format} {gemm_choices.family(p.gemm, c)}"


CHOICES = Choices("mx_matmul", candidates, legal, work, family, like="matmul")
space = CHOICES.space


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """One launch."""
    tiles = p.gemm.tiles(c)
    blocks = min(tiles, c.resident(device)) if c.persistent else tiles
    constants, optional = {"group": p.format.group_bytes, "band": c.group}, {"bias": p.bias, "out_scale": p.out_scale}
    return (Launch.of(mx_matmul_kernel, (blocks,), p, c, constants, optional=optional, pdl=use_pdl(p.gemm, c, device, blocks)),)


DECISION = CHOICES.decision(Problem, plan, ("a", "b", "scale_a", "scale_b", "bias", "out_scale", "out"))


@ct.kernel
def mx_matmul_kernel(
    a,
    b,
    scale_a,
    scale_b,
    bias,
    out_scale,
    out,
    GROUP: ct.Constant[int],
    BIAS: ct.Constant[bool],
    OUT_SCALE: ct.Constant[bool],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    TILE_K: ct.Constant[int],
    BAND: ct.Constant[int],
    SWAP_AB: ct.Constant[bool],
    PERSISTENT: ct.Constant[bool],
    NATIVE: ct.Constant[bool],
    LATENCY: ct.Constant[int],
):
    """out [m, n] = (a * scale_a) @ (b * scale_b).T, a tile of `out` at a time.

    a, b: codes [rows, bytes]; scale_a, scale_b: [rows, bytes / GROUP], e8m0 as bytes. bias: [n],
    out_scale: [1], read only with BIAS, OUT_SCALE. TILE_K: bytes. SWAP_AB: b is the first operand
    of the MMA: for few rows of a. NATIVE: the MMA scales.
    """
    pdl_overlap(PERSISTENT)
    tiles_m, tiles_n = ct.cdiv(out.shape[0], TILE_M), ct.cdiv(out.shape[1], TILE_N)

    def operand(codes, scale, rows, step, ROWS):
        x = ct.load(codes, (rows, step), (ROWS, TILE_K), padding_mode=ZERO, latency=LATENCY)
        s = ct.load(scale, (rows, step), (ROWS, TILE_K // GROUP), padding_mode=ZERO, latency=LATENCY)
        return scaled_operand(x, s) if NATIVE else plain_operand(x, s)

    def one_tile(index):
        tile_m, tile_n = grouped_tile(index, tiles_m, tiles_n, BAND)
        acc = ct.zeros((TILE_N, TILE_M) if SWAP_AB else (TILE_M, TILE_N), ct.float32)
        for step in range(ct.cdiv(a.shape[1], TILE_K)):
            x, w = operand(a, scale_a, tile_m, step, TILE_M), operand(b, scale_b, tile_n, step, TILE_N)
            first, second = (w, x) if SWAP_AB else (x, w)
            if NATIVE:
                acc = ct.mma_scaled(first[0], first[1], second[0].transpose(), second[1].transpose(), acc)
            else:
                for half in ct.static_iter(range(len(first))):
                    acc = ct.mma(first[half], second[half].transpose(), acc)
        y = acc.transpose() if SWAP_AB else acc
        if OUT_SCALE:
            y = y * ct.load(out_scale, (0,), (1,), allow_tma=False).reshape((1, 1))
        if BIAS:
            y = y + ct.load(bias, (tile_n,), (TILE_N,), padding_mode=ZERO, allow_tma=False).astype(ct.float32)
        ct.store(out, (tile_m, tile_n), y.astype(out.dtype))

    if PERSISTENT:
        for index in range(ct.bid(0), tiles_m * tiles_n, ct.num_blocks(0)):
            one_tile(index)
    else:
        one_tile(ct.bid(0))


@torch_op(mutates=("out",))
def mx_matmul_out(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Optional[Tensor],
    out_scale: Optional[Tensor],
    mx_format: str,
    out: Tensor,
) -> None:
    """`mx_matmul` of rows a into `out`; e8m0 scales as bytes. No checks, no sync: safe under graph
    capture.
    """
    m, n = out.shape
    k = a.shape[1] * 8 // mx_named(mx_format).bits
    options = {"mx_format": mx_format, "dtype": out.dtype, "bias": bias is not None, "out_scale": out_scale is not None}
    launches = DECISION.launches(Device.of(a), m=m, n=n, k=k, **options)
    launches.run(a, b, scale_a, scale_b, bias, None if out_scale is None else out_scale.view(1), out)


def mx_matmul(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    *,
    bias: Tensor | None = None,
    out_scale: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out: Tensor | None = None,
) -> Tensor:
    """a @ b.T of operands in mxfp8, mxfp4 or nvfp4, as `quantize_mx` makes them.

    Args:
        a: codes [..., k] float8_e4m3fn, or [..., k / 2] uint8, two e2m1 codes in a byte.
        b: codes of [n, k], such as a weight of torch.nn.Linear; dtype and device of a.
        scale_a, scale_b: [..., k / 32] and [n, k / 32] float8_e8m0fnu (mxfp8, mxfp4), or [..., k /
            16] and [n, k / 16] float8_e4m3fn (nvfp4), row-major.
        bias: [n], out_dtype; added last.
        out_scale: fp32 [], on the device of a: factor of the product; for nvfp4 the `factor` of a
            times that of b.
        out_dtype: bf16, fp16 or fp32.
        out: where the result goes: contiguous, shape, dtype and device of the result, no element in
            common with an input; default a new tensor.
    Returns: [..., n], contiguous. Without rows it is empty, and nothing is launched.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was. An A100
        has no 8-bit floats; there `quantized_matmul` takes weights of 4 bits.
    """
    of = format_of(a, scale_a)
    check_tensor(b, "b", ndim=2, like=a)
    if a.shape[-1] != b.shape[1]:
        raise argument_error("a.shape[-1]", f"{b.shape[1]}, that of b {tuple(b.shape)}", a.shape[-1])
    check_scale(scale_a, a, "a", of)
    check_scale(scale_b, b, "b", of)
    if out_dtype not in FLOATS:
        raise argument_error("out_dtype", "one of bfloat16, float16, float32", dtype_name(out_dtype))
    out = out_or_new(out, (*a.shape[:-1], len(b)), out_dtype, a, b, scale_a, scale_b, bias, out_scale)
    if bias is not None:
        check_tensor(bias, "bias", shape=(len(b),), like=out)
    if out_scale is not None:
        check_factor(out_scale, a, "out_scale")
    if out.numel():
        mx_matmul_out(as_rows(a), b, bits_of(as_rows(scale_a)), bits_of(scale_b), bias, out_scale, of.name, as_rows(out))
    return out
