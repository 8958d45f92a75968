"""Multi-head latent attention of a sequence's newest tokens, absorbed: out = softmax(scale *
(q_latent c^T + q_rope r^T)) c, per head.

All heads read one cache, whose rows are [c | r]: the normalised latent and the rotated key. The
kernels are those of `attention_decode`, with c as keys and values at once; the up-projections of
keys and values are the caller's, folded into q_latent and applied to out.

Source    DeepSeek-AI 2024, "DeepSeek-V2", arXiv:2405.04434, sections 2.1.2 and 2.1.3, with the
          absorption that 2.1.2 describes.
Numerics  As attention_decode. One softmax over the sum of both products, which is taken in fp32.
          e4m3 rows take their scale from the device, one for each token; the two parts of the
          queries are then copied into one array, before the launch.
Bound     Memory (the cache, once) to about 100 heads x tokens; beyond that the products.
"""

from dataclasses import dataclass
from typing import Any, Optional, cast

import torch
from torch import Tensor

from ..launch import HALVES, Cost, Device, Launch, argument_error, check_bools, check_positive, check_tensor, next_pow2, out_or_new, torch_op
from ..select import Choices
from . import attention_decode as decode
from .attention_decode.calls import MOST_TOKENS, check_codes, check_decode, check_gathered, claims_of_cache
from .attention_decode.decision import ARGUMENTS, Config
from .common.softmax_tiles import check_scales, no_keys
from .common.tiles import LOG2E


def reference(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    kv_len: Tensor | None = None,
    *,
    scale: float,
    block_table: Tensor | None = None,
    kv_start: Tensor | None = None,
    cache_scale: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The definition, as attention in which every head has the cache as keys and its first columns
    as values.
    """
    q = torch.cat((q_latent, q_rope), -1)
    options: dict[str, Any] = {"v_dim": q_latent.shape[-1], "block_table": block_table, "kv_start": kv_start, "scale": scale}
    if cache_scale is not None:
        options["k_scale"] = options["v_scale"] = cache_scale[:, None]
    found = decode.reference(q, cache[:, None], None, kv_len, return_lse=return_lse, **options)
    return cast(Tensor | tuple[Tensor, Tensor], found)


@dataclass(frozen=True, slots=True)
class Problem:
    """What plans depend on; max_len, page_size, has_len, has_start, codes as in
    attention_decode.
    """

    batch: int
    heads: int
    max_len: int
    dtype: torch.dtype
    q_len: int = 1
    latent: int = 512
    rope: int = 64
    page_size: int = 0
    has_len: bool = True
    return_lse: bool = False
    has_start: bool = False
    codes: bool = False

    @property
    def decode(self) -> decode.Problem:
        """The same as attention with one key head."""
        shape = (self.batch, self.heads, 1, self.max_len, self.latent + self.rope, self.dtype, self.page_size, None, self.has_start, self.has_len)
        return decode.Problem(*shape, self.return_lse, self.q_len, self.latent, shared=True, codes=self.codes)

    def cost(self) -> Cost:
        return self.decode.cost()

    def inputs(self, device: torch.device) -> dict[str, Any]:
        given = self.decode.inputs(device)
        q = given["q"]
        scale = (128 + self.rope) ** -0.5  # over the dimensions of the keys before they are absorbed
        q_latent, q_rope = q[..., : self.latent].contiguous() / 2, q[..., self.latent :].contiguous()
        inputs = {"q_latent": q_latent, "q_rope": q_rope, "cache": given["k"][:, 0], "kv_len": given["kv_len"], "scale": scale}
        if self.codes:
            inputs["cache_scale"] = given["k_scale"][:, 0]
        return inputs | {"block_table": given.get("block_table"), "kv_start": given["kv_start"], "return_lse": self.return_lse}


CHOICES: Choices[Problem, Config] = Choices(
    "mla_decode",
    lambda p, device: decode.CHOICES.candidates(p.decode, device),
    lambda p, c, device: decode.CHOICES.legal(p.decode, c, device),
    lambda p, c, device: decode.CHOICES.work(p.decode, c, device),
    lambda p, c: decode.CHOICES.family_of(p.decode, c),
)
space = CHOICES.space


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """The launch over KV splits and, if there are several, that of the merge."""
    return decode.plan(p.decode, c, device)


DECISION = CHOICES.decision(Problem, plan, ARGUMENTS)


@torch_op(mutates=("out", "lse"), claims=claims_of_cache)
def mla_decode_out(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    kv_len: Optional[Tensor],
    block_table: Optional[Tensor],
    kv_start: Optional[Tensor],
    cache_scale: Optional[Tensor],
    scale: float,
    out: Tensor,
    lse: Optional[Tensor],
) -> None:
    """`mla_decode` into `out` and, if given, `lse`. No checks, no sync: for graph capture."""
    batch, heads, q_len, latent = q_latent.shape
    page_size = 0 if block_table is None else cache.shape[1]
    launches = DECISION.launches(
        Device.of(q_latent),
        batch=batch,
        heads=heads,
        max_len=next_pow2(cache.shape[1] if block_table is None else block_table.shape[1] * page_size),  # a bucket: a growing cache keeps its plan
        dtype=q_latent.dtype,
        q_len=q_len,
        latent=latent,
        rope=q_rope.shape[3],
        page_size=page_size,
        has_len=kv_len is not None,
        return_lse=lse is not None,
        has_start=kv_start is not None,
        codes=cache_scale is not None,
    )
    cache = cache[:, None]  # [batch or pages, one key head, keys, columns]
    values = cache[..., :latent]
    if cache_scale is not None:
        joined = q_latent.new_empty((*q_latent.shape[:-1], latent + q_rope.shape[3]))
        torch.cat((q_latent, q_rope), -1, out=joined)  # without `out`, autocast to bf16 refuses fp16
        q_latent, cache_scale = joined, cache_scale[:, None]
        cache, values = cache.view(torch.int32), values.view(torch.int32)  # four codes a word
    where = (kv_len, block_table, kv_start, cache_scale, cache_scale)
    launches.run(q_latent, q_rope, cache, values, out, lse, None, None, *where, 0, scale * LOG2E, 0.0)


def mla_decode(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    kv_len: Tensor | None = None,
    *,
    scale: float,
    block_table: Tensor | None = None,
    kv_start: Tensor | None = None,
    cache_scale: Tensor | None = None,
    return_lse: bool = False,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Absorbed latent attention of each sequence's newest tokens over its cache of latents and
    rotated keys.

    Args:
        q_latent: [batch, heads, q_len, latent]; bf16 or fp16; the unrotated part of the queries
            times the up-projection of the keys; q_len 1..4, latent 64, 128, 256 or 512. Its tokens
            are the last q_len of the sequence; token i sees the keys up to kv_len - q_len + i.
        q_rope: [batch, heads, q_len, rope]; the rotated part; rope a power of two, at least 16,
            less than latent.
        cache: [batch, max_len, latent + rope], or with a block_table [pages, page_size, latent +
            rope], page_size a power of two, at least 16; each row the normalised latent followed by
            the rotated key; any strides with stride 1 in the last axis. Dtype of q_latent, or
            float8_e4m3fn: codes, none of them NaN, all strides multiples of 4.
        kv_len: [batch] int32; the number of keys of each sequence; default all. Read on the device;
            the host never looks at its values.
        scale: of the sum of both products. It depends on the model's dimensions before absorption:
            192 ** -0.5 for DeepSeek-V3 without YaRN.
        block_table: [batch, max_pages] int32; the page that holds keys i * page_size onwards.
            Entries past kv_len may be anything.
        kv_start: [batch] int32; the first key of each sequence that counts (left padding); default
            0.
        cache_scale: fp32, shaped as cache without its last axis; given with codes and only then:
            what a row's codes are multiplied by, as `quantize_fp8(rows, block=(1, None))` makes it.
        return_lse: also return the natural log of the softmax denominator.
        out: where the result goes: of its shape, dtype and device, its axes in any order in
            memory; default a new tensor.
    Returns: out [batch, heads, q_len, latent], still to be multiplied by the up-projection of the
        values; with return_lse the tuple (out, lse), lse fp32 [batch, heads, q_len]. A token that
        sees no key gives 0, its lse -inf. Memory outside the keys may hold anything.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_bools(return_lse=return_lse)
    check_tensor(q_latent, "q_latent", ndim=4, dtypes=HALVES)
    batch, heads, q_len, latent = q_latent.shape
    if not 1 <= q_len <= MOST_TOKENS:
        raise argument_error("q_latent.shape[2]", f"in 1..{MOST_TOKENS}", q_len)
    if latent not in (64, 128, 256, 512):
        raise argument_error("q_latent.shape[3]", "64, 128, 256 or 512", latent)
    check_tensor(q_rope, "q_rope", ndim=4, like=q_latent)
    rope = q_rope.shape[3]
    if q_rope.shape[:3] != q_latent.shape[:3] or rope & (rope - 1) or not 16 <= rope < latent:
        wanted = f"({batch}, {heads}, {q_len}, rope), rope a power of two, at least 16 and less than {latent}"
        raise argument_error("q_rope.shape", wanted, tuple(q_rope.shape))
    stored = cache.dtype if isinstance(cache, Tensor) and cache.dtype is torch.float8_e4m3fn else q_latent.dtype
    check_tensor(cache, "cache", ndim=3, dtypes=(stored,), like=q_latent)
    if cache.shape[2] != latent + rope or (block_table is None and cache.shape[0] != batch):
        raise argument_error("cache.shape", (cache.shape[0] if block_table is not None else batch, cache.shape[1], latent + rope), tuple(cache.shape))
    check_positive(scale, "scale")
    check_decode(q_latent, cache.shape[1], kv_len, block_table, kv_start, None)
    check_scales(cache, cache_scale=(cache_scale, tuple(cache.shape[:2])))
    if cache_scale is not None:
        check_codes(q_latent, 2 * latent, cache=cache)
    if block_table is not None:
        check_gathered(cache.shape[1], cache=cache, cache_scale=cache_scale)
    inputs = (q_latent, q_rope, cache, kv_len, block_table, kv_start, cache_scale)
    out = out_or_new(out, q_latent.shape, q_latent.dtype, *inputs, contiguous=False)
    lse = torch.empty((batch, heads, q_len), dtype=torch.float32, device=q_latent.device) if return_lse else None
    if out.numel() and cache.numel() and (block_table is None or block_table.numel()):
        mla_decode_out(*inputs, scale, out, lse)
    else:
        no_keys(out, lse)
    return out if lse is None else (out, lse)
