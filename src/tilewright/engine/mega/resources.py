"""`tilewright compile mega`: what the compiler makes of the kernel for any GPU, none present."""

from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from ...compile.build import compile_launches
from ...compile.command import Lines
from ...compile.disassemble import require_tools
from ...compile.report import ARCHS
from ...launch import Device, Traced, argument_error, traced
from ...launch.files import write_json
from ...models.configs import CONFIGS
from .pack import Weights, dims_of_config, refuse
from .run import Clocks, Mega
from .shape import ROWS, Dims, Schedule, default_blocks, default_config

MAX_LEN = 16384
EXCHANGE_US = 5.0  # what an exchange between blocks adds to a layer: an H200's, Llama-3.2-1B


def launch_of(dims: Dims, device: Device) -> tuple[Schedule, Traced]:
    """The step's launch on a device, with nothing in memory."""

    def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    config = default_config(device, dims.head_dim)
    schedule = Schedule(dims, default_blocks(dims, device, config), config)
    rope = meta(MAX_LEN, dims.head_dim // 2, dtype=torch.float32)
    head_norms = ((meta(dims.head_dim), meta(dims.head_dim)),) * dims.layers if dims.head_norms else ()
    norms = meta(2 * dims.layers + 1, dims.hidden)
    weights = Weights(dims, meta(dims.vocab, dims.hidden), norms, (), (), (), (), meta(1), rope, rope, 1e-5, 0.125, head_norms)
    integers = torch.int64
    clocks = Clocks(meta(16, dtype=integers), meta(2, 16, dtype=torch.int32), meta(16, 16, dtype=integers), meta(2, dtype=integers))
    cache = meta(dims.layers, dims.kv_heads, MAX_LEN, dims.head_dim)
    tiles = meta(schedule.size * ROWS * config.strips, 1, config.line, dtype=torch.int32)
    with traced(device) as launches:
        Mega(weights, clocks, (cache, cache), tiles=tiles, blocks=schedule.blocks, config=config).step()
    return schedule, launches[0]


def predicted_share(schedule: Schedule, device: Device) -> float:
    """Of the memory's rate: a prediction from what the busiest block has, with its waits for
    others, and from what exchanges took on an H200.
    """
    d = schedule.dims
    size = 2 * (d.layers * (schedule.qkv_rows + d.q_heads * d.head_dim + 3 * d.inter) + d.vocab) * d.hidden
    floor_us = size / device.memory_gbs / 1e3
    return floor_us / (floor_us * schedule.cost() * schedule.blocks / schedule.needed() + 3 * d.layers * EXCHANGE_US)


def compile_mega_command(*, arch: str = "", json_file: Path | None = None, jobs: int | None = None) -> int:
    """Compiles the step of every known model that it runs. Returns 1 if one spills or fails.

    arch: targets, comma separated; "" for all.
    """
    from transformers import AutoConfig

    require_tools()
    console = Console(highlight=False, soft_wrap=True)
    found: list[tuple[dict[str, Any], Traced, str]] = []
    for target in [name.strip() for name in arch.split(",") if name.strip()] or ARCHS:
        device = Device.for_arch(target)
        if device.is_cpu:
            raise argument_error("arch", "a GPU target such as sm_90", repr(target))
        for name, fields in CONFIGS.items():
            config = AutoConfig.for_model(**fields)
            try:
                refuse(config, device, torch.bfloat16)
            except ValueError as error:
                console.print(f"{name} on {device.name}: not run ({error})")
                continue
            schedule, launch = launch_of(dims_of_config(config), device)
            plan: dict[str, Any] = {"model": name, "arch": target, "gpu": device.name, "sms": device.sms, "blocks": schedule.blocks}
            plan |= {"tiles": schedule.busiest(), "balance": round(schedule.balance(), 4)}
            plan["predicted_share"] = round(predicted_share(schedule, device), 3)
            found.append((plan, launch, target))
    lines = Lines(Console(stderr=True))
    results = compile_launches(
        [(launch, target) for _, launch, target in found], jobs=jobs, on_done=lambda done, all_: lines.say(f"compiled {done} of {all_}")
    )
    rows, good = [], bool(found)
    for (plan, *_), made in zip(found, results, strict=True):
        used = made.resources
        resources = None if used is None else {"registers": used.registers, "stack_bytes": used.stack_bytes, "shared_bytes": used.shared_bytes}
        good &= made.ok
        rows.append(plan | {"resources": resources, "spills": used is not None and used.spills, "error": made.error})
        told = made.error if used is None else f"{used.registers} registers, {used.stack_bytes} bytes of stack, {used.shared_bytes} of shared memory"
        console.print(
            f"{plan['model']} on {plan['gpu']} ({plan['arch']}): {plan['blocks']} blocks of {plan['sms']}, {plan['tiles']} tiles of the busiest, "
            f"balance {plan['balance']:.3f}; {told}{'; SPILLS' if used is not None and used.spills else ''}; "
            f"predicted {100 * plan['predicted_share']:.0f} % of the memory's rate"
        )
    if json_file:
        write_json(json_file, {"rows": rows})
    return int(not good)
