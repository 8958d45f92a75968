"""`tilewright generate --prompt-tokens N`: times, kernels, floor, distance from transformers."""

import dataclasses
import datetime
import gc
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
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
from ..launch import Device, argument_error, dtype_name
from ..launch.console import plain_console
from ..launch.files import replace_file
from ..models import Loaded, load, patch
from ..models.command import refuse_comparison
from ..models.generate import check_positions
from ..models.quantized import weight_formats
from .engine import Engine, OnProgress
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
    """A timed generation. prompt_tokens, max_new_tokens: read and written for each prompt."""

    batch: int
    prompt_tokens: int
    max_new_tokens: int


@dataclasses.dataclass(slots=True)
class Measured:
    """A timed generation. dtype, gpu: the model's. more: fields of each JSON line.

    copy_gbs: the measured copy rate of a GPU; the floor is told with it.
    logits: of each run, for `keep_distances`. floor_ms: of a step; None on a CPU. start_s: from
        loaded weights to a ready engine.
    """

    case: str
    sizes: Sizes
    dtype: str
    gpu: str
    copy_gbs: float | None
    more: dict[str, Any] = dataclasses.field(default_factory=dict)
    runs: list[Run] = dataclasses.field(default_factory=list)
    logits: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    distances: dict[str, Distance] = dataclasses.field(default_factory=dict)
    floor_ms: float | None = None
    start_s: float = 0.0

    @staticmethod
    def of(loaded: Loaded, sizes: Sizes, copy_gbs: float | None, kv_dtype: str | None = None, **more: Any) -> "Measured":
        gpu, dtype = Device.of(next(loaded.model.parameters())).name, dtype_name(loaded.model.dtype)
        return Measured(case_of(loaded, *sizes, kv_dtype), sizes, dtype, gpu, copy_gbs, more)

    def run_modes(
        self,
        model: Any,
        modes: Sequence[str],
        given: list[list[int]] | None,
        errors: Console,
        group: Group | None = None,
        kv_dtype: str | None = None,
    ) -> None:
        """Times the engine in each mode. given: continuations whose logits are kept."""
        batch, prompt_tokens, new = self.sizes
        prompts = prompts_of(model, batch, prompt_tokens)
        for mode in modes:
            name = f"tilewright {mode}"
            with ready_engine(model, self.sizes, mode, errors, group, kv_dtype=kv_dtype) as (ours, self.start_s):
                self.runs.append(run_engine(ours, name, prompts, new))
                if self.copy_gbs is not None:
                    self.floor_ms = 1e-6 * ours.step_bytes(batch, prompt_tokens + new // 2) / self.copy_gbs
                if given is not None:
                    self.logits[name] = ours.logits(prompts, given)
            collect()

    def keep_distances(self, truth: Tensor) -> None:
        """truth: logits of the model's own weights in fp32. The logits of the runs are let go."""
        for name, theirs in self.logits.items():
            per_token = torch.stack([divergence(t, o) for t, o in zip(truth, theirs, strict=True)])  # a sequence at a time: the rows are long
            self.distances[name] = Distance(float(per_token.mean()), float(per_token.max()))
        self.logits.clear()


def measure_command(
    loaded: Loaded, sizes: Sizes, *, engine: str, baselines: tuple[str, ...], json_file: Path | None, kv_dtype: str | None = None
) -> int:
    """Times `engine` beside unpatched transformers: a mode of `Engine`, or "transformers" for the
    patched model. Returns the exit code: 1 if the graph's tokens are not those of the eager engine.
    The megakernel sums in another order; its tokens are compared with the graph's, without an exit
    code.

    baselines: which of "eager" and "compiled" (static cache, on a GPU) to run.
    """
    _check_sizes(*sizes)
    check_positions(loaded.model, sizes.prompt_tokens, sizes.max_new_tokens)
    if baselines:
        refuse_comparison(loaded)
    model, device = loaded.model, loaded.model.device
    prompts, new = prompts_of(model, sizes.batch, sizes.prompt_tokens), sizes.max_new_tokens
    errors = plain_console(stderr=True)
    found = Measured.of(loaded, sizes, _copy_gbs(device), kv_dtype)
    model.generation_config.eos_token_id = None  # a checkpoint's stop token would end a timed run at random
    for mode in baselines:
        options = {"cache_implementation": "static"} if mode == "compiled" else {}
        with _waiting(errors, f"transformers {mode}"):
            found.runs.append(run_transformers(model, f"transformers {mode}", prompts, new, **options))
    torch.compiler.reset()
    collect()
    given = [row[:-1] for row in found.runs[0].tokens] if found.runs else None
    if given is not None:
        found.logits["transformers eager"] = _stock_logits(model, prompts, given)
    if engine == "transformers":
        with patch(model), _waiting(errors, "tilewright patched"):
            found.runs.append(run_transformers(model, "tilewright patched", prompts, new))
            if given is not None:
                found.logits["tilewright patched"] = _stock_logits(model, prompts, given)
    beside = "graph" if device.type == "cuda" else "eager"
    modes = {"eager": ("eager",), "graph": ("eager", "graph"), "mega": (beside, "mega"), "auto": (beside, "auto")}
    found.run_modes(model, modes.get(engine, ()), given, errors, kv_dtype=kv_dtype)
    if given is not None:
        with in_float32(model):
            found.keep_distances(_stock_logits(model, prompts, given))
    return tell(found, json_file=json_file)


def tell(found: Measured, *, json_file: Path | None) -> int:
    """Prints the results. json_file: gets a line of JSON for each row. Returns the exit code."""
    if json_file:
        replace_file(json_file, "".join(json.dumps(line) + "\n" for line in rows_of(found)).encode())
    # The table needs about 130 columns.
    _show(plain_console(soft_wrap=False, width=None if plain_console(stderr=True).is_terminal else 160), found)
    by_name = {run.name: run.tokens for run in found.runs}
    both = "tilewright graph" in by_name and "tilewright eager" in by_name
    return int(both and by_name["tilewright graph"] != by_name["tilewright eager"])


def measure_rank(  # noqa: PLR0913 picklable, by position
    group: Group,
    device: torch.device,
    source: str,
    dtype: torch.dtype,
    sizes: Sizes,
    engine: str,
    compare: bool,
    trust_remote_code: bool = False,
    weights: str | None = None,
    kv_dtype: str | None = None,
) -> Measured | None:
    """As `measure_command`, in each process of an engine of several.

    Returns the results of rank 0.

    compare: first run the same engine on one device with the whole model.
    """
    from transformers.utils import logging as transformers_logging

    _check_sizes(*sizes)
    transformers_logging.disable_progress_bar()
    shard, alone = group.shard, f"one device {engine}"
    errors = plain_console(stderr=True, quiet=shard.rank > 0, force_terminal=False if shard.rank > 0 else None)
    runs: list[Run] = []
    logits: dict[str, Tensor] = {}
    truth: Tensor | None = None
    copy_gbs = _copy_gbs(device) if shard.rank == 0 else None
    if shard.rank == 0 and compare:
        loaded = load(source, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
        refuse_comparison(loaded)
        whole = loaded.model
        prompts = prompts_of(whole, sizes.batch, sizes.prompt_tokens)
        with ready_engine(whole, sizes, engine, errors, kv_dtype=kv_dtype) as (ours, _):
            runs.append(run_engine(ours, alone, prompts, sizes.max_new_tokens))
            continuations = [row[:-1] for row in runs[0].tokens]
            logits[alone] = ours.logits(prompts, continuations)
        with in_float32(whole):
            truth = _stock_logits(whole, prompts, continuations)
        del whole, ours, loaded
        collect()
    loaded = load(source, device=device, dtype=dtype, shard=shard, trust_remote_code=trust_remote_code, weights=weights)
    said: list[Any] = [[row[:-1] for row in runs[0].tokens] if runs else None]
    dist.broadcast_object_list(said, src=0, group=group.process_group)
    found = Measured.of(loaded, sizes, copy_gbs, kv_dtype, tp=shard.ranks, direct=group.direct)
    found.case, found.runs, found.logits = f"{found.case} tp={shard.ranks}", runs, logits
    found.run_modes(loaded.model, ("eager", "graph") if engine == "graph" else (engine,), said[0], errors, group, kv_dtype)
    if shard.rank > 0:
        return None
    if truth is not None:
        found.keep_distances(truth)
    return found


def _copy_gbs(device: torch.device) -> float | None:
    """The measured copy rate of a GPU."""
    with torch.inference_mode():
        return measure_ceilings(device).copy_gbs if device.type == "cuda" else None


@contextmanager
def ready_engine(
    model: Any, sizes: tuple[int, int, int], mode: str, errors: Console, group: Group | None = None, *, room: int = 0, kv_dtype: str | None = None
) -> Iterator[tuple[Engine, float]]:
    """An engine, compiled for these sizes, and the seconds this took. room: least tokens cached."""
    batch, prompt_tokens, max_new_tokens = sizes
    with _progress(errors) as on_progress:
        start = time.perf_counter()
        options: dict[str, Any] = {"mode": mode, "on_progress": on_progress, "group": group, "kv_dtype": kv_dtype}
        with Engine(model, max_batch=batch, max_len=max(prompt_tokens + max_new_tokens, room), **options) as ours:
            ours.warm_up(batch, prompt_tokens)
            yield ours, time.perf_counter() - start


def _check_sizes(batch: int, prompt_tokens: int, max_new_tokens: int) -> None:
    for name, value, least in (("--batch", batch, 1), ("--prompt-tokens", prompt_tokens, 1), ("--max-new-tokens", max_new_tokens, 2)):
        if value < least:
            raise argument_error(name, f"at least {least}", value)


def prompts_of(model: Any, batch: int, tokens: int) -> Tensor:
    vocab = model.get_input_embeddings().num_embeddings
    return torch.randint(vocab, (batch, tokens), generator=torch.Generator().manual_seed(0)).to(model.device)


def case_of(loaded: Loaded, batch: int, prompt_tokens: int, max_new_tokens: int, kv_dtype: str | None = None) -> str:
    formats = "+".join(weight_formats(loaded.model))
    words = [Path(loaded.source.removeprefix("random weights, config ")).name, formats and f"weights={formats}", kv_dtype and f"kv={kv_dtype}"]
    return " ".join((*filter(None, words), f"batch={batch} prompt={prompt_tokens} new={max_new_tokens}"))


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


def _stock_logits(model: Any, prompts: Tensor, given: list[list[int]]) -> Tensor:
    """The model's own logits [batch, new, vocab] after the prompts and after each given token."""
    with torch.inference_mode():
        whole = torch.cat((prompts, torch.tensor(given, dtype=prompts.dtype, device=prompts.device)), 1)
        logits: Tensor = model(whole, logits_to_keep=len(given[0]) + 1).logits
    return logits


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


def equal(a: Run, b: Run) -> float:
    """The share of equal tokens, place by place."""
    pairs = [x == y for one, two in zip(a.tokens, b.tokens, strict=True) for x, y in zip(one, two, strict=True)]
    return sum(pairs) / len(pairs)


def rows_of(found: Measured) -> Iterator[dict[str, Any]]:
    """One JSON object for each of our runs: a row of benchmarks/results."""
    theirs = {run.name: run for run in found.runs if not run.name.startswith("tilewright")}
    peer_names = {"transformers eager": "transformers", "transformers compiled": "torch.compile"}
    peer_names |= {f"one device {mode}": "one device" for mode in ("eager", "graph")}
    for run in found.runs:
        if run.name in theirs:
            continue
        p50 = run.step_ms(50)
        yield {
            "op": "generate",
            "case": f"{found.case} mode={run.name.removeprefix('tilewright ')}",
            "dtype": found.dtype,
            "gpu": found.gpu,
            "tokens_per_s": round(run.tokens_per_s, 2),
            "seconds": round(run.seconds, 4),
            "ttft_ms": round(run.first_token_s * 1e3, 3),
            "tpot_ms": round(p50, 4),
            "tpot_p99_ms": round(run.step_ms(99), 4),
            "time_us": round(p50 * 1e3, 1),
            "cuda_ms": None if run.cuda_ms is None else round(run.cuda_ms, 2),
            "floor_pct": None if found.floor_ms is None else round(100 * found.floor_ms / p50, 1),
            "memory_gb": round(run.memory_bytes / 1e9, 2),
            "start_s": round(found.start_s, 2),
            "peers": {peer_names[name]: round(run.tokens_per_s / other.tokens_per_s, 4) for name, other in theirs.items()},
            "peer_tokens_per_s": {peer_names[name]: round(other.tokens_per_s, 2) for name, other in theirs.items()},
            "peer_tpot_ms": {peer_names[name]: round(other.step_ms(50), 4) for name, other in theirs.items()},
            "equal_tokens": {peer_names[name]: round(equal(run, other), 4) for name, other in theirs.items()},
            "kl": {name: dataclasses.asdict(d) for name, d in found.distances.items()},
            "kernels": [dataclasses.asdict(k) for k in run.kernels],
            "versions": {**versions(), "transformers": version("transformers")},
            "clocks": run.clocks,
            "date": datetime.date.today().isoformat(),
            "command": command(),
            **found.more,
        }


def _show(console: Console, found: Measured) -> None:
    runs, floor_ms = found.runs, found.floor_ms
    table = Table(title=found.case, title_justify="left", box=None, pad_edge=False)
    columns = ("", "tokens/s", "seconds", "CUDA ms", "first token ms", "step p50 ms", "p99", "of floor", "GB", "KL mean", "KL worst", "tokens equal")
    for column in columns:
        table.add_column(column, justify="left" if not column else "right")
    for run in runs:
        distance = found.distances.get(run.name)
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
            f"{100 * equal(run, runs[0]):.0f} %" if run is not runs[0] else "-",
        )
    console.print(table)
    if floor_ms is not None:
        console.print(f"floor: {floor_ms:.3f} ms a step, weights and keys once at the measured copy rate")
    if found.start_s:
        console.print(f"engine: {found.start_s:.1f} s from loaded weights to the first token's kernels (fusing, compiling, capturing)")
    for run in runs:
        _show_kernels(console, run)
    by_name = {run.name: run.tokens for run in runs}
    if "tilewright mega" in by_name:
        mega = next(run for run in runs if run.name == "tilewright mega")
        other = next(run for run in runs if run.name in ("tilewright graph", "tilewright eager"))
        console.print(f"tokens of mega and {other.name.removeprefix('tilewright ')} equal: {100 * equal(mega, other):.0f} %")
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
