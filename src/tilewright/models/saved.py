"""Patched models as pickles: for torch.save, copies and worker processes.

A method of ours is bound to one module and often made for it, so it has no name that a pickle could
hold. A module is written without them, with the names of their ops. Whoever reads it binds them
again.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from . import continuous
from .attention import register
from .forwards import MAKERS
from .method import Method

METHODS = "tilewright_methods"  # attribute of a module: name of a method -> what replaces it
REDUCE = "__reduce_ex__"
BATCHING = Method("continuous batching", "batching", name="init_continuous_batching")


def method_of(module: nn.Module, method: Method) -> Callable[..., Any]:
    """What replaces a method of a module: not bound yet."""
    cls = type(module)
    if method == BATCHING:
        continuous.register()
        return continuous.init_continuous_batching(cls)
    assert method.maker is not None
    made: Callable[..., Any] = MAKERS[method.maker](cls, **dict(method.options))
    return made


def attributes(module: nn.Module, methods: dict[str, Method]) -> dict[str, Any]:
    """What a module with these methods gets: them, and how it is written."""
    bound = {name: MethodType(method_of(module, method), module) for name, method in methods.items()}
    return {**bound, METHODS: methods, REDUCE: MethodType(_reduce, module)}


def _reduce(module: Any, protocol: int) -> tuple[Any, ...]:
    stock: Any = type(module)
    make, args, state, *rest = stock.__reduce_ex__(module, protocol)
    methods = state[METHODS]
    return _revived, (methods, make, *args), {name: x for name, x in state.items() if name not in methods and name != REDUCE}, *rest


def _revived(methods: dict[str, Method], make: Callable[..., nn.Module], *args: Any) -> nn.Module:
    """A module that has its methods and waits for all else."""
    register()
    module = make(*args)
    module.__dict__.update(attributes(module, methods))
    return module
