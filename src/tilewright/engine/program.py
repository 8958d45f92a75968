"""A step of a model as data: a list of op calls whose arguments are fixed.

All that changes between two steps (token ids, positions, lengths) lives in device tensors that the
calls read. So the same list can be run call by call, or captured once in a CUDA graph and replayed.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from inspect import Signature, signature
from types import NoneType
from typing import Any, get_args

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One op and its arguments. name: where in the model, as `layers.3.attention.qkv`."""

    name: str
    op: Callable[..., Any]
    args: tuple[Any, ...]

    def __call__(self) -> None:
        self.op(*self.args)

    @staticmethod
    def of(name: str, op: Callable[..., Any], /, **arguments: Any) -> "Call":
        """With arguments by their names in `op`; one that is left out is its default, or None where
        it is optional. They are put in order here, once: the call itself is positional.

        Raises: TypeError for a name that `op` does not have, or one that is missing.
        """
        found, defaults = _signature(op)
        return Call(name, op, found.bind(**{**defaults, **arguments}).args)

    @property
    def arguments(self) -> dict[str, Any]:
        """By their names in `op`."""
        return dict(zip(_signature(self.op)[0].parameters, self.args, strict=True))

    def replaced(self, **arguments: Any) -> "Call":
        """With these arguments in place of its own."""
        return Call.of(self.name, self.op, **{**self.arguments, **arguments})

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for calls of the same compiled kernels: op, scalars, layout of tensors."""
        return (self.op, *((a.shape, a.stride(), a.dtype) if isinstance(a, Tensor) else a for a in self.args))


@cache
def _signature(op: Callable[..., Any]) -> tuple[Signature, dict[str, Any]]:
    """The signature of an op and what its arguments are by default."""
    found = signature(op, eval_str=True)
    optional = {name: None for name, p in found.parameters.items() if NoneType in get_args(p.annotation)}
    return found, optional | {name: p.default for name, p in found.parameters.items() if p.default is not p.empty}


def distinct(calls: Iterable[Call]) -> list[Call]:
    """The first call of each kind. After these have run, every kernel is compiled."""
    return list({call.kind: call for call in reversed(list(calls))}.values())[::-1]


@dataclass(slots=True)
class StepBuffers:
    """The fixed tensors of one program, which its calls share.

    batch, q_len: sequences, and tokens of each.
    positions: int32 [batch, q_len], where each token stands in its sequence.
    kv_len: int32 [batch], keys of each sequence once this program has appended its own.
    max_keys: maximum of kv_len.
    dtype, device: of activations.
    block_table: int32 [batch, max_pages], the pages of each sequence's cache; None for a cache with
        a row for each sequence.
    """

    batch: int
    q_len: int
    positions: Tensor
    kv_len: Tensor
    max_keys: int
    dtype: torch.dtype
    device: torch.device
    block_table: Tensor | None = None
    _tensors: dict[str, Tensor] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.batch * self.q_len

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor of this name, made on first use. Layers share it: they run in turn."""
        found = self._tensors.get(name)
        if found is None:
            found = self._tensors[name] = torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)
        assert found.shape == shape, f"tensor {name} is {tuple(found.shape)} and was asked for as {shape}"
        return found

    def held(self, cache: Tensor) -> Tensor:
        """Of a cache what the step's sequences may touch: their rows, or all pages."""
        return cache[: self.batch] if self.block_table is None else cache

    def made(self, name: str) -> Tensor:
        """The tensor of this name, which some call already asked for."""
        return self._tensors[name]


Emit = Iterator[Call]


@dataclass(slots=True)
class Step:
    """One token for each sequence of a batch size.

    tail: the calls behind the last layer, with which a prompt ends too.
    calls: by the number of keys that they reach, fewest first. graphs: of these, where captured.
    many: runs a given number of steps in one launch, if there is such a kernel.
    """

    buffers: StepBuffers
    tail: list[Call]
    calls: dict[int, list[Call]]
    graphs: dict[int, torch.cuda.CUDAGraph] = field(default_factory=dict)
    many: Callable[[int], None] | None = None

    def reach(self, keys: int) -> int:
        """The fewest keys that calls reach, of those that reach so many."""
        return next(reach for reach in self.calls if keys <= reach)
