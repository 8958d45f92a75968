"""Checks correctness: the accuracy rule, poisoned memory, and the cases of tests, verify and
benchmark.
"""

from .accuracy import Accuracy, accuracy, assert_accurate
from .check import check_op, op_name, outputs, public_function, run_op, seeded_inputs
from .poison import embed, poisoned_empty

__all__ = [
    "Accuracy",
    "accuracy",
    "assert_accurate",
    "check_op",
    "embed",
    "op_name",
    "outputs",
    "poisoned_empty",
    "public_function",
    "run_op",
    "seeded_inputs",
]
