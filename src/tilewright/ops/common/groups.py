"""Rows of unequal groups, cut into panels: what grouped_gemm and moe count alike."""

import math
from dataclasses import replace

from ...launch import Device
from ...select import Work
from . import gemm_choices
from .gemm_choices import Gemm, Tile

MANY_PANELS = 256  # from which on a deviation of sqrt(rows) is a panel or more, and the sum smooth
MANY = 16.0  # rows that a group is as good as never without


def expected_panels(rows: float, deviation: float, tile_m: int) -> float:
    """Panels of tile_m rows of a group that has about `rows`: at most one of them is not full.

    A group has its j-th panel with the probability that it has more than j * tile_m rows. `rows`
    are taken as normally distributed, not as Poisson.
    """
    width = max(deviation, 1e-6) * math.sqrt(2)
    most = int((rows + 4 * deviation) // tile_m)
    if most > MANY_PANELS:
        panels = (rows - 0.5) / tile_m - 0.5  # the sum as an integral
    else:
        panels = sum(0.5 * math.erfc((j * tile_m + 0.5 - rows) / width) for j in range(1, most + 1))
    return 1 - math.exp(-rows) + panels if rows < MANY else 1 + panels


def work(g: Gemm, c: Tile, panels: float, most_panels: int, device: Device) -> tuple[Work, ...]:
    """What the products of `panels` panels ask for, and the blocks that find no panel and leave."""
    tiles_n = -(-g.n // c.tile_n)
    tiles = max(1, round(panels * tiles_n))
    products = replace(gemm_choices.work(g, c, device)[0], blocks=tiles)
    empty = most_panels * tiles_n - tiles
    if c.persistent or empty <= 0:
        return (products,)
    return products, Work(blocks=empty, resident=products.resident, per_sm=products.per_sm, sms=products.sms)
