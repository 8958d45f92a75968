"""The reference machine: runs each block's work items in plain torch. A block gives its turn to
another when it polls for what has not come; any order of blocks is allowed.

What is published or added may come late, come twice or be lost (`Faults`). It is an error if blocks
poll for what never comes, if a sum has too many terms, or if a block reads a key that only other
blocks have written. In float64 nothing is rounded, which gives the truth.
"""

import math
import random
from collections import defaultdict
from collections.abc import Callable, Generator
from dataclasses import dataclass

import torch
from torch import Tensor

from .pack import Weights
from .shape import Schedule
from .sums import FRACTION

Polling = Generator[str, None, Tensor]  # yields the name of what it polls for
SOON = 5  # rounds within which what is late comes


class Deadlock(RuntimeError):
    """Blocks poll for what none of them will publish."""


class Corrupt(RuntimeError):
    """A sum has more terms than it should."""


@dataclass(frozen=True, slots=True)
class Faults:
    """late: the share of messages that come some rounds later. twice: the share of published words
    that come again, later. lost, doubled: names whose first message does not come, or comes twice.
    """

    late: float = 0.0
    twice: float = 0.0
    lost: str = ""
    doubled: str = ""


class Machine:
    """The steps of some tokens. After `run`, `named` has what blocks exchanged for the last token,
    and the cache has all their keys and values.
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
            dtype: rounded to where the kernel rounds; None for that of the weights.
            order: seed of the order of blocks and of the faults; None for blocks by their numbers.
        """
        self.weights, self.schedule, self.token, self.position, self.cache = weights, schedule, token, position, cache
        self._qkv, self._out, self._gate_up, self._down = weights.dense()
        self.dtype = dtype or weights.embedding.dtype
        self.wide = torch.float64 if self.dtype is torch.float64 else torch.float32
        self.tokens: list[int] = []
        self._words: dict[str, tuple[Tensor, Tensor]] = {}  # values, and their epochs; of sums, their counts of terms
        self._appended: dict[tuple[int, int, int], set[int]] = {}  # blocks that wrote a key: of layer, key head and position
        self._faults, self._random, self._in_order = faults or Faults(), random.Random(order), order is None
        self._single = {self._faults.lost, self._faults.doubled}  # names whose first message is still to come
        self._late: defaultdict[int, list[Callable[[], None]]] = defaultdict(list)  # by the round in which they come
        self._round, self._events = 0, 0

    def run(self, tokens: int = 1) -> int:
        """The last token; `tokens` has all. Raises Deadlock, Corrupt, or RuntimeError for a key
        that only other blocks have written.
        """
        blocks, polled = {block: self._block(block, tokens) for block in range(self.schedule.blocks)}, dict[int, str]()
        while blocks:
            before, turn = self._events, list(blocks)
            self._round += 1
            due = self._late.pop(self._round, [])
            for send in due:
                send()
            if not self._in_order:
                self._random.shuffle(turn)
            for block in turn:
                polled[block] = next(blocks[block], "")
                if not polled[block]:
                    del blocks[block]
                    self._events += 1
            if self._events == before and not self._late and not due:
                raise Deadlock(f"{len(turn)} of {self.schedule.blocks} blocks wait for {', '.join(sorted({polled[block] for block in turn}))}")
        return self.tokens[-1]

    # Mailboxes and sums

    def _send(self, name: str, apply: Callable[[], None], *, twice: float = 0.0) -> None:
        """Now, late, twice or never."""
        self._events += 1
        if name in self._single:
            self._single.remove(name)
            if name == self._faults.lost:
                return
            apply()
        if self._random.random() < twice:
            self._late[self._round + self._random.randint(1, 50 * SOON)].append(apply)
        if self._random.random() < self._faults.late:
            self._late[self._round + self._random.randint(1, SOON)].append(apply)
        else:
            apply()

    def _publish(self, name: str, size: tuple[int, ...], start: int, value: Tensor, epoch: int) -> None:
        """Words from `start` on of `size`: they replace those of earlier epochs only."""
        if name not in self._words:
            self._words[name] = torch.full(size, math.nan, dtype=value.dtype, device=value.device), torch.zeros(size[0], dtype=torch.int32)
        values, epochs = (words[start : start + len(value)] for words in self._words[name])

        def apply() -> None:
            newer = epochs <= epoch
            values[newer] = value[newer]
            epochs.clamp_(min=epoch)

        self._send(name, apply, twice=self._faults.twice)

    def _poll(self, name: str, here: slice, epoch: int) -> Polling:
        while name not in self._words or int(self._words[name][1][here].min()) < epoch:
            yield name
        self._events += 1
        return self._words[name][0][here]

    def _sum(self, half: int, epoch: int) -> tuple[str, Tensor, Tensor]:
        """A sum's name, values and counts. Odd and even epochs have sums of their own; that of the
        first counts as cleared.
        """
        name, hidden = f"layers.{half // 2}.{('out', 'down')[half % 2]}.{epoch & 1}", self.weights.dims.hidden
        if name not in self._words:
            values = torch.zeros(hidden, dtype=torch.float64, device=self.weights.embedding.device)
            self._words[name] = values, torch.full((hidden,), epoch & 1, dtype=torch.int32)
        return name, *self._words[name]

    def _add(self, half: int, epoch: int, outputs: range, terms: Tensor) -> None:
        (name, values, counts), here = self._sum(half, epoch), slice(outputs.start, outputs.stop)
        exact = terms if self.wide is torch.float64 else (terms.double() * 2.0**FRACTION).trunc() * 2.0**-FRACTION

        def apply() -> None:
            values[here] += exact
            counts[here] += 1

        self._send(name, apply)

    def _clear(self, half: int, epoch: int, block: int) -> None:
        """Subtracts from a block's own words what they hold of the token before, and counts 1."""
        (name, values, counts), own = self._sum(half, epoch + 1), self.schedule.owned(block)
        here = slice(2 * own.start, 2 * own.stop)
        old, count = values[here].clone(), counts[here].clone()

        def apply() -> None:
            values[here] -= old
            counts[here] += 1 - count

        self._send(name, apply)

    def _whole(self, half: int, epoch: int, adders: int) -> Polling:
        name, values, counts = self._sum(half, epoch)
        while int(counts.min()) < adders + 1:
            yield name
        if int(counts.max()) > adders + 1:
            raise Corrupt(f"{name} has {int(counts.max()) - 1} terms of {adders}")
        self._events += 1
        return values.to(self.wide)

    # What a block computes

    def _block(self, block: int, tokens: int) -> Generator[str, None, None]:
        s, w, d = self.schedule, self.weights, self.weights.dims
        token, rows, inner, mine = self.token, s.qkv(block), s.inner(block), s.outputs(block)
        for epoch in range(1, tokens + 1):
            x = w.embedding[token].to(self.wide)
            for layer in range(d.layers):
                if layer:
                    x = self._rounded(x + (yield from self._whole(2 * layer - 1, epoch, s.blocks)))
                heads = self._times(self._qkv[layer][rows.start : rows.stop], self._normed(x, w.norms[2 * layer]))
                if len(rows):
                    self._publish(f"layers.{layer}.qkv", (s.qkv_rows,), rows.start, heads.to(self.dtype), epoch)
                if mine:
                    (head, outputs), size = mine, d.head_dim
                    attended = yield from self._attended(block, head, layer, self.position + epoch - 1, epoch)
                    terms = self._times(self._out[layer][outputs.start : outputs.stop, head * size : (head + 1) * size], attended)
                self._clear(2 * layer, epoch, block)
                if mine:
                    self._add(2 * layer, epoch, outputs, terms)
                x = self._rounded(x + (yield from self._whole(2 * layer, epoch, d.q_heads)))
                rows_of_both = self._gate_up[layer][2 * inner.start : 2 * inner.stop]
                gate, up = self._times(rows_of_both, self._normed(x, w.norms[2 * layer + 1])).view(-1, 2).unbind(1)
                active = self._rounded(torch.nn.functional.silu(gate) * up)
                self._clear(2 * layer + 1, epoch, block)
                self._add(2 * layer + 1, epoch, range(d.hidden), self._times(self._down[layer][:, inner.start : inner.stop], active))
            x = self._rounded(x + (yield from self._whole(2 * d.layers - 1, epoch, s.blocks)))
            token = yield from self._chosen(block, self._normed(x, w.norms[-1]), epoch)

    def _attended(self, block: int, head: int, layer: int, position: int, epoch: int) -> Polling:
        """A query head's attention; where its blocks split the keys, from all their shares."""
        s, w, d, part = self.schedule, self.weights, self.weights.dims, block % self.schedule.split.out_parts
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
        shares = torch.cat((p @ values, p.sum(0, keepdim=True), high))[None]
        if s.splits(position):
            name = f"layers.{layer}.shares.{head}"
            self._publish(name, (s.split.out_parts, d.head_dim + 2), part, shares, epoch)
            shares = yield from self._poll(name, slice(None), epoch)
        share = (shares[:, :-1] * torch.exp2(shares[:, -1:] - shares[:, -1].max())).sum(0)
        return self._rounded(share[:-1] / share[-1])

    def _chosen(self, block: int, x: Tensor, epoch: int) -> Generator[str, None, int]:
        s, vocab = self.schedule, self.weights.dims.vocab
        rows = s.head(block)
        logits = self._rounded(self._times(self.weights.head[rows.start : rows.stop], x))
        best = -math.inf, float(vocab)
        if len(rows):
            self._publish("logits", (vocab,), rows.start, logits.to(self.dtype), epoch)
            best = float(logits.max()), float(rows.start + int(logits.argmax()))
        self._publish("best", (s.blocks, 2), block, torch.tensor([best], dtype=torch.float64), epoch)
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
        """As `Mega.named`."""
        found = {f"layers.{layer}.qkv": self._words[f"layers.{layer}.qkv"][0] for layer in range(self.weights.dims.layers)}
        for half in range(2 * self.weights.dims.layers):
            name, values, _ = self._sum(half, len(self.tokens))
            found[name.rpartition(".")[0]] = values.to(self.wide)
        return found | {"logits": self._words["logits"][0]}
