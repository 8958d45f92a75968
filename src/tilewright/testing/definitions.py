"""What each op means, written from its formula once more, for the fuzz.

`DEFINITIONS[op](**inputs)` returns the op's results. Called with float64 tensors it is the truth;
in the op's own dtype, with the roundings that PyTorch has, it is what the accuracy rule allows.
Nothing here calls an op's `reference`, so an error in both of them shows.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Results = list[Tensor]
DEFINITIONS: dict[str, Callable[..., Results]] = {}
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def defines(function: Callable[..., Results]) -> Callable[..., Results]:
    DEFINITIONS[function.__name__] = function
    return function


def wide(x: Tensor) -> Tensor:
    """At least fp32."""
    return x.double() if x.dtype is torch.float64 else x.float()


# ------------------------------------------------------------------------------- rows and elements
def normed(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, round_before_weight: bool = False) -> Tensor:
    y = wide(x) / (wide(x).square().mean(-1, keepdim=True) + eps).sqrt()
    y = wide(y.to(x.dtype)) if round_before_weight else y
    return y if weight is None else y * (wide(weight) + offset)


@defines
def rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0, round_before_weight: bool = False, residual: Any = None) -> Results:
    total = x if residual is None else x + residual
    out = normed(total, weight, eps, weight_offset, round_before_weight).to(x.dtype)
    return [out] if residual is None else [out, total]


@defines
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Results:
    centred = wide(x) - wide(x).mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    y = y if weight is None else y * wide(weight)
    return [(y if bias is None else y + wide(bias)).to(x.dtype)]


@defines
def softmax(x: Tensor) -> Results:
    powers = (wide(x) - wide(x).amax(-1, keepdim=True)).exp()
    return [(powers / powers.sum(-1, keepdim=True)).to(x.dtype)]


def activated(gate: Tensor, gelu_tanh: bool) -> Tensor:
    g = wide(gate)
    if gelu_tanh:
        return 0.5 * g * (1 + (math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)).tanh())
    return g / (1 + (-g).exp())


@defines
def silu_mul(gate: Tensor, up: Tensor | None = None, gelu_tanh: bool = False) -> Results:
    if up is None:
        gate, up = gate.chunk(2, -1)
    return [activated(gate, gelu_tanh).to(gate.dtype) * up]


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """cos, sin: broadcast against x but for its last axis."""
    half = cos.shape[-1]
    first = torch.arange(half, device=x.device) * (2 if interleaved else 1)
    second = first + (1 if interleaved else half)
    a, b, y = wide(x[..., first]), wide(x[..., second]), x.clone()
    y[..., first], y[..., second] = (a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype)
    return y


@defines
def rope(q: Tensor, k: Tensor, cos: Any = None, sin: Any = None, positions: Any = None, inv_freq: Any = None, interleaved: bool = False) -> Results:
    if positions is not None:
        angle = positions[..., None].to(inv_freq.dtype) * inv_freq
        cos, sin = angle.cos(), angle.sin()
    return [rotated(x, cos[:, None], sin[:, None], interleaved) for x in (q, k)]


@defines
def embedding(ids: Tensor, weight: Tensor, scale: float = 1.0) -> Results:
    known = (ids >= 0) & (ids < len(weight))
    return [torch.where(known[..., None], weight[ids.clamp(0, len(weight) - 1).long()] * scale, torch.nan)]


@defines
def argmax(x: Tensor) -> Results:
    position = torch.arange(x.shape[-1], device=x.device)
    return [torch.where(x == x.amax(-1, keepdim=True), position, x.shape[-1]).amin(-1)]


@defines
def merge_states(states: Tensor, states_lse: Tensor, base2: bool = False) -> Results:
    base = math.log(2) if base2 else 1.0
    logs = wide(states_lse) * base if states.dtype is not torch.float64 else states_lse.double() * base
    total = logs.logsumexp(0)
    share = (logs - total).exp().nan_to_num(0.0)[..., None]
    values = torch.where(share == 0, 0.0, wide(states))
    return [(share * values).sum(0).to(states.dtype), total / base]


def philox(counter: list[Tensor], key: list[Tensor]) -> list[Tensor]:
    """Philox4x32-10 on int64 tensors that hold 32-bit words (Salmon et al. 2011)."""
    low = 0xFFFFFFFF
    for _ in range(10):
        products = [(counter[i], m) for i, m in ((0, 0xD2511F53), (2, 0xCD9E8D57))]
        halves = [((a >> 16) * m, (a & 0xFFFF) * m) for a, m in products]  # no product of 64 bits
        words = [(((h + (t >> 16)) >> 16) & low, (((h << 16) & low) + t) & low) for h, t in halves]
        (high0, low0), (high1, low1) = words
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    return counter


@defines
def dropout(x: Tensor, p: float, seed: Tensor, offset: Tensor | None = None) -> Results:
    index = torch.arange(x.numel(), device=x.device)
    counter = index // 4 + (0 if offset is None else offset)
    nothing, low = torch.zeros_like(counter), 0xFFFFFFFF
    words = philox([counter & low, (counter >> 32) & low, nothing, nothing], [seed & low, (seed >> 32) & low])
    word = torch.stack(words, -1).gather(-1, (index % 4)[:, None])[:, 0].view(x.shape)
    return [torch.where(word >= p * 2.0**32, wide(x) * (1 / (1 - p) if p < 1 else 0.0), 0.0).to(x.dtype)]


# ----------------------------------------------------------------------------------- 8-bit numbers
def spread(scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A scale for each element of a matrix, or of a batch of them."""
    if scale.dim() <= max(0, len(shape) - 2):
        return scale[..., None, None]
    if scale.dim() == len(shape) - 1:
        return scale[..., None]
    scale = scale.repeat_interleave(128, -1)[..., : shape[-1]]
    return scale if scale.shape[-2] == shape[-2] else scale.repeat_interleave(128, -2)[..., : shape[-2], :]


def values_of(codes: Tensor, scale: Tensor | None, exact: bool) -> Tensor:
    if scale is None:
        return codes.double() if exact else codes if codes.dtype not in FP8 else codes.float()
    return (codes.double() * spread(scale, tuple(codes.shape)).double()).to(torch.float64 if exact else torch.float32)


def coded(y: Tensor, block: tuple[int | None, int | None], dtype: torch.dtype, power_of_two_scales: bool, given: Tensor | None = None) -> Results:
    """Values as the codes hold them (in float64 unrounded), and scales."""
    largest = torch.finfo(dtype).max
    rows, cols = y.shape
    high, across = block[0] or rows, block[1] or cols
    padded = torch.nn.functional.pad(y, (0, -cols % across, 0, -rows % high))
    groups = padded.view(padded.shape[0] // high, high, -1, across)
    scale = groups.abs().amax((1, 3)).clamp(min=largest * 2.0**-126) / largest if given is None else given.to(y.dtype).view(1, 1)
    if power_of_two_scales and given is None:
        scale = scale.log2().sub(1e-12 if y.dtype is torch.float64 else 0).ceil().exp2()
    each = scale[:, None, :, None]
    codes = (groups / each).clamp(-largest, largest)
    held = ((codes if y.dtype is torch.float64 else codes.to(dtype).to(y.dtype)) * each).reshape(padded.shape)[:rows, :cols]
    return [held, scale]


@defines
def quantize_fp8(x: Tensor, block: Any, dtype: torch.dtype, power_of_two_scales: bool = False, scale: Tensor | None = None) -> Results:
    return coded(wide(x), block, dtype, power_of_two_scales, scale)


@defines
def rms_norm_quant(
    x: Tensor, weight: Tensor, eps: float, block: Any, dtype: torch.dtype, power_of_two_scales: bool, residual: Any, **norm: Any
) -> Results:
    total = x if residual is None else x + residual
    y = normed(total, weight, eps, norm["weight_offset"], norm["round_before_weight"])
    return [*coded(y, block, dtype, power_of_two_scales), *([] if residual is None else [total])]


@defines
def silu_mul_quant(gate: Tensor, up: Any = None, *, gelu_tanh: bool, block: Any, dtype: torch.dtype, power_of_two_scales: bool) -> Results:
    if up is None:
        gate, up = gate.chunk(2, -1)
    return coded(activated(gate, gelu_tanh) * wide(up), block, dtype, power_of_two_scales)


# --------------------------------------------------------------------------------- matrix products
@defines
def matmul(a: Tensor, b: Tensor, bias: Any, *, trans_a: bool, trans_b: bool, exact: bool, stored: torch.dtype, **options: Any) -> Results:
    x = values_of(a.mT if trans_a else a, options.get("scale_a"), exact)
    w = values_of(b if trans_b else b.mT, options.get("scale_b"), exact)
    y = x @ w.mT
    y = y if exact or x.dtype == a.dtype else y.to(stored)
    y = y if bias is None else y + bias
    if options.get("silu_mul"):
        y = activated(y[..., 0::2], False).to(y.dtype) * y[..., 1::2]
    for name, change in (("out_scale", torch.mul), ("residual", torch.add)):
        y = y if options.get(name) is None else change(y, options[name])
    return [y if exact else y.to(stored)]


@defines
def bmm(a: Tensor, b: Tensor, *, trans_a: bool, trans_b: bool, exact: bool, stored: torch.dtype, scale_a: Any, scale_b: Any) -> Results:
    x, w = values_of(a.mT if trans_a else a, scale_a, exact), values_of(b if trans_b else b.mT, scale_b, exact)
    y = x @ w.mT if exact or stored == x.dtype else x.float() @ w.mT.float()
    return [y if exact else y.to(stored)]


@defines
def grouped_gemm(  # noqa: PLR0913 the op's arguments
    a: Tensor, b: Tensor, offsets: Any, counts: Any, *, trans_b: bool, exact: bool, stored: torch.dtype, scale_a: Any, scale_b: Any
) -> Results:
    x, w = values_of(a, scale_a, exact), values_of(b if trans_b else b.mT, scale_b, exact)
    x, w = (x, w) if exact or stored == x.dtype else (x.float(), w.float())
    row = torch.arange(a.shape[-2], device=a.device)
    if counts is not None:
        y = torch.where((row < counts[:, None])[..., None], torch.where((row < counts[:, None])[..., None], x, 0) @ w.mT, 0)
    else:
        group = torch.searchsorted(offsets.long(), row, right=True)
        each = torch.stack([x @ matrix.mT for matrix in w])
        y = torch.where((group < len(w))[:, None], each[group.clamp(max=len(w) - 1), row], 0)
    return [y if exact else y.to(stored)]


@defines
def rms_norm_matmul(
    x: Tensor, weight: Tensor, b: Tensor, bias: Any, *, eps: float, residual: Any, silu_mul: bool, weight_offset: float = 0.0
) -> Results:
    total = x if residual is None else x + residual
    y = normed(total, weight, eps, weight_offset).to(x.dtype) @ b.mT
    y = y if bias is None else y + bias
    y = activated(y[..., 0::2], False).to(y.dtype) * y[..., 1::2] if silu_mul else y
    return [y, *([] if residual is None else [total])]


@defines
def moe(x: Tensor, gate_up: Tensor, down: Tensor, *, weights: Tensor, ids: Tensor, **options: Any) -> Results:
    """Every expert for every token, then the share that each token has of each."""
    experts = len(down)
    here = (ids >= 0) & (ids < experts)
    share = torch.zeros(len(x), experts + 1, dtype=weights.dtype, device=x.device)
    share.scatter_add_(1, torch.where(here, ids, experts).long(), weights)
    both = torch.einsum("th,eih->eti", x, gate_up)
    both = both if options.get("bias_gate_up") is None else both + options["bias_gate_up"][:, None]
    gate, up = both.chunk(2, -1)
    if options["limit"] is not None:
        gate, up = gate.clamp(max=options["limit"]), up.clamp(-options["limit"], options["limit"])
    active = gate / (1 + (-options["alpha"] * gate).exp()) * (up + options["up_offset"])
    y = torch.einsum("eti,ehi->eth", active, down)
    y = y if options.get("bias_down") is None else y + options["bias_down"][:, None]
    return [torch.einsum("te,eth->th", share[:, :experts], wide(y)).to(x.dtype)]


def scores_of(logits: Tensor, sigmoid: bool, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of all experts: what weights come from, what the choice goes by."""
    scores = wide(logits).sigmoid() if sigmoid else softmax(wide(logits))[0]
    return scores, scores if bias is None else scores + bias


@defines
def moe_route(
    logits: Tensor, top_k: int, *, sigmoid: bool, bias: Any, normalize: bool, scale: float, groups: int, top_groups: int, **rest: Any
) -> Results:
    """The weights, and by what the experts were chosen, which tells as much as their ids."""
    scores, by = scores_of(logits, sigmoid, bias)
    if groups:
        inside = by.unflatten(-1, (groups, -1))
        strength = inside.topk(min(2, inside.shape[-1]), -1)[0].sum(-1) if bias is not None else inside.amax(-1)
        best = strength.topk(top_groups, -1)[1]
        taking_part = torch.zeros_like(strength, dtype=torch.bool).scatter(-1, best, True)
        by = torch.where(taking_part[..., None], inside, -torch.inf).flatten(-2)
    chosen, ids = torch.sort(by, dim=-1, descending=True, stable=True)
    weights = scores.gather(-1, ids[..., :top_k])
    weights = weights / weights.sum(-1, keepdim=True) if normalize else weights
    return [weights * scale, chosen[..., :top_k]]


# --------------------------------------------------------------------------------------- attention
def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, softcap: float | None = None, sinks: Tensor | None = None) -> Results:
    """q [.., heads, queries, d], k and v [.., kv_heads, keys, d], seen [.., 1, queries, keys]."""
    used = seen.any(-2).unsqueeze(-1)  # memory that holds no key may hold anything
    group = q.shape[-3] // k.shape[-3]
    k, v = (torch.where(used, x, 0).repeat_interleave(group, -3) for x in (k, v))
    scores = wide(q @ k.mT * scale)
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1)
    total = lse if sinks is None else torch.logaddexp(lse, wide(sinks).to(lse.dtype)[:, None].expand(lse.shape))
    weights = torch.where(seen, (scores - torch.where(total.isfinite(), total, 0.0)[..., None]).exp(), 0.0)
    return [(weights.to(v.dtype) @ v).to(q.dtype), lse]


def visible(query: Tensor, key: Tensor, keys: Tensor, queries: Tensor, causal: bool, window: int | None) -> Tensor:
    """Whether a query sees a key: both counted in their sequence, the last two side by side."""
    last = query + keys - queries
    seen = key < keys
    seen = seen & (key <= last) if causal else seen
    return seen if window is None else seen & (key > last - window)


@defines
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: Any, return_lse: bool, softcap: Any, sinks: Any = None, **ragged: Any
) -> Results:
    scale, device = q.shape[-1] ** -0.5, q.device
    if "cu_seqlens_q" in ragged:
        starts = [ragged[name].long() for name in ("cu_seqlens_q", "cu_seqlens_kv")]
        at = [torch.arange(len(x), device=device) for x in (q, k)]
        own = [torch.searchsorted(start, i, right=True) - 1 for start, i in zip(starts, at, strict=True)]
        counts = [start.diff()[own[0].clamp(max=len(start) - 2)][:, None] for start in starts]
        inside = [i - start[sequence.clamp(max=len(start) - 2)] for i, start, sequence in zip(at, starts, own, strict=True)]
        seen = visible(inside[0][:, None], inside[1][None], counts[1], counts[0], causal, window) & (own[0][:, None] == own[1][None])
        out, lse = attend(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), seen[None], scale, softcap, sinks)
        return [out.transpose(0, 1), *([lse] if return_lse else [])]
    queries, keys = q.shape[2], k.shape[2]
    zero = torch.zeros(len(q), dtype=torch.int64, device=device)
    start = zero if ragged.get("kv_start") is None else ragged["kv_start"].long()
    end = zero + keys if ragged.get("kv_len") is None else ragged["kv_len"].long()
    i, j = torch.arange(queries, device=device)[:, None], torch.arange(keys, device=device)
    n = (end - start)[:, None, None, None].clamp(min=0)
    key = j - start[:, None, None, None]
    seen = visible(i, key, n, torch.tensor(queries, device=device), causal, window) & (key >= 0)
    return attend(q, k, v, seen, scale, softcap, sinks)[: 1 + return_lse]


@defines
def mla(q_nope: Tensor, q_rope: Tensor, *, k_nope: Tensor, k_rope: Tensor, v: Tensor, causal: bool, return_lse: bool, kv_len: Any = None) -> Results:
    k = torch.cat((k_nope, k_rope.expand(-1, k_nope.shape[1], -1, -1)), -1)
    return attention(torch.cat((q_nope, q_rope), -1), k, v, causal=causal, window=None, return_lse=return_lse, softcap=None, kv_len=kv_len)


def newest(  # noqa: PLR0913 the op's arguments
    q: Tensor, k: Tensor, v: Tensor, kv_len: Any, table: Any, kv_start: Any, window: Any, scale: float, sinks: Any = None
) -> Results:
    """Attention of the last tokens of each sequence over a cache, in one piece or in pages."""
    if table is not None:
        k, v = (x[table.long().clamp(0, len(x) - 1)].transpose(1, 2).flatten(2, 3) for x in (k, v))
    queries, keys = q.shape[2], k.shape[2]
    n = torch.full((len(q),), keys, device=q.device) if kv_len is None else kv_len.long().clamp(0, keys)
    start = torch.zeros_like(n) if kv_start is None else kv_start.long()
    i, j = torch.arange(queries, device=q.device)[:, None], torch.arange(keys, device=q.device)
    seen = visible(i, j, n[:, None, None, None], torch.tensor(queries, device=q.device), True, window) & (j >= start[:, None, None, None])
    return attend(q, k, v, seen, scale, None, sinks)


@defines
def attention_decode(q: Tensor, k: Tensor, v: Any, kv_len: Any, *, window: Any, return_lse: bool, kv_start: Any = None, **options: Any) -> Results:
    v = k[..., : options.get("v_dim")] if v is None else v
    table, sinks = options.get("block_table"), options.get("sinks")
    return newest(q, k, v, kv_len, table, kv_start, window, q.shape[-1] ** -0.5, sinks)[: 1 + return_lse]


@defines
def mla_decode(
    q_latent: Tensor, q_rope: Tensor, cache: Tensor, kv_len: Any, *, scale: float, block_table: Any, kv_start: Any, return_lse: bool
) -> Results:
    q, k = torch.cat((q_latent, q_rope), -1), cache[:, None]
    return newest(q, k, k[..., : q_latent.shape[-1]], kv_len, block_table, kv_start, None, scale)[: 1 + return_lse]


@defines
def sparse_decode(q: Tensor, cache: Tensor, indices: Tensor, topk_length: Any, *, scale: float, return_lse: bool, **options: Any) -> Results:
    """Each token is a sequence of its own, of the rows that its lists name."""
    rows, named = [], []
    for held, lists, length in (
        (cache, indices, topk_length),
        *([(options["extra_cache"], options["extra_indices"], options["extra_length"])] if "extra_cache" in options else []),
    ):
        flat, lists = held.flatten(0, 1), lists.flatten(0, 1).long()
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
    caches = [k_cache.clone(), v_cache.clone()]
    for name, cache in zip(("k", "v"), caches, strict=True):
        row, scale = parts[name][b, :, t], options.get(f"{name}_scale")
        if scale is not None:
            row = (wide(row) / scale).clamp(-448.0, 448.0)
        cache[outer, :, place % room] = row if exact else row.to(cache.dtype)
    return [*caches, *([] if q is None else [parts["q"]])]
