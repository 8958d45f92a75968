"""A tuner's workbench with made-up times, and rows for its store."""

import functools
import os
import time
import zlib
from contextlib import contextmanager

import pytest
import torch
from rich.console import Console

from tilewright.bench.timer import Timing
from tilewright.launch import Device, decision_of, forget_plans, table
from tilewright.launch.table import Row, digest_of, plain
from tilewright.ops import rms_norm
from tilewright.testing import Accuracy
from tilewright.tune import fit

H200 = Device.named("H200")
PROBLEM = rms_norm.Problem(16, 4096, torch.bfloat16)
SPACE = rms_norm.space(PROBLEM, H200)
COMPILER = table.compiler()
stored_times = functools.cache(fit.stored_times)  # that ship, which nothing writes to


class MadeUp:
    """A Workbench with `times` by position in the space, 10 us and more for the others.

    It records requests.
    """

    device = H200
    compiler = COMPILER

    def __init__(self, times=None, dropped=(), wrong=(), fails=(), delay_s=0.0, ends_with=None):
        self.ends_with, self.ended = ends_with, False
        self.times, self.dropped, self.wrong, self.fails, self.delay_s = times or {}, dropped, wrong, fails, delay_s
        self.prepared, self.roughly, self.raced, self.checked = [], [], [], []

    def prepare(self, op, problem, configs):
        self.prepared.append(problem)

    def ready(self, op, problem, configs):
        self.space = list(configs)
        for i in reversed(range(len(configs))):
            yield i, "spills" if i in self.dropped else ""

    @contextmanager
    def clock(self, op, problem):
        time.sleep(self.delay_s)
        yield self

    def us(self, config):
        i = self.space.index(config)
        return self.times.get(i, 10.0 + zlib.crc32(str(config).encode()) % 1000 / 100)

    def rough(self, config, give_up_us):
        self.roughly.append(self.space.index(config))
        self.ended = self.ended or self.space.index(config) == self.ends_with
        if self.ended:
            raise RuntimeError("CUDA error: misaligned address\nSearch for it")
        if self.space.index(config) in self.fails:
            raise RuntimeError("cluster misconfiguration\nmore")
        return self.us(config)

    def race(self, configs):
        self.raced.append([self.space.index(c) for c in configs])
        return [Timing(self.us(c), 0.1) for c in configs]

    def many(self, configs):
        return ["RuntimeError: no" if self.space.index(c) in self.fails else Timing(self.us(c), 0.1) for c in configs]

    def done(self, op, problem):
        return True

    def spill_bytes(self, op, problem, config):
        return 8 if self.space.index(config) == 3 else 0

    def check(self, op, problem, config):
        self.checked.append(self.space.index(config))
        if self.space.index(config) in self.wrong:
            raise AssertionError("worst element is off")
        return [Accuracy(0.5, 0.25, (), 0.0, 0.0)]

    def alive(self):
        return not self.ended


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(table, "SHIPPED", tmp_path / "shipped")
    forget_plans()
    yield
    forget_plans()


def quiet() -> Console:
    return Console(file=open(os.devnull, "w"), width=200)


def row_for(problem, config, of=rms_norm, **changes) -> Row:
    """A row of op `of`."""
    decision = decision_of(of)
    fields = {
        "op": decision.op, "digest": digest_of(decision, problem, config, H200), "problem": plain(problem), "arch": "sm_90", "gpu": "H200",
        "compiler": COMPILER, "config": plain(config), "time_us": 1.0, "spread_us": 0.1,
    }  # fmt: skip
    return Row(**(fields | changes))
