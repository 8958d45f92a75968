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
from types import BuiltinFunctionType, FunctionType, ModuleType, NoneType
from typing import Any

import cuda.tile as ct
from cuda.tile import _compile
from cuda.tile._exception import Loc, TileError, TileInternalError
from cuda.tile._execution import is_function_allowed_in, stub_aliases
from cuda.tile._ir import hir, hir_stubs, ir, op_impl
from cuda.tile._ir.arithmetic_ops import dtype_constructor
from cuda.tile._ir.core_ops import TypedConst, store_var, sym2var
from cuda.tile._ir.scope import Scope
from cuda.tile._ir.type import BoundMethodTy, DTypeConstructor, FunctionTy, InvalidType, ModuleTy
from cuda.tile._passes import ast2hir, dataflow_analysis, hir2ir

from .._forks import held_over_forks

FUNCTIONS = {FunctionType, BuiltinFunctionType}
ENUMS = {ct.MemoryOrder, ct.MemoryScope, ct.PaddingMode, ct.RoundingMode}
DTYPE = type(ct.int32)
NAMED = {*FUNCTIONS, *ENUMS, DTYPE, ModuleType, str, NoneType}  # constants that no operation computes with
NUMBERS = {bool, int, float}
CONSTANTS = {*NAMED, *NUMBERS}
_lock = held_over_forks(_compile._compiler_lock)


@contextmanager
def quick() -> Iterator[None]:
    """Within the context, the functions below replace cuda-tile's. The context holds the compiler's
    lock. Garbage collection is off, because an IR has many objects and few of them are garbage.
    """
    with _lock, replaced({} if _as_installed.get() else OURS):
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
    if (kind, value) not in known:
        known[kind, value] = sym2var(value, constant_only=True)
    return known[kind, value]


async def dispatch_block(block: Any, builder: Any, *, start: int = 0, suspend_at: int = -1) -> None:
    """Makes the calls of a block in order. Nearly all are calls of cuda-tile's own functions; these
    take one step here instead of five coroutines.
    """
    if builder.ir_ctx.log_ir_on_error:
        await UNCHANGED[hir2ir, "_dispatch_hir_block_inner"](block, builder, start=start, suspend_at=suspend_at)
        return
    scope, registry, before = Scope.get_current(), op_impl.ImplRegistry.get_current(), builder._loc
    place, result = block.jump_loc, block.result if block.have_result else None
    try:
        for cursor in range(start, len(block.calls)):
            if cursor == suspend_at:
                return
            call = block.calls[cursor]
            place = call.loc
            if call.result is not result and _looked_up(call, scope):  # errors of a choice name the places of its results
                continue
            builder._loc = retarget_loc(place, scope)
            if not _called_at_once(call, scope, registry, builder):
                await hir2ir._dispatch_call(call, scope)
            if builder.is_terminated:
                return
        place = block.jump_loc
        builder._loc = retarget_loc(place, scope)
        await hir2ir._dispatch_hir_jump(block, scope)
    except Exception as error:
        _tell_place(error, retarget_loc(place, scope))
        raise
    finally:
        builder._loc = before


def _looked_up(call: hir.Call, scope: Any) -> bool:
    """Makes a call that only looks a value up: half of all. False for any other, and for one that
    finds nothing, or a value that operations may compute with.
    """
    function, found = call.callee, None
    if function is hir_stubs.load_var:
        name: Any = call.args[0]
        if name.depth >= 0:
            local = scope.local_scopes[name.depth]
            found = None if local._dead else local._map[name.index]
            if found is not None and type(found.get_type_allow_invalid()) is InvalidType:
                return False
        elif name.index >= 0:
            found = _named(scope.func_hir.frozen_global_values[name.index])
    elif function is hir_stubs.identity:
        found = _named(call.args[0])
    elif function is getattr and type(call.args[0]) is hir.Value and not call.kwargs:
        owner = scope.hir2ir_varmap[call.args[0].id].get_type_allow_invalid()
        if type(owner) is ModuleTy and type(call.args[1]) is str:
            found = _named(getattr(owner.py_mod, call.args[1], call))  # a call has no name
    if found is None or call.result is None:
        return False
    scope.hir2ir_varmap[call.result.id] = found
    return True


def _named(value: Any) -> Any:
    return constant(value) if type(value) in NAMED else None


def _called_at_once(call: hir.Call, scope: Any, registry: Any, builder: Any) -> bool:
    """Makes a call if its implementation is known and does not wait; False for any other."""
    known = scope.hir2ir_varmap
    if _made(call, known):
        return True
    function, args = _callee(call, known)
    implementation = registry.op_implementations.get(function) if function is not None else None
    if implementation is None or not is_function_allowed_in(function, builder.ir_ctx.execution_space):
        return False
    overloads = _overloads_of(implementation) if implementation._is_coroutine else None
    # Where it chooses an overload of enter_context, it marks the manager as entered: only once.
    if implementation._is_coroutine and (overloads is None or function is hir_stubs.enter_context):
        return False
    kwargs = {}
    for x in call.args:
        if type(x) is hir.Starred:
            return False
        args.append(known[x.id] if type(x) is hir.Value else resolve_operand(x, scope))
    for name, x in call.kwargs:
        if name is None:
            return False
        kwargs[name] = resolve_operand(x, scope)
    values = bind_args(hir2ir.get_signature(function), function.__name__, args, kwargs)
    if overloads is not None:
        implementation = _overload(overloads, function, registry, values)
        if implementation is None or implementation._is_coroutine:
            return False
    found = implementation(*values)
    if call.result is not None and not builder.is_terminated:
        known[call.result.id] = constant(None) if found is None else found
    return True


def _made(call: hir.Call, known: Any) -> bool:
    """Makes an assignment to a variable, a number, or a conversion; False for any other call."""
    function: Any = call.callee
    found = None
    if function is hir_stubs.store_var and type(call.args[1]) is hir.Value and call.result is None:
        store_var(call.args[0].index, known[call.args[1].id])
        return True
    if function is hir_stubs.identity and type(call.args[0]) in NUMBERS:
        found = UNCHANGED[hir2ir, "loosely_typed_const"](call.args[0])
    elif type(function) is DTYPE and len(call.args) == 1 and type(call.args[0]) is hir.Value and not call.kwargs:
        kind = constant(function).get_type()
        if type(kind) is DTypeConstructor:
            found = dtype_constructor(kind.dtype, known[call.args[0].id])
    if found is not None and call.result is not None:
        known[call.result.id] = found
    return found is not None


def _callee(call: hir.Call, known: Any) -> tuple[Any, list[Any]]:
    """The function of a call, and the object before its arguments if it is a method; None for what
    is no function.
    """
    function: Any = call.callee
    args = []
    if type(function) is hir.Value:
        callee = known[function.id]
        kind = callee.get_type_allow_invalid()
        if type(kind) is BoundMethodTy:
            args.append(callee.get_aggregate().bound_self)
        function = kind.func if type(kind) in (BoundMethodTy, FunctionTy) else None
    return stub_aliases.get(function, function) if type(function) in FUNCTIONS else None, args


@functools.cache
def _overloads_of(implementation: Any) -> Any:
    """What yields the key of its choice, if a function waits only to choose among overloads."""
    inner = implementation.__wrapped__
    return inner.__wrapped__ if getattr(inner, "__code__", _overload.__code__).co_qualname == _DISPATCHER else None


_DISPATCHER = "ImplRegistry.overload_dispatcher.<locals>.decorate.<locals>.implementation"


def _overload(key_of: Any, function: Any, registry: Any, values: list[Any]) -> Any:
    """The overload for these values; None for an error, which the long way raises in its words."""
    try:
        return find_overload(registry, function, next(key_of(*values)))
    except TileError:
        return None


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
    return [values[place] if type(place) is int else _default(place.default) for place in places]


def _default(value: Any) -> Any:
    return _named(value) or sym2var(value, constant_only=True)


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


def eliminate_assign_ops(body: Any) -> None:
    """The first of cuda-tile's passes. Half of all operations are constants that only the front end
    looked at. They are dropped here, so that no pass carries them up to the one that would.
    """
    used: set[str] = set()
    _note_operands(body, used)
    _drop_constants(body, used)
    UNCHANGED[_compile, "eliminate_assign_ops"](body)


def _note_operands(block: Any, used: set[str]) -> None:
    for operation in block._operations:
        for name in operation._operand_names:
            operand = getattr(operation, name)
            if type(operand) is tuple:
                used.update([variable.name for variable in operand])
            elif operand is not None:
                used.add(operand.name)
        for name in operation._nested_block_names:
            _note_operands(getattr(operation, name), used)


def _drop_constants(block: Any, used: set[str]) -> None:
    block._operations = [x for x in block._operations if type(x) is not TypedConst or x.result_vars[0].name in used]
    for operation in block._operations:
        for name in operation._nested_block_names:
            _drop_constants(getattr(operation, name), used)


def nested_blocks(operation: Any) -> tuple[Any, ...]:
    names = operation._nested_block_names
    return tuple([getattr(operation, name) for name in names]) if names else ()


def all_inputs(operation: Any) -> Iterator[Any]:
    found: list[Any] = []
    for name in operation._operand_names:
        operand = getattr(operation, name)
        if type(operand) is tuple:
            found += operand
        elif operand is not None:
            found.append(operand)
    return iter(found)


def update(tracker: Any, variable: Any, predicate: Any) -> None:
    """What is known of a value already, which a second pass over a program finds for nearly all,
    is not joined with itself.
    """
    known = tracker._predicates.get(variable.name)
    if known is not predicate and (known is None or known != predicate):
        UNCHANGED[dataflow_analysis._Tracker, "update"](tracker, variable, predicate)


def find_overload(registry: Any, stub: Any, overload: tuple[Any, ...]) -> Any:
    known = vars(registry).setdefault("_found", {})
    try:
        return known[stub, overload]
    except KeyError:
        known[stub, overload] = UNCHANGED[op_impl.ImplRegistry, "_find_overload"](registry, stub, overload)
        return known[stub, overload]
    except TypeError:  # not hashable
        return UNCHANGED[op_impl.ImplRegistry, "_find_overload"](registry, stub, overload)


SOURCES = 4096  # whose source is read once; cuda-tile keeps 128, fewer than models' kernels and their helpers have
get_function_hir = functools.lru_cache(SOURCES)(ast2hir.get_function_hir.__wrapped__)

_as_installed: ContextVar[bool] = ContextVar("tilewright.interpret.as_installed", default=False)
OURS: dict[tuple[Any, str], Any] = {
    (_compile._IrKeeper, "get_final_ir"): final_ir,
    (_compile, "eliminate_assign_ops"): eliminate_assign_ops,
    (_compile, "get_function_hir"): get_function_hir,
    (hir2ir, "get_function_hir"): get_function_hir,
    (hir2ir, "get_signature"): functools.cache(hir2ir.get_signature),
    (hir2ir, "_resolve_operand"): resolve_operand,
    (hir2ir, "loosely_typed_const"): constant,
    (hir2ir, "_bind_args"): bind_args,
    (hir2ir, "_dispatch_hir_block_inner"): dispatch_block,
    (hir2ir, "retarget_loc"): retarget_loc,
    (ir.Operation, "__post_init__"): lambda operation: None,  # asserts what all callers see to
    (ir.Operation, "nested_blocks"): property(nested_blocks),
    (ir.Operation, "all_inputs"): all_inputs,
    (dataflow_analysis._Tracker, "update"): update,
    (op_impl.ImplRegistry, "_find_overload"): find_overload,
}
UNCHANGED = {(owner, name): vars(owner)[name] for owner, name in OURS}
