"""Peers of the linear attention ops: compositions of plain torch, and flash-linear-attention."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .inputs import Inputs, Result, kept, without
from .library_calls import module

CHUNK = 64
SSD_CHUNK = 256  # of mamba_ssm


def one_token(inputs: Inputs) -> bool:
    """Of each sequence."""
    tokens = inputs["x"].shape[1] if "x" in inputs else inputs["v"].shape[2]
    return tokens == 1 and without("cu_seqlens")(inputs)


def prompts(inputs: Inputs) -> bool:
    """Several tokens of each sequence."""
    return not one_token(inputs) and without("cu_seqlens")(inputs)


def one_decay(inputs: Inputs) -> bool:
    """For each token, not for each column."""
    return bool(inputs["g"].dim() < inputs["k"].dim())


def _rows(q: Tensor, k: Tensor, v: Tensor, scale: float | None, normalize: bool) -> tuple[Tensor, Tensor]:
    """q and k as fp32, of each head of v."""
    q, k = ((x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) if normalize else x) for x in (q.float(), k.float()))
    group = v.shape[1] // k.shape[1]
    return (q * (q.shape[-1] ** -0.5 if scale is None else scale)).repeat_interleave(group, 1), k.repeat_interleave(group, 1)


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    beta: Tensor,
    state: Tensor | None = None,
    scale: float | None = None,
    normalize: bool = True,
) -> Result:
    """One token of each sequence, the state in place."""
    q, k = (x[:, :, 0] for x in _rows(q, k, v, scale, normalize))
    s = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1], dtype=torch.float32) if state is None else state
    s = s * g[:, :, 0].reshape(*v.shape[:2], -1, 1).exp()
    delta = (v[:, :, 0] - (s * k[..., None]).sum(-2)) * beta[:, :, 0, None]
    s = s + k[..., None] * delta[:, :, None]
    out = (s * q[..., None]).sum(-2)[:, :, None].to(v.dtype)
    return out if state is None else (out, state.copy_(s))


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    beta: Tensor,
    state: Tensor | None = None,
    scale: float | None = None,
    normalize: bool = True,
) -> Result:
    """Prompts of one length, in chunks, by a triangular solve; fp32 as transformers has it."""
    tokens, (q, k) = v.shape[2], _rows(q, k, v, scale, normalize)
    pad = -tokens % CHUNK
    q, k, wide = (F.pad(x.float(), (0, 0, 0, pad)).unflatten(2, (-1, CHUNK)) for x in (q, k, v))
    decay, rate = (F.pad(x.float(), (0, pad)).unflatten(2, (-1, CHUNK)) for x in (g, beta))
    decay = decay.cumsum(-1)
    between = (decay[..., None] - decay[..., None, :]).masked_fill(q.new_ones(CHUNK, CHUNK).triu(1).bool(), -torch.inf).exp()
    square = (k * rate[..., None] @ k.mT) * between
    both = torch.cat((wide * rate[..., None], k * (rate * decay.exp())[..., None]), -1)
    solved = torch.linalg.solve_triangular(square, both, upper=False, unitriangular=True)
    values, seen = solved.split((v.shape[-1], k.shape[-1]), -1)
    inside, q = (q @ k.mT) * between, q * decay.exp()[..., None]
    k = k * (decay[..., -1:] - decay).exp()[..., None]
    s = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1], dtype=torch.float32) if state is None else state
    out = torch.empty_like(wide)
    for i in range(out.shape[2]):
        new = values[:, :, i] - seen[:, :, i] @ s
        out[:, :, i] = q[:, :, i] @ s + inside[:, :, i] @ new
        s = s * decay[:, :, i, -1, None, None].exp() + k[:, :, i].mT @ new
    found = out.flatten(2, 3)[:, :, :tokens].to(v.dtype)
    return found if state is None else (found, state.copy_(s))


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, state: Tensor | None = None, silu: bool = True) -> Result:
    before = x.new_zeros(len(x), weight.shape[1] - 1, x.shape[2]) if state is None else state
    seen = torch.cat((before, x), 1)
    y = F.conv1d(seen[:, before.shape[1] - weight.shape[1] + 1 :].mT, weight[:, None], bias, groups=len(weight)).mT
    y = F.silu(y) if silu else y
    return y if state is None else (y, state.copy_(seen[:, x.shape[1] :]))


@kept
def _long(x: Tensor) -> Tensor:
    return x.long()


def fla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, *, beta: Tensor, state: Tensor | None = None, cu_seqlens: Tensor | None = None, **options: Any
) -> Any:
    """flash-linear-attention, whose axes are [batch, tokens, heads, ...]; the final state is a new
    tensor.
    """
    name = "kda" if g.dim() == k.dim() else "gated_delta_rule"
    ops = module(f"fla.ops.{name}")
    one = cu_seqlens is None and v.shape[2] == 1
    rows = [x[None] if cu_seqlens is not None else x.transpose(1, 2) for x in (q, k, v, g, beta)]
    found = getattr(ops, f"fused_recurrent_{name}" if one else f"chunk_{name}")(
        *rows,
        scale=options.get("scale"),
        initial_state=state,
        output_final_state=state is not None,
        use_qk_l2norm_in_kernel=options.get("normalize", True),
        cu_seqlens=None if cu_seqlens is None else _long(cu_seqlens),
    )
    out = found[0][0] if cu_seqlens is not None else found[0].transpose(1, 2)
    return out if state is None else (out, found[1])


def _ssd_rows(inputs: Inputs) -> tuple[Tensor, ...]:
    """x, dt, b and c in fp32, the latter two of each head."""
    dt = inputs["dt"].float() if inputs.get("dt_bias") is None else inputs["dt"].float() + inputs["dt_bias"]
    dt = F.softplus(dt) if inputs["dt_softplus"] else dt
    group = inputs["x"].shape[2] // inputs["b"].shape[2]
    return inputs["x"].float(), dt, *(inputs[name].float().repeat_interleave(group, 2) for name in "bc")


def _ssd_out(out: Tensor, inputs: Inputs) -> Tensor:
    out = out if inputs.get("d") is None else out + inputs["d"][:, None] * inputs["x"]
    return (out if inputs.get("z") is None else out * F.silu(inputs["z"].float())).to(inputs["x"].dtype)


def ssd_one(**inputs: Any) -> Result:
    """One token of each sequence, the state in place."""
    x, dt, b, c = (y[:, 0] for y in _ssd_rows(inputs))
    state = inputs.get("state")
    s = x.new_zeros(*x.shape, b.shape[-1]) if state is None else state
    s = s * (dt * inputs["a"]).exp()[..., None, None] + (dt[..., None] * x)[..., None] * b[:, :, None]
    out = _ssd_out((s @ c[..., None])[..., 0][:, None], inputs)
    return out if state is None else (out, state.copy_(s))


def ssd_chunked(**inputs: Any) -> Result:
    """Prompts of one length, in chunks, in fp32."""
    tokens, state, padded = inputs["x"].shape[1], inputs.get("state"), -inputs["x"].shape[1] % CHUNK
    x, dt, b, c = (F.pad(y.transpose(1, 2), (0, 0) * (y.dim() - 3) + (0, padded)).unflatten(2, (-1, CHUNK)) for y in _ssd_rows(inputs))
    decay = (dt * inputs["a"][:, None, None]).cumsum(-1)
    between = (decay[..., None] - decay[..., None, :]).masked_fill(x.new_ones(CHUNK, CHUNK).triu(1).bool(), -torch.inf).exp()
    out = ((c @ b.mT) * between * dt[..., None, :]) @ x
    added = b.mT @ (x * (dt * (decay[..., -1:] - decay).exp())[..., None])
    s = x.new_zeros(*added.shape[:2], *added.shape[3:]) if state is None else state.mT
    c = c * decay.exp()[..., None]
    for i in range(out.shape[2]):
        out[:, :, i] += c[:, :, i] @ s
        s = s * decay[:, :, i, -1, None, None].exp() + added[:, :, i]
    found = _ssd_out(out.flatten(2, 3)[:, :, :tokens].transpose(1, 2), inputs)
    return found if state is None else (found, state.copy_(s.mT))


def mamba_ssm(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, *, c: Tensor, state: Tensor | None = None, **options: Any) -> Any:
    """Its kernels; the final state of a prompt is a new tensor."""
    d, bias, z = (options.get(name) for name in ("d", "dt_bias", "z"))
    given: Any = {"dt_softplus": options["dt_softplus"]}
    if state is not None and x.shape[1] == 1:
        size, gate = x.shape[-1], None if z is None else z[:, 0]
        step, skip, shift = (y if y is None else y[..., None].expand(*y.shape, size) for y in (dt[:, 0], d, bias))
        a = a[:, None, None].expand(-1, size, b.shape[-1])
        update = module("mamba_ssm.ops.triton.selective_state_update").selective_state_update
        return update(state, x[:, 0], step, a, b[:, 0], c[:, 0], D=skip, z=gate, dt_bias=shift, **given)[:, None], state
    scan = module("mamba_ssm.ops.triton.ssd_combined").mamba_chunk_scan_combined
    return scan(x, dt, a, b, c, SSD_CHUNK, D=d, z=z, dt_bias=bias, initial_states=state, return_final_states=state is not None, **given)
