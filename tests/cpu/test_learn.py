"""The ladders: every step is right and differs from the one before; the command's output."""

import dataclasses
import json
from itertools import pairwise
from textwrap import indent

import pytest
import torch
from typer.testing import CliRunner

from tilewright import interpret
from tilewright.bench.ceilings import Ceilings
from tilewright.bench.published import figures
from tilewright.bench.report import Measured, make_row
from tilewright.bench.timer import Timing
from tilewright.cli import app
from tilewright.compile import Compiled, Resources, compile_launches
from tilewright.launch import Device, decision_of, traced
from tilewright.learn import SEQ_LENS, command, ladders
from tilewright.learn.attention import STEPS, Config, Problem, attention
from tilewright.learn.command import learn_command
from tilewright.ops import attention as finished
from tilewright.testing import check_op, op_name, run_op

CPU, H200 = torch.device("cpu"), Device.named("H200")
GEMM, (ATTENTION,), (DECODE,) = ladders("gemm"), ladders("attention"), ladders("decode")
LADDERS = (*GEMM, ATTENTION, DECODE)
EACH = pytest.mark.parametrize("ladder", LADDERS, ids=lambda ladder: ladder.name)


def by_name(name):
    return next(step for step in STEPS if step.name == name)


@pytest.mark.parametrize(
    ("ladder", "step"), [pytest.param(ladder, step, id=f"{ladder.name}-{step.name}") for ladder in LADDERS for step in ladder.steps]
)
def test_every_step_is_right(ladder, step):
    check_op(ladder.op, ladder.small, CPU, step.config_for(ladder.problem, H200))


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_every_attention_step_is_right_as_other_gpus_take_it_and_where_a_tile_is_not_full(step):
    problem = Problem(2, 2, 1, 70, 32, torch.bfloat16)
    for config in {step.config_for(Problem(4, 32, 32, 2048, 128), Device.named(name)) for name in ("A100", "B200", "GB10")}:
        with interpret.checking(races=True, order=7):
            check_op(ATTENTION.op, problem, CPU, config)
        check_op(ATTENTION.op, dataclasses.replace(problem, seq_len=1), CPU, config)
        for seq_len in (1, 70, 128):
            check_op(ATTENTION.op, dataclasses.replace(problem, seq_len=seq_len, causal=False), CPU, config)


@EACH
def test_steps_differ_and_the_small_problem_takes_the_same_kernel(ladder):
    configs = [step.config_for(ladder.problem, H200) for step in ladder.steps]
    assert len(set(configs)) == len(configs)
    assert len({step.idea for step in ladder.steps}) == len({step.name for step in ladder.steps}) == len(configs)
    for config in configs:
        kernels = [ladder.op.plan(p, config, H200)[0].kernel for p in (ladder.problem, ladder.small)]
        assert kernels[0] is kernels[1]


def test_an_attention_step_changes_its_kernel_or_its_tiles_and_hints():
    configs = [step.config_for(ATTENTION.problem, H200) for step in STEPS]
    changes = []
    for before, after in pairwise(configs):
        rest = [dataclasses.replace(c, kernel=None) for c in (before, after)]
        changes.append((before.kernel is not after.kernel, rest[0] != rest[1]))
    one = [(True, False), (False, True)]
    for step, change in zip(STEPS[1:], changes, strict=True):
        # The rescue adds fast math and the warps for its tile. Shorter steps add a field to their
        # kernel. The last step takes all of ops.attention's.
        assert change in one or step.name in ("the rescue", "short diagonal", "tuned"), step.name


def compiled(device, names, seq_len=2048):
    launches = []
    problem = dataclasses.replace(ATTENTION.problem, seq_len=seq_len)
    for name in names:
        with traced(device) as found, torch.inference_mode():
            run_op(ATTENTION.op, problem.inputs(torch.device("meta")), by_name(name).config_for(problem, device))
        launches.append((found[0], device.arch))
    return [made.resources for made in compile_launches(launches)]


@pytest.mark.slow
def test_on_hopper_the_trap_spills_and_nothing_else_does():
    names = [step.name for step in STEPS]
    assert [name for name, made in zip(names, compiled(H200, names), strict=True) if made.spills] == ["the trap"]


@pytest.mark.parametrize("seq_len", [512, 2048, 4096])
def test_the_last_step_takes_of_a_multiprocessor_what_the_op_takes(seq_len):
    problem = Problem(4, 32, 32, seq_len, 128).for_library()
    config = decision_of(finished).decide(problem, H200)[0]
    config = next(c for c in (config, *finished.space(problem, H200)) if not c.persistent)
    with traced(H200) as found, torch.inference_mode():
        run_op(finished, problem.inputs(torch.device("meta")), config)
    (op,) = (made.resources for made in compile_launches([(found[0], H200.arch)]))
    (ours,) = compiled(H200, ["tuned"], seq_len)
    assert (ours.registers, ours.shared_bytes, ours.matrix, ours.spills) == (op.registers, op.shared_bytes, op.matrix, False)


def test_every_published_step_stands_beside_ours():
    shown = {
        (f.hardware, f.kernel, f.problem["q_len"])
        for n in SEQ_LENS
        for ladder in ladders("attention", [n])
        for s in STEPS
        for f in ladder.published(s)
    }
    known = {
        (f.hardware, f.kernel, f.problem["q_len"])
        for f in figures()
        if f.op == "attention" and f.problem["causal"] and f.metric == "TFLOP/s" and f.hardware in ("DGX Spark", "B200", "B300")
    }
    assert shown == known
    assert [[round(f.tflops()) for f in GEMM[1].published(step)] for step in GEMM[1].steps] == [[1150], [], [1708], [1868], [1941]]
    assert not any(GEMM[0].published(step) for step in GEMM[0].steps)


@pytest.mark.slow
@pytest.mark.parametrize(("subject", "count"), [("gemm", sum(len(ladder.steps) for ladder in GEMM)), ("attention", len(STEPS))])
def test_the_command_shows_answers_and_resources_without_a_gpu(subject, count, capsys):
    assert learn_command(subject, arch="sm_90") == 0
    printed = capsys.readouterr().out
    assert "No GPU is timed here" in printed
    for ladder in ladders(subject):
        for step in ladder.steps:
            assert step.name in printed
    assert printed.count(" right ") == count
    assert "* B200: TFLOP/s published in" in printed
    assert "not run here" in printed
    assert max(map(len, printed.splitlines())) <= 100
    for step in (step for ladder in ladders(subject) for step in ladder.steps):
        assert step.why[:40] in printed
        assert indent(step.picture, "      ") in printed
    if subject == "attention":
        assert "the trap spills" in printed


def test_a_wrong_step_fails_the_command(capsys, monkeypatch):
    broken = dataclasses.replace(GEMM[0], op=_Wrong(GEMM[0].op), steps=GEMM[0].steps[:1], library=GEMM[1].op)
    monkeypatch.setattr(command, "ladders", lambda subject, seq_lens: (broken,))
    monkeypatch.setattr(type(broken), "published", lambda self, step: [])
    assert learn_command("gemm", arch="sm_90") == 1
    assert "WRONG" in capsys.readouterr().out


class _Wrong:
    """An op module whose reference is something else."""

    def __init__(self, op):
        self.__dict__.update(vars(op))
        self.reference = lambda **inputs: op.reference(**inputs) + 1


@pytest.fixture
def pretended_gpu(monkeypatch):
    """Made-up times and binaries, to test how the command reads and writes them."""
    ceilings = Ceilings(4270.0, 4490.0, 700.0, 1.0)

    def measured(op, problem, setup, *, config, beside):
        step = next(i for i, step in enumerate(STEPS) if step.config_for(problem, H200) == config)
        if step == 2:
            raise AssertionError("rms 9")
        times = {"ours": Timing(problem.seq_len / (1 + step), 1.0)} | {peer.name: Timing(100.0, 1.0) for peer in beside}
        return make_row(op_name(op), problem, "H200", setup.ceilings, Measured(times, config=config, source="search"))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "_gpu", lambda: (CPU, H200))
    monkeypatch.setattr(command, "measure_ceilings", lambda where: ceilings)
    monkeypatch.setattr(command, "measure_case", measured)
    monkeypatch.setattr(command, "compile_launches", lambda launches: [Compiled(Resources(128, 0, 0, 66616, {}))] * len(launches))


def test_on_a_gpu_it_prints_times_and_gains_and_writes_rows_and_a_drawing(pretended_gpu, capsys, tmp_path):
    rows, drawing = tmp_path / "rows.jsonl", tmp_path / "curve.png"
    assert learn_command("attention", json_file=rows, plot=drawing) == 1  # one step is wrong
    printed = capsys.readouterr().out
    assert "k transposed | WRONG, not timed: rms 9" in printed
    assert "timed on H200" in printed
    assert "2.00x" in printed  # of the second step over the first
    assert "ops.attention" in printed
    assert printed.count("what each step changes") == 1
    assert max(map(len, printed.splitlines())) <= 100
    written = [json.loads(line) for line in rows.read_text().splitlines()]
    assert len(written) == len(SEQ_LENS) * (len(STEPS) - 1)
    assert {row["op"] for row in written} == {"learn attention"}
    assert {row["source"] for row in written} == {"ladder"}
    assert written[0]["case"].endswith("step=basic")
    assert written[0]["config"] == "basic_kernel 64x64"
    assert drawing.read_bytes().startswith(b"\x89PNG")


def test_a_ladder_of_other_sizes_and_rounds(pretended_gpu, monkeypatch, capsys):
    (ladder,) = ladders("attention", [512], batch=2, heads=8, head_dim=64)
    assert ladder.problem == Problem(2, 8, 8, 512, 64)
    assert not any(ladder.published(step) for step in ladder.steps), "published for other sizes"
    measured, rounds = command.measure_case, []

    def noted(op, problem, setup, **how):
        rounds.append(setup.rounds)
        return measured(op, problem, setup, **how)

    monkeypatch.setattr(command, "measure_case", noted)
    learn_command("attention", seq_lens=[512], sizes={"batch": 2, "heads": 8, "head_dim": 64}, iterations=3)
    assert "batch=2 q_heads=8 kv_heads=8 seq_len=512 head_dim=64" in capsys.readouterr().out
    assert rounds == [3] * len(STEPS)
    with pytest.raises(ValueError, match="head_dim must be one of 16, 32, 64, 128, 256, got 48"):
        ladders("attention", head_dim=48)
    with pytest.raises(ValueError, match="batch must be given only with attention, got 2"):
        ladders("gemm", batch=2)


def test_non_causal_attention_is_another_problem_and_has_no_published_figures(pretended_gpu, capsys, tmp_path):
    (ladder,) = ladders("attention", causal=False)
    assert ladder.problem == Problem(4, 32, 32, 2048, 128, causal=False)
    assert ladder.small.causal is ladder.problem.for_library().causal is False
    assert not any(ladder.published(step) for step in ladder.steps)
    rows = tmp_path / "rows.jsonl"
    invoked = CliRunner().invoke(app, ["learn", "attention", "--non-causal", "--seq", "512", "--json", str(rows)])
    assert invoked.exit_code == 1, invoked.output  # one step is wrong
    assert "float16 causal=False, timed" in invoked.output
    assert {json.loads(line)["problem"]["causal"] for line in rows.read_text().splitlines()} == {False}
    with pytest.raises(ValueError, match="non-causal must be given only with attention, got True"):
        ladders("decode", causal=False)


@EACH
def test_each_step_is_explained_and_its_picture_fits_a_terminal_and_a_page(ladder):
    assert all(step.why.endswith(".") for step in ladder.steps)
    assert any(step.picture for step in ladder.steps) or ladder in GEMM[1:]  # the first has theirs
    for line in (line for step in ladder.steps for line in step.picture.splitlines()):
        assert line.isascii()
        assert line == line.rstrip()
        assert len(line) <= 80


def test_blackwell_ends_with_two_blocks_that_share_a_tile():
    """No step asks for warps there: accumulators are in tensor memory."""
    b200 = Device.named("B200")
    for ladder in GEMM[:2]:
        configs = [step.config_for(ladder.problem, b200) for step in ladder.steps]
        assert len(set(configs)) == len(configs)
        assert [c.num_ctas for c in configs] == [None, None, None, 1, 2]
        assert not any(c.num_worker_warps for c in configs)
        for config in configs:
            check_op(ladder.op, ladder.small, CPU, config)


def test_errors_say_what_must_be(tmp_path):
    with pytest.raises(KeyError, match="attention, gemm, decode"):
        ladders("sorting")
    with pytest.raises(ValueError, match="only with attention"):
        ladders("gemm", [1024])
    with pytest.raises(ValueError, match=r"seq must be 1 to 2\*\*31 - 1, got 0"):
        ladders("attention", [0])
    with pytest.raises(ValueError, match="arch must be one of sm_80"):
        learn_command("attention", arch="cpu")
    with pytest.raises(ValueError, match="plot must be left out where no step is timed"):
        learn_command("attention", arch="sm_90", plot=tmp_path / "x.png")
    with pytest.raises(ValueError, match=r"json must be left out where no step is timed.* got --json"):
        learn_command("gemm", arch="sm_90", json_file=tmp_path / "x.jsonl")
    q, k = torch.zeros(1, 4, 8, 64, dtype=torch.float16), torch.zeros(1, 3, 8, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"q.shape\[1\] must be a multiple of k.shape\[1\] = 3, got 4"):
        attention(q, k, k)
    with pytest.raises(ValueError, match="a power of two in 16"):
        attention(*(torch.zeros(1, 2, 8, 48, dtype=torch.float16) for _ in range(3)))


def test_a_config_reads_as_what_it_launches():
    rescue = by_name("the rescue").config_for(ATTENTION.problem, H200)
    assert isinstance(rescue, Config)
    assert str(rescue) == "fast_math_kernel 256x128 num_ctas=2 num_worker_warps=8"
