"""What changes from step to step, all on the device: tokens, positions, cache."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from .advance import advance
from .layers import Decoder
from .pages import Pages
from .program import Call, Emit, StepBuffers
from .sampling import Choice, Sampling

FEW_KEYS = 128  # for which calls of their own are made; and for twice as many, 4 times those, and so on
SLOTS = 64  # the cache's length is a multiple: the kernels' fast loads want 16


class State:
    """The device tensors that a decode program reads and writes.

    tokens: int64 [batch], the last token of each sequence.
    counters: int32 [2, batch], its position, and the number of keys once it is appended.
    recent: int64 [rows, batch], the tokens chosen since the host last read them.
    clock: int64 [2], the next row of `recent`, and the number of draws.
    choice: what the choice of a token needs.
    caches: the cache of each layer.
    stacks: with `stacked`, all layers' caches of one sequence as two tensors [layers, kv_heads,
        max_len, head_dim]; `caches` are views of them.
    pages: for caches in pages, the pages of each sequence. dtype: of activations.
    """

    stacks: tuple[Tensor, Tensor]

    def __init__(self, model: Decoder, batch: int, max_len: int, rows: int, *, pages: Pages | None = None, stacked: bool = False) -> None:
        device, dtype = model.embedding.device, model.embedding.dtype
        padded = -(-batch // 16) * 16  # aligned rows
        self.tokens = torch.zeros(padded, dtype=torch.int64, device=device)
        self.counters = torch.zeros(2, padded, dtype=torch.int32, device=device)
        self.recent = torch.zeros(rows, padded, dtype=torch.int64, device=device)
        self.clock = torch.zeros(2, dtype=torch.int64, device=device)
        self.choice = Choice(padded, model.vocab, device)
        # Zeros: an unwritten key is masked, but a NaN in its value would survive a weight of 0.
        self.max_len, self.pages, self.dtype = max_len, pages, dtype
        self._states = [layer.attention.states for layer in model.layers]
        if stacked:
            (shape, _), _ = model.layers[0].attention.cache_arrays(1, max_len, dtype)
            keys, values = (torch.zeros(len(model.layers), *shape[1:], dtype=dtype, device=device) for _ in range(2))
            self.stacks = keys, values
            self.caches: list[tuple[Tensor, ...]] = [(k[None], v[None]) for k, v in zip(keys, values, strict=True)]
            return
        sizes = (batch, max_len) if pages is None else (pages.count, pages.page_size)
        self.caches = [
            tuple(torch.zeros(shape, dtype=of, device=device) for shape, of in layer.attention.cache_arrays(*sizes, dtype)) for layer in model.layers
        ]

    @property
    def kept(self) -> list[Tensor]:
        """What is no cache of tokens: states, by sequence."""
        return [part for cache, states in zip(self.caches, self._states, strict=True) for part in cache[:states]]

    def block_table(self, batch: int) -> Tensor | None:
        """The block table of the first `batch` sequences; None for a cache without pages."""
        return None if self.pages is None else self.pages.table[:batch]

    def buffers(self, batch: int) -> StepBuffers:
        """One token for each of the first `batch` sequences."""
        positions, kv_len = self.counters[0, :batch, None], self.counters[1, :batch]
        return StepBuffers(batch, 1, positions, kv_len, self.max_len, self.dtype, self.tokens.device, self.block_table(batch))

    def reaches(self) -> Iterator[tuple[int, list[tuple[Tensor, ...]]]]:
        """Numbers of keys, up to the cache's length, and what the cache has of so many.

        What an op decides depends on how many keys there may be, never on how many there are: with
        a few it needs no merge. A cache in pages is one.
        """
        keys = FEW_KEYS
        while keys < self.max_len and self.pages is None:
            yield keys, [(*cache[:n], *_first(cache[n:], keys)) for cache, n in zip(self.caches, self._states, strict=True)]
            keys *= 2 if keys == FEW_KEYS else 4
        yield self.max_len, self.caches

    def begin(self, rows: Sequence[Sequence[int]], sampling: Sampling) -> None:
        """Sets the state for these prompts, before their first new token is chosen."""
        self.counters.zero_()
        lengths = torch.tensor([len(row) for row in rows])
        self.counters[:, : len(rows)].copy_(torch.stack((lengths - 1, lengths)))
        self.clock.zero_()
        self.choice.begin(rows, sampling)

    def told(self, steps: int, sequences: int) -> Callable[[], list[list[int]]]:
        """Waits for the tokens of the last `steps` steps, and returns them by sequence. The device
        runs what is begun before that call meanwhile.
        """
        recent = self.recent[:steps, :sequences]
        found = torch.empty(recent.shape, dtype=recent.dtype, pin_memory=recent.is_cuda)
        found.copy_(recent, non_blocking=True)
        self.clock[0] = 0
        there = torch.cuda.Event() if recent.is_cuda else None
        if there is not None:
            there.record()

        def tokens() -> list[list[int]]:
            if there is not None:
                there.synchronize()
            by_sequence: list[list[int]] = found.t().tolist()
            return by_sequence

        return tokens

    def choose_calls(self, buffers: StepBuffers, sampling: Sampling, *, masked: bool = False) -> Emit:
        """Chooses a token from the step's logits, notes it, and moves on by one position."""
        yield from self.choice.calls(buffers, self.tokens[: buffers.batch], self.clock[1:], sampling, masked=masked)
        yield Call.of("advance", advance, tokens=self.tokens, recent=self.recent, counters=self.counters, clock=self.clock)


def _first(cache: tuple[Tensor, ...], keys: int) -> tuple[Tensor, ...]:
    """Of keys, values and their scales."""
    return tuple(part.narrow(-1 if i > 1 else -2, 0, keys) for i, part in enumerate(cache))


def cache_bytes(model: Decoder, batch: int, max_len: int) -> int:
    arrays = (array for layer in model.layers for array in layer.attention.cache_arrays(batch, max_len, model.embedding.dtype))
    return sum(dtype.itemsize * torch.Size(shape).numel() for shape, dtype in arrays)
