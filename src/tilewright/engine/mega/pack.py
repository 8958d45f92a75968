"""Weights as the kernel reads them, and what it does not run. The packed matrices are a copy:
prompts are read with the model's own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...launch import Device, argument_error
from ..attention import GroupedAttention
from ..layers import Decoder
from ..mlp import GatedMlp
from ..weights import plain
from .shape import ROWS, Dims, Schedule, default_blocks, default_config, misfit, why_not

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")  # of which those without what `refuse` names


def dims_of_config(config: Any) -> Dims:
    """From a transformers config alone."""
    heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads[0]
    normed = config.model_type == "qwen3"
    return Dims(config.num_hidden_layers, config.hidden_size, *heads, head_dim, config.intermediate_size, config.vocab_size, normed)


def refuse(config: Any, device: Device, dtype: torch.dtype) -> None:
    """Raises ValueError for a model that the megakernel does not run, with the reason, from its
    transformers config.
    """
    if config.model_type not in MODEL_TYPES:
        raise argument_error("model.config.model_type", f'one of {", ".join(MODEL_TYPES)} with mode="mega"', config.model_type)
    if dtype not in (torch.bfloat16, torch.float16):
        raise argument_error("the model's dtype", 'bfloat16 or float16 with mode="mega"', str(dtype).removeprefix("torch."))
    biased = [name for name in ("attention_bias", "mlp_bias") if getattr(config, name, False)]
    if biased or config.model_type == "qwen2":
        raise argument_error("the model", 'without biases with mode="mega"', biased[0] if biased else config.model_type)
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True):
        raise argument_error("model.config.sliding_window", 'None with mode="mega"', window)
    dims = dims_of_config(config)
    tiles = default_config(device, dims.head_dim)
    reason = misfit(dims, tiles) or why_not(dims, default_blocks(dims, device, tiles), tiles)
    if reason:
        raise argument_error("the model's sizes", 'sizes that fit the megakernel\'s tiles with mode="mega"', reason)


def refuse_outline(source: str, where: torch.device, dtype: torch.dtype, *, trust_remote_code: bool = False) -> None:
    """As `refuse`, of a model that is not loaded yet."""
    from ...models import outline_of

    refuse(outline_of(source, dtype=dtype, trust_remote_code=trust_remote_code).config, Device.of(torch.empty(0, device=where)), dtype)


def packed_bytes(config: Any, device: Device) -> int:
    """Of a transformers config's packed matrices."""
    dims = dims_of_config(config)
    tiles = default_config(device, dims.head_dim)
    return Schedule(dims, default_blocks(dims, device, tiles), tiles).size * 4 * ROWS * tiles.strips * tiles.line


def refuse_model(model: Any, device: Device) -> None:
    """As `refuse`, of a model that is built: its biases too."""
    refuse(model.config, device, model.dtype)
    biased = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module.bias is not None]
    if biased:
        raise argument_error("the model", 'without biases with mode="mega"', f"one of {biased[0]}")


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's matrices, one for each layer: qkv with rows of queries, keys, values; gate and up
    in turn. head_norms: weights of a layer's queries' and keys' norms.
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
        a = attentions[0]
        head_norms = tuple((a.q_norm.weight, a.k_norm.weight) for a in attentions if a.q_norm is not None and a.k_norm is not None)
        inter = mlps[0].down.columns
        dims = Dims(len(mlps), decoder.hidden, a.q_heads, a.kv_heads, a.head_dim, inter, decoder.vocab, bool(head_norms))
        norms = [norm.weight for layer in decoder.layers for norm in (layer.attention_norm, layer.mlp_norm) if norm is not None]
        return Weights(
            dims,
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


def widened(tensor: Tensor, columns: int) -> Tensor:
    """With zeros behind each row, up to so many columns."""
    missing = columns - tensor.shape[-1]
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor.contiguous()


def _taken(rows: Tensor, index: Tensor) -> Tensor:
    """rows[index], zeros where the index lies behind the last."""
    found = rows[index.clamp(max=len(rows) - 1)]
    return found.masked_fill_((index >= len(rows))[..., None], 0)


def _wide(matrix: Tensor, schedule: Schedule, groups: int) -> Tensor:
    """[tiles, words of a tile]: group g has rows g * fields * ROWS + field * ROWS + s."""
    form, strips, fields = schedule.wide, schedule.config.strips, schedule.fields(schedule.wide)
    columns = 2 * schedule.hidden_words
    rows = torch.arange(groups * schedule.wide_rows, device=matrix.device)
    words = as_words(widened(_taken(matrix, rows), columns))
    tiles = words.view(groups, fields, ROWS, form.sets, strips, form.width).permute(0, 3, 2, 4, 1, 5)
    return tiles.reshape(groups * form.sets, -1)


def _narrow_rows(schedule: Schedule, width: int, groups: int, device: torch.device) -> Tensor:
    """[groups, ROWS, strips, fields]: output of each row of a block's tiles, from its first on."""
    strips, fields = schedule.config.strips, schedule.config.line // width
    group, row, strip, field = (torch.arange(n, device=device) for n in (groups, ROWS, strips, fields))
    word = ((row[None, :, None, None] % 4 * strips + strip[None, None, :, None]) * groups + group[:, None, None, None]) * fields + field
    return 2 * word + row[None, :, None, None] // 4


def _out(matrix: Tensor, schedule: Schedule) -> Tensor:
    d, parts, words = schedule.dims, schedule.split.out_parts, schedule.out_words
    device = matrix.device
    own = _narrow_rows(schedule, schedule.out.width, schedule.out_groups, device)
    part = torch.arange(parts, device=device)[:, None, None, None, None]
    rows = torch.where(own < 2 * words, own + 2 * words * part, len(matrix))
    heads = torch.arange(d.q_heads * d.head_dim, device=device).view(d.q_heads, 1, 1, 1, 1, 1, d.head_dim)
    found = matrix[rows.clamp(max=len(matrix) - 1)[None, ..., None], heads].masked_fill_((rows >= len(matrix))[None, ..., None], 0)
    return as_words(found.contiguous()).view(schedule.attending * schedule.out_groups, -1)


def inner_columns(schedule: Schedule, device: torch.device) -> list[Tensor]:
    """Of each class of blocks [blocks, words, 2]: the inner columns behind each word that a block's
    `down` is multiplied with; beyond `inter` where it has none.
    """
    fields, turn, inter = schedule.fields(schedule.wide), schedule.slots // 2, schedule.dims.inter
    found, start = [], 0
    for blocks, share in schedule.classes:
        words = [torch.zeros(0, dtype=torch.int64, device=device)]
        for begin in range(0, share.gate_up, turn):
            groups = min(turn, share.gate_up - begin)
            p = torch.arange(2 * groups * fields, device=device)
            rest, f = p // fields, p % fields
            words.append((begin + rest // 2) * schedule.wide_rows // 2 + f * (ROWS // 2) + rest % 2 * 2)
        before = start + torch.arange(blocks, device=device)[:, None] * share.gate_up
        columns = (before * schedule.wide_rows // 2 + torch.cat(words))[..., None] + torch.arange(2, device=device)
        missing = share.sets * schedule.split.down.width - columns.shape[1]
        found.append(torch.nn.functional.pad(columns, (0, 0, 0, missing), value=inter))
        start += blocks * share.gate_up
    return found


def _down(matrix: Tensor, schedule: Schedule) -> Tensor:
    width, inter = schedule.split.down.width, matrix.shape[1]
    rows = _narrow_rows(schedule, width, schedule.down_groups, matrix.device)[None, :, None, :, :, :, None]
    tiles = []
    for columns, (blocks, share) in zip(inner_columns(schedule, matrix.device), schedule.classes, strict=True):
        columns = columns.view(blocks, 1, share.sets, 1, 1, 1, 2 * width)
        found = matrix[rows.clamp(max=len(matrix) - 1), columns.clamp(max=inter - 1)]
        found.masked_fill_((rows >= len(matrix)) | (columns >= inter), 0)
        tiles.append(as_words(found).reshape(blocks * schedule.down_groups * share.sets, ROWS * schedule.config.strips * schedule.config.line))
    return torch.cat(tiles)


def packed_tiles(weights: Weights, schedule: Schedule) -> Iterator[Tensor]:
    """Tiles of each matrix [tiles, words], in the order in which they lie in W."""
    gate_up_groups = sum(blocks * share.gate_up for blocks, share in schedule.classes)
    for qkv, out, gate_up, down in zip(weights.qkv, weights.out, weights.gate_up, weights.down, strict=True):
        yield _wide(qkv, schedule, schedule.qkv_groups)
        yield _out(out, schedule)
        yield _wide(gate_up, schedule, gate_up_groups)
        yield _down(down, schedule)
    yield _wide(weights.head, schedule, schedule.head_groups)


def pack(weights: Weights, schedule: Schedule) -> Tensor:
    """int32 [tiles * ROWS * strips, 1, line]."""
    c = schedule.config
    whole = torch.empty(schedule.size, ROWS * c.strips * c.line, dtype=torch.int32, device=weights.embedding.device)
    at = 0
    for tiles in packed_tiles(weights, schedule):
        whole[at : at + len(tiles)] = tiles
        at += len(tiles)
    return whole.view(-1, 1, c.line)


def stream_words(rows: Tensor, schedule: Schedule) -> Tensor:
    """Rows as long as the residual stream, as words."""
    return as_words(widened(rows, 2 * schedule.hidden_words))


def head_norm_words(weights: Weights) -> Tensor:
    """int32 [layers or 1, 4, head words]: of queries, their partners, keys, their partners."""
    d = weights.dims
    if not weights.head_norms:
        return torch.zeros(1, 4, d.head_dim // 2, dtype=torch.int32, device=weights.embedding.device)
    half = d.head_dim // 2
    rows = [torch.stack([w for norm in pair for w in (norm, norm.roll(half))]) for pair in weights.head_norms]
    return as_words(torch.stack(rows))


def rope_words(weights: Weights) -> Tensor:
    """fp32 [max_len, 4, head words]: cosines of both neighbours, sines as they go with the
    partners.
    """
    cos, sin = torch.cat((weights.cos, weights.cos), 1), torch.cat((-weights.sin, weights.sin), 1)
    return torch.stack((cos[:, 0::2], cos[:, 1::2], sin[:, 0::2], sin[:, 1::2]), 1).contiguous()
