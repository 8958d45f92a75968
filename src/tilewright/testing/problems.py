"""Problems from elsewhere than the cases: of a file, of what an application asked for. Tuner and benchmark take them."""

import dataclasses
import enum
import json
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from .. import ops
from .check import op_name

Task = tuple[ModuleType, Any]  # an op and one of its Problems


def of_file(path: Path) -> list[Task]:
    """The problems of a file of JSON lines, each an object with `op` and `problem`: results of a benchmark, a log of decisions, or written by hand.

    Raises: ValueError naming file and line.
    """
    known = {op_name(op): op for op in ops.ALL}
    return list(dict.fromkeys(_parsed(path, known)))


def _parsed(path: Path, known: dict[str, ModuleType]) -> Iterator[Task]:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            if entry["op"] not in known:
                raise ValueError(f"op must be one of {', '.join(known)}, got {entry['op']!r}")
            op = known[entry["op"]]
            yield op, rebuilt(op.Problem, entry["problem"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number} must be an object with op and problem: {type(error).__name__}: {error}") from None


def rebuilt(cls: type, plain: dict[str, Any]) -> Any:
    """The Problem whose fields these are, as JSON types; a field left out has its default."""
    hints = typing.get_type_hints(cls)
    return cls(**{name: _typed(hints[name], value) for name, value in plain.items()}) if dataclasses.is_dataclass(cls) else cls(**plain)


def _typed(hint: Any, value: Any) -> Any:
    kinds = [part for part in (hint, *typing.get_args(hint)) if isinstance(part, type)]
    chosen = next((kind for kind in kinds if issubclass(kind, enum.Enum)), None)
    if chosen and value is not None:
        return chosen[value] if isinstance(value, str) else chosen(value)
    if isinstance(value, str) and torch.dtype in kinds:
        return getattr(torch, value)
    return tuple(value) if isinstance(value, list) else value
