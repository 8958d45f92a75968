"""The text of an answer while its tokens arrive."""

import re
from typing import Any

_BYTE = re.compile("<0x[0-9A-F]{2}>")


class Text:
    """Turns tokens into text, and ends it before the first of some strings.

    stopped: whether one of them was found. What follows is dropped.
    """

    def __init__(self, tokenizer: Any, stops: list[str]) -> None:
        from tokenizers.decoders import DecodeStream

        self._words = tokenizer.backend_tokenizer
        self._stream = DecodeStream([], skip_special_tokens=True)
        self._special = {index for index, token in self._words.get_added_tokens_decoder().items() if token.special}
        self._run: list[int] = []  # bytes in a row: one more may make others characters of all of them
        self._stops = stops
        self._tokens: list[int] = []
        self._decoded = 0  # characters
        self._held = ""  # may begin a stop string
        self.stopped = False

    def add(self, tokens: list[int]) -> str:
        """The text that these tokens make certain."""
        self._tokens += tokens
        found = ""
        for token in tokens:
            self._run.append(token)
            if token not in self._special and not _BYTE.fullmatch(self._words.id_to_token(token) or ""):
                found += self._stream.step(self._words, self._run) or ""
                self._run = []
        return self._certain(found, last=False)

    def end(self) -> str:
        """The rest, with what is left of a character that never was complete."""
        whole: str = self._words.decode(self._tokens, skip_special_tokens=True)
        return self._certain(whole[self._decoded :], last=True)

    def _certain(self, found: str, last: bool) -> str:
        if self.stopped:
            return ""
        self._decoded += len(found)
        text = self._held + found
        begins = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if begins:
            self.stopped, self._held = True, ""
            return text[: min(begins)]
        held = 0 if last else max((n for stop in self._stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]
