"""One rank's part of a model, for an `Engine` of several processes.

Heads, columns and experts are divided; every rank has all of the rest.

A module that produces heads or columns keeps its own rows. The module that reads them keeps the
matching columns, so its result is a term of a sum over all ranks. The sum would count that module's
bias once for each rank, so only rank 0 keeps it.

Small weights are quantised whole and then divided, between groups. So every rank's codes and scales
are those of one device.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..launch import argument_error
from ..ops.common.expert_weights import QuantizedExperts
from ..ops.common.weight_formats import FORMATS, WeightFormat
from .quantized import QuantizedLinear, QuantizedMixture, quantisable, small

_MARK = "tilewright_shard"
_Q, _KV = "num_attention_heads", "num_key_value_heads"
_ANY = ""  # rows or columns that belong to no head

# Name of a Linear, or of a parameter of another module -> the axis of its weight that is divided,
# and what lies along that axis in order.
_CUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "q_proj": (0, (_Q,)),
    "q_b_proj": (0, (_Q,)),
    "k_proj": (0, (_KV,)),
    "v_proj": (0, (_KV,)),
    "kv_b_proj": (0, (_Q,)),
    "qkv_proj": (0, (_Q, _KV, _KV)),
    "o_proj": (1, (_Q,)),
    "gate_proj": (0, (_ANY,)),
    "up_proj": (0, (_ANY,)),
    "gate_up_proj": (0, (_ANY, _ANY)),
    "down_proj": (1, (_ANY,)),
    "lm_head": (0, (_ANY,)),
    "sinks": (0, (_Q,)),
    "gate_up_proj_bias": (0, (_ANY,)),  # of experts
    "down_proj_bias": (0, (_ANY,)),
}


DIVIDED = frozenset(_CUTS)


@dataclass(frozen=True, slots=True)
class Shard:
    """Part number `rank` of `ranks` equal ones."""

    rank: int = 0
    ranks: int = 1

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise argument_error("ranks", "at least 1", self.ranks)
        if not 0 <= self.rank < self.ranks:
            raise argument_error("rank", f"0 to {self.ranks - 1}", self.rank)

    def span(self, units: int) -> tuple[int, int]:
        """The first of this rank's units, and how many.

        If there are fewer units than ranks, neighbouring ranks share one.
        """
        return self.rank * units // self.ranks, max(1, units // self.ranks)


def shard_of(model: Any) -> Shard:
    """The part that `cut` left of a model; all of it if it was never cut."""
    shard: Shard = model.__dict__.get(_MARK, Shard())
    return shard


def check_ranks(model: Any, ranks: int, weights: str | None = None) -> list[tuple[str, nn.Module, str, nn.Module, str]]:
    """What `cut` would quantise, once it is sure that each of so many ranks gets a part.

    model: may be on the meta device. Raises: ValueError for sizes that cannot be divided.
    """
    coming = [] if weights is None else quantisable(model, weights)
    _check_all(model, ranks, {module: FORMATS[of] for *_, module, of in coming})
    return coming


def cut(
    model: Any,
    shard: Shard,
    *,
    device: torch.device | str,
    whole: Callable[[str, nn.Parameter], Tensor] | None = None,
    weights: str | None = None,
) -> None:
    """Keeps this rank's part of a model's weights, on `device`.

    Afterwards only an `Engine` of all ranks can run the model.

    Args:
        model: a transformers causal language model of a type that the engine reads. Tied embeddings
            become two matrices.
        shard: which part.
        device: where that part goes.
        whole: for a model on the meta device: takes a parameter's name and the parameter, returns
            all of its values. Only those of one module are held at a time.
        weights: quantise each module on `device` before it is divided, as `quantize` does.
    Raises: ValueError for sizes that cannot be divided, before anything changes.
    """
    coming = check_ranks(model, shard.ranks, weights)
    # Tied parameters have the first one's values.
    names = {id(parameter): path for path, _, _, _, parameter in reversed(list(_parameters(model)))}

    def values_of(parameter: nn.Parameter) -> Tensor:
        return parameter.data if whole is None else whole(names[id(parameter)], parameter)

    with torch.no_grad():
        for path, module in list(model.named_modules()):
            if isinstance(module, (QuantizedLinear, QuantizedMixture)):
                model.set_submodule(path, _small_part(path, module, model.config, shard).to(device))
        for path, owner, name, module, of in coming:
            for leaf, parameter in list(module.named_parameters(recurse=False)):
                module.register_parameter(leaf, nn.Parameter(values_of(parameter), requires_grad=False))
            setattr(owner, name, _small_part(path, small(module, of, torch.device(device)), model.config, shard))
        for _, key, module, name, parameter in list(_parameters(model)):
            values = values_of(parameter)
            part = _part(key, values, model.config, shard)
            if part is not None:
                part = part.to(device) if part is values else part.to(device).clone(memory_format=torch.contiguous_format)
            del values  # before the next one is made
            module.register_parameter(name, None if part is None else nn.Parameter(part, parameter.requires_grad))
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.out_features, module.in_features = module.weight.shape
    model.__dict__[_MARK] = shard
    if shard.ranks > 1:
        model.__dict__["forward"] = _refuse


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("this model holds one rank's part of its weights: only an Engine of all ranks can run it")


def _parameters(model: nn.Module) -> Iterator[tuple[str, str, nn.Module, str, nn.Parameter]]:
    """Path, key in `_CUTS`, module and name of each parameter; a tied one for each use. Without
    those of quantised modules.
    """
    for path, module in model.named_modules():
        if not isinstance(module, (QuantizedLinear, QuantizedMixture)):
            for name, parameter in list(module.named_parameters(recurse=False)):
                yield f"{path}.{name}", path.rpartition(".")[2] if isinstance(module, nn.Linear) else name, module, name, parameter


def _units(key: str, shape: torch.Size, config: Any) -> tuple[int, list[int]] | None:
    """The divided axis, and the units of each stretch along it; None if it is not divided."""
    if len(shape) == 3:  # of experts, which are dealt whole
        return 0, [shape[0]]
    if key not in _CUTS:
        return None
    axis, kinds = _CUTS[key]
    return axis, [getattr(config, kind) if kind else shape[-1 if len(shape) == 1 else axis] // len(kinds) for kind in kinds]


def _check_all(model: nn.Module, ranks: int, coming: dict[nn.Module, WeightFormat]) -> None:
    """coming: formats of modules that are to be quantised."""
    for path, key, module, _, parameter in _parameters(model):
        _check(path, key, parameter.shape, model.config, ranks)
        if isinstance(module, nn.Linear) and parameter.dim() == 2 and module in coming:
            _check_groups(path.removesuffix(".weight"), key, parameter.shape, coming[module], ranks)
    for path, module in model.named_modules():
        key = path.rpartition(".")[2]
        if isinstance(module, QuantizedLinear):
            shape = torch.Size((module.out_features, module.in_features))
            _check(path, key, shape, model.config, ranks)
            _check_groups(path, key, shape, FORMATS[module.weight_format], ranks)
            if module.order is not None and key in _CUTS and _CUTS[key][0] == 1 and ranks > 1:
                raise argument_error("the number of ranks", f"1 for {path}, whose groups lie in act-order", ranks)
        elif isinstance(module, QuantizedMixture):
            _check(path, key, torch.Size((len(module.gate_up.words), 0, 0)), model.config, ranks)


def _check(path: str, key: str, shape: torch.Size, config: Any, ranks: int) -> None:
    found = _units(key, shape, config)
    if found is None or (len(shape) == 1 and found[0] == 1):
        return
    kinds = _CUTS[key][1] if len(shape) != 3 else ("",)
    for kind, units in zip(kinds, found[1], strict=True):
        if units % ranks and not (kind == _KV and ranks % units == 0):
            what = f"config.{kind}" if kind else f"{path}, shape {tuple(shape)}"
            also = " or a multiple" if kind == _KV else ""
            raise argument_error("the number of ranks", f"a divisor{also} of {units}: {what}", ranks)


def _check_groups(path: str, key: str, shape: torch.Size, of: WeightFormat, ranks: int) -> None:
    """Raises unless the columns of a rank are whole groups."""
    if key in _CUTS and _CUTS[key][0] == 1 and shape[1] // ranks % of.multiple:
        why = f"{path} with a multiple of {of.multiple} columns each, as {of.name} needs"
        raise argument_error("the number of ranks", f"one that leaves {why}", f"{ranks}, which leaves {shape[1] // ranks}")


def _spans(key: str, shape: torch.Size, config: Any, shard: Shard) -> tuple[int, list[tuple[int, int]]] | None:
    """The divided axis, and the first and the number of what this rank keeps of each stretch."""
    found = _units(key, shape, config)
    if found is None:
        return None
    axis, stretches = found
    width = shape[axis if len(shape) > 1 else 0] // sum(stretches)  # of a unit: of a head, head_dim
    spans, start = [], 0
    for units in stretches:
        first, count = shard.span(units)
        spans.append((start + first * width, count * width))
        start += units * width
    return axis, spans


def _part(key: str, x: Tensor, config: Any, shard: Shard) -> Tensor | None:
    found = _spans(key, x.shape, config, shard)
    if found is None:
        return x
    axis, spans = found
    if axis == 1 and x.dim() == 1:
        return x if shard.rank == 0 else None
    return torch.cat([x.narrow(axis, *span) for span in spans], axis) if len(spans) > 1 else x.narrow(axis, *spans[0])


def _small_part(path: str, module: nn.Module, config: Any, shard: Shard) -> nn.Module:
    """This rank's part of a quantised module."""
    if isinstance(module, QuantizedMixture):
        first, count = shard.span(len(module.gate_up.words))
        gate_up, down = (_experts(experts, first, count) for experts in (module.gate_up, module.down))
        biases: Any = tuple(None if bias is None else bias[first : first + count].clone() for bias in (module.bias_gate_up, module.bias_down))
        return QuantizedMixture(gate_up, down, biases, alpha=module.alpha, limit=module.limit, up_offset=module.up_offset)
    assert isinstance(module, QuantizedLinear)
    key = path.rpartition(".")[2]
    found = _spans(key, torch.Size((module.out_features, module.in_features)), config, shard)
    if found is None:
        return module
    bias = None if module.bias is None else _part(key, module.bias.data, config, shard)
    return QuantizedLinear(module.quantized.cut(*found), None if bias is None else bias.clone(), module.order)


def _experts(experts: QuantizedExperts, first: int, count: int) -> QuantizedExperts:
    held = (None if x is None else x[first : first + count].clone() for x in (experts.words, experts.scales, experts.zeros))
    return QuantizedExperts(experts.weight_format, experts.k, *held)  # type: ignore[arg-type]  # zeros alone may be None
