"""Argmax: out[i] = the first j with x[i, j] = max(x[i])

A row of a vocabulary is cut into ranges, so that one row fills the GPU; a second kernel merges what
the ranges found.

Source    torch.argmax, whose rules for ties (the first) and NaN (the largest) hold.
Numerics  Exact.
Bound     Memory: x read once.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cuda.tile as ct
import torch
from torch import Tensor

from ..launch import FLOATS, Cost, Device, Launch, argument_error, as_rows, check_tensor, next_pow2, out_or_new, torch_op
from ..select import Choices, Work
from .common.first_best import NOWHERE, empty_best, first_best, take_better
from .common.pdl import pdl_overlap
from .common.rows import CPU_TILE, OWN_REGISTERS, WAIT_TIE, grid_fits, least_tile, stream, threads
from .common.tiles import load_masked, of_width

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
    """How the rows are tiled.

    tile_m, tile_n: rows and columns of a tile; powers of two.
    loads: tiles loaded before the first is looked at.
    num_splits: blocks that share a tile of rows; 1 needs no merge and no scratch memory.
    latency: prefetch hint of the loads, 1 to 10.
    num_worker_warps: warps that compute, 4 or 8.
    """

    tile_m: int
    tile_n: int
    loads: int = 1
    num_splits: int = 1
    latency: int = 4
    num_worker_warps: int | None = None


LOADS = {4: (8, 4, 2, 1), 8: (4, 2, 1)}  # of a block, by its warps


def candidates(p: Problem, device: Device) -> Iterator[Config]:
    """Blocks without a loop, with as many loads as leave blocks to fill the device; then with one,
    which unrolls by the latency.
    """

    def tile(most: int) -> tuple[int, int]:
        """Of so many elements."""
        tile_n = min(next_pow2(p.cols), most)
        return max(min(most // tile_n, next_pow2(p.rows)), least_tile(p.rows)), tile_n

    if device.is_cpu:
        tile_m, tile_n = tile(CPU_TILE)
        yield from (Config(tile_m, tile_n), Config(max(1, tile_m // 4), max(1, tile_n // 8), 2, num_splits=2))
        return
    vector = 16 // p.dtype.itemsize
    few = p.rows * p.cols < device.sms * 32 * 32 * vector  # tiles of 4 warps for half of the device
    for warps in (8, 4) if few else (4, 8):
        tile_m, tile_n = tile(warps * 32 * vector)
        steps = ct.cdiv(p.cols, tile_n)
        # splits that fill half of the device
        fills = device.sms * 32 / warps / ct.cdiv(p.rows, tile_m)
        filling = [n for n in LOADS[warps] if n == 1 or ct.cdiv(steps, n) >= fills]
        yield from (Config(tile_m, tile_n, n, ct.cdiv(steps, n), num_worker_warps=warps) for n in filling[:2])
        yield Config(tile_m, tile_n, 1, min(next_pow2(int(fills)), steps), latency=1, num_worker_warps=warps)


def legal(p: Problem, c: Config, device: Device) -> bool:
    """Each split has a group of loads, and the merge holds one of each split in registers."""
    row_tiles = ct.cdiv(p.rows, c.tile_m)
    if c.num_splits > ct.cdiv(ct.cdiv(p.cols, c.tile_n), c.loads):
        return False
    if c.num_splits == 1:
        return grid_fits(row_tiles)
    return c.num_splits <= MOST_SPLITS and grid_fits(c.num_splits, row_tiles) and grid_fits(p.rows)


def work(p: Problem, c: Config, device: Device) -> Work:
    """Groups of loads of a block, which wait for each other, and the merge."""
    elements, size = c.tile_m * c.tile_n, p.dtype.itemsize
    groups = ct.cdiv(p.cols, c.tile_n * c.loads * c.num_splits)
    return stream(
        p,
        c,
        device,
        ct.cdiv(p.rows, c.tile_m) * c.num_splits,
        elements * c.loads * groups,
        registers=OWN_REGISTERS + elements / threads(c) * (2 + c.loads * size / 4),
        aligned=p.cols * size,
        operations=OPERATIONS,
        chain=groups + bool(p.cols % c.tile_n) / 2,
        partial=16 * p.rows * c.num_splits if c.num_splits > 1 else 0,
    )


def family(p: Problem, c: Config) -> str:
    return f"{c.num_worker_warps} {c.loads} {c.latency} {c.num_splits > 1}"


OPERATIONS = 3  # on an element
CHOICES = Choices("argmax", candidates, legal, work, family, tie=WAIT_TIE)
space = CHOICES.space


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """The launch over ranges of columns, and the merge of what they found."""
    row_tiles = ct.cdiv(p.rows, c.tile_m)
    splits = {"splits": c.num_splits}
    if c.num_splits == 1:
        return (Launch.of(argmax_kernel, (row_tiles,), p, c, splits, pdl=True),)
    partial = {"partial": ((2, p.rows, c.num_splits), torch.int32)}
    ranges = Launch.of(argmax_kernel, (c.num_splits, row_tiles), p, c, splits, pdl=True, scratch=partial, renames={"out": "partial"})
    return ranges, Launch(argmax_merge_kernel, (p.rows,), {**splits, "tile_s": next_pow2(c.num_splits)}, pdl=True)


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
    """One tile of rows, every SPLITS-th group of LOADS tiles. Grid (row tiles), with SPLITS > 1
    (SPLITS, row tiles).

    X: [rows, COLS]. OUT: [rows] int64; with SPLITS > 1 int32 [2, rows, SPLITS]: the bits of the
        largest element, and its column.
    """
    pdl_overlap()
    shape = (TILE_M, TILE_N)
    steps = ct.cdiv(COLS, TILE_N)
    X = of_width(X, COLS)
    split, i = (ct.bid(0), ct.bid(1)) if SPLITS > 1 else (0, ct.bid(0))
    lane = ct.arange(TILE_N, dtype=ct.int32).reshape((1, TILE_N))

    def search(whole):
        FULL = COLS // TILE_N if whole else 0  # tiles that lie inside

        def take_group(best, when, group, INSIDE):
            xs: tuple = ()
            for n in ct.static_iter(range(min(LOADS, steps))):
                # Past the last tile, the last one again, which changes nothing.
                at = (i, min(group * LOADS + n, steps - 1))
                xs = (*xs, load_masked(X, at, shape, NEG_INF, n < INSIDE, LATENCY, False))
            for n in ct.static_iter(range(min(LOADS, steps))):
                best, when = take_better(best, when, xs[n].astype(ct.float32), min(group * LOADS + n, steps - 1))
            return best, when

        best, when = empty_best(shape)
        groups, all_groups = FULL // LOADS, ct.cdiv(steps, LOADS)
        if SPLITS < all_groups:
            for group in range(split, groups, SPLITS):
                best, when = take_group(best, when, group, LOADS)
            for group in range(groups + (split + SPLITS - groups % SPLITS) % SPLITS, all_groups, SPLITS):
                best, when = take_group(best, when, group, FULL - groups * LOADS)
        elif groups == all_groups:
            best, when = take_group(best, when, split, LOADS)
        elif split < groups:
            best, when = take_group(best, when, split, LOADS)
        else:
            best, when = take_group(best, when, split, FULL - groups * LOADS)
        top, column = first_best(best, when * TILE_N + lane)
        if SPLITS == 1:
            # TMA takes 255 registers
            ct.store(OUT, (i,), column.reshape((TILE_M,)).astype(ct.int64), allow_tma=False)
        else:
            ct.store(OUT, (0, i, split), ct.bitcast(top, ct.int32).reshape((1, TILE_M, 1)), allow_tma=False)
            ct.store(OUT, (1, i, split), column.reshape((1, TILE_M, 1)), allow_tma=False)

    if TILE_M == 1:
        search(True)
    elif i * TILE_M + TILE_M <= X.shape[0]:
        search(True)
    else:
        search(False)


@ct.kernel
def argmax_merge_kernel(PARTIAL, OUT, SPLITS: ct.Constant[int], TILE_S: ct.Constant[int]):
    """One row: the best of its ranges. PARTIAL: [2, rows, SPLITS] of argmax_kernel; OUT: [rows]
    int64.
    """
    pdl_overlap()
    i = ct.bid(0)
    split = ct.arange(TILE_S, dtype=ct.int32).reshape((1, TILE_S))
    inside = split < SPLITS

    def of(which, padding):  # gathered: the loads do not wait for one another
        return ct.gather(PARTIAL, (which, i, split), mask=inside, padding_value=padding, check_bounds=False)

    best, where = ct.where(inside, ct.bitcast(of(0, 0), ct.float32), -math.inf), of(1, NOWHERE)
    _, column = first_best(best, where)
    ct.store(OUT, (i,), column.reshape((1,)).astype(ct.int64), allow_tma=False)


DECISION = CHOICES.decision(Problem, plan, ("x", "out"))


@torch_op(mutates=("out",))
def argmax_out(x: Tensor, out: Tensor) -> None:
    """`argmax` of x [rows, cols] into `out` [rows]. No checks, no sync: graph-safe."""
    rows, cols = x.shape
    DECISION.launches(Device.of(x), rows=rows, cols=cols, dtype=x.dtype).run(x, out)


def argmax(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The index of the largest element along the last axis. Of equal elements the first wins; NaN
    counts as the largest.

    Args:
        x: [..., cols], cols at least 1; bf16, fp16 or fp32; stride 1 in the last axis. Copied if
            its leading axes do not fold into one.
        out: where the result goes: contiguous, shape, dtype and device of the result, no element in
            common with an input; default a new tensor.
    Returns: [...] int64. Empty if a leading axis is, with nothing launched.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_tensor(x, "x", dtypes=FLOATS)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise argument_error("x.shape", "[..., cols] with cols at least 1", tuple(x.shape))
    out = out_or_new(out, x.shape[:-1], torch.int64, x)
    if out.numel():
        argmax_out(as_rows(x), out.view(-1))
    return out
