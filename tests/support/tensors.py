"""Small tensors."""

import torch


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def int32(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)
