"""`tilewright generate --batch`: the prompts of a file, a batch at a time."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..launch import counted, dtype_name
from ..launch.console import write
from ..launch.files import write_json
from .command import console_of, opened
from .generate import Draw, check_positions, choices_of, encode, engine_choices_of, stop_tokens, stops_of, text_of, tokens_alone
from .load import Loaded
from .patch import patch


@dataclass(frozen=True, slots=True)
class Answer:
    """tokens: those written, the stop token included. stock: those of unpatched transformers, where
    asked for.
    """

    prompt: str
    text: str
    prompt_tokens: int
    tokens: list[int]
    stock: list[int] | None = None


@dataclass(frozen=True, slots=True)
class Questions:
    """What to ask a model, and how: fields as in `Question`. batch: prompts at once."""

    prompts: tuple[str, ...]
    batch: int
    max_new_tokens: int
    draw: Draw
    raw: bool = False
    engine: str = "transformers"
    stock: bool = False
    drafter: str = ""
    speculate: int = 0
    kv_dtype: str | None = None


def answers_command(
    group: Any,
    where: torch.device,
    model: str | Path,
    dtype: torch.dtype,
    questions: Questions,
    *,
    json_file: Path | None = None,
    trust_remote_code: bool = False,
    weights: str | None = None,
) -> int:
    """Loads, generates, prints each batch when it is done, and keeps it in `json_file`.

    Returns the exit code: 1 if a requested comparison found other tokens. group: of the processes
    of --tp, else None; only its first rank prints.
    """
    silent = group is not None and group.shard.rank > 0
    out = console_of(silent)
    loaded, options = opened(model, where, dtype, questions, group=group, trust_remote_code=trust_remote_code, weights=weights)
    rows = [encode(loaded, prompt, raw=questions.raw) for prompt in questions.prompts]
    answers: list[Answer] = []
    about = {"model": loaded.source, "device": str(where), "dtype": dtype_name(dtype)}
    start = time.perf_counter()
    with counted() as launches:
        for answer in answer_all(loaded, rows, questions, options):
            answers += answer
            if silent:
                continue
            for one in answer:
                write(out, f"> {one.prompt}\n", bold=True)
                write(out, f"{one.text}\n\n")
            if json_file:
                write_json(json_file, about | {"answers": [asdict(one) for one in answers], "launches": dict(launches)})
    seconds, tokens = time.perf_counter() - start, sum(len(one.tokens) for one in answers)
    differ = [one for one in answers if one.stock is not None and one.stock != one.tokens]
    out.print(f"{len(answers)} texts, {tokens} tokens in {seconds:.1f} s: {tokens / seconds:.2f} tokens/s, {questions.batch} prompts at once")
    if questions.stock:
        equal = len(answers) - len(differ)
        out.print(f"texts with the tokens of stock transformers: {equal} of {len(answers)}", style="bold red" if differ else "green")
    return 1 if differ else 0


def answer_all(loaded: Loaded, rows: Sequence[Tensor], asked: Questions, options: dict[str, Any]) -> Iterator[list[Answer]]:
    """The answers of each batch. rows: token ids [1, prompt_tokens] of each prompt. options: of an
    Engine.
    """
    how: dict[str, Any] = {"max_new_tokens": asked.max_new_tokens, "draw": asked.draw}
    with ExitStack() as stack:
        engine: Any = None
        if asked.engine != "transformers":
            from ..engine import Engine

            longest = max(row.shape[1] for row in rows) + asked.max_new_tokens + asked.speculate
            sizes: dict[str, Any] = {"mode": asked.engine, "max_batch": asked.batch, "max_len": longest}
            engine = stack.enter_context(Engine(loaded.model, **sizes, **options))
        for begin in range(0, len(rows), asked.batch):
            mine, prompts = rows[begin : begin + asked.batch], asked.prompts[begin : begin + asked.batch]
            theirs = by_transformers(loaded, mine, **how) if asked.stock else [None] * len(mine)
            if engine is None:
                with patch(loaded.model):
                    tokens = by_transformers(loaded, mine, **how)
            else:
                choices = engine_choices_of(loaded, asked.draw)
                tokens = engine.generate([row[0].tolist() for row in mine], asked.max_new_tokens, **choices).tokens
            yield [
                Answer(prompt, text_of(loaded.tokenizer, new), row.shape[1], new, stock)
                for prompt, row, new, stock in zip(prompts, mine, tokens, theirs, strict=True)
            ]


def by_transformers(loaded: Loaded, rows: Sequence[Tensor], *, max_new_tokens: int, draw: Draw) -> list[list[int]]:
    """The new tokens of each prompt: one call of the model's `generate`, padded on the left."""
    from ..engine.ending import Ending

    width, padding = max(row.shape[1] for row in rows), 0  # a token of any vocabulary: what it says is masked or cut off
    ids = torch.full((len(rows), width), padding, device=rows[0].device)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, width - row.shape[1] :] = row[0]
        mask[i, width - row.shape[1] :] = 1
    check_positions(loaded.model, width, max_new_tokens)
    if draw.temperature:
        torch.manual_seed(draw.seed)
    with torch.inference_mode(), tokens_alone(loaded.model):
        found = loaded.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            **choices_of(draw),
            **stops_of(loaded, draw, ids),
            pad_token_id=padding,
        )
    tokens: list[list[int]] = [[] for _ in rows]
    ending = Ending(len(rows), stop_tokens(loaded.model), draw.stop, getattr(loaded.tokenizer, "decode", None))
    for column in found[:, width:].T.tolist():  # rows go on after they end, until all have
        ending.extend(tokens, [[token] for token in column])
    return tokens
