"""`Engine(model).generate(prompts, ...)`: reads prompts in chunks, then runs each decode step as
one program or one CUDA graph.

Sequences of different lengths all begin at position 0. A shorter prompt is padded at its end. The
padding's keys lie in the cache beyond the sequence's length, where nothing reads them; the next
tokens overwrite them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..launch import Device, argument_error
from ..models.quantized import is_quantized
from .checks import HELD, check_mode, check_model, check_positive, check_prompts, check_rotations
from .clock import Clock
from .cost import step_bytes
from .ending import Decode, Ending
from .graph import capture, compile_kernels, run
from .layers import Decoder
from .mega.pack import Weights, packed_bytes
from .mega.run import Clocks, Mega
from .memory import Held, check_fits, lasting, too_much
from .modes import Mode, auto_mode
from .pages import CacheKind, Pages, pool_shape
from .parallel import Group
from .prefill import Prefill
from .program import Call, Step, StepBuffers
from .read import read
from .sampling import LIKELIEST, Sampling
from .speculate import Verify, check_speculation, decode_with_drafts
from .state import SLOTS, State
from .weights import Fusion

OnProgress = Callable[[str, int, int], None]
OnTokens = Callable[[list[list[int]]], None]
Masks = Callable[[list[list[int]]], Tensor]
MOST_CAPTURED_TOKENS = 1024  # of a chunk of prompts: with more, the host keeps ahead of the GPU without a graph


@dataclass(frozen=True, slots=True)
class Generated:
    """tokens: the new tokens of each prompt, with the token that stopped it. first_token_s: from
    the call to the first tokens. step_s: the time of each decode step.
    """

    tokens: list[list[int]]
    first_token_s: float
    step_s: list[float]


class Engine:
    """Generates text from a transformers model with our kernels, its weights fused in place."""

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
    ) -> None:
        """Takes over a model's weights and makes the cache.

        The model itself keeps working: its fused parameters become views of the fused matrices, so
        weights are held once (with mode="mega" twice). `close()`, or the end of a `with` block,
        restores it.

        Args:
            model: a transformers causal language model of one of `MODEL_TYPES`, in eval mode, on
                one device.
            max_batch: sequences at once.
            max_len: tokens of a sequence, prompt included.
            mode: "eager" launches each kernel; "graph" replays a CUDA graph for each decode step,
                and chooses the same tokens. "mega" runs a decode step of one sequence (`max_batch`
                1) as one persistent kernel, for the models that docs/megakernel.md names, on a
                packed copy of the weights. "auto" takes "mega" where a table says that it was the
                faster one on this GPU (engine/modes.py), else "graph", on a CPU "eager"; the
                attribute `mode` says which.
            prefill_tokens: prompt tokens read at once, over all sequences: less needs less memory.
            check_every: decode steps between two reads of the tokens by the host, the only waits
                for the device.
            cache: "static" reserves max_len tokens for each sequence. "paged" gives a sequence
                pages from a common pool as it grows, and takes them back when it ends.
            page_size: tokens of a page, a power of two, at least 16; default 64. Only with "paged".
            cache_tokens: tokens of the pool; default max_batch * max_len, with which it can't run
                out. Only with "paged".
            on_progress: called with (stage, done, all) while weights are fused, kernels compiled
                and graphs captured.
            group: the processes that share the model; `load` gave each a shard of it. All make the
                same calls with the same arguments, and get the same tokens.
            weights: quantise the model's Linear modules to this format (`FORMATS`), rounded to
                nearest, but for the head; `close()` puts back the modules, which wait in the
                host's memory. A model that is quantised already runs as it is.
        Raises:
            TypeError, ValueError: naming the argument, what it must be, and what it was; the model
                is unchanged.
            MemoryError: the cache does not fit. The error says how much was needed and what to
                lower.
        """
        check_positive(max_batch=max_batch, max_len=max_len, prefill_tokens=prefill_tokens, check_every=check_every)
        check_model(model, group)
        check_mode(mode, model, max_batch, group, weights)
        check_rotations(model, max_len)
        if mode == "auto":
            mode = auto_mode(model, max_batch, max_len, group, cache == "paged" or weights is not None or is_quantized(model))
        page_size, count = pool_shape(cache, page_size, cache_tokens, mode, max_batch, max_len)
        self.mode, self.max_batch, self.max_len = mode, max_batch, max_len
        self._prefill_tokens, self._check_every, self._on_progress = prefill_tokens, check_every, on_progress
        self._model: Any = model
        self._fusion: Fusion = Fusion()
        self._megas: list[Mega] = []
        self._steps: dict[tuple[Any, ...], Step] = {}
        self._pages: Pages | None = None
        self._prefills: dict[tuple[int, int, int], Prefill] = {}
        self._verifies: dict[tuple[Any, ...], Verify] = {}
        self._pool = torch.cuda.graph_pool_handle() if mode == "graph" else None
        unit = max(SLOTS, page_size)
        slots = -(-max_len // unit) * unit
        self._paged, self._cache_shape = count > 0, (count, page_size) if count else (max_batch, slots)
        model.__dict__[HELD] = self
        try:
            with lasting():
                if weights is not None:
                    self._fusion.quantize(model, weights, self._report)
                self.decoder: Decoder = read(model, self._fusion, slots, self._report, group)
            self._check_memory()
            with lasting():
                device = self.decoder.embedding.device
                self._pages = Pages(count, page_size, max_batch, slots // page_size, device) if count else None
                self._state = State(self.decoder, max_batch, slots, check_every, pages=self._pages, stacked=mode == "mega")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees cache, buffers and graphs, and restores the weights of each module.

        A second call does nothing.
        """
        if self._model is None:
            return
        self._steps.clear()
        self._megas.clear()
        self._prefills.clear()
        self._verifies.clear()
        self.__dict__.pop("_state", None)
        self.__dict__.pop("decoder", None)
        with lasting():
            self._fusion.undo()
        self._model.__dict__.pop(HELD, None)
        self._model = None
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @property
    def cache_bytes(self) -> int:
        """Size of the cache of keys and values."""
        return sum(t.nbytes for cache in self._state.caches for t in cache)

    @property
    def cache_tokens_held(self) -> int:
        """Tokens of the cache that sequences hold now: those of their pages; else all."""
        if self._pages is None:
            return self.max_batch * self._state.max_len
        return self._pages.in_use * self._pages.page_size

    def step_bytes(self, batch: int, kv_len: int) -> int:
        """Bytes that a decode step must read: weights once, `kv_len` keys and values of each."""
        return step_bytes(self.decoder, batch, kv_len)

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
        speculate: int = 0,
        on_tokens: OnTokens | None = None,
    ) -> Generated:
        """Continues each prompt.

        Args:
            prompts: token ids of each, of any lengths; or one tensor [batch, tokens].
            max_new_tokens: for each prompt, the token that stops it included.
            sampling: None takes the likeliest token.
            stop: tokens that end a sequence.
            stop_texts: texts that end it, once what it wrote holds one. decode: from token ids to
                text, such as a tokenizer's.
            masks: called in front of each token with what every sequence wrote so far; returns
                int32 [prompts, ceil(vocab / 32)], whose bits are the tokens that a grammar allows
                next (xgrammar, llguidance). The host then reads each token.
            speculate: tokens of a draft, 0 to 15, that each step checks (docs/engine.md): the same
                tokens in fewer steps, if a text repeats itself.
            on_tokens: called, every `check_every` steps, with the tokens that each sequence gained.
        Returns: the tokens and their times.
        Raises: ValueError for prompts that do not fit; MemoryError if the GPU is full or the pages
            are used up. It says what to lower.
        """
        check_positive(max_new_tokens=max_new_tokens)
        check_speculation(speculate, sampling or LIKELIEST, self.mode, masked=masks is not None)
        rows = self._checked(prompts, max_new_tokens + speculate)
        ending = Ending(len(rows), stop, stop_texts, decode)
        every = self._check_every if masks is None else 1
        tokens: list[list[int]] = [[] for _ in rows]
        tell = on_tokens or (lambda gained: None)
        try:
            with self._here():
                step, prefill = self._ready(rows, sampling, masked=masks is not None)
                verify = self._verify(step.buffers.batch, speculate, sampling or LIKELIEST) if speculate else None
                clock = Clock(self._state.tokens.device)
                self._hold(rows, 0, max_new_tokens - 1)
                if masks is not None:
                    self._state.choice.allow(masks(tokens))
                self._start(rows, step, prefill, sampling)
                clock.mark()
                left, waiting = max_new_tokens - 1, 1
                while verify is None:
                    if waiting == every or not left:
                        chosen = self._collect(waiting, len(rows))
                        waiting = 0
                        tell(ending.extend(tokens, chosen))
                        if not left or all(ending.ended):
                            break
                        self._hold(rows, max_new_tokens - 1 - left, max_new_tokens - 1, ending.ended)
                        if masks is not None:
                            self._state.choice.allow(masks(tokens))
                    taken = self._take(step, min(left, every - waiting))
                    clock.mark(taken)
                    left, waiting = left - taken, waiting + taken
                else:
                    tell(ending.extend(tokens, self._collect(1, len(rows))))
                    hold = self._pages.hold if self._pages is not None else lambda lengths: None
                    for gained in decode_with_drafts(verify, hold, rows, tokens, ending, max_new_tokens):
                        clock.mark()
                        tell(gained)
        finally:
            self._settle()
        first, *steps = clock.seconds()
        return Generated(tokens, first, steps[: max(map(len, tokens)) - 1])

    def logits(self, prompts: Sequence[Sequence[int]] | Tensor, continuations: Sequence[Sequence[int]] | None = None) -> Tensor:
        """The model's logits after each prompt, and after each token of a given continuation.

        Args:
            prompts: token ids of each.
            continuations: of each prompt, all equally long.
        Returns: [batch, 1 + tokens of a continuation, vocab], in the model's dtype.
        """
        given = [list(c) for c in continuations] if continuations is not None else [[] for _ in prompts]
        rows = self._checked(prompts, len(given[0]) + 1)
        if len(given) != len(rows) or len({len(c) for c in given}) != 1:
            raise argument_error("continuations", f"{len(rows)} lists of equal length", [len(c) for c in given])
        with self._here():
            step, prefill = self._ready(rows, None)
            out = step.buffers.tensor("logits", step.buffers.batch, self.decoder.vocab)
            try:
                self._hold(rows, len(given[0]), len(given[0]))
                self._start(rows, step, prefill, None)
                found = [out[: len(rows)].clone()]
                for column in zip(*given, strict=True):
                    self._state.tokens[: len(rows)].copy_(torch.tensor(column))
                    self._state.clock[0] = 0
                    self._take(step, 1)
                    found.append(out[: len(rows)].clone())
                for mega in self._megas:
                    mega.check()
                return torch.stack(found, 1)
            finally:
                self._settle()

    def warm_up(self, batch: int, prompt_tokens: int, *, sampling: Sampling | None = None) -> None:
        """Compiles every kernel that such prompts need; in graph mode also captures the graphs."""
        rows = self._checked([[0] * prompt_tokens] * batch, 0)
        with self._here():
            self._ready(rows, sampling)
            self._ready(rows, sampling)  # captures the prompt's calls too

    @contextmanager
    def _here(self) -> Iterator[None]:
        """No gradients, and the model's GPU as the current one, which capturing needs."""
        device = self.decoder.embedding.device
        with torch.inference_mode(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            try:
                yield
            except torch.OutOfMemoryError as error:
                raise MemoryError(too_much(str(error).splitlines()[0], self._model, self._held, self._prefill_tokens)) from error

    def _checked(self, prompts: Sequence[Sequence[int]] | Tensor, more: int) -> list[list[int]]:
        if self._model is None:
            raise argument_error("the engine", "open", "one that was closed")
        return check_prompts(prompts, more, max_batch=self.max_batch, max_len=self.max_len, vocabulary=len(self.decoder.embedding))

    def _ready(self, rows: list[list[int]], sampling: Sampling | None, *, masked: bool = False) -> tuple[Step, Prefill]:
        """The programs for these prompts, their kernels compiled."""
        batch = min(self.max_batch, 1 << (len(rows) - 1).bit_length())
        sampling = sampling or LIKELIEST
        key = (batch, masked, *sampling.kind)
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = self._compiled_step(batch, sampling, masked)
        width = -(-max(map(len, rows)) // 16) * 16
        chunks = -(-width * batch // self._prefill_tokens)
        shape = (batch, -(-width // (16 * chunks)) * 16, width)
        prefill = self._prefills.get(shape)
        if prefill is None:
            self._prefills.clear()  # its buffers are the largest there are
            prefill = self._prefills[shape] = self._compiled_prefill(*shape)
        elif self.mode == "graph" and prefill.graph is None and prefill.ids.numel() <= MOST_CAPTURED_TOKENS:
            # Not for the first prompt of a shape: it may be the only one.
            prefill.graph = self._captured(f"capturing prefill, {batch} x {shape[1]}", prefill.body)
        return step, prefill

    def _compiled_step(self, batch: int, sampling: Sampling, masked: bool) -> Step:
        buffers = self._state.buffers(batch)
        choice = list(self._state.choose_calls(buffers, sampling, masked=masked))
        tail = [*self.decoder.head_calls(buffers), *choice]
        many = None
        if self.mode == "mega":
            greedy = sampling.temperature == 0 and sampling.plain and not masked
            mega = self._mega(buffers, greedy=greedy)
            calls = [Call("mega", mega.step, ()), *([] if greedy else choice)]
            many = mega.step if greedy else None
        else:
            calls = [*self.decoder.body_calls(buffers, self._state.tokens[:batch], self._state.caches), *tail]
        step = Step(buffers, calls, tail, many=many)
        for part in (tail, calls):
            self._state.begin([[0]] * batch, sampling)
            compile_kernels(part, lambda done, total: self._report(f"compiling decode, batch {batch}", done, total))
        if self.mode == "graph":
            self._state.begin([[0]] * batch, sampling)
            step.graph = self._captured(f"capturing decode, batch {batch}", calls)
        return step

    def _captured(self, stage: str, calls: list[Call]) -> torch.cuda.CUDAGraph:
        self._report(stage, 0, 1)
        run(calls)  # equal calls may still differ in how their memory is aligned: nothing is left to compile after this
        graph = capture(calls, self._pool)
        self._report(stage, 1, 1)
        return graph

    def _mega(self, buffers: StepBuffers, *, greedy: bool) -> Mega:
        """The whole step in one kernel, but for the choice where it is drawn by chance."""
        weights, state = Weights.of(self.decoder), self._state
        clocks = Clocks(state.tokens, state.counters, state.recent, state.clock)
        logits = buffers.tensor("logits", 1, self.decoder.vocab)
        tiles = self._megas[0].tiles if self._megas else None
        self._megas.append(Mega(weights, clocks, state.stacks, logits=logits, choose=greedy, tiles=tiles))
        return self._megas[-1]

    def _verify(self, batch: int, draft: int, sampling: Sampling) -> Verify:
        key = (batch, draft, *sampling.kind)
        if key not in self._verifies:
            verify = self._verifies[key] = Verify.of(self.decoder, self._state, batch, draft, sampling)
            compile_kernels(verify.calls, lambda done, total: self._report(f"compiling drafts of {draft}, batch {batch}", done, total))
            verify.graph = self._captured(f"capturing drafts of {draft}, batch {batch}", verify.calls) if self.mode == "graph" else None
        return self._verifies[key]

    def _compiled_prefill(self, batch: int, q_len: int, width: int) -> Prefill:
        prefill = Prefill.of(self.decoder, self._state, batch, q_len, width)
        compile_kernels(prefill.body, lambda done, total: self._report(f"compiling prefill, {batch} x {q_len}", done, total))
        return prefill

    def _start(self, rows: list[list[int]], step: Step, prefill: Prefill, sampling: Sampling | None) -> None:
        """Reads the prompts and chooses the first token of each sequence."""
        rows = rows + [[0]] * (step.buffers.batch - len(rows))
        prefill.read(rows, step.buffers)
        self._state.begin(rows, sampling or LIKELIEST)
        run(step.tail)

    def _take(self, step: Step, most: int) -> int:
        """Runs one step, or up to `most` at once. Returns how many."""
        if step.many is not None:
            step.many(most)
            return most
        if step.graph is not None:
            step.graph.replay()
        else:
            run(step.calls)
        return 1

    def _hold(self, rows: list[list[int]], taken: int, most: int, ended: Sequence[bool] = ()) -> None:
        """Reserves pages until the host next reads tokens. taken: steps so far. most: in all."""
        if self._pages is not None:
            more = min(taken + self._check_every, most)
            self._pages.hold([0 if i < len(ended) and ended[i] else len(row) + more for i, row in enumerate(rows)])

    def _settle(self) -> None:
        """After the last step, and after Ctrl-C: waits for the device and frees all pages."""
        if self.decoder.embedding.is_cuda:
            torch.cuda.synchronize()
        if self._pages is not None:
            self._pages.hold(())

    def _collect(self, steps: int, sequences: int) -> list[list[int]]:
        """The tokens of the last `steps` steps, by sequence. Waits for the device."""
        for mega in self._megas:
            mega.check()
        found = self._state.recent[:steps, :sequences].t().tolist()
        self._state.clock[0] = 0
        return found

    def _report(self, stage: str, done: int, total: int) -> None:
        if self._on_progress is not None:
            self._on_progress(stage, done, total)

    def _check_memory(self) -> None:
        needed, what = self._held.size, "the cache does not fit"
        if self.mode == "mega":
            needed += packed_bytes(self._model.config, Device.of(self.decoder.embedding))
            what = "the cache and the megakernel's copy of the weights do not fit"
        block_table = self.max_len // self._cache_shape[1] if self._paged else 0
        needed += 8 * self.max_batch * (self._check_every + block_table)  # tokens; the table in two copies of 4 bytes
        check_fits(needed, what, self._model, self._held, self._prefill_tokens)

    @property
    def _held(self) -> Held:
        return Held(self.decoder, self._cache_shape, paged=self._paged, max_batch=self.max_batch, max_len=self.max_len)
