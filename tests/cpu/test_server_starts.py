"""How a server starts: the memory of its cache, options out of range, what it says."""

import logging
import socket
import time

import pytest
import torch
from architectures import ARCHITECTURES
from tiny_models import tiny_model
from tiny_server import CHAT, call, chat, server

from tilewright.models import Loaded
from tilewright.models.serve import _say, serving
from tilewright.models.server import unsaid
from tilewright.testing.tiny_chat import tokenizer

for needed in ("openai", "starlette", "uvicorn"):
    pytest.importorskip(needed, reason="pip install 'tilewright[serve]'")


def test_memory_is_bounded_on_a_cpu(monkeypatch):
    from tilewright.models.server import room

    model = tiny_model({"model_type": "llama", "num_hidden_layers": 1})
    page = 2 * 2 * 16 * 256 * 4  # keys and values, heads, head_dim, tokens, bytes
    monkeypatch.setattr(room, "available_memory", lambda: 10 * page * 10)
    assert room.pages_on_cpu(model, 256) == 10
    assert room.pages_on_cpu(model, 3) == 6  # three requests of 512 tokens
    monkeypatch.setattr(room, "available_memory", lambda: 9 * page)
    with pytest.raises(ValueError, match="memory for the cache must be at least one page of 256 tokens"):
        room.pages_on_cpu(model, 3)
    monkeypatch.setattr(room, "available_memory", lambda: 10 * page * 3)
    with server(cache_pages=None) as running:
        assert running.worker.longest == min(3 * 256, 512)
        assert 3 * page <= running.worker.cache_bytes <= 5 * page  # transformers adds two for rows that only pad
        assert "10%" in running.worker.share
    monkeypatch.undo()
    assert 0 < room.available_memory() < 2**50


def test_a_server_of_codes_takes_their_pages_and_answers(monkeypatch, capsys):
    """As `tilewright serve --kv-dtype fp8`: as many pages as fit."""
    from tilewright.models.server import room

    page = 2 * 2 * (16 + 4) * 256  # keys and values, heads, head_dim and scale, tokens
    monkeypatch.setattr(room, "available_memory", lambda: 10 * page * 3)
    with server(torch.bfloat16, cache_pages=None, kv_dtype="fp8") as running:
        assert 3 * page <= running.worker.cache_bytes <= 5 * page
        assert call(running.address[1], CHAT, chat(max_tokens=2))[0] == 200
        _say(Loaded(None, None, "tiny"), running, None, "fp8")
    assert "cache: 3 pages of 256 tokens in fp8, 0.000102 GB" in capsys.readouterr().out  # with the two of transformers


def test_a_transformers_that_is_too_old_is_named(monkeypatch):
    monkeypatch.setattr("tilewright.models.serve.version", lambda package: {"transformers": "5.17.0"}[package])
    with pytest.raises(ImportError, match=r"a server needs transformers 5\.23 or newer, got 5\.17\.0: pip install"), server():
        pass


def test_a_cache_that_does_not_fit_is_an_error_at_the_start(caplog):
    with pytest.raises(ValueError, match="the cache must be one that fits the memory"), server(cache_pages=10**12):
        pass
    assert not caplog.records  # transformers logged a traceback


@pytest.mark.parametrize(("host", "why"), [("127.0.0.1", "address already in use"), ("nowhere.invalid", r"\[Errno -\d\]")])
def test_where_nobody_can_listen_is_one_line(host, why, capfd, monkeypatch):
    """uvicorn printed a second one, and a name that is none was one that is not free. On a busy
    machine it had said why before anybody listened.
    """
    keep = unsaid.unsaid
    monkeypatch.setattr(unsaid, "unsaid", lambda name: time.sleep(0.2) or keep(name))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"free port, or port 0, got {host}:{port}: .*{why}"), server(host=host, port=port):
            pass
    assert "ERROR" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("doge", "tensor a"),  # its mask is made of the values of all keys, and it sees its step's
        ("stablelm", "cache must be transformers' paged cache"),  # its layers do not pass on where the pages are
        ("gpt2", "shape"),  # its config has a head_dim, and its layers have another
    ],
)
def test_a_model_whose_steps_fail_is_refused_at_the_start(family, why, caplog):
    """Every request got 500."""
    loaded = Loaded(tiny_model({"model_type": family, **ARCHITECTURES[family]}), tokenizer(), "tiny")
    caplog.set_level(logging.ERROR, "tilewright")
    with pytest.raises(ValueError, match=f"continuous batching runs, got {family}, of which a step fails: .*{why}"), serving(loaded, port=0):
        pass
    assert not caplog.records  # the error says it, in one line


def test_a_server_for_all_without_a_key_warns(capsys):
    import tilewright.models.serve as module

    for host, key, warns in (("0.0.0.0", None, True), ("::", None, True), ("0.0.0.0", "k", False), ("127.0.0.1", None, False), ("::1", None, False)):
        running = type("R", (), {"worker": type("W", (), {"pages": 2, "cache_bytes": 1e6, "longest": 512, "share": "x"}), "address": (host, 1)})
        module._say(Loaded(None, None, "tiny"), running, key)
        said = capsys.readouterr()
        assert ("WARNING" in said.err) == warns
        assert "cache: 2 pages of 256 tokens, 0.001 GB" in said.out


@pytest.mark.parametrize(
    "option",
    [
        {"api_key": ""},
        {"api_key": "k\n"},  # as a file ends: no client could send it
        {"api_key": "k\ney"},
        {"api_key": "k\udcff"},  # a byte that is no UTF-8, which failed once the model was loaded
        {"max_requests": 0},
        {"max_body_bytes": -1},
        {"cache_pages": 0},
        {"max_batch_tokens": 0},
        {"host": ""},  # listened on all addresses
        {"port": -1},
        {"port": 99999},  # listened on 34463
    ],
)
def test_an_option_out_of_range_is_named(option):
    with pytest.raises(ValueError, match=next(iter(option))), serving(Loaded(None, tokenizer(), "tiny"), **option):
        pass
