"""What the attention ops share: softmax over keys that arrive tile by tile, and the checks of their
arguments.

State of a row of that softmax: the running maximum of its scaled scores, in base 2, and the
denominator sum(exp2(score - maximum)).
"""

import math

import cuda.tile as ct
import torch
from torch import Tensor

from ...launch import argument_error, check_integers, check_number, check_positive, check_tensor, dtype_name
from .scaling import FP8

MAX_SOFTCAP = 2.0**64  # it and scale / softcap are normal numbers of fp32
FARTHEST = 1 << 31  # keys from a query: no cache is as long, and a schema's 64 bits hold it
MAX_HEAD_DIM = 256  # the accumulator of one tile of queries stays in registers

LN2 = math.log(2.0)
FLOOR = -3.0e38  # below every score, and finite: a masked score minus it is -inf, it minus itself 0; so no NaN from -inf - -inf


def product(x, y, accumulator, TF32X3):
    """accumulator + x @ y.

    TF32X3: fp32 operands as a leading and a trailing TF32 part each, without the product of the
    trailing ones.

    That keeps fp32's accuracy on tensor cores (Ootomo and Yokota 2022, arXiv:2203.03341): 2 * 11
    bits of each operand count, and the sum is added to the accumulator outside the tensor cores,
    which round towards zero.
    """
    if TF32X3:
        x_high, y_high = x.astype(ct.tfloat32), y.astype(ct.tfloat32)
        x_low = (x - x_high.astype(ct.float32)).astype(ct.tfloat32)
        y_low = (y - y_high.astype(ct.float32)).astype(ct.tfloat32)
        zeros = ct.zeros((x.shape[0], y.shape[1]), dtype=ct.float32)
        return accumulator + ct.mma(x_high, y_high, ct.mma(x_high, y_low, ct.mma(x_low, y_high, zeros)))
    return ct.mma(x, y, accumulator)


def softmax_step(scores, maximum, denominator, scale, dtype, AXIS, PARTS, SHIFT=0, LATE=False):
    """Takes in one tile of scores, whose keys lie along AXIS; -inf where masked.

    `scale` brings a score to base 2.

    Returns the tile's weights relative to the new maximum, rounded to dtype; the factor that brings
    earlier sums to that maximum; the new maximum and denominator. PARTS > 1 makes the weights in
    that many column parts (AXIS 1): fewer registers are live. SHIFT: the state's maximum is kept
    that much below the true one, so that weights are at most 2**SHIFT; nothing else in the state's
    meaning changes. LATE: the denominator has the shape of the scores, to be summed along AXIS
    after the last tile: one reduction less between a tile's two products.
    """
    largest = ct.max(scores, axis=AXIS, keepdims=True) * scale
    if SHIFT:
        largest = largest - SHIFT
    largest = ct.maximum(maximum, largest)
    factor = ct.exp2(maximum - largest, flush_to_zero=True)
    if PARTS == 1:
        weights = ct.exp2(scores * scale - largest, flush_to_zero=True)
        total = weights if LATE else ct.sum(weights, axis=AXIS, keepdims=True)
        weights = weights.astype(dtype)
    else:
        shape = (scores.shape[0], scores.shape[1] // PARTS)
        part = ct.exp2(ct.extract(scores, (0, 0), shape) * scale - largest, flush_to_zero=True)
        sums, weights = part, part.astype(dtype)
        for i in ct.static_iter(range(1, PARTS)):
            part = ct.exp2(ct.extract(scores, (0, i), shape) * scale - largest, flush_to_zero=True)
            sums = sums + part
            weights = ct.cat((weights, part.astype(dtype)), axis=1)
        total = ct.sum(sums, axis=AXIS, keepdims=True)
    return weights, factor, largest, denominator * factor + total


def merged(sums, maxima, denominators, to_base2):
    """The states of rows over several sets of keys, stacked along axis 0, as one: sums [sets, ...,
    columns], the others [sets, ..., 1].

    to_base2: what brings the maxima to base 2. Returns sum, maximum and denominator with an axis 0
        of length 1.
    """
    largest = ct.maximum(ct.max(maxima, axis=0, keepdims=True), FLOOR)
    weights = ct.exp2((maxima - largest) * to_base2)
    return ct.sum(weights * sums, axis=0, keepdims=True), largest, ct.sum(weights * denominators, axis=0, keepdims=True)


def joined(sums, maximum, denominator, more, more_maximum, more_denominator, to_base2):
    """Two states of the same rows as one, as `merged` does: sums [rows, columns], the others [rows,
    1]; the first maximum is not -inf.
    """
    largest = ct.maximum(maximum, more_maximum)
    shrink, weight = ct.exp2((maximum - largest) * to_base2), ct.exp2((more_maximum - largest) * to_base2)
    return sums * shrink + more * weight, largest, denominator * shrink + more_denominator * weight


def sink_factor(maximum, denominator, sink):
    """What normalises rows whose softmax sees, beside the keys, a score `sink` (in base 2) that has
    no value. Any sink, infinities too.
    """
    total = denominator + ct.exp2(sink - maximum)  # infinite for a sink far above the scores, of which nothing is left
    return 1.0 / ct.where(total == 0.0, 1.0, total)


def visible_scores(q_len: int, n: int, causal: bool, window: int | None, ahead: int = 0) -> int:
    """How many (query, key) pairs of one head the mask leaves. ahead: with causal, keys behind its
    own that a query sees.
    """

    def triangle(last: int) -> int:
        """Sum of max(0, j + 1) over the queries' last keys j, the last of which is `last`."""
        below, side = max(0, last + 1 - q_len), max(0, last + 1)
        return (side * (side + 1) - below * (below + 1)) // 2

    hidden = 0 if window is None else triangle(n - 1 - window)
    return (triangle(n - 1 + ahead) - triangle(ahead - 1) if causal else q_len * n) - hidden


def check_heads(q: Tensor, k: Tensor, most: int = MAX_HEAD_DIM, name: str = "q") -> None:
    """Raises ValueError unless the heads (axis 1) of q, or what it is named, are a multiple of k's
    and the head_dim is in 1..most.
    """
    _, q_heads, *_, head_dim = q.shape
    kv_heads = k.shape[1]
    if not 1 <= head_dim <= most:
        raise argument_error(f"{name}.shape[-1]", f"in 1..{most}", head_dim)
    if kv_heads == 0:
        raise argument_error("k.shape[1]", "at least 1", 0)
    if q_heads % kv_heads:
        raise argument_error(f"{name}.shape[1]", f"a multiple of k.shape[1] = {kv_heads}", q_heads)


def check_int32(tensor: Tensor, name: str, like: Tensor, shape: tuple[int | None, ...]) -> None:
    """Raises TypeError or ValueError unless `tensor` is int32 of that shape (None: any length) on
    the device of `like`; any strides.
    """
    check_tensor(tensor, name, ndim=len(shape), dtypes=(torch.int32,), any_strides=True, like=like)
    for n, was in zip(shape, tensor.shape, strict=True):
        if n is not None and n != was:
            wanted = tuple(was if n is None else n for n, was in zip(shape, tensor.shape, strict=True))
            raise argument_error(f"{name}.shape", wanted, tuple(tensor.shape))


def check_starts(starts: Tensor, name: str, like: Tensor) -> int:
    """How many sequences these are the starts of (`cu_seqlens`); raises as `check_int32`."""
    check_int32(starts, name, like, (None,))
    if not len(starts):
        raise argument_error(f"{name}.shape", "(sequences + 1,)", (0,))
    return len(starts) - 1


def check_scale_and_window(scale: float | None, window: int | None, head_dim: int) -> float:
    """The scale to use. Raises ValueError unless both are positive where given."""
    if window is not None:
        check_integers(window=window)
        if window < 1:
            raise argument_error("window", "at least 1", window)
    if scale is None:
        return float(head_dim**-0.5)
    check_positive(scale, "scale")
    return scale


def check_softcap(softcap: float | None) -> None:
    """Raises TypeError or ValueError unless it is None or in range."""
    if softcap is not None:
        check_number(softcap, "softcap")
        if not 1 / MAX_SOFTCAP <= softcap <= MAX_SOFTCAP:
            raise argument_error("softcap", "in 2**-64..2**64 (None for no cap)" if softcap > 0 else "positive", softcap)


def check_sinks(sinks: Tensor | None, like: Tensor, heads: int) -> None:
    """Raises TypeError or ValueError unless they are None, or fp32 [heads] on like's device."""
    if sinks is not None:
        check_tensor(sinks, "sinks", shape=(heads,), dtypes=(torch.float32,), like=like)


def check_scales(like: Tensor, **given: tuple[Tensor | None, tuple[int, ...]]) -> None:
    """Raises TypeError or ValueError unless each scale is given with 8-bit codes, as fp32 of its
    shape on the device of `like`, and else is None.

    given: of each scale's name the tensor and its shape.
    """
    eight_bits = like.dtype in FP8
    for name, (tensor, shape) in given.items():
        if not eight_bits:
            if tensor is not None:
                raise argument_error(name, f"None for {dtype_name(like.dtype)}", type(tensor).__name__)
            continue
        if tensor is None:
            raise argument_error(name, f"given for {dtype_name(like.dtype)}, as fp32 of shape {shape}", None)
        check_tensor(tensor, name, shape=shape, dtypes=(torch.float32,), like=like)


def no_keys(out: Tensor, lse: Tensor | None, denominator: Tensor | None = None) -> None:
    """The result where there is nothing to see, or to compute."""
    out.zero_()
    if lse is not None:
        lse.fill_(-math.inf)
    if denominator is not None:
        denominator.zero_()
