"""Kernels of a user's own: `tilewright.interpret`, its trace, `compile_report`, and their verbs."""

import json
import linecache
import re
import sys
import textwrap

import cuda.tile as ct
import numpy as np
import pytest
import torch
from shell import run

import tilewright
from tilewright.compile import ToolMissing, disassemble
from tilewright.interpret import KernelError, Trace, checking


@ct.kernel
def total(x, out):
    t = ct.sum(ct.load(x, (ct.bid(0),), (4,)))
    ct.scatter(out, 0, ct.gather(out, 0) + t)


@ct.kernel
def half(x, out):
    ct.store(out, (ct.bid(0),), ct.load(x, (ct.bid(0),), (4,)))


@ct.kernel
def beyond(x, out):
    ct.store(out, (0,), ct.gather(x, ct.arange(8, dtype=ct.int32)))


@ct.kernel
def product(a, b, out, m: ct.Constant[int], n: ct.Constant[int], k: ct.Constant[int]):
    acc = ct.zeros((m, n), ct.float32)
    for i in range(ct.num_tiles(a, 1, (m, k))):
        x = ct.load(a, (ct.bid(0), i), (m, k))
        y = ct.load(b, (i, ct.bid(1)), (k, n))
        acc = ct.mma(x, y, acc)
    ct.store(out, (ct.bid(0), ct.bid(1)), acc)


def plain(x):
    return x


# ---------------------------------------------------------------------------------------- interpret
typed: dict = {"ct": ct}
exec(compile("@ct.kernel\ndef k(): pass", "<stdin>", "exec"), typed)
typed_in = typed["k"]


def test_a_race_is_found_and_blocks_run_in_the_order_asked_for():
    x, out = torch.arange(16.0), torch.zeros(1)
    tilewright.interpret(total, (4,), (x, out), block_order="reverse")
    assert out.item() == 120
    with pytest.raises(KernelError, match=r"race between blocks: read of element \(0,\) of out"):
        tilewright.interpret(total, (4,), (x, out), races=True)


def test_an_output_nobody_wrote_and_a_masked_access_out_of_range_can_be_asked_for():
    x = torch.zeros(16)
    tilewright.interpret(half, (2,), (x, torch.zeros(16)))
    with pytest.raises(KernelError, match="never written: 8 of 16 elements of out"):
        tilewright.interpret(half, (2,), (x, torch.zeros(16)), unwritten=True)
    tilewright.interpret(half, (4,), (x, torch.zeros(16)), unwritten=True)
    tilewright.interpret(beyond, (1,), (torch.zeros(5), torch.zeros(8)))
    with pytest.raises(KernelError, match=r"read of element 7 of x: float32\[5\], .* which only strict_bounds reports"):
        tilewright.interpret(beyond, (1,), (torch.zeros(5), torch.zeros(8)), strict_bounds=True)


def test_options_that_are_not_given_are_those_of_the_context_around():
    x, out = torch.zeros(16), torch.zeros(1)
    with checking(races=True), pytest.raises(KernelError, match="race"):
        tilewright.interpret(total, (4,), (x, out))
    with checking(unwritten=(out,)):  # judged at the end of the context, not of the first call inside
        tilewright.interpret(half, (1,), (x, torch.zeros(4)))
        tilewright.interpret(total, (4,), (x, out))


@pytest.mark.parametrize(("call", "message"), [
    ((4, total), r"the kernel comes first. Write interpret\(total, \(4,\), ...\)"),
    ((plain, (4,), ()), "got the plain function plain: write @ct.kernel above `def plain`"),
    ((tilewright.rms_norm, (4,), ()), "call rms_norm itself, with CPU tensors"),
    ((total, 4, ()), r"grid must be a tuple of 1 to 3 ints, got 4: write interpret\(total, \(4,\), \(...\)\)"),
    ((total, (), (1, 2)), r"grid must be a tuple of 1 to 3 ints, got \(\): write interpret\(total, \(4,\), \(...\)\)"),
    ((total, (4.0,), (1, 2)), r"got \(4\.0,\): write interpret\(total, \(4,\), \(...\)\)"),
    ((total, (4,), (torch.zeros(16), None)), "out must be a tensor, a number, or a list or tuple of them, got NoneType"),
    ((product, (1,), (*[torch.zeros(2, 2)] * 3, 2, torch.tensor(2), 2)), "n must be a bool, int or float, because .* ct.Constant, got Tensor"),
    ((typed_in, (1,), ()), "kernel must be defined in a file or a notebook cell, .* got k of <stdin>"),
    ((total, (4,), torch.zeros(1)), r"got Tensor: write interpret\(total, \(4,\), \(x, ...\)\)"),
    ((total, (4,), (1,)), r"args must be 2 values, as many as total has parameters \(x, out\), got 1"),
    ((total, (4,), (torch.zeros(16).to_sparse(), 1)), r"x must be a dense tensor, got one of torch.sparse_coo: write x.to_dense\(\)"),
    ((total, (4,), (np.zeros(16, ">f4"), 1)), "x must be of a dtype of cuda-tile, got >f4"),
    ((total, (4,), (torch.zeros(16), torch.zeros(1, dtype=torch.complex64))), "out must be of a dtype of cuda-tile, got torch.complex64"),
    ((total, (4,), ([torch.zeros(16), [1]], 1)), r"x\[1\] must be a tensor or a numpy array, got list"),
    ((ct.kernel(lambda x: None), (4,), (1,)), "kernel must be a function made by `def`, .* got a lambda of "),
    (("total", (4,), ()), r"got str: write interpret\(kernel, grid, args\)"),
])  # fmt: skip
def test_a_wrong_call_says_what_to_write(call, message):
    with pytest.raises(TypeError, match=message):
        tilewright.interpret(*call)


@pytest.mark.parametrize("grid", [(-1,), (2**24,), (1, 65536), (1, 1, 65536), (1, 1, 1, 1)])
@pytest.mark.parametrize("call", [tilewright.interpret, tilewright.compile_report])
def test_a_grid_that_no_gpu_launches_is_refused_before_anything_else(call, grid):
    with pytest.raises(ValueError, match=r"grid(\[\d\])? must "):
        call(total, grid, (torch.zeros(16), torch.zeros(1)))


def test_arrays_that_a_kernel_cannot_take_are_named():
    out = np.zeros(1, np.float32)
    with pytest.raises(ValueError, match=r"x must have strides of at least 0, got \(-1,\): write np\.ascontiguousarray\(x\)"):
        tilewright.interpret(total, (4,), (np.zeros(16, np.float32)[::-1], out))
    out.setflags(write=False)
    with pytest.raises(ValueError, match=r"out must be writable, .* got a read-only array: write out\.copy\(\)"):
        tilewright.interpret(total, (4,), (np.zeros(16, np.float32), out))


def test_a_page_without_a_folder_is_refused_before_the_kernel_runs(tmp_path):
    with pytest.raises(FileNotFoundError, match="trace must be a page in a folder that exists"):
        tilewright.interpret(total, (4,), (torch.zeros(16), torch.zeros(1)), races=True, trace=tmp_path / "no" / "page.html")
    for folder in (tmp_path, ""):
        with pytest.raises(IsADirectoryError, match="trace must be the path of a page to write, got the folder"):
            tilewright.interpret(total, (4,), (torch.zeros(16), torch.zeros(1)), trace=folder)
    with pytest.raises(ValueError, match='block_order must be "forward", "reverse" or a seed'):
        tilewright.interpret(total, (4,), (torch.zeros(16), torch.zeros(1)), block_order="random")


def test_a_trace_is_no_file_descriptor():
    with pytest.raises(TypeError, match="trace must be True, or the path of a page to write, got int"):
        tilewright.interpret(total, (4,), (torch.zeros(16), torch.zeros(1)), trace=5)


# -------------------------------------------------------------------------------------------- trace
@pytest.fixture(scope="module")
def traced() -> Trace:
    a, b, out = torch.randn(8, 12), torch.randn(12, 16), torch.empty(8, 16)
    found = tilewright.interpret(product, (2, 2), (a, b, out, 4, 8, 4), trace=True, races=True)
    torch.testing.assert_close(out, a @ b)
    return found


def test_a_trace_holds_what_each_block_did_in_order(traced):
    first = [step for step in traced.steps if step.block == (0, 0, 0)]
    assert [(step.kind, step.array) for step in first] == [("load", "a"), ("load", "b"), ("mma", "")] * 3 + [("store", "out")]
    assert first[3].elements.tolist() == [row * 12 + column for row in range(4) for column in range(4, 8)]
    assert first[2].product == (4, 8, 4)
    assert first[2].dtypes == ("float32", "float32", "float32")
    assert traced.flops() == 2 * 8 * 16 * 12
    assert "x = ct.load(a" in linecache.getline(*first[0].place[:2])


def test_a_trace_counts_sectors_of_32_bytes():
    @ct.kernel
    def column(x, out):
        ct.store(out, (0, 0), ct.load(x, (0, 0), (8, 1)))

    found = tilewright.interpret(column, (1,), (torch.zeros(8, 64), torch.zeros(8, 1)), trace=True)
    (load,) = found.of("load")
    assert (load.elements.size, load.sectors) == (8, 8)
    assert "8 sectors, 12 % of their bytes used" in str(found)


def test_live_tiles_are_those_that_hold_values_at_a_line(traced):
    (line,) = {step.line for step in traced.of("mma")}
    tiles = {tile.name: tile.shape for tile in traced.live[line]}
    assert tiles == {"acc": (4, 8), "x": (4, 4), "y": (4, 8)}
    (line,) = {step.line for step in traced.of("store")}
    assert [tile.shape for tile in traced.live[line]] == [(4, 8)]
    assert traced.live_bytes() == 4 * (32 + 16 + 32)


def test_the_page_of_a_trace_needs_no_other_file(traced, tmp_path):
    x, page = torch.randn(16), tmp_path / "page.html"
    tilewright.interpret(half, (4,), (x, torch.zeros(16)), trace=page)
    text = page.read_text()
    assert not re.search(r"""(src|href)=["']?(http|//)""", text)
    assert "{{" not in text
    data = json.loads(re.search(r"^const D = (.*);$", text, re.MULTILINE)[1])
    assert [step["k"] for step in data["steps"]] == ["load", "store"] * 4
    assert data["steps"][2]["r"] == [[0, 4, 1, 4]]
    assert data["lines"][0]["code"].startswith("ct.store(out")


def test_the_page_shows_the_steps_up_to_an_error(tmp_path):
    page = tmp_path / "page.html"
    with pytest.raises(KernelError, match="race"):
        tilewright.interpret(total, (4,), (torch.zeros(16), torch.zeros(1)), races=True, trace=page)
    data = json.loads(re.search(r"^const D = (.*);$", page.read_text(), re.MULTILINE)[1])
    assert [step["k"] for step in data["steps"]] == ["load", "load", "store", "load", "load"]


def test_numpy_arrays_and_lists_are_watched_too():
    @ct.kernel
    def fill(outs):
        for i in range(len(outs)):
            ct.store(outs[i], (0,), ct.full((4,), 1.0, ct.float32))

    outs = [np.zeros(4, np.float32), np.zeros(8, np.float32)]
    with pytest.raises(KernelError, match=r"never written: 4 of 8 elements of outs\[1\]"):
        tilewright.interpret(fill, (1,), (outs,), unwritten=True)
    found = tilewright.interpret(fill, (1,), (outs[:1],), unwritten=True, trace=True)
    assert [step.array for step in found.steps] == ["outs[0]"]


def test_steps_beyond_the_limit_are_counted(monkeypatch):
    monkeypatch.setattr("tilewright.interpret.trace.MOST_STEPS", 3)
    found = tilewright.interpret(half, (4,), (torch.zeros(16), torch.zeros(16)), trace=True)
    assert (len(found.steps), found.left_out) == (3, 5)
    assert "5 are left out" in str(found)


# ---------------------------------------------------------------------------------- compile_report
def test_a_compile_report_has_registers_of_each_architecture():
    meta = torch.empty(64, device="meta")
    report = tilewright.compile_report(half, (16,), (meta, meta))
    assert list(report.by_arch) == ["sm_90", "sm_121"]
    assert report.ok
    assert 0 < report["sm_90"].resources.registers <= 255
    assert "H200" in str(report)
    assert "GB10" in str(report)


def test_a_kernel_that_does_not_compile_has_the_message():
    @ct.kernel
    def odd(x):
        ct.store(x, (0,), ct.load(x, (0,), (3,)))

    report = tilewright.compile_report(odd, (1,), (torch.zeros(4),), arch="sm_90")
    assert not report.ok
    assert "FAILED" in str(report)
    assert "power of two" in str(report)


def test_wrong_calls_of_compile_report():
    with pytest.raises(TypeError, match=r"write @ct\.kernel above"):
        tilewright.compile_report(plain, (1,), ())
    for arch in ("sm_70", "cpu"):
        with pytest.raises(ValueError, match="arch must be"):
            tilewright.compile_report(half, (1,), (torch.zeros(4), torch.zeros(4)), arch=arch)
    for none in ((), 90, None):
        with pytest.raises((TypeError, ValueError), match=r"arch must be a target or several, such as \('sm_90', 'sm_121'\), got"):
            tilewright.compile_report(half, (1,), (torch.zeros(4), torch.zeros(4)), arch=none)


def test_without_a_compiler_one_line_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(disassemble, "find_tool", lambda name: None)
    with pytest.raises(ToolMissing, match=r"tileiras must be installed \(pip install 'tilewright\[cuda\]'\)"):
        tilewright.compile_report(half, (1,), (torch.zeros(4), torch.zeros(4)))
    for arguments in (("compile", "rope"), ("learn", "gemm"), ("compile", write(tmp_path))):
        result = run(*arguments)
        assert result.exit_code == 2
        assert result.stderr.startswith("error: tileiras must be installed")
        assert result.stderr.count("\n") == 1


# ---------------------------------------------------------------------------------------- the verbs
FILE = """
    import cuda.tile as ct
    import torch

    @ct.kernel
    def total(x, out):
        t = ct.sum(ct.load(x, (ct.bid(0),), (4,)))
        {line}

    def example_total():
        return (4,), (torch.ones(16), torch.zeros(1))
"""
RACE = "ct.scatter(out, 0, ct.gather(out, 0) + t)"


def write(folder, line: str = "ct.atomic_add(out, 0, t)", name: str = "mine.py") -> str:
    (folder / name).write_text(textwrap.dedent(FILE.format(line=line)))
    return f"{folder / name}:total"


def test_the_verb_interprets_a_kernel_of_a_file(tmp_path):
    page, file = tmp_path / "page.html", tmp_path / "found.json"
    result = run("interpret", write(tmp_path), "--trace", page)
    assert result.exit_code == 0, result.output
    assert "nothing wrong was found (checked: bounds, races)" in result.output
    assert page.exists()
    result = run("interpret", write(tmp_path, RACE, "racy.py"), "--json", file, "--trace", page)
    assert result.exit_code == 1
    assert "race between blocks" in result.output
    assert f"drawn in {page}, up to the error" in result.output
    assert json.loads(file.read_text())["error"]["block"] == [1, 0, 0]


def test_the_verb_shows_a_kernel_that_does_not_type_without_a_traceback(tmp_path):
    file = tmp_path / "found.json"
    result = run("interpret", write(tmp_path, "t = ct.load(x, (0,), (6,))"), "--json", file)
    assert (result.exit_code, type(result.exception)) == (1, SystemExit)
    assert "not a power of two" in result.output.splitlines()[0]
    assert "Traceback" not in result.output
    assert "t = ct.load(x, (0,), (6,))" in result.output  # the line of the kernel
    error = json.loads(file.read_text())["error"]
    assert error["block"] is None
    assert error["places"][0][1:] == [8, "total"]


def test_the_verb_compiles_a_kernel_of_a_file(tmp_path):
    result = run("compile", write(tmp_path), "--arch", "sm_90", "--json", "-")
    assert result.exit_code == 0, result.output
    (kernel,) = json.loads(result.stdout)["kernels"]
    assert kernel["archs"]["sm_90"]["resources"]["registers"] > 0
    assert "registers" in result.stderr  # the table, where JSON has stdout


def test_the_verb_runs_blocks_in_the_order_asked_for(tmp_path):
    assert run("interpret", write(tmp_path), "--block-order", "7", "--unwritten").exit_code == 0  # an atomic writes, too
    assert run("interpret", write(tmp_path), "--block-order", "reverse").exit_code == 0
    result = run("interpret", write(tmp_path), "--block-order", "sideways")
    assert (result.exit_code, result.stderr) == (2, "error: --block-order must be forward, reverse or a seed, got 'sideways'\n")


@pytest.mark.parametrize(("name", "message"), [
    ("absent.py:total", "FILE.py:KERNEL must name a Python file that exists, got 'absent.py:total'"),
    ("mine.py", "the kernel must be named, as in mine.py:total"),
    ("mine.py:other", "the file has total, got 'other'"),
    ("bare.py:total", "bare.py must have a function example_total() that returns the grid and the arguments"),
])  # fmt: skip
def test_a_file_that_does_not_fit_is_one_line_and_exit_code_2(tmp_path, monkeypatch, name, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path)
    text = (tmp_path / "mine.py").read_text()
    (tmp_path / "bare.py").write_text(text.partition("def example_total")[0])
    result = run("interpret", name)
    assert result.exit_code == 2
    assert message in result.stderr
    sys.modules.pop("mine", None)
