"""What ops of rows mean."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Results = list[Tensor]
DEFINITIONS: dict[str, Callable[..., Results]] = {}
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


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
    return [torch.where(word >= math.ceil(p * 2.0**32), wide(x) * (1 / (1 - p) if p < 1 else 0.0), 0.0).to(x.dtype)]


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
