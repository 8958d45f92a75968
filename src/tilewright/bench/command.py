"""`tilewright bench`: one line a case, then the geometric means; JSON lines to a file."""

import dataclasses
import json
import math
import time
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.console import Console

from .. import ops
from ..launch import Device
from ..testing import op_name
from ..testing.cases import cases
from .ceilings import Ceilings, measure_ceilings
from .measure import measure_case
from .meter import Meter, meter_of
from .published import beside
from .report import Row, append_jsonl, case_name, summary, versions
from .suites import SUITES, Table, formatted, llm, playbook, seeds


def bench_command(
    names: list[str] | None = None,
    *,
    json_file: Path | None = None,
    case: str = "",
    suite: str = "",
    peers: bool = True,
    defaults: bool = False,
    seconds: float = math.inf,
    device: str = "cuda",
) -> int:
    """Benchmarks ops (all by default) on a GPU. Returns the exit code: 1 when an answer was wrong, 2 without a GPU.

    case: only cases whose name contains this text. suite: the cases of a suite instead of the ops' own. defaults: untuned configs, whatever the
    tables hold. seconds: no case is begun after as many. json_file: appended to as each case is measured.
    """
    until = time.monotonic() + seconds
    console = Console(soft_wrap=True, highlight=False)
    chosen = ops.named(names)
    if suite and suite not in SUITES:
        raise ValueError(f"--suite must be one of {', '.join(SUITES)}, got {suite!r}")
    if not torch.cuda.is_available():
        console.print(
            "bench needs a CUDA GPU: times of the interpreter say nothing about a kernel. `tilewright compile` reports resources without one."
        )
        return 2
    where = torch.device(device)
    if where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.set_device(where)
    ceilings = measure_ceilings(where)
    console.print(f"{torch.cuda.get_device_name(where)} | {' '.join(f'{k} {v}' for k, v in versions().items())}")
    console.print(
        f"ceilings: copy {ceilings.copy_gbs:.0f} GB/s, read {ceilings.read_gbs:.0f} GB/s, "
        f"bf16 matmul {ceilings.tflops:.0f} TFLOP/s, launch {ceilings.launch_us:.2f} us"
    )
    if suite == "decode":
        from ..engine.suite import decode_suite  # the engine and transformers: only here

        rows = decode_suite(console, where, ceilings, case=case, peers=peers, until=until, json_file=json_file)
        console.print(json.dumps({"cases": len(rows), "wrong": 0, "ceilings": dataclasses.asdict(ceilings)}))
        return 0
    here = Device.of(torch.empty(0, device=where))
    with torch.inference_mode(), meter_of(f"GPU-{torch.cuda.get_device_properties(where).uuid}") as meter:
        run = _Run(console, where, ceilings, meter, peers, defaults, json_file, case, until)
        if suite == "playbook":
            for table in playbook():
                if (table.op in {op_name(op) for op in chosen} or not names) and time.monotonic() < run.until:
                    run.table(table)
        else:
            tasks = {"llm": lambda: llm(here), "seeds": seeds, "": lambda: [(op, p) for op in chosen for p in cases(op, "bench")]}[suite]()
            run.all((op, problem) for op, problem in tasks if op in chosen)
    for line in summary(run.rows):
        console.print(line)
    console.print(json.dumps({"cases": len(run.rows), "wrong": run.wrong, "ceilings": dataclasses.asdict(ceilings)}))
    return 1 if run.wrong else 0


@dataclasses.dataclass
class _Run:
    """One run of the benchmark: how to measure, and what came of it."""

    console: Console
    where: torch.device
    ceilings: Ceilings
    meter: Meter
    peers: bool
    defaults: bool
    json_file: Path | None
    case: str
    until: float = math.inf  # on time.monotonic
    rows: list[Row] = dataclasses.field(default_factory=list)
    wrong: int = 0

    def all(self, tasks: Iterable[tuple[ModuleType, Any]]) -> None:
        for op, problem in tasks:
            if self.case in f"{op_name(op)} {case_name(problem)}":
                if time.monotonic() > self.until:
                    self.console.print("out of time; the rest is not measured")
                    return
                self.one(op, problem)

    def one(self, op: ModuleType, problem: Any) -> Row | None:
        """Measures, prints and keeps one case; None for a wrong answer."""
        config = None
        try:
            if self.defaults:
                config = op.space(problem, Device.of(torch.empty(0, device=self.where)))[0]
            row = measure_case(op, problem, self.where, self.ceilings, config=config, with_peers=self.peers, meter=self.meter)
        except AssertionError as error:
            self.console.print(f"{op_name(op)} {case_name(problem)} | WRONG, not timed: {error}", style="red")
            self.wrong += 1
            return None
        if self.defaults:
            row = dataclasses.replace(row, source="default")
        self.console.print(row.line())
        for figure in beside(dataclasses.asdict(row)):
            value = "" if figure.metric == "ratio" else " published"
            self.console.print(f"    {figure.kernel}: {figure.value:g} {figure.metric}{value} for {figure.hardware} ({figure.document})")
        self.rows.append(row)
        if self.json_file:
            append_jsonl(self.json_file, row.json())
        torch.cuda.empty_cache()
        return row

    def table(self, table: Table) -> None:
        """Measures a table of the playbook and prints it as the playbook does, with our peers beside us."""
        try:
            problems = table.problems()
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            self.console.print(f"{table.title}: not built ({error})\n")
            return
        columns: dict[str, dict[int, float]] = {"Tilewright": {}}
        passed = True
        for x, op, problem in problems:
            try:
                row = self.one(op, problem)
            except (ValueError, TypeError, NotImplementedError) as error:
                self.console.print(f"{table.title}: not built ({error})\n")
                return
            passed = passed and row is not None
            if row is not None:
                ours = row.tflops if table.metric == "TFLOPS" else row.gbs
                columns["Tilewright"][x] = ours
                for name, ratio in row.peers.items():
                    columns.setdefault(name, {})[x] = ours / ratio
        self.console.print(formatted(table, columns), markup=False)
        self.console.print(f"{'✓ PASSED' if passed else '✗ FAILED'}: {table.script}\n", markup=False)
