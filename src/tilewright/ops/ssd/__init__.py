"""State space duality (Mamba-2, linear attention): a state per head that decays, is written and is
read once per token:

    dt <- softplus(dt + dt_bias)     S <- exp(dt a) S + dt x b^T     out = S c + d x

times silu(z) where a gate is given. Head h reads b and c of group h // (heads // groups).

Source    Dao and Gu 2024, arXiv:2405.21060 (eq. 1 and 2; the chunked form, section 6).
Numerics  The state is fp32, in and out, and so are all sums, and dt and its decays. Token after
          token nothing else is rounded but the result. Chunk after chunk (16 bits alone) the
          operands of products are rounded to the dtype: the state, dt x, and the products c b of
          a chunk times their decays. A decay inside a chunk is the exponential of a difference of
          sums of logarithms; no exponent is positive.
Bound     Memory, for a token the state, read and written once; for long prompts of few heads the
          chain of chunks.
"""

from itertools import pairwise
from math import inf
from typing import Any, Optional

import torch
from torch import Tensor

from ...launch import (
    FLOATS,
    Device,
    argument_error,
    check_apart,
    check_bools,
    check_number,
    check_tensor,
    check_writable,
    out_or_new,
    torch_op,
)
from ...launch.values import Claim, Claims, rising, within
from ..common.softmax_tiles import MAX_HEAD_DIM, check_int32, check_starts
from .decision import CHOICES as CHOICES, Config as Config, Problem as Problem, plan as plan, space as space


def reference(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    c: Tensor,
    d: Tensor | None = None,
    dt_bias: Tensor | None = None,
    z: Tensor | None = None,
    state: Tensor | None = None,
    state_rows: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, inf),
) -> Tensor | tuple[Tensor, Tensor]:
    """The definition, not in place, token after token.

    In 16 bits what is multiplied is rounded, as tensor cores take it; the sums are not.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    if cu_seqlens is not None or state_rows is not None:
        parts = [slice(i, i + 1) for i in range(len(x))] if cu_seqlens is None else [slice(*ends) for ends in pairwise(cu_seqlens.tolist())]
        out, final = torch.zeros_like(x), None if state is None else state.to(wide)
        for i, part in enumerate(parts):
            one = {"x": x, "dt": dt, "b": b, "c": c} | ({} if z is None else {"z": z})
            one = {name: value[part] if cu_seqlens is None else value[None, part] for name, value in one.items()}
            at = i if state_rows is None else int(state_rows[i])
            own = None if final is None else final[at : at + 1]
            found: Any = reference(**one, a=a, d=d, dt_bias=dt_bias, state=own, dt_softplus=dt_softplus, dt_limit=dt_limit)
            if final is not None:
                final = final.index_put((torch.tensor([at]),), found[1])
            out[part] = (found if final is None else found[0]).view_as(out[part])
        return out if final is None else (out, final)

    def operand(value: Tensor) -> Tensor:
        return value.to(x.dtype).to(wide)

    def of_heads(value: Tensor) -> Tensor:
        return value.to(wide).repeat_interleave(x.shape[2] // value.shape[2], 2)

    step = dt.to(wide) if dt_bias is None else dt.to(wide) + dt_bias.to(wide)
    step = (torch.nn.functional.softplus(step) if dt_softplus else step).clamp(*dt_limit)
    keys, queries, rows = of_heads(b), of_heads(c), x.to(wide)
    s = torch.zeros(len(x), *x.shape[2:], b.shape[-1], dtype=wide, device=x.device) if state is None else state.to(wide)
    out = torch.zeros_like(rows)
    for t in range(x.shape[1]):
        s = s * (step[:, t] * a.to(wide)).exp()[..., None, None] + operand(step[:, t, :, None] * rows[:, t])[..., None] * keys[:, t, :, None]
        out[:, t] = (operand(s) * queries[:, t, :, None]).sum(-1)
    out = out if d is None else out + d.to(wide)[:, None] * rows
    out = (out if z is None else out * torch.nn.functional.silu(z.to(wide))).to(x.dtype)
    return out if state is None else (out, s)


ARGUMENTS = ("x", "dt", "a", "b", "c", "d", "dt_bias", "z", "state", "state_rows", "out", "cu_seqlens", "dt_min", "dt_max")
DECISION = CHOICES.decision(Problem, plan, ARGUMENTS)


def _claims(x: Tensor, a: Tensor, state: Tensor | None, state_rows: Tensor | None, cu_seqlens: Tensor | None) -> Claims:
    yield Claim("a", a, a <= 0, "at most 0")
    if state is not None:
        yield from within("state_rows", state_rows, 0, len(state) - 1)
    if state_rows is not None:
        earlier = (state_rows[:, None] == state_rows).tril(-1).any(1)
        yield Claim("state_rows", state_rows, ~earlier, "a row that no sequence before it has")
    yield from rising("cu_seqlens", cu_seqlens, x.shape[0])


@torch_op(mutates=("state", "out"), claims=_claims)
def ssd_out(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Optional[Tensor],
    dt_bias: Optional[Tensor],
    z: Optional[Tensor],
    state: Optional[Tensor],
    state_rows: Optional[Tensor],
    cu_seqlens: Optional[Tensor],
    dt_softplus: bool,
    dt_min: float,
    dt_max: float,
    out: Tensor,
) -> None:
    """`ssd` into `out`, and `state` in place.

    No checks, no sync: safe under graph capture.
    """
    if cu_seqlens is not None:
        x, dt, b, c, out = (value.unsqueeze(0) for value in (x, dt, b, c, out))
        z = None if z is None else z.unsqueeze(0)
    batch, tokens, heads, head_dim = x.shape
    launches = DECISION.launches(
        Device.of(x),
        batch=batch if cu_seqlens is None else cu_seqlens.shape[0] - 1,
        heads=heads,
        groups=b.shape[2],
        tokens=tokens,
        head_dim=head_dim,
        state_dim=b.shape[3],
        dtype=x.dtype,
        has_state=state is not None,
        has_rows=state_rows is not None,
        varlen=cu_seqlens is not None,
        skip=d is not None,
        bias=dt_bias is not None,
        gate=z is not None,
        softplus=dt_softplus,
    )
    launches.run(x, dt, a, b, c, d, dt_bias, z, state, state_rows, out, cu_seqlens, dt_min, dt_max)


def ssd(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    c: Tensor,
    d: Tensor | None = None,
    dt_bias: Tensor | None = None,
    z: Tensor | None = None,
    state: Tensor | None = None,
    state_rows: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, inf),
    out: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The state space of Mamba-2: a prompt, or the next tokens of each sequence.

    Args:
        x: [batch, tokens, heads, head_dim]; bf16, fp16 or fp32; head_dim 1..256; any strides with
            stride 1 in the last axis.
        dt: [batch, tokens, heads], fp32 or the dtype of x, any strides: the time step of a token.
        a: [heads], likewise, at most 0: exp(dt a) is the share of the state that a token keeps.
        b: [batch, tokens, groups, state_dim], dtype and device of x, likewise strided; groups
            divides heads, state_dim 1..256. What a token writes is dt x b^T.
        c: shape, dtype and device of b: with it the state is read.
        d: [heads], as a: adds d x to the result.
        dt_bias: [heads], as a: added to dt.
        z: shape, dtype and device of x: silu(z) multiplies the result.
        state: [batch, heads, head_dim, state_dim] fp32, stride 1 in the last axis. The initial
            state, overwritten with the final one. Default: starts with zeros and is not kept.
        state_rows: [sequences] int32: which row of `state` is each sequence's, no row twice;
            `state` may then have any number of rows.
        cu_seqlens: [sequences + 1] int32, where each sequence begins and the last one ends. With it
            x, dt, b, c and z are [total_tokens, ...], and state has a row for each sequence.
        dt_softplus: dt is softplus(dt + dt_bias).
        dt_limit: least and largest dt, after that. A NaN stays.
        out: where the result goes: of its shape, dtype and device, its axes in any order in
            memory; default a new tensor.
    Returns: out, shaped like x, contiguous, in its dtype; with a state the tuple (out, state), the
        latter the tensor that it was given.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_bools(dt_softplus=dt_softplus)
    varlen = cu_seqlens is not None
    check_tensor(x, "x", ndim=3 if varlen else 4, dtypes=FLOATS)
    *rows, heads, head_dim = x.shape
    check_tensor(b, "b", ndim=x.dim(), like=x)
    for name, size in (("x", head_dim), ("b", b.shape[-1])):
        if not 1 <= size <= MAX_HEAD_DIM:
            raise argument_error(f"{name}.shape[-1]", f"in 1..{MAX_HEAD_DIM}", size)
    if list(b.shape[:-2]) != rows:
        raise argument_error("b.shape", (*rows, "groups", "state_dim"), tuple(b.shape))
    groups, state_dim = b.shape[-2:]
    if not groups or heads % groups:
        raise argument_error("b.shape[-2]", f"a divisor of the {heads} heads of x", groups)
    check_tensor(c, "c", shape=b.shape, like=x)
    if z is not None:
        check_tensor(z, "z", shape=x.shape, like=x)
    floats = tuple(dict.fromkeys((torch.float32, x.dtype)))
    for name, gate, shape in (("dt", dt, x.shape[:-1]), ("a", a, (heads,)), ("d", d, (heads,)), ("dt_bias", dt_bias, (heads,))):
        if gate is not None or name in ("dt", "a"):
            check_tensor(gate, name, shape=shape, dtypes=floats, like=x, any_strides=True)  # type: ignore[arg-type]
    sequences = x.shape[0] if cu_seqlens is None else check_starts(cu_seqlens, "cu_seqlens", x)
    if state_rows is not None:
        check_int32(state_rows, "state_rows", x, (sequences,))
        if state is None:
            raise argument_error("state_rows", "given with a state", "none")
    if state is not None:
        check_tensor(state, "state", ndim=4, dtypes=(torch.float32,), like=x)
        states = sequences if state_rows is None else state.shape[0]
        check_tensor(state, "state", shape=(states, heads, head_dim, state_dim), dtypes=(torch.float32,))
        check_writable(state, "state")
        check_apart({"state": state}, x=x, dt=dt, a=a, b=b, c=c, d=d, dt_bias=dt_bias, z=z, state_rows=state_rows, cu_seqlens=cu_seqlens)
    if isinstance(dt_limit, (tuple, list)):
        for value in dt_limit:
            check_number(value, "dt_limit")
    if not isinstance(dt_limit, (tuple, list)) or len(dt_limit) != 2 or not 0 <= dt_limit[0] <= dt_limit[1]:
        raise argument_error("dt_limit", "(least, largest) with 0 <= least <= largest", dt_limit)
    out = out_or_new(out, x.shape, x.dtype, x, dt, a, b, c, d, dt_bias, z, state, state_rows, cu_seqlens, contiguous=False)
    if out.numel() and sequences:
        ssd_out(x, dt, a, b, c, d, dt_bias, z, state, state_rows, cu_seqlens, dt_softplus, *dt_limit, out)
    return out if state is None else (out, state)
