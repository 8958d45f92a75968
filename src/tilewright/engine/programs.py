"""The programs of an engine: made, compiled and captured when a batch first needs them."""

from collections.abc import Callable
from typing import Any

import torch

from ..launch import Device
from .beside import beside
from .early import early
from .graph import capture, compile_kernels, run
from .layers import Decoder
from .mega.pack import Weights
from .mega.run import Clocks, Mega
from .prefill import Prefill
from .program import Call, Step, StepBuffers
from .sampling import Sampling
from .shares import in_shares
from .speculate import Verify
from .state import State

Report = Callable[[str, int, int], None]
KEYS = 256  # what the keys of a prefill behind others are rounded up to: fewer programs
MOST_CAPTURED_TOKENS = 1024  # of a chunk of prompts: with more, the host keeps ahead of the GPU without a graph


class Programs:
    """mode: "eager", "graph" or "mega". prefill_tokens: read at once. report: gets stage, done and
    all.

    megas: the megakernels among the programs. touched: whether calls ran that write into the cache
        at places of no meaning, to compile their kernels.
    """

    def __init__(self, decoder: Decoder, state: State, mode: str, prefill_tokens: int, report: Report) -> None:
        self.decoder, self.state, self.mode, self.report = decoder, state, mode, report
        self.megas: list[Mega] = []
        self.touched = False
        self._prefill_tokens = prefill_tokens
        self._pool = torch.cuda.graph_pool_handle() if mode == "graph" else None
        self._steps: dict[tuple[Any, ...], Step] = {}
        self._prefills: dict[tuple[int, ...], Prefill] = {}
        self._verifies: dict[tuple[Any, ...], Verify] = {}

    def step(self, batch: int, sampling: Sampling, *, masked: bool = False) -> Step:
        key = (batch, masked, *sampling.kind)
        if key not in self._steps:
            self._steps[key] = self._compiled_step(batch, sampling, masked)
        return self._steps[key]

    def prefill(self, batch: int, longest: int, held: int = 0) -> Prefill:
        """longest: tokens of the longest prompt behind those that the cache has, `held` at most."""
        width = -(-longest // 16) * 16
        chunks = -(-width * batch // self._prefill_tokens)
        keys = min(-(-(held + width) // KEYS) * KEYS, self.state.max_len) if held else width
        shape = (batch, -(-width // (16 * chunks)) * 16, width, keys)
        prefill = self._prefills.get(shape)
        if prefill is None:
            self._prefills.clear()  # its buffers are the largest there are
            prefill = self._prefills[shape] = Prefill.of(self.decoder, self.state, *shape)
            prefill.buffers.positions.fill_(-1)  # stores nothing: the cache may hold what a prompt begins with
            self._compile(f"prefill, {batch} x {shape[1]}", prefill.body)
        elif self.mode == "graph" and prefill.graph is None and prefill.ids.numel() <= MOST_CAPTURED_TOKENS:
            # Not for the first prompt of a shape: it may be the only one.
            prefill.buffers.positions.fill_(-1)
            prefill.graph = self.captured(f"prefill, {batch} x {shape[1]}", prefill.body)
        return prefill

    def verify(self, batch: int, draft: int, sampling: Sampling) -> Verify:
        key = (batch, draft, *sampling.kind)
        if key not in self._verifies:
            verify = self._verifies[key] = Verify.of(self.decoder, self.state, batch, draft, sampling)
            self.compile(f"drafts of {draft}, batch {batch}", verify.calls)
            verify.graph = self.captured(f"drafts of {draft}, batch {batch}", verify.calls)
        return self._verifies[key]

    def compile(self, what: str, calls: list[Call]) -> None:
        self.touched = True
        self._compile(what, calls)

    def _compile(self, what: str, calls: list[Call]) -> None:
        compile_kernels(calls, lambda done, total: self.report(f"compiling {what}", done, total))

    def captured(self, what: str, calls: list[Call]) -> torch.cuda.CUDAGraph | None:
        """A graph of calls whose kernels are compiled; None in other modes than "graph"."""
        if self.mode != "graph":
            return None
        self.report(f"capturing {what}", 0, 1)
        run(calls)  # equal calls may still differ in how their memory is aligned: nothing is left to compile after this
        graph = capture(calls, self._pool)
        self.report(f"capturing {what}", 1, 1)
        return graph

    def _compiled_step(self, batch: int, sampling: Sampling, masked: bool) -> Step:
        buffers = self.state.buffers(batch)
        choice = list(self.state.choose_calls(buffers, sampling, masked=masked))
        step = Step(buffers, [*self.decoder.head_calls(buffers), *choice], {})
        if self.mode == "mega":
            greedy = sampling.temperature == 0 and sampling.plain and not masked
            mega = self._mega(buffers, greedy=greedy)
            step.calls[self.state.max_len] = [Call("mega", mega.step, ()), *([] if greedy else choice)]
            step.many = mega.step if greedy else None
        else:
            for keys, caches in self.state.reaches():
                body = self.decoder.body_calls(buffers, self.state.tokens[:batch], caches)
                calls = in_shares([*body, *step.tail], buffers)
                step.calls[keys] = early(calls, Device.of(self.state.tokens))
        self.state.begin([[0]] * batch, sampling)
        self.compile(f"decode, batch {batch}", step.tail)
        with beside():
            for keys, calls in step.calls.items():
                self.state.begin([[0]] * batch, sampling)
                self.compile(f"decode, batch {batch}", calls)
                self.state.begin([[0]] * batch, sampling)
                if (graph := self.captured(f"decode, batch {batch}", calls)) is not None:
                    step.graphs[keys] = graph
        return step

    def check(self) -> None:
        """Raises what a megakernel failed with."""
        for mega in self.megas:
            mega.check()

    def told(self, steps: int, sequences: int) -> Callable[[], list[list[int]]]:
        """`State.told`, once no megakernel has failed."""
        self.check()
        return self.state.told(steps, sequences)

    def _mega(self, buffers: StepBuffers, *, greedy: bool) -> Mega:
        """The whole step in one kernel, but for the choice where it is drawn by chance."""
        weights, state = Weights.of(self.decoder), self.state
        clocks = Clocks(state.tokens, state.counters, state.recent, state.clock)
        logits = buffers.tensor("logits", 1, self.decoder.vocab)
        packed = self.megas[0].packed if self.megas else None
        self.megas.append(Mega(weights, clocks, state.stacks, logits=logits, choose=greedy, packed=packed))
        return self.megas[-1]


def bucket(sequences: int, max_batch: int) -> int:
    """The batch that so many prompts run in."""
    return min(max_batch, 1 << (sequences - 1).bit_length())


def padded(rows: list[list[int]], batch: int) -> list[list[int]]:
    """Prompts of a whole bucket."""
    return rows + [[0]] * (batch - len(rows))
