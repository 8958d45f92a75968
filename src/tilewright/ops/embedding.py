"""Embedding: out[i] = scale * weight[ids[i]]

Source    Vaswani et al. 2017, arXiv:1706.03762, section 3.4 (with scale = sqrt(dim), as Gemma has
          it).
Numerics  Product in fp32, rounded once; with scale 1 the row's own bits.
Bound     Memory: a row of the weight read and one of out written for each id. An id outside the
          vocabulary gives a row of NaN.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cuda.tile as ct
import torch
from torch import Tensor

from ..launch import FLOATS, Cost, Device, Launch, argument_error, check_finite, check_tensor, next_pow2, out_or_new, torch_op
from ..launch.values import Claims, within
from ..select import Choices, Work
from .common.pdl import pdl_overlap
from .common.rows import TILE_TIE, grid_fits, least_tile, stream
from .common.tiles import ZERO, of_width


def reference(ids: Tensor, weight: Tensor, *, scale: float = 1.0) -> Tensor:
    """The definition."""
    known = (ids >= 0) & (ids < weight.shape[0])
    rows = weight[torch.where(known, ids, 0).long()] * scale
    return torch.where(known[..., None], rows, torch.nan)


@dataclass(frozen=True, slots=True)
class Problem:
    """What a plan may depend on. vocab and scale are runtime values, and here for inputs() and
    cost().
    """

    tokens: int
    dim: int
    dtype: torch.dtype
    wide_ids: bool = True  # int64
    vocab: int = 32_000
    scale: float = 1.0

    def cost(self) -> Cost:
        rows = 2 * self.tokens * self.dim * self.dtype.itemsize
        return Cost(size_bytes=rows + self.tokens * (8 if self.wide_ids else 4), flops=self.tokens * self.dim)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        ids = torch.randint(self.vocab, (self.tokens,), dtype=torch.int64 if self.wide_ids else torch.int32, device=device)
        return {"ids": ids, "weight": torch.randn(self.vocab, self.dim, dtype=self.dtype, device=device), "scale": self.scale}


@dataclass(frozen=True, slots=True)
class Config:
    """How the rows are copied.

    tokens: rows that a block copies, all loaded before the first is stored.
    tile_n: columns of a tile, one a block; a power of two.
    units: 0, or how many pieces of 16 bytes, counted through all rows, a block copies in place of
        tiles: rows far from a power of two long then leave no lane idle. tokens and tile_n
        mean nothing.
    latency: prefetch hint of the loads, 1 to 10.
    num_worker_warps: warps that compute, 4 or 8.
    """

    tokens: int
    tile_n: int
    units: int = 0
    latency: int = 4
    num_worker_warps: int | None = None


UNITS = (256, 512, 1024)
# 16 bytes of a thread along a row, and in all
LOADS = ((1, 1), (2, 2), (4, 4), (1, 2), (2, 4), (4, 8), (1, 4), (8, 8))


def candidates(p: Problem, device: Device) -> Iterator[Config]:
    vector, whole = 16 // p.dtype.itemsize, next_pow2(p.dim)
    width = 4 * 32 * vector  # of a row that four warps load at once
    if device.is_cpu:
        yield from (Config(max(min(next_pow2(p.tokens), 16), least_tile(p.tokens)), whole), Config(1, max(1, whole // 4)))
        return
    if p.dim % vector == 0 and p.tokens * p.dim > device.sms * 8 * width:
        yield from (Config(1, vector, units, num_worker_warps=4) for units in UNITS)
    for across, loads in LOADS:
        tile_n = min(whole, across * width)
        tokens = min(loads * width // tile_n, next_pow2(p.tokens), 16)
        yield Config(max(tokens, least_tile(p.tokens, ct.cdiv(p.dim, tile_n))), tile_n, num_worker_warps=4)


def _blocks(p: Problem, c: Config) -> int:
    if c.units:
        return int(ct.cdiv(p.tokens * p.dim * p.dtype.itemsize // 16, c.units))
    return int(ct.cdiv(p.tokens, c.tokens) * ct.cdiv(p.dim, c.tile_n))


def legal(p: Problem, c: Config, device: Device) -> bool:
    """The kernel that counts units does so in 32 bits."""
    return grid_fits(_blocks(p, c)) and _blocks(p, c) * c.units < 2**31


def work(p: Problem, c: Config, device: Device) -> Work:
    """Rows read and written, after a round trip for the ids; idle lanes; and pieces of 16 bytes,
    each with an id of its own.
    """
    elements = c.units * 16 // p.dtype.itemsize or c.tokens * c.tile_n
    checked = not c.units and p.dim % c.tile_n != 0
    return stream(p, c, device, _blocks(p, c), elements, held=p.dtype.itemsize / 4, chain=1 + checked / 2)


CHOICES = Choices("embedding", candidates, legal, work, tie=TILE_TIE)
space = CHOICES.space


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """Grid and compile-time constants of one launch."""
    kernel, constants = (embedding_units_kernel, {"unit": 16 // p.dtype.itemsize}) if c.units else (embedding_kernel, {})
    # Not early: launches behind it may read ahead of their waits what the step before wrote.
    return (Launch.of(kernel, (_blocks(p, c),), p, c, constants),)


@ct.kernel
def embedding_kernel(
    IDS,
    WEIGHT,
    OUT,
    scale: float,
    DIM: ct.Constant[int],
    TOKENS: ct.Constant[int],
    TILE_N: ct.Constant[int],
    LATENCY: ct.Constant[int],
):
    """TOKENS rows, TILE_N columns of each.

    IDS: [tokens]; WEIGHT: [vocab, DIM]; OUT: [tokens, DIM].
    """
    pdl_overlap()
    tiles_n = ct.cdiv(DIM, TILE_N)
    first, j = ct.bid(0) // tiles_n * TOKENS, ct.bid(0) % tiles_n
    tokens, vocab = IDS.shape[0], WEIGHT.shape[0]
    WEIGHT, OUT = of_width(WEIGHT, DIM), of_width(OUT, DIM)
    rows: tuple = ()
    known: tuple = ()
    for t in ct.static_iter(range(TOKENS)):
        # Past the last token the last one is copied again and not stored: a load without a branch
        # around it does not wait for the one before.
        token = ct.load(IDS, (min(first + t, tokens - 1),), ())
        inside = (token >= 0) & (token < vocab)
        row = ct.where(inside, token, 0).astype(ct.int32)
        if DIM % TILE_N == 0:
            x = ct.load(WEIGHT, (row, j), (1, TILE_N), check_bounds=False, latency=LATENCY, allow_tma=False)
        else:
            x = ct.load(WEIGHT, (row, j), (1, TILE_N), padding_mode=ZERO, latency=LATENCY, allow_tma=False)
        rows = (*rows, x)
        known = (*known, inside)
    for t in ct.static_iter(range(TOKENS)):
        y = ct.where(known[t], rows[t].astype(ct.float32) * scale, math.nan).astype(OUT.dtype)
        if first + t < tokens:
            ct.store(OUT, (first + t, j), y, check_bounds=DIM % TILE_N != 0, allow_tma=False)


@ct.kernel
def embedding_units_kernel(
    IDS,
    WEIGHT,
    OUT,
    scale: float,
    DIM: ct.Constant[int],
    UNIT: ct.Constant[int],
    UNITS: ct.Constant[int],
    LATENCY: ct.Constant[int],
):
    """UNITS runs of UNIT elements, counted through all rows of OUT. Arrays as of
    `embedding_kernel`; UNIT divides DIM.
    """
    pdl_overlap()
    tokens, vocab = IDS.shape[0], WEIGHT.shape[0]
    unit = ct.bid(0) * UNITS + ct.arange(UNITS, dtype=ct.int32)
    # Past the last token the last one is copied again and not stored.
    token, column = min(unit // (DIM // UNIT), tokens - 1), unit % (DIM // UNIT)
    named = ct.gather(IDS, (token,), check_bounds=False)
    inside = (named >= 0) & (named < vocab)
    row = ct.where(inside, named, 0).astype(ct.int32)
    at = ct.expand_dims(column * UNIT, 1) + ct.arange(UNIT, dtype=ct.int32).reshape((1, UNIT))
    x = ct.gather(WEIGHT, (ct.expand_dims(row, 1), at), check_bounds=False, latency=LATENCY)
    y = ct.where(ct.expand_dims(inside, 1), x.astype(ct.float32) * scale, math.nan).astype(OUT.dtype)
    stored = ct.expand_dims(unit < tokens * (DIM // UNIT), 1)
    ct.scatter(OUT, (ct.expand_dims(token, 1), at), y, mask=stored, check_bounds=False)


DECISION = CHOICES.decision(Problem, plan, ("ids", "weight", "out", "scale"))


def _claims(ids: Tensor, weight: Tensor) -> Claims:
    yield from within("ids.view(-1)", ids, 0, weight.shape[0] - 1)


@torch_op(mutates=("out",), claims=_claims)
def embedding_out(ids: Tensor, weight: Tensor, scale: float, out: Tensor) -> None:
    """`embedding` into `out` [tokens, dim], of ids [tokens]. No checks, no sync: safe under graph
    capture.
    """
    tokens, dim = out.shape
    DECISION.launches(Device.of(ids), tokens=tokens, dim=dim, dtype=weight.dtype, wide_ids=ids.dtype == torch.int64).run(ids, weight, out, scale)


def embedding(ids: Tensor, weight: Tensor, *, scale: float = 1.0, out: Tensor | None = None) -> Tensor:
    """The rows of a table by their ids, times `scale`.

    Args:
        ids: [...]; int32 or int64; stride 1 in the last axis. Copied if its axes do not fold into
            one.
        weight: [vocab, dim]; bf16, fp16 or fp32; on the device of ids; stride 1 in the last axis.
        scale: factor of the rows; sqrt(dim) for Gemma.
        out: where the result goes: contiguous, shape, dtype and device of the result, no element in
            common with an input; default a new tensor.
    Returns: [..., dim], contiguous, dtype of weight. If an id is below 0 or at least vocab, its row
        is NaN, and nothing outside the table is read. Empty for empty ids, with nothing launched.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_tensor(ids, "ids", dtypes=(torch.int32, torch.int64))
    check_tensor(weight, "weight", ndim=2, dtypes=FLOATS, like=ids)
    if weight.shape[0] == 0:
        raise argument_error("weight.shape[0]", "at least 1", 0)
    check_finite(scale, "scale")
    out = out_or_new(out, (*ids.shape, weight.shape[1]), weight.dtype, ids, weight)
    if out.numel():
        embedding_out(ids.reshape(-1), weight, scale, out.view(-1, weight.shape[1]))
    return out
