"""The parts of a layer. Each holds its weights and turns a frame into calls: an attention or an MLP of another kind is another class here."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..ops.attention import attention_out
from ..ops.attention_decode import attention_decode_out
from ..ops.bmm import bmm_out
from ..ops.embedding import embedding_out
from ..ops.kv_append import kv_append_out
from ..ops.matmul import matmul_out
from ..ops.mla import mla_out
from ..ops.mla_decode import mla_decode_out
from ..ops.moe import moe_out
from ..ops.moe_route import moe_route_out
from ..ops.rms_norm import rms_norm_out
from ..ops.rms_norm_matmul import rms_norm_matmul_out
from ..ops.rms_norm_route import rms_norm_route_out
from ..ops.silu_mul import silu_mul_out
from .parallel import Group
from .program import Call, Emit, Frame
from .weights import Matrix

# Rows up to which rms_norm_matmul takes the place of a norm and a product. Its tensor-core form, for 3 and more, loses: Qwen2-7B at batch 16
# takes 4.44 ms a step with it and 4.20 without (H200).
MOST_FUSED_ROWS = 1


def linear(name: str, x: Tensor, w: Matrix, out: Tensor, *, residual: Tensor | None = None, silu_mul: bool = False) -> Call:
    """out = residual + x @ weight.T + bias; silu_mul: of a matrix whose rows alternate between gate and up."""
    return Call(name, matmul_out, (x, w.weight, w.bias, out, False, True, False, None, None, residual, silu_mul, None))


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm, as `tilewright.rms_norm` has it."""

    weight: Tensor
    eps: float
    round_before_weight: bool = True
    weight_offset: float = 0.0

    def of(self, name: str, x: Tensor, out: Tensor) -> Call:
        return Call(name, rms_norm_out, (x, self.weight, None, out, None, self.eps, self.weight_offset, self.round_before_weight))


class Rows(Protocol):
    """What a matrix is multiplied with."""

    def product(self, name: str, w: Matrix, out: Tensor, *, silu_mul: bool = False) -> Emit:
        """out = rows @ weight.T + bias; silu_mul: as `linear`."""
        ...


@dataclass(frozen=True, slots=True)
class Given:
    """Rows as they are."""

    rows: Tensor

    def product(self, name: str, w: Matrix, out: Tensor, *, silu_mul: bool = False) -> Emit:
        yield linear(name, self.rows, w, out, silu_mul=silu_mul)


@dataclass(frozen=True, slots=True)
class Stream:
    """Rows of the residual stream, normed by whoever reads them first: the norm of x + y goes to `normed`, the sum itself to `total`.

    y, total: None where nothing is to be added.
    """

    name: str
    norm: Norm
    x: Tensor
    y: Tensor | None
    normed: Tensor
    total: Tensor | None

    @property
    def single(self) -> bool:
        """A row of its own: kernels that norm it in each block are the faster ones."""
        return len(self.x) == 1

    def norm_call(self) -> Call:
        norm = (self.norm.eps, self.norm.weight_offset, self.norm.round_before_weight)
        return Call(self.name, rms_norm_out, (self.x, self.norm.weight, self.y, self.normed, self.total, *norm))

    def product(self, name: str, w: Matrix, out: Tensor, *, silu_mul: bool = False) -> Emit:
        if self.single or (len(self.x) <= MOST_FUSED_ROWS and self.x.dtype is torch.bfloat16):
            norm = (self.norm.eps, self.norm.weight_offset)
            yield Call(name, rms_norm_matmul_out, (self.x, self.norm.weight, w.weight, w.bias, self.y, out, self.total, *norm, silu_mul))
        else:
            yield self.norm_call()
            yield linear(name, self.normed, w, out, silu_mul=silu_mul)


@dataclass(frozen=True, slots=True)
class Rope:
    """cos, sin: fp32 [max_len, rotary_dim / 2], a row for each position. interleaved: neighbours form a pair."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    @staticmethod
    def table(inv_freq: Tensor, scaling: float, max_len: int, *, interleaved: bool = False) -> "Rope":
        """inv_freq: fp32 [rotary_dim / 2], radians per position. scaling: factor of cosine and sine."""
        angles = torch.arange(max_len, device=inv_freq.device).float()[:, None] * inv_freq.float()
        return Rope(angles.cos() * scaling, angles.sin() * scaling, interleaved)

    def append(
        self,
        name: str,
        frame: Frame,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        caches: tuple[Tensor, Tensor],
        *,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        v_norm: Norm | None = None,
    ) -> Call:
        """Norms what has a norm, then rotates q in place and k on its way into the cache, where v goes too.

        q, k, v, caches: [batch, heads, q_len or max_len, ...]. The norms given are alike but for their weights.
        """
        norms = (q_norm, k_norm, v_norm)
        given = next((norm for norm in norms if norm is not None), None)
        how = (0.0, False) if given is None else (given.eps, given.round_before_weight)
        where = (*(frame.held(cache) for cache in caches), frame.positions, frame.block_table)
        weights = (None if norm is None else norm.weight for norm in norms)
        return Call(name, kv_append_out, (k, v, *where, q, self.cos, self.sin, None, self.interleaved, None, None, *weights, *how))


def gathered(name: str, frame: Frame, pages: Tensor, heads: int) -> Generator[Call, None, Tensor]:
    """The frame's sequences from their pages, key behind key, in a buffer that all layers share: what the attention of a prompt reads.

    pages: [pages, page_size, columns], with heads=1 [pages, kv_heads, page_size, columns]. Returns: [batch, (kv_heads,) keys, columns].
    """
    assert frame.block_table is not None
    count = -(-frame.max_keys // pages.shape[-2])
    shape = (*pages.shape[1 : 1 + heads], frame.batch * count, *pages.shape[-2:])
    out = frame.buffer(f"gathered.{name.rpartition('.')[2]}", *shape)
    yield Call(name, _gather, (pages.movedim(0, heads), frame.block_table[:, :count], out))
    return out.unflatten(heads, (frame.batch, count)).flatten(heads + 1, heads + 2).movedim(heads, 0)


def _gather(pages: Tensor, table: Tensor, out: Tensor) -> None:
    torch.index_select(pages, out.dim() - 3, table.reshape(-1), out=out)


class Attention(Protocol):
    @property
    def weight_bytes(self) -> int: ...

    def cache_shapes(self, batch: int, max_len: int) -> tuple[tuple[int, ...], ...]:
        """What the layer keeps of each token, batch first; of a cache in pages, of so many pages of so many tokens."""
        ...

    def calls(self, name: str, frame: Frame, stream: Stream, y: Tensor, cache: tuple[Tensor, ...]) -> Emit:
        """Appends the frame's tokens to the cache and attends: from the stream's normed rows to y [tokens, hidden]."""
        ...


class Mlp(Protocol):
    @property
    def weight_bytes(self) -> int: ...

    def calls(self, name: str, frame: Frame, stream: Stream, y: Tensor) -> Emit:
        """From the stream's normed rows to y [tokens, hidden]."""
        ...


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """Attention with as many or fewer key heads than query heads.

    qkv: rows of all query heads, then of the key heads, then of the value heads.
    q_norm, k_norm: over each head (Qwen3), alike but for their weights. window: keys that a query sees, itself included.
    sinks: fp32 [q_heads], as in `tilewright.attention` (gpt-oss).
    """

    qkv: Matrix
    out: Matrix
    q_heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope
    window: int | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    sinks: Tensor | None = None

    @property
    def weight_bytes(self) -> int:
        return self.qkv.weight.nbytes + self.out.weight.nbytes

    def cache_shapes(self, batch: int, max_len: int) -> tuple[tuple[int, ...], ...]:
        return ((batch, self.kv_heads, max_len, self.head_dim),) * 2

    def calls(self, name: str, frame: Frame, stream: Stream, y: Tensor, cache: tuple[Tensor, ...]) -> Emit:
        heads = self.q_heads + 2 * self.kv_heads
        qkv = frame.buffer("qkv", frame.tokens, heads * self.head_dim)
        yield from stream.product(f"{name}.qkv", self.qkv, qkv)
        q, k, v = self._heads(frame, qkv).split((self.q_heads, self.kv_heads, self.kv_heads), 1)
        k_cache, v_cache = cache
        yield self.rope.append(f"{name}.append", frame, q, k, v, (k_cache, v_cache), q_norm=self.q_norm, k_norm=self.k_norm)
        keys, values = frame.held(k_cache), frame.held(v_cache)
        mixed = frame.buffer("attention", frame.tokens, self.q_heads * self.head_dim)
        result = self._heads(frame, mixed)
        if frame.q_len == 1:
            rest = (None, None, frame.kv_len, frame.block_table, None, self.sinks, self.scale, self.window, False)
            yield Call(name, attention_decode_out, (q, keys, values, result, *rest))
        else:
            if frame.block_table is not None:
                keys = yield from gathered(f"{name}.keys", frame, keys, 1)
                values = yield from gathered(f"{name}.values", frame, values, 1)
            masks = (None, None, frame.kv_len, None, None, self.scale, True, self.window, None, None, self.sinks)
            yield Call(name, attention_out, (q, keys, values, result, *masks))
        yield linear(f"{name}.out", mixed, self.out, y)

    def _heads(self, frame: Frame, x: Tensor) -> Tensor:
        """[tokens, heads * head_dim] as [batch, heads, q_len, head_dim]."""
        return x.view(frame.batch, frame.q_len, -1, self.head_dim).transpose(1, 2)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek). The cache holds a row [latent | rotated key] a token, the same for all heads.

    A decode step works on the latents themselves: the up-projection of the keys is applied to the queries instead, that of the values to the result.
    A prompt's keys and values are expanded.

    down: rows of the queries, or of their latents, then of the key-value latent, then of the rotated key.
    q_up: norm and up-projection of the queries' latents; None where `down` has the queries themselves.
    kv_norm: over the latent on its way into the cache; without an offset.
    kv_up: [heads, nope_dim + v_dim, latent], in each head the rows of its keys first.
    """

    down: Matrix
    q_up: tuple[Norm, Matrix] | None
    kv_norm: Norm
    kv_up: Tensor
    out: Matrix
    nope_dim: int
    rope_dim: int
    scale: float
    rope: Rope

    @property
    def weight_bytes(self) -> int:
        return self.down.weight.nbytes + self.kv_up.nbytes + self.out.weight.nbytes + (self.q_up[1].weight.nbytes if self.q_up else 0)

    def cache_shapes(self, batch: int, max_len: int) -> tuple[tuple[int, ...], ...]:
        return ((batch, max_len, self.kv_up.shape[2] + self.rope_dim),)

    def calls(self, name: str, frame: Frame, stream: Stream, y: Tensor, cache: tuple[Tensor, ...]) -> Emit:
        heads, _, latent_dim = self.kv_up.shape
        below = frame.buffer("down", frame.tokens, len(self.down.weight))
        yield from stream.product(f"{name}.down", self.down, below)
        queries, low, k_rope = below.split((below.shape[1] - latent_dim - self.rope_dim, latent_dim, self.rope_dim), 1)
        if self.q_up is not None:
            norm, up = self.q_up
            normed = frame.buffer("q.normed", *queries.shape)
            yield norm.of(f"{name}.q_norm", queries, normed)
            queries = frame.buffer("q", frame.tokens, len(up.weight))
            yield linear(f"{name}.q_up", normed, up, queries)
        q = queries.unflatten(1, (heads, -1)).unflatten(0, (frame.batch, frame.q_len)).transpose(1, 2)  # [batch, heads, q_len, nope + rope]
        q_nope, q_rope = q.split((self.nope_dim, self.rope_dim), 3)
        k_rope, latent = (x.unflatten(0, (frame.batch, 1, frame.q_len)) for x in (k_rope, low))  # one head
        latents, rotated = cache[0][:, None].split((latent_dim, self.rope_dim), 3)
        yield self.rope.append(f"{name}.append", frame, q_rope, k_rope, latent, (rotated, latents), v_norm=self.kv_norm)
        mixed = frame.buffer("attention", frame.tokens, self.out.weight.shape[1])
        attend = self._attend_latents if frame.q_len == 1 else self._attend_expanded
        yield from attend(name, frame, q_nope, q_rope, frame.held(cache[0]), mixed.unflatten(1, (heads, -1)))
        yield linear(f"{name}.out", mixed, self.out, y)

    def _attend_latents(self, name: str, frame: Frame, q_nope: Tensor, q_rope: Tensor, rows: Tensor, mixed: Tensor) -> Emit:
        """mixed: [batch, heads, v_dim]."""
        heads, _, latent_dim = self.kv_up.shape
        k_up, v_up = self.kv_up[:, : self.nope_dim], self.kv_up[:, self.nope_dim :]
        q_latent, found = (frame.buffer(f"{which}.latent", heads, frame.batch, latent_dim) for which in ("q", "attention"))
        yield Call(f"{name}.absorb", bmm_out, (q_nope[:, :, 0].transpose(0, 1), k_up, None, None, q_latent, False, False))
        by_sequence = [x.transpose(0, 1)[:, :, None] for x in (q_latent, found)]
        where = (frame.kv_len, frame.block_table, None)
        yield Call(name, mla_decode_out, (by_sequence[0], q_rope, rows, by_sequence[1], None, *where, self.scale))
        yield Call(f"{name}.v_up", bmm_out, (found, v_up, None, None, mixed.transpose(0, 1), False, True))

    def _attend_expanded(self, name: str, frame: Frame, q_nope: Tensor, q_rope: Tensor, rows: Tensor, mixed: Tensor) -> Emit:
        """mixed: [tokens, heads, v_dim]."""
        heads, width, latent_dim = self.kv_up.shape
        if frame.block_table is not None:
            rows = yield from gathered(f"{name}.rows", frame, rows, 0)
        rows = rows[:, : frame.max_keys]
        expanded = frame.buffer("kv", frame.batch, frame.max_keys, heads * width)
        up = self.kv_up.flatten(0, 1)[None]
        yield Call(f"{name}.kv_up", bmm_out, (rows[..., :latent_dim], up, None, None, expanded, False, True))
        k_nope, v = expanded.unflatten(2, (heads, width)).transpose(1, 2).split((self.nope_dim, width - self.nope_dim), 3)
        result = mixed.unflatten(0, (frame.batch, frame.q_len)).transpose(1, 2)
        masks = (None, frame.kv_len, None, None, None, self.scale, True)
        yield Call(name, mla_out, (q_nope, q_rope, k_nope, rows[:, None, :, latent_dim:], v, result, *masks))


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(silu(gate(h)) * up(h)). alternating: rows of gate and up take turns in `gate_up`, which saves a launch; else gate's come first."""

    gate_up: Matrix
    down: Matrix
    alternating: bool = True
    gelu_tanh: bool = False

    @property
    def weight_bytes(self) -> int:
        return self.gate_up.weight.nbytes + self.down.weight.nbytes

    def calls(self, name: str, frame: Frame, rows: Rows, y: Tensor, residual: Tensor | None = None) -> Emit:
        """residual: added to the result."""
        inter = self.down.weight.shape[1]
        active = frame.buffer(f"active.{inter}", frame.tokens, inter)
        if self.alternating:
            yield from rows.product(f"{name}.gate_up", self.gate_up, active, silu_mul=True)
        else:
            both = frame.buffer(f"gate_up.{inter}", frame.tokens, 2 * inter)
            yield from rows.product(f"{name}.gate_up", self.gate_up, both)
            yield Call(f"{name}.activation", silu_mul_out, (both[:, :inter], both[:, inter:], active, self.gelu_tanh))
        yield linear(f"{name}.down", active, self.down, y, residual=residual)

    def of_experts(self, inter: int) -> tuple[Tensor, Tensor] | None:
        """Its matrices as those of experts of another width: [experts, 2, inter, hidden] and [experts, hidden, inter]; None if they don't divide."""
        hidden, wide = self.down.weight.shape
        if wide % inter or not self.alternating or self.gelu_tanh or self.gate_up.bias is not None or self.down.bias is not None:
            return None
        experts = wide // inter
        gate_up = self.gate_up.weight.view(experts, inter, 2, hidden).transpose(1, 2)
        return gate_up, self.down.weight.view(hidden, experts, inter).transpose(0, 1)


@dataclass(frozen=True, slots=True)
class Activation:
    """What an expert does between and behind its products: biases and shape of the gate, as in `tilewright.moe`; bias_gate_up [experts, 2, inter]."""

    bias_gate_up: Tensor | None = None
    bias_down: Tensor | None = None
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts, and what all tokens pass (`shared`).

    router: rows are experts; its bias is part of the logits. logits_dtype: what its product is rounded to before the softmax. bias, sigmoid,
    normalize, scale, groups, top_groups: as in `tilewright.moe_route`. gate_up [experts, 2, inter, hidden], down [experts, hidden, inter], act: as in
    `tilewright.moe`; fewer than the router has rows where other ranks hold the rest, those from `first` on.
    """

    router: Matrix
    gate_up: Tensor
    down: Tensor
    top_k: int
    normalize: bool
    logits_dtype: torch.dtype
    scale: float = 1.0
    sigmoid: bool = False
    bias: Tensor | None = None
    groups: int = 0
    top_groups: int = 0
    shared: GatedMlp | None = None
    first: int = 0
    act: Activation = Activation()

    @property
    def weight_bytes(self) -> int:
        shared = 0 if self.shared is None else self.shared.weight_bytes
        return self.router.weight.nbytes + self.gate_up.nbytes + self.down.nbytes + shared

    def calls(self, name: str, frame: Frame, stream: Stream, y: Tensor) -> Emit:
        weights = frame.buffer("router.weights", frame.tokens, self.top_k, dtype=torch.float32)
        ids = frame.buffer("router.ids", frame.tokens, self.top_k, dtype=torch.int32)
        choice = (self.sigmoid, self.normalize, self.scale, self.groups, self.top_groups, self.first)
        if stream.single:
            arrived = frame.buffer("router.arrived", frame.tokens, dtype=torch.int32)
            norm, found = stream.norm, (arrived, weights, ids, stream.normed, stream.total)
            how = (norm.eps, norm.weight_offset, norm.round_before_weight, *choice)
            router = (self.router.weight, self.router.bias, self.bias)
            yield Call(f"{name}.route", rms_norm_route_out, (stream.x, norm.weight, *router, stream.y, *found, *how))
        else:
            logits = frame.buffer("router", frame.tokens, len(self.router.weight), dtype=self.logits_dtype)
            yield stream.norm_call()
            yield linear(f"{name}.router", stream.normed, self.router, logits)
            yield Call(f"{name}.route", moe_route_out, (logits, self.bias, weights, ids, *choice))
        together = stream.single and self.shared is not None and self.shared.of_experts(self.down.shape[2])
        if together or self.shared is None:
            yield self._experts(name, stream.normed, weights, ids, together or (None, None), y)
        else:
            routed = frame.buffer("routed", *y.shape)
            yield self._experts(name, stream.normed, weights, ids, (None, None), routed)
            yield from self.shared.calls(f"{name}.shared", frame, Given(stream.normed), y, residual=routed)

    def _experts(self, name: str, h: Tensor, weights: Tensor, ids: Tensor, shared: tuple[Tensor | None, Tensor | None], y: Tensor) -> Call:
        act = (self.act.bias_gate_up, self.act.bias_down, self.act.alpha, self.act.limit, self.act.up_offset)
        return Call(f"{name}.experts", moe_out, (h, self.gate_up, self.down, weights, ids.view(-1), None, None, *act, *shared, y))


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: Mlp


@dataclass(frozen=True, slots=True)
class Decoder:
    """A whole model: `body` from token ids to the last layer, `head` from there to logits.

    group: of the processes of which each holds a part of every layer and of the head's rows; None for one that holds all.
    """

    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Norm
    head: Matrix
    group: Group | None = None

    @property
    def hidden(self) -> int:
        return self.embedding.shape[1]

    @property
    def vocab(self) -> int:
        return len(self.head.weight) * (1 if self.group is None else self.group.shard.ranks)

    def body_calls(self, frame: Frame, ids: Tensor, caches: list[tuple[Tensor, ...]]) -> Emit:
        """ids: [tokens]. Leaves the residual stream in the frame's buffer `x`, and what is still to be added to it in `y`."""
        # The residual stream moves between two buffers, with each sum to the other one: 2 * layers - 1 times, so it ends in `x`.
        other, x, h, y = (frame.buffer(name, frame.tokens, self.hidden) for name in ("x", "x.other", "h", "y"))
        share = y if self.group is None else self.group.share(frame, y)
        yield Call("embedding", embedding_out, (ids, self.embedding, x, 1.0))
        for i, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            if i == 0:
                stream = Stream("layers.0.attention_norm", layer.attention_norm, x, None, h, None)
            else:
                stream = Stream(f"layers.{i}.attention_norm", layer.attention_norm, x, y, h, other)
                x, other = other, x
            yield from layer.attention.calls(f"layers.{i}.attention", frame, stream, share, cache)
            yield from self._sum(f"layers.{i}.attention", share, y)
            stream = Stream(f"layers.{i}.mlp_norm", layer.mlp_norm, x, y, h, other)
            x, other = other, x
            yield from layer.mlp.calls(f"layers.{i}.mlp", frame, stream, share)
            yield from self._sum(f"layers.{i}.mlp", share, y)

    def _sum(self, name: str, share: Tensor, y: Tensor) -> Emit:
        return iter(()) if self.group is None else self.group.sum_calls(name, share, y)

    def head_calls(self, frame: Frame) -> Emit:
        """From the buffers `x` and `y` of a frame with one token a sequence to its buffer `logits`."""
        x, total, h, y = (frame.buffer(name, frame.batch, self.hidden) for name in ("x", "x.other", "h", "y"))
        stream, logits = Stream("norm", self.norm, x, y, h, total), frame.buffer("logits", frame.batch, self.vocab)
        if self.group is None:
            yield from stream.product("head", self.head, logits)
        else:
            part = frame.buffer("logits.part", frame.batch, len(self.head.weight))
            yield from stream.product("head", self.head, part)
            yield from self.group.gather_calls("head", frame, part, logits)
