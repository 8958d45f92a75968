"""Requests of another shape: each is refused with a 4xx that names the field, and none is a 500."""

import json

import pytest
from tiny_server import CHAT, HELLO, PLAIN, call, chat, plain, refused, resident_bytes, server

for needed in ("starlette", "uvicorn"):
    pytest.importorskip(needed, reason="pip install 'tilewright[serve]'")


@pytest.fixture(scope="module")
def port():
    with server() as running:
        yield running.address[1]
        status, answer, _ = call(running.address[1], CHAT, chat())
        assert status == 200, answer  # whatever the tests did, the next request is answered
        assert running.worker.open == 0


NAN, INFINITY = float("nan"), float("inf")
EACH_KIND = [
    *(("max_tokens", value) for value in (0, -1, 1.5, NAN, "4", True, [4], {}, 10**9, 2**63, 10**30)),
    *(("temperature", value) for value in (-1, -0.001, 2.1, NAN, INFINITY, -INFINITY, "1", True, [], {}, 10**400)),
    *(("top_p", value) for value in (-0.1, 1.1, NAN, INFINITY, "1", False, [])),
    *(("top_k", value) for value in (-1, 1.5, True, 2**31, "4")),
    *(("min_p", value) for value in (-0.1, 1.5, "0.1")),
    *(("n", value) for value in (0, -1, 17, 10**12, 1.5, "2", True, [])),
    *(("seed", value) for value in (1.5, "1", True, 2**63, -(2**63) - 1, NAN, [])),
    *(("stop", value) for value in (3, True, {}, "", "a" * 257)),
    *(("stream", value) for value in (1, "true", [], {})),
    *(("stream_options", value) for value in (1, "x", [], {"include_usage": True})),  # the last without stream
    *(("frequency_penalty", value) for value in (2.5, -2.1, True, "0", NAN)),
    ("presence_penalty", 3),
    *(("repetition_penalty", value) for value in (0, -1, 1e9, "1")),
    *(
        ("logit_bias", value)
        for value in ({"a": 1}, {"-1": 1}, {"\u0665": 1}, {"999999": 1}, {"9" * 400: 1}, {str(i): 1 for i in range(301)}, [], 3, {"5": 1, "05": 2})
    ),
    ("model", None),
    ("model", 3),
    ("user", 3),
]


@pytest.mark.parametrize(("path", "make"), [(CHAT, chat), (PLAIN, plain)], ids=["chat", "completions"])
def test_a_field_out_of_range_is_named(port, path, make):
    for field, value in EACH_KIND:
        refused(port, path, make(**{field: value}), field)
    refused(port, path, make(stop=["a", ""]), "stop[1]")
    refused(port, path, make(stop=["a"] * 5), "stop")
    refused(port, path, make(logit_bias={"5": 101}), "logit_bias.5")
    refused(port, path, make(stream=True, stream_options={"include_usage": 1}), "stream_options.include_usage")
    for field in ("stop", "stream_options", "n", "seed", "top_p", "max_tokens", "temperature", "stream", "user"):
        assert call(port, path, {**make(), "max_tokens": 4, field: None} if field != "max_tokens" else {**make(n=1), "max_tokens": 2})[0] == 200


def test_what_is_not_served_is_refused(port):
    for field, value in {
        "logprobs": True, "top_logprobs": 2, "tools": [{"type": "function"}], "tool_choice": "required", "response_format": {"type": "json_object"},
        "audio": {}, "modalities": ["audio"], "functions": [{}], "prediction": {}, "store": True, "reasoning_effort": "high",
    }.items():  # fmt: skip
        refused(port, CHAT, chat(**{field: value}), field)
    for field, value in {"logprobs": 0, "echo": True, "best_of": 2, "suffix": "b"}.items():
        refused(port, PLAIN, plain(**{field: value}), field)
    error, _ = refused(port, CHAT, chat(surprise=1), None)
    assert "'surprise'" in error["message"]
    neutral = {"logprobs": False, "frequency_penalty": 0, "presence_penalty": 0.0, "tools": [], "response_format": {"type": "text"}, "logit_bias": {}}
    assert call(port, CHAT, chat(**neutral))[0] == 200
    assert call(port, PLAIN, plain(echo=False, best_of=1, suffix=None, logprobs=None))[0] == 200


MESSAGES = [
    (None, "messages"), ("hello", "messages"), ({}, "messages"), (3, "messages"), ([], "messages"), ([None], "messages[0]"), (["a"], "messages[0]"),
    ([[]], "messages[0]"), ([{}], "messages[0].role"), ([{"role": "user"}], "messages[0].content"), ([{"content": "a"}], "messages[0].role"),
    ([{"role": "king", "content": "a"}], "messages[0].role"), ([{"role": None, "content": "a"}], "messages[0].role"),
    ([{"role": "tool", "content": "a", "tool_call_id": "b"}], "messages[0].role"), ([{"role": ["user"], "content": "a"}], "messages[0].role"),
    ([{"role": "user", "content": None}], "messages[0].content"), ([{"role": "user", "content": 3}], "messages[0].content"),
    ([{"role": "user", "content": {}}], "messages[0].content"), ([{"role": "user", "content": []}], "messages[0].content"),
    ([{"role": "user", "content": ["a"]}], "messages[0].content[0]"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}], "messages[0].content[0].type"),
    ([*HELLO, {"role": "assistant", "content": "a", "tool_calls": [{}]}], "messages[1].tool_calls"),
    ([{"role": "user", "content": "a", "other": 1}], "messages[0]"), ([{"role": "user", "content": ""}], "messages"),
]  # fmt: skip


PROMPTS = [
    (None, "prompt"), (3, "prompt"), ({}, "prompt"), ([], "prompt"), ("", "prompt"), ([[]], "prompt[0]"), ([True], "prompt[0]"), ([-1], "prompt[0]"),
    ([10**30], "prompt"), ([5000], "prompt"), (["a", 3], "prompt[1]"), ([3, "a"], "prompt[1]"), ([1.5], "prompt[0]"), (["a"] * 17, "prompt"),
    ([""], "prompt"), ([["a"]], "prompt[0][0]"),
]  # fmt: skip


def test_messages_and_prompts_of_another_shape_are_refused(port):
    for messages, param in MESSAGES:
        refused(port, CHAT, chat(messages=messages), param)
    refused(port, CHAT, {"model": "tiny"}, "messages")
    refused(port, PLAIN, {"model": "tiny"}, "prompt")
    refused(port, CHAT, {"messages": HELLO}, "model")
    for prompt, param in PROMPTS:
        refused(port, PLAIN, plain(prompt=prompt), param)
    error, _ = refused(port, PLAIN, plain(prompt=["a"] * 9, n=2), "prompt")
    assert "16" in error["message"]


@pytest.mark.parametrize(
    "twice", ['"max_tokens": 2, "max_tokens": 2', '"logit_bias": {"5": 1, "5": 2}', '"": 1, "": 1', '"stop": "a", "sto\\u0070": "b"']
)
def test_a_name_that_stands_twice_is_refused(port, twice):
    error, _ = refused(port, PLAIN, f'{{"model": "tiny", "prompt": "a", {twice}}}'.encode(), None)
    assert "once" in error["message"] or "does not know: ''" in error["message"]


@pytest.mark.parametrize("text", ['"user": "\\ud800"', '"user": "\\uDFFF\\ud800"'])
def test_half_a_character_is_refused(port, text):
    error, _ = refused(port, PLAIN, f'{{"model": "tiny", "prompt": "a", {text}}}'.encode(), None)
    assert "should be JSON in UTF-8" in error["message"]


def test_two_limits_of_an_answer_are_one(port):
    """max_tokens was ignored beside its new name."""
    refused(port, CHAT, chat(max_tokens=2, max_completion_tokens=3), "max_tokens")
    assert call(port, CHAT, chat(max_tokens=2, max_completion_tokens=2))[0] == 200


def test_bodies_that_are_no_json_are_refused(port):
    deep = b'{"model": "tiny", "messages": ' + b"[" * 20_000 + b"]" * 20_000 + b"}"
    for body in (b"", b"{", b"null", b"[]", b"3", b'"a"', b"\xff\xfe", b'{"model": "\xff"}', b'{"model": "\\ud800"}', b'{"\\ud800": 1}', deep, b"NaN",
                 b'{"max_tokens": ' + b"9" * 5000 + b"}", b"{" * 30_000):  # fmt: skip
        found, answer, _ = call(port, CHAT, body, method="POST")
        assert found == 400, (body[:50], answer)
        assert set(answer["error"]) == {"message", "type", "param", "code"}
    many = json.dumps({f"a{i}": 0 for i in range(5000)}).encode()
    before = resident_bytes()
    assert call(port, CHAT, many)[0] == 400
    assert call(port, CHAT, chat(messages=[3] * 10_000))[0] == 400
    assert resident_bytes() - before < 50e6
    refused(port, CHAT, json.dumps(chat()).encode(), None, 415, headers={"content-type": "text/plain"})
