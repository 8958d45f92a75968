"""Operations that the front end types, but for which cuda-tile has no code on any GPU."""

from typing import Any

import cuda.tile as ct

from . import cutile, formats

COMPUTED = ("float16", "bfloat16", "float32", "float64")  # floats that instructions compare and negate
CAST = "cast them first, as in x.astype(ct.float32)"


def require_code(op: Any) -> None:
    """Raises cuda-tile's TileUnsupportedFeatureError for such an operation."""
    check = CHECKS.get(op.op)
    message = check(op) if check is not None else ""
    if message:
        raise ct.TileUnsupportedFeatureError(message, loc=op.loc)


def _arithmetic(op: Any) -> str:
    dtype = cutile.dtype_of(op.lhs)
    floating = formats.is_float(dtype)
    if op.fn in ("pow", "atan2") and not floating:
        return f"operands of {op.fn} must be floats, got {dtype}: {CAST}"
    if op.fn == "cdiv" and floating:
        return f"operands of cdiv must be integers, got {dtype}: write ct.ceil(x / y)"
    if op.fn == "floordiv" and dtype[0] == "u":
        return f"operands of // and divmod must be signed integers or floats, got {dtype}: cast them first, as in x.astype(ct.int32)"
    return ""


def _of_narrow_floats(name: str, dtype: str) -> str:
    if not formats.is_float(dtype) or dtype in COMPUTED:
        return ""
    return f"operands of {name} must be {', '.join(COMPUTED[:-1])} or {COMPUTED[-1]}, got {dtype}: {CAST}"


def _view(op: Any) -> str:
    view, dtype = cutile.view_of(op.result_vars[0]), str(op.array.get_type().dtype.name)
    mode = view["padding"]
    if not view["shape"]:
        return "an array that is loaded or stored must have at least one axis, got none: write ct.gather(x, ()) or ct.scatter(x, (), tile)"
    if mode not in ("UNDETERMINED", "ZERO") and not formats.is_float(dtype):
        return f"padding_mode must be ZERO or UNDETERMINED for an array of {dtype}, got {mode}"
    if mode in ("POS_INF", "NEG_INF") and dtype == "float8_e4m3fn":
        return f"padding_mode must be a value of {dtype}, which has no infinity, got {mode}"
    return ""


CHECKS = {
    "raw_binary_arith": _arithmetic,
    "raw_cmp": lambda op: _of_narrow_floats("comparisons and isnan", cutile.dtype_of(op.lhs)) if not cutile.is_pointer(op.lhs) else "",
    "unaryop": lambda op: _of_narrow_floats(op.fn, cutile.dtype_of(op.operand)),
} | dict.fromkeys(("make_partition_view", "make_strided_view", "make_gather_scatter_view"), _view)
