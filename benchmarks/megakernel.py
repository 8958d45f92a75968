"""Times the megakernel's step on the GPU at hand, for one or several configs; or runs it for long.

    python benchmarks/megakernel.py Llama-3.2-1B
    python benchmarks/megakernel.py Llama-3.2-1B parts=2 span=128,tokens=1 --position 8192
    python benchmarks/megakernel.py Llama-3.1-8B --weights e4m3 --json results.jsonl
    python benchmarks/megakernel.py Llama-3.2-1B --soak 100000

A config names the fields that differ from the default; also blocks, and tokens, those of one launch
(8). Weights are random, and the steps start at --position. --soak: writes so many tokens, in rounds
of 1000 from the same start, while another CUDA stream multiplies matrices now and then; all rounds
must write the same tokens.
"""

import argparse
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoConfig

from tilewright.bench.ceilings import measure_ceilings
from tilewright.bench.report import tell
from tilewright.engine.mega import Dims
from tilewright.engine.mega.pack import CODES, MODEL_TYPES, Weights, dims_of_config
from tilewright.engine.mega.run import Clocks, Mega
from tilewright.engine.mega.shape import default_config
from tilewright.engine.weights import SmallMatrix
from tilewright.launch import Device
from tilewright.models.configs import CONFIGS
from tilewright.ops.common.weight_formats import QuantizedWeight

STEPS, ROUNDS, SOAK_ROUND = 32, 5, 1000


def random_weights(d: Dims, max_len: int, weights: str | None) -> Weights:
    """weights: a format of small ones, or None for 16 bits."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda").mul_(shape[-1] ** -0.5)

    def ones(*shape: int) -> torch.Tensor:
        return torch.ones(shape, dtype=torch.bfloat16, device="cuda")

    heads, rows = d.q_heads * d.head_dim, (d.q_heads + 2 * d.kv_heads) * d.head_dim
    shapes = ((rows, d.hidden), (d.hidden, heads), (2 * d.inter, d.hidden), (d.hidden, d.inter))

    def matrix(shape: tuple[int, int]) -> torch.Tensor | SmallMatrix:
        return SmallMatrix(QuantizedWeight.of(randn(*shape), weights)) if weights else randn(*shape)

    layers = [tuple(matrix(shape) for _ in range(d.layers)) for shape in shapes]
    angles = torch.randn(max_len, d.head_dim // 2, device="cuda")
    head_norms = tuple((ones(d.head_dim), ones(d.head_dim)) for _ in range(d.layers)) if d.head_norms else ()
    embedding, norms = randn(d.vocab, d.hidden), ones(2 * d.layers + 1, d.hidden)
    return Weights(d, embedding, norms, *layers, embedding, angles.cos(), angles.sin(), 1e-5, d.head_dim**-0.5, head_norms)


class Bench:
    """One model and its cache."""

    def __init__(self, dims: Dims, position: int, room: int, weights: str | None = None) -> None:
        self.dims, self.position, self.room = dims, position, room
        max_len = -(-(position + room + 1) // 128) * 128  # Mega halves a span that does not divide it
        self.weights = random_weights(dims, max_len, weights)
        self.cache = [torch.randn(dims.layers, dims.kv_heads, max_len, dims.head_dim, device="cuda").bfloat16() for _ in range(2)]

    def made(self, text: str) -> tuple[Mega, int]:
        """A step, and the tokens of a launch."""
        values = {name: int(value) for name, _, value in (part.partition("=") for part in text.split(",") if part)}
        tokens, blocks = values.pop("tokens", 8), values.pop("blocks", 0)
        config = replace(default_config(Device.of(self.weights.embedding), self.dims.head_dim, self.weights.pairs > 1), **values)
        clocks = Clocks.at(0, self.position, self.room, torch.device("cuda"))
        return Mega(self.weights, clocks, (self.cache[0], self.cache[1]), blocks=blocks, config=config), tokens

    def start(self, mega: Mega) -> None:
        mega.clocks.tokens.zero_()
        mega.clocks.clock.zero_()
        mega.clocks.counters.fill_(self.position)

    def step_us(self, mega: Mega, tokens: int) -> float:
        """Median time of a token, over many in a row in a captured graph."""
        self.start(mega)
        mega.step(tokens)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            mega.step(tokens)
        times = []
        for _ in range(ROUNDS):
            self.start(mega)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(STEPS // tokens):
                graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(1e3 * start.elapsed_time(end) / (STEPS // tokens * tokens))
        mega.check()
        return statistics.median(times)

    def soak(self, mega: Mega, tokens: int, total: int) -> None:
        side, a = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda").bfloat16()
        first, began = None, time.perf_counter()
        for turn in range(-(-total // SOAK_ROUND)):
            self.start(mega)
            for i in range(SOAK_ROUND // tokens):
                mega.step(tokens)
                if turn % 4 == 0 and i % 50 == 0:
                    with torch.cuda.stream(side):
                        a @ a
            written = mega.clocks.recent[: SOAK_ROUND // tokens * tokens, 0].tolist()
            mega.check()
            first = first or written
            if written != first:
                at = next(i for i, (x, y) in enumerate(zip(written, first, strict=True)) if x != y)
                raise SystemExit(f"round {turn}: token {at} is {written[at]}, was {first[at]} in the first round")
        print(
            f"{(turn + 1) * len(first)} tokens in {time.perf_counter() - began:.1f} s, all rounds equal, {len(set(first))} different tokens a round"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=[name for name, config in CONFIGS.items() if config["model_type"] in MODEL_TYPES])
    parser.add_argument("config", nargs="*", default=[""])
    parser.add_argument("--position", type=int, default=96)
    parser.add_argument("--weights", choices=[CODES], help="small weights; default 16 bits")
    parser.add_argument("--json", type=Path, help="also append a row for each config here")
    parser.add_argument("--soak", type=int, default=0, metavar="TOKENS")
    options = parser.parse_args()
    dims = dims_of_config(AutoConfig.for_model(**CONFIGS[options.model]))
    bench = Bench(dims, options.position, SOAK_ROUND if options.soak else STEPS, options.weights)
    w, small = bench.weights, options.weights and f"weights={options.weights}"
    size = sum(t.nbytes for t in (*w.qkv, *w.out, *w.gate_up, *w.down, w.head))
    size += sum(t[:, :, : options.position].numel() * t.element_size() for t in bench.cache)
    ceilings = measure_ceilings(torch.device("cuda"))
    floor = size / ceilings.read_gbs / 1e3
    print(f"{size / 1e9:.3f} GB a token, {floor:.1f} us at the {ceilings.read_gbs:.0f} GB/s that a kernel reads here")
    for text in options.config:
        mega, tokens = bench.made(text)
        if options.soak:
            bench.soak(mega, tokens, options.soak)
            continue
        tell(
            {
                "op": "megakernel",
                "case": " ".join(filter(None, (options.model, small, text, f"position={options.position}"))),
                "dtype": "bfloat16",
                "gpu": Device.of(w.embedding).name,
                "time_us": round(bench.step_us(mega, tokens), 1),
                "floor_us": round(floor, 1),
                "read_gbs": round(ceilings.read_gbs),
                "balance": round(mega.schedule.balance(), 4),
            },
            options.json,
        )


if __name__ == "__main__":
    main()
