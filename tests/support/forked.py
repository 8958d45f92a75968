"""A program in a forked child: as another process, but without the seconds that imports take."""

import os
import runpy
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def program(main: Callable[[], Any], *arguments: str, folder: Path = Path(), given: str = "", out: int | None = None) -> Done:
    """What a call of main leaves. arguments: sys.argv. given: what it can read. out: another file
    that it writes to.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3)]
        files[0].write(given)
        files[0].seek(0)
        child = os.fork()
        if not child:
            os._exit(_run(main, list(arguments), folder, files, out))
        _, status = os.waitpid(child, 0)
        for file in files:
            file.seek(0)
        return Done(os.waitstatus_to_exitcode(status), files[1].read(), files[2].read())


def script(path: Path, **how: Any) -> Done:
    """`python PATH`"""

    def main() -> None:
        sys.path.insert(0, str(path.parent))
        runpy.run_path(str(path), run_name="__main__")

    return program(main, str(path), **how)


def _run(main: Callable[[], Any], arguments: list[str], folder: Path, files: list[Any], out: int | None) -> int:
    for number, file in enumerate(files):
        os.dup2(file.fileno(), number)
    if out is not None:
        os.dup2(out, 1)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode, closefd=False) for number, mode in enumerate("rww"))
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(120)
    code: Any = 0
    try:
        os.chdir(folder)
        sys.argv = arguments
        main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)
