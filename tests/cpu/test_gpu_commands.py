"""GPU commands on a pretended GPU: all of tune, bench, learn and the tuner's bars, except the
times.
"""

import dataclasses
import importlib.util
import json
import re
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from pretend_gpu import pretend_gpu
from rich.console import Console
from tiny_models import tiny_model

from tilewright.bench import command, measure
from tilewright.bench.ceilings import Ceilings
from tilewright.bench.peers import Peer
from tilewright.bench.results import kernels, read
from tilewright.compile.ahead import Ahead
from tilewright.engine import suite
from tilewright.engine.keep_modes import keep
from tilewright.launch import Device, forget_plans, table
from tilewright.learn import command as learning, ladders
from tilewright.learn.ladder import Ladder
from tilewright.models import Loaded
from tilewright.ops import rms_norm
from tilewright.tune import raw, survey as surveying, workbench
from tilewright.tune.command import survey_command, tune_command
from tilewright.tune.store import Store

__all__ = ["pretend_gpu"]

ROOT = Path(__file__).resolve().parents[2]
PROBLEM = rms_norm.Problem(4, 256, torch.bfloat16)
CEILINGS = Ceilings(copy_gbs=4200.0, read_gbs=4600.0, tflops=780.0, launch_us=1.0)


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    monkeypatch.setattr(table, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr("tilewright.bench.timer.HOST_US", 1e9)
    monkeypatch.setattr(measure, "peers_of", lambda op, inputs: [])
    for room in (measure, workbench):
        monkeypatch.setattr(room, "input_sets", lambda make, *unused, **also: [make(), make()])
    for room in (command, learning):
        monkeypatch.setattr(room, "measure_ceilings", lambda where: CEILINGS)
    monkeypatch.setattr(command, "cases", lambda op, kind: [PROBLEM])
    forget_plans()
    yield
    forget_plans()


def test_tune_compiles_in_processes_times_checks_and_stores(pretend_gpu, tmp_path, capsys):
    shapes = tmp_path / "shapes.jsonl"
    shapes.write_text(json.dumps({"op": "rms_norm", "problem": table.plain(PROBLEM)}) + "\n")
    console = Console(width=300, highlight=False)
    assert tune_command(["rms_norm"], shapes=shapes, top=2, seconds=600, jobs=1, console=console) == 0
    out = capsys.readouterr().out
    assert "tuning for H200 (sm_90), cuda-tile" in out
    assert "1 problems in" in out
    assert out.count(" GB/s ") == 2
    (row,) = Store().rows()
    assert row.tried > 1
    configs = rms_norm.space(PROBLEM, pretend_gpu)
    assert rms_norm.DECISION.decide(PROBLEM, pretend_gpu)[1] == "user table"
    assert tune_command(["rms_norm"], shapes=shapes, console=console, jobs=1) == 0
    assert "1 of 1 problems are tuned already" in capsys.readouterr().out
    only = f"tile_m={configs[1].tile_m},tile_n={configs[1].tile_n}"
    assert tune_command(["rms_norm"], shapes=shapes, configs=only, seconds=0, console=console, jobs=1) == 0
    out = capsys.readouterr().out
    assert "nothing is kept" in out
    assert "out of time, 1 problems left" in out
    for names, case in ((["rms_norm"], "rows=nothing"), (["rope"], "")):  # 0, as if all were tuned
        with pytest.raises(ValueError, match=rf"the problems must be at least one of \[OP\] .*, got none, with --case '{case}'"):
            tune_command(names, shapes=shapes, case=case, console=console, jobs=1)


def test_bench_prints_lines_and_appends_rows(pretend_gpu, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    assert command.bench_command(["rms_norm"], json_file=file) == 0
    assert "rows=4 cols=256 bfloat16" in capsys.readouterr().out
    (row,) = map(json.loads, file.read_text().splitlines())
    assert row["source"] == "model"
    assert row["warm_us"] > 0
    assert command.bench_command(["rms_norm"], json_file=file, seconds=-1) == 0
    assert "out of time" in capsys.readouterr().out
    assert len(file.read_text().splitlines()) == 1


def test_drawn_problems_are_compiled_ahead_timed_and_judged_by_the_best_peer(pretend_gpu, tmp_path, monkeypatch, capsys):
    class Now(Ahead):
        def __init__(self, device):
            super().__init__(device, submit=lambda function, job: asked.append(job) or done)

    done, asked = Future(), []
    done.set_result(None)
    monkeypatch.setattr(command, "Ahead", Now)
    small = [rms_norm.Problem(rows, 96, torch.bfloat16) for rows in (3, 5, 7)]
    monkeypatch.setattr(command, "draw_all", lambda names, count, seed: [(rms_norm, problem) for problem in small[:count]])
    monkeypatch.setattr(measure, "peers_of", lambda op, inputs: [Peer("plain", lambda **inputs: rms_norm.reference(**inputs))])
    file = tmp_path / "rows.jsonl"
    assert command.bench_command(["rms_norm"], json_file=file, draw=2, draw_seeds=[4, 5]) == 0
    rows = read([file])
    assert [(row["problem"]["rows"], row["draw_seed"]) for row in rows] == [(3, 4), (5, 4), (3, 5), (5, 5)]
    assert asked
    out = capsys.readouterr().out
    assert "rms_norm: 4 cases, best peer over ours geomean" in out
    for phase in ("check", "inputs", "first call of plain", "timing", "planning", "waiting for our compiler", "other"):
        assert re.search(rf"took .*\b{phase} [0-9.]+", out), phase
    assert all(row["warm_us"] is None for row in rows), "warm times judge nothing"
    assert kernels(rows) == [], "tables of listed cases are made without them"

    def broken(x, *unused, **also):
        raise RuntimeError("CUDA error: too big")

    monkeypatch.setattr(rms_norm, "rms_norm", broken)
    assert command.bench_command(["rms_norm"], draw=1, draw_seeds=[4]) == 1
    assert "rms_norm rows=3 cols=96 bfloat16 | FAILED: RuntimeError: CUDA error: too big" in capsys.readouterr().out


def test_a_survey_times_many_configs_and_goes_on_where_it_was(pretend_gpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(surveying, "draw", lambda kind, count, seed: [PROBLEM] if seed == 1000 else [])
    monkeypatch.setattr(surveying, "MOST_CONFIGS", 4)
    console = Console(width=300, highlight=False)
    assert survey_command(["rms_norm"], folder=tmp_path / "raw", seconds=600, jobs=1, console=console) == 0
    assert "4 timings of 1 problems" in capsys.readouterr().out
    rows = raw.read(tmp_path / "raw", "H200", "rms_norm")
    assert [row.config for row in rows][:4] == [table.plain(config) for config in rms_norm.space(PROBLEM, pretend_gpu)[:4]]
    assert all(row.time_us > 0 and row.problem == table.plain(PROBLEM) for row in rows)
    assert survey_command(["rms_norm"], folder=tmp_path / "raw", seconds=600, jobs=1, console=console) == 0
    assert "0 timings" in capsys.readouterr().out


def test_the_decode_suite_has_a_row_for_each_mode_that_runs(pretend_gpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Device, "of", staticmethod(lambda tensor: Device.named("CPU")))
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    models = {name: tiny_model({"model_type": name}, torch.bfloat16, **sizes) for name in ("llama", "qwen2")}
    monkeypatch.setattr(suite, "load", lambda name, **unused: Loaded(models[name], None, f"random weights, config {name}"))
    monkeypatch.setattr(suite, "CASES", (suite.Case("llama", 3, 3, 64),))
    file = tmp_path / "rows.jsonl"
    assert suite.decode_command(json_file=file) == 0
    assert "decode llama batch=1 prompt=3 new=3 mode=mega" in capsys.readouterr().out
    eager, mega = read([file])
    assert [(row["op"], row["case"].split("mode=")[1]) for row in (eager, mega)] == [("decode", "eager"), ("decode", "mega")]
    assert mega["equal_tokens"] == {"transformers": 1.0, "tilewright eager": 1.0}
    assert mega["read_gbs"] == CEILINGS.read_gbs
    assert mega["read_pct"] == pytest.approx(100 * mega["gbs"] / mega["read_gbs"], abs=0.1)
    assert keep(file, tmp_path / "modes.jsonl") == 1  # what "auto" chooses from: not eager
    monkeypatch.setattr(suite, "CASES", (suite.Case("qwen2", 3, 3, 64),))
    monkeypatch.setattr(suite, "MODES", ("mega",))
    assert suite.decode_command(peers=False) == 0
    assert "mode=mega: not run (the model must be without biases" in capsys.readouterr().out
    monkeypatch.setattr(suite, "CASES", (suite.Case("llama", 3, 3, 64, "e4m3"),))
    assert suite.decode_command(json_file=file) == 0
    assert keep(file, tmp_path / "modes.jsonl") == 2
    rows = [json.loads(line) for line in (tmp_path / "modes.jsonl").read_text().splitlines()]
    assert sorted(str(row["weights"]) for row in rows) == ["None", "e4m3"]


def test_a_wrong_kernel_is_named_and_gets_no_row(pretend_gpu, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rms_norm, "rms_norm", lambda x, weight, **unused: x)
    file = tmp_path / "rows.jsonl"
    assert command.bench_command(["rms_norm"], json_file=file) == 1
    assert "WRONG, not timed" in capsys.readouterr().out
    assert not file.exists()


def test_learn_times_steps_beside_the_finished_op_and_plots(pretend_gpu, tmp_path, monkeypatch, capsys):
    (whole,) = ladders("attention")
    tiny = dataclasses.replace(whole.small, q_heads=1, kv_heads=1, seq_len=70)
    short = Ladder(whole.name, whole.op, tiny, tiny, whole.steps[-2:], whole.library)
    monkeypatch.setattr(learning, "ladders", lambda subject, seq_lens: (short,))
    plot, rows = tmp_path / "curve.png", tmp_path / "rows.jsonl"
    assert learning.learn_command("attention", seq_lens=[70], plot=plot, json_file=rows) == 0
    assert "ops.attention" in capsys.readouterr().out
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert len(rows.read_text().splitlines()) == 2


def test_the_tuners_bars_run(pretend_gpu, monkeypatch, capsys):
    for name in ("CUDA_TILE_CACHE_DIR", "TILEWRIGHT_CACHE_DIR"):  # the script sets them: put back afterwards
        monkeypatch.setenv(name, "")
    spec = importlib.util.spec_from_file_location("tuner_bars", ROOT / "benchmarks" / "tuner.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert len({str(config) for config in script.cold_space()}) == 72
    monkeypatch.setattr(script, "cases", lambda op, kind: [PROBLEM])
    script.main(["exhaustive", "rms_norm", "--problems", "1", "--jobs", "1"])
    assert "of 1 within 1.02 of the exhaustive best" in capsys.readouterr().out
