"""What attention and its caches mean."""

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from .products import code_sums, summed, tf32_sums
from .rows import FP8, Results, defines, normed, rotated, wide

FEW_KEYS = 16


def per_head(x: Tensor, scale: Tensor | None) -> Tensor:
    """x [.., heads, .., ..] times the scale of each head, or of all."""
    return x if scale is None else wide(x) * (scale.repeat_interleave(x.shape[-3] // len(scale))[:, None, None] if scale.dim() else scale)


def attend(  # noqa: PLR0913 the op's arguments
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    *,
    scales: tuple[Tensor | None, ...] = (None, None, None),
    normalize: bool = True,
    tensor_cores: bool = False,
) -> Results:
    """q [.., heads, queries, d], k and v [.., kv_heads, keys, d], seen [.., 1, queries, keys].

    scales: of the heads of q, k and v. Without normalize the total, maximum and denominator.
    tensor_cores: a GPU sums scores of fp32 and of codes with them.
    """
    used = seen.any(-2).unsqueeze(-1)  # memory that holds no key may hold anything
    group, held, stored = q.shape[-3] // k.shape[-3], v.dtype, torch.bfloat16 if v.dtype in FP8 else q.dtype
    q, k, v = (torch.add(*parts(x)) if x.dtype is torch.float32 else x if scales[0] is None else wide(x) for x in (q, k, v))
    k, v = (torch.where(used, x, 0).repeat_interleave(group, -3) for x in (k, v))
    on_tensor_cores = tensor_cores and has_tensor_cores(q)
    if held in FP8 and on_tensor_cores:
        products = code_sums(q, k, fresh=q.shape[-1])
    else:
        products = scores_of_fp32(q, k, on_tensor_cores) if q.dtype is torch.float32 else q @ k.mT
    scores = per_head(per_head(wide(products * scale), scales[0]), scales[1])
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~seen, -torch.inf)
    if not normalize:
        top = scores.amax(-1)
        weights = torch.where(seen, (scores - torch.where(top.isfinite(), top, 0.0)[..., None]).exp(), 0.0)
        return [summed(wide(weights.to(held)), wide(v)), top, weights.sum(-1)]
    lse = scores.logsumexp(-1) if scales[0] is None or q.dtype is torch.float64 else fused_lse(scores)
    total = lse if sinks is None else torch.logaddexp(lse, wide(sinks).to(lse.dtype)[:, None].expand(lse.shape))
    weights = torch.where(seen, (scores - torch.where(total.isfinite(), total, 0.0)[..., None]).exp(), 0.0)
    return [per_head(summed(weights.to(held).to(v.dtype), v), scales[2]).to(stored), lse]


def has_tensor_cores(x: Tensor) -> bool:
    return x.is_cuda


def parts(x: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 as tensor cores multiply it: a leading and a trailing TF32 part, 22 bits together."""

    def tf32(x: Tensor) -> Tensor:
        return ((x.contiguous().view(torch.int32) + (1 << 12)) & (-1 << 13)).view(torch.float32)

    leading = torch.where(x.isfinite(), tf32(x), x)
    return leading, torch.where(x.isfinite(), tf32(x - leading), 0.0)


def scores_of_fp32(q: Tensor, k: Tensor, tensor_cores: bool) -> Tensor:
    """q k^T; on tensor cores three products of parts in one accumulator, the largest last."""
    if not tensor_cores:  # with more keys and queries: of one PyTorch sums the products in a better order
        return summed(q, torch.nn.functional.pad(k, (0, 0, 0, FEW_KEYS)).mT)[..., : k.shape[-2]]
    (q, q_rest), (k, k_rest) = parts(q), parts(k)
    total = tf32_sums(q_rest, k)
    total = tf32_sums(q, k_rest, total=total)
    return tf32_sums(q, k, total=total).float()


def fused_lse(scores: Tensor) -> Tensor:
    """As fused kernels for codes of 8 bits have it, and there are no others: with powers of 2, and
    weights of up to 2**8, which fill e4m3.
    """
    scores = scores * math.log2(math.e)
    top = scores.amax(-1, keepdim=True) - 8
    return (top + (scores - torch.where(top.isfinite(), top, 0.0)).exp2().sum(-1, keepdim=True).log2())[..., 0] * math.log(2)


def visible(query: Tensor, key: Tensor, keys: Tensor, queries: Tensor, causal: bool, window: Any) -> Tensor:
    """Whether a query sees a key: both counted in their sequence, the last two side by side."""
    last = query + keys - queries
    seen = key < keys
    if isinstance(window, tuple):
        before, behind = (1 << 40 if side is None else side for side in window)
        return seen & (key >= last - before) & (key <= last + behind)
    seen = seen & (key <= last) if causal else seen
    return seen if window is None else seen & (key > last - window)


@defines
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: Any, return_lse: bool, softcap: Any, sinks: Any = None, **ragged: Any
) -> Results:
    scale, device = ragged.get("scale") or q.shape[-1] ** -0.5, q.device
    scales = tuple(ragged.get(f"{name}_scale") for name in "qkv")
    if "cu_seqlens_q" in ragged:
        starts = [ragged[name].long() for name in ("cu_seqlens_q", "cu_seqlens_kv")]
        at = [torch.arange(len(x), device=device) for x in (q, k)]
        own = [torch.searchsorted(start, i, right=True) - 1 for start, i in zip(starts, at, strict=True)]
        counts = [start.diff()[own[0].clamp(max=len(start) - 2)][:, None] for start in starts]
        inside = [i - start[sequence.clamp(max=len(start) - 2)] for i, start, sequence in zip(at, starts, own, strict=True)]
        seen = visible(inside[0][:, None], inside[1][None], counts[1], counts[0], causal, window) & (own[0][:, None] == own[1][None])
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        out, lse = attend(q, k, v, seen[None], scale, softcap, sinks, scales=scales, tensor_cores=True)
        return [out.transpose(0, 1), *([lse] if return_lse else [])]
    queries, keys = q.shape[2], k.shape[2]
    zero = torch.zeros(len(q), dtype=torch.int64, device=device)
    start = zero if ragged.get("kv_start") is None else ragged["kv_start"].long()
    end = zero + keys if ragged.get("kv_len") is None else ragged["kv_len"].long()
    i, j = torch.arange(queries, device=device)[:, None], torch.arange(keys, device=device)
    n = (end - start)[:, None, None, None].clamp(min=0)
    key = j - start[:, None, None, None]
    seen = visible(i, key, n, torch.tensor(queries, device=device), causal, window) & (key >= 0)
    return attend(q, k, v, seen, scale, softcap, sinks, scales=scales, tensor_cores=True)[: 1 + return_lse]


@defines
def mla(q_nope: Tensor, q_rope: Tensor, *, k_nope: Tensor, k_rope: Tensor, v: Tensor, causal: bool, return_lse: bool, **options: Any) -> Results:
    options["scale"] = options.get("scale") or (q_nope.shape[-1] + q_rope.shape[-1]) ** -0.5
    q, k = side_by_side(q_nope, q_rope), side_by_side(k_nope, k_rope.expand(-1, k_nope.shape[1], -1, -1))
    return attention(q, k, v, causal=causal, window=None, return_lse=return_lse, softcap=None, **options)


def side_by_side(nope: Tensor, rope: Tensor) -> Tensor:
    """Both on the last axis, each from a whole number of 32 columns on.

    Products of both are two products of tensor cores, and no 32 of their sum hold parts of both.
    """
    gap = nope.new_zeros(*nope.shape[:-1], -nope.shape[-1] % 32)
    return torch.cat((nope, gap, rope), -1)


def newest(  # noqa: PLR0913 the op's arguments
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kv_len: Any,
    table: Any,
    kv_start: Any,
    window: Any,
    scale: float,
    sinks: Any = None,
    normalize: bool = True,
    softcap: float | None = None,
) -> Results:
    """Attention of the last tokens of each sequence over a cache, in one piece or in pages."""
    if table is not None:
        k, v = (x[table.long().clamp(0, len(x) - 1)].transpose(1, 2).flatten(2, 3) for x in (k, v))
    queries, keys = q.shape[2], k.shape[2]
    n = torch.full((len(q),), keys, device=q.device) if kv_len is None else kv_len.long().clamp(0, keys)
    start = torch.zeros_like(n) if kv_start is None else kv_start.long()
    i, j = torch.arange(queries, device=q.device)[:, None], torch.arange(keys, device=q.device)
    seen = visible(i, j, n[:, None, None, None], torch.tensor(queries, device=q.device), True, window) & (j >= start[:, None, None, None])
    return attend(q, k, v, seen, scale, softcap, sinks, normalize=normalize)


@defines
def attention_decode(q: Tensor, k: Tensor, v: Any, kv_len: Any, *, window: Any, return_lse: bool, kv_start: Any = None, **options: Any) -> Results:
    v = k[..., : options.get("v_dim")] if v is None else v
    if options.get("k_scale") is not None:
        k, v = ((wide(x) * options[name][..., None]).to(q.dtype) for x, name in ((k, "k_scale"), (v, "v_scale")))
    table, sinks, normalize = options.get("block_table"), options.get("sinks"), options["normalize"]
    scale = options.get("scale") or q.shape[-1] ** -0.5
    found = newest(q, k, v, kv_len, table, kv_start, window, scale, sinks, normalize, options.get("softcap"))
    return found[: 1 + return_lse] if normalize else found


@defines
def mla_decode(
    q_latent: Tensor, q_rope: Tensor, cache: Tensor, kv_len: Any, *, scale: float, block_table: Any, kv_start: Any, return_lse: bool, **codes: Any
) -> Results:
    cache_scale = codes.get("cache_scale")
    cache = cache if cache_scale is None else (wide(cache) * cache_scale[..., None]).to(q_latent.dtype)
    q, k = torch.cat((q_latent, q_rope), -1), cache[:, None]
    return newest(q, k, k[..., : q_latent.shape[-1]], kv_len, block_table, kv_start, None, scale)[: 1 + return_lse]


def unpacked(cache: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of a cache of bytes. 656 of them hold 512 codes, 4 scales in fp32 and 64 columns in
    bf16. Of 584 a page has 576 for each row, 448 codes and 64 columns, and then 8 exponents each.
    """
    pages, page_size, width = cache.shape
    if width == 656:
        codes, scale, rotated = cache[..., :512], cache[..., 512:528].contiguous().view(torch.float32), cache[..., 528:]
    else:
        page = cache.reshape(pages, -1)
        data, exponent = page[:, : page_size * 576].unflatten(1, (page_size, 576)), page[:, page_size * 576 :].unflatten(1, (page_size, 8))
        codes, scale, rotated = data[..., :448], torch.where(exponent == 255, torch.nan, (exponent.double() - 127).exp2())[..., :-1], data[..., 448:]
    values = codes.contiguous().view(torch.float8_e4m3fn).double().unflatten(-1, (scale.shape[-1], -1)) * scale.double()[..., None]
    return torch.cat((values.flatten(-2).to(dtype), rotated.contiguous().view(torch.bfloat16).to(dtype)), -1)


@defines
def sparse_decode(q: Tensor, cache: Tensor, indices: Tensor, topk_length: Any, *, scale: float, return_lse: bool, **options: Any) -> Results:
    """Each token is a sequence of its own, of the rows that its lists name."""
    rows, named = [], []
    for held, lists, length in (
        (cache, indices, topk_length),
        *([(options["extra_cache"], options["extra_indices"], options["extra_length"])] if "extra_cache" in options else []),
    ):
        flat = (unpacked(held, q.dtype) if held.dtype is torch.uint8 else held).flatten(0, 1)
        lists = lists.flatten(0, 1).long()
        entry = torch.arange(lists.shape[-1], device=q.device)
        counted = torch.ones_like(lists, dtype=torch.bool) if length is None else entry < length.repeat_interleave(q.shape[2])[:, None]
        named.append(counted & (lists >= 0) & (lists < len(flat)))
        rows.append(flat[lists.clamp(0, len(flat) - 1)])
    keys, seen = torch.cat(rows, 1)[:, None], torch.cat(named, 1)[:, None, None]
    tokens = q.transpose(1, 2).flatten(0, 1)[:, :, None]  # [tokens, heads, 1, head_dim]
    columns = options.get("v_dim") or min(q.shape[-1], 512)
    out, lse = attend(tokens, keys, keys[..., :columns], seen, scale, None, options.get("sinks"))
    shaped = [x[:, :, 0].unflatten(0, (len(q), -1)).transpose(1, 2) for x in (out, lse[..., None])]
    return [shaped[0], shaped[1][..., 0]][: 1 + return_lse]


def index_scores(
    q: Tensor, cache: Tensor, weights: Tensor, cache_scale: Any = None, kv_len: Any = None, kv_start: Any = None, block_table: Any = None, **_: Any
) -> tuple[Tensor, Tensor]:
    """Scores [batch, q_len, keys], -inf where a token does not see the key, and the cache row of
    each key [batch, keys].
    """
    batch, queries = q.shape[:2]
    table = torch.arange(batch, device=q.device)[:, None] if block_table is None else block_table.long().clamp(0, len(cache) - 1)
    rows = (table[..., None] * cache.shape[1] + torch.arange(cache.shape[1], device=q.device)).flatten(1)
    keys, flat = cache.flatten(0, 1).float() if q.dtype is not torch.float64 else cache.flatten(0, 1), rows.shape[1]
    heads, named = wide(q).transpose(1, 2), keys[rows][:, None]
    codes = cache_scale is not None and q.dtype is not torch.float64
    products = code_sums(heads, named) if codes and has_tensor_cores(heads) else heads @ named.mT  # [batch, heads, queries, keys]
    scores = (products.relu() * wide(weights).transpose(1, 2)[..., None]).sum(1)
    scores = scores if cache_scale is None else scores * wide(cache_scale).flatten()[rows][:, None]
    n = torch.full((batch,), flat, device=q.device) if kv_len is None else kv_len.long().clamp(0, flat)
    first = torch.zeros_like(n) if kv_start is None else kv_start.long()
    i, j = torch.arange(queries, device=q.device)[:, None], torch.arange(flat, device=q.device)
    seen = visible(i, j, n[:, None, None], torch.tensor(queries, device=q.device), True, None) & (j >= first[:, None, None])
    return scores.masked_fill(~seen, -torch.inf), rows


@defines
def sparse_index(q: Tensor, cache: Tensor, weights: Tensor, topk: int, **options: Any) -> Results:
    """The topk largest scores, -inf where there are fewer, which tell as much as the rows."""
    scores, _ = index_scores(q, cache, weights, **options)
    missing = scores.new_full((*scores.shape[:2], max(0, topk - scores.shape[2])), -torch.inf)
    return [torch.cat((scores, missing), -1).topk(topk).values]


def scores_of_lists(lists: Tensor, inputs: dict[str, Any]) -> Tensor:
    """The float64 scores of the rows that `sparse_index` lists, falling; NaN for lists that are
    not in the order of the keys, with holes last, and for rows that are no key's.
    """
    scores, rows = index_scores(**{key: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for key, x in inputs.items()})
    found = torch.full(lists.shape, torch.nan, dtype=torch.float64, device=lists.device)
    for b, t in itertools.product(*map(range, lists.shape[:2])):
        place = {row: key for key, row in enumerate(rows[b].tolist()) if scores[b, t, key] > -torch.inf}
        named = [place.get(row, -1) for row in lists[b, t].tolist() if row != -1]
        if -1 not in named and named == sorted(set(named)) and (lists[b, t, len(named) :] == -1).all():
            found[b, t] = -torch.inf
            found[b, t, : len(named)] = scores[b, t, named].sort(descending=True).values
    return found.float()


@defines
def kv_append(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *, positions: Tensor, q: Any = None, exact: bool, **options: Any) -> Results:
    batch, _, tokens, _ = k.shape
    at = positions.view(batch, tokens).long()
    eps, early = options.get("eps", 1e-6), options.get("round_before_weight", False)
    parts = {"q": q, "k": k, "v": v}
    for name, x in parts.items():
        weight = options.get(f"{name}_norm")
        if x is not None and weight is not None:
            parts[name] = normed(x, weight, eps, 0.0, early).to(x.dtype)
    if options.get("cos") is not None:
        own = options.get("rope_positions")
        row = (at if own is None else own.view(batch, tokens).long()).clamp(0, len(options["cos"]) - 1)
        angles = [options[name][row][:, None] for name in ("cos", "sin")]
        for name in ("q", "k"):
            if parts[name] is not None:
                parts[name] = rotated(parts[name], angles[0], angles[1], options.get("interleaved", False))
    table, room = options.get("block_table"), k_cache.shape[2]
    most = room if table is None else room * table.shape[1]
    b, t = ((at >= 0) & (at < most)).nonzero(as_tuple=True)
    place = at[b, t]
    outer = b if table is None else table[b, place // room].long()
    caches, scales = [k_cache.clone(), v_cache.clone()], []
    for name, cache in zip(("k", "v"), caches, strict=True):
        row, scale = parts[name][b, :, t], options.get(f"{name}_scale")
        if scale is not None and scale.dim():
            made = wide(row).abs().amax(-1).clamp(min=448 * 2.0**-126) / 448
            scales.append(scale.clone())
            scales[-1][outer, :, place % room] = torch.where(made.isfinite(), made, torch.nan)
            row = wide(row) / scales[-1][outer, :, place % room][..., None]
        elif scale is not None:
            row = (wide(row) / scale).clamp(-448.0, 448.0)
        cache[outer, :, place % room] = row if exact else row.to(cache.dtype)
    return [*caches, *([] if q is None else [parts["q"]]), *scales]
