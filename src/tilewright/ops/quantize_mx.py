"""Block-scaled codes, for `mx_matmul`: value = code * scale, a scale of 8 bits for 16 or 32 values

ops/common/mx.py has the formats: mxfp8, mxfp4 and nvfp4.

Source    OCP Microscaling Formats 1.0, 2023; scales rounded up, so that nothing saturates: Mishra
          et al. 2025, arXiv:2506.08027. nvfp4: NVIDIA 2025, arXiv:2509.25149.
Numerics  Scales from the largest magnitude of a group, in fp32, rounded once: up to a power of two,
          or to the nearest e4m3. Values are multiplied by their reciprocals in fp32 and rounded
          once, to nearest even. A group with a NaN or an infinity has a NaN for its scale.
Bound     Memory: x read once, codes and scales written once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Optional

import cuda.tile as ct
import torch
from torch import Tensor

from ..launch import FLOATS, Cost, Device, Launch, argument_error, as_rows, check_tensor, each_out, out_or_new, torch_op
from ..select import Choices, Work
from .common import rows
from .common.mx import MX_FORMATS, MxFormat, bits_of, check_factor, dequantized, mx_codes, mx_named, quantized
from .common.rows import Config
from .common.tiles import each_tile, load_masked, of_width


def reference(x: Tensor, *, mx_format: str = "mxfp8", factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The definition, at least in fp32. In float64 the codes are not rounded."""
    from ..interpret.denormals import denormals_kept  # loaded with the first definition, not by the import

    with denormals_kept():
        return quantized(x.to(torch.promote_types(x.dtype, torch.float32)), MX_FORMATS[mx_format], factor)


def comparable(result: tuple[Tensor, Tensor], **inputs: Any) -> tuple[Tensor, Tensor]:
    """What the accuracy rule can judge: the values that the codes stand for, and the scales."""
    codes, scale = result
    return dequantized(codes, scale), scale if scale.dtype is torch.float64 else scale.float()


@dataclass(frozen=True, slots=True)
class Problem:
    """Codes of x [rows, cols]. factor: one is given."""

    rows: int
    cols: int
    dtype: torch.dtype = torch.bfloat16
    mx_format: str = "mxfp8"
    factor: bool = False

    @property
    def format(self) -> MxFormat:
        """What its name stands for."""
        return MX_FORMATS[self.mx_format]

    def cost(self) -> Cost:
        n = self.rows * self.cols
        return Cost(size_bytes=n * self.dtype.itemsize + self.format.size_bytes(self.rows, self.cols), flops=3 * n)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        x = torch.randn(self.rows, self.cols, device=device) * torch.exp2(2 * torch.randn(self.rows, 1, device=device))
        return {"x": x.to(self.dtype), "mx_format": self.mx_format, "factor": torch.full((), 0.0625, device=device) if self.factor else None}


def candidates(p: Problem, device: Device) -> Iterator[Config]:
    """Tiles of whole groups."""
    return rows.tile_candidates(p, device, grouped=True)


def legal(p: Problem, c: Config, device: Device) -> bool:
    """Whether registers hold a thread's share of a tile, and the device has 8-bit floats."""
    return device.has_fp8 and rows.tile_legal(p, c, device)


def work(p: Problem, c: Config, device: Device) -> Work:
    """Of tiles."""
    return rows.tile_work(p, c, device)


def family(p: Problem, c: Config) -> str:
    """The format, and the tile."""
    return f"{p.mx_format} {rows.tile_family(p, c)}"


CHOICES = Choices("quantize_mx", candidates, legal, work, family, tie=rows.TILE_TIE, like="quantize_fp8", bucket=rows.coarse)
space = CHOICES.space


def plan(p: Problem, c: Config, device: Device) -> tuple[Launch, ...]:
    """One launch."""
    constants = {"group": p.format.group, "largest": p.format.largest, "factored": p.factor}
    return (Launch.of(quantize_mx_kernel, c.blocks(rows.tiles(p, c), device), p, c, constants, optional={"factor": p.factor}),)


DECISION = CHOICES.decision(Problem, plan, ("x", "factor", "codes", "scale"))


@ct.kernel
def quantize_mx_kernel(
    X,
    FACTOR,
    CODES,
    SCALE,
    GROUP: ct.Constant[int],
    LARGEST: ct.Constant[int],
    FACTORED: ct.Constant[bool],
    PERSISTENT: ct.Constant[bool],
    COLS: ct.Constant[int],
    TILE_M: ct.Constant[int],
    TILE_N: ct.Constant[int],
    LATENCY: ct.Constant[int],
    LOAD_TMA: ct.Constant[bool],
    STORE_TMA: ct.Constant[bool],
):
    """X: [rows, COLS]; CODES: [rows, COLS], or COLS / 2 pairs; SCALE: [rows, COLS / GROUP], e8m0 as
    bytes; FACTOR: [1], read only if FACTORED.
    """
    X = of_width(X, COLS)

    def compute(i, j, whole):
        x = load_masked(X, (i, j), (TILE_M, TILE_N), ct.PaddingMode.ZERO, whole, LATENCY, LOAD_TMA)
        multiplier = 1.0 / ct.load(FACTOR, (0,), (1,), allow_tma=False).reshape((1, 1, 1)) if FACTORED else 1.0
        codes, scale = mx_codes(x, multiplier, GROUP, LARGEST, CODES.dtype, SCALE.dtype)
        ct.store(CODES, (i, j), codes, check_bounds=not whole, allow_tma=STORE_TMA)
        ct.store(SCALE, (i, j), scale, check_bounds=not whole, allow_tma=False)

    each_tile(compute, X, COLS, PERSISTENT, TILE_M, TILE_N, False)


@torch_op(mutates=("codes", "scale"))
def quantize_mx_out(x: Tensor, factor: Optional[Tensor], mx_format: str, codes: Tensor, scale: Tensor) -> None:
    """`quantize_mx` of rows x; e8m0 scales as bytes, since Inductor hands no such tensor to an op.
    No checks, no sync: safe under graph capture.
    """
    launches = DECISION.launches(Device.of(x), rows=x.shape[0], cols=x.shape[1], dtype=x.dtype, mx_format=mx_format, factor=factor is not None)
    launches.run(x, None if factor is None else factor.view(1), codes, scale)


def quantize_mx(
    x: Tensor, *, mx_format: str = "mxfp8", factor: Tensor | None = None, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """Rounds x to codes of 8 or 4 bits with a scale for each 32 or 16 values of a row: x is about
    codes * scale (* factor).

    Args:
        x: [..., k]; bf16, fp16 or fp32; stride 1 in the last axis; k a multiple of 32, of 16 for
            nvfp4. Copied if its leading axes do not fold into one.
        mx_format: mxfp8 (e4m3 codes), mxfp4 or nvfp4 (e2m1 codes, two in a byte).
        factor: fp32 [] on x's device, positive, only for nvfp4: x / factor is rounded; default 1.
            max |x| / 2688 uses the whole range of the scales. With 1, a group whose largest value
            is below 0.09 has a scale of fewer bits.
        out: where the result goes: (codes, scale), both contiguous, no element in common with an
            input or each other; default new tensors.
    Returns: (codes, scale): codes [..., k] float8_e4m3fn, or [..., k / 2] uint8, the first of a
        pair in the low bits; scale [..., k / 32] float8_e8m0fnu, or [..., k / 16] float8_e4m3fn. A
        group with a NaN or an infinity has NaN for its scale.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    of = mx_named(mx_format)
    check_tensor(x, "x", dtypes=FLOATS)
    if x.dim() == 0 or x.shape[-1] % of.group:
        raise argument_error("x.shape", f"[.., k] with k a multiple of {of.group}, the group of {of.name}", tuple(x.shape))
    if factor is not None:
        if of.name != "nvfp4":
            raise argument_error("factor", f"None for {of.name}", "a tensor")
        check_factor(factor, x, "factor")
    codes, scale = each_out(out, "codes", "scale")
    codes = out_or_new(codes, (*x.shape[:-1], of.row_bytes(x.shape[-1])), of.dtype, x, factor, name="out[0]")
    shape = (*x.shape[:-1], x.shape[-1] // of.group)
    if scale is None:
        stored = x.new_empty(shape, dtype=of.stored_dtype)
    else:
        stored = bits_of(out_or_new(scale, shape, of.scale_dtype, x, factor, codes, name="out[1]"))
    if codes.numel():
        quantize_mx_out(as_rows(x), factor, of.name, as_rows(codes), as_rows(stored))
    return codes, stored.view(of.scale_dtype) if scale is None else scale
