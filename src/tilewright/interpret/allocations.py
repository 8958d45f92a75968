"""Tracks which elements of a tensor were written, to find reads that come too early and outputs
that are never written.
"""

import sys
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from .arrays import Array, Buffer, all_offsets
from .errors import KernelError
from .regions import Region


class Unwritten:
    """The elements of a marked tensor that nobody has written yet.

    early: reading one of them is an error. missing: it is an error if any remain at the end.
    name: of the kernel's parameter that may write the tensor; empty until a launch has one.
    """

    def __init__(self, tensor: torch.Tensor, *, early: bool, missing: bool):
        self.tensor = tensor  # kept alive, so that its address stays its own
        self.early, self.missing, self.name = early, missing, ""
        self.region = Region.of(Buffer(tensor, ""))
        self.written = np.zeros(self.region.size, bool)

    def overlaps(self, buffer: Buffer) -> bool:
        start = buffer.address
        return start < self.region.end and self.region.start < start + buffer.flat.size * buffer.window.itemsize

    def access(self, buffer: Buffer, offset: np.ndarray, kind: str) -> None:
        units = self.region.units(buffer, offset)
        inside = (units >= 0) & (units < self.region.size)
        units = units[inside]
        if kind == "write" or (kind == "atomic" and not self.early):
            self.written[units] = True
        elif self.early and not self.written[units].all():
            first = int(offset.reshape(-1)[np.flatnonzero(inside)[~self.written[units]][0] // (inside.size // offset.size)])
            count = int((~self.written[units]).sum())
            raise KernelError(f"{kind} of uninitialised memory: element {buffer.index(first)} of {buffer} ({count} such elements in this access)")

    def is_output(self) -> bool:
        """Whether somebody besides this check still holds the memory."""
        storage = self.tensor.untyped_storage()
        uses: int = torch._C._storage_Use_Count(storage._cdata)
        return uses > 2 or sys.getrefcount(self.tensor) > 2  # the tensor and `storage`; the attribute and the argument

    def require_written(self) -> None:
        buffer = Buffer(self.tensor, self.name or "a tensor that no kernel was given")
        own = all_offsets(Array.argument(buffer))
        left = ~self.written[own]
        if left.any():
            first = tuple(int(i) for i in np.argwhere(left)[0])
            raise KernelError(f"never written: {int(left.sum())} of {left.size} elements of {buffer}, the first of them {first}")


class Allocations(TorchFunctionMode):
    """Marks what torch.empty and similar functions return while the mode is on, if `early` or
    `missing` is given.

    Elements that PyTorch itself writes later count as written.
    """

    FRESH = (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty, torch.Tensor.new_empty_strided)
    DRAWN = ("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_")  # write every element

    def __init__(self, marks: list[Unwritten], *, early: bool, missing: bool):
        super().__init__()
        self.marks, self.early, self.missing = marks, early, missing

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in self.FRESH:
            result = func(*args, **kwargs)
            if (self.early or self.missing) and result.device.type == "cpu" and result.numel():
                self.marks.append(Unwritten(result, early=self.early, missing=self.missing))
            return result
        written = self._written(func, args, kwargs)
        result = func(*args, **kwargs)
        for buffer, own in written:
            for mark in self.marks:
                if mark.overlaps(buffer):
                    mark.access(buffer, own, "write")
        return result

    def _written(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Buffer, np.ndarray]]:
        """The tensors that a call writes, each with the offsets of the written elements."""
        out = kwargs.get("out")
        if out is not None:
            tensors = out if isinstance(out, (tuple, list)) else (out,)
            buffers = [Buffer(t, "") for t in tensors if t.device.type == "cpu" and t.numel()]
            return [(buffer, all_offsets(Array.argument(buffer))) for buffer in buffers]
        name = getattr(func, "__name__", "")
        target = args[0] if args else None
        if not isinstance(target, torch.Tensor) or not (name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))):
            return []
        if target.device.type != "cpu" or not target.numel():
            return []
        buffer = Buffer(target, "")
        if not any(mark.overlaps(buffer) for mark in self.marks):
            return []
        own = all_offsets(Array.argument(buffer))
        return [(buffer, own if name in self.DRAWN else own[self._independent(func, target, args[1:], kwargs)])]

    @staticmethod
    def _independent(func: Any, target: torch.Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> np.ndarray:
        """The elements that the call writes: those whose new value does not depend on the old one.

        The call runs on two copies that differ in every element. It wrote the elements in which the
        results agree.
        """
        zeros, ones = torch.zeros(target.shape, dtype=target.dtype), torch.ones(target.shape, dtype=target.dtype)
        for copy in (zeros, ones):
            func(copy, *rest, **kwargs)
        if zeros.shape != target.shape or zeros.dtype != target.dtype:  # resize_, t_, ...: no element is written
            return np.zeros(target.shape, bool)
        bits = [copy.contiguous()[..., None].view(torch.uint8).reshape(*target.shape, -1) for copy in (zeros, ones)]
        equal: np.ndarray = (bits[0] == bits[1]).all(-1).numpy()
        return equal
