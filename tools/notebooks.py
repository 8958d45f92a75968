"""Runs the notebooks of docs/notebooks from top to bottom on this machine's CPU.

python tools/notebooks.py [FILE...]     run, and write the outputs into the files
python tools/notebooks.py --check ...   exit 1 where an output differs (a test runs this)

A notebook is a plain .ipynb. Nothing of Jupyter is needed to run it: a cell prints, and its last
expression is shown.
"""

import ast
import contextlib
import io
import json
import linecache
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "notebooks"


def run(notebook: dict[str, Any], name: str) -> dict[str, Any]:
    """The same notebook with new outputs. Cells share one namespace and one empty folder."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells, count, before = [], 0, os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for cell in notebook["cells"]:
                if cell["cell_type"] != "code":
                    cells.append(cell)
                    continue
                count += 1
                text, svg = output(cell["source"], f"{name}:{count}", namespace)
                outputs: list[dict[str, Any]] = [{"name": "stdout", "output_type": "stream", "text": text}] if text else []
                outputs += [{"data": {"image/svg+xml": svg}, "metadata": {}, "output_type": "display_data"}] if svg else []
                cells.append({**cell, "execution_count": count, "outputs": outputs})
        finally:
            os.chdir(before)
    return {**notebook, "cells": cells}


def output(source: Any, name: str, namespace: dict[str, Any]) -> tuple[str, str]:
    """What a cell prints, with its last expression; and that as SVG, if Jupyter would draw it."""
    code = source if isinstance(source, str) else "".join(source)
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)  # kernels are read from their source
    tree = ast.parse(code, name)
    last = ast.Expression(tree.body.pop().value) if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(tree, name, "exec"), namespace)
        value = eval(compile(last, name, "eval"), namespace) if last else None
        svg = str(value._repr_svg_()) if hasattr(value, "_repr_svg_") else ""
        if value is not None and not svg:
            print(value if isinstance(value, str) else repr(value))
    return out.getvalue(), svg


def written(notebook: dict[str, Any]) -> str:
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    names = [word for word in sys.argv[1:] if word != "--check"]
    wrong = []
    for path in map(Path, names) if names else sorted(FOLDER.glob("*.ipynb")):
        old = path.read_text()
        new = written(run(json.loads(old), path.stem))
        if new != old and "--check" in sys.argv:
            wrong.append(path.name)
        elif new != old:
            path.write_text(new)
    if wrong:
        print(f"outputs are not those of a run: {', '.join(wrong)}. Run python tools/notebooks.py", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
