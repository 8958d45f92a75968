"""`tilewright profile`: what it makes of the profilers' tables, and what it says without them."""

import stat
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tilewright.bench import profile
from tilewright.bench.profile import kernels_of, profile_command, sums_of, tool, waits_of
from tilewright.cli import app
from tilewright.launch import Device

NCU = """==PROF== Connected to process 7
"ID","Process ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"0","7","softmax_kernel_Kt2_A2bf16_1v8l0","GPU Speed Of Light Throughput","Memory Throughput","%","91.2"
"0","7","softmax_kernel","GPU Speed Of Light Throughput","Duration","us","12.5"
"0","7","softmax_kernel","Launch Statistics","Registers Per Thread","register/thread","168"
"0","7","softmax_kernel","Compute Workload Analysis","SM: Pipe Tensor Cycles Active","%","0.5"
"0","7","softmax_kernel","Compute Workload Analysis","Tensor (All)","%","0.7"
"0","7","softmax_kernel","Warp State Statistics","Stall Long Scoreboard","inst","7.5"
"0","7","softmax_kernel","Warp State Statistics","Stall Barrier","inst","1,024.0"
"1","7","merge_kernel","Launch Statistics","Registers Per Thread","register/thread","26"
"""
SOURCE = """"Kernel Name","softmax_kernel_Kt2"
"Address","Source","# Samples","Instructions Executed","stall_long_sb","stall_wait","stall_wait (Not Issued)"
"0","      LDG.E R1","30","64","25","5","90"
"1","      FADD R1","5","64","0","5","0"
"2","      STG.E R1","65","32","10","55","0"
"Kernel Name","merge_kernel_Kt2"
"Address","Source","# Samples","Instructions Executed","stall_long_sb","stall_wait"
"0","EXIT","0","8","0","0"
"""
NSYS = """Processing...
Time (%),Total Time (ns),Instances,Avg (ns),Name
75.0,3000000,60,50000.0,"matmul_kernel, tuned"
25.0,1000000,30,33333.3,rms_norm_kernel
"""


def test_counters_of_each_launch():
    first, second = kernels_of(NCU)
    assert first["kernel"] == "softmax_kernel", "without the types behind it"
    assert list(first["numbers"].items()) == [
        ("time", "12.5 us"), ("registers", "168 register/thread"), ("memory, of its peak", "91.2 %"), ("tensor cores, of their cycles", "0.5 %"),
    ], "in our order"  # fmt: skip
    assert list(first["stalls"].items()) == [("barrier", 1024.0), ("long scoreboard", 7.5)], "the largest first"
    assert second == {"kernel": "merge_kernel", "numbers": {"registers": "26 register/thread"}, "stalls": {}}
    with pytest.raises(OSError, match="the profiler's table must have a column 'Metric Name', got '==PROF== nothing was profiled'"):
        kernels_of("==PROF== nothing was profiled")


def test_instructions_where_warps_wait():
    first, second = waits_of(SOURCE, 2)
    assert first == [
        {"line": 0, "share_pct": 30.0, "why": "long_sb", "times": 64, "sass": "LDG.E R1"},
        {"line": 2, "share_pct": 65.0, "why": "wait", "times": 32, "sass": "STG.E R1"},
    ], "the two most, in the program's order"
    assert [line["share_pct"] for line in second] == [0.0]


def test_sums_of_a_generation():
    assert sums_of(NSYS) == [
        {"kernel": "matmul_kernel, tuned", "ms": 3.0, "calls": 60, "share_pct": 75.0},
        {"kernel": "rms_norm_kernel", "ms": 1.0, "calls": 30, "share_pct": 25.0},
    ]


def pretended(folder: Path, name: str, script: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_it_runs_the_case_under_ncu_and_shows_the_roof(tmp_path, monkeypatch, capsys):
    (tmp_path / "details").write_text(NCU)
    (tmp_path / "source").write_text(SOURCE)
    pretended(
        tmp_path, "ncu", f'echo "$@" >> {tmp_path}/asked\ncase "$*" in *details*) cat {tmp_path}/details;; *source*) cat {tmp_path}/source;; esac'
    )
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(profile.torch, "empty", lambda *size, device: torch.zeros(0))
    monkeypatch.setattr(profile.Device, "of", lambda tensor: Device.named("H200"))
    assert profile_command("softmax", case="cols=8192", lines=1) == 0
    asked = (tmp_path / "asked").read_text()
    assert "tilewright.bench.profile softmax" in asked
    assert "cols=8192" in asked
    assert "--nvtx-include profiled/" in asked
    printed = capsys.readouterr().out
    for part in ("softmax_kernel", "168 register/thread", "barrier 1024.0, long scoreboard 7.5", "65.0 %", "STG.E R1", "roof on H200: ", "2 kernels"):
        assert part in printed


@pytest.mark.parametrize(
    ("script", "message"),
    [("echo ==ERROR== ERR_NVGPUCTRPERM; exit 1", "the driver must let you read counters"), ("echo no such GPU; exit 3", "got 3: no such GPU")],
)
def test_a_profiler_that_fails_is_one_line(tmp_path, monkeypatch, script, message):
    pretended(tmp_path, "ncu", script)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(OSError, match=message):
        profile_command("softmax")


def test_without_a_profiler_it_says_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(profile, "FOLDERS", ())
    for name, words in (("ncu", "apt-get install cuda-nsight-compute"), ("nsys", "apt-get install cuda-nsight-systems")):
        with pytest.raises(FileNotFoundError, match=words):
            tool(name)
    found = CliRunner().invoke(app, ["profile", "generate", "--options", "--model Qwen2-7B"])
    assert (found.exit_code, found.output.count("\n")) == (2, 1)
    assert "Nsight Systems (nsys) must be installed" in found.output
    assert "--options must be given with generate" in CliRunner().invoke(app, ["profile", "softmax", "--options", "x"]).output
    with pytest.raises(ValueError, match=r"case must be in the name of one of the 37 benchmark cases of softmax, such as .*, got no such"):
        profile_command("softmax", case="no such")
