"""The file of tuned rows: broken files, kills at any moment, two tuners at once."""

import dataclasses
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import made_up
import pytest
from made_up import H200, PROBLEM, SPACE, own_folder, row_for  # noqa: F401  (a fixture)

from tilewright.launch.table import read_rows
from tilewright.ops import rms_norm
from tilewright.tune.store import Store


@pytest.mark.parametrize("content", [b"{", b"", b'[{"op": 1}]', b"\xff\xfe", b'{"rows": []}'])
def test_a_corrupt_file_is_moved_aside_with_a_warning_and_a_call_only_ignores_it(content):
    path = Store().path
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.warns(UserWarning, match="must hold a JSON list"):
        assert rms_norm.DECISION.decide(PROBLEM, H200)[1] == SPACE.source
    assert path.read_bytes() == content
    with pytest.warns(UserWarning, match="moved aside"):
        Store().add([row_for(PROBLEM, SPACE[2])])
    assert len(Store().rows()) == 1
    (aside,) = path.parent.glob("*.corrupt")
    assert aside.read_bytes() == content


TUNER = """
import sys, pathlib
sys.path.insert(0, {folder!r})
from made_up import MadeUp, quiet, rms_norm
from tilewright.testing.cases import cases
from tilewright.tune.store import Store
import tilewright.tune.command as command
class Reporting(Store):
    def add(self, rows):
        super().add(rows)
        for row in rows:
            print(row.problem["rows"], flush=True)  # reported done
import dataclasses
problems = [dataclasses.replace(p, rows=n) for p in cases(rms_norm, "bench")[:1] for n in range({first}, {last})]
print("ready", flush=True)
command.tune([(rms_norm, p) for p in problems], MadeUp(), Reporting(pathlib.Path({path!r})), quiet())
"""


def tuner(path: Path, first: int, last: int) -> subprocess.Popen:
    code = TUNER.format(folder=str(Path(made_up.__file__).parent), path=str(path), first=first, last=last)
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def _adds_rows(path: Path, first: int, report) -> None:
    """A tuner's writes without its start, in a child process that is killed."""
    store = Store(path)
    for n in range(first, first + 100_000):
        store.add([row_for(dataclasses.replace(PROBLEM, rows=n), SPACE[0])])
        report.send(n)


def test_killed_at_20_random_moments_the_store_opens_and_no_reported_row_is_lost(tmp_path):
    path, draw, reported = tmp_path / "tuned.json", random.Random(1), set()
    context = multiprocessing.get_context("fork")
    for kill in range(20):
        receive, send = context.Pipe(duplex=False)
        child = context.Process(target=_adds_rows, args=(path, 1000 * kill + 1, send))
        child.start()
        send.close()
        time.sleep(draw.uniform(0.005, 0.12))
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        try:
            while receive.poll():
                reported.add(receive.recv())
        except EOFError:
            pass
        rows = read_rows(path)  # raises if the file is not whole
        assert reported <= {row.problem["rows"] for row in rows}
    assert len(reported) >= 20
    assert not list(tmp_path.glob("*.corrupt"))


def test_a_whole_tuner_killed_keeps_its_rows_and_the_next_goes_on(tmp_path):
    path = tmp_path / "tuned.json"
    first = tuner(path, 1, 100_000)
    lines = [first.stdout.readline() for _ in range(4)]
    os.kill(first.pid, signal.SIGKILL)
    reported = {int(line) for line in [*lines[1:], *first.stdout]}
    first.wait()
    assert reported <= {row.problem["rows"] for row in Store(path).rows()}
    last = max(reported) + 3
    second = tuner(path, 1, last + 1)
    again = {int(line) for line in list(second.stdout)[1:]}
    second.wait()
    assert not again & reported
    assert {row.problem["rows"] for row in Store(path).rows()} >= set(range(1, last + 1))


def test_two_tuners_at_once_lose_no_row(tmp_path):
    path = tmp_path / "tuned.json"
    both = [tuner(path, 1, 31), tuner(path, 31, 61)]
    for process in both:
        process.communicate(timeout=120)
        assert process.returncode == 0
    assert {row.problem["rows"] for row in Store(path).rows()} == set(range(1, 61))


def test_shipped_tables_are_whole_and_named_for_their_gpu():
    for path in (Path(__file__).resolve().parents[2] / "src" / "tilewright" / "tune" / "tables").glob("*.json"):
        rows = read_rows(path)
        assert {row.gpu.replace(" ", "_") for row in rows} == {path.stem}
        assert len({row.key for row in rows}) == len(rows)
