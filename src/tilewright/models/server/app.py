"""Answers requests: the routes, and what they say."""

import asyncio
import json
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from .. import chat_template
from .gate import Gate
from .protocol import CHAT_TOKENS, COMPLETION_TOKENS, ChatRequest, CompletionRequest, Refusal, Request, parse, printable
from .sampling import Sampling
from .text import Text
from .worker import Job, Worker

# Threads that turn prompts into tokens, of short and of long bodies: each may need some 100 bytes
# per byte of a body. A long one takes seconds, and short ones do not wait for it.
ENCODERS = 2
LONG_BODY = 1 << 16
Result = TypeVar("Result")


class _Gone(Exception):
    """The client closed its connection."""


@dataclass(frozen=True)
class Style:
    """How one of the two kinds of answers looks. first: what a stream begins a choice with."""

    prefix: str
    whole: str
    chunk: str
    choice: Callable[[str], dict[str, Any]]
    delta: Callable[[str], dict[str, Any]]
    first: dict[str, Any] | None = None


CHAT = Style(
    "chatcmpl",
    "chat.completion",
    "chat.completion.chunk",
    lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    lambda text: {"delta": {"content": text} if text else {}},
    {"delta": {"role": "assistant", "content": ""}},
)
COMPLETION = Style("cmpl", "text_completion", "text_completion", lambda text: {"text": text}, lambda text: {"text": text})


@dataclass
class Choice:
    """One answer while it is written. finish: why it ended."""

    text: Text
    most: int  # tokens
    tokens: int = 0
    written: list[str] = field(default_factory=list)
    finish: str | None = None


class Answers:
    """The routes of a server in front of a worker. names: what requests may call the model."""

    def __init__(self, worker: Worker, model: Any, tokenizer: Any, names: tuple[str, ...]) -> None:
        self.worker, self.tokenizer, self.names = worker, tokenizer, names
        self.words = model.get_input_embeddings().num_embeddings
        self._encoders = CapacityLimiter(ENCODERS), CapacityLimiter(ENCODERS)
        own = model.generation_config
        self._defaults: dict[str, Any] = {
            "temperature": (own.temperature or 1.0) if own.do_sample else 0.0,
            "top_p": (own.top_p or 1.0) if own.do_sample else 1.0,
            "top_k": (own.top_k or 0) if own.do_sample else 0,
            "min_p": (own.min_p or 0.0) if own.do_sample else 0.0,
            "repetition_penalty": own.repetition_penalty or 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }

    async def models(self, http: HttpRequest) -> Response:
        rows = [{"id": self.names[0], "object": "model", "created": 0, "owned_by": "tilewright", "max_model_len": self.worker.longest}]
        return JSONResponse({"object": "list", "data": rows})

    async def model(self, http: HttpRequest) -> Response:
        self._named(http.path_params["name"])
        return JSONResponse({"id": http.path_params["name"], "object": "model", "created": 0, "owned_by": "tilewright"})

    async def health(self, http: HttpRequest) -> Response:
        self.worker.check(0)
        tokens = {"prompt_tokens": self.worker.prompt_tokens, "reused_tokens": self.worker.reused_tokens}
        steps = {"failed_steps": self.worker.failed_steps, "captured_steps": self.worker.captured_steps}
        return JSONResponse({"status": "ok", "requests": self.worker.open, **steps, **tokens})

    async def chat(self, http: HttpRequest) -> Response:
        asked = await self._asked(ChatRequest, http)
        messages = [message.for_template() for message in asked.messages]
        long = len(await http.body()) > LONG_BODY
        prompts = [await self._encode("messages", partial(self._chat_tokens, messages, long), long)]
        return await self._answer(http, asked, prompts, CHAT, CHAT_TOKENS)

    async def completions(self, http: HttpRequest) -> Response:
        asked = await self._asked(CompletionRequest, http)
        long = len(await http.body()) > LONG_BODY
        prompts = [
            prompt if isinstance(prompt, list) else await self._encode("prompt", partial(self._tokens, prompt), long) for prompt in asked.prompts
        ]
        return await self._answer(http, asked, prompts, COMPLETION, COMPLETION_TOKENS)

    async def _asked(self, kind: type[Any], http: HttpRequest) -> Any:
        self.worker.check()
        if http.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            # A page in a browser can send other types to a server on its user's machine unasked.
            raise Refusal(415, "the header Content-Type should be application/json")
        asked = parse(kind, await http.body())
        self._named(asked.model)
        return asked

    def _named(self, name: str) -> None:
        if name not in self.names:
            raise Refusal(404, printable(f"model should be {self.names[0]!r}, got {name[:100]!r}"), param="model", code="model_not_found")

    async def _encode(self, param: str, encode: Callable[[], list[int]], long: bool) -> list[int]:
        try:
            return await to_thread.run_sync(encode, limiter=self._encoders[long])
        except (ValueError, TypeError) as error:  # a template's own rules: roles that take turns, say
            raise Refusal(400, printable(f"{param} cannot be turned into tokens: {str(error)[:300]}"), param=param) from error

    def _chat_tokens(self, messages: list[dict[str, str]], long: bool) -> list[int]:
        if not self.tokenizer.chat_template:
            raise Refusal(400, "messages need a chat template, and this model has none: use /v1/completions", param="messages")
        return self._tokens(chat_template.applied(self.tokenizer, messages, long=long), special=False)

    def _tokens(self, text: str, special: bool = True) -> list[int]:
        found: list[int] = self.tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
        return found

    def _room(self, prompt: list[int], longest: int | None, default: int, param: str) -> int:
        """Tokens of the answer, at most. Raises Refusal: the prompt does not fit with it."""
        limit = self.worker.longest
        if not prompt:
            raise Refusal(400, f"{param} should hold at least one token", param=param)
        if max(prompt) >= self.words:
            raise Refusal(400, f"{param} should hold tokens below {self.words}, got {max(prompt)}", param=param)
        left = limit - len(prompt)
        if left < 1:
            message = f"{param} should leave room for an answer: a prompt with its answer has at most {limit} tokens, got a prompt of {len(prompt)}"
            raise Refusal(400, message, param=param, code="context_length_exceeded")
        if longest is not None and longest > left:
            message = f"max_tokens should be at most {left}: a prompt with its answer has at most {limit} tokens, the prompt has {len(prompt)}"
            raise Refusal(400, f"{message}, got {str(longest)[:100]}", param="max_tokens", code="context_length_exceeded")
        return min(default, left) if longest is None else longest

    def _sampling(self, asked: Request, index: int) -> Sampling:
        given = {name: default if getattr(asked, name) is None else getattr(asked, name) for name, default in self._defaults.items()}
        seed = secrets.randbits(63) if asked.seed is None else (asked.seed + index + 2**63) % 2**64 - 2**63
        bias = {int(token): value for token, value in (asked.logit_bias or {}).items()}
        if bias and max(bias) >= self.words:
            raise Refusal(400, f"logit_bias should name tokens below {self.words}, got {max(bias)}", param="logit_bias")
        return Sampling(seed=seed, logit_bias=bias, **given)

    async def _answer(self, http: HttpRequest, asked: Request, prompts: list[list[int]], style: Style, default: int) -> Response:
        param = "messages" if style is CHAT else "prompt"
        most = [self._room(prompt, asked.longest, default, param) for prompt in prompts for _ in range(asked.choices)]
        rows = [prompt for prompt in prompts for _ in range(asked.choices)]
        samplings = [self._sampling(asked, i % asked.choices) for i in range(len(rows))]
        choices = [Choice(Text(self.tokenizer, asked.stops), longest) for longest in most]
        job = self.worker.submit(rows, most, samplings, stream=bool(asked.stream or asked.stops))
        head = {"id": f"{style.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": asked.model}
        usage = partial(_usage, job, asked.choices, choices)
        if asked.stream:
            return _Stream(self._events(job, choices, head, style, usage if asked.usage_chunk else None), partial(self.worker.cancel, job))
        try:
            await _unless_gone(http, self._write(job, choices))
        finally:
            self.worker.cancel(job)
        found = [
            {"index": i, **style.choice("".join(choice.written)), "logprobs": None, "finish_reason": choice.finish}
            for i, choice in enumerate(choices)
        ]
        return JSONResponse({**head, "object": style.whole, "choices": found, "usage": usage()})

    async def _write(self, job: Job, choices: list[Choice]) -> None:
        async for _ in self._pieces(job, choices):
            pass

    async def _pieces(self, job: Job, choices: list[Choice]) -> AsyncIterator[tuple[int, str]]:
        """Index and text of what is certain, until all choices have ended."""
        while any(choice.finish is None for choice in choices):
            news = await job.news()
            choice = choices[news.index]
            if choice.finish is not None:
                continue
            choice.tokens += len(news.tokens)
            ended = bool(news.tokens) and news.tokens[-1] in self.worker.eos
            piece = choice.text.add(news.tokens[:-1] if ended else news.tokens)
            if news.finished:
                piece += choice.text.end()
            if choice.text.stopped:
                self.worker.cancel(job, news.index)
            if news.finished or choice.text.stopped:
                choice.finish = "stop" if ended or choice.text.stopped else "length"
            choice.written.append(piece)
            yield news.index, piece

    async def _events(
        self, job: Job, choices: list[Choice], head: dict[str, Any], style: Style, usage: Callable[[], dict[str, Any]] | None
    ) -> AsyncIterator[str]:
        def event(rows: list[dict[str, Any]], **more: Any) -> str:
            body = {**head, "object": style.chunk, "choices": rows} | ({} if usage is None else {"usage": None}) | more
            return f"data: {json.dumps(body)}\n\n"

        def row(index: int, piece: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
            return {"index": index, **piece, "logprobs": None, "finish_reason": finish}

        try:
            if style.first is not None:
                yield event([row(i, style.first) for i in range(len(choices))])
            async for index, piece in self._pieces(job, choices):
                if piece:
                    yield event([row(index, style.delta(piece))])
                if choices[index].finish is not None:
                    yield event([row(index, style.delta(""), choices[index].finish)])
        except Refusal as refusal:  # the answer has begun: its status cannot change
            yield f"data: {json.dumps(refusal.body)}\n\n"
            return
        if usage is not None:
            yield event([], usage=usage())
        yield "data: [DONE]\n\n"


class _Stream(StreamingResponse):
    """Calls `at_end` however the response ends, also if its client leaves before it begins."""

    def __init__(self, events: AsyncIterator[str], at_end: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._at_end = at_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._at_end()


async def _unless_gone(http: HttpRequest, work: Coroutine[Any, Any, Result]) -> Result:
    """Awaits the work, or cancels it and raises _Gone once the client has closed its connection."""

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    doing, leaving = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait((doing, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise _Gone
        return doing.result()
    finally:
        for task in (doing, leaving):
            task.cancel()
        await asyncio.gather(doing, leaving, return_exceptions=True)


def _usage(job: Job, several: int, choices: list[Choice]) -> dict[str, Any]:
    """several: choices of each prompt, which counts once."""
    prompt, answered = sum(job.prompt_tokens[::several]), sum(choice.tokens for choice in choices)
    reused = {"cached_tokens": sum(job.reused_tokens.get(name, 0) for name in job.names[::several])}
    return {"prompt_tokens": prompt, "completion_tokens": answered, "total_tokens": prompt + answered, "prompt_tokens_details": reused}


def application(answers: Answers, **limits: Any) -> Gate:
    """The ASGI application: the routes, behind a gate with these limits."""

    def refused(http: HttpRequest, error: Exception) -> Response:
        if isinstance(error, _Gone):
            return Response(status_code=499)  # nobody reads it
        if isinstance(error, HTTPException):
            error = Refusal(error.status_code, f"{http.method} {http.url.path[:100]}: {error.detail}", headers=error.headers)
        if not isinstance(error, Refusal):
            error = Refusal(500, f"the server failed: {type(error).__name__}")
        return JSONResponse(error.body, error.status, headers=error.headers)

    routes = [
        Route("/v1/models", answers.models),
        Route("/v1/models/{name:path}", answers.model),
        Route("/v1/chat/completions", answers.chat, methods=["POST"]),
        Route("/v1/completions", answers.completions, methods=["POST"]),
        Route("/health", answers.health),
    ]
    handlers: dict[Any, Any] = dict.fromkeys((Refusal, HTTPException, _Gone, Exception), refused)
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False  # to where the client's Host says, and with no error in the body
    return Gate(app, **limits)
