"""How a token is drawn: each request has its own temperature, penalties, biases and seed.

transformers applies its logits processors to a step's logits and takes the largest. Ours adjusts
them with the op `adjust_logits`, draws with `sample`, and leaves 1 for the drawn token and 0 for
the others. So a draw depends on the request's seed and the token's position, and not on what else
is in the step.

transformers may prepare a step while the one before runs, and replays graphs. So what an answer
holds is counted on the device, as a step reads the last token of each sequence.
"""

import itertools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
from transformers.generation.logits_process import LogitsProcessorList

from ...ops.adjust_logits import PROMPT, adjust_logits_out
from ...ops.sample import sample_out

SPARE = 16  # rows of the tables: one that is free again is given out last


@dataclass(frozen=True, slots=True)
class Sampling:
    """temperature 0: the most probable token. top_k 0: all. ticket: of the tables, 0 for none."""

    temperature: float
    top_p: float
    top_k: int
    seed: int
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    ticket: int = 0

    @property
    def plain(self) -> bool:
        """Whether logits are taken as they are."""
        return not self.logit_bias and (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) == (1, 0, 0)


class Tables:
    """What sequences with penalties or biases hold, a row each; row 0 is nobody's.

    counts, bias: as in `adjust_logits`. seen: the position of the last token that is counted.
    tickets: of the sequence that holds the row: ticket % rows. A cancelled one may be in a step
        that still runs, whose tokens do not count for the next holder.
    """

    def __init__(self, sequences: int, vocab: int, device: torch.device) -> None:
        rows = 1 + sequences + SPARE
        self.counts = torch.zeros(rows, vocab, dtype=torch.int32, device=device)
        self.bias = torch.zeros(rows, vocab, device=device)
        self.seen = torch.zeros(rows, dtype=torch.int64, device=device)
        self.tickets = torch.full((rows,), -1, dtype=torch.int64, device=device)
        self._free, self._numbers = deque(range(1, rows)), itertools.cycle(range(2**31 // rows))

    def take(self, prompt: list[int], sampling: Sampling) -> int:
        """The ticket of a row for a sequence that has not begun."""
        slot, device = self._free.popleft(), self.seen.device
        ticket = next(self._numbers) * len(self.seen) + slot
        self.tickets[slot] = ticket
        self.counts[slot] = 0
        self.counts[slot, torch.tensor(prompt, device=device)] = PROMPT
        self.bias[slot] = 0
        if sampling.logit_bias:
            tokens = torch.tensor(list(sampling.logit_bias), device=device)
            self.bias[slot, tokens] = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32, device=device)
        self.seen[slot] = len(prompt) - 1
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # steps run on another stream
        return ticket

    def free(self, ticket: int) -> None:
        self._free.append(ticket % len(self.seen))

    def adjusted(self, logits: Tensor, tokens: Tensor, places: Tensor, tickets: Tensor, penalties: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        """tokens: the last of each sequence, which stand at `places`. penalties: of repetition,
        presence and frequency.
        """
        slots = tickets % len(self.seen)
        held = self.tickets[slots] == tickets
        new = (places > self.seen[slots]) & held
        self.counts.view(-1).scatter_add_(0, slots * self.counts.shape[1] + tokens, new.int())
        self.seen.scatter_reduce_(0, slots, torch.where(held, places, -1), "amax")
        out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        adjust_logits_out(logits, self.counts.index_select(0, slots), *penalties, self.bias.index_select(0, slots), None, out)
        return out


FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


class Draws(ContinuousBatchingLogitsProcessorList):
    """Stands where transformers' list of logits processors does."""

    def __init__(self, tables: Tables) -> None:
        super().__init__(LogitsProcessorList())
        self.tensors_required = len(FLOATS) + 5  # rows of int32
        self.do_processing = True
        self._tables, self._adjusts = tables, False

    def check_kwargs(self, kwargs: dict[str, Any]) -> None:
        """Nothing to check: `Sampling` is ours."""

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        int32_tensor.zero_()  # temperature 0: rows that only pad a step draw nothing

    def prepare_tensor_args(self, requests_in_batch: list[Any], arg_storage: Tensor) -> Tensor:
        states = [request.state for request in requests_in_batch if request.has_new_token]
        asked: list[Sampling] = [state.logit_processor_kwargs["sampling"] for state in states]
        self._adjusts = any(s.ticket for s in asked)
        if asked:
            columns = ([getattr(s, name) for s in asked] for name in FLOATS)
            floats = torch.tensor(list(columns), dtype=torch.float32).view(torch.int32)
            places = [state.position_offset for state in states]
            whole = torch.tensor([[s.top_k for s in asked], places, [s.ticket for s in asked]], dtype=torch.int32)
            seeds = torch.tensor([s.seed for s in asked], dtype=torch.int64).view(torch.int32).view(-1, 2).T
            arg_storage[:, : len(asked)] = torch.cat([floats, whole, seeds]).to(arg_storage.device)
        return arg_storage

    def __call__(self, input_ids: Tensor, scores: Tensor, logits_processor_args: Tensor) -> Tensor:
        rows = logits_processor_args[:, : scores.shape[0]]
        temperature, top_p, min_p, *penalties = rows[: len(FLOATS)].contiguous().view(torch.float32)
        top_k, places, tickets = rows[len(FLOATS) : -2]
        seed = rows[-2:].T.contiguous().view(torch.int64)[:, 0]
        if self._adjusts or scores.is_cuda:  # a captured step serves any requests
            how = (tickets.long(), tuple(penalties))
            scores = self._tables.adjusted(scores, input_ids.long(), places.long() - 1, *how)
        drawn = torch.empty(scores.shape[0], dtype=torch.int64, device=scores.device)
        sample_out(scores, seed, places.long(), temperature, top_k.contiguous(), top_p, min_p, drawn)
        return torch.zeros_like(scores).scatter_(1, drawn[:, None], 1.0)
