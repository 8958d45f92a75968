"""How kernels stream a matrix: configs of those that reduce over its rows, and the work of any op
that reads and writes memory once.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from cuda.tile import cdiv

from ...launch import Device, next_pow2
from ...select import Choices, Ordered, Work, ordered

# several blocks can share a row and reduce through each other's shared memory
CLUSTER_ARCHS = ("sm_90", "sm_100", "sm_103")
MAX_CHUNKS = 16
PADDING, WHOLE_PADDING = 1.12, 1.25  # of a row by its tiles, and by one tile, at most
# elements of a thread, where a load brings at most THIN of them; else half: more spill once they
# are held in fp32 (sm_90)
MOST_KEPT = 128
THIN = 16
WIDE_KEPT = 112  # of a persistent block on 8 warps
LEAST_BYTES_PER_LOAD = 8  # of a thread
LONG_ROW = 16_384  # bytes; from here on reading a row twice may win
WIDE = 32_768  # elements of a row; beyond, several blocks may share it
CPU_TILE = 1 << 20  # elements; the interpreter is fastest with few large tiles
THREADS, REGISTERS, BLOCKS = 2048, 65_536, 32  # of an SM
OWN_REGISTERS = 24  # of a thread, beside its share of the row
OPERATIONS = 8  # on an element of a row
OF_BLOCK, OF_LOAD, OF_CHECK = 60, 12, 50  # of a thread: once, of a load with its store, of their checks
HELD = 0.7  # of the L2, by rows that wait to be read again
TIE = 0.03
TILE_TIE = 0.06  # of ops that stream tiles, and have few configs
LONG_TILE = 8192  # columns; whole rows beyond are tried last
NARROW_TILE = 128  # columns; a tile of narrower rows has more of them
MOST_BLOCKS = ((1 << 24) - 1, 65_535, 65_535)  # of a grid in x, y and z
BUCKET = 4  # the row counts that problems are priced at: each so much larger than the one before

P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Config:
    """How the rows are tiled.

    tile_m, tile_n: rows and columns of a tile; powers of two.
    keep_row: whole rows stay in registers, as several tiles; otherwise a second pass reads them
        again, from L2.
    persistent: a block takes many row tiles; otherwise it has one.
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

    @property
    def threads(self) -> int:
        return 32 * (self.num_worker_warps or 4)

    def padded(self, cols: int) -> int:
        """Elements of a row and the padding of its last tile."""
        return -(-cols // self.tile_n) * self.tile_n

    def kept(self, cols: int) -> float:
        """Elements that a thread keeps at a time."""
        return self.tile_m * (self.padded(cols) if self.keep_row else self.tile_n) / (self.threads * self.num_ctas)

    def registers(self, cols: int, itemsize: int) -> float:
        """About how many a thread takes: its elements as they came, and half of them in fp32."""
        return OWN_REGISTERS + self.kept(cols) * itemsize * 3 / 8


def candidates(p: Any, device: Device) -> Iterator[Config]:
    """p: a problem with rows, cols and dtype."""
    rows, cols, size = p.rows, p.cols, p.dtype.itemsize
    if device.is_cpu:
        yield from _cpu_configs(rows, cols)
        return
    clusters = (1, 2, 4, 8) if device.arch in CLUSTER_ARCHS and cols > WIDE else (1,)
    many = rows > 2 * device.sms
    for tile_n in _column_tiles(cols):
        least = max(1, NARROW_TILE // tile_n)
        for warps in (4, 8):
            for ctas in clusters:
                for tile_m in [least << i for i in range(5)] if ctas == 1 and many else (1,):
                    c = Config(tile_m, tile_n, num_ctas=ctas, num_worker_warps=warps)
                    yield c
                    if many and ctas == 1:
                        yield from (Config(tile_m, tile_n, occupancy=o, num_worker_warps=warps) for o in _OCCUPANCIES[warps])
                        for occupancy, latency in _PERSISTENT[warps]:
                            tma = device.arch != "sm_80"
                            yield Config(tile_m, tile_n, True, True, latency, tma, False, 1, occupancy, warps)
    if cols * size >= LONG_ROW:
        yield from (Config(1, tile_n, keep_row=False, num_worker_warps=8) for tile_n in (4096, 2048, 8192))
        if len(clusters) > 1:
            yield from (Config(1, 1024 * ctas, num_ctas=ctas, num_worker_warps=8) for ctas in clusters[1:])
            yield Config(1, 4096 * 8, keep_row=False, num_ctas=8, num_worker_warps=8)
        elif many:
            yield Config(1, 1024, persistent=True, occupancy=2, num_worker_warps=8)


_OCCUPANCIES = {4: (4, 6), 8: (2, 3)}
# occupancy, latency: the others spill on sm_90
_PERSISTENT = {4: ((2, 6), (3, 6), (2, 8)), 8: ((2, 6), (1, 10), (3, 4))}


def _column_tiles(cols: int) -> list[int]:
    """Widths of a tile: a power of two as wide as the row, and narrower ones that pad it by little;
    of long rows these first.
    """
    whole = next_pow2(cols)
    widths = [max(whole >> i, 1) for i in range(6)]
    fitting = [w for w in widths if w >= 128 and cdiv(cols, w) <= MAX_CHUNKS and cdiv(cols, w) * w <= PADDING * cols]
    found = dict.fromkeys((whole, *fitting) if whole <= WHOLE_PADDING * cols or not fitting else fitting)
    return sorted(found, key=lambda w: w > LONG_TILE) if cols > LONG_TILE else list(found)


def _cpu_configs(rows: int, cols: int) -> Iterator[Config]:
    tile_n = min(next_pow2(cols), CPU_TILE)
    tile_m = max(1, min(next_pow2(rows), CPU_TILE // tile_n))
    quarter = max(1, tile_n // 4)
    if cols <= CPU_TILE:
        yield Config(tile_m, tile_n)
        yield Config(max(1, tile_m // 4), quarter, persistent=True, occupancy=1)
    yield Config(tile_m, quarter, keep_row=False)


def legal(p: Any, c: Config, device: Device) -> bool:
    """Whether the rows of a tile fit a block's registers, of a second pass only one chunk, and the
    blocks a grid.
    """
    if not c.persistent and not grid_fits(cdiv(p.rows, c.tile_m)):
        return False
    if device.is_cpu:
        return True
    if c.persistent and c.tile_m * device.sms * (c.occupancy or 1) > p.rows:
        return False
    size = p.dtype.itemsize
    kept = c.kept(p.cols)
    loaded = c.tile_m * c.tile_n / (c.threads * c.num_ctas)
    if kept > (MOST_KEPT if loaded <= THIN and not c.persistent else MOST_KEPT / 2 if not c.persistent or c.num_worker_warps == 4 else WIDE_KEPT):
        return False
    if loaded * size < LEAST_BYTES_PER_LOAD and (c.tile_m > 1 or c.num_ctas > 1):
        return False
    return c.occupancy is None or c.occupancy * c.threads * c.registers(p.cols, size) <= REGISTERS


def work(p: Any, c: Config, device: Device, *, chain: float = 0.0, operations: float = OPERATIONS) -> Work:
    """Rows kept in registers or read twice. chain: reductions after the first; operations: on an
    element.
    """
    size, again = p.dtype.itemsize, not c.keep_row
    aligned = p.cols * size & -(p.cols * size)
    # the TMA unit checks for nothing
    checked = (p.cols % c.tile_n > 0 or (c.persistent and c.tile_m > 1)) and not (c.load_tma and aligned >= 16)
    found = stream(
        device,
        cdiv(p.rows, c.tile_m),
        c.tile_m * c.padded(p.cols),
        p.cost().size_bytes,
        c,
        registers=c.registers(p.cols, size),
        aligned=aligned,
        load=size,
        checked=checked,
        operations=operations,
        reads=1 + again / 2,
        passes=1 + again,
        chain=chain + (not c.persistent) + again + (c.num_ctas > 1),
    )
    # Rows that the L2 does not hold until they are read again come from memory: half of the bytes.
    lost = min(1.0, max(0.0, min(found.blocks, found.resident) * c.tile_m * p.cols * size / device.l2_bytes - HELD))
    return replace(found, dram=found.dram * (1 + lost / 2)) if again else found


def stream(
    device: Device,
    blocks: int,
    elements: float,
    dram: float,
    config: Any,
    *,
    registers: float,
    aligned: int = 128,
    load: float = 0,
    checked: bool = False,
    passes: int = 1,
    operations: float = OPERATIONS,
    reads: float = 1.0,
    chain: float = 0.0,
    serial: float = 0.0,
    **more: Any,
) -> Work:
    """Work of blocks that read and write memory: of rows, or of tiles of a matrix.

    elements: of a block, padding included.
    dram: bytes of the launch.
    config: has num_worker_warps, and may have occupancy, num_ctas and persistent.
    registers: of a thread.
    aligned: bytes from row to row.
    load: bytes that are loaded for an element.
    checked: loads may lie outside: each has a branch, and waits for the one before.
    passes: over the elements.
    operations: on an element.
    reads: how often memory or L2 gives a byte.
    chain, serial, more: as of `Work`.
    """
    threads, ctas = 32 * (config.num_worker_warps or 4), getattr(config, "num_ctas", 1)
    per_sm = getattr(config, "occupancy", None) or max(1, min(BLOCKS, THREADS // threads, int(REGISTERS / (threads * registers))))
    aligned = min(128, aligned & -aligned)
    each = max(1.0, elements / ctas / threads)
    loads = max(1.0, each * load / min(16, aligned))
    instructions = passes * (OF_BLOCK + operations * each + (OF_LOAD + OF_CHECK * checked) * loads)
    return Work(
        blocks=blocks,
        resident=max(1, device.sms * per_sm // ctas),
        per_sm=per_sm,
        sms=ctas,
        flops=threads * instructions,
        kinds=("rows",),
        serial=serial + passes * loads * checked,
        fill=dram / blocks * reads / ctas,
        dram=dram,
        aligned=aligned,
        out=elements / ctas,
        persistent=getattr(config, "persistent", False),
        chain=chain + (threads > 128) / 4,
        **more,
    )


def grid_fits(*blocks: int) -> bool:
    """Whether a grid may have so many blocks in x, y and z."""
    return all(count <= most for count, most in zip(blocks, MOST_BLOCKS, strict=False))


def least_tile(rows: int, others: int = 1) -> int:
    """The least rows of a tile, a power of two, for which a grid may have a block for each;
    `others` blocks share a tile.
    """
    return next_pow2(cdiv(rows * others, MOST_BLOCKS[0]))


def coarse(p: P, device: Device) -> P:
    """The problem with a number of rows that stands for all near it, the largest of them: few
    kernels serve every number of rows.
    """
    problem: Any = p
    if device.is_cpu:
        return p
    rows = device.sms // 2 if problem.cols > LONG_TILE else 2 * device.sms
    while rows < problem.rows:
        rows *= BUCKET
    coarser: P = dataclasses.replace(problem, rows=rows)
    return coarser


def family(p: Any, c: Config) -> str:
    """Operand size and what a thread has of a row; options of the op beside."""
    options = "+" * bool(getattr(p, "residual", False))
    each = c.tile_m * c.tile_n // (c.threads * c.num_ctas)
    how = f"{'p' * c.persistent}{'r' * (not c.keep_row)}{c.occupancy or ''}"
    return f"{p.dtype.itemsize}{options} {next_pow2(int(c.kept(p.cols)))}/{each} {c.num_ctas}x{c.threads}{how}"


def row_choices(op: str, fits: Callable[[Any, Config, Device], bool] = legal, *, chain: float = 0.0, like: str = "") -> Choices[Any, Config]:
    """What an op over rows states. fits: where its kernel keeps more than the row."""
    return Choices(op, candidates, fits, partial(work, chain=chain), family, tie=TIE, like=like)


def row_space(choices: Choices[P, Config], p: P, device: Device) -> Ordered[Config]:
    """Configs of an op over rows, the untuned default first."""
    return ordered(choices, coarse(p, device), device)
