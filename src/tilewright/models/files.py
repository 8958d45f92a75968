"""Files of a model, which a stranger may have made: what is wrong with one is one error.

Nothing here trusts a length, a number or a name of a file before it is compared with the file's
size and with the model that its config describes.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ..launch.files import read_regular

NAMED = 3  # weights that an error names of each kind
LONGEST = 300  # characters of a reason: names in a file may be long, and so may what another library says
TRUSTED = "with --trust-remote-code (trust_remote_code=True) by somebody who has read its code"


def require_transformers(what: str) -> None:
    """Raises ModuleNotFoundError that says what to install, unless transformers is here."""
    if find_spec("transformers") is None:
        raise ModuleNotFoundError(f"{what} needs transformers: pip install 'tilewright[models]'", name="transformers")


class ModelFileError(ValueError):
    """A model's files are broken, incomplete or not trusted. The message names file and reason."""

    exit_code = 2  # of the command line

    def __init__(self, message: str) -> None:
        super().__init__(_one_line(message))


def file_error(path: Path, be: object, was: object) -> ModelFileError:
    """The error to raise: `raise file_error(path, "a GGUF file", "a folder")`."""
    return ModelFileError(f"{path} must be {_shown(be, 2 * LONGEST)}, got {_shown(was, LONGEST)}")


def _shown(text: object, most: int) -> str:
    return _one_line(str(text)[:most])[:most]


def _one_line(text: str) -> str:
    """A name in a file, or of one, may hold any character, also those that a terminal obeys."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


@contextmanager
def read_by_others(path: Path, what: str) -> Iterator[None]:
    """Turns whatever transformers and its parsers raise while they read `path` into an error that
    names it, except for missing packages and full memory.
    """
    try:
        yield
    except (ModelFileError, ImportError, MemoryError, torch.OutOfMemoryError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic of Rust code is no Exception
        reason = " ".join(str(error).split()) or type(error).__name__
        if isinstance(error, KeyError):
            reason = f"no {reason}"
        if "trust_remote_code" in reason:  # and is not given: that they ask on stdin is answered in advance
            what, reason = f"{what}, or one loaded {TRUSTED}", "a model that needs its own Python"
        raise file_error(path, what, reason) from error


def read_json(path: Path, most: int) -> dict[str, Any]:
    """The JSON object in a file of at most `most` bytes.

    Raises: ModelFileError for anything else, and for numbers that are not finite.
    """
    try:
        content = read_regular(path, most)
    except (OSError, ValueError) as error:
        raise ModelFileError(str(error)) from None
    return json_object(path, content)


def json_object(path: Path, content: bytes, *, once: bool = False) -> dict[str, Any]:
    """As `read_json`, of what was read from `path`. once: refuse an object with one name twice."""
    try:
        found = json.loads(content.decode("utf-8"), object_pairs_hook=_once if once else None, parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise file_error(path, "JSON that is nested less deeply", "more levels than a parser takes") from None
    except ValueError as error:
        raise file_error(path, "a JSON object", f"none: {str(error)[:LONGEST]}") from None
    if not isinstance(found, dict):
        raise file_error(path, "a JSON object", f"a {type(found).__name__}")
    return found


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"{next(name for name in found if counts[name] > 1)!r} appears twice")
    return found


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text} is not a finite number")
    return value


def some(names: Sequence[object]) -> str:
    """The first few of many names, and how many there are."""
    return f"{list(names[:NAMED])}" + (f" of {len(names)}" if len(names) > NAMED else "")
