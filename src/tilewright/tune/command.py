"""`tilewright tune`: measures, stores, and shows what is stored."""

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from statistics import geometric_mean
from types import ModuleType
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .. import ops
from ..bench.report import case_name
from ..interpret.threads import cores
from ..launch import Device, argument_error, check_name, decision_of, forget_plans, require_gpu, table as tables
from ..launch.console import plain_console, write
from ..launch.files import replace_file, write_json
from ..launch.table import Key, Row, key_of, log_file, plain, read_rows, shipped_file
from ..testing import asked, call_space, op_name
from ..testing.cases import cases
from ..testing.drawn import FITTING_SEEDS
from ..testing.problems import Task, of_file
from . import raw
from .search import Found, Workbench, row_key, search
from .store import Store, encoded
from .survey import PASS, Part, in_parts
from .workbench import Gpu

MOST_PROCESSES, CORES_EACH = 4, 4  # of a survey, by default
AHEAD = 2  # problems whose configs compile while another is timed


def tune_command(  # noqa: PLR0913 an option each
    names: list[str] | None = None,
    *,
    problems: Callable[[Device], Sequence[Task]] | None = None,
    shapes: Path | None = None,
    from_log: bool = False,
    case: str = "",
    configs: str = "",
    top: int = 0,
    again: bool = False,
    seconds: float = math.inf,
    jobs: int | None = None,
    device: str = "cuda",
    console: Console | None = None,
) -> int:
    """Finds the fastest config of each problem of `names` (all ops by default) and stores it.

    Args:
        problems: makes the problems for the GPU. shapes: those of a file of JSON lines.
            from_log: those of the log that TILEWRIGHT_SHOW_PLANS=log wrote.
            At most one of the three; without any, the benchmark's problems.
        case: only problems whose name contains this text.
        configs: only configs with these values, as "tile_m=128,latency=4,latency=5", beside the
            default. The winner of a part is shown, not stored.
        top: how many of the fastest configs to print for each problem, with what was dropped.
        again: also search problems whose row still holds.
        seconds: no problem is begun after this many.
        jobs: compiler processes; by default one fewer than there are cores.
    Returns: 0; 1 if a problem got no row; 2 without a GPU; 130 after Ctrl-C, which keeps what is
    done.
    """
    console = console or plain_console()
    if sum(map(bool, (problems, shapes, from_log))) > 1:
        raise ValueError("at most one of --model, --shapes and --from-log must be given")
    began = time.monotonic()
    chosen = ops.named(names)
    wanted = config_filter(configs, chosen)
    where = _gpu(device)
    with Gpu(where, jobs=jobs) as bench:
        tasks: Sequence[Task]
        if problems:
            tasks = problems(bench.device)
        elif shapes or from_log:
            tasks = of_file(shapes or log_file())
        else:
            tasks = [(op, problem) for op in chosen for problem in cases(op, "bench")]
        tasks = [(op, problem) for op, problem in tasks if op in chosen and case in f"{op_name(op)} {case_name(problem)}"]
        if not tasks:  # 0 would say that they are tuned
            raise argument_error("the problems", "at least one of [OP] with the text of --case in its name", f"none, with --case {case!r}")
        store = None if configs else Store()
        return tune(tasks, bench, store, console, wanted=wanted, top=top, again=again, until=began + seconds)


def survey_command(  # noqa: PLR0913 an option each
    names: list[str] | None = None,
    *,
    folder: Path | None = None,
    seconds: float = math.inf,
    jobs: int | None = None,
    device: str = "cuda",
    seed: int = FITTING_SEEDS[0],
    shapes: Path | None = None,
    processes: int | None = None,
    console: Console | None = None,
) -> int:
    """Times many configs of drawn problems of `names` (all ops by default) and keeps every time.

    names: of ops, or of kinds of problems such as "matmul few".
    folder: of the raw times; by default the user's. seconds: as in `tune_command`.
    processes: that share the GPU and take turns on it; by default one for every four cores, four at
        most. jobs: compiler processes of each; by default its share of the cores.
    seed: the first of FITTING_SEEDS to draw with. To add to the times that ship, begin behind
        theirs. shapes: a file of JSON lines, each with op and problem, to time in place of drawn
        ones.
    Returns: as `tune_command`.
    """
    console = console or plain_console()
    until = time.monotonic() + seconds
    if unknown := [name for name in names or () if name not in PASS]:
        ops.named(unknown)
        raise ValueError(f"a survey must be of {', '.join(PASS)}, got {', '.join(unknown)}")
    kinds = [kind for kind in PASS if not names or kind in names or kind.partition(" ")[0] in names]
    if seed not in FITTING_SEEDS:
        raise ValueError(f"--seed must be one of {FITTING_SEEDS[0]} to {FITTING_SEEDS[-1]}, which nothing is judged by, got {seed}")
    if shapes and not {op_name(op) for op, _ in of_file(shapes)} & set(kinds):
        raise ValueError(f"{shapes} must have a problem of {', '.join(kinds)}, and has none")
    whole = Part(kinds, range(seed, FITTING_SEEDS.stop), folder or raw.user_folder(), _gpu(device), jobs, until, shapes=shapes)
    parts = processes or max(1, min(MOST_PROCESSES, cores() // CORES_EACH))
    return whole.run(console) if parts == 1 else in_parts(whole, parts, console)


def _gpu(device: str) -> torch.device:
    """The GPU of this name, made the current one. Raises: ValueError without one."""
    require_gpu("tune")
    where = torch.device(device)
    where = torch.device("cuda", torch.cuda.current_device() if where.index is None else where.index)
    torch.cuda.set_device(where)
    return where


def pack_command(target: Path, *, folder: Path | None = None, console: Console | None = None) -> int:
    """Packs the raw times of a folder (the user's by default) into another, op by op.

    Packed times can be handed in or shipped.
    """
    console = console or plain_console()
    source = folder or raw.user_folder()
    if not (gpus := raw.gpus_of(source)):
        raise argument_error("--raw", "a folder of raw times, as --survey makes them", str(source))
    for gpu in gpus:
        sizes = {op: raw.pack(source, target, gpu, op) for op in raw.ops_of(source, gpu)}
        rows, size = (sum(of) for of in zip(*sizes.values(), strict=True))
        console.print(f"{gpu}: {rows} rows of {len(sizes)} ops, {size / 1024:.0f} KiB, in {target}")
    return 0


def config_filter(text: str, chosen: Collection[ModuleType]) -> Callable[[Any], bool]:
    """Whether a config has the values of "tile_m=128,latency=4,latency=5".

    Each field named must have one of its values, and be one of a config of `chosen`: ops. "" takes
    every config.

    Raises: ValueError for other text.
    """
    allowed: dict[str, set[str]] = {}
    known = dict.fromkeys(field.name for op in chosen for field in dataclasses.fields(op.Config))
    values = [part.strip().partition("=") for part in filter(None, text.split(","))]
    if text and not (values and all(map(all, values))):
        raise argument_error("configs", "values like tile_m=128,latency=4", text)
    for name, _, value in values:
        check_name("a field of --configs", known, name)
        allowed.setdefault(name, set()).add(value)
    return lambda config: all(str(getattr(config, name, "")) in found for name, found in allowed.items())


def tune(
    tasks: Sequence[Task],
    bench: Workbench,
    store: Store | None,
    console: Console,
    *,
    wanted: Callable[[Any], bool] = lambda config: True,
    top: int = 0,
    again: bool = False,
    until: float = math.inf,
) -> int:
    """Searches task after task, each stored before the next begins.

    store: None keeps nothing. wanted: the configs to try beside the default.
    until: on time.monotonic; no problem is begun later.
    Returns: the exit code of `tune_command`.
    """
    console.print(
        f"tuning for {bench.device.name} ({bench.device.arch}), {bench.compiler}; {f'rows go to {store.path}' if store else 'nothing is kept'}"
    )
    held = set() if again or store is None else {row.key for row in store.rows() if state(row) == "holds"}
    todo = [task for task in tasks if not held or _key(task, bench) not in held]
    if len(todo) < len(tasks):
        console.print(f"{len(tasks) - len(todo)} of {len(tasks)} problems are tuned already; --again measures them anew")
    gains, failed, began = [], 0, time.monotonic()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=plain_console(stderr=True), transient=True) as progress:
        bar, inner = progress.add_task("problems", total=len(todo)), progress.add_task("configs", total=None)
        try:
            prepared = 0
            for i, (op, problem) in enumerate(todo):
                if time.monotonic() > until:
                    console.print(f"out of time, {len(todo) - i} problems left. The same command goes on from here.")
                    break
                while prepared < min(i + 1 + AHEAD, len(todo)):  # first, because the compilers work in the order of the requests
                    bench.prepare(*todo[prepared], _configs(*todo[prepared], bench.device, wanted))
                    prepared += 1
                configs = _configs(op, problem, bench.device, wanted)
                try:
                    found = search(
                        op, problem, bench, configs=configs, on_config=lambda done, total: progress.update(inner, completed=done, total=total)
                    )
                except RuntimeError as error:
                    failed += 1
                    console.print(str(error), style="red")
                    if not bench.alive():
                        console.print(
                            f"{len(todo) - i} problems left, and no GPU in this process. What is done is kept; [OP] and --case leave this one out."
                        )
                        break
                else:
                    if store:
                        store.add([found.row])
                        raw.Log(raw.user_folder(), bench.device.name, found.row.op).add(raw_times(op, problem, found, bench))
                    console.print(row_line(found.row))
                    for line in top_lines(found, problem, configs[0], top):
                        console.print(line)
                    gains += [found.row.default_us / found.row.time_us] if found.row.default_us else []
                progress.update(bar, completed=i + 1)
        except KeyboardInterrupt:
            console.print(f"stopped; {len(gains)} rows kept. The same command goes on from here.")
            return 130
        finally:
            forget_plans()
    if gains:
        took = time.monotonic() - began
        console.print(f"{len(gains)} problems in {took:.0f} s: tuned against default geomean {geometric_mean(gains):.3f}x, best {max(gains):.2f}x")
    return 1 if failed else 0


def raw_times(op: ModuleType, problem: Any, found: Found, bench: Workbench) -> list[raw.Timed]:
    """What a search raced. The rough times of the others only tell losers, so nothing is fitted to
    them.
    """
    row = found.row
    decision, wanted = decision_of(op), asked(op, problem, bench.device)
    rows = []
    for (config, us), spread in zip(found.times, found.spreads, strict=False):
        digest = tables.digest_of(decision, wanted, config, bench.device)
        spill = bench.spill_bytes(op, problem, config)
        rows.append(raw.Timed(row.problem, plain(config), digest, row.compiler, round(us, 3), round(spread, 3), spill))
    return rows


def _configs(op: ModuleType, problem: object, device: Device, wanted: Callable[[Any], bool]) -> list[Any]:
    """The default, and those of the space that are wanted."""
    space = call_space(op, problem, device)
    return [*space[:1], *filter(wanted, space[1:])]


def top_lines(found: Found, problem: Any, default: Any, count: int) -> list[str]:
    """Lines with the fastest configs, and why others were dropped; none if `count` is 0."""
    cost = problem.cost()
    lines = []
    for config, us in found.times[:count]:
        rates = f"{cost.size_bytes / us / 1e3:6.0f} GB/s {cost.flops / us / 1e6:6.1f} TFLOP/s"
        lines.append(f"  {us:9.1f} us {rates}  {'default ' if config == default else ''}{config}")
    return lines + [f"  dropped {config}: {why}" for config, why in found.dropped[:count]]


def _key(task: Task, bench: Workbench) -> Key | None:
    op, problem = task
    wanted = asked(op, problem, bench.device)
    configs = op.space(wanted, bench.device)
    return key_of(**row_key(op, wanted, bench.device, bench.compiler)) if configs else None


# ----------------------------------------------------------------------------------- what is stored
def show_command(names: list[str] | None = None, *, case: str = "", json_file: Path | None = None, console: Console | None = None) -> int:
    """Prints the user's rows, and shipped rows for other problems, each with its state: a table for
    a terminal, a line each for a pipe.

    case: only rows whose problem contains this text, as printed.
    json_file: gets the same rows, with all that is stored of them.
    """
    console = console or plain_console()
    wanted = {decision_of(op).op for op in ops.named(names)}
    own = Store().rows()
    keys = {row.key for row in own}
    rows = [("user", row) for row in own]
    rows += [("shipped", row) for path in sorted(shipped_file("x").parent.glob("*.json")) for row in read_rows(path) if row.key not in keys]
    rows = [(source, row) for source, row in rows if row.op in wanted and case in fields(row.problem)]
    columns = ("op", "gpu", "problem", "us", "+-", "of default", "config", "runner-up", "from", "state")
    lines = [_shown(source, row) for source, row in rows]
    if console.is_terminal:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in columns:
            table.add_column(name, overflow="fold")
        for line in lines:
            table.add_row(*line)
        console.print(table)
    else:
        for line in lines:
            write(console, "\t".join(line) + "\n")
    for text in gain_lines([row for _, row in rows]):
        console.print(text)
    console.print(f"{len(rows)} rows; yours are in {Store().path}")
    if json_file:
        write_json(json_file, [msgspec.to_builtins(row) | {"from": source, "state": state(row)} for source, row in rows])
    return 0


def _shown(source: str, row: Row) -> tuple[str, ...]:
    gain = f"{row.default_us / row.time_us:.2f}x" if row.default_us else "-"
    second = f"{row.runner_up_us:.1f} us" if row.runner_up_us else "-"
    cells = (row.op, row.gpu, fields(row.problem), f"{row.time_us:.1f}", f"{row.spread_us:.1f}", gain, fields(row.config), second)
    return (*cells, source, state(row))


def gain_lines(rows: Sequence[Row]) -> list[str]:
    """How much slower the defaults were than the winners, by op and over all."""
    groups = gains_by_op(rows)
    return [f"{op}: untuned takes {geometric_mean(g):.3f}x the time in geomean, at worst {max(g):.2f}x, of {len(g)} rows" for op, g in groups.items()]


def gains_by_op(rows: Sequence[Row]) -> dict[str, list[float]]:
    """Time of the default over that of the winner, by op; with several ops also "all"."""
    gains = [(row.op, row.default_us / row.time_us) for row in rows if row.default_us]
    groups = {op: [gain for of, gain in gains if of == op] for op in dict.fromkeys(op for op, _ in gains)}
    if len(groups) > 1:
        groups["all"] = [gain for _, gain in gains]
    return groups


def export_command(path: Path, names: list[str] | None = None, *, console: Console | None = None) -> int:
    """Writes the user's rows that still hold to a file.

    It can be imported elsewhere or shipped as tune/tables/<gpu>.json.
    """
    console = console or plain_console()
    wanted = {decision_of(op).op for op in ops.named(names)}
    rows = [row for row in Store().rows() if row.op in wanted and state(row) == "holds"]
    replace_file(path, encoded(rows))
    console.print(f"{len(rows)} rows to {path}")
    return 0


def import_command(path: Path, *, console: Console | None = None) -> int:
    """Adds the rows of a file to the user's.

    A row for the same problem, kernel, compiler and GPU is replaced.
    """
    console = console or plain_console()
    if not path.exists():
        raise ValueError(f"{path} must exist")
    rows = read_rows(path)
    Store().add(rows)
    console.print(f"{len(rows)} rows from {path} into {Store().path}")
    return 0


def prune_command(*, console: Console | None = None) -> int:
    """Removes the user's rows that no call can use any more.

    Their kernels have changed, or the compiler has.
    """
    console = console or plain_console()
    console.print(f"{Store().keep(lambda row: state(row) in ('holds', 'unknown GPU'))} rows removed")
    return 0


def state(row: Row) -> str:
    """ "holds", or why no call takes this row."""
    op = {decision_of(op).op: op for op in ops.ALL}.get(row.op)
    return "no such op" if op is None else tables.state(row, decision_of(op), op.Config)


def row_line(row: Row) -> str:
    gain = f"{row.default_us / row.time_us:5.2f}x default" if row.default_us else "default did not run"
    counts = f"{row.tried} timed, {row.dropped} dropped"
    return f"{row.op} {fields(row.problem)} | {row.time_us:9.1f} us +-{row.spread_us:.1f} | {gain} | {counts} | {fields(row.config)}"


def fields(plain: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in plain.items() if value not in (None, False))
