"""Gated activation: out = silu(gate) * up, or with gelu_tanh: out = gelu(gate) * up

    silu(g) = g * sigmoid(g)        gelu(g) = g * sigmoid(2 * sqrt(2 / pi) * (g + 0.044715 * g**3))

Source    Shazeer 2020, arXiv:2002.05202, eq. 6 (SwiGLU, GEGLU). The tanh form of GELU: Hendrycks and Gimpel 2016, arXiv:1606.08415,
          with 0.5 * (1 + tanh(z)) = sigmoid(2 * z).
Numerics  fp32 from load to store, rounded once.
Bound     Memory: gate and up read once, out written once.
"""

from dataclasses import dataclass
from typing import Any

import cuda.tile as ct
import torch
import torch.nn.functional as F
from cuda.tile import cdiv
from torch import Tensor

from ..launch import Cost, Device, Plan, as_rows, best_plan, check_tensor, launch, must, next_pow2, torch_op
from .early import early, overlap_previous
from .tiles import each_tile, gated, load_tile, of_width

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
    """How the elements are walked.

    tile_m, tile_n: rows and columns of a tile; powers of two.
    persistent: a block walks over many tiles; otherwise it has one.
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


def space(p: Problem, device: Device) -> list[Config]:
    """Every config worth timing, the untuned default first."""
    if device.is_cpu:
        tile_n = next_pow2(p.cols)
        tile_m = max(1, min(next_pow2(p.rows), (1 << 20) // tile_n))
        return [Config(tile_m, tile_n), Config(max(1, tile_m // 4), max(1, tile_n // 4), persistent=True, occupancy=1)]
    vector = 16 // p.dtype.itemsize  # elements of the widest load
    if p.rows * p.cols < device.sms * 512 * vector:  # no SM would get four warps' worth: as many small tiles as there are
        sizes = [(1, 4), (1, 8), (2, 4)]
    else:
        sizes = [(2, 4), (1, 4), (2, 8), (1, 8), (4, 8)]
    configs = []
    for loads, warps in sizes:
        size = loads * 32 * warps * vector
        for tile_n in _column_tiles(p.cols, size):
            configs.append(Config(min(size // tile_n, next_pow2(p.rows)), tile_n, num_worker_warps=warps))
    for occupancy, latency, warps in ((8, 2, 4), (4, 2, 8), (2, 4, 8)):
        size = 2 * 32 * warps * vector
        tile_n = _column_tiles(p.cols, size)[0]
        tile_m = size // tile_n
        if cdiv(p.rows, tile_m) * cdiv(p.cols, tile_n) > device.sms * occupancy:
            configs.append(Config(tile_m, tile_n, True, latency, occupancy=occupancy, num_worker_warps=warps))
    return list(dict.fromkeys(configs))


def _column_tiles(cols: int, most: int) -> list[int]:
    """Widths of a tile: the widest that divides cols, if rows of it make whole cache lines; and the widest that pads little."""
    divisor = min(cols & -cols, most)
    wide = min(next_pow2(cols), most)
    while cdiv(cols, wide) * wide > cols * 9 / 8 and wide > 256:
        wide //= 2
    return [divisor, wide] if divisor >= 128 and divisor != wide else [wide]


def plan(p: Problem, c: Config, device: Device) -> Plan:
    """Grid and compile-time constants of one launch."""
    tiles = cdiv(p.rows, c.tile_m) * cdiv(p.cols, c.tile_n)
    blocks = min(tiles, device.sms * (c.occupancy or 1)) if c.persistent else tiles
    constants = (p.gelu_tanh, c.persistent, p.cols, c.tile_m, c.tile_n, c.latency, c.load_tma, c.store_tma)
    return Plan(silu_mul_kernel, (blocks,), constants, occupancy=c.occupancy, num_worker_warps=c.num_worker_warps, early=early(p.rows, c.persistent))


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
    overlap_previous(PERSISTENT)
    shape = (TILE_M, TILE_N)
    GATE, UP, OUT = of_width(GATE, COLS), of_width(UP, COLS), of_width(OUT, COLS)

    def compute(i, j, whole):
        gate = load_tile(GATE, (i, j), shape, ZERO, whole, LATENCY, LOAD_TMA)
        up = load_tile(UP, (i, j), shape, ZERO, whole, LATENCY, LOAD_TMA)
        ct.store(OUT, (i, j), gated(gate, up, GELU).astype(OUT.dtype), check_bounds=not whole, allow_tma=STORE_TMA)

    each_tile(compute, OUT, COLS, PERSISTENT, TILE_M, TILE_N, False)


@torch_op(mutates=("out",))
def silu_mul_out(gate: Tensor, up: Tensor, out: Tensor, gelu_tanh: bool) -> None:
    """`silu_mul` into `out`, all [rows, cols]. No checks, no sync: safe under graph capture."""
    rows, cols = out.shape
    fused = gate.stride(0) == 2 * cols
    launch(best_plan(space, plan, Device.of(out), Problem, rows, cols, out.dtype, fused, gelu_tanh), gate, up, out)


def silu_mul(gate: Tensor, up: Tensor | None = None, *, gelu_tanh: bool = False) -> Tensor:
    """The activation of gate, times up: the middle of a SwiGLU or GEGLU layer.

    Args:
        gate: [..., cols], or [..., 2 * cols] holding (gate, up) when `up` is not given; bf16, fp16 or fp32; stride 1 in the last axis.
            Copied if its leading axes do not fold into one, as is `up`.
        up: [..., cols], shape, dtype and device of gate; may be a view of the same tensor.
        gelu_tanh: GELU in its tanh form instead of SiLU.
    Returns: [..., cols], contiguous. Empty for an empty gate, with nothing launched.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_tensor(gate, "gate", dtypes=DTYPES)
    if gate.dim() == 0:
        raise must("gate.dim()", "at least 1", 0)
    shape = tuple(gate.shape)
    if up is not None:
        check_tensor(up, "up", shape=shape, like=gate)
    elif shape[-1] % 2:
        raise must("gate.shape[-1]", "even where up is not given", shape[-1])
    else:
        shape = (*shape[:-1], shape[-1] // 2)
    out = torch.empty(shape, dtype=gate.dtype, device=gate.device)
    if out.numel():
        gate = as_rows(gate)
        gate, up = gate.chunk(2, -1) if up is None else (gate, as_rows(up))
        silu_mul_out(gate, up, as_rows(out), gelu_tanh)
    return out
