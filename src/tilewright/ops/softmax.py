"""Softmax over the last axis: out = exp(x - max(x)) / sum(exp(x - max(x)))

Source    For rows too wide for registers the maximum and the sum in one pass: Milakov and
          Gimelshein 2018, arXiv:1805.02867, algorithm 3. Few wide rows fill the GPU if each is cut
          into tiles, whose maxima and sums meet in a second launch.
Numerics  fp32 from load to store, rounded once; exp as 2**(log2(e) * t).
          As in PyTorch: -inf gives 0, and a row of nothing but -inf, or with a NaN or +inf in it,
          gives NaN.
Bound     Memory: x read once, out written once.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

import cuda.tile as ct
import torch
from torch import Tensor

from ..launch import FLOATS, Cost, Device, Launch, argument_error, as_rows, check_tensor, next_pow2, out_or_new, torch_op
from ..select import Choices, Work
from .common import rows
from .common.pdl import pdl_behind, pdl_overlap
from .common.rows import MOST_CLUSTER, OPERATIONS, WIDE, grid_fits, stream, vector
from .common.tiles import LOG2E, Rows, each_row_tile, load_masked, of_width

NEG_INF = ct.PaddingMode.NEG_INF  # padded columns are exp(-inf) = 0
ZERO = ct.PaddingMode.ZERO  # where only rows can be padded; the TMA unit pads with nothing else


def reference(x: Tensor) -> Tensor:
    """The definition."""
    return torch.softmax(x, -1)


@dataclass(frozen=True, slots=True)
class Problem:
    rows: int
    cols: int
    dtype: torch.dtype

    def cost(self) -> Cost:
        n = self.rows * self.cols
        return Cost(size_bytes=2 * n * self.dtype.itemsize, flops=4 * n)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        return {"x": 3 * torch.randn(self.rows, self.cols, dtype=self.dtype, device=device)}


@dataclass(frozen=True, slots=True)
class Config(rows.Config):
    """How the rows are tiled.

    split: each tile of a row has a block of its own; a second launch scales them.
    """

    split: bool = False


MOST_TILES = 1024  # of a row that is split; each block of the second launch reads what all have found
SPLIT_TILE = 4096  # columns
_fields = attrgetter(*(field.name for field in fields(rows.Config)))


def candidates(p: Problem, device: Device) -> Iterator[Config]:
    """Rows in blocks; wide ones also, or only, in tiles."""
    whole = (Config(*_fields(c)) for c in rows.candidates(p, device))
    if device.is_cpu:
        yield from whole
        yield Config(1, max(1, next_pow2(p.cols) // 4), keep_row=False, split=True)
        return
    split = Config(1, SPLIT_TILE, keep_row=False, num_worker_warps=8, split=True)
    few = p.cols > WIDE and p.rows <= device.sms // MOST_CLUSTER  # clusters would leave SMs idle
    # Of more rows only those that need the largest clusters. From memory they are read twice, which
    # pays for operands of 2 bytes (H200, 124 x 256000: 55 us in place of 73) but not for fp32
    # (1024 x 151936: 445 in place of 378).
    held = p.rows * p.cols * p.dtype.itemsize <= device.l2_bytes
    many = p.cols > 4 * WIDE and (held or p.dtype.itemsize == 2)
    if few or many:
        yield split
    if not (few and legal(p, split, device)):
        yield from whole


def legal(p: Problem, c: Config, device: Device) -> bool:
    """Whether a grid has room for the tiles, or as for all rows."""
    if c.split:
        return ct.cdiv(p.cols, c.tile_n) <= MOST_TILES and grid_fits(ct.cdiv(p.cols, c.tile_n), p.rows)
    return rows.legal(p, c, device)


def work(p: Problem, c: Config, device: Device) -> Work:
    """Tiles, which the second launch reads from L2 as far as it holds them; or as all rows."""
    if not c.split:
        return rows.work(p, c, device, chain=1)
    tiles = p.rows * ct.cdiv(p.cols, c.tile_n)
    found = stream(
        p,
        c,
        device,
        tiles,
        c.tile_n,
        held=1.0,
        aligned=p.cols * p.dtype.itemsize,
        load=1 / vector(p),
        masked=p.cols % c.tile_n > 0,
        operations=2 * OPERATIONS,
        reads=1.5,
        chain=1,
        partial=16 * tiles,
    )
    lost = rows.beyond_l2(p.rows * p.cols * p.dtype.itemsize, device)
    return replace(found, dram=found.dram * (1 + lost / 2))


def family(p: Problem, c: Config) -> str:
    return f"{rows.family(p, c)}{' split' * c.split}"


CHOICES = Choices("softmax", candidates, legal, work, family, tie=rows.TIE, like="rms_norm", bucket=rows.coarse)
space = CHOICES.space


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """Grid and compile-time constants of one launch, or of two."""
    if c.split:
        tiles = ct.cdiv(p.cols, c.tile_n)
        found = {name: ((p.rows, tiles), torch.float32) for name in ("top", "total")}
        first = Launch.of(softmax_split_kernel, (tiles, p.rows), p, c, pdl=True, scratch=found)
        pdl = pdl_behind(tiles * p.rows, tiles * p.rows, device)
        return first, Launch.of(softmax_scale_kernel, (tiles, p.rows), p, c, {"width": next_pow2(tiles)}, pdl=pdl)
    kernel = softmax_kernel if c.keep_row else softmax_reread_kernel
    return (Launch.of(kernel, c.blocks(ct.cdiv(p.rows, c.tile_m), device), p, c),)


def _origin(top):
    """What powers are taken from: the maximum, but 0 for nothing but -inf, so that powers are 0,
    not NaN.
    """
    return ct.where(top == -math.inf, 0.0, top)


def _power(x, top):
    return ct.exp2((x - top) * LOG2E, flush_to_zero=True)


@ct.kernel
def softmax_kernel(
    X: Rows,
    OUT: Rows,
    PERSISTENT: ct.Constant[bool],
    COLS: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    LATENCY: ct.Constant[int],
    LOAD_TMA: ct.Constant[bool],
    STORE_TMA: ct.Constant[bool],
):
    """A tile of rows is read once and kept in registers, in chunks of TILE_N columns. X, OUT:
    [rows, COLS].
    """
    shape = (TILE_M, TILE_N)
    X, OUT = of_width(X, COLS), of_width(OUT, COLS)

    def load(i, j, whole):
        return load_masked(X, (i, j), shape, NEG_INF if COLS % TILE_N else ZERO, whole, LATENCY, LOAD_TMA).astype(ct.float32)

    def store(i, j, whole, y):
        ct.store(OUT, (i, j), y.astype(OUT.dtype), check_bounds=not whole, allow_tma=STORE_TMA)

    def normalise(i, whole):
        xs: tuple = ()
        top = ct.full(shape, -math.inf, ct.float32)
        for j in ct.static_iter(range(ct.cdiv(COLS, TILE_N))):
            x = load(i, j, whole)
            top = ct.maximum(top, x)
            xs = (*xs, x)
        top = ct.max(top, axis=1, keepdims=True)
        powers: tuple = ()
        total = ct.zeros(shape, ct.float32)
        for j in ct.static_iter(range(ct.cdiv(COLS, TILE_N))):
            power = _power(xs[j], top)
            total = total + power
            powers = (*powers, power)
        scale = 1.0 / ct.sum(total, axis=1, keepdims=True)
        for j in ct.static_iter(range(ct.cdiv(COLS, TILE_N))):
            store(i, j, whole, powers[j] * scale)

    each_row_tile(normalise, X, COLS, PERSISTENT, TILE_M, TILE_N)


@ct.kernel
def softmax_reread_kernel(
    X: Rows,
    OUT: Rows,
    PERSISTENT: ct.Constant[bool],
    COLS: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    LATENCY: ct.Constant[int],
    LOAD_TMA: ct.Constant[bool],
    STORE_TMA: ct.Constant[bool],
):
    """Rows of any width: one pass for maximum and sum, a second for the result. Arrays and
    constants as in softmax_kernel.
    """
    shape = (TILE_M, TILE_N)
    X, OUT = of_width(X, COLS), of_width(OUT, COLS)

    def load(i, j, whole):
        return load_masked(X, (i, j), shape, NEG_INF if COLS % TILE_N else ZERO, whole, LATENCY, LOAD_TMA).astype(ct.float32)

    def store(i, j, whole, y):
        ct.store(OUT, (i, j), y.astype(OUT.dtype), check_bounds=not whole, allow_tma=STORE_TMA)

    def normalise(i, whole):
        # Maximum and sum per column of the tile: one reduction at the end instead of two for each
        # tile.
        top = ct.full(shape, -math.inf, ct.float32)
        total = ct.zeros(shape, ct.float32)
        for j in range(ct.cdiv(COLS, TILE_N)):
            x = load(i, j, whole)
            new_top = ct.maximum(top, x)
            origin = _origin(new_top)
            total = total * _power(top, origin) + _power(x, origin)
            top = new_top
        row_top, scale = _of_row(top, total)
        for j in range(ct.cdiv(COLS, TILE_N)):
            store(i, j, whole, _power(load(i, j, whole), row_top) * scale)

    each_row_tile(normalise, X, COLS, PERSISTENT, TILE_M, TILE_N)


def _of_row(top, total):
    """The maximum of a row, and the factor of its powers, from maxima of its parts and sums of
    their powers.
    """
    row_top = ct.max(top, axis=1, keepdims=True)
    return row_top, 1.0 / ct.sum(total * _power(top, _origin(row_top)), axis=1, keepdims=True)


def _load_part(X, at, COLS, TILE_N, LATENCY):
    """A tile of one row; -inf behind its end."""
    return load_masked(X, at, (1, TILE_N), NEG_INF, COLS % TILE_N == 0, LATENCY, False).astype(ct.float32)


@ct.kernel
def softmax_split_kernel(X: Rows, TOP, TOTAL, COLS: ct.Constant[int], TILE_N: ct.Constant[int], LATENCY: ct.Constant[int]):
    """The maximum of each tile, and the sum of its powers. Grid (tiles, rows). X: [rows, COLS];
    TOP, TOTAL: [rows, tiles].
    """
    pdl_overlap()
    i, j = ct.bid(1), ct.bid(0)
    x = _load_part(of_width(X, COLS), (i, j), COLS, TILE_N, LATENCY)
    top = ct.max(x, axis=1, keepdims=True)
    ct.store(TOP, (i, j), top, allow_tma=False)
    ct.store(TOTAL, (i, j), ct.sum(_power(x, _origin(top)), axis=1, keepdims=True), allow_tma=False)


@ct.kernel
def softmax_scale_kernel(
    X: Rows,
    TOP,
    TOTAL,
    OUT: Rows,
    COLS: ct.Constant[int],
    TILE_N: ct.Constant[int],
    WIDTH: ct.Constant[int],
    LATENCY: ct.Constant[int],
):
    """The powers of each tile over the sum of its row's. Arrays as in softmax_split_kernel; OUT:
    [rows, COLS]; WIDTH: a power of two, no less than the tiles of a row.

    From the end to the start, because softmax_split_kernel has left the end of X in L2.
    """
    pdl_overlap()
    i, j = ct.num_blocks(1) - 1 - ct.bid(1), ct.num_blocks(0) - 1 - ct.bid(0)
    x = _load_part(of_width(X, COLS), (i, j), COLS, TILE_N, LATENCY)
    top = ct.load(TOP, (i, 0), (1, WIDTH), padding_mode=NEG_INF, allow_tma=False)
    row_top, scale = _of_row(top, ct.load(TOTAL, (i, 0), (1, WIDTH), padding_mode=ZERO, allow_tma=False))
    y = (_power(x, row_top) * scale).astype(OUT.dtype)
    ct.store(of_width(OUT, COLS), (i, j), y, check_bounds=COLS % TILE_N != 0, allow_tma=False)


DECISION = CHOICES.decision(Problem, plan, ("x", "out"))


@torch_op(mutates=("out",))
def softmax_out(x: Tensor, out: Tensor) -> None:
    """`softmax` into `out`, both [rows, cols]. No checks, no sync: safe under graph capture."""
    rows, cols = x.shape
    DECISION.launches(Device.of(x), rows=rows, cols=cols, dtype=x.dtype).run(x, out)


def softmax(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Softmax over the last axis: exponentials, scaled so that they sum to one.

    Args:
        x: [..., cols]; bf16, fp16 or fp32; stride 1 in the last axis. Copied if its leading axes do
            not fold into one.
        out: where the result goes: contiguous, shape, dtype and device of the result, no element in
            common with an input; default a new tensor.
    Returns: a contiguous tensor shaped like x. Empty for an empty x, with nothing launched.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_tensor(x, "x", dtypes=FLOATS)
    if x.dim() == 0:
        raise argument_error("x.dim()", "at least 1", 0)
    out = out_or_new(out, x.shape, x.dtype, x)
    if out.numel():
        softmax_out(as_rows(x), as_rows(out))
    return out
