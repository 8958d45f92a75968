"""The accuracy rule. One function, used by tests, `tilewright verify`, the tuner and the benchmark.

Truth is the reference in float64. Beside it stands PyTorch's own result in the same dtype.
Ours must hold both
    RMS error     <= 2 * PyTorch's RMS error + eps/4 * RMS(truth)
    worst element <= 2 * PyTorch's worst error + 1 ulp of the truth there
A global score alone does not see one wrong 16x16 tile; the second line does.
"""

from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Accuracy:
    """How large the error of a result is.

    rms_ratio, worst_ratio: our error over what the rule allows; the rule holds where both are <= 1.

    worst_index, ours, truth: the element furthest over (or nearest to) its bound.
    """

    rms_ratio: float
    worst_ratio: float
    worst_index: tuple[int, ...]
    ours: float
    truth: float

    @property
    def ok(self) -> bool:
        return self.rms_ratio <= 1.0 and self.worst_ratio <= 1.0  # False for NaN

    def __str__(self) -> str:
        return (
            f"rms {self.rms_ratio:.2f} worst {self.worst_ratio:.2f} of the bound; "
            f"element {self.worst_index} is {self.ours:.9g}, truth {self.truth:.9g}"
        )


def accuracy(ours: Tensor, theirs: Tensor, truth: Tensor) -> Accuracy:
    """How far `ours` is from `truth`, in units of what the rule allows.

    Args:
        ours: the result under test, floating point, any shape.
        theirs: PyTorch's result, same shape and dtype. Or several results that
            differ only in rounding, stacked along a new first axis: the RMS error is that of all of
            them together, the worst error that of the worst.
        truth: the float64 result, same shape.
    Equal infinities count as no error; any other non-finite difference counts as an infinite error.
    """
    if ours.shape != truth.shape or truth.shape not in (theirs.shape, theirs.shape[1:]):
        raise ValueError(f"shapes must agree, got ours {tuple(ours.shape)}, theirs {tuple(theirs.shape)}, truth {tuple(truth.shape)}")
    if ours.dtype != theirs.dtype:
        raise ValueError(f"ours.dtype must be {theirs.dtype}, got {ours.dtype}")
    if truth.numel() == 0:
        return Accuracy(0.0, 0.0, (), 0.0, 0.0)
    # torch.ldexp (2.11) launches on the current GPU whatever its arguments' is: an illegal memory
    # access, or wrong bounds.
    with torch.cuda.device(truth.device) if truth.is_cuda else nullcontext():
        return _judged(ours, theirs, truth)


def _judged(ours: Tensor, theirs: Tensor, truth: Tensor) -> Accuracy:
    eps = torch.finfo(ours.dtype).eps
    error, their_error = _error(ours, truth), _error(theirs, truth)
    scale = torch.where(truth.isfinite(), truth, 0.0)
    rms_bound = 2 * _rms(their_error) + eps / 4 * _rms(scale)
    worst_bound = 2 * their_error.max() + _ulp(scale, ours.dtype)
    ratio = torch.where(error == 0, 0.0, error / worst_bound)
    worst = torch.where(ratio.isnan(), torch.inf, ratio).flatten().argmax()
    rms = _rms(error)
    # float64 holds every position; one copy, so that a GPU is waited for once
    there = [x.flatten()[worst].double() for x in (ratio, ours, truth)]
    rms_ratio, at, worst_ratio, own, true = torch.stack([torch.where(rms != 0, rms / rms_bound, 0.0), worst.double(), *there]).tolist()
    index = tuple(int(i) for i in np.unravel_index(int(at), truth.shape))  # torch's would import sympy
    return Accuracy(rms_ratio, worst_ratio, index, own, true)


def assert_accurate(ours: Tensor, theirs: Tensor, truth: Tensor, what: str = "result") -> Accuracy:
    """Raises AssertionError naming the worst element unless the accuracy rule holds."""
    found = accuracy(ours, theirs, truth)
    if not found.ok:
        raise AssertionError(f"{what}: {found}")
    return found


def _error(result: Tensor, truth: Tensor) -> Tensor:
    result = result.double()
    error = (result - truth).abs()
    error = torch.where(result == truth, 0.0, error)  # inf - inf
    return torch.where(error.isnan(), torch.inf, error)


def _rms(x: Tensor) -> Tensor:
    return x.square().mean().sqrt()


def _ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Spacing of `dtype` at |x|."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(x.abs().clamp(min=info.tiny))
    return torch.ldexp(torch.full_like(x, info.eps), exponent - 1)
