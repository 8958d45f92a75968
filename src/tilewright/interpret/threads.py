"""How many threads the products of an interpreted kernel use: one fewer than the free cores.

PyTorch uses one thread per core, and its threads wait for one another in busy loops. If another
process uses a core too, a decode step of small products takes many times as long.
"""

import os
from functools import cache

import torch

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_cores() -> int:
    """The cores that this process may use, minus those that were busy in the last minute, minus one
    in reserve; at least 1.
    """
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return max(1, cores() - round(busy) - 1)


def choose_threads() -> None:
    """Lowers the number of PyTorch's threads to the free cores, unless the environment sets it."""
    if not any(os.environ.get(name) for name in VARIABLES):
        threads = free_cores()
        if threads < torch.get_num_threads():
            torch.set_num_threads(threads)


choose_threads_once = cache(choose_threads)
