"""Loads a server with many OpenAI clients, stops it in the middle, and checks what each was told.

    python benchmarks/serving_load.py tiny --seconds 10                  # a random model, on a CPU
    python benchmarks/serving_load.py small --seconds 60 --inexact       # a random one on a GPU
    python benchmarks/serving_load.py Llama-3.1-8B --seconds 600 --json out.jsonl

It starts `tilewright serve` and asks each user's question alone, greedily. Then all users ask at
once, over and over, each with `openai`'s client. Some stream; some of these leave in the middle.
Some ask for more than the cache holds, which must be refused with code context_length_exceeded.
After `--seconds`, and once there were answers, the server gets SIGTERM. The exit code is 1 if

- an answer is not the one to the same question alone. In fp32 it has to be the same text. Other
  dtypes round otherwise in another batch, so there it may not be closer to another user's answer;
- a request is lost: no answer and no clean error;
- the server does not end with code 0 within the time that it was given;
- its memory grew by more than a twentieth and 64 MB between the first and last quarter of the load.

429 is no error: the client waits, as it is told to. Options that are not listed here go to
`tilewright serve`.
"""

import argparse
import asyncio
import itertools
import random
import signal
import statistics
import string
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import openai
import psutil
import torch

from tilewright.bench.report import tell
from tilewright.launch import Device
from tilewright.testing import tiny_chat

SERVE = "from tilewright.cli import main; main()"
GROWTH_SHARE, GROWTH_BYTES = 0.05, 64e6
END_SECONDS = 15.0  # beyond those to drain
TOO_MANY_TOKENS = 1 << 24
RANDOM = {"tiny": tiny_chat.TINY, "small": tiny_chat.SMALL}


@dataclass
class User:
    """question: what they ask. alone: the answer when nobody else asks."""

    number: int
    question: str
    tokens: int
    alone: str = ""


@dataclass
class Seen:
    """What the users were told. told: how requests ended. wrong, lost: what must not be."""

    told: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    stopping: float | None = None  # when the server got its signal


def start(model: str, options: list[str], given: argparse.Namespace) -> tuple[subprocess.Popen[str], str, str]:
    """The server's process, its base URL and the name of its model."""
    command = [sys.executable, "-c", SERVE, "serve", model, "--port", "0", "--drain-seconds", str(given.drain_seconds), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        if line.startswith('model "'):
            _, name, rest = line.split('"')
            return process, rest.split()[1].rstrip(","), name
    raise SystemExit(f"the server ended with code {process.wait()}")


def users(given: argparse.Namespace) -> list[User]:
    drawn = random.Random(given.seed)
    lengths = [drawn.randint(1, given.prompt_chars) for _ in range(given.users)]
    letters = string.ascii_lowercase + "      "
    return [User(i, f"{i}: " + "".join(drawn.choices(letters, k=length)), drawn.randint(1, given.max_new_tokens)) for i, length in enumerate(lengths)]


def same(text: str, user: User, everyone: list[User], exact: bool) -> bool:
    if exact or text == user.alone:
        return text == user.alone
    own = alike(text, user.alone)
    return all(own >= alike(text, other.alone) for other in everyone)


def alike(a: str, b: str) -> int:
    """Characters that two texts begin with."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


class Load:
    def __init__(self, url: str, name: str, everyone: list[User], given: argparse.Namespace) -> None:
        self.name, self.everyone, self.given, self.seen = name, everyone, given, Seen()
        # no retries: a retried request would hide a lost one
        self.client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=300)

    async def ask(self, user: User, stream: bool, leave_after: int | None = None) -> str | None:
        """The answer; None if this client left before its end."""
        begin = time.perf_counter()
        request = {"model": self.name, "messages": [{"role": "user", "content": user.question}], "max_tokens": user.tokens, "temperature": 0}
        if not stream:
            whole = await self.client.chat.completions.create(**request)  # type: ignore[call-overload]
            return str(whole.choices[0].message.content)
        parts: list[str] = []
        finished = False
        async with await self.client.chat.completions.create(**request, stream=True) as chunks:  # type: ignore[call-overload]
            async for chunk in chunks:
                choice = chunk.choices[0]
                if choice.delta.content:
                    if not parts:
                        self.seen.first_s.append(time.perf_counter() - begin)
                    parts.append(choice.delta.content)
                finished = finished or choice.finish_reason is not None
                if leave_after is not None and len(parts) > leave_after:
                    return None
        if not finished:
            raise EOFError("the stream ended without a reason")
        return "".join(parts)

    async def live(self, user: User) -> None:
        """One user, until the server refuses because it stops."""
        drawn, seen = random.Random(self.given.seed * 1000 + user.number), self.seen
        while seen.stopping is None:
            if drawn.random() < self.given.oversized:
                await self.ask_too_much(user)
            stream = drawn.random() < 0.7
            leave = drawn.randint(0, user.tokens) if stream and drawn.random() < self.given.cancel else None
            begin = time.perf_counter()
            try:
                text = await self.ask(user, stream, leave)
            except openai.RateLimitError as error:
                seen.told["429"] += 1
                await asyncio.sleep(float(error.response.headers["retry-after"]) * drawn.random())
            except (openai.APIError, EOFError, OSError) as error:
                self.failed(user, error, begin)
            else:
                seen.told["left" if text is None else "answered"] += 1
                if text is not None:
                    seen.whole_s.append(time.perf_counter() - begin)
                    if not same(text, user, self.everyone, self.given.exact):
                        seen.wrong.append(f"user {user.number}: {text!r}, alone {user.alone!r}")

    async def ask_too_much(self, user: User) -> None:
        """More tokens than any cache holds."""
        begin = time.perf_counter()
        try:
            await self.ask(replace(user, tokens=TOO_MANY_TOKENS), stream=False)
        except (openai.APIError, OSError) as error:
            if getattr(error, "code", None) == "context_length_exceeded":
                self.seen.told["refused, too long"] += 1
            elif not isinstance(error, openai.RateLimitError):
                self.failed(user, error, begin)
        else:
            self.seen.wrong.append(f"user {user.number}: {TOO_MANY_TOKENS} tokens were not refused")

    def failed(self, user: User, error: Exception, begin: float) -> None:
        """Only once the server stops may a request fail, and only with an error that says so."""
        stopping = self.seen.stopping
        clean = isinstance(error, openai.APIError) and getattr(error, "code", None) == "stopping"
        late = isinstance(error, openai.APIConnectionError) and stopping is not None and begin >= stopping
        if (clean or late) and stopping is not None:
            self.seen.told["told that the server stops"] += 1
        else:
            self.seen.lost.append(f"user {user.number}: {type(error).__name__}: {error}")

    async def run(self, process: Any) -> None:
        for user in self.everyone:
            user.alone = await self.ask(user, stream=False) or ""
        server = psutil.Process(process.pid)
        living = [asyncio.create_task(self.live(user)) for user in self.everyone]
        end = time.perf_counter() + self.given.seconds
        while (time.perf_counter() < end or not enough(self.seen, self.given)) and process.poll() is None:
            self.seen.memory.append(server.memory_info().rss)
            await asyncio.sleep(min(1.0, self.given.seconds / 40))
        self.seen.stopping = time.perf_counter()
        process.send_signal(signal.SIGTERM)
        await asyncio.gather(*living)
        await self.late()
        await self.client.close()

    async def late(self) -> None:
        """One more request, which must not be answered."""
        try:
            await self.ask(self.everyone[0], stream=False)
        except openai.APIError as error:
            self.failed(self.everyone[0], error, time.perf_counter())
        else:
            self.seen.wrong.append("a request after the last was answered")


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4) if ordered else float("nan")


def quarters(memory: list[int]) -> list[float]:
    """Median bytes of each quarter of the load."""
    length = max(1, len(memory) // 4)
    return [statistics.median(memory[i * length : (i + 1) * length] or memory[-length:]) for i in range(4)]


def enough(seen: Seen, given: argparse.Namespace) -> bool:
    """Whether answers came, clients left if some are to, and too long requests were refused."""
    shares = {"left": given.cancel, "refused, too long": given.oversized}
    return seen.told["answered"] > 0 and all(seen.told[what] > 0 or not share for what, share in shares.items())


def check(seen: Seen, code: int | None, end_s: float, given: argparse.Namespace) -> list[str]:
    """What is wrong."""
    found = [*seen.wrong[:3], *seen.lost[:3]]
    before, *_, after = quarters(seen.memory)
    if after > before * (1 + GROWTH_SHARE) + GROWTH_BYTES:
        found.append(f"memory grew from {before / 1e6:.0f} to {after / 1e6:.0f} MB")
    if code != 0:
        found.append(f"the server ended with {'no code' if code is None else f'code {code}'} after {end_s:.1f} s")
    if not enough(seen, given):
        found.append(f"too little happened: {dict(seen.told)}")
    return found


def main(arguments: list[str] | None = None, start: Callable[..., tuple[Any, str, str]] = start) -> int:
    """start: runs a server; a test has its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder or a .gguf file with a tokenizer; tiny, small: with random weights")
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0, help="of load before SIGTERM")
    parser.add_argument("--prompt-chars", type=int, default=200, help="at most; lengths are drawn")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="at most; lengths are drawn")
    parser.add_argument("--cancel", type=float, default=0.25, help="share of the streams whose client leaves")
    parser.add_argument("--oversized", type=float, default=0.02, help="how often a user first asks for more than the cache holds")
    parser.add_argument("--drain-seconds", type=float, default=30.0)
    parser.add_argument("--inexact", dest="exact", action="store_false", help="for dtypes but float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also append the row here")
    given, given_serve = parser.parse_known_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        model = given.model
        if model in RANDOM:
            model = str(Path(folder) / model)
            tiny_chat.write(Path(model), sizes=RANDOM[given.model])
        process, url, name = start(model, given_serve, given)
        try:
            load = Load(url, name, users(given), given)
            asyncio.run(load.run(process))
            seen = load.seen
            assert seen.stopping is not None
            code = wait(process, seen.stopping + given.drain_seconds + END_SECONDS - time.perf_counter())
        finally:
            process.kill()
            process.wait()
    end_s = time.perf_counter() - seen.stopping
    gpu = Device.of(torch.empty(0, device="cuda" if torch.cuda.is_available() else "cpu")).name
    row = {
        "op": "serve_load",
        "case": f"{name} users={given.users} seconds={given.seconds:g}",
        "gpu": gpu,
        "told": dict(seen.told),
        "wrong": len(seen.wrong),
    }
    row |= {"lost": len(seen.lost), "exit_code": code, "end_s": round(end_s, 2), "memory_mb": [round(held / 1e6) for held in quarters(seen.memory)]}
    row |= {f"{what}_p{p}_s": percentile(values, p / 100) for what, values in (("first", seen.first_s), ("whole", seen.whole_s)) for p in (50, 99)}
    tell(row, given.json)
    problems = check(seen, code, end_s, given)
    for problem in problems:
        print(f"wrong: {problem[:500]}", file=sys.stderr)
    return 1 if problems else 0


def wait(process: Any, seconds: float) -> int | None:
    try:
        return process.wait(max(0.1, seconds))
    except subprocess.TimeoutExpired:
        return None


if __name__ == "__main__":
    raise SystemExit(main())
