"""Greedy text from a loaded model: timed, with its kernel launches counted, alone or beside stock
transformers on the same weights.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..launch import argument_error, counted
from . import chat_template
from .files import read_by_others
from .load import Loaded
from .patch import Report, patch

OnText = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Generation:
    """One greedy continuation.

    prompt_tokens: tokens read. tokens: tokens written, the stop token included.
    text: their text (without a tokenizer, their numbers).
    first_token_s: from the call to the first token. decode_s: from there to the last one.
    launches: kernel name -> number of launches.
    """

    prompt_tokens: int
    tokens: list[int]
    text: str
    first_token_s: float
    decode_s: float
    launches: dict[str, int] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Tokens written per second of the whole call, with the prompt."""
        return len(self.tokens) / (self.first_token_s + self.decode_s)

    @property
    def decode_tokens_per_s(self) -> float:
        return (len(self.tokens) - 1) / self.decode_s if len(self.tokens) > 1 else 0.0

    def as_dict(self) -> dict[str, Any]:
        """JSON types."""
        return {
            "text": self.text,
            "tokens": self.tokens,
            "prompt_tokens": self.prompt_tokens,
            "first_token_s": self.first_token_s,
            "tokens_per_s": self.tokens_per_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "launches": self.launches,
        }


@dataclass(frozen=True, slots=True)
class Draw:
    """How tokens are chosen, and where a text ends.

    temperature: 0 takes the likeliest; else `seed` decides what is drawn. The others as in
        `tilewright.engine.Sampling`.
    stop: texts that end an answer.
    """

    temperature: float = 0.0
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if "" in self.stop:
            raise argument_error("stop", "texts that are not empty", repr(""))


GREEDY = Draw()
COLDEST = 1e-30  # with it a draw is as good as the likeliest token; transformers divides by less, which gives infinities
_CHOICES = ("temperature", "seed", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Our kernels, and on request stock transformers on the same weights. report: None for an
    engine, which patches nothing.
    """

    ours: Generation
    stock: Generation | None
    report: Report | None

    @property
    def equal(self) -> bool | None:
        """Whether both wrote the same tokens; None if stock did not run."""
        return None if self.stock is None else self.ours.tokens == self.stock.tokens

    def difference(self) -> str:
        """Where the two first differ, in words."""
        if self.stock is None or self.equal:
            return ""
        ours, stock = self.ours.tokens, self.stock.tokens
        at = next((i for i, (a, b) in enumerate(zip(ours, stock, strict=False)) if a != b), min(len(ours), len(stock)))
        return f"token {at}: ours {ours[at : at + 1]}, transformers {stock[at : at + 1]}"

    def as_dict(self) -> dict[str, Any]:
        """JSON types."""
        return {
            "ours": self.ours.as_dict(),
            "transformers": self.stock.as_dict() if self.stock else None,
            "equal": self.equal,
            "patched": self.report.as_dict() if self.report else None,
        }


def encode(loaded: Loaded, prompt: str, *, raw: bool = False) -> Tensor:
    """Token ids [1, prompt_tokens] of `prompt` in the chat template, unless `raw` or there is none.

    Without a tokenizer: its UTF-8 bytes.
    """
    try:
        prompt.encode()
    except UnicodeEncodeError:  # half a character, as other bytes become on a command line
        raise argument_error("prompt", "UTF-8 text", ascii(prompt)[:80]) from None
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        ids: Any = torch.tensor([list(prompt.encode())])
    else:
        with read_by_others(Path(loaded.source), "a model whose tokenizer and chat template take a prompt"):
            if raw or not tokenizer.chat_template:
                ids = tokenizer(prompt, return_tensors="pt").input_ids
            else:
                text = chat_template.applied(tokenizer, [{"role": "user", "content": prompt}])
                ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
    if ids.shape[1] == 0:
        raise argument_error("prompt", "at least one token", repr(prompt))
    vocab_size = loaded.model.get_input_embeddings().num_embeddings
    if int(ids.max()) >= vocab_size:
        raise argument_error("prompt", f"in the model's vocabulary of {vocab_size} tokens", f"token {int(ids.max())}")
    moved: Tensor = ids.to(loaded.model.device)
    return moved


def text_of(tokenizer: Any | None, tokens: list[int]) -> str:
    """The text of tokens; without a tokenizer, their numbers."""
    return " ".join(map(str, tokens)) if tokenizer is None else str(tokenizer.decode(tokens, skip_special_tokens=True))


def stop_tokens(model: Any) -> list[int]:
    """The tokens that end a text."""
    found = model.generation_config.eos_token_id
    return [] if found is None else [found] if isinstance(found, int) else list(found)


def check_positions(model: Any, prompt_tokens: int, max_new_tokens: int) -> None:
    """Raises ValueError for a text longer than a model's table of positions, if it has one."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if not most or prompt_tokens + max_new_tokens <= most + 1:
        return
    words = model.get_input_embeddings()
    tables = [part.weight for part in model.modules() if isinstance(part, nn.Embedding) and part is not words]
    tables += [table for name, table in model.named_buffers() if name.endswith("embed_positions")]  # GPT-J's angles
    if any(0 <= len(table) - most <= 2 for table in tables):  # OPT has two rows more
        wanted = f"at most {most + 1} tokens: all but the last need one of the model's {most} positions"
        raise argument_error("a prompt with its answer", wanted, f"{prompt_tokens} + {max_new_tokens}")


class _Stream:
    """transformers' streamer protocol: `put` gets the prompt, then each chosen token."""

    def __init__(self, tokenizer: Any | None, on_text: OnText | None) -> None:
        self.times: list[float] = []
        self.tokens: list[int] = []
        self._tokenizer, self._on_text, self._printed = tokenizer, on_text, 0

    def put(self, value: Tensor) -> None:
        self.times.append(time.perf_counter())
        if len(self.times) == 1:
            return
        self.tokens += value.flatten().tolist()
        if self._on_text is not None:
            text = self.text()
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):  # else the character continues in the next token
                self._flush(text)

    def end(self) -> None:
        if self._on_text is not None:
            self._flush(self.text())

    def text(self) -> str:
        return text_of(self._tokenizer, self.tokens)

    def _flush(self, text: str) -> None:
        assert self._on_text is not None
        if len(text) > self._printed:
            self._on_text(text[self._printed :])
            self._printed = len(text)


@contextmanager
def tokens_alone(model: Any) -> Iterator[None]:
    """Leaves of a model's generation_config only the tokens that begin, end and pad a text.

    Its other options are whatever a file says, and transformers' `generate` would take up all that
    it is not told.
    """
    from transformers import GenerationConfig

    said = model.generation_config
    model.generation_config = GenerationConfig(**{name: getattr(said, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")})
    try:
        yield
    finally:
        model.generation_config = said


def choices_of(draw: Draw) -> dict[str, Any]:
    """What transformers' `generate` is told of how tokens are chosen.

    Raises: as `engine.Sampling`; transformers itself takes an infinite temperature.
    """
    _sampling(draw)
    return {
        "do_sample": draw.temperature > 0,
        "temperature": max(draw.temperature, COLDEST) if draw.temperature else None,
        "top_p": draw.top_p if draw.temperature and draw.top_p < 1 else None,
        "top_k": draw.top_k if draw.temperature and draw.top_k else None,
        "min_p": draw.min_p if draw.temperature and draw.min_p else None,
        "repetition_penalty": draw.repetition_penalty,
    }


def stops_of(loaded: Loaded, draw: Draw, prompts: Tensor) -> dict[str, Any]:
    """What it is told of the texts that end an answer. Its own `stop_strings` may begin in the
    prompt.

    prompts: what `generate` reads, [batch, tokens].
    """
    if not draw.stop:
        return {}
    from transformers import StoppingCriteriaList

    from ..engine.ending import Ending

    ending = Ending(len(prompts), (), draw.stop, getattr(loaded.tokenizer, "decode", None))
    tokens: list[list[int]] = [[] for _ in prompts]
    seen = prompts.shape[1]

    def ended(ids: Tensor, scores: object, **_: object) -> Tensor:
        nonlocal seen
        ending.extend(tokens, ids[:, seen:].tolist())
        seen = ids.shape[1]
        return torch.tensor(ending.ended, device=ids.device)

    return {"stopping_criteria": StoppingCriteriaList([ended])}


def _sampling(draw: Draw) -> Any:
    from ..engine import Sampling

    return Sampling(**{name: getattr(draw, name) for name in _CHOICES})


def generate(loaded: Loaded, prompt_ids: Tensor, *, max_new_tokens: int, draw: Draw = GREEDY, on_text: OnText | None = None) -> Generation:
    """The continuation of [1, prompt_tokens]. on_text: called with each new piece of text."""
    if max_new_tokens < 1:
        raise argument_error("max_new_tokens", "at least 1", max_new_tokens)
    check_positions(loaded.model, prompt_ids.shape[1], max_new_tokens)
    stream, choices = _Stream(loaded.tokenizer, on_text), choices_of(draw) | stops_of(loaded, draw, prompt_ids)
    if draw.temperature:
        torch.manual_seed(draw.seed)
    start = time.perf_counter()
    with torch.inference_mode(), tokens_alone(loaded.model), counted() as launches:
        loaded.model.generate(
            prompt_ids,
            attention_mask=torch.ones_like(prompt_ids),
            max_new_tokens=max_new_tokens,
            streamer=stream,
            **choices,
        )
    first, last = stream.times[1], stream.times[-1]
    return Generation(prompt_ids.shape[1], stream.tokens, stream.text(), first - start, last - first, dict(launches))


def engine_choices_of(loaded: Loaded, draw: Draw) -> dict[str, Any]:
    """Likewise for an Engine."""
    return {
        "sampling": _sampling(draw),
        "stop": stop_tokens(loaded.model),
        "stop_texts": draw.stop,
        "decode": getattr(loaded.tokenizer, "decode", None),
    }


def generate_with_engine(
    loaded: Loaded,
    prompt_ids: Tensor,
    *,
    max_new_tokens: int,
    mode: str,
    draw: Draw = GREEDY,
    on_text: OnText | None = None,
    options: dict[str, Any] | None = None,
) -> Generation:
    """As `generate`, by an Engine made for this call.

    The times do not include its compilation.

    mode, options: of the Engine. Replays of a graph count no launches.
    """
    from ..engine import Engine

    stream = _Stream(loaded.tokenizer, on_text)
    stream.put(prompt_ids)
    prompt_tokens = prompt_ids.shape[1]
    options = options or {}
    longest = prompt_tokens + max_new_tokens + options.get("speculate", 0)
    sizes = {"max_len": longest, "check_every": 1 if prompt_ids.device.type == "cpu" else 8}
    with Engine(loaded.model, mode=mode, **sizes, **options) as engine:  # type: ignore[arg-type]
        how = engine_choices_of(loaded, draw)
        engine.warm_up(1, prompt_tokens, sampling=how["sampling"])
        with counted() as launches:
            found = engine.generate(prompt_ids, max_new_tokens, on_tokens=lambda new: stream.put(torch.tensor(new)), **how)
    stream.end()
    return Generation(
        prompt_tokens, found.tokens[0], stream.text(), found.first_token_s, sum(found.step_s), {} if engine.mode == "graph" else dict(launches)
    )


def compare(
    loaded: Loaded,
    prompt_ids: Tensor,
    *,
    max_new_tokens: int,
    draw: Draw = GREEDY,
    stock: bool = True,
    on_text: OnText | None = None,
    engine: str = "transformers",
    options: dict[str, Any] | None = None,
) -> Comparison:
    """Generates with our kernels and, if `stock`, first with unpatched transformers.

    Leaves the model as it was.

    engine: "transformers" for the patched model, else the mode of an Engine with `options`.
    """
    how: dict[str, Any] = {"max_new_tokens": max_new_tokens, "draw": draw}
    theirs = generate(loaded, prompt_ids, **how) if stock else None
    if engine != "transformers":
        ours = generate_with_engine(loaded, prompt_ids, **how, mode=engine, on_text=on_text, options=options)
        return Comparison(ours, theirs, None)
    with patch(loaded.model) as report:
        ours = generate(loaded, prompt_ids, **how, on_text=on_text)
    return Comparison(ours, theirs, report)
