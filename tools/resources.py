"""Writes docs/resources.json: what the compiler makes of each op's default, for the ops gallery.

One problem of each op, the largest of its benchmark. Needs the compiler, no GPU; a few minutes on
one core the first time, and less when the results are cached.
"""

import json
from pathlib import Path

from tilewright import ops
from tilewright.compile import compile_ops, representative
from tilewright.compile.cache import toolchain

ARCHS = ("sm_80", "sm_90", "sm_100", "sm_121")
FILE = Path(__file__).resolve().parent.parent / "docs" / "resources.json"


def main() -> None:
    how = {"defaults_only": True, "jobs": 1, "on_done": lambda *counts: print(*counts, flush=True)}
    rows = compile_ops(ops.ALL, ARCHS, problems=lambda op, device: representative(op, device)[:1], **how)
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
