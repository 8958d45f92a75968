"""Peers of `mx_matmul`: cuBLAS on block-scaled operands, and on their values in bf16."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.common.mx import dequantized
from .inputs import Inputs, kept


@kept
def _widened(codes: Tensor, scale: Tensor) -> Tensor:
    return dequantized(codes, scale).bfloat16()


def cublas(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, bias: Tensor | None, **unused: Any) -> Tensor:
    return F.linear(_widened(a, scale_a), _widened(b, scale_b), bias)


@kept
def _in_blocks(scale: Tensor) -> Tensor:
    """Scales in the order that cuBLAS takes: blocks of 128 rows and 4 groups, of which rows 32
    apart are neighbours.
    """
    bits = scale.view(torch.uint8)
    rows, groups = bits.shape
    blocks: Tensor = F.pad(bits, (0, -groups % 4, 0, -rows % 128)).unflatten(0, (-1, 4, 32)).unflatten(-1, (-1, 4))
    return blocks.permute(0, 3, 2, 1, 4).contiguous().view(scale.dtype).flatten()


@kept
def _pairs(codes: Tensor) -> Tensor:
    return codes.clone().view(torch.float4_e2m1fn_x2)


def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, bias: Tensor | None, **unused: Any) -> Tensor:
    x, w = (_pairs(codes) if codes.dtype is torch.uint8 else codes for codes in (a, b))
    return torch._scaled_mm(x, w.t(), _in_blocks(scale_a), _in_blocks(scale_b), bias=bias, out_dtype=torch.bfloat16)


def plain(inputs: Inputs) -> bool:
    return inputs["out_dtype"] is torch.bfloat16 and inputs["out_scale"] is None


def block_scaled(inputs: Inputs) -> bool:
    """cuBLAS has mxfp8 and nvfp4, on Blackwell."""
    of_formats = inputs["a"].dtype is not torch.uint8 or inputs["scale_a"].dtype is torch.float8_e4m3fn
    return plain(inputs) and of_formats and torch.cuda.get_device_capability()[0] >= 10
