"""`tilewright tune --survey`: raw times of many configs of drawn problems, good and bad ones.
`--fit` fits the cost model to them.

Each pass draws a few problems of each kind with the next fitting seed, in an order that leaves a
balanced sample whenever it is stopped; a file of problems is taken as it is. While one problem is
timed, the configs of the next ones compile; the first to be compiled is timed next. The last line
says where the time went.
"""

import dataclasses
import multiprocessing
import random
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.console import Console

from ..interpret.threads import cores
from ..launch import Device, decision_of
from ..launch.console import plain_console
from ..launch.parent import end_with_parent
from ..launch.table import digest_of, plain
from ..select.neighbours import size_names
from ..testing import asked, op_name
from ..testing.drawn import FITTING_SEEDS, draw, mixed, op_of_kind
from ..testing.problems import of_file
from . import raw
from .search import Workbench
from .workbench import Gpu

# Problems of a pass, by kind, and the most configs of one problem.
PASS = {
    "matmul": 10, "matmul few": 8, "matmul wave": 8, "matmul thin": 3, "matmul heavy": 4, "matmul ragged": 6,
    "matmul fp8": 8, "matmul fp8 deep": 4, "quantized_matmul": 4, "quantized_matmul few": 4,
    "rope": 3, "rms_norm": 2, "layer_norm": 2, "silu_mul": 2, "softmax": 2, "softmax wide": 2,
    "rope large": 3, "rms_norm large": 3, "layer_norm large": 2, "softmax large": 2,
    "quantize_fp8": 2, "rms_norm_quant": 1, "silu_mul_quant": 1, "embedding": 1, "argmax": 1, "kv_append": 1, "rms_norm_matmul": 1, "merge_states": 1,
    "attention": 3, "attention_decode": 3, "attention_decode short": 2, "attention_decode long": 2, "attention_decode codes": 2,
    "mla_decode": 1, "mla": 1, "bmm": 2, "bmm wide": 2,
    "grouped_gemm": 1, "grouped_gemm fp8": 1, "moe": 1, "moe fp8": 1, "quantized_moe": 1, "sparse_index": 1,
    "moe_route": 1, "rms_norm_route": 1, "sample": 1, "adjust_logits": 1, "dropout": 1,
    "quantize_mx": 1, "mx_matmul": 1, "gated_delta_rule": 2, "ssd": 2, "causal_conv1d": 1, "rms_norm_gated": 1,
}  # fmt: skip
MOST = {
    "matmul": 32, "matmul few": 40, "matmul wave": 40, "matmul thin": 32, "matmul heavy": 32, "matmul ragged": 32,
    "matmul fp8": 24, "matmul fp8 deep": 32, "quantized_matmul": 24, "quantized_matmul few": 24, "bmm": 24, "bmm wide": 24,
    "attention_decode": 24, "attention_decode short": 24, "attention_decode long": 24, "attention_decode codes": 24, "moe": 10,
    "rope large": 16, "rms_norm large": 20, "layer_norm large": 20, "softmax large": 20,
}  # fmt: skip
MOST_CONFIGS = 12
AHEAD = 40  # problems whose configs compile while others are timed
WAIT_S = 0.02
MOST_CHECKED_FLOPS = 1e11  # of a problem on which a config is checked, whose truth is computed in float64


@dataclasses.dataclass(frozen=True)
class Task:
    """One problem of a survey, as a call would ask it, with the configs to time. Those outside of
    the space must keep the accuracy rule.
    """

    kind: str
    op: ModuleType
    problem: Any
    asked: Any
    configs: list[Any]
    beside: frozenset[Any] = frozenset()

    @property
    def timed(self) -> Any:
        """What a call asks, with the sizes that its inputs had. A call may round sizes up, such as
        a cache's length, and the time is not that of the rounded size.
        """
        return dataclasses.replace(self.asked, **{name: getattr(self.problem, name) for name in size_names(self.asked.__class__)})


def candidates(op: ModuleType, problem: Any, device: Device) -> list[Any]:
    """Every legal config, the default first."""
    found = op.space(problem, device)
    return list(getattr(found, "legal", found))


def sampled(configs: Sequence[Any], most: int, seed: str) -> list[Any]:
    """The first half as the model has them, since where it is wrong about these it chooses wrongly,
    and others. Half of those are the same for all problems where they are legal, so that a binary
    is compiled once for many problems; half are drawn for each problem.
    """
    if len(configs) <= most:
        return list(configs)
    first = most // 2
    usual = sorted(configs[first:], key=lambda config: zlib.crc32(str(config).encode()))
    same = (most - first) // 2
    anew = random.Random(seed).sample(usual[same:], most - first - same)
    return [*configs[:first], *usual[:same], *anew]


def drawn_tasks(kinds: Sequence[str], device: Device, seeds: Sequence[int] = FITTING_SEEDS, *, index: int = 0, parts: int = 1) -> Iterator[Task]:
    """The problems of pass after pass, until the seeds end: every parts-th from the index-th on."""
    drawn = ((seed, *one) for seed in seeds for one in mixed({kind: draw(kind, PASS[kind], seed) for kind in kinds}))
    return _tasks(((seed, kind, op_of_kind(kind), problem) for seed, kind, problem in islice(drawn, index, None, parts)), device)


def listed_tasks(shapes: Path, kinds: Sequence[str], device: Device, *, index: int = 0, parts: int = 1) -> Iterator[Task]:
    """Likewise the problems of a file, of ops among `kinds`, such as the rows of a benchmark in
    which a peer was ahead.
    """
    listed = ((0, op_name(op), op, problem) for op, problem in of_file(shapes) if op_name(op) in kinds)
    return _tasks(islice(listed, index, None, parts), device)


def _tasks(problems: Iterable[tuple[int, str, ModuleType, Any]], device: Device) -> Iterator[Task]:
    """problems: seed, kind, op and problem of each."""
    for seed, kind, op, problem in problems:
        wanted = asked(op, problem, device)
        configs = candidates(op, wanted, device)
        if configs:
            chosen = sampled(configs, MOST.get(kind, MOST_CONFIGS), f"{seed} {wanted}")
            yield Task(kind, op, problem, wanted, chosen, frozenset(chosen) - frozenset(op.space(wanted, device)))


@dataclasses.dataclass(frozen=True)
class Part:
    """What one of `parts` processes does of a survey: every parts-th problem from the index-th on.

    A config's first call keeps its process busy for some 0.3 s. So one process times three configs
    a second, and four, which take turns on the GPU, fourteen (H200).

    where: the GPU. jobs: compiler processes, None for a share of the cores. until: on
        time.monotonic; nothing is begun later. shapes: a file of problems, in place of drawn ones.
    """

    kinds: Sequence[str]
    seeds: range
    folder: Path
    where: torch.device
    jobs: int | None
    until: float
    index: int = 0
    parts: int = 1
    shapes: Path | None = None

    def run(self, console: Console) -> int:
        """Times it, here. Returns the exit code of `survey`."""
        if self.index:  # a child begins with the first GPU
            torch.cuda.set_device(self.where)
        jobs = self.jobs or max(1, (cores() - 1) // self.parts)
        with Gpu(self.where, jobs=jobs, sharers=self.parts - 1) as bench:
            if self.index == 0:
                together = f", in {self.parts} processes" if self.parts > 1 else ""
                console.print(f"survey of {bench.device.name} ({bench.device.arch}), {bench.compiler}{together}")
            share = {"index": self.index, "parts": self.parts}
            if self.shapes:
                tasks = listed_tasks(self.shapes, self.kinds, bench.device, **share)
            else:
                tasks = drawn_tasks(self.kinds, bench.device, self.seeds, **share)
            who = f"{self.index + 1} of {self.parts}: " if self.parts > 1 else ""
            return survey(tasks, bench, self.folder, console, until=self.until, who=who)

    def run_as_child(self) -> None:
        """Times it in a process that ends with its parent."""
        end_with_parent()
        sys.exit(self.run(plain_console()))


def in_parts(whole: Part, parts: int, console: Console) -> int:
    """A survey in so many processes, this one among them. Returns the worst exit code."""
    context = multiprocessing.get_context("spawn")  # not by fork: this process may hold a CUDA context
    mine, *others = (dataclasses.replace(whole, index=i, parts=parts) for i in range(parts))
    children = [context.Process(target=other.run_as_child) for other in others]
    for child in children:
        child.start()
    codes = [mine.run(console)]
    for child in children:
        child.join()
        code = child.exitcode
        codes.append(1 if code is None or code < 0 else code)  # below 0: killed by a signal
    return max(codes)


def survey(tasks: Iterator[Task], bench: Workbench, folder: Path, console: Console, *, until: float, who: str = "") -> int:
    """Times what is not in the files of `folder` yet. Returns the exit code: 1 if the GPU broke,
    130 after Ctrl-C. All that was timed is kept.

    until: on time.monotonic; nothing is begun later. who: what its lines of progress begin with.
    """
    known: dict[str, set[bytes]] = {}
    right: dict[tuple[Any, ...], bool] = {}
    waiting: list[tuple[Task, list[Any]]] = []
    began, timed, failed, problems, shown = time.monotonic(), 0, 0, 0, time.monotonic()
    spent = dict.fromkeys(("compiling", "inputs", "timing"), 0.0)  # seconds
    try:
        while time.monotonic() < until:
            while len(waiting) < AHEAD and (task := next(tasks, None)):
                name = decision_of(task.op).op
                if name not in known:
                    known[name] = {row.key for row in raw.read(folder, bench.device.name, name)}
                if any((t.op, t.problem) == (task.op, task.problem) for t, _ in waiting):
                    continue
                todo = [config for config in task.configs if _row(task, config, bench).key not in known[name]]
                if todo:
                    bench.prepare(task.op, task.problem, todo)
                    waiting.append((task, todo))
                if time.monotonic() > until or any(bench.done(t.op, t.problem) for t, _ in waiting[:1]):
                    break
            if not waiting:
                break
            i = next((i for i, (task, _) in enumerate(waiting) if bench.done(task.op, task.problem)), None)
            if i is None:
                time.sleep(WAIT_S)
                spent["compiling"] += WAIT_S
                continue
            task, todo = waiting.pop(i)
            rows, refused = _timed(task, todo, bench, right, console, spent)
            raw.Log(folder, bench.device.name, decision_of(task.op).op).add(rows)
            known[decision_of(task.op).op].update(row.key for row in rows)
            timed, failed, problems = timed + sum(row.time_us is not None for row in rows), failed + refused, problems + 1
            if not bench.alive():
                broken = next((row for row in rows if row.error), None)
                console.print(f"the GPU is lost to this process{f': {task.kind} {broken.problem} {broken.config}: {broken.error}' if broken else ''}")
                console.print("what was timed before is kept; the same command goes on behind it")
                return 1
            if time.monotonic() - shown > 10:
                shown = time.monotonic()
                console.print(f"{who}{shown - began:.0f} s: {timed} timings of {problems} problems, {failed} configs refused")
    except KeyboardInterrupt:
        console.print(f"stopped; {timed} timings kept. The same command goes on from here.")
        return 130
    took = time.monotonic() - began
    parts = ", ".join(f"{seconds:.0f} s {what}" for what, seconds in spent.items())
    console.print(f"{who}{timed} timings of {problems} problems in {took:.0f} s ({parts}), {failed} configs refused; raw times in {folder}")
    return 0


def _timed(
    task: Task, configs: list[Any], bench: Workbench, right: dict[tuple[Any, ...], bool], console: Console, spent: dict[str, float]
) -> tuple[list[raw.Timed], int]:
    """The rows of a problem whose configs are compiled, and how many did not compile, did not run
    or gave a wrong answer. right: of the known configs. spent: seconds by phase, added to.
    """
    fit = {i for i, reason in bench.ready(task.op, task.problem, configs) if not reason}
    running = [config for i, config in enumerate(configs) if i in fit and right.get((task.kind, config), True)]
    began = time.monotonic()
    with bench.clock(task.op, task.problem) as clock:
        made = time.monotonic()
        times = clock.many(running)
        lost = not bench.alive()
    spent["inputs"] += made - began
    spent["timing"] += time.monotonic() - made
    rows = []
    for config, found in zip(running, times, strict=True):
        if isinstance(found, str):
            if lost:  # the first that failed broke it; the others failed because of it
                rows.append(_row(task, config, bench, error=found))
                break
        elif _is_right(task, config, bench, right, console):
            spread = {"time_us": round(found.time_us, 3), "spread_us": round(found.spread_us, 3)}
            rows.append(_row(task, config, bench, **spread, spill_bytes=bench.spill_bytes(task.op, task.problem, config)))
    return rows, len(configs) - sum(row.time_us is not None for row in rows)


def _is_right(task: Task, config: Any, bench: Workbench, right: dict[tuple[Any, ...], bool], console: Console) -> bool:
    """Checks the accuracy rule of a config that is in no space and so in no test: once, on a
    problem where that is cheap.
    """
    key = task.kind, config
    if config in task.beside and key not in right and task.problem.cost().flops <= MOST_CHECKED_FLOPS:
        try:
            bench.check(task.op, task.problem, config)
            right[key] = True
        except AssertionError as error:
            right[key] = False
            console.print(f"wrong, not kept: {error}", markup=False)
    return right.get(key, True)


def _row(task: Task, config: Any, bench: Workbench, **found: Any) -> raw.Timed:
    digest = digest_of(decision_of(task.op), task.asked, config, bench.device)
    return raw.Timed(plain(task.timed), plain(config), digest, bench.compiler, **found)
