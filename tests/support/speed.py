"""Limits of host time that hold the code and not the machine: shared ones are slow for hours."""

import time

import numpy as np

QUIET_S = 4.6e-3  # of `_work`: of the 11.5 ms on a slow core, by the ratio of a decision's time there and on a quiet one


def slower() -> float:
    """How many times QUIET_S a core takes here and now, 1 at least: a limit is what is allowed
    there, times this.
    """
    return max(1.0, min(_seconds() for _ in range(7)) / QUIET_S)


def _seconds() -> float:
    began = time.perf_counter()
    _work()
    return time.perf_counter() - began


def _work() -> None:
    """Half Python's objects, half numpy's arrays, as in a decision."""
    kept = {}
    for i in range(10_000):
        kept[i & 255] = (i, str(i))
    numbers = np.arange(4096.0)
    for _ in range(100):
        np.exp(-numbers).sum()
