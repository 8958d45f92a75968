"""Random transformers models of a few thousand parameters, for the tests of patch and engine."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tilewright.models import patch, random_model

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

MLA = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "kv_lora_rank": 24,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
MODELS = {
    **PLAIN,
    "phi3": {"model_type": "phi3", "partial_rotary_factor": 0.5},
    "gemma2": {"model_type": "gemma2", "sliding_window": 5, "query_pre_attn_scalar": 24},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 5, "query_pre_attn_scalar": 24, "num_hidden_layers": 6},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "mlp_only_layers": [0]},
    "deepseek_v2": {"model_type": "deepseek_v2", **MLA, "topk_method": "greedy", "routed_scaling_factor": 1.5},
    "deepseek_v2-groups": {
        "model_type": "deepseek_v2",
        **MLA,
        "q_lora_rank": 12,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
    },
    "deepseek_v3": {"model_type": "deepseek_v3", **MLA, "q_lora_rank": 12, "n_group": 4, "topk_group": 2, "norm_topk_prob": True},
    "gpt_oss": {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5, "rope_scaling": None},
}


LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24}
MODELS |= {
    "qwen3_next": {"model_type": "qwen3_next", **LINEAR, **EXPERTS},
    "qwen3_5": {"model_type": "qwen3_5_text", **LINEAR},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text", **LINEAR, **EXPERTS},
}


def tiny_model(family: dict, dtype: torch.dtype = torch.float32, **changes: object):
    """A model with TINY's sizes. family, changes: the config's other fields."""
    model = random_model({**TINY, **family, **changes}, dtype=dtype)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(30)  # so that a token tells
    return model


def tiny(name: str = "llama", dtype: torch.dtype = torch.float32, **changes: object):
    return tiny_model(MODELS[name], dtype, **changes)


FEW = (2, 7)  # sequences and tokens: tiles are those of what `patch` itself tries, so that few kernels are typed twice


def left_padded(sequences: int = 3, tokens: int = 11) -> dict[str, Tensor]:
    torch.manual_seed(0)
    ids = torch.randint(3, TINY["vocab_size"], (sequences, tokens))
    mask = torch.ones_like(ids)
    mask[0, : tokens // 2 - 1] = 0
    mask[-1, :1] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def state_of(model) -> dict[str, dict[str, int]]:
    """Which object every attribute of every module is."""
    return {name: {key: id(value) for key, value in module.__dict__.items()} for name, module in model.named_modules()}


def logits(model, inputs: dict[str, Tensor], **options: object) -> Tensor:
    with torch.inference_mode():
        return model(**inputs, **options).logits


def greedy(model, inputs: dict[str, Tensor], tokens: int = 8, **options: object) -> Tensor:
    return model.generate(**inputs, max_new_tokens=tokens, do_sample=False, **options)


@contextmanager
def patched(model) -> Iterator[object]:
    with patch(model):
        yield model
