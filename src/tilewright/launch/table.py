"""What the tuner found, read back: problem -> config. Rows are written by tune/store.py; nothing is searched here.

A row counts where the op's kernels, the compiler and the GPU are the ones that it was measured with, and its config is in the space of the problem
at hand. Looked for in this order: the very problem in the user's file, then in the table shipped for the GPU, then the nearest problem of both.
"""

import dataclasses
import enum
import hashlib
import inspect
import math
import os
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch

from .device import Device
from .identity import cache_folder, compiler, source_digest

SHIPPED = Path(__file__).resolve().parent.parent / "tune" / "tables"
NEAR = 1.0  # the sizes of two near problems differ by less than a factor of two, all of them together
Plain = dict[str, Any]


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tuned problem. The first six fields are its key.

    op: where the op's `plan` lives, `rms_norm` of tilewright.ops.rms_norm or tilewright.ops.rms_norm.decision.
    digest: of the source of its plan and kernels. compiler: versions of cuda-tile and tileiras.
    problem, config, runner_up: fields as JSON types. time_us, spread_us, default_us, runner_up_us: of one call, in one interleaved run.
    tried, dropped: configs timed, and configs that the compile report or the accuracy rule refused.
    accuracy: largest rms_ratio and worst_ratio of the outputs, in units of what the accuracy rule allows.
    """

    op: str
    digest: str
    problem: Plain
    arch: str
    gpu: str
    compiler: str
    config: Plain
    time_us: float
    spread_us: float
    default_us: float | None = None
    runner_up: Plain | None = None
    runner_up_us: float | None = None
    tried: int = 1
    dropped: int = 0
    accuracy: dict[str, float] = {}
    date: str = ""

    @property
    def key(self) -> tuple:
        return key_of(self.op, self.digest, self.problem, self.arch, self.gpu, self.compiler)


def key_of(op: str, digest: str, problem: Plain, arch: str, gpu: str, compiler: str) -> tuple:
    """What two rows may not share."""
    return op, digest, msgspec.json.encode(problem), arch, gpu, compiler


def user_file() -> Path:
    """The one file of this user."""
    return cache_folder() / "tuned.json"


def shipped_file(gpu: str) -> Path:
    """The table that came with the package for a GPU; it need not exist."""
    return SHIPPED / f"{gpu.replace(' ', '_')}.json"


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, none if there is no such file. Raises ValueError naming the file if it holds anything else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Row])
    except FileNotFoundError:
        return []
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} must hold a JSON list of tuned problems, got one that does not decode: {error}") from None


def op_of(function: Callable[..., Any]) -> str:
    """The op that a function of its module or folder belongs to."""
    parts = function.__module__.split(".")
    return parts[parts.index("ops") + 1] if "ops" in parts[:-1] else parts[-1]


def digest_of(plan: Callable[..., Any], config: Any) -> str:
    """Of all source that decides what a config launches: the plan, its kernels, what they call, and the class of the config."""
    return _digest(plan, type(config))  # type: ignore[arg-type]


@cache
def _digest(plan: Any, config: type) -> str:
    return hashlib.sha256((source_digest(plan) + inspect.getsource(config)).encode()).hexdigest()[:16]


def plain(value: Any) -> Any:
    """A dataclass, dtype, enum or tuple as JSON types."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (tuple, list)):
        return [plain(v) for v in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return value


def find(plan: Callable[..., Any], problem: Any, configs: Sequence[Any], device: Device) -> tuple[Any, str] | None:
    """The tuned config for a problem, with the words that say where it comes from; None if there is none.

    configs: the space of the problem on `device`, not empty.
    """
    if device.is_cpu or not dataclasses.is_dataclass(problem):
        return None
    files = [(name, rows) for name, rows in (("user", _rows(user_file())), ("shipped", _rows(shipped_file(device.name)))) if rows]
    if not files:
        return None
    try:
        here = op_of(plan), digest_of(plan, configs[0]), device.arch, device.name, compiler()
    except OSError:  # no source to compare with: nothing says that a row still holds
        return None
    names = size_names(problem)
    options, sizes = _parted(plain(problem), names)
    near = []
    for name, rows in files:
        for other, row in rows.by_options(here, names).get(options, ()):
            apart = distance(sizes, other)
            if apart < NEAR:
                near.append((apart, name, row))
    space = [plain(config) for config in configs] if near else []
    for apart, name, row in sorted(near, key=lambda found: found[0]):  # stable: yours before the shipped one
        if row.config in space:
            where = "" if apart == 0 else ", near " + " ".join(f"{size}={row.problem[size]}" for size in names)
            return configs[space.index(row.config)], f"{name} table{where}"
    return None


def size_names(problem: Any) -> list[str]:
    """Fields that are sizes: integers that every Problem of the class must give. Other fields are options, and equal or not."""
    required = [f.name for f in dataclasses.fields(problem) if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING]
    return [name for name in required if type(getattr(problem, name)) is int]


def distance(a: Sequence[int], b: Sequence[int]) -> float:
    """How far apart the sizes of two problems are, in factors of two, summed."""
    return sum(abs(math.log2(x / y)) if x > 0 and y > 0 else math.inf for x, y in zip(a, b, strict=True) if x != y)


def _parted(problem: Plain, names: Sequence[str]) -> tuple[bytes, tuple[int, ...]]:
    """The options of a problem, to compare as a whole, and its sizes."""
    return msgspec.json.encode({name: value for name, value in problem.items() if name not in names}), tuple(problem[name] for name in names)


class _File:
    """The rows of one file, sorted for look-ups: a program meets new sizes all the time."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._groups: dict[tuple, list[Row]] = {}
        for row in rows:
            self._groups.setdefault((row.op, row.digest, row.arch, row.gpu, row.compiler), []).append(row)
        self._sorted: dict[tuple, dict[bytes, list[tuple[tuple[int, ...], Row]]]] = {}

    def __bool__(self) -> bool:
        return bool(self._groups)

    def by_options(self, here: tuple, names: Sequence[str]) -> dict[bytes, list[tuple[tuple[int, ...], Row]]]:
        """Rows of one op, GPU and compiler, with their sizes, by their options."""
        if here not in self._sorted:
            found: dict[bytes, list[tuple[tuple[int, ...], Row]]] = {}
            for row in self._groups.get(here, ()):
                if all(type(row.problem.get(name)) is int for name in names):
                    options, sizes = _parted(row.problem, names)
                    found.setdefault(options, []).append((sizes, row))
            self._sorted[here] = found
        return self._sorted[here]


_loaded: dict[Path, _File] = {}
_lock = threading.Lock()


def forget() -> None:
    """Reads the files again at the next look-up."""
    with _lock:
        _loaded.clear()


def _rows(path: Path) -> _File:
    """A file, read once a process."""
    with _lock:
        if path not in _loaded:
            try:
                _loaded[path] = _File(read_rows(path))
            except (ValueError, OSError) as error:
                warnings.warn(f"{error}; it is not used, and `tilewright tune` will set it aside", stacklevel=2)
                _loaded[path] = _File(())
        return _loaded[path]


# ------------------------------------------------------------------------------------------------ TILEWRIGHT_SHOW_PLANS
def log_file() -> Path:
    """What `TILEWRIGHT_SHOW_PLANS=log` appends to, and `tilewright tune --from-log` reads."""
    return cache_folder() / "plans.jsonl"


def show(op: str, problem: Any, device: Device, config: Any, source: str) -> None:
    """One line for a decision, where TILEWRIGHT_SHOW_PLANS asks for it: 1 prints to stderr, log appends to `log_file`."""
    wanted = os.environ.get("TILEWRIGHT_SHOW_PLANS", "")
    if wanted in ("", "0"):
        return
    if wanted == "log":
        line = msgspec.json.encode({"op": op, "problem": plain(problem), "gpu": device.name, "config": plain(config), "source": source})
        path = log_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(line + b"\n")
    else:
        print(f"tilewright: {op} {problem} on {device.name} -> {config} -> {source}", file=sys.stderr)
