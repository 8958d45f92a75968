"""Launches that begin while the one before still runs: programmatic dependent launch."""

import cuda.tile as ct

from ...launch import Device, next_pow2

MOST_PDL_ROWS = 64  # rows of a decode step; longer launches gain little
WIDE_ROWS = 16  # elements
MANY_BLOCKS = 4  # on an SM; the idle ones cannot hold all


def use_pdl(rows: int, persistent: bool) -> bool:
    """Whether blocks may start while the previous launch still runs (`Launch.pdl`).

    Not for persistent kernels: the blocks that start first would share an SM, and leave others idle
    to the end (H200: 8 to 40 % slower).
    """
    return rows <= MOST_PDL_ROWS and not persistent


def pdl_behind(blocks: int, before: int, device: Device) -> bool:
    """Whether a launch of so many short blocks may start while the one before it in the same op,
    of so many, still runs.

    Its blocks start on the SMs which that one leaves idle. If they do not fit there one on each,
    but all together, they share those few SMs to the end, while the others have nothing to do
    (H200: a merge of attention_decode 3 us slower, a tenth to a third of the call).
    """
    return blocks <= device.sms - before or blocks > MANY_BLOCKS * device.sms


def whole_tiles(k: int) -> list[tuple[int, int, int]]:
    """(tile_n, tile_k, occupancy) with all of k, 4096 of 16 bits at most, in one step: 32 KB and 16
    KB of a block's weights in registers. None where rows begin off multiples of 16 elements: the
    compiler knows of no smaller ones and loads single elements (1 x 1160 x 2104: 13.2 us, 5.9 in
    steps, H200).

    sm_90, tileiras 13.4: no spills.
    """
    if k % WIDE_ROWS:
        return []
    deep = next_pow2(k)
    tiles = [(16384 // deep if deep < 4096 else 2, deep, 4), (8192 // deep if deep < 4096 else 4, deep, 3)]
    return [tile for tile in tiles if 2 <= tile[0] <= 64]


def pdl_overlap(PERSISTENT=False):
    """The first line of a kernel that may be launched with PDL.

    It lets the next launch begin, then waits until the launch before has ended. Nothing may be read
    or written before it. Without PDL it does nothing; in persistent kernels (PERSISTENT) neither:
    they are not launched with PDL, and the next launch would take room from them.
    """
    if not PERSISTENT:
        pdl_launch_dependents()
        pdl_wait()


def pdl_launch_dependents():
    """The first half of `pdl_overlap`: between the two, weights may be read, which no launch
    writes.
    """
    ct.grid_dependency_control_launch_dependents()


def pdl_wait():
    """The second half."""
    ct.grid_dependency_control_wait()
