"""NaN where nobody should look: uninitialised outputs and the memory around inputs."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.utils.deterministic as debug_switch
from torch import Tensor

MARGIN_BYTES = 4096  # keeps the alignment that a fresh allocation has


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """Within the context torch.empty and its kin return NaN (integers: the largest value).

    It is PyTorch's own debug switch.
    """
    before = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    fill = debug_switch.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch._C._set_deterministic_algorithms(True, warn_only=True)  # the public function imports torch.compile's parts, for seconds
    debug_switch.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(before, warn_only=warn)
        debug_switch.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def embed(tensor: Tensor) -> Tensor:
    """A copy of `tensor`, same strides, within memory of NaN (integers: the smallest value)."""
    if tensor.numel() == 0:
        return tensor
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    margin = MARGIN_BYTES // tensor.element_size()
    flat = torch.empty(span + 2 * margin, dtype=tensor.dtype, device=tensor.device)
    if tensor.is_floating_point():
        flat.copy_(torch.full((), torch.nan, device=tensor.device))
    elif tensor.dtype is torch.bool:
        flat.fill_(True)
    else:
        flat.fill_(torch.iinfo(tensor.dtype).min)
    inside = flat.as_strided(tensor.shape, tensor.stride(), margin)
    inside.copy_(tensor)
    return inside
