"""What is called of other libraries: per op, functions of the same keyword arguments as the op.

What a user of the library makes once (a layout that it wants, a plan of the lengths) is made in the first call: outside the time.
"""

import importlib
import os
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


def module(name: str) -> Any:
    return importlib.import_module(name)


def kept(make: Callable[..., Any]) -> Callable[..., Any]:
    """Remembers what `make` made of its first argument, a tensor, for as long as that lives. The result must not be a view of it."""
    made = WeakTensorKeyDictionary()

    @wraps(make)
    def known(tensor: Tensor, *rest: Any) -> Any:
        if tensor not in made:
            made[tensor] = make(tensor, *rest)
        return made[tensor]

    return known


@kept
def wide(x: Tensor) -> Tensor:
    return x.clone() if x.dtype == torch.float32 else x.float()


@kept
def packed(x: Tensor) -> Tensor:
    """A contiguous copy."""
    return x.clone(memory_format=torch.contiguous_format)


# --- TileGym: its cuTile kernels, each tuned in its first call


def tilegym(op: str, *args: Any, **options: Any) -> Any:
    os.environ["DISABLE_FALLBACK"] = "1"  # read at each call: it raises where there is no cuTile kernel, and does not take another's
    return getattr(module("tilegym.ops"), op)(*args, backend="cutile", **options)


def tilegym_rms_norm(x, weight, eps, *, weight_offset=0.0, **unused):
    return tilegym("rms_norm", x, (x.shape[-1],), weight, eps, offset=weight_offset)


def tilegym_layer_norm(x, weight, bias, eps):
    return tilegym("persistent_layer_norm", x, (x.shape[-1],), weight, bias, eps)[0]


def tilegym_softmax(x):
    """By TMA, which it has for Hopper and later; in chunks, which it has for rows that are too long for one tile."""
    return tilegym("softmax", x, **({"use_tma": True} if x.shape[-1] <= 16_384 else {"use_chunked": True}))


def tilegym_silu_mul(gate, **unused):
    return tilegym("silu_and_mul", gate)


def tilegym_rope(q, k, cos, sin, **unused):
    return tilegym("apply_rope_base", q, k, cos, sin)


def tilegym_matmul(a, b, *, trans_a=False, trans_b=False, **unused):
    return tilegym("matmul", a, b, trans_a=trans_a, trans_b=trans_b, static_persistent=True)


def tilegym_bmm(a, b, *, trans_a=False, trans_b=False, **unused):
    return tilegym("bmm", a, b, transpose_a=trans_a, transpose_b=trans_b, static_persistent=True)


def tilegym_attention(q, k, v, *, causal=True, scale=None, **unused):
    return tilegym("fmha", packed(q), k, v, scaling=scale, is_causal=causal)  # it would make q contiguous in each call


def tilegym_decode(q, k, v, kv_len=None, *, scale=None, **unused):
    return tilegym("fmha_decode", q, k, v, sm_scale=scale)


def tilegym_mla(q_nope, q_rope, *, k_nope, k_rope, v, causal=True, scale=None, **unused):
    return tilegym("mla", q_nope, k_nope, v, q_rope, k_rope, is_causal=causal, scaling=scale)


def tilegym_mla_decode(q_latent, q_rope, cache, kv_len=None, *, scale, **unused):
    latent = q_latent.shape[3]
    return tilegym("mla_decoding_split_kv", q_latent[:, :, 0], q_rope[:, :, 0], cache[..., :latent], cache[..., latent:], sm_scale=scale)[:, :, None]


# --- Liger: the forward passes of its autograd functions


def liger(file: str, function: str, *args: Any) -> Any:
    return getattr(module(f"liger_kernel.ops.{file}"), function).apply(*args)


def liger_rms_norm(x, weight, eps, *, weight_offset=0.0, round_before_weight=False, residual=None):
    casting = "llama" if round_before_weight else "gemma"
    if residual is not None:
        return liger("fused_add_rms_norm", "LigerFusedAddRMSNormFunction", x, residual, weight, eps, weight_offset, casting, False)
    return liger("rms_norm", "LigerRMSNormFunction", x, weight, eps, weight_offset, casting, False)


def liger_layer_norm(x, weight, bias, eps):
    return liger("layer_norm", "LigerLayerNormFunction", x, weight, bias, eps)


def liger_softmax(x):
    return liger("softmax", "LigerSoftmaxFunction", x)


def liger_silu_mul(gate, up=None, *, gelu_tanh=False):
    if up is None:
        return liger("swiglu", "LigerFusedGateUpSiLUMulFunction", gate)
    return liger("geglu", "LigerGELUMulFunction", gate, up) if gelu_tanh else liger("swiglu", "LigerSiLUMulFunction", gate, up)


def liger_rope(q, k, cos, sin, **unused):
    return liger("rope", "LigerRopeFunction", q, k, packed(cos), packed(sin), None, 1, 2 * cos.shape[-1])


# --- quack


def quack_rms_norm(x, weight, eps, *, weight_offset=0.0, residual=None, **unused):
    return module("quack").rmsnorm(x, weight, residual=residual, eps=eps, prenorm=residual is not None, weight_offset=weight_offset)


def quack_layer_norm(x, weight, bias, eps):
    return module("quack.rmsnorm").layernorm_fwd(x, wide(weight), None if bias is None else wide(bias), eps)


def quack_softmax(x):
    return module("quack").softmax(x)


# --- DeepGEMM


@kept
def _tma_scales(scale: Tensor) -> Tensor:
    return module("deep_gemm").get_mn_major_tma_aligned_tensor(scale)


def deepgemm_matmul(a, b, *, scale_a, scale_b, **unused):
    out = torch.empty(a.shape[0], b.shape[0], dtype=torch.bfloat16, device=a.device)
    module("deep_gemm").fp8_gemm_nt((a, _tma_scales(scale_a)), (b, scale_b), out, disable_ue8m0_cast=True)
    return out
