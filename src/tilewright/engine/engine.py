"""`Engine(model).generate(prompts, ...)`: reads prompts in chunks, then runs each decode step as
one program or one CUDA graph.

All sequences begin at position 0; padding in front of shorter prompts has no position."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..launch import Device, check_bools
from ..models.quantized import is_quantized
from . import checks
from .beside import beside
from .checks import HELD, alone, check_positive
from .clock import Clock
from .cost import step_bytes
from .draft import Rounds
from .ending import Decode, Ending
from .graph import run
from .layers import Decoder
from .mega.pack import CODES, packed_bytes
from .memory import Held, check_fits, lasting, too_much
from .modes import Mode, auto_mode
from .pages import CacheKind, Pages, pool_shape
from .parallel import Group
from .prefill import Prefill
from .prefix import Prefixes
from .program import Step
from .programs import Programs, bucket, padded
from .read import read
from .sampling import LIKELIEST, Sampling
from .speculate import check_speculation, decode_with_drafts
from .state import SLOTS, State
from .weights import Fusion

OnProgress = Callable[[str, int, int], None]
OnTokens = Callable[[list[list[int]]], None]
Masks = Callable[[list[list[int]]], Tensor]


@dataclass(frozen=True, slots=True)
class Generated:
    """tokens: the new tokens of each prompt, with the token that stopped it. first_token_s: from
    the call to the first tokens. step_s: the time of each decode step. reused: tokens of each
    prompt whose keys were in the cache.
    """

    tokens: list[list[int]]
    first_token_s: float
    step_s: list[float]
    reused: list[int]


class Engine(checks.Lone, AbstractContextManager["Engine"]):
    """Generates text from a transformers model with our kernels. Fuses its weights in place."""

    def __init__(  # noqa: PLR0913 options by keyword
        self,
        model: Any,
        *,
        max_batch: int = 1,
        max_len: int = 2048,
        mode: Mode = "eager",
        prefill_tokens: int = 8192,
        check_every: int = 16,
        cache: CacheKind = "static",
        page_size: int | None = None,
        cache_tokens: int | None = None,
        on_progress: OnProgress | None = None,
        group: Group | None = None,
        weights: str | None = None,
        draft: Any = None,
        draft_weights: str | None = None,
        speculate: int = 0,
        prefix_reuse: bool = False,
        kv_dtype: str | None = None,
    ) -> None:
        """Fuses the model's weights and allocates the cache.

        The model itself keeps working: its fused parameters become views of the fused matrices, so
        weights are held once (with mode="mega" twice). `close()`, or the end of a `with` block,
        restores it.

        Args:
            model: a transformers causal language model of one of `MODEL_TYPES`, in eval mode, on
                one device.
            max_batch: the most sequences at once.
            max_len: the most tokens of a sequence, prompt included.
            mode: "eager" launches each kernel; "graph" replays a CUDA graph for each decode step,
                and chooses the same tokens. "mega" runs a decode step of one sequence (`max_batch`
                1) as one persistent kernel, for the models and weights that docs/megakernel.md
                names, on a packed copy of the weights. "auto" chooses "mega" if it was measured to
                be faster on this GPU (engine/modes.py), else "graph", and on a CPU "eager"; the
                attribute `mode` holds the choice.
            prefill_tokens: prompt tokens read at once, over all sequences; fewer need less memory.
            check_every: decode steps between two reads of the tokens by the host. Only these reads
                wait for the device.
            cache: "static" reserves max_len tokens for each sequence. "paged" gives a sequence
                pages from a common pool as it grows, and takes them back when it ends.
            page_size: tokens of a page, a power of two, at least 16; default 64. Only with "paged".
            cache_tokens: tokens in the pool; the default, max_batch * max_len, never runs out. Only
                with "paged".
            on_progress: called with (stage, done, all) while weights are fused, kernels compiled
                and graphs captured.
            group: the processes that share the model; `load` gave each of them a shard. All must
                make the same calls with the same arguments, and they get the same tokens.
            weights: quantise the model's Linear modules, except the head, to this format
                (`FORMATS`), rounded to nearest; the head too with "int4-128,head=int8". The
                original modules are kept in host memory, and `close()` puts them back. A model
                that is already quantised runs as it is.
            draft: a smaller model with the same vocabulary, on the same device, that proposes
                `speculate` tokens for each step to check (docs/engine.md).
            draft_weights: like `weights`, for the draft model.
            speculate: what `generate` takes by default.
            prefix_reuse: keep the keys of earlier calls while there is room, for prompts with the
                same beginning (docs/engine.md).
            kv_dtype: "fp8" caches keys and values of heads of up to 256 elements as e4m3, with a
                scale for each token and head, in half the memory, not with "mega".
        Raises:
            TypeError, ValueError: name the argument, what it must be, and what it was. The model is
                unchanged.
            MemoryError: the cache does not fit. The error says how much was needed and what to
                lower.
        """
        check_positive(max_batch=max_batch, max_len=max_len, prefill_tokens=prefill_tokens, check_every=check_every)
        checks.check_model(model, group)
        checks.check_mode(mode, model, max_batch, group, weights)
        checks.check_kv_dtype(kv_dtype, model, mode)
        checks.check_rotations(model, max_len)
        checks.check_draft(model, draft, draft_weights, speculate, mode, group)
        check_bools(prefix_reuse=prefix_reuse)
        checks.check_states(model, group, cache=cache, prefix_reuse=prefix_reuse, drafts=speculate > 0, codes=kv_dtype is not None)
        if mode == "auto":
            beyond = cache == "paged" or weights not in (None, CODES) or kv_dtype is not None or draft is not None
            mode = auto_mode(model, max_batch, max_len, group, weights == CODES or is_quantized(model), beyond)
        page_size, count = pool_shape(cache, page_size, cache_tokens, mode, max_batch, max_len)
        self.mode, self.max_batch, self.max_len = mode, max_batch, max_len
        self._prefill_tokens, self._check_every = prefill_tokens, check_every
        self._report: OnProgress = on_progress or (lambda *told: None)
        self._speculate = speculate
        self._model: Any = model
        self._turn = [True]  # taken by the call that runs
        self._fusion: Fusion = Fusion()
        self._pages: Pages | None = None
        self._draft: Engine | None = None
        self._rounds: dict[tuple[Any, ...], Rounds] = {}
        unit = max(SLOTS, page_size)
        slots = -(-max_len // unit) * unit
        self._paged, self._cache_shape = count > 0, (count, page_size) if count else (max_batch, slots)
        model.__dict__[HELD] = checks.Held(self)
        try:
            with lasting():
                if weights is not None:
                    self._fusion.quantize(model, weights, self._report)
                self.decoder: Decoder = read(model, self._fusion, slots, self._report, group, codes=kv_dtype is not None)
            model.__dict__[HELD].places = checks.Places(model)
            self._check_memory()
            with lasting():
                device = self.decoder.embedding.device
                self._pages = Pages(count, page_size, max_batch, slots // page_size, device, keep=prefix_reuse) if count else None
                self._state = State(self.decoder, max_batch, slots, check_every, pages=self._pages, stacked=mode == "mega")
            self._programs = Programs(self.decoder, self._state, mode, prefill_tokens, self._report)
            self._prefixes = Prefixes(self._state) if prefix_reuse else None
            if draft is not None:
                sizes: Any = {"max_batch": max_batch, "max_len": max_len, "mode": mode, "prefill_tokens": prefill_tokens}
                self._draft = Engine(draft, on_progress=on_progress, weights=draft_weights, **sizes)
        except BaseException:
            self.close()
            raise

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees cache, buffers and graphs, and restores the weights. RuntimeError during a call."""
        if self._model is not None:
            self._close()

    @alone
    def _close(self) -> None:
        self._rounds.clear()
        if self._draft is not None:
            self._draft.close()
        for name in ("_programs", "_prefixes", "_state", "decoder"):
            self.__dict__.pop(name, None)
        with lasting():
            self._fusion.undo()
        self._model.__dict__.pop(HELD, None)
        self._model = None
        torch.cuda.empty_cache()

    @property
    def cache_bytes(self) -> int:
        """Size of the cache of keys and values."""
        checks.check_open(self._model)
        return sum(t.nbytes for cache in self._state.caches for t in cache)

    @property
    def cache_tokens_held(self) -> int:
        """Tokens that sequences hold in the cache now: those of their pages; without pages all."""
        checks.check_open(self._model)
        return self.max_batch * self._state.max_len if (pages := self._pages) is None else pages.in_use * pages.page_size

    def step_bytes(self, batch: int, kv_len: int) -> int:
        """The least bytes that a decode step reads: weights once, `kv_len` keys of a sequence."""
        checks.check_open(self._model)
        return step_bytes(self.decoder, batch, kv_len)

    @alone
    def generate(  # noqa: PLR0913 options by keyword
        self,
        prompts: Sequence[Sequence[int]] | Tensor,
        max_new_tokens: int,
        *,
        sampling: Sampling | None = None,
        stop: Sequence[int] = (),
        stop_texts: Sequence[str] = (),
        decode: Decode | None = None,
        masks: Masks | None = None,
        speculate: int | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Generated:
        """Continues each prompt.

        Args:
            prompts: the token ids of each prompt, of any length; or one tensor [batch, tokens].
            max_new_tokens: the most new tokens of each prompt, including the one that stops it.
            sampling: None takes the likeliest token.
            stop: tokens that end a sequence.
            stop_texts: a sequence ends when its output contains one of these. decode: turns token
                ids into text, such as a tokenizer's `decode`.
            masks: called before each token with what every sequence has written so far. Returns
                int32 [prompts, ceil(vocab / 32)], bits of the tokens that a grammar allows next
                (xgrammar, llguidance), at least one. The host then reads every token.
            speculate: the length of the draft that each step checks, 0 to 15 tokens, for fewer
                steps (docs/engine.md). Default: the engine's.
            on_tokens: called, every `check_every` steps, with the tokens that each sequence gained.
        Returns: the tokens and their times.
        Raises: ValueError for prompts that do not fit; RuntimeError during another call;
            MemoryError if the GPU is full or the pages are used up, with what to lower.
        """
        check_positive(max_new_tokens=max_new_tokens)
        checks.check_called(masks=masks, on_tokens=on_tokens, decode=decode)
        speculate, chosen_by = self._speculate if speculate is None else speculate, checks.check_sampling(sampling)
        check_speculation(speculate, chosen_by, self.mode, masked=masks is not None)
        rows = self._checked(prompts, max_new_tokens + speculate)
        checks.check_states(self._model, drafts=speculate > 0)
        ending = Ending(len(rows), stop, stop_texts, decode)
        every = self._check_every if masks is None else 1
        tokens: list[list[int]] = [[] for _ in rows]
        tell = on_tokens or (lambda gained: None)
        # A step more runs before the host knows the tokens, where none of them can end a sequence.
        ahead = int(self.mode == "graph" and self._pages is None and not (ending.possible or masks))
        allow = (lambda: None) if masks is None else (lambda: self._state.choice.allow(masks(tokens), ending.ended, chosen_by))
        try:
            with self._here():
                batch = bucket(len(rows), self.max_batch)
                step = self._programs.step(batch, chosen_by, masked=masks is not None)
                drafts = self._drafts(rows, tokens, ending, max_new_tokens, speculate, chosen_by) if speculate else None
                reused = self._reuse(rows, batch)
                prefill = self._programs.prefill(batch, max(len(row) - n for row, n in zip(rows, reused, strict=True)), max(reused))
                clock = Clock(self._state.tokens.device)
                self._hold(rows, 0, max_new_tokens - 1)
                allow()
                self._start(rows, step, prefill, sampling, reused)
                clock.mark()
                left, waiting = max_new_tokens - 1, 1

                def go_on(most: int) -> None:
                    nonlocal left, waiting
                    if most:
                        taken = self._take(step, max(map(len, rows)) + max_new_tokens - left, most)
                        clock.mark(taken)
                        left, waiting = left - taken, waiting + taken

                while drafts is None:
                    if waiting == every or not left:
                        told, waiting = self._programs.told(waiting, len(rows)), 0
                        go_on(min(left, ahead))  # while the host reads
                        tell(ending.extend(tokens, told()))
                        if all(ending.ended) or not (left or waiting):
                            break
                        self._hold(rows, max_new_tokens - 1 - left, max_new_tokens - 1, ending.ended)
                        allow()
                    go_on(min(left, every - waiting))
                else:
                    tell(ending.extend(tokens, self._programs.told(1, len(rows))()))
                    for gained, steps in drafts:
                        clock.mark(steps)
                        tell(gained)
                if self._prefixes is not None:
                    self._prefixes.keep(rows, tokens)
        except BaseException:
            self._forget()
            raise
        finally:
            self._settle()
        first, *times = clock.seconds()
        return Generated(tokens, first, times[: max(map(len, tokens)) - 1], reused)

    @alone
    def logits(self, prompts: Sequence[Sequence[int]] | Tensor, continuations: Sequence[Sequence[int]] | None = None) -> Tensor:
        """The model's logits after each prompt, and after each token of a given continuation.

        Args:
            prompts: the token ids of each prompt.
            continuations: the token ids of each continuation, all of one length.
        Returns: [batch, 1 + tokens of a continuation, vocab], in the model's dtype.
        """
        rows = self._checked(prompts, 1)
        given = checks.check_continuations(continuations, len(rows))
        self._checked(rows, 1 + len(given[0]))
        self._checked(given if given[0] else rows, 0)
        with self._here():
            step, prefill = self._ready(rows, None)
            out = step.buffers.tensor("logits", step.buffers.batch, self.decoder.vocab)
            self._forget()
            try:
                self._hold(rows, len(given[0]), len(given[0]))
                self._start(rows, step, prefill, None)
                found = [out[: len(rows)].clone()]
                for keys, column in enumerate(zip(*given, strict=True), max(map(len, rows)) + 1):
                    self._state.tokens[: len(rows)].copy_(torch.tensor(column))
                    self._state.clock[0] = 0
                    self._take(step, keys, 1)
                    found.append(out[: len(rows)].clone())
                self._programs.check()
                return torch.stack(found, 1)
            finally:
                self._settle()

    @alone
    def warm_up(self, batch: int, prompt_tokens: int, *, sampling: Sampling | None = None) -> None:
        """Compiles every kernel that such prompts need. In graph mode, also captures the graphs."""
        check_positive(batch=batch, prompt_tokens=prompt_tokens)
        rows = self._checked([[0] * prompt_tokens] * batch, 0)
        with self._here():
            self._ready(rows, sampling)
            self._ready(rows, sampling)  # captures the prompt's calls too

    @contextmanager
    def _here(self) -> Iterator[None]:
        """No gradients, no autocast, and the model's GPU as the current one: capturing needs it."""
        device = self.decoder.embedding.device
        current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        with torch.inference_mode(), torch.autocast(device.type, enabled=False), current:
            try:
                yield
            except torch.OutOfMemoryError as error:
                raise MemoryError(too_much(str(error).splitlines()[0], self._model, self._held, self._prefill_tokens)) from error

    def _checked(self, prompts: Sequence[Sequence[int]] | Tensor, more: int) -> list[list[int]]:
        checks.check_weights(self._model)
        return checks.check_prompts(prompts, more, max_batch=self.max_batch, max_len=self.max_len, vocabulary=len(self.decoder.embedding))

    def _ready(self, rows: list[list[int]], sampling: Sampling | None) -> tuple[Step, Prefill]:
        """The programs for these prompts, their kernels compiled."""
        batch = bucket(len(rows), self.max_batch)
        return self._programs.step(batch, sampling or LIKELIEST), self._programs.prefill(batch, max(map(len, rows)))

    def _drafts(
        self, rows: list[list[int]], tokens: list[list[int]], ending: Ending, most: int, draft: int, sampling: Sampling
    ) -> Iterator[tuple[list[list[int]], int]]:
        """All but the first tokens, by steps that check drafts; compiled when this returns."""
        batch = bucket(len(rows), self.max_batch)
        hold = self._pages.hold if self._pages is not None else lambda lengths: None
        if self._draft is None:
            return decode_with_drafts(self._programs.verify(batch, draft, sampling), hold, rows, tokens, ending, most)
        drafter, key = self._draft, (batch, draft, *sampling.kind)
        prefill = drafter._programs.prefill(batch, max(map(len, rows)))
        if key not in self._rounds:
            rounds = self._rounds[key] = Rounds.of(self._programs, drafter._programs, batch, draft, sampling, self._check_every)
            self._programs.compile(f"rounds of {draft}, batch {batch}", rounds.calls)
            rounds.graph = self._programs.captured(f"rounds of {draft}, batch {batch}", rounds.calls)
        rounds = self._rounds[key]

        def decode() -> Iterator[tuple[list[list[int]], int]]:
            drafter._state.choice.begin(rows, sampling)
            prefill.read(padded(rows, batch))
            rounds.begin(rows, [mine[0] for mine in tokens], most)
            yield from rounds.decode(hold, rows, tokens, ending, most)

        return decode()

    def _reuse(self, rows: list[list[int]], batch: int) -> list[int]:
        """How many tokens of each prompt need not be read: their keys are where they run."""
        if self._prefixes is None:
            return [0] * len(rows)
        if self._programs.touched and self._pages is None:  # pages of ended sequences are in no table
            self._forget()
        return self._prefixes.take(rows, batch)

    def _forget(self) -> None:
        """What the cache holds of earlier calls."""
        if self._prefixes is not None:
            self._prefixes.forget()
            self._programs.touched = False

    def _start(self, rows: list[list[int]], step: Step, prefill: Prefill, sampling: Sampling | None, held: Sequence[int] = ()) -> None:
        """Reads of the prompts what the cache lacks, and chooses each sequence's first token."""
        rows = padded(rows, step.buffers.batch)
        self._state.begin(rows, sampling or LIKELIEST)  # before the device is busy: copies from the host wait for it
        prefill.read(rows, step.buffers, held)
        run(step.tail)

    def _take(self, step: Step, keys: int, most: int) -> int:
        """Runs one step, after which sequences have up to so many keys, or up to `most` steps at
        once. Returns how many.
        """
        if step.many is not None:
            step.many(most)
            return most
        reach = step.reach(keys)
        if self.mode == "graph":
            step.graphs[reach].replay()
        else:
            with beside():
                run(step.calls[reach])
        return 1

    def _hold(self, rows: list[list[int]], taken: int, most: int, ended: Sequence[bool] = ()) -> None:
        """Reserves pages until the host next reads tokens. taken: steps so far. most: in all."""
        if self._pages is not None:
            more = min(taken + self._check_every, most)
            self._pages.hold([0 if i < len(ended) and ended[i] else len(row) + more for i, row in enumerate(rows)])

    def _settle(self) -> None:
        """After the last step, and after Ctrl-C: waits for the device, and all sequences end."""
        if self.decoder.embedding.is_cuda:
            torch.cuda.synchronize()
        if self._pages is not None:
            self._pages.hold(())

    def _check_memory(self) -> None:
        needed, what = self._held.size, "the cache does not fit"
        if self.mode == "mega":
            needed += packed_bytes(self._model.config, Device.of(self.decoder.embedding), is_quantized(self._model))
            what = "the cache and the megakernel's copy of the weights do not fit"
        block_table = self.max_len // self._cache_shape[1] if self._paged else 0
        needed += 8 * self.max_batch * (self._check_every + block_table)  # tokens; the table in two copies of 4 bytes
        check_fits(needed, what, self._model, self._held, self._prefill_tokens)

    @property
    def _held(self) -> Held:
        return Held(self.decoder, self._cache_shape, paged=self._paged, max_batch=self.max_batch, max_len=self.max_len)
