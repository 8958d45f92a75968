"""Writes new keys and values to their cache, and rotates keys and queries, in one launch:

    k_cache[b, h, positions[b, t]] = rope(k[b, h, t])
    v_cache[b, h, positions[b, t]] = v[b, h, t]
    q = rope(q), in place

A paged cache has row `position % page_size` of page `block_table[b, position // page_size]`
instead. A cache of 8-bit codes gets values / scale, with a scale that is given, or one of each
token and head:

    k_scale[b, h, positions[b, t]] = max |k| / 448
With q_norm, k_norm or v_norm, each head of q, k or v is normed first: rms_norm(k[b, h, t], k_norm),
as Qwen3 does to queries and keys and MLA to its latent.

Source    vLLM's reshape_and_cache (Kwon et al. 2023, arXiv:2309.06180, section 4.3) and the
          rotation of `rope`, made one.
Numerics  Values are copied; rotated and normed ones fp32 from load to store, rounded once, also to
          codes, which saturate; the normed ones with round_before_weight also before the weight, as
          `rms_norm` has it.
Bound     Memory: k and v read and written once, q read and written once. For one token per sequence
          the latency of three loads that wait for each other (position, row of the table, store),
          and of the launch that rope and two copies no longer need.
"""

from typing import Optional, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ...launch import FLOATS, Device, argument_error, check_apart, check_bools, check_positive, check_tensor, check_writable, dtype_name, torch_op
from ...launch.values import Claim, Claims, positive
from .. import rms_norm, rope
from ..common.fp8 import ROW, quantized
from ..common.scaling import FP8
from ..common.softmax_tiles import check_int32
from .decision import CHOICES as CHOICES, Config as Config, Problem as Problem, plan as plan, space as space


def reference(
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
    rope_positions: Tensor | None = None,
    interleaved: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    v_norm: Tensor | None = None,
    eps: float = 1e-6,
    round_before_weight: bool = False,
) -> tuple[Tensor, ...]:
    """The definition, not in place."""
    batch, _, tokens, _ = k.shape
    positions = positions.view(batch, tokens).long()

    def normed(x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else cast(Tensor, rms_norm.reference(x, weight, eps, round_before_weight=round_before_weight))

    q, k, v = None if q is None else normed(q, q_norm), normed(k, k_norm), normed(v, v_norm)
    if cos is not None and sin is not None:
        angle_rows = positions if rope_positions is None else rope_positions.view(batch, tokens).long()
        angle_rows = angle_rows.clamp(0, len(cos) - 1)
        rotated, k = rope.reference(k if q is None else q, k, cos[angle_rows], sin[angle_rows], interleaved=interleaved)
        q = None if q is None else rotated
    k_cache, v_cache = k_cache.clone(), v_cache.clone()
    k_scale, v_scale = (None if x is None else x.clone() for x in (k_scale, v_scale))
    for b in range(batch):
        for t in range(tokens):
            at, outer = int(positions[b, t]), b
            if block_table is not None and 0 <= at < block_table.shape[1] * k_cache.shape[2]:
                outer, at = int(block_table[b, at // k_cache.shape[2]]), at % k_cache.shape[2]
            if 0 <= at < k_cache.shape[2] and 0 <= outer < len(k_cache):
                for x, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
                    row = x[b, :, t]
                    if scale is not None and scale.dim():
                        wide = row.to(torch.promote_types(row.dtype, torch.float32))
                        row, scale[outer, :, at] = quantized(wide, ROW, torch.float8_e4m3fn, power_of_two_scales=False)
                    elif scale is not None:
                        largest = 448.0 if cache.dtype is torch.float64 else torch.finfo(cache.dtype).max
                        row = (row.to(torch.promote_types(row.dtype, torch.float32)) / scale).clamp(-largest, largest)
                    cache[outer, :, at] = row.to(cache.dtype)
    return _given(k_cache, v_cache, q, k_scale, v_scale)


def _given(k_cache: Tensor, v_cache: Tensor, q: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None) -> tuple[Tensor, ...]:
    """Of the tensors of a call those that it writes."""
    return (k_cache, v_cache, *(x for x in (q, k_scale, v_scale) if x is not None and x.dim()))


ARGUMENTS = (
    *("k", "v", "k_cache", "v_cache", "positions", "block_table", "q", "cos", "sin", "rope_positions"),
    *("k_scale", "v_scale", "q_weight", "k_weight", "v_weight", "rotated", "eps"),
)
DECISION = CHOICES.decision(Problem, plan, ARGUMENTS)


def _claims(k_cache: Tensor, positions: Tensor, block_table: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None) -> Claims:
    pool, _, page_size, _ = k_cache.shape
    rooms = page_size * (1 if block_table is None else block_table.shape[1])
    stored = (positions >= 0) & (positions < rooms)
    ordered, order = positions.sort(dim=1, stable=True)
    again = torch.zeros_like(stored)
    again[:, 1:] = ordered.diff(dim=1) == 0
    yield Claim("positions", positions, ~(stored & torch.zeros_like(stored).scatter(1, order, again)), "unlike those before it in its sequence")
    if block_table is not None:
        page = positions.clamp(0, rooms - 1).long() // page_size
        used = torch.zeros_like(block_table, dtype=torch.int32).scatter_add(1, page, stored.int()) > 0
        inside = (block_table >= 0) & (block_table < pool)
        yield Claim("block_table", block_table, ~used | inside, f"in 0..{pool - 1}, the pages of the cache")
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None and not scale.dim():
            yield from positive(name, scale)


@torch_op(mutates=("k_cache", "v_cache", "q", "k_scale", "v_scale", "rotated"), claims=_claims)
def kv_append_out(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    block_table: Optional[Tensor],
    q: Optional[Tensor],
    cos: Optional[Tensor],
    sin: Optional[Tensor],
    rope_positions: Optional[Tensor],
    k_scale: Optional[Tensor],
    v_scale: Optional[Tensor],
    q_norm: Optional[Tensor],
    k_norm: Optional[Tensor],
    v_norm: Optional[Tensor],
    interleaved: bool,
    eps: float,
    round_before_weight: bool,
    rotated: Optional[Tensor],
) -> None:
    """`kv_append`; positions and rope_positions [batch, tokens].

    With rotated, q, k and v are the shares of sums, in fp32: those of all sequences, then the next
    of each, [shares * batch, heads, tokens, dim]. rotated gets the queries.

    No checks, no sync: safe under graph capture.
    """
    (count, kv_heads, tokens, head_dim), v_dim, batch = k.shape, v.shape[3], len(positions)
    dtype = (k if rotated is None else rotated).dtype
    launches = DECISION.launches(
        Device.of(k),
        batch=batch,
        q_heads=0 if q is None else q.shape[1],
        kv_heads=kv_heads,
        tokens=tokens,
        head_dim=head_dim,
        max_len=k_cache.shape[2] * (1 if block_table is None else block_table.shape[1]),
        dtype=dtype,
        page_size=0 if block_table is None else k_cache.shape[2],
        v_dim=0 if v_dim == head_dim else v_dim,
        rotary_dim=0 if cos is None else 2 * cos.shape[1],
        interleaved=interleaved,
        cache_dtype=None if k_cache.dtype is dtype else k_cache.dtype,
        own_rope_positions=rope_positions is not None,
        v_norm=v_norm is not None,
        round_before_weight=round_before_weight,
        q_norm=q_norm is not None,
        k_norm=k_norm is not None,
        each=k_scale is not None and k_scale.dim() > 0,
        shares=count // batch,
    )
    launches.run(
        k,
        v,
        k_cache,
        v_cache,
        positions,
        block_table,
        q,
        cos,
        sin,
        rope_positions,
        *(None if scale is None else scale if scale.dim() else scale.view(1) for scale in (k_scale, v_scale)),
        None if q_norm is None else q_norm.view(1, 1, 1, -1),
        None if k_norm is None else k_norm.view(1, 1, 1, -1),
        None if v_norm is None else v_norm.view(1, 1, 1, -1),
        rotated,
        eps,
    )


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
    rope_positions: Tensor | None = None,
    interleaved: bool = False,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    v_norm: Tensor | None = None,
    eps: float = 1e-6,
    round_before_weight: bool = False,
) -> tuple[Tensor, ...]:
    """Writes new keys and values to their cache, in one launch. With cos and sin, it rotates the
    keys before it stores them, and the queries in place.

    The compressed cache of MLA, [..., 576] = 512 latent + 64 rotated, is two views of one tensor: k
    and k_cache the rotated part, v and v_cache the latent.

    Args:
        k: [batch, kv_heads, tokens, head_dim]; bf16, fp16 or fp32; any strides with stride 1 in the
            last axis.
        v: [batch, kv_heads, tokens, v_dim], dtype and device of k.
        k_cache: [batch, kv_heads, max_len, head_dim], in pages [pages, kv_heads, page_size,
            head_dim]; dtype of k, or float8_e4m3fn. Overwritten.
        v_cache: like k_cache, with v_dim columns. Overwritten; no element in common with k_cache.
        positions: [batch, tokens] int32, for one token also [batch]; each token's position in its
            sequence, all different within a sequence. A token whose position is negative or past
            the end of the cache (or of the table) is not stored.
        block_table: [batch, max_pages] int32, pages of each sequence; with it the caches are in
            pages.
        q: [batch, q_heads, tokens, head_dim], dtype and device of k; only with cos and sin.
            Overwritten.
        cos, sin: [max_pos, rotary_dim / 2], dtype of k or fp32. Elements of a head from rotary_dim
            on are not rotated.
        rope_positions: like positions; the row of cos and sin for each token, if it differs from
            the position. Clamped to the table.
        interleaved: a pair is two neighbours instead of one element of each half.
        k_scale, v_scale: fp32; required with a cache of 8-bit codes, else not allowed. A value is
            its code times the scale. Either [] and positive: the scale of all codes. Or shaped like
            the cache without its last axis, with stride 1 in its own last axis: the scale of each
            token and head, which is written for the tokens that are stored; their largest code is
            448.
        q_norm, k_norm: [head_dim], dtype and device of k; the weight of an RMSNorm of each head of
            q and k, applied before the rotation.
        v_norm: [v_dim], likewise; applied to v before it is stored.
        eps: of the norms; positive; added to the mean of squares.
        round_before_weight: of the norms, as in `rms_norm`.
    Returns: (k_cache, v_cache), then q if given, then k_scale and v_scale if they are of each token
        and head: the tensors it was given.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_bools(interleaved=interleaved, round_before_weight=round_before_weight)
    check_tensor(k, "k", ndim=4, dtypes=FLOATS)
    batch, kv_heads, tokens, head_dim = k.shape
    check_tensor(v, "v", ndim=4, like=k)
    check_tensor(v, "v", shape=(batch, kv_heads, tokens, v.shape[3]), like=k)
    check_tensor(k_cache, "k_cache", ndim=4, dtypes=(k.dtype, torch.float8_e4m3fn), like=k)
    outer = batch if block_table is None else k_cache.shape[0]
    check_tensor(k_cache, "k_cache", shape=(outer, kv_heads, k_cache.shape[2], head_dim))
    check_tensor(v_cache, "v_cache", shape=(*k_cache.shape[:3], v.shape[3]), like=k_cache)
    check_writable(k_cache, "k_cache")
    # Pages of one pool may be handed out to keys and to values: only the very same pages are
    # refused.
    apart = block_table is not None and (is_compiling() or v_cache.data_ptr() != k_cache.data_ptr())
    check_writable(v_cache, "v_cache", None if apart else k_cache, "k_cache")
    positions = _check_positions(positions, "positions", k)
    if block_table is not None:
        check_int32(block_table, "block_table", k, (batch, None))
    if (cos is None) != (sin is None):
        raise argument_error("cos and sin", "given together", "cos" if sin is None else "sin")
    for name, given in (("q", q), ("rope_positions", rope_positions)):
        if given is not None and cos is None:
            raise argument_error(name, "given only with cos and sin", type(given).__name__)
    if cos is not None:
        check_tensor(cos, "cos", ndim=2, dtypes=(k.dtype, torch.float32), like=k)
        if not len(cos) or not 0 < 2 * cos.shape[1] <= head_dim:
            raise argument_error("cos.shape", f"(at least 1, 1 to {head_dim // 2})", tuple(cos.shape))
        check_tensor(sin, "sin", shape=cos.shape, like=cos)  # type: ignore[arg-type]
    if rope_positions is not None:
        rope_positions = _check_positions(rope_positions, "rope_positions", k)
    if q is not None:
        check_tensor(q, "q", ndim=4, like=k)
        check_tensor(q, "q", shape=(batch, q.shape[1], tokens, head_dim), like=k)
        check_writable(q, "q")
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if k_cache.dtype in FP8:
            if scale is None:
                shapes = f"(), one for all codes, or {tuple(k_cache.shape[:3])}, one for each token and head"
                raise argument_error(name, f"given for a cache of {dtype_name(k_cache.dtype)}, as fp32 of shape {shapes}", None)
            each = isinstance(k_scale, Tensor) and k_scale.dim() > 0
            check_tensor(scale, name, shape=tuple(k_cache.shape[:3]) if each else (), dtypes=(torch.float32,), like=k)
            if each:
                check_writable(scale, name, None if name == "k_scale" else k_scale, "k_scale")
        elif scale is not None:
            raise argument_error(name, f"None for a cache of {dtype_name(k_cache.dtype)}", type(scale).__name__)
    if q_norm is not None and q is None:
        raise argument_error("q_norm", "given only with q", type(q_norm).__name__)
    norms = {"q_norm": q_norm, "k_norm": k_norm, "v_norm": v_norm}
    for name, weight in norms.items():
        if weight is not None:
            check_tensor(weight, name, shape=(v.shape[3] if name == "v_norm" else head_dim,), dtypes=(k.dtype, torch.float32), like=k)
    if round_before_weight and all(weight is None for weight in norms.values()):
        raise argument_error("round_before_weight", "False without a norm", round_before_weight)
    check_positive(eps, "eps")
    caches, read = {"k_cache": k_cache, "v_cache": v_cache}, {"k": k, "v": v, "cos": cos, "sin": sin}
    scales: dict[str, Tensor | None] = {"k_scale": k_scale, "v_scale": v_scale} if k_scale is not None and k_scale.dim() else {}
    check_apart({**caches, "q": q, **scales}, **read, **norms, positions=positions, rope_positions=rope_positions, block_table=block_table)
    check_apart({"q": q, **scales}, **caches)
    check_apart(scales, q=q)
    empty = [(name, x) for name, x in (("k", k), ("v", v), ("k_cache", k_cache), ("block_table", block_table)) if x is not None and not x.numel()]
    if empty and q is not None and q.numel():  # which the same launch rotates
        raise argument_error(f"{empty[0][0]}.shape", "without an axis of 0 where q is given", tuple(empty[0][1].shape))
    if not empty:
        optional = (block_table, q, cos, sin, rope_positions, k_scale, v_scale, q_norm, k_norm, v_norm)
        kv_append_out(k, v, k_cache, v_cache, positions, *optional, interleaved, eps, round_before_weight, None)
    return _given(k_cache, v_cache, q, k_scale, v_scale)


def _check_positions(positions: Tensor, name: str, k: Tensor) -> Tensor:
    """As [batch, tokens]."""
    batch, tokens = k.shape[0], k.shape[2]
    flat = isinstance(positions, Tensor) and positions.dim() == 1 and tokens == 1
    check_int32(positions, name, k, (batch,) if flat else (batch, tokens))
    return positions[:, None] if flat else positions
