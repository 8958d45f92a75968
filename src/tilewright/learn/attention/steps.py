"""The steps of the attention ladder in order, each with the published figures beside it."""

from collections.abc import Callable
from typing import Any

from ...launch import Device, decision_of
from ...ops import attention as finished
from .. import pictures
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
    Step(
        "basic",
        "64 queries by 64 keys, every tile masked, exp as written",
        Config(basic_kernel, 64, 64),
        (f"{_TUTORIAL} 1: basic cuTile",),
        why=(
            "The scores never go to memory: 16,384 queries by as many keys would be 268 million "
            "numbers for each head. A block keeps one tile of queries and goes through the tiles "
            "of keys. For each row it keeps the largest score so far, and sums relative to it "
            "(online softmax). If a tile has a larger score, a factor rescales the earlier sums, "
            "so the result is exact."
        ),
        picture=pictures.ONLINE_SOFTMAX,
    ),
    Step(
        "exp2",
        "exponentials in base 2, which the hardware has; scale and subtraction are one fma",
        Config(exp2_kernel, 64, 64),
        (f"{_TUTORIAL} 2: + exp2",),
        why=(
            "The hardware computes powers of two, so exp(x) costs a product with log2(e) and an exp2. If the "
            "scale contains log2(e), scaling a score and subtracting the maximum are one fma, and the "
            "exponential is one instruction."
        ),
    ),
    Step(
        "k transposed",
        "k is loaded transposed, as the product needs it, and not permuted in registers",
        Config(transposed_kernel, 64, 64),
        (f"{_TUTORIAL} 3: + load order",),
        why=(
            "The product needs the transpose of k. `order=` in the load names the axes of K in "
            "the order of the tile's axes, so the tile arrives transposed. On Hopper the compiler "
            "already turns `ct.permute` of a loaded tile into such a load: both steps give the "
            "same instructions."
        ),
    ),
    Step(
        "latency",
        "hints tell the compiler how many steps ahead to load k and v",
        Config(latency_kernel, 64, 64),
        (f"{_TUTORIAL} 4: + latency hints", f"{_BLOG} baseline 64x64"),
        why=(
            "A load takes longer than the products of a step. The hint says how slow the compiler "
            "should assume it to be. The compiler then starts it several steps ahead, and each "
            "step ahead is a buffer in shared memory. v is needed after the softmax, so its hint "
            "differs from that of k."
        ),
        picture=pictures.PIPELINE,
    ),
    Step(
        "occupancy",
        "two blocks on an SM: one computes while the other waits",
        Config(latency_kernel, 64, 64, occupancy=2),
        (f"{_TUTORIAL} 5: + occupancy 2",),
        why=(
            "The tensor cores are idle while a block computes its softmax. With two blocks on an "
            "SM, one multiplies while the other computes exponentials. The hint limits the "
            "registers of a thread so that two blocks fit."
        ),
    ),
    Step(
        "fast division",
        "the division at the end is approximate and ignores denormals",
        Config(division_kernel, 64, 64, occupancy=2),
        (f"{_TUTORIAL} 6: + approximate division",),
        why=(
            "A precise division refines the hardware's approximate reciprocal with several more "
            "instructions. The output has 16 bits, so rounding hides what they would add."
        ),
    ),
    Step(
        "the trap",
        "tiles of 256x128: less traffic for each product, but scores and sums do not fit the registers of 4 warps",
        Config(division_kernel, 256, 128),
        (f"{_BLOG} larger tiles 256x128 (the trap)",),
        why=(
            "A larger tile reads fewer bytes for each product, so it should be faster. But "
            "256x128 scores and 256x128 sums are 512 registers in each thread of 4 warps, and a "
            "thread has at most 255. The rest goes to local memory in every step of the loop: see "
            "the stack. Data-centre Blackwell has tensor memory for them. There the published "
            "rates fall too, because a thread needs more registers, so fewer blocks fit on an SM."
        ),
    ),
    Step(
        "the rescue",
        "exponentials without denormals, and room for the tile: on Hopper 8 warps in each of two blocks, on sm_80 and sm_12x 64x64",
        _rescued(fast_math_kernel),
        (f"{_BLOG} fast math (the rescue)",),
        why=(
            "Exact handling of tiny exponentials costs several instructions for every score. "
            "Flushing them to zero is what rescued the large tile in the published figures. "
            "Hopper also needs room: 8 warps halve the registers of a thread, and two blocks that "
            "share the tile halve them again. On sm_80 and sm_12x nothing makes this tile fit, so "
            "the step goes back to 64x64."
        ),
    ),
    Step(
        "loop split",
        "a loop without a mask up to the diagonal, and one with it on the diagonal",
        _rescued(split_loop_kernel),
        (f"{_BLOG} K loop split",),
        why=(
            "Every row sees the tiles before the diagonal whole, and no row sees the tiles after "
            "it. Only tiles on the diagonal need comparisons with the mask. It was the largest "
            "gain of the published steps. Without a causal mask, the second loop has only the "
            "last, partial tile."
        ),
        picture=pictures.CAUSAL_TILES,
    ),
    Step(
        "longest first",
        "blocks with the most keys start first",
        _rescued(longest_first_kernel),
        (f"{_BLOG} block order remapped",),
        why=(
            "The last queries see the most keys, so their blocks take longest. Blocks start in "
            "the order of their index: if the longest start last, the other SMs are idle at the "
            "end. Without a causal mask all blocks are equally long, and nothing changes."
        ),
        picture=pictures.LONGEST_FIRST,
    ),
    Step(
        "short diagonal",
        "steps on the diagonal are half as long: fewer masked scores",
        _rescued(short_diagonal_kernel, short=True),
        why="A step of 128 keys on the diagonal computes many scores only to mask them. Steps of 64 keys compute fewer of these.",
    ),
    Step(
        "tuned",
        "tiles, hints and parts of weights as ops.attention has them for this length and GPU",
        _tuned,
        (f"{_BLOG} autotuned", "FMHA tutorial, final", "FMHA causal, TileGym"),
        why=(
            "1024 queries in tiles of 256 are only four blocks for each head. So short prompts "
            "want small tiles, and long ones large tiles. The weights are computed and rounded in "
            "parts, so that no whole tile of them is held in fp32. With the registers that this "
            "frees, the compiler overlaps the softmax of a step with the products of the next."
        ),
    ),
)
