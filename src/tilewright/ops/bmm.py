"""Batched matrix product: out[i] = a[i] @ b[i], where a or b may be one matrix for all i

Source    The definition; scaled 8-bit operands after DeepSeek-V3 2024, arXiv:2412.19437, section
          3.3 (ops/common/scaling.py says what scales mean).
Numerics  Products and sums in fp32, rounded once. Scales of a tensor or row multiply the sum;
          scales of a group the sum over its 128 values, which starts from zero. Hopper's tensor
          cores sum 8-bit operands with about 14 bits: see `matmul`.
Bound     Compute from a few hundred rows and columns on; below that memory: every operand read
          once, out written once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Optional

import cuda.tile as ct
import torch
from torch import Tensor

from ..launch import HALVES, Cost, Device, Launch, argument_error, check_bools, check_tensor, out_or_new, torch_op
from ..select import Choices, Work
from .common import gemm_choices
from .common.gemm_candidates import may_move, tiles_for, with_moved
from .common.gemm_choices import Gemm, Uneven, begins_all, use_pdl
from .common.pdl import pdl_overlap
from .common.scaling import (
    BLOCK,
    FP8,
    GROUP,
    ROW,
    TENSOR,
    Scaling,
    add_product,
    add_scaled,
    block_scales,
    dequantize,
    fast_sum,
    group_scales,
    known_scaling,
    most_fast,
    random_codes,
    random_scales,
    row_scales,
    scale_shapes,
    scale_views,
    scaled,
    scaling_of,
    stored_dtype,
    torch_product,
)
from .common.tiles import START_UNIT, ZERO, grouped_tile, store_own_of, tile_start, widths_of, zeros_of

# Bytes that a block writes of a moved tile, by architecture. With more, which fp32 outputs have,
# tileiras 13.4 spills, and on sm_90 loads without TMA.
MOST_MOVED, MOST_MOVED_ELSEWHERE = {"sm_90": 160 << 10}, 64 << 10


def reference(
    a: Tensor,
    b: Tensor,
    *,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    trans_a: bool = False,
    trans_b: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """The definition, on the dequantised operands; float64 operands stay float64."""
    a, b = a.mT if trans_a else a, b if trans_b else b.mT
    if a.dtype is torch.float64:
        return torch.matmul(dequantize(a, scale_a), dequantize(b, scale_b).mT)
    if a.dtype in FP8:
        return torch_product(a, b, scale_a, scale_b).to(out_dtype or torch.bfloat16)
    if out_dtype in (None, a.dtype):
        return torch.matmul(a, b.mT)
    if a.is_cuda:  # on the tensor cores, whose fp32 sums are less exact than those of fp32 operands
        batch = max(len(a), len(b))
        return torch.bmm(a.expand(batch, -1, -1), b.mT.expand(batch, -1, -1), out_dtype=out_dtype)
    return torch.matmul(a.float(), b.mT.float()).to(out_dtype)


@dataclass(frozen=True, slots=True)
class Problem:
    """out [batch, m, n]. one_a, one_b: that operand is one matrix for the whole batch."""

    batch: int
    m: int
    n: int
    k: int
    dtype: torch.dtype = torch.bfloat16
    trans_a: bool = False
    trans_b: bool = False
    one_a: bool = False
    one_b: bool = False
    scaling: Scaling = Scaling.NONE
    out_dtype: torch.dtype = torch.bfloat16

    @property
    @lru_cache(maxsize=64)  # as in matmul
    def gemm(self) -> Gemm:
        """What it has in common with other products."""
        options: dict[str, Any] = {
            "scaling": self.scaling,
            "most_fast": most_fast(self.dtype, self.out_dtype),
            "matrices_b": 1 if self.one_b else self.batch,
        }
        size = self.m, self.n, self.k, self.dtype, self.cost().size_bytes
        return Gemm(*size, batch=self.batch, trans_a=self.trans_a, trans_b=self.trans_b, **options)

    def cost(self) -> Cost:
        read = (1 if self.one_a else self.batch) * self.m * self.k + (1 if self.one_b else self.batch) * self.k * self.n
        written = self.batch * self.m * self.n * self.out_dtype.itemsize
        return Cost(read * self.dtype.itemsize + written, 2 * self.batch * self.m * self.n * self.k)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        batch_a, batch_b = 1 if self.one_a else self.batch, 1 if self.one_b else self.batch
        scales: dict[str, Any] = {"scale_a": None, "scale_b": None}
        if self.scaling:
            shapes = scale_shapes(self.scaling, self.m, self.n, self.k, batch_a=batch_a, batch_b=batch_b)
            scales = {name: random_scales(shape, device, scaling=self.scaling) for name, shape in zip(scales, shapes, strict=True)}
        return {
            "a": random_codes((batch_a, *((self.k, self.m) if self.trans_a else (self.m, self.k))), self.dtype, device),
            "b": random_codes((batch_b, *((self.n, self.k) if self.trans_b else (self.k, self.n))), self.dtype, device),
            **scales,
            "trans_a": self.trans_a,
            "trans_b": self.trans_b,
            "out_dtype": self.out_dtype,
        }


@dataclass(frozen=True, slots=True)
class Config(Uneven):
    """One way to compute it: a tile; `group` is inside one matrix of the batch.

    moved: the last tiles of a matrix begin earlier, so that they end with it.
    """

    moved: bool = False

    def bytes_of(self, dtype: torch.dtype) -> int:
        """Of what a block writes of a tile."""
        tile_m, tile_n = self.tile_shape
        return tile_m * tile_n * dtype.itemsize // (self.num_ctas or 1)


def candidates(p: Problem, device: Device) -> Iterator[Config]:
    """The tiles of every product, moved too."""
    g = p.gemm
    yield from with_moved(tiles_for(g, device, Config), g, device, lambda c: legal(p, c, device))


def legal(p: Problem, c: Config, device: Device) -> bool:
    """Block scales: a step lies in one group of k. Uneven: there is something for both parts."""
    if c.moved:
        fits = p.dtype.itemsize == 2 and c.bytes_of(p.out_dtype) <= MOST_MOVED.get(device.arch, MOST_MOVED_ELSEWHERE)
        if not fits or not may_move(p.gemm, c, device):
            return False
    if c.extra_n and (p.scaling or not begins_all(p.gemm, c)):
        return False
    return p.scaling is not Scaling.BLOCK or c.tile_k <= GROUP


def work(p: Problem, c: Config, device: Device) -> tuple[Work, ...]:
    """What the launch asks for."""
    return gemm_choices.work(p.gemm, c, device, tails=not c.moved)


def family(p: Problem, c: Config) -> str:
    """What the model errs alike about."""
    return gemm_choices.family(p.gemm, c)


CHOICES = Choices("bmm", candidates, legal, work, family, like="matmul", regimes_too=True)
space = CHOICES.space


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """One launch."""
    tiles = p.gemm.tiles(c)
    blocks = min(tiles, c.resident(device)) if c.persistent else tiles
    unchecked = p.scaling is Scaling.BLOCK and c.num_worker_warps == 8  # as in matmul: on 4 warps it loses
    constants = {
        "group_m": c.group,
        "scaling": int(p.scaling),
        "fast_acc": fast_sum(p.dtype, p.out_dtype, p.k),
        "even_m": unchecked and p.m % c.tile_m == 0,
        "even_n": unchecked and p.n % c.tile_n == 0,
    }
    optional = {"scale_a": p.scaling, "scale_b": p.scaling}
    return (Launch.of(bmm_kernel, (blocks,), p, c, constants, optional=optional, pdl=use_pdl(p.gemm, c, device, blocks)),)


DECISION = CHOICES.decision(Problem, plan, ("a", "b", "scale_a", "scale_b", "out"))


@ct.kernel
def bmm_kernel(
    a,
    b,
    scale_a,
    scale_b,
    out,
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    TILE_K: ct.Constant[int],
    EXTRA: ct.Constant[int],
    GROUP_M: ct.Constant[int],
    TRANS_A: ct.Constant[bool],
    TRANS_B: ct.Constant[bool],
    SWAP_AB: ct.Constant[bool],
    SCALING: ct.Constant[int],
    FAST_ACC: ct.Constant[bool],
    EVEN_M: ct.Constant[bool],
    EVEN_N: ct.Constant[bool],
    MOVED: ct.Constant[bool],
    PERSISTENT: ct.Constant[bool],
    LATENCY: ct.Constant[int],
):
    """out [batch, m, n], a tile at a time; all tiles of a matrix before those of the next, so that
    its panels stay in L2.

    a: [batch or 1, m, k], or [.., k, m] with TRANS_A. b: [batch or 1, k, n], or [.., n, k] with
        TRANS_B.
    scale_a, scale_b: [batch or 1, groups, rows] as ops/common/scaling.py makes them, read only if
        SCALING asks for them.
    SWAP_AB: accumulate the transpose, with b's columns on the long side of the MMA: for few rows of
        a.
    EXTRA: of the operand that is the second of the MMA, a tile has so many rows more than TILE_N,
        with SWAP_AB than TILE_M, and an accumulator for each power of two of them; without SCALING.
    EVEN_M, EVEN_N: the tiles end with the rows of a, of b, and BLOCK scales may be loaded
        unchecked.
    MOVED: tiles of the last row and column of a matrix end with it (`tile_start`), and write
        nothing of what they share with the ones in front of them; without SCALING, not PERSISTENT.
    """
    pdl_overlap(PERSISTENT)
    first, second, TRANS_1, TRANS_2 = (b, a, not TRANS_B, not TRANS_A) if SWAP_AB else (a, b, TRANS_A, TRANS_B)
    FIRST, SECOND = (TILE_N, TILE_M) if SWAP_AB else (TILE_M, TILE_N)
    AXIS, length = 1 if SWAP_AB else 2, SECOND + EXTRA  # of out, the side of the second operand
    height, width = (length, TILE_N) if SWAP_AB else (TILE_M, length)
    tiles_m, tiles_n = ct.cdiv(out.shape[1], height), ct.cdiv(out.shape[2], width)
    rows_1 = _rows(first, 0, FIRST, TILE_K, TRANS_1, START_UNIT if MOVED else FIRST)
    views: tuple = ()
    START = 0
    for ROWS in ct.static_iter(widths_of(SECOND, EXTRA)):
        views = (*views, (_rows(second, START, ROWS, TILE_K, not TRANS_2, START_UNIT if MOVED else length), START, ROWS))
        START = START + ROWS

    def one_tile(index):
        i = index // (tiles_m * tiles_n)
        tile_m, tile_n = grouped_tile(index - i * (tiles_m * tiles_n), tiles_m, tiles_n, GROUP_M)
        tile_1, tile_2 = (tile_n, tile_m) if SWAP_AB else (tile_m, tile_n)
        start_1, start_2 = tile_start(tile_1, FIRST, out.shape[3 - AXIS]), tile_start(tile_2, length, out.shape[AXIS])  # if MOVED
        at_1, at_2 = (start_1 // START_UNIT, start_2 // START_UNIT) if MOVED else (tile_1, tile_2)  # in the views
        i_1, i_2 = min(i, first.shape[0] - 1), min(i, second.shape[0] - 1)

        def summed(step, accs):
            x = _operand(rows_1, i_1, at_1, step, FIRST, TILE_K, TRANS_1, LATENCY)
            found: tuple = ()
            for j in ct.static_iter(range(len(accs))):
                view, START, ROWS = views[j]
                # The last tile may be cut before this part.
                at = min(at_2, ct.cdiv(out.shape[AXIS] - START, length) - 1) if START and not MOVED else at_2
                y = _operand(view, i_2, at, step, ROWS, TILE_K, not TRANS_2, LATENCY).transpose()
                if SCALING == BLOCK:
                    group = step * TILE_K // GROUP
                    rows = group_scales(scale_a, min(i, a.shape[0] - 1), group, tile_m, TILE_M, LATENCY, EVEN_M)
                    columns = block_scales(scale_b, min(i, b.shape[0] - 1), group, tile_n, TILE_N, LATENCY, EVEN_N)
                    found = (*found, add_scaled(accs[j], x, y, *((columns, rows) if SWAP_AB else (rows, columns))))
                else:
                    found = (*found, add_product(x, y, accs[j], FAST_ACC))
            return found

        # A first step of its own: in a loop within a loop the compiler waits for each MMA of
        # accumulators that begin as zeros.
        PEELED = PERSISTENT and EXTRA > 0
        accs = zeros_of(FIRST, widths_of(SECOND, EXTRA))
        if PEELED:
            accs = summed(0, accs)
        for step in range(1 if PEELED else 0, ct.cdiv(a.shape[1 if TRANS_A else 2], TILE_K)):
            accs = summed(step, accs)
        for j in ct.static_iter(range(len(accs))):
            acc = accs[j]
            if SCALING == ROW or SCALING == TENSOR:
                rows = row_scales(scale_a, min(i, a.shape[0] - 1), tile_m, TILE_M, SCALING)
                columns = row_scales(scale_b, min(i, b.shape[0] - 1), tile_n, TILE_N, SCALING)
                acc = scaled(acc, *((columns, rows) if SWAP_AB else (rows, columns)))
            if SWAP_AB:
                acc = acc.transpose()
            if MOVED:
                row, column = (start_2 + views[j][1], start_1) if SWAP_AB else (start_1, start_2 + views[j][1])
                store_own_of(out, i, acc, row, tile_m * height, column, tile_n * width)
            elif EXTRA:
                _store_strip(out, i, tile_m, tile_n, acc, AXIS, views[j][1], length)
            else:
                ct.store(out, (i, tile_m, tile_n), acc.astype(out.dtype).reshape((1, TILE_M, TILE_N)))

    if PERSISTENT:
        for index in range(ct.bid(0), out.shape[0] * tiles_m * tiles_n, ct.num_blocks(0)):
            one_tile(index)
    else:
        one_tile(ct.bid(0))


def _rows(matrix, START, ROWS, TILE_K, TRANSPOSED, STRIDE):
    """A view of a matrix [batch, rows, k], or TRANSPOSED [batch, k, rows]: tiles of ROWS rows that
    begin at row START and every STRIDE rows from there.
    """
    if TRANSPOSED:
        part = matrix.slice(2, START, matrix.shape[2])
        return part.tiled_view((1, TILE_K, ROWS), padding_mode=ZERO, traversal_steps=(1, TILE_K, STRIDE))
    part = matrix.slice(1, START, matrix.shape[1])
    return part.tiled_view((1, ROWS, TILE_K), padding_mode=ZERO, traversal_steps=(1, STRIDE, TILE_K))


def _operand(view, i, tile, step, ROWS, TILE_K, TRANSPOSED, LATENCY):
    """[ROWS, TILE_K]: a tile of a view of `_rows`."""
    if TRANSPOSED:
        return view.load((i, step, tile), latency=LATENCY).reshape((TILE_K, ROWS)).transpose()
    return view.load((i, tile, step), latency=LATENCY).reshape((ROWS, TILE_K))


def _store_strip(out, i, tile_m, tile_n, acc, AXIS, START, STRIDE):
    """Writes the tile of those that begin at START of an axis and are STRIDE apart there, if it has
    anything inside.
    """
    steps = (1, STRIDE, acc.shape[1]) if AXIS == 1 else (1, acc.shape[0], STRIDE)
    view = out.slice(AXIS, START, out.shape[AXIS]).tiled_view((1, *acc.shape), traversal_steps=steps)
    if (tile_m if AXIS == 1 else tile_n) * STRIDE + START < out.shape[AXIS]:
        view.store((i, tile_m, tile_n), acc.astype(out.dtype).reshape((1, *acc.shape)))


@torch_op(mutates=("out",))
def bmm_out(
    a: Tensor,
    b: Tensor,
    scale_a: Optional[Tensor],
    scale_b: Optional[Tensor],
    trans_a: bool,
    trans_b: bool,
    out: Tensor,
) -> None:
    """`bmm` into `out` [batch, m, n]. No checks, no sync: safe under graph capture."""
    batch, m, n = out.shape
    launches = DECISION.launches(
        Device.of(a),
        batch=batch,
        m=m,
        n=n,
        k=a.shape[1 if trans_a else 2],
        dtype=a.dtype,
        trans_a=trans_a,
        trans_b=trans_b,
        one_a=a.shape[0] < batch,
        one_b=b.shape[0] < batch,
        scaling=known_scaling(scale_a, True),
        out_dtype=out.dtype,
    )
    launches.run(a, b, *scale_views(scale_a, scale_b, True), out)


def bmm(
    a: Tensor,
    b: Tensor,
    *,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    trans_a: bool = False,
    trans_b: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Batched matrix products. An operand with a single matrix is used for the whole batch.

    Args:
        a: [batch or 1, m, k], or [.., k, m] if trans_a; bf16, fp16, float8_e4m3fn or float8_e5m2;
            stride 1 in the last axis.
        b: [batch or 1, k, n], or [.., n, k] if trans_b; dtype and device of a, stride 1 in the last
            axis.
        scale_a: fp32, 8-bit operands only: [] or [batch of a], [batch of a, m], or [batch of a, m,
            ceil(k / 128)].
        scale_b: fp32, of the same kind: [] or [batch of b], [batch of b, n], or [batch of b, ceil(n
            / 128), ceil(k / 128)].
        trans_a, trans_b: the operand is stored transposed; 8-bit operands are fastest with k last
            (trans_b alone).
        out_dtype: bf16, fp16 or fp32; by default the dtype of a, bf16 for 8-bit operands.
        out: where the result goes: of its shape, dtype and device, its axes in any order in
            memory, no element in common with an input; default a new tensor.
    Returns: [batch, m, n], by default contiguous. If an axis of the result is 0 it is empty, and
        nothing is launched. If k is 0 it is zero.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_bools(trans_a=trans_a, trans_b=trans_b)
    check_tensor(a, "a", ndim=3, dtypes=(*HALVES, *FP8))
    check_tensor(b, "b", ndim=3, like=a)
    stored = stored_dtype(a, out_dtype)
    m, k = (a.shape[2], a.shape[1]) if trans_a else (a.shape[1], a.shape[2])
    n = b.shape[1 if trans_b else 2]
    if b.shape[2 if trans_b else 1] != k:
        raise argument_error(f"b.shape[{2 if trans_b else 1}]", f"{k}, the k of a {tuple(a.shape)}", b.shape[2 if trans_b else 1])
    if a.shape[0] != b.shape[0] and 1 not in (a.shape[0], b.shape[0]):
        raise argument_error("b.shape[0]", f"1 or {a.shape[0]}, the batch of a (or a's 1)", b.shape[0])
    scaling_of(a, scale_a, scale_b, m, n, k, batch_a=a.shape[0], batch_b=b.shape[0])
    batch = a.shape[0] if b.shape[0] == 1 else b.shape[0]
    out = out_or_new(out, (batch, m, n), stored, a, b, scale_a, scale_b, contiguous=False)
    if out.numel() == 0:
        return out
    if k == 0:
        return out.zero_()
    bmm_out(a, b, scale_a, scale_b, trans_a, trans_b, out)
    return out
