"""Every config of `attention` worth timing, by architecture."""

from dataclasses import dataclass, replace

import torch

from ...launch import Device, next_pow2
from .problem import Problem


@dataclass(frozen=True, slots=True)
class Config:
    """How one block walks over the keys.

    tile_m, tile_n: queries of a block, keys of a step; powers of two.
    parts: column parts in which a step's weights are made; 2 halves the registers that they hold, which lets the compiler overlap the
        softmax of one step with the products of another.
    latency: prefetch hint of the k and v loads, 1 to 10.
    persistent: a block walks over many tiles of queries; otherwise it has one.
    tf32x3: fp32 products on tensor cores, as three TF32 products each.
    num_ctas, occupancy, num_worker_warps: compiler hints.
    pad_values: a v_dim that is no power of two is padded to one; otherwise its sums are two tiles, as head_dim always is: 96 = 64 + 32.
    tail_n: keys of a step that a mask touches, a divisor of tile_n; 0 for tile_n. Shorter ones compute fewer scores that nobody sees.
    """

    tile_m: int
    tile_n: int
    parts: int = 1
    latency: int = 2
    persistent: bool = False
    tf32x3: bool = False
    num_ctas: int | None = None
    occupancy: int | None = None
    num_worker_warps: int | None = None
    pad_values: bool = True
    tail_n: int = 0


# tile_m, tile_n, tail_n, parts, latency, persistent, num_ctas, occupancy, num_worker_warps
Row = tuple[int, int, int, int, int, bool, int | None, int | None, int | None]
Table = dict[str, dict[int, tuple[Row, ...]]]

# By architecture and head_dim (up to), the default first; chosen on compiled code (no spills), and on sm_90 by _measured_best.
_HALF: Table = {
    "sm_80": {
        64: ((64, 64, 0, 1, 2, False, None, 1, 8), (64, 32, 0, 1, 2, False, None, 1, None)),
        96: ((64, 32, 0, 1, 2, False, None, 1, 8),),  # head_dim in two tiles
        128: ((64, 64, 0, 1, 3, False, None, 2, None),),
        256: ((64, 16, 0, 1, 2, False, None, 1, 8), (32, 32, 0, 1, 2, False, None, 1, 8)),
    },
    "sm_90": {
        64: (
            (128, 64, 0, 1, 2, False, 1, 2, 8),
            (64, 64, 0, 2, 2, False, 1, 3, 4),
            (64, 128, 64, 2, 2, False, 1, 2, 4),
            (64, 128, 0, 1, 2, False, 1, 2, 4),
            (128, 128, 64, 1, 2, False, 1, 1, 8),
            (128, 128, 0, 2, 2, False, 1, 1, 8),
            (128, 256, 64, 2, 2, False, 1, 1, 8),
            (128, 256, 128, 2, 2, False, 1, 1, 8),
            (64, 256, 64, 2, 2, False, 1, 1, 4),
            (128, 128, 0, 2, 2, True, 1, 1, 8),
            (128, 64, 0, 1, 2, True, 1, 1, 8),
            (64, 128, 64, 2, 2, True, 1, 2, 4),
            (64, 64, 0, 2, 2, True, 1, 3, 4),
        ),
        128: (
            (128, 128, 0, 2, 4, False, 1, 1, 8),
            (64, 128, 0, 2, 2, False, 1, 2, 4),
            (64, 128, 0, 1, 2, False, 1, 2, 4),
            (64, 64, 0, 2, 2, False, 1, 2, 4),
            (64, 128, 64, 2, 2, False, 1, 2, 4),
            (64, 128, 64, 2, 6, False, 1, 2, 4),
            (128, 128, 64, 2, 4, False, 1, 1, 8),
            (128, 128, 64, 2, 6, False, 1, 1, 8),
            (128, 256, 64, 2, 2, False, 1, 1, 8),
            (64, 256, 64, 2, 2, False, 1, 1, 4),
            (128, 128, 0, 2, 2, False, 1, 1, 8),
            (128, 64, 0, 1, 2, False, 1, 1, 8),
            (256, 128, 0, 2, 2, False, 2, 1, 8),
        ),
        192: (
            (128, 128, 0, 2, 2, False, 1, 1, 8),
            (128, 128, 64, 2, 2, False, 1, 1, 8),
            (128, 128, 0, 1, 2, False, 1, 1, 8),
            (64, 128, 0, 1, 2, False, 1, 2, 4),
            (128, 64, 0, 1, 2, False, 1, 1, 8),
            (128, 128, 0, 2, 2, True, 1, 1, 8),
        ),
        256: (
            (128, 64, 0, 1, 2, False, 1, 1, 8),
            (128, 128, 0, 2, 2, False, 1, 1, 8),
            (128, 128, 64, 2, 2, False, 1, 1, 8),
            (64, 64, 0, 1, 2, False, 1, 1, 4),
            (128, 128, 0, 2, 2, True, 1, 1, 8),
            (128, 128, 64, 2, 2, True, 1, 1, 8),
            (128, 64, 0, 1, 2, True, 1, 1, 8),
        ),
    },
    "sm_100": {
        64: ((128, 128, 0, 1, 2, False, None, 2, None), (256, 128, 0, 1, 2, False, None, 1, None), (64, 64, 0, 1, 2, False, None, 2, None)),
        128: ((128, 128, 0, 1, 2, False, None, 2, None), (128, 64, 0, 1, 2, False, None, 2, None), (64, 64, 0, 1, 2, False, None, 2, None)),
        256: ((128, 128, 0, 2, 2, False, None, 1, None),),
    },
    "sm_120": {
        64: ((64, 64, 0, 1, 2, False, None, 2, None), (128, 64, 0, 1, 2, False, None, 1, None), (64, 32, 0, 1, 2, False, None, 1, None)),
        128: ((64, 64, 0, 1, 2, False, None, 1, None), (64, 32, 0, 1, 2, False, None, 1, None)),
        256: ((32, 64, 0, 1, 2, False, None, 1, 8), (16, 32, 0, 1, 2, False, None, 1, None)),
    },
}
_SINGLE: Table = {
    "sm_80": {
        64: ((64, 32, 0, 1, 2, False, None, 1, 8), (32, 32, 0, 1, 2, False, None, 1, None)),
        128: ((32, 32, 0, 1, 1, False, None, 1, 8),),
        256: ((16, 16, 0, 1, 2, False, None, 1, 8),),
    },
    "sm_90": {
        64: ((64, 64, 0, 1, 2, False, 1, 1, 8), (64, 32, 0, 1, 2, False, 1, 1, 8)),
        128: ((64, 16, 0, 1, 2, False, 1, 1, 8),),
        256: ((64, 16, 0, 1, 2, False, 1, 1, 8),),
    },
    "sm_100": {
        64: ((64, 64, 0, 1, 2, False, None, 1, 8), (64, 32, 0, 1, 2, False, None, 1, 8)),
        128: ((64, 16, 0, 1, 2, False, None, 1, 8),),
        256: ((64, 16, 0, 1, 2, False, None, 1, 8),),
    },
    "sm_120": {
        64: ((32, 32, 0, 1, 2, False, None, 1, 8), (32, 32, 0, 1, 2, False, None, 1, None)),
        128: ((64, 16, 0, 1, 2, False, None, 1, 8),),  # 40 bytes of stack, the least of 30 tried
        256: ((16, 16, 0, 1, 2, False, None, 1, 8),),
    },
}
_EIGHT: Table = {
    "sm_90": {
        128: (
            (128, 256, 64, 2, 2, False, 1, 1, 8),
            (64, 128, 0, 1, 2, False, 1, 2, 4),
            (128, 128, 0, 1, 2, False, 1, 1, 8),
            (64, 256, 0, 2, 2, False, 1, 1, 4),
            (128, 128, 0, 1, 2, True, 1, 1, 8),
        ),
    },
    "sm_100": {128: ((64, 128, 0, 1, 2, False, None, 1, None),)},
    "sm_120": {128: ((64, 64, 0, 1, 1, False, None, 1, None), (64, 32, 0, 1, 2, False, None, 1, None))},
}
_ALIKE = {"sm_103": "sm_100", "sm_121": "sm_120"}


def space(p: Problem, device: Device) -> list[Config]:
    """Every config worth timing, the untuned default first."""
    longest_m, longest_n = (max(16, next_pow2(n)) for n in (p.queries, p.kv_len))
    if device.is_cpu:
        return [Config(min(256, longest_m), 512), Config(min(64, longest_m), min(128, longest_n), parts=2, pad_values=False)]
    if p.scaled and not device.has_fp8:
        return []
    single = p.dtype == torch.float32
    table = (_SINGLE if single else _EIGHT if p.scaled else _HALF)[_ALIKE.get(device.arch, device.arch)]
    widest = max(p.head_dim, p.values_dim)
    ragged = p.varlen or p.has_start or p.has_len
    configs = [
        Config(tile_m, tile_n, parts, latency, persistent, single, num_ctas, occupancy, warps, tail_n=tail_n if p.causal or ragged or p.window else 0)
        for tile_m, tile_n, tail_n, parts, latency, persistent, num_ctas, occupancy, warps in table[min(n for n in table if n >= widest)]
        if not (persistent and (ragged or p.window is not None))
        # Steps of 256 keys leave no register for anything more.
        and not (tile_n == 256 and (ragged or p.window is not None or p.softcap is not None or p.has_sinks))
    ]
    # A tile of queries much longer than the sequence computes rows that nobody reads.
    configs = [c for c in dict.fromkeys(configs) if c.tile_m <= max(64, longest_m)] or configs[-1:]
    if device.arch in ("sm_100", "sm_103") and p.varlen:  # with the slices of a packed batch the largest tile spills
        configs = configs[1:] or configs
    if device.arch == "sm_90" and not single and not p.scaled:
        best = _measured_best(p)
        configs.sort(key=lambda c: (c.tile_m, c.tile_n, c.tail_n, c.parts, c.latency, c.occupancy, c.num_worker_warps, c.persistent) != best)
    if p.values_dim != next_pow2(p.values_dim) and not single:  # tried on the default only
        configs.insert(1, replace(configs[0], pad_values=False))
    return configs


def _measured_best(p: Problem) -> tuple[int, int, int, int, int, int, int, bool]:
    """(tile_m, tile_n, tail_n, parts, latency, occupancy, num_worker_warps, persistent) on an H200 (2026-11-21, notes/LOG.md)."""
    narrow = p.head_dim <= 64
    short = (64, 64, 0, 2, 2, 3 if narrow else 2, 4, False)
    if p.window is not None and p.queries >= 1024:
        return short if narrow or p.window <= 512 else (64, 128, 64, 2, 2, 2, 4, False)
    if narrow:
        if not p.causal and p.queries < 2048:
            return 128, 128, 0, 2, 2, 1, 8, True
        if p.causal and p.kv_len >= 4 * p.queries:  # few queries behind many keys: blocks that take long, too few to cover each other's ends
            return 64, 128, 64, 2, 2, 2, 4, False
        return short if p.causal and p.queries < 4096 else (128, 64, 0, 1, 2, 2, 8, False)
    if p.head_dim > 192:
        if p.softcap is not None:
            return 128, 64, 0, 1, 2, 1, 8, False
        return 128, 128, 64 if p.causal and p.queries <= 1024 else 0, 2, 2, 1, 8, False
    if p.causal and p.queries <= 1024 and p.head_dim == 128:  # with 6 the shorter steps have shared memory of their own: 5 % less time
        return 64, 128, 64, 2, 6, 2, 4, False
    if p.queries < (4096 if p.causal else 2048):
        return 64, 128, 64 if p.causal else 0, 2, 2, 2, 4, False
    return 128, 128, 64 if p.causal and p.head_dim < 128 else 0, 2, 4, 1, 8, False
