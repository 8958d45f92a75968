"""The reference machine: every block's queue in plain torch, each block waiting for what the others
tell it, in any order.

What is told may come late, come twice, or be lost (`Faults`). Blocks that wait for what will not
come, a sum that is told more than its due, and a key of the cache that another block wrote are
errors. The dtype float64 gives the truth: nothing is rounded.
"""

import math
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from .pack import Weights
from .shape import Kind, Schedule
from .words import FRACTION

Waiting = Generator[str, None, Tensor]  # yields the name of what it waits for
SOON = 5  # rounds within which what is late comes


class Deadlock(RuntimeError):
    """Blocks wait for what none of them will tell."""


class Corrupt(RuntimeError):
    """A sum has more terms than it should."""


@dataclass(frozen=True, slots=True)
class Faults:
    """What happens on the way. late: the share of all that is told that comes some rounds later.
    twice: the share of words that come again, later. lost,
    doubled: names of which the first that is told does not come, or comes twice.
    """

    late: float = 0.0
    twice: float = 0.0
    lost: str = ""
    doubled: str = ""


class Machine:
    """Some tokens' steps. After `run`, `values` has what the last token's blocks told each other,
    by name, and the cache all their keys and values.
    """

    def __init__(
        self,
        weights: Weights,
        schedule: Schedule,
        token: int,
        position: int,
        cache: tuple[Tensor, Tensor],
        *,
        dtype: torch.dtype | None = None,
        order: int | None = None,
        faults: Faults | None = None,
    ) -> None:
        """
        Args:
            cache: keys and values [layers, kv_heads, max_len, head_dim]; appended to.
            dtype: what is rounded to where the kernel rounds; None for that of the weights.
            order: seed of the order in which blocks get their turns and of the faults; None for
                blocks by their numbers.
        """
        self.weights, self.schedule, self.token, self.position, self.cache = weights, schedule, token, position, cache
        self.dtype = dtype or weights.embedding.dtype
        self.exact = self.dtype is torch.float64
        self.wide = torch.float64 if self.exact else torch.float32
        self.values: dict[str, Tensor] = {}
        self.tokens: list[int] = []
        self._epochs: dict[str, Tensor] = {}  # of words: for which token they are; of sums: how many have come
        self._appended: dict[tuple[int, int, int], set[int]] = {}  # blocks that wrote a key: of layer, key head and position
        self._faults, self._random = faults or Faults(), random.Random(order)
        self._in_order, self._round, self._events = order is None, 0, 0
        self._late: list[tuple[int, Callable[[], None]]] = []
        self._single: set[str] = set()  # names of which the first has been lost or doubled

    def run(self, tokens: int = 1) -> int:
        """The last token; `tokens` has all. Raises Deadlock, Corrupt, or RuntimeError for a key
        that another block wrote.
        """
        blocks = {block: self._block(block, tokens) for block in range(self.schedule.blocks)}
        missing: dict[int, str] = {}
        while blocks:
            before, turn = self._events, list(blocks)
            self._round += 1
            due = [send for when, send in self._late if when <= self._round]
            self._late = [(when, send) for when, send in self._late if when > self._round]
            for send in due:
                send()
            if not self._in_order:
                self._random.shuffle(turn)
            for block in turn:
                try:
                    missing[block] = next(blocks[block])
                except StopIteration:
                    del blocks[block]
                    self._events += 1
            if self._events == before and not self._late and not due:
                raise Deadlock(f"{len(turn)} of {self.schedule.blocks} blocks wait for {', '.join(sorted({missing[block] for block in turn}))}")
        return self.tokens[-1]

    # What blocks tell each other

    def _tell(self, name: str, apply: Callable[[], None], *, word: bool) -> None:
        """Now, late, twice or never."""
        self._events += 1
        faults, chance = self._faults, self._random.random
        if name in (faults.lost, faults.doubled) and name not in self._single:
            self._single.add(name)
            if name == faults.lost:
                return
            apply()
        if word and faults.twice and chance() < faults.twice:
            self._late.append((self._round + self._random.randint(1, 50 * SOON), apply))
        if faults.late and chance() < faults.late:
            self._late.append((self._round + self._random.randint(1, SOON), apply))
        else:
            apply()

    def _publish(self, name: str, size: tuple[int, ...], start: int, value: Tensor, epoch: int) -> None:
        """Words from `start` on of `size`: they replace those of earlier epochs only."""
        if name not in self.values:
            self.values[name] = torch.full(size, math.nan, dtype=value.dtype, device=value.device)
            self._epochs[name] = torch.zeros(size[0], dtype=torch.int32, device=value.device)

        def apply() -> None:
            here, epochs = slice(start, start + len(value)), self._epochs[name]
            newer = epochs[here] <= epoch
            self.values[name][here] = torch.where(newer.view(-1, *[1] * (value.dim() - 1)), value, self.values[name][here])
            epochs[here] = epochs[here].clamp(min=epoch)

        self._tell(name, apply, word=True)

    def _poll(self, name: str, here: slice, epoch: int) -> Waiting:
        while name not in self._epochs or int(self._epochs[name][here].min()) < epoch:
            yield name
        self._events += 1
        return self.values[name][here]

    def _sum(self, half: int, epoch: int) -> str:
        """The name of a sum's words: they are used by every second token."""
        name = f"layers.{half // 2}.{('out', 'down')[half % 2]}.{epoch & 1}"
        if name not in self.values:
            where = self.weights.embedding.device
            self.values[name] = torch.zeros(self.weights.dims.hidden, dtype=torch.float64, device=where)
            self._epochs[name] = torch.full((self.weights.dims.hidden,), epoch & 1, dtype=torch.int32, device=where)  # as if cleared before the first
        return name

    def _add(self, half: int, epoch: int, outputs: range, terms: Tensor, count: int = 1) -> None:
        name, here = self._sum(half, epoch), slice(outputs.start, outputs.stop)
        exact = terms.double() if self.exact else (terms.double() * 2.0**FRACTION).trunc() * 2.0**-FRACTION

        def apply() -> None:
            self.values[name][here] += exact
            self._epochs[name][here] += count

        self._tell(name, apply, word=False)

    def _clear(self, half: int, epoch: int, block: int) -> None:
        """Takes from a block's own words what stands there, of the token before, and counts 1."""
        name, own = self._sum(half, epoch + 1), self.schedule.owned(block)
        outputs = range(min(2 * own.start, self.weights.dims.hidden), min(2 * own.stop, self.weights.dims.hidden))
        here = slice(outputs.start, outputs.stop)
        old, count = self.values[name][here].clone(), self._epochs[name][here].clone()

        def apply() -> None:
            self.values[name][here] -= old
            self._epochs[name][here] += 1 - count

        self._tell(name, apply, word=False)

    def _whole(self, half: int, epoch: int, adders: int) -> Waiting:
        name = self._sum(half, epoch)
        while int(self._epochs[name].min()) < adders + 1:
            yield name
        if int(self._epochs[name].max()) > adders + 1:
            raise Corrupt(f"{name} has {int(self._epochs[name].max()) - 1} terms of {adders}")
        self._events += 1
        return self.values[name].to(self.wide)

    # What a block computes

    def _block(self, block: int, tokens: int) -> Generator[str, None, None]:
        s, w, d = self.schedule, self.weights, self.weights.dims
        token, position = self.token, self.position
        for epoch in range(1, tokens + 1):
            x = w.embedding[token].to(self.wide)
            attended, active = torch.empty(0), torch.empty(0)
            for kind, layer in s.queue():
                if kind in (Kind.QKV, Kind.HEAD) and layer:
                    x = self._rounded(x + (yield from self._whole(2 * layer - 1, epoch, s.blocks)))
                if kind is Kind.QKV:
                    rows = s.qkv(block)
                    heads = self._times(w.qkv[layer][rows.start : rows.stop], self._normed(x, w.norms[2 * layer]))
                    if len(rows):
                        self._publish(f"layers.{layer}.qkv", (s.qkv_rows,), rows.start, heads.to(self.dtype), epoch)
                    if s.outputs(block):
                        attended = yield from self._attended(block, layer, position, epoch)
                elif kind is Kind.OUT:
                    self._clear(2 * layer, epoch, block)
                    if mine := s.outputs(block):
                        columns = slice(mine[0] * d.head_dim, (mine[0] + 1) * d.head_dim)
                        self._add(2 * layer, epoch, mine[1], self._times(w.out[layer][mine[1].start : mine[1].stop, columns], attended))
                elif kind is Kind.GATE_UP:
                    x = self._rounded(x + (yield from self._whole(2 * layer, epoch, d.q_heads)))
                    inner = s.inner(block)
                    rows_of_both = w.gate_up[layer][2 * inner.start : 2 * inner.stop]
                    gate, up = self._times(rows_of_both, self._normed(x, w.norms[2 * layer + 1])).view(-1, 2).unbind(1)
                    active = self._rounded(torch.nn.functional.silu(gate) * up)
                elif kind is Kind.DOWN:
                    self._clear(2 * layer + 1, epoch, block)
                    self._add(2 * layer + 1, epoch, range(d.hidden), self._times(w.down[layer][:, inner.start : inner.stop], active))
                else:
                    token = yield from self._chosen(block, self._normed(x, w.norms[-1]), epoch)
            position += 1

    def _attended(self, block: int, layer: int, position: int, epoch: int) -> Waiting:
        """A query head's attention; of a block that splits the keys with others, from all their
        shares.
        """
        s, w, d = self.schedule, self.weights, self.weights.dims
        mine = s.outputs(block)
        assert mine is not None
        head, part = mine[0], block % s.split.out_parts
        kv, heads = head // d.group, []
        for which in (head, d.q_heads + kv, d.q_heads + d.kv_heads + kv):
            found = yield from self._poll(f"layers.{layer}.qkv", slice(which * d.head_dim, (which + 1) * d.head_dim), epoch)
            heads.append(found.to(self.wide))
        q, k, v = heads
        if w.head_norms:
            q, k = self._normed(q, w.head_norms[layer][0]), self._normed(k, w.head_norms[layer][1])
        q, k = self._rotated(q, position), self._rotated(k, position)
        for cache, new in zip(self.cache, (k, v), strict=True):
            cache[layer, kv, position] = new.to(cache.dtype)
        self._appended.setdefault((layer, kv, position), set()).add(block)
        span = s.config.span
        places = [p for tile in s.tiles_of_keys(block, position) for p in range(tile * span, min((tile + 1) * span, position))]
        if not s.splits(position) or part == 0:
            places.append(position)
        if any(block not in self._appended.get((layer, kv, p), (block,)) for p in places):
            raise RuntimeError(f"block {block} reads a key of layer {layer} that only other blocks have written")
        keys, values = (cache[layer, kv, places].to(self.wide) for cache in self.cache)
        scores = keys @ q * (w.scale * math.log2(math.e))
        high = scores.amax(0, keepdim=True) if places else torch.full((1,), -1e30, dtype=self.wide, device=q.device)
        p = torch.exp2(scores - high)
        share = torch.cat((p @ values, high, p.sum(0, keepdim=True)))
        if s.splits(position):
            name = f"layers.{layer}.shares.{head}"
            self._publish(name, (s.split.out_parts, d.head_dim + 2), part, share[None], epoch)
            shares = yield from self._poll(name, slice(None), epoch)
            factors = torch.exp2(shares[:, -2] - shares[:, -2].max())[:, None]
            share = torch.cat(((shares[:, :-2] * factors).sum(0), high, (shares[:, -1:] * factors).sum(0)))
        return self._rounded(share[:-2] / share[-1])

    def _chosen(self, block: int, x: Tensor, epoch: int) -> Generator[str, None, int]:
        s, d = self.schedule, self.weights.dims
        rows = s.head(block)
        logits = self._rounded(self._times(self.weights.head[rows.start : rows.stop], x))
        best = torch.tensor([[-math.inf, float(d.vocab)]], dtype=torch.float64)
        if len(rows):
            self._publish("logits", (d.vocab,), rows.start, logits.to(self.dtype), epoch)
            best = torch.tensor([[float(logits.max()), float(rows.start + int(logits.argmax()))]], dtype=torch.float64)
        self._publish("best", (s.blocks, 2), block, best, epoch)
        found = yield from self._poll("best", slice(None), epoch)
        token = int(found[found[:, 0] == found[:, 0].max(), 1].min())
        if block == 0:
            self.tokens.append(token)
        return token

    def _times(self, matrix: Tensor, x: Tensor) -> Tensor:
        return matrix.to(self.wide) @ x

    def _rounded(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).to(self.wide)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._rounded(self._rounded(x * torch.rsqrt(x.square().mean() + self.weights.eps)) * weight.to(self.wide))

    def _rotated(self, x: Tensor, position: int) -> Tensor:
        cos, sin = (t[position].to(self.wide) for t in (self.weights.cos, self.weights.sin))
        first, second = x.chunk(2, -1)
        return self._rounded(torch.cat((first * cos - second * sin, second * cos + first * sin), -1))

    def named(self) -> dict[str, Tensor]:
        """As `Mega.named`, of the last token."""
        parity, found = len(self.tokens) & 1, dict[str, Tensor]()
        for layer in range(self.weights.dims.layers):
            found[f"layers.{layer}.qkv"] = self.values[f"layers.{layer}.qkv"]
            for name in ("out", "down"):
                found[f"layers.{layer}.{name}"] = self.values[f"layers.{layer}.{name}.{parity}"].to(self.wide)
        return found | {"logits": self.values["logits"]}
