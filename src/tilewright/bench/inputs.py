"""What peers share: inputs that are made once, and conditions on a case's inputs."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

Inputs = dict[str, Any]
Result = Tensor | tuple[Tensor, ...]
Applies = Callable[[Inputs], bool]
Arguments = ParamSpec("Arguments")
Made = TypeVar("Made")


def kept(make: Callable[Arguments, Made]) -> Callable[Arguments, Made]:
    """Remembers what `make` made of its first argument, a tensor, for as long as that tensor lives.

    The result must not be a view of it.
    """
    made = WeakTensorKeyDictionary()

    @wraps(make)
    def known(*arguments: Arguments.args, **named: Arguments.kwargs) -> Made:
        tensor = arguments[0]
        if tensor not in made:
            made[tensor] = make(*arguments, **named)
        found: Made = made[tensor]
        return found

    return known


@kept
def packed(x: Tensor) -> Tensor:
    """A contiguous copy."""
    return x.clone(memory_format=torch.contiguous_format)


def all_of(*conditions: Applies) -> Applies:
    return lambda inputs: all(condition(inputs) for condition in conditions)


def without(*names: str) -> Applies:
    """Whether every option of `names` is absent or off."""
    return lambda inputs: all(inputs.get(name) is None or inputs.get(name) is False for name in names)


def half(name: str) -> Applies:
    """Whether an input has 16 bits. In fp32, libraries use TF32 or have no kernel."""
    return lambda inputs: inputs[name].dtype in (torch.bfloat16, torch.float16)


def one_token(name: str) -> Applies:
    return lambda inputs: inputs[name].shape[2] == 1
