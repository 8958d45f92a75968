"""Which tensors of other engines' plugins our RMSNorm takes."""

from torch import Tensor

from ..launch import FLOATS


def norm_takes(x: Tensor, weight: Tensor) -> bool:
    return x.dtype in FLOATS and x.dtype == weight.dtype and x.stride(-1) == 1 and weight.is_contiguous()
