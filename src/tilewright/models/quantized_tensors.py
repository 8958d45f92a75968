"""Quantised tensors of checkpoints as `QuantizedWeight`s: the same codes, packed anew.

    from_gptq                GPTQ and GPTQModel, 4 bits, with and without act-order
    from_awq                 AWQ, 4 bits
    from_compressed_tensors  pack-quantized, 4 bits
    from_int8                int8 of rows, or of groups of 16 or 32
    from_fp8                 e4m3 of the whole weight, of rows, or of blocks of 128 x 128
    from_mxfp4               a matrix of gpt-oss
    from_nvfp4               NVFP4

Groups of int4 have 32 or 64 weights, or any multiple of 128, as which they are then stored.
"""

import torch
from torch import Tensor

from ..launch import argument_error, check_tensor, dtype_name
from ..ops.common.weight_formats import QuantizedWeight

NIBBLES = 8  # of a word
AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of the columns of a word
SYMMETRIC = 8  # the zero point of symmetric codes


def from_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None = None, *, zeros_off_by_one: bool = True
) -> tuple[QuantizedWeight, Tensor | None]:
    """The weight, and the order of k that act-order asks for: `x[..., order]` goes with the weight.
    None where k stays in order.

    Args:
        qweight: int32 [k / 8, n]. qzeros: int32 [groups, n / 8]. scales: [groups, n].
        g_idx: the group of each k; None for groups in order.
        zeros_off_by_one: zero points are stored less one, as `checkpoint_format` "gptq" does and
            "gptq_v2" does not.
    """
    check_tensor(qweight, "qweight", ndim=2, dtypes=(torch.int32,))
    check_tensor(scales, "scales", ndim=2)
    codes = _nibbles(qweight, 0).T
    k, groups = codes.shape[1], len(scales)
    check_tensor(qzeros, "qzeros", shape=(groups, scales.shape[1] // NIBBLES), dtypes=(torch.int32,))
    zeros = (_nibbles(qzeros, 1) + zeros_off_by_one) & 15
    order = None
    if g_idx is not None:
        check_tensor(g_idx, "g_idx", shape=(k,), dtypes=(torch.int32, torch.int64))
        if bool((g_idx < 0).any() | (g_idx >= groups).any()):
            raise argument_error("g_idx", f"0 to {groups - 1}, the groups of scales", f"{int(g_idx.min())} to {int(g_idx.max())}")
        if not torch.equal(torch.bincount(g_idx.long(), minlength=groups), torch.full((groups,), k // groups, device=g_idx.device)):
            raise argument_error("g_idx", f"{k // groups} of each of {groups} groups", "groups of unlike sizes")
        found = torch.argsort(g_idx.long(), stable=True)
        if not torch.equal(found, torch.arange(k, device=found.device)):
            codes, order = codes[:, found], found
    return _int4(codes, scales, zeros), order


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> QuantizedWeight:
    """Args: qweight int32 [k, n / 8], qzeros int32 [groups, n / 8], scales [groups, n]."""
    check_tensor(qweight, "qweight", ndim=2, dtypes=(torch.int32,))
    check_tensor(scales, "scales", ndim=2)
    check_tensor(qzeros, "qzeros", shape=(len(scales), qweight.shape[1]), dtypes=(torch.int32,))

    def columns(words: Tensor) -> Tensor:
        return _nibbles(words, 1).view(len(words), -1, NIBBLES)[..., list(AWQ_PLACES)].reshape(len(words), -1)

    return _int4(columns(qweight).T, scales, columns(qzeros))


def from_compressed_tensors(weight_packed: Tensor, weight_scale: Tensor, weight_zero_point: Tensor | None = None) -> QuantizedWeight:
    """Args: weight_packed int32 [n, k / 8], weight_scale [n, groups], weight_zero_point int32 [n /
    8, groups] or None.
    """
    check_tensor(weight_packed, "weight_packed", ndim=2, dtypes=(torch.int32,))
    check_tensor(weight_scale, "weight_scale", ndim=2)
    zeros = None
    if weight_zero_point is not None:
        shape = (-(-len(weight_packed) // NIBBLES), weight_scale.shape[1])
        check_tensor(weight_zero_point, "weight_zero_point", shape=shape, dtypes=(torch.int32,))
        zeros = _nibbles(weight_zero_point, 0)[: len(weight_packed)].T
    return _int4(_nibbles(weight_packed, 1), weight_scale.T, zeros)


def from_int8(weight: Tensor, scale: Tensor) -> QuantizedWeight:
    """Args: weight int8 [n, k], scale one, [n] or [n, 1], or [n, groups], which become fp16."""
    check_tensor(weight, "weight", ndim=2, dtypes=(torch.int8,))
    (n, k), codes = weight.shape, weight.to(torch.int32) + 128
    for group in (16, 32):
        if k > group and tuple(scale.shape) == (n, k // group) and k % group == 0:
            return QuantizedWeight.packed(codes, scale.T.to(torch.float16).contiguous(), weight_format=f"int8-{group}")
    return QuantizedWeight.packed(codes, _of_rows(scale, n), weight_format="int8")


def from_fp8(weight: Tensor, scale: Tensor) -> QuantizedWeight:
    """Args: weight float8_e4m3fn [n, k]. scale: factors, one, [n] or [n, 1], or [n / 128, k / 128]
    rounded up, of blocks (DeepSeek's weight_scale_inv).
    """
    check_tensor(weight, "weight", ndim=2, dtypes=(torch.float8_e4m3fn,))
    n, k = weight.shape
    codes = weight.view(torch.uint8)
    if scale.dim() == 2 and scale.shape == (-(-n // 128), -(-k // 128)) and scale.numel() > 1:
        each = scale.float().repeat_interleave(128, 0)[:n].T.contiguous()
        return QuantizedWeight.packed(codes, each, weight_format="e4m3-128")
    return QuantizedWeight.packed(codes, _of_rows(scale, n), weight_format="e4m3")


def from_mxfp4(blocks: Tensor, scales: Tensor) -> QuantizedWeight:
    """Args: blocks uint8 [n, k / 32, 16], the lower code of a byte first; scales uint8 [n, k / 32],
    e8m0.
    """
    check_tensor(blocks, "blocks", ndim=3, dtypes=(torch.uint8,))
    check_tensor(scales, "scales", shape=blocks.shape[:2], dtypes=(torch.uint8,))
    return QuantizedWeight.packed(_halves(blocks.flatten(1)), scales.T.contiguous(), weight_format="mxfp4")


def from_nvfp4(packed: Tensor, scale: Tensor, factor: Tensor) -> QuantizedWeight:
    """Args: packed uint8 [n, k / 2], the lower code of a byte first. scale float8_e4m3fn [n, k /
    16]. factor: of the whole weight, 1 / weight_global_scale of compressed-tensors.
    """
    check_tensor(packed, "packed", ndim=2, dtypes=(torch.uint8,))
    check_tensor(scale, "scale", shape=(len(packed), packed.shape[1] // 8), dtypes=(torch.float8_e4m3fn,))
    if factor.numel() != 1:
        raise argument_error("factor.numel()", 1, factor.numel())
    scales = scale.to(torch.bfloat16).T.contiguous()
    return QuantizedWeight.packed(_halves(packed), scales, factor=factor.float().reshape(1), weight_format="nvfp4")


def _nibbles(words: Tensor, axis: int) -> Tensor:
    """The eight codes of each word along an axis, the lowest first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    found = (words.unsqueeze(axis + 1) >> (shifts[:, None] if axis == 0 else shifts)) & 15
    return found.flatten(axis, axis + 1)


def _halves(packed: Tensor) -> Tensor:
    return torch.stack((packed & 15, packed >> 4), -1).flatten(1)


def _of_rows(scale: Tensor, n: int) -> Tensor:
    if scale.numel() not in (1, n):
        raise argument_error("scale", f"one, or {n} of rows", f"shape {tuple(scale.shape)}")
    return scale.float().reshape(1, -1).expand(1, n).contiguous()


def _int4(codes: Tensor, scales: Tensor, zeros: Tensor | None) -> QuantizedWeight:
    """Codes [n, k] with scales and zero points [groups, n]."""
    (n, k), groups = codes.shape, len(scales)
    group = k // groups if groups and k % groups == 0 else 0
    if group not in (32, 64) and (group == 0 or group % 128):
        raise argument_error("groups of scales", f"of 32 or 64 weights or a multiple of 128 in k = {k}", f"{groups} groups")
    if not scales.is_floating_point():
        raise argument_error("scales.dtype", "a float", dtype_name(scales.dtype))
    if tuple(scales.shape) != (groups, n):
        raise argument_error("scales.shape", f"{(groups, n)}, for a weight of {n} rows", tuple(scales.shape))
    if zeros is not None and bool((zeros == SYMMETRIC).all()):
        zeros = None
    stored = scales if scales.dtype in (torch.bfloat16, torch.float16) else scales.to(torch.bfloat16)
    each = max(1, group // 128)
    name = f"int4-{group // each}" + ("" if zeros is None else "-zeros")
    zeros = None if zeros is None else zeros.to(torch.bfloat16).repeat_interleave(each, 0)
    return QuantizedWeight.packed(codes, stored.repeat_interleave(each, 0), zeros, weight_format=name)
