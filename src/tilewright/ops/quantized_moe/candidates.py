"""Which configs of `quantized_moe` may be worth timing, which of them the kernel can run, and what
each asks of the machine.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ...launch import Device, next_pow2
from ...select import Choices, Work
from ..common.groups import expected_panels
from ..common.rows import grid_fits
from ..common.weight_choices import FLOPS, INSTRUCTIONS, LEAST_WIDE, MOST_WIDE, TIE, stages, steps_fit, takes_pieces, takes_scales
from ..common.weight_formats import E2M1, E4M3, INT4, ROWS, WORDS
from .decision import Config, Problem, plan

MOST_PAIRS = 128  # of token and choice, of which every block counts its expert's
PIECES_INSTRUCTIONS = {INT4: 1.4, E2M1: 1.6, E4M3: 0.9}  # as INSTRUCTIONS
MOST_COLUMNS = 8  # of scales and zero points of a step and part that stay in registers
# tile_n, runs, occupancy, latency, warps
PIECES = ((32, 4, 3, 10, 4), (32, 2, 3, 10, 4), (32, 2, 4, 4, 4), (32, 1, 3, 10, 4), (64, 1, 2, 10, 8))
# The same without pieces
MANY = ((32, 1, 2, 4, 4), (32, 2, 4, 4, 4), (64, 1, 1, 5, 8), (32, 1, 2, 5, 4), (64, 1, 2, 5, 8))
BLACKWELL = ((32, 1, 2, 5, 4), (32, 1, 1, 5, 4))
CONSUMER = ((32, 1, 2, 4, 4), (32, 2, 2, 4, 4))
AMPERE = ((32, 1, 2, 3, 4), (32, 1, 1, 3, 4))
TILES = {"sm_80": AMPERE, "sm_100": BLACKWELL, "sm_103": BLACKWELL, "sm_120": CONSUMER, "sm_121": CONSUMER}


def candidates(p: Problem, device: Device) -> Iterator[Config]:
    """Pieces of the rows of a few tokens, or panels of about as many rows as an expert has."""
    sums = p.format.group > 0 and p.format.group % p.format.run == 0
    least = 16 if device.arch == "sm_80" else 8  # as in `moe`
    rows = p.pairs / p.experts
    if device.is_cpu:
        if p.pairs <= MOST_PAIRS:
            runs = next_pow2(min(4, -(-max(p.hidden, p.inter) // p.format.run)))
            yield Config(min(4, next_pow2(p.tokens)), True, 32 if p.tokens % 2 else ROWS, 1 + p.tokens % 3, runs)
        yield Config(min(64, max(2, next_pow2(-(-p.pairs // p.experts)))), False, 32 if p.tokens % 4 else ROWS, 1, 1 + p.tokens % 3, sums)
        return
    if p.pairs <= MOST_PAIRS:
        # Of equal prices the first counts: halves of k win where there are few blocks.
        for tile_m, shares in product((1, 2, 4), (2, 1, 4) if p.tokens == 1 else (1, 2, 4)):
            for n, runs, occupancy, latency, warps in PIECES:
                c = Config(tile_m, True, n, shares, runs, False, latency, occupancy, warps)
                if LEAST_WIDE <= tile_m * c.columns(p) <= MOST_WIDE and tile_m < 2 * max(next_pow2(p.tokens), LEAST_WIDE // c.columns(p)):
                    yield c
    about = next_pow2(int(1.5 * rows))
    for tile_m in dict.fromkeys(max(least, min(128, r)) for r in (about, 2 * about, about // 2)):
        small = sums and tile_m <= 64
        for n, runs, occupancy, latency, warps in TILES.get(device.arch, MANY):
            yield Config(tile_m, False, n, 1, runs, small, latency, occupancy, warps)


def legal(p: Problem, c: Config, device: Device) -> bool:
    if not steps_fit(c, _step_bytes(p, c), device):
        return False
    if c.pieces:
        return p.pairs <= MOST_PAIRS and takes_pieces(p.format, c.tile_m * c.columns(p), c, device)
    return takes_scales(p.format, c, MOST_COLUMNS, device) and grid_fits(p.most_panels(c.tile_m) * -(-max(p.inter, p.hidden) // ROWS))


def _step_bytes(p: Problem, c: Config) -> int:
    """Of the first product: words of gate and up, and x."""
    return c.runs * (2 * 4 * WORDS * c.tile_n + p.format.run * (p.format.run // 16 if c.pieces else 2) * c.tile_m)


def work(p: Problem, c: Config, device: Device) -> tuple[Work, ...]:
    """The two products, and the launches around them; tokens choose at random."""
    of, rows = p.format, p.pairs / p.experts
    used = p.experts * (1 - (1 - min(1.0, p.top_k / p.experts)) ** p.tokens)
    panels = max(used, p.pairs / c.tile_m) if c.pieces else p.experts * expected_panels(rows, rows**0.5, c.tile_m)
    deep, columns = c.runs * of.run, c.tile_m * (of.run // 16 if c.pieces else 1)
    decode = (PIECES_INSTRUCTIONS if c.pieces else INSTRUCTIONS)[of.code]

    def matrices(sides: int, n: int, k: int, left: float, shares: int = 1) -> Work:
        """left: bytes that the launch before left."""
        width = sides * c.tile_n
        return Work(
            blocks=max(1, round(panels * -(-n // c.tile_n))) * shares,
            resident=device.sms * c.occupancy,
            per_sm=c.occupancy,
            steps=-(-k // deep // shares),
            flops=width * deep * (2.0 * columns + FLOPS * decode * 4 / c.num_worker_warps),
            kinds=(f"{of.bits} {c.runs} {c.occupancy}{c.latency}",),
            fill=width * c.runs * 4 * WORDS + (2 - c.pieces) * deep * columns,
            dram=used * sides * of.size_bytes(n, k),
            out=columns * width,
            serial=2.0 * sides * c.runs * (of.run / 128),
            partial=2 * left,
            stages=stages(c, _step_bytes(p, c), device),
        )

    small = Work(1, resident=8 * device.sms, per_sm=8, chain=1.0)
    if c.pieces:
        held = 2.0 * panels * columns
        return (
            replace(small, blocks=p.pairs, chain=2.0),
            matrices(2, p.inter, p.hidden, held * p.hidden),
            matrices(1, p.hidden, p.inter, held * p.inter, c.shares),
            replace(small, blocks=p.tokens, partial=8.0 * c.shares * p.pairs * p.hidden),
        )
    h, y = (2.0 * p.pairs * n for n in (p.inter, p.hidden))
    return (
        replace(small, blocks=p.experts, steps=-(-p.pairs // 4096), partial=8.0 * p.pairs),
        replace(small, blocks=max(p.tokens, p.experts), chain=2.0, dram=2.0 * y, partial=8.0 * p.pairs),
        matrices(2, p.inter, p.hidden, y),
        matrices(1, p.hidden, p.inter, h),
        replace(small, blocks=p.tokens, partial=2.0 * y),
    )


def family(p: Problem, c: Config) -> str:
    """What the model errs alike about."""
    of, form = p.format, f"pieces {c.tile_n}/{c.shares} {c.num_worker_warps}" if c.pieces else "many"
    return f"{of.code}/{of.group}{'z' * of.zeros}{'s' * c.scale_sums} {form} {c.tile_m}x{c.runs} {c.occupancy}{c.latency}"


CHOICES = Choices("quantized_moe", candidates, legal, work, family, tie=TIE)
space = CHOICES.space

_ARGUMENTS = (
    "x",
    "weights",
    "ids",
    *(f"{kind}_{part}" for part in ("gate_up", "down") for kind in ("words", "scales", "zeros", "bias")),
    "out",
)
DECISION = CHOICES.decision(Problem, plan, _ARGUMENTS)
