"""`tilewright bench --suite decode`: one token at a time, by transformers and each mode of the
engine, beside the read rate of a kernel.

A mode that cannot run a model is named with the reason. Rows have op `decode` and what `tilewright
generate` measures. They add the bytes that a step reads over its time, the share of the read rate
measured in the same run, and the time of the kernels alone.
"""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from ..bench.ceilings import Ceilings
from ..bench.command import ready
from ..bench.report import append_jsonl
from ..launch.console import plain_console
from ..models import Loaded, load
from ..models.quantized import quantize
from .command import Measured, Sizes, case_of, collect, equal, prompts_of, ready_engine, rows_of
from .engine import Engine
from .measure import Run, profiled, run_engine, run_transformers
from .mega.pack import CODES, dims_of_config
from .modes import Mode


@dataclass(frozen=True, slots=True)
class Case:
    """A config's name, the tokens to read and to write. room: minimum tokens of the cache. weights:
    what they are quantised to; then nobody runs beside the engine.
    """

    model: str
    prompt: int = 32
    new: int = 128
    room: int = 16384
    weights: str | None = None

    @property
    def name(self) -> str:
        words = "decode", self.model, self.weights and f"weights={self.weights}", f"batch=1 prompt={self.prompt} new={self.new}"
        return " ".join(filter(None, words))


CASES = (
    Case("Llama-3.2-1B"),
    Case("Llama-3.2-1B", prompt=6),  # what the published megakernel wrote: 6 tokens of prompt, 128 new ones
    Case("Llama-3.2-1B", prompt=8192, new=64),
    Case("Llama-3.2-3B"),
    Case("Llama-3.1-8B"),
    Case("Llama-3.1-8B", weights=CODES),
    Case("Qwen3-0.6B"),
    Case("SmolLM2-135M", room=2048),
)
MODES: tuple[Mode, ...] = ("eager", "graph", "mega")


def decode_command(*, json_file: Path | None = None, case: str = "", peers: bool = True, seconds: float = math.inf, device: str = "cuda") -> int:
    """Measures the cases whose name contains `case`. Returns the exit code: 2 without a GPU.

    seconds: no case is begun after as many.
    """
    until = time.monotonic() + seconds
    console = plain_console()
    setup = ready(device, console)
    count = 0
    for one in CASES:
        if case not in one.name:
            continue
        if time.monotonic() > until:
            console.print("out of time; the rest is not measured")
            break
        loaded = load(one.model, device=setup.device, dtype=torch.bfloat16)
        if one.weights:
            quantize(loaded.model, one.weights, undoable=False)
        for row in measure_decode(loaded, one, setup.ceilings, console, peers=peers and not one.weights):
            count += 1
            console.print(line(row))
            if json_file:
                append_jsonl(json_file, json.dumps(row))
        del loaded
        collect()
    console.print(json.dumps({"cases": count, "wrong": 0, "ceilings": asdict(setup.ceilings)}))
    return 0


def measure_decode(loaded: Loaded, case: Case, ceilings: Ceilings, console: Console, *, peers: bool = True) -> Iterator[dict[str, Any]]:
    """A row for each mode that runs the model. peers: time transformers too, eager and compiled."""
    model = loaded.model
    model.generation_config.eos_token_id = None  # a checkpoint's stop token would end a timed run at random
    prompts, cuda = prompts_of(model, 1, case.prompt), model.device.type == "cuda"
    runs: list[Run] = []
    if peers:
        runs.append(run_transformers(model, "transformers eager", prompts, case.new))
        if cuda:
            runs.append(run_transformers(model, "transformers compiled", prompts, case.new, cache_implementation="static"))
            torch.compiler.reset()
        collect()
    written: dict[str, Run] = {}
    for mode in (mode for mode in MODES if cuda or mode != "graph"):
        name = f"{case_of(loaded, 1, case.prompt, case.new)} mode={mode}"
        try:
            ready = ready_engine(model, (1, case.prompt, case.new), mode, plain_console(quiet=True), room=case.room)
            with ready as (engine, start_s):
                run = run_engine(engine, f"tilewright {mode}", prompts, case.new)
                size, steps_us = engine.step_bytes(1, case.prompt + case.new // 2), kernel_us(engine, prompts, case.new, run)
        except ValueError as error:
            console.print(f"{name}: not run ({error})")
            continue
        collect()
        written[mode] = run
        found = Measured.of(loaded, Sizes(1, case.prompt, case.new), None)
        found.runs, found.floor_ms, found.start_s = [*runs, run], 1e-6 * size / ceilings.read_gbs, start_s
        (row,) = rows_of(found)
        row |= {"op": "decode", "step_bytes": size, "gbs": round(size / row["time_us"] / 1e3, 1), "read_gbs": round(ceilings.read_gbs, 1)}
        row |= {"read_pct": row["floor_pct"], "kernel_us": steps_us, "mode": mode, "keys": case.prompt + case.new // 2}
        row |= {"sizes": asdict(dims_of_config(model.config)), "weights": case.weights}
        row["equal_tokens"] |= {f"tilewright {other}": round(equal(run, theirs), 4) for other, theirs in written.items() if other != mode}
        yield row


def kernel_us(engine: Engine, prompts: Tensor, new: int, run: Run) -> float | None:
    """Time of a step's kernels, by the profiler: that of the whole text minus that of its first
    half, so without the prompt.
    """
    if run.cuda_ms is None:
        return None
    half = new // 2
    less = sum(kernel.cuda_ms or 0.0 for kernel in profiled(lambda: engine.generate(prompts, half)))
    return round(1e3 * (run.cuda_ms - less) / (new - half), 1)


def line(row: dict[str, Any]) -> str:
    """The row as one line: rate, bandwidth and share, kernel time, first token, ratios."""
    kernels = "kernels not timed" if row["kernel_us"] is None else f"kernels {row['kernel_us']:.1f} us"
    peers = " ".join(f"{name} {ratio:.2f}x" for name, ratio in row["peers"].items())
    equal = " ".join(f"{name.removeprefix('tilewright ')} {100 * share:.0f} %" for name, share in row["equal_tokens"].items())
    return (
        f"decode {row['case']:<52} | {1e6 / row['time_us']:7.1f} tokens/s | {row['time_us']:8.1f} us a token | {kernels} | {row['gbs']:6.0f} GB/s, "
        f"{row['read_pct']:.1f} % of {row['read_gbs']:.0f} read | first token {row['ttft_ms']:.1f} ms | {peers or 'no peer'} | "
        f"same tokens: {equal or 'nobody beside'} | {row['clocks'] or 'clocks unknown'}"
    )
