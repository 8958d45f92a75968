"""The tuner on made-up times: what it picks and drops, and what survives kills and a second
tuner.
"""

import dataclasses
import json
import math
import random
import time
from typing import Any

import pytest
import torch
from made_up import COMPILER, H200, PROBLEM, SPACE, MadeUp, own_folder, quiet, row_for, stored_times  # noqa: F401  (a fixture)
from rich.console import Console

from tilewright import ops
from tilewright.bench.timer import Timing
from tilewright.compile.ahead import compile_one
from tilewright.compile.job import Job
from tilewright.engine.problems import of_engine
from tilewright.launch import Device, decision_of, forget_plans, traced
from tilewright.launch.table import SHIPPED, plain, read_rows, rebuilt
from tilewright.ops import matmul, rms_norm, silu_mul
from tilewright.testing import asked, op_name, run_op
from tilewright.testing.cases import cases
from tilewright.testing.problems import of_file
from tilewright.tune.command import config_filter, export_command, import_command, prune_command, show_command, state, tune
from tilewright.tune.search import search
from tilewright.tune.store import Store
from tilewright.tune.workbench import Gpu, unfit


# ------------------------------------------------------------------------------------------- search
def test_the_fastest_right_config_wins_and_the_row_says_by_how_much():
    bench = MadeUp({0: 8.0, 3: 4.0, 5: 4.2}, dropped=(1,))
    row = search(rms_norm, PROBLEM, bench).row
    assert row.config == plain(SPACE[3])
    assert (row.time_us, row.default_us, row.runner_up_us) == (4.0, 8.0, 4.2)
    assert row.runner_up == plain(SPACE[5])
    assert (row.tried, row.dropped) == (len(SPACE) - 1, 1)
    assert (row.op, row.gpu, row.arch, row.compiler) == ("rms_norm", "H200", "sm_90", COMPILER)
    assert row.accuracy == {"rms_ratio": 0.5, "worst_ratio": 0.25}
    assert 1 not in bench.roughly, "a config that spills is never run"
    assert bench.raced == [[3, 5, 0], [3, 5], [3, 5]], "those near the best, with the default beside them; then the close ones"


def test_a_tie_goes_to_the_default():
    assert search(rms_norm, PROBLEM, MadeUp({0: 4.01, 3: 4.0})).row.config == plain(SPACE[0])
    assert search(rms_norm, PROBLEM, MadeUp({0: 4.05, 3: 4.0})).row.config == plain(SPACE[3])


def test_a_crowd_near_the_best_is_thinned_by_times_taken_in_turn():
    """Rough times are good to 5 %: the fastest of 20 may look like the slowest of them."""

    class Crowd(MadeUp):
        def rough(self, config, give_up_us):
            i = self.space.index(config)
            self.roughly.append(i)
            return 10.0 + 0.05 * i if i < 20 else 20.0

        def many(self, configs):
            self.passed = [self.space.index(config) for config in configs]
            return super().many(configs)

    problem = matmul.Problem(512, 4096, 4096, torch.bfloat16, out_dtype=torch.bfloat16)
    space = matmul.space(problem, H200)
    bench = Crowd({**{i: 10.0 + 0.01 * i for i in range(20)}, 19: 9.5}, fails=(7,))
    assert search(matmul, problem, bench).row.config == plain(space[19])
    assert sorted(bench.passed) == list(range(20))
    assert [len(raced) for raced in bench.raced] == [16, 12, 12], "all are close, and the best dozen is timed again"
    assert 7 not in bench.raced[0], "a config that cannot run in the passes is out"


def test_the_median_of_three_captures_decides_among_those_that_are_close():
    """One capture may be 8 % off: the first race alone would take config 2, the mean of two too."""
    captures = {2: [10.0, 10.3, 10.8], 3: [10.7, 10.1, 10.2], 0: [11.0, 10.9, 10.85]}

    class Captures(MadeUp):
        def race(self, configs):
            super().race(configs)
            return [Timing(us := captures[i].pop(0) if i in captures else 12.0, us / 100) for i in self.raced[-1]]

    bench = Captures({2: 10.0, 3: 10.0, 0: 10.1})
    found = search(rms_norm, PROBLEM, bench)
    assert [set(raced) for raced in bench.raced[1:]] == [{2, 3}, {2, 3}, {0}, {0}], "the default is close to the medians, not to the luckiest capture"
    row = found.row
    assert (row.config, row.time_us, row.spread_us) == (plain(SPACE[3]), 10.2, 0.102), "a time and its spread are of one capture"
    assert (row.runner_up_us, row.default_us) == (10.3, 10.9)
    assert found.times[:3] == [(SPACE[3], 10.2), (SPACE[2], 10.3), (SPACE[0], 10.9)]


def test_one_that_is_far_ahead_is_timed_once():
    bench = MadeUp({0: 4.4, 3: 4.0})
    assert search(rms_norm, PROBLEM, bench).row.config == plain(SPACE[3])
    assert bench.raced == [[3, 0]]


def test_a_wrong_winner_gives_way_to_the_next():
    bench = MadeUp({3: 4.0, 5: 4.2, 0: 8.0}, wrong=(3,))
    row = search(rms_norm, PROBLEM, bench).row
    assert row.config == plain(SPACE[5])
    assert bench.checked == [3, 5]
    assert row.dropped == 1


def test_a_config_that_does_not_launch_is_dropped():
    row = search(rms_norm, PROBLEM, MadeUp({3: 4.0, 5: 4.2}, fails=(3,))).row
    assert row.config == plain(SPACE[5])


def test_nothing_that_works_is_an_error_with_reasons():
    everything = range(len(SPACE))
    with pytest.raises(RuntimeError, match=r"rms_norm Problem\(rows=16.* got none of \d+: Config.*spills"):
        search(rms_norm, PROBLEM, MadeUp(dropped=everything))
    with pytest.raises(RuntimeError, match="worst element is off"):
        search(rms_norm, PROBLEM, MadeUp(wrong=everything))


def test_the_choice_is_the_exhaustive_best_on_30_sampled_problems():
    draw = random.Random(0)
    for problem in draw.sample(cases(rms_norm, "bench") + cases(silu_mul, "bench"), 30):
        op = rms_norm if isinstance(problem, rms_norm.Problem) else silu_mul
        bench = MadeUp()
        row = search(op, problem, bench).row
        best = min(bench.us(config) for config in bench.space)
        assert row.time_us <= 1.02 * best


def test_a_config_that_ends_the_use_of_the_gpu_ends_the_run_and_is_named(capsys):
    other = rms_norm.Problem(1, 2048, torch.bfloat16)
    bench = MadeUp(ends_with=len(SPACE) - 2)
    store = Store()
    assert tune([(rms_norm, other)], MadeUp(), store, quiet()) == 0
    assert tune([(rms_norm, PROBLEM), (rms_norm, rms_norm.Problem(2, 2048, torch.bfloat16))], bench, store, Console(width=500, highlight=False)) == 1
    out = capsys.readouterr().out
    assert f"{SPACE[-2]} ended this process's use of the GPU: RuntimeError: CUDA error: misaligned address" in out
    assert "2 problems left, and no GPU in this process. What is done is kept" in out
    assert len(bench.roughly) == 2, "nothing is timed after it"
    assert [row.problem for row in store.rows()] == [plain(other)]


@pytest.mark.parametrize("op", [pytest.param(op, id=op_name(op)) for op in ops.ALL])
def test_every_op_can_be_tuned_and_its_row_is_found_by_the_call(op):
    """The key of a row is the problem that the op's own call builds, whatever a benchmark case
    says.
    """
    for problem in cases(op, "bench")[:2]:
        wanted = asked(op, problem, H200)
        configs = op.space(wanted, H200)
        row = search(op, problem, MadeUp({len(configs) - 1: 1.0})).row
        Store().add([row])
        forget_plans()
        assert decision_of(op).decide(wanted, H200) == (configs[-1], "user table")
        assert rebuilt(type(wanted), json.loads(json.dumps(plain(wanted)))) == wanted


def test_a_problem_that_the_gpu_cannot_run_is_named_and_the_next_one_is_tuned(capsys):
    class Older(MadeUp):
        device = Device.named("A100")

    codes = matmul.Problem(64, 4096, 4096, torch.float8_e4m3fn, out_dtype=torch.bfloat16)
    assert asked(matmul, codes, Older.device) == codes
    assert tune([(matmul, codes), (rms_norm, PROBLEM)], Older(), Store(), Console(width=500, highlight=False)) == 1
    assert "must have a config on A100, got none" in capsys.readouterr().out
    assert [row.op for row in Store().rows()] == ["rms_norm"]


def test_the_shipped_rows_hold_and_untuned_calls_lose_little_to_them():
    """Rows of a changed kernel wait for the next run of the tuner. A call can take all others.

    Without them the model chooses: the first of its order that was timed is near the best.
    """
    known = {decision_of(op).op: op for op in ops.ALL}
    rows = read_rows(SHIPPED / "H200.json")
    assert {row.gpu for row in rows} == {"H200"}
    holding = [row for row in rows if state(row) in ("holds", "another compiler")]
    assert holding, "a table that no call can use is made anew, or removed"
    times: dict[tuple[str, Any], dict[Any, float]] = {}
    for name in {row.op for row in holding}:
        for one in stored_times("H200", known[name]).timed:
            of_problem = times.setdefault((name, one.problem), {})
            of_problem[one.config] = min(one.time_us, of_problem.get(one.config, one.time_us))
    losses = []
    for row in holding:
        op = known[row.op]
        problem, config = rebuilt(op.Problem, row.problem), rebuilt(op.Config, row.config)
        space, timed = op.space(problem, H200), times[row.op, problem]
        assert config in space.legal
        losses.append(next(timed[c] for c in space.legal if c in timed) / min(timed.values()))
    assert math.exp(sum(map(math.log, losses)) / len(losses)) <= 1.01
    assert max(losses) <= 1.3


# --------------------------------------------------------------------------- what a binary may need
def test_unfit_binaries_name_the_reason():
    from tilewright.compile import Compiled, Resources

    fine = Resources(168, 0, 0, 1 << 17, {})
    assert unfit(Compiled(fine), H200) == ""
    assert unfit(Compiled(), H200) == "", "no disassembler: the clock decides"
    assert unfit(Compiled(error="TileError: x"), H200) == "TileError: x"
    assert unfit(Compiled(dataclasses.replace(fine, stack_bytes=480)), H200) == "spills (480 bytes of stack)"
    assert unfit(Compiled(dataclasses.replace(fine, stack_bytes=8)), H200) == "", "a small spill is a cost, no ban"
    assert "must be at most 102400" in unfit(Compiled(fine), Device.named("GB10"))


def test_a_binary_that_fills_a_multiprocessor_is_fit():
    """cuobjdump counts the driver's 1 KiB: a block's 227 KiB are 228 in its report."""
    problem = matmul.Problem(16, 4096, 4096, torch.bfloat16, out_dtype=torch.bfloat16)
    with traced(H200) as launches, torch.inference_mode():
        fills = next(config for config in matmul.space(problem, H200) if config.tile_k == 512 and config.occupancy == 1)
        run_op(matmul, problem.inputs(torch.device("meta")), fills)
    made = compile_one(Job.of(launches[0], H200.arch))
    assert made.resources.shared_bytes > 227 << 10
    assert unfit(made, H200) == ""


class _Now:
    """An executor's future whose function has run."""

    def __init__(self, value):
        self.value = value

    def result(self):
        return self.value

    def done(self):
        return True


def test_the_gpu_workbench_compiles_each_binary_once_and_reports_what_cannot_be_planned(monkeypatch):
    from tilewright.compile import Compiled, Resources

    jobs = []

    def submit(function, job):
        jobs.append(job)
        return _Now(Compiled(Resources(40, 16 if "8192" in job.symbol else 0, 0, 0, {})))

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *unused, **also: None)
        patch.setattr(Device, "of", staticmethod(lambda tensor: H200))
        bench = Gpu(torch.device("cuda:0"), submit=submit)
    found = dict(bench.ready(rms_norm, PROBLEM, [*SPACE, "no config"]))
    assert set(found) == set(range(len(SPACE) + 1))
    assert found[len(SPACE)].startswith("AttributeError")
    assert len({job.identity for job in jobs}) == len(jobs)
    before = len(jobs)
    list(bench.ready(rms_norm, rms_norm.Problem(32, 4096, torch.bfloat16), rms_norm.space(PROBLEM, H200)))
    assert len(jobs) == before, "rows are a runtime value"


# ----------------------------------------------------------------------------------------- problems
@pytest.mark.parametrize(
    ("name", "more"),
    [("Llama-3.2-1B", {"attention", "attention_decode"}), ("DeepSeek-V2-Lite", {"mla", "mla_decode", "bmm", "moe", "moe_route", "rms_norm_route"})],
)
def test_problems_of_the_engine_are_what_it_asks(name, more):
    """The key of a row is the problem that the engine's own call builds, fused products
    included.
    """
    tasks = of_engine(name, H200)
    assert {op_name(op) for op, _ in tasks} == {"embedding", "rms_norm", "rms_norm_matmul", "matmul", "kv_append", "argmax"} | more
    assert all(asked(op, problem, H200) == problem for op, problem in tasks)
    products = [problem for op, problem in tasks if op is ops.matmul]
    assert any(p.silu_mul for p in products)
    if name == "Llama-3.2-1B":
        assert {(2, 128_256, 2048), (64, 3072, 2048), (8192, 2048, 8192)} <= {(p.m, p.n, p.k) for p in products}
        assert (128_256, 2048) in {(p.n, p.k) for op, p in tasks if op is ops.rms_norm_matmul}  # the head, with the norm, of one token
    with pytest.raises(KeyError, match="model must be one of SmolLM2-135M"):
        of_engine("nobody", H200)


def test_problems_of_a_file(tmp_path):
    file = tmp_path / "shapes.jsonl"
    scaled = ops.matmul.Problem(64, 2112, 7168, torch.float8_e4m3fn, scaling=ops.matmul.Problem(1, 1, 1).scaling.__class__.BLOCK)
    file.write_text(
        '{"op": "matmul", "problem": {"m": 3, "n": 5, "k": 7}}\n\n' + json.dumps({"op": "matmul", "problem": plain(scaled), "time_us": 3}) + "\n"
    )
    assert of_file(file) == [(ops.matmul, ops.matmul.Problem(3, 5, 7)), (ops.matmul, scaled)]
    for text in ('{"op": "nothing", "problem": {}}', "[", '{"op": "matmul"}', '{"op": "matmul", "problem": {"q": 1}}'):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"shapes.jsonl:1 must be an object with op and problem"):
            of_file(file)


# ---------------------------------------------------------------------------------------- the verbs
def test_a_part_of_the_space_is_shown_and_not_stored(capsys):
    """`--configs` and `--top`."""
    wanted = config_filter(f"tile_m={SPACE[1].tile_m},num_worker_warps={SPACE[1].num_worker_warps}", [rms_norm])
    part = [c for c in SPACE[1:] if wanted(c)]
    assert 1 < len(part) < len(SPACE) - 1
    bench = MadeUp({0: 4.0, 1: 2.0}, dropped=(len(part),))
    assert tune([(rms_norm, PROBLEM)], bench, None, Console(width=300, highlight=False), wanted=wanted, top=2) == 0
    assert bench.space == [SPACE[0], *part]
    out = capsys.readouterr().out
    assert "nothing is kept" in out
    lines = [line for line in out.splitlines() if line.startswith("  ")]
    assert str(part[0]) in lines[0]
    assert " GB/s " in lines[0]
    assert "default" in lines[1]
    assert "dropped" in lines[2]
    assert Store().rows() == []
    for text in ("tile_m", "=3", "tile_m=", ",", " "):
        with pytest.raises(ValueError, match="configs must be values like tile_m=128,latency=4"):
            config_filter(text, [rms_norm])
    with pytest.raises(ValueError, match=r"a field of --configs must be tile_m \(did you mean that\?\) or one of tile_m, .*, got 'tlie_m'"):
        config_filter("tlie_m=4", [rms_norm])  # only the default was timed, as if no config had the value
    assert config_filter("tile_k=64", ops.ALL)


def test_no_problem_begins_after_the_time_that_was_given(capsys):
    tasks = [(rms_norm, problem) for problem in cases(rms_norm, "bench")[:4]]
    assert tune(tasks, MadeUp(delay_s=0.1), Store(), Console(width=250), until=time.monotonic() + 0.15) == 0
    assert 1 <= len(Store().rows()) < 4
    assert "out of time" in capsys.readouterr().out


def test_tuning_resumes_and_says_what_it_gained(capsys):
    tasks = [(rms_norm, problem) for problem in cases(rms_norm, "bench")[:3]]
    console = Console(width=250, highlight=False)
    assert tune(tasks[:2], MadeUp({0: 8.0, 3: 4.0}), Store(), console) == 0
    assert "tuned against default geomean 2.000x" in capsys.readouterr().out
    bench = MadeUp()
    assert tune(tasks, bench, Store(), console) == 0
    assert "2 of 3 problems are tuned already" in capsys.readouterr().out
    assert len(bench.raced) == 1
    assert bench.prepared == [tasks[2][1]]
    assert len(Store().rows()) == 3
    assert tune(tasks, MadeUp(dropped=range(999)), Store(), console, again=True) == 1
    assert "got none of" in capsys.readouterr().out


def test_the_next_problems_compile_while_one_is_timed_but_behind_it():
    class Noting(MadeUp):
        def ready(self, op, problem, configs):
            seen.append((problem, list(self.prepared)))
            return super().ready(op, problem, configs)

    seen = []
    problems = cases(rms_norm, "bench")[:5]
    tune([(rms_norm, problem) for problem in problems], Noting(), Store(), quiet())
    assert seen == [(problem, problems[: i + 3]) for i, problem in enumerate(problems)]


def test_ctrl_c_keeps_what_is_done(capsys):
    class Stopped(MadeUp):
        def race(self, configs):
            if len(self.raced) == 2:
                raise KeyboardInterrupt
            return super().race(configs)

    tasks = [(rms_norm, problem) for problem in cases(rms_norm, "bench")[:5]]
    assert tune(tasks, Stopped({3: 4.0}), Store(), Console(width=250)) == 130
    assert "2 rows kept" in capsys.readouterr().out
    assert len(Store().rows()) == 2


def test_show_export_import_prune(tmp_path, capsys):
    stale = row_for(dataclasses.replace(PROBLEM, rows=99), SPACE[1], digest="0")
    Store().add([row_for(PROBLEM, SPACE[2], default_us=2.0), stale, row_for(PROBLEM, SPACE[2], op="gone")])
    console = Console(width=250, highlight=False)
    show_command(console=console)
    shown = capsys.readouterr().out
    assert "holds" in shown
    assert "kernel changed" in shown
    assert "2.00x" in shown
    assert "rms_norm: untuned takes 2.000x the time in geomean, at worst 2.00x, of 1 rows" in shown
    (line,) = [line for line in shown.splitlines() if "rows=99" in line]  # one line each, for grep
    assert "kernel changed" in line
    rows = tmp_path / "rows.json"
    show_command(case="rows=99", json_file=rows, console=console)
    (found,) = json.loads(rows.read_text())
    assert (found["state"], found["from"], found["problem"]["rows"], found["time_us"]) == ("kernel changed", "user", 99, stale.time_us)
    assert "rows=16" not in capsys.readouterr().out
    file = tmp_path / "out" / "H200.json"
    export_command(file, ["rms_norm"], console=console)
    assert [row.problem["rows"] for row in read_rows(file)] == [16]
    assert isinstance(json.loads(file.read_text()), list)
    prune_command(console=console)
    assert "2 rows removed" in capsys.readouterr().out
    assert [state(row) for row in Store().rows()] == ["holds"]
    Store().keep(lambda row: False)
    import_command(file, console=console)
    assert len(Store().rows()) == 1
    with pytest.raises(ValueError, match="must exist"):
        import_command(tmp_path / "absent.json", console=console)
