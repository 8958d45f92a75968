"""Which tensors of other engines' plugins our RMSNorm takes."""

from torch import Tensor

from ..ops.rms_norm import DTYPES


def norm_takes(x: Tensor, weight: Tensor) -> bool:
    return x.dtype in DTYPES and x.dtype == weight.dtype and x.stride(-1) == 1 and weight.is_contiguous()
