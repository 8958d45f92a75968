"""The second half of a layer: an MLP, with a gate or without, or a mixture of experts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops.common.expert_weights import QuantizedExperts
from ..ops.moe import moe_out
from ..ops.moe_route import moe_route_out
from ..ops.quantized_moe import quantized_moe_out
from ..ops.rms_norm_route import rms_norm_route_out
from ..ops.silu_mul import silu_mul_out
from . import torch_calls
from .attention import GroupedAttention
from .elementwise import gate, relu_squared
from .layers import Array, Given, Norm, Rows, Stream, joins, linear
from .program import Call, Emit, StepBuffers
from .weights import AnyMatrix, Matrix


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(silu(gate(h)) * up(h)). alternating: the rows of gate and up in `gate_up` are
    interleaved, which saves a launch; else gate's come first.

    factors: of the gate in front of its activation, and of the result (Falcon-H1); not alternating.
    share: [1, hidden], of a token's rows: the sigmoid of their product multiplies the result
        (Qwen3-Next's shared expert).
    """

    gate_up: AnyMatrix
    down: AnyMatrix
    alternating: bool = True
    gelu_tanh: bool = False
    factors: tuple[float, float] = (1.0, 1.0)
    share: AnyMatrix | None = None

    @property
    def weight_bytes(self) -> int:
        return self.gate_up.nbytes + self.down.nbytes + (0 if self.share is None else self.share.nbytes)

    def calls(self, name: str, buffers: StepBuffers, rows: Rows, y: Tensor, residual: Tensor | None = None) -> Emit:
        """residual: added to the result."""
        inter = self.down.columns
        before: dict[str, Any] = {}
        active = buffers.tensor(f"active.{inter}", buffers.tokens, inter)
        if self.alternating:
            yield from rows.product(f"{name}.gate_up", self.gate_up, active, silu_mul=True)
        else:
            both = buffers.tensor(f"gate_up.{inter}", buffers.tokens, 2 * inter)
            yield from rows.product(f"{name}.gate_up", self.gate_up, both)
            if self.factors[0] != 1.0:
                yield Call(f"{name}.gate_factor", torch_calls.scale, (both[:, :inter], self.factors[0], both[:, :inter]))
            gate_half, up = both.split(inter, 1)
            if self.share is None and joins(self.down, buffers.tokens):
                active, before = gate_half, {"up": up, "gelu_tanh": self.gelu_tanh}
            else:
                yield Call.of(f"{name}.activation", silu_mul_out, gate=gate_half, up=up, out=active, gelu_tanh=self.gelu_tanh)
        if self.share is not None:
            share = buffers.tensor("share", buffers.tokens, 1)
            yield from rows.product(f"{name}.share", self.share, share)
            yield Call(f"{name}.gate", gate, (active[:, None], share[:, None]))
        yield from linear(f"{name}.down", active, self.down, y, residual=residual, **before)
        if self.factors[1] != 1.0:
            assert residual is None
            yield Call(f"{name}.factor", torch_calls.scale, (y, self.factors[1], y))

    def of_experts(self, inter: int) -> tuple[Tensor, Tensor] | None:
        """The matrices cut into experts of width `inter`: [experts, 2, inter, hidden] and [experts,
        hidden, inter]; None if the width does not divide, or a token takes a share.
        """
        if not (isinstance(self.gate_up, Matrix) and isinstance(self.down, Matrix)) or not self.alternating or self.gelu_tanh:
            return None
        if self.share is not None:
            return None
        hidden, wide = self.down.weight.shape
        if wide % inter or self.gate_up.bias is not None or self.down.bias is not None:
            return None
        experts = wide // inter
        gate_up = self.gate_up.weight.view(experts, inter, 2, hidden).transpose(1, 2)
        return gate_up, self.down.weight.view(hidden, experts, inter).transpose(0, 1)


@dataclass(frozen=True, slots=True)
class PlainMlp:
    """down(act(up(h))), without a gate: of Nemotron-H the square of ReLU, of StarCoder2 GELU."""

    up: AnyMatrix
    down: AnyMatrix
    activation: str = "relu_squared"  # of ACTIVATIONS

    @property
    def weight_bytes(self) -> int:
        return self.up.nbytes + self.down.nbytes

    def calls(self, name: str, buffers: StepBuffers, rows: Rows, y: Tensor, residual: Tensor | None = None) -> Emit:
        """residual: added to the result."""
        active = buffers.tensor(f"active.{self.down.columns}", buffers.tokens, self.down.columns)
        yield from rows.product(f"{name}.up", self.up, active)
        yield Call(f"{name}.activation", ACTIVATIONS[self.activation], (active,))
        yield from linear(f"{name}.down", active, self.down, y, residual=residual)


# What PlainMlp may compute between its matrices, in place
ACTIVATIONS: dict[str, Callable[[Tensor], None]] = {
    "relu_squared": relu_squared,
    "relu": torch_calls.relu,
    "gelu": torch_calls.gelu,
    "gelu_tanh": torch_calls.gelu_tanh,
}


@dataclass(frozen=True, slots=True)
class BesideMlp:
    """An attention and an MLP that read the same rows; the layer adds what both find (Cohere)."""

    attention: GroupedAttention
    mlp: GatedMlp | PlainMlp
    states: int = 0

    @property
    def weight_bytes(self) -> int:
        return self.attention.weight_bytes + self.mlp.weight_bytes

    def cache_arrays(self, batch: int, max_len: int, dtype: torch.dtype) -> tuple[Array, ...]:
        return self.attention.cache_arrays(batch, max_len, dtype)

    def calls(self, name: str, buffers: StepBuffers, stream: Stream, y: Tensor, cache: tuple[Tensor, ...]) -> Emit:
        yield from stream.norm_calls()
        rows, found = Given(stream.normed), buffers.tensor("y.attention", *y.shape)
        yield from self.attention.calls(name, buffers, rows, found, cache)
        yield from self.mlp.calls(f"{name}.mlp", buffers, rows, y, residual=found)


@dataclass(frozen=True, slots=True)
class Activation:
    """Biases and activation, as in `tilewright.moe`. bias_gate_up: [experts, 2, inter]."""

    bias_gate_up: Tensor | None = None
    bias_down: Tensor | None = None
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts, and the expert of all tokens (`shared`).

    router: a row for each expert; its bias is part of the logits.
    logits_dtype: the router's product is rounded to it before the softmax.
    bias, sigmoid, normalize, scale, groups, top_groups: as in `tilewright.moe_route`.
    gate_up, down, act: as in `tilewright.moe`; gate_up is [experts, 2, inter, hidden], down
        [experts, hidden, inter]. Or both quantised.
    first: with several ranks, the first of this rank's experts; gate_up and down hold only these.
    """

    router: Matrix
    gate_up: Tensor | QuantizedExperts
    down: Tensor | QuantizedExperts
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

    def calls(self, name: str, buffers: StepBuffers, stream: Stream, y: Tensor) -> Emit:
        weights = buffers.tensor("router.weights", buffers.tokens, self.top_k, dtype=torch.float32)
        ids = buffers.tensor("router.ids", buffers.tokens, self.top_k, dtype=torch.int32)
        choice: dict[str, Any] = {name: getattr(self, name) for name in ("bias", "sigmoid", "normalize", "scale", "groups", "top_groups")}
        choice |= {"weights": weights, "ids": ids, "first_expert": self.first}
        if stream.single and isinstance(stream.norm, Norm):
            arrived = buffers.tensor("router.arrived", buffers.tokens, dtype=torch.int32)
            yield Call.of(
                f"{name}.route",
                rms_norm_route_out,
                x=stream.x,
                router=self.router.weight,
                router_bias=self.router.bias,
                residual=stream.y,
                arrived=arrived,
                out=stream.normed,
                new_residual=stream.total,
                **stream.norm.how,
                **choice,
            )
        else:
            logits = buffers.tensor("router", buffers.tokens, len(self.router.weight), dtype=self.logits_dtype)
            yield from stream.norm_calls()
            yield from linear(f"{name}.router", stream.normed, self.router, logits)
            yield Call.of(f"{name}.route", moe_route_out, logits=logits, **choice)
        together = stream.single and self.shared is not None and isinstance(self.down, Tensor) and self.shared.of_experts(self.down.shape[2])
        if together or self.shared is None:
            yield self._experts(name, stream.normed, weights, ids, together or (None, None), y)
        else:
            routed = buffers.tensor("routed", *y.shape)
            yield self._experts(name, stream.normed, weights, ids, (None, None), routed)
            yield from self.shared.calls(f"{name}.shared", buffers, Given(stream.normed), y, residual=routed)

    def _experts(self, name: str, h: Tensor, weights: Tensor, ids: Tensor, shared: tuple[Tensor | None, Tensor | None], y: Tensor) -> Call:
        act = {field: getattr(self.act, field) for field in ("bias_gate_up", "bias_down", "alpha", "limit", "up_offset")}
        if isinstance(self.gate_up, QuantizedExperts) and isinstance(self.down, QuantizedExperts):
            small = {**self.gate_up.arguments("gate_up"), **self.down.arguments("down"), "weight_format": self.gate_up.weight_format}
            return Call.of(f"{name}.experts", quantized_moe_out, x=h, weights=weights, ids=ids.view(-1), out=y, **small, **act)
        matrices = {"gate_up": self.gate_up, "down": self.down, "shared_gate_up": shared[0], "shared_down": shared[1]}
        return Call.of(f"{name}.experts", moe_out, x=h, weights=weights, ids=ids.view(-1), out=y, **matrices, **act)
