"""A cache in pages: which page of the pool holds which tokens of which sequence.

The host decides, the device reads: a decode step finds its pages in a table on the device, so that one captured graph serves any step. The host
writes that table only where it has just waited for the device anyway, and gives each sequence the pages of the steps up to the next such wait.
"""

from collections.abc import Sequence
from typing import Literal

import torch

from ..launch import must

CacheKind = Literal["static", "paged"]
PAGE_SIZE = 64

# The page that no sequence is given. Where the table has no page of a sequence's own (padding behind a prompt, sequences that have ended and run
# on until the batch does), it names this one: what is written there is never read by a sequence that counts.
NOBODYS = 0


class Pages:
    """The pages of a pool, and the table [sequences, max_pages] of those that each sequence holds.

    count: pages, NOBODYS included. table: int32, on the device.
    """

    def __init__(self, count: int, page_size: int, sequences: int, max_pages: int, device: torch.device) -> None:
        self.count, self.page_size = count, page_size
        self.table = torch.full((sequences, max_pages), NOBODYS, dtype=torch.int32, device=device)
        self._staged = torch.full((sequences, max_pages), NOBODYS, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._free: list[int]
        self._held: list[list[int]]
        self._take_all_back()

    def _take_all_back(self) -> None:
        self._free = list(range(self.count - 1, NOBODYS, -1))
        self._held = [[] for _ in range(len(self.table))]
        self._staged.fill_(NOBODYS)

    @property
    def in_use(self) -> int:
        """Pages that sequences hold."""
        return sum(map(len, self._held))

    def hold(self, tokens: Sequence[int]) -> None:
        """Gives each sequence the pages for so many tokens; takes all back from those with none, and from sequences beyond the list.

        Call it only when the device has run all that was enqueued: the table is copied from memory that the next call changes.

        Args:
            tokens: for each sequence; where it holds more already, it keeps them.
        Raises: MemoryError, with nothing given or taken: the pool has too few pages.
        """
        wanted = [-(-n // self.page_size) for n in tokens] + [0] * (len(self._held) - len(tokens))
        missing = [max(0, n - len(held)) for n, held in zip(wanted, self._held, strict=True)]
        returned = sum(len(held) for n, held in zip(wanted, self._held, strict=True) if n == 0)
        if sum(missing) > len(self._free) + returned:
            raise MemoryError(
                f"the pages of the cache are used up: {sum(n > 0 for n in wanted)} sequences need {sum(wanted) * self.page_size} tokens, and there "
                f"are {(self.count - 1) * self.page_size}. Raise cache_tokens, or lower the number of prompts, their lengths or max_new_tokens"
            )
        if not any(wanted):
            self._take_all_back()  # also what an interrupted call left half done
        for row, (n, held) in enumerate(zip(wanted, self._held, strict=True)):
            if n == 0 and held:
                self._free += reversed(held)
                held.clear()
                self._staged[row] = NOBODYS
        for row, (more, held) in enumerate(zip(missing, self._held, strict=True)):
            if more:
                new = [self._free.pop() for _ in range(more)]
                self._staged[row, len(held) : len(held) + more] = torch.tensor(new, dtype=torch.int32)
                held += new
        self.table.copy_(self._staged, non_blocking=True)


def pool_shape(cache: str, page_size: int | None, cache_tokens: int | None, mode: str, max_batch: int, max_len: int) -> tuple[int, int]:
    """Tokens of a page, and pages with the one that is NOBODYS; (1, 0) for a static cache.

    Raises: ValueError for what is not to be had, or makes no sense together. The arguments are those of `Engine`.
    """
    if cache not in ("static", "paged"):
        raise must("cache", '"static" or "paged"', repr(cache))
    if cache == "static":
        for name, value in (("page_size", page_size), ("cache_tokens", cache_tokens)):
            if value is not None:
                raise must(name, 'given only with cache="paged"', value)
        return 1, 0
    if mode == "mega":
        raise must("cache", '"static" with mode="mega": the megakernel reads one sequence, row by row', '"paged"')
    page_size = PAGE_SIZE if page_size is None else page_size
    if page_size < 16 or page_size & (page_size - 1):
        raise must("page_size", "a power of two, at least 16", page_size)
    whole = max_batch * -(-max_len // page_size)
    if cache_tokens is None:
        return page_size, whole + 1
    if cache_tokens < page_size:
        raise must("cache_tokens", f"at least one page of {page_size}", cache_tokens)
    return page_size, min(cache_tokens // page_size, whole) + 1
