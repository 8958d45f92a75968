"""A model from a Hugging Face folder: config.json, safetensors, and perhaps a tokenizer.

transformers reads the files once ours have found them sound. A folder's own Python runs only where
the caller says so.
"""

import math
import re
import stat
import statistics
from pathlib import Path
from typing import Any

import torch

from ..launch.files import check_regular
from .files import TRUSTED, ModelFileError, file_error, read_by_others, read_json, some
from .quantized import OnProgress
from .quantized_folder import load_quantized
from .safetensors_header import StoredTensor, folder_weights
from .whole import check_counts, check_generation, outline, refuse_other_weights

LONGEST_CONFIG = 1 << 24
_VOCABULARIES = ("tokenizer", "vocab", "merges", "spiece", "sentencepiece", "tekken")
_LONGEST = {**dict.fromkeys(_VOCABULARIES, 1 << 26), "chat_template": LONGEST_CONFIG}  # by how their names begin
_NOT_SUPPORTED = {  # keys of config.json by which it names other files or replaces code
    "transformers_weights": "weights under transformers' own names",
    "fusion_config": "modules that are not fused",
}
_SWITCHES = ("output_attentions", "output_hidden_states", "return_dict", "use_cache")  # which nothing looks at before a forward
_BESIDE = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "processor_config.json")
_SPANS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}  # what a kind of layers needs
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def read_config(folder: Path, *, layers: int = 0, trust_remote_code: bool = False) -> Any:
    """transformers' config of a folder, whose files are checked first but not the weights.

    layers: keeps only the first; 0 keeps all.
    Raises: ModelFileError.
    """
    plain = _checked_json(folder, trust_remote_code)
    from transformers import AutoConfig

    changes: dict[str, Any] = {"num_hidden_layers": layers} if layers else {}
    if layers and isinstance(plain.get("layer_types"), list):
        changes["layer_types"] = plain["layer_types"][:layers]
    path = folder / "config.json"
    with read_by_others(path, "a config that transformers takes"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code, **changes)
        kinds, spans = getattr(config, "layer_types", None) or (), {kind: getattr(config, key, None) for kind, key in _SPANS.items()}
    for kind, span in spans.items():
        if kind in kinds and (type(span) is not int or span < 1):
            raise file_error(path, f"a config whose {_SPANS[kind]} is at least 1 token for its layers of {kind}", span)
    return config


def load_folder(
    folder: Path,
    dtype: torch.dtype,
    *,
    layers: int = 0,
    trust_remote_code: bool = False,
    device: torch.device | str = "cpu",
    on_progress: OnProgress | None = None,
) -> tuple[Any, Any | None]:
    """Model and tokenizer, which is None where the folder has none. Arguments: as `read_config`.

    device: where quantised weights are packed, and stay. on_progress: called with (modules packed,
        in all).
    Raises: ModelFileError.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    config = read_config(folder, layers=layers, trust_remote_code=trust_remote_code)
    stored = folder_weights(folder)
    if getattr(config, "quantization_config", None) is not None:
        kept = {name: tensor for name, tensor in stored.items() if not (layers and _beyond(name, layers))}
        with read_by_others(folder, "a folder whose generation_config.json transformers takes"):
            said = GenerationConfig.from_pretrained(folder) if (folder / "generation_config.json").exists() else None
        model = load_quantized(folder, config, dtype, kept, device=device, on_progress=on_progress)
        model.generation_config = said or GenerationConfig.from_model_config(config)
        check_generation(folder, model.generation_config.to_dict())
        return model, _tokenizer(folder, trust_remote_code)
    empty = outline(folder, config, dtype, stored=len(stored), trust_remote_code=trust_remote_code)
    _refuse_uneven_experts(folder, config.model_type, stored)
    _refuse_what_is_too_small(folder, empty, stored)
    own: dict[str, Any] = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    with read_by_others(folder, "a model that transformers takes"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, use_safetensors=True, ignore_mismatched_sizes=True, output_loading_info=True, **own
        )
    model, info = loaded
    unexpected = [name for name in info["unexpected_keys"] if not (layers and _beyond(name, layers))]
    refuse_other_weights(folder, config.model_type, info["missing_keys"], unexpected, info["mismatched_keys"])
    check_generation(folder, model.generation_config.to_dict())
    return model, _tokenizer(folder, trust_remote_code)


def _tokenizer(folder: Path, trust_remote_code: bool) -> Any | None:
    """None where the folder has none."""
    if not any((folder / name).exists() for name in _TOKENIZERS):
        return None
    from transformers import AutoTokenizer

    with read_by_others(folder, "a folder whose tokenizer transformers takes"):
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=trust_remote_code)
    vocabularies = sorted(tokenizer.vocab_files_names.values())
    if vocabularies and not any((folder / name).is_file() for name in vocabularies):
        raise file_error(folder, f"a folder with {' or '.join(vocabularies)} for its tokenizer", "none of them")
    return tokenizer


def _checked_json(folder: Path, trust_remote_code: bool) -> dict[str, Any]:
    """The content of config.json, where only regular files and folders lie in the folder."""
    try:
        for path in folder.iterdir():
            mode = path.stat().st_mode if path.exists() else path.lstat().st_mode
            if not stat.S_ISDIR(mode):
                check_regular(path, mode)
            for begin, most in _LONGEST.items():
                if path.name.startswith(begin) and path.stat().st_size > most:
                    raise file_error(path, f"a file of at most {most} bytes", path.stat().st_size)
    except OSError as error:
        raise ModelFileError(str(error)) from None
    found = {name: read_json(folder / name, LONGEST_CONFIG) for name in _BESIDE if (folder / name).exists()}
    path = folder / "config.json"
    config = found["config.json"]
    if (folder / "adapter_config.json").exists():
        raise file_error(folder, "a folder with a whole model, an adapter merged into it", "one with adapter_config.json")
    if any(folder.glob("shard-*.safetensors")):
        raise file_error(folder, "a folder with model.safetensors or an index of its files", "shards of a distributed checkpoint")
    for name in ("config.json", "generation_config.json"):
        check_generation(folder / name, found.get(name, {}))
    check_counts(path, config)
    _check_values(path, config, trust_remote_code)
    return config


def _check_values(path: Path, config: dict[str, Any], trust_remote_code: bool) -> None:
    if not isinstance(config.get("model_type"), str):
        raise file_error(path, 'an object with the name of a model as "model_type"', repr(config.get("model_type"))[:80])
    for key, be in _NOT_SUPPORTED.items():
        if key in config:
            raise file_error(path, f"a config of {be}", f"one with {key}")
    if config.get("return_dict") is False:
        raise file_error(path, "a config of a model that returns objects", "one with return_dict false")
    for key in _SWITCHES:
        if not isinstance(config.get(key), bool | None):
            raise file_error(path, f"a config with true or false as {key}", repr(config[key])[:80])
    for key, value in config.items():
        if key.endswith("_implementation") and "/" in str(value) and not trust_remote_code:
            raise file_error(path, f"a config that loads no kernels, or one loaded {TRUSTED}", f"{key} {value!r:.80}")


def _refuse_what_is_too_small(folder: Path, empty: Any, stored: dict[str, StoredTensor]) -> None:
    """Raises where the files can't hold the config's weights: transformers would make them up.

    It knows older names of weights and joins those of experts. So where a name is not the model's
    and about enough is there, it says what is missing. Quantised weights have other shapes and at
    least two bits each.
    """
    weights = dict(empty.named_parameters())
    quantised = getattr(empty.config, "quantization_config", None) is not None
    held = sum(4 * tensor.size if quantised else math.prod(tensor.shape) for tensor in stored.values())
    misshapen = [] if quantised else [(n, t.shape, weights[n].shape) for n, t in stored.items() if n in weights and t.shape != weights[n].shape]
    coded = [] if quantised else sorted(name for name, tensor in stored.items() if name in weights and not tensor.plain)
    if coded:
        raise file_error(folder, "a model of floating-point weights, or one whose config says how they are coded", f"codes in {some(coded)}")
    prefix = f"{empty.base_model_prefix}."
    if both := sorted(name for name in stored if name not in weights and prefix + name in stored):
        raise file_error(folder, "a model with one tensor for each weight", f"two, with and without {prefix!r}, of {some(both)}")
    renamed = not stored.keys() <= empty.state_dict().keys()
    short = sum(parameter.numel() for parameter in weights.values()) > (2 if renamed else 1) * held
    missing = weights.keys() - stored.keys() if short else ()
    refuse_other_weights(folder, empty.config.model_type, missing, (), misshapen)


def _refuse_uneven_experts(folder: Path, model_type: str, stored: dict[str, StoredTensor]) -> None:
    """Raises where one of a layer's experts lacks what another has, or has it in another shape.

    Once transformers has joined them, nobody can say which.
    """
    found: dict[str, dict[str, dict[str, tuple[int, ...]]]] = {}
    for name, tensor in stored.items():
        if expert := _EXPERT.fullmatch(name):
            found.setdefault(expert[1], {}).setdefault(expert[3], {})[expert[2]] = tensor.shape
    missing, misshapen = [], []
    for experts, parts in found.items():
        numbers = set().union(*parts.values())
        for part, shapes in parts.items():
            usual = statistics.mode(shapes.values())
            missing += [f"{experts}.{number}.{part}" for number in numbers - shapes.keys()]
            misshapen += [(f"{experts}.{number}.{part}", shape, usual) for number, shape in shapes.items() if shape != usual]
    refuse_other_weights(folder, model_type, missing, (), misshapen)


def _beyond(name: str, layers: int) -> bool:
    found = _LAYER.search(name)
    return found is not None and int(found[1]) >= layers
