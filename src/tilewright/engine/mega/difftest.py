"""`tilewright difftest`: one token through the kernel and through the reference machine, on
identical inputs. Every value is compared by name.

A value must keep the accuracy rule (docs/accuracy.md), with the machine in float64 as the truth and
the machine in the model's dtype in PyTorch's place.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from ...launch import Device, argument_error, dtype_name
from ...launch.console import plain_console
from ...launch.files import write_json
from ...testing import Accuracy, accuracy
from ..read import read
from ..weights import Fusion
from .pack import Weights
from .reference import Faults, Machine
from .run import Clocks, Mega
from .shape import Config, Dims, Schedule, schedule_of

SPIN_LIMIT = 1 << 20  # polls, a second or two of them
PATIENCE_S = 20.0  # for a kernel whose every poll ends by itself
MAX_LEN = 64
TOKENS = 2  # that a schedule is run for: the second shows whether sums are cleared in time
FAULTS = Faults(late=0.2, twice=0.1)  # of a schedule that is run alone
COLUMNS = ("max |a - b|", "mean 2|a - b| / (|a| + |b|)", "rms of the bound", "worst of the bound")


@dataclass(frozen=True, slots=True)
class Difference:
    """Kernel against machine: largest absolute and mean symmetric relative difference, 2 |a - b| /
    (|a| + |b|), and what the accuracy rule says.
    """

    name: str
    absolute: float
    relative: float
    accuracy: Accuracy

    @staticmethod
    def of(name: str, ours: Tensor, theirs: Tensor, truth: Tensor) -> "Difference":
        a, b = ours.double(), theirs.double()
        apart = (a - b).abs()
        relative = (2 * apart / (a.abs() + b.abs())).nan_to_num(0.0).mean()
        return Difference(name, float(apart.max()), float(relative), accuracy(ours, theirs, truth))


def random_token(weights: Weights, position: int) -> tuple[int, tuple[Tensor, Tensor]]:
    """A token and a cache [layers, kv_heads, max_len, head_dim] of the keys before `position`, with
    garbage and NaN in the slots behind them.
    """
    d, like = weights.dims, weights.embedding
    if not 0 <= position < len(weights.cos):
        raise argument_error("position", f"0 to {len(weights.cos) - 1}", position)
    generator = torch.Generator().manual_seed(0)
    caches = [torch.randn(d.layers, d.kv_heads, len(weights.cos), d.head_dim, generator=generator, dtype=torch.float32) for _ in range(2)]
    for cache in caches:
        cache[:, :, position:] *= 100.0
        cache[:, :, position + 1 :: 2] = float("nan")
    keys, values = (cache.to(like.dtype).to(like.device) for cache in caches)
    return int(torch.randint(d.vocab, (), generator=generator)), (keys, values)


def differences(
    weights: Weights, position: int, *, blocks: int = 0, config: Config | None = None, on_progress: Callable[[str], None] = lambda line: None
) -> list[Difference]:
    """Runs kernel and machine on a random token and cache. Raises RuntimeError if a block gave up.

    on_progress: called with a line before and after each part, to show what hangs.
    """
    like = weights.embedding
    token, (keys, values) = random_token(weights, position)
    clocks = Clocks.at(token, position, 1, like.device)
    mega = Mega(weights, clocks, (keys.clone(), values.clone()), blocks=blocks, config=config, spin_limit=SPIN_LIMIT)
    on_progress(f"kernel: {mega.schedule.blocks} blocks, {mega.schedule.size} tiles: compiling")
    began = perf_counter()
    mega.step()
    on_progress(f"kernel: launched after {perf_counter() - began:.1f} s")
    _await(like.device)
    mega.check()
    on_progress(f"kernel: done after {perf_counter() - began:.1f} s")
    machines = []
    for dtype in (like.dtype, torch.float64):
        on_progress(f"machine in {dtype_name(dtype)}: running")
        copies = keys.to(dtype, copy=True), values.to(dtype, copy=True)
        machines.append(Machine(weights, mega.schedule, token, position, copies, dtype=dtype))
        machines[-1].run()
    on_progress("comparing")
    theirs, truth = machines
    others, exact = theirs.named(), truth.named()
    found = [Difference.of(name, ours.flatten(), others[name].flatten(), exact[name].flatten()) for name, ours in mega.named().items()]
    for name, *caches in zip(("keys", "values"), mega.cache, theirs.cache, truth.cache, strict=True):
        found.append(Difference.of(f"appended {name}", *(cache[:, :, position].flatten() for cache in caches)))
    chosen = int(clocks.tokens[0])  # another token than the machine's is right where its own logit is the largest
    if not 0 <= chosen < weights.dims.vocab:
        raise RuntimeError(f"the kernel chose token {chosen} of {weights.dims.vocab}")
    largest = mega.logits[0].amax()[None]
    return [*found, Difference.of("chosen logit", mega.logits[0, chosen, None], largest, largest)]


def _await(device: torch.device) -> None:
    """Waits for the device by polling: `synchronize` would wait for ever, and hold off the keyboard
    too. Raises RuntimeError if the device isn't done in time.
    """
    if device.type != "cuda":
        return
    end = torch.cuda.Event()
    end.record(torch.cuda.current_stream(device))
    deadline = perf_counter() + PATIENCE_S
    while not end.query():
        if perf_counter() > deadline:
            raise RuntimeError(f"the kernel has not ended after {PATIENCE_S:g} s: its blocks hang outside of a poll, which would have given up")
        sleep(1e-3)


def scheduled(weights: Weights, device: Device, position: int, tokens: int, *, blocks: int = 0) -> Machine:
    """Runs the machine alone on a device's own schedule, blocks in a random order, with faults.
    Raises as its `run`.
    """
    token, cache = random_token(weights, position)
    machine = Machine(weights, schedule_of(weights.dims, device, blocks), token, position, cache, order=0, faults=FAULTS)
    machine.run(tokens)
    return machine


def difftest_command(model: Any, *, whole: Dims, position: int, blocks: int, gpu: str, json_file: Path | None = None) -> int:
    """Compares and prints; with `gpu`, runs its schedule in the machine alone. Returns the exit
    code: 1 if a value breaks the accuracy rule.

    model: the layers to run. whole: of all layers, as `decided`.
    """
    device, fusion, console = Device.named(gpu) if gpu else None, Fusion(), plain_console(soft_wrap=False)
    with torch.inference_mode():
        try:
            length = -(-(position + TOKENS) // MAX_LEN) * MAX_LEN
            weights = Weights.of(read(model, fusion, length, lambda *progress: None))
            if device is not None:
                machine = scheduled(weights, device, position, TOKENS, blocks=blocks)
                return _print_schedule(Schedule(whole, machine.schedule.blocks, machine.schedule.config), machine, device, json_file)
            found = differences(weights, position, blocks=blocks, on_progress=lambda line: print(line, file=sys.stderr, flush=True))
        finally:
            fusion.undo()
    good = sum(d.accuracy.ok for d in found)
    if json_file:
        values = [{"name": d.name, "max_absolute": d.absolute, "mean_relative": d.relative} for d in found]
        for value, d in zip(values, found, strict=True):
            value |= {"rms_ratio": d.accuracy.rms_ratio, "worst_ratio": d.accuracy.worst_ratio}
        write_json(json_file, {"ok": good == len(found), "values": values})
    table = Table("value", box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for d in found:
        ratios = (f"{d.accuracy.rms_ratio:.2f}", f"{d.accuracy.worst_ratio:.2f}")
        table.add_row(d.name, f"{d.absolute:.3g}", f"{d.relative:.3g}", *ratios, style=None if d.accuracy.ok else "bold red")
    console.print(table)
    console.print(f"{len(found)} values, {good} within the noise band of {dtype_name(model.dtype)}")
    return int(good < len(found))


def _print_schedule(whole: Schedule, machine: Machine, device: Device, json_file: Path | None) -> int:
    """whole: of all layers. machine: has run some."""
    layers, plan = machine.schedule.dims.layers, {"blocks": whole.blocks, "tiles": whole.busiest(), "balance": whole.balance()}
    if json_file:
        write_json(json_file, {"gpu": device.name, **plan, "attending": whole.attending, "layers_run": layers, "tokens": machine.tokens})
    print(f"{device.name}: {whole.blocks} blocks, {whole.busiest()} tiles of the busiest, balance {whole.balance():.4f}")
    print(f"attention: blocks for each of {whole.dims.q_heads} query heads: {whole.split.out_parts}")
    print(f"run by the machine, {layers} of {whole.dims.layers} layers: no block waits in vain, no sum has a term twice; {machine.tokens}")
    return 0
