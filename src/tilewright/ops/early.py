"""Launches that begin while the one before still runs: programmatic dependent launch."""

import cuda.tile as ct

from ..launch import next_pow2

MOST_EARLY_ROWS = 64  # what a decode step has; launches for more are long beside what they would save


def early(rows: int, persistent: bool) -> bool:
    """Whether blocks may be placed while the launch before still runs (`Plan.early`).

    Not blocks that walk over tiles: those that find room first would share an SM, and leave others idle to the end (H200: 8 to 40 % slower).
    """
    return rows <= MOST_EARLY_ROWS and not persistent


def whole_tiles(k: int) -> list[tuple[int, int, int]]:
    """(tile_n, tile_k, occupancy) with all of k, 4096 of 16 bits at most, in one step: 32 KB and 16 KB of a block's weights in registers.

    sm_90, tileiras 13.4: no spills.
    """
    deep = next_pow2(k)
    tiles = [(16384 // deep if deep < 4096 else 2, deep, 4), (8192 // deep if deep < 4096 else 4, deep, 3)]
    return [tile for tile in tiles if 2 <= tile[0] <= 64]


def overlap_previous(WALKS=False):
    """The first line of a kernel that may be launched early: lets the next launch begin, and waits until the one before has ended.

    Nothing may be read or written in front of it. Without an early launch it does nothing; nor does it where blocks walk over tiles (WALKS), which
    are not launched early, and whose successors would take room from them.
    """
    if not WALKS:
        let_next_begin()
        wait_for_previous()


def let_next_begin():
    """The first half of `overlap_previous`: between the two, weights may be read, which no launch writes."""
    ct.grid_dependency_control_launch_dependents()


def wait_for_previous():
    """The second half."""
    ct.grid_dependency_control_wait()
