"""Which configs of `quantized_matmul` may be worth timing, which of them the kernels can run, and
what each asks of the machine.
"""

from collections.abc import Iterator
from dataclasses import replace

from ...launch import Device, next_pow2
from ...select import Choices, Work
from ..common.weight_choices import FLOPS, INSTRUCTIONS, LEAST_WIDE, STEPS_BYTES, TIE, stages, steps_fit, takes_pieces, takes_scales
from ..common.weight_formats import E2M1, E4M3, INT4, ROWS, WORDS
from .decision import LEFT, Config, Problem, plan

MOST_DECODE = 16  # rows of x of a decode step
FEW = 64  # rows of x up to which the product is bound by reading the weights
PARTS = (2, 3, 4, 6, 8, 12, 16)
LEAST_PART = 512  # of k
PIECES_INSTRUCTIONS = {INT4: 1.5, E2M1: 1.4, E4M3: 1.4}  # as INSTRUCTIONS, and one for each column of a run
# Blocks of an SM of which each begins with weights of its own, where x is read as it is. Two that
# have many steps under way lose by it: 8192 x 8192, int4-128, 16 rows 17.1 us in place of 16.8, 64
# rows 23.8 in place of 23.2; with four blocks 15.7, and one row 13.6 in place of 15.1 (H200).
LEAST_AHEAD = 4
MOST_AHEAD = 2  # runs of a step that come ahead, where shared memory is small
MOST_COLUMNS = 16  # of scales and zero points of a step that stay in registers (4 blocks an SM, sm_90)
# tile_n, runs, occupancy, latency, warps. Blocks that share an SM by fours have one stage each, and
# hide each other's loads: 8192 x 8192, one row, int4-128, in four shares of k take 15.4 us, two a
# pipelined SM in two shares 21.7 (H200, 2026-11-22).
DECODE = ((64, 4, 4, 4, 4), (64, 2, 4, 4, 4), (64, 1, 4, 4, 4), (128, 1, 4, 4, 4), (64, 2, 2, 10, 4), (128, 1, 2, 10, 4))
PIECES_TILES = ((64, 2, 4, 4, 4), (64, 4, 4, 4, 4), (64, 2, 3, 10, 4), (64, 4, 2, 10, 4), (128, 2, 2, 10, 8), (128, 4, 1, 10, 8))
BATCH = ((128, 1, 2, 5, 4), (128, 1, 2, 5, 8), (64, 2, 2, 10, 4), (64, 1, 2, 5, 4), (128, 2, 1, 10, 8))  # from 17 rows
CONSUMER_DECODE = ((64, 1, 2, 4, 4), (64, 2, 4, 4, 4), (64, 4, 2, 4, 4))
AMPERE_DECODE = ((64, 1, 2, 4, 4),)
# tile_m, tile_n, runs, occupancy, latency, warps: the weights of a step are decoded while the
# tensor cores work on those of the other warpgroup.
MANY = ((256, 128, 1, 1, 8, 8), (128, 128, 1, 1, 5, 8), (64, 128, 1, 2, 5, 4), (64, 64, 1, 2, 4, 4))
HOPPER_MANY = (*MANY, (128, 64, 1, 2, 5, 4))
CONSUMER_MANY = ((128, 64, 1, 1, 3, 8), (64, 128, 1, 1, 3, 8), (64, 64, 1, 2, 3, 4))
AMPERE_MANY = ((64, 64, 1, 1, 3, 8),)
EXTRA = (16, 32, 64)  # rows of x beside a tile of many, on sm_90, where they were timed; with 128, 256 spill
FEW_TILES = {"sm_80": AMPERE_DECODE, "sm_120": CONSUMER_DECODE, "sm_121": CONSUMER_DECODE}
MANY_TILES = {"sm_80": AMPERE_MANY, "sm_90": HOPPER_MANY, "sm_120": CONSUMER_MANY, "sm_121": CONSUMER_MANY}


def candidates(p: Problem, device: Device) -> Iterator[Config]:
    """Tiles of few rows with k shared among blocks until they fill the GPU, and tiles of many; with
    scales by TMA, which a tile of many rows does not wait for (256 x 4096 x 4096, int4-128, H200:
    20.9 us in place of 29.2; 256 x 128 tiles 41.5 and 44.9), and without (one row of 8192 x 8192:
    14.2 in place of 15.9). Of given or so many shares, what is chosen for any number.
    """
    if p.shares > 0 or p.given:
        yield DECISION.decide(replace(p, shares=LEFT if p.shares else 0, given=0), device)[0]
        return
    if device.is_cpu:
        if p.m <= FEW:
            yield Config(next_pow2(p.m), ROWS, next_pow2(min(p.runs, 2)), split_k=1 + p.m % 3, pieces=True, ahead=p.m % 2)
        yield Config(next_pow2(min(p.m, 512)), ROWS * next_pow2(min(8, -(-p.n // ROWS))), next_pow2(min(p.runs, 4)))
        return
    if p.m <= FEW:
        pieces = list(_pieces(p, device))
        yield from pieces
        # In a step the others take longer than alone. Llama-3.1-8B, one token, H200: q, k and v of
        # int4-128 1.3 us, of e4m3 1.5, down of e4m3 1.4; a step of e4m3 2627 us, with pieces 2507
        # (2026-11-30, notes/LOG.md).
        if p.m == 1 and p.shares and p.before and any(legal(p, c, device) for c in pieces):
            return
    found = dict.fromkeys(_tiles(p, device))
    for tma in (True, False) if p.m > FEW else (False, True):
        if not tma or (p.format.group and device.arch != "sm_80"):
            for c in found:
                alone = c.occupancy < LEAST_AHEAD or c.tile_m > FEW or not device.has_fp8
                yield from (replace(c, tma_scales=tma, ahead=ahead) for ahead in ((0,) if alone else (0, 1)))


def _pieces(p: Problem, device: Device) -> Iterator[Config]:
    tile_m = max(next_pow2(p.m), LEAST_WIDE // p.columns)
    for tile_n, runs, occupancy, latency, warps in PIECES_TILES:
        c = Config(tile_m, tile_n, runs, pieces=True, latency=latency, occupancy=occupancy, num_worker_warps=warps)
        for one in _shared(c, p, device):
            yield from (replace(one, ahead=ahead) for ahead in (1, 0))


def _tiles(p: Problem, device: Device) -> Iterator[Config]:
    rows, of = max(8, next_pow2(p.m)), p.format
    if p.m <= FEW:
        tiles = FEW_TILES.get(device.arch, DECODE if p.m <= MOST_DECODE else BATCH)
        for tile_n, runs, occupancy, latency, warps in tiles:
            sums = of.group > 0 and of.group % of.run == 0
            c = Config(rows, tile_n, runs, scale_sums=sums, latency=latency, occupancy=occupancy, num_worker_warps=warps)
            yield from _shared(c, p, device)
    for tile_m, tile_n, runs, occupancy, latency, warps in MANY_TILES.get(device.arch, MANY):
        if tile_m <= max(64, rows):
            c = Config(tile_m, tile_n, runs, latency=latency, occupancy=occupancy, num_worker_warps=warps)
            yield from _shared(c, p, device)
            if p.m > FEW and device.arch == "sm_90":
                for extra in (e for e in EXTRA if e < tile_m and _padded(p.m, tile_m + e) < _padded(p.m, tile_m)):
                    yield from _shared(replace(c, extra_m=extra), p, device)


def _padded(rows: int, tile: int) -> int:
    return -(-rows // tile) * tile


def _shared(c: Config, p: Problem, device: Device) -> Iterator[Config]:
    """Without and with k shared, as far as blocks find room."""
    yield c
    yield from (replace(c, split_k=parts) for parts in PARTS if c.tiles(p) * parts <= _resident(c, device) and parts * LEAST_PART <= p.k)


def _resident(c: Config, device: Device) -> int:
    return device.sms * c.occupancy


def legal(p: Problem, c: Config, device: Device) -> bool:
    """Each accumulator has rows. A warpgroup scales the weights of one panel. Where shared memory
    is small, four runs that come ahead take 255 registers and 91 KB (sm_120).

    Those of two would pass through shared memory, as would zero points (8192 x 8192, one row, H200:
    mxfp4 19 and 32 us; int4-128-zeros took 34).
    """
    of = p.format
    if c.ahead > c.least_steps(p) or (c.extra_m and (c.pieces or p.m <= c.rows - (c.extra_m & -c.extra_m))):
        return False
    if not steps_fit(c, _step_bytes(p, c), device) or (c.ahead and c.runs > MOST_AHEAD and device.arch in STEPS_BYTES):
        return False
    if c.pieces:
        return takes_pieces(of, c.tile_m * p.columns, c, device)
    if of.group and (of.zeros or not c.scale_sums) and c.tile_n > 16 * c.num_worker_warps and not device.is_cpu:
        return False
    # The compiler gives e8m0 scales one stage there: 582 us, and tiles of 128 rows 539 (mxfp4, 2048
    # rows, 8192 x 8192, H200). By TMA they have two, and wait to be timed.
    if of.scale_dtype.itemsize == 1 and c.tile_m > 128 and device.arch == "sm_90":
        return False
    return takes_scales(of, c, MOST_COLUMNS, device)


def _step_bytes(p: Problem, c: Config) -> int:
    return c.runs * (4 * WORDS * c.tile_n + (p.columns if c.pieces else 2) * p.format.run * c.rows)


def work(p: Problem, c: Config, device: Device) -> tuple[Work, ...]:
    """Bytes of the weights, and x once for each tile of them. Pieces, and what else becomes of x,
    are made by a small launch.

    Sums that are left cost their bytes, and no launch. Steps that come ahead are not waited for, as
    their weights come while that small launch runs. Not those of a block that needs an SM for
    itself: it begins when the launch before has left (gate and up of Llama-3.1-8B, e4m3, H200: 33.7
    us, four blocks an SM 29.1). Where x stays what it is, pieces of it would need a launch of their
    own: there, and with a launch for the sums, measured times agree with prices as of lone calls.
    """
    of, parts, tiles = p.format, c.parts(p), c.tiles(p)
    each = -(-(-(-p.runs // c.runs)) // parts)
    left = p.shares != 0 and p.before
    early = p.before and (left or parts == 1) and c.occupancy > 1
    steps = each - min(c.ahead, each - 1) if early else each
    sums = 8.0 * parts * p.m * p.n if parts > 1 else 0.0
    deep = c.runs * of.run
    # Of a run: words out of shared memory, then numbers, then products of each panel. Products of
    # many rows run under those of the other warpgroup.
    waits = 2 + c.tile_n // 16 // c.num_worker_warps
    # What x has in shared memory: a row of 16 bits, or columns of 8. The sums of each are scaled.
    bytes_x = deep * (p.columns if c.pieces else 2)
    decode = PIECES_INSTRUCTIONS[of.code] + c.rows * p.columns / of.run if c.pieces else INSTRUCTIONS[of.code]
    product = Work(
        blocks=tiles * parts,
        resident=_resident(c, device),
        per_sm=c.occupancy,
        steps=steps,
        flops=bytes_x * c.rows * c.tile_n + FLOPS * decode * c.tile_n * deep,
        kinds=(f"{of.bits} {c.tile_n}x{c.runs} {c.occupancy}{c.latency}{c.num_worker_warps}{'p' * c.pieces}{'+' * (c.extra_m > 0)}",),
        fill=c.runs * 4 * WORDS * c.tile_n + bytes_x * min(p.m, c.rows),
        padding=bytes_x * max(0, c.rows - p.m),
        dram=p.cost().size_bytes * steps / each + (sums if left else 0.0),
        out=c.rows * c.tile_n,
        serial=waits * c.runs * (of.run / 128) * min(1.0, FEW / c.rows),
        partial=0.0 if left else sums,
        stages=stages(c, _step_bytes(p, c), device) if c.latency >= 5 or c.pieces else 1,
    )
    if not (c.pieces or p.before):
        return (product,)
    return Work(p.m, resident=8 * device.sms, per_sm=8, dram=4.0 * p.m * p.k, partial=2.0 * p.m * p.k * p.columns), product


def family(p: Problem, c: Config) -> str:
    """What the model errs alike about."""
    of = p.format
    how = f"{of.code}/{of.group}{'z' * of.zeros}{'s' * c.scale_sums}{'+' * (c.split_k > 1)}"
    return f"{how} {c.rows}x{c.tile_n}x{c.runs} {c.occupancy}{c.num_worker_warps}{c.latency}{'t' * c.tma_scales}{'p' * c.pieces}"


CHOICES = Choices("quantized_matmul", candidates, legal, work, family, tie=TIE)
space = CHOICES.space

_ARGUMENTS = ("x", "words", "scales", "zeros", "factor", "bias", "out", "norm", "residual", "up", "new_residual", "eps", "weight_offset")
DECISION = CHOICES.decision(Problem, plan, _ARGUMENTS)
