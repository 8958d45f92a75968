"""`tilewright learn`: checks and times every step of a ladder, and shows its compiled resources."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill, indent
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ..bench.ceilings import measure_ceilings
from ..bench.measure import Setup, measure_case
from ..bench.peers import Peer
from ..bench.published import Figure
from ..bench.report import Row, append_jsonl, case_name
from ..bench.timer import ROUNDS
from ..compile import Compiled, compile_launches, require_tools
from ..launch import Device, argument_error, traced
from ..launch.console import plain_console
from ..testing import check_op, op_name, public_function, run_op
from . import SEQ_LENS, ladders
from .ladder import Ladder, Step

WIDTH = 100  # of the widest table; rich cuts cells that a narrower terminal or a pipe has no room for


def learn_command(
    subject: str,
    *,
    seq_lens: Sequence[int] = (),
    sizes: Mapping[str, Any] | None = None,
    iterations: int | None = None,
    arch: str = "",
    json_file: Path | None = None,
    plot: Path | None = None,
) -> int:
    """Runs the ladders of `subject`, step by step.

    Without a GPU there are no times: every step is interpreted, for its answer, and compiled for
    `arch` (default sm_90), for its resources.

    Args:
        subject: see `ladders`.
        seq_lens: see `ladders`; with `plot` all of SEQ_LENS by default.
        sizes: batch, heads, head_dim and causal, see `ladders`.
        iterations: rounds of the timing, of which the median counts; None for the benchmark's own.
        arch: a target ("sm_121"): show its resources instead of times, also on a machine with a
            GPU.
        json_file: gets a row for each timed step. plot: gets a PNG of rates over lengths.
    Returns: 1 if a step's answer is wrong, else 0.
    Raises: KeyError for an unknown subject; ValueError for an unknown architecture, or if there are
        no times to write into the files.
    """
    console = plain_console(soft_wrap=False)
    console.width = max(console.width, WIDTH)
    timed = torch.cuda.is_available() and not arch
    if plot and subject != "attention":
        raise argument_error("plot", "left out, except for attention, which has many lengths", subject)
    for name, given in (("json", json_file), ("plot", plot), ("iterations", iterations)):
        if given and not timed:
            raise argument_error(name, "left out where no step is timed: without a GPU, or with --arch", f"--{name}")
    chosen = ladders(subject, seq_lens or (SEQ_LENS if plot else ()), **(sizes or {}))
    if not timed:
        require_tools()
        return 1 if _untimed(chosen, Device.for_arch(arch or "sm_90"), console) else 0
    rows, wrong = _timed(chosen, console, json_file, iterations or ROUNDS)
    if plot and rows:
        from .plot import draw

        draw(rows, chosen[0].steps, plot)
        console.print(f"{plot}: TFLOP/s of every step over sequence length")
    return 1 if wrong else 0


def _gpu() -> tuple[torch.device, Device]:
    where = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.set_device(where)
    return where, Device.of(torch.empty(0, device=where))


def _timed(chosen: Sequence[Ladder], console: Console, json_file: Path | None, rounds: int) -> tuple[list[Row], int]:
    where, device = _gpu()
    setup = Setup(where, measure_ceilings(where), rounds=rounds)
    rows, wrong = [], 0
    for ladder in chosen:
        compiled = _compiled(ladder, device)
        console.print(f"{ladder.name}: {case_name(ladder.problem)}, timed on {device.name}", style="bold")
        table = _table(("us", "TFLOP/s", "gain"), ladder)
        users = Peer(f"ops.{op_name(ladder.library)}", public_function(ladder.library))
        last: Row | None = None
        for step in ladder.steps:
            config = step.config_for(ladder.problem, device)
            try:
                with torch.inference_mode():
                    row = measure_case(ladder.op, ladder.problem, setup, config=config, beside=(users,))
            except AssertionError as error:
                console.print(f"{step.name} | WRONG, not timed: {error}", style="red")
                wrong += 1
                continue
            gain = f"{last.time_us / row.time_us:.2f}x" if last else ""
            _add(table, ladder, step, (f"{row.time_us:.1f}", _rate(row.tflops), gain), compiled[step.name])
            last = _named(row, ladder, step)
            rows.append(last)
            if json_file:
                append_jsonl(json_file, last.json())
        _show(console, ladder, table, compiled)
        if last:
            ratios = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in last.peers.items())
            console.print(f"Their time over that of the last step: {ratios}")
        console.print()
    _explain(console, chosen)
    return rows, wrong


def _untimed(chosen: Sequence[Ladder], device: Device, console: Console) -> int:
    console.print(f"No GPU is timed here: every step is interpreted on a small problem, and compiled for {device.arch}.\n")
    answers: dict[tuple[Any, ...], str] = {}  # lengths share steps
    for ladder in chosen:
        compiled = _compiled(ladder, device)
        console.print(f"{ladder.name}: {case_name(ladder.problem)}, compiled for {device.arch}", style="bold")
        table = _table(("answer",), ladder)
        for step in ladder.steps:
            key = ladder.op.__name__, ladder.small, step.config_for(ladder.problem, device)
            if key not in answers:
                try:
                    check_op(ladder.op, ladder.small, torch.device("cpu"), key[-1])
                    answers[key] = "right"
                except AssertionError as error:
                    console.print(f"{step.name} | WRONG: {error}", style="red")
                    answers[key] = "WRONG"
            _add(table, ladder, step, (answers[key],), compiled[step.name])
        _show(console, ladder, table, compiled)
        console.print()
    _explain(console, chosen)
    return sum(answer == "WRONG" for answer in answers.values())


def _named(row: Row, ladder: Ladder, step: Step) -> Row:
    return dataclasses.replace(row, op=f"learn {op_name(ladder.op)}", case=f"{row.case} step={step.name}", source="ladder")


def _compiled(ladder: Ladder, device: Device) -> dict[str, Compiled]:
    """What the compiler made of each step's main kernel."""
    launches = []
    for step in ladder.steps:
        with traced(device) as found, torch.inference_mode():
            run_op(ladder.op, ladder.problem.inputs(torch.device("meta")), step.config_for(ladder.problem, device))
        launches.append((found[0], device.arch))
    return dict(zip([step.name for step in ladder.steps], compile_launches(launches), strict=True))


def _figures(ladder: Ladder) -> dict[str, list[tuple[Step, Figure]]]:
    """What others published, by hardware, the slowest first."""
    found: dict[str, list[tuple[Step, Figure]]] = {}
    for step in ladder.steps:
        for figure in ladder.published(step):
            found.setdefault(figure.hardware, []).append((step, figure))
    return dict(sorted(found.items(), key=lambda item: Device.named(item[1][0][1].device).tflops))


def _table(columns: tuple[str, ...], ladder: Ladder) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("step", *columns, "regs", "stack B", "smem B", *(f"{hardware}*" for hardware in _figures(ladder))):
        table.add_column(name, justify="left" if name in ("step", "answer") else "right", no_wrap=True)
    return table


def _add(table: Table, ladder: Ladder, step: Step, cells: tuple[str, ...], compiled: Compiled) -> None:
    found = compiled.resources
    numbers = ("", "", "") if found is None else (str(found.registers), str(found.stack_bytes), str(found.shared_bytes))
    published = [next((_rate(figure.tflops()) for at, figure in figures if at is step), "") for figures in _figures(ladder).values()]
    table.add_row(step.name, *cells, *numbers, *published)


def _rate(tflops: float | None) -> str:
    return "" if tflops is None else f"{tflops:.0f}" if tflops >= 100 else f"{tflops:.1f}"


def _show(console: Console, ladder: Ladder, table: Table, compiled: dict[str, Compiled]) -> None:
    """The table, and below it what is wrong with a binary."""
    console.print(table)
    for step in ladder.steps:
        made = compiled[step.name].resources
        if made is None:
            console.print(f"{step.name} does not compile: {compiled[step.name].error}", style="red")
        elif made.spills:
            stores = f"{made.count('STL')} stores to it and {made.count('LDL')} loads from it in the code"
            console.print(f"{step.name} spills: {made.stack_bytes} bytes of stack per thread, {stores}", style="red")


def _print_step(console: Console, step: Step) -> None:
    console.print(fill(f"{step.name}: {step.idea}", WIDTH, subsequent_indent="  "), style="bold", markup=False)
    if step.why:
        console.print(fill(step.why, WIDTH, initial_indent="  ", subsequent_indent="  "), markup=False)
    if step.picture:
        console.print(indent(f"\n{step.picture}", "      "), markup=False)


def _explain(console: Console, chosen: Sequence[Ladder]) -> None:
    """What each step changes, and the source of the figures beside ours; once for equal steps."""
    for ladder in {ladder.steps: ladder for ladder in chosen}.values():
        console.print(f"{ladder.name}, what each step changes", style="bold")
        for step in ladder.steps:
            _print_step(console, step)
        alike = [figure for other in chosen if other.steps == ladder.steps for figures in _figures(other).values() for figure in figures]
        for hardware in dict.fromkeys(figure.hardware for _, figure in alike):
            found = [(step, figure) for step, figure in alike if figure.hardware == hardware]
            kernels = ", ".join(dict.fromkeys(f'{step.name} "{figure.kernel}"' for step, figure in found))
            document = " and ".join(dict.fromkeys(figure.document for _, figure in found))
            console.print(f"* {hardware}: TFLOP/s published in {document}, not run here: {kernels}", style="dim")
        console.print()
