"""Weights of several Linear modules as one matrix, not held twice: the modules' own parameters become views of it."""

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
    """Fuses Linear modules in place. The model goes on working, on the same memory; `undo` gives each module its own again."""

    _modules: list[nn.Linear] = field(default_factory=list)

    def stacked(self, *linears: nn.Linear) -> Matrix:
        """One matrix of the rows of each, one module after the other."""
        return self._fused(linears, lambda parts: torch.cat(parts), lambda whole: list(whole.split([m.out_features for m in linears])))

    def alternating(self, first: nn.Linear, second: nn.Linear) -> Matrix:
        """One matrix whose even rows are those of `first` and whose odd rows those of `second`."""
        return self._fused((first, second), lambda parts: torch.stack(parts, 1).flatten(0, 1), lambda whole: [whole[0::2], whole[1::2]])

    def _fused(self, linears, join, views) -> Matrix:
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
        self._modules += linears
        if weight.is_cuda:
            torch.cuda.empty_cache()  # what the parts leave free fits no later matrix
        return Matrix(weight, bias)

    def undo(self) -> None:
        """A second call does nothing."""
        while self._modules:
            module = self._modules.pop()
            for parameter in (module.weight, module.bias):
                if parameter is not None:
                    parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
