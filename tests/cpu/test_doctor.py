"""`tilewright doctor` on made-up machines: nothing of this machine is patched."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from tilewright.doctor import Gpu, System, checks, doctor_command

VERSIONS = {"cuda-tile": "1.7.0", "nvidia-cuda-tileiras": "13.4.92", "nvidia-cuda-nvcc": "13.4.92", "nvidia-nvvm": "13.4.92"}
H200 = Gpu(0, "NVIDIA H200", "sm_90", 150.0)


def tool(folder: Path, name: str) -> Path:
    path = folder / "bin" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o755)
    return path


def toolkit(folder: Path) -> Path:
    tool(folder, "tileiras")
    tool(folder, "ptxas")
    (folder / "lib").mkdir()
    (folder / "lib" / "libnvvm.so.4").touch()
    return folder


def machine(packages: Path | None, *, gpus=(), environ=None, old=None, **changes) -> System:
    """A machine whose tools say 13.4, those under `old` 12.4."""

    def run(command):
        if command[0] == "nvidia-smi":
            return "580.65.06\n"
        number = "12.4" if old and str(old) in command[0] else "13.4"
        return f"Cuda compilation tools, release {number}, V{number}.92\n"

    settings = {
        "environ": environ or {},
        "python": (3, 11, 7),
        "torch_version": "2.13.0",
        "torch_cuda": "13.0" if gpus else None,
        "version": VERSIONS.get,
        "cuda_packages": packages,
        "run": run,
        "find_tool": lambda name: Path("/tools") / name,
        "default_toolkits": (),
        "gpus": lambda: list(gpus),
        "driver_cuda": lambda: (13, 0) if gpus else None,
        "interpret": lambda: "",
        "trial_compile": lambda arch: "",
        "trial_launch": lambda index: "",
        "writable": lambda path: True,
        "free_gb": lambda index: 140.0,
        "files_gb": lambda: 0.0,
        "in_container": False,
    }
    return System(**{**settings, **changes})


def found(system: System) -> dict:
    return {check.name: check for check in checks(system)}


def test_a_machine_in_order_has_no_failure_with_and_without_a_gpu(tmp_path):
    packages = toolkit(tmp_path)
    for gpus in ((), (H200,)):
        lines = found(machine(packages, gpus=gpus))
        assert not [c for c in lines.values() if c.status == "fail"]
        assert lines["tileiras"].found.startswith("13.4.92 at")
        assert ("launch on cuda:0" in lines) == bool(gpus)


def test_the_cuda_home_trap(tmp_path):
    """A compiler on PATH gets CUDA_HOME and then uses that toolkit's older ptxas."""
    new, old = toolkit(tmp_path / "new"), tmp_path / "old"
    tool(old, "ptxas")
    environ = {"PATH": str(new / "bin"), "CUDA_HOME": str(old)}
    line = found(machine(None, gpus=(H200,), environ=environ, old=old))["CUDA_HOME"]
    assert line.status == "fail"
    assert "CUDA 12.4.92" in line.found
    assert line.mend == "unset CUDA_HOME"
    assert found(machine(None, environ=environ, old=old))["CUDA_HOME"].status == "warn", "without a GPU only the report needs the compiler"
    assert found(machine(None, gpus=(H200,), environ=environ))["CUDA_HOME"].status == "ok", "the same release is no trap"
    assert found(machine(new, gpus=(H200,), environ=environ, old=old))["CUDA_HOME"].status == "ok", "cuTile hides it from the packaged compiler"


def test_what_the_playbooks_troubleshooting_knows(tmp_path):
    packages, spark = toolkit(tmp_path), Gpu(0, "NVIDIA GB10", "sm_121", 128.0)
    assert found(machine(packages, gpus=(H200,)))["memory 0"].found == "140 of 150 GB free"
    held = found(machine(packages, gpus=(H200,), free_gb=lambda index: 3.0))["memory 0"]
    assert (held.status, held.found) == ("warn", "3 of 150 GB free")
    assert "nvidia-smi lists who holds the rest" in held.mend
    full = found(machine(packages, gpus=(spark,), free_gb=lambda index: 20.0, files_gb=lambda: 90.0))["memory 0"]
    assert full.found == "20 of 128 GB free, shared with the CPU; 90 GB hold files that were read"
    assert full.mend.endswith("sudo sh -c 'sync; echo 3 > /proc/sys/vm/drop_caches'")
    assert found(machine(packages, gpus=(spark,), free_gb=lambda index: 100.0, files_gb=lambda: 20.0))["memory 0"].status == "ok"
    inside = machine(packages, in_container=True)
    assert "start the container with --gpus all" in found(inside)["container"].mend
    assert "container" not in found(machine(packages, in_container=True, gpus=(H200,)))
    assert "HF_TOKEN" in found(machine(packages))["model hub"].mend
    assert found(machine(packages, environ={"HF_TOKEN": "x"}))["model hub"].mend == ""
    assert found(machine(packages, environ={"HF_HUB_OFFLINE": "1"}))["model hub"].found.startswith("offline")


def test_a_missing_or_mixed_compiler(tmp_path):
    assert found(machine(None, gpus=(H200,)))["tileiras"].status == "fail"
    assert found(machine(None))["tileiras"].status == "warn"
    mixed = VERSIONS | {"nvidia-nvvm": "13.3.1"}
    lines = found(machine(toolkit(tmp_path), gpus=(H200,), version=mixed.get))
    assert lines["toolchain packages"].status == "fail"
    assert "nvidia-nvvm 13.3.1" in lines["toolchain packages"].found


@pytest.mark.parametrize(
    ("changes", "name", "says"),
    [
        ({"python": (3, 10, 1)}, "python", "3.11"),
        ({"torch_version": "2.8.1"}, "torch", "torch>=2.9"),
        ({"version": {"cuda-tile": "1.9.0"}.get}, "cuda-tile", "cuda-tile==1.7.*"),
        ({"gpus": [Gpu(0, "V100", "sm_70", 16.0)]}, "gpu 0", "sm_80"),
        ({"driver_cuda": lambda: (12, 8)}, "driver", "r580"),
        ({"interpret": lambda: "TypeError: no"}, "interpreter", "names what is missing"),
        ({"trial_compile": lambda arch: "Return code 5"}, "trial compile", "reinstall"),
        ({"trial_launch": lambda index: "wrong result"}, "launch on cuda:0", "above"),
    ],
)
def test_what_is_broken_fails_and_says_how_to_mend_it(tmp_path, changes, name, says):
    line = found(machine(toolkit(tmp_path), **{"gpus": (H200,), **changes}))[name]
    assert line.status == "fail"
    assert says in line.mend


def test_what_is_optional_only_warns(tmp_path):
    lines = found(machine(toolkit(tmp_path), find_tool=lambda name: None, writable=lambda path: False, environ={"CUDA_TILE_CACHE_DIR": "off"}))
    for name in ("disassembler", "cache", "cache of cuTile", "transformers"):
        assert lines[name].status == "warn", name
        assert lines[name].mend, name


def test_the_command_prints_one_line_each_or_json_and_judges(tmp_path):
    healthy, broken = machine(toolkit(tmp_path)), machine(None, gpus=(H200,))
    out = io.StringIO()
    assert doctor_command(system=healthy, console=Console(file=out, soft_wrap=True)) == 0
    assert len(out.getvalue().splitlines()) == len(list(checks(healthy)))
    assert doctor_command(system=broken, console=Console(file=io.StringIO())) == 1
    assert doctor_command(tmp_path / "doctor.json", system=healthy, console=Console(file=io.StringIO())) == 0
    assert {"name", "status", "found", "mend"} == set(json.loads((tmp_path / "doctor.json").read_text())[0])


def test_this_machine_runs_the_interpreter():
    assert System().interpret() == ""
