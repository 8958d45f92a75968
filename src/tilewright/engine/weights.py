"""Matrices of a model, and how they are fused into one, held once: parameters become views."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..models.quantized import Quantized, QuantizedLinear, quantize
from ..ops.common.weight_formats import ROWS, QuantizedWeight


@dataclass(frozen=True, slots=True)
class Matrix:
    """weight: [out_features, in_features]. bias: [out_features] or None."""

    weight: Tensor
    bias: Tensor | None = None

    @property
    def rows(self) -> int:
        return len(self.weight)

    @property
    def columns(self) -> int:
        return self.weight.shape[1]

    @property
    def nbytes(self) -> int:
        """That a product reads of it."""
        return self.weight.nbytes


@dataclass(frozen=True, slots=True)
class SmallMatrix:
    """A quantised weight. order: of k, in which its columns lie; None for their own."""

    weight: QuantizedWeight
    bias: Tensor | None = None
    order: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.weight.n

    @property
    def columns(self) -> int:
        return self.weight.k

    @property
    def nbytes(self) -> int:
        return self.weight.size_bytes


@dataclass(frozen=True, slots=True)
class Parts:
    """Matrices whose rows follow each other, that cannot be one: each is a product of its own."""

    parts: tuple[Matrix | SmallMatrix, ...]

    @property
    def rows(self) -> int:
        return sum(part.rows for part in self.parts)

    @property
    def columns(self) -> int:
        return self.parts[0].columns

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


AnyMatrix = Matrix | SmallMatrix | Parts


def plain(matrix: AnyMatrix) -> Tensor:
    """The weight of a matrix that is not quantised."""
    assert isinstance(matrix, Matrix)
    return matrix.weight


def matrix_of(linear: nn.Linear | QuantizedLinear) -> Matrix | SmallMatrix:
    """A module's weight as it lies."""
    bias = None if linear.bias is None else linear.bias.data
    return SmallMatrix(linear.quantized, bias, linear.order) if isinstance(linear, QuantizedLinear) else Matrix(linear.weight.data, bias)


def without_inference_tensors(model: nn.Module) -> None:
    """A model that was made under torch.inference_mode gets ordinary tensors in the same memory.

    Once another tensor is their data, PyTorch calls no module with the others.
    """
    made: dict[Tensor, Tensor] = {}  # tied weights stay tied
    with torch.inference_mode(False):
        for module in model.modules():
            groups: tuple[dict[str, Any], ...] = module._parameters, module._buffers
            for group in groups:
                for name, old in group.items():
                    if old is not None and old.is_inference():
                        if old not in made:
                            new = torch.empty(0, dtype=old.dtype, device=old.device)
                            new.set_(old.untyped_storage(), old.storage_offset(), old.shape, old.stride())
                            made[old] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
                        group[name] = made[old]


@dataclass(slots=True)
class Fusion:
    """Fuses, transposes and quantises weights in place.

    The model keeps working on the same memory. `undo` gives each parameter memory of its own again.
    """

    _parameters: list[Tensor] = field(default_factory=list)
    _quantized: Quantized = field(default_factory=Quantized)

    def quantize(self, model: Any, weights: str, on_progress: Callable[[str, int, int], None]) -> None:
        """Before anything is fused: the Linear modules in a format of `FORMATS`."""
        self._quantized = quantize(model, weights, on_progress=partial(on_progress, "quantising"))

    def stacked(self, *linears: nn.Linear | QuantizedLinear) -> AnyMatrix:
        """One matrix with the rows of each module in order; parts of one, where a module's weight
        is small and cannot be joined with another's.
        """
        small = [module for module in linears if isinstance(module, QuantizedLinear)]
        if small:
            return self._joined(small) if len(small) == len(linears) and _can_join(small) else Parts(tuple(matrix_of(m) for m in linears))
        own = [module for module in linears if isinstance(module, nn.Linear)]
        return self._fused(own, lambda parts: torch.cat(parts), lambda whole: list(whole.split([m.out_features for m in own])))

    def alternating(self, first: nn.Linear, second: nn.Linear) -> Matrix:
        """One matrix with interleaved rows: even rows from `first`, odd rows from `second`."""
        return self._fused((first, second), lambda parts: torch.stack(parts, 1).flatten(0, 1), lambda whole: [whole[0::2], whole[1::2]])

    def _joined(self, modules: list[QuantizedLinear]) -> SmallMatrix:
        """Of modules that fill their panels, which follow each other."""
        joined: dict[str, Tensor] = {}
        for name, axis in (("words", 0), ("scales", 1), ("zeros", 1), ("bias", 0)):
            tensors = [tensor for module in modules if (tensor := getattr(module, name)) is not None]
            if tensors:
                joined[name] = torch.cat([tensor.data for tensor in tensors], axis)
                for tensor, view in zip(tensors, joined[name].split([t.shape[axis] for t in tensors], axis), strict=True):
                    tensor.data = view
                self._parameters += tensors
        bias = joined.pop("bias", None)
        return SmallMatrix(QuantizedWeight(modules[0].weight_format, modules[0].in_features, **joined), bias)

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
        self._quantized.undo()


def _can_join(modules: list[QuantizedLinear]) -> bool:
    """Whether the words of all but the last end with a panel, and mean the same."""
    kinds = {(m.weight_format, m.scales.dtype, m.bias is None) for m in modules}
    whole = all(m.out_features % ROWS == 0 for m in modules[:-1])
    return whole and len(kinds) == 1 and all(m.order is None and m.factor is None for m in modules)
