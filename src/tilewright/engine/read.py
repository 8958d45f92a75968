"""Reads a transformers model as a `Decoder`, with its own weights."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..launch import argument_error
from .layers import Attention, Decoder, GroupedAttention, LatentAttention, Layer, Mlp, Norm, Rope
from .mlp import Activation, Experts, GatedMlp
from .parallel import Group
from .weights import Fusion, Matrix

# Rotations whose frequencies do not depend on the length of the sequence.
_FIXED_ROPE = ("default", "linear", "llama3", "yarn")


def read(model: Any, fusion: Fusion, max_len: int, on_progress: Callable[[str, int, int], None], group: Group | None = None) -> Decoder:
    """The model as a `Decoder`.

    `fusion` replaces fused weights in the model by views.

    group: of the ranks that hold the other parts.

    Raises: ValueError for a model that the engine can't run, before anything is changed.
    """
    config = model.config
    if config.model_type not in MODEL_TYPES:
        raise argument_error("model.config.model_type", f"one of {', '.join(MODEL_TYPES)}", config.model_type)
    if not hasattr(model, "lm_head"):
        raise argument_error("model", "a causal language model, with an lm_head", type(model).__name__)
    _check(model, config)
    stem = model.model
    deepseek = config.model_type in _DEEPSEEK
    rotary = stem.rotary_emb
    rope = Rope.table(rotary.inv_freq, rotary.attention_scaling, max_len, interleaved=deepseek and getattr(config, "rope_interleave", True))
    attention_of = _latent_attention if deepseek else _attention
    rank = 0 if group is None else group.shard.rank
    layers = []
    for i, layer in enumerate(stem.layers):
        on_progress("fusing weights", i, len(stem.layers))
        attention, mlp = attention_of(layer.self_attn, config, rope, fusion), _mlp(layer.mlp, fusion, rank)
        layers.append(Layer(_norm(layer.input_layernorm), attention, _norm(layer.post_attention_layernorm), mlp))
    on_progress("fusing weights", len(stem.layers), len(stem.layers))
    return Decoder(stem.embed_tokens.weight.data, tuple(layers), _norm(stem.norm), Matrix.of(model.lm_head), group)


_DEEPSEEK = ("deepseek_v2", "deepseek_v3")
_LATENTS, _ROPE_DIMS = (64, 128, 256, 512), (16, 32, 64)  # what mla_decode takes
_SPARSE = ("mixtral", "qwen3_moe", "gpt_oss", *_DEEPSEEK)
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "phi3", *_SPARSE)


def _check(model: Any, config: Any) -> None:
    if config.hidden_act != "silu":
        raise argument_error("model.config.hidden_act", "silu", config.hidden_act)
    kind = (config.rope_parameters or {}).get("rope_type", "default")
    if kind not in _FIXED_ROPE:
        raise argument_error("rope_type", f"one of {', '.join(_FIXED_ROPE)}", kind)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and (type(module) is not nn.Linear or type(module.weight) not in (nn.Parameter, Tensor)):
            raise argument_error(name, "a plain torch.nn.Linear", f"{type(module).__name__} of {type(module.weight).__name__}")
    dtypes = {p.dtype for p in model.parameters()}
    if len(dtypes) > 1:
        raise argument_error("the model's parameters", "of one dtype", sorted(map(str, dtypes)))
    if config.model_type in _DEEPSEEK:
        if config.kv_lora_rank not in _LATENTS:
            raise argument_error("model.config.kv_lora_rank", f"one of {_LATENTS}", config.kv_lora_rank)
        if config.qk_rope_head_dim not in _ROPE_DIMS:
            raise argument_error("model.config.qk_rope_head_dim", f"one of {_ROPE_DIMS}", config.qk_rope_head_dim)
    if config.model_type in _SPARSE and model.dtype is torch.float32:
        raise argument_error("the dtype of a mixture of experts", "bfloat16 or float16", "float32")


def _norm(module: Any) -> Norm:
    rounded_once = type(module).__name__ == "GptOssRMSNorm"
    return Norm(module.weight.data, module.variance_epsilon, round_before_weight=not rounded_once)


def _attention(module: Any, config: Any, rope: Rope, fusion: Fusion) -> Attention:
    head_dim = module.head_dim
    qkv = Matrix.of(module.qkv_proj) if hasattr(module, "qkv_proj") else fusion.stacked(module.q_proj, module.k_proj, module.v_proj)
    q_heads = module.o_proj.weight.shape[1] // head_dim
    kv_heads = (len(qkv.weight) // head_dim - q_heads) // 2
    window = module.sliding_window if hasattr(module, "sliding_window") else getattr(config, "sliding_window", None)
    q_norm, k_norm = (_norm(module.q_norm), _norm(module.k_norm)) if hasattr(module, "q_norm") else (None, None)
    sinks = module.sinks.data.float() if hasattr(module, "sinks") else None
    return GroupedAttention(qkv, Matrix.of(module.o_proj), q_heads, kv_heads, head_dim, module.scaling, rope, window, q_norm, k_norm, sinks)


def _latent_attention(module: Any, config: Any, rope: Rope, fusion: Fusion) -> Attention:
    latent, rope_dim = config.kv_lora_rank, config.qk_rope_head_dim
    if module.q_lora_rank is None:
        down, q_up = fusion.stacked(module.q_proj, module.kv_a_proj_with_mqa), None
    else:
        down = fusion.stacked(module.q_a_proj, module.kv_a_proj_with_mqa)
        q_up = (_norm(module.q_a_layernorm), Matrix.of(module.q_b_proj))
    kv_up = module.kv_b_proj.weight.data.view(-1, module.qk_nope_head_dim + module.v_head_dim, latent)
    parts = (down, q_up, _norm(module.kv_a_layernorm), kv_up, Matrix.of(module.o_proj))
    return LatentAttention(*parts, module.qk_nope_head_dim, rope_dim, module.scaling, rope)


def _mlp(module: Any, fusion: Fusion, rank: int) -> Mlp:
    if not hasattr(module, "experts"):
        return _dense(module, fusion)
    if hasattr(module, "router"):
        return _gpt_oss_experts(module, fusion, rank)
    experts, router = module.experts, module.gate
    gate_up = experts.gate_up_proj.data.unflatten(1, (2, -1))
    common = (Matrix(router.weight.data), gate_up, experts.down_proj.data, router.top_k)
    first = rank * len(experts.down_proj)
    if not hasattr(router, "routed_scaling_factor"):
        return Experts(
            *common, first=first, normalize=getattr(router, "norm_topk_prob", True), logits_dtype=router.weight.dtype
        )  # Mixtral always normalises
    deepseek: dict[str, Any] = {"scale": router.routed_scaling_factor, "logits_dtype": torch.float32, "shared": _dense(module.shared_experts, fusion)}
    if hasattr(router, "e_score_correction_bias"):
        bias = router.e_score_correction_bias.float()
        deepseek |= {"sigmoid": True, "bias": bias, "normalize": router.norm_topk_prob}
        grouped = True
    else:
        deepseek["normalize"] = False
        grouped = router.topk_method == "group_limited_greedy"
    if grouped:
        deepseek |= {"groups": router.num_group, "top_groups": router.topk_group}
    return Experts(*common, first=first, **deepseek)


def _gpt_oss_experts(module: Any, fusion: Fusion, rank: int) -> Experts:
    """gpt-oss stores [experts, hidden, 2 * inter] and [experts, inter, hidden], with interleaved
    columns (and biases) of gate and up.
    """
    experts, router = module.experts, module.router
    count = len(experts.down_proj)
    gate_up = fusion.transposed(experts.gate_up_proj).unflatten(1, (-1, 2)).transpose(1, 2)
    biases = experts.gate_up_proj_bias.data.unflatten(1, (-1, 2)).transpose(1, 2), experts.down_proj_bias.data
    act = Activation(*biases, experts.alpha, experts.limit, up_offset=1.0)
    choice: dict[str, Any] = {"normalize": True, "logits_dtype": router.weight.dtype}  # the softmax of the best alone
    matrices = gate_up, fusion.transposed(experts.down_proj)
    return Experts(Matrix(router.weight.data, router.bias.data), *matrices, router.top_k, first=rank * count, act=act, **choice)


def _dense(module: Any, fusion: Fusion) -> GatedMlp:
    if hasattr(module, "gate_up_proj"):
        return GatedMlp(Matrix.of(module.gate_up_proj), Matrix.of(module.down_proj), alternating=False)
    return GatedMlp(fusion.alternating(module.gate_proj, module.up_proj), Matrix.of(module.down_proj))
