"""What 8-bit floating-point operands and their scales mean; shared by the matrix products.

    value = code * scale        out[i, j] = sum_k a[i, k] * sa(i, k) * b[j, k] * sb(j, k)

Codes are e4m3 or e5m2, scales fp32. The shape of a scale tensor says what each of its elements
belongs to (a [m, k]; b seen as [n, k]):

    kind     scale_a                scale_b
    TENSOR   []                     []                                one for the matrix
    ROW      [m]                    [n]                               one for each row
    BLOCK    [m, ceil(k / 128)]     [ceil(n / 128), ceil(k / 128)]    each 1x128 of a, 128x128 of b

A batch of matrices puts its axis in front; TENSOR may then also be [], one for all of them. Group
scales are best stored with stride 1 along the rows and the other stride a multiple of 4 elements
(`empty_scales`): the scales of a tile of rows are then one wide load. Any strides work.

A scale may be negative; zero makes its values zero, NaN makes them NaN (an infinity too, where it
meets a zero): no value is checked or clamped.
"""

from enum import IntEnum

import cuda.tile as ct
import torch
from torch import Tensor

from ...launch import FLOATS, argument_error, check_tensor, dtype_name
from .tiles import ZERO

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
GROUP = 128  # values that share a scale along k
LEAST_TMA = 4  # scales: 16 bytes, the least that TMA loads


class Scaling(IntEnum):
    """What an element of a scale tensor belongs to; see the module."""

    NONE = 0
    TENSOR = 1
    ROW = 2
    BLOCK = 3

    def __repr__(self) -> str:  # a case's id and a table key print it
        return self.name

    __str__ = __repr__


# The same for tile code, which knows no enums.
TENSOR, ROW, BLOCK = map(int, (Scaling.TENSOR, Scaling.ROW, Scaling.BLOCK))


def scale_shapes(
    scaling: Scaling, m: int, n: int, k: int, *, batch_a: int | None = None, batch_b: int | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of scale_a and scale_b. batch_a, batch_b: matrices of a batch; None for a single one,
    which has no batch axis.
    """
    groups, blocks = -(-k // GROUP), -(-n // GROUP)
    own_a, own_b = {Scaling.TENSOR: ((), ()), Scaling.ROW: ((m,), (n,)), Scaling.BLOCK: ((m, groups), (blocks, groups))}[scaling]
    return (own_a if batch_a is None else (batch_a, *own_a)), (own_b if batch_b is None else (batch_b, *own_b))


def scaling_of(
    a: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, m: int, n: int, k: int, *, batch_a: int | None = None, batch_b: int | None = None
) -> Scaling:
    """The scaling that two scale tensors describe, once they are checked.

    Args:
        a: an operand, for dtype and device.
        scale_a, scale_b: both or neither; see the module.
        m, n, k: of one product. batch_a, batch_b: matrices of a batch; None for a single one.
    Raises: TypeError or ValueError naming the scale, what it must be, and what it was.
    """
    if scale_a is None and scale_b is None:
        return Scaling.NONE
    if a.dtype not in FP8:
        name, given = ("scale_a", scale_a) if scale_a is not None else ("scale_b", scale_b)
        raise argument_error(name, f"None for {dtype_name(a.dtype)} operands", type(given).__name__)
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        _check_scale(a, name, scale)
    assert scale_a is not None
    assert scale_b is not None
    for scaling in (Scaling.TENSOR, Scaling.ROW, Scaling.BLOCK):
        if _fits(scale_a, scaling, batch_a):
            break
    else:
        raise argument_error("scale_a.shape", _allowed(0, m, n, k, batch_a, batch_b), tuple(scale_a.shape))
    expected = scale_shapes(scaling, m, n, k, batch_a=batch_a, batch_b=batch_b)
    for name, scale, shape in (("scale_a", scale_a, expected[0]), ("scale_b", scale_b, expected[1])):
        if tuple(scale.shape) != shape and not (scaling is Scaling.TENSOR and scale.dim() == 0):
            kinds = _allowed(int(name == "scale_b"), m, n, k, batch_a, batch_b)
            raise argument_error(f"{name}.shape", f"{shape} ({scaling.name}, by the axes of scale_a; allowed are {kinds})", tuple(scale.shape))
    return scaling


def stored_dtype(a: Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of a product of a, by default bf16 for 8-bit operands and else that of a. Raises
    ValueError for one that it cannot have.
    """
    allowed = FLOATS if a.dtype in FP8 else (a.dtype, torch.float32)
    if out_dtype is not None and out_dtype not in allowed:
        raise argument_error("out_dtype", "one of " + ", ".join(map(dtype_name, allowed)), out_dtype)
    return out_dtype or (torch.bfloat16 if a.dtype in FP8 else a.dtype)


FAST_SUM = 8192  # products that one sum of 14 bits may have


def most_fast(dtype: torch.dtype, out_dtype: torch.dtype) -> int:
    """Of how much k a sum may have the 14 bits that Hopper's tensor cores give 8-bit operands.

    They are enough under the rounding of a bf16 output, up to 8192 of k. At 16384 the worst element
    of 29 million is 1.25 of what the accuracy rule allows.
    """
    return FAST_SUM if dtype in FP8 and out_dtype is torch.bfloat16 else 0


def fast_sum(dtype: torch.dtype, out_dtype: torch.dtype, k: int) -> bool:
    """Whether all of k may be one such sum."""
    return k <= most_fast(dtype, out_dtype)


def known_scaling(scale_a: Tensor | None, batch_a: bool = False) -> Scaling:
    """The scaling of arguments that `scaling_of` let pass. batch_a: a is a batch."""
    return Scaling.NONE if scale_a is None else Scaling(1 + max(0, scale_a.dim() - batch_a))


def plain_scales(scale_a: Tensor | None, scale_b: Tensor | None) -> int:
    """Of scales by blocks: 0 if their strides let TMA load both, 1 if only those of a, else 2.
    Others: 0.
    """
    if scale_a is None or scale_b is None or scale_a.dim() != 2:
        return 0
    for left, scale in ((2, scale_a), (1, scale_b)):
        if scale.stride(0) != 1 or scale.stride(1) % LEAST_TMA:
            return left
    return 0


def _fits(scale: Tensor, scaling: Scaling, batch: int | None) -> bool:
    return scale.dim() == scaling - 1 + (batch is not None) or (scale.dim() == 0 and scaling is Scaling.TENSOR)


def _check_scale(a: Tensor, name: str, scale: Tensor | None) -> None:
    if scale is None:
        raise argument_error(name, "given together with the other operand's scale", None)
    check_tensor(scale, name, dtypes=(torch.float32,), any_strides=True, like=a)


def _allowed(which: int, m: int, n: int, k: int, batch_a: int | None, batch_b: int | None) -> str:
    kinds = (Scaling.TENSOR, Scaling.ROW, Scaling.BLOCK)
    return ", ".join(f"{kind.name} {scale_shapes(kind, m, n, k, batch_a=batch_a, batch_b=batch_b)[which]}" for kind in kinds)


def empty_scales(shape: tuple[int, ...], device: torch.device | str, *, scaling: Scaling) -> Tensor:
    """Uninitialised fp32 scales in the layout that kernels read best: those of BLOCK with stride 1
    along the rows.
    """
    if scaling is not Scaling.BLOCK:
        return torch.empty(shape, dtype=torch.float32, device=device)
    *batch, rows, groups = shape
    return torch.empty((*batch, groups, -(-rows // 4) * 4), dtype=torch.float32, device=device)[..., :rows].mT


def random_scales(shape: tuple[int, ...], device: torch.device | str, *, scaling: Scaling) -> Tensor:
    """Scales between 2**-4 and 2**-1, some of them negative, in the layout of `empty_scales`."""
    scale = empty_scales(shape, device, scaling=scaling)
    exponents = torch.rand(shape, device=device) * 3 - 4
    return scale.copy_(torch.where(torch.rand(shape, device=device) < 0.1, -1.0, 1.0) * torch.exp2(exponents))


def random_codes(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Normal random numbers in any dtype; PyTorch draws none in 8 bits."""
    if dtype not in FP8:
        return torch.randn(shape, dtype=dtype, device=device)
    return torch.randn(shape, dtype=torch.bfloat16, device=device).to(dtype)


def dequantize(x: Tensor, scale: Tensor | None) -> Tensor:
    """code * scale in plain torch: float64 for float64 codes, else fp32.

    Args:
        x: [..., rows, cols], codes.
        scale: a scale tensor of any kind for it (b as [n, k]), or None.
    Returns: [..., rows, cols].
    """
    wide = x if x.dtype is torch.float64 else x.float()
    if scale is None:
        return wide
    axes = scale.dim() - (x.dim() - 2)
    if axes <= 0:
        return wide * (scale if scale.dim() == 0 else scale[..., None, None])
    if axes == 1:
        return wide * scale[..., None]
    rows, cols = x.shape[-2:]
    each = scale.repeat_interleave(GROUP, -1)[..., :cols]
    if scale.shape[-2] != rows:
        each = each.repeat_interleave(GROUP, -2)[..., :rows, :]
    return wide * each


def torch_product(x: Tensor, w: Tensor, scale_a: Tensor | None, scale_b: Tensor | None) -> Tensor:
    """x @ w.mT of 8-bit matrices as PyTorch has it, for references: its own 8-bit product where
    there is one (e4m3 on CUDA), whose sums have the few bits that the tensor cores keep; elsewhere
    the fp32 product of the dequantised matrices, float64 for float64.

    Args: x [.., m, k], w [.., n, k] and their scales as in the module. Returns: [.., m, n], fp32 or
        float64.
    """
    if x.device.type != "cuda" or x.dtype is not torch.float8_e4m3fn:
        return torch.matmul(dequantize(x, scale_a), dequantize(w, scale_b).mT)
    if x.dim() == 3 or w.dim() == 3:
        batch = max(len(t) for t in (x, w) if t.dim() == 3)

        def of(tensor: Tensor | None, i: int) -> Tensor | None:
            return tensor if tensor is None or tensor.dim() == 0 else tensor[min(i, len(tensor) - 1)]

        return torch.stack([torch_product(x[min(i, len(x) - 1)], w[min(i, len(w) - 1)], of(scale_a, i), of(scale_b, i)) for i in range(batch)])
    blocks = scale_a is not None and scale_a.dim() == 2
    one = torch.ones((), device=x.device)
    total = torch.zeros(len(x), len(w), device=x.device)
    step = GROUP if blocks else x.shape[1]
    for group, k in enumerate(range(0, x.shape[1], step)):
        part = torch._scaled_mm(_padded(x[:, k : k + step]), _padded(w[:, k : k + step]).mT, one, one, out_dtype=torch.float32)
        part = part[: len(x), : len(w)]
        if blocks and scale_a is not None and scale_b is not None:
            part = part * scale_a[:, group, None] * scale_b[:, group].repeat_interleave(GROUP)[: len(w)]
        total += part
    if blocks or scale_a is None or scale_b is None:
        return total
    return total * (scale_a[:, None] if scale_a.dim() else scale_a) * scale_b


def _padded(x: Tensor) -> Tensor:
    """Padded with zeros to multiples of 16, as torch._scaled_mm needs; row-major."""
    pad = [-n % 16 for n in x.shape]
    return torch.nn.functional.pad(x.view(torch.uint8), (0, pad[1], 0, pad[0])).view(x.dtype).contiguous()


def scale_view(scale: Tensor, scaling: Scaling, batched: bool) -> Tensor:
    """The scales as the kernels take them, without a copy: [batch, groups, rows], axes that the
    kind lacks of length 1.
    """
    if scaling is Scaling.BLOCK:
        return scale.mT if batched else scale.mT[None]
    if scaling is Scaling.ROW:
        return scale[:, None] if batched else scale[None, None]
    return scale.view(-1, 1, 1)


def scale_views(scale_a: Tensor | None, scale_b: Tensor | None, batched: bool = False) -> tuple[Tensor | None, Tensor | None]:
    """Both operands' scales as the kernels take them; None stays None."""
    if scale_a is None or scale_b is None:
        return None, None
    scaling = known_scaling(scale_a, batched)
    return scale_view(scale_a, scaling, batched), scale_view(scale_b, scaling, batched)


# --- tile code. A scale array is what `scale_view` made; `batch` is the index of the matrix, `tile`
# that of the tile of WIDTH rows.


def add_product(x, w, acc, FAST_ACC):
    """acc + x @ w.

    FAST_ACC: the sum of 8-bit products may stay in the tensor core, with the bits it has (14 on
    Hopper).
    """
    if FAST_ACC:
        return ct.mma(x, w, acc, use_fast_acc=True)
    return ct.mma(x, w, acc)


def row_scales(scales, batch, tile, WIDTH, SCALING):
    """The scales of a tile of rows for the epilogue of TENSOR ([1]) or ROW ([WIDTH])."""
    if SCALING == ROW:
        return scales_from(scales, batch, tile * WIDTH, WIDTH)
    return ct.load(scales, (min(batch, scales.shape[0] - 1), 0, 0), (1, 1, 1), check_bounds=False, allow_tma=False).reshape((1,))


def scales_from(scales, batch, first, WIDTH):
    """[WIDTH] scales of rows from `first` on (ROW), zero behind the last; gathered: as in
    `load_masked`.
    """
    rows = first + ct.arange(WIDTH, dtype=ct.int32)
    return ct.gather(scales, (batch, 0, rows), mask=rows < scales.shape[2], padding_value=0, check_bounds=False)


def group_scales(scales, batch, group, tile, WIDTH, LATENCY, WHOLE=False, TMA=False):
    """[WIDTH] scales of a tile of a's rows in one group of k (BLOCK).

    LATENCY: the hint of the operands' loads in the same loop, 8 at best: with another one the
        compiler keeps two steps in flight instead of six.
    WHOLE: the tile lies inside; unchecked, the load costs a loop of 8 warps a tenth less (1037
        against 934 TFLOP/s, 4096 x 4096 x 7168, H200).
    TMA: they come as the operands do, where their strides allow it. A number that a thread loads is
        waited for one step later, however early it is asked for: the compiler passes it from step
        to step in registers.
    """
    if TMA:
        tile = ct.load(scales, (batch, group, tile), (1, 1, WIDTH), padding_mode=ZERO, latency=LATENCY)
    elif WHOLE:
        tile = ct.load(scales, (batch, group, tile), (1, 1, WIDTH), check_bounds=False, latency=LATENCY, allow_tma=False)
    else:
        tile = ct.load(scales, (batch, group, tile), (1, 1, WIDTH), padding_mode=ZERO, latency=LATENCY, allow_tma=False)
    return tile.reshape((WIDTH,))


def block_scales(scales, batch, group, tile, WIDTH, LATENCY, WHOLE=False, TMA=False):
    """[1], or [WIDTH] if the tile has more than one block: scales of a tile of b's rows in one
    group of k (BLOCK).

    WIDTH: a power of two. LATENCY, WHOLE, TMA: as in `group_scales`.
    """
    if TMA and WIDTH <= GROUP:
        block = tile // (GROUP // WIDTH)
        some = ct.load(scales, (batch, group, block // LEAST_TMA), (1, 1, LEAST_TMA), padding_mode=ZERO, latency=LATENCY).reshape((LEAST_TMA,))
        return ct.sum(ct.where(ct.arange(LEAST_TMA, dtype=ct.int32) == block % LEAST_TMA, some, 0.0), 0, keepdims=True)
    if WIDTH <= GROUP:
        index = (batch, group, tile // (GROUP // WIDTH))
        if WHOLE:
            return ct.load(scales, index, (1, 1, 1), check_bounds=False, latency=LATENCY, allow_tma=False).reshape((1,))
        return ct.load(scales, index, (1, 1, 1), latency=LATENCY, allow_tma=False).reshape((1,))
    shape = (1, 1, WIDTH // GROUP)
    if TMA:
        blocks = ct.load(scales, (batch, group, tile), shape, padding_mode=ZERO, latency=LATENCY)
    elif WHOLE:
        blocks = ct.load(scales, (batch, group, tile), shape, check_bounds=False, latency=LATENCY, allow_tma=False)
    else:
        blocks = ct.load(scales, (batch, group, tile), shape, padding_mode=ZERO, latency=LATENCY, allow_tma=False)
    return ct.broadcast_to(blocks.reshape((WIDTH // GROUP, 1)), (WIDTH // GROUP, GROUP)).reshape((WIDTH,))


def scaled(acc, rows, columns):
    """acc [i, j] * rows[i] * columns[j]; rows and columns may have length 1.

    The whole epilogue of TENSOR and ROW.
    """
    return acc * rows.reshape((rows.shape[0], 1)) * columns.reshape((1, columns.shape[0]))


def fresh_product(x, w):
    """x @ w of one group of k, from zero.

    The tensor core (with fewer bits than fp32 on Hopper) never sums more than a group, so the
    compiler need not cut the sum once more, which `use_fast_acc` tells it.
    """
    return ct.mma(x, w, ct.zeros((x.shape[0], w.shape[1]), dtype=ct.float32), use_fast_acc=True)


def add_scaled(acc, x, w, rows, columns):
    """acc + (x @ w) scaled: a step of BLOCK, in which x and w lie in one group of k."""
    # The scales first: where the tile has one block of b, that leaves one fused multiply-add for
    # each element.
    return acc + fresh_product(x, w) * (rows.reshape((rows.shape[0], 1)) * columns.reshape((1, columns.shape[0])))
