"""A decode step of a Llama-family model as data: phases, each of which reads what earlier ones wrote.

The kernel and the reference machine run this list.

| kind | reads | writes (each value has a slot of its own in every layer) |
|---|---|---|
| QKV | residual stream, normed | `qkv`: queries, key and value of the token, not yet rotated |
| ATTENTION | `qkv`, cache | `parts`: for each range of keys its weighted values, maximum and denominator; appends key and value to the cache |
| OUT | `parts`, residual stream | `middle`: stream + output projection of the merged parts |
| GATE_UP | `middle`, normed | `active`: silu(gate) * up |
| DOWN | `active`, `middle` | `stream`: middle + down projection |
| HEAD | the last `stream`, normed | `logits`, and `best`: the largest logit of each block |
| CHOOSE | `best` | the token; position, clock and the list of recent tokens move on |
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


class Kind(enum.IntEnum):
    """What a phase does; its number is what the kernel branches on."""

    QKV = 0
    ATTENTION = 1
    OUT = 2
    GATE_UP = 3
    DOWN = 4
    HEAD = 5
    CHOOSE = 6


LAYER_KINDS = (Kind.QKV, Kind.ATTENTION, Kind.OUT, Kind.GATE_UP, Kind.DOWN)
WRITES = {
    Kind.QKV: "qkv",
    Kind.ATTENTION: "parts",
    Kind.OUT: "middle",
    Kind.GATE_UP: "active",
    Kind.DOWN: "stream",
    Kind.HEAD: "logits",
    Kind.CHOOSE: "token",
}


@dataclass(frozen=True, slots=True)
class Dims:
    """Sizes of a model. inter: width of the MLP."""

    layers: int
    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    inter: int
    vocab: int

    @property
    def heads(self) -> int:
        """Heads in a row of `qkv`."""
        return self.q_heads + 2 * self.kv_heads

    @property
    def group(self) -> int:
        """Query heads of a key head."""
        return self.q_heads // self.kv_heads

    def shape(self, kind: Kind) -> tuple[int, int]:
        """Rows and columns of the matrix of a phase that has one."""
        return {
            Kind.QKV: (self.heads * self.head_dim, self.hidden),
            Kind.OUT: (self.hidden, self.q_heads * self.head_dim),
            Kind.GATE_UP: (2 * self.inter, self.hidden),
            Kind.DOWN: (self.hidden, self.inter),
            Kind.HEAD: (self.vocab, self.hidden),
        }[kind]


MATRICES = (Kind.QKV, Kind.OUT, Kind.GATE_UP, Kind.DOWN, Kind.HEAD)


@dataclass(frozen=True, slots=True)
class Phase:
    """One step of all blocks; no block starts it before all have finished the one before."""

    kind: Kind
    layer: int

    @property
    def writes(self) -> str:
        return value_name(WRITES[self.kind], None if self.kind >= Kind.HEAD else self.layer)

    def __str__(self) -> str:
        return value_name(self.kind.name.lower(), None if self.kind >= Kind.HEAD else self.layer)


def value_name(what: str, layer: int | None) -> str:
    return what if layer is None else f"layers.{layer}.{what}"


def phases(dims: Dims, *, choose: bool = True) -> Iterator[Phase]:
    """The phases of one token. choose: with the choice of the likeliest; without it the step ends at the logits."""
    for layer in range(dims.layers):
        for kind in LAYER_KINDS:
            yield Phase(kind, layer)
    yield Phase(Kind.HEAD, dims.layers)
    if choose:
        yield Phase(Kind.CHOOSE, dims.layers)


def table(program: list[Phase]) -> Tensor:
    """int32 [phases, 2]: kind and layer."""
    return torch.tensor([(p.kind, p.layer) for p in program], dtype=torch.int32)
