"""A `Trace` as one HTML page: text, data and script, and no other file."""

import html
import json
import linecache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .trace import Step, Trace

TEMPLATE = Path(__file__).with_name("trace.html")
SECTOR = 32  # bytes that device memory moves at once
MOST_RECTANGLES = 400  # that the page draws of one access; a scattered one has more


def page(trace: "Trace") -> str:
    data = json.dumps(_data(trace), separators=(",", ":")).replace("</", "<\\/")
    text = TEMPLATE.read_text(encoding="utf-8")
    return text.replace("{{kernel}}", html.escape(trace.kernel)).replace("{{summary}}", html.escape(str(trace))).replace("{{data}}", data)


def _data(trace: "Trace") -> dict[str, Any]:
    lines = list(dict.fromkeys(step.line for step in trace.steps))
    places = {step.line: step.place for step in trace.steps}
    index = {array.name: i for i, array in enumerate(trace.arrays)}
    blocks = list(dict.fromkeys(step.block for step in trace.steps))
    at_line, at_block = ({value: i for i, value in enumerate(values)} for values in (lines, blocks))

    def plain(step: "Step") -> dict[str, Any]:
        made: dict[str, Any] = {"b": at_block[step.block], "k": step.kind, "l": at_line[step.line]}
        if step.kind == "mma":
            return made | {"p": step.product, "t": step.dtypes}
        found = runs(step.elements, trace.arrays[index[step.array]].columns)
        more = {"m": len(found) - MOST_RECTANGLES} if len(found) > MOST_RECTANGLES else {}
        return made | {"a": index[step.array], "r": found[:MOST_RECTANGLES], "n": step.elements.size, "s": step.sectors} | more

    return {
        "sector": SECTOR,
        "grid": trace.grid,
        "arrays": [
            {"name": a.name, "dtype": a.dtype, "shape": a.shape, "rows": a.rows, "columns": a.columns, "size": a.itemsize} for a in trace.arrays
        ],
        "blocks": blocks,
        "lines": [
            {
                "file": Path(places[line][0]).name,
                "line": places[line][1],
                "code": linecache.getline(*places[line][:2]).strip(),
                "live": [{"name": t.name, "dtype": t.dtype, "shape": t.shape, "bytes": t.size_bytes} for t in trace.live.get(line, ())],
            }
            for line in lines
        ],
        "steps": [plain(step) for step in trace.steps],
        "leftOut": trace.left_out,
    }


def runs(elements: np.ndarray, columns: int) -> list[tuple[int, int, int, int]]:
    """Elements as rectangles: (first row, first column, rows, columns), in order.

    Rows that hold the same columns, one below the other, are one rectangle.
    """
    rows, at = np.divmod(np.unique(elements), columns)
    breaks = np.flatnonzero((np.diff(at) != 1) | (np.diff(rows) != 0)) + 1
    bounds = [0, *breaks.tolist(), len(at)]
    found: list[tuple[int, int, int, int]] = []
    for start, end in pairwise(bounds):
        row, column, n = int(rows[start]), int(at[start]), end - start
        if found and (found[-1][1], found[-1][3]) == (column, n) and found[-1][0] + found[-1][2] == row:
            found[-1] = (found[-1][0], column, found[-1][2] + 1, n)
        else:
            found.append((row, column, 1, n))
    return found
