"""`tilewright bench`: one line per case, then the geometric means; JSON lines to a file."""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import cuda.tile as ct
import torch
from rich.console import Console

from .. import ops
from ..compile.ahead import Ahead
from ..compile.job import one_line
from ..launch import Device, check_name, require_gpu
from ..launch.console import plain_console
from ..testing import call_space, op_name
from ..testing.cases import cases
from ..testing.drawn import draw_all
from ..testing.problems import Task
from .ceilings import measure_ceilings
from .drawn import check_seeds, judged, lines
from .measure import Setup, measure_case
from .meter import meter_of
from .prepare import Found, prepared
from .published import beside
from .report import Row, append_jsonl, case_name, summary, versions
from .stopwatch import Stopwatch, told, total
from .suites import SUITES, Table, formatted, playbook, seeds


def bench_command(  # noqa: PLR0913 an option each
    names: list[str] | None = None,
    *,
    json_file: Path | None = None,
    case: str = "",
    suite: str = "",
    peers: bool = True,
    defaults: bool = False,
    seconds: float = math.inf,
    jobs: int = 1,
    device: str = "cuda",
    draw: int = 0,
    draw_seeds: Sequence[int] = (),
    problems: Callable[[Device], Sequence[Task]] | None = None,
) -> int:
    """Benchmarks ops (all by default) on a GPU.

    Args:
        json_file: each case is appended to it as it is measured.
        case: only cases whose name contains this text.
        suite: the cases of one of SUITES instead of the ops' own.
        peers: other libraries are timed too.
        defaults: use the default configs, whatever the tables hold.
        seconds: no case is begun after this many.
        jobs: processes that first check all cases and compile for them.
        draw: how many problems to draw with each of `draw_seeds` instead; not FITTING_SEEDS.
        problems: makes the cases for the GPU.
    Returns: the exit code: 1 when an answer was wrong, 2 without a GPU.
    """
    began = time.monotonic()
    console = plain_console()
    chosen = ops.named(names)
    if suite:
        check_name("--suite", SUITES, suite)
    if bool(draw) != bool(draw_seeds) or (draw and (suite or problems)):
        raise ValueError("--draw and --seed must come together, and without --suite")
    check_seeds(draw_seeds)
    setup = ready(device, console)
    where = setup.device
    here = Device.of(torch.empty(0, device=where))
    with torch.inference_mode(), meter_of(f"GPU-{torch.cuda.get_device_properties(where).uuid}") as meter:
        setup = dataclasses.replace(setup, meter=meter, peers=peers, warm=not draw)
        run = _Run(console, setup, defaults, json_file, case, jobs, began + seconds)
        if suite == "playbook":
            run.tables([table for table in playbook() if table.op in {op_name(op) for op in chosen} or not names])
        elif draw:
            run.drawn([(seed, *task) for seed in draw_seeds for task in draw_all([op_name(op) for op in chosen], draw, seed)], here)
        else:
            tasks = problems(here) if problems else seeds() if suite == "seeds" else [(op, p) for op in chosen for p in cases(op, "bench")]
            run.all((op, problem) for op, problem in tasks if op in chosen)
    for line in [line for of in judged(map(dataclasses.asdict, run.rows)) for line in lines(of)] if draw else summary(run.rows):
        console.print(line, markup=False)
    console.print(told(total([run.watch.seconds, *(row.took_s for row in run.rows)]), time.monotonic() - began))
    console.print(json.dumps({"cases": len(run.rows), "wrong": run.wrong, "ceilings": dataclasses.asdict(setup.ceilings)}))
    return 1 if run.wrong else 0


def ready(device: str, console: Console) -> Setup:
    """The GPU of this name with its ceilings, both printed. It becomes the current one.

    Raises: ValueError without one.
    """
    require_gpu("bench")
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
    return Setup(where, ceilings)


@dataclasses.dataclass
class _Run:
    """One run of the benchmark: how it measures, and its results."""

    console: Console
    setup: Setup
    defaults: bool
    json_file: Path | None
    case: str
    jobs: int = 1
    until: float = math.inf  # on time.monotonic
    rows: list[Row] = dataclasses.field(default_factory=list)
    wrong: int = 0
    watch: Stopwatch = dataclasses.field(default_factory=Stopwatch)
    found: dict[tuple[str, Any], Found] = dataclasses.field(default_factory=dict)

    def all(self, tasks: Iterable[tuple[ModuleType, Any]]) -> None:
        wanted = [(op, problem) for op, problem in tasks if self.case in f"{op_name(op)} {case_name(problem)}"]
        self.prepare(wanted)
        for op, problem in wanted:
            if time.monotonic() > self.until:
                self.console.print("out of time; the rest is not measured")
                return
            self.one(op, problem)

    def prepare(self, tasks: Iterable[tuple[ModuleType, Any]]) -> None:
        """In several processes, if the run has them."""
        if self.jobs == 1:
            return
        with self.watch.phase(f"checks and compilers in {self.jobs} processes"):
            try:
                self.found = prepared([(op, problem, self.config(op, problem)) for op, problem in tasks], self.setup, self.jobs)
            except BrokenProcessPool:
                self.console.print("one of the processes of --jobs was killed, perhaps for lack of memory; each case is checked before it is timed")

    def config(self, op: ModuleType, problem: Any) -> Any:
        """The one to force, None for that of a user's call."""
        if not self.defaults:
            return None
        return call_space(op, problem, Device.of(torch.empty(0, device=self.setup.device)))[0]

    def drawn(self, tasks: Sequence[tuple[int, ModuleType, Any]], here: Device) -> None:
        """Measures drawn problems, each with its seed. What no process of `prepare` has compiled
        compiles in the background.
        """
        wanted = [task for task in tasks if self.case in f"{op_name(task[1])} {case_name(task[2])}"]
        self.prepare(task[1:] for task in wanted)
        with Ahead(here) if not self.found else nullcontext() as ahead:
            with self.watch.phase("planning"):
                asked = [ahead.ask(op, problem, [self.config(op, problem)])[0] if ahead else () for _, op, problem in wanted]
            for (seed, op, problem), futures in zip(wanted, asked, strict=True):
                if time.monotonic() > self.until:
                    self.console.print("out of time; the rest is not measured")
                    return
                if not isinstance(futures, str):
                    with self.watch.phase("waiting for our compiler"):
                        wait(futures)
                try:
                    self.one(op, problem, seed)
                except (RuntimeError, ct.TileError) as error:  # of one problem: the others can still be measured
                    self.console.print(f"{op_name(op)} {case_name(problem)} | FAILED: {one_line(error)}", style="red", markup=False)
                    self.wrong += 1
                    torch.cuda.synchronize()  # raises where the GPU is lost

    def one(self, op: ModuleType, problem: Any, seed: int | None = None) -> Row | None:
        """Measures, prints and keeps one case; None for a wrong answer. seed: it was drawn with."""
        found = self.found.get((op_name(op), problem))
        try:
            if isinstance(found, AssertionError):
                raise found
            row = measure_case(op, problem, self.setup, config=self.config(op, problem), found=found)
        except AssertionError as error:
            self.console.print(f"{op_name(op)} {case_name(problem)} | WRONG, not timed: {error}", style="red")
            self.wrong += 1
            return None
        row = dataclasses.replace(row, source="default" if self.defaults else row.source, draw_seed=seed)
        self.console.print(row.line())
        for figure in beside(dataclasses.asdict(row)):
            value = "" if figure.metric == "ratio" else " published"
            self.console.print(f"    {figure.kernel}: {figure.text}{value} for {figure.hardware} ({figure.document})")
        self.rows.append(row)
        if self.json_file:
            append_jsonl(self.json_file, row.json())
        torch.cuda.empty_cache()
        return row

    def tables(self, tables: Sequence[Table]) -> None:
        """Measures tables of the playbook, while there is time."""
        built = [(table, self.built(table)) for table in tables]
        self.prepare(task[1:] for _, problems in built for task in problems)
        for table, problems in built:
            if problems and time.monotonic() < self.until:
                self.table(table, problems)

    def built(self, table: Table) -> list[tuple[int, ModuleType, Any]]:
        """Its problems; none, and says so, where our ops have no such problem."""
        try:
            return table.problems()
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            self.console.print(f"{table.title}: not built ({error})\n")
            return []

    def table(self, table: Table, problems: Sequence[tuple[int, ModuleType, Any]]) -> None:
        """Measures a table of the playbook and prints it as the playbook does, with our peers."""
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
