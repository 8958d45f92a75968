"""Speculative decoding: tokens that a sequence is likely to repeat are checked in one step.

A draft comes from the sequence itself: the tokens that stood behind its last few tokens when these
came before (Saxena 2023, "Prompt lookup decoding"). A step reads the last token and the draft, and
chooses a token behind each of them, with the noise that a step alone would have. So the choices are
those of plain decoding, whatever the temperature, up to rounding; they count as far as the draft
was right, and one further.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..launch import argument_error, check_integers
from .ending import Ending
from .graph import run
from .layers import Decoder
from .program import Call, StepBuffers
from .sampling import Sampling
from .state import State

LONGEST = 3  # tokens that are looked up
MOST = 15  # of a draft


def lookup(tokens: list[int], most: int) -> list[int]:
    """What followed the last tokens where they stood last: up to `most` tokens."""
    for size in range(min(LONGEST, len(tokens) - 1), 0, -1):
        tail = tokens[-size:]
        for at in range(len(tokens) - size - 1, -1, -1):
            if tokens[at : at + size] == tail:
                return tokens[at + size : at + size + most]
    return []


@dataclass(slots=True)
class Verify:
    """The calls that read the last token and a draft of each sequence, and choose a token behind
    each.

    ids: int64 [batch, 1 + draft]. draws: int64 [1 + draft, batch], how many tokens each sequence
        had. chosen: int64 [1 + draft, batch].
    """

    buffers: StepBuffers
    ids: Tensor
    draws: Tensor
    chosen: Tensor
    calls: list[Call]
    graph: torch.cuda.CUDAGraph | None = None

    @staticmethod
    def of(
        decoder: Decoder, state: State, batch: int, draft: int, sampling: Sampling, *, ids: Tensor | None = None, places: Tensor | None = None
    ) -> "Verify":
        """places: int32 [2 + draft, batch], the positions of ids, and the number of keys."""
        device, q_len = state.tokens.device, 1 + draft
        if places is None:
            places = torch.arange(q_len + 1, dtype=torch.int32, device=device)[:, None].expand(-1, batch).contiguous()
        if ids is None:
            ids = torch.zeros(batch, q_len, dtype=torch.int64, device=device)
        draws, chosen = (torch.zeros(q_len, batch, dtype=torch.int64, device=device) for _ in range(2))
        dtype, table = decoder.embedding.dtype, state.block_table(batch)
        positions, kv_len = places[:-1].t(), places[-1]
        body = StepBuffers(batch, q_len, positions, kv_len, state.max_len, dtype, device, table)
        calls = list(decoder.body_calls(body, ids.view(-1), state.caches))
        # The head takes a row for each token, and what the layers left in x and y.
        rows = StepBuffers(batch * q_len, 1, positions, kv_len, state.max_len, dtype, device, table, body._tensors)
        calls += decoder.head_calls(rows)
        logits = rows.made("logits").view(batch, q_len, -1)
        for i in range(q_len):
            calls += state.choice.choose(logits[:, i], chosen[i], draws[i], sampling)
        return Verify(body, ids, draws, chosen, calls)

    def fill(self, rows: list[list[int]], drafts: list[list[int]], prompts: list[int]) -> None:
        """rows: all tokens of each sequence so far. prompts: how many of them are its prompt's."""
        q_len, device = self.buffers.q_len, self.ids.device
        ids = [[row[-1], *draft, *[0] * (q_len - 1 - len(draft))] for row, draft in zip(rows, drafts, strict=True)]
        first = torch.tensor([len(row) - 1 for row in rows])
        count = len(rows)
        self.ids[:count].copy_(torch.tensor(ids))
        self.buffers.positions[:count].copy_((first[:, None] + torch.arange(q_len)).int())
        self.buffers.kv_len[:count].copy_((first + q_len).int())
        written = torch.tensor([len(row) - prompt for row, prompt in zip(rows, prompts, strict=True)])
        self.draws[:, :count].copy_(written[None].to(device) + torch.arange(q_len, device=device)[:, None])

    def accepted(self, drafts: list[list[int]]) -> list[list[int]]:
        """The new tokens of each sequence: one more than of its draft were right."""
        chosen = self.chosen[:, : len(drafts)].t().tolist()
        found = []
        for mine, draft in zip(chosen, drafts, strict=True):
            right = next((i for i, token in enumerate(draft) if mine[i] != token), len(draft))
            found.append(mine[: right + 1])
        return found


def check_speculation(draft: int, sampling: Sampling, mode: str, *, masked: bool) -> None:
    """Raises ValueError for what cannot be combined with drafts."""
    check_integers(speculate=draft)
    if not 0 <= draft <= MOST:
        raise argument_error("speculate", f"0 (off) to {MOST}", draft)
    if draft and (masked or sampling.penalties or sampling.logit_bias):
        raise argument_error("speculate", "0 with masks, penalties or biases, because each token changes them for the next", draft)
    if draft and mode == "mega":
        raise argument_error("speculate", '0 with mode="mega", whose kernel computes one token at a time', draft)


def decode_with_drafts(
    verify: Verify, hold: Callable[[list[int]], None], rows: list[list[int]], tokens: list[list[int]], ending: Ending, most: int
) -> Iterator[tuple[list[list[int]], int]]:
    """Continues sequences whose first tokens are chosen, until all have ended or have `most`.

    hold: gives each sequence a cache of so many tokens. Yields what each gained, and 1, step by
    step.
    """
    draft = verify.buffers.q_len - 1
    while True:
        texts = [row + mine for row, mine in zip(rows, tokens, strict=True)]
        left = [0 if ended else most - len(mine) for ended, mine in zip(ending.ended, tokens, strict=True)]
        if not any(left):
            return
        drafts = [lookup(text, min(draft, more - 1)) if more else [] for text, more in zip(texts, left, strict=True)]
        hold([len(text) + draft if more else 0 for text, more in zip(texts, left, strict=True)])
        verify.fill(texts, drafts, [len(row) for row in rows])
        run(verify.calls, verify.graph)
        found = verify.accepted(drafts)
        yield ending.extend(tokens, [new[:more] for new, more in zip(found, left, strict=True)]), 1
