"""The file of tuned rows: broken files, kills at any moment, two tuners at once, hostile paths."""

import contextlib
import dataclasses
import errno
import io
import multiprocessing
import os
import random
import resource
import signal
import sys
import time
import warnings
from pathlib import Path

import msgspec
import pytest
from filelock import FileLock
from made_up import H200, PROBLEM, SPACE, MadeUp, own_folder, quiet, row_for  # noqa: F401  (a fixture)

from tilewright.launch import forget_plans, table
from tilewright.launch.table import read_rows
from tilewright.ops import rms_norm
from tilewright.testing.problems import of_file
from tilewright.tune.command import tune
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


class Reporting(Store):
    """Sends the number of rows of each problem that is done."""

    def __init__(self, path: Path, report) -> None:
        super().__init__(path)
        self.report = report

    def add(self, rows) -> None:
        super().add(rows)
        for row in rows:
            self.report.send(row.problem["rows"])


def _tunes(path: Path, first: int, last: int, report) -> None:
    problems = [(rms_norm, dataclasses.replace(PROBLEM, rows=n)) for n in range(first, last)]
    tune(problems, MadeUp(), Reporting(path, report), quiet())


def started(target, *args):
    """A forked child process, which starts in no time, and what receives its reports."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=target, args=(*args, send))
    child.start()
    send.close()
    return child, receive


def all_of(receive) -> set[int]:
    """What a process that has ended has reported."""
    found = set()
    with contextlib.suppress(EOFError):
        while receive.poll():
            found.add(receive.recv())
    return found


def _adds_rows(path: Path, first: int, report) -> None:
    """A tuner's writes without its start, in a child process that is killed."""
    store = Store(path)
    for n in range(first, first + 100_000):
        store.add([row_for(dataclasses.replace(PROBLEM, rows=n), SPACE[0])])
        report.send(n)


def test_killed_at_20_random_moments_the_store_opens_and_no_reported_row_is_lost(tmp_path):
    path, draw, reported = tmp_path / "tuned.json", random.Random(1), set()
    for kill in range(20):
        child, receive = started(_adds_rows, path, 1000 * kill + 1)
        time.sleep(draw.uniform(0.005, 0.12))
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        reported |= all_of(receive)
        rows = read_rows(path)  # raises if the file is not whole
        assert reported <= {row.problem["rows"] for row in rows}
    assert len(reported) >= 20
    assert not list(tmp_path.glob("*.corrupt"))


def test_a_whole_tuner_killed_keeps_its_rows_and_the_next_goes_on(tmp_path):
    path = tmp_path / "tuned.json"
    first, receive = started(_tunes, path, 1, 10_000)
    some = {receive.recv() for _ in range(3)}
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    reported = some | all_of(receive)
    assert reported <= {row.problem["rows"] for row in Store(path).rows()}
    last = max(reported) + 3
    second, receive = started(_tunes, path, 1, last + 1)
    second.join()
    assert second.exitcode == 0
    again = all_of(receive)
    assert again
    assert not again & reported
    assert {row.problem["rows"] for row in Store(path).rows()} >= set(range(1, last + 1))


def test_two_tuners_at_once_lose_no_row(tmp_path):
    path = tmp_path / "tuned.json"
    both = [started(_tunes, path, first, first + 30)[0] for first in (1, 31)]
    for process in both:
        process.join(timeout=120)
        assert process.exitcode == 0
    assert {row.problem["rows"] for row in Store(path).rows()} == set(range(1, 61))


def test_a_lock_that_another_process_holds_is_named_and_nothing_changes(monkeypatch, tmp_path):
    """The error was filelock's, which does not say that somebody holds it."""
    monkeypatch.setattr("tilewright.tune.store.LONGEST_WAIT_S", 0.1)
    store = Store(tmp_path / "tuned.json")
    rows = [row_for(dataclasses.replace(PROBLEM, rows=rows), SPACE[0]) for rows in (1, 2)]
    store.add(rows[:1])
    with FileLock(tmp_path / "tuned.lock"), pytest.raises(OSError, match=r"tuned\.lock must be free within 0\.1 s, got one that another process"):
        store.add(rows[1:])
    assert store.rows() == rows[:1]
    store.add(rows[1:])
    assert len(store.rows()) == 2


def test_shipped_tables_are_whole_and_named_for_their_gpu():
    for path in (Path(__file__).resolve().parents[2] / "src" / "tilewright" / "tune" / "tables").glob("*.json"):
        rows = read_rows(path)
        assert {row.gpu.replace(" ", "_") for row in rows} == {path.stem}
        assert len({row.key for row in rows}) == len(rows)


# ------------------------------------------------------- paths that somebody else may have prepared
def _folder(path: Path) -> None:
    path.mkdir()


def _link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


PLACES = {"a FIFO": os.mkfifo, "a folder": _folder, "a device": _device, "a link to itself": _link_to_itself}


def source_of_a_call() -> str:
    """Where a call's config comes from; the call may log its plan."""
    forget_plans()
    rms_norm.DECISION.launches(H200, **dataclasses.asdict(PROBLEM))
    return rms_norm.DECISION.decide(PROBLEM, H200)[1]


@pytest.fixture
def in_time():
    """Ends a test that hangs."""

    def late(*unused):
        raise TimeoutError("a store or a log hangs")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["tuned.json", "tuned.lock", "plans.jsonl"])
def test_no_call_hangs_or_fails_for_what_lies_in_the_cache_folder(place, name, in_time, monkeypatch):
    path = Store().path.parent / name
    path.parent.mkdir(parents=True)
    PLACES[place](path)
    monkeypatch.setenv("TILEWRIGHT_SHOW_PLANS", "log")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert source_of_a_call() == SPACE.source
    link = place == "a link to itself" and name != "plans.jsonl"  # it is followed, round and round
    words = str(path) if link else f"{path} must be a regular file, got a"
    assert any(words in str(one.message) for one in said) == (name != "tuned.lock")
    if name != "plans.jsonl":
        with pytest.raises(OSError, match=name):
            Store().add([row_for(PROBLEM, SPACE[2])])
    assert os.path.lexists(path)
    assert not path.is_file()


@pytest.mark.parametrize("name", ["tuned.part", "tuned.lock", "plans.jsonl", "tuned.json"])
def test_nothing_is_written_through_a_link(name, in_time, monkeypatch, tmp_path):
    target = tmp_path / "precious"
    target.write_bytes(b"[]")
    link = Store().path.parent / name
    link.parent.mkdir(parents=True)
    link.symlink_to(target)
    monkeypatch.setenv("TILEWRIGHT_SHOW_PLANS", "log")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source_of_a_call()
    if name == "tuned.lock":
        with pytest.raises(OSError, match="must be a regular file, got a link"):
            Store().add([row_for(PROBLEM, SPACE[2])])
    else:
        Store().add([row_for(PROBLEM, SPACE[2])])
        assert len(Store().rows()) == 1
    assert target.read_bytes() == b"[]"


def test_a_folder_that_cannot_be_is_an_error_of_the_store_and_none_of_a_call(in_time, monkeypatch, tmp_path):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("TILEWRIGHT_SHOW_PLANS", "log")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", "/proc/nowhere", "/dev/null", "a\0b", "x" * 5000):
        monkeypatch.setattr(table, "cache_folder", lambda folder=folder: Path(folder))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert source_of_a_call() == SPACE.source
        assert said
        with pytest.raises((OSError, ValueError)):
            Store().add([row_for(PROBLEM, SPACE[2])])


def _adds_to_a_full_disk(send) -> None:
    """In a child process: a write ends in the middle."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    try:
        Store().add([row_for(PROBLEM, SPACE[2])])
    except OSError as error:
        send.send(error.errno)


def test_a_full_disk_keeps_the_old_rows_and_leaves_nothing_behind():
    Store().add([row_for(PROBLEM, SPACE[1])])
    before = Store().path.read_bytes()
    child, receive = started(_adds_to_a_full_disk)
    child.join()
    assert receive.poll()
    assert receive.recv() == errno.EFBIG
    assert Store().path.read_bytes() == before
    assert {path.name for path in Store().path.parent.iterdir()} <= {"tuned.json", "tuned.lock"}


@pytest.mark.parametrize("content", [b"[" * 100_000, b'[{"op": "x", "problem": ' + b"[" * 100_000, b"[null]", b"\0" * 1000])
def test_deep_and_foreign_json_is_one_warning(content, in_time):
    path = Store().path
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.warns(UserWarning, match="must hold a JSON list"):
        assert source_of_a_call() == SPACE.source


def test_rows_of_foreign_problems_and_configs_are_not_taken():
    row = row_for(PROBLEM, SPACE[2])
    odd = [{"rows": [{}]}, {"rows": "x", "cols": None}, {"dtype": "load"}, {"evil": 1}, {"rows": [[[1]]], "cols": {"a": 1}}]
    Store().add([msgspec.structs.replace(row, problem=row.problem | change) for change in odd])
    Store().add([msgspec.structs.replace(row, config=change) for change in odd[:1]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert source_of_a_call() == SPACE.source


@pytest.mark.parametrize("line", ['{"op": "rms_norm", "problem": {"dtype": "evil"}}', "[" * 100_000, "\udcff", "null", '{"op": []}'])
def test_a_broken_line_of_the_log_is_named(line, in_time):
    path = table.log_file()
    path.parent.mkdir(parents=True)
    path.write_bytes(line.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"plans\.jsonl:1 must be an object with op and problem"):
        of_file(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(OSError, match="must be a regular file, got a FIFO"):
        of_file(path)


def test_a_closed_stderr_fails_no_call(monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_SHOW_PLANS", "1")
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert source_of_a_call() == SPACE.source
