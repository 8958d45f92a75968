"""Prepares logits for sampling: penalties for tokens of a text, biases, and a grammar's mask.

    x = logits[r, j]
    x = x / repetition if x > 0 else x * repetition      where token j stands in prompt or answer
    x = x - presence - frequency * n                     where it stands n > 0 times in the answer
    out[r, j] = x + bias[r, j], and -inf where the mask's bit is 0

    counts[r, j] holds n in its low 31 bits, and the sign bit (PROMPT) if the prompt has the token.
    Token j is bit j % 32 of word j // 32 of the mask.

Source    Keskar et al. 2019, arXiv:1909.05858, section 4.1 (repetition); OpenAI's API reference
          (presence, frequency, bias); xgrammar and llguidance (the mask's bits).
Numerics  fp32, not rounded again: `sample` and `argmax` take it. x / repetition is a product with
          1 / repetition.
Bound     Memory: logits, counts and biases read once, out written once.
"""

import math
from dataclasses import dataclass
from typing import Any, Optional

import cuda.tile as ct
import torch
from torch import Tensor

from ..launch import FLOATS, Cost, Device, Launch, argument_error, check_tensor, next_pow2, out_or_new, torch_op
from ..launch.values import Claims, finite, no_nan, positive
from ..select import Choices, Work
from .common.pdl import pdl_overlap
from .common.rows import CPU_TILE, TILE_TIE, grid_fits, stream
from .common.tiles import ZERO, load_masked

PROMPT = -(2**31)  # what `counts` holds of a token that stands in the prompt alone
WORD = 32  # bits of the mask


def reference(
    logits: Tensor,
    counts: Tensor | None = None,
    *,
    repetition: Tensor | None = None,
    presence: Tensor | None = None,
    frequency: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """The definition, at least in fp32."""
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))

    def column(value: Tensor) -> Tensor:
        return value.reshape(-1, 1).to(x.dtype)

    if counts is not None:
        times = counts & (2**31 - 1)
        if repetition is not None:
            x = torch.where(counts == 0, x, torch.where(x > 0, x / column(repetition), x * column(repetition)))
        if presence is not None:
            x = torch.where(times > 0, x - column(presence), x)
        if frequency is not None:
            x = torch.where(times > 0, x - column(frequency) * times, x)
    if bias is not None:
        x = x + bias
    if mask is not None:
        bits = (mask[..., None] >> torch.arange(WORD, device=mask.device)) & 1
        x = torch.where(bits.flatten(-2)[:, : x.shape[1]].bool(), x, -torch.inf)
    return x


@dataclass(frozen=True, slots=True)
class Problem:
    """What a plan may depend on.

    shared: of inputs() alone, one bias and one mask for all rows.
    """

    rows: int
    cols: int
    dtype: torch.dtype
    repetition: bool = False
    presence: bool = False
    frequency: bool = False
    bias: bool = False
    mask: bool = False
    shared: bool = False

    @property
    def counts(self) -> bool:
        return self.repetition or self.presence or self.frequency

    def cost(self) -> Cost:
        each = self.dtype.itemsize + 4 + 4 * self.counts + (4 * self.bias + self.mask / 8) * (not self.shared)
        return Cost(size_bytes=int(self.rows * self.cols * each), flops=4 * self.rows * self.cols)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        def per_row(given: bool, low: float, high: float) -> Tensor | None:
            return torch.linspace(low, high, self.rows, device=device) if given else None

        rows = 1 if self.shared else self.rows
        counts = torch.randint(0, 4, (self.rows, self.cols), dtype=torch.int32, device=device) if self.counts else None
        if counts is not None:
            counts = torch.where(torch.randint(0, 3, counts.shape, device=device) == 0, counts | PROMPT, counts).int()
        words = torch.randint(-(2**31), 2**31, (rows, -(-self.cols // WORD)), device=device).int() if self.mask else None
        return {
            "logits": 3 * torch.randn(self.rows, self.cols, dtype=self.dtype, device=device),
            "counts": counts,
            "repetition": per_row(self.repetition, 0.8, 1.5),
            "presence": per_row(self.presence, -1.0, 1.0),
            "frequency": per_row(self.frequency, 0.0, 0.5),
            "bias": torch.randn(rows, self.cols, device=device) if self.bias else None,
            "mask": words,
        }


@dataclass(frozen=True, slots=True)
class Config:
    """How the elements are tiled.

    tile: columns of a tile; a power of two, at least WORD.
    tiles: of a block, all loaded before the first is stored.
    latency: prefetch hint of the loads, 1 to 10.
    num_worker_warps: warps that compute, 4 or 8.
    """

    tile: int
    tiles: int = 1
    latency: int = 4
    num_worker_warps: int | None = None


LANE = 4  # columns of a thread: 16 bytes of counts, so that no operand is moved between threads
HOW = ((2, 4), (4, 4), (1, 8), (2, 8))  # tiles, warps


def candidates(p: Problem, device: Device) -> list[Config]:
    if device.is_cpu:
        tile = min(max(WORD, next_pow2(p.cols)), CPU_TILE)
        return [Config(tile), Config(max(WORD, tile // 8), 3)]
    return [Config(LANE * 32 * warps, tiles, num_worker_warps=warps) for tiles, warps in HOW]


def _blocks(p: Problem, c: Config) -> int:
    return p.rows * -(-p.cols // (c.tile * c.tiles))


def legal(p: Problem, c: Config, device: Device) -> bool:
    return grid_fits(_blocks(p, c))


def work(p: Problem, c: Config, device: Device) -> Work:
    return stream(p, c, device, _blocks(p, c), c.tile * c.tiles, held=3, operations=10)


CHOICES = Choices("adjust_logits", candidates, legal, work, tie=TILE_TIE)
space = CHOICES.space
GIVEN = ("repetition", "presence", "frequency", "bias", "mask")


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """Grid and compile-time constants of one launch."""
    constants = {f"has_{name}": getattr(p, name) for name in GIVEN}
    optional = {name: getattr(p, name) for name in ("counts", *GIVEN)}
    return (Launch.of(adjust_logits_kernel, (_blocks(p, c),), p, c, constants, optional=optional, pdl=True),)


@ct.kernel
def adjust_logits_kernel(
    LOGITS: ct.IndexedWithInt64,
    COUNTS: ct.IndexedWithInt64,
    REPETITION,
    PRESENCE,
    FREQUENCY,
    BIAS: ct.IndexedWithInt64,
    MASK,
    OUT: ct.IndexedWithInt64,
    HAS_REPETITION: ct.Constant[bool],
    HAS_PRESENCE: ct.Constant[bool],
    HAS_FREQUENCY: ct.Constant[bool],
    HAS_BIAS: ct.Constant[bool],
    HAS_MASK: ct.Constant[bool],
    COLS: ct.Constant[int],
    TILE: ct.Constant[int],
    TILES: ct.Constant[int],
    LATENCY: ct.Constant[int],
):
    """TILES tiles of one row. LOGITS, COUNTS, OUT: [rows, COLS]; BIAS: [1 or rows, COLS]; MASK: [1
    or rows, words]; REPETITION, PRESENCE, FREQUENCY: [1 or rows] fp32.

    All loads come first: a division is a branch, which loads behind it would wait for.
    """
    pdl_overlap()
    blocks = ct.cdiv(COLS, TILE * TILES)
    row, first = ct.bid(0) // blocks, ct.bid(0) % blocks * TILES

    def of_row(ARRAY):
        return ct.gather(ARRAY, (min(row, ARRAY.shape[0] - 1),), check_bounds=False)

    def part(ARRAY, j, WHOLE):
        return load_masked(ARRAY, (min(row, ARRAY.shape[0] - 1), j), (1, TILE), ZERO, WHOLE, LATENCY, False)

    def bits(j):
        # A word for each four columns, which lie in one thread.
        column = min(j * TILE + LANE * ct.arange(TILE // LANE, dtype=ct.int32), COLS - 1)
        words = ct.gather(MASK, (min(row, MASK.shape[0] - 1), column // WORD), check_bounds=False)
        words = (words >> (column % WORD)).reshape((TILE // LANE, 1))
        return ((words >> ct.arange(LANE, dtype=ct.int32).reshape((1, LANE))) & 1).reshape((1, TILE))

    def operands(j, WHOLE):
        x, counts, bias, allowed = part(LOGITS, j, WHOLE), 0, 0.0, 1
        if HAS_REPETITION or HAS_PRESENCE or HAS_FREQUENCY:
            counts = part(COUNTS, j, WHOLE)
        if HAS_BIAS:
            bias = part(BIAS, j, WHOLE)
        if HAS_MASK:
            allowed = bits(j)
        return x, counts, bias, allowed

    def penalties():
        divisor, factor, presence, frequency = 1.0, 1.0, 0.0, 0.0
        if HAS_REPETITION:
            factor = of_row(REPETITION)
            divisor = 1.0 / factor
        if HAS_PRESENCE:
            presence = of_row(PRESENCE)
        if HAS_FREQUENCY:
            frequency = of_row(FREQUENCY)
        return divisor, factor, presence, frequency

    def adjusted(x, counts, bias, allowed, divisor, factor, presence, frequency):
        x = x.astype(ct.float32)
        if HAS_REPETITION:
            x = ct.where(counts == 0, x, x * ct.where(x > 0.0, divisor, factor))
        if HAS_PRESENCE:
            x = x - ct.where(counts & 0x7FFFFFFF > 0, presence, 0.0)
        if HAS_FREQUENCY:
            x = x - frequency * (counts & 0x7FFFFFFF).astype(ct.float32)
        if HAS_BIAS:
            x = x + bias
        return ct.where(allowed == 1, x, -math.inf) if HAS_MASK else x

    def all_tiles(WHOLE):
        loaded: tuple = ()
        for n in ct.static_iter(range(TILES)):
            loaded = (*loaded, operands(first + n, WHOLE))
        given = penalties()
        for n in ct.static_iter(range(TILES)):
            y = adjusted(*loaded[n], *given)
            if WHOLE:
                ct.store(OUT, (row, first + n), y, check_bounds=False, allow_tma=False)
            elif (first + n) * TILE < COLS:
                ct.store(OUT, (row, first + n), y, allow_tma=False)

    if (first + TILES) * TILE <= COLS:
        all_tiles(True)
    else:
        all_tiles(False)


DECISION = CHOICES.decision(Problem, plan, ("logits", "counts", *GIVEN, "out"))


def _claims(repetition: Tensor | None, presence: Tensor | None, frequency: Tensor | None, bias: Tensor | None) -> Claims:
    yield from positive("repetition", repetition)
    yield from no_nan("presence", presence)
    yield from finite("frequency", frequency)
    yield from no_nan("bias", bias)


@torch_op(mutates=("out",), claims=_claims)
def adjust_logits_out(
    logits: Tensor,
    counts: Optional[Tensor],
    repetition: Optional[Tensor],
    presence: Optional[Tensor],
    frequency: Optional[Tensor],
    bias: Optional[Tensor],
    mask: Optional[Tensor],
    out: Tensor,
) -> None:
    """`adjust_logits` into `out`; penalties [1] or [rows]. No checks, no sync: safe under graph
    capture.
    """
    rows, cols = logits.shape
    given = dict(zip(GIVEN, (repetition, presence, frequency, bias, mask), strict=True))
    launches = DECISION.launches(
        Device.of(logits), rows=rows, cols=cols, dtype=logits.dtype, **{name: value is not None for name, value in given.items()}
    )
    launches.run(logits, counts, repetition, presence, frequency, bias, mask, out)


def adjust_logits(
    logits: Tensor,
    counts: Tensor | None = None,
    *,
    repetition: Tensor | None = None,
    presence: Tensor | None = None,
    frequency: Tensor | None = None,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Applies penalties, biases and a mask to logits, in one pass before `sample` or `argmax`.

    Args:
        logits: [rows, cols]; bf16, fp16 or fp32; stride 1 in the last axis.
        counts: [rows, cols] int32: how often each token occurs in the answer so far, plus PROMPT
            (the sign bit) if it occurs in the prompt. Required with penalties.
        repetition: [] or [rows] fp32, above 0: for tokens in the prompt or the answer, divides
            positive logits and multiplies negative ones.
        presence: [] or [rows] fp32: subtracted from the logits of tokens in the answer.
        frequency: [] or [rows] fp32, finite: subtracted once for each occurrence in the answer.
        bias: [1 or rows, cols] fp32, stride 1 in the last axis: added.
        mask: [1 or rows, ceil(cols / 32)] int32, stride 1 in the last axis: the logit of a token
            becomes -inf if its bit is 0.
        out: where the result goes: contiguous, fp32, shape and device of logits, no element in
            common with an input; default a new tensor.
    Returns: [rows, cols] fp32. Empty without rows, with nothing launched.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_tensor(logits, "logits", ndim=2, dtypes=FLOATS)
    rows, cols = logits.shape
    if cols == 0:
        raise argument_error("logits.shape[1]", "at least 1", 0)
    penalties = {"repetition": repetition, "presence": presence, "frequency": frequency}
    tables = {"counts": (counts, torch.int32, cols), "bias": (bias, torch.float32, cols), "mask": (mask, torch.int32, -(-cols // WORD))}
    for name, (table, dtype, wide) in tables.items():
        if table is not None:
            check_tensor(table, name, ndim=2, dtypes=(dtype,), like=logits)
            wanted = {(rows, wide)} if name == "counts" else {(rows, wide), (1, wide)}
            if tuple(table.shape) not in wanted:
                raise argument_error(f"{name}.shape", " or ".join(map(str, sorted(wanted))), tuple(table.shape))
    for name, value in penalties.items():
        if value is not None:
            check_tensor(value, name, dtypes=(torch.float32,), like=logits)
            if value.dim() and value.shape != (rows,):
                raise argument_error(f"{name}.shape", f"() or ({rows},)", tuple(value.shape))
    if (counts is None) != all(value is None for value in penalties.values()):
        raise argument_error(
            "counts", "given with repetition, presence or frequency, and only then", type(counts).__name__ if counts is not None else None
        )
    out = out_or_new(out, (rows, cols), torch.float32, logits, counts, *penalties.values(), bias, mask)
    if rows:
        flat = (None if value is None else value.reshape(-1) for value in penalties.values())
        adjust_logits_out(logits, counts, *flat, bias, mask, out)
    return out
