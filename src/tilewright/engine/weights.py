"""Fuses weights of Linear modules into one matrix, held once: their parameters become views."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Matrix:
    """weight: [out_features, in_features]. bias: [out_features] or None."""

    weight: Tensor
    bias: Tensor | None = None

    @staticmethod
    def of(linear: nn.Linear) -> "Matrix":
        return Matrix(linear.weight.data, None if linear.bias is None else linear.bias.data)


@dataclass(slots=True)
class Fusion:
    """Fuses and transposes weights in place.

    The model keeps working on the same memory. `undo` gives each parameter memory of its own again.
    """

    _parameters: list[Tensor] = field(default_factory=list)

    def stacked(self, *linears: nn.Linear) -> Matrix:
        """One matrix with the rows of each module in order."""
        return self._fused(linears, lambda parts: torch.cat(parts), lambda whole: list(whole.split([m.out_features for m in linears])))

    def alternating(self, first: nn.Linear, second: nn.Linear) -> Matrix:
        """One matrix with interleaved rows: even rows from `first`, odd rows from `second`."""
        return self._fused((first, second), lambda parts: torch.stack(parts, 1).flatten(0, 1), lambda whole: [whole[0::2], whole[1::2]])

    def transposed(self, parameter: Tensor) -> Tensor:
        """The parameter with its last two axes exchanged, contiguous.

        The parameter becomes a view of it.
        """
        turned = parameter.data.transpose(-2, -1).contiguous()
        parameter.data = turned.transpose(-2, -1)
        self._parameters.append(parameter)
        return turned

    def _fused(self, linears: Sequence[nn.Linear], join: Callable[[list[Tensor]], Tensor], views: Callable[[Tensor], list[Tensor]]) -> Matrix:
        biases = [m.bias for m in linears if m.bias is not None]
        if biases and len(biases) != len(linears):
            raise ValueError(f"modules that are fused must all have a bias or none, got {len(biases)} of {len(linears)}")
        weight = join([m.weight.data for m in linears])
        bias = join([b.data for b in biases]) if biases else None
        for module, view in zip(linears, views(weight), strict=True):
            module.weight.data = view
        if bias is not None:
            for module, view in zip(linears, views(bias), strict=True):
                module.bias.data = view
        self._parameters += [p for module in linears for p in (module.weight, module.bias) if p is not None]
        if weight.is_cuda:
            torch.cuda.empty_cache()  # what the parts leave free fits no later matrix
        return Matrix(weight, bias)

    def undo(self) -> None:
        """A second call does nothing."""
        while self._parameters:
            parameter = self._parameters.pop()
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
