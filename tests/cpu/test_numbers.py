"""What the pages say is what the rows say: ten cells by another path, and each row's command runs
as it is written.
"""

import argparse
import functools
import json
import os
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np
import pytest
import typer

from tilewright import ops
from tilewright.cli import app
from tilewright.engine.measure import Run, shares
from tilewright.testing import op_name

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "benchmarks" / "results").glob("*.jsonl"))
LINES = [json.loads(line) for file in FILES for line in file.read_text().splitlines()]


def cells(page: str, first: str, column: str) -> str:
    """The cell of a column in the line of a table that begins with `first`."""
    lines = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in (ROOT / page).read_text().splitlines() if line.startswith("|")]
    at = next(i for i, line in enumerate(lines) if line[0] == first and column in head(lines, i))
    return lines[at][head(lines, at).index(column)]


def head(lines: list[list[str]], at: int) -> list[str]:
    """The first line of the table that holds line `at`."""
    rules = [i for i in range(at) if set("".join(lines[i])) <= set("-: ")]
    return lines[rules[-1] - 1] if rules else []


def newest(op: str) -> list[dict[str, Any]]:
    """An op's listed cases: of each the last row of a machine that had the fastest peer."""
    own, last = {op_name(module) for module in ops.ALL}, dict[str, dict[str, Any]]()
    for row in LINES:
        if row["op"] == op and row.get("draw_seed") is None:
            us = {peer: t for peer, t in last.get(row["case"], {}).get("peer_us", {}).items() if peer not in own and op in own}
            if not us or {peer for peer, t in us.items() if t == min(us.values())} & {*row["peer_us"], *row["absent"]}:
                last[row["case"]] = row
    return list(last.values())


def against_fastest(op: str) -> "np.ndarray[Any, Any]":
    """Time of the fastest peer over ours, from times: the pages take the stored ratios."""
    own = {op_name(module) for module in ops.ALL}
    return np.array([min(us) / r["time_us"] for r in newest(op) if (us := [t for peer, t in r["peer_us"].items() if peer not in own])])


def fastest(op: str, what: Callable[[Any], float]) -> float:
    return float(what(against_fastest(op)))


def generated(case: str, mode: str, name: str) -> float:
    (found,) = [r for r in newest("generate") if r["case"] == f"{case} mode={mode}"]
    return float(found[name])


QWEN = "Qwen2-7B batch=16 prompt=32 new=50"
GEOMEAN = "fastest peer over ours, geomean"
CELLS = [
    ("README.md", "bmm", GEOMEAN, lambda: f"**{fastest('bmm', geometric_mean):.2f}x**"),
    ("README.md", "softmax", "worst case", lambda: f"{fastest('softmax', np.min):.2f}x"),
    ("README.md", "mla_decode", GEOMEAN, lambda: f"**{fastest('mla_decode', geometric_mean):.2f}x**"),
    ("README.md", "attention", "cases compared", lambda: f"{len(against_fastest('attention'))} of {len(newest('attention'))}"),
    ("README.md", "rms_norm", "of the roof, median", lambda: f"{np.median([r['roof_pct'] for r in newest('rms_norm')]):.0f} %"),
    ("docs/bench.md", "embedding", GEOMEAN, lambda: f"**{fastest('embedding', geometric_mean):.2f}x**"),
    ("docs/bench.md", "argmax", "best", lambda: f"{fastest('argmax', np.max):.2f}x"),
    ("docs/bench.md", "silu_mul", "best rate", lambda: f"{max(r['gbs'] for r in newest('silu_mul')) / 1e3:.2f} TB/s"),
    ("docs/bench.md", "quantized_matmul", GEOMEAN, lambda: f"**{fastest('quantized_matmul', geometric_mean):.2f}x**"),
    ("docs/engine.md", QWEN, "tokens/s", lambda: f"{generated(QWEN, 'eager', 'tokens_per_s'):.0f}"),
]


@pytest.mark.parametrize(("page", "line", "column", "expected"), CELLS, ids=[f"{page} {line} {column}" for page, line, column, _ in CELLS])
def test_a_cell_is_what_the_rows_say(page: str, line: str, column: str, expected: Callable[[], str]) -> None:
    assert cells(page, line, column) == expected()


def steps(**environ: str) -> dict[str, tuple[int, list[str]]]:
    """Of benchmarks/all.sh: each step's seconds and command."""
    listed = subprocess.run(
        [ROOT / "benchmarks" / "all.sh"], env=os.environ | {"LIST": "1", "GPU": "h200"} | environ, capture_output=True, text=True, check=True
    )
    parts = [line.split(maxsplit=2) for line in listed.stdout.splitlines()]
    return {name.rstrip(":"): (int(seconds), shlex.split(command)) for seconds, name, command in parts}


def test_everything_is_measured_again_in_25_minutes_of_one_gpu() -> None:
    found = steps(GPUS="1")
    assert sum(seconds for seconds, _ in found.values()) <= 25 * 60
    benched = [word for _, command in found.values() for word in command if command[:2] == ["tilewright", "bench"]]
    assert {op_name(op) for op in ops.ALL} <= set(benched), "every op"
    assert list(steps(GPUS="4")) == ["two-qwen", "two-llama", "two-deepseek", "two-qwen-nccl", "two-tests", "four-qwen", *found]


def test_a_step_that_ended_is_not_run_again_and_no_row_is_lost(tmp_path: Path) -> None:
    """With programs that write a row and, the first time, fail in the middle of the playbook."""
    for name in ("tilewright", "python"):
        lines = ["#!/bin/bash", f'echo "$*" >> {tmp_path}/ran', "file=${@: -1}", '[[ $file == *.jsonl ]] && echo "{}" >> "$file"']
        lines += [f'[[ "$*" == *playbook* && ! -e {tmp_path}/again ]] && exit 1', "exit 0"]
        (tmp_path / name).write_text("\n".join(lines))
        (tmp_path / name).chmod(0o755)
    environ = os.environ | {"GPU": "h200", "GPUS": "1", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    run = functools.partial(
        subprocess.run, [ROOT / "benchmarks" / "all.sh", tmp_path / "rows"], env=environ, capture_output=True, text=True, check=False
    )
    names = list(steps(GPUS="1"))
    first = run()
    assert first.returncode == 1
    assert "playbook ended with exit code 1; it is run again at the next start" in first.stderr
    assert len((tmp_path / "ran").read_text().splitlines()) == len(names)
    (tmp_path / "again").touch()
    assert run().returncode == 0
    assert (tmp_path / "ran").read_text().splitlines()[len(names) :] == [
        " ".join(["bench", "--suite", "playbook", "--seconds", "145", "--json", f"{tmp_path}/rows/.all-h200/playbook.jsonl"])
    ]
    (rows,) = (tmp_path / "rows").glob("*-h200-all.jsonl")
    written = sum("FILE" in command for _, command in steps(GPUS="1").values())
    assert rows.read_text() == "{}\n" * (written + 1), "that of the run that failed too"


COMMANDS = {row["command"] for row in LINES} | {shlex.join(command) for _, command in steps(GPUS="4").values() if "pytest" not in command}


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_the_command_of_a_row_is_one_that_runs(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the parser of the command line, or of the script; those of benchmarks/all.sh too."""
    first, *words = shlex.split(command)
    if first == "tilewright":
        verbs: Any = typer.main.get_command(app)
        verb = verbs.commands[words[0]]
        verb.make_context(words[0], words[1:])
        return
    assert first == "python"
    parse, parse_known = argparse.ArgumentParser.parse_args, argparse.ArgumentParser.parse_known_args

    def parsed(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known)
        parse(self, *args, **kwargs)
        raise InterruptedError

    def parsed_known(self: argparse.ArgumentParser, *args: Any) -> None:  # the rest are options of tilewright serve
        verbs: Any = typer.main.get_command(app)
        verbs.commands["serve"].make_context("serve", ["MODEL", *parse_known(self, *args)[1]])
        raise InterruptedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parsed_known)
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    with pytest.raises(InterruptedError):
        runpy.run_path(str(ROOT / words[0]), run_name="__main__")


def test_time_in_which_kernels_overlap_counts_once() -> None:
    found = shares([("norm", 0.0, 4000.0), ("matmul", 1000.0, 7000.0), ("copy", 2000.0, 3000.0), ("matmul", 9000.0, 10000.0)])
    assert [(k.name, k.calls, k.cuda_ms) for k in found] == [("norm", 1, 4.0), ("matmul", 2, 4.0), ("copy", 1, 0.0)]
    run = Run("ours", [[1]], 0.01, 0.001, [0.001, 0.002, 0.004, 0.008], 0, found)
    assert run.cuda_ms == 8.0, "not the 12 ms of the launches together"
    assert run.step_ms(50) == pytest.approx(3.0), "of an even count the mean of the middle two"
