"""Writes tests/binaries.jsonl.gz: what the compiler makes of the kernels that tests look at.

`make test` then compiles only what is not in it. Run this after you change a kernel, or the
compiler's version; if you forget, the tests only take longer. It needs the compiler, no GPU, and
writes nothing if a test fails.

    python tools/binaries.py          # compiles what the record lacks
    python tools/binaries.py --all    # compiles everything, and leaves out what no test asks for
"""

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path.insert(0, str(TESTS / "support"))

import binaries  # noqa: E402 tests/support is not a package

ASK = {"binaries.made", "compile_launches", "learn_command", "compile_mega_command"}  # they look into ResultCache


def tests_that_ask(file: Path) -> Iterator[str]:
    """The tests of a file that name one of ASK, themselves or in a function of the file."""
    functions = {f.name: f for f in ast.parse(file.read_text()).body if isinstance(f, ast.FunctionDef)}
    names = {name: set(_names(f)) for name, f in functions.items()}
    asking = set(ASK)
    while more := {name for name, used in names.items() if used & asking} - asking:
        asking |= more
    return (f"{file}::{name}" for name in functions if name.startswith("test_") and name in asking)


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield from (node.attr, ast.unparse(node))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--all", action="store_true", help="begin without the record")
    begin_anew = parser.parse_args().all
    tests = [test for file in sorted(TESTS.glob("cpu/test_*.py")) for test in tests_that_ask(file)]
    with tempfile.TemporaryDirectory(prefix="tilewright-binaries-") as folder:
        if not begin_anew:
            binaries.seed(Path(folder))
        environ = os.environ | {"TILEWRIGHT_CACHE_DIR": folder}
        command = [sys.executable, "-m", "pytest", "-q", "-n", str(len(os.sched_getaffinity(0))), "--dist", "worksteal", *tests]
        ended = subprocess.run(command, cwd=TESTS.parent, env=environ).returncode
        if ended == 0:
            print(f"{binaries.pack(Path(folder))} binaries, {binaries.RECORD.stat().st_size >> 10} KiB")
    return ended


if __name__ == "__main__":
    sys.exit(main())
