"""`patch(model)`: puts our kernels into one transformers model, and undoes it.

Only the instance changes: forwards are bound to its modules, and the model gets its own copy of the
config. Another model of the same class, even one made from the same config object, keeps the stock
code.
"""

import threading
from collections import Counter
from collections.abc import Collection, Iterator
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .._forks import held_over_forks
from ..launch import argument_error
from . import probe
from .attention import register
from .continuous_codes import KV_DTYPE, check_kv_dtype
from .files import require_transformers
from .hooks import wrapped, wrapper_of
from .kinds import KINDS, RECOGNISERS
from .linear_attention import WIDTHS
from .method import NAME, Method, place_of
from .quantized import Quantized, quantize
from .saved import BATCHING, attributes, method_of

_MARK = "tilewright_report"
_ALONE = held_over_forks(threading.RLock())  # held by who changes a model: two at once would each take the other's forwards for stock ones


class _Absent:
    """Marks an absent value. It is a class, so a deep copy of a report still recognises it."""


@dataclass(frozen=True, slots=True)
class Replaced:
    """`count` modules of a class that now run an op. names: their names in their parents."""

    op: str
    module: str
    count: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Kept:
    """`count` modules of a class that stay in PyTorch, and why."""

    module: str
    count: int
    names: tuple[str, ...]
    reason: str


@dataclass(slots=True, eq=False)
class Report:
    """What `patch` did to one model.

    Prints as a table; `undo()` restores the model, also at the end of a `with` block.
    """

    model: str
    replaced: tuple[Replaced, ...]
    kept: tuple[Kept, ...]
    _changes: list[tuple[Any, str, Any]] = field(default_factory=list, repr=False)
    _quantized: Quantized = field(default_factory=Quantized, repr=False)

    def undo(self) -> None:
        """Restores every attribute that `patch` set, and the modules that it quantised. A second
        call does nothing.
        """
        with _ALONE:
            self._undo_from(0)
            self._quantized.undo()

    def _undo_from(self, first: int) -> None:
        while len(self._changes) > first:
            owner, name, before = self._changes.pop()
            if before is _Absent:
                owner.__dict__.pop(name, None)
            else:
                owner.__dict__[name] = before

    def __enter__(self) -> "Report":
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON types."""
        return {
            "model": self.model,
            "replaced": [{"op": r.op, "module": r.module, "count": r.count, "names": list(r.names)} for r in self.replaced],
            "kept": [{"module": k.module, "count": k.count, "names": list(k.names), "reason": k.reason} for k in self.kept],
        }

    def __str__(self) -> str:
        lines = [f"{self.model} on tilewright kernels"]
        lines += [f"  {r.count:>4} {r.module:<22} {r.op:<10} {' '.join(r.names)}" for r in self.replaced]
        lines += ["kept in PyTorch"]
        lines += [f"  {k.count:>4} {k.module:<22} {k.reason}" for k in self.kept]
        return "\n".join(lines)


def patch(
    model: nn.Module, *, only: Collection[str] | None = None, skip: Collection[str] = (), weights: str | None = None, kv_dtype: str | None = None
) -> Report:
    """Replaces modules of one transformers model with Tilewright's kernels, if they compute the
    same: matrix products, norms, RoPE, gated MLPs, mixtures of experts and attention.

    `patch` finds out what a module computes by calling its code on random rows (docs/models.md), so
    the model may be of any type. Modules without a matching kernel stay in PyTorch, and the report
    says why.

    Call the model under torch.no_grad() or torch.inference_mode(), as `generate` does: the kernels
    have no backward.

    Args:
        model: a transformers model with its weights, with or without its language-model head.
        only: the kinds to replace, of "linear", "norms", "mlp", "moe", "rope", "attention"; default
            all.
        skip: the kinds to leave alone.
        weights: quantise the model's Linear modules, except the head, to this format (`FORMATS`),
            rounded to nearest; the head too with "int4-128,head=int8". The originals are kept in
            host memory for `undo()`, which puts them where the model is by then.
        kv_dtype: "fp8": the pages of continuous batching hold keys and values as e4m3, with a scale
            for each token and head (docs/serving.md). Caches of `generate` keep the model's dtype.
    Returns: what was replaced, what was not and why. Its `undo()` restores the model exactly.
    Raises:
        TypeError: `model` is not a transformers model.
        ValueError: a kind is unknown, the model is already patched or has no weights, or nothing in
            it can be replaced. The model is unchanged.
    """
    require_transformers("tilewright.patch")
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel (before torch.compile), got {type(model).__name__}")
    if any(x.is_meta for x in model.parameters()):
        raise argument_error("model", "one that has its weights", "weights on the meta device: load them first")
    kinds = _chosen(only, skip)
    check_kv_dtype(kv_dtype, model)
    if weights is not None and "linear" not in kinds:  # they would be quantised all the same, and the report not say so
        raise argument_error("weights", 'None where the kind "linear" is left alone', repr(weights))
    with _ALONE:
        if _MARK in model.__dict__:
            raise argument_error("model", "unpatched", "one that patch() has changed already: call undo() on its report first")
        report = Report(type(model).__name__, (), ())
        try:
            if weights is not None:
                report._quantized = quantize(model, weights)
            _replace(report, model, kinds, kv_dtype)
        except BaseException:  # also Ctrl-C
            report.undo()
            raise
    return report


def _replace(report: Report, model: nn.Module, kinds: Collection[str], kv_dtype: str | None) -> None:
    found = _found(model, kinds)
    if turning := [one for one in found.methods if one[1].op in _TOGETHER]:
        _replace_attention(report, model, found, turning)
    if not found.methods:
        raise argument_error("model", "one with modules that our kernels can replace", f"a {report.model} in which nothing matched")
    _apply(report, [(module, method) for module, method in found.methods if method.maker and method.op not in _TOGETHER])
    report.replaced, report.kept = found.lines()
    if kv_dtype is not None:
        if BATCHING.name not in model.__dict__:
            raise argument_error("kv_dtype", f"None for a {report.model} whose attention stays in PyTorch", repr(kv_dtype))
        _set(report, model, KV_DTYPE, kv_dtype)
    _set(report, model, _MARK, report)


def _chosen(only: Collection[str] | None, skip: Collection[str]) -> list[str]:
    for name, given in (("only", only), ("skip", skip)):
        if isinstance(given, str) or not isinstance(given, Collection | None) or not set(given or ()) <= set(KINDS):
            raise argument_error(name, f"a list of kinds, of {', '.join(KINDS)}", repr(given))
    return [kind for kind in KINDS if (only is None or kind in only) and kind not in (skip or ())]


_ORDER = (
    "matmul",
    "quantized_matmul",
    "rms_norm",
    "layer_norm",
    "silu_mul",
    "moe_route",
    "moe",
    "quantized_moe",
    "rope",
    "attention",
    "causal_conv1d",
    "gated_delta_rule",
    "ssd",
    "rms_norm_gated",
    "mla_decode",
    "sparse_index",
    "sparse_decode",
)
_TOGETHER = ("rope", "attention", "sparse_index", "sparse_decode")  # replaced in one trial: none can be called alone


@dataclass(slots=True)
class _Found:
    """The modules that match, and those that stay with the reason. names: of each in its parent."""

    names: dict[nn.Module, str] = field(default_factory=dict)
    methods: list[tuple[nn.Module, Method]] = field(default_factory=list)
    kept: list[tuple[nn.Module, str]] = field(default_factory=list)

    def keep(self, methods: Collection[tuple[nn.Module, Method]], reason: str) -> None:
        """Modules that stay after all."""
        self.methods = [one for one in self.methods if one not in methods]
        self.kept += [(module, f"{method.op}: {reason}") for module, method in methods]

    def lines(self) -> tuple[tuple[Replaced, ...], tuple[Kept, ...]]:
        done: dict[tuple[str, str], Counter[str]] = {}
        left: dict[tuple[str, str], Counter[str]] = {}
        # Linear attention takes the weights of its convolution and never calls that module.
        convolutions: list[Any] = [module.conv1d for module, method in self.methods if method.op in WIDTHS]
        computed = [(module, method.op) for module, method in self.methods] + [(module, "causal_conv1d") for module in convolutions]
        for module, op in computed:
            done.setdefault((op, type(module).__name__), Counter())[self.names[module]] += 1
        for module, reason in self.kept:
            if module not in convolutions:
                left.setdefault((type(module).__name__, reason), Counter())[self.names[module]] += 1
        ordered = sorted(done.items(), key=lambda line: _ORDER.index(line[0][0]))
        return (
            tuple(Replaced(op, kind, names.total(), tuple(names)) for (op, kind), names in ordered),
            tuple(Kept(kind, names.total(), tuple(names), reason) for (kind, reason), names in left.items()),
        )


def _found(model: nn.Module, kinds: Collection[str]) -> _Found:
    found, verdicts = _Found(), {}
    for name, module in _named_modules(model):
        found.names[module] = name
        known, looks = False, (probe.looks(module), place_of(module))
        for kind, recognise in RECOGNISERS:
            if kind not in kinds:
                continue
            key = (recognise, looks)
            if key not in verdicts:
                with probe.own_numbers():
                    verdicts[key] = recognise(module)
            verdict = verdicts[key]
            if isinstance(verdict, Method) and "forward" in module.__dict__ and wrapper_of(module) is None:
                verdict = "its forward is replaced on this instance already (a hook of accelerate or of expert parallelism?)"
            known = known or verdict is not None
            if isinstance(verdict, Method):
                found.methods.append((module, verdict))
            elif verdict is not None:
                found.kept.append((module, verdict))
        if not known and (reason := _reason(module)):
            found.kept.append((module, reason))
    return found


def _named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, by its name in its parent (digits of a ModuleList left out)."""
    for path, module in model.named_modules():
        yield next((part for part in reversed(path.split(".")) if part and not part.isdigit()), "model"), module


def _reason(module: Any) -> str | None:
    """Why a module of no kind stays, if it computes something and does not only call others."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    if isinstance(module, nn.Embedding):
        return "gathers rows, computes nothing" if type(module).forward is nn.Embedding.forward else "gathers rows and scales them"
    if any("inv_freq" in name for name in module._buffers):
        return "cos and sin, once per forward for all layers"
    if isinstance(module, GradientCheckpointingLayer):
        return "its two residual additions"
    held = any(x is not None for group in (module._parameters, module._buffers) for x in group.values())
    return "no kernel of ours computes it" if held else None


def _set(report: Report, owner: Any, name: str, value: Any) -> None:
    report._changes.append((owner, name, owner.__dict__.get(name, _Absent)))
    owner.__dict__[name] = value


def _apply(report: Report, methods: Collection[tuple[nn.Module, Method]]) -> None:
    """Binds methods to their modules."""
    of_module: dict[nn.Module, dict[str, Method]] = {}
    for module, method in methods:
        of_module.setdefault(module, {})[method.name] = method
    for module, own in of_module.items():
        wrapper = wrapper_of(module) if "forward" in own else None
        if wrapper is not None:
            _set(report, module, "forward", wrapped(wrapper, module, method_of(module, own.pop("forward"))))
        for name, value in attributes(module, own).items() if own else ():
            _set(report, module, name, value)


def _replace_attention(report: Report, model: Any, found: _Found, methods: list[tuple[nn.Module, Method]]) -> None:
    """Rotations and attention, as far as the model says the same with them.

    No part of attention can be called alone. So the model reads a few tokens, with its own code and
    with ours.
    """
    key = (type(model), repr(model.config), str(place_of(model)), *((type(module), method) for module, method in methods))
    if key in _TRIED:
        _bind(report, model, methods)
        return
    theirs = probe.attempt(lambda: probe.model_outputs(model))
    if theirs is None:
        found.keep(methods, "the model cannot be tried: it does not read input_ids and attention_mask alone")
        return
    turns, attends = ([one for one in methods if (one[1].op == "rope") is turns] for turns in (True, False))
    reason = _try(report, model, methods, theirs)
    if reason is None:
        _TRIED.add(key)
        return
    for part, other in ((turns, attends), (attends, turns)):
        if part and other and _try(report, model, part, theirs) is None:
            found.keep(other, reason)
            return
    found.keep(methods, reason)


_TRIED: set[tuple[Any, ...]] = set()  # models of which all of attention was replaced: their code and config
_FAR = {torch.float32: 1e-3, torch.float64: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}


def _bind(report: Report, model: Any, methods: list[tuple[nn.Module, Method]]) -> None:
    _apply(report, [one for one in methods if one[1].maker])
    if attends := [module for module, method in methods if method.op == "attention"]:
        _use_attention(report, model, attends)


def _try(report: Report, model: Any, methods: list[tuple[nn.Module, Method]], theirs: list[Tensor]) -> str | None:
    """Applies these, unless the model then says something else: then the reason, and no change."""
    before = len(report._changes)
    _bind(report, model, methods)
    try:
        error = probe.far_apart(probe.model_outputs(model), theirs)
        reason = None if error <= _FAR.get(theirs[0].dtype, 0.1) else f"with it the model's outputs are {error:.2g} off"
    except Exception as raised:  # whatever a model's code makes of our functions
        reason = str(raised).splitlines()[0] if str(raised) else type(raised).__name__
    if reason is not None:
        report._undo_from(before)
    return reason


def _use_attention(report: Report, model: Any, modules: Collection[nn.Module]) -> None:
    """Selects our attention in copies of the configs, since other models may share the objects."""
    register()
    own: dict[int, Any] = {}
    for module in modules:
        shared = module.__dict__["config"]
        own.setdefault(id(shared), (shared, copy(shared)))[1].__dict__["_attn_implementation_internal"] = NAME
    for module in model.modules():
        config = module.__dict__.get("config")
        if id(config) in own:
            _set(report, module, "config", own[id(config)][1])
    if hasattr(model, "init_continuous_batching"):
        for name, value in attributes(model, {BATCHING.name: BATCHING}).items():
            _set(report, model, name, value)
