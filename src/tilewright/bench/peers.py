"""Who we are compared with: per op, functions of the same keyword arguments as the op, in the same dtype and math mode.

A peer that a machine lacks, or that does not take the problem, is left out by its `applies`; it is never slowed down.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Inputs = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    call: Callable[..., Any]
    applies: Callable[[Inputs], bool] = lambda inputs: True


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile of the composition, one graph per shape (its best)."""
    compiled: dict[tuple, Callable[..., Any]] = {}

    def call(**inputs):
        key = tuple((v.shape, v.dtype) if isinstance(v, Tensor) else v for v in inputs.values())
        if key not in compiled:
            torch._dynamo.reset()
            compiled[key] = torch.compile(function, dynamic=False, fullgraph=True)
        return compiled[key](**inputs)

    return call


# --- norms, activations, rope: composed as transformers does, and the fused torch function where there is one


def _rms_norm(x, weight, eps=1e-6, *, weight_offset=0.0, round_before_weight=False, residual=None):
    if residual is not None:
        x = residual = x + residual
    h = x.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    h = weight * h.to(x.dtype) if round_before_weight else (h * (weight.float() + weight_offset)).to(x.dtype)
    return h if residual is None else (h, residual)


def _fused_rms_norm(x, weight, eps=1e-6, **unused):
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _plain_rms_norm(inputs: Inputs) -> bool:
    return inputs.get("residual") is None and not inputs.get("weight_offset")


def _silu_mul(gate, up=None, *, gelu_tanh=False):
    if up is None:
        gate, up = gate.chunk(2, -1)
    return (F.gelu(gate, approximate="tanh") if gelu_tanh else F.silu(gate)) * up


def _rope(q, k, cos=None, sin=None, *, positions=None, inv_freq=None, scaling=1.0, interleaved=False):
    cos, sin = torch.cat((cos, cos), -1)[:, None], torch.cat((sin, sin), -1)[:, None]

    def turned(x):
        half = x.shape[-1] // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

    return turned(q), turned(k)


def _llama_rope(inputs: Inputs) -> bool:
    cos = inputs.get("cos")
    return cos is not None and not inputs.get("interleaved") and 2 * cos.shape[-1] == inputs["q"].shape[-1]


# --- matmul


def _cublas(a, b, bias=None, *, trans_a=False, trans_b=False, tf32=False):
    a, b = a.mT if trans_a else a, b.mT if trans_b else b
    torch.backends.cuda.matmul.allow_tf32 = tf32
    if bias is None:
        return torch.matmul(a, b)
    return torch.addmm(bias, a, b)


# --- attention


def _sdpa(backend: SDPBackend | None) -> Callable[..., Any]:
    def call(q, k, v, *, causal=True, scale=None, **unused):
        grouped = q.shape[1] != k.shape[1]
        if backend is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)

    return call


def _plain_attention(inputs: Inputs) -> bool:
    extras = ("window", "kv_start", "kv_len", "cu_seqlens_q", "return_lse")
    square = inputs["q"].dim() == 4 and (not inputs.get("causal", True) or inputs["q"].shape[2] == inputs["k"].shape[2])
    return square and not any(inputs.get(name) is not None and inputs.get(name) is not False for name in extras)


def _sdpa_decode(backend: SDPBackend | None) -> Callable[..., Any]:
    def call(q, k, v, kv_len=None, *, scale=None, **unused):
        if backend is None:
            return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True)

    return call


def _full_cache(inputs: Inputs) -> bool:
    return all(inputs.get(name) is None for name in ("block_table", "kv_start", "window")) and not inputs.get("return_lse")


PEERS: dict[str, tuple[Peer, ...]] = {
    "rms_norm": (
        Peer("torch.eager", _fused_rms_norm, _plain_rms_norm),
        Peer("torch.eager", _rms_norm, lambda inputs: not _plain_rms_norm(inputs)),
        Peer("torch.compile", _compiled(_rms_norm)),
    ),
    "rope": (Peer("torch.eager", _rope, _llama_rope), Peer("torch.compile", _compiled(_rope), _llama_rope)),
    "silu_mul": (Peer("torch.eager", _silu_mul), Peer("torch.compile", _compiled(_silu_mul))),
    "softmax": (
        Peer("torch.eager", lambda x: torch.softmax(x, -1)),
        Peer("torch.compile", _compiled(lambda x: torch.softmax(x, -1))),
    ),
    "matmul": (Peer("cublas", _cublas),),
    "attention": (
        Peer("cudnn", _sdpa(SDPBackend.CUDNN_ATTENTION), _plain_attention),
        Peer("sdpa", _sdpa(SDPBackend.FLASH_ATTENTION), _plain_attention),
    ),
    "attention_decode": (
        Peer("sdpa", _sdpa_decode(SDPBackend.FLASH_ATTENTION), _full_cache),
        Peer("cudnn", _sdpa_decode(SDPBackend.CUDNN_ATTENTION), _full_cache),
    ),
}


def peers_of(op: str, inputs: Inputs) -> list[Peer]:
    """The peers that take these inputs, one per name."""
    found: dict[str, Peer] = {}
    for peer in PEERS.get(op, ()):
        if peer.name not in found and peer.applies(inputs):
            found[peer.name] = peer
    return list(found.values())
