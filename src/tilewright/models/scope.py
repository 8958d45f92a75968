"""A function with other functions in place of those that it looks up."""

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any


@cache
def with_our_function(stock: Any, name: str, ours: Callable[..., Any]) -> Callable[..., Any]:
    """The forward `stock`, in a copy of its globals where the function `name` is `ours`.

    Models look that function up when they run. A replacement in their file would change every model
    of the class in the process. The bytecode is the same.
    """
    return with_our_functions(stock, **{name: ours})


def with_our_functions(stock: Any, **ours: Any) -> Callable[..., Any]:
    """Likewise, of several names: a new function at each call."""
    scope = {**stock.__globals__, **ours}
    # torch.compile guards a global through the importable module of this name. There it would find
    # the stock function and recompile for ever.
    scope.pop("__name__", None)
    forward = FunctionType(stock.__code__, scope, stock.__name__, stock.__defaults__, stock.__closure__)
    forward.__kwdefaults__ = stock.__kwdefaults__
    return forward
