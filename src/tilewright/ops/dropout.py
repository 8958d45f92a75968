"""Dropout: out[i] = x[i] / (1 - p) where word[i] >= p * 2**32, else 0

    word[i] is word i % 4 of Philox4x32-10 with the counter i // 4 + offset (64 bits, the upper half
    of the counter is 0) and the key seed, i the row-major index of the element. It depends on no
    tile size, so the gradient is `dropout` of the output's gradient with the same p, seed and
    offset: no mask is stored.

Source    Srivastava et al. 2014, "Dropout", section 4, scaled when training; Salmon et al. 2011
          (Philox).
Numerics  Product in fp32, rounded once.
Bound     Memory: x read once, out written once. Ten rounds of Philox make four words: about 19
          instructions an element on sm_90.
"""

import math
from dataclasses import dataclass
from typing import Any, Optional

import cuda.tile as ct
import torch
from torch import Tensor

from ..launch import FLOATS, Cost, Device, Launch, argument_error, check_number, check_tensor, next_pow2, out_or_new, torch_op
from ..select import Choices, Work
from .common.philox import low_high, one_of_four, philox, philox_reference, split_words
from .common.rows import CPU_TILE, TILE_TIE, launchable, stream
from .common.tiles import ZERO


def reference(x: Tensor, p: float, seed: Tensor, offset: Tensor | None = None) -> Tensor:
    """The definition."""
    index = torch.arange(x.numel(), device=x.device)
    counter = index // 4 + (0 if offset is None else offset)
    zero = torch.zeros_like(index)
    # [4, x.numel()]
    words = torch.stack(philox_reference((*split_words(counter), zero, zero), split_words(seed)))
    word = words.gather(0, (index % 4)[None]).view(x.shape)
    # By integers: beside a float the words would be rounded to fp32, and 2**31 - 14 be 2**31.
    return torch.where(word >= math.ceil(p * 2.0**32), x * (1.0 / (1.0 - p) if p < 1 else 0.0), 0.0)


@dataclass(frozen=True, slots=True)
class Problem:
    """What a plan may depend on. p is a runtime value, and here for inputs()."""

    size: int
    dtype: torch.dtype
    has_offset: bool = True
    p: float = 0.1
    clears: bool = False  # p is so near 1 that no word is kept

    def cost(self) -> Cost:
        return Cost(size_bytes=2 * self.size * self.dtype.itemsize, flops=self.size)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        return {
            "x": torch.randn(self.size, dtype=self.dtype, device=device),
            "p": self.p,
            "seed": torch.tensor(0x0123_4567_89AB_CDEF, device=device),
            # the counter carries into its second word
            "offset": torch.tensor(2**32 - 5, device=device) if self.has_offset else None,
        }


@dataclass(frozen=True, slots=True)
class Config:
    """How the elements are tiled.

    tile: elements of a tile; a power of two, at least 4.
    persistent: a block takes many tiles; otherwise it has one.
    latency: prefetch hint of the loads, 1 to 10.
    occupancy: resident blocks per SM.
    num_worker_warps: warps that compute, 4 or 8.
    """

    tile: int
    persistent: bool = False
    latency: int = 4
    occupancy: int | None = None
    num_worker_warps: int | None = None


# Loads of 16 bytes of a thread, warps; persistent, latency, occupancy. Best first on an H200. An
# occupancy makes the compiler take 56 registers instead of 126; each load then follows the store
# before.
TILES = (
    *((2, 4, False, 4, None), (1, 4, False, 4, None), (4, 4, False, 4, None), (2, 8, False, 4, None), (1, 8, False, 4, None)),
    *((4, 8, False, 4, None), (4, 4, False, 4, 5), (2, 4, False, 4, 8), (2, 4, True, 4, 6), (2, 8, True, 4, 3), (1, 8, True, 4, 4)),
    (2, 4, True, 2, 8),
)
OPERATIONS = 28  # on an element; most of them are Philox


def candidates(p: Problem, device: Device) -> list[Config]:
    if device.is_cpu:
        tile = min(max(4, next_pow2(p.size)), CPU_TILE)
        return [Config(tile), Config(max(4, tile // 8), persistent=True, occupancy=1)]
    return [
        Config(loads * warps * 512 // p.dtype.itemsize, persistent, latency, occupancy, warps)
        for loads, warps, persistent, latency, occupancy in TILES
    ]


def legal(p: Problem, c: Config, device: Device) -> bool:
    return launchable(c, ct.cdiv(p.size, c.tile), device)


def work(p: Problem, c: Config, device: Device) -> Work:
    """Tiles of x, each with four words of noise for four elements."""
    return stream(p, c, device, ct.cdiv(p.size, c.tile), c.tile, held=3, operations=OPERATIONS)


CHOICES = Choices("dropout", candidates, legal, work, tie=TILE_TIE)
space = CHOICES.space


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """Grid and compile-time constants of one launch."""
    tiles = ct.cdiv(p.size, c.tile)
    blocks = min(tiles, device.sms * (c.occupancy or 1)) if c.persistent else tiles
    return (Launch.of(dropout_kernel, (blocks,), p, c, optional={"offset": p.has_offset}),)


@ct.kernel
def dropout_kernel(
    X: ct.IndexedWithInt64,
    OUT: ct.IndexedWithInt64,
    SEED,
    OFFSET,
    limit: int,
    scale: float,
    HAS_OFFSET: ct.Constant[bool],
    CLEARS: ct.Constant[bool],
    PERSISTENT: ct.Constant[bool],
    TILE: ct.Constant[int],
    LATENCY: ct.Constant[int],
):
    """Tiles of TILE elements in order. X, OUT: [size]; SEED, OFFSET: [1] int64.

    limit: the least word that is kept, as the int32 of its bits. CLEARS: there is none.
    """
    least = ct.bitcast(ct.astype(limit, ct.int32), ct.uint32)
    key = low_high(ct.load(SEED, (0,), ()))
    first = ct.arange(TILE // 4, dtype=ct.int64)
    if HAS_OFFSET:
        first = first + ct.load(OFFSET, (0,), ())

    def compute(index, whole):
        # Of a shape that is no multiple of 16 bytes the compiler would load all tiles by elements.
        if whole:
            x = ct.load(X.slice(0, 0, X.shape[0] // TILE * TILE), (index,), (TILE,), check_bounds=False, latency=LATENCY, allow_tma=False)
        else:
            x = ct.load(X, (index,), (TILE,), padding_mode=ZERO, latency=LATENCY, allow_tma=False)
        counter = first + ct.astype(index, ct.int64) * (TILE // 4)
        zero = ct.zeros((TILE // 4, 1), ct.uint32)
        low, high = low_high(counter.reshape((TILE // 4, 1)))
        words = philox(low, high, zero, zero, *key)
        keep = one_of_four(words) >= least  # [TILE / 4, 4]
        if CLEARS:
            keep = keep & False
        y = ct.where(keep, x.reshape((TILE // 4, 4)).astype(ct.float32) * scale, 0.0).astype(OUT.dtype)
        if whole:
            ct.store(OUT.slice(0, 0, OUT.shape[0] // TILE * TILE), (index,), y.reshape((TILE,)), check_bounds=False, allow_tma=False)
        else:
            ct.store(OUT, (index,), y.reshape((TILE,)), allow_tma=False)

    def one_tile(index):
        if ct.astype(index + 1, ct.int64) * TILE <= X.shape[0]:
            compute(index, True)
        else:
            compute(index, False)

    if PERSISTENT:
        for index in range(ct.bid(0), ct.cdiv(X.shape[0], TILE), ct.num_blocks(0)):
            one_tile(index)
    else:
        one_tile(ct.bid(0))


DECISION = CHOICES.decision(Problem, plan, ("x", "out", "seed", "offset", "limit", "scale"), any_length=True)


@torch_op(mutates=("out",))
def dropout_out(x: Tensor, seed: Tensor, offset: Optional[Tensor], p: float, out: Tensor) -> None:
    """`dropout` into `out`; both [size] and contiguous, seed and offset [1]. No checks, no sync:
    safe under graph capture.
    """
    # exact: words are integers, and the product only moves the exponent
    limit = math.ceil(p * 2.0**32)
    launches = DECISION.launches(Device.of(x), size=x.shape[0], dtype=x.dtype, has_offset=offset is not None, clears=limit == 2**32)
    launches.run(x, out, seed, offset, limit - 2**32 if limit >= 2**31 else limit, 1.0 / (1.0 - p) if p < 1 else 0.0)


def dropout(x: Tensor, p: float, seed: Tensor, offset: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """Zeroes each element with probability p and scales the others by 1 / (1 - p). Applied to a
    gradient with the same seed and offset, it is its own backward.

    Args:
        x: any shape; bf16, fp16 or fp32; stride 1 in the last axis. Copied if it is not contiguous.
        p: probability of a zero, 0 to 1.
        seed: [] int64 on the device of x, read when the kernel runs: any value.
        offset: [] int64 likewise; default 0. A call uses ceil(x.numel() / 4) counters from offset
            on. Advance offset by this number to get fresh noise with the same seed.
        out: where the result goes: contiguous, shape, dtype and device of the result, no element in
            common with an input; default a new tensor.
    Returns: a contiguous tensor shaped like x. Empty for an empty x, with nothing launched.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_tensor(x, "x", dtypes=FLOATS)
    check_number(p, "p")
    if not 0.0 <= p <= 1.0:
        raise argument_error("p", "0 to 1", p)
    for name, given in (("seed", seed), *(() if offset is None else (("offset", offset),))):
        check_tensor(given, name, shape=(), dtypes=(torch.int64,), like=x)
    out = out_or_new(out, x.shape, x.dtype, x, seed, offset)
    if out.numel():
        dropout_out(x.contiguous().view(-1), seed.view(1), None if offset is None else offset.view(1), p, out.view(-1))
    return out
