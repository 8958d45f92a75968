"""Runs engines for long, with other work beside them, and checks every token and the memory.

    python benchmarks/soak.py tiny --modes eager --seconds 10                       # on a CPU
    python benchmarks/soak.py Llama-3.2-1B --modes graph,mega --tokens 100000 --json out.jsonl

Of each mode: a model with random weights answers a few prompts alone; these are its tokens. Then it
answers them over and over, until so many tokens were written or so many seconds are over, while a
thread multiplies matrices on another stream. In between, requests are cancelled in the middle, are
too long, and find the GPU's memory full. The exit code is 1 if

- a token differs from those of the same prompt alone, or a graph's from those of the calls one by
  one;
- a request that cannot be served raises nothing, or another error than it should;
- a product of the other stream differs;
- memory grew between the first and the second half of the rounds.
"""

import argparse
import gc
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import psutil
import torch

import tilewright
from tilewright.bench.report import tell
from tilewright.engine import Engine
from tilewright.launch import Device
from tilewright.models import CONFIGS, random_model

TINY = {"model_type": "llama", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
PROMPTS = 4  # sets of prompts
EVERY = 5  # rounds between two requests that are cancelled or cannot be served
LEFT_BYTES = 16 << 20  # that a full GPU has
GROWTH_BYTES = {"cuda": 1 << 20, "cpu": 64 << 20}  # a process's memory breathes


class Cancelled(Exception):
    """The client has left."""


class Beside:
    """Products on a stream of their own, each judged by the first. wrong: what must not be."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.done, self.device, self.stopped = 0, device, threading.Event()
        self.wrong: list[str] = []
        self.operands = [torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2)]
        self.thread = threading.Thread(target=self.work, daemon=True)

    def work(self) -> None:
        stream = torch.cuda.stream(torch.cuda.Stream(self.device)) if self.device.type == "cuda" else nullcontext()
        try:
            with torch.inference_mode(), stream:
                first = tilewright.matmul(*self.operands)
                found = torch.empty_like(first)
                while not self.stopped.is_set():
                    self.multiply(first, found)
                    self.stopped.wait(0.002)
        except Exception as error:  # else the thread would end without a word
            self.wrong.append(f"beside: {type(error).__name__}: {error}")

    def multiply(self, first: torch.Tensor, found: torch.Tensor) -> None:
        with suppress(torch.OutOfMemoryError):  # now and then the memory is full
            for _ in range(8):
                tilewright.matmul(*self.operands, out=found)
            if not torch.equal(found, first):
                self.wrong.append(f"beside: product {self.done} differs")
            self.done += 8

    def __enter__(self) -> "Beside":
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stopped.set()
        self.thread.join()


@contextmanager
def full(device: torch.device) -> Iterator[None]:
    """A GPU without memory to speak of."""
    torch.cuda.empty_cache()
    held = torch.empty(max(0, torch.cuda.mem_get_info(device)[0] - LEFT_BYTES), dtype=torch.uint8, device=device)
    try:
        yield
    finally:
        del held
        torch.cuda.empty_cache()


class Soak:
    """One engine: what it was asked, and what it answered alone."""

    def __init__(self, engine: Engine, prompts: list[list[list[int]]], new: int, device: torch.device) -> None:
        self.engine, self.prompts, self.new, self.device = engine, prompts, new, device
        self.alone = [engine.generate(rows, new).tokens for rows in prompts]
        self.told: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.memory: list[list[int]] = [[] for _ in prompts]  # of each, whose buffers are of one size

    def round(self, number: int) -> int:
        """Tokens of one request, and of what comes between."""
        which = number % len(self.prompts)
        found = self.engine.generate(self.prompts[which], self.new).tokens
        if found != self.alone[which]:
            sequence, at = next((i, t) for i, row in enumerate(found) for t, x in enumerate(row) if x != self.alone[which][i][t])
            self.wrong.append(f"round {number}: token {at} of sequence {sequence} is {found[sequence][at]}, alone {self.alone[which][sequence][at]}")
        self.told["answered"] += 1
        self.memory[which].append(torch.cuda.memory_allocated(self.device) if self.device.type == "cuda" else psutil.Process().memory_info().rss)
        if number % EVERY == 0:
            self.between(number // EVERY, which)
        return sum(map(len, found))

    def between(self, turn: int, which: int) -> None:
        kinds = ("cancelled", "too long", "memory full") if self.device.type == "cuda" else ("cancelled", "too long")
        kind = kinds[turn % len(kinds)]
        longest = self.engine.max_len
        try:
            if kind == "cancelled":
                self.engine.generate(self.prompts[which], self.new, on_tokens=leave)
            elif kind == "too long":
                self.engine.generate([[1] * longest], self.new)
            else:
                with full(self.device):
                    self.engine.generate([[1] * (longest - 2)] * len(self.prompts[which]), 2)
        except {"cancelled": Cancelled, "too long": ValueError, "memory full": MemoryError}[kind]:
            self.told[kind] += 1
        else:
            self.wrong.append(f"a request that should have been {kind} was answered")


def leave(gained: list[list[int]]) -> None:
    raise Cancelled


def grown(memory: list[list[int]]) -> tuple[float, float]:
    """Median bytes of the first and of the second half of the rounds, of what grew most."""
    halves = [(statistics.median(each[: -(-len(each) // 2)]), statistics.median(each[len(each) // 2 :])) for each in memory if each]
    return max(halves, key=lambda half: half[1] - half[0])


def soak(mode: Any, given: argparse.Namespace, device: torch.device) -> list[str]:
    """Runs one mode, prints its row, and returns what is wrong."""
    config = TINY if given.model == "tiny" else CONFIGS[given.model]
    generator = torch.Generator().manual_seed(given.seed)
    batch = 1 if mode == "mega" else given.batch

    def drawn() -> list[list[int]]:
        lengths = torch.randint(1, given.prompt_tokens + 1, (batch,), generator=generator).tolist()
        return [torch.randint(0, config["vocab_size"], (n,), generator=generator).tolist() for n in lengths]

    prompts = [drawn() for _ in range(PROMPTS)]
    torch.manual_seed(given.seed)
    model = random_model(config, device=device, dtype=torch.bfloat16 if device.type == "cuda" else torch.float32)
    options = {"max_batch": batch, "max_len": given.max_len}
    wrong = []
    with Engine(model, mode=mode, **options) as engine:
        running = Soak(engine, prompts, given.new_tokens, device)
        tokens, number, start = 0, 0, time.perf_counter()
        with Beside(device, given.size) as beside:
            while tokens < given.tokens and time.perf_counter() - start < given.seconds:
                tokens += running.round(number)
                number += 1
        took = time.perf_counter() - start
    if mode == "graph":
        with Engine(model, mode="eager", **options) as engine:
            eager = [engine.generate(rows, given.new_tokens).tokens for rows in prompts]
        if eager != running.alone:
            wrong.append("the graph's tokens are not those of the calls one by one")
    before, after = grown(running.memory)
    if after > before + GROWTH_BYTES[device.type]:
        wrong.append(f"memory grew from {before / 1e6:.1f} to {after / 1e6:.1f} MB")
    wrong += running.wrong
    wrong += beside.wrong if beside.done else [*beside.wrong, "beside: nothing was done"]
    row = {"op": "soak", "case": f"{given.model} {mode} batch={batch}", "gpu": Device.of(torch.empty(0, device=device)).name, "tokens": tokens}
    row |= {"seconds": round(took, 1), "tokens_s": round(tokens / took, 1), "told": dict(running.told), "products_beside": beside.done}
    tell(row | {"memory_mb": [round(before / 1e6, 1), round(after / 1e6, 1)], "wrong": wrong[:5]}, given.json)
    return wrong


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help=f"tiny, or one of {', '.join(CONFIGS)}")
    parser.add_argument("--modes", default="graph,mega", help="of the engine, one after the other")
    parser.add_argument("--seconds", type=float, default=600.0, help="of each mode, at most")
    parser.add_argument("--tokens", type=int, default=100_000, help="of each mode, at most")
    parser.add_argument("--batch", type=int, default=16, help="sequences at once; the megakernel takes one")
    parser.add_argument("--prompt-tokens", type=int, default=200, help="at most; lengths are drawn")
    parser.add_argument("--new-tokens", type=int, default=200)
    parser.add_argument("--max-len", type=int, default=2048)
    parser.add_argument("--size", type=int, default=2048, help="of the matrices beside")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also append the rows here")
    given = parser.parse_args(arguments)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    wrong = []
    for mode in given.modes.split(","):
        found = soak(mode, given, device)
        for problem in found[:5]:
            print(f"wrong: {mode}: {problem}", file=sys.stderr)
        wrong += found
        gc.collect()
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
