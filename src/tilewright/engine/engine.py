"""`Engine(model).generate(prompts, ...)`: reads prompts in chunks, then runs each decode step as
one program or one CUDA graph.

Sequences of different lengths all begin at position 0. A shorter prompt is padded at its end. The
padding's keys lie in the cache beyond the sequence's length, where nothing reads them; the next
tokens overwrite them.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..launch import Device, argument_error
from .checks import HELD, check_mode, check_model, check_positive, check_prompts
from .clock import Clock
from .cost import step_bytes
from .graph import capture, compile_kernels, run
from .layers import Decoder
from .mega.pack import Weights, packed_bytes
from .mega.run import Clocks, Mega
from .pages import CacheKind, Pages, pool_shape
from .parallel import Group
from .prefill import Prefill
from .program import Call, StepBuffers
from .read import read
from .state import SLOTS, Sampling, State, cache_bytes
from .weights import Fusion

Mode = Literal["eager", "graph", "mega"]
OnProgress = Callable[[str, int, int], None]
OnTokens = Callable[[list[list[int]]], None]
MOST_CAPTURED_TOKENS = 1024  # of a chunk of prompts: with more, the host keeps ahead of the GPU without a graph


@dataclass(frozen=True, slots=True)
class Generated:
    """tokens: the new tokens of each prompt, with the token that stopped it. first_token_s: from
    the call to the first tokens. step_s: the time of each decode step.
    """

    tokens: list[list[int]]
    first_token_s: float
    step_s: list[float]


@dataclass(slots=True)
class _Step:
    """One token for each sequence of a batch size: the buffers, all calls of a step, and those
    behind the last layer, with which a prompt ends too.

    many: runs a given number of steps in one launch, if there is such a kernel.
    """

    buffers: StepBuffers
    calls: list[Call]
    tail: list[Call]
    graph: torch.cuda.CUDAGraph | None = None
    many: Callable[[int], None] | None = None


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
                packed copy of the weights.
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
        Raises:
            TypeError, ValueError: naming the argument, what it must be, and what it was; the model
                is unchanged.
            MemoryError: the cache does not fit. The error says how much was needed and what to
                lower.
        """
        check_positive(max_batch=max_batch, max_len=max_len, prefill_tokens=prefill_tokens, check_every=check_every)
        check_model(model, group)
        check_mode(mode, model, max_batch, group)
        page_size, count = pool_shape(cache, page_size, cache_tokens, mode, max_batch, max_len)
        self.mode, self.max_batch, self.max_len = mode, max_batch, max_len
        self._prefill_tokens, self._check_every, self._on_progress = prefill_tokens, check_every, on_progress
        self._model: Any = model
        self._fusion: Fusion = Fusion()
        self._megas: list[Mega] = []
        self._steps: dict[tuple[Any, ...], _Step] = {}
        self._pages: Pages | None = None
        self._prefills: dict[tuple[int, int, int], Prefill] = {}
        self._pool = torch.cuda.graph_pool_handle() if mode == "graph" else None
        unit = max(SLOTS, page_size)
        slots = -(-max_len // unit) * unit
        self._cache_shape = (count, page_size) if count else (max_batch, slots)
        model.__dict__[HELD] = self
        try:
            with _own():
                self.decoder: Decoder = read(model, self._fusion, slots, self._report, group)
            self._check_memory()
            with _own():
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
        self.__dict__.pop("_state", None)
        self.__dict__.pop("decoder", None)
        with _own():
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

    def generate(
        self,
        prompts: Sequence[Sequence[int]] | Tensor,
        max_new_tokens: int,
        *,
        sampling: Sampling | None = None,
        stop: Sequence[int] = (),
        on_tokens: OnTokens | None = None,
    ) -> Generated:
        """Continues each prompt.

        Args:
            prompts: token ids of each, of any lengths; or one tensor [batch, tokens].
            max_new_tokens: for each prompt, the token that stops it included.
            sampling: None takes the likeliest token.
            stop: tokens that end a sequence.
            on_tokens: called, every `check_every` steps, with the tokens that each sequence gained.
        Returns: the tokens and their times.
        Raises: ValueError for prompts that do not fit; MemoryError if the GPU is full or the pages
            are used up. It says what to lower.
        """
        check_positive(max_new_tokens=max_new_tokens)
        rows = self._checked(prompts, max_new_tokens)
        if isinstance(stop, str) or not isinstance(stop, Collection) or not all(isinstance(token, int) for token in stop):
            raise TypeError(f"stop must be a list of token ids, got {stop!r:.80}")
        ending = set(stop)
        tokens: list[list[int]] = [[] for _ in rows]
        try:
            with self._here():
                step, prefill = self._ready(rows, sampling)
                clock = Clock(self._state.tokens.device)
                self._hold(rows, 0, max_new_tokens - 1)
                self._start(rows, step, prefill, sampling)
                clock.mark()
                left, waiting = max_new_tokens - 1, 1
                while True:
                    if waiting == self._check_every or not left:
                        chosen = self._collect(waiting, len(rows))
                        waiting = 0
                        gained = [_extend(mine, new, ending) for mine, new in zip(tokens, chosen, strict=True)]
                        if on_tokens is not None:
                            on_tokens(gained)
                        ended = [mine[-1] in ending for mine in tokens]
                        if not left or all(ended):
                            break
                        self._hold(rows, max_new_tokens - 1 - left, max_new_tokens - 1, ended)
                    taken = self._take(step, min(left, self._check_every - waiting))
                    clock.mark(taken)
                    left, waiting = left - taken, waiting + taken
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
                raise MemoryError(self._too_much(str(error).splitlines()[0])) from error

    def _checked(self, prompts: Sequence[Sequence[int]] | Tensor, more: int) -> list[list[int]]:
        if self._model is None:
            raise argument_error("the engine", "open", "one that was closed")
        return check_prompts(prompts, more, max_batch=self.max_batch, max_len=self.max_len, vocabulary=len(self.decoder.embedding))

    def _ready(self, rows: list[list[int]], sampling: Sampling | None) -> tuple[_Step, Prefill]:
        """The programs for these prompts, their kernels compiled."""
        batch = min(self.max_batch, 1 << (len(rows) - 1).bit_length())
        key = (batch, sampling is not None and (sampling.temperature > 0, sampling.top_k > 0, sampling.top_p < 1))
        step = self._steps.get(key)
        if step is None:
            step = self._steps[key] = self._compiled_step(batch, sampling)
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

    def _compiled_step(self, batch: int, sampling: Sampling | None) -> _Step:
        buffers = self._state.buffers(batch)
        choice = list(self._state.choose_calls(buffers, self.decoder.vocab, sampling))
        tail = [*self.decoder.head_calls(buffers), *choice]
        many = None
        if self.mode == "mega":
            greedy = sampling is None or sampling.temperature == 0
            mega = self._mega(buffers, greedy=greedy)
            calls = [Call("mega", mega.step, ()), *([] if greedy else choice)]
            many = mega.step if greedy else None
        else:
            calls = [*self.decoder.body_calls(buffers, self._state.tokens[:batch], self._state.caches), *tail]
        step = _Step(buffers, calls, tail, many=many)
        for part in (tail, calls):
            self._state.begin([1] * batch, sampling or Sampling())
            compile_kernels(part, lambda done, total: self._report(f"compiling decode, batch {batch}", done, total))
        if self.mode == "graph":
            self._state.begin([1] * batch, sampling or Sampling())
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

    def _compiled_prefill(self, batch: int, q_len: int, width: int) -> Prefill:
        prefill = Prefill.of(self.decoder, self._state, batch, q_len, width)
        compile_kernels(prefill.body, lambda done, total: self._report(f"compiling prefill, {batch} x {q_len}", done, total))
        return prefill

    def _start(self, rows: list[list[int]], step: _Step, prefill: Prefill, sampling: Sampling | None) -> None:
        """Reads the prompts and chooses the first token of each sequence."""
        rows = rows + [[0]] * (step.buffers.batch - len(rows))
        prefill.read(rows, step.buffers)
        self._state.begin([len(row) for row in rows], sampling or Sampling())
        run(step.tail)

    def _take(self, step: _Step, most: int) -> int:
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
        device = self.decoder.embedding.device
        if device.type == "cuda":
            torch.cuda.empty_cache()
            needed, what = cache_bytes(self.decoder, *self._cache_shape), "the cache does not fit"
            if self.mode == "mega":
                needed += packed_bytes(self._model.config, Device.of(self.decoder.embedding))
                what = "the cache and the megakernel's copy of the weights do not fit"
            if needed > torch.cuda.mem_get_info(device)[0]:
                raise MemoryError(self._too_much(what))

    def _too_much(self, what: str) -> str:
        device = self.decoder.embedding.device
        free, total = torch.cuda.mem_get_info(device)
        weights = sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in self._model.parameters()}.values())
        cache, (count, page_size) = cache_bytes(self.decoder, *self._cache_shape), self._cache_shape
        size = f"max_batch {self.max_batch} x max_len {self.max_len}" if self._pages is None else f"{count} pages of {page_size} tokens"
        lower = "max_batch, max_len" if self._pages is None else "cache_tokens, max_batch"
        return (
            f"{what}: weights {_gib(weights)}, cache {_gib(cache)} ({size}), "
            f"prefill of {self._prefill_tokens} tokens; {_gib(free)} of {_gib(total)} are free. Lower {lower} or prefill_tokens"
        )


@contextmanager
def _own() -> Iterator[None]:
    """For tensors that outlive a call: an inference tensor cannot be a parameter's data."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _extend(mine: list[int], new: list[int], ending: set[int]) -> list[int]:
    """Appends tokens up to the first that ends the sequence; none if it has ended.

    Returns the appended tokens.
    """
    start = len(mine)
    for token in new:
        if mine and mine[-1] in ending:
            break
        mine.append(token)
    return mine[start:]
