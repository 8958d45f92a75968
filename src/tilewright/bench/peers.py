"""Who we are compared with: per op, functions of the same keyword arguments as the op.

They have the op's dtype and math mode. The `applies` of a peer leaves it out if the machine lacks
it or it does not take the problem. No peer is slowed down.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from ..ops import adjust_logits, argmax, layer_norm, quantize_mx, rms_norm_gated, silu_mul, softmax
from ..ops.common.scaling import FAST_SUM
from . import attention_peers as attention, linear_peers as linear, moe_peers as experts, mx_peers as mx, quantized_peers as quantized
from .inputs import Applies, Inputs, Result, all_of, kept, packed, without


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    call: Callable[..., Any]
    applies: Applies = lambda inputs: True


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile of the composition, one graph per shape (its best)."""
    compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def call(**inputs: Any) -> Any:
        key = tuple((v.shape, v.dtype) if isinstance(v, Tensor) else v for v in inputs.values())
        if key not in compiled:
            torch._dynamo.reset()
            compiled[key] = torch.compile(function, dynamic=False, fullgraph=True)
        return compiled[key](**inputs)

    return call


def _torch(function: Callable[..., Any], applies: Applies = lambda inputs: True) -> tuple[Peer, Peer]:
    return Peer("torch.eager", function, applies), Peer("torch.compile", _compiled(function), applies)


# --- norms, activations, rope: as transformers composes them, and torch's fused function if any


def _rms_norm(
    x: Tensor, weight: Tensor, eps: float = 1e-6, *, weight_offset: float = 0.0, round_before_weight: bool = False, residual: Tensor | None = None
) -> Result:
    if residual is not None:
        x = residual = x + residual
    h = x.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    h = weight * h.to(x.dtype) if round_before_weight else (h * (weight.float() + weight_offset)).to(x.dtype)
    return h if residual is None else (h, residual)


def _fused_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, **unused: Any) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _plain_rms_norm(inputs: Inputs) -> bool:
    return inputs.get("residual") is None and not inputs.get("weight_offset")


def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **unused: Any) -> Result:
    cos, sin = torch.cat((cos, cos), -1)[:, None], torch.cat((sin, sin), -1)[:, None]

    def turned(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

    return turned(q), turned(k)


def _llama_rope(inputs: Inputs) -> bool:
    cos = inputs.get("cos")
    return cos is not None and not inputs.get("interleaved") and 2 * cos.shape[-1] == inputs["q"].shape[-1]


# --- fp8 codes and scales: the composition, which torch.compile fuses as far as it can


def _quantize_fp8(
    x: Tensor, block: tuple[int, int], dtype: torch.dtype, power_of_two_scales: bool = False, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    largest, values = torch.finfo(dtype).max, x.float()
    if scale is not None:
        return (values * (1 / scale)).clamp(-largest, largest).to(dtype), scale
    rows, cols = values.shape
    high, wide = block[0] or rows, block[1] or cols
    groups = F.pad(values, (0, -cols % wide, 0, -rows % high)) if cols % wide or rows % high else values
    groups = groups.view(groups.shape[0] // high, high, groups.shape[1] // wide, wide)
    scale = groups.abs().amax((1, 3), keepdim=True).clamp(min=largest * 2.0**-126) / largest
    if power_of_two_scales:
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    codes = (groups * (1 / scale)).to(dtype).view(groups.shape[0] * high, -1)[:rows, :cols]
    return codes, scale.view(scale.shape[0], scale.shape[2])


def _rms_norm_quant(
    x: Tensor,
    weight: Tensor,
    eps: float = 1e-6,
    *,
    block: tuple[int, int],
    weight_offset: float = 0.0,
    round_before_weight: bool = False,
    residual: Tensor | None = None,
    dtype: torch.dtype,
    power_of_two_scales: bool = False,
) -> Result:
    if residual is not None:
        x = residual = x + residual
    h = x.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    if round_before_weight:
        h = h.to(x.dtype).float()
    found = _quantize_fp8(h * (weight.float() + weight_offset), block, dtype, power_of_two_scales)
    return found if residual is None else (*found, residual)


def _rms_norm_matmul(
    x: Tensor, weight: Tensor, b: Tensor, bias: Tensor | None = None, *, eps: float = 1e-6, residual: Tensor | None = None, silu_mul: bool = False
) -> Result:
    if residual is not None:
        x = residual = x + residual
    out = F.linear(F.rms_norm(x, weight.shape, weight, eps), b, bias)
    if silu_mul:
        out = F.silu(out[..., 0::2]) * out[..., 1::2]
    return out if residual is None else (out, residual)


def _silu_mul_quant(
    gate: Tensor, up: Tensor | None = None, *, gelu_tanh: bool = False, block: tuple[int, int], dtype: torch.dtype, power_of_two_scales: bool = False
) -> Result:
    if up is None:
        gate, up = gate.chunk(2, -1)
    return _quantize_fp8(silu_mul.reference(gate.float(), up.float(), gelu_tanh=gelu_tanh), block, dtype, power_of_two_scales)


# --- matmul


def _cublas(a: Tensor, b: Tensor, bias: Tensor | None = None, *, trans_a: bool = False, trans_b: bool = False, tf32: bool = False) -> Tensor:
    a, b = a.mT if trans_a else a, b.mT if trans_b else b
    torch.backends.cuda.matmul.allow_tf32 = tf32
    if bias is None:
        return torch.matmul(a, b)
    return torch.addmm(bias, a, b)


def _cublas_bmm(a: Tensor, b: Tensor, *, trans_a: bool = False, trans_b: bool = False, **unused: Any) -> Tensor:
    return torch.matmul(a.mT if trans_a else a, b.mT if trans_b else b)


def _plain_bmm(inputs: Inputs) -> bool:
    return inputs["scale_a"] is None and inputs["out_dtype"] in (None, inputs["a"].dtype)


_nothing_behind = without("residual", "silu_mul", "out_scale", "out_dtype")


def _plain_matmul(inputs: Inputs) -> bool:
    return inputs["a"].dtype.itemsize > 1 and _nothing_behind(inputs)


def _scaled_mm(a: Tensor, b: Tensor, bias: Tensor | None = None, *, trans_b: bool = False, scale_a: Tensor, scale_b: Tensor, **unused: Any) -> Tensor:
    if scale_a.dim() == 1:
        scale_a, scale_b = scale_a[:, None], scale_b[None]
    elif scale_a.dim() == 2:
        scale_b = packed(scale_b).mT  # the layout that cuBLAS takes
    # With sums of 14 bits, its faster mode, if ours uses them.
    fast = (scale_a.dim() < 2 or scale_a.shape[1] == 1) and a.shape[1] <= FAST_SUM
    return torch._scaled_mm(a, b.mT, scale_a, scale_b, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=fast)


def _scaled_matmul(inputs: Inputs) -> bool:
    return inputs["a"].dtype is torch.float8_e4m3fn and bool(inputs.get("trans_b")) and _nothing_behind(inputs)


@kept
def _used_rows(a: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The used rows of each group packed, and where each group ends."""
    return torch.cat([a[group, :count] for group, count in enumerate(counts.tolist())]), counts.cumsum(0, dtype=torch.int32)


def _grouped_mm(a: Tensor, b: Tensor, offsets: Tensor | None = None, counts: Tensor | None = None, *, trans_b: bool = False, **unused: Any) -> Tensor:
    if counts is not None:  # it has no masked form
        a, offsets = _used_rows(a, counts)
    return torch._grouped_mm(a, b.mT if trans_b else b, offs=offsets)


def _plain_grouped_gemm(inputs: Inputs) -> bool:
    return inputs["a"].dtype is torch.bfloat16 and inputs["out_dtype"] in (None, torch.bfloat16)


# --- dropout, embedding, sampling


def _dropout(x: Tensor, p: float, seed: Tensor, offset: Tensor | None = None) -> Tensor:
    return F.dropout(x, p, training=True)


def _embedding(ids: Tensor, weight: Tensor, *, scale: float = 1.0) -> Tensor:
    rows = F.embedding(ids, weight)
    return rows if scale == 1.0 else rows * scale


def _sample(
    logits: Tensor,
    seed: Tensor,
    offset: Tensor | None = None,
    *,
    temperature: Tensor | None = None,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Tensor:
    """Sort, cut off, and draw by exponentials, as engines compose it for parameters in tensors."""
    x = logits.float()
    if temperature is not None:
        x = x / temperature.reshape(-1, 1)
    if top_k is not None or top_p is not None:
        rising, order = x.sort(-1)
        if top_k is not None:
            kth = rising.gather(-1, (x.shape[-1] - top_k.reshape(-1, 1).long()).expand(len(x), 1))
            rising = rising.masked_fill(rising < kth, -torch.inf)
        if top_p is not None:
            below = rising.softmax(-1).cumsum(-1) <= 1 - top_p.reshape(-1, 1)
            below[:, -1] = False
            rising = rising.masked_fill(below, -torch.inf)
        x = torch.empty_like(x).scatter_(-1, order, rising)
    if min_p is not None:
        x = x.masked_fill(x < x.amax(-1, keepdim=True) + min_p.reshape(-1, 1).log(), -torch.inf)
    return (x.softmax(-1) / torch.empty_like(x).exponential_()).argmax(-1)


PEERS: dict[str, tuple[Peer, ...]] = {
    "rms_norm": (
        Peer("torch.eager", _fused_rms_norm, _plain_rms_norm),
        Peer("torch.eager", _rms_norm, lambda inputs: not _plain_rms_norm(inputs)),
        Peer("torch.compile", _compiled(_rms_norm)),
    ),
    "rope": _torch(_rope, _llama_rope),
    "silu_mul": _torch(silu_mul.reference),
    "quantize_fp8": (Peer("torch.compile", _compiled(_quantize_fp8)),),
    "quantize_mx": (Peer("torch.compile", _compiled(quantize_mx.reference)),),
    "rms_norm_matmul": _torch(_rms_norm_matmul),
    "rms_norm_quant": (Peer("torch.compile", _compiled(_rms_norm_quant)),),
    "silu_mul_quant": (Peer("torch.compile", _compiled(_silu_mul_quant)),),
    "softmax": _torch(softmax.reference),
    "dropout": _torch(_dropout),
    "layer_norm": _torch(layer_norm.reference),
    "embedding": _torch(_embedding),
    "argmax": _torch(argmax.reference),
    "sample": _torch(_sample),
    "adjust_logits": _torch(adjust_logits.reference),
    "matmul": (Peer("cublas", _cublas, _plain_matmul), Peer("scaled_mm", _scaled_mm, _scaled_matmul)),
    "quantized_matmul": (
        Peer("cublas", quantized.cublas, quantized.alone),
        Peer("matmul", quantized.matmul, quantized.alone),
        Peer("int4pack_mm", quantized.int4pack_mm, quantized.takes_int4pack),
    ),
    "mx_matmul": (Peer("scaled_mm", mx.scaled_mm, mx.block_scaled), Peer("cublas", mx.cublas, mx.plain)),
    "bmm": (Peer("cublas", _cublas_bmm, _plain_bmm),),
    "grouped_gemm": (Peer("grouped_mm", _grouped_mm, _plain_grouped_gemm),),
    "moe_route": _torch(experts.moe_route),
    "rms_norm_route": _torch(experts.rms_norm_route),
    "moe": (
        Peer("grouped_mm", partial(experts.moe, grouped=True), experts.plain_moe),
        # It copies the weights of each choice: 16 tokens of Mixtral would need 11 GB for that.
        Peer("transformers", partial(experts.moe, grouped=False), lambda inputs: experts.plain_moe(inputs) and len(inputs["x"]) <= 16),
    ),
    "attention": (
        Peer("cudnn", attention.sdpa(SDPBackend.CUDNN_ATTENTION), attention.plain_attention),
        Peer("sdpa", attention.sdpa(SDPBackend.FLASH_ATTENTION), attention.plain_attention),
        Peer("flex_attention", attention.flex_attention, attention.flexible_attention),
    ),
    "mla": (Peer("cudnn", attention.sdpa_mla, attention.plain_mla),),
    "kv_append": (Peer("torch.compile", _compiled(attention.kv_append), lambda inputs: bool((inputs["positions"] >= 0).all())),),
    "attention_decode": (
        Peer("sdpa", attention.sdpa_decode(SDPBackend.FLASH_ATTENTION), attention.sdpa_takes),
        Peer("cudnn", attention.sdpa_decode(SDPBackend.CUDNN_ATTENTION), attention.sdpa_takes),
        Peer("sdpa", attention.rows_decode(attention.fused), attention.many_columns),
        Peer("cublas", attention.rows_decode(attention.two_products), attention.many_columns),
        Peer("flex_attention", attention.flex_decode, lambda inputs: attention.full_cache(inputs) and not attention.one_token(inputs)),
    ),
    "mla_decode": (
        Peer("sdpa", attention.mla_as_decode(attention.rows_decode(attention.fused)), attention.plain_mla_decode),
        Peer("cublas", attention.mla_as_decode(attention.rows_decode(attention.two_products)), attention.plain_mla_decode),
    ),
    "sparse_decode": (
        # It widens all of an 8-bit cache.
        Peer("torch.eager", attention.sparse_decode, lambda inputs: attention.plain_sparse_decode(inputs) and inputs["cache"].dtype != torch.uint8),
        Peer("torch.compile", _compiled(attention.sparse_decode), attention.plain_sparse_decode),
    ),
    "sparse_index": (
        Peer("torch.eager", attention.sparse_index, attention.plain_sparse_index),
        Peer("torch.compile", _compiled(attention.sparse_index), attention.plain_sparse_index),
    ),
    "merge_states": _torch(attention.merge_states),
    "gated_delta_rule": (
        Peer("torch.eager", linear.chunked, all_of(linear.prompts, linear.one_decay)),
        Peer("torch.compile", _compiled(linear.recurrent), linear.one_token),
    ),
    "ssd": (
        Peer("torch.eager", linear.ssd_chunked, all_of(linear.prompts, without("state_rows"))),
        Peer("torch.compile", _compiled(linear.ssd_one), all_of(linear.one_token, without("state_rows"))),
    ),
    "causal_conv1d": _torch(linear.causal_conv1d, without("cu_seqlens")),
    "rms_norm_gated": _torch(rms_norm_gated.reference),
}


def peers_of(op: str, inputs: Inputs) -> list[Peer]:
    """The peers that take these inputs, one per name."""
    found: dict[str, Peer] = {}
    for peer in PEERS.get(op, ()):
        if peer.name not in found and peer.applies(inputs):
            found[peer.name] = peer
    return list(found.values())
