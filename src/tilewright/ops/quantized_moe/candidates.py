"""Which configs of `quantized_moe` may be worth timing, which of them the kernel can run, and what
each asks of the machine.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ...launch import Decision, Device, next_pow2
from ...select import Choices, Work
from ..common.groups import expected_panels
from ..common.rows import grid_fits
from ..common.weight_formats import E2M1, E4M3, INT4, INT8, ROWS, WORDS
from .decision import Config, Problem, plan

MOST_FEW = 16  # tokens that each chosen expert's weights meet at once
INSTRUCTIONS = {INT4: 2.2, INT8: 1.9, E2M1: 2.9, E4M3: 2.9}  # of a thread for each weight, as of `quantized_matmul`
FLOPS = 32
TIE = 0.02
STEPS_BYTES = {"sm_80": 163 << 10, "sm_120": 99 << 10, "sm_121": 99 << 10}  # of shared memory of an SM
MOST_STEPS_BYTES = 227 << 10
MOST_COLUMNS = 8  # of scales and zero points of a step and part that stay in registers
# runs, occupancy, latency. Four blocks an SM with one stage each, gate and up apart, were fastest
# before loads of scales lost their checks: 107 us, pipelined 148 (one token of gpt-oss-20b, H200,
# 2026-11-23); since then nothing was timed.
FEW = ((2, 4, 4), (1, 4, 4), (2, 2, 10), (1, 2, 10))
MANY = ((1, 2, 5), (1, 1, 5), (1, 2, 10))
BLACKWELL = ((1, 2, 5), (1, 1, 5))
CONSUMER = ((1, 2, 4), (2, 2, 4))
AMPERE = ((1, 2, 4), (1, 1, 3))
TILES = {
    "sm_80": (AMPERE, AMPERE),
    "sm_100": (BLACKWELL, BLACKWELL),
    "sm_103": (BLACKWELL, BLACKWELL),
    "sm_120": (CONSUMER, CONSUMER),
    "sm_121": (CONSUMER, CONSUMER),
}


def candidates(p: Problem, device: Device) -> Iterator[Config]:
    """All tokens with each chosen expert, or panels of about as many rows as an expert has."""
    sums = p.format.group > 0 and p.format.group % p.format.run == 0
    least = 16 if device.arch == "sm_80" else 8  # as of `moe`
    if device.is_cpu:
        if p.tokens <= MOST_FEW:
            yield Config(
                max(2, next_pow2(p.tokens)), few=True, apart=p.tokens % 2 == 1, runs=next_pow2(min(4, -(-max(p.hidden, p.inter) // p.format.run)))
            )
        yield Config(min(64, max(2, next_pow2(-(-p.pairs // p.experts)))), scale_sums=sums)
        return
    few, many = TILES.get(device.arch, (FEW, MANY))
    if p.tokens <= MOST_FEW:
        m = max(least, next_pow2(p.tokens))
        ways = (True, False) if device.arch == "sm_90" else (False,)  # for sm_100 tileiras 13.4 does not compile the first
        yield from (Config(m, True, apart, runs, sums, latency, occupancy) for (runs, occupancy, latency), apart in product(few, ways))
    rows = p.pairs / p.experts
    about = next_pow2(int(1.5 * rows))
    for tile_m in dict.fromkeys(max(least, min(128, r)) for r in (about, 2 * about, about // 2)):
        small = sums and tile_m <= 64
        yield from (
            Config(tile_m, False, False, runs, small, latency, occupancy) for runs, occupancy, latency in (few if tile_m <= MOST_FEW else many)
        )


def legal(p: Problem, c: Config, device: Device) -> bool:
    """Sums are scaled where a group is whole runs. One tile holds all of a few tokens. Four blocks
    an SM have 64 registers a thread: two runs of gate and up for more than 8 rows spill.
    """
    of = p.format
    if c.scale_sums and not (of.group and of.group % of.run == 0):
        return False
    if c.few and p.tokens > c.tile_m:
        return False
    if not c.few and not grid_fits(p.most_panels(c.tile_m) * -(-max(p.inter, p.hidden) // ROWS)):
        return False
    if c.occupancy > 2 and c.runs > 1 and c.tile_m > 8 and not c.apart and not device.is_cpu:
        return False
    columns = c.runs * of.run // of.group * (1 + of.zeros) if of.group else 0
    return device.is_cpu or (columns <= MOST_COLUMNS and _step_bytes(p, c) * c.occupancy <= _room(device))


def _room(device: Device) -> int:
    return STEPS_BYTES.get(device.arch, MOST_STEPS_BYTES)


def _step_bytes(p: Problem, c: Config) -> int:
    """Of the first product: words of gate and up, and x."""
    return c.runs * ((1 if c.apart else 2) * 4 * WORDS * ROWS + 2 * p.format.run * c.tile_m)


def work(p: Problem, c: Config, device: Device) -> tuple[Work, ...]:
    """The two products, and the launches around them; tokens choose at random."""
    of, rows = p.format, p.pairs / p.experts
    used = p.experts * (1 - (1 - min(1.0, p.top_k / p.experts)) ** p.tokens)
    panels = used if c.few else p.experts * expected_panels(rows, rows**0.5, c.tile_m)
    held = p.pairs * (c.tile_m if c.few else 1)  # rows between the launches
    deep = c.runs * of.run

    def matrices(sides: int, n: int, k: int, left: float) -> Work:
        """left: bytes that the launch before left."""
        parts = 1 if c.apart else sides
        stages = max(1, min(c.latency, _room(device) // c.occupancy // _step_bytes(p, c))) if c.latency >= 5 else 1
        return Work(
            blocks=max(1, round(panels * -(-n // ROWS)) * sides // parts),
            resident=device.sms * c.occupancy,
            per_sm=c.occupancy,
            steps=-(-k // deep),
            flops=parts * ROWS * deep * (2.0 * c.tile_m + FLOPS * INSTRUCTIONS[of.code]),
            kinds=(f"{of.bits} {c.runs} {c.occupancy}{c.latency}",),
            fill=parts * c.runs * 4 * WORDS * ROWS + 2 * deep * min(p.tokens, c.tile_m),
            padding=2 * deep * max(0, c.tile_m - p.tokens),
            dram=used * sides * of.size_bytes(n, k),
            out=c.tile_m * ROWS * parts,
            serial=2.0 * parts * c.runs * (of.run / 128),
            partial=2 * left,
            stages=stages,
        )

    small = Work(1, resident=8 * device.sms, per_sm=8, chain=1.0)
    h, y = (2.0 * held * n for n in (p.inter, p.hidden))
    products = (
        matrices(2, p.inter, p.hidden, 0.0 if c.few else y),
        matrices(1, p.hidden, p.inter, h),
        replace(small, blocks=p.tokens, partial=2.0 * y),
    )
    if c.few:
        return products
    count = replace(small, blocks=p.experts, steps=-(-p.pairs // 4096), partial=8.0 * p.pairs)
    permute = replace(small, blocks=max(p.tokens, p.experts), chain=2.0, dram=2.0 * y, partial=8.0 * p.pairs)
    return count, permute, *products


def family(p: Problem, c: Config) -> str:
    """What the model errs alike about."""
    of, form = p.format, f"{'few' if c.few else 'many'}{'/' * c.apart}"
    return f"{of.code}/{of.group}{'z' * of.zeros}{'s' * c.scale_sums} {form} {c.tile_m}x{c.runs} {c.occupancy}{c.latency}"


CHOICES = Choices("quantized_moe", candidates, legal, work, family, tie=TIE)
space = CHOICES.space

_ARGUMENTS = (
    "x",
    "batch",
    "weights",
    "ids",
    *(f"{kind}_{part}" for part in ("gate_up", "down") for kind in ("words", "scales", "zeros", "bias")),
    "out",
)
DECISION = Decision("quantized_moe", problem=Problem, arguments=_ARGUMENTS, space=space, plan=plan)
