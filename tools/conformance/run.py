"""Runs cuTile's public tests and documentation examples on a CPU, in our interpreter.

    git clone https://github.com/NVIDIA/cutile-python DIR
    python tools/conformance/run.py --source DIR [-n 2] [--strict-memory] [--races]
        [--block-order 7] [-k EXPRESSION]

None of that code is part of this repository. docs/interpreter.md says how many tests pass and
explains each failure. pytest's own options may follow.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOO_LARGE = (
    "test_array.py::test_int64_index_inc1",
    "test_list.py::test_add_list_of_int64_index_arrays",
    "test_dispatcher.py::test_max_grid_size_24bit",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="a checkout of cutile-python")
    parser.add_argument("--with-large", action="store_true", help="run the tests with arrays of 2^31 elements too; they run out of time")
    options, rest = parser.parse_known_args()
    tests = options.source.resolve() / "test"
    if not tests.is_dir():
        parser.error(f"--source must hold a folder `test`, got {options.source}")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")])}
    environment.setdefault("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", ".", "-p", "cutile_on_cpu", "-p", "no:cacheprovider"]
    command += ["-q", "--no-header", "--tb=line", "--ignore-glob=bench_*", *rest]
    if not options.with_large:
        command += [part for test in TOO_LARGE for part in ("--deselect", test)]
    suite = subprocess.run([*command, "."], cwd=tests, env=environment).returncode
    examples = subprocess.run([sys.executable, str(HERE / "doc_examples.py"), "--source", str(options.source)], env=environment).returncode
    return suite or examples


if __name__ == "__main__":
    sys.exit(main())
