"""The forms of a decode step's products: small blocks that lie beside those of the launch before.

An op's own choice is the fastest launch alone: blocks that fill an SM. Between others, a block that
finds room before the launch before has ended has its weights under way by then: an H200's step of
Llama-3.2-1B takes 4.6 us less a layer with such blocks for `out` alone. Not so `rms_norm_matmul`,
each block of which reads three rows beside its weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..launch import Device, forced_config, next_pow2
from ..ops import matmul

# values of weights, occupancy, warps: all in registers, no spills (sm_90, tileiras 13.4)
SHORT, LONG = (8192, 8, 4), (32768, 2, 8)
MOST_SHORT, LONG_K = 2048, 8192


def small_form(p: matmul.Problem, device: Device) -> Any:
    """Of a product of one row, all of k at once; None for what else there is.

    None between the two lengths of k too, where the short form spills and the long one is untimed.
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
    """Within the context products of one row take these forms."""
    with forced_config(matmul.DECISION.plan, small_form):
        yield
