"""Routing of a mixture of experts: the experts of each token and their weights.

    score = softmax(logits) or sigmoid(logits)        ids = the top_k experts by score + bias
    weights = scale * score[ids] / sum(score[ids])

Source    Top-k of a softmax: Shazeer et al. 2017, arXiv:1701.06538. Groups, and sigmoid scores with
          a bias that only selects: DeepSeek-V2 2024, arXiv:2405.04434, section 2.2.2, and
          DeepSeek-V3 2024, arXiv:2412.19437, eq. 12 to 16 (a group counts by its best expert, or
          with a bias by the sum of its two best).
Numerics  fp32 throughout. Of equal scores the expert with the lower index comes first.
Bound     Latency: a few kilobytes for each token, top_k reductions one after the other.
"""

from dataclasses import dataclass
from typing import Any, Optional

import cuda.tile as ct
import torch
from torch import Tensor

from ..launch import (
    FLOATS,
    Cost,
    Device,
    Launch,
    argument_error,
    check_bools,
    check_finite,
    check_tensor,
    each_out,
    next_pow2,
    out_or_new,
    torch_op,
)
from ..select import Choices, Work
from .common.pdl import pdl_overlap
from .common.routing import MOST_EXPERTS, check_routing, choice_of, chosen_experts, group_constants, routed, scores_of
from .common.rows import WAIT_TIE, grid_fits, least_tile, stream
from .common.tiles import ZERO


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
    first_expert: int = 0,
) -> tuple[Tensor, Tensor]:
    """The definition, at least in fp32."""
    weights, ids = routed(logits, top_k, sigmoid=sigmoid, bias=bias, normalize=normalize, scale=scale, groups=groups, top_groups=top_groups)
    return weights, ids - first_expert


def comparable(
    result: tuple[Tensor, Tensor],
    logits: Tensor,
    top_k: int,
    *,
    sigmoid: bool = False,
    bias: Tensor | None = None,
    first_expert: int = 0,
    **inputs: Any,
) -> tuple[Tensor, Tensor]:
    """The weights, and what the experts were chosen by: indices themselves have no distance."""
    weights, ids = result
    return weights, scores_of(logits.double(), sigmoid, bias)[1].gather(-1, ids.long() + first_expert).to(weights.dtype)


@dataclass(frozen=True, slots=True)
class Problem:
    """What a plan may depend on. scale, first_expert: of `inputs` alone."""

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
    first_expert: int = 0

    def cost(self) -> Cost:
        return Cost(self.tokens * (self.experts * self.dtype.itemsize + 8 * self.top_k), 8 * self.tokens * self.experts)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        return {
            "logits": 2 * torch.randn(self.tokens, self.experts, dtype=self.dtype, device=device),
            **choice_of(self, device),
        }


@dataclass(frozen=True, slots=True)
class Config:
    """How the tokens are tiled.

    tile_m: tokens of a block, a power of two.
    num_worker_warps: warps that compute, 4 or 8.
    """

    tile_m: int
    num_worker_warps: int | None = None


def candidates(p: Problem, device: Device) -> list[Config]:
    if device.is_cpu:
        most = max(1, min(next_pow2(p.tokens), (1 << 18) // _lanes(p)))
        return [Config(most), Config(max(1, most // 4))]
    return [Config(max(tile_m, least_tile(p.tokens)), 4) for tile_m in ((4, 8, 1, 16) if _lanes(p) > 32 else (1, 8))]


def _lanes(p: Problem) -> int:
    return next_pow2(max(1, p.groups)) * next_pow2(p.experts // max(1, p.groups))


def legal(p: Problem, c: Config, device: Device) -> bool:
    return grid_fits(ct.cdiv(p.tokens, c.tile_m)) and (device.is_cpu or c.tile_m == 1 or c.tile_m * _lanes(p) <= 4096)


def work(p: Problem, c: Config, device: Device) -> Work:
    """Two reductions of all lanes for each expert chosen: shortest with a token to a warp, longest
    where warps share one.
    """
    elements = c.tile_m * _lanes(p)
    serial = 2.0 if c.tile_m < 4 and elements > 32 else 0.5 + c.tile_m / 8
    return stream(p, c, device, ct.cdiv(p.tokens, c.tile_m), elements, own=32, held=8, steps=p.top_k + p.top_groups, serial=serial)


def family(p: Problem, c: Config) -> str:
    return f"{c.tile_m} {_lanes(p) > 32} {p.groups > 0}"


CHOICES = Choices("moe_route", candidates, legal, work, family, tie=WAIT_TIE)
space = CHOICES.space


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """Grid and compile-time constants of one launch."""
    constants = group_constants(p) | {"tile_s": next_pow2(p.experts // max(1, p.groups)), "tile_k": next_pow2(p.top_k)}
    return (Launch.of(moe_route_kernel, (ct.cdiv(p.tokens, c.tile_m),), p, c, constants, optional={"bias": p.bias}, pdl=True),)


@ct.kernel
def moe_route_kernel(
    LOGITS,
    BIAS,
    WEIGHTS,
    IDS,
    scale: float,
    first_expert: int,
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

    LOGITS: [tokens, GROUPS, SIZE]; BIAS: [GROUPS, SIZE], read only with ADD_BIAS; the others:
        [tokens, TOP_K]. IDS count from first_expert.
    TILE_G, TILE_S, TILE_K: powers of two, at least GROUPS, SIZE, TOP_K.
    """
    pdl_overlap()
    i = ct.bid(0)
    lanes = TILE_G * TILE_S
    x = ct.load(LOGITS.slice(1, 0, GROUPS).slice(2, 0, SIZE), (i, 0, 0), (TILE_M, TILE_G, TILE_S), padding_mode=ZERO, allow_tma=False)
    how = (SIGMOID, ADD_BIAS, NORMALIZE, GROUPS, SIZE, TOP_GROUPS, TOP_K, TILE_M, TILE_G, TILE_S, TILE_K)
    weights, ids = chosen_experts(x.astype(ct.float32).reshape((TILE_M, lanes)), BIAS, scale, how)
    ct.store(WEIGHTS, (i, 0), weights, allow_tma=False)
    ct.store(IDS, (i, 0), ids - first_expert, allow_tma=False)


DECISION = CHOICES.decision(Problem, plan, ("logits", "bias", "weights", "ids", "scale", "first_expert"))


@torch_op(mutates=("weights", "ids"))
def moe_route_out(
    logits: Tensor,
    bias: Optional[Tensor],
    sigmoid: bool,
    normalize: bool,
    scale: float,
    groups: int,
    top_groups: int,
    first_expert: int,
    weights: Tensor,
    ids: Tensor,
) -> None:
    """`moe_route` into `weights` and `ids`, [tokens, top_k]. No checks, no sync: safe under graph
    capture.
    """
    tokens, experts = logits.shape
    launches = DECISION.launches(
        Device.of(logits),
        tokens=tokens,
        experts=experts,
        top_k=ids.shape[1],
        dtype=logits.dtype,
        sigmoid=sigmoid,
        bias=bias is not None,
        normalize=normalize,
        groups=groups,
        top_groups=top_groups,
    )
    grouped = (groups or 1, experts // (groups or 1))
    launches.run(logits.unflatten(1, grouped), None if bias is None else bias.view(grouped), weights, ids, scale, first_expert)


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
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Chooses the experts of each token and their weights.

    Args:
        logits: [tokens, experts]; bf16, fp16 or fp32; stride 1 in the last axis. At most 1024
            experts.
        top_k: experts of a token, 1 to 64.
        sigmoid: scores are sigmoids of the logits instead of their softmax.
        bias: fp32 [experts], contiguous; added to the scores for the choice, but not to the
            weights.
        normalize: divide the weights of a token by their sum.
        scale: factor of all weights, applied last.
        groups: the number of groups of equal size that the experts form; only the best groups take
            part. 0: no groups. A group is rated by its best expert, or with a bias by the sum of
            its two best.
        top_groups: groups that take part; 0 without groups. Together they have at least top_k
            experts.
        first_expert: the first of this rank's experts. Ids are counted from it, as `moe` expects.
        out: where the result goes: (weights, ids), contiguous, no element in common with an input
            or each other; default new tensors.
    Returns: (weights fp32 [tokens, top_k], ids int32 [tokens, top_k]), by descending score; of
        equal scores the lower index first. A NaN counts as the largest. The ids are always
        distinct; those of experts before first_expert are negative. Empty without tokens, with
        nothing launched.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_bools(sigmoid=sigmoid, normalize=normalize)
    check_tensor(logits, "logits", ndim=2, dtypes=FLOATS)
    tokens, experts = logits.shape
    if not 1 <= experts <= MOST_EXPERTS:
        raise argument_error("logits.shape[1]", f"1 to {MOST_EXPERTS}, the number of experts", experts)
    check_routing(experts, top_k, groups, top_groups, first_expert)
    check_finite(scale, "scale")
    if bias is not None:
        check_tensor(bias, "bias", shape=(experts,), dtypes=(torch.float32,), contiguous=True, like=logits)
    weights, ids = each_out(out, "weights", "ids")
    weights = out_or_new(weights, (tokens, top_k), torch.float32, logits, bias, name="out[0]")
    ids = out_or_new(ids, (tokens, top_k), torch.int32, logits, bias, weights, name="out[1]")
    if tokens:
        moe_route_out(logits, bias, sigmoid, normalize, scale, groups, top_groups, first_expert, weights, ids)
    return weights, ids
