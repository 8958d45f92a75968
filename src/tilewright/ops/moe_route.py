"""Routing of a mixture of experts: which experts each token goes to, and with what weights.

    score = softmax(logits) or sigmoid(logits)        ids = the top_k experts by score + bias        weights = scale * score[ids] / sum(score[ids])

Source    Top-k of a softmax: Shazeer et al. 2017, arXiv:1701.06538. Groups, and sigmoid scores with a bias that only selects: DeepSeek-V2 2024,
          arXiv:2405.04434, section 2.2.2, and DeepSeek-V3 2024, arXiv:2412.19437, eq. 12 to 16 (a group counts by its best expert, or with a
          bias by the sum of its two best).
Numerics  fp32 throughout. Of equal scores the expert with the lower index comes first.
Bound     Latency: a few kilobytes for each token, top_k reductions one after the other.
"""

import math
from dataclasses import dataclass
from typing import Any, Optional

import cuda.tile as ct
import torch
from torch import Tensor

from ..launch import Cost, Device, Plan, best_plan, check_tensor, launch, must, next_pow2, torch_op

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MOST_EXPERTS = 1024
MOST_TOP_K = 64
TINY = 2.0**-126  # the smallest normal fp32: weights of scores that all underflow stay finite
TAKEN = -(2**31)  # an order key below every other
ZERO = ct.PaddingMode.ZERO


def reference(
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
    scores, chosen_by = _scores(logits, sigmoid, bias)
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


def _scores(logits: Tensor, sigmoid: bool, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The scores, and what the experts are chosen by."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = wide.sigmoid() if sigmoid else wide.softmax(-1)
    return scores, scores if bias is None else scores + bias.to(wide.dtype)


def comparable(
    result: tuple[Tensor, Tensor], logits: Tensor, top_k: int, *, sigmoid: bool = False, bias: Tensor | None = None, **inputs: Any
) -> tuple[Tensor, Tensor]:
    """The weights, and what the experts were chosen by: indices themselves have no distance."""
    weights, ids = result
    return weights, _scores(logits.double(), sigmoid, bias)[1].gather(-1, ids.long()).to(weights.dtype)


@dataclass(frozen=True, slots=True)
class Problem:
    """What a plan may depend on. scale: of `inputs` alone."""

    tokens: int
    experts: int
    top_k: int
    dtype: torch.dtype = torch.float32
    sigmoid: bool = False
    bias: bool = False
    normalize: bool = True
    groups: int = 0
    top_groups: int = 0
    scale: float = 1.0

    def cost(self) -> Cost:
        return Cost(self.tokens * (self.experts * self.dtype.itemsize + 8 * self.top_k), 8 * self.tokens * self.experts)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        return {
            "logits": 2 * torch.randn(self.tokens, self.experts, dtype=self.dtype, device=device),
            "top_k": self.top_k,
            "sigmoid": self.sigmoid,
            "bias": 0.1 * torch.randn(self.experts, device=device) if self.bias else None,
            "normalize": self.normalize,
            "scale": self.scale,
            "groups": self.groups,
            "top_groups": self.top_groups,
        }


@dataclass(frozen=True, slots=True)
class Config:
    """How the tokens are walked.

    tile_m: tokens of a block, a power of two.
    num_worker_warps: warps that compute, 4 or 8.
    """

    tile_m: int
    num_worker_warps: int | None = None


def space(p: Problem, device: Device) -> list[Config]:
    """Every config worth timing, the untuned default first."""
    lanes = next_pow2(max(1, p.groups)) * next_pow2(p.experts // max(1, p.groups))
    if device.is_cpu:
        most = max(1, min(next_pow2(p.tokens), (1 << 18) // lanes))
        return list(dict.fromkeys((Config(most), Config(max(1, most // 4)))))
    # Four warps, a token each: no warp waits for another. Two tokens make the compiler spread each lane's load (255 registers, sm_90).
    sizes = (8, 4, 1, 16) if p.tokens > 32 * device.sms else (4, 8, 1)
    return [Config(tile_m, 4) for tile_m in sizes if tile_m * lanes <= 4096 or tile_m == 1]


def plan(p: Problem, c: Config, device: Device) -> Plan:
    """Grid and compile-time constants of one launch."""
    groups = max(1, p.groups)
    sizes = (groups, p.experts // groups, p.top_groups or groups, p.top_k)
    tiles = (c.tile_m, next_pow2(groups), next_pow2(p.experts // groups), next_pow2(p.top_k))
    constants = (p.sigmoid, p.bias, p.normalize, *sizes, *tiles)
    return Plan(moe_route_kernel, (ct.cdiv(p.tokens, c.tile_m),), constants, num_worker_warps=c.num_worker_warps)


def _order_keys(values):
    """int32 that compare as the fp32 values do, NaN above all: integers have no NaN that would compare false with itself."""
    bits = ct.bitcast(ct.where(ct.isnan(values), math.nan, values + 0.0), ct.int32)  # one NaN, and no negative zero
    return ct.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@ct.kernel
def moe_route_kernel(
    LOGITS,
    BIAS,
    WEIGHTS,
    IDS,
    scale: float,
    SIGMOID: ct.Constant[bool],
    ADD_BIAS: ct.Constant[bool],
    NORMALIZE: ct.Constant[bool],
    GROUPS: ct.Constant[int],
    SIZE: ct.Constant[int],
    TOP_GROUPS: ct.Constant[int],
    TOP_K: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_G: ct.Constant[int],
    TILE_S: ct.Constant[int],
    TILE_K: ct.Constant[int],
):
    """TILE_M tokens, all experts in one tile.

    LOGITS: [tokens, GROUPS, SIZE]; BIAS: [GROUPS, SIZE], read only with ADD_BIAS; the others: [tokens, TOP_K].
    TILE_G, TILE_S, TILE_K: powers of two, at least GROUPS, SIZE, TOP_K.
    """
    i = ct.bid(0)
    lanes = TILE_G * TILE_S
    group = ct.arange(TILE_G, dtype=ct.int32).reshape((1, TILE_G, 1))
    member = ct.arange(TILE_S, dtype=ct.int32).reshape((1, 1, TILE_S))
    expert = (group * SIZE + member).reshape((1, lanes))
    inside = ((group < GROUPS) & (member < SIZE)).reshape((1, lanes))
    x = ct.load(LOGITS.slice(1, 0, GROUPS).slice(2, 0, SIZE), (i, 0, 0), (TILE_M, TILE_G, TILE_S), padding_mode=ZERO, allow_tma=False)
    x = x.astype(ct.float32).reshape((TILE_M, lanes))
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
    ct.store(WEIGHTS, (i, 0), weights * scale, allow_tma=False)
    ct.store(IDS, (i, 0), ids, allow_tma=False)


@torch_op(mutates=("weights", "ids"))
def moe_route_out(
    logits: Tensor,
    bias: Optional[Tensor],
    weights: Tensor,
    ids: Tensor,
    sigmoid: bool,
    normalize: bool,
    scale: float,
    groups: int,
    top_groups: int,
) -> None:
    """`moe_route` into `weights` and `ids`, [tokens, top_k]. No checks, no sync: safe under graph capture."""
    tokens, experts = logits.shape
    fields = (tokens, experts, ids.shape[1], logits.dtype, sigmoid, bias is not None, normalize, groups, top_groups)
    shape = (groups or 1, experts // (groups or 1))
    grouped = logits.unflatten(1, shape)
    # Without a bias the kernel does not touch it; the logits stand in.
    launch(best_plan(space, plan, Device.of(logits), Problem, *fields), grouped, grouped if bias is None else bias.view(shape), weights, ids, scale)


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
) -> tuple[Tensor, Tensor]:
    """Chooses the experts of each token and their weights.

    Args:
        logits: [tokens, experts]; bf16, fp16 or fp32; stride 1 in the last axis. At most 1024 experts.
        top_k: experts of a token, 1 to 64.
        sigmoid: scores are sigmoids of the logits instead of their softmax.
        bias: fp32 [experts], contiguous; added to the scores for the choice, not in the weights.
        normalize: divide the weights of a token by their sum.
        scale: factor of all weights, after that.
        groups: the experts form so many groups of equal size, of which only the best take part; 0 for all experts alike. A group counts by its
            best expert, or with a bias by the sum of its two best.
        top_groups: groups that take part; 0 without groups. Together they have at least top_k experts.
    Returns: (weights fp32 [tokens, top_k], ids int32 [tokens, top_k]), by falling score; of equals the lower index first. A NaN counts as the
        largest; the ids are always distinct experts. Empty without tokens, with nothing launched.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_tensor(logits, "logits", ndim=2, dtypes=DTYPES)
    tokens, experts = logits.shape
    if not 1 <= experts <= MOST_EXPERTS:
        raise must("logits.shape[1]", f"1 to {MOST_EXPERTS}, the number of experts", experts)
    if not 1 <= top_k <= min(experts, MOST_TOP_K):
        raise must("top_k", f"1 to {min(experts, MOST_TOP_K)}", top_k)
    if groups < 0 or (groups and experts % groups):
        raise must("groups", f"0 or a divisor of {experts}, the number of experts", groups)
    if not groups and top_groups:
        raise must("top_groups", "0 without groups", top_groups)
    if groups and not 1 <= top_groups <= groups:
        raise must("top_groups", f"1 to {groups}, the number of groups", top_groups)
    if groups and top_groups * (experts // groups) < top_k:
        raise must("top_groups", f"enough groups of {experts // groups} experts for top_k = {top_k}", top_groups)
    if bias is not None:
        check_tensor(bias, "bias", shape=(experts,), dtypes=(torch.float32,), contiguous=True)
        if bias.device != logits.device:
            raise must("bias.device", logits.device, bias.device)
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=logits.device)
    ids = torch.empty((tokens, top_k), dtype=torch.int32, device=logits.device)
    if tokens:
        moe_route_out(logits, bias, weights, ids, sigmoid, normalize, scale, groups, top_groups)
    return weights, ids
