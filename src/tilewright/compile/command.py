"""`tilewright compile`: a table for a terminal, lines for a pipe, JSON for a program."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from .. import ops as all_ops
from ..launch import Device
from ..launch.console import plain_console
from ..launch.files import write_json
from .cache import toolchain
from .disassemble import require_tools
from .report import Row, archs_of, compile_ops

COLUMNS = (
    "op",
    "arch",
    "kernel",
    "regs",
    "stack B",
    "smem B",
    "matrix",
    "UTMALDG",
    "LDL",
    "STL",
    "inst/w",
    "cubin B",
    "s",
    "",
    "config",
    "first problem",
)
EVERY_S = 10.0  # between lines that say how far it is
NUMBERS = {"regs", "stack B", "smem B", "UTMALDG", "LDL", "STL", "inst/w", "cubin B", "s"}


def compile_command(
    ops: list[str] | None = None,
    *,
    arch: str = "",
    json_file: Path | None = None,
    defaults: bool = False,
    jobs: int | None = None,
    console: Console | None = None,
) -> int:
    """Compiles every kernel of every config of `ops` (default: all) and prints the result.

    Args:
        arch: targets, comma separated ("sm_90,sm_121"); "" for all that the project supports.
        json_file: the rows, with versions, are written there too.
        defaults: only the config an untuned call would use, for every real and benchmark case.
        jobs: processes; by default one per core.
    Returns: 1 if a default config spills or fails, else 0.
    Raises: ValueError for an unknown op or architecture; ToolMissing without one.
    """
    console = console or plain_console()
    require_tools()
    archs = archs_of(arch)
    chosen = all_ops.named(ops)
    for name in archs:
        Device.for_arch(name)
    with Progress(
        TextColumn("compiling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=plain_console(stderr=True), transient=True
    ) as progress:
        bar = progress.add_task("compile", total=None)
        lines = Lines(progress.console)

        def show(done: int, distinct: int) -> None:
            progress.update(bar, completed=done, total=distinct)
            lines.say(f"compiled {done} of {distinct}")

        try:
            rows = compile_ops(chosen, archs, defaults_only=defaults, jobs=jobs, on_done=show)
        except KeyboardInterrupt:
            if json_file:  # what is compiled is in the cache: the same command goes on from there
                write_json(json_file, as_json([]) | {"stopped": True})
            raise
    return report(console, rows, json_file)


def report(console: Console, rows: Sequence[Row], json_file: Path | None) -> int:
    """Prints the rows and writes them as JSON. Returns the exit code."""
    print_rows(console, rows)
    for line in summary(rows):
        console.print(line)
    if json_file:
        write_json(json_file, as_json(rows))
    return exit_code(rows)


class Lines:
    """A line now and then, where nobody sees a progress bar."""

    def __init__(self, console: Console) -> None:
        self.console, self.last = console, time.monotonic()

    def say(self, line: str) -> None:
        if not self.console.is_terminal and time.monotonic() - self.last >= EVERY_S:
            self.last = time.monotonic()
            self.console.print(line)


def exit_code(rows: Sequence[Row]) -> int:
    """1 if a default config spills or fails, or if there was nothing to compile; else 0."""
    return 1 if not rows or any(row.default and (row.failed or row.spills) for row in rows) else 0


def summary(rows: Sequence[Row]) -> list[str]:
    """One line per architecture."""
    lines = []
    for arch in dict.fromkeys(row.arch for row in rows):
        here = [row for row in rows if row.arch == arch]
        defaults = [row for row in here if row.default]
        broken = sum(row.failed or row.spills for row in defaults)
        spills, failed = sum(row.spills for row in here), sum(row.failed for row in here)
        lines.append(
            f"{arch}: {len(here)} binaries, {spills} spill, {failed} failed; "
            f"defaults: {len(defaults) - broken} of {len(defaults)} compile without a spill"
        )
    return lines


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """The report as plain data. `rows` carry the verdict beside their fields."""
    plain = [msgspec.to_builtins(row) | {"verdict": row.verdict, "per_weight": row.per_weight} for row in rows]
    return {"toolchain": toolchain(), "command": " ".join(sys.argv[1:]), "rows": plain}


def print_rows(console: Console, rows: Sequence[Row]) -> None:
    if console.is_terminal:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in COLUMNS:
            table.add_column(name, justify="right" if name in NUMBERS else "left", no_wrap=name not in ("config", "first problem"), overflow="fold")
        for row in rows:
            table.add_row(*map(Text, _cells(row)), style={"ok": "" if not row.default else "bold", "SPILLS": "yellow", "FAILED": "red"}[row.verdict])
        console.print(table)
        return
    lines = [COLUMNS, *map(_cells, rows)]
    widths = [max((len(line[i]) for line in lines), default=0) for i in range(len(COLUMNS) - 2)]
    for line in lines:
        fixed = (cell.rjust(w) if name in NUMBERS else cell.ljust(w) for name, cell, w in zip(COLUMNS, line, widths, strict=False))
        console.out("  ".join((*fixed, *line[-2:])).rstrip(), highlight=False)


def _cells(row: Row) -> tuple[str, ...]:
    head = row.op, row.arch, row.kernel or "-"
    made, found = row.compiled, row.compiled.resources
    if found is None:
        numbers: tuple[str, ...] = ("-",) * 10
    else:
        matrix = " ".join(f"{name} {n}" for name, n in found.matrix.items()) or "-"
        counts = (str(found.count(name)) for name in ("UTMALDG", "LDL", "STL"))
        code = (matrix, *counts, str(row.per_weight or "-")) if found.instructions else ("?",) * 5
        usage = found.registers, found.stack_bytes, found.shared_bytes
        numbers = (*map(str, usage), *code, str(made.cubin_bytes), f"{made.compile_s:.1f}")
    verdict = row.verdict + (" default" if row.default else "")
    problem = row.problem + (f" (+{row.problems - 1})" if row.problems > 1 else "")
    return (*head, *numbers, verdict, made.error or row.config, problem if not made.error else f"{row.config} | {problem}")
