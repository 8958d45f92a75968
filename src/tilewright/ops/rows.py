"""How a kernel that reduces over the last axis may walk the rows of a matrix; shared by rms_norm and softmax."""

from dataclasses import dataclass
from math import log2

from cuda.tile import cdiv

from ..launch import Device, next_pow2

CLUSTER_ARCHS = ("sm_90", "sm_100", "sm_103")  # several blocks can share a row and reduce through each other's shared memory
MAX_CHUNKS = 16
WIDE = 32_768  # elements of a row that 8 warps can hold in fp32
MAX_BYTES_PER_THREAD = 128  # of one operand kept in registers; twice that spills once it is held in fp32 (sm_90)
CPU_TILE = 1 << 20  # elements; the interpreter is fastest with few large tiles


@dataclass(frozen=True, slots=True)
class Config:
    """How the rows are walked.

    tile_m, tile_n: rows and columns of a tile; powers of two.
    keep_row: whole rows stay in registers, as several tiles; otherwise a second pass reads them again, from L2.
    persistent: a block walks over many row tiles; otherwise it has one.
    latency: prefetch hint of the loads, 1 to 10; more unrolls a persistent loop further.
    load_tma, store_tma: allow the TMA unit.
    num_ctas: blocks of a cluster that share each tile.
    occupancy: resident blocks per SM that the compiler must leave room for.
    num_worker_warps: warps that compute, 4 or 8.
    """

    tile_m: int
    tile_n: int
    keep_row: bool = True
    persistent: bool = False
    latency: int = 4
    load_tma: bool = False
    store_tma: bool = False
    num_ctas: int = 1
    occupancy: int | None = None
    num_worker_warps: int | None = None


def row_configs(rows: int, cols: int, itemsize: int, device: Device, *, rereads: bool) -> list[Config]:
    """Every config worth timing, the untuned default first. rereads: reading a row again from L2 is cheaper than keeping a wide one."""
    if device.is_cpu:
        return _cpu_configs(rows, cols)
    many = rows > 2 * device.sms
    configs = _one_tile_a_block(rows, cols, itemsize, device, many)[:10]
    if many:
        configs += _persistent(rows, cols, itemsize, device)
    if not configs or cols * itemsize > 16_384:
        configs += [Config(1, tile_n, keep_row=False, num_worker_warps=8) for tile_n in (4096, 2048, 8192)]
    if device.arch in CLUSTER_ARCHS and cols > WIDE and not rereads:
        configs[:0] = _shared_rows(cols)
    elif device.arch == "sm_90" and itemsize == 2:
        configs.insert(0, _measured_best(rows, cols, many, rereads))
    return list(dict.fromkeys(configs))


def _shared_rows(cols: int) -> list[Config]:
    """Rows wider than one block's registers: as few blocks of a cluster as can hold one, up to 8; beyond that it is read twice."""
    clusters = [n for n in (2, 8, 4) if WIDE < cols <= n * WIDE]
    return [Config(1, 1024 * n, num_ctas=n, num_worker_warps=8) for n in clusters] or [Config(1, 4096 * 8, False, num_ctas=8, num_worker_warps=8)]


def _measured_best(rows: int, cols: int, many: bool, rereads: bool) -> Config:
    """16-bit rows on an H200 (2026-11-21, notes/LOG.md): several tiles a row that pad it little, one block a row."""
    whole, thrifty = next_pow2(cols), _column_tiles(cols)[-1]
    if cols > 8192:
        if 20_480 < cols <= 32_768 and rows >= 4096:  # registers for two blocks an SM: the loads of one stand under the end of the other
            return Config(1, 4096, occupancy=2, num_worker_warps=8)
        if rereads:
            return Config(1, 2048, keep_row=False, num_worker_warps=8)
        if cols <= 20_480 or not many:
            return Config(1, 2048, num_worker_warps=8)
        return Config(1, 1024, persistent=True, occupancy=2, num_worker_warps=8)
    if cols in (4096, 8192) and many:
        return Config(1, cols // 4, num_worker_warps=8)
    if thrifty < whole:
        tile_m = min(next_pow2(rows), next_pow2(3072 // cols)) if many else 1
        return Config(tile_m, thrifty, num_worker_warps=8 if thrifty >= 1024 else 4)
    tile_m = min(next_pow2(rows), max(1, 2048 // whole), 16) if many else 1
    return Config(tile_m, whole, num_worker_warps=8 if whole == 4096 else 4)


def _cpu_configs(rows: int, cols: int) -> list[Config]:
    tile_n = next_pow2(cols)
    tile_m = max(1, min(next_pow2(rows), CPU_TILE // tile_n))
    quarter = max(1, tile_n // 4)
    return [
        Config(tile_m, tile_n),
        Config(max(1, tile_m // 4), quarter, persistent=True, occupancy=1),
        Config(tile_m, quarter, keep_row=False),
    ]


def _column_tiles(cols: int) -> list[int]:
    """A tile as wide as the row, and the widest of those that pad the row by less than an eighth."""
    whole = next_pow2(cols)
    thrifty = whole
    while cdiv(cols, thrifty) * thrifty > cols * 1.12 and thrifty > 128:
        thrifty //= 2
    return [whole] if cdiv(cols, thrifty) in (1, *range(MAX_CHUNKS + 1, cols)) else [whole, thrifty]


def _one_tile_a_block(rows: int, cols: int, itemsize: int, device: Device, many: bool) -> list[Config]:
    # Bytes in flight per SM and blocks per SM pull in opposite directions; 64 bytes a thread balances them.
    # With fewer rows than SMs only the latency of one block counts: more threads, each with less.
    target = 64 if many else 32
    scored: list[tuple[float, int, Config]] = []
    for tile_n in _column_tiles(cols):
        padded_row = cdiv(cols, tile_n) * tile_n * itemsize
        for num_ctas in (1, 2, 4) if device.arch in CLUSTER_ARCHS else (1,):
            for warps in (4, 8):
                threads = 32 * warps * num_ctas
                tile_m = 1
                while tile_m <= min(64, next_pow2(rows)) and (tile_m == 1 or num_ctas == 1):
                    per_thread, per_load = tile_m * padded_row / threads, tile_m * tile_n * itemsize / threads
                    if per_thread <= MAX_BYTES_PER_THREAD and (tile_m * num_ctas == 1 or per_load >= 8):
                        score = abs(log2(tile_m * cols * itemsize / threads / target)) + log2(padded_row / (cols * itemsize)) / 2
                        score += log2(num_ctas) / 2 + (0 if per_load >= 16 else 0.5) + (0.5 if rows % tile_m else 0)
                        scored.append((score, len(scored), Config(tile_m, tile_n, num_ctas=num_ctas, num_worker_warps=warps)))
                    tile_m *= 2
    return [config for *_, config in sorted(scored)]


def _persistent(rows: int, cols: int, itemsize: int, device: Device) -> list[Config]:
    """Loops that prefetch the next tiles while they compute. Hints that spill on sm_90 are left out."""
    configs = []
    tma = device.arch != "sm_80"
    for tile_n in _column_tiles(cols):
        padded_row = cdiv(cols, tile_n) * tile_n * itemsize
        for warps, aim, most, hints in ((4, 64, 96, ((2, 6), (3, 6), (2, 8))), (8, 32, 64, ((2, 6), (1, 10), (3, 4)))):
            threads = 32 * warps
            tile_m = 1
            while 2 * tile_m * padded_row <= aim * threads and 2 * tile_m <= rows:
                tile_m *= 2
            if tile_m * padded_row <= most * threads and tile_m * tile_n * itemsize >= 16 * threads:
                for occupancy, latency in hints[: 3 if tile_m * padded_row <= aim * threads else 2]:
                    configs.append(Config(tile_m, tile_n, True, True, latency, tma, False, 1, occupancy, warps))
    return configs
