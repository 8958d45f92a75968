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
from .rows import FAMILIES, ROWS

METHODS = "tilewright_methods"  # attribute of a module: name of a method -> the op that it runs
REDUCE = "__reduce_ex__"
BATCHING = "continuous batching"


def method_of(module: nn.Module, name: str, op: str) -> Callable[..., Any]:
    """What replaces the method `name` of a module: not bound yet."""
    cls = type(module)
    if op == BATCHING:
        continuous.register()
        return continuous.init_continuous_batching(cls)
    prefixes = FAMILIES.values()
    rows = (row for row in ROWS if (row.op, row.method) == (op, name) and any(row.matches(cls.__name__, prefix) for prefix in prefixes))
    forward = next(rows).forward
    assert forward is not None
    return forward(cls)


def attributes(module: nn.Module, methods: dict[str, str]) -> dict[str, Any]:
    """What a module with these methods gets: them, and how it is written."""
    bound = {name: MethodType(method_of(module, name, op), module) for name, op in methods.items()}
    return {**bound, METHODS: methods, REDUCE: MethodType(_reduce, module)}


def _reduce(module: Any, protocol: int) -> tuple[Any, ...]:
    stock: Any = type(module)
    make, args, state, *rest = stock.__reduce_ex__(module, protocol)
    methods = state[METHODS]
    return _revived, (methods, make, *args), {name: x for name, x in state.items() if name not in methods and name != REDUCE}, *rest


def _revived(methods: dict[str, str], make: Callable[..., nn.Module], *args: Any) -> nn.Module:
    """A module that has its methods and waits for all else."""
    register()
    module = make(*args)
    module.__dict__.update(attributes(module, methods))
    return module
