"""Random transformers models of a few thousand parameters, for the tests of patch and engine."""

import torch

from tilewright.models import random_model

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
PLAIN = {
    "llama": {"model_type": "llama", "rope_theta": 10000.0, "rope_scaling": LLAMA3_ROPE},
    "llama-tied-bias": {"model_type": "llama", "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": 5},
    "qwen2": {"model_type": "qwen2"},
    "qwen2-window": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": {"model_type": "qwen3"},
}


def tiny_model(family: dict, dtype: torch.dtype = torch.float32, **changes: object):
    """A model with TINY's sizes. family, changes: the config's other fields."""
    model = random_model({**TINY, **family, **changes}, dtype=dtype)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(30)  # so that a token tells
    return model
