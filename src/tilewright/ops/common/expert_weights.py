"""Small weights of a mixture's experts: those of `weight_formats`, with two axes in front."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...launch import FLOATS, argument_error, check_tensor
from .weight_formats import FORMATS, QuantizedWeight, format_named


@dataclass(frozen=True, slots=True)
class QuantizedExperts:
    """Quantised weights [experts, parts, n, k], packed for `quantized_moe`. parts: 2 for gate and
    up, else 1.

    words: int32 [experts, parts, panels, runs, 64, 16]. scales, zeros: [experts, parts, groups, n].
    """

    weight_format: str
    k: int
    words: Tensor
    scales: Tensor
    zeros: Tensor | None = None

    @staticmethod
    def of(weight: Tensor, weight_format: str, device: torch.device | str | None = None) -> "QuantizedExperts":
        """Packs floats [experts, parts, n, k] of any strides, rounded to nearest without
        calibration.

        device: where the weights are rounded and kept; default their own.
        """
        check_tensor(weight, "weight", ndim=4, dtypes=FLOATS, any_strides=True)
        if not 1 <= weight.shape[1] <= 2 or not len(weight):
            raise argument_error("weight.shape", "[experts, parts, n, k], with 2 parts for gate and up, else 1", tuple(weight.shape))

        def small(part: Tensor) -> QuantizedWeight:
            return QuantizedWeight.of(part.to(device or part.device).contiguous(), weight_format)

        return QuantizedExperts.stacked([[small(part) for part in expert] for expert in weight])

    @staticmethod
    def stacked(weights: Sequence[Sequence[QuantizedWeight]]) -> "QuantizedExperts":
        """Packs the weights of each expert and part, all of one shape and format.

        Raises: ValueError for unlike ones, and for formats with a factor.
        """
        flat = [part for expert in weights for part in expert]
        kinds = {(w.weight_format, w.k, w.n, w.scales.dtype) for w in flat}
        if len(kinds) != 1 or len({len(expert) for expert in weights}) != 1:
            raise argument_error("weights of experts", "alike", f"{len(kinds)} kinds")
        check_format(flat[0].weight_format)

        def joined(tensors: list[Tensor]) -> Tensor:
            return torch.stack(tensors).view(len(weights), -1, *tensors[0].shape)

        zeros = [w.zeros for w in flat if w.zeros is not None]
        stacked = joined([w.words for w in flat]), joined([w.scales for w in flat]), joined(zeros) if zeros else None
        return QuantizedExperts(flat[0].weight_format, flat[0].k, *stacked)

    @property
    def n(self) -> int:
        """Rows of a part."""
        return self.scales.shape[3]

    @property
    def nbytes(self) -> int:
        """Of all its tensors."""
        return sum(t.nbytes for t in (self.words, self.scales, self.zeros) if t is not None)

    def arguments(self, name: str) -> dict[str, Any]:
        """Its keywords for `quantized_moe`. name: gate_up or down."""
        return {f"words_{name}": self.words, f"scales_{name}": self.scales, f"zeros_{name}": self.zeros}

    def part(self, expert: int, part: int) -> QuantizedWeight:
        """The weight of one expert and part."""
        zeros = None if self.zeros is None else self.zeros[expert, part]
        return QuantizedWeight(self.weight_format, self.k, self.words[expert, part], self.scales[expert, part], zeros)

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The weights [experts, parts, n, k] that the codes stand for, rounded once."""
        experts, parts = self.words.shape[:2]
        return torch.stack([torch.stack([self.part(e, i).dequantize(dtype) for i in range(parts)]) for e in range(experts)])


def check_format(name: str) -> None:
    """Raises ValueError for a format that experts cannot have."""
    if format_named(name).factor:
        raise argument_error("weight_format", f"one without a factor: {', '.join(f.name for f in FORMATS.values() if not f.factor)}", repr(name))
