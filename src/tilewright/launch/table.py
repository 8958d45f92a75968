"""Reads the rows that the tuner stored: problem -> config. tune/store.py writes them.

A row holds where three things are what it was measured with: what its config launches for its
problem, the compiler, and the GPU. So a change of `plan` counts only where it launches something
else, and a new field of Config or Problem with a default drops nothing. A row is taken for its very
problem, if its config is legal there: of the user's file, else of the table shipped for the GPU.
"""

import dataclasses
import enum
import os
import sys
import threading
import typing
import warnings
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch

from .._forks import held_over_forks
from .check import dtype_name
from .device import Device
from .environment import warn_of_value
from .files import append_line, read_regular
from .identity import cache_folder, compiler, launches_digest

SHIPPED = Path(__file__).resolve().parent.parent / "tune" / "tables"
LARGEST = 1 << 28  # bytes of a file of rows; a row has about 500
Plain = dict[str, Any]
Time = typing.Annotated[float, msgspec.Meta(gt=0)]  # rows are compared by ratios and their logarithms
Key = tuple[str, bytes, str, str, str]


class Row(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tuned problem. The first five fields are its key.

    op: its name. digest: of what the config launches (identity.launches_digest).
    compiler: versions of cuda-tile and tileiras. problem, config, runner_up: fields as JSON types.
    time_us, spread_us, default_us, runner_up_us: of one call, timed interleaved; of the median
        capture where there are three.
    tried, dropped: configs timed, and configs that the compile report or the accuracy rule refused.
    accuracy: largest rms_ratio and worst_ratio of the outputs, over what the accuracy rule allows.
    """

    op: str
    problem: Plain
    arch: str
    gpu: str
    compiler: str
    digest: str
    config: Plain
    time_us: Time
    spread_us: float
    default_us: Time | None = None
    runner_up: Plain | None = None
    runner_up_us: Time | None = None
    tried: int = 1
    dropped: int = 0
    accuracy: dict[str, float] = {}
    date: str = ""

    @property
    def key(self) -> Key:
        return key_of(self.op, self.problem, self.arch, self.gpu, self.compiler)


def key_of(op: str, problem: Plain, arch: str, gpu: str, compiler: str) -> Key:
    """The key of a row. No two rows of a table share it."""
    return op, msgspec.json.encode(problem), arch, gpu, compiler


def user_file() -> Path:
    """The one file of this user."""
    return cache_folder() / "tuned.json"


def shipped_file(gpu: str) -> Path:
    """The table that came with the package for a GPU; it need not exist."""
    return SHIPPED / f"{gpu.replace(' ', '_')}.json"


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, none if there is no such file.

    Raises: ValueError naming the file if it holds anything else; OSError for what is no regular
        file, or can't be read.
    """
    try:
        return msgspec.json.decode(read_regular(path, LARGEST), type=list[Row])
    except FileNotFoundError:
        return []
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} must hold a JSON list of tuned problems, got one that does not decode: {error}") from None


def digest_of(decision: Any, problem: Any, config: Any, device: Device) -> str:
    """Of what a config launches for a problem. Raises OSError where there is no source."""
    return launches_digest(decision.plan(problem, config, device))


def plain(value: Any) -> Any:
    """A dataclass, dtype, enum or tuple as JSON types."""
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, (tuple, list)):
        return [plain(v) for v in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return value


def rebuilt(cls: type, fields: Plain) -> Any:
    """The inverse of `plain`, for a dataclass; a field left out has its default.

    Raises: TypeError, KeyError or AttributeError for other fields.
    """
    hints = _hints(cls)
    return cls(**{name: _typed(hints[name], value) for name, value in fields.items()}) if dataclasses.is_dataclass(cls) else cls(**fields)


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


@cache  # raw times have a million fields, of a few hundred hints
def _kinds(hint: Any) -> tuple[tuple[type, ...], type[enum.Enum] | None]:
    """The types that a field may have, and the enum among them."""
    kinds = tuple(part for part in (hint, *typing.get_args(hint)) if isinstance(part, type))
    return kinds, next((kind for kind in kinds if issubclass(kind, enum.Enum)), None)


def _typed(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    kinds, chosen = _kinds(hint)
    if chosen:
        return chosen[value] if isinstance(value, str) else chosen(value)
    if isinstance(value, dict):
        return rebuilt(next(kind for kind in kinds if dataclasses.is_dataclass(kind)), value)
    if isinstance(value, str) and torch.dtype in kinds:
        return getattr(torch, value)
    return tuple(value) if isinstance(value, list) else value


def find(decision: Any, problem: Any, configs: Sequence[Any], device: Device) -> tuple[Any, str] | None:
    """The tuned config for a problem, with where it comes from in words; None if there is none.

    decision: of the op. configs: the legal ones of the problem on `device`, not empty.
    """
    if device.is_cpu or not dataclasses.is_dataclass(problem):
        return None
    for name, path in (("user", user_file()), ("shipped", shipped_file(device.name))):
        try:
            config = _file(path).of_problems(decision, type(configs[0]), device).get(problem)
        except OSError:  # no source to compare with: nothing says that a row still holds
            return None
        if config in configs:
            return config, f"{name} table"
    return None


def state(row: Row, decision: Any, config_class: type, device: Device | None = None) -> str:
    """ "holds", or why no call takes a row of the op that `decision` is of.

    device: the row's; by default the one of its name.

    Raises: OSError where there is no source to compare with.
    """
    device = device or Device.called(row.gpu)
    if device is None:
        return "unknown GPU"
    try:
        problem, config = rebuilt(decision.problem, row.problem), rebuilt(config_class, row.config)
        hash(problem)
        same = digest_of(decision, problem, config, device) == row.digest
    except OSError:
        raise
    except Exception:  # whatever plan makes of a config that is none of its own any more
        return "config changed"
    if not same:
        return "kernel changed"
    return "holds" if row.compiler == compiler() else "another compiler"


class _File:
    """The rows of one file, sorted for look-ups: a program meets new sizes all the time."""

    def __init__(self, path: Path, rows: Sequence[Row]) -> None:
        self.path, self.warned = path, False
        self._groups: dict[tuple[str, str, str], list[Row]] = {}
        for row in rows:
            self._groups.setdefault((row.op, row.gpu, row.arch), []).append(row)
        self._holding: dict[tuple[str, str, str], dict[Any, Any]] = {}

    def of_problems(self, decision: Any, config_class: type, device: Device) -> dict[Any, Any]:
        """The configs of the rows of one op and GPU that hold, by problem."""
        here = decision.op, device.name, device.arch
        if here not in self._holding:
            rows = self._groups.get(here, ())
            holding = [row for row in rows if state(row, decision, config_class, device) == "holds"]
            self._warn(decision.op, rows, holding)
            self._holding[here] = {rebuilt(decision.problem, row.problem): rebuilt(config_class, row.config) for row in holding}
        return self._holding[here]

    def _warn(self, op: str, rows: Sequence[Row], holding: Sequence[Row]) -> None:
        """Once, if more than a tenth of an op's problems have no row that holds.

        Not without a compiler: nothing runs there.
        """
        problems, held = ({msgspec.json.encode(row.problem) for row in some} for some in (rows, holding))
        if 10 * len(problems - held) > len(problems) and not self.warned and "tileiras" in compiler():
            self.warned = True
            text = f"{self.path}: {len(problems - held)} of {len(problems)} problems of {op} were tuned with other kernels or another compiler"
            warnings.warn(f"{text}; untuned defaults take their place until `tilewright tune {op}` has run", stacklevel=2)


_loaded: dict[Path, _File] = {}
_lock = held_over_forks(threading.Lock())


def forget() -> None:
    """Reads the files again at the next look-up."""
    with _lock:
        _loaded.clear()


def _file(path: Path) -> _File:
    """A file, read once a process."""
    with _lock:
        if path not in _loaded:
            rows: list[Row] = []
            try:
                rows = read_rows(path)
            except ValueError as error:
                warnings.warn(f"{error}; it is not used, and `tilewright tune` will set it aside", stacklevel=2)
            except OSError as error:
                warnings.warn(f"{error}; it is not used", stacklevel=2)
            _loaded[path] = _File(path, rows)
        return _loaded[path]


# ---------------------------------------------------------------------------- TILEWRIGHT_SHOW_PLANS
def log_file() -> Path:
    """What `TILEWRIGHT_SHOW_PLANS=log` appends to, and `tilewright tune --from-log` reads."""
    return cache_folder() / "plans.jsonl"


def show(op: str, problem: Any, device: Device, config: Any, source: str) -> None:
    """Shows a decision in one line if TILEWRIGHT_SHOW_PLANS asks for it.

    1 prints to stderr, log appends to `log_file`. What can't be written is lost, with a warning:
    no call of an op fails for its log.
    """
    wanted = os.environ.get("TILEWRIGHT_SHOW_PLANS", "")
    if wanted in ("", "0"):
        return
    warn_of_value("TILEWRIGHT_SHOW_PLANS", wanted)
    try:
        if wanted == "log":
            line = {"op": op, "problem": plain(problem), "gpu": device.name, "config": plain(config), "source": source}
            append_line(log_file(), msgspec.json.encode(line))
        else:
            print(f"tilewright: {op} {problem} on {device.name} -> {config} -> {source}", file=sys.stderr)
    except (OSError, ValueError) as error:  # ValueError: a closed stderr
        warnings.warn(f"TILEWRIGHT_SHOW_PLANS: {error}; this plan is not shown", stacklevel=2)
