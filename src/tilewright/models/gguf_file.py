"""Weights of a GGUF file, expanded, with transformers' names.

The tensor names and the order of rotated rows are llama.cpp's:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..launch import argument_error

OnProgress = Callable[[int, int], None]

ROPE_FACTORS = "rope_freqs.weight"
_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load_weights(model: Any, path: Path, dtype: torch.dtype, on_progress: OnProgress | None = None) -> None:
    """Fills `model` with the weights of the file that its config came from.

    Args:
        model: a transformers causal language model of the llama kind, on a CPU.
        path: the file.
        dtype: the model's; tensors are expanded to it.
        on_progress: called with (tensors done, tensors in all).
    Raises: ValueError if the file lacks a weight of the model, or has one that the model lacks.
    """
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    config = model.config
    weights: dict[str, Tensor] = {}
    for done, tensor in enumerate(reader.tensors):
        values = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        if tensor.name == ROPE_FACTORS:
            _scale_rope(model, values)
        else:
            name = parameter_name(tensor.name)
            if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
                values = halves_from_pairs(values, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
            weights[name] = values.to(dtype)
        if on_progress:
            on_progress(done + 1, len(reader.tensors))
    missing, unknown = model.load_state_dict(weights, strict=False)
    model.tie_weights()
    missing = [name for name in missing if not (config.tie_word_embeddings and name == "lm_head.weight")]
    if missing or unknown:
        raise argument_error("the GGUF file", f"a complete {config.model_type} model", f"missing {missing}, unknown {unknown}")


def parameter_name(tensor_name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; an unknown name is
    returned as it is.
    """
    stem, _, kind = tensor_name.rpartition(".")
    if stem in _ENDS:
        return f"{_ENDS[stem]}.{kind}"
    block, _, part = stem.rpartition(".")
    if block.startswith("blk.") and part in _LAYER:
        return f"model.layers.{block.removeprefix('blk.')}.{_LAYER[part]}.{kind}"
    return tensor_name


def halves_from_pairs(rows: Tensor, heads: int) -> Tensor:
    """Reorders the rows of each head. llama.cpp rotates rows (0, 1), (2, 3), ... together;
    transformers rotates row i with row i + head_dim / 2.
    """
    pairs: Tensor = rows.unflatten(0, (heads, -1, 2))
    return pairs.transpose(1, 2).reshape(rows.shape)


def _scale_rope(model: Any, factors: Tensor) -> None:
    """Applies the file's divisors of the rotation frequencies (long-context Llama 3).

    The config does not have them.
    """
    rotary = model.model.rotary_emb
    if rotary.rope_type == "default":
        rotary.inv_freq.div_(factors)
        rotary.original_inv_freq.div_(factors)
