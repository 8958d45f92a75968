"""One rank's part of a model, for an `Engine` of several processes.

Heads, columns and experts are divided; every rank has all of the rest.

A module that produces heads or columns keeps its own rows. The module that reads them keeps the
matching columns, so its result is a term of a sum over all ranks. The sum would count that module's
bias once for each rank, so only rank 0 keeps it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..launch import argument_error

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


def cut(model: Any, shard: Shard, *, device: torch.device | str, whole: Callable[[str, nn.Parameter], Tensor] | None = None) -> None:
    """Keeps this rank's part of a model's weights, on `device`.

    Afterwards only an `Engine` of all ranks can run the model.

    Args:
        model: a transformers causal language model of a type that the engine reads. Tied embeddings
            become two matrices.
        shard: which part.
        device: where that part goes.
        whole: for a model on the meta device: takes a parameter's name and the parameter, returns
            all of its values. Only one is held at a time.
    Raises: ValueError for sizes that cannot be divided, before anything changes.
    """
    parameters = list(_parameters(model))
    for path, key, _, _, parameter in parameters:
        _check(path, key, parameter, model.config, shard.ranks)
    names = {id(parameter): path for path, _, _, _, parameter in reversed(parameters)}  # tied parameters have the first one's values
    with torch.no_grad():
        for _, key, module, name, parameter in parameters:
            values = parameter.data if whole is None else whole(names[id(parameter)], parameter)
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
    """Path, key in `_CUTS`, module and name of each parameter; a tied one for each use."""
    for path, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            yield f"{path}.{name}", path.rpartition(".")[2] if isinstance(module, nn.Linear) else name, module, name, parameter


def _units(key: str, parameter: Tensor, config: Any) -> tuple[int, list[int]] | None:
    """The divided axis, and the units of each stretch along it; None if it is not divided."""
    if parameter.dim() == 3:  # of experts, which are dealt whole
        return 0, [len(parameter)]
    if key not in _CUTS:
        return None
    axis, kinds = _CUTS[key]
    return axis, [getattr(config, kind) if kind else parameter.shape[-1 if parameter.dim() == 1 else axis] // len(kinds) for kind in kinds]


def _check(path: str, key: str, parameter: Tensor, config: Any, ranks: int) -> None:
    found = _units(key, parameter, config)
    if found is None or (parameter.dim() == 1 and found[0] == 1):
        return
    kinds = _CUTS[key][1] if parameter.dim() != 3 else ("",)
    for kind, units in zip(kinds, found[1], strict=True):
        if units % ranks and not (kind == _KV and ranks % units == 0):
            what = f"config.{kind}" if kind else f"{path}, shape {tuple(parameter.shape)}"
            also = " or a multiple" if kind == _KV else ""
            raise argument_error("the number of ranks", f"a divisor{also} of {units}: {what}", ranks)


def _part(key: str, x: Tensor, config: Any, shard: Shard) -> Tensor | None:
    found = _units(key, x, config)
    if found is None:
        return x
    axis, stretches = found
    if axis == 1 and x.dim() == 1:
        return x if shard.rank == 0 else None
    width = x.shape[axis] // sum(stretches)  # of a unit: of a head, head_dim
    parts, start = [], 0
    for units in stretches:
        first, count = shard.span(units)
        parts.append(x.narrow(axis, start + first * width, count * width))
        start += units * width
    return torch.cat(parts, axis) if len(parts) > 1 else parts[0]
