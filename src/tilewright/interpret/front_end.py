"""A faster front end for cuda-tile. It halves the time of the first launch of an interpreted
kernel.

The front end types a kernel again for each set of constants, and looks up the same properties of
the same objects each time. Here each property is looked up once. The IR is the same
(test_front_end.py).
"""

import functools
import gc
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any

from cuda.tile import _compile
from cuda.tile._exception import Loc, TileError, TileInternalError
from cuda.tile._execution import is_function_allowed_in, stub_aliases
from cuda.tile._ir import hir, ir, op_impl
from cuda.tile._ir.core_ops import sym2var
from cuda.tile._ir.scope import Scope
from cuda.tile._passes import hir2ir

FUNCTIONS = {FunctionType, BuiltinFunctionType}
NAMED = {*FUNCTIONS, str, NoneType}  # constants that no operation computes with
NUMBERS = {bool, int, float}
CONSTANTS = {*NAMED, *NUMBERS}


@contextmanager
def quick() -> Iterator[None]:
    """Within the context, the functions below replace cuda-tile's. The context holds the compiler's
    lock. Garbage collection is off, because an IR has many objects and few of them are garbage.
    """
    with _compile._compiler_lock, replaced({} if _as_installed.get() else OURS):
        collects = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if collects:
                gc.enable()


@contextmanager
def as_installed() -> Iterator[None]:
    """Within the context, cuda-tile runs unchanged."""
    token = _as_installed.set(True)
    try:
        with replaced(UNCHANGED):
            yield
    finally:
        _as_installed.reset(token)


def remember() -> None:
    """Replaces cuda-tile's functions for as long as the process lives."""
    for (owner, name), new in OURS.items():
        setattr(owner, name, new)


@contextmanager
def replaced(functions: dict[tuple[Any, str], Any]) -> Iterator[None]:
    before = {(owner, name): vars(owner)[name] for owner, name in functions}
    try:
        for (owner, name), new in functions.items():
            setattr(owner, name, new)
        yield
    finally:
        for (owner, name), old in before.items():
            setattr(owner, name, old)


KEPT = 32  # IRs for the next architectures
_finished: dict[tuple[Any, ...], tuple[Any, Any]] = {}


def final_ir(keeper: Any, index: int) -> Any:
    """The same IR serves every architecture; only the support of its dtypes is checked for each."""
    as_it_is = UNCHANGED[_compile._IrKeeper, "get_final_ir"]
    if keeper.final_ir is not None:  # for a caller that keeps it
        return as_it_is(keeper, index)
    key = keeper.ann_func.pyfunc, repr(keeper.signatures[index]), keeper.bytecode_version
    if key in _finished:
        body, keeper._dataflow_results[index] = _finished[key]
        _compile.check_dtype_support(body, keeper.sm_arch, keeper.bytecode_version)
    else:
        body = as_it_is(keeper, index)
        _finished[key] = body, keeper._dataflow_results[index]
        if len(_finished) > KEPT:
            del _finished[next(iter(_finished))]
    return body


def resolve_operand(x: Any, scope: Any) -> Any:
    """A called function becomes one value of the IR, not one for each call."""
    return constant(x) if type(x) in CONSTANTS else UNCHANGED[hir2ir, "_resolve_operand"](x, scope)


def constant(value: Any) -> Any:
    """A number is a value of the IR once in a block: most operations of an IR are constants."""
    kind = type(value)
    if kind in NUMBERS:
        numbers = vars(ir.Builder.get_current()).setdefault("_numbers", {})
        key = kind, value.hex() if kind is float else value  # -0.0 is not 0.0
        if key not in numbers:
            numbers[key] = UNCHANGED[hir2ir, "loosely_typed_const"](value)
        return numbers[key]
    if kind not in NAMED:
        return UNCHANGED[hir2ir, "loosely_typed_const"](value)
    known = vars(ir.Builder.get_current().ir_ctx).setdefault("_named", {})
    if value not in known:
        known[value] = sym2var(value, constant_only=True)
    return known[value]


async def dispatch_block(block: Any, builder: Any, *, start: int = 0, suspend_at: int = -1) -> None:
    """Makes the calls of a block in order. Nearly all are calls of cuda-tile's own functions; these
    take one step here instead of five coroutines.
    """
    if builder.ir_ctx.log_ir_on_error:
        await UNCHANGED[hir2ir, "_dispatch_hir_block_inner"](block, builder, start=start, suspend_at=suspend_at)
        return
    scope, registry, before = Scope.get_current(), op_impl.ImplRegistry.get_current(), builder._loc
    loc = before
    try:
        for cursor in range(start, len(block.calls)):
            if cursor == suspend_at:
                return
            call = block.calls[cursor]
            builder._loc = loc = retarget_loc(call.loc, scope)
            if not _called_at_once(call, scope, registry, builder):
                await hir2ir._dispatch_call(call, scope)
            if builder.is_terminated:
                return
        builder._loc = loc = retarget_loc(block.jump_loc, scope)
        await hir2ir._dispatch_hir_jump(block, scope)
    except Exception as error:
        _tell_place(error, loc)
        raise
    finally:
        builder._loc = before


def _called_at_once(call: hir.Call, scope: Any, registry: Any, builder: Any) -> bool:
    """Makes a call if its implementation is known and does not wait; False for any other."""
    function: Any = call.callee
    if type(function) not in FUNCTIONS:
        return False
    function = stub_aliases.get(function, function)
    implementation = registry.op_implementations.get(function)
    if implementation is None or implementation._is_coroutine or not is_function_allowed_in(function, builder.ir_ctx.execution_space):
        return False
    args, kwargs, known = [], {}, scope.hir2ir_varmap
    for x in call.args:
        if type(x) is hir.Starred:
            return False
        args.append(known[x.id] if type(x) is hir.Value else resolve_operand(x, scope))
    for name, x in call.kwargs:
        if name is None:
            return False
        kwargs[name] = resolve_operand(x, scope)
    found = implementation(*bind_args(hir2ir.get_signature(function), function.__name__, args, kwargs))
    if call.result is not None and not builder.is_terminated:
        known[call.result.id] = constant(None) if found is None else found
    return True


_places: dict[Any, Any] = {}


def bind_args(signature: inspect.Signature, name: str, args: Any, kwargs: Any, closure_defaults: Any = None) -> list[Any]:
    """Binds arguments to parameters. The result depends only on the number of arguments and their
    names, so it is computed once for each.
    """
    key = id(signature), len(args), tuple(kwargs)
    if key not in _places:
        _places[key] = signature, _bound(signature, len(args), tuple(kwargs))
    places = _places[key][1]
    if places is None:
        return UNCHANGED[hir2ir, "_bind_args"](signature, name, args, kwargs, closure_defaults)  # type: ignore[no-any-return]
    values = [*args, *kwargs.values()]
    return [values[place] if type(place) is int else sym2var(place.default, constant_only=True) for place in places]


def _bound(signature: inspect.Signature, count: int, names: tuple[str, ...]) -> list[Any] | None:
    """For each parameter the position of its argument, or the parameter itself if it has none. None
    if a parameter takes several arguments, or if a default is not a value.
    """
    try:
        found = signature.bind(*range(count), **{name: count + i for i, name in enumerate(names)}).arguments
    except TypeError:
        return None
    for parameter in signature.parameters.values():
        several = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if several or (parameter.name not in found and isinstance(parameter.default, hir2ir.ClosureDefaultPlaceholder)):
            return None
    return [found.get(name, parameter) for name, parameter in signature.parameters.items()]


def retarget_loc(loc: Loc, scope: Any) -> Loc:
    if loc.is_unknown():
        return loc
    function = scope.concrete_func_desc if loc.function is scope.func_hir.desc else loc.function
    return Loc(loc.line, loc.col, loc.filename, loc.last_line, loc.end_col, function, scope.call_site)


def _tell_place(error: Exception, loc: Loc) -> None:
    """Adds the place to an error. An error that is not cuda-tile's becomes an internal error of
    cuda-tile.
    """
    if isinstance(error, TileError):
        loc.__exit__(type(error), error, error.__traceback__)
        return
    inner = TileInternalError(str(error))
    loc.__exit__(TileInternalError, inner, None)
    raise inner from error


def nested_blocks(operation: Any) -> tuple[Any, ...]:
    names = operation._nested_block_names
    return tuple([getattr(operation, name) for name in names]) if names else ()


def find_overload(registry: Any, stub: Any, overload: tuple[Any, ...]) -> Any:
    known = vars(registry).setdefault("_found", {})
    try:
        return known[stub, overload]
    except KeyError:
        known[stub, overload] = UNCHANGED[op_impl.ImplRegistry, "_find_overload"](registry, stub, overload)
        return known[stub, overload]
    except TypeError:  # not hashable
        return UNCHANGED[op_impl.ImplRegistry, "_find_overload"](registry, stub, overload)


_as_installed: ContextVar[bool] = ContextVar("tilewright.interpret.as_installed", default=False)
OURS: dict[tuple[Any, str], Any] = {
    (_compile._IrKeeper, "get_final_ir"): final_ir,
    (hir2ir, "get_signature"): functools.cache(hir2ir.get_signature),
    (hir2ir, "_resolve_operand"): resolve_operand,
    (hir2ir, "loosely_typed_const"): constant,
    (hir2ir, "_bind_args"): bind_args,
    (hir2ir, "_dispatch_hir_block_inner"): dispatch_block,
    (hir2ir, "retarget_loc"): retarget_loc,
    (ir.Operation, "__post_init__"): lambda operation: None,  # asserts what all callers see to
    (ir.Operation, "nested_blocks"): property(nested_blocks),
    (op_impl.ImplRegistry, "_find_overload"): find_overload,
}
UNCHANGED = {(owner, name): vars(owner)[name] for owner, name in OURS}
