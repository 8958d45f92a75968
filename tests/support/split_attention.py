"""`attend_splits` beside the ops that it replaces, on any device."""

import math
from contextlib import nullcontext
from typing import Any

import torch

from tilewright import attention_decode, interpret, kv_append
from tilewright.engine.attend_splits import Form, attend_splits
from tilewright.ops import attention_decode as decode
from tilewright.testing import assert_accurate

CPU = torch.device("cpu")
KEYS = 512  # of the caches


def heads_of(rows: torch.Tensor, dim: int, *counts: int) -> list[torch.Tensor]:
    """[shares, columns] as [shares, heads, 1, dim] of each part."""
    return [x.unflatten(1, (-1, dim))[:, :, None] for x in rows.split([count * dim for count in counts], 1)]


def compared(heads: int, kv_heads: int, dim: int, position: int, form: Form, keys: int = KEYS, device: torch.device = CPU, **options: Any) -> None:
    """Its result is as accurate as the ops' and its cache the same. Nothing behind the last key is
    a number, and no block reads what another one writes.
    """
    torch.manual_seed(position)

    def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=device)

    norms, sinks, window = (options.get(name) for name in ("norms", "sinks", "window"))
    rows = randn(1, (heads + 2 * kv_heads) * dim)
    if "shares" in options:
        rows = randn(options["shares"], rows.shape[1], dtype=torch.float32)
    caches = [randn(1, kv_heads, keys + 64, dim)[:, :, :keys] for _ in range(2)]
    for cache in caches:
        cache[:, :, position:] = math.nan
    cos, sin = torch.rand(2, keys, dim // 2, device=device)
    weights = (randn(dim), randn(dim)) if norms else (None, None)
    sink = randn(heads, dtype=torch.float32) if sinks else None
    places, rotation = torch.tensor([[position]], dtype=torch.int32, device=device), {"cos": cos, "sin": sin}
    wanted, found = ([x.clone() for x in caches] for _ in range(2))
    q, k, v = heads_of(rows.sum(0, keepdim=True).bfloat16(), dim, heads, kv_heads, kv_heads)
    kv_append(k, v, *wanted, positions=places, q=q, **rotation, q_norm=weights[0], k_norm=weights[1], eps=1e-6)
    how = {"scale": 0.1, "window": window, "sinks": sink}
    out, before = randn(1, heads, 1, dim).fill_(math.nan), rows.clone()
    raw = heads_of(rows, dim, heads, kv_heads, kv_heads)
    with interpret.checking(races=True) if device.type == "cpu" else nullcontext():
        attend_splits(*raw, *found, places, cos, sin, *weights, sink, out, window, 0.1, 1e-6, False, form)
    assert torch.equal(rows, before)
    assert all(torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0)) for a, b in zip(found, wanted, strict=True))
    held = [x[:, :, : position + 1] for x in wanted]
    plain, truth = (decode.reference(*(x.to(dtype) for x in (q, *held)), None, **how) for dtype in (torch.bfloat16, torch.float64))
    assert_accurate(out, plain, truth)
    theirs = attention_decode(q, *wanted, kv_len=places[0] + 1, **how)
    assert torch.allclose(out.float(), theirs.float(), atol=2**-7 * theirs.abs().max().item())
