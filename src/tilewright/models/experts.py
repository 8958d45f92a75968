"""Mixtures of experts in transformers' models: which router and which experts ours are."""

import inspect
from collections.abc import Iterator
from itertools import product
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..launch import HALVES, dtype_name
from ..ops.common.routing import check_routing, routed
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
    verdict = choice(module)
    if not isinstance(verdict, Method):
        return verdict
    place = place_of(module)
    assert place is not None
    held, options = _tensors(module, *place), dict(verdict.options)
    x, bias = probe.random(_TOKENS, held["weight"].shape[1], dtype=place[0], device=place[1], seed=9), _given(module, *place)
    theirs = type(module).forward(_filled(module, held), x, *bias)
    mine = probe.attempt(lambda: route(_filled(module, held), x, *bias, **options))
    eps = 8 * max(torch.finfo(place[0]).eps, torch.finfo(theirs[1].dtype).eps)
    return verdict if mine is not None and _agree(mine, theirs, eps) else _ANOTHER_RULE


_ANOTHER_RULE = "moe_route: it chooses experts or weighs them by another rule"


def choice(module: Any) -> Verdict:
    """By which rule it chooses and weighs, found without a kernel; in fp32, where code in 16 bits
    computes it anyway.
    """
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or isinstance(module, nn.Embedding) or type(module).forward is nn.Linear.forward:
        return None
    names = probe.arguments_of(type(module).forward)
    own = {name for name, _ in (*module.named_parameters(), *module.named_buffers())}
    if names is None or len(names) != 1 + (_argument(module) in names) or not all(name in ("weight", "bias") or _corrects(name) for name in own):
        return None
    place = place_of(module)
    assert place is not None
    held, bias = _tensors(module, *place), _given(module, *place)
    x = probe.random(_TOKENS, weight.shape[1], dtype=place[0], device=place[1], seed=9)
    found = probe.attempt(lambda: type(module).forward(_filled(module, held), x, *bias))
    if not isinstance(found, tuple) or len(found) != 3 or not all(isinstance(t, Tensor) and t.dim() == 2 for t in found):
        return None
    logits, weights, ids = found
    if ids.dtype not in (torch.int32, torch.int64) or weights.shape != ids.shape or logits.shape != (_TOKENS, len(weight)):
        return None
    # Logits that 16 bits cannot hold are a product that was not rounded to them.
    wide = place[0] in HALVES and logits.dtype is torch.float32 and not torch.equal(logits.to(place[0]).float(), logits)
    held, bias = {name: tensor.float() for name, tensor in held.items()}, [part.float() for part in bias]
    rows = [size * x.float() for size in (1, 2, 4)]  # logits of 6 and 12 must have no bound, neither returned nor weighed
    theirs = [probe.attempt(lambda part=part: type(module).forward(_filled(module, held), part, *bias)) for part in rows]  # type: ignore[misc]
    if None in theirs:
        return _ANOTHER_RULE
    for options in _choices(module, own, ids.shape[1]):
        how = {name: value for name, value in options.items() if name not in ("corrected", "groups")}
        by = correction(_filled(module, held), options["corrected"], *bias)
        mine = [_by_definition(part, held, by, _groups(module, options["groups"]), **how) for part in rows]
        if _agree(mine[0], theirs[0], 4e-6) and all(_agree(a, b, 1e-3, 0.0) for a, b in zip(mine[1:], theirs[1:], strict=True)):
            return Method("moe_route", "router", (*options.items(), ("logits_dtype", torch.float32 if wide else None)))
    return _too_few_groups(module, len(weight), ids.shape[1]) or _ANOTHER_RULE


def _too_few_groups(module: Any, count: int, top_k: int) -> str | None:
    """Why no rule fits: its groups hold fewer experts than it chooses, and it takes masked ones."""
    for names in _GROUPS:
        if all(isinstance(getattr(module, name, None), int) for name in names):
            try:
                check_routing(count, top_k, getattr(module, names[0]), getattr(module, names[1]), 0)
            except ValueError as error:
                return f"moe_route: {error}"
    return None


def _corrects(name: str) -> bool:
    """Whether a tensor of this path is added to what experts are chosen by."""
    return name.rpartition(".")[2] == _BIAS


def _argument(module: Any) -> str | None:
    """The argument by which a forward is given such a tensor (MiniMax-M2)."""
    names = list(inspect.signature(type(module).forward).parameters)[2:]
    return names[0] if len(names) == 1 and "bias" in names[0] else None


def _filled(module: Any, tensors: dict[str, Tensor]) -> Any:
    """A stand-in with tensors by their paths, also in the modules inside."""
    inside: dict[str, dict[str, Tensor]] = {name: {} for name in module._modules}
    for path, tensor in tensors.items():
        child, _, rest = path.partition(".")
        if rest:
            inside[child][rest] = tensor
    return probe.stand_in(module, tensors, {name: _filled(module._modules[name], held) for name, held in inside.items()})


def _tensors(module: Any, dtype: torch.dtype, device: Any) -> dict[str, Tensor]:
    """Random ones by their paths; those in fp32 of a model in 16 bits stay so."""
    own = dict((*module.named_parameters(), *module.named_buffers()))
    made = {"weight": 3 * probe.random(*own["weight"].shape, dtype=dtype, device=device) * own["weight"].shape[1] ** -0.5}
    for name in own.keys() - made.keys():
        wide = torch.float32 if own[name].dtype is torch.float32 and dtype in HALVES else dtype
        made[name] = probe.random(*own[name].shape, dtype=wide, device=device, seed=5) / 2
    return made


def _given(module: Any, dtype: torch.dtype, device: Any) -> list[Tensor]:
    """What its forward is called with behind the rows."""
    if _argument(module) is None:
        return []
    return [probe.random(len(module.weight), dtype=torch.float32 if dtype in HALVES else dtype, device=device, seed=5) / 2]


def _choices(module: Any, own: set[str], top_k: int) -> Iterator[dict[str, Any]]:
    """What a router may do, by what it holds and is given."""
    scales = [1.0, *(value for name, value in module.__dict__.items() if "scal" in name and isinstance(value, float) and value != 1.0)]
    groups: list[tuple[str, str] | None] = [None]
    groups += [names for names in _GROUPS if all(isinstance(getattr(module, name, None), int) for name in names)]
    biases = [*filter(_corrects, own), *([""] if _argument(module) else []), None]
    for sigmoid, bias, normalize, scale, group in product((False, True), biases, (True, False), reversed(scales), reversed(groups)):
        yield {"top_k": top_k, "sigmoid": sigmoid, "corrected": bias, "normalize": normalize, "scale": scale, "groups": group}


def correction(module: Any, path: str | None, given: Tensor | None = None) -> Tensor | None:
    """What is added to scores before the choice. path: to it, "" for what the forward is given."""
    if path is None:
        return None
    found = attrgetter(path)(module) if path else given
    return None if found is None else found.float().flatten()


def _groups(module: Any, names: tuple[str, str] | None) -> dict[str, Any]:
    if names is None or getattr(module, names[0]) <= 1:
        return {}
    return {"groups": getattr(module, names[0]), "top_groups": getattr(module, names[1])}


def _by_definition(x: Tensor, held: dict[str, Tensor], bias: Tensor | None, groups: dict[str, Any], **how: Any) -> Routed:
    logits = F.linear(x, held["weight"], held.get("bias"))
    return logits, *routed(logits, bias=bias, **groups, **how)


def route(  # noqa: PLR0913 each is a way in which routers differ
    self: Any,
    hidden_states: Tensor,
    bias: Tensor | None = None,
    *,
    top_k: int,
    sigmoid: bool,
    corrected: str | None,
    normalize: bool,
    scale: float,
    groups: tuple[str, str] | None,
    logits_dtype: torch.dtype | None,
) -> Routed:
    """A router on our kernels. gpt-oss takes the softmax of the best alone, which is the normalised
    softmax of all.
    """
    x = hidden_states.reshape(-1, self.weight.shape[1]).to(self.weight.dtype)  # of some the weight alone is fp32
    how: dict[str, Any] = {} if logits_dtype is None else {"out_dtype": logits_dtype}
    logits = matmul(x, self.weight, getattr(self, "bias", None), trans_b=True, **how)
    by = correction(self, corrected, bias)
    weights, ids = moe_route(
        logits,
        top_k,
        sigmoid=sigmoid,
        bias=None if by is None else by.contiguous(),
        normalize=normalize,
        scale=scale,
        **_groups(self, groups),
    )
    return logits, weights, ids.long()


def _agree(ours: Routed, theirs: Routed, eps: float, least: float = 0.75) -> bool:
    """Whether enough tokens have the same experts with the same weights: two experts may tie, and
    large sigmoids do.
    """
    same, close, off = _compared(ours, theirs, eps)
    return bool(same.double().mean() >= least) and bool(same.any()) and off <= eps and bool(close[same].all())


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
        return f"moe: weights must be bfloat16 or float16, got {dtype_name(gate_up.dtype)}"
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
