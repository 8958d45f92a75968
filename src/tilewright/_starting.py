"""Ctrl-C while the command line imports torch, which takes seconds.

The package imports this first, and this imports as little as it can: until the handler is there,
Python prints where it was. A program that imports the package keeps its own handler.
"""

import os
import signal
import sys


def _is_command() -> bool:
    """Whether `tilewright` or `python -m tilewright` runs, and not a program that uses it."""
    name = os.path.basename(sys.argv[0]).partition(".")[0] if sys.argv else ""
    return name == "tilewright" or (name == "-m" and "tilewright" in sys.orig_argv)


def _stop(*signal_and_frame: object) -> None:
    os.write(2, b"stopped\n")
    os._exit(130)  # STOPPED of command_line.py, which imports typer


def refuse(message: str) -> None:
    """An error of the command line in one line, else an ImportError."""
    if _is_command():
        os.write(2, f"error: {message}\n".encode())
        os._exit(2)  # CANNOT
    raise ImportError(message)


def started() -> None:
    """From here on Ctrl-C is a KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where Ctrl-C is ignored
    signal.signal(signal.SIGINT, _stop)
