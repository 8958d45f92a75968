"""The methods that modules get: the same formula on our kernels. kinds.py says which."""

import inspect
from collections.abc import Callable
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.layer_norm import layer_norm
from ..ops.matmul import matmul
from ..ops.moe import moe
from ..ops.rms_norm import rms_norm
from ..ops.rms_norm_gated import rms_norm_gated
from ..ops.silu_mul import silu_mul
from ..ops.sparse_index import sparse_index
from .experts import route
from .linear_attention import with_our_functions
from .method import NAME
from .probe import hooks_of
from .rotations import ROTATIONS
from .scope import with_our_function

Forward = Callable[..., Any]


def with_options(cls: type[nn.Module], forward: Forward) -> Forward:
    """A forward of rows for a module whose own one may take more, and then computes more."""
    if len(inspect.signature(cls.forward).parameters) == 2:
        return forward

    def forward_with_options(self: Any, *given: Any, **named: Any) -> Any:
        return cls.forward(self, *given, **named) if named or len(given) != 1 else forward(self, *given)

    return forward_with_options


def plain(module: Any, name: str) -> bool:
    """Whether a parameter is a tensor as any other, and no quantised or distributed one."""
    return type(getattr(module, name)) in (nn.Parameter, Tensor)


def rows(x: Tensor) -> Tensor:
    """Rows whose elements stand side by side, as kernels read them. Most are already."""
    return x if x.stride(-1) == 1 or not x.numel() else x.contiguous()


@cache
def linear(cls: type[nn.Module], transposed: bool = True) -> Forward:
    """transposed: the matrix is [out, in], as torch's Linear holds it."""

    def forward(self: Any, input: Tensor) -> Tensor:
        return matmul(rows(input), self.weight, self.bias, trans_b=transposed)

    return with_options(cls, forward)


@cache
def norm_by_root_mean_square(cls: type[nn.Module], eps: str | float, offset: float, rounded: bool, weight: str) -> Forward:
    """eps: its value, or the path of the attribute that holds it. weight: its name."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        return rms_norm(rows(hidden_states), getattr(self, weight), number_of(self, eps), weight_offset=offset, round_before_weight=rounded)

    return with_options(cls, forward)


@cache
def norm_without_weight(cls: type[nn.Module], eps: str | float) -> Forward:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        ones = hidden_states.new_ones(hidden_states.shape[-1])
        return rms_norm(rows(hidden_states), ones, number_of(self, eps))

    return with_options(cls, forward)


@cache
def norm_by_deviation(cls: type[nn.Module], eps: str | float, weight: str | None, bias: str | None) -> Forward:
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        held, added = (None if name is None else getattr(self, name) for name in (weight, bias))
        return layer_norm(rows(hidden_states), held, added, number_of(self, eps))

    return with_options(cls, forward)


@cache
def gated_norm(cls: type[nn.Module], eps: str, groups: int, gate_first: bool, sigmoid: bool) -> Forward:
    def forward(self: Any, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        if gate is None:
            return cls.forward(self, hidden_states)  # type: ignore[no-any-return]
        how: dict[str, Any] = {"groups": groups, "gate_first": gate_first, "sigmoid": sigmoid}
        return rms_norm_gated(rows(hidden_states), self.weight, rows(gate), number_of(self, eps), **how)

    return forward


def number_of(module: Any, name: str | float) -> float:
    """A number, or the one that a path of attributes leads to."""
    found: float = attrgetter(name)(module) if isinstance(name, str) else name
    return found


@cache
def mlp(cls: type[nn.Module], names: tuple[str, ...], gelu: bool, up_first: bool, drops: bool, beside: tuple[tuple[str, str], ...]) -> Forward:
    """drops: the module's own code computes something else in training. beside: names and classes
    of the parts that are not called, such as the activation.

    The module's own code also runs where one of these is another now, or has got a hook.
    """

    def forward(self: Any, x: Tensor) -> Tensor:
        if (drops and self.training) or any(_changed(self._modules.get(name), kind) for name, kind in beside):
            return cls.forward(self, x)  # type: ignore[no-any-return]
        return gated_mlp(lambda name: getattr(self, name), x, names, gelu, up_first)

    return with_options(cls, forward)


def _changed(part: nn.Module | None, kind: str) -> bool:
    return part is None or type(part).__name__ != kind or bool(hooks_of(part))


def gated_mlp(part: Callable[[str], Any], x: Tensor, names: tuple[str, ...], gelu: bool, up_first: bool) -> Tensor:
    """names: of the matrices: gate, up and down, or both in one and down; up_first: in that one."""
    both = [part(name)(x) for name in names[:-1]]
    if up_first:
        both = [*reversed(both[0].chunk(2, -1))]
    y: Tensor = part(names[-1])(silu_mul(*both, gelu_tanh=gelu))
    return y


@cache
def router(cls: type[nn.Module], **options: Any) -> Forward:
    def forward(self: Any, hidden_states: Tensor, *bias: Tensor, **named: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return route(self, hidden_states, *bias, *named.values(), **options)

    return forward


def experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    return moe(hidden_states, self.gate_up_proj, self.down_proj, weights=top_k_weights.float(), ids=top_k_index)


def unexpanded(self: Any, kv_nope: Tensor, k_rot: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces `expand_kv` of latent attention: our attention takes the cached latents and rotated
    keys. If somebody has selected another attention, it gets expanded keys and values.
    """
    if self.config._attn_implementation == NAME:
        return kv_nope, k_rot
    expanded: tuple[Tensor, Tensor] = type(self).expand_kv(self, kv_nope, k_rot)
    return expanded


@cache
def indexer(cls: type[nn.Module], rotation: str) -> Forward:
    """DeepSeek's lightning indexer: rows of the cached latents that each token attends to.

    rotation: the form of the function that turns the first columns of its queries and keys.
    """

    def forward(
        self: Any,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
    ) -> Tensor:
        if attention_mask.dtype != torch.int32:  # somebody has selected another attention since
            return cls.forward(self, hidden_states, q_resid, position_embeddings, attention_mask, position_ids, past_key_values)  # type: ignore[no-any-return]
        q = torch.unflatten(self.wq_b(q_resid), -1, (self.n_heads, self.head_dim))  # as in models/attention.py
        k = self.k_norm(self.wk(hidden_states))[:, :, None]
        sizes = (self.qk_rope_head_dim, self.head_dim - self.qk_rope_head_dim)
        (q_turned, q_rest), (k_turned, k_rest) = q.split(sizes, -1), k.split(sizes, -1)
        q_turned, k_turned = ROTATIONS[rotation].ours(q_turned, k_turned, *position_embeddings, unsqueeze_dim=2)
        q, k = torch.cat((q_turned, q_rest), -1), torch.cat((k_turned, k_rest), -1)[:, :, 0]
        if past_key_values is not None:
            k = past_key_values.update_indexer(k, self.layer_idx)
        weights = self.weights_proj(hidden_states.to(self.weights_proj.weight.dtype)).float() * (self.n_heads**-0.5 * self.softmax_scale)
        kv_start, kv_len = attention_mask[:, 0].unbind(-1)
        return sparse_index(q, k, weights, self.index_topk, kv_len=kv_len, kv_start=kv_start)

    return forward


def rotating(cls: type[nn.Module], functions: tuple[tuple[str, str], ...]) -> Forward:
    """The forward of a class, which calls our rotations. functions: names of its own and ours."""
    forward: Any = inspect.unwrap(cls.forward)
    for name, form in functions:
        forward = with_our_function(forward, name, ROTATIONS[form].ours)
    found: Forward = forward
    return found


MAKERS: dict[str, Callable[..., Forward]] = {
    "linear": linear,
    "rms_norm": norm_by_root_mean_square,
    "rms_norm_of_ones": norm_without_weight,
    "layer_norm": norm_by_deviation,
    "rms_norm_gated": gated_norm,
    "mlp": mlp,
    "router": router,
    "experts": lambda cls: experts,
    "rope": rotating,
    "latents": lambda cls: unexpanded,
    "indexer": indexer,
    "linear_attention": with_our_functions,
}
