"""How kernels stream a matrix, by rows that they reduce or by tiles: their configs, and the work of
any op that reads and writes memory once.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, TypeVar

from cuda.tile import cdiv

from ...launch import Device, next_pow2
from ...select import Choices, Work
from .scaling import GROUP

# several blocks can share a row and reduce through each other's shared memory
CLUSTER_ARCHS = ("sm_90", "sm_100", "sm_103")
MAX_CHUNKS = 16
PADDING, WHOLE_PADDING = 1.125, 1.25  # of a row by its tiles, and by one tile, at most
# elements of a thread, where a load brings at most THIN of them; else half: more spill once they
# are held in fp32 (sm_90)
MOST_KEPT = 128
THIN = 16
WIDE_KEPT = 112  # of a persistent block on 8 warps
LEAST_BYTES_PER_LOAD = 8  # of a thread, where rows begin at multiples of 16
LONG_ROW = 16_384  # bytes; from here on reading a row twice may win
WIDE = 32_768  # elements of a row; beyond, several blocks may share it
SHARED = 4096  # likewise, if a load brings one of them and half of the SMs have no row
MOST_CLUSTER = 8  # blocks that share a row
CPU_TILE = 1 << 20  # elements; the interpreter is fastest with few large tiles
THREADS, REGISTERS, BLOCKS = 2048, 65_536, 32  # of an SM
OWN_REGISTERS = 24  # of a thread, beside its share of the row
SPARED = 8  # of those, where two blocks with a row each share an SM: 112 elements fit 128 (sm_90)
MOST_REGISTERS = 200  # of a thread by that count, which leaves out what an expression takes
OPERATIONS = 8  # on an element of a row
# Latencies of a tile of a row with narrow loads: the compiler loads its weights behind the
# reduction, and each piece of them behind the store of the one before; a residual is stored too
# (sm_90, tileiras 13.4).
LATE = 1.0, 3.0  # without one, and with one
OF_BLOCK, OF_LOAD, OF_MASK = 60, 12, 4  # of a thread: once, of a load with its store, of their masks
OF_SUM = 12, 20  # of a thread: to reduce a row within a warp, and across warps
HELD = 0.7  # of the L2, by rows that wait to be read again
TIE = 0.03
TILE_TIE = 0.06  # of ops that stream tiles, and have few configs
WAIT_TIE = 0.25  # of ops where waits decide, which the model knows least of: the first config stays unless another is far better
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

    def blocks(self, tiles: int, device: Device) -> tuple[int]:
        """The grid."""
        return (min(tiles, device.sms * (self.occupancy or 1)) if self.persistent else tiles,)

    @property
    def threads(self) -> int:
        return threads(self)

    def padded(self, cols: int) -> int:
        """Elements of a row and the padding of its last tile."""
        return -(-cols // self.tile_n) * self.tile_n

    def kept(self, cols: int) -> float:
        """Elements that a thread keeps at a time."""
        return self.tile_m * (self.padded(cols) if self.keep_row else self.tile_n) / (self.threads * self.num_ctas)

    def registers(self, p: Any, vectors: int = 0, operands: float = 0) -> float:
        """About how many a thread takes: one for each element, its columns of vectors such as a
        weight, and the elements of further operands, which come with those of x.
        """
        across = min(self.threads, self.tile_n // vector(p))  # threads that share a row
        rows = max(1.0, self.tile_m * across / self.threads)
        return OWN_REGISTERS + self.kept(p.cols) * (1 + (vectors / rows + operands) * int(p.dtype.itemsize) / 4)


def threads(config: Any) -> int:
    """Of a block."""
    return 32 * (config.num_worker_warps or 4)


def vector(p: Any) -> int:
    """Elements of a load: as many as rows begin at multiples of, 16 bytes at most."""
    cols: int = p.cols
    return min(cols & -cols, 16 // int(p.dtype.itemsize))


# ------------------------------------------------------------------------------------------- rows
Vectors = Callable[[Any], int]  # of a problem


def none(p: Any) -> int:
    return 0


def candidates(p: Any, device: Device) -> Iterator[Config]:
    """p: a problem with rows, cols and dtype."""
    if device.is_cpu:
        yield from _cpu_configs(p, 1)
        return
    many, clusters = p.rows > 2 * device.sms, _clusters(p, device)
    for tile_n, warps in product(_column_tiles(p), (4, 8)):
        least = max(1, NARROW_TILE // tile_n)
        for tile_m in [least << i for i in range(5)] if many else (1,):
            c = Config(tile_m, tile_n, num_worker_warps=warps)
            yield c
            if many:
                yield from (replace(c, occupancy=occupancy) for occupancy in _OCCUPANCIES[warps])
                yield from _persistent(c, p, device, _PERSISTENT[warps])
        yield from (Config(1, tile_n, num_ctas=ctas, num_worker_warps=warps) for ctas in clusters)
    if p.cols * p.dtype.itemsize >= LONG_ROW:
        yield from whole_blocks(LONG)
        if clusters and p.cols > WIDE:
            yield from whole_blocks(LONG_CLUSTERS)
        elif many:
            yield Config(1, 1024, persistent=True, occupancy=2, num_worker_warps=8)


def _clusters(p: Any, device: Device) -> tuple[int, ...]:
    """How many blocks may share a row."""
    if device.arch not in CLUSTER_ARCHS:
        return ()
    if p.cols > WIDE:
        return 2, 4, MOST_CLUSTER
    # With wider loads one block is as fast (H200).
    return (2,) if p.cols >= SHARED and vector(p) == 1 and 2 * p.rows <= device.sms else ()


def whole_blocks(table: Iterable[tuple[int, bool, int, int | None]]) -> Iterator[Config]:
    """Of 8 warps, with a row each. table: tile_n, keep_row, num_ctas, occupancy."""
    for tile_n, keep_row, num_ctas, occupancy in table:
        yield Config(1, tile_n, keep_row, num_ctas=num_ctas, occupancy=occupancy, num_worker_warps=8)


# As whole_blocks takes them.
LONG = ((4096, False, 1, None), (2048, False, 1, None), (8192, False, 1, None))
LONG_CLUSTERS = ((2048, True, 2, None), (4096, True, 4, None), (8192, True, 8, None), (32_768, False, 8, None))
_OCCUPANCIES = {4: (4, 6), 8: (2, 3)}
# occupancy, latency: the others spill on sm_90
_PERSISTENT = {4: ((2, 6), (3, 6), (2, 8)), 8: ((2, 6), (1, 10), (3, 4))}


def _persistent(c: Config, p: Any, device: Device, how: tuple[tuple[int, int], ...]) -> Iterator[Config]:
    """Such blocks that take many tiles. how: occupancy and latency of each."""
    tma = device.arch != "sm_80" and p.cols * p.dtype.itemsize % 16 == 0  # what the unit wants of rows
    for occupancy, latency in how:
        yield replace(c, persistent=True, latency=latency, load_tma=tma, occupancy=occupancy)


def _column_tiles(p: Any) -> list[int]:
    """Widths of a tile: a power of two as wide as the row, and narrower ones that pad it by little,
    down to one load of a warp; of long rows these first.
    """
    cols, whole = p.cols, next_pow2(p.cols)
    least = 32 if p.cols * p.dtype.itemsize % 16 else min(NARROW_TILE, 32 * vector(p))
    narrow = [w for w in (whole >> i for i in range(6)) if w >= least and cdiv(cols, w) <= MAX_CHUNKS]
    fitting = [w for w in narrow if cdiv(cols, w) * w <= PADDING * cols] or narrow[-1:] or [whole]
    padded = cdiv(cols, fitting[-1]) * fitting[-1]
    found = dict.fromkeys((whole, *fitting) if whole <= max(WHOLE_PADDING * cols, padded) else fitting)
    return sorted(found, key=lambda w: w > LONG_TILE) if cols > LONG_TILE else list(found)


def _cpu_configs(p: Any, least: int) -> Iterator[Config]:
    """least: columns of a tile."""
    tile_n = min(next_pow2(p.cols), CPU_TILE)
    tile_m = max(1, min(next_pow2(p.rows), CPU_TILE // tile_n))
    quarter = max(least, tile_n // 4)
    if p.cols <= CPU_TILE:
        yield Config(tile_m, tile_n)
        yield Config(max(1, tile_m // 4), quarter, persistent=True, occupancy=1)
    yield Config(tile_m, quarter, keep_row=False)


def legal(p: Any, c: Config, device: Device, *, vectors: Vectors = none) -> bool:
    """Whether the rows of a tile fit a block's registers, of a second pass only one chunk, and the
    blocks a grid. vectors: how many each row is multiplied by or added to.
    """
    if device.is_cpu or not launchable(c, cdiv(p.rows, c.tile_m), device):
        return device.is_cpu
    if c.num_ctas > 1 and c.num_ctas not in _clusters(p, device):
        return False
    size = p.dtype.itemsize
    kept = c.kept(p.cols)
    # Persistent loops keep vectors: 320 bytes of a thread fit, and half where 16 warps share an SM
    # (sm_90, sm_121).
    held = (c.tile_m + vectors(p)) * c.padded(p.cols) * size / c.threads
    if c.persistent and vectors(p) > 1 and held > (160 if c.threads * (c.occupancy or 1) >= 512 else 320):
        return False
    loaded = c.tile_m * c.tile_n / (c.threads * c.num_ctas)
    if kept > (MOST_KEPT if loaded <= THIN and not c.persistent else MOST_KEPT / 2 if not c.persistent or c.num_worker_warps == 4 else WIDE_KEPT):
        return False
    if loaded * size < min(LEAST_BYTES_PER_LOAD, vector(p) * size) and (c.tile_m > 1 or c.num_ctas > 1):
        return False
    # Short of registers, the compiler loads two vectors after the reductions, piece by piece of a
    # tile; of a single piece it spills (sm_90, tileiras 13.4).
    late = vectors(p) > 1 and c.occupancy is not None and not c.persistent and c.tile_m == 1 and loaded > vector(p)
    registers = c.registers(p, 0 if late else vectors(p))
    if c.tile_m == 1 and c.occupancy == 2 and c.num_worker_warps == 8 and not c.persistent:
        registers -= SPARED
    return registers <= MOST_REGISTERS and (c.occupancy is None or c.occupancy * c.threads * registers <= REGISTERS)


def work(p: Any, c: Config, device: Device, *, chain: float = 0.0, operations: float = OPERATIONS, vectors: Vectors = none) -> Work:
    """Rows kept in registers or read twice. chain: reductions after the first; operations: on an
    element.
    """
    size, again, warps = p.dtype.itemsize, not c.keep_row, c.threads // 32
    # A row of a tile that one load of a warp covers is reduced without the others.
    across = c.tile_m % warps > 0 or c.tile_n > 32 * vector(p)
    late = LATE[getattr(p, "residual", False)] * (c.padded(p.cols) // c.tile_n) / c.num_ctas if vectors(p) and vector(p) * size < 16 else 0.0
    found = stream(
        p,
        c,
        device,
        cdiv(p.rows, c.tile_m),
        c.tile_m * c.padded(p.cols),
        registers=c.registers(p, vectors(p), getattr(p, "residual", False)),
        aligned=p.cols * size,
        load=1 / vector(p),
        masked=(p.cols % c.tile_n > 0 or (c.persistent and c.tile_m > 1)) and not c.load_tma,
        operations=operations,
        once=OF_BLOCK + (1 + chain) * OF_SUM[across] * (c.tile_m if across else c.tile_m / warps),
        reads=1 + again / 2,
        passes=1 + again,
        chain=1 + chain + (not c.persistent) + again + (c.num_ctas > 1) + late,
    )
    # Rows that the L2 does not hold until they are read again come from memory: half of the bytes.
    lost = beyond_l2(min(found.blocks, found.resident) * c.tile_m * p.cols * size, device)
    return replace(found, dram=found.dram * (1 + lost / 2)) if again else found


def beyond_l2(size_bytes: float, device: Device) -> float:
    """The share of bytes that are read again which the L2 does not hold until then."""
    return min(1.0, max(0.0, size_bytes / device.l2_bytes - HELD))


def family(p: Any, c: Config) -> str:
    """Operand size and what a thread has of a row; options of the op beside."""
    options = "+" * bool(getattr(p, "residual", False))
    each = c.tile_m * c.tile_n // (c.threads * c.num_ctas)
    how = f"{'p' * c.persistent}{'r' * (not c.keep_row)}{c.occupancy or ''}"
    return f"{p.dtype.itemsize}{options} {next_pow2(int(c.kept(p.cols)))}/{each} {c.num_ctas}x{c.threads}{how}"


# ------------------------------------------------------------------------------------------- tiles
# Pieces of 16 bytes of a thread, warps; occupancy and latency of persistent blocks.
TILES: tuple[tuple[float, int], ...] = ((2, 4), (1, 4), (4, 4), (2, 8), (4, 8), (1, 8), (8, 8), (1 / 2, 4))
NARROW_TILES = ((1 / 4, 4),)  # where a load brings one element
PERSISTENT_TILES = {4: ((8, 2),), 8: ((4, 2), (2, 4))}


def tile_candidates(p: Any, device: Device, *, grouped: bool = False) -> Iterator[Config]:
    """Of a matrix in independent tiles. grouped: each has whole groups of columns."""
    least = min(GROUP, next_pow2(p.cols)) if grouped else 1
    if device.is_cpu:
        wide = Config(1, CPU_TILE)
        found = _cpu_configs(p, least) if p.cols <= CPU_TILE else (wide, replace(wide, persistent=True, occupancy=1))
        yield from (c for c in found if c.keep_row)
        return
    for pieces, warps in TILES if vector(p) > 1 else (*TILES, *NARROW_TILES):
        size = int(pieces * 32 * warps * 16 / p.dtype.itemsize)
        for tile_n in _tile_widths(p, size, least, grouped):
            c = Config(min(max(1, size // tile_n), next_pow2(p.rows)), tile_n, num_worker_warps=warps)
            yield c
            if pieces == 2:
                yield from _persistent(c, p, device, PERSISTENT_TILES[warps])


def _tile_widths(p: Any, size: int, least: int, grouped: bool) -> list[int]:
    """Of a tile of `size` elements: no less than a group, and little padding."""
    fitting = min(next_pow2(p.cols), max(size, least))
    while fitting > max(least, 32 * vector(p)) and cdiv(p.cols, fitting) * fitting > p.cols * PADDING:
        fitting //= 2
    if grouped:  # scales of eight rows and more fill whole 32-byte sectors
        return list(dict.fromkeys((max(least, min(fitting, size // 8)), least, fitting)))
    divisor = min(p.cols & -p.cols, size)
    return list(dict.fromkeys((divisor, fitting))) if divisor >= NARROW_TILE else [fitting]


def tiles(p: Any, c: Config) -> int:
    """How many there are."""
    return int(cdiv(p.rows, c.tile_m) * cdiv(p.cols, c.tile_n))


def tile_legal(p: Any, c: Config, device: Device, *, most: int = 64) -> bool:
    """most: bytes that a thread has of a tile of each operand."""
    if device.is_cpu:
        return c.persistent or grid_fits(tiles(p, c))
    return c.tile_m * c.tile_n * p.dtype.itemsize <= most * c.threads and launchable(c, tiles(p, c), device)


def tile_work(p: Any, c: Config, device: Device, *, operands: int = 1, partial: int = 0, registers: float | None = None) -> Work:
    """A block loads its tile of each operand and stores one. partial: bytes of partial maxima, of a
    launch before. registers: of a thread, for each element of its tile.
    """
    size, tile = p.dtype.itemsize, c.tile_m * c.tile_n
    return stream(
        p,
        c,
        device,
        tiles(p, c),
        tile,
        registers=OWN_REGISTERS + tile / c.threads * (registers or 1 + operands * size / 4),
        aligned=p.cols * size,
        load=operands / vector(p),
        masked=p.cols % c.tile_n > 0 and not c.load_tma,
        operations=OPERATIONS * operands,
        partial=partial,
    )


def tile_family(p: Any, c: Config) -> str:
    """Operand size, what a thread has of a tile, its width and how it is launched."""
    each = c.tile_m * c.tile_n // c.threads
    how = f"{'p' * c.persistent}{c.latency if c.persistent else ''}{c.occupancy or ''}"
    return f"{p.dtype.itemsize} {each} {c.tile_n}x{c.threads}{how}{'m' * (p.cols % c.tile_n > 0)}"


# -------------------------------------------------------------------------------------- any stream
def stream(
    p: Any,
    c: Any,
    device: Device,
    blocks: int,
    elements: float,
    *,
    registers: float = 0.0,
    own: float = OWN_REGISTERS,
    held: float = 0.0,
    aligned: int = 128,
    load: float = 0,
    masked: bool = False,
    passes: int = 1,
    operations: float = OPERATIONS,
    once: float = OF_BLOCK,
    reads: float = 1.0,
    chain: float = 0.0,
    **more: Any,
) -> Work:
    """Work of blocks that read and write memory: of rows, or of tiles of a matrix.

    p: a problem whose cost() is what the launch moves.
    c: has num_worker_warps, and may have occupancy, num_ctas and persistent.
    elements: of a block, padding included.
    registers: of a thread; by default `own`, and `held` for each of its elements.
    aligned: bytes from row to row.
    load: loads of a thread for an element.
    masked: loads may lie outside.
    passes: over the elements.
    operations: of a thread on an element; once: beside them.
    reads: how often memory or L2 gives a byte.
    chain, more: as in `Work`.
    """
    lanes, ctas, dram = threads(c), getattr(c, "num_ctas", 1), p.cost().size_bytes
    each = max(1.0, elements / ctas / lanes)
    registers = registers or own + held * each
    per_sm = getattr(c, "occupancy", None) or max(1, min(BLOCKS, THREADS // lanes, int(REGISTERS / (lanes * registers))))
    aligned = min(128, aligned & -aligned)
    loads = max(1.0, each * load)
    return Work(
        blocks=blocks,
        resident=max(1, device.sms * per_sm // ctas),
        per_sm=per_sm,
        sms=ctas,
        flops=lanes * passes * (once + operations * each + (OF_LOAD + OF_MASK * masked) * loads),
        kinds=("rows",),
        fill=dram / blocks * reads / ctas,
        dram=dram,
        aligned=aligned,
        out=elements / ctas,
        persistent=getattr(c, "persistent", False),
        chain=chain + (lanes > 128) / 4,
        **more,
    )


def grid_fits(*blocks: int) -> bool:
    """Whether a grid may have so many blocks in x, y and z."""
    return all(count <= most for count, most in zip(blocks, MOST_BLOCKS, strict=False))


def launchable(c: Any, count: int, device: Device) -> bool:
    """Persistent blocks have two tiles at least, of so many; others fit a grid."""
    return device.is_cpu or (count > device.sms * (c.occupancy or 1) if c.persistent else grid_fits(count))


def least_tile(rows: int, others: int = 1) -> int:
    """The least rows of a tile, a power of two, for which a grid may have a block for each;
    `others` blocks share a tile.
    """
    return next_pow2(cdiv(rows * others, MOST_BLOCKS[0]))


def coarse(p: P, device: Device) -> P:
    """The problem with a number of rows that stands for all near it, the largest of them: few
    kernels serve every number of rows. One in tiles (not by_rows) stands for itself.
    """
    problem: Any = p
    if device.is_cpu or not getattr(p, "by_rows", True):
        return p
    rows = device.sms // 2 if problem.cols > LONG_TILE else 2 * device.sms
    if problem.cols > WIDE and problem.rows <= device.sms // MOST_CLUSTER:
        rows = device.sms // MOST_CLUSTER  # the largest clusters have SMs of their own
    while rows < problem.rows:
        rows *= BUCKET
    coarser: P = dataclasses.replace(problem, rows=rows)
    return coarser


def row_choices(op: str, *, chain: float = 0.0, vectors: Vectors) -> Choices[Any, Config]:
    """What an op over rows states."""
    found, priced = partial(legal, vectors=vectors), partial(work, chain=chain, vectors=vectors)
    return Choices(op, candidates, found, priced, family, tie=TIE, bucket=coarse)
