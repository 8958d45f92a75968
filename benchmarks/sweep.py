"""Times every config of an op's space on the GPU at hand, to find what `space()` should put first.

    python benchmarks/sweep.py matmul --case "m=4096" --kind bench --json out.jsonl --seconds 200

Compiles in parallel first (cuTile's own cubin cache is shared by the processes), drops configs that spill, times the rest coarsely, then the best
few beside the default and the peers, interleaved. A config whose answer is wrong is named and dropped.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

os.environ.setdefault("CUDA_TILE_CACHE_DIR", str(Path(tempfile.gettempdir()) / "tilewright-sweep-cache"))

import torch

from tilewright import ops
from tilewright.bench.ceilings import measure_ceilings
from tilewright.bench.peers import peers_of
from tilewright.bench.report import case_name
from tilewright.bench.timer import input_sets, time_interleaved
from tilewright.compile.disassemble import disassemble
from tilewright.compile.signature import kernel_signature
from tilewright.launch import Device, traced
from tilewright.testing import check_op, op_name, run_op
from tilewright.testing.cases import cases


def precompile(op_index: int, kind: str, case_index: int, config_index: int, device: Device) -> tuple[int, int, bool, str]:
    """In a worker: compiles what one config launches; returns whether it is free of spills."""
    from cuda.tile.compilation import export_kernel

    op = ops.ALL[op_index]
    problem = cases(op, kind)[case_index]
    config = op.space(problem, device)[config_index]
    try:
        with traced(device) as launches, torch.inference_mode():
            run_op(op, problem.inputs(torch.device("meta")), config)
        clean = True
        for launch in launches:
            cubin = io.BytesIO()
            signature = kernel_signature(launch.plan.kernel, launch.args + launch.plan.constants)
            export_kernel(launch.plan.hinted_kernel, [signature], cubin, gpu_code=device.arch, output_format="cubin")
            with contextlib.suppress(RuntimeError):  # an older disassembler than the compiler: let the clock decide
                clean = clean and not disassemble(cubin.getvalue()).spills
        return case_index, config_index, clean, "" if clean else "spills"
    except Exception as error:  # a worker reports, the parent prints: one bad config must not end the sweep
        return case_index, config_index, False, f"{type(error).__name__}: {error}".splitlines()[0][:160]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ops", nargs="*")
    parser.add_argument("--case", default="", help="only cases whose name contains one of these, separated by |")
    parser.add_argument("--kind", default="bench")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop starting new cases after this long")
    parser.add_argument("--top", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--without", nargs="*", default=["torch.compile"], help="peers left out, for their compile time")
    parser.add_argument("--no-check", action="store_true")
    args = parser.parse_args()
    began = time.perf_counter()
    where = torch.device("cuda", 0)
    device = Device.of(torch.empty(0, device=where))
    chosen = []
    for op in ops.named(args.ops):
        for index, problem in enumerate(cases(op, args.kind)):
            if any(part in case_name(problem) for part in args.case.split("|")):
                chosen.append((op, index, problem))
    jobs = [(ops.ALL.index(op), args.kind, i, c, device) for op, i, p in chosen for c in range(len(op.space(p, device)))]
    clean: dict[tuple[int, int, int], tuple[bool, str]] = {}
    if args.jobs > 0:
        with ProcessPoolExecutor(args.jobs) as pool:
            for job, result in zip(jobs, pool.map(precompile, *zip(*jobs, strict=True)), strict=True):
                clean[job[0], job[2], job[3]] = result[2:]
        print(f"compiled {len(jobs)} configs in {time.perf_counter() - began:.0f} s, {sum(not ok for ok, _ in clean.values())} dropped", flush=True)
    ceilings = measure_ceilings(where)
    print(ceilings, flush=True)
    for op, index, problem in chosen:
        if time.perf_counter() - began > args.seconds:
            print("out of time", flush=True)
            break
        with torch.inference_mode():
            sweep_case(op, index, problem, where, device, ceilings, clean, args)
        torch.cuda.empty_cache()
    return 0


def sweep_case(op, index, problem, where, device, ceilings, clean, args) -> None:
    name = f"{op_name(op)} {case_name(problem)}"
    space = op.space(problem, device)
    op_index = ops.ALL.index(op)
    sets = input_sets(lambda: problem.inputs(where), problem.cost().size_bytes, device.l2_bytes, limit_bytes=8 << 30)
    times: dict[int, float] = {}
    dropped = []
    for i, config in enumerate(space):
        ok, why = clean.get((op_index, index, i), (True, ""))
        if not ok:
            dropped.append(f"{config}: {why}")
            continue
        try:
            call = {"x": lambda c=config, **kw: run_op(op, kw, c)}
            times[i] = time_interleaved(call, sets, rounds=3)["x"].time_us
        except Exception as error:
            dropped.append(f"{config}: {type(error).__name__} {str(error)[:100]}")
            torch.cuda.synchronize()
    ranked = sorted(times, key=lambda i: times[i])
    final = list(dict.fromkeys([*ranked[: args.top], 0]))
    contenders = {str(i): (lambda c: lambda **kw: run_op(op, kw, c))(space[i]) for i in final if i in times}
    inputs = problem.inputs(where)
    contenders |= {peer.name: peer.call for peer in peers_of(op_name(op), inputs) if peer.name not in args.without}
    result = time_interleaved(contenders, sets, rounds=7)
    peers = {name: t.time_us for name, t in result.items() if not name.isdigit()}
    best_peer = min(peers.values()) if peers else float("nan")
    mine = {int(name): t.time_us for name, t in result.items() if name.isdigit()}
    cost = problem.cost()
    print(f"## {name} | peers {' '.join(f'{n} {t:.1f}' for n, t in peers.items())} us", flush=True)
    for i in sorted(mine, key=lambda i: mine[i]):
        verdict = ""
        if not args.no_check and i == min(mine, key=lambda i: mine[i]):
            try:
                found = check_op(op, problem, where, space[i])
                verdict = f"rms {max(a.rms_ratio for a in found):.2f} worst {max(a.worst_ratio for a in found):.2f}"
            except AssertionError as error:
                verdict = f"WRONG {str(error)[:200]}"
        t = mine[i]
        print(
            f"  {t:9.1f} us {cost.size_bytes / t / 1e3:6.0f} GB/s {cost.flops / t / 1e6:6.1f} TF {best_peer / t:5.2f}x "
            f"{'DEFAULT ' if i == 0 else ''}#{i} {space[i]} {verdict}",
            flush=True,
        )
    for line in dropped[:3]:
        print("  dropped", line, flush=True)
    if args.json:
        row = {
            "op": op_name(op), "case": case_name(problem), "peers_us": peers, "final_us": {str(space[i]): t for i, t in mine.items()},
            "all_us": {str(space[i]): round(t, 2) for i, t in times.items()}, "dropped": dropped, "default": str(space[0]),
            "ceilings": dataclasses.asdict(ceilings),
        }  # fmt: skip
        with args.json.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    sys.exit(main())
