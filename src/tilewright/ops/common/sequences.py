"""Sequences of unequal lengths as benchmarks have them, counted without listing them all: a call
plans 2**31 of them in the time of a few.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

MOST = 1024  # sequences that are counted one by one; of more, those between are like them


def near(n: int, bits: int) -> int:
    """The smallest number of so many bits, then zeros, from n on. With 3 bits there are four of
    them from a power of two to the next.
    """
    zeros = max(0, n.bit_length() - bits)
    return -(-n >> zeros) << zeros


def sample(batch: int, most: int = MOST) -> Iterator[tuple[int, int]]:
    """Indices of sequences and how many each stands for: all of them, or `most` evenly spread
    ones.
    """
    n = min(batch, most)
    for i in range(n):
        yield (2 * i + 1) * batch // (2 * n), (i + 1) * batch // n - i * batch // n


def shorter(longest: int, i: int, batch: int) -> int:
    """Length of sequence i: `longest` for the first, down to a third of it."""
    return longest - longest * i * 2 // (3 * batch)


def later(longest: int, i: int, batch: int) -> int:
    """Where the keys of sequence i begin: at 0 for the first, up to a quarter of `longest`."""
    return longest * i // (4 * batch)


def listed(longest: int, i: int, batch: int) -> int:
    """`shorter`, but with several sequences the last has none."""
    return 0 if 2 < batch < 8 and i == batch - 1 else shorter(longest, i, batch)


def end_of(p: Any, i: int) -> int:
    """Where the keys of sequence i end, of a Problem with max_len and has_len: the whole cache, or
    as `listed` has it.
    """
    return listed(p.max_len, i, p.batch) if p.has_len else p.max_len


def start_of(p: Any, i: int) -> int:
    """Where they begin."""
    return later(p.max_len, i, p.batch) if p.has_start else 0


def packed(total: int, i: int, batch: int) -> int:
    """Where packed sequence i begins: lengths fall to a third likewise, with an empty one in the
    middle of three and more.
    """
    middle = batch // 2 if batch > 2 else batch

    def shares(i: int) -> int:
        return i * (3 * batch + 1 - i) - (3 * batch - 2 * middle) * (i > middle)

    return total * shares(i) // shares(batch)


def starts(total: int, batch: int, device: torch.device) -> torch.Tensor:
    """Where packed sequences begin, and the last one ends (`cu_seqlens`)."""
    return torch.tensor([packed(total, i, batch) for i in range(batch + 1)], dtype=torch.int32, device=device)


def places(tokens: int, batch: int, length: int, varlen: bool) -> int:
    """Places of a grid whose blocks take `length` tokens of a sequence, 0 for all: `place_of` says
    which is whose. tokens: of each sequence; of all together with varlen.
    """
    if not length:
        return batch
    return tokens // length + batch if varlen else batch * -(-tokens // length)


def counted(lengths: Iterable[tuple[int, int, int]]) -> tuple[int, int]:
    """Queries and keys of all sequences, of (queries, keys, how many are like it)."""
    each = list(lengths)
    return sum(q * count for q, _, count in each), sum(n * count for _, n, count in each)
