"""`patch(model)`: puts our kernels into one transformers model, and undoes it.

Only the instance changes: forwards are bound to its modules, and the model gets its own copy of the
config. Another model of the same class, even one made from the same config object, keeps the stock
code.
"""

from collections import Counter
from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..launch import argument_error
from .attention import register
from .files import require_transformers
from .forwards import NAME
from .hooks import wrapped, wrapper_of
from .rows import ABSORBED, CONTAINERS, FAMILIES, KEPT, ROWS, Row
from .saved import BATCHING, attributes, method_of

_MARK = "tilewright_report"


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

    def undo(self) -> None:
        """Restores every attribute that `patch` set. A second call does nothing."""
        while self._changes:
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


def patch(model: nn.Module, *, attention: bool = True) -> Report:
    """Replace the matmuls, norms, RoPE, activations and attention of one transformers model by
    Tilewright's kernels.

    Call the model under torch.no_grad() or torch.inference_mode(), as `generate` does: the kernels
    have no backward.

    Args:
        model: a transformers model of a type in `FAMILIES` (docs/models.md), with or without its
            language-model head.
        attention: False keeps transformers' attention, for options that ours refuses.
    Returns: what was replaced, what was not and why. Its `undo()` restores the model exactly.
    Raises:
        TypeError: `model` is no transformers model.
        ValueError: its type is unknown, it is patched already, or nothing in it matched; the model
            is unchanged.
    """
    require_transformers("tilewright.patch")
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel (before torch.compile), got {type(model).__name__}")
    if _MARK in model.__dict__:
        raise argument_error("model", "unpatched", "one that patch() has changed already: call undo() on its report first")
    prefix = FAMILIES.get(model.config.model_type)
    if prefix is None:
        raise argument_error("model.config.model_type", f"one of {sorted(FAMILIES)}", model.config.model_type)

    rows = [row for row in ROWS if attention or row.op not in ("attention", "mla_decode")]
    found = _found(model, rows, prefix)
    if not found.replaced:
        raise argument_error("model", f"made of {prefix}'s modules", f"a {type(model).__name__} in which nothing matched")

    order = {row.op: i for i, row in enumerate(rows)}
    report = Report(
        type(model).__name__,
        tuple(Replaced(op, kind, names.total(), tuple(names)) for (op, kind), names in sorted(found.replaced.items(), key=lambda r: order[r[0][0]])),
        tuple(Kept(kind, names.total(), tuple(names), reason) for (kind, reason), names in found.kept.items()),
    )
    if any(r.op == "attention" for r in report.replaced):
        register()
        _use_attention(report, model)
        if hasattr(model, "init_continuous_batching"):
            found.methods.setdefault(model, {})["init_continuous_batching"] = BATCHING
    for module, methods in found.methods.items():
        wrapper = wrapper_of(module) if "forward" in methods else None
        if wrapper is not None:
            _set(report, module, "forward", wrapped(wrapper, module, method_of(module, "forward", methods.pop("forward"))))
        for name, value in attributes(module, methods).items() if methods else ():
            _set(report, module, name, value)
    _set(report, model, _MARK, report)
    return report


@dataclass(slots=True)
class _Found:
    """The modules that match, by (op, class), and those that stay, by (class, reason). methods:
    of which module, and the op that each runs.
    """

    replaced: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)
    kept: dict[tuple[str, str], Counter[str]] = field(default_factory=dict)
    methods: dict[nn.Module, dict[str, str]] = field(default_factory=dict)


def _found(model: nn.Module, rows: list[Row], prefix: str) -> _Found:
    found = _Found()
    for name, module in _named_modules(model):
        kind = type(module).__name__
        matching = [row for row in rows if row.matches(kind, prefix)]
        for row in matching:
            reason = _reason_to_keep(row, module)
            if reason is not None:
                found.kept.setdefault((kind, f"{row.op}: {reason}"), Counter())[name] += 1
                continue
            found.replaced.setdefault((row.op, kind), Counter())[name] += 1
            if row.forward is not None:
                found.methods.setdefault(module, {})[row.method] = row.op
        if not matching and (reason := _reason_unmatched(kind, prefix)):
            found.kept.setdefault((kind, reason), Counter())[name] += 1
    return found


def _named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every module once, by its name in its parent (digits of a ModuleList left out)."""
    for path, module in model.named_modules():
        yield next((part for part in reversed(path.split(".")) if part and not part.isdigit()), "model"), module


def _reason_to_keep(row: Row, module: nn.Module) -> str | None:
    if row.forward is not None and "forward" in module.__dict__ and wrapper_of(module) is None:
        return "its forward is replaced on this instance already (a hook of accelerate or of expert parallelism?)"
    return row.keep(module)


def _reason_unmatched(kind: str, prefix: str) -> str | None:
    for name, reason in KEPT.items():
        if name.format(prefix) == kind:
            return reason
    known = {name.format(prefix) for name in CONTAINERS} | set(ABSORBED)
    return None if kind in known else "no row for this class"


def _set(report: Report, owner: Any, name: str, value: Any) -> None:
    report._changes.append((owner, name, owner.__dict__.get(name, _Absent)))
    owner.__dict__[name] = value


def _use_attention(report: Report, model: Any) -> None:
    """Selects our attention in a copy of the config, since other models may share the object."""
    shared = model.config
    own = copy(shared)
    own._attn_implementation = NAME
    for module in model.modules():
        if module.__dict__.get("config") is shared:
            _set(report, module, "config", own)
