"""Checks correctness: the accuracy rule, poisoned memory, and the cases of tests, verify and
benchmark.
"""

from .accuracy import Accuracy as Accuracy, accuracy as accuracy, assert_accurate as assert_accurate
from .check import (
    asked as asked,
    call_space as call_space,
    check_op as check_op,
    op_name as op_name,
    outputs as outputs,
    public_function as public_function,
    run_op as run_op,
    seeded_inputs as seeded_inputs,
)
from .poison import embed as embed, poisoned_empty as poisoned_empty
