"""How a call reaches a processor: device, plan, launch, registration, checks. Written once, not per op."""

from .check import as_rows, check_tensor, dtype_name, must
from .device import Cost, Device
from .plan import Decision, Plan, best_plan, decide, decisions, forced_config, forget_plans
from .run import Launch, counted, launch, traced
from .torch_op import torch_op

__all__ = [
    "Cost",
    "Decision",
    "Device",
    "Launch",
    "Plan",
    "as_rows",
    "best_plan",
    "check_tensor",
    "counted",
    "decide",
    "decisions",
    "dtype_name",
    "forced_config",
    "forget_plans",
    "launch",
    "must",
    "next_pow2",
    "torch_op",
    "traced",
]


def next_pow2(n: int) -> int:
    """The smallest power of two >= n; 1 for n <= 1."""
    return 1 << max(0, n - 1).bit_length()
