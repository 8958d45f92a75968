"""Our kernels in a transformers model, and out of it again. Runs on a CPU too.

python examples/transformers_model.py [FOLDER_OR_GGUF]
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tilewright


def model_of(source: str) -> torch.nn.Module:
    if source:
        return tilewright.load(source, device="cuda" if torch.cuda.is_available() else "cpu").model
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, vocab_size=256, **sizes)).eval()


def main() -> None:
    model = model_of(sys.argv[1] if len(sys.argv) > 1 else "")
    prompt = torch.tensor([[1, 5, 9, 2]], device=model.device)
    with torch.inference_mode():
        stock = model.generate(prompt, max_new_tokens=8, do_sample=False)
        with tilewright.patch(model) as report:
            ours = model.generate(prompt, max_new_tokens=8, do_sample=False)
    print(report)
    print("tokens equal to stock transformers:", torch.equal(ours, stock))


if __name__ == "__main__":
    main()
