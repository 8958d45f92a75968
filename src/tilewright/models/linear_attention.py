"""Linear attention of transformers' models: the functions that their modules call, on our ops.

Axes are transformers': a convolution's [batch, channels, tokens], the rule's [batch, tokens, heads,
...]. Both are views of what ours take.
"""

import inspect
from collections.abc import Callable
from functools import cache
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from ..launch import argument_error
from ..ops import causal_conv1d as convolution
from ..ops.causal_conv1d import causal_conv1d
from ..ops.common.softmax_tiles import MAX_HEAD_DIM
from ..ops.gated_delta_rule import gated_delta_rule
from ..ops.ssd import ssd
from . import probe
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
    state = _moved_on(initial_state, output_final_state, (*v.shape[:2], k.shape[-1], v.shape[-1]), v)
    found: Any = gated_delta_rule(q, k, v, g.transpose(1, 2), beta=beta.transpose(1, 2), state=state, normalize=use_qk_l2norm_in_kernel)
    out, final = (found, None) if state is None else found
    return out.transpose(1, 2), final if output_final_state else None


def chunk_scan(  # noqa: PLR0913 transformers names the arguments
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, inf),
    return_final_states: bool = False,
    z: Tensor | None = None,
    **packed: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """A prompt. A state that comes in is moved on in place, as by `delta_rule`."""
    _refuse_packed(packed)
    state = _moved_on(initial_states, return_final_states, (len(dt), *hidden_states.shape[2:], B.shape[-1]), dt)
    options: dict[str, Any] = {"c": C, "d": D, "dt_bias": dt_bias, "z": z, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
    found: Any = ssd(hidden_states, dt, A, B, state=state, **options)
    out: Tensor | tuple[Tensor, Tensor] = found if return_final_states or state is None else found[0]
    return out


def state_update(  # noqa: PLR0913 transformers names the arguments
    state: Tensor,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **packed: Any,
) -> Tensor:
    """A token of each sequence, [batch, heads, head_dim], with what is the same in all of a head
    repeated.
    """
    _refuse_packed(packed)
    rows: dict[str, Any] = {"x": hidden_states, "dt": dt[..., 0], "b": B, "c": C} | ({} if z is None else {"z": z})
    d, bias = (None if x is None else x[:, 0] for x in (D, dt_bias))
    wide = state.float()
    found: Any = ssd(**{name: x[:, None] for name, x in rows.items()}, a=A[:, 0, 0], d=d, dt_bias=bias, state=wide, dt_softplus=dt_softplus)
    if wide is not state:
        state.copy_(wide)
    y: Tensor = found[0][:, 0]
    return y


def _moved_on(state: Tensor | None, kept: bool, shape: tuple[int, ...], like: Tensor) -> Tensor | None:
    """What a prompt's final state is written to: the initial one, if it is kept and fp32."""
    if state is None:
        return torch.zeros(shape, dtype=torch.float32, device=like.device) if kept else None
    return state if kept and state.dtype == torch.float32 else state.to(torch.float32, copy=True)


CONVOLUTIONS: dict[str, Callable[..., Any]] = {"causal_conv1d_update": conv_update, "causal_conv1d_fn": conv_prompt}
# The functions that a forward calls, and the op that computes them
OURS: tuple[tuple[str, dict[str, Callable[..., Any]]], ...] = (
    ("gated_delta_rule", {"torch_chunk_gated_delta_rule": delta_rule, "torch_recurrent_gated_delta_rule": delta_rule}),
    ("gated_delta_rule", {"chunk_kimi_delta_attention": delta_rule, "recurrent_kimi_delta_attention": delta_rule}),
    ("ssd", {"mamba2_chunk_scan": chunk_scan, "mamba2_selective_state_update": state_update}),
)

# Of each op, what modules call the sizes of a state, by kind of module
WIDTHS = {"ssd": (("head_dim", "ssm_state_size"),), "gated_delta_rule": (("head_k_dim", "head_v_dim"), ("head_dim",))}


def ours_of(cls: type[nn.Module]) -> tuple[str | None, dict[str, Callable[..., Any]]]:
    """The op that computes what a forward calls, and our functions for these; None unless it calls
    all of a kind.
    """
    called = set(getattr(getattr(inspect.unwrap(cls.forward), "__code__", None), "co_names", ()))
    return next(((op, CONVOLUTIONS | rule) for op, rule in OURS if called >= {*CONVOLUTIONS, *rule}), (None, {}))


def with_our_functions(cls: type[nn.Module]) -> Callable[..., Any]:
    """The forward of a layer of linear attention, which calls ours."""
    forward: Any = inspect.unwrap(cls.forward)
    for name, ours in ours_of(cls)[1].items():
        forward = with_our_function(forward, name, ours)
    found: Callable[..., Any] = forward
    return found


def keep_linear_attention(module: Any, op: str) -> str | None:
    if module.activation != "silu":
        return f"hidden_act must be silu, got {module.activation}"
    if not 2 <= module.conv_kernel_size <= convolution.WIDEST:
        return f"the kernel of its convolution must have 2..{convolution.WIDEST} inputs, got {module.conv_kernel_size}"
    if hasattr(module.conv1d, "_hf_hook"):
        return "conv1d has a hook of accelerate"
    names = next((names for names in WIDTHS[op] if hasattr(module, names[0])), ())
    if max((widths := [getattr(module, name) for name in names]), default=0) > MAX_HEAD_DIM:
        return f"{' and '.join(names)} must be at most {MAX_HEAD_DIM}, got {' and '.join(map(str, widths))}"
    if op == "ssd":
        scope = inspect.unwrap(type(module).forward).__globals__
        wrong = next((name for name in PROBES if not _computes(name, inspect.unwrap(scope[name]))), None)
        return wrong and f"its {wrong} computes something else"
    return None


def _scanned(scan: Callable[..., Any]) -> Tensor:
    """What a function makes of a small prompt, and its final state."""
    x, dt, b, c, d, bias, state = map(_small, ((2, 11, 4, 3), (2, 11, 4), (2, 11, 2, 5), (2, 11, 2, 5), (4,), (4,), (2, 4, 3, 5)))
    options = {"D": d, "dt_bias": bias, "initial_states": state, "dt_softplus": True, "dt_limit": (0.1, 1.0), "return_final_states": True}
    return torch.cat([part.flatten() for part in scan(x, dt, -_small((4,)).abs(), b, c, chunk_size=4, **options)])


def _updated(update: Callable[..., Any]) -> Tensor:
    """The same of one token."""
    state, x, dt, b, c, d, bias = map(_small, ((2, 4, 3, 5), (2, 4, 3), (2, 4), (2, 2, 5), (2, 2, 5), (4,), (4,)))
    a = -_small((4, 1, 1)).abs().expand(-1, 3, 5)
    y = update(state, x, dt[..., None].expand(-1, -1, 3), a, b, c, d[:, None].expand(-1, 3), dt_bias=bias[:, None].expand(-1, 3), dt_softplus=True)
    return torch.cat((y.flatten(), state.flatten()))


def _small(shape: tuple[int, ...]) -> Tensor:
    return probe.random(*shape, dtype=torch.float32)


PROBES: dict[str, Callable[[Callable[..., Any]], Tensor]] = {"mamba2_chunk_scan": _scanned, "mamba2_selective_state_update": _updated}


@cache
def _computes(name: str, stock: Callable[..., Any]) -> bool:
    """Whether transformers' function of this name finds what ours does."""
    found = PROBES[name]
    return probe.same(probe.attempt(lambda: found(stock)), found(dict(OURS)["ssd"][name]).double())


def _tokens_first(x: Tensor) -> Tensor:
    """[batch, tokens, channels]: a view, but behind a cache that was put in front."""
    return x.mT if x.stride(1) == 1 else x.mT.contiguous()


def _refuse_packed(options: dict[str, Any]) -> None:
    for name in ("cu_seqlens", "cu_seq_lens_q", "seq_idx"):
        if options.get(name) is not None:
            raise argument_error(name, "None: transformers' convolution runs across sequences packed in one row", "a tensor")
