"""Times the megakernel's step on the GPU at hand, for one or several configs; or runs it for long.

    python benchmarks/megakernel.py Llama-3.2-1B
    python benchmarks/megakernel.py Llama-3.2-1B stream phases:depth=3 --position 8192 --phases
    python benchmarks/megakernel.py Llama-3.2-1B stream phases --json results.jsonl
    python benchmarks/megakernel.py Llama-3.2-1B stream:tokens=16 --soak 100000

A config names the kernel, "stream" or "phases", and the fields that differ from its default; the
stream also takes tokens, the tokens of one launch. Weights are random, and the steps start at
--position. --phases: the cost of a kind of phase (`phases` only) is the time of the whole program
minus that of a program without it in any layer. --soak: writes so many tokens, in rounds of 1000
from the same start, while another CUDA stream multiplies matrices now and then; all rounds must
write the same tokens.
"""

import argparse
import statistics
import time
from pathlib import Path

import torch

from tilewright.bench.ceilings import measure_ceilings
from tilewright.bench.report import tell
from tilewright.engine.mega import Config, Dims, Kind, phases
from tilewright.engine.mega.pack import Weights, one_stream
from tilewright.engine.mega.program import MATRICES
from tilewright.engine.mega.run import Clocks, Mega
from tilewright.engine.mega.stream import StreamMega
from tilewright.engine.mega.stream_schedule import StreamConfig
from tilewright.launch import Device
from tilewright.models.configs import CONFIGS

STEPS, ROUNDS, SOAK_ROUND = 32, 5, 1000


def random_weights(dims: Dims, max_len: int) -> Weights:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda").mul_(shape[-1] ** -0.5)

    angles = torch.randn(max_len, dims.head_dim // 2, device="cuda")
    norms = torch.ones(2 * dims.layers + 1, dims.hidden, dtype=torch.bfloat16, device="cuda")
    rest = norms, angles.cos(), angles.sin()
    if dims.inter % dims.hidden:
        parts = {kind: torch.stack([randn(*dims.shape(kind)) for _ in range(1 if kind is Kind.HEAD else dims.layers)]) for kind in MATRICES}
        whole, bases = None, ()
    else:
        whole, bases, parts = one_stream(dims, norms)
        for part in parts.values():
            for layer in part:
                layer.copy_(randn(*layer.shape))
    stacks = [parts[kind] for kind in MATRICES]
    return Weights(dims, parts[Kind.HEAD][0], rest[0], *stacks, rest[1], rest[2], 1e-5, dims.head_dim**-0.5, whole, bases)


def parsed(text: str) -> tuple[Config | StreamConfig, int]:
    kind, _, fields = text.partition(":")
    values = {name: int(value) for name, _, value in (part.partition("=") for part in fields.split(",") if part)}
    tokens = values.pop("tokens", 1)
    return (StreamConfig if kind == "stream" else Config)(**values), tokens


class Bench:
    """One model, its cache, and the buffers of a step."""

    def __init__(self, dims: Dims, position: int, room: int) -> None:
        self.dims, self.position = dims, position
        max_len = -(-(position + room + 1) // 64) * 64
        self.weights = random_weights(dims, max_len)
        self.cache = [torch.randn(dims.layers, dims.kv_heads, max_len, dims.head_dim, device="cuda").bfloat16() for _ in range(2)]
        self.room = room

    def made(self, program: list, config: Config | StreamConfig, spin_limit: int = 0) -> Mega | StreamMega:
        integers = [torch.zeros(shape, dtype=dtype, device="cuda") for shape, dtype in (((16,), torch.int64), ((2, 16), torch.int32))]
        more = [torch.zeros(shape, dtype=torch.int64, device="cuda") for shape in ((self.room, 16), (2,))]
        kind = StreamMega if isinstance(config, StreamConfig) else Mega
        return kind(self.weights, program, Clocks(*integers, *more), (self.cache[0], self.cache[1]), config=config, spin_limit=spin_limit)

    def start(self, mega: Mega | StreamMega) -> None:
        mega.clocks.tokens.zero_()
        mega.clocks.clock.zero_()
        mega.clocks.counters.fill_(self.position)

    def step_us(self, mega: Mega | StreamMega, tokens: int) -> float:
        """Median time of a token, over many in a row in a captured graph."""
        launch = (lambda: mega.step(tokens)) if isinstance(mega, StreamMega) else mega.step
        self.start(mega)
        launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launch()
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
        return statistics.median(times)

    def soak(self, mega: Mega | StreamMega, tokens: int, total: int) -> None:
        launch = (lambda: mega.step(tokens)) if isinstance(mega, StreamMega) else mega.step
        side, a = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda").bfloat16()
        first, began = None, time.perf_counter()
        for turn in range(-(-total // SOAK_ROUND)):
            self.start(mega)
            for i in range(SOAK_ROUND // tokens):
                launch()
                if turn % 4 == 0 and i % 50 == 0:
                    with torch.cuda.stream(side):
                        a @ a
            written = mega.clocks.recent[: SOAK_ROUND // tokens * tokens, 0].tolist()
            first = first or written
            if written != first:
                at = next(i for i, (x, y) in enumerate(zip(written, first, strict=True)) if x != y)
                raise SystemExit(f"round {turn}: token {at} is {written[at]}, was {first[at]} in the first round")
        mega.check()
        print(
            f"{(turn + 1) * len(first)} tokens in {time.perf_counter() - began:.1f} s, all rounds equal, {len(set(first))} different tokens a round"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=[name for name, config in CONFIGS.items() if config["model_type"] == "llama"])
    parser.add_argument("config", nargs="*", default=["phases"])
    parser.add_argument("--position", type=int, default=96)
    parser.add_argument("--phases", action="store_true")
    parser.add_argument("--json", type=Path, help="also append a row for each config here")
    parser.add_argument("--soak", type=int, default=0, metavar="TOKENS")
    options = parser.parse_args()
    c = CONFIGS[options.model]
    head_dim = c.get("head_dim", c["hidden_size"] // c["num_attention_heads"])
    heads = c["num_attention_heads"], c["num_key_value_heads"]
    dims = Dims(c["num_hidden_layers"], c["hidden_size"], *heads, head_dim, c["intermediate_size"], c["vocab_size"])
    bench = Bench(dims, options.position, SOAK_ROUND if options.soak else STEPS)
    weights, program = bench.weights, list(phases(dims))
    size = sum(t.nbytes for t in (weights.qkv, weights.out, weights.gate_up, weights.down, weights.head))
    size += sum(t[:, :, : options.position].numel() * t.element_size() for t in bench.cache)
    ceilings = measure_ceilings(torch.device("cuda"))
    floor = size / ceilings.read_gbs / 1e3
    print(f"{size / 1e9:.3f} GB a token, {floor:.1f} us at the {ceilings.read_gbs:.0f} GB/s that a kernel reads here")
    for text in options.config:
        config, tokens = parsed(text)
        mega = bench.made(program, config, spin_limit=1 << 22 if options.soak else 0)
        if options.soak:
            bench.soak(mega, tokens, options.soak)
            continue
        us = bench.step_us(mega, tokens)
        tell(
            {
                "op": "megakernel",
                "case": f"{options.model} {text} position={options.position}",
                "dtype": "bfloat16",
                "gpu": Device.of(weights.embedding).name,
                "time_us": round(us, 1),
                "floor_us": round(floor, 1),
                "read_gbs": round(ceilings.read_gbs),
                "balance": round(mega.schedule.balance(), 4),
            },
            options.json,
        )
        if options.phases and isinstance(config, Config):
            spent = {}
            for kind in list(Kind)[:6]:
                rest = bench.made([p for p in program if p.kind is not kind], config)
                spent[kind.name.lower()] = us - bench.step_us(rest, tokens)
            print("  " + ", ".join(f"{name} {value:.1f}" for name, value in spent.items()))


if __name__ == "__main__":
    main()
