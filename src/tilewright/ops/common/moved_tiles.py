"""Tiles of products whose last ones begin earlier, so that they end with the output (`tile_start`):
which may, and which are worth a timing.
"""

from collections.abc import Callable, Iterable, Iterator

from ...launch import Device
from .gemm_choices import MOST_FEW_WAVES, C, Gemm, Tile, changed
from .tiles import START_UNIT

WIDE_STORES = 16  # elements: the rows of an output that moved tiles write many elements of at once


def may_move(g: Gemm, c: Tile, device: Device) -> bool:
    """Whether the last rows of tiles hang over the end, where a TMA unit fills in zeros, and could
    begin earlier. Columns that hang over cost nothing: few blocks have them (H200).

    Stores of a cluster that shares rows are narrow, and spill.
    """
    if g.dtype.itemsize != 2 or g.n % WIDE_STORES or c.persistent or ((c.num_ctas or 1) > 1 and not c.swap_ab):
        return False
    by_tma = device.is_cpu or (device.has_pdl and g.loads_wide(device))
    rows, columns = c.tile_shape
    return by_tma and g.m > rows and -g.m % rows >= START_UNIT and rows % START_UNIT == 0 and columns % START_UNIT == 0


def with_moved(tiles: Iterable[C], g: Gemm, device: Device, legal: Callable[[C], bool]) -> Iterator[C]:
    """The tiles, each with itself moved behind it where that may be worth a timing. Their config
    has a field `moved`.

    In more waves others hide a slow tile, and each pays for the stores (H200, notes/LOG.md).
    """
    for c in tiles:
        yield c
        few = device.is_cpu or g.tiles(c) <= MOST_FEW_WAVES * c.resident(device)
        if few and may_move(g, c, device) and legal(moved := changed(c, moved=True)):
            yield moved
