"""Linear attention of transformers' models: the functions that their modules call, on our ops.

Axes are transformers': a convolution's [batch, channels, tokens], the rule's [batch, tokens, heads,
...]. Both are views of what ours take.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..launch import argument_error
from ..ops import causal_conv1d as convolution
from ..ops.causal_conv1d import causal_conv1d
from ..ops.gated_delta_rule import gated_delta_rule
from .scope import with_our_function


def conv_update(hidden_states: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    """New tokens behind those of a state, which is moved on in place."""
    y, _ = causal_conv1d(_tokens_first(hidden_states), weight, bias, state=conv_state.mT, silu=activation is not None)
    return y.mT


def conv_prompt(hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **packed: Any) -> Tensor:
    """Tokens with nothing in front of them."""
    _refuse_packed(packed)
    found: Any = causal_conv1d(_tokens_first(hidden_states), weight, bias, silu=activation is not None)
    y: Tensor = found.mT
    return y


def delta_rule(  # noqa: PLR0913 transformers names the arguments
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **packed: Any,
) -> tuple[Tensor, Tensor | None]:
    """A prompt or a token of each sequence. A state that comes in is moved on in place: it is the
    cache's, which takes what is returned.
    """
    _refuse_packed(packed)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    state = initial_state
    if state is None and output_final_state:
        state = torch.zeros(*v.shape[:2], k.shape[-1], v.shape[-1], dtype=torch.float32, device=v.device)
    elif state is not None and (state.dtype != torch.float32 or not output_final_state):
        state = state.to(torch.float32, copy=True)
    found: Any = gated_delta_rule(q, k, v, g.transpose(1, 2), beta=beta.transpose(1, 2), state=state, normalize=use_qk_l2norm_in_kernel)
    out, final = (found, None) if state is None else found
    return out.transpose(1, 2), final if output_final_state else None


CONVOLUTION: dict[str, Callable[..., Any]] = {"causal_conv1d_update": conv_update, "causal_conv1d_fn": conv_prompt}
RULES: tuple[dict[str, Callable[..., Any]], ...] = (
    {"torch_chunk_gated_delta_rule": delta_rule, "torch_recurrent_gated_delta_rule": delta_rule},
    {"chunk_kimi_delta_attention": delta_rule, "recurrent_kimi_delta_attention": delta_rule},
)


def ours_of(cls: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """Our functions for those that the forward of a layer of linear attention calls; none unless
    all that such a layer needs are there.
    """
    called = set(getattr(getattr(inspect.unwrap(cls.forward), "__code__", None), "co_names", ()))
    return next((CONVOLUTION | rule for rule in RULES if called >= {*CONVOLUTION, *rule}), {})


def with_our_functions(cls: type[nn.Module]) -> Callable[..., Any]:
    """The forward of a layer of linear attention, which calls ours."""
    forward: Any = inspect.unwrap(cls.forward)
    for name, ours in ours_of(cls).items():
        forward = with_our_function(forward, name, ours)
    found: Callable[..., Any] = forward
    return found


def keep_linear_attention(module: Any) -> str | None:
    if module.activation != "silu":
        return f"hidden_act must be silu, got {module.activation}"
    if not 2 <= module.conv_kernel_size <= convolution.WIDEST:
        return f"linear_conv_kernel_dim must be 2..{convolution.WIDEST}, got {module.conv_kernel_size}"
    return "conv1d has a hook of accelerate" if hasattr(module.conv1d, "_hf_hook") else None


def _tokens_first(x: Tensor) -> Tensor:
    """[batch, tokens, channels]: a view, but behind a cache that was put in front."""
    return x.mT if x.stride(1) == 1 else x.mT.contiguous()


def _refuse_packed(options: dict[str, Any]) -> None:
    for name in ("cu_seqlens", "cu_seq_lens_q", "seq_idx"):
        if options.get(name) is not None:
            raise argument_error(name, "None: transformers' convolution runs across sequences packed in one row", "a tensor")
