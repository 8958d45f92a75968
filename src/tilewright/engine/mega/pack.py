"""Weights of all layers as one tensor for each kind of matrix, so that the kernel finds a layer by an index. The model's parameters become views."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...launch import Device, argument_error
from ..layers import Decoder, GroupedAttention
from ..mlp import GatedMlp
from ..weights import Fusion, Matrix
from .program import MATRICES, Dims, Kind

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")  # of which those without what `refuse` names
LARGEST = 2**31 - 1  # elements that the kernel's 32-bit indices reach
WIDEST = 16384  # columns of a matrix: a tile holds whole rows, in registers


def refuse(model: Any, device: Device) -> None:
    """Raises ValueError for a model that the megakernel does not run, with the reason; changes nothing."""
    config = model.config
    if config.model_type not in MODEL_TYPES:
        raise argument_error("model.config.model_type", f'one of {", ".join(MODEL_TYPES)} with mode="mega"', config.model_type)
    if model.dtype not in (torch.bfloat16, torch.float16) and not device.is_cpu:
        raise argument_error("the model's dtype", 'bfloat16 or float16 on a GPU with mode="mega"', str(model.dtype).removeprefix("torch."))
    biased = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module.bias is not None]
    if biased:
        raise argument_error("the model", 'without biases with mode="mega"', f"one of {biased[0]}")
    if hasattr(model.model.layers[0].self_attn, "q_norm"):
        raise argument_error("the model", 'without norms of queries and keys with mode="mega"', config.model_type)
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True):
        raise argument_error("model.config.sliding_window", 'None with mode="mega"', window)
    attention = model.model.layers[0].self_attn
    if attention.head_dim < 16 or attention.head_dim & (attention.head_dim - 1) or attention.head_dim > 128:
        raise argument_error("head_dim", 'a power of two from 16 to 128 with mode="mega"', attention.head_dim)
    if attention.num_key_value_groups > 16:
        raise argument_error("query heads for each key head", 'at most 16 with mode="mega"', attention.num_key_value_groups)
    dims = dims_of(model)
    for kind in MATRICES:
        rows, columns = dims.shape(kind)
        if columns % 8 or columns > WIDEST:
            raise argument_error(f"columns of {kind.name.lower()}", f'a multiple of 8, at most {WIDEST}, with mode="mega"', columns)
        if rows * columns * (1 if kind is Kind.HEAD else dims.layers) > LARGEST:
            raise argument_error(
                f"elements of {kind.name.lower()} in all layers", f'at most {LARGEST} with mode="mega"', rows * columns * dims.layers
            )


def dims_of(model: Any) -> Dims:
    config, attention = model.config, model.model.layers[0].self_attn
    heads = config.num_attention_heads, config.num_key_value_heads
    return Dims(config.num_hidden_layers, config.hidden_size, *heads, attention.head_dim, config.intermediate_size, config.vocab_size)


def one_stream(dims: Dims, like: Tensor) -> tuple[Tensor, tuple[int, ...], dict[Kind, Tensor]]:
    """Memory for all matrices [rows, hidden], the row that each kind begins at, and each kind's part of it [layers, its rows, its columns]."""
    sizes = [(1 if kind is Kind.HEAD else dims.layers, *dims.shape(kind)) for kind in MATRICES]
    rows = [layers * height * width // dims.hidden for layers, height, width in sizes]
    bases = tuple(sum(rows[:i]) for i in range(len(rows)))
    whole = torch.empty(sum(rows), dims.hidden, dtype=like.dtype, device=like.device)
    parts = {kind: part.view(size) for kind, part, size in zip(MATRICES, whole.split(rows), sizes, strict=True)}
    return whole, bases, parts


@dataclass(slots=True)
class LayerStacks(Fusion):
    """Fuses like `Fusion`, but over all layers at once: what `stacked` and `alternating` give back are slices of four tensors.

    While a stack is made, its layers are held twice; afterwards once.
    """

    qkv: Tensor = field(init=False)
    out: Tensor = field(init=False)
    gate_up: Tensor = field(init=False)
    down: Tensor = field(init=False)
    whole: Tensor | None = None
    bases: tuple[int, ...] = ()
    _of: dict[nn.Linear, Matrix] = field(default_factory=dict)

    @staticmethod
    def of(model: Any) -> "LayerStacks":
        """Of a model that `refuse` lets pass."""
        stacks, layers = LayerStacks(), model.model.layers
        dims = dims_of(model)
        parts: dict[Kind, Tensor | None] = dict.fromkeys(MATRICES)
        if dims.inter % dims.hidden == 0 and dims.q_heads * dims.head_dim % dims.hidden == 0:
            stacks.whole, stacks.bases, views = one_stream(dims, model.lm_head.weight)
            parts |= views
        attentions, mlps = [layer.self_attn for layer in layers], [layer.mlp for layer in layers]
        qkv = [(a.q_proj, a.k_proj, a.v_proj) for a in attentions]
        sizes = [m.out_features for m in qkv[0]]
        stacks.qkv = stacks._stack(
            qkv,
            lambda parts: torch.cat(parts).view(len(qkv), sum(sizes), -1),
            lambda whole: [part for layer in whole for part in layer.split(sizes)],
            parts[Kind.QKV],
        )
        gate_up = [(m.gate_proj, m.up_proj) for m in mlps]
        stacks.gate_up = stacks._stack(
            gate_up,
            lambda parts: torch.stack(parts).unflatten(0, (-1, 2)).transpose(1, 2).flatten(1, 2).contiguous(),
            lambda whole: [part for layer in whole for part in (layer[0::2], layer[1::2])],
            parts[Kind.GATE_UP],
        )
        stacks.out = stacks._stack([(a.o_proj,) for a in attentions], torch.stack, list, parts[Kind.OUT])
        stacks.down = stacks._stack([(m.down_proj,) for m in mlps], torch.stack, list, parts[Kind.DOWN])
        if parts[Kind.HEAD] is not None:
            stacks._stack([(model.lm_head,)], torch.stack, list, parts[Kind.HEAD])  # a tied embedding is the same parameter
        return stacks

    def _stack(
        self,
        layers: Sequence[tuple[nn.Linear, ...]],
        join: Callable[[list[Tensor]], Tensor],
        views: Callable[[Tensor], list[Tensor]],
        into: Tensor | None = None,
    ) -> Tensor:
        """into: where the stack goes; by default to memory of its own."""
        joined = join if into is None else lambda parts: into.copy_(join(parts))
        whole = self._fused([linear for layer in layers for linear in layer], joined, views).weight
        self._of |= {layer[0]: Matrix(part) for layer, part in zip(layers, whole, strict=True)}
        return whole

    def stacked(self, *linears: nn.Linear) -> Matrix:
        return self._of[linears[0]]

    def alternating(self, first: nn.Linear, second: nn.Linear) -> Matrix:
        return self._of[first]


@dataclass(frozen=True, slots=True)
class Weights:
    """What the kernel reads, as `mega_kernel` has it, and the constants of the model."""

    dims: Dims
    embedding: Tensor
    norms: Tensor
    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    head: Tensor
    cos: Tensor
    sin: Tensor
    eps: float
    scale: float
    whole: Tensor | None = None  # [.., hidden]: qkv, out, gate_up, down and head are views of it; None where hidden does not divide their sizes
    bases: tuple[int, ...] = ()  # of each in its rows

    @staticmethod
    def of(decoder: Decoder, stacks: LayerStacks) -> "Weights":
        first = decoder.layers[0]
        attention, mlp = first.attention, first.mlp
        assert isinstance(attention, GroupedAttention)
        assert isinstance(mlp, GatedMlp)
        dims = Dims(
            len(decoder.layers), decoder.hidden, attention.q_heads, attention.kv_heads, attention.head_dim, mlp.down.weight.shape[1], decoder.vocab
        )
        norms = [norm.weight for layer in decoder.layers for norm in (layer.attention_norm, layer.mlp_norm)]
        return Weights(
            dims,
            decoder.embedding,
            torch.stack([*norms, decoder.norm.weight]),  # a copy: a thousandth of the weights
            stacks.qkv,
            stacks.out,
            stacks.gate_up,
            stacks.down,
            decoder.head.weight[None],
            attention.rope.cos,
            attention.rope.sin,
            decoder.norm.eps,
            attention.scale,
            stacks.whole,
            stacks.bases,
        )

    def first_layers(self, layers: int) -> "Weights":
        """A model of the first layers alone, with the same norm and head."""
        from dataclasses import replace

        norms = torch.cat((self.norms[: 2 * layers], self.norms[-1:]))
        parts = {name: getattr(self, name)[:layers] for name in ("qkv", "out", "gate_up", "down")}
        return replace(self, dims=replace(self.dims, layers=layers), norms=norms, **parts)
