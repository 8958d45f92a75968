"""Where a sequence ends: at a token, or at a text that its tokens spell."""

from collections.abc import Callable, Collection, Sequence

Decode = Callable[[list[int]], str]


class Ending:
    """tokens: that end a sequence. texts: that do, once `decode` finds one in what it wrote."""

    def __init__(self, sequences: int, tokens: Collection[int], texts: Sequence[str], decode: Decode | None) -> None:
        if isinstance(tokens, str) or not isinstance(tokens, Collection) or not all(isinstance(token, int) for token in tokens):
            raise TypeError(f"stop must be a list of token ids, got {tokens!r:.80}")
        if isinstance(texts, str) or not isinstance(texts, Collection) or not all(isinstance(text, str) and text for text in texts):
            raise TypeError(f"stop_texts must be a list of texts that are not empty, got {texts!r:.80}")
        if texts and decode is None:
            raise TypeError("decode must be a function from token ids to text with stop_texts, got None: give tokenizer.decode")
        self._tokens, self._texts, self._decode = set(tokens), tuple(texts), decode
        self.ended = [False] * sequences

    @property
    def possible(self) -> bool:
        """Whether any token or text ends a sequence."""
        return bool(self._tokens or self._texts)

    def extend(self, tokens: list[list[int]], new: list[list[int]]) -> list[list[int]]:
        """Appends new tokens to those of each sequence, up to the one that ends it; none if it has
        ended.

        Returns the appended tokens.
        """
        starts = [len(mine) for mine in tokens]
        for i, (mine, more) in enumerate(zip(tokens, new, strict=True)):
            for token in more:
                if self.ended[i]:
                    break
                mine.append(token)
                self.ended[i] = token in self._tokens or self._spelt(mine)
        return [mine[start:] for mine, start in zip(tokens, starts, strict=True)]

    def _spelt(self, mine: list[int]) -> bool:
        if not self._texts:
            return False
        assert self._decode is not None
        # A token may spell less than a letter, but few do in a row.
        tail = self._decode(mine[-4 * max(map(len, self._texts)) :])
        if not isinstance(tail, str):
            raise TypeError(f"decode must return a text, got {tail!r:.80}")
        return any(text in tail for text in self._texts)
