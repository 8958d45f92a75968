"""A model's weights as the kernel reads them, and which models are refused. The packed matrices are
a copy, because prompts are read with the model's own.

Weights of 16 bits keep their bits. Of e4m3 with a scale for each row the codes are packed, and the
sums of a row times its scale. Then the head, which keeps 16 bits, has two codes for each number.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...launch import Device, argument_error, dtype_name
from ...models.quantized import QuantizedLinear, is_quantized
from ...ops.common.weight_formats import E4M3, FORMATS, LARGEST, nearest_codes, unpack
from ..attention import GroupedAttention
from ..layers import Decoder, Norm
from ..mlp import GatedMlp
from ..weights import AnyMatrix, Matrix, Parts, SmallMatrix, plain
from .shape import ROWS, SECOND, Dims, Schedule, default_config, schedule_of

CODES = "e4m3"  # the format of small weights that it reads: a scale for each row
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
    number_type, windowed = dtype_name(dtype), window is not None and getattr(config, "use_sliding_window", True)
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
    """As `refuse`, of a model with its modules, whose biases and small weights count too."""
    refuse(model.config, device, model.dtype)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | QuantizedLinear)}
    biased = [name for name, module in linears.items() if module.bias is not None]
    if biased:
        raise argument_error("the model", 'without biases with mode="mega"', f"one of {biased[0]}")
    if is_quantized(model):
        head = model.get_output_embeddings()
        for name, module in linears.items():
            found = module.weight_format if isinstance(module, QuantizedLinear) else "16 bits"
            if found != ("16 bits" if module is head else CODES):
                raise argument_error(f"the weight of {name}", f'{CODES}, and 16 bits in the head, with mode="mega"', found)


def packed_bytes(config: Any, device: Device, small: bool) -> int:
    """Size of the packed matrices of a transformers config. small: of e4m3 weights."""
    dims = dims_of_config(config)
    schedule = schedule_of(dims, device, config=default_config(device, dims.head_dim, small))
    return schedule.size * 4 * schedule.tile_words


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's weights: matrices by layer, the rows of qkv by query heads, key heads and value
    heads, those of gate and up in turn; norms [2 layers + 1, hidden], of attention and MLP in turn.

    Those of small weights are not in turn: all rows of gate come first.

    head_norms: by layer, of queries and of keys.
    """

    dims: Dims
    embedding: Tensor
    norms: Tensor
    qkv: tuple[Tensor | AnyMatrix, ...]
    out: tuple[Tensor | AnyMatrix, ...]
    gate_up: tuple[Tensor | AnyMatrix, ...]
    down: tuple[Tensor | AnyMatrix, ...]
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
            tuple(_numbers_of(a.qkv) for a in attentions),
            tuple(_numbers_of(a.out) for a in attentions),
            tuple(_numbers_of(mlp.gate_up) for mlp in mlps),
            tuple(_numbers_of(mlp.down) for mlp in mlps),
            plain(decoder.head),
            a.rope.cos,
            a.rope.sin,
            decoder.norm.eps,
            a.scale,
            head_norms,
        )

    @property
    def pairs(self) -> int:
        """`Config.pairs`."""
        return 1 if all(isinstance(matrix, Tensor) for matrix in self.qkv) else 2

    def dense(self) -> tuple[tuple[Tensor, ...], ...]:
        """The matrices qkv, out, gate_up and down by layer, those of codes in fp32."""

        def dense(matrix: Tensor | AnyMatrix, *, of_both: bool = False) -> Tensor:
            if isinstance(matrix, Tensor):
                return matrix
            codes, scales = codes_of(matrix)
            found = codes.view(torch.float8_e4m3fn).float() * scales[:, None]
            return alternating(found) if of_both else found

        gate_up = tuple(dense(both, of_both=True) for both in self.gate_up)
        qkv, out, down = (tuple(dense(matrix) for matrix in matrices) for matrices in (self.qkv, self.out, self.down))
        return qkv, out, gate_up, down


def _numbers_of(matrix: AnyMatrix) -> Tensor | AnyMatrix:
    return matrix.weight if isinstance(matrix, Matrix) else matrix


def as_words(tensor: Tensor) -> Tensor:
    """int32 view: two neighbours of 16 bits in each, or four of 8."""
    return tensor.view(torch.int32)


def _axes(device: torch.device, *sizes: int) -> list[Tensor]:
    """The index along each axis of an array of these sizes."""
    return [torch.arange(size, device=device).view(-1, *[1] * (len(sizes) - 1 - i)) for i, size in enumerate(sizes)]


def _gathered(matrix: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """matrix[rows, columns], zeros where an index lies behind the end."""
    found = matrix[rows.clamp(max=matrix.shape[0] - 1), columns.clamp(max=matrix.shape[1] - 1)]
    return found.masked_fill_(rows >= matrix.shape[0], 0).masked_fill_(columns >= matrix.shape[1], 0)


def _wide(matrices: Sequence[Tensor], s: Schedule, groups: int, pairs: int) -> Tensor:
    """pairs: of neighbours that a word has of each matrix."""
    width, strips, fields = s.wide_width, s.config.strips, s.wide_fields
    sizes = (groups, s.stream_sets // pairs, ROWS, strips, fields, width, pairs, 2)
    group, part, row, strip, field, word, pair, one = _axes(matrices[0].device, *sizes)
    rows, columns = (group * fields + field) * ROWS + row, (((part * pairs + pair) * strips + strip) * width + word) * 2 + one
    return as_words(torch.cat([_gathered(matrix, rows, columns) for matrix in matrices], -2).flatten(-3))


def _narrow(matrix: Tensor, s: Schedule, width: int, groups: int, outputs: int, part: Tensor, columns: Tensor) -> Tensor:
    """Tiles of `out` or `down`: [..., groups, sets, ROWS, strips, fields, width]. outputs: of each
    part of the rows; part: which one. columns: [..., 1, sets, 1, 1, 1, width, pairs, 2].
    """
    strips, fields = s.config.strips, s.config.line // width
    group, _, row, strip, field, *_ = _axes(matrix.device, groups, 1, ROWS, strips, fields, 1, 1, 1)
    own = 2 * (((row % 4 * strips + strip) * groups + group) * fields + field) + row // 4
    return as_words(_gathered(matrix, torch.where(own < outputs, own + outputs * part, len(matrix)), columns).flatten(-3))


def _out(matrix: Tensor, s: Schedule) -> Tensor:
    sizes = (s.dims.q_heads, s.split.out_parts, 1, 1, 1, 1, 1, s.out_width, s.config.pairs, 2)
    head, part, *_, word, pair, one = _axes(matrix.device, *sizes)
    columns = head * s.dims.head_dim + (pair * s.out_width + word) * 2 + one
    return _narrow(matrix, s, s.out_width, s.out_groups, 2 * s.out_words, part, columns)


def inner_columns(s: Schedule, device: torch.device) -> list[Tensor]:
    """Of the blocks with a query head, and of the others, [blocks, words, 2]: the inner columns of
    each word that a block's `down` is multiplied by; `inter` where there are none.
    """
    found = []
    for first, last, groups, sets in ((0, s.attending, s.split.gate_up, s.gate_up_sets), (s.attending, s.blocks, s.split.others, s.others_sets)):
        block, word, half = _axes(device, last - first, sets * s.config.pairs * s.split.down_width, 2)
        group, field = word // (2 * s.wide_fields), word % s.wide_fields
        begin = s.before(first, s.split.gate_up, s.split.others) + block * groups
        columns = ((begin + group) * s.wide_fields + field) * (ROWS // 2) + word // s.wide_fields % 2 * 2 + half
        found.append(torch.where(group < groups, columns, s.dims.inter))
    return found


def _down(matrix: Tensor, s: Schedule) -> list[Tensor]:
    every, width = torch.zeros((), dtype=torch.int64, device=matrix.device), s.split.down_width
    each = s.config.pairs * width
    by_sets = [c.view(len(c), c.shape[1] // each, s.config.pairs, width, 2).transpose(2, 3) for c in inner_columns(s, matrix.device)]
    return [_narrow(matrix, s, width, s.down_groups, 2 * s.hidden_words, every, columns[:, None, :, None, None, None]) for columns in by_sets]


def codes_of(matrix: AnyMatrix) -> tuple[Tensor, Tensor]:
    """The codes of e4m3 weights, uint8 [rows, columns], and the scales of their rows, fp32."""
    weights = [part.weight for part in (matrix.parts if isinstance(matrix, Parts) else (matrix,)) if isinstance(part, SmallMatrix)]
    codes = [unpack(weight.words, FORMATS[CODES], weight.n, weight.k).to(torch.uint8) for weight in weights]
    return torch.cat(codes), torch.cat([weight.scales[0] for weight in weights])


def two_codes(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers of 16 bits as scale * (first + SECOND * second), codes as in `codes_of`. Scales are
    powers of two, so bf16 loses nothing down to 2**-13 of the row's largest number.
    """
    wide = matrix.float()
    scales = torch.exp2(torch.ceil(torch.log2(wide.abs().amax(1).clamp(min=2.0**-100) / LARGEST[E4M3])))
    if not bool(scales.isfinite().all()):
        raise argument_error("the weight of the head", 'finite with e4m3 weights and mode="mega"', "a NaN or an infinity")
    scaled = wide / scales[:, None]
    first = nearest_codes(scaled, E4M3)
    return first, nearest_codes((scaled - first.view(torch.float8_e4m3fn).float()) / SECOND, E4M3), scales


def alternating(both: Tensor) -> Tensor:
    """Rows of gate, then of up, in turn."""
    return torch.stack(both.chunk(2), 1).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class Packed:
    """tiles: int32 [tiles * ROWS * strips, 1, line]. scales: fp32; with e4m3 codes one for each row
    of `Schedule.padded_rows` of a layer, then of the next, and of the head.
    """

    tiles: Tensor
    scales: Tensor


def pack(weights: Weights, s: Schedule) -> Packed:
    like, pairs, padded = weights.embedding, s.config.pairs, s.padded_rows
    whole, scales = torch.empty(s.size * s.tile_words, dtype=torch.int32, device=like.device), list[Tensor]()
    at = 0

    def put(*found: Tensor) -> None:
        nonlocal at
        for tiles in found:
            whole[at : at + tiles.numel()] = tiles.flatten()
            at += tiles.numel()

    def numbers(matrix: Tensor | AnyMatrix, rows: int, *, of_both: bool = False) -> Tensor:
        """rows: as many scales are kept."""
        if isinstance(matrix, Tensor):
            return matrix
        codes, each = (alternating(found) if of_both else found for found in codes_of(matrix))
        scales.append(nn.functional.pad(each, (0, rows - len(each))))
        return codes

    for qkv, out, gate_up, down in zip(weights.qkv, weights.out, weights.gate_up, weights.down, strict=True):
        put(_wide([numbers(qkv, padded[0])], s, s.qkv_groups, pairs), _out(numbers(out, padded[1]), s))
        put(_wide([numbers(gate_up, padded[2], of_both=True)], s, s.gate_up_groups, pairs), *_down(numbers(down, padded[3]), s))
    if pairs == 1:
        put(_wide([weights.head], s, s.head_groups, 1))
        return Packed(whole.view(-1, 1, s.config.line), torch.zeros(1, device=like.device))
    first, second, each = two_codes(weights.head)
    put(_wide([first, second], s, s.head_groups, 1))
    return Packed(whole.view(-1, 1, s.config.line), torch.cat([*scales, each]))


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
