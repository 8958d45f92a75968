"""Argmax: out[i] = the first j with x[i, j] = max(x[i])

A row of a vocabulary is cut into ranges, so that one row fills the GPU; a second kernel merges what the ranges found.

Source    torch.argmax, whose rules for ties (the first) and NaN (the largest) hold.
Numerics  Exact.
Bound     Memory: x read once.
"""

import math
from dataclasses import dataclass
from typing import Any

import cuda.tile as ct
import torch
from torch import Tensor

from ..launch import Cost, Device, Plan, as_rows, best_plan, check_tensor, launch, must, next_pow2, torch_op
from .early import overlap_previous
from .first_best import NOWHERE, empty_best, first_best, take_better
from .tiles import load_tile, of_width

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NEG_INF = ct.PaddingMode.NEG_INF
MOST_SPLITS = 1024  # the merge holds one of each in registers


def reference(x: Tensor) -> Tensor:
    """The definition."""
    return x.argmax(-1)


def comparable(result: Tensor, x: Tensor) -> Tensor:
    """The elements at the indices: indices themselves have no distance."""
    return x.gather(-1, result[..., None])[..., 0]


@dataclass(frozen=True, slots=True)
class Problem:
    rows: int
    cols: int
    dtype: torch.dtype

    def cost(self) -> Cost:
        return Cost(size_bytes=self.rows * (self.cols * self.dtype.itemsize + 8), flops=self.rows * self.cols)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        return {"x": torch.randn(self.rows, self.cols, dtype=self.dtype, device=device)}


@dataclass(frozen=True, slots=True)
class Config:
    """How the rows are walked.

    tile_m, tile_n: rows and columns of a tile; powers of two.
    loads: tiles loaded before the first is looked at.
    splits: blocks that share a tile of rows; 1 needs no merge and no workspace.
    latency: prefetch hint of the loads, 1 to 10.
    num_worker_warps: warps that compute, 4 or 8.
    """

    tile_m: int
    tile_n: int
    loads: int = 1
    splits: int = 1
    latency: int = 4
    num_worker_warps: int | None = None


def space(p: Problem, device: Device) -> list[Config]:
    """Every config worth timing, the untuned default first."""
    whole = next_pow2(p.cols)
    if device.is_cpu:
        tile_m = max(1, min(next_pow2(p.rows), (1 << 20) // whole))
        return list(dict.fromkeys((Config(tile_m, whole), Config(max(1, tile_m // 4), max(1, whole // 8), 2, splits=2))))
    vector = 16 // p.dtype.itemsize  # elements of the widest load
    configs = []
    for warps, most_loads in ((4, 4), (4, 2), (4, 1), (8, 4), (8, 2), (8, 1), (4, 8)):
        size = warps * 32 * vector
        tile_n = min(whole, size)
        tile_m = min(size // tile_n, next_pow2(p.rows))
        steps, row_tiles = ct.cdiv(p.cols, tile_n), ct.cdiv(p.rows, tile_m)
        wanted = ct.cdiv(device.sms * 32, row_tiles * warps)  # splits for which as many blocks exist as run at once
        loads = max(1, min(most_loads, next_pow2(steps)))
        while loads > 1 and ct.cdiv(steps, loads) < wanted:
            loads //= 2  # rather more blocks
        groups = ct.cdiv(steps, loads)
        if groups <= MOST_SPLITS and (groups == 1 or groups <= 16 * wanted):
            configs.append(Config(tile_m, tile_n, loads, groups, num_worker_warps=warps))  # no block has a loop
        if wanted < groups:
            # The compiler unrolls the loop by the latency: one load a turn, and a low hint, or it spills (sm_90, sm_121).
            configs.append(Config(tile_m, tile_n, 1, min(wanted, steps, MOST_SPLITS), latency=1, num_worker_warps=warps))
    return list(dict.fromkeys(configs))


def plan(p: Problem, c: Config, device: Device) -> Plan:
    """Grid and compile-time constants of the launch over ranges, and of the merge."""
    grid = (c.splits, ct.cdiv(p.rows, c.tile_m)) if c.splits > 1 else (ct.cdiv(p.rows, c.tile_m),)
    constants = (c.splits, p.cols, c.tile_m, c.tile_n, c.loads, c.latency)
    if c.splits == 1:
        return Plan(argmax_kernel, grid, constants, num_worker_warps=c.num_worker_warps, early=True)
    merge = Plan(argmax_merge_kernel, (p.rows,), (c.splits, next_pow2(c.splits)), early=True)
    workspace = (((2, p.rows, c.splits), torch.int32),)
    return Plan(argmax_kernel, grid, constants, None, None, c.num_worker_warps, workspace, merge, early=True)


@ct.kernel
def argmax_kernel(
    X,
    OUT,
    SPLITS: ct.Constant[int],
    COLS: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    LOADS: ct.Constant[int],
    LATENCY: ct.Constant[int],
):
    """One tile of rows, every SPLITS-th group of LOADS tiles. Grid (row tiles), with SPLITS > 1 (SPLITS, row tiles).

    X: [rows, COLS]. OUT: [rows] int64; with SPLITS > 1 int32 [2, rows, SPLITS]: the bits of the largest element, and its column.
    """
    overlap_previous()
    shape = (TILE_M, TILE_N)
    steps = ct.cdiv(COLS, TILE_N)
    X = of_width(X, COLS)
    split, i = (ct.bid(0), ct.bid(1)) if SPLITS > 1 else (0, ct.bid(0))
    lane = ct.arange(TILE_N, dtype=ct.int32).reshape((1, TILE_N))

    def search(whole):
        def take_group(best, when, group):
            xs: tuple = ()
            for n in ct.static_iter(range(LOADS)):
                # Past the last tile the last one once more: it changes nothing.
                xs = (*xs, load_tile(X, (i, min(group * LOADS + n, steps - 1)), shape, NEG_INF, whole, LATENCY, False))
            for n in ct.static_iter(range(LOADS)):
                best, when = take_better(best, when, xs[n].astype(ct.float32), min(group * LOADS + n, steps - 1))
            return best, when

        best, when = empty_best(shape)
        if SPLITS * LOADS >= steps:
            best, when = take_group(best, when, split)
        else:
            for group in range(split, ct.cdiv(steps, LOADS), SPLITS):
                best, when = take_group(best, when, group)
        top, column = first_best(best, when * TILE_N + lane)
        if SPLITS == 1:
            ct.store(OUT, (i,), column.reshape((TILE_M,)).astype(ct.int64), allow_tma=False)  # TMA takes 255 registers
        else:
            ct.store(OUT, (0, i, split), ct.bitcast(top, ct.int32).reshape((1, TILE_M, 1)), allow_tma=False)
            ct.store(OUT, (1, i, split), column.reshape((1, TILE_M, 1)), allow_tma=False)

    if COLS % TILE_N != 0:
        search(False)
    elif TILE_M == 1:
        search(True)
    elif i * TILE_M + TILE_M <= X.shape[0]:
        search(True)
    else:
        search(False)


@ct.kernel
def argmax_merge_kernel(PARTIAL, OUT, SPLITS: ct.Constant[int], TILE_S: ct.Constant[int]):
    """One row: the best of its ranges. PARTIAL: [2, rows, SPLITS] of argmax_kernel; OUT: [rows] int64."""
    overlap_previous()
    i = ct.bid(0)
    PARTIAL = PARTIAL.slice(2, 0, SPLITS)
    both = ct.load(PARTIAL, (0, i, 0), (2, 1, TILE_S), padding_mode=ct.PaddingMode.ZERO, allow_tma=False)
    inside = ct.arange(TILE_S, dtype=ct.int32).reshape((1, TILE_S)) < SPLITS
    best = ct.where(inside, ct.bitcast(ct.extract(both, (0, 0, 0), (1, 1, TILE_S)).reshape((1, TILE_S)), ct.float32), -math.inf)
    where = ct.where(inside, ct.extract(both, (1, 0, 0), (1, 1, TILE_S)).reshape((1, TILE_S)), NOWHERE)
    _, column = first_best(best, where)
    ct.store(OUT, (i,), column.reshape((1,)).astype(ct.int64), allow_tma=False)


@torch_op(mutates=("out",))
def argmax_out(x: Tensor, out: Tensor) -> None:
    """`argmax` of x [rows, cols] into `out` [rows]. No checks, no sync: safe under graph capture."""
    rows, cols = x.shape
    chosen = best_plan(space, plan, Device.of(x), Problem, rows, cols, x.dtype)
    if chosen.then is None:
        launch(chosen, x, out)
    else:
        (partial,) = chosen.scratch(x.device)
        launch(chosen, x, partial)
        launch(chosen.then, partial, out)


def argmax(x: Tensor) -> Tensor:
    """The index of the largest element along the last axis: the first of equals; NaN counts as the largest.

    Args:
        x: [..., cols], cols at least 1; bf16, fp16 or fp32; stride 1 in the last axis. Copied if its leading axes do not fold into one.
    Returns: [...] int64. Empty if a leading axis is, with nothing launched.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_tensor(x, "x", dtypes=DTYPES)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise must("x.shape", "[..., cols] with cols at least 1", tuple(x.shape))
    out = torch.empty(x.shape[:-1], dtype=torch.int64, device=x.device)
    if out.numel():
        argmax_out(as_rows(x), out.view(-1))
    return out
