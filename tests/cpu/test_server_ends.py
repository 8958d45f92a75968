"""How a server ends: a worker that dies, signals; the load test."""

import http.client
import importlib.util
import json
import os
import queue
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_models import tiny_model
from tiny_server import CHAT, JSON, PAGES, call, chat, wait_until

from tilewright.models import Loaded, load
from tilewright.models.serve import serve_command
from tilewright.testing.tiny_chat import tokenizer

for needed in ("openai", "starlette", "uvicorn"):
    pytest.importorskip(needed, reason="pip install 'tilewright[serve]'")


# The second ends the thread without a word of transformers.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("broken", [RuntimeError("planted"), SystemExit("planted")], ids=["exception", "exit"])
def test_a_worker_that_dies_leaves_errors_and_ends_the_process(broken, capsys, monkeypatch):
    monkeypatch.setattr("tilewright.models.server.worker.usable", lambda device: False)  # a GPU that is lost
    loaded = Loaded(tiny_model({"model_type": "llama", "num_hidden_layers": 1}), tokenizer(), "tiny")
    found, given = {}, {}

    def clients():
        wait_until(lambda: "port" in found)
        port = found["port"]
        users = [threading.Thread(target=ask, args=(port, stream)) for stream in (False, True)]
        for user in users:
            user.start()
        wait_until(lambda: len(found["running"].worker._jobs) == 2)
        found["running"].worker._manager.batch_processor._generation_step = fail
        for user in users:
            user.join()

    def fail(*_):
        raise broken

    def ask(port, stream):
        with closing(http.client.HTTPConnection("localhost", port, timeout=30)) as connection:
            connection.request("POST", CHAT, json.dumps(chat(max_tokens=400, stream=stream)), JSON)
            answer = connection.getresponse()
            given[stream] = answer.status, answer.read().decode()

    asking = threading.Thread(target=clients)
    asking.start()
    with told_address(found):
        code = serve_command(loaded, port=0, cache_pages=PAGES)
    asking.join()
    assert code == 1
    assert "error: the worker ended" in capsys.readouterr().err
    assert given[False][0] == 500
    assert json.loads(given[False][1])["error"]["code"] == "worker_failed"
    assert "planted" not in given[False][1]
    assert given[True][0] == 200
    assert '"error"' in given[True][1].splitlines()[-2]
    assert "[DONE]" not in given[True][1]


@contextmanager
def told_address(found):
    """Lets another thread find the server that `serve_command` makes."""
    import tilewright.models.serve as module

    say = module._say

    def tell(loaded, running, *rest):
        say(loaded, running, *rest)
        found.update(running=running, port=running.address[1])

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "_say", tell)
        yield


@pytest.mark.parametrize(("drain", "tokens"), [(30.0, 40), (0.1, 490)], ids=["finishes", "ends with an error"])
def test_a_signal_drains_the_server(drain, tokens, capsys, monkeypatch):
    monkeypatch.setattr("tilewright.models.serve.QUIET_SECONDS", 2.0 if drain > 1 else 0.1)
    loaded = Loaded(tiny_model({"model_type": "llama", "num_hidden_layers": 1}), tokenizer(), "tiny")
    found, given = {}, {}

    def ask(name, port):
        given[name] = call(port, CHAT, chat(max_tokens=tokens))

    def clients():
        wait_until(lambda: "port" in found)
        first = threading.Thread(target=ask, args=("first", found["port"]))
        first.start()
        wait_until(lambda: found["running"].worker.open == 1)
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: found["running"].worker._refusal is not None)
        if drain > 1:
            ask("late", found["port"])
        first.join()
        if drain > 1:
            time.sleep(0.5)
            ask("last", found["port"])  # it was under way when nothing else was left

    asking = threading.Thread(target=clients)
    asking.start()
    handler = signal.getsignal(signal.SIGTERM)
    begin = time.monotonic()
    with told_address(found):
        assert serve_command(loaded, port=0, cache_pages=PAGES, drain_seconds=drain) == 0
    asking.join()
    assert signal.getsignal(signal.SIGTERM) is handler
    assert time.monotonic() - begin < 30
    if drain > 1:
        assert given["first"][0] == 200
        assert given["first"][1]["usage"]["completion_tokens"] == tokens
        for name in ("late", "last"):
            assert given[name][0] == 503
            assert given[name][1]["error"]["code"] == "stopping"
    else:
        assert given["first"][0] == 503
        assert "stopping" in given["first"][1]["error"]["message"]


def test_signals_are_heeded_from_the_first_answer_to_the_end(monkeypatch):
    """One as soon as /health answered, or a second one while the server closed, killed it."""
    import tilewright.models.serve as module
    from tilewright.models.server.worker import Worker

    loaded = Loaded(tiny_model({"model_type": "llama", "num_hidden_layers": 1}), tokenizer(), "tiny")
    heeded, run, stop = {}, module._run, Worker.stop

    def note(when, do, *given):
        heeded[when] = [signal.getsignal(number) is not handlers[number] for number in handlers]
        do(*given)

    def say(*_):
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(module, "_run", lambda *given: note("begins", run, *given))
    monkeypatch.setattr(Worker, "stop", lambda worker: note("ends", stop, worker))
    monkeypatch.setattr(module, "_say", say)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    assert serve_command(loaded, port=0, cache_pages=PAGES) == 0
    assert heeded == {"begins": [True, True], "ends": [True, True]}
    assert all(signal.getsignal(number) is handler for number, handler in handlers.items())


@pytest.fixture(scope="module")
def tool():
    """benchmarks/serving_load.py"""
    path = Path(__file__).parents[2] / "benchmarks" / "serving_load.py"
    spec = importlib.util.spec_from_file_location("serving_load", path)
    made = sys.modules["serving_load"] = importlib.util.module_from_spec(spec)  # where its dataclasses look
    spec.loader.exec_module(made)
    yield made
    del sys.modules["serving_load"]


class Here:
    """This process where the tool expects that of a server."""

    pid = os.getpid()

    def __init__(self):
        self.code = queue.Queue()

    def poll(self):
        return None

    def send_signal(self, number):
        os.kill(self.pid, number)

    def wait(self, seconds=0.0):
        return self.code.get(timeout=seconds) if seconds else None

    def kill(self):
        pass


def test_users_at_once_get_what_each_would_get_alone(tool, tmp_path, capfd):
    """benchmarks/serving_load.py, small, with a server in this process: it spares the imports."""
    here, folders, found, codes = Here(), queue.Queue(), {}, []

    def start(model, options, given):
        folders.put((model, given.drain_seconds))
        wait_until(lambda: "port" in found)
        return here, f"http://localhost:{found['port']}/v1", "tiny"

    sizes = ["--users", "5", "--prompt-chars", "30", "--max-new-tokens", "6", "--seconds", "2", "--cancel", "0.5", "--oversized", "0.5"]
    rows = tmp_path / "rows.jsonl"
    asking = threading.Thread(target=lambda: codes.append(tool.main(["tiny", *sizes, "--json", str(rows)], start)))
    asking.start()
    folder, drain = folders.get()
    with told_address(found):
        here.code.put(serve_command(load(folder), port=0, cache_pages=3, max_requests=4, drain_seconds=drain))  # some wait, some get 429
    asking.join()
    assert codes == [0], capfd.readouterr().err
    (row,) = map(json.loads, rows.read_text().splitlines())
    assert row["exit_code"] == row["wrong"] == row["lost"] == 0
    assert row["told"]["refused, too long"] > 0
    assert row["whole_p99_s"] >= row["whole_p50_s"] > 0


def test_the_load_tool_notices_what_is_wrong(tool):
    given = type("G", (), {"cancel": 0.5, "oversized": 0.0})
    good = tool.Seen(told=Counter(answered=3, left=1), memory=[100_000_000] * 8)
    assert tool.check(good, 0, 1.0, given) == []
    for change, word in (({"wrong": ["user 1"]}, "user 1"), ({"lost": ["user 2"]}, "user 2"), ({"memory": [10**8] * 4 + [10**9] * 4}, "memory grew"),
                         ({"told": Counter(answered=1)}, "too little")):  # fmt: skip
        assert word in tool.check(replace(good, **change), 0, 1.0, given)[0]
    assert "code 1" in tool.check(good, 1, 1.0, given)[0]
    assert "no code" in tool.check(good, None, 60.0, given)[0]
    everyone = [tool.User(0, "", 4, alone="abcd"), tool.User(1, "", 4, alone="abxy")]
    assert not tool.same("abcx", everyone[0], everyone, exact=True)
    assert tool.same("abcx", everyone[0], everyone, exact=False)
    assert not tool.same("abxy", everyone[0], everyone, exact=False)
    load = tool.Load("http://localhost:1/v1", "tiny", everyone, given)
    load.failed(everyone[0], EOFError("cut"), 0.0)
    assert load.seen.lost
