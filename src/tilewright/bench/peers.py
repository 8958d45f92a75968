"""Who we are compared with: per op, functions of the same keyword arguments as the op.

They have the op's dtype and math mode. A peer that a machine lacks, or that does not take the
problem, is left out by its `applies`; it is never slowed down.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from ..ops.common.scaling import FAST_SUM
from .attention_peers import (
    Inputs,
    Result,
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
from .moe_peers import batched_moe, grouped_moe, moe_route, plain_moe, rms_norm_route


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    call: Callable[..., Any]
    applies: Callable[[Inputs], bool] = lambda inputs: True


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


def _silu_mul(gate: Tensor, up: Tensor | None = None, *, gelu_tanh: bool = False) -> Tensor:
    if up is None:
        gate, up = gate.chunk(2, -1)
    return (F.gelu(gate, approximate="tanh") if gelu_tanh else F.silu(gate)) * up


def _rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    positions: Tensor | None = None,
    inv_freq: Tensor | None = None,
    scaling: float = 1.0,
    interleaved: bool = False,
) -> Result:
    cos, sin = torch.cat((cos, cos), -1)[:, None], torch.cat((sin, sin), -1)[:, None]

    def turned(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

    return turned(q), turned(k)


def _llama_rope(inputs: Inputs) -> bool:
    cos = inputs.get("cos")
    return cos is not None and not inputs.get("interleaved") and 2 * cos.shape[-1] == inputs["q"].shape[-1]


# --- fp8 codes and scales: the composition, which torch.compile fuses as far as it can


def _codes(
    values: Tensor, block: tuple[int, int], dtype: torch.dtype, power_of_two_scales: bool, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
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


def _quantize_fp8(x: Tensor, *, block: tuple[int, int], dtype: torch.dtype, power_of_two_scales: bool = False, scale: Tensor | None = None) -> Result:
    return _codes(x, block, dtype, power_of_two_scales, scale)


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
    found = _codes(h * (weight.float() + weight_offset), block, dtype, power_of_two_scales)
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
    return _codes(_silu_mul(gate.float(), up.float(), gelu_tanh=gelu_tanh), block, dtype, power_of_two_scales)


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


_packed: dict[int, tuple[Tensor, Tensor, Tensor]] = {}


def _plain_matmul(inputs: Inputs) -> bool:
    return inputs["a"].dtype.itemsize > 1 and not any(inputs.get(name) is not None for name in ("residual", "silu_mul", "out_scale", "out_dtype"))


@lru_cache(maxsize=128)
def _inner_groups(scale: Tensor) -> Tensor:
    """Block scales of b in the layout that cuBLAS takes, made once."""
    return scale.contiguous()


def _scaled_mm(a: Tensor, b: Tensor, bias: Tensor | None = None, *, trans_b: bool = False, scale_a: Tensor, scale_b: Tensor, **unused: Any) -> Tensor:
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


def _grouped_mm(a: Tensor, b: Tensor, offsets: Tensor | None = None, counts: Tensor | None = None, *, trans_b: bool = False, **unused: Any) -> Tensor:
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


def _dropout(x: Tensor, p: float, seed: Tensor, offset: Tensor | None = None) -> Tensor:
    return F.dropout(x, p, training=True)


def _layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


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
) -> Tensor:
    """Sort, cut, and the race of exponentials: as engines compose it for parameters in tensors."""
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
    "moe_route": (Peer("torch.eager", moe_route), Peer("torch.compile", _compiled(moe_route))),
    "rms_norm_route": (Peer("torch.eager", rms_norm_route), Peer("torch.compile", _compiled(rms_norm_route))),
    "moe": (
        Peer("grouped_mm", grouped_moe, plain_moe),
        # It copies the weights of each choice: 16 tokens of Mixtral would need 11 GB for that.
        Peer("transformers", batched_moe, lambda inputs: plain_moe(inputs) and len(inputs["x"]) <= 16),
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
