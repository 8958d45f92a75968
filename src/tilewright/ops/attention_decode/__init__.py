"""Attention of each sequence's newest tokens against a long cache: out = softmax(scale * q k^T +
mask) v, per head.

The query heads that share a key head, and the tokens, are the rows (or columns) of one tile, so k
and v are read once; where v is the first columns of k, one tile of keys serves both products. The
keys of a sequence are divided into KV splits, one block each; a second kernel merges their results.
The splits come from the length that the device holds, so that a captured graph serves any step.

Source    Dao et al. 2023, "Flash-Decoding for long-context inference" (splits); Shazeer 2019,
          arXiv:1911.02150 (MQA); Ainslie et al. 2023, arXiv:2305.13245 (GQA); Kwon et al. 2023,
          arXiv:2309.06180 (pages); Xiao et al. 2024, arXiv:2309.17453 (sinks).
Numerics  As attention. Partial results are fp32 sums, maxima and denominators, merged with weights
          exp2(maximum - largest maximum). A sink enters the denominator once, after the merge.
Bound     Memory: k and v of the visible keys, once. From about 100 rows a key head (128 heads over
          512 columns) the products.
"""

from typing import Optional

import torch
from torch import Tensor

from ...launch import Device, argument_error, check_bools, check_integers, check_tensor, next_pow2, out_or_new, torch_op
from ...launch.values import Claims
from ..common.softmax_tiles import FARTHEST, check_heads, check_scale_and_window, check_scales, check_softcap, no_keys
from ..common.tiles import LOG2E
from .calls import MOST_TOKENS, check_codes, check_decode, check_gathered, check_queries, claims_of_cache, tokens_by_launch
from .decision import ARGUMENTS, CHOICES as CHOICES, Config as Config, Problem as Problem, plan as plan, space as space


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    kv_len: Tensor | None = None,
    *,
    v_dim: int | None = None,
    block_table: Tensor | None = None,
    kv_start: Tensor | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    normalize: bool = True,
    softcap: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """The definition, sequence by sequence: products in the dtype, softmax at least in fp32. Codes
    are widened to the dtype first.
    """
    batch, q_heads, q_len, head_dim = q.shape
    scale = head_dim**-0.5 if scale is None else scale
    if v is None:
        v = k[..., :v_dim]
    wide = torch.promote_types(q.dtype, torch.float32)
    if k_scale is not None and v_scale is not None:
        k, v = ((x.to(wide) * scales[..., None]).to(q.dtype) for x, scales in ((k, k_scale), (v, v_scale)))
    rows = (batch, q_heads, q_len)
    maximum, denominator = (torch.full(rows, x, dtype=wide, device=q.device) for x in (-torch.inf, 0.0))
    out = torch.zeros(*rows, v.shape[-1], dtype=q.dtype if normalize else wide, device=q.device)
    for i in range(batch):
        longest = k.shape[2] if block_table is None else block_table.shape[1] * k.shape[2]
        end = longest if kv_len is None else max(0, min(int(kv_len[i]), longest))
        begin = 0 if kv_start is None else max(0, int(kv_start[i]))
        if block_table is None:
            keys, values = k[i], v[i]
        else:
            pages = block_table[i, : -(-end // k.shape[2])].long()
            keys, values = (x[pages].transpose(0, 1).flatten(1, 2) for x in (k, v))
        for t in range(q_len):
            last = end - (q_len - 1 - t)
            first = begin if window is None else max(begin, last - window)
            if first >= last:
                continue
            near, held = keys[:, first:last], values[:, first:last]  # [kv_heads, keys, columns]
            scores = (q[i, :, t].unflatten(0, (len(near), -1)) @ near.mT * scale).to(wide)  # [kv_heads, group, keys]
            if softcap is not None:
                scores = softcap * (scores / softcap).tanh()
            top = scores.amax(-1, keepdim=True)
            weights = (scores - top).exp()
            maximum[i, :, t], denominator[i, :, t] = top.flatten(), weights.sum(-1).flatten()
            out[i, :, t] = ((scores.softmax(-1) if normalize else weights).to(v.dtype) @ held).flatten(0, 1)
    if not normalize:
        return out, maximum, denominator
    lse = maximum + denominator.log()
    if sinks is not None:
        shown = torch.sigmoid(lse - sinks.to(wide)[:, None])  # the share of the softmax that is not the sink's
        out = (out * torch.where(denominator == 0, 0.0, shown)[..., None]).to(out.dtype)
    return (out, lse) if return_lse else out


DECISION = CHOICES.decision(Problem, plan, ARGUMENTS)


def _claims(k: Tensor, kv_len: Tensor | None, block_table: Tensor | None, kv_start: Tensor | None) -> Claims:
    yield from claims_of_cache(k, kv_len, block_table, kv_start)


@torch_op(mutates=("out", "lse", "denominator"), claims=_claims)
def attention_decode_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_len: Optional[Tensor],
    block_table: Optional[Tensor],
    kv_start: Optional[Tensor],
    sinks: Optional[Tensor],
    k_scale: Optional[Tensor],
    v_scale: Optional[Tensor],
    scale: float,
    window: Optional[int],
    softcap: Optional[float],
    shared: bool,
    out: Tensor,
    lse: Optional[Tensor],
    denominator: Optional[Tensor],
) -> None:
    """`attention_decode` into `out` and, if given, `lse`. shared: v is a view of k's first columns.
    With `denominator`, `lse` is the maximum.

    No checks, no sync: safe under graph capture.
    """
    batch, q_heads, q_len, head_dim = q.shape
    page_size = 0 if block_table is None else k.shape[2]
    max_len = next_pow2(k.shape[2] if block_table is None else block_table.shape[1] * page_size)  # a bucket: a growing cache keeps its plan
    if window is not None and window >= max_len:
        window = None  # it hides nothing, and the kernel's 32-bit sums would not hold every such number
    launches = DECISION.launches(
        Device.of(q),
        batch=batch,
        q_heads=q_heads,
        kv_heads=k.shape[1],
        max_len=max_len,
        head_dim=head_dim,
        dtype=q.dtype,
        page_size=page_size,
        window=window,
        has_start=kv_start is not None,
        has_len=kv_len is not None,
        return_lse=lse is not None and denominator is None,
        q_len=q_len,
        v_dim=v.shape[3],  # before k and v become words
        shared=shared,
        sinks=sinks is not None,
        normalize=denominator is None,
        codes=k_scale is not None,
        softcap=softcap is not None,
    )
    if k_scale is not None:
        k, v = k.view(torch.int32), v.view(torch.int32)  # four codes a word
    to_base_2, cap = (scale * LOG2E, 0.0) if softcap is None else (scale / softcap, softcap * LOG2E)
    launches.run(q, q, k, v, out, lse, denominator, sinks, kv_len, block_table, kv_start, k_scale, v_scale, window or 0, to_base_2, cap)


def attention_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor | None = None,
    kv_len: Tensor | None = None,
    *,
    v_dim: int | None = None,
    block_table: Tensor | None = None,
    kv_start: Tensor | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    normalize: bool = True,
    softcap: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Softmax attention of each sequence's newest tokens over its cache; query head h reads key
    head h // (q_heads // kv_heads).

    Args:
        q: [batch, q_heads, q_len, head_dim]; bf16, fp16 or fp32; q_len 1..256, head_dim 1..512 or
            576, in fp32 1..256; stride 1 in the last axis. Its tokens are the last q_len of the
            sequence; token i sees the keys up to kv_len - q_len + i. Every four tokens take a
            launch that reads all keys: for more tokens, `attention` is faster, which takes a
            head_dim up to 256.
        k: [batch, kv_heads, max_len, head_dim], dtype and device of q, any strides with stride 1 in
            the last axis; kv_heads divides q_heads. With a block_table [pages, kv_heads, page_size,
            head_dim], page_size a power of two, at least 16; below 256, if rows are multiples of 16
            bytes, so are all strides. For q in bf16 or fp16 also
            float8_e4m3fn: codes as `kv_append` stores them, none of them NaN; head_dim at most 256;
            head_dim and all strides multiples of 4.
        v: like k, with 1..512 columns. None: the first v_dim columns of k, which are then read only
            once.
        kv_len: [batch] int32; the number of keys of each sequence; default all. Read on the device;
            the host never looks at its values.
        v_dim: the number of columns of k that are v, if v is None; at most 512; default all.
        block_table: [batch, max_pages] int32; the page that holds keys i * page_size onwards.
            Entries past kv_len may be anything.
        kv_start: [batch] int32; the first key of each sequence (left padding).
        window: a token sees only the last `window` keys, its own included. A window as long as the
            cache has no effect.
        sinks: [q_heads] fp32; an extra score in the softmax denominator of each head, without a
            value; comparable with the scaled scores (natural log).
        scale: of q k^T; positive; default head_dim ** -0.5.
        return_lse: also return the natural log of the softmax denominator, without the sink.
        normalize: False returns the state of the softmax instead, to be merged with others.
        softcap: positive; scores become softcap * tanh(score / softcap), after `scale` and before
            the mask.
        k_scale, v_scale: fp32, shaped as k without its last axis, any strides with stride 1 in the
            last; given with codes and only then: what a key's (a value's) codes are multiplied by.
        out: where the result goes (without normalize the total): of its shape, dtype and device,
            its axes in any order in memory; default a new tensor.
    Returns: out [batch, q_heads, q_len, columns of v]; with return_lse the tuple (out, lse), lse
        fp32 [batch, q_heads, q_len]. Without normalize the tuple (total, maximum, denominator), all
        fp32: maximum of the scaled scores, denominator sum(exp(score - maximum)), total
        sum(exp(score - maximum) * v). A token that sees no key gives 0 and lse (or maximum) -inf.
        Memory outside the keys may hold anything.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_bools(return_lse=return_lse, normalize=normalize)
    check_queries(q)
    batch, q_heads, q_len, head_dim = q.shape
    stored = k.dtype if isinstance(k, Tensor) and k.dtype == torch.float8_e4m3fn else q.dtype
    check_tensor(k, "k", ndim=4, dtypes=(stored,), like=q)
    check_heads(q, k, head_dim)
    scale = check_scale_and_window(scale, window, head_dim)
    window = None if window is None else min(window, FARTHEST)
    check_softcap(softcap)
    outer, kv_heads, tokens, kv_dim = k.shape
    if kv_dim != head_dim or (block_table is None and outer != batch):
        raise argument_error("k.shape", (outer if block_table is not None else batch, kv_heads, tokens, head_dim), tuple(k.shape))
    shared = v is None
    if v is None:
        columns = head_dim if v_dim is None else v_dim
        check_integers(v_dim=columns)
        if not 1 <= columns <= min(head_dim, 512):
            raise argument_error("v_dim", f"in 1..{min(head_dim, 512)}", columns)
        v = k if columns == head_dim else k[..., :columns]
    else:
        if v_dim is not None:
            raise argument_error("v_dim", "None where v is given", v_dim)
        check_tensor(v, "v", ndim=4, like=k)
        *places, columns = v.shape
        if places != [outer, kv_heads, tokens] or not 1 <= columns <= 512:
            raise argument_error("v.shape", f"{(outer, kv_heads, tokens)} and 1..512 columns", tuple(v.shape))
    check_decode(q, tokens, kv_len, block_table, kv_start, sinks)
    check_scales(k, k_scale=(k_scale, (outer, kv_heads, tokens)), v_scale=(v_scale, (outer, kv_heads, tokens)))
    if stored != q.dtype:
        check_codes(q, 256, k=k, v=v)
    if block_table is not None:
        check_gathered(tokens, k=k, v=None if shared else v, k_scale=k_scale, v_scale=v_scale)
    if not normalize and (return_lse or sinks is not None):
        raise argument_error("normalize", "True with return_lse or sinks: a sink counts once, after the last merge", normalize)
    rows = (batch, q_heads, q_len)
    optional = (kv_len, block_table, kv_start, sinks, k_scale, v_scale)
    out = out_or_new(out, (*rows, columns), q.dtype if normalize else torch.float32, q, k, v, *optional, contiguous=False)
    lse = torch.empty(rows, dtype=torch.float32, device=q.device) if return_lse or not normalize else None
    denominator = None if normalize else torch.empty(rows, dtype=torch.float32, device=q.device)
    if not (out.numel() and k.numel() and (block_table is None or block_table.numel())):
        no_keys(out, lse, denominator)
    elif q_len <= MOST_TOKENS:
        attention_decode_out(q, k, v, *optional, scale, window, softcap, shared, out, lse, denominator)
    else:
        for some, ends in tokens_by_launch(q, kv_len, tokens * (1 if block_table is None else block_table.shape[1])):
            of_tokens = tuple(x if x is None else x[:, :, some] for x in (out, lse, denominator))
            attention_decode_out(q[:, :, some], k, v, ends, *optional[1:], scale, window, softcap, shared, *of_tokens)
    if lse is None:
        return out
    return (out, lse) if denominator is None else (out, lse, denominator)
