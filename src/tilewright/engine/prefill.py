"""Prefill: reads prompts with the same calls on chunks of equal length."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .graph import run
from .layers import Decoder
from .program import Call, StepBuffers
from .state import State


@dataclass(slots=True)
class Prefill:
    """The calls that read `q_len` tokens of each sequence of a batch. ids: [batch, q_len]. width:
    as of `of`. graph: of `body`, once it is captured.
    """

    buffers: StepBuffers
    ids: Tensor
    body: list[Call]
    width: int
    graph: torch.cuda.CUDAGraph | None = None

    @staticmethod
    def of(decoder: Decoder, state: State, batch: int, q_len: int, width: int, keys: int) -> "Prefill":
        """width: tokens of the longest prompt, padding included, behind what is in the cache. keys:
        at most, of a sequence.
        """
        device = state.tokens.device
        positions = torch.zeros(batch, q_len, dtype=torch.int32, device=device)
        kv_len = torch.full((batch,), q_len, dtype=torch.int32, device=device)
        ids = torch.zeros(batch, q_len, dtype=torch.int64, device=device)
        buffers = StepBuffers(batch, q_len, positions, kv_len, keys, decoder.embedding.dtype, device, state.block_table(batch))
        return Prefill(buffers, ids, list(decoder.body_calls(buffers, ids.view(-1), state.caches)), width)

    def read(self, rows: list[list[int]], into: StepBuffers | None = None, held: Sequence[int] = ()) -> None:
        """Fills the cache. rows: prompts by sequence. into: gets what the last tokens became. held:
        how many tokens of each are in the cache; none beyond the list.
        """
        q_len, width, device = self.buffers.q_len, self.width, self.ids.device
        begins = [*held, *[0] * (len(rows) - len(held))]
        rows = [row[begin:] for row, begin in zip(rows, begins, strict=True)]
        first = torch.tensor(begins, dtype=torch.int32, device=device)
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], device=device)
        positions = torch.arange(width, dtype=torch.int32, device=device)
        done: set[int] = set()
        for start in range(0, width, q_len):
            start = min(start, width - q_len)  # the last chunk reads some tokens again rather than being of another length
            self.ids.copy_(ids[:, start : start + q_len])
            self.buffers.positions.copy_(first[:, None] + positions[start : start + q_len])
            self.buffers.kv_len.copy_(first + (start + q_len))
            if self.graph is None:
                run(self.body)
            else:
                self.graph.replay()
            ending = [i for i, row in enumerate(rows) if i not in done and len(row) <= start + q_len]
            done.update(ending)
            if ending and into is not None:
                source = torch.tensor([i * q_len + len(rows[i]) - 1 - start for i in ending], device=device)
                target = torch.tensor(ending, device=device)
                for name in ("x", "y"):
                    found, last = self.buffers.made(name), into.made(name)
                    last.index_copy_(0, target, found.index_select(0, source))
