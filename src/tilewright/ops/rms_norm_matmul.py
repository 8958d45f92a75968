"""RMSNorm and the matrix product after it in one launch, for one token or a few: out = f(rms_norm(x
+ residual) @ b.T + bias)

    sum over k of b[n, k] * rms_norm(x)[k] = (sum over k of b[n, k] * weight[k] * x[k]) / root of x

f is the identity or, for silu_mul, silu(even column) * odd column. Each block sums the squares of x
beside its own products and divides by the root at the end, so no launch waits for a norm.

Source    rms_norm (arXiv:1910.07467, eq. 4) and matmul; the factor of a row taken out of the sum.
Numerics  Products and sums in fp32, rounded once at the end; x + residual is rounded to the dtype,
          and is what is normalised. For the tensor cores (several rows of 16 bits, sm_90) weight *
          x is rounded; in fp16, where that could overflow, the normed row.
Bound     Memory: b read once; x, and b for further rows on the CUDA cores, come from L2.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Optional, overload

import cuda.tile as ct
import torch
import torch.nn.functional as F
from torch import Tensor

from ..launch import Cost, Device, Launch, argument_error, as_rows, check_bools, check_tensor, next_pow2, out_or_new, torch_op
from ..select import Choices, Work
from . import rms_norm
from .common import gemm_choices
from .common.gemm_choices import Gemm, Tile
from .common.pdl import pdl_launch_dependents, pdl_overlap, pdl_wait, use_pdl, whole_tiles
from .common.tiles import load_masked, rounded_sum, silu_mul_of_pairs, vector_masked

ZERO = ct.PaddingMode.ZERO  # k beyond the edge adds nothing to the sums


def reference(
    x: Tensor,
    weight: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    residual: Tensor | None = None,
    silu_mul: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The definition; the norm in fp32 at least, and rounded before the product, as of its op."""
    found = rms_norm.reference(x, weight, eps, weight_offset=weight_offset, residual=residual)
    normed, *total = found if isinstance(found, tuple) else (found,)
    out = F.linear(normed, b, bias)
    if silu_mul:
        out = F.silu(out[..., 0::2]) * out[..., 1::2]
    return (out, total[0]) if total else out


@dataclass(frozen=True, slots=True)
class Problem:
    """out [rows, n] from x [rows, k] and b [n, k]; with silu_mul out has n / 2 columns."""

    rows: int
    n: int
    k: int
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False
    residual: bool = False
    silu_mul: bool = False

    def cost(self) -> Cost:
        out = self.rows * (self.n // 2 if self.silu_mul else self.n)
        around = self.rows * self.k * (3 if self.residual else 1) + self.k + (self.n if self.bias else 0)
        return Cost((self.n * self.k + around + out) * self.dtype.itemsize, 2 * self.rows * self.n * self.k)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        randn = partial(torch.randn, dtype=self.dtype, device=device)
        return {
            "x": randn(self.rows, self.k),
            "weight": randn(self.k),
            "b": randn(self.n, self.k).mul_(self.k**-0.5),
            "bias": randn(self.n) if self.bias else None,
            "eps": 1e-6,
            "residual": randn(self.rows, self.k) if self.residual else None,
            "silu_mul": self.silu_mul,
        }


@dataclass(frozen=True, slots=True)
class Config:
    """How the columns are divided over blocks and steps.

    tile_n, tile_k: rows of b and k of one step, powers of two.
    persistent: one wave of blocks, each of which computes several tiles; else a block has one tile.
    mma: all rows at once on the tensor cores, instead of one by one.
    latency, occupancy, num_worker_warps: compiler hints.
    """

    tile_n: int
    tile_k: int
    persistent: bool = False
    mma: bool = False
    latency: int = 8
    occupancy: int = 1
    num_worker_warps: int | None = None

    def tiles(self, p: Problem) -> int:
        return (1 if self.mma else p.rows) * -(-p.n // self.tile_n)

    def whole(self, p: Problem) -> bool:
        """A block has all of k at once: its weights can come while the launch before ends."""
        return p.rows == 1 and self.tile_k >= p.k and not (self.mma or self.persistent)


# tile_n, tile_k, latency, occupancy, num_worker_warps: such that about 200 KB of an SM's shared
LARGE = ((16, 256, 8, 3, 4), (32, 256, 8, 2, 4), (8, 512, 8, 2, 4), (8, 512, 8, 3, 4), (16, 256, 8, 2, 4), (16, 512, 6, 2, 4), (16, 512, 8, 1, 8))
SMALL = ((8, 512, 8, 2, 4), (16, 256, 4, 2, 4), (8, 512, 8, 3, 4), (8, 256, 8, 2, 4))  # for half the shared memory, or none that loads fill
# The same for all rows at once: 177 to 232 KB, no wait between the MMAs (sm_90, tileiras 13.4).
ROWS = ((64, 512, 8, 1, 4), (64, 256, 8, 1, 4), (64, 256, 4, 1, 4), (128, 256, 8, 1, 8), (128, 128, 8, 1, 8), (256, 128, 8, 1, 8))
MOST_MMA_ROWS = 16


def candidates(p: Problem, device: Device) -> Iterator[Config]:
    """All rows at once on the tensor cores, one by one, and one row with all of k in a step."""
    if device.is_cpu:  # few, large tiles: each step of the interpreter is a numpy call
        tile_n, tile_k = min(512, max(2, next_pow2(p.n))), min(1024, next_pow2(p.k))
        for mma in (True, False):
            yield from (Config(tile_n, tile_k, mma=mma), Config(min(32, tile_n), min(64, tile_k), persistent=True, mma=mma))
        return
    shapes = [(False, shape) for shape in (LARGE if device.arch in ("sm_90", "sm_100", "sm_103") else SMALL)]
    shapes += [(True, shape) for shape in ROWS if device.arch == "sm_90"]
    for mma, (n, k, latency, occupancy, warps) in shapes:
        c = Config(n, k, False, mma, latency, occupancy, warps)
        yield c
        if p.rows > 1 and c.tiles(p) > device.sms * occupancy:  # of one row the launch could not be early
            yield replace(c, persistent=True)
    if device.arch == "sm_90" and p.rows == 1 and p.k <= 4096 and p.dtype.itemsize == 2:
        yield from (Config(n, k, latency=8, occupancy=occupancy, num_worker_warps=4) for n, k, occupancy in whole_tiles(p.k))


def legal(p: Problem, c: Config, device: Device) -> bool:
    """The tensor cores take operands of 16 bits."""
    return not c.mma or (1 < p.rows <= MOST_MMA_ROWS and p.dtype.itemsize == 2)


def work(p: Problem, c: Config, device: Device) -> Work:
    """What the launch asks for: of one product on the MMA, or of one of each row."""
    rows = max(8, next_pow2(p.rows)) if c.mma else 1
    hints_of: dict[str, Any] = {"latency": c.latency, "num_ctas": 1, "occupancy": c.occupancy, "num_worker_warps": c.num_worker_warps}
    tile = Tile(rows, c.tile_n, c.tile_k, swap_ab=c.mma, persistent=c.persistent, **hints_of)
    found = gemm_choices.work(Gemm(p.rows, p.n, p.k, p.dtype, p.cost().size_bytes, gated=p.silu_mul), tile, device)[0]
    return found if c.mma else replace(found, kinds=("dot", "dot1"), flops=2.0 * c.tile_n * c.tile_k)


CHOICES = Choices("rms_norm_matmul", candidates, legal, work, like="matmul")
space = CHOICES.space


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """One launch."""
    tiles = c.tiles(p)
    blocks = min(tiles, device.sms * c.occupancy) if c.persistent else tiles
    constants: dict[str, Any] = {"add": p.residual, "add_bias": p.bias}
    optional, pdl = {"residual": p.residual, "sum": p.residual, "bias": p.bias}, use_pdl(p.rows, c.persistent)
    if not c.mma:
        return (Launch.of(rms_norm_matmul_kernel, (blocks,), p, c, {**constants, "whole": c.whole(p)}, optional=optional, pdl=pdl),)
    pieces = -(-p.k // c.tile_k) if p.residual and not c.persistent else 0  # blocks of their own for the sum
    constants |= {"rows": max(8, next_pow2(p.rows)), "normed": p.dtype is torch.float16}
    return (Launch.of(rms_norm_matmul_rows_kernel, (blocks + pieces,), p, c, constants, optional=optional, pdl=pdl),)


DECISION = CHOICES.decision(Problem, plan, ("x", "residual", "weight", "b", "bias", "out", "sum", "eps", "weight_offset"))


def _rows_tile(X, RESIDUAL, at, shape, ADD, LATENCY):
    """A tile of the rows that are normalised: of X, or if ADD of X + RESIDUAL."""
    x = ct.load(X, at, shape, padding_mode=ZERO, latency=LATENCY)
    if ADD:
        x = rounded_sum(x, ct.load(RESIDUAL, at, shape, padding_mode=ZERO, latency=LATENCY))
    return x


def _behind_product(y, BIAS, tile_n, TILE_N, ADD_BIAS, SILU_MUL):
    """The product's columns [rows, TILE_N] with their bias, and through the activation."""
    if ADD_BIAS:
        y = y + ct.load(BIAS, (tile_n,), (TILE_N,), padding_mode=ZERO, allow_tma=False).astype(ct.float32)
    return silu_mul_of_pairs(y) if SILU_MUL else y


@ct.kernel
def rms_norm_matmul_kernel(
    X,
    RESIDUAL,
    WEIGHT,
    B,
    BIAS,
    OUT,
    SUM,
    eps: float,
    weight_offset: float,
    ADD: ct.Constant[bool],
    ADD_BIAS: ct.Constant[bool],
    SILU_MUL: ct.Constant[bool],
    PERSISTENT: ct.Constant[bool],
    WHOLE: ct.Constant[bool],
    TILE_N: ct.Constant[int],
    TILE_K: ct.Constant[int],
    LATENCY: ct.Constant[int],
):
    """A tile of columns of one row of OUT at a time.

    X, RESIDUAL, SUM: [rows, k], the latter two only with ADD; WEIGHT: [k]; B: [n, k]; BIAS: [n],
        only with ADD_BIAS; OUT: [rows, n], with SILU_MUL n / 2 columns, of pairs of rows of B.
    WHOLE: one row, all of k in one step, a tile to a block: its weights come while the launch
        before ends.
    """
    if WHOLE:
        pdl_launch_dependents()
        b = ct.load(B, (ct.bid(0), 0), (TILE_N, TILE_K), padding_mode=ZERO, allow_tma=False)
        weight = vector_masked(WEIGHT, TILE_K)
        pdl_wait()
        x = load_masked(X, (0, 0), (1, TILE_K), ZERO, False, None, False)
        if ADD:
            x = rounded_sum(x, load_masked(RESIDUAL, (0, 0), (1, TILE_K), ZERO, False, None, False))
            if ct.bid(0) == 0:
                ct.store(SUM, (0, 0), x, allow_tma=False)
        x = x.astype(ct.float32)
        y = ct.sum(b.astype(ct.float32) * (x * (weight.astype(ct.float32) + weight_offset)), axis=1)
        y = y.reshape((1, TILE_N)) * (1.0 / ct.sqrt(ct.sum(x * x) / X.shape[1] + eps))  # rsqrt is 2 ulp off in fp32
        y = _behind_product(y, BIAS, ct.bid(0), TILE_N, ADD_BIAS, SILU_MUL)
        ct.store(OUT, (0, ct.bid(0)), y.astype(OUT.dtype), allow_tma=False)
    else:
        pdl_overlap(PERSISTENT)
        _by_steps(X, RESIDUAL, WEIGHT, B, BIAS, OUT, SUM, eps, weight_offset, ADD, ADD_BIAS, SILU_MUL, PERSISTENT, TILE_N, TILE_K, LATENCY)


def _by_steps(X, RESIDUAL, WEIGHT, B, BIAS, OUT, SUM, eps, weight_offset, ADD, ADD_BIAS, SILU_MUL, PERSISTENT, TILE_N, TILE_K, LATENCY):
    rows = X.shape[0]
    steps = ct.cdiv(X.shape[1], TILE_K)

    def row_tile(row, step):
        return _rows_tile(X, RESIDUAL, (row, step), (1, TILE_K), ADD, LATENCY)

    if ADD:  # the first blocks write a piece of the sum each
        for i in range(ct.bid(0), rows * steps, ct.num_blocks(0)):
            ct.store(SUM, (i // steps, i % steps), row_tile(i // steps, i % steps), allow_tma=False)

    def column_tile(tile):
        row, tile_n = tile % rows, tile // rows  # side by side: the same rows of B, which come from L2 but for the first
        acc = ct.zeros((TILE_N, TILE_K), ct.float32)
        squares = ct.zeros((1, TILE_K), ct.float32)
        for step in range(steps):
            x = row_tile(row, step).astype(ct.float32)
            squares = squares + x * x
            weight = ct.load(WEIGHT, (step,), (TILE_K,), padding_mode=ZERO, latency=LATENCY).astype(ct.float32) + weight_offset
            b = ct.load(B, (tile_n, step), (TILE_N, TILE_K), padding_mode=ZERO, latency=LATENCY).astype(ct.float32)
            acc = acc + (x * weight) * b
        rstd = 1.0 / ct.sqrt(ct.sum(squares) / X.shape[1] + eps)  # rsqrt is 2 ulp off in fp32
        y = ct.sum(acc, axis=1).reshape((1, TILE_N)) * rstd
        y = _behind_product(y, BIAS, tile_n, TILE_N, ADD_BIAS, SILU_MUL)
        ct.store(OUT, (row, tile_n), y.astype(OUT.dtype), allow_tma=False)

    if PERSISTENT:
        for tile in range(ct.bid(0), rows * ct.cdiv(B.shape[0], TILE_N), ct.num_blocks(0)):
            column_tile(tile)
    else:
        column_tile(ct.bid(0))


@ct.kernel
def rms_norm_matmul_rows_kernel(
    X,
    RESIDUAL,
    WEIGHT,
    B,
    BIAS,
    OUT,
    SUM,
    eps: float,
    weight_offset: float,
    ADD: ct.Constant[bool],
    ADD_BIAS: ct.Constant[bool],
    SILU_MUL: ct.Constant[bool],
    PERSISTENT: ct.Constant[bool],
    ROWS: ct.Constant[int],
    NORMED: ct.Constant[bool],
    TILE_N: ct.Constant[int],
    TILE_K: ct.Constant[int],
    LATENCY: ct.Constant[int],
):
    """All rows of X, at most ROWS, and a tile of columns of OUT at a time, on the tensor cores with
    B's rows on the long side of the MMA.

    Arrays as in rms_norm_matmul_kernel. Not PERSISTENT, and ADD: the blocks behind those with a
    tile write a piece of the sum each. NORMED: rows are divided by their root before the product,
    for which they are read twice.
    """
    pdl_overlap(PERSISTENT)
    steps, tiles = ct.cdiv(X.shape[1], TILE_K), ct.cdiv(B.shape[0], TILE_N)

    def rows_tile(step):
        return _rows_tile(X, RESIDUAL, (0, step), (ROWS, TILE_K), ADD, LATENCY)

    def root(squares):
        return 1.0 / ct.sqrt(ct.sum(squares, axis=1, keepdims=True) / X.shape[1] + eps)  # rsqrt is 2 ulp off in fp32

    before = ct.ones((ROWS, 1), ct.float32)
    if NORMED:
        squares = ct.zeros((ROWS, TILE_K), ct.float32)
        for step in range(steps):
            x = rows_tile(step).astype(ct.float32)
            squares = squares + x * x
        before = root(squares)

    def column_tile(tile_n):
        acc = ct.zeros((TILE_N, ROWS), ct.float32)
        squares = ct.zeros((ROWS, TILE_K), ct.float32)
        for step in range(steps):
            x = rows_tile(step).astype(ct.float32)
            if NORMED:
                x = x * before
            else:
                squares = squares + x * x
            weight = ct.load(WEIGHT, (step,), (TILE_K,), padding_mode=ZERO, latency=LATENCY).astype(ct.float32) + weight_offset
            scaled = (x * weight.reshape((1, TILE_K))).astype(B.dtype)
            b = ct.load(B, (tile_n, step), (TILE_N, TILE_K), padding_mode=ZERO, latency=LATENCY)
            acc = ct.mma(b, scaled.transpose(), acc)
        y = acc.transpose()
        if not NORMED:
            y = y * root(squares)
        y = _behind_product(y, BIAS, tile_n, TILE_N, ADD_BIAS, SILU_MUL)
        ct.store(OUT, (0, tile_n), y.astype(OUT.dtype), allow_tma=False)

    def piece(step):
        ct.store(SUM, (0, step), rows_tile(step), allow_tma=False)

    if PERSISTENT:
        if ADD:  # the last blocks have a tile less, if any
            for step in range(ct.num_blocks(0) - 1 - ct.bid(0), steps, ct.num_blocks(0)):
                piece(step)
        for tile_n in range(ct.bid(0), tiles, ct.num_blocks(0)):
            column_tile(tile_n)
    elif ADD:
        if ct.bid(0) < tiles:
            column_tile(ct.bid(0))
        else:
            piece(ct.bid(0) - tiles)
    else:
        column_tile(ct.bid(0))


@torch_op(mutates=("out", "new_residual"))
def rms_norm_matmul_out(
    x: Tensor,
    weight: Tensor,
    b: Tensor,
    bias: Optional[Tensor],
    residual: Optional[Tensor],
    eps: float,
    weight_offset: float,
    silu_mul: bool,
    out: Tensor,
    new_residual: Optional[Tensor],
) -> None:
    """`rms_norm_matmul` into `out` and, with a residual, `new_residual`; all 2-D.

    No checks, no sync: safe under graph capture.
    """
    rows, k = x.shape
    launches = DECISION.launches(
        Device.of(x), rows=rows, n=b.shape[0], k=k, dtype=x.dtype, bias=bias is not None, residual=residual is not None, silu_mul=silu_mul
    )
    launches.run(x, residual, weight, b, bias, out, new_residual, eps, weight_offset)


@overload
def rms_norm_matmul(
    x: Tensor,
    weight: Tensor,
    b: Tensor,
    bias: Tensor | None = ...,
    *,
    eps: float = ...,
    weight_offset: float = ...,
    silu_mul: bool = ...,
    out: Tensor | None = ...,
) -> Tensor: ...
@overload
def rms_norm_matmul(
    x: Tensor,
    weight: Tensor,
    b: Tensor,
    bias: Tensor | None = ...,
    *,
    eps: float = ...,
    weight_offset: float = ...,
    residual: Tensor,
    silu_mul: bool = ...,
    out: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...
def rms_norm_matmul(
    x: Tensor,
    weight: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    residual: Tensor | None = None,
    silu_mul: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """RMSNorm followed by a matrix product, in one launch. It is for one token, or a few of 16
    bits: for many, `rms_norm` and `matmul` are faster.

    Args:
        x: [..., k]; bf16, fp16 or fp32; stride 1 in the last axis. Copied if its leading axes do
            not fold into one.
        weight: [k], the norm's; dtype and device of x.
        b: [n, k], as torch.nn.Linear stores it; likewise, stride 1 in the last axis.
        bias: [n]; likewise.
        eps: positive; added to mean(x**2).
        weight_offset: added to the norm's weight; 1.0 for Gemma.
        residual: shape, dtype and device of x; x + residual is normalised.
        silu_mul: out[.., j] = silu(column 2 j) * column 2 j + 1 of the product; n even.
        out: where the product goes: contiguous, with its shape and dtype, no element in common with
            an input; default a new tensor.
    Returns: [..., n] (n / 2 with silu_mul), contiguous; with a residual the tuple (that, x +
        residual). Empty for an empty x or no columns, with nothing launched.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_bools(silu_mul=silu_mul)
    rms_norm.check_norm(x, weight, eps, weight_offset, residual)
    k = x.shape[-1]
    if k == 0:
        raise argument_error("x.shape[-1]", "at least 1", 0)
    check_tensor(b, "b", ndim=2, like=x)
    n = b.shape[0]
    if b.shape[1] != k:
        raise argument_error("b.shape[1]", f"{k}, the k of x", b.shape[1])
    if bias is not None:
        check_tensor(bias, "bias", shape=(n,), like=x)
    if silu_mul and n % 2:
        raise argument_error("n of b", "even with silu_mul", n)
    out = out_or_new(out, (*x.shape[:-1], n // 2 if silu_mul else n), x.dtype, x, weight, b, bias, residual)
    total = None if residual is None else x.new_empty(x.shape)
    if out.numel():
        rms_norm_matmul_out(as_rows(x), weight, b, bias, as_rows(residual), eps, weight_offset, silu_mul, as_rows(out), as_rows(total))
    elif total is not None and residual is not None:
        torch.add(x, residual, out=total)  # no columns
    return out if total is None else (out, total)
