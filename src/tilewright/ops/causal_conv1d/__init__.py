"""Causal convolution of each channel over time: out[t] = silu(bias + sum_i weight[i] x[t - width +
1 + i])

In front of a sequence stand the inputs that its state keeps, or zeros. The state then keeps the
last inputs.

Source    The short convolution of Mamba (Gu and Dao 2023, arXiv:2312.00752).
Numerics  Sums and silu in fp32, rounded once. States are copied.
Bound     Memory: x read once, out written once; of one token also the state, read and written.
"""

from itertools import pairwise
from typing import Optional

import torch
from torch import Tensor

from ...launch import (
    FLOATS,
    Device,
    argument_error,
    as_rows,
    check_apart,
    check_bools,
    check_tensor,
    check_writable,
    out_or_new,
    torch_op,
)
from ...launch.values import Claims, rising
from ..common.softmax_tiles import check_starts
from .decision import CHOICES as CHOICES, DECISION as DECISION, Config as Config, Problem as Problem, plan as plan, space as space

WIDEST = 8  # inputs of a result


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    silu: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """The definition, not in place, with the roundings of torch's convolution."""
    if cu_seqlens is not None:
        starts = cu_seqlens.tolist()
        out, final = torch.zeros_like(x), None if state is None else state.clone()
        for i, (a, b) in enumerate(pairwise(starts)):
            own = reference(x[None, a:b], weight, bias, state=None if state is None else state[i : i + 1], silu=silu)
            if final is not None:
                final[i] = own[1][0]
            out[a:b] = (own if state is None else own[0])[0]
        return out if final is None else (out, final)
    width, taps = weight.shape[1], 0 if state is None else state.shape[1]
    before = x.new_zeros(len(x), width - 1, x.shape[2]) if state is None else state[:, taps - width + 1 :]
    seen = torch.cat((before, x), 1)
    y = torch.nn.functional.conv1d(seen.mT, weight[:, None], bias, groups=len(weight)).mT if x.shape[1] else x
    y = torch.nn.functional.silu(y) if silu else y
    return y if state is None else (y, torch.cat((state, x), 1)[:, x.shape[1] :].clone())


def _claims(x: Tensor, cu_seqlens: Tensor | None) -> Claims:
    yield from rising("cu_seqlens", cu_seqlens, x.shape[0])


@torch_op(mutates=("state", "out"), claims=_claims)
def causal_conv1d_out(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    state: Optional[Tensor],
    cu_seqlens: Optional[Tensor],
    batch: int,
    silu: bool,
    out: Tensor,
) -> None:
    """`causal_conv1d` of x [all tokens, channels], `batch` sequences, into `out`; `state` in place.

    No checks, no sync: safe under graph capture.
    """
    rows, channels = x.shape
    tokens = rows if cu_seqlens is not None else rows // batch
    launches = DECISION.launches(
        Device.of(x),
        batch=batch,
        tokens=tokens,
        channels=channels,
        dtype=x.dtype,
        width=weight.shape[1],
        taps=0 if state is None else state.shape[1],
        bias=bias is not None,
        silu=silu,
        varlen=cu_seqlens is not None,
    )
    launches.run(x, weight.reshape(-1), bias, state, out, cu_seqlens, tokens)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    silu: bool = True,
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal convolution of each channel with its own weights, over a prompt or the next tokens.

    Args:
        x: [batch, tokens, channels]; bf16, fp16 or fp32; stride 1 in the last axis. Copied if its
            leading axes do not fold into one.
        weight: [channels, width], dtype and device of x; width 2..8; the last weight belongs to the
            token itself. Copied unless contiguous.
        bias: [channels], likewise; added before the activation.
        state: [batch, taps, channels], likewise, taps from width - 1 to 8, any strides: the inputs
            before these tokens, the newest last. Overwritten with the last inputs so far. Default:
            zeros, and nothing is kept.
        cu_seqlens: [sequences + 1] int32, where each sequence begins and the last one ends. With it
            x is [total_tokens, channels], and state holds one for each sequence.
        silu: apply silu to the result.
        out: where the result goes: contiguous, shape, dtype and device of x, no element in common
            with an input; default a new tensor.
    Returns: a contiguous tensor shaped like x; with a state the tuple (that, state), the latter the
        tensor that it was given.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_bools(silu=silu)
    check_tensor(x, "x", ndim=3 if cu_seqlens is None else 2, dtypes=FLOATS)
    check_tensor(weight, "weight", like=x)
    if weight.dim() != 2 or weight.shape[0] != (channels := x.shape[-1]) or not 2 <= weight.shape[1] <= WIDEST:
        mend = "give a Conv1d's weight[:, 0]" if weight.dim() == 3 else "channels are the last axis of x"
        raise argument_error("weight.shape", f"({x.shape[-1]}, 2..{WIDEST})", f"{tuple(weight.shape)}: {mend}")
    if bias is not None:
        check_tensor(bias, "bias", shape=(channels,), like=x)
    batch = x.shape[0] if cu_seqlens is None else check_starts(cu_seqlens, "cu_seqlens", x)
    if state is not None:
        _check_state(state, x, batch, weight.shape[1])
        check_apart({"state": state}, x=x, weight=weight, bias=bias, cu_seqlens=cu_seqlens)
    out = out_or_new(out, x.shape, x.dtype, x, weight, bias, state, cu_seqlens)
    if out.numel() and batch:
        causal_conv1d_out(as_rows(x), weight, bias, state, cu_seqlens, batch, silu, as_rows(out))
    return out if state is None else (out, state)


def _check_state(state: Tensor, x: Tensor, batch: int, width: int) -> None:
    """Raises TypeError or ValueError unless it keeps what the weights see; any strides."""
    fits = isinstance(state, Tensor) and state.dim() == 3 and width - 1 <= state.shape[1] <= WIDEST
    check_tensor(state, "state", shape=(batch, state.shape[1] if fits else width - 1, x.shape[-1]), like=x, any_strides=True)
    check_writable(state, "state")
