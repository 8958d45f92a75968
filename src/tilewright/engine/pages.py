"""A cache in pages: which sequence holds which pages of the pool.

The host writes the block table, the device reads it. So one captured graph serves any step. The
host writes only when it has just waited for the device anyway. It then gives each sequence the
pages for all steps until the next such wait.
"""

from collections.abc import Sequence
from typing import Literal

import torch

from ..launch import argument_error, check_integers

CacheKind = Literal["static", "paged"]
PAGE_SIZE = 64

# The page that no sequence gets. The table names it where a sequence has no page of its own:
# padding after a prompt, and sequences that have ended but run on until the batch ends. No sequence
# that counts reads it.
NOBODYS = 0


class Pages:
    """The pages of a pool, and the block table [sequences, max_pages].

    count: pages, NOBODYS included. table: int32, on the device. keep: a sequence that has ended
        keeps its pages until others need them.
    """

    def __init__(self, count: int, page_size: int, sequences: int, max_pages: int, device: torch.device, *, keep: bool = False) -> None:
        self.count, self.page_size, self._keep = count, page_size, keep
        self.table = torch.full((sequences, max_pages), NOBODYS, dtype=torch.int32, device=device)
        self._staged = torch.full((sequences, max_pages), NOBODYS, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._free: list[int]
        self._held: list[list[int]]
        self._uses: list[int]  # how many sequences hold each page
        self._ended: list[int]  # sequences that have ended and keep their pages, the oldest first
        self.take_all_back()

    def take_all_back(self) -> None:
        self._free = list(range(self.count - 1, NOBODYS, -1))
        self._held = [[] for _ in range(len(self.table))]
        self._uses, self._ended = [0] * self.count, []
        self._staged.fill_(NOBODYS)

    @property
    def in_use(self) -> int:
        """Pages that sequences hold."""
        return self.count - 1 - len(self._free)

    def room(self, sequence: int) -> int:
        """Tokens in the pages that a sequence holds."""
        return len(self._held[sequence]) * self.page_size

    def adopt(self, sources: Sequence[tuple[int, int]], sequences: int) -> None:
        """Lets sequences that are about to begin share pages. sources: of each, one that has ended,
        and how many of its tokens; whole pages are shared. What else the first `sequences` held is
        free.
        """
        shared = [self._held[source][: tokens // self.page_size] for source, tokens in sources]
        for page in (page for pages in shared for page in pages):
            self._uses[page] += 1
        for row in range(sequences):
            self._release(row)
        for row, pages in enumerate(shared):
            self._held[row] = pages
            self._staged[row, : len(pages)] = torch.tensor(pages, dtype=torch.int32)

    def _release(self, row: int) -> None:
        for page in reversed(self._held[row]):
            self._uses[page] -= 1
            if not self._uses[page]:
                self._free.append(page)
        self._held[row] = []
        self._staged[row] = NOBODYS
        if row in self._ended:
            self._ended.remove(row)

    def hold(self, tokens: Sequence[int]) -> None:
        """Gives each sequence the pages for its number of tokens.

        A sequence with 0 tokens, or beyond the list, has ended.

        Call it only after the device has run everything enqueued: the copy of the table reads
        memory that the next call changes.

        Args:
            tokens: for each sequence; a sequence that holds more keeps them.
        Raises: MemoryError: the pool has too few pages; nothing has changed.
        """
        wanted = [-(-n // self.page_size) for n in tokens] + [0] * (len(self._held) - len(tokens))
        missing = [max(0, n - len(held)) for n, held in zip(wanted, self._held, strict=True)]
        running = {page for n, held in zip(wanted, self._held, strict=True) if n for page in held}
        if sum(missing) > self.count - 1 - len(running):
            raise MemoryError(
                f"the pages of the cache are used up: {sum(n > 0 for n in wanted)} sequences need {sum(wanted) * self.page_size} tokens, and there "
                f"are {(self.count - 1) * self.page_size}. Raise cache_tokens, or lower the number of prompts, their lengths or max_new_tokens"
            )
        if not any(wanted) and not self._keep:
            self.take_all_back()  # also what an interrupted call left half done
        for row, (n, held) in enumerate(zip(wanted, self._held, strict=True)):
            if n == 0 and held and row not in self._ended:
                self._ended.append(row)
                self._staged[row] = NOBODYS  # it runs on until the batch ends
        while self._ended and (not self._keep or sum(missing) > len(self._free)):
            self._release(self._ended[0])
        for row, (more, held) in enumerate(zip(missing, self._held, strict=True)):
            if more:
                new = [self._free.pop() for _ in range(more)]
                for page in new:
                    self._uses[page] = 1
                self._staged[row, len(held) : len(held) + more] = torch.tensor(new, dtype=torch.int32)
                held += new
        self.table.copy_(self._staged, non_blocking=True)


def pool_shape(cache: str, page_size: int | None, cache_tokens: int | None, mode: str, max_batch: int, max_len: int) -> tuple[int, int]:
    """Tokens of a page, and number of pages with NOBODYS; (1, 0) for a static cache.

    Raises: ValueError for bad values or combinations. The arguments are those of `Engine`.
    """
    if cache not in ("static", "paged"):
        raise argument_error("cache", '"static" or "paged"', repr(cache))
    if cache == "static":
        for name, value in (("page_size", page_size), ("cache_tokens", cache_tokens)):
            if value is not None:
                raise argument_error(name, 'given only with cache="paged"', value)
        return 1, 0
    if mode == "mega":
        raise argument_error("cache", '"static" with mode="mega": the megakernel reads one sequence, row by row', '"paged"')
    page_size = PAGE_SIZE if page_size is None else page_size
    check_integers(page_size=page_size, cache_tokens=page_size if cache_tokens is None else cache_tokens)
    if page_size < 16 or page_size & (page_size - 1):
        raise argument_error("page_size", "a power of two, at least 16", page_size)
    whole = max_batch * -(-max_len // page_size)
    if cache_tokens is None:
        return page_size, whole + 1
    if cache_tokens < page_size:
        raise argument_error("cache_tokens", f"at least one page of {page_size}", cache_tokens)
    return page_size, min(cache_tokens // page_size, whole) + 1
