"""Times the megakernel's step on the GPU at hand, for one config or several, and with --phases phase by phase.

    python benchmarks/megakernel.py Llama-3.2-1B
    python benchmarks/megakernel.py Llama-3.2-1B "depth=3" "tile=4096,depth=6" --position 8192 --phases

Random weights; the steps start at --position. What a kind of phase costs is the time of the whole program less that of a program
without it in any layer.
"""

import argparse
import statistics

import torch

from tilewright.bench.ceilings import measure_ceilings
from tilewright.engine.mega import Config, Dims, Kind, phases
from tilewright.engine.mega.pack import Weights
from tilewright.engine.mega.run import Clocks, Mega
from tilewright.models.configs import CONFIGS

STEPS, ROUNDS = 20, 5


def random_weights(dims: Dims, max_len: int) -> Weights:
    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda").mul_(shape[-1] ** -0.5)

    def matrix(kind: Kind) -> torch.Tensor:
        return torch.stack([randn(*dims.shape(kind)) for _ in range(1 if kind is Kind.HEAD else dims.layers)])

    angles = torch.randn(max_len, dims.head_dim // 2, device="cuda")
    head = matrix(Kind.HEAD)
    norms = torch.ones(2 * dims.layers + 1, dims.hidden, dtype=torch.bfloat16, device="cuda")
    layers = [matrix(kind) for kind in (Kind.QKV, Kind.OUT, Kind.GATE_UP, Kind.DOWN)]
    return Weights(dims, head[0], norms, *layers, head, angles.cos(), angles.sin(), 1e-5, dims.head_dim**-0.5)


def step_us(mega: Mega, position: int) -> float:
    """Median time of a step, of many in a row."""
    times = []
    for _ in range(ROUNDS):
        mega.clocks.clock.zero_()
        mega.clocks.counters.fill_(position)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(STEPS):
            mega.step()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / STEPS)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=[name for name, config in CONFIGS.items() if config["model_type"] == "llama"])
    parser.add_argument("config", nargs="*", default=[""], help='fields of Config that differ from the default, as "tile=4096,depth=6"')
    parser.add_argument("--position", type=int, default=96)
    parser.add_argument("--phases", action="store_true")
    options = parser.parse_args()
    c = CONFIGS[options.model]
    head_dim = c.get("head_dim", c["hidden_size"] // c["num_attention_heads"])
    heads = c["num_attention_heads"], c["num_key_value_heads"]
    dims = Dims(c["num_hidden_layers"], c["hidden_size"], *heads, head_dim, c["intermediate_size"], c["vocab_size"])
    max_len = -(-(options.position + STEPS + 1) // 64) * 64
    weights = random_weights(dims, max_len)
    cache = [torch.randn(dims.layers, dims.kv_heads, max_len, head_dim, device="cuda").bfloat16() for _ in range(2)]
    size = sum(t.nbytes for t in (weights.qkv, weights.out, weights.gate_up, weights.down, weights.head))
    size += sum(t[:, :, : options.position].numel() * t.element_size() for t in cache)
    floor = size / measure_ceilings(torch.device("cuda")).copy_gbs / 1e3
    for text in options.config:
        config = Config(**{name: int(value) for name, _, value in (part.partition("=") for part in text.split(",") if part)})

        def made(program: list, config: Config = config) -> Mega:
            integers = [torch.zeros(shape, dtype=dtype, device="cuda") for shape, dtype in (((16,), torch.int64), ((2, 16), torch.int32))]
            more = [torch.zeros(shape, dtype=torch.int64, device="cuda") for shape in ((STEPS, 16), (2,))]
            mega = Mega(weights, program, Clocks(*integers, *more), (cache[0], cache[1]), config=config)
            mega.step()
            return mega

        program = list(phases(dims))
        mega = made(program)
        us = step_us(mega, options.position)
        print(f"{options.model} {config}: {us:.1f} us a token, {100 * floor / us:.1f} % of the copy rate, balance {mega.schedule.balance():.3f}")
        if options.phases:
            spent = {kind.name.lower(): us - step_us(made([p for p in program if p.kind is not kind]), options.position) for kind in list(Kind)[:6]}
            print("  " + ", ".join(f"{name} {value:.1f}" for name, value in spent.items()))


if __name__ == "__main__":
    main()
