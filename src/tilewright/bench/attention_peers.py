"""Peers of the attention ops: functions of the same keyword arguments as the op.

Which op takes which is in peers.py.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..ops.sparse_decode import unpack_kv
from .inputs import Inputs, Result, kept, without


def sdpa(backend: SDPBackend) -> Callable[..., Any]:
    def call(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = True, scale: float | None = None, **unused: Any) -> Result:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])

    return call


_PLAIN = without("window", "kv_start", "kv_len", "cu_seqlens_q", "return_lse", "softcap", "sinks", "q_scale")


def plain_attention(inputs: Inputs) -> bool:
    square = inputs["q"].dim() == 4 and (not inputs.get("causal", True) or inputs["q"].shape[2] == inputs["k"].shape[2])
    return square and _PLAIN(inputs)


@lru_cache(maxsize=32)
def _block_mask(q_len: int, kv_len: int, causal: bool, window: Any, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def seen(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        last = i + kv_len - q_len
        shown = (j <= last) if causal else (j >= 0)
        if isinstance(window, tuple):
            before, behind = (q_len + kv_len if side is None else side for side in window)
            return (j >= last - before) & (j <= last + behind)
        return shown if window is None else shown & (j > last - window)

    return create_block_mask(seen, None, None, q_len, kv_len, device=str(device))


@lru_cache(maxsize=8)
def _compiled_flex(softcap: float | None) -> Callable[..., Any]:
    """flex_attention of torch.compile. A sink scales its output, given the log-sum-exp."""
    from torch.nn.attention.flex_attention import flex_attention

    def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score if softcap is None else softcap * torch.tanh(score / softcap)

    def call(q: Tensor, k: Tensor, v: Tensor, block_mask: Any, scale: float | None, sinks: Tensor | None) -> Tensor:
        how: Any = {
            "score_mod": None if softcap is None else capped,
            "block_mask": block_mask,
            "scale": scale,
            "enable_gqa": q.shape[1] != k.shape[1],
        }
        if sinks is None:
            out: Tensor = flex_attention(q, k, v, **how)
            return out
        out, lse = flex_attention(q, k, v, return_lse=True, **how)
        scaled: Tensor = (out * torch.sigmoid(lse - sinks[:, None])[..., None]).to(q.dtype)
        return scaled

    return torch.compile(call, dynamic=False)


def flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    **unused: Any,
) -> Tensor:
    mask = _block_mask(q.shape[2], k.shape[2], causal, window, q.device) if causal or window is not None else None
    out: Tensor = _compiled_flex(softcap)(q, k, v, mask, scale, sinks)
    return out


def flexible_attention(inputs: Inputs) -> bool:
    """What SDPA has no argument for."""
    plain = without("kv_start", "kv_len", "cu_seqlens_q", "q_scale", "return_lse")(inputs)
    return plain and not without("window", "softcap", "sinks")(inputs)


@kept
def _joined(x: Tensor, rope: Tensor) -> Tensor:
    """Both parts of queries or of keys: SDPA and `attention_decode` have one product for scores."""
    return torch.cat((x, rope.expand(-1, x.shape[1], -1, -1)), -1)


def sdpa_mla(
    q_nope: Tensor, q_rope: Tensor, *, k_nope: Tensor, k_rope: Tensor, v: Tensor, causal: bool = True, scale: float | None = None, **unused: Any
) -> Tensor:
    q, k = _joined(q_nope, q_rope), _joined(k_nope, k_rope)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION], set_priority=True):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)


def plain_mla(inputs: Inputs) -> bool:
    square = not inputs["causal"] or inputs["q_nope"].shape[2] == inputs["k_nope"].shape[2]
    return square and inputs["q_nope"].dtype.itemsize > 1 and without("kv_len", "return_lse")(inputs)


def kv_append(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    positions: Tensor,
    block_table: Tensor | None = None,
    q: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    v_norm: Tensor | None = None,
    eps: float = 1e-6,
    round_before_weight: bool = False,
) -> Result:
    """As engines compose it: rotate, norm, and put rows into the cache by index."""
    batch, _, tokens, _ = k.shape

    def normed(x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else F.rms_norm(x, weight.shape, weight, eps)

    k, v = normed(k, k_norm), normed(v, v_norm)
    positions = positions.view(batch, tokens)
    if cos is not None and sin is not None:
        c, s = cos[positions][:, None], sin[positions][:, None]

        def turned(x: Tensor) -> Tensor:
            rotated, rest = x[..., : 2 * c.shape[-1]], x[..., 2 * c.shape[-1] :]
            a, b = rotated.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else rotated.chunk(2, -1)
            pair = a * c - b * s, b * c + a * s
            return torch.cat(((torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)).to(x.dtype), rest), -1)

        k = turned(k)
        if q is not None:
            q.copy_(turned(normed(q, q_norm)))
    outer, row = torch.arange(batch, device=k.device)[:, None], positions
    if block_table is not None:
        outer, row = block_table.gather(1, (positions // k_cache.shape[2]).long()), positions % k_cache.shape[2]
    if k_scale is not None and v_scale is not None:
        k, v = k.float() / k_scale, v.float() / v_scale
    k_cache[outer, :, row] = k.transpose(1, 2).to(k_cache.dtype)
    v_cache[outer, :, row] = v.transpose(1, 2).to(v_cache.dtype)
    return k_cache, v_cache


def sdpa_decode(backend: SDPBackend) -> Callable[..., Any]:
    def call(q: Tensor, k: Tensor, v: Tensor | None = None, kv_len: Tensor | None = None, *, scale: float | None = None, **unused: Any) -> Result:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, k if v is None else v, scale=scale, enable_gqa=True)

    return call


def rows_decode(attend: Callable[[Tensor, Tensor, Tensor, float], Tensor]) -> Callable[..., Any]:
    """Of one token. The query heads of a key head become its rows, which is the same attention."""

    def call(
        q: Tensor, k: Tensor, v: Tensor | None = None, kv_len: Any = None, *, v_dim: int | None = None, scale: float | None = None, **unused: Any
    ) -> Tensor:
        rows, values = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3]), k[..., :v_dim] if v is None else v
        return attend(rows, k, values, q.shape[3] ** -0.5 if scale is None else scale).reshape(*q.shape[:3], -1)

    return call


def fused(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):  # the only fused backend for more than 256 columns
        return F.scaled_dot_product_attention(q, k, v, scale=scale)


def two_products(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return torch.matmul((torch.matmul(q, k.mT) * scale).softmax(-1), v)


def flex_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    kv_len: Tensor | None = None,
    *,
    v_dim: int | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    **unused: Any,
) -> Tensor:
    return flex_attention(q, k, k[..., :v_dim] if v is None else v, causal=True, scale=scale, window=window, sinks=sinks)


def full_cache(inputs: Inputs) -> bool:
    return without("block_table", "kv_start", "kv_len", "return_lse")(inputs) and bool(inputs.get("normalize", True))


def one_token(inputs: Inputs) -> bool:
    return full_cache(inputs) and inputs["q"].shape[2] == 1 and without("window", "sinks")(inputs)


def sdpa_takes(inputs: Inputs) -> bool:
    return one_token(inputs) and inputs["q"].shape[3] <= 256 and inputs.get("v_dim") is None


def many_columns(inputs: Inputs) -> bool:
    return one_token(inputs) and inputs["q"].shape[3] > 256


def mla_as_decode(call: Callable[..., Any]) -> Callable[..., Any]:
    def mla(q_latent: Tensor, q_rope: Tensor, cache: Tensor, kv_len: Any = None, *, scale: float, **unused: Any) -> Any:
        return call(_joined(q_latent, q_rope), cache[:, None], None, v_dim=q_latent.shape[3], scale=scale)

    return mla


def sparse_decode(
    q: Tensor,
    cache: Tensor,
    indices: Tensor,
    topk_length: Tensor | None = None,
    *,
    scale: float,
    extra_cache: Tensor | None = None,
    extra_indices: Tensor | None = None,
    sinks: Tensor | None = None,
    v_dim: int | None = None,
    **unused: Any,
) -> Tensor:
    """Rows by index, widened if they are 8-bit, two batched products, a column for the sink."""
    batch, q_heads, q_len, head_dim = q.shape
    chosen = []
    for rows, lists in ((cache, indices), (extra_cache, extra_indices)):
        if rows is not None and lists is not None:
            rows = unpack_kv(rows, q.dtype) if rows.dtype == torch.uint8 else rows
            chosen.append(rows.view(-1, head_dim)[lists.view(batch * q_len, -1)])
    k = torch.cat(chosen, 1)  # [tokens, rows, columns]
    scores = torch.matmul(q.transpose(1, 2).reshape(-1, q_heads, head_dim), k.mT) * scale
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(q.dtype).view(1, -1, 1).expand(len(scores), -1, 1)), -1)
    out = torch.matmul(scores.softmax(-1)[..., : k.shape[1]], k[..., : min(head_dim, 512) if v_dim is None else v_dim])
    return out.view(batch, q_len, q_heads, -1).transpose(1, 2)


plain_sparse_decode = without("topk_length", "return_lse")


def sparse_index(
    q: Tensor,
    cache: Tensor,
    weights: Tensor,
    topk: int,
    *,
    cache_scale: Tensor | None = None,
    kv_len: Tensor | None = None,
    block_table: Tensor | None = None,
    **unused: Any,
) -> Tensor:
    """All scores from bf16 products, a mask, torch.topk; keys by their number in the sequence."""
    if block_table is not None:
        pages = block_table.long().clamp(0, len(cache) - 1)
        cache, cache_scale = cache[pages].flatten(1, 2), None if cache_scale is None else cache_scale[pages].flatten(1, 2)
    products = torch.matmul(q.to(torch.bfloat16), cache.to(torch.bfloat16).mT[:, None])  # [batch, q_len, heads, keys]
    scores = torch.matmul(weights[:, :, None], products.relu().float())[:, :, 0]
    scores = scores if cache_scale is None else scores * cache_scale[:, None]
    if kv_len is not None:
        key, token = torch.arange(cache.shape[1], device=q.device), torch.arange(q.shape[1], device=q.device)[:, None]
        scores = scores.masked_fill(key > (kv_len - q.shape[1])[:, None, None] + token, -torch.inf)
    return scores.topk(min(topk, scores.shape[2])).indices


def plain_sparse_index(inputs: Inputs) -> bool:
    """Without kv_start, and few enough products to keep them."""
    return inputs["kv_start"] is None and inputs["q"].shape[1] == 1


def plain_mla_decode(inputs: Inputs) -> bool:
    return inputs["q_latent"].shape[2] == 1 and without("kv_len", "block_table", "kv_start")(inputs)


def merge_states(states: Tensor, states_lse: Tensor, *, base2: bool = False) -> Result:
    lse = states_lse * 0.6931471805599453 if base2 else states_lse
    weights, total = torch.softmax(lse, 0), torch.logsumexp(lse, 0)
    return (weights[..., None] * states).sum(0).to(states.dtype), total * 1.4426950408889634 if base2 else total
