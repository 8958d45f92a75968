"""A decode step with small weights, with and without each of its fusions, in one process.

    python benchmarks/small_weights.py Llama-3.1-8B int4-128 [--tokens 64] [--rounds 5] [--json F]

Forms: `apart`, every launch of its own; `joined`, norm and activation in the launch that makes
pieces (engine/layers.py, MOST_SMALL_ROWS); `ahead`: also the first weights while the launch before
ends; `stream`: also sums over shares of k left to the product that reads them (engine/shares.py);
`shares`, as shipped: all such sums left to their reader, those of q, k and v too; `mega`, of e4m3
weights the megakernel. Each form is an engine on the same weights; rounds take turns. Tokens must
be the same up to rounding: the number of equal ones is printed.
"""

import argparse
import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tilewright.bench.report import tell
from tilewright.engine import Engine, layers, shares
from tilewright.launch import Device, forced_config
from tilewright.models import load
from tilewright.models.quantized import quantize
from tilewright.ops import quantized_matmul
from tilewright.ops.kv_append import kv_append_out
from tilewright.ops.quantized_matmul import quantized_matmul_out

STREAM = (quantized_matmul_out,)
ALL = (*STREAM, kv_append_out)
FORMS = {"apart": (0, 0, ()), "joined": (16, 0, ()), "ahead": (16, 1, ()), "stream": (16, 1, STREAM), "shares": (16, 1, ALL)}
FORMS["mega"] = FORMS["shares"]


@contextmanager
def form(rows: int, ahead: int, readers: tuple[Any, ...]) -> Iterator[None]:
    """Steps that are made within the context have this form: the shipped configs but for it."""

    def config(p: quantized_matmul.Problem, device: Device) -> Any:
        shipped, _ = quantized_matmul.DECISION.decide(p, device)
        return replace(shipped, ahead=min(shipped.ahead, ahead))

    before, layers.MOST_SMALL_ROWS = layers.MOST_SMALL_ROWS, rows
    known = dict(shares.READERS)
    for op in known.keys() - set(readers):
        del shares.READERS[op]
    try:
        with forced_config(quantized_matmul.DECISION.plan, config):
            yield
    finally:
        layers.MOST_SMALL_ROWS = before
        shares.READERS.update(known)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("weights")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--mode", default="graph", choices=("graph", "eager"))
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--forms", default=",".join(FORMS), help="some of them, by commas")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    model = load(given.model, device=given.device, dtype=torch.bfloat16).model
    quantize(model, given.weights, undoable=False)
    prompt = torch.randint(0, model.config.vocab_size, (32,), generator=torch.Generator().manual_seed(1)).tolist()
    first: list[int] = []
    asked = [name for name in given.forms.split(",") if name != "mega" or given.weights == "e4m3"]
    forms = {name: FORMS[name] for name in asked}
    times: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(given.rounds):
        for name, how in forms.items():
            with ExitStack() as stack:
                stack.enter_context(form(*how))
                engine = stack.enter_context(Engine(model, max_len=32 + given.tokens, mode="mega" if name == "mega" else given.mode))
                engine.generate([prompt], given.tokens)
                found = engine.generate([prompt], given.tokens)
            first = first or found.tokens[0]
            times[name].append(statistics.median(found.step_s) * 1e6)
            equal = sum(a == b for a, b in zip(first, found.tokens[0], strict=True))
            print(f"{name:10} {times[name][-1]:8.1f} us a step, {equal} of {len(first)} tokens equal", flush=True)
    gpu = Device.of(model.get_input_embeddings().weight).name
    for name, each in times.items():
        middle = statistics.median(each)
        case = f"{given.model} weights={given.weights} form={name}"
        tell({"op": "small_weights", "case": case, "gpu": gpu, "step_us": each, "tokens_per_s": 1e6 / middle}, given.json)


if __name__ == "__main__":
    main()
