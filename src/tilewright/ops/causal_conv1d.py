"""Causal convolution of each channel over time: out[t] = silu(bias + sum_i weight[i] x[t - width +
1 + i])

In front of a sequence stand the inputs that its state keeps, or zeros. The state then keeps the
last inputs.

Source    The short convolution of Mamba (Gu and Dao 2023, arXiv:2312.00752).
Numerics  Sums and silu in fp32, rounded once. States are copied.
Bound     Memory: x read once, out written once; of one token also the state, read and written.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Optional

import cuda.tile as ct
import torch
from torch import Tensor

from ..launch import (
    FLOATS,
    Cost,
    Device,
    Launch,
    argument_error,
    as_rows,
    check_apart,
    check_bools,
    check_tensor,
    check_writable,
    next_pow2,
    out_or_new,
    torch_op,
)
from ..launch.values import Claims, rising
from ..select import Choices, Work
from .common.attention_tiles import packed_tile
from .common.pdl import pdl_overlap, use_pdl
from .common.rows import CPU_TILE, grid_fits, stream, threads, vector
from .common.sequences import places, starts
from .common.softmax_tiles import check_starts
from .common.tiles import Rows, gated

WIDEST = 8  # inputs of a result
# Of the candidates: tile_m, steps, 16-byte pieces of a thread in a row of a tile, worker warps,
# occupancy.
TILES = (*((16, steps, 0.25, 4, 6) for steps in (4, 3, 6, 2, 12, 1)), (8, 8, 0.25, 4, 6), (32, 2, 0.25, 4, 4))
ONE_TOKEN = ((4, 1, 0.25, 4, None), (1, 1, 0.25, 4, None), (1, 1, 0.5, 4, None), (1, 1, 1, 4, None), (2, 1, 1, 4, None))
OF_START = 250  # operations of a thread before its first tile: weights, addresses


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    silu: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """The definition, not in place, with the roundings of torch's convolution."""
    if cu_seqlens is not None:
        starts = cu_seqlens.tolist()
        out, final = torch.zeros_like(x), None if state is None else state.clone()
        for i, (a, b) in enumerate(pairwise(starts)):
            own = reference(x[None, a:b], weight, bias, state=None if state is None else state[i : i + 1], silu=silu)
            if final is not None:
                final[i] = own[1][0]
            out[a:b] = (own if state is None else own[0])[0]
        return out if final is None else (out, final)
    width, taps = weight.shape[1], 0 if state is None else state.shape[1]
    before = x.new_zeros(len(x), width - 1, x.shape[2]) if state is None else state[:, taps - width + 1 :]
    seen = torch.cat((before, x), 1)
    y = torch.nn.functional.conv1d(seen.mT, weight[:, None], bias, groups=len(weight)).mT if x.shape[1] else x
    y = torch.nn.functional.silu(y) if silu else y
    return y if state is None else (y, torch.cat((state, x), 1)[:, x.shape[1] :].clone())


@dataclass(frozen=True, slots=True)
class Problem:
    """What a plan may depend on.

    tokens: of each sequence; of all sequences together with varlen. taps: inputs that a state
    keeps; 0 without one.
    """

    batch: int
    tokens: int
    channels: int
    dtype: torch.dtype
    width: int = 4
    taps: int = 3
    bias: bool = False
    silu: bool = True
    varlen: bool = False

    @property
    def cols(self) -> int:
        return self.channels

    @property
    def one(self) -> bool:
        """Whether each sequence has one token: a block then reads and writes the state itself."""
        return self.tokens == 1 and not self.varlen

    @property
    def all_tokens(self) -> int:
        return self.tokens if self.varlen else self.batch * self.tokens

    def cost(self) -> Cost:
        rows = 2 * (self.all_tokens + self.batch * self.taps) + self.width
        return Cost(rows * self.channels * self.dtype.itemsize, 2 * self.all_tokens * self.channels * self.width)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, device=device).to(self.dtype)

        sizes = (self.tokens,) if self.varlen else (self.batch, self.tokens)
        options: dict[str, Any] = {"silu": self.silu}
        if self.taps:
            options["state"] = randn(self.batch, self.taps, self.channels)
        if self.varlen:
            options["cu_seqlens"] = starts(self.tokens, self.batch, device)
        bias = randn(self.channels) if self.bias else None
        return {"x": randn(*sizes, self.channels), "weight": randn(self.channels, self.width), "bias": bias, **options}


@dataclass(frozen=True, slots=True)
class Config:
    """Tokens and channels of a tile, the channels a power of two; tiles of a block, one behind the
    other; and compiler hints.
    """

    tile_m: int
    tile_n: int
    steps: int = 1
    occupancy: int | None = None
    num_worker_warps: int | None = None


def candidates(p: Problem, device: Device) -> Iterator[Config]:
    whole, least = next_pow2(p.channels), 1 if p.one else next_pow2(p.width - 1)
    if device.is_cpu:
        for tile_m, tile_n, steps in ((4, CPU_TILE, 3), (2, 128, 1)):
            yield Config(max(least, min(tile_m, next_pow2(p.batch if p.one else p.tokens))), min(whole, tile_n), steps)
        return
    for tile_m, steps, pieces, warps, occupancy in ONE_TOKEN if p.one else TILES:
        yield Config(tile_m, min(whole, int(pieces * 32 * warps * 16 / p.dtype.itemsize)), steps, occupancy, warps)


def _places(p: Problem, c: Config) -> int:
    """Tiles of tokens (see packed_tile), or of sequences of one token each."""
    return -(-p.batch // c.tile_m) if p.one else places(p.tokens, p.batch, c.tile_m * c.steps, p.varlen)


def _columns(p: Problem, c: Config) -> int:
    return -(-p.channels // c.tile_n)


def legal(p: Problem, c: Config, device: Device) -> bool:
    """A grid has a block for each tile, and the first tile of a sequence alone sees its state."""
    return grid_fits(_places(p, c) * _columns(p, c)) and (p.one or c.tile_m >= p.width - 1)


def work(p: Problem, c: Config, device: Device) -> Work:
    """A block reads the rows in front of its tiles too; they lie in L2."""
    rows = c.tile_m * c.steps + p.width - 1
    each = c.tile_n / threads(c)
    return stream(
        p,
        c,
        device,
        _places(p, c) * _columns(p, c),
        rows * c.tile_n,
        registers=32 + each * ((2 * c.tile_m + p.width) * p.dtype.itemsize / 4 + p.width + 4),
        aligned=p.channels * p.dtype.itemsize,
        load=1 / vector(p),
        masked=p.channels % c.tile_n > 0,
        operations=2 * p.width + 4,
        once=OF_START,
        partial=0 if p.one or not p.taps else p.batch * p.taps * p.channels * p.dtype.itemsize,
    )


CHOICES = Choices("causal_conv1d", candidates, legal, work, tie=0.05)
space = CHOICES.space


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """One launch."""
    kernel, grid = one_token_kernel if p.one else causal_conv1d_kernel, (_places(p, c) * _columns(p, c),)
    optional = {"bias": p.bias, "state": p.taps} | ({} if p.one else {"cu_seqlens": p.varlen})
    constants = {"cols": p.channels, "has_bias": p.bias}
    return (Launch.of(kernel, grid, p, c, constants, optional=optional, pdl=use_pdl(p.all_tokens, False)),)


def taps_of(WEIGHT, j, TILE_N, COLS, WIDTH):
    """The weights of tile j of the channels, a row [1, TILE_N] for each input of a result.

    WEIGHT [COLS * WIDTH]. They come as they lie, all weights of a channel in one load.
    """
    across = ct.static_eval(next_pow2(WIDTH))
    if COLS % TILE_N == 0 and WIDTH == across:
        tile = ct.load(WEIGHT, (j,), (TILE_N * across,), check_bounds=False, allow_tma=False)
    else:
        at = ct.arange(TILE_N * across, dtype=ct.int32)
        channel, i = at // across + j * TILE_N, at % across
        tile = ct.gather(WEIGHT, channel * WIDTH + i, mask=(channel < COLS) & (i < WIDTH), padding_value=0, check_bounds=False)
    tile = tile.reshape((TILE_N, across))
    rows: tuple = ()
    for i in ct.static_iter(range(WIDTH)):
        rows = (*rows, ct.extract(tile, (0, i), (TILE_N, 1)).reshape((1, TILE_N)).astype(ct.float32))
    return rows


def bias_of(BIAS, j, TILE_N, HAS_BIAS):
    """[1, TILE_N]: what sums begin with."""
    if HAS_BIAS:
        return ct.load(BIAS, (j,), (TILE_N,), padding_mode=ct.PaddingMode.ZERO, allow_tma=False).reshape((1, TILE_N)).astype(ct.float32)
    return ct.zeros((1, TILE_N), dtype=ct.float32)


def convolved(inputs, first, weights, start, SILU):
    """start + inputs[first] * weights[0] + inputs[first + 1] * weights[1] + .., and the activation
    of that.
    """
    y = start
    for k in ct.static_iter(range(len(weights))):
        y = y + inputs[first + k].astype(ct.float32) * weights[k]
    return gated(y, 1.0, False) if SILU else y


def one_tile(rows):
    """A tile of rows, as many as a power of two."""
    for _ in ct.static_iter(range(6)):
        if len(rows) > 1:
            pairs: tuple = ()
            for i in ct.static_iter(range(len(rows) // 2)):
                pairs = (*pairs, ct.cat((rows[2 * i], rows[2 * i + 1]), 0))
            rows = pairs
    return rows[0]


@ct.kernel
def causal_conv1d_kernel(
    X: Rows,
    WEIGHT,
    BIAS,
    STATE,
    OUT: Rows,
    CU_SEQLENS,
    tokens: int,
    VARLEN: ct.Constant[bool],
    SILU: ct.Constant[bool],
    HAS_BIAS: ct.Constant[bool],
    WIDTH: ct.Constant[int],
    TAPS: ct.Constant[int],
    COLS: ct.Constant[int],
    STEPS: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
):
    """STEPS tiles of TILE_M tokens and TILE_N channels. Grid (runs of tokens * tiles of channels).

    X, OUT [all tokens, COLS]; WEIGHT [COLS * WIDTH]; BIAS [COLS]; STATE [sequences, TAPS, COLS];
    CU_SEQLENS [sequences + 1] int32. tokens: of each sequence without VARLEN. The block of a
    sequence's first tokens, which alone reads the state, also moves it on; no tile is so short that
    another sees it. A tile's rows load while the one before is computed, which leaves its last rows
    in registers.
    """
    pdl_overlap()
    columns = ct.cdiv(COLS, TILE_N)
    j, place = ct.bid(0) % columns, ct.bid(0) // columns
    if VARLEN:
        seq, c = packed_tile(CU_SEQLENS, place, TILE_M * STEPS)
        begin, end = ct.load(CU_SEQLENS, (seq,), ()).astype(ct.int64), ct.load(CU_SEQLENS, (seq + 1,), ()).astype(ct.int64)
    else:
        runs = ct.cdiv(tokens, TILE_M * STEPS)
        seq, c = place // runs, place % runs
        begin, end = ct.astype(seq, ct.int64) * tokens, (ct.astype(seq, ct.int64) + 1) * tokens
    n = ct.astype(end - begin, ct.int32)
    X, OUT = X.slice(0, begin, end), OUT.slice(0, begin, end)

    weights, start = taps_of(WEIGHT, j, TILE_N, COLS, WIDTH), bias_of(BIAS, j, TILE_N, HAS_BIAS)
    channel = (ct.arange(TILE_N, dtype=ct.int32) + j * TILE_N)[None, :]
    there = channel < COLS

    def inputs_at(t):
        """[rows, TILE_N]: the inputs of tokens t [rows, 1], also in front of the sequence."""
        found = ct.gather(X, (t, channel), mask=there & (t >= 0) & (t < n), padding_value=0, check_bounds=False)
        if TAPS > 0:
            kept = ct.gather(STATE, (seq, TAPS + t, channel), mask=there & (t < 0), padding_value=0, check_bounds=False)
            found = ct.where(t < 0, kept, found)
        return found

    def rows_from(first, ROWS):
        """Tiles [1, TILE_N]: a thread has all rows of its channels."""
        rows: tuple = ()
        for i in ct.static_iter(range(ROWS)):
            rows = (*rows, ct.load(X, (first + i, j), (1, TILE_N), check_bounds=False, allow_tma=False))
        return rows

    def at_an_end(tile):
        inputs: tuple = ()
        for i in ct.static_iter(range(WIDTH)):
            inputs = (*inputs, inputs_at(tile * TILE_M - (WIDTH - 1) + i + ct.arange(TILE_M, dtype=ct.int32)[:, None]))
        return convolved(inputs, 0, weights, start, SILU).astype(OUT.dtype)

    def move_state():
        last: tuple = ()
        for i in ct.static_iter(range(TAPS)):
            last = (*last, inputs_at(ct.full((1, 1), n - TAPS + i, dtype=ct.int32)))
        for i in ct.static_iter(range(TAPS)):
            ct.scatter(STATE, (seq, i, channel), last[i], mask=there, check_bounds=False)

    tiles, whole = ct.cdiv(n, TILE_M), n // TILE_M
    first, last = max(c * STEPS, 0), min(c * STEPS + STEPS, tiles)
    inner, outer = max(first, 1), min(last, whole)  # tiles whose inputs all lie in the sequence
    if COLS % TILE_N == 0 and inner < outer:
        before, now = rows_from(inner * TILE_M - (WIDTH - 1), WIDTH - 1), rows_from(inner * TILE_M, TILE_M)
        for tile in range(inner, outer):
            ahead = rows_from(min(tile + 1, outer - 1) * TILE_M, TILE_M)
            inputs = (*before, *now)
            results: tuple = ()
            for i in ct.static_iter(range(TILE_M)):
                results = (*results, convolved(inputs, i, weights, start, SILU).astype(OUT.dtype))
            ct.store(OUT, (tile, j), one_tile(results), check_bounds=False, allow_tma=False)
            before, now = now[TILE_M - (WIDTH - 1) :], ahead
    for tile in range(first, last):
        if COLS % TILE_N > 0 or tile == 0 or tile == whole:
            ct.store(OUT, (tile, j), at_an_end(tile), allow_tma=False)
    if TAPS > 0 and c == 0 and n > 0:
        move_state()


@ct.kernel
def one_token_kernel(
    X: Rows,
    WEIGHT,
    BIAS,
    STATE,
    OUT: Rows,
    SILU: ct.Constant[bool],
    HAS_BIAS: ct.Constant[bool],
    WIDTH: ct.Constant[int],
    TAPS: ct.Constant[int],
    COLS: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
):
    """One token of each of TILE_M sequences, TILE_N channels. Grid (tiles of sequences * tiles of
    channels); arrays as in the other.
    """
    pdl_overlap()
    columns = ct.cdiv(COLS, TILE_N)
    j, place = ct.bid(0) % columns, ct.bid(0) // columns
    seq, channel = place * TILE_M + ct.arange(TILE_M, dtype=ct.int32)[:, None], (ct.arange(TILE_N, dtype=ct.int32) + j * TILE_N)[None, :]
    there = (seq < X.shape[0]) & (channel < COLS)
    inputs: tuple = ()
    for i in ct.static_iter(range(TAPS)):
        inputs = (*inputs, ct.gather(STATE, (seq, i, channel), mask=there, padding_value=0, check_bounds=False))
    if TAPS == 0:
        for _ in ct.static_iter(range(WIDTH - 1)):
            inputs = (*inputs, ct.zeros((TILE_M, TILE_N), dtype=X.dtype))
    inputs = (*inputs, ct.gather(X, (seq, channel), mask=there, padding_value=0, check_bounds=False))
    weights, start = taps_of(WEIGHT, j, TILE_N, COLS, WIDTH), bias_of(BIAS, j, TILE_N, HAS_BIAS)
    y = convolved(inputs, len(inputs) - WIDTH, weights, start, SILU)
    ct.scatter(OUT, (seq, channel), y.astype(OUT.dtype), mask=there, check_bounds=False)
    for i in ct.static_iter(range(TAPS)):
        ct.scatter(STATE, (seq, i, channel), inputs[i + 1], mask=there, check_bounds=False)


DECISION = CHOICES.decision(Problem, plan, ("x", "weight", "bias", "state", "out", "cu_seqlens", "tokens"))


def _claims(x: Tensor, cu_seqlens: Tensor | None) -> Claims:
    yield from rising("cu_seqlens", cu_seqlens, x.shape[0])


@torch_op(mutates=("state", "out"), claims=_claims)
def causal_conv1d_out(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    state: Optional[Tensor],
    cu_seqlens: Optional[Tensor],
    batch: int,
    silu: bool,
    out: Tensor,
) -> None:
    """`causal_conv1d` of x [all tokens, channels], `batch` sequences, into `out`; `state` in place.

    No checks, no sync: safe under graph capture.
    """
    rows, channels = x.shape
    tokens = rows if cu_seqlens is not None else rows // batch
    launches = DECISION.launches(
        Device.of(x),
        batch=batch,
        tokens=tokens,
        channels=channels,
        dtype=x.dtype,
        width=weight.shape[1],
        taps=0 if state is None else state.shape[1],
        bias=bias is not None,
        silu=silu,
        varlen=cu_seqlens is not None,
    )
    launches.run(x, weight.reshape(-1), bias, state, out, cu_seqlens, tokens)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    silu: bool = True,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal convolution of each channel with its own weights, over a prompt or the next tokens.

    Args:
        x: [batch, tokens, channels]; bf16, fp16 or fp32; stride 1 in the last axis. Copied if its
            leading axes do not fold into one.
        weight: [channels, width], dtype and device of x; width 2..8; the last weight belongs to the
            token itself. Copied unless contiguous.
        bias: [channels], likewise; added before the activation.
        state: [batch, taps, channels], likewise, taps from width - 1 to 8, any strides: the inputs
            before these tokens, the newest last. Overwritten with the last inputs so far. Default:
            zeros, and nothing is kept.
        cu_seqlens: [sequences + 1] int32, where each sequence begins and the last one ends. With it
            x is [total_tokens, channels], and state holds one for each sequence.
        silu: apply silu to the result.
        out: where the result goes: contiguous, shape, dtype and device of x, no element in common
            with an input; default a new tensor.
    Returns: a contiguous tensor shaped like x; with a state the tuple (that, state), the latter the
        tensor that it was given.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_bools(silu=silu)
    check_tensor(x, "x", ndim=3 if cu_seqlens is None else 2, dtypes=FLOATS)
    check_tensor(weight, "weight", like=x)
    if weight.dim() != 2 or weight.shape[0] != (channels := x.shape[-1]) or not 2 <= weight.shape[1] <= WIDEST:
        mend = "give a Conv1d's weight[:, 0]" if weight.dim() == 3 else "channels are the last axis of x"
        raise argument_error("weight.shape", f"({x.shape[-1]}, 2..{WIDEST})", f"{tuple(weight.shape)}: {mend}")
    if bias is not None:
        check_tensor(bias, "bias", shape=(channels,), like=x)
    batch = x.shape[0] if cu_seqlens is None else check_starts(cu_seqlens, "cu_seqlens", x)
    if state is not None:
        _check_state(state, x, batch, weight.shape[1])
        check_apart({"state": state}, x=x, weight=weight, bias=bias, cu_seqlens=cu_seqlens)
    out = out_or_new(out, x.shape, x.dtype, x, weight, bias, state, cu_seqlens)
    if out.numel() and batch:
        causal_conv1d_out(as_rows(x), weight, bias, state, cu_seqlens, batch, silu, as_rows(out))
    return out if state is None else (out, state)


def _check_state(state: Tensor, x: Tensor, batch: int, width: int) -> None:
    """Raises TypeError or ValueError unless it keeps what the weights see; any strides."""
    fits = isinstance(state, Tensor) and state.dim() == 3 and width - 1 <= state.shape[1] <= WIDEST
    check_tensor(state, "state", shape=(batch, state.shape[1] if fits else width - 1, x.shape[-1]), like=x, any_strides=True)
    check_writable(state, "state")
