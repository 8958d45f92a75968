"""Arithmetic of tiles: numpy arrays and scalars in their containers (see formats.py).

Transcendental functions and matrix products are PyTorch's, which are faster than numpy's. Users
compare with PyTorch, too.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from .errors import KernelError
from .formats import SMALL, Value, array, is_float, round_to, tensor

Body = Callable[..., Any]
TINY = np.float32(2.0**-126)
LEAST, MOST = np.minimum.reduce, np.maximum.reduce  # of a whole array with axis None: in half of the time of its min() and max()


def flush(x: Value) -> Value:
    """Subnormal float32 to zero."""
    return x * ~(np.abs(x) < TINY)  # times True or False: a sign stays, and so does a NaN


# -------------------------------------------------------------------------------------- elementwise
def ceil_divide(a: Value, b: Value) -> Value:
    return a // b + (a % b != 0)


def divide(name: str, a: Value, b: Value) -> Value:
    """Of integers: rounded down ("floordiv") or up ("cdiv"), or C's remainder ("c_mod")."""
    if not (b.all() if b.ndim else b):
        raise KernelError(f"integer {name} by zero, which Tile IR leaves undefined: {describe(a)} by {describe(b)}")
    return DIVIDE[name](a, b)


def _by_torch(function: Callable[..., torch.Tensor]) -> Callable[..., Value]:
    def apply(*xs: Value) -> Value:
        return array(function(*map(tensor, xs)))

    return apply


_power = _by_torch(torch.pow)
DIVIDE: dict[str, Callable[[Value, Value], Value]] = {"floordiv": np.floor_divide, "cdiv": ceil_divide, "c_mod": np.fmod}
BINARY: dict[str, Callable[[Value, Value], Value]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": np.divide,
    "c_mod": np.fmod,
    "pow": lambda a, b: _power(a, b) if np.asarray(a).dtype.kind == "f" else np.power(a, b),
    "atan2": _by_torch(torch.atan2),
}
EXTREMA = {"min": (np.fmin, np.minimum), "max": (np.fmax, np.maximum)}
UNARY: dict[str, Callable[[Value], Value]] = {
    "abs": np.abs,
    "neg": np.negative,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "floor": np.floor,
    "ceil": np.ceil,
    "invert": np.invert,
    "bitwise_not": np.invert,
    "isnan": np.isnan,
}
UNARY |= {name: _by_torch(getattr(torch, name)) for name in ("exp", "exp2", "log", "log2", "sin", "cos", "tan", "sinh", "cosh", "tanh")}
EXACT = {"abs", "neg", "floor", "ceil", "invert", "bitwise_not", "isnan"}  # never leave the grid of their operand
DIRECTED = ("RZ", "RM", "RP")


def binary(name: str, a: Value, b: Value, dtype: str, mode: str | None = None, flushed: bool = False, propagate_nan: bool = False) -> Value:
    floating = is_float(dtype)
    if flushed:
        a, b = flush(a), flush(b)
    if name in EXTREMA:
        return EXTREMA[name][propagate_nan or not floating](a, b)
    if name == "floordiv":
        r = round_to(np.floor(round_to(np.divide(a, b), dtype)), dtype)
    elif mode in DIRECTED:
        r = round_to(BINARY[name](np.float64(a), np.float64(b)), dtype, mode)
    else:
        r = BINARY[name](a, b)
        if dtype in SMALL:
            r = round_to(r, dtype)
    return flush(r) if flushed else r


def unary(name: str, x: Value, dtype: str, mode: str | None = None, flushed: bool = False) -> Value:
    if flushed:
        x = flush(x)
    if mode in DIRECTED:
        r = round_to(UNARY[name](np.float64(x)), dtype, mode)
    else:
        r = UNARY[name](x)
        if dtype in SMALL and name not in EXACT:
            r = round_to(r, dtype)
    return flush(r) if flushed else r


def fma(a: Value, b: Value, c: Value, dtype: str, mode: str = "RN", flushed: bool = False) -> Value:
    """a * b + c, rounded once: the product of two float32 is exact in float64."""
    if flushed:
        a, b, c = flush(a), flush(b), flush(c)
    r = round_to(np.multiply(a, b, dtype=np.float64) + c, dtype, mode)
    return flush(r) if flushed else r


def power_of_integer(base: Value, exponent: Value, dtype: str) -> Value:
    """In float64, which holds every exponent: a rounded one may be even where it was odd."""
    return round_to(_power(np.float64(base), np.float64(exponent)), dtype)


# ----------------------------------------------------------------------------------------- matrices
def mma(x: Value, y: Value, acc: Value, dtype: str) -> Value:
    """x @ y + acc.

    If an operand is shorter than the other along the contracted axis, the rest of it is zeros (see
    trim.py).
    """
    k = max(x.shape[-1], y.shape[-2])
    x, y = _lengthened(x, k, -1), _lengthened(y, k, -2)
    if dtype == "int32":  # every partial sum of int8 products is exact in float64
        product = torch.matmul(tensor(x).double(), tensor(y).double()).numpy()
        return (product.astype(np.int64) + acc).astype(np.int32)
    r = torch.matmul(tensor(x), tensor(y)).numpy()
    r += acc
    return round_to(r, dtype) if dtype in SMALL else r


def _lengthened(x: np.ndarray, n: int, axis: int) -> np.ndarray:
    if x.shape[axis] == n:
        return x
    shape = list(x.shape)
    shape[axis] = n
    return padded(x, tuple(shape), 0)


def mma_scaled(x: Value, x_scale: Value, y: Value, y_scale: Value, acc: Value) -> Value:
    x = x * np.repeat(x_scale, x.shape[-1] // x_scale.shape[-1], -1)
    y = y * np.repeat(y_scale, y.shape[-2] // y_scale.shape[-2], -2)
    return mma(x, y, acc, "float32")


# ----------------------------------------------------------------------------- reductions and scans
def reduce_with(body: Body, xs: tuple[Value, ...], axis: int) -> tuple[Value, ...]:
    """A balanced tree of pairs: the extents of tiles are powers of two."""
    xs = tuple(np.moveaxis(np.asarray(x), axis, 0) for x in xs)
    while (n := len(xs[0]) // 2) > 0:
        xs = body(*[half for x in xs for half in (x[:n], x[n:])])
    return tuple(x[0] for x in xs)


def scan_with(body: Body, xs: tuple[Value, ...], axis: int, reverse: bool) -> tuple[Value, ...]:
    """Inclusive prefix results by doubling distances (Hillis and Steele)."""
    step = -1 if reverse else 1
    xs = tuple(np.moveaxis(np.asarray(x), axis, 0)[::step] for x in xs)
    distance = 1
    while distance < len(xs[0]):
        new = body(*[part for x in xs for part in (x[:-distance], x[distance:])])
        xs = tuple(np.concatenate([x[:distance], r]) for x, r in zip(xs, new, strict=True))
        distance *= 2
    return tuple(np.moveaxis(x[::step], 0, axis) for x in xs)


# -------------------------------------------------------------------------------------------- shape
def broadcast(x: Value, shape: tuple[int, ...]) -> Value:
    if x.shape == shape:
        return x
    r = np.empty(shape, x.dtype)
    r[...] = x
    return r


def stretched(x: Value, shape: tuple[int, ...]) -> Value:
    """A tile in a larger shape, to be read."""
    return x if np.shape(x) == shape else np.broadcast_to(x, shape)


def padded(x: np.ndarray, shape: tuple[int, ...], padding: Any) -> np.ndarray:
    """A tile that begins with x; every element is written once, but for the corners."""
    r = np.empty(shape, x.dtype)
    r[tuple([slice(n) for n in x.shape])] = x
    for axis, (inside, n) in enumerate(zip(x.shape, shape, strict=True)):
        if inside < n:
            r[(slice(None),) * axis + (slice(inside, None),)] = padding
    return r


def insert(x: Value, value: Value, index: tuple[Any, ...]) -> np.ndarray:
    r = np.array(x)
    r[_part(r.shape, index, np.shape(value))] = value
    return r


def extract(x: Value, index: tuple[Any, ...], shape: tuple[int, ...]) -> Value:
    return x[_part(np.shape(x), index, shape)]


def _part(shape: tuple[int, ...], index: tuple[Any, ...], part: tuple[int, ...]) -> tuple[slice, ...]:
    for i, n, whole in zip(index, part, shape, strict=True):
        if not 0 <= i < whole // n:
            raise KernelError(f"part {tuple(map(int, index))} of shape {part} lies outside a tile of shape {shape}")
    return tuple(slice(int(i) * n, (int(i) + 1) * n) for i, n in zip(index, part, strict=True))


# ------------------------------------------------------------------------------------------ control
def steps(start: Any, stop: Any, step: Any) -> Iterator[Any]:
    """The values of a loop variable, in its own type."""
    if step <= 0:
        raise KernelError(f"range() step must be positive, got {step}")
    return map(type(start), range(int(start), int(stop), int(step)))


def check_assert(condition: Value, message: str) -> None:
    if not np.all(condition):
        where = np.argwhere(~np.asarray(condition))[:3].tolist()
        raise KernelError(f"assertion failed: {message}" + (f" (first false elements {where})" if where[0] else ""))


def check_divisible(x: Value, divisor: int) -> None:
    if np.any(np.mod(x, divisor)):
        raise KernelError(f"assume_divisible_by({divisor}) is false of {describe(x)}")


_DIRECTIVE = re.compile(r"%%|%[0 #+-]*[0-9]*(?:\.[0-9]+)?(?:hh|h|ll|l)?[a-zA-Z]")


def printf(form: str, *args: Value) -> None:
    """C's printf, an array printed as nested lists."""
    values = iter(args)

    def one(match: re.Match[str]) -> str:
        if match.group(0) == "%%":
            return "%"
        directive = re.sub(r"(hh|h|ll|l)(?=[a-zA-Z]$)", "", match.group(0)).replace("u", "d")

        def show(value: Value) -> str:
            if np.ndim(value):
                return "[" + ", ".join(map(show, value)) + "]"
            return str(directive % (value.item() if hasattr(value, "item") else value))

        return show(next(values))

    print(_DIRECTIVE.sub(one, form), end="", flush=True)


def describe(x: Value) -> str:
    """A value in an error message: a scalar, or the shape and first elements of a tile."""
    if np.ndim(x) == 0:
        return str(x)
    flat = np.asarray(x).reshape(-1)
    return f"tile {np.shape(x)} [{', '.join(map(str, flat[:4]))}{', ...' if flat.size > 4 else ''}]"
