"""Who we are compared with: per op, functions of the same keyword arguments as the op, in the same dtype and math mode.

A peer that a machine lacks, or that does not take the problem, is left out by its `applies`; it is never slowed down.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from ..ops.scaling import FAST_SUM
from .attention_peers import (
    Inputs,
    bmm_decode,
    flex_attention,
    flex_decode,
    flexible_attention,
    full_cache,
    kv_append,
    many_columns,
    merge_states,
    mla_as_decode,
    one_token,
    plain_attention,
    plain_mla,
    plain_mla_decode,
    plain_sparse_decode,
    sdpa,
    sdpa_decode,
    sdpa_mla,
    sdpa_rows_decode,
    sdpa_takes,
    sparse_decode,
)


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


# --- fp8 codes and scales: the composition, which torch.compile fuses as far as it can


def _codes(values, block, dtype, power_of_two_scales, scale=None):
    largest = torch.finfo(dtype).max
    if scale is not None:
        return (values.float() * (1 / scale)).clamp(-largest, largest).to(dtype), scale
    values = values.float()
    rows, cols = values.shape
    high, wide = block[0] or rows, block[1] or cols
    groups = F.pad(values, (0, -cols % wide, 0, -rows % high)) if cols % wide or rows % high else values
    groups = groups.view(groups.shape[0] // high, high, groups.shape[1] // wide, wide)
    scale = groups.abs().amax((1, 3), keepdim=True).clamp(min=largest * 2.0**-126) / largest
    if power_of_two_scales:
        scale = ((scale.view(torch.int32) + 0x7FFFFF) & 0x7F800000).view(torch.float32)
    codes = (groups * (1 / scale)).to(dtype).view(groups.shape[0] * high, -1)[:rows, :cols]
    return codes, scale.view(scale.shape[0], scale.shape[2])


def _quantize_fp8(x, *, block, dtype, power_of_two_scales=False, scale=None):
    return _codes(x, block, dtype, power_of_two_scales, scale)


def _rms_norm_quant(
    x, weight, eps=1e-6, *, block, weight_offset=0.0, round_before_weight=False, residual=None, dtype=None, power_of_two_scales=False
):
    if residual is not None:
        x = residual = x + residual
    h = x.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    if round_before_weight:
        h = h.to(x.dtype).float()
    found = _codes(h * (weight.float() + weight_offset), block, dtype, power_of_two_scales)
    return found if residual is None else (*found, residual)


def _rms_norm_matmul(x, weight, b, bias=None, *, eps=1e-6, residual=None, silu_mul=False):
    if residual is not None:
        x = residual = x + residual
    out = F.linear(F.rms_norm(x, weight.shape, weight, eps), b, bias)
    if silu_mul:
        out = F.silu(out[..., 0::2]) * out[..., 1::2]
    return out if residual is None else (out, residual)


def _silu_mul_quant(gate, up=None, *, gelu_tanh=False, block, dtype, power_of_two_scales=False):
    if up is None:
        gate, up = gate.chunk(2, -1)
    return _codes(_silu_mul(gate.float(), up.float(), gelu_tanh=gelu_tanh), block, dtype, power_of_two_scales)


# --- matmul


def _cublas(a, b, bias=None, *, trans_a=False, trans_b=False, tf32=False):
    a, b = a.mT if trans_a else a, b.mT if trans_b else b
    torch.backends.cuda.matmul.allow_tf32 = tf32
    if bias is None:
        return torch.matmul(a, b)
    return torch.addmm(bias, a, b)


def _cublas_bmm(a, b, *, trans_a=False, trans_b=False, **unused):
    return torch.matmul(a.mT if trans_a else a, b.mT if trans_b else b)


def _plain_bmm(inputs: Inputs) -> bool:
    return inputs["scale_a"] is None and inputs["out_dtype"] in (None, inputs["a"].dtype)


_packed: dict[int, tuple[Tensor, Tensor, Tensor]] = {}


def _plain_matmul(inputs: Inputs) -> bool:
    return inputs["a"].dtype.itemsize > 1 and not any(inputs.get(name) is not None for name in ("residual", "silu_mul", "out_scale", "out_dtype"))


@lru_cache(maxsize=128)
def _inner_groups(scale: Tensor) -> Tensor:
    """Block scales of b in the layout that cuBLAS takes, made once."""
    return scale.contiguous()


def _scaled_mm(a, b, bias=None, *, trans_b=False, scale_a, scale_b, **unused):
    if scale_a.dim() == 1:
        scale_a, scale_b = scale_a[:, None], scale_b[None]
    elif scale_a.dim() == 2:
        scale_b = _inner_groups(scale_b).mT
    # With sums of 14 bits, its faster mode, where ours has them.
    fast = (scale_a.dim() < 2 or scale_a.shape[1] == 1) and a.shape[1] <= FAST_SUM
    return torch._scaled_mm(a, b.mT, scale_a, scale_b, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=fast)


def _scaled_matmul(inputs: Inputs) -> bool:
    behind = ("residual", "silu_mul", "out_scale", "out_dtype")
    return inputs["a"].dtype is torch.float8_e4m3fn and bool(inputs.get("trans_b")) and not any(inputs.get(name) is not None for name in behind)


def _grouped_mm(a, b, offsets=None, counts=None, *, trans_b=False, **unused):
    if counts is not None:  # it has no masked form: it gets the used rows packed, once and outside the time that is measured
        known = _packed.get(a.data_ptr())
        if known is None or known[0] is not a:
            if len(_packed) >= 64:
                _packed.clear()
            rows = torch.cat([a[group, :count] for group, count in enumerate(counts.tolist())])
            known = _packed[a.data_ptr()] = a, rows, counts.cumsum(0, dtype=torch.int32)
        _, a, offsets = known
    return torch._grouped_mm(a, b.mT if trans_b else b, offs=offsets)


def _plain_grouped_gemm(inputs: Inputs) -> bool:
    return inputs["a"].dtype is torch.bfloat16 and inputs["out_dtype"] in (None, torch.bfloat16)


# --- dropout, embedding, sampling


def _dropout(x, p, seed, offset=None):
    return F.dropout(x, p, training=True)


def _layer_norm(x, weight=None, bias=None, eps=1e-5):
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def _embedding(ids, weight, *, scale=1.0):
    rows = F.embedding(ids, weight)
    return rows if scale == 1.0 else rows * scale


def _sample(logits, seed, offset=None, *, temperature=None, top_k=None, top_p=None):
    """Sort, cut, and the race of exponentials: as inference engines compose it where parameters are tensors."""
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
    return (x.softmax(-1) / torch.empty_like(x).exponential_()).argmax(-1)


# --- mixtures of experts


def _moe_route(logits, top_k, *, sigmoid=False, bias=None, normalize=True, scale=1.0, groups=0, top_groups=0, first_expert=0):
    """As transformers' models compose it."""
    scores = logits.float().sigmoid() if sigmoid else logits.float().softmax(-1)
    chosen_by = scores if bias is None else scores + bias
    if groups:
        each = chosen_by.unflatten(-1, (groups, -1))
        best = each.amax(-1) if bias is None else each.topk(2, -1).values.sum(-1)
        kept = torch.zeros_like(best).scatter_(-1, best.topk(top_groups, -1, sorted=False).indices, 1.0)
        chosen_by = each.masked_fill(kept[..., None] == 0, 0.0).flatten(-2)
    ids = chosen_by.topk(top_k, -1).indices
    weights = scores.gather(-1, ids)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, ids.int() - first_expert


def _rms_norm_route(x, weight, router, top_k, *, eps=1e-6, round_before_weight=False, residual=None, router_bias=None, **choice):
    if residual is not None:
        x = residual = x + residual
    h = F.rms_norm(x, weight.shape, weight, eps)
    return *_moe_route(F.linear(h.float(), router.float(), None if router_bias is None else router_bias.float()), top_k, **choice), h, residual


def _expert_act(both, alpha, limit, up_offset):
    gate, up = both.chunk(2, -1)
    if (alpha, limit, up_offset) == (1.0, None, 0.0):
        return F.silu(gate) * up
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + up_offset)


def _plus(y, bias, experts):
    return y if bias is None else y + bias[experts]


def _grouped_moe(x, gate_up, down, *, weights, ids, alpha, limit, up_offset, bias_gate_up=None, bias_down=None, **unused):
    """As transformers' experts with grouped products: sorted by expert, two products, back in the order of the tokens, summed."""
    top_k = ids.shape[1]
    flat = ids.reshape(-1)
    order = flat.argsort()
    offsets = torch.histc(flat[order].float(), bins=len(down), min=0, max=len(down) - 1).cumsum(0, dtype=torch.int32)
    both = _plus(torch._grouped_mm(x[order // top_k], gate_up.mT, offs=offsets), bias_gate_up, flat[order])
    y = _plus(torch._grouped_mm(_expert_act(both, alpha, limit, up_offset), down.mT, offs=offsets), bias_down, flat[order])
    y = y * weights.reshape(-1)[order, None]
    return y[order.argsort()].view(*ids.shape, -1).sum(1).to(x.dtype)


def _batched_moe(x, gate_up, down, *, weights, ids, alpha, limit, up_offset, bias_gate_up=None, bias_down=None, **unused):
    """As transformers' experts with batched products: the chosen weights, copied for each token."""
    flat = ids.reshape(-1)
    rows = x.repeat_interleave(ids.shape[1], 0)
    both = _plus(torch.bmm(gate_up[flat], rows[..., None])[..., 0], bias_gate_up, flat)
    y = _plus(torch.bmm(down[flat], _expert_act(both, alpha, limit, up_offset)[..., None])[..., 0], bias_down, flat)
    y = y * weights.reshape(-1, 1)
    return y.view(*ids.shape, -1).sum(1).to(x.dtype)


def _plain_moe(inputs: Inputs) -> bool:
    plain = inputs["scale_down"] is None and inputs.get("shared_down") is None
    return plain and inputs["x"].dtype is torch.bfloat16 and all(n % 8 == 0 for n in inputs["down"].shape[1:])


PEERS: dict[str, tuple[Peer, ...]] = {
    "rms_norm": (
        Peer("torch.eager", _fused_rms_norm, _plain_rms_norm),
        Peer("torch.eager", _rms_norm, lambda inputs: not _plain_rms_norm(inputs)),
        Peer("torch.compile", _compiled(_rms_norm)),
    ),
    "rope": (Peer("torch.eager", _rope, _llama_rope), Peer("torch.compile", _compiled(_rope), _llama_rope)),
    "silu_mul": (Peer("torch.eager", _silu_mul), Peer("torch.compile", _compiled(_silu_mul))),
    "quantize_fp8": (Peer("torch.compile", _compiled(_quantize_fp8)),),
    "rms_norm_matmul": (Peer("torch.eager", _rms_norm_matmul), Peer("torch.compile", _compiled(_rms_norm_matmul))),
    "rms_norm_quant": (Peer("torch.compile", _compiled(_rms_norm_quant)),),
    "silu_mul_quant": (Peer("torch.compile", _compiled(_silu_mul_quant)),),
    "softmax": (
        Peer("torch.eager", lambda x: torch.softmax(x, -1)),
        Peer("torch.compile", _compiled(lambda x: torch.softmax(x, -1))),
    ),
    "dropout": (Peer("torch.eager", _dropout), Peer("torch.compile", _compiled(_dropout))),
    "layer_norm": (Peer("torch.eager", _layer_norm), Peer("torch.compile", _compiled(_layer_norm))),
    "embedding": (Peer("torch.eager", _embedding), Peer("torch.compile", _compiled(_embedding))),
    "argmax": (Peer("torch.eager", lambda x: x.argmax(-1)), Peer("torch.compile", _compiled(lambda x: x.argmax(-1)))),
    "sample": (Peer("torch.eager", _sample), Peer("torch.compile", _compiled(_sample))),
    "matmul": (Peer("cublas", _cublas, _plain_matmul), Peer("scaled_mm", _scaled_mm, _scaled_matmul)),
    "bmm": (Peer("cublas", _cublas_bmm, _plain_bmm),),
    "grouped_gemm": (Peer("grouped_mm", _grouped_mm, _plain_grouped_gemm),),
    "moe_route": (Peer("torch.eager", _moe_route), Peer("torch.compile", _compiled(_moe_route))),
    "rms_norm_route": (Peer("torch.eager", _rms_norm_route), Peer("torch.compile", _compiled(_rms_norm_route))),
    "moe": (
        Peer("grouped_mm", _grouped_moe, _plain_moe),
        # It copies the weights of each choice: 16 tokens of Mixtral would need 11 GB for that.
        Peer("transformers", _batched_moe, lambda inputs: _plain_moe(inputs) and len(inputs["x"]) <= 16),
    ),
    "attention": (
        Peer("cudnn", sdpa(SDPBackend.CUDNN_ATTENTION), plain_attention),
        Peer("sdpa", sdpa(SDPBackend.FLASH_ATTENTION), plain_attention),
        Peer("flex_attention", flex_attention, flexible_attention),
    ),
    "mla": (Peer("cudnn", sdpa_mla, plain_mla),),
    "kv_append": (Peer("torch.compile", _compiled(kv_append), lambda inputs: bool((inputs["positions"] >= 0).all())),),
    "attention_decode": (
        Peer("sdpa", sdpa_decode(SDPBackend.FLASH_ATTENTION), sdpa_takes),
        Peer("cudnn", sdpa_decode(SDPBackend.CUDNN_ATTENTION), sdpa_takes),
        Peer("sdpa", sdpa_rows_decode, many_columns),
        Peer("cublas", bmm_decode, many_columns),
        Peer("flex_attention", flex_decode, lambda inputs: full_cache(inputs) and not one_token(inputs)),
    ),
    "mla_decode": (
        Peer("sdpa", mla_as_decode(sdpa_rows_decode), plain_mla_decode),
        Peer("cublas", mla_as_decode(bmm_decode), plain_mla_decode),
    ),
    "sparse_decode": (
        # It widens the whole of an 8-bit cache.
        Peer("torch.eager", sparse_decode, lambda inputs: plain_sparse_decode(inputs) and inputs["cache"].dtype != torch.uint8),
        Peer("torch.compile", _compiled(sparse_decode), plain_sparse_decode),
    ),
    "merge_states": (Peer("torch.eager", merge_states), Peer("torch.compile", _compiled(merge_states))),
}


def peers_of(op: str, inputs: Inputs) -> list[Peer]:
    """The peers that take these inputs, one per name."""
    found: dict[str, Peer] = {}
    for peer in PEERS.get(op, ()):
        if peer.name not in found and peer.applies(inputs):
            found[peer.name] = peer
    return list(found.values())
