"""Formats of small weights: what a code, a scale and a zero point mean, and the words that
`quantized_matmul` reads.

    weight[n, k] = (value(code[n, k]) - zero[k / group, n]) * scale[k / group, n] * factor

    name            code   bits  group           scales       zero
    int4-G          0..15  4     32, 64, 128     bf16, fp16   8
    int4-G-zeros    0..15  4     32, 64, 128     bf16, fp16   bf16, fp16
    int8            bytes  8     a row           fp32         128
    int8-G          bytes  8     16, 32          fp16         128
    e4m3            e4m3   8     a row           fp32
    e4m3-128        e4m3   8     128 (x 128)     fp32
    mxfp4           e2m1   4     32              e8m0
    nvfp4           e2m1   4     16              bf16         and a factor of the matrix

Words are int32 [panels of 64 rows, runs, 64, 16], so that a panel's run, what one TMA load brings,
is 4 KB in a piece. A run is 128 weights of a row along k, or 64 of 8 bits. It has a plane of 32 for
each code of a half-word: word i, half h, plane j is k = 32 j + 2 i + h. `FIELDS` says where in a
half-word a plane's code lies. Rows and runs are filled up with zeros, and scales up to whole runs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...launch import argument_error, check_name, check_tensor
from ...launch.values import Claims, within

ROWS, WORDS = 64, 16  # of a panel: rows, and words of each row in a run
PLANE = 2 * WORDS  # k
INT4, INT8, E2M1, E4M3 = range(4)  # codes
Field = tuple[tuple[int, int], ...]  # (mask, shift to the left) of the parts of a code
# Of each plane. Two planes take turns in the bytes of a word. A mask, for some after a shift,
# leaves four e4m3 numbers (ops/common/weight_tiles.py); e2m1: a sign at bit 7 of a byte and the
# rest at bits 2 to 4 are value * 2**-6.
_BYTES: tuple[Field, ...] = (((0xFF, 0),), ((0xFF, 8),))
FIELDS: dict[int, tuple[Field, ...]] = {
    INT4: (((15, 0),), ((15, 8),), ((15, 4),), ((15, 12),)),
    INT8: _BYTES,
    E4M3: _BYTES,
    E2M1: (((7, 2), (8, 4)), ((7, 10), (8, 12)), ((3, 0), (4, 4), (8, 2)), ((3, 8), (4, 12), (8, 10))),
}
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_ENDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # where rounding changes; at every other one up, to an even code
LARGEST = {INT8: 127.0, E4M3: 448.0, E2M1: 6.0}
# Of the range of a group's weights: what the codes of 4 bits may span. The first one clips nothing.
SIZES = {INT4: (1.0, 1.07, 0.95, 0.9, 0.85, 0.8), E2M1: (1.0, 1.5, 0.9)}
SHORT = 32  # of groups: in longer ones the least squared error clips the few large weights that a model needs most
LEAST_K = 16  # k is a multiple of it, where there are no groups: rows of x begin at multiples of 32 bytes
LARGEST_E8M0 = 127 + 17  # 2**17: the kernel multiplies it by 2**110, in bf16


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One way to store weights.

    code: INT4, INT8, E2M1 or E4M3. group: weights along k that share a scale, 0 for a whole row.
        zeros: groups have zero points. blocks: so many rows share a scale too, when quantised.
    """

    name: str
    code: int
    group: int
    scale_dtype: torch.dtype
    zeros: bool = False
    factor: bool = False
    blocks: int = 1

    @property
    def bits(self) -> int:
        """Of a code."""
        return 16 // len(FIELDS[self.code])

    @property
    def run(self) -> int:
        """Weights of a row that lie in 16 words."""
        return PLANE * len(FIELDS[self.code])

    @property
    def multiple(self) -> int:
        """What k must be a multiple of."""
        return self.group or LEAST_K

    def shapes(self, n: int, k: int) -> tuple[tuple[int, ...], tuple[int, int]]:
        """Of the words, and of scales and zero points."""
        runs = -(-k // self.run)
        groups = runs * self.run // self.group if self.group and self.group < self.run else -(-k // self.group) if self.group else 1
        return (-(-n // ROWS), runs, ROWS, WORDS), (groups, n)

    def size_bytes(self, n: int, k: int) -> int:
        """Of a weight: words, scales and zero points."""
        (panels, runs, *_), (groups, _) = self.shapes(n, k)
        return 4 * panels * runs * ROWS * WORDS + groups * n * (self.scale_dtype.itemsize + 2 * self.zeros) + 4 * self.factor


_BF16, _FP32, _E8M0 = torch.bfloat16, torch.float32, torch.uint8
FORMATS = {
    of.name: of
    for of in (
        *(WeightFormat(f"int4-{group}", INT4, group, _BF16) for group in (128, 64, 32)),
        *(WeightFormat(f"int4-{group}-zeros", INT4, group, _BF16, zeros=True) for group in (128, 64, 32)),
        WeightFormat("int8", INT8, 0, _FP32),
        *(WeightFormat(f"int8-{group}", INT8, group, torch.float16) for group in (32, 16)),
        WeightFormat("e4m3", E4M3, 0, _FP32),
        WeightFormat("e4m3-128", E4M3, 128, _FP32, blocks=128),
        WeightFormat("mxfp4", E2M1, 32, _E8M0),
        WeightFormat("nvfp4", E2M1, 16, _BF16, factor=True),
    )
}


def format_named(name: str) -> WeightFormat:
    """Raises ValueError naming the known ones."""
    check_name("weight_format", FORMATS, name)
    return FORMATS[name]


def scale_claims(**scales: Tensor) -> Claims:
    """e8m0 scales are within what kernels multiply exactly."""
    for name, tensor in scales.items():
        yield from within(name, tensor if tensor.dtype is _E8M0 else None, 0, LARGEST_E8M0)


def check_k(k: int, of: WeightFormat) -> None:
    """Raises ValueError unless a row of k weights can have the format."""
    if k <= 0 or k % of.multiple:
        what = f"a multiple of {of.multiple}" + (f", the group of {of.name}" if of.group else f" for {of.name}")
        fitting = [other.name for other in FORMATS.values() if k > 0 and k % other.multiple == 0]
        others = f"formats for this k: {', '.join(fitting)}" if fitting else "no format takes this k"
        raise argument_error("k of the weight", f"{what} ({others})", k)


def step_weights(constants: Mapping[str, Any]) -> int:
    """How many weights a block decodes in a step, by a launch's constants; 0 if it decodes none."""
    if not {"code", "runs", "tile_n"} <= constants.keys():
        return 0
    parts = constants.get("parts", 2 if constants.get("first") else 1)
    return int(parts * constants["tile_n"] * constants["runs"] * PLANE * len(FIELDS[constants["code"]]))


# ---------------------------------------------------------------------------------- codes <-> words
def pack(codes: Tensor, of: WeightFormat) -> Tensor:
    """Codes [n, k] of any integer dtype, 0 to 2**bits - 1, as words [panels, runs, 64, 16]."""
    (n, k), fields = codes.shape, FIELDS[of.code]
    codes = F.pad(codes.to(torch.int32), (0, -k % of.run, 0, -n % ROWS))
    planes = codes.view(-1, ROWS, codes.shape[1] // of.run, len(fields), WORDS, 2).unbind(3)
    halves = torch.zeros_like(planes[0])
    for plane, field in zip(planes, fields, strict=True):
        for mask, shift in field:
            halves |= (plane & mask) << shift
    return (halves[..., 0] | (halves[..., 1] << 16)).transpose(1, 2).contiguous()


def unpack(words: Tensor, of: WeightFormat, n: int, k: int) -> Tensor:
    """The codes [n, k] of words, int32."""
    words = words.transpose(1, 2)  # [panels, 64, runs, 16]
    halves = torch.stack((words & 0xFFFF, (words >> 16) & 0xFFFF), -1)
    planes = [sum((halves >> shift) & mask for mask, shift in field) for field in FIELDS[of.code]]
    return torch.stack(planes, 3).reshape(words.shape[0] * ROWS, -1)[:n, :k]  # type: ignore[arg-type]  # no plane is the int 0


def values(codes: Tensor, of: WeightFormat, dtype: torch.dtype) -> Tensor:
    """What codes stand for, before scale and zero point."""
    if of.code == E4M3:
        return codes.to(torch.uint8).view(torch.float8_e4m3fn).to(dtype)
    if of.code == E2M1:
        table = torch.tensor((*E2M1_VALUES, *(-value for value in E2M1_VALUES)), dtype=dtype, device=codes.device)
        return table[codes.long()]
    return codes.to(dtype)


def dequantized(words: Tensor, scales: Tensor, zeros: Tensor | None, factor: Tensor | None, of: WeightFormat, k: int, dtype: torch.dtype) -> Tensor:
    """The weight [n, k], in float64 for float64, else rounded once to dtype."""
    wide = dtype if dtype is torch.float64 else torch.float32
    n = scales.shape[1]
    found = values(unpack(words, of, n, k), of, wide)

    def each(groups: Tensor) -> Tensor:
        return groups.to(wide).T.repeat_interleave(of.group, 1)[:, :k] if of.group else groups.to(wide).T

    zero = each(zeros) if zeros is not None else {INT4: 8.0, INT8: 128.0}.get(of.code, 0.0)
    scale = torch.exp2(scales.to(wide) - 127) if scales.dtype is _E8M0 else scales
    found = (found - zero) * each(scale)
    return (found if factor is None else found * factor.to(wide)).to(dtype)


# ----------------------------------------------------------------------------------------- rounding
def rounded(weight: Tensor, of: WeightFormat) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Codes [n, k], scales and zero points [groups, n], and the factor of a weight, rounded to
    nearest. Nothing is calibrated: a short group of 4 bits gets the one of a few scales (`SIZES`)
    that leaves the smallest sum of squared errors.
    """
    n, k = weight.shape
    groups, factor = weight.float().view(n, -1, of.group or k), None
    if of.factor:
        factor = (weight.float().abs().amax() / (LARGEST[E2M1] * LARGEST[E4M3])).clamp(min=2.0**-100).view(1)
    sizes = SIZES.get(of.code, (1.0,)) if 0 < of.group <= SHORT else (1.0,)
    codes, scale, zero, error = _rounded_at(sizes[0], groups, of, factor)
    for size in sizes[1:]:
        other_codes, other_scale, other_zero, other_error = _rounded_at(size, groups, of, factor)
        better = other_error < error
        codes, scale, error = (
            torch.where(better[..., None], other_codes, codes), torch.where(better, other_scale, scale), torch.where(better, other_error, error),
        )  # fmt: skip
        zero = None if zero is None or other_zero is None else torch.where(better, other_zero, zero)
    stored = (torch.log2(scale).round() + 127).to(torch.uint8) if of.scale_dtype is _E8M0 else scale.to(of.scale_dtype)
    return codes.view(n, k), stored.T.contiguous(), None if zero is None else zero.to(_BF16).T.contiguous(), factor


def _rounded_at(size: float, groups: Tensor, of: WeightFormat, factor: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Codes, scales as stored but in fp32, zero points, and the sum of squared errors, of a group:
    the last codes stand for `size` times its outermost weights, which may be clipped.
    """
    zero, offset = None, torch.zeros(())
    if of.zeros:
        low, high = size * groups.amin(2).clamp(max=0.0), size * groups.amax(2).clamp(min=0.0)
        scale = ((high - low) / 15).clamp(min=2.0**-100).to(of.scale_dtype).float()
        zero = (-low / scale).round().clamp(0, 15)
        offset = zero[..., None]
    elif of.code == INT4:  # the largest value is code 0, -8 steps from the zero point, so scales have its sign
        largest, offset = groups.gather(2, groups.abs().argmax(2, keepdim=True))[..., 0], torch.tensor(8.0)
        scale = torch.where(largest.abs() < 2.0**-100, 2.0**-100, size * -largest / 8).to(of.scale_dtype).float()
    else:
        scale = _scale_of(size * groups.abs().amax(2), of, factor)
    step = scale if factor is None else scale * factor
    scaled = groups / step[..., None]
    if of.code == INT4:
        codes = (scaled + offset).round().clamp(0, 15).to(torch.uint8)
    else:
        codes = nearest_codes(scaled, of.code)
    error = ((values(codes, of, torch.float32) - offset) - scaled).square().sum(2) * step.square()
    return codes, scale, zero, error


def _scale_of(largest: Tensor, of: WeightFormat, factor: Tensor | None) -> Tensor:
    """fp32 [n, groups], as stored: of groups whose largest value is the largest code."""
    if of.scale_dtype is _E8M0:
        return torch.exp2(torch.floor(torch.log2(largest.clamp(min=2.0**-100))) - 2)  # the largest code is 6: 2**2 and a fraction
    if of.blocks > 1:
        n = len(largest)
        padded = F.pad(largest, (0, 0, 0, -n % of.blocks)).view(-1, of.blocks, largest.shape[1])
        largest = padded.amax(1).repeat_interleave(of.blocks, 0)[:n]
    least = 2.0**-15 if of.scale_dtype is torch.float16 else 2.0**-100  # whose scale is not rounded to 0
    scale = largest.clamp(min=least) / LARGEST[of.code]
    if factor is not None:
        scale = (scale / factor).clamp(2.0**-9, LARGEST[E4M3]).to(torch.float8_e4m3fn)
    return scale.to(of.scale_dtype).float()


def nearest_codes(scaled: Tensor, code: int) -> Tensor:
    """Codes of values in units of their scale, saturating; at a tie even ones."""
    if code == E4M3:
        return scaled.clamp(-LARGEST[E4M3], LARGEST[E4M3]).to(torch.float8_e4m3fn).view(torch.uint8)
    if code == INT8:
        return (scaled.round().clamp(-127, 127) + 128).to(torch.uint8)
    size, found = scaled.abs(), torch.zeros_like(scaled, dtype=torch.uint8)
    for i, end in enumerate(E2M1_ENDS):
        found += size >= end if i % 2 else size > end
    return found | (scaled.signbit().to(torch.uint8) << 3)


# ----------------------------------------------------------------------------------------- a weight
@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantised weight [n, k], packed for `quantized_matmul`.

    weight_format: a name that `quantized_matmul` takes. k: of the weight.
    words: int32 [ceil(n / 64), runs, 64, 16], the codes of panels of 64 rows.
    scales, zeros: [groups along k, n], one group if a row has one scale. factor: fp32 [1], of
        nvfp4.
    """

    weight_format: str
    k: int
    words: Tensor
    scales: Tensor
    zeros: Tensor | None = None
    factor: Tensor | None = None

    @staticmethod
    def of(weight: Tensor, weight_format: str) -> "QuantizedWeight":
        """Packs a weight [n, k] of floats, rounded to nearest without calibration.

        Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
        """
        of = format_named(weight_format)
        check_tensor(weight, "weight", ndim=2, dtypes=(torch.bfloat16, torch.float16, torch.float32))
        check_k(weight.shape[1], of)
        if not len(weight):
            raise argument_error("weight.shape[0]", "at least 1", 0)
        if not bool(weight.isfinite().all()):
            raise argument_error("weight", "finite", "a NaN or an infinity")
        return QuantizedWeight.packed(*rounded(weight, of), weight_format=weight_format)

    @staticmethod
    def packed(codes: Tensor, scales: Tensor, zeros: Tensor | None = None, factor: Tensor | None = None, *, weight_format: str) -> "QuantizedWeight":
        """Packs codes [n, k] with scales and zero points [groups, n], such as those of a
        checkpoint.
        """
        of = format_named(weight_format)
        n, k = codes.shape
        check_k(k, of)
        shape = (k // of.group if of.group and k % of.group == 0 else 1, n)
        for name, tensor in (("scales", scales), ("zeros", zeros)):
            if tensor is not None and tuple(tensor.shape) != shape:
                raise argument_error(f"{name}.shape", f"{shape} for {of.name} codes {(n, k)}", tuple(tensor.shape))
        if of.code == E4M3 and bool(((codes & 0x7F) == 0x7F).any()):
            raise argument_error("codes", "finite", "a NaN of e4m3")
        if of.scale_dtype is _E8M0 and scales.numel() and int(scales.max()) > LARGEST_E8M0:
            raise argument_error("scales", f"at most 2**{LARGEST_E8M0 - 127}", f"2**{int(scales.max()) - 127}")
        more = (0, 0, 0, of.shapes(n, k)[1][0] - shape[0])
        zeros = None if zeros is None else F.pad(zeros, more).contiguous()
        return QuantizedWeight(weight_format, k, pack(codes, of), F.pad(scales, more).contiguous(), zeros, factor)

    @property
    def n(self) -> int:
        """Rows."""
        return self.scales.shape[1]

    @property
    def arguments(self) -> dict[str, Any]:
        """The keywords of `quantized_matmul` that it is."""
        return {"words": self.words, "scales": self.scales, "zeros": self.zeros, "factor": self.factor, "weight_format": self.weight_format}

    @property
    def size_bytes(self) -> int:
        """Of all its tensors."""
        tensors = (self.words, self.scales, self.zeros, self.factor)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The weight [n, k] that the codes stand for, rounded once."""
        return dequantized(self.words, self.scales, self.zeros, self.factor, format_named(self.weight_format), self.k, dtype)

    def error(self, weight: Tensor) -> float:
        """The root mean square of the difference from `weight`, over that of `weight`."""
        truth = weight.double()
        return float(((self.dequantize(torch.float64) - truth).square().mean() / truth.square().mean()).sqrt())

    def cut(self, axis: int, spans: Sequence[tuple[int, int]]) -> "QuantizedWeight":
        """The weight of some rows (axis 0), or of some columns (1) that are whole groups.

        spans: the first and the number of each stretch of them, in order.
        """
        of = format_named(self.weight_format)

        def kept(x: Tensor, axis: int, each: int = 1) -> Tensor:
            return torch.cat([x.narrow(axis, first // each, count // each) for first, count in spans], axis)

        groups = [None if x is None else x[: self.k // (of.group or self.k)] for x in (self.scales, self.zeros)]
        if axis == 0 or of.group:
            groups = [None if x is None else kept(x, 1 - axis, of.group if axis else 1) for x in groups]
        assert groups[0] is not None
        codes = kept(unpack(self.words, of, self.n, self.k), axis)
        return QuantizedWeight.packed(codes, groups[0], groups[1], self.factor, weight_format=of.name)

    def to(self, device: torch.device | str) -> "QuantizedWeight":
        """The same on another device."""
        zeros, factor = (None if t is None else t.to(device) for t in (self.zeros, self.factor))
        return QuantizedWeight(self.weight_format, self.k, self.words.to(device), self.scales.to(device), zeros, factor)


def check_weight(words: Tensor, scales: Tensor, zeros: Tensor | None, factor: Tensor | None, of: WeightFormat, x: Tensor) -> None:
    """Raises TypeError or ValueError unless these are a weight of a format that fits rows of x."""
    k = x.shape[-1]
    check_k(k, of)
    check_tensor(scales, "scales", ndim=2, dtypes=(of.scale_dtype, torch.float16) if of.code == INT4 else (of.scale_dtype,), like=x)
    shape_words, shape_scales = of.shapes(scales.shape[1], k)
    check_tensor(words, "words", shape=shape_words, dtypes=(torch.int32,), like=x)
    check_tensor(scales, "scales", shape=shape_scales)
    for name, tensor, wanted in (("zeros", zeros, of.zeros), ("factor", factor, of.factor)):
        if (tensor is not None) != wanted:
            raise argument_error(name, f"{'given' if wanted else 'None'} for {of.name}", "None" if tensor is None else "a tensor")
    if zeros is not None:
        check_tensor(zeros, "zeros", shape=shape_scales, dtypes=(torch.bfloat16, torch.float16), like=x)
    if factor is not None:
        check_tensor(factor, "factor", shape=(1,), dtypes=(torch.float32,), like=x)
