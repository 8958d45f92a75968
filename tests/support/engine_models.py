"""Tiny models of every family that the engine reads, prompts for them, and what transformers makes
of these.
"""

import torch
from tiny_models import EXPERTS, LINEAR, PLAIN, TINY, tiny_model

MLA = {
    "num_key_value_heads": 4,
    "head_dim": 16,
    "kv_lora_rank": 64,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
GRANITE = {"embedding_multiplier": 2.0, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0}
GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 64}
LLAMA_4_SCALING = {"rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 64}
DENSE = {
    **PLAIN,
    "phi3": {"model_type": "phi3", "hidden_size": 192, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 96},
}
# Each differs from those in one thing or another: norms, rotations, windows, scales.
OTHERS = {
    "gemma": {"model_type": "gemma"},
    "gemma2": {"model_type": "gemma2", "sliding_window": 5, "query_pre_attn_scalar": 24, "final_logit_softcapping": 2.0},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "olmo2": {"model_type": "olmo2"},
    "olmo3": {"model_type": "olmo3", "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "granite": {"model_type": "granite", **GRANITE},
    "glm": {"model_type": "glm", "partial_rotary_factor": 0.5},
    "glm4": {"model_type": "glm4", "partial_rotary_factor": 0.5},
    "smollm3": {"model_type": "smollm3", "no_rope_layers": [1, 0]},
    "ernie4_5": {"model_type": "ernie4_5"},
    "seed_oss": {"model_type": "seed_oss"},
    "ministral": {"model_type": "ministral", "sliding_window": 5},
    "helium": {"model_type": "helium", "head_dim": 8},
    "arcee": {"model_type": "arcee", "mlp_bias": True},
    "ministral3": {"model_type": "ministral3", "rope_parameters": LLAMA_4_SCALING},
    "cwm": {"model_type": "cwm", "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "cohere": {"model_type": "cohere", "logit_scale": 0.3},
    "cohere2": {"model_type": "cohere2", "logit_scale": 0.3, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "starcoder2": {"model_type": "starcoder2", "sliding_window": 5},
    "stablelm": {"model_type": "stablelm", "head_dim": 8, "num_key_value_heads": 4, "partial_rotary_factor": 0.5},
    "stablelm-beside": {"model_type": "stablelm", "head_dim": 8, "num_key_value_heads": 4, "use_parallel_residual": True},
    "phi": {"model_type": "phi", "partial_rotary_factor": 0.5},
    "olmo": {"model_type": "olmo"},
    "internlm3": {"model_type": "internlm3", "bias": True, "qkv_bias": True},
    "iquestcoder": {"model_type": "iquestcoder"},
    "exaone4": {"model_type": "exaone4", "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_expand": 2, "mamba_chunk_size": 8}
NEMOTRON = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 8,
    "chunk_size": 8,
    "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"],
    "mlp_bias": True,
    "time_step_min": 0.7,  # a bound of steps, and not of single tokens
    "sliding_window": 5,  # which it ignores
}
FALCON = {
    **MAMBA,
    "mamba_d_ssm": 64,
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.7,
    "mlp_multipliers": [1.3, 0.6],
    "key_multiplier": 0.8,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.9,
    "ssm_multipliers": [1.1, 0.9, 1.2, 0.8, 1.3],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.7,
}
HYBRID = {**MAMBA, **GRANITE, "shared_intermediate_size": 24, "layer_types": ["mamba", "attention"]}
# With a state instead of a cache in some layers, or in all.
RECURRENT = {
    "bamba": {"model_type": "bamba", **MAMBA, "attn_layer_indices": [1]},
    "granitemoehybrid-dense": {"model_type": "granitemoehybrid", **HYBRID, "num_local_experts": 0, "position_embedding_type": "nope"},
    "mamba2": {
        "model_type": "mamba2",
        "num_heads": 4,
        "n_groups": 2,
        "state_size": 8,
        "chunk_size": 8,
        "num_hidden_layers": 1,
        "time_step_limit": (0.0, 0.4),
    },
    "nemotron_h": {"model_type": "nemotron_h", **NEMOTRON},
    "falcon_h1": {"model_type": "falcon_h1", **FALCON, "mamba_rms_norm": True},
    "falcon_h1-gate": {"model_type": "falcon_h1", **FALCON, "mamba_rms_norm": False},
    "qwen3_next-dense": {"model_type": "qwen3_next", **LINEAR, "num_experts": 0},
    "qwen3_5": {"model_type": "qwen3_5_text", **LINEAR, "linear_num_key_heads": 4},
}
EIGHT = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16}
WINDOWED = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
SPARSE = {
    "granitemoehybrid": {"model_type": "granitemoehybrid", **HYBRID, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_next": {"model_type": "qwen3_next", **LINEAR, **EXPERTS},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text", **LINEAR, **EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"model_type": "qwen2_moe", **EXPERTS, "num_experts": 4},
    "qwen3_moe": {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "norm_topk_prob": True},
    "qwen3_moe-raw": {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "norm_topk_prob": False},
    "olmoe": {"model_type": "olmoe", "num_experts": 8, "num_experts_per_tok": 3, "head_dim": 8},
    "granitemoe": {"model_type": "granitemoe", "num_local_experts": 4, "num_experts_per_tok": 2, **GRANITE},
    "glm4_moe": {"model_type": "glm4_moe", **MLA, "n_group": 4, "topk_group": 2, "norm_topk_prob": True, "use_qk_norm": True},
    "dots1": {"model_type": "dots1", **MLA, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "q_lora_rank": None},
    "exaone_moe": {"model_type": "exaone_moe", **EIGHT, **WINDOWED, "num_shared_experts": 1, "first_k_dense_replace": 1},
    "hy_v3": {"model_type": "hy_v3", **EIGHT, "mlp_layer_types": ["dense", "sparse"]},
    "mellum": {"model_type": "mellum", **EIGHT, **WINDOWED},
    "minimax_m2": {"model_type": "minimax_m2", "num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
    "solar_open": {"model_type": "solar_open", **MLA, "n_routed_experts": 4},
    "granitemoeshared": {
        "model_type": "granitemoeshared",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 24,
        **GRANITE,
    },
    "glm4_moe_lite": {"model_type": "glm4_moe_lite", **MLA},
    "axk1": {"model_type": "axk1", **MLA, "n_group": 4, "topk_group": 2},
    "youtu": {"model_type": "youtu", **MLA},
    "gpt_oss": {
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "swiglu_limit": 1.0,
        "sliding_window": 5,
        "rope_scaling": GPT_OSS_ROPE,
    },
    "deepseek_v2": {"model_type": "deepseek_v2", **MLA, "q_lora_rank": None, "topk_method": "greedy", "routed_scaling_factor": 1.5},
    "deepseek_v2-groups": {"model_type": "deepseek_v2", **MLA, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    "deepseek_v3": {"model_type": "deepseek_v3", **MLA, "n_group": 4, "topk_group": 2, "norm_topk_prob": True},
}
FAMILIES = DENSE | OTHERS | RECURRENT | SPARSE
NEW = 9


def tiny(name: str = "llama", dtype: torch.dtype = torch.float32, **changes: object):
    return tiny_model(FAMILIES[name], dtype, **changes)


def prompts() -> list[list[int]]:
    """Prompts of unequal lengths, one longer than a chunk."""
    torch.manual_seed(0)
    return [torch.randint(3, TINY["vocab_size"], (n,)).tolist() for n in (5, 19, 1)]


def stock_tokens(model, prompt: list[int], new: int = NEW) -> list[int]:
    return stock_steps(model, prompt, new)[0]


def stock_steps(model, prompt: list[int], new: int) -> tuple[list[int], torch.Tensor]:
    """The tokens, and the logits that each was chosen by."""
    ids = torch.tensor([prompt], device=model.device)
    how = {"max_new_tokens": new, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits)


def stock_logits(model, prompt: list[int], continuation: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.tensor([prompt + continuation])).logits[0, len(prompt) - 1 :]


def size(model) -> int:
    return sum({p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}.values())
