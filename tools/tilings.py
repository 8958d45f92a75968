"""Pictures for the ops gallery: which parts of which arrays a block reads and writes.

Nothing is drawn by hand. An op plans one of its small problems as for an H200, the interpreter runs
that plan and notes each access, and the picture shows those of one block. `python tools/tilings.py`
writes docs/tilings.json, which the site draws; CONTRIBUTING.md says when.
"""

import dataclasses
import html
import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from tilewright import cascade_decode, ops
from tilewright.bench.report import case_name
from tilewright.interpret import run as interpreter
from tilewright.interpret.trace import Trace
from tilewright.launch import Device
from tilewright.testing import op_name, public_function, seeded_inputs
from tilewright.testing.cases import cases

FILE = Path(__file__).resolve().parent.parent / "docs" / "tilings.json"
MOST_BYTES, MOST_FLOPS = 1 << 24, 1 << 31
ENOUGH_BLOCKS = 16
MOST_RECTANGLES = 64  # of one array and kind
WIDE, HIGH, LARGEST = 190, 150, 12  # of an array, and of an element
Rectangle = tuple[int, int, int, int]  # first row, first column, rows, columns


# ------------------------------------------------------------------------------------------ what is
def tiling(op: Any) -> dict[str, Any]:
    """The launch that touches most, of the plainest, then smallest problem with enough blocks."""
    best: tuple[int, Any, list[Trace]] | None = None
    problems = dict.fromkeys(cases(op, "small") + cases(op, "bench") + cases(op, "real"))
    for problem in sorted((p for p in problems if _fits(p)), key=lambda p: (_options(p), p.cost().size_bytes)):
        traces = launches_of(public_function(op), seeded_inputs(op, problem, torch.device("cpu")))
        blocks = _blocks(max(traces, key=_touched)) if traces else 0
        if best is None or blocks > best[0]:
            best = blocks, problem, traces
        if blocks >= ENOUGH_BLOCKS:
            break
    if best is None or not best[0]:
        raise ValueError(f"{op_name(op)} must have a problem of at most {MOST_BYTES} bytes, got none")
    trace = max(best[2], key=_touched)
    return {"op": op_name(op), "problem": case_name(best[1]), **_picture(trace)}


def cascade() -> dict[str, Any]:
    """Of `cascade_decode`, which is no op of its own: 8 sequences, a prefix 16 times their keys."""
    torch.manual_seed(0)
    q, prefix, own = ((8, 8, 1, 64), (2, 1024, 64), (8, 2, 64, 64))
    names = {"q": q, "prefix_k": prefix, "prefix_v": prefix, "k": own, "v": own}
    traces = launches_of(cascade_decode, {name: torch.randn(shape).bfloat16() for name, shape in names.items()})
    problem = "bf16 batch=8 heads=8/2 head_dim=64 prefix=1024 keys=64"
    return {"op": "cascade_decode", "problem": problem, **_picture(max(traces, key=_touched))}


def launches_of(function: Any, inputs: dict[str, Any]) -> list[Trace]:
    """What each launch of one call did, planned as for an H200."""
    gpu, traces, execute = Device.named("H200"), [], interpreter.execute

    def watched(kernel: Any, grid: Any, args: Any) -> None:
        traces.append(Trace(kernel._pyfunc.__name__))
        execute(kernel, grid, args, traces[-1])

    with mock.patch.object(Device, "of", staticmethod(lambda tensor: gpu)), mock.patch.object(interpreter, "execute", watched):
        function(**inputs)
    return traces


def _fits(problem: Any) -> bool:
    cost = problem.cost()
    return bool(cost.size_bytes <= MOST_BYTES and cost.flops <= MOST_FLOPS)


def _options(problem: Any) -> int:
    """How many options of a problem differ from their defaults."""
    given = [f for f in dataclasses.fields(problem) if f.default is not dataclasses.MISSING]
    return sum(getattr(problem, f.name) != f.default for f in given)


def _blocks(trace: Trace) -> int:
    return len({step.block for step in trace.steps})


def _touched(trace: Trace) -> int:
    return sum(step.elements.size for step in trace.steps)


def _picture(trace: Trace) -> dict[str, Any]:
    """Of the block in the middle: each array that it uses, and where."""
    used = sorted({step.block for step in trace.steps}, key=lambda block: block[::-1])
    block = used[len(used) // 2]
    arrays = []
    for array in trace.arrays:
        mine: dict[str, list[Rectangle]] = {"load": [], "store": []}
        for step in trace.steps:
            if step.array == array.name and step.block == block and step.elements.size:
                kind = mine["load" if step.kind == "load" else "store"]
                kind += [r for r in rectangles(step.elements, array.columns) if r not in kind]
        if mine["load"] or mine["store"]:
            kept = {kind: found[:MOST_RECTANGLES] for kind, found in mine.items()}
            arrays.append({"name": array.name, "dtype": array.dtype, "shape": list(array.shape), **kept})
    products = [step.product for step in trace.steps if step.kind == "mma" and step.block == block]
    return {"kernel": trace.kernel, "grid": list(trace.grid), "block": list(block), "arrays": arrays, "products": _counted(products)}


def rectangles(elements: np.ndarray, columns: int) -> list[Rectangle]:
    """Elements, numbered row by row, as rectangles: rows below one another with equal ends."""
    found: list[Rectangle] = []
    rows, inverse = np.unique(elements // columns, return_inverse=True)
    for i, row in enumerate(rows.tolist()):
        mine = elements[inverse == i] % columns
        for run in np.split(mine, np.flatnonzero(np.diff(mine) > 1) + 1):
            first, count = int(run[0]), int(run[-1] - run[0]) + 1
            above = next((k for k, r in enumerate(found) if r[0] + r[2] == row and (r[1], r[3]) == (first, count)), None)
            if above is None:
                found.append((row, first, 1, count))
            else:
                found[above] = (found[above][0], first, found[above][2] + 1, count)
        if len(found) > MOST_RECTANGLES:
            break
    return found


def _counted(products: list[tuple[int, ...]]) -> list[tuple[str, int]]:
    shapes = dict.fromkeys("x".join(map(str, p)) for p in products)
    return [(shape, sum("x".join(map(str, p)) == shape for p in products)) for shape in shapes]


# ------------------------------------------------------------------------------------- how it looks
def svg(found: dict[str, Any]) -> str:
    """One picture: arrays side by side, each with its leading axes folded into rows."""
    parts, x, height = [], 8, 0
    for array in found["arrays"]:
        *leading, columns = array["shape"] or [1]
        rows = int(np.prod(leading, dtype=np.int64)) if leading else 1
        scale = min(WIDE / columns, HIGH / rows, LARGEST)
        wide, high = max(10.0, min(WIDE, columns * scale)), max(10.0, min(HIGH, rows * scale))
        label = max(wide, 6.3 * len(array["name"]) + 4, 5.4 * len(_shape(array)))
        parts.append(f'<text x="{x}" y="16" class="n">{html.escape(array["name"])}</text><text x="{x}" y="30" class="s">{_shape(array)}</text>')
        parts.append(f'<rect x="{x}" y="38" width="{wide:.1f}" height="{high:.1f}" class="a"/>')
        for kind in ("load", "store"):
            for row, column, count, across in array[kind]:
                left, top = x + wide * column / columns, 38 + high * row / rows
                w, h = max(1.0, wide * across / columns), max(1.0, high * count / rows)
                parts.append(f'<rect x="{left:.1f}" y="{top:.1f}" width="{w:.1f}" height="{h:.1f}" class="{kind}"/>')
        x, height = x + int(label) + 22, max(height, int(high))
    style = (
        "text{font:11px sans-serif;fill:var(--ink,#222)}.s{font-size:9px;opacity:.75}.n{font-weight:600}"
        ".a{fill:none;stroke:var(--line,#888)}.load{fill:#3b7dd8;fill-opacity:.45;stroke:#3b7dd8;stroke-width:.6}"
        ".store{fill:#d9793a;fill-opacity:.6;stroke:#d9793a;stroke-width:.6}"
    )
    size = f'viewBox="0 0 {x} {height + 48}" style="max-width:{x}px"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>{"".join(parts)}</svg>'


def caption(found: dict[str, Any]) -> str:
    """What the picture shows, in words."""
    products = ", ".join(f"{shape} (m, n, k) {times} times" for shape, times in found["products"])
    blocks = " x ".join(map(str, found["grid"]))
    multiplied = f" It multiplies {products}." if products else ""
    return (
        f"What block {tuple(found['block'])} of {blocks} of `{found['kernel']}` reads (blue) and writes (orange), "
        f"for `{found['problem']}`, planned for an H200.{multiplied}"
    )


def _shape(array: dict[str, Any]) -> str:
    return f"{array['dtype']}[{', '.join(map(str, array['shape']))}]"


def main() -> None:
    rows = []
    for found in (*map(tiling, ops.ALL), cascade()):
        rows.append(json.dumps(found))
        print(rows[-1][:120], flush=True)
    FILE.write_text("[\n" + ",\n".join(rows) + "\n]\n")


if __name__ == "__main__":
    main()
