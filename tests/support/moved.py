"""Products whose last tiles begin earlier: configs that both `matmul` and `bmm` have, and what must
hold of them.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from tilewright import interpret
from tilewright.launch import Device
from tilewright.testing import check_op

CPU = torch.device("cpu")
SIZES = ((37, 80), (24, 112), (50, 176), (26, 64), (55, 208))  # hang over in one direction and in both, by multiples of START_UNIT and not


def moved_configs(config: type) -> dict[str, Any]:
    """By what they are; config: the op's class."""
    return {
        "whole": config(16, 32, 32, group=2, moved=True),
        "weights first": config(16, 32, 32, swap_ab=True, moved=True),
        "uneven": config(16, 32, 32, group=2, extra_n=16, moved=True),
        "uneven, weights first": config(16, 32, 32, extra_n=8, swap_ab=True, moved=True),
        "three sums": config(16, 16, 32, group=2, extra_n=24, moved=True),
    }


def check_moved(op: ModuleType, problems: Sequence[Any], config: Any, *, least: int) -> None:
    """Those of the problems, at least so many, for which the config is legal are right, written
    whole, and no element by two blocks.
    """
    legal = [problem for problem in problems if op.CHOICES.legal(problem, config, Device.named("CPU"))]
    assert len(legal) >= least
    for problem in legal:
        with interpret.checking(races=True, unwritten=True, order=3):
            check_op(op, problem, CPU, config)
