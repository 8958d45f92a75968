"""Which configs of `matmul` are worth timing on which device, the most promising first.

The tables below hold tiles that compile without spilling registers on their architecture; the compile report checks it. For few rows the order
is the one measured on an H200 (2026-11-21, notes/facts.md); for more it follows `estimate_us`. What neither sees is left to the tuner.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from ...launch import Device, next_pow2
from ..early import whole_tiles
from ..mma_tiles import loads_wide
from ..scaling import FP8, GROUP, Scaling
from .decision import Config, Problem
from .fp8_candidates import fp8_configs
from .gathered_kernel import UNIT

MOST_CONFIGS = 40
SKINNY = 64  # rows of a up to which the product is bound by reading b
MOST_DOT_ROWS = 4
MOST_PARTS = 16

# tile_m, tile_n, tile_k, num_ctas, occupancy, num_worker_warps
Tile = tuple[int, int, int, int, int, int | None]


def space(p: Problem, device: Device) -> list[Config]:
    """Every config worth timing on `device`, the one for an untuned call first; all are legal."""
    if p.dtype in FP8 and not device.has_fp8:
        return []
    configs = _cpu_configs(p) if device.is_cpu else _configs(p, device)
    return [c for c in dict.fromkeys(configs) if _legal(p, c) and not _spills(p, c, device)][:MOST_CONFIGS]


def _spills(p: Problem, c: Config, device: Device) -> bool:
    """Configs that a residual or silu_mul behind the product makes spill (tileiras 13.4; the compile report finds them)."""
    behind = p.residual or p.silu_mul
    if device.arch == "sm_80":
        return behind and (c.persistent or c.tile_m * c.tile_n > 64 * 128)
    return device.arch in ("sm_120", "sm_121") and behind and c.persistent and c.tile_m * c.tile_n > 64 * 128


def _legal(p: Problem, c: Config) -> bool:
    """What the kernels can do: see their docstrings."""
    if p.behind and (c.extra_n or c.split > 1):
        return False
    if p.scaling is Scaling.BLOCK and (c.extra_n or c.tile_k > GROUP):
        return False
    if c.gathered and (p.fused or p.dtype.itemsize != 2 or p.k % UNIT or p.trans_a or not p.trans_b):
        return False
    return not (c.dot and p.dtype in FP8)


def _configs(p: Problem, device: Device) -> Iterator[Config]:
    if p.dtype in FP8:
        yield from fp8_configs(p, device)
    elif p.dtype is torch.float32:
        tiles = _tf32_tiles(p, device) if p.tf32 else _float32_tiles(p, device)
        yield from _ordered(p, device, tiles, latency=3 if _wide_loads(p, device) and device.arch == "sm_90" else 1)
    elif not _wide_loads(p, device):
        yield from _ordered(p, device, _NARROW_LOADS, latency=1)
    elif p.silu_mul and device.arch in ("sm_100", "sm_103"):
        # tileiras 13.4 can't take pairs of columns out of tensor memory ("make_tmem_copy"): tiles that stay in registers.
        yield from (_config(tile, latency=4) for tile in ((32, 128, 128, 1, 1, 8), (32, 128, 64, 1, 1, None), (16, 64, 128, 1, 1, None)))
    else:
        if p.m <= SKINNY:
            yield from _skinny_configs(p, device)
        elif device.arch == "sm_90":
            yield _hopper_default(p, device)
            yield from _uneven(p, device)
            if p.n > 64:  # two blocks of an SM cover each other's start and end: for short k
                yield _config((128, 128, 64, 1, 2, 4), latency=2)
            if _offset_rows(p):
                yield from _gathered(p, device)
        tallest = max(64, next_pow2(p.m))
        fitting = (tile for tile in _WIDE.get(device.arch, _AMPERE) if tile[0] <= tallest)
        yield from _ordered(p, device, fitting, latency=5 if device.arch in ("sm_90", "sm_100", "sm_103") else 3)


def _wide_loads(p: Problem, device: Device) -> bool:
    return loads_wide(device, p.dtype, p.m if p.trans_a else p.k, p.k if p.trans_b else p.n)


def _config(tile: Tile, **choices) -> Config:
    tile_m, tile_n, tile_k, num_ctas, occupancy, warps = tile
    return Config(tile_m, tile_n, tile_k, num_ctas=num_ctas, occupancy=occupancy, num_worker_warps=warps, **choices)


# --- many rows: bound by the tensor cores

# Narrowest first, with the latency hint of each.
_HOPPER_ONE_ROUND: tuple[tuple[Tile, int], ...] = (
    ((64, 16, 256, 1, 1, 4), 8),
    ((64, 32, 256, 1, 1, 4), 8),
    ((64, 64, 128, 1, 1, 8), 6),
    ((64, 128, 64, 1, 1, 4), 5),
    ((128, 128, 64, 1, 1, 4), 5),
)


def _hopper_default(p: Problem, device: Device) -> Config:
    """The narrowest tile that covers the output in one round of blocks; else the one whose rounds cost least.

    Measured on an H200 (2026-11-21, benchmarks/results, notes/LOG.md): a step of k takes an SM the same time in a tile of 128x128 on 4 warps
    and, per element, in one of 256x256 on two blocks; the larger has fewer, longer rounds. 128x192 takes 1.45 times as long as 128x128.
    """
    offset = _offset_rows(p)
    if p.silu_mul:
        return _hopper_gated(p, device)
    for tile, latency in _HOPPER_ONE_ROUND:
        config = _config(tile, latency=latency)
        if config.tiles(p) <= device.sms and not (128 < p.m <= 192 and tile[1] == 128):
            pair = _config((256, 128, 64, 2, 1, 4), latency=5)
            if offset == 2 and tile[:2] == (128, 128) and pair.tiles(p) <= pair.resident(device):
                return pair
            wide = _config((128, 256, 64, 1, 1, 8), latency=4, split=4)
            if offset == 2 and p.k >= 8192 and tile[0] * tile[1] >= 1 << 13 and 4 * wide.tiles(p) <= device.sms and _legal(p, wide):
                return wide
            return config
    uneven = _uneven(p, device)
    if p.m <= 128:  # bound by reading b as much as by the tensor cores: blocks that come and go overlap better than ones that walk
        return uneven[0] if uneven[0].tiles(p) <= device.sms else _config((64, 128, 64, 1, 1, 4))

    if p.m <= 192 and (offset == 2 or p.n <= 8192):
        return _config((64, 128, 64, 1, 2, 4), latency=5)

    def run_us(c: Config, us_per_k: tuple[float, float, float], us_per_tile: float) -> float:
        return _rounds_us(p, c, device, us_per_k[offset], us_per_tile)

    small = _config((128, 128, 64, 1, 1, 4), persistent=not p.bias)  # walking, with a bias, it spills
    large = _config((256, 256, 64, 2, 1, 8), persistent=True)
    wide = _config((128, 256, 64, 1, 1, 8), latency=4, persistent=True)
    costs = [
        # Three tiles that read the same rows of b at different times read them slowly.
        (run_us(small, (7.0e-3 if 256 < p.m <= 384 else 5.39e-3, 6.2e-3, 11.0e-3), 1.0 if small.persistent else 1.5), small),
        (run_us(large, (10.9e-3, 12.0e-3, 12.9e-3), 3.0), large),
        (run_us(wide, (11.2e-3, 12.6e-3, 16.5e-3), 2.0), wide),
    ]
    # These do not walk: few rounds only, one of the narrower ones.
    for c in uneven:
        if c.tiles(p) <= (6 if c.extra_n == 64 else 1) * device.sms:
            slower = (1 - c.extra_n / 64) * 0.6e-3
            costs.append((run_us(c, (7.9e-3 - slower, 8.2e-3 - slower, 13.1e-3), 2.5), c))
    if p.m <= 192:  # all rows of a in one tile, beside 128 of b
        for _, extra, latency in _HOPPER_UNEVEN:
            width = (128 + extra) / 128
            tall = _config((128, 128, 64, 1, 1, 4), extra_n=extra, weights_first=True, latency=latency)
            if p.m <= 128 + extra:
                costs.append((run_us(tall, (5.9e-3 * width, 6.1e-3 * width, 6.3e-3 * width), 2.5), tall))
    return min((cost for cost in costs if _legal(p, cost[1])), key=lambda cost: cost[0])[1]


def _rounds_us(p: Problem, c: Config, device: Device, us_per_k: float, us_per_tile: float) -> float:
    return -(-c.tiles(p) // c.resident(device)) * (p.k * us_per_k + us_per_tile)


# Tile, whether its blocks walk, us of a round of blocks for each element of k and for the end of a tile; fitted to 14 problems of 128 to 8192 rows
# (H200, 2026-11-21).
_HOPPER_GATED: tuple[tuple[Tile, bool, float, float], ...] = (
    ((64, 128, 128, 1, 1, 8), True, 5.2e-3, 0.0),
    ((128, 128, 64, 1, 1, 8), False, 7.5e-3, 3.1),
    ((64, 256, 64, 1, 1, 8), True, 7.8e-3, 1.7),
    ((128, 256, 64, 1, 1, 8), True, 14.0e-3, 3.3),
)


def _hopper_gated(p: Problem, device: Device) -> Config:
    """silu_mul behind the product wants the registers of 8 warps: on 4 a round of tiles takes a third longer."""

    tile, persistent, *_ = min(_HOPPER_GATED, key=lambda entry: _rounds_us(p, _config(entry[0]), device, *entry[2:]))
    config = _config(tile, latency=5)
    return replace(config, persistent=persistent and config.tiles(p) > config.resident(device))


def _offset_rows(p: Problem) -> int:
    """0 if rows of both operands begin at multiples of 128 bytes, 1 if of 32, else 2.

    TMA reads 128 bytes of a row: from elsewhere they lie in two lines of L2, or in a sector more, and tiles that read less for each multiply-add
    win (8222 x 18032 x 15880 on an H200, 2026-11-21: 128x128 387 TFLOP/s, 256x256 on two blocks 630; with rows of whole lines 730 and 740).
    """
    lengths = p.m if p.trans_a else p.k, p.k if p.trans_b else p.n
    pitches = [length * p.dtype.itemsize for length in lengths]
    return max(0 if pitch % 128 == 0 else 1 if pitch % 32 == 0 else 2 for pitch in pitches)


_HOPPER_UNEVEN: tuple[tuple[int, int, int], ...] = ((128, 16, 6), (128, 32, 6), (128, 64, 5))  # tile_n, extra_n, latency


def _uneven(p: Problem, device: Device) -> list[Config]:
    """Widths between the powers of two, those whose rounds of tiles cost least first."""
    fitting = [_config((128, tile_n, 64, 1, 1, 4), extra_n=extra_n, latency=latency) for tile_n, extra_n, latency in _HOPPER_UNEVEN if p.n > tile_n]
    return sorted(fitting, key=lambda c: -(-c.tiles(p) // c.resident(device)) * (c.tile_n + c.extra_n))[:2]


# With the latency hint of each: 3 to 5 steps in flight, in the shared memory that one block an SM leaves, or two.
_HOPPER_GATHERED: tuple[tuple[Tile, int], ...] = (
    ((128, 128, 128, 1, 1, 4), 3),
    ((128, 128, 64, 1, 1, 4), 4),
    ((128, 128, 64, 1, 2, 4), 2),
    ((64, 128, 128, 1, 1, 4), 4),
    ((64, 128, 128, 1, 2, 4), 2),
    ((64, 64, 128, 1, 2, 4), 3),
    ((128, 256, 64, 1, 1, 8), 3),
    ((256, 128, 64, 1, 1, 8), 4),
)


def _gathered(p: Problem, device: Device) -> Iterator[Config]:
    """Operands without TMA: each tile with a block of its own, and with several blocks where so few tiles leave most SMs idle."""
    for tile, latency in _HOPPER_GATHERED:
        c = _config(tile, latency=latency, gathered=True)
        yield c
        parts = min(c.resident(device) // c.tiles(p), c.steps(p) // 6, MOST_PARTS)
        if parts > 1:
            yield replace(c, split=parts)


START_US = 2.5  # launch, filling the pipeline
TILE_US = 1.5  # starting a tile, and writing it out, while the tensor cores wait
PERSISTENT_TILE_US = 1.0
REDUCE_US = 2.0  # a second launch
REDUCE_BYTES_PER_US = 4e6


def _ordered(p: Problem, device: Device, tiles: Iterable[Tile], **choices) -> Iterator[Config]:
    """Each tile persistent, one to a block, and with the last round split; by `estimate_us`. Variations of the best follow."""
    configs: list[Config] = []
    for tile in tiles:
        plain = _config(tile, **choices)
        configs.append(plain)
        if plain.tiles(p) > plain.resident(device) and tile not in _SERIALISED:
            configs.append(replace(plain, persistent=True))
        splits = (replace(plain, split=parts) for parts in range(2, MOST_PARTS + 1))
        configs += sorted((c for c in splits if c.split_tiles(p, device)), key=lambda c: estimate_us(p, c, device))[:2]
    configs.sort(key=lambda c: estimate_us(p, c, device))
    yield from configs[:28]
    for c in configs[:4]:
        yield replace(c, group=4)
        yield replace(c, group=16)
        yield replace(c, latency=max(1, c.latency - 1))


def estimate_us(p: Problem, c: Config, device: Device) -> float:
    """Time of a config for many rows: rounds of tiles at the rate of its MMA, or the memory traffic, plus overheads."""
    sms_per_block = (c.num_ctas or 1) / c.occupancy
    rate = device.tflops * 1e6 / device.sms * sms_per_block * _mma_rate(p, c)
    tile_us = c.steps(p) * 2 * c.tile_m * c.tile_n * c.tile_k / rate
    overhead_us = PERSISTENT_TILE_US if c.persistent else TILE_US
    tiles, resident, split_tiles, parts = c.tiles(p), c.resident(device), c.split_tiles(p, device), c.parts(p)
    run_us = -(-(tiles - split_tiles) // resident) * (tile_us + overhead_us)
    extra_us = START_US
    if split_tiles:
        run_us += -(-split_tiles * parts // resident) * (tile_us / parts + overhead_us)
        run_us *= 1.03  # a split must be worth it
        extra_us += REDUCE_US + 2 * split_tiles * parts * c.tile_m * c.tile_n * 4 / REDUCE_BYTES_PER_US
    return extra_us + max(run_us, p.cost().size_bytes / (device.memory_gbs * 1e3))


def _mma_rate(p: Problem, c: Config) -> float:
    """Rate of a tile's inner loop over the device's bf16 rate: a larger tile loads less for each multiply-add."""
    area = c.tile_m * c.tile_n // (c.num_ctas or 1)
    rate = 1.0 if area >= 1 << 15 else 0.9 if area >= 1 << 14 else 0.75 if area >= 1 << 13 else 0.6
    if max(c.tile_m, c.tile_n) > 2 * min(c.tile_m, c.tile_n):
        rate *= 0.85
    if p.dtype is torch.float32:
        rate /= 2 if p.tf32 else 32
    return rate


_HOPPER: tuple[Tile, ...] = (
    (256, 256, 64, 2, 1, 8),
    (128, 256, 64, 1, 1, 8),
    (256, 128, 64, 1, 1, 8),
    (256, 128, 64, 2, 1, 8),
    (128, 128, 64, 1, 1, 8),
    (128, 128, 128, 1, 1, 8),
    (128, 128, 64, 1, 1, 4),
    (64, 256, 64, 1, 1, 8),
    (256, 64, 64, 1, 1, 8),
    (64, 128, 128, 1, 1, 8),
    (128, 64, 128, 1, 1, 8),
    (128, 64, 64, 1, 2, 4),
    (64, 64, 128, 1, 2, 4),
)
# As persistent kernels these are compiled to wait for each MMA before the next is issued.
_SERIALISED: tuple[Tile, ...] = ((256, 128, 64, 2, 1, 8), (128, 128, 64, 1, 1, 8), (128, 128, 128, 1, 1, 8))
_AMPERE: tuple[Tile, ...] = (
    (128, 128, 32, 1, 2, None),
    (64, 128, 64, 1, 2, None),
    (64, 64, 64, 1, 2, None),
)
_BLACKWELL: tuple[Tile, ...] = (
    (256, 256, 64, 2, 1, None),
    (128, 256, 64, 1, 1, None),
    (256, 128, 64, 2, 1, None),
    (128, 128, 64, 1, 1, None),
    (128, 128, 128, 1, 1, None),
    (128, 64, 128, 1, 1, None),
)
_CONSUMER: tuple[Tile, ...] = (
    (128, 64, 64, 1, 2, None),
    (64, 128, 64, 1, 2, None),
    (128, 128, 32, 1, 1, None),
    (64, 64, 64, 1, 2, None),
)
_WIDE = {"sm_80": _AMPERE, "sm_90": _HOPPER, "sm_100": _BLACKWELL, "sm_103": _BLACKWELL, "sm_120": _CONSUMER, "sm_121": _CONSUMER}
_NARROW_LOADS: tuple[Tile, ...] = ((64, 64, 32, 1, 1, None), (32, 32, 64, 1, 1, None))


def _float32_tiles(p: Problem, device: Device) -> tuple[Tile, ...]:
    warps = 8 if device.arch == "sm_90" else None
    if warps and _wide_loads(p, device):
        return ((64, 128, 8, 1, 1, warps), (64, 64, 16, 1, 1, warps), (32, 64, 16, 1, 1, warps))
    return ((64, 64, 8, 1, 1, warps), (32, 32, 16, 1, 1, None), (32, 32, 8, 1, 1, None))


def _tf32_tiles(p: Problem, device: Device) -> tuple[Tile, ...]:
    warps = 8 if device.arch == "sm_90" else None
    if warps and _wide_loads(p, device):
        return ((128, 128, 32, 1, 1, warps), (128, 64, 32, 1, 1, warps), (64, 64, 32, 1, 1, warps))
    return ((64, 64, 16, 1, 1, warps),)


# --- few rows: bound by reading b

_DOT: dict[int, tuple[Tile, ...]] = {
    1: ((1, 8, 512, 1, 2, 4), (1, 4, 1024, 1, 2, 4), (1, 8, 512, 1, 1, 4), (1, 16, 256, 1, 3, 4), (1, 8, 1024, 1, 1, 8)),
    2: ((2, 4, 1024, 1, 1, 8), (2, 8, 512, 1, 2, 4), (2, 8, 512, 1, 1, 8), (2, 16, 256, 1, 2, 4), (4, 8, 512, 1, 1, 8)),
    4: ((4, 8, 512, 1, 1, 8), (4, 4, 512, 1, 2, 8)),
}
_SKINNY = {
    "sm_80": ((16, 32, 256, 1, 2, None), (16, 64, 128, 1, 2, None), (64, 64, 64, 1, 2, None)),
    "sm_100": ((64, 32, 256, 1, 1, None), (64, 64, 128, 1, 1, None), (16, 32, 256, 1, 2, None)),
    "sm_120": ((16, 32, 256, 1, 2, None), (16, 64, 128, 1, 2, None), (64, 64, 64, 1, 2, None)),
}
_SKINNY |= {"sm_103": _SKINNY["sm_100"], "sm_121": _SKINNY["sm_120"]}


def _skinny_configs(p: Problem, device: Device) -> Iterator[Config]:
    dot = []
    if p.m <= MOST_DOT_ROWS and p.trans_b and not p.trans_a:
        dot = [_walking(p, device, _config(tile, dot=True, latency=8)) for tile in _DOT[next_pow2(p.m)]]
        if p.m == 1 and p.k <= 4096 and p.dtype.itemsize == 2:  # as in rms_norm_matmul
            dot += [_config((1, n, k, 1, occupancy, 4), dot=True, latency=8) for n, k, occupancy in whole_tiles(p.k)]
    # Too few rows of b for the MMA's 64 to a block: a block of 4 or 8 reads on every SM. Two rows cost twice the instructions.
    if p.n <= (16 if p.m == 1 and device.arch == "sm_90" else 8) * device.sms:
        if p.k >= 8192:
            dot.sort(key=lambda c: -c.tile_k)
        yield from dot
    if device.arch != "sm_90":
        yield from (_walking(p, device, _config(tile, latency=8)) for tile in _SKINNY.get(device.arch, _SKINNY["sm_80"]))
    else:
        yield from (_walking(p, device, c) for c in (_hopper_decode(p, device) if p.m <= 32 else _hopper_batch(p, device)))
    yield from dot


def _walking(p: Problem, device: Device, c: Config) -> Config:
    """Persistent where there is more than one round of tiles: the next tile's loads start under this one's end.

    One row: never, since the launch could not be early (a decode step of Llama-3.2-1B on an H200: 895 us, 957 with blocks that walk).
    """
    return replace(c, persistent=p.m > 1 and c.tiles(p) > c.resident(device))


def _hopper_decode(p: Problem, device: Device) -> Iterator[Config]:
    """Up to 32 rows: b's rows fill the MMA. 64 of them to a block, the most loads in flight; but not a little more than two rounds."""
    rows = max(8, next_pow2(p.m))
    blocks = -(-p.n // 64)
    if p.m > 8 and blocks <= 4:
        yield _config((64, 8, 512, 1, 1, 4), latency=8)
    tiles = [(64, 512, 1, 4), (64, 256, 1, 4), (128, 256, 1, 8), (128, 128, 2, 4), (256, 128, 1, 8), (64, 256, 2, 4), (64, 128, 2, 4)]
    if rows == 32 or (blocks <= device.sms // 3 and p.k > 2048):  # more steps in flight before the first product, and twice the columns of a
        tiles.insert(0, (64, 256, 1, 4))
    if 2 * device.sms < blocks <= 4 * device.sms:  # one round of wide tiles; a little more than one would take two
        tiles.insert(0, (256, 128, 1, 8))
    tiles += [(128, 128, 1, 8), (128, 64, 2, 4), (256, 64, 1, 8)]
    for tile_n, tile_k, occupancy, warps in tiles:
        yield _config((rows, tile_n, tile_k, 1, occupancy, warps), weights_first=True, latency=8)
    if blocks <= device.sms // 3 and p.k >= 4096:  # most SMs have nothing to read
        yield _config((rows, 64, 256, 1, 1, 4), weights_first=True, latency=8, split=min(8, device.sms // blocks, p.k // 512))
    for tile in ((16, 32, 256, 1, 1, 4), (16, 32, 256, 1, 2, 4), (64, 16, 512, 1, 1, 4), (64, 32, 256, 1, 1, 4), (64, 8, 512, 1, 1, 4)):
        if tile[0] >= p.m:
            yield _config(tile, latency=8)


def _hopper_batch(p: Problem, device: Device) -> Iterator[Config]:
    """33 to 64 rows: the narrowest tile with which b is covered in one round, so that most SMs read."""
    tiles = ((64, 16, 512, 1, 1, 4), (64, 32, 256, 1, 1, 4), (64, 64, 256, 1, 1, 4), (64, 128, 128, 1, 1, 8), (64, 256, 64, 1, 1, 8))
    one_round = [tile for tile in tiles if -(-p.n // tile[1]) <= (device.sms if tile[1] > 16 else device.sms // 2)]
    for tile in dict.fromkeys((*(one_round[:1] or tiles[3:4]), *reversed(tiles))):
        yield _config(tile, latency=8)
    for tile_n, tile_k, occupancy, warps in ((64, 256, 1, 4), (64, 128, 2, 4), (128, 128, 1, 8), (64, 512, 1, 4), (128, 256, 1, 8)):
        yield _config((64, tile_n, tile_k, 1, occupancy, warps), weights_first=True, latency=8)
        yield _config((64, tile_n, tile_k, 1, occupancy, warps), latency=8)
    for tile in ((64, 32, 512, 1, 1, 4), (64, 32, 128, 1, 2, 4), (64, 64, 256, 2, 1, 4), (64, 128, 128, 4, 1, 4)):
        yield _config(tile, latency=8)


# --- the interpreter


def _cpu_configs(p: Problem) -> Iterator[Config]:
    """Few, large tiles: each step of the interpreter is a numpy call, and padding is copied and multiplied like data."""
    even = p.n & -p.n  # the largest power of two that divides n
    tile_n = 4096 if p.n >= 1 << 14 else min(max(even, 128), 512)
    tile_k = GROUP if p.scaling is Scaling.BLOCK else next_pow2(min(p.k, 2048))
    yield Config(next_pow2(min(p.m, 512)), min(tile_n, next_pow2(p.n)), tile_k, persistent=True)
