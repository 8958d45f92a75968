"""What an adversary did to the command line: files that do not run, options that mean nothing."""

import io
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from forked import program
from rich.console import Console
from shell import run
from transformers import AutoConfig, AutoModelForCausalLM

import tilewright
from tilewright import cli, command_line
from tilewright.command_line import terminal
from tilewright.compile.build import worker_pool
from tilewright.engine.mega.pack import decided
from tilewright.engine.mega.shape import schedule_of
from tilewright.engine.problems import of_engine
from tilewright.launch import Device
from tilewright.launch.console import plain_console, write
from tilewright.launch.files import replace_file
from tilewright.launch.names import nearest
from tilewright.launch.parent import spawned_pool
from tilewright.models import outline_of
from tilewright.ops.common.mx import mx_named
from tilewright.ops.common.weight_formats import format_named
from tilewright.testing import command, tiny_chat

NULL_BYTES = "SyntaxError" if sys.version_info >= (3, 11, 4) else "ValueError"  # of Python
HEAD = "import cuda.tile as ct\n@ct.kernel\ndef k(X): pass\n"


@pytest.mark.parametrize("verb", ["interpret", "compile"])
@pytest.mark.parametrize(
    ("code", "message"),
    [
        (b"def (:\n", "must run, got SyntaxError: invalid syntax"),
        (b"\0", f"must run, got {NULL_BYTES}: source code string cannot contain null bytes"),
        (b"x = '\xff'\n", "must run, got SyntaxError: (unicode error)"),
        (b"raise SystemExit(0)\n", ":1 must run, got SystemExit: 0"),
        (f"{HEAD}def example_k(): raise RuntimeError('boom')\n".encode(), ":4 must run, got RuntimeError: boom"),
        (f"{HEAD}def example_k():\n  exit(3)\n".encode(), ":5 must run, got SystemExit: 3"),
    ],
)
def test_a_file_that_does_not_run_is_one_line(verb: str, code: bytes, message: str, tmp_path: Path) -> None:
    """Its exit was the command's: 0, as if the kernel were right."""
    (tmp_path / "k.py").write_bytes(code)
    result = run(verb, f"{tmp_path / 'k.py'}:k")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {tmp_path / 'k.py'}")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("option", ["--batch", "--heads", "--head-dim", "--iterations"])
def test_a_size_of_0_is_no_default(option: str) -> None:
    result = run("learn", "attention", option, "0")
    assert result.exit_code == 2
    assert "greater than or equal to 1" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("verify", "rms_norm", "--device", "x"), "--device must be cpu, cuda or cuda:N, got 'x'"),
        (("verify", "rms_norm", "--fuzz", "0", "--device", "meta"), "--device must be cpu, cuda or cuda:N, got 'meta'"),
        (("verify", "rms_norm", "--device", "cuda:99"), "--device must name a GPU of this machine, which has "),
        (("verify", "rms_norm", "--fuzz", "0", "--case", "1"), "--case must be FAMILY.CASE, as in 12.0, got '1'"),
        (("verify", "rms_norm", "--fuzz", "0", "--case", "-1.0"), "--case must be FAMILY.CASE, as in 12.0, got '-1.0'"),
        *(((verb, "rms_norm"), f"error: {verb} needs a CUDA GPU: times of the interpreter say nothing") for verb in ("tune", "bench")),
        (("interpret", ""), "error: FILE.py:KERNEL must name a Python file that exists, got ''"),
        (("interpret", "README.md:k"), "error: FILE.py:KERNEL must name a Python file that exists, got 'README.md:k'"),
        (("demo", "--max-new-tokens", "0"), "Invalid value for '--max-new-tokens'"),
        (("tune", "--again", "--show"), "--again must come without --show"),
        (("verify", "--quick", "--fuzz", "0"), "--quick must come without --fuzz"),
        (("interpret", "k.py:k", "--block-order", "\u00b2"), "--block-order must be forward, reverse or a seed, got '\u00b2'"),
        (("learn", "attention", "--seq", "\u00b2"), "--seq must be lengths like 1024,2048, got '\u00b2'"),
        (("learn", "attention", "--seq", str(1 << 64)), f"seq must be 1 to 2**31 - 1, got {1 << 64}"),
        (("tune", "--pack", "p", "--raw", "nowhere"), "--raw must be a folder of raw times, as --survey makes them, got nowhere"),
        (("generate", "--model", "Llama-3.2-1B", "--prompt", "x", "--top-p", "0"), "--top-p must be above 0 and at most 1, got 0.0"),
        (("generate", "--model", "Llama-3.2-1B", "--prompt", "x", "--repetition-penalty", "0"), "--repetition-penalty must be positive, got 0.0"),
        (("serve", "Llama-3.2-1B", "--kv-dtype", "fp8", "--device", "cpu"), "--dtype must be bfloat16 or float16 with --kv-dtype fp8, got float32"),
        (("serve", "Llama-3.2-1B", "--kv-dtype", "int8", "--device", "cpu"), "--kv-dtype must be one of fp8, got 'int8'"),
        (("serve", "Llama-3.2-1B", "--device", "cpu", "--port", "70000"), "port must be 0 to 65535, got 70000"),
        (("serve", "Llama-3.2-1B", "--device", "cpu", "--max-requests", "0"), "max_requests must be at least 1, got 0"),
        (("difftest", "--schedule", "x"), "--schedule must be one of A100, "),
        (("difftest", "--position", "-1"), "Invalid value for '--position'"),
        (("difftest", "--position", str(1 << 20)), "Invalid value for '--position'"),
        (("generate", "--model", "Llama-3.2-1B", "--prompt", "x", "--device", "cpu", "--stop", ""), "stop must be texts that are not empty, got ''"),
        (("difftest", "--blocks", "-1"), "Invalid value for '--blocks'"),
        (("compile", "rms_norm", "--arch", ","), "arch must be one of sm_80 (A100), "),
        (("compile", "mega", "--arch", ","), "arch must be one of sm_80 (A100), "),
    ],
)
def test_an_option_that_means_nothing_is_refused(arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """difftest and serve built a whole model first."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("tilewright.models.command.load", lambda *given, **options: pytest.fail("made weights"))
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


MEANT = {
    ("verify", "rms_nrom"): "op must be rms_norm (did you mean that?) or one of ",
    ("compile", "RMSNorm"): "op must be rms_norm (did you mean that?) or one of ",
    ("bench", "--suite", "decod"): "--suite must be decode (did you mean that?) or one of playbook, llm, seeds, decode, got 'decod'",
    ("generate", "--model", "x", "--prompt", "x", "--engine", "grpah"): "--engine must be graph (did you mean that?) or one of auto, mega,",
    ("generate", "--model", "llama3.1-8b", "--prompt", "x"): "model must be Llama-3.1-8B (did you mean that?), a folder with config.json",
    (
        "generate",
        "--model",
        "Llama-3.2-1B",
        "--prompt",
        "x",
        "--weights",
        "int-128",
    ): "--weights must be int4-128 (did you mean that?) or one of int4-128,",
    ("quantize", "x", "--format", "int-128", "-o", "y"): "--format must be int4-128 (did you mean that?) or one of int4-128,",
    ("generate", "--model", "Llama-3.2-1B", "--prompt", "x", "--dtype", "bfloat"): "--dtype must be bfloat16 (did you mean that?) or one of float32,",
    ("learn", "atention"): "subject must be attention (did you mean that?) or one of attention, gemm, decode, got 'atention'",
    ("verify", "zzz"): "op must be one of ",
}


@pytest.mark.parametrize("arguments", MEANT)
def test_a_name_that_is_none_is_told_the_nearest_first(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_config", lambda *given, **options: pytest.fail("made weights"))
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith(f"error: {MEANT[arguments]}")
    assert not result.stdout


def test_a_library_tells_the_nearest_too() -> None:
    for call, message in (
        (lambda: of_engine("Qwen2-7b", Device.named("H200")), "model must be Qwen2-7B \\(did you mean that"),
        (lambda: Device.named("h100"), "device must be H100 \\(did you mean that"),
        (lambda: format_named("int4"), "weight_format must be int4-128 \\(did you mean that"),
        (lambda: mx_named("mxfp-8"), "mx_format must be mxfp8 \\(did you mean that"),
    ):
        with pytest.raises((KeyError, ValueError), match=message):
            call()


def test_an_enormous_name_is_compared_in_no_time() -> None:
    """difflib's time grows with the square of a text."""
    began = time.process_time()
    assert nearest("rms_norm" * 1_000_000, ["rms_norm", "rope"]) is None
    assert nearest("", []) is None
    assert time.process_time() - began < 1


def test_compilers_hear_no_ctrl_c_before_they_are_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """While their server imported torch, Ctrl-C made it print a traceback beside `stopped`."""
    found, before = [], signal.getsignal(signal.SIGINT)
    monkeypatch.setattr("multiprocessing.forkserver.ensure_running", lambda: found.append(signal.getsignal(signal.SIGINT)))
    worker_pool(1).shutdown()
    assert found == [signal.SIG_IGN]
    assert signal.getsignal(signal.SIGINT) is before


def test_compilers_are_started_before_ctrl_c_stops_their_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each printed a traceback once it found its parent gone."""
    started = []

    def submit(pool, call):
        os.kill(os.getpid(), signal.SIGINT)
        started.append(call)

    monkeypatch.setattr("concurrent.futures.ProcessPoolExecutor.submit", submit)
    monkeypatch.setattr("multiprocessing.forkserver.ensure_running", lambda: None)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with worker_pool(1) as pool, pytest.raises(KeyboardInterrupt):
            pool.submit(os.getpid)
        assert started == [os.getpid]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_the_processes_of_a_fuzz_at_once_and_they_say_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """While they imported torch, each printed a traceback beside `stopped`."""

    def interrupted() -> None:
        with spawned_pool(1) as pool:
            pool.submit(time.sleep, 600)
            (child,) = multiprocessing.active_children()
            assert child.pid is not None
            os.kill(child.pid, signal.SIGINT)  # a terminal tells all of its processes
            time.sleep(0.5)
            assert child.is_alive()
            raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not multiprocessing.active_children()
    assert time.monotonic() - began < 60
    assert "Traceback" not in capfd.readouterr().err


INTERRUPTED = """
import os, signal, sys
class AtImport:
    def find_spec(self, name, *more):
        if name == sys.argv[2]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, AtImport())
sys.modules.pop(sys.argv[2], None)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv[0] = sys.argv[1]
import tilewright
"""


@pytest.mark.parametrize(
    ("program", "module", "code", "said"),
    [
        ("/bin/tilewright", "torch", 130, r"stopped\n"),
        ("/bin/tilewright", "typing", 130, r"stopped\n"),  # the first
        ("/bin/other", "torch", -2, r"Traceback(.|\n)*KeyboardInterrupt\n"),
    ],
)
def test_ctrl_c_stops_the_command_line_while_it_imports_others(program, module, code, said) -> None:
    """It printed a traceback. A program that imports the package has its own way."""
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED, program, module], capture_output=True, text=True)
    assert ended.returncode == code
    assert re.fullmatch(said, ended.stderr)


@pytest.mark.parametrize(
    ("redirection", "code", "said"),
    [
        (">/dev/full", 2, "error: [Errno 28] No space left on device\n"),  # a traceback
        ("2>&- >&- <&-", 0, ""),
    ],
)
def test_output_that_nothing_takes_is_no_failure(redirection: str, code: int, said: str) -> None:
    done = subprocess.run(["bash", "-c", f"{sys.executable} -m tilewright --help {redirection}"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", said)


@pytest.fixture
def unread() -> Iterator[int]:
    """The end of a pipe that nobody reads any more."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


def test_output_that_nobody_takes_is_no_failure(unread: int) -> None:
    """It was 1, as if something were wrong."""
    assert program(cli.main, "/bin/tilewright", "--help", out=unread) == (141, "", "")


@pytest.mark.parametrize("columns", ["0", ""])
def test_a_width_that_nobody_knows_hides_no_output(columns: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """rich printed nothing, and the exit code was 0."""
    monkeypatch.setenv("COLUMNS", columns)

    def run_it() -> None:
        with terminal():
            Console().print("an answer")

    assert program(run_it, "/bin/tilewright").stdout == "an answer\n"


def test_a_command_whose_reader_goes_ends_without_a_word(unread: int) -> None:
    """rich ends the process with 1; print raised, which was one line and 2."""
    for call in (lambda: print("x" * 100_000), lambda: Console().print("x " * 100_000)):

        def run_it(call: Callable[[], None] = call) -> None:
            with terminal():
                command_line.command(call)()

        assert program(run_it, "/bin/tilewright", out=unread) == (141, "", "")


def test_a_json_file_that_cannot_be_written_is_said_before_anything_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "verify_command", lambda *_, **__: pytest.fail("it ran"))
    (tmp_path / "file").write_text("")
    os.mkfifo(fifo := tmp_path / "fifo")
    unwritable = (tmp_path / "file" / "v.json", "/proc/v.json")  # root cannot write there either
    kinds = ((tmp_path, "a folder"), (fifo, "a FIFO"), ("/dev/null", "a device"))  # root would replace the last one
    for name, was in (*((name, "one that cannot be written") for name in unwritable), *kinds):
        result = run("verify", "--json", name)
        assert result.stderr == f"error: --json must be a file, or - for stdout, got {str(name)!r}, {was}\n"
        assert result.exit_code == 2
    with pytest.raises(OSError, match="fifo must be a regular file, got a FIFO"):
        replace_file(fifo, b"")
    assert run("tune", "--export", fifo).stderr == f"error: {fifo} must be a regular file, got a FIFO\n"  # it waited for a reader


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("temperature", "inf", "temperature"),
        ("repetition-penalty", "inf", "repetition_penalty"),
        ("seed", str(2**63), "seed"),
        ("top-k", str(2**31), "top_k"),
        ("top-p", "0", "--top-p"),
    ],
)
def test_a_draw_is_checked_whoever_draws(option: str, value: str, named: str, tmp_path: Path) -> None:
    """transformers divided by an infinite temperature, and the engine refused it."""
    tiny_chat.write(tmp_path)
    for engine in ("eager", "transformers"):
        result = run(*("generate", "--model", tmp_path, "--prompt", "x", "--device", "cpu", "--engine", engine, f"--{option}", value))
        assert result.exit_code == 2, result.output
        assert result.stderr.splitlines()[-1].startswith(f"error: {named} must be ")


def test_a_text_that_is_no_utf_8_and_a_tiny_temperature(tmp_path: Path) -> None:
    """The first was named by a type of the tokenizer. transformers divided by the second, and drew
    from infinities.
    """
    tiny_chat.write(tmp_path)
    base = ("generate", "--model", tmp_path, "--device", "cpu", "--max-new-tokens", 2, "--json", "-")
    result = run(*base, "--prompt", "\udcff")
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (2, r"error: prompt must be UTF-8 text, got '\udcff'")
    coldest, likeliest = (json.loads(run(*base, "--prompt", "x", "--temperature", each).stdout) for each in (1e-300, 0))
    assert coldest["ours"]["tokens"] == likeliest["ours"]["tokens"]


def test_texts_are_printed_letter_for_letter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """rich read styles and pictures in paths and in answers, and made spaces of tabs."""
    odd, text = tmp_path / "[/b]:a:", "d[i:b:j]\t[red]"
    tiny_chat.write(odd)
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(odd))
    *rows, _, last = run("tune", "--show", "argmax").stdout.splitlines()
    assert last.endswith(f"yours are in {odd / 'tuned.json'}")
    assert {line.count("\t") for line in rows} == {9}
    (odd / "m.py").write_text(HEAD.replace("def k", "def a") + "def example_a(): return (1,), (1.0,)\n")
    assert f"{odd / 'm.py'}:a: all blocks" in run("interpret", f"{odd / 'm.py'}:a").stdout
    row = {"op": "rms_norm", "case": "rows=1", "gpu": "H200", "date": "2026-11-30", "problem": {}}
    (odd / "rows").write_text(json.dumps(row))
    assert f"{odd}/out/index.html" in run("report", odd / "rows", "-o", odd / "out").stdout
    (odd / "prompts").write_text(text)
    for how in (("--prompt", text), ("--prompt-file", odd / "prompts", "--batch", 1)):
        assert f"> {text}\n" in run("generate", "--model", odd, "--device", "cpu", "--max-new-tokens", 1, *how).stdout
    stream = io.StringIO()
    write(plain_console(file=stream), f"{text}\r")  # as answers are
    assert stream.getvalue() == f"{text}\r"


def test_commands_print_on_no_console_of_their_own() -> None:
    own = re.compile(r"(?<!plain_)\bConsole\(")
    files = [path for path in Path(tilewright.__path__[0]).rglob("*.py") if path.parts[-2:] != ("launch", "console.py")]
    assert not [path.name for path in files if own.search(path.read_text())]


@pytest.mark.parametrize("family", ["gpt2", "opt", "gptj"])
def test_a_text_beyond_the_models_positions_is_refused(family: str, tmp_path: Path) -> None:
    """It was an IndexError after half of an answer, and on a GPU an assertion of the device."""
    tiny_chat.write(tmp_path / "m")  # its tokenizer
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 16, "vocab_size": 97}
    more = {"opt": {"ffn_dim": 48, "word_embed_proj_dim": 32}, "gptj": {"rotary_dim": 4}}.get(family, {})
    config = AutoConfig.for_model(family, **sizes, **more, bos_token_id=1, eos_token_id=None)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "m")
    (tmp_path / "prompts").write_text("hello\nhi\n")
    base = ("generate", "--model", tmp_path / "m", "--device", "cpu", "--max-new-tokens")
    for how in (("--prompt", "hello"), ("--prompt-file", tmp_path / "prompts", "--batch", 2), ("--prompt-tokens", 5)):
        result = run(*base, 13, *how)
        said = "error: a prompt with its answer must be at most 17 tokens: all but the last need one of the model's 16 positions, got 5 + 13"
        assert (result.exit_code, result.stderr.splitlines()[-1]) == (2, said)
    assert run(*base, 12, "--prompt", "hello").exit_code == 0


def test_a_prompt_that_fits_no_memory_is_one_line(tmp_path: Path) -> None:
    """torch's allocator of a CPU raises a RuntimeError, which was a traceback."""
    tiny_chat.write(tmp_path)
    result = run("generate", "--model", tmp_path, "--device", "cpu", "--prompt-tokens", 10**14)
    assert result.exit_code == 2, result.output
    assert re.search(r"^error: .*can't allocate memory.*\. Lower --batch, --prompt-tokens", result.stderr.splitlines()[-1])


def test_ctrl_c_says_so_until_a_command_begins() -> None:
    """Between its import and its function a command ended with 130, and without a word."""
    code = (
        "import os, signal, sys\nsignal.signal(signal.SIGINT, signal.default_int_handler)\nsys.argv = ['/bin/tilewright', 'doctor']\n"
        "from tilewright import cli\nfrom typer.main import TyperGroup\nmain = TyperGroup.main\n"
        "TyperGroup.main = lambda *given, **more: (os.kill(os.getpid(), signal.SIGINT), main(*given, **more))\ncli.main()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, "stopped\n")


def test_blocks_of_a_difftest_are_counted_before_they_are_planned() -> None:
    """A schedule of 2**31 blocks was made first, block by block."""
    dims = decided(outline_of("Llama-3.2-1B", dtype=torch.bfloat16), torch.device("cpu"))
    for blocks in (-1, 255, 2**31, 2**70):
        with pytest.raises(ValueError, match=f"blocks must be 1 to 254, as many as a sum's count holds, got {blocks}"):
            schedule_of(dims, Device.named("CPU"), blocks)
