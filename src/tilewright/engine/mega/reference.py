"""The reference machine: the program that the kernel runs, block by block in plain torch. A value that nobody wrote is NaN, and reading it an error.

All blocks of a phase see what stood there before it: what one of them writes becomes visible when all are done, as behind the kernel's barrier.
"""

import math
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
from torch import Tensor

from .pack import Weights
from .program import Kind, Phase, value_name
from .schedule import Schedule

Write = tuple[str, slice, Tensor]


class MissingDependency(RuntimeError):
    """A phase read what no earlier phase had written."""


class Step:
    """What the machines of both kernels share: a token, where it stands, and how the kernels round."""

    def __init__(self, weights: Weights, token: int, position: int, cache: tuple[Tensor, Tensor], dtype: torch.dtype | None) -> None:
        """
        Args:
            cache: keys and values [layers, kv_heads, max_len, head_dim]; appended to.
            dtype: what is rounded to where the kernel rounds; None for that of the weights. float64 gives the truth: nothing is rounded.
        """
        self.weights, self.token, self.position, self.cache = weights, token, position, cache
        self.dtype = dtype or weights.embedding.dtype
        self.wide = torch.float64 if self.dtype is torch.float64 else torch.float32
        self.values: dict[str, Tensor] = {}

    def _round(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).to(self.wide)

    def _normed(self, x: Tensor, norm: int) -> Tensor:
        rounded = self._round(x * (1.0 / torch.sqrt(x.square().sum() / len(x) + self.weights.eps)))
        return self._round(rounded * self.weights.norms[norm].to(self.wide))

    def _rotated(self, x: Tensor, position: int) -> Tensor:
        cos, sin = (t[position].to(self.wide) for t in (self.weights.cos, self.weights.sin))
        first, second = x.chunk(2, -1)
        return self._round(torch.cat((first * cos - second * sin, second * cos + first * sin), -1))


class Machine(Step):
    """State of one token's step. After `run`, `values` has every value by name, and the cache the token's key and value."""

    def __init__(
        self,
        weights: Weights,
        schedule: Schedule,
        token: int,
        position: int,
        cache: tuple[Tensor, Tensor],
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Args: as `Step`."""
        super().__init__(weights, token, position, cache, dtype)
        self.schedule = schedule

    def run(self, program: list[Phase]) -> int | None:
        """The likeliest token, if the program chooses one. Raises MissingDependency."""
        for phase in program:
            execute: Callable[[int, slice], Iterator[Write]] = getattr(self, f"_{phase.kind.name.lower()}")
            starts = self.schedule.starts(phase.kind)
            written = [w for a, b in pairwise(starts) if a < b for w in execute(phase.layer, slice(a, b))]
            for name, rows, value in written:
                self._slot(name, phase)[rows] = value
        if program[-1].kind is Kind.ATTENTION:  # nobody merged the ranges
            self._merged(program[-1].layer)
        chosen = self.values.get("token")
        return None if chosen is None else int(chosen)

    def _slot(self, name: str, phase: Phase) -> Tensor:
        d, device = self.schedule.dims, self.weights.embedding.device
        if name not in self.values:
            shape = {
                Kind.QKV: (d.heads * d.head_dim,),
                Kind.ATTENTION: (d.q_heads * self.schedule.splits, d.head_dim + 2),
                Kind.OUT: (d.hidden,),
                Kind.GATE_UP: (d.inter,),
                Kind.DOWN: (d.hidden,),
                Kind.HEAD: (d.vocab,),
                Kind.CHOOSE: (1,),
            }[phase.kind]
            # Ranges of keys are summed in fp32 and not rounded.
            dtype = self.wide if phase.kind in (Kind.ATTENTION, Kind.CHOOSE) else self.dtype
            self.values[name] = torch.full(shape, math.nan, dtype=dtype, device=device)
        return self.values[name]

    def _read(self, what: str, layer: int | None, rows: slice = slice(None)) -> Tensor:
        name = value_name(what, layer)
        found = self.values.get(name)
        if found is None or found[rows].isnan().any():
            raise MissingDependency(f"{name} is read before it is written whole")
        return found[rows].to(self.wide)

    def _stream(self, layer: int, rows: slice = slice(None)) -> Tensor:
        """The residual stream before a layer."""
        if layer == 0:
            return self.weights.embedding[self.token, rows].to(self.wide)
        return self._read("stream", layer - 1, rows)

    def _rows(self, kind: Kind, units: slice, per: int = 1) -> slice:
        """Rows of a matrix that belong to units; per: rows that make one element of the result."""
        size = self.schedule.rows(kind) // per
        return slice(units.start * size, min(units.stop * size, self.schedule.dims.shape(kind)[0] // per))

    def _qkv(self, layer: int, units: slice) -> Iterator[Write]:
        x, rows = self._normed(self._stream(layer), 2 * layer), self._rows(Kind.QKV, units)
        yield value_name("qkv", layer), rows, self.weights.qkv[layer, rows].to(self.wide) @ x

    def _attention(self, layer: int, units: slice) -> Iterator[Write]:
        for unit in range(units.start, units.stop):
            head, split = divmod(unit, self.schedule.splits)
            begin = split * self.schedule.keys_per_range(self.position)
            if begin <= self.position:
                yield value_name("parts", layer), slice(unit, unit + 1), self._attend(layer, head, begin)

    def _attend(self, layer: int, head: int, begin: int) -> Tensor:
        """[1, head_dim + 2]: the sum of a range of keys, its maximum in base 2 and denominator. The newest key is not in the cache yet."""
        d, position = self.schedule.dims, self.position
        end = begin + self.schedule.keys_per_range(position)
        q, (k, v) = self._rotated(self._head_of_qkv(layer, head), position), self._new_key(layer, head // d.group)
        keys, values = (c[layer, head // d.group, begin : min(end, position)].to(self.wide) for c in self.cache)
        if position < end:
            keys, values = torch.cat((keys, k[None])), torch.cat((values, v[None]))
        scores = keys @ q * (self.weights.scale * math.log2(math.e))
        maximum = scores.amax()
        weights = torch.exp2(scores - maximum)
        return torch.cat((self._round(weights) @ values, maximum[None], weights.sum()[None]))[None]

    def _head_of_qkv(self, layer: int, head: int) -> Tensor:
        size = self.schedule.dims.head_dim
        return self._read("qkv", layer, slice(head * size, (head + 1) * size))

    def _new_key(self, layer: int, head: int) -> tuple[Tensor, Tensor]:
        """The token's rotated key, and its value."""
        first = self.schedule.dims.q_heads + head
        return self._rotated(self._head_of_qkv(layer, first), self.position), self._head_of_qkv(layer, first + self.schedule.dims.kv_heads)

    def _merged(self, layer: int) -> Tensor:
        d, schedule = self.schedule.dims, self.schedule
        ranges = -(-(self.position + 1) // schedule.keys_per_range(self.position))
        units = [h * schedule.splits + s for s in range(ranges) for h in range(d.q_heads)]
        parts = torch.cat([self._read("parts", layer, slice(u, u + 1)) for u in units]).view(ranges, d.q_heads, d.head_dim + 2)
        sums, maxima, denominators = parts.split((d.head_dim, 1, 1), 2)
        factors = torch.exp2(maxima - maxima.amax(0))
        mixed = self._round((sums * factors).sum(0) / (denominators * factors).sum(0))
        self.values[value_name("attention", layer)] = mixed.to(self.dtype)
        return mixed.flatten()

    def _out(self, layer: int, units: slice) -> Iterator[Write]:
        x, rows = self._merged(layer), self._rows(Kind.OUT, units)
        yield value_name("middle", layer), rows, self.weights.out[layer, rows].to(self.wide) @ x + self._stream(layer, rows)

    def _gate_up(self, layer: int, units: slice) -> Iterator[Write]:
        x, rows = self._normed(self._read("middle", layer), 2 * layer + 1), self._rows(Kind.GATE_UP, units, per=2)
        both = slice(2 * rows.start, 2 * rows.stop)
        gate, up = (self.weights.gate_up[layer, both].to(self.wide) @ x).view(-1, 2).unbind(1)
        yield value_name("active", layer), rows, torch.nn.functional.silu(gate) * up

    def _down(self, layer: int, units: slice) -> Iterator[Write]:
        rows = self._rows(Kind.DOWN, units)
        y = self.weights.down[layer, rows].to(self.wide) @ self._read("active", layer)
        yield value_name("stream", layer), rows, y + self._read("middle", layer, rows)

    def _head(self, layer: int, units: slice) -> Iterator[Write]:
        if units.start == 0:  # the kernel's blocks share the appending out among themselves; nobody reads the cache any more
            for i in range(layer):
                for head in range(self.schedule.dims.kv_heads):
                    for cache, new in zip(self.cache, self._new_key(i, head), strict=True):
                        cache[i, head, self.position] = new
        x, rows = self._normed(self._stream(layer), 2 * layer), self._rows(Kind.HEAD, units)
        yield "logits", rows, self.weights.head[0, rows].to(self.wide) @ x

    def _choose(self, layer: int, units: slice) -> Iterator[Write]:
        yield "token", slice(0, 1), self._read("logits", None).argmax().to(self.wide)[None]
