"""A pretended GPU on this CPU: torch.cuda answers, kernels are interpreted, graphs replay nothing,
times are made up.
"""

import contextlib
import time
import types

import pytest
import torch
import torch._inductor.config  # as `poisoned_empty` makes torch do: it may not find the functions below in place of its own

from tilewright.launch import Device

REAL = torch.device


class _AsReal(type):
    def __instancecheck__(cls, value):
        return isinstance(value, REAL)


class _Device(metaclass=_AsReal):
    """A stand-in for the C type torch.device: every device except meta is this CPU."""

    def __new__(cls, kind, index=None):
        return REAL("meta" if str(kind) == "meta" else "cpu")


class Graph:
    def replay(self):
        pass


class Event:
    def __init__(self, enable_timing=False):
        self.at = 0.0

    def record(self):
        self.at = time.perf_counter()

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


class Stream:
    def wait_stream(self, other):
        pass


def _nothing(*unused, **also):
    return None


@contextlib.contextmanager
def _context(*unused, **also):
    yield


@pytest.fixture
def pretend_gpu(monkeypatch, tmp_path):
    """An H200, as far as commands can tell."""
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torch, "device", _Device)
    monkeypatch.setattr(Device, "of", staticmethod(lambda tensor: Device.named("H200")))
    fakes = {
        "is_available": lambda: True, "current_device": lambda: 0, "device_count": lambda: 1, "get_device_name": lambda *unused: "NVIDIA H200",
        "get_device_properties": lambda *unused: types.SimpleNamespace(uuid="pretend"), "set_device": _nothing,
        "synchronize": _nothing, "empty_cache": _nothing, "current_stream": Stream, "Stream": Stream, "stream": _context,
        "CUDAGraph": Graph, "graph_pool_handle": _nothing, "graph": _context, "Event": Event,
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return Device.named("H200")
