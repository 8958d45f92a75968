"""What every verb of `tilewright` has in common: exit codes, errors in one line, `--json`.

| exit code | means |
|---|---|
| 0 | fine |
| 1 | something is wrong: an answer, a race, a spill of a default, tokens that differ |
| 2 | it cannot run: an option, a file, a package or a GPU that is missing or does not fit |
| 130 | stopped by Ctrl-C; what was done is kept |
| 141 | who read the output has gone, as `| head` does; what was done is kept |
"""

import contextlib
import functools
import os
import select
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import typer

from ._starting import started
from .launch.files import kind_of

WRONG, CANNOT, STOPPED, UNREAD = 1, 2, 130, 141
EXPECTED = (ValueError, TypeError, KeyError, ImportError, OSError, MemoryError)
LONGEST_PROMPTS = 1 << 28  # bytes of --prompt-file
state = {"traceback": False}


def command(function: Callable[..., int]) -> Callable[..., None]:
    """A function of options that returns its exit code, as a command.

    An expected error becomes one line on stderr and exit code 2.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        started()
        try:
            with json_on_stdout(kwargs):
                code = function(*args, **kwargs)
        except KeyboardInterrupt:
            if state["traceback"]:
                raise
            typer.echo("stopped", err=True)
            code = STOPPED
        except EXPECTED as error:
            if state["traceback"] or (isinstance(error, BrokenPipeError) and _reader_gone()):
                raise
            typer.echo(f"error: {' '.join(_message(error).split()) or type(error).__name__}", err=True)
            code = CANNOT
        if code:
            raise typer.Exit(code)

    return run


@contextlib.contextmanager
def terminal() -> Iterator[None]:
    """What a program does about its standard streams.

    One that is closed is /dev/null: else the next file opened would be it, and get what is printed.
    If the reader of the output goes, the program ends without a word, as others do. COLUMNS=0 means
    a width that nobody knows, as elsewhere: rich would print nothing.
    """
    if os.environ.get("COLUMNS", "").strip().strip("0") == "":
        os.environ.pop("COLUMNS", None)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 for as long as the process is there
    code: Any = UNREAD
    try:
        yield
        return
    except SystemExit as ended:
        if not isinstance(ended.__context__, BrokenPipeError):  # else rich's or typer's, for what they could not print
            if not _reader_gone():
                raise
            code = ended.code or UNREAD
    except OSError as error:  # of a help text: other output is a command's
        if not _reader_gone():
            typer.echo(f"error: {_message(error)}", err=True)
            raise SystemExit(CANNOT) from None
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())  # what is still to be flushed
    raise SystemExit(code) from None


def _reader_gone() -> bool:
    """Whether stdout is a pipe that nobody reads any more."""
    try:
        asked = select.poll()
        asked.register(sys.stdout.fileno(), 0)
    except (AttributeError, OSError):  # no POSIX, or no file
        return False
    return any(event & select.POLLERR for _, event in asked.poll(0))


def _message(error: BaseException) -> str:
    if isinstance(error, KeyError) and error.args:
        return str(error.args[0])
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename} cannot be used: {error.strerror.lower()}"
    if isinstance(error, ModuleNotFoundError) and error.name and "pip install" not in str(error):
        from .doctor import OPTIONAL

        extra = OPTIONAL.get(error.name.partition(".")[0])
        return str(error) + (f": pip install 'tilewright[{extra}]'" if extra else "")
    return str(error)


@contextlib.contextmanager
def json_on_stdout(options: dict[str, Any]) -> Iterator[None]:
    """Checks the file of `--json` before anything runs.

    For `-`, JSON goes to stdout when the verb ends, and all text to stderr.
    """
    file = options.get("json_file")
    if file is None or str(file) != "-":
        if file is not None:
            _check_writable(file)
        yield
        return
    stdout = sys.stdout
    stdout.flush()
    with tempfile.TemporaryDirectory() as folder:
        part = options["json_file"] = Path(folder, "out.json")
        try:
            with contextlib.redirect_stdout(sys.stderr), _descriptor_to_stderr():
                yield
        finally:
            stdout.write(part.read_text() if part.exists() else "")
            stdout.flush()


@contextlib.contextmanager
def _descriptor_to_stderr() -> Iterator[None]:
    """The same for processes that this one starts."""
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _check_writable(file: Path) -> None:
    """Raises ValueError for a file that could not be written in the end, or is no regular file."""
    folder = file.absolute().parent
    while not folder.exists():
        folder = folder.parent
    was = ""
    if file.exists() and not file.is_file():
        was = kind_of(file.stat().st_mode)
    elif file.exists() and not os.access(file, os.W_OK):
        was = "one that cannot be written"
    else:
        try:
            tempfile.TemporaryFile(dir=folder).close()  # os.access says yes to root in /proc
        except OSError:
            was = "one that cannot be written"
    if was:
        raise ValueError(f"--json must be a file, or - for stdout, got {str(file)!r}, {was}")


def prompts_of(file: Path, *, lines: bool) -> list[str]:
    """The prompts of a file, or of stdin: each line that is not empty, or the whole."""
    from .launch.files import read_regular

    try:
        text = sys.stdin.read() if str(file) == "-" else read_regular(file, LONGEST_PROMPTS).decode().replace("\r\n", "\n")
    except OSError as error:
        if error.filename is not None:
            raise
        raise ValueError(f"--prompt-file: {error}; - reads stdin") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompt-file must be UTF-8 text, got {str(file)!r}: {error.reason} at byte {error.start}") from None
    found = [line for line in map(str.strip, text.splitlines()) if line] if lines else [text]
    if not text.strip():
        raise ValueError(f"--prompt-file must hold a prompt, got {str(file)!r}, an empty file")
    return found


def check_name(option: str, known: Collection[str], name: str) -> None:
    """`launch.check_name`, which is imported only for a wrong name: usage errors need no torch."""
    if name not in known:
        from .launch import check_name as fail

        fail(option, known, name)


def refuse(rules: dict[str, bool]) -> None:
    """Raises ValueError with the first message that holds."""
    for message, broken in rules.items():
        if broken:
            raise ValueError(message)


@contextlib.contextmanager
def full_memory_explained() -> Iterator[None]:
    import torch

    try:
        yield
    except RuntimeError as error:  # of the CPU's allocator it has no type of its own
        if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        lower = "Lower --batch, --prompt-tokens or --max-new-tokens, or take a smaller model or --weights"
        raise MemoryError(f"{str(error).splitlines()[0].removesuffix('.')}. {lower}") from error
