"""Speculative decoding with a draft model: rounds that stay on the device.

In a round the draft model proposes tokens one by one, the model reads the last token and all of
these in one step, and a sequence gains as many as were right and one further. Both models choose
with the noise of a token's place, as plain decoding does. So whatever the temperature, the tokens
are those of plain decoding up to rounding, and the draft is right where the same noise leads both
models to the same token (Daliri et al. 2024, "Coupling without communication and drafter-invariant
speculative decoding"). Nothing is drawn twice, and the draft's probabilities are not needed.

If a whole draft was right, the draft model has not read its last token yet. So its first step of a
round reads two tokens, of which it mostly knows the first. Keys of tokens that were wrong lie
beyond a sequence's length in both caches, until the next ones overwrite them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .advance import accept
from .ending import Ending
from .graph import run
from .program import Call, Emit, StepBuffers
from .programs import Programs
from .sampling import Sampling
from .speculate import Verify


@dataclass(slots=True)
class Rounds:
    """The calls of a round, and the tensors that `accept` moves on. every: rounds between two looks
    of the host.
    """

    verify: Verify
    pair: Tensor
    places: Tensor
    limit: Tensor
    told: Tensor
    gained: Tensor
    every: int
    calls: list[Call]
    graph: torch.cuda.CUDAGraph | None = None

    @staticmethod
    def of(programs: Programs, drafter: Programs, batch: int, draft: int, sampling: Sampling, every: int) -> "Rounds":
        device = programs.state.tokens.device

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        places, ids, pair = zeros(3 + draft, batch, dtype=torch.int32), zeros(batch, 1 + draft), zeros(batch, 2)
        verify = Verify.of(programs.decoder, programs.state, batch, draft, sampling, ids=ids, places=places[1:])
        more = zeros(batch, dtype=torch.int32), zeros(batch), zeros(batch, (every + 1) * (1 + draft))
        calls = [*proposal(drafter, pair, ids, places, verify.draws, sampling), *verify.calls]
        limit, told, gained = more
        moved = {"ids": ids, "chosen": verify.chosen, "pair": pair, "places": places, "draws": verify.draws}
        calls.append(Call.of("accept", accept, **moved, limit=limit, told=told, gained=gained))
        return Rounds(verify, pair, places, *more, every, calls)

    def begin(self, rows: Sequence[Sequence[int]], first: Sequence[int], most: int) -> None:
        """rows: prompts. first: the tokens behind them. most: tokens of an answer."""
        batch, device = len(self.pair), self.pair.device
        lengths = torch.tensor([len(row) for row in rows] + [0] * (batch - len(rows)))
        pair = [[row[-1], token] for row, token in zip(rows, first, strict=True)]
        self.pair.zero_()[: len(rows)].copy_(torch.tensor(pair))
        self.verify.ids[:, 0].copy_(self.pair[:, 1])
        self.places.copy_(lengths.int() - 1 + torch.arange(len(self.places))[:, None])
        self.limit.copy_(torch.where(lengths > 0, lengths + most - 1, 0))
        self.verify.draws.copy_(1 + torch.arange(len(self.verify.draws), device=device)[:, None])
        self.told.fill_(1)

    def decode(
        self, hold: Callable[[list[int]], None], rows: list[list[int]], tokens: list[list[int]], ending: Ending, most: int
    ) -> Iterator[tuple[list[list[int]], int]]:
        """Continues sequences whose first tokens are in `tokens`, until all have ended or have
        `most`.

        hold: gives each sequence a cache of so many tokens. Yields what each gained, and in how
        many rounds.
        """
        wide = self.verify.ids.shape[1]
        while True:
            left = [0 if ended else most - len(mine) for ended, mine in zip(ending.ended, tokens, strict=True)]
            if not any(left):
                return
            rounds = min(self.every, -(-max(left) // wide))
            ends = [min(len(mine) + rounds * wide, most) + wide - 1 for mine in tokens]  # a draft behind the last token that counts
            hold([len(row) + end if more else 0 for row, end, more in zip(rows, ends, left, strict=True)])
            for _ in range(rounds):
                run(self.calls, self.graph)
            counts = (self.verify.draws[0] - self.told).tolist()
            found = self.gained[: len(rows)].tolist()
            self.told.copy_(self.verify.draws[0])
            new = [mine[:count] if more else [] for mine, count, more in zip(found, counts, left, strict=False)]
            yield ending.extend(tokens, new), rounds


def proposal(drafter: Programs, pair: Tensor, ids: Tensor, places: Tensor, draws: Tensor, sampling: Sampling) -> Emit:
    """From the last two tokens of each sequence to the draft behind the first column of ids."""
    decoder, state, batch = drafter.decoder, drafter.state, len(pair)
    how: dict[str, Any] = {"max_keys": state.max_len, "dtype": decoder.embedding.dtype, "device": pair.device}
    both = StepBuffers(batch, 2, places[:2].t(), places[2], **how)
    yield from decoder.body_calls(both, pair.view(-1), state.caches)
    last = {name: both.made(name).view(batch, 2, -1)[:, 1] for name in ("x", "y")}
    one = StepBuffers(batch, 1, places[1, :, None], places[2], **how, _tensors=last)
    shared: dict[str, Tensor] = {}
    for i in range(ids.shape[1] - 1):
        if i:
            one = StepBuffers(batch, 1, places[i + 1, :, None], places[i + 2], **how, _tensors=shared)
            yield from decoder.body_calls(one, ids[:, i], state.caches)
        yield from decoder.head_calls(one)
        yield from state.choice.choose(one.made("logits"), ids[:, i + 1], draws[i], sampling)
