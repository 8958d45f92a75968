"""The table of families in docs/models.md: each one's tiny random model, patched and in the engine.

python tools/families.py            # writes the table; some minutes
python tools/families.py llama glm4 # prints these rows
"""

import sys
import textwrap
import warnings
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT / "src")]

from architectures import ARCHITECTURES  # noqa: E402
from engine_models import FAMILIES  # noqa: E402
from tiny_models import MODELS, greedy, left_padded, logits, state_of, tiny_model  # noqa: E402
from transformers import CONFIG_MAPPING, logging  # noqa: E402

from tilewright.engine import MODEL_TYPES, Engine  # noqa: E402
from tilewright.launch import counted  # noqa: E402
from tilewright.models import patch  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
BEGIN, END = "<!-- architectures: made by tools/families.py -->\n", "<!-- /architectures -->"
HEAD = "| model type | replaced | attention | tokens | left-padded | undone | engine | launches a token |\n|---|---|---|---|---|---|---|---|\n"
NOTE = """Made by `python tools/families.py`, which runs a tiny random model of each type that the engine
takes, in fp32 on the CPU. "Replaced" counts modules that compute something; fp32 experts are kept.
"Launches" counts our kernels for one token of one sequence.

"""
PROMPTS = ([5, 9, 33, 7, 60, 12], [8] * 19, [4])


def yes(right: bool) -> str:
    return "equal" if right else "**differ**"


def engine_cells(model_type: str) -> tuple[str, str]:
    """Whether the engine's tokens are those of transformers, and launches of a decode step."""
    family = next((f for f in FAMILIES.values() if f["model_type"] == model_type), None)
    if model_type not in MODEL_TYPES or family is None:
        return "-", "-"
    sparse = not any(model_type == f["model_type"] for name, f in FAMILIES.items() if f["model_type"] in MODEL_TYPES and dense(f))
    model = tiny_model(family, torch.bfloat16 if sparse else torch.float32)
    inputs = [{"input_ids": torch.tensor([p]), "attention_mask": torch.ones(1, len(p), dtype=torch.long)} for p in PROMPTS]
    stock = [greedy(model, x, 6)[0, x["input_ids"].shape[1] :].tolist() for x in inputs]
    with Engine(model, max_batch=4, max_len=64) as engine:
        ours = engine.generate(PROMPTS, 6).tokens
        engine.warm_up(1, 6)
        counts = []
        for new in (2, 3):
            with counted() as launches:
                engine.generate(PROMPTS[:1], new)
            counts.append(sum(launches.values()))
    same = sum(a == b for mine, theirs in zip(ours, stock, strict=True) for a, b in zip(mine, theirs, strict=True))
    return (yes(ours == stock) if not sparse else f"{same} of 18 (bf16)"), str(counts[1] - counts[0])


def dense(family: dict) -> bool:
    return not any("expert" in key and value for key, value in family.items())


def row(model_type: str, family: dict) -> str:
    if model_type not in CONFIG_MAPPING:
        return f"| `{model_type}` | not in this transformers | | | | | | |"
    model, inputs = tiny_model(family), left_padded()
    alone = {name: x[1:2] for name, x in inputs.items()}  # without padding
    stock, padded, before, exact = greedy(model, alone, 6), greedy(model, inputs, 6), state_of(model), logits(model, inputs)
    with patch(model) as report:
        tokens, under = greedy(model, alone, 6), greedy(model, inputs, 6)
    undone = state_of(model) == before and torch.equal(logits(model, inputs), exact)
    done, left = (sum(line.count for line in lines) for lines in (report.replaced, report.kept))
    attends = "ours" if any(line.op in ("attention", "ssd", "gated_delta_rule") for line in report.replaced) else "transformers'"
    cells = (f"{done} of {done + left}", attends, yes(torch.equal(tokens, stock)), yes(torch.equal(under, padded)), "exactly" if undone else "**no**")
    return f"| `{model_type}` | " + " | ".join((*cells, *engine_cells(model_type))) + " |"


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    families = {family["model_type"]: family for family in reversed(MODELS.values())}
    families |= {name: {"model_type": name, **fields} for name, fields in ARCHITECTURES.items()}
    wanted = sys.argv[1:] or sorted(name for name in families if name in MODEL_TYPES)
    rows = []
    for name in wanted:
        rows.append(row(name, families[name]))
        print(rows[-1], flush=True)
    if sys.argv[1:]:
        return
    text = PAGE.read_text()
    start, end = text.index(BEGIN) + len(BEGIN), text.index(END)
    PAGE.write_text(text[:start] + NOTE + HEAD + "\n".join(rows) + "\n" + others(set(wanted)) + text[end:])


def others(shown: set[str]) -> str:
    """The architectures that tests hold beside those of the table."""
    names = ", ".join(f"`{name}`" for name in sorted(ARCHITECTURES) if name not in shown)
    lines = textwrap.wrap(f"`tests/cpu/test_architectures.py` checks tokens and undo for these types too: {names}.", 100, break_on_hyphens=False)
    return "\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
