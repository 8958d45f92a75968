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


def tiny_model(family: dict, dtype: torch.dtype = torch.float32, **changes: object):
    """A model of TINY's sizes; family, changes: what differs in its config."""
    model = random_model({**TINY, **family, **changes}, dtype=dtype)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(30)  # so that a token tells
    return model
