"""`tilewright difftest`: one token through the kernel and through the reference machine, on identical inputs; every value compared by name.

The noise band of a value is the accuracy rule (docs/accuracy.md), with the machine in double as the truth and the machine in the model's dtype as
the other implementation. Slots of the cache that hold no key of the text are filled with garbage.
"""

import dataclasses
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from ...launch import Device, argument_error
from ...launch.files import write_json
from ...testing import Accuracy, accuracy
from ..read import read
from .pack import LayerStacks, Weights, dims_of, refuse
from .program import Dims, Kind, Phase, phases
from .reference import Machine
from .run import Clocks
from .schedule import Config
from .stream import StreamMega, mega_of, reduced, why_not
from .stream_reference import StreamMachine
from .stream_schedule import StreamConfig, StreamSchedule, default_stream_config

SPIN_LIMIT = 1 << 20  # looks at a counter or at words, a second or two of them
PATIENCE_S = 20.0  # for a kernel whose every wait ends by itself
MAX_LEN = 64
TOKENS = 2  # that a schedule is run for: the second shows whether a word is overwritten while somebody wants it


@dataclass(frozen=True, slots=True)
class Difference:
    """Kernel against machine: largest absolute and mean symmetric relative difference, 2 |a - b| / (|a| + |b|), and what the accuracy rule says."""

    name: str
    absolute: float
    relative: float
    accuracy: Accuracy


def decided(outline: Any, where: torch.device, *, layers: int, stop_after: str) -> Dims:
    """The sizes of the whole model, of which the first layers (0: all) are to run. outline: on the meta device (models.outline_of).

    Raises ValueError for what does not run, before anything is built.
    """
    if not 0 <= layers <= outline.config.num_hidden_layers:
        raise argument_error("--layers", f"1 to {outline.config.num_hidden_layers}", layers)
    names = [kind.name.lower() for kind in Kind][:-1]
    if stop_after and stop_after not in names:
        raise argument_error("--stop-after", f"one of {', '.join(names)}", stop_after)
    whole = outline.config.num_hidden_layers
    outline.config.num_hidden_layers = layers or whole
    refuse(outline, Device.of(torch.empty(0, device=where)))
    return dataclasses.replace(dims_of(outline), layers=whole)


def program_of(weights: Weights, layers: int, stop_after: str) -> tuple[Weights, list[Phase]]:
    """The model's first layers (0: all), and its phases up to one."""
    weights = weights.first_layers(layers or weights.dims.layers)
    program = list(phases(weights.dims))
    if stop_after:
        last = next(i for i in reversed(range(len(program))) if program[i].kind.name.lower() == stop_after)
        program = program[: last + 1]
    return weights, program


def random_token(weights: Weights, position: int, seed: int = 0) -> tuple[int, tuple[Tensor, Tensor]]:
    """A token and a cache [layers, kv_heads, max_len, head_dim] of the keys before `position`, with garbage and NaN in the slots behind them."""
    d, like = weights.dims, weights.embedding
    if not 0 <= position < len(weights.cos):
        raise argument_error("position", f"0 to {len(weights.cos) - 1}", position)
    generator = torch.Generator().manual_seed(seed)
    shape = (d.layers, d.kv_heads, len(weights.cos), d.head_dim)
    caches = [torch.randn(shape, generator=generator, dtype=torch.float32) for _ in range(2)]
    for cache in caches:
        cache[:, :, position:] *= 100.0
        cache[:, :, position + 1 :: 2] = float("nan")
    keys, values = (cache.to(like.dtype).to(like.device) for cache in caches)
    return int(torch.randint(d.vocab, (), generator=generator)), (keys, values)


def differences(
    weights: Weights,
    program: list[Phase],
    position: int,
    *,
    blocks: int | None = None,
    config: Config | StreamConfig | None = None,
    seed: int = 0,
    on_progress: Callable[[str], None] = lambda line: None,
) -> list[Difference]:
    """Runs kernel and machine on a random token and cache. Raises MissingDependency, or RuntimeError where a block waited in vain.

    on_progress: called with a line before and after each part, so that what hangs is known.
    """
    like = weights.embedding
    token, (keys, values) = random_token(weights, position, seed)

    def integers(*shape: int, dtype: torch.dtype, fill: int = 0) -> Tensor:
        return torch.full(shape, fill, dtype=dtype, device=like.device)

    clocks = Clocks(
        integers(16, dtype=torch.int64, fill=token),
        integers(2, 16, dtype=torch.int32, fill=position),
        integers(1, 16, dtype=torch.int64),
        integers(2, dtype=torch.int64),
    )
    mega = mega_of(weights, program, clocks, (keys.clone(), values.clone()), blocks=blocks, config=config, spin_limit=SPIN_LIMIT)
    on_progress(f"kernel: {type(mega).__name__}, {mega.schedule.blocks} blocks, {len(program)} phases: compiling")
    began = perf_counter()
    mega.step()
    on_progress(f"kernel: launched after {perf_counter() - began:.1f} s")
    _await(like.device)
    mega.check()
    on_progress(f"kernel: done after {perf_counter() - began:.1f} s")
    machines = []
    for dtype in (like.dtype, torch.float64):
        on_progress(f"machine in {str(dtype).removeprefix('torch.')}: running")
        copies = keys.to(dtype).clone(), values.to(dtype).clone()
        if isinstance(mega, StreamMega):
            machine: Machine | StreamMachine = StreamMachine(weights, mega.schedule, token, position, copies, dtype=dtype)
        else:
            machine = Machine(weights, mega.schedule, token, position, copies, dtype=dtype)
        machine.run(program)
        machines.append(machine)
    on_progress("comparing")
    theirs, truth = machines
    found = []
    for name, ours in mega.named(position).items():
        if name in theirs.values:
            found.append(_difference(name, ours.flatten(), theirs.values[name].flatten(), truth.values[name].flatten()))
    if program[-1].kind >= Kind.HEAD:
        for name, ours, other, true in zip(("keys", "values"), mega.cache, theirs.cache, truth.cache, strict=True):
            found.append(_difference(f"appended {name}", *(t[:, :, position].flatten() for t in (ours, other, true))))
    if program[-1].kind is Kind.CHOOSE:  # another token than the machine's is right where its own logit is the largest
        chosen = int(clocks.tokens[0])
        if not 0 <= chosen < weights.dims.vocab:
            raise RuntimeError(f"the kernel chose token {chosen} of {weights.dims.vocab}")
        largest = mega.values.logits[0].amax()[None]
        found.append(_difference("chosen logit", mega.values.logits[0, chosen, None], largest, largest))
    return found


def _await(device: torch.device) -> None:
    """Looks, where `synchronize` would wait for ever and hold off the keyboard too. Raises RuntimeError if the device isn't done in time."""
    if device.type != "cuda":
        return
    end = torch.cuda.Event()
    end.record(torch.cuda.current_stream(device))
    deadline = perf_counter() + PATIENCE_S
    while not end.query():
        if perf_counter() > deadline:
            raise RuntimeError(
                f"the kernel has not ended after {PATIENCE_S:g} s: its blocks hang, and not in a wait of theirs, which would have ended"
            )
        sleep(1e-3)


def _difference(name: str, ours: Tensor, theirs: Tensor, truth: Tensor) -> Difference:
    a, b = ours.double(), theirs.double()
    apart = (a - b).abs()
    relative = (2 * apart / (a.abs() + b.abs())).nan_to_num(0.0).mean()
    return Difference(name, float(apart.max()), float(relative), accuracy(ours, theirs, truth))


def scheduled(weights: Weights, program: list[Phase], device: Device, position: int, tokens: int, *, blocks: int | None = None) -> StreamMachine:
    """Runs the machine alone on a device's own schedule, blocks in a drawn order. Raises as its `run`; ValueError for what is no stream."""
    config = reduced(default_stream_config(device), weights.dims, weights.embedding.dtype)
    reason = why_not(weights.dims, weights.embedding.dtype, config)
    if reason:
        raise argument_error("the model's sizes", "those of one stream of weights", reason)
    token, cache = random_token(weights, position)
    machine = StreamMachine(weights, StreamSchedule(weights.dims, blocks or device.sms, config), token, position, cache, order=0)
    machine.run(program, tokens)
    return machine


def difftest_command(model: Any, *, whole: Dims, stop_after: str, position: int, blocks: int, gpu: str, json_file: Path | None = None) -> int:
    """Compares and prints; with `gpu`, runs its schedule in the machine alone. Returns the exit code: 1 if a value breaks the accuracy rule.

    model: the layers to run. whole: of all layers, as `decided`.
    """
    device = Device.named(gpu) if gpu else None
    with torch.inference_mode():
        stacks = LayerStacks.of(model)
        try:
            length = -(-(position + TOKENS) // MAX_LEN) * MAX_LEN
            weights = Weights.of(read(model, stacks, length, lambda *progress: None), stacks)
            weights, program = program_of(weights, 0, stop_after)
            if device is not None:
                machine = scheduled(weights, program, device, position, TOKENS, blocks=blocks or None)
                return _print_schedule(StreamSchedule(whole, machine.schedule.blocks, machine.schedule.config), machine, device, json_file)
            found = differences(weights, program, position, blocks=blocks or None, on_progress=lambda line: print(line, file=sys.stderr, flush=True))
        finally:
            stacks.undo()
    good = all(d.accuracy.ok for d in found)
    if json_file:
        rows = [[d.name, d.absolute, d.relative, d.accuracy.rms_ratio, d.accuracy.worst_ratio] for d in found]
        columns = ["name", "max_absolute", "mean_relative", "rms_ratio", "worst_ratio"]
        write_json(json_file, {"ok": good, "values": [dict(zip(columns, row, strict=True)) for row in rows]})
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False)
    for column in ("value", "max |a - b|", "mean 2|a - b| / (|a| + |b|)", "rms of the bound", "worst of the bound"):
        table.add_column(column, justify="left" if column == "value" else "right")
    for d in found:
        ratios = (f"{d.accuracy.rms_ratio:.2f}", f"{d.accuracy.worst_ratio:.2f}")
        table.add_row(d.name, f"{d.absolute:.3g}", f"{d.relative:.3g}", *ratios, style=None if d.accuracy.ok else "bold red")
    console.print(table)
    console.print(f"{len(found)} values, {sum(d.accuracy.ok for d in found)} within the noise band of {str(model.dtype).removeprefix('torch.')}")
    return int(not good)


def _print_schedule(whole: StreamSchedule, machine: StreamMachine, device: Device, json_file: Path | None) -> int:
    """whole: of all layers. machine: has run some."""
    least, most = whole.size // whole.blocks, -(-whole.size // whole.blocks)
    c, shares = whole.config, whole.dims.kv_heads * whole.splits
    found = {
        "gpu": device.name,
        "blocks": whole.blocks,
        "rows": c.rows,
        "tiles": [least, most],
        "balance": whole.balance(),
        "ranges": whole.splits,
        "attending": min(shares, whole.blocks),
        "layers_run": machine.schedule.dims.layers,
        "tokens": machine.tokens,
    }
    if json_file:
        write_json(json_file, found)
    print(f"{device.name}: {whole.blocks} blocks, {least} to {most} tiles of {c.rows} rows each, balance {whole.balance():.4f}")
    print(f"attention: {whole.splits} ranges of keys for each of {whole.dims.kv_heads} key heads, on {found['attending']} of {whole.blocks} blocks")
    print(
        f"run by the machine, {found['layers_run']} of {whole.dims.layers} layers: no block waits in vain, nothing is overwritten; {machine.tokens}"
    )
    return 0
