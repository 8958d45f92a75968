"""Times the engine beside transformers on the default sizes of a model type, with fewer layers.

    python benchmarks/families.py qwen3_next --layers 12 --batch 1,16 --json out.jsonl

transformers' default configs are those of published models: qwen3_next is Qwen3-Next-80B-A3B.
Weights are random. transformers takes the fastest kernels installed (flash-linear-attention
for linear attention); a row names the version that it found. --set changes more of the config.
"""

import argparse
import json
from pathlib import Path

import torch
from rich.console import Console

from tilewright.bench.ceilings import measure_ceilings
from tilewright.bench.report import append_jsonl, installed
from tilewright.engine.command import Measured, Sizes, collect, prompts_of, rows_of
from tilewright.engine.measure import run_transformers
from tilewright.models.load import Loaded, random_model

PACKAGES = ("flash-linear-attention", "causal-conv1d")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_type")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--batch", default="1,16", help="batch sizes, comma separated")
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--set", default="{}", help="fields of the config, as JSON")
    parser.add_argument("--mode", default="graph", help="of the engine")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, help="also append a row for each batch here")
    given = parser.parse_args()
    device = torch.device(given.device)
    config = {"model_type": given.model_type, "num_hidden_layers": given.layers, **json.loads(given.set)}
    loaded = Loaded(random_model(config, device=device, dtype=torch.bfloat16), None, f"{given.model_type} layers={given.layers}")
    read_gbs = measure_ceilings(device).read_gbs if device.type == "cuda" else None
    theirs = {name: installed(name) for name in PACKAGES}
    for batch in map(int, given.batch.split(",")):
        sizes = Sizes(batch, given.prompt_tokens, given.max_new_tokens)
        found = Measured.of(loaded, sizes, read_gbs, transformers_kernels=theirs)
        found.runs.append(run_transformers(loaded.model, "transformers eager", prompts_of(loaded.model, *sizes[:2]), sizes[2]))
        collect()
        found.run_modes(loaded.model, (given.mode,), None, Console(quiet=True))
        for row in rows_of(found):
            brief = {name: row[name] for name in ("case", "tokens_per_s", "tpot_ms", "floor_pct", "peers", "peer_tpot_ms", "equal_tokens")}
            print(json.dumps(brief | {"transformers_kernels": theirs}), flush=True)
            if given.json:
                append_jsonl(given.json, json.dumps(row))


if __name__ == "__main__":
    main()
