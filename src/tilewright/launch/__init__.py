"""How a call reaches a processor: device, decision, launches, registration, checks.

Written once, not per op.
"""

import os

from .check import (
    FLOATS,
    HALVES,
    argument_error,
    as_rows,
    check_apart,
    check_bools,
    check_finite,
    check_integers,
    check_number,
    check_out,
    check_positive,
    check_tensor,
    check_writable,
    checked_device,
    dtype_name,
    each_out,
    out_or_new,
    overlap,
)
from .decision import Choice, Decision, decision_of, decisions, forced_config, forget_plans
from .device import Cost, Device, chosen_device, require_gpu
from .environment import warn_of_unknown
from .far import check_near
from .launches import Launch, hints
from .names import check_name, one_of
from .run import Bound, Traced, counted, traced
from .torch_op import torch_op

__all__ = [
    "FLOATS",
    "HALVES",
    "Bound",
    "Choice",
    "Cost",
    "Decision",
    "Device",
    "Launch",
    "Traced",
    "argument_error",
    "as_rows",
    "check_apart",
    "check_bools",
    "check_finite",
    "check_integers",
    "check_name",
    "check_near",
    "check_number",
    "check_out",
    "check_positive",
    "check_tensor",
    "check_writable",
    "checked_device",
    "chosen_device",
    "counted",
    "decision_of",
    "decisions",
    "dtype_name",
    "each_out",
    "forced_config",
    "forget_plans",
    "hints",
    "next_pow2",
    "one_of",
    "out_or_new",
    "overlap",
    "require_gpu",
    "torch_op",
    "traced",
]


def next_pow2(n: int) -> int:
    """The smallest power of two >= n; 1 for n <= 1."""
    return 1 << max(0, n - 1).bit_length()


warn_of_unknown(os.environ)
