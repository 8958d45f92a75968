"""The thread that runs the model, seen from the event loop of the server.

transformers' continuous batching is the thread. Here its outputs find the request that they belong
to, requests are counted, and its end is noticed: a worker that ends before it is told to leaves an
error with every request. A step that fails ends the requests that are there, and no more.
"""

import asyncio
import itertools
import logging
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ...launch import argument_error
from ..continuous import captured_steps, check_pages
from ..generate import stop_tokens
from .protocol import Refusal
from .room import CPU_BATCH_TOKENS, CPU_SHARE, PAGE, context_tokens, pages_on_cpu
from .sampling import Draws, Sampling, Tables
from .unsaid import unsaid

BUSY_SECONDS = 1  # Retry-After
FAILED = "the worker failed, and the server ends: its log says why"  # clients are not told more
STEP_FAILED = "a step of the model failed: the server's log says why"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class News:
    """Tokens of one of a job's sequences; or why there are no more."""

    index: int
    tokens: list[int]
    finished: bool


@dataclass(eq=False)
class Job:
    """The sequences of one request, and what arrives for them."""

    names: list[str]
    prompt_tokens: list[int]
    reused_tokens: dict[str, int] = field(default_factory=dict)  # of these, by name: their pages were there
    inbox: asyncio.Queue[News | Refusal] = field(default_factory=asyncio.Queue)
    lengths: dict[str, int] = field(default_factory=dict)  # tokens seen, of sequences that are not finished

    async def news(self) -> News:
        """What arrived next. Raises Refusal: the worker ended, or is told to."""
        found = await self.inbox.get()
        if isinstance(found, Refusal):
            raise found
        return found


class Worker:
    """Runs a patched model.

    Args:
        most_requests: sequences that may wait and run at once.
        pages: of the cache; None for a share of the memory.
        prefix_reuse: whether a prompt shares the whole pages of another one's beginning.
    Attributes: `longest`, the tokens of a prompt with its answer; `prompt_tokens`, of all requests
        so far, and `reused_tokens`, those of them that no step had to read; `failed_steps`, which
        raised; `failure`, why it ended before it was told to.
    """

    def __init__(self, model: Any, *, most_requests: int, batch_tokens: int | None, pages: int | None, prefix_reuse: bool = True) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig
        from transformers.generation.continuous_batching.model_runner import infer_max_single_request_tokens

        check_pages(model)
        on_cpu, given = model.device.type == "cpu", pages is not None
        if on_cpu:
            pages = pages_on_cpu(model, most_requests) if pages is None else pages
            batch_tokens = CPU_BATCH_TOKENS if batch_tokens is None else batch_tokens
        paging = ContinuousBatchingConfig(
            page_size=PAGE,
            num_blocks=pages,
            max_batch_tokens=batch_tokens,
            max_requests_per_batch=min(most_requests, batch_tokens or most_requests),
            allow_block_sharing=prefix_reuse,
        )
        self.eos = set(stop_tokens(model))
        greedy = GenerationConfig(do_sample=False, eos_token_id=sorted(self.eos) or -1, pad_token_id=0)
        self.most_requests = most_requests
        self.failure: BaseException | None = None
        self.prompt_tokens = self.reused_tokens = self.failed_steps = 0
        self._tried = False  # whether the model is known to run
        self._failed: BaseException | None = None  # why it is known not to
        self._jobs: dict[str, Job] = {}  # by the name of a sequence
        self._tickets: dict[str, int] = {}  # likewise, of those with penalties or biases
        self._tables = Tables(most_requests, model.config.get_text_config().vocab_size, model.device)
        self._numbers = itertools.count()
        self.loop: asyncio.AbstractEventLoop
        self._loop: asyncio.AbstractEventLoop | None = None  # None unless outputs may arrive
        self._refusal: Refusal | None = None  # to new requests
        self._manager = model.init_continuous_batching(generation_config=greedy, continuous_batching_config=paging)
        self._manager.logit_processor = Draws(self._tables)
        self._manager.output_router = _Router(self._arrived)
        self._device, self._stock_step = model.device, self._manager._generation_loop_body
        self._manager._generation_loop_body = self._step
        with unsaid("ContinuousBatchingLogger"):
            self._manager.start()
            self._thread: threading.Thread = self._manager._generation_thread
            while self._manager.batch_processor is None and self._thread.is_alive():
                self._thread.join(0.01)
            if self._manager.batch_processor is None:
                self._manager.stop(block=True)
                error = self._manager.background_thread_status.fatal_error
                raise argument_error("the cache", "one that fits the memory", error) from error
        cache = self._manager.batch_processor.cache
        self._search, cache.search_prefix_match = cache.search_prefix_match, self._reused
        self._scheduler = self._manager.batch_processor.scheduler
        self._clear, self._scheduler.clear_cancelled_requests = self._scheduler.clear_cancelled_requests, self._cancelled
        self.pages, self.cache_bytes = cache.num_blocks, cache.cache_tensor.nbytes
        self.share = "as told" if given else f"{CPU_SHARE:.0%} of the available memory at most" if on_cpu else "what is free on the GPU"
        self.longest = min(infer_max_single_request_tokens(cache), context_tokens(model))
        try:
            self._try(model)
        except BaseException:  # also Ctrl-C
            self.stop()
            raise

    def _try(self, model: Any) -> None:
        """Has the model write two tokens to each of two texts before anybody asks, so that one
        whose steps fail is no server that answers 500 to everybody. Its config does not tell: a
        layer may not pass on where keys lie (StableLM), or need the others' keys (Doge).
        """
        router, outputs = self._manager.output_router, queue.SimpleQueue[list[Any]]()
        router.deliver_batch = outputs.put
        names = {f"trial{tokens}" for tokens in (1, 2)}
        for tokens, name in enumerate(sorted(names), 1):
            self._manager.add_request([0] * tokens, request_id=name, max_new_tokens=2, eos_token_id=-1, sampling=Sampling(0.0, 1.0, 0, 0))
        while names and self._thread.is_alive():
            with suppress(queue.Empty):
                names -= {output.request_id for output in outputs.get(timeout=0.02)}
        router.deliver_batch = self._arrived
        error = self._failed or self._manager.background_thread_status.fatal_error
        if error is not None:
            wanted, said = "one that transformers' continuous batching runs", (str(error).splitlines() or [type(error).__name__])[0]
            raise argument_error("the model", wanted, f"{model.config.model_type}, of which a step fails: {said}") from error
        self._tried = True

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Lets outputs arrive on a loop. All other methods but `stop` are for that loop."""
        self.loop = self._loop = loop

        def watch() -> None:
            self._thread.join()
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._ended)

        threading.Thread(target=watch, name="worker-watch", daemon=True).start()

    @property
    def open(self) -> int:
        """Sequences that wait or run."""
        return len(self._jobs)

    @property
    def captured_steps(self) -> int:
        """Graphs of a GPU that are kept."""
        return captured_steps(self._manager.batch_processor)

    def check(self, more: int = 1) -> None:
        """Raises Refusal unless as many sequences may come."""
        if self._refusal is None and not self._thread.is_alive():  # `_ended` is about to say so
            self.refuse(Refusal(503, FAILED, code="worker_failed"))
        if self._refusal is not None:
            raise self._refusal
        if self.open + more > self.most_requests:
            wait = {"retry-after": str(BUSY_SECONDS)}
            raise Refusal(429, f"the server holds {self.open} requests of at most {self.most_requests}: try again", code="queue_full", headers=wait)

    def submit(self, prompts: list[list[int]], new: list[int], samplings: list[Sampling], *, stream: bool) -> Job:
        """Starts the sequences of a request. new: tokens of each answer, at most.

        stream: whether tokens arrive one by one, or all at the end. Raises Refusal.
        """
        if len(prompts) > self.most_requests:
            raise Refusal(400, f"n times prompts should be at most {self.most_requests}, the requests that this server holds", param="n")
        self.check(len(prompts))
        names = [f"s{next(self._numbers)}" for _ in prompts]
        job = Job(names, [len(prompt) for prompt in prompts], lengths=dict.fromkeys(names, 0))
        self._jobs |= dict.fromkeys(names, job)
        self.prompt_tokens += sum(job.prompt_tokens)
        for name, prompt, most, sampling in zip(names, prompts, new, samplings, strict=True):
            if not sampling.plain:
                self._tickets[name] = self._tables.take(prompt, sampling)
                sampling = replace(sampling, ticket=self._tickets[name])
            # None: the worker has just stopped, and `_ended` is about to tell this job
            self._manager.add_request(prompt, request_id=name, max_new_tokens=most, streaming=stream, sampling=sampling)
        return job

    def cancel(self, job: Job, index: int | None = None) -> None:
        """Frees the slots and pages of a job's unfinished sequences, or of one of them."""
        for name in job.names if index is None else [job.names[index]]:
            if job.lengths.pop(name, None) is not None:
                self._forget(name)
                self._manager.cancel_request(name)

    def _forget(self, name: str) -> None:
        del self._jobs[name]
        if name in self._tickets:
            self._tables.free(self._tickets.pop(name))

    def _reused(self, name: str, prompt: list[int]) -> int:  # in the worker's thread
        """transformers' search for pages that hold the beginning of a prompt, again if it has to
        wait for others.
        """
        found: int = self._search(name, prompt)
        job = self._jobs.get(name)
        if job is not None:
            self.reused_tokens += found - job.reused_tokens.get(name, 0)
            job.reused_tokens[name] = found
        return found

    def _cancelled(self) -> list[Any]:  # in the worker's thread
        """transformers' removal of cancelled requests. One that ran gives its pages back, as one
        that finishes does. transformers lets waiting ones in again only for the latter: they would
        wait for ever where a full cache had put them back, and the last one that ran was cancelled.
        """
        running = len(self._scheduler.active_requests)
        found: list[Any] = self._clear()
        if len(self._scheduler.active_requests) < running:
            self._scheduler.block_new_requests = False
        return found

    def _step(self, processor: Any, bootstrapping: bool) -> bool:  # in the worker's thread
        """A step of transformers' loop. One that fails ends the requests that wait and run; the
        next ones begin with empty pages. It ends the worker if the GPU is lost.

        bootstrapping: it is the first of two that run at once.
        """
        try:
            more: bool = self._stock_step(processor, bootstrapping)
            return more
        except Exception as error:  # whatever a model's code and our kernels may raise
            if not usable(self._device):
                raise
            if self._tried:
                self.failed_steps += 1
                _log.error("a step failed, and %d requests with it", self.open, exc_info=error)
            else:
                self._failed = error
            processor.fail_all_requests(error)
            processor.reset()
        while processor.use_async_batching and not bootstrapping and self._step(processor, True):
            pass
        return True

    def refuse(self, refusal: Refusal) -> None:
        """Refuses all new requests."""
        self._refusal = refusal

    def abort(self, refusal: Refusal) -> None:
        """Ends all requests with an error."""
        for job in set(self._jobs.values()):
            self.cancel(job)
            job.inbox.put_nowait(refusal)

    def stop(self) -> None:
        """Ends the thread after its step, and gives the model its attention back."""
        self._refusal = self._refusal or Refusal(503, "the server is stopping")
        self._loop = None
        self._manager.stop(block=True, hard_stop=True)

    def _arrived(self, outputs: list[Any]) -> None:  # in the worker's thread
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, outputs: list[Any]) -> None:
        for output in outputs:
            job = self._jobs.get(output.request_id)
            if job is None:  # cancelled
                continue
            if output.error is not None:
                self.cancel(job)
                job.inbox.put_nowait(Refusal(500, STEP_FAILED, code="worker_failed"))
                continue
            seen = job.lengths[output.request_id]
            tokens, finished = output.generated_tokens[seen:], output.is_finished()
            job.lengths[output.request_id] = seen + len(tokens)
            if finished:
                del job.lengths[output.request_id]
                self._forget(output.request_id)
            job.inbox.put_nowait(News(job.names.index(output.request_id), tokens, finished))

    def _ended(self) -> None:
        if self._loop is None:  # told to
            return
        self.failure = self._manager.background_thread_status.fatal_error or RuntimeError("its thread ended")
        self.refuse(Refusal(503, FAILED, code="worker_failed"))
        self.abort(Refusal(500, FAILED, code="worker_failed"))


def usable(device: torch.device) -> bool:
    """Whether a device still computes: after some errors a process cannot use its GPU any more."""
    try:
        return bool(torch.ones(1, device=device).item())
    except RuntimeError:
        return False


class _Router:
    """Stands where transformers' OutputRouter does, which keeps what belongs to a cancelled
    request.
    """

    def __init__(self, arrived: Callable[[list[Any]], None]) -> None:
        self.deliver_batch = arrived

    def deliver(self, output: Any) -> None:
        self.deliver_batch([output])

    def fail_and_deliver(self, state: Any, error: Exception) -> None:
        from transformers.generation.continuous_batching.requests import RequestStatus

        state.status, state.error = RequestStatus.FAILED, str(error) or type(error).__name__
        self.deliver(state.to_generation_output())
