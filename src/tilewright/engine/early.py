"""A step's calls in forms that begin, and load, while the launch in front still runs."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..launch import Device
from ..ops.attention_decode import attention_decode_out
from ..ops.common.weight_formats import FORMATS
from ..ops.kv_append import kv_append_out
from ..ops.matmul import matmul_out
from ..ops.quantized_matmul import quantized_matmul_out
from ..ops.rms_norm_matmul import rms_norm_matmul_out
from . import attend_splits
from .append_attend import MOST_VALUES, append_attend
from .program import Call
from .row_product import form_of, row_product
from .shares import touching

ARCHS = ("sm_90",)  # where these forms were timed


def early(calls: Iterable[Call], device: Device) -> list[Call]:
    """The calls, those of one token of one sequence in these forms where they have one."""
    found = list(calls)
    if device.arch not in ARCHS:
        return found
    for i in range(len(found) - 1, 0, -1):
        found[i - 1 : i + 1] = _joined(found[i - 1], found[i], found[i + 1 :], device)
    return found if _fills_shared(found) else [_product(call) for call in found]


def _fills_shared(calls: list[Call]) -> bool:
    """Whether products with weights of 8 bits leave 28 KB of an SM to L1, which plain loads need
    and those of TMA do not (notes/facts.md).
    """
    small = (call.arguments["weight_format"] for call in calls if call.op is quantized_matmul_out)
    return any(FORMATS[name].bits == 8 for name in small)


def _joined(first: Call, second: Call, rest: list[Call], device: Device) -> list[Call]:
    """An append and its attention as one call; a product and the norm that adds its result to the
    stream so that the product adds it, if none of `rest` reads that result too.
    """
    if first.op is kv_append_out and second.op is attention_decode_out and _one_token(first.arguments, second.arguments):
        a, b = first.arguments, second.arguments
        names = ("q", "k", "v", "k_cache", "v_cache", "positions", "cos", "sin", "q_norm", "k_norm", "eps", "round_before_weight")
        given = {name: a[name] for name in names} | {"out": b["out"], "scale": b["scale"]}
        _, kv_heads, keys, dim = a["k_cache"].shape
        if b["sinks"] is b["window"] is None and keys & (keys - 1) == 0 and 64 <= keys <= MOST_VALUES // dim:
            return [Call.of(second.name, append_attend, **given)]
        if (form := attend_splits.form_of(kv_heads, keys, dim, b["window"], device)) is not None:
            return [Call.of(second.name, attend_splits.attend_splits, **given, sinks=b["sinks"], window=b["window"], form=form)]
    if second.op is rms_norm_matmul_out and first.op is matmul_out and _product(first) is not first:
        a, b = first.arguments, second.arguments
        if b["residual"] is a["out"] and not _reads(rest, a["out"]):
            summed = _row(first, a["a"], a, onto=b["x"], out=b["new_residual"])
            return [summed, second.replaced(x=b["new_residual"], residual=None, new_residual=None)]
    return [first, second]


def _reads(calls: list[Call], y: Tensor) -> bool:
    """Whether any of the calls reads y, before one of them writes it."""
    for call in calls:
        if touched := touching(y, call):
            return call.op not in (matmul_out, row_product) or len(touched) > 1 or call.arguments["out"] is not y
    return False


def _product(call: Call) -> Call:
    """A product of one row as `row_product`, or the call itself."""
    if call.op not in (matmul_out, rms_norm_matmul_out):
        return call
    a = call.arguments
    x = a["a"] if call.op is matmul_out else a["x"]
    if len(x) > 1 or x.dtype is not torch.bfloat16 or a["b"].dtype is not torch.bfloat16 or form_of(*a["b"].shape) is None:
        return call
    if call.op is rms_norm_matmul_out:
        names = ("residual", "weight", "new_residual", "eps", "weight_offset", "silu_mul")
        return _row(call, x, a, **{name: a[name] for name in names})
    plain = a["trans_b"] and not (a["trans_a"] or a["silu_mul"]) and a["residual"] is a["out_scale"] is a["scale_a"] is None
    return _row(call, x, a) if plain and a["out"].dtype is torch.bfloat16 else call


def _row(call: Call, x: Any, given: dict[str, Any], **how: Any) -> Call:
    rest: dict[str, Any] = dict.fromkeys(("residual", "weight", "onto", "new_residual"))
    rest |= {"eps": 1e-6, "weight_offset": 0.0, "silu_mul": False, "out": given["out"], **how}  # without a norm nothing reads eps
    return Call.of(call.name, row_product, x=x, b=given["b"], bias=given["bias"], **rest)


# What neither call may ask for
ABSENT = ("block_table", "k_scale", "v_scale", "rope_positions", "v_norm", "kv_start", "softcap", "lse", "denominator")


def _one_token(append: dict[str, Any], attend: dict[str, Any]) -> bool:
    """Whether the calls are of one token of one sequence, of whole heads that are rotated in
    halves.
    """
    if any(given.get(name) is not None for given in (append, attend) for name in ABSENT):
        return False
    q, cache = append["q"], append["k_cache"]
    if q is None or append["cos"] is None or append["interleaved"] or (append["q_norm"] is None) != (append["k_norm"] is None):
        return False
    dim = cache.shape[3]
    whole = 2 * append["cos"].shape[1] == dim == append["v"].shape[3] and dim >= 64 and dim & (dim - 1) == 0
    one = append["positions"].numel() == 1 and cache.dtype.itemsize == 2
    rotated = q if append["rotated"] is None else append["rotated"]
    return bool(whole and one and attend["q"].data_ptr() == rotated.data_ptr())
