"""Peers of `quantized_matmul`: cuBLAS and our own product with the weight in bf16, and torch's
product with int4 weights.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.common.weight_formats import INT4, dequantized, format_named, unpack
from ..ops.matmul import matmul as our_matmul
from .inputs import Inputs, kept


@kept
def _widened(words: Tensor, scales: Tensor, zeros: Tensor | None, factor: Tensor | None, weight_format: str, k: int) -> Tensor:
    return dequantized(words, scales, zeros, factor, format_named(weight_format), k, torch.bfloat16)


def _weight(x: Tensor, options: dict[str, Any]) -> Tensor:
    words, scales, zeros, factor = (options[name] for name in ("words", "scales", "zeros", "factor"))
    return _widened(words, scales, zeros, factor, options["weight_format"], x.shape[-1])


def alone(inputs: Inputs) -> bool:
    """Nothing becomes of x first."""
    return not inputs.keys() & {"norm", "up"}


def cublas(x: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
    return F.linear(x, _weight(x, options), bias)


def matmul(x: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
    return our_matmul(x, _weight(x, options), bias, trans_b=True)


@kept
def _int4_packed(words: Tensor, scales: Tensor, zeros: Tensor | None, weight_format: str, k: int) -> tuple[Tensor, Tensor]:
    """torch's packed words, and its scales with zero points in units of the weight: (code - 8) *
    scale + zero.
    """
    codes = unpack(words, format_named(weight_format), scales.shape[1], k)
    packed = torch._convert_weight_to_int4pack((codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.uint8), 8)
    zero = torch.zeros_like(scales) if zeros is None else (8 - zeros) * scales
    return packed, torch.stack((scales, zero), 2)


def int4pack_mm(x: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
    of = format_named(options["weight_format"])
    packed, scales = _int4_packed(options["words"], options["scales"], options["zeros"], of.name, x.shape[-1])
    return torch._weight_int4pack_mm(x, packed, of.group, scales)


def takes_int4pack(inputs: Inputs) -> bool:
    k, n = inputs["x"].shape[-1], inputs["scales"].shape[1]
    return alone(inputs) and format_named(inputs["weight_format"]).code == INT4 and inputs["bias"] is None and k % 128 == 0 and n % 8 == 0
