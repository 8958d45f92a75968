"""Small-block configs for products of a decode step: their blocks fit on an SM beside those of the
previous launch.

An op chooses the config that is fastest alone: one block fills an SM. Between other launches, a
smaller block can start, and load its weights, before the previous launch has ended: on an H200,
such blocks for `out` alone save 4.6 us a layer in a step of Llama-3.2-1B. They do not help
`rms_norm_matmul`, where each block reads three rows besides its weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..launch import Device, forced_config, next_pow2
from ..ops import matmul

# weights of a block, occupancy, warps: all in registers, no spills (sm_90, tileiras 13.4)
SHORT, LONG = (8192, 8, 4), (32768, 2, 8)
MOST_SHORT, LONG_K = 2048, 8192


def small_form(p: matmul.Problem, device: Device) -> Any:
    """The config of a product of one row, with all of k at once; None for any other problem.

    Also None for k between the two lengths: there the short form spills, and the long one is
    untimed.
    """
    deep = next_pow2(p.k)
    if device.arch != "sm_90" or p.dtype.itemsize != 2 or not (deep <= MOST_SHORT or deep == LONG_K):
        return None
    values, occupancy, warps = SHORT if deep <= MOST_SHORT else LONG
    how: dict[str, Any] = {"latency": 8, "num_ctas": 1, "occupancy": occupancy, "num_worker_warps": warps}
    config = matmul.Config(1, min(values // deep, 64), deep, dot=True, **how)
    return config if config.whole(p) else None


@contextmanager
def beside() -> Iterator[None]:
    """Within the context, products of one row use these configs."""
    with forced_config(matmul.DECISION.plan, small_form):
        yield
