"""Modules whose forward is wrapped by transformers' tensor parallelism.

Ours goes inside the wrapper, which distributes tensors and joins results.
"""

from collections.abc import Callable
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

from ..launch import argument_error

_INNER = "original_forward"  # what the wrapper, a function made for one instance, calls the forward that it wraps


def wrapper_of(module: nn.Module) -> FunctionType | None:
    """The wrapper around the forward of the module's class, if transformers put one there and
    nobody else did.
    """
    found = module.__dict__.get("forward")
    if not isinstance(found, FunctionType) or not found.__module__.startswith("transformers.") or _INNER not in found.__code__.co_freevars:
        return None
    assert found.__closure__ is not None
    inner = found.__closure__[found.__code__.co_freevars.index(_INNER)].cell_contents
    return found if getattr(inner, "__func__", None) is type(module).forward else None


def wrapped(wrapper: FunctionType, module: nn.Module, forward: Callable[..., Any]) -> FunctionType:
    """The same wrapper around another forward of the module."""

    def local(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Without gradients, tensors and the module's weights are this rank's part, as plain
        # tensors.
        if any(type(x).__name__ == "DTensor" for x in (*args, *self._parameters.values())):
            raise argument_error(
                "a tensor-parallel model", "called under torch.no_grad() or torch.inference_mode() once it is patched", "gradients enabled"
            )
        return forward(self, *args, **kwargs)

    assert wrapper.__closure__ is not None
    at = wrapper.__code__.co_freevars.index(_INNER)
    cells = [*wrapper.__closure__[:at], CellType(MethodType(local, module)), *wrapper.__closure__[at + 1 :]]
    found = FunctionType(wrapper.__code__, wrapper.__globals__, wrapper.__name__, wrapper.__defaults__, tuple(cells))
    found.__kwdefaults__ = wrapper.__kwdefaults__
    return found
