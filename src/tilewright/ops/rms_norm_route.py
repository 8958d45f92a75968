"""RMSNorm, the router's product and the choice of experts in one launch, for a token or a few.

    h = rms_norm(x + residual)        logits = h @ router.T + router_bias        weights, ids = moe_route(logits)

A token's experts are dealt to several blocks, each of which norms the token for itself. The block that finishes last, by a counter, finds all
logits and chooses.

Source    rms_norm (arXiv:1910.07467, eq. 4) and moe_route (Shazeer et al. 2017, arXiv:1701.06538).
Numerics  fp32 but for what is rounded to the dtype: x + residual, which is normalised, and h, which the router reads. Logits are not rounded. Of
          equal scores the expert with the lower index comes first. Each logit is one block's, so equal calls give equal bits.
Bound     Latency: the router's weights are a few hundred kilobytes.
"""

from dataclasses import dataclass
from typing import Any, Optional

import cuda.tile as ct
import torch
import torch.nn.functional as F
from torch import Tensor

from ..launch import Cost, Device, Plan, best_plan, check_tensor, launch, must, next_pow2, torch_op
from . import rms_norm
from .early import overlap_previous
from .routing import MOST_EXPERTS, ZERO, check_routing, chosen_experts, experts_and_groups, routed, scores_of
from .tiles import load_tile, rounded_sum

DTYPES = (torch.bfloat16, torch.float16)


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


@dataclass(frozen=True, slots=True)
class Problem:
    """What a plan may depend on. scale, first_expert: of `inputs` alone."""

    tokens: int
    experts: int
    k: int
    top_k: int
    dtype: torch.dtype = torch.bfloat16
    residual: bool = False
    round_before_weight: bool = False
    sigmoid: bool = False
    bias: bool = False
    normalize: bool = True
    groups: int = 0
    top_groups: int = 0
    router_bias: bool = False
    scale: float = 1.0
    first_expert: int = 0

    def cost(self) -> Cost:
        rows = self.tokens * self.k * (4 if self.residual else 2)
        return Cost((self.experts * self.k + rows) * self.dtype.itemsize + 8 * self.tokens * self.top_k, 2 * self.tokens * self.experts * self.k)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, dtype=self.dtype, device=device)

        return {
            "x": randn(self.tokens, self.k),
            "weight": randn(self.k),
            "router": randn(self.experts, self.k).mul_(2 * self.k**-0.5),
            "top_k": self.top_k,
            "eps": 1e-6,
            "round_before_weight": self.round_before_weight,
            "residual": randn(self.tokens, self.k) if self.residual else None,
            "router_bias": randn(self.experts) if self.router_bias else None,
            "sigmoid": self.sigmoid,
            "bias": 0.1 * torch.randn(self.experts, device=device) if self.bias else None,
            "normalize": self.normalize,
            "scale": self.scale,
            "groups": self.groups,
            "top_groups": self.top_groups,
            "first_expert": self.first_expert,
        }


@dataclass(frozen=True, slots=True)
class Config:
    """How the experts are dealt.

    tile_e: experts of a block, a power of two.
    tile_k: elements of a row in one load, a power of two; the whole row and the block's part of the router stay in registers.
    num_worker_warps: warps that compute, 4 or 8.
    """

    tile_e: int
    tile_k: int
    num_worker_warps: int | None = None


MOST_KEPT = 128  # elements of the router in a thread's registers


def space(p: Problem, device: Device) -> list[Config]:
    """Every config worth timing, the untuned default first."""
    whole = next_pow2(p.k)
    if device.is_cpu:
        return list(dict.fromkeys((Config(min(64, next_pow2(p.experts)), whole), Config(min(4, next_pow2(p.experts)), min(64, whole)))))
    tile_k = min(whole, max(256, p.k & -p.k), 2048)  # the largest that pads nothing
    # Two experts a block: more blocks than that only queue at the counter, fewer read longer.
    shapes = ((2, 4), (4, 4), (1, 4), (4, 8), (8, 8))
    fitting = [Config(e, tile_k, warps) for e, warps in shapes if e * p.k <= MOST_KEPT * 32 * warps]
    return fitting or [Config(1, tile_k, 8)]


def plan(p: Problem, c: Config, device: Device) -> Plan:
    """Grid and compile-time constants of one launch."""
    groups = max(1, p.groups)
    choice = (p.sigmoid, p.bias, p.normalize, groups, p.experts // groups, p.top_groups or groups, p.top_k)
    tiles = (next_pow2(groups), next_pow2(p.experts // groups), next_pow2(p.top_k))
    constants = (p.residual, p.router_bias, p.round_before_weight, *choice, p.k, c.tile_e, c.tile_k, *tiles)
    logits = (((p.tokens, p.experts), torch.float32),)
    grid = (-(-p.experts // c.tile_e), p.tokens)
    return Plan(rms_norm_route_kernel, grid, constants, num_worker_warps=c.num_worker_warps, workspace=logits, early=True)


@ct.kernel
def rms_norm_route_kernel(
    X,
    RESIDUAL,
    WEIGHT,
    ROUTER,
    ROUTER_BIAS,
    BIAS,
    ARRIVED,
    LOGITS,
    OUT,
    SUM,
    WEIGHTS,
    IDS,
    eps: float,
    weight_offset: float,
    scale: float,
    first_expert: int,
    ADD: ct.Constant[bool],
    BIASED: ct.Constant[bool],
    ROUND: ct.Constant[bool],
    SIGMOID: ct.Constant[bool],
    ADD_BIAS: ct.Constant[bool],
    NORMALIZE: ct.Constant[bool],
    GROUPS: ct.Constant[int],
    SIZE: ct.Constant[int],
    TOP_GROUPS: ct.Constant[int],
    TOP_K: ct.Constant[int],
    K: ct.Constant[int],
    TILE_E: ct.Constant[int],
    TILE_K: ct.Constant[int],
    TILE_G: ct.Constant[int],
    TILE_S: ct.Constant[int],
    TILE_P: ct.Constant[int],
):
    """TILE_E experts of a token; the token's last block also chooses. Grid (parts of the experts, tokens).

    X, RESIDUAL, OUT, SUM: [tokens, K], RESIDUAL and SUM only with ADD. WEIGHT: [K]. ROUTER: [experts, K]. ROUTER_BIAS: [experts],
    only with BIASED. BIAS: [GROUPS, SIZE], only with ADD_BIAS.
    ARRIVED: int32 [tokens], zero, and zero again at the end. LOGITS: [tokens, experts]. WEIGHTS, IDS: [tokens, TOP_K]; IDS count from first_expert.
    TILE_G, TILE_S, TILE_P: powers of two, at least GROUPS, SIZE, TOP_K.
    """
    overlap_previous()
    part, token = ct.bid(0), ct.bid(1)
    X, ROUTER, WEIGHT = X.slice(1, 0, K), ROUTER.slice(1, 0, K), WEIGHT.slice(0, 0, K)
    even = K % TILE_K == 0 and GROUPS * SIZE % TILE_E == 0
    routers: tuple = ()
    xs: tuple = ()
    squares = ct.zeros((1, TILE_K), ct.float32)
    for j in ct.static_iter(range(ct.cdiv(K, TILE_K))):  # under way while the row is normed
        routers = (*routers, load_tile(ROUTER, (part, j), (TILE_E, TILE_K), ZERO, even, None, False))
    for j in ct.static_iter(range(ct.cdiv(K, TILE_K))):
        x = load_tile(X, (token, j), (1, TILE_K), ZERO, K % TILE_K == 0, None, False)
        if ADD:
            more = load_tile(RESIDUAL.slice(1, 0, K), (token, j), (1, TILE_K), ZERO, K % TILE_K == 0, None, False)
            x = rounded_sum(x, more)
            if part == 0:
                ct.store(SUM, (token, j), x, allow_tma=False)
        wide = x.astype(ct.float32)
        squares = squares + wide * wide
        xs = (*xs, x)
    rstd = 1.0 / ct.sqrt(ct.sum(squares) * (1.0 / K) + eps)  # rsqrt is 2 ulp off in fp32
    acc = ct.zeros((TILE_E, TILE_K), ct.float32)
    for j in ct.static_iter(range(ct.cdiv(K, TILE_K))):
        h = xs[j].astype(ct.float32) * rstd
        if ROUND:
            h = h.astype(OUT.dtype).astype(ct.float32)
        weight = load_tile(WEIGHT, (j,), (TILE_K,), ZERO, K % TILE_K == 0, None, False)
        h = (h * (weight.astype(ct.float32) + weight_offset)).astype(OUT.dtype)
        if part == 0:
            ct.store(OUT, (token, j), h, allow_tma=False)
        acc = acc + routers[j].astype(ct.float32) * h.astype(ct.float32)
    logit = ct.sum(acc, axis=1)
    if BIASED:
        logit = logit + load_tile(ROUTER_BIAS, (part,), (TILE_E,), ZERO, even, None, False).astype(ct.float32)
    ct.store(LOGITS, (token, part), logit.reshape((1, TILE_E)), allow_tma=False)
    before = ct.atomic_add(ARRIVED, token, 1, memory_order=ct.MemoryOrder.ACQ_REL, memory_scope=ct.MemoryScope.DEVICE)
    if before == ct.num_blocks(0) - 1:
        # Beside the row of logits three empty ones: a row to a warp, and in all the reductions that follow no warp waits for another. With groups
        # the compiler lays rows out otherwise.
        ROWS = 4 if TOP_GROUPS == GROUPS else 1
        expert, inside = experts_and_groups(GROUPS, SIZE, TILE_G, TILE_S)
        row = ct.arange(ROWS, dtype=ct.int32).reshape((ROWS, 1))
        logits = ct.gather(LOGITS, (token + row, expert), mask=inside & (row == 0))
        how = (SIGMOID, ADD_BIAS, NORMALIZE, GROUPS, SIZE, TOP_GROUPS, TOP_K, ROWS, TILE_G, TILE_S, TILE_P)
        weights, ids = chosen_experts(logits, BIAS, scale, how)
        ct.store(WEIGHTS, (token, 0), ct.extract(weights, (0, 0), (1, TILE_P)), allow_tma=False)
        ct.store(IDS, (token, 0), ct.extract(ids, (0, 0), (1, TILE_P)) - first_expert, allow_tma=False)
        ct.scatter(ARRIVED, token, 0)


@torch_op(mutates=("arrived", "weights", "ids", "out", "new_residual"))
def rms_norm_route_out(
    x: Tensor,
    weight: Tensor,
    router: Tensor,
    router_bias: Optional[Tensor],
    bias: Optional[Tensor],
    residual: Optional[Tensor],
    arrived: Tensor,
    weights: Tensor,
    ids: Tensor,
    out: Tensor,
    new_residual: Optional[Tensor],
    eps: float,
    weight_offset: float,
    round_before_weight: bool,
    sigmoid: bool,
    normalize: bool,
    scale: float,
    groups: int,
    top_groups: int,
    first_expert: int,
) -> None:
    """`rms_norm_route` into weights, ids, out and, with a residual, new_residual. No checks, no sync: safe under graph capture.

    arrived: int32 [tokens], zeros, and zeros again when it is done: no two calls at the same time may share it.
    """
    (tokens, k), experts = x.shape, router.shape[0]
    norm = (residual is not None, round_before_weight)
    fields = (tokens, experts, k, ids.shape[1], x.dtype, *norm, sigmoid, bias is not None, normalize, groups, top_groups, router_bias is not None)
    p = best_plan(space, plan, Device.of(x), Problem, *fields)
    (logits,) = p.scratch(x.device)
    # The kernel touches no array that its constants do not name; others stand in.
    launch(
        p,
        x,
        x if residual is None else residual,
        weight,
        router,
        weight if router_bias is None else router_bias,
        router if bias is None else bias.view(groups or 1, -1),
        arrived,
        logits,
        out,
        out if new_residual is None else new_residual,
        weights,
        ids,
        eps,
        weight_offset,
        scale,
        first_expert,
    )


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
) -> tuple[Tensor, ...]:
    """Norms each token and chooses its experts, in one launch: for a token or a few; for many `rms_norm`, `matmul` and `moe_route` are faster.

    Args:
        x: [tokens, k]; bf16 or fp16; stride 1 in the last axis.
        weight: [k], the norm's; dtype and device of x.
        router: [experts, k], likewise; at most 1024 experts.
        top_k: experts of a token, 1 to 64.
        eps: added to mean(x**2), so in units of x squared.
        weight_offset: added to the norm's weight; 1.0 for Gemma.
        round_before_weight: round to the dtype before the norm's weight too, as Hugging Face's Llama does.
        residual: shape, dtype and device of x; x + residual is normalised.
        router_bias: [experts], dtype and device of x; added to the logits.
        sigmoid, bias, normalize, scale, groups, top_groups, first_expert: as in `moe_route`.
    Returns: (weights fp32 [tokens, top_k], ids int32 [tokens, top_k], the normed rows [tokens, k]) and, with a residual, x + residual; the first
        two as `moe_route` has them. Empty without tokens, with nothing launched.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_tensor(x, "x", ndim=2, dtypes=DTYPES)
    tokens, k = x.shape
    if k == 0:
        raise must("x.shape[1]", "at least 1", 0)
    check_tensor(weight, "weight", shape=(k,), like=x)
    check_tensor(router, "router", ndim=2, like=x)
    experts = router.shape[0]
    if not 1 <= experts <= MOST_EXPERTS:
        raise must("router.shape[0]", f"1 to {MOST_EXPERTS}, the number of experts", experts)
    if router.shape[1] != k:
        raise must("router.shape[1]", f"{k}, the k of x", router.shape[1])
    check_routing(experts, top_k, groups, top_groups, first_expert)
    if residual is not None:
        check_tensor(residual, "residual", shape=x.shape, like=x)
    if router_bias is not None:
        check_tensor(router_bias, "router_bias", shape=(experts,), like=x)
    if bias is not None:
        check_tensor(bias, "bias", shape=(experts,), dtypes=(torch.float32,), contiguous=True)
        if bias.device != x.device:
            raise must("bias.device", x.device, bias.device)
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=x.device)
    ids = torch.empty((tokens, top_k), dtype=torch.int32, device=x.device)
    out = torch.empty((tokens, k), dtype=x.dtype, device=x.device)
    total = None if residual is None else torch.empty_like(out)
    if tokens:
        arrived = torch.zeros(tokens, dtype=torch.int32, device=x.device)
        norm = (eps, weight_offset, round_before_weight)
        choice = (sigmoid, normalize, scale, groups, top_groups, first_expert)
        rms_norm_route_out(x, weight, router, router_bias, bias, residual, arrived, weights, ids, out, total, *norm, *choice)
    return (weights, ids, out) if total is None else (weights, ids, out, total)
