"""The reference machine for the stream: every block's own queue of work in plain torch, and each block waits for the words that it needs.

A value that nobody will write, blocks that all wait for each other, a word that was overwritten while somebody still wanted it, and a key in the
cache that another block wrote are errors.
"""

import math
import random
from collections.abc import Generator

import torch
from torch import Tensor

from .pack import Weights
from .program import MATRICES, Kind, Phase, value_name
from .reference import MissingDependency, Step
from .stream_schedule import StreamSchedule, Work

Waiting = Generator[str, None, Tensor]  # yields the name of what it waits for


class Deadlock(RuntimeError):
    """Blocks wait for words that none of them will write."""


class StreamMachine(Step):
    """State of some tokens' steps. After `run`, `values` has every value of the last token by name, and the cache all their keys and values."""

    def __init__(
        self,
        weights: Weights,
        schedule: StreamSchedule,
        token: int,
        position: int,
        cache: tuple[Tensor, Tensor],
        *,
        dtype: torch.dtype | None = None,
        order: int | None = None,
    ) -> None:
        """Args: as `Step`. order: seed of the order in which blocks get their turns; None for that of their numbers."""
        super().__init__(weights, token, position, cache, dtype)
        self.schedule = schedule
        assert weights.whole is not None
        self.whole, self.tokens = weights.whole, list[int]()
        self._order = None if order is None else random.Random(order)
        self._numbers: dict[str, Tensor] = {}  # of the token that each element was last written for
        self._appended: dict[tuple[int, int, int], int] = {}  # the block that wrote a key: (layer, key head, position)
        self._events = 0

    def run(self, program: list[Phase], tokens: int = 1) -> int | None:
        """The last token, if the program chooses them; `tokens` has all. Raises MissingDependency, Deadlock, or RuntimeError for the other errors."""
        blocks = {block: self._block(block, program, tokens) for block in range(self.schedule.blocks)}
        missing: dict[int, str] = {}
        while blocks:
            before, turn = self._events, list(blocks)
            if self._order is not None:
                self._order.shuffle(turn)
            for block in turn:
                try:
                    missing[block] = next(blocks[block])
                except StopIteration:
                    del blocks[block]
                    self._events += 1
            if self._events == before:
                block = turn[0]
                if missing[block] not in {name for phase in program for name in (phase.writes, *_parts_of(phase))}:
                    raise MissingDependency(f"block {block} waits for {missing[block]}, which no phase writes")
                raise Deadlock(f"{len(turn)} of {self.schedule.blocks} blocks wait for each other, block {block} for {missing[block]}")
        return self.tokens[-1] if self.tokens else None

    def _block(self, block: int, program: list[Phase], tokens: int) -> Generator[str, None, None]:
        token, position = self.token, self.position
        for number in range(1, tokens + 1):
            x, prepared = torch.empty(0), None
            best, column = -math.inf, 0
            for work in self.schedule.queue(block, program):
                if work.kind is Kind.ATTENTION:
                    yield from self._share(block, work, position, number)
                elif work.kind is Kind.CHOOSE:
                    self._say("best", self.schedule.blocks, block, torch.tensor([best], dtype=torch.float64), number)
                    self._say("best.column", self.schedule.blocks, block, torch.tensor([column], dtype=torch.float64), number)
                    tops = yield from self._hear("best", slice(None), number)
                    columns = yield from self._hear("best.column", slice(None), number)
                    token = int(columns[tops == tops.max()].min())
                    if block == 0:
                        self.tokens.append(token)
                        self._say("token", 1, 0, torch.tensor([token], dtype=self.wide), number)
                else:
                    if prepared != work[:2]:
                        x, prepared = (yield from self._input(work, token, number)), work[:2]
                    rows = yield from self._tile(work, x, token, number)
                    if work.kind is Kind.HEAD and float(rows.max()) > best:
                        best, column = float(rows.max()), int(rows.argmax()) + work.unit * self.schedule.config.rows
            position += 1

    def _hear(self, name: str, rows: slice, number: int) -> Waiting:
        """A value as soon as all of it was written for token `number`."""
        while name not in self._numbers or int(self._numbers[name][rows].min()) < number:
            yield name
        if int(self._numbers[name][rows].max()) > number:
            raise RuntimeError(f"{name} was overwritten before all had read it")
        self._events += 1
        return self.values[name][rows].to(self.wide if self.values[name].dtype is self.dtype else self.values[name].dtype)

    def _say(self, name: str, size: int, start: int, value: Tensor, number: int) -> None:
        """Writes from `start` on; `size` is that of the whole value. What is to be rounded has been."""
        if name not in self.values:
            where = self.weights.embedding.device
            self.values[name] = torch.full((size, *value.shape[1:]), math.nan, dtype=value.dtype, device=where)
            self._numbers[name] = torch.zeros(size, dtype=torch.int32, device=where)
        self.values[name][start : start + len(value)] = value
        self._numbers[name][start : start + len(value)] = number
        self._events += 1

    def _before(self, layer: int, rows: slice, token: int, number: int) -> Waiting:
        """The residual stream before a layer."""
        if layer == 0:
            return self.weights.embedding[token, rows].to(self.wide)
        return (yield from self._hear(value_name("stream", layer - 1), rows, number))

    def _input(self, work: Work, token: int, number: int) -> Waiting:
        """What the matrix of a phase is multiplied with."""
        everything = slice(None)
        if work.kind is Kind.OUT:
            return (yield from self._hear(value_name("attention", work.layer), everything, number))
        if work.kind is Kind.DOWN:
            return (yield from self._hear(value_name("active", work.layer), everything, number))
        if work.kind is Kind.GATE_UP:
            middle = yield from self._hear(value_name("middle", work.layer), everything, number)
            return self._normed(middle, 2 * work.layer + 1)
        return self._normed((yield from self._before(work.layer, everything, token, number)), 2 * work.layer)

    def _tile(self, work: Work, x: Tensor, token: int, number: int) -> Waiting:
        """Multiplies a tile of the stream and writes what comes of it, which is returned."""
        d, kind, layer = self.schedule.dims, work.kind, work.layer
        size, which = self.schedule.config.rows, MATRICES.index(work.kind)
        at = self.weights.bases[which] + ((0 if kind is Kind.HEAD else layer * self.schedule.counts[which]) + work.unit) * size
        y = self.whole[at : at + size].view(-1, len(x)).to(self.wide) @ x
        if kind is Kind.GATE_UP:
            gate, up = y.view(-1, 2).unbind(1)
            y = torch.nn.functional.silu(gate) * up
        rows = slice(work.unit * len(y), (work.unit + 1) * len(y))
        if kind is Kind.OUT:
            y = y + (yield from self._before(layer, rows, token, number))
        elif kind is Kind.DOWN:
            y = y + (yield from self._hear(value_name("middle", layer), rows, number))
        sizes = {Kind.QKV: d.heads * d.head_dim, Kind.GATE_UP: d.inter, Kind.HEAD: d.vocab}
        self._say(Phase(kind, layer).writes, sizes.get(kind, d.hidden), rows.start, y.to(self.dtype), number)
        return y.to(self.dtype)

    def _share(self, block: int, work: Work, position: int, number: int) -> Generator[str, None, None]:
        """One range of keys for the query heads of a key head; appends the token's key; and merges a slice of the ranges."""
        d, schedule, layer = self.schedule.dims, self.schedule, work.layer
        kv_head, split = divmod(work.unit, schedule.splits)
        heads = []
        for head, count in ((kv_head * d.group, d.group), (d.q_heads + kv_head, 1), (d.q_heads + d.kv_heads + kv_head, 1)):
            rows = slice(head * d.head_dim, (head + count) * d.head_dim)
            heads.append((yield from self._hear(value_name("qkv", layer), rows, number)).view(count, d.head_dim))
        q, k, v = self._rotated(heads[0], position), self._rotated(heads[1], position), heads[2]
        mine = [p for p in range(position) if schedule.range_of(p) == split]
        if any(self._appended.get((layer, kv_head, p), block) != block for p in mine):
            raise RuntimeError(f"block {block} reads a key of layer {layer} that another block has written")
        keys, values = (cache[layer, kv_head, mine].to(self.wide) for cache in self.cache)
        if schedule.range_of(position) == split:
            keys, values = torch.cat((keys, k)), torch.cat((values, v))
            self._appended[layer, kv_head, position] = block
            for cache, new in zip(self.cache, (k, v), strict=True):
                cache[layer, kv_head, position] = new[0]
        width, ranges, name = d.group * d.head_dim, schedule.ranges(position), value_name("attention", layer)
        if split < ranges:
            scores = q @ keys.T * (self.weights.scale * math.log2(math.e))
            maxima = scores.amax(1, keepdim=True)
            weights = torch.exp2(scores - maxima)
            part = torch.cat((self._round(weights) @ values, maxima, weights.sum(1, keepdim=True)), 1)
            if ranges == 1:
                self._say(name, d.kv_heads * width, kv_head * width, self._mixed(part[None]).flatten(), number)
                return
            self._say(value_name("parts", layer), d.kv_heads * schedule.splits, work.unit, part[None], number)
        if ranges > 1 and split < schedule.slices:
            first = kv_head * schedule.splits
            parts = yield from self._hear(value_name("parts", layer), slice(first, first + ranges), number)
            each = width // schedule.slices
            mixed = self._mixed(parts).flatten()[split * each : (split + 1) * each]
            self._say(name, d.kv_heads * width, kv_head * width + split * each, mixed, number)

    def _mixed(self, parts: Tensor) -> Tensor:
        """[query heads, head_dim], of ranges [ranges, query heads, head_dim + 2]."""
        sums, maxima, denominators = parts.split((parts.shape[2] - 2, 1, 1), 2)
        factors = torch.exp2(maxima - maxima.amax(0))
        mixed: Tensor = (sums * factors).sum(0) / (denominators * factors).sum(0)
        return mixed.to(self.dtype)


def _parts_of(phase: Phase) -> tuple[str, ...]:
    """Names beside `Phase.writes` of what a phase writes in the stream."""
    if phase.kind is Kind.ATTENTION:
        return (value_name("attention", phase.layer),)
    return ("best", "best.column") if phase.kind is Kind.CHOOSE else ()
