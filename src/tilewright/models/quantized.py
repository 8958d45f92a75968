"""Modules with small weights, and models made of them.

Every `nn.Linear` of a model is quantised, and the experts of mixtures. Not so the up-projection of
MLA's latents, which the engine applies as it lies, and the head, which decides between tokens,
unless a format is named for it: "int4-128,head=int8". Embeddings, norms and routers keep their 16
bits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ..launch import argument_error, check_name, dtype_name
from ..ops.common.expert_weights import QuantizedExperts, check_format
from ..ops.common.weight_formats import FORMATS, QuantizedWeight
from ..ops.quantized_matmul import quantized_matmul
from ..ops.quantized_moe import quantized_moe

HEAD, HEAD_FORMAT = "lm_head", ",head="
KEPT_WIDE = (HEAD, "kv_b_proj", "shared_expert_gate")
EXPERTS = "Experts"
# Classes of experts whose forward `quantized_moe` computes.
KNOWN_EXPERTS = {f"{family}{EXPERTS}" for family in ("Mixtral", "Qwen3Moe", "DeepseekV2", "DeepseekV3", "Qwen3Next", "Qwen3_5Moe", "GptOss")}
_TENSORS = ("words", "scales", "zeros", "factor")
OnProgress = Callable[[int, int], None]


class QuantizedLinear(nn.Module):
    """As `nn.Linear`, for bf16 rows. order: of k, where a weight was packed in another one."""

    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    factor: Tensor | None
    bias: Tensor | None
    order: Tensor | None

    def __init__(self, weight: QuantizedWeight, bias: Tensor | None = None, order: Tensor | None = None) -> None:
        super().__init__()
        self.weight_format, self.in_features, self.out_features = weight.weight_format, weight.k, weight.n
        for name in _TENSORS:
            self.register_buffer(name, getattr(weight, name))
        self.register_buffer("order", order)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))

    @property
    def quantized(self) -> QuantizedWeight:
        """The weight, of the module's own tensors."""
        return QuantizedWeight(self.weight_format, self.in_features, self.words, self.scales, self.zeros, self.factor)

    @property
    def wide(self) -> Tensor:
        """The weight that the codes stand for, bf16, k in its own order."""
        weight = self.quantized.dequantize()
        return weight if self.order is None else weight[:, torch.argsort(self.order)]

    def forward(self, input: Tensor) -> Tensor:
        x = input if self.order is None else input.index_select(-1, self.order)
        y: Tensor = quantized_matmul(x, **self.quantized.arguments, bias=self.bias)
        return y

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, weight_format={self.weight_format!r}"


class QuantizedMixture(nn.Module):
    """The experts of a mixture, as transformers calls them.

    bias_gate_up: [experts, 2, inter]. alpha, limit, up_offset: as in `quantized_moe`.
    """

    bias_gate_up: Tensor | None
    bias_down: Tensor | None

    def __init__(
        self,
        gate_up: QuantizedExperts,
        down: QuantizedExperts,
        biases: tuple[Tensor, Tensor] | tuple[None, None] = (None, None),
        *,
        alpha: float = 1.0,
        limit: float | None = None,
        up_offset: float = 0.0,
    ) -> None:
        super().__init__()
        self.weight_format, self.hidden, self.inter = gate_up.weight_format, gate_up.k, down.k
        for name, tensor in (*gate_up.arguments("gate_up").items(), *down.arguments("down").items()):
            self.register_buffer(name, tensor)
        for name, bias in zip(("bias_gate_up", "bias_down"), biases, strict=True):
            self.register_parameter(name, None if bias is None else nn.Parameter(bias.detach(), requires_grad=False))
        self.alpha, self.limit, self.up_offset = alpha, limit, up_offset

    @property
    def gate_up(self) -> QuantizedExperts:
        """Of the module's own tensors."""
        return self._experts("gate_up", self.hidden)

    @property
    def down(self) -> QuantizedExperts:
        """Likewise."""
        return self._experts("down", self.inter)

    def _experts(self, part: str, k: int) -> QuantizedExperts:
        return QuantizedExperts(self.weight_format, k, *(getattr(self, f"{name}_{part}") for name in _TENSORS[:3]))

    @property
    def weights(self) -> int:
        """How many."""
        return int(self.words_down.shape[0]) * 3 * self.hidden * self.inter  # type: ignore[index]

    def forward(self, hidden_states: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        small = {**self.gate_up.arguments("gate_up"), **self.down.arguments("down")}
        act = {name: getattr(self, name) for name in ("bias_gate_up", "bias_down", "alpha", "limit", "up_offset", "weight_format")}
        rows = hidden_states.reshape(-1, self.hidden)
        return quantized_moe(rows, **small, weights=weights.float(), ids=ids, **act).view(hidden_states.shape)


@dataclass(slots=True, eq=False)
class Quantized:
    """What `quantize` did to a model. `undo` puts the modules back that it replaced."""

    _replaced: list[tuple[nn.Module, str, nn.Module, torch.device]] = field(default_factory=list)

    def undo(self) -> None:
        """A second call does nothing. A module goes to where the model is by now."""
        while self._replaced:
            parent, name, module, device = self._replaced.pop()
            codes = next(getattr(parent, name).buffers(), None)
            setattr(parent, name, module.to(device if codes is None else codes.device))


def quantize(
    model: Any, weight_format: str, *, on_progress: OnProgress | None = None, device: torch.device | str | None = None, undoable: bool = True
) -> Quantized:
    """Replaces the Linear modules of a model by quantised ones: rounded to nearest, nothing is
    calibrated.

    Args:
        model: a transformers model in bfloat16.
        weight_format: a name of `FORMATS`, or two, as `formats_of` reads them. A head that is tied
            to the embeddings gets a copy of its own, and they stay.
        on_progress: called with (modules done, modules in all).
        device: where each weight is rounded and stays; default its own.
        undoable: keep the modules that are replaced, in the host's memory.
    Raises: ValueError for a model or format that does not fit; the model is unchanged.
    """
    found = quantisable(model, weight_format)
    done, tell = Quantized(), on_progress or (lambda *told: None)
    try:
        with torch.no_grad():
            for i, (_, parent, name, module, of) in enumerate(found):
                tell(i, len(found))
                home = next(module.parameters()).device
                setattr(parent, name, small(module, of, home if device is None else torch.device(device)))
                if undoable:
                    done._replaced.append((parent, name, module if _tied(model, module) else module.to("cpu"), home))
        tell(len(found), len(found))
    except BaseException:  # also Ctrl-C
        done.undo()
        raise
    return done


def formats_of(weights: str, what: str = "weight_format", also: tuple[str, ...] = ()) -> tuple[str, str | None]:
    """Of a model's matrices and of its head, None for 16 bits: "int4-128" or "int4-128,head=int8".

    also: words that may stand alone, beside `FORMATS`. Raises: ValueError for another name, of
    `what`.
    """
    body, comma, head = weights.partition(HEAD_FORMAT) if isinstance(weights, str) else (weights, "", "")
    check_name(what, FORMATS if comma else (*FORMATS, *also), body)
    if comma:
        check_name(f"{what} {body}{comma}", FORMATS, head)
    return body, head if comma else None


def quantisable(model: Any, weights: str) -> list[tuple[str, nn.Module, str, nn.Module, str]]:
    """Path, parent, name and module of each module that `quantize` replaces, and its format.

    Raises: ValueError for a model or format that does not fit.
    """
    body, head = formats_of(weights)
    found = list(_modules(model, body, head))
    if not found:
        raise argument_error("model", "with nn.Linear modules to quantise", f"a {type(model).__name__} without one, or one that is quantised already")
    check_dtype(model.dtype)
    if head is not None and not any(name == HEAD for _, _, name, _, _ in found):
        raise argument_error("weights", f"{body!r} for a {type(model).__name__}, which has no nn.Linear named {HEAD}", repr(weights))
    rows = [(path, k, EXPERTS in type(module).__name__, FORMATS[name]) for path, _, _, module, name in found for k in _rows(module)]
    if any(experts for _, _, experts, _ in rows):
        check_format(body)
    if misfits := [(path, k, of) for path, k, _, of in rows if k % of.multiple]:
        fitting = [f.name for f in FORMATS.values() if all(k % f.multiple == 0 and not (f.factor and experts) for _, k, experts, _ in rows)]
        path, k, of = misfits[0]
        be = f"a format whose groups divide every matrix ({', '.join(fitting) or 'none'})"
        raise argument_error("weights", be, f"{of.name!r}: {path} has rows of {k}, no multiple of {of.multiple}")
    return found


def check_dtype(dtype: torch.dtype) -> None:
    """Raises ValueError unless small weights can be multiplied with activations of a dtype."""
    if dtype is not torch.bfloat16:
        raise argument_error("the dtype of a model with quantised weights", "bfloat16 (--dtype bfloat16)", dtype_name(dtype))


def is_quantized(model: nn.Module) -> bool:
    return any(isinstance(module, (QuantizedLinear, QuantizedMixture)) for module in model.modules())


def weight_formats(model: nn.Module) -> list[str]:
    """Of its quantised linear layers, each once."""
    return list(dict.fromkeys(module.weight_format for module in model.modules() if isinstance(module, QuantizedLinear)))


def parameters(model: Any) -> int:
    """How many weights a model has. A head that is tied counts as the embeddings do: once."""
    tied = HEAD if model.config.get_text_config().tie_word_embeddings else None
    small = [m for path, m in model.named_modules() if isinstance(m, QuantizedLinear) and path.rpartition(".")[2] != tied]
    linears = sum(module.in_features * module.out_features for module in small)
    return int(model.num_parameters()) + linears + sum(module.weights for module in model.modules() if isinstance(module, QuantizedMixture))


def weight_bytes(model: nn.Module) -> int:
    """Of all parameters and buffers, each memory once."""
    tensors = [*model.parameters(), *model.buffers()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def _modules(model: nn.Module, body: str, head: str | None) -> Iterator[tuple[str, nn.Module, str, nn.Module, str]]:
    """Path, parent, name and module of each module that is quantised, and its format."""
    for path, module in list(model.named_modules()):
        parent, _, name = path.rpartition(".")
        of = head if name == HEAD else None if name in KEPT_WIDE else body
        fits = type(module) is nn.Linear or (name == "experts" and type(module).__name__ in KNOWN_EXPERTS)
        if fits and of is not None:
            yield path, model.get_submodule(parent), name, module, of


def _tied(model: Any, module: nn.Module) -> bool:
    """Whether the embeddings hold the same parameter, and so keep its memory."""
    return getattr(module, "weight", None) is model.get_input_embeddings().weight


def _rows(module: Any) -> tuple[int, ...]:
    """The lengths of the rows of a module's weights."""
    if isinstance(module, nn.Linear):
        return (module.in_features,)
    gate_up, down, _ = experts_of(module)
    return gate_up.shape[3], down.shape[2]


def experts_of(module: Any) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Views [experts, 2, inter, hidden] and [experts, hidden, inter] of the weights of a module of
    `KNOWN_EXPERTS`, and what else a QuantizedMixture of them takes.

    gpt-oss stores both the other way round, with columns (and biases) of gate and up in turn.
    """
    if type(module).__name__ != "GptOssExperts":
        return module.gate_up_proj.data.unflatten(1, (2, -1)), module.down_proj.data, {}
    turns = module.gate_up_proj.data.transpose(1, 2).unflatten(1, (-1, 2)).transpose(1, 2)
    biases = gpt_oss_biases(module.gate_up_proj_bias.data, module.down_proj_bias.data)
    return turns, module.down_proj.data.transpose(1, 2), {"biases": biases, "alpha": module.alpha, "limit": module.limit, "up_offset": 1.0}


def gpt_oss_biases(gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """As a QuantizedMixture has them. gate_up: [experts, 2 * inter], gate and up in turn."""
    return gate_up.unflatten(1, (-1, 2)).transpose(1, 2).contiguous(), down


def small(module: Any, name: str, where: torch.device) -> nn.Module:
    """A module with the weights of another, rounded on a device."""
    if isinstance(module, nn.Linear):
        bias = None if module.bias is None else module.bias.data.to(where)
        return QuantizedLinear(QuantizedWeight.of(module.weight.data.to(where), name), bias)
    gate_up, down, act = experts_of(module)
    if "biases" in act:
        act["biases"] = tuple(bias.to(where) for bias in act["biases"])
    return QuantizedMixture(QuantizedExperts.of(gate_up, name, where), QuantizedExperts.of(down[:, None], name, where), **act)
