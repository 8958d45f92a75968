"""How many threads products of an interpreted kernel take: one less than cores are free.

PyTorch takes one for each core, and its threads wait for one another in busy loops. Where anybody
else uses a core too, a decode step of small products then takes many times as long.
"""

import os
from functools import cache

import torch

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def free_cores() -> int:
    """Cores that this process may use, less those that were busy in the last minute, less one for
    whoever comes next; at least 1.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    busy = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return max(1, cores - round(busy) - 1)


def choose_threads() -> None:
    """Lowers PyTorch's threads to the free cores, unless the environment says how many to take."""
    if not any(os.environ.get(name) for name in VARIABLES):
        threads = free_cores()
        if threads < torch.get_num_threads():
            torch.set_num_threads(threads)


choose_threads_once = cache(choose_threads)
