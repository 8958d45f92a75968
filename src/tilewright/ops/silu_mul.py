"""Gated activation: out = silu(gate) * up, or with gelu_tanh: out = gelu(gate) * up

    silu(g) = g * sigmoid(g)        gelu(g) = g * sigmoid(2 * sqrt(2 / pi) * (g + 0.044715 * g**3))

Source    Shazeer 2020, arXiv:2002.05202, eq. 6 (SwiGLU, GEGLU). The tanh form of GELU: Hendrycks
          and Gimpel 2016, arXiv:1606.08415, with 0.5 * (1 + tanh(z)) = sigmoid(2 * z).
Numerics  fp32 from load to store, rounded once.
Bound     Memory: gate and up read once, out written once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cuda.tile as ct
import torch
import torch.nn.functional as F
from cuda.tile import cdiv
from torch import Tensor

from ..launch import Cost, Decision, Device, Launch, argument_error, as_rows, check_tensor, hints, next_pow2, torch_op
from ..select import Choices, Ordered, Work, ordered
from .common.pdl import pdl_overlap, use_pdl
from .common.rows import CPU_TILE, TILE_TIE, grid_fits, stream
from .common.tiles import each_tile, gated, load_tile, of_width

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ZERO = ct.PaddingMode.ZERO


def reference(gate: Tensor, up: Tensor | None = None, *, gelu_tanh: bool = False) -> Tensor:
    """The definition."""
    if up is None:
        gate, up = gate.chunk(2, -1)
    return (F.gelu(gate, approximate="tanh") if gelu_tanh else F.silu(gate)) * up


@dataclass(frozen=True, slots=True)
class Problem:
    rows: int
    cols: int
    dtype: torch.dtype
    fused: bool = False
    gelu_tanh: bool = False

    def cost(self) -> Cost:
        n = self.rows * self.cols
        return Cost(size_bytes=3 * n * self.dtype.itemsize, flops=5 * n)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        def randn(cols: int) -> Tensor:
            return 2 * torch.randn(self.rows, cols, dtype=self.dtype, device=device)

        halves = {"gate": randn(2 * self.cols)} if self.fused else {"gate": randn(self.cols), "up": randn(self.cols)}
        return {**halves, "gelu_tanh": self.gelu_tanh}


@dataclass(frozen=True, slots=True)
class Config:
    """How the elements are tiled.

    tile_m, tile_n: rows and columns of a tile; powers of two.
    persistent: a block takes many tiles; otherwise it has one.
    latency: prefetch hint of the loads, 1 to 10.
    load_tma, store_tma: allow the TMA unit.
    occupancy: resident blocks per SM.
    num_worker_warps: warps that compute, 4 or 8.
    """

    tile_m: int
    tile_n: int
    persistent: bool = False
    latency: int = 4
    load_tma: bool = False
    store_tma: bool = False
    occupancy: int | None = None
    num_worker_warps: int | None = None


# (loads of 16 bytes of a thread, warps, occupancy and latency of persistent blocks), best first on
# an H200
TILES = ((1, 4), (2, 4), (1, 8), (2, 8), (4, 8), (4, 4), (2, 4, 8, 2), (2, 8, 4, 2), (2, 8, 2, 4))


def candidates(p: Problem, device: Device) -> Iterator[Config]:
    if device.is_cpu:
        tile_n = min(next_pow2(p.cols), CPU_TILE)
        tile_m = max(1, min(next_pow2(p.rows), CPU_TILE // tile_n))
        yield Config(tile_m, tile_n)
        yield Config(max(1, tile_m // 4), max(1, tile_n // 4), persistent=True, occupancy=1)
        return
    for loads, warps, *persistent in TILES:
        size = loads * 32 * warps * 16 // p.dtype.itemsize
        for tile_n in _column_tiles(p.cols, size):
            tile_m = min(size // tile_n, next_pow2(p.rows))
            if persistent:
                occupancy, latency = persistent
                yield Config(tile_m, tile_n, True, latency, occupancy=occupancy, num_worker_warps=warps)
            else:
                yield Config(tile_m, tile_n, num_worker_warps=warps)


def _column_tiles(cols: int, most: int) -> list[int]:
    """Widths of a tile: the widest that divides cols, if rows of it make whole cache lines; and the
    widest that pads little.
    """
    divisor = min(cols & -cols, most)
    wide = min(next_pow2(cols), most)
    while cdiv(cols, wide) * wide > cols * 9 / 8 and wide > 256:
        wide //= 2
    return [divisor, wide] if divisor >= 128 and divisor != wide else [wide]


def _tiles(p: Problem, c: Config) -> int:
    return cdiv(p.rows, c.tile_m) * cdiv(p.cols, c.tile_n)


def legal(p: Problem, c: Config, device: Device) -> bool:
    """Persistent blocks have two tiles at least; others fit a grid."""
    return device.is_cpu or (_tiles(p, c) > device.sms * (c.occupancy or 1) if c.persistent else grid_fits(_tiles(p, c)))


def work(p: Problem, c: Config, device: Device) -> Work:
    """Tiles of gate and up, the padding of the last ones, and the checks of those."""
    elements, threads = c.tile_m * c.tile_n, 32 * (c.num_worker_warps or 4)
    registers = 24 + 2 * elements / threads * p.dtype.itemsize / 4 + elements / threads
    aligned = (1 + p.fused) * p.cols * p.dtype.itemsize
    load, checked = 2 * p.dtype.itemsize, p.cols % c.tile_n > 0
    return stream(device, _tiles(p, c), elements, p.cost().size_bytes, c, registers=registers, aligned=aligned, load=load, checked=checked)


CHOICES = Choices("silu_mul", candidates, legal, work, tie=TILE_TIE)


def space(p: Problem, device: Device) -> Ordered[Config]:
    """The configs worth timing, the untuned default first."""
    return ordered(CHOICES, p, device)


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """Grid and compile-time constants of one launch."""
    tiles = _tiles(p, c)
    blocks = min(tiles, device.sms * (c.occupancy or 1)) if c.persistent else tiles
    constants = {
        "gelu": p.gelu_tanh,
        "persistent": c.persistent,
        "cols": p.cols,
        "tile_m": c.tile_m,
        "tile_n": c.tile_n,
        "latency": c.latency,
        "load_tma": c.load_tma,
        "store_tma": c.store_tma,
    }
    return (Launch(silu_mul_kernel, (blocks,), constants, **hints(c), pdl=use_pdl(p.rows, c.persistent)),)


@ct.kernel
def silu_mul_kernel(
    GATE,
    UP,
    OUT,
    GELU: ct.Constant[bool],
    PERSISTENT: ct.Constant[bool],
    COLS: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    LATENCY: ct.Constant[int],
    LOAD_TMA: ct.Constant[bool],
    STORE_TMA: ct.Constant[bool],
):
    """Tiles in row-major order. GATE, UP, OUT: [rows, COLS]."""
    pdl_overlap(PERSISTENT)
    shape = (TILE_M, TILE_N)
    GATE, UP, OUT = of_width(GATE, COLS), of_width(UP, COLS), of_width(OUT, COLS)

    def compute(i, j, whole):
        gate = load_tile(GATE, (i, j), shape, ZERO, whole, LATENCY, LOAD_TMA)
        up = load_tile(UP, (i, j), shape, ZERO, whole, LATENCY, LOAD_TMA)
        ct.store(OUT, (i, j), gated(gate, up, GELU).astype(OUT.dtype), check_bounds=not whole, allow_tma=STORE_TMA)

    each_tile(compute, OUT, COLS, PERSISTENT, TILE_M, TILE_N, False)


DECISION = Decision("silu_mul", problem=Problem, arguments=("gate", "up", "out"), space=space, plan=plan)


@torch_op(mutates=("out",))
def silu_mul_out(gate: Tensor, up: Tensor, out: Tensor, gelu_tanh: bool) -> None:
    """`silu_mul` into `out`, all [rows, cols]. No checks, no sync: safe under graph capture."""
    rows, cols = out.shape
    fused = gate.stride(0) == 2 * cols
    DECISION.launches(Device.of(gate), rows=rows, cols=cols, dtype=out.dtype, fused=fused, gelu_tanh=gelu_tanh).run(gate, up, out)


def silu_mul(gate: Tensor, up: Tensor | None = None, *, gelu_tanh: bool = False) -> Tensor:
    """The activation of gate, times up: the middle of a SwiGLU or GEGLU layer.

    Args:
        gate: [..., cols], or [..., 2 * cols] holding (gate, up) when `up` is not given; bf16, fp16
            or fp32; stride 1 in the last axis. Copied if its leading axes do not fold into one, as
            is `up`.
        up: [..., cols], shape, dtype and device of gate; may be a view of the same tensor.
        gelu_tanh: GELU in its tanh form instead of SiLU.
    Returns: [..., cols], contiguous. Empty for an empty gate, with nothing launched.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_tensor(gate, "gate", dtypes=DTYPES)
    if gate.dim() == 0:
        raise argument_error("gate.dim()", "at least 1", 0)
    shape = tuple(gate.shape)
    if up is not None:
        check_tensor(up, "up", shape=shape, like=gate)
    elif shape[-1] % 2:
        raise argument_error("gate.shape[-1]", "even where up is not given", shape[-1])
    else:
        shape = (*shape[:-1], shape[-1] // 2)
    out = torch.empty(shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        gate = as_rows(gate)
        gate, up = gate.chunk(2, -1) if up is None else (gate, as_rows(up))
        silu_mul_out(gate, up, as_rows(out), gelu_tanh)
    return out
