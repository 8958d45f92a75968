"""The command line: options reach their functions, errors are one line, output is text or JSON."""

import io
import json
import math
import runpy
import sys
from pathlib import Path

import pytest
import torch
from forked import program
from rich.console import Console
from shell import folder as folder, run

import tilewright
import tilewright.bench.command
import tilewright.compile.command
import tilewright.doctor
import tilewright.engine.suite
import tilewright.testing.command
import tilewright.tune.command
from tilewright.cli import app
from tilewright.engine.problems import of_all, of_engine
from tilewright.models.command import device_and_dtype


def test_help_of_every_verb() -> None:
    assert run("--help").exit_code == 0
    for name in (command.name for command in app.registered_commands):
        result = run(name, "--help")
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("generate", "--model", "nowhere", "--prompt", "x"), "error: model must be a folder with config.json"),
        (("generate", "--model", "nowhere"), "error: exactly one of --prompt, --prompt-file and --prompt-tokens must be given, got none"),
        (("generate", "--model", "nowhere", "--prompt", ""), "error: --prompt must be a text that is not empty, got '': give one, or a file by"),
        (
            ("generate", "--model", "nowhere", "--prompt", "x", "--prompt-tokens", "4"),
            "error: exactly one of --prompt, --prompt-file and --prompt-tokens must be given, got --prompt and --prompt-tokens",
        ),
        (("generate", "--model", "x", "--prompt", "x", "--batch", "2"), "error: --batch must come with --prompt-file, one prompt per line, or"),
        (
            ("generate", "--model", "nowhere", "--prompt-file", "/dev/null"),
            "error: --prompt-file: /dev/null must be a regular file, got a device; - reads",
        ),
        (("generate", "--model", "nowhere", "--prompt-file", sys.executable), "error: --prompt-file must be UTF-8 text, got"),
        (("generate", "--model", "x", "--prompt", "x", "--engine", "fast"), "error: --engine must be one of auto, mega, graph, eager, tr"),
        (("generate", "--model", "x", "--prompt", "x", "--engine", "graph", "--device", "cpu"), "error: --engine must be eager or transformers on a"),
        (("generate", "--model", "x", "--prompt-tokens", "4", "--compiled"), "error: --compiled must come with --compare"),
        (("generate", "--model", "x", "--prompt", "x", "--tp", "2"), "error: --engine must be graph or eager with --tp, got 'transformers'"),
        (("generate", "--model", "x", "--prompt", "x", "--tp", "2", "--engine", "eager", "--compare"), "error: --compare must come with --prompt-t"),
        (("generate", "--model", "x", "--prompt", "x", "--tp", "2", "--engine", "eager", "--device", "cuda:0"), "error: --device must be cuda or"),
        (("generate", "--model", "x", "--prompt", "x", "--draft", "y"), "error: --draft must come with --speculate of at least 1"),
        (("generate", "--model", "x", "--prompt", "x", "--speculate", "2"), "error: --speculate must come with --engine auto, graph or eager"),
        (("generate", "--model", "x", "--prompt", "x", "--nccl"), "error: --nccl must come with --tp 2 or more"),
        (("generate", "--model", "nowhere", "--prompt-file", "absent.txt"), "error: absent.txt cannot be used: no such file or directory"),
        (("demo", "--device", "tpu"), "error: --device must be cpu, cuda or cuda:N, got 'tpu'"),
        (("demo", "--dtype", "int3", "--device", "cpu"), "error: --dtype must be one of float32, bfloat16, float16, got 'int3'"),
        (("verify", "no_such_op", "--device", "cpu"), "error: op must be one of"),
    ],
)
def test_an_error_is_one_line_and_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(message)
    assert result.stderr.count("\n") == 1


def test_what_the_megakernel_does_not_run_is_refused_before_weights_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tilewright.models.command, "load", lambda *given, **options: pytest.fail("made weights"))
    result = run("generate", "--model", "Qwen2-7B", "--prompt-tokens", 4, "--engine", "mega", "--device", "cpu", "--dtype", "bfloat16")
    assert result.exit_code == 2
    assert result.stderr == 'error: the model must be without biases with mode="mega", got qwen2\n'


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_an_error() -> None:
    result = run("demo", "--device", "cuda")
    assert result.exit_code == 2
    assert result.stderr == "error: --device must name a GPU of this machine, which has 0, got 'cuda'\n"


def test_traceback_is_shown_on_request() -> None:
    result = run("--traceback", "generate", "--model", "nowhere", "--prompt", "x", "--device", "cpu")
    assert isinstance(result.exception, ValueError)


def test_a_full_gpu_is_one_line_that_says_what_to_lower(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tilewright.engine.command

    def full(*_: object, **__: object) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore")

    monkeypatch.setattr(tilewright.engine.command, "measure_command", full)
    result = run("generate", "--model", folder, "--prompt-tokens", 5, "--device", "cpu")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: CUDA out of memory. Tried to allocate 20.00 GiB. Lower --batch")
    assert result.stderr.count("\n") == 1


def test_unknown_options_and_verbs_exit_with_2() -> None:
    assert run("generate").exit_code == 2
    assert run("bench", "--no-such-option").exit_code == 2
    assert run("no_such_verb").exit_code == 2
    assert run("compile", "--jobs", "0").exit_code == 2


@pytest.mark.parametrize(
    ("verb", "module", "arguments", "passed"),
    [
        (
            "bench",
            tilewright.bench.command,
            ("rope", "--json", "out.jsonl", "--case", "4096", "--no-peers", "--device", "cuda:1"),
            (
                (["rope"],),
                {
                    "json_file": Path("out.jsonl"),
                    "case": "4096",
                    "suite": "",
                    "draw": 0,
                    "draw_seeds": (),
                    "peers": False,
                    "defaults": False,
                    "jobs": 1,
                    "seconds": math.inf,
                    "device": "cuda:1",
                },
            ),
        ),
        (
            "verify",
            tilewright.testing.command,
            ("rope", "matmul", "--quick", "--json", "v.json"),
            ((["rope", "matmul"],), {"quick": True, "json_file": Path("v.json"), "device": ""}),
        ),
        (
            "compile",
            tilewright.compile.command,
            ("--arch", "sm_90,sm_121", "--defaults", "--jobs", "3"),
            (([],), {"arch": "sm_90,sm_121", "json_file": None, "defaults": True, "jobs": 3}),
        ),
        ("doctor", tilewright.doctor, ("--json", "d.json"), ((), {"json_file": Path("d.json")})),
    ],
)
def test_options_reach_the_function_of_the_room(monkeypatch: pytest.MonkeyPatch, verb: str, module, arguments, passed) -> None:
    calls = []

    def command(*args: object, **options: object) -> int:
        calls.append((tuple([] if a is None else a for a in args), options))
        return 3

    monkeypatch.setattr(module, f"{verb}_command", command)
    assert run(verb, *arguments).exit_code == 3
    assert calls == [passed]


def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    def command(*args: object, **options: object) -> int:
        import matplotlib  # noqa: F401

    monkeypatch.setattr(tilewright.bench.command, "bench_command", command)
    result = run("bench")
    assert result.exit_code == 2
    assert "pip install 'tilewright[bench]'" in result.output


def test_a_gpu_without_a_number_is_the_first(monkeypatch):
    """torch.cuda.set_device takes no device without an index."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name in ("", "cuda", "cuda:0"):
        assert device_and_dtype(name, "") == (torch.device("cuda", 0), torch.bfloat16)
    assert [device.index for device in chosen] == [0, 0, 0]


def test_suites_of_the_engine_come_from_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bench` and `tune` know no engine: its problems and its own suite are handed to them here."""
    calls = []
    for module, name in (
        (tilewright.bench.command, "bench_command"),
        (tilewright.engine.suite, "decode_command"),
        (tilewright.tune.command, "tune_command"),
    ):
        monkeypatch.setattr(module, name, lambda *args, name=name, **options: calls.append((name, options)) or 0)
    assert run("bench", "--suite", "llm", "--defaults").exit_code == 0
    assert run("bench", "--suite", "decode", "--case", "1B", "--no-peers").exit_code == 0
    assert run("tune", "--model", "Llama-3.1-8B").exit_code == 0
    (llm, llm_how), (decode, decode_how), (tune, tune_how) = calls
    assert (llm, decode, tune) == ("bench_command", "decode_command", "tune_command")
    assert llm_how["problems"] is of_all
    assert llm_how["defaults"]
    assert (decode_how["case"], decode_how["peers"], decode_how["device"]) == ("1B", False, "cuda")
    assert (tune_how["problems"].func, tune_how["problems"].args) == (of_engine, ("Llama-3.1-8B",))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("tune", "--show", "--survey"), "at most one of --show, --export, --import, --prune, --survey, --pack and --fit must be given"),
        (("tune", "--shapes", "F", "--show"), "--shapes must come without --show"),
        (("compile", "F.py:K", "--defaults"), "--defaults must come with ops"),
        (("compile", "F.py:K", "--jobs", "2"), "--jobs must come with ops or mega"),
        (("tune", "--processes", "2"), "--processes must come with --survey"),
        (("tune", "--raw", "folder"), "--raw must come with --survey, --pack or --fit"),
        (("bench", "--suite", "all"), "--suite must be one of playbook, llm, seeds, decode, got 'all'"),
        (("bench", "--suite", "decode", "--draw", "3"), "--draw and --seed must come together, and without --suite"),
        (("bench", "--draw", "3"), "--draw and --seed must come together, and without --suite"),
        (("bench", "--suite", "decode", "--jobs", "2"), "--jobs must come without --suite decode"),
        (("bench", "--draw", "3", "--seed", "1000"), "--seed must not be one of 1000 to 2999"),
    ],
)
def test_options_that_exclude_each_other_are_refused(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output


# ------------------------------------------------------------------ what all verbs have in common
def test_the_package_is_a_program_with_versions_and_help(monkeypatch: pytest.MonkeyPatch) -> None:
    done = program(lambda: runpy.run_module("tilewright", run_name="__main__"), "tilewright", "--version")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"tilewright {tilewright.__version__}, cuda-tile 1.")
    assert "Exit codes: 0 fine; 1 something is wrong; 2 it cannot run" in run("-h").output
    assert run("verify", "-h").exit_code == 0
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")  # else that of the parent process, which may be none
    assert "complete" in run("--show-completion", "bash").output.lower()


def test_json_goes_to_a_file_or_to_stdout_with_the_text_on_stderr(tmp_path: Path) -> None:
    arguments = ("verify", "merge_states", "--quick", "--device", "cpu", "--json")
    result = run(*arguments, tmp_path / "new" / "v.json")
    assert result.exit_code == 0, result.output
    assert "merge_states" in result.stdout
    whole = json.loads((tmp_path / "new" / "v.json").read_text())
    result = run(*arguments, "-")
    assert json.loads(result.stdout)["ops"] == whole["ops"]
    assert "merge_states" in result.stderr


def test_ctrl_c_keeps_what_is_done_as_valid_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check, count = tilewright.testing.command.check_op, []

    def stopped(op, *rest):
        if op.__name__.endswith("merge_states"):
            raise KeyboardInterrupt
        count.append(op)
        return check(op, *rest)

    monkeypatch.setattr(tilewright.testing.command, "check_op", stopped)
    result = run("verify", "embedding", "merge_states", "--quick", "--device", "cpu", "--json", tmp_path / "v.json")
    assert (result.exit_code, result.stderr) == (130, "stopped\n")
    assert [line["op"] for line in json.loads((tmp_path / "v.json").read_text())["ops"]] == ["embedding"]
    monkeypatch.setattr(tilewright.compile.command, "compile_ops", lambda *_, **__: stopped(tilewright.ops.merge_states))
    result = run("compile", "merge_states", "--json", tmp_path / "c.json")
    assert result.exit_code == 130
    assert json.loads((tmp_path / "c.json").read_text())["stopped"]


def test_long_work_says_how_far_it_is_where_nobody_sees_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    lines = tilewright.compile.command.Lines(Console(file=out))
    lines.say("compiled 1 of 9")
    monkeypatch.setattr(tilewright.compile.command, "EVERY_S", 0.0)
    lines.say("compiled 2 of 9")
    assert out.getvalue() == "compiled 2 of 9\n"
