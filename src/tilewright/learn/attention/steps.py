"""The steps of the attention ladder in order, each with the published figures beside it."""

from collections.abc import Callable
from typing import Any

from ...launch import Device, decision_of
from ...ops import attention as finished
from ..ladder import Step
from .decision import Config, Problem
from .large_tiles import fast_math_kernel, longest_first_kernel, short_diagonal_kernel, split_loop_kernel, tuned_kernel
from .small_tiles import basic_kernel, division_kernel, exp2_kernel, latency_kernel, transposed_kernel

# How a tile of 256x128 fits without a spill: tile_m, tile_n, num_ctas, occupancy, num_worker_warps.
# Hopper accumulates in registers; 256x128 scores and 256x128 sums fill those of two blocks of 8
# warps. Data-centre Blackwell accumulates in tensor memory. On other GPUs the rescue is small
# tiles.
_HOLDS: dict[str, tuple[int, int, int | None, int | None, int | None]] = {
    "sm_90": (256, 128, 2, None, 8),
    "sm_100": (256, 128, None, None, None),
    "sm_103": (256, 128, None, None, None),
}
_SMALL = (64, 64, None, 2, None)


def _rescued(kernel: Any, *, short: bool = False) -> Callable[[Problem, Device], Config]:
    def config(p: Problem, device: Device) -> Config:
        tile_m, tile_n, num_ctas, occupancy, warps = _HOLDS.get(device.arch, _SMALL)
        return Config(kernel, tile_m, tile_n, tile_n // 2 if short else 0, num_ctas=num_ctas, occupancy=occupancy, num_worker_warps=warps)

    return config


def _tuned(p: Problem, device: Device) -> Config:
    """What `ops.attention` decides, tables included.

    If that is persistent, the first config of the space that is not.
    """
    same = p.for_library()
    chosen, _ = decision_of(finished).decide(same, device)
    c = next(c for c in (chosen, *finished.space(same, device)) if not c.persistent)
    return Config(tuned_kernel, c.tile_m, c.tile_n, c.tail_n or c.tile_n, c.parts, c.latency, c.num_ctas, c.occupancy, c.num_worker_warps)


_TUTORIAL, _BLOG = "FMHA tutorial, step", "Flash Attention,"
STEPS = (
    Step("basic", "64 queries by 64 keys, every tile masked, exp as it is written", Config(basic_kernel, 64, 64), (f"{_TUTORIAL} 1: basic cuTile",)),
    Step(
        "exp2",
        "exponentials in base 2, which the hardware has; the scale is folded into one fma with the subtraction",
        Config(exp2_kernel, 64, 64),
        (f"{_TUTORIAL} 2: + exp2",),
    ),
    Step(
        "k transposed",
        "k is loaded the way the product needs it, and not turned in registers",
        Config(transposed_kernel, 64, 64),
        (f"{_TUTORIAL} 3: + load order",),
    ),
    Step(
        "latency",
        "hints how many steps ahead the loads of k and v start",
        Config(latency_kernel, 64, 64),
        (f"{_TUTORIAL} 4: + latency hints", f"{_BLOG} baseline 64x64"),
    ),
    Step(
        "occupancy",
        "the same kernel asked to leave room for two blocks on a multiprocessor: one computes while the other waits",
        Config(latency_kernel, 64, 64, occupancy=2),
        (f"{_TUTORIAL} 5: + occupancy 2",),
    ),
    Step(
        "fast division",
        "the last division approximate and without denormals",
        Config(division_kernel, 64, 64, occupancy=2),
        (f"{_TUTORIAL} 6: + approximate division",),
    ),
    Step(
        "the trap",
        "the same kernel with tiles of 256x128: less traffic for each product, but its scores and sums do not fit the registers of 4 warps",
        Config(division_kernel, 256, 128),
        (f"{_BLOG} larger tiles 256x128 (the trap)",),
    ),
    Step(
        "the rescue",
        "exponentials without denormals; and what holds the tile: on Hopper 8 worker warps in each of two blocks, before it and on sm_12x 64x64",
        _rescued(fast_math_kernel),
        (f"{_BLOG} fast math (the rescue)",),
    ),
    Step(
        "loop split", "a loop without a mask up to the diagonal, one with it on the diagonal", _rescued(split_loop_kernel), (f"{_BLOG} K loop split",)
    ),
    Step("longest first", "blocks with most keys start first", _rescued(longest_first_kernel), (f"{_BLOG} block order remapped",)),
    Step("short diagonal", "steps on the diagonal are half as long: fewer scores that no query sees", _rescued(short_diagonal_kernel, short=True)),
    Step(
        "tuned",
        "tiles, hints and halves of weights as ops.attention takes them for this length and GPU",
        _tuned,
        (f"{_BLOG} autotuned", "FMHA tutorial, final", "FMHA causal, TileGym"),
    ),
)
