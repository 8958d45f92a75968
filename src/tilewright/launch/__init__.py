"""How a call reaches a processor: device, decision, launches, registration, checks.

Written once, not per op.
"""

import os

from .check import (
    FLOATS as FLOATS,
    HALVES as HALVES,
    argument_error as argument_error,
    as_rows as as_rows,
    check_apart as check_apart,
    check_bools as check_bools,
    check_finite as check_finite,
    check_integers as check_integers,
    check_number as check_number,
    check_out as check_out,
    check_positive as check_positive,
    check_tensor as check_tensor,
    check_writable as check_writable,
    checked_device as checked_device,
    dtype_name as dtype_name,
    each_out as each_out,
    out_or_new as out_or_new,
    overlap as overlap,
)
from .decision import (
    Decision as Decision,
    decision_of as decision_of,
    decisions as decisions,
    forced_config as forced_config,
    forget_plans as forget_plans,
    usual as usual,
)
from .device import Cost as Cost, Device as Device, chosen_device as chosen_device, require_gpu as require_gpu
from .environment import warn_of_unknown
from .far import check_near as check_near
from .launches import Launch as Launch, hints as hints
from .names import check_name as check_name, one_of as one_of
from .run import Bound as Bound, Traced as Traced, counted as counted, traced as traced
from .torch_op import torch_op as torch_op


def next_pow2(n: int) -> int:
    """The smallest power of two >= n; 1 for n <= 1."""
    return 1 << max(0, n - 1).bit_length()


warn_of_unknown(os.environ)
