"""Peers of mixtures of experts: functions of the same keyword arguments as the op."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .inputs import Inputs, Result


def moe_route(
    logits: Tensor,
    top_k: int,
    *,
    sigmoid: bool = False,
    bias: Tensor | None = None,
    normalize: bool = True,
    scale: float = 1.0,
    groups: int = 0,
    top_groups: int = 0,
    first_expert: int = 0,
) -> Result:
    """As transformers' models compose it."""
    scores = logits.float().sigmoid() if sigmoid else logits.float().softmax(-1)
    chosen_by = scores if bias is None else scores + bias
    if groups:
        each = chosen_by.unflatten(-1, (groups, -1))
        best = each.amax(-1) if bias is None else each.topk(2, -1).values.sum(-1)
        kept = torch.zeros_like(best).scatter_(-1, best.topk(top_groups, -1, sorted=False).indices, 1.0)
        chosen_by = each.masked_fill(kept[..., None] == 0, 0.0).flatten(-2)
    ids = chosen_by.topk(top_k, -1).indices
    weights = scores.gather(-1, ids)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, ids.int() - first_expert


def rms_norm_route(
    x: Tensor,
    weight: Tensor,
    router: Tensor,
    top_k: int,
    *,
    eps: float = 1e-6,
    round_before_weight: bool = False,
    residual: Tensor | None = None,
    router_bias: Tensor | None = None,
    **choice: Any,
) -> Result:
    if residual is not None:
        x = residual = x + residual
    h = F.rms_norm(x, weight.shape, weight, eps)
    return *moe_route(F.linear(h.float(), router.float(), None if router_bias is None else router_bias.float()), top_k, **choice), h, residual


def _expert_act(both: Tensor, alpha: float, limit: float | None, up_offset: float) -> Tensor:
    gate, up = both.chunk(2, -1)
    if (alpha, limit, up_offset) == (1.0, None, 0.0):
        return F.silu(gate) * up
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + up_offset)


def moe(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    grouped: bool,
    weights: Tensor,
    ids: Tensor,
    alpha: float,
    limit: float | None,
    up_offset: float,
    bias_gate_up: Tensor | None = None,
    bias_down: Tensor | None = None,
    **unused: Any,
) -> Tensor:
    """As transformers' experts with grouped products: rows sorted by expert, and
    put back in the order of the tokens. Or with batched products of the chosen weights, copied
    for each token.
    """
    experts, factors = ids.reshape(-1), weights.reshape(-1, 1)
    if not grouped:
        rows = x.repeat_interleave(ids.shape[1], 0)
    else:
        order = experts.argsort()
        experts, factors, rows = experts[order], factors[order], x[order // ids.shape[1]]
        ends = torch.histc(experts.float(), bins=len(down), min=0, max=len(down) - 1).cumsum(0, dtype=torch.int32)

    def product(rows: Tensor, matrices: Tensor, bias: Tensor | None) -> Tensor:
        out = torch._grouped_mm(rows, matrices.mT, offs=ends) if grouped else torch.bmm(matrices[experts], rows[..., None])[..., 0]
        return out if bias is None else out + bias[experts]

    y = product(_expert_act(product(rows, gate_up, bias_gate_up), alpha, limit, up_offset), down, bias_down)
    y = y * factors
    return (y[order.argsort()] if grouped else y).view(*ids.shape, -1).sum(1).to(x.dtype)


def plain_moe(inputs: Inputs) -> bool:
    plain = inputs["scale_down"] is None and inputs.get("shared_down") is None
    return plain and inputs["x"].dtype is torch.bfloat16 and all(n % 8 == 0 for n in inputs["down"].shape[1:])
