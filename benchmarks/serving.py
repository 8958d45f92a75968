"""Times many users: transformers' continuous batching, stock and patched, and our engine.

    python benchmarks/serving.py Llama-3.1-8B --users 64 --prompt-tokens 512 --json out.jsonl

The engine runs with a static cache and with pages. Prompts are random, with a quarter of
`--prompt-tokens` up to all of it. Each way runs twice. The second run counts, since kernels are
compiled by then. Each way prints one JSON object. Tokens per second are new tokens over the whole
time, prompts included.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tilewright import patch
from tilewright.bench.report import tell
from tilewright.engine import Engine
from tilewright.launch import Device
from tilewright.models import DTYPES, load

Way = Callable[[], tuple[list[list[int]], dict[str, Any]]]


def continuous(model: Any, prompts: list[list[int]], new: int, graphs: bool, page_size: int) -> Way:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    greedy = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)

    def run() -> tuple[list[list[int]], dict[str, Any]]:
        paging = ContinuousBatchingConfig(page_size=page_size, use_cuda_graph=graphs, max_memory_percent=0.7, auto_switch_to_flash=False)
        found = model.generate_batch(prompts, generation_config=greedy, continuous_batching_config=paging)
        return [request.generated_tokens for request in found.values()], {}

    return run


def engine(ours: Engine, prompts: list[list[int]], new: int) -> Way:
    def run() -> tuple[list[list[int]], dict[str, Any]]:
        found = ours.generate(prompts, new)
        return found.tokens, {"ttft_ms": round(found.first_token_s * 1e3, 2), "tpot_ms": round(statistics.median(found.step_s) * 1e3, 3)}

    return run


def timed(name: str, way: Way, users: int, new: int) -> tuple[dict[str, Any], list[list[int]]]:
    way()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    start = time.perf_counter()
    tokens, more = way()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    assert [len(t) for t in tokens] == [new] * users, f"{name}: answers of {sorted({len(t) for t in tokens})} tokens"
    memory_gb = round(torch.cuda.max_memory_allocated() / 1e9, 2)
    return {"mode": name, "tokens_per_s": round(users * new / seconds, 1), "seconds": round(seconds, 3), "memory_gb": memory_gb, **more}, tokens


def ways(model: Any, prompts: list[list[int]], new: int, page_size: int) -> Iterator[tuple[str, Way]]:
    """The caller must finish with each before it asks for the next."""
    longest, total = max(map(len, prompts)) + new, sum(len(prompt) + new for prompt in prompts)
    yield "transformers continuous", continuous(model, prompts, new, False, page_size)
    with patch(model):
        yield "patched continuous", continuous(model, prompts, new, False, page_size)
        yield "patched continuous, graphs", continuous(model, prompts, new, True, page_size)
    pages = {"cache": "paged", "page_size": page_size, "cache_tokens": total + len(prompts) * (page_size + 16)}
    for name, options in (("engine graph, static", {}), (f"engine graph, pages of {page_size}", pages)):
        with Engine(model, max_batch=len(prompts), max_len=longest, mode="graph", **options) as ours:
            yield name, engine(ours, prompts, new)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder, a .gguf file, or a config's name (random weights)")
    parser.add_argument("--users", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--page-size", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--only", default="", help="only ways whose name contains this text")
    parser.add_argument("--json", type=Path, help="also append the rows here")
    given = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    model = load(given.model, device=device, dtype=DTYPES[given.dtype]).model
    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(given.prompt_tokens // 4, given.prompt_tokens, given.users).long().tolist()
    vocab = model.get_input_embeddings().num_embeddings
    prompts = [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in lengths]
    case = f"{Path(given.model).name} users={given.users} prompt<={given.prompt_tokens} new={given.max_new_tokens}"
    first: list[list[int]] | None = None
    for name, way in ways(model, prompts, given.max_new_tokens, given.page_size):
        if given.only not in name:
            continue
        row, tokens = timed(name, way, given.users, given.max_new_tokens)
        first = tokens if first is None else first
        same = sum(a == b for x, y in zip(first, tokens, strict=True) for a, b in zip(x, y, strict=True))
        row |= {"equal_tokens": round(same / (given.users * given.max_new_tokens), 4), "op": "serve", "case": case, "dtype": given.dtype}
        row |= {"gpu": Device.of(next(model.parameters())).name, "page_size": given.page_size}
        tell(row, given.json)
        gc.collect()
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
