"""`tilewright generate --prompt-tokens N`: times random prompts of one length; kernels, floor,
distance from transformers.
"""

import dataclasses
import datetime
import gc
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from ..bench.ceilings import measure_ceilings
from ..bench.report import command, versions
from ..launch import Device, argument_error
from ..models import Loaded, load, patch
from .engine import Engine, Mode, OnProgress
from .measure import Run, run_engine, run_transformers
from .parallel import Group

KERNELS_SHOWN = 12


@dataclasses.dataclass(frozen=True, slots=True)
class Distance:
    """Kullback-Leibler divergence of next-token distributions from those of the same weights in
    fp32: mean and maximum over all new tokens.
    """

    mean: float
    worst: float


class Sizes(NamedTuple):
    """Sizes of a timed generation. batch: prompts. prompt_tokens, max_new_tokens: tokens read and
    written for each.
    """

    batch: int
    prompt_tokens: int
    max_new_tokens: int


def measure_command(loaded: Loaded, sizes: Sizes, *, engine: str, baselines: tuple[str, ...], as_json: bool) -> int:
    """Times `engine` beside unpatched transformers: "eager", "graph", "mega", or "transformers" for
    the patched model. Returns the exit code: 1 if the graph's tokens are not those of the eager
    engine. The megakernel sums in another order; its tokens are compared with the graph's, without
    an exit code.

    baselines: which of "eager" and "compiled" (static cache, on a GPU) to run.
    """
    batch, prompt_tokens, max_new_tokens = sizes
    _check_sizes(*sizes)
    model, device = loaded.model, loaded.model.device
    prompts = prompts_of(model, batch, prompt_tokens)
    errors = Console(stderr=True)
    with torch.inference_mode():
        ceilings = measure_ceilings(device) if device.type == "cuda" else None
    runs: list[Run] = []
    model.generation_config.eos_token_id = None  # a checkpoint's stop token would end a timed run at random
    for mode in baselines:
        options = {"cache_implementation": "static"} if mode == "compiled" else {}
        with _waiting(errors, f"transformers {mode}"):
            runs.append(run_transformers(model, f"transformers {mode}", prompts, max_new_tokens, **options))
    torch.compiler.reset()
    collect()
    distances: dict[str, Distance] = {}
    step_bytes, start_s = 0, 0.0
    given = torch.tensor(runs[0].tokens if runs else [], device=device)[:, :-1] if runs else None
    logits: dict[str, Tensor] = {}
    if given is not None:
        logits["transformers eager"] = _stock_logits(model, prompts, given)
    if engine == "transformers":
        with patch(model), _waiting(errors, "tilewright patched"):
            runs.append(run_transformers(model, "tilewright patched", prompts, max_new_tokens))
            if given is not None:
                logits["tilewright patched"] = _stock_logits(model, prompts, given)
    modes: dict[str, tuple[Mode, ...]] = {
        "eager": ("eager",),
        "graph": ("eager", "graph"),
        "mega": ("graph" if device.type == "cuda" else "eager", "mega"),
    }
    for mode in modes.get(engine, ()):
        name = f"tilewright {mode}"
        with ready_engine(model, sizes, mode, errors) as (ours, took_s):
            start_s = took_s
            runs.append(run_engine(ours, name, prompts, max_new_tokens))
            step_bytes = ours.step_bytes(batch, prompt_tokens + max_new_tokens // 2)
            if given is not None:
                logits[name] = ours.logits(prompts, given.tolist())
        collect()
    if given is not None:
        distances = _distances(model, prompts, given, logits)
    floor_ms = 1e3 * step_bytes / (ceilings.copy_gbs * 1e9) if ceilings is not None and step_bytes else None
    case = case_of(loaded, *sizes)
    measured = Measured(runs, distances, floor_ms, case, start_s, list(rows_of(runs, distances, floor_ms, case, model, start_s)))
    return tell(measured, as_json=as_json)


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """The results of a measurement. floor_ms: of a step; None on a CPU. rows: the JSON lines."""

    runs: list[Run]
    distances: dict[str, Distance]
    floor_ms: float | None
    case: str
    start_s: float
    rows: list[dict[str, Any]]


def tell(found: Measured, *, as_json: bool) -> int:
    """Prints the results. Returns the exit code."""
    for line in found.rows:
        if as_json:
            print(json.dumps(line))
    # The table needs about 130 columns.
    console = Console(quiet=as_json, highlight=False, width=None if Console(stderr=True).is_terminal else 160)
    _show(console, found.runs, found.distances, found.floor_ms, found.case, found.start_s)
    by_name = {run.name: run.tokens for run in found.runs}
    both = "tilewright graph" in by_name and "tilewright eager" in by_name
    return int(both and by_name["tilewright graph"] != by_name["tilewright eager"])


def measure_rank(group: Group, device: torch.device, source: str, dtype: torch.dtype, sizes: Sizes, engine: str, compare: bool) -> Measured | None:
    """As `measure_command`, in each process of an engine of several.

    Returns the results of rank 0.

    compare: first run the same engine on one device with the whole model.
    """
    from transformers.utils import logging as transformers_logging

    batch, prompt_tokens, max_new_tokens = sizes
    _check_sizes(*sizes)
    transformers_logging.disable_progress_bar()
    shard, alone = group.shard, f"one device {engine}"
    errors = Console(stderr=True, quiet=shard.rank > 0, force_terminal=False if shard.rank > 0 else None)
    runs: list[Run] = []
    logits: dict[str, Tensor] = {}
    truth: Tensor | None = None
    ceilings = None
    if shard.rank == 0:
        with torch.inference_mode():
            ceilings = measure_ceilings(device) if device.type == "cuda" else None
        if compare:
            whole = load(source, device=device, dtype=dtype).model
            prompts = prompts_of(whole, batch, prompt_tokens)
            with ready_engine(whole, sizes, engine, errors) as (ours, _):
                runs.append(run_engine(ours, alone, prompts, max_new_tokens))
                given = torch.tensor(runs[0].tokens, device=device)[:, :-1]
                logits[alone] = ours.logits(prompts, given.tolist())
            with in_float32(whole):
                truth = _stock_logits(whole, prompts, given)
            del whole, ours
            collect()
    loaded = load(source, device=device, dtype=dtype, shard=shard)
    prompts = prompts_of(loaded.model, batch, prompt_tokens)
    said: list[Any] = [runs[0].tokens if runs else None]
    dist.broadcast_object_list(said, src=0, group=group.process_group)
    step_bytes, start_s = 0, 0.0
    for mode in ("eager", "graph") if engine == "graph" else (engine,):
        name = f"tilewright {mode}"
        with ready_engine(loaded.model, sizes, mode, errors, group) as (ours, took_s):
            start_s = took_s
            runs.append(run_engine(ours, name, prompts, max_new_tokens))
            step_bytes = ours.step_bytes(batch, prompt_tokens + max_new_tokens // 2)
            if said[0] is not None:
                logits[name] = ours.logits(prompts, [row[:-1] for row in said[0]])
        collect()
    if shard.rank > 0:
        return None
    distances = {} if truth is None else _distances_from(truth, logits)
    floor_ms = 1e3 * step_bytes / (ceilings.copy_gbs * 1e9) if ceilings is not None else None
    case = f"{case_of(loaded, *sizes)} tp={shard.ranks}"
    rows = [{**row, "tp": shard.ranks, "direct": group.direct} for row in rows_of(runs, distances, floor_ms, case, loaded.model, start_s)]
    return Measured(runs, distances, floor_ms, case, start_s, rows)


@contextmanager
def ready_engine(
    model: Any, sizes: tuple[int, int, int], mode: str, errors: Console, group: Group | None = None, *, room: int = 0
) -> Iterator[tuple[Engine, float]]:
    """An engine that has compiled what these sizes need, and the seconds this took. room: minimum
    length of its cache in tokens.
    """
    batch, prompt_tokens, max_new_tokens = sizes
    with _progress(errors) as on_progress:
        start = time.perf_counter()
        options: dict[str, Any] = {"mode": mode, "on_progress": on_progress, "group": group}
        with Engine(model, max_batch=batch, max_len=max(prompt_tokens + max_new_tokens, room), **options) as ours:
            ours.warm_up(batch, prompt_tokens)
            yield ours, time.perf_counter() - start


def _check_sizes(batch: int, prompt_tokens: int, max_new_tokens: int) -> None:
    for name, value in (("--batch", batch), ("--prompt-tokens", prompt_tokens), ("--max-new-tokens", max_new_tokens - 1)):
        if value < 1:
            raise argument_error(name, "at least 1" if name != "--max-new-tokens" else "at least 2", value)


def prompts_of(model: Any, batch: int, tokens: int) -> Tensor:
    vocab = model.get_input_embeddings().num_embeddings
    return torch.randint(vocab, (batch, tokens), generator=torch.Generator().manual_seed(0)).to(model.device)


def case_of(loaded: Loaded, batch: int, prompt_tokens: int, max_new_tokens: int) -> str:
    return f"{Path(loaded.source.removeprefix('random weights, config ')).name} batch={batch} prompt={prompt_tokens} new={max_new_tokens}"


def collect() -> None:
    """Frees memory, so that the next run's memory is its own."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def _waiting(console: Console, what: str) -> Iterator[None]:
    if console.is_terminal:
        with console.status(what):
            yield
    else:
        yield


@contextmanager
def _progress(console: Console) -> Iterator[OnProgress]:
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("engine", total=None)
        yield lambda stage, done, total: progress.update(bar, description=stage, completed=done, total=total)


def _stock_logits(model: Any, prompts: Tensor, given: Tensor) -> Tensor:
    """The model's own logits [batch, new, vocab] after the prompts and after each given token."""
    with torch.inference_mode():
        logits: Tensor = model(torch.cat((prompts, given), 1), logits_to_keep=given.shape[1] + 1).logits
    return logits


def _distances(model: Any, prompts: Tensor, given: Tensor, logits: dict[str, Tensor]) -> dict[str, Distance]:
    """Distances from the model's own weights in fp32. During the call the model is in fp32."""
    with in_float32(model):
        return _distances_from(_stock_logits(model, prompts, given), logits)


def _distances_from(truth: Tensor, logits: dict[str, Tensor]) -> dict[str, Distance]:
    found: dict[str, Distance] = {}
    for name, theirs in logits.items():
        per_token = torch.stack([divergence(t, o) for t, o in zip(truth, theirs, strict=True)])  # a sequence at a time: the rows are long
        found[name] = Distance(float(per_token.mean()), float(per_token.max()))
    return found


@contextmanager
def in_float32(model: Any) -> Iterator[None]:
    dtype, experts = model.dtype, getattr(model.config, "_experts_implementation", None)
    if experts is not None:
        model.set_experts_implementation("eager")  # the faster ones take no float32 on a GPU
    _cast(model, torch.float32)
    try:
        yield
    finally:
        _cast(model, dtype)
        if experts is not None:
            model.set_experts_implementation(experts)


def _cast(model: Any, dtype: torch.dtype) -> None:
    """Casts parameters only: `model.to` would round the frequencies of the rotation too."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)


def divergence(truth: Tensor, ours: Tensor) -> Tensor:
    # In double: the terms of a row cancel.
    return F.kl_div(ours.double().log_softmax(-1), truth.double().log_softmax(-1), log_target=True, reduction="none").sum(-1)


def _equal(a: Run, b: Run) -> float:
    pairs = [x == y for one, two in zip(a.tokens, b.tokens, strict=True) for x, y in zip(one, two, strict=True)]
    return sum(pairs) / len(pairs)


def rows_of(
    runs: list[Run], distances: dict[str, Distance], floor_ms: float | None, case: str, model: Any, start_s: float
) -> Iterator[dict[str, Any]]:
    """One JSON object for each of our runs: a row of benchmarks/results."""
    theirs = {run.name: run for run in runs if not run.name.startswith("tilewright")}
    peer_names = {"transformers eager": "transformers", "transformers compiled": "torch.compile"}
    peer_names |= {f"one device {mode}": "one device" for mode in ("eager", "graph")}
    for run in runs:
        if run.name in theirs:
            continue
        p50 = run.step_ms(50)
        yield {
            "op": "generate",
            "case": f"{case} mode={run.name.removeprefix('tilewright ')}",
            "dtype": str(model.dtype).removeprefix("torch."),
            "gpu": Device.of(next(model.parameters())).name,
            "tokens_per_s": round(run.tokens_per_s, 2),
            "seconds": round(run.seconds, 4),
            "ttft_ms": round(run.first_token_s * 1e3, 3),
            "tpot_ms": round(p50, 4),
            "tpot_p99_ms": round(run.step_ms(99), 4),
            "time_us": round(p50 * 1e3, 1),
            "cuda_ms": None if run.cuda_ms is None else round(run.cuda_ms, 2),
            "floor_pct": None if floor_ms is None else round(100 * floor_ms / p50, 1),
            "memory_gb": round(run.memory_bytes / 1e9, 2),
            "start_s": round(start_s, 2),
            "peers": {peer_names[name]: round(run.tokens_per_s / other.tokens_per_s, 4) for name, other in theirs.items()},
            "peer_tokens_per_s": {peer_names[name]: round(other.tokens_per_s, 2) for name, other in theirs.items()},
            "peer_tpot_ms": {peer_names[name]: round(other.step_ms(50), 4) for name, other in theirs.items()},
            "equal_tokens": {peer_names[name]: round(_equal(run, other), 4) for name, other in theirs.items()},
            "kl": {name: dataclasses.asdict(d) for name, d in distances.items()},
            "kernels": [dataclasses.asdict(k) for k in run.kernels],
            "versions": {**versions(), **_transformers_version()},
            "clocks": run.clocks,
            "date": datetime.date.today().isoformat(),
            "command": command(),
        }


def _transformers_version() -> dict[str, str]:
    import transformers

    return {"transformers": transformers.__version__}


def _show(console: Console, runs: list[Run], distances: dict[str, Distance], floor_ms: float | None, case: str, start_s: float) -> None:
    table = Table(title=case, title_justify="left", box=None, pad_edge=False)
    columns = ("", "tokens/s", "seconds", "CUDA ms", "first token ms", "step p50 ms", "p99", "of floor", "GB", "KL mean", "KL worst", "tokens equal")
    for column in columns:
        table.add_column(column, justify="left" if not column else "right")
    for run in runs:
        distance = distances.get(run.name)
        ours = run.name.startswith("tilewright")
        table.add_row(
            run.name,
            f"{run.tokens_per_s:.1f}",
            f"{run.seconds:.3f}",
            "-" if run.cuda_ms is None else f"{run.cuda_ms:.1f}",
            f"{run.first_token_s * 1e3:.1f}",
            f"{run.step_ms(50):.3f}",
            f"{run.step_ms(99):.3f}",
            f"{100 * floor_ms / run.step_ms(50):.0f} %" if floor_ms is not None and ours else "-",
            f"{run.memory_bytes / 1e9:.1f}" if run.memory_bytes else "-",
            f"{distance.mean:.2e}" if distance else "-",
            f"{distance.worst:.2e}" if distance else "-",
            f"{100 * _equal(run, runs[0]):.0f} %" if run is not runs[0] else "-",
        )
    console.print(table)
    if floor_ms is not None:
        console.print(f"floor: {floor_ms:.3f} ms a step, weights and keys once at the measured copy rate")
    if start_s:
        console.print(f"engine: {start_s:.1f} s from loaded weights to the first token's kernels (fusing, compiling, capturing)")
    for run in runs:
        _show_kernels(console, run)
    by_name = {run.name: run.tokens for run in runs}
    if "tilewright mega" in by_name:
        mega = next(run for run in runs if run.name == "tilewright mega")
        other = next(run for run in runs if run.name in ("tilewright graph", "tilewright eager"))
        console.print(f"tokens of mega and {other.name.removeprefix('tilewright ')} equal: {100 * _equal(mega, other):.0f} %")
    elif "tilewright graph" in by_name:
        same = by_name["tilewright graph"] == by_name["tilewright eager"]
        console.print(f"tokens of graph and eager equal: {'yes' if same else 'NO'}", style="green" if same else "bold red")


def _show_kernels(console: Console, run: Run) -> None:
    total = run.cuda_ms
    table = Table(title=f"\n{run.name}: kernels of one call", title_justify="left", box=None, pad_edge=False)
    for column in ("kernel", "CUDA ms", "calls", "share"):
        table.add_column(column, justify="left" if column == "kernel" else "right", overflow="fold")
    for k in run.kernels[:KERNELS_SHOWN]:
        timed = k.cuda_ms is not None and total
        table.add_row(k.name, f"{k.cuda_ms:.2f}" if timed else "-", str(k.calls), f"{100 * (k.cuda_ms or 0) / total:.1f} %" if total else "-")
    if len(run.kernels) > KERNELS_SHOWN:
        rest = run.kernels[KERNELS_SHOWN:]
        table.add_row(f"{len(rest)} others", f"{sum(k.cuda_ms or 0 for k in rest):.2f}" if total else "-", str(sum(k.calls for k in rest)), "")
    console.print(table)
