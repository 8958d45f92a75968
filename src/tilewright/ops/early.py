"""Launches that begin while the one before still runs: programmatic dependent launch."""

import cuda.tile as ct

MOST_EARLY_ROWS = 64  # what a decode step has; launches for more are long beside what they would save


def early(rows: int, persistent: bool) -> bool:
    """Whether blocks may be placed while the launch before still runs (`Plan.early`).

    Not blocks that walk over tiles: those that find room first would share an SM, and leave others idle to the end (H200: 8 to 40 % slower).
    """
    return rows <= MOST_EARLY_ROWS and not persistent


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
