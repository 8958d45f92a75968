"""The kinds of attention of a layer, as calls on a step's buffers."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops.attention import attention_out
from ..ops.attention_decode import attention_decode_out
from ..ops.attention_decode.calls import MOST_TOKENS
from ..ops.bmm import bmm_out
from ..ops.mla import mla_out
from ..ops.mla_decode import mla_decode_out
from . import torch_calls
from .elementwise import gate
from .layers import Array, Norm, Rope, Rows, Stream, linear
from .program import Call, Emit, StepBuffers
from .weights import AnyMatrix


def gathered(name: str, buffers: StepBuffers, pages: Tensor, heads: int) -> Generator[Call, None, Tensor]:
    """The step's sequences from their pages, key behind key, in a tensor that all layers share:
    what the attention of a prompt reads.

    pages: [pages, page_size, columns], with heads=1 [pages, kv_heads, page_size, columns]. Returns:
        [batch, (kv_heads,) keys, columns].
    """
    assert buffers.block_table is not None
    count = -(-buffers.max_keys // pages.shape[-2])
    shape = (*pages.shape[1 : 1 + heads], buffers.batch * count, *pages.shape[-2:])
    out = buffers.tensor(f"gathered.{name.rpartition('.')[2]}", *shape, dtype=pages.dtype)
    yield Call(name, torch_calls.gather, (pages.movedim(0, heads), buffers.block_table[:, :count], out))
    sequences: Tensor = out.unflatten(heads, (buffers.batch, count))
    return sequences.flatten(heads + 1, heads + 2).movedim(heads, 0)


# Up to so many keys, drafted tokens attend faster in one launch of `attention` than in KV splits
# and a merge. On an H200 a step of Llama-3.1-8B with 4 tokens takes 4.28 ms in place of 5.02 at 150
# keys, and 6.55 in place of 5.35 at 8000.
FEW_KEYS = 2048


def in_splits(buffers: StepBuffers) -> bool:
    """Whether a step attends with `attention_decode`, which also reads pages where they are."""
    long = buffers.block_table is not None or buffers.max_keys > FEW_KEYS
    return buffers.q_len == 1 or (buffers.q_len <= MOST_TOKENS and long)


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """Attention whose key heads divide its query heads.

    qkv: rows of all query heads, then of the key heads, then of the value heads.
    gated: behind the rows of each query head those of its gate, whose sigmoid multiplies what the
        head finds (Qwen3-Next).
    q_norm, k_norm: over each head (Qwen3); equal except for their weights. window: keys that a
        query sees, itself included.
    sinks: fp32 [q_heads], as in `tilewright.attention` (gpt-oss).
    softcap: as in `tilewright.attention` (Gemma 2).
    whole_norms: over all heads of the queries, and of the keys, at once (OLMo 2).
    codes: the cache holds e4m3 and, for each token and key head, a scale.
    """

    qkv: AnyMatrix
    out: AnyMatrix
    q_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope
    window: int | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    sinks: Tensor | None = None
    softcap: float | None = None
    whole_norms: tuple[Norm, Norm] | None = None
    codes: bool = False
    gated: bool = False
    states: int = 0

    @property
    def weight_bytes(self) -> int:
        return self.qkv.nbytes + self.out.nbytes

    def cache_arrays(self, batch: int, max_len: int, dtype: torch.dtype) -> tuple[Array, ...]:
        shape = (batch, self.kv_heads, max_len)
        values = ((*shape, self.head_dim), torch.float8_e4m3fn if self.codes else dtype)
        return (values, values, *(((shape, torch.float32),) * 2 if self.codes else ()))

    def calls(self, name: str, buffers: StepBuffers, rows: Rows, y: Tensor, cache: tuple[Tensor, ...]) -> Emit:
        heads = (self.q_heads * (2 if self.gated else 1), self.kv_heads, self.kv_heads)
        qkv = buffers.tensor("qkv", buffers.tokens, sum(heads) * self.head_dim)
        yield from rows.product(f"{name}.qkv", self.qkv, qkv)
        parts = list(qkv.split([count * self.head_dim for count in heads], 1))
        for i, norm in enumerate(self.whole_norms or ()):
            raw, parts[i] = parts[i], buffers.tensor(f"{'qk'[i]}.normed", *parts[i].shape)
            yield norm.of(f"{name}.{'qk'[i]}_norm", raw, parts[i])
        q, k, v = (self._heads(buffers, part) for part in parts)
        q = q[:, ::2] if self.gated else q
        keys, values, *scales = (buffers.held(x) for x in cache)
        mixed = buffers.tensor("attention", buffers.tokens, self.q_heads * self.head_dim)
        result = self._heads(buffers, mixed)
        yield self.rope.append(f"{name}.append", buffers, q, k, v, cache, (self.q_norm, self.k_norm, None))
        how: dict[str, Any] = {"scale": self.scale, "window": self.window, "sinks": self.sinks, "softcap": self.softcap, "kv_len": buffers.kv_len}
        if in_splits(buffers):
            how |= {"block_table": buffers.block_table, **dict(zip(("k_scale", "v_scale"), scales, strict=False))}
            yield Call.of(name, attention_decode_out, q=q, k=keys, v=values, out=result, shared=False, **how)
        else:
            keys = yield from self._in_order(f"{name}.keys", buffers, keys, *scales[:1])
            values = yield from self._in_order(f"{name}.values", buffers, values, *scales[1:])
            yield Call.of(name, attention_out, q=q, k=keys, v=values, out=result, causal=True, ahead=0, **how)
        if self.gated:
            by_head, gates = (x.unflatten(1, (-1, self.head_dim)) for x in (mixed, parts[0]))
            yield Call(f"{name}.gate", gate, (by_head, gates[:, 1::2]))
        yield from linear(f"{name}.out", mixed, self.out, y)

    def _in_order(self, name: str, buffers: StepBuffers, x: Tensor, scale: Tensor | None = None) -> Generator[Call, None, Tensor]:
        """Keys or values of the step's sequences as the attention of a prompt reads them: key
        behind key, in the dtype of the queries.
        """
        if buffers.block_table is not None:
            x = yield from gathered(name, buffers, x, 1)
        if scale is None:
            return x
        scale = scale[..., None]
        if buffers.block_table is not None:
            scale = yield from gathered(f"{name}_scale", buffers, scale, 1)
        x, scale = x[:, :, : buffers.max_keys], scale[:, :, : buffers.max_keys]
        out = buffers.tensor(f"wide.{name.rpartition('.')[2]}", *x.shape)
        yield Call(f"{name}.wide", torch_calls.dequantize, (x, scale, out))
        return out

    def _heads(self, buffers: StepBuffers, x: Tensor) -> Tensor:
        """[tokens, heads * head_dim] as [batch, heads, q_len, head_dim]."""
        return x.view(buffers.batch, buffers.q_len, -1, self.head_dim).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek).

    The cache holds a row [latent | rotated key] a token, the same for all heads.

    A decode step is absorbed: it applies the up-projection of the keys to the queries, that of the
    values to the result. A prompt's keys and values are expanded.

    down: rows of the queries or of their latents, then of the key-value latent, then of the rotated
        key.
    q_up: norm and up-projection of the queries' latents; None if `down` has the queries themselves.
    kv_norm: over the latent on its way into the cache; without an offset.
    kv_up: [heads, nope_dim + v_dim, latent], in each head the rows of its keys first.
    """

    down: AnyMatrix
    q_up: tuple[Norm, AnyMatrix] | None
    kv_norm: Norm
    kv_up: Tensor
    out: AnyMatrix
    nope_dim: int
    rope_dim: int
    scale: float
    rope: Rope
    states: int = 0

    @property
    def weight_bytes(self) -> int:
        return self.down.nbytes + self.kv_up.nbytes + self.out.nbytes + (self.q_up[1].nbytes if self.q_up else 0)

    def cache_arrays(self, batch: int, max_len: int, dtype: torch.dtype) -> tuple[Array, ...]:
        return (((batch, max_len, self.kv_up.shape[2] + self.rope_dim), dtype),)

    def calls(self, name: str, buffers: StepBuffers, stream: Stream, y: Tensor, cache: tuple[Tensor, ...]) -> Emit:
        heads, _, latent_dim = self.kv_up.shape
        below = buffers.tensor("down", buffers.tokens, self.down.rows)
        yield from stream.product(f"{name}.down", self.down, below)
        queries, low, k_rope = below.split((below.shape[1] - latent_dim - self.rope_dim, latent_dim, self.rope_dim), 1)
        if self.q_up is not None:
            norm, up = self.q_up
            normed = buffers.tensor("q.normed", *queries.shape)
            yield norm.of(f"{name}.q_norm", queries, normed)
            queries = buffers.tensor("q", buffers.tokens, up.rows)
            yield from linear(f"{name}.q_up", normed, up, queries)
        q = queries.unflatten(1, (heads, -1)).unflatten(0, (buffers.batch, buffers.q_len)).transpose(1, 2)  # [batch, heads, q_len, nope + rope]
        q_nope, q_rope = q.split((self.nope_dim, self.rope_dim), 3)
        k_rope, latent = (x.unflatten(0, (buffers.batch, 1, buffers.q_len)) for x in (k_rope, low))  # one head
        latents, rotated = cache[0][:, None].split((latent_dim, self.rope_dim), 3)
        yield self.rope.append(f"{name}.append", buffers, q_rope, k_rope, latent, (rotated, latents), (None, None, self.kv_norm))
        mixed = buffers.tensor("attention", buffers.tokens, self.out.columns)
        attend = self._attend_latents if buffers.q_len == 1 else self._attend_expanded
        yield from attend(name, buffers, q_nope, q_rope, buffers.held(cache[0]), mixed.unflatten(1, (heads, -1)))
        yield from linear(f"{name}.out", mixed, self.out, y)

    def _attend_latents(self, name: str, buffers: StepBuffers, q_nope: Tensor, q_rope: Tensor, rows: Tensor, mixed: Tensor) -> Emit:
        """mixed: [batch, heads, v_dim]."""
        heads, _, latent_dim = self.kv_up.shape
        k_up, v_up = self.kv_up[:, : self.nope_dim], self.kv_up[:, self.nope_dim :]
        q_latent, found = (buffers.tensor(f"{which}.latent", heads, buffers.batch, latent_dim) for which in ("q", "attention"))
        yield Call.of(f"{name}.absorb", bmm_out, a=q_nope[:, :, 0].transpose(0, 1), b=k_up, out=q_latent, trans_a=False, trans_b=False)
        queries, result = (x.transpose(0, 1)[:, :, None] for x in (q_latent, found))  # by sequence
        where = {"kv_len": buffers.kv_len, "block_table": buffers.block_table}
        yield Call.of(name, mla_decode_out, q_latent=queries, q_rope=q_rope, cache=rows, out=result, scale=self.scale, **where)
        yield Call.of(f"{name}.v_up", bmm_out, a=found, b=v_up, out=mixed.transpose(0, 1), trans_a=False, trans_b=True)

    def _attend_expanded(self, name: str, buffers: StepBuffers, q_nope: Tensor, q_rope: Tensor, rows: Tensor, mixed: Tensor) -> Emit:
        """mixed: [tokens, heads, v_dim]."""
        heads, width, latent_dim = self.kv_up.shape
        if buffers.block_table is not None:
            rows = yield from gathered(f"{name}.rows", buffers, rows, 0)
        rows = rows[:, : buffers.max_keys]
        expanded = buffers.tensor("kv", buffers.batch, buffers.max_keys, heads * width)
        up = self.kv_up.flatten(0, 1)[None]
        yield Call.of(f"{name}.kv_up", bmm_out, a=rows[..., :latent_dim], b=up, out=expanded, trans_a=False, trans_b=True)
        k_nope, v = expanded.unflatten(2, (heads, width)).transpose(1, 2).split((self.nope_dim, width - self.nope_dim), 3)
        result = mixed.unflatten(0, (buffers.batch, buffers.q_len)).transpose(1, 2)
        keys = {"k_nope": k_nope, "k_rope": rows[:, None, :, latent_dim:], "v": v, "kv_len": buffers.kv_len}
        yield Call.of(name, mla_out, q_nope=q_nope, q_rope=q_rope, out=result, scale=self.scale, causal=True, **keys)
