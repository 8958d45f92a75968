"""A step of a model as data: a list of op calls whose arguments are fixed.

All that changes between two steps (token ids, positions, lengths) lives in device tensors that the calls read. So the same list can be run call by
call, or captured once in a CUDA graph and replayed.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One op and its arguments. name: where in the model, as `layers.3.attention.qkv`."""

    name: str
    op: Callable[..., Any]
    args: tuple

    def __call__(self) -> None:
        self.op(*self.args)

    @property
    def kind(self) -> tuple:
        """Equal for calls that run the same compiled kernels: the op, its scalars, and the layout of its tensors."""
        return (self.op, *((a.shape, a.stride(), a.dtype) if isinstance(a, Tensor) else a for a in self.args))


def distinct(calls: Iterable[Call]) -> list[Call]:
    """The first call of each kind: what must run once so that every kernel is compiled."""
    return list({call.kind: call for call in reversed(list(calls))}.values())[::-1]


@dataclass(slots=True)
class Frame:
    """What the calls of one program share.

    batch, q_len: sequences, and tokens of each.
    positions: int32 [batch, q_len], where each token stands in its sequence.
    kv_len: int32 [batch], keys of each sequence once this program has appended its own.
    max_keys: what kv_len can be at most.
    dtype, device: of activations.
    block_table: int32 [batch, max_pages], the pages of each sequence's cache; None for a cache with a row for each sequence.
    """

    batch: int
    q_len: int
    positions: Tensor
    kv_len: Tensor
    max_keys: int
    dtype: torch.dtype
    device: torch.device
    block_table: Tensor | None = None
    _buffers: dict[str, Tensor] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.batch * self.q_len

    def buffer(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor of this name, made on first use. Layers that ask for the same name share it: they run one after the other."""
        found = self._buffers.get(name)
        if found is None:
            found = self._buffers[name] = torch.zeros(shape, dtype=dtype or self.dtype, device=self.device)
        assert found.shape == shape, f"buffer {name} is {tuple(found.shape)} and was asked for as {shape}"
        return found

    def held(self, cache: Tensor) -> Tensor:
        """Of a cache what this frame's sequences may touch: their rows, or all pages."""
        return cache[: self.batch] if self.block_table is None else cache

    def made(self, name: str) -> Tensor:
        """The buffer of this name, which some call already asked for."""
        return self._buffers[name]


Emit = Iterator[Call]
