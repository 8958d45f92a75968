"""A model from a GGUF file: its weights expanded or kept small, with transformers' names.

The tensor names and the order of rotated rows are llama.cpp's:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import importlib
from collections.abc import Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..interpret.threads import cores
from .files import file_error, read_by_others
from .gguf_header import EXPANDED_KINDS, GgufHeader, GgufTensor, read_header
from .gguf_rotations import scaled_rotations
from .gguf_tensors import KEPT, from_gguf
from .quantized import OnProgress, QuantizedLinear, check_dtype
from .whole import check_counts, check_generation, outline, refuse_other_weights

_TYPES = {int: 11, float: 12, bool: 7, str: 8, bytes: 8}  # GGUFValueType
AT_ONCE = 1 << 17  # elements that are expanded together, of whole blocks: gguf itself takes 16 rows, which may be short
LONGEST_TOKEN = 512  # bytes, where there are no merges; sentencepiece makes none of more than 64
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


def load_gguf(
    path: Path,
    dtype: torch.dtype,
    on_progress: OnProgress | None = None,
    *,
    layers: int = 0,
    keep: bool = False,
    device: torch.device | str = "cpu",
) -> tuple[Any, Any]:
    """Model and tokenizer of a file.

    Args:
        path: the file.
        dtype: the model's; tensors are expanded to it.
        on_progress: called with (tensors done, tensors in all).
        layers: keeps only the first; 0 keeps all.
        keep: matrices of `KEPT` kinds, the head's too, stay small (gguf_tensors.py).
        device: where these are packed, and stay.
    Raises: ModelFileError where the file is not sound, lacks a weight of the model, or has one that
        the model lacks; where `keep` finds nothing to keep. ValueError for `keep` in another dtype
        than bfloat16.
    """
    if keep:
        check_dtype(dtype)
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.initialization import no_init_weights

    header = read_header(path)
    config = read_config(path, header, layers=layers)
    tensors = {tensor: parameter_name(tensor.name) for tensor in header.tensors if not (layers and _beyond(tensor.name, layers))}
    _compare(path, outline(path, config, dtype, stored=len(tensors)), tensors)
    _check_tokens(path, header.metadata, config.vocab_size)
    with read_by_others(path, "a GGUF file whose tokenizer transformers takes"), _read_before(header):
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    with read_by_others(path, "a GGUF file of a model of the llama kind"), no_init_weights():
        # Not from_pretrained(gguf_file=): it asks for accelerate.
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        small = _small(model, tensors) if keep else {}
        if keep and not small:
            raise file_error(path, f"a GGUF file with matrices of {', '.join(KEPT)}", "none of them")
        _fill(model, path, header, tensors, dtype, on_progress, small, device)
        model.generation_config = GenerationConfig.from_model_config(config)
    check_generation(path, model.generation_config.to_dict())
    return model, tokenizer


def read_config(path: Path, header: GgufHeader, *, layers: int = 0) -> Any:
    """transformers' config of a file. Raises ModelFileError."""
    from transformers import AutoConfig

    if not isinstance(header.metadata.get("general.architecture"), str):
        raise file_error(path, "a GGUF file with a name as general.architecture", header.metadata.get("general.architecture"))
    check_counts(path, header.metadata)
    scaled = scaled_rotations(path, header.metadata)
    if scaled and any(tensor.name == ROPE_FACTORS for tensor in header.tensors):
        raise file_error(path, f"a GGUF file with {ROPE_FACTORS} or rope.scaling, not both", "both")
    with read_by_others(path, "a GGUF file of a model that transformers knows"), _read_before(header):
        config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
        config.num_hidden_layers = layers or config.num_hidden_layers
        if scaled:
            config.rope_parameters = {**config.rope_parameters, **scaled}
    return config


@contextmanager
def _read_before(header: GgufHeader) -> Iterator[None]:
    """Lets transformers, which would read the header twice for the config and three times for the
    tokenizer, have ours: of a vocabulary theirs take up to 20 times as long.
    """
    gguf: Any = importlib.import_module("gguf")
    readers: list[Any] = []
    with suppress(ImportError):  # transformers before 5.20 has no reader of its own, and takes the tokenizer from gguf's
        theirs = importlib.import_module("transformers.integrations.gguf")
        readers = [theirs, importlib.import_module(f"{theirs.__name__}.reader")]
    fields = {key: _field(key, value, counted=bool(readers) and key.startswith("tokenizer.")) for key, value in header.metadata.items()}
    reader = SimpleNamespace(fields=fields, tensors=header.tensors)

    def metadata(path: Any, string_arrays: Container[str] = ()) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Keys and values, of a list of texts its length unless it is asked for, and names of
        tensors.
        """
        found = {key: _texts(value, key in string_arrays) for key, value in header.metadata.items()}
        return found, tuple(tensor.name for tensor in header.tensors)

    ours: list[tuple[Any, str, Any]] = [(gguf, "GGUFReader", lambda path: reader), *((module, "read_gguf_metadata", metadata) for module in readers)]
    before = [(module, name, getattr(module, name)) for module, name, _ in ours]
    for module, name, value in ours:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _texts(value: Any, wanted: bool) -> Any:
    if not (isinstance(value, list) and value and isinstance(value[0], bytes)):
        return value
    return [item.decode("utf-8") for item in value] if wanted else len(value)


def _field(key: str, value: Any, *, counted: bool) -> SimpleNamespace:
    """One of GGUFReader's: of each item a sequence of numbers or of the bytes of a text.

    counted: the list of tokens is so many zeros, and any other list is one. A config takes nothing
        else from a vocabulary, and transformers parses each of its texts anew, twice.
    """
    if counted and isinstance(value, list):
        return SimpleNamespace(types=[_TYPES[int]], parts=[(0,)], data=bytes(len(value) if key.endswith(".tokens") else 1))
    items = value if isinstance(value, list) else [value]
    types = [_TYPES[type(item)] for item in items[:1]]
    parts = [item if isinstance(item, bytes) else item.encode() if isinstance(item, str) else (item,) for item in items]
    return SimpleNamespace(types=[9, *types] if items is value else types, parts=parts, data=range(len(items)))


def _compare(path: Path, empty: Any, tensors: dict[GgufTensor, str]) -> None:
    """Raises unless a file has the weights of `empty`, a model on the meta device, and no more."""
    weights = {name: tuple(weight.shape) for name, weight in empty.named_parameters()}
    if any(tensor.name == ROPE_FACTORS for tensor in tensors):
        weights[ROPE_FACTORS] = tuple(empty.model.rotary_emb.inv_freq.shape)
    found = {name: tensor.shape for tensor, name in tensors.items()}
    misshapen = [(name, shape, weights[name]) for name, shape in found.items() if name in weights and weights[name] != shape]
    refuse_other_weights(path, empty.config.model_type, weights.keys() - found.keys(), found.keys() - weights.keys(), misshapen)
    if len(found) < len(tensors):
        raise file_error(path, "a GGUF file with one tensor for each weight", "two for one")


def _check_tokens(path: Path, metadata: dict[str, Any], rows: int) -> None:
    """Raises for a token that the model has no row for, and for ones that nobody could read in
    time: where a file has no merges, transformers tries all cuts of each token.
    """
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        return  # transformers says so
    if len(tokens) > rows:
        raise file_error(path, f"a GGUF file with at most {rows} tokens, the rows of its model", len(tokens))
    longest = max((len(token) for token in tokens if isinstance(token, bytes)), default=0)
    if "tokenizer.ggml.merges" not in metadata and longest > LONGEST_TOKEN:
        raise file_error(path, f"a GGUF file whose tokens have at most {LONGEST_TOKEN} bytes, for it has no merges", longest)


def _small(model: Any, tensors: dict[GgufTensor, str]) -> dict[str, str]:
    """The kind of each weight that can stay small: of Linear modules that are not tied."""
    from gguf import GGMLQuantizationType

    found = {name: GGMLQuantizationType(tensor.kind).name for tensor, name in tensors.items()}
    linears = {f"{path}.weight" for path, module in model.named_modules() if type(module) is nn.Linear}
    return {name: kind for name, kind in found.items() if kind in KEPT and name in linears}


def _fill(
    model: Any,
    path: Path,
    header: GgufHeader,
    tensors: dict[GgufTensor, str],
    dtype: torch.dtype,
    on_progress: OnProgress | None,
    small: dict[str, str],
    device: torch.device | str,
) -> None:
    config, weights = model.config, dict[str, Tensor]()
    bytes_of_file = np.memmap(path, mode="c").view(np.ndarray)  # torch takes no array that is read-only
    paired = header.metadata["general.architecture"] == "llama"
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads} if paired else {}

    def values_of(tensor: GgufTensor, name: str) -> Tensor:
        stored = bytes_of_file[tensor.begin : tensor.begin + tensor.size]
        values = torch.from_numpy(stored.reshape(*tensor.shape[:-1], -1) if name in small else _expanded(path, stored, tensor))
        for part, count in heads.items():
            values = halves_from_pairs(values, count) if part in name else values
        return values if name in small or name == ROPE_FACTORS else values.to(dtype)

    with ThreadPoolExecutor(cores()) as pool:  # numpy computes without the lock of Python; no thread waits for another
        for done, (name, values) in enumerate(zip(tensors.values(), pool.map(values_of, tensors, tensors.values()), strict=True)):
            if name == ROPE_FACTORS:
                if not bool((values.isfinite() & (values > 0)).all()):
                    raise file_error(path, f"a GGUF file with positive numbers as {ROPE_FACTORS}", "others")
                _scale_rope(model, values)
            elif name in small:
                place = name.removesuffix(".weight")
                model.set_submodule(place, QuantizedLinear(from_gguf(values.to(device), small[name]), model.get_submodule(place).bias))
            else:
                weights[name] = values
            if on_progress:
                on_progress(done + 1, len(tensors))
    model.load_state_dict(weights, strict=False, assign=True)  # compared before
    model.tie_weights()


def _expanded(path: Path, stored: np.ndarray, tensor: GgufTensor) -> np.ndarray:
    """The values of a tensor, not in the file's memory, which may change."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    kind = GGMLQuantizationType(tensor.kind)
    block, size = GGML_QUANT_SIZES[kind]
    blocks = stored.reshape(-1, size)
    values = np.empty((len(blocks), block), np.float32)
    step = max(1, AT_ONCE // block)
    for at in range(0, len(blocks), step):
        try:
            values[at : at + step] = dequantize(blocks[at : at + step].reshape(1, -1), kind).reshape(-1, block)
        except NotImplementedError:  # by the gguf package, of kinds such as Q8_1
            raise file_error(path, EXPANDED_KINDS, f"{tensor.name} in {kind.name}") from None
    return values.reshape(tensor.shape)


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


def _beyond(name: str, layers: int) -> bool:
    block = name.split(".")[1] if name.startswith("blk.") else ""
    return block.isdigit() and int(block) >= layers


def _scale_rope(model: Any, factors: Tensor) -> None:
    """Applies the file's divisors of the rotation frequencies (long-context Llama 3).

    The config does not have them.
    """
    rotary = model.model.rotary_emb
    if rotary.rope_type == "default":
        rotary.inv_freq.div_(factors)
        rotary.original_inv_freq.div_(factors)
