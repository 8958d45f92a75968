"""What a request may hold, and how a refusal looks: OpenAI's interface, as far as we serve it.

A field that we do not serve is refused unless its value asks for nothing. Nothing is ignored.
"""

import json
import reprlib
from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NoReturn, Self, TypeVar, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, model_validator
from pydantic_core import PydanticCustomError

MOST_BIASES = 300  # OpenAI's
MOST_CHOICES = 16  # of one request: prompts times n
CHAT_TOKENS, COMPLETION_TOKENS = 1024, 16  # of an answer, where a request does not say; the second is OpenAI's


class Refusal(Exception):
    """An answer other than 200. param: the field that is wrong."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


def only(*neutral: object) -> AfterValidator:
    """Of a field that we do not serve: it may hold what asks for nothing, null or one of these."""

    def check(value: Any) -> Any:
        if value is not None and not any(type(value) is type(allowed) and value == allowed for allowed in neutral):
            raise ValueError("should be " + " or ".join(["null", *map(repr, neutral)]) + ", because this server supports nothing else")
        return value

    return AfterValidator(check)


def _wrong(param: str, message: str) -> PydanticCustomError:
    """The error of a field that does not go with another."""
    return PydanticCustomError("fields_disagree", "{message}", {"param": param, "message": message})


class _Object(BaseModel):
    # "allow" and not "forbid", whose list of errors is longer than the request
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    @model_validator(mode="after")
    def _knows_each_field(self) -> Self:
        for name in self.model_extra or ():
            raise ValueError(f"has a field that this server does not know: {reprlib.repr(name)}")
        return self


class Part(_Object):
    type: Literal["text"]
    text: str


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[Part], Field(min_length=1, fail_fast=True), Tag("<parts>")],
    Discriminator(lambda value: "<parts>" if isinstance(value, list) else "<text>"),
]


class Message(_Object):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    name: str | None = None
    # what a client sends back with an answer of ours
    refusal: Annotated[Any, only()] = None
    annotations: Annotated[Any, only([])] = None
    audio: Annotated[Any, only()] = None
    function_call: Annotated[Any, only()] = None
    tool_calls: Annotated[Any, only([])] = None

    def for_template(self) -> dict[str, str]:
        text = self.content if isinstance(self.content, str) else " ".join(part.text for part in self.content)
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text} | ({} if self.name is None else {"name": self.name})


class StreamOptions(_Object):
    include_usage: bool = False
    include_obfuscation: Annotated[Any, only(False)] = None


Stop = Annotated[str, Field(min_length=1, max_length=256)]
Stops = Annotated[
    Annotated[Stop, Tag("<text>")] | Annotated[list[Stop], Field(max_length=4, fail_fast=True), Tag("<list>")] | Annotated[None, Tag("<null>")],
    Discriminator(lambda value: "<list>" if isinstance(value, list) else "<null>" if value is None else "<text>"),
]


def _tokens(biases: dict[str, float]) -> dict[str, float]:
    if wrong := next((name for name in biases if not (name.isascii() and name.isdecimal() and len(name) < 10 and str(int(name)) == name)), None):
        raise ValueError(f"should name tokens by their numbers, as in {{'50': -100}}, and not {reprlib.repr(wrong)}")
    return biases


class Request(_Object):
    """What both kinds of requests hold."""

    model: str
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stops = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # about the account, not the answer
    user: str | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MOST_BIASES), AfterValidator(_tokens)] | None = None

    @model_validator(mode="after")
    def _streams_what_it_says(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise _wrong("stream_options", "should be null unless stream is true")
        return self

    @property
    def choices(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def longest(self) -> int | None:
        """The tokens of an answer that the request asks for."""
        return self.max_tokens

    @property
    def usage_chunk(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(Request):
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    store: Annotated[Any, only(False)] = None
    service_tier: Annotated[Any, only("auto", "default")] = None
    logprobs: Annotated[Any, only(False)] = None
    top_logprobs: Annotated[Any, only(0)] = None
    audio: Annotated[Any, only()] = None
    modalities: Annotated[Any, only(["text"])] = None
    prediction: Annotated[Any, only()] = None
    response_format: Annotated[Any, only({"type": "text"})] = None
    reasoning_effort: Annotated[Any, only()] = None
    tools: Annotated[Any, only([])] = None
    tool_choice: Annotated[Any, only("none", "auto")] = None
    parallel_tool_calls: Annotated[Any, only(True, False)] = None
    functions: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only("none", "auto")] = None
    verbosity: Annotated[Any, only()] = None
    web_search_options: Annotated[Any, only()] = None

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise _wrong("max_tokens", "should be null where max_completion_tokens, its new name, says something else")
        return self

    @property
    def longest(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


TokenIds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, fail_fast=True)]


def _kind_of_prompt(value: Any) -> str:
    if not isinstance(value, list):
        return "<text>"
    first = value[0] if value else ""
    return "<texts>" if isinstance(first, str) else "<lists>" if isinstance(first, list) else "<tokens>"


Several = Field(min_length=1, max_length=MOST_CHOICES, fail_fast=True)
Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[str], Several, Tag("<texts>")]
    | Annotated[TokenIds, Tag("<tokens>")]
    | Annotated[list[TokenIds], Several, Tag("<lists>")],
    Discriminator(_kind_of_prompt),
]


class CompletionRequest(Request):
    prompt: Prompt
    logprobs: Annotated[Any, only()] = None
    echo: Annotated[Any, only(False)] = None
    best_of: Annotated[Any, only(1)] = None
    suffix: Annotated[Any, only("")] = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """A list of prompts, each text or token ids."""
        single = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return cast(list[str] | list[list[int]], [self.prompt] if single else self.prompt)

    @model_validator(mode="after")
    def _few_choices(self) -> Self:
        if len(self.prompts) * self.choices > MOST_CHOICES:
            raise _wrong("prompt", f"should ask for at most {MOST_CHOICES} answers: prompts times n")
        return self


Asked = TypeVar("Asked", bound=Request)


def parse(kind: type[Asked], body: bytes) -> Asked:
    """The request in a body. Raises Refusal, which names the first field that is wrong."""
    try:  # not by pydantic, which takes the last of equal names
        text = body.decode()
        found = json.loads(text, object_pairs_hook=_each_once)
        if "\\u" in text:  # an escape may be half a character, which no UTF-8 can hold
            json.dumps(found, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise Refusal(400, printable(f"the body should be JSON in UTF-8: {str(error)[:200]}"), code="invalid_json") from None
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        _refuse(error)


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = Counter(name for name, _ in pairs)
        twice = next(name for name, count in names.items() if count > 1)
        raise Refusal(400, printable(f"the body should name each field of an object once, got {twice!r:.80} again"), code="invalid_json")
    return found


def _refuse(error: ValidationError) -> NoReturn:
    found = error.errors(include_url=False)[0]
    steps = [step for step in found["loc"] if not str(step).startswith("<")]
    param = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).lstrip(".")
    message = found["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if found["type"] == "fields_disagree":
        param = found["ctx"]["param"]
        raise Refusal(400, f"{param} {message}", param=param)
    got = "" if found["type"] == "missing" else f", got {reprlib.repr(found['input'])}"
    raise Refusal(400, printable(f"{param or 'the body'} {message}{got}"), param=param or None)


def printable(text: str) -> str:
    """Without lone surrogates, which no UTF-8 can hold."""
    return text.encode("utf-8", "backslashreplace").decode()
