"""A server whose cache is full."""

import http.client
import json
from contextlib import closing

import pytest
from tiny_server import CHAT, JSON, call, chat, server, wait_until

for needed in ("starlette", "uvicorn"):
    pytest.importorskip(needed, reason="pip install 'tilewright[serve]'")


def test_who_waits_for_pages_is_not_lost_when_the_one_that_runs_leaves():
    """A full cache had put one of two back, and nobody was let in any more."""
    with server() as running:
        _one_runs_and_one_waits(running, running.address[1])


def _one_runs_and_one_waits(running, port):
    scheduler, whole = running.worker._manager.batch_processor.scheduler, [chat(messages=[{"role": "user", "content": end * 240}]) for end in "bc"]
    right, clients = [call(port, CHAT, one | {"max_tokens": 100})[1]["choices"] for one in whole], {}
    for body in whole:
        before = set(running.worker._jobs)
        client = http.client.HTTPConnection("localhost", port, timeout=20)
        client.request("POST", CHAT, json.dumps(body | {"max_tokens": 100}), JSON)
        wait_until(lambda before=before: set(running.worker._jobs) - before)
        clients[(set(running.worker._jobs) - before).pop()] = client
    wait_until(lambda: scheduler.block_new_requests)
    (runs,), (waits,) = scheduler.active_requests, scheduler.waiting_requests
    clients[runs].close()
    with closing(clients[waits]) as client:
        answer = json.loads(client.getresponse().read())
    assert answer["choices"] == right[list(clients).index(waits)]
    assert answer["usage"]["completion_tokens"] == 100
