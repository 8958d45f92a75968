"""The benchmark without a GPU: suites, published figures, clocks, rows."""

import json
import pickle
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from speed import slower

from tilewright.bench import command, libraries, measure, prepare, timer
from tilewright.bench.ceilings import Ceilings, check_sums
from tilewright.bench.command import _Run, bench_command
from tilewright.bench.measure import Setup
from tilewright.bench.meter import Meter, Sample, parse_smi, summarised
from tilewright.bench.page import _figure_lines
from tilewright.bench.published import SHEETS, beside, best_row, figures
from tilewright.bench.report import Measured, make_row
from tilewright.bench.stopwatch import Stopwatch, told, total
from tilewright.bench.suites import Table, formatted, playbook, seeds
from tilewright.bench.timer import Timing, input_sets
from tilewright.engine.problems import of_all, of_engine
from tilewright.launch import Device
from tilewright.ops import attention_decode, softmax
from tilewright.testing import asked, check_op, op_name
from tilewright.testing.accuracy import Accuracy

H200 = Device.named("H200")
CEILINGS = Ceilings(copy_gbs=4200.0, read_gbs=4600.0, tflops=780.0, launch_us=1.0)
SETUP = Setup(torch.device("cpu"), CEILINGS)


# --------------------------------------------------------------------------------- clocks and power
def test_clocks_are_sampled_while_the_case_runs():
    readings = iter([(1980.0, 3201.0, 300.0), (1755.0, 3201.0, 500.0)])
    started, read = threading.Event(), threading.Event()

    def reader():
        started.wait(5)
        value = next(readings, None)
        if value is None:
            read.set()
            raise OSError("gone")
        return value

    with Meter(reader, period_s=0.001) as meter, meter.watching() as clocks:
        started.set()
        assert read.wait(5)
    assert clocks == ["1755..1980 MHz, 3201 MHz, 400 W"]


def test_nothing_to_read_is_an_empty_line_and_no_thread():
    before = threading.active_count()
    with Meter(None) as meter, meter.watching() as clocks:
        assert threading.active_count() == before
    assert clocks == [""]


def test_what_a_driver_hides_is_left_out():
    assert summarised([Sample(0, 1980.0, None, None)]) == "1980 MHz"
    assert parse_smi(" 1980, 3201, [N/A]\n") == (1980.0, 3201.0, None)
    for text in ("", "No devices were found", "1, 2"):
        with pytest.raises(ValueError):
            parse_smi(text)


# ----------------------------------------------------------------------------------------- one case
@pytest.fixture
def made_up(monkeypatch):
    """Peers of softmax: torch, a library that computes something else, one that raises; times of 1,
    2, 3.. us.
    """
    peer = libraries.Peer

    def broken(x):
        raise NotImplementedError("not on this GPU\nat all")

    found = [peer("torch.eager", lambda x: torch.softmax(x, -1))]
    others = [peer("tilegym", lambda x: torch.softmax(2 * x, -1)), peer("quack", broken)]
    monkeypatch.setattr(measure, "peers_of", lambda op, inputs: found)
    monkeypatch.setattr(measure, "library_peers", lambda op, inputs: others)
    calls = []

    def timed(contenders, sets, rounds=15):
        calls.append((list(contenders), len(sets)))
        return {name: Timing(float(i), 0.01) for i, name in enumerate(contenders, 1)}

    monkeypatch.setattr(measure, "time_interleaved", timed)
    return calls


def test_a_case_is_timed_cold_and_warm_beside_those_that_compute_the_same(made_up):
    problem = softmax.Problem(33, 70, torch.float32)
    with torch.inference_mode():
        row = measure.measure_case(softmax, problem, SETUP)
    assert [names for names, _ in made_up] == [["ours", "torch.eager"]] * 2
    assert made_up[0][1] > made_up[1][1] == 1
    assert row.peers == {"torch.eager": 2.0}
    assert row.warm_us == 1.0
    assert row.peer_warm_us == {"torch.eager": 2.0}
    assert row.backends == {"torch.eager": f"torch {torch.__version__}"}
    assert row.absent["quack"] == "NotImplementedError: not on this GPU"
    assert "computes something else" in row.absent["tilegym"]
    configs = softmax.space(problem, Device.named("CPU"))
    assert (row.source, row.config) == (configs.source, str(configs[0]))
    assert json.loads(row.json())["problem"] == {"rows": 33, "cols": 70, "dtype": "float32"}
    phases = ["check", "inputs", "first call of torch.eager", "first call of tilegym", "first call of quack", "timing", "timing in L2"]
    assert list(row.took_s) == phases
    line = row.line()
    for part in ("launch floor 1.0 us", "warm L2 1.0 us", "torch.eager 2.00x", "tilegym failed"):
        assert part in line


def test_without_warm_or_peers_a_case_is_only_timed_cold(made_up):
    with torch.inference_mode():
        row = measure.measure_case(softmax, softmax.Problem(33, 70, torch.float32), replace(SETUP, peers=False, warm=False))
    assert [names for names, _ in made_up] == [["ours"]]
    assert (row.peers, row.absent, row.warm_us, row.peer_warm_us) == ({}, {}, None, {})
    assert list(row.took_s) == ["check", "inputs", "timing"]


def test_a_run_tells_where_its_seconds_went(monkeypatch):
    now = iter([0.0, 1.0, 1.0, 3.5, 4.0, 5.0])
    monkeypatch.setattr("tilewright.bench.stopwatch.time.perf_counter", lambda: next(now))
    watch = Stopwatch()
    with watch.phase("check"):
        pass
    with watch.phase("timing"):
        pass
    with pytest.raises(AssertionError), watch.phase("check"):
        raise AssertionError("counted all the same")
    assert watch.seconds == {"check": 2.0, "timing": 2.5}
    assert told(total([watch.seconds, {"check": 1.0}]), 10.0) == "took 10.0 s: check 3.0, timing 2.5, other 4.5"


def test_a_wrong_kernel_prints_no_number(monkeypatch, capsys):
    def wrong(*args, **kwargs):
        raise AssertionError("worst element is off")

    monkeypatch.setattr(command, "measure_case", wrong)
    run = _Run(Console(width=200), SETUP, False, None, "")
    assert run.one(softmax, softmax.Problem(3, 4, torch.float32)) is None
    assert run.wrong == 1
    out = capsys.readouterr().out
    assert "WRONG, not timed" in out
    assert "us" not in out.replace("not timed", "").split("|")[0]


def test_defaults_are_those_that_a_call_takes(monkeypatch):
    """A call rounds the length of a cache up."""
    monkeypatch.setattr(Device, "of", lambda tensor: H200)
    problem = attention_decode.Problem(8, 64, 1, 640, 512, torch.bfloat16, shared=True)
    found = _Run(Console(), SETUP, True, None, "").config(attention_decode, problem)
    assert found == attention_decode.space(asked(attention_decode, problem, H200), H200)[0] != attention_decode.space(problem, H200)[0]


def test_a_wrong_kernel_is_never_timed(monkeypatch, made_up):
    monkeypatch.setattr(softmax, "softmax", lambda x: torch.softmax(x.double() * 1.01, -1).to(x.dtype))
    with pytest.raises(AssertionError):
        measure.measure_case(softmax, softmax.Problem(33, 70, torch.float32), SETUP)
    assert made_up == []


def test_processes_check_every_case_before_one_is_timed(monkeypatch, made_up, capsys):
    """A wrong case is told and not timed; one that they could not check is checked by the run."""
    monkeypatch.setattr(prepare, "spawned_pool", lambda jobs: ThreadPoolExecutor(1))
    small, wrong, large = (softmax.Problem(rows, 70, torch.float32) for rows in (33, 34, 35))
    checks = []

    def checked(op, problem, device, config=None):
        checks.append(problem)
        if problem == wrong:
            raise AssertionError("3 of the bound")
        if problem == large and checks.count(large) == 1:
            raise torch.OutOfMemoryError("others have it")
        return check_op(op, problem, device, config)

    monkeypatch.setattr(prepare, "check_op", checked)
    monkeypatch.setattr(measure, "check_op", checked)
    run = _Run(Console(width=300), SETUP, False, None, "", jobs=2)
    run.all([(softmax, problem) for problem in (small, wrong, large)])
    assert sorted(problem.rows for problem in checks) == [33, 34, 35, 35]
    assert [row.problem["rows"] for row in run.rows] == [33, 35]
    assert run.wrong == 1
    assert "WRONG, not timed: 3 of the bound" in capsys.readouterr().out
    assert pickle.loads(pickle.dumps((small, SETUP.device))) == (small, SETUP.device), "as other processes get them"


def test_drawn_cases_that_processes_prepared_are_not_compiled_again(monkeypatch, made_up):
    found = [Accuracy(0.1, 0.2, (0,), 1.0, 1.0)]
    problem = softmax.Problem(33, 70, torch.float32)
    monkeypatch.setattr(command, "prepared", lambda *args: {("softmax", problem): found})
    monkeypatch.setattr(command, "Ahead", lambda here: pytest.fail("compilers were started"))
    run = _Run(Console(width=300), SETUP, False, None, "", jobs=2)
    run.drawn([(7, softmax, problem)], H200)
    assert [row.draw_seed for row in run.rows] == [7]


def test_a_run_goes_on_where_a_process_is_killed(monkeypatch, made_up, capsys):
    def killed(*args):
        raise BrokenProcessPool("A process in the process pool was terminated abruptly")

    monkeypatch.setattr(command, "prepared", killed)
    run = _Run(Console(width=300), SETUP, False, None, "", jobs=2)
    run.all([(softmax, softmax.Problem(33, 70, torch.float32))])
    assert len(run.rows) == 1
    assert "one of the processes of --jobs was killed" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------- suites
def test_an_unknown_suite_names_the_known():
    with pytest.raises(ValueError, match="--suite must be one of playbook, seeds, got 'all'"):
        bench_command(suite="all")


def test_every_suite_is_made_of_problems_that_an_h200_can_run():
    for table in playbook():
        for _, op, problem in table.problems():
            assert op.space(problem, H200), problem
    of_engine("SmolLM2-135M", H200)  # imports transformers, which takes as long as the listing
    start = time.process_time()
    tasks = of_all(H200)
    assert time.process_time() - start < 8 * slower(), "the suites are cheap to list"
    assert len(tasks) > 300, "each of them was decided, so has a space"
    assert all(op.space(problem, H200) for op, problem in seeds())
    matrix = {"attention", "mla", "mla_decode", "matmul", "bmm", "grouped_gemm", "rms_norm", "rope", "silu_mul", "softmax", "dropout"}
    assert {table.op for table in playbook()} == matrix


def test_a_table_prints_as_the_playbook_does():
    lines = tuple((n, {}) for n in (1024, 16_384))
    table = Table("fused-attention-causal=True-float16-TFLOPS", "bench_fused_attention.py", "attention", "N_CTX", "TFLOPS", lines)
    columns = {"Tilewright": {1024: 58.188262, 16_384: 89.491869}, "cudnn": {1024: 60.5}}
    assert formatted(table, columns).splitlines() == [
        "fused-attention-causal=True-float16-TFLOPS:",
        "     N_CTX  Tilewright      cudnn",
        "0   1024.0   58.188262  60.500000",
        "1  16384.0   89.491869        nan",
    ]


def test_a_playbook_run_prints_tables_and_what_is_not_built(monkeypatch, capsys):
    def timed(op, problem, *args, **kwargs):
        times = {"ours": Timing(10.0, 0.1), "cudnn": Timing(5.0, 0.1)}
        return make_row(op_name(op), problem, "H200", CEILINGS, Measured(times, took_s={"check": 0.25}))

    monkeypatch.setattr(command, "measure_case", timed)
    run = _Run(Console(width=300), SETUP, False, None, "")
    first = playbook()[0]
    run.tables([first])
    out = capsys.readouterr().out
    assert first.title + ":" in out
    assert "✓ PASSED: bench_fused_attention.py" in out
    assert "58.19 TFLOP/s published for DGX Spark (cutile-playbook.md)" in out
    run.tables([Table("mla-TFLOPS", "bench_mla.py", "no_such_op", "N_CTX", "TFLOPS", ((1, {}),))])
    assert "mla-TFLOPS: not built (no op no_such_op)" in capsys.readouterr().out


# -------------------------------------------------------------------------------- published figures
def test_published_figures_are_complete_and_name_their_machine():
    found = figures()
    assert {f.document for f in found} == {"attention-tuning-blog.md", "cutile-playbook.md", "gb10-megakernel-pr.md", "gemm-note.md"}
    for figure in found:
        assert figure.value > 0
        assert figure.device or figure.metric == "ratio", figure
        share = figure.roof_pct()
        assert share is None or 0 < share < 105, figure
    spark = next(f for f in found if f.hardware == "DGX Spark" and f.problem.get("q_len") == 16_384)
    assert spark.value == 89.491869
    assert spark.roof_pct() is None, "no source gives GB10's bf16 rate"
    read = next(f for f in found if f.kernel.startswith("Memory read"))
    assert read.roof_pct() == pytest.approx(100 * 236 / 273)
    b300 = next(f for f in found if f.device == "B300" and f.problem.get("q_len") == 16_384)
    assert b300.roof_pct() == pytest.approx(100 * b300.value / SHEETS["B300"].tflops)
    assert all(sheet.source for sheet in SHEETS.values())
    note = next(f for f in found if f.kernel.endswith("DeepGEMM"))
    assert note.tflops() == pytest.approx(2 * 320 * 32_576 * 7168 / 77e-6 / 1e12)


def test_rows_of_the_same_problem_stand_beside_published_figures():
    plain = {"batch": 4, "q_heads": 32, "kv_heads": 32, "q_len": 2048, "kv_len": 2048, "head_dim": 128, "dtype": "bfloat16", "causal": True}
    row = {"op": "attention", "case": "x", "dtype": "bfloat16", "problem": plain}
    assert {f.hardware for f in beside(row)} == {"DGX Spark", "B300", "B200"}
    assert beside(row | {"problem": plain | {"causal": False}}) == []
    assert beside(row | {"problem": plain | {"window": 512}}) == [], "an option that the documents do not have"
    fp8 = {"m": 320, "n": 32_576, "k": 7168, "dtype": "float8_e4m3fn", "trans_b": True}
    for scaling, count in (("TENSOR", 4), (1, 4), ("BLOCK", 0), (3, 0)):  # older rows have the number
        assert len(beside({"op": "matmul", "case": "x", "problem": fp8 | {"scaling": scaling}})) == count
    exact = row | {"problem": plain | {"dtype": "float16"}, "dtype": "float16"}
    figure = beside(row)[0]
    assert best_row(figure, [exact, row]) is exact
    assert best_row(figure, [row | {"problem": plain | {"batch": 8}}]) is None, "another batch is other work"


def test_a_figure_of_whole_models_stands_beside_equal_work_of_the_same_software():
    case = "Llama-3.2-1B batch=1 prompt=6 new=128"
    theirs = {"peer_tokens_per_s": {"transformers": 100.0, "torch.compile": 400.0}, "peer_tpot_ms": {"transformers": 10.0, "torch.compile": 2.5}}
    ours = {"tokens_per_s": 1200.0, "gbs": 3000.0, "kernel_us": 760.0, "step_bytes": 2.5e9, "op": "decode", "gpu": "H200", "date": "2026-11-23"}
    rows = [{**ours, **theirs, "case": f"{case} mode={mode}", "tokens_per_s": rate} for mode, rate in (("eager", 500.0), ("mega", 1200.0))]
    found = {(f.by or "ours", f.metric): f.of(row) for f in figures() if f.document.startswith("gb10") and (row := best_row(f, rows)) is not None}
    assert found == {
        ("transformers", "tokens/s"): 100.0, ("torch.compile", "tokens/s"): 400.0, ("ours", "tokens/s"): 1200.0,
        ("transformers", "GB/s"): 250.0, ("torch.compile", "GB/s"): 1000.0, ("ours", "GB/s"): 3000.0, ("ours", "ms"): 0.76,
    }  # fmt: skip
    assert beside(rows[0] | {"case": "Llama-3.2-1B batch=1 prompt=32 new=128 mode=mega"}) == [], "another prompt is other work"
    untold = [f for f in figures() if f.alone]
    assert {f.value for f in untold} == {15.66, 18.52, 257.33, 51151, 43080, 2954}
    assert not any(f.measures_the_same({"op": "generate", "case": "Qwen2-7B batch=16 prompt=32 new=50 mode=graph"}) for f in untold)
    lines = ["".join(line) for f in untold for line in _figure_lines([f], rows)]
    assert sum("prompt length not told" in line for line in lines) == len(untold)


@pytest.mark.parametrize(("host_us", "gives_up"), [([5000.0, 6.0], False), ([5000.0, 5000.0], True)], ids=["held up once", "a loser"])
def test_a_config_that_the_host_held_up_is_timed_all_the_same(monkeypatch, host_us, gives_up):
    """With 15 compilers running, 1 eager call in 150 waits for the host; two in turn do not."""
    graph = types.SimpleNamespace(replay=lambda: None)
    measured = iter([*host_us, 60.0, 60.0, 60.0])
    monkeypatch.setattr(timer.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timer, "_elapsed_us", lambda run: next(measured))
    monkeypatch.setattr(timer, "_capture", lambda call, sets, calls: graph)
    found = timer.time_roughly(lambda x: None, [{"x": 1}, {"x": 2}], 10.0)
    assert found > 1000 if gives_up else found < 10


def test_input_sets_fit_in_memory_however_little_of_them_a_call_touches():
    made = []

    def make():
        made.append(torch.zeros(1 << 20, dtype=torch.uint8))
        return {"cache": made[-1], "scale": 1.0}

    assert len(input_sets(make, 1, 1 << 20, limit_bytes=5 << 20)) == 5
    assert len(made) == 5
    assert len(input_sets(make, 3 << 20, 1 << 20, limit_bytes=1 << 30)) == 2


def test_each_read_kernel_is_checked_by_itself():
    """Timed in any order: one of few blocks runs behind one of many."""
    out = torch.empty(4, dtype=torch.int32)
    reads = {"many": lambda: out.copy_(torch.tensor([2, 2, 2, 2])), "few": lambda: out[:2].fill_(4)}
    check_sums(reads, out, 8)
    with pytest.raises(RuntimeError, match="few summed 6, must be 8"):
        check_sums(reads | {"few": lambda: out[:2].fill_(3)}, out, 8)
