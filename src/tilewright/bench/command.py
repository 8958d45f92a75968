"""`tilewright bench`: one line a case, then the geometric means; JSON lines to a file."""

import dataclasses
import json
from pathlib import Path

import torch
from rich.console import Console

from .. import ops
from ..testing import op_name
from ..testing.cases import cases
from .ceilings import measure_ceilings
from .measure import measure_case
from .report import Row, append_jsonl, case_name, summary, versions


def bench_command(
    names: list[str] | None = None,
    *,
    json_file: Path | None = None,
    case: str = "",
    peers: bool = True,
    device: str = "cuda",
) -> int:
    """Benchmarks ops (all by default) on a GPU. Returns the exit code: 1 when an answer was wrong, 2 without a GPU.

    case: only cases whose name contains this text. json_file: appended to as each case is measured.
    """
    console = Console(soft_wrap=True, highlight=False)
    chosen = ops.named(names)
    if not torch.cuda.is_available():
        console.print(
            "bench needs a CUDA GPU: times of the interpreter say nothing about a kernel. `tilewright compile` reports resources without one."
        )
        return 2
    where = torch.device(device)
    if where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.set_device(where)
    ceilings = measure_ceilings(where)
    console.print(f"{torch.cuda.get_device_name(where)} | {' '.join(f'{k} {v}' for k, v in versions().items())}")
    console.print(
        f"ceilings: copy {ceilings.copy_gbs:.0f} GB/s, read {ceilings.read_gbs:.0f} GB/s, "
        f"bf16 matmul {ceilings.tflops:.0f} TFLOP/s, launch {ceilings.launch_us:.2f} us"
    )
    rows: list[Row] = []
    wrong = 0
    with torch.inference_mode():
        for op in chosen:
            for problem in cases(op, "bench"):
                if case not in f"{op_name(op)} {case_name(problem)}":
                    continue
                try:
                    row = measure_case(op, problem, where, ceilings, with_peers=peers)
                except AssertionError as error:
                    console.print(f"{op_name(op)} {case_name(problem)} | WRONG, not timed: {error}", style="red")
                    wrong += 1
                    continue
                console.print(row.line())
                rows.append(row)
                if json_file:
                    append_jsonl(json_file, [row])
                torch.cuda.empty_cache()
    for line in summary(rows):
        console.print(line)
    console.print(json.dumps({"cases": len(rows), "wrong": wrong, "ceilings": dataclasses.asdict(ceilings)}))
    return 1 if wrong else 0
