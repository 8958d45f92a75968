"""What `patch` replaces: each kind of module, how it is recognised, and the op that takes over.

A recogniser looks at what a module holds and what its code computes, not at its name. It returns
a `Method`, the reason why a module of its kind stays in PyTorch, or None for a module of another
kind.
"""

import inspect
from collections.abc import Callable
from itertools import permutations, product
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..launch import FLOATS, HALVES, dtype_name
from ..ops import rms_norm_gated, sparse_decode, sparse_index
from ..ops.layer_norm import layer_norm
from ..ops.rms_norm import rms_norm
from . import experts, linear_attention, probe
from .forwards import gated_mlp, number_of, plain
from .hooks import wrapper_of
from .method import Method, Verdict, place_of
from .quantized import QuantizedLinear
from .rotations import ROTATIONS, rotation_of

KINDS = ("linear", "norms", "mlp", "moe", "rope", "attention")


def linear(module: Any) -> Verdict:
    """x times a matrix that is held either way round, plus a bias."""
    if isinstance(module, QuantizedLinear):
        return Method("quantized_matmul", None)  # by its own forward
    if type(module).forward is nn.Linear.forward:
        if plain(module, "weight") or wrapper_of(module) is not None:
            return _wide(module.weight) or Method("matmul", "linear")  # transformers' tensor parallelism lends its forward a plain part of the weight
        return f"matmul: weight is a {type(module.weight).__name__}, not a plain tensor"
    weight, bias = (module._parameters.get(name) for name in ("weight", "bias"))
    held = [x for x in module._parameters.values() if x is not None]
    if weight is None or weight.dim() != 2 or any(x is not weight and x is not bias for x in held) or not _alone(module):
        return None
    if not plain(module, "weight") or isinstance(module, nn.Embedding):
        return None
    tensors = {"weight": probe.random(*weight.shape)} | ({} if bias is None else {"bias": probe.random(*bias.shape, seed=1)})
    for transposed, matrix in ((True, tensors["weight"].T), (False, tensors["weight"])):
        x = probe.rows(len(matrix), seed=2)
        found = probe.attempt(lambda x=x: type(module).forward(probe.stand_in(module, tensors), x))  # type: ignore[misc]
        if (bias is None or bias.shape == matrix.shape[1:]) and probe.same(found, x @ matrix + tensors.get("bias", 0)):
            return _wide(weight) or Method("matmul", "linear", (("transposed", transposed),))
    return f"matmul: {type(module).__name__} has a forward of its own" if isinstance(module, nn.Linear) else None


def _wide(weight: Tensor) -> str | None:
    """Why a matrix stays whose dtype `matmul` does not take."""
    return None if weight.dtype in FLOATS else f"matmul: weight must be bfloat16, float16 or float32, got {dtype_name(weight.dtype)}"


def norm(module: Any) -> Verdict:
    """Of rows: by their root mean square, or with their mean taken off."""
    held = {name: x for name, x in module._parameters.items() if x is not None}
    called_norm = "norm" in type(module).__name__.lower()
    if len(held) > 2 or not _alone(module) or not (held or called_norm):
        return None
    shapes = {tuple(x.shape) for x in held.values()} or {tuple(getattr(module, "normalized_shape", None) or probe.WIDTHS[:1])}
    if len(shapes) != 1 or len(shape := shapes.pop()) != 1:
        return f"rms_norm: its weight must have 1 axis, its bias the same, got {[list(x.shape) for x in held.values()]}" if called_norm else None
    dtype, device = place_of(module) or (torch.float32, torch.device("cpu"))
    cols = shape[0]
    # A constant eps shows where rows are small, a bound where they are large.
    x = probe.random(probe.ROWS, cols) * torch.tensor([1.0, 1.0, probe.LARGE, 0.1, 3e-3, 1e-3]).double()[:, None]
    weights = {name: 1 + probe.random(cols, seed=i) / 4 for i, name in enumerate(held)}
    found = probe.attempt(lambda: type(module).forward(probe.stand_in(module, weights), x))
    for eps in _epsilons(module, dtype):
        value = number_of(module, eps)
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + value)
        if not held and probe.same(found, normed):
            return Method("rms_norm", "rms_norm_of_ones", (("eps", eps),))
        for offset in (0.0, 1.0) if len(held) == 1 else ():
            own = next(iter(weights.items()))
            if probe.same(found, normed * (own[1] + offset)):
                return _rms_norm(module, x, own, (eps, value), offset, (dtype, device))
        for names in permutations((*held, *(None,) * (2 - len(held))), 2):
            weight, bias = (None if name is None else weights[name] for name in names)
            if probe.same(found, F.layer_norm(x, shape, weight, bias, value)):
                reason = _layer_norm(module, x, weights, names, value, (dtype, device))
                options = (("eps", eps), ("weight", names[0]), ("bias", names[1]))
                return f"layer_norm: {reason}" if reason else Method("layer_norm", "layer_norm", options)
    return "rms_norm: it computes no norm of rows that rms_norm or layer_norm computes" if called_norm else None


def _epsilons(module: Any, dtype: torch.dtype) -> list[str | float]:
    """What a norm may add: numbers of it and of its config, by their paths, and the usual ones."""
    if getattr(module, "eps", 0) is None:  # torch's RMSNorm
        return [torch.finfo(dtype).eps]
    inside = [f"{name}.{field}" for name, part in vars(module).items() if hasattr(part, "__dict__") for field in probe.epsilons_of(part)]
    return [*probe.epsilons_of(module), *inside, 1e-5, 1e-6]


def _rms_norm(
    module: Any, x: Tensor, own: tuple[str, Tensor], epsilon: tuple[str | float, float], offset: float, place: tuple[torch.dtype, torch.device]
) -> Verdict:
    """Finds whether rows are rounded before they meet the weight. own: its name and the weight."""
    (name, weight), (eps, value), (dtype, device) = own, epsilon, place
    rows, given = x.to(device, dtype), weight.to(device, dtype)
    theirs = probe.attempt(lambda: type(module).forward(probe.stand_in(module, {name: given}), rows))
    wide = rows.double()
    truth = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + value) * (given.double() + offset)

    def ours(rounded: bool) -> Tensor:
        found: Tensor = rms_norm(rows, given, value, weight_offset=offset, round_before_weight=rounded)
        return found

    rounded = False
    if dtype in HALVES and isinstance(theirs, Tensor) and theirs.dtype == dtype:
        rounded = (ours(True) != theirs).sum().item() < (ours(False) != theirs).sum().item()
    if reason := probe.why_not(lambda: ours(rounded), theirs, truth):
        return f"rms_norm: {reason}"
    return Method("rms_norm", "rms_norm", (("eps", eps), ("offset", offset), ("rounded", rounded), ("weight", name)))


def _layer_norm(
    module: Any, x: Tensor, weights: dict[str, Tensor], names: tuple[str | None, ...], value: float, place: tuple[torch.dtype, torch.device]
) -> str | None:
    """Why layer_norm may not take over. names: of its weight and its bias."""
    dtype, device = place
    rows, given = x.to(device, dtype), {name: w.to(device, dtype) for name, w in weights.items()}
    theirs = probe.attempt(lambda: type(module).forward(probe.stand_in(module, given), rows))
    weight, bias = (None if name is None else given[name] for name in names)
    wide_weight, wide_bias = (None if part is None else part.double() for part in (weight, bias))
    truth = F.layer_norm(rows.double(), rows.shape[-1:], wide_weight, wide_bias, value)
    return probe.why_not(lambda: layer_norm(rows, weight, bias, value), theirs, truth)


def gated_norm(module: Any) -> Verdict:
    """By the root mean square of a row or of groups of its columns, and a gate at either end."""
    names = list(inspect.signature(type(module).forward).parameters)
    if set(module._parameters) != {"weight"} or any(module._modules.values()) or len(names) != 3 or "gate" not in names[2]:
        return None
    if module.weight is None or module.weight.dim() != 1:
        return None
    cols = len(module.weight)
    x, gate = probe.random(probe.ROWS, cols), probe.random(probe.ROWS, cols, seed=1)
    weight = 1 + probe.random(cols, seed=2) / 4
    found = probe.attempt(lambda: type(module).forward(probe.stand_in(module, {"weight": weight}), x, gate))
    for eps in probe.epsilons_of(module):
        for groups, gate_first, sigmoid in product(_groups(module, cols), (False, True), (False, True)):
            how: dict[str, Any] = {"groups": groups, "gate_first": gate_first, "sigmoid": sigmoid}
            if probe.same(found, rms_norm_gated.reference(x, weight, gate, getattr(module, eps), **how)):
                return Method("rms_norm_gated", "rms_norm_gated", (("eps", eps), *how.items()))
    return "rms_norm_gated: it computes another norm of two rows"


def _groups(module: Any, cols: int) -> list[int]:
    """Into how many groups its columns may be cut: as whole numbers that it holds say."""
    held = {value for value in vars(module).values() if type(value) is int and value > 0 and cols % value == 0}
    return sorted({1, *held, *(cols // value for value in held)})


ACTIVATIONS: dict[bool, Callable[[Tensor], Tensor]] = {False: F.silu, True: lambda x: F.gelu(x, approximate="tanh")}


def mlp(module: Any) -> Verdict:
    """down(act(gate(x)) * up(x)), with matrices for gate and up or one for both."""
    linears: dict[str, Any] = {name: m for name, m in module._modules.items() if isinstance(m, nn.Linear | QuantizedLinear)}
    others = {name: child for name, child in module._modules.items() if name not in linears and child is not None}
    own = any(x is not None for x in module._parameters.values())
    if own or len(linears) not in (2, 3) or any(True for other in others.values() for _ in other.parameters()) or not _takes_one(module):
        return None
    candidates = [names for hidden in {m.in_features for m in linears.values()} for names in _gated(linears, hidden)]
    place = place_of(module)
    if not candidates or place is None:
        return None
    if any(probe.hooks_of(part) for other in others.values() for part in other.modules()):
        return "silu_mul: a module in it has a hook, which would not be called"
    for names in candidates:
        sharp, x = _parts(linears, names, torch.float64, "cpu"), probe.rows(probe.WIDTHS[0])
        found = probe.attempt(lambda sharp=sharp, x=x: type(module).forward(probe.stand_in(module, {}, sharp), x))  # type: ignore[misc]
        for (gelu, act), up_first in product(ACTIVATIONS.items(), (False, True)[: 4 - len(names)]):
            if probe.same(found, _mlp_of(sharp, names, act, x, up_first)):
                drops = not probe.same(probe.in_training(module, sharp, x), found)
                parts, rows = _parts(linears, names, *place), probe.random(probe.ROWS, probe.WIDTHS[0]).to(place[1], place[0])
                theirs = probe.attempt(lambda parts=parts, rows=rows: type(module).forward(probe.stand_in(module, {}, parts), rows))  # type: ignore[misc]
                truth = _mlp_of({n: m.double() for n, m in _parts(linears, names, *place).items()}, names, act, rows.double(), up_first)
                how = {"names": names, "gelu": gelu, "up_first": up_first}
                reason = probe.why_not(lambda parts=parts, how=how, rows=rows: gated_mlp(parts.__getitem__, rows, **how), theirs, truth)  # type: ignore[misc]
                beside = tuple((name, type(part).__name__) for name, part in others.items())
                return f"silu_mul: {reason}" if reason else Method("silu_mul", "mlp", (*how.items(), ("drops", drops), ("beside", beside)))
    return "silu_mul: it computes no down(act(gate) * up) with SiLU or tanh-GELU"


def _gated(linears: dict[str, Any], hidden: int) -> list[tuple[str, ...]]:
    """(gate, up, down) or (gate and up, down) by name, as their shapes allow."""
    shapes = {name: (m.out_features, m.in_features) for name, m in linears.items()}
    found = []
    for names in permutations(linears):
        inner = shapes[names[-1]][1]
        first = [(inner, hidden)] * 2 if len(names) == 3 else [(2 * inner, hidden)]
        if [shapes[name] for name in names] == [*first, (hidden, inner)]:
            found.append(names)
    return found


def _parts(linears: dict[str, Any], names: tuple[str, ...], dtype: torch.dtype, device: Any) -> dict[str, nn.Linear]:
    """Small matrices in the places of a module's own."""
    narrow, wide = probe.WIDTHS
    shapes = [*([(wide, narrow)] * 2 if len(names) == 3 else [(2 * wide, narrow)]), (narrow, wide)]
    return {
        name: probe.linear(*shape, linears[name].bias is not None, dtype=dtype, device=device, seed=seed)
        for seed, (name, shape) in enumerate(zip(names, shapes, strict=True))
    }


def _mlp_of(parts: Any, names: tuple[str, ...], act: Callable[[Tensor], Tensor], x: Tensor, up_first: bool) -> Tensor:
    gate, up = parts[names[0]](x).chunk(2, -1) if len(names) == 2 else (parts[names[0]](x), parts[names[1]](x))
    found: Tensor = parts[names[-1]](act(up) * gate if up_first else act(gate) * up)
    return found


def rope(module: Any) -> Verdict:
    """A forward that calls a function which rotates queries and keys."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None:
        return None
    scope = inspect.unwrap(type(module).forward).__globals__
    found, missing = [], []
    for name in _names(code):
        function = scope.get(name)
        if isinstance(function, FunctionType) and len(probe.arguments_of(function) or ()) in (3, 4):
            form = rotation_of(function)
            if form is not None:
                found.append((name, form))
            elif "rot" in name.lower() or "rope" in name.lower():
                missing.append(name)
    if missing:
        return f"rope: {missing[0]} computes no rotation that rope computes"
    return Method("rope", "rope", (("functions", tuple(found)),)) if found else None


def _names(code: CodeType) -> list[str]:
    """What code looks up, also in the comprehensions in it."""
    inside = [name for part in code.co_consts if isinstance(part, CodeType) for name in _names(part)]
    return [*dict.fromkeys((*code.co_names, *inside))]


def asks_for_attention(module: nn.Module) -> bool:
    """Whether its forward calls an attention that transformers selects, by AttentionInterface."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and not {"ALL_ATTENTION_FUNCTIONS", "get_interface"}.isdisjoint(code.co_names)


def attention(module: Any) -> Verdict:
    """A forward that asks transformers which attention to call."""
    if not asks_for_attention(module):
        return None
    config = getattr(module, "config", None)
    if config is None:
        return "attention: it has no config, by which transformers selects"
    if getattr(config, "output_attentions", False):
        return "attention: config.output_attentions asks for its weights"
    if not getattr(module, "is_causal", True):
        return "attention: it is bidirectional"
    kinds = getattr(config, "layer_types", None) or ()
    if any("chunked" in kind for kind in kinds):
        return "attention: it sees chunks of the sequence, which no kernel of ours masks"
    windowed = "sliding_attention" in kinds or (not kinds and getattr(config, "sliding_window", None) is not None)
    if windowed and not passes(module, "sliding_window"):
        return "attention: its window stands in the mask alone"
    return Method("attention", None)


def passes(module: Any, word: str) -> bool:
    """Whether its forward passes an argument of this name on."""
    code: Any = inspect.unwrap(type(module).forward).__code__
    return word in code.co_names or any(isinstance(x, tuple) and word in x for x in code.co_consts)


def latents(module: Any) -> Verdict:
    """Latent attention whose cache keeps latents, which `expand_kv` expands."""
    if not all(hasattr(module, name) for name in ("expand_kv", "kv_b_proj", "kv_lora_rank", "qk_rope_head_dim")):
        return None
    weight, latent, turned = module.kv_b_proj.weight, module.kv_lora_rank, module.qk_rope_head_dim
    op = "sparse_decode" if hasattr(module, "indexer") else "mla_decode"
    if type(module.kv_b_proj) is not nn.Linear or not plain(module.kv_b_proj, "weight") or wrapper_of(module.kv_b_proj) is not None:
        return f"{op}: kv_b_proj must be a plain Linear that is whole on this device"
    if module.qk_nope_head_dim + turned == latent:
        return f"{op}: latents are as wide as keys, and could not be told from them"
    if op == "sparse_decode":
        reason = sparse_decode.refused_columns(latent + turned, weight.dtype)
        return (
            f"sparse_decode: kv_lora_rank + qk_rope_head_dim must be {reason}, got {latent + turned}"
            if reason
            else Method(op, "latents", name="expand_kv")
        )
    if weight.dtype not in HALVES:
        return f"mla_decode: weights must be bfloat16 or float16, got {dtype_name(weight.dtype)}"
    if latent not in (64, 128, 256, 512) or turned not in (16, 32, 64, 128, 256) or turned >= latent:
        return (
            f"mla_decode: kv_lora_rank must be 64, 128, 256 or 512 and qk_rope_head_dim a smaller power of two from 16 on, got {latent} and {turned}"
        )
    return Method("mla_decode", "latents", name="expand_kv")


INDEXER = ("wq_b", "wk", "k_norm", "weights_proj", "n_heads", "head_dim", "qk_rope_head_dim", "softmax_scale", "index_topk", "layer_idx")


def indexer(module: Any) -> Verdict:
    """The lightning indexer in front of sparse attention over latents."""
    forward = inspect.unwrap(type(module).forward)
    if not all(hasattr(module, name) for name in INDEXER) or "update_indexer" not in getattr(forward, "__code__", indexer.__code__).co_names:
        return None
    names = [name for name in forward.__code__.co_names if isinstance(forward.__globals__.get(name), FunctionType)]
    found = [form for name in names if (form := rotation_of(forward.__globals__[name])) is not None]
    forms = [form for form in found if not ROTATIONS[form].alone]
    if len(forms) != 1:
        return f"sparse_index: its forward must call one rotation of queries and keys, got {len(forms)}"
    if module.n_heads > sparse_index.MOST_HEADS or module.head_dim > sparse_index.MOST_COLUMNS:
        most = f"up to {sparse_index.MOST_HEADS} heads of {sparse_index.MOST_COLUMNS}"
        return f"sparse_index: it must have {most}, got {module.n_heads} of {module.head_dim}"
    return Method("sparse_index", "indexer", (("rotation", forms[0]),))


def state(module: Any) -> Verdict:
    """Linear attention, which keeps a state."""
    op, _ = linear_attention.ours_of(type(module))
    if op is None:
        return None
    reason = linear_attention.keep_linear_attention(module, op)
    return f"{op}: {reason}" if reason else Method(op, "linear_attention")


def _takes_one(module: nn.Module) -> bool:
    """Whether its forward needs one argument. A call with more runs the module's own code."""
    names = probe.arguments_of(type(module).forward)
    return names is not None and len(names) == 1


def _alone(module: nn.Module) -> bool:
    """Whether it has one argument and no modules inside."""
    return not any(module._modules.values()) and _takes_one(module)


# kind, recogniser; a module may be of several
RECOGNISERS: tuple[tuple[str, Callable[[Any], Verdict]], ...] = (
    ("linear", linear),
    ("norms", norm),
    ("norms", gated_norm),
    ("mlp", mlp),
    ("moe", experts.router),
    ("moe", experts.experts),
    ("rope", rope),
    ("attention", attention),
    ("attention", latents),
    ("attention", state),
    ("attention", indexer),
)
