"""How other libraries are called: for each op, functions with its keyword arguments.

What a user of the library makes once (a layout that it wants, a plan for the lengths) is made in
the first call, which is not timed.
"""

import importlib
import os
from typing import Any

import torch
from torch import Tensor

from .inputs import kept, packed


def module(name: str) -> Any:
    return importlib.import_module(name)


@kept
def wide(x: Tensor) -> Tensor:
    return x.clone() if x.dtype == torch.float32 else x.float()


# --- TileGym: its cuTile kernels, each tuned in its first call


def tilegym(op: str, *args: Any, **options: Any) -> Any:
    os.environ["DISABLE_FALLBACK"] = "1"  # read at each call: raises if there is no cuTile kernel, rather than take another one
    return getattr(module("tilegym.ops"), op)(*args, backend="cutile", **options)


def tilegym_rms_norm(x: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0, **unused: Any) -> Any:
    return tilegym("rms_norm", x, (x.shape[-1],), weight, eps, offset=weight_offset)


def tilegym_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Any:
    return tilegym("persistent_layer_norm", x, (x.shape[-1],), weight, bias, eps)[0]


def tilegym_softmax(x: Tensor) -> Any:
    """By TMA, which it has for Hopper and later; in chunks where a row is too long for one tile."""
    return tilegym("softmax", x, **({"use_tma": True} if x.shape[-1] <= 16_384 else {"use_chunked": True}))


def tilegym_silu_mul(gate: Tensor, **unused: Any) -> Any:
    return tilegym("silu_and_mul", gate)


def tilegym_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **unused: Any) -> Any:
    return tilegym("apply_rope_base", q, k, cos, sin)


def tilegym_matmul(a: Tensor, b: Tensor, *, trans_a: bool = False, trans_b: bool = False, **unused: Any) -> Any:
    return tilegym("matmul", a, b, trans_a=trans_a, trans_b=trans_b, static_persistent=True)


def tilegym_bmm(a: Tensor, b: Tensor, *, trans_a: bool = False, trans_b: bool = False, **unused: Any) -> Any:
    return tilegym("bmm", a, b, transpose_a=trans_a, transpose_b=trans_b, static_persistent=True)


def tilegym_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None, **unused: Any) -> Any:
    return tilegym("fmha", packed(q), k, v, scaling=scale, is_causal=causal)  # it would make q contiguous in each call


def tilegym_decode(q: Tensor, k: Tensor, v: Tensor, kv_len: Tensor | None = None, *, scale: float | None = None, **unused: Any) -> Any:
    return tilegym("fmha_decode", q, k, v, sm_scale=scale)


def tilegym_mla(
    q_nope: Tensor, q_rope: Tensor, *, k_nope: Tensor, k_rope: Tensor, v: Tensor, causal: bool = True, scale: float | None = None, **unused: Any
) -> Any:
    return tilegym("mla", q_nope, k_nope, v, q_rope, k_rope, is_causal=causal, scaling=scale)


def tilegym_mla_decode(q_latent: Tensor, q_rope: Tensor, cache: Tensor, kv_len: Tensor | None = None, *, scale: float, **unused: Any) -> Any:
    latent = q_latent.shape[3]
    return tilegym("mla_decoding_split_kv", q_latent[:, :, 0], q_rope[:, :, 0], cache[..., :latent], cache[..., latent:], sm_scale=scale)[:, :, None]


# --- Liger: the forward passes of its autograd functions


def liger(file: str, function: str, *args: Any) -> Any:
    return getattr(module(f"liger_kernel.ops.{file}"), function).apply(*args)


def liger_rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0, round_before_weight: bool = False, residual: Tensor | None = None
) -> Any:
    casting = "llama" if round_before_weight else "gemma"
    if residual is not None:
        return liger("fused_add_rms_norm", "LigerFusedAddRMSNormFunction", x, residual, weight, eps, weight_offset, casting, False)
    return liger("rms_norm", "LigerRMSNormFunction", x, weight, eps, weight_offset, casting, False)


def liger_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Any:
    return liger("layer_norm", "LigerLayerNormFunction", x, weight, bias, eps)


def liger_softmax(x: Tensor) -> Any:
    return liger("softmax", "LigerSoftmaxFunction", x)


def liger_silu_mul(gate: Tensor, up: Tensor | None = None, *, gelu_tanh: bool = False) -> Any:
    if up is None:
        return liger("swiglu", "LigerFusedGateUpSiLUMulFunction", gate)
    return liger("geglu", "LigerGELUMulFunction", gate, up) if gelu_tanh else liger("swiglu", "LigerSiLUMulFunction", gate, up)


def liger_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **unused: Any) -> Any:
    return liger("rope", "LigerRopeFunction", q, k, packed(cos), packed(sin), None, 1, 2 * cos.shape[-1])


# --- quack


def quack_rms_norm(x: Tensor, weight: Tensor, eps: float, *, weight_offset: float = 0.0, residual: Tensor | None = None, **unused: Any) -> Any:
    return module("quack").rmsnorm(x, weight, residual=residual, eps=eps, prenorm=residual is not None, weight_offset=weight_offset)


def quack_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Any:
    return module("quack.rmsnorm").layernorm_fwd(x, wide(weight), None if bias is None else wide(bias), eps)


def quack_softmax(x: Tensor) -> Any:
    return module("quack").softmax(x)


# --- DeepGEMM


@kept
def _tma_scales(scale: Tensor) -> Tensor:
    aligned: Tensor = module("deep_gemm").get_mn_major_tma_aligned_tensor(scale)
    return aligned


def deepgemm_matmul(a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, **unused: Any) -> Any:
    out = torch.empty(a.shape[0], b.shape[0], dtype=torch.bfloat16, device=a.device)
    module("deep_gemm").fp8_gemm_nt((a, _tma_scales(scale_a)), (b, scale_b), out, disable_ue8m0_cast=True)
    return out
