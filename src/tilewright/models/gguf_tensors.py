"""GGUF's blocks as `QuantizedWeight`s: the same codes, packed anew.

    kind    block   weight                       stored as
    Q4_0    32      d (q - 8)                    int4-32, scales fp16
    Q8_0    32      d q                          int8-32
    Q4_K    256     d s q - e m, 32 each         int4-32-zeros, scales fp16
    Q6_K    256     d s (q - 32), 16 each        int8-16

d and e are fp16, and s and m numbers of 6 or 8 bits. The codes are GGUF's own. So are the scales of
Q4_0 and Q8_0. Those of the others, d s, are rounded once to fp16, and the minimum of Q4_K becomes a
zero point, e m / (d s), in fp16 too: with 11 significant bits it is off by 2**-9 of a step at most.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ..ops.common.weight_formats import QuantizedWeight

KEPT = ("Q4_0", "Q8_0", "Q4_K", "Q6_K")


def from_gguf(stored: Tensor, kind: str) -> QuantizedWeight:
    """Args: stored uint8 [n, bytes of a row], kind of `KEPT`."""
    return _READERS[kind](stored)


def _blocks(stored: Tensor, *sizes: int) -> tuple[Tensor, ...]:
    """The parts of each block, so many bytes long: [n, blocks, size]."""
    parts: tuple[Tensor, ...] = stored.unflatten(1, (-1, sum(sizes))).split(sizes, 2)
    return parts


def _half(two_bytes: Tensor) -> Tensor:
    return two_bytes.contiguous().view(torch.float16)[..., 0].float()


def _packed(codes: Tensor, scales: Tensor, zeros: Tensor | None = None, *, weight_format: str) -> QuantizedWeight:
    """Codes [n, ...], scales and zero points [n, groups]."""
    if zeros is not None:  # of weights far from 0 in a group, which no quantiser writes, bf16
        small = float(zeros.abs().max()) <= torch.finfo(torch.float16).max
        zeros = zeros.T.to(torch.float16 if small else torch.bfloat16).contiguous()
    return QuantizedWeight.packed(codes.flatten(1), scales.T.to(torch.float16).contiguous(), zeros, weight_format=weight_format)


def _q4_0(stored: Tensor) -> QuantizedWeight:
    d, q = _blocks(stored, 2, 16)
    return _packed(torch.cat((q & 15, q >> 4), 2), _half(d), weight_format="int4-32")


def _q8_0(stored: Tensor) -> QuantizedWeight:
    d, q = _blocks(stored, 2, 32)
    return _packed(q ^ 0x80, _half(d), weight_format="int8-32")  # of two's complement: the number + 128


def _q4_k(stored: Tensor) -> QuantizedWeight:
    d, e, six, q = _blocks(stored, 2, 2, 12, 128)
    first, second, high = six.split(4, 2)
    s = torch.cat((first & 63, high & 15 | first >> 6 << 4), 2)
    m = torch.cat((second & 63, high >> 4 | second >> 6 << 4), 2)
    q = q.unflatten(2, (4, 32))
    codes = torch.stack((q & 15, q >> 4), 3).flatten(2, 4).unflatten(2, (8, 32))
    scale, least = (_half(d)[..., None] * s).half().float(), _half(e)[..., None] * m
    # Where all steps are 0, the weights are -least: codes 0, zero point 1.
    flat = scale == 0
    codes, scale = codes.masked_fill(flat[..., None], 0), torch.where(flat, least, scale)
    zeros = torch.where(scale == 0, 0.0, least / scale)
    return _packed(codes, scale.flatten(1), zeros.flatten(1), weight_format="int4-32-zeros")


def _q6_k(stored: Tensor) -> QuantizedWeight:
    low, high, s, d = _blocks(stored, 128, 64, 16, 2)
    low, high = low.unflatten(2, (2, 2, 32)), high.unflatten(2, (2, 1, 32))
    four = torch.cat((low & 15, low >> 4), 3)  # [n, blocks, 2, 4, 32]
    two = torch.cat([high >> shift & 3 for shift in (0, 2, 4, 6)], 3)
    codes = (four | two << 4) + (128 - 32)
    scale = _half(d)[..., None] * s.contiguous().view(torch.int8).float()
    return _packed(codes, scale.flatten(1), weight_format="int8-16")


_READERS: dict[str, Callable[[Tensor], QuantizedWeight]] = {"Q4_0": _q4_0, "Q8_0": _q8_0, "Q4_K": _q4_k, "Q6_K": _q6_k}
