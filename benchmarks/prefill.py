"""Times one long prompt in the engine, beside transformers eager and compiled, in turn.

    python benchmarks/prefill.py Llama-3.1-8B --prompt-tokens 8192 --json out.jsonl

Each goes from token ids to the next token, on the host. transformers keeps no cache and computes
only the last token's logits: the least that it can do. The engine has a model of its own, because
it rearranges the weights. Seconds are the median of `--rounds` rounds. The distance is the
Kullback-Leibler divergence of that token's distribution from the one with fp32 weights.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from tilewright.bench.meter import meter_of
from tilewright.bench.report import tell
from tilewright.engine import Engine
from tilewright.engine.command import divergence, in_float32, prompts_of
from tilewright.engine.measure import profiled
from tilewright.launch import Device
from tilewright.models import DTYPES, load


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder, a .gguf file, or a config's name (random weights)")
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--json", type=Path, help="also append the row here")
    given = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    model, mine = (load(given.model, device=device, dtype=DTYPES[given.dtype]).model for _ in range(2))
    ids = prompts_of(model, 1, given.prompt_tokens)
    prompt = ids.tolist()
    compiled = torch.compile(model, dynamic=False)

    def forward(of: Callable[..., object]) -> Tensor:
        return of(ids, use_cache=False, logits_to_keep=1).logits[:, -1]  # type: ignore[attr-defined]

    start = time.perf_counter()
    with torch.inference_mode():
        logits = {"transformers": forward(model), "torch.compile": forward(compiled)}
        print(f"torch.compile: {time.perf_counter() - start:.1f} s", flush=True)
        with in_float32(model):
            truth = forward(model)
        with Engine(mine, max_batch=1, max_len=given.prompt_tokens + 16, mode="graph", prefill_tokens=given.prompt_tokens) as ours:
            start = time.perf_counter()
            ours.warm_up(1, given.prompt_tokens)
            start_s = time.perf_counter() - start
            logits["tilewright"] = ours.logits(prompt)[:, 0]
            ways: dict[str, Callable[[], int]] = {
                "transformers": lambda: int(forward(model).argmax()),
                "torch.compile": lambda: int(forward(compiled).argmax()),
                "tilewright": lambda: ours.generate(prompt, 1).tokens[0][0],
            }
            seconds: dict[str, list[float]] = {name: [] for name in ways}
            with meter_of(f"GPU-{torch.cuda.get_device_properties(device).uuid}") as meter, meter.watching() as said:
                for turn in range(given.rounds + 1):
                    for name, way in ways.items():
                        torch.cuda.synchronize()
                        start = time.perf_counter()
                        way()
                        if turn:  # the first one warms up
                            seconds[name].append(time.perf_counter() - start)
            kernels = {name: profiled(way) for name, way in ways.items()}
    times = {name: statistics.median(found) for name, found in seconds.items()}
    row = {
        "op": "prefill",
        "case": f"{Path(given.model).name} prompt={given.prompt_tokens}",
        "dtype": given.dtype,
        "gpu": Device.of(next(model.parameters())).name,
        "time_us": round(times["tilewright"] * 1e6, 1),
        "tokens_per_s": round(given.prompt_tokens / times["tilewright"], 1),
        "start_s": round(start_s, 2),
        "peers": {name: round(times[name] / times["tilewright"], 4) for name in ways if name != "tilewright"},
        "peer_time_us": {name: round(times[name] * 1e6, 1) for name in ways if name != "tilewright"},
        "kl": {name: float(divergence(truth, found).max()) for name, found in logits.items()},
        "kernels": {name: [dataclasses.asdict(k) for k in found[:12]] for name, found in kernels.items()},
        "clocks": said[0],
    }
    tell(row, given.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
