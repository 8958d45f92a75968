"""Times speculative decoding with a draft model that is right as often as told.

    python benchmarks/speculate.py Llama-3.1-8B Llama-3.2-1B --acceptance 0.75 --json out.jsonl

Random weights agree on nothing, so acceptance is simulated. All of the draft model's work is done.
Then each token that it proposed is replaced: with the probability --acceptance by the token that
the model itself chooses at this place, else by another. A token behind a wrong one is worth
nothing, as ever. What the model chooses was recorded by a run whose drafts were all wrong, so that
the same kernels chose: in bf16 a step of one row may choose otherwise than one of several where two
tokens are nearly as likely. A row says how many tokens a round gave, beside what the acceptance
promises, and how many of the tokens are those of the record, and of plain decoding.
"""

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewright.bench.report import tell
from tilewright.engine import Call, Engine, Generated, draft
from tilewright.engine.command import prompts_of
from tilewright.launch import Device
from tilewright.models import DTYPES, load


class Simulated:
    """Stands where the draft's proposal is made. acceptance: [1], on the device. record: int64
    [batch, tokens], what the model chooses.
    """

    def __init__(self, batch: int, tokens: int, vocab: int, device: torch.device) -> None:
        self.acceptance, self.vocab = torch.zeros(1, device=device), vocab
        self.record = torch.zeros(batch, tokens + 32, dtype=torch.int64, device=device)
        self.coins = torch.rand(self.record.shape, generator=torch.Generator().manual_seed(1)).to(device)
        self._own = draft.proposal

    def __call__(self, drafter: Any, pair: Tensor, ids: Tensor, places: Tensor, draws: Tensor, sampling: Any) -> Iterator[Call]:
        yield from self._own(drafter, pair, ids, places, draws, sampling)
        yield Call("simulated", self.replace, (ids, draws))

    def replace(self, ids: Tensor, draws: Tensor) -> None:
        place = draws[:-1].t()
        token = self.record.gather(1, place)
        ids[:, 1:].copy_(torch.where(self.coins.gather(1, place) < self.acceptance, token, (token + 1) % self.vocab))

    def keep(self, tokens: list[list[int]]) -> None:
        found = torch.tensor(tokens)
        self.record[: len(found), : found.shape[1]].copy_(found)


def tokens_per_s(found: Generated) -> float:
    """Behind the first token of each sequence."""
    return sum(len(row) - 1 for row in found.tokens) / sum(found.step_s)


def equal(a: list[list[int]], b: list[list[int]]) -> float:
    return statistics.mean(x == y for one, two in zip(a, b, strict=True) for x, y in zip(one, two, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder, a .gguf file, or a config's name (random weights)")
    parser.add_argument("draft", help="likewise, with the same vocabulary")
    parser.add_argument("--acceptance", type=float, default=0.75, help="how often a token of the draft is right, if those before are")
    parser.add_argument("--drafts", default="2,3,4,5", help="tokens of a draft, each in turn")
    parser.add_argument("--draft-weights", help="quantise the draft model's, e.g. to int4-128")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3, help="of plain and drafted runs, in turn; the median counts")
    parser.add_argument("--mode", default="graph", choices=("graph", "eager"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--json", type=Path, help="also append the rows here")
    given = parser.parse_args()
    device, new = torch.device(given.device), given.max_new_tokens
    model, small = (load(name, device=device, dtype=DTYPES[given.dtype]).model for name in (given.model, given.draft))
    prompts = prompts_of(model, given.batch, given.prompt_tokens).tolist()
    simulated = draft.proposal = Simulated(given.batch, new, model.config.vocab_size, device)
    sizes: dict[str, Any] = {"max_batch": given.batch, "max_len": given.prompt_tokens + new + 16, "mode": given.mode}
    with Engine(model, draft=small, draft_weights=given.draft_weights, speculate=1, **sizes) as engine:

        def run(speculate: int, acceptance: float = 0.0) -> Generated:
            simulated.acceptance.fill_(acceptance)
            return engine.generate(prompts, new, speculate=speculate)

        for count in map(int, given.drafts.split(",")):
            recorded = run(count).tokens
            simulated.keep(recorded)
            run(count, given.acceptance)  # warms up
            pairs = [(run(0), run(count, given.acceptance)) for _ in range(given.rounds)]
            plain, ours = (sorted(side, key=tokens_per_s)[len(pairs) // 2] for side in zip(*pairs, strict=True))
            row = {
                "op": "speculate",
                "case": f"{Path(given.model).name} draft={Path(given.draft).name} tokens={count} acceptance={given.acceptance} batch={given.batch}",
                "dtype": given.dtype,
                "draft_weights": given.draft_weights,
                "gpu": Device.of(next(model.parameters())).name,
                "tokens_per_s": round(tokens_per_s(ours), 1),
                "round_ms": round(1e3 * statistics.median(ours.step_s), 4),
                "tokens_per_round": round((new - 1) / len(ours.step_s), 3),
                "promised_per_round": round(sum(given.acceptance**i for i in range(count + 1)), 3),
                "peers": {"plain": round(tokens_per_s(ours) / tokens_per_s(plain), 4)},
                "peer_step_ms": {"plain": round(1e3 * statistics.median(plain.step_s), 4)},
                "equal_tokens": {"record": equal(ours.tokens, recorded), "plain": equal(ours.tokens, plain.tokens)},
            }
            tell(row, given.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
