"""Problems from elsewhere than the cases: of a file, of what an application asked for."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from .. import ops
from ..launch import check_name
from ..launch.files import read_regular
from ..launch.table import LARGEST, rebuilt
from .check import op_name

Task = tuple[ModuleType, Any]  # an op and one of its Problems


def of_file(path: Path) -> list[Task]:
    """The problems of a file of JSON lines, each an object with `op` and `problem`.

    They are results of a benchmark, a log of decisions, or written by hand.

    Raises: ValueError naming file and line; OSError for what is no regular file.
    """
    known = {op_name(op): op for op in ops.ALL}
    return list(dict.fromkeys(_parsed(path, known)))


def _parsed(path: Path, known: dict[str, ModuleType]) -> Iterator[Task]:
    for number, line in enumerate(read_regular(path, LARGEST).decode(errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            check_name("op", known, entry["op"])
            op = known[entry["op"]]
            yield op, rebuilt(op.Problem, entry["problem"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{path}:{number} must be an object with op and problem: {type(error).__name__}: {error}") from None
