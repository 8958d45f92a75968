"""`tilewright tune`: measures, stores, and shows what is stored."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .. import ops
from ..launch import Device, forget_plans
from ..launch.identity import compiler
from ..launch.table import Row, digest_of, key_of, log_file, op_of, read_rows, shipped_file
from ..testing.cases import cases
from ..testing.problems import Task, of_file, of_model
from .search import Workbench, asked, row_key, search
from .store import Store, encoded
from .workbench import Gpu

AHEAD = 2  # problems whose configs compile while another is timed


def tune_command(
    names: list[str] | None = None,
    *,
    model: str = "",
    shapes: Path | None = None,
    from_log: bool = False,
    again: bool = False,
    jobs: int | None = None,
    device: str = "cuda",
    console: Console | None = None,
) -> int:
    """Finds the fastest config of each problem of `names` (all ops by default) on a GPU and stores it.

    Args:
        model: problems of this model's layers; shapes: of a file of JSON lines; from_log: of the log that TILEWRIGHT_SHOW_PLANS=log wrote.
            At most one; without any, the benchmark's problems.
        again: also those whose row still holds.
        jobs: compiler processes; by default one per core but one.
    Returns: 0; 1 if a problem got no row; 2 without a GPU; 130 after Ctrl-C, with all that is done kept.
    """
    console = console or Console(soft_wrap=True, highlight=False)
    if sum(map(bool, (model, shapes, from_log))) > 1:
        raise ValueError("at most one of --model, --shapes and --from-log must be given")
    chosen = ops.named(names)
    if not torch.cuda.is_available():
        console.print(
            "tune needs a CUDA GPU: times of the interpreter say nothing about a kernel. `tilewright compile` reports resources without one."
        )
        return 2
    where = torch.device(device)
    where = torch.device("cuda", torch.cuda.current_device() if where.index is None else where.index)
    torch.cuda.set_device(where)
    if model:
        tasks = of_model(model, Device.of(torch.empty(0, device=where)))
    elif shapes or from_log:
        tasks = of_file(shapes or log_file())
    else:
        tasks = [(op, problem) for op in chosen for problem in cases(op, "bench")]
    with Gpu(where, jobs=jobs) as bench:
        return tune([task for task in tasks if task[0] in chosen], bench, Store(), console, again=again)


def tune(tasks: Sequence[Task], bench: Workbench, store: Store, console: Console, *, again: bool = False) -> int:
    """Searches task after task, each stored before the next begins. Returns the exit code as `tune_command` does."""
    console.print(f"tuning for {bench.device.name} ({bench.device.arch}), {bench.compiler}; rows go to {store.path}")
    held = set() if again else {row.key for row in store.rows()}
    todo = [task for task in tasks if not held or _key(task, bench) not in held]
    if len(todo) < len(tasks):
        console.print(f"{len(tasks) - len(todo)} of {len(tasks)} problems are tuned already; --again measures them anew")
    gains, failed = [], 0
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar, inner = progress.add_task("problems", total=len(todo)), progress.add_task("configs", total=None)
        try:
            prepared = 0
            for i, (op, problem) in enumerate(todo):
                while prepared < min(i + 1 + AHEAD, len(todo)):  # this one first: compilers work in the order they are asked
                    _prepare(bench, *todo[prepared])
                    prepared += 1
                try:
                    row = search(op, problem, bench, on_config=lambda done, total: progress.update(inner, completed=done, total=total))
                except RuntimeError as error:
                    failed += 1
                    console.print(str(error), style="red")
                else:
                    store.add([row])
                    console.print(row_line(row))
                    gains += [row.default_us / row.time_us] if row.default_us else []
                progress.update(bar, completed=i + 1)
        except KeyboardInterrupt:
            console.print(f"stopped; {len(gains)} rows kept. The same command goes on from here.")
            return 130
        finally:
            forget_plans()
    if gains:
        product = torch.tensor(gains, dtype=torch.float64).log().mean().exp().item()
        console.print(f"{len(gains)} problems: tuned against default geomean {product:.3f}x, best {max(gains):.2f}x")
    return 1 if failed else 0


def _prepare(bench: Workbench, op: ModuleType, problem: object) -> None:
    bench.prepare(op, problem, op.space(asked(op, problem, bench.device), bench.device))


def _key(task: Task, bench: Workbench) -> tuple | None:
    op, problem = task
    wanted = asked(op, problem, bench.device)
    configs = op.space(wanted, bench.device)
    return key_of(**row_key(op, wanted, configs[0], bench.device, bench.compiler)) if configs else None


# ------------------------------------------------------------------------------------------------ what is stored
def show_command(names: list[str] | None = None, *, console: Console | None = None) -> int:
    """Prints the rows of the user's file, and of the shipped tables that are for other problems, with what became of each since."""
    console = console or Console(soft_wrap=True, highlight=False)
    wanted = {op_of(op.plan) for op in ops.named(names)}
    own = Store().rows()
    keys = {row.key for row in own}
    rows = [("user", row) for row in own]
    rows += [("shipped", row) for path in sorted(shipped_file("x").parent.glob("*.json")) for row in read_rows(path) if row.key not in keys]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("op", "gpu", "problem", "us", "+-", "of default", "config", "runner-up", "from", "state"):
        table.add_column(name, overflow="fold")
    digests = current_digests()
    for source, row in rows:
        if row.op in wanted:
            gain = f"{row.default_us / row.time_us:.2f}x" if row.default_us else "-"
            second = f"{row.runner_up_us:.1f} us" if row.runner_up_us else "-"
            cells = (row.op, row.gpu, fields(row.problem), f"{row.time_us:.1f}", f"{row.spread_us:.1f}", gain, fields(row.config), second)
            table.add_row(*cells, source, state(row, digests))
    console.print(table)
    console.print(f"{len(rows)} rows; yours are in {Store().path}")
    return 0


def export_command(path: Path, names: list[str] | None = None, *, console: Console | None = None) -> int:
    """Writes the user's rows that still hold to a file, to import elsewhere or to ship as tune/tables/<gpu>.json."""
    console = console or Console(soft_wrap=True, highlight=False)
    wanted, digests = {op_of(op.plan) for op in ops.named(names)}, current_digests()
    rows = [row for row in Store().rows() if row.op in wanted and state(row, digests) == "holds"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(rows))
    console.print(f"{len(rows)} rows to {path}")
    return 0


def import_command(path: Path, *, console: Console | None = None) -> int:
    """Adds the rows of a file to the user's; a row for the same problem, kernel, compiler and GPU is replaced."""
    console = console or Console(soft_wrap=True, highlight=False)
    if not path.exists():
        raise ValueError(f"{path} must exist")
    rows = read_rows(path)
    Store().add(rows)
    console.print(f"{len(rows)} rows from {path} into {Store().path}")
    return 0


def prune_command(*, console: Console | None = None) -> int:
    """Removes the user's rows that no call can use any more: their kernel's source or the compiler has changed."""
    console = console or Console(soft_wrap=True, highlight=False)
    digests = current_digests()
    console.print(f"{Store().keep(lambda row: state(row, digests) == 'holds')} rows removed")
    return 0


def current_digests() -> dict[str, str]:
    """Of each op's kernels as they are now, by op name."""
    return {op_of(op.plan): digest_of(op.plan, _any_config(op)) for op in ops.ALL}


def state(row: Row, digests: dict[str, str]) -> str:
    """ "holds", or why no call takes this row."""
    if row.op not in digests:
        return "no such op"
    if row.digest != digests[row.op]:
        return "kernel changed"
    return "holds" if row.compiler == compiler() else "another compiler"


def row_line(row: Row) -> str:
    gain = f"{row.default_us / row.time_us:5.2f}x default" if row.default_us else "default did not run"
    counts = f"{row.tried} timed, {row.dropped} dropped"
    return f"{row.op} {fields(row.problem)} | {row.time_us:9.1f} us +-{row.spread_us:.1f} | {gain} | {counts} | {fields(row.config)}"


def fields(plain: dict) -> str:
    return " ".join(f"{name}={value}" for name, value in plain.items() if value not in (None, False))


def _any_config(op: ModuleType) -> object:
    def configs() -> Iterable[object]:
        for problem in cases(op, "bench"):
            yield from op.space(problem, Device.named("H200"))[:1]

    return next(iter(configs()))
