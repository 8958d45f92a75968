"""What products and ops of rows mean."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

Results = list[Tensor]
DEFINITIONS: dict[str, Callable[..., Results]] = {}
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FEW_ROWS = 16


def defines(function: Callable[..., Results]) -> Callable[..., Results]:
    DEFINITIONS[function.__name__] = function
    return function


def wide(x: Tensor) -> Tensor:
    """At least fp32."""
    return x.double() if x.dtype is torch.float64 else x.float()


# ------------------------------------------------------------------------------- rows and elements
def normed(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, round_before_weight: bool = False) -> Tensor:
    y = wide(x) / (wide(x).square().mean(-1, keepdim=True) + eps).sqrt()
    y = wide(y.to(x.dtype)) if round_before_weight else y
    return y if weight is None else y * (wide(weight) + offset)


@defines
def adjust_logits(logits: Tensor, counts: Any, *, repetition: Any, presence: Any, frequency: Any, bias: Any, mask: Any) -> Results:
    """Column by column of what each token has had."""
    y = logits if logits.dtype is torch.float64 else logits.float()
    if counts is not None:
        met, times = counts != 0, torch.where(counts < 0, counts.long() + 2**31, counts.long()).to(y.dtype)
        if repetition is not None:
            y = y * torch.where(met, torch.where(y > 0, 1 / repetition[:, None].to(y.dtype), repetition[:, None].to(y.dtype)), 1)
        y = y if presence is None else y - times.clamp(max=1) * presence[:, None].to(y.dtype)
        y = y if frequency is None else y - times * frequency[:, None].to(y.dtype)
    y = y if bias is None else y + bias
    if mask is not None:
        column = torch.arange(y.shape[1], device=y.device)
        allowed = (mask.long()[:, column // 32] & 2**32 - 1) // 2 ** (column % 32) % 2 == 1
        y = y.masked_fill(~allowed, -torch.inf)
    return [y]


@defines
def rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0, round_before_weight: bool = False, residual: Any = None) -> Results:
    total = x if residual is None else x + residual
    out = normed(total, weight, eps, weight_offset, round_before_weight).to(x.dtype)
    return [out] if residual is None else [out, total]


@defines
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Results:
    centred = wide(x) - wide(x).mean(-1, keepdim=True)
    y = centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt()
    y = y if weight is None else y * wide(weight)
    return [(y if bias is None else y + wide(bias)).to(x.dtype)]


@defines
def softmax(x: Tensor) -> Results:
    powers = (wide(x) - wide(x).amax(-1, keepdim=True)).exp()
    return [(powers / powers.sum(-1, keepdim=True)).to(x.dtype)]


def activated(gate: Tensor, gelu_tanh: bool) -> Tensor:
    g = wide(gate)
    if gelu_tanh:
        return 0.5 * g * (1 + (math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)).tanh())
    return g / (1 + (-g).exp())


@defines
def silu_mul(gate: Tensor, up: Tensor | None = None, gelu_tanh: bool = False) -> Results:
    if up is None:
        gate, up = gate.chunk(2, -1)
    return [activated(gate, gelu_tanh).to(gate.dtype) * up]


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """cos, sin: broadcast against x but for its last axis."""
    half = cos.shape[-1]
    first = torch.arange(half, device=x.device) * (2 if interleaved else 1)
    second = first + (1 if interleaved else half)
    a, b, y = wide(x[..., first]), wide(x[..., second]), x.clone()
    y[..., first], y[..., second] = (a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype)
    return y


@defines
def rope(q: Tensor, k: Tensor, cos: Any = None, sin: Any = None, positions: Any = None, inv_freq: Any = None, interleaved: bool = False) -> Results:
    if positions is not None:
        angle = positions[..., None].to(inv_freq.dtype) * inv_freq
        cos, sin = angle.cos(), angle.sin()
    return [rotated(x, cos[:, None], sin[:, None], interleaved) for x in (q, k)]


@defines
def embedding(ids: Tensor, weight: Tensor, scale: float = 1.0) -> Results:
    known = (ids >= 0) & (ids < len(weight))
    return [torch.where(known[..., None], weight[ids.clamp(0, len(weight) - 1).long()] * scale, torch.nan)]


@defines
def argmax(x: Tensor) -> Results:
    position = torch.arange(x.shape[-1], device=x.device)
    return [torch.where(x == x.amax(-1, keepdim=True), position, x.shape[-1]).amin(-1)]


@defines
def merge_states(states: Tensor, states_lse: Tensor, base2: bool = False) -> Results:
    base = math.log(2) if base2 else 1.0
    logs = wide(states_lse) * base if states.dtype is not torch.float64 else states_lse.double() * base
    total = logs.logsumexp(0)
    share = (logs - total).exp().nan_to_num(0.0)[..., None]
    values = torch.where(share == 0, 0.0, wide(states))
    return [(share * values).sum(0).to(states.dtype), total / base]


def philox(counter: list[Tensor], key: list[Tensor]) -> list[Tensor]:
    """Philox4x32-10 on int64 tensors that hold 32-bit words (Salmon et al. 2011)."""
    low = 0xFFFFFFFF
    for _ in range(10):
        products = [(counter[i], m) for i, m in ((0, 0xD2511F53), (2, 0xCD9E8D57))]
        halves = [((a >> 16) * m, (a & 0xFFFF) * m) for a, m in products]  # no product of 64 bits
        words = [(((h + (t >> 16)) >> 16) & low, (((h << 16) & low) + t) & low) for h, t in halves]
        (high0, low0), (high1, low1) = words
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    return counter


@defines
def dropout(x: Tensor, p: float, seed: Tensor, offset: Tensor | None = None) -> Results:
    index = torch.arange(x.numel(), device=x.device)
    counter = index // 4 + (0 if offset is None else offset)
    nothing, low = torch.zeros_like(counter), 0xFFFFFFFF
    words = philox([counter & low, (counter >> 32) & low, nothing, nothing], [seed & low, (seed >> 32) & low])
    word = torch.stack(words, -1).gather(-1, (index % 4)[:, None])[:, 0].view(x.shape)
    return [torch.where(word >= p * 2.0**32, wide(x) * (1 / (1 - p) if p < 1 else 0.0), 0.0).to(x.dtype)]


# ----------------------------------------------------------------------------------- 8-bit numbers
def spread(scale: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A scale for each element of a matrix, or of a batch of them."""
    if scale.dim() <= max(0, len(shape) - 2):
        return scale[..., None, None]
    if scale.dim() == len(shape) - 1:
        return scale[..., None]
    scale = scale.repeat_interleave(128, -1)[..., : shape[-1]]
    return scale if scale.shape[-2] == shape[-2] else scale.repeat_interleave(128, -2)[..., : shape[-2], :]


def values_of(codes: Tensor, scale: Tensor | None, exact: bool) -> Tensor:
    if scale is None:
        return codes.double() if exact else codes if codes.dtype not in FP8 else codes.float()
    return (codes.double() * spread(scale, tuple(codes.shape)).double()).to(torch.float64 if exact else torch.float32)


def coded(y: Tensor, block: tuple[int | None, int | None], dtype: torch.dtype, power_of_two_scales: bool, given: Tensor | None = None) -> Results:
    """Values as the codes hold them (in float64 unrounded), and scales."""
    largest = torch.finfo(dtype).max
    rows, cols = y.shape
    high, across = block[0] or rows, block[1] or cols
    padded = torch.nn.functional.pad(y, (0, -cols % across, 0, -rows % high))
    groups = padded.view(padded.shape[0] // high, high, -1, across)
    scale = groups.abs().amax((1, 3)).clamp(min=largest * 2.0**-126) / largest if given is None else given.to(y.dtype).view(1, 1)
    if power_of_two_scales and given is None:
        scale = scale.log2().sub(1e-12 if y.dtype is torch.float64 else 0).ceil().exp2()
    each = scale[:, None, :, None]
    codes = (groups / each).clamp(-largest, largest)
    held = ((codes if y.dtype is torch.float64 else codes.to(dtype).to(y.dtype)) * each).reshape(padded.shape)[:rows, :cols]
    return [held, scale]


@defines
def quantize_fp8(x: Tensor, block: Any, dtype: torch.dtype, power_of_two_scales: bool = False, scale: Tensor | None = None) -> Results:
    return coded(wide(x), block, dtype, power_of_two_scales, scale)


@defines
def rms_norm_quant(
    x: Tensor, weight: Tensor, eps: float, block: Any, dtype: torch.dtype, power_of_two_scales: bool, residual: Any, **norm: Any
) -> Results:
    total = x if residual is None else x + residual
    y = normed(total, weight, eps, norm["weight_offset"], norm["round_before_weight"])
    return [*coded(y, block, dtype, power_of_two_scales), *([] if residual is None else [total])]


@defines
def silu_mul_quant(gate: Tensor, up: Any = None, *, gelu_tanh: bool, block: Any, dtype: torch.dtype, power_of_two_scales: bool) -> Results:
    if up is None:
        gate, up = gate.chunk(2, -1)
    return coded(activated(gate, gelu_tanh) * wide(up), block, dtype, power_of_two_scales)


# --------------------------------------------------------------------------------- matrix products
def cut_sums(a: Tensor, b: Tensor, step: int, bits: int, total: Tensor | None = None) -> Tensor:
    """a [.., m, k] times b [.., n, k] in float64, as one accumulator of a tensor core adds it up:
    `step` products at a time, and each new sum is cut to `bits` bits.

    For few rows PyTorch is no yardstick of it: cuBLAS takes the CUDA cores, or many accumulators.
    total: what the accumulator holds at the start.
    """
    a, b = a.double(), b.double()
    total = a.new_zeros(*a.shape[:-1], b.shape[-2]) if total is None else total
    for i in range(0, a.shape[-1], step):
        mantissa, exponent = torch.frexp(total + a[..., i : i + step] @ b[..., i : i + step].mT)
        total = torch.ldexp((mantissa * 2**bits).trunc(), exponent - bits)
    return total


fp8_sums = partial(cut_sums, step=32, bits=14)  # of Hopper, and of torch._scaled_mm with use_fast_accum
tf32_sums = partial(cut_sums, step=8, bits=24)
half_sums = partial(cut_sums, step=16, bits=24)


def code_sums(a: Tensor, b: Tensor) -> Tensor:
    """a [.., m, k] times b [.., n, k] of 8-bit codes in fp32, as Hopper's tensor cores add them up:
    a fresh sum for each 128 of k, each of its terms cut to 14 bits of the largest one.
    """
    total = a.new_zeros(*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-2], dtype=torch.float32)
    for first in range(0, a.shape[-1], 128):
        part = total.new_zeros(total.shape).double()
        for i in range(first, min(first + 128, a.shape[-1]), 32):
            end = min(i + 32, first + 128)
            terms = a.double()[..., :, None, i:end] * b.double()[..., None, :, i:end]
            terms = torch.cat((terms, part[..., None]), -1)
            unit = torch.frexp(terms.abs().amax(-1, keepdim=True))[1] - 14
            part = torch.ldexp(torch.ldexp(terms, -unit).trunc().sum(-1, keepdim=True), unit)[..., 0]
        total += part.float()
    return total


def summed(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, with zeros below few rows of a: of those alone PyTorch sums fp32 products with many
    accumulators on a CPU, at a quarter of the error of its own longer products.
    """
    rows = a.shape[-2]
    return (torch.nn.functional.pad(a, (0, 0, 0, FEW_ROWS)) @ b)[..., :rows, :] if rows < FEW_ROWS and a.dtype is torch.float32 else a @ b


def product(a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, exact: bool, stored: torch.dtype) -> Tensor:
    """a [.., m, k] times b [.., n, k]; scales of matrices and rows after the sum, as in
    torch._scaled_mm. An fp32 result of narrower operands is not rounded to their dtype; on a GPU
    it is summed as tensor cores do.
    """
    if not exact and a.dtype in FP8:
        later = scale_a is not None and scale_b is not None and scale_a.dim() < a.dim()
        x, w = (t.float() if later else values_of(t, scale, exact) for t, scale in ((a, scale_a), (b, scale_b)))
        y = code_sums(x, w) if a.is_cuda and stored is not torch.bfloat16 else summed(x, w.mT)
        if scale_a is not None and scale_b is not None and later:
            y = y * spread(scale_a, tuple(a.shape)) * spread(scale_b, tuple(b.shape)).mT
        return y
    a, b = values_of(a, scale_a, exact), values_of(b, scale_b, exact)
    if not exact and stored is torch.float32 and a.dtype is not stored:
        return half_sums(a, b).float() if a.is_cuda else a.float() @ b.float().mT
    return summed(a, b.mT)


@defines
def matmul(a: Tensor, b: Tensor, bias: Any, *, trans_a: bool, trans_b: bool, exact: bool, stored: torch.dtype, **options: Any) -> Results:
    a, b = a.mT if trans_a else a, b if trans_b else b.mT
    if options["tf32"] and a.is_cuda and not exact:
        y = tf32_sums(a, b).float()
    else:
        y = product(a, b, options.get("scale_a"), options.get("scale_b"), exact, stored)
    y = y if exact or y.dtype == a.dtype else y.to(stored)
    y = y if bias is None else y + bias
    if options.get("silu_mul"):
        y = activated(y[..., 0::2], False).to(y.dtype) * y[..., 1::2]
    for name, change in (("out_scale", torch.mul), ("residual", torch.add)):
        y = y if options.get(name) is None else change(y, options[name])
    return [y if exact else y.to(stored)]


# Where the bits of a code of each plane lie in a half-word, the lowest first.
E2M1_BITS = ((2, 3, 4, 7), (10, 11, 12, 15), (0, 1, 6, 5), (8, 9, 14, 13))
INT4_BITS = tuple(range(first, first + 4) for first in (0, 8, 4, 12))
BYTE_BITS = (range(8), range(8, 16))


def number_of(code: Tensor, name: str) -> Tensor:
    """What a code of a weight format stands for, in float64, a zero point known beforehand off."""
    if "fp4" in name:
        exponent, last = (code >> 1 & 3).double(), (code & 1).double()
        size = torch.where(exponent == 0, last / 2, (1 + last / 2) * 2 ** (exponent - 1))
        return torch.where(code > 7, -size, size)
    if name.startswith("e4m3"):
        exponent, last = (code >> 3 & 15).double(), (code & 7).double()
        size = torch.where(exponent == 0, last / 512, (1 + last / 8) * 2 ** (exponent - 7))
        return torch.where(code > 127, -size, size)
    return code.double() - (0 if name.endswith("zeros") else 8 if name.startswith("int4") else 128)


@defines
def quantized_matmul(x: Tensor, words: Tensor, scales: Tensor, zeros: Any, factor: Any, bias: Any, weight_format: str, **before: Any) -> Results:
    n, k = scales.shape[1], x.shape[-1]
    fields = E2M1_BITS if "fp4" in weight_format else INT4_BITS if weight_format.startswith("int4") else BYTE_BITS
    run, codes = 32 * len(fields), torch.zeros(words.shape[0], 64, words.shape[1] * 32 * len(fields), dtype=torch.int64, device=x.device)
    for j, field in enumerate(fields):
        for half in (0, 1):
            code = torch.stack([(words.long() >> (16 * half + bit) & 1) << i for i, bit in enumerate(field)]).sum(0)
            for word in range(16):
                codes[:, :, 32 * j + 2 * word + half :: run] = code[..., word].mT
    value = number_of(codes.reshape(-1, codes.shape[2])[:n, :k], weight_format)
    of_group = torch.arange(k, device=x.device) // {"mxfp4": 32, "nvfp4": 16}.get(weight_format, int((weight_format + "-0").split("-")[1]) or k)
    scale = 2.0 ** (scales.double() - 127) if weight_format == "mxfp4" else scales.double()
    value = value if zeros is None else value - zeros.double()[of_group].T
    weight = value * scale[of_group].T * (1.0 if factor is None else factor.double())
    residual, up = before.get("residual"), before.get("up")
    total = x if residual is None else x + residual
    if before.get("norm") is not None:
        x = normed(total, before["norm"], before["eps"], before["weight_offset"]).to(x.dtype)
    if up is not None:
        x = activated(x, before["gelu_tanh"]).to(x.dtype) * up
    y = x @ weight.to(x.dtype).T
    return [y if bias is None else y + bias, *([] if residual is None else [total])]


def mx_values(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """What block-scaled codes stand for."""
    if codes.dtype is torch.uint8:
        codes = number_of(torch.stack((codes % 16, codes // 16), -1).flatten(-2).long(), "mxfp4")
    k = codes.shape[-1]
    return codes.to(dtype) * scale.to(dtype)[..., torch.arange(k, device=codes.device) // (k // scale.shape[-1])]


@defines
def quantize_mx(x: Tensor, mx_format: str, factor: Any) -> Results:
    """Values as the codes hold them, and scales; in float64 unrounded, but for powers of two."""
    four, exact = mx_format != "mxfp8", x.dtype is torch.float64
    y, largest = wide(x) if factor is None else wide(x) / factor, 6.0 if four else 448.0
    groups = y.unflatten(-1, (-1, 16 if mx_format == "nvfp4" else 32))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=largest * 2.0**-126) / largest
    if mx_format == "nvfp4":
        scale = scale.clamp(2.0**-9, 448.0)
        scale = scale if exact else scale.to(FP8[0]).to(y.dtype)
    else:
        scale = scale.log2().sub(1e-12 if exact else 0).ceil().exp2()
    codes = (groups / scale).clamp(-largest, largest)
    if not exact:
        step = torch.where(codes.abs() < 2, 0.5, torch.where(codes.abs() < 4, 1.0, 2.0))  # of e2m1
        codes = (codes / step).round() * step if four else codes.to(FP8[0]).to(y.dtype)
    return [(codes * scale).flatten(-2), scale[..., 0]]


@defines
def mx_matmul(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Any, out_scale: Any, out_dtype: torch.dtype) -> Results:
    dtype = torch.float64 if scale_a.dtype is torch.float64 else torch.float32
    y = mx_values(a, scale_a, dtype) @ mx_values(b, scale_b, dtype).mT
    y = y if out_scale is None else y * out_scale
    y = y if bias is None else y + bias
    return [y if dtype is torch.float64 else y.to(out_dtype)]


@defines
def bmm(a: Tensor, b: Tensor, *, trans_a: bool, trans_b: bool, exact: bool, stored: torch.dtype, scale_a: Any, scale_b: Any) -> Results:
    x, w = a.mT if trans_a else a, b if trans_b else b.mT
    y = product(x, w, scale_a, scale_b, exact, stored)
    return [y if exact else y.to(stored)]


@defines
def grouped_gemm(  # noqa: PLR0913 the op's arguments
    a: Tensor, b: Tensor, offsets: Any, counts: Any, *, trans_b: bool, exact: bool, stored: torch.dtype, scale_a: Any, scale_b: Any
) -> Results:
    x, w = a, b if trans_b else b.mT
    y = product(x, w, scale_a, scale_b, exact, stored)  # of rooms, or [groups, rows, n] of all rows with each
    row = torch.arange(a.shape[-2], device=a.device)
    if counts is not None:
        y = torch.where((row < counts[:, None])[..., None], y, 0)
    else:
        group = torch.searchsorted(offsets.long(), row, right=True)
        y = torch.where((group < len(w))[:, None], y[group.clamp(max=len(w) - 1), row], 0)
    return [y if exact else y.to(stored)]


@defines
def rms_norm_matmul(
    x: Tensor, weight: Tensor, b: Tensor, bias: Any, *, eps: float, residual: Any, silu_mul: bool, weight_offset: float = 0.0
) -> Results:
    total = x if residual is None else x + residual
    y = normed(total, weight, eps, weight_offset).to(x.dtype) @ b.mT
    y = y if bias is None else y + bias
    y = activated(y[..., 0::2], False).to(y.dtype) * y[..., 1::2] if silu_mul else y
    return [y, *([] if residual is None else [total])]


def through(x: Tensor, matrix: Tensor, scale: Tensor | None, bias: Tensor | None) -> Tensor:
    """[experts, tokens, columns]: x, of all experts or of each, times each expert's matrix. With
    scales x gets 8 bits too, in groups of 128, but not in float64.
    """
    each = x.expand(len(matrix), *x.shape[-2:])
    if scale is None:
        y = each @ matrix.mT
    else:
        if x.dtype is not torch.float64:
            each = torch.stack([coded(wide(rows), (1, 128), torch.float8_e4m3fn, False)[0].to(x.dtype) for rows in each])
        y = (wide(each) @ wide(values_of(matrix, scale, x.dtype is torch.float64)).mT).to(x.dtype)
    return y if bias is None else y + bias[:, None]


@defines
def moe(x: Tensor, gate_up: Tensor, down: Tensor, *, weights: Tensor, ids: Tensor, **options: Any) -> Results:
    """Every expert for every token, then the share that each token has of each."""
    experts = len(down)
    here = (ids >= 0) & (ids < experts)
    share = torch.zeros(len(x), experts + 1, dtype=weights.dtype, device=x.device)
    share.scatter_add_(1, torch.where(here, ids, experts).long(), weights)
    gate, up = through(x, gate_up, options["scale_gate_up"], options.get("bias_gate_up")).chunk(2, -1)
    if options["limit"] is not None:
        gate, up = gate.clamp(max=options["limit"]), up.clamp(-options["limit"], options["limit"])
    active = gate / (1 + (-options["alpha"] * gate).exp()) * (up + options["up_offset"])
    y = through(active, down, options["scale_down"], options.get("bias_down"))
    out = torch.einsum("te,eth->th", share[:, :experts], wide(y))
    if "shared_down" in options:
        gate, up = (torch.einsum("th,sih->sti", x, options["shared_gate_up"][:, part]) for part in (0, 1))
        out = out + wide(torch.einsum("sti,shi->th", activated(gate, False).to(x.dtype) * up, options["shared_down"]))
    return [out.to(x.dtype)]


@defines
def quantized_moe(x: Tensor, words_gate_up: Tensor, words_down: Tensor, *, weights: Tensor, ids: Tensor, **options: Any) -> Results:
    """Every expert for every token, as `moe`."""

    def product(rows: Tensor, words: Tensor, name: str, expert: int, part: int) -> Tensor:
        zeros, bias = options[f"zeros_{name}"], options.get(f"bias_{name}")
        bias = None if bias is None else bias[expert] if name == "down" else bias[expert, part]
        small = words[expert, part], options[f"scales_{name}"][expert, part], None if zeros is None else zeros[expert, part]
        return quantized_matmul(rows, *small, None, bias, options["weight_format"])[0]

    out = torch.zeros(x.shape, dtype=wide(x).dtype, device=x.device)
    for expert in range(len(words_down)):
        gate, up = (product(x, words_gate_up, "gate_up", expert, part) for part in (0, 1))
        if options["limit"] is not None:
            gate, up = gate.clamp(max=options["limit"]), up.clamp(-options["limit"], options["limit"])
        active = gate / (1 + (-options["alpha"] * gate).exp()) * (up + options["up_offset"])
        out += (weights * (ids == expert)).sum(1, keepdim=True) * product(active, words_down, "down", expert, 0)
    return [out.to(x.dtype)]


def scores_of(logits: Tensor, sigmoid: bool, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Of all experts: what weights come from, what the choice goes by."""
    scores = wide(logits).sigmoid() if sigmoid else softmax(wide(logits))[0]
    return scores, scores if bias is None else scores + bias


@defines
def moe_route(
    logits: Tensor, top_k: int, *, sigmoid: bool, bias: Any, normalize: bool, scale: float, groups: int, top_groups: int, **rest: Any
) -> Results:
    """The weights, and by what the experts were chosen, which tells as much as their ids."""
    scores, by = scores_of(logits, sigmoid, bias)
    if groups:
        inside = by.unflatten(-1, (groups, -1))
        strength = inside.topk(min(2, inside.shape[-1]), -1)[0].sum(-1) if bias is not None else inside.amax(-1)
        best = strength.sort(dim=-1, descending=True, stable=True).indices[..., :top_groups]  # of equal groups the first
        taking_part = torch.zeros_like(strength, dtype=torch.bool).scatter(-1, best, True)
        by = torch.where(taking_part[..., None], inside, -torch.inf).flatten(-2)
    chosen, ids = torch.sort(by, dim=-1, descending=True, stable=True)
    weights = scores.gather(-1, ids[..., :top_k])
    weights = weights / weights.sum(-1, keepdim=True) if normalize else weights
    return [weights * scale, chosen[..., :top_k]]
