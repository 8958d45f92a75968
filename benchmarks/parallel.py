"""A decode step on one GPU, and on several with either kind of sum, in one set of processes.

    python benchmarks/parallel.py Qwen2-7B:16 Llama-3.1-8B:1 [--ranks 2] [--json F]

Models have random weights; the number behind the colon is the batch. Engines capture their steps.
Prints a row for each form: `one` GPU, `direct` sums (engine/peers.py), `nccl`. Terms are rounded
before they are added, so tokens are those of one GPU up to near ties; the forms of several GPUs add
the same terms.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tilewright.bench.report import tell
from tilewright.engine import Engine, Group
from tilewright.engine.ranks import run_ranks
from tilewright.launch import Device
from tilewright.models import load

PROMPT, ROUNDS = 32, 3


def timed(engine: Engine, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
    """The median of rounds of a step's median, us; and the tokens."""
    engine.generate(prompts, tokens)
    found = [engine.generate(prompts, tokens) for _ in range(ROUNDS)]
    return statistics.median(statistics.median(each.step_s) * 1e6 for each in found), found[-1].tokens


def measure(group: Group, device: torch.device, jobs: list[tuple[str, int]], tokens: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, batch in jobs:
        generator = torch.Generator().manual_seed(1)
        prompts = [torch.randint(0, 30000, (PROMPT,), generator=generator).tolist() for _ in range(batch)]
        how: dict[str, Any] = {"max_batch": batch, "max_len": PROMPT + tokens, "mode": "graph"}
        step_us, chosen = {}, {}
        if group.shard.rank == 0:
            with Engine(load(name, device=device, dtype=torch.bfloat16).model, **how) as engine:
                step_us["one"], chosen["one"] = timed(engine, prompts, tokens)
            torch.cuda.empty_cache()
        part = load(name, device=device, dtype=torch.bfloat16, shard=group.shard).model
        for form, direct in (("direct", True), ("nccl", False)):
            dist.barrier(group.process_group)
            with Engine(part, **how, group=Group(group.process_group, direct)) as engine:
                step_us[form], chosen[form] = timed(engine, prompts, tokens)
        del part
        torch.cuda.empty_cache()
        if group.shard.rank == 0:
            equal = sum(a == b for x, y in zip(chosen["direct"], chosen["nccl"], strict=True) for a, b in zip(x, y, strict=True))
            case = f"{name} batch={batch} tp={group.shard.ranks}"
            speedup = {form: step_us["one"] / step_us[form] for form in ("direct", "nccl")}
            gpu = Device.of(torch.empty(0, device=device)).name
            rows.append({"op": "parallel", "case": case, "gpu": gpu, "step_us": step_us, "speedup": speedup, "equal_tokens": [equal, batch * tokens]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="+", metavar="MODEL:BATCH")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=50)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    jobs = [(name, int(batch)) for name, batch in (job.rsplit(":", 1) for job in given.jobs)]
    for row in run_ranks(measure, jobs, given.tokens, ranks=given.ranks, direct=True):
        tell(row, given.json)


if __name__ == "__main__":
    main()
