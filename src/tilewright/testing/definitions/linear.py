"""What the ops of linear attention mean."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .rows import Results, activated, defines, normed, wide


def each_sequence(cu_seqlens: Tensor) -> list[slice]:
    starts = cu_seqlens.tolist()
    return [slice(a, b) for a, b in pairwise(starts)]


def decayed(x: Tensor, dtype: torch.dtype, rounding: int) -> Tensor:
    """An operand that is rounded with a decay in it, from 1/2 to 1 and drawn for each element: of
    few different numbers all may be exact by chance, and stay so without one.

    rounding: which draw.
    """
    decay = 0.5 + 0.5 * torch.rand(x.shape, generator=torch.Generator().manual_seed(rounding), dtype=torch.float64)
    decay = decay.to(x.device, x.dtype)
    return wide((x * decay).to(dtype)) / decay


@defines
def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, beta: Tensor, state: Any = None, cu_seqlens: Any = None, rounding: int = 0, **options: Any
) -> Results:
    """A state as a matrix that each token multiplies: S <- (I - beta k k^T) exp(g) S + beta k v^T,
    out = S^T q; in 16 bits of operands that are rounded, as tensor cores take them.
    """
    if cu_seqlens is not None:
        parts, states = [], []
        for i, rows in enumerate(each_sequence(cu_seqlens)):
            one = [x[rows].transpose(0, 1)[None] for x in (q, k, v, g, beta)]
            own = None if state is None else state[i : i + 1]
            found = gated_delta_rule(*one[:4], beta=one[4], state=own, rounding=rounding, **options)
            parts.append(found[0][0].transpose(0, 1))
            states += [found[1][0]] if state is not None else []
        return [torch.cat(parts), *([torch.stack(states)] if state is not None else [])]
    group, dim = v.shape[1] // k.shape[1], q.shape[-1]

    def length_one(x: Tensor) -> Tensor:
        x = wide(x)
        return wide((x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).to(q.dtype)) if options.get("normalize", True) else x

    q1, k1 = (length_one(x).repeat_interleave(group, 1) for x in (q, k))
    if g.dim() == k.dim():
        q1, k1 = decayed(q1, q.dtype, rounding), decayed(k1, q.dtype, rounding)
    s = torch.zeros(*v.shape[:2], dim, v.shape[-1], dtype=q1.dtype, device=q.device) if state is None else state.to(q1.dtype)
    read = []
    for t in range(v.shape[2]):
        s = s * torch.exp(wide(g)[:, :, t].reshape(*v.shape[:2], -1, 1))  # of the head, or of each row
        key, held = k1[..., t, :, None], wide(s.to(q.dtype))
        write = wide(beta)[..., t, None, None] * (wide(v)[..., t, None, :] - key.mT @ held)
        s = s + key @ decayed(write, q.dtype, rounding)
        read.append((q1[..., t, None, :] @ wide(s.to(q.dtype)))[..., 0, :])
    scale = dim**-0.5 if options.get("scale") is None else options["scale"]
    out = (torch.stack(read, 2) * scale).to(v.dtype) if read else torch.empty_like(v)
    return [out, *([s] if state is not None else [])]


@defines
def ssd(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, *, c: Tensor, state: Any = None, state_rows: Any = None, rounding: int = 0, **options: Any
) -> Results:
    """A recurrence over the state as a matrix; in 16 bits of operands that are rounded."""
    cu_seqlens, z = options.pop("cu_seqlens", None), options.pop("z", None)
    if cu_seqlens is not None or state_rows is not None:
        pieces, states = [], [] if state is None else [*wide(state)]
        for i, rows in enumerate(each_sequence(cu_seqlens) if cu_seqlens is not None else [slice(i, i + 1) for i in range(len(x))]):
            one: list[Any] = [None if y is None else y[rows] if cu_seqlens is None else y[rows][None] for y in (x, dt, b, c, z)]
            at = i if state_rows is None else int(state_rows[i])
            own = states[at][None] if states else None
            found = ssd(one[0], one[1], a, one[2], c=one[3], z=one[4], state=own, rounding=rounding, **options)
            pieces.append(found[0] if cu_seqlens is None else found[0][0])
            states[at : at + 1] = [found[1][0]] if states else []
        return [torch.cat(pieces), *([torch.stack(states)] if states else [])]
    step, group = wide(dt), x.shape[2] // b.shape[2]
    step = step if options.get("dt_bias") is None else step + wide(options["dt_bias"])
    step = torch.logaddexp(step, torch.zeros_like(step)) if options.get("dt_softplus") else step
    step = step.clamp(*options.get("dt_limit", (0.0, None)))
    s = torch.zeros(len(x), *x.shape[2:], b.shape[-1], dtype=step.dtype, device=x.device) if state is None else state.to(step.dtype)
    read = []
    for t in range(x.shape[1]):
        write, seen = (wide(y)[:, t].repeat_interleave(group, 1) for y in (b, c))
        new = decayed(step[:, t, :, None] * wide(x)[:, t], x.dtype, rounding)
        s = s * torch.exp(step[:, t] * wide(a))[..., None, None] + torch.einsum("bhp,bhn->bhpn", new, write)
        read.append(torch.einsum("bhpn,bhn->bhp", wide(s.to(x.dtype)), seen))
    y = torch.stack(read, 1) if read else wide(x)
    y = y if options.get("d") is None else y + wide(options["d"])[:, None] * wide(x)
    y = (y if z is None else y * activated(z, False)).to(x.dtype)
    return [y, *([s] if state is not None else [])]


@defines
def causal_conv1d(x: Tensor, weight: Tensor, bias: Any = None, *, state: Any = None, cu_seqlens: Any = None, silu: bool = True) -> Results:
    """Sums of shifted inputs."""
    if cu_seqlens is not None:
        found = [
            causal_conv1d(x[None, rows], weight, bias, state=None if state is None else state[i : i + 1], silu=silu)
            for i, rows in enumerate(each_sequence(cu_seqlens))
        ]
        return [torch.cat([one[0][0] for one in found]), *([torch.cat([one[1] for one in found])] if state is not None else [])]
    width, tokens = weight.shape[1], x.shape[1]
    zeros = torch.zeros(len(x), width, x.shape[2], dtype=x.dtype, device=x.device)
    seen = torch.cat((zeros if state is None else torch.cat((zeros, state), 1), x), 1)
    y = wide(torch.zeros_like(x))
    for back in range(width):
        y = y + wide(seen[:, seen.shape[1] - tokens - back : seen.shape[1] - back]) * wide(weight[:, width - 1 - back])
    y = (y if bias is None else y + wide(bias)).to(x.dtype)
    y = activated(y, False).to(x.dtype) if silu else y
    return [y, *([seen[:, seen.shape[1] - state.shape[1] :].clone()] if state is not None else [])]


@defines
def rms_norm_gated(x: Tensor, weight: Tensor, gate: Tensor, eps: float, groups: int = 1, gate_first: bool = False, sigmoid: bool = False) -> Results:
    gate = 1 / (1 + (-wide(gate)).exp()) if sigmoid else activated(gate, False)
    parts = (wide(x) * gate if gate_first else wide(x)).view(*x.shape[:-1], groups, -1)
    y = weight * normed(parts, None, eps).view_as(x).to(x.dtype)
    return [y if gate_first else (wide(y) * gate).to(x.dtype)]
