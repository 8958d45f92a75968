"""The experts of a mixture of experts, with weights of 4 or 8 bits: `moe` on quantised weights.

    out[t] = sum over k of weights[t, k] * expert_e(x[t])        e = ids[t, k]
    expert_e(x) = down_e(act(gate_e(x), up_e(x)))                act as in `moe`

x and out are bf16; ops/common/weight_formats.py says what the words mean.

Source    As of `moe` and `quantized_matmul`; MXFP4 experts after gpt-oss 2025, arXiv:2508.10925.
Numerics  Products as in `quantized_matmul`. Rounded to bf16, or to pieces, which keep as much:
          act(gate, up). With many tokens each expert's result is rounded too. The sum over k is in
          fp32 and in the order of k, so equal calls give equal bits.
Bound     Few tokens: reading each chosen expert's words once. Many: the products, and decoding.

    few tokens                      many
    quantized_moe_pieces_kernel     moe_count_kernel      tokens of each expert
                                    moe_permute_kernel    rows in the order of the experts
    quantized_moe_few_kernel        quantized_moe_kernel  act(gate, up)
    quantized_moe_few_kernel        quantized_moe_kernel  down
    moe_sum_kernel                  moe_sum_kernel        over k

One token needs no lists: quantized_moe_row_kernel and quantized_moe_row_sum_kernel stand at the
ends. Launches between them read its ids before the launch before has ended.
"""

from typing import Optional

import torch
from torch import Tensor

from ...launch import Device, argument_error, check_tensor, out_or_new, torch_op
from ...launch.values import Claims
from ..common.expert_ids import check_choice, checked_activation, claims
from ..common.expert_weights import QuantizedExperts, check_format
from ..common.routing import MOST_EXPERTS
from ..common.weight_formats import INT4, check_k, format_named, scale_claims
from .candidates import CHOICES as CHOICES, DECISION as DECISION, space as space
from .decision import Config as Config, Problem as Problem, plan as plan

MOST_TOKENS = (1 << 24) - 1  # blocks of a grid


def reference(
    x: Tensor,
    words_gate_up: Tensor,
    words_down: Tensor,
    *,
    scales_gate_up: Tensor,
    scales_down: Tensor,
    weights: Tensor,
    ids: Tensor,
    zeros_gate_up: Tensor | None = None,
    zeros_down: Tensor | None = None,
    bias_gate_up: Tensor | None = None,
    bias_down: Tensor | None = None,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    weight_format: str,
) -> Tensor:
    """The definition, expert by expert, on the weights that the words stand for, rounded to the
    dtype of x.
    """
    gate_up = QuantizedExperts(weight_format, x.shape[1], words_gate_up, scales_gate_up, zeros_gate_up)
    down = QuantizedExperts(weight_format, scales_gate_up.shape[3], words_down, scales_down, zeros_down)
    out = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    for expert in ids.unique().tolist():
        if 0 <= expert < len(words_down):
            token, slot = (ids == expert).nonzero(as_tuple=True)
            gate, up = (x[token] @ gate_up.part(expert, i).dequantize(x.dtype).T for i in (0, 1))
            if bias_gate_up is not None:
                gate, up = gate + bias_gate_up[expert, 0], up + bias_gate_up[expert, 1]
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            y = (gate * torch.sigmoid(alpha * gate) * (up + up_offset)) @ down.part(expert, 0).dequantize(x.dtype).T
            y = y if bias_down is None else y + bias_down[expert]
            out.index_add_(0, token, weights[token, slot, None] * y.to(out.dtype))
    return out.to(x.dtype)


def _claims(ids: Tensor, scales_gate_up: Tensor, scales_down: Tensor) -> Claims:
    yield from claims(ids)
    yield from scale_claims(scales_gate_up=scales_gate_up, scales_down=scales_down)


@torch_op(mutates=("out",), claims=_claims)
def quantized_moe_out(
    x: Tensor,
    words_gate_up: Tensor,
    words_down: Tensor,
    scales_gate_up: Tensor,
    scales_down: Tensor,
    weights: Tensor,
    ids: Tensor,
    zeros_gate_up: Optional[Tensor],
    zeros_down: Optional[Tensor],
    bias_gate_up: Optional[Tensor],
    bias_down: Optional[Tensor],
    alpha: float,
    limit: Optional[float],
    up_offset: float,
    weight_format: str,
    out: Tensor,
) -> None:
    """`quantized_moe` into `out`, with ids [tokens * top_k].

    No checks, no sync: safe under graph capture, and a replay follows new ids.
    """
    sizes = {"tokens": x.shape[0], "top_k": weights.shape[1], "experts": len(words_down), "hidden": x.shape[1], "inter": scales_gate_up.shape[3]}
    how = {"bias": bias_down is not None, "alpha": alpha, "limit": limit or 0.0, "up_offset": up_offset, "dtype": x.dtype}
    launches = DECISION.launches(Device.of(x), **sizes, weight_format=weight_format, **how)

    def flat(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.flatten(0, 1)

    gate_ups = flat(words_gate_up), flat(scales_gate_up), flat(zeros_gate_up), bias_gate_up
    downs = flat(words_down), flat(scales_down), flat(zeros_down), None if bias_down is None else bias_down[:, None]
    launches.run(x, weights, ids, *gate_ups, *downs, out)


def quantized_moe(
    x: Tensor,
    words_gate_up: Tensor,
    words_down: Tensor,
    *,
    scales_gate_up: Tensor,
    scales_down: Tensor,
    weights: Tensor,
    ids: Tensor,
    zeros_gate_up: Tensor | None = None,
    zeros_down: Tensor | None = None,
    bias_gate_up: Tensor | None = None,
    bias_down: Tensor | None = None,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    weight_format: str,
    out: Tensor | None = None,
) -> Tensor:
    """Sends each token through its experts, whose weights have 4 or 8 bits, and adds up their
    weighted results, without waiting for the device.

    `QuantizedExperts` packs such weights: `quantized_moe(x, **gate_up.arguments("gate_up"),
    **down.arguments("down"), ...)`.

    Args:
        x: [tokens, hidden], bf16, stride 1 in the last axis.
        words_gate_up: int32 [experts, 2, panels, runs, 64, 16]; gate first. At most 1024 experts.
            Copied unless its first two axes can be folded into one; the same holds for scales and
            zero points.
        words_down: int32 [experts, 1, panels, runs, 64, 16], likewise.
        scales_gate_up: [experts, 2, groups of hidden, inter], in the dtype of the format; fp16 too
            for int4.
        scales_down: [experts, 1, groups of inter, hidden], likewise.
        weights: fp32 [tokens, top_k], top_k at most 64.
        ids: int32 or int64 [tokens, top_k]. An id outside of 0 to experts - 1 is another rank's
            expert: it adds nothing. Copied unless contiguous.
        zeros_gate_up, zeros_down: bf16, shaped like scales, for formats with zero points.
        bias_gate_up: bf16 [experts, 2, inter], of any strides; added to the products.
        bias_down: bf16 [experts, hidden]; both or neither.
        alpha: factor of the gate inside its sigmoid; positive.
        limit: positive; before the activation, gate is clamped to at most limit, and up to
            -limit..limit; a NaN stays. None for no bounds.
        up_offset: added to up.
        weight_format: as in `quantized_matmul`, except nvfp4.
        out: where the result goes: contiguous, shape, dtype and device of the result, no element in
            common with an input; default a new tensor.
    Returns: [tokens, hidden], bf16, contiguous; zero for a token whose ids name no expert. Empty
        without tokens, with nothing launched.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_tensor(x, "x", ndim=2, dtypes=(torch.bfloat16,))
    check_format(weight_format)
    tokens, hidden = x.shape
    check_tensor(words_down, "words_down", ndim=6, dtypes=(torch.int32,))
    check_tensor(scales_gate_up, "scales_gate_up", ndim=4)
    experts, inter = len(words_down), scales_gate_up.shape[3]
    if not 1 <= experts <= MOST_EXPERTS:
        raise argument_error("words_down.shape[0]", f"1 to {MOST_EXPERTS}, the number of experts", experts)
    if tokens > MOST_TOKENS:
        raise argument_error("x.shape[0]", f"at most {MOST_TOKENS} tokens", tokens)
    _check_experts("gate_up", (words_gate_up, scales_gate_up, zeros_gate_up), (experts, 2, inter, hidden), weight_format, x)
    _check_experts("down", (words_down, scales_down, zeros_down), (experts, 1, hidden, inter), weight_format, x)
    check_choice(x, weights, ids)
    alpha, limit, up_offset = checked_activation(alpha, limit, up_offset)
    if (bias_gate_up is None) != (bias_down is None):
        raise argument_error("bias_gate_up" if bias_gate_up is None else "bias_down", "given together with the other bias", None)
    if bias_gate_up is not None and bias_down is not None:
        check_tensor(bias_gate_up, "bias_gate_up", shape=(experts, 2, inter), like=x, any_strides=True)
        check_tensor(bias_down, "bias_down", shape=(experts, hidden), like=x)
    optional = (zeros_gate_up, zeros_down, bias_gate_up, bias_down)
    inputs = (x, words_gate_up, words_down, scales_gate_up, scales_down, weights, ids)
    out = out_or_new(out, (tokens, hidden), x.dtype, *inputs, *optional)
    if out.numel():
        quantized_moe_out(*inputs[:-1], ids.reshape(-1), *optional, alpha, limit, up_offset, weight_format, out)
    return out


def _check_experts(part: str, tensors: tuple[Tensor, Tensor, Tensor | None], sizes: tuple[int, int, int, int], name: str, x: Tensor) -> None:
    words, scales, zeros = tensors
    (experts, parts, n, k), of = sizes, format_named(name)
    check_k(k, of)
    shape_words, shape_scales = of.shapes(n, k)
    check_tensor(words, f"words_{part}", shape=(experts, parts, *shape_words), dtypes=(torch.int32,), like=x)
    scale_dtypes = (of.scale_dtype, torch.float16) if of.code == INT4 else (of.scale_dtype,)
    check_tensor(scales, f"scales_{part}", shape=(experts, parts, *shape_scales), dtypes=scale_dtypes, like=x)
    if (zeros is not None) != of.zeros:
        raise argument_error(f"zeros_{part}", f"{'given' if of.zeros else 'None'} for {name}", "None" if zeros is None else "a tensor")
    if zeros is not None:
        check_tensor(zeros, f"zeros_{part}", shape=(experts, parts, *shape_scales), dtypes=(torch.bfloat16,), like=x)
