"""A server of a tiny model, and requests to it over plain HTTP."""

import http.client
import json
import os
import time
from contextlib import contextmanager
from typing import Any

import torch
from tiny_models import tiny_model

from tilewright.models import Loaded
from tilewright.models.serve import serving
from tilewright.testing.tiny_chat import tokenizer

LIMIT = 2**16  # bytes of a body
PAGES = 2
CONTEXT = PAGES * 256
CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]
JSON = {"content-type": "application/json"}


def call(port: int, path: str, body: Any = None, *, headers: dict[str, str] = JSON, method: str | None = None) -> tuple[int, Any, dict[str, str]]:
    """Status, JSON and headers of an answer. body: bytes as they are, anything else as JSON."""
    connection = http.client.HTTPConnection("localhost", port, timeout=60)
    try:
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method or ("GET" if data is None else "POST"), path, data, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read() or b"null"), {name.lower(): value for name, value in answer.getheaders()}
    finally:
        connection.close()


def resident_bytes() -> int:
    """Memory of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def chat(**fields):
    return {"model": "tiny", "messages": HELLO, "max_tokens": 4, "temperature": 0, **fields}


def plain(**fields):
    return {"model": "tiny", "prompt": "hello", "max_tokens": 4, "temperature": 0, **fields}


@contextmanager
def server(dtype=torch.float32, **options):
    loaded = Loaded(tiny_model({"model_type": "llama", "num_hidden_layers": 1}, dtype), tokenizer(), "some/folder/tiny")
    with serving(loaded, **{"port": 0, "max_batch_tokens": 64, "cache_pages": PAGES, "max_body_bytes": LIMIT, **options}) as running:
        yield running


def wait_until(condition, seconds=20.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.01)


def refused(port, path, body, param, status=400, **more):
    found, answer, headers = call(port, path, body, **more)
    assert found == status, (body if not isinstance(body, bytes) else body[:80], answer)
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert param is None or param.partition("[")[0].partition(".")[0] in error["message"], error
    assert len(error["message"]) < 500
    return error, headers
