"""How a token's experts are chosen from its logits: the definition, and the tile code that
`moe_route` and `rms_norm_route` share.
"""

import math
from typing import Any

import cuda.tile as ct
import torch
from torch import Tensor

from ...launch import argument_error, check_integers, next_pow2
from .tiles import ZERO

MOST_EXPERTS = 1024
MOST_TOP_K = 64
TINY = 2.0**-126  # the smallest normal fp32: weights of scores that all underflow stay finite
TAKEN = -(2**31)  # an order key below every other


def routed(
    logits: Tensor,
    top_k: int,
    *,
    sigmoid: bool = False,
    bias: Tensor | None = None,
    normalize: bool = True,
    scale: float = 1.0,
    groups: int = 0,
    top_groups: int = 0,
) -> tuple[Tensor, Tensor]:
    """The definition, at least in fp32."""
    scores, chosen_by = scores_of(logits, sigmoid, bias)
    if groups:
        each = chosen_by.unflatten(-1, (groups, -1))
        best = each.amax(-1) if bias is None else each.topk(min(2, each.shape[-1]), -1).values.sum(-1)
        kept = best.sort(dim=-1, descending=True, stable=True).indices[..., :top_groups]
        out = torch.ones_like(best, dtype=torch.bool).scatter(-1, kept, False)
        chosen_by = each.masked_fill(out[..., None], -torch.inf).flatten(-2)
    ids = chosen_by.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    weights = scores.gather(-1, ids)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=TINY)
    return weights * scale, ids.int()


def scores_of(logits: Tensor, sigmoid: bool, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The scores, and what the experts are chosen by."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = wide.sigmoid() if sigmoid else wide.softmax(-1)
    return scores, scores if bias is None else scores + bias.to(wide.dtype)


def check_routing(experts: int, top_k: int, groups: int, top_groups: int, first_expert: int) -> None:
    """Raises TypeError or ValueError for a choice that can't be made."""
    check_integers(top_k=top_k, groups=groups, top_groups=top_groups, first_expert=first_expert)
    if not 1 <= top_k <= min(experts, MOST_TOP_K):
        raise argument_error("top_k", f"1 to {min(experts, MOST_TOP_K)}", top_k)
    if groups < 0 or (groups and experts % groups):
        raise argument_error("groups", f"0 or a divisor of {experts}, the number of experts", groups)
    if not groups and top_groups:
        raise argument_error("top_groups", "0 without groups", top_groups)
    if groups and not 1 <= top_groups <= groups:
        raise argument_error("top_groups", f"1 to {groups}, the number of groups", top_groups)
    if groups and top_groups * (experts // groups) < top_k:
        raise argument_error("top_groups", f"enough groups of {experts // groups} experts for top_k = {top_k}", top_groups)
    if not 0 <= first_expert < experts:
        raise argument_error("first_expert", f"0 to {experts - 1}", first_expert)


def choice_of(p: Any, device: torch.device) -> dict[str, Any]:
    """The arguments of `inputs` that a Problem of either op has."""
    found = {name: getattr(p, name) for name in ("top_k", "sigmoid", "normalize", "scale", "groups", "top_groups", "first_expert")}
    return found | {"bias": 0.1 * torch.randn(p.experts, device=device) if p.bias else None}


def group_constants(p: Any) -> dict[str, Any]:
    """Constants of both kernels."""
    groups = max(1, p.groups)
    sizes = {"groups": groups, "size": p.experts // groups, "top_groups": p.top_groups or groups, "tile_g": next_pow2(groups)}
    return {"add_bias": p.bias, **sizes}


def _order_keys(values):
    """int32 that compare as the fp32 values do, NaN above all: integers have no NaN that would
    compare false with itself.
    """
    bits = ct.bitcast(ct.where(ct.isnan(values), math.nan, values + 0.0), ct.int32)  # one NaN, and no negative zero
    return ct.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def experts_and_groups(GROUPS, SIZE, TILE_G, TILE_S):
    """The lanes of a tile of all experts, GROUPS x SIZE padded to TILE_G x TILE_S: int32 [1, lanes]
    of their experts, and which are any.
    """
    group = ct.arange(TILE_G, dtype=ct.int32).reshape((1, TILE_G, 1))
    member = ct.arange(TILE_S, dtype=ct.int32).reshape((1, 1, TILE_S))
    lanes = TILE_G * TILE_S
    return (group * SIZE + member).reshape((1, lanes)), ((group < GROUPS) & (member < SIZE)).reshape((1, lanes))


def chosen_experts(x, BIAS, scale, how):
    """Weights, scaled, and ids [TILE_M, TILE_K] of logits x fp32 [TILE_M, lanes].

    BIAS: [GROUPS, SIZE], read only with ADD_BIAS.

    how: (SIGMOID, ADD_BIAS, NORMALIZE, GROUPS, SIZE, TOP_GROUPS, TOP_K, TILE_M, TILE_G, TILE_S,
        TILE_K), constants.
    """
    SIGMOID, ADD_BIAS, NORMALIZE, GROUPS, SIZE, TOP_GROUPS, TOP_K, TILE_M, TILE_G, TILE_S, TILE_K = how
    lanes = TILE_G * TILE_S
    expert, inside = experts_and_groups(GROUPS, SIZE, TILE_G, TILE_S)
    group = ct.arange(TILE_G, dtype=ct.int32).reshape((1, TILE_G, 1))
    member = ct.arange(TILE_S, dtype=ct.int32).reshape((1, 1, TILE_S))
    if SIGMOID:
        scores = 1.0 / (1.0 + ct.exp(-x))
    else:
        x = ct.where(inside, x, -math.inf)
        powers = ct.exp(x - ct.max(x, axis=1, keepdims=True, propagate_nan=True))
        scores = powers / ct.sum(powers, axis=1, keepdims=True)
    chosen_by = scores
    if ADD_BIAS:
        bias = ct.load(BIAS.slice(0, 0, GROUPS).slice(1, 0, SIZE), (0, 0), (TILE_G, TILE_S), padding_mode=ZERO, allow_tma=False)
        chosen_by = chosen_by + bias.reshape((1, lanes))
    keys = ct.where(inside, _order_keys(chosen_by), TAKEN)
    if TOP_GROUPS < GROUPS:
        each = keys.reshape((TILE_M, TILE_G, TILE_S))
        best = ct.max(each, axis=2, keepdims=True)
        if ADD_BIAS and SIZE > 1:
            values = ct.where(inside, chosen_by, -math.inf).reshape((TILE_M, TILE_G, TILE_S))
            first = ct.max(values, axis=2, keepdims=True, propagate_nan=True)
            where = ct.min(ct.where(each == best, member, SIZE), axis=2, keepdims=True)
            second = ct.max(ct.where(member == where, -math.inf, values), axis=2, keepdims=True, propagate_nan=True)
            best = ct.where(group < GROUPS, _order_keys(first + second), TAKEN)
        kept = group < 0
        for _ in ct.static_iter(range(TOP_GROUPS)):
            top = ct.max(best, axis=1, keepdims=True)
            winner = ct.min(ct.where(best == top, group, TILE_G), axis=1, keepdims=True)
            kept = kept | (group == winner)
            best = ct.where(group == winner, TAKEN, best)
        keys = ct.where(kept, each, TAKEN).reshape((TILE_M, lanes))
    column = ct.arange(TILE_K, dtype=ct.int32).reshape((1, TILE_K))
    ids = ct.zeros((TILE_M, TILE_K), ct.int32)
    weights = ct.zeros((TILE_M, TILE_K), ct.float32)
    for k in ct.static_iter(range(TOP_K)):
        top = ct.max(keys, axis=1, keepdims=True)
        winner = ct.min(ct.where(keys == top, expert, GROUPS * SIZE), axis=1, keepdims=True)
        taken = (expert == winner) & inside
        weight = ct.sum(ct.where(taken, scores, 0.0), axis=1, keepdims=True)
        keys = ct.where(taken, TAKEN, keys)
        ids = ct.where(column == k, winner, ids)
        weights = ct.where(column == k, weight, weights)
    if NORMALIZE:
        weights = weights / ct.maximum(ct.sum(weights, axis=1, keepdims=True), TINY, propagate_nan=True)
    return weights * scale, ids
