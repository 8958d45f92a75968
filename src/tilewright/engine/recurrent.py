"""Layers that keep a state of one size instead of a cache of keys, as calls on a step's buffers.

A prompt's chunk begins with the state that the chunk before left. Padding stands in front of a
prompt, where the state is zero: a token of zeros leaves it so.
"""

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from ..ops.causal_conv1d import causal_conv1d_out
from ..ops.gated_delta_rule import gated_delta_rule_out
from ..ops.rms_norm_gated import rms_norm_gated_out
from ..ops.ssd import ssd_out
from . import torch_calls
from .attention import GroupedAttention
from .elementwise import delta_gates
from .layers import Array, Given, Rows, Stream, linear
from .program import Call, Emit, StepBuffers
from .weights import AnyMatrix


@dataclass(frozen=True, slots=True)
class GatedNorm:
    """As in `tilewright.rms_norm_gated`."""

    weight: Tensor
    eps: float
    groups: int = 1
    gate_first: bool = False
    sigmoid: bool = False

    def of(self, name: str, x: Tensor, gate: Tensor, out: Tensor) -> Call:
        how = {field: getattr(self, field) for field in ("weight", "eps", "groups", "gate_first", "sigmoid")}
        return Call.of(name, rms_norm_gated_out, x=x, gate=gate, out=out, **how)


@dataclass(frozen=True, slots=True)
class Convolution:
    """As in `tilewright.causal_conv1d`, with SiLU. weight: [channels, width]. bias: [channels]."""

    weight: Tensor
    bias: Tensor | None

    def state(self, batch: int, dtype: torch.dtype) -> Array:
        channels, width = self.weight.shape
        return (batch, width - 1, channels), dtype

    def calls(self, name: str, buffers: StepBuffers, x: Tensor, state: Tensor, out: Tensor) -> Emit:
        """Of padding zeros come in and, whatever the bias is, zeros come out."""
        padded = buffers.q_len > 1  # a step has none
        if padded:
            yield Call(f"{name}.in_front", torch_calls.blank, (x, buffers.positions))
        arrays = {"x": x, "weight": self.weight, "bias": self.bias, "state": state, "out": out}
        yield Call.of(name, causal_conv1d_out, batch=buffers.batch, silu=True, **arrays)
        if padded and self.bias is not None:
            yield Call(f"{name}.behind", torch_calls.blank, (out, buffers.positions))


def _by_head(buffers: StepBuffers, x: Tensor, heads: int) -> Tensor:
    """[tokens, heads * dim] as [batch, q_len, heads, dim]."""
    rows: Tensor = x.unflatten(1, (heads, -1)).unflatten(0, (buffers.batch, buffers.q_len))
    return rows


@dataclass(frozen=True, slots=True)
class StateSpace:
    """Mamba-2.

    projection: rows of the gate, then of x, b and c, which the convolution takes, then of dt.
    a, d, dt_bias: [heads], as in `tilewright.ssd`. dt_limit: of a prompt's steps; transformers does
        not limit those of single tokens.
    norm: None if silu(gate) multiplies the result alone.
    factors: fp32, of the projection's results (Falcon-H1).
    """

    projection: AnyMatrix
    convolution: Convolution
    a: Tensor
    d: Tensor
    dt_bias: Tensor
    norm: GatedNorm | None
    out: AnyMatrix
    heads: int
    head_dim: int
    groups: int
    state_dim: int
    dt_limit: tuple[float, float]
    factors: Tensor | None = None
    states: int = 2

    @property
    def weight_bytes(self) -> int:
        return self.projection.nbytes + self.out.nbytes + self.convolution.weight.nbytes

    def cache_arrays(self, batch: int, max_len: int, dtype: torch.dtype) -> tuple[Array, ...]:
        return self.convolution.state(batch, dtype), ((batch, self.heads, self.head_dim, self.state_dim), torch.float32)

    def calls(self, name: str, buffers: StepBuffers, rows: Rows, y: Tensor, cache: tuple[Tensor, ...]) -> Emit:
        inner, read = self.heads * self.head_dim, self.groups * self.state_dim
        channels = inner + 2 * read
        projected = buffers.tensor("state.projected", buffers.tokens, inner + channels + self.heads)
        yield from rows.product(f"{name}.in", self.projection, projected)
        if self.factors is not None:
            yield Call(f"{name}.factors", torch_calls.scale_columns, (projected, self.factors))
        gate, mixed, dt = projected.split((inner, channels, self.heads), 1)
        taps, state = (buffers.held(x) for x in cache)
        seen = buffers.tensor("state.convolved", buffers.tokens, channels)
        yield from self.convolution.calls(f"{name}.convolution", buffers, mixed, taps, seen)
        parts = zip(seen.split((inner, read, read), 1), (self.heads, self.groups, self.groups), strict=True)
        x, b, c = (_by_head(buffers, part, heads) for part, heads in parts)
        found = buffers.tensor("state.read", buffers.tokens, inner)
        dt_min, dt_max = self.dt_limit if buffers.q_len > 1 else (0.0, inf)
        yield Call.of(
            name,
            ssd_out,
            x=x,
            dt=dt.unflatten(0, (buffers.batch, buffers.q_len)),
            a=self.a,
            b=b,
            c=c,
            d=self.d,
            dt_bias=self.dt_bias,
            z=_by_head(buffers, gate, self.heads) if self.norm is None else None,
            state=state,
            dt_softplus=True,
            dt_min=dt_min,
            dt_max=dt_max,
            out=_by_head(buffers, found, self.heads),
        )
        if self.norm is not None:
            normed = buffers.tensor("state.normed", buffers.tokens, inner)
            yield self.norm.of(f"{name}.norm", found, gate, normed)
            found = normed
        yield from linear(f"{name}.out", found, self.out, y)


@dataclass(frozen=True, slots=True)
class DeltaRule:
    """The gated delta rule (Qwen3-Next).

    projection: rows of q, k and v, which the convolution takes, then of the gate, then of b and a,
        of which beta and g are made: [k_heads | k_heads | v_heads] * dim, v_heads * v_dim, v_heads,
        v_heads.
    order: int32, where these rows are in the projection; None if they lie so.
    decay, dt_bias: fp32 [v_heads]: g = decay * softplus(a + dt_bias).
    norm: with a group for each head.
    """

    projection: AnyMatrix
    order: Tensor | None
    convolution: Convolution
    decay: Tensor
    dt_bias: Tensor
    norm: GatedNorm
    out: AnyMatrix
    k_heads: int
    v_heads: int
    head_dim: int
    v_dim: int
    states: int = 2

    @property
    def weight_bytes(self) -> int:
        return self.projection.nbytes + self.out.nbytes + self.convolution.weight.nbytes

    def cache_arrays(self, batch: int, max_len: int, dtype: torch.dtype) -> tuple[Array, ...]:
        return self.convolution.state(batch, dtype), ((batch, self.v_heads, self.head_dim, self.v_dim), torch.float32)

    def calls(self, name: str, buffers: StepBuffers, rows: Rows, y: Tensor, cache: tuple[Tensor, ...]) -> Emit:
        read, inner = self.k_heads * self.head_dim, self.v_heads * self.v_dim
        widths = 2 * read + inner, inner
        projected = buffers.tensor("state.projected", buffers.tokens, sum(widths) + 2 * self.v_heads)
        yield from rows.product(f"{name}.in", self.projection, projected)
        ordered = None if self.order is None else buffers.tensor("state.ordered", buffers.tokens, sum(widths))
        gates = buffers.tensor("state.gates", 2, buffers.tokens, self.v_heads, dtype=torch.float32)
        yield Call(f"{name}.gates", delta_gates, (projected, self.order, self.decay, self.dt_bias, ordered, *gates))
        mixed, gate = (projected[:, : sum(widths)] if ordered is None else ordered).split(widths, 1)
        g, beta = gates.unflatten(1, (buffers.batch, buffers.q_len)).transpose(2, 3)
        taps, state = (buffers.held(x) for x in cache)
        seen = buffers.tensor("state.convolved", buffers.tokens, widths[0])
        yield from self.convolution.calls(f"{name}.convolution", buffers, mixed, taps, seen)
        parts = zip(seen.split((read, read, inner), 1), (self.k_heads, self.k_heads, self.v_heads), strict=True)
        qkv = dict(zip("qkv", (_by_head(buffers, part, heads).transpose(1, 2) for part, heads in parts), strict=True))
        found, normed = (buffers.tensor(f"state.{which}", buffers.tokens, inner) for which in ("read", "normed"))
        how = {"scale": self.head_dim**-0.5, "normalize": True, "out": _by_head(buffers, found, self.v_heads).transpose(1, 2)}
        yield Call.of(name, gated_delta_rule_out, **qkv, g=g, beta=beta, state=state, **how)
        yield self.norm.of(f"{name}.norm", found, gate, normed)
        yield from linear(f"{name}.out", normed, self.out, y)


@dataclass(frozen=True, slots=True)
class SideBySide:
    """A state and an attention that read the same rows; y is shares[0] times what the one finds and
    shares[1] times what the other does (Falcon-H1).
    """

    state: StateSpace
    attention: GroupedAttention
    shares: tuple[float, float]

    @property
    def states(self) -> int:
        return self.state.states

    @property
    def weight_bytes(self) -> int:
        return self.state.weight_bytes + self.attention.weight_bytes

    def cache_arrays(self, batch: int, max_len: int, dtype: torch.dtype) -> tuple[Array, ...]:
        return *self.state.cache_arrays(batch, max_len, dtype), *self.attention.cache_arrays(batch, max_len, dtype)

    def calls(self, name: str, buffers: StepBuffers, stream: Stream, y: Tensor, cache: tuple[Tensor, ...]) -> Emit:
        yield from stream.norm_calls()
        rows, found = Given(stream.normed), buffers.tensor("y.attention", *y.shape)
        yield from self.state.calls(f"{name}.state", buffers, rows, y, cache[: self.states])
        yield from self.attention.calls(name, buffers, rows, found, cache[self.states :])
        yield Call(f"{name}.sum", torch_calls.mix, (y, self.shares[0], found, self.shares[1]))
