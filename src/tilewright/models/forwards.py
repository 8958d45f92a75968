"""Replaces modules' forwards: the same formula on our kernels. rows.py says which."""

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ..ops.matmul import matmul
from ..ops.moe import moe
from ..ops.moe_route import moe_route
from ..ops.rms_norm import rms_norm
from ..ops.rope import rope
from ..ops.silu_mul import silu_mul

NAME = "tilewright"  # of our attention in transformers' registry


def linear_forward(self: Any, input: Tensor) -> Tensor:
    return matmul(input, self.weight, self.bias, trans_b=True)


def rms_norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    return rms_norm(hidden_states, self.weight, self.variance_epsilon, round_before_weight=True)


def rms_norm_rounded_once_forward(self: Any, hidden_states: Tensor) -> Tensor:
    return rms_norm(hidden_states, self.weight, self.variance_epsilon)


def rms_norm_offset_forward(self: Any, x: Tensor) -> Tensor:
    """Gemma stores weight - 1."""
    return rms_norm(x, self.weight, self.eps, weight_offset=1.0)


def activation_of(module: Any) -> str:
    """The name of an MLP's activation. Gemma's configs keep it in another field."""
    config = module.config
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def mlp_forward(self: Any, x: Tensor) -> Tensor:
    y: Tensor = self.down_proj(silu_mul(self.gate_proj(x), self.up_proj(x), gelu_tanh=activation_of(self) != "silu"))
    return y


def fused_mlp_forward(self: Any, hidden_states: Tensor) -> Tensor:
    """Phi-3: one projection for gate and up."""
    y: Tensor = self.down_proj(silu_mul(self.gate_up_proj(hidden_states), gelu_tanh=activation_of(self) != "silu"))
    return y


def router_forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax over all experts, the best `top_k`, normalised unless `norm_topk_prob` says
    otherwise.

    gpt-oss takes the softmax over the best alone, which equals the normalised softmax.
    """
    logits = matmul(hidden_states.reshape(-1, self.hidden_dim), self.weight, getattr(self, "bias", None), trans_b=True)
    weights, ids = moe_route(logits, self.top_k, normalize=getattr(self, "norm_topk_prob", True))
    return logits, weights, ids.long()


def deepseek_v2_router_forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits in fp32; never normalised. With groups, only the best groups take part."""
    logits = matmul(hidden_states.reshape(-1, self.hidden_dim), self.weight, trans_b=True, out_dtype=torch.float32)
    groups = {"groups": self.num_group, "top_groups": self.topk_group} if self.topk_method == "group_limited_greedy" else {}
    weights, ids = moe_route(logits, self.top_k, normalize=False, scale=self.routed_scaling_factor, **groups)
    return logits, weights, ids.long()


def deepseek_v3_router_forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sigmoid scores; a bias changes the choice, not the weights."""
    logits = matmul(hidden_states.reshape(-1, self.hidden_dim), self.weight, trans_b=True, out_dtype=torch.float32)
    weights, ids = moe_route(
        logits,
        self.top_k,
        sigmoid=True,
        bias=self.e_score_correction_bias.float(),
        normalize=self.norm_topk_prob,
        scale=self.routed_scaling_factor,
        groups=self.num_group,
        top_groups=self.topk_group,
    )
    return logits, weights, ids.long()


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    return moe(hidden_states, self.gate_up_proj, self.down_proj, weights=top_k_weights.float(), ids=top_k_index)


def rotate_half_split(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Replaces a model file's own function. q and k [batch, heads, seq_len, head_dim] are views of
    fresh projections; they are rotated in place.
    """
    half = cos.shape[-1] // 2  # transformers repeats the angles for both halves
    return rotate_by_halves(q, k, cos[..., :half], sin[..., :half], unsqueeze_dim)


def rotate_by_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """The same for angles that are not repeated (gpt-oss)."""
    if unsqueeze_dim != 1:
        raise ValueError(f"unsqueeze_dim must be 1, got {unsqueeze_dim}")
    return rope(q, k, cos, sin)


def rotate_pairs(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """DeepSeek-V2's form: neighbours are a pair; angles [batch or 1, seq_len, pairs] are
    complex.
    """
    angles = torch.view_as_real(freqs_cis)
    return rope(xq, xk, angles[..., 0].contiguous(), angles[..., 1].contiguous(), interleaved=True)


def unexpanded(self: Any, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces `expand_kv` of latent attention: our attention takes the cached latents and rotated
    keys. If somebody has selected another attention, it gets expanded keys and values.
    """
    if self.config._attn_implementation == NAME:
        return kv_nope, k_rot
    expanded: tuple[Tensor, Tensor] = type(self).expand_kv(self, kv_nope, k_rot)
    return expanded


@cache
def with_our_function(stock: Any, name: str, ours: Callable[..., Any]) -> Callable[..., Any]:
    """The forward `stock`, in a copy of its globals where the function `name` is `ours`.

    Models look that function up when they run. A replacement in their file would change every model
    of the class in the process. The bytecode is the same.
    """
    scope = {**stock.__globals__, name: ours}
    # torch.compile guards a global through the importable module of this name. There it would find
    # the stock function and recompile for ever.
    scope.pop("__name__", None)
    forward = FunctionType(stock.__code__, scope, stock.__name__, stock.__defaults__, stock.__closure__)
    forward.__kwdefaults__ = stock.__kwdefaults__
    return forward
