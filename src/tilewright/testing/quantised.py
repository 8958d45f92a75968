"""How far a product of 8-bit operands is from that of the operands before they were quantised.

The accuracy rule judges ours against the dequantised operands. This is what quantising itself
costs, reported beside it.
"""

import torch
from torch import Tensor

from ..ops.matmul import matmul
from ..ops.quantize_fp8 import quantize_fp8

# One scale for the blocks of a and of b.
SCALINGS: dict[str, tuple[tuple[int | None, int | None], tuple[int | None, int | None]]] = {
    "tensor": ((None, None), (None, None)),
    "row": ((1, None), (1, None)),
    "block": ((1, 128), (128, 128)),
}


def calc_diff(x: Tensor, y: Tensor) -> float:
    """1 - 2 sum(x y) / sum(x^2 + y^2), in float64. The figure that DeepGEMM reports.

    0 for equal tensors, about half the squared relative error.
    """
    x, y = x.double(), y.double()
    return float(1 - 2 * (x * y).sum() / (x * x + y * y).sum())


def quantised_distances(device: torch.device) -> dict[str, float]:
    """calc_diff of `quantize_fp8` and `matmul` from the product in float64, by the kind of scales.

    a is [256, 1024] and b [512, 1024], bf16, normal.
    """
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(rows, 1024, generator=generator).to(device, torch.bfloat16) for rows in (256, 512))
    truth = a.double() @ b.double().T
    found = {}
    for name, (block_a, block_b) in SCALINGS.items():
        (codes_a, scale_a), (codes_b, scale_b) = quantize_fp8(a, block=block_a), quantize_fp8(b, block=block_b)
        found[name] = calc_diff(matmul(codes_a, codes_b, trans_b=True, scale_a=scale_a, scale_b=scale_b), truth)
    return found
