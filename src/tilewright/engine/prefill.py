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
    as in `of`. kept: states of the batch. graph: of `body`, once it is captured.
    """

    buffers: StepBuffers
    ids: Tensor
    body: list[Call]
    width: int
    kept: list[Tensor]
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
        return Prefill(buffers, ids, list(decoder.body_calls(buffers, ids.view(-1), state.caches)), width, [x[:batch] for x in state.kept])

    def read(self, rows: list[list[int]], into: StepBuffers | None = None, held: Sequence[int] = ()) -> None:
        """Fills the cache. rows: prompts by sequence. into: gets what the last tokens became. held:
        how many tokens of each are in the cache; none beyond the list.

        All end together: padding stands in front, at negative positions, where it stores nothing.
        """
        q_len, device = self.buffers.q_len, self.ids.device
        begins = [*held, *[0] * (len(rows) - len(held))]
        rows = [row[begin:] for row, begin in zip(rows, begins, strict=True)]
        width = -(-self.width // q_len) * q_len
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=device)
        first, padding = (torch.tensor(n, dtype=torch.int32, device=device) for n in (begins, [width - len(row) for row in rows]))
        columns = torch.arange(width, dtype=torch.int32, device=device) - padding[:, None]
        positions = torch.where(columns < 0, -1, first[:, None] + columns)
        for kept in self.kept:
            kept.zero_()
        for start in range(0, width, q_len):
            self.ids.copy_(ids[:, start : start + q_len])
            self.buffers.positions.copy_(positions[:, start : start + q_len])
            self.buffers.kv_len.copy_(first + (start + q_len - padding).clamp(min=0))
            run(self.body, self.graph)
        if into is not None:
            for name in ("x", "y"):
                into.made(name).copy_(self.buffers.made(name).view(len(rows), q_len, -1)[:, -1])
