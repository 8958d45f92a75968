"""Rotary position embedding, in place: each pair (a, b) of the first rotary_dim elements of a head
becomes (a cos - b sin, b cos + a sin).

    half-split (Llama):           pair j is (x[j], x[j + rotary_dim / 2])
    interleaved (GPT-J, DeepSeek): pair j is (x[2 j], x[2 j + 1])

Source    Su et al. 2021, arXiv:2104.09864, eq. 34.
Numerics  fp32 from load to store, rounded once. From positions: the angle position * inv_freq, its
          cosine and sine in fp32, times `scaling`.
Bound     Memory: the rotated part of q and k read and written once.
"""

from typing import Optional

import torch
from torch import Tensor

from ...launch import FLOATS, Device, argument_error, check_apart, check_bools, check_finite, check_tensor, check_writable, torch_op
from .decision import CHOICES as CHOICES, Config as Config, Problem as Problem, plan as plan, space as space


def reference(
    q: Tensor,
    k: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    positions: Tensor | None = None,
    inv_freq: Tensor | None = None,
    scaling: float = 1.0,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """The definition, not in place."""
    if positions is not None and inv_freq is not None:
        angle = positions[..., None].to(inv_freq.dtype) * inv_freq
        cos, sin = angle.cos() * scaling, angle.sin() * scaling
    if cos is None or sin is None:
        raise argument_error("the angles", "cos and sin, or positions and inv_freq", "neither")
    c, s = cos[:, None], sin[:, None]
    half = c.shape[-1]

    def rotated(x: Tensor) -> Tensor:
        part = x[..., : 2 * half]
        a, b = part.unflatten(-1, (half, 2)).unbind(-1) if interleaved else part.chunk(2, -1)
        pair = (a * c - b * s).to(x.dtype), (b * c + a * s).to(x.dtype)
        return torch.cat((torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1), x[..., 2 * half :]), -1)

    return rotated(q), rotated(k)


DECISION = CHOICES.decision(Problem, plan, ("q", "k", "cos", "sin", "positions", "inv_freq", "scaling"))


@torch_op(mutates=("q", "k"))
def rope_out(
    q: Tensor,
    k: Tensor,
    cos: Optional[Tensor],
    sin: Optional[Tensor],
    positions: Optional[Tensor],
    inv_freq: Optional[Tensor],
    scaling: float,
    interleaved: bool,
) -> None:
    """`rope`, into q and k themselves. No checks, no sync: safe under graph capture."""
    batch, q_heads, seq_len, head_dim = q.shape
    launches = DECISION.launches(
        Device.of(q),
        batch=batch,
        q_heads=q_heads,
        kv_heads=k.shape[1],
        seq_len=seq_len,
        head_dim=head_dim,
        dtype=q.dtype,
        rotary_dim=2 * (inv_freq if cos is None else cos).shape[-1],  # type: ignore[union-attr]
        heads_inside=seq_len == 1 or q.stride(1) < q.stride(2),
        interleaved=interleaved,
        from_positions=cos is None,
    )
    launches.run(q, k, cos, sin, positions, inv_freq, scaling)


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    positions: Tensor | None = None,
    inv_freq: Tensor | None = None,
    scaling: float = 1.0,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotates q and k in place, in one launch, with cos and sin or with positions and inverse
    frequencies.

    Args:
        q: [batch, q_heads, seq_len, head_dim]; bf16, fp16 or fp32; any strides with 1 in the last
            axis. Overwritten.
        k: [batch, kv_heads, seq_len, head_dim], dtype and device of q, likewise. Overwritten; no
            element in common with q.
        cos, sin: [1 or batch, seq_len, rotary_dim / 2], dtype of q or fp32. Elements of a head from
            rotary_dim on stay as they are.
        positions: [1 or batch, seq_len], int32 or int64.
        inv_freq: [rotary_dim / 2], fp32: radians per position.
        scaling: factor of cosine and sine (transformers' attention_scaling). Only with positions,
            because cos and sin already contain it.
        interleaved: a pair is two neighbours instead of one element of each half.
    Returns: (q, k), the same tensors.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_bools(interleaved=interleaved)
    check_tensor(q, "q", ndim=4, dtypes=FLOATS)
    check_tensor(k, "k", ndim=4, like=q)
    batch, q_heads, seq_len, head_dim = q.shape
    k_batch, kv_heads, k_len, k_dim = k.shape
    if k_batch != batch or k_len != seq_len or k_dim != head_dim:
        raise argument_error("k.shape", f"({batch}, kv_heads, {seq_len}, {head_dim})", tuple(k.shape))
    if not q_heads or not kv_heads:
        raise argument_error("k.shape[1]" if q_heads else "q.shape[1]", "at least 1", 0)
    check_writable(q, "q")
    check_writable(k, "k", q, "q")
    check_finite(scaling, "scaling")
    if cos is not None and sin is not None and positions is None and inv_freq is None:
        _check_angles(q, cos, sin)
        if scaling != 1.0:
            raise argument_error("scaling", "1.0 with cos and sin, which contain it", scaling)
    elif positions is not None and inv_freq is not None and cos is None and sin is None:
        _check_positions(q, positions, inv_freq)
    else:
        given = [name for name, x in (("cos", cos), ("sin", sin), ("positions", positions), ("inv_freq", inv_freq)) if x is not None]
        raise argument_error("the angles", "cos and sin, or positions and inv_freq", ", ".join(given) or "neither")
    check_apart({"q": q, "k": k}, cos=cos, sin=sin, positions=positions, inv_freq=inv_freq)
    if q.numel():
        rope_out(q, k, cos, sin, positions, inv_freq, scaling, interleaved)
    return q, k


def _check_angles(q: Tensor, cos: Tensor, sin: Tensor) -> None:
    batch, _, seq_len, head_dim = q.shape
    check_tensor(cos, "cos", ndim=3, dtypes=(q.dtype, torch.float32), like=q)
    count, length, half = cos.shape
    if count not in (1, batch) or length != seq_len or not 0 < 2 * half <= head_dim:
        batches = f"1 or {batch}" if batch > 1 else "1"
        whole = ": transformers gives each angle twice, so pass the first half of the last axis" if half == head_dim else ""
        raise argument_error("cos.shape", f"({batches}, {seq_len}, 1 to {head_dim // 2})", f"{tuple(cos.shape)}{whole}")
    check_tensor(sin, "sin", shape=cos.shape, like=cos)


def _check_positions(q: Tensor, positions: Tensor, inv_freq: Tensor) -> None:
    batch, _, seq_len, head_dim = q.shape
    check_tensor(positions, "positions", ndim=2, dtypes=(torch.int32, torch.int64), like=q)
    if positions.shape[0] not in (1, batch) or positions.shape[1] != seq_len:
        raise argument_error("positions.shape", f"(1 or {batch}, {seq_len})", tuple(positions.shape))
    check_tensor(inv_freq, "inv_freq", ndim=1, dtypes=(torch.float32,), like=q)
    if not 0 < 2 * inv_freq.shape[0] <= head_dim:
        raise argument_error("inv_freq.shape", f"(1 to {head_dim // 2},)", tuple(inv_freq.shape))
