"""`tilewright verify`: the accuracy rule on every op and config, on the device at hand."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from rich.console import Console

from .. import ops
from ..launch import Device, chosen_device
from ..launch.console import plain_console
from ..launch.files import write_json
from .cases import cases
from .check import check_op, op_name
from .quantised import quantised_distances


def verify_command(names: list[str] | None = None, *, quick: bool = False, json_file: Path | None = None, device: str = "") -> int:
    """Checks ops (all by default), one line each with the worst ratio to the bound.

    Small odd shapes run with every config of the space, real model shapes with the default. A CPU
    runs only the small ones. Returns the exit code: 1 if any config is wrong.
    quick: defaults only. device: "cuda", "cpu"; by default a GPU if there is one.
    """
    console = plain_console()
    where, chosen = chosen_device(device), ops.named(names)
    here = Device.of(torch.empty(0, device=where))
    console.print(f"verify on {here.name} ({here.arch}): RMS and worst element as a share of what the accuracy rule allows")
    lines: list[dict[str, Any]] = []
    try:
        _each_op(chosen, where, quick, console, lines)
    finally:  # Ctrl-C keeps the ops that are done
        if json_file:
            write_json(json_file, {"device": here.name, "ops": lines})
    distances: dict[str, float] = {}
    if here.has_fp8 and any(line["op"] == "quantize_fp8" for line in lines):
        with torch.inference_mode():
            distances = quantised_distances(where)
        parts = " ".join(f"{name} {value:.1e}" for name, value in distances.items())
        console.print(f"fp8 products against those of the operands before quantising, calc_diff by kind of scales: {parts}")
        if json_file:
            write_json(json_file, {"device": here.name, "ops": lines, "calc_diff": distances})
    return 1 if any(line["failures"] for line in lines) else 0


def _each_op(chosen: Sequence[ModuleType], where: torch.device, quick: bool, console: Console, lines: list[dict[str, Any]]) -> None:
    here = Device.of(torch.empty(0, device=where))
    for op in chosen:
        start, runs, worst, failures = time.perf_counter(), 0, (0.0, 0.0), []
        for problem, config in _runs(op, here, quick):
            runs += 1
            try:
                with torch.inference_mode():
                    found = check_op(op, problem, where, config)
            except AssertionError as error:
                failures.append(str(error))
                continue
            worst = max(worst[0], *(a.rms_ratio for a in found)), max(worst[1], *(a.worst_ratio for a in found))
        seconds = time.perf_counter() - start
        verdict = f"FAIL {len(failures)} of {runs}" if failures else "pass"
        console.print(f"{op_name(op):<18} {verdict:<14} {runs:4d} runs | rms {worst[0]:.2f} worst {worst[1]:.2f} | {seconds:.1f} s")
        for failure in failures[:5]:
            console.print(f"    {failure}", style="red")
        lines.append({"op": op_name(op), "runs": runs, "failures": failures, "rms_ratio": worst[0], "worst_ratio": worst[1]})


def _runs(op: ModuleType, here: Device, quick: bool) -> Iterator[tuple[Any, Any]]:
    """Problems, each with a config to force or None."""
    for problem in cases(op, "small"):
        yield problem, None
        if not quick:
            for config in op.space(problem, here)[1:]:
                yield problem, config
    if not here.is_cpu:
        for problem in cases(op, "real"):
            yield problem, None
