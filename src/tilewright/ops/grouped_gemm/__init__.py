"""Products of groups of rows, each group with its own matrix: out[rows of g] = a[rows of g] @ b[g]

Source    The expert layers of a mixture of experts. Both forms, contiguous and masked, and the
          sizes that count, after DeepGEMM (2025); scaled 8-bit operands after DeepSeek-V3 2024,
          arXiv:2412.19437, section 3.3 (ops/common/scaling.py says what scales mean).
Numerics  Products and sums in fp32, rounded once. Scales of a tensor or row multiply the sum;
          scales of a group the sum over its 128 values, which starts from zero. Hopper's tensor
          cores sum 8-bit operands with about 14 bits: see `matmul`.
Bound     Compute from a few hundred rows a group on; below that memory: every matrix that has rows
          is read once.

A first launch turns the sizes of the groups, which only the device knows, into a list of panels of
rows; the second computes the tiles of each.
"""

from collections.abc import Sequence
from typing import Optional

import torch
from torch import Tensor

from ...launch import HALVES, Device, argument_error, check_bools, check_integers, check_near, check_tensor, out_or_new, torch_op
from ...launch.values import Claims, rising, within
from ..common.scaling import FP8, Scaling, dequantize, known_scaling, scale_view, scaling_of, stored_dtype
from .decision import CHOICES as CHOICES, Config as Config, Problem as Problem, plan as plan, space as space
from .lists import grouped_gemm_list_out

MOST_GROUPS = 1024


def reference(
    a: Tensor,
    b: Tensor,
    offsets: Tensor | None = None,
    counts: Tensor | None = None,
    *,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    trans_b: bool = False,
    out_dtype: torch.dtype | None = None,
    expected_rows: int | None = None,
) -> Tensor:
    """The definition, a product for each group, on the dequantised operands. Rows of no group are
    zero.
    """
    b = b if trans_b else b.mT
    out_dtype = a.dtype if a.dtype is torch.float64 else out_dtype or (torch.bfloat16 if a.dtype in FP8 else a.dtype)
    plain = a.dtype is out_dtype and scale_a is None
    if not plain:
        a, b = dequantize(a, scale_a), dequantize(b, scale_b)
    out = a.new_zeros((*a.shape[:-1], b.shape[-2]), dtype=out_dtype)
    start = 0
    for group, end in enumerate(_one_of(offsets, counts).tolist()):
        if counts is None:
            out[start:end] = (a[start:end] @ b[group].mT).to(out_dtype)
            start = end
        else:
            out[group, :end] = (a[group, :end] @ b[group].mT).to(out_dtype)
    return out


def _one_of(offsets: Tensor | None, counts: Tensor | None) -> Tensor:
    if (offsets is None) == (counts is None):
        raise argument_error("offsets or counts", "given, but not both", "neither" if offsets is None else "both")
    return offsets if offsets is not None else counts  # type: ignore[return-value]


def comparable(result: Tensor, *, offsets: Tensor | None = None, counts: Tensor | None = None, **inputs) -> Tensor:
    """The result with the rows of no group, which nobody writes, zero."""
    row = torch.arange(result.shape[-2], device=result.device)
    sizes = _one_of(offsets, counts)
    ends = sizes[-1] if counts is None else sizes[:, None]
    return torch.where((row < ends)[..., None], result, 0)


ARGUMENTS = ("a", "b", "sizes", "scale_a", "scale_b", "out", "rows")
DECISION = CHOICES.decision(Problem, plan, ARGUMENTS)


def _claims(a: Tensor, offsets: Tensor | None, counts: Tensor | None) -> Claims:
    yield from rising("offsets", offsets, a.shape[-2])
    yield from within("counts", counts, 0, a.shape[-2])


@torch_op(mutates=("out",), claims=_claims)
def grouped_gemm_out(
    a: Tensor,
    b: Tensor,
    offsets: Optional[Tensor],
    counts: Optional[Tensor],
    scale_a: Optional[Tensor],
    scale_b: Optional[Tensor],
    trans_b: bool,
    expected_rows: int,
    out: Tensor,
) -> None:
    """`grouped_gemm` into `out` [.., n]. No checks, no sync: safe under graph capture, and a replay
    follows new offsets or counts.
    """
    masked = counts is not None
    scaling = known_scaling(scale_a, masked)
    launches = DECISION.launches(
        Device.of(a),
        groups=b.shape[0],
        rows=a.shape[-2],
        n=out.shape[-1],
        k=a.shape[-1],
        dtype=a.dtype,
        masked=masked,
        trans_b=trans_b,
        scaling=scaling,
        out_dtype=out.dtype,
        expected_rows=expected_rows,
    )
    scale_a = None if scale_a is None else scale_view(scale_a, scaling, masked)
    scale_b = None if scale_b is None else scale_view(scale_b, scaling, True)
    if not masked:
        a, out = a[None], out[None]
    launches.run(a, b, _one_of(offsets, counts), scale_a, scale_b, out, a.shape[1])


def grouped_gemm(
    a: Tensor,
    b: Tensor,
    offsets: Tensor | None = None,
    counts: Tensor | None = None,
    *,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    trans_b: bool = False,
    out_dtype: torch.dtype | None = None,
    expected_rows: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Multiplies each group of rows by its own matrix. The sizes of the groups stay on the device.

    With `offsets` the groups follow each other, as in torch._grouped_mm. With `counts` each group
    has max_rows rows, and those past its count are neither used nor written. Exactly one of the two
    must be given.

    Args:
        a: [rows, k] with offsets, [groups, max_rows, k] with counts; bf16, fp16, float8_e4m3fn or
            float8_e5m2; stride 1 in the last axis.
        b: [groups, k, n], or [groups, n, k] if trans_b; dtype and device of a, stride 1 in the last
            axis. At most 1024 groups.
        offsets: int32 [groups], the end of each group, never decreasing. Groups may be empty. Rows
            from the last offset on belong to no group.
        counts: int32 [groups], rows of each group that are used.
        scale_a: fp32, 8-bit operands only: [], [rows] or [rows, ceil(k / 128)]; with counts []
            or [groups], [groups, max_rows] or [groups, max_rows, ceil(k / 128)].
        scale_b: fp32, of the same kind: [groups] or [], [groups, n], or [groups, ceil(n / 128),
            ceil(k / 128)].
        trans_b: b is stored transposed, as weights are; 8-bit operands are fastest so.
        out_dtype: bf16, fp16 or fp32; by default the dtype of a, bf16 for 8-bit operands.
        expected_rows: the average number of rows per group, if the host knows roughly. It only
            affects the choice of tiles.
        out: where the result goes: contiguous, shape, dtype and device of the result, no element in
            common with an input; default a new tensor.
    Returns: [rows, n] or [groups, max_rows, n], contiguous. Rows of no group are not written.
        Offsets that decrease or exceed the rows are clipped, so nothing outside is touched. This
        raises no error, because only the device reads them.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was.
    """
    check_bools(trans_b=trans_b)
    out_dtype = _out_dtype(a, out_dtype)
    check_tensor(b, "b", ndim=3, like=a)
    sizes = _one_of(offsets, counts)
    masked = counts is not None
    check_tensor(a, "a", ndim=3 if masked else 2)
    groups = b.shape[0]
    n, k = b.shape[1:] if trans_b else (b.shape[2], b.shape[1])
    if a.shape[-1] != k:
        raise argument_error("a.shape[-1]", f"{k}, the k of b {tuple(b.shape)}", a.shape[-1])
    if not 1 <= groups <= MOST_GROUPS:
        raise argument_error("b.shape[0]", f"1 to {MOST_GROUPS}, the number of groups", groups)
    if masked and a.shape[0] != groups:
        raise argument_error("a.shape[0]", f"{groups}, the groups of b", a.shape[0])
    name = "counts" if masked else "offsets"
    check_tensor(sizes, name, shape=(groups,), dtypes=(torch.int32,), like=a)
    if expected_rows is not None:
        check_integers(expected_rows=expected_rows)
        if expected_rows < 1:
            raise argument_error("expected_rows", "None or at least 1", expected_rows)
    scaling_of(a, scale_a, scale_b, a.shape[-2], n, k, batch_a=groups if masked else None, batch_b=groups)
    out = out_or_new(out, (*a.shape[:-1], n), out_dtype, a, b, sizes, scale_a, scale_b)
    if out.numel() == 0:
        return out
    if k == 0:
        return out.zero_()
    grouped_gemm_out(a, b, offsets, counts, scale_a, scale_b, trans_b, expected_rows or 0, out)
    return out


def grouped_gemm_list(
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    *,
    scale_a: Sequence[Tensor] | None = None,
    scale_b: Sequence[Tensor] | None = None,
    trans_b: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Multiplies pairs of matrices of any shapes in one launch, without concatenating them.

    The host lists the tiles of all products and copies the list to the device. So a CUDA graph
    cannot capture it; it can capture `grouped_gemm`.

    Args:
        a: [m, k] each; bf16, fp16, float8_e4m3fn or float8_e5m2, all the same; stride 1 in the last
            axis.
        b: as many matrices as a: [k, n] each, or [n, k] if trans_b; dtype and device of a, stride 1
            in the last axis.
        scale_a, scale_b: fp32, 8-bit operands only, one for each matrix and all of one kind: [],
            [m] and [n], or [m, ceil(k / 128)] and [ceil(n / 128), ceil(k / 128)].
        trans_b: the matrices of b are stored transposed.
        out_dtype: bf16, fp16 or fp32; by default the dtype of a, bf16 for 8-bit operands.
        out: where the results go, one tensor for each product: contiguous, shape, dtype and device
            of the result, no element in common with an input or another; default new tensors.
    Returns: a list of [m, n], contiguous. A product without rows or columns is empty; with k = 0 it
        is zero.
    Raises: TypeError or ValueError naming the argument, what it must be, and what it was; also
        under graph capture.
    """
    check_bools(trans_b=trans_b)
    for name, given in (("a", a), ("b", b), ("scale_a", scale_a), ("scale_b", scale_b), ("out", out)):
        if not isinstance(given, (list, tuple)) and (given is not None or name in ("a", "b")):
            raise TypeError(f"{name} must be a list or tuple of tensors, got {type(given).__name__}")
    if not a:
        raise argument_error("len(a)", "at least 1", 0)
    for name, others in (("b", b), ("scale_a", scale_a), ("scale_b", scale_b), ("out", out)):
        if others is not None and len(others) != len(a):
            raise argument_error(f"len({name})", len(a), len(others))
    scales_a, scales_b = ([None] * len(a) if s is None else s for s in (scale_a, scale_b))
    out_dtype = _out_dtype(a[0], out_dtype)
    kinds: set[Scaling] = set()
    results: list[Tensor] = []
    for i, (x, w, sa, sb) in enumerate(zip(a, b, scales_a, scales_b, strict=True)):
        check_tensor(x, f"a[{i}]", ndim=2, like=a[0])
        check_tensor(w, f"b[{i}]", ndim=2, like=a[0])
        check_near(x, f"a[{i}]")
        check_near(w, f"b[{i}]")
        n, k = w.shape if trans_b else (w.shape[1], w.shape[0])
        if x.shape[1] != k:
            raise argument_error(f"a[{i}].shape[1]", f"{k}, the k of b[{i}] {tuple(w.shape)}", x.shape[1])
        kinds.add(scaling_of(x, sa, sb, x.shape[0], n, k))
        into, others = (out[i], (*a, *b, *scales_a, *scales_b, *results)) if out is not None else (None, ())
        results.append(out_or_new(into, (x.shape[0], n), out_dtype, x, *others, name=f"out[{i}]"))
    if len(kinds) > 1:
        raise argument_error("scale_a", "of one kind for all products", ", ".join(sorted(map(str, kinds))))
    work = [i for i, result in enumerate(results) if result.numel() and a[i].shape[1]]
    for i in set(range(len(a))) - set(work):
        results[i].zero_()
    if work:

        def chosen(tensors: Sequence[Tensor]) -> list[Tensor]:
            return [tensors[i] for i in work]

        grouped_gemm_list_out(chosen(a), chosen(b), *(chosen(scales) if scales else [] for scales in (scale_a, scale_b)), trans_b, chosen(results))
    return results


def _out_dtype(a: Tensor, out_dtype: torch.dtype | None) -> torch.dtype:
    """Checks the dtypes of a and of the result, and returns the latter."""
    check_tensor(a, "a", dtypes=(*HALVES, *FP8))
    return stored_dtype(a, out_dtype)
