"""What differs between the families that `read` takes: norms, rotations, windows and scales."""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import permutations
from typing import Any

import torch
from torch import nn

from ..launch import argument_error
from ..models import experts, kinds, probe
from ..models.forwards import number_of
from ..models.method import Method
from ..models.quantized import QuantizedLinear
from ..ops.common.routing import check_routing
from .layers import LayerNorm, Norm, Rope
from .recurrent import GatedNorm

_FORMS: dict[tuple[Any, ...], Method] = {}  # of modules: what those that look the same compute is found once


def _form(recognise: Any, module: nn.Module, what: str) -> dict[str, Any]:
    """The options of what a module computes, as `patch` finds them."""
    key = recognise, probe.looks(module)
    found = _FORMS.get(key)
    if found is None:
        with torch.no_grad():
            verdict = recognise(module)
        if not isinstance(verdict, Method):
            raise argument_error(f"a {type(module).__name__}", what, verdict or "one that computes something else")
        found = _FORMS[key] = verdict
    return dict(found.options)


def norm_of(module: Any) -> Norm:
    how = _form(kinds.norm, module, "a norm by the root mean square of rows")
    if "offset" not in how:
        raise argument_error(f"a {type(module).__name__}", "an RMSNorm with a weight", "another norm")
    return Norm(getattr(module, how["weight"]).data, number_of(module, how["eps"]), round_before_weight=how["rounded"], weight_offset=how["offset"])


def stream_norm_of(module: Any) -> Norm | LayerNorm:
    """Of rows of the stream."""
    how = _form(kinds.norm, module, "a norm of rows")
    if "offset" in how:
        return norm_of(module)
    weight, bias = (None if how[part] is None else getattr(module, how[part]).data for part in ("weight", "bias"))
    return LayerNorm(weight, bias, number_of(module, how["eps"]))


def norms_of(layer: Any) -> tuple[Norm | LayerNorm | None, Norm | None, Norm | LayerNorm | None, Norm | None]:
    """In front of the attention, behind it, in front of the MLP, and behind that."""
    for names in (
        ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),  # GLM-4
        ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),  # Gemma 2
        (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),  # OLMo 2
        ("input_layernorm", None, "pre_ff_layernorm", None),  # Bamba
        ("input_layernorm", None, "post_attention_layernorm", None),
        ("norm", None, None, None),  # Mamba-2, Nemotron-H: layers of one half
        ("input_layernorm", None, None, None),  # Cohere: both halves read the same rows
    ):
        if all(name is None or getattr(layer, name, None) is not None for name in names):
            first, third = (None if name is None else stream_norm_of(getattr(layer, name)) for name in names[::2])
            second, fourth = (None if name is None else norm_of(getattr(layer, name)) for name in names[1::2])
            inside = getattr(getattr(layer, "mlp", None), "post_mlp_layernorm", None)  # A.X-K1: of its mixtures alone
            return first, second, third, fourth if inside is None else norm_of(inside)
    raise argument_error(f"a {type(layer).__name__}", "a layer with the norms of a known family", [name for name, _ in layer.named_children()])


def pairs_of(layers: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Each layer with an attention or a state, and the layer that is its MLP; None if that is a
    part of it, or if there is none (Nemotron-H).
    """
    pairs: list[tuple[Any, Any]] = []
    for layer in layers:
        if getattr(layer, "block_type", None) not in ("mlp", "moe"):
            pairs.append((layer, None))
        elif pairs and pairs[-1][1] is None:
            pairs[-1] = (pairs[-1][0], layer)
        else:
            raise argument_error("a layer that is an MLP", "behind one with an attention or a state", "the first one, or one behind another MLP")
    return pairs


def head_norms(module: Any) -> dict[str, Any]:
    """The norms of queries and keys: of each head, or of all together."""
    if getattr(module, "q_norm", None) is None:
        return {}
    norms = norm_of(module.q_norm), norm_of(module.k_norm)
    if len(norms[0].weight) != module.head_dim:
        return {"whole_norms": norms}
    # The append takes a weight as it is; in fp32 its sum with an offset is exact.
    whole = (norm if not norm.weight_offset else Norm(norm.weight.float() + norm.weight_offset, norm.eps, norm.round_before_weight) for norm in norms)
    return dict(zip(("q_norm", "k_norm"), whole, strict=True))


def gated_norm_of(module: Any) -> GatedNorm:
    how = _form(kinds.gated_norm, module, "a norm with a gate that rms_norm_gated computes")
    return GatedNorm(module.weight.data, getattr(module, how.pop("eps")), **how)


def routing_of(module: Any, router: Any) -> dict[str, Any]:
    """How a mixture of experts chooses and weighs them, as `Experts` takes it. A tensor for the
    choice that its router is given is a part of the mixture.
    """
    how = _form(experts.choice, router, "a router whose rule moe_route computes")
    path, names, count = how.pop("corrected"), how.pop("groups"), len(router.weight)
    given = [x for x in (*module._parameters.values(), *module._buffers.values()) if x is not None and x.shape == (count,)] if path == "" else []
    groups = {} if names is None else {"groups": getattr(router, names[0]), "top_groups": getattr(router, names[1])}
    check_routing(count, how["top_k"], groups.get("groups", 0), groups.get("top_groups", 0), 0)
    how["logits_dtype"] = how["logits_dtype"] or router.weight.dtype
    return {**how, **groups, "bias": experts.correction(router, path, *given)}


def mixers_of(layer: Any) -> list[Any]:
    """The state of a layer and its attention, or the one that it has."""
    found = [part for name in ("linear_attn", "mamba", "mixer", "self_attn") if (part := getattr(layer, name, None)) is not None]
    if not found:
        raise argument_error(f"a {type(layer).__name__}", "a layer with an attention or a state", [name for name, _ in layer.named_children()])
    return found


def mlp_of(module: Any) -> tuple[tuple[str, ...], bool, tuple[float, float]]:
    """Of a gated MLP the names of its matrices, whether its activation is the tanh form of GELU,
    and the factors of the gate and of the result.
    """
    factors = float(getattr(module, "gate_multiplier", 1.0)), float(getattr(module, "down_multiplier", 1.0))
    if factors == (1.0, 1.0):
        how = _form(kinds.mlp, module, "a gated MLP with SiLU or tanh-GELU")
        if how["up_first"]:
            raise argument_error(f"a {type(module).__name__}", "a gated MLP whose gate comes first in one matrix", "one whose gate comes behind")
        return how["names"], how["gelu"], factors
    return _form(_silu_of_product, module, "a gated MLP with SiLU and factors of the gate and the result")["names"], False, factors


PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu_squared": lambda x: x.relu() ** 2,
    "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
    "gelu": nn.functional.gelu,
    "relu": nn.functional.relu,
}


def plain_mlp_of(module: Any) -> tuple[str, str, str] | None:
    """Of an MLP without a gate: the names of its matrices, up and down, and of its activation."""
    linears = [name for name, part in module.named_children() if isinstance(part, nn.Linear | QuantizedLinear)]
    sizes = [(getattr(module, name).out_features, getattr(module, name).in_features) for name in linears]
    if len(linears) != 2 or sizes[0] != sizes[1][::-1]:
        return None
    how = _form(_plain, module, "an MLP whose activation is GELU, ReLU or the square of ReLU")
    return *how["names"], how["activation"]


def _plain(module: Any) -> Method | None:
    """down(act(up(x)))."""
    for name, act in PLAIN.items():
        found = _computed(module, 2, lambda x, up, down, act=act: down(act(up(x))))
        if found is not None:
            return Method("matmul", None, (*found.options, ("activation", name)))
    return None


def _silu_of_product(module: Any) -> Method | None:
    """down(silu(gate(x) * factor) * up(x)) * factor."""
    first, second = module.gate_multiplier, module.down_multiplier
    return _computed(module, 3, lambda x, gate, up, down: down(nn.functional.silu(gate(x) * first) * up(x)) * second)


def _computed(module: Any, matrices: int, formula: Callable[..., torch.Tensor]) -> Method | None:
    """Whether a module computes a formula of rows and so many matrices, the last one back to their
    width: the names of these.
    """
    narrow, wide = probe.WIDTHS
    x, shapes = probe.rows(narrow), [*[(wide, narrow)] * (matrices - 1), (narrow, wide)]
    linears = [name for name, part in module.named_children() if isinstance(part, nn.Linear | QuantizedLinear)]
    for names in permutations(linears) if len(linears) == matrices else ():
        parts = {
            name: probe.linear(*shape, getattr(module, name).bias is not None, dtype=torch.float64, device="cpu", seed=seed)
            for seed, (name, shape) in enumerate(zip(names, shapes, strict=True))
        }
        found = probe.attempt(partial(type(module).forward, probe.stand_in(module, {}, parts), x))
        if probe.same(found, formula(x, *(parts[name] for name in names))):
            return Method("matmul", None, (("names", names),))
    return None


def window_of(module: Any, config: Any) -> int | None:
    """Keys that a query sees."""
    if getattr(module, "is_sliding", None) is False or not kinds.passes(module, "sliding_window"):
        return None
    window: int | None = module.sliding_window if hasattr(module, "sliding_window") else getattr(config, "sliding_window", None)
    return window


def softcap_of(module: Any) -> float | None:
    """Of scores, if the module's code asks for it: that of Gemma 3 holds one and does not."""
    return getattr(module, "attn_logit_softcapping", None) if kinds.passes(module, "softcap") else None


def rope_types(config: Any) -> set[str]:
    """Of all kinds of layers."""
    found = getattr(config, "rope_parameters", None) or {}
    each = [value for value in found.values() if isinstance(value, dict)] or [found]
    return {value.get("rope_type", "default") for value in each}


def scales_of(stem: Any, config: Any) -> tuple[float, float, float]:
    """Of the embedding, of what a layer adds, and of the logits."""
    table = stem.get_input_embeddings()
    scale = getattr(table, "embed_scale", None)
    if isinstance(scale, torch.Tensor):
        scale = float(scale.to(table.weight.dtype)) if not scale.is_meta else table.embedding_dim**0.5
    embedding = float(said(config, "embedding_multiplier", 1.0)) if scale is None else scale
    logits = float(said(config, "lm_head_multiplier", 1.0)) / float(said(config, "logits_scaling", 1.0))
    logits *= float(said(config, "logit_scale", 1.0))  # Cohere
    return embedding, float(said(config, "residual_multiplier", 1.0)), logits


def said(config: Any, name: str, default: Any) -> Any:
    """A config's value, or the default.

    Raises: ValueError for a value of a field that the config's class does not have: code of
        transformers would not read it.
    """
    value = getattr(config, name, None)
    if value is None:
        return default
    if value != default and not hasattr(type(config), name):
        raise argument_error(f"model.config.{name}", f"left out, because a {config.model_type} model does not read it", value)
    return value


class Ropes:
    """The tables of a model's rotations, made once."""

    def __init__(self, stem: Any, max_len: int) -> None:
        self._rotary: Any = getattr(stem, "rotary_emb", None)
        self._max_len, self._device = max_len, stem.get_input_embeddings().weight.device
        self._tables: dict[tuple[str | None, bool], Rope] = {}

    def of(self, kind: str | None, interleaved: bool) -> Rope:
        """kind: of layer, if its kinds differ; "" for layers that rotate nothing."""
        key = (kind, interleaved)
        if key not in self._tables:
            prefix = f"{kind}_" if kind else ""
            inv_freq, scaling = getattr(self._rotary, f"{prefix}inv_freq", None), getattr(self._rotary, f"{prefix}attention_scaling", 1.0)
            if kind == "":
                inv_freq, scaling = torch.zeros_like(self._rotary.inv_freq), 1.0  # by an angle of 0
            if inv_freq is None:
                raise argument_error("the model's rotations", "one of all layers, or one of each kind of layer", type(self._rotary).__name__)
            self._tables[key] = Rope.table(inv_freq, scaling, self._max_len, interleaved=interleaved)
        return self._tables[key]

    def of_attention(self, module: Any) -> Rope:
        if self._rotary is None:  # hybrids may have no positions: all turn by an angle of 0
            if ("", False) not in self._tables:
                self._tables["", False] = Rope.table(torch.zeros(module.head_dim // 2, device=self._device), 1.0, self._max_len)
            return self._tables["", False]
        forms = {form for _, form in _form(kinds.rope, module, "attention with a known rotation")["functions"]}
        interleaved = forms <= {"neighbours", "repeated"}
        if not interleaved and not forms <= {"half_split", "by_halves"}:
            raise argument_error(f"the rotation of a {type(module).__name__}", "of halves or of neighbours", sorted(forms))
        if hasattr(self._rotary, "inv_freq"):
            turns = bool(getattr(module, "use_rope", True))
            # Layers of these without a window have no positions.
            if type(module).__name__.startswith("Exaone") and getattr(module, "is_sliding", None) is False and module.sliding_window is not None:
                turns = False
            if type(module).__name__.startswith("Cohere2"):
                turns = module.sliding_window is not None
            return self.of(None if turns else "", interleaved)
        return self.of(module.config.layer_types[module.layer_idx], interleaved)
