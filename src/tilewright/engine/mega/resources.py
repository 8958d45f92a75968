"""`tilewright compile mega`: what the compiler makes of the kernel for any GPU, none present."""

from pathlib import Path

import torch
from torch import Tensor

from ...compile.build import compile_launches
from ...compile.command import Lines, report
from ...compile.disassemble import require_tools
from ...compile.report import Row, archs_of
from ...launch import Device, Traced, traced
from ...launch.console import plain_console
from ...models.configs import CONFIGS
from .pack import Packed, Weights, dims_of_config, refuse
from .run import Clocks, Mega
from .shape import ROWS, Dims, Schedule, default_config, schedule_of

MAX_LEN = 16384
EXCHANGE_US = 5.0  # what an exchange between blocks adds to a layer, on an H200 with Llama-3.2-1B


def launch_of(dims: Dims, device: Device, *, small: bool = False) -> tuple[Schedule, Traced]:
    """The step's launch on a device, with nothing in memory. small: of e4m3 weights."""

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    config = default_config(device, dims.head_dim, small)
    schedule = schedule_of(dims, device, config=config)
    rope = meta(MAX_LEN, dims.head_dim // 2, dtype=torch.float32)
    head_norms = ((meta(dims.head_dim), meta(dims.head_dim)),) * dims.layers if dims.head_norms else ()
    norms = meta(2 * dims.layers + 1, dims.hidden)
    weights = Weights(dims, meta(dims.vocab, dims.hidden), norms, (), (), (), (), meta(1), rope, rope, 1e-5, 0.125, head_norms)
    cache = meta(dims.layers, dims.kv_heads, MAX_LEN, dims.head_dim)
    tiles = meta(schedule.size * ROWS * schedule.config.strips, 1, schedule.config.line, dtype=torch.int32)
    scales = meta(schedule.row_scales, dtype=torch.float32)
    with traced(device) as launches:
        Mega(weights, Clocks.at(0, 0, 16, torch.device("meta")), (cache, cache), config=config, packed=Packed(tiles, scales)).step()
    return schedule, launches[0]


def predicted_share(schedule: Schedule, device: Device) -> float:
    """Of the memory's rate: a prediction from the tiles of the busiest block, with its waits for
    others, and from what exchanges took on an H200.
    """
    floor_us = schedule.weight_bytes() / device.memory_gbs / 1e3
    step_us = floor_us * schedule.cost() / schedule.busiest() / schedule.balance()
    return floor_us / (step_us + 3 * schedule.dims.layers * EXCHANGE_US)


def compile_mega_command(*, arch: str = "", json_file: Path | None = None, jobs: int | None = None) -> int:
    """Compiles the step of every known model that it runs. Returns 1 if one spills or fails.

    arch: targets, comma separated; "" for all.
    """
    from transformers import AutoConfig

    require_tools()
    console, lines = plain_console(), Lines(plain_console(stderr=True))
    found: list[tuple[str, str, str, Traced]] = []
    for target in archs_of(arch):
        device = Device.for_arch(target)
        for name, fields in CONFIGS.items():
            config = AutoConfig.for_model(**fields)
            try:
                refuse(config, device, torch.bfloat16)
            except ValueError as error:
                console.print(f"{name} on {device.name}: not run ({error})")
                continue
            s, launch = launch_of(dims_of_config(config), device)
            text = f"{s.blocks} of {device.sms} blocks, {s.busiest()} tiles of the busiest, balance {s.balance():.3f}"
            text += f", predicted {100 * predicted_share(s, device):.0f} % of the memory's rate"
            found.append((target, text, f"{name} on {device.name}", launch))
    made = compile_launches(
        [(launch, target) for target, _, _, launch in found], jobs=jobs, on_done=lambda done, all_: lines.say(f"compiled {done} of {all_}")
    )
    rows = [
        Row("mega", target, launch.launch.name, text, model, 1, True, compiled)
        for (target, text, model, launch), compiled in zip(found, made, strict=True)
    ]
    return report(console, rows, json_file)
