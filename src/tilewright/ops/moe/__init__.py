"""The experts of a mixture of experts: out[t] = sum over k of weights[t, k] * expert_e(x[t])

    e = ids[t, k]       expert_e(x) = down_e(act(gate_e(x), up_e(x)))
    act(gate, up) = gate * sigmoid(alpha * gate) * (up + up_offset), by default silu(gate) * up
                    with a limit of min(gate, limit) and of up between -limit and limit

gate_e, up_e and down_e are linear, with biases if these are given. For a single token also the sum
over shared experts, all of weight 1.

Source    Shazeer et al. 2017, arXiv:1701.06538, eq. 1, with the experts of SwiGLU
          (arXiv:2002.05202); 8-bit weights and activations after DeepSeek-V3 2024,
          arXiv:2412.19437, section 3.3; alpha, limit, up_offset and biases after gpt-oss 2025,
          arXiv:2508.10925. `moe_route` chooses the experts.
Numerics  Products and sums in fp32. Rounded to the dtype of x: act(gate, up) (for one token times
          its weight), and each expert's result (for one token only the sum). The sum over k is in
          fp32 and in the order of k, so equal calls give equal bits. 8-bit weights: where MMAs are
          what takes time, activations become codes with a scale for each 128 of a row; else the
          weights are widened, which is exact.
Bound     Few tokens: reading each chosen expert's weights once. Many: the products.

    one token             few tokens       many
    moe_one_up_kernel     moe_few_kernel   moe_count_kernel      tokens of each expert
                                           moe_permute_kernel    rows in the order of the experts
                                           moe_kernel            act(gate, up)
                                           moe_quantize_kernel   (8 bit)
    moe_one_down_kernel   moe_few_kernel   moe_kernel            down
                          moe_sum_kernel   moe_sum_kernel        over k
"""

from typing import Optional

import torch
import torch.nn.functional as F
from torch import Tensor

from ...launch import HALVES, Device, argument_error, check_tensor, out_or_new, torch_op
from ..common.expert_ids import check_choice, checked_activation, claims
from ..common.fp8 import GROUPS, dequantized, quantized
from ..common.routing import MOST_EXPERTS
from ..common.scaling import GROUP, Scaling, dequantize, scale_shapes
from .choices import CHOICES as CHOICES, space as space
from .decision import E4M3, Config as Config, Problem as Problem, plan as plan

MOST_TOKENS = (1 << 24) - 1  # blocks of a grid


def reference(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    weights: Tensor,
    ids: Tensor,
    scale_gate_up: Tensor | None = None,
    scale_down: Tensor | None = None,
    bias_gate_up: Tensor | None = None,
    bias_down: Tensor | None = None,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    shared_gate_up: Tensor | None = None,
    shared_down: Tensor | None = None,
) -> Tensor:
    """The definition, expert by expert. With scales the activations are quantised too, but in
    float64.
    """

    def product(a: Tensor, matrix: Tensor, scale: Tensor | None) -> Tensor:
        if scale is None:
            return a @ matrix.mT
        if a.dtype is not torch.float64:
            a = dequantized(*quantized(a.float(), GROUPS, E4M3, False), GROUPS).to(a.dtype)
        return (a.to(scale.dtype) @ dequantize(matrix, scale).mT).to(a.dtype)

    def own(values: Tensor | None, expert: int) -> Tensor | None:
        return None if values is None else values[expert]

    def act(gate: Tensor, up: Tensor) -> Tensor:
        if limit is not None:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (up + up_offset)

    gate_up = gate_up.flatten(1, 2) if gate_up.dim() == 4 else gate_up
    bias_gate_up = bias_gate_up.flatten(1, 2) if bias_gate_up is not None and bias_gate_up.dim() == 3 else bias_gate_up
    out = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    for expert in ids.unique().tolist():
        if 0 <= expert < len(down):
            token, slot = (ids == expert).nonzero(as_tuple=True)
            both = product(x[token], gate_up[expert], own(scale_gate_up, expert))
            both = both if bias_gate_up is None else both + bias_gate_up[expert]
            y = product(act(*both.chunk(2, -1)), down[expert], own(scale_down, expert))
            y = y if bias_down is None else y + bias_down[expert]
            out.index_add_(0, token, weights[token, slot, None] * y.to(out.dtype))
    if shared_gate_up is not None and shared_down is not None:
        for (gate_matrix, up_matrix), down_matrix in zip(shared_gate_up, shared_down, strict=True):
            out += (F.silu(x @ gate_matrix.mT) * (x @ up_matrix.mT)) @ down_matrix.mT
    return out.to(x.dtype)


def _scaling(scale: Tensor | None) -> Scaling:
    return Scaling.NONE if scale is None else Scaling.BLOCK if scale.dim() == 3 else Scaling.ROW


_GATE_UP, _DOWN = (tuple(f"{kind}{part}" for kind in ("", "scale_", "bias_", "shared_")) for part in ("gate_up", "down"))
_ARGUMENTS = ("x", "batch", "weights", "ids", *_GATE_UP, *_DOWN, "out")  # batch: x as a batch of one
DECISION = CHOICES.decision(Problem, plan, _ARGUMENTS)


@torch_op(mutates=("out",), claims=claims)
def moe_out(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weights: Tensor,
    ids: Tensor,
    scale_gate_up: Optional[Tensor],
    scale_down: Optional[Tensor],
    bias_gate_up: Optional[Tensor],
    bias_down: Optional[Tensor],
    shared_gate_up: Optional[Tensor],
    shared_down: Optional[Tensor],
    alpha: float,
    limit: Optional[float],
    up_offset: float,
    out: Tensor,
) -> None:
    """`moe` into `out`, with gate_up [experts, 2, inter, hidden], bias_gate_up [experts, 2, inter]
    and ids [tokens * top_k], all of any strides.

    No checks, no sync: safe under graph capture, and a replay follows new ids.
    """
    experts, hidden, inter = down.shape
    launches = DECISION.launches(
        Device.of(x),
        tokens=x.shape[0],
        top_k=weights.shape[1],
        experts=experts,
        hidden=hidden,
        inter=inter,
        dtype=x.dtype,
        scaling=_scaling(scale_down),
        shared=0 if shared_down is None else len(shared_down),
        bias=bias_down is not None,
        alpha=alpha,
        limit=limit or 0.0,
        up_offset=up_offset,
    )
    gate_ups = gate_up, _parts(scale_gate_up, 2), None if bias_gate_up is None else bias_gate_up[..., None], shared_gate_up
    biases, shared = (None if t is None else t[:, None] for t in (bias_down, shared_down))
    downs = down[:, None], _parts(scale_down, 1), None if biases is None else biases[..., None], shared
    launches.run(x, x[None], weights, ids, *gate_ups, *downs, out)


def _parts(scale: Tensor | None, parts: int) -> Tensor | None:
    """Scales as the kernels take them, [experts, parts, n groups or n, k groups or 1], without a
    copy.
    """
    return None if scale is None else (scale if scale.dim() == 3 else scale[..., None]).unflatten(1, (parts, -1))


def moe(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    weights: Tensor,
    ids: Tensor,
    scale_gate_up: Tensor | None = None,
    scale_down: Tensor | None = None,
    bias_gate_up: Tensor | None = None,
    bias_down: Tensor | None = None,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    shared_gate_up: Tensor | None = None,
    shared_down: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Sends each token through its experts and adds up their weighted results, without waiting for
    the device.

    Args:
        x: [tokens, hidden]; bf16 or fp16; stride 1 in the last axis.
        gate_up: [experts, 2 * inter, hidden], the gate's rows first, as Hugging Face stores it;
            dtype of x, or with scales float8_e4m3fn; stride 1 in the last axis. Or [experts, 2,
            inter, hidden] with any strides but the last: alternating rows are such a view. At most
            1024 experts.
        down: [experts, hidden, inter], likewise.
        weights: fp32 [tokens, top_k], top_k at most 64.
        ids: int32 or int64 [tokens, top_k]. An id outside of 0 to experts - 1 is another rank's
            expert: it adds nothing. Copied unless contiguous. `moe_route(first_expert=...)` counts
            ids from this rank's first expert.
        scale_gate_up: fp32, 8-bit weights only: [experts, 2 * inter] for the rows, or [experts, 2 *
            inter / 128, ceil(hidden / 128)] for blocks of 128 x 128, where inter must be a multiple
            of 128.
        scale_down: fp32, of the same kind: [experts, hidden] or [experts, ceil(hidden / 128), inter
            / 128].
        bias_gate_up: [experts, 2 * inter] or [experts, 2, inter], with the rows in the order of
            gate_up, dtype of x; added to their products. With three axes any strides.
        bias_down: [experts, hidden], dtype of x; both or neither.
        alpha: factor of the gate inside its sigmoid; positive.
        limit: positive; before the activation, gate is clamped to at most limit, and up to
            -limit..limit; a NaN stays. None for no bounds.
        up_offset: added to up.
        shared_gate_up: [shared, 2, inter, hidden], dtype of x, only for a single token, with no
            scales or biases and the default activation: experts that every token also passes
            through, with a weight of 1. Any strides but the last, so it may be a view of one MLP's
            matrix.
        shared_down: [shared, hidden, inter], likewise; both or neither.
        out: where the result goes: contiguous, shape, dtype and device of the result, no element in
            common with an input; default a new tensor.
    Returns: [tokens, hidden], dtype of x, contiguous; zero for a token whose ids name no expert.
        Empty without tokens, with nothing launched.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_tensor(x, "x", ndim=2, dtypes=HALVES)
    tokens, hidden = x.shape
    scaled = scale_gate_up is not None or scale_down is not None
    for name, matrix, scale in (("gate_up", gate_up, scale_gate_up), ("down", down, scale_down)):
        if not scaled and isinstance(matrix, Tensor) and matrix.dtype is E4M3:
            raise argument_error(f"scale_{name}", f"given for a {name} of float8_e4m3fn", scale)
        check_tensor(matrix, name, dtypes=(E4M3,) if scaled else (x.dtype,), like=x)
    check_tensor(down, "down", ndim=3)
    experts, _, inter = down.shape
    if not 1 <= experts <= MOST_EXPERTS:
        raise argument_error("down.shape[0]", f"1 to {MOST_EXPERTS}, the number of experts", experts)
    if down.shape[1] != hidden:
        raise argument_error("down.shape[1]", f"{hidden}, the hidden size of x", down.shape[1])
    if tokens > MOST_TOKENS:
        raise argument_error("x.shape[0]", f"at most {MOST_TOKENS} tokens", tokens)
    check_tensor(gate_up, "gate_up", shape=(experts, 2, inter, hidden) if gate_up.dim() == 4 else (experts, 2 * inter, hidden))
    check_choice(x, weights, ids)
    alpha, limit, up_offset = checked_activation(alpha, limit, up_offset)
    if bias_gate_up is not None or bias_down is not None:
        bias_gate_up = _check_biases(x, bias_gate_up, bias_down, experts, inter)
    if shared_gate_up is not None or shared_down is not None:
        _check_shared(x, shared_gate_up, shared_down, inter, scaled)
        if bias_down is not None or (alpha, limit, up_offset) != (1.0, None, 0.0):
            raise argument_error("bias_down, alpha, limit and up_offset", "left out with shared experts", (alpha, limit, up_offset))
    if scaled:
        _check_scales(x, scale_gate_up, scale_down, experts, inter)
    optional = (scale_gate_up, scale_down, bias_gate_up, bias_down, shared_gate_up, shared_down)
    out = out_or_new(out, (tokens, hidden), x.dtype, x, gate_up, down, weights, ids, *optional)
    if out.numel() == 0:
        return out
    if inter == 0:
        return out.zero_()
    # Not the method, a Python one: torch.compile cannot trace that under torch.set_default_device.
    gate_up = gate_up if gate_up.dim() == 4 else torch.unflatten(gate_up, 1, (2, inter))
    moe_out(x, gate_up, down, weights, ids.reshape(-1), *optional, alpha, limit, up_offset, out)
    return out


def _check_biases(x: Tensor, bias_gate_up: Tensor | None, bias_down: Tensor | None, experts: int, inter: int) -> Tensor:
    """bias_gate_up as [experts, 2, inter]."""
    if bias_gate_up is None or bias_down is None:
        raise argument_error("bias_gate_up" if bias_gate_up is None else "bias_down", "given together with the other bias", None)
    if inter == 0:
        raise argument_error("down.shape[2]", "at least 1 with biases", 0)
    check_tensor(bias_down, "bias_down", shape=(experts, x.shape[1]), like=x)
    if isinstance(bias_gate_up, Tensor) and bias_gate_up.dim() == 3:
        # Its last stride is free, so that it may be a view of biases that take turns; [..., None]
        # has an axis of its own to be checked.
        check_tensor(bias_gate_up, "bias_gate_up", shape=(experts, 2, inter), like=x, any_strides=True)
        return bias_gate_up
    check_tensor(bias_gate_up, "bias_gate_up", shape=(experts, 2 * inter), like=x)
    return torch.unflatten(bias_gate_up, 1, (2, inter))


def _check_shared(x: Tensor, shared_gate_up: Tensor | None, shared_down: Tensor | None, inter: int, scaled: bool) -> None:
    if shared_gate_up is None or shared_down is None:
        raise argument_error("shared_gate_up" if shared_gate_up is None else "shared_down", "given together with the other matrix", None)
    check_tensor(shared_down, "shared_down", ndim=3, like=x)
    tokens, hidden = x.shape
    if len(shared_down) == 0:
        raise argument_error("shared_down.shape[0]", "at least 1", 0)
    check_tensor(shared_down, "shared_down", shape=(len(shared_down), hidden, inter))
    check_tensor(shared_gate_up, "shared_gate_up", shape=(len(shared_down), 2, inter, hidden), like=x)
    if tokens > 1:
        raise argument_error("x.shape[0]", "1 with shared experts", tokens)
    if scaled:
        raise argument_error("shared_down", "None with 8-bit weights", tuple(shared_down.shape))


def _check_scales(x: Tensor, scale_gate_up: Tensor | None, scale_down: Tensor | None, experts: int, inter: int) -> None:
    hidden = x.shape[1]
    for name, scale in (("scale_gate_up", scale_gate_up), ("scale_down", scale_down)):
        if scale is None:
            raise argument_error(name, "given together with the other scale", None)
        check_tensor(scale, name, dtypes=(torch.float32,), any_strides=True, like=x)
    assert scale_gate_up is not None
    assert scale_down is not None
    scaling = Scaling.BLOCK if scale_gate_up.dim() == 3 else Scaling.ROW
    for name, scale, n, k in (("scale_gate_up", scale_gate_up, 2 * inter, hidden), ("scale_down", scale_down, hidden, inter)):
        shapes = {kind: scale_shapes(kind, 1, n, k, batch_a=1, batch_b=experts)[1] for kind in (Scaling.ROW, Scaling.BLOCK)}
        if tuple(scale.shape) != shapes[scaling]:
            known = f"{shapes[Scaling.ROW]} for rows or {shapes[Scaling.BLOCK]} for blocks, both scales alike"
            raise argument_error(f"{name}.shape", known, tuple(scale.shape))
    if scaling is Scaling.BLOCK and inter % GROUP:
        raise argument_error("down.shape[2]", f"a multiple of {GROUP} with scales of blocks", inter)
