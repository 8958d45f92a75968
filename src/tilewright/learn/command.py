"""`tilewright learn`: every step of a ladder checked, timed on a GPU, and shown with what the compiler made of it."""

import dataclasses
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from ..bench.ceilings import measure_ceilings
from ..bench.measure import measure_case
from ..bench.report import Row, append_jsonl, case_name
from ..compile import Compiled, compile_launches
from ..launch import Device, traced
from ..testing import check_op, run_op
from . import Ladder, Step, ladders


def learn_command(subject: str, *, arch: str = "", json_file: Path | None = None) -> int:
    """Walks up the ladders of `subject`. Returns 1 if a step's answer is wrong.

    Without a GPU every step is interpreted for its answer, and compiled for `arch` (sm_90 by default) for its resources: there are no times then.
    """
    console = Console(soft_wrap=True, highlight=False)
    chosen = ladders(subject)
    wrong = 0
    for ladder in chosen:
        wrong += _timed(ladder, console, json_file) if torch.cuda.is_available() and not arch else _untimed(ladder, console, arch or "sm_90")
    return 1 if wrong else 0


def _timed(ladder: Ladder, console: Console, json_file: Path | None) -> int:
    where = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.set_device(where)
    device = Device.of(torch.empty(0, device=where))
    ceilings = measure_ceilings(where)
    compiled = _compiled(ladder, device)
    table = _table(f"{ladder.name}: {case_name(ladder.problem)} on {device.name}", ("us", "TFLOP/s", "gain", "peer"), ladder)
    before, wrong = 0.0, 0
    for step in ladder.steps:
        try:
            with torch.inference_mode():
                row = measure_case(ladder.op, ladder.problem, where, ceilings, config=step.config)
        except AssertionError as error:
            console.print(f"{step.name} | WRONG, not timed: {error}", style="red")
            wrong += 1
            continue
        peer = " ".join(f"{name} {ratio:.2f}x" for name, ratio in row.peers.items() if name != "torch.compile")
        gain = f"{before / row.time_us:.2f}x" if before else ""
        _add(table, ladder, step, (f"{row.time_us:.1f}", f"{row.tflops:.0f}", gain, peer), compiled[step.name])
        before = row.time_us
        if json_file:
            append_jsonl(json_file, [_named(row, ladder, step)])
    console.print(table)
    return wrong


def _untimed(ladder: Ladder, console: Console, arch: str) -> int:
    device, wrong = Device.for_arch(arch), 0
    console.print(f"No GPU is timed here: steps are interpreted on {case_name(ladder.small)} and compiled for {arch}.")
    compiled = _compiled(ladder, device)
    table = _table(f"{ladder.name}: {case_name(ladder.problem)}, compiled for {arch}", ("answer",), ladder)
    for step in ladder.steps:
        try:
            check_op(ladder.op, ladder.small, torch.device("cpu"), step.config)
            answer = "right"
        except AssertionError as error:
            console.print(f"{step.name} | WRONG: {error}", style="red")
            answer, wrong = "WRONG", wrong + 1
        _add(table, ladder, step, (answer,), compiled[step.name])
    console.print(table)
    return wrong


def _named(row: Row, ladder: Ladder, step: Step) -> Row:
    return dataclasses.replace(row, op=f"learn {ladder.op.__name__.rpartition('.')[2]}", case=f"{row.case} step={step.name}", source="ladder")


def _compiled(ladder: Ladder, device: Device) -> dict[str, Compiled]:
    """What the compiler made of each step's main kernel."""
    launches = []
    for step in ladder.steps:
        with traced(device) as found, torch.inference_mode():
            run_op(ladder.op, ladder.problem.inputs(torch.device("meta")), step.config)
        launches.append((found[0], device.arch))
    return dict(zip([step.name for step in ladder.steps], compile_launches(launches), strict=True))


def _table(title: str, columns: tuple[str, ...], ladder: Ladder) -> Table:
    table = Table(title=title, title_justify="left")
    for name in ("step", *columns, "regs", "stack B", "smem B", *(("published",) if ladder.published else ()), "what it changes"):
        table.add_column(name, justify="left" if name in ("step", "peer", "answer", "published", "what it changes") else "right")
    return table


def _add(table: Table, ladder: Ladder, step: Step, cells: tuple[str, ...], compiled: Compiled) -> None:
    found = compiled.resources
    numbers = ("", "", "") if found is None else (str(found.registers), str(found.stack_bytes), str(found.shared_bytes))
    published = (dict(ladder.published).get(step.name, ""),) if ladder.published else ()
    table.add_row(step.name, *cells, *numbers, *published, step.idea if found is not None else f"{step.idea} ({compiled.error})")
