"""The published configs of real models.

With random weights, tests and benchmarks run their exact shapes without a download.
"""

from typing import Any

Config = dict[str, Any]


def _sizes(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> Config:
    """What every config has, under its names there."""
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }


def _tokens(vocab: int, longest: int, bos: int, eos: int) -> Config:
    return {"vocab_size": vocab, "max_position_embeddings": longest, "bos_token_id": bos, "eos_token_id": eos}


_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LLAMA3 = {
    **_tokens(128256, 131072, bos=128000, eos=128001),
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": _LLAMA3_ROPE,
    "tie_word_embeddings": False,
}
_LLAMA3_SMALL = {**_LLAMA3, "rope_scaling": {**_LLAMA3_ROPE, "factor": 32.0}, "tie_word_embeddings": True}
_QWEN3 = {
    **_tokens(151936, 40960, bos=151643, eos=151645),
    "model_type": "qwen3",
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
}
_QWEN3_LARGE = {**_QWEN3, "use_sliding_window": False, "attention_bias": False, "tie_word_embeddings": False}

CONFIGS: dict[str, Config] = {
    "SmolLM2-135M": {
        **_sizes(hidden=576, intermediate=1536, layers=30, heads=9, kv_heads=3),
        **_tokens(49152, 8192, bos=0, eos=0),
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    },
    "Llama-3.2-1B": {**_LLAMA3_SMALL, **_sizes(hidden=2048, intermediate=8192, layers=16, heads=32, kv_heads=8), "head_dim": 64},
    "Llama-3.2-3B": {**_LLAMA3_SMALL, **_sizes(hidden=3072, intermediate=8192, layers=28, heads=24, kv_heads=8), "head_dim": 128},
    "Llama-3.1-8B": {**_LLAMA3, **_sizes(hidden=4096, intermediate=14336, layers=32, heads=32, kv_heads=8)},
    "Mistral-7B-v0.1": {
        **_sizes(hidden=4096, intermediate=14336, layers=32, heads=32, kv_heads=8),
        **_tokens(32000, 32768, bos=1, eos=2),
        "model_type": "mistral",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
    },
    "Qwen2-7B": {
        **_sizes(hidden=3584, intermediate=18944, layers=28, heads=28, kv_heads=4),
        **_tokens(152064, 131072, bos=151643, eos=151643),
        "model_type": "qwen2",
        "max_window_layers": 28,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "use_sliding_window": False,
        "tie_word_embeddings": False,
    },
    "Qwen3-0.6B": {**_QWEN3, **_sizes(hidden=1024, intermediate=3072, layers=28, heads=16, kv_heads=8), "tie_word_embeddings": True},
    "Qwen3-8B": {**_QWEN3_LARGE, **_sizes(hidden=4096, intermediate=12288, layers=36, heads=32, kv_heads=8), "max_window_layers": 36},
    "Qwen3-30B-A3B": {
        **_QWEN3_LARGE,
        **_sizes(hidden=2048, intermediate=6144, layers=48, heads=32, kv_heads=4),
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "max_window_layers": 48,
    },
    "DeepSeek-V2-Lite": {
        **_sizes(hidden=2048, intermediate=10944, layers=27, heads=16, kv_heads=16),
        **_tokens(102400, 163840, bos=100000, eos=100001),
        "model_type": "deepseek_v2",
        "moe_intermediate_size": 1408,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "norm_topk_prob": False,
        "topk_method": "greedy",
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        },
        "tie_word_embeddings": False,
        "attention_bias": False,
    },
    "gpt-oss-20b": {
        **_sizes(hidden=2880, intermediate=2880, layers=24, heads=64, kv_heads=8),
        **_tokens(201088, 131072, bos=199998, eos=200002),
        "model_type": "gpt_oss",
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "sliding_window": 128,
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "tie_word_embeddings": False,
        "pad_token_id": 199999,
    },
}
