"""What matrix products mean."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .rows import FP8, Results, activated, coded, defines, normed, spread, values_of, wide

FEW_ROWS = 16
MOST_TERMS = 1 << 24  # in memory at a time
CODE_BITS = 14  # of a sum of 8-bit codes
NO_EXPONENT = -400  # below that of any product
LEAST_EXPONENTS = {FP8[0]: -5, FP8[1]: -13}  # of the formats, as frexp counts; a subnormal code has it too


def cut_sums(a: Tensor, b: Tensor, step: int, bits: int, total: Tensor | None = None) -> Tensor:
    """a [.., m, k] times b [.., n, k] in float64, as one accumulator of a tensor core adds it up:
    `step` products at a time, and each new sum is cut to `bits` bits.

    For few rows PyTorch is no yardstick of it: cuBLAS takes the CUDA cores, or many accumulators.
    total: what the accumulator holds at the start.
    """
    a, b = a.double(), b.double()
    total = a.new_zeros(*a.shape[:-1], b.shape[-2]) if total is None else total
    for i in range(0, a.shape[-1], step):
        total = _cut(total + a[..., i : i + step] @ b[..., i : i + step].mT, bits)
    return total


def _cut(x: Tensor, bits: int) -> Tensor:
    """The first bits of each number."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2**bits).trunc(), exponent - bits)


tf32_sums = partial(cut_sums, step=8, bits=24)
half_sums = partial(cut_sums, step=16, bits=24)


def code_sums(a: Tensor, b: Tensor, fresh: int = 128) -> Tensor:
    """a [.., m, k] times b [.., n, k] of 8-bit codes in fp32, bit for bit as Hopper's tensor cores
    add them up: 32 products and the sum before them, each cut to 14 bits of the one with the
    largest exponent; then the new sum is cut to 14 bits. a, b: codes, or what they stand for.

    Few sums lose much, those that were large on their way. So a bound needs the same sums to lose
    it: as many others as there are do not say what one of them may.
    fresh: the columns after which a new sum begins.
    """
    each = math.prod(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])) * b.shape[-2] * 33
    rows = max(1, MOST_TERMS // max(1, each))
    return torch.cat([_sums_of_rows(some, b, fresh) for some in a.split(rows, -2)], -2)


def _sums_of_rows(a: Tensor, b: Tensor, fresh: int) -> Tensor:
    total = a.new_zeros(*torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-2], dtype=torch.float32)
    x, w = a.double()[..., :, None, :], b.double()[..., None, :, :]
    of_x, of_w = (torch.frexp(t)[1].clamp(min=LEAST_EXPONENTS.get(codes.dtype, NO_EXPONENT)) for t, codes in ((x, a), (w, b)))
    for first in range(0, a.shape[-1], fresh):
        part = total.new_zeros(total.shape).double()
        for i in range(first, min(first + fresh, a.shape[-1]), 32):
            end = min(i + 32, first + fresh)
            terms = torch.cat((x[..., i:end] * w[..., i:end], part[..., None]), -1)
            # Of a product the exponents of its factors count, which may be one less than its own.
            exponents = torch.cat((of_x[..., i:end] + of_w[..., i:end] - 1, torch.frexp(part)[1][..., None]), -1)
            exponents = exponents.masked_fill(terms == 0, NO_EXPONENT)
            unit = exponents.amax(-1, keepdim=True) - CODE_BITS
            terms = torch.ldexp(torch.ldexp(terms, -unit).trunc(), unit)
            part = _cut(terms.sum(-1), CODE_BITS)
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
        x, w = (t if later else values_of(t, scale, exact) for t, scale in ((a, scale_a), (b, scale_b)))
        y = code_sums(x, w) if a.is_cuda and stored is not torch.bfloat16 else summed(x.float(), w.float().mT)
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


def between(gate: Tensor, up: Tensor, options: dict[str, Any]) -> Tensor:
    """What an expert makes of its first two products."""
    if options["limit"] is not None:
        gate, up = gate.clamp(max=options["limit"]), up.clamp(-options["limit"], options["limit"])
    active: Tensor = gate / (1 + (-options["alpha"] * gate).exp()) * (up + options["up_offset"])
    return active


@defines
def moe(x: Tensor, gate_up: Tensor, down: Tensor, *, weights: Tensor, ids: Tensor, **options: Any) -> Results:
    """Every expert for every token, then the share that each token has of each."""
    experts = len(down)
    here = (ids >= 0) & (ids < experts)
    share = torch.zeros(len(x), experts + 1, dtype=weights.dtype, device=x.device)
    share.scatter_add_(1, torch.where(here, ids, experts).long(), weights)
    gate, up = through(x, gate_up, options["scale_gate_up"], options.get("bias_gate_up")).chunk(2, -1)
    y = through(between(gate, up, options), down, options["scale_down"], options.get("bias_down"))
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
        out += (weights * (ids == expert)).sum(1, keepdim=True) * product(between(gate, up, options), words_down, "down", expert, 0)
    return [out.to(x.dtype)]
