"""Times an engine from loaded weights to its second token, with a cold and a warm compile cache.

    python benchmarks/start.py Llama-3.1-8B --json out.jsonl

Each runs in its own process. The time includes fusing the weights, compiling, capturing the graph,
the prompt and the first step. It does not include Python's imports and making the weights.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tilewright.bench.report import tell
from tilewright.engine import Engine
from tilewright.engine.command import prompts_of
from tilewright.launch import Device
from tilewright.models import load


def started(name: str, batch: int, prompt_tokens: int) -> dict[str, Any]:
    """The times of one process."""
    device = torch.device("cuda", torch.cuda.current_device())
    begin = time.perf_counter()
    model = load(name, device=device, dtype=torch.bfloat16).model
    torch.cuda.synchronize()
    loaded = time.perf_counter()
    with Engine(model, max_batch=batch, max_len=2048, mode="graph") as engine:
        engine.generate(prompts_of(model, batch, prompt_tokens), 2)
        torch.cuda.synchronize()
        start_s = time.perf_counter() - loaded
    return {"gpu": Device.of(next(model.parameters())).name, "load_s": round(loaded - begin, 2), "start_s": round(start_s, 2)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder, a .gguf file, or a config's name (random weights)")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--json", type=Path, help="also append the rows here")
    parser.add_argument("--one", action="store_true", help="only this process, with the cache as it is")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(started(given.model, given.batch, given.prompt_tokens)))
        return 0
    same = [sys.executable, __file__, given.model, "--batch", str(given.batch), "--prompt-tokens", str(given.prompt_tokens), "--one"]
    with tempfile.TemporaryDirectory() as folder:
        for cache in ("cold", "warm"):
            env = os.environ | {"CUDA_TILE_CACHE_DIR": folder}
            done = subprocess.run(same, env=env, stdout=subprocess.PIPE, text=True, check=True)
            case = f"{Path(given.model).name} batch={given.batch} prompt={given.prompt_tokens} cache={cache}"
            tell({"op": "start", "case": case, "dtype": "bfloat16", **json.loads(done.stdout.splitlines()[-1])}, given.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
