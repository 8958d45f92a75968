"""RMSNorm, the router's product and the choice of experts in one launch, for one token or a few.

    h = rms_norm(x + residual)
    logits = h @ router.T + router_bias
    weights, ids = moe_route(logits)

A token's experts are dealt to several blocks, each of which norms the token for itself. The block
that finishes last, by a counter, finds all logits and chooses.

Source    rms_norm (arXiv:1910.07467, eq. 4) and moe_route (Shazeer et al. 2017, arXiv:1701.06538).
Numerics  fp32 but for what is rounded to the dtype: x + residual, which is normalised, and h, which
          the router reads. Logits are not rounded. Of equal scores the expert with the lower index
          comes first. Each logit is one block's, so equal calls give equal bits.
Bound     Latency: the router's weights are a few hundred kilobytes.
"""

from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from ...launch import HALVES, Device, argument_error, check_bools, check_finite, check_positive, check_tensor, each_out, out_or_new, torch_op
from .. import rms_norm
from ..common.routing import MOST_EXPERTS, check_routing, routed, scores_of
from .decision import CHOICES as CHOICES, Config as Config, Problem as Problem, plan as plan, space as space

MOST_TOKENS = 65535  # of a grid's second axis


def reference(
    x: Tensor,
    weight: Tensor,
    router: Tensor,
    top_k: int,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    residual: Tensor | None = None,
    router_bias: Tensor | None = None,
    sigmoid: bool = False,
    bias: Tensor | None = None,
    normalize: bool = True,
    scale: float = 1.0,
    groups: int = 0,
    top_groups: int = 0,
    first_expert: int = 0,
) -> tuple[Tensor, ...]:
    """The definition, at least in fp32 between the roundings that it has."""
    found = rms_norm.reference(x, weight, eps, weight_offset=weight_offset, round_before_weight=round_before_weight, residual=residual)
    normed, *total = found if isinstance(found, tuple) else (found,)
    logits = _logits(normed, router, router_bias, torch.promote_types(x.dtype, torch.float32))
    weights, ids = routed(logits, top_k, sigmoid=sigmoid, bias=bias, normalize=normalize, scale=scale, groups=groups, top_groups=top_groups)
    return weights, ids - first_expert, normed, *total


def _logits(normed: Tensor, router: Tensor, router_bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return F.linear(normed.to(dtype), router.to(dtype), None if router_bias is None else router_bias.to(dtype))


def comparable(
    result: tuple[Tensor, ...],
    router: Tensor,
    *,
    router_bias: Tensor | None = None,
    sigmoid: bool = False,
    bias: Tensor | None = None,
    first_expert: int = 0,
    **inputs: Any,
) -> tuple[Tensor, ...]:
    """The weights, and what the experts were chosen by: indices themselves have no distance."""
    weights, ids, *rest = result
    chosen_by = scores_of(_logits(rest[0], router, router_bias, torch.float64), sigmoid, bias)[1]
    return weights, chosen_by.gather(-1, ids.long() + first_expert).to(weights.dtype), *rest


_ARRAYS = ("x", "residual", "weight", "router", "router_bias", "bias", "arrived", "out", "new_residual", "weights", "ids")
_ARGUMENTS = (*_ARRAYS, "eps", "weight_offset", "scale", "first_expert")
DECISION = CHOICES.decision(Problem, plan, _ARGUMENTS)


@torch_op(mutates=("arrived", "weights", "ids", "out", "new_residual"))
def rms_norm_route_out(
    x: Tensor,
    weight: Tensor,
    router: Tensor,
    arrived: Tensor,
    router_bias: Optional[Tensor],
    bias: Optional[Tensor],
    residual: Optional[Tensor],
    eps: float,
    weight_offset: float,
    round_before_weight: bool,
    sigmoid: bool,
    normalize: bool,
    scale: float,
    groups: int,
    top_groups: int,
    first_expert: int,
    weights: Tensor,
    ids: Tensor,
    out: Tensor,
    new_residual: Optional[Tensor],
) -> None:
    """`rms_norm_route` into weights, ids, out and, with a residual, new_residual. No checks, no
    sync: safe under graph capture.

    arrived: int32 [tokens], zeros, and zeros again when it is done: no two calls at the same time
        may share it.
    """
    (tokens, k), experts = x.shape, router.shape[0]
    launches = DECISION.launches(
        Device.of(x),
        tokens=tokens,
        experts=experts,
        k=k,
        top_k=ids.shape[1],
        dtype=x.dtype,
        residual=residual is not None,
        round_before_weight=round_before_weight,
        sigmoid=sigmoid,
        bias=bias is not None,
        normalize=normalize,
        groups=groups,
        top_groups=top_groups,
        router_bias=router_bias is not None,
    )
    bias = None if bias is None else bias.view(groups or 1, -1)
    options = (eps, weight_offset, scale, first_expert)
    launches.run(x, residual, weight, router, router_bias, bias, arrived, out, new_residual, weights, ids, *options)


def rms_norm_route(
    x: Tensor,
    weight: Tensor,
    router: Tensor,
    top_k: int,
    *,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    residual: Tensor | None = None,
    router_bias: Tensor | None = None,
    sigmoid: bool = False,
    bias: Tensor | None = None,
    normalize: bool = True,
    scale: float = 1.0,
    groups: int = 0,
    top_groups: int = 0,
    first_expert: int = 0,
    out: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Applies RMSNorm to each token and chooses its experts, in one launch.

    For many tokens `rms_norm`, `matmul` and `moe_route` are faster.

    Args:
        x: [tokens, k]; bf16 or fp16; at most 65535 tokens; stride 1 in the last axis.
        weight: [k], the norm's; dtype and device of x.
        router: [experts, k], likewise; at most 1024 experts.
        top_k: experts of a token, 1 to 64.
        eps: positive; added to mean(x**2).
        weight_offset: added to the norm's weight; 1.0 for Gemma.
        round_before_weight: also round to the dtype before the norm's weight, as Hugging Face's
            Llama does.
        residual: shape, dtype and device of x; x + residual is normalised.
        router_bias: [experts], dtype and device of x; added to the logits.
        sigmoid, bias, normalize, scale, groups, top_groups, first_expert: as in `moe_route`.
        out: where the result goes: (weights, ids, normed rows), contiguous, no element in common
            with an input or each other; default new tensors.
    Returns: (weights fp32 [tokens, top_k], ids int32 [tokens, top_k], the normed rows [tokens, k])
        and, with a residual, x + residual; the first two as `moe_route` returns them. Empty without
        tokens, with nothing launched.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_bools(round_before_weight=round_before_weight, sigmoid=sigmoid, normalize=normalize)
    check_tensor(x, "x", ndim=2, dtypes=HALVES)
    tokens, k = x.shape
    if k == 0:
        raise argument_error("x.shape[1]", "at least 1", 0)
    if tokens > MOST_TOKENS:
        raise argument_error("x.shape[0]", f"at most {MOST_TOKENS} tokens (of more: rms_norm, matmul, moe_route)", tokens)
    check_tensor(weight, "weight", shape=(k,), like=x)
    check_positive(eps, "eps")
    check_finite(weight_offset, "weight_offset")
    check_tensor(router, "router", ndim=2, like=x)
    experts = router.shape[0]
    if not 1 <= experts <= MOST_EXPERTS:
        raise argument_error("router.shape[0]", f"1 to {MOST_EXPERTS}, the number of experts", experts)
    if router.shape[1] != k:
        raise argument_error("router.shape[1]", f"{k}, the k of x", router.shape[1])
    check_routing(experts, top_k, groups, top_groups, first_expert)
    check_finite(scale, "scale")
    if residual is not None:
        check_tensor(residual, "residual", shape=x.shape, like=x)
    if router_bias is not None:
        check_tensor(router_bias, "router_bias", shape=(experts,), like=x)
    if bias is not None:
        check_tensor(bias, "bias", shape=(experts,), dtypes=(torch.float32,), contiguous=True, like=x)
    weights, ids, y = each_out(out, "weights", "ids", "normed rows")
    inputs = (x, weight, router, residual, router_bias, bias)
    weights = out_or_new(weights, (tokens, top_k), torch.float32, *inputs, name="out[0]")
    ids = out_or_new(ids, (tokens, top_k), torch.int32, *inputs, weights, name="out[1]")
    y = out_or_new(y, (tokens, k), x.dtype, *inputs, weights, ids, name="out[2]")
    total = None if residual is None else torch.empty_like(y)
    if tokens:
        arrived = torch.zeros(tokens, dtype=torch.int32, device=x.device)
        norm = (eps, weight_offset, round_before_weight)
        choice = (sigmoid, normalize, scale, groups, top_groups, first_expert)
        rms_norm_route_out(x, weight, router, arrived, router_bias, bias, residual, *norm, *choice, weights, ids, y, total)
    return (weights, ids, y) if total is None else (weights, ids, y, total)
