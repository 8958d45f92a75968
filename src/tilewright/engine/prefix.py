"""Prefix reuse: keys that earlier calls left in the cache serve prompts that begin alike.

A slot of a static cache holds the keys of its last sequence until another one overwrites them. In
pages, a sequence that has ended keeps its pages until others need them. A prompt takes the longest
beginning that some slot holds: its own slot's as it is, another's as a copy, or in pages by sharing
the whole ones. Its last token is always read, for its logits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from .state import State


class Prefixes:
    """What the cache holds, by slot. texts: the tokens whose keys are in it."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._texts: list[Tensor | None] = [None] * len(state.tokens)

    def take(self, rows: Sequence[Sequence[int]], batch: int) -> list[int]:
        """Brings what is held of each prompt's beginning to the slot that it runs in.

        Returns how many tokens of each prompt need not be read. What the first `batch` slots held
        is forgotten.
        """
        found = [self._longest(torch.tensor(row)) for row in rows]
        counts = self._that_fit([len(row) for row in rows], [count for _, count in found])
        if self._state.pages is not None:
            self._state.pages.adopt([(slot, count) for (slot, _), count in zip(found, counts, strict=True)], batch)
        else:
            self._copy([(slot, i) for i, ((slot, _), count) in enumerate(zip(found, counts, strict=True)) if count and slot != i])
        self._texts[:batch] = [None] * batch
        return counts

    def keep(self, rows: Sequence[list[int]], tokens: Sequence[list[int]]) -> None:
        """rows: prompts that have run. tokens: their answers, of which the last has no key."""
        for i, (row, mine) in enumerate(zip(rows, tokens, strict=True)):
            self._texts[i] = torch.tensor(row + mine[:-1])

    def forget(self) -> None:
        self._texts = [None] * len(self._texts)
        if self._state.pages is not None:
            self._state.pages.take_all_back()

    def _longest(self, row: Tensor) -> tuple[int, int]:
        """The slot that holds most of a prompt's beginning, and how many tokens of it."""
        best = 0, 0
        for slot, text in enumerate(self._texts):
            if text is None:
                continue
            most = min(len(text), len(row) - 1)
            if self._state.pages is not None:
                most = min(most, self._state.pages.room(slot))
            same = text[:most] == row[:most]
            count = most if bool(same.all()) else int((~same).int().argmax())
            if count > best[1]:
                best = slot, count
        return best

    def _that_fit(self, lengths: list[int], counts: list[int]) -> list[int]:
        """Fewer, so that each prompt has room in the cache for as many tokens as the longest rest:
        all are read in step.
        """
        unit = 1 if self._state.pages is None else self._state.pages.page_size
        while True:
            width = -(-max(n - count for n, count in zip(lengths, counts, strict=True)) // 16) * 16
            fewer = [max(0, min(count, self._state.max_len - width)) // unit * unit for count in counts]
            if fewer == counts:
                return counts
            counts = fewer

    def _copy(self, moves: list[tuple[int, int]]) -> None:
        """moves: from slot, to slot. All are read before one is written."""
        if not moves:
            return
        sources, targets = (torch.tensor(slots, device=self._state.tokens.device) for slots in zip(*moves, strict=True))
        for cache in self._state.caches:
            for part in cache:
                bits = part.view(torch.uint8) if part.dtype.itemsize == 1 else part  # of codes no index op takes all
                bits.index_copy_(0, targets, bits.index_select(0, sources))
