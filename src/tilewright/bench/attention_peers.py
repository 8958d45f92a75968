"""Peers of the attention ops: functions of the same keyword arguments as the op; which op takes which is in peers.py."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..ops.sparse_decode import unpack_kv

Inputs = dict[str, Any]


def sdpa(backend: SDPBackend | None) -> Callable[..., Any]:
    def call(q, k, v, *, causal=True, scale=None, **unused):
        grouped = q.shape[1] != k.shape[1]
        if backend is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)

    return call


def plain_attention(inputs: Inputs) -> bool:
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


def flex_attention(q, k, v, *, causal=True, scale=None, window=None, softcap=None, sinks=None, **unused):
    mask = _block_mask(q.shape[2], k.shape[2], causal, window, q.device) if causal or window is not None else None
    return _compiled_flex(softcap)(q, k, v, mask, scale, sinks)


def flexible_attention(inputs: Inputs) -> bool:
    """What SDPA has no argument for."""
    lengths = any(inputs.get(name) is not None for name in ("kv_start", "kv_len", "cu_seqlens_q", "q_scale"))
    special = any(inputs.get(name) is not None for name in ("window", "softcap", "sinks"))
    return special and not lengths and not inputs.get("return_lse")


_joined: dict[int, tuple[Tensor, Tensor, Tensor]] = {}


def sdpa_mla(q_nope, q_rope, *, k_nope, k_rope, v, causal=True, scale=None, **unused):
    """SDPA has one product for the scores: it gets the parts concatenated, once and outside the time that is measured."""
    known = _joined.get(q_nope.data_ptr())
    if known is None or known[0] is not q_nope:
        if len(_joined) >= 64:
            _joined.clear()
        k = torch.cat((k_nope, k_rope.expand(-1, k_nope.shape[1], -1, -1)), -1)
        known = _joined[q_nope.data_ptr()] = q_nope, torch.cat((q_nope, q_rope), -1), k
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION], set_priority=True):
        return F.scaled_dot_product_attention(known[1], known[2], v, is_causal=causal, scale=scale)


def plain_mla(inputs: Inputs) -> bool:
    square = not inputs["causal"] or inputs["q_nope"].shape[2] == inputs["k_nope"].shape[2]
    return square and inputs["q_nope"].dtype.itemsize > 1 and inputs.get("kv_len") is None and not inputs.get("return_lse")


def kv_append(
    k,
    v,
    k_cache,
    v_cache,
    *,
    positions,
    block_table=None,
    q=None,
    cos=None,
    sin=None,
    interleaved=False,
    k_scale=None,
    v_scale=None,
    q_norm=None,
    k_norm=None,
    v_norm=None,
    eps=1e-6,
    round_before_weight=False,
):
    """As engines compose it: rotate, norm, and put rows into the cache by index."""
    batch, _, tokens, _ = k.shape
    normed = [
        x if weight is None else torch.nn.functional.rms_norm(x, weight.shape, weight, eps) for x, weight in ((q, q_norm), (k, k_norm), (v, v_norm))
    ]
    k, v = normed[1:]
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
            q.copy_(turned(normed[0]))
    outer, row = torch.arange(batch, device=k.device)[:, None], positions
    if block_table is not None:
        outer, row = block_table.gather(1, (positions // k_cache.shape[2]).long()), positions % k_cache.shape[2]
    if k_scale is not None:
        k, v = k.float() / k_scale, v.float() / v_scale
    k_cache[outer, :, row] = k.transpose(1, 2).to(k_cache.dtype)
    v_cache[outer, :, row] = v.transpose(1, 2).to(v_cache.dtype)
    return k_cache, v_cache


def sdpa_decode(backend: SDPBackend) -> Callable[..., Any]:
    def call(q, k, v=None, kv_len=None, *, scale=None, **unused):
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, k if v is None else v, scale=scale, enable_gqa=True)

    return call


def _as_rows(q, k, v, v_dim):
    """The heads of a key head as its query rows, which for one token is the same attention: [batch, kv_heads, group, columns], and v."""
    return q.reshape(q.shape[0], k.shape[1], -1, q.shape[3]), k[..., :v_dim] if v is None else v


def sdpa_rows_decode(q, k, v=None, kv_len=None, *, v_dim=None, scale=None, **unused):
    rows, v = _as_rows(q, k, v, v_dim)
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):  # the only fused one for more than 256 columns
        return F.scaled_dot_product_attention(rows, k, v, scale=scale).reshape(*q.shape[:3], -1)


def bmm_decode(q, k, v=None, kv_len=None, *, v_dim=None, scale=None, **unused):
    rows, v = _as_rows(q, k, v, v_dim)
    scores = torch.matmul(rows, k.mT) * (q.shape[3] ** -0.5 if scale is None else scale)
    return torch.matmul(scores.softmax(-1), v).reshape(*q.shape[:3], -1)


def flex_decode(q, k, v=None, kv_len=None, *, v_dim=None, window=None, sinks=None, scale=None, **unused):
    return flex_attention(q, k, k[..., :v_dim] if v is None else v, causal=True, scale=scale, window=window, sinks=sinks)


def full_cache(inputs: Inputs) -> bool:
    plain = all(inputs.get(name) is None for name in ("block_table", "kv_start", "kv_len")) and inputs.get("normalize", True)
    return plain and not inputs.get("return_lse")


def one_token(inputs: Inputs) -> bool:
    return full_cache(inputs) and inputs["q"].shape[2] == 1 and inputs.get("window") is None and inputs.get("sinks") is None


def sdpa_takes(inputs: Inputs) -> bool:
    return one_token(inputs) and inputs["q"].shape[3] <= 256 and inputs.get("v_dim") is None


def many_columns(inputs: Inputs) -> bool:
    return one_token(inputs) and inputs["q"].shape[3] > 256


_whole_queries: dict[int, tuple[Tensor, Tensor]] = {}


def mla_as_decode(call: Callable[..., Any]) -> Callable[..., Any]:
    """The queries in one tensor, joined once and outside the time that is measured."""

    def mla(q_latent, q_rope, cache, kv_len=None, *, scale, **unused):
        known = _whole_queries.get(q_latent.data_ptr())
        if known is None or known[0] is not q_latent:
            if len(_whole_queries) >= 64:
                _whole_queries.clear()
            known = _whole_queries[q_latent.data_ptr()] = q_latent, torch.cat((q_latent, q_rope), -1)
        return call(known[1], cache[:, None], None, v_dim=q_latent.shape[3], scale=scale)

    return mla


def sparse_decode(q, cache, indices, topk_length=None, *, scale, extra_cache=None, extra_indices=None, sinks=None, v_dim=None, **unused):
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


def plain_sparse_decode(inputs: Inputs) -> bool:
    return inputs.get("topk_length") is None and not inputs.get("return_lse")


def plain_mla_decode(inputs: Inputs) -> bool:
    return inputs["q_latent"].shape[2] == 1 and all(not isinstance(inputs.get(name), Tensor) for name in ("kv_len", "block_table", "kv_start"))


def merge_states(out, lse, *, base2=False):
    weights = torch.softmax(lse * 0.6931471805599453 if base2 else lse, 0)
    total = torch.logsumexp(lse * 0.6931471805599453 if base2 else lse, 0)
    return (weights[..., None] * out).sum(0).to(out.dtype), total * 1.4426950408889634 if base2 else total
