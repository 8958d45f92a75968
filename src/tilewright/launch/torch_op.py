"""Registration of `<op>_out` functions as torch ops.

`torch.library.Library` and not `torch.library.custom_op`: that costs 2 to 4 times the host time.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import _functorch
from torch.autograd import forward_ad

from .check import argument_error
from .context import is_tracing
from .values import Claim, check_values, wanted

_LIBRARY = torch.library.Library("tilewright", "DEF")
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def torch_op(
    *, mutates: tuple[str, ...], claims: Callable[..., Iterator[Claim]] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a function that returns None and writes only into the arguments named by `mutates`.

    claims: a function of some of the arguments; yields what their values must meet (values.py).

    Makes `torch.ops.tilewright.<name>` for CPU and CUDA tensors. Its fake implementation does
    nothing: the op allocates nothing that its caller sees. So the op may stand inside
    torch.compile(fullgraph=True), torch.export and CUDA graph capture. The function returned takes
    positional arguments; its `.op` is the registered op.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        name = function.__name__
        run = function if claims is None else _with_claims(function, claims)
        schema = torch.library.infer_schema(function, mutates_args=mutates)
        _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
        for key in ("CPU", "CUDA"):
            _LIBRARY.impl(name, run, key)

        def fake(*args: Any, **kwargs: Any) -> None:
            if is_tracing():
                function(*args, **kwargs)

        torch.library.register_fake(f"tilewright::{name}", fake, lib=_LIBRARY)
        op = getattr(torch.ops.tilewright, name).default

        @functools.wraps(function)
        def call(*args: Any) -> None:
            # Plain eager tensors skip the dispatcher, which costs more host time than all the rest
            # of a call. Everything that must see the op (torch.compile, export, fake tensors,
            # dispatch modes) goes through it.
            compiling = torch.compiler.is_compiling()
            if not compiling and (forward_ad._current_level >= 0 or _functorch.peek_interpreter_stack() is not None):
                _refuse_transformed(function, args)
            if compiling or type(args[0]) not in _PLAIN or torch._C._len_torch_dispatch_stack():
                op(*args)
            else:
                run(*args)

        call.op = op  # type: ignore[attr-defined]
        return call

    return register


def _refuse_transformed(function: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Raises ValueError for an argument inside of torch.func's vmap, jvp or functionalize, which
    has no memory to write to; or with a tangent, which would be lost, or stay as it was where an op
    writes in place.
    """
    for name, given in zip(inspect.signature(function).parameters, args, strict=True):
        for x in given if isinstance(given, list) else (given,):
            if not isinstance(x, torch.Tensor):
                continue
            if _functorch.is_functorch_wrapped_tensor(x):
                raise argument_error(name, "a tensor outside of torch.func's transforms: this op has no rule for them", "one inside")
            if forward_ad.unpack_dual(x).tangent is not None:
                raise argument_error(name, "without a tangent: this op has no forward-mode derivative", "one with a tangent")


def _with_claims(function: Callable[..., None], claims: Callable[..., Iterator[Claim]]) -> Callable[..., None]:
    parameters = list(inspect.signature(function).parameters)
    places = [parameters.index(name) for name in inspect.signature(claims).parameters]

    @functools.wraps(function)
    def run(*args: Any) -> None:
        if wanted(args[0]):
            check_values(claims(*[args[place] for place in places]))
        function(*args)

    return run
