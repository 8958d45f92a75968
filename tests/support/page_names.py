"""What the code of a page takes for granted: the reader's own model and tensors, tiny."""

from typing import Any

import torch


def tiny_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, vocab_size=64, **sizes)).eval()


def models() -> dict[str, Any]:
    ids = torch.tensor([[1, 2, 3]])
    return {"model": tiny_llama(), "small": tiny_llama(), "inputs": {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 2}}


# page -> what its code finds; the blocks that no CPU can run here, with the reason
NAMES = {"README.md": models, "models.md": models, "engine.md": models}
NOT_RUN = {
    ("models.md", 2): "reads a file of a model",
    ("engine.md", 1): "the reader's tokenizer; test_engine.py runs each option",
    ("engine.md", 2): "the reader's grammar; test_engine.py has one",
    ("engine.md", 5): "131072 tokens of cache, in a CUDA graph",
    ("engine.md", 6): "several GPUs",
    ("megakernel.md", 0): "the megakernel needs a GPU, or minutes",
    ("serving.md", 0): "a running server",
    ("serving.md", 1): "a fragment with ... in it",
    ("attention.md", 0): "a list of calls with the reader's tensors; test_attention.py runs each",
    ("attention.md", 1): "as above; test_mla.py",
    ("attention.md", 2): "as above; test_kv_append.py",
    ("attention.md", 3): "as above; test_kv_append.py",
    ("decode.md", 0): "as above; test_attention_decode.py, test_mla_decode.py, test_sparse_decode.py",
    ("decode.md", 1): "as above; test_sparse_decode.py",
    ("writing-an-op.md", 0): "parts of a file; examples/own_op is whole, and is run",
    ("writing-an-op.md", 1): "a line of such a file",
    ("writing-an-op.md", 2): "a line of such a file",
}
ON_A_CPU = {'device="cuda"': 'device="cpu"', 'mode="graph"': 'mode="eager"', "4096, 4096": "256, 256"}
