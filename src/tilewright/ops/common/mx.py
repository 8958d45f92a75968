"""Block-scaled codes: small groups of values along a row, each with a scale of 8 bits.

    value = code * scale        out[i, j] = sum_k a[i, k] * scale_a[i, k / group] * b[j, k] * ...

    name    group  codes                            scales
    mxfp8   32     e4m3 [rows, k]                   e8m0 [rows, k / 32], powers of two
    mxfp4   32     e2m1, pairs [rows, k / 2] uint8  e8m0 [rows, k / 32], powers of two
    nvfp4   16     e2m1, pairs [rows, k / 2] uint8  e4m3 [rows, k / 16], and a factor of the matrix

All arrays are row-major: in a kernel the compiler puts scales into the order that tensor cores
want. Of a pair, the low four bits come first. A power of two is the least that keeps max |value| /
scale within the largest code, so nothing saturates.
"""

from dataclasses import dataclass

import cuda.tile as ct
import torch
from torch import Tensor

from ...launch import argument_error, check_name, check_tensor
from .fp8 import APPROX, TINY, codes_of, power_of_two, scale_of
from .weight_formats import E2M1, FORMATS, LARGEST, nearest_codes, values
from .weight_tiles import E2M1_REST, SIGNS, _pairs, e4m3_planes

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
LEAST_SCALE = 2.0**-9  # of nvfp4, the least e4m3 number: a group of zeros has it
LARGEST_SCALE, LARGEST_E2M1 = 448.0, LARGEST[E2M1]


@dataclass(frozen=True, slots=True)
class MxFormat:
    """One way to store values; see the module. bits: of a code. largest: code."""

    name: str
    bits: int
    group: int
    scale_dtype: torch.dtype
    largest: int

    @property
    def dtype(self) -> torch.dtype:
        """Of the codes' array."""
        return E4M3 if self.bits == 8 else torch.uint8

    @property
    def stored_dtype(self) -> torch.dtype:
        """Of scales as kernels take them: e8m0 as bytes, which Ampere and Hopper have no type
        for.
        """
        return torch.uint8 if self.scale_dtype is E8M0 else self.scale_dtype

    @property
    def group_bytes(self) -> int:
        """Of the codes that share a scale."""
        return self.group * self.bits // 8

    def row_bytes(self, k: int) -> int:
        """Of the codes of a row."""
        return -(-k * self.bits // 8)

    def size_bytes(self, rows: int, k: int) -> int:
        """Of codes and scales."""
        return rows * (self.row_bytes(k) + -(-k // self.group))


MX_FORMATS = {
    of.name: of
    for of in (
        MxFormat("mxfp8", 8, 32, E8M0, 448),
        MxFormat("mxfp4", 4, 32, E8M0, 6),
        MxFormat("nvfp4", 4, 16, E4M3, 6),
    )
}


def mx_named(name: str) -> MxFormat:
    """Raises ValueError naming the known ones."""
    check_name("mx_format", MX_FORMATS, name)
    return MX_FORMATS[name]


def format_of(codes: Tensor, scale: Tensor) -> MxFormat:
    """The format of an operand, once its dtypes and shapes are checked.

    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_tensor(codes, "a", dtypes=(E4M3, torch.uint8))
    kinds = [of for of in MX_FORMATS.values() if of.dtype is codes.dtype]
    check_tensor(scale, "scale_a", dtypes=tuple(of.scale_dtype for of in kinds))
    (found,) = [of for of in kinds if of.scale_dtype is scale.dtype]
    if codes.dim() == 0 or codes.shape[-1] == 0 or codes.shape[-1] % found.group_bytes:
        be = f"[.., k{' / 2' * (found.bits == 4)}] with k a multiple of {found.group}, the group of {found.name}"
        raise argument_error("a.shape", be, tuple(codes.shape))
    return found


def check_scale(scale: Tensor, codes: Tensor, name: str, of: MxFormat) -> None:
    """Raises TypeError or ValueError unless it is the scales of these codes."""
    check_tensor(scale, f"scale_{name}", dtypes=(of.scale_dtype,), shape=(*codes.shape[:-1], codes.shape[-1] // of.group_bytes), like=codes)


def check_factor(factor: Tensor, x: Tensor, name: str) -> None:
    """Raises TypeError or ValueError unless it is one fp32 number on x's device."""
    check_tensor(factor, name, shape=(), dtypes=(torch.float32,), like=x)


def bits_of(scale: Tensor) -> Tensor:
    """Scales as kernels take them."""
    return scale.view(torch.uint8) if scale.dtype is E8M0 else scale


# --- the definition, in plain torch


def quantized(x: Tensor, of: MxFormat, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    """Codes and scales of fp32 or float64 values [.., k].

    In float64 the codes, one for each value, and the scales of nvfp4 are not rounded.
    """
    exact = x.dtype is torch.float64
    groups = (x if factor is None else x / factor).unflatten(-1, (-1, of.group))
    amax = groups.abs().amax(-1)
    if of.scale_dtype is E8M0:
        scale = power_of_two(amax.clamp(min=of.largest * TINY) / of.largest)
    else:
        scale = (amax / of.largest).clamp(LEAST_SCALE, LARGEST_SCALE)
        scale = scale if exact else scale.to(of.scale_dtype).to(x.dtype)
    scale = torch.where(amax.isfinite(), scale, torch.nan)
    codes = (groups / scale[..., None]).clamp(-of.largest, of.largest).flatten(-2)
    return (codes, scale) if exact else (_stored(codes, of), scale.to(of.scale_dtype))


def _stored(codes: Tensor, of: MxFormat) -> Tensor:
    if of.dtype is E4M3:
        return codes.to(E4M3)
    fours = nearest_codes(codes, E2M1)
    return fours[..., ::2] | fours[..., 1::2] << 4


def dequantized(codes: Tensor, scale: Tensor) -> Tensor:
    """code * scale [.., k], float64 if a part is, else fp32; a code for each value, or pairs."""
    wide = torch.float64 if torch.float64 in (codes.dtype, scale.dtype) else torch.float32
    if codes.dtype is torch.uint8:
        found = values(torch.stack((codes & 15, codes >> 4), -1).flatten(-2), FORMATS["mxfp4"], wide)
    else:
        found = codes.to(wide)
    groups: Tensor = found.unflatten(-1, (scale.shape[-1], -1)) * scale.to(wide)[..., None]
    return groups.flatten(-2)


def random_operand(rows: int, k: int, of: MxFormat, device: torch.device) -> tuple[Tensor, Tensor]:
    """Codes and scales of random values, rows of unlike sizes."""
    if device.type == "meta":
        codes = torch.empty((rows, of.row_bytes(k)), dtype=of.dtype, device=device)
        return codes, torch.empty((rows, -(-k // of.group)), dtype=of.scale_dtype, device=device)
    return quantized(torch.randn(rows, k, device=device) * torch.exp2(torch.randn(rows, 1, device=device)), of, None)


# --- tile code


def mx_codes(x, multiplier, GROUP, LARGEST, dtype, scale_dtype):
    """Codes and scales, as they are stored, of a tile of values [M, N], N / GROUP groups a row.

    multiplier: of the values, before. scale_dtype: uint8 for powers of two, as e8m0 bytes. dtype:
    uint8 for pairs of e2m1.
    """
    M, N = x.shape
    groups = x.reshape((M, N // GROUP, GROUP))
    amax = ct.max(ct.abs(groups), axis=2, keepdims=True, propagate_nan=True).astype(ct.float32) * multiplier
    if scale_dtype == ct.uint8:
        scale = scale_of(amax, LARGEST, True)
        stored = ((ct.bitcast(scale, ct.int32) >> 23) & 255).astype(ct.uint8)
    else:
        # An infinity times zero makes the scale NaN.
        stored = (ct.maximum(amax * (1.0 / LARGEST), LEAST_SCALE, propagate_nan=True) + amax * 0.0).astype(scale_dtype)
        scale = stored.astype(ct.float32)
    groups = groups.astype(ct.float32) * multiplier
    if dtype == ct.uint8:
        groups = groups * ct.truediv(1.0, scale, rounding_mode=APPROX, flush_to_zero=True)
        codes = _pairs_of(groups.reshape((M, N // 2, 2)))
    else:
        codes = codes_of(groups, scale, dtype).reshape((M, N))
    return codes, stored.reshape((M, N // GROUP))


def _pairs_of(x):
    """Bytes [M, N] of values [M, N, 2], rounded to e2m1.

    Times 2**-126 an e2m1 number is one of fp32, of which all but the first ten bits are zero.
    """
    M, N, _ = x.shape
    bits = ct.bitcast(ct.minimum(ct.abs(x), LARGEST_E2M1) * TINY, ct.int32)
    # To nearest, at a tie to the even code; the sign is that of the value.
    codes = (bits + 0x1FFFFF + ((bits >> 22) & 1)) >> 22 | ((ct.bitcast(x, ct.int32) >> 28) & 8)
    low, high = ct.extract(codes, (0, 0, 0), (M, N, 1)), ct.extract(codes, (0, 0, 1), (M, N, 1))
    return (low | high << 4).reshape((M, N)).astype(ct.uint8)


def scaled_operand(codes, scale):
    """A tile of an operand and its scales as `ct.mma_scaled` takes them."""
    ROWS, BYTES = codes.shape
    if scale.dtype == ct.uint8:
        scale = ct.bitcast(scale, ct.float8_e8m0fnu)
    if codes.dtype == ct.uint8:
        codes = ct.unpack_from_bytes(codes.reshape((ROWS * BYTES,)), ct.float4_e2m1fn).reshape((ROWS, 2 * BYTES))
    return codes, scale


def plain_operand(codes, scale):
    """The values of a tile in bf16, which has all their bits: a tile for each place that a code has
    in half of a 32-bit word, two of e4m3, four of pairs. Each has half as many columns as bytes.
    """
    wide = _wide_scale(scale)
    q = ct.unpack_from_bytes(ct.pack_to_bytes(codes), ct.int32)  # no instruction, as in _pairs
    q = q.reshape((codes.shape[0], codes.shape[1] // 4))
    if codes.dtype == ct.uint8:
        # A sign at bit 15 and the rest at bits 6 to 8 are value * 2**-126.
        found: tuple = ()
        for sign, rest in ct.static_iter(((q << 12, q << 6), (q << 8, q << 2), (q << 4, q >> 2), (q, q >> 6))):
            found = (*found, _times(_pairs(sign & SIGNS | rest & E2M1_REST) * 2.0**126, wide))
        return found
    even, odd = e4m3_planes(q, ct.bfloat16)
    return _times(_with_nan(even * 2.0**120), wide), _times(_with_nan(odd * 2.0**120), wide)


def _with_nan(x):
    """480, which stands where e4m3 has its NaN, as NaN: times this it is an infinity, and 448, the
    largest number, is finite.
    """
    return x * (1.125 * 2.0**119) * 0.0 + x


def _times(x, scale):
    (ROWS, N), GROUPS = x.shape, scale.shape[1]
    return (x.reshape((ROWS, GROUPS, N // GROUPS)) * scale.reshape((ROWS, GROUPS, 1))).reshape((ROWS, N))


def _wide_scale(scale):
    """bf16. An e8m0 byte is an exponent, 0 that of a number below the normal ones, 255 a NaN."""
    if scale.dtype == ct.uint8:
        byte = scale.astype(ct.int32)
        return ct.bitcast(ct.where(byte == 255, 0x7FC0, ct.where(byte == 0, 0x40, byte << 7)).astype(ct.uint16), ct.bfloat16)
    else:
        return scale.astype(ct.bfloat16)
