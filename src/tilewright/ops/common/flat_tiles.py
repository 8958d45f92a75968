"""Configs of kernels that take a matrix in independent tiles of any shape, each of whole groups
that share a scale.
"""

from collections.abc import Iterator
from typing import Any

from cuda.tile import cdiv

from ...launch import Device, next_pow2
from ...select import Work
from .rows import OPERATIONS, Config, grid_fits, stream
from .scaling import GROUP

LOADS = ((2, 4), (1, 4), (4, 4), (2, 8), (4, 8), (1, 8), (8, 8))  # 16-byte loads of a thread, warps
PERSISTENT = ((8, 2, 4), (4, 2, 8))  # occupancy, latency, warps
CPU_TILE = 1 << 20  # elements
PADDING = 9 / 8  # of a row by its tiles, at most


def candidates(p: Any, device: Device, *, grouped: bool) -> Iterator[Config]:
    """p: a problem with rows, cols and dtype. grouped: a tile has whole groups of columns."""
    wide = max(1, next_pow2(p.cols))
    least = min(GROUP, wide)
    if device.is_cpu:
        tile_m = max(1, min(next_pow2(p.rows), CPU_TILE // wide))
        yield from (Config(tile_m, wide), Config(max(1, tile_m // 4), max(wide // 4, least), persistent=True, occupancy=1))
        return
    vector = 16 // p.dtype.itemsize
    for loads, warps in LOADS:
        size = loads * 32 * warps * vector
        for tile_n in _widths(p.cols, size, least, grouped):
            yield Config(min(max(1, size // tile_n), next_pow2(p.rows)), tile_n, num_worker_warps=warps)
    for occupancy, latency, warps in PERSISTENT:
        size = 2 * 32 * warps * vector
        tile_n = _widths(p.cols, size, least, grouped)[0]
        yield Config(max(1, size // tile_n), tile_n, True, True, latency, device.arch != "sm_80", False, 1, occupancy, warps)


def _widths(cols: int, size: int, least: int, grouped: bool) -> list[int]:
    """Of a tile of `size` elements: no less than a group, and little padding."""
    fitting = min(next_pow2(cols), max(size, least))
    while fitting > max(least, 256) and cdiv(cols, fitting) * fitting > cols * PADDING:
        fitting //= 2
    if grouped:  # scales of eight rows and more fill whole 32-byte sectors
        return list(dict.fromkeys((max(least, min(fitting, size // 8)), least, fitting)))
    divisor = min(cols & -cols, fitting)
    return [divisor if divisor >= 128 else fitting]


def legal(p: Any, c: Config, device: Device, *, most: int) -> bool:
    """most: bytes that a thread has of a tile of each operand."""
    blocks = cdiv(p.rows, c.tile_m) * cdiv(p.cols, c.tile_n)
    if device.is_cpu or (not c.persistent and not grid_fits(blocks)):
        return device.is_cpu
    return c.tile_m * c.tile_n * p.dtype.itemsize <= most * c.threads and (not c.persistent or blocks > device.sms * (c.occupancy or 1))


def work(p: Any, c: Config, device: Device, *, operands: int = 1, partial: int = 0) -> Work:
    """A block loads its tile and stores codes.

    operands: matrices that it loads. partial: bytes of partial maxima, of a launch before.
    """
    size, tile = p.dtype.itemsize, c.tile_m * c.tile_n
    registers = 24 + tile / c.threads * (1 + operands * size / 4)
    blocks = cdiv(p.rows, c.tile_m) * cdiv(p.cols, c.tile_n)
    return stream(
        device,
        blocks,
        tile,
        p.cost().size_bytes,
        c,
        registers=registers,
        aligned=p.cols * size,
        load=operands * size,
        checked=p.cols % c.tile_n > 0 or (p.rows % c.tile_m > 0 and blocks <= device.sms),
        operations=OPERATIONS * operands,
        partial=partial,
    )


def family(p: Any, c: Config) -> str:
    """Operand size, what a thread has of a tile, its width and how it is launched."""
    each = c.tile_m * c.tile_n // c.threads
    how = f"{'p' * c.persistent}{c.latency if c.persistent else ''}{c.occupancy or ''}"
    return f"{p.dtype.itemsize} {each} {c.tile_n}x{c.threads}{how}{'m' * (p.cols % c.tile_n > 0)}"
