"""What is replaced in a model, as data. patch.py applies it; a new model family is a line here.

A module class enters a row only after somebody has read that its forward is the formula of the op.
A name is not enough: GemmaRMSNorm scales by 1 + weight.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from . import forwards as f
from . import linear_attention as linear
from .hooks import wrapper_of

# config.model_type -> prefix of its module classes. SmolLM2, and many others, are of type llama.
FAMILIES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "phi3": "Phi3",
    "gemma2": "Gemma2",
    "gemma3_text": "Gemma3",
    "deepseek_v2": "DeepseekV2",
    "deepseek_v3": "DeepseekV3",
    "gpt_oss": "GptOss",
    "qwen3_next": "Qwen3Next",
    "qwen3_5_text": "Qwen3_5",
    "qwen3_5_moe_text": "Qwen3_5Moe",
}
_LINEAR = ("Qwen3Next", "Qwen3_5", "Qwen3_5Moe")
_LLAMA_LIKE = ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe", "Phi3", "DeepseekV2", "DeepseekV3")
_ROTATING = ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3", "Qwen3Moe", "Phi3", "Gemma2", "Gemma3", "DeepseekV3", *_LINEAR)


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of module and the op that takes over.

    op: name of the op, as in `tilewright.ops`.
    module: class name; `{}` stands for the family's prefix.
    forward: takes the module's class and returns the method that its instances get; None for
        attention, which transformers selects by name.
    keep: takes a module and returns why it stays in PyTorch, or None.
    of: prefixes of its families; None for all.
    method: what `forward` replaces.
    """

    op: str
    module: str
    forward: Callable[[type[nn.Module]], Callable[..., Any]] | None
    keep: Callable[[nn.Module], str | None] = lambda module: None
    of: tuple[str, ...] | None = None
    method: str = "forward"

    def matches(self, kind: str, prefix: str) -> bool:
        return self.module.format(prefix) == kind and (self.of is None or prefix in self.of)


def _keep_mlp(module: Any) -> str | None:
    act = f.activation_of(module)
    return None if act in ("silu", "gelu_pytorch_tanh") else f"hidden_act must be silu or gelu_pytorch_tanh, got {act}"


def _keep_linear(module: Any) -> str | None:
    if type(module) is not nn.Linear:
        return f"{type(module).__module__}.Linear is not torch's"
    if wrapper_of(module) is not None:
        return None  # transformers' tensor parallelism lends its forward a plain part of the weight
    return None if type(module.weight) in (nn.Parameter, Tensor) else f"weight is a {type(module.weight).__name__}, not a plain tensor"


def _rope(name: str, ours: Callable[..., Any], *of: str) -> Row:
    def keep(module: Any) -> str | None:
        code = getattr(type(module).forward, "__code__", None)
        if code is None or name not in code.co_names:
            return f"its forward does not call {name} in this version of transformers"
        if getattr(module.config, "rope_interleave", False):
            return "its rotation also reorders pairs into halves"
        return None

    return Row("rope", "{}Attention", lambda cls: f.with_our_function(cls.forward, name, ours), keep, of)


def _keep_experts(module: Any) -> str | None:
    if getattr(module.config, "hidden_act", "silu") != "silu":
        return f"hidden_act must be silu, got {module.config.hidden_act}"
    if module.gate_up_proj.dtype not in (torch.bfloat16, torch.float16):
        return f"weights must be bfloat16 or float16, got {str(module.gate_up_proj.dtype).removeprefix('torch.')}"
    return None


def _keep_attention(module: Any) -> str | None:
    if module.config.output_attentions:
        return "config.output_attentions asks for its weights"
    return None if getattr(module, "is_causal", True) else "it is bidirectional"


def _keep_latents(module: Any) -> str | None:
    if (reason := _keep_attention(module)) is not None:
        return reason
    weight, latent, rope = module.kv_b_proj.weight, module.kv_lora_rank, module.qk_rope_head_dim
    if type(module.kv_b_proj) is not nn.Linear or type(weight) not in (nn.Parameter, Tensor) or wrapper_of(module.kv_b_proj) is not None:
        return "kv_b_proj must be a plain Linear that is whole on this device"
    if weight.dtype not in (torch.bfloat16, torch.float16):
        return f"weights must be bfloat16 or float16, got {str(weight.dtype).removeprefix('torch.')}"
    if latent not in (64, 128, 256, 512) or rope not in (16, 32, 64, 128, 256) or rope >= latent:
        return f"kv_lora_rank must be 64, 128, 256 or 512 and qk_rope_head_dim a smaller power of two from 16 on, got {latent} and {rope}"
    if module.qk_nope_head_dim + rope == latent:
        return "latents are as wide as keys, and could not be told from them"
    return None


ROWS = (
    Row("matmul", "Linear", lambda cls: f.linear_forward, _keep_linear),
    Row("rms_norm", "{}RMSNorm", lambda cls: f.rms_norm_forward, of=_LLAMA_LIKE),
    Row("rms_norm", "{}RMSNorm", lambda cls: f.rms_norm_rounded_once_forward, of=("GptOss",)),
    Row("rms_norm", "{}RMSNorm", lambda cls: f.rms_norm_offset_forward, of=("Gemma2", "Gemma3", *_LINEAR)),
    Row("silu_mul", "Phi3MLP", lambda cls: f.fused_mlp_forward, _keep_mlp, of=("Phi3",)),
    Row("silu_mul", "{}MLP", lambda cls: f.mlp_forward, _keep_mlp, of=tuple(set(FAMILIES.values()) - {"Phi3", "GptOss", "Mixtral"})),
    Row("moe_route", "{}TopKRouter", lambda cls: f.router_forward, of=("Mixtral", "Qwen3Moe", "GptOss", "Qwen3Next", "Qwen3_5Moe")),
    Row("moe_route", "{}TopkRouter", lambda cls: f.deepseek_v2_router_forward, of=("DeepseekV2",)),
    Row("moe_route", "{}TopkRouter", lambda cls: f.deepseek_v3_router_forward, of=("DeepseekV3",)),
    Row(
        "moe",
        "{}Experts",
        lambda cls: f.experts_forward,
        _keep_experts,
        of=("Mixtral", "Qwen3Moe", "DeepseekV2", "DeepseekV3", "Qwen3Next", "Qwen3_5Moe"),
    ),
    _rope("apply_rotary_pos_emb", f.rotate_half_split, *_ROTATING),
    _rope("apply_rotary_pos_emb", f.rotate_by_halves, "GptOss"),
    _rope("apply_rotary_emb", f.rotate_pairs, "DeepseekV2"),
    Row("attention", "{}Attention", None, _keep_attention),
    Row("gated_delta_rule", "{}GatedDeltaNet", linear.with_our_functions, linear.keep_linear_attention, of=_LINEAR),
    Row("rms_norm_gated", "{}RMSNormGated", lambda cls: linear.gated_norm_forward, of=_LINEAR),
    Row("mla_decode", "{}Attention", lambda cls: f.unexpanded, _keep_latents, of=("DeepseekV2", "DeepseekV3"), method="expand_kv"),
)

# Modules that compute something and stay in PyTorch on purpose. Containers, which only call others,
# are not listed.
KEPT = {
    "Embedding": "gathers rows, computes nothing",
    "{}TextScaledWordEmbedding": "gathers rows and scales them",
    "{}TextRotaryEmbedding": "cos and sin, once per forward for all layers",
    "{}RotaryEmbedding": "cos and sin, once per forward for all layers",
    "{}DecoderLayer": "its two residual additions",
    "{}Moe": "adds the shared experts to the others",
    "{}MoE": "adds the shared experts to the others",
    "GptOssExperts": "its weights lie the other way round: the engine turns them, here they would be held twice",
}
# Leaf modules that do nothing in inference, or that no longer run if the module around them is
# replaced.
ABSORBED = ("SiLUActivation", "SiLU", "GELUTanh", "Dropout", "Conv1d")
CONTAINERS = ("ModuleList", "{}Model", "{}TextModel", "{}ForCausalLM", "{}MLP", "{}Attention", "{}SparseMoeBlock")
