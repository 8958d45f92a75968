"""Merges attention over several sets of keys.

    out = sum(w out_i) / sum(w)     w = exp(lse_i - max lse)     lse = log(sum exp(lse_i))

Source    Milakov and Gimelshein 2018, arXiv:1805.02867 (the state of a softmax); Ye et al. 2024,
          "Cascade inference" (states as an algebra).
Numerics  Weights, sums and lse in fp32; out rounded once at the end.
Bound     Memory: every state read once, the result written once.
"""

import math
from dataclasses import dataclass
from typing import Any

import cuda.tile as ct
import torch
from torch import Tensor

from ..launch import FLOATS, Cost, Device, Launch, argument_error, check_bools, check_tensor, each_out, next_pow2, out_or_new, torch_op
from ..select import Choices, Work
from .common.rows import grid_fits, stream, threads
from .common.softmax_tiles import FLOOR, LN2, joined
from .common.tiles import LOG2E

MOST_STATES = 64
MOST_COLUMNS = 512
# Of the candidates: elements of a tile, occupancy, worker warps.
SIZES = ((2048, 8, 4), (1024, 8, 4), (2048, None, 4), (1024, None, 4), (512, None, 4), (4096, None, 4), (8192, None, 8))
CPU_SIZES = ((1 << 16, None, None),)


def reference(states: Tensor, states_lse: Tensor, *, base2: bool = False) -> tuple[Tensor, Tensor]:
    """The definition, at least in fp32."""
    wide = torch.promote_types(states.dtype, torch.float32)
    lse = states_lse.to(wide).masked_fill(states_lse == torch.inf, -torch.inf)
    shifted = lse - lse.amax(0).clamp(min=FLOOR)
    weights = shifted.exp2() if base2 else shifted.exp()
    total = weights.sum(0)
    values = states.to(wide).masked_fill((lse == -torch.inf)[..., None], 0.0)
    out = (weights[..., None] * values).sum(0) / total.masked_fill(total == 0, 1.0)[..., None]
    return out.to(states.dtype), lse.amax(0) + (total.log2() if base2 else total.log())


@dataclass(frozen=True, slots=True)
class Problem:
    states: int
    rows: int
    cols: int
    dtype: torch.dtype
    base2: bool = False

    def cost(self) -> Cost:
        rows = (self.states + 1) * self.rows
        return Cost(rows * (self.cols * self.dtype.itemsize + 4), 2 * self.states * self.rows * self.cols)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        states = torch.randn(self.states, self.rows, self.cols, device=device).to(self.dtype)
        lse = 3 * torch.randn(self.states, self.rows, device=device)
        lse[0, ::3] = -torch.inf  # no key in the first set
        return {"states": states, "states_lse": lse, "base2": self.base2}


@dataclass(frozen=True, slots=True)
class Config:
    """How a block merges.

    tile_m: rows of a block.
    latency: prefetch hint of its loads, 1 to 10.
    occupancy, num_worker_warps: compiler hints.
    """

    tile_m: int
    latency: int = 4
    occupancy: int | None = None
    num_worker_warps: int | None = None


def candidates(p: Problem, device: Device) -> list[Config]:
    """Tiles of whole rows."""
    cols, rows = next_pow2(p.cols), next_pow2(p.rows)
    return [Config(max(1, min(size // cols, rows)), 4, *how) for size, *how in (CPU_SIZES if device.is_cpu else SIZES)]


def legal(p: Problem, c: Config, device: Device) -> bool:
    """At an occupancy of 8 a thread has 64 registers: room for 32 bytes of a state."""
    fits = c.occupancy is None or c.tile_m * next_pow2(p.cols) * p.dtype.itemsize <= 4096
    return fits and grid_fits(ct.cdiv(p.rows, c.tile_m))


def work(p: Problem, c: Config, device: Device) -> Work:
    """A block takes state after state; each is a step that waits for its loads."""
    tile, size, blocks = c.tile_m * next_pow2(p.cols), p.dtype.itemsize, ct.cdiv(p.rows, c.tile_m)
    each = tile / threads(c)
    checked = p.cols * c.tile_m != tile or (p.rows % c.tile_m > 0 and blocks <= device.sms)  # they wait for each other
    return stream(
        p,
        c,
        device,
        blocks,
        tile,
        # On sm_90. The compiler unrolls the loop over single 16-byte loads.
        registers=120 if each * size <= 16 else 40 + each * (1.5 + size / 2),
        reads=1 / (p.states + 1),
        steps=p.states,
        serial=max(1.0, each * size / 16) if checked else 1.0,
    )


def family(p: Problem, c: Config) -> str:
    """Operand size, what a thread has of a tile, and the hints."""
    each = c.tile_m * next_pow2(p.cols) // threads(c)
    return f"{p.dtype.itemsize} {each} {threads(c) // 32} {c.occupancy or ''}{'m' * (p.cols != next_pow2(p.cols))}"


CHOICES = Choices("merge_states", candidates, legal, work, family, tie=0.05)
space = CHOICES.space


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """Grid and compile-time constants of one launch."""
    tile_d = next_pow2(p.cols)
    return (Launch.of(merge_states_kernel, (ct.cdiv(p.rows, c.tile_m),), p, c, {"full": tile_d == p.cols, "tile_d": tile_d}),)


@ct.kernel
def merge_states_kernel(
    STATES,
    STATES_LSE,
    OUT,
    LSE,
    BASE2: ct.Constant[bool],
    FULL: ct.Constant[bool],
    TILE_M: ct.Constant[int],
    TILE_D: ct.Constant[int],
    LATENCY: ct.Constant[int],
):
    """TILE_M rows of the result. STATES [states, rows, cols], STATES_LSE [states, rows, 1],
    OUT [rows, cols], LSE [rows, 1].

    FULL: there are TILE_D columns, so a tile of whole rows lies inside.
    """
    i = ct.bid(0)
    to_base2 = 1.0 if BASE2 else LOG2E

    def loaded(s, whole):
        if whole:
            lse = ct.load(STATES_LSE, (s, i, 0), (1, TILE_M, 1), check_bounds=False, latency=LATENCY, allow_tma=False).reshape((TILE_M, 1))
            values = ct.load(STATES, (s, i, 0), (1, TILE_M, TILE_D), check_bounds=False, latency=LATENCY, allow_tma=False)
            return lse, values.reshape((TILE_M, TILE_D)).astype(ct.float32)
        # gathered: as in load_masked
        rows, columns = ct.arange(TILE_M, dtype=ct.int32).reshape((TILE_M, 1)) + i * TILE_M, ct.arange(TILE_D, dtype=ct.int32).reshape((1, TILE_D))
        there = rows < OUT.shape[0]
        lse = ct.gather(STATES_LSE, (s, rows, 0), mask=there, padding_value=-math.inf, check_bounds=False, latency=LATENCY)
        inside = there & (columns < OUT.shape[1])
        values = ct.gather(STATES, (s, rows, columns), mask=inside, padding_value=0, check_bounds=False, latency=LATENCY)
        return lse, values.astype(ct.float32)

    def merge(whole):
        total = ct.zeros((TILE_M, TILE_D), dtype=ct.float32)
        largest = ct.full((TILE_M, 1), FLOOR, dtype=ct.float32)
        weight = ct.zeros((TILE_M, 1), dtype=ct.float32)
        ones = ct.full((TILE_M, 1), 1.0, dtype=ct.float32)
        for s in range(STATES.shape[0]):
            lse, values = loaded(s, whole)
            lse = ct.where(lse == math.inf, -math.inf, lse)
            values = ct.where(lse == -math.inf, 0.0, values)
            total, largest, weight = joined(total, largest, weight, values, lse, ones, to_base2)
        out = total * (1.0 / ct.where(weight == 0.0, 1.0, weight))
        ct.store(OUT, (i, 0), out.astype(OUT.dtype), check_bounds=not whole, allow_tma=False)
        ct.store(LSE, (i, 0), largest + ct.log2(weight) * (1.0 if BASE2 else LN2), check_bounds=not whole, allow_tma=False)

    if not FULL:
        merge(False)
    elif TILE_M == 1:
        merge(True)
    elif i * TILE_M + TILE_M <= OUT.shape[0]:
        merge(True)
    else:
        merge(False)


DECISION = CHOICES.decision(Problem, plan, ("states", "states_lse", "out", "lse"))


@torch_op(mutates=("out", "lse"))
def merge_states_out(states: Tensor, states_lse: Tensor, base2: bool, out: Tensor, lse: Tensor) -> None:
    """`merge_states` of states [states, rows, cols] and states_lse [states, rows] into `out` and
    `lse`.

    No checks, no sync: safe under graph capture.
    """
    count, rows, cols = states.shape
    launches = DECISION.launches(Device.of(states), states=count, rows=rows, cols=cols, dtype=states.dtype, base2=base2)
    launches.run(states, states_lse[..., None], out, lse[..., None])


def merge_states(states: Tensor, states_lse: Tensor, *, base2: bool = False, out: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Merges attention over several disjoint sets of keys into attention over all of them.

    Args:
        states: [states, ..., cols]; bf16, fp16 or fp32; the normalised result of each set; 1..64
            states, 1..512 columns; stride 1 in the last axis.
        states_lse: [states, ...] fp32, stride 1 in the last axis; the log of each softmax
            denominator; -inf (or +inf, as in some libraries) if the set has no key, whose row of
            `states` may then be anything.
        base2: the logs are to base 2, in and out; otherwise natural, as `attention_decode` returns
            them.
        out: where the result goes: (out, lse), contiguous, no element in common with an input or
            each other; default new tensors.
    Returns: the tuple (out [..., cols], lse [...]); 0 and -inf where no set has a key.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_bools(base2=base2)
    check_tensor(states, "states", dtypes=FLOATS)
    if states.dim() < 2:
        raise argument_error("states.dim()", "at least 2", states.dim())
    if not 1 <= states.shape[0] <= MOST_STATES or not 1 <= states.shape[-1] <= MOST_COLUMNS:
        raise argument_error("states.shape", f"1..{MOST_STATES} states of 1..{MOST_COLUMNS} columns", tuple(states.shape))
    check_tensor(states_lse, "states_lse", shape=states.shape[:-1], dtypes=(torch.float32,), like=states)
    merged, lse = each_out(out, "out", "lse")
    merged = out_or_new(merged, states.shape[1:], states.dtype, states, states_lse, name="out[0]")
    lse = out_or_new(lse, states.shape[1:-1], torch.float32, states, states_lse, merged, name="out[1]")
    if merged.numel():
        count, cols = states.shape[0], states.shape[-1]
        merge_states_out(states.reshape(count, -1, cols), states_lse.reshape(count, -1), base2, merged.view(-1, cols), lse.view(-1))
    return merged, lse
