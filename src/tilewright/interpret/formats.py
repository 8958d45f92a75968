"""Number formats: how the interpreter holds a tile, and how memory holds it.

Types that numpy lacks, and float16, are "small": a float32 *container* holds their values. After
every operation the values are rounded to those of the format, so each result is exact for it. Their
bits exist only in memory. Every other type is its own container.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

Value = Any  # a numpy array (tile) or numpy scalar


@dataclass(frozen=True, slots=True)
class Format:
    """A binary floating-point format.

    overflow: what rounding to nearest gives for values past `largest`, infinity included. The two
        signed 8-bit formats saturate, like the instruction that cuTile compiles to (F2FP.SATFINITE
        on sm_90 and sm_100).
    native: the torch dtype that converts it; None if a table of all its values is used instead.
    """

    bits: int
    mantissa: int
    min_exponent: int
    largest: float
    overflow: float
    native: torch.dtype | None = None
    signed: bool = True


FLOAT32 = Format(32, 23, -126, 3.4028234663852886e38, np.inf)
SMALL = {
    "float16": Format(16, 10, -14, 65504.0, np.inf, torch.float16),
    "bfloat16": Format(16, 7, -126, 3.3895313892515355e38, np.inf, torch.bfloat16),
    "tfloat32": Format(32, 10, -126, 3.4011621342146535e38, np.inf),
    "float8_e4m3fn": Format(8, 3, -6, 448.0, 448.0, torch.float8_e4m3fn),
    "float8_e5m2": Format(8, 2, -14, 57344.0, 57344.0, torch.float8_e5m2),
    "float8_e8m0fnu": Format(8, 0, -127, 2.0**127, np.nan, signed=False),
    "float8_e5m3fnu": Format(8, 3, -14, 114688.0, np.nan, signed=False),
    "float4_e2m1fn": Format(4, 1, 0, 6.0, 6.0),
}
CONTAINER: dict[str, Any] = {
    name: getattr(np, name) for name in ("bool_", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64")
}
CONTAINER |= dict.fromkeys(SMALL, np.float32)
MEMORY: dict[str, Any] = {name: {8: np.uint8, 16: np.uint16, 32: np.uint32, 4: np.uint8}[f.bits] for name, f in SMALL.items()}
MEMORY = CONTAINER | MEMORY | {"float16": np.float16}

INTEGRAL: dict[str, Callable[[Value], Value]] = {
    "RN": np.rint,
    "RZ": np.trunc,
    "RM": np.floor,
    "RP": np.ceil,
    "RA": lambda q: np.copysign(np.floor(np.abs(q) + 0.5), q),
}


def is_float(dtype: str) -> bool:
    return dtype[0] in "fbt" and dtype != "bool_"


def tensor(x: Value) -> Tensor:
    """The same memory as a torch tensor (a copy where torch refuses it)."""
    x = np.asarray(x)
    if not x.flags.writeable or any(s < 0 for s in x.strides):
        x = x.copy()
    return torch.from_numpy(x)


def array(x: Tensor) -> Value:
    return x.numpy()[()] if x.ndim == 0 else x.numpy()


# ----------------------------------------------------------------------------------------- rounding
def round_to(x: Value, dtype: str, mode: str = "RN") -> Value:
    """`x` rounded to the grid of `dtype`, in its container."""
    if dtype not in SMALL and (dtype == "float64" or mode == "RN"):
        return CONTAINER[dtype](x) if np.ndim(x) == 0 else np.asarray(x).astype(CONTAINER[dtype], copy=False)
    f = SMALL.get(dtype, FLOAT32)
    if mode == "RN" and (f.native is not None or dtype == "tfloat32"):
        x = np.asarray(x)
        if x.dtype != np.float32:
            x = _round_to_odd(x.astype(np.float64, copy=False))
        if f.native is None:
            return _round_tf32(x)
        near = tensor(x)
        if f.bits == 8:
            near = near.clamp(-f.largest, f.largest)
        return array(near.to(f.native).to(torch.float32))
    return _round(np.asarray(x, np.float64), f, mode)[()]


def _round_to_odd(x: np.ndarray) -> np.ndarray:
    """float64 -> float32 such that rounding the result again, to at most 22 bits, equals rounding
    once.
    """
    near = x.astype(np.float32)
    bits = np.atleast_1d(near).view(np.int32)
    back = np.atleast_1d(near).astype(np.float64)
    x = np.atleast_1d(x)
    move = (back != x) & (bits & 1 == 0) & ~np.isnan(x)
    odd = np.where(move, bits + np.where(np.abs(back) < np.abs(x), np.int32(1), np.int32(-1)), bits)
    return odd.view(np.float32).reshape(near.shape)


def _round_tf32(x: np.ndarray) -> Value:
    bits = np.ascontiguousarray(x).view(np.uint32)
    near = (bits + np.uint32(0xFFF) + (bits >> np.uint32(13) & np.uint32(1))) & np.uint32(0xFFFFE000)
    return np.where(np.isnan(x), np.float32(np.nan), near.view(np.float32).reshape(x.shape))[()]


def _round(x: np.ndarray, f: Format, mode: str) -> np.ndarray:
    if not f.signed and f.mantissa == 0:  # powers of two only
        x = np.maximum(x, 2.0**f.min_exponent)
    quantum = np.ldexp(1.0, np.maximum(np.frexp(x)[1] - 1, f.min_exponent) - f.mantissa)
    r = np.where(np.isfinite(x), INTEGRAL[mode](x / quantum) * quantum, x)
    if mode in ("RN", "RA") or not np.isinf(f.overflow):
        return np.where(np.abs(r) > f.largest, np.copysign(f.overflow, x), r).astype(np.float32)
    finite = np.isfinite(x)
    r = np.where(finite & (r > f.largest), np.inf if mode == "RP" else f.largest, r)
    return np.where(finite & (r < -f.largest), -np.inf if mode == "RM" else -f.largest, r).astype(np.float32)


# ----------------------------------------------------------------------------- memory <-> container
def decode(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Memory -> container. For a type that is its own container, the same memory, not a copy."""
    if dtype not in SMALL:
        return bits
    if dtype == "float16":
        return tensor(bits).float().numpy()
    if dtype == "bfloat16":
        return tensor(bits).view(torch.bfloat16).float().numpy()
    if dtype == "tfloat32":
        return bits.view(np.float32)
    values: np.ndarray = _values(dtype)[bits]
    return values


def encode(x: Value, dtype: str) -> np.ndarray:
    """Container -> memory, for values that are already on the grid of `dtype`."""
    if dtype not in SMALL:
        return np.asarray(x, CONTAINER[dtype])
    x = np.asarray(x, np.float32)
    if dtype == "float16":
        return tensor(x).half().numpy()
    if dtype == "bfloat16":
        return tensor(x).bfloat16().view(torch.uint16).numpy()
    if dtype == "tfloat32":
        return np.ascontiguousarray(x).view(np.uint32).reshape(x.shape)
    values, codes, nan = _codes(dtype)
    f = SMALL[dtype]
    if f.native is not None:
        code = tensor(x).to(f.native).view(torch.uint8).numpy()
    else:
        code = codes[np.clip(np.searchsorted(values, x), 0, len(codes) - 1)]
        code = np.where((x == 0) & np.signbit(x) & f.signed, 1 << f.bits - 1, code)
    return np.where(np.isnan(x), nan, code).astype(np.uint8)


@cache
def _values(dtype: str) -> np.ndarray:
    """The value of every code of a format of at most 8 bits."""
    f = SMALL[dtype]
    code = np.arange(1 << f.bits)
    if f.mantissa == 0:
        return np.where(code == 255, np.nan, np.ldexp(1.0, code + f.min_exponent)).astype(np.float32)
    magnitude = code & (1 << f.bits - 1) - 1 if f.signed else code
    exponent, fraction = magnitude >> f.mantissa, magnitude & (1 << f.mantissa) - 1
    value = np.where(
        exponent == 0,
        np.ldexp(fraction / 2.0**f.mantissa, f.min_exponent),
        np.ldexp(1 + fraction / 2.0**f.mantissa, exponent - 1 + f.min_exponent),
    )
    value = np.where(value > f.largest, np.nan, value)
    if dtype == "float8_e5m2":
        value = np.where(magnitude == 0x7C, np.inf, value)
    return (np.where(code >> f.bits - 1, -value, value) if f.signed else value).astype(np.float32)


@cache
def _codes(dtype: str) -> tuple[np.ndarray, np.ndarray, int]:
    """Sorted values, their codes, and the code of NaN."""
    values = _values(dtype)
    codes = np.flatnonzero(~np.isnan(values) & ~((values == 0) & np.signbit(values)))
    codes = codes[np.argsort(values[codes], kind="stable")]
    nan = np.flatnonzero(np.isnan(values))
    return values[codes], codes, int(nan[0]) if len(nan) else 0


# -------------------------------------------------------------------------------------- conversions
def constant(value: Any, dtype: str, shape: tuple[int, ...] = ()) -> Value:
    container = CONTAINER[dtype]
    held = np.asarray(value, object if isinstance(value, int) and dtype == "uint64" else None).astype(container)
    return container(held) if shape == () else np.broadcast_to(held, shape)


def astype(x: Value, source: str, target: str, mode: str = "RN") -> Value:
    if is_float(target):
        if target == "float32" and source in SMALL:
            return x
        exact = is_float(source) or target in ("float32", "float64")
        return round_to(x if exact else np.asarray(x, np.float64), target, mode)
    if target == "bool_":
        return np.not_equal(x, 0)
    return np.asarray(np.trunc(x) if is_float(source) else x).astype(CONTAINER[target])[()]


def bitcast(x: Value, source: str, target: str) -> Value:
    held = np.ascontiguousarray(encode(x, source)).view(MEMORY[target])
    return decode(held, target).reshape(np.shape(x))[()]


def pack(x: Value, dtype: str) -> np.ndarray:
    """The bytes of a 1-D tile."""
    bits = encode(x, dtype)
    if dtype == "float4_e2m1fn":
        pairs: np.ndarray = bits[0::2] | bits[1::2] << np.uint8(4)
        return pairs
    return np.ascontiguousarray(bits).reshape(-1).view(np.uint8).copy()


def unpack(x: Value, dtype: str) -> np.ndarray:
    """The inverse of `pack`."""
    if dtype == "float4_e2m1fn":
        return decode(np.stack([x & np.uint8(15), x >> np.uint8(4)], -1).reshape(-1), dtype)
    return decode(np.ascontiguousarray(x).view(MEMORY[dtype]), dtype)
