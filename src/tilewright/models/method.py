"""What a module gets from `patch`, as data that a pickle can hold."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .quantized import QuantizedLinear

NAME = "tilewright"  # of our attention in transformers' registry


@dataclass(frozen=True, slots=True)
class Method:
    """One method of a module, and what replaces it.

    op: that takes over, as in `tilewright.ops`.
    maker: the function of forwards.MAKERS that makes it, of the module's class and `options`; None
        for attention, which transformers selects by name.
    name: of the method that it replaces.
    """

    op: str
    maker: str | None
    options: tuple[tuple[str, Any], ...] = ()
    name: str = "forward"


Verdict = Method | str | None  # of a recogniser: the reason why a module stays in PyTorch; None for another kind


def place_of(module: nn.Module) -> tuple[torch.dtype, torch.device] | None:
    """dtype of rows for a module, and a device to try it on: the CPU for weights on none.

    Small weights take bfloat16 rows. The dtypes of their codes and scales say nothing: a format may
    hold no floats at all.
    """
    small = next((part.words for part in module.modules() if isinstance(part, QuantizedLinear)), None)
    held = small if small is not None else next((x for x in (*module.parameters(), *module.buffers()) if x.is_floating_point()), None)
    if held is None:
        return None
    return held.dtype if small is None else torch.bfloat16, torch.device("cpu") if held.is_meta else held.device
