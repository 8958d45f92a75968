"""Host time of eager calls: what a call costs before its first kernel is on the stream.

    python benchmarks/host_time.py                         # this tree
    python benchmarks/host_time.py --against ../other/src  # and another one, in turns
    python benchmarks/host_time.py --json out.jsonl

On a CPU the launch itself is left out: checks, decision and allocation remain. On a GPU it is the
real launch. Each number is the least of the rounds, in microseconds a call. The GPU's time does not
count, because its queue is emptied between rounds of 100 calls.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROUNDS, CALLS = 30, 100


def calls(device: str) -> dict[str, Callable[[], Any]]:
    """Small calls, as a decode step makes them: their kernels take less than the host."""
    import tilewright as tw

    def tensor(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    x, weight, square, both = tensor(4, 4096), tensor(4096), tensor(4096, 4096), tensor(4, 8192)
    q, k, v = tensor(1, 32, 128, 128), tensor(1, 8, 128, 128), tensor(1, 8, 128, 128)
    token, keys, values = tensor(4, 32, 1, 128), tensor(4, 8, 1024, 128), tensor(4, 8, 1024, 128)
    lengths = torch.full((4,), 1000, dtype=torch.int32, device=device)
    cos, sin = tensor(1, 128, 64, dtype=torch.float32), tensor(1, 128, 64, dtype=torch.float32)
    return {
        "rms_norm": lambda: tw.rms_norm(x, weight),
        "rms_norm, residual": lambda: tw.rms_norm(x, weight, residual=x),
        "silu_mul": lambda: tw.silu_mul(both),
        "softmax": lambda: tw.softmax(x),
        "matmul": lambda: tw.matmul(x, square),
        "rope": lambda: tw.rope(q, k, cos, sin),
        "attention": lambda: tw.attention(q, k, v),
        "attention_decode": lambda: tw.attention_decode(token, keys, values, lengths),
    }


def measure() -> dict[str, float]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        from tilewright.interpret import run

        run.execute = lambda kernel, grid, args: None  # nothing to wait for: `Bound.run` takes it anew each time
    torch.set_num_threads(1)
    found: dict[str, float] = {}
    with torch.no_grad():
        for name, call in calls(device).items():
            call()
            least = float("inf")
            for _ in range(ROUNDS):
                if device == "cuda":
                    torch.cuda.synchronize()
                begin = time.perf_counter()
                for _ in range(CALLS):
                    call()
                least = min(least, time.perf_counter() - begin)
            found[name] = round(least / CALLS * 1e6, 2)
    return found


def of_tree(source: Path) -> dict[str, float]:
    """`measure` in a process of its own, with another tree's `tilewright`."""
    environment = {**os.environ, "PYTHONPATH": str(source)}
    printed = subprocess.run([sys.executable, __file__, "--measure"], env=environment, check=True, capture_output=True, text=True).stdout
    measured: dict[str, float] = json.loads(printed)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="src of another checkout")
    parser.add_argument("--json", type=Path, help="a file that the row is appended to")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        print(json.dumps(measure()))
        return
    trees = {"this tree": Path(__file__).resolve().parent.parent / "src"}
    if given.against is not None:
        if not (given.against / "tilewright").is_dir():
            parser.error(f"--against must be a folder with the package tilewright, got {given.against}")
        trees["the other"] = given.against.resolve()
    least: dict[str, dict[str, float]] = {}
    for _ in range(3):
        for tree, source in trees.items():
            found = of_tree(source)
            least[tree] = {name: min(us, least.get(tree, found)[name]) for name, us in found.items()}
    print(f"{'us a call':20}", *(f"{tree:>10}" for tree in trees))
    for name in least["this tree"]:
        print(f"{name:20}", *(f"{least[tree][name]:10.1f}" for tree in trees))
    if given.json is not None:
        from tilewright.bench.report import tell  # here: what is measured runs this file with another tree's package

        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, launches left out"
        tell({"op": "host_time", "unit": "us", "gpu": device, **least}, given.json)


if __name__ == "__main__":
    main()
