"""The tuner against its bars, on the GPU at hand.

    python benchmarks/tuner.py cold                            # 72 configs of a GEMM, no cache
    python benchmarks/tuner.py exhaustive --seconds 200        # 30 problems, every config
    python benchmarks/tuner.py exhaustive matmul --problems 5  # problems of some ops

`cold` times from the driver's start to a stored row. `exhaustive` compares the tuner's choice with
every config of the space that compiles, on sampled problems. Both work in an empty folder of their
own, so neither cuTile's cache nor earlier rows help. Exits with 1 if a bar is missed.
"""

import argparse
import atexit
import itertools
import math
import os
import random
import shutil
import sys
import tempfile
import time
from statistics import geometric_mean

os.environ["TILEWRIGHT_CACHE_DIR"] = tempfile.mkdtemp(prefix="tilewright-tuner-")
os.environ["CUDA_TILE_CACHE_DIR"] = os.environ["TILEWRIGHT_CACHE_DIR"] + "/cutile"

import torch

from tilewright import ops
from tilewright.bench.report import case_name
from tilewright.ops import matmul
from tilewright.testing import call_space, op_name
from tilewright.testing.cases import cases
from tilewright.tune.search import search
from tilewright.tune.store import Store
from tilewright.tune.workbench import Gpu

COLD_S, OFF = 15.0, 1.02
RACES = 3  # of the choice against the best, each captured anew
CLOSE = 1.5  # of the best rough time: within it a config is raced for the exhaustive best; a rough time tells 5 %


def cold_space() -> list[matmul.Config]:
    """72 configs: tiles, latency hints, warps and bands of tiles; some spill or do not fit."""
    tiles = ((128, 128, 64), (128, 256, 64), (256, 128, 64), (256, 256, 64), (128, 128, 128), (64, 256, 64))
    return [
        matmul.Config(m, n, k, group=group, latency=latency, num_ctas=2 if m * n == 256 * 256 else 1, num_worker_warps=warps)
        for (m, n, k), latency, warps, group in itertools.product(tiles, (2, 4, 5), (4, 8), (8, 16))
    ]


def cold(jobs: int | None) -> bool:
    """Compile, drop, time, race, check and store 72 configs of bf16 4096^3."""
    space, problem = cold_space(), matmul.Problem(4096, 4096, 4096, torch.bfloat16)
    began = time.perf_counter()
    with Gpu(torch.device("cuda", 0), jobs=jobs) as bench:
        ready = time.perf_counter()
        found = search(matmul, problem, bench, configs=space)
        Store().add([found.row])
    took, ready = time.perf_counter() - began, ready - began
    print(f"{len(space)} configs, {len(found.dropped)} dropped: {took:.1f} s from the start of driver and compilers (the driver's {ready:.1f})")
    for config, us in found.times[:3]:
        print(f"  {us:8.1f} us {problem.cost().flops / us / 1e6:6.1f} TFLOP/s {config}")
    print(f"bar: {COLD_S:g} s")
    return took <= COLD_S


def exhaustive(names: list[str], count: int, seconds: float, seed: int, jobs: int | None) -> bool:
    """Compares the tuner's choice with the fastest config that compiles, spilling ones included, in
    one last interleaved race.
    """
    chosen = ops.named(names or None)
    tasks = [(op, problem) for op in chosen for problem in cases(op, "bench")]
    sample = random.Random(seed).sample(tasks, min(count, len(tasks)))
    ratios: list[float] = []
    began = time.perf_counter()
    with Gpu(torch.device("cuda", 0), jobs=jobs) as bench:
        sample = [(op, problem) for op, problem in sample if call_space(op, problem, bench.device)]
        for i, (op, problem) in enumerate(sample):
            if time.perf_counter() - began > seconds:
                print(f"out of time, {len(sample) - i} problems left")
                break
            for ahead in sample[i + 1 : i + 2] if i else sample[:2]:
                bench.prepare(*ahead, call_space(*ahead, bench.device))
            try:
                found = search(op, problem, bench)
            except RuntimeError as error:
                print(error)
                continue
            ratio, best = off(op, problem, found.times[0][0], bench)
            ratios.append(ratio)
            print(f"{ratio:6.3f}  {op_name(op)} {case_name(problem)} | {found.times[0][0]}" + (f" | best {best}" if ratio > 1.0 else ""), flush=True)
    if not ratios:
        return False
    within = sum(ratio <= OFF for ratio in ratios)
    print(f"{within} of {len(ratios)} within {OFF:g} of the exhaustive best; geomean {geometric_mean(ratios):.4f}, worst {max(ratios):.3f}")
    return within == len(ratios)


def off(op, problem, choice, bench) -> tuple[float, object]:
    """The time of the choice over that of the best, and the best."""
    rough = {}
    with bench.clock(op, problem) as clock:
        for config in call_space(op, problem, bench.device):
            try:
                rough[config] = clock.rough(config, 10 * min(rough.values(), default=math.inf))
            except Exception as error:  # does not compile or launch: no candidate
                print(f"        {config}: {type(error).__name__}")
        near = [config for config in rough if rough[config] <= CLOSE * min(rough.values())]
        times = dict(zip(near, clock.race(near), strict=True))
        best = min(times, key=lambda config: times[config].time_us)
        if best == choice:
            return 1.0, best
        races = [clock.race([choice, best]) for _ in range(RACES)]
    return geometric_mean([ours.time_us / theirs.time_us for ours, theirs in races]), best


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bar", choices=("cold", "exhaustive"))
    parser.add_argument("ops", nargs="*")
    parser.add_argument("--problems", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no problem after as many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int)
    args = parser.parse_args(words)
    atexit.register(shutil.rmtree, os.environ["TILEWRIGHT_CACHE_DIR"], ignore_errors=True)
    held = cold(args.jobs) if args.bar == "cold" else exhaustive(args.ops, args.problems, args.seconds, args.seed, args.jobs)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
