"""The compile report: a toy op with configs that fit, spill or fail; then every op's default for
every architecture.
"""

import dataclasses
import functools
import gzip
import io
import json
import os
import re
import runpy
from pathlib import Path

import binaries
import msgspec
import pytest
import torch
import toy_outer
from rich.console import Console

from tilewright import ops
from tilewright.compile import (
    ARCHS,
    Compiled,
    Resources,
    ResultCache,
    compile_launches,
    compile_ops,
    representative,
)
from tilewright.compile.command import as_json, compile_command, exit_code, print_rows, summary
from tilewright.compile.disassemble import usage
from tilewright.compile.job import Job, one_line
from tilewright.compile.signature import kernel_signature
from tilewright.launch import Bound, Device, Traced, identity, traced
from tilewright.ops import matmul
from tilewright.testing import call_space, op_name, run_op
from tilewright.testing.cases import cases

FITS, SPILLS, BROKEN, ILLEGAL = toy_outer.FITS, toy_outer.SPILLS, toy_outer.BROKEN, toy_outer.ILLEGAL


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return ResultCache(tmp_path_factory.mktemp("compiled"))


def report(cache, *sizes, archs=("sm_90",), **options):
    problems = [toy_outer.Problem(m) for m in sizes]
    return compile_ops([toy_outer], archs, problems=lambda op, device: problems, cache=cache, jobs=1, **options)


def launch_of(m, config):
    problem, device = toy_outer.Problem(m), Device.for_arch("sm_90")
    x = torch.empty(m, problem.k, dtype=problem.dtype, device="meta")
    with traced(device) as launches:
        Bound(toy_outer.plan(problem, config, device), toy_outer.DECISION.arguments, device).run(x, x.new_empty(m, m), 0.5)
    return launches[0]


# --------------------------------------------------------------------------------------------- rows
def test_a_healthy_kernel_is_described(cache):
    (row,) = report(cache, 64)
    found = row.compiled.resources
    assert (row.op, row.kernel, row.arch, row.verdict) == ("toy_outer", "toy_outer_kernel", "sm_90", "ok")
    assert row.default
    assert 32 <= found.registers <= 255
    assert found.shared_bytes > 64 * 32 * 2
    assert set(found.matrix) == {"HGMMA"}
    assert found.count("UTMALDG") >= 2
    assert row.compiled.cubin_bytes > 1000
    assert row.compiled.compile_s > 0
    assert exit_code([row]) == 0


def test_every_config_of_a_space_gets_a_row_whatever_becomes_of_it(cache):
    rows = report(cache, 512)
    assert [row.verdict for row in rows] == ["ok", "SPILLS", "FAILED", "FAILED"]
    assert [row.default for row in rows] == [True, False, False, False]
    spilling = rows[1].compiled.resources
    assert spilling.stack_bytes > 0
    assert spilling.count("STL") > 0
    assert rows[2].compiled.error == (
        'TypeCheckingError: Invalid argument "shape" of num_tiles(): Dimension #1 of shape (64, 48) is not a power of two (toy_outer.py:56)'
    )
    assert rows[3].compiled.error.startswith("ZeroDivisionError")
    assert rows[3].kernel == ""
    assert exit_code(rows) == 0, "only the default decides"


def test_a_default_that_spills_or_breaks_fails_the_report(cache):
    for size in (1024, 2048):
        rows = report(cache, size)
        assert exit_code(rows) == 1
        assert "defaults: 0 of 1 compile without a spill" in summary(rows)[0]
    assert exit_code([]) == 1


def test_problems_with_one_binary_share_a_row(cache):
    rows = report(cache, 64, 512, defaults_only=True)
    assert [(row.problem, row.problems) for row in rows] == [("m=64 k=64 dtype=bfloat16", 2)]


@pytest.mark.parametrize("defaults_only", [True, False])
def test_a_problem_gets_the_configs_that_its_call_asks_for(cache, defaults_only):
    """And keeps its own inputs: of what a call asks, sizes are rounded up."""
    rows = report(cache, 500, defaults_only=defaults_only)
    assert [(row.problem, row.default, row.verdict) for row in rows[:1]] == [("m=500 k=64 dtype=bfloat16", True, "ok")]
    assert len(rows) == (1 if defaults_only else 4)


def test_the_handful_of_problems_covers_every_kernel_and_dtype_by_its_largest(monkeypatch):
    small, large, half = toy_outer.Problem(64), toy_outer.Problem(512), toy_outer.Problem(64, dtype=torch.float16)
    monkeypatch.setattr("tilewright.compile.report.cases", lambda op, kind: [small, half] if kind == "bench" else [large, small])
    assert representative(toy_outer, Device.for_arch("sm_90")) == [large, half]


def test_workers_give_what_this_process_gives(cache, tmp_path):
    launches = [(launch_of(m, config), arch) for m, config in ((64, FITS), (512, BROKEN)) for arch in ("sm_90", "sm_80")]
    counts = []
    apart = compile_launches(launches, jobs=2, cache=ResultCache(tmp_path), on_done=lambda done, distinct: counts.append((done, distinct)))
    assert counts == [(n, 4) for n in range(5)]
    here = compile_launches(launches, jobs=1, cache=cache)
    assert [(c.resources, c.error) for c in apart] == [(c.resources, c.error) for c in here]


def test_a_config_that_spills_is_not_ok(cache):
    device = Device.for_arch("sm_90")
    for config, fine in ((FITS, True), (SPILLS, False), (BROKEN, False)):
        launch = launch_of(512, config)
        (compiled,) = compile_launches([(launch, device.arch)], jobs=1, cache=cache)
        assert compiled.ok is fine


# -------------------------------------------------------------------------------------------- cache
def test_the_second_time_comes_from_the_cache(tmp_path):
    cache = ResultCache(tmp_path)
    (first,), (second,) = report(cache, 64), report(cache, 64)
    assert not first.compiled.cached
    assert second.compiled == dataclasses.replace(first.compiled, cached=True)
    assert len(list(tmp_path.rglob("*.json"))) == 1


def test_failures_are_not_cached(tmp_path):
    cache = ResultCache(tmp_path)
    report(cache, 2048)
    assert not list(tmp_path.rglob("*.json"))


def test_a_damaged_or_unwritable_cache_only_costs_time(tmp_path):
    cache = ResultCache(tmp_path)
    report(cache, 64)
    (file,) = tmp_path.rglob("*.json")
    file.write_bytes(b"{")
    assert report(cache, 64)[0].verdict == "ok"
    job = Job.of(launch_of(512, SPILLS), "sm_90")
    cache._path(job).parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(cache._path(job))  # an open would wait for a writer
    assert cache.get(job) is None
    cache.put(job, first := Compiled(Resources(8, 0, 0, 1024, {})))
    assert cache.get(job) == dataclasses.replace(first, cached=True)
    occupied = tmp_path / "occupied"
    occupied.write_text("a file where the folder would be")
    assert report(ResultCache(occupied), 64)[0].verdict == "ok"


def test_the_key_follows_whatever_decides_the_binary(tmp_path, monkeypatch):
    cache, job = ResultCache(tmp_path), Job.of(launch_of(512, FITS), "sm_90")
    key = cache._path(job)
    assert cache._path(Job.of(launch_of(1024, FITS), "sm_90")) == key, "the same specialisation"
    assert cache._path(Job.of(launch_of(512, SPILLS), "sm_90")) != key
    assert cache._path(dataclasses.replace(job, arch="sm_80")) != key
    assert cache._path(dataclasses.replace(job, hints=(None, 2, None))) != key
    monkeypatch.setattr(toy_outer, "SCALE", 2.0)  # read by a function that the kernel calls
    forget_digests()
    assert cache._path(job) != key
    forget_digests()


def forget_digests():
    identity.kernel_digest.cache_clear()
    identity._digests.clear()


# ----------------------------------------------------------------- the record (support/binaries.py)
@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A binary of which there is a record, and the record; the cache folder holds what it says."""
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "first"))
    job, record = Job.of(launch_of(64, FITS), "sm_90"), tmp_path / "record.gz"
    binaries.made(job, record)
    assert binaries.pack(tmp_path / "first", record) == 1
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path / "second"))
    binaries.seed(tmp_path / "second", record)
    return job, record


def test_the_record_says_what_the_compiler_makes_until_a_kernel_changes(kept, monkeypatch):
    job, record = kept
    found = ResultCache().get(job)
    assert found == dataclasses.replace(job.run(), cached=True, **binaries.NOT_KEPT)
    assert binaries.made(job, record).resources == found.resources
    monkeypatch.setattr(toy_outer, "SCALE", 2.0)
    forget_digests()
    assert ResultCache().get(job) is None
    forget_digests()


def test_of_the_record_a_sixteenth_is_made_again(kept, monkeypatch):
    job, record = kept
    own = ResultCache()._path(job)
    own.write_text(re.sub(r'"registers": ?\d+', '"registers": 7', own.read_text()))
    for digit in "0123456789abcdef":
        monkeypatch.setattr(binaries, "digit", lambda record, digit=digit: digit)
        if own.name.startswith(digit):
            with pytest.raises(AssertionError, match=r"toy_outer_kernel for sm_90 .*record.gz.*python tools/binaries.py --all"):
                binaries.made(job, record)
        else:
            assert binaries.made(job, record).resources.registers == 7


def test_a_record_of_another_folder_tells_the_same():
    """The compiler computes addresses otherwise where the sources' folder has another name."""
    here = Resources(128, 0, 0, 1024, {"FFMA": 9, "ULOP3": 31, "UTMALDG": 2, "NOP": 7}, loop=40)
    told = binaries.told(here)
    assert told == binaries.told(dataclasses.replace(here, instructions={"FFMA": 9, "ULOP3": 29, "UTMALDG": 2, "NOP": 9}, loop=38))
    for changed in ({"registers": 129}, {"instructions": {**here.instructions, "FFMA": 8}}, {"instructions": {**here.instructions, "UTMALDG": 3}}):
        assert told != binaries.told(dataclasses.replace(here, **changed))


def test_the_record_is_the_same_whenever_it_is_packed(tmp_path):
    binaries.seed(tmp_path)
    assert binaries.pack(tmp_path, tmp_path / "again.gz") > 100
    assert gzip.decompress((tmp_path / "again.gz").read_bytes()) == gzip.decompress(binaries.RECORD.read_bytes())
    assert binaries.digit(binaries.RECORD) in "0123456789abcdef"


def test_the_tool_that_renews_it_runs_every_test_that_asks():
    found = runpy.run_path(str(binaries.RECORD.parents[1] / "tools/binaries.py"))["tests_that_ask"]
    here = [name.rpartition("::")[2] for name in found(Path(__file__))]
    assert "test_the_default_config_compiles_for_every_architecture_and_does_not_spill" in here
    assert "test_failures_are_not_cached" not in here
    assert all(list(found(file)) for file in Path(__file__).parent.glob("test_*.py") if "binaries.made(" in file.read_text())


# ------------------------------------------------------------------------------------------- jobs
def test_an_error_of_the_caller_is_a_row_too(cache):
    launch = launch_of(64, FITS)
    args = {name: value for name, value in launch.args.items() if name != "alpha"}
    (made,) = compile_launches([(Traced(launch.launch, args), "sm_90")], cache=cache)
    assert made == Compiled(error="TypeError: Kernel expects 5 arguments but 4 were given")
    assert one_line(ValueError("a\n   b" * 200)).count("\n") == 0
    assert len(one_line(ValueError("x" * 999))) == 300


def test_a_kernel_that_no_worker_could_import_is_named(cache):
    job = dataclasses.replace(Job.of(launch_of(64, FITS), "sm_90"), kernel="outer.<locals>.inner")
    assert job.run().error == "LookupError: kernel must be an attribute of its module, got toy_outer.outer.<locals>.inner"


def test_the_signature_is_the_one_a_launch_would_compile():
    x = torch.empty(8, 64, dtype=torch.bfloat16, device="meta")
    kernel = toy_outer.toy_outer_kernel
    aligned = kernel_signature(kernel, (x, x, 0.5, 64, 32))
    assert aligned.calling_convention.name == "cutile_python_v1"
    array = aligned.parameters[0]
    assert (array.stride_constant, array.stride_divisible_by, array.shape_divisible_by) == ((None, 1), (8, 1), (1, 16))
    assert array.base_addr_divisible_by == 16
    one_row = kernel_signature(kernel, (x[:1], x, 0.5, 64, 32))
    assert one_row.parameters[0].shape_constant == (1, None)
    assert one_row.calling_convention.name == "cutile_python_v2", "the first convention has no constant shapes"
    odd = kernel_signature(kernel, (x[:, 1:], x, 0.5, 64, 32)).parameters[0]
    assert (odd.base_addr_divisible_by, odd.shape_divisible_by) == (1, (1, 1))
    assert kernel_signature(kernel, (x[:2], x, 0.5, 64, 32)).symbol == aligned.symbol


# ------------------------------------------------------------------------------------------ command
def test_rows_print_as_lines_for_a_pipe_and_as_a_table_for_a_terminal(cache):
    rows = report(cache, 512)
    pipe = io.StringIO()
    print_rows(Console(file=pipe), rows)
    lines = pipe.getvalue().splitlines()
    assert len(lines) == 1 + len(rows), "one line each, never wrapped"
    assert lines[0].split()[:4] == ["op", "arch", "kernel", "regs"]
    assert "HGMMA" in lines[1]
    assert "ok default" in lines[1]
    assert "\x1b" not in pipe.getvalue()
    terminal = io.StringIO()
    print_rows(Console(file=terminal, force_terminal=True, width=220), rows)
    assert "\x1b" in terminal.getvalue()
    assert "SPILLS" in terminal.getvalue()


def test_json_has_every_number_and_the_versions(cache):
    rows = report(cache, 512)
    plain = json.loads(msgspec.json.encode(as_json(rows)))
    assert set(plain) == {"toolchain", "command", "rows"}
    assert "cuda-tile" in plain["toolchain"]
    assert "tileiras" in plain["toolchain"]
    assert [row["verdict"] for row in plain["rows"]] == ["ok", "SPILLS", "FAILED", "FAILED"]
    first = plain["rows"][0]
    names = {"op", "arch", "kernel", "config", "problem", "problems", "default", "compiled", "threads", "weights", "verdict", "per_weight"}
    assert set(first) == names
    assert set(first["compiled"]) == {"resources", "cubin_bytes", "compile_s", "error", "cached"}
    assert set(first["compiled"]["resources"]) == {"registers", "stack_bytes", "local_bytes", "shared_bytes", "instructions", "loop", "serial_loads"}
    assert plain["rows"][2]["compiled"]["resources"] is None


def test_the_command_reports_writes_and_judges(monkeypatch, tmp_path):
    monkeypatch.setenv("TILEWRIGHT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("tilewright.compile.command.all_ops.named", lambda names: [toy_outer])
    monkeypatch.setattr("tilewright.compile.report.cases", lambda op, kind: [toy_outer.Problem(64)])
    out, file = io.StringIO(), tmp_path / "out" / "report.json"
    assert compile_command(["toy_outer"], arch="sm_90, sm_120", json_file=file, defaults=True, console=Console(file=out, soft_wrap=True)) == 0
    assert "sm_120: 1 binaries, 0 spill, 0 failed; defaults: 1 of 1 compile without a spill" in out.getvalue()
    assert [row["arch"] for row in json.loads(file.read_text())["rows"]] == ["sm_90", "sm_120"]
    monkeypatch.setattr("tilewright.compile.report.cases", lambda op, kind: [toy_outer.Problem(1024)])
    assert compile_command(arch="sm_90", console=Console(file=out)) == 1


@pytest.mark.parametrize("arch", ["sm_70", "cpu", "hopper"])
def test_an_unknown_architecture_is_refused(arch):
    with pytest.raises(ValueError, match=r"arch must be one of sm_80 \(A100\), sm_90 \(H200\)"):
        compile_command(arch=arch, console=Console(file=io.StringIO()))


# ----------------------------------------------------------------------------------------- every op


def work_of(problem) -> float:
    cost = problem.cost()
    return cost.size_bytes + cost.flops / 100


@functools.cache
def default_jobs(op, arch) -> dict[tuple, tuple[Job, str]]:
    """What the default config launches for the largest case of the op: the job and its name. Kept
    for the architecture that takes turns with this one.
    """
    device = Device.for_arch(arch)
    largest_first = sorted(dict.fromkeys(cases(op, "bench") + cases(op, "real")), key=work_of, reverse=True)
    problem = next((p for p in largest_first if call_space(op, p, device)), None)  # a space prices each config
    if problem is None:
        assert not device.has_fp8
        return {}
    return jobs_of(op, problem, device)


def jobs_of(op, problem, device) -> dict[tuple, tuple[Job, str]]:
    config = call_space(op, problem, device)[0]
    with traced(device) as launches, torch.inference_mode():
        run_op(op, problem.inputs(torch.device("meta")), config)
    assert launches
    jobs = [(Job.of(launch, device.arch), f"{launch.launch.name} {config} for {problem}") for launch in launches]
    return {job.identity[:-1]: (job, name) for job, name in jobs}


TURNS = ("sm_100", "sm_103")


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("op", [pytest.param(op, id=op_name(op)) for op in ops.ALL])
def test_the_default_config_compiles_for_every_architecture_and_does_not_spill(op, arch):
    """The largest case of the op; `tilewright compile --defaults` compiles all of them.

    For sm_121 only what sm_120 does not launch: one launch takes the same registers and memory on
    both, by all ops. sm_100 and sm_103 differ a little, and take turns: of the one whose turn it is
    not, what the other does not launch.
    """
    jobs, turn = default_jobs(op, arch), ops.ALL.index(op) % 2
    other = {"sm_121": "sm_120", TURNS[1 - turn]: TURNS[turn]}.get(arch)
    for key in jobs.keys() - (default_jobs(op, other).keys() if other else ()):
        job, name = jobs[key]
        found = binaries.made(job).resources
        assert not found.spills, f"{name}: {found}"


def test_a_spill_shows_without_the_instructions():
    assert usage(Job.of(launch_of(512, SPILLS), "sm_90").build()).spills
    assert not usage(Job.of(launch_of(512, FITS), "sm_90").build()).spills


@pytest.mark.parametrize("op", [pytest.param(op, id=op_name(op)) for op in ops.ALL])
def test_what_an_op_would_launch_has_a_signature(op):
    """On an architecture of two of the four families. The test above asks for one on each."""
    for arch in ("sm_80", "sm_90", "sm_100", "sm_120")[ops.ALL.index(op) % 2 :: 2]:
        device = Device.for_arch(arch)
        for problem in representative(op, device):
            with traced(device) as launches, torch.inference_mode():
                getattr(op, op_name(op))(**problem.inputs(torch.device("meta")))
            assert all(Job.of(launch, arch).symbol for launch in launches)
            assert launches


def test_a_bias_does_not_make_a_default_spill():
    """A persistent kernel with 128x128 tiles on 4 warps has no register left for it (Qwen2-7B's
    fused q, k and v).
    """
    jobs = jobs_of(matmul, matmul.Problem(512, 4608, 3584, bias=True), Device.for_arch("sm_90"))
    for job, name in jobs.values():
        assert not binaries.made(job).resources.spills, name
