"""The server as an adversary meets it: too many requests, too long, leaving early."""

import asyncio
import http.client
import json
import select
import socket
import struct
import threading
import time
from contextlib import closing, nullcontext, suppress

import pytest
from tiny_models import tiny_model
from tiny_server import CHAT, CONTEXT, JSON, LIMIT, PLAIN, call, chat, plain, refused, resident_bytes, server, wait_until

from tilewright.engine import Engine, Sampling as EngineSampling
from tilewright.models import chat_template
from tilewright.testing.tiny_chat import tokenizer

for needed in ("openai", "starlette", "uvicorn"):
    pytest.importorskip(needed, reason="pip install 'tilewright[serve]'")

import uvicorn  # noqa: E402
from starlette.datastructures import Headers  # noqa: E402
from uvicorn.server import ServerState  # noqa: E402

from tilewright.models.server.connection import Connection  # noqa: E402
from tilewright.models.server.gate import Gate  # noqa: E402
from tilewright.models.server.protocol import Refusal  # noqa: E402


@pytest.fixture(scope="module")
def running():
    with server() as found:
        yield found


SESAME = {**JSON, "authorization": "Bearer sesame"}


@pytest.fixture(scope="module")
def guarded():
    with server(api_key="sesame", max_requests=2, prefix_reuse=False) as found:
        yield found


@pytest.fixture
def port(running):
    yield running.address[1]
    wait_until(lambda: running.worker.open == 0)
    status, answer, _ = call(running.address[1], CHAT, chat())
    assert status == 200, answer  # whatever the test did, the next request is answered


def pages_in_use(running):
    cache = running.worker._manager.batch_processor.cache
    cache.evict_cached_blocks()
    cache.pool.try_to_free_sectors()
    return cache.num_sectors - cache.pool.num_free_sectors


def test_a_prompt_longer_than_the_cache_is_refused_and_the_worker_lives(port):
    error, _ = refused(port, CHAT, chat(messages=[{"role": "user", "content": "a" * (CONTEXT + 1)}]), "messages")
    assert error["code"] == "context_length_exceeded"
    assert str(CONTEXT) in error["message"]
    refused(port, PLAIN, plain(prompt="a" * 20_000), "prompt")
    refused(port, CHAT, chat(messages=[{"role": "user", "content": "a" * CONTEXT}]), "messages")  # no room for an answer
    refused(port, CHAT, chat(messages=[{"role": "user", "content": "a" * (CONTEXT - 3)}]), "max_tokens")
    full = chat(messages=[{"role": "user", "content": "a" * (CONTEXT - 4)}])
    usage = call(port, CHAT, full)[1]["usage"]
    assert {name: usage[f"{name}_tokens"] for name in ("prompt", "completion", "total")} == {"prompt": CONTEXT - 4, "completion": 4, "total": CONTEXT}


@pytest.mark.parametrize("held", ["template", "threads"])
def test_nobody_waits_until_long_messages_are_read(port, held, monkeypatch):
    """They take seconds, and an adversary sends as many as it likes."""
    monkeypatch.setattr("tilewright.models.server.app.LONG_BODY", 1 << 12)
    long, free = chat(messages=[{"role": "user", "content": "a" * 5000}]), threading.Event()
    if held == "threads":
        words = type(tokenizer())
        stock = words.__call__
        monkeypatch.setattr(words, "__call__", lambda self, text, **how: (len(text) < 5000 or free.wait(30)) and stock(self, text, **how))
    answers: list[int] = []
    others = [threading.Thread(target=lambda: answers.append(call(port, CHAT, long)[0])) for _ in range(3)]
    with chat_template._renderers[True]._lock if held == "template" else nullcontext():
        for other in others:
            other.start()
        time.sleep(0.1)
        assert (call(port, CHAT, chat())[0], call(port, PLAIN, plain())[0], answers) == (200, 200, [])
    free.set()
    for other in others:
        other.join()
    assert answers == [400] * 3  # longer than the cache


@pytest.mark.parametrize("place", ["prepare_next_batch", "_generation_step", "update_batch"])
def test_a_step_that_raises_ends_its_requests_and_the_server_goes_on(running, port, place, monkeypatch, caplog):
    """It ended the process. Running ones, one that waits, one in a stream, one with penalties."""
    shared = "a" * 300  # a whole page of it is in the cache
    asked = [chat(max_tokens=4, messages=[{"role": "user", "content": shared + end}]) for end in "bc"]
    right = [call(port, CHAT, one)[1]["choices"][0]["message"]["content"] for one in asked]
    processor, before = running.worker._manager.batch_processor, call(port, "/health")[1]["failed_steps"]
    stock, steps = getattr(processor, place), []

    def fails_later(*given):
        steps.append(len(running.worker._jobs))
        if steps[-1] == 4 and len(steps) > 8:
            monkeypatch.undo()
            raise RuntimeError("planted")
        return stock(*given)

    monkeypatch.setattr(processor, place, fails_later)
    found = []

    def ask(**how):
        with closing(http.client.HTTPConnection("localhost", port, timeout=60)) as connection:
            connection.request("POST", CHAT, json.dumps(chat(max_tokens=90, **how)), JSON)
            answer = connection.getresponse()
            found.append((answer.status, answer.read().decode()))

    users = [threading.Thread(target=ask, kwargs=how) for how in ({}, {"stream": True}, {"frequency_penalty": 1.0}, {"n": 1})]
    for user in users:
        user.start()
    for user in users:
        user.join()
    assert sorted(status for status, _ in found) == [200, 500, 500, 500]
    assert all("a step of the model failed: the server's log says why" in text and "planted" not in text for _, text in found)
    assert "planted" in caplog.text
    assert call(port, "/health")[1] | {"failed_steps": before + 1, "requests": 0} == call(port, "/health")[1]
    assert running.worker._tickets == {}
    assert [call(port, CHAT, one)[1]["choices"][0]["message"]["content"] for one in asked] == right
    assert pages_in_use(running) == 0


def test_a_chat_template_that_takes_too_much_is_refused_and_others_are_answered(running, port, monkeypatch):
    answers = running.server.config.app.app.routes[3].endpoint.__self__
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    hostile = "{% if messages[0].content == 'size' %}{{ 'a' * 10**10 }}{% elif messages[0].content == 'time' %}" + loops + "{% endif %}"
    monkeypatch.setattr(answers.tokenizer, "chat_template", hostile + answers.tokenizer.chat_template)
    monkeypatch.setattr("tilewright.models.chat_template.SECONDS", 1)
    slow = threading.Thread(target=refused, args=(port, CHAT, chat(messages=[{"role": "user", "content": "time"}]), "messages"))
    slow.start()
    assert call(port, PLAIN, plain())[0] == 200
    assert slow.is_alive()
    error, _ = refused(port, CHAT, chat(messages=[{"role": "user", "content": "size"}]), "messages")
    assert error["message"] == "messages cannot be turned into tokens: a chat template that takes more than 512 MiB"
    slow.join()


def test_another_model_or_path_is_not_found(port):
    for name in ("another", "Tiny", "", "some/folder", "\u00e9" * 1000):
        error, _ = refused(port, CHAT, chat(model=name), "model", 404)
        assert error["code"] == "model_not_found"
    assert [row["id"] for row in call(port, "/v1/models")[1]["data"]] == ["tiny"]
    assert call(port, "/v1/models/tiny")[1]["id"] == "tiny"
    assert call(port, CHAT, chat(model="some/folder/tiny"))[1]["model"] == "some/folder/tiny"  # as the command named it
    paths = {"/v1/models/another": 404, "/": 404, "/reset": 404, "/load_model": 404, CHAT: 405, "/docs": 404, "/health/": 404, f"{CHAT}/": 404}
    for path, status in paths.items():  # the last two were sent to where the Host of the request says
        found, answer, _ = call(port, path)
        assert found == status, path
        assert "error" in answer


def test_a_long_body_is_refused_before_it_is_kept(port):
    call(port, CHAT, chat())  # the worker has begun, which takes memory too
    before = resident_bytes()
    big = b'{"model": "' + b"a" * 60_000_000 + b'"}'
    for headers in 2 * (JSON, {**JSON, "transfer-encoding": "chunked"}):
        connection = http.client.HTTPConnection("localhost", port, timeout=60)
        chunks = (big[i : i + 2**20] for i in range(0, len(big), 2**20))
        connection.request("POST", CHAT, big if headers is JSON else chunks, headers, encode_chunked=headers is not JSON)
        answer = connection.getresponse()
        assert answer.status == 413
        assert str(LIMIT) in json.loads(answer.read())["error"]["message"]
        connection.close()
    # `big` is here once, and four that were kept would be 240 MB; other threads make tens of MB.
    assert resident_bytes() - before < 62_000_000 + 90_000_000
    with socket.create_connection(("localhost", port), timeout=5) as raw:  # answered at its headers
        raw.sendall(b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: 999999999999\r\n\r\n" % CHAT.encode())
        assert b" 413 " in raw.recv(100)


@pytest.mark.parametrize("body", [b"5\r\nhello\r\n0\r\n\r\n", b'{"model": "tiny"}', b"0\r\n\r\nGET /health HTTP/1.1\r\nHost: a\r\n\r\n"])
def test_a_body_with_two_lengths_is_refused_at_once(port, body):
    """Another server in front may see its end elsewhere, and so another request behind it."""
    with socket.create_connection(("localhost", port), timeout=4) as raw:
        raw.sendall(b"POST %s HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(body)) + body)
        answer = raw.recv(1000)
        assert b" 400 " in answer
        assert b"connection: close" in answer
        raw.shutdown(socket.SHUT_WR)
        assert b"HTTP/1.1" not in raw.recv(1000)


def test_a_head_that_does_not_arrive_closes_its_connection(port, monkeypatch):
    monkeypatch.setattr("tilewright.models.server.connection.HEAD_SECONDS", 0.3)
    for whole in (b"", b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"):
        with socket.create_connection(("localhost", port), timeout=4) as raw:
            raw.sendall(whole)
            assert raw.recv(1000) if whole else True
            raw.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\nx: ")
            end = time.monotonic() + 4
            with suppress(ConnectionError):  # it may be closed while a byte is under way
                while raw.recv(1, socket.MSG_DONTWAIT | socket.MSG_PEEK) if select.select([raw], [], [], 0.05)[0] else True:
                    assert time.monotonic() < end
                    raw.sendall(b"y")


@pytest.mark.parametrize("size", [1 << 20, 40_000])  # beyond what asyncio lets an app write ahead, and less
def test_a_client_that_never_reads_loses_its_connection(size, monkeypatch):
    monkeypatch.setattr("tilewright.models.server.connection.READ_SECONDS", 0.2)
    ended = []

    async def app(scope, receive, send):
        try:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"connection", b"close")]})
            for _ in range(2):
                await send({"type": "http.response.body", "body": bytes(size // 2), "more_body": True})
            await send({"type": "http.response.body"})
        finally:
            ended.append(True)

    async def serve(socket_):
        config = uvicorn.Config(app, lifespan="off", log_config=None)
        config.load()
        state = ServerState()
        await asyncio.get_running_loop().connect_accepted_socket(lambda: Connection(config, state, {}), socket_)
        async with asyncio.timeout(4):
            while state.connections or state.tasks:
                await asyncio.sleep(0.02)

    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        theirs.sendall(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        asyncio.run(serve(ours))
    assert ended


def test_nothing_is_written_to_a_client_that_has_left(running, port, caplog, monkeypatch):
    """It leaves while events are written, ten for each token: asyncio would log from the sixth."""
    answers = running.server.config.app.app.routes[3].endpoint.__self__
    stock, body = answers._pieces, json.dumps(chat(max_tokens=200, stream=True)).encode()
    raw = socket.create_connection(("localhost", port), timeout=20)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its close resets the connection

    async def tenfold(*given):
        async for piece in stock(*given):
            raw.close()
            for _ in range(10):
                yield piece

    monkeypatch.setattr(answers, "_pieces", tenfold)
    raw.sendall(b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(body)) + body)
    wait_until(lambda: raw.fileno() < 0 and running.worker.open == 0)
    monkeypatch.undo()
    assert "socket.send() raised" not in caplog.text


def test_each_request_is_sampled_as_it_asks(port):
    greedy = call(port, CHAT, chat(max_tokens=8))[1]["choices"][0]["message"]["content"]
    same = [call(port, CHAT, chat(max_tokens=8, temperature=1, seed=5))[1]["choices"][0]["message"]["content"] for _ in range(2)]
    assert same[0] == same[1] != greedy
    for cut in ({"top_k": 1}, {"min_p": 1.0}):
        assert call(port, CHAT, chat(max_tokens=8, temperature=2, **cut))[1]["choices"][0]["message"]["content"] == greedy
    assert call(port, CHAT, chat(max_tokens=8, temperature=2, top_p=0))[1]["choices"][0]["message"]["content"] == greedy
    several = call(port, CHAT, chat(max_tokens=8, temperature=2, seed=5, n=3))[1]
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in several["choices"]}) == 3
    assert several["usage"]["completion_tokens"] == 24
    again = call(port, CHAT, chat(max_tokens=8, temperature=2, seed=5, n=3))[1]
    assert again["choices"] == several["choices"]


def test_penalties_and_biases_are_those_of_the_engine(port):
    """Beside each other in one step, and beside a request that has none."""
    model, words = tiny_model({"model_type": "llama", "num_hidden_layers": 1}), tokenizer()
    prompt, free = words("hello hello")["input_ids"], call(port, PLAIN, plain(prompt="hello hello", max_tokens=10))[1]["choices"][0]["text"]
    first = words(free[0])["input_ids"][-1]
    asked = [
        {"frequency_penalty": 1.5},
        {"repetition_penalty": 1.8, "presence_penalty": 2.0},
        {"logit_bias": {str(first): -100, str(prompt[0]): 3.5}},
    ]
    answers = {}

    def ask(i, fields):
        answers[i] = call(port, PLAIN, plain(prompt="hello hello", max_tokens=10, **fields))[1]["choices"][0]["text"]

    users = [threading.Thread(target=ask, args=each) for each in enumerate([*asked, {}])]
    for user in users:
        user.start()
    for user in users:
        user.join()
    with Engine(model, max_len=64) as engine:
        for i, fields in enumerate(asked):
            bias = {int(token): value for token, value in fields.get("logit_bias", {}).items()}
            tokens = engine.generate([prompt], 10, sampling=EngineSampling(temperature=0, **{**fields, "logit_bias": bias})).tokens[0]
            assert answers[i] == words.decode(tokens) != free
    assert answers[3] == free


def test_a_prompt_that_begins_alike_is_not_read_again(running, guarded, port):
    long = [7 + i % 40 for i in range(300)]
    whole, again = (call(port, PLAIN, plain(prompt=[*long, 9], max_tokens=3))[1] for _ in range(2))
    assert whole["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": 256}  # a page
    assert again["choices"] == whole["choices"]
    before = call(port, "/health")[1]["reused_tokens"]
    other = call(port, PLAIN, plain(prompt=[*long, 3, 5], n=2, max_tokens=3))[1]
    assert call(port, "/health")[1]["reused_tokens"] == before + 512
    for _ in range(2):
        found = call(guarded.address[1], PLAIN, plain(prompt=[*long, 3, 5], max_tokens=3), headers=SESAME)[1]
        assert found["choices"][0] == other["choices"][0]
        assert found["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def events(port, path, body):
    with closing(http.client.HTTPConnection("localhost", port, timeout=60)) as connection:
        connection.request("POST", path, json.dumps({**body, "stream": True}), JSON)
        answer = connection.getresponse()
        assert answer.status == 200
        lines = [line.removeprefix("data: ") for line in answer.read().decode().split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize(("path", "make"), [(CHAT, chat), (PLAIN, plain)], ids=["chat", "completions"])
def test_a_stream_is_the_answer_in_parts_and_stops_where_told(port, path, make):
    def text(choice):
        return choice["text"] if path == PLAIN else choice["message"]["content"] if "message" in choice else choice["delta"].get("content", "")

    whole = text(call(port, path, make(max_tokens=12))[1]["choices"][0])
    assert len(whole) == 12
    for stop in (None, whole[5:8], ["no such", whole[7]], [whole[:2]], whole[-3:] + "x"):
        body = make(max_tokens=12, n=2, stop=stop)
        answer = call(port, path, body)[1]
        cuts = [whole.find(s) for s in ([stop] if isinstance(stop, str) else stop or []) if s in whole]
        expected = whole[: min(cuts)] if cuts else whole
        assert [text(choice) for choice in answer["choices"]] == [expected] * 2
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop" if cuts else "length"}
        parts = events(port, path, {**body, "stream_options": {"include_usage": True}})
        usage = parts.pop()
        assert usage["choices"] == []
        assert usage["usage"]["total_tokens"] == usage["usage"]["prompt_tokens"] + usage["usage"]["completion_tokens"]
        for index in range(2):
            own = [choice for part in parts for choice in part["choices"] if choice["index"] == index]
            assert "".join(map(text, own)) == expected
            assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == [answer["choices"][index]["finish_reason"]]


def test_a_client_that_leaves_frees_its_slot_and_pages(running, port):
    for stream in (True, False):
        raw = socket.create_connection(("localhost", port), timeout=20)
        body = json.dumps(chat(max_tokens=CONTEXT - 20, stream=stream)).encode()
        raw.sendall(
            b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % (CHAT.encode(), len(body)) + body
        )
        wait_until(lambda: running.worker.open == 1)
        if stream:
            raw.recv(10)
        raw.close()
        wait_until(lambda: running.worker.open == 0, 2.0)
        wait_until(lambda: pages_in_use(running) == 0, 5.0)


def test_more_requests_than_the_queue_holds_are_told_to_wait(guarded):
    port = guarded.address[1]
    refused(port, CHAT, chat(n=3), "n", headers=SESAME)  # waiting would not help
    long = threading.Thread(target=call, args=(port, CHAT, chat(max_tokens=100, n=2)), kwargs={"headers": SESAME})
    long.start()
    wait_until(lambda: guarded.worker.open == 2)
    error, headers = refused(port, CHAT, chat(), None, 429, headers=SESAME)
    assert error["code"] == "queue_full"
    assert int(headers["retry-after"]) >= 1
    long.join()
    assert call(port, CHAT, chat(), headers=SESAME)[0] == 200


def test_a_key_is_asked_for(guarded):
    port = guarded.address[1]
    for key in (None, "Bearer", "Bearer ", "Bearer sesam", "Bearer sesame2", "Basic sesame", "sesame", "Bearer \u00e9"):
        given = {} if key is None else {"authorization": key}
        for path, body in ((CHAT, chat()), ("/v1/models", None), (CHAT, b"{"), ("/nothing", None)):
            error, _ = refused(port, path, body, None, 401, headers={**JSON, **given})
            assert "sesame" not in error["message"]
    assert call(port, CHAT, chat(), headers=SESAME)[0] == 200
    assert call(port, "/health")[0] == 200


@pytest.mark.parametrize("key", ["sésame à", "Å"])
def test_a_key_may_end_with_any_letter(key):
    """The last byte of these looks like a blank in latin-1, which headers are read in."""
    gate = Gate(None, api_key=key, most_bytes=1, most_inside=1)
    for blanks in ("", " ", "\t "):
        gate._check_key(Headers(raw=[(b"authorization", f"Bearer {key}{blanks}".encode())]))
    with pytest.raises(Refusal):
        gate._check_key(Headers(raw=[(b"authorization", f"Bearer {key}".encode()[:-1])]))
