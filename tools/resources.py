"""Writes docs/resources.json: what the compiler makes of each op's default, for the ops gallery,
and the table of docs/compile.md: instructions for each small weight.

One problem of each op, the largest of its benchmark. Needs the compiler, no GPU; some minutes on
one core the first time, and less when the results are cached.

    python tools/resources.py [weights]    # the table alone
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tilewright import ops
from tilewright.compile import compile_ops, representative
from tilewright.compile.cache import toolchain
from tilewright.compile.report import ARCHS as ALL_ARCHS
from tilewright.ops import quantized_matmul, quantized_moe

ARCHS = ("sm_80", "sm_90", "sm_100", "sm_121")
FILE = Path(__file__).resolve().parent.parent / "docs" / "resources.json"
PAGE = FILE.with_name("compile.md")
MARK = "| instructions a weight"
FORMATS, ROWS = ("int4-128", "int4-32-zeros", "mxfp4", "e4m3"), (1, 16)
EXPERTS = (4, 128, 2880, 2880)  # of gpt-oss-120b
HOW = {"defaults_only": True, "jobs": 1, "on_done": lambda *counts: print(*counts, flush=True)}


def weights() -> Iterator[str]:
    """A line for each format and number of rows: the default of 8192 x 8192, or of a mixture."""
    problems = {
        quantized_matmul: {f"{name}, {m} row{'s' * (m > 1)}": quantized_matmul.Problem(m, 8192, 8192, name) for name in FORMATS for m in ROWS},
        quantized_moe: {f"mxfp4 experts, {t} token{'s' * (t > 1)}": quantized_moe.Problem(t, *EXPERTS, bias=True) for t in (1, 16, 256)},
    }
    yield f"{MARK} | {' | '.join(ALL_ARCHS)} |"
    yield "|" + "---|" * (1 + len(ALL_ARCHS))
    for op, named in problems.items():
        for name, problem in named.items():
            rows = compile_ops((op,), ALL_ARCHS, problems=lambda op, device, problem=problem: (problem,), **HOW)
            bad = [row for row in rows if row.failed or row.compiled.resources.stack_bytes]
            assert not bad, bad
            found = {row.arch: f"{row.per_weight:.1f}" for row in reversed(rows) if row.per_weight}
            yield f"| {name} | {' | '.join(found.get(arch, '-') for arch in ALL_ARCHS)} |"


def write_weights() -> None:
    """In place of the table that stands on the page."""
    before, _, rest = PAGE.read_text().partition(MARK)
    assert rest, f"{PAGE} must have a line that begins with {MARK!r}"
    PAGE.write_text(before + "\n".join(weights()) + "\n\n" + rest.partition("\n\n")[2])


def main() -> None:
    write_weights()
    if sys.argv[1:] == ["weights"]:
        return
    rows = compile_ops(ops.ALL, ARCHS, problems=lambda op, device: representative(op, device)[:1], **HOW)
    lines = []
    for row in rows:
        found = row.compiled.resources
        line = {"op": row.op, "arch": row.arch, "kernel": row.kernel, "problem": row.problem}
        if found is not None:
            line |= {"registers": found.registers, "stack": found.stack_bytes, "shared": found.shared_bytes, "matrix": sorted(found.matrix)}
        lines.append(json.dumps(line))
    FILE.write_text('{"toolchain": ' + json.dumps(toolchain()) + ', "rows": [\n' + ",\n".join(lines) + "\n]}\n")


if __name__ == "__main__":
    main()
