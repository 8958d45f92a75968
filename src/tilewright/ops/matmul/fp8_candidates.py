"""Which configs of `matmul` with 8-bit operands are worth timing, the most promising first.

Order and costs on sm_90 are measured on an H200 (2026-11-21, notes/LOG.md); elsewhere tiles that compile without spilling, by estimate.
"""

from collections.abc import Iterator
from dataclasses import replace

from ...launch import Device
from ..mma_tiles import run_us, tiles_for
from ..scaling import Scaling
from .decision import Config, Problem

# tile_m, tile_n, tile_k, extra_n, num_worker_warps, latency: narrowest first, for outputs that one round of blocks covers.
_ONE_ROUND = (
    (64, 16, 512, 0, 4, 8),
    (64, 32, 512, 0, 4, 4),
    (64, 64, 512, 0, 4, 4),
    (64, 128, 256, 0, 8, 6),
    (128, 64, 256, 0, 8, 5),
    (64, 128, 128, 64, 4, 4),
    (128, 128, 128, 0, 4, 6),
    (128, 128, 128, 16, 4, 6),
    (128, 128, 128, 64, 4, 6),
)
# The same for outputs of more bits than bf16, for which partial sums leave the tensor core's accumulator.
_ONE_ROUND_PRECISE = ((64, 16, 256, 0, 4, 8), (64, 32, 256, 0, 4, 8), (64, 64, 256, 0, 4, 6), (128, 64, 128, 0, 8, 6), (128, 128, 128, 0, 8, 6))


def fp8_configs(p: Problem, device: Device) -> Iterator[Config]:
    """Every config worth timing, the default first."""
    k_major = p.trans_b and not p.trans_a
    wide_loads = p.k % 16 == 0 if k_major else (p.m if p.trans_a else p.k) % 16 == 0 and (p.k if p.trans_b else p.n) % 16 == 0
    if device.arch == "sm_90" and k_major and wide_loads:
        yield from _hopper_block(p, device) if p.scaling is Scaling.BLOCK else _hopper(p, device)
        return
    configs = []
    for t in tiles_for(device, p.dtype, p.scaling, k_major=k_major, wide_loads=wide_loads):
        c = Config(t.tile_m, t.tile_n, t.tile_k, latency=t.latency, num_ctas=t.num_ctas, occupancy=t.occupancy, num_worker_warps=t.num_worker_warps)
        configs.append((run_us(t, c.tiles(p), p.k, p.dtype, p.scaling, device), t.walks, c))
    for _, walks, c in sorted(configs, key=lambda entry: entry[0]):
        if walks:
            yield replace(c, persistent=c.tiles(p) > c.resident(device))
        yield c


def _config(tile_m: int, tile_n: int, tile_k: int, extra_n: int, warps: int, latency: int, **choices) -> Config:
    choices = {"num_ctas": 1, "occupancy": 1, **choices}
    return Config(tile_m, tile_n, tile_k, extra_n=extra_n, num_worker_warps=warps, latency=latency, **choices)


def _hopper(p: Problem, device: Device) -> Iterator[Config]:
    """One scale, or one a row: behind the sum."""
    one_round = [_config(*tile) for tile in (_ONE_ROUND if p.fast_acc else _ONE_ROUND_PRECISE)]
    fitting = [c for c in one_round if c.tiles(p) <= device.sms and (not c.extra_n or _takes_extra(p, c))]
    yield from fitting[:3]
    walking = [_config(128, 128, 128, 0, 8, 6, persistent=True), _config(64, 256, 128, 0, 8, 6, persistent=True)]
    if p.fast_acc:
        walking = sorted(_many_rounds(p), key=lambda c: _run_us(p, c, device))
    if p.m <= 64:
        yield _config(64, 128, 128, 0, 4, 8, occupancy=2)
    yield from walking
    yield from (_config(64, 128, 128, 0, 4, 8, occupancy=2), _config(64, 64, 256, 0, 4, 6), _config(128, 128, 128, 0, 8, 6))
    yield from fitting[3:]
    if p.m <= 128:
        yield _config(64, 64, 512, 0, 4, 4, weights_first=True)
        yield _config(64, 128, 256, 0, 8, 6, weights_first=True)


def _takes_extra(p: Problem, c: Config) -> bool:
    return not p.behind and (p.m if c.weights_first else p.n) > (c.tile_m if c.weights_first else c.tile_n)


def _many_rounds(p: Problem) -> list[Config]:
    configs = [
        # On 4 warps the scales of a tile's rows spill.
        _config(128, 128, 128, 0, 8 if p.scaling is Scaling.ROW else 4, 6, persistent=True),
        _config(128, 256, 128, 0, 8, 4 if p.k <= 2048 else 6, persistent=True),
        _config(128, 256, 128, 0, 8, 6 if p.k <= 2048 else 4, persistent=True),
        _config(256, 256, 128, 0, 8, 4, num_ctas=2, persistent=True),
        _config(128, 128, 128, 64, 4, 6),
        _config(128, 256, 128, 32, 8, 6, weights_first=True),
    ]
    return [c for c in configs if not c.extra_n or _takes_extra(p, c)]


# us of a tile for each element of k, and beside it: of 128x128; the others relative to it
_PER_K, _PER_TILE = 3.15e-3, 0.8
_RELATIVE = {(128, 128, 0): 1.0, (128, 256, 0): 2.0, (256, 256, 0): 4.2, (128, 128, 64): 1.43, (128, 256, 32): 2.85}


def _run_us(p: Problem, c: Config, device: Device) -> float:
    cost = _RELATIVE[c.tile_m, c.tile_n, c.extra_n]
    per_tile = _PER_TILE * cost**0.5 * (1 if c.persistent else 1.5)
    if p.m <= 128 and c.tile_n == 256:  # few rows: more blocks read b at once
        per_tile += 1.0
    return -(-c.tiles(p) // c.resident(device)) * (cost * _PER_K * p.k + per_tile)


def _hopper_block(p: Problem, device: Device) -> Iterator[Config]:
    """Scales inside the loop: two accumulators, and latency 8 (ops/scaling.py). Several blocks an SM hide each other's sums."""
    large = _config(128, 128, 128, 0, 8, 8)
    narrow = [_config(64, tile_n, 128, 0, 4, 8, occupancy=occupancy) for tile_n, occupancy in ((64, 2), (64, 4), (128, 2), (32, 2))]
    several = narrow[2]
    if p.m <= 128:
        tiles = narrow[0].tiles(p)
        if p.k <= 512 and p.m > 64:
            yield replace(large, persistent=large.tiles(p) > large.resident(device))
        if p.k >= 4096:
            first = 0 if tiles <= 66 else 1 if tiles <= 132 else 2
        else:
            first = 0 if p.k > 512 and tiles <= 264 else 2
        for c in (narrow[first], *narrow):  # the steps of one tile follow each other slowly: parts of k side by side, of at least 7 steps
            parts = [n for n in (8, 4, 2) if n * c.tiles(p) <= c.resident(device) and c.steps(p) >= 7 * n and p.k >= 4096]
            yield from (replace(c, split=n) for n in parts[:2])
            yield c
    elif -(-p.m // 128) * 128 > 1.15 * p.m:  # a last tile of mostly no rows
        yield several
    tiles, resident = large.tiles(p), large.resident(device)
    left = tiles % resident
    shares = min(resident // left, large.steps(p) // 7, 8) if left else 1
    if shares > 1 and resident < tiles <= 6 * resident:  # a last round of parts of k, which is shorter than one of whole tiles
        yield replace(large, split=shares)
    yield replace(large, persistent=tiles > resident and p.k <= 2048)
    if shares > 1 and tiles < resident:
        yield replace(large, split=shares)
    yield replace(large, persistent=large.tiles(p) > large.resident(device) and p.k > 2048)
    yield from (several, replace(several, persistent=True), narrow[1])
    yield _config(256, 128, 128, 0, 8, 8, num_ctas=2)
    yield _config(256, 128, 128, 0, 8, 8, num_ctas=2, persistent=True)
    yield _config(128, 64, 128, 0, 8, 8)
