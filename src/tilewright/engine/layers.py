"""The parts of a layer except its attention (attention.py) and MLP (mlp.py), and a whole model.

Each part holds its weights and makes calls on a step's buffers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

from ..ops.embedding import embedding_out
from ..ops.kv_append import kv_append_out
from ..ops.layer_norm import layer_norm_out
from ..ops.matmul import matmul_out
from ..ops.quantized_matmul import quantized_matmul_out
from ..ops.rms_norm import rms_norm_out
from ..ops.rms_norm_matmul import rms_norm_matmul_out
from . import torch_calls
from .parallel import Group
from .program import Call, Emit, StepBuffers
from .weights import AnyMatrix, Matrix, Parts, SmallMatrix

# Up to so many rows, rms_norm_matmul replaces a norm and a product. Its tensor-core form, for 3
# rows and more, is slower: on an H200 a step of Qwen2-7B at batch 16 takes 4.44 ms with it, 4.20 ms
# without.
MOST_FUSED_ROWS = 1
# Up to so many rows, the launch that makes pieces of x for a small weight also norms it, or
# computes the activation; 0 for launches of their own. Predicted, not timed: 2 us less a layer.
MOST_SMALL_ROWS = 16


def joins(w: AnyMatrix, rows: int) -> TypeGuard[SmallMatrix]:
    """Whether the product with w also computes what stands before it."""
    return isinstance(w, SmallMatrix) and w.order is None and rows <= MOST_SMALL_ROWS


def linear(name: str, x: Tensor, w: AnyMatrix, out: Tensor, *, residual: Tensor | None = None, silu_mul: bool = False, **before: Any) -> Emit:
    """out = residual + x @ weight.T + bias; silu_mul: rows of gate and up alternate. before: of a
    matrix that `joins`, arguments of `quantized_matmul`.
    """
    assert not before or joins(w, len(x))
    if isinstance(w, Matrix):
        how: dict[str, Any] = {"trans_a": False, "trans_b": True, "tf32": False, "silu_mul": silu_mul}
        yield Call.of(name, matmul_out, a=x, b=w.weight, bias=w.bias, out=out, residual=residual, **how)
        return
    assert not silu_mul
    if isinstance(w, Parts):
        for i, (part, columns) in enumerate(zip(w.parts, out.split([part.rows for part in w.parts], 1), strict=True)):
            yield from linear(f"{name}.{i}", x, part, columns)
    else:
        yield _small(name, x, w, out, before)
    if residual is not None:
        yield Call(f"{name}.add", Tensor.add_, (out, residual))


_ALONE: dict[str, Any] = {"eps": 1e-6, "weight_offset": 0.0, "gelu_tanh": False}  # of which nothing is read


def _small(name: str, x: Tensor, w: SmallMatrix, out: Tensor, before: dict[str, Any]) -> Call:
    if w.order is None:
        return Call.of(name, quantized_matmul_out, x=x, **w.weight.arguments, bias=w.bias, out=out, **{**_ALONE, **before})
    of = w.weight
    assert of.factor is None  # act-order is GPTQ's
    return Call(name, _ordered, (x, w.order, of.words, of.scales, of.zeros, w.bias, of.weight_format, out))


def _ordered(
    x: Tensor, order: Tensor, words: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, weight_format: str, out: Tensor
) -> None:
    """`quantized_matmul_out` of x[:, order]."""
    given = x.index_select(1, order), words, scales, zeros, None, bias, None, None, None
    quantized_matmul_out(*given, *_ALONE.values(), weight_format, out, None)


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm, as in `tilewright.rms_norm`."""

    weight: Tensor
    eps: float
    round_before_weight: bool = True
    weight_offset: float = 0.0

    @property
    def how(self) -> dict[str, Any]:
        """The arguments of an op that norms."""
        return {name: getattr(self, name) for name in ("weight", "eps", "round_before_weight", "weight_offset")}

    def of(self, name: str, x: Tensor, out: Tensor, residual: Tensor | None = None, new_residual: Tensor | None = None) -> Call:
        return Call.of(name, rms_norm_out, x=x, residual=residual, out=out, new_residual=new_residual, **self.how)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """As `tilewright.layer_norm`: of rows of the stream alone."""

    weight: Tensor | None
    bias: Tensor | None
    eps: float

    def of(self, name: str, x: Tensor, out: Tensor) -> Call:
        return Call.of(name, layer_norm_out, x=x, weight=self.weight, bias=self.bias, eps=self.eps, out=out)


class Rows(Protocol):
    """The rows that a matrix is multiplied with."""

    def product(self, name: str, w: AnyMatrix, out: Tensor, *, silu_mul: bool = False) -> Emit:
        """out = rows @ weight.T + bias; silu_mul: as `linear`."""
        ...


@dataclass(frozen=True, slots=True)
class Given:
    """Rows as they are."""

    rows: Tensor

    def product(self, name: str, w: AnyMatrix, out: Tensor, *, silu_mul: bool = False) -> Emit:
        yield from linear(name, self.rows, w, out, silu_mul=silu_mul)


@dataclass(frozen=True, slots=True)
class Stream:
    """Rows of the residual stream.

    The first reader norms them: the norm of x + y goes to `normed`, the sum itself to `total`.

    norm: None for layers that norm only what they add (OLMo 2).
    y, total: None if there is nothing to add.
    """

    name: str
    norm: Norm | LayerNorm | None
    x: Tensor
    y: Tensor | None
    normed: Tensor
    total: Tensor | None

    @property
    def single(self) -> bool:
        """Whether there is one row: then kernels that norm it in each block are faster."""
        return len(self.x) == 1

    def norm_calls(self) -> Emit:
        """The sum, if there is one, and its norm, if there is one."""
        if isinstance(self.norm, Norm):
            yield self.norm.of(self.name, self.x, self.normed, self.y, self.total)
            return
        if self.total is not None:
            yield Call(f"{self.name}.sum", torch_calls.add, (self.x, self.y, self.total))
        if self.norm is not None:
            yield self.norm.of(self.name, self.x if self.total is None else self.total, self.normed)

    def product(self, name: str, w: AnyMatrix, out: Tensor, *, silu_mul: bool = False) -> Emit:
        if self.norm is None:
            yield from self.norm_calls()
            yield from linear(name, self.x if self.total is None else self.total, w, out, silu_mul=silu_mul)
        elif (
            isinstance(self.norm, Norm)
            and isinstance(w, Matrix)
            and (self.single or (len(self.x) <= MOST_FUSED_ROWS and self.x.dtype is torch.bfloat16))
        ):
            norm = {"weight": self.norm.weight, "eps": self.norm.eps, "weight_offset": self.norm.weight_offset}
            sums = {"residual": self.y, "new_residual": self.total}
            yield Call.of(name, rms_norm_matmul_out, x=self.x, b=w.weight, bias=w.bias, out=out, silu_mul=silu_mul, **norm, **sums)
        elif isinstance(self.norm, Norm) and joins(w, len(self.x)):
            assert not silu_mul
            norm = {"norm": self.norm.weight, "eps": self.norm.eps, "weight_offset": self.norm.weight_offset}
            yield _small(name, self.x, w, out, {**norm, "residual": self.y, "new_residual": self.total})
        else:
            yield from self.norm_calls()
            yield from linear(name, self.normed, w, out, silu_mul=silu_mul)


@dataclass(frozen=True, slots=True)
class Rope:
    """cos, sin: fp32 [max_len, rotary_dim / 2], by position. interleaved: neighbours are a pair."""

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    @staticmethod
    def table(inv_freq: Tensor, scaling: float, max_len: int, *, interleaved: bool = False) -> "Rope":
        """inv_freq: fp32 [rotary_dim / 2], radians per position. scaling: factor of both tables."""
        angles = torch.arange(max_len, device=inv_freq.device).float()[:, None] * inv_freq.float()
        return Rope(angles.cos() * scaling, angles.sin() * scaling, interleaved)

    def append(
        self,
        name: str,
        buffers: StepBuffers,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        caches: tuple[Tensor, ...],
        norms: tuple[Norm | None, Norm | None, Norm | None],
    ) -> Call:
        """Norms q, k and v if they have a norm, rotates q in place, rotates k, and writes k and v
        into the cache.

        q, k, v, caches: [batch, heads, q_len or max_len, ...]; caches of keys, of values, and the
            scales of both if they are codes. norms: of q, k and v; equal except for their weights.
        """
        given = next((norm for norm in norms if norm is not None), None)
        q_norm, k_norm, v_norm = (None if norm is None else norm.weight for norm in norms)
        return Call.of(
            name,
            kv_append_out,
            q=q,
            k=k,
            v=v,
            **{key: buffers.held(cache) for key, cache in zip(("k_cache", "v_cache", "k_scale", "v_scale"), caches, strict=False)},
            positions=buffers.positions,
            block_table=buffers.block_table,
            cos=self.cos,
            sin=self.sin,
            interleaved=self.interleaved,
            q_norm=q_norm,
            k_norm=k_norm,
            v_norm=v_norm,
            eps=0.0 if given is None else given.eps,
            round_before_weight=given is not None and given.round_before_weight,
        )


Array = tuple[tuple[int, ...], torch.dtype]  # a shape and a dtype


class Attention(Protocol):
    """states: how many of the arrays that it caches, the first, are states of one size, which each
    token changes and none can be taken back from.
    """

    @property
    def states(self) -> int: ...

    @property
    def weight_bytes(self) -> int: ...

    def cache_arrays(self, batch: int, max_len: int, dtype: torch.dtype) -> tuple[Array, ...]:
        """What the layer caches. In pages, batch is pages, max_len tokens of a page. dtype: of
        activations.
        """
        ...

    def calls(self, name: str, buffers: StepBuffers, stream: Stream, y: Tensor, cache: tuple[Tensor, ...]) -> Emit:
        """Appends the step's tokens to the cache and attends: stream to y [tokens, hidden]."""
        ...


class Mlp(Protocol):
    @property
    def weight_bytes(self) -> int: ...

    def calls(self, name: str, buffers: StepBuffers, stream: Stream, y: Tensor) -> Emit:
        """From the stream's normed rows to y [tokens, hidden]."""
        ...


@dataclass(frozen=True, slots=True)
class Layer:
    """attention_norm, mlp_norm: of what each half reads; None if it reads the stream itself.

    mlp: None for layers of one half (Mamba-2), or whose halves read the same rows (`BesideMlp`).
    attention_post, mlp_post: of what each half adds.
    """

    attention_norm: Norm | LayerNorm | None
    attention: Attention
    mlp_norm: Norm | LayerNorm | None
    mlp: Mlp | None
    attention_post: Norm | None = None
    mlp_post: Norm | None = None


@dataclass(frozen=True, slots=True)
class Decoder:
    """A whole model: `body` from token ids to the last layer, `head` from there to logits.

    group: of processes that each hold a part of every layer and of the head's rows; None for one
        process that holds all.
    scales: of the embedding, of what a layer adds, and of the logits (Granite).
    softcap: of the logits (Gemma 2).
    """

    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Norm | LayerNorm
    head: AnyMatrix
    group: Group | None = None
    scales: tuple[float, float, float] = (1.0, 1.0, 1.0)
    softcap: float | None = None

    @property
    def hidden(self) -> int:
        return self.embedding.shape[1]

    @property
    def vocab(self) -> int:
        return self.head.rows * (1 if self.group is None else self.group.shard.ranks)

    def body_calls(self, buffers: StepBuffers, ids: Tensor, caches: list[tuple[Tensor, ...]]) -> Emit:
        """ids: [tokens].

        Leaves the residual stream in the tensor `x`, and its last addend in `y`.
        """
        # The residual stream moves between two tensors, with each sum to the other one, and ends in
        # `x`.
        x, other, h, y = (buffers.tensor(name, buffers.tokens, self.hidden) for name in ("x", "x.other", "h", "y"))
        if sum(1 if layer.mlp is None else 2 for layer in self.layers) % 2 == 0:
            x, other = other, x
        plain = self.scales[1] == 1.0 and all(layer.attention_post is layer.mlp_post is None for layer in self.layers)
        raw = y if plain else buffers.tensor("y.raw", *y.shape)
        joined = None if self.group is None else self.group.sum_of(buffers, raw)
        yield Call.of("embedding", embedding_out, ids=ids, weight=self.embedding, out=x, scale=self.scales[0])
        for i, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            if i == 0:
                stream = Stream("layers.0.attention_norm", layer.attention_norm, x, None, h, None)
            else:
                stream = Stream(f"layers.{i}.attention_norm", layer.attention_norm, x, y, h, other)
                x, other = other, x
            yield from layer.attention.calls(f"layers.{i}.attention", buffers, stream, raw, cache)
            yield from self._sum(f"layers.{i}.attention", joined, raw, layer.attention_post, y)
            if layer.mlp is None:
                continue
            stream = Stream(f"layers.{i}.mlp_norm", layer.mlp_norm, x, y, h, other)
            x, other = other, x
            yield from layer.mlp.calls(f"layers.{i}.mlp", buffers, stream, raw)
            yield from self._sum(f"layers.{i}.mlp", joined, raw, layer.mlp_post, y)

    def _sum(self, name: str, joined: Callable[[Tensor], None] | None, raw: Tensor, post: Norm | None, y: Tensor) -> Emit:
        """From the ranks' terms to what is added to the stream."""
        if joined is not None:
            yield Call(f"{name}.sum", joined, (raw,))
        if post is not None:
            yield post.of(f"{name}.post", raw, y)
        elif raw is not y:
            yield Call(f"{name}.scale", torch_calls.scale, (raw, self.scales[1], y))

    def head_calls(self, buffers: StepBuffers) -> Emit:
        """From the tensors `x` and `y` of buffers with one token a sequence to their `logits`."""
        x, total, h, y = (buffers.tensor(name, buffers.batch, self.hidden) for name in ("x", "x.other", "h", "y"))
        stream, logits = Stream("norm", self.norm, x, y, h, total), buffers.tensor("logits", buffers.batch, self.vocab)
        if self.group is None:
            yield from stream.product("head", self.head, logits)
        else:
            part = buffers.tensor("logits.part", buffers.batch, self.head.rows)
            yield from stream.product("head", self.head, part)
            yield from self.group.gather_calls("head", buffers, part, logits)
        if self.scales[2] != 1.0:
            yield Call("head.scale", torch_calls.scale, (logits, self.scales[2], logits))
        if self.softcap is not None:
            yield Call("head.softcap", torch_calls.softcap, (logits, self.softcap))
