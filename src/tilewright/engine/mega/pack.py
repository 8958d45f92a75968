"""A model's weights as the kernel reads them, and which models are refused. The packed matrices are
a copy, because prompts are read with the model's own.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...launch import Device, argument_error
from ..attention import GroupedAttention
from ..layers import Decoder, Norm
from ..mlp import GatedMlp
from ..weights import plain
from .shape import ROWS, Dims, Schedule, schedule_of

MODEL_TYPES = ("llama", "mistral", "qwen3")  # but not with what `refuse` names


def dims_of_config(config: Any) -> Dims:
    """From a transformers config alone."""
    heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads[0]
    normed = config.model_type == "qwen3"
    return Dims(config.num_hidden_layers, config.hidden_size, *heads, head_dim, config.intermediate_size, config.vocab_size, normed)


def refuse(config: Any, device: Device, dtype: torch.dtype) -> None:
    """Raises ValueError, with the reason, for the transformers config of a model that the
    megakernel does not run.
    """
    kind, window = config.model_type, getattr(config, "sliding_window", None)
    biased = [name for name in ("attention_bias", "mlp_bias") if getattr(config, name, False)] or [kind] * (kind == "qwen2")
    number_type, windowed = str(dtype).removeprefix("torch."), window is not None and getattr(config, "use_sliding_window", True)
    for bad, what, must_be, was in (
        (kind not in (*MODEL_TYPES, "qwen2"), "model.config.model_type", f"one of {', '.join(MODEL_TYPES)}", kind),
        (number_type not in ("bfloat16", "float16"), "the model's dtype", "bfloat16 or float16", number_type),
        (bool(biased), "the model", "without biases", "".join(biased[:1])),
        (windowed, "model.config.sliding_window", "None", window),
    ):
        if bad:
            raise argument_error(what, f'{must_be} with mode="mega"', was)
    schedule_of(dims_of_config(config), device)


def decided(outline: Any, where: torch.device, layers: int | None = None) -> Dims:
    """The sizes of a model that is not built yet. outline: on the meta device (models.outline_of).

    layers: of which the first so many are to run. Raises ValueError, also as `refuse`.
    """
    if layers is not None and not 1 <= layers <= outline.config.num_hidden_layers:
        raise argument_error("--layers", f"1 to {outline.config.num_hidden_layers}", layers)
    refuse(outline.config, Device.of(torch.empty(0, device=where)), outline.dtype)
    return dims_of_config(outline.config)


def refuse_model(model: Any, device: Device) -> None:
    """As `refuse`, of a model with its modules, whose biases count too."""
    refuse(model.config, device, model.dtype)
    biased = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module.bias is not None]
    if biased:
        raise argument_error("the model", 'without biases with mode="mega"', f"one of {biased[0]}")


def packed_bytes(config: Any, device: Device) -> int:
    """Size of the packed matrices of a transformers config."""
    schedule = schedule_of(dims_of_config(config), device)
    return schedule.size * 4 * schedule.tile_words


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's weights: matrices by layer, the rows of qkv by query heads, key heads and value
    heads, those of gate and up in turn; norms [2 layers + 1, hidden], of attention and MLP in turn.

    head_norms: by layer, of queries and of keys.
    """

    dims: Dims
    embedding: Tensor
    norms: Tensor
    qkv: tuple[Tensor, ...]
    out: tuple[Tensor, ...]
    gate_up: tuple[Tensor, ...]
    down: tuple[Tensor, ...]
    head: Tensor
    cos: Tensor
    sin: Tensor
    eps: float
    scale: float
    head_norms: tuple[tuple[Tensor, Tensor], ...] = ()

    @staticmethod
    def of(decoder: Decoder) -> "Weights":
        attentions = [layer.attention for layer in decoder.layers if isinstance(layer.attention, GroupedAttention)]
        mlps = [layer.mlp for layer in decoder.layers if isinstance(layer.mlp, GatedMlp)]
        assert len(attentions) == len(mlps) == len(decoder.layers)
        assert isinstance(decoder.norm, Norm)
        a = attentions[0]
        head_norms = tuple((a.q_norm.weight, a.k_norm.weight) for a in attentions if a.q_norm is not None and a.k_norm is not None)
        norms = [norm.weight for layer in decoder.layers for norm in (layer.attention_norm, layer.mlp_norm) if isinstance(norm, Norm)]
        return Weights(
            Dims(len(mlps), decoder.hidden, a.q_heads, a.kv_heads, a.head_dim, mlps[0].down.columns, decoder.vocab, bool(head_norms)),
            decoder.embedding,
            torch.stack([*norms, decoder.norm.weight]),
            tuple(plain(a.qkv) for a in attentions),
            tuple(plain(a.out) for a in attentions),
            tuple(plain(mlp.gate_up) for mlp in mlps),
            tuple(plain(mlp.down) for mlp in mlps),
            plain(decoder.head),
            a.rope.cos,
            a.rope.sin,
            decoder.norm.eps,
            a.scale,
            head_norms,
        )


def as_words(tensor: Tensor) -> Tensor:
    """int32 view: two neighbours of 16 bits in each."""
    return tensor.view(torch.int32)


def _axes(device: torch.device, *sizes: int) -> list[Tensor]:
    """The index along each axis of an array of these sizes."""
    return [torch.arange(size, device=device).view(-1, *[1] * (len(sizes) - 1 - i)) for i, size in enumerate(sizes)]


def _gathered(matrix: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Words of matrix[rows, columns], zeros where an index lies behind the end."""
    found = matrix[rows.clamp(max=matrix.shape[0] - 1), columns.clamp(max=matrix.shape[1] - 1)]
    return as_words(found.masked_fill_(rows >= matrix.shape[0], 0).masked_fill_(columns >= matrix.shape[1], 0))


def _wide(matrix: Tensor, s: Schedule, groups: int) -> Tensor:
    width, strips, fields = 2 * s.wide_width, s.config.strips, s.wide_fields
    group, part, row, strip, field, column = _axes(matrix.device, groups, s.wide_sets, ROWS, strips, fields, width)
    return _gathered(matrix, (group * fields + field) * ROWS + row, (part * strips + strip) * width + column)


def _narrow(matrix: Tensor, s: Schedule, width: int, groups: int, outputs: int, part: Tensor, columns: Tensor) -> Tensor:
    """Tiles of `out` or `down`: [..., groups, sets, ROWS, strips, fields, 2 * width]. outputs: of
    each part of the rows; part: which one.
    """
    strips, fields = s.config.strips, s.config.line // width
    group, _, row, strip, field, _ = _axes(matrix.device, groups, 1, ROWS, strips, fields, 1)
    own = 2 * (((row % 4 * strips + strip) * groups + group) * fields + field) + row // 4
    return _gathered(matrix, torch.where(own < outputs, own + outputs * part, len(matrix)), columns)


def _out(matrix: Tensor, s: Schedule) -> Tensor:
    head, part, *_, column = _axes(matrix.device, s.dims.q_heads, s.split.out_parts, 1, 1, 1, 1, 1, s.dims.head_dim)
    return _narrow(matrix, s, s.head_words, s.out_groups, 2 * s.out_words, part, head * s.dims.head_dim + column)


def inner_columns(s: Schedule, device: torch.device) -> list[Tensor]:
    """Of the blocks with a query head, and of the others, [blocks, words, 2]: the inner columns of
    each word that a block's `down` is multiplied by; `inter` where there are none.
    """
    found = []
    for first, last, groups, sets in ((0, s.attending, s.split.gate_up, s.gate_up_sets), (s.attending, s.blocks, s.split.others, s.others_sets)):
        block, word, half = _axes(device, last - first, sets * s.split.down_width, 2)
        group, field = word // (2 * s.wide_fields), word % s.wide_fields
        begin = s.before(first, s.split.gate_up, s.split.others) + block * groups
        columns = ((begin + group) * s.wide_fields + field) * (ROWS // 2) + word // s.wide_fields % 2 * 2 + half
        found.append(torch.where(group < groups, columns, s.dims.inter))
    return found


def _down(matrix: Tensor, s: Schedule) -> list[Tensor]:
    every, width = torch.zeros((), dtype=torch.int64, device=matrix.device), s.split.down_width
    found = [columns.view(len(columns), 1, columns.shape[1] // width, 1, 1, 1, 2 * width) for columns in inner_columns(s, matrix.device)]
    return [_narrow(matrix, s, width, s.down_groups, 2 * s.hidden_words, every, columns) for columns in found]


def pack(weights: Weights, s: Schedule) -> Tensor:
    """int32 [tiles * ROWS * strips, 1, line]."""
    whole = torch.empty(s.size * s.tile_words, dtype=torch.int32, device=weights.embedding.device)
    at = 0

    def put(*found: Tensor) -> None:
        nonlocal at
        for tiles in found:
            whole[at : at + tiles.numel()] = tiles.flatten()
            at += tiles.numel()

    for qkv, out, gate_up, down in zip(weights.qkv, weights.out, weights.gate_up, weights.down, strict=True):
        put(_wide(qkv, s, s.qkv_groups), _out(out, s), _wide(gate_up, s, s.gate_up_groups), *_down(down, s))
    put(_wide(weights.head, s, s.head_groups))
    return whole.view(-1, 1, s.config.line)


def stream_words(rows: Tensor, s: Schedule) -> Tensor:
    """Rows as long as the residual stream, padded with zeros."""
    missing = 2 * s.hidden_words - rows.shape[-1]
    return as_words(nn.functional.pad(rows, (0, missing)) if missing else rows.contiguous())


def head_norm_words(weights: Weights) -> Tensor:
    """int32 [layers or 1, 4, head words]: of queries, their partners, keys, their partners."""
    half = weights.dims.head_dim // 2
    if not weights.head_norms:
        return torch.zeros(1, 4, half, dtype=torch.int32, device=weights.embedding.device)
    return as_words(torch.stack([torch.stack([w for norm in pair for w in (norm, norm.roll(half))]) for pair in weights.head_norms]))


def rope_words(weights: Weights) -> Tensor:
    """fp32 [max_len, 4, head words]: cosines of both neighbours, and sines with the signs that
    their partners get.
    """
    cos, sin = torch.cat((weights.cos, weights.cos), 1), torch.cat((-weights.sin, weights.sin), 1)
    return torch.stack((cos[:, 0::2], cos[:, 1::2], sin[:, 0::2], sin[:, 1::2]), 1).contiguous()
