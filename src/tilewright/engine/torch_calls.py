"""Calls of a step that PyTorch computes: each is small, and writes into a buffer of the step."""

import torch
from torch import Tensor


def gather(pages: Tensor, table: Tensor, out: Tensor) -> None:
    if out.dtype.itemsize == 1:
        pages, out = pages.view(torch.uint8), out.view(torch.uint8)
    torch.index_select(pages, out.dim() - 3, table.reshape(-1), out=out)


def dequantize(codes: Tensor, scale: Tensor, out: Tensor) -> None:
    torch.mul(codes.to(out.dtype), scale, out=out)  # codes are exact in 16 bits; the product is rounded once


def add(x: Tensor, y: Tensor, out: Tensor) -> None:
    torch.add(x, y, out=out)


def scale(x: Tensor, factor: float, out: Tensor) -> None:
    torch.mul(x, factor, out=out)


def scale_columns(x: Tensor, factors: Tensor) -> None:
    x.mul_(factors)


def mix(x: Tensor, share: float, y: Tensor, other: float) -> None:
    """share * x + other * y into x."""
    x.mul_(share).add_(y, alpha=other)


def blank(rows: Tensor, positions: Tensor) -> None:
    """Zeros for the rows of padding, which have no position."""
    rows.masked_fill_(positions.view(-1, 1) < 0, 0)


def relu(x: Tensor) -> None:
    torch.relu_(x)


def gelu(x: Tensor) -> None:
    torch.ops.aten.gelu_(x)


def gelu_tanh(x: Tensor) -> None:
    torch.ops.aten.gelu_(x, approximate="tanh")


def softcap(logits: Tensor, most: float) -> None:
    logits.div_(most).tanh_().mul_(most)


def count(counts: Tensor, tokens: Tensor) -> None:
    """One more of each row's token."""
    counts.scatter_add_(1, tokens[:, None], torch.ones_like(tokens, dtype=torch.int32)[:, None])
