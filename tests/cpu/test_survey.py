"""Raw times: files that survive a kill and pack to the same bytes; the survey that fills them, on
made-up times.
"""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import time

import pytest
import torch
from made_up import COMPILER, H200, PROBLEM, SPACE, MadeUp, own_folder, quiet, stored_times  # noqa: F401  (a fixture)
from rich.console import Console

from tilewright.compile.ahead import Ahead
from tilewright.launch.table import plain
from tilewright.ops import ALL, matmul, named, rms_norm, rope, softmax
from tilewright.testing import op_name
from tilewright.testing.drawn import FITTING_SEEDS
from tilewright.tune import raw, survey as surveying
from tilewright.tune.command import pack_command, survey_command, tune
from tilewright.tune.store import Store
from tilewright.tune.survey import PASS, Part, Task, drawn_tasks, in_parts, listed_tasks, sampled, survey


def timed(rows: int, us: float | None, **more) -> raw.Timed:
    problem = dataclasses.replace(PROBLEM, rows=rows)
    return raw.Timed(plain(problem), plain(SPACE[0]), "d", COMPILER, us, **more)


# -------------------------------------------------------------------------------------------- files
def test_rows_come_back_and_half_a_row_is_cut_off(tmp_path):
    rows = [timed(1, 2.5, spread_us=0.1), timed(2, 3.0, spill_bytes=16), timed(3, None, error="CUDA error")]
    log = raw.Log(tmp_path, "RTX 5090", "rms_norm")
    log.add(rows[:2])
    with log.path.open("ab") as file:  # killed while it wrote
        file.write(b'{"p":{"rows"')
    assert raw.read(tmp_path, "RTX 5090", "rms_norm") == rows[:2]
    log.add(rows[2:])
    assert raw.read(tmp_path, "RTX 5090", "rms_norm") == rows
    assert raw.read(tmp_path, "H200", "rms_norm") == []
    log.path.write_text('{"p":{}}\n')
    with pytest.raises(ValueError, match=r"rms_norm.jsonl:1 must be a row of raw times"):
        raw.read(tmp_path, "RTX 5090", "rms_norm")


def test_raw_times_change_no_other_file_and_wait_for_none(tmp_path):
    """They were appended behind a link, where half of a last line was cut off."""
    log, other = raw.Log(tmp_path, "H200", "rms_norm"), tmp_path / "other"
    log.path.parent.mkdir()
    other.write_text("half a line")
    log.path.symlink_to(other)
    with pytest.raises(OSError, match=r"rms_norm\.jsonl must be a regular file, got a link"):
        log.add([timed(1, 2.5)])
    assert other.read_text() == "half a line"
    log.path.unlink()
    os.mkfifo(log.path)
    for call in (lambda: log.add([timed(1, 2.5)]), lambda: raw.read(tmp_path, "H200", "rms_norm")):
        with pytest.raises(OSError, match="must be a regular file, got a FIFO"):
            call()


def test_processes_append_whole_rows(tmp_path):
    """Each cuts off what a killed process left behind the last newline, which is another's row
    while that is being written.
    """
    context = multiprocessing.get_context("fork")
    begun = context.Event()
    other = context.Process(target=append_rows, args=(tmp_path, 1000, begun))
    other.start()
    assert begun.wait(60)
    append_rows(tmp_path, 0, begun)
    other.join()
    assert other.exitcode == 0
    assert sorted(row.problem["rows"] for row in raw.read(tmp_path, "H200", "rms_norm")) == [*range(600), *range(1000, 1600)]


def append_rows(folder, first, begun):
    begun.set()
    log = raw.Log(folder, "H200", "rms_norm")
    for i in range(first, first + 600):
        log.add([timed(i, 1.0)])


class Noted(Part):
    """Notes who it is, and ends with the code of its index."""

    def run(self, console):
        (self.folder / str(self.index)).write_text(str(self.parts))
        return self.index


def test_a_survey_in_parts_ends_with_the_worst_code(tmp_path):
    whole = Noted(["rope"], range(1000, 1001), tmp_path, torch.device("cpu"), 1, 0.0)
    assert in_parts(whole, 2, quiet()) == 1
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "2", "1": "2"}


class Compiling(Part):
    """Ends while its compilers are busy."""

    def run(self, console):
        with Ahead(H200, jobs=1) as ahead:
            ahead._submit(time.sleep, 0).result()
            for _ in range(4):
                ahead._submit(time.sleep, 0.5)
        return 0


def test_a_part_of_a_survey_ends_though_its_compilers_are_busy(tmp_path):
    """It waited for them, and they waited for more to do."""
    part = Compiling(["rope"], range(1000, 1001), tmp_path, torch.device("cpu"), 1, 0.0, index=1, parts=2)
    child = multiprocessing.get_context("spawn").Process(target=part.run_as_child)
    child.start()
    child.join(60)
    code = child.exitcode
    child.kill()
    assert code == 0


def test_the_parts_of_a_survey_share_its_problems(tmp_path, monkeypatch):
    timed_by: list[list[object]] = []
    monkeypatch.setattr(surveying, "Gpu", lambda where, **how: contextlib.nullcontext(MadeUp()))
    monkeypatch.setattr(surveying, "survey", lambda tasks, *rest, **options: timed_by.append([task.problem for task in tasks]) or 0)
    whole = Part(["rope", "matmul"], range(1000, 1001), tmp_path, torch.device("cpu"), 1, 0.0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda where: None)
    whole.run(quiet())
    for index in range(3):
        dataclasses.replace(whole, index=index, parts=3).run(quiet())
    alone, *parts = timed_by
    assert len(alone) == PASS["rope"] + PASS["matmul"]
    assert sorted(map(str, alone)) == sorted(str(problem) for part in parts for problem in part)


def test_packing_is_deterministic_small_and_keeps_the_last_time(tmp_path, capsys):
    rows = [timed(i, 2.0 + i % 7, spread_us=0.125) for i in range(1, 2001)]
    for name, order in (("one", rows), ("two", rows[::-1])):
        raw.Log(tmp_path / name, "H200", "rms_norm").add(order)
        pack_command(tmp_path / f"{name}-packed", folder=tmp_path / name, console=Console(width=200))
    one, two = (tmp_path / f"{name}-packed" / "H200" / "rms_norm.jsonl.gz" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    assert len(one.read_bytes()) < 2000 * 30
    assert sorted(raw.read(tmp_path / "one-packed", "H200", "rms_norm"), key=lambda row: row.problem["rows"]) == rows
    raw.Log(tmp_path / "one-packed", "H200", "rms_norm").add([dataclasses_replace(rows[0], time_us=99.0), timed(5000, 1.0)])
    assert raw.pack(tmp_path / "one-packed", tmp_path / "one-packed", "H200", "rms_norm")[0] == 2001
    again = {row.problem["rows"]: row.time_us for row in raw.read(tmp_path / "one-packed", "H200", "rms_norm")}
    assert (again[1], again[5000], again[2]) == (99.0, 1.0, rows[1].time_us)
    assert [path.name for path in (tmp_path / "one-packed" / "H200").iterdir()] == ["rms_norm.jsonl.gz"]
    assert raw.ops_of(tmp_path / "one-packed", "H200") == ["rms_norm"]
    assert raw.gpus_of(tmp_path / "one-packed") == ["H200"]
    assert "H200: 2000 rows of 1 ops" in capsys.readouterr().out


def dataclasses_replace(row: raw.Timed, **changes) -> raw.Timed:
    return raw.Timed(**({name: getattr(row, name) for name in row.__struct_fields__} | changes))


def test_a_search_keeps_every_time_that_it_raced():
    bench = MadeUp({0: 8.0, 3: 4.0, 5: 4.2}, dropped=(1,))
    assert tune([(rms_norm, PROBLEM)], bench, Store(), quiet()) == 0
    rows = raw.read(raw.user_folder(), "H200", "rms_norm")
    raced = {str(row.config): row for row in rows}
    assert all(row.spread_us is not None for row in rows)
    assert set(raced) == {str(plain(SPACE[i])) for i in (0, 3, 5)}
    assert len(rows) == 3, "one row each, of however many captures"
    best = raced[str(plain(SPACE[3]))]
    assert (best.time_us, best.spread_us, best.spill_bytes, best.problem) == (4.0, 0.1, 8, plain(PROBLEM))


# --------------------------------------------------------------------------------------- the survey
def some_tasks(count: int, beside: frozenset = frozenset()) -> list[Task]:
    problems = [dataclasses.replace(PROBLEM, rows=3 + i) for i in range(count)]
    return [Task("rms_norm", rms_norm, problem, problem, SPACE[:6], beside) for problem in problems]


def test_a_survey_keeps_what_ran_and_resumes(tmp_path, capsys):
    bench = MadeUp({0: 2.0}, dropped=(1,), fails=(2,))
    console = Console(width=200, highlight=False)
    assert survey(iter(some_tasks(2)), bench, tmp_path, console, until=time.monotonic() + 60) == 0
    assert "8 timings of 2 problems in 0 s (0 s compiling, 0 s inputs, 0 s timing), 4 configs refused" in capsys.readouterr().out
    rows = raw.read(tmp_path, "H200", "rms_norm")
    assert [row.config for row in rows] == [plain(SPACE[i]) for i in (0, 3, 4, 5)] * 2
    assert (rows[0].time_us, rows[0].spread_us, rows[1].spill_bytes) == (2.0, 0.1, 8)

    again = MadeUp()
    assert survey(iter(some_tasks(3)), again, tmp_path, quiet(), until=time.monotonic() + 60) == 0
    keys = [row.key for row in raw.read(tmp_path, "H200", "rms_norm")]
    assert len(keys) == len(set(keys)) == 18, "only what was not in the file"


def test_a_survey_ends_in_time_and_by_ctrl_c(tmp_path, capsys):
    assert survey(iter(some_tasks(50)), MadeUp(delay_s=0.05), tmp_path / "a", quiet(), until=time.monotonic() + 0.2) == 0
    assert 6 <= len(raw.read(tmp_path / "a", "H200", "rms_norm")) < 300

    class Stopped(MadeUp):
        def many(self, configs):
            if self.prepared and len(raw.read(tmp_path / "b", "H200", "rms_norm")) == 12:
                raise KeyboardInterrupt
            return super().many(configs)

    assert survey(iter(some_tasks(9)), Stopped(), tmp_path / "b", Console(width=200), until=time.monotonic() + 60) == 130
    assert "12 timings kept" in capsys.readouterr().out


def test_a_problem_that_is_drawn_twice_is_timed_once(tmp_path):
    """Its configs are asked for once, so a second wait for them would find none."""
    (task,) = some_tasks(1)
    assert survey(iter([task, *some_tasks(2), task]), MadeUp(delay_s=0.05), tmp_path, quiet(), until=time.monotonic() + 60) == 0
    assert len(raw.read(tmp_path, "H200", "rms_norm")) == 12


def test_what_compiles_first_is_timed_first(tmp_path):
    class Slow(MadeUp):
        def done(self, op, problem):
            return problem.rows != 3 or len(self.order) == 3

        @property
        def order(self):
            return [row.problem["rows"] for row in raw.read(tmp_path, "H200", "rms_norm")][::6]

    bench = Slow()
    assert survey(iter(some_tasks(4)), bench, tmp_path, quiet(), until=time.monotonic() + 60) == 0
    assert bench.order == [4, 5, 6, 3]


def test_a_config_that_breaks_the_gpu_is_named_and_not_tried_again(tmp_path, capsys):
    class Breaks(MadeUp):
        def many(self, configs):
            self.ended = SPACE[4] in configs
            return [
                "RuntimeError: misaligned address" if self.ended and c in SPACE[4:] else t
                for c, t in zip(configs, super().many(configs), strict=True)
            ]

    console = Console(width=400, highlight=False)
    assert survey(iter(some_tasks(2)), Breaks(), tmp_path, console, until=time.monotonic() + 60) == 1
    assert "the GPU is lost to this process: rms_norm {'rows': 3" in capsys.readouterr().out
    rows = raw.read(tmp_path, "H200", "rms_norm")
    assert [row.error for row in rows] == ["", "", "", "", "RuntimeError: misaligned address"]
    assert rows[-1].time_us is None
    assert survey(iter(some_tasks(1)), Breaks(), tmp_path, console, until=time.monotonic() + 60) == 0
    assert "1 timings of 1 problems" in capsys.readouterr().out, "the one behind it"


def test_a_config_beside_the_space_is_checked_once_and_a_wrong_one_never_kept(tmp_path, capsys):
    bench = MadeUp(wrong=(5,))
    assert survey(iter(some_tasks(3, frozenset(SPACE[4:6]))), bench, tmp_path, Console(width=200), until=time.monotonic() + 60) == 0
    assert bench.checked == [4, 5]
    assert {str(row.config) for row in raw.read(tmp_path, "H200", "rms_norm")} == {str(plain(config)) for config in SPACE[:5]}
    assert "wrong, not kept: worst element is off" in capsys.readouterr().out


def test_a_pass_is_mixed_and_drawn_with_fitting_seeds():
    tasks = list(drawn_tasks(["matmul", "rope", "softmax"], H200, FITTING_SEEDS[:2]))
    kinds = [task.kind for task in tasks]
    assert len(tasks) == 2 * (PASS["matmul"] + PASS["rope"] + PASS["softmax"])
    half = kinds[: len(kinds) // 4]
    assert {"rope", "softmax"} < set(half), "a part of a pass has something of each"
    for task in tasks:
        space = task.op.space(task.asked, H200)
        assert task.configs[0] == space[0]
        assert task.beside == {config for config in task.configs if config not in space}
    assert any(task.beside for task in tasks if task.kind == "matmul")
    with pytest.raises(ValueError, match="op must be one of"):
        survey_command(["nothing"])
    with pytest.raises(ValueError, match="1000 to 2999"):
        survey_command(["rope"], seed=11)
    with pytest.raises(ValueError, match="tune needs a CUDA GPU"):
        survey_command(["rope"], console=quiet())


def test_a_survey_of_a_file_times_its_problems(tmp_path):
    """Such as the rows of a benchmark in which a peer was ahead; of other ops than asked none."""
    rows = [("rope", rope.Problem(1, 4, 2, 16, 64, torch.bfloat16)), ("softmax", softmax.Problem(3, 500, torch.float32))]
    shapes = tmp_path / "rows.jsonl"
    shapes.write_text("".join(json.dumps({"op": op, "problem": plain(problem), "time_us": 1.0}) + "\n" for op, problem in rows))
    both = list(listed_tasks(shapes, list(PASS), H200))
    assert [(task.kind, task.problem) for task in both] == rows
    assert both[1].configs[0] == softmax.space(both[1].asked, H200)[0]
    assert [task.kind for task in listed_tasks(shapes, ["softmax", "softmax wide"], H200)] == ["softmax"]
    assert [task.kind for index in range(2) for task in listed_tasks(shapes, list(PASS), H200, index=index, parts=2)] == ["rope", "softmax"]
    with pytest.raises(ValueError, match=r"must have a problem of matmul.*, and has none"):
        survey_command(["matmul"], shapes=shapes)


def test_a_sample_has_the_first_ones_and_is_the_same_again():
    chosen = sampled(SPACE, 8, "a")
    assert chosen[:4] == SPACE[:4]
    assert len(set(chosen)) == 8
    assert chosen == sampled(SPACE, 8, "a")
    assert sampled(SPACE, 99, "a") == SPACE


def cases_of_8_bits():
    return [
        matmul.Problem(160, 5120, 17_408, torch.float8_e4m3fn, scaling=scaling) for scaling in list(matmul.Problem(1, 1, 1).scaling.__class__)[1:]
    ]


def test_times_are_kept_with_the_sizes_that_were_timed():
    """A call of `attention_decode` asks for a bucket of cache lengths; 5436 keys are not 8192."""
    task = next(t for t in drawn_tasks(["attention_decode"], H200) if t.asked.max_len != t.problem.max_len)
    assert task.timed.max_len == task.problem.max_len
    assert dataclasses.replace(task.timed, max_len=task.asked.max_len) == task.asked


@pytest.mark.parametrize("op", ALL, ids=op_name)
def test_no_time_that_ships_reads_faster_than_memory_can(op):
    """4.8 TB/s are what an H200's data sheet has; problems far over its L2."""
    timed = [t for t in stored_times("H200", op).timed if t.problem.cost().size_bytes > 150e6]
    assert not [t for t in timed if t.problem.cost().size_bytes / t.time_us > 4.8e6]


def test_most_times_that_ship_are_of_configs_that_there_are():
    for name in raw.ops_of(raw.SHIPPED, "H200"):
        (op,) = named([name])
        stored = stored_times("H200", op)
        assert stored.skipped <= 0.1 * (stored.skipped + len(stored.timed)), name
