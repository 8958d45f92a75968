"""Which configs of `matmul` are worth timing on which device, the most promising first.

The tables below hold the tiles that compile without spilling registers on their architecture (the compile report checks it); a small model of
where the time goes orders them. What the model cannot see is left to the tuner.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from ...launch import Device, next_pow2
from .decision import Config, Problem

MOST_CONFIGS = 40
SKINNY = 64  # rows of a up to which the product is bound by reading b
MOST_DOT_ROWS = 4

# tile_m, tile_n, tile_k, num_ctas, occupancy, num_worker_warps
Tile = tuple[int, int, int, int, int, int | None]


def space(p: Problem, device: Device) -> list[Config]:
    """Every config worth timing on `device`, in the order of `estimate_us`; all are legal."""
    if device.is_cpu:
        return list(_cpu_configs(p))
    legal = (c for c in _configs(p, device) if not c.stream_k or c.shared_tiles(p, device))
    found = sorted(dict.fromkeys(legal), key=lambda c: estimate_us(p, c, device))
    # Depth of the load pipeline and width of a band of tiles, for the best of them.
    best = [c for c in found if not c.dot][: 6 if p.m > SKINNY else 4]
    changes = ({"latency": 4}, {"group": 4}, {"group": 16}) if p.m > SKINNY else ({"latency": 10},)
    variants = [replace(c, **change) for c in best for change in changes]
    return (found[: MOST_CONFIGS - len(variants)] + variants)[:MOST_CONFIGS]


# --- the model

L2_BYTES_PER_US = 75_000.0  # what one SM can draw from L2
MEMORY_BYTES_PER_US = 50_000.0  # what one SM can draw from memory
START_US = 2.0  # launch, and filling the pipeline
CLUSTER_US = 0.5  # blocks of a cluster start and end together
TILE_US = 0.7  # writing a tile out while the tensor cores wait
REDUCE_US = 2.5  # the second launch of stream-K


def estimate_us(p: Problem, c: Config, device: Device) -> float:
    """Time of a config: the busiest SM's steps at the rate of its tensor cores or of L2, or the memory traffic of the whole, plus overheads.

    An SM's share of memory bandwidth is no limit of its own: where few SMs read, each reads faster, up to what it can draw.
    """
    sms_per_block = (c.num_ctas or 1) / c.occupancy
    rate = device.tflops * 1e6 / device.sms * sms_per_block * _math_rate(p, c)
    height, width = (c.tile_n, max(c.tile_m, 32)) if c.weights_first else (c.tile_m, max(c.tile_n, 32))
    step_bytes = (min(c.tile_m, p.m) + c.tile_n) * c.tile_k * p.dtype.itemsize
    fresh_bytes = c.tile_n * c.tile_k * p.dtype.itemsize if p.m <= c.tile_m else 0
    math_us = 2 * height * width * c.tile_k / rate
    load_us = max(step_bytes / L2_BYTES_PER_US, fresh_bytes / MEMORY_BYTES_PER_US) / sms_per_block
    step_us = max(math_us, load_us) + 0.1 * min(math_us, load_us)

    tiles, steps, blocks, shared = c.tiles(p), c.steps(p), c.blocks(p, device), c.shared_tiles(p, device)
    rounds = -(-(tiles - shared) // blocks)
    run_us = rounds * (steps * step_us + TILE_US)
    extra_us = START_US + CLUSTER_US * ((c.num_ctas or 1) - 1)
    if shared:
        share = -(-shared * steps // blocks)
        run_us += share * step_us + TILE_US * -(-share // steps)
        partial_bytes = min(shared + blocks, 2 * blocks) * c.tile_m * c.tile_n * 4
        extra_us += REDUCE_US + 2 * partial_bytes / (L2_BYTES_PER_US * device.sms / 2)
        run_us *= 1.04  # two epilogues in one kernel; also, nearly even is better left whole
    memory_us = p.cost().size_bytes / (device.memory_gbs * 1e3)
    return extra_us + max(run_us, memory_us) + 0.15 * min(run_us, memory_us)


def _math_rate(p: Problem, c: Config) -> float:
    """Multiply-add rate of a config's inner loop, over the bf16 tensor cores'."""
    if c.dot:
        return c.tile_m / (c.tile_m + 1) / 24  # one conversion for tile_m multiply-adds
    if p.dtype is torch.float32:
        return 1 / 2 if p.tf32 else 1 / 32
    return 1 / 4 if not c.weights_first and c.tile_m < 64 else 1.0


# --- the tables

_HOPPER: tuple[Tile, ...] = (
    (256, 256, 64, 2, 1, 8),
    (128, 256, 64, 1, 1, 8),
    (256, 128, 64, 2, 1, 8),
    (128, 256, 64, 2, 1, 8),
    (128, 256, 128, 2, 1, 8),
    (128, 128, 64, 1, 1, 8),
    (128, 128, 128, 1, 1, 8),
    (128, 128, 128, 2, 1, 8),
    (256, 64, 64, 1, 1, 8),
    (64, 256, 64, 1, 1, 8),
    (64, 256, 128, 1, 1, 8),
    (64, 128, 128, 1, 1, 8),
    (64, 128, 64, 1, 1, 4),
    (128, 64, 64, 1, 2, 4),
    (64, 64, 128, 1, 2, 4),
)
_HOPPER_WHOLE: tuple[Tile, ...] = ((256, 128, 64, 1, 1, 8),)  # spills where stream-K adds a second epilogue
_HOPPER_NARROW: tuple[Tile, ...] = (
    (64, 16, 512, 1, 1, 4),
    (64, 16, 256, 1, 2, 4),
    (64, 32, 256, 1, 1, 4),
    (64, 32, 256, 1, 2, 4),
    (64, 32, 512, 1, 1, 4),
    (64, 32, 128, 1, 2, 4),
    (64, 64, 256, 1, 1, 4),
    (64, 64, 128, 1, 2, 4),
    (64, 64, 256, 2, 1, 4),
    (64, 64, 128, 2, 1, 4),
    (64, 128, 128, 4, 1, 4),
)
_HOPPER_NARROW_16: tuple[Tile, ...] = (
    (16, 32, 256, 1, 1, 4),
    (16, 32, 256, 1, 2, 4),
    (16, 32, 512, 1, 1, 4),
    (16, 64, 256, 1, 1, 4),
    (16, 64, 256, 1, 2, 4),
    (16, 64, 128, 1, 2, 4),
)
_HOPPER_WEIGHTS_FIRST: tuple[Tile, ...] = (  # tile_m: the rows of a, rounded up
    (0, 64, 256, 1, 1, 4),
    (0, 64, 256, 1, 2, 4),
    (0, 64, 128, 1, 2, 4),
    (0, 64, 512, 1, 1, 4),
    (0, 128, 128, 1, 1, 8),
    (0, 128, 256, 1, 1, 8),
    (0, 128, 128, 1, 2, 4),
    (0, 128, 64, 1, 2, 4),
    (0, 256, 64, 1, 1, 8),
    (0, 256, 128, 1, 1, 8),
    (0, 256, 128, 2, 1, 8),
)
_DOT: dict[int, tuple[Tile, ...]] = {
    1: ((1, 8, 1024, 1, 1, 8), (1, 8, 512, 1, 1, 4), (1, 4, 1024, 1, 2, 4), (1, 8, 512, 1, 2, 4)),
    2: ((2, 8, 1024, 1, 1, 8), (2, 4, 1024, 1, 1, 8), (2, 8, 512, 1, 2, 8), (2, 4, 512, 1, 2, 4)),
    4: ((4, 8, 512, 1, 1, 8), (4, 4, 1024, 1, 1, 8), (4, 4, 512, 1, 2, 8), (4, 4, 512, 1, 1, 4)),
}
_AMPERE: tuple[Tile, ...] = (
    (128, 128, 32, 1, 2, None),
    (128, 64, 64, 1, 2, None),
    (64, 128, 64, 1, 2, None),
    (64, 64, 64, 1, 2, None),
)
_AMPERE_SKINNY: tuple[Tile, ...] = ((16, 32, 256, 1, 2, None), (16, 64, 128, 1, 2, None), (64, 64, 64, 1, 2, None))
_BLACKWELL: tuple[Tile, ...] = (
    (256, 256, 64, 2, 1, None),
    (128, 256, 64, 1, 1, None),
    (256, 128, 64, 2, 1, None),
    (128, 128, 64, 1, 1, None),
    (128, 128, 128, 1, 1, None),
    (128, 64, 128, 1, 1, None),
)
_BLACKWELL_SKINNY: tuple[Tile, ...] = ((64, 32, 256, 1, 1, None), (64, 64, 128, 1, 1, None), (16, 32, 256, 1, 2, None))
_CONSUMER: tuple[Tile, ...] = (
    (128, 64, 64, 1, 2, None),
    (64, 128, 64, 1, 2, None),
    (128, 128, 64, 1, 1, None),
    (64, 64, 64, 1, 2, None),
)
_CONSUMER_SKINNY: tuple[Tile, ...] = ((16, 32, 256, 1, 2, None), (16, 64, 128, 1, 2, None), (64, 64, 64, 1, 2, None))
_NARROW_LOADS: tuple[Tile, ...] = ((64, 64, 32, 1, 1, None), (32, 32, 64, 1, 1, None))

_WIDE = {"sm_80": _AMPERE, "sm_90": _HOPPER, "sm_100": _BLACKWELL, "sm_103": _BLACKWELL, "sm_120": _CONSUMER, "sm_121": _CONSUMER}
_SKINNY = {
    "sm_80": _AMPERE_SKINNY,
    "sm_100": _BLACKWELL_SKINNY,
    "sm_103": _BLACKWELL_SKINNY,
    "sm_120": _CONSUMER_SKINNY,
    "sm_121": _CONSUMER_SKINNY,
}


def _configs(p: Problem, device: Device) -> Iterator[Config]:
    if p.dtype is torch.float32:
        tiles = _tf32_tiles(p, device) if p.tf32 else _float32_tiles(p, device)
        yield from _whole_and_streamed(tiles, latency=3 if _wide_loads(p) and device.arch == "sm_90" else 1)
    elif not _wide_loads(p):
        yield from _whole_and_streamed(_NARROW_LOADS, latency=1)
    else:
        if p.m <= SKINNY:
            yield from _skinny_configs(p, device)
        tallest = max(64, next_pow2(p.m))
        yield from _whole_and_streamed(tile for tile in _WIDE.get(device.arch, _AMPERE) if tile[0] <= tallest)
        if device.arch == "sm_90" and p.m > SKINNY:
            yield from map(_config, _HOPPER_WHOLE)


def _wide_loads(p: Problem) -> bool:
    """Whether rows of both operands start at multiples of 16 bytes: else every element is loaded, and kept in registers, by itself."""
    lengths = p.m if p.trans_a else p.k, p.k if p.trans_b else p.n
    return all(n * p.dtype.itemsize % 16 == 0 for n in lengths)


def _skinny_configs(p: Problem, device: Device) -> Iterator[Config]:
    if p.m <= MOST_DOT_ROWS and p.trans_b and not p.trans_a:
        for tile in _DOT[next_pow2(p.m)]:
            yield _config(tile, dot=True, latency=8)
    if device.arch != "sm_90":
        for tile in _SKINNY.get(device.arch, _AMPERE_SKINNY):
            yield _config(tile, latency=8)
        return
    rows = max(8, next_pow2(p.m))
    for _, *rest in _HOPPER_WEIGHTS_FIRST:
        config = _config((rows, *rest), weights_first=True, latency=8)
        if not (rows == 64 and config.tile_n == 256 and config.num_ctas == 1):  # its transposing epilogue spills
            yield config
        yield replace(config, stream_k=True)
    for tile in (*(_HOPPER_NARROW_16 if p.m <= 16 else ()), *_HOPPER_NARROW):
        yield _config(tile, latency=8)


def _float32_tiles(p: Problem, device: Device) -> tuple[Tile, ...]:
    warps = 8 if device.arch == "sm_90" else None
    if warps and _wide_loads(p):
        return ((64, 128, 8, 1, 1, warps), (64, 64, 16, 1, 1, warps), (32, 64, 16, 1, 1, warps))
    return ((64, 64, 8, 1, 1, warps), (32, 32, 16, 1, 1, None), (32, 32, 8, 1, 1, None))


def _tf32_tiles(p: Problem, device: Device) -> tuple[Tile, ...]:
    warps = 8 if device.arch == "sm_90" else None
    if warps and _wide_loads(p):
        return ((128, 128, 32, 1, 1, warps), (128, 64, 32, 1, 1, warps), (64, 64, 32, 1, 1, warps))
    return ((64, 64, 16, 1, 1, warps),)


def _whole_and_streamed(tiles: Iterable[Tile], **choices) -> Iterator[Config]:
    for tile in tiles:
        yield _config(tile, **choices)
        yield _config(tile, stream_k=True, **choices)


def _config(tile: Tile, **choices) -> Config:
    tile_m, tile_n, tile_k, num_ctas, occupancy, warps = tile
    return Config(tile_m, tile_n, tile_k, num_ctas=num_ctas, occupancy=occupancy, num_worker_warps=warps, **choices)


def _cpu_configs(p: Problem) -> Iterator[Config]:
    """Few, large tiles: each step of the interpreter is a numpy call, and padding is copied and multiplied like data."""
    even = p.n & -p.n  # the largest power of two that divides n
    tile_n = 4096 if p.n >= 1 << 14 else min(max(even, 128), 512)
    yield Config(next_pow2(min(p.m, 512)), min(tile_n, next_pow2(p.n)), next_pow2(min(p.k, 2048)))
