"""Mixtures of experts in transformers' models: which router and which experts ours are."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..launch import HALVES
from ..ops.matmul import matmul
from ..ops.moe import moe
from ..ops.moe_route import moe_route
from . import probe
from .method import Method, Verdict, place_of
from .quantized import QuantizedMixture

_BIAS = "e_score_correction_bias"
_GROUPS = (("num_group", "topk_group"), ("n_group", "topk_group"))
Routed = tuple[Tensor, Tensor, Tensor]  # logits, weights and ids
_TOKENS = 24  # of a probe: some tie in 16 bits
_EXPERTS, _INNER = 4, 32  # of a stand-in


def router(module: Any) -> Verdict:
    """A matrix of one row for each expert, whose forward returns (logits, weights, ids)."""
    weight = module._parameters.get("weight")
    names = probe.arguments_of(type(module).forward)
    if weight is None or weight.dim() != 2 or names is None or len(names) != 1 or any(module._modules.values()) or isinstance(module, nn.Embedding):
        return None
    if type(module).forward is nn.Linear.forward:
        return None
    own = {name: x for group in (module._parameters, module._buffers) for name, x in group.items() if x is not None}
    if set(own) - {"weight", "bias", _BIAS}:
        return None
    place = place_of(module)
    assert place is not None

    def tensors(dtype: torch.dtype, device: Any) -> dict[str, Tensor]:
        made = {"weight": 3 * probe.random(*weight.shape, dtype=dtype, device=device) * weight.shape[1] ** -0.5}
        wide = {name: torch.float32 if x.dtype is torch.float32 and dtype in HALVES else dtype for name, x in own.items()}
        return made | {name: probe.random(len(weight), dtype=wide[name], device=device, seed=5) / 2 for name in own if name != "weight"}

    held = tensors(*place)
    x = probe.random(_TOKENS, weight.shape[1], dtype=place[0], device=place[1], seed=9)
    theirs = probe.attempt(lambda: type(module).forward(probe.stand_in(module, held), x))
    if not isinstance(theirs, tuple) or len(theirs) != 3 or not all(isinstance(t, Tensor) and t.dim() == 2 for t in theirs):
        return None
    logits, weights, ids = theirs
    if ids.dtype not in (torch.int32, torch.int64) or weights.shape != ids.shape or logits.shape != (_TOKENS, len(weight)):
        return None
    wide = logits.dtype if logits.dtype is torch.float32 and place[0] in HALVES else None
    products = [{"logits_dtype": dtype} for dtype in ((wide, None) if wide else (None,))]
    for product in products:
        for choice in _choices(module, held, ids.shape[1]):
            options = {**product, **choice}
            mine = probe.attempt(lambda options=options: route(probe.stand_in(module, held), x, **options))  # type: ignore[misc]
            if mine is not None and _agree(mine, theirs, place[0]) and _agree_where_large(module, held, x, options):
                return Method("moe_route", "router", tuple(options.items()))
    return "moe_route: it chooses experts or weighs them by another rule"


def _choices(module: Any, held: dict[str, Tensor], top_k: int) -> Iterator[dict[str, Any]]:
    """What a router may do, by what it holds."""
    scales = [1.0, *(value for name, value in module.__dict__.items() if "scal" in name and isinstance(value, float) and value != 1.0)]
    groups: list[tuple[str, str] | None] = [None]
    groups += [names for names in _GROUPS if all(isinstance(getattr(module, name, None), int) for name in names)]
    for sigmoid in (False, True):
        for bias in (True, False) if _BIAS in held else (False,):
            for normalize in (True, False):
                for scale in reversed(scales):
                    for group in reversed(groups):
                        yield {"top_k": top_k, "sigmoid": sigmoid, "corrected": bias, "normalize": normalize, "scale": scale, "groups": group}


def route(  # noqa: PLR0913 each is a way in which routers differ
    self: Any,
    hidden_states: Tensor,
    *,
    top_k: int,
    sigmoid: bool,
    corrected: bool,
    normalize: bool,
    scale: float,
    groups: tuple[str, str] | None,
    logits_dtype: torch.dtype | None,
) -> Routed:
    """A router on our kernels. gpt-oss takes the softmax of the best alone, which is the normalised
    softmax of all.
    """
    x = hidden_states.reshape(-1, self.weight.shape[1])
    how: dict[str, Any] = {} if logits_dtype is None else {"out_dtype": logits_dtype}
    logits = matmul(x, self.weight, getattr(self, "bias", None), trans_b=True, **how)
    how = {"sigmoid": sigmoid, "bias": getattr(self, _BIAS).float().contiguous() if corrected else None}
    if groups is not None and getattr(self, groups[0]) > 1:
        how |= {"groups": getattr(self, groups[0]), "top_groups": getattr(self, groups[1])}
    weights, ids = moe_route(logits, top_k, normalize=normalize, scale=scale, **how)
    return logits, weights, ids.long()


def _agree_where_large(module: Any, held: dict[str, Tensor], x: Tensor, options: dict[str, Any]) -> bool:
    """Whether logits of 6 and 12 have no bound, neither returned nor weighed, seen in fp32. Large
    sigmoids tie.
    """
    held, how = {name: tensor.float() for name, tensor in held.items()}, {**options, "logits_dtype": None}
    for size in (2, 4):
        wide = size * x.float()
        ours, theirs = route(probe.stand_in(module, held), wide, **how), type(module).forward(probe.stand_in(module, held), wide)
        same, close, off = _compared(ours, theirs, 1e-3)
        if off > 1e-3 or not same.any() or not close[same].all():
            return False
    return True


def _agree(ours: Routed, theirs: Routed, dtype: torch.dtype) -> bool:
    """Whether most tokens have the same experts with the same weights: two experts may tie."""
    eps = 8 * max(torch.finfo(dtype).eps, torch.finfo(theirs[1].dtype).eps)
    same, close, off = _compared(ours, theirs, eps)
    return bool(same.double().mean() >= 0.75) and off <= eps and bool(close[same].all())


def _compared(ours: Routed, theirs: Routed, eps: float) -> tuple[Tensor, Tensor, float]:
    """Which tokens have the same experts, which the same weights, and how far logits are off."""
    sides = []
    for _, weights, ids in (ours, theirs):
        order = ids.long().argsort(-1)
        sides.append((ids.long().gather(1, order), weights.double().gather(1, order)))
    (mine, my_weights), (other, their_weights) = sides
    close = ((my_weights - their_weights).abs() <= eps * their_weights.abs() + eps / 8).all(-1)
    return (mine == other).all(-1), close, probe.off(ours[0], theirs[0].double())


def experts(module: Any) -> Verdict:
    """Weights of all experts as [experts, 2 * inter, hidden] and [experts, hidden, inter]."""
    if isinstance(module, QuantizedMixture):
        return Method("quantized_moe", None)  # by its own forward
    gate_up, down = (module._parameters.get(name) for name in ("gate_up_proj", "down_proj"))
    names = probe.arguments_of(type(module).forward)
    if gate_up is None or down is None or gate_up.dim() != 3 or down.dim() != 3:
        return None
    others = sorted(name for name, x in module._parameters.items() if x is not None and name not in ("gate_up_proj", "down_proj"))
    if gate_up.shape[1] != 2 * down.shape[2] or gate_up.shape[2] != down.shape[1] or getattr(module, "is_transposed", False):
        return "moe: its weights lie the other way round: the engine turns them, here they would be held twice"
    if others or (names is not None and len(names) not in (0, 3)):
        return f"moe: it also has {', '.join(others) or names}"
    if gate_up.dtype not in HALVES:
        return f"moe: weights must be bfloat16 or float16, got {str(gate_up.dtype).removeprefix('torch.')}"
    dtype, device, hidden = gate_up.dtype, gate_up.device, gate_up.shape[2]
    sharp = {
        "gate_up_proj": probe.random(_EXPERTS, 2 * _INNER, hidden) * hidden**-0.5,
        "down_proj": probe.random(_EXPERTS, hidden, _INNER) * _INNER**-0.5,
    }
    x, ids = probe.rows(hidden), (torch.arange(probe.ROWS)[:, None] + torch.arange(2)) % min(_EXPERTS, len(gate_up))
    weights = probe.random(probe.ROWS, 2).sigmoid()
    forward = _eager(type(module))
    found = probe.attempt(lambda: forward(probe.stand_in(module, sharp), x, ids, weights))
    if not probe.same(found, _experts_of(sharp, x, ids, weights)):
        return "moe: its experts compute no down(silu(gate) * up)"
    own = {name: w.to(device, dtype) for name, w in sharp.items()}
    rows, ids, weights = probe.random(probe.ROWS, hidden).to(device, dtype), ids.to(device), weights.to(device).float()
    theirs = probe.attempt(lambda: forward(probe.stand_in(module, own), rows, ids, weights))
    truth = _experts_of({name: w.double() for name, w in own.items()}, rows.double(), ids, weights.double())
    reason = probe.why_not(lambda: moe(rows, own["gate_up_proj"], own["down_proj"], weights=weights, ids=ids), theirs, truth)
    return f"moe: {reason}" if reason else Method("moe", "experts")


def _eager(cls: Any) -> Any:
    """The forward in the model's file, below transformers' choice of an implementation."""
    return getattr(cls.forward, "__wrapped__", cls.forward)


def _experts_of(held: dict[str, Tensor], x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    gate, up = torch.einsum("th,tkih->tki", x, held["gate_up_proj"][ids]).chunk(2, -1)
    each = torch.einsum("tki,tkhi->tkh", F.silu(gate) * up, held["down_proj"][ids])
    return (each * weights[..., None]).sum(1)
