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
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..ops.scaling import FAST_SUM
from ..ops.sparse_decode import unpack_kv

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
    extras = ("window", "kv_start", "kv_len", "cu_seqlens_q", "return_lse", "softcap", "sinks", "q_scale")
    square = inputs["q"].dim() == 4 and (not inputs.get("causal", True) or inputs["q"].shape[2] == inputs["k"].shape[2])
    return square and not any(inputs.get(name) is not None and inputs.get(name) is not False for name in extras)


@lru_cache(maxsize=32)
def _block_mask(q_len: int, kv_len: int, causal: bool, window: int | None, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(b, h, i, j):
        last = i + kv_len - q_len
        shown = (j <= last) if causal else (j >= 0)
        return shown if window is None else shown & (j > last - window)

    return create_block_mask(seen, None, None, q_len, kv_len, device=str(device))


@lru_cache(maxsize=8)
def _compiled_flex(softcap: float | None) -> Callable[..., Any]:
    """flex_attention of torch.compile; a sink scales its output by what the log-sum-exp says."""
    from torch.nn.attention.flex_attention import flex_attention

    def capped(score, b, h, i, j):
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    def call(q, k, v, block_mask, scale, sinks):
        how = {"score_mod": None if softcap is None else capped, "block_mask": block_mask, "scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
        if sinks is None:
            return flex_attention(q, k, v, **how)
        out, lse = flex_attention(q, k, v, return_lse=True, **how)
        return (out * torch.sigmoid(lse - sinks[:, None])[..., None]).to(q.dtype)

    return torch.compile(call, dynamic=False)


def _flex_attention(q, k, v, *, causal=True, scale=None, window=None, softcap=None, sinks=None, **unused):
    mask = _block_mask(q.shape[2], k.shape[2], causal, window, q.device) if causal or window is not None else None
    return _compiled_flex(softcap)(q, k, v, mask, scale, sinks)


def _flexible_attention(inputs: Inputs) -> bool:
    """What SDPA has no argument for."""
    lengths = any(inputs.get(name) is not None for name in ("kv_start", "kv_len", "cu_seqlens_q", "q_scale"))
    special = any(inputs.get(name) is not None for name in ("window", "softcap", "sinks"))
    return special and not lengths and not inputs.get("return_lse")


_joined: dict[int, tuple[Tensor, Tensor, Tensor]] = {}


def _sdpa_mla(q_nope, q_rope, *, k_nope, k_rope, v, causal=True, scale=None, **unused):
    """SDPA has one product for the scores: it gets the parts concatenated, once and outside the time that is measured."""
    known = _joined.get(q_nope.data_ptr())
    if known is None or known[0] is not q_nope:
        if len(_joined) >= 64:
            _joined.clear()
        k = torch.cat((k_nope, k_rope.expand(-1, k_nope.shape[1], -1, -1)), -1)
        known = _joined[q_nope.data_ptr()] = q_nope, torch.cat((q_nope, q_rope), -1), k
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION], set_priority=True):
        return F.scaled_dot_product_attention(known[1], known[2], v, is_causal=causal, scale=scale)


def _plain_mla(inputs: Inputs) -> bool:
    square = not inputs["causal"] or inputs["q_nope"].shape[2] == inputs["k_nope"].shape[2]
    return square and inputs["q_nope"].dtype.itemsize > 1 and inputs.get("kv_len") is None and not inputs.get("return_lse")


def _kv_append(k, v, k_cache, v_cache, *, positions, block_table=None, q=None, cos=None, sin=None, interleaved=False, k_scale=None, v_scale=None):
    """As engines compose it: rotate, and put rows into the cache by index."""
    batch, _, tokens, _ = k.shape
    positions = positions.view(batch, tokens)
    if cos is not None:
        c, s = cos[positions][:, None], sin[positions][:, None]

        def turned(x):
            rotated, rest = x[..., : 2 * c.shape[-1]], x[..., 2 * c.shape[-1] :]
            a, b = rotated.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else rotated.chunk(2, -1)
            pair = a * c - b * s, b * c + a * s
            return torch.cat(((torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)).to(x.dtype), rest), -1)

        k = turned(k)
        if q is not None:
            q.copy_(turned(q))
    outer, row = torch.arange(batch, device=k.device)[:, None], positions
    if block_table is not None:
        outer, row = block_table.gather(1, (positions // k_cache.shape[2]).long()), positions % k_cache.shape[2]
    if k_scale is not None:
        k, v = k.float() / k_scale, v.float() / v_scale
    k_cache[outer, :, row] = k.transpose(1, 2).to(k_cache.dtype)
    v_cache[outer, :, row] = v.transpose(1, 2).to(v_cache.dtype)
    return k_cache, v_cache


def _sdpa_decode(backend: SDPBackend) -> Callable[..., Any]:
    def call(q, k, v=None, kv_len=None, *, scale=None, **unused):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, k if v is None else v, scale=scale, enable_gqa=True)

    return call


def _as_rows(q, k, v, v_dim):
    """The heads of a key head as its query rows, which for one token is the same attention: [batch, kv_heads, group, columns], and v."""
    return q.reshape(q.shape[0], k.shape[1], -1, q.shape[3]), k[..., :v_dim] if v is None else v


def _sdpa_rows_decode(q, k, v=None, kv_len=None, *, v_dim=None, scale=None, **unused):
    rows, v = _as_rows(q, k, v, v_dim)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):  # the only fused one for more than 256 columns
        return F.scaled_dot_product_attention(rows, k, v, scale=scale).reshape(*q.shape[:3], -1)


def _bmm_decode(q, k, v=None, kv_len=None, *, v_dim=None, scale=None, **unused):
    rows, v = _as_rows(q, k, v, v_dim)
    scores = torch.matmul(rows, k.mT) * (q.shape[3] ** -0.5 if scale is None else scale)
    return torch.matmul(scores.softmax(-1), v).reshape(*q.shape[:3], -1)


def _flex_decode(q, k, v=None, kv_len=None, *, v_dim=None, window=None, sinks=None, scale=None, **unused):
    return _flex_attention(q, k, k[..., :v_dim] if v is None else v, causal=True, scale=scale, window=window, sinks=sinks)


def _full_cache(inputs: Inputs) -> bool:
    plain = all(inputs.get(name) is None for name in ("block_table", "kv_start", "kv_len")) and inputs.get("normalize", True)
    return plain and not inputs.get("return_lse")


def _one_token(inputs: Inputs) -> bool:
    return _full_cache(inputs) and inputs["q"].shape[2] == 1 and inputs.get("window") is None and inputs.get("sinks") is None


def _sdpa_takes(inputs: Inputs) -> bool:
    return _one_token(inputs) and inputs["q"].shape[3] <= 256 and inputs.get("v_dim") is None


def _many_columns(inputs: Inputs) -> bool:
    return _one_token(inputs) and inputs["q"].shape[3] > 256


_whole_queries: dict[int, tuple[Tensor, Tensor]] = {}


def _mla_as_decode(call: Callable[..., Any]) -> Callable[..., Any]:
    """The queries in one tensor, joined once and outside the time that is measured."""

    def mla(q_latent, q_rope, cache, kv_len=None, *, scale, **unused):
        known = _whole_queries.get(q_latent.data_ptr())
        if known is None or known[0] is not q_latent:
            if len(_whole_queries) >= 64:
                _whole_queries.clear()
            known = _whole_queries[q_latent.data_ptr()] = q_latent, torch.cat((q_latent, q_rope), -1)
        return call(known[1], cache[:, None], None, v_dim=q_latent.shape[3], scale=scale)

    return mla


def _sparse_decode(q, cache, indices, topk_length=None, *, scale, extra_cache=None, extra_indices=None, sinks=None, v_dim=None, **unused):
    """Rows by index, 8-bit ones widened after that, two batched products, and a column for the sink."""
    batch, q_heads, q_len, head_dim = q.shape
    chosen = []
    for rows, lists in ((cache, indices), (extra_cache, extra_indices)):
        if rows is not None:
            rows = unpack_kv(rows, q.dtype) if rows.dtype == torch.uint8 else rows
            chosen.append(rows.view(-1, head_dim)[lists.view(batch * q_len, -1)])
    k = torch.cat(chosen, 1)  # [tokens, rows, columns]
    scores = torch.matmul(q.transpose(1, 2).reshape(-1, q_heads, head_dim), k.mT) * scale
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(q.dtype).view(1, -1, 1).expand(len(scores), -1, 1)), -1)
    out = torch.matmul(scores.softmax(-1)[..., : k.shape[1]], k[..., : min(head_dim, 512) if v_dim is None else v_dim])
    return out.view(batch, q_len, q_heads, -1).transpose(1, 2)


def _plain_sparse_decode(inputs: Inputs) -> bool:
    return inputs.get("topk_length") is None and not inputs.get("return_lse")


def _plain_mla_decode(inputs: Inputs) -> bool:
    return inputs["q_latent"].shape[2] == 1 and all(not isinstance(inputs.get(name), Tensor) for name in ("kv_len", "block_table"))


def _merge_states(out, lse, *, base2=False):
    weights = torch.softmax(lse * 0.6931471805599453 if base2 else lse, 0)
    total = torch.logsumexp(lse * 0.6931471805599453 if base2 else lse, 0)
    return (weights[..., None] * out).sum(0).to(out.dtype), total * 1.4426950408889634 if base2 else total


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


def _moe_route(logits, top_k, *, sigmoid=False, bias=None, normalize=True, scale=1.0, groups=0, top_groups=0):
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
    return weights * scale, ids.int()


def _grouped_moe(x, gate_up, down, *, weights, ids, **unused):
    """As transformers' experts with grouped products: sorted by expert, two products, back in the order of the tokens, summed."""
    top_k = ids.shape[1]
    flat = ids.reshape(-1)
    order = flat.argsort()
    offsets = torch.histc(flat[order].float(), bins=len(down), min=0, max=len(down) - 1).cumsum(0, dtype=torch.int32)
    gate, up = torch._grouped_mm(x[order // top_k], gate_up.mT, offs=offsets).chunk(2, -1)
    y = torch._grouped_mm(F.silu(gate) * up, down.mT, offs=offsets) * weights.reshape(-1)[order, None]
    return y[order.argsort()].view(*ids.shape, -1).sum(1).to(x.dtype)


def _batched_moe(x, gate_up, down, *, weights, ids, **unused):
    """As transformers' experts with batched products: the chosen weights, copied for each token."""
    flat = ids.reshape(-1)
    rows = x.repeat_interleave(ids.shape[1], 0)
    gate, up = torch.bmm(gate_up[flat], rows[..., None])[..., 0].chunk(2, -1)
    y = torch.bmm(down[flat], (F.silu(gate) * up)[..., None])[..., 0] * weights.reshape(-1, 1)
    return y.view(*ids.shape, -1).sum(1).to(x.dtype)


def _plain_moe(inputs: Inputs) -> bool:
    return inputs["scale_down"] is None and inputs["x"].dtype is torch.bfloat16 and all(n % 8 == 0 for n in inputs["down"].shape[1:])


PEERS: dict[str, tuple[Peer, ...]] = {
    "rms_norm": (
        Peer("torch.eager", _fused_rms_norm, _plain_rms_norm),
        Peer("torch.eager", _rms_norm, lambda inputs: not _plain_rms_norm(inputs)),
        Peer("torch.compile", _compiled(_rms_norm)),
    ),
    "rope": (Peer("torch.eager", _rope, _llama_rope), Peer("torch.compile", _compiled(_rope), _llama_rope)),
    "silu_mul": (Peer("torch.eager", _silu_mul), Peer("torch.compile", _compiled(_silu_mul))),
    "quantize_fp8": (Peer("torch.compile", _compiled(_quantize_fp8)),),
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
    "moe": (
        Peer("grouped_mm", _grouped_moe, _plain_moe),
        # It copies the weights of each choice: 16 tokens of Mixtral would need 11 GB for that.
        Peer("transformers", _batched_moe, lambda inputs: _plain_moe(inputs) and len(inputs["x"]) <= 16),
    ),
    "attention": (
        Peer("cudnn", _sdpa(SDPBackend.CUDNN_ATTENTION), _plain_attention),
        Peer("sdpa", _sdpa(SDPBackend.FLASH_ATTENTION), _plain_attention),
        Peer("flex_attention", _flex_attention, _flexible_attention),
    ),
    "mla": (Peer("cudnn", _sdpa_mla, _plain_mla),),
    "kv_append": (Peer("torch.compile", _compiled(_kv_append), lambda inputs: bool((inputs["positions"] >= 0).all())),),
    "attention_decode": (
        Peer("sdpa", _sdpa_decode(SDPBackend.FLASH_ATTENTION), _sdpa_takes),
        Peer("cudnn", _sdpa_decode(SDPBackend.CUDNN_ATTENTION), _sdpa_takes),
        Peer("sdpa", _sdpa_rows_decode, _many_columns),
        Peer("cublas", _bmm_decode, _many_columns),
        Peer("flex_attention", _flex_decode, lambda inputs: _full_cache(inputs) and not _one_token(inputs)),
    ),
    "mla_decode": (
        Peer("sdpa", _mla_as_decode(_sdpa_rows_decode), _plain_mla_decode),
        Peer("cublas", _mla_as_decode(_bmm_decode), _plain_mla_decode),
    ),
    "sparse_decode": (
        # It widens the whole of an 8-bit cache.
        Peer("torch.eager", _sparse_decode, lambda inputs: _plain_sparse_decode(inputs) and inputs["cache"].dtype != torch.uint8),
        Peer("torch.compile", _compiled(_sparse_decode), _plain_sparse_decode),
    ),
    "merge_states": (Peer("torch.eager", _merge_states), Peer("torch.compile", _compiled(_merge_states))),
}


def peers_of(op: str, inputs: Inputs) -> list[Peer]:
    """The peers that take these inputs, one per name."""
    found: dict[str, Peer] = {}
    for peer in PEERS.get(op, ()):
        if peer.name not in found and peer.applies(inputs):
            found[peer.name] = peer
    return list(found.values())
