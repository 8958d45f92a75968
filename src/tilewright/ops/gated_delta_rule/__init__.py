"""Gated delta rule (linear attention): a state per head that decays, is corrected and is read once
per token:

    S <- exp(g) S     delta = beta (v - S^T k)     S <- S + k delta^T     out = scale S^T q
    S <- diag(exp(g)) S is the first step with a gate for each column of k (Kimi Delta Attention)

with normalize, of q / |q| and k / |k|. Value head h reads query and key head
h // (v_heads // k_heads).

Source    Yang et al. 2024, arXiv:2412.06464 (gated delta rule, eq. 10; its chunked form, section
          3.3); Kimi Team 2025, arXiv:2510.26692 (a gate for each column); Bischof and Van Loan
          1987 (the product of the factors I - beta k k^T).
Numerics  The state is fp32, in and out, and so are all sums. Token after token nothing else is
          rounded but the result. Chunk after chunk (16 bits alone) the operands of products are
          rounded to the dtype: the state, what delta is made of, and the squares of a chunk, whose
          entries are at most beta. The inverse of a chunk is made of fp16 factors and fp32 sums, by
          doubling blocks: powers would lose all digits where keys are alike. A NaN or an infinity
          also reaches earlier tokens of its chunk and, behind its segment, all columns of its head.
          It may end where the gates have since taken the state below 2**-64, unless it is a gate.
Bound     Memory, for a token the state, read and written once; for long prompts of few heads the
          chain of chunks.
"""

from itertools import pairwise
from typing import Optional

import torch
from torch import Tensor

from ...launch import FLOATS, Device, argument_error, check_apart, check_bools, check_out, check_positive, check_tensor, check_writable, torch_op
from ...launch.values import Claim, Claims, rising
from ..common.softmax_tiles import MAX_HEAD_DIM, check_heads, check_starts
from .decision import CHOICES as CHOICES, Config as Config, Problem as Problem, plan as plan, space as space

EPS = 1e-6  # beside the squares of a row's length


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    beta: Tensor,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    normalize: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """The definition, not in place, token after token.

    In 16 bits what is multiplied is rounded, as tensor cores take it; the sums are not.
    """
    wide, scale = torch.promote_types(q.dtype, torch.float32), q.shape[-1] ** -0.5 if scale is None else scale
    if cu_seqlens is not None:
        starts = cu_seqlens.tolist()
        out, final = torch.zeros_like(v), None if state is None else state.clone()
        for i, (a, b) in enumerate(pairwise(starts)):
            parts = (x[a:b].transpose(0, 1)[None] for x in (q, k, v, g))
            own = None if state is None else state[i : i + 1]
            found = reference(*parts, beta=beta[a:b].transpose(0, 1)[None], state=own, scale=scale, normalize=normalize)
            if final is not None:
                final[i] = found[1][0]
            out[a:b] = (found if state is None else found[0])[0].transpose(0, 1)
        return out if final is None else (out, final)

    def operand(x: Tensor) -> Tensor:
        return x.to(q.dtype).to(wide)

    def rows(x: Tensor) -> Tensor:
        x = x.to(wide)
        x = operand(x * torch.rsqrt(x.square().sum(-1, keepdim=True) + EPS)) if normalize else x
        return x.repeat_interleave(v.shape[1] // k.shape[1], 1)

    keys, queries = rows(k), rows(q)
    shape = (*v.shape[:2], k.shape[-1], v.shape[-1])
    s = torch.zeros(shape, dtype=wide, device=v.device) if state is None else state.to(wide)
    out = torch.zeros_like(v)
    for t in range(v.shape[2]):
        s = s * (g[:, :, t, :, None] if g.dim() == k.dim() else g[:, :, t, None, None]).to(wide).exp()
        seen = (operand(s) * keys[:, :, t, :, None]).sum(-2)
        delta = operand((v[:, :, t].to(wide) - seen) * beta[:, :, t, None].to(wide))
        s = s + keys[:, :, t, :, None] * delta[:, :, None]
        out[:, :, t] = (scale * (operand(s) * queries[:, :, t, :, None]).sum(-2)).to(v.dtype)
    return out if state is None else (out, s)


DECISION = CHOICES.decision(Problem, plan, ("q", "k", "v", "g", "beta", "state", "out", "cu_seqlens", "scale", "eps"))


def _claims(q: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor | None) -> Claims:
    yield Claim("g", g, g <= 0, "at most 0")
    yield Claim("beta", beta, (beta >= 0) & (beta <= 2), "in 0..2")
    yield from rising("cu_seqlens", cu_seqlens, q.shape[0])


@torch_op(mutates=("state", "out"), claims=_claims)
def gated_delta_rule_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Optional[Tensor],
    cu_seqlens: Optional[Tensor],
    scale: float,
    normalize: bool,
    out: Tensor,
) -> None:
    """`gated_delta_rule` into `out`, and `state` in place.

    No checks, no sync: safe under graph capture.
    """
    if cu_seqlens is not None:
        q, k, v, out, g, beta = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v, out, g, beta))
    (batch, v_heads, tokens, v_dim), (k_heads, head_dim) = v.shape, (k.shape[1], k.shape[3])
    launches = DECISION.launches(
        Device.of(q),
        batch=batch if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        k_heads=k_heads,
        v_heads=v_heads,
        tokens=tokens,
        head_dim=head_dim,
        dtype=q.dtype,
        v_dim=0 if v_dim == head_dim else v_dim,
        has_state=state is not None,
        varlen=cu_seqlens is not None,
        normalize=normalize,
        channels=g.dim() == q.dim(),
    )
    launches.run(q, k, v, g, beta, state, out, cu_seqlens, scale, EPS)


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    beta: Tensor,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    normalize: bool = True,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Linear attention by the gated delta rule: a prompt, or the next tokens of each sequence.

    Args:
        q: [batch, k_heads, tokens, head_dim]; bf16, fp16 or fp32; head_dim 1..256; any strides with
            stride 1 in the last axis.
        k: shape, dtype and device of q.
        v: [batch, v_heads, tokens, v_dim], likewise; k_heads divides v_heads, v_dim 1..256.
        g: [batch, v_heads, tokens], fp32 or the dtype of q, any strides: the natural log of the
            share of the state that a token keeps, at most 0. Or [batch, v_heads, tokens, head_dim],
            stride 1 in the last axis: one for each row of the state.
        beta: [batch, v_heads, tokens], likewise: how much of the difference between v and the
            state's prediction is written, 0..1 (up to 2 with more error).
        state: [batch, v_heads, head_dim, v_dim] fp32, stride 1 in the last axis. The initial state,
            overwritten with the final one. Default: starts with zeros and is not kept.
        cu_seqlens: [sequences + 1] int32, where each sequence begins and the last one ends. With it
            q, k, v, g and beta are [total_tokens, heads, ...], and state holds one for each
            sequence.
        scale: of q; positive; default head_dim ** -0.5.
        normalize: first divide q and k by their lengths, sqrt(|x|**2 + 1e-6). Otherwise their
            lengths must be about 1.
        out: where the result goes: of its shape, dtype and device, its axes in any order in
            memory; default a new tensor.
    Returns: out [batch, v_heads, tokens, v_dim], contiguous as [batch, tokens, v_heads, v_dim]
        (with cu_seqlens as [total_tokens, v_heads, v_dim]), in the dtype of q; with a state the
        tuple (out, state), the latter the tensor that it was given.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_bools(normalize=normalize)
    varlen = cu_seqlens is not None
    token, head = (0, 1) if varlen else (2, 1)
    check_tensor(q, "q", ndim=3 if varlen else 4, dtypes=FLOATS)
    check_tensor(k, "k", shape=q.shape, like=q)
    check_tensor(v, "v", ndim=q.dim(), like=q)
    rows = [n for axis, n in enumerate(q.shape[:-1]) if axis != head]
    if [n for axis, n in enumerate(v.shape[:-1]) if axis != head] != rows:
        wanted = ", ".join(map(str, (*q.shape[:head], "v_heads", *q.shape[head + 1 : -1], "v_dim")))
        raise argument_error("v.shape", f"({wanted})", tuple(v.shape))
    check_heads(v, k, MAX_HEAD_DIM, "v")
    if not 1 <= q.shape[-1] <= MAX_HEAD_DIM:
        raise argument_error("q.shape[-1]", f"in 1..{MAX_HEAD_DIM}", q.shape[-1])
    channels = isinstance(g, Tensor) and g.dim() == q.dim()
    _check_gate(g, "g", v, (*v.shape[:-1], q.shape[-1]) if channels else v.shape[:-1])
    _check_gate(beta, "beta", v, v.shape[:-1])
    sequences = q.shape[0] if cu_seqlens is None else check_starts(cu_seqlens, "cu_seqlens", q)
    if state is not None:
        check_tensor(state, "state", shape=(sequences, v.shape[head], q.shape[-1], v.shape[-1]), dtypes=(torch.float32,), like=q)
        check_writable(state, "state")
        check_apart({"state": state}, q=q, k=k, v=v, g=g, beta=beta, cu_seqlens=cu_seqlens)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    check_positive(scale, "scale")
    if out is not None:
        check_out(out, v.shape, q.dtype, (q, k, v, g, beta, state, cu_seqlens))
    elif varlen:
        out = v.new_empty(v.shape)
    else:  # as the projection behind it reads it
        out = v.new_empty((v.shape[0], v.shape[2], v.shape[1], v.shape[3])).transpose(1, 2)
    if out.numel() and sequences and v.shape[token]:
        gated_delta_rule_out(q, k, v, g, beta, state, cu_seqlens, scale, normalize, out)
    return out if state is None else (out, state)


def _check_gate(gate: Tensor, name: str, v: Tensor, shape: tuple[int, ...]) -> None:
    """Raises TypeError or ValueError unless it has this shape; with any strides where it has a
    number for each row of v.
    """
    dtypes = tuple(dict.fromkeys((torch.float32, v.dtype)))
    check_tensor(gate, name, shape=shape, dtypes=dtypes, any_strides=len(shape) < v.dim(), like=v)
